//! Partial pulling (PSP-SGD, Algorithm 1, worker): go on `tau2` after the fraction `b` of the blocks arrived.
//!
//! A block is one table's part on one shard. Blocks of all dense tables under `psp` count together.

use super::local_table::LocalTable;
use crate::types::{Clock, Time};
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct PullGate {
    blocks: usize,
    needed: usize,
    tau2: Duration,
    /// Blocks are counted for the iteration after this many.
    clock: Clock,
    arrived: usize,
    enough_since: Option<Time>,
    open: bool,
}

impl PullGate {
    /// Counts the blocks of the tables that are pulled partially, under the strictest of their settings. Rows are no
    /// blocks, and what is lent arrives by exchanges, which wait for all of it.
    pub(super) fn set_blocks(&mut self, tables: &[LocalTable]) {
        let arrives_in_blocks = |table: &&LocalTable| !table.spec.rows && !table.lent;
        let partial = || {
            let tables = tables.iter().filter(arrives_in_blocks);
            tables.filter_map(|table| Some((table, table.partial.as_ref()?)))
        };
        self.blocks = partial().map(|(table, _)| table.shards().len()).sum();
        let fraction = partial().map(|(_, partial)| partial.fraction).fold(0.0, f64::max);
        // The small margin keeps 0.9 of 10 blocks at 9 although 0.9 * 10.0 may round above it.
        self.needed = (fraction * self.blocks as f64 - 1e-9).ceil() as usize;
        self.tau2 = partial().map(|(_, partial)| partial.tau2).max().unwrap_or_default();
    }

    pub(super) fn clock(&self) -> Clock {
        self.clock
    }

    /// A new iteration begins: nothing has arrived for it.
    pub(super) fn turn(&mut self, clock: Clock) {
        if clock > self.clock {
            self.clock = clock;
            self.arrived = 0;
            self.enough_since = None;
            self.open = false;
        }
    }

    /// A block for the iteration after `clock` arrived. Answers may come before the application turns its clock.
    pub(super) fn arrived(&mut self, now: Time, clock: Clock) {
        self.turn(clock);
        self.arrived += 1;
        if self.arrived >= self.needed {
            self.enough_since.get_or_insert(now);
        }
        self.handle_timeout(now);
    }

    /// Opens once all blocks arrived, or `tau2` after enough of them did.
    pub(super) fn handle_timeout(&mut self, now: Time) {
        let waited = self.enough_since.is_some_and(|since| now >= since + self.tau2);
        self.open |= self.arrived >= self.blocks || waited;
    }

    /// Whether a pull after `clock` need not wait for its missing blocks.
    pub(super) fn is_open(&self, clock: Clock) -> bool {
        clock < self.clock || (clock == self.clock && self.open)
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        if self.open { None } else { self.enough_since.map(|since| since + self.tau2) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10 blocks of which 9 are enough, then 20 ms.
    fn gate() -> PullGate {
        PullGate { blocks: 10, needed: 9, tau2: Duration::from_millis(20), clock: 1, ..PullGate::default() }
    }

    fn at(milliseconds: u64) -> Time {
        Time(milliseconds * 1_000_000)
    }

    #[test]
    fn tau2_runs_from_the_block_that_made_it_enough() {
        let mut gate = gate();
        (0..8).for_each(|_| gate.arrived(at(5), 1));
        assert_eq!((gate.is_open(1), gate.next_timeout()), (false, None));
        gate.arrived(at(10), 1);
        assert_eq!((gate.is_open(1), gate.next_timeout()), (false, Some(at(30))));
        gate.handle_timeout(Time(at(30).0 - 1));
        assert!(!gate.is_open(1), "just before the boundary");
        gate.handle_timeout(at(30));
        assert_eq!((gate.is_open(1), gate.next_timeout()), (true, None), "at the boundary");
    }

    #[test]
    fn all_blocks_open_it_at_once() {
        let mut gate = gate();
        (0..10).for_each(|_| gate.arrived(at(5), 1));
        assert_eq!((gate.is_open(1), gate.next_timeout()), (true, None));
    }

    #[test]
    fn without_tau2_enough_is_enough() {
        let mut gate = PullGate { tau2: Duration::ZERO, ..gate() };
        (0..9).for_each(|_| gate.arrived(at(5), 1));
        assert!(gate.is_open(1));
    }

    #[test]
    fn an_iteration_that_is_over_is_open_and_the_next_one_counts_anew() {
        let mut gate = gate();
        (0..9).for_each(|_| gate.arrived(at(5), 1));
        gate.turn(2);
        assert!(gate.is_open(1) && !gate.is_open(2));
        assert_eq!(gate.next_timeout(), None);
        // An answer may come before the application turns its clock.
        gate.arrived(at(6), 3);
        assert!(gate.is_open(2) && !gate.is_open(3));
    }
}
