//! Control messages: membership, plans, policies, status. They travel as `postcard` in frames of kind
//! [`Kind::Control`] and [`Kind::Error`], never in the data path.

use super::bounded::sequence;
use super::{Change, Header, Kind, Plan, WireError};
use crate::address::Addresses;
use crate::bandwidth::{Probe, Reading};
use crate::checkpoint::{Manifest, SavedFile};
use crate::consistency::Question;
use crate::limits;
use crate::policy::{JobPolicies, PolicyOverride};
use crate::role::{Body, Frame};
use crate::status::{AggregatorReport, ShardReport, Status, WorkerReport};
use crate::table::{TableSpec, tables};
use crate::types::{Clock, CopyId, ServerId, ShardId, TableId, WorkerId};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt;
use std::time::Duration;

/// Messages between nodes beside gradients and parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Control {
    /// Shard or aggregator to coordinator: workers reach me here.
    Register {
        /// Each of them leads to it.
        addresses: Addresses,
    },
    /// Worker to coordinator: these are my tables, I am ready to start.
    Declare {
        /// In creation order.
        #[serde(deserialize_with = "tables")]
        tables: Vec<TableSpec>,
    },
    /// Coordinator to shards and aggregators, then to workers: members, placement and policies.
    Plan(Box<Plan>),
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
        /// The worker whose pushes were waited for, if any were.
        last: Option<WorkerId>,
    },
    /// Worker to coordinator: I am at this barrier. Said again after a broken connection.
    Barrier {
        /// Its name.
        name: String,
        /// Counts the barriers that this worker came to, from 1.
        number: u64,
    },
    /// Coordinator to live workers: all of them reached it.
    BarrierReached {
        /// Its name.
        name: String,
        /// The worker that came last, or left instead; `None` if it is not known any more.
        last: Option<WorkerId>,
        /// If rounds may have closed without workers that waited at it: the newest version of a table.
        version: Option<Clock>,
    },
    /// Worker to coordinator: my work is done, go on without me.
    Leave,
    /// Coordinator to a leaving worker: noted; you may close.
    Left,
    /// Command or worker to coordinator: how do things stand?
    StatusQuery,
    /// Coordinator's answer.
    Status(Box<Status>),
    /// Coordinator's answer: carried out, with what was changed.
    Done(String),
    /// Coordinator to all nodes: the job is over, or it failed. Shard to coordinator: it cannot go on.
    Stop {
        /// Why it failed, if it did.
        error: Option<String>,
    },
    /// Aggregator to coordinator, regularly.
    AggregatorReport(AggregatorReport),
    /// Coordinator to shards and aggregators, then to workers: the next epoch, and what is new in it.
    Change {
        /// The epoch.
        epoch: u32,
        /// The change.
        change: Change,
    },
    /// Shard or aggregator to coordinator: what the epoch says holds here.
    Entered {
        /// The epoch.
        epoch: u32,
        /// The first clock that each joining worker could push here.
        #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
        joining: Vec<FirstClock>,
        /// A table whose initial values are missing here, while worker 0, which would send them, does not take part.
        lacks_values: Option<TableId>,
    },
    /// Anybody to the coordinator: a change is missing here, send the whole plan.
    PlanQuery,
    /// Command to coordinator: let these policies hold from now on.
    Set(PolicyOverride),
    /// Coordinator to a worker that joins, when that reports: why it does not take part yet.
    Waiting {
        /// A sentence that names who is waited for.
        reason: String,
    },
    /// Worker to coordinator, before it declares its tables: which policies does the job begin with?
    PoliciesQuery,
    /// Coordinator's answer.
    Policies(Box<JobPolicies>),
    /// Shard to worker 0, itself or through an aggregator: may this pull be answered now?
    Question {
        /// The table that is pulled.
        table: TableId,
        /// The pull, and the state of the table.
        question: Box<Question>,
    },
    /// Worker 0's answer.
    Verdict {
        /// The table.
        table: TableId,
        /// The number of the question.
        number: u64,
        /// Whether the pull is answered; `None` when the condition failed, or is not known.
        holds: Option<bool>,
    },
    /// Worker to a shard, or to a worker that passes the shard's streams on: send me these tables' versions from now on.
    Subscribe {
        /// Whose streams they are.
        shard: ShardId,
        /// What the sender has of each.
        #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
        positions: Vec<Position>,
        /// Only if there is more than that: the sender gets them from somebody else, and has waited long for it.
        is_question: bool,
    },
    /// The same node again: send me these tables' versions no more.
    Unsubscribe {
        /// Whose streams they are.
        shard: ShardId,
        /// The tables.
        #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
        tables: Vec<TableId>,
    },
    /// Worker to whoever it gets a stream from: I have this version.
    Seen {
        /// Whose stream it is.
        shard: ShardId,
        /// The table.
        table: TableId,
        /// The version.
        version: Clock,
    },
    /// Worker to coordinator, where tables are broadcast: other workers reach me here.
    Reached {
        /// Each of them leads to it; none where it cannot be reached.
        addresses: Option<Addresses>,
        /// It gets streams from its aggregator, and is in no tree.
        is_aggregated: bool,
    },
    /// Coordinator to worker: get the streams of tables that are broadcast from these nodes from now on.
    Routes(#[serde(deserialize_with = "sequence::<_, _, { limits::MAX_ROUTES }>")] Vec<Route>),
    /// Worker to coordinator: I do not get from this worker what it should pass on to me.
    Unreachable {
        /// The worker.
        relay: WorkerId,
    },
    /// A frame of a train that tells what the link to its receiver carries.
    Probe(Probe),
    /// Back to who sent a train, or a push: what was read of the link.
    Measured(Reading),
    /// Worker to a shard whose streams it passes on: the slowest of the links over which it does so and which carry less than
    /// their codec needs.
    Behind {
        /// What was read of it; nothing when all carry enough.
        lacking: Option<Reading>,
    },
    /// Coordinator to workers that the job begins with, before the plan.
    Ready {
        /// The worker that was ready last; `None` if a server was.
        last: Option<WorkerId>,
    },
    /// Worker to coordinator, when it reports: I push nothing before this iteration.
    Idle {
        /// [`Clock::MAX`] while the application waits at a barrier; 0 when nothing can be said.
        until: Clock,
    },
    /// Coordinator to shards and aggregators: these workers, and no others, push nothing for now.
    IdleWorkers {
        /// Counts these messages, from 1.
        number: u64,
        /// Ascending by rank.
        #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
        workers: Vec<IdleWorker>,
    },
    /// Shard to coordinator: rounds go by the message of this number from now on.
    IdleNoted {
        /// The number.
        number: u64,
        /// The newest version of a table here.
        version: Clock,
    },
    /// Coordinator to all nodes, if it is started anew when it dies: go on without me for so long, and come back.
    Patience {
        /// Seconds.
        seconds: u32,
    },
    /// Coordinator to a spare core: keep a copy of this shard.
    Keep {
        /// The shard.
        shard: ShardId,
        /// Addresses of the process that serves it.
        from: Addresses,
        /// The number of this order, by which the copy is known ([`CopyId`]).
        order: u64,
        /// The shard moves: the copy serves it as soon as it has everything.
        moves: bool,
    },
    /// Spare core to coordinator, before it says where it is reached: it keeps a copy of this shard.
    Kept {
        /// The shard.
        shard: ShardId,
        /// The order that the copy was made by.
        order: u64,
    },
    /// Shard to coordinator: this copy has everything, and no input is applied here that is not there.
    Copied {
        /// The copy.
        copy: CopyId,
        /// The newest epoch that the shard has heard of: where the shard is served may have changed since.
        epoch: u32,
        /// Bytes that were sent to it: the image of the shard, and the inputs since.
        bytes: u64,
    },
    /// Shard to coordinator: inputs have waited here for so long that the copy must be out of reach.
    CopyLost {
        /// The copy.
        copy: CopyId,
    },
    /// Coordinator to a data core: your process is to start another one.
    StartCore,
    /// Command to coordinator: move everything away from this server, so that it can end.
    Drain {
        /// Its number.
        server: ServerId,
    },
    /// Coordinator to a copy: serve the shard from now on, by this plan.
    Promote(Box<Plan>),
    /// Coordinator to shards and workers: take part in a checkpoint. It takes the place of an earlier order.
    Checkpoint(CheckpointOrder),
    /// Shard or worker to coordinator: what came of an order.
    CheckpointTaken {
        /// The order's number.
        number: u64,
        /// What came of it.
        outcome: CheckpointOutcome,
    },
    /// Command to coordinator: make a checkpoint soon. It is answered when that is complete.
    CheckpointRequest,
    /// Command to coordinator: make a checkpoint soon, of which the sender then reads the files.
    CheckpointCopyRequest {
        /// The clock at which all workers rest, if they do: the checkpoint is of that one.
        at: Option<Clock>,
    },
    /// Coordinator to command: it is complete. Its files stay for as long as this connection does.
    CheckpointCopy(Box<Manifest>),
    /// Command to coordinator, and coordinator to the shard or worker whose file it is: read a part of it. Worker to coordinator: read a
    /// part of the checkpoint that the job goes on from.
    CheckpointRead(PartPlace),
    /// The answer of whose file it is, and what the coordinator tells a command, or a worker that reads.
    CheckpointPart(FilePart),
    /// Command to coordinator: spread shards over the servers anew, by what they carry.
    Rebalance,
}

