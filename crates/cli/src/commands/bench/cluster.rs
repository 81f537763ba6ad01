//! Servers and workers that exchange, whoever's they are: warmed up, measured, ended.

use super::fleet::Fleet;
use super::plan::{Exchange, Length, Schedule};
use super::task::{Answer, Instruction, Task};
use super::usage;
use super::worker::{Moment, Payload, Ran};
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
    /// Of all workers together, where they say.
    pub(super) payload: Option<Payload>,
    pub(super) server_cpu_s: f64,
    pub(super) worker_cpu_s: f64,
    /// Peak memory of each server, where it has a process of its own.
    pub(super) servers: Vec<ServerMemory>,
    /// Of each worker, where parameters are broadcast.
    pub(super) moments: Vec<Vec<Moment>>,
    /// Bytes that any process sent or received at most, where each has a network of its own.
    pub(super) most_link_bytes: Option<u64>,
}

/// Memory of one server.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerMemory {
    pub(super) memory: usage::Memory,
    /// Parameters that it holds, where that is known.
    pub(super) elements: Option<u64>,
}

/// Servers and workers that have been started.
pub(super) struct Cluster {
    pub(super) fleet: Fleet,
    /// Processes of servers.
    pub(super) servers: Vec<usize>,
    /// Processes of workers, and how many workers each has.
    pub(super) workers: Vec<(usize, usize)>,
    /// How long a worker waits for another.
    pub(super) timeout: Duration,
}

#[derive(Clone, Copy)]
struct CpuSeconds {
    servers: f64,
    workers: f64,
}

impl Cluster {
    /// Our own.
    pub(super) fn start(exchange: &Exchange) -> Result<Cluster> {
        let mut fleet = Fleet::new();
        let (servers, workers) = match exchange.transport {
            Transport::Memory => {
                let task = Task::Everybody { exchange: exchange.clone() };
                (Vec::new(), vec![(fleet.start("the exchange", &task)?, exchange.workers as usize)])
            }
            _ => start_processes(&mut fleet, exchange)?,
        };
        Ok(Cluster { fleet, servers, workers, timeout: exchange.timeout })
    }

    /// Waits until all are there, warms up, measures, and ends everything in good order.
    pub(super) fn measure(mut self, schedule: &Schedule) -> Result<Round> {
        let held = self.join()?;
        let per_iteration = self.warm_up(schedule.warmup)?;
        let iterations = match schedule.length {
            Length::Iterations(iterations) => iterations,
            Length::Time(time) => fitting(time, per_iteration).max(MIN_ITERATIONS),
        };
        let (before, links_before) = (self.cpu_seconds()?, self.link_bytes()?);
        let ran = self.run(iterations, per_iteration)?;
        let (after, links_after) = (self.cpu_seconds()?, self.link_bytes()?);
        let servers = self.server_memory(held.as_deref())?;
        self.leave()?;
        Ok(Round {
            iterations,
            seconds: slowest(&ran),
            longest_us: ran.iter().map(|ran| ran.longest_us).max().unwrap_or(0),
            payload: ran.iter().map(|ran| ran.payload).reduce(add).flatten(),
            moments: ran.iter().map(|ran| ran.moments.clone()).collect(),
            most_link_bytes: links_before.zip(links_after).map(|(before, after)| {
                let both = before.into_iter().flatten().zip(after.into_iter().flatten());
                both.map(|(before, after)| after.saturating_sub(before)).max().unwrap_or(0)
            }),
            times_us: ran.into_iter().flat_map(|ran| ran.times_us).collect(),
            server_cpu_s: after.servers - before.servers,
            worker_cpu_s: after.workers - before.workers,
            servers,
        })
    }

    /// Waits until all workers are ready for instructions; returns the parameters on each server, if a worker knows.
    fn join(&mut self) -> Result<Option<Vec<u64>>> {
        let patience = self.timeout + LISTEN_DEADLINE;
        let held =
            self.fleet.answers(
                &self.workers,
                "word that it has joined",
                patience,
                |answer| match answer {
                    Answer::Ready { held } => Some(held),
                    _ => None,
                },
            )?;
        Ok(held.into_iter().flatten().next())
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
        self.fleet
            .order(self.workers.iter().map(|(process, _)| *process), Instruction::Run { iterations })?;
        // A worker gives up on a single wait by itself, and knows better for whom.
        let expected = Duration::from_secs_f64((iterations as f64 * per_iteration).min(1e6));
        let patience = 2 * self.timeout + 10 * expected;
        let what = format!("end of {iterations} iterations");
        self.fleet.answers(&self.workers, &what, patience, |answer| match answer {
            Answer::Ran(ran) => Some(ran),
            _ => None,
        })
    }

