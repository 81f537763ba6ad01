//! What was typed. What it means is worked out in [`crate::plan`].

mod bench;
mod chaos;
mod checkpoint;
mod job;

pub(crate) use bench::{
    BenchArgs, BenchCommand, BroadcastArgs, CodecArgs, ExchangeArgs, KernelArgs, PeerName, Send, Transport,
};
pub(crate) use chaos::{ChaosArgs, ChaosProcessArgs};
pub(crate) use checkpoint::CheckpointArgs;
pub(crate) use job::{JobArgs, PolicyArgs};

use crate::duration::Span;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args as ClapArgs, Parser, Subcommand};
use paramill_core::policy::Axis;
use paramill_node::pinning::Pin;
use paramill_node::ports::Ports;
use paramill_node::rate::Rate;
use std::path::PathBuf;

/// A parameter server: many workers train one model over ordinary networks.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, after_help = TOP_EXAMPLES)]
pub(crate) struct Args {
    /// Print the result as one JSON object on stdout.
    #[arg(long, global = true, display_order = 1000)]
    pub(crate) json: bool,
    /// Show no progress.
    #[arg(long, short, global = true, display_order = 1001)]
    pub(crate) quiet: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Args {
    /// Reads the command line. Where it cannot be read, this says why and ends the process.
    pub(crate) fn read() -> Args {
        Args::try_parse().unwrap_or_else(|error| {
            // Only to be shown: a word that is not UTF-8 may lose something by it.
            let words: Vec<String> =
                std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
            with_advice(error, &words).exit()
        })
    }
}

/// Says what was probably meant.
fn with_advice(mut error: clap::Error, words: &[String]) -> clap::Error {
    let Some(ContextValue::String(stray)) = error.get(ContextKind::InvalidArg) else { return error };
    let advice = match words.get(1).map(String::as_str) {
        Some("launch") => launch_advice(stray, words),
        Some("set") => set_advice(stray),
        _ => None,
    };
    if let Some(advice) = advice.filter(|_| error.kind() == ErrorKind::UnknownArgument) {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![advice.into()]));
    }
    error
}

/// The command of `launch` comes after `--`, which is easily forgotten.
fn launch_advice(stray: &str, words: &[String]) -> Option<String> {
    if stray.starts_with('-') || words.iter().any(|word| word == "--") {
        return None;
    }
    let place = words.iter().position(|word| word == stray)?;
    let (options, command) = (words[1..place].join(" "), words[place..].join(" "));
    Some(format!("put `--` before the command: paramill {options} -- {command}"))
}

/// Policies are options of other commands.
fn set_advice(stray: &str) -> Option<String> {
    let name = stray.strip_prefix("--")?.split('=').next()?.replace('-', "_");
    let axis = Axis::named(&name).ok()?;
    Some(format!("say it without dashes: paramill set URL {axis}=TEXT"))
}

const TOP_EXAMPLES: &str = "\
Examples:
  paramill train                            the MLP on made data: 4 workers, 2 servers, one process
  paramill train lr --sync ssp:s=3 --processes
  paramill components                       every name that --sync, --placement, --optimizer take
  paramill doctor                           what this machine can do, and what is in the way";

/// One command each; `paramill COMMAND --help` teaches it by example.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Train(TrainArgs),
    Config(ConfigArgs),
    Reproduce(ReproduceArgs),
    Serve(ServeArgs),
    Coordinate(CoordinateArgs),
    Aggregate(AggregateArgs),
    Launch(LaunchArgs),
    Status(StatusArgs),
    Subscribe(SubscribeArgs),
    Set(SetArgs),
    Drain(DrainArgs),
    Rebalance(RebalanceArgs),
    #[command(name = "checkpoint")]
    Save(SaveArgs),
    Components(ComponentsArgs),
    Sim(SimArgs),
    Bench(BenchArgs),
    Chaos(ChaosArgs),
    Doctor(DoctorArgs),
    /// A worker process of `train --processes`: its plan comes on stdin.
    #[command(name = "worker-process", hide = true)]
    WorkerProcess,
    /// Ends the process groups that it is told of on stdin when its parent ends.
    #[command(name = "keeper-process", hide = true)]
    KeeperProcess,
    /// A process of `bench`: its part comes on stdin.
    #[command(name = "bench-process", hide = true)]
    BenchProcess,
    /// A worker process of `chaos tags`.
    #[command(name = "chaos-process", hide = true)]
    ChaosProcess(ChaosProcessArgs),
}

