//! `paramill launch`: servers and copies of a command on this machine; one failure ends all, but for workers that may be
//! started anew.

use crate::args::LaunchArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use crate::plan::{JobPlan, check_rate};
use crate::supervisor::servers::Servers;
use crate::supervisor::workers::{COORDINATOR, Program, Workers};
use crate::supervisor::{Event, Supervisor};
use crate::training::{self, Ending};
use anyhow::{Result, anyhow};
use paramill_core::fault::FaultPlan;
use paramill_core::registry::Registry;
use paramill_core::status::{MemberState, Status, WorkerStatus};
use paramill_core::waits::Waited;
use paramill_node::admin::Admin;
use paramill_node::url::JobUrl;
use paramill_node::{env_vars, stderr};
use serde::Serialize;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long the job may take to say how it ended, once the worker processes have.
const ENDING_DEADLINE: Duration = Duration::from_secs(10);
/// How long the servers may take for the last checkpoint of a job.
const LAST_CHECKPOINT_DEADLINE: Duration = Duration::from_secs(130);
/// How long it is waited for that before the job is asked.
const ASK_EVERY: Duration = Duration::from_millis(300);

pub(crate) fn run(args: &LaunchArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let plan = check(args, registry, output).or_usage()?;
    let mut processes = Supervisor::with_keeper()?;
    let transport = plan.cluster.transport;
    let mut joining = vec![format!("--cores={}", plan.cluster.cores), format!("--transport={transport}")];
    joining.extend(args.rate.map(|rate| format!("--rate={rate}")));
    joining.extend(args.inject.iter().map(|fault| format!("--inject={fault}")));
    let mut first = args.policy.as_arguments();
    first.extend([format!("--workers={}", args.workers), format!("--servers={}", args.servers)]);
    first.push(format!("--replicas={}", plan.cluster.replicas));
    first.extend(args.progress_timeout.map(|timeout| format!("--progress-timeout={timeout}")));
    if let Some(topology) = &args.topology {
        first.push(format!("--topology={}", topology.display()));
    }
    first.extend_from_slice(&joining);
    first.extend(training::restart_grace(args.restart));
    args.checkpoints.check().or_usage()?;
    first.extend(args.checkpoints.of_first());
    let servers = [joining.clone(), args.checkpoints.of_others()].concat();
    let url = training::start_servers(&mut processes, args.servers, &first, "", &servers)?;
    output.note(format!("the job is at {url}"));
    let count = args.aggregators.unwrap_or(0);
    let aggregators = training::start_aggregators(&mut processes, count, &url, &joining[1..])?;
    let threads = threads_of_each(args.workers);
    if let Some(threads) = threads {
        output.note(format!(
            "each worker may use {threads} of this machine's CPUs ({}={threads})",
            env_vars::THREADS
        ));
    }
    let command = |rank: u32| -> Result<Command> {
        let mut command = Command::new(&args.command[0]);
        command.args(&args.command[1..]);
        command.env(env_vars::URL, &url);
        command.env(env_vars::RANK, rank.to_string());
        command.env(env_vars::WORKERS, args.workers.to_string());
        command.env_remove(env_vars::AGGREGATOR);
        if let Some(aggregator) = plan.cluster.aggregator_of(rank) {
            command.env(env_vars::AGGREGATOR, &aggregators[aggregator]);
        }
        command.env(env_vars::TRANSPORT, transport.to_string());
        if let Some(rate) = args.rate {
            command.env(env_vars::RATE, rate.to_string());
        }
        match args.inject.as_slice() {
            // Faults of this process' own environment are not those of the job.
            [] => command.env_remove(env_vars::INJECT),
            faults => command.env(env_vars::INJECT, faults.join(";")),
        };
        if let Some(loops) = args.loops {
            command.env(env_vars::LOOPS, loops.to_string());
        }
        if let Some(threads) = threads {
            command.env(env_vars::THREADS, threads.to_string());
        }
        Ok(command)
    };
    let program = Program { command: Box::new(command), input: "", lingers: true };
    let servers = Servers::new(&url, args.servers, plan.cluster.replicas, &servers);
    let mut workers = Workers::start(&mut processes, &url, args.workers, args.restart, servers, program)?;
    let mut ending = None;
    while workers.any_running(&processes) {
        workers.tend(&processes)?;
        let Some(event) = processes.next(Duration::from_secs(1)) else { continue };
        match event {
            Event::Out { child: COORDINATOR, line } => ending = read_ending(&line),
            Event::Out { child, line } if !output.json() => {
                output.text(format!("[{}] {line}", processes.name(child)))?;
            }
            Event::Out { child, line } | Event::Error { child, line } => {
                stderr::line(format_args!("[{}] {line}", processes.name(child)));
            }
            Event::Exited { child, status } if !status.success() => {
                workers.failed(&mut processes, child, status)?;
            }
            Event::Exited { .. } => {}
        }
    }
    if output.json() && ending.is_none() {
        ending = await_ending(&mut processes, &url);
    }
    if args.checkpoints.checkpoint.is_some() {
        await_last_checkpoint(&mut processes, args.servers as usize);
    }
    // Servers of a job that started have ended with it; those of commands that never joined end here.
    processes.end_all();
    if !workers.late_failures().is_empty() {
        return Err(anyhow!(workers.late_failures().join("; ")).into());
    }
    if output.json() {
        output.object(&Launched {
            url: url.clone(),
            workers: args.workers,
            servers: args.servers,
            restarts: workers.restarts(),
            waited: ending.map(|ending| ending.waited),
        })?;
    }
    Ok(())
}

