//! One stretch becomes a payload: the stages of a chain, one after the other, in memory that is used again.

use super::container::{self, Container};
use super::layer::{LayerRange, Plan, TableGradient};
use super::payload::{Layout, PREFIX_BYTES, Prefix, write_floats};
use super::products::{PIECE_VALUES, PieceHead, Products, Thin};
use super::{Codec, CodecError, Context, Decoder, Mask, Packer, Quantiser};
use crate::absence::Absent;
use crate::kernels;
use crate::store::Buffer;
use multiversion::multiversion;
use std::ops::Range;
use std::sync::Arc;

/// What an encoder remembers of one chunk.
#[derive(Debug)]
pub(super) struct ChunkState<'a> {
    pub(super) residual: &'a mut [f32],
    pub(super) velocity: &'a mut [f32],
}

/// Memory that is used again for every stretch. Each hand has its own.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Aligned as residuals are: a copy between memory that is 16 bytes off is ten times as slow.
    input: Buffer,
    velocity: Vec<f32>,
    mask: Mask,
    values: Vec<f32>,
    received: Vec<f32>,
    packed: Vec<u8>,
    packer: Option<Box<dyn Packer>>,
    /// Residuals and velocities of absent ranges, set aside while the others are encoded.
    pub(super) held: Vec<f32>,
    /// A chunk with zeros in its absent ranges.
    present: Vec<f32>,
}

/// The entries that a body carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    /// Everything, as it is.
    All,
    /// The mask's entries, which are zero in the input since.
    Taken,
    /// The mask's entries as in `received`, one after the other.
    MaskedRounded,
    /// The stretch as in `received`.
    Rounded,
}

impl ChunkState<'_> {
    /// Residual and velocity of each absent element of the chunk.
    fn kept_of<'a>(&'a mut self, absent: &'a Absent) -> impl Iterator<Item = &'a mut [f32]> {
        let ChunkState { residual, velocity } = self;
        let kept = [&mut **residual, &mut **velocity].into_iter().filter(|kept| !kept.is_empty());
        kept.flat_map(move |kept| {
            let (mut rest, mut passed) = (kept, 0);
            absent.ranges().iter().map(move |range| {
                let (first, end) = (range.start as usize - passed, range.end as usize - passed);
                let (head, tail) = std::mem::take(&mut rest).split_at_mut(end);
                (rest, passed) = (tail, range.end as usize);
                &mut head[first..]
            })
        })
    }

    /// Sets aside what is kept of absent elements, and leaves zeros.
    pub(super) fn hold(&mut self, absent: &Absent, held: &mut Vec<f32>) {
        held.clear();
        for part in self.kept_of(absent) {
            held.extend_from_slice(part);
            part.fill(0.0);
        }
    }

    /// Puts back what was set aside.
    pub(super) fn release(&mut self, absent: &Absent, mut held: &[f32]) {
        for part in self.kept_of(absent) {
            let (values, rest) = held.split_at(part.len());
            part.copy_from_slice(values);
            held = rest;
        }
    }
}

/// Puts into `input` what is to be sent. False when some of it is not finite. `next_velocity` gets what the velocity becomes,
/// where the chain has one.
pub(super) fn take_input(
    codec: &Codec,
    next_velocity: &mut Vec<f32>,
    input: &mut [f32],
    values: &[f32],
    residual: &[f32],
    velocity: &[f32],
) -> bool {
    let clipped = codec.changes_values();
    if clipped {
        input.copy_from_slice(values);
        if !kernels::all_finite(values) {
            return false;
        }
        codec.prepare(input);
    }
    if let Some(momentum) = codec.momentum() {
        // Momentum correction (DGC eq. 4): velocities are accumulated, not gradients.
        next_velocity.clear();
        next_velocity.extend_from_slice(velocity);
        kernels::scale(next_velocity, momentum);
        kernels::add(next_velocity, if clipped { input } else { values });
        return add_into(input, residual, next_velocity);
    }
    match (residual.is_empty(), clipped) {
        (true, true) => true,
        (true, false) => {
            input.copy_from_slice(values);
            kernels::all_finite(values)
        }
        (false, true) => {
            kernels::add(input, residual);
            kernels::all_finite(input)
        }
        (false, false) => add_into(input, residual, values),
    }
}

