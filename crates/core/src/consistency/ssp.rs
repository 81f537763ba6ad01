//! Stale synchronous parallel: nobody is more than `s` rounds ahead of the slowest.

use super::{Consistency, Decision, MAX_STALENESS, PullView, SyncState};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use serde::Deserialize;
use std::sync::Arc;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "ssp",
    about: "Stale synchronous: a pull waits when the puller is `s` rounds or more ahead of the slowest worker.",
    params: &[Param {
        name: "s",
        default: None,
        about: "Rounds that an answer may lack; 0 to 1000000. 0 waits like bsp.",
    }],
    example: "ssp:s=3",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    s: u64,
}

#[derive(Debug)]
struct Ssp {
    s: u64,
    condition: Arc<str>,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config { s } = spec.config()?;
    check_staleness(spec, "s", s)?;
    Ok(Box::new(Ssp { s, condition: condition(s) }))
}

/// The condition that SSP and its descendants share.
pub(super) fn condition(s: u64) -> Arc<str> {
    format!("progress < v_train + {s}").into()
}

/// Refuses thresholds beyond the largest.
pub(super) fn check_staleness(spec: &Spec, name: &str, value: u64) -> Result<(), SpecError> {
    spec.require(value <= MAX_STALENESS, || format!("{name} = {value}: expected 0 to {MAX_STALENESS}"))
}

impl Consistency for Ssp {
    fn pull(&self, state: &SyncState, pull: &PullView, _rng: &mut Prng) -> Decision {
        Decision::when(state.gap(pull.progress) < self.s as i64, &self.condition)
    }

    fn staleness_bound(&self, _state: &SyncState) -> Option<u64> {
        Some(self.s)
    }
}
