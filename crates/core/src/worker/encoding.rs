//! Gradients of tables that have codecs.

use super::Gradient;
use super::layout::{Layout, elements_of};
use super::missing::Missing;
use super::request::{Outgoing, OutgoingForm};
use super::slab::Prepared;
use crate::absence::Absent;
use crate::checkpoint::{ArrayKind, WorkerArray};
use crate::codec::{
    self, ChunkInput, Codec, CodecError, Context, Decoder, Encoder, FactorFrames, Products, TableGradient,
    Written,
};
use crate::hands::Hands;
use crate::kernels;
use crate::policy::{Codecs, NonFinite, Policy};
use crate::registry::Registry;
use crate::store::Buffer;
use crate::table::{Chunk, TableSpec};
use crate::types::{Clock, ShardId};
use crate::wire::DType;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// A worker's ends of a table's codecs.
#[derive(Debug)]
pub(super) struct TableCodecs {
    pub(super) push: PushCodec,
    /// That of answers.
    pub(super) answer: Codec,
}

/// The sending end of the codec of pushes. A submission takes it along while it encodes.
#[derive(Debug, Default)]
pub(super) struct PushCodec {
    /// The codec, once there is a plan.
    codec: Option<Arc<Codec>>,
    /// The type of the elements that pushes travel as, where they are not encoded; unless something is left that another
    /// codec had not sent.
    elements: Option<DType>,
    push: Option<Encoder>,
    /// The encoder has something that another codec had not sent.
    is_carrying: bool,
    sender: Sender,
    /// Payloads of the push at hand.
    payloads: Written,
    /// A refused gradient, while it can be pushed again.
    refused: Option<Refused>,
    /// A chunk of single rows, or of values that were clipped.
    chunk: Vec<f32>,
}

/// What happened while a submission had the codec of pushes.
#[derive(Debug, Default)]
pub(super) struct Meanwhile {
    /// The codec that holds by now, if it is another one.
    pub(super) next: Option<PushCodec>,
    /// Earlier pushes that servers refused.
    pub(super) refused: Vec<RefusedPush>,
}

/// What a server refused of a push.
#[derive(Debug)]
pub(super) struct RefusedPush {
    pub(super) clock: Clock,
    pub(super) by: ShardId,
    pub(super) gradient: Outgoing,
}

/// The sender of encoded gradients: random choices of codecs follow from it.
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
    /// Contents of the gradient's memory.
    pub(super) prepared: Prepared,
    /// The codec that the application followed when it prepared it, where that is known.
    pub(super) followed: Option<&'a str>,
    pub(super) missing: &'a Missing,
    /// The parameters that it was computed with.
    pub(super) parameters: &'a [f32],
    /// A link that it travels over carries less than the codec needs.
    pub(super) lacks_room: bool,
}

/// The payloads of a push in a buffer.
#[derive(Debug, Default)]
pub(super) struct Payloads {
    /// Of chunks that have one, ascending: each chunk's number, and its bytes.
    pub(super) chunks: Vec<(u32, Range<usize>)>,
    /// Factors of layers. A shard gets them before the first chunk that it holds of the layer.
    pub(super) factors: Vec<LayerFactors>,
}

/// The factors of a layer.
#[derive(Debug)]
pub(super) struct LayerFactors {
    /// Numbers of the chunks that have some of the layer.
    pub(super) chunks: Range<u32>,
    /// The payload of each of their frames.
    pub(super) payloads: Vec<Range<usize>>,
}

/// A push that some servers refused. The residual has counted it: it is sent again as it is, or goes back there.
#[derive(Debug)]
struct Refused {
    clock: Clock,
    gradient: Outgoing,
    by: BTreeSet<ShardId>,
}

/// An encoded gradient, in [`PushCodec::payloads`].
#[derive(Debug)]
pub(super) struct Made {
    pub(super) payloads: Payloads,
    /// The residual counts it as sent.
    pub(super) is_counted: bool,
}

