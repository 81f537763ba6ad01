//! A worker's membership in a job.

use super::error::ClientError;
use super::handle::Handle;
use super::options::JobOptions;
use super::shared::{Cell, Shared, lock};
use crate::clock;
use crate::event_loop::{EventLoop, FIRST_LANE, Injection, Setup, Strangers};
use crate::exhaustion;
use crate::transport::memory::Mailbox;
use crate::transport::options::SocketOptions;
use crate::transport::shm::{self, SharedAllocator};
use crate::transport::tcp;
use paramill_core::address::Addresses;
use paramill_core::codec::Factors;
use paramill_core::lease::Lease;
use paramill_core::status::{Status, WorkerReport};
use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, TableId, WorkerId};
use paramill_core::worker::{Gradient, PullOptions, Ticket, Worker, WorkerConfig, WorkerError};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A worker's membership in a job.
///
/// [`Job::finish`] leaves in good order. A job that is dropped without it has died, as far as the others can tell.
#[derive(Debug)]
pub struct Job {
    pub(super) shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<Result<(), String>>>>,
    timeout: Duration,
    start: Mutex<Option<Handle>>,
    /// Updates whose end nobody has seen yet, oldest first.
    updates: Mutex<BTreeMap<TableId, Vec<Handle>>>,
}

/// Numbers the workers of this process.
static NEXT_WORKER: AtomicU64 = AtomicU64::new(0);

impl Job {
    /// Begins to join: connects in the background. Create tables next, then call [`Job::start`].
    pub fn init(options: JobOptions) -> Result<Job, ClientError> {
        Ok(Job::begin(options).map_err(exhaustion::explain)?)
    }

    fn begin(options: JobOptions) -> io::Result<Job> {
        let loops = options.spread()?;
        let mailboxes = (0..loops.count()).map(|_| Mailbox::new()).collect::<io::Result<Vec<_>>>()?;
        let config = WorkerConfig {
            job: options.url.job.clone(),
            rank: options.rank,
            coordinator: options.url.address.clone(),
            aggregator: options.aggregator.as_deref().map(addresses),
            number: NEXT_WORKER.fetch_add(1, Ordering::Relaxed),
        };
        let memory = SharedAllocator::new();
        let mut worker = Worker::new(clock::now(), config, options.registry.clone()).with_loops(loops);
        if let Some(host) = shm::host_prefix().filter(|_| options.transport.allows(true)) {
            worker = worker.with_shared_memory(host, Arc::new(memory.clone()));
        }
        let shared = Arc::new(Shared::new(worker, mailboxes));
        let sockets = SocketOptions::new(options.congestion.as_deref())?;
        let strangers = Strangers::new();
        let setup = |mailbox: &Arc<Mailbox>| Setup {
            listeners: Vec::new(),
            resolve: tcp::resolve,
            sockets: sockets.clone(),
            transport: options.transport,
            memory: memory.clone(),
            hub: options.memory.clone().map(|hub| (hub, None)),
            mailbox: mailbox.clone(),
            stop: shared.stop_flag().clone(),
            strangers: strangers.clone(),
            injection: Injection { plan: options.faults.clone(), seed: options.seed },
            log: options.log,
        };
        let job = Job {
            shared: shared.clone(),
            threads: Mutex::default(),
            timeout: options.timeout,
            start: Mutex::default(),
            updates: Mutex::default(),
        };
        // If a thread cannot be started, those before it end with the job.
        for (lane, mailbox) in shared.mailboxes().iter().enumerate() {
            let event_loop = EventLoop::new(Cell::new(&shared, lane), setup(mailbox))?;
            let name = match lane {
                FIRST_LANE => "paramill worker".to_owned(),
                other => format!("paramill worker {other}"),
            };
            let thread = std::thread::Builder::new().name(name).spawn(move || event_loop.run())?;
            lock(&job.threads).push(thread);
        }
        Ok(job)
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
        let mut state = self.shared.lock();
        state.worker.clock();
        self.shared.let_go(state);
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

    pub(super) fn act(
        &self,
        ask: impl FnOnce(&mut Worker) -> Result<Ticket, WorkerError>,
    ) -> Result<Handle, ClientError> {
        self.shared.act(ask).map(|ticket| Handle { shared: self.shared.clone(), ticket })
    }

    fn end(&self) {
        self.shared.stop();
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
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

/// Addresses with commas between them.
fn addresses(text: &str) -> Addresses {
    text.split(',').map(|address| address.trim().to_owned()).collect()
}
