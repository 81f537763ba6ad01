//! The one loop that drives every role: it brings frames, timeouts and connections to the role, and carries out what
//! the role says.
//!
//! A loop belongs to one thread. Its role is its own (a coordinator, a data core) or shared with the application's
//! threads behind a lock (a worker); [`RoleCell`] hides which.

mod connection;
mod greeting;
mod injected;
mod listening;

pub(crate) use injected::Injection;

use crate::clock;
use crate::transport::memory::{self, Hub, Letter, Mailbox};
use crate::transport::options::SocketOptions;
use crate::transport::shm::{self, SharedAllocator};
use crate::transport::stream::{Flushed, ReceiveError, Stream, StreamConnection};
use crate::transport::{Listener, Transport, tcp};
use connection::{Connection, State, Wire};
use greeting::{Greeting, greet, greet_hello, welcomed};
use injected::{Injected, Trouble};
use paramill_core::address::LOCAL;
use paramill_core::limits;
use paramill_core::role::{Body, Frame, Lost, Output, Role};
use paramill_core::types::{NodeId, Time};
use paramill_core::wire::control::frame;
use paramill_core::wire::{Kind, Refusal, WireError};
use rustix::event::epoll;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a peer may take to say who it is, and a connection attempt to be decided.
const HANDSHAKE_DEADLINE: Duration = limits::ATTEMPT_DEADLINE;
/// How long a loop that ends waits for its last frames to leave and its peers to hang up.
const FAREWELL: Duration = Duration::from_millis(500);
/// Reads from one connection before others get their turn.
const READS_PER_TURN: usize = 4;
/// The loop looks at its stop flag at least this often.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// Events taken from the kernel at once.
const EVENTS_PER_TURN: usize = 64;

const LISTENER: u64 = 0;
const MAILBOX: u64 = 1;

/// Access to a role.
pub(crate) trait RoleCell {
    /// Which role.
    type Role: Role;

    /// Calls `visit` with the role.
    fn with<T>(&mut self, visit: impl FnOnce(&mut Self::Role) -> T) -> T;

    /// The role, where nobody else can have it. Payloads that are in the role's own memory are read through this; a
    /// role that is shared has none ([`Body::Stored`]), so its bytes move without its lock.
    fn lend(&self) -> Option<&Self::Role> {
        None
    }

    /// Something happened that somebody may wait for.
    fn progressed(&self) {}

    /// The loop has ended; nothing will happen any more.
    fn ended(&self, _error: Option<&str>) {}
}

/// A role that only its loop touches.
#[derive(Debug)]
pub(crate) struct Owned<R>(pub(crate) R);

impl<R: Role> RoleCell for Owned<R> {
    type Role = R;

    fn with<T>(&mut self, visit: impl FnOnce(&mut R) -> T) -> T {
        visit(&mut self.0)
    }

    fn lend(&self) -> Option<&R> {
        Some(&self.0)
    }
}

/// What a loop is given beside its role.
pub(crate) struct Setup {
    /// Where peers come in: on any number of interfaces, and from this host.
    pub(crate) listeners: Vec<Listener>,
    /// How TCP sockets are set up.
    pub(crate) sockets: SocketOptions,
    /// How data cores may be reached.
    pub(crate) transport: Transport,
    /// The memory that data cores of this host may share.
    pub(crate) memory: SharedAllocator,
    /// The address book of in-memory nodes, and the name to be found under.
    pub(crate) hub: Option<(Hub, Option<String>)>,
    /// Letters from in-memory peers; also how others wake the loop.
    pub(crate) mailbox: Arc<Mailbox>,
    /// Ends the loop when it becomes true.
    pub(crate) stop: Arc<AtomicBool>,
    /// Faults to try.
    pub(crate) injection: Injection,
    /// Where log lines go.
    pub(crate) log: fn(&str),
}

