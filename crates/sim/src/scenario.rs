//! A whole job in one file: who takes part, what is trained, over which network, with which faults.
//!
//! The same file can be run in virtual time and over sockets; gradients are those of [`crate::gradient`].

mod hosts;

pub use hosts::{Hosts, LinkNames, SPARES_OF_A_SERVER};

use crate::compute::{ComputeModel, LayerTimes, SendMode};
use crate::gradient::Gradients;
use crate::input::read_file;
use crate::judge::JudgeModel;
use crate::models;
use crate::network::NetworkConfig;
use crate::training::WorkloadChoice;
use paramill_core::checkpoint::{self, CheckpointPolicy, Every};
use paramill_core::coordinator::{Checkpointing, JobConfig};
use paramill_core::fault::{FaultError, FaultPlan};
use paramill_core::limits;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::{AggregatorId, ServerId, Time, WorkerId};
use paramill_core::wire::Control;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::time::Duration;

/// So often is asked for the status of a job at most.
const MAX_STATUS_QUERIES: u32 = 1000;

/// A job to run. Everything has a default but the tables.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Scenario {
    /// Everything random follows from it.
    pub seed: u64,
    /// Number of workers.
    pub workers: u32,
    /// Number of servers.
    pub servers: u32,
    /// Data cores of each server.
    pub cores: u32,
    /// Copies that are kept of every shard on other servers: none or one.
    pub replicas: u32,
    /// A member that makes no progress for so many seconds while others wait for it is left behind. 0: none is.
    pub progress_timeout_s: f64,
    /// A checkpoint is made at clocks that are multiples of this. 0: none.
    pub checkpoint_every: u64,
    /// Aggregators between workers and servers; workers are shared out among them by rank. 0: workers talk to the
    /// servers themselves.
    pub aggregators: u32,
    /// Cores of each aggregator: each stands for some of the shards, and has a number of its own.
    pub aggregator_cores: u32,
    /// Readers of what is broadcast. The first is there from the beginning and stays; others come while the job runs, and some go again.
    pub readers: u32,
    /// Aggregators of racks, above these and numbered behind them: the hosts' are shared out among them, and go through them
    /// to the servers.
    pub rack_aggregators: u32,
    /// How long an aggregator holds a complete push for others, in milliseconds.
    pub hold_ms: f64,
    /// Iterations that each worker does.
    pub iterations: u64,
    /// The policy of every table, before the overrides. In a file each axis is a key of its own. Gradients are added by
    /// rank, unless the file says otherwise: a scenario should end with the same bits wherever it runs.
    #[serde(flatten, deserialize_with = "policy")]
    pub policy: Policy,
    /// Whether server `i` and worker `i` are on the same host.
    pub colocated: bool,
    /// The run is given up after this many seconds of virtual time.
    pub limit_s: f64,
    /// Whether workers push whole numbers that tell who pushed what ([`crate::gradient::tag`]): their sums are the same in
    /// any order.
    pub tags: bool,
    /// Faults in the words of `--inject`.
    pub faults: Vec<String>,
    /// What is trained.
    pub tables: Vec<TableConfig>,
    /// A workload that is really trained, on tables of its own ([`crate::training`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload: Option<WorkloadChoice>,
    /// Policies of single tables or servers.
    pub overrides: Vec<PolicyOverride>,
    /// Changes of policies while the job runs.
    pub switches: Vec<Switch>,
    /// Servers that are drained while the job runs.
    pub drains: Vec<Drain>,
    /// Somebody asks for the status so often, in seconds. 0: nobody does.
    pub status_every_s: f64,
    /// Rates and delays.
    pub network: NetworkConfig,
    /// Computation times.
    pub compute: ComputeModel,
    /// The condition that worker 0 evaluates, where the model is `remote:lead`.
    pub judge: JudgeModel,
}

/// A table of a scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableConfig {
    /// Unique in the scenario.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// Whether single rows are pushed and pulled.
    #[serde(default)]
    pub rows: bool,
    /// Multiply-accumulates of a forward pass that use it: its share of a step that is computed layer by layer.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub macs: u64,
}

impl From<models::Tensor> for TableConfig {
    fn from(models::Tensor { name, shape, macs }: models::Tensor) -> TableConfig {
        TableConfig { name, shape, rows: false, macs }
    }
}

/// A change of policies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// When, in seconds of virtual time.
    pub at_s: f64,
    /// What holds from then on, and for which tables.
    #[serde(flatten)]
    pub change: PolicyOverride,
}

