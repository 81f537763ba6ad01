//! The non-overlapping baseline: a scheduler between push and pull, as in the systems that FluentPS improves on.
//!
//! A worker reports once all servers acknowledged its pushes, and pulls when the scheduler lets it go. The scheduler
//! judges by the very controller that a shard would use.

use crate::consistency::{Controller, PullOutcome, SyncPolicy};
use crate::types::{Clock, Time, WorkerId};
use std::collections::VecDeque;

#[derive(Debug)]
pub(super) struct Gate {
    controller: Controller,
    open: VecDeque<(WorkerId, Clock)>,
}

impl Gate {
    pub(super) fn new(policy: SyncPolicy, workers: impl IntoIterator<Item = WorkerId>, seed: u64) -> Gate {
        Gate { controller: Controller::new(policy, workers, seed), open: VecDeque::new() }
    }

    pub(super) fn pushed(&mut self, now: Time, worker: WorkerId, clock: Clock) {
        let admit = self.controller.admit(worker, clock);
        self.controller.push(now, worker, clock, admit, None);
        self.settle(now);
        // The token is the clock: a worker waits for one at a time.
        if let PullOutcome::Answer { .. } = self.controller.pull(now, worker, clock + 1, clock) {
            self.open.push_back((worker, clock));
        }
    }

    pub(super) fn remove(&mut self, now: Time, worker: WorkerId) {
        self.controller.remove_worker(now, worker);
        self.settle(now);
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        self.settle(now);
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.controller.next_timeout()
    }

    /// The next worker that may pull, and after which clock.
    pub(super) fn poll(&mut self) -> Option<(WorkerId, Clock)> {
        self.open.pop_front()
    }

    fn settle(&mut self, now: Time) {
        loop {
            while let Some(released) = self.controller.poll_released() {
                self.open.push_back((released.worker, released.token));
            }
            if self.controller.advance(now).is_none() {
                break;
            }
        }
    }
}
