//! Deep gradient compression: top-k on accumulated velocities, with momentum correction, factor masking and warm-up.

use super::selection::Largest;
use super::topk::select_largest;
use super::{Bound, Context, Mask, Sparsifier, Stage, require_ratio, share};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "dgc",
    about: "Deep gradient compression: the largest accumulated velocities travel; servers then need no momentum.",
    params: &[
        Param { name: "ratio", default: Some("0.001"), about: "The part of a layer's entries that travels." },
        Param { name: "momentum", default: Some("0.9"), about: "How much of a velocity is kept, below 1." },
        Param {
            name: "warmup",
            default: Some("0"),
            about: "Steps over which the ratio sinks from a quarter.",
        },
    ],
    example: "dgc:ratio=0.01,warmup=100",
    build: |spec| {
        let spec = spec.with_positional("ratio")?;
        let config: Dgc = spec.config()?;
        require_ratio(&spec, config.ratio)?;
        spec.require((0.0..1.0).contains(&config.momentum), || {
            format!("momentum = {}: expected 0 <= momentum < 1", config.momentum)
        })?;
        Ok(Box::new(Stage::Sparsifier(Box::new(config))))
    },
};

/// Share of the entries that is sent at the first step of a warm-up.
const FIRST_RATIO: f64 = 0.25;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Dgc {
    ratio: f64,
    momentum: f32,
    warmup: u64,
}

impl Default for Dgc {
    fn default() -> Dgc {
        Dgc { ratio: 0.001, momentum: 0.9, warmup: 0 }
    }
}

impl Dgc {
    /// The ratio sinks exponentially, as in the paper.
    fn ratio_at(&self, step: u64) -> f64 {
        if step >= self.warmup || self.ratio >= FIRST_RATIO {
            return self.ratio;
        }
        let progress = step as f64 / self.warmup as f64;
        FIRST_RATIO * (self.ratio / FIRST_RATIO).powf(progress)
    }
}

impl Sparsifier for Dgc {
    fn select(&self, context: &Context<'_>, values: &[f32], mask: &mut Mask) {
        select_largest(context, values, self.largest(context.step, values.len()), mask);
    }

    fn largest(&self, step: u64, count: usize) -> Option<Largest> {
        Some(Largest { count: share(self.ratio_at(step), count), sample: None })
    }

    fn bound(&self, _count: usize) -> Bound {
        Bound { of_norm: 1.0, absolute: 0.0 }
    }

    fn momentum(&self) -> Option<f32> {
        Some(self.momentum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_sinks_to_its_end() {
        let dgc = Dgc { ratio: 0.001, momentum: 0.9, warmup: 100 };
        assert!((dgc.ratio_at(0) - 0.25).abs() < 1e-12);
        assert!(dgc.ratio_at(50) < 0.02 && dgc.ratio_at(50) > 0.01);
        assert_eq!(dgc.ratio_at(100), 0.001);
    }
}
