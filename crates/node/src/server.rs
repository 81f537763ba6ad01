//! Runs a server: its data cores, one thread each, and the coordinator when this is the first server of a job.

mod threads;

use crate::checkpoint::Archive;
use crate::clock;
use crate::event_loop::{Rest, RoleCell};
use crate::exhaustion;
use crate::host;
use crate::log::{Level, Log};
use crate::pinning::{Pin, Pinning};
use crate::ports::Ports;
use crate::rate::Rate;
use crate::state_store::{Keeper, StatePlace, StateStore};
use crate::topology;
use crate::transport::memory::{Hub, SCHEME};
use crate::transport::shm::SharedAllocator;
use crate::transport::tcp::{self, options::SocketOptions};
use crate::transport::{Dialler, Transport};
use crate::waker::Waker;
use paramill_core::address::Addresses;
use paramill_core::coordinator::{Coordinator, JobConfig};
use paramill_core::fault::FaultPlan;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::role::Role;
use paramill_core::status::Status;
use paramill_core::types::ServerId;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use threads::{Thread, Threads};

/// What a server needs to know.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The job's name.
    pub job: String,
    /// The job itself, when this server also coordinates it.
    pub coordinate: Option<JobConfig>,
    /// Where the job's coordinator is (or is to be): `host:port`. Ignored in memory.
    pub coordinator: String,
    /// The hosts (addresses of this machine's interfaces) that every data core listens on. Workers spread their
    /// connections over them. None: the one that routes to the coordinator.
    pub hosts: Vec<String>,
    /// Ports that data cores listen on, one each, the same on all hosts. None: the system chooses.
    pub ports: Option<Ports>,
    /// Data cores.
    pub cores: u32,
    /// Whether data cores are pinned to CPUs.
    pub pin: Pin,
    /// The server's number, when it is to have a certain one.
    pub server: Option<ServerId>,
    /// TCP's congestion control, by name. `None`: what is best within a host, the system's default beyond it.
    pub congestion: Option<String>,
    /// What the server's data cores send at most, all together over TCP.
    pub rate: Option<Rate>,
    /// In memory instead of over TCP.
    pub memory: Option<Hub>,
    /// How workers may reach the data cores.
    pub transport: Transport,
    /// Faults to try.
    pub faults: FaultPlan,
    /// Decides faults with a probability.
    pub seed: u64,
    /// Of so many versions that are broadcast one comes with the digest of its values, which receivers compare with theirs.
    pub digest_every: u64,
    /// Where the coordinator keeps what it has to know when it is started anew; nowhere without.
    pub state: Option<StatePlace>,
    /// How long members wait for a coordinator that is started anew.
    pub coordinator_grace: Duration,
    /// Where the server's checkpoints are, if it keeps any: a folder of its own, or one that all servers share.
    pub checkpoints: Option<Archive>,
    /// Where log lines go.
    pub log: Log,
}

impl ServerConfig {
    /// A server of `job` that joins the coordinator at `coordinator`, with one data core.
    pub fn new(job: impl Into<String>, coordinator: impl Into<String>) -> ServerConfig {
        ServerConfig {
            job: job.into(),
            coordinate: None,
            coordinator: coordinator.into(),
            hosts: Vec::new(),
            ports: None,
            cores: 1,
            pin: Pin::Off,
            server: None,
            congestion: None,
            rate: None,
            memory: None,
            transport: Transport::default(),
            faults: FaultPlan::default(),
            seed: 0,
            digest_every: limits::DIGEST_EVERY,
            state: None,
            coordinator_grace: limits::COORDINATOR_GRACE,
            checkpoints: None,
            log: Log::stderr(),
        }
    }
}

/// A server whose threads run.
#[derive(Debug)]
pub struct Server {
    threads: Arc<Threads>,
    data: Vec<Addresses>,
    pinning: Pinning,
    final_status: Arc<OnceLock<Status>>,
}

/// Starts a server. Ports are bound before this returns, so that a port in use is an error here.
pub fn start(config: ServerConfig, registry: &Arc<Registry>) -> io::Result<Server> {
    begin(config, registry).map_err(exhaustion::explain)
}

