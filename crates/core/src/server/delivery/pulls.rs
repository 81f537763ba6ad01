//! Pulls that were asked for and not yet answered.

use crate::limits;
use crate::store::Place;
use crate::types::{Clock, WorkerId};
use crate::waits::Delay;
use crate::wire::frame::{Completed, Pull, Push};

/// A pull that was asked for and not yet answered.
#[derive(Debug)]
pub(in crate::server) struct PendingPull {
    pub(super) worker: WorkerId,
    pub(super) table: usize,
    pub(super) request: u64,
    pub(super) clock: Clock,
    /// Place in the worker's shared memory for the table's first element.
    pub(super) reply_place: Option<Place>,
    pub(super) rows: Option<Vec<u32>>,
    /// It came with a push that is not acknowledged yet.
    pub(super) owes_ack: bool,
    /// Once it is released: how long it waited, and for whom.
    pub(super) delay: Option<Delay>,
}

impl PendingPull {
    /// A worker's pull of the whole table, or of these rows.
    pub(in crate::server) fn new(worker: WorkerId, pull: &Pull, rows: Option<Vec<u32>>) -> PendingPull {
        let Pull { subject, clock, reply_place, .. } = *pull;
        let (table, request) = (subject.table.0 as usize, subject.request);
        PendingPull { worker, table, request, clock, reply_place, rows, owes_ack: false, delay: None }
    }

    /// The pull that comes with a push. Its answer may acknowledge the push.
    pub(in crate::server) fn after_push(worker: WorkerId, push: &Push) -> PendingPull {
        let Push { subject, clock, reply_place, .. } = *push;
        let (table, request) = (subject.table.0 as usize, subject.request);
        let clock = clock.saturating_add(1);
        PendingPull { worker, table, request, clock, reply_place, rows: None, owes_ack: true, delay: None }
    }

    /// The pull that comes with a push which an aggregator counted in one of its sums, and acknowledges itself.
    pub(in crate::server) fn after_sum(worker: WorkerId, list: &Completed, request: u64) -> PendingPull {
        let (table, clock) = (list.subject.table.0 as usize, list.clock.saturating_add(1));
        PendingPull {
            worker,
            table,
            request,
            clock,
            reply_place: None,
            rows: None,
            owes_ack: false,
            delay: None,
        }
    }

    pub(in crate::server) fn worker(&self) -> WorkerId {
        self.worker
    }

    pub(in crate::server) fn table(&self) -> usize {
        self.table
    }

    pub(in crate::server) fn clock(&self) -> Clock {
        self.clock
    }

    #[inline]
    fn row_count(&self) -> usize {
        self.rows.as_ref().map_or(0, Vec::len)
    }
}

/// Pulls of one table that one worker has waiting.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(in crate::server) struct Backlog {
    pub(in crate::server) pulls: u32,
    pub(in crate::server) rows: u32,
}

/// The pulls that wait. Filing and taking one depends on nothing but that pull, and takes no memory once there were as
/// many before.
#[derive(Debug, Default)]
pub(super) struct WaitingPulls {
    /// Those that a controller delays, by the lower half of their token.
    filed: Vec<Option<PendingPull>>,
    free: Vec<u32>,
    /// The upper half of the next token: older pulls have lower tokens.
    sequence: u32,
    /// Those that wait for the initial values of their table, by table.
    for_values: Vec<Vec<PendingPull>>,
    /// By table and rank.
    backlogs: Vec<Vec<Backlog>>,
}

impl WaitingPulls {
    /// Whether a worker may wait with one more, and what it has waiting. Its pulls take memory while they wait, so that
    /// there is an end to them.
    #[inline]
    pub(super) fn admit(&self, pull: &PendingPull) -> Result<(), Backlog> {
        let of_table = self.backlogs.get(pull.table);
        let backlog = of_table.and_then(|of_table| of_table.get(pull.worker.0 as usize)).copied();
        let backlog = backlog.unwrap_or_default();
        let fits = (backlog.pulls as usize) < limits::MAX_PENDING_PULLS
            && backlog.rows as usize + pull.row_count() <= limits::MAX_PENDING_ROWS;
        if fits { Ok(()) } else { Err(backlog) }
    }

    /// The token that the next pull to be filed will have.
    #[inline]
    pub(super) fn next_token(&self) -> u64 {
        let place = self.free.last().copied().unwrap_or(self.filed.len() as u32);
        u64::from(self.sequence) << 32 | u64::from(place)
    }

