//! The consistency axis: when a pull is answered, when a table's version advances, what happens to late pushes.
//!
//! Words, as in FluentPS: a worker's *progress* is the iteration of the push it just made (-1 before the first);
//! `V_train` ([`SyncState::v_train`]) is the table's version on this shard; a *DPR* is a delayed pull request.

use crate::registry::Axis;

/// To be filled.
pub trait Consistency: Send + std::fmt::Debug {}

/// The choices of this axis.
pub fn axis() -> Axis<dyn Consistency> {
    Axis::new("consistency model", &[], Vec::new())
}
