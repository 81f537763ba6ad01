//! Payloads that are put to where they belong before their frames are handled: whoever handles them has nothing long to do then.

use crate::transport::carrier::Ask;
use paramill_core::landing::{Destination, Landing};
use paramill_core::limits::LANDING_FRAMES;
use paramill_core::types::TableId;
use paramill_core::wire::{Flags, Header, Kind};
use std::collections::VecDeque;

/// Payloads of up to so many bytes are left to those who handle them: asking for their place costs as much as a copy. What is
/// encoded may be short and mean much.
const SHORT_PAYLOAD: usize = 4096;

/// What was put to its place, of the frames that were received and are not handled yet. Their positions are for whoever keeps them
/// to choose.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// Positions of those frames, ascending.
    placed: VecDeque<usize>,
    /// Everything before this position has been looked at.
    looked: usize,
    /// Tables of parameters among them that were left to those who handle frames.
    passed_over: Vec<TableId>,
    /// Kept from one call to the next for its memory.
    places: Vec<Landing>,
}

/// A frame that is here as a whole.
#[derive(Debug)]
pub(crate) struct Received<'a> {
    pub(crate) header: Header,
    /// Unless it lies elsewhere.
    pub(crate) payload: Option<&'a [u8]>,
    /// Position of the frame behind it.
    pub(crate) next: usize,
}

/// Frames of one answer that come one after the other.
struct Run {
    destination: Destination,
    /// Which of the places is the next frame's.
    next: usize,
    /// The last one of them.
    before: Header,
}

impl Ahead {
    /// Puts payloads to where `ask` says that they belong. `received` is the frame at a position. Frames that come one after the
    /// other are asked for together.
    pub(crate) fn put<'a>(&mut self, ask: &mut Ask<'_>, received: impl Fn(usize) -> Option<Received<'a>>) {
        let mut run = None;
        while let Some(Received { header, payload, next }) = received(self.looked) {
            if self.put_one(&header, payload, &mut run, ask) {
                self.placed.push_back(self.looked);
            } else if header.kind == Kind::Params && !self.passed_over.contains(&header.table) {
                self.passed_over.push(header.table);
            }
            self.looked = next;
        }
    }

    fn put_one(
        &mut self,
        header: &Header,
        payload: Option<&[u8]>,
        run: &mut Option<Run>,
        ask: &mut Ask<'_>,
    ) -> bool {
        let Ahead { places, passed_over, .. } = self;
        let is_long = |payload: &&[u8]| payload.len() > SHORT_PAYLOAD || header.flags.has(Flags::ENCODED);
        let Some(payload) = payload.filter(is_long) else { return false };
        if header.kind != Kind::Params || header.flags.has(Flags::ROWS) {
            return false;
        }
        let is_next = |run: &Run| places.get(run.next).is_some_and(|place| place.is_for(&run.before, header));
        if !run.as_ref().is_some_and(is_next) {
            // The part that it has must be free before it is asked for again.
            drop(run.take());
            places.clear();
            let destination = ask(header, LANDING_FRAMES, places);
            *run = destination.map(|destination| Run { destination, next: 0, before: *header });
        }
        // A difference is not added before one that came earlier.
        let may_put = |run: &Run| !run.destination.is_ordered() || !passed_over.contains(&header.table);
        let Some(run) = run.as_mut().filter(|run| may_put(run)) else { return false };
        let is_placed = run.destination.put(&places[run.next], payload);
        if is_placed {
            (run.next, run.before) = (run.next + 1, *header);
        }
        is_placed
    }

    /// Whether the frame at this position was put to its place. Frames are asked about in order.
    pub(crate) fn take(&mut self, position: usize) -> bool {
        let is_placed = self.placed.front() == Some(&position);
        if is_placed {
            self.placed.pop_front();
        }
        is_placed
    }

    /// What is before this position is handled: it becomes the first.
    pub(crate) fn moved(&mut self, to: usize) {
        self.placed.iter_mut().for_each(|position| *position -= to);
        self.looked = self.looked.saturating_sub(to);
        if self.looked == 0 {
            self.passed_over.clear();
        }
    }
}
