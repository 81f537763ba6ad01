//! What an exchange is, checked.

use super::congestion;
use super::endpoint::Endpoints;
use crate::args::{ExchangeArgs, Send, Transport};
use anyhow::{Context, Result, bail, ensure};
use paramill_core::coordinator::JobConfig;
use paramill_core::limits::{MAX_CORES, MAX_SERVERS, MAX_TABLES, MAX_WORKERS};
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_core::table::{Pack, TableSpec};
use paramill_node::pinning::Pin;
use paramill_sim::compute::{LayerTimes, SendMode};
use paramill_sim::models;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The name of the job.
pub(super) const JOB: &str = "bench";
/// The step that servers make unless another one is named: as little as possible.
pub(super) const OPTIMIZER: &str = "sgd:lr=0.001";
/// Tensors of at most this many elements travel together, unless told otherwise.
const PACKED: u64 = 8192;
const MAX_ROUNDS: u32 = 1000;
const MAX_SECONDS: f64 = 3600.0;

/// Who exchanges what, as every process of it must know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Exchange {
    /// What the tensors are of.
    pub(super) model: String,
    pub(super) tensors: Vec<Tensor>,
    /// Tensors of at most this many elements travel together.
    pub(super) pack: u64,
    pub(super) workers: u32,
    pub(super) servers: u32,
    /// Copies of every shard.
    #[serde(default)]
    pub(super) replicas: u32,
    /// Data cores of each server.
    pub(super) cores: u32,
    pub(super) transport: Transport,
    /// Threads that each worker's connections are spread over; as many as help otherwise.
    pub(super) worker_loops: Option<usize>,
    /// Whether gradients are copied from the worker's own memory.
    pub(super) copy: bool,
    /// Of every socket.
    pub(super) congestion: String,
    /// Which CPUs data cores run on, as text.
    pub(super) pin: String,
    /// Of the job.
    pub(super) policy: Policy,
    pub(super) endpoints: Endpoints,
    /// What workers wait out in every iteration.
    #[serde(default)]
    pub(super) compute: Option<Compute>,
    /// The longest wait before giving up.
    pub(super) timeout: Duration,
}

/// A computation that is waited out.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Compute {
    /// Of one iteration.
    pub(super) step: Duration,
    pub(super) send: SendMode,
}

/// One tensor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    /// Multiply-accumulates of a forward pass that use it.
    #[serde(default)]
    pub(super) macs: u64,
}

/// How it is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    pub(super) rounds: u32,
    pub(super) warmup: Duration,
    pub(super) length: Length,
}

/// How long a measurement lasts.
#[derive(Debug, Clone, Copy)]
pub(super) enum Length {
    Iterations(u64),
    Time(Duration),
}

impl Exchange {
    /// What was typed, or why it cannot work.
    pub(super) fn resolve(args: &ExchangeArgs, registry: &Registry) -> Result<Exchange> {
        for (name, value, max) in
            [("workers", args.workers, MAX_WORKERS), ("servers", args.servers, MAX_SERVERS)]
        {
            ensure!((1..=max).contains(&value), "--{name} {value}: expected 1 to {max}");
        }
        let cores = args.cores.unwrap_or_else(|| default_cores(args.servers));
        ensure!((1..=MAX_CORES).contains(&cores), "--cores {cores}: expected 1 to {MAX_CORES}");
        let replicas = args.replicas.unwrap_or(0);
        ensure!(replicas <= 1, "--replicas {replicas}: expected 0 or 1");
        ensure!(
            replicas == 0 || (args.servers > 1 && args.transport != Transport::Memory),
            "--replicas {replicas}: copies are kept in the processes of other servers; add --servers 2, and leave --transport memory out"
        );
        ensure!(
            !args.colocated || args.sim || args.run_with.is_some(),
            "--colocated says where --run-with takes workers, or on which hosts they are with --sim; give one of them"
        );
        // The parser does not ask for an option that conflicts with another one that is given.
        ensure!(
            args.send.is_none() || args.compute.is_some(),
            "--send is about a computation that is waited out: add --model NAME --compute TIME"
        );
        ensure!(
            args.compute.is_none_or(|step| !step.0.is_zero()),
            "--compute 0s: expected a time to wait out; leave it out to exchange without a computation"
        );
        ensure!(
            args.host.is_empty() || args.transport != Transport::Memory,
            "--host with --transport memory: threads of one process have no addresses; leave --host out"
        );
        let (model, tensors) = tensors(args)?;
        let exchange = Exchange {
            model,
            tensors,
            pack: args.pack.unwrap_or(if args.compute.is_some() { 0 } else { PACKED }),
            workers: args.workers,
            servers: args.servers,
            replicas,
            cores,
            transport: args.transport,
            worker_loops: args.worker_loops,
            copy: args.copy,
            congestion: match &args.congestion {
                Some(asked) => asked.clone(),
                None => congestion::default()?,
            },
            pin: args.pin.clone(),
            policy: Policy::default().with(Axis::Optimizer, OPTIMIZER).under(args.policy.0.clone()),
            endpoints: Endpoints::resolve(
                args.run_with.as_deref(),
                &args.host,
                args.servers,
                args.colocated,
            )?,
            compute: args.compute.map(|step| Compute {
                step: step.0,
                send: match args.send {
                    Some(Send::End) => SendMode::End,
                    Some(Send::Layerwise) | None => SendMode::Layerwise,
                },
            }),
            timeout: args.timeout.0,
        };
        ensure!(!exchange.timeout.is_zero(), "--timeout 0s: expected a time to wait");
        let (sync, expected) = (exchange.policy.get(Axis::Sync), Axis::Sync.info().default);
        ensure!(
            sync == expected,
            "--sync {sync}: an exchange is synchronous, and its figures are those of {expected}"
        );
        let local = exchange.policy.get(Axis::Local);
        ensure!(
            !exchange.policy.is_local(),
            "--local {local}: an exchange pushes and pulls everything in every iteration; leave --local out"
        );
        exchange.check(registry)?;
        Ok(exchange)
    }

