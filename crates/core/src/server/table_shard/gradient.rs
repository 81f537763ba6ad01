//! Gradients by the cells that they are counted by: rows of a sparse table, chunks of a dense one.

use crate::absence::Absent;
use crate::codec::Content;
use crate::intake::GradientFrame;

/// A gradient of one cell, or a sum of some.
#[derive(Debug, Clone, Copy)]
pub(super) struct CellGradient<'a> {
    pub(super) cell: usize,
    /// The cell's first element on this shard.
    pub(super) start: usize,
    pub(super) values: Content<'a>,
    /// Elements that it does not have: zeros in `values`.
    pub(super) absent: &'a Absent,
    /// How many gradients it is the sum of.
    pub(super) weight: u32,
}

impl<'a> CellGradient<'a> {
    /// Calls `visit` with the gradient of every cell in a frame.
    #[inline]
    pub(super) fn for_each(gradient: GradientFrame<'a>, mut visit: impl FnMut(CellGradient<'a>)) {
        match gradient {
            GradientFrame::Dense { index, start, values, absent } => {
                visit(CellGradient { cell: index, start, values, absent, weight: 1 });
            }
            GradientFrame::Rows { start, rows, width, values, .. } => {
                for (place, row) in rows.iter().enumerate() {
                    let cell = start / width + *row as usize;
                    let values = values.slice(place * width..(place + 1) * width).into();
                    let absent = Absent::NOTHING;
                    visit(CellGradient { cell, start: cell * width, values, absent, weight: 1 });
                }
            }
        }
    }
}

/// One worker's gradient, kept whole: for ranked addition, or until its norm is known.
#[derive(Debug, Default)]
pub(super) struct Staged {
    cells: Vec<StagedCell>,
}

/// The gradient of one cell.
#[derive(Debug)]
pub(super) struct StagedCell {
    pub(super) cell: usize,
    pub(super) start: usize,
    pub(super) values: Vec<f32>,
    pub(super) absent: Absent,
}

impl Staged {
    pub(super) fn keep(&mut self, gradient: GradientFrame<'_>) {
        CellGradient::for_each(gradient, |CellGradient { cell, start, values, absent, .. }| {
            let (values, absent) = (values.to_vec(), absent.clone());
            self.cells.push(StagedCell { cell, start, values, absent });
        });
    }

    /// Adds another gradient of the same worker.
    pub(super) fn append(&mut self, other: Staged) {
        self.cells.extend(other.cells);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    pub(super) fn cells(&self) -> impl Iterator<Item = &StagedCell> {
        self.cells.iter()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let cell = |cell: &StagedCell| cell.values.len() * 4 + cell.absent.memory_bytes() + 64;
        self.cells.iter().map(cell).sum()
    }
}
