//! What was typed means this job: defaults, then a config file, then options, each winning over the one before.

mod layer;

use crate::args::JobArgs;
use crate::duration::Span;
use crate::input::read_text;
use crate::output::Output;
use crate::training;
use anyhow::{Context, Result, ensure};
use layer::Layer;
use paramill_core::broadcast::Topology;
use paramill_core::fault::FaultPlan;
use paramill_core::limits;
use paramill_core::policy::{Advice, Axis, Policy, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_node::Transport;
use paramill_node::data_cores::data_cores;
use paramill_node::rate::Rate;
use paramill_train::WorkloadConfig;
use serde::Serialize;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// A job with nothing left open, and nothing in it that cannot work.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct JobPlan {
    /// Everything random follows from it.
    pub(crate) seed: u64,
    /// Faults to try.
    pub(crate) inject: Vec<String>,
    pub(crate) workload: WorkloadPlan,
    pub(crate) cluster: ClusterPlan,
    /// Of every table.
    pub(crate) policy: Policy,
    /// Policies of single tables, on single servers.
    #[serde(rename = "override", skip_serializing_if = "Vec::is_empty")]
    pub(crate) overrides: Vec<PolicyOverride>,
}

/// What is trained, on what.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct WorkloadPlan {
    pub(crate) name: String,
    /// Made from the seed when absent.
    pub(crate) data: Option<PathBuf>,
    pub(crate) test: Option<PathBuf>,
    pub(crate) epochs: u64,
    pub(crate) batch: usize,
    /// All there are, when absent.
    pub(crate) examples: Option<usize>,
    /// Width of the hidden layer (mlp, cnn).
    pub(crate) hidden: usize,
    /// Length of a user's or an item's vector (mf).
    pub(crate) factors: usize,
    /// Strength of the L2 penalty (lr, mf); the workload's own when absent.
    pub(crate) l2: Option<f32>,
}

/// Who takes part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ClusterPlan {
    pub(crate) workers: u32,
    pub(crate) servers: u32,
    /// Copies of every shard on other servers.
    pub(crate) replicas: u32,
    /// How long a member that others wait for may make no progress; for ever without.
    pub(crate) progress_timeout: Option<Span>,
    /// Data cores of each server.
    pub(crate) cores: u32,
    /// Aggregators that workers go through; none when 0.
    pub(crate) aggregators: u32,
    /// Whether each is a process of its own.
    pub(crate) processes: bool,
    /// How processes exchange gradients and parameters.
    pub(crate) transport: Transport,
    /// What each process sends at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<Rate>,
    /// A file with the switches that hosts are below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) topology: Option<PathBuf>,
    /// The longest wait before giving up.
    pub(crate) timeout: Span,
}

impl ClusterPlan {
    /// The aggregator that a worker goes through, if it goes through one.
    pub(crate) fn aggregator_of(&self, rank: u32) -> Option<usize> {
        let share = u64::from(rank) * u64::from(self.aggregators) / u64::from(self.workers.max(1));
        (self.aggregators > 0).then_some(share as usize)
    }
}

const MAX_EPOCHS: u64 = 1_000_000;
const MAX_BATCH: usize = 1 << 24;
const MAX_EXAMPLES: usize = 1 << 40;
/// TOML has signed numbers, and a plan must survive being printed.
const MAX_SEED: u64 = i64::MAX as u64;
const MAX_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

impl JobPlan {
    /// Works out what the options and the file that they name mean, and refuses what cannot work. The whole job runs on
    /// this host.
    pub(crate) fn resolve(args: &JobArgs, registry: &Registry, output: &Output) -> Result<JobPlan> {
        JobPlan::resolve_at("localhost", args, registry, output)
    }

