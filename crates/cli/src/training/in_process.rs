//! A training job in this process: servers and workers are threads, and no socket is used.

use super::report::{Curve, TrainReport};
use super::worker::{self, WorkerResult};
use super::{JOB, faults, job_config};
use crate::output::Output;
use crate::plan::JobPlan;
use anyhow::{Context, Result, anyhow};
use paramill_core::registry::Registry;
use paramill_core::types::{AggregatorId, ServerId, WorkerId};
use paramill_node::Hub;
use paramill_node::aggregator::{self, Aggregator, AggregatorConfig};
use paramill_node::client::{ClientError, JobOptions};
use paramill_node::server::{self, Server, ServerConfig};
use std::sync::Arc;
use std::sync::mpsc;

pub(crate) fn run(plan: &JobPlan, registry: &Arc<Registry>, output: &Output) -> Result<TrainReport> {
    let faults = faults(&plan.inject)?;
    let workloads = paramill_train::build_all(&plan.workload_config(0))?;
    let total = workloads[0].steps_per_epoch() * plan.workload.epochs;
    let hub = Hub::new();
    let servers = start_servers(plan, &hub, registry)?;
    let aggregators = start_aggregators(plan, &hub, registry)?;
    let mut progress = output.progress(total * u64::from(plan.cluster.workers));
    let mut curve = Curve::new(plan.cluster.workers);
    let (sender, steps) = mpsc::channel();
    let results: Result<Vec<WorkerResult>> = std::thread::scope(|scope| {
        let workers: Vec<_> = workloads
            .into_iter()
            .zip(0..)
            .map(|(workload, rank)| {
                let options = JobOptions {
                    rank: Some(WorkerId(rank)),
                    aggregator: plan
                        .cluster
                        .aggregator_of(rank)
                        .map(|number| aggregators[number].address().to_owned()),
                    timeout: plan.cluster.timeout.0,
                    registry: registry.clone(),
                    faults: faults.clone(),
                    seed: plan.seed,
                    ..JobOptions::in_memory(&hub, JOB)
                };
                let (sender, faults) = (sender.clone(), &faults);
                scope.spawn(move || {
                    worker::run(plan, faults, options, workload, |step| drop(sender.send(step)))
                        .with_context(|| format!("worker {rank}"))
                })
            })
            .collect();
        drop(sender);
        for step in &steps {
            let done = curve.add(&step);
            progress.set(done, &format!("steps, loss {:.4}", step.loss));
        }
        let join = |worker: std::thread::ScopedJoinHandle<'_, Result<WorkerResult>>| {
            worker.join().unwrap_or_else(|_| Err(anyhow!("a worker panicked")))
        };
        first_cause(workers.into_iter().map(join).collect())
    });
    drop(progress);
    match results {
        Ok(results) => {
            for server in servers {
                server.join().map_err(|error| anyhow!("a server failed: {error}"))?;
            }
            for aggregator in aggregators {
                aggregator.join().map_err(|error| anyhow!("an aggregator failed: {error}"))?;
            }
            TrainReport::new(plan, results, curve)
        }
        Err(error) => {
            servers.iter().for_each(Server::stop);
            Err(error)
        }
    }
}

fn start_servers(plan: &JobPlan, hub: &Hub, registry: &Arc<Registry>) -> Result<Vec<Server>> {
    let base = ServerConfig {
        cores: plan.cluster.cores,
        memory: Some(hub.clone()),
        faults: faults(&plan.inject)?,
        seed: plan.seed,
        ..ServerConfig::new(JOB, "")
    };
    (0..plan.cluster.servers)
        .map(|number| {
            let coordinate = (number == 0).then(|| job_config(plan, JOB));
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

/// All results, or the error that the others followed from: a worker that stops makes its siblings' waits fail.
fn first_cause(results: Vec<Result<WorkerResult>>) -> Result<Vec<WorkerResult>> {
    let (good, bad): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    let mut errors: Vec<anyhow::Error> = bad.into_iter().filter_map(Result::err).collect();
    if errors.is_empty() {
        return good.into_iter().collect();
    }
    let is_timeout =
        |error: &anyhow::Error| matches!(error.downcast_ref(), Some(ClientError::Timeout { .. }));
    let cause = errors.iter().position(|error| !is_timeout(error)).unwrap_or(0);
    Err(errors.swap_remove(cause))
}