/// A server that is drained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// When, in seconds of virtual time.
    pub at_s: f64,
    /// Its number.
    pub server: u32,
}

/// Why a scenario cannot be run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScenarioError {
    /// The text is not TOML, or has a field that does not belong or does not fit.
    #[error("{0}")]
    Toml(String),
    /// A value is out of range.
    #[error("{0}")]
    Value(String),
    /// A fault cannot be read.
    #[error(transparent)]
    Fault(#[from] FaultError),
    /// A file of step times cannot be read.
    #[error("step trace `{path}`: {why}")]
    Trace {
        /// Its path.
        path: String,
        /// What is wrong.
        why: String,
    },
}

impl Default for Scenario {
    fn default() -> Scenario {
        Scenario {
            seed: 0,
            workers: 4,
            servers: 2,
            cores: 1,
            replicas: 0,
            progress_timeout_s: 0.0,
            checkpoint_every: 0,
            aggregators: 0,
            aggregator_cores: 1,
            readers: 0,
            rack_aggregators: 0,
            hold_ms: limits::HOLD.as_secs_f64() * 1e3,
            iterations: 50,
            policy: Policy::default().with(Axis::Order, "ranked"),
            colocated: false,
            limit_s: 1e6,
            tags: false,
            faults: Vec::new(),
            tables: Vec::new(),
            workload: None,
            overrides: Vec::new(),
            switches: Vec::new(),
            drains: Vec::new(),
            status_every_s: 0.0,
            network: NetworkConfig::default(),
            compute: ComputeModel::default(),
            judge: JudgeModel::default(),
        }
    }
}

impl Scenario {
    /// A job of one dense table under every default.
    pub fn new(workers: u32, servers: u32, elements: u64) -> Scenario {
        let table = TableConfig { name: "w".into(), shape: vec![elements], rows: false, macs: 0 };
        Scenario { workers, servers, tables: vec![table], ..Scenario::default() }
    }

    /// The same with another text for an axis, which must be one that stands in the code ([`Policy::with`]).
    pub fn with(self, axis: Axis, text: impl Into<String>) -> Scenario {
        Scenario { policy: self.policy.with(axis, text), ..self }
    }

    /// Reads a scenario file and checks it.
    pub fn parse(text: &str) -> Result<Scenario, ScenarioError> {
        let mut scenario: Scenario =
            toml::from_str(text).map_err(|error| ScenarioError::Toml(error.to_string()))?;
        scenario.take_model()?;
        scenario.check_workload(text)?;
        scenario.check()?;
        Ok(scenario)
    }

    /// The tables are those of the model that `compute.model` names.
    fn take_model(&mut self) -> Result<(), ScenarioError> {
        let Some(name) = &self.compute.model else { return Ok(()) };
        let model =
            models::model(name).map_err(|error| ScenarioError::Value(format!("compute.model: {error}")))?;
        let tables: Vec<TableConfig> = model.tensors.into_iter().map(TableConfig::from).collect();
        require(self.tables.is_empty() || self.tables == tables, || {
            format!("compute.model = \"{name}\" names the tables; leave out [[tables]], or the model")
        })?;
        self.tables = tables;
        Ok(())
    }

    /// A workload is trained, and nothing else can be done with it.
    pub fn check_untrained(&self) -> Result<(), ScenarioError> {
        let name = self.workload.as_ref().map(|workload| workload.name.as_str());
        require(name.is_none(), || {
            let name = name.unwrap_or_default();
            format!("workload \"{name}\" is really trained; run the scenario with `paramill sim train`")
        })
    }

    /// A workload has tables and a length of its own.
    fn check_workload(&self, text: &str) -> Result<(), ScenarioError> {
        let Some(WorkloadChoice { name, .. }) = &self.workload else { return Ok(()) };
        let typed: toml::Table = text.parse().unwrap_or_default();
        require(self.tables.is_empty(), || {
            format!("workload = \"{name}\" has tables of its own; leave out [[tables]] and compute.model")
        })?;
        require(!typed.contains_key("iterations"), || {
            format!("iterations: how long workload \"{name}\" takes is said by its `epochs`")
        })
    }

    /// Shares of a step's time, in the order of the tables: by their multiply-accumulates, or by their size where none has any.
    pub fn layer_times(&self) -> LayerTimes {
        let macs: Vec<u64> = self.tables.iter().map(|table| table.macs).collect();
        let elements = || self.table_specs().iter().map(TableSpec::elements).collect();
        let work: Vec<u64> = if macs.iter().any(|&macs| macs > 0) { macs } else { elements() };
        LayerTimes::new(&work)
    }

