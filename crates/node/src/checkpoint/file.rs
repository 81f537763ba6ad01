//! The file of a shard: safetensors, so that others can read it. Everything that is needed to go on is in it: the values of a table in
//! ranges, each a tensor of its own, the optimizer's state beside them, and the numbers of steps as metadata.

use paramill_core::checkpoint::{CutRange, Digest, FORMAT, ShardCut, SkippedRun, TableCut, Wanted};
use paramill_core::types::Clock;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// The longest header that is read.
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// The key of the metadata that Paramill reads.
const KEY: &str = "paramill";

/// What the metadata says.
#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    format: u32,
    job: String,
    checkpoint: String,
    clock: Clock,
    server: u32,
    core: u32,
    /// In the order of the data: the parameters of a table in all its ranges, then each slot in the same order.
    tables: Vec<Table>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Table {
    name: String,
    shape: Vec<u64>,
    version: Clock,
    slots: usize,
    ranges: Vec<CutRange>,
    skipped: Vec<SkippedRun>,
}

impl Table {
    fn elements(&self) -> Option<u64> {
        self.ranges.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len))
    }
}

/// The digest of some bytes.
pub(super) fn digest(bytes: &[u8]) -> Digest {
    Digest(xxhash_rust::xxh3::xxh3_128(bytes))
}

/// Passes bytes on, and knows their digest.
pub(super) struct Digesting<W> {
    out: W,
    hash: Xxh3,
    bytes: u64,
}

impl<W> Digesting<W> {
    pub(super) fn new(out: W) -> Digesting<W> {
        Digesting { out, hash: Xxh3::new(), bytes: 0 }
    }

    /// Where they went, their number and their digest.
    pub(super) fn finish(self) -> (W, u64, Digest) {
        let digest = Digest(self.hash.digest128());
        (self.out, self.bytes, digest)
    }
}

impl<W: Write> Write for Digesting<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes what a shard held.
pub(super) fn write(cut: &ShardCut, out: &mut dyn Write) -> io::Result<()> {
    let header = header(cut)?;
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for table in &cut.tables {
        out.write_all(bytemuck::cast_slice(&table.parameters))?;
        for slot in &table.slots {
            out.write_all(bytemuck::cast_slice(slot))?;
        }
    }
    Ok(())
}

fn header(cut: &ShardCut) -> io::Result<String> {
    let table = |table: &TableCut| Table {
        name: table.name.clone(),
        shape: table.shape.clone(),
        version: table.version,
        slots: table.slots.len(),
        ranges: table.ranges.clone(),
        skipped: table.skipped.clone(),
    };
    let contents = Contents {
        format: FORMAT,
        job: cut.job.clone(),
        checkpoint: cut.folder.clone(),
        clock: cut.clock,
        server: cut.shard.server.0,
        core: cut.shard.core,
        tables: cut.tables.iter().map(table).collect(),
    };
    let mut tensors = Map::new();
    tensors.insert("__metadata__".into(), json!({ KEY: serde_json::to_string(&contents)? }));
    let mut start = 0;
    for table in &contents.tables {
        for array in 0..=table.slots {
            for range in &table.ranges {
                let whole: u64 = table.shape.iter().product();
                let (mut name, shape) = match range.len == whole {
                    true => (table.name.clone(), table.shape.clone()),
                    false => (
                        format!("{}[{}:{}]", table.name, range.start, range.start + range.len),
                        vec![range.len],
                    ),
                };
                if let Some(slot) = array.checked_sub(1) {
                    name.push_str(&format!("#slot{slot}"));
                }
                // Names of tables are free: one may be what another one's part is called.
                while tensors.contains_key(&name) {
                    name.push('\'');
                }
                let end = start + range.len * 4;
                tensors.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] }));
                start = end;
            }
        }
    }
    let mut text = serde_json::to_string(&Value::Object(tensors))?;
    // Data begins at a multiple of 8, as the format wants it.
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    Ok(text)
}

/// Reads a file in parts. The digest of a file says that it is what was written; only then is what it says to be believed.
pub(super) struct Reader {
    file: File,
    tables: Vec<Table>,
    /// The first byte of the data.
    start: u64,
}

