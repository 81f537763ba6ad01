//! Gradients on their way from the application to the requests that bring them to servers.
//!
//! Pushes, exchanges of slabs and prepared gradients differ in what they bring, not in how it travels. A [`Submission`] is
//! begun and finished by the worker ([`super::Worker::begin_push`], [`super::Worker::begin_exchange`],
//! [`super::Worker::finish`]), and what takes time, copying and encoding, is between the two: [`Submission::prepare`] needs
//! no worker, so that a driver does not hold its lock meanwhile. A table's codec is with its submission as long.

use super::WorkerError;
use super::encoding::{Made, Plain, PushCodec};
use super::gradient::Gradient;
use super::holder::{Held, Holding, MergedRows, MergedTable};
use super::layout::{Layout, elements_of};
use super::missing::{Missing, NOTHING};
use super::request::{Outgoing, OutgoingForm};
use super::slab::{Prepared, Slab};
use super::ticket::{Pending, TicketKind};
use crate::codec::{CodecError, half};
use crate::hands::{self, Hands};
use crate::hold::{Hold, UpdateView};
use crate::kernels;
use crate::lease::{Lease, Pool};
use crate::limits;
use crate::policy::NonFinite;
use crate::store::{Allocate, Buffer};
use crate::types::{Clock, Time};
use crate::wire::DType;
use std::sync::Arc;

/// Gradients of one clock that are about to be sent, under one ticket.
#[derive(Debug)]
pub struct Submission<'a> {
    pub(super) clock: Clock,
    pub(super) kind: SubmissionKind,
    pub(super) parts: Vec<Part<'a>>,
    /// Why it cannot be sent.
    pub(super) error: Option<WorkerError>,
}

/// What is asked for with the gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SubmissionKind {
    /// One table's, and the parameters that follow where they are wanted.
    Push { want_params: bool },
    /// Those of slabs, and the parameters that follow.
    Exchange,
}

impl SubmissionKind {
    /// The ticket that its application waits on, for gradients of a clock.
    pub(super) fn pending(self, now: Time, clock: Clock, parts: &[Part<'_>]) -> Pending {
        match self {
            SubmissionKind::Push { .. } => {
                Pending::new(TicketKind::Push { table: parts[0].table, clock }, now)
            }
            SubmissionKind::Exchange => {
                Pending::new(TicketKind::Exchange { clock, tables: parts.len() }, now).read_by(clock + 1)
            }
        }
    }
}

/// One table's part of a submission.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub(super) table: usize,
    pub(super) source: Source<'a>,
    /// The table's codec; gone once it is back.
    pub(super) codec: Option<PushCodec>,
    /// How the gradient is sent, once that is known.
    pub(super) sent: Option<Sent>,
    /// It has NaN or Inf.
    pub(super) is_nonfinite: bool,
    /// What is held back of the table, where the policy `hold` holds something or did.
    pub(super) holding: Option<Holding>,
    /// Its update is held back.
    pub(super) is_held: bool,
    /// The gradient in other memory than the application's: clipped, or as it was before the application prepared it.
    own: Option<Buffer>,
    /// The update together with the gradient, as a criterion sees it.
    update: Option<UpdateView>,
    /// The update that is sent in place of the gradient.
    merged: Option<Merged>,
    surroundings: Surroundings,
}

/// Gradients that were held back and are sent now, with the newest one.
#[derive(Debug)]
enum Merged {
    Table(MergedTable),
    Rows(MergedRows),
}

/// What a part knows of its table.
#[derive(Debug)]
pub(super) struct Surroundings {
    pub(super) layout: Arc<Layout>,
    pub(super) nonfinite: NonFinite,
    pub(super) pool: Pool,
    pub(super) allocator: Arc<dyn Allocate>,
    /// The parameters, where the codec or the policy `hold` compares a gradient with them and a slab does not have them.
    pub(super) parameters: Option<Lease>,
    /// A link that it travels over carries less than the codec needs.
    pub(super) lacks_room: bool,
    /// An exchange may end before frames are sent: they are not sent from a slab's own memory.
    pub(super) may_end_early: bool,
}

