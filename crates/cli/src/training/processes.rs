//! A training job as separate processes of this machine: this binary, started again in other roles.

use super::report::{Curve, TrainReport};
use super::tally::Tally;
use super::worker::{self, Step, WorkerResult};
use super::{JOB, Outcome, faults};
use crate::args::CheckpointArgs;
use crate::duration::Span;
use crate::output::Output;
use crate::plan::JobPlan;
use crate::supervisor::servers::Servers;
use crate::supervisor::workers::{Program, Workers};
use crate::supervisor::{Event, Supervisor};
use anyhow::{Context, Result, anyhow, bail, ensure};
use paramill_core::waits::Waited;
use paramill_node::client::{Job, JobOptions, WorkerId};
use paramill_node::identity::Identity;
use paramill_node::{Injection, env_vars, stderr};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a server process may take until it listens.
const SERVER_DEADLINE: Duration = Duration::from_secs(20);

/// How long a job waits for a worker that is started anew, where it cannot go on without it: a large program takes its time to
/// load. When it fails again, or may not be started again, the servers are ended at once.
const RESTART_GRACE: Span = Span(Duration::from_secs(60));

/// What a worker process writes to stdout, one JSON object a line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Message {
    Step(Step),
    Done(WorkerResult),
}

/// What a server process writes to stdout once it listens, when it is asked for JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Announcement {
    /// The job's URL.
    pub(crate) url: String,
    /// Where its data cores listen.
    pub(crate) data: Vec<String>,
    /// The CPU of each data core; empty when they are not pinned.
    pub(crate) cpus: Vec<usize>,
}

/// What the server that coordinates a job writes to stdout when the job is over, when it is asked for JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ending {
    /// How the job ended, as `paramill status` says it.
    pub(crate) phase: String,
    /// How long all workers waited together, and for whom.
    pub(crate) waited: Waited,
}

/// What an aggregator process writes to stdout once it listens, when it is asked for JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AggregatorAnnouncement {
    /// The job's URL.
    pub(crate) url: String,
    /// Where workers come in.
    pub(crate) address: String,
}

