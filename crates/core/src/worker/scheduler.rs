//! The worker's end of the scheduler (`overlap=false`): pulls wait until all workers have pushed their iteration.

use crate::types::Clock;
use std::collections::VecDeque;

/// Which pulls may be sent, and what the coordinator has to be told of.
#[derive(Debug)]
pub(super) struct Scheduler {
    /// Pulls do not wait for other workers' pushes.
    overlap: bool,
    /// Iterations that have ended, and whose pushes the coordinator has not been told of.
    unreported: VecDeque<Clock>,
    /// The last iteration that the coordinator was told of.
    reported: Option<Clock>,
    /// The last iteration after which pulls may be sent.
    released_through: Option<Clock>,
}

impl Scheduler {
    pub(super) fn new() -> Scheduler {
        Scheduler { overlap: true, unreported: VecDeque::new(), reported: None, released_through: None }
    }

    /// Without overlap in one table, pulls of all tables wait.
    pub(super) fn restrict(&mut self, overlap: bool) {
        self.overlap &= overlap;
    }

    /// Whether pulls do not wait for other workers' pushes.
    pub(super) fn overlaps(&self) -> bool {
        self.overlap
    }

    /// Whether a pull after so many iterations may be sent.
    pub(super) fn may_pull(&self, clock: Clock) -> bool {
        self.overlap || clock == 0 || self.released_through >= Some(clock - 1)
    }

    /// An iteration ends.
    pub(super) fn end_iteration(&mut self, clock: Clock) {
        if !self.overlap {
            self.unreported.push_back(clock);
        }
    }

    /// Pulls after this iteration may be sent.
    pub(super) fn release(&mut self, clock: Clock) {
        self.released_through = self.released_through.max(Some(clock));
    }

    /// The next iteration that the coordinator is to be told of: all its pushes are acknowledged.
    pub(super) fn next_report(&mut self, oldest_unacknowledged: Option<Clock>) -> Option<Clock> {
        let clock = *self.unreported.front()?;
        let is_done = oldest_unacknowledged.is_none_or(|oldest| oldest > clock);
        if !is_done {
            return None;
        }
        self.reported = self.unreported.pop_front();
        self.reported
    }

    /// The clock to report again to a coordinator that was not connected: it may have missed it, or be one that was started anew and has
    /// to know how far everybody is.
    pub(super) fn repeat(&self) -> Option<Clock> {
        self.reported
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without_overlap() -> Scheduler {
        let mut scheduler = Scheduler::new();
        scheduler.restrict(false);
        scheduler
    }

    #[test]
    fn a_pull_waits_until_its_iteration_is_released() {
        let mut scheduler = without_overlap();
        assert!(scheduler.may_pull(0) && !scheduler.may_pull(1));
        scheduler.release(1);
        scheduler.release(0);
        assert!(scheduler.may_pull(2) && !scheduler.may_pull(3));
        assert!(Scheduler::new().may_pull(7));
    }

    #[test]
    fn an_iteration_is_reported_once_its_pushes_are_acknowledged() {
        let mut scheduler = without_overlap();
        (0..2).for_each(|clock| scheduler.end_iteration(clock));
        assert_eq!(scheduler.next_report(Some(0)), None);
        assert_eq!((scheduler.next_report(Some(1)), scheduler.next_report(Some(1))), (Some(0), None));
        assert_eq!(scheduler.repeat(), Some(0), "the second one is not reported yet");
        assert_eq!(scheduler.next_report(None), Some(1));
        assert_eq!(scheduler.repeat(), Some(1), "it may not have been heard");
        scheduler.release(1);
        assert_eq!(scheduler.repeat(), Some(1), "another coordinator may ask");
    }
}