fn begin(config: ServerConfig, registry: &Arc<Registry>) -> io::Result<Server> {
    // Servers without a number are told apart as well as can be.
    let number = config.server.map_or_else(std::process::id, |server| server.0);
    let pinning = Pinning::choose(&config.pin, config.cores, number)?;
    let sockets = SocketOptions::new(config.congestion.as_deref())?.at_rate(
        config.rate,
        config.transport,
        config.memory.is_some(),
    )?;
    let dialler = Dialler {
        transport: config.transport,
        sockets,
        memory: SharedAllocator::new(),
        hub: config.memory.clone(),
    };
    let mut address = match &config.memory {
        Some(_) => format!("{SCHEME}coordinator"),
        None => config.coordinator.clone(),
    };
    let stop = Arc::<AtomicBool>::default();
    let mut coordinator = None;
    if let Some(job) = &config.coordinate {
        job.check(registry)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
        // Who does not coordinate the job takes no connections: those who look for its coordinator try the next address.
        let store = config.state.as_ref().map(|place| opened(place, &address, &stop, &config)).transpose()?;
        let listener = match &config.memory {
            Some(hub) => hub.listen(&address),
            None => {
                let listener = tcp::listen(&config.coordinator)?;
                // A job that listens on one address is found there, wherever its data cores are.
                let any = listener.local_addr()?.ip().is_unspecified();
                address = announced(&listener, config.hosts.first().filter(|_| any).map(String::as_str))?;
                tcp::listener(listener, &dialler.sockets.for_control())
            }
        };
        let job = JobConfig { topology: topology::resolved(job.topology.clone()), ..job.clone() };
        let waker = Waker::new()?;
        let (role, keeper) = match (store, &config.state) {
            (Some(mut store), Some(place)) => {
                let role = remembered(&mut *store, place, job, &config, registry)?;
                (role, Some(Keeper::start(store, waker.clone(), config.log.clone())?))
            }
            _ => (Coordinator::new(job, registry.clone(), random_number()), None),
        };
        coordinator = Some((listener, role, keeper, waker));
    }
    let cores = config.cores;
    let mut server = Server {
        threads: Threads::new(config, registry.clone(), dialler, address, stop)?,
        data: Vec::new(),
        pinning,
        final_status: Arc::default(),
    };
    if let Some((listener, coordinator, keeper, waker)) = coordinator {
        let role = Coordinating { coordinator, final_status: server.final_status.clone(), keeper };
        let thread = Thread { name: "coordinator".into(), cpu: None };
        server.threads.start(thread, vec![listener], role, waker)?;
    }
    for core in 0..cores {
        let cpu = server.pinning.cpus.get(core as usize).copied();
        server.data.push(server.threads.start_core(cpu)?);
    }
    Ok(server)
}

impl Server {
    /// Where the coordinator is.
    pub fn coordinator(&self) -> &str {
        self.threads.coordinator()
    }

    /// Where each data core that the server began with is reached.
    pub fn data_addresses(&self) -> &[Addresses] {
        &self.data
    }

    /// The CPU of each of these; empty when they are not pinned.
    pub fn cpus(&self) -> &[usize] {
        &self.pinning.cpus
    }

    /// A sentence about which CPUs data cores are pinned to, or why they are not.
    pub fn pinning(&self) -> String {
        self.pinning.to_string()
    }

    /// Asks all threads to end; frames under way still leave.
    pub fn stop(&self) {
        self.threads.stop();
    }

    /// Whether the job is over, or this server is not needed any more: [`Server::join`] would return at once.
    pub fn is_over(&self) -> bool {
        self.threads.are_over()
    }

    /// The job as its coordinator saw it when it ended well; `None` before, and where another server coordinates it.
    pub fn final_status(&self) -> Option<&Status> {
        self.final_status.get()
    }

    /// Waits until the job is over, or this server was drained. The error is the first that a thread ended with.
    pub fn join(mut self) -> Result<(), String> {
        self.wait()
    }

    /// Like [`Server::join`], for those who ask for more afterwards. A second call returns at once.
    pub fn wait(&mut self) -> Result<(), String> {
        self.threads.wait()
    }
}

fn invalid(sentence: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, sentence)
}

/// The store, once this process may coordinate the job.
fn opened(
    place: &StatePlace,
    address: &str,
    stop: &Arc<AtomicBool>,
    config: &ServerConfig,
) -> io::Result<Box<dyn StateStore>> {
    let store = place.open(address, stop, &config.log);
    let store = store.map_err(|error| invalid(error.to_string()))?;
    store.ok_or_else(|| invalid("stopped before it coordinated the job".into()))
}

