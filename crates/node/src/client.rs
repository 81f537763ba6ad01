//! The worker's library: join a job, create tables, push, pull, keep the clock.
//!
//! ```no_run
//! use paramill_node::client::{Job, JobOptions, TableSpec};
//!
//! let job = Job::init(JobOptions::at("paramill://localhost:7070/run42".parse()?))?;
//! let weights = job.create_table(TableSpec::dense("weights", [1000]), vec![0.0; 1000])?;
//! job.start()?;
//! for _ in 0..100 {
//!     let gradient = job.read(weights, |values| values.iter().map(|w| w - 1.0).collect::<Vec<f32>>())?;
//!     job.update(weights, &gradient)?; // leaves at once; parameters follow when the condition allows
//!     job.clock();
//!     job.sync(weights)?; // waits for them
//! }
//! job.finish()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod slab;

use crate::clock;
use crate::env_vars;
use crate::event_loop::{EventLoop, Injection, RoleCell, Setup, Strangers};
use crate::exhaustion;
use crate::identity::Identity;
use crate::stderr;
use crate::transport::memory::{Hub, Mailbox, SCHEME};
use crate::transport::options::SocketOptions;
use crate::transport::shm::{self, SharedAllocator};
use crate::transport::{Transport, tcp};
use crate::url::JobUrl;
use paramill_core::address::Addresses;
use paramill_core::codec::Factors;
use paramill_core::fault::FaultPlan;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::standstill;
use paramill_core::status::{Status, WorkerReport};
use paramill_core::types::Clock;
use paramill_core::worker::{PullOptions, Ticket, Worker, WorkerConfig};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use paramill_core::lease::Lease;
pub use paramill_core::policy::{Axis, NonFinite, Order, Policies, PolicyOverride, Reduce};
pub use paramill_core::store::Buffer;
pub use paramill_core::table::TableSpec;
pub use paramill_core::types::{TableId, WorkerId};
pub use paramill_core::worker::{Gradient, Prepared, WorkerError};
pub use slab::{Exchange, Slab};

/// How long calls wait unless told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a timed-out wait asks the servers for their reason.
const REASON_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a call of the client failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The worker's own or a server's refusal.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// Nothing came within the time. What was asked for may still happen.
    #[error("timed out after {seconds:.1} s waiting for {what}")]
    Timeout {
        /// How long was waited.
        seconds: f64,
        /// For what: who has not answered, and what would release it.
        what: String,
    },
    /// An update of the table that was sent earlier failed, and nobody had waited for it. The update at hand was not
    /// sent: call again to send it.
    #[error("this update was not sent, because an earlier one of the same table failed: {0}")]
    EarlierUpdate(Box<ClientError>),
    /// The worker's thread is gone.
    #[error("this worker has ended: {0}")]
    Ended(String),
    /// The environment does not say where to join.
    #[error("{0}")]
    Environment(String),
    /// The operating system refused something.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// How to join a job.
#[derive(Debug, Clone)]
pub struct JobOptions {
    /// Where the job is.
    pub url: JobUrl,
    /// In memory instead of over TCP.
    pub memory: Option<Hub>,
    /// How servers may be reached.
    pub transport: Transport,
    /// The worker's rank; the coordinator chooses one otherwise.
    pub rank: Option<WorkerId>,
    /// The address of the aggregator to go through to the servers, if this worker is to go through one. Several, with
    /// commas between them, are tried in order, those of this host first.
    pub aggregator: Option<String>,
    /// How long calls wait.
    pub timeout: Duration,
    /// TCP's congestion control, by name. `None`: what is best within a host, the system's default beyond it.
    pub congestion: Option<String>,
    /// The components that can be named.
    pub registry: Arc<Registry>,
    /// Faults to try.
    pub faults: FaultPlan,
    /// Decides faults with a probability.
    pub seed: u64,
    /// Where log lines go.
    pub log: fn(&str),
}

