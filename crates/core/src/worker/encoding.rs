//! Gradients and answers of tables that have codecs.

use super::local_table::LocalTable;
use super::request::Missing;
use super::{Gradient, WorkerError};
use crate::absence::Absent;
use crate::codec::{self, CodecError, Context, Decoder, Encoder};
use crate::kernels;
use crate::limits;
use crate::policy::{Codecs, NonFinite, Policy};
use crate::registry::Registry;
use crate::store::{Allocate, Buffer};
use crate::table::{Chunk, TableSpec};
use crate::types::{Clock, ShardId, WorkerId};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// A worker's ends of a table's codecs.
#[derive(Debug, Default)]
pub(super) struct TableCodecs {
    pub(super) push: Option<Encoder>,
    /// Whether answers are differences to what is here.
    pub(super) differences: bool,
    /// What answers are differences to, while the values are lent: the application has those, and may change them.
    base: Option<Vec<f32>>,
    pub(super) answer: Option<Decoder>,
    /// The job's seed, this worker's rank, and the table's number.
    pub(super) identity: (u64, u32, u32),
    pub(super) payloads: Vec<u8>,
    /// What a server refused, while it can be pushed again.
    refused: Option<Refused>,
    /// The clock of the last push, if the application prepared it: what of that is refused is the application's to keep.
    prepared: Option<Clock>,
    /// A chunk of single rows, or of values that were clipped.
    chunk: Vec<f32>,
}

/// The payloads of chunks that have one, ascending: each chunk's number, and its bytes in a buffer.
pub(super) type Payloads = Vec<(u32, Range<usize>)>;

/// A push that some servers refused. The residual has counted it: it is sent again as it is, or goes back there.
#[derive(Debug)]
struct Refused {
    clock: Clock,
    encoded: Encoded,
    by: BTreeSet<ShardId>,
}

/// A gradient as it travels.
#[derive(Debug, Clone)]
pub(super) struct Encoded {
    pub(super) buffer: Arc<Buffer>,
    /// Where in the buffer they are.
    pub(super) payloads: Arc<Payloads>,
    /// What the gradient does not have.
    pub(super) missing: Missing,
}

impl TableCodecs {
    /// What a table's policy asks for. The error names what this worker does not have.
    pub(super) fn new(
        registry: &Registry,
        spec: &TableSpec,
        policy: &Policy,
        identity: (u64, u32, u32),
    ) -> Result<TableCodecs, String> {
        let fault = |error| format!("table `{}`: {error}", spec.name);
        let Codecs { push, answer } = policy.codecs(registry).map_err(fault)?;
        let push = (!push.is_none()).then(|| if spec.rows { push.of_rows() } else { push });
        let differences = answer.is_for_differences();
        Ok(TableCodecs {
            push: push.map(|codec| Encoder::new(Arc::new(codec), spec.elements() as usize)),
            differences,
            answer: (!answer.is_none()).then(|| Decoder::new(Arc::new(answer))),
            identity,
            ..TableCodecs::default()
        })
    }

    pub(super) fn encodes_pushes(&self) -> bool {
        self.push.is_some()
    }

    fn keeps_residual(&self) -> bool {
        self.push.as_ref().is_some_and(|encoder| !encoder.residual().is_empty())
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let base = self.base.as_ref().map_or(0, |base| base.capacity() * 4);
        self.push.as_ref().map_or(0, Encoder::memory_bytes) + self.payloads.capacity() + base
    }
}

impl LocalTable {
    /// A server refused what it was sent of a push. What was encoded is in no residual any more.
    pub(super) fn note_refused(&mut self, clock: Clock, by: ShardId, encoded: Encoded) {
        if !self.codecs.keeps_residual() || self.codecs.prepared == Some(clock) {
            return;
        }
        match &mut self.codecs.refused {
            Some(refused) if refused.clock == clock => _ = refused.by.insert(by),
            _ => {
                self.put_refused_back();
                self.codecs.refused = Some(Refused { clock, encoded, by: BTreeSet::from([by]) });
            }
        }
    }

    /// What was refused is not pushed again: it stays behind as if it had not been chosen.
    fn put_refused_back(&mut self) {
        let Some(Refused { encoded, by, .. }) = self.codecs.refused.take() else { return };
        let Some(mut encoder) = self.codecs.push.take() else { return };
        for (number, range) in encoded.payloads.iter() {
            let Chunk { shard, start, len } = self.chunk_at(*number);
            if by.contains(&shard) {
                let (start, len) = (start as usize, len as usize);
                let absent = Absent::in_chunk(encoded.missing.ranges(), start..start + len);
                let payload = &encoded.buffer.as_bytes()[range.clone()];
                encoder.holding(start, &absent, |encoder| encoder.put_back(start, len, payload));
            }
        }
        self.codecs.push = Some(encoder);
    }

