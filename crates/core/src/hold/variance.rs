//! Variance: whether the gradients of an update agree, or cancel each other out.

use super::{Criterion, UpdateView};
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Criterion> = Entry {
    name: "variance",
    about: "An update is held back until its gradients are known to agree: |u|^2 is a multiple of the sum of their |g|^2 (variance-based \
            compression, by layer). It does not depend on the scale of gradients.",
    params: &[Param {
        name: "alpha",
        default: None,
        about: "The multiple; above 1, which is that of a single gradient and of unrelated ones. May be given without a name.",
    }],
    example: "variance:2,most=4",
    build,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Variance {
    alpha: f64,
}

fn build(spec: &Spec) -> Result<Box<dyn Criterion>, SpecError> {
    let config: Variance = spec.with_positional("alpha")?.config()?;
    spec.require(config.alpha > 1.0, || format!("alpha = {}: expected a number above 1", config.alpha))?;
    Ok(Box::new(config))
}

impl Criterion for Variance {
    fn holds(&self, update: &UpdateView) -> bool {
        update.coherence() < self.alpha
    }

    fn needs_parameters(&self) -> bool {
        false
    }
}
