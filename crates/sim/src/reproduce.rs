//! Parts of published experiments in virtual time: each claim of the paper, its figure beside ours, and whether it holds.

pub mod claim;
pub mod fluentps_fig9;
pub mod mps_placement;
pub mod psp_table1;

pub use claim::Claim;

use std::ops::Range;

/// The seeds of an experiment: as many runs of everything that is random.
pub type Seeds = Range<u64>;
