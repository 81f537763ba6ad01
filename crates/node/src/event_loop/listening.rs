//! New connections: who may be about to say who it is, and how many of them.

use super::connection::{Connection, State, Wire};
use super::{EventLoop, HANDSHAKE_DEADLINE, LISTENER, LONGEST_SLEEP, RoleCell};
use crate::clock;
use crate::transport::tcp::TcpConnection;
use paramill_core::limits;
use paramill_core::role::Lost;
use paramill_core::types::Time;
use rustix::event::epoll;
use std::io;

impl<C: RoleCell> EventLoop<C> {
    /// Takes new TCP connections; each must say hello first.
    pub(super) fn accept_all(&mut self) {
        while let Some(listener) = &self.setup.listener {
            match listener.accept().and_then(|(stream, _)| TcpConnection::new(stream)) {
                Ok(tcp) => {
                    self.make_room();
                    let deadline = clock::now() + HANDSHAKE_DEADLINE;
                    let connection = Connection::new(Wire::Tcp(tcp), State::AwaitHello { deadline });
                    self.next_key += 1;
                    self.watch(self.next_key, connection);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Who hung up while it waited is no reason to keep others waiting.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    (self.setup.log)(&format!("cannot take a connection: {error}"));
                    // Out of descriptors, most likely: to try again at once would only burn time.
                    return self.listen(Some(clock::now() + LONGEST_SLEEP));
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

    /// Watches for new connections, or not until the time given.
    pub(super) fn listen(&mut self, deaf_until: Option<Time>) {
        let Some(listener) = &self.setup.listener else { return };
        let flags = if deaf_until.is_some() { epoll::EventFlags::empty() } else { epoll::EventFlags::IN };
        match epoll::modify(&self.epoll, listener, epoll::EventData::new_u64(LISTENER), flags) {
            Ok(()) => self.deaf_until = deaf_until,
            Err(error) => (self.setup.log)(&format!("cannot watch for connections: {error}")),
        }
    }
}
