//! `paramill serve`: runs a server, and the coordinator of the job when it is the first.

use crate::args::{JobArgs, ServeArgs};
use crate::failure::{Failure, OrUsage};
use crate::listening;
use crate::output::{Output, count};
use crate::plan::{JobPlan, check_rate_of_node, transport_at};
use crate::state_place;
use crate::training::{self, Announcement, Ending};
use anyhow::{Context, anyhow};
use paramill_core::coordinator::JobConfig;
use paramill_core::limits;
use paramill_core::policy::{Axis, Policies};
use paramill_core::registry::Registry;
use paramill_core::status::JobSize;
use paramill_core::types::ServerId;
use paramill_node::Transport;
use paramill_node::admin::{Admin, AdminError};
use paramill_node::data_cores::data_cores;
use paramill_node::env_vars;
use paramill_node::server::{self, ServerConfig};
use paramill_node::state_store::StatePlace;
use paramill_node::url::{self, JobUrl};
use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a coordinator that is not there yet is left alone between two questions.
const ASK_EVERY: Duration = Duration::from_millis(200);

pub(crate) fn run(args: &ServeArgs, registry: &Arc<Registry>, output: &Output) -> Result<(), Failure> {
    if args.end_with_parent {
        training::end_with_parent()?;
    }
    if args.ports.is_some() && args.transport == Some(Transport::Shm) {
        return Err(Failure::Usage(anyhow!(
            "--ports with --transport shm: data cores listen on no port then"
        )));
    }
    check_rate_of_node(args.rate, args.transport.unwrap_or_default()).or_usage()?;
    let config = match &args.join {
        Some(url) => joining(args, &url.parse().or_usage()?, output)?,
        None => coordinating(args, registry, output)?,
    };
    let mut listens: Vec<String> = config.hosts.clone();
    if args.join.is_none() {
        listens.push(config.coordinator.clone());
    }
    let job = config.job.clone();
    let mut server = server::start(config, registry)?;
    let url = JobUrl { address: server.coordinator().to_owned(), job };
    let data = server.data_addresses().iter().flat_map(|core| core.iter().map(str::to_owned)).collect();
    listens.extend(server.data_addresses().iter().flat_map(|core| core.iter().map(str::to_owned)));
    let announcement = Announcement { url: url.to_string(), data, cpus: server.cpus().to_vec() };
    let who = listening::who_can_connect(listens.iter().map(String::as_str));
    announce(&announcement, &[server.pinning().as_str(), who], args.join.is_none(), output)?;
    if args.join.is_some() && args.cores.is_some() && !args.end_with_parent {
        let output = *output;
        // Beside the wait for the server's end, which may be near. Without a thread nothing is told.
        let _ = std::thread::Builder::new().spawn(move || {
            if let Err(error @ AdminError::Unreachable { .. }) =
                Admin::connect(&url, limits::ATTEMPT_DEADLINE)
            {
                tell_of_silence(&error, &output);
            }
        });
    }
    server.wait().map_err(|error| anyhow!(error))?;
    match server.final_status() {
        Some(status) if output.json() => {
            let ending = Ending { phase: status.phase.clone(), waited: status.waited.clone() };
            Ok(output.line(&ending)?)
        }
        _ => Ok(()),
    }
}

/// Says that the job is not there yet. Whoever joins it tries on, and says nothing meanwhile.
fn tell_of_silence(error: &AdminError, output: &Output) {
    let why = match error {
        AdminError::Unreachable { address, why } => format!("no coordinator at {address} yet: {why}"),
        other => other.to_string(),
    };
    output.note(format!("{why}; trying again for {} s", limits::CONNECT_DEADLINE.as_secs()));
}

/// What the coordinator says about the job's size. Servers may be started in any order: it is waited for as long as data cores
/// would wait for it.
fn ask_size(url: &JobUrl, output: &Output) -> Result<JobSize, AdminError> {
    let deadline = Instant::now() + limits::CONNECT_DEADLINE;
    let mut has_told = false;
    loop {
        let asked = Admin::connect(url, limits::ATTEMPT_DEADLINE).and_then(|mut admin| admin.status());
        let error = match asked {
            Ok(status) => return Ok(status.size),
            Err(error) => error,
        };
        let may_change = match &error {
            AdminError::Unreachable { .. } | AdminError::Silent | AdminError::Io(_) => true,
            AdminError::Refused(refusal) => refusal.retry,
            _ => false,
        };
        if !may_change || Instant::now() > deadline {
            return Err(error);
        }
        if !has_told {
            tell_of_silence(&error, output);
            has_told = true;
        }
        std::thread::sleep(ASK_EVERY);
    }
}

