//! The sender's end of a chain: what it remembers, and how values become a payload.

use super::container::{self, Container};
use super::matrix::SHAPE_BYTES;
use super::payload::{Layout, PREFIX_BYTES, Prefix, write_floats};
use super::{Codec, CodecError, Context, Decoder, Mask, Packer, Quantiser};
use crate::absence::Absent;
use crate::kernels;
use crate::store::Buffer;
use multiversion::multiversion;
use std::ops::Range;
use std::sync::Arc;

/// The sender's end of a chain, for one table and one direction.
#[derive(Debug)]
pub struct Encoder {
    codec: Arc<Codec>,
    /// Residual: what was not sent yet. Empty when the chain keeps none, and was given none to keep.
    residual: Buffer,
    /// Velocities (DGC) or the last factors (PowerSGD); empty when the chain has neither.
    memory: Buffer,
    /// Elements that are sent.
    elements: usize,
    work: Work,
}

/// Memory that is used again for every stretch.
#[derive(Debug)]
struct Work {
    /// Aligned as residuals are: a copy between memory that is 16 bytes off is ten times as slow.
    input: Buffer,
    velocity: Vec<f32>,
    mask: Mask,
    values: Vec<f32>,
    received: Vec<f32>,
    packed: Vec<u8>,
    packer: Option<Box<dyn Packer>>,
    /// Residuals and velocities of absent ranges, set aside while the others are encoded.
    held: Vec<f32>,
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

impl Encoder {
    /// For a table of which `elements` are sent.
    pub fn new(codec: Arc<Codec>, elements: usize) -> Encoder {
        let remembers = codec.momentum().is_some()
            || codec.low_rank.as_ref().is_some_and(|low_rank| low_rank.keeps_residual());
        let memory = Buffer::zeroed(if remembers { elements } else { 0 });
        let residual = Buffer::zeroed(if codec.keeps_residual() { elements } else { 0 });
        Encoder { residual, memory, elements, ..Encoder::without_memory(codec) }
    }

