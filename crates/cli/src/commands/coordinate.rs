//! `paramill coordinate`: runs the coordinator of a job alone.

use super::serve::announce;
use crate::args::{CoordinateArgs, JobArgs};
use crate::failure::{Failure, OrUsage};
use crate::listening;
use crate::output::{Output, count};
use crate::plan::JobPlan;
use crate::state_place;
use crate::training::{self, Announcement, Ending};
use anyhow::anyhow;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies};
use paramill_core::registry::Registry;
use paramill_node::server::{self, ServerConfig};
use paramill_node::url::{self, JobUrl};
use std::sync::Arc;

pub(crate) fn run(args: &CoordinateArgs, registry: &Arc<Registry>, output: &Output) -> Result<(), Failure> {
    let mut job = JobArgs {
        workers: args.workers,
        servers: args.servers,
        replicas: args.replicas,
        progress_timeout: args.progress_timeout,
        topology: args.topology.clone(),
        seed: args.seed,
        policy: args.policy.clone(),
        config: args.config.clone(),
        ..JobArgs::default()
    };
    // A coordinator knows no workload whose optimizer could be the default.
    if job.config.is_none() {
        let default = Policies::of([(Axis::Optimizer, Axis::Optimizer.info().default)]);
        job.policy.0 = job.policy.0.with_outer().over(default);
    }
    let listen = listening::address(args.listen.as_deref(), args.host.as_deref(), url::DEFAULT_PORT);
    let plan = JobPlan::resolve_at(&listen, &job, registry, output).or_usage()?;
    let state = state_place::resolve(&args.memory, &listen, &args.job).or_usage()?;
    if !output.json() {
        let kept = state.as_ref().map_or("nowhere".into(), |place| format!("in {place}"));
        let (workers, servers) =
            (count(plan.cluster.workers, "worker"), count(plan.cluster.servers, "server"));
        output.text(format!("waits for {workers} and {servers}; its state is kept {kept}"))?;
    }
    let config = ServerConfig {
        coordinate: Some(JobConfig {
            restart_grace: args.restart_grace.0,
            topology: plan.topology().or_usage()?,
            checkpoints: args.checkpoints.checkpointing(&args.job, output).or_usage()?,
            ..training::job_config(&plan, &args.job)
        }),
        hosts: args.host.clone().into_iter().collect(),
        cores: 0,
        seed: plan.seed,
        state,
        checkpoints: args.checkpoints.place().or_usage()?,
        coordinator_grace: state_place::grace(&args.memory),
        ..ServerConfig::new(&args.job, &listen)
    };
    let mut server = server::start(config, registry)?;
    let url = JobUrl { address: server.coordinator().to_owned(), job: args.job.clone() };
    let announcement = Announcement { url: url.to_string(), data: Vec::new(), cpus: Vec::new() };
    let who = listening::who_can_connect([listen.as_str()]);
    announce(&announcement, &[who], true, output)?;
    server.wait().map_err(|error| anyhow!(error))?;
    match server.final_status() {
        Some(status) if output.json() => {
            let ending = Ending { phase: status.phase.clone(), waited: status.waited.clone() };
            Ok(output.line(&ending)?)
        }
        _ => Ok(()),
    }
}