/// A gradient as the application brought it.
#[derive(Debug)]
pub(super) enum Source<'a> {
    /// In its own memory, with what it does not have.
    Given(Gradient<'a>, Missing),
    /// In a slab. Gone once it is in flight, or was returned.
    Slab(Option<Slab>),
    /// There is none: what is held back of the table is to be sent.
    Held,
}

/// A gradient as it is sent.
#[derive(Debug)]
pub(super) enum Sent {
    /// Elements of this type, from the slab's own memory.
    InPlace(DType),
    /// From other memory.
    Made(Outgoing),
}

impl Submission<'_> {
    /// Copies or encodes the gradients. Large ones are shared among `hands`. What goes wrong is said when it is finished.
    pub fn prepare(&mut self, hands: &dyn Hands) {
        let clock = self.clock;
        // What an encoder counts as sent is not undone: everything that may be refused comes first.
        let looked = self.parts.iter_mut().try_for_each(|part| part.look(clock, hands));
        let encoded =
            looked.and_then(|()| self.parts.iter_mut().try_for_each(|part| part.encode(clock, hands)));
        self.error = encoded.err();
    }

    /// The slabs, if it could not be finished.
    pub fn take_slabs(&mut self) -> Vec<Slab> {
        self.parts.iter_mut().filter_map(|part| part.source.take_slab()).collect()
    }
}

impl Source<'_> {
    pub(super) fn take_slab(&mut self) -> Option<Slab> {
        match self {
            Source::Slab(slab) => slab.take(),
            Source::Given(..) | Source::Held => None,
        }
    }

    fn slab(&self) -> Option<&Slab> {
        match self {
            Source::Slab(slab) => slab.as_ref(),
            Source::Given(..) | Source::Held => None,
        }
    }

    fn prepared(&self) -> Prepared {
        self.slab().map_or(Prepared::Gradient, Slab::prepared)
    }

    fn plain<'b>(&'b self, clock: Clock, surroundings: &'b Surroundings) -> Plain<'b> {
        let parameters = surroundings.parameters.as_ref().map_or(&[][..], |lease| lease.as_slice());
        match (self, self.slab()) {
            (_, Some(slab)) => Plain {
                clock,
                gradient: Gradient::Dense(slab.gradient()),
                prepared: slab.prepared(),
                followed: slab.followed(),
                missing: slab.missing(),
                // Codecs that compare a gradient with the parameters find them in the slab.
                parameters: slab.values(),
                lacks_room: surroundings.lacks_room,
            },
            (Source::Given(gradient, missing), None) => Plain {
                clock,
                gradient: *gradient,
                prepared: Prepared::Gradient,
                followed: None,
                missing,
                parameters,
                lacks_room: surroundings.lacks_room,
            },
            (Source::Slab(_) | Source::Held, None) => Plain {
                clock,
                gradient: Gradient::Dense(&[]),
                prepared: Prepared::Gradient,
                followed: None,
                missing: &NOTHING,
                parameters,
                lacks_room: surroundings.lacks_room,
            },
        }
    }
}

