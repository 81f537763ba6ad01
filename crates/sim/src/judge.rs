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
                return Err(format!("judge.{name} = {value}: expected a number from 0 to {max}"));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Report, run_scenario};
    use crate::scenario::Scenario;
    use paramill_core::policy::Axis;

    /// Three workers, of which the last is four times slower.
    fn run(sync: &str, aggregators: u32, faults: &[&str], judge: JudgeModel) -> Report {
        let faults = faults.iter().chain(&["worker=2:slow=4x"]).map(|&fault| fault.to_owned()).collect();
        let base = Scenario::new(3, 2, 100).with(Axis::Sync, sync);
        let report = run_scenario(&Scenario { aggregators, faults, judge, ..base }).unwrap();
        // Worker 0 may have died.
        assert!(report.workers[1..].iter().all(|worker| worker.finished_s.is_some()), "{report:?}");
        report
    }

    #[test]
    fn worker_0_keeps_the_others_together() {
        for aggregators in [0, 1] {
            for lead in [1, 4] {
                let judge = JudgeModel { lead, ..JudgeModel::default() };
                let sync = run("remote:lead,deadline=10", aggregators, &[], judge).sync;
                assert!(sync.questions > sync.dprs && sync.dprs > 0 && sync.fallbacks == 0, "{sync:?}");
                // An answer lacks the rounds that the puller is ahead of the slowest.
                assert_eq!(
                    sync.max_staleness,
                    u64::from(lead),
                    "through {aggregators} aggregators: {sync:?}"
                );
            }
        }
    }

    #[test]
    fn the_fallback_takes_the_place_of_one_that_is_late_fails_or_dies() {
        let judge = |takes_ms, fails_p| JudgeModel { lead: 9, takes_ms, fails_p };
        // Short: whoever waits for longer than the slowest worker computes lacks nothing then.
        let sync = "remote:lead,deadline=5ms,fallback=ssp:s=2";
        for (faults, judge) in [
            (&[][..], judge(6.0, 0.0)),
            (&[][..], judge(0.0, 1.0)),
            (&["worker=0:crash@0.1s"][..], judge(0.0, 0.0)),
        ] {
            let sync = run(sync, 0, faults, judge).sync;
            assert!(sync.fallbacks > 0, "{faults:?}: {sync:?}");
        }
        // A condition that is never answered is its fallback.
        let sync = run(sync, 0, &[], judge(6.0, 0.0)).sync;
        assert!(sync.max_staleness == 2 && sync.dprs > 0, "{sync:?}");
    }
}
