//! What one worker of a training job does.

mod local;

use crate::plan::JobPlan;
use anyhow::{Context, Result};
use local::LocalTraining;
use paramill_core::codec::Factors;
use paramill_core::consistency::SyncStats;
use paramill_core::fault::FaultPlan;
use paramill_core::status::{MemberState, ReadsReport, Status, UpdatesReport};
use paramill_core::types::WorkerId;
use paramill_core::waits::Waited;
use paramill_node::client::{ClientError, Gradient, Handle, Job, Table};
use paramill_sim::report::parameter_hash;
use paramill_train::{LayerFlow, ProductGradient, Touched, Workload};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How often a worker says how far it is.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);
/// Points of the loss curve that a short job has at least.
const CURVE_POINTS: u64 = 100;
/// The end of a job waits for the slowest worker, however long its last steps take.
const END_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// What a worker's process has done so far.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Work {
    /// Steps that it made itself: one that was started anew goes on where the job is.
    pub(crate) steps: u64,
    /// Since the job started for it.
    pub(crate) seconds: f64,
    pub(crate) bytes_pushed: u64,
    pub(crate) bytes_pulled: u64,
    pub(crate) bytes_relayed: u64,
    /// How it got the parameters that it computed on.
    pub(crate) reads: ReadsReport,
    /// What became of its updates, where the policy `hold` is used.
    pub(crate) updates: Option<UpdatesReport>,
}

impl Work {
    /// What two have done side by side.
    pub(crate) fn beside(self, other: Work) -> Work {
        Work {
            steps: self.steps + other.steps,
            seconds: self.seconds.max(other.seconds),
            bytes_pushed: self.bytes_pushed + other.bytes_pushed,
            bytes_pulled: self.bytes_pulled + other.bytes_pulled,
            bytes_relayed: self.bytes_relayed + other.bytes_relayed,
            reads: self.reads.beside(other.reads),
            updates: UpdatesReport::sum([self.updates, other.updates].into_iter()),
        }
    }
}

/// How far a worker is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) rank: u32,
    /// Steps of the job that are behind it, whoever made them.
    pub(crate) clock: u64,
    /// Steps of the job in all.
    pub(crate) total: u64,
    /// Mean loss of its latest steps.
    pub(crate) loss: f64,
    pub(crate) work: Work,
}

/// What a worker did.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WorkerResult {
    pub(crate) rank: u32,
    pub(crate) work: Work,
    /// Seconds since the job started for it, the wait for the others and the evaluation included.
    pub(crate) elapsed: f64,
    /// Mean loss of its last epoch; `None` when it made no step of that.
    pub(crate) loss: Option<f64>,
    /// Of its copy of the dense parameters, when it was done.
    pub(crate) digest: String,
    /// What rank 0 finds out at the end.
    pub(crate) end: Option<JobEnd>,
}

/// The job as rank 0 sees it when all are done.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct JobEnd {
    pub(crate) test_loss: f64,
    pub(crate) metric: String,
    pub(crate) value: f64,
    pub(crate) extra: Vec<(String, f64)>,
    pub(crate) sync: SyncStats,
    pub(crate) nonfinite: u64,
    pub(crate) dead_workers: Vec<u32>,
    /// Bytes held by each server for parameters, accumulators and optimizer state.
    pub(crate) server_memory_bytes: Vec<u64>,
    /// How long workers waited, and for whom.
    pub(crate) waited: Waited,
}