/// Trains in processes of their own. Workers that die are started anew up to `restarts` times in all.
pub(crate) fn run(
    plan: &JobPlan,
    restarts: u32,
    checkpoints: &CheckpointArgs,
    output: &Output,
) -> Result<Outcome> {
    let mut processes = Supervisor::new();
    let text = plan.to_toml();
    let mut first = Vec::from(["--job", JOB, "--config", "-"].map(str::to_owned));
    first.extend(restart_grace(restarts));
    first.extend(checkpoints.of_first());
    let mut joining = vec![
        format!("--cores={}", plan.cluster.cores),
        format!("--seed={}", plan.seed),
        format!("--transport={}", plan.cluster.transport),
    ];
    joining.extend(plan.cluster.rate.map(|rate| format!("--rate={rate}")));
    joining.extend(plan.inject.iter().map(|fault| format!("--inject={fault}")));
    let servers = [joining.clone(), checkpoints.of_others()].concat();
    let url = start_servers(&mut processes, plan.cluster.servers, &first, &text, &servers)?;
    output.note(format!("the job is at {url}"));
    let aggregators = start_aggregators(&mut processes, plan.cluster.aggregators, &url, &joining[1..])?;
    let first_worker = plan.cluster.servers as usize + aggregators.len();
    let count = plan.cluster.workers;
    let command = |rank: u32| -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("worker-process").env(env_vars::URL, &url).env(env_vars::RANK, rank.to_string());
        // What this process goes through, if anything, is not for its workers.
        command.env_remove(env_vars::AGGREGATOR);
        if let Some(aggregator) = plan.cluster.aggregator_of(rank) {
            command.env(env_vars::AGGREGATOR, &aggregators[aggregator]);
        }
        Ok(command)
    };
    let program = Program { command: Box::new(command), input: &text, lingers: false };
    let servers = Servers::new(&url, plan.cluster.servers, plan.cluster.replicas, &servers);
    let mut workers = Workers::start(&mut processes, &url, count, restarts, servers, program)?;
    let mut progress = None;
    let (mut curve, mut tally) = (Curve::new(count), Tally::default());
    let mut results: Vec<WorkerResult> = Vec::new();
    let mut troubles = Vec::new();
    while workers.any_running(&processes) {
        workers.tend(&processes)?;
        let Some(event) = processes.next(Duration::from_secs(1)) else { continue };
        match event {
            Event::Out { child, line } if workers.has(child) => match serde_json::from_str(&line) {
                Ok(Message::Step(step)) => {
                    let began = tally.hear(child, Instant::now(), step.work.seconds, step.work);
                    let done = curve.add(&step, began);
                    progress
                        .get_or_insert_with(|| output.progress(step.total * u64::from(count)))
                        .set(done, &format!("steps, loss {:.4}", step.loss));
                }
                Ok(Message::Done(result)) => {
                    tally.hear(child, Instant::now(), result.elapsed, result.work);
                    workers.finish(result.rank);
                    results.push(result);
                }
                Err(_) => stderr::line(format_args!("{}: {line}", processes.name(child))),
            },
            // Servers say on stdout where they listen, which the workers learn from the coordinator.
            Event::Out { .. } => {}
            Event::Error { child, line } => stderr::line(format_args!("{}: {line}", processes.name(child))),
            Event::Exited { child, status }
                if !status.success() && !workers.has(child) && results.len() == count as usize =>
            {
                troubles.push(format!("{} failed ({status}) after the training", processes.name(child)));
            }
            Event::Exited { child, status } if !status.success() => {
                progress = None;
                workers.failed(&mut processes, child, status)?;
            }
            Event::Exited { .. } => {}
        }
    }
    drop(progress);
    // A job that waits for a worker which is done would wait for nothing.
    if !workers.is_missed() {
        troubles.extend(await_servers(&mut processes, first_worker, SERVER_DEADLINE));
    }
    for rank in (0..count).filter(|rank| results.iter().all(|result| result.rank != *rank)) {
        troubles.push(format!("worker {rank} reported no result, and the figures are without it"));
    }
    let report = TrainReport::new(plan, &results, tally.total(), workers.restarts(), curve)?;
    Ok(Outcome { report, troubles })
}

/// Has the kernel end this process when the one that started it ends, however that happens.
pub(crate) fn end_with_parent() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
        .context("cannot ask to be ended with the parent process")?;
    Ok(())
}

/// The worker process: its plan comes on stdin, who it is in the environment, its messages go to stdout.
pub(crate) fn run_worker_process(plan: &JobPlan) -> Result<()> {
    end_with_parent()?;
    let identity = Identity::from_environment().map_err(|why| anyhow!(why))?;
    let rank = WorkerId(identity.context("a training worker needs a rank")?.rank);
    ensure!(rank.0 < plan.cluster.workers, "rank {} of {} workers", rank.0, plan.cluster.workers);
    let faults = faults(&plan.inject)?;
    let mut options =
        JobOptions::from_environment()?.timeout(plan.cluster.timeout.0).transport(plan.cluster.transport);
    // What `launch` injects stays where the plan has no faults.
    if !faults.is_empty() {
        options = options.inject(Injection { plan: faults.clone(), seed: plan.seed });
    }
    if let Some(rate) = plan.cluster.rate {
        options = options.rate(rate);
    }
    let workload = paramill_train::build(&plan.workload_config(rank.0))?;
    let tell = |message: &Message| -> Result<()> {
        Ok(writeln!(std::io::stdout(), "{}", serde_json::to_string(message)?)?)
    };
    // A parent that is gone does not hear how far it is; the kernel ends this process with it.
    let job = Job::init(options)?;
    let result = worker::run(plan, &faults, rank, &job, workload, |step| drop(tell(&Message::Step(step))))?;
    tell(&Message::Done(result))?;
    Ok(job.close()?)
}

/// What the first server is told where workers that die are started anew.
pub(crate) fn restart_grace(restarts: u32) -> Option<String> {
    (restarts > 0).then(|| format!("--restart-grace={RESTART_GRACE}"))
}

