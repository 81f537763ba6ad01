//! What one source says about a job: a config file, or the options. Nothing here has a default.

use crate::args::JobArgs;
use crate::duration::Span;
use crate::input::read_text;
use anyhow::{Context, Result, anyhow};
use paramill_core::policy::{Policies, PolicyOverride};
use paramill_node::Transport;
use paramill_node::rate::Rate;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A job as far as one source describes it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Layer {
    pub(super) seed: Option<u64>,
    pub(super) inject: Option<Vec<String>>,
    pub(super) workload: WorkloadLayer,
    pub(super) cluster: ClusterLayer,
    pub(super) policy: Policies,
    #[serde(rename = "override")]
    pub(super) overrides: Option<Vec<PolicyOverride>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct WorkloadLayer {
    pub(super) name: Option<String>,
    pub(super) data: Option<PathBuf>,
    pub(super) test: Option<PathBuf>,
    pub(super) epochs: Option<u64>,
    pub(super) batch: Option<usize>,
    pub(super) examples: Option<usize>,
    pub(super) hidden: Option<usize>,
    pub(super) factors: Option<usize>,
    pub(super) l2: Option<f32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ClusterLayer {
    pub(super) workers: Option<u32>,
    pub(super) servers: Option<u32>,
    pub(super) replicas: Option<u32>,
    pub(super) progress_timeout: Option<Span>,
    pub(super) cores: Option<u32>,
    pub(super) aggregators: Option<u32>,
    pub(super) processes: Option<bool>,
    pub(super) transport: Option<Transport>,
    pub(super) rate: Option<Rate>,
    pub(super) topology: Option<PathBuf>,
    pub(super) timeout: Option<Span>,
}

impl Layer {
    /// What a config file (or, for `-`, stdin) says. Paths in it are relative to the current folder, as those of options are.
    pub(super) fn read(path: &Path) -> Result<Layer> {
        let text =
            read_text(path).with_context(|| format!("cannot read the config file {}", path.display()))?;
        Layer::parse(&text).with_context(|| format!("config file {}", path.display()))
    }

    /// What the text of a config file says.
    pub(super) fn parse(text: &str) -> Result<Layer> {
        // The parser's message spans lines, with the place underlined.
        toml::from_str(text).map_err(|error| anyhow!("{}", error.to_string().trim_end()))
    }

    /// What the options say.
    pub(super) fn of(args: &JobArgs) -> Layer {
        Layer {
            seed: args.seed,
            inject: (!args.inject.is_empty()).then(|| args.inject.clone()),
            workload: WorkloadLayer {
                name: args.workload.clone(),
                data: args.data.clone(),
                test: args.test.clone(),
                epochs: args.epochs,
                batch: args.batch,
                examples: args.examples,
                // Rarely changed: only a file says these.
                hidden: None,
                factors: None,
                l2: None,
            },
            cluster: ClusterLayer {
                workers: args.workers,
                servers: args.servers,
                replicas: args.replicas,
                progress_timeout: args.progress_timeout,
                cores: args.cores,
                aggregators: args.aggregators,
                processes: args.processes,
                transport: args.transport,
                rate: args.rate,
                topology: args.topology.clone(),
                timeout: args.timeout,
            },
            policy: args.policy.0.clone(),
            overrides: None,
        }
    }

    /// This layer where it says something, else the one below.
    pub(super) fn over(self, below: Layer) -> Layer {
        let (workload, cluster) = (self.workload, self.cluster);
        Layer {
            seed: self.seed.or(below.seed),
            inject: self.inject.or(below.inject),
            workload: WorkloadLayer {
                name: workload.name.or(below.workload.name),
                data: workload.data.or(below.workload.data),
                test: workload.test.or(below.workload.test),
                epochs: workload.epochs.or(below.workload.epochs),
                batch: workload.batch.or(below.workload.batch),
                examples: workload.examples.or(below.workload.examples),
                hidden: workload.hidden.or(below.workload.hidden),
                factors: workload.factors.or(below.workload.factors),
                l2: workload.l2.or(below.workload.l2),
            },
            cluster: ClusterLayer {
                workers: cluster.workers.or(below.cluster.workers),
                servers: cluster.servers.or(below.cluster.servers),
                replicas: cluster.replicas.or(below.cluster.replicas),
                progress_timeout: cluster.progress_timeout.or(below.cluster.progress_timeout),
                cores: cluster.cores.or(below.cluster.cores),
                aggregators: cluster.aggregators.or(below.cluster.aggregators),
                processes: cluster.processes.or(below.cluster.processes),
                transport: cluster.transport.or(below.cluster.transport),
                rate: cluster.rate.or(below.cluster.rate),
                topology: cluster.topology.or(below.cluster.topology),
                timeout: cluster.timeout.or(below.cluster.timeout),
            },
            policy: self.policy.over(below.policy),
            overrides: self.overrides.or(below.overrides),
        }
    }
}
