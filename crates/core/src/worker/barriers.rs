//! The barriers that a worker waits for.

use super::{Ticket, WorkerError};
use crate::limits;
use std::collections::BTreeMap;

/// Barriers that are not reached yet, by name.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    waiting: BTreeMap<String, Waiting>,
    made: u64,
}

#[derive(Debug)]
struct Waiting {
    /// Counts this worker's barriers; the coordinator takes each once.
    number: u64,
    ticket: Ticket,
}

impl Barriers {
    /// Whether this worker may come to a barrier. `is_open` says whether a ticket was not given up.
    pub(super) fn check(&self, name: &str, is_open: impl Fn(Ticket) -> bool) -> Result<(), WorkerError> {
        let order = |why: String| Err(WorkerError::Order(why));
        if name.len() > limits::MAX_NAME_BYTES {
            return order(format!("a barrier's name has at most {} bytes", limits::MAX_NAME_BYTES));
        }
        if self.waiting.get(name).is_some_and(|waiting| is_open(waiting.ticket)) {
            return order(format!("barrier `{name}` is waited for already"));
        }
        if self.waiting.len() >= limits::MAX_BARRIERS && !self.waiting.contains_key(name) {
            return order(format!("at most {} barriers can be waited for at a time", limits::MAX_BARRIERS));
        }
        Ok(())
    }

    /// Waits for a barrier under this ticket. The number to tell the coordinator; `None` when it was told: a wait was given
    /// up, and to the others this worker has been there since.
    pub(super) fn arrive(&mut self, name: &str, ticket: Ticket) -> Option<u64> {
        if let Some(waiting) = self.waiting.get_mut(name) {
            waiting.ticket = ticket;
            return None;
        }
        self.made += 1;
        self.waiting.insert(name.to_owned(), Waiting { number: self.made, ticket });
        Some(self.made)
    }

    /// All workers have come to it. The ticket that waits for it.
    pub(super) fn reached(&mut self, name: &str) -> Option<Ticket> {
        self.waiting.remove(name).map(|waiting| waiting.ticket)
    }

    /// Barriers that are not reached, in the order in which this worker came to them.
    pub(super) fn unreached(&self) -> Vec<(u64, String)> {
        let mut barriers: Vec<_> =
            self.waiting.iter().map(|(name, waiting)| (waiting.number, name.clone())).collect();
        barriers.sort_unstable();
        barriers
    }
}
