//! The gradients of one round, until it closes.

use super::gradient::{CellGradient, Staged};
use crate::absence::{Absent, AbsentFromSums};
use crate::codec::Content;
use crate::kernels::{self, Values};
use crate::optimizer::Gradient;
use crate::server::accumulators::Accumulators;
use crate::server::image::Floats;
use crate::store::Buffer;
use crate::table::Layout;
use crate::types::WorkerId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Accumulated sums of a round.
#[derive(Debug)]
enum Sums {
    /// Rows are many and short: they lie side by side. Empty until a gradient has to be kept.
    Rows(Buffer),
    /// Each chunk has an accumulator as long as there is a sum in it.
    Chunks(Vec<Option<Buffer>>),
}

/// State of one cell in a round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Cell {
    /// How many gradients it got.
    gradients: u32,
    /// The sum of their weights.
    weight: f32,
    state: CellState,
}

/// A sender that claims to bring more gradients than there can be does not make a count overflow.
const MAX_GRADIENTS: u32 = 1 << 30;

/// State of a cell's gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
enum CellState {
    /// Nothing waits for a step, and a further gradient would be another step.
    #[default]
    Empty,
    /// A sum waits for a step.
    Summed,
    /// Everything is in the parameters.
    Stepped,
}

/// The sum of one round's gradients on one shard's part of a table.
///
/// Contributions are counted per cell (a row of a sparse table, a chunk of a dense one), so that a worker that dies
/// in the middle of a push leaves every cell with a sum and the number of gradients in it. A cell that has all its
/// gradients may be stepped before the round closes; the last of them is then never stored.
#[derive(Debug)]
pub(super) struct Round {
    elements: usize,
    sums: Sums,
    cells: Vec<Cell>,
    /// Cells with a contribution, in the order they got their first: closing costs what was touched.
    touched: Vec<u32>,
    staged: BTreeMap<WorkerId, Staged>,
    /// Elements that are absent from all gradients of a sum.
    absent: AbsentFromSums,
    /// Whether every gradient in here is of a worker that is still there, and each worker's only one for its cell.
    is_exact: bool,
}

/// What an image keeps of a round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RoundImage {
    /// Those with a contribution, in the order they got their first.
    cells: Vec<(u32, Cell)>,
    /// Of the cells with a sum that waits for a step, one after the other.
    sums: Floats,
    staged: BTreeMap<WorkerId, Staged>,
    absent: Vec<(u32, Absent)>,
    is_exact: bool,
}

impl Round {
    pub(super) fn image(&self, layout: &Layout) -> RoundImage {
        let summed = self.summed().flat_map(|(cell, _)| self.sum(cell, layout.cell_range(cell)));
        RoundImage {
            cells: self.touched.iter().map(|&cell| (cell, self.cells[cell as usize])).collect(),
            sums: summed.copied().collect::<Vec<f32>>().into(),
            staged: self.staged.clone(),
            absent: self.absent.chunks().map(|(chunk, absent)| (chunk as u32, absent.clone())).collect(),
            is_exact: self.is_exact,
        }
    }

