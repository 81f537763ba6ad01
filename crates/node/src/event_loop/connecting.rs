//! Connections that the role asked for.

use super::connection::{Connection, State};
use super::{EventLoop, HANDSHAKE_DEADLINE, RoleCell};
use crate::clock;
use crate::transport::Dialled;
use crate::transport::carrier::Carrier;
use crate::transport::resolver::Answer;
use paramill_core::role::{Lost, Role, Turn};
use paramill_core::types::{ConnectionId, Time};
use paramill_core::wire::Kind;
use paramill_core::wire::control::frame;

/// A connection that waits for the addresses of a name.
#[derive(Debug)]
pub(super) struct Resolving {
    name: ConnectionId,
    address: String,
    pub(super) deadline: Time,
}

impl<C: RoleCell> EventLoop<C> {
    pub(super) fn connect(&mut self, name: ConnectionId, address: &str) {
        let now = clock::now();
        self.next_key += 1;
        let key = self.next_key;
        let deadline = now + HANDSHAKE_DEADLINE;
        let address = match self.setup.dialler.actual(address) {
            Ok(address) => address,
            Err(why) => return self.fail(name, why),
        };
        match self.setup.dialler.dial(&address, name) {
            Ok(Dialled::Carrier(carrier)) => self.begin(key, name, deadline, carrier),
            Ok(Dialled::Name) => match self.resolver.ask(now, &address) {
                Ok(Some(answer)) => self.dial_one_of(key, name, &answer),
                Ok(None) => {
                    self.resolving.insert(key, Resolving { name, address, deadline });
                    self.expire_at(Some(deadline));
                }
                Err(error) => self.fail(name, format!("cannot resolve `{address}`: {error}")),
            },
            Err(why) => self.fail(name, why),
        }
    }

    fn begin(&mut self, key: u64, name: ConnectionId, deadline: Time, carrier: Box<dyn Carrier>) {
        self.watch(key, Connection::new(carrier, State::Connecting { name, deadline }));
    }

    /// A connection could not be made.
    fn fail(&mut self, name: ConnectionId, why: String) {
        let now = clock::now();
        self.cell.with(|role| role.handle_disconnected(now, name, &Lost::Broken(why)));
    }

    /// The role does not want a connection any more that it has asked for.
    pub(super) fn give_up_connecting(&mut self, name: ConnectionId) {
        self.resolving.retain(|_, resolving| resolving.name != name);
        let is_meant = |connection: &Connection| match connection.state {
            State::Connecting { name: asked, .. } | State::AwaitWelcome { name: asked, .. } => asked == name,
            _ => false,
        };
        let meant = self.connections.iter().filter(|(_, connection)| is_meant(connection));
        for key in meant.map(|(key, _)| *key).collect::<Vec<_>>() {
            if let Some(mut connection) = self.connections.remove(&key) {
                let _ = self.watch.remove(&*connection.carrier);
                connection.hang_up();
            }
        }
    }

    /// Names have been resolved.
    pub(super) fn take_answers(&mut self) {
        for (address, answer) in self.resolver.take() {
            self.resolved(address, answer);
        }
    }

    /// A name has been resolved, or has not: for every attempt that waits for it, or for the next one.
    fn resolved(&mut self, address: String, answer: Answer) {
        let waits = |(_, resolving): &(&u64, &Resolving)| resolving.address == address;
        let waiting: Vec<u64> = self.resolving.iter().filter(waits).map(|(key, _)| *key).collect();
        if waiting.is_empty() {
            return self.resolver.keep(clock::now(), address, answer);
        }
        for key in waiting {
            if let Some(Resolving { name, .. }) = self.resolving.remove(&key) {
                self.dial_one_of(key, name, &answer);
            }
        }
    }

    /// Begins to connect to a name that was resolved. One with several addresses is tried at another one each time. The
    /// time that the name took is not taken from the connection's.
    fn dial_one_of(&mut self, key: u64, name: ConnectionId, answer: &Answer) {
        let opened = answer.as_ref().map_err(String::clone).and_then(|targets| {
            let target = targets.get(key as usize % targets.len().max(1)).ok_or("the name has no address")?;
            self.setup.dialler.dial_resolved(*target, name)
        });
        match opened {
            Ok(carrier) => self.begin(key, name, clock::now() + HANDSHAKE_DEADLINE, carrier),
            Err(why) => self.fail(name, why),
        }
    }

    /// Gives up on names that take too long.
    pub(super) fn expire_names(&mut self, now: Time) {
        let is_late = |(_, resolving): &(&u64, &Resolving)| resolving.deadline <= now;
        let late: Vec<u64> = self.resolving.iter().filter(is_late).map(|(key, _)| *key).collect();
        for key in late {
            let Some(Resolving { name, address, .. }) = self.resolving.remove(&key) else { continue };
            let seconds = HANDSHAKE_DEADLINE.as_secs();
            let why = format!(
                "the name in `{address}` was not resolved within {seconds} s; check this host's name service, or give the \
                 address as numbers"
            );
            self.fail(name, why);
        }
    }

    /// The connection attempt is decided: say hello, or tell the role that it failed.
    pub(super) fn finish_connecting(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let State::Connecting { name, .. } = connection.state else { return };
        match connection.carrier.take_error() {
            Ok(None) => {
                let hello = self.cell.with(|role| role.hello(name));
                connection.carrier.queue(frame(Kind::Hello, &hello), Turn::InOrder);
                let deadline = clock::now() + HANDSHAKE_DEADLINE;
                connection.state = State::AwaitWelcome { name, deadline };
            }
            Ok(Some(error)) | Err(error) => self.drop_connection(key, &Lost::Broken(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests;
