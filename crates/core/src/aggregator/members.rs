//! The live workers that reach a shard through an aggregator.

use crate::types::WorkerId;
use std::collections::BTreeMap;

/// Live workers that came here, and whether they are connected. Sums wait for all of them.
#[derive(Debug, Default)]
pub(super) struct Members {
    is_connected: BTreeMap<WorkerId, bool>,
}

impl Members {
    pub(super) fn connect(&mut self, worker: WorkerId) {
        self.is_connected.insert(worker, true);
    }

    /// A worker's connection is gone. Whether it had one.
    pub(super) fn disconnect(&mut self, worker: WorkerId) -> bool {
        self.is_connected.get_mut(&worker).is_some_and(std::mem::take)
    }

    /// All connections are closed. The workers that had one.
    pub(super) fn disconnect_all(&mut self) -> Vec<WorkerId> {
        let connected = self.is_connected.iter_mut().filter(|(_, is_connected)| **is_connected);
        connected
            .map(|(&worker, is_connected)| {
                *is_connected = false;
                worker
            })
            .collect()
    }

    /// A worker is gone for good: nothing waits for it any more.
    pub(super) fn remove(&mut self, worker: WorkerId) {
        self.is_connected.remove(&worker);
    }

    pub(super) fn contains(&self, worker: WorkerId) -> bool {
        self.is_connected.contains_key(&worker)
    }

    pub(super) fn is_connected(&self, worker: WorkerId) -> bool {
        self.is_connected.get(&worker) == Some(&true)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.is_connected.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_stays_a_member_while_it_is_not_connected() {
        let mut members = Members::default();
        (0..3).map(WorkerId).for_each(|worker| members.connect(worker));
        assert_eq!([1, 1, 7].map(|rank| members.disconnect(WorkerId(rank))), [true, false, false]);
        assert!(members.contains(WorkerId(1)) && !members.is_connected(WorkerId(1)));
        assert!(!members.contains(WorkerId(7)) && members.is_connected(WorkerId(0)));
        assert_eq!(members.disconnect_all(), [WorkerId(0), WorkerId(2)]);
        assert!(members.disconnect_all().is_empty());
        members.remove(WorkerId(0));
        assert_eq!(members.iter().collect::<Vec<_>>(), [WorkerId(1), WorkerId(2)]);
    }
}