    /// The round that an image was made of. The error says why there can be no such round.
    pub(super) fn from_image(
        layout: &Layout,
        image: RoundImage,
        accumulators: &mut Accumulators,
    ) -> Result<Round, String> {
        let RoundImage { cells, sums, staged, absent, is_exact } = image;
        let mut round = Round { is_exact, ..Round::new(layout) };
        let mut sums: &[f32] = &sums;
        for (number, cell) in cells {
            let place = number as usize;
            let is_new = round.cells.get(place).is_some_and(|known| known.gradients == 0);
            let is_fine = (1..=MAX_GRADIENTS).contains(&cell.gradients) && cell.weight.is_finite();
            if !is_new || !is_fine {
                return Err(format!("cell {number} of a round is there twice, or cannot have {cell:?}"));
            }
            if cell.state == CellState::Summed {
                let range = layout.cell_range(place);
                let Some((values, rest)) = sums.split_at_checked(range.len()) else {
                    return Err(format!("the sum of cell {number} of a round is missing"));
                };
                sums = rest;
                let values = Values::F32(values).into();
                let sum = CellGradient {
                    cell: place,
                    start: range.start,
                    values,
                    absent: Absent::NOTHING,
                    gradients: 1,
                    weight: 1.0,
                };
                round.put(sum, accumulators);
            }
            round.cells[place] = cell;
            round.touched.push(number);
        }
        for (number, absent) in absent {
            let cell = number as usize;
            if layout.is_sparse() || cell >= round.cells.len() || !round.is_summed(cell) {
                return Err(format!("elements of cell {number} are absent, and it has no sum"));
            }
            absent.check(layout.cell_range(cell).len())?;
            round.absent.add(cell, true, &absent);
        }
        staged.values().try_for_each(|staged| staged.check(layout))?;
        round.staged = staged;
        if sums.is_empty() { Ok(round) } else { Err("a round has sums of no cell".into()) }
    }

    pub(super) fn new(layout: &Layout) -> Round {
        let cells = layout.cells();
        Round {
            elements: layout.elements(),
            sums: if layout.is_sparse() {
                Sums::Rows(Buffer::zeroed(0))
            } else {
                Sums::Chunks(vec![None; cells])
            },
            cells: vec![Cell::default(); cells],
            touched: Vec::with_capacity(cells),
            staged: BTreeMap::new(),
            absent: AbsentFromSums::default(),
            is_exact: true,
        }
    }

    /// Adds gradients of a cell. The first one is copied: nothing has to be zeroed.
    pub(super) fn add(&mut self, gradient: CellGradient<'_>, accumulators: &mut Accumulators) {
        let is_first = !self.is_summed(gradient.cell);
        self.put(gradient, accumulators);
        self.absent.add(gradient.cell, is_first, gradient.absent);
        self.count(&gradient, CellState::Summed);
    }

    fn put(&mut self, gradient: CellGradient<'_>, accumulators: &mut Accumulators) {
        let CellGradient { cell, start, values, weight, .. } = gradient;
        let is_summed = self.is_summed(cell);
        let sum = match &mut self.sums {
            Sums::Rows(sums) => {
                if sums.len() < self.elements {
                    *sums = Buffer::zeroed(self.elements);
                }
                &mut sums.as_mut_slice()[start..start + values.len()]
            }
            Sums::Chunks(sums) => {
                let sum = sums[cell].get_or_insert_with(|| accumulators.take(values.len()));
                &mut sum.as_mut_slice()[..values.len()]
            }
        };
        match (is_summed, weight == 1.0) {
            (true, true) => values.add_to(sum),
            (true, false) => values.add_scaled_to(sum, weight),
            (false, true) => values.copy_to(sum),
            (false, false) => {
                values.copy_to(sum);
                kernels::scale(sum, weight);
            }
        }
    }

    /// Whether so many more gradients make this cell complete, with `n` workers that push each cell once.
    pub(super) fn is_completed_by(&self, cell: usize, gradients: u32, n: u32) -> bool {
        self.is_exact && self.cells[cell].gradients + gradients == n
    }

    /// The weight of a cell's gradients so far.
    pub(super) fn weight(&self, cell: usize) -> f32 {
        self.cells[cell].weight
    }

