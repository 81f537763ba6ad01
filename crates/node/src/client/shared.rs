//! The worker behind its lock: what the application's threads and the event loops share.

use super::conditions::Conditions;
use super::error::ClientError;
use super::packing::Departures;
use crate::clock;
use crate::event_loop::{FIRST_LANE, Rest, RoleCell};
use crate::waker::Waker;
use paramill_core::limits;
use paramill_core::role::{Output, Role};
use paramill_core::standstill;
use paramill_core::types::Time;
use paramill_core::worker::{Share, Ticket, Worker, WorkerError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long a timed-out wait asks the servers for their reason.
const REASON_TIMEOUT: Duration = Duration::from_secs(2);

/// The end of a loop that nothing is wrong with.
const CLOSED: &str = "it was closed";

/// What the application's threads and the event loops share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    changed: Condvar,
    /// For each loop.
    wakers: Vec<Arc<Waker>>,
    stop: Arc<AtomicBool>,
    /// How long calls wait unless told otherwise.
    pub(super) timeout: Duration,
    /// Set at the start of a job that has packs.
    pub(super) packs: OnceLock<Departures>,
    pub(super) conditions: Conditions,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) worker: Worker,
    pub(super) ended: Option<String>,
    /// When the first loop calls the worker, as far as it knows.
    first_wakes: Option<Time>,
    /// What somebody waits for, each by one thread: only for these is anybody woken.
    waited: Vec<Awaited>,
}

/// A ticket, or a share of what it brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Awaited {
    ticket: Ticket,
    share: Option<Share>,
}

impl State {
    pub(super) fn is_due(&self, ticket: Ticket) -> bool {
        self.ended.is_some() || self.worker.outcome(ticket).is_some()
    }

    fn is_reached(&self, awaited: Awaited) -> bool {
        let has_share = |share| self.worker.has_share(awaited.ticket, share);
        self.is_due(awaited.ticket) || awaited.share.is_some_and(has_share)
    }

    /// The loops that outputs wait for, one bit each, and the first one where the worker wants to be called sooner than that
    /// loop knows.
    fn lanes_to_wake(&self) -> u64 {
        let is_sooner = match (self.worker.next_timeout(), self.first_wakes) {
            (Some(next), Some(known)) => next < known,
            (next, None) => next.is_some(),
            (None, Some(_)) => false,
        };
        self.worker.lanes_with_outputs() | u64::from(is_sooner) << FIRST_LANE
    }
}

impl Shared {
    /// One waker for each loop.
    pub(super) fn new(worker: Worker, wakers: Vec<Arc<Waker>>, timeout: Duration) -> Shared {
        let state = State { worker, ended: None, first_wakes: None, waited: Vec::new() };
        let (state, stop) = (Mutex::new(state), Arc::new(AtomicBool::new(false)));
        let (changed, packs, conditions) = (Condvar::new(), OnceLock::new(), Conditions::default());
        Shared { state, changed, wakers, stop, timeout, packs, conditions }
    }

    /// Of each loop.
    pub(super) fn wakers(&self) -> &[Arc<Waker>] {
        &self.wakers
    }

    /// Ends the loops when it becomes true.
    pub(super) fn stop_flag(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// Whether the loops are told to end.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Ends all loops.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wakers.iter().for_each(|waker| waker.wake());
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The same at a moment when no loop is receiving into slabs of a ticket. A loop does so for the time of one system call, which
    /// does not wait, and without the lock.
    pub(super) fn lock_landed(&self, ticket: Ticket) -> MutexGuard<'_, State> {
        loop {
            let state = self.lock();
            if !state.worker.is_landing(ticket) {
                return state;
            }
            drop(state);
            std::thread::yield_now();
        }
    }

    /// Lets the worker go, and wakes the loops that have something to do since.
    pub(super) fn let_go(&self, state: MutexGuard<'_, State>) {
        let lanes = state.lanes_to_wake();
        drop(state);
        self.wake(lanes);
    }

    /// Wakes loops, one bit each.
    fn wake(&self, mut lanes: u64) {
        while lanes != 0 {
            self.wakers[lanes.trailing_zeros() as usize].wake_sleeper();
            lanes &= lanes - 1;
        }
    }

