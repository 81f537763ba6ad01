//! Whose frames a node reads next, as the real driver decides it: in turns, and those who are far ahead of another wait.

use paramill_core::limits::LONGEST_LEAD;
use paramill_core::types::Time;
use std::collections::VecDeque;

/// One end of a connection that brings frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) connection: usize,
    pub(super) side: usize,
}

/// What a node will read.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// Frames that are being received, in the order in which they will be whole.
    incoming: VecDeque<(Time, Source)>,
    /// Connections that have something, oldest first.
    readable: VecDeque<Source>,
    /// Those whose turn it is.
    turn: VecDeque<Source>,
    /// When the node will look at what there is to read.
    pub(super) called: Option<Time>,
}

impl Reader {
    /// A frame will be whole at `at`.
    pub(super) fn expect(&mut self, at: Time, source: Source) {
        let behind = self.incoming.iter().rev().take_while(|(other, _)| *other > at).count();
        self.incoming.insert(self.incoming.len() - behind, (at, source));
    }

    /// The next frame that is whole by now.
    pub(super) fn pop_received(&mut self, now: Time) -> Option<Source> {
        let is_here = self.incoming.front().is_some_and(|(at, _)| *at <= now);
        if is_here { self.incoming.pop_front().map(|(_, source)| source) } else { None }
    }

    /// When the next frame is whole.
    pub(super) fn next_received(&self) -> Option<Time> {
        self.incoming.front().map(|(at, _)| *at)
    }

    /// A connection has something to read and was not listed.
    pub(super) fn list(&mut self, source: Source) {
        self.readable.push_back(source);
    }

    /// The connection to read from, which is not listed any more. `is_open` says whether a connection may be read from;
    /// one that may not stays listed. `progress` says how far a peer's work is.
    pub(super) fn next(
        &mut self,
        is_open: impl Fn(Source) -> bool,
        progress: impl Fn(Source) -> Option<u64>,
    ) -> Option<Source> {
        loop {
            match self.turn.pop_front() {
                Some(source) if is_open(source) => return Some(source),
                Some(source) => self.readable.push_back(source),
                None => {
                    self.begin_turn(&is_open, &progress);
                    if self.turn.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    fn begin_turn(&mut self, is_open: impl Fn(Source) -> bool, progress: impl Fn(Source) -> Option<u64>) {
        let may_differ = self.readable.len() > 1;
        let open = || self.readable.iter().copied().filter(|source| is_open(*source));
        let behind = if may_differ { open().filter_map(&progress).min() } else { None };
        let is_next = |source: Source| {
            let is_far_ahead = match behind {
                Some(least) => progress(source).is_some_and(|at| at > least.saturating_add(LONGEST_LEAD)),
                None => false,
            };
            is_open(source) && !is_far_ahead
        };
        let listed = std::mem::take(&mut self.readable);
        for source in listed {
            if is_next(source) { self.turn.push_back(source) } else { self.readable.push_back(source) }
        }
    }

    /// Whether something is listed.
    pub(super) fn has_listed(&self) -> bool {
        !self.turn.is_empty() || !self.readable.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(connection: usize) -> Source {
        Source { connection, side: 0 }
    }

    #[test]
    fn peers_that_are_far_ahead_wait_for_those_behind() {
        let mut reader = Reader::default();
        (0..4).for_each(|connection| reader.list(source(connection)));
        let progress = |at: Source| match at.connection {
            0 => Some(LONGEST_LEAD + 2),
            1 => Some(1),
            2 => None,
            _ => Some(LONGEST_LEAD + 1),
        };
        let order: Vec<_> =
            std::iter::from_fn(|| reader.next(|_| true, progress)).map(|s| s.connection).collect();
        assert_eq!(order, [1, 2, 3, 0]);
    }

    #[test]
    fn a_connection_that_may_not_be_read_stays_listed() {
        let mut reader = Reader::default();
        (0..2).for_each(|connection| reader.list(source(connection)));
        assert_eq!(reader.next(|s| s.connection == 1, |_| None), Some(source(1)));
        assert_eq!(reader.next(|s| s.connection == 1, |_| None), None);
        assert!(reader.has_listed());
        assert_eq!(reader.next(|_| true, |_| None), Some(source(0)));
        assert!(!reader.has_listed());
    }

    #[test]
    fn frames_are_received_in_the_order_of_their_times() {
        let mut reader = Reader::default();
        for (at, connection) in [(5, 0), (3, 1), (5, 2), (4, 3)] {
            reader.expect(Time(at), source(connection));
        }
        assert_eq!(reader.next_received(), Some(Time(3)));
        let received: Vec<_> =
            std::iter::from_fn(|| reader.pop_received(Time(5))).map(|s| s.connection).collect();
        assert_eq!(received, [1, 3, 0, 2]);
    }
}
