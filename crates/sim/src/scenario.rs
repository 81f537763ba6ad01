//! A whole job in one file: who takes part, what is trained, over which network, with which faults.
//!
//! The same file can be run in virtual time and over sockets; gradients are those of [`crate::gradient`].

use crate::compute::ComputeModel;
use crate::input::read_file;
use crate::network::NetworkConfig;
use paramill_core::coordinator::JobConfig;
use paramill_core::fault::{FaultError, FaultPlan};
use paramill_core::limits;
use paramill_core::table::{NonFinite, Order, PolicyOverride, Reduce, TablePolicy, TableSpec};
use paramill_core::types::{AggregatorId, ServerId, WorkerId};
use serde::{Deserialize, Serialize};

/// A job to run. Everything has a default but the tables.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scenario {
    /// Everything random follows from it.
    pub seed: u64,
    /// Number of workers.
    pub workers: u32,
    /// Number of servers.
    pub servers: u32,
    /// Data cores of each server.
    pub cores: u32,
    /// Aggregators between workers and servers; workers are shared out among them by rank. 0: workers talk to the
    /// servers themselves.
    pub aggregators: u32,
    /// How long an aggregator holds a complete push for others, in milliseconds.
    pub hold_ms: f64,
    /// Iterations that each worker does.
    pub iterations: u64,
    /// Placement, in text form.
    pub placement: String,
    /// Consistency model, in text form.
    pub sync: String,
    /// Optimizer, in text form.
    pub optimizer: String,
    /// Codec of pushes, in text form.
    pub codec: String,
    /// Codec of answers, in text form.
    pub answer_codec: String,
    /// Mean or sum over workers.
    pub reduce: Reduce,
    /// Order in which gradients of a round are added. Ranked, unless the file says otherwise: a scenario should end
    /// with the same bits wherever it runs.
    pub order: Order,
    /// Elements per chunk.
    pub chunk_elements: u32,
    /// Whether server `i` and worker `i` are on the same host.
    pub colocated: bool,
    /// The run is given up after this many seconds of virtual time.
    pub limit_s: f64,
    /// Faults in the words of `--inject`.
    pub faults: Vec<String>,
    /// What is trained.
    pub tables: Vec<TableConfig>,
    /// Policies of single tables or servers.
    pub overrides: Vec<PolicyOverride>,
    /// Changes of the consistency model while the job runs.
    pub switches: Vec<Switch>,
    /// Rates and delays.
    pub network: NetworkConfig,
    /// Computation times.
    pub compute: ComputeModel,
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
}

/// A change of the consistency model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// When, in seconds of virtual time.
    pub at_s: f64,
    /// Glob on table names.
    #[serde(default = "every_table")]
    pub table: String,
    /// Only on this server.
    #[serde(default)]
    pub server: Option<ServerId>,
    /// The model from then on.
    pub sync: String,
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
            aggregators: 0,
            hold_ms: limits::HOLD.as_secs_f64() * 1e3,
            iterations: 50,
            placement: "heuristic".into(),
            sync: "bsp".into(),
            optimizer: "sgd:lr=0.1".into(),
            codec: "none".into(),
            answer_codec: "none".into(),
            reduce: Reduce::default(),
            order: Order::Ranked,
            chunk_elements: limits::CHUNK_ELEMENTS as u32,
            colocated: false,
            limit_s: 1e6,
            faults: Vec::new(),
            tables: Vec::new(),
            overrides: Vec::new(),
            switches: Vec::new(),
            network: NetworkConfig::default(),
            compute: ComputeModel::default(),
        }
    }
}

impl Scenario {
    /// A job of one dense table under every default.
    pub fn new(workers: u32, servers: u32, elements: u64) -> Scenario {
        let table = TableConfig { name: "w".into(), shape: vec![elements], rows: false };
        Scenario { workers, servers, tables: vec![table], ..Scenario::default() }
    }

    /// Reads a scenario file and checks it.
    pub fn parse(text: &str) -> Result<Scenario, ScenarioError> {
        let scenario: Scenario =
            toml::from_str(text).map_err(|error| ScenarioError::Toml(error.to_string()))?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Whether every number is in range and every fault can be read. Text forms of components are checked when the
    /// job is set up.
    pub fn check(&self) -> Result<(), ScenarioError> {
        for (name, value, max) in [
            ("workers", u64::from(self.workers), u64::from(limits::MAX_WORKERS)),
            ("servers", self.servers.into(), limits::MAX_SERVERS.into()),
            ("cores", self.cores.into(), limits::MAX_CORES.into()),
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
        let (hold, longest) = (self.hold_ms, limits::MAX_HOLD.as_secs_f64() * 1e3);
        require((0.0..=longest).contains(&hold), || format!("hold_ms = {hold}: expected 0 to {longest}"))?;
        let limit = self.limit_s;
        require(limit > 0.0 && limit <= 1e9, || format!("limit_s = {limit}: expected above 0, at most 1e9"))?;
        require(!self.tables.is_empty(), || "tables: expected at least one".into())?;
        for (index, table) in self.table_specs().iter().enumerate() {
            table.check().map_err(ScenarioError::Value)?;
            let repeated = self.tables[..index].iter().any(|other| other.name == table.name);
            require(!repeated, || format!("table `{}` is given twice", table.name))?;
        }
        for switch in &self.switches {
            let at = switch.at_s;
            require((0.0..=1e9).contains(&at), || format!("switches.at_s = {at}: expected 0 to 1e9"))?;
        }
        self.network.check().map_err(ScenarioError::Value)?;
        self.compute.check().map_err(ScenarioError::Value)?;
        FaultPlan::parse(&self.faults)?.check_members(self.workers, self.servers)?;
        Ok(())
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
        JobConfig {
            placement: self.placement.clone(),
            policy: self.policy(),
            overrides: self.overrides.clone(),
            chunk_elements: self.chunk_elements,
            seed: self.seed,
            ..JobConfig::new(job, self.workers, self.servers)
        }
    }

    /// The aggregator that a worker goes through, if it goes through one.
    pub fn aggregator_of(&self, worker: WorkerId) -> Option<AggregatorId> {
        let share = u64::from(worker.0) * u64::from(self.aggregators) / u64::from(self.workers);
        (self.aggregators > 0).then_some(AggregatorId(share as u32))
    }

    /// The policy of every table, before the overrides.
    pub fn policy(&self) -> TablePolicy {
        TablePolicy {
            sync: self.sync.clone(),
            optimizer: self.optimizer.clone(),
            reduce: self.reduce,
            order: self.order,
            nonfinite: NonFinite::Reject,
            codec: self.codec.clone(),
            answer_codec: self.answer_codec.clone(),
        }
    }
}

fn require(holds: bool, why: impl FnOnce() -> String) -> Result<(), ScenarioError> {
    if holds { Ok(()) } else { Err(ScenarioError::Value(why())) }
}

fn every_table() -> String {
    "*".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"
        workers = 3
        sync = "ssp:s=3"
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
        assert_eq!((scenario.workers, scenario.servers, scenario.order), (3, 2, Order::Ranked));
        assert_eq!(scenario.table_specs()[1], TableSpec::sparse("rows", 100, 8));
        assert_eq!(scenario.switches[0].table, "*");
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
            ("aggregators=5\n[[tables]]\nname='w'\nshape=[1]", "aggregators = 5: expected at most one"),
            ("hold_ms=-1\n[[tables]]\nname='w'\nshape=[1]", "hold_ms = -1: expected 0 to 10000"),
            ("seed = \n", "TOML parse error"),
        ] {
            let error = Scenario::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