impl<'a> Part<'a> {
    pub(super) fn new(
        table: usize,
        source: Source<'a>,
        codec: PushCodec,
        holding: Option<Holding>,
        surroundings: Surroundings,
    ) -> Part<'a> {
        Part {
            table,
            source,
            codec: Some(codec),
            sent: None,
            is_nonfinite: false,
            holding,
            is_held: false,
            own: None,
            update: None,
            merged: None,
            surroundings,
        }
    }

    /// Looks at everything that may be refused.
    fn look(&mut self, clock: Clock, hands: &dyn Hands) -> Result<(), WorkerError> {
        if let Source::Slab(Some(slab)) = &mut self.source {
            slab.clear_missing();
        }
        match &self.holding {
            // What it has merged before is not looked at again, and what the application prepared has to be decoded first.
            Some(holding) if holding.holder.has_merged(clock) => Ok(()),
            Some(_) if self.source.prepared() != Prepared::Gradient => Ok(()),
            Some(_) => self.measure(clock),
            None => self.look_at_gradient(clock, hands),
        }
    }

    /// Encodes what is not prepared by now, unless it is held back.
    fn encode(&mut self, clock: Clock, hands: &dyn Hands) -> Result<(), WorkerError> {
        let Some(holding) = &self.holding else { return self.encode_gradient(clock, hands) };
        if self.source.prepared() != Prepared::Gradient && !holding.holder.has_merged(clock) {
            self.expand(clock)?;
            self.measure(clock)?;
        }
        let Some(mut holding) = self.holding.take() else { return Ok(()) };
        let encoded = self.hold_or_encode(&mut holding, clock, hands);
        self.holding = Some(holding);
        encoded
    }

    /// Prepares what a codec need not encode, and looks at what it does.
    fn look_at_gradient(&mut self, clock: Clock, hands: &dyn Hands) -> Result<(), WorkerError> {
        let is_own = self.own.is_some() || self.merged.is_some();
        let Part { source, codec, own, merged, surroundings, .. } = self;
        let Some(codec) = codec else { return Ok(()) };
        let plain = plain(source, own.as_ref(), merged.as_ref(), clock, surroundings);
        if let Some(dtype) = codec.prepared_halves(&plain) {
            self.sent = Some(surroundings.of_slab(&plain, dtype));
            return Ok(());
        }
        if plain.prepared != Prepared::Gradient {
            return Ok(());
        }
        let is_finite = match codec.elements() {
            // Another pass over a slab would cost as much as sending it, and servers look too.
            Some(DType::F32) if source.slab().is_some() && !is_own => {
                self.sent = Some(surroundings.of_slab(&plain, DType::F32));
                return Ok(());
            }
            Some(dtype) => {
                let (outgoing, is_finite) = surroundings.elements(&plain, dtype, hands);
                self.sent = Some(Sent::Made(outgoing));
                is_finite
            }
            None => is_finite(plain.gradient.values(), hands),
        };
        if is_finite {
            return Ok(());
        }
        self.is_nonfinite = true;
        if surroundings.nonfinite == NonFinite::Clip {
            return Ok(());
        }
        self.sent = None;
        Err(surroundings.not_finite(clock))
    }

    /// Lets the codec encode what is not prepared by now.
    fn encode_gradient(&mut self, clock: Clock, hands: &dyn Hands) -> Result<(), WorkerError> {
        let Part { source, codec, own, merged, surroundings, .. } = self;
        let (Some(codec), None) = (codec, &self.sent) else { return Ok(()) };
        let plain = plain(source, own.as_ref(), merged.as_ref(), clock, surroundings);
        self.sent = Some(Sent::Made(surroundings.encode(codec, &plain, hands)?));
        Ok(())
    }

    /// Measures the gradient together with what is held back, and refuses what is not finite: once it is merged, it cannot be taken out
    /// any more.
    fn measure(&mut self, clock: Clock) -> Result<(), WorkerError> {
        let Part { source, holding, own, surroundings, .. } = self;
        let Some(Holding { holder, .. }) = holding else { return Ok(()) };
        let given = plain(source, own.as_ref(), None, clock, surroundings).gradient;
        if !kernels::all_finite(given.values()) {
            self.is_nonfinite = true;
            if surroundings.nonfinite != NonFinite::Clip {
                return Err(surroundings.not_finite(clock));
            }
            *own = Some(surroundings.clipped(&given));
        }
        let gradient = plain(source, own.as_ref(), None, clock, surroundings).gradient;
        let is_finite = match (&holder.held, gradient) {
            (Held::Rows(held), Gradient::Rows { rows, values }) => held.is_finite_with(rows, values),
            (Held::Table(held), _) if !matches!(source, Source::Held) => {
                let values = gradient.values();
                let view = held.view(values, kernels::squared_norm(values), clock, holder.push());
                self.update = Some(view);
                view.squared_norm.is_finite()
            }
            _ => true,
        };
        if is_finite { Ok(()) } else { Err(surroundings.not_finite(clock)) }
    }

    /// Merges the gradient with what is held back, and holds it back or encodes it.
    fn hold_or_encode(
        &mut self,
        holding: &mut Holding,
        clock: Clock,
        hands: &dyn Hands,
    ) -> Result<(), WorkerError> {
        if holding.holder.has_merged(clock) && !matches!(self.source, Source::Held) {
            // An earlier attempt at this push failed: what it merged is held back, or is sent again as it is.
            let refused = self.codec.as_mut().and_then(|codec| codec.take_refused(clock));
            self.is_held = refused.is_none();
            self.sent = Some(Sent::Made(refused.unwrap_or_else(|| self.surroundings.nothing())));
            return Ok(());
        }
        self.merge(holding, clock);
        let push = holding.holder.push();
        holding.holder.turn();
        let is_nothing = matches!(self.source, Source::Held) && self.merged.is_none();
        if self.is_held || is_nothing {
            self.sent = Some(Sent::Made(self.surroundings.nothing()));
            return Ok(());
        }
        let encoded = match self.merged.take() {
            Some(Merged::Table(merged)) if self.sends_floats() => {
                self.sent = Some(Sent::Made(self.surroundings.of_merged(merged)));
                return Ok(());
            }
            Some(Merged::Rows(rows)) if rows.rows.is_empty() => {
                self.sent = Some(Sent::Made(self.surroundings.nothing()));
                return Ok(());
            }
            merged => {
                self.merged = merged;
                self.look_at_gradient(clock, hands).and_then(|()| self.encode_gradient(clock, hands))
            }
        };
        let is_merged = self.merged.is_some();
        match (self.merged.take(), &mut holding.holder.held, &encoded) {
            (Some(Merged::Table(merged)), Held::Table(held), Err(_)) => held.put_back(merged),
            (Some(Merged::Rows(merged)), Held::Rows(held), Err(_)) => held.put_back(merged, push),
            (Some(Merged::Table(merged)), ..) => self.surroundings.pool.keep(merged.sum),
            _ => {}
        }
        if let Some(Sent::Made(outgoing)) = &mut self.sent {
            // The application cannot push again what was held back before.
            outgoing.is_counted |= is_merged;
        }
        encoded
    }

    /// Decodes a gradient that the application prepared.
    fn expand(&mut self, clock: Clock) -> Result<(), WorkerError> {
        let Part { source, codec, surroundings, .. } = self;
        let Some(codec) = codec else { return Ok(()) };
        let plain = plain(source, None, None, clock, surroundings);
        let mut buffer = surroundings.pool.take(surroundings.layout.elements(), &*surroundings.allocator);
        codec.expand(&plain, buffer.as_mut_slice()).map_err(|why| surroundings.codec_fault(why, &plain))?;
        self.own = Some(buffer);
        Ok(())
    }

    /// Holds the gradient back, or takes out what is to be sent.
    fn merge(&mut self, holding: &mut Holding, clock: Clock) {
        let Part { source, own, surroundings, update, merged, .. } = self;
        let Holding { hold, holder } = holding;
        let given = plain(source, own.as_ref(), None, clock, surroundings);
        let (has_gradient, push) = (!matches!(source, Source::Held), holder.push());
        match (&mut holder.held, given.gradient) {
            (Held::Rows(held), gradient) => {
                let (rows, values, hold) = match gradient {
                    Gradient::Rows { rows, values } => (rows, values, hold.as_deref()),
                    _ => (&[][..], &[][..], None),
                };
                let rows = held.merge(hold, rows, values, (clock, push));
                holder.note_merged(clock);
                holder.count(rows.rows.len() as u64, rows.longest, rows.held);
                *merged = Some(Merged::Rows(rows));
            }
            (Held::Table(held), gradient) => {
                let gradient = has_gradient.then_some((gradient.values(), given.missing));
                let view = update.map(|view| surroundings.compared(view, hold.as_deref(), source));
                let held_back = hold.as_ref().zip(view).filter(|(hold, view)| hold.holds(view));
                if let Some((gradient, (_, view))) = gradient.zip(held_back) {
                    held.keep(gradient, &view, push, (&surroundings.pool, &*surroundings.allocator));
                    holder.note_merged(clock);
                    holder.count(0, 0, 1);
                    self.is_held = true;
                    return;
                }
                let age = held.since().map_or(0, |since| push.saturating_sub(since));
                let update = held.take(gradient);
                if update.is_some() {
                    holder.note_merged(clock);
                }
                holder.count(1, age, 0);
                *merged = update.map(Merged::Table);
            }
        }
    }

    /// Whether the codec sends gradients as they are.
    fn sends_floats(&self) -> bool {
        self.codec.as_ref().is_some_and(|codec| codec.elements() == Some(DType::F32))
    }
}

