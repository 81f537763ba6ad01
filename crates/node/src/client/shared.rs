//! The worker behind its lock: what the application's threads and the event loop share.

use super::error::ClientError;
use crate::clock;
use crate::event_loop::RoleCell;
use crate::transport::memory::Mailbox;
use paramill_core::limits;
use paramill_core::standstill;
use paramill_core::worker::{Ticket, Worker, WorkerError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a timed-out wait asks the servers for their reason.
const REASON_TIMEOUT: Duration = Duration::from_secs(2);

/// What the application's threads and the event loop share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) mailbox: Arc<Mailbox>,
    /// How long calls wait unless told otherwise.
    pub(super) timeout: Duration,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) worker: Worker,
    pub(super) ended: Option<String>,
    /// Tickets that somebody waits for, each by one thread: only for these is anybody woken.
    pub(super) waited: Vec<Ticket>,
}

impl State {
    pub(super) fn is_due(&self, ticket: Ticket) -> bool {
        self.ended.is_some() || self.worker.outcome(ticket).is_some()
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn act(
        &self,
        ask: impl FnOnce(&mut Worker) -> Result<Ticket, WorkerError>,
    ) -> Result<Ticket, ClientError> {
        let ticket = self.ask(ask)?;
        self.mailbox.wake_sleeper();
        Ok(ticket)
    }

    /// The same where there is nothing to send yet.
    pub(super) fn ask<T>(
        &self,
        ask: impl FnOnce(&mut Worker) -> Result<T, WorkerError>,
    ) -> Result<T, ClientError> {
        let mut state = self.lock();
        if let Some(why) = &state.ended {
            return Err(ClientError::Ended(why.clone()));
        }
        Ok(ask(&mut state.worker)?)
    }

    pub(super) fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<(), ClientError> {
        self.while_waited_for(ticket, || self.wait_for(ticket, timeout))
    }

    pub(super) fn is_due_within(&self, ticket: Ticket, timeout: Duration) -> bool {
        self.while_waited_for(ticket, || {
            let state = self.changed.wait_timeout_while(self.lock(), timeout, |state| !state.is_due(ticket));
            state.unwrap_or_else(PoisonError::into_inner).0.is_due(ticket)
        })
    }

    /// The event loop wakes those who wait for tickets that it finds in this list.
    fn while_waited_for<T>(&self, ticket: Ticket, wait: impl FnOnce() -> T) -> T {
        self.lock().waited.push(ticket);
        let outcome = wait();
        let waited = &mut self.lock().waited;
        if let Some(index) = waited.iter().position(|other| *other == ticket) {
            waited.swap_remove(index);
        }
        outcome
    }

    fn wait_for(&self, ticket: Ticket, timeout: Duration) -> Result<(), ClientError> {
        let mut began = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.worker.outcome(ticket) {
                return Ok(outcome?);
            }
            if let Some(why) = &state.ended {
                return Err(ClientError::Ended(why.clone()));
            }
            let Some(left) = timeout.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) else {
                let what = state.worker.explain(clock::now(), ticket);
                drop(state);
                let what = format!("{what}{}", self.servers_reason());
                return Err(ClientError::Timeout { seconds: began.elapsed().as_secs_f64(), what });
            };
            let (slice, asleep) = (left.min(limits::HEARTBEAT_EVERY), Instant::now());
            state = self.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner).0;
            // Time in which this process stood still is not one in which nothing came.
            began += standstill::lost_time(slice, asleep.elapsed());
        }
    }

    /// What the servers say this worker waits for; empty when they say nothing.
    fn servers_reason(&self) -> String {
        let Some(me) = self.lock().worker.id() else { return String::new() };
        let Ok(ticket) = self.act(|worker| worker.query_status(clock::now())) else { return String::new() };
        let began = Instant::now();
        let mut state = self.lock();
        let is_open = |state: &State| !state.is_due(ticket);
        while is_open(&state) && began.elapsed() < REASON_TIMEOUT {
            let short = Duration::from_millis(50);
            state = self.changed.wait_timeout(state, short).unwrap_or_else(PoisonError::into_inner).0;
        }
        let status = state.worker.take_status(ticket);
        state.worker.redeem(ticket);
        let Some(status) = status else { return String::new() };
        let reason = status.shards.iter().find_map(|shard| {
            shard.tables.iter().find_map(|table| {
                let waiting = table.waiting.iter().find(|waiting| waiting.worker == me)?;
                Some(format!("; {} says of table `{}`: {}", shard.shard, table.name, waiting.reason))
            })
        });
        reason.unwrap_or_else(|| format!("; the job is {}", status.phase))
    }
}

/// The event loop that panicked with the lock says so when it ends; until then there is nothing to find out.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The worker as its event loop sees it.
pub(super) struct Cell(pub(super) Arc<Shared>);

impl RoleCell for Cell {
    type Role = Worker;

    fn with<T>(&mut self, visit: impl FnOnce(&mut Worker) -> T) -> T {
        visit(&mut self.0.lock().worker)
    }

    fn progressed(&self) {
        let state = self.0.lock();
        if state.waited.iter().any(|ticket| state.worker.outcome(*ticket).is_some()) {
            self.0.changed.notify_all();
        }
    }

    fn ended(&self, error: Option<&str>) {
        self.0.lock().ended = Some(error.unwrap_or("it was closed").to_owned());
        self.0.changed.notify_all();
    }
}
