//! Carrying out what the role says, and moving its frames to their carriers.

use super::connection::State;
use super::{EventLoop, FAREWELL, FIRST_LANE, HANDSHAKE_DEADLINE, Late, Named, RoleCell};
use crate::clock;
use crate::transport::carrier::Flushed;
use paramill_core::fault::{Delay, Fate};
use paramill_core::role::{Body, Frame, Lost, Output, Role, Turn};
use paramill_core::types::{ConnectionId, Time};
use rustix::event::epoll;
use std::io;

impl<C: RoleCell> EventLoop<C> {
    /// Calls the role if it is time, and takes what it says.
    pub(super) fn take_outputs(&mut self, now: Time) {
        let EventLoop { cell, outputs, .. } = self;
        let lane = cell.lane();
        cell.with(|role| {
            if lane == FIRST_LANE && role.next_timeout().is_some_and(|at| at <= now) {
                role.handle_timeout(now);
            }
            outputs.extend(std::iter::from_fn(|| C::poll_output(role, lane)));
        });
    }

    /// Carries out what the role said, and moves bytes.
    pub(super) fn carry_out(&mut self) {
        let mut outputs = std::mem::take(&mut self.outputs);
        for output in outputs.drain(..) {
            match output {
                Output::Connect { connection, address } => self.connect(connection, &address),
                Output::Send { to, frame, turn } => self.send(to, frame, turn),
                Output::Disconnect { connection } => self.disconnect(connection),
                Output::Abandon { connection } => {
                    if let Some(Named { key, .. }) = self.names.remove(&connection) {
                        self.forget(key);
                    }
                }
                Output::Listen => self.open_listeners(),
                Output::StartCore => {
                    if let Some(start_core) = &self.setup.start_core {
                        start_core();
                    }
                }
                Output::Remember { state } => self.cell.remember(state),
                Output::Archive(request) => self.archivist.ask(*request),
                Output::Log(level, line) => self.setup.log.line(level, &line),
                Output::Stop { error } => {
                    // Last words that an injected delay holds back are heard too.
                    let deadline = self.after_late(clock::now()) + FAREWELL;
                    self.end(error, deadline);
                }
            }
        }
        self.outputs = outputs;
        self.flush_dirty();
    }

