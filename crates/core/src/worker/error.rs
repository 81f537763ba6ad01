//! Errors of a worker's application.

use crate::codec::CodecError;
use crate::types::Clock;
use crate::wire::Cause;

/// Why a worker's call or wait failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// A table cannot be declared like this. Nothing was changed.
    #[error("{0}")]
    Table(String),
    /// A gradient or a buffer does not fit its table. Nothing was changed.
    #[error("table `{table}`: expected {expected}, got {found}")]
    Shape {
        /// The table's name.
        table: String,
        /// A description of what would fit.
        expected: String,
        /// A description of what was given.
        found: String,
    },
    /// NaN or Inf in a gradient under `reject`. Nothing was sent.
    #[error(
        "the gradient of table `{table}` at clock {clock} has NaN or Inf; it was not sent (nonfinite=reject; use \
         nonfinite=clip to clip instead, or lower the learning rate)"
    )]
    NonFinite {
        /// The table's name.
        table: String,
        /// The iteration.
        clock: Clock,
    },
    /// A gradient cannot be encoded: it and what was not sent before do not fit an f32. The table is of no more use.
    #[error("table `{table}`: {why}")]
    Codec {
        /// The table's name.
        table: String,
        /// The error.
        why: CodecError,
    },
    /// Calls came in an order that makes no sense. Nothing was changed.
    #[error("{0}")]
    Order(String),
    /// A server refused a request. Whether it changed anything depends on the cause.
    #[error("{message}")]
    Refused {
        /// Which kind of refusal.
        cause: Cause,
        /// The server's sentence.
        message: String,
    },
    /// A node could not be reached within the deadline. Requests under way may or may not have been applied.
    #[error("{0}")]
    Unreachable(String),
    /// What a reader received is not what was sent, time and again. The last whole version is gone.
    #[error("{0}")]
    Damaged(String),
    /// A reader has no whole version: the first is not here yet, or a damaged one is fetched anew. Wait for it.
    #[error("there is no whole version yet")]
    NoVersion,
    /// The job does not know this worker (any more), or has failed.
    #[error("{0}")]
    NotAMember(String),
    /// The job has ended in good order.
    #[error("the job is over")]
    Over,
}
