//! The worker's library: join a job, create tables, push, pull, keep the clock.
//!
//! ```no_run
//! use paramill_node::client::{Job, JobOptions, TableSpec};
//!
//! let job = Job::init(JobOptions::at("paramill://localhost:7070/run42".parse()?))?;
//! let weights = job.table(TableSpec::dense("weights", [1000]), vec![0.0; 1000])?;
//! job.start()?;
//! for _ in 0..100 {
//!     let gradient = weights.read(|values| values.iter().map(|w| w - 1.0).collect::<Vec<f32>>())?;
//!     weights.update(&gradient)?; // leaves at once; parameters follow when the condition allows
//!     job.clock();
//!     weights.sync()?; // waits for them
//! }
//! job.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Calls that wait do so for the job's time-out ([`JobOptions::timeout`]). Each has a form whose name ends in `_within`, with a
//! time-out of its own. After [`ClientError::Timeout`] it may be called again, to wait on.

mod conditions;
mod error;
mod handle;
mod hands;
mod job;
mod options;
mod packing;
mod reader;
mod shared;
mod slab;
mod table;

pub use error::ClientError;
pub use handle::Handle;
pub use hands::Threads;
pub use job::Job;
pub use options::{DEFAULT_TIMEOUT, JobOptions, parse_loops};
pub use paramill_core::codec::Factors;
pub use paramill_core::consistency::{Question, WorkerProgress};
pub use paramill_core::lease::Lease;
pub use paramill_core::local::{LocalSteps, Replica};
pub use paramill_core::policy::{Axis, JobPolicies, Policies, PolicyOverride};
pub use paramill_core::registry::Registry;
pub use paramill_core::status::{Status, WorkerReport};
pub use paramill_core::store::Buffer;
pub use paramill_core::table::{Layer, Pack, Packed, TableSpec};
pub use paramill_core::types::{Clock, TableId, WorkerId};
pub use paramill_core::wire::DType;
pub use paramill_core::worker::{Asked, Gradient, Prepared, Share, WorkerError};
pub use reader::{Reader, Tensor};
pub use slab::Slab;
pub use table::{Table, Values};
