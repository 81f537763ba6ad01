//! What came of an exchange, for people and for programs.

use super::cluster::{Round, ServerMemory};
use super::exchange::{Limits, Measured};
use super::plan::{Compute, Exchange};
use super::statistics::{Spread, quantile};
use super::worker::Payload;
use crate::args::Transport;
use crate::output::{Align, Output, Table};
use anyhow::Result;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_sim::compute::SendMode;
use serde::Serialize;

const GB: f64 = 1e9;
const MB: f64 = 1e6;

/// Figures are medians of rounds; a GB is 10^9 bytes.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    model: String,
    tensors: usize,
    /// What servers see: small tensors share one.
    tables: usize,
    elements: u64,
    workers: u32,
    servers: u32,
    /// Copies of every shard.
    replicas: u32,
    cores: u32,
    transport: Transport,
    /// Whether gradients were copied from the worker's own memory.
    copy: bool,
    #[serde(flatten)]
    policy: Policy,
    congestion: String,
    rounds: usize,
    /// Of each round.
    iterations: Vec<u64>,
    /// Workers x 2 x bytes of the model x iterations/s.
    goodput_gb_s: f64,
    goodput_spread_gb_s: Spread,
    iterations_per_s: f64,
    /// The computation that workers waited out.
    compute: Option<ComputeReport>,
    /// Of an iteration.
    bytes: Bytes,
    /// What the limit is of.
    limit: String,
    limit_gb_s: f64,
    fraction_of_limit: f64,
    /// Of loopback TCP from memory to memory; over TCP only.
    fraction_of_memory_limit: Option<f64>,
    limits: LimitSpreads,
    /// The largest peak of a server process; none when everything is one process.
    server_rss_mb: Option<f64>,
    /// What of it lies in segments that it shares with workers.
    server_shared_mb: Option<f64>,
    /// Parameters, one sum of gradients, the optimizer's state and what was broadcast last of that server.
    server_ideal_mb: Option<f64>,
    server_rss_ratio: Option<f64>,
    cpu_s_per_gb: CpuPerGb,
    iteration_ms: IterationTimes,
    peers: Vec<PeerReport>,
}

#[derive(Debug, Serialize)]
struct ComputeReport {
    step_ms: f64,
    send: SendMode,
    /// Of an iteration's time.
    share: f64,
}

/// What an iteration moves, of all workers together.
#[derive(Debug, Serialize)]
struct Bytes {
    /// Gradients of f32 there, and parameters of f32 back: what goodput counts.
    uncompressed: u64,
    /// Payload of pushes, as it left the workers.
    pushed: u64,
    /// Payload of answers, as it arrived.
    pulled: u64,
    /// How many times less than half of the uncompressed bytes was pushed.
    push_ratio: f64,
    /// The same for answers.
    answer_ratio: f64,
}

#[derive(Debug, Serialize)]
struct LimitSpreads {
    loopback_tcp_gb_s: Spread,
    /// The same for bytes that come from memory and go to memory.
    loopback_tcp_from_memory_gb_s: Spread,
    connections: u64,
    memory_copy_gb_s: Spread,
    fused_update_gb_s: Spread,
}

#[derive(Debug, Serialize)]
struct CpuPerGb {
    servers: f64,
    workers: f64,
}

#[derive(Debug, Serialize)]
struct IterationTimes {
    p50: f64,
    p99: f64,
    max: f64,
}

/// Somebody else who did the same work.
#[derive(Debug, Serialize)]
struct PeerReport {
    name: &'static str,
    about: String,
    goodput_gb_s: f64,
    goodput_spread_gb_s: Spread,
    /// Ours, divided by theirs.
    ratio: f64,
    cpu_s_per_gb: CpuPerGb,
    server_rss_mb: Option<f64>,
}

