//! The threads of a server: those that it begins with, and those of data cores that the job asks for while it runs.

use super::{ServerConfig, announced, host_towards};
use crate::clock;
use crate::event_loop::{EventLoop, Injection, Owned, RoleCell, Setup, Strangers};
use crate::host;
use crate::log::Level;
use crate::pinning::pin_this_thread;
use crate::ports::PortSupply;
use crate::transport::carrier::Listener;
use crate::transport::memory::SCHEME;
use crate::transport::shm;
use crate::transport::tcp;
use crate::transport::{Dialler, Transport};
use crate::waker::Waker;
use paramill_core::address::Addresses;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::replica::Replica;
use paramill_core::server::ShardConfig;
use paramill_core::types::ProcessId;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// What it takes to start a thread of a server, and those that were started.
pub(super) struct Threads {
    config: ServerConfig,
    registry: Arc<Registry>,
    process: ProcessId,
    coordinator: CoordinatorPlace,
    dialler: Dialler,
    stop: Arc<AtomicBool>,
    strangers: Arc<Strangers>,
    /// Data cores that have not ended.
    live_cores: Arc<AtomicU32>,
    started: Mutex<Started>,
}

/// Where the coordinator of a server's job is.
#[derive(Debug)]
pub(super) struct CoordinatorPlace {
    /// The address that data cores connect to.
    pub(super) dialled: String,
    /// The address that others are told, which is in the network that data cores are to be reached from.
    pub(super) announced: String,
}

struct Started {
    threads: Vec<JoinHandle<Result<(), String>>>,
    wakers: Vec<Arc<Waker>>,
    ports: PortSupply,
    /// Data cores so far: the number of the next one.
    cores: u32,
    /// It was said that there can be no more of them.
    has_told: bool,
}

/// How a thread is to be set up.
pub(super) struct Thread {
    pub(super) name: String,
    pub(super) cpu: Option<usize>,
    /// Counts such threads while they run.
    pub(super) counted: Option<Arc<AtomicU32>>,
}

impl Threads {
    /// Of a server whose job is coordinated at this address.
    pub(super) fn new(
        config: ServerConfig,
        registry: Arc<Registry>,
        dialler: Dialler,
        coordinator: CoordinatorPlace,
        process: ProcessId,
    ) -> io::Result<Arc<Threads>> {
        let started = Started {
            threads: Vec::new(),
            wakers: Vec::new(),
            ports: PortSupply::new(config.ports, config.cores)?,
            cores: 0,
            has_told: false,
        };
        Ok(Arc::new(Threads {
            config,
            registry,
            process,
            coordinator,
            dialler,
            stop: Arc::default(),
            strangers: Strangers::new(),
            live_cores: Arc::default(),
            started: Mutex::new(started),
        }))
    }

    /// Where the coordinator is, or this process when it coordinates the job.
    pub(super) fn coordinator(&self) -> &str {
        &self.coordinator.announced
    }

    pub(super) fn config(&self) -> &ServerConfig {
        &self.config
    }

    pub(super) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    pub(super) fn dialler(&self) -> &Dialler {
        &self.dialler
    }

    /// Whether all threads are to end.
    pub(super) fn are_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Whether this server has data cores that were started and have ended: it was drained, or its part of the job is over.
    pub(super) fn have_cores_ended(&self) -> bool {
        self.config.cores > 0 && self.live_cores.load(Ordering::Acquire) == 0
    }