/// Train a model and report what came of it.
///
/// Workers and servers run in this process, or as processes of their own with --processes. The report has the loss, the metric on held-out data, steps per second, bytes, staleness, and delayed pulls (DPRs).
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill train
  paramill train lr --data a9a.gz --test a9a.t.gz --workers 4 --sync pssp:s=3,c=0.5 --processes
  paramill train mlp --inject 'worker=2:slow=4x' --sync drop:n=3
  paramill train --config job.toml --seed 7 --json

The same job as a file: paramill config [the same options] > job.toml")]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Draw the loss over time as SVG.
    #[arg(long, value_name = "FILE.svg", help_heading = None)]
    pub(crate) plot: Option<PathBuf>,
    /// Start worker processes that fail anew, up to this many times in all; needs --processes.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Cluster")]
    pub(crate) restart: u32,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
}

/// Print the job that these options mean, as TOML.
///
/// Options win over the file given with --config, which wins over the defaults of the workload. What is printed can
/// be given back with --config and means the same job.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill config                           the defaults
  paramill config lr --sync asp > job.toml
  paramill train --config job.toml")]
pub(crate) struct ConfigArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
}

/// Set up parts of a published experiment: each claim of the paper, its figure beside ours, and whether it holds.
///
/// A claim is judged at the paper's own figure. One that cannot be judged here, because nothing is trained, the size is
/// another, or the figure is an input, says so.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill reproduce --list
  paramill reproduce fluentps-fig9 --seeds 3 --plot fig9.svg
  paramill reproduce psp-table1 --json | jq '.claims[] | select(.holds == false)'")]
pub(crate) struct ReproduceArgs {
    /// Which experiment; --list names them.
    #[arg(required_unless_present = "list")]
    pub(crate) name: Option<String>,
    /// List the experiments that can be set up.
    #[arg(long, conflicts_with = "name")]
    pub(crate) list: bool,
    /// Draw the figures as SVG.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Everything random follows from it [default: 1].
    #[arg(long, conflicts_with = "list")]
    pub(crate) seed: Option<u64>,
    /// Run everything with so many seeds, the first being --seed, and judge claims over all of them [default: 1].
    #[arg(long, value_name = "N", conflicts_with = "list", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) seeds: Option<u64>,
}

/// Run a server.
///
/// The first server of a job also coordinates it: it knows who takes part and where parameters live. Further servers
/// and workers join by its URL, in any order. There is no authentication yet: whoever reaches its ports can read and change
/// parameters and end the job.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill serve --workers 8 --servers 2 --sync ssp:s=3   for this machine only
  paramill serve --host 10.0.0.1                          for others that reach this address
  paramill serve --host 10.0.0.1 --host 10.1.0.1          two interfaces, both used
  paramill serve --host 10.0.0.1 --cores 4 --ports 7100-7103   behind a firewall
  paramill serve --join paramill://10.0.0.1:7070/job")]
