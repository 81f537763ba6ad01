//! A connection that a role wants to keep: where and when to try again, and when to give up and name the peer.

use crate::address::Addresses;
use crate::limits;
use crate::role::{Lost, Output};
use crate::standstill::{self, Standstill};
use crate::types::{ConnectionId, Time};
use std::fmt;
use std::time::Duration;

/// A connection, wanted from its creation on.
///
/// The peer's addresses are tried in order, one right after the other, with a pause once all of them have failed.
#[derive(Debug, Clone)]
pub struct Link {
    connection: ConnectionId,
    addresses: Addresses,
    /// Which address is next, or in use.
    at: usize,
    /// Addresses that failed since the last pause.
    failed: usize,
    state: State,
    standstill: Standstill,
    pause: Duration,
    was_up: bool,
    /// How long the peer may be away once it was reached, if that is longer than usual.
    patience: Duration,
}

#[derive(Debug, Clone, PartialEq)]
enum State {
    /// Waits to be tried (again) at `retry_at`.
    Down { since: Time, retry_at: Time, why: String },
    /// The driver is at it.
    Connecting { since: Time, why: String },
    /// Stands.
    Up,
}

impl Link {
    /// A link that is to be connected now.
    pub fn new(now: Time, connection: impl Into<ConnectionId>, addresses: impl Into<Addresses>) -> Link {
        let state = State::Down { since: now, retry_at: now, why: "not tried yet".into() };
        Link {
            connection: connection.into(),
            addresses: addresses.into(),
            at: 0,
            failed: 0,
            state,
            standstill: Standstill::default(),
            pause: limits::RECONNECT_MIN,
            was_up: false,
            patience: Duration::ZERO,
        }
    }

    /// The connection's name.
    pub fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// Whether it has ever been connected.
    pub fn was_up(&self) -> bool {
        self.was_up
    }

    /// The peer may be away for so long once it was reached: it is started anew, and knows what it knew.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Addresses of the peer, in the order of trying.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Why there is no connection, if there is none.
    pub fn why(&self) -> Option<&str> {
        match &self.state {
            State::Down { why, .. } | State::Connecting { why, .. } => Some(why),
            State::Up => None,
        }
    }

    /// Whether frames can be sent.
    pub fn is_up(&self) -> bool {
        self.state == State::Up
    }

    /// The peer is reached at other addresses from now on. It is the same peer: it has been connected before if it had been.
    pub fn move_to(&mut self, now: Time, addresses: Addresses) {
        *self = Link { was_up: self.was_up, ..Link::new(now, self.connection, addresses) };
    }

    /// The driver connected it.
    pub fn connected(&mut self) {
        self.state = State::Up;
        self.was_up = true;
        self.failed = 0;
        self.pause = limits::RECONNECT_MIN;
    }

    /// The connection broke or could not be made.
    pub fn disconnected(&mut self, now: Time, why: &Lost) {
        let (since, is_attempt) = match &self.state {
            State::Down { since, .. } => (*since, false),
            State::Connecting { since, .. } => (*since, true),
            State::Up => {
                // The best address before the connection broke may be the best again.
                self.at = 0;
                self.standstill = Standstill::default();
                (now, false)
            }
        };
        // A peer that refuses was reached: another address leads to the same answer.
        let retry_at = match (is_attempt, why) {
            (true, Lost::Broken(_)) if self.try_next() => now,
            _ => {
                let retry_at = now + self.pause;
                self.pause = (self.pause * 2).min(limits::RECONNECT_MAX);
                retry_at
            }
        };
        self.state = State::Down { since, retry_at, why: why.to_string() };
    }

    /// Goes on to the next address. False once all of them have failed in a row.
    fn try_next(&mut self) -> bool {
        let count = self.addresses.count().max(1);
        self.at = (self.at + 1) % count;
        self.failed = (self.failed + 1) % count;
        self.failed > 0
    }

    /// The output to carry out now, if it is time to try again.
    pub fn poll(&mut self, now: Time) -> Option<Output> {
        self.notice_standstill(now);
        match &mut self.state {
            State::Down { since, retry_at, why } if *retry_at <= now => {
                self.state = State::Connecting { since: *since, why: std::mem::take(why) };
                let address = self.addresses.iter().nth(self.at).unwrap_or_default().to_owned();
                Some(Output::Connect { connection: self.connection, address })
            }
            _ => None,
        }
    }

    /// Time in which this node stood still does not count: it did not try to reach the peer.
    fn notice_standstill(&mut self, now: Time) {
        if let State::Down { since, .. } | State::Connecting { since, .. } = &mut self.state
            && let Some(lost) = self.standstill.noticed(now)
        {
            standstill::exclude(since, now, lost);
        }
    }

    /// When [`Link::poll`] or [`Link::overdue`] will have something to say, or time has to be looked at.
    pub fn next_timeout(&self) -> Option<Time> {
        let next = match &self.state {
            State::Down { since, retry_at, .. } => (*retry_at).min(self.given_up_at(*since)),
            State::Connecting { since, .. } => self.given_up_at(*since),
            State::Up => return None,
        };
        Some(next.min(self.standstill.next_timeout()))
    }

