//! Data cores whose bug is between a shard and its copy.

use super::Canary;
use paramill_core::checkpoint::Response;
use paramill_core::landing::{Destination, Landing};
use paramill_core::replica::Replica;
use paramill_core::role::{Body, Lost, Output, Role};
use paramill_core::types::{ConnectionId, NodeId, Time};
use paramill_core::wire::{Change, Control, Header, Hello, Kind, Refusal, Welcome, control};
use std::collections::VecDeque;

/// A data core with a bug.
#[derive(Debug)]
pub struct BrokenReplica {
    replica: Replica,
    canary: Canary,
    /// When something happened last.
    now: Time,
    /// Entries of the log that are sent later, several at once.
    kept: VecDeque<Output>,
    due: VecDeque<Output>,
}

/// So many entries are kept before they are sent.
const KEPT: usize = 8;

impl BrokenReplica {
    /// Plants a bug in a data core.
    pub fn new(replica: Replica, canary: Canary) -> BrokenReplica {
        BrokenReplica { replica, canary, now: Time::ZERO, kept: VecDeque::new(), due: VecDeque::new() }
    }

    /// The data core inside.
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Whether a message from the coordinator gives the shard that is served here to another process.
    fn is_taken_away(&self, payload: &[u8]) -> bool {
        let (own, id) = (self.replica.process(), self.replica.shard().and_then(|shard| shard.id()));
        match control::decode("control message", payload) {
            Ok(Control::Change { change: Change::Served { shard, process, .. }, .. }) => {
                Some(shard) == id && process != own
            }
            Ok(Control::Plan(plan)) => {
                id.and_then(|id| plan.served(id)).is_some_and(|served| served.process != own)
            }
            _ => false,
        }
    }

    /// Whether this is the bug, and a shard is served here.
    fn is_stubborn(&self) -> bool {
        self.canary == Canary::Stubborn && self.replica.shard().is_some_and(|shard| shard.epoch() > 0)
    }
}

impl Role for BrokenReplica {
    fn node(&self) -> Option<NodeId> {
        self.replica.node()
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        self.replica.accept(now, hello)
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        self.replica.hello(connection)
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        self.now = now;
        self.replica.handle_connected(now, connection, welcome);
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        self.now = now;
        if self.is_stubborn() && matches!(connection, ConnectionId::Node(NodeId::Spare(_))) {
            return;
        }
        self.replica.handle_disconnected(now, connection, why);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        self.now = now;
        let is_order = connection == NodeId::Coordinator.into() && header.kind == Kind::Control;
        if is_order && self.is_stubborn() && self.is_taken_away(payload) {
            return;
        }
        self.replica.handle_frame(now, connection, header, payload);
    }

    fn landing(
        &mut self,
        connection: ConnectionId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        self.replica.landing(connection, header, frames, places)
    }

    fn handle_landed(&mut self, now: Time, connection: ConnectionId, header: &Header) {
        self.replica.handle_landed(now, connection, header);
    }

    fn progress(&self, connection: ConnectionId) -> Option<u64> {
        self.replica.progress(connection)
    }

    fn handle_archived(&mut self, now: Time, response: Response) {
        self.replica.handle_archived(now, response);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.now = now;
        self.replica.handle_timeout(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        self.replica.next_timeout()
    }

    fn poll_output(&mut self) -> Option<Output> {
        while self.due.is_empty() {
            let output = self.replica.poll_output()?;
            let Output::Send { to: to @ ConnectionId::Node(NodeId::Spare(_)), frame, .. } = &output else {
                return Some(output);
            };
            if frame.header.kind != Kind::Entry || self.replica.shard().is_none() {
                return Some(output);
            }
            // The copy is taken to have what has only been sent to it.
            let header = Header { request: frame.header.request + 1, ..Header::new(Kind::Entry) };
            self.replica.handle_frame(self.now, *to, &header, &[]);
            if self.canary != Canary::Ungated {
                return Some(output);
            }
            self.kept.push_back(output);
            if self.kept.len() >= KEPT {
                self.due.append(&mut self.kept);
            }
        }
        self.due.pop_front()
    }

    fn awaits_silence(&self) -> bool {
        self.replica.awaits_silence()
    }

    fn handle_silence(&mut self, now: Time) {
        self.now = now;
        self.replica.handle_silence(now);
    }

    fn refresh(&self, header: &mut Header) {
        self.replica.refresh(header);
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        self.replica.payload(body)
    }

    fn backlog_bytes(&self) -> usize {
        self.replica.backlog_bytes()
    }

    fn check(&self) -> Result<(), String> {
        self.replica.check()
    }
}