/// A role with its connections.
pub(crate) struct EventLoop<C: RoleCell> {
    cell: C,
    setup: Setup,
    injected: Injected,
    epoll: OwnedFd,
    connections: BTreeMap<u64, Connection>,
    peers: BTreeMap<NodeId, Peer>,
    next_key: u64,
    /// Connections with something to write, to watch for or to close.
    dirty: Vec<u64>,
    /// Connections with frames that were received and not handled, because their answers were too much at once.
    leftovers: Vec<u64>,
    /// When a handshake is given up, at the earliest.
    next_expiry: Option<Time>,
    /// The peer of the last frame that was sent: the next one is most often for the same.
    last_sent: Option<(NodeId, u64)>,
    /// Kept from turn to turn for its memory.
    outputs: Vec<Output>,
    /// Frames that were made late, by the time they leave.
    late: BTreeMap<(Time, u64), Late>,
    /// No connections are taken before this.
    deaf_until: Option<Time>,
    ending: Option<Ending>,
}

/// A frame that was made late. It leaves on the connection it was meant for, or not at all.
struct Late {
    key: u64,
    frame: Frame,
}

/// The connection of a peer, and which life of the peer it is.
#[derive(Debug, Clone, Copy)]
struct Peer {
    key: u64,
    incarnation: u64,
}

/// The role said stop: frames still leave, then the loop ends.
struct Ending {
    error: Option<String>,
    deadline: Time,
    hung_up: bool,
}