    /// The application prepares the push of this clock.
    pub(super) fn begin_prepared(&mut self, clock: Clock) {
        self.put_refused_back();
        self.codecs.prepared = Some(clock);
    }

    /// What travels instead of a gradient, chunk by chunk. The gradient is finite, or is to be clipped. One that was
    /// refused is not encoded twice, and another one in its place is not looked at: the residual would count both, and
    /// servers that have the first take nothing else for it.
    pub(super) fn encode(
        &mut self,
        clock: Clock,
        gradient: Gradient<'_>,
        missing: &Missing,
        memory: &dyn Allocate,
    ) -> Result<Encoded, WorkerError> {
        self.codecs.prepared = None;
        if let Some(refused) = self.codecs.refused.take_if(|refused| refused.clock == clock) {
            return Ok(refused.encoded);
        }
        self.put_refused_back();
        let encoded = self.encode_with(memory, |local, codecs| {
            local.encode_chunks(codecs, clock, gradient, missing.ranges())
        })?;
        Ok(Encoded { missing: missing.clone(), ..encoded })
    }

    /// Has `encode` append payloads to `codecs.payloads`, and takes them to where frames are sent from.
    pub(super) fn encode_with(
        &mut self,
        memory: &dyn Allocate,
        encode: impl FnOnce(&LocalTable, &mut TableCodecs) -> Result<Payloads, CodecError>,
    ) -> Result<Encoded, WorkerError> {
        let mut codecs = std::mem::take(&mut self.codecs);
        codecs.payloads.clear();
        let encoded = encode(self, &mut codecs);
        let payloads = encoded.map_err(|why| WorkerError::Codec { table: self.spec.name.clone(), why });
        let taken = std::mem::take(&mut codecs.payloads);
        self.codecs = codecs;
        let payloads = payloads?;
        // As long as the longest that it can be, so that its memory is used again.
        let longest = self.spec.elements() as usize + self.chunk_count() * codec::PREFIX_BYTES.div_ceil(4);
        let len = if self.spec.rows { taken.len().div_ceil(4) } else { longest };
        let mut buffer = self.take_buffer(len, memory);
        buffer.as_mut_bytes()[..taken.len()].copy_from_slice(&taken);
        self.codecs.payloads = taken;
        let (buffer, payloads) = (Arc::new(buffer), Arc::new(payloads));
        Ok(Encoded { buffer, payloads, missing: Missing::default() })
    }

    /// Appends the chunks' payloads to `codecs.payloads`; an empty one for a chunk of which everything is missing.
    fn encode_chunks(
        &self,
        codecs: &mut TableCodecs,
        clock: Clock,
        gradient: Gradient<'_>,
        missing: &[Range<usize>],
    ) -> Result<Payloads, CodecError> {
        let TableCodecs { push, identity, payloads, chunk: scratch, .. } = codecs;
        let Some(encoder) = push else { return Ok(Vec::new()) };
        let width = self.row_width();
        let factors = match gradient {
            Gradient::Product { factors, .. } => Some(factors),
            Gradient::Dense(_) | Gradient::Rows { .. } => None,
        };
        let mut ranges = Vec::new();
        for (number, chunk) in self.all_chunks() {
            let Chunk { start, len, .. } = chunk;
            let place = start as usize..start as usize + len as usize;
            let absent = Absent::in_chunk(missing, place.clone());
            if absent.covers(len as usize) {
                ranges.push((number, payloads.len()..payloads.len()));
                continue;
            }
            let values = match gradient {
                Gradient::Dense(values) | Gradient::Product { values, .. }
                    if self.nonfinite == NonFinite::Reject =>
                {
                    &values[place.clone()]
                }
                Gradient::Dense(values) | Gradient::Product { values, .. } => {
                    scratch.clear();
                    scratch.extend_from_slice(&values[place.clone()]);
                    kernels::clip_non_finite(scratch);
                    scratch.as_slice()
                }
                Gradient::Rows { rows, values } => {
                    let first = (start / width as u64) as u32;
                    let begin = rows.partition_point(|&row| row < first);
                    let end = rows.partition_point(|&row| row < first + len / width as u32);
                    if begin == end {
                        continue;
                    }
                    scratch.clear();
                    scratch.resize(len as usize, 0.0);
                    for (row, values) in
                        rows[begin..end].iter().zip(values[begin * width..].chunks_exact(width))
                    {
                        let at = (row - first) as usize * width;
                        scratch[at..at + width].copy_from_slice(values);
                    }
                    kernels::clip_non_finite(scratch);
                    scratch.as_slice()
                }
            };
            let context = Context { factors, ..self.context(*identity, clock, number, chunk) };
            let before = payloads.len();
            encoder.holding(place.start, &absent, |encoder| {
                encoder.encode(place.start, values, &context, payloads)
            })?;
            if self.spec.rows && codec::is_nothing(&payloads[before..]) {
                payloads.truncate(before);
                continue;
            }
            ranges.push((number, before..payloads.len()));
        }
        Ok(ranges)
    }

