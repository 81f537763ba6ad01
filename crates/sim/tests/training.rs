//! Workers that really train, in virtual time.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use paramill_core::policy::Axis;
use paramill_core::types::WorkerId;
use paramill_sim::compute::SendMode;
use paramill_sim::report::run_scenario;
use paramill_sim::scenario::{Scenario, TableConfig};
use paramill_sim::training::{Course, Judgement, Learner, Lesson, Schedule, WorkloadChoice, train};
use std::rc::Rc;

/// Elements of the dense table, and rows of the other one.
const WIDTH: usize = 40;
const ROWS: u32 = 12;

/// A line through points: the prediction is `w[i] x + row[j]`, and the truth `3x - 2` for every `i` and `j`.
#[derive(Debug)]
struct Line;

struct Student {
    worker: u32,
    step: u64,
    row: u32,
}

impl Student {
    fn x(&self, element: usize) -> f32 {
        (((self.worker * 31 + element as u32 * 7) as u64 + self.step * 13) % 17) as f32 / 8.0 - 1.0
    }
}

impl Learner for Student {
    fn prepare(&mut self, step: u64) -> Vec<Option<Vec<u32>>> {
        (self.step, self.row) = (step, (step as u32 * 5 + self.worker) % ROWS);
        vec![None, Some(vec![self.row])]
    }

    fn step(&mut self, parameters: &[&[f32]], gradients: &mut [Vec<f32>]) -> f32 {
        let (w, b) = (parameters[0], parameters[1][0]);
        assert_eq!((w.len(), parameters[1].len()), (WIDTH, 1));
        let errors: Vec<f32> = (0..WIDTH).map(|i| w[i] * self.x(i) + b - (3.0 * self.x(i) - 2.0)).collect();
        gradients[0] = errors.iter().enumerate().map(|(i, error)| error * self.x(i)).collect();
        gradients[1] = vec![errors.iter().sum::<f32>() / WIDTH as f32];
        errors.iter().map(|error| error * error).sum::<f32>() / WIDTH as f32
    }
}

impl Lesson for Line {
    fn tables(&self) -> Vec<TableConfig> {
        let table = |name: &str, shape, rows| TableConfig { name: name.into(), shape, rows, macs: 0 };
        vec![table("w", vec![WIDTH as u64], false), table("b", vec![ROWS.into(), 1], true)]
    }

    fn initial(&self, table: usize) -> Vec<f32> {
        vec![0.25; if table == 0 { WIDTH } else { ROWS as usize }]
    }

    fn learner(&self, worker: WorkerId) -> Box<dyn Learner> {
        Box::new(Student { worker: worker.0, step: 0, row: 0 })
    }

    fn judge(&self, parameters: &[Vec<f32>]) -> Judgement {
        let error = |truth: f32| move |value: &f32| f64::from(value - truth).powi(2);
        let slope = parameters[0].iter().map(error(3.0)).sum::<f64>() / WIDTH as f64;
        let offset = parameters[1].iter().map(error(-2.0)).sum::<f64>() / f64::from(ROWS);
        Judgement { loss: slope + offset, metric: -slope }
    }
}

fn scenario(workers: u32, sync: &str) -> Scenario {
    let scenario = Scenario { iterations: 300, cores: 2, seed: 5, ..Scenario::new(workers, 2, 1) };
    scenario.with(Axis::Sync, sync).with(Axis::Optimizer, "sgd:lr=0.3").with(Axis::Chunk, "32B")
}

fn run(scenario: &Scenario) -> Course {
    train(scenario, Rc::new(Line), Schedule { every_s: 0.2, most: 100 }, |_| ()).unwrap()
}

/// What synchronous SGD comes to, in a loop.
fn by_hand(workers: u32, steps: u64) -> Vec<Vec<f32>> {
    let mut parameters = vec![Line.initial(0), Line.initial(1)];
    for step in 0..steps {
        let before = parameters.clone();
        for worker in 0..workers {
            let mut student = Student { worker, step: 0, row: 0 };
            student.prepare(step);
            let mut gradients = vec![Vec::new(), Vec::new()];
            let row = student.row as usize;
            student.step(&[&before[0], &before[1][row..=row]], &mut gradients);
            let rate = 0.3 / workers as f32;
            parameters[0].iter_mut().zip(&gradients[0]).for_each(|(value, slope)| *value -= rate * slope);
            parameters[1][row] -= rate * gradients[1][0];
        }
    }
    parameters
}

