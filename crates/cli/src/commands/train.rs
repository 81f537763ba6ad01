//! `paramill train`: runs a job and reports what came of it.

use crate::args::{JobArgs, TrainArgs};
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use crate::plan::{JobPlan, check_rate};
use crate::plot;
use crate::training;
use anyhow::anyhow;
use paramill_core::policy::Axis;
use paramill_core::registry::Registry;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) fn run(args: &TrainArgs, registry: &Arc<Registry>, output: &Output) -> Result<(), Failure> {
    let plan = JobPlan::resolve(&args.job, registry, output).or_usage()?;
    if let Some(path) = &args.plot {
        plot::check(path).or_usage()?;
    }
    check_rate(plan.cluster.rate, plan.cluster.transport, plan.cluster.processes).or_usage()?;
    if plan.cluster.replicas > 0 && !plan.cluster.processes {
        return Err(anyhow!("--replicas is about server processes that may die: add --processes")).or_usage();
    }
    if plan.cluster.progress_timeout.is_some() && !plan.cluster.processes {
        let error = anyhow!("--progress-timeout is about processes that may hang: add --processes");
        return Err(error).or_usage();
    }
    if plan.inject.iter().any(|fault| fault.contains(":stall@")) && !plan.cluster.processes {
        let error =
            anyhow!("`stall` hangs a worker for ever, and its process has to be ended: add --processes");
        return Err(error).or_usage();
    }
    if args.restart > 0 && !plan.cluster.processes {
        return Err(anyhow!("--restart is about worker processes: add --processes")).or_usage();
    }
    args.checkpoints.check().or_usage()?;
    let has_broadcasts = plan.policy.is_broadcast()
        || plan
            .overrides
            .iter()
            .any(|rule| rule.policies.get(Axis::Broadcast).is_some_and(|text| text != "none"));
    if plan.cluster.topology.is_some() && !has_broadcasts {
        return Err(anyhow!(
            "--topology is about the trees of broadcasts, and nothing is broadcast: add --broadcast tree"
        ))
        .or_usage();
    }
    if let Some(local) = plan.policy.local(registry).or_usage()? {
        let usual = paramill_train::find(&plan.workload.name).or_usage()?.optimizer;
        let (inner, outer) = (local.inner().unwrap_or(usual), plan.policy.get(Axis::Optimizer));
        output.note(format!("workers step by {inner}, and servers by {outer} every {} steps", local.h()));
    }
    let training::Outcome { report, troubles } =
        training::run(&plan, args.restart, &args.checkpoints, registry, output)?;
    report.print(output)?;
    if let Some(path) = &args.plot {
        report.chart().write(path)?;
    }
    if !troubles.is_empty() {
        return Err(anyhow!("the training is done, but {}", troubles.join("; ")).into());
    }
    Ok(())
}

/// A worker process of `train --processes`.
pub(crate) fn run_worker(registry: &Arc<Registry>, output: &Output) -> Result<(), Failure> {
    let from_stdin = JobArgs { config: Some(PathBuf::from("-")), ..JobArgs::default() };
    let plan = JobPlan::resolve(&from_stdin, registry, output).or_usage()?;
    Ok(training::run_worker_process(&plan)?)
}
