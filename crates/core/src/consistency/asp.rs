//! Asynchronous parallel: nobody waits.

use super::{Consistency, Decision, PullView, SyncState};
use crate::prng::Prng;
use crate::registry::Entry;
use crate::spec::{Spec, SpecError};
use crate::types::Clock;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "asp",
    about: "Asynchronous: every pull is answered at once, every gradient is a step at once.",
    params: &[],
    example: "asp",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

#[derive(Debug)]
struct Asp;

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config {} = spec.config()?;
    Ok(Box::new(Asp))
}

impl Consistency for Asp {
    fn pull(&self, _state: &SyncState, _pull: &PullView, _rng: &mut Prng) -> Decision {
        Decision::Answer
    }

    fn version_needed(&self, _clock: Clock) -> Option<Clock> {
        Some(0)
    }
}
