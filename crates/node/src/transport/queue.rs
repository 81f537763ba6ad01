//! Frames that wait to be sent on one connection.

use super::carrier::{Flushed, Peer};
use paramill_core::limits;
use paramill_core::role::{Body, Frame, Role};
use paramill_core::wire::{HEADER_BYTES, padded};
use std::collections::VecDeque;
use std::io::{self, ErrorKind};

/// Writes to one connection before others get their turn.
const WRITES_PER_TURN: usize = 4;

/// The frames, with a count of the memory that they hold.
#[derive(Debug, Default)]
pub(super) struct SendQueue {
    frames: VecDeque<Frame>,
    /// Memory that was taken for the frames.
    bytes: usize,
}

impl SendQueue {
    pub(super) fn push_back(&mut self, frame: Frame) {
        self.bytes += frame.memory_bytes();
        self.frames.push_back(frame);
    }

    pub(super) fn pop_front(&mut self) -> Option<Frame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.memory_bytes();
        Some(frame)
    }

    /// Removes the first frames.
    pub(super) fn remove(&mut self, count: usize) {
        self.bytes -= self.frames.drain(..count).map(|frame| frame.memory_bytes()).sum::<usize>();
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Frame> {
        self.frames.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Frame> {
        self.frames.iter_mut()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether so much waits that the peer should not be asked for more.
    pub(super) fn is_congested(&self, peer: Peer) -> bool {
        match peer {
            // It asks one thing at a time: what it has not taken is not added to.
            Peer::Command => !self.is_empty(),
            Peer::Stranger | Peer::Member => {
                self.frames.len() > limits::MAX_WAITING_FRAMES || self.bytes > limits::MAX_BACKLOG_BYTES
            }
        }
    }
}

/// Writes step by step until one says how far this came, the peer has no room, or it is others' turn.
pub(super) fn write_in_turns(mut step: impl FnMut() -> io::Result<Option<Flushed>>) -> io::Result<Flushed> {
    for _ in 0..WRITES_PER_TURN {
        match step() {
            Ok(Some(flushed)) => return Ok(flushed),
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Flushed::Blocked),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Flushed::Enough)
}

/// Brings a frame that waited up to date.
pub(super) fn refresh(role: Option<&dyn Role>, frame: &mut Frame) {
    if let (Body::Stored { .. }, Some(role)) = (&frame.body, role) {
        role.refresh(&mut frame.header);
    }
}

/// The bytes of a frame, from where they live.
pub(super) fn payload_of<'a>(role: Option<&'a dyn Role>, frame: &'a Frame) -> &'a [u8] {
    let payload = match role {
        Some(role) => role.payload(&frame.body),
        None => frame.body.bytes().expect("a role that is shared stores nothing itself"),
    };
    assert_eq!(payload.len(), frame.header.payload_bytes as usize, "a header tells its payload's length");
    payload
}

/// What follows a payload of this length in a stream.
pub(super) fn padding(len: usize) -> &'static [u8] {
    const PADDING: [u8; HEADER_BYTES] = [0; HEADER_BYTES];
    &PADDING[..padded(len) - len]
}
