//! Aggregators below this one, as far as one shard goes: those of hosts, where this one is a rack's.
//!
//! They number their sums and lists for this one as they would for the shard. A list is noted when the shard has noted everything
//! that is in it, and in the order of the lists: until then the aggregator below keeps what may have to be begun anew.

use crate::server::aggregators::Aggregators;
use crate::types::{AggregatorId, ProcessId};
use crate::wire::Refusal;
use crate::wire::frame::Completed;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The aggregators below.
#[derive(Debug, Default)]
pub(super) struct Lowers {
    /// What was taken of each, and what was refused.
    pub(super) taken: Aggregators,
    sessions: BTreeMap<AggregatorId, u64>,
    connected: BTreeSet<AggregatorId>,
    /// Lists that were not noted, oldest first.
    lists: BTreeMap<AggregatorId, VecDeque<List>>,
}

#[derive(Debug)]
struct List {
    completed: Completed,
    /// The shard has everything that is in it.
    is_settled: bool,
}

impl Lowers {
    /// Of a process whose sessions are told apart from those of others by this.
    pub(super) fn with_seed(seed: u64) -> Lowers {
        Lowers { taken: Aggregators::with_seed(seed), ..Lowers::default() }
    }

    /// One of them says hello.
    pub(super) fn accept(
        &mut self,
        id: AggregatorId,
        process: ProcessId,
        incarnation: u64,
    ) -> Result<u64, Refusal> {
        let session = self.taken.accept(id, process, incarnation)?;
        // Lists of an earlier session are noted by nobody.
        if self.sessions.insert(id, session) != Some(session) {
            self.lists.insert(id, VecDeque::new());
        }
        self.connected.insert(id);
        Ok(session)
    }

    /// One of them is to give up what was not noted.
    pub(super) fn end_session(&mut self, id: AggregatorId) {
        self.taken.end_session(id);
        self.disconnect(id);
    }

    /// All that have ever been here.
    pub(super) fn iter(&self) -> impl Iterator<Item = AggregatorId> + '_ {
        self.lists.keys().copied()
    }

    pub(super) fn is_connected(&self, id: AggregatorId) -> bool {
        self.connected.contains(&id)
    }

    pub(super) fn disconnect(&mut self, id: AggregatorId) {
        self.connected.remove(&id);
        self.taken.lose(id);
    }

    /// All connections are closed. Those that had one.
    pub(super) fn disconnect_all(&mut self) -> BTreeSet<AggregatorId> {
        let connected = std::mem::take(&mut self.connected);
        connected.iter().for_each(|id| self.taken.lose(*id));
        connected
    }

    /// A list is here. Without workers whose pushes wait for the shard it is settled.
    pub(super) fn add(&mut self, id: AggregatorId, completed: Completed, is_settled: bool) {
        self.lists.entry(id).or_default().push_back(List { completed, is_settled });
    }

    /// Whether a list that was taken waits to be noted.
    pub(super) fn is_waiting(&self, id: AggregatorId, number: u64) -> bool {
        let lists = self.lists.get(&id);
        lists.is_some_and(|lists| lists.iter().any(|list| list.completed.subject.request == number))
    }

    /// The session of one of them.
    pub(super) fn session(&self, id: AggregatorId) -> u64 {
        self.sessions.get(&id).copied().unwrap_or(0)
    }

    /// Nothing of them is known here any more.
    pub(super) fn begin_anew(&mut self) {
        self.taken.forget_all();
        self.sessions.clear();
        self.connected.clear();
        self.lists.clear();
    }

    /// The shard has everything that is in a list.
    pub(super) fn settle(&mut self, id: AggregatorId, number: u64) {
        let lists = self.lists.get_mut(&id).into_iter().flatten();
        lists.filter(|list| list.completed.subject.request == number).for_each(|list| list.is_settled = true);
    }

    /// The last list up to which everything is settled, if there is a new one.
    pub(super) fn take_settled(&mut self, id: AggregatorId) -> Option<Completed> {
        let lists = self.lists.get_mut(&id)?;
        let mut last = None;
        while lists.front().is_some_and(|list| list.is_settled) {
            last = lists.pop_front().map(|list| list.completed);
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::TableId;
    use crate::wire::frame::Subject;

    const ID: AggregatorId = AggregatorId(4);

    fn list(number: u64) -> Completed {
        Completed {
            subject: Subject { epoch: 1, table: TableId(0), request: number },
            clock: 0,
            attempt: 0,
            last: None,
        }
    }

    #[test]
    fn lists_are_noted_in_their_order() {
        let mut lowers = Lowers::default();
        lowers.accept(ID, ProcessId(5), 5).unwrap();
        for number in [3, 5, 9] {
            lowers.add(ID, list(number), false);
        }
        lowers.settle(ID, 5);
        assert_eq!(lowers.take_settled(ID), None, "the first one is not settled");
        lowers.settle(ID, 3);
        assert_eq!(lowers.take_settled(ID), Some(list(5)));
        assert!(lowers.is_waiting(ID, 9) && !lowers.is_waiting(ID, 5));
        assert_eq!(lowers.take_settled(ID), None);
    }

    #[test]
    fn another_session_begins_without_lists() {
        let mut lowers = Lowers::default();
        let first = lowers.accept(ID, ProcessId(5), 5).unwrap();
        lowers.add(ID, list(1), true);
        lowers.disconnect(ID);
        assert_eq!(lowers.accept(ID, ProcessId(5), 5), Ok(first));
        assert!(lowers.is_waiting(ID, 1) && lowers.is_connected(ID));
        lowers.end_session(ID);
        assert!(!lowers.is_connected(ID));
        assert!(lowers.accept(ID, ProcessId(6), 6).is_ok_and(|second| second != first));
        assert!(!lowers.is_waiting(ID, 1));
    }
}
