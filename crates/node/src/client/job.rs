//! A worker's membership in a job.

use super::error::ClientError;
use super::handle::Handle;
use super::hands;
use super::options::JobOptions;
use super::packing::{self, Packs};
use super::shared::{Cell, Shared, lock};
use super::table::Table;
use crate::admin::{Admin, AdminError};
use crate::checkpoint::{self, CopyError, Place};
use crate::clock;
use crate::event_loop::{EventLoop, FIRST_LANE, Opening, Setup, Strangers};
use crate::exhaustion;
use crate::host;
use crate::log::Log;
use crate::ports::PortSupply;
use crate::server;
use crate::transport::Dialler;
use crate::transport::memory::SCHEME;
use crate::transport::shm::{self, SharedAllocator};
use crate::transport::tcp::{self, options::SocketOptions};
use crate::url::JobUrl;
use crate::waker::Waker;
use paramill_core::address::CoreAddresses;
use paramill_core::consistency::check_name;
use paramill_core::local::LocalSteps;
use paramill_core::policy::JobPolicies;
use paramill_core::registry::Registry;
use paramill_core::status::{Status, WorkerReport};
use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, WorkerId};
use paramill_core::worker::{Asked, Ticket, Worker, WorkerConfig, WorkerError};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A worker's membership in a job.
///
/// [`Job::close`] leaves in good order. A job that is dropped without it has died, as far as the others can tell.
#[derive(Debug)]
pub struct Job {
    pub(super) shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<Result<(), String>>>>,
    url: JobUrl,
    registry: Arc<Registry>,
    log: Log,
    start: Mutex<Start>,
    /// Until the job starts.
    tables: Mutex<Vec<Table>>,
    packs: OnceLock<Packs>,
}

/// How far [`Job::start`] is.
#[derive(Debug, Default)]
enum Start {
    #[default]
    NotYet,
    /// Which small tables may share one depends on the job's policies.
    Asking(Handle<JobPolicies>),
    Begun(Handle),
}

/// Numbers the workers of this process.
static NEXT_WORKER: AtomicU64 = AtomicU64::new(0);
/// Numbers the places of this process where workers listen.
static NEXT_LISTENER: AtomicU64 = AtomicU64::new(0);

impl Job {
    /// Begins to join: connects in the background. Create tables next, then call [`Job::start`].
    pub fn init(options: JobOptions) -> Result<Job, ClientError> {
        Ok(Job::begin(options).map_err(exhaustion::explain)?)
    }

    fn begin(options: JobOptions) -> io::Result<Job> {
        let loops = options.spread()?;
        let wakers = (0..loops.count()).map(|_| Waker::new()).collect::<io::Result<Vec<_>>>()?;
        let config = WorkerConfig {
            job: options.url.job.clone(),
            rank: options.rank,
            coordinator: options.url.address.clone(),
            aggregator: options.aggregator.as_deref().map(CoreAddresses::from),
            number: NEXT_WORKER.fetch_add(1, Ordering::Relaxed),
            access: options.access,
        };
        let memory = SharedAllocator::new();
        let mut worker = Worker::new(clock::now(), config, options.registry.clone()).with_loops(loops);
        if let Some(host) = shm::host_prefix().filter(|_| options.transport.allows(true)) {
            worker = worker.with_shared_memory(host, Arc::new(memory.clone()));
        }
        let shared = Arc::new(Shared::new(worker, wakers, options.timeout));
        let dialler = Dialler {
            transport: options.transport,
            sockets: SocketOptions::new(options.congestion.as_deref())?.at_rate(
                options.rate,
                options.transport,
                options.memory.is_some(),
            )?,
            memory,
            hub: options.memory.clone(),
            elected: None,
        };
        let strangers = Strangers::new();
        let setup = |lane: usize, waker: &Arc<Waker>| Setup {
            listeners: Vec::new(),
            open: (lane == FIRST_LANE).then(|| opening(&options, &dialler)),
            start_core: None,
            resolve: tcp::resolve,
            dialler: dialler.clone(),
            waker: waker.clone(),
            stop: shared.stop_flag().clone(),
            strangers: strangers.clone(),
            injection: options.injection.clone(),
            checkpoints: Place::default(),
            log: options.log.clone(),
        };
        hands::job_begins();
        let threads = Mutex::default();
        let job = Job {
            shared: shared.clone(),
            threads,
            url: options.url.clone(),
            registry: options.registry.clone(),
            log: options.log.clone(),
            start: Mutex::default(),
            tables: Mutex::default(),
            packs: OnceLock::new(),
        };
        // If a thread cannot be started, those before it end with the job.
        for (lane, waker) in shared.wakers().iter().enumerate() {
            let event_loop = EventLoop::new(Cell::new(&shared, lane), setup(lane, waker))?;
            let name = match lane {
                FIRST_LANE => "paramill worker".to_owned(),
                other => format!("paramill worker {other}"),
            };
            let thread = std::thread::Builder::new().name(name).spawn(move || event_loop.run())?;
            lock(&job.threads).push(thread);
        }
        Ok(job)
    }

