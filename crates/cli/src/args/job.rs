//! The options that describe a job, shared by the commands that run or print one.

use crate::duration::Span;
use clap::Args as ClapArgs;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use paramill_core::table::{NonFinite, Order, Reduce};
use paramill_node::Transport;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error, StringDeserializer};
use std::path::PathBuf;

/// A job as far as it was typed. Nothing here has a default: a config file may say it.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct JobArgs {
    /// What to train: lr, mf, mlp or cnn [default: mlp].
    pub(crate) workload: Option<String>,
    /// Training data, plain or gzip: a libsvm file (lr), a CSV of user,item,rating (mf), a folder of idx files (mlp, cnn). Made from the seed when not given.
    #[arg(long, value_name = "PATH", help_heading = "Workload")]
    pub(crate) data: Option<PathBuf>,
    /// Held-out data of the same kind; a part of --data is held out when not given.
    #[arg(long, value_name = "PATH", help_heading = "Workload")]
    pub(crate) test: Option<PathBuf>,
    /// Times to go through the data [default: the workload's].
    #[arg(long, value_name = "E", help_heading = "Workload")]
    pub(crate) epochs: Option<u64>,
    /// Examples in a worker's batch [default: the workload's].
    #[arg(long, value_name = "B", help_heading = "Workload")]
    pub(crate) batch: Option<usize>,
    /// Train on at most this many examples, or make this many.
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) examples: Option<usize>,
    /// Everything random follows from it [default: 1].
    #[arg(long, value_name = "K", help_heading = "Workload")]
    pub(crate) seed: Option<u64>,
    /// Workers [default: 4].
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub(crate) workers: Option<u32>,
    /// Servers [default: 2].
    #[arg(long, value_name = "M", help_heading = "Cluster")]
    pub(crate) servers: Option<u32>,
    /// Data cores of each server [default: by the CPUs that the job's servers and workers share; 1 where the optimizer uses
    /// norms].
    #[arg(long, value_name = "K", help_heading = "Cluster")]
    pub(crate) cores: Option<u32>,
    /// Aggregators that workers go through, shared out by rank [default: none].
    #[arg(long, value_name = "A", help_heading = "Cluster")]
    pub(crate) aggregators: Option<u32>,
    /// Run every worker and server as a process of its own.
    #[arg(long, value_name = "BOOL", help_heading = "Cluster", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true)]
    pub(crate) processes: Option<bool>,
    /// How these processes exchange gradients and parameters: auto, tcp or shm [default: auto, which is shared memory].
    #[arg(long, value_name = "T", help_heading = "Cluster")]
    pub(crate) transport: Option<Transport>,
    /// Give up on a wait that lasts longer, and name who is waited for [default: 1m].
    #[arg(long, value_name = "TIME", help_heading = "Cluster")]
    pub(crate) timeout: Option<Span>,
    /// A fault to try, such as 'worker=2:slow=4x', 'pull:delay=4s,p=0.0016' or 'server=1:pause=2s@10s'; may be
    /// given several times.
    #[arg(long, value_name = "FAULT", help_heading = "Cluster")]
    pub(crate) inject: Vec<String>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    /// A job in TOML, or `-` for stdin; options win over it. Policies of single tables are its `[[override]]` entries.
    #[arg(long, value_name = "FILE", help_heading = None)]
    pub(crate) config: Option<PathBuf>,
}

/// Policies as far as they were typed.
#[derive(Debug, Clone, Default, ClapArgs)]
#[command(next_help_heading = "Policies (see `paramill components`)")]
pub(crate) struct PolicyArgs {
    /// Consistency model, such as bsp, asp, ssp:s=3 or pssp:s=3,c=0.5 [default: bsp].
    #[arg(long, value_name = "S")]
    pub(crate) sync: Option<String>,
    /// Which server holds what [default: heuristic].
    #[arg(long, value_name = "P")]
    pub(crate) placement: Option<String>,
    /// How gradients change parameters, such as adam:lr=1e-3 [default: the workload's, or sgd:lr=0.1 without one].
    #[arg(long, value_name = "O")]
    pub(crate) optimizer: Option<String>,
    /// How gradients become fewer bytes on their way to the servers, such as topk:0.01+f16 [default: none].
    #[arg(long, value_name = "C")]
    pub(crate) codec: Option<String>,
    /// The same for parameters on their way to the workers, such as f16 or dvf:delta=1e-3 [default: none].
    #[arg(long, value_name = "C")]
    pub(crate) answer_codec: Option<String>,
    /// How the gradients of a round become one [default: mean].
    #[arg(long, value_parser = named::<Reduce>(&["mean", "sum"]))]
    pub(crate) reduce: Option<Reduce>,
    /// In which order they are added: as they arrive, or by rank, which is reproducible bit for bit [default:
    /// arrival].
    #[arg(long, value_parser = named::<Order>(&["arrival", "ranked"]))]
    pub(crate) order: Option<Order>,
    /// What happens to a gradient with NaN or Inf in it [default: reject].
    #[arg(long, value_parser = named::<NonFinite>(&["reject", "clip"]))]
    pub(crate) nonfinite: Option<NonFinite>,
}

impl PolicyArgs {
    /// The same options, to be given to another process.
    pub(crate) fn as_arguments(&self) -> Vec<String> {
        let lower = |choice: &dyn std::fmt::Debug| format!("{choice:?}").to_lowercase();
        [
            ("--sync", self.sync.clone()),
            ("--placement", self.placement.clone()),
            ("--optimizer", self.optimizer.clone()),
            ("--codec", self.codec.clone()),
            ("--answer-codec", self.answer_codec.clone()),
            ("--reduce", self.reduce.map(|choice| lower(&choice))),
            ("--order", self.order.map(|choice| lower(&choice))),
            ("--nonfinite", self.nonfinite.map(|choice| lower(&choice))),
        ]
        .into_iter()
        .filter_map(|(option, value)| Some(format!("{option}={}", value?)))
        .collect()
    }
}

/// Reads a choice by the name that config files use for it.
fn named<T>(names: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: for<'de> Deserialize<'de> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| {
        let deserializer: StringDeserializer<Error> = name.into_deserializer();
        T::deserialize(deserializer)
    })
}
