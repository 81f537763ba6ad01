//! `paramill sim train`: workloads that are really trained, in virtual time.

use super::{print, read_scenario, verdict};
use crate::args::LessonArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use anyhow::{Context, Result, bail};
use paramill_core::policy::Axis;
use paramill_core::table::TableSpec;
use paramill_core::types::WorkerId;
use paramill_sim::scenario::{Scenario, TableConfig};
use paramill_sim::training::{Judgement, Learner, Lesson, Point, Schedule, WorkloadChoice, train};
use paramill_train::{Loaded, Touched, Workload, WorkloadConfig};
use std::fmt;
use std::rc::Rc;

/// Points of a curve, if the time between them is not given.
const POINTS: u64 = 40;
/// Where steps take no time, there is so much between two points at least.
const SHORTEST_S: f64 = 1e-3;
/// Points of a curve at most.
const MOST_POINTS: usize = 400;

pub(crate) fn run(args: &LessonArgs, output: &Output) -> Result<(), Failure> {
    let path = args.scenario.display();
    let (mut scenario, text) = read_scenario(&args.scenario).or_usage()?;
    let choice = change(&mut scenario, args).with_context(|| format!("scenario {path}")).or_usage()?;
    let lesson = Rc::new(WorkloadLesson::load(&choice, &scenario).or_usage()?);
    let info = lesson.data.info();
    let epochs = choice.epochs.unwrap_or(info.epochs);
    scenario.iterations = epochs.saturating_mul(lesson.first.steps_per_epoch());
    let typed: toml::Table = text.parse().unwrap_or_default();
    if !typed.contains_key(Axis::Optimizer.info().name) && args.policy.0.get(Axis::Optimizer).is_none() {
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
    scenario.policy = scenario.policy.clone().under(args.policy.0.clone());
    if choice.epochs == Some(0) {
        bail!("workload.epochs = 0: expected at least 1");
    }
    if args.every.is_some_and(|every| every.0.is_zero()) {
        bail!("every = 0: expected a time between two looks at the parameters");
    }
    scenario.check()?;
    Ok(choice)
}

/// Some forty points of a job that never waits, and more of one that does.
fn every_s(args: &LessonArgs, scenario: &Scenario) -> f64 {
    let computed_s = scenario.iterations as f64 * scenario.compute.step_ms * 1e-3;
    let every = args.every.map(|every| every.0.as_secs_f64());
    every.unwrap_or((computed_s / POINTS as f64).max(SHORTEST_S))
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
struct WorkloadLesson {
    data: Loaded,
    /// That of rank 0, which speaks for all.
    first: Box<dyn Workload>,
}

impl WorkloadLesson {
    fn load(choice: &WorkloadChoice, scenario: &Scenario) -> Result<WorkloadLesson> {
        let mut config = WorkloadConfig::new(&choice.name)?;
        config.data = choice.data.clone();
        config.test = choice.test.clone();
        config.batch = choice.batch.unwrap_or(config.batch);
        config.examples = choice.examples;
        (config.seed, config.workers) = (scenario.seed, scenario.workers);
        let data = paramill_train::load(&config)?;
        Ok(WorkloadLesson { first: data.of(0), data })
    }
}

impl fmt::Debug for WorkloadLesson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.data.fmt(f)
    }
}

impl Lesson for WorkloadLesson {
    fn tables(&self) -> Vec<TableConfig> {
        let config = |(index, spec): (usize, TableSpec)| TableConfig {
            name: spec.name.to_string(),
            shape: spec.shape.clone(),
            rows: spec.rows,
            macs: self.first.multiplies(index),
        };
        self.first.tables().into_iter().enumerate().map(config).collect()
    }

    fn initial(&self, table: usize) -> Vec<f32> {
        self.first.initial(table)
    }

    fn learner(&self, worker: WorkerId) -> Box<dyn Learner> {
        Box::new(WorkloadLearner(self.data.of(worker.0)))
    }

    fn judge(&self, parameters: &[Vec<f32>]) -> Judgement {
        let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
        let found = self.first.evaluate(&parameters);
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
