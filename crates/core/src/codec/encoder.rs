//! The sender's end of a chain: what it remembers, and how values become a payload.

use super::layer::{InputMemory, LayerRange, Plan, TableGradient, TableInput};
use super::matrix::Matrix;
use super::products::{Products, Thin};
use super::scratch::{ChunkState, Scratch};
use super::selection::{Largest, Selection, Stretches};
use super::written::Written;
use super::{Codec, CodecError, Context, Decoder};
use crate::absence::Absent;
use crate::hands::{self, Alone, Hands, Shelf};
use crate::kernels;
use crate::store::Buffer;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A chosen entry with its place costs as much as so many elements that are not chosen.
const PLACES_SAVE: usize = 16;

/// The sender's end of a chain, for one table and one direction.
///
/// [`Encoder::encode_table`] encodes a gradient of a whole table in two phases: first what has to be decided for whole layers
/// is decided, and nothing changes of what chunks have; then every chunk is encoded by itself. In both, several hands may
/// work, and what they make does not depend on how many they are. A stretch that is a layer by itself, or of which nothing is
/// decided by layer, is encoded by [`Encoder::encode`].
#[derive(Debug)]
pub struct Encoder {
    codec: Arc<Codec>,
    /// Residual: what was not sent yet. Empty when the chain keeps none, and was given none to keep.
    residual: Buffer,
    /// Velocities (DGC); empty when the chain has none.
    velocity: Buffer,
    /// The last factors of every layer (PowerSGD); empty at first.
    bases: Vec<Vec<f32>>,
    /// Elements that are sent.
    elements: usize,
    scratch: Scratch,
    /// Those of other hands, and while hands share a gradient all of them.
    scratches: Shelf<Scratch>,
    inputs: Shelf<InputMemory>,
}

/// Frames with the factors of a layer: they travel before the layer's first chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FactorFrames {
    /// The layer's elements in the table.
    pub elements: Range<usize>,
    /// The payload of each frame.
    pub payloads: Vec<Range<usize>>,
}