/// A copy for a checkpoint. The error says that there is no memory for it.
pub(super) fn copied(values: &[f32]) -> Result<Vec<f32>, String> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(values.len())
        .map_err(|_| format!("there is no memory for a copy of {} bytes", values.len() * 4))?;
    copy.extend_from_slice(values);
    Ok(copy)
}

impl TableCodecs {
    /// The codecs of a table's policy. The error names a component that this worker does not have.
    pub(super) fn new(
        registry: &Registry,
        spec: &TableSpec,
        policy: &Policy,
        sender: Sender,
    ) -> Result<TableCodecs, String> {
        let fault = |error| format!("table `{}`: {error}", spec.name);
        let Codecs { push, answer } = policy.codecs(registry).map_err(fault)?;
        let elements = push.element_type().filter(|&dtype| !spec.rows || dtype == DType::F32);
        let codec = Arc::new(if spec.rows { push.of_rows() } else { push });
        let push = PushCodec {
            push: elements.is_none().then(|| Encoder::new(codec.clone(), spec.elements() as usize)),
            codec: Some(codec),
            elements,
            sender,
            ..PushCodec::default()
        };
        Ok(TableCodecs { push, answer })
    }
}

impl PushCodec {
    /// The codec, once there is a plan.
    pub(super) fn codec(&self) -> Option<&Arc<Codec>> {
        self.codec.as_ref()
    }

    /// Whether gradients are compared with the parameters.
    pub(super) fn needs_parameters(&self) -> bool {
        self.codec.as_ref().is_some_and(|codec| codec.needs_parameters())
    }

    /// Goes over to another codec. Nothing is lost: what was not sent goes with the next push, and what was refused stays
    /// refused.
    pub(super) fn go_over_to(&mut self, next: PushCodec, layout: &Layout) {
        let mut before = std::mem::replace(self, next);
        self.refused = before.refused.take().map(|refused| {
            let gradient = before.decoded(layout, &refused.gradient, |_| true);
            Refused { gradient, ..refused }
        });
        if let Some(encoder) = before.push.take_if(|encoder| encoder.has_unsent()) {
            self.keeper(layout).take_over(encoder);
            self.is_carrying = true;
        }
    }

    /// An encoder, even where pushes travel as they are: something has to be kept until the next one.
    fn keeper(&mut self, layout: &Layout) -> &mut Encoder {
        let codec = self.codec.as_ref().expect("there is a plan before there are gradients");
        self.push.get_or_insert_with(|| Encoder::new(codec.clone(), layout.elements()))
    }

    /// [`decoded`], by this codec.
    pub(super) fn decoded(
        &self,
        layout: &Layout,
        gradient: &Outgoing,
        is_for: impl Fn(ShardId) -> bool,
    ) -> Outgoing {
        decoded(self.codec.as_ref(), layout, gradient, is_for)
    }

    /// The type of the elements that the next gradient travels as; `None` when it is encoded.
    pub(super) fn elements(&self) -> Option<DType> {
        self.elements.filter(|_| self.push.is_none() && self.refused.is_none())
    }

    /// The type of halves that the application prepared, if they are sent from where they lie: servers take them under every
    /// codec.
    pub(super) fn prepared_halves(&self, plain: &Plain<'_>) -> Option<DType> {
        if plain.prepared != Prepared::Halves || self.is_carrying || self.refused.is_some() {
            return None;
        }
        // With a residual of the application's, NaN is found here: it would stay there.
        match plain.followed {
            Some("f16") => Some(DType::F16),
            Some("bf16") => Some(DType::Bf16),
            Some(text) if text != self.text() => None,
            _ => self.elements.filter(|&dtype| dtype != DType::F32),
        }
    }

    fn text(&self) -> String {
        text_of(self.codec.as_ref())
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.push.as_ref().map_or(0, Encoder::memory_bytes) + self.payloads.memory_bytes()
    }