/// Adds, and says whether all sums are finite: in one pass, because both come from memory.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_into(sum: &mut [f32], a: &[f32], b: &[f32]) -> bool {
    assert!(sum.len() == a.len() && sum.len() == b.len());
    let mut largest = 0;
    for (at, sum) in sum.iter_mut().enumerate() {
        *sum = a[at] + b[at];
        largest = largest.max(sum.to_bits() & 0x7fff_ffff);
    }
    f32::from_bits(largest).is_finite()
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn subtract_into(difference: &mut [f32], a: &[f32], b: &[f32]) {
    assert!(difference.len() == a.len() && difference.len() == b.len());
    for (at, difference) in difference.iter_mut().enumerate() {
        *difference = a[at] - b[at];
    }
}

impl Scratch {
    /// For chunks that this chain encodes.
    pub(super) fn new(codec: &Codec) -> Scratch {
        Scratch { packer: codec.bytes.as_ref().map(|bytes| bytes.packer()), ..Scratch::empty() }
    }

    pub(super) fn empty() -> Scratch {
        let (velocity, mask, values, received, packed, held, present) = Default::default();
        Scratch {
            input: Buffer::zeroed(0),
            velocity,
            mask,
            values,
            received,
            packed,
            packer: None,
            held,
            present,
        }
    }

    /// Appends the payload of a chunk of a gradient, and brings up to date what is remembered of the chunk. The payload of a
    /// chunk that is absent altogether is empty. After an error neither has changed.
    pub(super) fn encode_chunk(
        &mut self,
        codec: &Codec,
        chunk: Range<usize>,
        mut state: ChunkState<'_>,
        gradient: &TableGradient<'_>,
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let absent = Absent::in_chunk(gradient.absent, chunk.clone());
        if absent.covers(chunk.len()) {
            return Ok(());
        }
        let mut present = std::mem::take(&mut self.present);
        let values = gradient.part(chunk.clone(), &absent, &mut present);
        let mut held = std::mem::take(&mut self.held);
        state.hold(&absent, &mut held);
        let result = self.encode(codec, chunk.start, &mut state, values, context, out);
        state.release(&absent, &held);
        (self.present, self.held) = (present, held);
        result
    }

    /// Appends the payload of `values`, which are the table's elements from `start` on.
    pub(super) fn encode(
        &mut self,
        codec: &Codec,
        start: usize,
        state: &mut ChunkState<'_>,
        values: &[f32],
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        if let Some(Plan { products, .. }) = context.plan
            && state.residual.is_empty()
            && products.covered(start..start + values.len()) == values.len()
            && !values.is_empty()
        {
            // Factors have all of it, and nothing is kept of what they lack.
            let prefix = Prefix { layout: Layout::LowRank, packed: false, tag: codec.tag(), count: 0 };
            out.extend_from_slice(&prefix.encode());
            return Ok(());
        }
        if let Some(quantiser) = codec.only_quantiser(context)
            && state.residual.is_empty()
            && quantiser.bytes(values.len()) < 4 * values.len()
        {
            return self.quantise(codec, quantiser, values, context, out);
        }
        let mut buffer = std::mem::replace(&mut self.input, Buffer::zeroed(0));
        if buffer.len() < values.len() {
            buffer = Buffer::zeroed(values.len());
        }
        let input = &mut buffer.as_mut_slice()[..values.len()];
        let finite = take_input(codec, &mut self.velocity, input, values, state.residual, state.velocity);
        let result = match finite {
            true => {
                self.write(codec, start, input, state, context, out);
                Ok(())
            }
            false if kernels::all_finite(values) => Err(CodecError::Overflow),
            false => Err(CodecError::NonFinite),
        };
        self.input = buffer;
        result
    }

