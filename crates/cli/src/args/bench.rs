//! What can be typed after `paramill bench`.

use super::PolicyArgs;
use crate::duration::Span;
use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use paramill_sim::network::Topology;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// Measure the data path against this machine's own limits.
#[derive(Debug, ClapArgs)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    Exchange(Box<ExchangeArgs>),
    Broadcast(Box<BroadcastArgs>),
    Kernels(KernelArgs),
    Codec(CodecArgs),
}

/// Options of an exchange that are about this machine, its processes and their sockets.
const REAL_EXCHANGE: [&str; 15] = [
    "transport",
    "worker_loops",
    "replicas",
    "copy",
    "congestion",
    "pin",
    "seconds",
    "warmup",
    "rounds",
    "run_with",
    "host",
    "against",
    "python",
    "mxnet_python",
    "timeout",
];

/// Exchange a model between workers and servers, and nothing else.
///
/// Every iteration each worker pushes a gradient of the whole model and pulls the parameters that follow from it,
/// synchronously, with an optimizer step on the servers and no computation (--compute waits one out). Workers and servers are processes of their
/// own. Goodput is workers x 2 x bytes of the model x iterations/s, whatever a codec leaves of them on the way. The machine's
/// limits are measured in between.
///
/// Policies are those of any job, but for --sync, which is bsp; the optimizer is sgd:lr=0.001 unless another one is named. With a
/// codec, gradients and parameters are normal values, and gradients change from iteration to iteration.
#[derive(Debug, ClapArgs)]
#[command(mut_arg("sync", |arg| arg.hide(true)))]
#[command(mut_arg("optimizer", |arg| arg.help("How a gradient changes parameters [default: sgd:lr=0.001]")))]
#[command(after_help = "\
Examples:
  paramill bench exchange
  paramill bench exchange --model vgg19 --workers 4 --servers 2 --cores 1 --json
  paramill bench exchange --elements 262144 --tensors 1 --transport memory
  paramill bench exchange --codec topk:0.01 --answer-codec f16
  paramill bench exchange --model inception_v4 --compute 680ms --send layerwise --json
  paramill bench exchange --sim --model inception_v4 --compute 680ms --workers 4 --servers 4 --cores 1 --colocated
  paramill bench exchange --congestion reno --against gloo --python venv/bin/python")]
