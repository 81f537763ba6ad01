//! Gradients that are here in sums of aggregators whose lists of complete pushes have not come.
//!
//! An aggregator may die after a sum has left, and before it says whose pushes are complete. The gradients stay where they were added. A
//! worker that sends its push again does so in its own name, and what is here of it is not taken a second time.

use crate::limits;
use crate::types::{Clock, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Chunks of pushes that are in sums, until the pushes are complete.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::server) struct Loose {
    /// One bit for each chunk on this shard.
    pushes: BTreeMap<(WorkerId, Clock), Vec<u64>>,
}

impl Loose {
    /// Whether a chunk of a push is in a sum.
    #[inline]
    pub(super) fn has(&self, worker: WorkerId, clock: Clock, chunk: usize) -> bool {
        !self.pushes.is_empty() && self.finds(worker, clock, chunk)
    }

    fn finds(&self, worker: WorkerId, clock: Clock, chunk: usize) -> bool {
        let words = self.pushes.get(&(worker, clock));
        words.and_then(|words| words.get(chunk / 64)).is_some_and(|word| word & 1 << (chunk % 64) != 0)
    }

    /// Whether a worker has as many pushes in sums as are remembered, and this one is not among them.
    pub(super) fn is_full(&self, worker: WorkerId, clock: Clock) -> bool {
        !self.pushes.contains_key(&(worker, clock)) && self.of(worker).count() >= limits::MAX_LOOSE_PUSHES
    }

    /// A sum has a chunk of a push.
    pub(super) fn add(&mut self, worker: WorkerId, clock: Clock, chunk: usize) {
        let words = self.pushes.entry((worker, clock)).or_default();
        if words.len() <= chunk / 64 {
            words.resize(chunk / 64 + 1, 0);
        }
        words[chunk / 64] |= 1 << (chunk % 64);
    }

    /// A worker's push of this clock is complete, and nothing of an earlier one is to come.
    pub(super) fn complete(&mut self, worker: WorkerId, clock: Clock) {
        while let Some((&first, _)) = self.pushes.range((worker, 0)..=(worker, clock)).next() {
            self.pushes.remove(&first);
        }
    }

    /// A worker is gone for good. The last clock of which something of it is in a sum.
    pub(super) fn remove_worker(&mut self, worker: WorkerId) -> Option<Clock> {
        let last = self.of(worker).next_back();
        self.complete(worker, Clock::MAX);
        last
    }

    fn of(&self, worker: WorkerId) -> impl DoubleEndedIterator<Item = Clock> + '_ {
        self.pushes.range((worker, 0)..=(worker, Clock::MAX)).map(|((_, clock), _)| *clock)
    }

    /// Whether there are no more pushes and chunks than there may be, of a table with so many chunks here.
    pub(super) fn check(&self, chunks: usize) -> Result<(), String> {
        let fits = |((worker, clock), words): (&(WorkerId, Clock), &Vec<u64>)| {
            let own = self.of(*worker).count();
            *clock < limits::MAX_CLOCK
                && own <= limits::MAX_LOOSE_PUSHES
                && words.len() <= chunks.div_ceil(64)
        };
        match self.pushes.iter().all(fits) {
            true => Ok(()),
            false => Err("sums hold more of a worker's pushes than they may".into()),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.pushes.values().map(|words| 8 * words.len() + 32).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: WorkerId = WorkerId(1);
    const OTHER: WorkerId = WorkerId(2);

    #[test]
    fn chunks_are_known_until_their_push_is_complete() {
        let mut loose = Loose::default();
        for (worker, clock, chunk) in [(ONE, 3, 0), (ONE, 3, 70), (ONE, 5, 1), (OTHER, 3, 2)] {
            loose.add(worker, clock, chunk);
        }
        let has = [(ONE, 3, 70), (ONE, 3, 1), (ONE, 4, 0), (OTHER, 3, 2), (OTHER, 3, 500)];
        let has = has.map(|(worker, clock, chunk)| loose.has(worker, clock, chunk));
        assert_eq!(has, [true, false, false, true, false]);
        loose.complete(ONE, 4);
        assert!(!loose.has(ONE, 3, 0) && loose.has(ONE, 5, 1) && loose.has(OTHER, 3, 2));
        assert_eq!([loose.remove_worker(ONE), loose.remove_worker(ONE)], [Some(5), None]);
        assert!(loose.memory_bytes() > 0 && loose.has(OTHER, 3, 2));
    }

    #[test]
    fn a_worker_has_so_many_and_no_more() {
        let mut loose = Loose::default();
        (0..limits::MAX_LOOSE_PUSHES as u64).for_each(|clock| loose.add(ONE, clock, 0));
        let next = limits::MAX_LOOSE_PUSHES as u64;
        assert!(loose.is_full(ONE, next) && !loose.is_full(ONE, 0) && !loose.is_full(OTHER, next));
    }
}
