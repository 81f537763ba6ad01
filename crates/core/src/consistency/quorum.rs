//! Quorum: a round closes without workers that are not worth the wait.

use super::psp::{fraction, seconds};
use super::{Admit, Apply, Close, Consistency, Decision, PullView, SyncState};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use crate::types::{Clock, Time};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "quorum",
    about: "Synchronous with those that are in time: a round closes when a fraction `q` of the workers have pushed it and a grace for the others has passed; a worker that falls behind leaves rounds out, and counts again once it is fast enough.",
    params: &[
        Param {
            name: "q",
            default: Some("0.75"),
            about: "Fraction of the live workers that a round needs: `0.75` or `75%`.",
        },
        Param {
            name: "grace",
            default: Some("auto"),
            about: "How long it waits for the others: `auto` until those that are about as fast are expected, by the times that they needed last; or a time, from the last worker of the fraction on: `0.02` (seconds), `20ms`, `2s`.",
        },
        Param {
            name: "late",
            default: Some("drop"),
            about: "A gradient of a closed round: `drop` it, `weigh` it in the open round by 1/(1 + rounds late), or `carry` it there whole. It does not help to close that round.",
        },
    ],
    example: "quorum:q=0.75,grace=auto,late=weigh",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    q: Option<String>,
    grace: Option<String>,
    #[serde(default)]
    late: Late,
}

/// What becomes of a gradient whose round is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Late {
    #[default]
    Drop,
    Weigh,
    Carry,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Grace {
    /// Until the workers that are worth it are expected.
    Auto,
    /// From the quorum's last gradient on.
    Fixed(Duration),
}

#[derive(Debug)]
struct Quorum {
    q: f64,
    grace: Grace,
    late: Late,
    /// Once enough workers have been timed.
    pace: Option<Pace>,
    /// Buffer for the workers' times, used again at every advance.
    times: Vec<f64>,
    condition: Arc<str>,
}

/// The workers that rounds are for: those that together give the most gradients per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Pace {
    /// Seconds per iteration of the slowest of them.
    step_s: f64,
    /// How many they are.
    workers: usize,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config { q, grace, late } = spec.config()?;
    let q = fraction(spec, "q", q.as_deref().unwrap_or("0.75"))?;
    let grace = match grace.as_deref() {
        None | Some("auto") => Grace::Auto,
        Some(time) => Grace::Fixed(seconds(spec, "grace", time)?),
    };
    let condition = "progress < v_train".into();
    Ok(Box::new(Quorum { q, grace, late, pace: None, times: Vec::new(), condition }))
}

impl Quorum {
    /// Workers that a round needs, of so many.
    fn needed(&self, n: u32) -> u32 {
        // The small margin keeps 0.7 of 10 workers at 7 although 0.7 * 10.0 may round above it.
        ((self.q * f64::from(n) - 1e-9).ceil() as u32).max(1)
    }

    /// When the last of the missing workers that rounds are for is overdue.
    ///
    /// To wait for another worker pays as long as it costs less than the gradient that it brings: one more than `m` gradients for
    /// one `m`-th of their time. A worker that is about as fast as the others and out of step with them is waited for once,
    /// for less than an iteration, and is in step from then on.
    fn overdue(&self, state: &SyncState, pace: Pace) -> Close {
        let open = state.v_train();
        let expected = |typical_s: f64, began: Time| began + Duration::from_secs_f64(typical_s);
        let missing =
            state.workers().filter(|(id, worker)| worker.progress() < open as i64 && !state.is_excused(*id));
        let worth_it = missing.filter_map(|(_, worker)| {
            let typical_s = worker.typical_interval_s().unwrap_or(pace.step_s);
            (typical_s <= pace.step_s).then_some(expected(typical_s, state.began(worker)?))
        });
        let margin = Duration::from_secs_f64(pace.step_s / pace.workers as f64);
        worth_it.max().map_or(Close::Now, |last| Close::At(last + margin))
    }
}

impl Pace {
    /// Of the ascending times per iteration of some workers, of whom so many are needed.
    fn of(times: &[f64], needed: usize) -> Option<Pace> {
        let rate = |pace: &Pace| pace.workers as f64 / pace.step_s.max(1e-9);
        let choices = (needed..=times.len()).map(|workers| Pace { step_s: times[workers - 1], workers });
        choices.max_by(|a, b| rate(a).total_cmp(&rate(b)))
    }
}

impl Consistency for Quorum {
    fn pull(&self, state: &SyncState, pull: &PullView, _rng: &mut Prng) -> Decision {
        Decision::when(state.gap(pull.progress) < 0, &self.condition)
    }

    fn closes(&self, state: &SyncState) -> Close {
        if state.count() < self.needed(state.n()) {
            return Close::No;
        }
        match (self.grace, self.pace) {
            (Grace::Fixed(grace), _) => Close::After(grace),
            (Grace::Auto, Some(pace)) => self.overdue(state, pace),
            // Nothing is known of the workers yet: all are waited for.
            (Grace::Auto, None) => Close::No,
        }
    }

