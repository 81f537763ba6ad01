//! A carrier over two queues that two threads share.

use super::channel::{CAPACITY, Direction, Letter};
use crate::transport::carrier::{Ask, Carrier, Flushed, Peer, ReceiveError, Take};
use crate::transport::queue::{is_congested, payload_of, refresh, write_in_turns};
use crate::transport::stream::{Ahead, Received, check_length, out_of_place};
use crate::waker::{Doorbell, Watched};
use paramill_core::role::{Body, Frame, Role, Turn};
use paramill_core::send_queue::SendQueue;
use paramill_core::wire::{Flags, Header, Kind};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Bytes that are put at once, so that the receiver begins while more is copied.
const PUT_BYTES: usize = CAPACITY / 4;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct MemoryCarrier {
    incoming: Arc<Direction>,
    outgoing: Arc<Direction>,
    peer: Peer,
    queue: SendQueue,
    /// Letters that were received and not handled.
    inbox: VecDeque<Letter>,
    ahead: Ahead,
    /// Kept from one call to the next for its memory.
    staged: VecDeque<Letter>,
}

impl MemoryCarrier {
    /// Both ends.
    pub(super) fn pair() -> (MemoryCarrier, MemoryCarrier) {
        let (there, back) = (Arc::<Direction>::default(), Arc::<Direction>::default());
        (MemoryCarrier::new(back.clone(), there.clone()), MemoryCarrier::new(there, back))
    }

    fn new(incoming: Arc<Direction>, outgoing: Arc<Direction>) -> MemoryCarrier {
        MemoryCarrier {
            incoming,
            outgoing,
            peer: Peer::Stranger,
            queue: SendQueue::default(),
            inbox: VecDeque::new(),
            ahead: Ahead::default(),
            staged: VecDeque::new(),
        }
    }
}

impl Watched for MemoryCarrier {
    fn ring_with(&mut self, bell: Doorbell) {
        self.incoming.ring_receiver_with(bell.clone());
        self.outgoing.ring_sender_with(bell.clone());
        bell.ring();
    }
}

impl Carrier for MemoryCarrier {
    fn queue(&mut self, frame: Frame, turn: Turn) {
        self.queue.push(frame, turn);
    }

    fn flush(&mut self, role: Option<&dyn Role>, _more: bool) -> io::Result<Flushed> {
        let MemoryCarrier { outgoing, queue, staged, .. } = self;
        write_in_turns(|| {
            if queue.is_empty() {
                return Ok(Some(Flushed::Done));
            }
            let (room, mut bytes) = (outgoing.room()?.min(PUT_BYTES), 0);
            while bytes < room
                && let Some(frame) = queue.pop()
            {
                let letter = letter(role, frame);
                bytes += letter.bytes();
                staged.push_back(letter);
            }
            let more = !queue.is_empty();
            Ok(match outgoing.put(staged, more) {
                _ if !more => Some(Flushed::Done),
                true => None,
                false => Some(Flushed::Blocked),
            })
        })
    }

    fn receive(&mut self, _ask: Option<&mut Ask<'_>>) -> Result<(), ReceiveError> {
        if self.inbox.is_empty() && !self.incoming.take(&mut self.inbox) && self.inbox.is_empty() {
            return Err(ReceiveError::end());
        }
        Ok(())
    }

    fn put_ahead(&mut self, ask: &mut Ask<'_>) {
        let MemoryCarrier { inbox, ahead, .. } = self;
        ahead.put(ask, |index| {
            let letter = inbox.get(index)?;
            // What does not decode is an error for those who handle frames.
            let header = Header::decode(letter.head()).ok()?;
            Some(Received { header, payload: Some(letter.payload()), next: index + 1 })
        });
    }

    fn handle(&mut self, limit: usize, take: &mut Take<'_>) -> Result<(), ReceiveError> {
        let (mut done, mut wants_more) = (0, true);
        while wants_more && let Some(letter) = self.inbox.pop_front() {
            let header = Header::decode(letter.head())?;
            check_length(&header, limit)?;
            let payload = letter.payload();
            let is_elsewhere = header.flags.has(Flags::ELSEWHERE);
            if header.kind == Kind::Share || is_elsewhere || payload.len() != header.payload_bytes as usize {
                return Err(out_of_place(&header));
            }
            let is_placed = self.ahead.take(done);
            done += 1;
            wants_more = take(&header, (!is_placed).then_some(payload));
        }
        self.ahead.moved(done);
        Ok(())
    }

    fn hang_up(&mut self) {
        self.outgoing.end();
    }

    fn let_in(&mut self, peer: Peer) {
        self.peer = peer;
    }

    /// Rings are not repeated: what was not taken yet is looked for.
    fn has_leftovers(&self) -> bool {
        !self.inbox.is_empty() || self.incoming.has_news()
    }

    fn is_silent(&self) -> bool {
        self.queue.is_empty()
    }

    fn is_congested(&self) -> bool {
        is_congested(&self.queue, self.peer)
    }
}

impl Drop for MemoryCarrier {
    fn drop(&mut self) {
        self.outgoing.end();
        self.incoming.abandon();
    }
}

/// A frame to be read by another thread. Bytes that a role stores may change: they are copied.
fn letter(role: Option<&dyn Role>, mut frame: Frame) -> Letter {
    refresh(role, &mut frame);
    let payload = payload_of(role, &frame);
    let copied = matches!(frame.body, Body::Stored { .. }).then(|| payload.to_vec());
    let body = copied.map_or(frame.body, Body::Bytes);
    Letter::new(&frame.header, body)
}

#[cfg(test)]
mod tests;
