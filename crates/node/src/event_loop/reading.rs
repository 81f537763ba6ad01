//! Receiving: whose bytes are taken next, and what becomes of them.

use super::connection::{Connection, State};
use super::greeting::{greet, welcomed};
use super::{EventLoop, HANDSHAKE_DEADLINE, Named, RoleCell};
use crate::clock;
use crate::log::Level;
use crate::transport::carrier::{Peer, ReceiveError};
use paramill_core::landing::Landing;
use paramill_core::limits;
use paramill_core::role::{Lost, Role, Turn};
use paramill_core::types::{ConnectionId, NodeId};
use paramill_core::wire::control::frame;
use paramill_core::wire::{Cause, Fault, Header, Kind, Refusal, WireError};
use rustix::event::epoll;

impl<C: RoleCell> EventLoop<C> {
    /// A connection can be read or written.
    pub(super) fn serve(&mut self, key: u64, flags: epoll::EventFlags) {
        if flags.intersects(epoll::EventFlags::OUT) {
            self.finish_connecting(key);
            self.mark_dirty(key);
        }
        let readable = epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if flags.intersects(readable) {
            self.readable.push(key);
        }
    }

    /// Reads once from every connection that has something, and goes on with frames that were received and not handled.
    /// Peers that are far ahead of another one are passed over: what they bring would only wait for the other's, and
    /// would not be in the cache any more when that comes. They have their turn when those behind have nothing.
    pub(super) fn read_ready(&mut self) {
        let mut ready = std::mem::take(&mut self.readable);
        for _ in 0..self.leftovers.len() {
            let key = self.leftovers.remove(0);
            match self.connections.get(&key) {
                Some(connection) if connection.has_leftovers() && !ready.contains(&key) => ready.push(key),
                // Its answers have to leave first.
                Some(_) => self.leftovers.push(key),
                None => {}
            }
        }
        let behind = match ready.len() {
            0 | 1 => None,
            _ => ready.iter().filter_map(|key| self.progress(*key)).min(),
        };
        for key in ready.drain(..) {
            let is_far_ahead = match (behind, self.progress(key)) {
                (Some(least), Some(progress)) => progress > least.saturating_add(limits::LONGEST_LEAD),
                _ => false,
            };
            if is_far_ahead { self.keep_leftovers(key) } else { self.read_some(key) }
        }
        self.readable = ready;
    }

    /// How far a peer's work is, for one of which order matters.
    fn progress(&mut self, key: u64) -> Option<u64> {
        match self.connections.get(&key)?.state {
            State::Open { name } if C::ORDERS_PEERS => self.cell.with(|role| role.progress(name)),
            _ => None,
        }
    }

    fn read_some(&mut self, key: u64) {
        if let Err(why) = self.read(key) {
            return self.drop_connection(key, &why);
        }
        self.keep_leftovers(key);
    }

    /// Frames that were received and not handled are for the next turn.
    fn keep_leftovers(&mut self, key: u64) {
        let has_leftovers = self.connections.get(&key).is_some_and(Connection::has_unhandled);
        if has_leftovers && !self.leftovers.contains(&key) {
            self.leftovers.push(key);
        }
    }