    /// What a chunk's encoder is told beside the values.
    pub(super) fn context(
        &self,
        (seed, worker, table): (u64, u32, u32),
        clock: Clock,
        number: u32,
        chunk: Chunk,
    ) -> Context<'_> {
        let place = chunk.start as usize..chunk.start as usize + chunk.len as usize;
        Context {
            step: clock,
            seed: codec::stretch_seed(seed, worker, table, clock, number),
            table_elements: self.spec.elements(),
            start: chunk.start,
            columns: self.spec.columns(),
            parameters: self.values.as_slice().get(place).unwrap_or(&[]),
            factors: None,
        }
    }

    /// Takes the values of a chunk from a payload that its codec made. `None` when it does not fit.
    pub(super) fn decode_chunk(&mut self, place: Range<usize>, payload: &[u8]) -> Option<()> {
        let differences = self.codecs.differences;
        let decoder = self.codecs.answer.as_mut()?;
        // Where they are not, they are lent, and nobody waits for this answer any more.
        let are_here = self.values.len() >= place.end;
        if let Some(base) = &mut self.codecs.base {
            // The next difference is one to this answer, whoever waits for it.
            let base = &mut base[place.clone()];
            decoder.decode_add(payload, base).ok()?;
            if are_here {
                Arc::make_mut(&mut self.values).as_mut_slice()[place].copy_from_slice(base);
            }
            return Some(());
        }
        if !are_here {
            return Some(());
        }
        let values = &mut Arc::make_mut(&mut self.values).as_mut_slice()[place];
        match differences {
            true => decoder.decode_add(payload, values).ok(),
            false => decoder.decode(payload, values).ok(),
        }
    }

    /// The values are about to be lent: where answers are differences to them, a copy stays.
    pub(super) fn keep_base(&mut self) {
        self.codecs.base = self.codecs.differences.then(|| self.values.as_slice().to_vec());
    }

    /// The values are back. The application may have changed them, and answers may have come meanwhile.
    pub(super) fn restore_base(&mut self) {
        if let Some(base) = self.codecs.base.take() {
            Arc::make_mut(&mut self.values).as_mut_slice().copy_from_slice(&base);
        }
    }

    /// Whether there is a copy that chunks have to be put into.
    pub(super) fn has_base(&self) -> bool {
        self.codecs.base.is_some()
    }

    /// A chunk came whole: the next difference is one to this.
    pub(super) fn set_base(&mut self, place: Range<usize>, values: &[f32]) {
        if let Some(base) = &mut self.codecs.base {
            base[place].copy_from_slice(values);
        }
    }

    /// The values of so many rows from a payload. `None` when it does not fit.
    pub(super) fn decode_rows(&mut self, rows: usize, payload: &[u8]) -> Option<Vec<f32>> {
        let elements =
            rows.checked_mul(self.row_width()).filter(|&elements| elements <= limits::MAX_DATA_ELEMENTS)?;
        let mut values = vec![0.0; elements];
        self.codecs.answer.as_mut()?.decode(payload, &mut values).ok()?;
        Some(values)
    }
}

/// Who sends: the job's seed, the worker's rank, the table's number.
pub(super) fn identity(seed: u64, worker: Option<WorkerId>, table: usize) -> (u64, u32, u32) {
    (seed, worker.map_or(0, |worker| worker.0), table as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy;
    use crate::registry::Axis;

    #[test]
    fn a_worker_that_does_not_have_a_codec_names_it() {
        let registry = Registry { codec: Axis::new("codec", &[], Vec::new()), ..Registry::builtin() };
        let policy = Policy::default().with(policy::Axis::Codec, "topk:0.1");
        let why = TableCodecs::new(&registry, &TableSpec::dense("w", [8]), &policy, (0, 0, 0)).unwrap_err();
        assert!(why.contains("table `w`: unknown codec `topk`"), "{why}");
    }
}
