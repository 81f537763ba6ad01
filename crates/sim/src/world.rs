//! Roles in virtual time: a clock, a queue of events, connections between nodes.
//!
//! A connection delivers frames in order until it breaks. When it breaks, everything under way on it is lost and
//! both ends are told. After every event the outputs of the role concerned are carried out, as any driver does.
//!
//! Roles are driven as the real driver drives them. Frames wait by reference until the connection's window has room for
//! their bytes, headers are brought up to date then, payloads are received where the role wants them, peers that are
//! far ahead are read from last, and those who do not take their answers are not read from at all.

mod channel;
mod connecting;
mod connection;
mod directory;
mod event;
mod landing;
mod node;
mod observer;
mod payload;
mod reader;
mod reading;
mod travelling;

pub use node::{Birth, Condition, Death, Disk, Ended, Newcomer};
pub use observer::{Counts, Observer, Unobserved, Violation};

use crate::archive::Archive;
use crate::network::{HostId, Network, Parcel, Passage};
use crate::queue::Queue;
use crate::rule::{FrameView, RuleSet};
use channel::Flight;
use connection::{Connection, End};
use directory::Directory;
use event::Event;
use landing::{land_behind, stray};
use node::{Node, Rebirth, STORING, Starter, label};
use paramill_core::fault::Delay;
use paramill_core::limits::LANDING_FRAMES;
use paramill_core::prng::Prng;
use paramill_core::role::{Body, Frame, Lost, Output, Role, Turn};
use paramill_core::types::{ConnectionId, NodeId, Time};
use paramill_core::wire::Header;
use payload::{Copies, Payload};
use reader::{Reader, Source};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use travelling::Travelling;

/// Nodes, their connections, the network between them, and what will happen.
#[derive(Debug)]
pub struct World<R> {
    now: Time,
    queue: Queue<Event>,
    nodes: Vec<Node<R>>,
    by_id: BTreeMap<NodeId, usize>,
    directory: Directory,
    connections: Vec<Connection>,
    network: Network,
    /// Frames on links that are shared.
    travelling: Travelling,
    seed: u64,
    rules: RuleSet,
    /// Decides what real networks leave to chance: whether a payload comes in one piece with its header.
    dice: Prng,
    copies: Copies,
    archive: Archive,
    /// Channels with frames that the role has just queued, by connection and the side that receives.
    dirty: Vec<(usize, usize)>,
    /// What some nodes sent to others is not read, by sender and receiver: how many of these frames may be.
    holds: BTreeMap<(usize, usize), usize>,
    rebirths: Vec<Option<Rebirth<R>>>,
    starter: Option<Starter<R>>,
    deaths: Vec<Option<Death<R>>>,
    log: VecDeque<String>,
    counts: Counts,
}

/// Lines of the log that are kept.
const LOG_LINES: usize = 200;
/// In a world of so many nodes a role is asked after every second event whether its account of itself adds up, in one of twice
/// as many after every third, and so on. In smaller ones it is asked after every event.
const EVENTS_PER_CHECK: usize = 64;
/// How long it takes until a process that may not die yet is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// Events at one instant after which the world is declared stuck in a loop.
const EVENTS_AT_ONE_TIME: u32 = 10_000_000;

