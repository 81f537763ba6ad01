//! Probabilistic SSP: a worker that is too far ahead waits only with some probability.

use super::{Consistency, Decision, PullView, SyncState, ssp};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use serde::Deserialize;
use std::sync::Arc;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "pssp",
    about: "Probabilistic stale synchronous: a puller `s` rounds or more ahead waits with a probability, constant (`c`) or growing with its lead (`alpha`).",
    params: &[
        Param { name: "s", default: None, about: "Lead in rounds from which chance decides; 0 to 1000000." },
        Param {
            name: "c",
            default: None,
            about: "Probability to wait, 0 to 1: 0 is asp, 1 is ssp. Give exactly one of c and alpha.",
        },
        Param {
            name: "alpha",
            default: None,
            about: "Scale of the probability alpha / (1 + e^(s - lead)): 0 to 2, or `significance` for |g|/|w| of the puller's last push. Give exactly one of c and alpha.",
        },
    ],
    example: "pssp:s=3,c=0.5",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    s: u64,
    c: Option<f64>,
    alpha: Option<String>,
}

#[derive(Debug)]
struct Pssp {
    s: u64,
    chance: Chance,
    condition: Arc<str>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Chance {
    Constant(f64),
    Dynamic(f64),
    Significance,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config { s, c, alpha } = spec.config()?;
    ssp::check_staleness(spec, "s", s)?;
    let chance = match (c, alpha.as_deref()) {
        (Some(c), None) => {
            spec.require((0.0..=1.0).contains(&c), || format!("c = {c}: expected 0 to 1"))?;
            Chance::Constant(c)
        }
        (None, Some("significance")) => Chance::Significance,
        (None, Some(text)) => {
            let alpha = text.parse().ok().filter(|alpha| (0.0..=2.0).contains(alpha));
            Chance::Dynamic(alpha.ok_or_else(|| {
                spec.parameter_error(format!("alpha = {text}: expected 0 to 2, or `significance`"))
            })?)
        }
        _ => return Err(spec.parameter_error("expected exactly one of c and alpha")),
    };
    let condition = match chance {
        Chance::Constant(c) => format!("progress < v_train + {s} || rand() >= {c}"),
        Chance::Dynamic(alpha) => {
            format!("progress < v_train + {s} || rand() >= {alpha} / (1 + exp({s} - gap))")
        }
        Chance::Significance => {
            format!("progress < v_train + {s} || rand() >= significance / (1 + exp({s} - gap))")
        }
    };
    Ok(Box::new(Pssp { s, chance, condition: condition.into() }))
}

impl Pssp {
    /// The probability to wait at a lead of `gap >= s`: c, or FluentPS's P(s, k).
    fn probability(&self, gap: i64, significance: Option<f64>) -> f64 {
        let alpha = match self.chance {
            Chance::Constant(c) => return c,
            Chance::Dynamic(alpha) => alpha,
            // Not measured yet, for instance right after a switch of models: as cautious as it gets.
            Chance::Significance => significance.unwrap_or(1.0),
        };
        (alpha / (1.0 + (self.s as f64 - gap as f64).exp())).clamp(0.0, 1.0)
    }
}

impl Consistency for Pssp {
    fn pull(&self, state: &SyncState, pull: &PullView, rng: &mut Prng) -> Decision {
        let gap = state.gap(pull.progress);
        // `rand >= P` and not `>`: with rand in [0, 1), P = 0 never waits and P = 1 always does.
        let answer = gap < self.s as i64 || rng.uniform() >= self.probability(gap, pull.significance);
        Decision::when(answer, &self.condition)
    }

    fn wants_significance(&self) -> bool {
        self.chance == Chance::Significance
    }
}