pub(crate) struct ServeArgs {
    /// Where the job is to be found [default: port 7070 of the first --host, or of 127.0.0.1].
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "join")]
    pub(crate) listen: Option<String>,
    /// The job's name, the last part of its URL.
    #[arg(long, value_name = "NAME", default_value = "job", conflicts_with = "join")]
    pub(crate) job: String,
    /// Join the job of another server instead of starting one.
    #[arg(long, value_name = "URL", conflicts_with_all = ["config", "workers", "servers"])]
    pub(crate) join: Option<String>,
    /// An address of this machine to listen on and announce, for other machines to reach; 0.0.0.0 is all of them. May be
    /// repeated, and workers then spread their connections over all [default: 127.0.0.1, or the one that routes to the job].
    #[arg(long, value_name = "HOST")]
    pub(crate) host: Vec<String>,
    /// Ports of the data cores, such as 7100-7115, one each and the same on every --host; those in use are passed over
    /// [default: the system chooses].
    #[arg(long, value_name = "A-B")]
    pub(crate) ports: Option<Ports>,
    /// TCP's congestion control [default: reno within a host, the system's beyond it]. Workers take theirs, and servers
    /// without this option too, from PARAMILL_CONGESTION.
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,
    /// What this server sends at most over TCP, such as 800Mbit: a leaky bucket that its data cores share [default: no limit].
    #[arg(long, value_name = "RATE")]
    pub(crate) rate: Option<Rate>,
    /// This server's number [default: in the order of joining].
    #[arg(long, value_name = "ID")]
    pub(crate) index: Option<u32>,
    /// Workers of the job [default: 4].
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<u32>,
    /// Servers of the job, this one included [default: 2].
    #[arg(long, value_name = "M")]
    pub(crate) servers: Option<u32>,
    /// Copies of every shard that are kept on other servers, 0 or 1: with one the job survives the death of any one server; of the one
    /// that coordinates it where --state lets it, or another, go on [default: 0].
    #[arg(long, value_name = "R", conflicts_with = "join")]
    pub(crate) replicas: Option<u32>,
    /// A worker or server that lives and makes no progress for so long while others wait for it is left behind: a worker is declared dead, a
    /// server's copies take over [default: it is only named].
    #[arg(long, value_name = "TIME", conflicts_with = "join")]
    pub(crate) progress_timeout: Option<Span>,
    /// Data cores of this server [default: by the CPUs that it may use, less those of the job's workers and other servers
    /// if it listens on loopback]. Each has a shard of the parameters, which may move to servers that join later: give more than
    /// CPUs where some are expected.
    #[arg(long, value_name = "K")]
    pub(crate) cores: Option<u32>,
    /// How workers exchange gradients and parameters with this server: auto, tcp or shm [default: auto, which is shared
    /// memory with workers of this host and TCP with others].
    #[arg(long, value_name = "T")]
    pub(crate) transport: Option<paramill_node::Transport>,
    /// Which CPUs data cores are pinned to: `auto` (if there are more CPUs than data cores), `off`, or a list such as
    /// 0-3,8, one for each.
    #[arg(long, value_name = "CPUS", default_value = "auto")]
    pub(crate) pin: Pin,
    /// Which hosts are below which switches, in TOML, for the trees of --broadcast.
    #[arg(long, value_name = "FILE", conflicts_with = "join")]
    pub(crate) topology: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
    /// A fault to try, as for `train`.
    #[arg(long, value_name = "FAULT")]
    pub(crate) inject: Vec<String>,
    /// Everything random follows from it.
    #[arg(long, value_name = "K")]
    pub(crate) seed: Option<u64>,
    /// A job in TOML, or `-` for stdin; other options win over it.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// How long the job waits for workers that died to be started anew, where it cannot go on without them: all died, or worker
    /// 0 before its initial values had arrived.
    #[arg(long, value_name = "TIME", default_value = "0s", conflicts_with = "join")]
    pub(crate) restart_grace: Span,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[arg(long, hide = true)]
    pub(crate) end_with_parent: bool,
}

/// What a coordinator keeps for the process that takes its place.
#[derive(Debug, Clone, ClapArgs)]
pub(crate) struct MemoryArgs {
    /// Where the coordinator keeps what it has to know when it is started anew: a file, etcd://HOST:PORT/PREFIX, or none [default: a
    /// file below $XDG_STATE_HOME/paramill or ~/.local/state/paramill; none if the system chooses the port].
    #[arg(long, value_name = "PLACE")]
    pub(crate) state: Option<String>,
    /// How long the others go on training without a coordinator that keeps its state, before they give it up [default: 10m].
    #[arg(long, value_name = "TIME")]
    pub(crate) coordinator_grace: Option<Span>,
}

