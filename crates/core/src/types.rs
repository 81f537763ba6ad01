//! The nouns that every module shares.

use crate::limits;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A worker's rank: dense from 0, fixed for the job. Readers, which receive streams as workers do and take part in no round, are
/// numbered behind all ranks that there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId(pub u32);

impl WorkerId {
    /// The worker whose initial values count.
    pub const FIRST: WorkerId = WorkerId(0);

    /// The reader of this number.
    pub const fn reader(number: u32) -> WorkerId {
        WorkerId(limits::MAX_WORKERS.saturating_add(number))
    }

    /// The number of a reader; `None` for a worker.
    pub const fn reader_number(self) -> Option<u32> {
        self.0.checked_sub(limits::MAX_WORKERS)
    }

    /// Whether it is a reader: no rank, and no member of any round.
    pub const fn is_reader(self) -> bool {
        self.reader_number().is_some()
    }
}

/// A server's number: dense from 0, fixed for the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ServerId(pub u32);

/// A logical shard: a share of the tables' chunks, held by one data core of one server. A chunk belongs to one shard for life.
/// The plan says which process serves a shard ([`crate::wire::ServedShard`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ShardId {
    /// The server that the core belongs to.
    pub server: ServerId,
    /// The core's number on its server, dense from 0.
    pub core: u32,
}

/// A server or aggregator process. Each draws its own when it starts: a number of the job may pass to another process, which
/// does not hold what the first one held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessId(pub u64);

/// A copy of a shard. A core that is told again to keep one makes another copy: what is said of the first does not hold for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CopyId {
    /// The process that keeps it.
    pub process: ProcessId,
    /// The number of the coordinator's order to make it. No two orders of a job have the same one.
    pub order: u64,
}

/// An aggregator's number, fixed for the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AggregatorId(pub u32);

/// A table's number: its place in creation order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TableId(pub u32);

/// An iteration of a worker, or a version of a table; both count from 0.
pub type Clock = u64;

/// Anything that a connection can end in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NodeId {
    /// Membership, placement and policies; never in the data path.
    Coordinator,
    /// A data core.
    Shard(ShardId),
    /// A worker.
    Worker(WorkerId),
    /// A command that asks or sets something and goes away.
    Admin(u32),
    /// Sums the gradients of some workers, and fans parameters out to them.
    Aggregator(AggregatorId),
    /// A data core that serves no shard: it keeps a copy of one, or waits to be given one. The coordinator numbers them.
    Spare(u32),
}

/// One end's name for a connection. The other end has a name of its own, and is never told; copies of a role are.
///
/// A role gives the names, with [`Output::Connect`](crate::role::Output::Connect) and by accepting a
/// [`Hello`](crate::wire::Hello), and a driver uses no others. A role has at most one connection of each name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ConnectionId {
    /// The connection to this node. Two nodes have one, but for a worker and its aggregator.
    Node(NodeId),
    /// A worker's connection to its aggregator, for one shard. The aggregator has no number here: the worker knows its
    /// address, and whichever process answers there is the aggregator.
    AggregatorFor(ShardId),
    /// An aggregator's connection to a worker, for one shard.
    WorkerFor(WorkerId, ShardId),
    /// A worker's connection to another one that passes streams on to it. The other end's is `Node`: two workers may do so for
    /// each other.
    RelayedBy(WorkerId),
    /// An aggregator's connection to one below it, for one shard.
    LowerFor(AggregatorId, ShardId),
}

impl ConnectionId {
    /// The node at the other end; `None` for a worker's aggregator, since a worker does not know its number.
    #[inline]
    pub fn peer(self) -> Option<NodeId> {
        match self {
            ConnectionId::Node(node) => Some(node),
            ConnectionId::AggregatorFor(_) => None,
            ConnectionId::WorkerFor(worker, _) | ConnectionId::RelayedBy(worker) => {
                Some(NodeId::Worker(worker))
            }
            ConnectionId::LowerFor(id, _) => Some(NodeId::Aggregator(id)),
        }
    }

    /// Whether the peer is a copy, which says how far it has followed and asks for nothing: it is read from even while it does not take all that is
    /// sent to it. What it says is what lets the shard go on.
    pub fn is_copy(self) -> bool {
        matches!(self, ConnectionId::Node(NodeId::Spare(_)))
    }

    /// Whether a reader is at the other end.
    pub(crate) fn is_reader(self) -> bool {
        matches!(self, ConnectionId::Node(NodeId::Worker(id)) if id.is_reader())
    }

    /// The shard at the other end, or behind the aggregator that is at one of the ends.
    #[inline]
    pub fn shard(self) -> Option<ShardId> {
        match self {
            ConnectionId::Node(NodeId::Shard(shard))
            | ConnectionId::AggregatorFor(shard)
            | ConnectionId::WorkerFor(_, shard)
            | ConnectionId::LowerFor(_, shard) => Some(shard),
            ConnectionId::Node(_) | ConnectionId::RelayedBy(_) => None,
        }
    }
}

