//! The time in which the application waits, and what it is charged to.
//!
//! Time counts once, however much is waited for in it. When a ticket is due, the time that was waited for it is charged to what
//! came last: the server whose answer was missing alone, and before that all servers alike. Of either, the part for which a
//! condition, the scheduler or the start held the answer back is charged to the worker that was waited for; it is taken to
//! be the first part of a request's time, since a server tells how long it held an answer back, and not when.

use crate::types::{ServerId, Time, WorkerId};
use crate::waits::{Delay, WaitCause, WaitTally, Waited, WaitedNode};
use std::time::Duration;

/// The waiting time of a worker's application.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    tally: WaitTally,
    /// Waits that are under way, each of one thread.
    under_way: usize,
    /// Up to when waiting time is counted.
    counted: Time,
}

impl Waiting {
    /// A thread of the application begins to wait.
    pub(super) fn begin(&mut self, now: Time) {
        self.count(now);
        self.under_way += 1;
    }

    /// A thread of the application waits no more.
    pub(super) fn end(&mut self, now: Time) {
        self.count(now);
        self.under_way = self.under_way.saturating_sub(1);
    }

    /// Counts the time up to now, if somebody waits.
    pub(super) fn count(&mut self, now: Time) {
        if self.under_way > 0 {
            self.tally.add(now.since(self.counted));
        }
        self.counted = self.counted.max(now);
    }

    /// Charges what was waited for a ticket that is due, and not charged yet. `opened` is when the ticket was made.
    pub(super) fn charge(&mut self, arrivals: &Arrivals, opened: Time, me: Option<WorkerId>) {
        let (Some(first), now) = (arrivals.waited_since, self.counted) else { return };
        let waited = now.since(first).min(self.tally.uncharged());
        let mut split = |length: Duration, end: Time, held: Option<Held>, cause: WaitCause| {
            let held = held.filter(|held| held.cause.node() != me.map(WaitedNode::Worker));
            let time = held.map_or(Duration::ZERO, |held| held.time);
            let exchange = length.min(end.since(opened).saturating_sub(time));
            self.tally.charge(cause, exchange);
            if let Some(held) = held {
                self.tally.charge(held.cause, length - exchange);
            }
        };
        let gate = arrivals.gate.map(|gate| Held { cause: gate.cause, time: gate.until.since(opened) });
        let held = |arrival: &Arrival| arrival.delay.map(Held::from).or(gate);
        let Some(last) = &arrivals.last else {
            return split(waited, now, gate, WaitCause::Coordinator);
        };
        let others = arrivals.other.as_ref().map(|other| (other, now.since(other.at).min(waited)));
        let alone = others.map_or(waited, |(_, alone)| alone);
        split(alone, now, held(last), WaitCause::Server(last.server));
        if let Some((other, alone)) = others {
            split(waited - alone, other.at, held(other), WaitCause::Servers);
        }
    }

    pub(super) fn report(&self) -> Waited {
        self.tally.report()
    }

    pub(super) fn check(&self) -> Result<(), String> {
        self.tally.check()
    }
}

/// How long something was held back, and what for.
#[derive(Debug, Clone, Copy)]
struct Held {
    cause: WaitCause,
    time: Duration,
}

impl From<Delay> for Held {
    fn from(delay: Delay) -> Held {
        Held { cause: WaitCause::Push(delay.by), time: delay.time }
    }
}

/// What came last of all that a ticket waits for.
#[derive(Debug, Clone, Default)]
pub(super) struct Arrivals {
    /// When the application first waited for the ticket.
    waited_since: Option<Time>,
    last: Option<Arrival>,
    /// The last one of another server.
    other: Option<Arrival>,
    gate: Option<Gate>,
}

/// The last words of a server to a ticket.
#[derive(Debug, Clone)]
struct Arrival {
    server: ServerId,
    at: Time,
    delay: Option<Delay>,
}

/// Nothing could come before this time.
#[derive(Debug, Clone, Copy)]
struct Gate {
    cause: WaitCause,
    until: Time,
}

impl Arrivals {
    /// The application waits for the ticket.
    pub(super) fn wait(&mut self, now: Time) {
        self.waited_since.get_or_insert(now);
    }

    /// Whether the application has begun to wait for the ticket.
    pub(super) fn is_waited_for(&self) -> bool {
        self.waited_since.is_some()
    }

    /// A server has answered, or acknowledged. What it said of a delay before is still true.
    pub(super) fn note(&mut self, server: ServerId, at: Time, delay: Option<Delay>) {
        if self.last.as_ref().is_some_and(|last| last.server != server) {
            std::mem::swap(&mut self.last, &mut self.other);
        }
        let known = self.last.take().filter(|last| last.server == server).and_then(|last| last.delay);
        self.last = Some(Arrival { server, at, delay: delay.or(known) });
    }

