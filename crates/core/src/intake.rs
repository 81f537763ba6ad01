//! The intake of pushes: frames of workers' gradients go to a sink, each exactly once, however often it is sent.
//!
//! A shard's sink are its rounds, an aggregator's its sums. The intake asks the sink whether a push is admitted, looks
//! whether its frame is the next one, reads the gradient, and hands it over. Frames of a push are numbered: one that was
//! taken is ignored when it comes again, and one that comes too early is refused. An attempt at a push is refused once;
//! its remaining frames are ignored, and the next attempt goes on with the first frame that was not taken. What a
//! refused frame brought has changed nothing.

mod content;
mod gradient;
mod screen;
mod under_way;

pub(crate) use gradient::GradientFrame;
pub(crate) use under_way::Push;

use crate::codec::{self, Codec};
use crate::limits;
use crate::policy::NonFinite;
use crate::table::Layout;
use crate::types::{AggregatorId, Clock, NodeId, Time, WorkerId};
use crate::wire::bounded::sequence;
use crate::wire::frame::Form;
use crate::wire::{Cause, Fault, frame};
use content::{ChunkPayload, ContentReader, MOST_FORMER};
use screen::{FiniteScreen, Screened};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use under_way::UnderWay;

/// One frame of a worker's push, as it arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PushFrame<'a> {
    pub(crate) now: Time,
    pub(crate) worker: WorkerId,
    pub(crate) push: &'a frame::Push,
    pub(crate) payload: &'a [u8],
}

/// A sink's answer to a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission<D> {
    /// Its gradients go there.
    Take(D),
    /// It is complete already.
    Duplicate,
}

/// The destination of gradients. Five methods are required.
pub(crate) trait Sink {
    /// The destination of one push.
    type Destination: Copy;
    /// State that is kept with a push while it is under way.
    type Kept: Default;

    /// The layout of the table on this node.
    fn layout(&self) -> &Layout;

    /// Whether a push is wanted, asked with each of its frames. `so_far` is where its frames before went. The error
    /// refuses the attempt. MUST NOT change what a later gradient becomes.
    fn admit(
        &mut self,
        frame: &PushFrame<'_>,
        so_far: Option<Self::Destination>,
    ) -> Result<Admission<Self::Destination>, Fault>;

    /// Takes the gradient of a push's next frame. Returns whether it completed a step of its chunk. MUST have taken
    /// nothing when it returns an error.
    fn add(
        &mut self,
        frame: &PushFrame<'_>,
        push: &mut Push<Self::Destination, Self::Kept>,
        gradient: GradientFrame<'_>,
    ) -> Result<bool, Fault>;

    /// All gradients of a push were added. `frame` is its last one.
    fn complete(&mut self, frame: &PushFrame<'_>, push: Push<Self::Destination, Self::Kept>);

    /// The last frame of a push arrived that was complete before: its worker was not told so.
    fn repeat(&mut self, frame: &PushFrame<'_>);

    /// Whether a push of a dense table may be without a gradient, because its worker knows that it comes too late.
    fn takes_empty_pushes(&self) -> bool {
        false
    }
}

/// Outcome of a push frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Nothing of it is added: it was taken before, its attempt was refused, or it has factors that later frames need.
    Ignored,
    /// More frames of this push are to come.
    Partly,
    /// The same; and the chunk of this frame has its part of the round's step.
    Stepped,
    /// The push is complete: it counts, and is acknowledged. Also for one that was complete before.
    Whole,
}

/// The frame of a push that is wanted.
#[derive(Debug, Default)]
struct NextFrame {
    sequence: u32,
    /// The chunk of the frame before it.
    last_chunk: Option<u32>,
}

/// The intake of one table's pushes, for a sink with these destinations and this to keep.
#[derive(Debug)]
pub(crate) struct Intake<D, K> {
    content: ContentReader,
    screen: FiniteScreen,
    under_way: UnderWay<D, K>,
}

/// What an image keeps of an intake. Factors are not in it: a worker that sends its push again sends them first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(bound(deserialize = "D: Deserialize<'de>, K: Deserialize<'de>"))]
pub(crate) struct IntakeImage<D, K> {
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pushes: Vec<Push<D, K>>,
    nonfinite: u64,
    /// Codecs that were in use before, oldest first, each with the first epoch that it does not read.
    #[serde(deserialize_with = "sequence::<_, _, MOST_FORMER>")]
    former_codecs: Vec<(u32, Option<String>)>,
}

impl<D: Copy + Clone, K: Default + Clone> Intake<D, K> {
    pub(crate) fn image(&self) -> IntakeImage<D, K> {
        IntakeImage {
            pushes: self.under_way.iter().cloned().collect(),
            nonfinite: self.screen.found(),
            former_codecs: self.content.former_codecs().collect(),
        }
    }

