//! The contract of workloads, and the list of those that exist.

mod cnn;
mod images;
mod lr;
mod mf;
mod mlp;

use crate::data::DataError;
use crate::network::ProductGradient;
use paramill_core::table::TableSpec;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;

/// A model with its data: what one worker computes.
///
/// Everything follows from the configuration with its seed and rank: two workloads built alike choose the same
/// batches and compute the same gradients. All ranks of a job declare the same tables with the same initial values
/// and have the same number of steps in an epoch.
pub trait Workload: Send {
    /// The name it is chosen by.
    fn name(&self) -> &'static str;

    /// The tables, in the order of every `parameters` and `gradients` below.
    fn tables(&self) -> Vec<TableSpec>;

    /// The initial values of a whole table.
    fn initial(&self, table: usize) -> Vec<f32>;

    /// Multiply-accumulates with a table's values in the forward pass of an example: its layer's share of a step. 0 where nobody knows.
    fn multiplies(&self, _table: usize) -> u64 {
        0
    }

    /// Steps in which this worker sees its share of the data about once; at least 1.
    fn steps_per_epoch(&self) -> u64;

    /// Chooses the batch of `step` (counted from 0 over all epochs) and says, for every table, what it touches.
    /// Steps may be prepared in any order.
    fn prepare(&mut self, step: u64) -> Vec<Touched>;

    /// Mean loss of the prepared batch, and its gradient.
    ///
    /// `parameters[t]` is the whole table where [`Touched::All`] was said, else the touched rows one after the other.
    /// `gradients[t]` is resized and overwritten in the same layout.
    ///
    /// # Panics
    /// When no batch is prepared or a slice has another length than was said: both are faults of the caller.
    fn step(&mut self, parameters: &[&[f32]], gradients: &mut [Vec<f32>]) -> f32;

    /// The same layer by layer: a layer's parameters are asked for when its forward needs them, and its gradient is handed over as
    /// soon as its backward is done. Loss and gradients are those of [`Workload::step`], bit for bit. `None` when the flow gave up.
    ///
    /// A workload without layers has all of its parameters before it begins.
    fn step_by_layers(&mut self, gradients: &mut [Vec<f32>], flow: &mut dyn LayerFlow) -> Option<f32> {
        let tables = 0..gradients.len();
        if !flow.fetch(tables.clone()) {
            return None;
        }
        let parameters: Vec<&[f32]> = tables.clone().map(|table| flow.values(table)).collect();
        let loss = self.step(&parameters, gradients);
        tables.rev().all(|table| flow.ready(table, &gradients[table], self.product(table))).then_some(loss)
    }

    /// The gradient of a table that the last step computed, as a product of two thin matrices; `None` when it is none.
    fn product(&self, _table: usize) -> Option<ProductGradient<'_>> {
        None
    }

    /// Judges whole tables on the held-out data.
    ///
    /// # Panics
    /// When a slice has another length than its table.
    fn evaluate(&self, parameters: &[&[f32]]) -> Evaluation;
}

/// The source of a step's parameters, and the destination of its gradients, layer by layer. Three methods are required.
pub trait LayerFlow {
    /// Waits for the parameters of these tables, in the layout of [`Workload::step`]. False ends the step.
    fn fetch(&mut self, tables: Range<usize>) -> bool;

    /// The parameters of a table that was fetched.
    fn values(&self, table: usize) -> &[f32];

    /// The gradient of a table is complete. False ends the step.
    fn ready(&mut self, table: usize, gradient: &[f32], product: Option<ProductGradient<'_>>) -> bool;
}

/// What a batch needs of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Touched {
    /// The whole table.
    All,
    /// These rows only, ascending and without duplicates.
    Rows(Vec<u32>),
}

/// How good parameters are on the held-out data.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean loss.
    pub loss: f64,
    /// What `value` is: `auc`, `rmse` or `accuracy`.
    pub metric: &'static str,
    /// The metric.
    pub value: f64,
    /// Further figures with their names.
    pub extra: Vec<(String, f64)>,
}

/// Which workload, on which data, as which worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadConfig {
    /// One of [`known`].
    pub name: String,
    /// The data: a libsvm file (lr), a ratings file (mf), or a folder of idx files (mlp, cnn). Made up from the seed
    /// when absent.
    #[serde(default)]
    pub data: Option<PathBuf>,
    /// Held-out data of the same kind. When absent a fifth of `data` is held out by the seed; images are looked for
    /// in the folder `data` itself.
    #[serde(default)]
    pub test: Option<PathBuf>,
    /// Examples in a worker's batch.
    pub batch: usize,
    /// Everything random follows from it.
    pub seed: u64,
    /// This worker, from 0.
    pub rank: u32,
    /// Workers in the job.
    pub workers: u32,
    /// Trains on at most this many examples; without `data`, makes this many and a quarter more to hold out.
    #[serde(default)]
    pub examples: Option<usize>,
    /// Width of the hidden layer (mlp, cnn).
    pub hidden: usize,
    /// Length of a user's or an item's vector (mf).
    pub factors: usize,
    /// Strength of the L2 penalty (lr, mf); the workload's own when absent.
    #[serde(default)]
    pub l2: Option<f32>,
}

