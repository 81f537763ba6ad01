//! Runs a server: its data cores, one thread each, and the coordinator when this is the first server of a job, or is elected.

mod coordinating;
mod threads;

use crate::checkpoint::Place;
use crate::exhaustion;
use crate::host;
use crate::log::Log;
use crate::pinning::{Pin, Pinning};
use crate::ports::Ports;
use crate::rate::Rate;
use crate::state_store::{FileStore, Keeper, StatePlace, StateStore};
use crate::topology;
use crate::transport::memory::{Hub, SCHEME};
use crate::transport::shm::SharedAllocator;
use crate::transport::tcp::{self, options::SocketOptions};
use crate::transport::{Dialler, Transport};
use crate::waker::Waker;
use coordinating::{Candidate, Coordinating};
use paramill_core::address::Addresses;
use paramill_core::coordinator::JobConfig;
use paramill_core::fault::FaultPlan;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::status::Status;
use paramill_core::types::{ProcessId, ServerId};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use threads::{CoordinatorPlace, Thread, Threads};

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
    /// Where the server's checkpoints are, if it keeps any, in a folder of its own or one that all servers share; and the copy
    /// of one that the job goes on from.
    pub checkpoints: Place,
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
            checkpoints: Place::default(),
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
        elected: None,
    };
    let process = ProcessId(random_number());
    let job = match &config.coordinate {
        None => None,
        Some(job) => {
            job.check(registry).map_err(|error| invalid(error.to_string()))?;
            let (own_server, own_process) = (config.server, Some(process));
            let (own_server, own_process) = match config.cores {
                0 => (None, None),
                _ => (own_server, own_process),
            };
            let topology = topology::resolved(job.topology.clone());
            Some(JobConfig { own_server, own_process, topology, ..job.clone() })
        }
    };
    let final_status = Arc::<OnceLock<Status>>::default();
    let cores = config.cores;
    let (threads, candidate) = match (job, &config.state) {
        (Some(job), Some(StatePlace::Etcd(place))) => {
            let candidate = Candidate::new(place, job, &config, registry)?;
            let coordinator = CoordinatorPlace {
                dialled: candidate.elected().name().to_owned(),
                announced: candidate.address().to_owned(),
            };
            let dialler = Dialler { elected: Some(candidate.elected().clone()), ..dialler };
            (Threads::new(config, registry.clone(), dialler, coordinator, process)?, Some(candidate))
        }
        (job, _) => (start_first(config, job, registry, dialler, process, &final_status)?, None),
    };
    let mut server = Server { threads, data: Vec::new(), pinning, final_status };
    for core in 0..cores {
        let cpu = server.pinning.cpus.get(core as usize).copied();
        server.data.push(server.threads.start_core(cpu)?);
    }
    if let Some(candidate) = candidate {
        let (threads, last) = (server.threads.clone(), server.final_status.clone());
        server.threads.start_apart("coordinator", move || candidate.run(&threads, &last))?;
    }
    Ok(server)
}

/// The threads of a server, with that of the coordinator if the job is this one's to coordinate.
fn start_first(
    config: ServerConfig,
    job: Option<JobConfig>,
    registry: &Arc<Registry>,
    dialler: Dialler,
    process: ProcessId,
    final_status: &Arc<OnceLock<Status>>,
) -> io::Result<Arc<Threads>> {
    let mut address = match &config.memory {
        Some(_) => format!("{SCHEME}coordinator"),
        None => config.coordinator.clone(),
    };
    let mut coordinator = None;
    if let Some(job) = job {
        let mut store = match &config.state {
            Some(StatePlace::File(path)) => {
                Some(FileStore::open(path).map_err(|error| invalid(error.to_string()))?)
            }
            _ => None,
        };
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
        let known = store.as_mut().map(|store| store as &mut dyn StateStore);
        let role = coordinating::alone(known, job, &config, registry)?;
        let waker = Waker::new()?;
        let keeper = store
            .map(|store| Keeper::start(Box::new(store), waker.clone(), config.log.clone()))
            .transpose()?;
        coordinator = Some((listener, Coordinating::new(role, keeper, final_status.clone()), waker));
    }
    let place = CoordinatorPlace { dialled: address.clone(), announced: address };
    let threads = Threads::new(config, registry.clone(), dialler, place, process)?;
    if let Some((listener, role, waker)) = coordinator {
        let thread = Thread { name: "coordinator".into(), cpu: None, counted: None };
        threads.start(thread, vec![listener], role, waker)?;
    }
    Ok(threads)
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
