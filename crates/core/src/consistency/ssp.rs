//! Stale synchronous parallel: nobody is more than `s` rounds ahead of the slowest.

use super::cache::Cache;
use super::{ClientSync, Consistency, Decision, MAX_STALENESS, PullView, SyncState};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use crate::types::Clock;
use serde::Deserialize;
use std::sync::Arc;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "ssp",
    about: "Stale synchronous: a pull waits when the puller is `s` rounds or more ahead of the slowest worker.",
    params: &[
        Param {
            name: "s",
            default: None,
            about: "Rounds that an answer may lack; 0 to 1000000. 0 waits like bsp.",
        },
        Cache::PARAM,
    ],
    example: "ssp:s=3",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    s: u64,
    #[serde(default)]
    cache: Cache,
}

#[derive(Debug)]
struct Ssp {
    s: u64,
    cache: Cache,
    condition: Arc<str>,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config { s, cache } = spec.config()?;
    check_staleness(spec, "s", s)?;
    Ok(Box::new(Ssp { s, cache, condition: condition(s) }))
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

    fn client_sync(&self) -> ClientSync {
        self.cache.client_sync(self.s)
    }

    fn version_needed(&self, clock: Clock) -> Option<Clock> {
        Some(clock.saturating_sub(self.s))
    }
}

#[cfg(test)]
mod tests {
    use crate::consistency::{SyncPolicy, SyncState, axis};

    #[test]
    fn the_threshold_is_checked_and_is_the_bound() {
        let parse = |text| SyncPolicy::parse(&axis(), text);
        let bound = |text| parse(text).unwrap().model.staleness_bound(&SyncState::at(0, &[-1]));
        assert_eq!((bound("ssp:s=0"), bound("ssp:s=1000000")), (Some(0), Some(1_000_000)));
        for (text, expected) in [
            ("ssp", "ssp: missing field `s`, such as in `ssp:s=3`"),
            ("ssp:s=1000001", "ssp: s = 1000001: expected 0 to 1000000"),
            ("ssp:s=-1", "expected a whole number"),
            ("ssp:s=2.5", "expected a whole number"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
