//! A vacancy: a worker without which the job cannot go on. Any worker, or worker 0, whose initial values are missing.

use super::workers::Workers;
use crate::standstill::Standstill;
use crate::types::{Time, WorkerId};
use std::time::Duration;

/// A place that a new process of a worker has to take, or the job ends.
#[derive(Debug)]
pub(super) struct Vacancy {
    /// The vacant rank; `None` when any worker will do.
    pub(super) of: Option<WorkerId>,
    /// The error that the job ends with if no worker comes; `None` where that is no failure.
    pub(super) error: Option<String>,
    /// Since when it is vacant; later by the time that the coordinator has stood still since.
    pub(super) since: Time,
}

impl Vacancy {
    /// What is missing, for the job's phase.
    pub(super) fn words(&self) -> String {
        match self.of {
            Some(worker) => format!("; waiting for {worker} to be started anew"),
            None => "; waiting for a worker to be started anew".into(),
        }
    }

    /// Whether a worker that may take it has connected, and has not declared its tables yet.
    fn has_candidate(&self, workers: &Workers) -> bool {
        self.of.map_or_else(|| workers.live().next().is_some(), |worker| workers.is_live(worker))
    }

    /// Whether a worker that joins takes it.
    pub(super) fn suits(&self, worker: WorkerId) -> bool {
        self.of.is_none_or(|of| of == worker)
    }

    /// The time at which the job ends if the vacancy is not filled.
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
