//! Small tables and layers travel as they are: there is nothing to gain, and biases and scales are sensitive.

use super::{Context, Filter, Stage};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "min-size",
    about: "Applies the rest to layers of at least so many elements; smaller ones travel as they are.",
    params: &[Param { name: "elements", default: None, about: "Elements of the smallest layer." }],
    example: "min-size:4096+onebit",
    build: |spec| {
        Ok(Box::new(Stage::Filter(Box::new(spec.with_positional("elements")?.config::<MinSize>()?))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MinSize {
    elements: u64,
}

impl Filter for MinSize {
    fn applies(&self, context: &Context<'_>) -> bool {
        context.layer_elements >= self.elements
    }
}
