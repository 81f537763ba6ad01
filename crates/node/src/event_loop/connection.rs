//! What a loop keeps for one connection.

use super::strangers::Stranger;
use crate::transport::carrier::Carrier;
use paramill_core::types::{ConnectionId, Time};
use rustix::event::epoll;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) carrier: Box<dyn Carrier>,
    pub(super) state: State,
    /// Ends once everything is written, or at this time.
    pub(super) closing: Option<Time>,
    /// Counts it among the strangers of this process, as long as it is one.
    pub(super) stranger: Option<Stranger>,
    /// Its loop will look at it: something waits to be written, or to be watched for.
    pub(super) dirty: bool,
    /// Its loop will look at it when the node may send again.
    pub(super) is_held: bool,
    /// What epoll watches it for.
    pub(super) watched: epoll::EventFlags,
    /// Whether the peer came to us. Only then does a long queue keep us from reading: of two ends that both stopped
    /// reading, neither would ever move again.
    pub(super) accepted: bool,
    /// When the last frame leaves for which an injected delay slows the connection.
    held_until: Time,
}

#[derive(Debug)]
pub(super) enum State {
    Connecting {
        name: ConnectionId,
        deadline: Time,
    },
    AwaitWelcome {
        name: ConnectionId,
        deadline: Time,
    },
    AwaitHello {
        deadline: Time,
    },
    Open {
        name: ConnectionId,
    },
    Refused,
    /// The role has closed it, and knows of it no more.
    Leaving,
}

impl Connection {
    pub(super) fn new(carrier: Box<dyn Carrier>, state: State) -> Connection {
        let accepted = matches!(state, State::AwaitHello { .. });
        Connection {
            carrier,
            state,
            closing: None,
            stranger: None,
            dirty: false,
            is_held: false,
            watched: epoll::EventFlags::empty(),
            accepted,
            held_until: Time::ZERO,
        }
    }

    /// When a frame takes its turn that is sent now and slows the connection by `delay`: never before the one ahead of it.
    pub(super) fn hold(&mut self, now: Time, delay: Duration) -> Time {
        let leaves = self.held_until.max(now + delay);
        if !delay.is_zero() {
            self.held_until = leaves;
        }
        leaves
    }

    /// Whether so much waits to be written that nothing more should be asked for.
    pub(super) fn is_congested(&self) -> bool {
        let is_copy = matches!(self.state, State::Open { name } if name.is_copy());
        self.accepted && !is_copy && self.carrier.is_congested()
    }

    /// Whether frames are here that were not handled.
    pub(super) fn has_unhandled(&self) -> bool {
        self.carrier.has_leftovers()
    }

    /// Whether frames are here that can be handled now.
    pub(super) fn has_leftovers(&self) -> bool {
        self.has_unhandled() && !self.is_congested()
    }

    /// Whether nothing waits to be written.
    pub(super) fn is_silent(&self) -> bool {
        self.carrier.is_silent()
    }

    /// When it ends, unless its handshake is over by then; for one that is closed, whether or not everything has left.
    pub(super) fn deadline(&self) -> Option<Time> {
        match self.state {
            _ if self.closing.is_some() => self.closing,
            State::Connecting { deadline, .. }
            | State::AwaitWelcome { deadline, .. }
            | State::AwaitHello { deadline } => Some(deadline),
            State::Open { .. } | State::Refused | State::Leaving => None,
        }
    }

    /// Tells the other end that nothing more comes.
    pub(super) fn hang_up(&mut self) {
        self.carrier.hang_up();
    }
}
