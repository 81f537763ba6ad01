//! The one loop that drives every role: it brings frames, timeouts and connections to the role, and carries out what
//! the role says.
//!
//! A loop belongs to one thread. Its role is its own (a coordinator, a data core) or shared with the application's
//! threads, and with other loops, behind a lock (a worker); [`RoleCell`] hides which. Bytes move without the role: a loop takes it
//! to ask where they belong, and to hand over all that came with one system call.

mod archiving;
mod connecting;
mod connection;
mod greeting;
mod injected;
mod listening;
mod panicking;
mod reading;
mod sending;
mod strangers;
mod watching;

pub use injected::Injection;
pub(crate) use strangers::Strangers;

use crate::checkpoint::Place;
use crate::clock;
use crate::log::Log;
use crate::transport::Dialler;
use crate::transport::carrier::Listener;
use crate::transport::resolver::{Resolve, Resolver};
use crate::waker::{Doorbell, Waker};
use archiving::Archivist;
use connecting::Resolving;
use connection::{Connection, State};
use injected::Injected;
use paramill_core::address::Addresses;
use paramill_core::landing::Landing;
use paramill_core::limits;
use paramill_core::role::{Frame, Lost, Output, Role};
use paramill_core::types::{ConnectionId, Time};
use rustix::event::epoll;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use watching::Watch;

/// How long a peer may take to say who it is, and a connection attempt to be decided.
const HANDSHAKE_DEADLINE: Duration = limits::ATTEMPT_DEADLINE;
/// How long a loop that ends waits for its last frames to leave and its peers to hang up.
const FAREWELL: Duration = Duration::from_millis(500);
/// The loop looks at its stop flag at least this often.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// Events taken from the kernel at once.
const EVENTS_PER_TURN: usize = 64;

/// The loop that keeps its role's time.
pub(crate) const FIRST_LANE: usize = 0;

const LISTENER: u64 = 0;
const WAKER: u64 = 1;
const RESOLVER: u64 = 2;
const ARCHIVE: u64 = 3;

/// Access to a role, which a loop owns or shares with other threads. One method and the type are required.
pub(crate) trait RoleCell {
    /// The role.
    type Role: Role;

    /// Whether the order in which the role's peers are read matters to it ([`Role::progress`]).
    const ORDERS_PEERS: bool = true;

    /// Calls `visit` with the role.
    fn with<T>(&mut self, visit: impl FnOnce(&mut Self::Role) -> T) -> T;

    /// The role, where nobody else can have it. Payloads that are in the role's own memory are read through this; a
    /// role that is shared has none ([`Body::Stored`]), so its bytes move without its lock.
    fn lend(&self) -> Option<&Self::Role> {
        None
    }

    /// Which of the role's loops this is. The first one keeps its time.
    fn lane(&self) -> usize {
        FIRST_LANE
    }

    /// The next output for a loop.
    fn poll_output(role: &mut Self::Role, _lane: usize) -> Option<Output> {
        role.poll_output()
    }

    /// Memory of the outputs for a loop.
    fn backlog_bytes(role: &Self::Role, _lane: usize) -> usize {
        role.backlog_bytes()
    }

    /// Events were handled, and the loop is about to sleep: threads that wait for a ticket may find it due, and other loops may have
    /// something to send.
    fn rest(&mut self) -> Rest {
        self.with(|role| Rest { has_work: role.backlog_bytes() > 0, next_timeout: role.next_timeout() })
    }

    /// The role's state is to be stored. Where it is not, nothing waits for it.
    fn remember(&mut self, _state: Vec<u8>) {}

    /// The loop has ended; nothing will happen any more.
    fn ended(&self, _error: Option<&str>) {}
}

/// What a loop has to do when nothing else happens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rest {
    /// There are outputs.
    pub(crate) has_work: bool,
    /// When the role wants to be called, if it is this loop that keeps its time.
    pub(crate) next_timeout: Option<Time>,
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

/// Begins to listen: the listeners, and the addresses at which others reach them.
pub(crate) type Opening = Box<dyn FnOnce() -> io::Result<(Vec<Box<dyn Listener>>, Addresses)> + Send>;

