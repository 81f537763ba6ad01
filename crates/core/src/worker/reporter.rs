//! A worker's regular reports to the coordinator.

use crate::limits;
use crate::status::{LinksReport, WorkerReport};
use crate::types::{Clock, Time};
use std::time::Duration;

/// A worker's report, and when the next one is due.
#[derive(Debug)]
pub(super) struct Reporter {
    report: WorkerReport,
    due: Time,
    /// The last iteration that the application began, and whether it waited for it.
    last_read: Option<(Clock, bool)>,
}

impl Reporter {
    pub(super) fn new(now: Time) -> Reporter {
        Reporter { report: WorkerReport::default(), due: now, last_read: None }
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

    /// Parameters of a table are asked for, or not.
    pub(super) fn note_pull(&mut self, asks: bool) {
        self.report.reads.pulls += u64::from(asks);
    }

    /// The application goes on to an iteration, with parameters of one of its tables that it waited for so long. They lack so many
    /// rounds.
    pub(super) fn note_read(&mut self, clock: Clock, waited: Duration, staleness: Option<u64>) {
        let reads = &mut self.report.reads;
        let has_waited = !waited.is_zero();
        match &mut self.last_read {
            Some((last, before)) if *last == clock => {
                if has_waited && !*before {
                    reads.at_once -= 1;
                    reads.after_wait += 1;
                }
                *before |= has_waited;
            }
            last => {
                *last = Some((clock, has_waited));
                *if has_waited { &mut reads.after_wait } else { &mut reads.at_once } += 1;
            }
        }
        reads.waited_s += waited.as_secs_f64();
        reads.max_staleness = reads.max_staleness.max(staleness.unwrap_or(0));
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
    use crate::status::ReadsReport;

    #[test]
    fn an_iteration_counts_once_and_as_one_that_waited_where_a_table_made_it_wait() {
        let mut reporter = Reporter::new(Time::ZERO);
        let wait = Duration::from_millis(250);
        for (clock, waited, staleness) in [
            (1, Duration::ZERO, Some(2)),
            (1, Duration::ZERO, None),
            (2, Duration::ZERO, Some(3)),
            (2, wait, Some(1)),
            (2, wait, Some(0)),
            (3, wait, None),
        ] {
            reporter.note_read(clock, waited, staleness);
        }
        [true, false, true].into_iter().for_each(|asks| reporter.note_pull(asks));
        let expected = ReadsReport { at_once: 1, after_wait: 2, pulls: 2, waited_s: 0.75, max_staleness: 3 };
        assert_eq!(reporter.report().reads, expected);
    }

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
