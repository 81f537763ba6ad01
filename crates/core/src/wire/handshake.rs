//! The first frames on a connection, and the words of a refusal.

use crate::types::{
    AggregatorId, Clock, ConnectionId, CopyId, NodeId, ProcessId, ServerId, ShardId, WorkerId,
};
use serde::{Deserialize, Serialize};

/// The first message on a connection: the caller and its job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The job's name, the last part of its URL.
    pub job: String,
    /// The caller.
    pub from: Party,
    /// Which life of that party this is; the coordinator gives workers theirs. 0 before it did.
    pub incarnation: u64,
    /// The shard that the caller wants to talk to, if it is one. The core at an address may serve another one by now.
    pub to: Option<ShardId>,
}

impl Hello {
    /// The receiver's name for this connection once the caller is known to be `caller`.
    pub fn connection(&self, caller: NodeId) -> ConnectionId {
        match self.from {
            Party::Through { rank, shard, .. } => ConnectionId::WorkerFor(rank, shard),
            Party::Below { id, shard, .. } => ConnectionId::LowerFor(id, shard),
            _ => ConnectionId::Node(caller),
        }
    }

    /// The caller's node, if it has a number already.
    pub fn caller(&self) -> Option<NodeId> {
        match self.from {
            Party::Worker { rank } => rank.map(NodeId::Worker),
            Party::Shard { server, core, .. } => server.map(|server| NodeId::Shard(ShardId { server, core })),
            Party::Command => None,
            Party::Aggregator { id, .. } => id.map(NodeId::Aggregator),
            Party::Through { rank, .. } => Some(NodeId::Worker(rank)),
            Party::Reader { id } => id.map(NodeId::Worker),
            Party::Below { id, .. } => Some(NodeId::Aggregator(id)),
            Party::Copy { number, .. } => Some(NodeId::Spare(number)),
        }
    }
}

/// Kinds of callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Party {
    /// A worker; without a rank it leaves the choice to the coordinator.
    Worker {
        /// Its rank.
        rank: Option<WorkerId>,
    },
    /// A server core.
    Shard {
        /// The process that serves it; tells servers apart that have no number yet.
        process: ProcessId,
        /// Its server's number.
        server: Option<ServerId>,
        /// The core's number on its server.
        core: u32,
        /// How many cores that server has.
        cores: u32,
    },
    /// A command such as `paramill status`.
    Command,
    /// An aggregator; without a number it leaves the choice to the coordinator.
    Aggregator {
        /// Tells aggregators apart that have no number yet.
        process: ProcessId,
        /// Its number.
        id: Option<AggregatorId>,
    },
    /// A worker to its aggregator: this connection is about one shard.
    Through {
        /// Its rank.
        rank: WorkerId,
        /// Whom it wants to talk to.
        shard: ShardId,
        /// The iteration that it is at, if it was connected before. Of pushes up to that one something may have gone through another
        /// process: where this one does not know the worker, they go to the shard as they are.
        pushed: Option<Clock>,
    },
    /// A reader: it receives what is broadcast, and pushes nothing. Without a number it leaves the choice to the coordinator.
    Reader {
        /// Its number ([`WorkerId::reader`]).
        id: Option<WorkerId>,
    },
    /// An aggregator to one above it: this connection is about one shard.
    Below {
        /// Its process.
        process: ProcessId,
        /// Its number.
        id: AggregatorId,
        /// Whom it wants to talk to.
        shard: ShardId,
        /// Levels of aggregators that go through it. They grow without end where aggregators go through each other.
        levels: u32,
    },
    /// A data core that keeps a copy of a shard, to the one that serves it.
    Copy {
        /// The copy.
        copy: CopyId,
        /// The core's number ([`NodeId::Spare`]).
        number: u32,
        /// The shard.
        shard: ShardId,
        /// The entries of the log that it has; `None` before it has an image to begin with.
        has: Option<u64>,
        /// It is to serve the shard as soon as it has everything: the shard rests until then.
        moves: bool,
    },
}

/// The answer to a hello.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The caller's node from now on.
    pub you: NodeId,
    /// Which life of it this is.
    pub incarnation: u64,
    /// To an aggregator, from a shard or from the aggregator above: another number than before when what it has sent there without
    /// being noted may be in part elsewhere, and is to be given up. 0 to all others.
    pub session: u64,
}

/// Why a hello was refused. The connection is closed after it; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// A sentence for the user.
    pub reason: String,
    /// Whether the same hello may succeed later.
    pub retry: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(from: Party) -> Hello {
        Hello { job: "test".into(), from, incarnation: 0, to: None }
    }

    #[test]
    fn who_has_a_number_is_known_before_it_is_welcome() {
        let (rank, shard) = (WorkerId(2), ShardId { server: ServerId(1), core: 3 });
        let id = AggregatorId(4);
        let process = ProcessId(5);
        let known = [
            (Party::Worker { rank: Some(rank) }, NodeId::Worker(rank)),
            (Party::Shard { process, server: Some(shard.server), core: 3, cores: 4 }, NodeId::Shard(shard)),
            (Party::Aggregator { process, id: Some(id) }, NodeId::Aggregator(id)),
            (Party::Through { rank, shard, pushed: None }, NodeId::Worker(rank)),
            (Party::Below { process, id, shard, levels: 0 }, NodeId::Aggregator(id)),
            (Party::Reader { id: Some(WorkerId::reader(1)) }, NodeId::Worker(WorkerId::reader(1))),
        ];
        for (party, node) in known {
            assert_eq!(hello(party).caller(), Some(node), "{party:?}");
        }
        let unknown = [
            Party::Worker { rank: None },
            Party::Shard { process, server: None, core: 3, cores: 4 },
            Party::Command,
            Party::Aggregator { process, id: None },
        ];
        for party in unknown {
            assert_eq!(hello(party).caller(), None, "{party:?}");
        }
    }

    #[test]
    fn a_worker_has_a_connection_to_its_aggregator_for_each_shard() {
        let (rank, worker) = (WorkerId(2), NodeId::Worker(WorkerId(2)));
        let shards = [0, 1].map(|core| ShardId { server: ServerId(0), core });
        let names =
            shards.map(|shard| hello(Party::Through { rank, shard, pushed: None }).connection(worker));
        assert_eq!(names, shards.map(|shard| ConnectionId::WorkerFor(rank, shard)));
        assert_ne!(names[0], names[1]);
        assert_eq!(hello(Party::Worker { rank: None }).connection(worker), ConnectionId::Node(worker));
    }
}
