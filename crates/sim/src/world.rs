//! Roles in virtual time: a clock, a queue of events, connections between nodes.
//!
//! A connection delivers frames in order until it breaks. When it breaks, everything under way on it is lost and
//! both ends are told. After every event the outputs of the role concerned are carried out, as any driver does.

mod connections;
mod traffic;

use crate::network::{HostId, Network, NetworkConfig};
use crate::queue::Queue;
use crate::rule::{FrameView, RuleSet};
use connections::Connection;
use paramill_core::prng::Prng;
use paramill_core::role::{Lost, Output, Role};
use paramill_core::types::{NodeId, Time};
use paramill_core::wire::{Header, Hello, Welcome};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Watches a world. No method is required. An error ends the run with its sentence.
pub trait Observer<R> {
    /// A frame is sent; `role` is the sender.
    fn on_sent(&mut self, frame: &FrameView<'_>, role: &R) -> Result<(), String> {
        let _ = (frame, role);
        Ok(())
    }

    /// A frame is about to be handled; `role` is the receiver, as it was before.
    fn on_delivered(&mut self, frame: &FrameView<'_>, role: &R) -> Result<(), String> {
        let _ = (frame, role);
        Ok(())
    }

    /// A node has handled an event and its outputs are carried out.
    fn on_settled(&mut self, now: Time, node: NodeId, role: &R) -> Result<(), String> {
        let _ = (now, node, role);
        Ok(())
    }
}

/// Watches nothing.
#[derive(Debug, Clone, Copy)]
pub struct Unobserved;

impl<R> Observer<R> for Unobserved {}

/// Why a run ended before its time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} (at {:.6} s of virtual time)", at.as_secs_f64())]
pub struct Violation {
    /// When.
    pub at: Time,
    /// What an observer found.
    pub what: String,
}

/// Nodes, their connections, the network between them, and what will happen.
#[derive(Debug)]
pub struct World<R> {
    now: Time,
    queue: Queue<Event>,
    nodes: Vec<Node<R>>,
    by_id: BTreeMap<NodeId, usize>,
    by_address: BTreeMap<String, usize>,
    connections: Vec<Connection>,
    network: Network,
    seed: u64,
    rules: RuleSet,
    spare: Vec<Vec<u8>>,
    log: VecDeque<String>,
    events: u64,
    frames: u64,
}

#[derive(Debug)]
struct Node<R> {
    id: NodeId,
    host: HostId,
    role: R,
    /// Decides the jitter of what it sends outside of connections.
    dice: Prng,
    peers: BTreeMap<NodeId, usize>,
    timer: Option<Time>,
    /// Time that each frame occupies the node.
    handling: Duration,
    busy_until: Time,
    paused_until: Time,
    held: VecDeque<Event>,
    ended: Option<Ended>,
}

/// How a node's life ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// By its own word.
    Stopped {
        /// Why it failed, if it did.
        error: Option<String>,
    },
    /// By a fault.
    Crashed,
}

#[derive(Debug)]
enum Event {
    /// A connection is asked for at its target.
    Dial { from: usize, peer: NodeId, target: usize, hello: Hello },
    /// The answer to a dial is back.
    Dialled { connection: usize, welcome: Welcome },
    /// A connection could not be made.
    Unreachable { node: usize, peer: NodeId, why: Lost },
    /// The first byte of a frame is at its receiver's link.
    Arrive { flight: Flight, tail: Time },
    /// A frame is through.
    Deliver(Flight),
    /// A broken connection is noticed at one of its ends.
    Lost { connection: usize, side: usize, why: String },
    /// A role's timeout.
    Timer { node: usize },
    /// A fault.
    Pause { node: usize, length: Duration },
    /// The end of a pause.
    Resume { node: usize },
    /// A fault.
    Crash { node: usize },
}

#[derive(Debug)]
struct Flight {
    connection: usize,
    /// The end that receives.
    side: usize,
    /// Nothing: the sender has closed the connection.
    header: Option<Header>,
    payload: Vec<u8>,
}

/// Lines of the log that are kept.
const LOG_LINES: usize = 200;
/// Buffers that are kept for frames to come.
const SPARE_BUFFERS: usize = 1024;
/// Events at one instant after which the world is declared stuck in a loop.
const EVENTS_AT_ONE_TIME: u32 = 10_000_000;

