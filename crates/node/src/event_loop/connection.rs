//! What a loop keeps for one connection.

use crate::transport::memory::{Letter, Mailbox};
use crate::transport::tcp::TcpConnection;
use paramill_core::types::{NodeId, Time};
use rustix::event::epoll;
use std::collections::VecDeque;
use std::net::Shutdown;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) wire: Wire,
    pub(super) state: State,
    /// It came to us. Who came to us waits while too many answers wait for it; who we went to is always listened to,
    /// so that two ends never wait for each other.
    pub(super) accepted: bool,
    /// Ends once everything is written.
    pub(super) closing: bool,
    /// Something waits to be written.
    pub(super) dirty: bool,
    /// What epoll watches it for.
    pub(super) watched: epoll::EventFlags,
    /// Letters behind an injected delay.
    pub(super) waiting: VecDeque<Letter>,
    held_until: Option<Time>,
}

#[derive(Debug)]
pub(super) enum Wire {
    Tcp(TcpConnection),
    /// `channel` is the other end's name for this connection, once it is known.
    Memory {
        to: Arc<Mailbox>,
        channel: Option<u64>,
    },
}

#[derive(Debug)]
pub(super) enum State {
    Connecting { peer: NodeId, deadline: Time },
    AwaitWelcome { peer: NodeId, deadline: Time },
    AwaitHello { deadline: Time },
    Open { peer: NodeId },
    Refused,
}

impl Connection {
    pub(super) fn new(wire: Wire, state: State) -> Connection {
        Connection {
            wire,
            accepted: matches!(state, State::AwaitHello { .. }),
            state,
            closing: false,
            dirty: false,
            watched: epoll::EventFlags::empty(),
            waiting: VecDeque::new(),
            held_until: None,
        }
    }

    /// Whether nothing more is read from it until it takes what waits for it.
    pub(super) fn is_held_back(&self) -> bool {
        self.accepted && matches!(&self.wire, Wire::Tcp(tcp) if tcp.is_congested())
    }

    /// Whether frames are here that can be handled now.
    pub(super) fn has_leftovers(&self) -> bool {
        matches!(&self.wire, Wire::Tcp(tcp) if tcp.has_leftovers()) && !self.is_held_back()
    }

    /// Nothing leaves before `until` (an injected delay).
    pub(super) fn hold(&mut self, until: Time) {
        self.held_until = self.held_until.max(Some(until));
    }

    pub(super) fn is_held(&self, now: Time) -> bool {
        self.held_until.is_some_and(|until| now < until)
    }

    pub(super) fn handshake_deadline(&self) -> Option<Time> {
        match self.state {
            State::Connecting { deadline, .. }
            | State::AwaitWelcome { deadline, .. }
            | State::AwaitHello { deadline } => Some(deadline),
            State::Open { .. } | State::Refused => None,
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let held = if self.dirty || !self.waiting.is_empty() { self.held_until } else { None };
        [self.handshake_deadline(), held].into_iter().flatten().min()
    }

    /// Tells the other end that nothing more comes.
    pub(super) fn hang_up(&self) {
        match &self.wire {
            Wire::Tcp(tcp) => {
                // An error means that the peer hung up first.
                let _ = tcp.stream.shutdown(Shutdown::Write);
            }
            Wire::Memory { to, channel: Some(channel) } => to.put(Letter::Closed { channel: *channel }),
            Wire::Memory { channel: None, .. } => {}
        }
    }
}
