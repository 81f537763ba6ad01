//! Control messages: membership, plans, policies, status. They travel as `postcard` in frames of kind
//! [`Kind::Control`] and [`Kind::Error`], never in the data path.

use super::{Header, Kind, WireError};
use crate::placement::Part;
use crate::role::{Body, Frame};
use crate::status::{ShardReport, Status, WorkerReport};
use crate::table::{PolicyOverride, TablePolicy, TableSpec};
use crate::types::{Clock, ServerId, ShardId, TableId, WorkerId};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// What is said between nodes beside gradients and parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Control {
    /// Shard to coordinator: workers reach me here.
    Register {
        /// `host:port`, or a name of the in-memory transport.
        address: String,
    },
    /// Worker to coordinator: these are my tables, I am ready to start.
    Declare {
        /// In creation order.
        tables: Vec<TableSpec>,
    },
    /// Coordinator to shards, then to workers: who holds what, under which policies.
    Plan(Box<Plan>),
    /// Shard to coordinator: the plan is in place.
    Ready,
    /// Coordinator to everybody: these workers are alive.
    Members {
        /// Counts membership changes.
        epoch: u32,
        /// The live ones.
        workers: Vec<WorkerId>,
    },
    /// Worker to coordinator: I am alive, and this far.
    WorkerReport(WorkerReport),
    /// Coordinator to shard: report now.
    ReportRequest,
    /// Shard to coordinator, regularly and when asked.
    ShardReport(Box<ShardReport>),
    /// Worker to coordinator, without overlap: all servers acknowledged my pushes of this clock.
    Pushed {
        /// The iteration that was pushed.
        clock: Clock,
    },
    /// Coordinator to worker, without overlap: you may pull after this clock.
    Go {
        /// The iteration that was pushed.
        clock: Clock,
    },
    /// Worker to coordinator: I am at this barrier.
    Barrier {
        /// Its name.
        name: String,
    },
    /// Coordinator to workers: all live workers reached it.
    BarrierReached {
        /// Its name.
        name: String,
    },
    /// Worker to coordinator: my work is done, go on without me.
    Leave,
    /// Coordinator to a leaving worker: noted; you may close.
    Left,
    /// Command or worker to coordinator: how do things stand?
    StatusQuery,
    /// Coordinator's answer.
    Status(Box<Status>),
    /// Command to coordinator, coordinator to shards: use this consistency model from now on.
    SetSync {
        /// Glob on table names.
        table: String,
        /// Only on this server.
        server: Option<ServerId>,
        /// Text form.
        sync: String,
    },
    /// Coordinator's answer: carried out, with what was changed.
    Done(String),
    /// Coordinator to shards: the job is over, or it failed.
    Stop {
        /// Why it failed, if it did.
        error: Option<String>,
    },
    /// Command to coordinator: end the job.
    Shutdown,
}

/// Who holds what. Chunks follow from it: [`crate::table::chunks`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Frames of another placement epoch are refused.
    pub epoch: u32,
    /// The tables in creation order.
    pub tables: Vec<TableSpec>,
    /// The parts of each table.
    pub parts: Vec<Vec<Part>>,
    /// Every shard and where it is reached, ordered.
    pub shards: Vec<(ShardId, String)>,
    /// Elements per chunk.
    pub chunk_elements: u32,
    /// Every worker with its incarnation.
    pub workers: Vec<(WorkerId, u64)>,
    /// The job's policy.
    pub policy: TablePolicy,
    /// Exceptions from it.
    pub overrides: Vec<PolicyOverride>,
    /// The job's seed.
    pub seed: u64,
}

impl Plan {
    /// Data cores of each server, by number.
    pub fn cores(&self) -> Vec<u32> {
        let servers = self.shards.iter().map(|(shard, _)| shard.server.0 + 1).max().unwrap_or(0);
        let mut cores = vec![0; servers as usize];
        for (shard, _) in &self.shards {
            cores[shard.server.0 as usize] += 1;
        }
        cores
    }

