//! What is said of a job that has ended.

use super::worker::{Step, Work, WorkerResult};
use crate::output::{Align, Output, Table, WAIT_CAUSES, bytes};
use crate::plan::JobPlan;
use crate::plot::{Body, Chart, Line};
use anyhow::{Context, Result};
use paramill_core::policy::{Axis, Policy};
use paramill_core::status::{ReadsReport, UpdatesReport};
use paramill_core::waits::Waited;
use serde::Serialize;

/// The result of a training job. With `--json` this is the object on stdout.
#[derive(Debug, Serialize)]
pub(crate) struct TrainReport {
    pub(crate) workload: String,
    pub(crate) workers: u32,
    pub(crate) servers: u32,
    pub(crate) processes: bool,
    #[serde(flatten)]
    pub(crate) policy: Policy,
    pub(crate) epochs: u64,
    pub(crate) seed: u64,
    /// Steps that worker processes made, all together; of one that died those that it told of.
    pub(crate) steps: u64,
    /// From the start of the job until the last worker had trained.
    pub(crate) seconds: f64,
    pub(crate) steps_per_s: f64,
    /// Mean training loss of the last epoch, over workers that made steps of it; `None` where none did that reported.
    pub(crate) loss: Option<f64>,
    pub(crate) test_loss: f64,
    pub(crate) metric: Metric,
    /// Further figures of the held-out data.
    pub(crate) extra: Vec<Metric>,
    pub(crate) bytes_pushed: u64,
    /// That workers received, in answers or as broadcasts.
    pub(crate) bytes_pulled: u64,
    /// Of these, the bytes that other workers passed on.
    pub(crate) bytes_relayed: u64,
    /// How all workers together got the parameters that they computed on.
    pub(crate) reads: ReadsReport,
    /// What became of their updates, where the policy `hold` is used.
    pub(crate) updates: Option<UpdatesReport>,
    pub(crate) pulls: u64,
    /// Delayed pull requests, of all tables on all servers.
    pub(crate) dprs: u64,
    pub(crate) max_staleness: u64,
    pub(crate) mean_staleness: f64,
    /// Answers by the number of rounds they lacked.
    pub(crate) staleness: Vec<u64>,
    /// Gradients that came too late and were dropped.
    pub(crate) dropped: u64,
    /// Gradients with NaN or Inf.
    pub(crate) nonfinite: u64,
    pub(crate) dead_workers: Vec<u32>,
    /// Worker processes that were started anew.
    pub(crate) restarts: u32,
    pub(crate) server_memory_bytes: Vec<u64>,
    /// How long all workers waited together until they had trained, and for whom.
    pub(crate) waited: Waited,
    /// Of the dense parameters as the workers have them at the end; `None` where they have different ones, as they may under models
    /// that let them.
    pub(crate) digest: Option<String>,
    #[serde(skip)]
    curve: Curve,
}

#[derive(Debug, Serialize)]
pub(crate) struct Metric {
    pub(crate) name: String,
    pub(crate) value: f64,
}

/// The digest that all workers have.
fn common_digest(results: &[WorkerResult]) -> Option<String> {
    let first = results.first()?;
    results.iter().all(|result| result.digest == first.digest).then(|| first.digest.clone())
}