/// What an application made of a chunk of a gradient.
#[derive(Debug, Clone, Copy)]
pub enum ChunkInput<'a> {
    /// A value for every element, of which those that are not zero travel.
    Chosen(&'a [f32]),
    /// Places in the table, ascending, and the values that travel.
    Places(&'a [u32], &'a [f32]),
    /// Values as the chain's quantiser has them.
    Quantised(&'a [u8]),
}

/// What was decided for a layer.
#[derive(Debug)]
enum Decided {
    Largest(Selection),
    Factors(Option<Thin>),
    Nothing,
}

/// Chunks that one hand encodes, one after the other.
struct Group<S> {
    /// Number of the first one.
    first: usize,
    /// What is remembered of each.
    states: Vec<S>,
    bytes: Vec<u8>,
}

/// Chunks as they were encoded.
struct Groups {
    /// Number of each chunk, and where its payload is.
    payloads: Vec<(usize, Range<usize>)>,
    /// That of the first chunk that has one.
    fault: Option<CodecError>,
}

impl Encoder {
    /// For a table of which `elements` are sent.
    pub fn new(codec: Arc<Codec>, elements: usize) -> Encoder {
        let velocity = Buffer::zeroed(if codec.momentum().is_some() { elements } else { 0 });
        let residual = Buffer::zeroed(if codec.keeps_residual() { elements } else { 0 });
        Encoder { residual, velocity, elements, ..Encoder::without_memory(codec) }
    }

    /// For values that are whole by themselves: it keeps nothing, even if the chain would.
    pub fn without_memory(codec: Arc<Codec>) -> Encoder {
        let (residual, velocity) = (Buffer::zeroed(0), Buffer::zeroed(0));
        let scratch = Scratch::new(&codec);
        let (bases, scratches, inputs) = Default::default();
        Encoder { codec, residual, velocity, bases, elements: 0, scratch, scratches, inputs }
    }

    /// Takes over what another chain has not sent yet: it goes with the next values. A chain that keeps nothing sends it once.
    pub fn take_over(&mut self, before: Encoder) {
        if before.has_unsent() {
            self.residual = before.residual;
        }
    }

    /// Adds the residual to `values`, for another encoder to send, and clears it.
    pub fn add_unsent_to(&mut self, values: &mut [f32]) {
        if !self.residual.is_empty() {
            kernels::add(values, self.residual.as_slice());
            kernels::fill(self.residual.as_mut_slice(), 0.0);
        }
    }

    /// Whether something was not sent yet.
    pub fn has_unsent(&self) -> bool {
        self.residual.as_slice().iter().any(|&value| value != 0.0)
    }

    /// Whether what is encoded counts as sent here: if it does not arrive, it has to be put back.
    pub fn counts_what_is_sent(&self) -> bool {
        !self.residual.is_empty()
    }

    /// Gives back the memory of what another chain had not sent, once everything is.
    pub fn settle(&mut self) {
        if !self.codec.keeps_residual() && !self.has_unsent() {
            self.residual = Buffer::zeroed(0);
        }
    }

    /// The chain.
    pub fn codec(&self) -> &Arc<Codec> {
        &self.codec
    }

    /// The residual: what was not sent yet. Empty when the chain keeps none.
    pub fn residual(&self) -> &[f32] {
        self.residual.as_slice()
    }

    /// Velocities (DGC); empty when the chain has none.
    pub fn velocity(&self) -> &[f32] {
        self.velocity.as_slice()
    }

    /// The last factors of every layer (PowerSGD); empty where there are none.
    pub fn bases(&self) -> impl Iterator<Item = &[f32]> {
        self.bases.iter().map(Vec::as_slice)
    }

    /// Has the velocities of an encoder of the same chain and table. False if they do not fit.
    pub fn set_velocity(&mut self, velocity: &[f32]) -> bool {
        let fits = velocity.len() == self.velocity.len();
        if fits {
            self.velocity.as_mut_slice().copy_from_slice(velocity);
        }
        fits
    }

    /// Has the last factors of a layer of an encoder of the same chain and table.
    pub fn set_base(&mut self, layer: usize, base: Vec<f32>) {
        if self.bases.len() <= layer {
            self.bases.resize_with(layer + 1, Vec::new);
        }
        self.bases[layer] = base;
    }

    /// Does `work` on the chunk that begins at `start` while the residual (and DGC's velocity) of the chunk's absent
    /// ranges is set aside, and puts it back afterwards. What was not sent of these ranges waits for their next gradient.
    /// The receiver takes zeros for whatever a payload says of them, so no rounding error of theirs is kept either.
    pub fn holding<R>(&mut self, start: usize, absent: &Absent, work: impl FnOnce(&mut Encoder) -> R) -> R {
        let mut held = std::mem::take(&mut self.scratch.held);
        self.state(start..self.elements).hold(absent, &mut held);
        let result = work(self);
        self.state(start..self.elements).release(absent, &held);
        self.scratch.held = held;
        result
    }

    /// What is remembered of a stretch.
    fn state(&mut self, range: Range<usize>) -> ChunkState<'_> {
        let Encoder { residual, velocity, .. } = self;
        ChunkState { residual: stretch(residual, range.clone()), velocity: stretch(velocity, range) }
    }

    /// What is remembered of each of a table's chunks, which lie one after the other.
    fn chunk_states(&mut self, chunks: &[Range<usize>]) -> Vec<ChunkState<'_>> {
        let (mut residual, mut velocity) = (self.residual.as_mut_slice(), self.velocity.as_mut_slice());
        let cut = |chunk: &Range<usize>| ChunkState {
            residual: split_first(&mut residual, chunk.len()),
            velocity: split_first(&mut velocity, chunk.len()),
        };
        chunks.iter().map(cut).collect()
    }

    /// Bytes of memory held.
    pub fn memory_bytes(&self) -> usize {
        let bases: usize = self.bases.iter().map(|base| base.capacity() * 4).sum();
        self.residual.memory_bytes() + self.velocity.memory_bytes() + bases
    }

    /// Decides what is decided for whole layers, and appends the factors of those that travel as such. Nothing that is kept
    /// of elements changes.
    fn plan(
        &mut self,
        gradient: &TableGradient<'_>,
        hands: &dyn Hands,
        out: &mut Vec<u8>,
    ) -> Result<(Plan, Vec<FactorFrames>), CodecError> {
        let (mut plan, mut frames) = (Plan::default(), Vec::new());
        let applies = |layer: &LayerRange| {
            let elements = layer.elements.len() as u64;
            self.codec.applies(&Context {
                step: gradient.step,
                layer_elements: elements,
                ..Context::default()
            })
        };
        let applies: Vec<bool> = gradient.layers.iter().map(applies).collect();
        let decides = self.codec.decides_by_layer(gradient.step) && applies.contains(&true);
        // Velocities cannot be made what they were.
        if !decides && self.velocity.is_empty() {
            return Ok((plan, frames));
        }
        let Encoder { codec, residual, velocity, bases, scratch, inputs, .. } = self;
        // The factors that a layer offers have nothing in them of what is clipped, nor of what another chain left to be sent.
        let is_altered = !codec.keeps_residual() && (!residual.is_empty() || codec.changes_values());
        let input = TableInput {
            codec,
            gradient,
            residual: residual.as_slice(),
            velocity: velocity.as_slice(),
            memory: inputs,
            is_finite: AtomicBool::new(true),
        };
        if !decides {
            input.visit(0..gradient.values.len(), &mut |_, _| {});
            return if input.is_finite() { Ok((plan, frames)) } else { Err(input.fault()) };
        }
        let decide = |number: usize, base: &mut Vec<f32>, hands: &dyn Hands| {
            let (layer, seed) = (&gradient.layers[number], gradient.seed ^ number as u64);
            let elements = layer.elements.clone();
            let sparsifier = codec.sparsifier.as_ref();
            if let Some(largest) =
                sparsifier.and_then(|sparsifier| sparsifier.largest(gradient.step, elements.len()))
            {
                // All of a layer that the chain does not apply to.
                let all = Largest { count: elements.len(), sample: None };
                let largest = if applies[number] { largest } else { all };
                return Decided::Largest(Selection::find(&input, elements, largest, seed, hands));
            }
            let Some(low_rank) = codec.low_rank.as_ref().filter(|_| applies[number] && !is_altered) else {
                return Decided::Nothing;
            };
            let matrix = Matrix { layer, values: &input, factors: gradient.factors, seed, hands };
            Decided::Factors(low_rank.factor(&matrix, base))
        };
        bases.resize_with(gradient.layers.len(), Vec::new);
        let decided = decide_all(gradient.layers, bases, hands, decide);
        for (number, decided) in decided {
            let thin = match decided {
                Decided::Largest(selection) => {
                    plan.selections.push(selection);
                    continue;
                }
                Decided::Factors(thin) => thin,
                Decided::Nothing => continue,
            };
            let written = thin.and_then(|thin| {
                scratch.write_factors(codec, number as u32, &thin, gradient.layers, &mut plan, out)
            });
            let elements = gradient.layers[number].elements.clone();
            match written {
                Some(payloads) => frames.push(FactorFrames { elements, payloads }),
                // Factors that are not finite are no place to begin the next step from.
                None => bases[number].clear(),
            }
        }
        if input.is_finite() { Ok((plan, frames)) } else { Err(input.fault()) }
    }

    /// Encodes a gradient of the whole table: plans, and then encodes chunk by chunk, both with several hands where there is
    /// enough to do. `context` is asked for each chunk. The payload of a chunk that is absent altogether is empty. After an error
    /// the residual is what it was, but for rounding.
    pub fn encode_table<'a>(
        &mut self,
        gradient: &TableGradient<'_>,
        context: impl Fn(usize) -> Context<'a> + Sync,
        hands: &dyn Hands,
        out: &mut Written,
    ) -> Result<(Vec<FactorFrames>, Vec<Range<usize>>), CodecError> {
        out.clear();
        let (plan, factors) = self.plan(gradient, hands, out.last())?;
        let (codec, scratches) = (self.codec.clone(), self.lend_scratch());
        let (chunks, pieces) = (gradient.chunks, hands::pieces(hands, gradient.values.len()));
        let work = |scratch: &mut Scratch, number: usize, state: ChunkState<'_>, out: &mut Vec<u8>| {
            let context = Context { plan: Some(&plan), ..context(number) };
            scratch.encode_chunk(&codec, chunks[number].clone(), state, gradient, &context, out)
        };
        let states = self.chunk_states(chunks);
        let Groups { payloads, fault } = encode_groups(&codec, &scratches, states, pieces, hands, work, out);
        self.take_scratch(scratches);
        match fault {
            None => Ok((factors, payloads.into_iter().map(|(_, range)| range).collect())),
            Some(fault) => {
                self.undo_chunks(gradient, &plan.products, &payloads, out);
                Err(fault)
            }
        }
    }

    /// A gradient is refused for one of its chunks: what is kept of others, which are encoded, is what was kept before, but for
    /// rounding.
    fn undo_chunks(
        &mut self,
        gradient: &TableGradient<'_>,
        products: &Products,
        payloads: &[(usize, Range<usize>)],
        written: &Written,
    ) {
        let mut present = Vec::new();
        for (number, payload) in payloads {
            let chunk = gradient.chunks[*number].clone();
            let absent = Absent::in_chunk(gradient.absent, chunk.clone());
            if absent.covers(chunk.len()) {
                continue;
            }
            let values = gradient.part(chunk.clone(), &absent, &mut present);
            let payload = written.get(payload.clone());
            self.holding(chunk.start, &absent, |encoder| {
                encoder.undo_chunk(chunk.start, values, payload, products);
            });
        }
    }

    /// Encodes what the application made of the table's chunks: filters and sparsifier are passed over, and nothing is
    /// remembered. `input` and `context` are asked for each chunk. The payload of a chunk that is absent altogether is empty.
    pub fn encode_prepared<'a>(
        &mut self,
        chunks: &[Range<usize>],
        absent: &[Range<usize>],
        input: impl Fn(usize) -> ChunkInput<'a> + Sync,
        context: impl Fn(usize) -> Context<'a> + Sync,
        hands: &dyn Hands,
        out: &mut Written,
    ) -> Result<Vec<Range<usize>>, CodecError> {
        out.clear();
        let (codec, scratches) = (self.codec.clone(), self.lend_scratch());
        // Of places there are few: the bits of a mask are cleared and looked through.
        let cost = |number: usize| match input(number) {
            ChunkInput::Places(places, _) => chunks[number].len() / PLACES_SAVE + PLACES_SAVE * places.len(),
            _ => chunks[number].len(),
        };
        let pieces = hands::pieces(hands, (0..chunks.len()).map(cost).sum());
        let work = |scratch: &mut Scratch, number: usize, (): (), out: &mut Vec<u8>| {
            let (Range { start, end }, context) = (chunks[number].clone(), context(number));
            let before = out.len();
            match input(number) {
                ChunkInput::Chosen(values) => {
                    let chosen = values.iter().copied().enumerate();
                    scratch.encode_chosen(&codec, end - start, chosen, &context, out)
                }
                ChunkInput::Places(places, values) => {
                    // A place before the chunk wraps round, and is refused as one beyond its end.
                    let chosen = places.iter().map(|&place| (place as usize).wrapping_sub(start));
                    scratch.encode_chosen(
                        &codec,
                        end - start,
                        chosen.zip(values.iter().copied()),
                        &context,
                        out,
                    )
                }
                ChunkInput::Quantised(bytes) => scratch.encode_quantised(&codec, end - start, bytes, out),
            }?;
            if Absent::in_chunk(absent, start..end).covers(end - start) {
                out.truncate(before);
            }
            Ok(())
        };
        let states = vec![(); chunks.len()];
        let Groups { payloads, fault } = encode_groups(&codec, &scratches, states, pieces, hands, work, out);
        self.take_scratch(scratches);
        fault.map_or_else(|| Ok(payloads.into_iter().map(|(_, range)| range).collect()), Err)
    }

    /// Its memory, for all hands.
    fn lend_scratch(&mut self) -> Shelf<Scratch> {
        let scratches = std::mem::take(&mut self.scratches);
        scratches.put(std::mem::replace(&mut self.scratch, Scratch::empty()));
        scratches
    }

    fn take_scratch(&mut self, scratches: Shelf<Scratch>) {
        self.scratch = scratches.take().unwrap_or_else(|| Scratch::new(&self.codec));
        self.scratches = scratches;
    }

    /// Appends the payload of `values`, which are the table's elements from `start` on. After an error nothing has
    /// changed: neither `out` nor what the encoder remembers.
    pub fn encode(
        &mut self,
        start: usize,
        values: &[f32],
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let Encoder { codec, residual, velocity, scratch, .. } = self;
        let range = start..start + values.len();
        let mut state =
            ChunkState { residual: stretch(residual, range.clone()), velocity: stretch(velocity, range) };
        scratch.encode(codec, start, &mut state, values, context, out)
    }

    /// Appends the payload of entries that the caller chose from a stretch of `len`, and of which it keeps the others:
    /// filters and sparsifier are passed over, and nothing is remembered. Places ascend. Zeros do not travel.
    pub fn encode_chosen(
        &mut self,
        len: usize,
        chosen: impl Iterator<Item = (usize, f32)>,
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        self.scratch.encode_chosen(&self.codec, len, chosen, context, out)
    }

    /// Appends the payload of `count` values that the caller quantised as the chain's quantiser would have.
    pub fn encode_quantised(
        &mut self,
        count: usize,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        self.scratch.encode_quantised(&self.codec, count, bytes, out)
    }

    /// A payload of this encoder did not arrive, and will not be sent again: what it said of the `len` elements from
    /// `start` on is kept for the next one, where anything is kept.
    pub fn put_back(&mut self, start: usize, len: usize, payload: &[u8]) {
        let residual = stretch(&mut self.residual, start..start + len);
        if !residual.is_empty() {
            // It made the payload itself; another one is left alone.
            _ = Decoder::new(self.codec.clone()).decode_add(payload, residual);
        }
    }

    /// The same for values as they were received, whichever chain made them. They are kept even if this chain keeps nothing.
    pub fn put_back_values(&mut self, start: usize, values: &[f32]) {
        if values.len() == self.elements && !self.has_unsent() {
            // Bit for bit: a sum with zeros has no negative ones.
            self.residual = Buffer::copy_of(values);
            return;
        }
        if self.residual.is_empty() {
            self.residual = Buffer::zeroed(self.elements);
        }
        kernels::add(&mut self.residual.as_mut_slice()[start..start + values.len()], values);
    }

    /// The same for values that will be encoded again, or are refused: what is kept is what was kept before them, but for
    /// rounding. The payload is empty where nothing of them travels.
    pub fn undo(&mut self, start: usize, values: &[f32], payload: &[u8]) {
        self.undo_chunk(start, values, payload, Products::NONE);
    }

    /// The same where layers may have been sent as factors.
    fn undo_chunk(&mut self, start: usize, values: &[f32], payload: &[u8], products: &Products) {
        let chunk = start..start + values.len();
        let residual = stretch(&mut self.residual, chunk.clone());
        if residual.is_empty() {
            return;
        }
        let mut decoder = Decoder::new(self.codec.clone());
        // It made the payload itself; another one is left alone.
        if let Ok(content) = decoder.read_chunk(payload, chunk, products) {
            content.add_to(residual);
        }
        let mut taken = values.to_vec();
        self.codec.prepare(&mut taken);
        kernels::add_scaled(residual, &taken, -1.0);
    }
}

