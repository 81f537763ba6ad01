//! Letters of the in-memory transport.

use super::connection::{Connection, State, Wire};
use super::greeting::{Greeting, greet_hello};
use super::{EventLoop, Named, RoleCell};
use crate::clock;
use crate::transport::memory::Letter;
use paramill_core::role::{Lost, Role};

impl<C: RoleCell> EventLoop<C> {
    /// Handles letters of the in-memory transport.
    pub(super) fn read_mail(&mut self) {
        let now = clock::now();
        for letter in self.setup.mailbox.take() {
            match letter {
                Letter::Connect { channel, hello, reply_to } => {
                    let Greeting { answer, replaced } =
                        self.cell.with(|role| greet_hello(role, now, &hello, &self.names));
                    if let Some(old) = replaced {
                        self.forget(old);
                    }
                    match answer {
                        Ok((name, welcome)) => {
                            self.next_key += 1;
                            let key = self.next_key;
                            let state = State::Open { name };
                            let wire = Wire::Memory { to: reply_to.clone(), channel: Some(channel) };
                            self.connections.insert(key, Connection::new(wire, state));
                            self.introduce(name, Named { key, incarnation: welcome.incarnation });
                            reply_to.put(Letter::Accepted { channel, peer_channel: key, welcome });
                        }
                        Err(refusal) => reply_to.put(Letter::Refused { channel, refusal }),
                    }
                }
                Letter::Accepted { channel, peer_channel, welcome } => {
                    let Some(connection) = self.connections.get_mut(&channel) else { continue };
                    if let (State::AwaitWelcome { name, .. }, Wire::Memory { channel: end, .. }) =
                        (&connection.state, &mut connection.wire)
                    {
                        let name = *name;
                        *end = Some(peer_channel);
                        connection.state = State::Open { name };
                        self.names.insert(name, Named { key: channel, incarnation: 0 });
                        self.cell.with(|role| role.handle_connected(now, name, &welcome));
                    }
                }
                Letter::Refused { channel, refusal } => {
                    self.drop_connection(channel, &Lost::Refused(refusal))
                }
                Letter::Frame { channel, header, payload } => {
                    if let Some(State::Open { name }) =
                        self.connections.get(&channel).map(|found| &found.state)
                    {
                        self.cell.with(|role| role.handle_frame(now, *name, &header, &payload));
                    }
                }
                Letter::Resolved { address, answer } => self.resolved(address, answer),
                Letter::Closed { channel } => {
                    self.drop_connection(channel, &Lost::Broken("the peer closed".into()));
                }
            }
        }
    }
}
