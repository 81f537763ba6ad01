//! What the texts of policies mean.

use crate::errors::raise;
use paramill_core::codec::{self, Codec};
use paramill_core::consistency::{Apply, ClientSync, SyncPolicy};
use paramill_core::optimizer::OptimizerPolicy;
use paramill_core::policy::{Axis, Policies};
use paramill_core::registry::{self, Param, Registry};
use paramill_core::spec::{Spec, SpecError, split_outside_parentheses};
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
    policies.check(&Registry::builtin()).map_err(|error| raise("PolicyError", error))?;
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
    let registry = Registry::builtin();
    let policy =
        OptimizerPolicy::parse(&registry.optimizer, text).map_err(|error| raise("PolicyError", error))?;
    let parameters = policy.parameters().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Ok((policy.rule_name().to_owned(), parameters))
}

/// Whether workers go on without some of the blocks under a consistency model, a partial pull, or are told how long to wait
/// before they do: without a partial pull `tau2` has no effect, and where averages are exchanged it is refused with `b`.
#[pyfunction]
pub(crate) fn pulls_partially(sync: &str) -> PyResult<bool> {
    let policy = SyncPolicy::parse(&Registry::builtin().consistency, sync)
        .map_err(|error| raise("PolicyError", error))?;
    let waits = matches!(policy.model.client_sync(), ClientSync::Partial(partial) if !partial.tau2.is_zero());
    Ok(policy.partial_pull().is_some() || waits)
}

/// The consistency models under which the gradients of a round make one step, so that a round has a mean, and every worker takes part in
/// every round: a replica that left one out would differ from then on.
#[pyfunction]
pub(crate) fn models_of_rounds() -> Vec<&'static str> {
    let axis = Registry::builtin().consistency;
    let entries = axis.entries().iter();
    let makes_rounds = |text: &str| SyncPolicy::parse(&axis, text).is_ok_and(|policy| has_means(&policy));
    entries.filter(|entry| makes_rounds(entry.example)).map(|entry| entry.name).collect()
}

/// Whether this is one of them.
#[pyfunction]
pub(crate) fn steps_in_rounds(sync: &str) -> PyResult<bool> {
    let policy = SyncPolicy::parse(&Registry::builtin().consistency, sync)
        .map_err(|error| raise("PolicyError", error))?;
    Ok(has_means(&policy))
}

fn has_means(policy: &SyncPolicy) -> bool {
    policy.model.apply() == Apply::OnRound && !policy.model.catches_up()
}

/// A stage of a codec: its kind, its name, and every parameter with its value, also those that the text leaves out.
type Stage = (String, String, Vec<(String, Option<String>)>);

/// The stages of a codec, in order.
#[pyfunction]
pub(crate) fn codec_stages(text: &str) -> PyResult<Vec<Stage>> {
    let axis = Registry::builtin().codec;
    let stages = || -> Result<Vec<Stage>, SpecError> {
        // The chain as a whole makes sense, or is refused as it is everywhere.
        let text = Codec::parse(&axis, text)?.to_string();
        let parts = split_outside_parentheses(&text, '+').unwrap_or_default();
        parts.into_iter().map(|part| stage(&axis, &Spec::parse(part)?)).collect()
    };
    stages().map_err(|error| raise("PolicyError", error))
}

fn stage(axis: &registry::Axis<codec::Stage>, spec: &Spec) -> Result<Stage, SpecError> {
    let params = axis.params(axis.entry(&spec.name)?);
    // A value without a key is the first parameter's.
    let spec = match params.first() {
        Some(first) => spec.with_positional(first.name)?,
        None => spec.clone(),
    };
    let given = |name: &str| spec.params.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let value = |param: &Param| given(param.name).or_else(|| param.default.map(str::to_owned));
    let values = params.iter().map(|param| (param.name.to_owned(), value(param))).collect();
    let kind = axis.build(&spec)?.kind().to_string();
    Ok((kind, spec.name.clone(), values))
}

/// Whether workers keep what a codec does not send, to send it later.
#[pyfunction]
pub(crate) fn codec_keeps_residual(text: &str) -> PyResult<bool> {
    let codec = Codec::parse(&Registry::builtin().codec, text);
    Ok(codec.map_err(|error| raise("PolicyError", error))?.keeps_residual())
}