    /// Whether every number is in range and every fault can be read. Text forms of components are checked when the
    /// job is set up.
    pub fn check(&self) -> Result<(), ScenarioError> {
        for (name, value, max) in [
            ("workers", u64::from(self.workers), u64::from(limits::MAX_WORKERS)),
            ("servers", self.servers.into(), limits::MAX_SERVERS.into()),
            ("cores", self.cores.into(), limits::MAX_CORES.into()),
            ("aggregator_cores", self.aggregator_cores.into(), limits::MAX_CORES.into()),
            ("iterations", self.iterations, 1 << 32),
        ] {
            require((1..=max).contains(&value), || format!("{name} = {value}: expected 1 to {max}"))?;
        }
        require(self.aggregators <= self.workers, || {
            format!(
                "aggregators = {}: expected at most one for each of {} workers",
                self.aggregators, self.workers
            )
        })?;
        let (readers, most) = (self.readers, limits::MAX_READERS as u32);
        require(readers <= most, || format!("readers = {readers}: expected 0 to {most}"))?;
        let all_are_read = self.policy.is_broadcast() && !self.tables.iter().any(|table| table.rows);
        require(readers == 0 || all_are_read, || {
            format!(
                "readers = {readers}: they read dense tables that are broadcast; set `broadcast`, such as \"star\""
            )
        })?;
        require(self.rack_aggregators <= self.aggregators, || {
            format!(
                "rack_aggregators = {}: expected at most one for each of {} aggregators",
                self.rack_aggregators, self.aggregators
            )
        })?;
        let (hold, longest) = (self.hold_ms, limits::MAX_HOLD.as_secs_f64() * 1e3);
        require((0.0..=longest).contains(&hold), || format!("hold_ms = {hold}: expected 0 to {longest}"))?;
        let limit = self.limit_s;
        require(limit > 0.0 && limit <= 1e9, || format!("limit_s = {limit}: expected above 0, at most 1e9"))?;
        require(!self.tables.is_empty() || self.workload.is_some(), || {
            "tables: expected at least one, or a [workload]".into()
        })?;
        for (index, table) in self.table_specs().iter().enumerate() {
            table.check().map_err(ScenarioError::Value)?;
            let repeated = self.tables[..index].iter().any(|other| other.name == table.name);
            require(!repeated, || format!("table `{}` is given twice", table.name))?;
        }
        for switch in &self.switches {
            let at = switch.at_s;
            require((0.0..=1e9).contains(&at), || format!("switches.at_s = {at}: expected 0 to 1e9"))?;
        }
        for Drain { at_s, server } in &self.drains {
            require((0.0..=1e9).contains(at_s), || format!("drains.at_s = {at_s}: expected 0 to 1e9"))?;
            require(*server < self.servers, || {
                format!("drains.server = {server}: expected 0 to {}", self.servers.saturating_sub(1))
            })?;
        }
        let every = self.status_every_s;
        require(every == 0.0 || (1e-3..=1e9).contains(&every), || {
            format!("status_every_s = {every}: expected 0 (nobody asks), or 0.001 to 1e9")
        })?;
        Hosts::of(self)?;
        self.compute.check().map_err(ScenarioError::Value)?;
        let (at_end, leaves_out) = (
            self.compute.send == SendMode::End,
            self.texts_of(Axis::Sync).any(|sync| sync.starts_with("quorum")),
        );
        require(at_end || !leaves_out, || {
            "compute.send = \"layerwise\" with `quorum`: rounds may close while a step is computed, and its gradients must all be of \
             one; use \"end\""
                .into()
        })?;
        require(at_end || !self.policy.is_local(), || {
            "compute.send = \"layerwise\" with local steps, which push a fragment after a step; use \"end\""
                .into()
        })?;
        self.judge.check().map_err(ScenarioError::Value)?;
        FaultPlan::parse(&self.faults)?.check_members(self.workers, self.servers)?;
        Ok(())
    }

    /// All texts of an axis: of the job, of single tables and servers, and those that come later.
    pub(crate) fn texts_of(&self, axis: Axis) -> impl Iterator<Item = &str> {
        let changes = self.switches.iter().map(|switch| &switch.change).chain(&self.overrides);
        changes.filter_map(move |change| change.policies.get(axis)).chain([self.policy.get(axis)])
    }

