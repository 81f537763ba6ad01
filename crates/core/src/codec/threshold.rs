//! A fixed threshold, with what is below it kept for later (Strom).

use super::{Bound, Context, Mask, Sparsifier, Stage, require_positive};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "threshold",
    about: "Entries above a fixed magnitude travel; the rest is kept and added to the next (Strom).",
    params: &[Param { name: "value", default: None, about: "The magnitude above which an entry travels." }],
    example: "threshold:0.001",
    build: |spec| {
        let spec = spec.with_positional("value")?;
        let config: Threshold = spec.config()?;
        require_positive(&spec, "value", config.value)?;
        Ok(Box::new(Stage::Sparsifier(Box::new(config))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Threshold {
    value: f32,
}

impl Sparsifier for Threshold {
    fn select(&self, _context: &Context<'_>, values: &[f32], mask: &mut Mask) {
        mask.select_above(values, self.value);
    }

    fn bound(&self, _count: usize) -> Bound {
        Bound { of_norm: 0.0, absolute: f64::from(self.value) }
    }
}
