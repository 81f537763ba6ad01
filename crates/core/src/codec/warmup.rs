//! The first steps change everything, and travel as they are.

use super::{Context, Filter, Stage};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "warmup",
    about: "Applies the rest after so many steps; until then values travel as they are.",
    params: &[Param { name: "steps", default: None, about: "Steps until the rest applies." }],
    example: "warmup:100+topk:0.01",
    build: |spec| Ok(Box::new(Stage::Filter(Box::new(spec.with_positional("steps")?.config::<Warmup>()?)))),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Warmup {
    steps: u64,
}

impl Filter for Warmup {
    fn applies(&self, context: &Context<'_>) -> bool {
        context.step >= self.steps
    }
}