/// Run the coordinator of a job alone, without parameters: it may die and be started again with the same command.
///
/// The job goes on training meanwhile. Servers join it with `paramill serve --join`. With --state etcd://.. several may be started, on
/// several hosts: one of them coordinates the job, and another takes its place when that one is gone. Give the addresses of all of them
/// to servers and workers: paramill://10.0.0.1:7070,10.0.0.2:7070/job.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill coordinate --workers 4 --servers 2
  paramill serve --join paramill://127.0.0.1:7070/job                       twice
  paramill coordinate --host 10.0.0.1 --state etcd://10.0.0.9:2379/jobs/a   on several hosts")]
pub(crate) struct CoordinateArgs {
    /// Where the job is to be found [default: port 7070 of --host, or of 127.0.0.1].
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// The job's name, the last part of its URL.
    #[arg(long, value_name = "NAME", default_value = "job")]
    pub(crate) job: String,
    /// An address of this machine to listen on and announce, for other machines to reach; 0.0.0.0 is all of them [default: 127.0.0.1].
    #[arg(long, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Workers of the job [default: 4].
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<u32>,
    /// Servers of the job [default: 2].
    #[arg(long, value_name = "M")]
    pub(crate) servers: Option<u32>,
    /// Which hosts are below which switches, in TOML, for the trees of --broadcast.
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    /// Everything random follows from it.
    #[arg(long, value_name = "K")]
    pub(crate) seed: Option<u64>,
    /// A job in TOML, or `-` for stdin; other options win over it.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// How long the job waits for workers that died to be started anew, where it cannot go on without them: all died, or worker
    /// 0 before its initial values had arrived.
    #[arg(long, value_name = "TIME", default_value = "0s")]
    pub(crate) restart_grace: Span,
    /// A worker or server that lives and makes no progress for so long while others wait for it is left behind: a worker is declared dead, a
    /// server's copies take over [default: it is only named].
    #[arg(long, value_name = "TIME")]
    pub(crate) progress_timeout: Option<Span>,
    /// Copies of each shard that are kept on other servers: 1, or 0 for none [default: 0].
    #[arg(long, value_name = "R")]
    pub(crate) replicas: Option<u32>,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// Add up the gradients of the workers of a host or rack on their way to the servers.
///
/// Servers get one sum where several workers pushed, and send parameters once for all of them where the job broadcasts them
/// (--broadcast star). They still learn of every worker's progress, so that consistency models mean the same. Workers go
/// through it when they are told to: PARAMILL_AGGREGATOR=HOST:PORT in their environment.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill aggregate --job paramill://10.0.0.1:7070/job                    for workers of this machine
  paramill aggregate --job paramill://10.0.0.1:7070/job --host 10.0.1.1    for others that reach this address
  paramill train --processes --workers 4 --aggregators 2 --broadcast star")]
pub(crate) struct AggregateArgs {
    /// The job: paramill://HOST:PORT/JOB, or HOST:PORT.
    #[arg(long, value_name = "URL")]
    pub(crate) job: String,
    /// Where workers come in [default: port 7071 of --host, or of 127.0.0.1].
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "host")]
    pub(crate) listen: Option<String>,
    /// An address of this machine that workers of other machines reach; 0.0.0.0 is all of them.
    #[arg(long, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Threads, each for a share of the servers' data cores. Further ones listen on the ports that follow.
    #[arg(long, value_name = "K", default_value_t = 1)]
    pub(crate) cores: u32,
    /// Go to the servers through another aggregator, which adds up the sums of several: the address that it prints, as for
    /// PARAMILL_AGGREGATOR.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) through: Option<String>,
    /// How long a complete push waits for those of other workers. Under bsp, where every round waits for all of them
    /// anyway, it waits until none has come in for 1s.
    #[arg(long, value_name = "TIME", default_value = "5ms")]
    pub(crate) hold: Span,
    /// TCP's congestion control [default: reno within a host, the system's beyond it].
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,
    /// What this aggregator sends at most over TCP, such as 800Mbit [default: no limit].
    #[arg(long, value_name = "RATE")]
    pub(crate) rate: Option<Rate>,
    /// How workers come in and servers are reached: auto, tcp or shm [default: auto, which is shared memory within a
    /// host].
    #[arg(long, value_name = "T")]
    pub(crate) transport: Option<paramill_node::Transport>,
    /// This aggregator's number [default: in the order of joining].
    #[arg(long, value_name = "ID")]
    pub(crate) index: Option<u32>,
    /// A fault to try, as for `train`.
    #[arg(long, value_name = "FAULT")]
    pub(crate) inject: Vec<String>,
    /// Everything random follows from it.
    #[arg(long, value_name = "K", default_value_t = 1)]
    pub(crate) seed: u64,
    #[arg(long, hide = true)]
    pub(crate) end_with_parent: bool,
}

