//! Questions for the job's status, which wait for fresh reports of the shards.

use crate::limits;
use crate::types::{NodeId, ShardId, Time};
use std::collections::BTreeSet;

/// The questions that are not answered yet.
#[derive(Debug, Default)]
pub(super) struct StatusQueries {
    queries: Vec<StatusQuery>,
}

/// A query for the status, and the shards whose fresh reports it waits for.
#[derive(Debug)]
struct StatusQuery {
    asker: NodeId,
    missing: BTreeSet<ShardId>,
    deadline: Time,
}

impl StatusQueries {
    /// Whether an answer to this asker is on its way.
    pub(super) fn has(&self, asker: NodeId) -> bool {
        self.queries.iter().any(|query| query.asker == asker)
    }

    pub(super) fn ask(&mut self, now: Time, asker: NodeId, missing: BTreeSet<ShardId>) {
        self.queries.push(StatusQuery { asker, missing, deadline: now + limits::STATUS_DEADLINE });
    }

    /// A shard reported.
    pub(super) fn reported(&mut self, shard: ShardId) {
        for query in &mut self.queries {
            query.missing.remove(&shard);
        }
    }

    pub(super) fn forget(&mut self, asker: NodeId) {
        self.queries.retain(|query| query.asker != asker);
    }

    /// The next asker whose answer is complete, or has been waited for long enough.
    pub(super) fn poll(&mut self, now: Time) -> Option<NodeId> {
        let is_ripe = |query: &StatusQuery| query.missing.is_empty() || query.deadline <= now;
        let at = self.queries.iter().position(is_ripe)?;
        Some(self.queries.remove(at).asker)
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.queries.iter().map(|query| query.deadline).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::ServerId;

    fn shard(core: u32) -> ShardId {
        ShardId { server: ServerId(0), core }
    }

    #[test]
    fn an_answer_waits_for_fresh_reports_but_not_for_ever() {
        let (first, second) = (NodeId::Admin(1), NodeId::Admin(2));
        let mut queries = StatusQueries::default();
        assert_eq!((queries.poll(Time(9)), queries.next_timeout()), (None, None));
        queries.ask(Time(0), first, BTreeSet::from([shard(0), shard(1)]));
        queries.ask(Time(5), second, BTreeSet::from([shard(0)]));
        assert!(queries.has(first) && queries.has(second) && !queries.has(NodeId::Admin(3)));
        let over = Time(0) + limits::STATUS_DEADLINE;
        assert_eq!((queries.poll(Time(over.0 - 1)), queries.next_timeout()), (None, Some(over)));
        queries.reported(shard(0));
        assert_eq!([queries.poll(Time(6)), queries.poll(Time(6))], [Some(second), None]);
        assert_eq!((queries.poll(over), queries.has(first)), (Some(first), false));
    }

    #[test]
    fn who_hangs_up_gets_no_answer() {
        let mut queries = StatusQueries::default();
        let all = [1, 2].map(NodeId::Admin);
        all.iter().for_each(|asker| queries.ask(Time(0), *asker, BTreeSet::new()));
        queries.forget(all[0]);
        assert_eq!([queries.poll(Time(0)), queries.poll(Time(0))], [Some(all[1]), None]);
    }
}