    /// See [`super::Encoder::encode_chosen`].
    pub(super) fn encode_chosen(
        &mut self,
        codec: &Codec,
        len: usize,
        chosen: impl Iterator<Item = (usize, f32)>,
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        self.mask.reset(len);
        self.values.clear();
        let mut next = 0;
        for (place, value) in chosen {
            if place < next || place >= len {
                return Err(CodecError::Input("places out of order or beyond its end".into()));
            }
            next = place + 1;
            if value != 0.0 {
                self.mask.set(place);
                self.values.push(value);
            }
        }
        if !kernels::all_finite(&self.values) {
            return Err(CodecError::NonFinite);
        }
        let (start, body) = (out.len(), out.len() + PREFIX_BYTES);
        let (mut prefix, _) = self.write_masked(codec, len, context, out);
        if out.len() - body > 4 * len {
            out.truncate(start);
            self.received.clear();
            self.received.resize(len, 0.0);
            self.mask.put(&self.values, &mut self.received);
            (prefix, _) = raw(codec, &self.received, out);
        }
        prefix.packed = self.pack(body, out);
        out[start..body].copy_from_slice(&prefix.encode());
        Ok(())
    }

    /// See [`super::Encoder::encode_quantised`].
    pub(super) fn encode_quantised(
        &mut self,
        codec: &Codec,
        count: usize,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let is_dense = codec.sparsifier.is_none()
            && codec.low_rank.is_none()
            && matches!(codec.container, None | Some(Container::Dense));
        let Some(quantiser) = codec.quantiser.as_deref().filter(|quantiser| {
            is_dense && quantiser.bytes(count) == bytes.len() && bytes.len() < 4 * count.max(1)
        }) else {
            return Err(CodecError::Input(format!("{} bytes, and `{codec}` makes others", bytes.len())));
        };
        self.received.resize(count, 0.0);
        quantiser.dequantise(bytes, &mut self.received).map_err(CodecError::Input)?;
        if !kernels::all_finite(&self.received) {
            return Err(CodecError::NonFinite);
        }
        let start = out.len();
        let mut prefix = open(codec, Layout::Dense, count, out);
        out.extend_from_slice(bytes);
        prefix.packed = self.pack(start + PREFIX_BYTES, out);
        out[start..start + PREFIX_BYTES].copy_from_slice(&prefix.encode());
        Ok(())
    }

    /// Appends the factors of a layer in pieces, and puts them into the plan as they will be received. `None` when they
    /// cannot be sent; then nothing was appended.
    pub(super) fn write_factors(
        &mut self,
        codec: &Arc<Codec>,
        layer: u32,
        thin: &Thin,
        layers: &[LayerRange],
        plan: &mut Plan,
        out: &mut Vec<u8>,
    ) -> Option<Vec<Range<usize>>> {
        if !kernels::all_finite(&thin.values) {
            return None;
        }
        let (begin, mut decoder) = (out.len(), Decoder::new(codec.clone()));
        let mut payloads = Vec::new();
        for (piece, values) in (0..).zip(thin.values.chunks(PIECE_VALUES)) {
            let start = out.len();
            let mut prefix = open(codec, Layout::Factors, values.len(), out);
            out.extend_from_slice(&PieceHead { layer, shape: thin.shape, piece }.encode());
            let body = write_values(codec, &Context::default(), values, out);
            prefix.packed = self.pack(body, out);
            out[start..start + PREFIX_BYTES].copy_from_slice(&prefix.encode());
            if decoder.take_factors(&out[start..], layers, &mut plan.products).is_err() {
                plan.products.remove(&layers[layer as usize].elements);
                out.truncate(begin);
                return None;
            }
            payloads.push(start..out.len());
        }
        Some(payloads)
    }

    /// The whole way for a chain that is one quantiser and keeps nothing.
    fn quantise(
        &mut self,
        codec: &Codec,
        quantiser: &dyn Quantiser,
        values: &[f32],
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let start = out.len();
        let mut prefix = open(codec, Layout::Dense, values.len(), out);
        if !quantiser.quantise_finite(context, values, out) {
            out.truncate(start);
            return Err(CodecError::NonFinite);
        }
        prefix.packed = self.pack(start + PREFIX_BYTES, out);
        out[start..start + PREFIX_BYTES].copy_from_slice(&prefix.encode());
        Ok(())
    }

