//! The barriers that a worker waits for.

use super::{Ticket, WorkerError};
use crate::limits;
use crate::types::Clock;
use std::collections::BTreeMap;

/// Barriers that are not reached yet, by name.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    waiting: BTreeMap<String, Waiting>,
    made: u64,
    /// Numbers above this one have not been told to the coordinator.
    told: u64,
}

#[derive(Debug)]
struct Waiting {
    /// Counts this worker's barriers; the coordinator takes each once.
    number: u64,
    ticket: Ticket,
}

/// The iteration before which the coordinator was told that this worker pushes nothing.
#[derive(Debug, Default)]
pub(super) struct Said {
    /// `None` as long as nothing was said.
    until: Option<Clock>,
    /// The coordinator may have missed it.
    is_unheard: bool,
}

impl Said {
    /// Whether this is to be said; it counts as said then. 0 is what the coordinator believes of itself.
    pub(super) fn is_news(&mut self, until: Clock) -> bool {
        let is_news = self.until.unwrap_or(0) != until || std::mem::take(&mut self.is_unheard);
        if is_news {
            self.until = Some(until);
        }
        is_news
    }

    /// The coordinator may have missed what was said.
    pub(super) fn say_again(&mut self) {
        self.is_unheard = self.until.is_some();
    }
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

    /// The ticket is due when all workers have arrived at the barrier. After a wait that was given up, this worker still counts as
    /// arrived there, and is not told to the coordinator again.
    pub(super) fn arrive(&mut self, name: &str, ticket: Ticket) {
        if let Some(waiting) = self.waiting.get_mut(name) {
            waiting.ticket = ticket;
            return;
        }
        self.made += 1;
        self.waiting.insert(name.to_owned(), Waiting { number: self.made, ticket });
    }

    /// All workers have come to it. The ticket that waits for it.
    pub(super) fn reached(&mut self, name: &str) -> Option<Ticket> {
        self.waiting.remove(name).map(|waiting| waiting.ticket)
    }

    /// Whether the coordinator is to be told of some.
    pub(super) fn has_untold(&self) -> bool {
        self.told < self.made
    }

    /// The coordinator may have missed what it was told.
    pub(super) fn tell_again(&mut self) {
        self.told = 0;
    }

    /// Barriers to tell the coordinator of, in the order in which this worker came to them.
    pub(super) fn take_untold(&mut self) -> Vec<(u64, String)> {
        let untold = self.waiting.iter().filter(|(_, waiting)| waiting.number > self.told);
        let mut barriers: Vec<_> = untold.map(|(name, waiting)| (waiting.number, name.clone())).collect();
        barriers.sort_unstable();
        self.told = self.made;
        barriers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_is_told_once_and_its_last_ticket_is_due() {
        let mut barriers = Barriers::default();
        assert!(!barriers.has_untold());
        barriers.arrive("b", Ticket(1));
        assert_eq!(barriers.take_untold(), [(1, "b".to_owned())]);
        barriers.arrive("a", Ticket(2));
        assert!(barriers.check("b", |_| true).is_err(), "somebody waits for it");
        assert_eq!(barriers.check("b", |_| false), Ok(()), "that wait was given up");
        barriers.arrive("b", Ticket(3));
        assert_eq!((barriers.take_untold(), barriers.has_untold()), (vec![(2, "a".to_owned())], false));
        barriers.tell_again();
        assert_eq!(barriers.take_untold(), [(1, "b".to_owned()), (2, "a".to_owned())]);
        assert_eq!((barriers.reached("b"), barriers.reached("b")), (Some(Ticket(3)), None));
        barriers.arrive("b", Ticket(4));
        assert_eq!(barriers.take_untold(), [(3, "b".to_owned())]);
    }

    #[test]
    fn what_was_said_of_pushes_is_said_again_after_a_broken_connection() {
        let mut said = Said::default();
        said.say_again();
        assert!(!said.is_news(0), "nothing was ever said");
        assert!(said.is_news(Clock::MAX) && !said.is_news(Clock::MAX) && said.is_news(0));
        said.say_again();
        assert!(said.is_news(0) && !said.is_news(0));
    }

    #[test]
    fn names_and_their_number_have_a_limit() {
        let mut barriers = Barriers::default();
        let longest = "n".repeat(limits::MAX_NAME_BYTES);
        assert_eq!(barriers.check(&longest, |_| true), Ok(()));
        assert!(barriers.check(&format!("{longest}n"), |_| true).is_err());
        for number in 0..limits::MAX_BARRIERS {
            assert_eq!(barriers.check(&number.to_string(), |_| true), Ok(()));
            barriers.arrive(&number.to_string(), Ticket(0));
        }
        assert!(barriers.check("more", |_| true).is_err());
        assert_eq!(barriers.check("0", |_| false), Ok(()), "it takes no further place");
    }
}