    /// The cell's last gradients are here, and `step` is called with all of them, and with what is absent from all. Those
    /// that have a value for every element are not stored; of others only the entries that are there are added to the sum
    /// before.
    pub(super) fn finish(
        &mut self,
        last: CellGradient<'_>,
        accumulators: &mut Accumulators,
        step: impl FnOnce(Gradient<'_>, &Absent),
    ) {
        let CellGradient { cell, start, values, weight, .. } = last;
        let is_plain = weight == 1.0;
        let range = start..start + values.len();
        let was_summed = self.is_summed(cell);
        self.absent.add(cell, !was_summed, last.absent);
        let absent = self.absent.take(cell);
        match values {
            Content::Whole(last) if is_plain => {
                let before = was_summed.then(|| self.sum(cell, range));
                step(Gradient { before, last }, &absent);
            }
            Content::Whole(_) | Content::Sparse(_) => {
                self.put(last, accumulators);
                step(self.sum(cell, range).into(), &absent);
            }
        }
        self.count(&last, CellState::Stepped);
        if let Sums::Chunks(sums) = &mut self.sums {
            accumulators.give_back(sums[cell].take());
        }
    }

    fn count(&mut self, gradient: &CellGradient<'_>, state: CellState) {
        let CellGradient { cell, gradients, weight, .. } = *gradient;
        let counted = &mut self.cells[cell];
        if counted.gradients == 0 {
            self.touched.push(cell as u32);
        }
        let weight = counted.weight + gradients as f32 * weight;
        *counted = Cell { gradients: (counted.gradients + gradients).min(MAX_GRADIENTS), weight, state };
    }

    fn is_summed(&self, cell: usize) -> bool {
        self.cells[cell].state == CellState::Summed
    }

    /// Whether everything that this round has of a cell is in the parameters.
    pub(super) fn is_stepped(&self, cell: usize) -> bool {
        self.cells[cell].state == CellState::Stepped
    }

    /// Some worker may come again, or not come any more: counts alone do not tell any longer when a cell is complete.
    pub(super) fn mark_inexact(&mut self) {
        self.is_exact = false;
    }

    /// Lets cells that were stepped take further gradients, after a switch of the model. That is another step of the same round.
    pub(super) fn reopen(&mut self) {
        self.mark_inexact();
        for &cell in &self.touched {
            let cell = &mut self.cells[cell as usize];
            if cell.state == CellState::Stepped {
                cell.state = CellState::Empty;
            }
        }
    }

    /// Keeps a worker's whole gradient under its rank instead of adding it.
    pub(super) fn stage(&mut self, worker: WorkerId, gradient: Staged) {
        // PSP lets one worker contribute to a round with several clocks.
        self.staged.entry(worker).or_default().append(gradient);
    }

    /// Adds the staged gradients up, by rank.
    pub(super) fn add_staged(&mut self, accumulators: &mut Accumulators) {
        for (_, staged) in std::mem::take(&mut self.staged) {
            staged.for_each(|gradient| self.add(gradient, accumulators));
        }
    }

    /// Cells with a sum that waits for a step, and the weight of their gradients.
    pub(super) fn summed(&self) -> impl Iterator<Item = (usize, f32)> + '_ {
        let touched = self.touched.iter().map(|&cell| cell as usize);
        touched.filter(|&cell| self.is_summed(cell)).map(|cell| (cell, self.cells[cell].weight))
    }

    /// The mean weight of a cell's gradients.
    pub(super) fn mean_weight(&self, cell: usize) -> f32 {
        let Cell { gradients, weight, .. } = self.cells[cell];
        weight / gradients.max(1) as f32
    }

    /// The sum of a cell's gradients, which is over this range of elements.
    pub(super) fn sum(&self, cell: usize, range: Range<usize>) -> &[f32] {
        match &self.sums {
            Sums::Rows(sums) => &sums.as_slice()[range],
            Sums::Chunks(sums) => {
                let sum = sums[cell].as_ref().expect("a cell that is summed has an accumulator");
                &sum.as_slice()[..range.len()]
            }
        }
    }

    /// Elements that are absent from all gradients of a cell.
    pub(super) fn absent(&self, cell: usize) -> &Absent {
        self.absent.of(cell)
    }

    /// Makes the round empty again, keeping its memory.
    pub(super) fn clear(&mut self, accumulators: &mut Accumulators) {
        for cell in self.touched.drain(..) {
            self.cells[cell as usize] = Cell::default();
            if let Sums::Chunks(sums) = &mut self.sums {
                accumulators.give_back(sums[cell as usize].take());
            }
        }
        self.staged.clear();
        self.absent.clear();
        self.is_exact = true;
    }