    /// The same for a job that is found at this address.
    pub(crate) fn resolve_at(
        address: &str,
        args: &JobArgs,
        registry: &Registry,
        output: &Output,
    ) -> Result<JobPlan> {
        let file = match &args.config {
            Some(path) => Layer::read(path)?,
            None => Layer::default(),
        };
        let (plan, notes) = JobPlan::fill(Layer::of(args).over(file), address, registry)?;
        plan.check(registry)?;
        notes.into_iter().for_each(|note| output.note(note));
        Ok(plan)
    }

    /// The plan as a config file.
    pub(crate) fn to_toml(&self) -> String {
        toml::to_string(self).expect("a plan has only text keys, and numbers that TOML has")
    }

    /// The network that the job is told of.
    pub(crate) fn topology(&self) -> Result<Topology> {
        let Some(path) = &self.cluster.topology else { return Ok(Topology::default()) };
        ensure!(
            path.as_os_str() != "-",
            "topology: expected the name of a file, which several processes read"
        );
        let what = || format!("topology file {}", path.display());
        let text = read_text(path).with_context(|| format!("cannot read the {}", what()))?;
        Topology::parse(&text).with_context(what)
    }

    /// The workload as the worker of this rank builds it.
    pub(crate) fn workload_config(&self, rank: u32) -> WorkloadConfig {
        let workload = &self.workload;
        WorkloadConfig {
            name: workload.name.clone(),
            data: workload.data.clone(),
            test: workload.test.clone(),
            batch: workload.batch,
            seed: self.seed,
            rank,
            workers: self.cluster.workers,
            examples: workload.examples,
            hidden: workload.hidden,
            factors: workload.factors,
            l2: workload.l2,
        }
    }

    /// Puts defaults where nothing was said. Those of the workload depend on which it is. Also returns what the user should
    /// know about defaults.
    fn fill(said: Layer, address: &str, registry: &Registry) -> Result<(JobPlan, Vec<String>)> {
        let name = said.workload.name.unwrap_or_else(|| "mlp".to_owned());
        let info = paramill_train::find(&name)?;
        let defaults = WorkloadConfig::new(&name)?;
        let has_optimizer = said.policy.get(Axis::Optimizer).is_some();
        let mut policy =
            Policy::default().with(Axis::Optimizer, info.optimizer).under(said.policy.with_outer());
        let mut notes = Vec::new();
        // A default must not harm what was chosen.
        if let Some(Advice { why, optimizer }) = Advice::on(&policy, registry).filter(|_| !has_optimizer) {
            notes.push(format!(
                "{why}: the optimizer of {name} is {optimizer} here, unless --optimizer says otherwise"
            ));
            policy.set(Axis::Optimizer, optimizer)?;
        }
        let mut plan = JobPlan {
            seed: said.seed.unwrap_or(1),
            inject: said.inject.unwrap_or_default(),
            workload: WorkloadPlan {
                name,
                data: said.workload.data,
                test: said.workload.test,
                epochs: said.workload.epochs.unwrap_or(info.epochs),
                batch: said.workload.batch.unwrap_or(defaults.batch),
                examples: said.workload.examples.or(defaults.examples),
                hidden: said.workload.hidden.unwrap_or(defaults.hidden),
                factors: said.workload.factors.unwrap_or(defaults.factors),
                l2: said.workload.l2.or(defaults.l2),
            },
            cluster: ClusterPlan {
                workers: said.cluster.workers.unwrap_or(4),
                servers: said.cluster.servers.unwrap_or(2),
                replicas: said.cluster.replicas.unwrap_or(0),
                progress_timeout: said.cluster.progress_timeout,
                cores: said.cluster.cores.unwrap_or(1),
                aggregators: said.cluster.aggregators.unwrap_or(0),
                processes: said.cluster.processes.unwrap_or(false),
                transport: said.cluster.transport.unwrap_or_else(|| transport_at(said.cluster.rate)),
                rate: said.cluster.rate,
                topology: said.cluster.topology,
                timeout: said.cluster.timeout.unwrap_or(Span(Duration::from_secs(60))),
            },
            policy,
            overrides: said.overrides.unwrap_or_default(),
        };
        if said.cluster.cores.is_none() {
            let job = training::job_config(&plan, training::JOB);
            plan.cluster.cores = data_cores(address, &job.size());
        }
        Ok((plan, notes))
    }

