//! The iteration that a worker is at.

use crate::limits;
use crate::types::Clock;

/// Clocks and versions of peers are believed up to here, so that counting on from them cannot overflow.
const LATEST: Clock = Clock::MAX / 2;

/// The number of the iteration at hand, and its gradients that are being prepared.
#[derive(Debug)]
pub(super) struct Iteration {
    clock: Clock,
    /// The newest version that an answer was of: rounds before it are closed.
    newest: Clock,
    /// Rounds before this one may have closed without this worker while it waited at a barrier.
    missed: Clock,
    /// The iteration that it went on with when it last left some out; 0 if it never did.
    resumed: Clock,
    /// The clocks of submissions that are being prepared.
    submitting: Vec<Clock>,
    /// How many samples gradients are the mean of.
    samples: u32,
}

impl Default for Iteration {
    fn default() -> Iteration {
        Iteration { clock: 0, newest: 0, missed: 0, resumed: 0, submitting: Vec::new(), samples: 1 }
    }
}

impl Iteration {
    /// Iterations completed, or left out.
    pub(super) fn clock(&self) -> Clock {
        self.clock
    }

    /// The worker comes in at this clock.
    pub(super) fn enter(&mut self, first: Clock) {
        self.clock = first.min(LATEST);
    }

    /// It is over.
    pub(super) fn end(&mut self) {
        self.clock += 1;
    }

    /// An answer is of this version.
    pub(super) fn note_version(&mut self, version: Clock) {
        self.newest = self.newest.max(version.min(LATEST));
    }

    /// Rounds before this one may have closed while the worker waited at a barrier: it may leave them out once it has an answer.
    pub(super) fn miss(&mut self, version: Clock) {
        // No servers are further ahead than that.
        if version <= self.clock.saturating_add(limits::MAX_CLOCK_SKIP) {
            self.missed = self.missed.max(version);
        }
    }

    /// Goes on with the newest version's iteration, unless a gradient of this one is being prepared. What was not missed at a barrier is
    /// left out only where models say so. Whether any was left out.
    pub(super) fn catch_up(&mut self, leaves_out: bool) -> bool {
        let next = if leaves_out { self.newest } else { self.newest.min(self.missed) };
        let is_behind = next > self.clock && !self.submitting.contains(&self.clock);
        if is_behind {
            self.clock = next;
            self.resumed = next;
        }
        is_behind
    }

    /// The iteration before which nothing is pushed, though servers may wait for it: it went on with that one when it last left some
    /// out, and `may_lack` says that servers may not be there yet. [`Clock::MAX`] while the application waits at a barrier; 0 if nothing
    /// can be said. `owed` is the oldest clock of which servers lack a push.
    pub(super) fn idle_until(
        &self,
        owed: Option<Clock>,
        is_at_barrier: bool,
        may_lack: impl Fn(Clock) -> bool,
    ) -> Clock {
        if is_at_barrier && owed.is_none() && !self.is_submitting() {
            return Clock::MAX;
        }
        let is_done = owed.is_none_or(|clock| clock >= self.resumed);
        if is_done && may_lack(self.resumed) { self.resumed } else { 0 }
    }

    /// A gradient of this iteration is being prepared.
    pub(super) fn begin_submission(&mut self) {
        self.submitting.push(self.clock);
    }

    /// One of this clock is prepared.
    pub(super) fn end_submission(&mut self, clock: Clock) {
        if let Some(index) = self.submitting.iter().position(|known| *known == clock) {
            self.submitting.swap_remove(index);
        }
    }

    /// Whether a gradient is being prepared.
    pub(super) fn is_submitting(&self) -> bool {
        !self.submitting.is_empty()
    }

    /// The oldest clock of which a gradient is being prepared.
    pub(super) fn oldest_submission(&self) -> Option<Clock> {
        self.submitting.iter().copied().min()
    }

    pub(super) fn samples(&self) -> u32 {
        self.samples
    }

    /// Gradients that are pushed from now on are the mean of so many samples.
    pub(super) fn set_samples(&mut self, samples: u32) {
        self.samples = samples;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iterations_are_left_out_unless_one_has_begun() {
        let mut iteration = Iteration::default();
        iteration.enter(3);
        iteration.note_version(3);
        assert!(!iteration.catch_up(true), "nothing was closed without it");
        iteration.note_version(7);
        iteration.note_version(5);
        iteration.begin_submission();
        assert_eq!((iteration.catch_up(true), iteration.oldest_submission()), (false, Some(3)));
        iteration.end_submission(3);
        iteration.end();
        assert!(!iteration.catch_up(false));
        let until =
            |iteration: &Iteration, owed, at_barrier| iteration.idle_until(owed, at_barrier, |_| true);
        assert_eq!(until(&iteration, None, false), 0);
        assert_eq!((iteration.catch_up(true), iteration.clock()), (true, 7));
        assert_eq!([None, Some(7), Some(6)].map(|owed| until(&iteration, owed, false)), [7, 7, 0]);
        assert_eq!(iteration.idle_until(None, false, |_| false), 0, "servers are there");
        assert_eq!([None, Some(9)].map(|owed| until(&iteration, owed, true)), [Clock::MAX, 7]);
    }

    #[test]
    fn what_was_missed_at_a_barrier_is_left_out_once_there_is_an_answer() {
        let mut iteration = Iteration::default();
        iteration.miss(5);
        assert!(!iteration.catch_up(false), "it has yet to read what the others made meanwhile");
        iteration.note_version(7);
        assert_eq!((iteration.catch_up(false), iteration.clock()), (true, 5));
        assert!(!iteration.catch_up(false), "the rest was not missed there");
    }
}