pub(crate) struct ExchangeArgs {
    /// The model whose tensors are exchanged [default: resnet50].
    #[arg(long, value_name = "NAME", conflicts_with_all = ["elements", "tensors"])]
    pub(crate) model: Option<String>,
    /// Instead of a model: this many parameters.
    #[arg(long, value_name = "N")]
    pub(crate) elements: Option<u64>,
    /// How many tensors they are cut into [default: 1].
    #[arg(long, value_name = "K", requires = "elements")]
    pub(crate) tensors: Option<u64>,
    /// Tensors of at most this many elements travel together, as one table; 0: every tensor is a table [default: 8192, or 0 with
    /// --compute].
    #[arg(long, value_name = "ELEMENTS", conflicts_with = "compute")]
    pub(crate) pack: Option<u64>,
    /// Wait out a computation of this length in every iteration: forward layer by layer, then backward, each layer by its share of
    /// the model's multiply-accumulates, and the backward pass twice as long as the forward pass.
    #[arg(long, value_name = "TIME", conflicts_with_all = ["elements", "tensors", "copy", "against"])]
    pub(crate) compute: Option<Span>,
    /// With --compute, when gradients leave: each when its layer's backward is done, while a layer's forward waits for its own
    /// parameters only; or all of them at the end, and then all parameters are waited for.
    #[arg(long, value_name = "WHEN", requires = "compute", value_enum)]
    pub(crate) send: Option<Send>,
    /// With --compute, in virtual time over a simulated star of hosts: iterations/s, and nothing about this machine.
    #[arg(long, requires = "compute", help_heading = "Virtual time", conflicts_with_all = REAL_EXCHANGE)]
    pub(crate) sim: bool,
    /// Rate of a simulated host's link, each way [default: 1].
    #[arg(long, value_name = "R", requires = "sim", help_heading = "Virtual time")]
    pub(crate) gbit_per_s: Option<f64>,
    /// Time from one simulated host to another, in microseconds [default: 50].
    #[arg(long, value_name = "T", requires = "sim", help_heading = "Virtual time")]
    pub(crate) latency_us: Option<f64>,
    /// What a port of the simulated switch can hold, as time at the link's rate; TCP fills it, and what is in there cannot be overtaken
    /// [default: 10].
    #[arg(long, value_name = "T", requires = "sim", help_heading = "Virtual time")]
    pub(crate) buffer_ms: Option<f64>,
    /// The largest packet of simulated links, whose headers of Ethernet, IP and TCP take room; 0: without headers [default: 1500].
    #[arg(long, value_name = "BYTES", requires = "sim", help_heading = "Virtual time")]
    pub(crate) mtu: Option<u64>,
    /// Workers.
    #[arg(long, value_name = "W", default_value_t = 2)]
    pub(crate) workers: u32,
    /// Servers.
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub(crate) servers: u32,
    /// Copies of every shard, on another server: 0 or 1. They are made before anything is measured.
    #[arg(long, value_name = "R")]
    pub(crate) replicas: Option<u32>,
    /// Data cores of each server [default: this machine's cores, divided among the servers].
    #[arg(long, value_name = "K")]
    pub(crate) cores: Option<u32>,
    /// How bytes travel. `memory` runs everything as threads of one process.
    #[arg(long, value_name = "T", default_value_t = Transport::Tcp)]
    pub(crate) transport: Transport,
    /// Threads that each worker's connections are spread over [default: as many as help].
    #[arg(long, value_name = "K", value_parser = paramill_node::client::parse_loops)]
    pub(crate) worker_loops: Option<usize>,
    /// Gradients lie in memory of the worker's own and are copied; otherwise they are written where they leave from.
    #[arg(long)]
    pub(crate) copy: bool,
    /// How TCP controls congestion, such as reno, cubic or bbr; for every contender [default: the system's].
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,
    /// Which CPUs data cores are pinned to, as for `serve`: `auto`, `off`, or a list such as 0-3,8.
    #[arg(long, value_name = "CPUS", default_value = "auto")]
    pub(crate) pin: String,
    /// How long each contender is measured in a round.
    #[arg(long, value_name = "X", default_value_t = 2.0, conflicts_with = "iterations")]
    pub(crate) seconds: f64,
    /// Iterations in a round, instead of a time [default with --sim: 10].
    #[arg(long, value_name = "N")]
    pub(crate) iterations: Option<u64>,
    /// How long each contender runs before it is measured, in seconds.
    #[arg(long, value_name = "X", default_value_t = 0.5)]
    pub(crate) warmup: f64,
    /// Rounds. In each, every contender is started, measured and ended; medians are reported.
    #[arg(long, value_name = "R", default_value_t = 5)]
    pub(crate) rounds: u32,
    /// A command to run every process with, in which {} is its number: servers from 0, then workers. With --host it takes
    /// them to network namespaces, as `bench/lab.py exchange` does.
    #[arg(long, value_name = "CMD", requires = "host", conflicts_with = "against")]
    pub(crate) run_with: Option<String>,
    /// Worker i is where server i is: they have one number for --run-with, or with --sim one host.
    #[arg(long)]
    pub(crate) colocated: bool,
    /// The address of a server; once for each [default: 127.0.0.1].
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) host: Vec<String>,
    /// Others that are to do the same work, in turns with us: gloo, mxnet, or ourselves over tcp or shm.
    #[arg(long, value_name = "PEERS", hide_possible_values = true, value_delimiter = ',')]
    pub(crate) against: Vec<PeerName>,
    /// A Python that has PyTorch (gloo) or MXNet.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    pub(crate) python: PathBuf,
    /// A Python that has MXNet, where it is another one.
    #[arg(long, value_name = "PATH")]
    pub(crate) mxnet_python: Option<PathBuf>,
    /// Give up on a wait that lasts longer, and name what was waited for.
    #[arg(long, value_name = "TIME", default_value = "1m")]
    pub(crate) timeout: Span,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
}

/// When gradients leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Send {
    /// As they become ready.
    Layerwise,
    /// After the backward pass.
    End,
}