    /// Appends the payload of `input`, and brings the residual and the memory up to date.
    fn write(
        &mut self,
        codec: &Codec,
        start: usize,
        input: &mut [f32],
        state: &mut ChunkState<'_>,
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) {
        let begin = out.len();
        let keeps = !state.residual.is_empty() && codec.keeps_residual();
        let (mut prefix, mut sent) = self.body(codec, start, input, context, out, keeps);
        let body = begin + PREFIX_BYTES;
        if prefix.layout != Layout::Raw && out.len() - body > 4 * input.len() {
            out.truncate(begin);
            if sent == Sent::Taken {
                self.mask.put(&self.values, input);
            }
            (prefix, sent) = raw(codec, input, out);
        }
        prefix.packed = self.pack(body, out);
        out[begin..body].copy_from_slice(&prefix.encode());
        self.remember(codec, sent, input, state);
    }

    /// Appends room for a prefix, and a body.
    fn body(
        &mut self,
        codec: &Codec,
        start: usize,
        input: &mut [f32],
        context: &Context<'_>,
        out: &mut Vec<u8>,
        keeps: bool,
    ) -> (Prefix, Sent) {
        if !codec.applies(context) || input.is_empty() {
            return raw(codec, input, out);
        }
        if let Some(Plan { products, .. }) = context.plan
            && products.covered(start..start + input.len()) > 0
        {
            return self.low_rank_body(codec, products, start, input, context, out, keeps);
        }
        let masked = match (&codec.sparsifier, codec.container) {
            (Some(sparsifier), _) => {
                self.mask.reset(input.len());
                match context.plan.filter(|plan| plan.selects()) {
                    Some(plan) => plan.mark(start, input, &mut self.mask),
                    None => sparsifier.select(context, input, &mut self.mask),
                }
                true
            }
            (None, Some(container)) if container != Container::Dense => {
                self.mask.select_nonzero(input);
                true
            }
            _ => false,
        };
        if !masked {
            if codec.quantiser.is_none() {
                return raw(codec, input, out);
            }
            let prefix = open(codec, Layout::Dense, input.len(), out);
            let values = write_values(codec, context, input, out);
            if !(keeps && codec.feeds_back()) {
                return (prefix, Sent::All);
            }
            self.received.resize(input.len(), 0.0);
            read_back(codec, &out[values..], input, &mut self.received);
            return (prefix, Sent::Rounded);
        }
        self.masked_body(codec, input, context, out, keeps)
    }

    /// A body of what factors do not cover.
    #[expect(clippy::too_many_arguments, reason = "those of a body, and the factors")]
    fn low_rank_body(
        &mut self,
        codec: &Codec,
        products: &Products,
        start: usize,
        input: &[f32],
        context: &Context<'_>,
        out: &mut Vec<u8>,
        keeps: bool,
    ) -> (Prefix, Sent) {
        products.gather_rest(start, input, &mut self.values);
        let prefix = open(codec, Layout::LowRank, self.values.len(), out);
        let values = write_values(codec, context, &self.values, out);
        if !keeps {
            return (prefix, Sent::All);
        }
        let mut rest = vec![0.0; self.values.len()];
        let readable = read_back(codec, &out[values..], &self.values, &mut rest);
        self.received.resize(input.len(), 0.0);
        products.fill(start, &rest, &mut self.received);
        if readable && kernels::all_finite(&self.received) {
            return (prefix, Sent::Rounded);
        }
        out.truncate(values - PREFIX_BYTES);
        raw(codec, input, out)
    }

    /// A body of the mask's entries.
    fn masked_body(
        &mut self,
        codec: &Codec,
        input: &mut [f32],
        context: &Context<'_>,
        out: &mut Vec<u8>,
        keeps: bool,
    ) -> (Prefix, Sent) {
        let feeds_back = keeps && codec.feeds_back();
        if feeds_back {
            self.mask.gather(input, &mut self.values)
        } else {
            self.mask.take(input, &mut self.values)
        }
        let scale = codec.sparsifier.as_ref().map_or(1.0, |sparsifier| sparsifier.scale(input.len()));
        if scale != 1.0 {
            kernels::scale(&mut self.values, scale);
            // Scaling must not make finite values infinite.
            super::clip::clamp(&mut self.values, f32::MAX);
        }
        let (prefix, values) = self.write_masked(codec, input.len(), context, out);
        if !feeds_back {
            return (prefix, Sent::Taken);
        }
        if prefix.layout == Layout::Dense {
            self.values.resize(input.len(), 0.0);
            read_back(codec, &out[values..], &self.received, &mut self.values);
            self.received.copy_from_slice(&self.values);
            return (prefix, Sent::Rounded);
        }
        self.received.resize(self.values.len(), 0.0);
        read_back(codec, &out[values..], &self.values, &mut self.received);
        (prefix, Sent::MaskedRounded)
    }