    /// The policies that the job begins with: small tensors for which they are the same may share a table
    /// ([`Pack::divide`](paramill_core::table::Pack::divide)). May be asked before [`Job::start`].
    pub fn policies(&self) -> Result<JobPolicies, ClientError> {
        self.query_policies()?.wait()
    }

    fn query_policies(&self) -> Result<Handle<JobPolicies>, ClientError> {
        let ticket = self.shared.act(|worker| worker.query_policies(clock::now()))?;
        Ok(Handle::bringing(self.shared.clone(), ticket, |shared, ticket| {
            let policies = shared.lock().worker.take_policies(ticket);
            policies.ok_or_else(|| WorkerError::Order("these policies were taken already".into()).into())
        }))
    }

    /// The steps that the job has workers make by themselves, if its policy `local` asks for some. Whoever asks follows it:
    /// [`LocalSteps`] says what is pushed when, and a [`Replica`](super::Replica) computes it. Asked before
    /// [`Job::start`], which refuses programs that did not ask.
    pub fn local_steps(&self) -> Result<Option<LocalSteps>, ClientError> {
        let local = self.policies()?.policy.local(&self.registry);
        self.shared.act(|worker| {
            worker.step_locally();
            Ok(())
        })?;
        // The coordinator has read it.
        Ok(local.map_err(|error| WorkerError::Order(error.to_string()))?)
    }

    /// Creates a table with its initial values; those of worker 0 count. All workers create the same, in the same order.
    ///
    /// Eight or more dense tables of at most 4096 elements travel together, those with the same policies as one: each would cost
    /// as much as a large one. They keep their names in status, in policies and in checkpoints. Their gradients leave when all
    /// of them are given, at [`Job::clock`], at a barrier, or when one of them is waited for or polled; those that are not given by
    /// then are not sent, and a table that is given one later in the same clock refuses it. What one of them pulls, all of them
    /// have, and the push of one is due with the parameters that others ask for. A table that is used at other times than the rest, or
    /// is lent as a [`Slab`](super::Slab), is created [`TableSpec::alone()`].
    pub fn table(&self, spec: TableSpec, initial: Vec<f32>) -> Result<Table, ClientError> {
        let mut tables = lock(&self.tables);
        let id = self.shared.lock().worker.declare(spec.clone(), initial)?;
        let table = Table::new(self.shared.clone(), id, spec);
        tables.push(table.clone());
        Ok(table)
    }

    /// Evaluates a condition for all servers, where this is worker 0: tables whose policy `sync` is `remote:NAME` ask it of each pull
    /// whether the pull is answered now, and again when a worker has pushed since. A thread of its own calls it, one pull after
    /// another. While it takes longer than the policy's `deadline`, or fails, the policy's `fallback` decides.
    ///
    /// ```no_run
    /// # use paramill_node::client::{Job, JobOptions};
    /// # let job = Job::init(JobOptions::from_environment()?)?;
    /// job.condition("near", |asked| {
    ///     let pull = &asked.question;
    ///     Ok(pull.progress - pull.slowest() <= 2)
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn condition(
        &self,
        name: &str,
        evaluate: impl Fn(&Asked) -> Result<bool, String> + Send + Sync + 'static,
    ) -> Result<(), ClientError> {
        check_name(name).map_err(WorkerError::Order)?;
        let conditions = &self.shared.conditions;
        conditions.set(&self.shared, &self.log, name, Arc::new(evaluate)).map_err(exhaustion::explain)?;
        self.shared.act(|worker| {
            worker.judge(name);
            Ok(())
        })
    }