/// What a loop is given beside its role.
pub(crate) struct Setup {
    /// Where peers come in: on any number of interfaces, from this host, and from this process.
    pub(crate) listeners: Vec<Box<dyn Listener>>,
    /// How to listen where the role asks for it; `None` where nobody could come in.
    pub(crate) open: Option<Opening>,
    /// Starts another data core in this process; `None` where there are none.
    pub(crate) start_core: Option<Box<dyn Fn() + Send>>,
    /// How names of hosts become addresses.
    pub(crate) resolve: Resolve,
    /// How peers are reached.
    pub(crate) dialler: Dialler,
    /// How others wake the loop.
    pub(crate) waker: Arc<Waker>,
    /// Ends the loop when it becomes true.
    pub(crate) stop: Arc<AtomicBool>,
    /// Connections of strangers in all loops that are set up with this.
    pub(crate) strangers: Arc<Strangers>,
    /// Faults to try.
    pub(crate) injection: Injection,
    /// Where checkpoints are, if there are any.
    pub(crate) checkpoints: Place,
    /// Where log lines go.
    pub(crate) log: Log,
}

/// A role with its connections.
pub(crate) struct EventLoop<C: RoleCell> {
    cell: C,
    setup: Setup,
    injected: Injected,
    watch: Watch,
    connections: BTreeMap<u64, Connection>,
    resolver: Resolver,
    archivist: Archivist,
    /// Connections that are asked for, by the name of a host that has no address yet.
    resolving: BTreeMap<u64, Resolving>,
    /// The connections that the role knows, by its names for them.
    names: BTreeMap<ConnectionId, Named>,
    next_key: u64,
    /// Sources without a descriptor that rang. Kept from turn to turn for its memory.
    rung: Vec<u64>,
    /// Connections with something to read. Kept from turn to turn for its memory.
    readable: Vec<u64>,
    /// Connections with something to write, to watch for or to close.
    dirty: Vec<u64>,
    /// Connections that have something to write when this node may send again, and when that is.
    held: Vec<u64>,
    held_until: Option<Time>,
    /// Connections with frames that were received and not handled, because their answers were too much at once.
    leftovers: Vec<u64>,
    /// When a handshake or a connection that is being closed is given up, at the earliest.
    next_expiry: Option<Time>,
    /// The connection of the last frame that was sent: the next one is most often for the same.
    last_sent: Option<(ConnectionId, u64)>,
    /// Kept from turn to turn for its memory.
    outputs: Vec<Output>,
    /// Where the payload at hand belongs. Kept from frame to frame for its memory.
    places: Vec<Landing>,
    /// Frames that were made late, by the time they leave.
    late: BTreeMap<(Time, u64), Late>,
    /// Given up to take a connection when the process has no other descriptor; `None` in a loop that takes none, and until
    /// one is free again.
    spare: Option<OwnedFd>,
    /// No connections are taken before this.
    deaf_until: Option<Time>,
    ending: Option<Ending>,
}

/// A frame that was made late. It leaves on the connection it was meant for, or not at all.
struct Late {
    key: u64,
    frame: Frame,
}

/// A connection that has a name, and which life of its peer it belongs to.
#[derive(Debug, Clone, Copy)]
struct Named {
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
    pub(crate) fn new(cell: C, mut setup: Setup) -> io::Result<EventLoop<C>> {
        let watch = Watch::new(&setup.waker, WAKER)?;
        for listener in &mut setup.listeners {
            watch.add(&mut **listener, LISTENER, epoll::EventFlags::IN)?;
        }
        let spare = match setup.listeners[..] {
            [] => None,
            _ => {
                setup.strangers.add_loop();
                Some(listening::spare_descriptor(&setup.waker)?)
            }
        };
        Ok(EventLoop {
            cell,
            injected: Injected::new(&setup.injection),
            resolver: Resolver::new(setup.resolve, Doorbell::new(&setup.waker, RESOLVER)),
            resolving: BTreeMap::new(),
            archivist: Archivist::new(
                std::mem::take(&mut setup.checkpoints),
                Doorbell::new(&setup.waker, ARCHIVE),
            ),
            setup,
            watch,
            connections: BTreeMap::new(),
            names: BTreeMap::new(),
            next_key: ARCHIVE,
            rung: Vec::new(),
            readable: Vec::new(),
            dirty: Vec::new(),
            held: Vec::new(),
            held_until: None,
            leftovers: Vec::new(),
            next_expiry: None,
            last_sent: None,
            outputs: Vec::new(),
            places: Vec::new(),
            late: BTreeMap::new(),
            spare,
            deaf_until: None,
            ending: None,
        })
    }

