//! The file of a shard: safetensors, so that others can read it. Everything that is needed to go on is in it: the values of a table in
//! ranges, each a tensor of its own, the optimizer's state beside them, and the numbers of steps as metadata. That of a worker has what it
//! kept from servers, and its application's notes as metadata.

use super::storage::Source;
use paramill_core::checkpoint::{
    ArrayKind, CutRange, Digest, FORMAT, SavedFile, ShardCut, SkippedRun, TableCut, Wanted, WorkerArray,
    WorkerCut,
};
use paramill_core::limits;
use paramill_core::types::{Clock, WorkerId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use xxhash_rust::xxh3::Xxh3;

/// The key of the metadata that Paramill reads.
const KEY: &str = "paramill";
const NO_CHECKPOINT: &str = "it is no file of a checkpoint";

/// What the metadata says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Contents {
    pub(super) format: u32,
    pub(super) job: String,
    pub(super) checkpoint: String,
    pub(super) clock: Clock,
    /// Whose file it is; a copy of a whole checkpoint is nobody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) server: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) core: Option<u32>,
    /// In the order of the data: the parameters of a table in all its ranges, then each slot in the same order.
    pub(super) tables: Vec<Table>,
    /// Behind them: what workers kept, array by array.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) workers: Vec<Kept>,
}

/// What a worker kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Kept {
    worker: WorkerId,
    arrays: Vec<Array>,
    /// In hexadecimal digits.
    notes: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Array {
    table: String,
    kind: ArrayKind,
    len: u64,
    /// In hexadecimal digits.
    state: String,
}