/// A coordinator that goes on from what was stored, or begins.
fn remembered(
    store: &mut dyn StateStore,
    place: &StatePlace,
    job: JobConfig,
    config: &ServerConfig,
    registry: &Arc<Registry>,
) -> io::Result<Coordinator> {
    let grace = config.coordinator_grace;
    let fresh = |job| Coordinator::new(job, registry.clone(), random_number()).remembering(grace);
    let Some(state) = store.load().map_err(|error| invalid(error.to_string()))? else {
        return Ok(fresh(job));
    };
    let restored = Coordinator::restore(clock::now(), job.clone(), registry.clone(), grace, &state);
    let restored = restored.map_err(|error| {
        invalid(format!(
            "the state in {place} cannot be used: {error}. Start the job with the options that it had, give another --state, or remove \
             that one"
        ))
    })?;
    if config.cores > 0 && restored.has_plan() {
        let line = format!(
            "the job whose state is in {place} ended with the parameters of this server; it begins anew (`paramill coordinate` runs a \
             coordinator that may die without them)"
        );
        config.log.line(Level::Warn, &line);
        return Ok(fresh(job));
    }
    Ok(restored)
}

/// The coordinator in its loop, which leaves the job's last status behind.
struct Coordinating {
    coordinator: Coordinator,
    /// Stores what it has to know, if anything does.
    keeper: Option<Keeper>,
    final_status: Arc<OnceLock<Status>>,
}

impl RoleCell for Coordinating {
    type Role = Coordinator;

    fn with<T>(&mut self, visit: impl FnOnce(&mut Coordinator) -> T) -> T {
        visit(&mut self.coordinator)
    }

    fn lend(&self) -> Option<&Coordinator> {
        Some(&self.coordinator)
    }

    fn remember(&mut self, state: Vec<u8>) {
        if let Some(keeper) = &mut self.keeper {
            keeper.store(state);
        }
    }

    fn rest(&mut self) -> Rest {
        let Coordinating { coordinator, keeper, .. } = self;
        if keeper.as_mut().is_some_and(Keeper::poll_stored) {
            coordinator.handle_remembered(clock::now());
        }
        if let Some(why) = keeper.as_ref().and_then(Keeper::failure) {
            coordinator.step_down(why.to_owned());
        }
        Rest { has_work: coordinator.backlog_bytes() > 0, next_timeout: coordinator.next_timeout() }
    }

    fn ended(&self, error: Option<&str>) {
        if let Some(keeper) = self.keeper.as_ref().filter(|_| self.coordinator.is_over()) {
            keeper.remove();
        }
        // A role that panicked is not asked any more.
        if error.is_none() {
            let _ = self.final_status.set(self.coordinator.status(clock::now()));
        }
    }
}

/// A server that is dropped ends; so does one that could only be started in part.
impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The address that others are to be told: the bound one, with a host that they can reach instead of `0.0.0.0`.
pub(crate) fn announced(listener: &TcpListener, host: Option<&str>) -> io::Result<String> {
    let bound = listener.local_addr()?;
    // All addresses together are none that others could connect to.
    match host.filter(|host| !host::is_any(host)) {
        Some(host) => Ok(host::with_port(host, bound.port())),
        None if bound.ip().is_unspecified() => {
            // Without a way out there is nobody outside to tell.
            let host = host_towards(ANYWHERE).unwrap_or_else(|_| "127.0.0.1".into());
            Ok(format!("{host}:{}", bound.port()))
        }
        None => Ok(bound.to_string()),
    }
}

/// An address that is nobody's (RFC 5737): the way to it is the way out of this host.
const ANYWHERE: &str = "192.0.2.1:9";

/// The address of this host that packets to `peer` leave from: the one that `peer` can answer to.
pub(crate) fn host_towards(peer: &str) -> io::Result<String> {
    // Of several addresses of a coordinator the first one tells which network it is on.
    let peer = peer.split(',').next().unwrap_or(peer);
    let probe = |family: &str| -> io::Result<String> {
        let socket = UdpSocket::bind(family)?;
        // Connecting a datagram socket only asks the routing table; nothing is sent.
        socket.connect(peer)?;
        Ok(match socket.local_addr()?.ip() {
            std::net::IpAddr::V4(ip) => ip.to_string(),
            std::net::IpAddr::V6(ip) => format!("[{ip}]"),
        })
    };
    probe("0.0.0.0:0").or_else(|_| probe("[::]:0")).map_err(|error| match exhaustion::remedy(&error) {
        Some(_) => error,
        None => {
            let sentence = format!("no route to the coordinator at {peer}: {error}; give --host");
            io::Error::new(error.kind(), sentence)
        }
    })
}

/// A number drawn anew for each call from the operating system's random keys: it tells processes apart, and workers'
/// incarnations follow from one.
pub(crate) fn random_number() -> u64 {
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

#[cfg(test)]
mod tests;
