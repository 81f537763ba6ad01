//! What a process of a measurement does. It is told on stdin and answers on stdout, a JSON object a line.

use super::limits;
use super::plan::{Exchange, JOB};
use super::worker::{self, Ran};
use crate::args::Transport;
use crate::training;
use anyhow::{Context, Result, anyhow};
use paramill_core::registry::Registry;
use paramill_core::types::ServerId;
use paramill_node::Hub;
use paramill_node::client::JobOptions;
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::stderr;
use paramill_node::url::JobUrl;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

/// What a process is to be; the first line it reads.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Task {
    /// A server; the first one coordinates, and the others are told where it is.
    Server { exchange: Exchange, number: u32, coordinator: Option<String> },
    /// A worker.
    Worker { exchange: Exchange, rank: u32, coordinator: String },
    /// All servers and all workers.
    Everybody { exchange: Exchange },
    /// Takes bytes from connections, and sends as many when both ways are measured.
    Sink(limits::Sink),
    /// Sends bytes to sinks.
    Source(limits::Source),
}

/// What it is told later.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Instruction {
    /// Make so many iterations.
    Run { iterations: u64 },
    /// Send for so long.
    Flow { time: Duration },
    /// Come to an end.
    Leave,
}

/// What it answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// Addresses to connect to.
    Listening { addresses: Vec<String> },
    /// Ready for instructions. A worker that knows says how many parameters each server holds.
    Ready { held: Option<Vec<u64>> },
    /// The iterations are made.
    Ran(Ran),
    /// Bytes received, in how many seconds.
    Flowed { bytes: u64, seconds: f64 },
    /// A worker's last word; workers that saw the same parameters say the same.
    Left { checksum: u64 },
}

/// Reads its task from stdin and carries it out.
pub(super) fn run(registry: &Arc<Registry>) -> Result<()> {
    training::end_with_parent()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("cannot read a task from stdin")?;
    match serde_json::from_str(&line).context("stdin is not a task of a measurement")? {
        Task::Server { exchange, number, coordinator } => {
            let server = start_server(&exchange, number, coordinator.as_deref(), None, registry)?;
            answer(&Answer::Listening { addresses: vec![server.coordinator().to_owned()] })?;
            server.join().map_err(|error| anyhow!(error))
        }
        Task::Worker { exchange, rank, coordinator } => {
            let url = JobUrl { address: coordinator, job: JOB.to_owned() };
            run_workers(&exchange, vec![(rank, JobOptions::at(url))], registry)
        }
        Task::Everybody { exchange } => everybody(&exchange, registry),
        Task::Sink(sink) => sink.run(),
        Task::Source(source) => source.run(),
    }
}

/// Tells the parent.
pub(super) fn answer(answer: &Answer) -> Result<()> {
    Ok(writeln!(std::io::stdout().lock(), "{}", serde_json::to_string(answer)?)?)
}

/// The next order; the end of stdin is the end of the parent.
pub(super) fn next_instruction() -> Result<Instruction> {
    let mut line = String::new();
    let count = std::io::stdin().lock().read_line(&mut line)?;
    if count == 0 {
        return Ok(Instruction::Leave);
    }
    serde_json::from_str(&line).context("stdin is not an order")
}

fn everybody(exchange: &Exchange, registry: &Arc<Registry>) -> Result<()> {
    let hub = Hub::new();
    let servers: Vec<Server> = (0..exchange.servers)
        .map(|number| start_server(exchange, number, None, Some(&hub), registry))
        .collect::<Result<_>>()?;
    let workers = (0..exchange.workers).map(|rank| (rank, JobOptions::in_memory(&hub, JOB))).collect();
    run_workers(exchange, workers, registry)?;
    servers.into_iter().try_for_each(|server| server.join().map_err(|error| anyhow!(error)))
}

fn start_server(
    exchange: &Exchange,
    number: u32,
    coordinator: Option<&str>,
    hub: Option<&Hub>,
    registry: &Arc<Registry>,
) -> Result<Server> {
    debug_assert!(hub.is_some() == (exchange.transport == Transport::Memory));
    let host = exchange.endpoints.host(number);
    let own = format!("{host}:0");
    let config = ServerConfig {
        coordinate: (number == 0).then(|| exchange.job_config()),
        hosts: vec![host.to_owned()],
        congestion: Some(exchange.congestion.clone()),
        cores: exchange.cores,
        pin: exchange.pin.parse()?,
        server: Some(ServerId(number)),
        memory: hub.cloned(),
        transport: exchange.transport.between_processes(),
        ..ServerConfig::new(JOB, coordinator.unwrap_or(&own))
    };
    server::start(config, registry).context("the server cannot start")
}

/// Runs workers as threads; each order goes to all of them.
fn run_workers(exchange: &Exchange, workers: Vec<(u32, JobOptions)>, registry: &Arc<Registry>) -> Result<()> {
    std::thread::scope(|scope| {
        let (mut instructions, mut threads) = (Vec::new(), Vec::new());
        for (rank, options) in workers {
            let (sender, receiver) = mpsc::channel();
            let options = options
                .rank(rank)
                .timeout(exchange.timeout)
                .transport(exchange.transport.between_processes())
                .registry(registry.clone())
                .congestion(exchange.congestion.clone());
            let options = match exchange.worker_loops {
                Some(loops) => options.loops(loops),
                None => options,
            };
            instructions.push(sender);
            threads.push(scope.spawn(move || {
                // A parent that waits for this worker's answer learns of its error by the end of the process.
                let outcome = worker::run(exchange, rank, options, &receiver);
                outcome.with_context(|| format!("worker {rank}")).unwrap_or_else(|error| {
                    stderr::line(format_args!("error: {error:#}"));
                    std::process::exit(1)
                });
            }));
        }
        loop {
            let order = next_instruction()?;
            // A worker that is gone has said why.
            for worker in &instructions {
                let _ = worker.send(order);
            }
            if matches!(order, Instruction::Leave) {
                return Ok(());
            }
        }
    })
}
