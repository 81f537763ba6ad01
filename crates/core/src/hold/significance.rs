//! Significance: how much an update is, compared with the parameters.

use super::{Criterion, UpdateView};
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Criterion> = Entry {
    name: "significance",
    about: "An update is held back until its norm is a share of that of the parameters (Gaia's significance, by layer).",
    params: &[Param {
        name: "theta",
        default: None,
        about: "The share |u|/|w| from which on an update is sent; above 0. May be given without a name.",
    }],
    example: "significance:0.05,most=4",
    build,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Significance {
    theta: f64,
}

fn build(spec: &Spec) -> Result<Box<dyn Criterion>, SpecError> {
    let config: Significance = spec.with_positional("theta")?.config()?;
    spec.require(config.theta > 0.0, || format!("theta = {}: expected a number above 0", config.theta))?;
    Ok(Box::new(config))
}

impl Criterion for Significance {
    fn holds(&self, update: &UpdateView) -> bool {
        update.significance() < self.theta
    }
}