    /// A server refused what it was sent of a push. Where the residual counted that as sent, it is in no residual any more.
    pub(super) fn note_refused(&mut self, layout: &Layout, clock: Clock, by: ShardId, gradient: Outgoing) {
        if !gradient.is_counted {
            return;
        }
        match &mut self.refused {
            Some(refused) if refused.clock == clock => _ = refused.by.insert(by),
            _ => {
                self.put_refused_back(layout);
                self.refused = Some(Refused { clock, gradient, by: BTreeSet::from([by]) });
            }
        }
    }

    /// Whether something is kept that servers do not have, or may be.
    pub(super) fn keeps_back(&self) -> bool {
        let keeps = |encoder: &Encoder| {
            encoder.counts_what_is_sent()
                || !encoder.velocity().is_empty()
                || encoder.bases().next().is_some()
        };
        self.refused.is_some() || self.push.as_ref().is_some_and(keeps)
    }

    /// Copies of what is kept, for a checkpoint that is made in an iteration. A refused gradient of an earlier one is not pushed again:
    /// it is part of the residual.
    pub(super) fn kept_back(&mut self, layout: &Layout, clock: Clock) -> Result<Vec<WorkerArray>, String> {
        if self.refused.as_ref().is_some_and(|refused| refused.clock < clock) {
            self.put_refused_back(layout);
        }
        let (Some(encoder), codec) = (&self.push, self.text()) else { return Ok(Vec::new()) };
        let bases = (0..).zip(encoder.bases()).map(|(layer, base)| (ArrayKind::Factors(layer), base));
        let whole = [(ArrayKind::Residual, encoder.residual()), (ArrayKind::Velocity, encoder.velocity())];
        let kept = whole.into_iter().chain(bases).filter(|(_, values)| !values.is_empty());
        let array = |(kind, values)| {
            let table = layout.spec().name.clone();
            Ok(WorkerArray { table, kind, values: copied(values)?, state: codec.clone().into_bytes() })
        };
        kept.map(array).collect()
    }

    /// Keeps what a worker kept when it was saved, beside what is kept already. The error says what does not fit.
    pub(super) fn keep_again(
        &mut self,
        layout: &Layout,
        array: WorkerArray,
        is_own: bool,
    ) -> Result<(), String> {
        let WorkerArray { kind, values, state, .. } = array;
        // Velocities and factors are of use to the codec that made them, and for the worker whose gradients they are of.
        let is_of_codec = is_own && state == self.text().into_bytes();
        match kind {
            ArrayKind::Residual if values.len() == layout.elements() && kernels::all_finite(&values) => {
                self.is_carrying |= self.elements.is_some();
                self.keeper(layout).put_back_values(0, &values);
                Ok(())
            }
            ArrayKind::Velocity | ArrayKind::Factors(_) if !is_of_codec => Ok(()),
            ArrayKind::Velocity if self.keeper(layout).set_velocity(&values) => Ok(()),
            ArrayKind::Factors(layer) if (layer as usize) < layout.layers().len() => {
                self.keeper(layout).set_base(layer as usize, values);
                Ok(())
            }
            kind => Err(format!(
                "table `{}` has {} elements, and its {kind} has {}",
                layout.spec().name,
                layout.elements(),
                values.len()
            )),
        }
    }

    /// Adds a refused gradient that is not pushed again to the residual.
    pub(super) fn put_refused_back(&mut self, layout: &Layout) {
        let Some(Refused { gradient, by, .. }) = self.refused.take() else { return };
        let plain = self.decoded(layout, &gradient, |shard| by.contains(&shard));
        // A gradient that the application prepared does not have it.
        self.is_carrying |= self.elements.is_some();
        let (encoder, mut values) = (self.keeper(layout), Vec::new());
        for (number, chunk) in layout.chunks().filter(|(_, chunk)| by.contains(&chunk.shard)) {
            if read_chunk(&plain, layout, number, &chunk, &mut values) {
                let place = elements_of(&chunk);
                // Absent elements have no gradient to put back.
                Absent::in_chunk(plain.missing.ranges(), place.clone()).clear_in(&mut values);
                encoder.put_back_values(place.start, &values);
            }
        }
    }