impl JobOptions {
    /// Joins the job at `url` with the defaults of everything else.
    pub fn at(url: JobUrl) -> JobOptions {
        JobOptions {
            url,
            memory: None,
            transport: Transport::default(),
            rank: None,
            aggregator: None,
            timeout: DEFAULT_TIMEOUT,
            congestion: None,
            registry: Arc::new(Registry::builtin()),
            faults: FaultPlan::default(),
            seed: 0,
            log: stderr::log,
        }
    }

    /// Joins servers of this process.
    pub fn in_memory(hub: &Hub, job: &str) -> JobOptions {
        let url = JobUrl { address: format!("{SCHEME}coordinator"), job: job.to_owned() };
        JobOptions { memory: Some(hub.clone()), ..JobOptions::at(url) }
    }

    /// Joins the job that the environment names, under the rank that its launcher gave.
    pub fn from_environment() -> Result<JobOptions, ClientError> {
        let url = std::env::var(env_vars::URL).map_err(|_| {
            ClientError::Environment(format!(
                "{} is not set; start this program with `paramill launch`",
                env_vars::URL
            ))
        })?;
        let url = url.parse().map_err(|error| problem(env_vars::URL, &format!("{error}")))?;
        JobOptions::at_with_environment(url)
    }

    /// Joins the job at `url`, with all else as the environment says.
    pub fn at_with_environment(url: JobUrl) -> Result<JobOptions, ClientError> {
        let identity = Identity::from_environment().map_err(ClientError::Environment)?;
        let rank = identity.map(|identity| WorkerId(identity.rank));
        let congestion = std::env::var(env_vars::CONGESTION).ok();
        let aggregator = std::env::var(env_vars::AGGREGATOR).ok();
        let transport = match std::env::var(env_vars::TRANSPORT) {
            Ok(text) => text.parse().map_err(|error: String| problem(env_vars::TRANSPORT, &error))?,
            Err(_) => Transport::default(),
        };
        Ok(JobOptions { rank, aggregator, congestion, transport, ..JobOptions::at(url) })
    }
}

fn problem(name: &str, why: &str) -> ClientError {
    ClientError::Environment(format!("{name} {why}"))
}

/// Addresses with commas between them.
fn addresses(text: &str) -> Addresses {
    text.split(',').map(|address| address.trim().to_owned()).collect()
}

/// A worker's membership in a job.
///
/// [`Job::finish`] leaves in good order. A job that is dropped without it has died, as far as the others can tell.
#[derive(Debug)]
pub struct Job {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<Result<(), String>>>>,
    stop: Arc<AtomicBool>,
    timeout: Duration,
    start: Mutex<Option<Handle>>,
    /// Updates whose end nobody has seen yet, oldest first.
    updates: Mutex<BTreeMap<TableId, Vec<Handle>>>,
}

/// What the application's threads and the event loop share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    mailbox: Arc<Mailbox>,
}

#[derive(Debug)]
struct State {
    worker: Worker,
    ended: Option<String>,
    /// Tickets that somebody waits for, each by one thread: only for these is anybody woken.
    waited: Vec<Ticket>,
}

impl State {
    fn is_due(&self, ticket: Ticket) -> bool {
        self.ended.is_some() || self.worker.outcome(ticket).is_some()
    }
}

/// A push or pull under way. Dropping it does not undo anything; its end is then not heard of.
#[derive(Debug)]
#[must_use = "a handle tells whether the push or pull succeeded"]
pub struct Handle {
    shared: Arc<Shared>,
    ticket: Ticket,
}

/// Numbers the workers of this process.
static NEXT_WORKER: AtomicU64 = AtomicU64::new(0);

impl Job {
    /// Begins to join: connects in the background. Create tables next, then call [`Job::start`].
    pub fn init(options: JobOptions) -> Result<Job, ClientError> {
        Ok(Job::begin(options).map_err(exhaustion::explain)?)
    }

