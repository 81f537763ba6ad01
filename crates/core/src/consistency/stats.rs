//! Counters of a controller.

use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};

/// Entries of the staleness histogram; the last one holds everything beyond.
const STALENESS_BUCKETS: usize = 64;

/// Counters of one controller, or of many added up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncStats {
    /// Gradients taken: applied, or aggregated into a round.
    pub pushes: u64,
    /// Gradients dropped because their round was closed.
    pub dropped: u64,
    /// Gradients dropped because the worker had pushed that clock or a later one.
    pub duplicates: u64,
    /// Gradients refused: too far ahead, or of an unknown worker.
    pub refused: u64,
    /// Advances of `V_train`.
    pub advances: u64,
    /// Pulls of live workers.
    pub pulls: u64,
    /// Delayed pulls; one for each worker and clock, however often it is sent again.
    pub dprs: u64,
    /// Delayed pulls that were answered.
    pub released: u64,
    /// Pulls that worker 0 was asked about, as often as it was.
    pub questions: u64,
    /// Decisions of a fallback about pulls, because worker 0 gave no answer; a pull that waits may have several.
    pub fallbacks: u64,
    /// Nanoseconds that answered delayed pulls waited, added up.
    pub waited_ns: u64,
    /// Answers by the rounds they lacked; short when few were stale, and capped: the last of 64 entries holds the rest.
    #[serde(deserialize_with = "sequence::<_, _, STALENESS_BUCKETS>")]
    pub staleness: Vec<u64>,
    /// Rounds that answers lacked, added up.
    pub staleness_sum: u64,
    /// The most rounds that an answer lacked.
    pub max_staleness: u64,
}

impl SyncStats {
    /// Pulls answered so far.
    pub fn answers(&self) -> u64 {
        self.staleness.iter().sum()
    }

    /// Rounds that an answer lacked on average; 0 before the first.
    pub fn mean_staleness(&self) -> f64 {
        self.staleness_sum as f64 / self.answers().max(1) as f64
    }

    /// Adds another controller's counters.
    pub fn merge(&mut self, other: &SyncStats) {
        self.pushes += other.pushes;
        self.dropped += other.dropped;
        self.duplicates += other.duplicates;
        self.refused += other.refused;
        self.advances += other.advances;
        self.pulls += other.pulls;
        self.dprs += other.dprs;
        self.released += other.released;
        self.questions += other.questions;
        self.fallbacks += other.fallbacks;
        self.waited_ns = self.waited_ns.saturating_add(other.waited_ns);
        if self.staleness.len() < other.staleness.len() {
            self.staleness.resize(other.staleness.len(), 0);
        }
        for (mine, theirs) in self.staleness.iter_mut().zip(&other.staleness) {
            *mine += theirs;
        }
        self.staleness_sum = self.staleness_sum.saturating_add(other.staleness_sum);
        self.max_staleness = self.max_staleness.max(other.max_staleness);
    }

    /// Counts an answer that lacked this many rounds.
    pub(super) fn answer(&mut self, staleness: u64) {
        let bucket = usize::try_from(staleness).unwrap_or(usize::MAX).min(STALENESS_BUCKETS - 1);
        if self.staleness.len() <= bucket {
            self.staleness.resize(bucket + 1, 0);
        }
        self.staleness[bucket] += 1;
        self.staleness_sum = self.staleness_sum.saturating_add(staleness);
        self.max_staleness = self.max_staleness.max(staleness);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_histogram_grows_as_needed_and_is_capped() {
        let mut stats = SyncStats::default();
        for staleness in [0, 0, 2, 63, 64, u64::MAX] {
            stats.answer(staleness);
        }
        assert_eq!(stats.staleness.len(), 64);
        assert_eq!((stats.staleness[0], stats.staleness[2], stats.staleness[63]), (2, 1, 3));
        assert_eq!((stats.answers(), stats.max_staleness), (6, u64::MAX));
    }

    #[test]
    fn merging_adds_everything_up() {
        let (mut left, mut right) = (SyncStats::default(), SyncStats::default());
        left.answer(0);
        right.answer(3);
        right.dprs = 2;
        left.merge(&right);
        assert_eq!((left.staleness.clone(), left.dprs, left.max_staleness), (vec![1, 0, 0, 1], 2, 3));
        assert_eq!(left.mean_staleness(), 1.5);
    }
}