    /// Asks something of the worker.
    pub(super) fn act<T>(
        &self,
        ask: impl FnOnce(&mut Worker) -> Result<T, WorkerError>,
    ) -> Result<T, ClientError> {
        let mut state = self.lock();
        if let Some(why) = &state.ended {
            return Err(ClientError::Ended(why.clone()));
        }
        let answer = ask(&mut state.worker)?;
        self.let_go(state);
        Ok(answer)
    }

    pub(super) fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<(), ClientError> {
        self.while_waited_for(Awaited { ticket, share: None }, || self.wait_for(ticket, timeout))
    }

    pub(super) fn is_due_within(&self, ticket: Ticket, timeout: Duration) -> bool {
        self.is_reached_within(Awaited { ticket, share: None }, timeout)
    }

    /// Whether a share of what a ticket brings is here, or the ticket is due.
    pub(super) fn has_share_within(&self, ticket: Ticket, share: Share, timeout: Duration) -> bool {
        self.is_reached_within(Awaited { ticket, share: Some(share) }, timeout)
    }

    fn is_reached_within(&self, awaited: Awaited, timeout: Duration) -> bool {
        self.while_waited_for(awaited, || {
            let is_open = |state: &mut State| !state.is_reached(awaited);
            let state = self.changed.wait_timeout_while(self.lock(), timeout, is_open);
            state.unwrap_or_else(PoisonError::into_inner).0.is_reached(awaited)
        })
    }

    /// The event loops wake those who wait for what they find in this list.
    fn while_waited_for<T>(&self, awaited: Awaited, wait: impl FnOnce() -> T) -> T {
        let ticket = awaited.ticket;
        let depends = |state: &State| !state.is_due(ticket) && state.worker.awaits_answers(ticket);
        if let Some(packs) = self.packs.get().filter(|_| depends(&self.lock())) {
            // What is waited for may come after others have what was given here.
            packs.leave();
        }
        {
            let mut state = self.lock();
            state.waited.push(awaited);
            state.worker.begin_wait(clock::now(), ticket);
        }
        let outcome = wait();
        let mut state = self.lock();
        if let Some(index) = state.waited.iter().position(|other| *other == awaited) {
            state.waited.swap_remove(index);
        }
        state.worker.end_wait(clock::now(), ticket);
        self.let_go(state);
        outcome
    }

    fn wait_for(&self, ticket: Ticket, timeout: Duration) -> Result<(), ClientError> {
        let mut began = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.worker.conclude(clock::now(), ticket) {
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

/// The worker as one of its event loops sees it.
pub(super) struct Cell {
    shared: Arc<Shared>,
    lane: usize,
}

impl Cell {
    pub(super) fn new(shared: &Arc<Shared>, lane: usize) -> Cell {
        Cell { shared: Arc::clone(shared), lane }
    }
}

impl RoleCell for Cell {
    type Role = Worker;

    const ORDERS_PEERS: bool = false;

    fn with<T>(&mut self, visit: impl FnOnce(&mut Worker) -> T) -> T {
        visit(&mut self.shared.lock().worker)
    }

    fn lane(&self) -> usize {
        self.lane
    }

    fn poll_output(worker: &mut Worker, lane: usize) -> Option<Output> {
        worker.poll_output_of(lane)
    }

    fn backlog_bytes(worker: &Worker, lane: usize) -> usize {
        worker.backlog_bytes_of(lane)
    }

    fn rest(&mut self) -> Rest {
        let mut state = self.shared.lock();
        if state.waited.iter().any(|awaited| state.is_reached(*awaited)) {
            self.shared.changed.notify_all();
        }
        if state.worker.has_questions() {
            self.shared.conditions.asked.notify_one();
        }
        let has_work = state.worker.backlog_bytes_of(self.lane) > 0;
        let mut next_timeout = None;
        if self.lane == FIRST_LANE {
            next_timeout = state.worker.next_timeout();
            state.first_wakes = next_timeout;
        }
        if self.shared.wakers.len() > 1 {
            // This loop has looked at its own outputs.
            let others = state.lanes_to_wake() & !(1 << self.lane);
            drop(state);
            self.shared.wake(others);
        }
        Rest { has_work, next_timeout }
    }

    fn ended(&self, error: Option<&str>) {
        {
            let ended = &mut self.shared.lock().ended;
            // The others end because of the first, and have nothing to say.
            if ended.as_deref().is_none_or(|known| known == CLOSED) {
                *ended = Some(error.unwrap_or(CLOSED).to_owned());
            }
        }
        self.shared.stop();
        self.shared.changed.notify_all();
    }
}
