//! The workers that a shard takes frames from.

use crate::types::WorkerId;

/// The live members, by rank, which is dense.
#[derive(Debug, Default)]
pub(super) struct Members {
    ranks: Vec<Option<Incarnation>>,
}

/// The process that has a rank.
#[derive(Debug, Clone, Copy)]
struct Incarnation {
    number: u64,
    /// Whether a connection in the name of this rank is this process's own, and not that of its predecessor.
    has_connected: bool,
}

impl Members {
    /// A worker that the job begins with: no other process had its rank.
    pub(super) fn add_original(&mut self, worker: WorkerId, number: u64) {
        self.set(worker, Incarnation { number, has_connected: true });
    }

    /// A worker joins. What still comes on a connection of its predecessor is not its own.
    pub(super) fn join(&mut self, worker: WorkerId, number: u64) {
        self.set(worker, Incarnation { number, has_connected: false });
    }

    pub(super) fn leave(&mut self, worker: WorkerId) {
        if let Some(rank) = self.ranks.get_mut(worker.0 as usize) {
            *rank = None;
        }
    }

    /// A process with this incarnation connects. Whether it is the member.
    pub(super) fn connect(&mut self, worker: WorkerId, number: u64) -> bool {
        let incarnation = self.ranks.get_mut(worker.0 as usize).and_then(Option::as_mut);
        let Some(incarnation) = incarnation.filter(|incarnation| incarnation.number == number) else {
            return false;
        };
        incarnation.has_connected = true;
        true
    }

    /// Whether frames of this worker are taken, from whomever they come.
    pub(super) fn has(&self, worker: WorkerId) -> bool {
        self.get(worker).is_some()
    }

    /// Whether a connection in the name of this rank is that of an earlier process.
    pub(super) fn awaits_connection(&self, worker: WorkerId) -> bool {
        self.get(worker).is_some_and(|incarnation| !incarnation.has_connected)
    }

    fn get(&self, worker: WorkerId) -> Option<Incarnation> {
        *self.ranks.get(worker.0 as usize)?
    }

    fn set(&mut self, worker: WorkerId, incarnation: Incarnation) {
        let rank = worker.0 as usize;
        if self.ranks.len() <= rank {
            self.ranks.resize(rank + 1, None);
        }
        self.ranks[rank] = Some(incarnation);
    }
}