    fn check(&self, registry: &Registry) -> Result<()> {
        let (workload, cluster) = (&self.workload, &self.cluster);
        within("seed", self.seed, 0..=MAX_SEED)?;
        within("epochs", workload.epochs, 1..=MAX_EPOCHS)?;
        within("batch", workload.batch, 1..=MAX_BATCH)?;
        within("examples", workload.examples.unwrap_or(1), 1..=MAX_EXAMPLES)?;
        within("workers", cluster.workers, 1..=limits::MAX_WORKERS)?;
        within("servers", cluster.servers, 1..=limits::MAX_SERVERS)?;
        within("replicas", cluster.replicas, 0..=1)?;
        ensure!(
            cluster.replicas < cluster.servers,
            "replicas = {}: copies are kept on other servers, and servers = 1",
            cluster.replicas
        );
        if let Some(timeout) = cluster.progress_timeout {
            let least = Span(limits::MIN_PROGRESS_TIMEOUT);
            ensure!(
                timeout >= least,
                "progress_timeout = {timeout}: expected at least {least}, since members report every 500ms"
            );
        }
        within("cores", cluster.cores, 1..=limits::MAX_CORES)?;
        within("aggregators", cluster.aggregators, 0..=cluster.workers.min(limits::MAX_AGGREGATORS))?;
        within("timeout", cluster.timeout, Span(Duration::from_millis(1))..=Span(MAX_TIMEOUT))?;
        self.workload_config(0).check()?;
        self.topology()?;
        FaultPlan::parse(&self.inject)?.check_members(cluster.workers, cluster.servers)?;
        self.policy.check(registry)?;
        for (index, rule) in self.overrides.iter().enumerate() {
            self.check_override(rule, registry)
                .with_context(|| format!("override {} (table = \"{}\")", index + 1, rule.table))?;
        }
        Ok(())
    }

    fn check_override(&self, rule: &PolicyOverride, registry: &Registry) -> Result<()> {
        ensure!(!rule.table.is_empty(), "an empty glob matches no table; `*` matches all");
        if let Some(server) = rule.server {
            within("server", server.0, 0..=self.cluster.servers - 1)?;
        }
        let is_empty = rule.policies.is_empty();
        ensure!(!is_empty, "it changes nothing; give it a `sync`, an `optimizer` or another policy");
        rule.check()?;
        Ok(rule.policies.check(registry)?)
    }
}

/// The transport of a job on this host that names none: memory that is shared moves no bytes that could be held back.
pub(crate) fn transport_at(rate: Option<Rate>) -> Transport {
    if rate.is_some() { Transport::Tcp } else { Transport::default() }
}

/// A job on this host whose processes have a rate.
pub(crate) fn check_rate(rate: Option<Rate>, transport: Transport, processes: bool) -> Result<()> {
    let Some(rate) = rate else { return Ok(()) };
    ensure!(processes, "--rate {rate}: in one process nothing is sent; give --processes too");
    ensure!(
        transport == Transport::Tcp,
        "--rate {rate} with --transport {transport}: memory that is shared moves no bytes; use --transport tcp"
    );
    Ok(())
}

/// A server or an aggregator with a rate: peers of other hosts may come to it over TCP.
pub(crate) fn check_rate_of_node(rate: Option<Rate>, transport: Transport) -> Result<()> {
    check_rate(rate.filter(|_| transport == Transport::Shm), transport, true)
}

