//! One snapshot of a job, with reasons. It feeds logs, `paramill status` and everything that reports.

use crate::limits;
use crate::types::{AggregatorId, Clock, ServerId, ShardId, WorkerId};
use crate::waits::Waited;
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a worker stands, in its own words.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Iterations completed.
    pub clock: Clock,
    /// Payload bytes of gradients sent.
    pub bytes_pushed: u64,
    /// Payload bytes of parameters received.
    pub bytes_pulled: u64,
    /// Payload bytes of versions passed on to other workers, where tables are broadcast.
    pub bytes_relayed: u64,
    /// The last version that it has of everything that is broadcast; `None` before the first.
    pub version: Option<Clock>,
    /// How it got the parameters that it computed on.
    pub reads: ReadsReport,
    /// What became of its updates, where the policy `hold` is used.
    pub updates: Option<UpdatesReport>,
    /// What it holds back at the moment and by which policy, of the table that has waited longest.
    pub holding: Option<String>,
    /// The worker's wait as a sentence, if it waits.
    pub waiting: Option<String>,
    /// The links that it pushes over, where a codec's threshold follows them.
    pub links: Option<LinksReport>,
    /// How long its application waited, and for whom.
    pub waited: Waited,
    /// Shards that have not answered what its application waits for.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_UNANSWERED_REPORTED }>")]
    pub unanswered: Vec<ShardId>,
}

/// How a worker got the parameters that it computed on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ReadsReport {
    /// Iterations that began without a wait, on the copy that was here.
    pub at_once: u64,
    /// Iterations that began after a wait for parameters.
    pub after_wait: u64,
    /// Pulls that were asked for.
    pub pulls: u64,
    /// Seconds that the application waited for parameters.
    pub waited_s: f64,
    /// The most rounds that parameters lacked when they were used.
    pub max_staleness: u64,
}

impl ReadsReport {
    /// Those of two workers together.
    pub fn beside(self, other: ReadsReport) -> ReadsReport {
        ReadsReport {
            at_once: self.at_once + other.at_once,
            after_wait: self.after_wait + other.after_wait,
            pulls: self.pulls + other.pulls,
            waited_s: self.waited_s + other.waited_s,
            max_staleness: self.max_staleness.max(other.max_staleness),
        }
    }
}

/// A line for people.
impl fmt::Display for ReadsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReadsReport { at_once, after_wait, pulls, waited_s, max_staleness } = self;
        write!(
            f,
            "{at_once} began at once and {after_wait} after a wait, {waited_s:.1} s in all; {pulls} pulls; copies of dense tables lacked at most \
             {max_staleness} rounds"
        )
    }
}

/// What became of a worker's updates under the policy `hold`: each is one of a dense table, or of a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdatesReport {
    /// Updates that were sent.
    pub sent: u64,
    /// Gradients that were held back at first.
    pub held: u64,
    /// The most pushes that a gradient was held back from before it was sent.
    pub longest: u64,
}

impl UpdatesReport {
    /// Those of several workers together; `None` where none of them may hold updates back.
    pub fn sum(reports: impl Iterator<Item = Option<UpdatesReport>>) -> Option<UpdatesReport> {
        reports.flatten().reduce(UpdatesReport::beside)
    }

    /// Those of two workers together.
    pub fn beside(self, other: UpdatesReport) -> UpdatesReport {
        UpdatesReport {
            sent: self.sent + other.sent,
            held: self.held + other.held,
            longest: self.longest.max(other.longest),
        }
    }
}

/// A line for people.
impl fmt::Display for UpdatesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UpdatesReport { sent, held, longest } = self;
        write!(f, "{sent} sent; {held} gradients held back at first, from at most {longest} pushes")
    }
}

/// Whether the links over which a node sends carry what a codec needs (`dvf:low=...,up=...`).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LinksReport {
    /// One of them carries less: `up` holds.
    pub lacks_room: bool,
    /// How often this changed.
    pub changes: u32,
    /// The last changes, oldest first.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_ROOM_CHANGES }>")]
    pub last: Vec<RoomChange>,
}