    /// Asks all threads to end, and starts no more.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.lock().wakers.iter().for_each(|waker| waker.wake());
    }

    /// Whether none runs any more.
    pub(super) fn are_over(&self) -> bool {
        self.lock().threads.iter().all(|thread| thread.is_finished())
    }

    /// Waits until none runs any more. The error is the first that one ended with, in the order in which they were started.
    pub(super) fn wait(&self) -> Result<(), String> {
        let mut result = Ok(());
        loop {
            // One that is started meanwhile is in the list before the one that asked for it ends.
            let threads = std::mem::take(&mut self.lock().threads);
            if threads.is_empty() {
                return result;
            }
            for thread in threads {
                let ended = thread
                    .join()
                    .unwrap_or_else(|_| Err("a server thread panicked outside of its loop".into()));
                result = result.and(ended);
            }
        }
    }

    /// Starts a data core, and returns where it is reached.
    pub(super) fn start_core(self: &Arc<Threads>, cpu: Option<usize>) -> io::Result<Addresses> {
        let mut started = self.lock();
        let Threads { config, process, .. } = &**self;
        let core = started.cores;
        let (listeners, addresses) = match &config.memory {
            Some(hub) => {
                let address = format!("{SCHEME}{:x}/{core}", process.0);
                (vec![hub.listen(&address)], address.into())
            }
            None => {
                let name = format!("{:x}-{core}", process.0);
                self.data_listeners(config, &name, &mut started.ports)?
            }
        };
        addresses.check().map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let shard = ShardConfig {
            job: config.job.clone(),
            process: *process,
            // A core that is started later is one of a server that has its number already.
            server: config.server.filter(|_| core < config.cores),
            core,
            cores: config.cores,
            addresses: addresses.clone(),
            coordinator: self.coordinator.dialled.clone(),
            digest_every: config.digest_every,
        };
        let role = Owned(Replica::new(clock::now(), shard, self.registry.clone()));
        let thread =
            Thread { name: format!("data core {core}"), cpu, counted: Some(self.live_cores.clone()) };
        self.start_with(&mut started, thread, listeners, role, Waker::new()?)?;
        started.cores += 1;
        Ok(addresses)
    }

    /// Starts a data core that the job asks for while it runs. Without it the job goes on as it is.
    fn start_another_core(self: &Arc<Threads>) {
        if self.stop.load(Ordering::Relaxed) {
            return;
        }
        self.lock().ports.expect_another();
        if let Err(error) = self.start_core(None)
            && !std::mem::replace(&mut self.lock().has_told, true)
        {
            let line = format!(
                "cannot start another data core: {error}; this server keeps no more copies and takes no more shards"
            );
            self.config.log.line(Level::Warn, &line);
        }
    }

    /// Starts a thread for a role, which others wake.
    pub(super) fn start<C: RoleCell + Send + 'static>(
        self: &Arc<Threads>,
        thread: Thread,
        listeners: Vec<Box<dyn Listener>>,
        role: C,
        waker: Arc<Waker>,
    ) -> io::Result<()> {
        self.start_with(&mut self.lock(), thread, listeners, role, waker)
    }

    fn start_with<C: RoleCell + Send + 'static>(
        self: &Arc<Threads>,
        started: &mut Started,
        thread: Thread,
        listeners: Vec<Box<dyn Listener>>,
        role: C,
        waker: Arc<Waker>,
    ) -> io::Result<()> {
        let event_loop = self.event_loop(listeners, role, waker.clone())?;
        let log = self.config.log.clone();
        let Thread { name, cpu, counted } = thread;
        counted.iter().for_each(|count| _ = count.fetch_add(1, Ordering::AcqRel));
        let body = move || {
            // Before anything large is touched: memory lies where that happens first.
            if let Some(Err(error)) = cpu.map(pin_this_thread) {
                let line = format!("a data core could not be pinned: {error}; it runs without");
                log.line(Level::Warn, &line);
            }
            let result = event_loop.run();
            counted.iter().for_each(|count| _ = count.fetch_sub(1, Ordering::AcqRel));
            result
        };
        started.threads.push(std::thread::Builder::new().name(name).spawn(body)?);
        started.wakers.push(waker);
        Ok(())
    }

    /// Starts a thread that runs loops of its own.
    pub(super) fn start_apart(
        self: &Arc<Threads>,
        name: &str,
        body: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> io::Result<()> {
        self.lock().threads.push(std::thread::Builder::new().name(name.into()).spawn(body)?);
        Ok(())
    }

    /// A loop of this server for a role, to be run by the thread that asks for it.
    pub(super) fn event_loop<C: RoleCell>(
        self: &Arc<Threads>,
        listeners: Vec<Box<dyn Listener>>,
        role: C,
        waker: Arc<Waker>,
    ) -> io::Result<EventLoop<C>> {
        let (config, threads) = (&self.config, self.clone());
        let setup = Setup {
            listeners,
            open: None,
            start_core: Some(Box::new(move || threads.start_another_core())),
            resolve: tcp::resolve,
            dialler: self.dialler.clone(),
            waker,
            stop: self.stop.clone(),
            strangers: self.strangers.clone(),
            injection: Injection { plan: config.faults.clone(), seed: config.seed },
            checkpoints: config.checkpoints.clone(),
            log: config.log.clone(),
        };
        EventLoop::new(role, setup)
    }

    /// The listeners of one data core, on each host and for this one, and what others are to be told.
    pub(super) fn data_listeners(
        &self,
        config: &ServerConfig,
        name: &str,
        ports: &mut PortSupply,
    ) -> io::Result<(Vec<Box<dyn Listener>>, Addresses)> {
        let (mut listeners, mut addresses) = (Vec::<Box<dyn Listener>>::new(), Vec::new());
        if config.transport.allows(false) {
            let hosts = match config.hosts.as_slice() {
                [] => vec![(host_towards(self.coordinator())?, None)],
                hosts => hosts.iter().map(|host| (host.clone(), Some(host.as_str()))).collect(),
            };
            // One port on all hosts, so that a firewall has as many to let through as there are data cores.
            let listen =
                |port| hosts.iter().map(|(host, _)| tcp::listen(&host::with_port(host, port))).collect();
            let bound: Vec<TcpListener> = ports.listen(listen)?;
            for (listener, (_, told)) in bound.into_iter().zip(&hosts) {
                addresses.push(announced(&listener, *told)?);
                listeners.push(tcp::listener(listener, &self.dialler.sockets));
            }
        }
        if config.transport.allows(true) && addresses.len() < limits::MAX_ADDRESSES {
            match shm::listen(name) {
                Ok((listener, address)) => {
                    addresses.push(address);
                    listeners.push(Box::new(listener));
                }
                // Where memory cannot be shared there is still TCP, unless the user wants nothing else.
                Err(error) if config.transport == Transport::Shm => return Err(error),
                Err(error) => config.log.line(Level::Warn, &error.to_string()),
            }
        }
        Ok((listeners, addresses.into_iter().collect()))
    }

    fn lock(&self) -> MutexGuard<'_, Started> {
        self.started.lock().expect("no holder of this lock panics")
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("coordinator", &self.coordinator.announced).finish_non_exhaustive()
    }
}
