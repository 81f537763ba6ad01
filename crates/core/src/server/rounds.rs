//! Gradients that wait for their round to close.

use crate::kernels;
use crate::store::Buffer;
use crate::types::WorkerId;
use std::collections::BTreeMap;

/// A range of rows or elements of a shard's part of a table, as a push frame brings it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Piece<'a> {
    /// All elements from `start` on.
    Dense {
        /// First element, counted on this shard.
        start: usize,
        /// Gradient.
        values: &'a [f32],
    },
    /// Single rows; `values` has them one after the other.
    Rows {
        /// First element of the chunk, counted on this shard.
        start: usize,
        /// Row numbers within the chunk, strictly ascending.
        rows: &'a [u32],
        /// Elements of a row.
        width: usize,
        /// Gradient.
        values: &'a [f32],
    },
}

impl<'a> Piece<'a> {
    /// Calls `visit` with every contiguous range: its first element on this shard and its gradient.
    pub(super) fn for_each_range(&self, mut visit: impl FnMut(usize, &'a [f32])) {
        match *self {
            Piece::Dense { start, values } => visit(start, values),
            Piece::Rows { start, rows, width, values } => {
                for (row, values) in rows.iter().zip(values.chunks_exact(width)) {
                    visit(start + *row as usize * width, values);
                }
            }
        }
    }

    /// The same place with other values.
    pub(super) fn with_values<'b>(self, values: &'b [f32]) -> Piece<'b>
    where
        'a: 'b,
    {
        match self {
            Piece::Dense { start, .. } => Piece::Dense { start, values },
            Piece::Rows { start, rows, width, .. } => Piece::Rows { start, rows, width, values },
        }
    }

    pub(super) fn values(&self) -> &'a [f32] {
        match *self {
            Piece::Dense { values, .. } | Piece::Rows { values, .. } => values,
        }
    }
}

/// One worker's gradient, kept whole: for ranked addition, or until its norm is known.
#[derive(Debug, Default)]
pub(super) struct Staged {
    ranges: Vec<(usize, Vec<f32>)>,
}

impl Staged {
    pub(super) fn keep(&mut self, piece: Piece<'_>) {
        piece.for_each_range(|start, values| self.ranges.push((start, values.to_vec())));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = (usize, &[f32])> {
        self.ranges.iter().map(|(start, values)| (*start, values.as_slice()))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.ranges.iter().map(|(_, values)| values.len() * 4 + 32).sum()
    }
}

/// The sum of one round's gradients on one shard's part of a table.
///
/// Contributions are counted per unit (a row of a sparse table, a chunk of a dense one), so that a worker that dies
/// in the middle of a push leaves every unit with a sum and the number of gradients in it.
#[derive(Debug)]
pub(super) struct Round {
    sum: Buffer,
    contributions: Vec<u32>,
    /// Units with a contribution, in the order they got their first: closing costs what was touched.
    touched: Vec<u32>,
    staged: BTreeMap<WorkerId, Staged>,
}

impl Round {
    /// An empty round over `elements` elements in `units` units.
    pub(super) fn new(elements: usize, units: usize) -> Round {
        Round {
            sum: Buffer::zeroed(elements),
            contributions: vec![0; units],
            touched: Vec::with_capacity(units),
            staged: BTreeMap::new(),
        }
    }

    /// Adds one range that makes up unit `unit`. The first gradient of a unit is copied: nothing has to be zeroed.
    pub(super) fn add(&mut self, unit: usize, start: usize, values: &[f32]) {
        self.add_weighted(unit, start, values, 1);
    }

    /// The same for the sum of `weight` gradients.
    pub(super) fn add_weighted(&mut self, unit: usize, start: usize, values: &[f32], weight: u32) {
        let sum = &mut self.sum.as_mut_slice()[start..start + values.len()];
        if self.contributions[unit] == 0 {
            sum.copy_from_slice(values);
            self.touched.push(unit as u32);
        } else {
            kernels::add(sum, values);
        }
        self.contributions[unit] = self.contributions[unit].saturating_add(weight);
    }

    /// Keeps a worker's whole gradient under its rank instead of adding it.
    pub(super) fn stage(&mut self, worker: WorkerId, gradient: Staged) {
        // PSP lets one worker contribute to a round with several clocks.
        self.staged.entry(worker).or_default().ranges.extend(gradient.ranges);
    }

    /// Takes the staged gradients, by rank.
    pub(super) fn take_staged(&mut self) -> BTreeMap<WorkerId, Staged> {
        std::mem::take(&mut self.staged)
    }

    /// Units with a contribution, and how many gradients are in each.
    pub(super) fn touched(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        self.touched.iter().map(|&unit| (unit as usize, self.contributions[unit as usize]))
    }

    /// The sum of gradients over a range of elements.
    pub(super) fn sum(&self, range: std::ops::Range<usize>) -> &[f32] {
        &self.sum.as_slice()[range]
    }

    /// Makes the round empty again, keeping its memory.
    pub(super) fn clear(&mut self) {
        for unit in self.touched.drain(..) {
            self.contributions[unit as usize] = 0;
        }
        self.staged.clear();
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let staged: usize = self.staged.values().map(Staged::memory_bytes).sum();
        self.sum.memory_bytes() + self.contributions.len() * 8 + staged
    }
}
