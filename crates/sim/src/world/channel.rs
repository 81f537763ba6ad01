//! One direction of a connection: frames that wait at the sender, those on their way, those that wait to be read.

use super::payload::Payload;
use paramill_core::limits;
use paramill_core::prng::Prng;
use paramill_core::role::{Frame, Turn};
use paramill_core::send_queue::SendQueue;
use paramill_core::types::{TableId, Time};
use paramill_core::wire::{Flags, HEADER_BYTES, Header, Kind, padded};
use std::collections::{BTreeMap, VecDeque};

/// A frame that its sender's link has taken.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) connection: usize,
    /// The end that receives.
    pub(super) side: usize,
    /// Nothing: the sender has closed the connection.
    pub(super) header: Option<Header>,
    pub(super) payload: Payload,
}

impl Flight {
    fn wire_bytes(&self) -> usize {
        self.header.as_ref().map_or(0, wire_bytes)
    }
}

/// One direction of a connection.
#[derive(Debug)]
pub(super) struct Channel {
    /// Decides the jitter of what is sent.
    pub(super) dice: Prng,
    /// Frames by reference: their bytes are taken when there is room for them.
    waiting: SendQueue,
    /// The sender closes the connection behind the frames that wait.
    closing: bool,
    /// Bytes that were taken from the sender and that the receiver has not read.
    under_way: usize,
    /// The sender will be told that there is room again.
    room_announced: bool,
    /// When the last frame reaches the receiver's link; the next one comes after it.
    arrived: Time,
    /// When the last frame is received; the next one comes after it.
    received: Time,
    /// Answers, by table and request, that are held back and not complete: when their last frame so far arrives. What
    /// follows of them comes after it, also when the rule that held them back is gone meanwhile.
    held_back: BTreeMap<(TableId, u64), Time>,
    /// Frames that reached the receiver's link and were not read.
    unread: VecDeque<Flight>,
    /// How many of them are received whole.
    ready: usize,
    /// Its receiver knows that there is something to read.
    pub(super) is_listed: bool,
}

impl Channel {
    /// A channel whose receiver hears nothing before `opened`.
    pub(super) fn new(opened: Time, dice: Prng) -> Channel {
        Channel {
            dice,
            waiting: SendQueue::default(),
            closing: false,
            under_way: 0,
            room_announced: false,
            arrived: opened,
            received: opened,
            held_back: BTreeMap::new(),
            unread: VecDeque::new(),
            ready: 0,
            is_listed: false,
        }
    }

    /// Queues a frame.
    pub(super) fn queue(&mut self, frame: Frame, turn: Turn) {
        self.waiting.push(frame, turn);
    }

    /// Closes the channel behind the frames that wait.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// The next frame that the link takes, if any waits and there is room for it. A frame that is larger than the window
    /// has it for itself.
    pub(super) fn next_frame(&mut self, window: usize) -> Option<Frame> {
        let bytes = wire_bytes(&self.waiting.first()?.header);
        if self.under_way > 0 && self.under_way + bytes > window {
            return None;
        }
        let frame = self.waiting.pop()?;
        self.under_way += bytes;
        Some(frame)
    }

    /// Whether the end of the connection is what the link takes next. It is said once.
    pub(super) fn takes_end(&mut self) -> bool {
        self.waiting.is_empty() && std::mem::take(&mut self.closing)
    }

    /// Whether frames wait for room.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether so much waits that the sender should not be asked for more.
    pub(super) fn is_congested(&self, frames: usize) -> bool {
        self.waiting.len() > frames || self.waiting.bytes() > limits::MAX_BACKLOG_BYTES
    }

    /// When a frame that may reach the receiver's link at `at` does so in turn.
    pub(super) fn in_turn(&mut self, at: Time) -> Time {
        self.arrived = self.arrived.max(at);
        self.arrived
    }

    /// When a frame arrives that may at `at`, and would at `in_turn` if its answer were not held back.
    pub(super) fn hold_back(&mut self, header: &Header, at: Time, in_turn: Time) -> Time {
        if header.kind != Kind::Params {
            return at;
        }
        let answer = (header.table, header.request);
        let at = self.held_back.get(&answer).map_or(at, |&last| last.max(at));
        if header.flags.has(Flags::LAST) {
            self.held_back.remove(&answer);
        } else if at > in_turn {
            self.held_back.insert(answer, at);
        }
        at
    }

    /// A frame has reached the receiver's link and will be through at `through`; says when it can be read.
    pub(super) fn receive(&mut self, flight: Flight, through: Time) -> Time {
        self.received = self.received.max(through);
        self.unread.push_back(flight);
        self.received
    }

    /// The next frame that was not read yet is received whole.
    pub(super) fn note_ready(&mut self) {
        self.ready += usize::from(self.ready < self.unread.len());
    }

    /// Whether there is something to read.
    pub(super) fn is_readable(&self) -> bool {
        self.ready > 0
    }

    /// Takes a frame out to read it.
    pub(super) fn read(&mut self) -> Option<Flight> {
        self.ready = self.ready.checked_sub(1)?;
        let flight = self.unread.pop_front()?;
        self.under_way -= flight.wire_bytes();
        Some(flight)
    }

    /// The frame behind the next one, and so on, if it is received whole.
    pub(super) fn peek(&self) -> Option<&Flight> {
        self.unread.front().filter(|_| self.ready > 0)
    }

    /// The headers of the frames that reached the receiver's link and were not read.
    pub(super) fn unread(&self) -> impl Iterator<Item = &Header> {
        self.unread.iter().filter_map(|flight| flight.header.as_ref())
    }

    /// Whether the sender has to be told that something was read. It is said once until the sender goes on.
    pub(super) fn announces_room(&mut self) -> bool {
        (!self.waiting.is_empty() || self.closing) && !std::mem::replace(&mut self.room_announced, true)
    }

    /// The sender knows that there is room.
    pub(super) fn note_room(&mut self) {
        self.room_announced = false;
    }

    /// The connection is broken: nothing of what was on its way arrives.
    pub(super) fn clear(&mut self) {
        self.waiting = SendQueue::default();
        self.unread = VecDeque::new();
        self.held_back.clear();
        (self.under_way, self.ready, self.closing) = (0, 0, false);
    }
}

fn wire_bytes(header: &Header) -> usize {
    HEADER_BYTES + padded(header.payload_bytes as usize)
}