impl TrainReport {
    /// Puts the workers' results together with what all processes have done.
    pub(crate) fn new(
        plan: &JobPlan,
        results: &[WorkerResult],
        work: Work,
        restarts: u32,
        curve: Curve,
    ) -> Result<TrainReport> {
        let end = results.iter().find_map(|result| result.end.clone()).context("worker 0 did not finish")?;
        let losses: Vec<f64> = results.iter().filter_map(|result| result.loss).collect();
        Ok(TrainReport {
            workload: plan.workload.name.clone(),
            workers: plan.cluster.workers,
            servers: plan.cluster.servers,
            processes: plan.cluster.processes,
            policy: plan.policy.clone(),
            epochs: plan.workload.epochs,
            seed: plan.seed,
            steps: work.steps,
            seconds: work.seconds,
            steps_per_s: work.steps as f64 / work.seconds.max(1e-9),
            loss: (!losses.is_empty()).then(|| losses.iter().sum::<f64>() / losses.len() as f64),
            test_loss: end.test_loss,
            metric: Metric { name: end.metric, value: end.value },
            extra: end.extra.into_iter().map(|(name, value)| Metric { name, value }).collect(),
            bytes_pushed: work.bytes_pushed,
            bytes_pulled: work.bytes_pulled,
            bytes_relayed: work.bytes_relayed,
            reads: work.reads,
            updates: work.updates,
            pulls: end.sync.pulls,
            dprs: end.sync.dprs,
            max_staleness: end.sync.max_staleness,
            mean_staleness: end.sync.mean_staleness(),
            staleness: end.sync.staleness,
            dropped: end.sync.dropped,
            nonfinite: end.nonfinite,
            dead_workers: end.dead_workers,
            restarts,
            server_memory_bytes: end.server_memory_bytes,
            waited: end.waited,
            digest: common_digest(results),
            curve,
        })
    }

    /// Writes it for a program or for a person.
    pub(crate) fn print(&self, output: &Output) -> Result<()> {
        if output.json() {
            return Ok(output.object(self)?);
        }
        let mut table = Table::new([("", Align::Left), ("", Align::Left)]);
        let mut row = |name: &str, value: String| table.row([name, &value]);
        let place = if self.processes { "processes" } else { "threads" };
        row(
            "job",
            format!("{}, {} workers and {} servers as {place}", self.workload, self.workers, self.servers),
        );
        row("policies", self.policies_text());
        row("loss", format!("{}, {:.4} held out", self.loss_text(), self.test_loss));
        row(&self.metric.name, format!("{:.4}", self.metric.value));
        for metric in &self.extra {
            row(&metric.name, format!("{:.4}", metric.value));
        }
        row("steps", format!("{} in {:.1} s, {:.1} steps/s", self.steps, self.seconds, self.steps_per_s));
        let relayed = match self.bytes_relayed {
            0 => String::new(),
            relayed => format!(", {} of these from other workers", bytes(relayed)),
        };
        row(
            "bytes",
            format!("{} pushed, {} pulled{relayed}", bytes(self.bytes_pushed), bytes(self.bytes_pulled)),
        );
        row("iterations", self.reads.to_string());
        if let Some(updates) = self.updates {
            row("updates", updates.to_string());
        }
        // Where everything is broadcast, nobody pulls.
        if self.pulls > 0 || !self.policy.is_broadcast() {
            row("staleness", self.staleness_text());
            row(
                "DPRs",
                format!("{} of {} pulls were delayed (delayed pull requests)", self.dprs, self.pulls),
            );
        }
        row("waiting", format!("{:.1} s of workers' time", self.waited.seconds));
        for (cause, text) in self.waited.texts(WAIT_CAUSES) {
            row(&format!("  for {cause}"), text);
        }
        if self.dropped > 0 {
            row("dropped", format!("{} gradients came too late", self.dropped));
        }
        if self.nonfinite > 0 {
            row("NaN or Inf", format!("in {} gradients", self.nonfinite));
        }
        if !self.dead_workers.is_empty() {
            row("dead", format!("workers {:?} were declared dead", self.dead_workers));
        }
        if self.restarts > 0 {
            let words = "steps and bytes of those that died count up to their last words";
            row("restarts", format!("{} of worker processes; {words}", self.restarts));
        }
        Ok(output.table(&table)?)
    }

    /// The loss over time.
    pub(crate) fn chart(&self) -> Chart {
        Chart {
            title: format!("{}: {} workers, {}", self.workload, self.workers, self.policy.get(Axis::Sync)),
            x_label: "seconds".into(),
            y_label: "training loss".into(),
            // More lines than colours tell nothing.
            body: Body::Lines(self.curve.lines.iter().take(7).cloned().collect()),
        }
    }

