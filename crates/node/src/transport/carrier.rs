//! What carries the frames of one connection, and what takes new ones: all that an event loop knows of a transport.

use crate::waker::Watched;
use paramill_core::landing::{Destination, Landing};
use paramill_core::role::{Frame, Role, Turn};
use paramill_core::types::Time;
use paramill_core::wire::{Header, WireError};
use std::io;

/// Asks a role for the places of the payload with this header, and of up to so many frames in all
/// ([`Role::landing`]).
pub(crate) type Ask<'a> = dyn FnMut(&Header, usize, &mut Vec<Landing>) -> Option<Destination> + 'a;

/// Takes a frame, with its payload unless that was put to where it belongs. Returns false when this is enough for now.
pub(crate) type Take<'a> = dyn FnMut(&Header, Option<&[u8]>) -> bool + 'a;

/// One connection's way for frames. Nine methods are required, and one of [`Watched`].
///
/// Frames MUST arrive whole, once and in the order in which they were queued, but for those that a [`Turn`] lets overtake others
/// ([`SendQueue`](paramill_core::send_queue::SendQueue)), or an error be returned. A frame that waits is kept by
/// reference: the bytes of one that a role stores are read in [`Carrier::flush`], after its header was refreshed.
pub(crate) trait Carrier: Watched {
    /// Queues a frame. A carrier MAY send it in order, whatever its turn.
    fn queue(&mut self, frame: Frame, turn: Turn);

    /// Sends as much as the peer has room for, and no more than is fair to other connections. `role` finds payloads that it stores
    /// itself. When `more` is about to come, a carrier MAY let little wait for it.
    fn flush(&mut self, role: Option<&dyn Role>, more: bool) -> io::Result<Flushed>;

    /// Takes what has arrived, once, and without waiting; nothing, as long as frames are left to be handled. Payloads MAY be received to
    /// where `ask` says that they belong. MUST return an error once the peer has hung up and everything is handled.
    fn receive(&mut self, ask: Option<&mut Ask<'_>>) -> Result<(), ReceiveError>;

    /// Puts payloads that have arrived to where `ask` says that they belong: [`Carrier::handle`] has less to do then.
    fn put_ahead(&mut self, _ask: &mut Ask<'_>) {}

    /// Hands over the frames that have arrived until this is enough for now. A payload of more than `limit` bytes MUST be an error before
    /// memory is taken for it.
    fn handle(&mut self, limit: usize, take: &mut Take<'_>) -> Result<(), ReceiveError>;

    /// Tells the peer that nothing more comes. What was flushed MUST arrive all the same.
    fn hang_up(&mut self);

    /// The peer said who it is. Until then it is worth little memory.
    fn let_in(&mut self, peer: Peer);

    /// Why the attempt to connect failed, if it did. Asked once it is decided.
    fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(None)
    }

    /// Whether there may be something to handle without an event.
    fn has_leftovers(&self) -> bool;

    /// Whether nothing waits to be sent.
    fn is_silent(&self) -> bool;

    /// Whether so much waits to be sent that the peer should not be asked for more.
    fn is_congested(&self) -> bool;
}

/// Where peers come in. One method is required, and one of [`Watched`].
pub(crate) trait Listener: Watched {
    /// Takes a connection. The error is `WouldBlock` when there is none. The inner error is about the peer, not about the listener.
    fn accept(&self) -> io::Result<Result<Box<dyn Carrier>, String>>;
}

/// What is known of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Peer {
    /// It has not said who it is.
    #[default]
    Stranger,
    /// A command from outside of the job: it says little, and asks one thing at a time.
    Command,
    /// A node of the job.
    Member,
}

/// How far a flush came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// Everything is out.
    Done,
    /// The peer takes no more for now.
    Blocked,
    /// This node may send no more before this time.
    Held(Time),
    /// It was others' turn.
    Enough,
}

/// Why nothing more can be received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The connection broke, or the peer broke a rule of its carrier.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer sent what is no frame, or none for this connection.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl ReceiveError {
    /// The peer hung up.
    pub(crate) fn end() -> ReceiveError {
        io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed").into()
    }
}

#[cfg(test)]
pub(super) mod tests;
