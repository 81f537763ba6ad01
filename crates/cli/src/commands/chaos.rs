//! `paramill chaos`: kills the processes of a job and starts them anew, and looks whether anything was lost.

mod members;
mod run;
mod schedule;
mod tags;
mod workspace;

pub(crate) use schedule::Kind;

use crate::args::{ChaosArgs, ChaosProcessArgs};
use crate::duration::Span;
use crate::failure::{Failure, OrUsage};
use crate::interrupt;
use crate::output::Output;
use crate::plan::JobPlan;
use anyhow::{Context, Result, bail, ensure};
use members::Setup;
use paramill_core::broadcast::{Members, Receiver, Topology};
use paramill_core::policy::{Axis, Policies};
use paramill_core::registry::Registry;
use paramill_core::spec::Spec;
use schedule::Victims;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::time::Duration;
use workspace::Workspace;

/// The workload that counts.
const TAGS: &str = "tags";
/// The exit code where something was lost or applied twice, as that of `paramill sim` for a broken invariant.
const BROKEN: u8 = 3;
/// Longer than this command waits for progress, so that it says what hangs.
const PATIENCE: Span = Span(Duration::from_secs(600));
const MAX_MINUTES: f64 = 7.0 * 24.0 * 60.0;

/// What came of a run.
#[derive(Debug, Serialize)]
struct Report {
    workload: String,
    seed: u64,
    /// Of the run with kills, until the job had ended.
    seconds: f64,
    kills: BTreeMap<Kind, u32>,
    /// Acknowledged pushes that are not in the parameters; workloads that train do not count them.
    lost: Option<u64>,
    /// Pushes that are in the parameters more often than they were sent.
    twice: Option<u64>,
    /// Pushes that were acknowledged.
    acknowledged: Option<u64>,
    metric: Option<f64>,
    undisturbed_metric: Option<f64>,
    /// What the metric is.
    metric_name: Option<String>,
}

pub(crate) fn run(args: &mut ChaosArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let is_tags = args.job.workload.as_deref().is_none_or(|name| name == TAGS);
    let plan = resolve(args, is_tags, registry, output).or_usage()?;
    let victims = victims(args, &plan, registry).or_usage()?;
    // The folder that processes share is removed then.
    interrupt::end_in_good_order();
    let length = Duration::from_secs_f64(args.minutes * 60.0);
    let kills = schedule::draw(plan.seed, &victims, args.every.0, length);
    let mut report = Report {
        workload: if is_tags { TAGS.to_owned() } else { plan.workload.name.clone() },
        seed: plan.seed,
        seconds: 0.0,
        kills: victims.iter().map(|victims| (victims.kind, 0)).collect(),
        lost: None,
        twice: None,
        acknowledged: None,
        metric: None,
        undisturbed_metric: None,
        metric_name: None,
    };
    let setup = Setup { plan: &plan, replicas: plan.cluster.replicas, is_tags };
    let workspace = Workspace::create()?;
    let mut paced = plan.clone();
    if !is_tags {
        output.note("first the job without kills");
        let undisturbed = run::run(setup, &Workspace::create()?, VecDeque::new(), Duration::ZERO, output)?;
        stretch(&mut paced, &workspace, length, undisturbed.steps)?;
        report.undisturbed_metric = undisturbed.end.as_ref().map(|end| end.value);
        report.metric_name = undisturbed.end.map(|end| end.metric);
    }
    output.note(format!("{} kills in {} minutes by seed {}", kills.len(), args.minutes, plan.seed));
    let ended = run::run(Setup { plan: &paced, ..setup }, &workspace, kills, length, output)?;
    report.seconds = ended.seconds;
    report.kills.extend(ended.kills);
    report.metric = ended.end.map(|end| end.value);
    if let Some(applied) = ended.applied {
        let verdict = applied.judge(&ended.pushes);
        report.lost = Some(verdict.lost);
        report.twice = Some(verdict.twice);
        report.acknowledged = Some(ended.pushes.iter().map(|pushes| pushes.acknowledged).sum());
    }
    report.print(output)?;
    match (report.lost.unwrap_or(0), report.twice.unwrap_or(0)) {
        (0, 0) => Ok(()),
        (lost, twice) => Err(Failure::Found {
            code: BROKEN,
            what: format!("error: {lost} acknowledged pushes were lost, and {twice} were applied twice"),
        }),
    }
}

/// A worker process of `tags`.
pub(crate) fn run_process(args: &ChaosProcessArgs) -> Result<(), Failure> {
    Ok(tags::run_process(&args.folder)?)
}