impl<R: Role + 'static> World<R> {
    /// A world without nodes, whose frames travel over this network.
    pub fn new(network: Network, seed: u64) -> World<R> {
        World {
            now: Time::ZERO,
            queue: Queue::new(),
            nodes: Vec::new(),
            by_id: BTreeMap::new(),
            directory: Directory::default(),
            connections: Vec::new(),
            network,
            travelling: Travelling::default(),
            seed,
            rules: RuleSet::default(),
            dice: Prng::fork(seed, 0x6c61_6e64),
            copies: Copies::default(),
            archive: Archive::default(),
            dirty: Vec::new(),
            holds: BTreeMap::new(),
            rebirths: Vec::new(),
            starter: None,
            deaths: Vec::new(),
            log: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    /// Adds a node. Others reach it at `address`; `handling` is the time each frame occupies it.
    pub fn add(&mut self, id: NodeId, address: &str, host: HostId, handling: Duration, role: R) {
        let index = self.nodes.len();
        self.by_id.insert(id, index);
        self.directory.enter(address, index);
        let dice = Prng::fork(self.seed, label(id));
        self.nodes.push(Node::new(id, host, handling, dice, role));
        // A role may have something to say before anything happened to it.
        self.set_timer(index, self.now);
    }

    /// Adds a node whose process is started at `at`. Until then nobody is there.
    pub fn add_later(
        &mut self,
        id: NodeId,
        address: &str,
        host: HostId,
        handling: Duration,
        (at, build): (Time, impl Fn(Time) -> R + 'static),
    ) {
        self.add(id, address, host, handling, build(at));
        let node = &mut self.nodes[self.by_id[&id]];
        (node.ended, node.timer) = (Some(Ended::NotStarted), None);
        self.restart(id, at, build);
    }

    /// What a node has stored, and will have.
    pub fn disk(&self, id: NodeId) -> Option<Disk> {
        self.by_id.get(&id).map(|&node| self.nodes[node].disk.clone())
    }

    fn store(&mut self, index: usize, state: Vec<u8>) {
        self.queue.push(self.now + STORING, self.nodes[index].storing(index, state));
    }

    /// Others reach a node at this address too.
    pub fn add_address(&mut self, id: NodeId, address: &str) {
        if let Some(&node) = self.by_id.get(&id) {
            self.directory.enter(address, node);
        }
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The last lines that nodes logged, oldest first.
    pub fn log(&self) -> impl Iterator<Item = &str> {
        self.log.iter().map(String::as_str)
    }

    /// The checkpoints that the nodes of this world have written.
    pub fn archive(&self) -> &Archive {
        &self.archive
    }

    /// The same, to have it fail, or to begin with what another world has written.
    pub fn archive_mut(&mut self) -> &mut Archive {
        &mut self.archive
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The rules of the network, to add to or to clear.
    pub fn rules(&mut self) -> &mut RuleSet {
        &mut self.rules
    }

    /// All nodes in order of their names.
    pub fn roles(&self) -> impl Iterator<Item = (NodeId, &R)> {
        self.by_id.iter().map(|(&id, &index)| (id, &self.nodes[index].role))
    }

    /// A node's role.
    pub fn role(&self, id: NodeId) -> Option<&R> {
        self.by_id.get(&id).map(|&index| &self.nodes[index].role)
    }

    /// A node's role, to be called from outside. What it says is carried out when the world runs on.
    pub fn role_mut(&mut self, id: NodeId) -> Option<&mut R> {
        let index = *self.by_id.get(&id)?;
        // The outputs are carried out as an event of their own, so that observers see them.
        self.set_timer(index, self.now);
        Some(&mut self.nodes[index].role)
    }

    /// How a node ended; `None` while it lives.
    pub fn ended(&self, id: NodeId) -> Option<&Ended> {
        self.by_id.get(&id).and_then(|&index| self.nodes[index].ended.as_ref())
    }

    /// Whether the node has crashed and is going to be started anew.
    pub fn is_to_return(&self, id: NodeId) -> bool {
        let node = self.by_id.get(&id).map(|&index| &self.nodes[index]);
        node.is_some_and(|node| node.ended == Some(Ended::Crashed) && node.restarts_due > 0)
    }

    /// The node stands still from `at` on for `length`: what happens to it meanwhile waits.
    pub fn pause(&mut self, id: NodeId, at: Time, length: Duration) {
        if let Some(&node) = self.by_id.get(&id) {
            self.queue.push(at.max(self.now), Event::Pause { node, length });
        }
    }

    /// The node is gone from `at` on.
    pub fn crash(&mut self, id: NodeId, at: Time) {
        if let Some(&node) = self.by_id.get(&id) {
            self.queue.push(at.max(self.now), Event::Crash { node });
        }
    }

    /// A node that has crashed by `at`, or was never started, is started then, with the role that `build` makes. Nothing happens to one that
    /// lives or that ended by its own word.
    pub fn restart(&mut self, id: NodeId, at: Time, build: impl FnOnce(Time) -> R + 'static) {
        if let Some(&node) = self.by_id.get(&id) {
            self.nodes[node].restarts_due += 1;
            let rebirth = self.rebirth(move |now, _| build(now));
            self.queue.push(at.max(self.now), Event::Restart { node, rebirth });
        }
    }

    /// At `at` another process takes the place of a node that lives: all its connections break, and its role becomes what `build` makes of
    /// the one before. Nothing happens to a node that has ended.
    pub fn replace(&mut self, id: NodeId, at: Time, build: impl FnOnce(Time, &R) -> R + 'static) {
        if let Some(&node) = self.by_id.get(&id) {
            let rebirth = self.rebirth(build);
            self.queue.push(at.max(self.now), Event::Replace { node, rebirth });
        }
    }

    fn rebirth(&mut self, build: impl FnOnce(Time, &R) -> R + 'static) -> usize {
        self.rebirths.push(Some(Rebirth(Box::new(build))));
        self.rebirths.len() - 1
    }

    /// A node belongs to a process, which dies as a whole ([`World::crash_process`]). Nodes that it starts belong to it too.
    pub fn set_process(&mut self, id: NodeId, process: u32) {
        if let Some(&node) = self.by_id.get(&id) {
            self.nodes[node].process = Some(process);
        }
    }

    /// All nodes of a process are gone from `at` on, or from when `may_die` holds, which is asked again and again for a while.
    pub fn crash_process(&mut self, process: u32, at: Time, death: Death<R>) {
        self.deaths.push(Some(death));
        let death = self.deaths.len() - 1;
        self.queue.push(at.max(self.now), Event::CrashProcess { process, death });
    }

    /// A process dies, if it may, and its nodes are started anew later.
    fn kill<O: Observer<R>>(&mut self, process: u32, number: usize, observer: &mut O) -> Result<(), String> {
        let Some(death) = self.deaths[number].take() else { return Ok(()) };
        if !(death.may_die)(self) {
            if self.now < death.until {
                self.deaths[number] = Some(death);
                let event = Event::CrashProcess { process, death: number };
                self.queue.push(self.now + ASK_AGAIN, event);
            }
            return Ok(());
        }
        let is_meant = |node: &Node<R>| node.process == Some(process) && node.ended.is_none();
        let meant: Vec<usize> = (0..self.nodes.len()).filter(|&at| is_meant(&self.nodes[at])).collect();
        meant.into_iter().try_for_each(|node| self.end(node, Ended::Crashed, observer))?;
        for (node, build) in death.restarts {
            self.restart(node, self.now + death.after, build);
        }
        Ok(())
    }

    /// `build` makes the nodes that others start.
    pub fn set_starter(&mut self, build: impl Fn(Time, NodeId, &R) -> Newcomer<R> + 'static) {
        self.starter = Some(Starter(Box::new(build)));
    }

    /// A node starts another one of its process, on its host.
    fn start_beside(&mut self, index: usize) {
        let Some(Starter(build)) = &self.starter else { return };
        let Node { id, host, handling, process, .. } = self.nodes[index];
        let Newcomer { id, address, role } = build(self.now, id, &self.nodes[index].role);
        self.add(id, &address, host, handling, role);
        if let Some(newest) = self.nodes.last_mut() {
            newest.process = process;
        }
    }

    /// Each frame takes `factor` times as long on this node as before.
    pub fn slow_down(&mut self, id: NodeId, factor: f64) {
        if let Some(&node) = self.by_id.get(&id) {
            self.nodes[node].handling = self.nodes[node].handling.mul_f64(factor);
        }
    }

    /// Breaks every connection of a node now.
    pub fn reset_connections(&mut self, id: NodeId, why: &str) {
        if let Some(&node) = self.by_id.get(&id) {
            for connection in self.nodes[node].connections.values().copied().collect::<Vec<_>>() {
                self.reset(connection, why);
            }
        }
    }

    /// Breaks the connections between two nodes now. They may connect again.
    pub fn break_connection(&mut self, one: NodeId, other: NodeId, why: &str) {
        for connection in self.between(one, other).map(|(_, connection)| connection).collect::<Vec<_>>() {
            self.reset(connection, why);
        }
    }

    /// `to` reads nothing of what `from` sends, until [`World::release`]. It stays connected, and others are read.
    pub fn hold(&mut self, from: NodeId, to: NodeId) {
        if let Some(pair) = self.pair(from, to) {
            self.holds.insert(pair, 0);
        }
    }

    /// Ends what [`World::hold`] began.
    pub fn release(&mut self, from: NodeId, to: NodeId) {
        if let Some(pair) = self.pair(from, to)
            && self.holds.remove(&pair).is_some()
        {
            reading::call_reader(self, pair.1);
        }
    }

    /// `to` reads the next `frames` of those that are held, now or as they come, and goes on to hold the others.
    pub fn let_through(&mut self, from: NodeId, to: NodeId, frames: usize) {
        if let Some(pair) = self.pair(from, to)
            && let Some(allowed) = self.holds.get_mut(&pair)
        {
            *allowed = allowed.saturating_add(frames);
            reading::call_reader(self, pair.1);
        }
    }

    /// The headers of what has reached `to` from `from` and was not read, in order on each connection.
    pub fn unread(&self, from: NodeId, to: NodeId) -> impl Iterator<Item = &Header> {
        self.between(to, from).flat_map(|(receiver, connection)| {
            let connection = &self.connections[connection];
            let side = 1 - connection.other_side(receiver);
            connection.channels[side].unread()
        })
    }

    /// Has a node say something to another that its role did not say. Says whether there is a connection for it.
    pub fn inject(&mut self, from: NodeId, to: NodeId, frame: Frame) -> bool {
        let Some((index, connection)) = self.between(from, to).next() else { return false };
        let side = self.connections[connection].other_side(index);
        let End { name, .. } = self.connections[connection].ends[1 - side];
        self.queue_frame(index, name, frame, Turn::InOrder);
        // It is sent with what the role says at its next event.
        self.set_timer(index, self.now);
        true
    }

    /// The first node, and each of its connections to the second.
    fn between(&self, one: NodeId, other: NodeId) -> impl Iterator<Item = (usize, usize)> {
        self.pair(one, other).into_iter().flat_map(move |(one, other)| {
            let connections = self.nodes[one].connections.values().copied();
            let is_meant = move |connection: &usize| {
                self.connections[*connection].ends.iter().any(|end| end.node == other)
            };
            connections.filter(is_meant).map(move |connection| (one, connection))
        })
    }

    fn pair(&self, one: NodeId, other: NodeId) -> Option<(usize, usize)> {
        Some((*self.by_id.get(&one)?, *self.by_id.get(&other)?))
    }

    /// Lets events happen until `done` holds (asked after each), `until` is reached or nothing is left.
    /// Says whether `done` holds.
    pub fn run<O: Observer<R>>(
        &mut self,
        until: Time,
        observer: &mut O,
        mut done: impl FnMut(&World<R>) -> bool,
    ) -> Result<bool, Violation> {
        let mut at_one_time = 0;
        while let Some(at) = self.next_time().filter(|&at| at <= until) {
            at_one_time = if at > self.now { 0 } else { at_one_time + 1 };
            if at_one_time > EVENTS_AT_ONE_TIME {
                let what = format!(
                    "{EVENTS_AT_ONE_TIME} events and no time passed; the last: {:?}",
                    self.queue.pop()
                );
                return Err(Violation { at, what });
            }
            if self.network.next_time() == Some(at) {
                self.step_network(at);
                continue;
            }
            self.step(observer).map_err(|what| Violation { at: self.now, what })?;
            if done(self) {
                self.check_all()?;
                return Ok(true);
            }
        }
        self.now = self.now.max(until);
        self.check_all()?;
        Ok(false)
    }

    /// When something happens next. Background traffic goes on without end, and alone it is nothing to wait for.
    fn next_time(&self) -> Option<Time> {
        match (self.queue.next_time(), self.network.next_time()) {
            (None, _) if self.network.is_idle() => None,
            (nodes, network) => nodes.into_iter().chain(network).min(),
        }
    }

    /// Something happens on shared links, before what happens to nodes at the same time.
    fn step_network(&mut self, at: Time) {
        self.now = self.now.max(at);
        self.counts.events += 1;
        if let Some((frame, passage)) = self.network.step() {
            let (flight, delay) = self.travelling.take(frame);
            self.expect(flight, delay, passage);
        }
    }

    /// Whether the accounts of all roles add up, also of those that were not asked after their last event.
    fn check_all(&self) -> Result<(), Violation> {
        let living = (0..self.nodes.len()).filter(|&index| self.nodes[index].ended.is_none());
        let mut checks = living.map(|index| self.nodes[index].check());
        checks.try_for_each(|check| check).map_err(|what| Violation { at: self.now, what })
    }

    fn step<O: Observer<R>>(&mut self, observer: &mut O) -> Result<(), String> {
        let Some((at, event)) = self.queue.pop() else { return Ok(()) };
        self.now = self.now.max(at);
        self.counts.events += 1;
        if let Event::CrashProcess { process, death } = event {
            return self.kill(process, death, observer);
        }
        let index = self.concerned(&event);
        let node = &mut self.nodes[index];
        if let Event::Restart { .. } = event {
            node.restarts_due -= 1;
        }
        if node.ended.is_some() {
            return self.discard(index, event, observer);
        }
        // The kernel receives also while the process stands still.
        let is_outside = matches!(
            event,
            Event::Pause { .. }
                | Event::Resume { .. }
                | Event::Crash { .. }
                | Event::Restart { .. }
                | Event::Arrive { .. }
        );
        let waits = node.paused_until > self.now || !node.postponed.is_empty();
        if waits && !is_outside {
            node.postponed.push_back(event);
            return Ok(());
        }
        if self.happen(index, event, observer)? {
            self.settle(index, observer)?;
            if self.is_silent(index) {
                self.nodes[index].role.handle_silence(self.now);
                self.settle(index, observer)?;
            }
        }
        Ok(())
    }

    /// Whether nothing waits to be sent by a node that wants to know it.
    fn is_silent(&self, index: usize) -> bool {
        let node = &self.nodes[index];
        let is_waiting = |connection: &usize| {
            let connection = &self.connections[*connection];
            connection.channels[connection.other_side(index)].is_waiting()
        };
        let awaits = node.ended.is_none() && node.role.awaits_silence();
        awaits && !node.connections.values().any(is_waiting)
    }

    /// The node to which an event happens.
    fn concerned(&self, event: &Event) -> usize {
        let end = |connection: usize, side: usize| self.connections[connection].ends[side].node;
        match *event {
            Event::Dial { target, .. } => target,
            Event::Dialled { connection, .. } => end(connection, 0),
            Event::Arrive { ref flight, .. } => end(flight.connection, flight.side),
            Event::Room { connection, side } => end(connection, 1 - side),
            Event::Lost { connection, side, .. } => end(connection, side),
            Event::CrashProcess { .. } => unreachable!("it happens to several nodes"),
            Event::Unreachable { node, .. }
            | Event::Read { node }
            | Event::Timer { node }
            | Event::Archived { node, .. }
            | Event::Pause { node, .. }
            | Event::Resume { node }
            | Event::Crash { node }
            | Event::Stored { node, .. }
            | Event::Restart { node, .. }
            | Event::Replace { node, .. } => node,
        }
    }

    /// A dead node hears nothing; who calls it is told. One that stopped by its own word still says its last words.
    fn discard<O: Observer<R>>(
        &mut self,
        index: usize,
        event: Event,
        observer: &mut O,
    ) -> Result<(), String> {
        match event {
            Event::Dial { from, life, name, target, .. } => {
                let latency = self.latency(target, from);
                let why = Lost::Broken("the connection was refused: nobody is there".into());
                self.queue.push(self.now + latency, Event::Unreachable { node: from, life, name, why });
            }
            Event::Dialled { connection, .. } => self.reset(connection, "the peer died"),
            Event::Arrive { flight, .. } => self.copies.recycle(flight.payload),
            Event::Room { connection, side } => {
                self.connections[connection].channels[side].note_room();
                self.flush(connection, side, observer)?;
            }
            Event::Restart { rebirth, .. } => {
                if let Some(Ended::Crashed | Ended::NotStarted) = self.nodes[index].ended {
                    self.start_anew(index, rebirth);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A process is started in the place of one that crashed, or that was never there.
    fn start_anew(&mut self, index: usize, rebirth: usize) {
        if self.nodes[index].ended == Some(Ended::NotStarted) {
            self.counts.late += 1;
            self.note(index, "is started late");
        } else {
            self.counts.restarts += 1;
            self.note(index, "is started anew");
        }
        self.revive(index, rebirth);
    }

    fn revive(&mut self, index: usize, rebirth: usize) {
        let Some(Rebirth(build)) = self.rebirths[rebirth].take() else { return };
        let node = &mut self.nodes[index];
        node.role = build(self.now, &node.role);
        node.ended = None;
        node.life += 1;
        node.reader = Reader::default();
        (node.timer, node.busy_until, node.paused_until) = (None, self.now, self.now);
        self.set_timer(index, self.now);
    }

    /// Carries out an event on a living, running node. Says whether its role was called.
    fn happen<O: Observer<R>>(
        &mut self,
        index: usize,
        event: Event,
        observer: &mut O,
    ) -> Result<bool, String> {
        let now = self.now;
        match event {
            Event::Arrive { flight, tail } => {
                self.receive(index, flight, tail, observer)?;
                return Ok(false);
            }
            Event::Read { .. } => {
                // It may have been called for an earlier time since.
                if self.nodes[index].reader.called.take_if(|at| *at <= now).is_some() {
                    reading::read(self, index, observer)?;
                }
                return Ok(false);
            }
            Event::Room { connection, side } => {
                self.connections[connection].channels[side].note_room();
                self.flush(connection, side, observer)?;
                return Ok(false);
            }
            Event::Timer { .. } => {
                let node = &mut self.nodes[index];
                if node.timer.is_none_or(|at| at > now) {
                    return Ok(false);
                }
                node.timer = None;
                if node.role.next_timeout().is_some_and(|at| at <= now) {
                    node.role.handle_timeout(now);
                }
            }
            Event::Archived { life, request, .. } => {
                if life != self.nodes[index].life {
                    return Ok(false);
                }
                let response = self.archive.carry_out(*request);
                self.nodes[index].role.handle_archived(now, response);
            }
            Event::Dial { from, life, name, hello, .. } => {
                connecting::accept(self, index, (from, life), name, &hello)
            }
            Event::Dialled { connection, welcome } => {
                let Connection { ends: [End { name, .. }, _], is_open, life, .. } =
                    self.connections[connection];
                if life != self.nodes[index].life {
                    self.reset(connection, "the peer died");
                    return Ok(false);
                }
                if !is_open {
                    let why = Lost::Broken("the connection broke while it was made".into());
                    self.nodes[index].role.handle_disconnected(now, name, &why);
                } else {
                    self.attach(connection, 0);
                    self.nodes[index].role.handle_connected(now, name, &welcome);
                    reading::call_reader(self, index);
                }
            }
            Event::Unreachable { life, name, why, .. } => {
                if life != self.nodes[index].life {
                    return Ok(false);
                }
                self.nodes[index].role.handle_disconnected(now, name, &why);
            }
            Event::Lost { connection, side, why } => return Ok(self.lose(connection, side, &why)),
            Event::Pause { length, .. } => {
                let until = now + length;
                self.nodes[index].paused_until = self.nodes[index].paused_until.max(until);
                self.queue.push(until, Event::Resume { node: index });
                return Ok(false);
            }
            Event::Resume { .. } => {
                // What waited happens now, in order; `step` keeps newer events behind it until then.
                while self.nodes[index].paused_until <= now
                    && self.nodes[index].ended.is_none()
                    && let Some(event) = self.nodes[index].postponed.pop_front()
                {
                    if self.happen(index, event, observer)? {
                        self.settle(index, observer)?;
                    }
                }
                return Ok(false);
            }
            Event::Crash { .. } => {
                self.end(index, Ended::Crashed, observer)?;
                return Ok(false);
            }
            Event::Stored { life, state, .. } => return Ok(self.nodes[index].stored(now, life, state)),
            Event::Restart { .. } | Event::CrashProcess { .. } => return Ok(false),
            Event::Replace { rebirth, .. } => {
                // What waits for the process before happens to its successor.
                let postponed = std::mem::take(&mut self.nodes[index].postponed);
                self.end(index, Ended::Crashed, observer)?;
                self.revive(index, rebirth);
                self.counts.handovers += 1;
                self.note(index, "goes on in another process");
                self.nodes[index].postponed = postponed;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Carries out everything that a role says.
    fn settle<O: Observer<R>>(&mut self, index: usize, observer: &mut O) -> Result<(), String> {
        let mut stop = None;
        while let Some(output) = self.nodes[index].role.poll_output() {
            match output {
                Output::Send { to, frame, turn } => self.queue_frame(index, to, frame, turn),
                Output::Connect { connection, address } => {
                    connecting::dial(self, index, connection, &address)
                }
                Output::Disconnect { connection } => self.close(index, connection),
                Output::Abandon { connection } => {
                    if let Some(connection) = self.nodes[index].connections.remove(&connection) {
                        self.reset(connection, "the peer closed the connection");
                    }
                }
                Output::Listen => self.nodes[index].listen(self.now, self.directory.of(index)),
                Output::Remember { state } => self.store(index, state),
                Output::StartCore => self.start_beside(index),
                Output::Archive(request) => {
                    let (at, life) = (self.now + self.archive.latency(), self.nodes[index].life);
                    self.queue.push(at, Event::Archived { node: index, life, request });
                }
                Output::Log(_, line) => self.note(index, &line),
                Output::Stop { error } => {
                    if let Some(error) = &error {
                        self.note(index, error);
                    }
                    stop = Some(Ended::Stopped { error });
                    break;
                }
            }
        }
        if let Some(how) = stop {
            self.end(index, how, observer)?;
        } else {
            self.flush_dirty(observer)?;
        }
        let node = &mut self.nodes[index];
        observer.on_settled(self.now, node.name(), &node.role)?;
        if node.ended.is_none() {
            node.unchecked += 1;
            // An account of thousands of peers costs more than an event.
            if node.unchecked > self.nodes.len() / EVENTS_PER_CHECK {
                self.nodes[index].unchecked = 0;
                self.nodes[index].check()?;
            }
            if let Some(at) = self.nodes[index].role.next_timeout() {
                self.set_timer(index, at);
            }
        }
        Ok(())
    }

    fn set_timer(&mut self, index: usize, at: Time) {
        let at = at.max(self.now);
        let node = &mut self.nodes[index];
        if node.timer.is_none_or(|known| known > at) {
            node.timer = Some(at);
            self.queue.push(at, Event::Timer { node: index });
        }
    }

    fn end<O: Observer<R>>(&mut self, index: usize, how: Ended, observer: &mut O) -> Result<(), String> {
        if how == Ended::Crashed {
            // Those too that were closed behind frames which wait.
            let is_its =
                |connection: &usize| self.connections[*connection].ends.iter().any(|e| e.node == index);
            let its: Vec<usize> = (0..self.connections.len()).filter(is_its).collect();
            its.into_iter().for_each(|connection| self.reset(connection, "the peer died"));
        } else {
            let names: Vec<_> = self.nodes[index].connections.keys().copied().collect();
            names.into_iter().for_each(|name| self.close(index, name));
        }
        self.flush_dirty(observer)?;
        let node = &mut self.nodes[index];
        node.connections.clear();
        node.openers.clear();
        node.postponed.clear();
        node.ended = Some(how);
        Ok(())
    }

    fn attach(&mut self, connection: usize, side: usize) {
        self.connections[connection].is_attached[side] = true;
        let End { node, name } = self.connections[connection].ends[side];
        if let Some(old) = self.nodes[node].connections.insert(name, connection) {
            self.reset(old, "the peer has connected anew");
        }
    }

    /// One end learns that its connection is gone. Says whether its role was told.
    fn lose(&mut self, connection: usize, side: usize, why: &str) -> bool {
        self.connections[connection].break_down();
        let End { node, name } = self.connections[connection].ends[side];
        let node = &mut self.nodes[node];
        if node.connections.get(&name) != Some(&connection) {
            return false;
        }
        node.connections.remove(&name);
        node.role.handle_disconnected(self.now, name, &Lost::Broken(why.to_owned()));
        true
    }

    /// Breaks a connection; both ends notice it a latency later.
    fn reset(&mut self, connection: usize, why: &str) {
        if !self.connections[connection].break_down() {
            return;
        }
        let [one, other] = self.connections[connection].ends;
        for side in 0..2 {
            let latency = self.latency(one.node, other.node);
            let event = Event::Lost { connection, side, why: why.to_owned() };
            self.queue.push(self.now + latency, event);
        }
    }

    /// Closes a connection from this end, behind the frames that wait; the other end notices after the last one.
    fn close(&mut self, index: usize, name: ConnectionId) {
        if let Some(connection) = self.nodes[index].connections.remove(&name)
            && self.connections[connection].is_open
        {
            let side = self.connections[connection].other_side(index);
            self.connections[connection].channels[side].close();
            self.dirty.push((connection, side));
        }
    }

    /// Puts a frame among those that wait. Without a connection it is dropped, as the contract of roles says.
    fn queue_frame(&mut self, index: usize, to: ConnectionId, frame: Frame, turn: Turn) {
        let Some(&connection) = self.nodes[index].connections.get(&to) else { return };
        if !self.connections[connection].is_open {
            return;
        }
        let side = self.connections[connection].other_side(index);
        self.connections[connection].channels[side].queue(frame, turn);
        if self.dirty.last() != Some(&(connection, side)) {
            self.dirty.push((connection, side));
        }
    }

    fn flush_dirty<O: Observer<R>>(&mut self, observer: &mut O) -> Result<(), String> {
        let mut dirty = std::mem::take(&mut self.dirty);
        for (connection, side) in dirty.drain(..) {
            self.flush(connection, side, observer)?;
        }
        self.dirty = dirty;
        Ok(())
    }

    /// Lets the link take the frames that there is room for.
    fn flush<O: Observer<R>>(
        &mut self,
        connection: usize,
        side: usize,
        observer: &mut O,
    ) -> Result<(), String> {
        let from = self.connections[connection].ends[1 - side].node;
        let window = self.network.config().window_bytes as usize;
        let was_congested = side == 0 && reading::is_congested(self, connection);
        while let Some(frame) = self.connections[connection].channels[side].next_frame(window) {
            self.take(from, connection, side, frame, observer)?;
        }
        let channel = &mut self.connections[connection].channels[side];
        if channel.takes_end() {
            self.launch(from, connection, side, None, Payload::empty(), Delay::default());
        } else if channel.is_waiting() {
            self.counts.waited += 1;
        } else if self.nodes[from].role.awaits_silence() {
            self.set_timer(from, self.now);
        }
        if was_congested && !reading::is_congested(self, connection) {
            reading::call_reader(self, from);
        }
        Ok(())
    }

    /// The node that sends to one side of a connection. A shard is called as the receiver calls it: its frames may leave after its core has
    /// come to be a spare one.
    fn sender(&self, connection: usize, receiver: usize) -> NodeId {
        let ends = &self.connections[connection].ends;
        let shard = ends[receiver].name.peer().filter(|peer| matches!(peer, NodeId::Shard(_)));
        shard.unwrap_or_else(|| self.nodes[ends[1 - receiver].node].name())
    }

    /// The link takes a frame: its header and its bytes are what they are now.
    fn take<O: Observer<R>>(
        &mut self,
        index: usize,
        connection: usize,
        side: usize,
        mut frame: Frame,
        observer: &mut O,
    ) -> Result<(), String> {
        let (from, role) = (self.sender(connection, side), &self.nodes[index].role);
        if matches!(frame.body, Body::Stored { .. }) {
            role.refresh(&mut frame.header);
        }
        let Frame { header, body } = frame;
        let payload = self.copies.take(index, role, body);
        let receiver = self.connections[connection].ends[side].node;
        let view = FrameView {
            now: self.now,
            from,
            to: self.nodes[receiver].name(),
            shard: self.connections[connection].shard(),
            header: &header,
            payload: payload.bytes(),
        };
        observer.on_sent(&view, role)?;
        self.counts.frames += 1;
        match self.rules.on_frame(&view) {
            None => {
                self.copies.recycle(payload);
                self.reset(connection, "the connection was reset");
            }
            Some(delay) => self.launch(index, connection, side, Some(header), payload, delay),
        }
        Ok(())
    }

    /// Puts a frame, or the end of the connection, on its way.
    fn launch(
        &mut self,
        index: usize,
        connection: usize,
        side: usize,
        header: Option<Header>,
        payload: Payload,
        delay: Delay,
    ) {
        let to = self.connections[connection].ends[side].node;
        let (from, to) = (self.nodes[index].host, self.nodes[to].host);
        let flight = Flight { connection, side, header, payload };
        let bytes = self.network.wire_bytes(flight.header.as_ref(), flight.payload.bytes().len());
        let parcel = Parcel { from, to, flow: 2 * connection + side, bytes };
        let dice = &mut self.connections[connection].channels[side].dice;
        if self.network.shares_links(&parcel) {
            let frame = self.travelling.put(flight, delay);
            if let Some((frame, passage)) = self.network.send_shared(self.now, parcel, frame, dice) {
                let (flight, delay) = self.travelling.take(frame);
                self.expect(flight, delay, passage);
            }
        } else {
            let passage = self.network.send(self.now, parcel, dice);
            self.expect(flight, delay, passage);
        }
    }

    /// It is known when a frame comes to its receiver, in turn and by all rules.
    fn expect(&mut self, flight: Flight, delay: Delay, passage: Passage) {
        let channel = &mut self.connections[flight.connection].channels[flight.side];
        let in_turn = channel.in_turn(passage.head + delay.connection);
        let head = match &flight.header {
            Some(header) => channel.hold_back(header, in_turn + delay.answer, in_turn),
            None => in_turn,
        };
        let tail = passage.tail + delay.connection + head.since(in_turn);
        self.queue.push(head, Event::Arrive { flight, tail });
    }

    /// A frame reaches the receiver's link and waits for the link, then for the node's attention.
    fn receive<O: Observer<R>>(
        &mut self,
        index: usize,
        flight: Flight,
        tail: Time,
        observer: &mut O,
    ) -> Result<(), String> {
        let source = Source { connection: flight.connection, side: flight.side };
        let connection = &mut self.connections[source.connection];
        let (from, node) = (self.nodes[connection.ends[1 - source.side].node].host, &mut self.nodes[index]);
        let bytes = self.network.wire_bytes(flight.header.as_ref(), flight.payload.bytes().len());
        let through = self.network.receive(self.now, from, node.host, tail, bytes);
        if !connection.is_open {
            self.tear(index, source, &flight);
            self.copies.recycle(flight.payload);
            return Ok(());
        }
        let at = connection.channels[source.side].receive(flight, through);
        node.reader.expect(at, source);
        let is_free = node.handling.is_zero() && node.paused_until <= self.now && node.postponed.is_empty();
        if is_free && at <= self.now && node.reader.called.is_none() {
            return reading::read(self, index, observer);
        }
        reading::call_reader(self, index);
        Ok(())
    }

    /// Some bytes of a payload were received where the role wanted them when the connection broke, which the role has not
    /// heard of yet.
    fn tear(&mut self, index: usize, source: Source, flight: &Flight) {
        let End { name, .. } = self.connections[source.connection].ends[source.side];
        let Some(header) = &flight.header else { return };
        let node = &mut self.nodes[index];
        let bytes = flight.payload.bytes();
        if bytes.is_empty() || node.connections.get(&name) != Some(&source.connection) {
            return;
        }
        let mut places = Vec::new();
        if let Some(mut destination) = node.role.landing(name, header, 1, &mut places) {
            stray(&mut destination, &places[0], &bytes[..bytes.len() / 2]);
        }
    }

    /// A role gets a frame, and those behind it that were received with it where they belong.
    fn hand_over<O: Observer<R>>(
        &mut self,
        index: usize,
        source: Source,
        header: &Header,
        payload: &[u8],
        observer: &mut O,
    ) -> Result<(), String> {
        let Source { connection, side } = source;
        let name = self.connections[connection].ends[side].name;
        let (now, from) = (self.now, self.sender(connection, side));
        let shard = self.connections[connection].shard();
        let frames = LANDING_FRAMES.min(reading::allowance(self, index, source).saturating_add(1));
        let to = self.nodes[index].name();
        let role = &mut self.nodes[index].role;
        let view = FrameView { now, from, to, shard, header, payload };
        observer.on_delivered(&view, role)?;
        let mut places = Vec::new();
        let comes_in_pieces = !payload.is_empty() && self.dice.chance(0.5);
        let asked = if comes_in_pieces { role.landing(name, header, frames, &mut places) } else { None };
        let destination = asked.and_then(|mut it| it.put(&places[0], payload).then_some(it));
        let Some(mut destination) = destination else {
            role.handle_frame(now, name, header, payload);
            return Ok(());
        };
        let channel = &mut self.connections[connection].channels[side];
        let landed = land_behind(channel, &mut self.copies, &mut destination, &places, *header);
        drop(destination);
        for header in &landed {
            self.counts.landings += 1;
            if header.part != landed[0].part {
                let view = FrameView { header, payload: &[], ..view };
                observer.on_delivered(&view, role)?;
            }
            role.handle_landed(now, name, header);
        }
        (1..landed.len()).for_each(|_| reading::use_allowance(self, index, source));
        reading::announce_room(self, connection, side);
        Ok(())
    }

    /// Time for a message from one node to another outside of their connection.
    fn latency(&mut self, from: usize, to: usize) -> Duration {
        let host = self.nodes[to].host;
        let node = &mut self.nodes[from];
        self.network.latency(node.host, host, &mut node.dice)
    }

    fn note(&mut self, index: usize, line: &str) {
        if self.log.len() == LOG_LINES {
            self.log.pop_front();
        }
        self.log.push_back(format!("{:10.6} {}: {line}", self.now.as_secs_f64(), self.nodes[index].id));
    }
}

#[cfg(test)]
mod tests;
