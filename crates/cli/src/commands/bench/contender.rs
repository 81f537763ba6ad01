//! One round of our own exchange: started, warmed up, measured, ended.

use super::crew::Crew;
use super::part::{Answer, Order, Part};
use super::plan::{Exchange, Length, Schedule};
use super::usage;
use super::worker::Ran;
use crate::args::Transport;
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

/// How long a process may take until it listens.
const LISTEN_DEADLINE: Duration = Duration::from_secs(20);
/// Iterations that a round has at least, however slow they are.
const MIN_ITERATIONS: u64 = 3;
const MAX_ITERATIONS: u64 = 10_000_000;

/// What a round found.
#[derive(Debug, Clone)]
pub(super) struct Round {
    pub(super) iterations: u64,
    pub(super) seconds: f64,
    /// Microseconds that single iterations took.
    pub(super) times_us: Vec<u32>,
    pub(super) longest_us: u32,
    pub(super) server_cpu_s: f64,
    pub(super) worker_cpu_s: f64,
    /// Peak memory of each server, where it has a process of its own.
    pub(super) servers: Vec<ServerMemory>,
}

/// Memory of one server.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerMemory {
    pub(super) peak_bytes: u64,
    /// Parameters that it holds.
    pub(super) elements: u64,
}

/// Runs one round.
pub(super) fn measure(exchange: &Exchange, schedule: &Schedule) -> Result<Round> {
    let mut cluster = Cluster::start(exchange)?;
    let per_iteration = cluster.warm_up(schedule.warmup)?;
    let iterations = match schedule.length {
        Length::Iterations(iterations) => iterations,
        Length::Time(time) => fitting(time, per_iteration).max(MIN_ITERATIONS),
    };
    let before = cluster.cpu_seconds()?;
    let ran = cluster.run(iterations, per_iteration)?;
    let after = cluster.cpu_seconds()?;
    let servers = cluster.server_memory()?;
    cluster.leave()?;
    Ok(Round {
        iterations,
        seconds: slowest(&ran),
        longest_us: ran.iter().map(|ran| ran.longest_us).max().unwrap_or(0),
        times_us: ran.into_iter().flat_map(|ran| ran.times_us).collect(),
        server_cpu_s: after.servers - before.servers,
        worker_cpu_s: after.workers - before.workers,
        servers,
    })
}

/// Servers and workers that are ready for orders.
struct Cluster<'a> {
    exchange: &'a Exchange,
    crew: Crew,
    /// Processes of servers come first.
    servers: usize,
    /// Processes of workers, and how many workers each has.
    workers: Vec<(usize, usize)>,
    /// Parameters on each server.
    held: Vec<u64>,
}

#[derive(Clone, Copy)]
struct CpuSeconds {
    servers: f64,
    workers: f64,
}

