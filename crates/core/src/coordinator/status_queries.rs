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