/// A part of a checkpoint's file, from a byte on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartPlace {
    /// The coordinator's number of the command that reads; whoever asks the coordinator says 0, and it does when it reads itself.
    pub reader: u32,
    /// The checkpoint's folder.
    pub folder: String,
    /// The file's name.
    pub file: String,
    /// The first byte.
    pub start: u64,
}

/// What stands at a [`PartPlace`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart {
    /// Where it stands.
    pub place: PartPlace,
    /// Bytes from there on: as many as may be, or those up to the end of the file.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_PART_BYTES }>")]
    pub bytes: Vec<u8>,
    /// Why it cannot be read: a sentence.
    pub refusal: Option<String>,
}

impl FilePart {
    /// What is told of a part that was read, or could not be.
    pub(crate) fn message(place: PartPlace, part: Result<Vec<u8>, String>) -> Control {
        let (bytes, refusal) = match part {
            Ok(bytes) => (bytes, None),
            Err(why) => (Vec::new(), Some(sentence(why))),
        };
        Control::CheckpointPart(FilePart { place, bytes, refusal })
    }
}

/// An order to the shards to copy their tables, and to workers to copy what they keep from these; and to have the copies written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointOrder {
    /// Counts orders, from 1.
    pub number: u64,
    /// A table is copied when this is its version. A worker copies before it pushes a gradient of this clock.
    pub at: Clock,
    /// The checkpoint's folder in every server's archive.
    pub folder: String,
    /// No table gets that far any more that is not there yet: those that are left are copied as they are. The same for a worker.
    pub takes_all: bool,
    /// The job keeps checkpoints. Otherwise a command reads this one, and it is in nobody's archive.
    pub is_kept: bool,
    /// Folders of complete checkpoints that are kept.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_CHECKPOINTS }>")]
    pub keep: Vec<String>,
}