    /// Appends room for a prefix, and a body of the mask's entries, which are in `values`. Where the body's values begin.
    /// In a dense body they are those of `received`.
    fn write_masked(
        &mut self,
        codec: &Codec,
        len: usize,
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> (Prefix, usize) {
        let count = self.values.len();
        let container = codec.container.unwrap_or_default();
        let layout = container.layout(len, count, |count| codec.value_bytes(count));
        if layout == Layout::Dense {
            self.received.clear();
            self.received.resize(len, 0.0);
            self.mask.put(&self.values, &mut self.received);
            let prefix = open(codec, layout, len, out);
            return (prefix, write_values(codec, context, &self.received, out));
        }
        let prefix = open(codec, layout, count, out);
        container::write_places(layout, &self.mask, out);
        (prefix, write_values(codec, context, &self.values, out))
    }

    /// Replaces the body by its compressed form, if that is shorter.
    fn pack(&mut self, body: usize, out: &mut Vec<u8>) -> bool {
        let Some(packer) = &mut self.packer else { return false };
        self.packed.clear();
        if !packer.pack(&out[body..], &mut self.packed) || self.packed.len() >= out.len() - body {
            return false;
        }
        out.truncate(body);
        out.extend_from_slice(&self.packed);
        true
    }

    /// Updates the residual: what was not sent. Velocities of sent entries begin anew (factor masking, DGC section 3.2).
    fn remember(&mut self, codec: &Codec, sent: Sent, input: &[f32], state: &mut ChunkState<'_>) {
        let ChunkState { residual, velocity } = state;
        if !residual.is_empty() {
            // A chain that keeps no residual sends the one that another chain left, once.
            let sent = if codec.keeps_residual() { sent } else { Sent::All };
            match sent {
                Sent::All => kernels::fill(residual, 0.0),
                Sent::Taken => residual.copy_from_slice(input),
                Sent::MaskedRounded => {
                    self.mask.gather(input, &mut self.values);
                    for (rest, received) in self.values.iter_mut().zip(&self.received) {
                        *rest -= received;
                    }
                    residual.copy_from_slice(input);
                    self.mask.put(&self.values, residual);
                }
                Sent::Rounded => subtract_into(residual, input, &self.received),
            }
        }
        if codec.momentum().is_some() {
            velocity.copy_from_slice(&self.velocity);
            if sent != Sent::All {
                self.mask.clear(velocity);
            }
        }
    }
}

/// Appends room for a prefix.
fn open(codec: &Codec, layout: Layout, count: usize, out: &mut Vec<u8>) -> Prefix {
    out.extend_from_slice(&[0; PREFIX_BYTES]);
    Prefix { layout, packed: false, tag: codec.tag(), count: count as u32 }
}

fn raw(codec: &Codec, input: &[f32], out: &mut Vec<u8>) -> (Prefix, Sent) {
    let prefix = open(codec, Layout::Raw, input.len(), out);
    write_floats(input, out);
    (prefix, Sent::All)
}

/// Appends values as the chain's quantiser has them. Where they begin.
fn write_values(codec: &Codec, context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) -> usize {
    let start = out.len();
    match &codec.quantiser {
        Some(quantiser) => quantiser.quantise(context, values, out),
        None => write_floats(values, out),
    }
    start
}

/// Decodes what was encoded, as the receiver will. False when the receiver will refuse it.
fn read_back(codec: &Codec, bytes: &[u8], values: &[f32], received: &mut [f32]) -> bool {
    match &codec.quantiser {
        Some(quantiser) => quantiser.dequantise(bytes, received).is_ok(),
        None => {
            received.copy_from_slice(values);
            true
        }
    }
}
