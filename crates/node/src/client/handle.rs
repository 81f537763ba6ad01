//! What is under way.

use super::error::ClientError;
use super::shared::Shared;
use paramill_core::worker::Ticket;
use std::sync::Arc;
use std::time::Duration;

/// A push or pull under way. Dropping it does not undo anything; its end is then not heard of.
#[derive(Debug)]
#[must_use = "a handle tells whether the push or pull succeeded"]
pub struct Handle {
    pub(super) shared: Arc<Shared>,
    pub(super) ticket: Ticket,
}

impl Handle {
    /// Waits until it is due. The error names who has not answered and what would release it. After a time-out it may
    /// be called again, to wait on.
    pub fn wait(&self, timeout: Duration) -> Result<(), ClientError> {
        self.shared.wait(self.ticket, timeout)
    }

    /// Like [`Handle::wait`], for a pull of rows: the rows one after the other.
    pub fn wait_rows(self, timeout: Duration) -> Result<Vec<f32>, ClientError> {
        self.wait(timeout)?;
        Ok(self.shared.lock().worker.redeem(self.ticket))
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

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock_landed(self.ticket).worker.redeem(self.ticket);
    }
}