/// The job. Where options do not say it, it is one with every kind of process.
fn resolve(args: &mut ChaosArgs, is_tags: bool, registry: &Registry, output: &Output) -> Result<JobPlan> {
    let minutes = args.minutes;
    ensure!(minutes > 0.0 && minutes <= MAX_MINUTES, "minutes = {minutes}: expected up to {MAX_MINUTES}");
    ensure!(!args.every.0.is_zero(), "every = {}: expected a time between two kills", args.every);
    let job = &mut args.job;
    let servers = *job.servers.get_or_insert(3);
    job.replicas.get_or_insert(u32::from(servers > 1));
    // Workers behind an aggregator pass nothing on.
    job.aggregators.get_or_insert(u32::from(!args.kill.contains(&Kind::Relays)));
    job.cores.get_or_insert(1);
    job.timeout.get_or_insert(PATIENCE);
    if is_tags {
        // The plan of a job needs a workload, which nobody trains here.
        job.workload = None;
        let counts = [(Axis::Optimizer, "sgd:lr=1"), (Axis::Reduce, "sum"), (Axis::Chunk, "4KB")];
        for (axis, text) in counts {
            let said = job.policy.0.get(axis);
            ensure!(said.is_none(), "--{axis}: `tags` counts with {axis} = {text}");
        }
        // One table, of which each server is to have a part.
        let spread = Policies::of([(Axis::Placement, "uniform")]);
        job.policy.0 = std::mem::take(&mut job.policy.0).over(Policies::of(counts)).over(spread);
    }
    JobPlan::resolve(job, registry, output)
}

/// What is killed.
fn victims(args: &ChaosArgs, plan: &JobPlan, registry: &Registry) -> Result<Vec<Victims>> {
    let cluster = &plan.cluster;
    let all = [
        Victims { kind: Kind::Servers, count: cluster.servers },
        Victims { kind: Kind::Workers, count: cluster.workers },
        Victims { kind: Kind::Coordinator, count: 1 },
        Victims { kind: Kind::Aggregators, count: cluster.aggregators },
        Victims { kind: Kind::Relays, count: relays(plan, registry)? },
    ];
    let is_replicated = cluster.replicas > 0;
    ensure!(
        is_replicated || !args.kill.contains(&Kind::Servers),
        "--kill servers with --replicas 0: the parameters of a server that is killed are lost"
    );
    let is_meant = |victims: &Victims| match args.kill.is_empty() {
        true => victims.count > 0 && (is_replicated || victims.kind != Kind::Servers),
        false => args.kill.contains(&victims.kind),
    };
    let meant: Vec<Victims> = all.into_iter().filter(is_meant).collect();
    let missing = meant.iter().find(|victims| victims.count == 0);
    if let Some(Victims { kind, .. }) = missing {
        let remedy = match kind {
            Kind::Relays => {
                "; workers pass versions on under trees such as --broadcast chain, without --aggregators"
            }
            _ => "",
        };
        bail!("--kill {}: the job has none{remedy}", kind.name());
    }
    Ok(meant)
}

/// Workers that pass versions on to others, when all take part.
fn relays(plan: &JobPlan, registry: &Registry) -> Result<u32> {
    let broadcast = registry.broadcast.build(&Spec::parse(plan.policy.get(Axis::Broadcast))?)?;
    if plan.cluster.aggregators > 0 {
        return Ok(0);
    }
    let topology = Topology::default();
    let site = topology.site("");
    let roots = vec![site; plan.cluster.servers as usize];
    let receivers = vec![Receiver { site, can_relay: true }; plan.cluster.workers as usize];
    let forest = broadcast.forest(&Members { roots: &roots, receivers: &receivers, topology: &topology })?;
    Ok((0..receivers.len()).filter(|receiver| forest.relayed(*receiver) > 0).count() as u32)
}

/// Makes the steps of a job last as long as processes are killed. Without kills it ends earlier, after the same steps.
fn stretch(plan: &mut JobPlan, workspace: &Workspace, length: Duration, steps: u64) -> Result<()> {
    let seconds = length.as_secs_f64() / steps.max(1) as f64;
    let mut trace = String::from("worker,step,seconds\n");
    for rank in 0..plan.cluster.workers {
        writeln!(trace, "{rank},0,{seconds}")?;
    }
    let file = workspace.folder().join("steps.csv");
    std::fs::write(&file, trace).with_context(|| format!("cannot write {}", file.display()))?;
    plan.inject.push(format!("trace={}", file.display()));
    Ok(())
}

impl Report {
    fn print(&self, output: &Output) -> Result<()> {
        if output.json() {
            return Ok(output.object(self)?);
        }
        let kills = self.kills.iter().map(|(kind, count)| format!("{count} {}", kind.name()));
        let mut text = format!(
            "{} by seed {}: {:.0} s, killed {}\n",
            self.workload,
            self.seed,
            self.seconds,
            kills.collect::<Vec<_>>().join(", ")
        );
        if let (Some(lost), Some(twice), Some(all)) = (self.lost, self.twice, self.acknowledged) {
            writeln!(text, "of {all} acknowledged pushes {lost} were lost; {twice} were applied twice")?;
        }
        if let (Some(metric), Some(undisturbed)) = (self.metric, self.undisturbed_metric) {
            let name = self.metric_name.as_deref().unwrap_or("metric");
            writeln!(text, "{name} {metric:.4}; {undisturbed:.4} without kills")?;
        }
        Ok(output.text(text)?)
    }
}