/// Trains as worker `rank` of a job that was joined; `tell` hears how far it is now and then. The result is there before the worker
/// leaves, which the caller sees to: a process that dies on its way out has said what it did.
pub(crate) fn run(
    plan: &JobPlan,
    faults: &FaultPlan,
    rank: WorkerId,
    job: &Job,
    mut workload: Box<dyn Workload>,
    tell: impl Fn(Step),
) -> Result<WorkerResult> {
    let mut tables = create_tables(job, workload.as_ref())?;
    let mut local = match plan.policy.is_local() {
        true => Some(LocalTraining::new(job, workload.as_ref(), &tables)?),
        false => None,
    };
    job.start().context("the job did not start")?;
    let total = workload.steps_per_epoch() * plan.workload.epochs;
    let last_epoch = total - workload.steps_per_epoch();
    let stride = (total / CURVE_POINTS).max(1);
    let began = Instant::now();
    let (mut told, mut recent, mut final_losses) = (Instant::now(), Mean::default(), Mean::default());
    // A worker that joined goes on from where the job is.
    let mut step = match &mut local {
        Some(local) => local.begin(job, &mut tables)?,
        None => job.iteration(),
    };
    let work = |steps: u64| {
        let report = job.report();
        Work {
            steps,
            seconds: began.elapsed().as_secs_f64(),
            bytes_pushed: report.bytes_pushed,
            bytes_pulled: report.bytes_pulled,
            bytes_relayed: report.bytes_relayed,
            reads: report.reads,
            updates: report.updates,
        }
    };
    let (mut steps, mut gradients) = (0, vec![Vec::new(); tables.len()]);
    loop {
        // One that rounds closed without leaves steps out.
        if local.is_none() {
            step = job.iteration();
        }
        if step >= total {
            break;
        }
        let touched = workload.prepare(step);
        let flow = Flow {
            tables: &mut tables,
            touched: &touched,
            is_slowed: is_slowed(faults, rank, step),
            leaves_out: job.leaves_out(),
            is_local: local.is_some(),
            is_over: &|| job.iteration() >= total,
            waited: Duration::ZERO,
            end: None,
        };
        let Some(loss) = flow.step(workload.as_mut(), &mut gradients, faults, rank, step)? else { break };
        recent.add(loss);
        if step >= last_epoch {
            final_losses.add(loss);
        }
        match &mut local {
            Some(local) => local.step(job, &mut tables, &gradients, step)?,
            None => job.clock(),
        }
        steps += 1;
        if told.elapsed() >= PROGRESS_EVERY || (step + 1) % stride == 0 || step + 1 == total {
            let clock = step + 1;
            tell(Step { rank: rank.0, clock, total, loss: recent.take(), work: work(steps) });
            told = Instant::now();
        }
        step += 1;
    }
    if let Some(local) = &mut local {
        local.finish(job, &mut tables, total)?;
    }
    for table in &mut tables {
        table.settle()?;
    }
    // What is held back belongs to the result.
    job.flush()?;
    let digest = digest(&tables)?;
    let seconds = began.elapsed().as_secs_f64();
    job.barrier_within("trained", END_TIMEOUT)?;
    let end = match rank {
        WorkerId(0) => Some(judge(job, &tables, workload.as_ref())?),
        _ => None,
    };
    let loss = final_losses.is_some().then(|| final_losses.take());
    let all = work(steps);
    let work = Work { seconds, ..all };
    Ok(WorkerResult { rank: rank.0, work, elapsed: all.seconds, loss, digest, end })
}

/// A table as the training loop uses it.
struct Trained {
    table: Table,
    values: Vec<f32>,
    /// The latest push of a sparse table, not yet known to have arrived.
    pushed: Option<Handle>,
}

fn create_tables(job: &Job, workload: &dyn Workload) -> Result<Vec<Trained>> {
    let create = |(index, spec)| {
        let table = job.table(spec, workload.initial(index))?;
        Ok(Trained { table, values: Vec::new(), pushed: None })
    };
    workload.tables().into_iter().enumerate().map(create).collect()
}

impl Trained {
    /// Gets the parameters that the next step needs.
    fn fetch(&mut self, touched: &Touched) -> Result<()> {
        match touched {
            Touched::Rows(rows) => self.values = self.table.rows(rows)?.wait()?,
            Touched::All => {
                self.table.sync()?;
                self.table.read(|values| {
                    self.values.clear();
                    self.values.extend_from_slice(values);
                })?;
            }
        }
        Ok(())
    }

    /// Sends a gradient that was computed. One that is a product travels as such where the codec is `factors`.
    fn send(
        &mut self,
        touched: &Touched,
        gradient: &[f32],
        product: Option<ProductGradient<'_>>,
    ) -> Result<()> {
        match (touched, product) {
            (Touched::Rows(rows), _) => {
                self.settle()?;
                self.pushed = Some(self.table.push(Gradient::Rows { rows, values: gradient })?);
            }
            (Touched::All, Some(ProductGradient { rank, u, v })) => {
                let factors = Factors { rank: rank as u32, u: &u, v };
                self.table.update(Gradient::Product { values: gradient, factors })?;
            }
            (Touched::All, None) => self.table.update(gradient)?,
        }
        Ok(())
    }

    /// Waits for what is under way, so that a push that failed is not taken for one that succeeded.
    fn settle(&mut self) -> Result<()> {
        if let Some(handle) = self.pushed.take() {
            handle.wait()?;
        }
        Ok(self.table.sync()?)
    }
}

/// Whether a fault makes this worker's step last longer.
fn is_slowed(faults: &FaultPlan, rank: WorkerId, step: u64) -> bool {
    faults.step_time(rank, step).is_some() || faults.compute_factor(rank).total_cmp(&1.0).is_ne()
}

/// One step's way to the servers and back, layer by layer.
struct Flow<'a> {
    tables: &'a mut [Trained],
    touched: &'a [Touched],
    /// A fault makes the step longer, and its gradients must not leave before its end.
    is_slowed: bool,
    /// Rounds may close meanwhile: all parameters are fetched first, and all gradients are of one round.
    leaves_out: bool,
    /// The worker steps its own parameters: nothing is fetched and nothing leaves.
    is_local: bool,
    /// Whether the rounds of the job's last steps have closed without this worker.
    is_over: &'a dyn Fn() -> bool,
    /// Waiting for parameters, which is no computation.
    waited: Duration,
    /// Why the step was given up: an error, or `Ok` where the job is over.
    end: Option<Result<()>>,
}

