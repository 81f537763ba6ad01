//! Real training in virtual time: what workers compute is computed, only how long it takes is the scenario's.
//!
//! A [`Lesson`] is a model with its data, a [`Learner`] what one worker makes of it. Gradients are computed on threads beside the
//! simulation, from the parameters that the worker's application has when it begins, and are there when its virtual computation is over. They are functions of
//! what they are computed from, so that a run is still one of its seed, however many threads there are.

use crate::cluster::Cluster;
use crate::player::Player;
use crate::report::Report;
use crate::scenario::{Scenario, ScenarioError, TableConfig};
use crate::stall::{StallWatch, who_waits};
use paramill_core::types::{Clock, TableId, Time, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Debug, Formatter};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// A model with its data.
pub trait Lesson: Debug {
    /// What is trained.
    fn tables(&self) -> Vec<TableConfig>;

    /// The initial values of a table.
    fn initial(&self, table: usize) -> Vec<f32>;

    /// A process of this worker, at its first step.
    fn learner(&self, worker: WorkerId) -> Box<dyn Learner>;

    /// How good parameters are on data that was held out.
    fn judge(&self, parameters: &[Vec<f32>]) -> Judgement;
}

/// What one worker computes. The same calls MUST give the same values.
pub trait Learner: Send {
    /// Chooses the batch of a step, and says which rows of each table it reads; `None` where it reads the whole table.
    fn prepare(&mut self, step: u64) -> Vec<Option<Vec<u32>>>;

    /// Mean loss of that batch. Gradients have the layout of the parameters: the rows that it reads one after the other, or the table.
    fn step(&mut self, parameters: &[&[f32]], gradients: &mut [Vec<f32>]) -> f32;
}

/// How good parameters are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Judgement {
    /// Mean loss on data that was held out.
    pub loss: f64,
    /// The workload's metric on it.
    pub metric: f64,
}

/// The loss of a step that a worker made.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Loss {
    /// When its computation was over.
    pub at: Time,
    /// Mean loss of its batch.
    pub loss: f32,
}

/// How training went.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Course {
    /// The run.
    #[serde(flatten)]
    pub report: Report,
    /// What parameters were worth, by time.
    pub course: Vec<Point>,
}

/// What the servers' parameters were worth at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Point {
    /// Seconds of virtual time since the first worker began.
    pub seconds: f64,
    /// Iterations that all workers had done together.
    pub iterations: u64,
    /// Mean loss of the batches since parameters were judged last; `None` where there was none.
    pub batch_loss: Option<f64>,
    /// On data that was held out.
    #[serde(flatten)]
    pub judgement: Judgement,
}

/// The workload of a scenario. Who runs it knows the workloads, and their defaults for what is left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadChoice {
    /// Its name: `lr`, `mf`, `mlp` or `cnn`.
    pub name: String,
    /// Where its data is. Made from the seed when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    /// Where data is that is held out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<PathBuf>,
    /// Times to go through the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// Examples in a worker's batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// Examples at most, or so many are made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub examples: Option<usize>,
}

/// When parameters are judged.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    /// Seconds of virtual time between two points.
    pub every_s: f64,
    /// Points at most, but for the last one: then the time between them is doubled.
    pub most: usize,
}

/// Trains in virtual time, to the scenario's end, its limit, or until no worker makes progress any more. `tell` hears of each point.
pub fn train(
    scenario: &Scenario,
    lesson: Rc<dyn Lesson>,
    schedule: Schedule,
    mut tell: impl FnMut(&Point),
) -> Result<Course, ScenarioError> {
    let scenario = &Scenario { tables: lesson.tables(), workload: None, ..scenario.clone() };
    let mut cluster = Cluster::training(scenario, lesson.clone())?;
    let mut watch = StallWatch::new(scenario, &scenario.fault_plan()?);
    let limit = scenario.limit_s;
    let (mut course, mut judged_at) = (Vec::<Point>::new(), Time::ZERO);
    let (mut every_s, mut until, mut skipped) = (schedule.every_s, 0.0, 1.0);
    let stalled = loop {
        until = f64::min(until + every_s * skipped, limit);
        let before = cluster.world.counts().events;
        let ran = cluster.run(Time::from_secs_f64(until), &mut watch);
        let is_over = !matches!(ran, Ok(false)) || until >= limit;
        // Where nothing happens, less often is looked.
        skipped = if cluster.world.counts().events == before { 2.0 * skipped } else { 1.0 };
        // A moment until which no step was made tells nothing new, but the end is a point of its own.
        let batch_loss = batch_loss(&cluster, judged_at);
        if (batch_loss.is_some() || is_over)
            && let Some(point) = point(&cluster, lesson.as_ref(), batch_loss)
        {
            judged_at = cluster.world.now();
            tell(&point);
            course.push(point);
        }
        if is_over {
            break ran.err().map(|violation| format!("{}: {}", violation.what, who_waits(&cluster)));
        }
        if course.len() >= schedule.most {
            every_s *= 2.0;
            let mut number = 0;
            course.retain(|_| {
                number += 1;
                number % 2 == 0
            });
        }
    };
    Ok(Course { report: Report { stalled, ..Report::of(&cluster) }, course })
}

