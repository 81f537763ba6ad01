//! A carrier over a pipe of bytes, which is a socket or lies over one: frames are handled in the receive buffer or received to where
//! they belong, and many are gathered into one write.

mod ahead;
mod gathering;
mod landing;
mod receiving;

pub(super) use ahead::{Ahead, Received};
#[cfg(test)]
pub(super) use receiving::HANDLE_BYTES;
pub(super) use receiving::{Elsewhere, Nowhere, ReceiveBuffer, check_length, out_of_place};

use super::carrier::{Ask, Carrier, Flushed, Peer, ReceiveError, Take};
use super::queue::{is_congested, write_in_turns};
use crate::waker::Watched;
use gathering::Gatherer;
use landing::Lander;
use paramill_core::role::{Frame, Role, Turn};
use paramill_core::send_queue::SendQueue;
use paramill_core::types::Time;
use receiving::RECEIVE_BYTES;
use std::fmt::Debug;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

/// Bytes from one end to the other, in order. Two methods are required; reading and writing MUST NOT block.
pub(crate) trait Pipe: Read + Write + AsFd + Debug + Send {
    /// Why the attempt to connect failed, if it did.
    fn take_error(&self) -> io::Result<Option<io::Error>>;

    /// Tells the peer that nothing more comes.
    fn hang_up(&self);

    /// When to write again, where the last write was held back by something else than the peer.
    fn held_until(&self) -> Option<Time> {
        None
    }
}

/// A connected, or connecting, pipe.
#[derive(Debug)]
pub(crate) struct StreamCarrier<P> {
    pipe: P,
    peer: Peer,
    receive: ReceiveBuffer,
    lander: Lander,
    ahead: Ahead,
    queue: SendQueue,
    gatherer: Gatherer,
}

impl<P: Pipe> StreamCarrier<P> {
    pub(crate) fn new(pipe: P) -> StreamCarrier<P> {
        StreamCarrier {
            pipe,
            peer: Peer::Stranger,
            receive: ReceiveBuffer::new(RECEIVE_BYTES),
            lander: Lander::default(),
            ahead: Ahead::default(),
            queue: SendQueue::default(),
            gatherer: Gatherer::default(),
        }
    }
}

impl<P: Pipe> Watched for StreamCarrier<P> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.pipe.as_fd())
    }
}

impl<P: Pipe> Carrier for StreamCarrier<P> {
    fn queue(&mut self, frame: Frame, turn: Turn) {
        self.queue.push(frame, turn);
    }

    fn flush(&mut self, role: Option<&dyn Role>, _more: bool) -> io::Result<Flushed> {
        let StreamCarrier { pipe, queue, gatherer, .. } = self;
        let flushed = write_in_turns(|| {
            if !gatherer.is_done(queue) {
                gatherer.write(pipe, queue, role)?;
            }
            Ok(gatherer.is_done(queue).then_some(Flushed::Done))
        })?;
        Ok(match (flushed, pipe.held_until()) {
            (Flushed::Blocked, Some(at)) => Flushed::Held(at),
            (flushed, _) => flushed,
        })
    }

    fn receive(&mut self, ask: Option<&mut Ask<'_>>) -> Result<(), ReceiveError> {
        let StreamCarrier { pipe, receive, lander, .. } = self;
        match ask {
            _ if receive.has_leftovers() => Ok(()),
            Some(ask) => lander.fill(pipe, receive, ask),
            None => receive.fill(|room| pipe.read(room)),
        }
    }

    fn put_ahead(&mut self, ask: &mut Ask<'_>) {
        self.ahead.put(ask, |start| self.receive.frame_at(start));
    }

    fn handle(&mut self, limit: usize, take: &mut Take<'_>) -> Result<(), ReceiveError> {
        self.lander.hand_over(take);
        self.receive.handle(limit, &mut Nowhere, &mut self.ahead, take)
    }

    fn hang_up(&mut self) {
        self.pipe.hang_up();
    }

    fn let_in(&mut self, peer: Peer) {
        self.peer = peer;
        if peer == Peer::Member {
            self.receive.widen();
        }
    }

    fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.pipe.take_error()
    }

    fn has_leftovers(&self) -> bool {
        self.receive.has_leftovers()
    }

    fn is_silent(&self) -> bool {
        self.gatherer.is_done(&self.queue)
    }

    fn is_congested(&self) -> bool {
        is_congested(&self.queue, self.peer)
    }
}

#[cfg(test)]
mod tests;
