//! How connections are made and lost.

use super::{Event, World, label};
use paramill_core::fault::Delay;
use paramill_core::prng::Prng;
use paramill_core::role::{Lost, Role};
use paramill_core::types::{NodeId, TableId, Time};
use paramill_core::wire::{Flags, Header, Hello, Kind};
use std::collections::BTreeMap;

/// One end of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    /// Whose end.
    pub(super) node: usize,
    /// What that node calls the other end.
    pub(super) peer: NodeId,
}

/// A connection between two nodes. Side 0 opened it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ends: [End; 2],
    pub(super) open: bool,
    /// When the last frame towards each side reaches that side's link; the next one comes after it.
    pub(super) arrived: [Time; 2],
    /// When the last frame towards each side is delivered; the next one comes after it.
    pub(super) delivered: [Time; 2],
    /// Answers towards each side, by table and request, that are held back and not complete: when their last frame so far
    /// arrives. What follows of them comes after it, also when the rule that held them back is gone meanwhile.
    pub(super) held_back: [BTreeMap<(TableId, u64), Time>; 2],
    /// Decide the jitter of what is sent towards each side.
    pub(super) dice: [Prng; 2],
}

impl Connection {
    /// A connection whose opener learns of it at `opened` and hears nothing before.
    pub(super) fn new(ends: [End; 2], opened: Time, dice: [Prng; 2]) -> Connection {
        Connection {
            ends,
            open: true,
            arrived: [opened; 2],
            delivered: [opened; 2],
            held_back: Default::default(),
            dice,
        }
    }

    /// When a frame towards `side` arrives that may at `at`, and would at `in_turn` if its answer were not held back.
    pub(super) fn hold_back(&mut self, side: usize, header: &Header, at: Time, in_turn: Time) -> Time {
        if header.kind != Kind::Params {
            return at;
        }
        let (answer, answers) = ((header.table, header.request), &mut self.held_back[side]);
        let at = answers.get(&answer).map_or(at, |&last| last.max(at));
        if header.flags.has(Flags::LAST) {
            answers.remove(&answer);
        } else if at > in_turn {
            answers.insert(answer, at);
        }
        at
    }

    /// The end that is not `node`'s.
    pub(super) fn other_end(&self, node: usize) -> End {
        self.ends[self.other_side(node)]
    }

    /// The side that hears what `node` sends.
    pub(super) fn other_side(&self, node: usize) -> usize {
        usize::from(self.ends[0].node == node)
    }
}

impl<R: Role> World<R> {
    pub(super) fn dial(&mut self, index: usize, peer: NodeId, address: &str) {
        let id = self.nodes[index].id;
        let target = self.by_address.get(address).copied();
        let called = target.map_or(peer, |target| self.nodes[target].id);
        let problem = self.rules.on_connect(self.now, id, called);
        let event = match (problem, target) {
            (None, Some(target)) => {
                let hello = self.nodes[index].role.hello(peer);
                Event::Dial { from: index, peer, target, hello }
            }
            (Some(why), _) => Event::Unreachable { node: index, peer, why: Lost::Broken(why) },
            (None, None) => {
                let why = Lost::Broken(format!("no node has the address `{address}`"));
                Event::Unreachable { node: index, peer, why }
            }
        };
        let latency = self.latency(index, target.unwrap_or(index));
        self.queue.push(self.now + latency, event);
    }

    /// Somebody's hello is heard and answered.
    pub(super) fn accept(&mut self, index: usize, from: usize, peer: NodeId, hello: &Hello) {
        let back = self.latency(index, from);
        // The same peer may dial again before its old connection's end was noticed here: that ends first. A worker has
        // a connection to its aggregator for each shard that it means by it.
        let is_old = |&connection: &usize| {
            let opener = self.connections[connection].ends[0];
            (opener.node, opener.peer) == (from, peer)
        };
        if let Some(old) = self.nodes[index].peers.values().copied().find(is_old) {
            let side = 1 - self.connections[old].other_side(index);
            self.reset(old, "replaced by a new connection");
            self.lose(old, side, "replaced by a new connection");
        }
        match self.nodes[index].role.accept(self.now, hello) {
            Ok(welcome) => {
                let connection = self.connections.len();
                let ends = [End { node: from, peer }, End { node: index, peer: welcome.you }];
                // Each pair has dice of its own: who else talks to whom changes nothing for them.
                let labels = [label(self.nodes[from].id), label(self.nodes[index].id)];
                let dice =
                    labels.map(|label| Prng::fork(self.seed ^ labels[0] ^ labels[1].rotate_left(32), label));
                self.connections.push(Connection::new(ends, self.now + back, dice));
                self.attach(connection, 1);
                self.queue.push(self.now + back, Event::Dialled { connection, welcome });
            }
            Err(refusal) => {
                let event = Event::Unreachable { node: from, peer, why: Lost::Refused(refusal) };
                self.queue.push(self.now + back, event);
            }
        }
    }

    pub(super) fn attach(&mut self, connection: usize, side: usize) {
        let End { node, peer } = self.connections[connection].ends[side];
        if let Some(old) = self.nodes[node].peers.insert(peer, connection) {
            self.reset(old, "the peer has connected anew");
        }
    }

    /// One end learns that its connection is gone. Says whether its role was told.
    pub(super) fn lose(&mut self, connection: usize, side: usize, why: &str) -> bool {
        self.connections[connection].open = false;
        let End { node, peer } = self.connections[connection].ends[side];
        let node = &mut self.nodes[node];
        if node.peers.get(&peer) != Some(&connection) {
            return false;
        }
        node.peers.remove(&peer);
        node.role.handle_disconnected(self.now, peer, &Lost::Broken(why.to_owned()));
        true
    }

    /// Breaks a connection; both ends notice it a latency later.
    pub(super) fn reset(&mut self, connection: usize, why: &str) {
        if !std::mem::replace(&mut self.connections[connection].open, false) {
            return;
        }
        let [one, other] = self.connections[connection].ends;
        for side in 0..2 {
            let latency = self.latency(one.node, other.node);
            let event = Event::Lost { connection, side, why: why.to_owned() };
            self.queue.push(self.now + latency, event);
        }
    }

    /// Closes a connection from this end; the other end notices after the last frame.
    pub(super) fn close(&mut self, index: usize, peer: NodeId) {
        if let Some(connection) = self.nodes[index].peers.remove(&peer)
            && self.connections[connection].open
        {
            self.launch(index, connection, None, Vec::new(), Delay::default());
        }
    }
}
