//! A connection that a role wants to keep: when to try again, and when to give up and name the peer.

use crate::limits;
use crate::role::{Lost, Output};
use crate::types::{NodeId, Time};
use std::fmt;
use std::time::Duration;

/// A connection to one peer, wanted from its creation on.
#[derive(Debug, Clone)]
pub struct Link {
    peer: NodeId,
    address: String,
    state: State,
    pause: Duration,
    was_up: bool,
    /// The address is that of an aggregator, which the peer is behind.
    through_aggregator: bool,
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
    pub fn new(now: Time, peer: NodeId, address: impl Into<String>) -> Link {
        let state = State::Down { since: now, retry_at: now, why: "not tried yet".into() };
        Link {
            peer,
            address: address.into(),
            state,
            pause: limits::RECONNECT_MIN,
            was_up: false,
            through_aggregator: false,
        }
    }

    /// A link to a peer that is reached through an aggregator, whose address this is.
    pub fn through_aggregator(now: Time, peer: NodeId, address: impl Into<String>) -> Link {
        Link { through_aggregator: true, ..Link::new(now, peer, address) }
    }

    /// Whether it has ever been connected.
    pub fn was_up(&self) -> bool {
        self.was_up
    }

    /// Where the peer is.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether frames can be sent.
    pub fn is_up(&self) -> bool {
        self.state == State::Up
    }

    /// The driver connected it.
    pub fn connected(&mut self) {
        self.state = State::Up;
        self.was_up = true;
        self.pause = limits::RECONNECT_MIN;
    }

    /// The connection broke or could not be made.
    pub fn disconnected(&mut self, now: Time, why: &Lost) {
        let since = match &self.state {
            State::Down { since, .. } | State::Connecting { since, .. } => *since,
            State::Up => now,
        };
        self.state = State::Down { since, retry_at: now + self.pause, why: why.to_string() };
        self.pause = (self.pause * 2).min(limits::RECONNECT_MAX);
    }

    /// What to do now, if it is time to try again.
    pub fn poll(&mut self, now: Time) -> Option<Output> {
        match &mut self.state {
            State::Down { since, retry_at, why } if *retry_at <= now => {
                self.state = State::Connecting { since: *since, why: std::mem::take(why) };
                Some(Output::Connect { peer: self.peer, address: self.address.clone() })
            }
            _ => None,
        }
    }

    /// When [`Link::poll`] or [`Link::overdue`] will have something to say.
    pub fn next_timeout(&self) -> Option<Time> {
        match &self.state {
            State::Down { since, retry_at, .. } => Some((*retry_at).min(*since + limits::CONNECT_DEADLINE)),
            State::Connecting { since, .. } => Some(*since + limits::CONNECT_DEADLINE),
            State::Up => None,
        }
    }

    /// A sentence, once the peer has been out of reach for longer than the deadline.
    pub fn overdue(&self, now: Time) -> Option<String> {
        let (since, why) = match &self.state {
            State::Down { since, why, .. } | State::Connecting { since, why } => (*since, why),
            State::Up => return None,
        };
        (now >= since + limits::CONNECT_DEADLINE).then(|| {
            format!(
                "{self} is unreachable for {} s (last: {why}); check that it runs and that its address and port \
                 can be reached from here",
                limits::CONNECT_DEADLINE.as_secs()
            )
        })
    }
}

/// Whom it leads to, and where that is.
impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.through_aggregator {
            true => write!(f, "{} through the aggregator at {}", self.peer, self.address),
            false => write!(f, "{} at {}", self.peer, self.address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_again_with_growing_pauses_and_then_names_the_peer() {
        let mut now = Time::ZERO;
        let mut link = Link::new(now, NodeId::Coordinator, "host:7070");
        let mut tries = 0;
        let sentence = loop {
            if link.poll(now).is_some() {
                tries += 1;
                link.disconnected(now, &Lost::Broken("connection refused".into()));
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
    fn a_link_that_was_up_starts_its_deadline_anew() {
        let mut link = Link::new(Time::ZERO, NodeId::Coordinator, "x");
        link.poll(Time::ZERO);
        link.connected();
        assert_eq!(link.next_timeout(), None);
        let later = Time::from_secs_f64(100.0);
        link.disconnected(later, &Lost::Broken("reset".into()));
        assert_eq!(link.overdue(later), None);
        assert!(link.poll(later + limits::RECONNECT_MIN).is_some());
    }
}