    /// Reads once from a connection.
    fn read(&mut self, key: u64) -> Result<(), Lost> {
        let EventLoop { cell, setup, connections, names, places, .. } = self;
        let Some(connection) = connections.get_mut(&key) else { return Ok(()) };
        if connection.is_congested() {
            return Ok(());
        }
        let Connection { carrier, state, closing, stranger, .. } = connection;
        let (now, lane) = (clock::now(), cell.lane());
        // Bytes are copied out of the kernel without the role, since other threads may want it.
        let filled = match *state {
            State::Open { name } => {
                let is_shared = cell.lend().is_none();
                let mut ask = |header: &Header, frames: usize, places: &mut Vec<Landing>| {
                    cell.with(|role| role.landing(name, header, frames, places))
                };
                let filled = carrier.receive(Some(&mut ask));
                if is_shared && filled.is_ok() {
                    carrier.put_ahead(&mut ask);
                }
                filled
            }
            _ => carrier.receive(None),
        };
        let mut reply = None;
        let mut replaced = None;
        let mut opened = None;
        let mut refused = None;
        let deadline = now + HANDSHAKE_DEADLINE;
        let limit = match state {
            State::AwaitHello { .. } | State::Refused => limits::MAX_HELLO_BYTES,
            State::Open { name: ConnectionId::Node(NodeId::Admin(_)) } => limits::MAX_COMMAND_BYTES,
            _ => usize::MAX,
        };
        let received = filled.and_then(|()| {
            cell.with(|role| {
                carrier.handle(limit, &mut |header, payload| {
                    match (&*state, payload) {
                        (State::Open { name }, None) => role.handle_landed(now, *name, header),
                        (State::Open { name }, Some(payload)) => {
                            if lies_in_place(role, *name, header, payload, places) {
                                role.handle_landed(now, *name, header);
                            } else {
                                role.handle_frame(now, *name, header, payload);
                            }
                        }
                        (State::AwaitHello { .. }, Some(payload)) => {
                            let greeting = greet(role, now, header, payload, names);
                            replaced = greeting.replaced;
                            match greeting.answer {
                                Ok((name, welcome)) => {
                                    reply = Some(frame(Kind::Welcome, &welcome));
                                    opened = Some((name, welcome.incarnation));
                                    *state = State::Open { name };
                                }
                                Err(refusal) => {
                                    reply = Some(frame(Kind::Error, &refusal));
                                    *closing = Some(deadline);
                                    *state = State::Refused;
                                }
                            }
                        }
                        (&State::AwaitWelcome { name, .. }, Some(payload)) => {
                            match welcomed(header, payload) {
                                Ok(welcome) => {
                                    opened = Some((name, 0));
                                    role.handle_connected(now, name, &welcome);
                                    *state = State::Open { name };
                                }
                                Err(lost) => refused = Some(lost),
                            }
                        }
                        // Nothing lands before a connection is open.
                        _ => {}
                    }
                    // Answers are taken before more is asked for; so are those to the first words.
                    C::backlog_bytes(role, lane) <= limits::MAX_BACKLOG_BYTES && reply.is_none()
                })
            })
        });
        let outcome = match (received, refused) {
            (_, Some(lost)) => Err(lost),
            (Ok(()), None) => Ok(()),
            // A stranger is told why before it is hung up on: its user has to install another release.
            (Err(ReceiveError::Wire(error)), None) if matches!(state, State::AwaitHello { .. }) => {
                setup.log.line(Level::Warn, &format!("refused a connection: {error}"));
                reply = Some(frame(Kind::Error, &Refusal { reason: error.to_string(), retry: false }));
                *closing = Some(deadline);
                *state = State::Refused;
                Ok(())
            }
            // So is a command.
            (Err(ReceiveError::Wire(error)), None)
                if closing.is_none()
                    && matches!(state, State::Open { name: ConnectionId::Node(NodeId::Admin(_)) }) =>
            {
                let fault = Fault { cause: Cause::Protocol, message: error.to_string() };
                reply = Some(frame(Kind::Error, &fault));
                *closing = Some(deadline);
                Ok(())
            }
            (Err(ReceiveError::Wire(error @ WireError::Version { .. })), None) => {
                Err(Lost::Refused(Refusal { reason: error.to_string(), retry: false }))
            }
            (Err(error), None) => Err(Lost::Broken(error.to_string())),
        };
        let has_reply = reply.is_some();
        if let Some(reply) = reply {
            carrier.queue(reply, Turn::InOrder);
        }
        match opened {
            Some((ConnectionId::Node(NodeId::Admin(_)), _)) => carrier.let_in(Peer::Command),
            Some(_) => {
                *stranger = None;
                carrier.let_in(Peer::Member);
            }
            None => {}
        }
        let ends = *closing;
        if let Some(old) = replaced {
            self.forget(old);
        }
        if let Some((name, incarnation)) = opened {
            self.introduce(name, Named { key, incarnation });
        }
        if has_reply {
            self.expire_at(ends);
            self.mark_dirty(key);
        }
        outcome
    }
}

/// Whether a peer that shares memory has put a payload where the role wants it.
fn lies_in_place<R: Role>(
    role: &mut R,
    name: ConnectionId,
    header: &Header,
    payload: &[u8],
    places: &mut Vec<Landing>,
) -> bool {
    if header.kind != Kind::Params || header.landing == 0 {
        return false;
    }
    places.clear();
    let destination = role.landing(name, header, 1, places);
    destination.zip(places.first()).is_some_and(|(mut destination, place)| destination.holds(place, payload))
}
