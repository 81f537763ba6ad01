//! What a worker holds back of a table: gradients that were not sent, by the policy `hold`.
//!
//! A submission takes the holder along, as it takes the codec: what is merged and measured there needs no worker.

mod rows;
mod table;

pub(super) use rows::{HeldRows, MergedRows};
pub(super) use table::{HeldTable, MergedTable};

use super::encoding::copied;
use super::layout::{Layout, RowPlace};
use crate::checkpoint::{ArrayKind, WorkerArray};
use crate::hold::Hold;
use crate::kernels;
use crate::types::Clock;
use rows::SavedRow;
use std::sync::Arc;
use table::SavedUpdate;

/// Pushes that a worker of a job that goes on from a checkpoint counts as made before, so that updates may be older than it is.
const PUSHES_BEFORE: u64 = 1 << 32;

/// Which updates of a table are held back, and what is.
#[derive(Debug)]
pub(super) struct TableHold {
    policy: Option<Arc<Hold>>,
    /// Gone while a submission has it.
    holder: Option<Holder>,
}

impl TableHold {
    /// Of a table of rows of so many elements, or a dense one.
    pub(super) fn new(row_width: Option<usize>) -> TableHold {
        TableHold { policy: None, holder: Some(Holder::new(row_width)) }
    }

    /// Another policy holds. Without one, what is held back goes with the next push.
    pub(super) fn set_policy(&mut self, policy: Option<Hold>) {
        self.policy = policy.map(Arc::new);
        if self.policy.is_none() {
            self.holder.as_mut().and_then(Holder::rows_mut).into_iter().for_each(HeldRows::forget_copies);
        }
    }

    /// A gradient is being submitted: what it may be merged with goes along, where it may be.
    pub(super) fn begin(&mut self) -> Option<Holding> {
        let is_used = self.may_hold();
        let holder = self.holder.take_if(|_| is_used)?;
        Some(Holding { hold: self.policy.clone(), holder })
    }

    /// It is submitted.
    pub(super) fn end(&mut self, holding: Option<Holding>) {
        if let Some(Holding { holder, .. }) = holding {
            self.holder = Some(holder);
        }
    }

    /// Whether updates are compared with the parameters.
    pub(super) fn needs_parameters(&self) -> bool {
        self.policy.as_ref().is_some_and(|hold| hold.needs_parameters())
    }

    /// Whether a worker that holds its update back does not ask for parameters either.
    pub(super) fn holds_pulls(&self) -> bool {
        self.policy.as_ref().is_some_and(|hold| hold.holds_pulls())
    }

    /// Whether gradients are held back.
    pub(super) fn holds_back(&self) -> bool {
        self.holder.as_ref().is_some_and(|holder| !holder.is_empty())
    }

    /// Whether some are, or may be.
    pub(super) fn may_hold(&self) -> bool {
        self.policy.is_some() || self.holds_back()
    }

    /// What became of updates.
    pub(super) fn counts(&self) -> HoldCounts {
        self.holder.as_ref().map_or_else(HoldCounts::default, Holder::counts)
    }

    /// From how many pushes something has been held back, and a sentence about it, if something is.
    pub(super) fn explain(&self, table: &str) -> Option<(u64, String)> {
        let age = self.holder.as_ref()?.age()?;
        let policy = match &self.policy {
            Some(hold) => format!("hold={hold}"),
            None => "goes with the next push".to_owned(),
        };
        Some((age, format!("holds an update of table `{table}` back, from {age} pushes so far ({policy})")))
    }

    /// Puts rows that need not be asked for in an iteration to their places in `to`; the others are left.
    pub(super) fn answer_rows(&self, clock: Clock, wanted: &mut Vec<RowPlace>, to: &mut [f32]) {
        let hold = self.policy.as_ref().filter(|hold| hold.holds_pulls());
        if let Some((hold, held)) = hold.zip(self.holder.as_ref().and_then(Holder::rows)) {
            held.answer(hold.most(), clock, wanted, to);
        }
    }

    /// Rows that were pulled for an iteration are here.
    pub(super) fn note_rows(&mut self, clock: Clock, rows: &[RowPlace], values: &[f32]) {
        let is_used = self.policy.is_some();
        if let Some(held) = self.holder.as_mut().and_then(Holder::rows_mut).filter(|_| is_used) {
            held.note_pulled(clock, rows, values);
        }
    }

    /// A copy of what is held back, for a checkpoint.
    pub(super) fn kept_back(&self, layout: &Layout) -> Result<Option<WorkerArray>, String> {
        let kept = self.holder.as_ref().filter(|holder| !holder.is_empty());
        kept.map(|holder| holder.saved(layout)).transpose()
    }

    /// Holds back what a worker held back when it was saved, beside what is held back already. The error says what does not fit.
    pub(super) fn keep_again(&mut self, layout: &Layout, array: &WorkerArray) -> Result<(), String> {
        self.holder.as_mut().map_or(Ok(()), |holder| holder.keep_again(layout, array))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.holder.as_ref().map_or(0, Holder::memory_bytes)
    }
}

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

    fn saved(&self, layout: &Layout) -> Result<WorkerArray, String> {
        let state = |saved: postcard::Result<Vec<u8>>| saved.map_err(|error| error.to_string());
        let (values, state) = match &self.held {
            Held::Rows(held) => {
                let (values, rows) = held.saved(self.pushes);
                (values, state(postcard::to_allocvec(&rows))?)
            }
            Held::Table(held) => match held.saved(layout.elements(), self.pushes) {
                Some((sum, update)) => (copied(sum)?, state(postcard::to_allocvec(&update))?),
                None => (Vec::new(), Vec::new()),
            },
        };
        Ok(WorkerArray { table: layout.spec().name.clone(), kind: ArrayKind::Held, values, state })
    }

    fn keep_again(&mut self, layout: &Layout, array: &WorkerArray) -> Result<(), String> {
        let name = &layout.spec().name;
        let misfit = || format!("what was held back of table `{name}` does not fit it");
        if !kernels::all_finite(&array.values) {
            return Err(misfit());
        }
        // Updates are as old as the pushes since then, and there have been none here.
        self.pushes = self.pushes.max(PUSHES_BEFORE);
        match &mut self.held {
            Held::Rows(held) => {
                let rows: Vec<SavedRow> = postcard::from_bytes(&array.state).map_err(|_| misfit())?;
                let last = layout.elements() / layout.row_width().max(1);
                if rows.iter().any(|saved| saved.row as usize >= last) {
                    return Err(misfit());
                }
                held.keep_again(&array.values, &rows, self.pushes)
            }
            Held::Table(held) => {
                let update: SavedUpdate = postcard::from_bytes(&array.state).map_err(|_| misfit())?;
                if array.values.len() != layout.elements() {
                    return Err(misfit());
                }
                held.keep_again(&array.values, update, self.pushes)
            }
        }
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