impl Flow<'_> {
    /// One step of the model, made longer where a fault says so. Returns its loss; `None` when the job is over.
    fn step(
        mut self,
        workload: &mut dyn Workload,
        gradients: &mut [Vec<f32>],
        faults: &FaultPlan,
        rank: WorkerId,
        step: u64,
    ) -> Result<Option<f64>> {
        let began = Instant::now();
        let loss = workload.step_by_layers(gradients, &mut self);
        if let Some(end) = self.end {
            return end.map(|()| None);
        }
        let loss = loss.context("the step was given up without a reason")?;
        if faults.stall_at(rank).is_some_and(|at| paramill_node::process_time() >= at) {
            // The library's own thread goes on saying that this worker lives; whoever started the process ends it.
            loop {
                std::thread::park();
            }
        }
        if self.is_slowed {
            let took = began.elapsed().saturating_sub(self.waited);
            let meant =
                faults.step_time(rank, step).unwrap_or(took).mul_f64(faults.compute_factor(rank).max(0.0));
            std::thread::sleep(meant.saturating_sub(took));
        }
        if self.holds_back() {
            let tables = self.tables.iter_mut().zip(self.touched).filter(|_| !self.is_local);
            for (number, (table, touched)) in tables.enumerate() {
                table.send(touched, &gradients[number], workload.product(number))?;
            }
        }
        Ok(Some(f64::from(loss)))
    }

    /// Whether gradients leave at the end of the step.
    fn holds_back(&self) -> bool {
        self.is_slowed || self.leaves_out
    }

    /// Whether something succeeded; the first failure is told when the step has ended.
    fn note(&mut self, result: Result<()>) -> bool {
        self.end = self.end.take().or(result.err().map(Err));
        self.end.is_none()
    }
}

impl LayerFlow for Flow<'_> {
    fn fetch(&mut self, mut tables: Range<usize>) -> bool {
        if self.is_local {
            return true;
        }
        if self.leaves_out {
            // All of them with the first.
            tables = if tables.start == 0 { 0..self.tables.len() } else { 0..0 };
        }
        let began = Instant::now();
        let fetched = tables.try_for_each(|table| self.tables[table].fetch(&self.touched[table]));
        self.waited += began.elapsed();
        if fetched.is_ok() && (self.is_over)() {
            self.end.get_or_insert(Ok(()));
        }
        self.note(fetched)
    }

    fn values(&self, table: usize) -> &[f32] {
        &self.tables[table].values
    }

    fn ready(&mut self, table: usize, gradient: &[f32], product: Option<ProductGradient<'_>>) -> bool {
        if self.is_local || self.holds_back() {
            return true;
        }
        let sent = self.tables[table].send(&self.touched[table], gradient, product);
        self.note(sent)
    }
}

/// Of all dense tables together, as this worker has them.
fn digest(tables: &[Trained]) -> Result<String> {
    let mut parameters = Vec::new();
    for Trained { table, .. } in tables.iter().filter(|trained| !trained.table.spec().rows) {
        table.read(|values| parameters.extend_from_slice(values))?;
    }
    Ok(parameter_hash(&parameters))
}

/// Evaluates the final parameters and gathers what the servers counted.
fn judge(job: &Job, tables: &[Trained], workload: &dyn Workload) -> Result<JobEnd> {
    let finals = tables.iter().map(|trained| trained.table.pull_now()?.wait());
    let finals = finals.collect::<Result<Vec<Vec<f32>>, ClientError>>()?;
    let finals: Vec<&[f32]> = finals.iter().map(Vec::as_slice).collect();
    let status = job.status()?;
    let evaluation = workload.evaluate(&finals);
    let dead = status.workers.iter().filter(|worker| worker.state == MemberState::Dead);
    Ok(JobEnd {
        test_loss: evaluation.loss,
        metric: evaluation.metric.to_owned(),
        value: evaluation.value,
        extra: evaluation.extra,
        sync: sync_stats(&status),
        nonfinite: status.shards.iter().map(|shard| shard.nonfinite).sum(),
        dead_workers: dead.map(|worker| worker.worker.0).collect(),
        server_memory_bytes: server_memory(&status),
        waited: status.waited,
    })
}

fn sync_stats(status: &Status) -> SyncStats {
    let mut total = SyncStats::default();
    for table in status.shards.iter().flat_map(|shard| &shard.tables) {
        total.merge(&table.stats);
    }
    total
}

fn server_memory(status: &Status) -> Vec<u64> {
    let mut memory: Vec<u64> = Vec::new();
    for shard in &status.shards {
        let server = shard.shard.server.0 as usize;
        memory.resize(memory.len().max(server + 1), 0);
        memory[server] += shard.memory_bytes;
    }
    memory
}

#[derive(Default)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    fn is_some(&self) -> bool {
        self.count > 0
    }

    fn take(&mut self) -> f64 {
        let mean = self.sum / self.count.max(1) as f64;
        *self = Mean::default();
        mean
    }
}