/// What the coordinator wrote when the job was over.
fn read_ending(line: &str) -> Option<Ending> {
    let ending = serde_json::from_str(line).ok();
    if ending.is_none() {
        stderr::line(format_args!("[server 0] {line}"));
    }
    ending
}

/// The worker processes have ended: what the job says about itself. A job whose workers have not all left it goes on for a while, and
/// one that nobody joined waits: these are asked.
fn await_ending(processes: &mut Supervisor, url: &str) -> Option<Ending> {
    let deadline = Instant::now() + ENDING_DEADLINE;
    let url: JobUrl = url.parse().ok()?;
    while Instant::now() < deadline {
        match processes.next(ASK_EVERY) {
            Some(Event::Out { child: COORDINATOR, line }) => return read_ending(&line),
            Some(Event::Out { child, line } | Event::Error { child, line }) => {
                stderr::line(format_args!("[{}] {line}", processes.name(child)));
            }
            Some(Event::Exited { child: COORDINATOR, .. }) => return None,
            Some(Event::Exited { .. }) => {}
            None => {
                let asked = Admin::connect(&url, ASK_EVERY).and_then(|mut admin| admin.status());
                let is_open = |status: &Status| {
                    let has_left = |worker: &WorkerStatus| worker.state == MemberState::Left;
                    status.workers.is_empty() || !status.workers.iter().all(has_left)
                };
                if let Some(status) = asked.ok().filter(is_open) {
                    return Some(Ending { phase: status.phase, waited: status.waited });
                }
            }
        }
    }
    None
}

/// The servers of a job that ended well save what it came to before they end.
fn await_last_checkpoint(processes: &mut Supervisor, servers: usize) {
    let deadline = Instant::now() + LAST_CHECKPOINT_DEADLINE;
    while processes.any_running(0..servers) && Instant::now() < deadline {
        match processes.next(ASK_EVERY) {
            Some(Event::Out { child, line } | Event::Error { child, line }) => {
                stderr::line(format_args!("[{}] {line}", processes.name(child)));
            }
            Some(Event::Exited { .. }) | None => {}
        }
    }
}

/// Threads of each worker's numerical libraries, where the user does not say. Every process would use all CPUs, and several
/// of them would spend most of their time waiting for each other's threads.
fn threads_of_each(workers: u32) -> Option<usize> {
    if workers < 2 || std::env::var_os(env_vars::THREADS).is_some() {
        return None;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Some((cpus / workers as usize).max(1))
}

/// What was run to its end; the commands' own output goes to stderr beside it.
#[derive(Serialize)]
struct Launched {
    url: String,
    workers: u32,
    servers: u32,
    /// Worker processes that were started anew.
    restarts: u32,
    /// How long all workers waited together, and for whom; `None` where the job did not say so.
    waited: Option<Waited>,
}

/// Policies and numbers are checked before anything is started.
fn check(args: &LaunchArgs, registry: &Registry, output: &Output) -> Result<JobPlan> {
    let job = crate::args::JobArgs {
        workers: Some(args.workers),
        servers: Some(args.servers),
        replicas: args.replicas,
        progress_timeout: args.progress_timeout,
        cores: args.cores,
        aggregators: args.aggregators,
        transport: args.transport,
        rate: args.rate,
        inject: args.inject.clone(),
        topology: args.topology.clone(),
        policy: args.policy.clone(),
        ..Default::default()
    };
    let plan = JobPlan::resolve(&job, registry, output)?;
    check_rate(plan.cluster.rate, plan.cluster.transport, true)?;
    FaultPlan::parse(&plan.inject)?.check_for_programs()?;
    Ok(plan)
}
