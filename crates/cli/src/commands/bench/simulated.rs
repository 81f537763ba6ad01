//! `paramill bench exchange --sim`: the same exchange in virtual time, over links that are known.

use super::plan::{Compute, Exchange};
use crate::args::ExchangeArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use anyhow::{Result, anyhow, ensure};
use paramill_core::policy::Policy;
use paramill_node::UNSENT_BEYOND_THE_HOST;
use paramill_sim::compute::{ComputeModel, SendMode};
use paramill_sim::network::NetworkConfig;
use paramill_sim::report::run_scenario;
use paramill_sim::scenario::{Scenario, TableConfig};
use serde::Serialize;

const GBIT_PER_S: f64 = 1.0;
const LATENCY_US: f64 = 50.0;
/// Ethernet's.
const MTU: u64 = 1500;
const BUFFER_MS: f64 = 10.0;
const MAX_BUFFER_MS: f64 = 1e6;
const ITERATIONS: u64 = 10;

/// What came of it. Figures that a real exchange has too have the same names.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    tensors: usize,
    elements: u64,
    workers: u32,
    servers: u32,
    cores: u32,
    colocated: bool,
    #[serde(flatten)]
    policy: Policy,
    network: String,
    iterations: u64,
    /// Virtual time that they took.
    seconds: f64,
    iterations_per_s: f64,
    compute: ComputeReport,
}

#[derive(Debug, Serialize)]
struct ComputeReport {
    step_ms: f64,
    send: SendMode,
    /// Of an iteration's time.
    share: f64,
}

pub(super) fn run(args: &ExchangeArgs, exchange: &Exchange, output: &Output) -> Result<(), Failure> {
    let compute =
        exchange.compute.ok_or_else(|| anyhow!("--sim: a computation is needed: --compute TIME"))?;
    let scenario = scenario(args, exchange, compute).or_usage()?;
    let outcome = run_scenario(&scenario).map_err(|error| anyhow!(error))?;
    if !outcome.finished {
        let why = outcome.stalled.unwrap_or_else(|| "not all workers did all iterations".into());
        return Err(anyhow!("the simulated exchange did not finish: {why}").into());
    }
    let iterations_per_s = scenario.iterations as f64 / outcome.seconds;
    let step_ms = scenario.compute.step_ms;
    let report = Report {
        model: exchange.model.clone(),
        tensors: exchange.tensors.len(),
        elements: exchange.elements(),
        workers: exchange.workers,
        servers: exchange.servers,
        cores: exchange.cores,
        colocated: args.colocated,
        policy: exchange.policy.clone(),
        network: outcome.network,
        iterations: scenario.iterations,
        seconds: outcome.seconds,
        iterations_per_s,
        compute: ComputeReport { step_ms, send: compute.send, share: iterations_per_s * step_ms / 1e3 },
    };
    Ok(report.print(output)?)
}

fn scenario(args: &ExchangeArgs, exchange: &Exchange, compute: Compute) -> Result<Scenario> {
    let gbit_per_s = args.gbit_per_s.unwrap_or(GBIT_PER_S);
    ensure!(gbit_per_s > 0.0, "--gbit-per-s {gbit_per_s}: expected a number above 0");
    let buffer_ms = args.buffer_ms.unwrap_or(BUFFER_MS);
    ensure!(
        (0.0..=MAX_BUFFER_MS).contains(&buffer_ms),
        "--buffer-ms {buffer_ms}: expected 0 to {MAX_BUFFER_MS}"
    );
    let Exchange { workers, servers, cores, .. } = *exchange;
    let connections = connections_of_a_host(workers, servers, cores, args.colocated);
    let buffer_bytes = gbit_per_s * 1e9 / 8.0 * buffer_ms / 1e3;
    let tables = exchange.tensors.iter().map(|tensor| TableConfig {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        rows: false,
        macs: tensor.macs,
    });
    let scenario = Scenario {
        workers,
        servers,
        cores,
        iterations: args.iterations.unwrap_or(ITERATIONS),
        policy: exchange.policy.clone(),
        colocated: args.colocated,
        tables: tables.collect(),
        network: NetworkConfig {
            gbit_per_s,
            latency_us: args.latency_us.unwrap_or(LATENCY_US),
            jitter_us: 0.0,
            mtu: args.mtu.unwrap_or(MTU),
            window_bytes: window_bytes(buffer_bytes, connections),
            ..NetworkConfig::default()
        },
        compute: ComputeModel {
            step_ms: compute.step.as_secs_f64() * 1e3,
            jitter: 0.0,
            send: compute.send,
            ..ComputeModel::default()
        },
        ..Scenario::default()
    };
    scenario.check()?;
    Ok(scenario)
}

/// What a connection holds: what its socket has not sent, and its share of what a port of the switch can hold. TCP sends more until
/// that is full.
fn window_bytes(buffer_bytes: f64, connections: u32) -> u64 {
    u64::from(UNSENT_BEYOND_THE_HOST) + (buffer_bytes / f64::from(connections.max(1))) as u64
}

/// The most connections that send over the link of a host, with a server or a worker or both.
fn connections_of_a_host(workers: u32, servers: u32, cores: u32, colocated: bool) -> u32 {
    cores
        * match colocated {
            true => workers.saturating_sub(1) + servers.saturating_sub(1),
            false => workers.max(servers),
        }
}

impl Report {
    fn print(&self, output: &Output) -> Result<()> {
        if output.json() {
            return Ok(output.object(self)?);
        }
        output.text(format!(
            "{} ({} tensors, {} parameters), {} workers, {} servers x {} cores, in virtual time; {}",
            self.model, self.tensors, self.elements, self.workers, self.servers, self.cores, self.network
        ))?;
        let ComputeReport { step_ms, send, share } = &self.compute;
        let when = if *send == SendMode::End { "at the end" } else { "layer by layer" };
        let mut table = Table::new([("", Align::Left), ("", Align::Left)]);
        table.row(["iterations/s".to_owned(), format!("{:.4}", self.iterations_per_s)]);
        table.row([
            "of it computation".to_owned(),
            format!("{share:.2} ({step_ms:.1} ms; gradients leave {when})"),
        ]);
        Ok(output.table(&table)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_share_the_buffer_of_a_port() {
        // A worker sends to three servers elsewhere, and the server beside it to three workers.
        assert_eq!(connections_of_a_host(4, 4, 1, true), 6);
        assert_eq!(connections_of_a_host(4, 2, 3, false), 12);
        assert_eq!(connections_of_a_host(1, 1, 1, true), 0);
        let unsent = u64::from(UNSENT_BEYOND_THE_HOST);
        assert_eq!(window_bytes(600_000.0, 6), unsent + 100_000);
        assert_eq!(window_bytes(0.0, 0), unsent);
    }
}