impl<C: RoleCell> EventLoop<C> {
    pub(crate) fn new(cell: C, setup: Setup) -> io::Result<EventLoop<C>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let readable = epoll::EventFlags::IN;
        epoll::add(&epoll, setup.mailbox.descriptor(), epoll::EventData::new_u64(MAILBOX), readable)?;
        for listener in &setup.listeners {
            epoll::add(&epoll, listener.as_fd(), epoll::EventData::new_u64(LISTENER), readable)?;
        }
        if let Some((hub, Some(address))) = &setup.hub {
            hub.register(address, setup.mailbox.clone());
        }
        Ok(EventLoop {
            cell,
            injected: Injected::new(&setup.injection),
            setup,
            epoll,
            connections: BTreeMap::new(),
            peers: BTreeMap::new(),
            next_key: MAILBOX + 1,
            dirty: Vec::new(),
            leftovers: Vec::new(),
            next_expiry: None,
            last_sent: None,
            outputs: Vec::new(),
            late: BTreeMap::new(),
            deaf_until: None,
            ending: None,
        })
    }

    /// Turns until the role stops or the flag is set. The error is the role's.
    pub(crate) fn run(mut self) -> Result<(), String> {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        let result = loop {
            if let Some(result) = self.turn(&mut events) {
                break result;
            }
        };
        for connection in self.connections.values() {
            connection.hang_up();
        }
        self.cell.ended(result.as_ref().err().map(String::as_str));
        result
    }

    fn turn(&mut self, events: &mut Vec<epoll::Event>) -> Option<Result<(), String>> {
        if let Err(error) = self.wait_for_events(events) {
            return Some(Err(format!("cannot wait for events: {error}")));
        }
        if self.setup.stop.load(Ordering::Relaxed) && self.ending.is_none() {
            self.end(None);
        }
        let began = clock::now();
        if self.injected.may_interfere()
            && let Some(node) = self.cell.with(|role| role.node())
            && let Err(crash) = self.injected.interfere(node, began)
        {
            return Some(Err(crash));
        }
        for event in events.drain(..) {
            let flags = event.flags;
            match event.data.u64() {
                LISTENER => self.accept_all(),
                MAILBOX => self.read_mail(),
                key => self.serve(key, flags),
            }
        }
        self.serve_leftovers();
        let now = clock::now();
        self.cell.with(|role| {
            if role.next_timeout().is_some_and(|at| at <= now) {
                role.handle_timeout(now);
            }
        });
        if self.deaf_until.is_some_and(|until| until <= now) {
            self.listen_again_at(None);
        }
        self.send_late(now);
        self.carry_out();
        if self.next_expiry.is_some_and(|at| at <= now) {
            self.expire(now);
        }
        self.cell.progressed();
        self.injected.slow_down(began);
        self.ended(now)
    }

    /// Sleeps until something happens, or it is time for something.
    fn wait_for_events(&mut self, events: &mut Vec<epoll::Event>) -> rustix::io::Result<()> {
        // From here on whoever gives the role something to do also wakes this loop.
        self.setup.mailbox.set_sleeping(true);
        let has_work = self.cell.with(|role| role.backlog_bytes() > 0);
        let timeout = if has_work { Duration::ZERO } else { self.sleep_until() };
        let spec = rustix::event::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let waited = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&spec));
        self.setup.mailbox.set_sleeping(false);
        match waited {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn sleep_until(&mut self) -> Duration {
        let is_ready = |key: &u64| self.connections.get(key).is_some_and(Connection::has_leftovers);
        if !self.dirty.is_empty() || self.leftovers.iter().any(is_ready) {
            return Duration::ZERO;
        }
        let now = clock::now();
        let role = self.cell.with(|role| role.next_timeout());
        let ending = self.ending.as_ref().map(|ending| ending.deadline);
        let late = self.late.keys().next().map(|(at, _)| *at);
        let next = [role, self.next_expiry, ending, late, self.deaf_until, self.injected.next_timeout()];
        next.into_iter().flatten().min().map_or(LONGEST_SLEEP, |at| at.since(now).min(LONGEST_SLEEP))
    }

    fn watch(&mut self, key: u64, mut connection: Connection) {
        self.next_expiry = [self.next_expiry, connection.handshake_deadline()].into_iter().flatten().min();
        if let Wire::Stream(stream) = &connection.wire {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT;
            connection.watched = flags;
            if let Err(error) =
                epoll::add(&self.epoll, stream.descriptor(), epoll::EventData::new_u64(key), flags)
            {
                self.connections.insert(key, connection);
                return self
                    .drop_connection(key, &Lost::Broken(format!("cannot watch the connection: {error}")));
            }
        }
        self.connections.insert(key, connection);
    }

    /// A connection can be read or written.
    fn serve(&mut self, key: u64, flags: epoll::EventFlags) {
        if flags.intersects(epoll::EventFlags::OUT) {
            self.finish_connecting(key);
            self.mark_dirty(key);
        }
        let readable = epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if flags.intersects(readable) {
            self.read_some(key);
        }
    }

    /// Goes on with frames that were received and not handled.
    fn serve_leftovers(&mut self) {
        for _ in 0..self.leftovers.len() {
            let key = self.leftovers.remove(0);
            match self.connections.get(&key) {
                Some(connection) if connection.has_leftovers() => self.read_some(key),
                // Its answers have to leave first.
                Some(_) => self.leftovers.push(key),
                None => {}
            }
        }
    }

    /// Something waits to be written to this connection, or it is to be looked at for another reason.
    fn mark_dirty(&mut self, key: u64) {
        if let Some(connection) = self.connections.get_mut(&key)
            && !std::mem::replace(&mut connection.dirty, true)
        {
            self.dirty.push(key);
        }
    }

    fn read_some(&mut self, key: u64) {
        for _ in 0..READS_PER_TURN {
            match self.read(key) {
                Ok(true) => {}
                Ok(false) => break,
                Err(why) => return self.drop_connection(key, &why),
            }
        }
        let has_leftovers = self.connections.get(&key).is_some_and(Connection::has_unhandled);
        if has_leftovers && !self.leftovers.contains(&key) {
            self.leftovers.push(key);
        }
    }

    /// The connection attempt is decided: say hello, or tell the role that it failed.
    fn finish_connecting(&mut self, key: u64) {
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

    /// Reads once from a connection. True when there may be more.
    fn read(&mut self, key: u64) -> Result<bool, Lost> {
        let EventLoop { cell, setup, connections, peers, .. } = self;
        let Some(connection) = connections.get_mut(&key) else { return Ok(false) };
        let is_congested = connection.is_congested();
        let Connection { wire: Wire::Stream(stream), state, closing, .. } = connection else {
            return Ok(false);
        };
        if is_congested {
            return Ok(false);
        }
        let now = clock::now();
        // Bytes are copied out of the kernel before the role is taken, since an application's thread may want it; but
        // for those that go straight to where the role has its memory.
        let filled = match state {
            _ if stream.has_leftovers() => Ok(true),
            State::Open { peer } if stream.is_amid_payload() => cell.with(|role| {
                stream.fill_landing(role, *peer, |role, header| role.handle_landed(now, *peer, header))
            }),
            _ => stream.fill(),
        };
        let mut reply = None;
        let mut replaced = None;
        let mut opened = None;
        let mut refused = None;
        let is_stranger = matches!(state, State::AwaitHello { .. });
        let limit = if is_stranger { limits::MAX_HELLO_BYTES } else { usize::MAX };
        let received = filled.and_then(|filled_the_room| {
            cell.with(|role| {
                let wants_more = stream.handle(limit, |header, payload| {
                    match state {
                        State::Open { peer } => role.handle_frame(now, *peer, header, payload),
                        State::AwaitHello { .. } => {
                            let greeting = greet(role, now, header, payload, peers);
                            replaced = greeting.replaced;
                            match greeting.answer {
                                Ok(welcome) => {
                                    reply = Some(frame(Kind::Welcome, &welcome));
                                    opened = Some((welcome.you, welcome.incarnation));
                                    *state = State::Open { peer: welcome.you };
                                }
                                Err(refusal) => {
                                    reply = Some(frame(Kind::Error, &refusal));
                                    *closing = true;
                                    *state = State::Refused;
                                }
                            }
                        }
                        State::AwaitWelcome { peer, .. } => match welcomed(header, payload) {
                            Ok(welcome) => {
                                opened = Some((*peer, 0));
                                role.handle_connected(now, *peer, &welcome);
                                *state = State::Open { peer: *peer };
                            }
                            Err(lost) => refused = Some(lost),
                        },
                        State::Refused | State::Connecting { .. } => {}
                    }
                    // Answers are taken before more is asked for; so are those to the first words.
                    role.backlog_bytes() <= limits::MAX_BACKLOG_BYTES && reply.is_none()
                })?;
                Ok(filled_the_room && wants_more)
            })
        });
        let outcome = match (received, refused) {
            (_, Some(lost)) => Err(lost),
            (Ok(more), None) => Ok(more),
            // A stranger is told why before it is hung up on: its user has to install another release.
            (Err(ReceiveError::Wire(error)), None) if matches!(state, State::AwaitHello { .. }) => {
                (setup.log)(&format!("refused a connection: {error}"));
                reply = Some(frame(Kind::Error, &Refusal { reason: error.to_string(), retry: false }));
                *closing = true;
                *state = State::Refused;
                Ok(false)
            }
            (Err(ReceiveError::Wire(error @ WireError::Version { .. })), None) => {
                Err(Lost::Refused(Refusal { reason: error.to_string(), retry: false }))
            }
            (Err(error), None) => Err(Lost::Broken(error.to_string())),
        };
        let has_reply = reply.is_some();
        if let Some(reply) = reply {
            stream.queue(reply);
        }
        if opened.is_some() {
            stream.opened();
        }
        if let Some(old) = replaced {
            self.forget(old);
        }
        if let Some((peer, incarnation)) = opened {
            self.peers.insert(peer, Peer { key, incarnation });
        }
        if has_reply {
            self.mark_dirty(key);
        }
        outcome
    }

    /// Handles letters of the in-memory transport.
    fn read_mail(&mut self) {
        let now = clock::now();
        for letter in self.setup.mailbox.take() {
            match letter {
                Letter::Connect { channel, hello, reply_to } => {
                    let Greeting { answer, replaced } =
                        self.cell.with(|role| greet_hello(role, now, &hello, &self.peers));
                    if let Some(old) = replaced {
                        self.forget(old);
                    }
                    match answer {
                        Ok(welcome) => {
                            self.next_key += 1;
                            let key = self.next_key;
                            let state = State::Open { peer: welcome.you };
                            let wire = Wire::Memory { to: reply_to.clone(), channel: Some(channel) };
                            self.connections.insert(key, Connection::new(wire, state));
                            self.peers.insert(welcome.you, Peer { key, incarnation: welcome.incarnation });
                            reply_to.put(Letter::Accepted { channel, peer_channel: key, welcome });
                        }
                        Err(refusal) => reply_to.put(Letter::Refused { channel, refusal }),
                    }
                }
                Letter::Accepted { channel, peer_channel, welcome } => {
                    let Some(connection) = self.connections.get_mut(&channel) else { continue };
                    if let (State::AwaitWelcome { peer, .. }, Wire::Memory { channel: end, .. }) =
                        (&connection.state, &mut connection.wire)
                    {
                        let peer = *peer;
                        *end = Some(peer_channel);
                        connection.state = State::Open { peer };
                        self.peers.insert(peer, Peer { key: channel, incarnation: 0 });
                        self.cell.with(|role| role.handle_connected(now, peer, &welcome));
                    }
                }
                Letter::Refused { channel, refusal } => {
                    self.drop_connection(channel, &Lost::Refused(refusal))
                }
                Letter::Frame { channel, header, payload } => {
                    if let Some(State::Open { peer }) =
                        self.connections.get(&channel).map(|found| &found.state)
                    {
                        self.cell.with(|role| role.handle_frame(now, *peer, &header, &payload));
                    }
                }
                Letter::Closed { channel } => {
                    self.drop_connection(channel, &Lost::Broken("the peer closed".into()));
                }
            }
        }
    }

    /// Drains the role's outputs and moves bytes.
    fn carry_out(&mut self) {
        let mut outputs = std::mem::take(&mut self.outputs);
        self.cell.with(|role| outputs.extend(std::iter::from_fn(|| role.poll_output())));
        for output in outputs.drain(..) {
            match output {
                Output::Connect { peer, address } => self.connect(peer, &address),
                Output::Send { to, frame } => self.send(to, frame),
                Output::Disconnect { peer } => {
                    if let Some(key) = self.peers.get(&peer).map(|found| found.key) {
                        if let Some(connection) = self.connections.get_mut(&key) {
                            connection.closing = true;
                        }
                        self.mark_dirty(key);
                    }
                }
                Output::Log(line) => (self.setup.log)(&line),
                Output::Stop { error } => self.end(error),
            }
        }
        self.outputs = outputs;
        self.flush_dirty();
    }

    fn connect(&mut self, peer: NodeId, address: &str) {
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
    fn open(&self, peer: NodeId, address: &str, attempt: usize) -> Result<Stream, String> {
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

    /// Sends a frame, unless a fault says otherwise.
    fn send(&mut self, to: NodeId, frame: Frame) {
        let key = match self.last_sent {
            Some((peer, key)) if peer == to => key,
            _ => {
                let Some(&Peer { key, .. }) = self.peers.get(&to) else { return };
                self.last_sent = Some((to, key));
                key
            }
        };
        if self.injected.is_idle() {
            return self.dispatch(key, frame);
        }
        let Some(me) = self.cell.with(|role| role.node()) else { return self.dispatch(key, frame) };
        let now = clock::now();
        // What follows a frame that is held waits behind it.
        if let Some(leaves) = self.connections.get(&key).and_then(|connection| connection.held_at(now)) {
            return self.make_late(leaves, key, frame);
        }
        match self.injected.fate(me, to, &frame.header) {
            None => self.dispatch(key, frame),
            Some(Trouble::Hold(duration)) => {
                let Some(connection) = self.connections.get_mut(&key) else { return };
                let leaves = connection.hold(now + duration);
                self.make_late(leaves, key, frame);
            }
            Some(Trouble::Late(duration)) => self.make_late(now + duration, key, frame),
            Some(Trouble::Reset) => self.drop_connection(key, &Lost::Broken("reset as injected".into())),
        }
    }

    /// Keeps a frame, with its bytes as they are now, until it is time.
    fn make_late(&mut self, leaves: Time, key: u64, frame: Frame) {
        let payload = self.cell.with(|role| role.payload(&frame.body).to_vec());
        let frame = Frame { header: frame.header, body: Body::Bytes(payload) };
        self.next_key += 1;
        self.late.insert((leaves, self.next_key), Late { key, frame });
    }

    fn send_late(&mut self, now: Time) {
        while let Some(entry) = self.late.first_entry()
            && entry.key().0 <= now
        {
            let Late { key, frame } = entry.remove();
            self.dispatch(key, frame);
        }
    }

    /// Puts a frame on its way. Without a connection it is dropped, as the contract of roles says.
    fn dispatch(&mut self, key: u64, frame: Frame) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        match &mut connection.wire {
            Wire::Stream(stream) => {
                stream.queue(frame);
                if !std::mem::replace(&mut connection.dirty, true) {
                    self.dirty.push(key);
                }
            }
            Wire::Memory { to, channel: Some(channel) } => {
                let payload = self.cell.with(|role| role.payload(&frame.body).to_vec());
                to.put(Letter::Frame { channel: *channel, header: frame.header, payload });
            }
            Wire::Memory { channel: None, .. } => {}
        }
    }

    /// Writes what waits, and watches for room where a socket is full.
    fn flush_dirty(&mut self) {
        for _ in 0..self.dirty.len() {
            let key = self.dirty.remove(0);
            match self.flush(key) {
                Ok(Flushed::Enough) => self.mark_dirty(key),
                Ok(Flushed::Done | Flushed::Blocked) => {}
                Err(lost) => self.drop_connection(key, &lost),
            }
        }
    }

    fn flush(&mut self, key: u64) -> Result<Flushed, Lost> {
        let Some(connection) = self.connections.get_mut(&key) else { return Ok(Flushed::Done) };
        connection.dirty = false;
        let is_connecting = matches!(connection.state, State::Connecting { .. });
        let closed = || Err(Lost::Broken("closed".into()));
        let Wire::Stream(stream) = &mut connection.wire else {
            return if connection.closing { closed() } else { Ok(Flushed::Done) };
        };
        let broken = |error: io::Error| Lost::Broken(error.to_string());
        let flushed = match is_connecting {
            true => Flushed::Blocked,
            false => stream.flush(self.cell.lend()).map_err(broken)?,
        };
        if flushed == Flushed::Done && connection.closing {
            return closed();
        }
        let mut wanted = epoll::EventFlags::empty();
        wanted.set(epoll::EventFlags::IN, !(connection.accepted && stream.is_congested()));
        wanted.set(epoll::EventFlags::OUT, flushed == Flushed::Blocked);
        if wanted != connection.watched {
            connection.watched = wanted;
            let data = epoll::EventData::new_u64(key);
            epoll::modify(&self.epoll, stream.descriptor(), data, wanted)
                .map_err(|error| broken(error.into()))?;
        }
        Ok(flushed)
    }

    /// Gives up on handshakes that take too long.
    fn expire(&mut self, now: Time) {
        let late: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.handshake_deadline().is_some_and(|deadline| deadline <= now))
            .map(|(key, _)| *key)
            .collect();
        for key in late {
            self.drop_connection(key, &Lost::Broken("no answer within the deadline".into()));
        }
        self.next_expiry = self.connections.values().filter_map(Connection::handshake_deadline).min();
    }

    /// A connection is gone; its role hears of it if it knew of it.
    fn drop_connection(&mut self, key: u64, why: &Lost) {
        self.last_sent = None;
        let Some(connection) = self.connections.remove(&key) else { return };
        if let Wire::Stream(stream) = &connection.wire {
            // Closing the descriptor would remove it too; this keeps the set tidy if a duplicate exists.
            let _ = epoll::delete(&self.epoll, stream.descriptor());
        }
        connection.hang_up();
        let peer = match connection.state {
            State::Open { peer } => {
                if self.peers.get(&peer).is_some_and(|found| found.key == key) {
                    self.peers.remove(&peer);
                }
                Some(peer)
            }
            State::Connecting { peer, .. } | State::AwaitWelcome { peer, .. } => Some(peer),
            State::AwaitHello { .. } | State::Refused => None,
        };
        if let Some(peer) = peer {
            let now = clock::now();
            self.cell.with(|role| role.handle_disconnected(now, peer, why));
        }
    }

    /// Removes a connection that a newer one replaced; the role knows already.
    fn forget(&mut self, key: u64) {
        self.last_sent = None;
        if let Some(connection) = self.connections.remove(&key) {
            connection.hang_up();
        }
        self.peers.retain(|_, peer| peer.key != key);
    }

    fn end(&mut self, error: Option<String>) {
        if self.ending.is_none() {
            self.ending = Some(Ending { error, deadline: clock::now() + FAREWELL, hung_up: false });
        }
    }

    /// After a stop: lets frames leave and peers hang up, for a moment, so that their last words are not lost.
    fn ended(&mut self, now: Time) -> Option<Result<(), String>> {
        let ending = self.ending.as_mut()?;
        let silent = self.connections.values().all(Connection::is_silent);
        if silent && !ending.hung_up {
            ending.hung_up = true;
            self.connections.values().for_each(Connection::hang_up);
        }
        let alone =
            self.connections.values().all(|connection| matches!(connection.wire, Wire::Memory { .. }));
        if now < ending.deadline && !(ending.hung_up && alone) {
            return None;
        }
        Some(ending.error.take().map_or(Ok(()), Err))
    }
}
