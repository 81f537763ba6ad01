//! Every bound in one place. A length from the network is compared with one of these before memory is taken.

use std::time::Duration;

/// Complete checkpoints that a job keeps at most.
pub const MAX_CHECKPOINTS: usize = 1024;
/// Bytes of a checkpoint's file that are read at once.
pub const MAX_PART_BYTES: usize = 1 << 20;
/// The longest file that a worker brings to a checkpoint.
pub const MAX_WORKER_FILE_BYTES: u64 = 1 << 40;
/// Notes that a worker's application may have saved with a checkpoint.
pub const MAX_NOTES: usize = 64;
/// Bytes of one of them.
pub const MAX_NOTE_BYTES: usize = 64 << 10;
/// The longest header of a checkpoint's file.
pub const MAX_CHECKPOINT_HEADER_BYTES: u64 = 256 << 20;
/// The latest clock that a job which goes on from a checkpoint may begin with.
pub const MAX_FIRST_CLOCK: u64 = 1 << 48;
/// Parameters that are worked on at once where their number is free: 32 KB of f32 stay in the nearest caches.
pub const BLOCK_ELEMENTS: usize = 8192;
/// Parameters in a row of a table of rows.
pub const MAX_ROW_ELEMENTS: usize = 8192;
/// Ranges without a gradient that a push of a chunk, or an exchange of a table, may name.
pub const MAX_ABSENT_RANGES: usize = 65_536;
/// The largest payload of a data frame.
pub const MAX_DATA_BYTES: usize = 4 << 20;
/// The most parameters in one data frame, and so in one chunk: a row number before every one of them still fits.
pub const MAX_DATA_ELEMENTS: usize = MAX_DATA_BYTES / 8;
/// Frames that a driver receives where they belong with one system call.
pub const LANDING_FRAMES: usize = 32;
/// Loops of a driver that a worker's connections are spread over at most.
pub const MAX_LOOPS: usize = 64;
/// Bytes that a peer may be ahead of another before a driver passes it over: so much stays in the nearest caches.
pub const LONGEST_LEAD: u64 = 128 << 10;
/// Chunks in one job. Every node keeps a list of them.
pub const MAX_CHUNKS: u64 = 1 << 24;
/// The largest payload of a control frame.
pub const MAX_CONTROL_BYTES: usize = 16 << 20;
/// Workers in one job.
pub const MAX_WORKERS: u32 = 16_384;
/// Samples that a gradient can be the mean of: the most that weights of 32 bits count one by one.
pub const MAX_SAMPLES: u32 = 1 << 24;
/// Servers in one job.
pub const MAX_SERVERS: u32 = 1024;
/// Data cores of one server.
pub const MAX_CORES: u32 = 256;
/// Aggregators in one job.
pub const MAX_AGGREGATORS: u32 = 1024;

