//! Drop stragglers: a round closes with its first few gradients.

use super::{Admit, Apply, Close, Consistency, Decision, PullView, SyncState};
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use crate::types::Clock;
use serde::Deserialize;
use std::sync::Arc;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "drop",
    about: "Synchronous without stragglers: a round closes when `n` workers have pushed it, later gradients are late.",
    params: &[
        Param {
            name: "n",
            default: None,
            about: "Workers whose pushes close a round; at least 1. More than there are counts as all.",
        },
        Param {
            name: "late",
            default: Some("drop"),
            about: "A gradient of a closed round: `drop`, or `apply` it in the open round, which it does not help to close.",
        },
    ],
    example: "drop:n=3",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    n: u32,
    #[serde(default)]
    late: Late,
}

/// What becomes of a gradient whose round is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Late {
    #[default]
    Drop,
    Apply,
}

impl Late {
    /// Where a gradient stamped `clock` goes, where a round makes one step.
    pub(super) fn admit(self, clock: Clock, v_train: Clock) -> Admit {
        match self {
            Late::Drop if clock < v_train => Admit::Late,
            Late::Drop | Late::Apply => Admit::Round(clock.max(v_train)),
        }
    }
}

#[derive(Debug)]
struct DropStragglers {
    n: u32,
    late: Late,
    condition: Arc<str>,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let Config { n, late } = spec.config()?;
    spec.require(n >= 1, || format!("n = {n}: expected at least 1"))?;
    Ok(Box::new(DropStragglers { n, late, condition: "progress < v_train".into() }))
}

impl Consistency for DropStragglers {
    fn pull(&self, state: &SyncState, pull: &PullView, _rng: &mut Prng) -> Decision {
        Decision::when(state.gap(pull.progress) < 0, &self.condition)
    }

    fn closes(&self, state: &SyncState) -> Close {
        if state.count() >= self.n { Close::Now } else { Close::No }
    }

    fn apply(&self) -> Apply {
        Apply::OnRound
    }

    fn admit(&self, clock: Clock, v_train: Clock) -> Admit {
        self.late.admit(clock, v_train)
    }

    fn staleness_bound(&self, _state: &SyncState) -> Option<u64> {
        Some(0)
    }

    fn version_needed(&self, clock: Clock) -> Option<Clock> {
        Some(clock)
    }
}

#[cfg(test)]
mod tests {
    use crate::consistency::{SyncPolicy, axis};

    #[test]
    fn parameters_are_checked() {
        for (text, expected) in [
            ("drop", "missing field `n`"),
            ("drop:n=0", "n = 0: expected at least 1"),
            ("drop:n=3,late=keep", "unknown variant `keep`, expected `drop` or `apply`"),
        ] {
            let error = SyncPolicy::parse(&axis(), text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