/// The mean loss of the steps that were made after a moment.
fn batch_loss(cluster: &Cluster, since: Time) -> Option<f64> {
    let players = cluster.worker_ids().map(|id| cluster.player(id));
    let newest = players.flat_map(|player| player.losses().iter().rev().take_while(|loss| loss.at > since));
    let (sum, count) = newest.fold((0.0, 0u32), |(sum, count), loss| (sum + f64::from(loss.loss), count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// How things stand; `None` before a worker has begun.
fn point(cluster: &Cluster, lesson: &dyn Lesson, batch_loss: Option<f64>) -> Option<Point> {
    let players = || cluster.worker_ids().map(|id| cluster.player(id));
    let started = players().filter_map(|player| player.times().started).min()?;
    let tables = 0..cluster.scenario().tables.len() as u32;
    let parameters: Vec<Vec<f32>> = tables.map(|table| cluster.parameters(TableId(table))).collect();
    Some(Point {
        seconds: cluster.world.now().since(started).as_secs_f64(),
        iterations: players().map(Player::clock).sum(),
        batch_loss,
        judgement: lesson.judge(&parameters),
    })
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that compute gradients.
#[derive(Debug, Clone)]
pub(crate) struct Crew(Sender<Job>);

impl Crew {
    /// As many threads as there are processors. They end with the last of its clones.
    pub(crate) fn new() -> Crew {
        let (jobs, taken) = channel::<Job>();
        let taken = Arc::new(Mutex::new(taken));
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            let taken = taken.clone();
            std::thread::spawn(move || {
                let next = || taken.lock().ok()?.recv().ok();
                while let Some(job) = next() {
                    job();
                }
            });
        }
        Crew(jobs)
    }
}

/// A worker's learner, here or at work.
pub(crate) struct Studies {
    lesson: Rc<dyn Lesson>,
    crew: Crew,
    learner: Option<Box<dyn Learner>>,
    at_work: Option<Receiver<Done>>,
    gradients: Vec<Vec<f32>>,
    /// The loss of the step at hand, until it is noted.
    loss: Option<f32>,
    losses: Vec<Loss>,
}

/// What a learner brings back.
struct Done {
    learner: Box<dyn Learner>,
    gradients: Vec<Vec<f32>>,
    loss: f32,
}

impl Studies {
    pub(crate) fn new(lesson: Rc<dyn Lesson>, crew: Crew, worker: WorkerId) -> Studies {
        let (learner, tables) = (lesson.learner(worker), lesson.tables().len());
        Studies {
            lesson,
            crew,
            learner: Some(learner),
            at_work: None,
            gradients: vec![Vec::new(); tables],
            loss: None,
            losses: Vec::new(),
        }
    }

    /// The initial values of a table.
    pub(crate) fn initial(&self, table: usize) -> Vec<f32> {
        self.lesson.initial(table)
    }

    /// Which rows a step reads of each table.
    pub(crate) fn prepare(&mut self, step: Clock) -> Vec<Option<Vec<u32>>> {
        // A step that was given up is still being computed.
        self.fetch();
        self.learner.as_mut().expect("it has come back").prepare(step)
    }

    /// The step that was prepared is computed, on these parameters.
    pub(crate) fn begin(&mut self, parameters: Vec<Vec<f32>>) {
        self.fetch();
        let mut learner = self.learner.take().expect("it has come back");
        let mut gradients = std::mem::take(&mut self.gradients);
        let (done, at_work) = channel();
        let job = move || {
            let slices: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
            let loss = learner.step(&slices, &mut gradients);
            // A worker that has died meanwhile does not ask for it.
            let _ = done.send(Done { learner, gradients, loss });
        };
        self.crew.0.send(Box::new(job)).expect("the threads live as long as somebody may ask them");
        self.at_work = Some(at_work);
    }

    /// The gradient of a table, in the step that was begun last.
    pub(crate) fn gradient(&mut self, now: Time, table: usize) -> &[f32] {
        self.fetch();
        if let Some(loss) = self.loss.take() {
            self.losses.push(Loss { at: now, loss });
        }
        &self.gradients[table]
    }

    /// The losses of all steps that were made.
    pub(crate) fn losses(&self) -> &[Loss] {
        &self.losses
    }

    fn fetch(&mut self) {
        if let Some(at_work) = self.at_work.take() {
            let done = at_work.recv().expect("a learner does not panic");
            (self.learner, self.gradients, self.loss) = (Some(done.learner), done.gradients, Some(done.loss));
        }
    }
}

impl Debug for Studies {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Studies").field("lesson", &self.lesson).field("steps", &self.losses.len()).finish()
    }
}
