//! New connections: who may be about to say who it is, and how many of them.

use super::connection::{Connection, State, Wire};
use super::strangers::Stranger;
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
                    let mut connection = Connection::new(wire, State::AwaitHello { deadline });
                    connection.stranger = Some(Stranger::new(&self.setup.strangers));
                    self.next_key += 1;
                    self.watch(self.next_key, connection);
                }
                Ok(Err(stranger)) => (self.setup.log)(&format!("refused a connection: {stranger}")),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Who hung up while it waited is no reason to keep others waiting.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                // Out of descriptors: a stranger's may be what a member needs.
                Err(error) if is_out_of_descriptors(&error) && self.drop_a_stranger(|_| true) => {}
                Err(error) => {
                    // Most likely out of descriptors: the listener would stay readable and the loop would spin.
                    (self.setup.log)(&format!("cannot take a connection: {error}; see `paramill doctor`"));
                    return self.listen_again_at(Some(clock::now() + ACCEPT_PAUSE));
                }
            }
        }
    }

    /// Many strangers must not keep out one who turns out to be a member.
    fn make_room(&mut self) {
        let unknown = self.connections.values().filter(|connection| is_unknown(connection)).count();
        if unknown >= limits::MAX_HANDSHAKES {
            self.drop_a_stranger(|_| true);
        }
        // Members that come all at once were not read yet. They say hello at once, too.
        let young = clock::now() + (HANDSHAKE_DEADLINE - limits::HELLO_GRACE);
        let has_had_time =
            |state: &State| !matches!(state, State::AwaitHello { deadline } if *deadline > young);
        while self.setup.strangers.is_full() && self.drop_a_stranger(has_had_time) {}
    }

    /// Drops the oldest connection among these that has not said who it is or, if there is none, the oldest command. Says
    /// whether there was one.
    fn drop_a_stranger(&mut self, may_go: impl Fn(&State) -> bool) -> bool {
        let is_candidate =
            |connection: &Connection| connection.stranger.is_some() && may_go(&connection.state);
        let candidates = || self.connections.iter().filter(|(_, connection)| is_candidate(connection));
        let oldest =
            candidates().find(|(_, connection)| is_unknown(connection)).or_else(|| candidates().next());
        let Some(key) = oldest.map(|(key, _)| *key) else { return false };
        self.drop_connection(key, &Lost::Broken("too many strangers are connected".into()));
        true
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

/// Whether a peer has not said who it is, or is nobody.
fn is_unknown(connection: &Connection) -> bool {
    matches!(connection.state, State::AwaitHello { .. } | State::Refused)
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    let errors = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE];
    errors.iter().any(|known| error.raw_os_error() == Some(known.raw_os_error()))
}