    /// Waits until all workers and servers are here and the initial values are exchanged. After a time-out it may be
    /// called again, to wait on.
    pub fn start(&self) -> Result<(), ClientError> {
        self.start_within(self.shared.timeout)
    }

    /// [`Job::start`] with a time-out of its own.
    pub fn start_within(&self, timeout: Duration) -> Result<(), ClientError> {
        let (mut start, began) = (lock(&self.start), Instant::now());
        if let Start::Asking(handle) = self.asking(&mut start)? {
            let policies = handle.wait_within(timeout)?;
            *start = Start::Begun(self.begin_start(Some(&policies))?);
        }
        match &*start {
            Start::Begun(handle) => handle.wait_within(timeout.saturating_sub(began.elapsed())),
            _ => Ok(()),
        }
    }

    /// Waits a while without an explanation: whether [`Job::start`] would then return at once.
    pub fn start_is_due_within(&self, timeout: Duration) -> Result<bool, ClientError> {
        let (mut start, began) = (lock(&self.start), Instant::now());
        if let Start::Asking(handle) = self.asking(&mut start)? {
            if !handle.is_due_within(timeout) {
                return Ok(false);
            }
            let policies = handle.wait_within(Duration::ZERO)?;
            *start = Start::Begun(self.begin_start(Some(&policies))?);
        }
        let left = timeout.saturating_sub(began.elapsed());
        Ok(matches!(&*start, Start::Begun(handle) if handle.is_due_within(left)))
    }