impl<R: Role> World<R> {
    /// An empty world.
    pub fn new(config: NetworkConfig, seed: u64) -> World<R> {
        World {
            now: Time::ZERO,
            queue: Queue::new(),
            nodes: Vec::new(),
            by_id: BTreeMap::new(),
            by_address: BTreeMap::new(),
            connections: Vec::new(),
            network: Network::new(config),
            seed,
            rules: RuleSet::default(),
            spare: Vec::new(),
            log: VecDeque::new(),
            events: 0,
            frames: 0,
        }
    }

    /// Adds a node. Others reach it at `address`; `handling` is the time each frame occupies it.
    pub fn add(&mut self, id: NodeId, address: &str, host: HostId, handling: Duration, role: R) {
        let index = self.nodes.len();
        self.by_id.insert(id, index);
        self.by_address.insert(address.to_owned(), index);
        self.nodes.push(Node {
            id,
            host,
            role,
            dice: Prng::fork(self.seed, label(id)),
            peers: BTreeMap::new(),
            timer: None,
            handling,
            busy_until: Time::ZERO,
            paused_until: Time::ZERO,
            held: VecDeque::new(),
            ended: None,
        });
        // A role may have something to say before anything happened to it.
        self.set_timer(index, self.now);
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Frames sent so far.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// The last lines that nodes logged, oldest first.
    pub fn log(&self) -> impl Iterator<Item = &str> {
        self.log.iter().map(String::as_str)
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

    /// Calls into a role from outside, as an application does, and carries out what it says.
    pub fn with_role<T>(&mut self, id: NodeId, call: impl FnOnce(Time, &mut R) -> T) -> Option<T> {
        let index = *self.by_id.get(&id)?;
        let answer = call(self.now, &mut self.nodes[index].role);
        // The outputs are carried out as an event of their own, so that observers see them.
        self.set_timer(index, self.now);
        Some(answer)
    }

    /// How a node ended; `None` while it lives.
    pub fn ended(&self, id: NodeId) -> Option<&Ended> {
        self.by_id.get(&id).and_then(|&index| self.nodes[index].ended.as_ref())
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

    /// Each frame takes `factor` times as long on this node as before.
    pub fn slow_down(&mut self, id: NodeId, factor: f64) {
        if let Some(&node) = self.by_id.get(&id) {
            self.nodes[node].handling = self.nodes[node].handling.mul_f64(factor);
        }
    }

    /// Breaks every connection of a node now.
    pub fn reset_connections(&mut self, id: NodeId, why: &str) {
        if let Some(&node) = self.by_id.get(&id) {
            for connection in self.nodes[node].peers.values().copied().collect::<Vec<_>>() {
                self.reset(connection, why);
            }
        }
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
        while let Some(at) = self.queue.next_time().filter(|&at| at <= until) {
            at_one_time = if at > self.now { 0 } else { at_one_time + 1 };
            if at_one_time > EVENTS_AT_ONE_TIME {
                let what = format!(
                    "{EVENTS_AT_ONE_TIME} events and no time passed; the last: {:?}",
                    self.queue.pop()
                );
                return Err(Violation { at, what });
            }
            self.step(observer).map_err(|what| Violation { at: self.now, what })?;
            if done(self) {
                return Ok(true);
            }
        }
        self.now = self.now.max(until);
        Ok(false)
    }

    fn step<O: Observer<R>>(&mut self, observer: &mut O) -> Result<(), String> {
        let Some((at, event)) = self.queue.pop() else { return Ok(()) };
        self.now = self.now.max(at);
        self.events += 1;
        let Some(index) = self.concerned(&event) else { return Ok(()) };
        let node = &mut self.nodes[index];
        if node.ended.is_some() {
            self.discard(event);
            return Ok(());
        }
        let is_fault = matches!(event, Event::Pause { .. } | Event::Resume { .. } | Event::Crash { .. });
        let waits = node.paused_until > self.now || !node.held.is_empty();
        if waits && !is_fault && !matches!(event, Event::Arrive { .. }) {
            node.held.push_back(event);
            return Ok(());
        }
        if self.happen(index, event, observer)? {
            self.settle(index, observer)?;
        }
        Ok(())
    }

    /// The node to which an event happens; `None` when the event has no more meaning.
    fn concerned(&self, event: &Event) -> Option<usize> {
        let end = |connection: usize, side: usize| self.connections[connection].ends[side].node;
        Some(match *event {
            Event::Dial { target, .. } => target,
            Event::Dialled { connection, .. } => end(connection, 0),
            Event::Arrive { ref flight, .. } => end(flight.connection, flight.side),
            Event::Deliver(ref flight) => end(flight.connection, flight.side),
            Event::Lost { connection, side, .. } => end(connection, side),
            Event::Unreachable { node, .. }
            | Event::Timer { node }
            | Event::Pause { node, .. }
            | Event::Resume { node }
            | Event::Crash { node } => node,
        })
    }

    /// A dead node hears nothing; who calls it is told.
    fn discard(&mut self, event: Event) {
        match event {
            Event::Dial { from, peer, target, .. } => {
                let latency = self.latency(target, from);
                let why = Lost::Broken("the connection was refused: nobody is there".into());
                self.queue.push(self.now + latency, Event::Unreachable { node: from, peer, why });
            }
            Event::Arrive { flight, .. } | Event::Deliver(flight) => self.recycle(flight.payload),
            _ => {}
        }
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
                self.receive(index, flight, tail);
                return Ok(false);
            }
            Event::Deliver(flight) => return self.deliver(index, flight, observer),
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
            Event::Dial { from, peer, hello, .. } => self.accept(index, from, peer, &hello),
            Event::Dialled { connection, welcome } => {
                let end = self.connections[connection].ends[0];
                if !self.connections[connection].open {
                    let why = Lost::Broken("the connection broke while it was made".into());
                    self.nodes[index].role.handle_disconnected(now, end.peer, &why);
                } else {
                    self.attach(connection, 0);
                    self.nodes[index].role.handle_connected(now, end.peer, &welcome);
                }
            }
            Event::Unreachable { peer, why, .. } => {
                self.nodes[index].role.handle_disconnected(now, peer, &why);
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
                    && let Some(event) = self.nodes[index].held.pop_front()
                {
                    if self.happen(index, event, observer)? {
                        self.settle(index, observer)?;
                    }
                }
                return Ok(false);
            }
            Event::Crash { .. } => {
                self.end(index, Ended::Crashed);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Carries out everything that a role says.
    fn settle<O: Observer<R>>(&mut self, index: usize, observer: &mut O) -> Result<(), String> {
        while let Some(output) = self.nodes[index].role.poll_output() {
            match output {
                Output::Send { to, frame } => {
                    let mut payload = self.spare.pop().unwrap_or_default();
                    payload.extend_from_slice(self.nodes[index].role.payload(&frame.body));
                    self.send(index, to, frame.header, payload, observer)?;
                }
                Output::Connect { peer, address } => self.dial(index, peer, &address),
                Output::Disconnect { peer } => self.close(index, peer),
                Output::Log(line) => self.note(index, &line),
                Output::Stop { error } => {
                    if let Some(error) = &error {
                        self.note(index, error);
                    }
                    self.end(index, Ended::Stopped { error });
                    break;
                }
            }
        }
        let node = &mut self.nodes[index];
        observer.on_settled(self.now, node.id, &node.role)?;
        if node.ended.is_none()
            && let Some(at) = node.role.next_timeout()
        {
            self.set_timer(index, at);
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

    fn end(&mut self, index: usize, how: Ended) {
        let peers = self.nodes[index].peers.keys().copied().collect::<Vec<_>>();
        for peer in peers {
            if how == Ended::Crashed {
                self.reset(self.nodes[index].peers[&peer], "the peer died");
            } else {
                self.close(index, peer);
            }
        }
        let node = &mut self.nodes[index];
        node.peers.clear();
        node.held.clear();
        node.ended = Some(how);
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

/// A number for a node, so that its dice do not depend on anybody else's.
fn label(id: NodeId) -> u64 {
    match id {
        NodeId::Coordinator => 1,
        NodeId::Admin(number) => 2 << 40 | u64::from(number),
        NodeId::Worker(worker) => 3 << 40 | u64::from(worker.0),
        NodeId::Shard(shard) => 4 << 40 | u64::from(shard.server.0) << 16 | u64::from(shard.core),
        NodeId::Aggregator(aggregator) => 5 << 40 | u64::from(aggregator.0),
        // The name of a connection, not of a node.
        NodeId::Through(worker, _) => label(NodeId::Worker(worker)),
    }
}

#[cfg(test)]
mod tests;
