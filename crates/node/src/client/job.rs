//! A worker's membership in a job.

use super::error::ClientError;
use super::handle::Handle;
use super::hands;
use super::options::JobOptions;
use super::shared::{Cell, Shared, State, lock};
use super::table::Table;
use crate::clock;
use crate::event_loop::{EventLoop, Setup, Strangers};
use crate::exhaustion;
use crate::transport::memory::Mailbox;
use crate::transport::options::SocketOptions;
use crate::transport::shm::{self, SharedAllocator};
use crate::transport::tcp;
use crate::url::JobUrl;
use paramill_core::address::Addresses;
use paramill_core::policy::JobPolicies;
use paramill_core::status::{Status, WorkerReport};
use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, WorkerId};
use paramill_core::worker::{Ticket, Worker, WorkerConfig, WorkerError};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A worker's membership in a job.
///
/// [`Job::close`] leaves in good order. A job that is dropped without it has died, as far as the others can tell.
#[derive(Debug)]
pub struct Job {
    pub(super) shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<Result<(), String>>>>,
    stop: Arc<AtomicBool>,
    url: JobUrl,
    start: Mutex<Option<Handle>>,
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
            timeout: options.timeout,
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
            injection: options.injection,
            log: options.log,
        };
        let event_loop = EventLoop::new(Cell(shared.clone()), setup)?;
        let thread =
            std::thread::Builder::new().name("paramill worker".into()).spawn(move || event_loop.run())?;
        hands::job_begins();
        Ok(Job { shared, thread: Mutex::new(Some(thread)), stop, url: options.url, start: Mutex::default() })
    }

    /// The policies that the job begins with: small tensors for which they are the same may share a table
    /// ([`Pack::divide`](paramill_core::table::Pack::divide)). May be asked before [`Job::start`].
    pub fn policies(&self) -> Result<JobPolicies, ClientError> {
        let ticket = self.shared.act(|worker| worker.query_policies(clock::now()))?;
        let handle = Handle::bringing(self.shared.clone(), ticket, |shared, ticket| {
            let policies = shared.lock().worker.take_policies(ticket);
            policies.ok_or_else(|| WorkerError::Order("these policies were taken already".into()).into())
        });
        handle.wait()
    }

    /// Creates a table with its initial values; those of worker 0 count. All workers create the same, in the same order.
    pub fn table(&self, spec: TableSpec, initial: Vec<f32>) -> Result<Table, ClientError> {
        let id = self.shared.lock().worker.declare(spec.clone(), initial)?;
        Ok(Table::new(self.shared.clone(), id, spec))
    }

    /// Waits until all workers and servers are here and the initial values are exchanged. After a time-out it may be
    /// called again, to wait on.
    pub fn start(&self) -> Result<(), ClientError> {
        self.start_within(self.shared.timeout)
    }

    /// [`Job::start`] with a time-out of its own.
    pub fn start_within(&self, timeout: Duration) -> Result<(), ClientError> {
        let mut start = lock(&self.start);
        self.starting(&mut start)?.wait_within(timeout)
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

    /// Ends the iteration.
    pub fn clock(&self) {
        self.shared.lock().worker.clock();
        self.shared.mailbox.wake_sleeper();
    }

    /// Waits for all live workers to come to the same name.
    pub fn barrier(&self, name: &str) -> Result<(), ClientError> {
        self.barrier_within(name, self.shared.timeout)
    }

    /// [`Job::barrier`] with a time-out of its own.
    pub fn barrier_within(&self, name: &str, timeout: Duration) -> Result<(), ClientError> {
        self.arrive(name)?.wait_within(timeout)
    }

    /// Says that this worker is at a barrier; the handle is due when all live workers are.
    pub fn arrive(&self, name: &str) -> Result<Handle, ClientError> {
        self.act(|worker| worker.barrier(clock::now(), name))
    }

    /// How the job stands.
    pub fn status(&self) -> Result<Status, ClientError> {
        self.status_within(self.shared.timeout)
    }

    /// [`Job::status`] with a time-out of its own.
    pub fn status_within(&self, timeout: Duration) -> Result<Status, ClientError> {
        self.query_status()?.wait_within(timeout)
    }

    /// Asks how the job stands; the handle brings it.
    pub fn query_status(&self) -> Result<Handle<Status>, ClientError> {
        let ticket = self.shared.act(|worker| worker.query_status(clock::now()))?;
        Ok(Handle::bringing(self.shared.clone(), ticket, |shared, ticket| {
            let status = shared.lock().worker.take_status(ticket);
            status.ok_or_else(|| WorkerError::Order("this status was taken already".into()).into())
        }))
    }

    /// Where the job is.
    pub fn url(&self) -> &JobUrl {
        &self.url
    }

    /// How long calls wait unless told otherwise.
    pub fn timeout(&self) -> Duration {
        self.shared.timeout
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
    pub fn iteration(&self) -> Clock {
        self.shared.lock().worker.current_clock()
    }

    /// Bytes moved so far.
    pub fn report(&self) -> WorkerReport {
        self.shared.lock().worker.report().clone()
    }

    /// Leaves the job in good order. It cannot be used any more, nor can its tables.
    pub fn close(&self) -> Result<(), ClientError> {
        self.close_within(self.shared.timeout)
    }

    /// [`Job::close`] with a time-out of its own. After it the job has ended here, in good order or not.
    pub fn close_within(&self, timeout: Duration) -> Result<(), ClientError> {
        let handle = self.act(|worker| Ok(worker.leave(clock::now())))?;
        let left = handle.wait_within(timeout);
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
        self.shared.act(ask).map(|ticket| Handle::new(self.shared.clone(), ticket))
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
        hands::job_ends();
        self.end();
    }
}

/// Addresses with commas between them.
fn addresses(text: &str) -> Addresses {
    text.split(',').map(|address| address.trim().to_owned()).collect()
}
