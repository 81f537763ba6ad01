//! Significance (Gaia): entries travel that change their parameter by more than a part of its value.

use super::{Bound, Context, Mask, Sparsifier, Stage, require_positive};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "significance",
    about: "Entries travel that exceed a part of their parameter's magnitude; the rest is kept (Gaia).",
    params: &[
        Param { name: "part", default: None, about: "The part of the parameter's magnitude." },
        Param {
            name: "decay",
            default: Some("true"),
            about: "Whether it sinks with the square root of steps.",
        },
    ],
    example: "significance:0.01",
    build: |spec| {
        let spec = spec.with_positional("part")?;
        let config: Significance = spec.config()?;
        require_positive(&spec, "part", config.part)?;
        Ok(Box::new(Stage::Sparsifier(Box::new(config))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Significance {
    part: f32,
    #[serde(default = "yes")]
    decay: bool,
}

fn yes() -> bool {
    true
}

impl Sparsifier for Significance {
    fn select(&self, context: &Context<'_>, values: &[f32], mask: &mut Mask) {
        if context.parameters.len() != values.len() {
            // Against nothing, everything is significant.
            return mask.select_above(values, 0.0);
        }
        let sinks = if self.decay { (context.step as f64 + 1.0).sqrt() } else { 1.0 };
        mask.select_above_reference(values, context.parameters, (f64::from(self.part) / sinks) as f32);
    }

    fn needs_parameters(&self) -> bool {
        true
    }

    fn bound(&self, _count: usize) -> Bound {
        Bound { of_norm: 1.0, absolute: 0.0 }
    }
}
