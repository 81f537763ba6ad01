//! Bulk synchronous parallel: nobody is ahead of anybody.

use super::{Apply, Consistency, Decision, PullView, SyncState};
use crate::prng::Prng;
use crate::registry::Entry;
use crate::spec::{Spec, SpecError};
use crate::types::Clock;
use serde::Deserialize;
use std::sync::Arc;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "bsp",
    about: "Bulk synchronous: a pull waits until every worker has pushed the puller's iteration; one step a round.",
    params: &[],
    example: "bsp",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

#[derive(Debug)]
struct Bsp {
    condition: Arc<str>,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config {} = spec.config()?;
    Ok(Box::new(Bsp { condition: "progress < v_train".into() }))
}

impl Consistency for Bsp {
    fn pull(&self, state: &SyncState, pull: &PullView, _rng: &mut Prng) -> Decision {
        Decision::when(state.gap(pull.progress) < 0, &self.condition)
    }

    fn apply(&self) -> Apply {
        Apply::OnRound
    }

    fn waits_for_all(&self) -> bool {
        true
    }

    fn staleness_bound(&self, _state: &SyncState) -> Option<u64> {
        Some(0)
    }

    fn version_needed(&self, clock: Clock) -> Option<Clock> {
        Some(clock)
    }
}