/// The gradient that is sent: merged with what was held back, in memory of the worker's own, or the application's.
fn plain<'b>(
    source: &'b Source<'_>,
    own: Option<&'b Buffer>,
    merged: Option<&'b Merged>,
    clock: Clock,
    surroundings: &'b Surroundings,
) -> Plain<'b> {
    let given = source.plain(clock, surroundings);
    let made = Plain { prepared: Prepared::Gradient, followed: None, ..given };
    match (merged, own, given.gradient) {
        (Some(Merged::Table(merged)), ..) => {
            Plain { gradient: Gradient::Dense(merged.sum.as_slice()), missing: &merged.missing, ..made }
        }
        (Some(Merged::Rows(merged)), ..) => {
            Plain { gradient: Gradient::Rows { rows: &merged.rows, values: &merged.values }, ..made }
        }
        (None, Some(own), Gradient::Rows { rows, .. }) => {
            Plain { gradient: Gradient::Rows { rows, values: own.as_slice() }, ..made }
        }
        (None, Some(own), _) => Plain { gradient: Gradient::Dense(own.as_slice()), ..made },
        (None, None, _) => given,
    }
}

impl Surroundings {
    fn not_finite(&self, clock: Clock) -> WorkerError {
        WorkerError::NonFinite { table: self.layout.name().to_owned(), clock }
    }