    /// A push of this clock that was refused as it is: it is not encoded twice, and another one in its place is not looked
    /// at. The residual would count both, and servers that have the first take nothing else for it.
    pub(super) fn take_refused(&mut self, clock: Clock) -> Option<Outgoing> {
        self.refused.take_if(|refused| refused.clock == clock).map(|refused| refused.gradient)
    }

    /// Encodes a gradient chunk by chunk; [`PushCodec::payloads`] has the bytes. The gradient is finite, or is to be
    /// clipped. A large one is shared among `hands`.
    pub(super) fn encode(
        &mut self,
        layout: &Layout,
        nonfinite: NonFinite,
        plain: &Plain<'_>,
        hands: &dyn Hands,
    ) -> Result<Made, CodecError> {
        self.payloads.clear();
        if plain.prepared != Prepared::Gradient {
            // The application keeps what is refused of a gradient that it encoded itself.
            return Ok(Made { payloads: self.encode_prepared(layout, plain, hands)?, is_counted: false });
        }
        self.is_carrying = false;
        let is_counted = self.push.as_ref().is_some_and(Encoder::counts_what_is_sent);
        let payloads = self.encode_chunks(layout, nonfinite, plain, hands)?;
        if let Some(encoder) = &mut self.push {
            encoder.settle();
            if self.elements.is_some() && !encoder.counts_what_is_sent() {
                self.push = None;
            }
        }
        Ok(Made { payloads, is_counted })
    }

    /// Whether what the application prepared has to be sent as it is: it followed another codec than the one that holds, or
    /// there is more to send than it knows of.
    pub(super) fn sends_plainly(&self, plain: &Plain<'_>) -> bool {
        // A gradient cannot be prepared for no codec: it is refused.
        let followed = plain.followed.filter(|text| !text.is_empty());
        let is_other = followed.is_some_and(|text| text != self.text());
        // A codec that is an element type makes no payloads of chosen entries.
        let is_halves = self.elements.is_some_and(|dtype| dtype != DType::F32);
        plain.prepared != Prepared::Gradient && (is_other || is_halves || self.is_carrying)
    }

    /// Decodes a gradient that the application prepared, and adds the residual of an earlier codec.
    pub(super) fn expand(&mut self, plain: &Plain<'_>, values: &mut [f32]) -> Result<(), CodecError> {
        let (Gradient::Dense(words)
        | Gradient::Rows { values: words, .. }
        | Gradient::Product { values: words, .. }) = plain.gradient;
        match plain.prepared {
            Prepared::Gradient | Prepared::Chosen => values.copy_from_slice(words),
            Prepared::Places { count } => {
                let (places, rest) = words.split_at_checked(count).ok_or_else(misplaced)?;
                let places: &[u32] = bytemuck::cast_slice(places);
                values.fill(0.0);
                for (&place, &value) in places.iter().zip(rest.get(..count).ok_or_else(misplaced)?) {
                    *values.get_mut(place as usize).ok_or_else(misplaced)? = value;
                }
            }
            Prepared::Halves => {
                let own = || self.elements.filter(|&dtype| dtype != DType::F32).unwrap_or(DType::F16);
                let halves = plain.followed.map_or_else(own, halves_of);
                let bytes = bytemuck::cast_slice::<f32, u8>(words).get(..2 * values.len());
                kernels::copy(values, bytes.and_then(|bytes| halves.values(bytes)).ok_or_else(misplaced)?);
            }
        }
        if !kernels::all_finite(values) {
            return Err(CodecError::NonFinite);
        }
        let missing = plain.missing.ranges();
        missing.iter().for_each(|range| values[range.clone()].fill(0.0));
        if let Some(encoder) = self.push.as_mut().filter(|_| self.is_carrying) {
            encoder.add_unsent_to(values);
            for range in missing {
                encoder.put_back_values(range.start, &values[range.clone()]);
                values[range.clone()].fill(0.0);
            }
            self.is_carrying = encoder.has_unsent();
            if self.elements.is_some() && !self.is_carrying {
                self.push = None;
            }
        }
        Ok(())
    }

