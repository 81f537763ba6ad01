//! The first frames on a connection, and the words of a refusal.

use crate::types::{AggregatorId, ConnectionId, NodeId, ServerId, ShardId, WorkerId};
use serde::{Deserialize, Serialize};

/// Who connects, to which job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The job's name, the last part of its URL.
    pub job: String,
    /// Who speaks.
    pub from: Party,
    /// Which life of that party this is; the coordinator gives workers theirs. 0 before it did.
    pub incarnation: u64,
}

impl Hello {
    /// The receiver's name for this connection once the caller is known to be `caller`.
    pub fn connection(&self, caller: NodeId) -> ConnectionId {
        match self.from {
            Party::Through { rank, shard, .. } => ConnectionId::WorkerFor(rank, shard),
            _ => ConnectionId::Node(caller),
        }
    }

    /// Who calls, if the caller has a number already.
    pub fn caller(&self) -> Option<NodeId> {
        match self.from {
            Party::Worker { rank } => rank.map(NodeId::Worker),
            Party::Shard { server, core, .. } => server.map(|server| NodeId::Shard(ShardId { server, core })),
            Party::Command => None,
            Party::Aggregator { id, .. } => id.map(NodeId::Aggregator),
            Party::Through { rank, .. } => Some(NodeId::Worker(rank)),
        }
    }
}

/// Who can say hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Party {
    /// A worker; without a rank it leaves the choice to the coordinator.
    Worker {
        /// Its rank.
        rank: Option<WorkerId>,
    },
    /// A server core.
    Shard {
        /// Drawn once per server process; tells servers apart that have no number yet.
        process: u64,
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
        /// Drawn once per aggregator process.
        process: u64,
        /// Its number.
        id: Option<AggregatorId>,
    },
    /// A worker to its aggregator: this connection is about one shard.
    Through {
        /// Its rank.
        rank: WorkerId,
        /// Whom it wants to talk to.
        shard: ShardId,
        /// It was connected before. An aggregator that does not know of it is another one, and what the first one held
        /// is lost.
        again: bool,
    },
}

/// The answer to a hello.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Who the caller is from now on.
    pub you: NodeId,
    /// Which life of it this is.
    pub incarnation: u64,
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
