//! Conditions written in Python: worker 0 says of each pull whether servers answer it.

use paramill_node::client::{Asked, Question};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// A pull that a server asks about, and the state of its table there.
#[pyclass(frozen, module = "paramill")]
pub(crate) struct Pull {
    table: String,
    question: Question,
}

/// How far a worker is.
#[pyclass(frozen, get_all, module = "paramill._native")]
pub(crate) struct WorkerProgress {
    rank: u32,
    progress: i64,
    interval_s: Option<f64>,
}

#[pymethods]
impl Pull {
    #[getter]
    fn table(&self) -> &str {
        &self.table
    }

    #[getter]
    fn worker(&self) -> u32 {
        self.question.worker.0
    }

    #[getter]
    fn progress(&self) -> i64 {
        self.question.progress
    }

    #[getter]
    fn significance(&self) -> Option<f64> {
        self.question.significance
    }

    #[getter]
    fn v_train(&self) -> u64 {
        self.question.v_train
    }

    #[getter]
    fn gap(&self) -> i64 {
        self.question.gap()
    }

    #[getter]
    fn staleness(&self) -> u64 {
        self.question.staleness()
    }

    #[getter]
    fn n(&self) -> u32 {
        self.question.n
    }

    #[getter]
    fn count(&self) -> u32 {
        self.question.count
    }

    #[getter]
    fn fastest(&self) -> i64 {
        self.question.fastest()
    }

    #[getter]
    fn slowest(&self) -> i64 {
        self.question.slowest()
    }

    #[getter]
    fn imbalance(&self) -> f64 {
        self.question.imbalance()
    }

    #[getter]
    fn workers(&self) -> Vec<WorkerProgress> {
        let worker = |known: &paramill_node::client::WorkerProgress| WorkerProgress {
            rank: known.worker.0,
            progress: known.progress,
            interval_s: known.interval_s,
        };
        self.question.workers.iter().map(worker).collect()
    }

    fn __repr__(&self) -> String {
        let Question { worker, progress, v_train, .. } = &self.question;
        format!("<paramill.Pull of `{}` by {worker} at progress {progress}, version {v_train}>", self.table)
    }
}

/// The function's word on a pull. The error is its traceback.
pub(crate) fn evaluate(function: &Py<PyAny>, asked: &Asked) -> Result<bool, String> {
    let ask = |py: Python<'_>| {
        let pull = Pull { table: asked.table_name.clone(), question: asked.question.clone() };
        let answer = function.bind(py).call1((pull,))?;
        answer.extract::<bool>().map_err(|_| {
            let found = answer.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string());
            PyTypeError::new_err(format!("a condition returns True or False, not {found}"))
        })
    };
    let told = Python::try_attach(|py| ask(py).map_err(|error| describe(py, &error)));
    told.unwrap_or_else(|| Err("Python is about to end".into()))
}

/// An exception as Python prints it.
fn describe(py: Python<'_>, error: &PyErr) -> String {
    let trace = error.traceback(py).and_then(|trace| trace.format().ok()).unwrap_or_default();
    format!("{error}\n{trace}").trim_end().to_owned()
}
