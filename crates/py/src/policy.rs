//! What the texts of policies mean.

use crate::condition;
use crate::errors::raise;
use paramill_core::codec::Codec;
use paramill_core::consistency::{ClientSync, SyncPolicy};
use paramill_core::optimizer::OptimizerPolicy;
use pyo3::prelude::*;

/// Whether a policy's text means something; the error names what is known.
#[pyfunction]
pub(crate) fn check_policy(axis: &str, text: &str) -> PyResult<String> {
    let registry = condition::registry();
    let canonical = match axis {
        "sync" => SyncPolicy::parse(&registry.consistency, text).map(|policy| policy.to_string()),
        "optimizer" => OptimizerPolicy::parse(&registry.optimizer, text).map(|policy| policy.to_string()),
        "codec" => Codec::parse(&registry.codec, text).map(|_| text.to_owned()),
        "answer_codec" => Codec::for_answers(&registry.codec, text).map(|_| text.to_owned()),
        other => return Err(raise("PolicyError", format!("no policy is called `{other}`"))),
    };
    canonical.map_err(|error| raise("PolicyError", error))
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