impl Reader {
    /// Reads the header. The error says why this is no file of a checkpoint.
    pub(super) fn open(path: &Path) -> Result<Reader, String> {
        let text = |error: io::Error| error.to_string();
        let no_checkpoint = || "it is no file of a checkpoint".to_owned();
        let mut file = File::open(path).map_err(text)?;
        let length = file.metadata().map_err(text)?.len();
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).map_err(|_| no_checkpoint())?;
        let header = u64::from_le_bytes(bytes);
        if header > MAX_HEADER_BYTES || header > length.saturating_sub(8) {
            return Err(no_checkpoint());
        }
        let mut bytes = vec![0; header as usize];
        file.read_exact(&mut bytes).map_err(text)?;
        let value: Value = serde_json::from_slice(&bytes).map_err(|_| no_checkpoint())?;
        let contents = value["__metadata__"][KEY].as_str().ok_or_else(no_checkpoint)?;
        let contents: Contents = serde_json::from_str(contents).map_err(|_| no_checkpoint())?;
        let (start, mut data) = (8 + header, 0u64);
        for table in &contents.tables {
            let arrays = (table.slots as u64).checked_add(1).and_then(|arrays| arrays.checked_mul(4));
            let bytes =
                table.elements().zip(arrays).and_then(|(elements, bytes)| elements.checked_mul(bytes));
            data = bytes.and_then(|bytes| data.checked_add(bytes)).ok_or_else(no_checkpoint)?;
        }
        if start.checked_add(data) != Some(length) {
            return Err(no_checkpoint());
        }
        Ok(Reader { file, tables: contents.tables, start })
    }

    /// Whether it has something of what is wanted.
    pub(super) fn has(&self, wanted: &Wanted) -> bool {
        let tables = self.tables.iter().filter(|table| table.name == wanted.name);
        tables.flat_map(|table| &table.ranges).any(|range| overlaps(range, wanted).next().is_some())
    }

    /// Adds what it has of a table, in pieces.
    pub(super) fn read(&mut self, wanted: &Wanted, pieces: &mut Vec<TableCut>) -> Result<(), String> {
        let Reader { file, tables, start } = self;
        let mut table_start = *start;
        for table in tables {
            let elements = table.elements().unwrap_or(0);
            let mut range_start = table_start;
            for range in &table.ranges {
                for overlap in overlaps(range, wanted).filter(|_| table.name == wanted.name) {
                    let len = overlap.end - overlap.start;
                    let mut at = range_start + (overlap.start - range.start) * 4;
                    let mut arrays = Vec::with_capacity(table.slots + 1);
                    for _ in 0..=table.slots {
                        arrays.push(read_values(file, at, len)?);
                        at += elements * 4;
                    }
                    let parameters = arrays.remove(0);
                    pieces.push(TableCut {
                        name: table.name.clone(),
                        shape: table.shape.clone(),
                        version: table.version,
                        ranges: vec![CutRange { start: overlap.start, len, steps: range.steps }],
                        skipped: table.skipped.iter().filter_map(|run| within(run, &overlap)).collect(),
                        parameters,
                        slots: arrays,
                    });
                }
                range_start += range.len * 4;
            }
            table_start += elements * 4 * (table.slots as u64 + 1);
        }
        Ok(())
    }
}

/// The elements of a range that are wanted.
fn overlaps(range: &CutRange, wanted: &Wanted) -> impl Iterator<Item = Range<u64>> {
    let elements = range.elements();
    let overlap = move |wanted: &Range<u64>| wanted.start.max(elements.start)..wanted.end.min(elements.end);
    wanted.ranges.iter().map(overlap).filter(|overlap| overlap.start < overlap.end)
}

fn within(run: &SkippedRun, elements: &Range<u64>) -> Option<SkippedRun> {
    let (start, end) = (run.start.max(elements.start), run.start.saturating_add(run.len).min(elements.end));
    (start < end).then(|| SkippedRun { start, len: end - start, skipped: run.skipped })
}

fn read_values(file: &mut File, at: u64, len: u64) -> Result<Vec<f32>, String> {
    let text = |error: io::Error| error.to_string();
    let len = usize::try_from(len).map_err(|_| "it is larger than memory".to_owned())?;
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| "there is no memory for what it holds".to_owned())?;
    values.resize(len, 0f32);
    file.seek(SeekFrom::Start(at)).map_err(text)?;
    file.read_exact(bytemuck::cast_slice_mut(&mut values)).map_err(text)?;
    Ok(values)
}