    /// What workers push.
    pub fn gradients(&self) -> Gradients {
        if self.tags { Gradients::Tagged { workers: self.workers } } else { Gradients::Quadratic }
    }

    /// What is asked of the coordinator from outside, and when.
    pub fn orders(&self) -> Vec<(Time, Control)> {
        let at = Time::from_secs_f64;
        let switches =
            self.switches.iter().map(|switch| (at(switch.at_s), Control::Set(switch.change.clone())));
        let drains = self
            .drains
            .iter()
            .map(|drain| (at(drain.at_s), Control::Drain { server: ServerId(drain.server) }));
        let queries = if self.status_every_s > 0.0 { MAX_STATUS_QUERIES } else { 0 };
        let queries =
            (0..queries).map(|count| (at(f64::from(count) * self.status_every_s), Control::StatusQuery));
        let mut orders: Vec<(Time, Control)> = switches.chain(drains).chain(queries).collect();
        orders.sort_by_key(|(at, _)| *at);
        orders
    }

    /// The faults, with the traces they name read from their files.
    pub fn fault_plan(&self) -> Result<FaultPlan, ScenarioError> {
        let mut plan = FaultPlan::parse(&self.faults)?;
        let paths: Vec<String> = plan.trace_paths().map(str::to_owned).collect();
        for path in paths {
            let wrong = |why: String| ScenarioError::Trace { path: path.clone(), why };
            let text = read_file(&path).map_err(|error| wrong(error.to_string()))?;
            plan.load_trace(&path, &text).map_err(|error| wrong(error.to_string()))?;
        }
        Ok(plan)
    }

    /// The tables as workers declare them.
    pub fn table_specs(&self) -> Vec<TableSpec> {
        let spec = |table: &TableConfig| match table.rows {
            false => TableSpec::dense(table.name.as_str(), table.shape.clone()),
            true => TableSpec { rows: true, ..TableSpec::dense(table.name.as_str(), table.shape.clone()) },
        };
        self.tables.iter().map(spec).collect()
    }

    /// The job as its coordinator sees it, whoever drives it.
    pub fn job_config(&self, job: &str) -> JobConfig {
        let policy = CheckpointPolicy { every: Every::Steps(self.checkpoint_every), keep: checkpoint::KEEP };
        let checkpoints = Checkpointing { policy: Some(policy), resume: None, kept: vec![] };
        JobConfig {
            policy: self.policy.clone(),
            overrides: self.overrides.clone(),
            seed: self.seed,
            replicas: self.replicas,
            progress_timeout: (self.progress_timeout_s > 0.0)
                .then(|| Duration::from_secs_f64(self.progress_timeout_s.min(1e7))),
            checkpoints: (self.checkpoint_every > 0).then_some(checkpoints),
            ..JobConfig::new(job, self.workers, self.servers)
        }
    }

    /// The aggregator that a worker goes through, if it goes through one.
    pub fn aggregator_of(&self, worker: WorkerId) -> Option<AggregatorId> {
        let share = u64::from(worker.0) * u64::from(self.aggregators) / u64::from(self.workers);
        // A worker that comes late has a rank behind the others', and goes where the last one goes.
        let last = self.aggregators.checked_sub(1)?;
        Some(AggregatorId(last.min(share as u32)))
    }

    /// The aggregator of a rack that a host's goes through, if it goes through one.
    pub fn rack_of(&self, aggregator: AggregatorId) -> Option<AggregatorId> {
        if self.rack_aggregators == 0 || aggregator.0 >= self.aggregators {
            return None;
        }
        Some(AggregatorId(self.aggregators + aggregator.0 * self.rack_aggregators / self.aggregators))
    }

    /// How many aggregators there are, of hosts and of racks.
    pub fn all_aggregators(&self) -> u32 {
        self.aggregators + self.rack_aggregators
    }