/// Start servers and N copies of a command as workers.
///
/// Each copy finds its identity in the environment, and its share of the CPUs in OMP_NUM_THREADS unless that is set.
/// Output is forwarded with a prefix. The first that fails ends all, and is named. What a copy started ends with the job.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill launch -n 4 -s 2 -- ./my-worker --epochs 3
  paramill launch -n 4 --json --inject 'worker=2:pause=2s@5s' -- ./my-worker   who was waited for, as JSON")]
pub(crate) struct LaunchArgs {
    /// Workers: copies of the command.
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) workers: u32,
    /// Servers.
    #[arg(short = 's', long, value_name = "M", default_value_t = 1)]
    pub(crate) servers: u32,
    /// Copies of every shard that are kept on other servers, 0 or 1: with one the job survives the death of a server other than the
    /// first [default: 0].
    #[arg(long, value_name = "R")]
    pub(crate) replicas: Option<u32>,
    /// A worker or server that lives and makes no progress for so long while others wait for it is left behind: a worker is declared dead, a
    /// server's copies take over [default: it is only named].
    #[arg(long, value_name = "TIME")]
    pub(crate) progress_timeout: Option<Span>,
    /// Data cores of each server [default: by the CPUs that servers and workers share].
    #[arg(long, value_name = "K")]
    pub(crate) cores: Option<u32>,
    /// Aggregators that workers go through, shared out by rank [default: none].
    #[arg(long, value_name = "A")]
    pub(crate) aggregators: Option<u32>,
    /// How workers and servers exchange gradients and parameters: auto, tcp or shm [default: auto, which is shared
    /// memory].
    #[arg(long, value_name = "T")]
    pub(crate) transport: Option<paramill_node::Transport>,
    /// What every server and worker sends at most, such as 800Mbit: a leaky bucket for each. Needs --transport tcp, which is the
    /// default with it [default: no limit].
    #[arg(long, value_name = "RATE")]
    pub(crate) rate: Option<Rate>,
    /// Threads that each worker's connections are spread over [default: half of the CPUs divided by the workers, up to 8].
    #[arg(long, value_name = "K", value_parser = paramill_node::client::parse_loops)]
    pub(crate) loops: Option<usize>,
    /// A fault to try, such as 'server=1:pause=2s@10s' or 'worker=2:delay=20ms'; may be given several times. The computation of
    /// the command cannot be slowed.
    #[arg(long, value_name = "FAULT")]
    pub(crate) inject: Vec<String>,
    /// Start workers that fail anew, up to this many times in all. They join the job that runs.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) restart: u32,
    /// Which hosts are below which switches, in TOML, for the trees of --broadcast.
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// Show what a running job is doing, and what it waits for.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill status paramill://127.0.0.1:7070/job
  paramill status 127.0.0.1:7070 --json")]
pub(crate) struct StatusArgs {
    /// The job: paramill://HOST:PORT/JOB, or HOST:PORT, whatever the job there is called.
    pub(crate) url: String,
}

/// Have a running job make a checkpoint, and wait until that is complete.
///
/// It is made where the job's servers keep them (--checkpoint DIR), or copied to a file of this machine, also where they keep none.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill checkpoint paramill://127.0.0.1:7070/job
  paramill checkpoint paramill://127.0.0.1:7070/job model.safetensors
  paramill serve --resume model.safetensors")]
pub(crate) struct SaveArgs {
    /// The job: paramill://HOST:PORT/JOB, or HOST:PORT, whatever the job there is called.
    pub(crate) url: String,
    /// Copy it to this file, in the format of safetensors. A file that is there stays until the new one is whole.
    pub(crate) file: Option<PathBuf>,
    /// Give up when it takes longer.
    #[arg(long, value_name = "TIME", default_value = "10m")]
    pub(crate) timeout: Span,
}

