//! Others that do the same work, from Python packages that somebody else has installed.

use super::cluster::Cluster;
use super::fleet::Fleet;
use super::plan::Exchange;
use crate::args::{ExchangeArgs, PeerName, Transport};
use crate::supervisor::{Event, Supervisor};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const INSTRUCTIONS: &str = include_str!("peers/instructions.py");
const GLOO: &str = include_str!("peers/gloo.py");
const MXNET: &str = include_str!("peers/mxnet.py");

/// How long an interpreter may take to say whether it has a module.
const IMPORT_DEADLINE: Duration = Duration::from_secs(120);
/// Interpreters that load hundreds of MB take longer to join than our own processes.
const EXTRA_PATIENCE: Duration = Duration::from_secs(60);

/// A peer that can be run here.
#[derive(Debug, Clone)]
pub(super) enum Peer {
    /// A Python package.
    Package(Package),
    /// Ourselves over this transport, with registered buffers.
    Ourselves(Transport),
}

/// Something that an interpreter can run.
#[derive(Debug, Clone)]
pub(super) struct Package {
    kind: Kind,
    version: String,
    python: PathBuf,
}

/// What a package is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// DistributedDataParallel on gloo; gradients are views of its buckets.
    GlooDdp,
    /// One all-reduce of all elements on gloo.
    GlooAllReduce,
    /// MXNet's KVStore `dist_sync`; its servers only add, which is the most that it can be asked for in a comparison.
    Mxnet,
    /// The same with a step of SGD on the servers.
    MxnetSgd,
}

