//! A worker's regular reports to the coordinator.

use crate::limits;
use crate::status::{LinksReport, WorkerReport};
use crate::types::{Clock, Time};

/// A worker's report, and when the next one is due.
#[derive(Debug)]
pub(super) struct Reporter {
    report: WorkerReport,
    due: Time,
}

impl Reporter {
    pub(super) fn new(now: Time) -> Reporter {
        Reporter { report: WorkerReport::default(), due: now }
    }

    pub(super) fn report(&self) -> &WorkerReport {
        &self.report
    }

    pub(super) fn due(&self) -> Time {
        self.due
    }

    /// The next report is due at this time: something happened that the coordinator should know of.
    pub(super) fn hurry(&mut self, due: Time) {
        self.due = due;
    }

    /// The report that is sent now.
    pub(super) fn take(
        &mut self,
        now: Time,
        waiting: Option<String>,
        links: Option<LinksReport>,
    ) -> WorkerReport {
        self.due = now + limits::HEARTBEAT_EVERY;
        self.report.waiting = waiting;
        self.report.links = links;
        self.report.clone()
    }

    pub(super) fn set_clock(&mut self, clock: Clock) {
        self.report.clock = clock;
    }

    pub(super) fn note_pushed(&mut self, bytes: u32) {
        self.report.bytes_pushed += u64::from(bytes);
    }

    pub(super) fn note_pulled(&mut self, bytes: u32) {
        self.report.bytes_pulled += u64::from(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_due_with_every_heartbeat_and_when_something_happened() {
        let mut reporter = Reporter::new(Time(3));
        assert_eq!(reporter.due(), Time(3));
        reporter.set_clock(4);
        (0..2).for_each(|_| reporter.note_pushed(10));
        (0..2).for_each(|_| reporter.note_pulled(100));
        let report = reporter.take(Time(5), Some("others".into()), None);
        assert_eq!((report.clock, report.bytes_pushed, report.bytes_pulled), (4, 20, 200));
        assert_eq!(report.waiting.as_deref(), Some("others"));
        assert_eq!((reporter.report(), reporter.due()), (&report, Time(5) + limits::HEARTBEAT_EVERY));
        reporter.hurry(Time(6));
        assert_eq!(reporter.due(), Time(6));
    }
}