    /// How many accumulators it holds.
    pub(super) fn accumulators(&self) -> usize {
        match &self.sums {
            Sums::Rows(_) => 0,
            Sums::Chunks(sums) => sums.iter().flatten().count(),
        }
    }

    /// Compares the cells with the list of those that were touched, and with the accumulators.
    pub(super) fn check(&self) -> Result<(), String> {
        let touched = self.cells.iter().filter(|cell| cell.gradients > 0).count();
        if touched != self.touched.len() {
            return Err(format!("{touched} cells have gradients, and {} are listed", self.touched.len()));
        }
        if let Sums::Chunks(sums) = &self.sums {
            let mut cells = sums.iter().zip(&self.cells);
            if cells.any(|(sum, cell)| sum.is_some() != (cell.state == CellState::Summed)) {
                return Err("a chunk has an accumulator and no sum, or a sum and no accumulator".into());
            }
        }
        Ok(())
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let staged: usize = self.staged.values().map(Staged::memory_bytes).sum();
        let sums = match &self.sums {
            Sums::Rows(sums) => sums.memory_bytes(),
            Sums::Chunks(sums) => sums.iter().flatten().map(Buffer::memory_bytes).sum(),
        };
        sums + self.cells.len() * (size_of::<Cell>() + 4) + staged + self.absent.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Chunk, TableSpec};
    use crate::types::{ServerId, ShardId};

    /// Of two chunks of 2048 elements, which take two pages each.
    fn layout() -> Layout {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunk = |number| Chunk { shard, start: u64::from(number) * 2048, len: 2048 };
        Layout::new(TableSpec::dense("w", [4096]), (0..2u32).map(|number| (number, chunk(number))))
    }

    fn add(round: &mut Round, cell: usize, accumulators: &mut Accumulators) {
        let values = [1.0; 2048];
        let (values, absent) = (Values::F32(&values).into(), Absent::NOTHING);
        round.add(
            CellGradient { cell, start: cell * 2048, values, absent, gradients: 1, weight: 1.0 },
            accumulators,
        );
    }

    #[test]
    fn sums_and_gradients_that_are_kept_whole_are_counted_as_memory() {
        let (mut round, mut accumulators) = (Round::new(&layout()), Accumulators::default());
        let empty = round.memory_bytes();
        assert!(empty < 1000, "{empty}");
        add(&mut round, 1, &mut accumulators);
        assert_eq!(round.memory_bytes(), empty + 8192);
        let mut staged = Staged::default();
        let values = [1.0; 2048];
        let absent = &Absent::in_chunk(&[0..1, 2..3, 4..5], 0..2048);
        staged.keep(
            crate::intake::GradientFrame::Dense {
                index: 0,
                start: 0,
                values: Values::F32(&values).into(),
                absent,
            },
            1.0,
        );
        assert!((8192 + 24..8192 + 200).contains(&staged.memory_bytes()), "{}", staged.memory_bytes());
        let whole = staged.memory_bytes();
        round.stage(WorkerId(0), staged);
        assert_eq!(round.memory_bytes(), empty + 8192 + whole);
        round.clear(&mut accumulators);
        assert_eq!((round.memory_bytes(), accumulators.memory_bytes()), (empty, 8192));
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let (mut round, mut accumulators) = (Round::new(&layout()), Accumulators::default());
        add(&mut round, 0, &mut accumulators);
        assert_eq!((round.accumulators(), round.check()), (1, Ok(())));
        round.cells[0].state = CellState::Stepped;
        assert!(round.check().is_err(), "an accumulator without a sum");
        round.cells[0].state = CellState::Summed;
        round.touched.clear();
        assert!(round.check().is_err(), "a gradient that is not listed");
    }
}
