//! The iteration that a worker is at.

use crate::types::Clock;

/// Clocks and versions of peers are believed up to here, so that counting on from them cannot overflow.
const LATEST: Clock = Clock::MAX / 2;

/// The number of the iteration at hand, and its gradients that are being prepared.
#[derive(Debug)]
pub(super) struct Iteration {
    clock: Clock,
    /// The newest version that an answer was of: rounds before it are closed.
    newest: Clock,
    /// The clocks of submissions that are being prepared.
    submitting: Vec<Clock>,
    /// How many samples gradients are the mean of.
    samples: u32,
}

impl Default for Iteration {
    fn default() -> Iteration {
        Iteration { clock: 0, newest: 0, submitting: Vec::new(), samples: 1 }
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

    /// Goes on with the newest version's iteration, unless a gradient of this one is being prepared. Whether any was left out.
    pub(super) fn catch_up(&mut self) -> bool {
        let is_behind = self.newest > self.clock && !self.submitting.contains(&self.clock);
        if is_behind {
            self.clock = self.newest;
        }
        is_behind
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
        assert!(!iteration.catch_up(), "nothing was closed without it");
        iteration.note_version(7);
        iteration.note_version(5);
        iteration.begin_submission();
        assert_eq!((iteration.catch_up(), iteration.oldest_submission()), (false, Some(3)));
        iteration.end_submission(3);
        iteration.end();
        assert_eq!((iteration.catch_up(), iteration.clock()), (true, 7));
    }
}