    /// Becomes the intake that an image was made of; its present codec is the same. `parse` reads a codec, and `check` says
    /// whether a push can be one. The error says why it cannot become it.
    pub(crate) fn restore(
        &mut self,
        image: IntakeImage<D, K>,
        parse: impl Fn(&str) -> Result<Arc<Codec>, String>,
        check: impl Fn(&Push<D, K>) -> Result<(), String>,
    ) -> Result<(), String> {
        let IntakeImage { pushes, nonfinite, former_codecs } = image;
        let codec =
            |(until, text): (u32, Option<String>)| Ok((until, text.map(|text| parse(&text)).transpose()?));
        let former: Vec<_> = former_codecs.into_iter().map(codec).collect::<Result<_, String>>()?;
        self.content.set_former_codecs(former.into_iter());
        self.screen.set_found(nonfinite);
        for push in pushes {
            check(&push)?;
            if push.worker().0 >= limits::MAX_WORKERS || self.under_way.get(push.worker()).is_some() {
                return Err(format!("{} has two pushes under way, or cannot have one", push.worker()));
            }
            self.under_way.begin(push);
        }
        Ok(())
    }
}

impl<D: Copy, K: Default> Intake<D, K> {
    /// For gradients that this codec made, or plain ones.
    pub(crate) fn new(codec: Option<Arc<Codec>>, nonfinite: NonFinite) -> Intake<D, K> {
        Intake {
            content: ContentReader::new(codec),
            screen: FiniteScreen::new(nonfinite),
            under_way: UnderWay::default(),
        }
    }

    /// Another codec makes the gradients of this epoch and later ones. Plain ones are always taken.
    pub(crate) fn set_codec(&mut self, codec: Option<Arc<Codec>>, from: u32) {
        self.content.set_codec(codec, from);
    }

    pub(crate) fn set_nonfinite(&mut self, rule: NonFinite) {
        self.screen.set_rule(rule);
    }

    /// Takes one frame of a push. The error is to be told to the worker.
    pub(crate) fn take<S: Sink<Destination = D, Kept = K>>(
        &mut self,
        frame: &PushFrame<'_>,
        sink: &mut S,
    ) -> Result<Taken, Fault> {
        let taken = self.take_next(frame, sink);
        let PushFrame { worker, push, .. } = frame;
        match taken {
            Err(_) if !self.under_way.refuse(*worker, push.clock, push.piece.sequence) => Ok(Taken::Ignored),
            taken => taken,
        }
    }