    /// The bytes of the push that was encoded last.
    pub(super) fn payloads(&self) -> &Written {
        &self.payloads
    }

    /// Elements of memory for the payloads of a push: as many as they can be, so that it is used again.
    pub(super) fn payload_elements(&self, layout: &Layout) -> usize {
        if layout.is_sparse() {
            return self.payloads.len().div_ceil(4);
        }
        let most = layout.elements() + layout.chunk_count() * codec::PREFIX_BYTES.div_ceil(4);
        // A chunk whose factors have no finite product travels beside them.
        most.max(self.payloads.len().div_ceil(4))
    }

    /// Appends the chunks' payloads, and factors before them; an empty payload for a chunk of which everything is missing.
    fn encode_chunks(
        &mut self,
        layout: &Layout,
        nonfinite: NonFinite,
        plain: &Plain<'_>,
        hands: &dyn Hands,
    ) -> Result<Payloads, CodecError> {
        let (values, factors) = match plain.gradient {
            Gradient::Rows { rows, values } => return self.encode_rows(layout, plain, rows, values),
            Gradient::Dense(values) => (values, None),
            Gradient::Product { values, factors } => (values, Some(factors)),
        };
        let PushCodec { push, sender, payloads, .. } = self;
        let Some(encoder) = push else { return Ok(Payloads::default()) };
        let (layers, chunks) = (layout.layers(), layout.ranges());
        let Sender { seed, worker, table } = *sender;
        let gradient = TableGradient {
            values,
            clips_non_finite: nonfinite != NonFinite::Reject,
            absent: plain.missing.ranges(),
            layers: &layers,
            chunks: &chunks,
            factors,
            step: plain.clock,
            // No chunk has this number.
            seed: codec::stretch_seed(seed, worker, table, plain.clock, u32::MAX),
        };
        let largest = layers.iter().map(|layer| layer.elements.len() as u64).max().unwrap_or(0);
        let context = |number: usize| {
            let number = number as u32;
            let context = context(*sender, layout, plain, number, layout.chunk_at(number));
            Context { layer_elements: largest, ..context }
        };
        let (factors, ranges) = encoder.encode_table(&gradient, context, hands, payloads)?;
        let factors = factors.into_iter().map(|FactorFrames { elements, payloads }| LayerFactors {
            chunks: layout.chunks_in(&elements),
            payloads,
        });
        Ok(Payloads { chunks: (0..).zip(ranges).collect(), factors: factors.collect() })
    }

    /// Appends the payloads of chunks that have some of the rows, and of which the codec left something. They are encoded one
    /// by one: a layer of which only some rows are pushed has no largest entries.
    fn encode_rows(
        &mut self,
        layout: &Layout,
        plain: &Plain<'_>,
        rows: &[u32],
        values: &[f32],
    ) -> Result<Payloads, CodecError> {
        let PushCodec { push, sender, payloads, chunk: scratch, .. } = self;
        let Some(encoder) = push else { return Ok(Payloads::default()) };
        let (payloads, mut ranges) = (payloads.last(), Vec::new());
        for (number, chunk) in layout.chunks() {
            if !spread_rows(scratch, layout, &chunk, rows, values) {
                continue;
            }
            kernels::clip_non_finite(scratch);
            let (context, before) = (context(*sender, layout, plain, number, chunk), payloads.len());
            if let Err(fault) = encoder.encode(chunk.start as usize, scratch, &context, payloads) {
                // The residual is what it was before the chunks that are encoded.
                for (number, range) in ranges {
                    let chunk = layout.chunk_at(number);
                    spread_rows(scratch, layout, &chunk, rows, values);
                    kernels::clip_non_finite(scratch);
                    encoder.undo(chunk.start as usize, scratch, &payloads[range]);
                }
                return Err(fault);
            }
            if codec::is_nothing(&payloads[before..]) {
                payloads.truncate(before);
            }
            ranges.push((number, before..payloads.len()));
        }
        ranges.retain(|(_, range)| !range.is_empty());
        Ok(Payloads { chunks: ranges, factors: Vec::new() })
    }