impl Report {
    pub(super) fn new(
        exchange: &Exchange,
        rounds: &[Round],
        limits: &Limits,
        peers: &[Measured],
        registry: &Registry,
    ) -> Result<Report> {
        let goodput = goodput(exchange, rounds);
        let limit_spreads = LimitSpreads::new(exchange, limits);
        let (limit, limit_gb_s) = match exchange.transport {
            Transport::Tcp => (
                format!("loopback TCP, {} connections", exchange.connections()),
                limit_spreads.loopback_tcp_gb_s.median,
            ),
            _ => ("memory copy, all cores".to_owned(), limit_spreads.memory_copy_gb_s.median),
        };
        let iterations_per_s = spread(rounds, |round| round.iterations as f64 / round.seconds).median;
        let memory = largest(rounds);
        let elements = memory.and_then(|server| server.elements);
        let ideal = elements.map(|elements| exchange.ideal_bytes(elements, registry)).transpose()?;
        let peak = memory.map(|server| server.memory.peak as f64);
        Ok(Report {
            model: exchange.model.clone(),
            tensors: exchange.tensors.len(),
            tables: exchange.tables().len(),
            elements: exchange.elements(),
            workers: exchange.workers,
            servers: exchange.servers,
            replicas: exchange.replicas,
            cores: exchange.cores,
            transport: exchange.transport,
            copy: exchange.copy,
            policy: exchange.policy.clone(),
            congestion: exchange.congestion.clone(),
            rounds: rounds.len(),
            iterations: rounds.iter().map(|round| round.iterations).collect(),
            goodput_gb_s: goodput.median,
            goodput_spread_gb_s: goodput,
            iterations_per_s,
            compute: exchange.compute.map(|Compute { step, send }| ComputeReport {
                step_ms: step.as_secs_f64() * 1e3,
                send,
                share: iterations_per_s * step.as_secs_f64(),
            }),
            bytes: Bytes::new(exchange, rounds),
            limit,
            limit_gb_s,
            fraction_of_limit: goodput.median / limit_gb_s,
            fraction_of_memory_limit: (exchange.transport == Transport::Tcp)
                .then(|| goodput.median / limit_spreads.loopback_tcp_from_memory_gb_s.median),
            limits: limit_spreads,
            server_rss_mb: peak.map(|peak| peak / MB),
            server_shared_mb: memory.map(|server| server.memory.shared as f64 / MB),
            server_ideal_mb: ideal.map(|ideal| ideal as f64 / MB),
            server_rss_ratio: peak.zip(ideal).map(|(peak, ideal)| peak / ideal as f64),
            cpu_s_per_gb: CpuPerGb::new(exchange, rounds),
            iteration_ms: IterationTimes::new(rounds),
            peers: peers.iter().map(|peer| PeerReport::new(exchange, peer, goodput.median)).collect(),
        })
    }

    pub(super) fn print(&self, output: &Output) -> Result<()> {
        if output.json() {
            return Ok(output.object(self)?);
        }
        output.text(format!(
            "{} ({} tensors in {} tables, {} parameters), {} workers, {} servers x {} cores, {} ({}), {}; codec of pushes \
                 {}, of answers {}",
            self.model,
            self.tensors,
            self.tables,
            self.elements,
            self.workers,
            self.servers,
            self.cores,
            self.transport,
            self.congestion,
            self.policy.get(Axis::Optimizer),
            self.policy.get(Axis::Codec),
            self.policy.get(Axis::AnswerCodec)
        ))?;
        let mut table = Table::new([("", Align::Left), ("", Align::Left)]);
        let limits = &self.limits;
        let times = &self.iteration_ms;
        table.row(["goodput, GB/s".to_owned(), self.goodput_spread_gb_s.words()]);
        table.row(["of the limit".to_owned(), format!("{:.2} ({})", self.fraction_of_limit, self.limit)]);
        table.row(["iterations/s".to_owned(), format!("{:.2}", self.iterations_per_s)]);
        if let Some(ComputeReport { step_ms, send, share }) = &self.compute {
            let when = if *send == SendMode::End { "at the end" } else { "layer by layer" };
            table.row([
                "of it computation".to_owned(),
                format!("{share:.2} ({step_ms:.1} ms; gradients leave {when})"),
            ]);
        }
        let Bytes { uncompressed, pushed, pulled, push_ratio, answer_ratio } = self.bytes;
        table.row([
            "MB an iteration, pushed and pulled".to_owned(),
            format!(
                "{:.3} ({push_ratio:.2} times less) and {:.3} ({answer_ratio:.2} times less) of {:.3}",
                pushed as f64 / MB,
                pulled as f64 / MB,
                uncompressed as f64 / MB
            ),
        ]);
        let times = format!("{:.2}, {:.2}, {:.2}", times.p50, times.p99, times.max);
        table.row(["iteration, ms (p50, p99, max)".to_owned(), times]);
        let cpu = &self.cpu_s_per_gb;
        table.row([
            "CPU-s per GB".to_owned(),
            format!("{:.3} servers, {:.3} workers", cpu.servers, cpu.workers),
        ]);
        if let (Some(peak), Some(shared), Some(ideal), Some(ratio)) =
            (self.server_rss_mb, self.server_shared_mb, self.server_ideal_mb, self.server_rss_ratio)
        {
            table.row([
                "server memory, MB".to_owned(),
                format!("{peak:.0} ({shared:.0} shared), {ratio:.2} times the ideal {ideal:.0}"),
            ]);
        }
        let tcp = format!("limit: loopback TCP, {} connections, GB/s", limits.connections);
        table.row([tcp, limits.loopback_tcp_gb_s.words()]);
        table.row(["the same, from memory".to_owned(), limits.loopback_tcp_from_memory_gb_s.words()]);
        table.row(["limit: memory copy, GB/s".to_owned(), limits.memory_copy_gb_s.words()]);
        table.row(["limit: w -= lr g, GB/s of g".to_owned(), limits.fused_update_gb_s.words()]);
        for peer in &self.peers {
            let words = format!("{}; ours is {:.2} times that", peer.goodput_spread_gb_s.words(), peer.ratio);
            table.row([format!("{}, GB/s", peer.about), words]);
        }
        Ok(output.table(&table)?)
    }
}