    /// The same, with an error for every frame that cannot be taken.
    fn take_next<S: Sink<Destination = D, Kept = K>>(
        &mut self,
        frame: &PushFrame<'_>,
        sink: &mut S,
    ) -> Result<Taken, Fault> {
        let (worker, clock, piece) = (frame.worker, frame.push.clock, frame.push.piece);
        if is_factors(frame) {
            self.content.keep_factors(sink.layout(), frame)?;
            return Ok(Taken::Ignored);
        }
        let so_far = self.under_way.at(worker, clock).map(|push| push.destination());
        let destination = match sink.admit(frame, so_far)? {
            Admission::Take(destination) => destination,
            Admission::Duplicate if piece.is_last => {
                self.content.forget_factors(worker);
                sink.repeat(frame);
                return Ok(Taken::Whole);
            }
            Admission::Duplicate => return Ok(Taken::Ignored),
        };
        let is_empty = is_empty(frame) && sink.takes_empty_pushes();
        let layout = sink.layout();
        let next = self.next_frame(layout, frame, destination)?;
        if piece.sequence < next.sequence {
            return Ok(Taken::Ignored);
        }
        if piece.sequence > next.sequence {
            let message = format!("frames of a push of table `{}` are missing", layout.name());
            return Err(Fault { cause: Cause::Protocol, message });
        }
        let Intake { content, screen, under_way } = self;
        // It counts for the worker's progress all the same.
        let mut gradient = if is_empty { None } else { content.read(layout, frame, next.last_chunk)? };
        // A decoder lets nothing pass that is not finite.
        if let Some(plain) = gradient.as_mut().filter(|_| !frame.push.form.is_encoded()) {
            match screen.check(plain.values()) {
                Screened::Finite => {}
                Screened::Clipped(values) => *plain = plain.with_values(values),
                Screened::Refused => return Err(not_finite(layout, frame)),
            }
        }
        let Some(push) = under_way.at(worker, clock) else {
            // Only a frame that was taken begins a push, and gives up one that was under way.
            let mut push = Push::new(worker, clock, frame.push.subject.request, destination);
            let taken = add(sink, frame, &mut push, gradient)?;
            if !piece.is_last {
                under_way.begin(push);
                return Ok(taken);
            }
            under_way.remove(worker);
            content.forget_factors(worker);
            sink.complete(frame, push);
            return Ok(Taken::Whole);
        };
        let taken = add(sink, frame, push, gradient)?;
        if !piece.is_last {
            return Ok(taken);
        }
        let push = under_way.remove(worker).expect("a frame of it was just taken");
        content.forget_factors(worker);
        sink.complete(frame, push);
        Ok(Taken::Whole)
    }

    /// The frame that is wanted of this push.
    fn next_frame(
        &mut self,
        layout: &Layout,
        frame: &PushFrame<'_>,
        destination: D,
    ) -> Result<NextFrame, Fault> {
        let (worker, clock) = (frame.worker, frame.push.clock);
        let Some(push) = self.under_way.at(worker, clock) else {
            let newer = self.under_way.get(worker).map(Push::clock).filter(|&newer| newer > clock);
            let Some(newer) = newer else { return Ok(NextFrame::default()) };
            // Frames that were taken of it cannot be told from new ones any more; they must not be added twice.
            let message = format!(
                "{worker} gave up its push of clock {clock} of table `{}` when it began clock {newer}",
                layout.name()
            );
            return Err(Fault { cause: Cause::Protocol, message });
        };
        push.set_destination(destination);
        let sequence = push.wanted(frame.push.piece.sequence, frame.push.subject.request);
        Ok(NextFrame { sequence, last_chunk: push.last_chunk() })
    }

