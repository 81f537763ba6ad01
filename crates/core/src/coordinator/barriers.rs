//! Barriers: names that all running workers wait at together.

use super::idlers::{Idlers, IdlersState, Reached};
use crate::limits;
use crate::types::{Clock, ShardId, WorkerId};
use crate::wire::Control;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The barriers, and the workers that wait at them.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    workers: BTreeMap<WorkerId, Arrivals>,
    idlers: Idlers,
}

/// The barriers, as they are remembered.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct BarrierState {
    workers: BTreeMap<WorkerId, Arrivals>,
    idlers: IdlersState,
}

/// Barriers that one worker has arrived at.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
    /// What has to be remembered: which barriers were reached. Those who wait at others come there again.
    pub(super) fn remembered(&self) -> BarrierState {
        BarrierState { workers: self.workers.clone(), idlers: self.idlers.remembered() }
    }

    /// Goes on with what was remembered.
    pub(super) fn restore(state: BarrierState) -> Barriers {
        Barriers { workers: state.workers, idlers: Idlers::restore(state.idlers) }
    }

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
        } else if arrivals.waiting.get(name) != Some(&number) && !self.idlers.holds(name) {
            return Arrival::Reached;
        }
        Arrival::Waits
    }

    /// A process is gone: its successor counts its barriers from 1.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
        self.idlers.set(worker, 0);
    }

    /// A worker pushes nothing before this clock. One that has said so at a barrier may be on its way from there.
    pub(super) fn set_idle(&mut self, worker: WorkerId, until: Clock) {
        if until != Clock::MAX || has(&self.workers, worker) {
            self.idlers.set(worker, until);
        }
    }

    /// What is known of workers that push nothing for now.
    pub(super) fn idlers(&self) -> &Idlers {
        &self.idlers
    }

    /// The same, to tell it, or to note who knows of it.
    pub(super) fn idlers_mut(&mut self) -> &mut Idlers {
        &mut self.idlers
    }

    /// Lets workers go on from the barriers at which all of these are, now that this one has come or left.
    /// Whether there was one.
    pub(super) fn settle(&mut self, running: &[WorkerId], last: Option<WorkerId>) -> bool {
        let names = self.take_reached(running);
        let is_reached = !names.is_empty();
        if is_reached {
            self.idlers.reach(names, last, |worker| has(&self.workers, worker));
        }
        is_reached
    }

    /// The news for all workers that they may go on from a barrier, once all of these shards wait for their pushes again.
    pub(super) fn poll_reached(&mut self, shards: impl Iterator<Item = ShardId>) -> Option<Control> {
        let (Reached { name, last, .. }, version) = self.idlers.poll(shards)?;
        Some(Control::BarrierReached { name, last, version })
    }

    /// The barriers that a worker waits at and another has not come to.
    pub(super) fn missed(&self, waits: WorkerId, by: WorkerId) -> impl Iterator<Item = &str> {
        let of = |worker| self.workers.get(&worker).map(|arrivals| &arrivals.waiting);
        let others = of(by);
        let names = of(waits).into_iter().flat_map(BTreeMap::keys);
        names.filter(move |name| others.is_none_or(|others| !others.contains_key(*name))).map(String::as_str)
    }

    /// Takes out the barriers that all of these workers wait at.
    fn take_reached(&mut self, running: &[WorkerId]) -> Vec<String> {
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

/// Whether a worker waits at a barrier.
fn has(workers: &BTreeMap<WorkerId, Arrivals>, worker: WorkerId) -> bool {
    workers.get(&worker).is_some_and(|arrivals| !arrivals.waiting.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [WorkerId; 2] = [WorkerId(0), WorkerId(1)];

    #[test]
    fn a_barrier_is_reached_when_all_who_run_are_there() {
        let mut barriers = Barriers::default();
        assert_eq!(barriers.arrive(ALL[0], "a", 1), Arrival::Waits);
        assert_eq!(barriers.arrive(ALL[0], "b", 2), Arrival::Waits);
        assert_eq!(barriers.arrive(ALL[1], "b", 1), Arrival::Waits);
        assert_eq!(barriers.take_reached(&ALL), ["b"]);
        assert!(barriers.take_reached(&ALL).is_empty(), "once");
        assert_eq!(barriers.take_reached(&ALL[..1]), ["a"], "the other one has left");
        assert!(barriers.take_reached(&[]).is_empty());
    }

    #[test]
    fn a_worker_that_says_so_again_waits_on_or_hears_what_it_missed() {
        let mut barriers = Barriers::default();
        barriers.arrive(ALL[0], "a", 1);
        assert_eq!(barriers.arrive(ALL[0], "a", 1), Arrival::Waits);
        barriers.arrive(ALL[1], "a", 1);
        barriers.take_reached(&ALL);
        assert_eq!(barriers.arrive(ALL[0], "a", 1), Arrival::Reached, "the news was lost");
        assert_eq!(barriers.arrive(ALL[0], "a", 2), Arrival::Waits, "the next one of this name");
        barriers.forget(ALL[0]);
        assert_eq!(barriers.arrive(ALL[0], "a", 1), Arrival::Waits, "another process counts from 1");
    }

    #[test]
    fn names_and_their_number_have_a_limit() {
        let mut barriers = Barriers::default();
        let longest = "n".repeat(limits::MAX_NAME_BYTES);
        assert_eq!(barriers.arrive(ALL[0], &longest, 1), Arrival::Waits);
        assert!(matches!(barriers.arrive(ALL[0], &format!("{longest}n"), 2), Arrival::Refused(_)));
        for number in 2..=limits::MAX_BARRIERS as u64 {
            assert_eq!(barriers.arrive(ALL[0], &number.to_string(), number), Arrival::Waits);
        }
        let last = limits::MAX_BARRIERS as u64;
        assert!(matches!(barriers.arrive(ALL[0], "more", last + 1), Arrival::Refused(_)));
        assert_eq!(barriers.arrive(ALL[0], &last.to_string(), last), Arrival::Waits, "it was there before");
        assert_eq!(barriers.arrive(ALL[1], "more", 1), Arrival::Waits);
    }
}
