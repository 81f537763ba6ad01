//! Taking new connections, and the bounds on connections that have not said hello yet.

use super::connection::{Connection, State};
use super::strangers::Stranger;
use super::{EventLoop, HANDSHAKE_DEADLINE, LISTENER, RoleCell};
use crate::clock;
use crate::log::Level;
use crate::transport::carrier::{Carrier, Listener};
use crate::waker::Waker;
use paramill_core::address::Addresses;
use paramill_core::limits;
use paramill_core::role::{Lost, Role};
use paramill_core::types::Time;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// How long a loop that could not take a connection waits before it tries again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl<C: RoleCell> EventLoop<C> {
    /// Takes new connections on all interfaces; each must say hello first.
    pub(super) fn accept_all(&mut self) {
        (0..self.setup.listeners.len()).for_each(|listener| self.accept_from(listener));
    }

    /// The role wants others to reach it.
    pub(super) fn open_listeners(&mut self) {
        let opened = self.setup.open.take().map(|open| open().and_then(|opened| self.add_listeners(opened)));
        let addresses = match opened {
            Some(Ok(addresses)) => Some(addresses),
            Some(Err(error)) => {
                let line = format!("cannot listen for other workers, so nothing is passed on here: {error}");
                self.setup.log.line(Level::Warn, &line);
                None
            }
            None => None,
        };
        self.cell.with(|role| role.handle_listening(clock::now(), addresses));
    }

    fn add_listeners(
        &mut self,
        (listeners, addresses): (Vec<Box<dyn Listener>>, Addresses),
    ) -> io::Result<Addresses> {
        if self.spare.is_none() {
            self.spare = Some(spare_descriptor(&self.setup.waker)?);
            self.setup.strangers.add_loop();
        }
        for mut listener in listeners {
            self.watch.add(&mut *listener, LISTENER, epoll::EventFlags::IN)?;
            self.setup.listeners.push(listener);
        }
        Ok(addresses)
    }

    fn accept_from(&mut self, listener: usize) {
        loop {
            match self.take(listener) {
                // One for which there is no room is closed here.
                Ok(Ok(carrier)) => {
                    if self.make_room() {
                        self.await_hello(carrier);
                    }
                }
                Ok(Err(stranger)) => {
                    self.setup.log.line(Level::Warn, &format!("refused a connection: {stranger}"));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Who hung up while it waited is no reason to keep others waiting.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Most likely out of descriptors: the listener would stay readable and the loop would spin.
                    let line = format!("cannot take a connection: {error}; see `paramill doctor`");
                    self.setup.log.line(Level::Error, &line);
                    return self.listen_again_at(Some(clock::now() + ACCEPT_PAUSE));
                }
            }
        }
    }

    /// Takes the next connection. Where no descriptor is free another one is given up for it.
    fn take(&mut self, listener: usize) -> io::Result<Result<Box<dyn Carrier>, String>> {
        let strangers = self.setup.strangers.clone();
        let _alone = strangers.accept_alone();
        if self.spare.is_none() {
            self.spare = spare_descriptor(&self.setup.waker).ok();
        }
        match self.setup.listeners[listener].accept() {
            Err(error) if is_out_of_descriptors(&error) => {
                // The kernel looks for a descriptor before it looks for a connection.
                if !self.setup.listeners[listener].descriptor().is_some_and(is_readable) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                if !self.give_up_a_descriptor() {
                    return Err(error);
                }
                self.setup.listeners[listener].accept()
            }
            taken => taken,
        }
    }

    fn await_hello(&mut self, carrier: Box<dyn Carrier>) {
        let deadline = clock::now() + HANDSHAKE_DEADLINE;
        let mut connection = Connection::new(carrier, State::AwaitHello { deadline });
        connection.stranger = Some(Stranger::new(&self.setup.strangers));
        self.next_key += 1;
        self.watch(self.next_key, connection);
    }

    /// A newcomer may be a member. Where there are many strangers it takes the place of one that had the time to say hello.
    /// Returns false if the newcomer has to go: there are too many, and all that this loop could drop are as new.
    fn make_room(&mut self) -> bool {
        let unknown = self.connections.values().filter(|connection| is_unknown(connection)).count();
        if unknown >= limits::MAX_HANDSHAKES {
            return self.drop_oldest(is_unknown);
        }
        if !self.setup.strangers.are_a_crowd() || self.drop_oldest(has_had_time(clock::now())) {
            return true;
        }
        let own = self.connections.values().filter(|connection| connection.stranger.is_some()).count();
        // Commands are dropped last, so that a crowd of workers that join does not end a question under way.
        self.setup.strangers.have_room(own) || (unknown == 0 && self.drop_oldest(is_command))
    }

    /// Frees a descriptor for a connection that waits: of a stranger that had the time to say hello, the spare one, or of a
    /// command. Returns false if there is none of these.
    fn give_up_a_descriptor(&mut self) -> bool {
        self.drop_oldest(has_had_time(clock::now()))
            || self.spare.take().is_some()
            || self.drop_oldest(is_command)
    }

    /// Drops the oldest of the connections that may go. Returns false if there is none.
    fn drop_oldest(&mut self, may_go: impl Fn(&Connection) -> bool) -> bool {
        let oldest = self.connections.iter().find(|(_, connection)| may_go(connection));
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
        for listener in &mut self.setup.listeners {
            let changed = match at {
                Some(_) => self.watch.remove(&**listener),
                None => self.watch.add(&mut **listener, LISTENER, epoll::EventFlags::IN),
            };
            if let Err(error) = changed {
                self.setup.log.line(Level::Error, &format!("cannot watch the listener: {error}"));
            }
        }
        self.deaf_until = at;
    }
}

/// Whether a peer has not said who it is, or was refused.
fn is_unknown(connection: &Connection) -> bool {
    matches!(connection.state, State::AwaitHello { .. } | State::Refused)
}

/// Whether a peer has not said who it is though it had the time. Members that come all at once say hello as soon as they are
/// in, but have not been read yet.
fn has_had_time(now: Time) -> impl Fn(&Connection) -> bool {
    let young = now + (HANDSHAKE_DEADLINE - limits::HELLO_GRACE);
    move |connection| match connection.state {
        State::AwaitHello { deadline } => deadline <= young,
        State::Refused => true,
        _ => false,
    }
}

fn is_command(connection: &Connection) -> bool {
    connection.stranger.is_some() && matches!(connection.state, State::Open { .. })
}

/// A descriptor without a use but to be given up. A loop that takes connections keeps one, so that it can still take one when
/// the process has no other descriptor left.
pub(super) fn spare_descriptor(any: &Waker) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(any.descriptor(), 0)?)
}

/// Whether a connection waits to be taken.
fn is_readable(listener: BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut watched = [PollFd::from_borrowed_fd(listener, PollFlags::IN)];
    poll(&mut watched, Some(&now)).is_ok_and(|ready| ready > 0)
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    let errors = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE];
    errors.iter().any(|known| error.raw_os_error() == Some(known.raw_os_error()))
}
