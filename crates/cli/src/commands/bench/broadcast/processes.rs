//! Broadcasts between processes: those of an exchange whose pushes are next to nothing.

use super::{Plan, STAR};
use crate::args::{BroadcastArgs, Transport};
use crate::commands::bench::cluster::{Cluster, Round};
use crate::commands::bench::congestion;
use crate::commands::bench::endpoint::Endpoints;
use crate::commands::bench::plan::{Exchange, Length, OPTIMIZER, Schedule, Tensor};
use crate::commands::bench::statistics::Spread;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use anyhow::{Context, Result, ensure};
use paramill_core::policy::Axis;
use paramill_core::registry::Registry;
use std::time::Duration;

/// Pushes one entry of so many.
const PUSH_CODEC: &str = "topk:0.0001";
const MAX_ROUNDS: u32 = 1000;
const MAX_VERSIONS: u64 = 10_000;
/// Versions before the first one that is measured: connections are made, and trees settled.
const WARM_UP: Duration = Duration::from_millis(200);

/// What rounds found: medians over the versions of each, in seconds.
#[derive(Debug)]
pub(super) struct Rounds {
    pub(super) trees: Spread,
    /// A star that leaves out nothing.
    pub(super) star: Spread,
    /// One that leaves out as much as the trees, where there is a filter.
    pub(super) filtered_star: Option<Spread>,
    /// Bytes of a version of the trees on the busiest link; `None` where processes share one.
    pub(super) most_link_bytes: Option<u64>,
    pub(super) rounds: u32,
    pub(super) versions: u64,
    /// CPU seconds of all processes over the time, for the trees: of a machine that has more cores than that, none is waited for.
    pub(super) busy_cores: f64,
    /// Processes that wanted a core on average in the last minute, as this system says it, at the end.
    pub(super) load: Option<f64>,
}

impl Rounds {
    pub(super) fn measure(
        plan: &Plan,
        args: &BroadcastArgs,
        registry: &Registry,
        output: &Output,
    ) -> Result<Rounds, Failure> {
        let exchange = exchange(plan, args, registry).or_usage()?;
        let schedule = schedule(args).or_usage()?;
        congestion::adopt(&exchange.congestion)?;
        let with = |broadcast: &str, is_filtered: bool| {
            let mut exchange = exchange.clone();
            exchange.policy = exchange.policy.with(Axis::Broadcast, broadcast);
            if !is_filtered {
                exchange.policy = exchange.policy.with(Axis::AnswerCodec, Axis::AnswerCodec.info().default);
            }
            exchange
        };
        let is_filtered = plan.filter.is_some();
        let mut contenders = vec![with(&plan.broadcast, is_filtered), with(STAR, false)];
        contenders.extend(is_filtered.then(|| with(STAR, true)));
        let mut found: Vec<Vec<Round>> = vec![Vec::new(); contenders.len()];
        let mut progress = output.progress(u64::from(schedule.rounds));
        for number in 0..schedule.rounds {
            for (exchange, rounds) in contenders.iter().zip(&mut found) {
                let way = exchange.policy.get(Axis::Broadcast);
                progress.set(u64::from(number), &format!("rounds: {way}"));
                let round = Cluster::start(exchange).and_then(|cluster| cluster.measure(&schedule));
                rounds.push(round.with_context(|| format!("round {number} of {way}"))?);
            }
        }
        drop(progress);
        let spread = |rounds: &Vec<Round>| Spread::of(&rounds.iter().map(seconds).collect::<Vec<_>>());
        let most = |round: &Round| round.most_link_bytes.map(|bytes| bytes / round.iterations);
        let cores = |round: &Round| (round.server_cpu_s + round.worker_cpu_s) / round.seconds;
        Ok(Rounds {
            trees: spread(&found[0]),
            star: spread(&found[1]),
            filtered_star: found.get(2).map(spread),
            most_link_bytes: found[0].iter().filter_map(most).max(),
            rounds: schedule.rounds,
            versions: args.versions,
            busy_cores: Spread::of(&found[0].iter().map(cores).collect::<Vec<_>>()).median,
            load: load(),
        })
    }
}

/// The median time of a round's versions: from the last push that made it to the last worker that has it.
fn seconds(round: &Round) -> f64 {
    let versions = round.moments.iter().map(Vec::len).min().unwrap_or(0);
    let times: Vec<f64> = (0..versions)
        .map(|version| {
            let moments = || round.moments.iter().map(|worker| worker[version]);
            let pushed = moments().map(|moment| moment.pushed_us).max().unwrap_or(0);
            let received = moments().map(|moment| moment.received_us).max().unwrap_or(0);
            received.saturating_sub(pushed) as f64 / 1e6
        })
        .collect();
    if times.is_empty() { f64::NAN } else { Spread::of(&times).median }
}

fn exchange(plan: &Plan, args: &BroadcastArgs, registry: &Registry) -> Result<Exchange> {
    let tensor = Tensor { name: "model".into(), shape: vec![args.elements], macs: 0 };
    let policy = plan.policy.clone().with(Axis::Optimizer, OPTIMIZER).with(Axis::Codec, PUSH_CODEC);
    let exchange = Exchange {
        model: format!("{} elements", args.elements),
        tensors: vec![tensor],
        pack: 0,
        workers: args.workers,
        servers: args.servers,
        replicas: 0,
        cores: args.cores,
        transport: Transport::Tcp,
        worker_loops: Some(1),
        copy: false,
        congestion: match &args.congestion {
            Some(asked) => asked.clone(),
            None => congestion::default()?,
        },
        pin: "off".into(),
        policy,
        endpoints: Endpoints::resolve(args.run_with.as_deref(), &args.host, args.servers, false)?,
        compute: None,
        timeout: args.timeout.0,
    };
    exchange.check(registry)?;
    Ok(exchange)
}

fn schedule(args: &BroadcastArgs) -> Result<Schedule> {
    let BroadcastArgs { rounds, versions, .. } = *args;
    ensure!((1..=MAX_ROUNDS).contains(&rounds), "--rounds {rounds}: expected 1 to {MAX_ROUNDS}");
    ensure!((1..=MAX_VERSIONS).contains(&versions), "--versions {versions}: expected 1 to {MAX_VERSIONS}");
    Ok(Schedule { rounds, warmup: WARM_UP, length: Length::Iterations(versions) })
}

fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().next()?.parse().ok()
}