    /// Nothing could come until now, for this cause. The first one counts.
    pub(super) fn hold(&mut self, cause: WaitCause, now: Time) {
        self.gate.get_or_insert(Gate { cause, until: now });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: Option<WorkerId> = Some(WorkerId(0));

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000_000_000)
    }

    fn by(rank: u32, seconds: u64) -> Option<Delay> {
        Some(Delay { by: WorkerId(rank), time: Duration::from_secs(seconds) })
    }

    fn charges(waiting: &Waiting) -> Vec<(WaitCause, f64)> {
        assert_eq!(waiting.check(), Ok(()));
        waiting.report().causes.iter().map(|charge| (charge.cause, charge.seconds)).collect()
    }

    /// One wait for a ticket that was made at second 0, from one second to another.
    fn charged(began: u64, ended: u64, arrivals: impl FnOnce(&mut Arrivals)) -> Vec<(WaitCause, f64)> {
        let (mut waiting, mut of_ticket) = (Waiting::default(), Arrivals::default());
        waiting.begin(at(began));
        of_ticket.wait(at(began));
        arrivals(&mut of_ticket);
        waiting.end(at(ended));
        waiting.charge(&of_ticket, at(0), ME);
        assert_eq!(waiting.report().seconds, (ended - began) as f64);
        charges(&waiting)
    }

    const SERVER: fn(u32) -> WaitCause = |number| WaitCause::Server(ServerId(number));
    const PUSH: fn(u32) -> WaitCause = |rank| WaitCause::Push(WorkerId(rank));

    #[test]
    fn the_only_server_is_charged_with_what_no_condition_held_back() {
        let one = |delay| move |arrivals: &mut Arrivals| arrivals.note(ServerId(0), at(10), delay);
        assert_eq!(charged(0, 10, one(None)), [(SERVER(0), 10.0)]);
        assert_eq!(charged(0, 10, one(by(3, 7))), [(PUSH(3), 7.0), (SERVER(0), 3.0)]);
        // The application came late, when the worker was waited for, and when it was no more.
        assert_eq!(charged(4, 10, one(by(3, 7))), [(PUSH(3), 3.0), (SERVER(0), 3.0)]);
        assert_eq!(charged(8, 10, one(by(3, 7))), [(SERVER(0), 2.0)]);
        // Nobody costs others time by being waited for by itself, nor more than was waited.
        assert_eq!(charged(0, 10, one(by(0, 7))), [(SERVER(0), 10.0)]);
        assert_eq!(charged(0, 10, one(by(3, 70))), [(PUSH(3), 10.0)]);
    }

    #[test]
    fn the_last_server_is_charged_with_the_time_that_it_was_waited_for_alone() {
        let two = |arrivals: &mut Arrivals| {
            arrivals.note(ServerId(1), at(4), None);
            arrivals.note(ServerId(0), at(6), by(3, 5));
            arrivals.note(ServerId(1), at(9), None);
            // An acknowledgement behind the answer.
            arrivals.note(ServerId(1), at(10), None);
        };
        assert_eq!(charged(0, 10, two), [(PUSH(3), 5.0), (SERVER(1), 4.0), (WaitCause::Servers, 1.0)]);
        assert_eq!(charged(7, 10, two), [(SERVER(1), 3.0)]);
        // Both were held back for the same worker, which is charged once.
        let both = |arrivals: &mut Arrivals| {
            arrivals.note(ServerId(0), at(9), by(3, 8));
            arrivals.note(ServerId(1), at(10), by(3, 8));
        };
        assert_eq!(charged(0, 10, both), [(PUSH(3), 8.0), (SERVER(1), 1.0), (WaitCause::Servers, 1.0)]);
    }

    #[test]
    fn what_the_coordinator_held_back_is_charged_to_the_last_worker() {
        let barrier =
            |rank| move |arrivals: &mut Arrivals| arrivals.hold(WaitCause::Barrier(WorkerId(rank)), at(9));
        assert_eq!(
            charged(0, 10, barrier(2)),
            [(WaitCause::Barrier(WorkerId(2)), 9.0), (WaitCause::Coordinator, 1.0)]
        );
        assert_eq!(charged(0, 10, barrier(0)), [(WaitCause::Coordinator, 10.0)]);
        let start = |arrivals: &mut Arrivals| {
            arrivals.hold(WaitCause::Start(WorkerId(1)), at(6));
            arrivals.note(ServerId(0), at(10), None);
        };
        assert_eq!(charged(0, 10, start), [(WaitCause::Start(WorkerId(1)), 6.0), (SERVER(0), 4.0)]);
    }

    #[test]
    fn time_counts_once_however_many_threads_wait() {
        let mut waiting = Waiting::default();
        let mut tickets = [Arrivals::default(), Arrivals::default()];
        waiting.begin(at(0));
        tickets[0].wait(at(0));
        waiting.begin(at(2));
        tickets[1].wait(at(2));
        tickets[1].note(ServerId(1), at(5), None);
        waiting.end(at(5));
        waiting.charge(&tickets[1], at(2), ME);
        tickets[0].note(ServerId(0), at(10), None);
        waiting.end(at(10));
        waiting.charge(&tickets[0], at(0), ME);
        assert_eq!(charges(&waiting), [(SERVER(0), 7.0), (SERVER(1), 3.0)]);
        assert_eq!(waiting.report().seconds, 10.0);
    }

    /// The application gives up, does something else, and waits again.
    #[test]
    fn time_of_a_wait_that_was_given_up_is_charged_when_the_ticket_is_due() {
        let (mut waiting, mut ticket) = (Waiting::default(), Arrivals::default());
        for (began, ended) in [(0, 5), (6, 8)] {
            waiting.begin(at(began));
            ticket.wait(at(began));
            waiting.end(at(ended));
        }
        assert_eq!((charges(&waiting), waiting.report().seconds), (vec![], 7.0));
        ticket.note(ServerId(0), at(8), None);
        waiting.charge(&ticket, at(0), ME);
        waiting.charge(&ticket, at(0), ME);
        assert_eq!(charges(&waiting), [(SERVER(0), 7.0)]);
    }
}