impl WorkloadConfig {
    /// The defaults of the workload `name`: data made up from seed 1, one worker.
    pub fn new(name: &str) -> Result<WorkloadConfig, DataError> {
        let info = find(name)?;
        Ok(WorkloadConfig {
            name: info.name.to_owned(),
            data: None,
            test: None,
            batch: info.batch,
            seed: 1,
            rank: 0,
            workers: 1,
            examples: None,
            hidden: 128,
            factors: 16,
            l2: None,
        })
    }

    /// Whether every number is in range; the error says what was expected. Building checks it too.
    pub fn check(&self) -> Result<(), DataError> {
        let require = |holds: bool, why: String| if holds { Ok(()) } else { Err(DataError::Config { why }) };
        let (rank, workers) = (self.rank, self.workers);
        require(self.batch > 0, "batch = 0: expected at least 1 example".into())?;
        require(
            rank < workers,
            format!("rank = {rank} of {workers} workers: expected a rank below that number"),
        )?;
        let examples = self.examples.unwrap_or(1);
        require(examples > 0, "examples = 0: expected at least 1".into())?;
        let made = self.data.is_none();
        require(
            !made || examples <= MAX_MADE,
            format!("examples = {examples}: at most {MAX_MADE} are made; name a data file for more"),
        )?;
        let hidden = self.hidden;
        require((1..=MAX_WIDTH).contains(&hidden), format!("hidden = {hidden}: expected 1 to {MAX_WIDTH}"))?;
        let factors = self.factors;
        require(
            (1..=MAX_WIDTH).contains(&factors),
            format!("factors = {factors}: expected 1 to {MAX_WIDTH}"),
        )?;
        let l2 = self.l2.unwrap_or(0.0);
        require(l2 >= 0.0 && l2.is_finite(), format!("l2 = {l2}: expected a number of at least 0"))?;
        require(!made || self.test.is_none(), "test data without training data: name both".into())
    }
}

/// Bound on the configured widths: a row must fit a chunk of a table.
const MAX_WIDTH: usize = 4096;
/// Bound on the examples that are made up: they are all held in memory.
const MAX_MADE: usize = 1_000_000;

/// A workload that can be chosen by name, with the defaults that suit it.
#[derive(Debug, Clone, Copy)]
pub struct WorkloadInfo {
    /// Its name.
    pub name: &'static str,
    /// What it is, in a sentence.
    pub summary: &'static str,
    /// What [`WorkloadConfig::data`] must be, in a few words.
    pub data: &'static str,
    /// Optimizer, in text form.
    pub optimizer: &'static str,
    /// Epochs.
    pub epochs: u64,
    /// Examples in a worker's batch.
    pub batch: usize,
    /// The metric of its evaluation.
    pub metric: &'static str,
    /// Loads the data once, for any number of workers.
    load: fn(&WorkloadConfig) -> Result<Factory, DataError>,
}

/// Makes the workload of a rank from data that all ranks in this process share.
type Factory = Box<dyn Fn(u32) -> Box<dyn Workload>>;

/// Every workload. A new one is a file and a line here.
pub fn known() -> [&'static WorkloadInfo; 4] {
    [&lr::INFO, &mf::INFO, &mlp::INFO, &cnn::INFO]
}

/// The workload of this name; the error lists those that exist.
pub fn find(name: &str) -> Result<&'static WorkloadInfo, DataError> {
    known().into_iter().find(|info| info.name == name).ok_or_else(|| DataError::UnknownWorkload {
        name: name.to_owned(),
        known: known().iter().map(|info| info.name).collect::<Vec<_>>().join(", "),
    })
}

/// The workload of the configured rank.
pub fn build(config: &WorkloadConfig) -> Result<Box<dyn Workload>, DataError> {
    Ok(load(config)?.of(config.rank))
}

/// The workloads of all ranks, in order, for workers that share a process: the data is held once.
pub fn build_all(config: &WorkloadConfig) -> Result<Vec<Box<dyn Workload>>, DataError> {
    let loaded = load(config)?;
    Ok((0..config.workers).map(|rank| loaded.of(rank)).collect())
}

/// The data of a workload, for any number of its ranks.
pub fn load(config: &WorkloadConfig) -> Result<Loaded, DataError> {
    let info = find(&config.name)?;
    config.check()?;
    Ok(Loaded { info, factory: (info.load)(config)? })
}

/// A workload's data in memory.
pub struct Loaded {
    info: &'static WorkloadInfo,
    factory: Factory,
}

impl Loaded {
    /// The workload of a rank below the configured number of workers.
    pub fn of(&self, rank: u32) -> Box<dyn Workload> {
        (self.factory)(rank)
    }

    /// Its defaults, and what its metric is.
    pub fn info(&self) -> &'static WorkloadInfo {
        self.info
    }
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded").field("workload", &self.info.name).finish_non_exhaustive()
    }
}