/// Starts the servers of a job on this machine and returns its URL. The first one gets the arguments `first`, and `input`
/// on stdin; the others get the arguments `joining`.
pub(crate) fn start_servers(
    processes: &mut Supervisor,
    servers: u32,
    first: &[String],
    input: &str,
    joining: &[String],
) -> Result<String> {
    let serve = |number: u32| -> Result<Command> {
        let mut command =
            Command::new(std::env::current_exe().context("cannot find this program's own file")?);
        command.args(["serve", "--json", "--end-with-parent", "--index", &number.to_string()]);
        Ok(command)
    };
    let mut command = serve(0)?;
    command.args(["--listen", "127.0.0.1:0"]).args(first);
    let number = processes.spawn("server 0", command, input)?;
    let url = announce::<Announcement>(processes, number)?.url;
    for number in 1..servers {
        let mut command = serve(number)?;
        command.args(["--join", &url]).args(joining);
        let number = processes.spawn(format!("server {number}"), command, "")?;
        announce::<Announcement>(processes, number)?;
    }
    Ok(url)
}

/// Starts the aggregators of a job on this machine with these arguments, and returns where workers come in.
pub(crate) fn start_aggregators(
    processes: &mut Supervisor,
    aggregators: u32,
    url: &str,
    arguments: &[String],
) -> Result<Vec<String>> {
    let start = |number: u32| -> Result<String> {
        let mut command =
            Command::new(std::env::current_exe().context("cannot find this program's own file")?);
        command.args(["aggregate", "--json", "--end-with-parent", "--index", &number.to_string()]);
        command.args(["--job", url, "--listen", "127.0.0.1:0"]).args(arguments);
        let number = processes.spawn(format!("aggregator {number}"), command, "")?;
        Ok(announce::<AggregatorAnnouncement>(processes, number)?.address)
    };
    (0..aggregators).map(start).collect()
}

/// Waits for a process to say where it listens.
fn announce<T: DeserializeOwned>(processes: &mut Supervisor, server: usize) -> Result<T> {
    loop {
        let name = processes.name(server).to_owned();
        match processes.next(SERVER_DEADLINE) {
            Some(Event::Out { child, line }) if child == server => {
                return serde_json::from_str(&line).with_context(|| format!("{name} said `{line}`"));
            }
            Some(Event::Exited { child, status }) if child == server => bail!("{name} failed ({status})"),
            Some(Event::Out { child, line } | Event::Error { child, line }) => {
                stderr::line(format_args!("{}: {line}", processes.name(child)));
            }
            Some(Event::Exited { .. }) => {}
            None => bail!("{name} did not listen within {} s", SERVER_DEADLINE.as_secs()),
        }
    }
}

/// The workers have left: the servers end by themselves. What is to be said of those that do not, or not well.
fn await_servers(processes: &mut Supervisor, servers: usize, patience: Duration) -> Vec<String> {
    let deadline = Instant::now() + patience;
    let mut troubles = Vec::new();
    while processes.any_running(0..servers) {
        match processes.next(deadline.saturating_duration_since(Instant::now())) {
            Some(Event::Exited { child, status }) if child < servers && !status.success() => {
                troubles.push(format!("{} failed ({status}) after the training", processes.name(child)));
            }
            Some(Event::Error { child, line }) => {
                stderr::line(format_args!("{}: {line}", processes.name(child)))
            }
            Some(_) => {}
            None => {
                troubles.push(format!(
                    "{} did not end within {} s after the workers had left",
                    processes.running().join(", "),
                    patience.as_secs_f64()
                ));
                break;
            }
        }
    }
    troubles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_fail_or_stay_are_named() {
        let mut processes = Supervisor::new();
        for (name, script) in [("server 0", "exit 7"), ("server 1", "exec sleep 987"), ("server 2", "exit 0")]
        {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            processes.spawn(name, command, "").expect("there is a shell");
        }
        let troubles = await_servers(&mut processes, 3, Duration::from_secs(3));
        let stays = "server 1 did not end within 3 s after the workers had left";
        assert_eq!(troubles, ["server 0 failed (exit status: 7) after the training", stays]);
    }
}