/// Decides for every layer, and says so in their order. A large layer is shared, and small ones are shared out.
fn decide_all(
    layers: &[LayerRange],
    bases: &mut [Vec<f32>],
    hands: &dyn Hands,
    decide: impl Fn(usize, &mut Vec<f32>, &dyn Hands) -> Decided + Sync,
) -> Vec<(usize, Decided)> {
    let is_large = |number: usize| hands::busy(hands, layers[number].elements.len()) > 1;
    let (large, small): (Vec<_>, Vec<_>) =
        bases.iter_mut().enumerate().partition(|(number, _)| is_large(*number));
    let elements: usize = small.iter().map(|(number, _)| layers[*number].elements.len()).sum();
    let each = elements.div_ceil(hands::pieces(hands, elements)).max(1);
    let (mut groups, mut free): (Vec<Vec<_>>, usize) = (Vec::new(), 0);
    for (number, base) in small {
        if free == 0 {
            groups.push(Vec::new());
            free = each;
        }
        free = free.saturating_sub(layers[number].elements.len());
        if let Some(group) = groups.last_mut() {
            group.push((number, base));
        }
    }
    let decided = hands::share_out(hands, groups, |group| {
        let decided = group.into_iter().map(|(number, base)| (number, decide(number, base, &Alone)));
        decided.collect::<Vec<_>>()
    });
    let mut decided: Vec<_> = decided.into_iter().flatten().collect();
    decided.extend(large.into_iter().map(|(number, base)| (number, decide(number, base, hands))));
    decided.sort_unstable_by_key(|(number, _)| *number);
    decided
}