/// Levels of aggregators that stand above each other. More are taken for a circle.
pub const MAX_AGGREGATOR_LEVELS: u32 = 8;
/// Addresses of one data core.
pub const MAX_ADDRESSES: usize = 8;
/// Tables in one job.
pub const MAX_TABLES: usize = 1 << 16;
/// Layers in all packs of one job.
pub const MAX_LAYERS: usize = 1 << 16;
/// Elements in one table.
pub const MAX_TABLE_ELEMENTS: u64 = 1 << 36;
/// Dimensions of one table.
pub const MAX_DIMENSIONS: usize = 16;
/// Bytes in a table's, a layer's, a job's or a barrier's name, and in a glob on such names.
pub const MAX_NAME_BYTES: usize = 256;
/// Bytes in the text form of a component.
pub const MAX_POLICY_BYTES: usize = 4096;
/// Exceptions from a job's policies.
pub const MAX_OVERRIDES: usize = 4096;
/// The latest clock that is taken over from another process: there is room for any number of further ones.
pub const MAX_CLOCK: u64 = 1 << 60;
/// Rounds that a worker may push ahead of a synchronous table before it is refused.
pub const MAX_ROUNDS_AHEAD: u64 = 4;
/// Iterations that a worker may leave out between two pushes where no memory depends on it.
pub const MAX_CLOCK_SKIP: u64 = 1 << 16;
/// Versions of a stream that may be on their way to a receiver; it is sent no more before it says that it has some of them.
pub const MAX_VERSIONS_UNSEEN: u64 = 8;
/// Bytes of versions that may be on their way to a receiver, beyond the first two of them.
pub const MAX_BYTES_UNSEEN: usize = 64 << 20;
/// Versions of a chunk that a reader holds back: more than a sender has in its log, and sends before some of them are seen.
pub const MAX_VERSIONS_HELD: usize = 2 * MAX_VERSIONS_LOGGED;
/// Readers of one job.
pub const MAX_READERS: usize = 1024;
/// Times in a row that a reader fetches a version anew because its digest is another one, before it gives up.
pub const MAX_REPAIRS: u32 = 4;
/// How long a receiver of which something was lost waits for a stream to go on from what it has, before it asks for all of it.
pub const RESUBSCRIBE_AFTER: Duration = Duration::from_secs(1);
/// Chunks of a table of rows that is broadcast: a version lists those that changed, in one frame.
pub const MAX_CHUNKS_OF_ROWS: u64 = MAX_DATA_BYTES as u64 / 4;
/// Routes that a worker is told: for each shard one, where all tables are broadcast in the same way.
pub const MAX_ROUTES: usize = 1 << 20;
/// Workers that one passes streams on to, at most.
pub const MAX_CHILDREN: usize = 1024;
/// How long a worker waits for one that should pass streams on to it, before it asks the shard and tells the coordinator.
pub const RELAY_PATIENCE: Duration = Duration::from_secs(2);
/// How many times that long a stream may stand still of which a relay passes others on: they share a link.
pub const LOOKS_AT_BUSY_RELAYS: u32 = 8;
/// Of so many versions of a stream one comes with the digest of its values, which receivers compare with theirs.
pub const DIGEST_EVERY: u64 = 16;
/// Recent versions of a stream that a node keeps for receivers that have missed them.
pub const MAX_VERSIONS_LOGGED: usize = 64;
/// Bytes of recent versions that a node keeps, of all streams together, for receivers that have missed them.
pub const STREAM_LOG_BYTES: usize = 32 << 20;
/// Changes of a codec's threshold that a node reports.
pub const MAX_ROOM_CHANGES: usize = 8;
/// Causes of waiting time that a status lists; the others are added up.
pub const MAX_WAIT_CAUSES: usize = 64;
/// Those that a worker's report lists.
pub const MAX_WAIT_CAUSES_OF_WORKER: usize = 16;
/// Those that a worker tells apart.
pub const MAX_WAIT_CAUSES_KEPT: usize = 256;
/// Over how long a node's cost to others is judged for the log.
pub const STRAGGLER_WINDOW: Duration = Duration::from_secs(30);
/// Share of others' time that a node may cost them before the log names it.
pub const STRAGGLER_SHARE: f64 = 0.2;
/// A member that makes no progress for so long while others wait for it is named.
pub const STALL_NAMED: Duration = Duration::from_secs(10);
/// The shortest time after which a job may leave such a member behind: reports come every [`HEARTBEAT_EVERY`].
pub const MIN_PROGRESS_TIMEOUT: Duration = Duration::from_secs(3);
/// A round that is open for so long is reported with the workers that it lacks.
pub const LONG_ROUND: Duration = Duration::from_secs(2);
/// Workers that a round lacks, of those that a report lists.
pub const MAX_MISSING_REPORTED: usize = 64;
/// Pulls of a table that wait, of those that a report lists.
pub const MAX_WAITS_REPORTED: usize = 8;
/// Shards without an answer that a worker's report lists.
pub const MAX_UNANSWERED_REPORTED: usize = 64;
/// The log names such a node at most once in this time.
pub const STRAGGLER_LOG_EVERY: Duration = Duration::from_secs(60);
/// Barriers that a worker may wait at.
pub const MAX_BARRIERS: usize = 64;
/// Bytes in a sentence for people, such as a reason or what a worker waits for.
pub const MAX_REASON_BYTES: usize = 1024;
/// Pulls of one table that a worker may have waiting on one shard.
pub const MAX_PENDING_PULLS: usize = 256;
/// Pulls that wait for a worker to evaluate its conditions. It has no answer to more.
pub const MAX_QUESTIONS: usize = 4096;
/// Workers that all of these questions together may tell of.
pub const MAX_QUESTION_WORKERS: usize = 1 << 20;
/// Questions about one table that a shard asks before it has an answer to the first.
pub const MAX_QUESTIONS_OPEN: u64 = 256;
/// How long a question may wait, whatever the shard says.
pub const LONGEST_QUESTION: Duration = Duration::from_secs(3600);
/// Rows that all of these pulls together may name.
pub const MAX_PENDING_ROWS: usize = 1 << 24;
/// Characters in a condition's expression.
pub const MAX_EXPRESSION_BYTES: usize = 1024;
/// Nesting in a condition's expression.
pub const MAX_EXPRESSION_DEPTH: u32 = 32;
/// Frames that may wait for one slow connection before its owner stops reading from it.
pub const MAX_WAITING_FRAMES: usize = 1 << 16;
/// Bytes of memory that may wait in frames made for one slow connection before its owner stops reading from it, and
/// in answers before more is asked of the role that makes them.
pub const MAX_BACKLOG_BYTES: usize = 64 << 20;
/// Connections to one listener that have not said hello.
pub const MAX_HANDSHAKES: usize = 1024;
/// A connection without a hello is kept for this time, unless there are [`MAX_HANDSHAKES`] of them.
pub const HELLO_GRACE: Duration = Duration::from_secs(1);
/// The largest payload of the first frame on a connection.
pub const MAX_HELLO_BYTES: usize = 4096;
/// Commands (`paramill status`, `paramill set`) that may be connected to a coordinator. A further one takes the place of the
/// one that has been silent longest.
pub const MAX_COMMANDS: usize = 32;
/// The largest payload of a frame from a command: a glob, the text of a policy or several short ones, and
/// the names and numbers beside them.
pub const MAX_COMMAND_BYTES: usize = MAX_NAME_BYTES + MAX_POLICY_BYTES + 64;
/// From this part of a process's file descriptors on, connections of strangers are a crowd: those that have not said who they
/// are, and commands. A newcomer then takes the place of one that has not said hello within [`HELLO_GRACE`].
pub const CROWD_SHARE: usize = 4;
/// From this part on a newcomer that finds no such place is closed at once. Only a loop with few strangers of its own still
/// takes it: its equal share of a crowd. So strangers hold three quarters at the very most, and members find the rest.
pub const STRANGERS_SHARE: usize = 2;
/// Segments of memory that a peer may share with a core.
pub const MAX_SEGMENTS: usize = 64;
/// Bytes in all segments of a peer: of the address space, and of memory if the peer uses all of it.
pub const MAX_SHARED_BYTES: u64 = 1 << 40;
/// Payloads up to this length go through the socket also where memory is shared.
pub const MAX_INLINE_BYTES: usize = 1024;