    fn apply(&self) -> Apply {
        Apply::OnRound
    }

    fn admit(&self, clock: Clock, v_train: Clock) -> Admit {
        match self.late {
            Late::Drop if clock < v_train => Admit::Late,
            Late::Drop | Late::Weigh | Late::Carry => Admit::Round(clock.max(v_train)),
        }
    }

    fn staleness_bound(&self, _state: &SyncState) -> Option<u64> {
        Some(0)
    }

    fn late_weight(&self, rounds_late: Clock) -> f32 {
        match self.late {
            Late::Weigh => 1.0 / (1.0 + rounds_late as f32),
            Late::Drop | Late::Carry => 1.0,
        }
    }

    fn catches_up(&self) -> bool {
        true
    }

    fn version_needed(&self, clock: Clock) -> Option<Clock> {
        Some(clock)
    }

    fn observe(&mut self, state: &SyncState) {
        if self.grace != Grace::Auto {
            return;
        }
        self.times.clear();
        self.times.extend(state.workers().filter_map(|(_, worker)| worker.typical_interval_s()));
        self.times.sort_unstable_by(f64::total_cmp);
        self.pace = Pace::of(&self.times, self.needed(state.n()) as usize);
    }

    /// Workers may have been timed again since the version advanced.
    fn memory(&self) -> Vec<u8> {
        postcard::to_allocvec(&self.pace).expect("two numbers")
    }

    fn recall(&mut self, memory: &[u8]) -> Result<(), String> {
        let pace: Option<Pace> = postcard::from_bytes(memory).map_err(|error| error.to_string())?;
        if pace.is_some_and(|pace| pace.workers == 0 || !(0.0..=1e9).contains(&pace.step_s)) {
            return Err(format!("workers cannot be as fast as {pace:?}"));
        }
        self.pace = pace;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::{SyncPolicy, axis};

    #[test]
    fn parameters_are_checked() {
        for (text, expected) in [
            ("quorum:q=0", "q = 0: expected a fraction above 0 and at most 1"),
            ("quorum:q=76", "q = 76: expected"),
            ("quorum:grace=soon", "grace = soon: expected 0 to 3600 seconds"),
            ("quorum:late=apply", "unknown variant `apply`, expected one of `drop`, `weigh`, `carry`"),
        ] {
            let error = SyncPolicy::parse(&axis(), text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(SyncPolicy::parse(&axis(), "quorum").is_ok(), "everything has a default");
    }

    #[test]
    fn a_quorum_is_a_fraction_of_the_live_workers() {
        let needed = |text: &str, n| {
            let q = fraction(&Spec::parse("quorum").unwrap(), "q", text).unwrap();
            let (grace, late, condition) = (Grace::Auto, Late::Drop, "".into());
            Quorum { q, grace, late, pace: None, times: Vec::new(), condition }.needed(n)
        };
        assert_eq!([1, 2, 3, 4, 8, 100].map(|n| needed("75%", n)), [1, 2, 3, 3, 6, 75]);
        assert_eq!([1, 10, 1000].map(|n| needed("0.7", n)), [1, 7, 700]);
        assert_eq!([0, 1, 7].map(|n| needed("1", n)), [1, 1, 7]);
    }

    #[test]
    fn rounds_are_for_the_workers_that_give_the_most_gradients_per_second() {
        let pace = |times: &[f64], needed| Pace::of(times, needed).map(|pace| (pace.workers, pace.step_s));
        assert_eq!(pace(&[1.0; 8], 6), Some((8, 1.0)));
        let with_last = |last| pace(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, last], 6);
        assert_eq!(
            with_last(5.0),
            Some((7, 1.0)),
            "it costs four times what the others need, and brings a seventh"
        );
        assert_eq!(
            (with_last(1.13), with_last(1.15)),
            (Some((8, 1.13)), Some((7, 1.0))),
            "a seventh is the limit"
        );
        assert_eq!(pace(&[1.0, 5.0, 5.0, 5.0], 3), Some((4, 5.0)), "a quorum is waited for, however slow");
        assert_eq!((pace(&[1.0], 2), pace(&[0.0, 0.0], 1)), (None, Some((2, 0.0))));
    }

    #[test]
    fn only_weighed_gradients_weigh_less() {
        let weights = |text: &str| {
            let model = SyncPolicy::parse(&axis(), text).unwrap().model;
            [0, 1, 3].map(|late| model.late_weight(late))
        };
        assert_eq!(weights("quorum:late=weigh"), [1.0, 0.5, 0.25]);
        assert_eq!((weights("quorum:late=carry"), weights("quorum")), ([1.0; 3], [1.0; 3]));
    }
}
