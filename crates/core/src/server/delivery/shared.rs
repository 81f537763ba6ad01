//! Answers to aggregators, each of which is handed to several workers.
//!
//! An aggregator gets the parameters of a dense table once, as a numbered edition; while they do not change, further
//! answers only name the edition.

use super::Strategy;
use super::pulls::PendingPull;
use super::sender::Sender;
use crate::types::{AggregatorId, Clock, NodeId};
use crate::wire::frame::Edition;
use std::collections::BTreeMap;

/// Which state of a table's parameters was sent to each aggregator last, on the connection that stands.
#[derive(Debug, Default)]
pub(super) struct Shared {
    sent: BTreeMap<(AggregatorId, usize), Sent>,
}

/// Parameters as they were when they were last sent in full.
#[derive(Debug, Clone, Copy)]
struct Sent {
    /// `None` when that is of no use any more.
    state: Option<ParameterState>,
    number: u32,
}

/// Tells two states of a table's parameters apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) struct ParameterState {
    pub(in crate::server) version: Clock,
    /// Steps that belong to no round: they change parameters without a new version.
    pub(in crate::server) steps_outside_rounds: u64,
}

impl Strategy for Shared {
    fn answer(&mut self, pull: &PendingPull, to: NodeId, sender: &mut Sender<'_>) -> bool {
        let NodeId::Aggregator(id) = to else { return false };
        if pull.rows.is_some() {
            return false;
        }
        let (key, state) = ((id, pull.table), sender.table.state());
        let last = self.sent.get(&key);
        if let Some(last) = last.filter(|last| last.state == Some(state)) {
            sender.send_same(to, &pull.into(), last.number);
            return true;
        }
        // Editions are counted on: an aggregator takes one that is behind its last for old.
        let number = last.map_or(1, |last| last.number.wrapping_add(1).max(1));
        self.sent.insert(key, Sent { state: Some(state), number });
        sender.send_chunks_from(0, to, &pull.into(), Some(Edition { number, is_same: false }));
        true
    }

    fn restart(&mut self, table: usize) {
        let of_table = self.sent.iter_mut().filter(|((_, of), _)| *of == table);
        of_table.for_each(|(_, sent)| sent.state = None);
    }

    fn forget(&mut self, receiver: NodeId) {
        if let NodeId::Aggregator(id) = receiver {
            self.sent.retain(|(of, _), _| *of != id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_aggregator_has_is_known_while_its_connection_stands() {
        let state = Some(ParameterState { version: 3, steps_outside_rounds: 0 });
        let mut shared = Shared::default();
        for (id, table) in [(0, 0), (0, 1), (1, 0)] {
            shared.sent.insert((AggregatorId(id), table), Sent { state, number: 5 });
        }
        shared.forget(NodeId::Aggregator(AggregatorId(0)));
        let known: Vec<_> = shared.sent.keys().map(|(id, table)| (id.0, *table)).collect();
        assert_eq!(known, [(1, 0)], "a new connection begins with the parameters in full");
        // Editions are counted on.
        shared.restart(0);
        let last = shared.sent[&(AggregatorId(1), 0)];
        assert_eq!((last.state, last.number), (None, 5));
    }
}