    /// Whether the job and this system allow it.
    pub(super) fn check(&self, registry: &Registry) -> Result<()> {
        self.pin.parse::<Pin>().context("--pin")?;
        congestion::check(&self.congestion)?;
        let job = self.job_config();
        job.check(registry)?;
        let tables: Vec<TableSpec> = self.tables().iter().map(|table| table.spec().clone()).collect();
        tables.iter().try_for_each(TableSpec::check).map_err(anyhow::Error::msg)?;
        Ok(job.check_tables(registry, &tables)?)
    }

    /// The job as its coordinator sees it.
    pub(super) fn job_config(&self) -> JobConfig {
        let job = JobConfig::new(JOB, self.workers, self.servers);
        JobConfig { policy: self.policy.clone(), replicas: self.replicas, ..job }
    }

    /// The tables of the job.
    pub(super) fn tables(&self) -> Vec<Pack> {
        // The job has the same policies for all tables.
        Pack::divide(self.specs(), self.pack, |_, _| true)
    }

    fn specs(&self) -> impl Iterator<Item = TableSpec> {
        self.tensors.iter().map(|tensor| TableSpec::dense(&tensor.name, tensor.shape.clone()))
    }

    /// How the time of a step is divided among the tensors.
    pub(super) fn layer_times(&self) -> LayerTimes {
        LayerTimes::new(&self.tensors.iter().map(|tensor| tensor.macs).collect::<Vec<u64>>())
    }

    /// Parameters in all.
    pub(super) fn elements(&self) -> u64 {
        self.specs().map(|spec| spec.elements()).sum()
    }

    /// Bytes that one iteration brings where they are wanted: every worker's gradient, and parameters for every worker.
    pub(super) fn bytes_per_iteration(&self) -> u64 {
        u64::from(self.workers) * 2 * 4 * self.elements()
    }

    /// Whether something on the way looks at values, so that they must be like those of training.
    pub(super) fn has_codec(&self) -> bool {
        [Axis::Codec, Axis::AnswerCodec].iter().any(|axis| self.policy.get(*axis) != axis.info().default)
    }

    /// Connections that carry them.
    pub(super) fn connections(&self) -> u64 {
        u64::from(self.workers) * u64::from(self.servers) * u64::from(self.cores)
    }

    /// Bytes that a server cannot do without for this many parameters: themselves, a sum of gradients, the
    /// optimizer's state and, where they are broadcast, what was published of them.
    pub(super) fn ideal_bytes(&self, elements: u64, registry: &Registry) -> Result<u64> {
        let arrays =
            2 + self.policy.optimizer(registry)?.slots() as u64 + u64::from(self.policy.is_broadcast());
        Ok(elements * 4 * arrays)
    }
}

impl Schedule {
    pub(super) fn resolve(args: &ExchangeArgs) -> Result<Schedule> {
        let seconds = |name: &str, value: f64| {
            ensure!((0.0..=MAX_SECONDS).contains(&value), "--{name} {value}: expected 0 to {MAX_SECONDS}");
            Ok(Duration::from_secs_f64(value))
        };
        ensure!(
            (1..=MAX_ROUNDS).contains(&args.rounds),
            "--rounds {}: expected 1 to {MAX_ROUNDS}",
            args.rounds
        );
        let length = match args.iterations {
            Some(0) => bail!("--iterations 0: expected at least 1"),
            Some(iterations) => Length::Iterations(iterations),
            None => Length::Time(seconds("seconds", args.seconds)?),
        };
        Ok(Schedule { rounds: args.rounds, warmup: seconds("warmup", args.warmup)?, length })
    }

    /// How long what has no iterations is measured.
    pub(super) fn time(&self) -> Duration {
        match self.length {
            Length::Time(time) => time.min(Duration::from_secs(1)),
            Length::Iterations(_) => Duration::from_millis(300),
        }
    }
}

/// This machine's cores are divided among the servers: workers mostly wait while servers add, and the other way round.
fn default_cores(servers: u32) -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    (cores / servers).clamp(1, MAX_CORES)
}

fn tensors(args: &ExchangeArgs) -> Result<(String, Vec<Tensor>)> {
    let Some(elements) = args.elements else {
        let model = models::model(args.model.as_deref().unwrap_or("resnet50"))?;
        let tensors = model.tensors.into_iter().map(|models::Tensor { name, shape, macs }| Tensor {
            name,
            shape,
            macs,
        });
        return Ok((model.name, tensors.collect()));
    };
    let count = args.tensors.unwrap_or(1);
    let most = elements.min(MAX_TABLES as u64);
    ensure!(elements > 0, "--elements 0: expected at least 1");
    ensure!((1..=most).contains(&count), "--tensors {count}: expected 1 to {most}");
    let tensor = |number: u64| {
        let shape = vec![elements / count + u64::from(number < elements % count)];
        Tensor { name: format!("tensor{number}"), shape, macs: 0 }
    };
    Ok((format!("{elements} elements in {count}"), (0..count).map(tensor).collect()))
}
