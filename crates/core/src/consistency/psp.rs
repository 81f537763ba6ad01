//! PSP-SGD: partial pushing on servers, partial pulling on workers (Algorithm 1).

use super::{
    Admit, Apply, ClientSync, Close, Consistency, Decision, PartialPull, PullView, ServerPush, SyncState,
};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use crate::types::Clock;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "psp",
    about: "Partially synchronous: a round closes `tau1` after `c` gradients or when all are here, a worker goes on `tau2` after a fraction `b` of the blocks or when all are here; linear scaling of the learning rate.",
    params: &[
        Param {
            name: "c",
            default: None,
            about: "Gradients that a round needs; at least 1. As many as there are workers, or more, counts as all.",
        },
        Param {
            name: "b",
            default: Some("1"),
            about: "Fraction of the blocks that a worker needs: `0.9` or `90%`.",
        },
        Param {
            name: "tau1",
            default: Some("0"),
            about: "How long a server waits for more gradients: `0.02` (seconds), `20ms`, `2s`.",
        },
        Param {
            name: "tau2",
            default: Some("0"),
            about: "How long a worker waits for more blocks: `0.02` (seconds), `20ms`, `2s`.",
        },
    ],
    example: "psp:c=28,b=0.9,tau1=0,tau2=0",
    build,
};

/// The longest that `tau1` and `tau2` can be.
const MAX_TAU_S: f64 = 3600.0;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    c: u32,
    b: Option<String>,
    tau1: Option<String>,
    tau2: Option<String>,
}

#[derive(Debug)]
struct Psp {
    c: u32,
    tau1: Duration,
    partial_pull: PartialPull,
    condition: Arc<str>,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config { c, b, tau1, tau2 } = spec.config()?;
    spec.require(c >= 1, || format!("c = {c}: expected at least 1"))?;
    let fraction = fraction(spec, "b", b.as_deref().unwrap_or("1"))?;
    let tau1 = seconds(spec, "tau1", tau1.as_deref().unwrap_or("0"))?;
    let tau2 = seconds(spec, "tau2", tau2.as_deref().unwrap_or("0"))?;
    let partial_pull = PartialPull { fraction, tau2 };
    Ok(Box::new(Psp { c, tau1, partial_pull, condition: "progress < v_train".into() }))
}

/// Reads `0.9` or `90%`.
pub(super) fn fraction(spec: &Spec, name: &str, text: &str) -> Result<f64, SpecError> {
    let value: Option<f64> = match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse().ok().map(|percent: f64| percent / 100.0),
        None => text.parse().ok(),
    };
    value.filter(|&value| value > 0.0 && value <= 1.0).ok_or_else(|| {
        spec.parameter_error(format!(
            "{name} = {text}: expected a fraction above 0 and at most 1, or above 0% to 100%"
        ))
    })
}

/// Reads `0.02` (seconds), `20ms` or `2s`.
pub(super) fn seconds(spec: &Spec, name: &str, text: &str) -> Result<Duration, SpecError> {
    let (number, scale) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(number), _) => (number, 1e-3),
        (None, Some(number)) => (number, 1.0),
        (None, None) => (text, 1.0),
    };
    let value: Option<f64> = number.trim().parse().ok().map(|number: f64| number * scale);
    let value = value.filter(|value| (0.0..=MAX_TAU_S).contains(value)).ok_or_else(|| {
        spec.parameter_error(format!(
            "{name} = {text}: expected 0 to {MAX_TAU_S} seconds, as `0.02`, `20ms` or `2s`"
        ))
    })?;
    Ok(Duration::from_secs_f64(value))
}

impl Consistency for Psp {
    fn pull(&self, state: &SyncState, pull: &PullView, _rng: &mut Prng) -> Decision {
        Decision::when(state.gap(pull.progress) < 0, &self.condition)
    }

    /// With `c` at all workers only their pushes close a round, so that psp is bsp then: a gradient of a worker that
    /// runs ahead does not stand in for one that is missing.
    fn closes(&self, state: &SyncState) -> Close {
        if self.c < state.n() && state.contributions() >= self.c {
            Close::After(self.tau1)
        } else {
            Close::No
        }
    }

    fn apply(&self) -> Apply {
        Apply::OnRound
    }

    /// Algorithm 1, lines 7 to 11: what is stamped ahead of the server counts in the open round.
    fn admit(&self, clock: Clock, v_train: Clock) -> Admit {
        if clock < v_train { Admit::Late } else { Admit::Round(v_train) }
    }

    fn staleness_bound(&self, _state: &SyncState) -> Option<u64> {
        Some(0)
    }

    /// The linear scaling rule. The paper's step is `d * eta` with `eta` the rate of one worker; here the rate is the
    /// job's, with all N workers, so that the factor is `d / N`.
    fn lr_factor(&self, contributions: u32, n: u32) -> f32 {
        if contributions == n { 1.0 } else { contributions as f32 / n.max(1) as f32 }
    }

    fn client_sync(&self) -> ClientSync {
        ClientSync::Partial(self.partial_pull)
    }

    /// Algorithm 1, worker, line 10: a block older than the iteration at hand is dropped.
    fn after_server_push(&self, push: &ServerPush) -> bool {
        push.version >= push.clock || !self.partial_pull.leaves_blocks_out()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::{SyncPolicy, axis};

    #[test]
    fn fractions_and_times_in_every_notation() {
        for (text, fraction, tau2_ms) in [
            ("psp:c=28", 1.0, 0),
            ("psp:c=28,b=0.9", 0.9, 0),
            ("psp:c=28,b=90%,tau2=20ms", 0.9, 20),
            ("psp:c=28,b=100%,tau2=2s", 1.0, 2000),
            ("psp:c=28,tau2=0.5", 1.0, 500),
        ] {
            let partial = SyncPolicy::parse(&axis(), text).unwrap().model.client_sync();
            let expected = PartialPull { fraction, tau2: Duration::from_millis(tau2_ms) };
            assert_eq!(partial, ClientSync::Partial(expected), "{text}");
        }
    }

    #[test]
    fn parameters_are_checked() {
        for (text, expected) in [
            ("psp", "missing field `c`"),
            ("psp:c=0", "c = 0: expected at least 1"),
            ("psp:c=2,b=0", "b = 0: expected a fraction above 0 and at most 1"),
            ("psp:c=2,b=101%", "b = 101%: expected"),
            ("psp:c=2,b=half", "b = half: expected"),
            ("psp:c=2,tau1=-1", "tau1 = -1: expected 0 to 3600 seconds"),
            ("psp:c=2,tau2=1h", "tau2 = 1h: expected"),
            ("psp:c=2,tau2=NaN", "tau2 = NaN: expected"),
        ] {
            let error = SyncPolicy::parse(&axis(), text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn the_learning_rate_scales_with_the_gradients() {
        let model = SyncPolicy::parse(&axis(), "psp:c=2").unwrap().model;
        assert_eq!([1, 2, 3, 4].map(|d| model.lr_factor(d, 4)), [0.25, 0.5, 0.75, 1.0]);
        assert_eq!((model.lr_factor(0, 4), model.lr_factor(6, 4), model.lr_factor(1, 0)), (0.0, 1.5, 1.0));
        // Exactly 1 for every number of workers.
        assert!((1..5000).all(|n| model.lr_factor(n, n) == 1.0));
    }
}
