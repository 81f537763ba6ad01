//! Requests of workers that an aggregator has put to a shard under numbers of its own.

use super::aggregate::AggregateId;
use crate::store::Place;
use crate::types::{Clock, WorkerId};
use std::collections::BTreeMap;

/// A worker's request that a shard is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) worker: WorkerId,
    pub(super) table: usize,
    pub(super) clock: Clock,
    /// The worker's own number for it.
    pub(super) request: u64,
    /// The aggregate that its push is complete in; `None` for a request that was passed on as it is.
    pub(super) aggregate: Option<AggregateId>,
    /// Whether it is a push that was passed on.
    pub(super) is_push: bool,
    /// An acknowledgement is to come.
    pub(super) awaits_ack: bool,
    /// Parameters are to come.
    pub(super) awaits_params: bool,
    /// Payload bytes that were passed on for it.
    pub(super) bytes: usize,
    /// Where in the worker's shared memory the table's parameters are to lie.
    pub(super) reply_place: Option<Place>,
}

/// All of them, by the aggregator's numbers.
#[derive(Debug, Default)]
pub(super) struct Routes {
    by_number: BTreeMap<u64, Route>,
    /// Those that were passed on, by the worker's number: a request may have several frames.
    passed: BTreeMap<(WorkerId, u64), u64>,
    last: u64,
}

impl Routes {
    pub(super) fn open(&mut self, route: Route) -> u64 {
        self.last += 1;
        if route.aggregate.is_none() {
            self.passed.insert((route.worker, route.request), self.last);
        }
        self.by_number.insert(self.last, route);
        self.last
    }

    pub(super) fn get(&self, number: u64) -> Option<&Route> {
        self.by_number.get(&number)
    }

    /// A request that was passed on before: its number, and what is known of it.
    pub(super) fn passed(&mut self, worker: WorkerId, request: u64) -> Option<(u64, &mut Route)> {
        let number = *self.passed.get(&(worker, request))?;
        Some((number, self.by_number.get_mut(&number)?))
    }

    /// An acknowledgement came; `None` when nobody waits for it.
    pub(super) fn acknowledge(&mut self, number: u64) -> Option<Route> {
        let route = self.by_number.get_mut(&number).filter(|route| route.awaits_ack)?;
        route.awaits_ack = false;
        let known = *route;
        self.close_if_done(number);
        Some(known)
    }

    /// The last parameters came.
    pub(super) fn answered(&mut self, number: u64) {
        if let Some(route) = self.by_number.get_mut(&number) {
            route.awaits_params = false;
            self.close_if_done(number);
        }
    }

    pub(super) fn close(&mut self, number: u64) -> Option<Route> {
        let route = self.by_number.remove(&number)?;
        if self.passed.get(&(route.worker, route.request)) == Some(&number) {
            self.passed.remove(&(route.worker, route.request));
        }
        Some(route)
    }

    /// The worker's connection is gone; what is answered for it now is nobody's.
    pub(super) fn close_all_of(&mut self, worker: WorkerId) {
        self.by_number.retain(|_, route| route.worker != worker);
        self.passed.retain(|(of, _), _| *of != worker);
    }

    pub(super) fn clear(&mut self) {
        self.by_number.clear();
        self.passed.clear();
    }

    /// Whether a worker has at least as many requests under way.
    pub(super) fn has_many(&self, worker: WorkerId, limit: usize) -> bool {
        // Nobody is counted before all together could be too many.
        self.passed.len() >= limit && self.passed.range((worker, 0)..=(worker, u64::MAX)).count() >= limit
    }

    /// Whether every request that was passed on is found by its worker's number.
    pub(super) fn check(&self) -> Result<(), String> {
        for (&(worker, request), number) in &self.passed {
            let route = self.by_number.get(number);
            if route.is_none_or(|route| (route.worker, route.request) != (worker, request)) {
                return Err(format!("request {request} of {worker} is not at {number}"));
            }
        }
        match self.by_number.values().find(|route| !route.awaits_ack && !route.awaits_params) {
            Some(route) => Err(format!("{route:?} waits for nothing")),
            None => Ok(()),
        }
    }

    fn close_if_done(&mut self, number: u64) {
        let is_done = |route: &Route| !route.awaits_ack && !route.awaits_params;
        if self.by_number.get(&number).is_some_and(is_done) {
            self.close(number);
        }
    }
}
