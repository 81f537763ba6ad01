//! Requests of workers that an aggregator has put to a shard under numbers of its own.

use super::aggregate::AggregateId;
use super::members::Caller;
use crate::store::Place;
use crate::types::{AggregatorId, Clock, WorkerId};
use crate::waits::Delay;
use std::collections::BTreeMap;

/// A worker's request that a shard is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) worker: WorkerId,
    /// The aggregator below that it came through.
    pub(super) through: Option<AggregatorId>,
    pub(super) table: usize,
    pub(super) clock: Clock,
    /// The worker's own number for it.
    pub(super) request: u64,
    /// The epoch that the worker asked in. What it sends again in another one is another request to the shard.
    pub(super) epoch: u32,
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
    /// Place in the worker's shared memory for the table's first parameter.
    pub(super) reply_place: Option<Place>,
    /// How long its push was held here for those of others.
    pub(super) hold: Option<Delay>,
}

impl Route {
    /// Who is to be answered.
    pub(super) fn caller(&self) -> Caller {
        Caller { worker: self.worker, through: self.through }
    }
}

/// All of them, by the aggregator's numbers.
#[derive(Debug, Default)]
pub(super) struct Routes {
    by_number: BTreeMap<u64, Route>,
    /// Requests that were passed on, by the worker's number: a request may have several frames.
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

    /// A request was held here for others.
    pub(super) fn hold(&mut self, number: u64, hold: Option<Delay>) {
        if let Some(route) = self.by_number.get_mut(&number) {
            route.hold = hold;
        }
    }

    pub(super) fn get(&self, number: u64) -> Option<&Route> {
        self.by_number.get(&number)
    }

    /// A request that was passed on before: its number, and what is known of it.
    pub(super) fn passed(&mut self, worker: WorkerId, request: u64) -> Option<(u64, &mut Route)> {
        let number = *self.passed.get(&(worker, request))?;
        Some((number, self.by_number.get_mut(&number)?))
    }

    /// An acknowledgement came; `None` when no route waits for it.
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

    /// Closes all routes of a worker whose connection is gone: answers that still come are dropped.
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
        // A worker's requests are counted only when there are as many in all.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn route(worker: u32, request: u64, aggregate: Option<AggregateId>) -> Route {
        Route {
            worker: WorkerId(worker),
            through: None,
            table: 0,
            clock: 0,
            request,
            epoch: 1,
            aggregate,
            is_push: true,
            awaits_ack: true,
            awaits_params: true,
            bytes: 0,
            reply_place: None,
            hold: None,
        }
    }

    #[test]
    fn a_route_ends_with_the_last_thing_that_it_waits_for() {
        let mut routes = Routes::default();
        let number = routes.open(route(0, 5, None));
        assert_eq!(routes.passed(WorkerId(0), 5).map(|(number, _)| number), Some(number));
        assert_eq!(routes.acknowledge(number).map(|route| route.request), Some(5));
        assert_eq!(routes.acknowledge(number), None, "once");
        assert!(routes.get(number).is_some());
        routes.answered(number);
        assert!(routes.get(number).is_none() && routes.passed(WorkerId(0), 5).is_none());
        assert_eq!(routes.check(), Ok(()));
    }

    #[test]
    fn routes_of_one_worker_are_closed_together() {
        let mut routes = Routes::default();
        let aggregate = Some(AggregateId(1));
        let numbers = [(0, 1, None), (0, 2, aggregate), (1, 1, None)]
            .map(|(worker, request, aggregate)| routes.open(route(worker, request, aggregate)));
        assert!(routes.passed(WorkerId(0), 2).is_none(), "it was not passed on");
        assert!(routes.has_many(WorkerId(0), 1) && !routes.has_many(WorkerId(0), 2));
        routes.close_all_of(WorkerId(0));
        let is_there = numbers.map(|number| routes.get(number).is_some());
        assert_eq!((is_there, routes.check()), ([false, false, true], Ok(())));
        routes.clear();
        assert!(routes.get(numbers[2]).is_none() && routes.passed(WorkerId(1), 1).is_none());
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut routes = Routes::default();
        let number = routes.open(route(0, 1, None));
        routes.by_number.remove(&number);
        assert!(routes.check().is_err(), "a request without a route");
        let mut routes = Routes::default();
        routes.open(Route { awaits_ack: false, awaits_params: false, ..route(0, 1, None) });
        assert!(routes.check().is_err(), "a route that ends with nothing");
    }
}
