//! Random entries: as many as a ratio says, each as likely as the other.

use super::{Bound, Context, Mask, Sparsifier, Stage, require_ratio, share};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "randk",
    about: "Random entries travel, scaled up so that the mean is right; or unscaled, with the rest kept.",
    params: &[
        Param { name: "ratio", default: None, about: "The part of a chunk's entries that travels." },
        Param { name: "residual", default: Some("false"), about: "Keep the rest instead of scaling up." },
    ],
    example: "randk:0.05",
    build: |spec| {
        let spec = spec.with_positional("ratio")?;
        let config: RandomK = spec.config()?;
        require_ratio(&spec, config.ratio)?;
        Ok(Box::new(Stage::Sparsifier(Box::new(config))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RandomK {
    ratio: f64,
    #[serde(default)]
    residual: bool,
}

impl Sparsifier for RandomK {
    fn select(&self, context: &Context<'_>, values: &[f32], mask: &mut Mask) {
        let mut prng = Prng::new(context.seed);
        let count = values.len();
        // Floyd's algorithm: every set of this size is equally likely, at one draw an entry.
        for last in count - share(self.ratio, count)..count {
            let drawn = prng.below(last as u64 + 1) as usize;
            mask.set(if mask.has(drawn) { last } else { drawn });
        }
    }

    fn bound(&self, count: usize) -> Bound {
        // Scaled up, an entry is off by at most this many times itself.
        let excess = f64::from(self.scale(count)) - 1.0;
        Bound { of_norm: excess.max(1.0) * 1.001, absolute: 0.0 }
    }

    fn keeps_residual(&self) -> bool {
        self.residual
    }

    fn scale(&self, count: usize) -> f32 {
        if self.residual || count == 0 { 1.0 } else { count as f32 / share(self.ratio, count) as f32 }
    }

    fn is_unbiased(&self) -> bool {
        !self.residual
    }
}