/// Keep the newest version of a job's parameters in a file.
///
/// The job must broadcast them (--broadcast). Each version is whole: of one number over all tables and servers. It takes the place of the one before at once, so that a reader of the file never sees a part. The metadata has the version and the job's URL.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill subscribe paramill://127.0.0.1:7070/job --out model.safetensors
  paramill subscribe paramill://127.0.0.1:7070/job --out model.safetensors --every 30s
  paramill subscribe paramill://127.0.0.1:7070/job --out model.safetensors --once --json")]
pub(crate) struct SubscribeArgs {
    /// The job: paramill://HOST:PORT/JOB.
    pub(crate) url: String,
    /// The file, in the format of safetensors.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Write one version and end.
    #[arg(long, conflicts_with = "every")]
    pub(crate) once: bool,
    /// Write at most one version in this time.
    #[arg(long, value_name = "TIME", default_value = "0s")]
    pub(crate) every: Span,
    /// How long to wait for the job to start, and for its first version.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub(crate) timeout: Span,
}

/// Change policies of a running job.
///
/// Whatever can change while a job runs changes; of the rest it says why not.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill set 127.0.0.1:7070 sync=ssp:s=5
  paramill set 127.0.0.1:7070 sync=asp --table 'conv*' --server 1
  paramill set 127.0.0.1:7070 optimizer=adamw:lr=1e-4 sync=bsp")]
pub(crate) struct SetArgs {
    /// The job: paramill://HOST:PORT/JOB, or HOST:PORT, whatever the job there is called.
    pub(crate) url: String,
    /// What holds from now on: the name of a policy, as its option is called, and its text.
    #[arg(value_name = "AXIS=TEXT", required = true)]
    pub(crate) changes: Vec<String>,
    /// Only tables whose name matches (`*` and `?`).
    #[arg(long, value_name = "GLOB", default_value = "*")]
    pub(crate) table: String,
    /// Only on this server.
    #[arg(long, value_name = "ID")]
    pub(crate) server: Option<u32>,
}

/// Move everything away from a server of a running job, whose process then ends.
///
/// Its shards move to the job's other servers, one after the other, while workers train on. `paramill status` tells how far that is.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill drain paramill://127.0.0.1:7070/job --server 1
  paramill drain 127.0.0.1:7070 --server 1 --json")]
pub(crate) struct DrainArgs {
    /// The job: paramill://HOST:PORT/JOB, or HOST:PORT, whatever the job there is called.
    pub(crate) url: String,
    /// The server's number, as `paramill status` says it.
    #[arg(long, value_name = "ID")]
    pub(crate) server: u32,
}

/// Spread a running job's shards over its servers anew.
///
/// Shards move from servers that carry more to servers that carry less, one after the other, while workers train on: by the bytes that each
/// was sent and sent in the last half minute, or by its size where that is not known yet. As few bytes move as that takes. Servers that come,
/// are drained or stay overloaded have the same done without this command. `paramill status` tells how far it is.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill rebalance paramill://127.0.0.1:7070/job
  paramill rebalance 127.0.0.1:7070 --json")]
pub(crate) struct RebalanceArgs {
    /// The job: paramill://HOST:PORT/JOB, or HOST:PORT, whatever the job there is called.
    pub(crate) url: String,
}

/// List every component that can be named, with its parameters.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill components
  paramill components ssp                   one of them, in full
  paramill components --json")]
pub(crate) struct ComponentsArgs {
    /// Only this component, or this axis.
    pub(crate) name: Option<String>,
}

/// Run jobs in virtual time, with faults.
#[derive(Debug, ClapArgs)]
pub(crate) struct SimArgs {
    #[command(subcommand)]
    pub(crate) command: SimCommand,
}

/// What to simulate.
#[derive(Debug, Subcommand)]
pub(crate) enum SimCommand {
    Swarm(SwarmArgs),
    Run(ScenarioArgs),
    Train(LessonArgs),
}