    fn cpu_seconds(&self) -> Result<CpuSeconds> {
        // In one process, threads are told apart by their names.
        let is_server = |name: &str| name.starts_with("data core") || name == "coordinator";
        let mut seconds = CpuSeconds { servers: 0.0, workers: 0.0 };
        for server in &self.servers {
            seconds.servers += usage::cpu_seconds(self.fleet.pid(*server), |_| true)?;
        }
        for (worker, _) in &self.workers {
            let pid = self.fleet.pid(*worker);
            seconds.servers += usage::cpu_seconds(pid, is_server)?;
            seconds.workers += usage::cpu_seconds(pid, |name| !is_server(name))?;
        }
        Ok(seconds)
    }

    /// Bytes that each process has received and sent; `None` unless each has a network of its own.
    fn link_bytes(&self) -> Result<Option<Vec<[u64; 2]>>> {
        let processes = self.servers.iter().chain(self.workers.iter().map(|(worker, _)| worker));
        usage::link_bytes(&processes.map(|process| self.fleet.pid(*process)).collect::<Vec<u32>>())
    }

    fn server_memory(&self, held: Option<&[u64]>) -> Result<Vec<ServerMemory>> {
        let memory = |(number, server): (usize, &usize)| {
            let memory = usage::Memory::of(self.fleet.pid(*server))?;
            Ok(ServerMemory { memory, elements: held.and_then(|held| held.get(number).copied()) })
        };
        self.servers.iter().enumerate().map(memory).collect()
    }

    /// Ends everything; all workers must have seen the same parameters.
    fn leave(mut self) -> Result<()> {
        self.fleet.order(self.workers.iter().map(|(process, _)| *process), Instruction::Leave)?;
        let patience = 2 * self.timeout;
        let checksums = self.fleet.answers(&self.workers, "last word", patience, |answer| match answer {
            Answer::Left { checksum } => Some(checksum),
            _ => None,
        })?;
        ensure!(
            checksums.windows(2).all(|pair| pair[0] == pair[1]),
            "workers ended with different parameters after the same synchronous rounds"
        );
        self.fleet.await_end()
    }
}

/// Servers, then workers, each a process.
type Processes = (Vec<usize>, Vec<(usize, usize)>);

fn start_processes(fleet: &mut Fleet, exchange: &Exchange) -> Result<Processes> {
    let (mut servers, mut coordinator): (Vec<usize>, Option<String>) = (Vec::new(), None);
    for number in 0..exchange.servers {
        let task = Task::Server { exchange: exchange.clone(), number, coordinator: coordinator.clone() };
        let process = start_process(fleet, exchange, format!("server {number}"), number, &task)?;
        let listening =
            fleet.answers(&[(process, 1)], "address", LISTEN_DEADLINE, |answer| match answer {
                Answer::Listening { addresses } => addresses.into_iter().next(),
                _ => None,
            })?;
        coordinator = coordinator.or(listening.into_iter().next());
        servers.push(process);
    }
    let coordinator = coordinator.context("there is no server")?;
    let worker = |rank| {
        let task = Task::Worker { exchange: exchange.clone(), rank, coordinator: coordinator.clone() };
        let number = exchange.servers + rank;
        Ok((start_process(fleet, exchange, format!("worker {rank}"), number, &task)?, 1))
    };
    Ok((servers, (0..exchange.workers).map(worker).collect::<Result<_>>()?))
}

/// Starts a process in its place.
fn start_process(
    fleet: &mut Fleet,
    exchange: &Exchange,
    name: String,
    number: u32,
    task: &Task,
) -> Result<usize> {
    let mut command = exchange.endpoints.command(number)?;
    command.arg("bench-process");
    fleet.start_program(name, command, task)
}

fn add(some: Option<Payload>, more: Option<Payload>) -> Option<Payload> {
    some.zip(more).map(|(some, more)| some.zip_with(more, |some, more| some + more))
}

fn slowest(ran: &[Ran]) -> f64 {
    ran.iter().map(|ran| ran.seconds).fold(0.0, f64::max)
}

/// Iterations that fit into a time, at least one.
fn fitting(time: Duration, per_iteration: f64) -> u64 {
    ((time.as_secs_f64() / per_iteration.max(1e-7)) as u64).clamp(1, MAX_ITERATIONS)
}
