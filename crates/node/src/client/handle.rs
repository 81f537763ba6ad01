//! What is under way.

use super::error::ClientError;
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
    pub(super) ticket: Ticket,
    take: Take<T>,
}

/// Takes over what a ticket that is due has brought. Most are functions, for which the box needs no memory.
type Take<T> = Box<dyn Fn(&Arc<Shared>, Ticket) -> Result<T, ClientError> + Send + Sync>;

impl Handle {
    /// Of something that brings nothing.
    pub(super) fn new(shared: Arc<Shared>, ticket: Ticket) -> Handle {
        Handle::bringing(shared, ticket, |_, _| Ok(()))
    }
}

impl<T> Handle<T> {
    /// Of something that brings what `take` finds.
    pub(super) fn bringing(
        shared: Arc<Shared>,
        ticket: Ticket,
        take: impl Fn(&Arc<Shared>, Ticket) -> Result<T, ClientError> + Send + Sync + 'static,
    ) -> Handle<T> {
        Handle { shared, ticket, take: Box::new(take) }
    }

    /// Waits until it is due, as long as the job's time-out says, and returns what it brings. A time-out names what has not
    /// answered and what would release it; the call may then be repeated, to wait on. What it brings, it brings once.
    pub fn wait(&self) -> Result<T, ClientError> {
        self.wait_within(self.shared.timeout)
    }

    /// [`Handle::wait`] with a time-out of its own.
    pub fn wait_within(&self, timeout: Duration) -> Result<T, ClientError> {
        self.shared.wait(self.ticket, timeout)?;
        (self.take)(&self.shared, self.ticket)
    }

    /// Whether [`Handle::wait`] would return at once.
    pub fn is_due(&self) -> bool {
        self.shared.lock().is_due(self.ticket)
    }

    /// Waits a while without an explanation, for those who have other things to look after: whether [`Handle::wait`]
    /// would return at once.
    pub fn is_due_within(&self, timeout: Duration) -> bool {
        self.shared.is_due_within(self.ticket, timeout)
    }
}

impl<T> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        self.shared.lock_landed(self.ticket).worker.redeem(self.ticket);
    }
}