/// Encodes chunks, of which the hands take so many pieces. A piece ends at a chunk that cannot be encoded.
fn encode_groups<S: Send>(
    codec: &Codec,
    scratches: &Shelf<Scratch>,
    states: Vec<S>,
    pieces: usize,
    hands: &dyn Hands,
    work: impl Fn(&mut Scratch, usize, S, &mut Vec<u8>) -> Result<(), CodecError> + Sync,
    out: &mut Written,
) -> Groups {
    let (count, mut states) = (states.len(), states.into_iter());
    let groups = (0..pieces).map(|piece| {
        let (first, end) = (count * piece / pieces, count * (piece + 1) / pieces);
        Group { first, states: states.by_ref().take(end - first).collect(), bytes: out.spare() }
    });
    let encoded = hands::share_out(hands, groups.collect(), |group| {
        let Group { first, states, mut bytes } = group;
        let mut scratch = scratches.take().unwrap_or_else(|| Scratch::new(codec));
        let (mut ends, mut result) = (Vec::with_capacity(states.len()), Ok(()));
        for (number, state) in (first..).zip(states) {
            result = work(&mut scratch, number, state, &mut bytes);
            if result.is_err() {
                break;
            }
            ends.push(bytes.len());
        }
        scratches.put(scratch);
        (first, bytes, ends, result)
    });
    let (mut payloads, mut fault, mut before) = (Vec::with_capacity(count), None, out.len());
    for (first, bytes, ends, result) in encoded {
        let mut start = before;
        for (number, end) in (first..).zip(ends) {
            payloads.push((number, start..before + end));
            start = before + end;
        }
        before += bytes.len();
        out.push(bytes);
        fault = fault.or(result.err());
    }
    Groups { payloads, fault }
}

/// The part of a buffer that belongs to a stretch; nothing when there is no buffer.
fn stretch(buffer: &mut Buffer, range: Range<usize>) -> &mut [f32] {
    if buffer.is_empty() { &mut [] } else { &mut buffer.as_mut_slice()[range] }
}

/// Cuts off the first elements; nothing when there are none at all.
fn split_first<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let len = if rest.is_empty() { 0 } else { len };
    let (first, after) = std::mem::take(rest).split_at_mut(len);
    *rest = after;
    first
}
