//! `paramill bench exchange`: rounds of the exchange, with the machine's limits measured in between.

use super::congestion;
use super::contender::{self, Round};
use super::limits;
use super::plan::{Exchange, Schedule};
use super::report::Report;
use crate::args::{ExchangeArgs, Transport};
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use anyhow::{Context, Result};
use paramill_core::registry::Registry;

/// What the machine can do, round by round, in bytes per second.
#[derive(Debug, Default)]
pub(super) struct Limits {
    pub(super) tcp: Vec<f64>,
    pub(super) copy: Vec<f64>,
    pub(super) update: Vec<f64>,
}

pub(super) fn run(args: &ExchangeArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let exchange = Exchange::resolve(args, registry).or_usage()?;
    let schedule = Schedule::resolve(args).or_usage()?;
    congestion::adopt(&exchange.congestion)?;
    let (mut rounds, mut limits): (Vec<Round>, Limits) = Default::default();
    let mut progress = output.progress(u64::from(schedule.rounds));
    for number in 0..schedule.rounds {
        progress.set(u64::from(number), "rounds: the exchange");
        let round = contender::measure(&exchange, &schedule).with_context(|| format!("round {number}"))?;
        rounds.push(round);
        progress.set(u64::from(number), "rounds: the machine's limits");
        measure_limits(&exchange, &schedule, &mut limits)?;
    }
    drop(progress);
    let report = Report::new(&exchange, &rounds, &limits, registry)?;
    Ok(report.print(output)?)
}

fn measure_limits(exchange: &Exchange, schedule: &Schedule, limits: &mut Limits) -> Result<()> {
    let time = schedule.time();
    if exchange.transport == Transport::Tcp {
        limits.tcp.push(limits::flow(exchange, time).context("the limit of loopback TCP")?);
    }
    limits.copy.push(limits::copy(time / 3)?);
    limits.update.push(limits::update(time / 3)?);
    Ok(())
}
