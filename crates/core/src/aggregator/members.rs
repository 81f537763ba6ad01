//! The live workers that reach a shard through an aggregator.

use crate::types::{AggregatorId, Clock, WorkerId};
use std::collections::BTreeMap;

/// A worker as frames reach it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) worker: WorkerId,
    /// The aggregator below that it came through; `None` for its own connection.
    pub(super) through: Option<AggregatorId>,
}

impl Caller {
    /// A worker on its own connection.
    pub(super) fn direct(worker: WorkerId) -> Caller {
        Caller { worker, through: None }
    }
}

/// Live workers that came here, and whether they are connected. Sums wait for all of them.
#[derive(Debug, Default)]
pub(super) struct Members {
    members: BTreeMap<WorkerId, Member>,
}

#[derive(Debug)]
struct Member {
    is_connected: bool,
    through: Option<AggregatorId>,
    /// Pushes up to this clock go to the shard as they are.
    alone_until: Option<Clock>,
}

impl Members {
    pub(super) fn connect(&mut self, Caller { worker, through }: Caller) {
        let alone_until = self.members.get(&worker).and_then(|member| member.alone_until);
        self.members.insert(worker, Member { is_connected: true, through, alone_until });
    }

    /// Of pushes up to this clock something may have gone through another process: they are not added up.
    pub(super) fn stay_alone(&mut self, worker: WorkerId, until: Option<Clock>) {
        if let Some(member) = self.members.get_mut(&worker) {
            member.alone_until = until;
        }
    }

    /// Whether a push goes to the shard as it is: also where an aggregator below did not add it up.
    pub(super) fn is_alone(&self, worker: WorkerId, clock: Clock) -> bool {
        let is_alone = |member: &Member| {
            member.through.is_some() || member.alone_until.is_some_and(|until| clock <= until)
        };
        self.members.get(&worker).is_some_and(is_alone)
    }

    /// A worker as frames reach it.
    pub(super) fn caller(&self, worker: WorkerId) -> Caller {
        Caller { worker, through: self.members.get(&worker).and_then(|member| member.through) }
    }

    /// A worker's connection is gone. Whether it had one.
    pub(super) fn disconnect(&mut self, worker: WorkerId) -> bool {
        self.members.get_mut(&worker).is_some_and(|member| std::mem::take(&mut member.is_connected))
    }

    /// All connections are closed. The workers that had one of their own.
    pub(super) fn disconnect_all(&mut self) -> Vec<WorkerId> {
        let mut direct = Vec::new();
        for (&worker, member) in &mut self.members {
            if std::mem::take(&mut member.is_connected) && member.through.is_none() {
                direct.push(worker);
            }
        }
        direct
    }

    /// The workers that are connected through an aggregator below.
    pub(super) fn through(&self, id: AggregatorId) -> Vec<WorkerId> {
        let its = |member: &Member| member.is_connected && member.through == Some(id);
        self.members.iter().filter(|(_, member)| its(member)).map(|(worker, _)| *worker).collect()
    }

    /// A worker is gone for good: nothing waits for it any more.
    pub(super) fn remove(&mut self, worker: WorkerId) {
        self.members.remove(&worker);
    }

    pub(super) fn contains(&self, worker: WorkerId) -> bool {
        self.members.contains_key(&worker)
    }

    pub(super) fn is_connected(&self, worker: WorkerId) -> bool {
        self.members.get(&worker).is_some_and(|member| member.is_connected)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.members.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_stays_a_member_while_it_is_not_connected() {
        let mut members = Members::default();
        (0..3).map(WorkerId).for_each(|worker| members.connect(Caller::direct(worker)));
        assert_eq!([1, 1, 7].map(|rank| members.disconnect(WorkerId(rank))), [true, false, false]);
        assert!(members.contains(WorkerId(1)) && !members.is_connected(WorkerId(1)));
        assert!(!members.contains(WorkerId(7)) && members.is_connected(WorkerId(0)));
        assert_eq!(members.disconnect_all(), [WorkerId(0), WorkerId(2)]);
        assert!(members.disconnect_all().is_empty());
        members.remove(WorkerId(0));
        assert_eq!(members.iter().collect::<Vec<_>>(), [WorkerId(1), WorkerId(2)]);
    }
}