impl From<NodeId> for ConnectionId {
    fn from(node: NodeId) -> ConnectionId {
        ConnectionId::Node(node)
    }
}

/// Nanoseconds since the driver's own zero. The core never asks what time it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Time(pub u64);

impl Time {
    /// The driver's zero.
    pub const ZERO: Time = Time(0);

    /// The time `seconds` after zero. Negative and non-finite values count as zero.
    pub fn from_secs_f64(seconds: f64) -> Time {
        Time((seconds.max(0.0) * 1e9) as u64)
    }

    /// Seconds since the driver's zero.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Time passed since `earlier`, zero if `earlier` lies ahead.
    pub fn since(self, earlier: Time) -> std::time::Duration {
        std::time::Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<std::time::Duration> for Time {
    type Output = Time;

    fn add(self, duration: std::time::Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reader_number() {
            Some(number) => write!(f, "reader {number}"),
            None => write!(f, "worker {}", self.0),
        }
    }
}

impl fmt::Display for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "server {}", self.0)
    }
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} core {}", self.server, self.core)
    }
}

impl fmt::Display for AggregatorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "aggregator {}", self.0)
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {:x}", self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodeId::Coordinator => write!(f, "the coordinator"),
            NodeId::Shard(shard) => write!(f, "{shard}"),
            NodeId::Worker(worker) => write!(f, "{worker}"),
            NodeId::Admin(number) => write!(f, "command {number}"),
            NodeId::Aggregator(aggregator) => write!(f, "{aggregator}"),
            NodeId::Spare(number) => write!(f, "spare core {number}"),
        }
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionId::Node(node) => write!(f, "{node}"),
            ConnectionId::AggregatorFor(shard) => write!(f, "{shard} through the aggregator"),
            ConnectionId::WorkerFor(worker, shard) => write!(f, "{worker} for {shard}"),
            ConnectionId::RelayedBy(worker) => write!(f, "{worker}, which passes streams on"),
            ConnectionId::LowerFor(id, shard) => write!(f, "{id} for {shard}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn time_goes_on_and_never_back() {
        let time = Time::from_secs_f64(1.5);
        assert_eq!((time, time.as_secs_f64()), (Time(1_500_000_000), 1.5));
        assert_eq!([-1.0, f64::NAN].map(Time::from_secs_f64), [Time::ZERO; 2]);
        let later = time + Duration::from_millis(250);
        assert_eq!((later.since(time), time.since(later)), (Duration::from_millis(250), Duration::ZERO));
        assert_eq!(Time(u64::MAX - 1) + Duration::MAX, Time(u64::MAX));
    }

    /// Errors and the status name nodes so.
    #[test]
    fn nodes_are_named_for_people() {
        let shard = ShardId { server: ServerId(1), core: 2 };
        for (node, name) in [
            (NodeId::Coordinator, "the coordinator"),
            (NodeId::Shard(shard), "server 1 core 2"),
            (NodeId::Worker(WorkerId(3)), "worker 3"),
            (NodeId::Worker(WorkerId::reader(0)), "reader 0"),
            (NodeId::Worker(WorkerId(limits::MAX_WORKERS - 1)), "worker 16383"),
            (NodeId::Admin(4), "command 4"),
            (NodeId::Aggregator(AggregatorId(5)), "aggregator 5"),
        ] {
            assert_eq!(node.to_string(), name);
        }
    }

    #[test]
    fn a_connection_is_as_cheap_to_copy_as_a_few_numbers() {
        assert!(size_of::<ConnectionId>() <= 16, "{}", size_of::<ConnectionId>());
    }

    #[test]
    fn a_connection_names_its_peer_and_its_shard() {
        let shard = ShardId { server: ServerId(1), core: 2 };
        let (worker, node) = (WorkerId(3), NodeId::Worker(WorkerId(3)));
        let told = |connection: ConnectionId| (connection.to_string(), connection.peer(), connection.shard());
        assert_eq!(
            told(NodeId::Coordinator.into()),
            ("the coordinator".into(), Some(NodeId::Coordinator), None)
        );
        assert_eq!(told(node.into()), ("worker 3".into(), Some(node), None));
        let direct = NodeId::Shard(shard);
        assert_eq!(told(direct.into()), ("server 1 core 2".into(), Some(direct), Some(shard)));
        assert_eq!(
            told(ConnectionId::WorkerFor(worker, shard)),
            ("worker 3 for server 1 core 2".into(), Some(node), Some(shard))
        );
        assert_eq!(
            told(ConnectionId::AggregatorFor(shard)),
            ("server 1 core 2 through the aggregator".into(), None, Some(shard))
        );
    }
}
