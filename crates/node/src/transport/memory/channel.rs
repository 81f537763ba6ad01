//! One direction of a connection in memory: a queue of frames with a bound, as a socket has one.

use crate::waker::Doorbell;
use paramill_core::role::Body;
use paramill_core::wire::{HEADER_BYTES, Header};
use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, MutexGuard};

/// Bytes that may be on their way, but for the last frame of them. They stay in a cache until they are read.
pub(super) const CAPACITY: usize = 1 << 20;

/// A frame on its way.
#[derive(Debug)]
pub(super) struct Letter {
    /// Encoded as over a socket, so that it is checked as there.
    head: [u8; HEADER_BYTES],
    body: Body,
}

impl Letter {
    /// The body MUST NOT be in a role's own memory, which another thread cannot read.
    pub(super) fn new(header: &Header, body: Body) -> Letter {
        Letter { head: header.encode(), body }
    }

    pub(super) fn head(&self) -> &[u8; HEADER_BYTES] {
        &self.head
    }

    pub(super) fn payload(&self) -> &[u8] {
        self.body.bytes().expect("what is on its way is in no role's memory")
    }

    /// Bytes that it counts for.
    pub(super) fn bytes(&self) -> usize {
        HEADER_BYTES + self.payload().len()
    }

    /// Anything for a header.
    #[cfg(test)]
    pub(super) fn raw(head: [u8; HEADER_BYTES], payload: Vec<u8>) -> Letter {
        Letter { head, body: Body::Bytes(payload) }
    }
}

/// What both ends share.
#[derive(Debug, Default)]
pub(super) struct Direction(Mutex<Flow>);

#[derive(Debug, Default)]
struct Flow {
    letters: VecDeque<Letter>,
    bytes: usize,
    /// The sender hung up.
    has_ended: bool,
    /// The receiver is gone.
    is_abandoned: bool,
    /// The sender wants to know when there is room.
    is_awaited: bool,
    receiver: Option<Doorbell>,
    sender: Option<Doorbell>,
}

impl Direction {
    /// Rings this bell when there is something to receive.
    pub(super) fn ring_receiver_with(&self, bell: Doorbell) {
        self.lock().receiver = Some(bell);
    }

    /// Rings this bell when there is room again, or nobody receives any more.
    pub(super) fn ring_sender_with(&self, bell: Doorbell) {
        self.lock().sender = Some(bell);
    }

    /// How many bytes may be put. An error means that nobody will receive them.
    pub(super) fn room(&self) -> io::Result<usize> {
        let flow = self.lock();
        if flow.is_abandoned || flow.has_ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(CAPACITY.saturating_sub(flow.bytes))
    }

    /// Puts letters behind those that are there. Returns false when there is no room for `more`, which is rung for later.
    pub(super) fn put(&self, letters: &mut VecDeque<Letter>, more: bool) -> bool {
        let mut flow = self.lock();
        let bell = flow.letters.is_empty().then(|| flow.receiver.clone()).flatten();
        flow.bytes += letters.iter().map(Letter::bytes).sum::<usize>();
        flow.letters.append(letters);
        let has_room = flow.bytes < CAPACITY;
        flow.is_awaited = more && !has_room;
        drop(flow);
        bell.iter().for_each(Doorbell::ring);
        has_room
    }

    /// Moves everything to `inbox`, which is empty. Returns false if nothing will come any more.
    pub(super) fn take(&self, inbox: &mut VecDeque<Letter>) -> bool {
        let mut flow = self.lock();
        std::mem::swap(&mut flow.letters, inbox);
        flow.bytes = 0;
        let is_awaited = std::mem::take(&mut flow.is_awaited);
        let bell = is_awaited.then(|| flow.sender.clone()).flatten();
        let has_ended = flow.has_ended;
        drop(flow);
        bell.iter().for_each(Doorbell::ring);
        !has_ended
    }

    /// Whether [`Direction::take`] has something to say.
    pub(super) fn has_news(&self) -> bool {
        let flow = self.lock();
        !flow.letters.is_empty() || flow.has_ended
    }

    /// The sender hangs up.
    pub(super) fn end(&self) {
        let mut flow = self.lock();
        flow.has_ended = true;
        let bell = flow.receiver.clone();
        drop(flow);
        bell.iter().for_each(Doorbell::ring);
    }

    /// The receiver is gone.
    pub(super) fn abandon(&self) {
        let mut flow = self.lock();
        flow.is_abandoned = true;
        let (letters, bell) = (std::mem::take(&mut flow.letters), flow.sender.clone());
        drop(flow);
        // Memory that was lent goes home without the lock.
        drop(letters);
        bell.iter().for_each(Doorbell::ring);
    }

    fn lock(&self) -> MutexGuard<'_, Flow> {
        self.0.lock().expect("no holder of this lock panics")
    }
}
