//! What a worker holds back of a table: gradients that were not sent, by the policy `hold`.
//!
//! A submission takes the holder along, as it takes the codec: what is merged and measured there needs no worker.

mod rows;
mod table;

pub(super) use rows::{HeldRows, MergedRows};
pub(super) use table::{HeldTable, MergedTable};

use crate::hold::Hold;
use crate::types::Clock;
use std::sync::Arc;

/// The gradients of one table that its worker holds back.
#[derive(Debug)]
pub(super) struct Holder {
    pub(super) held: Held,
    /// The iteration whose gradient was held back or merged last. A push of it that failed is not merged again.
    merged: Option<Clock>,
    /// Pushes of the table so far. Gradients are as old as the pushes since then: iterations may be left out.
    pushes: u64,
    counts: HoldCounts,
}

/// The sum of the gradients.
#[derive(Debug)]
pub(super) enum Held {
    /// Of a dense table.
    Table(HeldTable),
    /// Of a table of rows.
    Rows(HeldRows),
}

/// Pushes of tables that have the policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct HoldCounts {
    /// Updates that were sent, of a table or a row.
    pub(super) sent: u64,
    /// Gradients that were held back at first.
    pub(super) held: u64,
    /// The most pushes that a gradient was held back from before it was sent.
    pub(super) longest: u64,
}

impl HoldCounts {
    /// Those of two tables together.
    pub(super) fn beside(self, other: HoldCounts) -> HoldCounts {
        HoldCounts {
            sent: self.sent + other.sent,
            held: self.held + other.held,
            longest: self.longest.max(other.longest),
        }
    }
}

/// A holder on its way with a submission.
#[derive(Debug)]
pub(super) struct Holding {
    /// The policy; gone once nothing is held back any more, which lets what is held go.
    pub(super) hold: Option<Arc<Hold>>,
    pub(super) holder: Holder,
}

impl Holder {
    /// For a table of rows of so many elements, or a dense one.
    pub(super) fn new(row_width: Option<usize>) -> Holder {
        let held = match row_width {
            Some(width) => Held::Rows(HeldRows::new(width)),
            None => Held::Table(HeldTable::default()),
        };
        Holder { held, merged: None, pushes: 0, counts: HoldCounts::default() }
    }

    /// Whether gradients are held back.
    pub(super) fn is_empty(&self) -> bool {
        match &self.held {
            Held::Table(held) => held.since().is_none(),
            Held::Rows(held) => held.is_empty(),
        }
    }

    /// The number of the push at hand.
    pub(super) fn push(&self) -> u64 {
        self.pushes
    }

    /// The push at hand is made.
    pub(super) fn turn(&mut self) {
        self.pushes += 1;
    }

    /// Pushes that the oldest gradient has been held back from.
    pub(super) fn age(&self) -> Option<u64> {
        let since = match &self.held {
            Held::Table(held) => held.since(),
            Held::Rows(held) => held.oldest(),
        };
        since.map(|since| self.pushes.saturating_sub(since))
    }

    /// Whether a gradient of this iteration is held back, or was merged and not sent.
    pub(super) fn has_merged(&self, clock: Clock) -> bool {
        self.merged == Some(clock)
    }

    /// A gradient of this iteration is held back, or merged with what was.
    pub(super) fn note_merged(&mut self, clock: Clock) {
        self.merged = Some(clock);
    }

    /// Counts updates, of a table or of rows: so many sent, the longest held of them for so many pushes; so many held back.
    pub(super) fn count(&mut self, sent: u64, longest: u64, held: u64) {
        let HoldCounts { sent: all_sent, held: all_held, longest: so_far } = &mut self.counts;
        *all_sent += sent;
        *all_held += held;
        *so_far = (*so_far).max(longest);
    }

    pub(super) fn counts(&self) -> HoldCounts {
        self.counts
    }

    pub(super) fn memory_bytes(&self) -> usize {
        match &self.held {
            Held::Table(held) => held.memory_bytes(),
            Held::Rows(held) => held.memory_bytes(),
        }
    }

    pub(super) fn rows(&self) -> Option<&HeldRows> {
        match &self.held {
            Held::Table(_) => None,
            Held::Rows(rows) => Some(rows),
        }
    }

    /// The rows that the worker has, where the table is one of rows.
    pub(super) fn rows_mut(&mut self) -> Option<&mut HeldRows> {
        match &mut self.held {
            Held::Table(_) => None,
            Held::Rows(rows) => Some(rows),
        }
    }
}
