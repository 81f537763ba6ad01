//! The worker's library: join a job, create tables, push, pull, keep the clock.
//!
//! ```no_run
//! use paramill_node::client::{Job, JobOptions, TableSpec};
//!
//! let job = Job::init(JobOptions::at("paramill://localhost:7070/run42".parse()?))?;
//! let weights = job.create_table(TableSpec::dense("weights", [1000]), vec![0.0; 1000])?;
//! job.start()?;
//! for _ in 0..100 {
//!     let gradient = job.read(weights, |values| values.iter().map(|w| w - 1.0).collect::<Vec<f32>>())?;
//!     job.update(weights, &gradient)?; // leaves at once; parameters follow when the condition allows
//!     job.clock();
//!     job.sync(weights)?; // waits for them
//! }
//! job.finish()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod handle;
mod job;
mod options;
mod shared;
mod slab;

pub use error::ClientError;
pub use handle::Handle;
pub use job::Job;
pub use options::{DEFAULT_TIMEOUT, JobOptions, parse_loops};
pub use paramill_core::lease::Lease;
pub use paramill_core::policy::{Axis, NonFinite, Order, Policies, PolicyOverride, Reduce};
pub use paramill_core::store::Buffer;
pub use paramill_core::table::TableSpec;
pub use paramill_core::types::{TableId, WorkerId};
pub use paramill_core::worker::{Gradient, Prepared, WorkerError};
pub use slab::{Exchange, Slab};
