//! Gradients and answers of tables that have codecs.

use super::Gradient;
use super::layout::{Layout, elements_of};
use super::missing::Missing;
use super::slab::Prepared;
use crate::absence::Absent;
use crate::codec::{self, CodecError, Context, Decoder, Encoder};
use crate::kernels;
use crate::lease::Lease;
use crate::limits;
use crate::policy::{Codecs, NonFinite, Policy};
use crate::registry::Registry;
use crate::table::{Chunk, TableSpec};
use crate::types::{Clock, ShardId};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// A worker's ends of a table's codecs.
#[derive(Debug, Default)]
pub(super) struct TableCodecs {
    push: Option<Encoder>,
    answer: Option<Decoder>,
    /// Where answers are differences: what the last ones added up to, whether or not the application saw it.
    base: Option<Vec<f32>>,
    sender: Sender,
    /// Payloads of the push at hand, one after the other.
    payloads: Vec<u8>,
    /// What a server refused, while it can be pushed again.
    refused: Option<Refused>,
    /// The clock of the last push, if the application prepared it: what of that is refused is the application's to keep.
    prepared: Option<Clock>,
    /// A chunk of single rows, or of values that were clipped.
    chunk: Vec<f32>,
}

/// Whose gradients are encoded: chance depends on it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sender {
    /// The job's.
    pub(super) seed: u64,
    /// This worker's rank.
    pub(super) worker: u32,
    /// The table's number.
    pub(super) table: u32,
}

