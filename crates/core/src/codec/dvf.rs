//! The dynamic value-bounded filter of Parameter Flow (section 3.3): a threshold that sinks as training goes on.

use super::{Bound, Context, Mask, Sparsifier, Stage, require_positive};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "dvf",
    about: "Entries above delta/sqrt(t) travel; the rest is kept and added to the next (Parameter Flow).",
    params: &[
        Param { name: "delta", default: None, about: "The threshold of the first step." },
        Param { name: "low", default: None, about: "In place of delta: the same while links have room." },
        Param { name: "up", default: None, about: "With low: the same while one of them has not." },
        Param {
            name: "need",
            default: Some("50"),
            about: "With low: what every link must carry, in Mbit/s.",
        },
        Param { name: "residual", default: Some("true"), about: "Must be true: the bound rests on it." },
    ],
    example: "dvf:delta=1e-3",
    build: |spec| {
        let spec = spec.with_positional("delta")?;
        let config: Config = spec.config()?;
        let Config { delta, low, up, need, residual } = config;
        let thresholds = match (delta, low, up) {
            (Some(delta), None, None) => {
                require_positive(&spec, "delta", delta)?;
                spec.require(need.is_none(), || {
                    "need says when `up` takes the place of `low`; give these two in place of delta".into()
                })?;
                Thresholds { low: delta, up: delta, need: None }
            }
            (None, Some(low), Some(up)) => {
                require_positive(&spec, "low", low)?;
                require_positive(&spec, "up", up)?;
                spec.require(low < up, || format!("low = {low}, up = {up}: expected low < up"))?;
                let need = need.unwrap_or(DEFAULT_NEED_MBIT);
                spec.require((MIN_NEED_MBIT..=MAX_NEED_MBIT).contains(&need), || {
                    format!("need = {need}: expected {MIN_NEED_MBIT} to {MAX_NEED_MBIT} Mbit/s")
                })?;
                Thresholds { low, up, need: Some(need * 1e6 / 8.0) }
            }
            _ => {
                let why = "expected delta, or low and up: two thresholds, for links with and without room";
                return Err(spec.parameter_error(why));
            }
        };
        spec.require(residual, || {
            "residual = false: entries below the threshold would be lost for good, and the bound on the distance to \
             the true parameters with them; leave it out"
                .into()
        })?;
        Ok(Box::new(Stage::Sparsifier(Box::new(thresholds))))
    },
};

/// What a link must carry where nothing is said, as in the paper.
const DEFAULT_NEED_MBIT: f64 = 50.0;
const MIN_NEED_MBIT: f64 = 0.1;
const MAX_NEED_MBIT: f64 = 100_000.0;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    delta: Option<f32>,
    low: Option<f32>,
    up: Option<f32>,
    need: Option<f64>,
    #[serde(default = "yes")]
    residual: bool,
}

fn yes() -> bool {
    true
}

/// Thresholds of the first step.
#[derive(Debug)]
struct Thresholds {
    low: f32,
    /// Where a link has less room than it needs.
    up: f32,
    /// How much that is, in bytes per second; `None` where nothing follows from it.
    need: Option<f64>,
}

impl Sparsifier for Thresholds {
    fn select(&self, context: &Context<'_>, values: &[f32], mask: &mut Mask) {
        let first = if context.lacks_room { self.up } else { self.low };
        // delta_t = delta / sqrt(t), where t counts from 1.
        let threshold = f64::from(first) / (context.step as f64 + 1.0).sqrt();
        mask.select_above(values, threshold as f32);
    }

    fn bound(&self, _count: usize) -> Bound {
        // sigma_t = delta_t * sqrt(d) bounds the norm of what is kept, and delta_t never rises above its first value.
        Bound { of_norm: 0.0, absolute: f64::from(self.up) }
    }

    fn needs_bandwidth(&self) -> Option<f64> {
        self.need
    }
}