    /// Appends the payloads of a gradient that the application prepared.
    fn encode_prepared(
        &mut self,
        layout: &Layout,
        plain: &Plain<'_>,
        hands: &dyn Hands,
    ) -> Result<Payloads, CodecError> {
        let PushCodec { push, sender, payloads, .. } = self;
        let Some(encoder) = push else {
            return Err(CodecError::Input("no codec to be sent by".into()));
        };
        let (Gradient::Dense(words)
        | Gradient::Rows { values: words, .. }
        | Gradient::Product { values: words, .. }) = plain.gradient;
        let (places, values): (&[u32], _) = match plain.prepared {
            Prepared::Places { count } if count > words.len() / 2 => {
                return Err(CodecError::Input(format!("{count} places, which do not fit its memory")));
            }
            Prepared::Places { count } => (bytemuck::cast_slice(&words[..count]), &words[count..2 * count]),
            Prepared::Gradient | Prepared::Chosen | Prepared::Halves => (&[], words),
        };
        let (chunks, absent) = (layout.ranges(), plain.missing.ranges());
        // Where the places of each chunk end.
        let mut taken = 0;
        let end = |chunk: &Range<usize>| {
            taken += places[taken..].partition_point(|&place| (place as usize) < chunk.end);
            taken
        };
        let ends: Vec<usize> = chunks.iter().map(end).collect();
        let input = |number: usize| {
            let chunk = chunks[number].clone();
            match plain.prepared {
                Prepared::Gradient | Prepared::Chosen => ChunkInput::Chosen(&words[chunk]),
                Prepared::Places { .. } => {
                    let here = number.checked_sub(1).map_or(0, |before| ends[before])..ends[number];
                    ChunkInput::Places(&places[here.clone()], &values[here])
                }
                Prepared::Halves => {
                    ChunkInput::Quantised(&bytemuck::cast_slice(words)[2 * chunk.start..2 * chunk.end])
                }
            }
        };
        let context =
            |number: usize| context(*sender, layout, plain, number as u32, layout.chunk_at(number as u32));
        let ranges = encoder.encode_prepared(&chunks, absent, input, context, hands, payloads)?;
        if taken < places.len() {
            return Err(CodecError::Input("places beyond the end of the table".into()));
        }
        Ok(Payloads { chunks: (0..).zip(ranges).collect(), factors: Vec::new() })
    }
}

