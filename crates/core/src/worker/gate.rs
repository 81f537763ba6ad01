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
    /// Counts the blocks of the tables that are pulled partially, under the strictest of their settings.
    pub(super) fn set_blocks(&mut self, tables: &[LocalTable]) {
        let partial = || tables.iter().filter_map(|table| Some((table, table.partial.as_ref()?)));
        self.blocks =
            partial().filter(|(table, _)| !table.spec.rows).map(|(table, _)| table.shards().len()).sum();
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