    /// The numbers that the cores of an aggregator have in the job.
    pub fn cores_of(&self, aggregator: AggregatorId) -> impl Iterator<Item = AggregatorId> + use<> {
        let first = aggregator.0 * self.aggregator_cores;
        (first..first + self.aggregator_cores).map(AggregatorId)
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn require(holds: bool, why: impl FnOnce() -> String) -> Result<(), ScenarioError> {
    if holds { Ok(()) } else { Err(ScenarioError::Value(why())) }
}

/// The keys of a file that are none of [`Scenario`]'s other fields.
fn policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Policy, D::Error> {
    let mut policies = Policies::default();
    for (name, value) in toml::Table::deserialize(deserializer)? {
        let axis = Axis::named(&name).map_err(|_| D::Error::custom(unknown_field(&name)))?;
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        policies.set(axis, text).map_err(D::Error::custom)?;
    }
    Ok(Scenario::default().policy.under(policies))
}

fn unknown_field(name: &str) -> String {
    let fields = toml::Table::try_from(Scenario::default()).unwrap_or_default();
    let fields: Vec<String> = fields.keys().map(|field| format!("`{field}`")).collect();
    format!("unknown field `{name}`, expected one of {}", fields.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramill_core::policy::Order;

    const SMALL: &str = r#"
        workers = 3
        sync = "ssp:s=3"
        chunk = "4KB"
        faults = ["worker=2:slow=4x", "pull:delay=4s,p=0.0016"]

        [[tables]]
        name = "w"
        shape = [10, 4]

        [[tables]]
        name = "rows"
        shape = [100, 8]
        rows = true

        [[switches]]
        at_s = 1.5
        sync = "bsp"

        [network]
        gbit_per_s = 1.0

        [compute]
        step_ms = 20
    "#;

    #[test]
    fn a_file_says_what_differs_from_the_defaults() {
        let scenario = Scenario::parse(SMALL).unwrap();
        assert_eq!((scenario.workers, scenario.servers, scenario.policy.order()), (3, 2, Order::Ranked));
        assert_eq!(scenario.table_specs()[1], TableSpec::sparse("rows", 100, 8));
        let asp = Policies::of([(Axis::Sync, "bsp")]);
        assert_eq!(scenario.switches[0].change, PolicyOverride::new("*", asp));
        assert_eq!(scenario.policy.get(Axis::Chunk), "4KB");
        assert_eq!(Scenario::parse(&toml::to_string(&scenario).unwrap()), Ok(scenario));
    }

    #[test]
    fn a_model_names_the_tables_and_their_work() {
        let scenario = Scenario::parse("[compute]\nmodel='resnet20_cifar'\nsend='layerwise'").unwrap();
        assert_eq!((scenario.tables.len(), scenario.tables[0].name.as_str()), (59, "conv1.weight"));
        assert!(scenario.tables[0].macs > 0);
        assert_eq!(scenario.layer_times().stages(), 118);
        assert_eq!(Scenario::parse(&toml::to_string(&scenario).unwrap()), Ok(scenario));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (text, expected) in [
            ("workers = 3", "tables: expected at least one"),
            ("wrokers = 3", "unknown field `wrokers`, expected one of"),
            ("workers = 0\n[[tables]]\nname='w'\nshape=[1]", "workers = 0: expected 1 to 16384"),
            ("[[tables]]\nname='w'\nshape=[0]", "table `w` of shape [0]"),
            ("[[tables]]\nname='w'\nshape=[1]\n[[tables]]\nname='w'\nshape=[1]", "given twice"),
            (
                "faults=['worker=2:slow']\n[[tables]]\nname='w'\nshape=[1]",
                "fault `worker=2:slow`: unknown effect",
            ),
            ("[[tables]]\nname='w'\nshape=[1]\n[network]\nlatency_us=-1", "network.latency_us = -1"),
            ("[[tables]]\nname='w'\nshape=[1]\n[compute]\nstraggle_p=2", "compute.straggle_p = 2"),
            ("[[tables]]\nname='w'\nshape=[1]\n[judge]\nfails_p=2", "judge.fails_p = 2: expected a number"),
            ("aggregators=5\n[[tables]]\nname='w'\nshape=[1]", "aggregators = 5: expected at most one"),
            ("hold_ms=-1\n[[tables]]\nname='w'\nshape=[1]", "hold_ms = -1: expected 0 to 10000"),
            ("seed = \n", "TOML parse error"),
            ("[compute]\nmodel='resnet9'", "compute.model: unknown model `resnet9`; known: alexnet"),
            (
                "[[tables]]\nname='w'\nshape=[1]\n[compute]\nmodel='resnet20_cifar'",
                "leave out [[tables]], or the model",
            ),
            (
                "order = 'any'\n[[tables]]\nname='w'\nshape=[1]",
                "order: `any`: expected `arrival` or `ranked`",
            ),
            ("chunk = '3MB'\n[[tables]]\nname='w'\nshape=[1]", "expected 4B to 2MB"),
            (
                "[[tables]]\nname='w'\nshape=[1]\n[[switches]]\nat_s = 1\nsnyc='asp'",
                "unknown policy `snyc`; known: sync",
            ),
        ] {
            let error = Scenario::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
