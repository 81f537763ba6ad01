//! `paramill bench broadcast`: how long a version takes from the servers to all workers, in virtual time or between processes.

mod processes;
mod report;

use crate::args::BroadcastArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use anyhow::{Result, anyhow, ensure};
use paramill_core::codec::{Codec, Context, Encoder};
use paramill_core::limits::{MAX_CORES, MAX_SERVERS, MAX_WORKERS};
use paramill_core::policy::{Axis, Policy};
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_sim::broadcast::{Broadcast, BroadcastError, Experiment};
use paramill_sim::network::{NetworkConfig, ThreeTier, Topology};
use processes::Rounds;
use report::Report;
use std::sync::Arc;

const STAR: &str = "star";
const MAX_ELEMENTS: u64 = 1 << 40;
/// Rate of a simulated link, unless another one is named.
const GBIT_PER_S: f64 = 1.0;
const LATENCY_US: f64 = 50.0;
/// Steps of progress for each run of the simulator.
const STEPS: u64 = 100;
const SEED: u64 = 1;

/// What is measured, checked.
#[derive(Debug)]
pub(super) struct Plan {
    /// The trees.
    broadcast: String,
    /// The part of a version that a filter leaves out.
    drop: f64,
    /// What leaves it out, if something is.
    filter: Option<String>,
    policy: Policy,
    /// Whether the links' rate is known.
    has_rate: bool,
    experiment: Experiment,
}

impl Plan {
    fn resolve(args: &BroadcastArgs, registry: &Registry) -> Result<Plan> {
        let most = |name: &str, value: u64, most: u64| {
            ensure!((1..=most).contains(&value), "--{name} {value}: expected 1 to {most}");
            Ok(())
        };
        most("workers", args.workers.into(), MAX_WORKERS.into())?;
        most("servers", args.servers.into(), MAX_SERVERS.into())?;
        most("cores", args.cores.into(), MAX_CORES.into())?;
        most("elements", args.elements, MAX_ELEMENTS)?;
        ensure!((0.0..1.0).contains(&args.drop), "--drop {}: expected 0 to 1, without 1", args.drop);
        let mut policy = Policy::default().with(Axis::Placement, "uniform");
        policy.set(Axis::Broadcast, &args.broadcast)?;
        if let Some(chunk) = &args.chunk {
            policy.set(Axis::Chunk, chunk)?;
        }
        policy.check(registry)?;
        ensure!(
            policy.is_broadcast(),
            "--broadcast {}: nothing is broadcast; see `paramill components`",
            args.broadcast
        );
        // Rounded, since what is left of a decimal fraction is not one.
        let filter = (args.drop > 0.0).then(|| format!("topk:{}", (1e6 * (1.0 - args.drop)).round() / 1e6));
        if let Some(filter) = &filter {
            policy.set(Axis::AnswerCodec, filter)?;
        }
        let chunk_bytes = 4 * policy.chunk_elements() as u64;
        let payload_bytes = match &filter {
            Some(filter) => encoded_bytes(filter, chunk_bytes as usize / 4, registry)?,
            None => chunk_bytes,
        };
        let experiment = Experiment {
            workers: args.workers,
            servers: args.servers,
            cores: args.cores,
            elements: args.elements,
            chunk_bytes,
            payload_bytes,
            network: network(args)?,
            seed: args.seed.unwrap_or(SEED),
        };
        Ok(Plan {
            broadcast: args.broadcast.clone(),
            drop: args.drop,
            filter,
            policy,
            has_rate: args.sim || args.gbit_per_s.is_some(),
            experiment,
        })
    }

    /// The same without a filter.
    fn unfiltered(&self) -> Experiment {
        Experiment { payload_bytes: self.experiment.chunk_bytes, ..self.experiment.clone() }
    }

