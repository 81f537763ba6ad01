//! `paramill serve`: runs a server, and the coordinator of the job when it is the first.

use crate::args::{JobArgs, ServeArgs};
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use crate::plan::JobPlan;
use crate::training::{self, Announcement};
use anyhow::anyhow;
use paramill_core::registry::Registry;
use paramill_core::table::TablePolicy;
use paramill_core::types::ServerId;
use paramill_node::data_cores::HostShare;
use paramill_node::env_vars;
use paramill_node::server::{self, ServerConfig};
use paramill_node::url::JobUrl;
use std::io::Write;
use std::sync::Arc;

pub(crate) fn run(args: &ServeArgs, registry: &Arc<Registry>, output: &Output) -> Result<(), Failure> {
    if args.end_with_parent {
        training::end_with_parent()?;
    }
    let config = match &args.join {
        Some(url) => joining(args, &url.parse().or_usage()?)?,
        None => coordinating(args, registry, output)?,
    };
    let job = config.job.clone();
    let server = server::start(config, registry)?;
    let url = JobUrl { address: server.coordinator().to_owned(), job };
    let data = server.data_addresses().iter().flat_map(|core| core.iter().map(str::to_owned)).collect();
    let announcement = Announcement { url: url.to_string(), data, cpus: server.cpus().to_vec() };
    announce(&announcement, &server.pinning(), args.join.is_none(), output)?;
    Ok(server.join().map_err(|error| anyhow!(error))?)
}

/// The first server of a job.
fn coordinating(args: &ServeArgs, registry: &Registry, output: &Output) -> Result<ServerConfig, Failure> {
    let mut job = JobArgs {
        workers: args.workers,
        servers: args.servers,
        cores: args.cores,
        transport: args.transport,
        seed: args.seed,
        inject: args.inject.clone(),
        policy: args.policy.clone(),
        config: args.config.clone(),
        ..JobArgs::default()
    };
    // A server knows no workload whose optimizer could be the default.
    if job.config.is_none() {
        job.policy.optimizer.get_or_insert_with(|| TablePolicy::default().optimizer);
    }
    let plan = JobPlan::resolve_at(&args.listen, &job, registry).or_usage()?;
    let index = args.index.unwrap_or(0);
    if index >= plan.cluster.servers {
        let error = anyhow!("index = {index}: the job has servers 0 to {}", plan.cluster.servers - 1);
        return Err(Failure::Usage(error));
    }
    if !output.json() {
        let JobPlan { cluster, policy, .. } = &plan;
        output.text(format!(
            "waits for {} workers and {} servers; {}, {}, {}",
            cluster.workers, cluster.servers, policy.table.sync, policy.table.optimizer, policy.placement
        ))?;
    }
    Ok(ServerConfig {
        coordinate: Some(training::job_config(&plan, &args.job)),
        hosts: args.host.clone(),
        congestion: congestion(args),
        pin: args.pin.clone(),
        cores: plan.cluster.cores,
        transport: plan.cluster.transport,
        server: Some(ServerId(index)),
        faults: training::faults(&plan.inject).or_usage()?,
        seed: plan.seed,
        ..ServerConfig::new(&args.job, &args.listen)
    })
}

/// A further server, which learns about the job from its coordinator.
fn joining(args: &ServeArgs, url: &JobUrl) -> Result<ServerConfig, Failure> {
    if !args.policy.as_arguments().is_empty() {
        let error = anyhow!("policies are the job's: give them to its first server, or use `paramill set`");
        return Err(Failure::Usage(error));
    }
    Ok(ServerConfig {
        hosts: args.host.clone(),
        congestion: congestion(args),
        pin: args.pin.clone(),
        // How many take part is not known yet: on loopback there are another server and some workers at least.
        cores: args.cores.unwrap_or_else(|| HostShare::of_job_at(&url.address, 2, 2).data_cores()),
        transport: args.transport.unwrap_or_default(),
        server: args.index.map(ServerId),
        faults: training::faults(&args.inject).or_usage()?,
        seed: args.seed.unwrap_or(1),
        ..ServerConfig::new(&url.job, &url.address)
    })
}

/// What was typed wins over the environment.
fn congestion(args: &ServeArgs) -> Option<String> {
    args.congestion.clone().or_else(|| std::env::var(env_vars::CONGESTION).ok())
}

/// Says where to join, before anybody can be waiting for it.
fn announce(announcement: &Announcement, pinning: &str, first: bool, output: &Output) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    if output.json() {
        writeln!(stdout, "{}", serde_json::to_string(announcement)?)?;
    } else if first {
        writeln!(stdout, "the job is at {}", announcement.url)?;
        writeln!(stdout, "data cores listen on {}", announcement.data.join(", "))?;
        writeln!(stdout, "{pinning}")?;
        writeln!(stdout, "further servers: paramill serve --join {}", announcement.url)?;
        writeln!(stdout, "how it stands:   paramill status {}", announcement.url)?;
    } else {
        writeln!(
            stdout,
            "joining {}; data cores listen on {}",
            announcement.url,
            announcement.data.join(", ")
        )?;
        writeln!(stdout, "{pinning}")?;
    }
    Ok(stdout.flush()?)
}