/// What came of a [`CheckpointOrder`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointOutcome {
    /// All tables are copied, and the copies are written.
    Saved {
        /// The file.
        file: SavedFile,
        /// The newest version of a table by now.
        version: Clock,
    },
    /// A table was past that version when the order came.
    Missed {
        /// The newest version of a table.
        version: Clock,
    },
    /// The copies could not be made or written.
    Failed {
        /// A sentence.
        why: String,
    },
    /// A worker keeps nothing from servers.
    Nothing,
}

/// A worker that no round before an iteration waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleWorker {
    /// Its rank.
    pub worker: WorkerId,
    /// The iteration; [`Clock::MAX`] while it waits at a barrier.
    pub until: Clock,
}

/// From whom a worker gets a shard's streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The shard.
    pub shard: ShardId,
    /// Of these tables.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub tables: Vec<TableId>,
    /// The worker that passes them on; without one, from the shard.
    pub relay: Option<Relay>,
}

/// A worker that passes streams on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relay {
    /// Its rank.
    pub worker: WorkerId,
    /// Where it is reached.
    pub addresses: Addresses,
}

/// How far a receiver is in a table's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The table.
    pub table: TableId,
    /// The table's [`valid_from`](super::Plan::valid_from) epoch, as the receiver knows the plan: it reads what these codecs make.
    pub epoch: u32,
    /// The last version that it has whole; `None` before the first.
    pub version: Option<Clock>,
}