    /// Closes a connection once everything is sent. Its name is free at once, for another connection: what still comes on this one, and
    /// its end, are nothing to the role.
    fn disconnect(&mut self, name: ConnectionId) {
        self.give_up_connecting(name);
        let Some(Named { key, .. }) = self.names.remove(&name) else { return };
        self.last_sent = None;
        let deadline = self.after_late(clock::now()) + HANDSHAKE_DEADLINE;
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.state = State::Leaving;
            connection.closing = Some(deadline);
        }
        self.expire_at(Some(deadline));
        self.mark_dirty(key);
    }

    /// Sends a frame, unless a fault says otherwise.
    pub(super) fn send(&mut self, to: ConnectionId, frame: Frame, turn: Turn) {
        let key = match self.last_sent {
            Some((name, key)) if name == to => key,
            _ => {
                let Some(&Named { key, .. }) = self.names.get(&to) else { return };
                self.last_sent = Some((to, key));
                key
            }
        };
        if self.injected.is_idle() {
            return self.dispatch(key, frame, turn);
        }
        let Some(me) = self.cell.with(|role| role.node()) else { return self.dispatch(key, frame, turn) };
        let now = clock::now();
        // Frames that are due leave before this one, which may be meant to follow them.
        self.send_late(now);
        let delay = match self.injected.fate(me, to.peer(), &frame.header) {
            Fate::Pass => Delay::default(),
            Fate::Delay(delay) => delay,
            Fate::Reset => return self.drop_connection(key, &Lost::Broken("reset as injected".into())),
        };
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let leaves = connection.hold(now, delay.connection) + delay.answer;
        if leaves > now { self.make_late(leaves, key, frame) } else { self.dispatch(key, frame, turn) }
    }

    /// Keeps a frame, with its bytes as they are now, until it is time.
    pub(super) fn make_late(&mut self, leaves: Time, key: u64, frame: Frame) {
        let mut header = frame.header;
        let payload = self.cell.with(|role| {
            if matches!(frame.body, Body::Stored { .. }) {
                role.refresh(&mut header);
            }
            role.payload(&frame.body).to_vec()
        });
        let frame = Frame { header, body: Body::Bytes(payload) };
        self.next_key += 1;
        self.late.insert((leaves, self.next_key), Late { key, frame });
    }

    pub(super) fn send_late(&mut self, now: Time) {
        while let Some(entry) = self.late.first_entry()
            && entry.key().0 <= now
        {
            let Late { key, frame } = entry.remove();
            // It has waited for its turn already.
            self.dispatch(key, frame, Turn::InOrder);
            // A connection that closes waits for the frames that are held back.
            if self.connections.get(&key).is_some_and(|connection| connection.closing.is_some()) {
                self.mark_dirty(key);
            }
        }
    }

    /// When the last frame leaves that is held back on a connection that still stands.
    pub(super) fn last_late(&self) -> Option<Time> {
        let stands = |late: &Late| self.connections.contains_key(&late.key);
        self.late.iter().rev().find(|(_, late)| stands(late)).map(|((leaves, _), _)| *leaves)
    }

    /// The time at which no frame is held back any more.
    fn after_late(&self, now: Time) -> Time {
        self.last_late().map_or(now, |leaves| leaves.max(now))
    }

    /// Puts a frame on its way. Without a connection it is dropped, as the contract of roles says.
    pub(super) fn dispatch(&mut self, key: u64, frame: Frame, turn: Turn) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        connection.carrier.queue(frame, turn);
        if !std::mem::replace(&mut connection.dirty, true) {
            self.dirty.push(key);
        }
    }

    /// Something waits to be written to this connection, or it is to be looked at for another reason.
    pub(super) fn mark_dirty(&mut self, key: u64) {
        if let Some(connection) = self.connections.get_mut(&key)
            && !std::mem::replace(&mut connection.dirty, true)
        {
            self.dirty.push(key);
        }
    }

    /// Writes what waits, and watches for room where a socket is full.
    pub(super) fn flush_dirty(&mut self) {
        // Last words do not wait.
        let more = self.ending.is_none() && self.has_ready_leftovers();
        for _ in 0..self.dirty.len() {
            let key = self.dirty.remove(0);
            match self.flush(key, more) {
                Ok(Flushed::Enough) => self.mark_dirty(key),
                Ok(Flushed::Done | Flushed::Blocked | Flushed::Held(_)) => {}
                Err(lost) => self.drop_connection(key, &lost),
            }
        }
    }

    /// The node may send again: connections that were held back go on, another one first each time.
    pub(super) fn release_held(&mut self, now: Time) {
        if self.held_until.is_none_or(|until| until > now) {
            return;
        }
        self.held_until = None;
        let mut held = std::mem::take(&mut self.held);
        if !held.is_empty() {
            held.rotate_left(1);
        }
        for key in held {
            if let Some(connection) = self.connections.get_mut(&key) {
                connection.is_held = false;
                self.mark_dirty(key);
            }
        }
    }

    pub(super) fn flush(&mut self, key: u64, more: bool) -> Result<Flushed, Lost> {
        let Some(connection) = self.connections.get_mut(&key) else { return Ok(Flushed::Done) };
        let closing = connection.closing.is_some() && !self.late.values().any(|late| late.key == key);
        connection.dirty = false;
        let is_connecting = matches!(connection.state, State::Connecting { .. });
        let broken = |error: io::Error| Lost::Broken(error.to_string());
        let flushed = if is_connecting {
            Flushed::Blocked
        } else if let Some(until) = self.held_until.filter(|_| connection.is_held) {
            Flushed::Held(until)
        } else {
            let role = self.cell.lend().map(|role| role as &dyn Role);
            connection.carrier.flush(role, more && connection.closing.is_none()).map_err(broken)?
        };
        if flushed == Flushed::Done && closing {
            return Err(Lost::Broken("closed".into()));
        }
        if let Flushed::Held(until) = flushed
            && !std::mem::replace(&mut connection.is_held, true)
        {
            self.held.push(key);
            self.held_until = Some(self.held_until.map_or(until, |known| known.min(until)));
        }
        let mut wanted = epoll::EventFlags::empty();
        wanted.set(epoll::EventFlags::IN, !connection.is_congested());
        wanted.set(epoll::EventFlags::OUT, flushed == Flushed::Blocked);
        if wanted != connection.watched {
            connection.watched = wanted;
            self.watch.change(&*connection.carrier, key, wanted).map_err(broken)?;
        }
        Ok(flushed)
    }
}
