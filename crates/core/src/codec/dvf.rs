//! The dynamic value-bounded filter of Parameter Flow (section 3.3): a threshold that sinks as training goes on.

use super::{Bound, Context, Mask, Sparsifier, Stage, require_positive};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "dvf",
    about: "Entries above delta/sqrt(t) travel; the rest is kept and added to the next (Parameter Flow).",
    params: &[
        Param { name: "delta", default: None, about: "The threshold of the first step." },
        Param { name: "residual", default: Some("true"), about: "Must be true: the bound rests on it." },
    ],
    example: "dvf:delta=1e-3",
    build: |spec| {
        let spec = spec.with_positional("delta")?;
        let config: Dvf = spec.config()?;
        require_positive(&spec, "delta", config.delta)?;
        spec.require(config.residual, || {
            "residual = false: entries below the threshold would be lost for good, and the bound on the distance to \
             the true parameters with them; leave it out"
                .into()
        })?;
        Ok(Box::new(Stage::Sparsifier(Box::new(config))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Dvf {
    delta: f32,
    #[serde(default = "yes")]
    residual: bool,
}

fn yes() -> bool {
    true
}

impl Sparsifier for Dvf {
    fn select(&self, context: &Context<'_>, values: &[f32], mask: &mut Mask) {
        // delta_t = delta / sqrt(t), where t counts from 1.
        let threshold = f64::from(self.delta) / (context.step as f64 + 1.0).sqrt();
        mask.select_above(values, threshold as f32);
    }

    fn bound(&self, _count: usize) -> Bound {
        // sigma_t = delta_t * sqrt(d) bounds the norm of what is kept, and delta_t never rises.
        Bound { of_norm: 0.0, absolute: f64::from(self.delta) }
    }
}
