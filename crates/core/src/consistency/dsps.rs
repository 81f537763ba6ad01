//! DSPS: SSP whose threshold follows the workers' speeds.

use super::cache::Cache;
use super::{ClientSync, Consistency, Decision, PullView, SyncState, ssp};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use serde::Deserialize;
use std::sync::Arc;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "dsps",
    about: "Dynamic stale synchronous: ssp whose `s` moves between `min` and `max` with the spread of the workers' speeds.",
    params: &[
        Param {
            name: "min",
            default: Some("1"),
            about: "`s` when all workers are equally fast; 0 to 1000000.",
        },
        Param {
            name: "max",
            default: Some("8"),
            about: "`s` when the slowest has come to a halt; `min` to 1000000.",
        },
        Cache::PARAM,
    ],
    example: "dsps:min=1,max=8",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default = "default_min")]
    min: u64,
    #[serde(default = "default_max")]
    max: u64,
    #[serde(default)]
    cache: Cache,
}

fn default_min() -> u64 {
    1
}

fn default_max() -> u64 {
    8
}

#[derive(Debug)]
struct Dsps {
    min: u64,
    max: u64,
    s: u64,
    cache: Cache,
    condition: Arc<str>,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config { min, max, cache } = spec.config()?;
    ssp::check_staleness(spec, "max", max)?;
    spec.require(min <= max, || format!("min = {min}: expected at most max = {max}"))?;
    Ok(Box::new(Dsps { min, max, s: min, cache, condition: ssp::condition(min) }))
}

impl Consistency for Dsps {
    fn pull(&self, state: &SyncState, pull: &PullView, _rng: &mut Prng) -> Decision {
        Decision::when(state.gap(pull.progress) < self.s as i64, &self.condition)
    }

    fn staleness_bound(&self, _state: &SyncState) -> Option<u64> {
        Some(self.s)
    }

    /// Servers never allow less than `min`, and a worker does not know what they allow at the moment.
    fn client_sync(&self) -> ClientSync {
        self.cache.client_sync(self.min)
    }

    /// The share of its time that the fastest worker would wait in lockstep is what slack can win back, so `s` goes from `min` to
    /// `max` with it: equal workers read fresh parameters, unequal ones wait less.
    fn observe(&mut self, state: &SyncState) {
        let s = self.min + ((self.max - self.min) as f64 * state.imbalance()).round() as u64;
        if s != self.s {
            self.s = s;
            self.condition = ssp::condition(s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::{SyncPolicy, axis};
    use crate::types::{Time, WorkerId};

    /// The threshold after workers were seen to need these seconds for an iteration.
    fn threshold(text: &str, intervals_s: &[f64]) -> u64 {
        let mut model = SyncPolicy::parse(&axis(), text).unwrap().model;
        let mut state = SyncState::at(0, &vec![-1; intervals_s.len()]);
        for (rank, &interval_s) in intervals_s.iter().enumerate() {
            state.answered(Time::ZERO, WorkerId(rank as u32), -1);
            state.pushed(Time::from_secs_f64(interval_s), WorkerId(rank as u32), 0, None);
        }
        state.measure();
        model.observe(&state);
        model.staleness_bound(&state).unwrap()
    }

    #[test]
    fn the_threshold_follows_the_spread_of_speeds() {
        for (intervals_s, s) in [
            (&[1.0, 1.0, 1.0][..], 1),
            (&[1.0, 2.0], 5), // 1 + 7 * 1/2 = 4.5
            (&[1.0, 4.0], 6), // 1 + 7 * 3/4 = 6.25
            (&[1.0, 1.0, 100.0], 8),
            (&[], 1),
        ] {
            assert_eq!(threshold("dsps:min=1,max=8", intervals_s), s, "{intervals_s:?}");
        }
        assert_eq!(threshold("dsps:min=3,max=3", &[1.0, 9.0]), 3);
    }

    #[test]
    fn bounds_are_checked() {
        for (text, expected) in [
            ("dsps:min=9", "min = 9: expected at most max = 8"),
            ("dsps:max=2000000", "max = 2000000: expected 0 to 1000000"),
        ] {
            let error = SyncPolicy::parse(&axis(), text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