/// `workers = 0: expected 1 to 16384`.
fn within<T: PartialOrd + std::fmt::Display>(name: &str, value: T, range: RangeInclusive<T>) -> Result<()> {
    ensure!(range.contains(&value), "{name} = {value}: expected {} to {}", range.start(), range.end());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramill_core::policy::{Order, Reduce};
    use paramill_core::types::ServerId;

    /// A file that says everything.
    const FULL: &str = r#"
        seed = 7
        inject = ["worker=2:slow=4x"]

        [workload]
        name = "lr"
        data = "train.gz"
        test = "test.gz"
        epochs = 9
        batch = 10
        examples = 1000
        hidden = 64
        factors = 8
        l2 = 0.01

        [cluster]
        workers = 8
        servers = 3
        cores = 2
        aggregators = 3
        processes = true
        transport = "tcp"
        rate = "800Mbit"
        timeout = "90s"

        [policy]
        placement = "uniform"
        sync = "ssp:s=3,exec=soft"
        optimizer = "adam:lr=1e-3"
        reduce = "sum"
        order = "ranked"
        nonfinite = "clip"
        codec = "topk:0.01"
        chunk = "4KB"

        [[override]]
        table = "*.bias"
        server = 2
        sync = "asp"
    "#;

    fn plan(file: &str, args: &JobArgs) -> Result<JobPlan> {
        let registry = Registry::builtin();
        let (plan, _) = JobPlan::fill(Layer::of(args).over(Layer::parse(file)?), "localhost", &registry)?;
        plan.check(&registry)?;
        Ok(plan)
    }

    fn error(file: &str) -> String {
        format!("{:#}", plan(file, &JobArgs::default()).unwrap_err())
    }

    #[test]
    fn what_is_printed_means_the_same_job() {
        for file in ["", FULL, "[workload]\nname = \"mf\"\nl2 = 0.3\n"] {
            let resolved = plan(file, &JobArgs::default()).unwrap();
            let printed = resolved.to_toml();
            assert_eq!(plan(&printed, &JobArgs::default()).unwrap(), resolved, "{printed}");
        }
    }

    #[test]
    fn a_topology_is_read_from_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("network.toml");
        let written = |text: &str| {
            std::fs::write(&path, text).unwrap();
            plan("", &JobArgs { topology: Some(path.clone()), ..JobArgs::default() })
        };
        let found = written("[[edge]]\nname = 'e'\naggregation = 'a'\nhosts = ['node1']").unwrap();
        assert_eq!(found.topology().unwrap().hosts().collect::<Vec<_>>(), ["node1"]);
        assert_eq!(plan(&found.to_toml(), &JobArgs::default()).unwrap(), found);
        let error = format!("{:#}", written("[rack]").unwrap_err());
        assert!(error.contains("network.toml: not a topology") && error.contains("`rack`"), "{error}");
    }

    #[test]
    fn a_file_wins_over_defaults_and_options_win_over_the_file() {
        let from_file = plan(FULL, &JobArgs::default()).unwrap();
        assert_eq!((from_file.cluster.workers, from_file.policy.reduce()), (8, Reduce::Sum));
        assert_eq!(from_file.overrides[0].server, Some(ServerId(2)));

        let mut args = JobArgs { workers: Some(5), processes: Some(false), ..JobArgs::default() };
        args.policy.0.set(Axis::Sync, "bsp").unwrap();
        let both = plan(FULL, &args).unwrap();
        assert_eq!((both.cluster.workers, both.cluster.processes), (5, false));
        assert_eq!((both.policy.get(Axis::Sync), both.policy.order()), ("bsp", Order::Ranked));
    }

    /// The default optimizer of a workload gives way to a codec that its momentum would harm; one that was chosen stays.
    #[test]
    fn a_default_optimizer_has_no_momentum_beside_a_codec_that_sends_late() {
        let registry = Registry::builtin();
        for (policy, optimizer, told) in [
            ("codec = \"topk:0.01\"", "adam:lr=0.001,beta1=0", true),
            ("codec = \"f16\"", "adam:lr=0.001", false),
            ("codec = \"topk:0.01\"\noptimizer = \"adam:lr=0.001\"", "adam:lr=0.001", false),
        ] {
            let file = format!("[workload]\nname = \"cnn\"\n[cluster]\ncores = 1\n[policy]\n{policy}");
            let (plan, notes) = JobPlan::fill(Layer::parse(&file).unwrap(), "localhost", &registry).unwrap();
            assert_eq!(
                (plan.policy.get(Axis::Optimizer), notes.len()),
                (optimizer, usize::from(told)),
                "{policy}"
            );
            assert!(
                notes.iter().all(|note| note.contains("the optimizer of cnn is adam:lr=0.001,beta1=0")),
                "{notes:?}"
            );
        }
    }

    #[test]
    fn defaults_are_those_of_the_workload() {
        let args = JobArgs { workload: Some("lr".into()), ..JobArgs::default() };
        let plan = plan("", &args).unwrap();
        let info = paramill_train::find("lr").unwrap();
        assert_eq!((plan.workload.epochs, plan.workload.batch), (info.epochs, info.batch));
        assert_eq!(plan.policy.get(Axis::Optimizer), info.optimizer);
    }

    #[test]
    fn what_cannot_work_is_refused_with_what_was_expected() {
        for (file, expected) in [
            ("workers = 4", "unknown field `workers`, expected one of `seed`"),
            ("[cluster]\nworkerz = 4", "line 2, column 1"),
            ("[cluster]\nworkers = 0", "workers = 0: expected 1 to 16384"),
            ("[cluster]\nworkers = \"four\"", "expected u32"),
            ("[cluster]\naggregators = 5", "aggregators = 5: expected 0 to 4"),
            ("[cluster]\ntransport = \"udp\"", "expected one of `auto`, `tcp`, `shm`"),
            ("[cluster]\ntopology = \"no/such/file\"", "cannot read the topology file no/such/file"),
            ("[cluster]\ntimeout = \"soon\"", "such as `500ms`"),
            ("[cluster]\ntimeout = \"0s\"", "timeout = 0s: expected 1ms to 720h"),
            ("[workload]\nname = \"gpt\"", "lr, mf, mlp, cnn"),
            ("[workload]\nbatch = 0", "batch = 0: expected 1 to"),
            ("[workload]\ntest = \"t\"", "test data without training data"),
            ("[workload]\nhidden = 0", "hidden = 0: expected 1 to"),
            ("[policy]\nsync = \"spp:s=3\"", "unknown consistency model `spp`; known: bsp, asp, ssp"),
            ("[policy]\nsync = \"ssp:s=-1\"", "expected a whole number"),
            ("[policy]\nplacement = \"random\"", "unknown placement `random`; known: uniform"),
            ("[policy]\noptimizer = \"adam:lr=0\"", "lr"),
            ("[policy]\norder = \"any\"", "expected `arrival` or `ranked`"),
            (
                "[policy]\ncdoec = \"none\"",
                "unknown policy `cdoec`; known: sync, placement, optimizer, codec",
            ),
            ("[policy]\nsync = \"asp\"\ncdoec = \"none\"", "line 3, column 1"),
            ("[policy]\nchunk = \"3MB\"", "chunk: `3MB`: expected 4B to 2MB in steps of 4 bytes"),
            ("[[override]]\ntable = \"w\"\nchunk = \"4KB\"", "chunk: it is the same for the whole job"),
            (
                "[[override]]\ntable = \"w\"\nserver = 1\ncodec = \"f16\"",
                "the same on all servers of a table",
            ),
            ("[[override]]\ntabel = \"w\"", "unknown policy `tabel`"),
            ("[[override]]\ntable = \"w\"", "override 1 (table = \"w\"): it changes nothing"),
            ("[[override]]\ntable = \"w\"\nserver = 2\nsync = \"asp\"", "server = 2: expected 0 to 1"),
            ("[[override]]\ntable = \"w\"\nsync = \"x\"", "unknown consistency model `x`"),
            ("seed = -1", "expected u64"),
            ("inject = [\"worker=1:sleepy\"]", "fault `worker=1:sleepy`"),
        ] {
            let message = error(file);
            assert!(message.contains(expected), "{file}:\n{message}");
        }
    }
}
