//! Training jobs: what a worker does, in one process or in many, and what is reported of it.

mod in_process;
mod processes;
mod report;
mod tally;
mod worker;

pub(crate) use processes::{
    AggregatorAnnouncement, Announcement, Ending, Message, end_with_parent, restart_grace,
    run_worker_process, start_aggregators, start_servers,
};
pub(crate) use worker::JobEnd;

use crate::args::CheckpointArgs;
use crate::output::Output;
use crate::plan::JobPlan;
use anyhow::{Context, Result};
use paramill_core::coordinator::JobConfig;
use paramill_core::fault::FaultPlan;
use paramill_core::registry::Registry;
use paramill_sim::input::read_file;
use report::TrainReport;
use std::sync::Arc;

/// The name of a job that a command starts for itself.
pub(crate) const JOB: &str = "train";

/// What came of a job whose training is done.
pub(crate) struct Outcome {
    pub(crate) report: TrainReport,
    /// What went wrong around it all the same, a sentence each.
    pub(crate) troubles: Vec<String>,
}

/// Runs a job to its end. Worker processes that die are started anew up to `restarts` times in all.
pub(crate) fn run(
    plan: &JobPlan,
    restarts: u32,
    checkpoints: &CheckpointArgs,
    registry: &Arc<Registry>,
    output: &Output,
) -> Result<Outcome> {
    match plan.cluster.processes {
        false => in_process::run(plan, checkpoints, registry, output),
        true => processes::run(plan, restarts, checkpoints, output),
    }
}

/// The job as its coordinator sees it, without the network.
pub(crate) fn job_config(plan: &JobPlan, name: &str) -> JobConfig {
    JobConfig {
        policy: plan.policy.clone(),
        overrides: plan.overrides.clone(),
        seed: plan.seed,
        replicas: plan.cluster.replicas,
        progress_timeout: plan.cluster.progress_timeout.map(|timeout| timeout.0),
        ..JobConfig::new(name, plan.cluster.workers, plan.cluster.servers)
    }
}

/// The faults of a plan, with the traces that they name read in.
pub(crate) fn faults(inject: &[String]) -> Result<FaultPlan> {
    let mut faults = FaultPlan::parse(inject)?;
    let paths: Vec<String> = faults.trace_paths().map(str::to_owned).collect();
    for path in paths {
        let text = read_file(&path).with_context(|| format!("cannot read the step trace {path}"))?;
        faults.load_trace(&path, &text).with_context(|| format!("step trace {path}"))?;
    }
    Ok(faults)
}
