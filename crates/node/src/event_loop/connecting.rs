//! Connections that the role asked for.

use super::connection::{Connection, State, Wire};
use super::{EventLoop, HANDSHAKE_DEADLINE, RoleCell, Setup};
use crate::clock;
use crate::transport::memory::{self, Letter};
use crate::transport::stream::{Stream, StreamConnection};
use crate::transport::{shm, tcp};
use paramill_core::address::LOCAL;
use paramill_core::role::{Lost, Role};
use paramill_core::types::NodeId;
use paramill_core::wire::Kind;
use paramill_core::wire::control::frame;

impl<C: RoleCell> EventLoop<C> {
    pub(super) fn connect(&mut self, peer: NodeId, address: &str) {
        let now = clock::now();
        self.next_key += 1;
        let key = self.next_key;
        let deadline = now + HANDSHAKE_DEADLINE;
        if address.starts_with(memory::SCHEME) {
            let found = self.setup.hub.as_ref().and_then(|(hub, _)| hub.find(address));
            let Some(to) = found else {
                let lost = Lost::Broken(format!("nothing is registered at {address}"));
                return self.cell.with(|role| role.handle_disconnected(now, peer, &lost));
            };
            let hello = self.cell.with(|role| role.hello(peer));
            to.put(Letter::Connect { channel: key, hello, reply_to: self.setup.mailbox.clone() });
            let wire = Wire::Memory { to, channel: None };
            return self.watch(key, Connection::new(wire, State::AwaitWelcome { peer, deadline }));
        }
        match self.open(peer, address, key as usize) {
            Ok(stream) => {
                let wire = Wire::Stream(StreamConnection::new(stream));
                self.watch(key, Connection::new(wire, State::Connecting { peer, deadline }));
            }
            Err(why) => {
                self.cell.with(|role| role.handle_disconnected(now, peer, &Lost::Broken(why)));
            }
        }
    }

    /// Begins to connect a stream, over whatever the address says.
    pub(super) fn open(&self, peer: NodeId, address: &str, attempt: usize) -> Result<Stream, String> {
        let Setup { transport, memory, .. } = &self.setup;
        let is_local = address.starts_with(LOCAL);
        if matches!(peer, NodeId::Shard(_)) && !transport.allows(is_local) {
            return Err(format!("`--transport {transport}` does not allow {address}"));
        }
        if is_local {
            let (stream, memory) = shm::connect(address, memory).map_err(|error| error.to_string())?;
            return Ok(Stream::Unix(stream, memory));
        }
        tcp::connect(address, attempt, &self.setup.sockets)
            .map(Stream::Tcp)
            .map_err(|error| error.to_string())
    }

    /// The connection attempt is decided: say hello, or tell the role that it failed.
    pub(super) fn finish_connecting(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let (State::Connecting { peer, .. }, Wire::Stream(stream)) =
            (&connection.state, &mut connection.wire)
        else {
            return;
        };
        let peer = *peer;
        match stream.take_error() {
            Ok(None) => {
                let hello = self.cell.with(|role| role.hello(peer));
                stream.queue(frame(Kind::Hello, &hello));
                let deadline = clock::now() + HANDSHAKE_DEADLINE;
                connection.state = State::AwaitWelcome { peer, deadline };
            }
            Ok(Some(error)) | Err(error) => self.drop_connection(key, &Lost::Broken(error.to_string())),
        }
    }
}
