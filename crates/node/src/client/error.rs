//! Why a call of the worker's library failed.

use paramill_core::worker::WorkerError;
use std::io;

/// Why a call of the client failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The worker's own or a server's refusal.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// Nothing came within the time. What was asked for may still happen.
    #[error("timed out after {seconds:.1} s waiting for {what}")]
    Timeout {
        /// How long was waited.
        seconds: f64,
        /// For what: who has not answered, and what would release it.
        what: String,
    },
    /// An update of the table that was sent earlier failed, and nobody had waited for it. The update at hand was not
    /// sent: call again to send it.
    #[error("this update was not sent, because an earlier one of the same table failed: {0}")]
    EarlierUpdate(Box<ClientError>),
    /// The worker's thread is gone.
    #[error("this worker has ended: {0}")]
    Ended(String),
    /// The environment does not say where to join.
    #[error("{0}")]
    Environment(String),
    /// The operating system refused something.
    #[error(transparent)]
    Io(#[from] io::Error),
}