    fn codec_fault(&self, why: CodecError, plain: &Plain<'_>) -> WorkerError {
        match why {
            CodecError::NonFinite if plain.prepared != Prepared::Gradient => self.not_finite(plain.clock),
            why => WorkerError::Codec { table: self.layout.name().to_owned(), why },
        }
    }

    /// The push of an iteration whose update is held back: no element has a gradient, and no row is in it.
    fn nothing(&self) -> Outgoing {
        let (form, missing) = match self.layout.is_sparse() {
            true => (OutgoingForm::Rows(Arc::default()), Missing::default()),
            false => (OutgoingForm::Held, Missing::all(self.layout.elements())),
        };
        Outgoing { buffer: Buffer::zeroed(0).into(), form, missing, is_counted: false }
    }

    /// An update that is sent as it is. The application cannot push it again.
    fn of_merged(&self, merged: MergedTable) -> Outgoing {
        let MergedTable { sum, missing, .. } = merged;
        let form = OutgoingForm::Dense(DType::F32);
        Outgoing { buffer: self.pool.lend(sum), form, missing, is_counted: true }
    }

    /// A gradient that has NaN or Inf, without them: chunk by chunk, as servers do, and row by row.
    fn clipped(&self, gradient: &Gradient<'_>) -> Buffer {
        let values = gradient.values();
        let mut buffer = self.pool.take(values.len(), &*self.allocator);
        let clipped = &mut buffer.as_mut_slice()[..values.len()];
        clipped.copy_from_slice(values);
        match gradient {
            Gradient::Rows { .. } => {
                for row in clipped.chunks_mut(self.layout.row_width()) {
                    kernels::clip_non_finite(row);
                }
            }
            Gradient::Dense(_) | Gradient::Product { .. } => {
                let chunks = self.layout.chunks();
                for (_, chunk) in chunks {
                    kernels::clip_non_finite(&mut clipped[elements_of(&chunk)]);
                }
            }
        }
        buffer
    }

