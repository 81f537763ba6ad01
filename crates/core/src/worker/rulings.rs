//! Pulls that servers ask about: the application evaluates their conditions.

use crate::consistency::Question;
use crate::limits;
use crate::types::{ShardId, TableId, Time};
use std::collections::{BTreeSet, VecDeque};

/// A pull that a server asks about.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The shard that asks.
    pub shard: ShardId,
    /// The table that is pulled.
    pub table: TableId,
    /// Its name; where small tables travel together, that of their pack.
    pub table_name: String,
    /// The pull, and the state of the table on the shard.
    pub question: Question,
}

/// The conditions of the application, and what they are to judge.
#[derive(Debug, Default)]
pub(super) struct Rulings {
    conditions: BTreeSet<String>,
    /// Each with the time until which the server waits.
    asked: VecDeque<(Time, Asked)>,
    /// Workers that these tell of.
    workers: usize,
    /// Conditions that servers asked for, and that nobody evaluates; a few of them.
    unknown: BTreeSet<String>,
}

/// Unknown conditions that are told of.
const MOST_UNKNOWN: usize = 16;

impl Rulings {
    /// The application evaluates conditions of this name.
    pub(super) fn judge(&mut self, condition: &str) {
        self.conditions.insert(condition.to_owned());
    }

    /// Whether nobody evaluates conditions of this name, and it was not asked for before.
    pub(super) fn is_unheard_of(&mut self, condition: &str) -> bool {
        !self.conditions.contains(condition)
            && self.unknown.len() < MOST_UNKNOWN
            && self.unknown.insert(condition.to_owned())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.asked.is_empty()
    }

    /// Files a question. False when nobody will answer it.
    pub(super) fn ask(&mut self, now: Time, asked: Asked) -> bool {
        let is_known = self.conditions.contains(&asked.question.condition);
        let workers = self.workers + asked.question.workers.len();
        if !is_known || self.asked.len() >= limits::MAX_QUESTIONS || workers > limits::MAX_QUESTION_WORKERS {
            return false;
        }
        self.workers = workers;
        self.asked.push_back((now + asked.question.deadline.min(limits::LONGEST_QUESTION), asked));
        true
    }

    /// The next question, and whether the server still waits for it.
    pub(super) fn poll(&mut self, now: Time) -> Option<(Asked, bool)> {
        let (until, asked) = self.asked.pop_front()?;
        self.workers -= asked.question.workers.len();
        Some((asked, now < until))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::WorkerProgress;
    use crate::types::{ServerId, WorkerId};
    use std::time::Duration;

    fn asked(number: u64, condition: &str) -> Asked {
        let question = Question {
            number,
            condition: condition.into(),
            deadline: Duration::from_millis(100),
            worker: WorkerId(1),
            progress: 3,
            significance: None,
            v_train: 2,
            n: 2,
            count: 1,
            workers: Vec::new(),
        };
        Asked {
            shard: ShardId { server: ServerId(0), core: 0 },
            table: TableId(0),
            table_name: "w".into(),
            question,
        }
    }

    #[test]
    fn questions_come_in_order_while_somebody_waits_for_the_answer() {
        let mut rulings = Rulings::default();
        rulings.judge("near");
        let times = [0.0, 0.05, 0.06].map(Time::from_secs_f64);
        assert!(times.iter().zip(1..).all(|(&now, number)| rulings.ask(now, asked(number, "near"))));
        assert!(!rulings.ask(times[2], asked(4, "far")), "nobody evaluates it");
        let mut polled = |seconds: f64| {
            let (asked, is_waited_for) = rulings.poll(Time::from_secs_f64(seconds))?;
            Some((asked.question.number, is_waited_for))
        };
        assert_eq!([0.1, 0.1, 0.12].map(&mut polled), [Some((1, false)), Some((2, true)), Some((3, true))]);
        assert_eq!((rulings.poll(Time::ZERO), rulings.is_empty()), (None, true));
    }

    #[test]
    fn there_is_an_end_to_questions() {
        let mut rulings = Rulings::default();
        rulings.judge("near");
        let taken = (0..5000).filter(|&number| rulings.ask(Time::ZERO, asked(number, "near"))).count();
        assert_eq!(taken, limits::MAX_QUESTIONS);

        let mut rulings = Rulings::default();
        rulings.judge("near");
        let known = WorkerProgress { worker: WorkerId(0), progress: 0, interval_s: None };
        let mut large = asked(1, "near");
        large.question.workers = vec![known; limits::MAX_QUESTION_WORKERS / 4];
        large.question.deadline = Duration::MAX;
        let taken = (0..9).filter(|_| rulings.ask(Time::ZERO, large.clone())).count();
        assert_eq!(taken, 4, "they tell of too many workers");
        let late = Time::ZERO + limits::LONGEST_QUESTION;
        assert!(rulings.poll(late).is_some_and(|(_, is_waited_for)| !is_waited_for));
        assert!(rulings.ask(late, large), "there is room again");
    }

    #[test]
    fn a_condition_that_nobody_evaluates_is_told_of_once() {
        let mut rulings = Rulings::default();
        rulings.judge("near");
        assert_eq!(["near", "far", "far"].map(|name| rulings.is_unheard_of(name)), [false, true, false]);
        let told = (0..99).filter(|number| rulings.is_unheard_of(&number.to_string())).count();
        assert_eq!(told, MOST_UNKNOWN - 1);
    }
}
