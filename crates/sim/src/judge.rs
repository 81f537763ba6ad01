//! The condition of a scenario, which worker 0 evaluates under `remote:lead`: at most so many iterations ahead of the slowest.

use paramill_core::consistency::Question;
use paramill_core::prng::Prng;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The name of the condition.
pub const CONDITION: &str = "lead";

/// What worker 0 says of pulls, and how long it takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JudgeModel {
    /// Iterations that the puller may be ahead of the slowest worker.
    pub lead: u32,
    /// Time of one evaluation, in milliseconds. There is one after another.
    pub takes_ms: f64,
    /// With this probability an evaluation fails.
    pub fails_p: f64,
}

impl Default for JudgeModel {
    fn default() -> JudgeModel {
        JudgeModel { lead: 2, takes_ms: 0.0, fails_p: 0.0 }
    }
}

impl JudgeModel {
    /// Whether the numbers can be used; the error says why not.
    pub fn check(&self) -> Result<(), String> {
        for (name, value, max) in [("takes_ms", self.takes_ms, 1e9), ("fails_p", self.fails_p, 1.0)] {
            if !(0.0..=max).contains(&value) {
                return Err(format!("judge.{name} = {value}: expected a number from 0 to {max:e}"));
            }
        }
        Ok(())
    }

    /// The time of one evaluation.
    pub fn takes(&self) -> Duration {
        Duration::from_secs_f64(self.takes_ms * 1e-3)
    }

    /// Whether the pull may be answered; `None` when the condition fails.
    pub fn verdict(&self, seed: u64, question: &Question) -> Option<bool> {
        let fails =
            self.fails_p > 0.0 && Prng::fork(seed ^ 0x006A_7564, question.number).chance(self.fails_p);
        (!fails).then(|| question.progress - question.slowest() <= i64::from(self.lead))
    }
}