    /// The start that is under way, begun if it is not.
    fn asking<'a>(&self, start: &'a mut Start) -> Result<&'a Start, ClientError> {
        if matches!(start, Start::NotYet) {
            let gains = packing::gains(&lock(&self.tables));
            *start = match gains {
                true => Start::Asking(self.query_policies()?),
                false => Start::Begun(self.begin_start(None)?),
            };
        }
        Ok(start)
    }

    /// Begins to start, with small tables in packs where the job's policies are known.
    fn begin_start(&self, policies: Option<&JobPolicies>) -> Result<Handle, ClientError> {
        let mut tables = lock(&self.tables);
        let packs =
            policies.map_or_else(Vec::new, |policies| packing::divide(&tables, policies, &self.registry));
        let handle = self.act(|worker| {
            if !packs.is_empty() {
                worker.pack(&packs)?;
            }
            worker.start(clock::now())
        })?;
        let packs = Packs::settle(&self.shared, &tables, &packs);
        tables.clear();
        // A job starts once.
        let _ = self.shared.packs.set(packs.departures());
        let _ = self.packs.set(packs);
        Ok(handle)
    }

    /// Ends the iteration.
    pub fn clock(&self) {
        let mut rounds = self.packs.get().map(Packs::leave);
        let mut state = self.shared.lock();
        state.worker.clock();
        self.shared.let_go(state);
        if let Some(rounds) = &mut rounds {
            rounds.turn();
        }
    }

    /// Sends the updates that are held back by the policy `hold`, and waits until the servers have them. They take an iteration of their
    /// own: all workers call this after the same iteration, at the end of training. Without that policy it does nothing; [`Job::close`] sends
    /// what is held back, too.
    pub fn flush(&self) -> Result<(), ClientError> {
        let mut rounds = self.packs.get().map(Packs::leave);
        let tickets = self.shared.act(|worker| worker.flush(clock::now()))?;
        if let Some(rounds) = rounds.as_mut().filter(|_| !tickets.is_empty()) {
            rounds.turn();
        }
        drop(rounds);
        let handles = tickets.into_iter().map(|ticket| Handle::new(self.shared.clone(), ticket));
        // All of them are waited for, also after one that fails.
        handles.map(|handle| handle.wait()).fold(Ok(()), Result::and)
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
        // Others may wait for a gradient before they come.
        drop(self.packs.get().map(Packs::leave));
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

    /// Has bytes saved with checkpoints from now on, in place of those that were noted under this name before: a position in the data,
    /// say. Empty bytes remove the note. A checkpoint of an iteration has what was noted when [`Job::clock`] began it.
    pub fn note(&self, name: &str, bytes: &[u8]) -> Result<(), ClientError> {
        Ok(self.shared.lock().worker.note(name, bytes)?)
    }

    /// What was noted under a name when the checkpoint was made that the job goes on from: by the worker of the same rank or, where there
    /// were fewer, by that of the rank modulo their number.
    pub fn noted(&self, name: &str) -> Option<Vec<u8>> {
        self.shared.lock().worker.noted(name).map(<[u8]>::to_vec)
    }

    /// Has the job make a checkpoint where its servers keep them, and waits until that is complete. The answer is a sentence that names
    /// it. The version that is saved is one that comes soon: other workers go on, and this one does not wait for itself if it calls
    /// this between two iterations, as long as the others do.
    pub fn checkpoint(&self, timeout: Duration) -> Result<String, AdminError> {
        Admin::connect(&self.url, timeout)?.checkpoint()
    }

    /// Has the job make a checkpoint, and copies it into a file of this machine, also where servers keep none. `at` is the clock at which
    /// all workers rest, at a barrier say; without it the version that is saved is one that comes soon.
    pub fn copy_checkpoint(
        &self,
        path: &Path,
        at: Option<Clock>,
        timeout: Duration,
    ) -> Result<String, CopyError> {
        checkpoint::copy(&mut Admin::connect(&self.url, timeout)?, path, at)
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

    /// The iteration that the next gradients are of: how many are completed, and those that were left out, as under `quorum` when
    /// rounds closed without this worker. It is settled when the first gradient of the iteration is pushed.
    pub fn iteration(&self) -> Clock {
        self.shared.lock().worker.current_clock()
    }

    /// Whether iterations may be left out: all tables' models have rounds close without a slow worker.
    pub fn leaves_out(&self) -> bool {
        self.shared.lock().worker.leaves_out()
    }

    /// Gradients that are pushed from now on are the mean of so many samples, which is their weight in the mean over workers; 1 until this
    /// is called. Tables whose gradients are summed (`reduce=sum`), and aggregators, refuse other weights than 1.
    pub fn set_samples(&self, samples: u32) -> Result<(), ClientError> {
        Ok(self.shared.lock().worker.set_samples(samples)?)
    }

    /// Bytes moved so far.
    pub fn report(&self) -> WorkerReport {
        self.shared.lock().worker.report()
    }

    /// Leaves the job in good order. It cannot be used any more, nor can its tables.
    pub fn close(&self) -> Result<(), ClientError> {
        self.close_within(self.shared.timeout)
    }

    /// [`Job::close`] with a time-out of its own. After it the job has ended here, in good order or not.
    pub fn close_within(&self, timeout: Duration) -> Result<(), ClientError> {
        drop(self.packs.get().map(Packs::leave));
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
        self.shared.stop();
        self.shared.conditions.clear();
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
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

/// How to listen for other workers, which streams are passed on to.
fn opening(options: &JobOptions, dialler: &Dialler) -> Opening {
    let JobOptions { url, transport, ports, .. } = options.clone();
    let dialler = dialler.clone();
    Box::new(move || {
        if let Some(hub) = &dialler.hub {
            let address = format!("{SCHEME}worker/{}", NEXT_LISTENER.fetch_add(1, Ordering::Relaxed));
            return Ok((vec![hub.listen(&address)], address.into()));
        }
        if !transport.allows(false) {
            let why = "this worker may only share memory, and streams between workers go over TCP";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let host = server::host_towards(&url.address)?;
        let listen = |port| tcp::listen(&host::with_port(&host, port));
        let listener = PortSupply::new(ports, 1)?.listen(listen)?;
        let address = server::announced(&listener, None)?;
        Ok((vec![tcp::listener(listener, &dialler.sockets)], address.into()))
    })
}
