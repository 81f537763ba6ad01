//! What workers compute: models with their data, readers of the usual file formats, and generators of data whose
//! answer is known.
//!
//! Nothing here knows of servers. A [`Workload`] says which rows of its tables a step needs, turns parameters into
//! gradients, and judges parameters on data that was held out. Whoever drives it moves the numbers.
//!
//! ```
//! use paramill_train::{Touched, WorkloadConfig};
//!
//! let mut config = WorkloadConfig::new("lr")?;
//! config.examples = Some(500);
//! let mut workload = paramill_train::build(&config)?;
//! let weights = workload.initial(0);
//!
//! let touched = workload.prepare(0);
//! let Touched::Rows(rows) = &touched[0] else { panic!("the table of lr is sparse") };
//! let pulled: Vec<f32> = rows.iter().map(|&row| weights[row as usize]).collect();
//! let mut gradients = vec![Vec::new()];
//! let loss = workload.step(&[&pulled], &mut gradients);
//! assert!(loss > 0.0 && gradients[0].len() == rows.len());
//! # Ok::<(), paramill_train::DataError>(())
//! ```

pub mod data;
pub mod generate;
pub mod metrics;
pub mod network;
mod shard;
mod workload;

pub use data::DataError;
pub use network::ProductGradient;
pub use workload::{
    Evaluation, LayerFlow, Loaded, Touched, Workload, WorkloadConfig, WorkloadInfo, build, build_all, find,
    known, load,
};