    /// Turns until the role stops or the flag is set. The error is the role's, or tells of a panic.
    pub(crate) fn run(mut self) -> Result<(), String> {
        let result = self.turn_to_the_end();
        self.connections.values_mut().for_each(Connection::hang_up);
        self.cell.ended(result.as_ref().err().map(String::as_str));
        result
    }

    fn turn_until_stopped(&mut self) -> Result<(), String> {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        loop {
            if let Some(result) = self.turn(&mut events) {
                return result;
            }
        }
    }

    fn turn(&mut self, events: &mut Vec<epoll::Event>) -> Option<Result<(), String>> {
        if let Err(error) = self.wait_for_events(events) {
            return Some(Err(format!("cannot wait for events: {error}")));
        }
        if self.setup.stop.load(Ordering::Relaxed) && self.ending.is_none() {
            self.end(None, clock::now() + FAREWELL);
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
                WAKER => self.answer_bells(),
                key => self.serve(key, flags),
            }
        }
        self.read_ready();
        let now = clock::now();
        self.take_outputs(now);
        if self.deaf_until.is_some_and(|until| until <= now) {
            self.listen_again_at(None);
        }
        self.send_late(now);
        self.release_held(now);
        self.carry_out();
        if self.cell.lend().is_some_and(Role::awaits_silence) && self.is_silent() {
            self.cell.with(|role| role.handle_silence(now));
        }
        if self.next_expiry.is_some_and(|at| at <= now) {
            self.expire(now);
        }
        self.injected.slow_down(began);
        self.ended(now)
    }

    /// Whether nothing waits to be sent.
    fn is_silent(&self) -> bool {
        self.late.is_empty() && self.connections.values().all(Connection::is_silent)
    }

    /// Serves sources without a descriptor.
    fn answer_bells(&mut self) {
        let mut rung = std::mem::take(&mut self.rung);
        self.setup.waker.take(&mut rung);
        for key in rung.drain(..) {
            match key {
                LISTENER => self.accept_all(),
                RESOLVER => self.take_answers(),
                ARCHIVE => self.take_archived(),
                key => self.serve(key, epoll::EventFlags::IN | epoll::EventFlags::OUT),
            }
        }
        self.rung = rung;
    }

    /// Sleeps until something happens, or it is time for something.
    fn wait_for_events(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        // From here on whoever gives the role something to do also wakes this loop.
        self.setup.waker.set_sleeping(true);
        let Rest { has_work, next_timeout } = self.cell.rest();
        let timeout = if has_work { Some(Duration::ZERO) } else { self.sleep_for(next_timeout) };
        let waited = self.watch.wait(events, timeout);
        self.setup.waker.set_sleeping(false);
        waited
    }

    /// Whether frames that were received can be handled without waiting for anything.
    fn has_ready_leftovers(&self) -> bool {
        let is_ready = |key: &u64| self.connections.get(key).is_some_and(Connection::has_leftovers);
        self.leftovers.iter().any(is_ready)
    }

    /// How long to sleep if nothing happens; `None` until somebody wakes the loop.
    fn sleep_for(&self, role: Option<Time>) -> Option<Duration> {
        if !self.dirty.is_empty() || self.has_ready_leftovers() {
            return Some(Duration::ZERO);
        }
        let now = clock::now();
        let ending = self.ending.as_ref().map(|ending| ending.deadline);
        let late = self.late.keys().next().map(|(at, _)| *at);
        let next = [
            role,
            self.next_expiry,
            ending,
            late,
            self.held_until,
            self.deaf_until,
            self.injected.next_timeout(),
        ];
        match next.into_iter().flatten().min() {
            Some(at) => Some(at.since(now).min(LONGEST_SLEEP)),
            // A spare loop of a worker costs nothing as long as it has no connection. Who stops a worker wakes all of its loops.
            None if self.cell.lane() != FIRST_LANE && self.connections.is_empty() => None,
            None => Some(LONGEST_SLEEP),
        }
    }

    fn watch(&mut self, key: u64, mut connection: Connection) {
        self.expire_at(connection.deadline());
        connection.watched = epoll::EventFlags::IN | epoll::EventFlags::OUT;
        let added = self.watch.add(&mut *connection.carrier, key, connection.watched);
        self.connections.insert(key, connection);
        if let Err(error) = added {
            self.drop_connection(key, &Lost::Broken(format!("cannot watch the connection: {error}")));
        }
    }

    fn expire_at(&mut self, deadline: Option<Time>) {
        self.next_expiry = [self.next_expiry, deadline].into_iter().flatten().min();
    }

    /// Gives up on handshakes, and on last words, that take too long.
    fn expire(&mut self, now: Time) {
        let late: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.deadline().is_some_and(|deadline| deadline <= now))
            .map(|(key, _)| *key)
            .collect();
        for key in late {
            self.drop_connection(key, &Lost::Broken("no answer within the deadline".into()));
        }
        self.expire_names(now);
        let names = self.resolving.values().map(|resolving| resolving.deadline);
        self.next_expiry = self.connections.values().filter_map(Connection::deadline).chain(names).min();
    }

    /// A connection is gone; its role hears of it if it knew of it.
    fn drop_connection(&mut self, key: u64, why: &Lost) {
        self.last_sent = None;
        let Some(mut connection) = self.connections.remove(&key) else { return };
        // Closing the descriptor would remove it too; this keeps the set tidy if a duplicate exists.
        let _ = self.watch.remove(&*connection.carrier);
        connection.hang_up();
        let name = match connection.state {
            State::Open { name } => {
                if self.names.get(&name).is_some_and(|found| found.key == key) {
                    self.names.remove(&name);
                }
                Some(name)
            }
            State::Connecting { name, .. } | State::AwaitWelcome { name, .. } => Some(name),
            State::AwaitHello { .. } | State::Refused | State::Leaving => None,
        };
        if let Some(name) = name {
            let now = clock::now();
            self.cell.with(|role| role.handle_disconnected(now, name, why));
        }
    }

    /// The role has given a connection this name. One of an earlier incarnation of the peer ends: what it still brings is not
    /// this peer's.
    fn introduce(&mut self, name: ConnectionId, named: Named) {
        if let Some(old) = self.names.insert(name, named).filter(|old| old.key != named.key) {
            self.forget(old.key);
        }
    }

    /// Removes a connection that a newer one replaced; the role knows already.
    fn forget(&mut self, key: u64) {
        self.last_sent = None;
        if let Some(mut connection) = self.connections.remove(&key) {
            connection.hang_up();
        }
        self.names.retain(|_, named| named.key != key);
    }

    fn end(&mut self, error: Option<String>, deadline: Time) {
        if self.ending.is_none() {
            self.ending = Some(Ending { error, deadline, hung_up: false });
        }
    }

    /// After a stop: lets frames leave and peers hang up, for a moment, so that their last words are not lost.
    fn ended(&mut self, now: Time) -> Option<Result<(), String>> {
        let has_late = self.last_late().is_some();
        let ending = self.ending.as_mut()?;
        let silent = !has_late && self.connections.values().all(Connection::is_silent);
        if silent && !ending.hung_up {
            ending.hung_up = true;
            self.connections.values_mut().for_each(Connection::hang_up);
        }
        if now < ending.deadline && !(ending.hung_up && self.connections.is_empty()) {
            return None;
        }
        Some(ending.error.take().map_or(Ok(()), Err))
    }
}