    /// Reads a sum of several workers' gradients of one chunk. Sums are numbered by their sender, so that there is nothing
    /// to count here. They are read by the codec of their epoch, because other chunks of the same gradients may have been
    /// taken before it changed.
    pub(crate) fn read_sum<'a>(
        &'a mut self,
        layout: &Layout,
        from: AggregatorId,
        sum: &frame::Sum,
        payload: &'a [u8],
    ) -> Result<GradientFrame<'a>, Fault> {
        let payload = ChunkPayload {
            from: NodeId::Aggregator(from),
            epoch: sum.subject.epoch,
            clock: sum.clock,
            form: sum.form,
            has_absent: sum.has_absent,
            bytes: payload,
        };
        let mut gradient = self.content.read_sum(layout, sum.chunk, &payload)?;
        if !sum.form.is_encoded() {
            match self.screen.check(gradient.values()) {
                Screened::Finite => {}
                Screened::Clipped(clipped) => gradient = gradient.with_values(clipped),
                Screened::Refused => return Err(sum_not_finite(layout, sum)),
            }
        }
        Ok(gradient)
    }

    /// The push that a worker is at.
    pub(crate) fn under_way(&self, worker: WorkerId) -> Option<&Push<D, K>> {
        self.under_way.get(worker)
    }

    /// All pushes that are under way.
    pub(crate) fn pushes(&self) -> impl Iterator<Item = &Push<D, K>> {
        self.under_way.iter()
    }

    /// The same, to send their remaining frames elsewhere.
    pub(crate) fn pushes_mut(&mut self) -> impl Iterator<Item = &mut Push<D, K>> {
        self.under_way.iter_mut()
    }

    /// Forgets the push that a worker is at, if it is of this clock: it may be made again from its beginning.
    pub(crate) fn forget(&mut self, worker: WorkerId, clock: Clock) {
        if self.under_way.at(worker, clock).is_some() {
            self.under_way.remove(worker);
        }
        if self.content.has_factors(worker, clock) {
            self.content.forget_factors(worker);
        }
    }

    /// Forgets all pushes that are under way.
    pub(crate) fn forget_all(&mut self) {
        self.under_way = UnderWay::default();
        self.content.forget_all_factors();
    }

    /// Whether factors of this push came, which its chunks will need.
    pub(crate) fn has_factors(&self, worker: WorkerId, clock: Clock) -> bool {
        self.content.has_factors(worker, clock)
    }

    /// A worker is gone for good. The clock of the push that it was at.
    pub(crate) fn remove_worker(&mut self, worker: WorkerId) -> Option<Clock> {
        self.content.forget_factors(worker);
        self.under_way.remove(worker).map(|push| push.clock())
    }

    /// Frames that had NaN or Inf.
    pub(crate) fn nonfinite(&self) -> u64 {
        self.screen.found()
    }

    /// Whether what is kept fits together; the error says what does not.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.under_way.check()
    }
}

/// Whether a frame has factors of a layer, and no gradient of a chunk.
#[inline]
fn is_factors(frame: &PushFrame<'_>) -> bool {
    // A payload with absent ranges begins with these.
    frame.push.form == Form::Encoded && !frame.push.has_absent && codec::is_factors(frame.payload)
}

/// Hands over the gradient of a push's next frame, if there is something in it.
#[inline]
fn add<S: Sink>(
    sink: &mut S,
    frame: &PushFrame<'_>,
    push: &mut Push<S::Destination, S::Kept>,
    gradient: Option<GradientFrame<'_>>,
) -> Result<Taken, Fault> {
    let is_stepped = match gradient {
        Some(gradient) => sink.add(frame, push, gradient)?,
        None => false,
    };
    push.took(frame.push.piece.chunk);
    Ok(if is_stepped { Taken::Stepped } else { Taken::Partly })
}

/// Whether a push has no gradient at all.
fn is_empty(frame: &PushFrame<'_>) -> bool {
    let (piece, form) = (frame.push.piece, frame.push.form);
    form == Form::NOTHING && frame.payload.is_empty() && piece.sequence == 0 && piece.is_last
}

fn not_finite(layout: &Layout, frame: &PushFrame<'_>) -> Fault {
    let message = format!(
        "the gradient that {} pushed for table `{}` at clock {} has NaN or Inf in chunk {}; it was not applied \
         (nonfinite=reject)",
        frame.worker,
        layout.name(),
        frame.push.clock,
        frame.push.piece.chunk
    );
    Fault { cause: Cause::NonFinite, message }
}

fn sum_not_finite(layout: &Layout, sum: &frame::Sum) -> Fault {
    let message = format!(
        "the sum of {} gradients for table `{}` at clock {} has NaN or Inf in chunk {}; it was not applied \
         (nonfinite=reject)",
        sum.gradients,
        layout.name(),
        sum.clock,
        sum.chunk
    );
    Fault { cause: Cause::NonFinite, message }
}

#[cfg(test)]
mod tests;
