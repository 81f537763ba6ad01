//! The workers of a job, and how far they are.

use crate::limits;
use crate::types::{Clock, WorkerId};
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};

/// The workers that take part in a job, by rank, which is dense.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Members {
    /// `None` for workers that are no members, or no longer.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    incarnations: Vec<Option<Incarnation>>,
    /// How far workers are with pushes that rounds wait for.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    progress: Vec<Progress>,
}

/// The process that has a rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Incarnation {
    number: u64,
    /// Whether a connection in the name of this rank is this process's own, and not that of its predecessor.
    has_connected: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Progress {
    clock: Clock,
    /// Of this clock.
    bytes: u64,
}

/// Weight of one clock in a worker's progress, in bytes: more than the largest table has.
const BYTES_OF_A_CLOCK: u64 = 1 << 40;

impl Members {
    /// A worker that the job begins with: no other process had its rank.
    pub(super) fn insert(&mut self, worker: WorkerId, number: u64) {
        self.set(worker, Incarnation { number, has_connected: true });
    }

    /// A worker joins. What still comes on a connection of its predecessor is not its own.
    pub(super) fn join(&mut self, worker: WorkerId, number: u64) {
        self.set(worker, Incarnation { number, has_connected: false });
        if let Some(progress) = self.progress.get_mut(worker.0 as usize) {
            *progress = Progress::default();
        }
    }

    fn set(&mut self, worker: WorkerId, incarnation: Incarnation) {
        let rank = worker.0 as usize;
        if self.incarnations.len() <= rank {
            self.incarnations.resize(rank + 1, None);
        }
        self.incarnations[rank] = Some(incarnation);
    }

    /// Whether a process with this incarnation is the member.
    pub(super) fn is_member(&self, worker: WorkerId, number: u64) -> bool {
        self.get(worker).is_some_and(|incarnation| incarnation.number == number)
    }

    /// A process with this incarnation connects. Whether it is the member.
    pub(super) fn connect(&mut self, worker: WorkerId, number: u64) -> bool {
        let incarnation = self.incarnations.get_mut(worker.0 as usize).and_then(Option::as_mut);
        let Some(incarnation) = incarnation.filter(|incarnation| incarnation.number == number) else {
            return false;
        };
        incarnation.has_connected = true;
        true
    }

    /// Whether a connection in the name of this rank is that of an earlier process.
    #[inline]
    pub(super) fn awaits_connection(&self, worker: WorkerId) -> bool {
        self.get(worker).is_some_and(|incarnation| !incarnation.has_connected)
    }

    #[inline]
    fn get(&self, worker: WorkerId) -> Option<Incarnation> {
        *self.incarnations.get(worker.0 as usize)?
    }

    /// A worker does not take part any more. Whether it did.
    pub(super) fn remove(&mut self, worker: WorkerId) -> bool {
        self.incarnations.get_mut(worker.0 as usize).and_then(Option::take).is_some()
    }

    /// Whether a worker takes part.
    #[inline]
    pub(super) fn has(&self, worker: WorkerId) -> bool {
        self.get(worker).is_some()
    }

    /// A worker brought so much of a push that a round waits for.
    #[inline]
    pub(super) fn note_progress(&mut self, worker: WorkerId, clock: Clock, bytes: u64) {
        let rank = worker.0 as usize;
        if self.progress.len() <= rank {
            self.progress.resize(rank + 1, Progress::default());
        }
        let progress = &mut self.progress[rank];
        if progress.clock < clock {
            *progress = Progress { clock, bytes: 0 };
        }
        progress.bytes = progress.bytes.saturating_add(bytes);
    }

    /// How far a worker is, in bytes; `None` when no round waits for it.
    pub(super) fn progress(&self, worker: WorkerId) -> Option<u64> {
        let Progress { clock, bytes } = *self.progress.get(worker.0 as usize)?;
        Some(clock.saturating_mul(BYTES_OF_A_CLOCK).saturating_add(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_takes_part_with_its_last_incarnation() {
        let mut members = Members::default();
        let worker = WorkerId(2);
        members.insert(worker, 7);
        members.insert(WorkerId(0), 5);
        assert!(members.connect(worker, 7) && !members.awaits_connection(worker));
        members.join(worker, 8);
        assert!(members.awaits_connection(worker), "what comes is from the process before");
        assert!(!members.connect(worker, 7) && members.awaits_connection(worker));
        assert!(members.connect(worker, 8) && !members.awaits_connection(worker));
        assert!(!members.connect(WorkerId(1), 0) && !members.connect(WorkerId(9), 0));
        assert!(members.remove(WorkerId(2)) && !members.remove(WorkerId(2)) && !members.remove(WorkerId(9)));
        assert!(members.has(WorkerId(0)) && !members.has(WorkerId(2)));
    }

    #[test]
    fn a_later_clock_is_further_than_any_bytes_of_an_earlier_one() {
        let mut members = Members::default();
        let worker = WorkerId(1);
        assert_eq!(members.progress(worker), None);
        members.note_progress(worker, 3, 100);
        members.note_progress(worker, 3, 50);
        let before = members.progress(worker);
        // Frames of an earlier clock count for the last one.
        members.note_progress(worker, 2, 1);
        let between = members.progress(worker);
        members.note_progress(worker, 4, 1);
        assert!(before < between && between < members.progress(worker));
        assert_eq!(members.progress(WorkerId(0)), Some(0));
    }
}