    /// A sentence, once the peer has been out of reach for longer than the deadline. To be asked after [`Link::poll`].
    pub fn overdue(&self, now: Time) -> Option<String> {
        let (since, why) = match &self.state {
            State::Down { since, why, .. } | State::Connecting { since, why } => (*since, why),
            State::Up => return None,
        };
        (now >= self.given_up_at(since)).then(|| {
            format!(
                "{self} is unreachable for {} s (last: {why}); check that it runs and that its address and port \
                 can be reached from here",
                self.deadline().as_secs()
            )
        })
    }

    fn given_up_at(&self, since: Time) -> Time {
        self.standstill.deadline(since, self.deadline())
    }

    /// Long enough for every address to be tried, even if none of the others answers.
    fn deadline(&self) -> Duration {
        let attempts = self.addresses.count() as u32 + 1;
        let patience = if self.was_up { self.patience } else { Duration::ZERO };
        limits::CONNECT_DEADLINE.max(limits::ATTEMPT_DEADLINE * attempts).max(patience)
    }
}

/// Whom it leads to, and where that is.
impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.connection, self.addresses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{NodeId, ServerId, ShardId};
    use crate::wire::Refusal;

    fn broken() -> Lost {
        Lost::Broken("connection refused".into())
    }

    fn link(addresses: &[&str]) -> Link {
        let addresses: Addresses = addresses.iter().map(|&address| address.to_owned()).collect();
        Link::new(Time::ZERO, NodeId::Coordinator, addresses)
    }

    /// The address to try now.
    fn attempt(link: &mut Link, now: Time) -> Option<String> {
        link.poll(now).map(|output| match output {
            Output::Connect { address, .. } => address,
            other => panic!("a link only connects: {other:?}"),
        })
    }

    /// Lets time pass while nothing comes of an attempt, and calls the link when it wants to be called.
    fn wait(link: &mut Link, until: Time) -> Time {
        while let Some(next) = link.next_timeout().filter(|next| *next < until) {
            link.poll(next);
        }
        link.poll(until);
        until
    }

    #[test]
    fn tries_again_with_growing_pauses_and_then_names_the_peer() {
        let mut now = Time::ZERO;
        let mut link = Link::new(now, NodeId::Coordinator, "host:7070");
        let mut tries = 0;
        let sentence = loop {
            if link.poll(now).is_some() {
                tries += 1;
                link.disconnected(now, &broken());
            }
            if let Some(sentence) = link.overdue(now) {
                break sentence;
            }
            now = link.next_timeout().expect("a link that is down wants to be called");
        };
        assert!((25..60).contains(&tries), "{tries}");
        assert_eq!(now, Time::ZERO + limits::CONNECT_DEADLINE);
        assert!(sentence.contains("coordinator at host:7070") && sentence.contains("refused"), "{sentence}");
    }

    #[test]
    fn the_time_that_this_node_stood_still_does_not_count() {
        let mut link = link(&["a:1"]);
        attempt(&mut link, Time::ZERO);
        let woken = Time::ZERO + 2 * limits::CONNECT_DEADLINE;
        assert_eq!(attempt(&mut link, woken), None, "the attempt is not decided");
        assert_eq!(link.overdue(woken), None);
        let mut now = woken;
        link.disconnected(now, &broken());
        let sentence = loop {
            now = link.next_timeout().expect("a link that is down wants to be called");
            if attempt(&mut link, now).is_some() {
                link.disconnected(now, &broken());
            }
            if let Some(sentence) = link.overdue(now) {
                break sentence;
            }
        };
        // The time until the call that came late counts as any other.
        assert_eq!(now, woken + (limits::CONNECT_DEADLINE - limits::HEARTBEAT_EVERY), "{sentence}");
    }

    #[test]
    fn a_node_that_stands_still_again_and_again_still_gives_up() {
        let mut link = link(&["a:1"]);
        let mut now = Time::ZERO;
        attempt(&mut link, now);
        let mut ran = Duration::ZERO;
        // It runs for two seconds at a time, and stands still for as long in between.
        loop {
            for _ in 0..4 {
                now = now + limits::HEARTBEAT_EVERY;
                ran += limits::HEARTBEAT_EVERY;
                link.poll(now);
            }
            if link.overdue(now).is_some() {
                break;
            }
            assert!(ran <= limits::CONNECT_DEADLINE, "it never gives up");
            now = now + limits::HEARTBEAT_EVERY + Duration::from_secs(2);
            link.poll(now);
        }
    }

    #[test]
    fn a_peer_that_is_started_anew_is_waited_for_once_it_was_reached() {
        let mut link = link(&["host:1"]);
        link.set_patience(Duration::from_secs(600));
        let late = Time::ZERO + limits::CONNECT_DEADLINE;
        assert!(link.overdue(late).is_some(), "nobody was ever there");
        link.connected();
        link.disconnected(Time::ZERO, &broken());
        assert_eq!(link.overdue(late), None);
        let sentence = link.overdue(Time::ZERO + Duration::from_secs(600)).expect("it is over");
        assert!(sentence.contains("is unreachable for 600 s"), "{sentence}");
    }

    #[test]
    fn a_link_that_was_up_starts_its_deadline_anew() {
        let mut link = Link::new(Time::ZERO, NodeId::Coordinator, "x");
        link.poll(Time::ZERO);
        assert!(!link.was_up() && !link.is_up());
        assert_eq!(link.why(), Some("not tried yet"));
        link.connected();
        assert!(link.was_up() && link.is_up());
        assert_eq!((link.next_timeout(), link.why(), link.overdue(Time::ZERO)), (None, None, None));
        let later = Time::from_secs_f64(100.0);
        link.disconnected(later, &Lost::Broken("reset".into()));
        assert_eq!((link.overdue(later), link.why()), (None, Some("reset")));
        assert!(link.was_up() && !link.is_up());
        assert!(link.poll(later + limits::RECONNECT_MIN).is_some());
    }

    #[test]
    fn all_addresses_are_tried_at_once_and_then_there_is_a_pause() {
        let mut link = link(&["unix:x", "a:1", "b:1"]);
        let mut now = Time::ZERO;
        for round in 0..3 {
            for expected in ["unix:x", "a:1", "b:1"] {
                assert_eq!(attempt(&mut link, now).as_deref(), Some(expected), "round {round}");
                link.disconnected(now, &broken());
            }
            assert_eq!(attempt(&mut link, now), None);
            now = link.next_timeout().expect("it wants to be called");
        }
        assert_eq!(now, Time::ZERO + 7 * limits::RECONNECT_MIN);
    }

    #[test]
    fn the_error_names_every_address() {
        let mut link = link(&["a:1", "b:1"]);
        attempt(&mut link, Time::ZERO);
        link.disconnected(Time::ZERO, &broken());
        let sentence = link.overdue(Time::ZERO + limits::CONNECT_DEADLINE).expect("it is over");
        assert!(sentence.contains("coordinator at a:1, b:1 is unreachable for 30 s"), "{sentence}");
    }

    #[test]
    fn the_error_says_which_aggregator_a_peer_is_behind() {
        let shard = ShardId { server: ServerId(2), core: 1 };
        let link = Link::new(Time::ZERO, ConnectionId::AggregatorFor(shard), "rack:7070");
        let sentence = link.overdue(Time::ZERO + limits::CONNECT_DEADLINE).expect("it is over");
        assert!(sentence.contains(&format!("{shard} through the aggregator at rack:7070")), "{sentence}");
    }

    #[test]
    fn after_a_broken_connection_the_first_choice_is_tried_first() {
        let mut link = link(&["a:1", "b:1"]);
        attempt(&mut link, Time::ZERO);
        link.disconnected(Time::ZERO, &broken());
        assert_eq!(attempt(&mut link, Time::ZERO).as_deref(), Some("b:1"));
        link.connected();
        link.disconnected(Time::ZERO, &broken());
        let soon = Time::ZERO + limits::RECONNECT_MIN;
        assert_eq!(attempt(&mut link, soon).as_deref(), Some("a:1"));
        link.disconnected(soon, &broken());
        assert_eq!(attempt(&mut link, soon).as_deref(), Some("b:1"));
    }

    #[test]
    fn a_peer_that_refuses_for_now_is_asked_again_where_it_was_reached() {
        let mut link = link(&["a:1", "b:1"]);
        attempt(&mut link, Time::ZERO);
        link.disconnected(Time::ZERO, &broken());
        attempt(&mut link, Time::ZERO);
        link.disconnected(Time::ZERO, &Lost::Refused(Refusal { reason: "no plan yet".into(), retry: true }));
        assert_eq!(attempt(&mut link, Time::ZERO), None);
        let soon = Time::ZERO + limits::RECONNECT_MIN;
        assert_eq!(attempt(&mut link, soon).as_deref(), Some("b:1"));
    }

    #[test]
    fn many_addresses_at_which_nobody_answers_are_all_tried_before_the_end() {
        let names: Vec<String> = (0..limits::MAX_ADDRESSES).map(|n| format!("h{n}:1")).collect();
        let mut link =
            Link::new(Time::ZERO, NodeId::Coordinator, names.iter().cloned().collect::<Addresses>());
        let mut now = Time::ZERO;
        for name in &names {
            assert_eq!(link.overdue(now), None);
            assert_eq!(attempt(&mut link, now).as_ref(), Some(name));
            now = wait(&mut link, now + limits::ATTEMPT_DEADLINE);
            link.disconnected(now, &Lost::Broken("no answer within the deadline".into()));
        }
        assert_eq!(link.overdue(now), None);
        now = wait(&mut link, now + limits::ATTEMPT_DEADLINE);
        assert!(link.overdue(now).is_some());
    }
}