impl Cluster<'_> {
    fn start(exchange: &Exchange) -> Result<Cluster<'_>> {
        let mut crew = Crew::new();
        let (servers, workers) = match exchange.transport {
            Transport::Memory => {
                let part = Part::Everybody { exchange: exchange.clone() };
                (0, vec![(crew.start("the exchange", &part)?, exchange.workers as usize)])
            }
            _ => start_processes(&mut crew, exchange)?,
        };
        let ready = |answer| match answer {
            Answer::Ready { held } => Some(held),
            _ => None,
        };
        let patience = exchange.timeout + LISTEN_DEADLINE;
        let held = crew.answers(&workers, "word that it has joined", patience, ready)?;
        let held = held.into_iter().flatten().next().context("worker 0 did not say who holds what")?;
        ensure!(
            held.iter().sum::<u64>() == exchange.elements(),
            "the servers hold {} parameters instead of {}",
            held.iter().sum::<u64>(),
            exchange.elements()
        );
        Ok(Cluster { exchange, crew, servers, workers, held })
    }

    /// Runs for a time without counting; returns how long an iteration takes, in seconds.
    fn warm_up(&mut self, time: Duration) -> Result<f64> {
        let began = Instant::now();
        // The first iteration touches memory for the first time, and says little about the others.
        let mut per_iteration = slowest(&self.run(1, 0.0)?);
        while let Some(left) = time.checked_sub(began.elapsed()) {
            let iterations = fitting(left / 2, per_iteration);
            per_iteration = slowest(&self.run(iterations, per_iteration)?) / iterations as f64;
        }
        Ok(per_iteration)
    }

    /// Has all workers make so many iterations.
    fn run(&mut self, iterations: u64, per_iteration: f64) -> Result<Vec<Ran>> {
        self.crew.order(self.workers.iter().map(|(process, _)| *process), Order::Run { iterations })?;
        // A worker gives up on a single wait by itself, and knows better for whom.
        let expected = Duration::from_secs_f64((iterations as f64 * per_iteration).min(1e6));
        let patience = 2 * self.exchange.timeout + 10 * expected;
        let what = format!("end of {iterations} iterations");
        self.crew.answers(&self.workers, &what, patience, |answer| match answer {
            Answer::Ran(ran) => Some(ran),
            _ => None,
        })
    }

    fn cpu_seconds(&self) -> Result<CpuSeconds> {
        // In one process, threads are told apart by their names.
        let is_server = |name: &str| name.starts_with("data core") || name == "coordinator";
        let mut seconds = CpuSeconds { servers: 0.0, workers: 0.0 };
        for server in 0..self.servers {
            seconds.servers += usage::cpu_seconds(self.crew.pid(server), |_| true)?;
        }
        for (worker, _) in &self.workers {
            let pid = self.crew.pid(*worker);
            seconds.servers += usage::cpu_seconds(pid, is_server)?;
            seconds.workers += usage::cpu_seconds(pid, |name| !is_server(name))?;
        }
        Ok(seconds)
    }

    fn server_memory(&self) -> Result<Vec<ServerMemory>> {
        let memory = |server: usize| {
            let peak_bytes = usage::peak_rss_bytes(self.crew.pid(server))?;
            Ok(ServerMemory { peak_bytes, elements: self.held[server] })
        };
        (0..self.servers).map(memory).collect()
    }

    /// Ends everything in good order; all workers must have seen the same parameters.
    fn leave(mut self) -> Result<()> {
        self.crew.order(self.workers.iter().map(|(process, _)| *process), Order::Leave)?;
        let patience = 2 * self.exchange.timeout;
        let checksums = self.crew.answers(&self.workers, "last word", patience, |answer| match answer {
            Answer::Left { checksum } => Some(checksum),
            _ => None,
        });
        let checksums = checksums?;
        ensure!(
            checksums.windows(2).all(|pair| pair[0] == pair[1]),
            "workers ended with different parameters after the same synchronous rounds"
        );
        self.crew.await_end(0..self.servers + self.workers.len())
    }
}

fn start_processes(crew: &mut Crew, exchange: &Exchange) -> Result<(usize, Vec<(usize, usize)>)> {
    let mut coordinator: Option<String> = None;
    for number in 0..exchange.servers {
        let part = Part::Server { exchange: exchange.clone(), number, coordinator: coordinator.clone() };
        let process = start_process(crew, exchange, format!("server {number}"), number, &part)?;
        let listening = crew.answers(&[(process, 1)], "address", LISTEN_DEADLINE, |answer| match answer {
            Answer::Listening { addresses } => addresses.into_iter().next(),
            _ => None,
        });
        coordinator = coordinator.or(listening?.into_iter().next());
    }
    let coordinator = coordinator.context("there is no server")?;
    let worker = |rank| {
        let part = Part::Worker { exchange: exchange.clone(), rank, coordinator: coordinator.clone() };
        let number = exchange.servers + rank;
        Ok((start_process(crew, exchange, format!("worker {rank}"), number, &part)?, 1))
    };
    Ok((exchange.servers as usize, (0..exchange.workers).map(worker).collect::<Result<_>>()?))
}

/// Starts a process in its place.
fn start_process(
    crew: &mut Crew,
    exchange: &Exchange,
    name: String,
    number: u32,
    part: &Part,
) -> Result<usize> {
    let mut command = exchange.places.command(number)?;
    command.arg("bench-process");
    crew.start_program(name, command, part)
}

fn slowest(ran: &[Ran]) -> f64 {
    ran.iter().map(|ran| ran.seconds).fold(0.0, f64::max)
}

/// Iterations that fit into a time, at least one.
fn fitting(time: Duration, per_iteration: f64) -> u64 {
    ((time.as_secs_f64() / per_iteration.max(1e-7)) as u64).clamp(1, MAX_ITERATIONS)
}
