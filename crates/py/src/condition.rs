//! Conditions written in Python: how far workers may be ahead, as a function of a server's state.
//!
//! The callable runs on a thread of its own, never on a data core's. A data core leaves it the state after each advance,
//! and decides with the latest answer. Where that is late, or the callable raises, a model of the server's own decides: the
//! fallback that was named with it.

use crate::errors::raise;
use paramill_core::consistency::{Apply, Consistency, Decision, PullView, SyncPolicy, SyncState};
use paramill_core::prng::Prng;
use paramill_core::registry::{Entry, Param, Registry};
use paramill_core::spec::{Spec, SpecError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The components of a process with Python in it.
pub(crate) fn registry() -> Registry {
    let mut registry = Registry::builtin();
    registry.consistency.register(ENTRY);
    registry
}

const ENTRY: Entry<dyn Consistency> = Entry {
    name: "python",
    about: "A condition in Python: a callable says how many rounds a worker may be ahead; every gradient is a step at once.",
    params: &[Param {
        name: "name",
        default: None,
        about: "The name that the callable was registered with.",
    }],
    example: "python:name=mine",
    build,
};

/// By name. A registry's entry builds from text alone, so this is the one place that both sides know.
static CONDITIONS: Mutex<BTreeMap<String, Arc<Condition>>> = Mutex::new(BTreeMap::new());

struct Condition {
    callable: Py<PyAny>,
    deadline: Duration,
    fallback: String,
}

/// Registers a callable under a name, for servers of this process.
#[pyfunction]
pub(crate) fn register_condition(
    name: &str,
    callable: Py<PyAny>,
    deadline: f64,
    fallback: String,
) -> PyResult<()> {
    let deadline = crate::waiting::duration(deadline)?;
    check_fallback(&fallback).map_err(|error| raise("PolicyError", error))?;
    let condition = Condition { callable, deadline, fallback };
    lock(&CONDITIONS).insert(name.to_owned(), Arc::new(condition));
    Ok(())
}

/// The fallback, whose gradients must become steps as the condition's do.
fn check_fallback(text: &str) -> Result<Box<dyn Consistency>, SpecError> {
    let model = SyncPolicy::parse(&Registry::builtin().consistency, text)?.model;
    match model.apply() {
        Apply::OnArrival => Ok(model),
        Apply::OnRound => Err(SpecError::Parameter {
            component: "python".into(),
            why: format!(
                "the fallback `{text}` makes steps of rounds; expected asp, ssp, dsps, pssp or when"
            ),
        }),
    }
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let name = match spec.params.as_slice() {
        [(key, name)] if key.is_empty() || key == "name" => name.clone(),
        _ => return Err(spec.parameter_error("expected the name of a condition, as in python:mine")),
    };
    let condition = lock(&CONDITIONS).get(&name).cloned();
    // Workers read a job's policies too, but only the servers' process has the callable.
    let fallback = check_fallback(condition.as_ref().map_or("asp", |condition| condition.fallback.as_str()))?;
    let text = format!("the condition `{name}`").into();
    Ok(Box::new(Model { condition, fallback, verdict: Arc::default(), text }))
}

/// The model that a data core asks.
struct Model {
    condition: Option<Arc<Condition>>,
    fallback: Box<dyn Consistency>,
    verdict: Arc<Mutex<Verdict>>,
    text: Arc<str>,
}

/// What was asked of the callable, and what it said.
#[derive(Default)]
struct Verdict {
    /// The latest state that it has not seen.
    asked: Option<Snapshot>,
    /// Since when it owes an answer.
    owes_since: Option<Instant>,
    /// How far ahead is too far, if it said so last.
    bound: Option<i64>,
}

struct Snapshot {
    v_train: u64,
    n: u32,
    count: u32,
    /// Rank, progress, seconds per iteration.
    workers: Vec<(u32, i64, Option<f64>)>,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.text)
    }
}

