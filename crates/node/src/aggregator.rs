//! Runs an aggregator: one thread that stands between the workers of a host or rack and the servers.

use crate::clock;
use crate::event_loop::{EventLoop, Injection, Owned, Setup, Strangers};
use crate::exhaustion;
use crate::log::{Level, Log};
use crate::server::{announced, random_number};
use crate::transport::carrier::Listener;
use crate::transport::memory::{Hub, SCHEME};
use crate::transport::shm::{self, SharedAllocator};
use crate::transport::tcp::{self, options::SocketOptions};
use crate::transport::{Dialler, Transport};
use crate::waker::Waker;
use paramill_core::address::Addresses;
use paramill_core::aggregator::{Aggregator as Role, AggregatorConfig as RoleConfig};
use paramill_core::fault::FaultPlan;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::types::{AggregatorId, ProcessId};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// What an aggregator needs to know.
#[derive(Debug, Clone)]
pub struct AggregatorConfig {
    /// The job's name.
    pub job: String,
    /// Where the job's coordinator is: `host:port`. Ignored in memory.
    pub coordinator: String,
    /// Where workers come in: `host:port`. In memory, a name.
    pub listen: String,
    /// The aggregator's number, when it is to have a certain one.
    pub id: Option<AggregatorId>,
    /// How long a complete push is held for those of other workers.
    pub hold: Duration,
    /// TCP's congestion control, by name. `None`: what is best within a host, the system's default beyond it.
    pub congestion: Option<String>,
    /// How workers may come in, and how servers may be reached.
    pub transport: Transport,
    /// In memory instead of over TCP.
    pub memory: Option<Hub>,
    /// Faults to try.
    pub faults: FaultPlan,
    /// Decides faults with a probability.
    pub seed: u64,
    /// Where log lines go.
    pub log: Log,
}

impl AggregatorConfig {
    /// An aggregator of `job` that joins the coordinator at `coordinator` and takes workers at `listen`.
    pub fn new(
        job: impl Into<String>,
        coordinator: impl Into<String>,
        listen: impl Into<String>,
    ) -> AggregatorConfig {
        AggregatorConfig {
            job: job.into(),
            coordinator: coordinator.into(),
            listen: listen.into(),
            id: None,
            hold: limits::HOLD,
            congestion: None,
            transport: Transport::default(),
            memory: None,
            faults: FaultPlan::default(),
            seed: 0,
            log: Log::stderr(),
        }
    }
}

/// An aggregator whose thread runs. One that is dropped ends.
#[derive(Debug)]
pub struct Aggregator {
    thread: Option<JoinHandle<Result<(), String>>>,
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    address: String,
}

/// Starts an aggregator. Its port is bound before this returns, so that a port in use is an error here.
pub fn start(config: AggregatorConfig, registry: &Arc<Registry>) -> io::Result<Aggregator> {
    begin(config, registry).map_err(exhaustion::explain)
}

fn begin(config: AggregatorConfig, registry: &Arc<Registry>) -> io::Result<Aggregator> {
    if config.hold > limits::MAX_HOLD {
        let why = format!("hold = {:?}: expected at most {:?}", config.hold, limits::MAX_HOLD);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let process = ProcessId(random_number());
    let sockets = SocketOptions::new(config.congestion.as_deref())?;
    let (listeners, addresses, coordinator) = match &config.memory {
        Some(hub) => {
            let name = format!("{SCHEME}{}", config.listen);
            (vec![hub.listen(&name)], name.into(), format!("{SCHEME}coordinator"))
        }
        None => {
            let (listeners, addresses) = listeners(&config, process, &sockets)?;
            (listeners, addresses, config.coordinator.clone())
        }
    };
    let address = addresses.iter().collect::<Vec<_>>().join(",");
    let role = RoleConfig {
        job: config.job.clone(),
        process,
        id: config.id,
        addresses: addresses.clone(),
        coordinator,
        hold: config.hold,
    };
    let role = Owned(Role::new(clock::now(), role, registry.clone()));
    let (stop, waker) = (Arc::new(AtomicBool::new(false)), Waker::new()?);
    let setup = Setup {
        listeners,
        resolve: tcp::resolve,
        dialler: Dialler {
            transport: config.transport,
            sockets,
            memory: SharedAllocator::new(),
            hub: config.memory.clone(),
        },
        waker: waker.clone(),
        stop: stop.clone(),
        strangers: Strangers::new(),
        injection: Injection { plan: config.faults.clone(), seed: config.seed },
        log: config.log.clone(),
    };
    let event_loop = EventLoop::new(role, setup)?;
    let thread = std::thread::Builder::new().name("aggregator".into()).spawn(move || event_loop.run())?;
    Ok(Aggregator { thread: Some(thread), stop, waker, address })
}

/// Where workers of this host and of others come in.
fn listeners(
    config: &AggregatorConfig,
    process: ProcessId,
    sockets: &SocketOptions,
) -> io::Result<(Vec<Box<dyn Listener>>, Addresses)> {
    let (mut listeners, mut addresses) = (Vec::<Box<dyn Listener>>::new(), Vec::new());
    if config.transport.allows(true) {
        match shm::listen(&format!("{:x}-aggregator", process.0)) {
            Ok((listener, address)) => {
                listeners.push(Box::new(listener));
                addresses.push(address);
            }
            // Where memory cannot be shared there is still TCP, unless the user wants nothing else.
            Err(error) if config.transport == Transport::Shm => return Err(error),
            Err(error) => config.log.line(Level::Warn, &error.to_string()),
        }
    }
    if config.transport.allows(false) {
        let listener = tcp::listen(&config.listen)?;
        addresses.push(announced(&listener, None)?);
        listeners.push(tcp::listener(listener, sockets));
    }
    Ok((listeners, addresses.into_iter().collect()))
}

impl Aggregator {
    /// Where workers come in: an address, or several with commas between them, as `JobOptions::aggregator` takes them.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Asks the thread to end; frames under way still leave.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.waker.wake();
    }

    /// Waits until the job is over. The error is what the thread ended with.
    pub fn join(mut self) -> Result<(), String> {
        match self.thread.take() {
            Some(thread) => thread
                .join()
                .unwrap_or_else(|_| Err("the aggregator's thread panicked outside of its loop".into())),
            None => Ok(()),
        }
    }
}

impl Drop for Aggregator {
    fn drop(&mut self) {
        self.stop();
    }
}