/// A gradient that is to be encoded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain<'a> {
    pub(super) clock: Clock,
    pub(super) gradient: Gradient<'a>,
    /// What stands in the gradient's memory.
    pub(super) prepared: Prepared,
    pub(super) missing: &'a Missing,
    /// The parameters that it was computed with.
    pub(super) parameters: &'a [f32],
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
    pub(super) buffer: Lease,
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
        sender: Sender,
    ) -> Result<TableCodecs, String> {
        let fault = |error| format!("table `{}`: {error}", spec.name);
        let Codecs { push, answer } = policy.codecs(registry).map_err(fault)?;
        let push = (!push.is_none()).then(|| if spec.rows { push.of_rows() } else { push });
        let base = answer.is_for_differences() && !spec.rows;
        Ok(TableCodecs {
            push: push.map(|codec| Encoder::new(Arc::new(codec), spec.elements() as usize)),
            base: base.then(|| vec![0.0; spec.elements() as usize]),
            answer: (!answer.is_none()).then(|| Decoder::new(Arc::new(answer))),
            sender,
            ..TableCodecs::default()
        })
    }

    pub(super) fn encodes_pushes(&self) -> bool {
        self.push.is_some()
    }

    pub(super) fn encodes_answers(&self) -> bool {
        self.answer.is_some()
    }

    /// The codec of pushes as text; empty without one.
    pub(super) fn push_codec(&self) -> String {
        self.push.as_ref().map_or_else(String::new, |encoder| encoder.codec().to_string())
    }

    fn keeps_residual(&self) -> bool {
        self.push.as_ref().is_some_and(|encoder| !encoder.residual().is_empty())
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let base = self.base.as_ref().map_or(0, |base| base.capacity() * 4);
        self.push.as_ref().map_or(0, Encoder::memory_bytes) + self.payloads.capacity() + base
    }

    /// A server refused what it was sent of a push. What was encoded is in no residual any more.
    pub(super) fn note_refused(&mut self, layout: &Layout, clock: Clock, by: ShardId, encoded: Encoded) {
        if !self.keeps_residual() || self.prepared == Some(clock) {
            return;
        }
        match &mut self.refused {
            Some(refused) if refused.clock == clock => _ = refused.by.insert(by),
            _ => {
                self.put_refused_back(layout);
                self.refused = Some(Refused { clock, encoded, by: BTreeSet::from([by]) });
            }
        }
    }

    /// What was refused is not pushed again: it stays behind as if it had not been chosen.
    fn put_refused_back(&mut self, layout: &Layout) {
        let Some(Refused { encoded, by, .. }) = self.refused.take() else { return };
        let Some(encoder) = &mut self.push else { return };
        for (number, range) in encoded.payloads.iter() {
            let chunk = layout.chunk_at(*number);
            if by.contains(&chunk.shard) {
                let place = elements_of(&chunk);
                let absent = Absent::in_chunk(encoded.missing.ranges(), place.clone());
                let payload = &encoded.buffer.as_bytes()[range.clone()];
                encoder.holding(place.start, &absent, |encoder| {
                    encoder.put_back(place.start, place.len(), payload);
                });
            }
        }
    }

    /// A push of this clock that was refused as it is: it is not encoded twice, and another one in its place is not looked
    /// at. The residual would count both, and servers that have the first take nothing else for it.
    pub(super) fn take_refused(&mut self, clock: Clock) -> Option<Encoded> {
        self.prepared = None;
        self.refused.take_if(|refused| refused.clock == clock).map(|refused| refused.encoded)
    }

    /// Encodes a gradient chunk by chunk; [`TableCodecs::payloads`] has the bytes. The gradient is finite, or is to be
    /// clipped.
    pub(super) fn encode(
        &mut self,
        layout: &Layout,
        nonfinite: NonFinite,
        plain: &Plain<'_>,
    ) -> Result<Payloads, CodecError> {
        self.put_refused_back(layout);
        self.payloads.clear();
        match plain.prepared {
            Prepared::Gradient => self.encode_chunks(layout, nonfinite, plain),
            _ => {
                self.prepared = Some(plain.clock);
                self.encode_prepared(layout, plain)
            }
        }
    }

    /// The bytes of the push that was encoded last.
    pub(super) fn payloads(&self) -> &[u8] {
        &self.payloads
    }

    /// Elements of memory for the payloads of a push: as many as they can be, so that it is used again.
    pub(super) fn payload_elements(&self, layout: &Layout) -> usize {
        if layout.is_sparse() {
            return self.payloads.len().div_ceil(4);
        }
        layout.elements() + layout.chunk_count() * codec::PREFIX_BYTES.div_ceil(4)
    }

    /// Appends the chunks' payloads; an empty one for a chunk of which everything is missing.
    fn encode_chunks(
        &mut self,
        layout: &Layout,
        nonfinite: NonFinite,
        plain: &Plain<'_>,
    ) -> Result<Payloads, CodecError> {
        let TableCodecs { push, sender, payloads, chunk: scratch, .. } = self;
        let Some(encoder) = push else { return Ok(Vec::new()) };
        let factors = match plain.gradient {
            Gradient::Product { factors, .. } => Some(factors),
            Gradient::Dense(_) | Gradient::Rows { .. } => None,
        };
        let mut ranges = Vec::new();
        for (number, chunk) in layout.chunks() {
            let place = elements_of(&chunk);
            let absent = Absent::in_chunk(plain.missing.ranges(), place.clone());
            if absent.covers(place.len()) {
                ranges.push((number, payloads.len()..payloads.len()));
                continue;
            }
            let values = match plain.gradient {
                Gradient::Dense(values) | Gradient::Product { values, .. }
                    if nonfinite == NonFinite::Reject =>
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
                    if !spread_rows(scratch, layout, &chunk, rows, values) {
                        continue;
                    }
                    kernels::clip_non_finite(scratch);
                    scratch.as_slice()
                }
            };
            let context = Context { factors, ..context(*sender, layout, plain, number, chunk) };
            let before = payloads.len();
            encoder.holding(place.start, &absent, |encoder| {
                encoder.encode(place.start, values, &context, payloads)
            })?;
            if layout.is_sparse() && codec::is_nothing(&payloads[before..]) {
                payloads.truncate(before);
                continue;
            }
            ranges.push((number, before..payloads.len()));
        }
        Ok(ranges)
    }

    /// Appends the payloads of a gradient that the application prepared.
    fn encode_prepared(&mut self, layout: &Layout, plain: &Plain<'_>) -> Result<Payloads, CodecError> {
        let TableCodecs { push, sender, payloads, .. } = self;
        let Some(encoder) = push else {
            return Err(CodecError::Input("no codec to be sent by".into()));
        };
        let (Gradient::Dense(words)
        | Gradient::Rows { values: words, .. }
        | Gradient::Product { values: words, .. }) = plain.gradient;
        let (places, values) = match plain.prepared {
            Prepared::Places { count } if count > words.len() / 2 => {
                return Err(CodecError::Input(format!("{count} places, which do not fit its memory")));
            }
            Prepared::Places { count } => (bytemuck::cast_slice(&words[..count]), &words[count..2 * count]),
            Prepared::Gradient | Prepared::Chosen | Prepared::Halves => (&[][..], words),
        };
        let (mut ranges, mut taken) = (Vec::with_capacity(layout.chunk_count()), 0);
        for (number, chunk) in layout.chunks() {
            let place = elements_of(&chunk);
            let (first, len) = (place.start, place.len());
            let context = context(*sender, layout, plain, number, chunk);
            let before = payloads.len();
            match plain.prepared {
                Prepared::Gradient => encoder.encode(first, &words[place.clone()], &context, payloads)?,
                Prepared::Chosen => {
                    let chosen = words[place.clone()].iter().copied().enumerate();
                    encoder.encode_chosen(len, chosen, &context, payloads)?;
                }
                Prepared::Places { .. } => {
                    let here: &[u32] = &places[taken..];
                    let count = here.partition_point(|&place| (place as usize) < first + len);
                    let chosen = here[..count].iter().zip(&values[taken..]);
                    // A place before the chunk wraps round, and is refused as one beyond its end.
                    let chosen = chosen.map(|(&place, &value)| ((place as usize).wrapping_sub(first), value));
                    encoder.encode_chosen(len, chosen, &context, payloads)?;
                    taken += count;
                }
                Prepared::Halves => {
                    let bytes: &[u8] = bytemuck::cast_slice(words);
                    encoder.encode_quantised(len, &bytes[2 * first..2 * (first + len)], payloads)?;
                }
            }
            if Absent::in_chunk(plain.missing.ranges(), place).covers(len) {
                payloads.truncate(before);
            }
            ranges.push((number, before..payloads.len()));
        }
        if taken < places.len() {
            return Err(CodecError::Input("places beyond the end of the table".into()));
        }
        Ok(ranges)
    }

    /// Whether answers are differences, which have to be added up in the base first.
    pub(super) fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// What the differences so far add up to.
    pub(super) fn base(&self) -> Option<&[f32]> {
        self.base.as_deref()
    }

    /// A chunk came whole: the next difference is one to this.
    pub(super) fn set_base(&mut self, place: Range<usize>, values: &[f32]) {
        if let Some(base) = &mut self.base {
            base[place].copy_from_slice(values);
        }
    }

    /// Decodes a chunk of an answer into `target`, where somebody wants it. `None` when it does not fit.
    pub(super) fn decode_chunk(
        &mut self,
        place: Range<usize>,
        payload: &[u8],
        target: Option<&mut [f32]>,
    ) -> Option<()> {
        let decoder = self.answer.as_mut()?;
        match (&mut self.base, target) {
            // The next difference is one to this answer, whether or not somebody wants it.
            (Some(base), target) => {
                let base = &mut base[place];
                decoder.decode_add(payload, base).ok()?;
                target.into_iter().for_each(|target| target.copy_from_slice(base));
                Some(())
            }
            (None, Some(target)) => decoder.decode(payload, target).ok(),
            (None, None) => Some(()),
        }
    }

    /// The values of so many rows from a payload. `None` when it does not fit.
    pub(super) fn decode_rows(&mut self, layout: &Layout, rows: usize, payload: &[u8]) -> Option<Vec<f32>> {
        let elements =
            rows.checked_mul(layout.row_width()).filter(|&elements| elements <= limits::MAX_DATA_ELEMENTS)?;
        let mut values = vec![0.0; elements];
        self.answer.as_mut()?.decode(payload, &mut values).ok()?;
        Some(values)
    }
}

