//! `paramill sim train`: workloads that are really trained, in virtual time.

use super::{print, verdict};
use crate::args::LessonArgs;
use crate::failure::{Failure, OrUsage};
use crate::input::read_text;
use crate::output::{Align, Output, Table};
use anyhow::{Context, Result, bail};
use paramill_core::policy::{Axis, Policies};
use paramill_core::table::TableSpec;
use paramill_core::types::WorkerId;
use paramill_sim::scenario::{Scenario, TableConfig};
use paramill_sim::training::{Judgement, Learner, Lesson, Point, Schedule, WorkloadChoice, train};
use paramill_train::{Loaded, Touched, Workload, WorkloadConfig};
use std::rc::Rc;

/// Points of a curve, if the time between them is not given.
const POINTS: u64 = 40;
/// Points of a curve at most.
const MOST_POINTS: usize = 400;

pub(crate) fn run(args: &LessonArgs, output: &Output) -> Result<(), Failure> {
    let path = args.scenario.display();
    let text =
        read_text(&args.scenario).with_context(|| format!("cannot read the scenario {path}")).or_usage()?;
    let mut scenario = Scenario::parse(&text).with_context(|| format!("scenario {path}")).or_usage()?;
    let choice = change(&mut scenario, args).with_context(|| format!("scenario {path}")).or_usage()?;
    let lesson = Rc::new(WorkloadLesson::load(&choice, &scenario).or_usage()?);
    let info = lesson.data.info();
    let epochs = choice.epochs.unwrap_or(info.epochs);
    scenario.iterations = epochs.saturating_mul(lesson.data.of(0).steps_per_epoch());
    if scenario.policy.changed().get(Axis::Optimizer).is_none() {
        scenario.policy = scenario.policy.with(Axis::Optimizer, info.optimizer);
    }
    let schedule = Schedule { every_s: every_s(args, &scenario), most: MOST_POINTS };
    let mut progress = output.progress(scenario.iterations * u64::from(scenario.workers));
    let told = |point: &Point| {
        progress.set(point.iterations, &format!("iterations, {} {:.4}", info.metric, point.judgement.metric));
    };
    let course =
        train(&scenario, lesson, schedule, told).with_context(|| format!("scenario {path}")).or_usage()?;
    drop(progress);
    if output.json() {
        let mut object = serde_json::to_value(&course).map_err(anyhow::Error::from)?;
        object["workload"] = info.name.into();
        object["metric"] = info.metric.into();
        object["epochs"] = epochs.into();
        object["made_data"] = choice.data.is_none().into();
        output.object(&object)?;
    } else {
        print_course(&course.course, info.metric, output)?;
        print(&course.report, output)?;
    }
    verdict(&course.report)
}

/// Options win over the scenario. Returns its workload.
fn change(scenario: &mut Scenario, args: &LessonArgs) -> Result<WorkloadChoice> {
    let Some(mut choice) = scenario.workload.clone() else {
        bail!(
            "it has no [workload]; add one, such as\n[workload]\nname = \"cnn\"\nor run it with `paramill sim run`"
        );
    };
    choice.data = args.data.clone().or(choice.data);
    choice.test = args.test.clone().or(choice.test);
    choice.epochs = args.epochs.or(choice.epochs);
    choice.examples = args.examples.or(choice.examples);
    scenario.workers = args.workers.unwrap_or(scenario.workers);
    scenario.servers = args.servers.unwrap_or(scenario.servers);
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    let typed: Policies = args.policy.0.clone();
    scenario.policy = scenario.policy.clone().under(typed);
    if choice.epochs == Some(0) {
        bail!("workload.epochs = 0: expected at least 1");
    }
    Ok(choice)
}

/// Some forty points of a job that never waits, and more of one that does.
fn every_s(args: &LessonArgs, scenario: &Scenario) -> f64 {
    let computed_s = scenario.iterations as f64 * scenario.compute.step_ms * 1e-3;
    let every = args.every.map(|every| every.0.as_secs_f64());
    every.unwrap_or(computed_s / POINTS as f64).max(1e-6)
}

fn print_course(course: &[Point], metric: &str, output: &Output) -> Result<(), Failure> {
    let mut table = Table::new([
        ("seconds", Align::Right),
        ("iterations", Align::Right),
        ("loss of batches", Align::Right),
        ("held-out loss", Align::Right),
        (metric, Align::Right),
    ]);
    for point in course {
        table.row([
            format!("{:.2}", point.seconds),
            point.iterations.to_string(),
            point.batch_loss.map_or_else(|| "-".into(), |loss| format!("{loss:.4}")),
            format!("{:.4}", point.judgement.loss),
            format!("{:.4}", point.judgement.metric),
        ]);
    }
    Ok(output.table(&table)?)
}

/// A workload as the simulator trains it.
#[derive(Debug)]
struct WorkloadLesson {
    data: Loaded,
}

impl WorkloadLesson {
    fn load(choice: &WorkloadChoice, scenario: &Scenario) -> Result<WorkloadLesson> {
        let mut config = WorkloadConfig::new(&choice.name)?;
        config.data = choice.data.clone();
        config.test = choice.test.clone();
        config.batch = choice.batch.unwrap_or(config.batch);
        config.examples = choice.examples;
        (config.seed, config.workers) = (scenario.seed, scenario.workers);
        Ok(WorkloadLesson { data: paramill_train::load(&config)? })
    }
}

impl Lesson for WorkloadLesson {
    fn tables(&self) -> Vec<TableConfig> {
        let workload = self.data.of(0);
        let config = |(index, spec): (usize, TableSpec)| TableConfig {
            name: spec.name.to_string(),
            shape: spec.shape.clone(),
            rows: spec.rows,
            macs: workload.multiplies(index),
        };
        workload.tables().into_iter().enumerate().map(config).collect()
    }

    fn initial(&self, table: usize) -> Vec<f32> {
        self.data.of(0).initial(table)
    }

    fn learner(&self, worker: WorkerId) -> Box<dyn Learner> {
        Box::new(WorkloadLearner(self.data.of(worker.0)))
    }

    fn judge(&self, parameters: &[Vec<f32>]) -> Judgement {
        let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
        let found = self.data.of(0).evaluate(&parameters);
        Judgement { loss: found.loss, metric: found.value }
    }
}

/// One rank of a workload.
struct WorkloadLearner(Box<dyn Workload>);

impl Learner for WorkloadLearner {
    fn prepare(&mut self, step: u64) -> Vec<Option<Vec<u32>>> {
        let rows = |touched| match touched {
            Touched::All => None,
            Touched::Rows(rows) => Some(rows),
        };
        self.0.prepare(step).into_iter().map(rows).collect()
    }

    fn step(&mut self, parameters: &[&[f32]], gradients: &mut [Vec<f32>]) -> f32 {
        self.0.step(parameters, gradients)
    }
}