impl Consistency for Model {
    fn pull(&self, state: &SyncState, pull: &PullView, rng: &mut Prng) -> Decision {
        let deadline = self.condition.as_ref().map_or(Duration::ZERO, |condition| condition.deadline);
        let bound = lock(&self.verdict).in_time(deadline);
        match bound {
            Some(bound) => Decision::when(state.gap(pull.progress) < bound, &self.text),
            None => self.fallback.pull(state, pull, rng),
        }
    }

    fn observe(&mut self, state: &SyncState) {
        self.fallback.observe(state);
        let Some(condition) = &self.condition else { return };
        let workers = state.workers().map(|(id, worker)| (id.0, worker.progress(), worker.interval_s()));
        let snapshot = Snapshot {
            v_train: state.v_train(),
            n: state.n(),
            count: state.count(),
            workers: workers.collect(),
        };
        let mut verdict = lock(&self.verdict);
        verdict.asked = Some(snapshot);
        if verdict.owes_since.is_none() {
            verdict.owes_since = Some(Instant::now());
            // If the thread is gone the fallback decides.
            let _ = lock(&EVALUATOR).send((condition.clone(), self.verdict.clone()));
        }
    }
}

impl Verdict {
    fn in_time(&self, deadline: Duration) -> Option<i64> {
        let is_late = self.owes_since.is_some_and(|since| since.elapsed() > deadline);
        self.bound.filter(|_| !is_late)
    }
}

type Question = (Arc<Condition>, Arc<Mutex<Verdict>>);

/// The thread that calls Python, for all conditions.
static EVALUATOR: LazyLock<Mutex<Sender<Question>>> = LazyLock::new(|| {
    let (sender, questions) = mpsc::channel::<Question>();
    let body = move || {
        for (condition, verdict) in questions {
            while let Some(snapshot) = next_question(&verdict) {
                // An interpreter that ends answers nothing more.
                let Some(answer) = Python::try_attach(|py| evaluate(py, &condition, &snapshot)) else {
                    return;
                };
                lock(&verdict).bound = answer;
            }
        }
    };
    // Without the thread every question goes unanswered, and the fallback decides.
    let _ = std::thread::Builder::new().name("paramill conditions".into()).spawn(body);
    Mutex::new(sender)
});

/// The state to look at next. When there is none, nothing is owed.
fn next_question(verdict: &Mutex<Verdict>) -> Option<Snapshot> {
    let mut verdict = lock(verdict);
    let asked = verdict.asked.take();
    verdict.owes_since = asked.as_ref().map(|_| verdict.owes_since.unwrap_or_else(Instant::now));
    asked
}

/// The callable's word on a state: a number of rounds, or `True` for no bound. An error is printed, and is no answer.
fn evaluate(py: Python<'_>, condition: &Condition, snapshot: &Snapshot) -> Option<i64> {
    let answer = describe(py, snapshot).and_then(|state| {
        let answer = condition.callable.bind(py).call1((state,))?;
        match answer.extract::<bool>() {
            Ok(all) => Ok(if all { i64::MAX } else { 0 }),
            Err(_) => answer.extract::<f64>().map(|rounds| rounds as i64),
        }
    });
    answer.map_err(|error| error.print(py)).ok()
}

fn describe<'py>(py: Python<'py>, snapshot: &Snapshot) -> PyResult<Bound<'py, PyDict>> {
    let workers = PyList::empty(py);
    for (rank, progress, interval_s) in &snapshot.workers {
        let worker = PyDict::new(py);
        worker.set_item("rank", rank)?;
        worker.set_item("progress", progress)?;
        worker.set_item("interval_s", interval_s)?;
        workers.append(worker)?;
    }
    let state = PyDict::new(py);
    state.set_item("v_train", snapshot.v_train)?;
    state.set_item("n", snapshot.n)?;
    state.set_item("count", snapshot.count)?;
    state.set_item("workers", workers)?;
    Ok(state)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}
