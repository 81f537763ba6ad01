//! A pull that a condition outside of the server judges, with all that the condition may look at.

use super::state::imbalance;
use super::{PullView, SyncState};
use crate::limits;
use crate::types::{Clock, WorkerId};
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// One pull and the state of its table on the shard that asks: may the pull be answered now?
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Question {
    /// The verdict repeats it. The shard counts the questions of each table.
    pub number: u64,
    /// The name of the condition.
    pub condition: String,
    /// The shard decides by itself when so much time has passed.
    pub deadline: Duration,
    /// The worker that asks for parameters.
    pub worker: WorkerId,
    /// The last iteration that it completed; -1 when none.
    pub progress: i64,
    /// `|g| / |w|` of its last push, when measured.
    pub significance: Option<f64>,
    /// The table's version on the shard: every round below it is closed.
    pub v_train: Clock,
    /// Live workers.
    pub n: u32,
    /// Of these, the ones that have pushed the open round, which is round `v_train`.
    pub count: u32,
    /// All workers that take part, by rank.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pub workers: Vec<WorkerProgress>,
}

/// How far a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WorkerProgress {
    /// Its rank.
    pub worker: WorkerId,
    /// The last iteration that it pushed; -1 when none.
    pub progress: i64,
    /// Seconds that it needs for an iteration, on average, when known.
    pub interval_s: Option<f64>,
}

impl Question {
    /// A question about this pull.
    pub(super) fn new(
        number: u64,
        condition: &str,
        deadline: Duration,
        state: &SyncState,
        pull: &PullView,
    ) -> Question {
        let workers = state.workers().map(|(worker, known)| WorkerProgress {
            worker,
            progress: known.progress(),
            interval_s: known.interval_s(),
        });
        Question {
            number,
            condition: condition.to_owned(),
            deadline,
            worker: pull.worker,
            progress: pull.progress,
            significance: pull.significance,
            v_train: state.v_train(),
            n: state.n(),
            count: state.count(),
            workers: workers.collect(),
        }
    }

    /// Progress of the worker that is furthest behind, -1 before its first push.
    pub fn slowest(&self) -> i64 {
        self.workers.iter().map(|worker| worker.progress).min().unwrap_or(-1)
    }

    /// Progress of the worker that is furthest ahead, -1 when none has pushed.
    pub fn fastest(&self) -> i64 {
        self.workers.iter().map(|worker| worker.progress).max().unwrap_or(-1)
    }

    /// The share of its time that the fastest worker would wait for the slowest in lockstep, by their seconds per iteration; 0 when
    /// they are not known.
    pub fn imbalance(&self) -> f64 {
        imbalance(self.workers.iter().filter_map(|worker| worker.interval_s))
    }

    /// How far the puller is ahead of the version.
    pub fn gap(&self) -> i64 {
        self.progress.saturating_sub(i64::try_from(self.v_train).unwrap_or(i64::MAX))
    }

    /// Rounds that an answer would lack.
    pub fn staleness(&self) -> u64 {
        u64::try_from(self.gap().saturating_add(1)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expression::{PULL_VARIABLES, VARIABLES};

    #[test]
    fn a_question_shows_what_expressions_see() {
        let state = SyncState::at(5, &[4, 7, 5]);
        let pull = PullView { worker: WorkerId(1), progress: 7, significance: Some(0.25) };
        let question = Question::new(3, "near", Duration::from_millis(5), &state, &pull);
        let value = |name: &str| match name {
            "v_train" => question.v_train as f64,
            "n" => f64::from(question.n),
            "count" => f64::from(question.count),
            "fastest" => question.fastest() as f64,
            "slowest" => question.slowest() as f64,
            "imbalance" => question.imbalance(),
            "progress" => question.progress as f64,
            "gap" => question.gap() as f64,
            "staleness" => question.staleness() as f64,
            "significance" => question.significance.unwrap(),
            other => panic!("a question does not show `{other}`"),
        };
        let values: Vec<f64> = VARIABLES.iter().chain(PULL_VARIABLES).map(|(name, _)| value(name)).collect();
        assert_eq!(values, [5.0, 3.0, 2.0, 7.0, 4.0, 0.0, 7.0, 2.0, 3.0, 0.25]);
        let progress: Vec<(u32, i64)> =
            question.workers.iter().map(|known| (known.worker.0, known.progress)).collect();
        assert_eq!(progress, [(0, 4), (1, 7), (2, 5)]);
    }
}
