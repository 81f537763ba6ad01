//! The non-overlapping baseline: a scheduler between push and pull, as in the systems that FluentPS improves on.
//!
//! A worker reports once all servers acknowledged its pushes, and pulls when the scheduler lets it go. The scheduler
//! judges by the very controller that a shard would use.

use crate::consistency::{Admit, Controller, PullOutcome, SyncPolicy};
use crate::limits;
use crate::types::{Clock, Time, WorkerId};
use crate::wire::Change;
use std::collections::{BTreeMap, VecDeque};

#[derive(Debug)]
pub(super) struct Scheduler {
    controller: Controller,
    /// How many clocks of each worker wait.
    waiting: BTreeMap<WorkerId, usize>,
    open: VecDeque<Release>,
}

/// How far a worker is whose scheduler is gone.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resumed {
    pub(super) clock: Clock,
    /// Its pushes of that clock are with all servers.
    pub(super) is_pushed: bool,
}

/// A worker may pull after a clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Release {
    pub(super) worker: WorkerId,
    pub(super) clock: Clock,
    /// The worker that it waited for, if it did.
    pub(super) last: Option<WorkerId>,
}

impl Scheduler {
    /// The scheduler of a job that begins with the clock `first`.
    pub(super) fn new(
        policy: SyncPolicy,
        workers: impl IntoIterator<Item = WorkerId>,
        seed: u64,
        first: Clock,
    ) -> Scheduler {
        let mut controller = Controller::new(policy, workers, seed);
        controller.begin_at(first);
        Scheduler { controller, waiting: BTreeMap::new(), open: VecDeque::new() }
    }

    /// A scheduler in place of one that is gone: these workers have last said that they pushed these clocks, or have yet to push them.
    pub(super) fn resume(
        now: Time,
        policy: SyncPolicy,
        seed: u64,
        workers: &BTreeMap<WorkerId, Resumed>,
    ) -> Scheduler {
        let version = workers.values().map(|resumed| resumed.clock).min().unwrap_or(0);
        // Rounds before the clock that a worker was last heard of count as done: it said so once.
        let next = workers.iter().map(|(worker, resumed)| (*worker, resumed.clock));
        let controller = Controller::at(version, policy, next, seed);
        let mut scheduler = Scheduler { controller, waiting: BTreeMap::new(), open: VecDeque::new() };
        for (worker, resumed) in workers.iter().filter(|(_, resumed)| resumed.is_pushed) {
            scheduler.pushed(now, *worker, resumed.clock);
        }
        scheduler
    }

    pub(super) fn pushed(&mut self, now: Time, worker: WorkerId, clock: Clock) {
        let known = self.controller.state().worker(worker).and_then(|known| known.pushed());
        let v_train = self.controller.state().v_train();
        let admit = match self.controller.admit(worker, clock) {
            // The scheduler keeps no gradients, so that a worker may be further ahead of it than of a server.
            Admit::TooFarAhead if clock <= v_train.saturating_add(limits::MAX_CLOCK_SKIP) => {
                Admit::Round(clock)
            }
            Admit::TooFarAhead | Admit::UnknownWorker => return,
            // A worker repeats its last clock after a broken connection.
            Admit::Duplicate if known != Some(clock) => return,
            admit => admit,
        };
        self.controller.push(now, worker, clock, admit, None, 1);
        self.settle(now);
        let waiting = self.waiting.entry(worker).or_default();
        if *waiting >= limits::MAX_PENDING_PULLS {
            // A release of one clock releases all clocks before it.
            self.controller.cancel(worker);
            *waiting = 0;
        }
        // The token is the clock: a worker waits for one at a time.
        match self.controller.pull(now, worker, clock.saturating_add(1), clock) {
            PullOutcome::Answer { .. } => self.open.push_back(Release { worker, clock, last: None }),
            PullOutcome::Wait => *waiting += 1,
        }
    }

    /// A worker joins. Returns the first clock that the scheduler would wait for.
    pub(super) fn join(&mut self, worker: WorkerId) -> Clock {
        self.controller.join(worker, false)
    }

    /// Enters the next epoch; `sync` is the model that holds in it.
    pub(super) fn apply_change(&mut self, now: Time, change: &Change, sync: SyncPolicy) {
        match change {
            // Its first clock was asked for before the change was made.
            Change::Joining { .. } | Change::Served { .. } => {}
            Change::Joined { worker, clock } => self.controller.set_first_clock(*worker, *clock),
            Change::Left { worker } => {
                self.waiting.remove(worker);
                self.controller.remove_worker(*worker, None);
            }
            Change::Policy(_) => {
                if sync.to_string() != self.controller.policy().to_string() {
                    self.controller.set_policy(now, sync);
                }
            }
        }
        self.settle(now);
    }

    /// These workers, and no others, push nothing before a clock.
    pub(super) fn set_idle(&mut self, now: Time, idle: &[(WorkerId, Clock)]) {
        self.controller.set_idle(idle);
        self.settle(now);
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        self.settle(now);
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.controller.next_timeout()
    }

    /// The next worker that may pull.
    pub(super) fn poll(&mut self) -> Option<Release> {
        self.open.pop_front()
    }

    fn settle(&mut self, now: Time) {
        loop {
            while let Some(released) = self.controller.poll_released() {
                if let Some(waiting) = self.waiting.get_mut(&released.worker) {
                    *waiting = waiting.saturating_sub(1);
                }
                let last = released.delay.map(|delay| delay.by);
                self.open.push_back(Release { worker: released.worker, clock: released.token, last });
            }
            if self.controller.advance(now).is_none() {
                // Nobody judges pulls here, so the last call has released nothing.
                break;
            }
        }
    }
}
