//! The schedule of local steps.

use crate::errors::raise;
use paramill_core::local as core;
use paramill_core::registry::Registry;
use pyo3::prelude::*;

/// What a worker synchronises when.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct LocalSteps(core::LocalSteps);

impl From<core::LocalSteps> for LocalSteps {
    fn from(steps: core::LocalSteps) -> LocalSteps {
        LocalSteps(steps)
    }
}

#[pymethods]
impl LocalSteps {
    /// Reads `steps:h=50,...`.
    #[new]
    fn new(text: &str) -> PyResult<LocalSteps> {
        let steps = core::LocalSteps::parse(&Registry::builtin(), text);
        let steps = steps.map_err(|error| raise("PolicyError", error))?;
        steps.map(LocalSteps).ok_or_else(|| raise("PolicyError", format!("`{text}` are no local steps")))
    }

    #[getter]
    fn text(&self) -> String {
        self.0.to_string()
    }

    #[getter]
    fn h(&self) -> u64 {
        self.0.h()
    }

    #[getter]
    fn fragments(&self) -> usize {
        self.0.fragments()
    }

    #[getter]
    fn late(&self) -> u64 {
        self.0.late()
    }

    #[getter]
    fn inner(&self) -> Option<&str> {
        self.0.inner()
    }

    fn first_step(&self, clock: u64) -> u64 {
        self.0.first_step(clock)
    }

    fn pushed_after(&self, steps: u64) -> Option<usize> {
        self.0.pushed_after(steps)
    }

    fn merged_after(&self, steps: u64) -> Option<usize> {
        self.0.merged_after(steps)
    }

    fn turns_after(&self, steps: u64) -> bool {
        self.0.turns_after(steps)
    }

    fn closing(&self, total: u64) -> (u64, Vec<Vec<usize>>) {
        self.0.closing(total)
    }

    fn deal(&self, sizes: Vec<u64>) -> PyResult<Vec<usize>> {
        self.0.deal(&sizes).map_err(|error| raise("PolicyError", error))
    }
}

/// The outer optimizer where none is named.
#[pyfunction]
pub(crate) fn outer_optimizer() -> &'static str {
    core::OUTER
}