/// The first server of a job.
fn coordinating(args: &ServeArgs, registry: &Registry, output: &Output) -> Result<ServerConfig, Failure> {
    let mut job = JobArgs {
        workers: args.workers,
        servers: args.servers,
        replicas: args.replicas,
        progress_timeout: args.progress_timeout,
        cores: args.cores,
        transport: args.transport,
        rate: args.rate,
        topology: args.topology.clone(),
        seed: args.seed,
        inject: args.inject.clone(),
        policy: args.policy.clone(),
        config: args.config.clone(),
        ..JobArgs::default()
    };
    // A server knows no workload whose optimizer could be the default.
    if job.config.is_none() {
        let default = Policies::of([(Axis::Optimizer, Axis::Optimizer.info().default)]);
        job.policy.0 = job.policy.0.with_outer().over(default);
    }
    let host = args.host.first().map(String::as_str);
    let listen = listening::address(args.listen.as_deref(), host, url::DEFAULT_PORT);
    let plan = JobPlan::resolve_at(&listen, &job, registry, output).or_usage()?;
    let index = args.index.unwrap_or(0);
    if index >= plan.cluster.servers {
        let error = anyhow!("index = {index}: the job has servers 0 to {}", plan.cluster.servers - 1);
        return Err(Failure::Usage(error));
    }
    if !output.json() {
        let JobPlan { cluster, policy, .. } = &plan;
        output.text(format!(
            "waits for {} and {}; {}, {}, {}",
            count(cluster.workers, "worker"),
            count(cluster.servers, "server"),
            policy.get(Axis::Sync),
            policy.get(Axis::Optimizer),
            policy.get(Axis::Placement)
        ))?;
    }
    let state = match args.end_with_parent && args.memory.state.is_none() {
        // The process that started it starts everything anew.
        true => None,
        false => state_place::resolve(&args.memory, &listen, &args.job).or_usage()?,
    };
    // Servers that may all coordinate the job are numbered in the order of joining, like any others.
    let is_elected = matches!(state, Some(StatePlace::Etcd(_)));
    let server = args.index.or((!is_elected).then_some(0)).map(ServerId);
    Ok(ServerConfig {
        coordinate: Some(JobConfig {
            restart_grace: args.restart_grace.0,
            topology: plan.topology().or_usage()?,
            checkpoints: args.checkpoints.checkpointing(&args.job, output).or_usage()?,
            ..training::job_config(&plan, &args.job)
        }),
        hosts: args.host.clone(),
        ports: args.ports,
        congestion: congestion(args),
        pin: args.pin.clone(),
        cores: plan.cluster.cores,
        transport: plan.cluster.transport,
        rate: plan.cluster.rate,
        server,
        faults: training::faults(&plan.inject).or_usage()?,
        seed: plan.seed,
        checkpoints: args.checkpoints.place().or_usage()?,
        state,
        coordinator_grace: state_place::grace(&args.memory),
        ..ServerConfig::new(&args.job, &listen)
    })
}

/// A further server, which learns about the job from its coordinator.
fn joining(args: &ServeArgs, url: &JobUrl, output: &Output) -> Result<ServerConfig, Failure> {
    if !args.policy.as_arguments().is_empty() {
        let error = anyhow!("policies are the job's: give them to its first server, or use `paramill set`");
        return Err(Failure::Usage(error));
    }
    if args.memory.state.is_some() {
        let error = anyhow!(
            "--state with --join: this server does not coordinate the job. Leave --state out; or start every server with the same \
             --state etcd://.. and without --join, and each of them may"
        );
        return Err(Failure::Usage(error));
    }
    if args.memory.coordinator_grace.is_some() {
        let error = anyhow!(
            "--coordinator-grace with --join: how long members wait for the coordinator is the job's. Tell its first server, or \
             `paramill coordinate`"
        );
        return Err(Failure::Usage(error));
    }
    let checkpoints = &args.checkpoints;
    if checkpoints.every.is_some() || checkpoints.keep.is_some() || checkpoints.resume == Some(None) {
        let error = anyhow!("when checkpoints are made and gone on from is the job's: tell its first server");
        return Err(Failure::Usage(error));
    }
    let faults = training::faults(&args.inject).or_usage()?;
    let cores = match args.cores {
        Some(cores) => cores,
        None => {
            // What cannot work is told before the wait for the coordinator.
            for host in &args.host {
                TcpListener::bind(format!("{host}:0")).with_context(|| format!("cannot listen on {host}"))?;
            }
            let size = ask_size(url, output).context("cannot ask the job how many data cores it needs")?;
            data_cores(&url.address, &size)
        }
    };
    Ok(ServerConfig {
        hosts: args.host.clone(),
        ports: args.ports,
        congestion: congestion(args),
        pin: args.pin.clone(),
        cores,
        transport: args.transport.unwrap_or_else(|| transport_at(args.rate)),
        rate: args.rate,
        server: args.index.map(ServerId),
        faults,
        seed: args.seed.unwrap_or(1),
        checkpoints: args.checkpoints.place().or_usage()?,
        ..ServerConfig::new(&url.job, &url.address)
    })
}

/// What was typed wins over the environment.
fn congestion(args: &ServeArgs) -> Option<String> {
    args.congestion.clone().or_else(|| std::env::var(env_vars::CONGESTION).ok())
}

/// Says where to join, before anybody can be waiting for it.
pub(super) fn announce(
    announcement: &Announcement,
    facts: &[&str],
    first: bool,
    output: &Output,
) -> Result<(), Failure> {
    if output.json() {
        return Ok(output.line(announcement)?);
    }
    let mut stdout = std::io::stdout().lock();
    if first {
        writeln!(stdout, "the job is at {}", announcement.url)?;
        if !announcement.data.is_empty() {
            writeln!(stdout, "data cores listen on {}", announcement.data.join(", "))?;
        }
        writeln!(stdout, "{}", facts.join("\n"))?;
        let servers = if announcement.data.is_empty() { "servers:        " } else { "further servers:" };
        writeln!(stdout, "{servers} paramill serve --join {}", announcement.url)?;
        writeln!(stdout, "how it stands:   paramill status {}", announcement.url)?;
    } else {
        writeln!(
            stdout,
            "joining {}; data cores listen on {}",
            announcement.url,
            announcement.data.join(", ")
        )?;
        writeln!(stdout, "{}", facts.join("\n"))?;
    }
    Ok(stdout.flush()?)
}
