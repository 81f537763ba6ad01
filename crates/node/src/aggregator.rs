//! Runs an aggregator: threads that share nothing, and stand between the workers of a host or rack and the servers.

use crate::checkpoint::Place;
use crate::clock;
use crate::event_loop::{EventLoop, Injection, Owned, Setup, Strangers};
use crate::exhaustion;
use crate::host;
use crate::log::{Level, Log};
use crate::rate::Rate;
use crate::server::{announced, random_number};
use crate::transport::carrier::Listener;
use crate::transport::memory::{Hub, SCHEME};
use crate::transport::shm::{self, SharedAllocator};
use crate::transport::tcp::{self, options::SocketOptions};
use crate::transport::{Dialler, Transport};
use crate::waker::Waker;
use paramill_core::address::{Addresses, CoreAddresses};
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
    /// Where workers come in: `host:port`. Further cores have the ports that follow. In memory, a name.
    pub listen: String,
    /// How many threads it has. Each stands for some of the shards.
    pub cores: u32,
    /// The aggregator's number, when it is to have a certain one. With several cores they are numbered from `id * cores` on.
    pub id: Option<AggregatorId>,
    /// The addresses of the aggregator above it, of a rack, that it goes through to the servers.
    pub above: Option<String>,
    /// How long a complete push is held for those of other workers.
    pub hold: Duration,
    /// TCP's congestion control, by name. `None`: what is best within a host, the system's default beyond it.
    pub congestion: Option<String>,
    /// What its cores send at most, all together over TCP.
    pub rate: Option<Rate>,
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
            cores: 1,
            id: None,
            above: None,
            hold: limits::HOLD,
            congestion: None,
            rate: None,
            transport: Transport::default(),
            memory: None,
            faults: FaultPlan::default(),
            seed: 0,
            log: Log::stderr(),
        }
    }
}

/// An aggregator whose threads run. One that is dropped ends.
#[derive(Debug)]
pub struct Aggregator {
    threads: Vec<JoinHandle<Result<(), String>>>,
    ending: Ending,
    address: String,
}

/// Ends all threads of an aggregator.
#[derive(Debug, Clone)]
struct Ending {
    stop: Arc<AtomicBool>,
    wakers: Arc<[Arc<Waker>]>,
}

impl Ending {
    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wakers.iter().for_each(|waker| waker.wake());
    }
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
    if !(1..=limits::MAX_CORES).contains(&config.cores) {
        let why = format!("cores = {}: expected 1 to {}", config.cores, limits::MAX_CORES);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let wakers = (0..config.cores).map(|_| Waker::new()).collect::<io::Result<Vec<_>>>()?;
    let ending = Ending { stop: Arc::new(AtomicBool::new(false)), wakers: wakers.into() };
    let dialler = Dialler {
        transport: config.transport,
        sockets: SocketOptions::new(config.congestion.as_deref())?.at_rate(
            config.rate,
            config.transport,
            config.memory.is_some(),
        )?,
        memory: SharedAllocator::new(),
        hub: config.memory.clone(),
        elected: None,
    };
    let process = random_number();
    let (mut addresses, mut loops) = (Vec::new(), Vec::new());
    for core in 0..config.cores {
        // The job knows each core by itself.
        let process = ProcessId(process.wrapping_add(core.into()));
        let (listeners, own, coordinator) = match &config.memory {
            Some(hub) => {
                let name = match config.cores {
                    1 => format!("{SCHEME}{}", config.listen),
                    _ => format!("{SCHEME}{}/{core}", config.listen),
                };
                (vec![hub.listen(&name)], name.into(), format!("{SCHEME}coordinator"))
            }
            None => {
                let (listeners, addresses) = listeners(&config, core, process, &dialler.sockets)?;
                (listeners, addresses, config.coordinator.clone())
            }
        };
        let role = RoleConfig {
            job: config.job.clone(),
            process,
            id: config.id.map(|AggregatorId(id)| AggregatorId(id * config.cores + core)),
            core,
            cores: config.cores,
            addresses: own.clone(),
            coordinator,
            above: config.above.as_deref().map(CoreAddresses::from),
            hold: config.hold,
        };
        addresses.push(own);
        let setup = Setup {
            listeners,
            open: None,
            start_core: None,
            resolve: tcp::resolve,
            dialler: dialler.clone(),
            waker: ending.wakers[core as usize].clone(),
            stop: ending.stop.clone(),
            strangers: Strangers::new(),
            injection: Injection { plan: config.faults.clone(), seed: config.seed },
            checkpoints: Place::default(),
            log: config.log.clone(),
        };
        loops.push(EventLoop::new(Owned(Role::new(clock::now(), role, registry.clone())), setup)?);
    }
    let address = addresses.into_iter().collect::<CoreAddresses>().to_string();
    let mut aggregator = Aggregator { threads: Vec::new(), ending, address };
    for (core, event_loop) in loops.into_iter().enumerate() {
        let ending = aggregator.ending.clone();
        let body = move || {
            // Its workers cannot go on without one of the cores.
            event_loop.run().inspect_err(|_| ending.end())
        };
        let thread = std::thread::Builder::new().name(format!("aggregator {core}")).spawn(body)?;
        aggregator.threads.push(thread);
    }
    Ok(aggregator)
}

/// Where workers of this host and of others come in to a core.
fn listeners(
    config: &AggregatorConfig,
    core: u32,
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
        let listener = tcp::listen(&host::with_later_port(&config.listen, core)?)?;
        addresses.push(announced(&listener, None)?);
        listeners.push(tcp::listener(listener, sockets));
    }
    Ok((listeners, addresses.into_iter().collect()))
}

impl Aggregator {
    /// Where workers come in, as `JobOptions::aggregator` takes it: an address, or several with commas between them, for each
    /// core, with `+` between cores.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Asks the threads to end; frames under way still leave.
    pub fn stop(&self) {
        self.ending.end();
    }

    /// Waits until the job is over. The error is the first that a thread ended with.
    pub fn join(mut self) -> Result<(), String> {
        let mut result = Ok(());
        for thread in std::mem::take(&mut self.threads) {
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err("an aggregator's thread panicked outside of its loop".into()));
            result = result.and(ended);
        }
        result
    }
}

impl Drop for Aggregator {
    fn drop(&mut self) {
        self.stop();
    }
}
