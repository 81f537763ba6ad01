//! Conditions of the user's own, as expressions.

use super::drop::Late;
use super::{Admit, Apply, Close, Consistency, Decision, PullView, SyncState};
use crate::expression::{Condition, Scope};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use crate::types::Clock;
use serde::Deserialize;
use std::sync::Arc;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "when",
    about: "Conditions of your own, as expressions; every gradient is a step at once, or a round makes one. A pull condition alone may be written without `when:pull=`.",
    params: &[
        Param {
            name: "pull",
            default: None,
            about: "Answer a pull at once when this holds. Variables: progress (the puller's last iteration), v_train (version here), gap (progress - v_train), staleness (rounds an answer would lack), significance (|g|/|w| of its last push), n (live workers), count (those that pushed round v_train), fastest, slowest (progress of these workers), imbalance (share of its time that the fastest worker would wait in lockstep). Functions: rand() min max abs exp sqrt floor if(condition, a, b).",
        },
        Param {
            name: "push",
            default: Some("count >= n"),
            about: "Close the open round when this holds, or when every live worker has pushed it. Variables: v_train, n, count, fastest, slowest, imbalance; the functions of `pull` but rand().",
        },
        Param {
            name: "step",
            default: Some("arrival"),
            about: "When gradients become steps: each on its `arrival`, or those of a `round` together when it closes.",
        },
        Param {
            name: "late",
            default: Some("drop"),
            about: "With `step=round`, a gradient of a closed round: `drop`, or `apply` it in the open round, which it does not help to close.",
        },
    ],
    example: "when:pull=progress < v_train + 3 || rand() > 0.5,push=count >= n - 1",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    pull: String,
    push: Option<String>,
    #[serde(default)]
    step: Step,
    late: Option<Late>,
}

/// What makes a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Step {
    #[default]
    Arrival,
    Round,
}

#[derive(Debug)]
struct When {
    pull: Condition,
    push: Option<Condition>,
    step: Step,
    late: Late,
    text: Arc<str>,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let config: Config = spec.config()?;
    let parse = |name: &str, text: &str, scope| {
        Condition::parse(text, scope)
            .map_err(|error| spec.parameter_error(format!("in the {name} condition `{text}`, {error}")))
    };
    let pull = parse("pull", &config.pull, Scope::Pull)?;
    let push = config.push.as_deref().map(|text| parse("push", text, Scope::Push)).transpose()?;
    let (step, late) = (config.step, config.late);
    spec.require(late.is_none_or(|late| late == Late::Drop) || step == Step::Round, || {
        "late = apply is for rounds that make one step: add `step=round`; without it every gradient is a step on arrival".into()
    })?;
    Ok(Box::new(When { pull, push, step, late: late.unwrap_or_default(), text: config.pull.into() }))
}

impl Consistency for When {
    fn pull(&self, state: &SyncState, pull: &PullView, rng: &mut Prng) -> Decision {
        Decision::when(self.pull.holds_for_pull(state, pull, rng), &self.text)
    }

    fn closes(&self, state: &SyncState) -> Close {
        match &self.push {
            Some(push) if push.holds_for_push(state) => Close::Now,
            _ => Close::No,
        }
    }

    fn apply(&self) -> Apply {
        match self.step {
            Step::Arrival => Apply::OnArrival,
            Step::Round => Apply::OnRound,
        }
    }

    fn admit(&self, clock: Clock, v_train: Clock) -> Admit {
        match self.step {
            Step::Arrival => Admit::Now,
            Step::Round => self.late.admit(clock, v_train),
        }
    }

    fn wants_significance(&self) -> bool {
        self.pull.uses_significance()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expression::{FUNCTIONS, PULL_VARIABLES, VARIABLES};

    #[test]
    fn the_manual_names_everything_that_can_be_used() {
        let [pull, push, ..] = ENTRY.params else { panic!("pull and push") };
        for (name, _) in VARIABLES {
            assert!(pull.about.contains(name) && push.about.contains(name), "{name}");
        }
        for (name, _) in PULL_VARIABLES.iter().chain(FUNCTIONS) {
            assert!(pull.about.contains(name.split('(').next().unwrap()), "{name}");
        }
    }

    #[test]
    fn late_gradients_are_a_matter_of_rounds() {
        let error = build(&Spec::parse("when:pull=true,late=apply").unwrap()).unwrap_err().to_string();
        assert!(error.contains("late = apply is for rounds that make one step: add `step=round`"), "{error}");
        assert!(build(&Spec::parse("when:pull=true,late=apply,step=round").unwrap()).is_ok());
    }

    #[test]
    fn significance_is_measured_when_spoken_of() {
        let wants = |text: &str| build(&Spec::parse(text).unwrap()).unwrap().wants_significance();
        assert!(wants("when:pull=significance < 0.01"));
        assert!(!wants("when:pull=gap < 3"));
    }
}