    /// Simulates the trees, a star that leaves out nothing and, where there is a filter, one that leaves out as much.
    fn simulate(&self, output: &Output) -> Result<Simulated, BroadcastError> {
        let runs = if self.filter.is_some() { 3 } else { 2 };
        let mut progress = output.progress(runs * STEPS);
        let mut run = |number: u64, experiment: &Experiment, broadcast: &str| {
            experiment.run(broadcast, |share| {
                let step = number * STEPS + (share * STEPS as f64) as u64;
                progress.set(step, &format!("parts: {broadcast} in virtual time"));
            })
        };
        let filter = self.filter.as_ref();
        Ok(Simulated {
            trees: run(0, &self.experiment, &self.broadcast)?,
            star: run(1, &self.unfiltered(), STAR)?,
            filtered_star: filter.map(|_| run(2, &self.experiment, STAR)).transpose()?,
        })
    }
}

/// What the simulator says.
#[derive(Debug)]
struct Simulated {
    trees: Broadcast,
    star: Broadcast,
    filtered_star: Option<Broadcast>,
}

pub(super) fn run(args: &BroadcastArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let plan = Plan::resolve(args, registry).or_usage()?;
    // What the network or the trees cannot be is said before anything runs.
    plan.experiment.check(&plan.broadcast).or_usage()?;
    let bound = plan.experiment.bound().or_usage()?;
    let bound = plan.has_rate.then_some(bound);
    let rounds = match args.sim {
        true => None,
        false => Some(Rounds::measure(&plan, args, registry, output)?),
    };
    let simulated = match plan.has_rate {
        true => Some(plan.simulate(output).map_err(|error| anyhow!(error))?),
        false => None,
    };
    Ok(Report::new(&plan, bound, simulated, rounds).print(output)?)
}

fn network(args: &BroadcastArgs) -> Result<NetworkConfig> {
    let simulated = [
        ("--topology", args.topology.is_some()),
        ("--oversubscription", args.oversubscription.is_some()),
        ("--latency-us", args.latency_us.is_some()),
        ("--seed", args.seed.is_some()),
    ];
    if let Some((option, _)) = simulated.iter().find(|(_, is_given)| *is_given) {
        ensure!(
            args.sim || args.gbit_per_s.is_some(),
            "{option} is about a simulated network: add --sim, or --gbit-per-s for a simulation beside the processes"
        );
    }
    let mut topology = args.topology.clone().unwrap_or_else(|| Topology::ThreeTier(ThreeTier::default()));
    if let Some(oversubscription) = args.oversubscription {
        let Topology::ThreeTier(tiers) = &mut topology else {
            anyhow::bail!("--oversubscription: a star has no uplinks; give --topology three-tier");
        };
        ensure!(
            (1e-3..=1e6).contains(&oversubscription),
            "--oversubscription {oversubscription}: expected 0.001 to 1000000"
        );
        ensure!(
            tiers.edge_oversubscription.is_none() && tiers.edge_uplink_gbit_per_s.is_none(),
            "--oversubscription and --topology both say the rate of a rack's uplink; leave one of them out"
        );
        tiers.edge_oversubscription = Some(oversubscription);
    }
    let gbit_per_s = args.gbit_per_s.unwrap_or(GBIT_PER_S);
    ensure!(gbit_per_s > 0.0, "--gbit-per-s {gbit_per_s}: expected a number above 0");
    Ok(NetworkConfig {
        gbit_per_s,
        latency_us: args.latency_us.unwrap_or(LATENCY_US),
        topology,
        ..NetworkConfig::default()
    })
}

/// Bytes of a chunk of normal values, as this codec makes them.
fn encoded_bytes(codec: &str, elements: usize, registry: &Registry) -> Result<u64> {
    let codec = Arc::new(Codec::parse(&registry.codec, codec)?);
    let mut prng = Prng::new(SEED);
    let values: Vec<f32> = (0..elements).map(|_| prng.normal() as f32).collect();
    let (mut encoder, mut payload) = (Encoder::without_memory(codec), Vec::new());
    let context = Context { layer_elements: elements as u64, ..Context::default() };
    encoder.encode(0, &values, &context, &mut payload)?;
    Ok(payload.len() as u64)
}
