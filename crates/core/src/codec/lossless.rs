//! A promise that nothing gets lost, which the rest of the chain must be able to keep.

use super::feedback::Nothing;
use super::{Filter, Stage};
use crate::registry::Entry;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "lossless",
    about: "Refuses a chain that could lose anything.",
    params: &[],
    example: "lossless+bitmap+zstd",
    build: |spec| spec.config::<Nothing>().map(|_| Box::new(Stage::Filter(Box::new(Lossless)))),
};

#[derive(Debug)]
struct Lossless;

impl Filter for Lossless {
    fn wants_lossless(&self) -> bool {
        true
    }
}