    /// Files a pull under [`WaitingPulls::next_token`].
    #[inline]
    pub(super) fn file(&mut self, pull: PendingPull) {
        self.add_backlog(&pull);
        self.sequence = self.sequence.wrapping_add(1);
        match self.free.pop() {
            Some(place) => self.filed[place as usize] = Some(pull),
            None => self.filed.push(Some(pull)),
        }
    }

    /// Takes out the pull that was filed under a token.
    pub(super) fn take(&mut self, token: u64) -> Option<PendingPull> {
        let place = token as u32;
        let pull = self.filed.get_mut(place as usize)?.take()?;
        self.free.push(place);
        self.remove_backlog(&pull);
        Some(pull)
    }

    /// Whether the worker of a pull of a whole table waits with one for an iteration after this one.
    pub(super) fn has_later(&self, pull: &PendingPull, iteration: Clock) -> bool {
        let is_later = |other: &PendingPull| {
            (other.worker, other.table) == (pull.worker, pull.table)
                && other.rows.is_none()
                && other.clock > iteration
        };
        let of_table = self.backlogs.get(pull.table);
        let has_more = of_table.and_then(|of_table| of_table.get(pull.worker.0 as usize));
        // Most workers wait with one pull of a table at a time: this one.
        pull.rows.is_none()
            && has_more.is_some_and(|backlog| backlog.pulls > 0)
            && self.filed.iter().flatten().any(is_later)
    }

    /// Keeps a pull until its table has initial values.
    pub(super) fn keep_for_values(&mut self, pull: PendingPull) {
        self.add_backlog(&pull);
        if self.for_values.len() <= pull.table {
            self.for_values.resize_with(pull.table + 1, Vec::new);
        }
        self.for_values[pull.table].push(pull);
    }

    /// Takes out everything that waits for a table, by worker.
    pub(super) fn take_all(&mut self, table: usize) -> Vec<PendingPull> {
        let mut pulls = self.take_waiting_for_values(table);
        for place in 0..self.filed.len() {
            if self.filed[place].as_ref().is_some_and(|pull| pull.table == table) {
                pulls.extend(self.take(place as u64));
            }
        }
        pulls.sort_by_key(|pull| pull.worker);
        pulls
    }

    /// Takes out the pulls that wait for a table's initial values, by worker.
    pub(super) fn take_waiting_for_values(&mut self, table: usize) -> Vec<PendingPull> {
        let mut pulls = self.for_values.get_mut(table).map(std::mem::take).unwrap_or_default();
        pulls.sort_by_key(|pull| pull.worker);
        pulls.iter().for_each(|pull| self.remove_backlog(pull));
        pulls
    }

    /// Calls `acknowledge` once for every pull that waits and came with a push that was not acknowledged.
    pub(super) fn take_owed_acks(&mut self, mut acknowledge: impl FnMut(WorkerId, u64)) {
        for pull in self.filed.iter_mut().flatten() {
            if std::mem::take(&mut pull.owes_ack) {
                acknowledge(pull.worker, pull.request);
            }
        }
    }