#[test]
fn synchronous_training_is_what_a_loop_makes_of_the_same_gradients() {
    let expected = Line.judge(&by_hand(3, 300));
    let end = *run(&scenario(3, "bsp")).course.last().unwrap();
    let difference = (end.judgement.loss - expected.loss).abs();
    assert!(difference < 1e-4 * expected.loss.max(1e-3), "{} by hand {}", end.judgement.loss, expected.loss);
    assert_eq!(end.iterations, 900);
}

#[test]
fn a_course_is_a_function_of_the_seed_and_ends_where_the_loss_is_small() {
    for sync in ["bsp", "asp", "ssp:s=3", "psp:c=2,b=0.5", "drop:n=2"] {
        let scenario = scenario(3, sync);
        let course = run(&scenario);
        assert_eq!(course, run(&scenario), "{sync}");
        assert!(course.report.finished, "{sync}: {:?}", course.report.log);
        let (first, last) = (course.course[0], *course.course.last().unwrap());
        assert!(last.judgement.loss < 0.2 * first.judgement.loss, "{sync}: {first:?} to {last:?}");
        assert!(last.batch_loss.unwrap() < first.batch_loss.unwrap(), "{sync}: {first:?} to {last:?}");
        assert!(course.course.windows(2).all(|pair| pair[0].seconds < pair[1].seconds), "{sync}");
    }
}

#[test]
fn layers_change_when_gradients_leave_and_not_what_they_are() {
    let dense = |send| {
        let mut scenario = scenario(3, "bsp");
        scenario.compute.send = send;
        scenario.network.gbit_per_s = 0.001;
        run(&scenario)
    };
    let (end, layers) = (dense(SendMode::End), dense(SendMode::Layerwise));
    assert_eq!(end.report.tables, layers.report.tables);
    assert!(layers.report.seconds < end.report.seconds);
}

#[test]
fn a_worker_that_is_started_anew_goes_on_learning() {
    let faults = vec!["worker=1:crash@1s,restart=50ms".into()];
    let course = run(&Scenario { faults, ..scenario(3, "bsp") });
    let last = course.course.last().unwrap();
    assert!(
        course.report.finished && last.judgement.loss < 0.2 * course.course[0].judgement.loss,
        "{last:?}"
    );
}

#[test]
fn a_long_course_has_fewer_points_further_apart() {
    let schedule = Schedule { every_s: 0.02, most: 10 };
    let course = train(&scenario(2, "bsp"), Rc::new(Line), schedule, |_| ()).unwrap().course;
    assert!((5..=10).contains(&course.len()), "{}", course.len());
}

#[test]
fn what_is_not_simulated_is_refused() {
    let refused = |scenario: &Scenario| {
        let schedule = Schedule { every_s: 1.0, most: 10 };
        train(scenario, Rc::new(Line), schedule, |_| ()).unwrap_err().to_string()
    };
    let local = refused(&scenario(2, "bsp").with(Axis::Local, "steps:h=5"));
    assert!(local.starts_with("local steps of real training are not simulated yet"), "{local}");
    let factors = refused(&scenario(2, "bsp").with(Axis::Codec, "factors"));
    assert!(factors.starts_with("codec = \"factors\": learners give no factors"), "{factors}");
    let tags = refused(&Scenario { tags: true, ..scenario(2, "bsp") });
    assert!(tags.starts_with("tags = true: workers push numbers"), "{tags}");
    let name = "mlp".to_owned();
    let workload = WorkloadChoice { name, data: None, test: None, epochs: None, batch: None, examples: None };
    let run = run_scenario(&Scenario { workload: Some(workload), ..scenario(2, "bsp") }).unwrap_err();
    assert!(run.to_string().ends_with("run the scenario with `paramill sim train`"), "{run}");
    let both = Scenario::parse("iterations = 3\n[workload]\nname = 'mlp'\n").unwrap_err().to_string();
    assert!(both.starts_with("iterations: how long workload \"mlp\" takes"), "{both}");
}
