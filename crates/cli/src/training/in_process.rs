//! A training job in this process: servers and workers are threads, and no socket is used.

use super::report::{Curve, TrainReport};
use super::worker::{self, Step, Work, WorkerResult};
use super::{JOB, Outcome, faults, job_config};
use crate::args::CheckpointArgs;
use crate::output::Output;
use crate::plan::JobPlan;
use anyhow::{Context, Result, anyhow};
use paramill_core::coordinator::JobConfig;
use paramill_core::fault::FaultPlan;
use paramill_core::registry::Registry;
use paramill_core::types::{AggregatorId, ServerId, WorkerId};
use paramill_node::aggregator::{self, Aggregator, AggregatorConfig};
use paramill_node::client::{Job, JobOptions};
use paramill_node::exhaustion;
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::{Hub, Injection};
use paramill_train::Workload;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc;

/// What a worker's thread says while it runs.
enum News {
    Step(Step),
    /// Nothing follows from this worker.
    Failed(anyhow::Error),
}

pub(crate) fn run(
    plan: &JobPlan,
    checkpoints: &CheckpointArgs,
    registry: &Arc<Registry>,
    output: &Output,
) -> Result<Outcome> {
    let faults = faults(&plan.inject)?;
    let workloads = paramill_train::build_all(&plan.workload_config(0))?;
    let total = workloads[0].steps_per_epoch() * plan.workload.epochs;
    let hub = Hub::new();
    let servers = start_servers(plan, checkpoints, &hub, registry, output)?;
    let aggregators = start_aggregators(plan, &hub, registry)?;
    let join = |rank: u32| -> Result<Job> {
        let mut options = JobOptions::in_memory(&hub, JOB)
            .rank(rank)
            .timeout(plan.cluster.timeout.0)
            .registry(registry.clone())
            .inject(Injection { plan: faults.clone(), seed: plan.seed });
        if let Some(number) = plan.cluster.aggregator_of(rank) {
            options = options.aggregator(aggregators[number].address());
        }
        Job::init(options).with_context(|| format!("worker {rank} cannot start"))
    };
    // All join before any of them waits: one that cannot would be waited for until the time-out.
    let jobs = (0..plan.cluster.workers).map(join).collect::<Result<Vec<Job>>>()?;
    let mut progress = output.progress(total * u64::from(plan.cluster.workers));
    let mut curve = Curve::new(plan.cluster.workers);
    let results = work(plan, &faults, &jobs, workloads, |step| {
        let done = curve.add(step, 0.0);
        progress.set(done, &format!("steps, loss {:.4}", step.loss));
    });
    drop(progress);
    let results = results?;
    for server in servers {
        server.join().map_err(|error| anyhow!("a server failed: {error}"))?;
    }
    for aggregator in aggregators {
        aggregator.join().map_err(|error| anyhow!("an aggregator failed: {error}"))?;
    }
    let work = results.iter().map(|result| result.work).fold(Work::default(), Work::beside);
    Ok(Outcome { report: TrainReport::new(plan, &results, work, 0, curve)?, troubles: Vec::new() })
}

/// Runs every worker in a thread of its own. The first that fails ends all others, and its error is the one to tell: theirs
/// follow from it.
fn work(
    plan: &JobPlan,
    faults: &FaultPlan,
    jobs: &[Job],
    workloads: Vec<Box<dyn Workload>>,
    mut tell: impl FnMut(&Step),
) -> Result<Vec<WorkerResult>> {
    let (sender, news) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for ((workload, job), rank) in workloads.into_iter().zip(jobs).zip(0..) {
            let name = format!("worker {rank}");
            let news = sender.clone();
            let body = move || {
                let step = |step| drop(news.send(News::Step(step)));
                let train = || {
                    let result = worker::run(plan, faults, WorkerId(rank), job, workload, step)?;
                    job.close()?;
                    Ok(result)
                };
                let outcome = panic::catch_unwind(AssertUnwindSafe(train));
                let outcome = outcome.unwrap_or_else(|_| Err(anyhow!("its thread panicked")));
                match outcome.with_context(|| format!("worker {rank}")) {
                    Ok(result) => Some(result),
                    Err(error) => {
                        drop(news.send(News::Failed(error)));
                        None
                    }
                }
            };
            match std::thread::Builder::new().name(name.clone()).spawn_scoped(scope, body) {
                Ok(thread) => workers.push(thread),
                Err(error) => {
                    let error = anyhow!(exhaustion::explain(error)).context(format!("{name} cannot start"));
                    drop(sender.send(News::Failed(error)));
                    break;
                }
            }
        }
        drop(sender);
        let mut cause = None;
        for news in &news {
            match news {
                News::Step(step) => tell(&step),
                News::Failed(error) if cause.is_none() => {
                    cause = Some(error);
                    jobs.iter().for_each(Job::abandon);
                }
                News::Failed(_) => {}
            }
        }
        let results = workers.into_iter().filter_map(|worker| worker.join().ok().flatten()).collect();
        cause.map_or(Ok(results), Err)
    })
}

fn start_servers(
    plan: &JobPlan,
    checkpoints: &CheckpointArgs,
    hub: &Hub,
    registry: &Arc<Registry>,
    output: &Output,
) -> Result<Vec<Server>> {
    let checkpointing = checkpoints.checkpointing(JOB, output)?;
    let base = ServerConfig {
        cores: plan.cluster.cores,
        memory: Some(hub.clone()),
        faults: faults(&plan.inject)?,
        seed: plan.seed,
        checkpoints: checkpoints.place()?,
        ..ServerConfig::new(JOB, "")
    };
    (0..plan.cluster.servers)
        .map(|number| {
            // Threads of one process have no hosts that could be named.
            let job = || JobConfig { checkpoints: checkpointing.clone(), ..job_config(plan, JOB) };
            let coordinate = (number == 0).then(job);
            let config = ServerConfig { coordinate, server: Some(ServerId(number)), ..base.clone() };
            Ok(server::start(config, registry)?)
        })
        .collect()
}

fn start_aggregators(plan: &JobPlan, hub: &Hub, registry: &Arc<Registry>) -> Result<Vec<Aggregator>> {
    let start = |number: u32| -> Result<Aggregator> {
        let config = AggregatorConfig {
            id: Some(AggregatorId(number)),
            memory: Some(hub.clone()),
            faults: faults(&plan.inject)?,
            seed: plan.seed,
            ..AggregatorConfig::new(JOB, "", format!("aggregator {number}"))
        };
        Ok(aggregator::start(config, registry)?)
    };
    (0..plan.cluster.aggregators).map(start).collect()
}
