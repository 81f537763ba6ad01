//! Probabilistic SSP: a worker that is too far ahead waits only with some probability.

use super::cache::Cache;
use super::{ClientSync, Consistency, Decision, PullView, SyncState, ssp};
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
        Cache::PARAM,
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
    #[serde(default)]
    cache: Cache,
}

#[derive(Debug)]
struct Pssp {
    s: u64,
    chance: Chance,
    cache: Cache,
    condition: Arc<str>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Chance {
    Constant(f64),
    Dynamic(f64),
    Significance,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config { s, c, alpha, cache } = spec.config()?;
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
    Ok(Box::new(Pssp { s, chance, cache, condition: condition.into() }))
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

    /// Beyond `s` chance decides, and servers draw it.
    fn client_sync(&self) -> ClientSync {
        self.cache.client_sync(self.s)
    }

    fn wants_significance(&self) -> bool {
        self.chance == Chance::Significance
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::{SyncPolicy, axis};
    use crate::types::WorkerId;

    /// How often of 100,000 a puller with this lead waits.
    fn waits(text: &str, gap: i64, significance: Option<f64>) -> f64 {
        let model = SyncPolicy::parse(&axis(), text).unwrap().model;
        let state = SyncState::at(10, &[9]);
        let pull = PullView { worker: WorkerId(0), progress: 10 + gap, significance };
        let mut rng = Prng::new(3);
        let waits = (0..100_000).filter(|_| model.pull(&state, &pull, &mut rng) != Decision::Answer).count();
        waits as f64 / 100_000.0
    }

    #[test]
    fn waits_as_often_as_the_formula_says() {
        let sigmoid = |lead: f64| 1.0 / (1.0 + (-lead).exp());
        for (text, gap, significance, expected) in [
            ("pssp:s=3,c=0.3", 2, None, 0.0),
            ("pssp:s=3,c=0.3", 3, None, 0.3),
            ("pssp:s=3,c=0.3", 50, None, 0.3),
            ("pssp:s=3,c=1", 3, None, 1.0),
            ("pssp:s=3,alpha=0.8", 2, None, 0.0),
            ("pssp:s=3,alpha=0.8", 3, None, 0.4),
            ("pssp:s=3,alpha=0.8", 5, None, 0.8 * sigmoid(2.0)),
            ("pssp:s=3,alpha=2", 1000, None, 1.0),
            ("pssp:s=3,alpha=significance", 3, Some(0.5), 0.25),
            ("pssp:s=3,alpha=significance", 3, Some(7.0), 1.0),
            ("pssp:s=3,alpha=significance", 3, Some(0.0), 0.0),
            ("pssp:s=3,alpha=significance", 3, None, 0.5),
        ] {
            let measured = waits(text, gap, significance);
            let exact = expected == 0.0 || expected == 1.0;
            let tolerance = if exact { 0.0 } else { 0.01 };
            assert!(
                (measured - expected).abs() <= tolerance,
                "{text}, lead {gap}: {measured}, not {expected}"
            );
        }
    }

    #[test]
    fn chance_is_drawn_only_where_it_decides() {
        let model = SyncPolicy::parse(&axis(), "pssp:s=3,c=0.5").unwrap().model;
        let state = SyncState::at(10, &[9]);
        let (mut used, mut fresh) = (Prng::new(8), Prng::new(8));
        for progress in [-1, 9, 12] {
            model.pull(&state, &PullView { worker: WorkerId(0), progress, significance: None }, &mut used);
        }
        assert_eq!(used.next_u64(), fresh.next_u64());
    }

    #[test]
    fn exactly_one_of_c_and_alpha_in_range() {
        for (text, expected) in [
            ("pssp:s=3", "exactly one of c and alpha"),
            ("pssp:s=3,c=0.5,alpha=0.5", "exactly one of c and alpha"),
            ("pssp:s=3,c=1.5", "c = 1.5: expected 0 to 1"),
            ("pssp:s=3,c=NaN", "c = NaN: expected 0 to 1"),
            ("pssp:s=3,alpha=3", "alpha = 3: expected 0 to 2, or `significance`"),
            ("pssp:s=3,alpha=x", "alpha = x: expected 0 to 2, or `significance`"),
            ("pssp:c=0.5", "missing field `s`"),
        ] {
            let error = SyncPolicy::parse(&axis(), text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