/// A change of the threshold that holds, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoomChange {
    /// Which holds from then on: `up`, or `low`.
    pub lacks_room: bool,
    /// When it was.
    pub seconds_ago: f64,
    /// The link, and what it carries, as a sentence.
    pub cause: String,
}

/// A line for the log.
impl fmt::Display for RoomChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threshold = if self.lacks_room { "up" } else { "low" };
        write!(f, "dvf: `{threshold}` holds from now on, since {}", self.cause)
    }
}

/// How a shard stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardReport {
    /// Which shard.
    pub shard: ShardId,
    /// Its tables.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub tables: Vec<TableReport>,
    /// Payload bytes of gradients received.
    pub bytes_pushed: u64,
    /// Payload bytes of parameters sent.
    pub bytes_pulled: u64,
    /// Gradients with NaN or Inf.
    pub nonfinite: u64,
    /// Frames that were refused.
    pub refused: u64,
    /// Bytes held for parameters, accumulators and optimizer state.
    pub memory_bytes: u64,
    /// The links that it broadcasts over, and those behind them, where a codec's threshold follows them.
    pub links: Option<LinksReport>,
}

/// How one table stands on one shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableReport {
    /// Its name.
    pub name: String,
    /// Elements of it on this shard.
    pub elements: u64,
    /// The consistency model in force.
    pub sync: String,
    /// Its version, V_train.
    pub version: Clock,
    /// Live workers.
    pub workers: u32,
    /// Counters of the consistency controller.
    pub stats: crate::consistency::SyncStats,
    /// Pulls that wait, the longest first.
    pub waiting: Vec<WaitReport>,
    /// Of a round that is open for long: the workers that it lacks.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_MISSING_REPORTED }>")]
    pub missing: Vec<WorkerId>,
}

/// A pull that waits: who, since when, what would release it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WaitReport {
    /// The worker that pulls.
    pub worker: WorkerId,
    /// For how long.
    pub seconds: f64,
    /// The condition, the slowest worker and the version that would release it, as a sentence.
    pub reason: String,
}

/// How an aggregator stands, in its own words.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AggregatorReport {
    /// Live workers that go through it.
    pub workers: u32,
    /// Sums of gradients sent to servers.
    pub groups: u64,
    /// Gradients in these sums.
    pub gradients: u64,
    /// Payload bytes of gradients received from workers.
    pub bytes_from_workers: u64,
    /// Payload bytes of gradients sent to servers.
    pub bytes_to_servers: u64,
    /// Payload bytes of parameters received from servers.
    pub bytes_from_servers: u64,
    /// Payload bytes of parameters sent to workers.
    pub bytes_to_workers: u64,
    /// Bytes held for sums and parameters.
    pub memory_bytes: u64,
    /// Aggregators that go to the servers through it.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_AGGREGATORS as usize }>")]
    pub below: Vec<AggregatorId>,
}

/// An aggregator in the coordinator's status.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AggregatorStatus {
    /// Which aggregator.
    pub aggregator: AggregatorId,
    /// Addresses at which workers reach it.
    pub address: String,
    /// Whether it is connected.
    pub connected: bool,
    /// Its own words.
    pub report: AggregatorReport,
}

/// A worker in the coordinator's status.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Which worker.
    pub worker: WorkerId,
    /// Which process with this rank it is, from 1.
    pub incarnation: u32,
    /// `joining`, `running`, `left` or `dead`.
    pub state: MemberState,
    /// Seconds since it was last heard.
    pub silent_seconds: f64,
    /// Seconds since its clock last moved.
    pub idle_seconds: f64,
    /// Its own words.
    pub report: WorkerReport,
}

/// A reader in the coordinator's status.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReaderStatus {
    /// Its number.
    pub reader: u32,
    /// The newest version of all tables that it has; `None` before the first.
    pub version: Option<Clock>,
    /// Seconds since it was last heard.
    pub silent_seconds: f64,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// The reader's wait as a sentence, if it waits.
    pub waiting: Option<String>,
}

