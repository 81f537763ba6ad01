//! What was typed means this job: defaults, then a config file, then options, each winning over the one before.

mod layer;
mod workloads;

use crate::args::JobArgs;
use crate::duration::Span;
use anyhow::{Context, Result, ensure};
use layer::Layer;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::spec::Spec;
use paramill_core::table::{PolicyOverride, TablePolicy};
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
    pub(crate) policy: PolicyPlan,
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
}

/// Who takes part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ClusterPlan {
    pub(crate) workers: u32,
    pub(crate) servers: u32,
    /// Data cores of each server.
    pub(crate) cores: u32,
    /// Whether each is a process of its own.
    pub(crate) processes: bool,
    /// The longest wait before giving up.
    pub(crate) timeout: Span,
}

/// Which components decide.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PolicyPlan {
    pub(crate) placement: String,
    #[serde(flatten)]
    pub(crate) table: TablePolicy,
}

const MAX_EPOCHS: u64 = 1_000_000;
const MAX_BATCH: usize = 1 << 24;
const MAX_EXAMPLES: usize = 1 << 40;
/// TOML has signed numbers, and a plan must survive being printed.
const MAX_SEED: u64 = i64::MAX as u64;
const MAX_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

impl JobPlan {
    /// Works out what the options and the file that they name mean, and refuses what cannot work.
    pub(crate) fn resolve(args: &JobArgs, registry: &Registry) -> Result<JobPlan> {
        let file = match &args.config {
            Some(path) => Layer::read(path)?,
            None => Layer::default(),
        };
        let plan = JobPlan::fill(Layer::of(args).over(file))?;
        plan.check(registry)?;
        Ok(plan)
    }

    /// The plan as a config file.
    pub(crate) fn to_toml(&self) -> String {
        toml::to_string(self).expect("a plan has only text keys, and numbers that TOML has")
    }

    /// Puts defaults where nothing was said. Those of the workload depend on which it is.
    fn fill(said: Layer) -> Result<JobPlan> {
        let name = said.workload.name.unwrap_or_else(|| "mlp".to_owned());
        let defaults = workloads::find(&name)?;
        let policy = TablePolicy::default();
        Ok(JobPlan {
            seed: said.seed.unwrap_or(1),
            inject: said.inject.unwrap_or_default(),
            workload: WorkloadPlan {
                name,
                data: said.workload.data,
                test: said.workload.test,
                epochs: said.workload.epochs.unwrap_or(defaults.epochs),
                batch: said.workload.batch.unwrap_or(defaults.batch),
                examples: said.workload.examples,
            },
            cluster: ClusterPlan {
                workers: said.cluster.workers.unwrap_or(4),
                servers: said.cluster.servers.unwrap_or(2),
                cores: said.cluster.cores.unwrap_or(1),
                processes: said.cluster.processes.unwrap_or(false),
                timeout: said.cluster.timeout.unwrap_or(Span(Duration::from_secs(60))),
            },
            policy: PolicyPlan {
                placement: said.policy.placement.unwrap_or_else(|| "heuristic".to_owned()),
                table: TablePolicy {
                    sync: said.policy.sync.unwrap_or(policy.sync),
                    optimizer: said.policy.optimizer.unwrap_or_else(|| defaults.optimizer.to_owned()),
                    reduce: said.policy.reduce.unwrap_or(policy.reduce),
                    order: said.policy.order.unwrap_or(policy.order),
                    nonfinite: said.policy.nonfinite.unwrap_or(policy.nonfinite),
                },
            },
            overrides: said.overrides.unwrap_or_default(),
        })
    }

    fn check(&self, registry: &Registry) -> Result<()> {
        let (workload, cluster, policy) = (&self.workload, &self.cluster, &self.policy);
        within("seed", self.seed, 0..=MAX_SEED)?;
        within("epochs", workload.epochs, 1..=MAX_EPOCHS)?;
        within("batch", workload.batch, 1..=MAX_BATCH)?;
        within("examples", workload.examples.unwrap_or(1), 1..=MAX_EXAMPLES)?;
        ensure!(
            workload.data.is_some() || workload.test.is_none(),
            "test data without training data; give both, or neither to have data made"
        );
        within("workers", cluster.workers, 1..=limits::MAX_WORKERS)?;
        within("servers", cluster.servers, 1..=limits::MAX_SERVERS)?;
        within("cores", cluster.cores, 1..=limits::MAX_CORES)?;
        within("timeout", cluster.timeout, Span(Duration::from_millis(1))..=Span(MAX_TIMEOUT))?;
        check_sync(&policy.table.sync, registry)?;
        check_optimizer(&policy.table.optimizer, registry)?;
        registry.placement.build(&Spec::parse(&policy.placement)?)?;
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
        let nothing = PolicyOverride { table: rule.table.clone(), server: rule.server, ..Default::default() };
        ensure!(*rule != nothing, "it changes nothing; give it a `sync`, an `optimizer` or another policy");
        rule.sync.as_deref().map_or(Ok(()), |sync| check_sync(sync, registry))?;
        rule.optimizer.as_deref().map_or(Ok(()), |optimizer| check_optimizer(optimizer, registry))
    }
}

fn check_sync(text: &str, registry: &Registry) -> Result<()> {
    registry.consistency.build(&Spec::parse(text)?)?;
    Ok(())
}

fn check_optimizer(text: &str, registry: &Registry) -> Result<()> {
    registry.optimizer.build(&Spec::parse(text)?)?;
    Ok(())
}

/// `workers = 0: expected 1 to 4096`.
fn within<T: PartialOrd + std::fmt::Display>(name: &str, value: T, range: RangeInclusive<T>) -> Result<()> {
    ensure!(range.contains(&value), "{name} = {value}: expected {} to {}", range.start(), range.end());
    Ok(())
}
