//! Every update is sent at once.

use super::{Criterion, UpdateView};
use crate::registry::Entry;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Criterion> = Entry {
    name: super::NONE,
    about: "Every gradient is sent at once, and parameters are asked for in every iteration.",
    params: &[],
    example: "none",
    build: |spec| Ok(Box::new(spec.config::<Never>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Never {}

impl Criterion for Never {
    fn holds(&self, _update: &UpdateView) -> bool {
        false
    }

    fn holds_nothing(&self) -> bool {
        true
    }
}