    fn begin(options: JobOptions) -> io::Result<Job> {
        let mailbox = Mailbox::new()?;
        let config = WorkerConfig {
            job: options.url.job.clone(),
            rank: options.rank,
            coordinator: options.url.address.clone(),
            aggregator: options.aggregator.as_deref().map(addresses),
            number: NEXT_WORKER.fetch_add(1, Ordering::Relaxed),
        };
        let memory = SharedAllocator::new();
        let mut worker = Worker::new(clock::now(), config, options.registry.clone());
        if let Some(host) = shm::host_prefix().filter(|_| options.transport.allows(true)) {
            worker = worker.with_shared_memory(host, Arc::new(memory.clone()));
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State { worker, ended: None, waited: Vec::new() }),
            changed: Condvar::new(),
            mailbox: mailbox.clone(),
        });
        let stop = Arc::new(AtomicBool::new(false));
        let setup = Setup {
            listeners: Vec::new(),
            resolve: tcp::resolve,
            sockets: SocketOptions::new(options.congestion.as_deref())?,
            transport: options.transport,
            memory,
            hub: options.memory.clone().map(|hub| (hub, None)),
            mailbox,
            stop: stop.clone(),
            strangers: Strangers::new(),
            injection: Injection { plan: options.faults, seed: options.seed },
            log: options.log,
        };
        let event_loop = EventLoop::new(Cell(shared.clone()), setup)?;
        let thread =
            std::thread::Builder::new().name("paramill worker".into()).spawn(move || event_loop.run())?;
        Ok(Job {
            shared,
            thread: Mutex::new(Some(thread)),
            stop,
            timeout: options.timeout,
            start: Mutex::default(),
            updates: Mutex::default(),
        })
    }

    /// Creates a table with its initial values; those of worker 0 count.
    pub fn create_table(&self, spec: TableSpec, initial: Vec<f32>) -> Result<TableId, ClientError> {
        Ok(self.shared.lock().worker.declare(spec, initial)?)
    }

    /// Waits until all workers and servers are here and the initial values are exchanged. After a time-out it may be
    /// called again, to wait on.
    pub fn start(&self) -> Result<(), ClientError> {
        self.start_within(self.timeout)
    }

    /// Like [`Job::start`], with a time of its own.
    pub fn start_within(&self, timeout: Duration) -> Result<(), ClientError> {
        let mut start = lock(&self.start);
        self.starting(&mut start)?.wait(timeout)
    }

    /// Waits a while without an explanation: whether [`Job::start`] would then return at once.
    pub fn start_is_due_within(&self, timeout: Duration) -> Result<bool, ClientError> {
        let mut start = lock(&self.start);
        Ok(self.starting(&mut start)?.is_due_within(timeout))
    }

    /// The start that is under way, begun if it is not.
    fn starting<'a>(&self, start: &'a mut Option<Handle>) -> Result<&'a Handle, ClientError> {
        Ok(match start {
            Some(handle) => handle,
            None => start.insert(self.act(|worker| worker.start(clock::now()))?),
        })
    }

    /// Sends a gradient of the current clock and asks for the parameters that follow it. [`Job::sync`] waits for them.
    ///
    /// Whatever the error, this gradient was not sent, and other workers may wait for it. [`ClientError::EarlierUpdate`]
    /// says that nothing is wrong with it: an update that was sent before failed, and the next call sends this one.
    pub fn update(&self, table: TableId, gradient: &[f32]) -> Result<(), ClientError> {
        self.update_with(table, Gradient::Dense(gradient))
    }

    /// [`Job::update`] with a gradient that is a product of thin matrices, row by row. They travel instead of it where the
    /// table's codec is `factors` and they are shorter: a fully connected layer's are its errors and its inputs.
    pub fn update_factors(
        &self,
        table: TableId,
        gradient: &[f32],
        factors: Factors<'_>,
    ) -> Result<(), ClientError> {
        self.update_with(table, Gradient::Product { values: gradient, factors })
    }

    fn update_with(&self, table: TableId, gradient: Gradient<'_>) -> Result<(), ClientError> {
        let mut updates = lock(&self.updates);
        let pending = updates.entry(table).or_default();
        while let Some(handle) = pending.first()
            && handle.is_due()
        {
            let handle = pending.remove(0);
            handle.wait(Duration::ZERO).map_err(|error| ClientError::EarlierUpdate(Box::new(error)))?;
        }
        pending.push(self.act(|worker| worker.push(clock::now(), table, gradient, true))?);
        Ok(())
    }

    /// Ends the iteration.
    pub fn clock(&self) {
        self.shared.lock().worker.clock();
        self.shared.mailbox.wake_sleeper();
    }

    /// Waits until the table's parameters may be used for the next iteration. After a time-out it may be called again,
    /// to wait on. The error of an update is given once; those after it are waited for by the next call.
    pub fn sync(&self, table: TableId) -> Result<(), ClientError> {
        let mut pending = lock(&self.updates).remove(&table).unwrap_or_default();
        while let Some(handle) = pending.first() {
            let outcome = handle.wait(self.timeout);
            if !matches!(outcome, Err(ClientError::Timeout { .. })) {
                drop(pending.remove(0));
            }
            if outcome.is_err() {
                lock(&self.updates).entry(table).or_default().splice(0..0, pending);
                return outcome;
            }
        }
        Ok(())
    }

    /// Sends a gradient; the handle is due when all servers have it.
    pub fn push(&self, table: TableId, gradient: Gradient<'_>) -> Result<Handle, ClientError> {
        self.act(|worker| worker.push(clock::now(), table, gradient, false))
    }

    /// Asks for a table's parameters; read them with [`Job::read`] when the handle is due.
    pub fn pull(&self, table: TableId) -> Result<Handle, ClientError> {
        self.act(|worker| worker.pull(clock::now(), table, PullOptions::default()))
    }

    /// Asks for single rows of a sparse table, strictly ascending; the handle brings them.
    pub fn pull_rows(&self, table: TableId, rows: &[u32]) -> Result<Handle, ClientError> {
        self.act(|worker| worker.pull(clock::now(), table, PullOptions { rows: Some(rows), now: false }))
    }

    /// Asks for everything that is there now, whatever the consistency model; for evaluation.
    pub fn pull_now(&self, table: TableId) -> Result<Handle, ClientError> {
        self.act(|worker| worker.pull(clock::now(), table, PullOptions { rows: None, now: true }))
    }

    /// Sends a gradient and asks for the parameters that follow it, in one round.
    pub fn push_pull(&self, table: TableId, gradient: &[f32]) -> Result<Handle, ClientError> {
        self.act(|worker| worker.push(clock::now(), table, Gradient::Dense(gradient), true))
    }

    /// The codec that a table's gradients travel by; empty without one.
    pub fn codec(&self, table: TableId) -> Result<String, ClientError> {
        Ok(self.shared.lock().worker.codec(table)?)
    }

    /// Where the chunks of a table begin, ascending: each is encoded by itself.
    pub fn chunk_starts(&self, table: TableId) -> Result<Vec<u64>, ClientError> {
        Ok(self.shared.lock().worker.chunk_starts(table)?)
    }

    /// Calls `look` with a dense table's parameters as last pulled. They do not change while it looks.
    pub fn read<T>(&self, table: TableId, look: impl FnOnce(&[f32]) -> T) -> Result<T, ClientError> {
        // The lock is let go first: computing may take long, and the worker must go on meanwhile.
        let values = self.values(table)?;
        Ok(look(values.as_slice()))
    }

    /// A dense table's parameters as last pulled. They do not change, and their memory is not used again, as long as they are
    /// held.
    pub fn values(&self, table: TableId) -> Result<Lease, ClientError> {
        Ok(self.shared.lock().worker.shared_values(table)?)
    }

    /// Waits for all live workers to come to the same name.
    pub fn barrier(&self, name: &str, timeout: Duration) -> Result<(), ClientError> {
        self.arrive(name)?.wait(timeout)
    }

    /// Says that this worker is at a barrier; the handle is due when all live workers are.
    pub fn arrive(&self, name: &str) -> Result<Handle, ClientError> {
        self.act(|worker| worker.barrier(clock::now(), name))
    }

    /// How the job stands.
    pub fn status(&self) -> Result<Status, ClientError> {
        self.shared.status(self.timeout)
    }

    /// This worker's rank, once it is known.
    pub fn rank(&self) -> Option<WorkerId> {
        self.shared.lock().worker.id()
    }

    /// How many workers the job has, once it started.
    pub fn workers(&self) -> Option<usize> {
        self.shared.lock().worker.workers()
    }

    /// Iterations completed.
    pub fn current_clock(&self) -> Clock {
        self.shared.lock().worker.current_clock()
    }

    /// Bytes moved so far.
    pub fn report(&self) -> WorkerReport {
        self.shared.lock().worker.report().clone()
    }

    /// Leaves the job in good order.
    pub fn finish(self) -> Result<(), ClientError> {
        self.leave()
    }

    /// Like [`Job::finish`], for a job that several parts of a program hold. It cannot be used any more.
    pub fn leave(&self) -> Result<(), ClientError> {
        let handle = self.act(|worker| Ok(worker.leave(clock::now())))?;
        let left = handle.wait(self.timeout);
        self.end();
        left
    }

    /// Ends without a word, and all waits with it: the others will find that this worker has died.
    pub fn abandon(&self) {
        self.end();
    }

    fn act(
        &self,
        ask: impl FnOnce(&mut Worker) -> Result<Ticket, WorkerError>,
    ) -> Result<Handle, ClientError> {
        self.shared.act(ask).map(|ticket| Handle { shared: self.shared.clone(), ticket })
    }

    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.shared.mailbox.wake();
        if let Some(thread) = lock(&self.thread).take() {
            // Its error, if any, was given to whoever waited.
            let _ = thread.join();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.end();
    }
}

