//! What the texts of policies mean.

use crate::condition;
use crate::errors::raise;
use paramill_core::consistency::{ClientSync, SyncPolicy};
use paramill_core::optimizer::OptimizerPolicy;
use paramill_core::policy::{Axis, Policies};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Policies by name, as keyword arguments; `None` says nothing. All of them mean something.
pub(crate) fn policies(given: &Bound<'_, PyDict>) -> PyResult<Policies> {
    let mut policies = Policies::default();
    for (name, text) in given {
        let name: String = name.extract()?;
        let Ok(text) = text.extract::<Option<String>>() else {
            let found = text.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "`{name}`: expected the text of a policy, not {found}"
            )));
        };
        let fault = |error| raise("PolicyError", error);
        let axis = Axis::named(&name).map_err(fault)?;
        if let Some(text) = text {
            policies.set(axis, text).map_err(fault)?;
        }
    }
    policies.check(&condition::registry()).map_err(|error| raise("PolicyError", error))?;
    Ok(policies)
}

/// Whether policies mean something; the error names what is known.
#[pyfunction]
pub(crate) fn check_policies(policies: &Bound<'_, PyDict>) -> PyResult<()> {
    self::policies(policies).map(drop)
}

/// The rule that an optimizer's text names, and every parameter of it with its value, also those that the text leaves out.
#[pyfunction]
pub(crate) fn optimizer_parameters(text: &str) -> PyResult<(String, Vec<(String, String)>)> {
    let registry = condition::registry();
    let policy =
        OptimizerPolicy::parse(&registry.optimizer, text).map_err(|error| raise("PolicyError", error))?;
    let parameters = policy.parameters().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Ok((policy.rule_name().to_owned(), parameters))
}

/// Whether workers go on without some of the blocks under a consistency model, a partial pull, or are told how long to wait
/// before they do: without a partial pull `tau2` has no effect, and PyTorch refuses it with `b`.
#[pyfunction]
pub(crate) fn pulls_partially(sync: &str) -> PyResult<bool> {
    let policy = SyncPolicy::parse(&condition::registry().consistency, sync)
        .map_err(|error| raise("PolicyError", error))?;
    let waits = matches!(policy.model.client_sync(), ClientSync::Partial(partial) if !partial.tau2.is_zero());
    Ok(policy.partial_pull().is_some() || waits)
}
