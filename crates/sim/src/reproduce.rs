//! Published results, set up again: the paper's figures beside ours.

pub mod fluentps_fig9;
pub mod mps_placement;
pub mod psp_table1;

use serde::Serialize;

/// Something the paper found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// What the paper says.
    pub claim: String,
    /// Whether our figures say so too.
    pub holds: bool,
    /// Our figures.
    pub ours: String,
}
