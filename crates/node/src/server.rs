//! Runs a server: its data cores, one thread each, and the coordinator when this is the first server of a job.

use crate::clock;
use crate::event_loop::{self, EventLoop, Injection, Owned, RoleCell, Setup};
use crate::transport::memory::{Hub, Mailbox, SCHEME};
use paramill_core::coordinator::{Coordinator, JobConfig};
use paramill_core::fault::FaultPlan;
use paramill_core::registry::Registry;
use paramill_core::server::{Shard, ShardConfig};
use paramill_core::types::ServerId;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// What a server needs to know.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The job's name.
    pub job: String,
    /// The job itself, when this server also coordinates it.
    pub coordinate: Option<JobConfig>,
    /// Where the job's coordinator is (or is to be): `host:port`. Ignored in memory.
    pub coordinator: String,
    /// The host that data cores listen on. `None`: the one that routes to the coordinator.
    pub host: Option<String>,
    /// Data cores.
    pub cores: u32,
    /// The server's number, when it is to have a certain one.
    pub server: Option<ServerId>,
    /// In memory instead of over TCP.
    pub memory: Option<Hub>,
    /// Faults to try.
    pub faults: FaultPlan,
    /// Decides faults with a probability.
    pub seed: u64,
    /// Where log lines go.
    pub log: fn(&str),
}

impl ServerConfig {
    /// A server of `job` that joins the coordinator at `coordinator`, with one data core.
    pub fn new(job: impl Into<String>, coordinator: impl Into<String>) -> ServerConfig {
        ServerConfig {
            job: job.into(),
            coordinate: None,
            coordinator: coordinator.into(),
            host: None,
            cores: 1,
            server: None,
            memory: None,
            faults: FaultPlan::default(),
            seed: 0,
            log: |line| eprintln!("paramill: {line}"),
        }
    }
}

/// A server whose threads run.
#[derive(Debug)]
pub struct Server {
    threads: Vec<JoinHandle<Result<(), String>>>,
    stop: Arc<AtomicBool>,
    mailboxes: Vec<Arc<Mailbox>>,
    coordinator: String,
    data: Vec<String>,
}

/// Starts a server. Ports are bound before this returns, so that a port in use is an error here.
pub fn start(config: ServerConfig, registry: &Arc<Registry>) -> io::Result<Server> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut server = Server {
        threads: Vec::new(),
        stop,
        mailboxes: Vec::new(),
        coordinator: String::new(),
        data: Vec::new(),
    };
    server.coordinator = match &config.memory {
        Some(_) => format!("{SCHEME}coordinator"),
        None => config.coordinator.clone(),
    };
    if let Some(job) = &config.coordinate {
        job.check(registry)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
        let listener = match &config.memory {
            Some(_) => None,
            None => {
                let listener = event_loop::listen(&config.coordinator)?;
                // Port 0 was bound to a real one, which is what others must be told.
                server.coordinator = listener.local_addr()?.to_string();
                Some(listener)
            }
        };
        let coordinator = Coordinator::new(job.clone(), registry.clone());
        let address = server.coordinator.clone();
        server.spawn("coordinator", &config, listener, address, |_| Ok(Owned(coordinator)))?;
    }
    let process = random_number();
    for core in 0..config.cores {
        let (listener, address) = match &config.memory {
            Some(_) => (None, format!("{SCHEME}{process:x}/{core}")),
            None => {
                let host = match &config.host {
                    Some(host) => host.clone(),
                    None => host_towards(&server.coordinator)?,
                };
                let listener = event_loop::listen(&format!("{host}:0"))?;
                let address = listener.local_addr()?.to_string();
                (Some(listener), address)
            }
        };
        let shard = ShardConfig {
            job: config.job.clone(),
            process,
            server: config.server,
            core,
            cores: config.cores,
            address: address.clone(),
            coordinator: server.coordinator.clone(),
        };
        let registry = registry.clone();
        server.data.push(address.clone());
        server.spawn(&format!("data core {core}"), &config, listener, address, move |now| {
            Ok(Owned(Shard::new(now, shard, registry)))
        })?;
    }
    Ok(server)
}

impl Server {
    /// Where the coordinator is.
    pub fn coordinator(&self) -> &str {
        &self.coordinator
    }

    /// Where the data cores are.
    pub fn data_addresses(&self) -> &[String] {
        &self.data
    }

    /// Asks all threads to end; frames under way still leave.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.mailboxes.iter().for_each(|mailbox| mailbox.wake());
    }

    /// Whether all threads have ended.
    pub fn is_finished(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits until the job is over. The error is the first that a thread ended with.
    pub fn join(self) -> Result<(), String> {
        let mut result = Ok(());
        for thread in self.threads {
            let ended = thread.join().unwrap_or_else(|_| Err("a server thread panicked".into()));
            result = result.and(ended);
        }
        result
    }

    fn spawn<C: RoleCell + Send + 'static>(
        &mut self,
        name: &str,
        config: &ServerConfig,
        listener: Option<TcpListener>,
        address: String,
        make: impl FnOnce(paramill_core::types::Time) -> io::Result<C>,
    ) -> io::Result<()> {
        let mailbox = Mailbox::new()?;
        self.mailboxes.push(mailbox.clone());
        let setup = Setup {
            listener,
            hub: config.memory.clone().map(|hub| (hub, Some(address))),
            mailbox,
            stop: self.stop.clone(),
            injection: Injection { plan: config.faults.clone(), seed: config.seed },
            log: config.log,
        };
        let event_loop = EventLoop::new(make(clock::now())?, setup)?;
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || event_loop.run())?;
        self.threads.push(thread);
        Ok(())
    }
}

/// The address of this host that packets to `peer` leave from: the one that `peer` can answer to.
fn host_towards(peer: &str) -> io::Result<String> {
    let probe = |family: &str| -> io::Result<String> {
        let socket = UdpSocket::bind(family)?;
        // Connecting a datagram socket only asks the routing table; nothing is sent.
        socket.connect(peer)?;
        Ok(match socket.local_addr()?.ip() {
            std::net::IpAddr::V4(ip) => ip.to_string(),
            std::net::IpAddr::V6(ip) => format!("[{ip}]"),
        })
    };
    probe("0.0.0.0:0").or_else(|_| probe("[::]:0")).map_err(|error| {
        io::Error::new(error.kind(), format!("no route to the coordinator at {peer}: {error}; give --host"))
    })
}

/// A number that no other process draws; only used to tell processes apart.
pub(crate) fn random_number() -> u64 {
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

/// Waits until a server listens at `address`, or the time is over.
pub fn wait_until_listening(address: &str, timeout: Duration) -> io::Result<()> {
    let deadline = std::time::Instant::now() + timeout;
    loop {
        match std::net::TcpStream::connect(address) {
            Ok(_) => return Ok(()),
            Err(error) if std::time::Instant::now() >= deadline => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}