/// Broadcast versions of a model from servers to all workers, and nothing else.
///
/// A version takes from the first byte that a server sends of it to the last one that a worker receives. It is set against a star, in
/// which servers send everything themselves, and against what the busiest link needs at least for what must cross it in any way.
/// Processes do it, a star and the trees in turns; workers push next to nothing in between. With --sim it is
/// done in virtual time: the roles are those of any job, and frames have the sizes of the model, but not its contents; pushes,
/// computation and the handling of frames take no time.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill bench broadcast --sim --workers 40 --servers 10 --elements 105000000 --broadcast rotated:degree=2
  paramill bench broadcast --sim --workers 40 --servers 10 --broadcast tree:degree=5,depth=3 --oversubscription 8 --json
  paramill bench broadcast --workers 4 --servers 2 --broadcast chain
  bench/lab.py run --hosts 10 --mbit 200 -- paramill bench broadcast --workers 8 --servers 2 --gbit-per-s 0.2 \\
    --run-with '{enter}' --host '{address0}' --host '{address1}'")]
pub(crate) struct BroadcastArgs {
    /// In virtual time.
    #[arg(long)]
    pub(crate) sim: bool,
    /// The trees (see `paramill components`).
    #[arg(long, value_name = "TEXT", default_value = "rotated:degree=2")]
    pub(crate) broadcast: String,
    /// Workers, which receive.
    #[arg(long, value_name = "W", default_value_t = 8)]
    pub(crate) workers: u32,
    /// Servers, each of which has an equal part of the model.
    #[arg(long, value_name = "S", default_value_t = 2)]
    pub(crate) servers: u32,
    /// Data cores of each server.
    #[arg(long, value_name = "K", default_value_t = 1)]
    pub(crate) cores: u32,
    /// Parameters of the model.
    #[arg(long, value_name = "N", default_value_t = 4_000_000)]
    pub(crate) elements: u64,
    /// A filter that leaves out this part of every version, as topk:0.2 does for 0.8: versions have the size that this codec gives them.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub(crate) drop: f64,
    /// Bytes of parameters in a chunk [default: the job's].
    #[arg(long, value_name = "BYTES")]
    pub(crate) chunk: Option<String>,
    /// The simulated network, as in a scenario: three-tier:hosts_per_edge=10,edges_per_aggregation=2 and so on [default: three-tier].
    #[arg(long, value_name = "TEXT", help_heading = "Network")]
    pub(crate) topology: Option<Topology>,
    /// What a rack's hosts can send, over what its uplink carries.
    #[arg(long, value_name = "X", help_heading = "Network")]
    pub(crate) oversubscription: Option<f64>,
    /// Rate of a host's link, each way [default with --sim: 1]. Without --sim, the rate that the links really have: the bound
    /// follows from it, and what the simulator says of this network is printed beside.
    #[arg(long, value_name = "R", help_heading = "Network")]
    pub(crate) gbit_per_s: Option<f64>,
    /// Time from a host to another of its rack, in microseconds [default: 50].
    #[arg(long, value_name = "T", help_heading = "Network")]
    pub(crate) latency_us: Option<f64>,
    /// Everything random in the simulation follows from it [default: 1].
    #[arg(long, value_name = "K", help_heading = "Network")]
    pub(crate) seed: Option<u64>,
    /// Rounds. In each, the processes of both ways are started, measured and ended; medians are reported.
    #[arg(long, value_name = "R", default_value_t = 9, conflicts_with = "sim", help_heading = "Processes")]
    pub(crate) rounds: u32,
    /// Versions of a round that are measured.
    #[arg(long, value_name = "N", default_value_t = 3, conflicts_with = "sim", help_heading = "Processes")]
    pub(crate) versions: u64,
    /// A command to run every process with, in which {} is its number: servers from 0, then workers.
    #[arg(long, value_name = "CMD", requires = "host", conflicts_with = "sim", help_heading = "Processes")]
    pub(crate) run_with: Option<String>,
    /// The address of a server; once for each [default: 127.0.0.1].
    #[arg(long, value_name = "ADDRESS", conflicts_with = "sim", help_heading = "Processes")]
    pub(crate) host: Vec<String>,
    /// How TCP controls congestion [default: the system's].
    #[arg(long, value_name = "NAME", conflicts_with = "sim", help_heading = "Processes")]
    pub(crate) congestion: Option<String>,
    /// Give up on a wait that lasts longer, and name what was waited for.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "1m",
        conflicts_with = "sim",
        help_heading = "Processes"
    )]
    pub(crate) timeout: Span,
}

