//! Workers that push nothing for now: rounds do not wait for them, or everybody would wait for ever.
//!
//! A worker that waits at a barrier goes on when all others have come there, which they cannot as long as a round waits for its push.
//! Before it goes on, all shards have to know that rounds wait for it again: a barrier that was reached is held back until they do.

use crate::types::{Clock, ShardId, WorkerId};
use crate::wire::Control;
use crate::wire::control::IdleWorker;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// The workers that push nothing for now, and what shards know of them.
#[derive(Debug, Default)]
pub(super) struct Idlers {
    until: BTreeMap<WorkerId, Clock>,
    /// Counts what shards are told, from 1.
    number: u64,
    /// The last number that was told.
    told: u64,
    /// The last number that each shard goes by.
    noted: BTreeMap<ShardId, u64>,
    /// The newest version of a table that shards have told of.
    version: Clock,
    held: VecDeque<Reached>,
}

/// What has to be remembered of it. Workers say again that they push nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct IdlersState {
    number: u64,
    version: Clock,
    held: VecDeque<Reached>,
}

/// A barrier that all workers have come to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reached {
    pub(super) name: String,
    /// The worker that came last, or left instead.
    pub(super) last: Option<WorkerId>,
    /// What shards have to know before workers go on.
    number: u64,
    /// Rounds may have closed without workers that waited at it.
    was_idle: bool,
}

impl Idlers {
    pub(super) fn remembered(&self) -> IdlersState {
        IdlersState { number: self.number, version: self.version, held: self.held.clone() }
    }

    /// Goes on with what was remembered. Shards are told that rounds wait for everybody: what they know of is not known here.
    pub(super) fn restore(state: IdlersState) -> Idlers {
        let number = state.number.saturating_add(1);
        let held = state.held.into_iter().map(|reached| Reached { number, ..reached }).collect();
        Idlers { number, told: number, version: state.version, held, ..Idlers::default() }
    }

    /// A worker pushes nothing before this clock; 0 if nothing is known.
    pub(super) fn set(&mut self, worker: WorkerId, until: Clock) {
        let before = match until {
            0 => self.until.remove(&worker),
            until => self.until.insert(worker, until),
        };
        self.number += u64::from(before.unwrap_or(0) != until);
    }

    /// These barriers are reached, and workers for which `waits` does not hold wait no more.
    pub(super) fn reach(
        &mut self,
        names: Vec<String>,
        last: Option<WorkerId>,
        waits: impl Fn(WorkerId) -> bool,
    ) {
        let before = self.until.len();
        self.until.retain(|worker, until| *until != Clock::MAX || waits(*worker));
        let was_idle = self.until.len() != before;
        self.number += u64::from(was_idle);
        let number = self.number;
        self.held.extend(names.into_iter().map(|name| Reached { name, last, number, was_idle }));
    }

    /// Whether a barrier is held back.
    pub(super) fn holds(&self, name: &str) -> bool {
        self.held.iter().any(|reached| reached.name == name)
    }

    /// What shards are to know, once there was something.
    pub(super) fn message(&self) -> Option<Control> {
        let workers = self.idle().map(|(worker, until)| IdleWorker { worker, until }).collect();
        (self.number > 0).then_some(Control::IdleWorkers { number: self.number, workers })
    }

    /// The same, once each time that it has changed.
    pub(super) fn poll_news(&mut self) -> Option<Control> {
        let is_news = std::mem::replace(&mut self.told, self.number) != self.number;
        self.message().filter(|_| is_news)
    }

    /// The workers, and the clocks before which they push nothing.
    pub(super) fn idle(&self) -> impl Iterator<Item = (WorkerId, Clock)> + '_ {
        self.until.iter().map(|(worker, until)| (*worker, *until))
    }

    /// A shard goes by what it was told.
    pub(super) fn note(&mut self, shard: ShardId, number: u64, version: Clock) {
        let noted = self.noted.entry(shard).or_default();
        *noted = (*noted).max(number);
        self.version = self.version.max(version);
    }

    /// The next barrier that workers may go on from, now that all of these shards know of it, with the newest version of a table if
    /// they may have missed rounds.
    pub(super) fn poll(
        &mut self,
        mut shards: impl Iterator<Item = ShardId>,
    ) -> Option<(Reached, Option<Clock>)> {
        let number = self.held.front()?.number;
        let knows = |shard: ShardId| self.noted.get(&shard).copied().unwrap_or(0) >= number;
        if !shards.all(knows) {
            return None;
        }
        let reached = self.held.pop_front()?;
        let version = reached.was_idle.then_some(self.version);
        Some((reached, version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::ServerId;

    const SHARDS: [ShardId; 2] =
        [ShardId { server: ServerId(0), core: 0 }, ShardId { server: ServerId(1), core: 0 }];

    fn polled(idlers: &mut Idlers) -> Option<(String, Option<Clock>)> {
        idlers.poll(SHARDS.into_iter()).map(|(reached, version)| (reached.name, version))
    }

    #[test]
    fn a_barrier_is_held_back_until_shards_know_that_its_workers_push_again() {
        let mut idlers = Idlers::default();
        assert_eq!((idlers.message(), polled(&mut idlers)), (None, None));
        idlers.reach(vec!["a".into()], None, |_| false);
        assert_eq!(polled(&mut idlers), Some(("a".into(), None)), "nobody was idle");
        idlers.set(WorkerId(1), Clock::MAX);
        assert!(idlers.poll_news().is_some() && idlers.poll_news().is_none());
        idlers.set(WorkerId(1), Clock::MAX);
        assert!(idlers.poll_news().is_none());
        idlers.set(WorkerId(2), 7);
        idlers.reach(vec!["b".into(), "c".into()], None, |_| false);
        assert_eq!(idlers.idle().collect::<Vec<_>>(), [(WorkerId(2), 7)], "it has left iterations out");
        idlers.note(SHARDS[0], 3, 9);
        idlers.note(SHARDS[1], 2, 8);
        assert_eq!(polled(&mut idlers), None);
        idlers.note(SHARDS[1], 3, 8);
        assert_eq!(polled(&mut idlers), Some(("b".into(), Some(9))));
        assert_eq!(polled(&mut idlers), Some(("c".into(), Some(9))));
        idlers.set(WorkerId(2), 0);
        assert!(idlers.poll_news().is_some() && idlers.idle().next().is_none());
    }
}