impl Position {
    /// Whether these are in the order of their tables, each once: a table that is named again and again would be sent again and again.
    pub(crate) fn check_order(positions: &[Position], by: impl fmt::Display) -> Result<(), Fault> {
        if positions.is_sorted_by(|one, next| one.table < next.table) {
            return Ok(());
        }
        let message = format!("{by} asks for streams that are not in the order of their tables, each once");
        Err(Fault { cause: Cause::Protocol, message })
    }
}

/// The first clock that a joining worker could push to a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstClock {
    /// Its rank.
    pub worker: WorkerId,
    /// Which process it is.
    pub incarnation: u64,
    /// No round from this one on closes without it.
    pub clock: Clock,
}

impl Control {
    /// The name of the message's kind, for a log: its contents are a peer's, and may be of any length.
    pub fn name(&self) -> &'static str {
        match self {
            Control::Register { .. } => "register",
            Control::Declare { .. } => "declare",
            Control::Plan(_) => "plan",
            Control::WorkerReport(_) => "worker report",
            Control::ReportRequest => "report request",
            Control::ShardReport(_) => "shard report",
            Control::Pushed { .. } => "pushed",
            Control::Go { .. } => "go",
            Control::Barrier { .. } => "barrier",
            Control::BarrierReached { .. } => "barrier reached",
            Control::Leave => "leave",
            Control::Left => "left",
            Control::StatusQuery => "status query",
            Control::Status(_) => "status",
            Control::Done(_) => "done",
            Control::Stop { .. } => "stop",
            Control::AggregatorReport(_) => "aggregator report",
            Control::Change { .. } => "change",
            Control::Entered { .. } => "entered",
            Control::PlanQuery => "plan query",
            Control::Set(_) => "set",
            Control::Waiting { .. } => "waiting",
            Control::PoliciesQuery => "policies query",
            Control::Policies(_) => "policies",
            Control::Question { .. } => "question",
            Control::Verdict { .. } => "verdict",
            Control::Subscribe { .. } => "subscribe",
            Control::Unsubscribe { .. } => "unsubscribe",
            Control::Seen { .. } => "seen",
            Control::Reached { .. } => "reached",
            Control::Routes(_) => "routes",
            Control::Unreachable { .. } => "unreachable",
            Control::Probe(_) => "probe",
            Control::Measured(_) => "measured",
            Control::Behind { .. } => "behind",
            Control::Ready { .. } => "ready",
            Control::Idle { .. } => "idle",
            Control::IdleWorkers { .. } => "idle workers",
            Control::IdleNoted { .. } => "idle noted",
            Control::Patience { .. } => "patience",
            Control::Keep { .. } => "keep",
            Control::Kept { .. } => "kept",
            Control::Copied { .. } => "copied",
            Control::CopyLost { .. } => "copy lost",
            Control::StartCore => "start core",
            Control::Drain { .. } => "drain",
            Control::Promote(_) => "promote",
            Control::Checkpoint(_) => "checkpoint",
            Control::CheckpointTaken { .. } => "checkpoint taken",
            Control::CheckpointRequest => "checkpoint request",
            Control::CheckpointCopyRequest { .. } => "checkpoint copy request",
            Control::CheckpointCopy(_) => "checkpoint copy",
            Control::CheckpointRead(_) => "checkpoint read",
            Control::CheckpointPart(_) => "checkpoint part",
            Control::Rebalance => "rebalance",
        }
    }
}

/// Why a request could not be carried out: the payload of an error frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// The kind of failure.
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
    /// The frame's epoch is before the table's [`Plan::valid_from`], or one that the receiver has not entered. Nothing was
    /// changed.
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
    /// The change was made, and somebody has not followed within the time that a command waits.
    Unsettled,
}

