//! What is under way.

use crate::errors::{client, raise};
use crate::waiting::{check_process, duration, timed, until_due};
use numpy::PyArray1;
use paramill_node::client as node;
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// A push, a pull or a barrier under way.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Handle {
    /// Gone when it brought its rows.
    handle: Mutex<Option<UnderWay>>,
    process: u32,
    timeout: Duration,
}

/// By what it brings.
pub(crate) enum UnderWay {
    Nothing(node::Handle),
    Values(node::Handle<Vec<f32>>),
}

impl From<node::Handle> for UnderWay {
    fn from(handle: node::Handle) -> UnderWay {
        UnderWay::Nothing(handle)
    }
}

impl From<node::Handle<Vec<f32>>> for UnderWay {
    fn from(handle: node::Handle<Vec<f32>>) -> UnderWay {
        UnderWay::Values(handle)
    }
}

impl UnderWay {
    fn is_due_within(&self, timeout: Duration) -> bool {
        match self {
            UnderWay::Nothing(handle) => handle.is_due_within(timeout),
            UnderWay::Values(handle) => handle.is_due_within(timeout),
        }
    }

    fn take(&self) -> Result<Option<Vec<f32>>, node::ClientError> {
        match self {
            UnderWay::Nothing(handle) => handle.wait_within(Duration::ZERO).map(|()| None),
            UnderWay::Values(handle) => handle.wait_within(Duration::ZERO).map(Some),
        }
    }
}

#[pymethods]
impl Handle {
    /// Waits until it is due, and returns the values that it brings, if it brings some: once. After a time-out it may be called
    /// again.
    fn wait<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyArray1<f32>>>> {
        check_process(self.process)?;
        let timeout = timeout.map(duration).transpose()?.unwrap_or(self.timeout);
        until_due(py, timeout, |slice| Ok(self.lock().as_ref().is_none_or(|way| way.is_due_within(slice))))?;
        let outcome = py.detach(|| {
            let mut handle = self.lock();
            let outcome = handle.as_ref().map(UnderWay::take);
            if matches!(outcome, Some(Ok(Some(_)))) {
                *handle = None;
            }
            outcome
        });
        let outcome = outcome.ok_or_else(|| raise("OrderError", "these values were taken already"))?;
        let values = outcome.map_err(|error| client(timed(error, timeout)))?;
        Ok(values.map(|values| PyArray1::from_vec(py, values)))
    }

    /// Whether `wait` would return at once.
    fn is_due(&self, py: Python<'_>) -> PyResult<bool> {
        check_process(self.process)?;
        Ok(py.detach(|| self.lock().as_ref().is_none_or(|way| way.is_due_within(Duration::ZERO))))
    }
}

impl Handle {
    pub(crate) fn new(handle: impl Into<UnderWay>, timeout: Duration) -> Handle {
        Handle { handle: Mutex::new(Some(handle.into())), process: std::process::id(), timeout }
    }

    fn lock(&self) -> MutexGuard<'_, Option<UnderWay>> {
        self.handle.lock().expect("no holder of this lock panics")
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            std::mem::forget(self.lock().take());
        }
    }
}
