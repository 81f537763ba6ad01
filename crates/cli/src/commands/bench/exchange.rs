//! `paramill bench exchange`: rounds of the exchange, with the machine's limits and peers measured in between; or in virtual time.

use super::cluster::{Cluster, Round};
use super::congestion;
use super::limits;
use super::peers::{self, Peer};
use super::plan::{Exchange, Schedule};
use super::report::Report;
use super::simulated;
use crate::args::ExchangeArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use anyhow::{Context, Result};
use paramill_core::registry::Registry;

/// What the machine can do, round by round, in bytes per second.
#[derive(Debug, Default)]
pub(super) struct Limits {
    pub(super) tcp: Vec<f64>,
    pub(super) tcp_from_memory: Vec<f64>,
    pub(super) copy: Vec<f64>,
    pub(super) update: Vec<f64>,
}

/// A peer and its rounds.
pub(super) struct Measured {
    pub(super) peer: Peer,
    pub(super) rounds: Vec<Round>,
}

pub(super) fn run(args: &ExchangeArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let exchange = Exchange::resolve(args, registry).or_usage()?;
    if args.sim {
        return simulated::run(args, &exchange, output);
    }
    let schedule = Schedule::resolve(args).or_usage()?;
    congestion::adopt(&exchange.congestion)?;
    let peers = peers::find(args).or_usage()?;
    let mut measured: Vec<Measured> =
        peers.into_iter().map(|peer| Measured { peer, rounds: Vec::new() }).collect();
    let (mut rounds, mut limits): (Vec<Round>, Limits) = Default::default();
    let mut progress = output.progress(u64::from(schedule.rounds));
    for number in 0..schedule.rounds {
        let mut tell = |what: &str| progress.set(u64::from(number), &format!("rounds: {what}"));
        tell("the exchange");
        let round = Cluster::start(&exchange).and_then(|cluster| cluster.measure(&schedule));
        rounds.push(round.with_context(|| format!("round {number}"))?);
        tell("the machine's limits");
        measure_limits(&exchange, &schedule, &mut limits)?;
        for Measured { peer, rounds } in &mut measured {
            tell(&peer.about());
            let round = peer.start(&exchange).and_then(|cluster| cluster.measure(&schedule));
            rounds.push(round.with_context(|| format!("round {number} of {}", peer.about()))?);
        }
    }
    drop(progress);
    let report = Report::new(&exchange, &rounds, &limits, &measured, registry)?;
    Ok(report.print(output)?)
}

fn measure_limits(exchange: &Exchange, schedule: &Schedule, limits: &mut Limits) -> Result<()> {
    let time = schedule.time();
    limits.tcp.push(limits::flow(exchange, time).context("the limit of loopback TCP")?);
    let from_memory = limits::flow_from_memory(exchange, time);
    limits.tcp_from_memory.push(from_memory.context("the limit of loopback TCP from memory")?);
    limits.copy.push(limits::copy(time / 3)?);
    limits.update.push(limits::update(time / 3)?);
    Ok(())
}
