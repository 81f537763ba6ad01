//! The largest entries: exactly so many of each layer, or about so many by the threshold of a sample.

use super::selection::{Largest, Selection};
use super::{Bound, Context, Mask, Sparsifier, Stage, require_ratio, share};
use crate::hands::Alone;
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "topk",
    about: "The largest entries of each layer travel; the rest is kept and added to the next.",
    params: &[
        Param { name: "ratio", default: None, about: "The part of a layer's entries that travels." },
        Param {
            name: "sample",
            default: Some("1"),
            about: "Below 1: about so many travel, by the threshold of this part of the entries.",
        },
        Param {
            name: "residual",
            default: Some("true"),
            about: "Keep the rest; without it the rest is lost.",
        },
    ],
    example: "topk:0.01",
    build: |spec| {
        let spec = spec.with_positional("ratio")?;
        let config: TopK = spec.config()?;
        require_ratio(&spec, config.ratio)?;
        spec.require(config.sample > 0.0 && config.sample <= 1.0, || {
            format!("sample = {}: expected 0 < sample <= 1", config.sample)
        })?;
        Ok(Box::new(Stage::Sparsifier(Box::new(config))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TopK {
    ratio: f64,
    #[serde(default = "all")]
    sample: f64,
    #[serde(default = "yes")]
    residual: bool,
}

fn all() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

impl Sparsifier for TopK {
    fn select(&self, context: &Context<'_>, values: &[f32], mask: &mut Mask) {
        select_largest(context, values, self.largest(context.step, values.len()), mask);
    }

    fn largest(&self, _step: u64, count: usize) -> Option<Largest> {
        let sample = (self.sample < 1.0).then_some(self.sample);
        Some(Largest { count: share(self.ratio, count), sample })
    }

    fn bound(&self, count: usize) -> Bound {
        let kept = share(self.ratio, count) as f64 / count.max(1) as f64;
        if self.sample < 1.0 {
            return Bound { of_norm: 1.0, absolute: 0.0 };
        }
        // The entries that stay are the smallest, so they have at most their share of the squares.
        Bound { of_norm: (1.0 - kept).sqrt() * 1.0001, absolute: 0.0 }
    }

    fn keeps_residual(&self) -> bool {
        self.residual
    }
}

/// Marks the largest entries of a stretch that is a layer by itself.
pub(super) fn select_largest(
    context: &Context<'_>,
    values: &[f32],
    largest: Option<Largest>,
    mask: &mut Mask,
) {
    if let Some(largest) = largest {
        Selection::find(&values, 0..values.len(), largest, context.seed, &Alone).mark(0, values, mask);
    }
}
