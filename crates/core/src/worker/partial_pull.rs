//! Partial pulling (PSP-SGD, Algorithm 1, worker): go on `tau2` after the fraction `b` of the blocks arrived.
//!
//! A block is one table's part on one shard. Blocks of all dense tables under `psp` count together.

use crate::consistency::PartialPull;
use crate::types::{Clock, Time};
use std::time::Duration;

/// When a worker may go on although blocks are missing.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PartialPulls {
    blocks: usize,
    needed: usize,
    tau2: Duration,
    /// Blocks are counted for the iteration after so many.
    clock: Clock,
    arrived: usize,
    enough_since: Option<Time>,
    open: bool,
}

impl PartialPulls {
    /// Counts the blocks of the tables that are pulled partially, each with its number of blocks, under the strictest of
    /// their settings.
    pub(super) fn set_blocks(&mut self, tables: impl Iterator<Item = (usize, PartialPull)>) {
        *self = PartialPulls { blocks: 0, needed: 0, tau2: Duration::ZERO, ..*self };
        let mut strictest = 0.0;
        for (blocks, PartialPull { fraction, tau2 }) in tables {
            self.blocks += blocks;
            self.tau2 = self.tau2.max(tau2);
            strictest = f64::max(strictest, fraction);
        }
        // The small margin keeps 0.9 of 10 blocks at 9 although 0.9 * 10.0 may round above it.
        self.needed = (strictest * self.blocks as f64 - 1e-9).ceil() as usize;
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
    fn pulls() -> PartialPulls {
        PartialPulls {
            blocks: 10,
            needed: 9,
            tau2: Duration::from_millis(20),
            clock: 1,
            ..PartialPulls::default()
        }
    }

    fn at(milliseconds: u64) -> Time {
        Time(milliseconds * 1_000_000)
    }

    #[test]
    fn tau2_runs_from_the_block_that_made_it_enough() {
        let mut pulls = pulls();
        (0..8).for_each(|_| pulls.arrived(at(5), 1));
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (false, None));
        pulls.arrived(at(10), 1);
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (false, Some(at(30))));
        pulls.handle_timeout(Time(at(30).0 - 1));
        assert!(!pulls.is_open(1), "just before the boundary");
        pulls.handle_timeout(at(30));
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (true, None), "at the boundary");
    }

    #[test]
    fn all_blocks_open_it_at_once() {
        let mut pulls = pulls();
        (0..10).for_each(|_| pulls.arrived(at(5), 1));
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (true, None));
    }

    #[test]
    fn without_tau2_enough_is_enough() {
        let mut pulls = PartialPulls { tau2: Duration::ZERO, ..pulls() };
        (0..9).for_each(|_| pulls.arrived(at(5), 1));
        assert!(pulls.is_open(1));
    }

    #[test]
    fn an_iteration_that_is_over_is_open_and_the_next_one_counts_anew() {
        let mut pulls = pulls();
        (0..9).for_each(|_| pulls.arrived(at(5), 1));
        pulls.turn(2);
        assert!(pulls.is_open(1) && !pulls.is_open(2));
        assert_eq!(pulls.next_timeout(), None);
        // An answer may come before the application turns its clock.
        pulls.arrived(at(6), 3);
        assert!(pulls.is_open(2) && !pulls.is_open(3));
    }
}