/// A gradient as it is sent to some shards when the codec that made it holds no more: the same frames, with plain
/// values, which are taken under every codec.
pub(super) fn decoded(
    codec: Option<&Arc<Codec>>,
    layout: &Layout,
    gradient: &Outgoing,
    is_for: impl Fn(ShardId) -> bool,
) -> Outgoing {
    let (OutgoingForm::Encoded(payloads), Some(codec)) = (&gradient.form, codec) else {
        return gradient.clone();
    };
    let mut decoder = Decoder::new(codec.clone());
    let (mut bytes, mut places, mut values) = (Vec::new(), Vec::new(), Vec::new());
    let (layers, mut products) = (layout.layers(), Products::default());
    for range in payloads.factors.iter().flat_map(|layer| &layer.payloads) {
        let payload = &gradient.buffer.as_bytes()[range.clone()];
        decoder
            .take_factors(payload, &layers, &mut products)
            .expect("what an encoder made is read by its decoder");
    }
    for (number, range) in &payloads.chunks {
        let chunk = layout.chunk_at(*number);
        if !is_for(chunk.shard) {
            continue;
        }
        let start = bytes.len();
        // Of a chunk that is missing altogether nothing travels.
        if !range.is_empty() {
            values.resize(chunk.len as usize, 0.0);
            let payload = &gradient.buffer.as_bytes()[range.clone()];
            decoder
                .read_chunk(payload, elements_of(&chunk), &products)
                .expect("what an encoder made is read by its decoder")
                .copy_to(&mut values);
            append_plain(&mut bytes, &values, layout);
        }
        places.push((*number, start..bytes.len()));
    }
    let mut buffer = Buffer::zeroed(bytes.len().div_ceil(4));
    buffer.as_mut_bytes()[..bytes.len()].copy_from_slice(&bytes);
    Outgoing {
        buffer: buffer.into(),
        form: OutgoingForm::Decoded(Arc::new(Payloads { chunks: places, factors: Vec::new() })),
        missing: gradient.missing.clone(),
        is_counted: gradient.is_counted,
    }
}

/// A codec as text; empty where it is none.
pub(super) fn text_of(codec: Option<&Arc<Codec>>) -> String {
    codec.filter(|codec| !codec.is_none()).map_or_else(String::new, |codec| codec.to_string())
}

/// The type of the halves that a chain makes.
fn halves_of(text: &str) -> DType {
    if text.split('+').any(|stage| stage == "bf16") { DType::Bf16 } else { DType::F16 }
}

fn misplaced() -> CodecError {
    CodecError::Input("places or values that do not fit its memory".into())
}

/// Appends a chunk's values as they travel without a codec. Of a table of rows those that are not zero, with their numbers.
fn append_plain(bytes: &mut Vec<u8>, values: &[f32], layout: &Layout) {
    if !layout.is_sparse() {
        return bytes.extend_from_slice(bytemuck::cast_slice(values));
    }
    let rows = || values.chunks_exact(layout.row_width()).zip(0u32..);
    let mut numbers: Vec<u32> =
        rows().filter(|(row, _)| row.iter().any(|&value| value != 0.0)).map(|(_, number)| number).collect();
    if numbers.is_empty() {
        // A push of nothing is one of a row of zeros.
        numbers.push(0);
    }
    bytes.extend_from_slice(bytemuck::cast_slice(&numbers));
    for (row, number) in rows() {
        if numbers.binary_search(&number).is_ok() {
            bytes.extend_from_slice(bytemuck::cast_slice(row));
        }
    }
}

/// Makes `values` those that a gradient has of a chunk; `false` when it has none of them, or a codec made them.
fn read_chunk(
    gradient: &Outgoing,
    layout: &Layout,
    number: u32,
    chunk: &Chunk,
    values: &mut Vec<f32>,
) -> bool {
    let place = elements_of(chunk);
    values.clear();
    values.resize(place.len(), 0.0);
    match &gradient.form {
        OutgoingForm::Decoded(payloads) => {
            let Ok(at) = payloads.chunks.binary_search_by_key(&number, |(of, _)| *of) else {
                return false;
            };
            let range = payloads.chunks[at].1.clone();
            read_plain(values, &gradient.buffer.as_bytes()[range.clone()], layout);
            !range.is_empty()
        }
        OutgoingForm::Dense(dtype) => {
            let bytes = place.start * dtype.bytes()..place.end * dtype.bytes();
            let Some(elements) = dtype.values(&gradient.buffer.as_bytes()[bytes]) else { return false };
            kernels::copy(values, elements);
            true
        }
        OutgoingForm::Rows(rows) => spread_rows(values, layout, chunk, rows, gradient.buffer.as_slice()),
        OutgoingForm::Encoded(_) | OutgoingForm::Nothing | OutgoingForm::Held => false,
    }
}