impl Kept {
    /// Bytes of its arrays.
    fn bytes(&self) -> Option<u64> {
        let elements = self.arrays.iter().try_fold(0u64, |sum, array| sum.checked_add(array.len));
        elements.and_then(|elements| elements.checked_mul(4))
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Result<Vec<u8>, String> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    let pair = |pair: &[u8]| Some((digit(pair.first()?)? << 4 | digit(pair.get(1)?)?) as u8);
    let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(pair).collect();
    bytes.ok_or_else(|| NO_CHECKPOINT.to_owned())
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Table {
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

    /// Bytes of its parameters and slots.
    fn bytes(&self) -> Option<u64> {
        let arrays = (self.slots as u64).checked_add(1).and_then(|arrays| arrays.checked_mul(4));
        self.elements().zip(arrays).and_then(|(elements, bytes)| elements.checked_mul(bytes))
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
    let header = header(&contents(cut), Map::new())?;
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

fn contents(cut: &ShardCut) -> Contents {
    let table = |table: &TableCut| Table {
        name: table.name.clone(),
        shape: table.shape.clone(),
        version: table.version,
        slots: table.slots.len(),
        ranges: table.ranges.clone(),
        skipped: table.skipped.clone(),
    };
    Contents {
        format: FORMAT,
        job: cut.job.clone(),
        checkpoint: cut.folder.clone(),
        clock: cut.clock,
        server: Some(cut.shard.server.0),
        core: Some(cut.shard.core),
        tables: cut.tables.iter().map(table).collect(),
        workers: Vec::new(),
    }
}

/// Writes what a worker kept. The same is written whenever it is the same.
pub(super) fn write_worker(cut: &WorkerCut, out: &mut dyn Write) -> io::Result<()> {
    let array = |array: &WorkerArray| Array {
        table: array.table.clone(),
        kind: array.kind,
        len: array.values.len() as u64,
        state: to_hex(&array.state),
    };
    let kept = Kept {
        worker: cut.worker,
        arrays: cut.arrays.iter().map(array).collect(),
        notes: cut.notes.iter().map(|(name, note)| (name.clone(), to_hex(note))).collect(),
    };
    let contents = Contents {
        format: FORMAT,
        job: cut.job.clone(),
        checkpoint: cut.folder.clone(),
        clock: cut.clock,
        server: None,
        core: None,
        tables: Vec::new(),
        workers: vec![kept],
    };
    let header = header(&contents, Map::new())?;
    if header.len() as u64 > limits::MAX_CHECKPOINT_HEADER_BYTES {
        return Err(io::Error::other("there are too many rows that are held back"));
    }
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    cut.arrays.iter().try_for_each(|array| out.write_all(bytemuck::cast_slice(&array.values)))
}

/// What a worker kept, from a file that has to be what its manifest says.
pub(super) fn read_worker(saved: &SavedFile, bytes: &[u8]) -> Result<WorkerCut, String> {
    if (bytes.len() as u64, digest(bytes)) != (saved.bytes, saved.digest) {
        return Err(format!("{} is damaged: it has other contents than it was written with", saved.name));
    }
    let unusable = |why: String| format!("{}: {why}", saved.name);
    let first = *bytes.first_chunk().ok_or_else(|| unusable(NO_CHECKPOINT.into()))?;
    let header = header_bytes(first, saved.bytes).map_err(unusable)?;
    let (text, mut data) = bytes[8..].split_at(header);
    let contents = parse(text, saved.bytes).map_err(unusable)?.0;
    let Some(kept) = contents.workers.first() else { return Err(unusable(NO_CHECKPOINT.into())) };
    let values = |len: u64| {
        let (own, rest) = data.split_at((len * 4) as usize);
        data = rest;
        Ok(own
            .chunks_exact(4)
            .map(|value| f32::from_le_bytes([value[0], value[1], value[2], value[3]]))
            .collect())
    };
    cut(&contents, kept, values).map_err(unusable)
}

/// A worker's part of some contents, with values that are read one after the other.
fn cut(
    contents: &Contents,
    kept: &Kept,
    mut values: impl FnMut(u64) -> Result<Vec<f32>, String>,
) -> Result<WorkerCut, String> {
    let array = |Array { table, kind, len, state }: &Array| {
        let values = values(*len)?;
        Ok(WorkerArray { table: table.clone(), kind: *kind, values, state: from_hex(state)? })
    };
    let note = |(name, note): (&String, &String)| Ok((name.clone(), from_hex(note)?));
    Ok(WorkerCut {
        folder: contents.checkpoint.clone(),
        job: contents.job.clone(),
        clock: contents.clock,
        worker: kept.worker,
        arrays: kept.arrays.iter().map(array).collect::<Result<_, String>>()?,
        notes: kept.notes.iter().map(note).collect::<Result<_, String>>()?,
    })
}

/// The header of a file with these contents, and more metadata.
pub(super) fn header(contents: &Contents, mut metadata: Map<String, Value>) -> io::Result<String> {
    let mut tensors = Map::new();
    metadata.insert(KEY.into(), serde_json::to_string(contents)?.into());
    tensors.insert("__metadata__".into(), metadata.into());
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
                start = insert(&mut tensors, name, shape, start..start + range.len * 4);
            }
        }
    }
    for kept in &contents.workers {
        for Array { table, kind, len, .. } in &kept.arrays {
            let name = format!("{table}#worker{}.{kind}", kept.worker.0);
            start = insert(&mut tensors, name, vec![*len], start..start + len * 4);
        }
    }
    let mut text = serde_json::to_string(&Value::Object(tensors))?;
    // Data begins at a multiple of 8, as the format wants it.
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    Ok(text)
}

/// Adds a tensor; where its data ends. Names of tables are free: one may be what another one's part is called.
fn insert(tensors: &mut Map<String, Value>, mut name: String, shape: Vec<u64>, data: Range<u64>) -> u64 {
    while tensors.contains_key(&name) {
        name.push('\'');
    }
    let tensor = json!({ "dtype": "F32", "shape": shape, "data_offsets": [data.start, data.end] });
    tensors.insert(name, tensor);
    data.end
}

/// The length of a header, of which a file begins with 8 bytes. The error says why this is no file of a checkpoint.
pub(super) fn header_bytes(bytes: [u8; 8], file_bytes: u64) -> Result<usize, String> {
    let header = u64::from_le_bytes(bytes);
    if header > limits::MAX_CHECKPOINT_HEADER_BYTES || header > file_bytes.saturating_sub(8) {
        return Err(NO_CHECKPOINT.into());
    }
    Ok(header as usize)
}

/// The contents of a file of this length by its header, and all metadata.
pub(super) fn parse(header: &[u8], file_bytes: u64) -> Result<(Contents, Value), String> {
    let no_checkpoint = || NO_CHECKPOINT.to_owned();
    let mut value: Value = serde_json::from_slice(header).map_err(|_| no_checkpoint())?;
    let metadata = value["__metadata__"].take();
    let contents = metadata[KEY].as_str().ok_or_else(no_checkpoint)?;
    let contents: Contents = serde_json::from_str(contents).map_err(|_| no_checkpoint())?;
    let mut parts = contents.tables.iter().map(Table::bytes).chain(contents.workers.iter().map(Kept::bytes));
    let data = parts.try_fold(0u64, |sum, bytes| sum.checked_add(bytes?));
    let length = data.and_then(|data| data.checked_add(8 + header.len() as u64));
    match length == Some(file_bytes) {
        true => Ok((contents, metadata)),
        false => Err(no_checkpoint()),
    }
}

/// Reads a file in parts. The digest of a file says that it is what was written; only then is what it says to be believed.
pub(super) struct Reader {
    source: Box<dyn Source>,
    contents: Contents,
    metadata: Value,
    /// The first byte of the data.
    start: u64,
}

impl Reader {
    /// Reads the header. The error says why this is no file of a checkpoint.
    pub(super) fn open(source: Box<dyn Source>) -> Result<Reader, String> {
        let text = |error: io::Error| error.to_string();
        let length = source.len();
        let mut bytes = [0; 8];
        source.read_at(0, &mut bytes).map_err(|_| NO_CHECKPOINT.to_owned())?;
        let mut header = vec![0; header_bytes(bytes, length)?];
        source.read_at(8, &mut header).map_err(text)?;
        let (contents, metadata) = parse(&header, length)?;
        let start = 8 + header.len() as u64;
        Ok(Reader { source, contents, metadata, start })
    }

