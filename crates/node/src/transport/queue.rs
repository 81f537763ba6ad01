//! Writing of the frames that wait on one connection.

use super::carrier::{Flushed, Peer};
use paramill_core::limits;
use paramill_core::role::{Body, Frame, Role};
use paramill_core::send_queue::SendQueue;
use paramill_core::wire::{HEADER_BYTES, padded};
use std::io::{self, ErrorKind};

/// Writes to one connection before others get their turn.
const WRITES_PER_TURN: usize = 4;

/// Whether so much waits that the peer should not be asked for more.
pub(super) fn is_congested(queue: &SendQueue, peer: Peer) -> bool {
    match peer {
        // It asks one thing at a time: what it has not taken is not added to.
        Peer::Command => !queue.is_empty(),
        Peer::Stranger | Peer::Member => {
            queue.len() > limits::MAX_WAITING_FRAMES || queue.bytes() > limits::MAX_BACKLOG_BYTES
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