    fn loss_text(&self) -> String {
        match self.loss {
            Some(loss) => format!("{loss:.4} training"),
            None => "no worker that reported made a step of the last epoch".into(),
        }
    }

    /// `bsp, sgd:lr=0.1, heuristic; codec=topk:0.01`.
    fn policies_text(&self) -> String {
        const NAMED: [Axis; 3] = [Axis::Sync, Axis::Optimizer, Axis::Placement];
        let changed = self.policy.changed();
        let others = changed.iter().filter(|(axis, _)| !NAMED.contains(axis));
        let others = others.map(|(axis, text)| format!("; {axis}={text}")).collect::<String>();
        NAMED.map(|axis| self.policy.get(axis)).join(", ") + &others
    }

    /// `0: 92%, 1: 6%, 3: 2% (mean 0.12, max 3)`.
    fn staleness_text(&self) -> String {
        let total: u64 = self.staleness.iter().sum();
        let share = |count: u64| 100.0 * count as f64 / total.max(1) as f64;
        let shown: Vec<String> = self
            .staleness
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(rounds, &count)| format!("{rounds}: {:.1}%", share(count)))
            .collect();
        format!("{} (mean {:.2}, max {})", shown.join(", "), self.mean_staleness, self.max_staleness)
    }
}

/// The losses that workers told of, over time.
#[derive(Debug)]
pub(crate) struct Curve {
    lines: Vec<Line>,
    clocks: Vec<u64>,
}

impl Curve {
    pub(crate) fn new(workers: u32) -> Curve {
        let line = |rank| Line { name: format!("worker {rank}"), points: Vec::new() };
        Curve { lines: (0..workers).map(line).collect(), clocks: vec![0; workers as usize] }
    }

    /// Notes where a worker is whose process began so many seconds after the job; returns the steps that all are through with.
    pub(crate) fn add(&mut self, step: &Step, began: f64) -> u64 {
        let rank = step.rank as usize;
        if let (Some(line), Some(clock)) = (self.lines.get_mut(rank), self.clocks.get_mut(rank)) {
            line.points.push((began + step.work.seconds, step.loss));
            *clock = step.clock;
        }
        self.clocks.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::JobArgs;
    use crate::training::worker::JobEnd;
    use paramill_core::consistency::SyncStats;
    use paramill_core::registry::Registry;

    /// A single worker that was started anew when all steps were made has no loss to tell of, and the report no NaN.
    #[test]
    fn a_job_without_a_reported_loss_says_so() {
        let job = JobArgs { workload: Some("mlp".into()), ..JobArgs::default() };
        let registry = Registry::builtin();
        let plan = JobPlan::resolve(&job, &registry, &Output::new(false, true)).expect("a plan");
        let end = JobEnd {
            test_loss: 0.5,
            metric: "accuracy".into(),
            value: 0.9,
            extra: Vec::new(),
            sync: SyncStats::default(),
            nonfinite: 0,
            dead_workers: Vec::new(),
            server_memory_bytes: Vec::new(),
            waited: Waited::default(),
        };
        let result = WorkerResult {
            rank: 0,
            work: Work::default(),
            elapsed: 0.1,
            loss: None,
            digest: String::new(),
            end: Some(end),
        };
        let work = Work { steps: 7, seconds: 2.0, ..Work::default() };
        let report = TrainReport::new(&plan, &[result], work, 1, Curve::new(1)).expect("worker 0 reported");
        assert_eq!((report.steps, report.seconds, report.steps_per_s, report.restarts), (7, 2.0, 3.5, 1));
        assert_eq!(report.loss_text(), "no worker that reported made a step of the last epoch");
        assert!(serde_json::to_value(&report).expect("it is plain data")["loss"].is_null());
    }
}
