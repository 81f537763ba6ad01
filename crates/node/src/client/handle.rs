//! What is under way.

use super::error::ClientError;
use super::packing::Passage;
use super::shared::Shared;
use paramill_core::worker::Ticket;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Something under way that brings a `T`: `()` where only its end counts, the rows of a pull, the slabs of an exchange.
/// Dropping it does not undo anything; its end is then not heard of.
#[must_use = "a handle tells whether what it stands for succeeded"]
pub struct Handle<T = ()> {
    pub(super) shared: Arc<Shared>,
    way: Way,
    take: Take<T>,
}

/// How the worker knows what is under way.
#[derive(Debug)]
enum Way {
    /// By a ticket of its own, which is redeemed with the handle.
    Own(Ticket),
    /// By that of a pack, once it has left.
    Pack(Passage),
}

/// Takes over what a ticket that is due has brought. Most are functions, for which the box needs no memory.
type Take<T> = Box<dyn Fn(&Arc<Shared>, Ticket) -> Result<T, ClientError> + Send + Sync>;

impl Handle {
    /// Of something that brings nothing.
    pub(super) fn new(shared: Arc<Shared>, ticket: Ticket) -> Handle {
        Handle::bringing(shared, ticket, |_, _| Ok(()))
    }

    /// Whether it is over, without making a pack leave for it.
    pub(super) fn is_over(&self) -> bool {
        match &self.way {
            Way::Pack(passage) if !passage.has_left() => false,
            _ => self.is_due(),
        }
    }
}

impl<T> Handle<T> {
    /// Of something that brings what `take` finds.
    pub(super) fn bringing(
        shared: Arc<Shared>,
        ticket: Ticket,
        take: impl Fn(&Arc<Shared>, Ticket) -> Result<T, ClientError> + Send + Sync + 'static,
    ) -> Handle<T> {
        Handle { shared, way: Way::Own(ticket), take: Box::new(take) }
    }

    /// Of what travels with a pack, and brings what `take` finds.
    pub(super) fn packed(
        passage: Passage,
        take: impl Fn(&Arc<Shared>, Ticket) -> Result<T, ClientError> + Send + Sync + 'static,
    ) -> Handle<T> {
        Handle { shared: passage.shared().clone(), way: Way::Pack(passage), take: Box::new(take) }
    }

    /// The ticket to wait for. A pack leaves for it, if it has not.
    pub(super) fn ticket(&self) -> Result<Ticket, ClientError> {
        match &self.way {
            Way::Own(ticket) => Ok(*ticket),
            Way::Pack(passage) => passage.ticket(),
        }
    }

    /// Waits until it is due, as long as the job's time-out says, and returns what it brings. A time-out names what has not
    /// answered and what would release it; the call may then be repeated, to wait on. What it brings, it brings once.
    pub fn wait(&self) -> Result<T, ClientError> {
        self.wait_within(self.shared.timeout)
    }

    /// [`Handle::wait`] with a time-out of its own.
    pub fn wait_within(&self, timeout: Duration) -> Result<T, ClientError> {
        let ticket = self.ticket()?;
        self.shared.wait(ticket, timeout)?;
        (self.take)(&self.shared, ticket)
    }

    /// Whether [`Handle::wait`] would return at once.
    pub fn is_due(&self) -> bool {
        self.ticket().map_or(true, |ticket| self.shared.lock().is_due(ticket))
    }

    /// Waits a while without an explanation, for those who have other things to look after: whether [`Handle::wait`]
    /// would return at once.
    pub fn is_due_within(&self, timeout: Duration) -> bool {
        self.ticket().map_or(true, |ticket| self.shared.is_due_within(ticket, timeout))
    }
}

impl<T> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("way", &self.way).finish_non_exhaustive()
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Way::Own(ticket) = self.way {
            self.shared.lock_landed(ticket).worker.redeem(ticket);
        }
    }
}