impl Handle {
    /// Waits until it is due. The error names who has not answered and what would release it. After a time-out it may
    /// be called again, to wait on.
    pub fn wait(&self, timeout: Duration) -> Result<(), ClientError> {
        self.shared.wait(self.ticket, timeout)
    }

    /// Like [`Handle::wait`], for a pull of rows: the rows one after the other.
    pub fn wait_rows(self, timeout: Duration) -> Result<Vec<f32>, ClientError> {
        self.wait(timeout)?;
        Ok(self.shared.lock().worker.redeem(self.ticket))
    }

    /// Whether [`Handle::wait`] would return at once.
    pub fn is_due(&self) -> bool {
        self.shared.lock().is_due(self.ticket)
    }

    /// Waits a while without an explanation, for those who have other things to look after: whether [`Handle::wait`]
    /// would return at once.
    pub fn is_due_within(&self, timeout: Duration) -> bool {
        self.shared.is_due_within(self.ticket, timeout)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock().worker.redeem(self.ticket);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn act(
        &self,
        ask: impl FnOnce(&mut Worker) -> Result<Ticket, WorkerError>,
    ) -> Result<Ticket, ClientError> {
        let mut state = self.lock();
        if let Some(why) = &state.ended {
            return Err(ClientError::Ended(why.clone()));
        }
        let ticket = ask(&mut state.worker)?;
        drop(state);
        self.mailbox.wake_sleeper();
        Ok(ticket)
    }

    fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<(), ClientError> {
        self.while_waited_for(ticket, || self.wait_for(ticket, timeout))
    }

    fn is_due_within(&self, ticket: Ticket, timeout: Duration) -> bool {
        self.while_waited_for(ticket, || {
            let state = self.changed.wait_timeout_while(self.lock(), timeout, |state| !state.is_due(ticket));
            state.unwrap_or_else(PoisonError::into_inner).0.is_due(ticket)
        })
    }

    /// The event loop wakes those who wait for tickets that it finds in this list.
    fn while_waited_for<T>(&self, ticket: Ticket, wait: impl FnOnce() -> T) -> T {
        self.lock().waited.push(ticket);
        let outcome = wait();
        let waited = &mut self.lock().waited;
        if let Some(index) = waited.iter().position(|other| *other == ticket) {
            waited.swap_remove(index);
        }
        outcome
    }

    fn wait_for(&self, ticket: Ticket, timeout: Duration) -> Result<(), ClientError> {
        let mut began = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.worker.outcome(ticket) {
                return Ok(outcome?);
            }
            if let Some(why) = &state.ended {
                return Err(ClientError::Ended(why.clone()));
            }
            let Some(left) = timeout.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) else {
                let what = state.worker.explain(clock::now(), ticket);
                drop(state);
                let what = format!("{what}{}", self.servers_reason());
                return Err(ClientError::Timeout { seconds: began.elapsed().as_secs_f64(), what });
            };
            let (slice, asleep) = (left.min(limits::HEARTBEAT_EVERY), Instant::now());
            state = self.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner).0;
            // Time in which this process stood still is not one in which nothing came.
            began += standstill::lost_time(slice, asleep.elapsed());
        }
    }

    fn status(self: &Arc<Shared>, timeout: Duration) -> Result<Status, ClientError> {
        let ticket = self.act(|worker| worker.query_status(clock::now()))?;
        let handle = Handle { shared: self.clone(), ticket };
        handle.wait(timeout)?;
        let status = self.lock().worker.take_status(ticket);
        status.ok_or_else(|| ClientError::Ended("the status was taken already".into()))
    }

    /// What the servers say this worker waits for; empty when they say nothing.
    fn servers_reason(&self) -> String {
        let Some(me) = self.lock().worker.id() else { return String::new() };
        let Ok(ticket) = self.act(|worker| worker.query_status(clock::now())) else { return String::new() };
        let began = Instant::now();
        let mut state = self.lock();
        let is_open = |state: &State| !state.is_due(ticket);
        while is_open(&state) && began.elapsed() < REASON_TIMEOUT {
            let short = Duration::from_millis(50);
            state = self.changed.wait_timeout(state, short).unwrap_or_else(PoisonError::into_inner).0;
        }
        let status = state.worker.take_status(ticket);
        state.worker.redeem(ticket);
        let Some(status) = status else { return String::new() };
        let reason = status.shards.iter().find_map(|shard| {
            shard.tables.iter().find_map(|table| {
                let waiting = table.waiting.iter().find(|waiting| waiting.worker == me)?;
                Some(format!("; {} says of table `{}`: {}", shard.shard, table.name, waiting.reason))
            })
        });
        reason.unwrap_or_else(|| format!("; the job is {}", status.phase))
    }
}

/// The event loop that panicked with the lock says so when it ends; until then there is nothing to find out.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The worker as its event loop sees it.
struct Cell(Arc<Shared>);

impl RoleCell for Cell {
    type Role = Worker;

    fn with<T>(&mut self, visit: impl FnOnce(&mut Worker) -> T) -> T {
        visit(&mut self.0.lock().worker)
    }

    fn progressed(&self) {
        let state = self.0.lock();
        if state.waited.iter().any(|ticket| state.worker.outcome(*ticket).is_some()) {
            self.0.changed.notify_all();
        }
    }

    fn ended(&self, error: Option<&str>) {
        self.0.lock().ended = Some(error.unwrap_or("it was closed").to_owned());
        self.0.changed.notify_all();
    }
}