    /// For values that are whole by themselves: it keeps nothing, even if the chain would.
    pub fn without_memory(codec: Arc<Codec>) -> Encoder {
        let work = Work::new(codec.bytes.as_ref().map(|bytes| bytes.packer()));
        Encoder { residual: Buffer::zeroed(0), memory: Buffer::zeroed(0), elements: 0, work, codec }
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

    /// Does `work` on the chunk that begins at `start` while the residual (and DGC's velocity) of the chunk's absent
    /// ranges is set aside, and puts it back afterwards. What was not sent of these ranges waits for their next gradient.
    /// The receiver takes zeros for whatever a payload says of them, so no rounding error of theirs is kept either.
    pub fn holding<R>(&mut self, start: usize, absent: &Absent, work: impl FnOnce(&mut Encoder) -> R) -> R {
        let mut held = std::mem::take(&mut self.work.held);
        held.clear();
        for part in self.kept_of(start, absent) {
            held.extend_from_slice(part);
            part.fill(0.0);
        }
        let result = work(self);
        let mut left = held.as_slice();
        for part in self.kept_of(start, absent) {
            let (values, rest) = left.split_at(part.len());
            part.copy_from_slice(values);
            left = rest;
        }
        self.work.held = held;
        result
    }

    /// Residual and velocity of each absent element of the chunk that begins at `start`.
    fn kept_of<'a>(&'a mut self, start: usize, absent: &'a Absent) -> impl Iterator<Item = &'a mut [f32]> {
        // PowerSGD's memory is of factors, which belong to no element.
        let velocity = self.codec.momentum().is_some().then_some(&mut self.memory);
        let buffers = [Some(&mut self.residual), velocity].into_iter().flatten();
        buffers.filter(|buffer| !buffer.is_empty()).flat_map(move |buffer| {
            let mut rest = &mut buffer.as_mut_slice()[start..];
            let mut passed = 0;
            absent.ranges().iter().map(move |range| {
                let (first, end) = (range.start as usize - passed, range.end as usize - passed);
                let (head, tail) = std::mem::take(&mut rest).split_at_mut(end);
                (rest, passed) = (tail, range.end as usize);
                &mut head[first..]
            })
        })
    }

    /// Bytes of memory held.
    pub fn memory_bytes(&self) -> usize {
        self.residual.memory_bytes() + self.memory.memory_bytes()
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
        let Encoder { codec, residual, memory, work, .. } = self;
        if let Some(quantiser) = codec.only_quantiser(context)
            && residual.is_empty()
            && quantiser.bytes(values.len()) < 4 * values.len()
        {
            return work.quantise(codec, quantiser, values, context, out);
        }
        let residual = stretch(residual, start..start + values.len());
        let memory = stretch(memory, start..start + values.len());
        let mut buffer = std::mem::replace(&mut work.input, Buffer::zeroed(0));
        if buffer.len() < values.len() {
            buffer = Buffer::zeroed(values.len());
        }
        let input = &mut buffer.as_mut_slice()[..values.len()];
        let finite = take_input(codec, work, input, values, residual, memory);
        let result = match finite {
            true => {
                work.write(codec, input, residual, memory, context, out);
                Ok(())
            }
            false if kernels::all_finite(values) => Err(CodecError::Overflow),
            false => Err(CodecError::NonFinite),
        };
        work.input = buffer;
        result
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
        let Encoder { codec, work, .. } = self;
        work.mask.reset(len);
        work.values.clear();
        let mut next = 0;
        for (place, value) in chosen {
            if place < next || place >= len {
                return Err(CodecError::Input("places out of order or beyond its end".into()));
            }
            next = place + 1;
            if value != 0.0 {
                work.mask.set(place);
                work.values.push(value);
            }
        }
        if !kernels::all_finite(&work.values) {
            return Err(CodecError::NonFinite);
        }
        let (start, body) = (out.len(), out.len() + PREFIX_BYTES);
        let (mut prefix, _) = work.write_masked(codec, len, context, out);
        if out.len() - body > 4 * len {
            out.truncate(start);
            work.received.clear();
            work.received.resize(len, 0.0);
            work.mask.put(&work.values, &mut work.received);
            (prefix, _) = raw(codec, &work.received, out);
        }
        prefix.packed = work.pack(body, out);
        out[start..body].copy_from_slice(&prefix.encode());
        Ok(())
    }

    /// Appends the payload of `count` values that the caller quantised as the chain's quantiser would have.
    pub fn encode_quantised(
        &mut self,
        count: usize,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let Encoder { codec, work, .. } = self;
        let is_dense = codec.sparsifier.is_none()
            && codec.low_rank.is_none()
            && matches!(codec.container, None | Some(Container::Dense));
        let Some(quantiser) = codec.quantiser.as_deref().filter(|quantiser| {
            is_dense && quantiser.bytes(count) == bytes.len() && bytes.len() < 4 * count.max(1)
        }) else {
            return Err(CodecError::Input(format!("{} bytes, and `{codec}` makes others", bytes.len())));
        };
        work.received.resize(count, 0.0);
        quantiser.dequantise(bytes, &mut work.received).map_err(CodecError::Input)?;
        if !kernels::all_finite(&work.received) {
            return Err(CodecError::NonFinite);
        }
        let start = out.len();
        let mut prefix = open(codec, Layout::Dense, count, out);
        out.extend_from_slice(bytes);
        prefix.packed = work.pack(start + PREFIX_BYTES, out);
        out[start..start + PREFIX_BYTES].copy_from_slice(&prefix.encode());
        Ok(())
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
        if self.residual.is_empty() {
            self.residual = Buffer::zeroed(self.elements);
        }
        kernels::add(&mut self.residual.as_mut_slice()[start..start + values.len()], values);
    }

    /// The same for values that will be encoded again: what is kept is what was kept before them, but for rounding.
    pub fn undo(&mut self, start: usize, values: &[f32], payload: &[u8]) {
        self.put_back(start, values.len(), payload);
        let residual = stretch(&mut self.residual, start..start + values.len());
        if !residual.is_empty() {
            kernels::add_scaled(residual, values, -1.0);
        }
    }
}

/// The part of a buffer that belongs to a stretch; nothing when there is no buffer.
fn stretch(buffer: &mut Buffer, range: Range<usize>) -> &mut [f32] {
    if buffer.is_empty() { &mut [] } else { &mut buffer.as_mut_slice()[range] }
}

/// Puts into `input` what is to be sent. False when some of it is not finite.
fn take_input(
    codec: &Codec,
    work: &mut Work,
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
        work.velocity.clear();
        work.velocity.extend_from_slice(velocity);
        kernels::scale(&mut work.velocity, momentum);
        kernels::add(&mut work.velocity, if clipped { input } else { values });
        return add_into(input, residual, &work.velocity);
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

impl Work {
    fn new(packer: Option<Box<dyn Packer>>) -> Work {
        let (velocity, mask, values, received, packed, held) = Default::default();
        Work { input: Buffer::zeroed(0), velocity, mask, values, received, packed, packer, held }
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
        input: &mut [f32],
        residual: &mut [f32],
        memory: &mut [f32],
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) {
        let start = out.len();
        let keeps = !residual.is_empty() && codec.keeps_residual();
        let (mut prefix, mut sent) = self.body(codec, input, memory, context, out, keeps);
        let body = start + PREFIX_BYTES;
        if prefix.layout != Layout::Raw && out.len() - body > 4 * input.len() {
            out.truncate(start);
            if sent == Sent::Taken {
                self.mask.put(&self.values, input);
            }
            (prefix, sent) = raw(codec, input, out);
        }
        prefix.packed = self.pack(body, out);
        out[start..body].copy_from_slice(&prefix.encode());
        self.remember(codec, sent, input, residual, memory);
    }

    /// Appends room for a prefix, and a body.
    fn body(
        &mut self,
        codec: &Codec,
        input: &mut [f32],
        memory: &mut [f32],
        context: &Context<'_>,
        out: &mut Vec<u8>,
        keeps: bool,
    ) -> (Prefix, Sent) {
        if !codec.applies(context) || input.is_empty() {
            return raw(codec, input, out);
        }
        if let Some(low_rank) = &codec.low_rank
            && let Some(thin) = low_rank.factor(context, input, memory)
            && kernels::all_finite(&thin.values)
        {
            let prefix = open(codec, Layout::LowRank, thin.values.len(), out);
            out.extend_from_slice(&thin.shape.encode());
            let values = write_values(codec, context, &thin.values, out);
            self.values.resize(thin.values.len(), 0.0);
            let readable = read_back(codec, &out[values..], &thin.values, &mut self.values);
            self.received.resize(input.len(), 0.0);
            thin.shape.product(&self.values, &mut self.received);
            if readable && kernels::all_finite(&self.received) {
                return (prefix, Sent::Rounded);
            }
            out.truncate(values - PREFIX_BYTES - SHAPE_BYTES);
            kernels::fill(memory, 0.0);
            return raw(codec, input, out);
        }
        if codec.low_rank.is_some() {
            // Factors that are not finite are no place to begin the next step from.
            let spoilt = !kernels::all_finite(memory);
            memory.iter_mut().filter(|_| spoilt).for_each(|value| *value = 0.0);
        }
        let masked = match (&codec.sparsifier, codec.container) {
            (Some(sparsifier), _) => {
                self.mask.reset(input.len());
                sparsifier.select(context, input, &mut self.mask);
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
    fn remember(
        &mut self,
        codec: &Codec,
        sent: Sent,
        input: &[f32],
        residual: &mut [f32],
        memory: &mut [f32],
    ) {
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
            memory.copy_from_slice(&self.velocity);
            if sent != Sent::All {
                self.mask.clear(memory);
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