    /// A text of the metadata.
    pub(super) fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata[key].as_str()
    }

    /// Where the data begins.
    pub(super) fn data_start(&self) -> u64 {
        self.start
    }

    /// Whether it has something of what is wanted.
    pub(super) fn has(&self, wanted: &Wanted) -> bool {
        let tables = self.contents.tables.iter().filter(|table| table.name == wanted.name);
        tables.flat_map(|table| &table.ranges).any(|range| overlaps(range, wanted).next().is_some())
    }

    /// What a worker kept, if it has that.
    pub(super) fn read_worker(&self, worker: WorkerId) -> Result<Option<WorkerCut>, String> {
        let Reader { source, contents, start, .. } = self;
        let tables: u64 = contents.tables.iter().filter_map(Table::bytes).sum();
        let place = contents.workers.iter().position(|kept| kept.worker == worker);
        let Some(place) = place else { return Ok(None) };
        let before: u64 = contents.workers[..place].iter().filter_map(Kept::bytes).sum();
        let mut at = *start + tables + before;
        let values = |len: u64| {
            let values = read_values(source.as_ref(), at, len)?;
            at += len * 4;
            Ok(values)
        };
        cut(contents, &contents.workers[place], values).map(Some)
    }

    /// Adds what it has of a table, in pieces.
    pub(super) fn read(&self, wanted: &Wanted, pieces: &mut Vec<TableCut>) -> Result<(), String> {
        let Reader { source, contents, start, .. } = self;
        let mut table_start = *start;
        for table in &contents.tables {
            let elements = table.elements().unwrap_or(0);
            let mut range_start = table_start;
            for range in &table.ranges {
                for overlap in overlaps(range, wanted).filter(|_| table.name == wanted.name) {
                    let len = overlap.end - overlap.start;
                    let mut at = range_start + (overlap.start - range.start) * 4;
                    let mut arrays = Vec::with_capacity(table.slots + 1);
                    for _ in 0..=table.slots {
                        arrays.push(read_values(source.as_ref(), at, len)?);
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

fn read_values(source: &dyn Source, at: u64, len: u64) -> Result<Vec<f32>, String> {
    let text = |error: io::Error| error.to_string();
    let len = usize::try_from(len).map_err(|_| "it is larger than memory".to_owned())?;
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| "there is no memory for what it holds".to_owned())?;
    values.resize(len, 0f32);
    source.read_at(at, bytemuck::cast_slice_mut(&mut values)).map_err(text)?;
    Ok(values)
}
