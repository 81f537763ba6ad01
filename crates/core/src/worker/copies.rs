//! What the application computes on: copies of tables, which its tickets wait for.
//!
//! Where a consistency model makes a copy a cache, the application goes on as soon as the copy is fresh enough, and leaves its
//! requests behind. They are still brought to their end, and a bad end is told late rather than never.

use super::WorkerError;
use super::reporter::Reporter;
use super::requests::Requests;
use super::tables::Tables;
use super::ticket::{Pending, Ticket, Tickets};
use crate::types::{Clock, Time};

/// The parts of a worker's traffic that are about it.
pub(super) struct Copies<'a> {
    pub(super) tables: &'a mut Tables,
    pub(super) requests: &'a mut Requests,
    pub(super) tickets: &'a mut Tickets,
    pub(super) reporter: &'a mut Reporter,
}

/// A copy that a ticket waits for, and that nobody was asked for.
pub(super) struct Needed {
    pub(super) ticket: Ticket,
    pub(super) clock: Clock,
    pub(super) table: usize,
}

impl Copies<'_> {
    /// The application goes on with what a ticket waited for. What it reads stays until its next push.
    pub(super) fn go_on(&mut self, now: Time, ticket: Ticket) {
        let Some(pending) = self.tickets.get_mut(ticket).filter(|pending| !pending.is_over()) else { return };
        let Some(clock) = pending.reads() else { return };
        let waited = pending.end(now);
        let tables: Vec<usize> = pending.tables().collect();
        if pending.copy_for().is_some() {
            self.requests.leave_behind(ticket);
        }
        tables.iter().for_each(|&table| self.tables[table].keep_front());
        let staleness = tables.into_iter().filter_map(|table| self.tables[table].staleness(clock)).max();
        self.reporter.note_read(clock, waited, staleness);
    }

    /// The application has heard what a ticket had to tell of an earlier push.
    pub(super) fn hear(&mut self, ticket: Ticket) {
        let table = self.tickets.get(ticket).and_then(|pending| table_unheard(self.tables, pending));
        table.into_iter().for_each(|table| drop(self.tables[table].take_failure()));
    }

    /// Copies that are too old for the tickets that wait for them, and not under way: another model allowed more.
    pub(super) fn needed(&self) -> Vec<Needed> {
        let mut needed = Vec::new();
        for (ticket, pending) in self.tickets.awaiting_copies() {
            let Some(clock) = pending.copy_for() else { continue };
            let is_needed = |table: &usize| {
                let local = &self.tables[*table];
                !local.is_fresh(clock) && !local.is_fetching_for(clock)
            };
            let tables = pending.copied_tables().filter(is_needed);
            needed.extend(tables.map(|table| Needed { ticket, clock, table }));
        }
        needed
    }

    /// The application takes the slabs of an exchange back before it is due. It has been told why, but not how the exchange ends.
    pub(super) fn give_up(&mut self, ticket: Ticket) {
        let is_open = |pending: &&Pending| !pending.is_over() && pending.error().is_none();
        if self.tickets.get(ticket).filter(is_open).is_some() {
            self.requests.leave_behind(ticket);
        }
    }

    /// Something failed that the application went on from: it hears of it where it waits next, or when it leaves.
    pub(super) fn tell_late(&mut self, table: usize, clock: Clock, error: WorkerError) {
        let error = match error {
            WorkerError::Refused { cause, message } => {
                let name = self.tables[table].name();
                let message =
                    format!("an earlier update of table `{name}`, at clock {clock}, failed: {message}");
                WorkerError::Refused { cause, message }
            }
            other => other,
        };
        self.tables[table].set_failure(error);
    }
}

/// Whether the copies that a ticket waits for are fresh enough; `None` where it waits for none, or not any more.
pub(super) fn are_fresh(tables: &Tables, pending: &Pending) -> Option<bool> {
    let clock = pending.copy_for().filter(|_| !pending.is_over())?;
    Some(pending.copied_tables().all(|table| tables[table].is_fresh(clock)))
}

/// A sentence about the first copy that is too old for a ticket.
pub(super) fn explain(tables: &Tables, pending: &Pending) -> Option<String> {
    let clock = pending.copy_for()?;
    let old = pending.copied_tables().map(|table| &tables[table]).find(|local| !local.is_fresh(clock))?;
    Some(old.explain_copy(clock))
}

/// A failure of an earlier push that the application hears of when it waits for a ticket.
pub(super) fn unheard<'a>(tables: &'a Tables, pending: &Pending) -> Option<&'a WorkerError> {
    tables[table_unheard(tables, pending)?].failure()
}

/// The table that it is about.
fn table_unheard(tables: &Tables, pending: &Pending) -> Option<usize> {
    let is_next = pending.reads().is_some() && !pending.is_over() && pending.error().is_none();
    pending.tables().filter(|_| is_next).find(|&table| tables[table].failure().is_some())
}
