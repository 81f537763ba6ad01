//! Routes: which workers are reached through which aggregators.

use crate::limits;
use crate::types::{AggregatorId, NodeId, WorkerId};
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};

/// The aggregators that workers are behind.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Routes {
    /// By rank; `None`, or nothing, for workers that are reached on their own connection.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    by_rank: Vec<Option<AggregatorId>>,
}

impl Routes {
    #[inline]
    fn aggregator(&self, worker: WorkerId) -> Option<AggregatorId> {
        *self.by_rank.get(worker.0 as usize)?
    }

    /// The node that a worker's frames are sent to.
    #[inline]
    pub(super) fn address(&self, worker: WorkerId) -> NodeId {
        self.aggregator(worker).map_or(NodeId::Worker(worker), NodeId::Aggregator)
    }

    /// Whether a worker is reached on its own connection.
    #[inline]
    pub(super) fn is_direct(&self, worker: WorkerId) -> bool {
        self.aggregator(worker).is_none()
    }

    /// A worker is reached through this aggregator, or on its own connection. Whether that is new.
    pub(super) fn set(&mut self, worker: WorkerId, aggregator: Option<AggregatorId>) -> bool {
        if self.aggregator(worker) == aggregator {
            return false;
        }
        let rank = worker.0 as usize;
        if self.by_rank.len() <= rank {
            self.by_rank.resize(rank + 1, None);
        }
        self.by_rank[rank] = aggregator;
        true
    }

    /// The workers behind an aggregator, by rank.
    pub(super) fn through(&self, id: AggregatorId) -> impl Iterator<Item = WorkerId> + '_ {
        let all = (0..).map(WorkerId).zip(&self.by_rank);
        all.filter(move |(_, aggregator)| **aggregator == Some(id)).map(|(worker, _)| worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_has_one_route() {
        let mut routes = Routes::default();
        let (worker, id) = (WorkerId(3), AggregatorId(1));
        assert_eq!((routes.is_direct(worker), routes.address(worker)), (true, NodeId::Worker(worker)));
        assert!(!routes.set(worker, None), "it was direct before");
        assert!(routes.set(worker, Some(id)) && !routes.set(worker, Some(id)));
        assert_eq!((routes.is_direct(worker), routes.address(worker)), (false, NodeId::Aggregator(id)));
        assert!(routes.set(WorkerId(0), Some(AggregatorId(2))));
        assert_eq!(routes.through(id).collect::<Vec<_>>(), [worker]);
        assert!(routes.set(worker, None));
        assert_eq!((routes.is_direct(worker), routes.through(id).next()), (true, None));
    }
}