    /// Forgets all pulls of a worker.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        for place in 0..self.filed.len() {
            if self.filed[place].as_ref().is_some_and(|pull| pull.worker == worker) {
                self.take(place as u64);
            }
        }
        for pulls in &mut self.for_values {
            pulls.retain(|pull| pull.worker != worker);
        }
        for backlog in self.backlogs.iter_mut().filter_map(|of_table| of_table.get_mut(worker.0 as usize)) {
            *backlog = Backlog::default();
        }
    }

    /// How many wait for a controller.
    pub(super) fn waiting_count(&self) -> usize {
        self.filed.len() - self.free.len()
    }

    /// Compares the backlogs and the free places with the pulls that wait.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut counted: Vec<Vec<Backlog>> =
            self.backlogs.iter().map(|of_table| vec![Backlog::default(); of_table.len()]).collect();
        for pull in self.filed.iter().flatten().chain(self.for_values.iter().flatten()) {
            let backlog = &mut counted[pull.table][pull.worker.0 as usize];
            backlog.pulls += 1;
            backlog.rows += pull.row_count() as u32;
        }
        if counted != self.backlogs {
            return Err(format!("backlogs of pulls are {:?}, and {counted:?} wait", self.backlogs));
        }
        let empty = self.filed.iter().filter(|pull| pull.is_none()).count();
        if empty != self.free.len() {
            return Err(format!("{empty} places for pulls are empty, and {} are free", self.free.len()));
        }
        Ok(())
    }

    fn add_backlog(&mut self, pull: &PendingPull) {
        let (table, rank) = (pull.table, pull.worker.0 as usize);
        if self.backlogs.len() <= table {
            self.backlogs.resize_with(table + 1, Vec::new);
        }
        let of_table = &mut self.backlogs[table];
        if of_table.len() <= rank {
            of_table.resize(rank + 1, Backlog::default());
        }
        of_table[rank].pulls += 1;
        of_table[rank].rows += pull.row_count() as u32;
    }

    fn remove_backlog(&mut self, pull: &PendingPull) {
        let backlog = &mut self.backlogs[pull.table][pull.worker.0 as usize];
        backlog.pulls -= 1;
        backlog.rows -= pull.row_count() as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pull(worker: u32, table: usize, rows: usize) -> PendingPull {
        let rows = (rows > 0).then(|| vec![0; rows]);
        PendingPull {
            worker: WorkerId(worker),
            table,
            request: 0,
            clock: 0,
            reply_place: None,
            rows,
            owes_ack: false,
            delay: None,
        }
    }

    #[test]
    fn a_pull_comes_back_under_its_token_and_later_ones_have_higher_tokens() {
        let mut pulls = WaitingPulls::default();
        let file = |pulls: &mut WaitingPulls, worker| {
            let token = pulls.next_token();
            pulls.file(pull(worker, 0, 0));
            token
        };
        let (first, second) = (file(&mut pulls, 1), file(&mut pulls, 2));
        assert_eq!(pulls.take(first).map(|pull| pull.worker), Some(WorkerId(1)));
        assert!(pulls.take(first).is_none());
        let third = file(&mut pulls, 3);
        assert!(first < second && second < third);
        assert_eq!((pulls.waiting_count(), pulls.check()), (2, Ok(())));
        assert_eq!(pulls.filed.len(), 2, "the place is used again");
        assert_eq!(pulls.take(third).map(|pull| pull.worker), Some(WorkerId(3)));
        assert_eq!(pulls.take(second).map(|pull| pull.worker), Some(WorkerId(2)));
    }

    #[test]
    fn what_a_worker_has_waiting_is_counted_by_table_and_forgotten_with_it() {
        let mut pulls = WaitingPulls::default();
        for _ in 0..limits::MAX_PENDING_PULLS {
            assert_eq!(pulls.admit(&pull(1, 2, 0)), Ok(()));
            pulls.file(pull(1, 2, 0));
        }
        assert!(pulls.admit(&pull(1, 2, 0)).is_err());
        assert_eq!((pulls.admit(&pull(0, 2, 0)), pulls.admit(&pull(1, 1, 0))), (Ok(()), Ok(())));
        pulls.keep_for_values(pull(1, 1, limits::MAX_PENDING_ROWS));
        assert_eq!(
            pulls.admit(&pull(1, 1, 1)),
            Err(Backlog { pulls: 1, rows: limits::MAX_PENDING_ROWS as u32 })
        );
        assert_eq!(pulls.check(), Ok(()));
        pulls.forget(WorkerId(1));
        assert_eq!((pulls.waiting_count(), pulls.check()), (0, Ok(())));
        assert_eq!((pulls.admit(&pull(1, 2, 0)), pulls.admit(&pull(1, 1, 1))), (Ok(()), Ok(())));
        assert!(pulls.take_waiting_for_values(1).is_empty() && pulls.filed.iter().all(Option::is_none));
    }

    #[test]
    fn all_pulls_of_a_table_are_taken_out_by_worker() {
        let mut pulls = WaitingPulls::default();
        for (worker, table) in [(3, 1), (1, 1), (0, 0)] {
            pulls.file(pull(worker, table, 0));
        }
        pulls.keep_for_values(pull(2, 1, 5));
        let workers: Vec<u32> = pulls.take_all(1).iter().map(|pull| pull.worker.0).collect();
        assert_eq!((workers, pulls.waiting_count(), pulls.check()), (vec![1, 2, 3], 1, Ok(())));
    }

    #[test]
    fn a_push_is_acknowledged_once_however_long_its_pull_waits() {
        let mut pulls = WaitingPulls::default();
        pulls.file(PendingPull { request: 7, owes_ack: true, ..pull(1, 0, 0) });
        pulls.file(pull(2, 0, 0));
        let mut heard = Vec::new();
        (0..2).for_each(|_| pulls.take_owed_acks(|worker, request| heard.push((worker.0, request))));
        assert_eq!(heard, [(1, 7)]);
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut pulls = WaitingPulls::default();
        pulls.file(pull(0, 0, 3));
        pulls.backlogs[0][0].rows = 2;
        assert!(pulls.check().is_err(), "rows that are not counted");
        let mut pulls = WaitingPulls::default();
        pulls.file(pull(0, 0, 0));
        pulls.free.push(0);
        assert!(pulls.check().is_err(), "a free place with a pull in it");
    }
}