    /// The policy of a table on a server: the job's, then the table's own, then the job's exceptions.
    pub fn policy_of(&self, table: TableId, server: ServerId) -> TablePolicy {
        let spec = &self.tables[table.0 as usize];
        let own = spec.policy.iter().map(|own| PolicyOverride { table: "*".into(), ..own.clone() });
        let rules: Vec<PolicyOverride> = own.chain(self.overrides.iter().cloned()).collect();
        PolicyOverride::resolve(&self.policy, &rules, &spec.name, server)
    }

    /// Whether the plan's numbers fit each other, so that nobody indexes out of range on a peer's word.
    pub fn is_consistent(&self) -> bool {
        let cores = self.cores();
        let shards_dense = cores.iter().enumerate().all(|(server, &count)| {
            (0..count).all(|core| {
                let shard = ShardId { server: ServerId(server as u32), core };
                self.shards.binary_search_by_key(&shard, |(shard, _)| *shard).is_ok()
            })
        });
        let covers = |spec: &TableSpec, parts: &Vec<Part>| {
            let mut next = 0;
            parts.iter().all(|part| {
                let fits = part.start == next && part.len > 0 && cores.get(part.server.0 as usize) > Some(&0);
                next = next.saturating_add(part.len);
                fits
            }) && next == spec.elements()
        };
        shards_dense
            && self.chunk_elements > 0
            && self.tables.len() == self.parts.len()
            && self
                .tables
                .iter()
                .zip(&self.parts)
                .all(|(spec, parts)| spec.check().is_ok() && covers(spec, parts))
    }
}

/// Why a request could not be carried out: the payload of an error frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// What kind of failure.
    pub cause: Cause,
    /// A sentence that names table, worker and remedy.
    pub message: String,
}

/// Kinds of failures, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// Unknown table, chunk or row, wrong length or element type. Nothing was changed.
    Shape,
    /// NaN or Inf in a gradient under `reject`. The chunk was not applied.
    NonFinite,
    /// The sender's placement epoch is not ours. Nothing was changed.
    StaleEpoch,
    /// The sender was declared dead or left. Nothing was changed.
    NotAMember,
    /// The worker pushed too many rounds ahead of a synchronous table. Nothing was changed; try again later.
    TooFarAhead,
    /// Tables were declared differently from other workers. Nothing was changed.
    Declaration,
    /// A component's text form cannot be used. Nothing was changed.
    Policy,
    /// The peer broke the protocol.
    Protocol,
    /// The job failed or is over.
    JobOver,
}

/// Encodes a message as a frame.
pub fn frame<T: Serialize>(kind: Kind, message: &T) -> Frame {
    let bytes = postcard::to_allocvec(message).expect("control messages have no unserialisable part");
    let mut header = Header::new(kind);
    header.payload_bytes = bytes.len() as u32;
    Frame { header, body: Body::Bytes(bytes) }
}

/// Decodes a message. Postcard takes no more memory than the payload's own length allows.
pub fn decode<T: DeserializeOwned>(what: &'static str, payload: &[u8]) -> Result<T, WireError> {
    postcard::from_bytes(payload).map_err(|error| WireError::Payload { what, why: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_cleanly(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _: Result<Control, _> = decode("control", &bytes);
            let _: Result<Fault, _> = decode("fault", &bytes);
        }
    }

    #[test]
    fn messages_survive_the_wire() {
        let message =
            Control::SetSync { table: "*".into(), server: Some(ServerId(1)), sync: "ssp:s=3".into() };
        let frame = frame(Kind::Control, &message);
        let Body::Bytes(bytes) = frame.body else { panic!("a control frame carries bytes") };
        assert_eq!(bytes.len(), frame.header.payload_bytes as usize);
        assert_eq!(decode::<Control>("control", &bytes), Ok(message));
    }
}
