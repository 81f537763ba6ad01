//! `paramill launch`: servers and copies of a command on this machine; one failure ends all, but for workers that may be
//! started anew.

use crate::args::LaunchArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use crate::plan::{JobPlan, check_rate};
use crate::supervisor::workers::{Program, Workers};
use crate::supervisor::{Event, Supervisor};
use crate::training;
use anyhow::{Result, anyhow};
use paramill_core::registry::Registry;
use paramill_node::{env_vars, stderr};
use serde::Serialize;
use std::process::Command;
use std::time::Duration;

pub(crate) fn run(args: &LaunchArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let plan = check(args, registry, output).or_usage()?;
    let mut processes = Supervisor::with_keeper()?;
    let transport = plan.cluster.transport;
    let mut joining = vec![format!("--cores={}", plan.cluster.cores), format!("--transport={transport}")];
    joining.extend(args.rate.map(|rate| format!("--rate={rate}")));
    let mut first = args.policy.as_arguments();
    first.extend([format!("--workers={}", args.workers), format!("--servers={}", args.servers)]);
    if let Some(topology) = &args.topology {
        first.push(format!("--topology={}", topology.display()));
    }
    first.extend_from_slice(&joining);
    first.extend(training::restart_grace(args.restart));
    let url = training::start_servers(&mut processes, args.servers, &first, "", &joining)?;
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
        if let Some(loops) = args.loops {
            command.env(env_vars::LOOPS, loops.to_string());
        }
        if let Some(threads) = threads {
            command.env(env_vars::THREADS, threads.to_string());
        }
        Ok(command)
    };
    let program = Program { command: Box::new(command), input: "", lingers: true };
    let mut workers = Workers::start(&mut processes, &url, args.workers, args.restart, program)?;
    while workers.any_running(&processes) {
        workers.tend(&processes)?;
        let Some(event) = processes.next(Duration::from_secs(1)) else { continue };
        match event {
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
    // Servers of a job that started have ended with it; those of commands that never joined end here.
    processes.end_all();
    if !workers.late_failures().is_empty() {
        return Err(anyhow!(workers.late_failures().join("; ")).into());
    }
    if output.json() {
        output.object(&Launched { url: url.clone(), workers: args.workers, servers: args.servers })?;
    }
    Ok(())
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
}

/// Policies and numbers are checked before anything is started.
fn check(args: &LaunchArgs, registry: &Registry, output: &Output) -> Result<JobPlan> {
    let job = crate::args::JobArgs {
        workers: Some(args.workers),
        servers: Some(args.servers),
        cores: args.cores,
        aggregators: args.aggregators,
        transport: args.transport,
        rate: args.rate,
        topology: args.topology.clone(),
        policy: args.policy.clone(),
        ..Default::default()
    };
    let plan = JobPlan::resolve(&job, registry, output)?;
    check_rate(plan.cluster.rate, plan.cluster.transport, true)?;
    Ok(plan)
}