/// What a chunk's encoder is told beside the values.
fn context<'a>(sender: Sender, layout: &Layout, plain: &Plain<'a>, number: u32, chunk: Chunk) -> Context<'a> {
    let Sender { seed, worker, table } = sender;
    Context {
        step: plain.clock,
        seed: codec::stretch_seed(seed, worker, table, plain.clock, number),
        table_elements: layout.elements() as u64,
        start: chunk.start,
        columns: layout.spec().columns(),
        parameters: plain.parameters.get(elements_of(&chunk)).unwrap_or(&[]),
        factors: None,
    }
}

/// Makes a whole chunk of its rows, with zeros between them. `false` when it has none of them.
fn spread_rows(to: &mut Vec<f32>, layout: &Layout, chunk: &Chunk, rows: &[u32], values: &[f32]) -> bool {
    let width = layout.row_width();
    let first = (chunk.start / width as u64) as u32;
    let begin = rows.partition_point(|&row| row < first);
    let end = rows.partition_point(|&row| row < first + chunk.len / width as u32);
    to.clear();
    to.resize(chunk.len as usize, 0.0);
    for (row, values) in rows[begin..end].iter().zip(values[begin * width..].chunks_exact(width)) {
        let at = (row - first) as usize * width;
        to[at..at + width].copy_from_slice(values);
    }
    begin < end
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
        let why =
            TableCodecs::new(&registry, &TableSpec::dense("w", [8]), &policy, Sender::default()).unwrap_err();
        assert!(why.contains("table `w`: unknown codec `topk`"), "{why}");
    }
}
