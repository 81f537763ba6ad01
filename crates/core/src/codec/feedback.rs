//! Error feedback: what a chain fails to send is added to the next values.

use super::{Filter, Stage};
use crate::registry::Entry;
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "ef",
    about: "Error feedback: what was not sent is kept, and added to the next values.",
    params: &[],
    example: "ef+int8",
    build: |spec| spec.config::<Nothing>().map(|_| Box::new(Stage::Filter(Box::new(Feedback)))),
};

/// The config of components without parameters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Nothing {}

#[derive(Debug)]
struct Feedback;

impl Filter for Feedback {
    fn wants_residual(&self) -> bool {
        true
    }
}