/// What a peer's process is told first.
#[derive(Serialize)]
#[serde(untagged)]
enum PeerTask<'a> {
    Gloo { kind: &'a str, rank: u32, workers: u32, port: u16, timeout_s: f64, shapes: &'a [&'a [u64]] },
    MxnetWorker { role: &'a str, rank: u32, workers: u32, lr: f64, step: bool, shapes: &'a [&'a [u64]] },
    MxnetOther { role: &'a str },
}

impl Peer {
    /// As in the report.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Peer::Ourselves(Transport::Shm) => "paramill_shm",
            Peer::Ourselves(_) => "paramill_tcp",
            Peer::Package(package) => match package.kind {
                Kind::GlooDdp => "gloo",
                Kind::GlooAllReduce => "gloo_all_reduce",
                Kind::Mxnet => "mxnet",
                Kind::MxnetSgd => "mxnet_sgd",
            },
        }
    }

    /// For people.
    pub(super) fn about(&self) -> String {
        match self {
            Peer::Ourselves(transport) => format!("paramill over {transport}, registered buffers"),
            Peer::Package(Package { kind, version, .. }) => match kind {
                Kind::GlooDdp => format!("PyTorch {version} DDP on gloo, bucket view"),
                Kind::GlooAllReduce => format!("PyTorch {version} all-reduce on gloo, one tensor"),
                Kind::Mxnet => format!("MXNet {version} dist_sync, sum only"),
                Kind::MxnetSgd => format!("MXNet {version} dist_sync, SGD step"),
            },
        }
    }

    /// Starts its processes for this exchange.
    pub(super) fn start(&self, exchange: &Exchange) -> Result<Cluster> {
        match self {
            Peer::Package(package) => package.start(exchange),
            Peer::Ourselves(transport) => {
                Cluster::start(&Exchange { transport: *transport, copy: false, ..exchange.clone() })
            }
        }
    }
}

/// The peers that were asked for; the error says what to install.
pub(super) fn find(args: &ExchangeArgs) -> Result<Vec<Peer>> {
    let mut peers = Vec::new();
    for name in &args.against {
        let (python, module, packages, kinds): (_, _, _, &[Kind]) = match name {
            PeerName::Tcp => {
                peers.push(Peer::Ourselves(Transport::Tcp));
                continue;
            }
            PeerName::Shm => {
                peers.push(Peer::Ourselves(Transport::Shm));
                continue;
            }
            PeerName::Gloo => (&args.python, "torch", "torch numpy", &[Kind::GlooDdp, Kind::GlooAllReduce]),
            PeerName::Mxnet => (
                args.mxnet_python.as_ref().unwrap_or(&args.python),
                "mxnet",
                "'mxnet==1.9.1' 'numpy<1.24' (it needs Python 3.8)",
                &[Kind::Mxnet, Kind::MxnetSgd],
            ),
        };
        let version = version(python, module).with_context(|| {
            format!("--against {name}: {0} cannot be used; {0} -m pip install {packages}", python.display())
        })?;
        let package = |kind: &Kind| Package { kind: *kind, version: version.clone(), python: python.clone() };
        peers.extend(kinds.iter().map(|kind| Peer::Package(package(kind))));
    }
    Ok(peers)
}

/// The version of a module, or what the interpreter said instead.
fn version(python: &Path, module: &str) -> Result<String> {
    let mut command = Command::new(python);
    command.args(["-W", "ignore", "-c", &format!("import {module}; print({module}.__version__)")]);
    let mut processes = Supervisor::new();
    processes.spawn(format!("{}", python.display()), command, "")?;
    let deadline = Instant::now() + IMPORT_DEADLINE;
    let (mut version, mut complaint) = (None, None);
    loop {
        match processes.next(deadline.saturating_duration_since(Instant::now())) {
            Some(Event::Out { line, .. }) => version = Some(line),
            Some(Event::Error { line, .. }) => complaint = Some(line),
            Some(Event::Exited { status, .. }) => {
                return match version {
                    Some(version) if status.success() => Ok(version),
                    _ => bail!("{}", complaint.unwrap_or_else(|| format!("it ended ({status})"))),
                };
            }
            None => bail!("`import {module}` took more than {} s", IMPORT_DEADLINE.as_secs()),
        }
    }
}

impl Package {
    fn start(&self, exchange: &Exchange) -> Result<Cluster> {
        let shapes: Vec<&[u64]> = exchange.tensors.iter().map(|tensor| &tensor.shape[..]).collect();
        let mut fleet = Fleet::new();
        let port = free_port()?;
        let (servers, workers) = match self.kind {
            Kind::GlooDdp => (Vec::new(), self.start_gloo("ddp", exchange, &shapes, port, &mut fleet)?),
            Kind::GlooAllReduce => {
                (Vec::new(), self.start_gloo("all_reduce", exchange, &shapes, port, &mut fleet)?)
            }
            Kind::Mxnet | Kind::MxnetSgd => self.start_mxnet(exchange, &shapes, port, &mut fleet)?,
        };
        let workers = workers.into_iter().map(|process| (process, 1)).collect();
        Ok(Cluster { fleet, servers, workers, timeout: exchange.timeout + EXTRA_PATIENCE })
    }

    fn start_gloo(
        &self,
        kind: &str,
        exchange: &Exchange,
        shapes: &[&[u64]],
        port: u16,
        fleet: &mut Fleet,
    ) -> Result<Vec<usize>> {
        let workers = exchange.workers;
        let timeout_s = exchange.timeout.as_secs_f64();
        let mut worker = |rank| {
            let mut command = self.python(GLOO);
            // One thread each, as PyTorch's own launcher has it where several processes share a machine.
            command.env("GLOO_SOCKET_IFNAME", "lo").env("OMP_NUM_THREADS", "1");
            command.env("TORCH_CPP_LOG_LEVEL", "ERROR");
            let task = PeerTask::Gloo { kind, rank, workers, port, timeout_s, shapes };
            fleet.start_program(format!("gloo worker {rank}"), command, &task)
        };
        (0..workers).map(&mut worker).collect()
    }

    fn start_mxnet(
        &self,
        exchange: &Exchange,
        shapes: &[&[u64]],
        port: u16,
        fleet: &mut Fleet,
    ) -> Result<(Vec<usize>, Vec<usize>)> {
        let (workers, step) = (exchange.workers, self.kind == Kind::MxnetSgd);
        let mut start = |name: String, task: PeerTask<'_>| {
            let mut command = self.python(MXNET);
            command
                .env("DMLC_PS_ROOT_URI", "127.0.0.1")
                .env("DMLC_PS_ROOT_PORT", port.to_string())
                .env("DMLC_NODE_HOST", "127.0.0.1")
                .env("DMLC_NUM_WORKER", workers.to_string())
                .env("DMLC_NUM_SERVER", exchange.servers.to_string());
            fleet.start_program(name, command, &task)
        };
        let mut servers = Vec::new();
        for number in 0..exchange.servers {
            servers.push(start(format!("mxnet server {number}"), PeerTask::MxnetOther { role: "server" })?);
        }
        servers.push(start("mxnet scheduler".to_owned(), PeerTask::MxnetOther { role: "scheduler" })?);
        let worker = |rank| {
            let task = PeerTask::MxnetWorker { role: "worker", rank, workers, lr: 0.001, step, shapes };
            start(format!("mxnet worker {rank}"), task)
        };
        Ok((servers, (0..workers).map(worker).collect::<Result<_>>()?))
    }

    fn python(&self, script: &str) -> Command {
        let mut command = Command::new(&self.python);
        command.args(["-W", "ignore", "-c", &format!("{INSTRUCTIONS}\n{script}")]);
        command
    }
}

/// A port that nobody has at the moment.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no port is free")?;
    Ok(listener.local_addr()?.port())
}