    /// The view of an update with the norm of the parameters, where the policy looks at that.
    fn compared(&self, view: UpdateView, hold: Option<&Hold>, source: &Source<'_>) -> UpdateView {
        if !hold.is_some_and(Hold::needs_parameters) {
            return view;
        }
        let squared_parameters = match source.slab() {
            Some(slab) if slab.values_type() == DType::F32 => kernels::squared_norm(slab.values()),
            Some(slab) => {
                let halves = slab.values_type().values(slab.value_bytes());
                halves.map_or(0.0, |halves| kernels::squared_norm(&halves.to_vec()))
            }
            None => self.parameters.as_ref().map_or(0.0, |lease| kernels::squared_norm(lease.as_slice())),
        };
        UpdateView { squared_parameters, ..view }
    }

    /// A slab's gradient, which consists of elements of this type.
    fn of_slab(&self, plain: &Plain<'_>, dtype: DType) -> Sent {
        if !self.may_end_early {
            return Sent::InPlace(dtype);
        }
        let values = plain.gradient.values();
        let len = dtype.bytes() * values.len();
        let mut buffer = self.pool.take(values.len(), &*self.allocator);
        buffer.as_mut_bytes()[..len].copy_from_slice(&bytemuck::cast_slice(values)[..len]);
        let (form, missing) = (OutgoingForm::Dense(dtype), plain.missing.clone());
        Sent::Made(Outgoing { buffer: self.pool.lend(buffer), form, missing, is_counted: false })
    }

    /// A gradient as elements of a type, and whether it is finite.
    fn elements(&self, plain: &Plain<'_>, dtype: DType, hands: &dyn Hands) -> (Outgoing, bool) {
        let values = plain.gradient.values();
        let len = dtype.bytes() * values.len();
        let mut buffer = self.pool.take(len.div_ceil(4), &*self.allocator);
        let bytes = &mut buffer.as_mut_bytes()[..len];
        let is_finite = write_elements(dtype, values, bytes, hands);
        if !is_finite && dtype != DType::F32 {
            // Servers would not find in halves what is not finite here.
            write_clipped(dtype, values, bytes, &self.layout);
        }
        let form = match plain.gradient {
            Gradient::Dense(_) | Gradient::Product { .. } => OutgoingForm::Dense(dtype),
            Gradient::Rows { rows, .. } => OutgoingForm::Rows(Arc::new(rows.to_vec())),
        };
        let (buffer, missing) = (self.pool.lend(buffer), plain.missing.clone());
        (Outgoing { buffer, form, missing, is_counted: false }, is_finite)
    }

