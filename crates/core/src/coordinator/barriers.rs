//! Barriers: names that all running workers wait at together.

use crate::limits;
use crate::types::WorkerId;
use std::collections::BTreeMap;

/// The barriers, and the workers that wait at them.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    workers: BTreeMap<WorkerId, Arrivals>,
}

/// Barriers that one worker has arrived at.
#[derive(Debug, Default)]
struct Arrivals {
    /// The barriers it waits at, with their numbers.
    waiting: BTreeMap<String, u64>,
    /// The highest number of a barrier that it came to.
    last: u64,
}

/// Outcome of a worker's arrival at a barrier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Arrival {
    /// It waits.
    Waits,
    /// The barrier was reached before, and the news was lost with a connection.
    Reached,
    /// It waits at too many, or the name is too long.
    Refused(String),
}

impl Barriers {
    /// A worker comes to a barrier, or says again after a broken connection that it is there.
    pub(super) fn arrive(&mut self, worker: WorkerId, name: &str, number: u64) -> Arrival {
        let arrivals = self.workers.entry(worker).or_default();
        let is_new = number > arrivals.last;
        if name.len() > limits::MAX_NAME_BYTES || (is_new && arrivals.waiting.len() >= limits::MAX_BARRIERS) {
            return Arrival::Refused(format!(
                "{worker} waits at more than {} barriers, or at one with a name of more than {} bytes",
                limits::MAX_BARRIERS,
                limits::MAX_NAME_BYTES
            ));
        }
        if is_new {
            arrivals.last = number;
            arrivals.waiting.insert(name.to_owned(), number);
        } else if arrivals.waiting.get(name) != Some(&number) {
            return Arrival::Reached;
        }
        Arrival::Waits
    }

    /// A process is gone: its successor counts its barriers from 1.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    /// Takes out the barriers that all of these workers wait at.
    pub(super) fn take_reached(&mut self, running: &[WorkerId]) -> Vec<String> {
        let waits = |worker: &WorkerId, name: &str| {
            self.workers.get(worker).is_some_and(|arrivals| arrivals.waiting.contains_key(name))
        };
        let first = running.first().and_then(|first| self.workers.get(first));
        let names = first.into_iter().flat_map(|arrivals| arrivals.waiting.keys());
        let reached: Vec<String> =
            names.filter(|name| running.iter().all(|worker| waits(worker, name))).cloned().collect();
        for arrivals in self.workers.values_mut() {
            arrivals.waiting.retain(|name, _| !reached.contains(name));
        }
        reached
    }
}