/// Draw whole worlds from seeds and look for broken promises.
///
/// A world is a cluster, a network, faults and a job. Each is checked for lost or doubled pushes, staleness above the
/// bound, replicas that differ, memory without bound, and no progress after healing. Exit code 3 tells of a broken
/// promise about the data, 5 of a panic, 4 of a lack of progress; of several findings the worst decides, in this order.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill sim swarm --seeds 500
  paramill sim swarm --seed 4711            one world again, and what is in it
  paramill sim swarm --seed 4711 --trace    and every frame
  paramill sim swarm --canary               plants a bug, which must be found")]
pub(crate) struct SwarmArgs {
    /// How many worlds.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) seeds: u64,
    /// The first seed; the others follow it.
    #[arg(long, value_name = "K", default_value_t = 1)]
    pub(crate) first: u64,
    /// Only the world of this seed.
    #[arg(long, value_name = "K", conflicts_with = "seeds")]
    pub(crate) seed: Option<u64>,
    /// Print every frame of that world on stderr, as it is sent (->) and handled (>>).
    #[arg(long, requires = "seed", conflicts_with = "canary")]
    pub(crate) trace: bool,
    /// Plant bugs, each of which the checkers must find.
    #[arg(long)]
    pub(crate) canary: bool,
}

/// Run a scenario file.
///
/// Exit code 1 tells that not all workers finished, 4 that the run was given up because none of them made progress any
/// more.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill sim run straggler.toml --seed 3
  paramill sim run straggler.toml --sockets          the same over real sockets")]
pub(crate) struct ScenarioArgs {
    /// The scenario, in TOML.
    pub(crate) scenario: PathBuf,
    /// Instead of the scenario's own seed.
    #[arg(long, value_name = "K")]
    pub(crate) seed: Option<u64>,
    /// Run it in real time over loopback TCP instead. Under bsp and ranked order the parameters end the same, bit for
    /// bit. The scenario's network is not used; its computation times are waited for.
    #[arg(long)]
    pub(crate) sockets: bool,
}

/// Train a workload in virtual time.
///
/// Workers compute real gradients of real batches. How long that takes, the network, stragglers and faults are those of the
/// scenario, in virtual time: accuracy against time, for any number of workers and any network, on one machine. A run is a function of its seed.
///
/// Exit codes are those of `sim run`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill sim train cnn.toml --data fashion-mnist
  paramill sim train cnn.toml --data fashion-mnist --sync ssp:s=3 --workers 32 --json")]
pub(crate) struct LessonArgs {
    /// The scenario, in TOML, with a table `workload`.
    pub(crate) scenario: PathBuf,
    /// Where the workload's data is, instead of the scenario's.
    #[arg(long, value_name = "PATH")]
    pub(crate) data: Option<PathBuf>,
    /// Held-out data of the same kind, instead of the scenario's.
    #[arg(long, value_name = "PATH")]
    pub(crate) test: Option<PathBuf>,
    /// Times to go through the data, instead of the scenario's.
    #[arg(long, value_name = "E", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) epochs: Option<u64>,
    /// Train on at most this many examples, or make this many, instead of the scenario's.
    #[arg(long, value_name = "N")]
    pub(crate) examples: Option<usize>,
    /// Instead of the scenario's own number.
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<u32>,
    /// Instead of the scenario's own number.
    #[arg(long, value_name = "M")]
    pub(crate) servers: Option<u32>,
    /// Instead of the scenario's own seed.
    #[arg(long, value_name = "K")]
    pub(crate) seed: Option<u64>,
    /// How often parameters are judged on held-out data, in virtual time [default: some 40 times].
    #[arg(long, value_name = "TIME")]
    pub(crate) every: Option<Span>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
}

/// Say what this machine and an address can do, and what is in the way.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill doctor
  paramill doctor 10.0.0.7:7070             can it be reached from here?
  paramill doctor 127.0.0.1:7070            is the port free, and if not, who has it?")]
pub(crate) struct DoctorArgs {
    /// A server's address: HOST:PORT or a job's URL.
    #[arg(default_value = "127.0.0.1:7070")]
    pub(crate) address: String,
    /// How long to try to connect.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub(crate) deadline: Span,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_holds_together() {
        Args::command().debug_assert();
    }
}