/// Encodes a message as a frame.
pub fn frame<T: Serialize>(kind: Kind, message: &T) -> Frame {
    let bytes = postcard::to_allocvec(message).expect("control messages have no unserialisable part");
    let mut header = Header::new(kind);
    header.payload_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    Frame { header, body: Body::Bytes(bytes) }
}

/// Whether a frame's payload is short enough to be taken by its receiver.
pub fn fits(frame: &Frame) -> bool {
    frame.header.payload_bytes as usize <= frame.header.kind.max_payload_bytes()
}

/// Decodes a message. It takes memory in proportion to the payload: where an item may be much longer in memory than on
/// the wire, the number of items has a limit.
pub fn decode<T: DeserializeOwned>(what: &'static str, payload: &[u8]) -> Result<T, WireError> {
    postcard::from_bytes(payload).map_err(|error| WireError::Payload { what, why: error.to_string() })
}

/// How long a coordinator may be away, by its own word.
pub fn patience(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into()).min(limits::MAX_COORDINATOR_GRACE)
}

/// A peer's words to a person, cut off at the length that a sentence may have.
pub fn sentence(mut text: String) -> String {
    let is_beyond = |(start, c): &(usize, char)| start + c.len_utf8() > limits::MAX_REASON_BYTES;
    if let Some((end, _)) = text.char_indices().find(is_beyond) {
        text.truncate(end);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policies;
    use crate::types::ServerId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_cleanly(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _: Result<Control, _> = decode("control", &bytes);
            let _: Result<Fault, _> = decode("fault", &bytes);
        }
    }

    /// Variants are numbered in order, and `docs/wire.md` lists them: a new one goes to the end.
    #[test]
    fn variants_keep_their_numbers() {
        let go = Control::Go { clock: 0, last: None };
        let shard = ShardId { server: ServerId(0), core: 0 };
        for (message, number) in [
            (go, 7),
            (Control::StatusQuery, 12),
            (Control::Stop { error: None }, 15),
            (Control::AggregatorReport(AggregatorReport::default()), 16),
            (Control::Entered { epoch: 1, joining: vec![], lacks_values: None }, 18),
            (Control::Set(PolicyOverride::new("*", Policies::default())), 20),
            (Control::Waiting { reason: String::new() }, 21),
            (Control::Policies(Box::default()), 23),
            (Control::Verdict { table: TableId(0), number: 1, holds: None }, 25),
            (Control::Subscribe { shard, positions: vec![], is_question: false }, 26),
            (Control::Unreachable { relay: WorkerId(1) }, 31),
            (Control::Measured(Reading::Transfer { bytes: 1, micros: 2 }), 33),
            (Control::Behind { lacking: None }, 34),
            (Control::Idle { until: 1 }, 36),
            (Control::IdleWorkers { number: 1, workers: vec![] }, 37),
            (Control::IdleNoted { number: 1, version: 2 }, 38),
            (Control::Patience { seconds: 600 }, 39),
            (Control::CheckpointRequest, 49),
            (Control::CheckpointCopyRequest { at: None }, 50),
        ] {
            let Body::Bytes(bytes) = frame(Kind::Control, &message).body else { panic!("carries bytes") };
            assert_eq!(bytes[0], number, "{message:?}");
        }
    }

    #[test]
    fn sentences_have_an_end() {
        assert_eq!(sentence("short".into()), "short");
        assert_eq!(sentence("x".repeat(1 << 20)).len(), limits::MAX_REASON_BYTES);
        // Three bytes a character: the last one that fits whole is kept.
        assert_eq!(sentence("\u{20ac}".repeat(1000)).len(), limits::MAX_REASON_BYTES / 3 * 3);
    }

    #[test]
    fn messages_survive_the_wire() {
        let message =
            Control::Change { epoch: 2, change: Change::Joining { worker: WorkerId(1), incarnation: 7 } };
        let frame = frame(Kind::Control, &message);
        let Body::Bytes(bytes) = frame.body else { panic!("a control frame carries bytes") };
        assert_eq!(bytes.len(), frame.header.payload_bytes as usize);
        assert_eq!(decode::<Control>("control", &bytes), Ok(message));
    }
}
