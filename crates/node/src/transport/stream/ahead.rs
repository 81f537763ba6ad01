//! Payloads that are put to where they belong before their frames are handled: whoever handles them has nothing long to do then.

use super::receiving::ReceiveBuffer;
use crate::transport::carrier::Ask;
use paramill_core::limits::LANDING_FRAMES;
use paramill_core::region::Region;
use paramill_core::role::Landing;
use paramill_core::wire::{DESCRIPTOR_BYTES, Flags, HEADER_BYTES, Header, Kind, padded};
use std::collections::VecDeque;

/// Payloads of up to so many bytes are left to those who handle them: asking for their place costs as much as a copy.
const SHORT_PAYLOAD: usize = 4096;

/// Frames in the receive buffer that were put to where they belong, and are not handled yet.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// Their first bytes in the receive buffer, ascending.
    placed: VecDeque<usize>,
    /// Kept from time to time for its memory.
    places: Vec<Landing>,
}

impl Ahead {
    /// Puts payloads that are in the receive buffer, whole, to where `ask` says that they belong.
    pub(crate) fn put(&mut self, buffer: &ReceiveBuffer, ask: &mut Ask<'_>) {
        let Ahead { placed, places } = self;
        let bytes = buffer.received();
        let (mut done, mut placer) = (0, Placer::new(places, ask));
        placed.clear();
        while let Some(head) = bytes[done..].first_chunk::<HEADER_BYTES>() {
            // What does not decode is an error for those who handle frames.
            let Ok(header) = Header::decode(head) else { break };
            let (length, begin) = (header.payload_bytes as usize, done + HEADER_BYTES);
            let is_elsewhere = header.flags.has(Flags::ELSEWHERE);
            let end = begin + if is_elsewhere { DESCRIPTOR_BYTES } else { padded(length) };
            if end > bytes.len() {
                break;
            }
            if !is_elsewhere && placer.put(&header, &bytes[begin..begin + length]) {
                placed.push_back(done);
            }
            done = end;
        }
    }

    /// Whether the frame that begins there was put to its place.
    pub(super) fn take(&mut self, start: usize) -> bool {
        let is_placed = self.placed.front() == Some(&start);
        if is_placed {
            self.placed.pop_front();
        }
        is_placed
    }

    /// What is in the receive buffer moves to its beginning.
    pub(super) fn moved(&mut self) {
        self.placed.clear();
    }
}

/// Puts payloads to where they belong. Frames that come one after the other are asked for together.
pub(crate) struct Placer<'a, 'b> {
    places: &'a mut Vec<Landing>,
    ask: &'a mut Ask<'b>,
    run: Option<Run>,
}

/// Frames of one answer that come one after the other.
struct Run {
    region: Region,
    /// Which of the places is the next frame's.
    next: usize,
    /// The last one of them.
    before: Header,
}

impl<'a, 'b> Placer<'a, 'b> {
    /// The memory of `places` is used.
    pub(crate) fn new(places: &'a mut Vec<Landing>, ask: &'a mut Ask<'b>) -> Placer<'a, 'b> {
        Placer { places, ask, run: None }
    }

    /// Puts a payload to where it belongs. False where it is left to those who handle it.
    pub(crate) fn put(&mut self, header: &Header, payload: &[u8]) -> bool {
        let Placer { places, ask, run } = self;
        if header.kind != Kind::Params || payload.len() <= SHORT_PAYLOAD {
            return false;
        }
        let is_next = |run: &Run| places.get(run.next).is_some_and(|place| place.is_for(&run.before, header));
        if !run.as_ref().is_some_and(is_next) {
            // The part that it has must be free before it is asked for again.
            drop(run.take());
            places.clear();
            let region = ask(header, LANDING_FRAMES, places);
            *run = region.map(|region| Run { region, next: 0, before: *header });
        }
        let Some(run) = run else { return false };
        let is_placed = places[run.next].put(&mut run.region, payload);
        if is_placed {
            (run.next, run.before) = (run.next + 1, *header);
        }
        is_placed
    }
}