/// Somebody who receives what is broadcast, and its place in the trees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiverStatus {
    /// A worker or a reader.
    pub receiver: String,
    /// The last version that it has of everything that is broadcast; `None` before the first.
    pub version: Option<Clock>,
    /// Workers that pass streams on to it, and `the servers` if these send it some themselves. While a worker does not, the servers do.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pub takes_from: Vec<String>,
    /// Workers and readers that it passes streams on to.
    pub followers: u32,
}

/// A member's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    /// Connected; the job has not started, or the worker's first clock is being agreed on.
    Joining,
    /// Takes part.
    Running,
    /// Left of its own will.
    Left,
    /// Was silent too long.
    Dead,
}

/// The configuration that a server needs before it starts its data cores.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSize {
    /// Workers of the job.
    pub workers: u32,
    /// Servers of the job.
    pub servers: u32,
}

/// The names that globs find in a table of several tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackNames {
    /// The table's name, as shards report it.
    pub table: String,
    /// Its layers.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_LAYERS }>")]
    pub layers: Vec<String>,
}

/// The whole job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The job's name.
    pub job: String,
    /// The job's phase, or what it waits for, as a sentence.
    pub phase: String,
    /// The job's configuration.
    pub size: JobSize,
    /// The plan's epoch: counts changes of members and policies.
    pub epoch: u32,
    /// Processes that took the rank of an earlier one.
    pub restarts: u32,
    /// Every worker.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pub workers: Vec<WorkerStatus>,
    /// Every reader that is connected.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_READERS }>")]
    pub readers: Vec<ReaderStatus>,
    /// Where tables are broadcast: every worker and reader with its place in the trees.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize + limits::MAX_READERS }>")]
    pub receivers: Vec<ReceiverStatus>,
    /// Every shard's report.
    pub shards: Vec<ShardReport>,
    /// Where every shard is served, and where its copy is.
    pub served: Vec<ServedStatus>,
    /// Shards that have moved, and those that are to.
    pub moves: MovesStatus,
    /// The tables that are packs, with the names of their layers.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub packs: Vec<PackNames>,
    /// Every aggregator.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_AGGREGATORS as usize }>")]
    pub aggregators: Vec<AggregatorStatus>,
    /// Policies of tables that train badly together, as sentences with the remedy.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_OVERRIDES }>")]
    pub warnings: Vec<String>,
    /// How long all workers waited together, and for whom; of processes that died what they had told of.
    pub waited: Waited,
    /// Members that live and make no progress while others wait for them.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WAIT_CAUSES }>")]
    pub stalled: Vec<StalledStatus>,
}

/// A member that lives and makes no progress while others wait for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StalledStatus {
    /// Its name, such as `worker 2`.
    pub node: String,
    /// For how long.
    pub seconds: f64,
    /// The members that wait for it, and what for.
    pub holds_up: String,
}

/// Where a shard is served, and where its copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedStatus {
    /// The shard.
    pub shard: ShardId,
    /// The server whose process serves it.
    pub server: Option<ServerId>,
    /// The server that keeps a copy which can take over.
    pub copy: Option<ServerId>,
    /// The server that a copy is being made on.
    pub copying: Option<ServerId>,
    /// The server that it is to move to.
    pub moving: Option<ServerId>,
}

/// Shards that moved from one server to another to balance their load, or away from one that is drained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovesStatus {
    /// Shards that have moved since the coordinator was started.
    pub shards: u64,
    /// Bytes that were sent for these: images of shards, and what happened to the shards until they had arrived.
    pub bytes: u64,
    /// Shards that are yet to move, with those under way.
    pub planned: u32,
    /// Shards that are being sent to their new servers.
    pub under_way: u32,
}

impl Status {
    /// Leaves out what takes most room, for a job that is too large to be reported.
    pub(crate) fn shorten(&mut self) {
        self.shards.iter_mut().for_each(|shard| shard.tables.clear());
        self.receivers.clear();
        for WorkerStatus { report, .. } in &mut self.workers {
            report.waited.causes.clear();
        }
        self.phase += " (there are too many tables to report)";
    }
}