impl Bytes {
    fn new(exchange: &Exchange, rounds: &[Round]) -> Bytes {
        let uncompressed = exchange.bytes_per_iteration();
        // Our own workers count; their sum over all rounds is exact where rounds differ in length.
        let iterations: u64 = rounds.iter().map(|round| round.iterations).sum();
        let sum =
            |part: fn(Payload) -> u64| rounds.iter().filter_map(|round| round.payload.map(part)).sum::<u64>();
        let (pushed, pulled) = (sum(|payload| payload.pushed), sum(|payload| payload.pulled));
        let ratio = |bytes: u64| (uncompressed / 2 * iterations) as f64 / bytes.max(1) as f64;
        Bytes {
            uncompressed,
            pushed: pushed / iterations.max(1),
            pulled: pulled / iterations.max(1),
            push_ratio: ratio(pushed),
            answer_ratio: ratio(pulled),
        }
    }
}

impl LimitSpreads {
    fn new(exchange: &Exchange, limits: &Limits) -> LimitSpreads {
        let gigabytes = |rates: &[f64]| Spread::of(&rates.iter().map(|rate| rate / GB).collect::<Vec<_>>());
        LimitSpreads {
            loopback_tcp_gb_s: gigabytes(&limits.tcp),
            loopback_tcp_from_memory_gb_s: gigabytes(&limits.tcp_from_memory),
            connections: exchange.connections(),
            memory_copy_gb_s: gigabytes(&limits.copy),
            fused_update_gb_s: gigabytes(&limits.update),
        }
    }
}

impl PeerReport {
    fn new(exchange: &Exchange, measured: &Measured, ours: f64) -> PeerReport {
        let goodput = goodput(exchange, &measured.rounds);
        PeerReport {
            name: measured.peer.name(),
            about: measured.peer.about(),
            goodput_gb_s: goodput.median,
            goodput_spread_gb_s: goodput,
            ratio: ours / goodput.median,
            cpu_s_per_gb: CpuPerGb::new(exchange, &measured.rounds),
            server_rss_mb: largest(&measured.rounds).map(|server| server.memory.peak as f64 / MB),
        }
    }
}

impl CpuPerGb {
    fn new(exchange: &Exchange, rounds: &[Round]) -> CpuPerGb {
        let per_gb = |seconds: f64, round: &Round| seconds / (bytes(exchange, round) / GB);
        CpuPerGb {
            servers: spread(rounds, |round| per_gb(round.server_cpu_s, round)).median,
            workers: spread(rounds, |round| per_gb(round.worker_cpu_s, round)).median,
        }
    }
}

impl IterationTimes {
    fn new(rounds: &[Round]) -> IterationTimes {
        let mut times: Vec<u32> = rounds.iter().flat_map(|round| &round.times_us).copied().collect();
        times.sort_unstable();
        let longest = rounds.iter().map(|round| round.longest_us).max().unwrap_or(0);
        let milliseconds = |microseconds: u32| f64::from(microseconds) / 1e3;
        IterationTimes {
            p50: milliseconds(quantile(&times, 0.5)),
            p99: milliseconds(quantile(&times, 0.99)),
            max: milliseconds(longest),
        }
    }
}

fn bytes(exchange: &Exchange, round: &Round) -> f64 {
    exchange.bytes_per_iteration() as f64 * round.iterations as f64
}

/// In GB/s.
fn goodput(exchange: &Exchange, rounds: &[Round]) -> Spread {
    spread(rounds, |round| bytes(exchange, round) / round.seconds / GB)
}

fn spread(rounds: &[Round], figure: impl Fn(&Round) -> f64) -> Spread {
    Spread::of(&rounds.iter().map(figure).collect::<Vec<_>>())
}

/// The server that needed most memory.
fn largest(rounds: &[Round]) -> Option<&ServerMemory> {
    rounds.iter().flat_map(|round| &round.servers).max_by_key(|server| server.memory.peak)
}