/// The way back, to values that are zero.
fn read_plain(values: &mut [f32], bytes: &[u8], layout: &Layout) {
    if !layout.is_sparse() {
        return bytemuck::cast_slice_mut(values).copy_from_slice(bytes);
    }
    let width = layout.row_width();
    let (numbers, rows) = bytes.split_at(4 * (bytes.len() / (4 + 4 * width)));
    for (number, row) in numbers.chunks_exact(4).zip(rows.chunks_exact(4 * width)) {
        let first = u32::from_le_bytes([number[0], number[1], number[2], number[3]]) as usize * width;
        bytemuck::cast_slice_mut(&mut values[first..first + width]).copy_from_slice(row);
    }
}

/// The context of a chunk's encoder.
fn context<'a>(sender: Sender, layout: &Layout, plain: &Plain<'a>, number: u32, chunk: Chunk) -> Context<'a> {
    let Sender { seed, worker, table } = sender;
    Context {
        step: plain.clock,
        seed: codec::stretch_seed(seed, worker, table, plain.clock, number),
        layer_elements: layout.elements() as u64,
        parameters: plain.parameters.get(elements_of(&chunk)).unwrap_or(&[]),
        plan: None,
        lacks_room: plain.lacks_room,
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
    use crate::hands::Alone;
    use crate::policy;
    use crate::registry::Axis;
    use crate::types::ServerId;

    #[test]
    fn a_worker_that_does_not_have_a_codec_names_it() {
        let registry = Registry { codec: Axis::new("codec", &[], Vec::new()), ..Registry::builtin() };
        let policy = Policy::default().with(policy::Axis::Codec, "topk:0.1");
        let why =
            TableCodecs::new(&registry, &TableSpec::dense("w", [8]), &policy, Sender::default()).unwrap_err();
        assert!(why.contains("table `w`: unknown codec `topk`"), "{why}");
    }

    /// Whole numbers are added without rounding, so the residual is what it was to the bit.
    #[test]
    fn rows_that_are_refused_leave_the_residual_as_it_was() {
        let (spec, server) = (TableSpec::sparse("w", 4, 2), ServerId(0));
        let mut layout = Layout::new(spec.clone());
        let chunk = |number: u64| Chunk { shard: ShardId { server, core: 0 }, start: number * 2, len: 2 };
        layout.place((0..4).map(chunk).collect());
        let policy = Policy::default().with(policy::Axis::Codec, "threshold:5");
        let codecs = TableCodecs::new(&Registry::builtin(), &spec, &policy, Sender::default());
        let mut codec = codecs.expect("it is known").push;
        let push = |codec: &mut PushCodec, rows: &[u32], values: &[f32]| {
            let plain = Plain {
                clock: 0,
                gradient: Gradient::Rows { rows, values },
                prepared: Prepared::Gradient,
                followed: None,
                missing: &Missing::default(),
                parameters: &[],
                lacks_room: false,
            };
            codec.encode(&layout, NonFinite::Reject, &plain, &Alone).map(|made| made.payloads.chunks.len())
        };
        let residual = |codec: &PushCodec| codec.push.as_ref().expect("it keeps one").residual().to_vec();
        assert_eq!(push(&mut codec, &[0, 1, 3], &[1.0, 7.0, 2.0, 3.0, 4.0, 4.0]), Ok(1));
        codec.keeper(&layout).put_back_values(6, &[f32::MAX]);
        let kept = residual(&codec);
        assert_eq!(kept, [1.0, 0.0, 2.0, 3.0, 0.0, 0.0, f32::MAX, 4.0]);
        let refused = push(&mut codec, &[0, 1, 2, 3], &[9.0, 1.0, 1.0, 1.0, 0.0, 8.0, f32::MAX, 0.0]);
        assert_eq!((refused, residual(&codec)), (Err(CodecError::Overflow), kept));
    }
}
