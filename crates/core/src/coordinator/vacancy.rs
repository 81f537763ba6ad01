//! What a job lacks to go on: any worker at all, or worker 0, whose initial values are missing.

use super::workers::Workers;
use crate::standstill::Standstill;
use crate::types::{Time, WorkerId};
use std::time::Duration;

/// A place that a new process of a worker has to take, or the job ends.
#[derive(Debug)]
pub(super) struct Vacancy {
    /// Whose place it is; `None` for anybody's.
    pub(super) of: Option<WorkerId>,
    /// What is said of the job's end if nobody comes; `None` where it is no failure.
    pub(super) error: Option<String>,
    /// Since when nobody has it; later by the time that the coordinator has stood still since.
    pub(super) since: Time,
}

impl Vacancy {
    /// Whether somebody has come who may take it, and has not declared tables yet.
    fn has_candidate(&self, workers: &Workers) -> bool {
        self.of.map_or_else(|| workers.live().next().is_some(), |worker| workers.is_live(worker))
    }

    /// Whether a worker that joins takes it.
    pub(super) fn suits(&self, worker: WorkerId) -> bool {
        self.of.is_none_or(|of| of == worker)
    }

    /// When the job ends, if nobody is here by then.
    pub(super) fn deadline(
        &self,
        workers: &Workers,
        standstill: &Standstill,
        grace: Duration,
    ) -> Option<Time> {
        if self.has_candidate(workers) {
            return None;
        }
        Some(if grace.is_zero() { self.since } else { standstill.deadline(self.since, grace) })
    }
}
