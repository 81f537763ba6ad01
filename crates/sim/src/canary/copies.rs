//! Bugs between a shard and its copy.

use super::Canary;
use super::broken::Bug;
use paramill_core::replica::Replica;
use paramill_core::role::{Lost, Output, Role};
use paramill_core::types::{ConnectionId, NodeId, Time};
use paramill_core::wire::{Change, Control, Header, Kind, control};
use std::collections::VecDeque;

/// A bug of a data core that serves a shard with a copy, or keeps one.
#[derive(Debug)]
pub struct CopyBug {
    canary: Canary,
    /// Entries of the log that are sent later, several at once.
    kept: VecDeque<Output>,
    due: VecDeque<Output>,
}

/// So many entries are kept before they are sent.
const KEPT: usize = 8;

impl CopyBug {
    /// A bug that has not done anything yet.
    pub fn new(canary: Canary) -> CopyBug {
        CopyBug { canary, kept: VecDeque::new(), due: VecDeque::new() }
    }

    /// Whether this is the bug, and a shard is served here.
    fn is_stubborn(&self, replica: &Replica) -> bool {
        self.canary == Canary::Stubborn && replica.shard().is_some_and(|shard| shard.epoch() > 0)
    }
}

/// Whether a message from the coordinator gives the shard that is served here to another process.
fn is_taken_away(replica: &Replica, payload: &[u8]) -> bool {
    let (own, id) = (replica.process(), replica.shard().and_then(|shard| shard.id()));
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

impl Bug<Replica> for CopyBug {
    fn handle_disconnected(
        &mut self,
        replica: &mut Replica,
        now: Time,
        connection: ConnectionId,
        why: &Lost,
    ) {
        if self.is_stubborn(replica) && matches!(connection, ConnectionId::Node(NodeId::Spare(_))) {
            return;
        }
        replica.handle_disconnected(now, connection, why);
    }

    fn handle_frame(
        &mut self,
        replica: &mut Replica,
        now: Time,
        connection: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) {
        let is_order = connection == NodeId::Coordinator.into() && header.kind == Kind::Control;
        if is_order && self.is_stubborn(replica) && is_taken_away(replica, payload) {
            return;
        }
        replica.handle_frame(now, connection, header, payload);
    }

    fn poll_output(&mut self, replica: &mut Replica, now: Time) -> Option<Output> {
        while self.due.is_empty() {
            let output = replica.poll_output()?;
            let Output::Send { to: to @ ConnectionId::Node(NodeId::Spare(_)), frame, .. } = &output else {
                return Some(output);
            };
            if frame.header.kind != Kind::Entry || replica.shard().is_none() {
                return Some(output);
            }
            // The copy is taken to have what has only been sent to it.
            let header = Header { request: frame.header.request + 1, ..Header::new(Kind::Entry) };
            replica.handle_frame(now, *to, &header, &[]);
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
}