/// Clocks that a worker may go on under partial pulling while a server has not acknowledged their pushes.
pub const MAX_CLOCKS_UNACKNOWLEDGED: usize = 8;

/// Pushes of one table that an aggregator holds for a worker before it refuses more.
pub const MAX_HELD_PUSHES: usize = 16;
/// Requests, beside one of each table, that an aggregator passes on for a worker at a time.
pub const MAX_PASSED_REQUESTS: usize = 4096;
/// Pushes of one table and worker of which a shard remembers that chunks are in sums, while they are not complete.
pub const MAX_LOOSE_PUSHES: usize = 4 * MAX_HELD_PUSHES;
/// Sums that a shard remembers to have refused from one aggregator.
pub const MAX_REFUSED_SUMS: usize = 1024;
/// How long an aggregator holds a complete push for those of its other workers, unless it is told otherwise.
pub const HOLD: Duration = Duration::from_millis(5);
/// The same where a round waits for every worker anyway, so that no worker gains from an earlier push. It counts
/// from the last gradient that came in, since a slow link may take longer for all of them.
pub const ROUND_HOLD: Duration = Duration::from_secs(1);
/// The longest time that an aggregator may be told to hold pushes.
pub const MAX_HOLD: Duration = Duration::from_secs(10);

/// How often a node reports to the coordinator.
pub const HEARTBEAT_EVERY: Duration = Duration::from_millis(500);
/// A worker that is silent for this long is declared dead.
pub const WORKER_TIMEOUT: Duration = Duration::from_secs(10);
/// A worker whose connection broke has this long to come back before it is declared dead.
pub const RECONNECT_GRACE: Duration = Duration::from_secs(3);
/// A node whose own timeout comes so much too late stood still itself: that time does not count as others' silence.
pub const STANDSTILL: Duration = Duration::from_secs(1);
/// A node that stood still gives no peer up for this long, so that reports which came meanwhile are read first.
pub const WAKE_GRACE: Duration = Duration::from_secs(1);
/// A shard's report that is so old is no news any more, and is quoted with its age.
pub const OLD_REPORT: Duration = Duration::from_secs(3);
/// How long the coordinator waits for the shards' reports before it answers a status query without them.
pub const STATUS_DEADLINE: Duration = Duration::from_secs(1);
/// How long a command that changes policies waits until everybody has followed; it is told who has not then. Commands wait
/// longer for an answer.
pub const SETTLE_DEADLINE: Duration = Duration::from_secs(5);
/// A command that says nothing for this long is hung up on.
pub const COMMAND_IDLE: Duration = Duration::from_secs(10);
/// What precedes the payload of an input in a log for copies: a time, the connection that it came from, its header.
pub const ENTRY_PREFIX_BYTES: usize = 128;
/// Bytes of inputs that may be on their way to a copy before no more are applied until it has them.
pub const MAX_LOG_BYTES: usize = 64 << 20;
/// How long inputs may wait for a copy before the coordinator is told that it is out of reach.
pub const COPY_PATIENCE: Duration = Duration::from_secs(2);
/// A shard or a copy whose connection to the coordinator broke has this long to come back before another takes its place.
pub const COPY_GRACE: Duration = Duration::from_millis(700);
/// A shard that moves rests for so long at most while its image is sent. Then it is served again, and what happens to it follows the image.
pub const MOVE_REST: Duration = Duration::from_secs(10);
/// A shard that is to move serves on for so long while it has no sums of gradients: until the next round closes, if one opens.
pub const MOVE_WAIT: Duration = Duration::from_secs(3);
/// The same while it has sums, or answers on their way: a round may take long where links are slow, and would have to be sent again.
pub const MOVE_PATIENCE: Duration = Duration::from_secs(30);
/// How long the traffic of servers is counted before it is compared. A server that has too much of it in several such windows is overloaded.
pub const LOAD_WINDOW: Duration = Duration::from_secs(10);
/// How long after its own restart a coordinator waits for shards before it counts them as lost.
pub const SHARDS_RETURN: Duration = Duration::from_secs(3);
/// A shard that has a copy and was not heard for so long is served by the copy from then on.
pub const FAILOVER_SILENCE: Duration = Duration::from_secs(8);
/// How long a node tries to reach another before it gives up and names it.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(30);
/// How long members of a job whose coordinator can be started anew wait for it, unless its owner says otherwise.
pub const COORDINATOR_GRACE: Duration = Duration::from_secs(600);
/// The longest that an owner may say.
pub const MAX_COORDINATOR_GRACE: Duration = Duration::from_secs(30 * 24 * 3600);
/// How long a coordinator that was started anew waits for members that it remembers, beyond the usual, and takes no newcomers: an attempt
/// to reach it may have begun before, and there is a pause after that.
pub const RETURN_GRACE: Duration = Duration::from_secs(6);
/// How long each step of an attempt to connect may take: resolving a name, connecting, the peer's answer to the hello.
pub const ATTEMPT_DEADLINE: Duration = Duration::from_secs(5);
/// The first pause before a connection is tried again; it doubles up to [`RECONNECT_MAX`].
pub const RECONNECT_MIN: Duration = Duration::from_millis(20);
/// The longest pause before a connection is tried again.
pub const RECONNECT_MAX: Duration = Duration::from_secs(1);
