//! A worker's regular reports to the coordinator.

use crate::limits;
use crate::status::WorkerReport;
use crate::types::{Clock, TableId, Time};

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
    pub(super) fn take(&mut self, now: Time, waiting: Option<String>) -> WorkerReport {
        self.due = now + limits::HEARTBEAT_EVERY;
        self.report.waiting = waiting;
        self.report.clone()
    }

    pub(super) fn set_clock(&mut self, clock: Clock) {
        self.report.clock = clock;
    }

    pub(super) fn set_slabs(&mut self, slabs: Vec<TableId>) {
        self.report.slabs = slabs;
    }

    pub(super) fn note_pushed(&mut self, bytes: u32) {
        self.report.bytes_pushed += u64::from(bytes);
    }

    pub(super) fn note_pulled(&mut self, bytes: u32) {
        self.report.bytes_pulled += u64::from(bytes);
    }
}