    /// A gradient as the codec makes it, in memory that frames are sent from.
    fn encode(
        &self,
        codec: &mut PushCodec,
        plain: &Plain<'_>,
        hands: &dyn Hands,
    ) -> Result<Outgoing, WorkerError> {
        let &Plain { clock, prepared, missing, .. } = plain;
        let layout = &self.layout;
        if prepared == Prepared::Gradient
            && let Some(encoded) = codec.take_refused(clock)
        {
            return Ok(encoded);
        }
        codec.put_refused_back(layout);
        let fault = |why: CodecError| self.codec_fault(why, plain);
        if codec.sends_plainly(plain) {
            let mut buffer = self.pool.take(layout.elements(), &*self.allocator);
            codec.expand(plain, buffer.as_mut_slice()).map_err(fault)?;
            let (form, missing) = (OutgoingForm::Dense(DType::F32), missing.clone());
            return Ok(Outgoing { buffer: self.pool.lend(buffer), form, missing, is_counted: false });
        }
        let encoded = codec.encode(layout, self.nonfinite, plain, hands);
        let Made { payloads, is_counted } = encoded.map_err(fault)?;
        let mut buffer = self.pool.take(codec.payload_elements(layout), &*self.allocator);
        codec.payloads().copy_to(buffer.as_mut_bytes(), hands);
        Ok(Outgoing {
            buffer: self.pool.lend(buffer),
            form: OutgoingForm::Encoded(Arc::new(payloads)),
            missing: missing.clone(),
            is_counted,
        })
    }
}

/// Writes a gradient as elements of a type while it is in cache for the check. Whether all of it is finite.
fn write_elements(dtype: DType, gradient: &[f32], to: &mut [u8], hands: &dyn Hands) -> bool {
    let pieces = hands::cut(hands, 0..gradient.len());
    let mut rest = to;
    let places = pieces.into_iter().map(|piece| {
        let (to, after) = std::mem::take(&mut rest).split_at_mut(piece.len() * dtype.bytes());
        rest = after;
        (&gradient[piece], to)
    });
    let written = hands::share_out(hands, places.collect(), |(from, to)| write_blocks(dtype, from, to));
    !written.contains(&false)
}

fn is_finite(gradient: &[f32], hands: &dyn Hands) -> bool {
    let pieces = hands::cut(hands, 0..gradient.len());
    let finite = hands::share_out(hands, pieces, |piece| kernels::all_finite(&gradient[piece]));
    !finite.contains(&false)
}

fn write_blocks(dtype: DType, gradient: &[f32], to: &mut [u8]) -> bool {
    let blocks = to.chunks_mut(limits::BLOCK_ELEMENTS * dtype.bytes());
    let mut is_finite = true;
    for (to, from) in blocks.zip(gradient.chunks(limits::BLOCK_ELEMENTS)) {
        is_finite &= half::write(dtype, from, to);
    }
    is_finite
}

/// The same for a gradient that is clipped, chunk by chunk, as servers do.
fn write_clipped(dtype: DType, gradient: &[f32], to: &mut [u8], layout: &Layout) {
    let width = dtype.bytes();
    for (_, chunk) in layout.chunks() {
        let place = elements_of(&chunk);
        let mut values = gradient[place.clone()].to_vec();
        kernels::clip_non_finite(&mut values);
        half::write(dtype, &values, &mut to[place.start * width..place.end * width]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hands::Alone;
    use crate::hands::tests::Backwards;

    const LEN: usize = (1 << 20) + 12_345;

    #[test]
    fn many_hands_make_what_one_makes_and_miss_nothing() {
        let mut values: Vec<f32> = (0..LEN).map(|at| (at % 1009) as f32 / 8.0 - 60.0).collect();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let mut made = [(); 2].map(|()| vec![0; values.len() * dtype.bytes()]);
            assert!(write_elements(dtype, &values, &mut made[0], &Alone));
            assert!(write_elements(dtype, &values, &mut made[1], &Backwards));
            assert!(made[0] == made[1], "{dtype:?}");
            for at in [0, LEN / 2, values.len() - 1] {
                let finite = std::mem::replace(&mut values[at], f32::INFINITY);
                assert!(!write_elements(dtype, &values, &mut made[1], &Backwards), "{dtype:?} at {at}");
                values[at] = finite;
            }
        }
    }
}
