//! The questions of one (table, shard) to worker 0, which evaluates its pull condition.

use crate::limits;
use std::collections::VecDeque;

/// Numbers questions, and knows which of them are older than the state.
#[derive(Debug, Default)]
pub(super) struct Questions {
    has_judge: bool,
    /// Of the last question.
    last: u64,
    /// Of the last question before the state changed.
    last_change: u64,
    /// Those that are not polled.
    unsent: VecDeque<u64>,
    /// Of the last one that was answered, in time or not. They are answered in their order.
    answered: u64,
}

impl Questions {
    /// Those of a table whose worker 0 is gone: numbers go on after `last`.
    pub(super) fn after(last: u64) -> Questions {
        Questions { last, last_change: last, answered: last, ..Questions::default() }
    }

    /// Worker 0 is there or gone.
    pub(super) fn set_judge(&mut self, is_here: bool) {
        self.has_judge = is_here;
        self.answered = self.last;
        // Pulls that wait are asked about when it is there again.
        self.note_change();
    }

    pub(super) fn has_judge(&self) -> bool {
        self.has_judge
    }

    /// The number of the next question, which is to be polled.
    pub(super) fn ask(&mut self) -> u64 {
        self.last += 1;
        self.unsent.push_back(self.last);
        self.last
    }

    /// Whether worker 0 owes so many answers that one more question would only wait with the others.
    pub(super) fn are_many(&self) -> bool {
        self.has_judge && self.last - self.answered >= limits::MAX_QUESTIONS_OPEN
    }

    /// Worker 0 has seen a question.
    pub(super) fn note_answer(&mut self, number: u64) {
        self.answered = self.answered.max(number.min(self.last));
    }

    /// The number of the next question to send.
    pub(super) fn poll(&mut self) -> Option<u64> {
        self.unsent.pop_front()
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// The state that conditions see is another one.
    pub(super) fn note_change(&mut self) {
        self.last_change = self.last;
    }

    /// Verdicts on questions up to this one are about an earlier state.
    pub(super) fn last_change(&self) -> u64 {
        self.last_change
    }
}
