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
}

impl Rulings {
    /// The application evaluates conditions of this name.
    pub(super) fn judge(&mut self, condition: &str) {
        self.conditions.insert(condition.to_owned());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.asked.is_empty()
    }

    /// Files a question. False when nobody will answer it.
    pub(super) fn ask(&mut self, now: Time, asked: Asked) -> bool {
        let is_known = self.conditions.contains(&asked.question.condition);
        if !is_known || self.asked.len() >= limits::MAX_QUESTIONS {
            return false;
        }
        self.asked.push_back((now + asked.question.deadline, asked));
        true
    }

    /// The next question that the server still waits for.
    pub(super) fn poll(&mut self, now: Time) -> Option<Asked> {
        while let Some((until, asked)) = self.asked.pop_front() {
            if now < until {
                return Some(asked);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        assert_eq!(rulings.poll(Time::from_secs_f64(0.1)).map(|asked| asked.question.number), Some(2));
        assert_eq!(rulings.poll(Time::from_secs_f64(0.12)).map(|asked| asked.question.number), Some(3));
        assert_eq!((rulings.poll(Time::ZERO), rulings.is_empty()), (None, true));
    }

    #[test]
    fn there_is_an_end_to_questions() {
        let mut rulings = Rulings::default();
        rulings.judge("near");
        let taken = (0..5000).filter(|&number| rulings.ask(Time::ZERO, asked(number, "near"))).count();
        assert_eq!(taken, limits::MAX_QUESTIONS);
    }
}