/// Measure the loops that touch every element: sums of gradients, and steps of every optimizer fused with the last sum.
///
/// Gradients are f32, f16 and bf16, in caches and from memory, on one thread and on all cores. Traffic is every byte
/// that is read or written; from memory it is also given as a fraction of the most that simple loops reach here.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill bench kernels
  paramill bench kernels --optimizer sgd,adam --json")]
pub(crate) struct KernelArgs {
    /// Only these optimizers, by name [default: all].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) optimizer: Vec<String>,
    /// How long each loop is measured in a round.
    #[arg(long, value_name = "X", default_value_t = 0.05)]
    pub(crate) seconds: f64,
    /// Rounds; medians are reported.
    #[arg(long, value_name = "R", default_value_t = 3)]
    pub(crate) rounds: u32,
    /// Elements of each array of each thread that fit in a cache.
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub(crate) cache_elements: usize,
    /// Elements of each array of each thread that fit in no cache.
    #[arg(long, value_name = "N", default_value_t = 16 << 20)]
    pub(crate) memory_elements: usize,
}

/// Measure codecs: how much smaller they make a gradient, how fast on one core, and what they lose.
///
/// A gradient is encoded chunk by chunk as a worker does it, and added to a sum as a server does it. What a codec keeps
/// for later is part of the next round, as in training. Rates are of f32: in when encoding, out when decoding.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill bench codec
  paramill bench codec --codec topk:0.01+f16 --codec bitmap+lz4 --elements 50000000 --json
  paramill bench codec --codec dvf:delta=1e-3+snappy --data gradient.f32")]
pub(crate) struct CodecArgs {
    /// Only these chains [default: the example of every codec].
    #[arg(long, value_name = "C")]
    pub(crate) codec: Vec<String>,
    /// Values to draw.
    #[arg(long, value_name = "N", default_value_t = 10_000_000, conflicts_with = "data")]
    pub(crate) elements: usize,
    /// The part of them that is zero; the others are normal.
    #[arg(long, value_name = "P", default_value_t = 0.8, conflicts_with = "data")]
    pub(crate) sparsity: f64,
    /// A file of values instead: f32, little-endian.
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// Values that are encoded at a time.
    #[arg(long, value_name = "N", default_value_t = paramill_core::limits::BLOCK_ELEMENTS)]
    pub(crate) chunk: usize,
    /// Threads that encode together.
    #[arg(long, value_name = "T", default_value_t = 1)]
    pub(crate) threads: usize,
    /// Rounds; medians are reported.
    #[arg(long, value_name = "R", default_value_t = 3)]
    pub(crate) rounds: u32,
}

/// Others that can do the same work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PeerName {
    /// PyTorch on gloo: DistributedDataParallel with bucket views, and a plain all-reduce.
    Gloo,
    /// MXNet's KVStore `dist_sync`.
    Mxnet,
    /// Ourselves over TCP, with registered buffers.
    Tcp,
    /// Ourselves over shared memory, with registered buffers.
    Shm,
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PeerName::Gloo => "gloo",
            PeerName::Mxnet => "mxnet",
            PeerName::Tcp => "tcp",
            PeerName::Shm => "shm",
        })
    }
}

/// How bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Transport {
    /// Loopback TCP.
    Tcp,
    /// Shared memory between processes.
    Shm,
    /// Queues between threads of one process.
    Memory,
    /// What a job would choose on one host.
    Auto,
}

impl Transport {
    /// What processes are told.
    pub(crate) fn between_processes(self) -> paramill_node::Transport {
        match self {
            Transport::Tcp => paramill_node::Transport::Tcp,
            Transport::Shm => paramill_node::Transport::Shm,
            Transport::Memory | Transport::Auto => paramill_node::Transport::Auto,
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
            Transport::Memory => "memory",
            Transport::Auto => "auto",
        })
    }
}
