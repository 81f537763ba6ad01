//! New connections: who may be about to say who it is, and how many of them.

use super::connection::{Connection, State, Wire};
use super::{EventLoop, HANDSHAKE_DEADLINE, LISTENER, RoleCell};
use crate::clock;
use crate::transport::stream::StreamConnection;
use paramill_core::limits;
use paramill_core::role::Lost;
use paramill_core::types::Time;
use rustix::event::epoll;
use std::io;
use std::time::Duration;

/// How long a loop that could not take a connection waits before it tries again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl<C: RoleCell> EventLoop<C> {
    /// Takes new connections on all interfaces; each must say hello first.
    pub(super) fn accept_all(&mut self) {
        (0..self.setup.listeners.len()).for_each(|listener| self.accept_from(listener));
    }

    fn accept_from(&mut self, listener: usize) {
        loop {
            match self.setup.listeners[listener].accept(&self.setup.sockets) {
                Ok(Ok(stream)) => {
                    self.make_room();
                    let deadline = clock::now() + HANDSHAKE_DEADLINE;
                    let wire = Wire::Stream(StreamConnection::new(stream));
                    let connection = Connection::new(wire, State::AwaitHello { deadline });
                    self.next_key += 1;
                    self.watch(self.next_key, connection);
                }
                Ok(Err(stranger)) => (self.setup.log)(&format!("refused a connection: {stranger}")),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Who hung up while it waited is no reason to keep others waiting.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Most likely out of descriptors: the listener would stay readable and the loop would spin.
                    (self.setup.log)(&format!("cannot take a connection: {error}; see `paramill doctor`"));
                    return self.listen_again_at(Some(clock::now() + ACCEPT_PAUSE));
                }
            }
        }
    }

    /// Many who do not say who they are must not keep out one who will.
    fn make_room(&mut self) {
        let is_unknown = |(_, connection): &(&u64, &Connection)| {
            matches!(connection.state, State::AwaitHello { .. } | State::Refused)
        };
        let mut unknown = self.connections.iter().filter(is_unknown).map(|(key, _)| *key);
        let oldest = unknown.next();
        if unknown.count() + 1 >= limits::MAX_HANDSHAKES
            && let Some(oldest) = oldest
        {
            self.drop_connection(oldest, &Lost::Broken("too many connections say nothing".into()));
        }
    }

    /// Stops listening until a time, or begins again.
    pub(super) fn listen_again_at(&mut self, at: Option<Time>) {
        if at.is_some() == self.deaf_until.is_some() {
            self.deaf_until = at;
            return;
        }
        for listener in &self.setup.listeners {
            let data = epoll::EventData::new_u64(LISTENER);
            let changed = match at {
                Some(_) => epoll::delete(&self.epoll, listener.as_fd()),
                None => epoll::add(&self.epoll, listener.as_fd(), data, epoll::EventFlags::IN),
            };
            if let Err(error) = changed {
                (self.setup.log)(&format!("cannot watch the listener: {error}"));
            }
        }
        self.deaf_until = at;
    }
}
