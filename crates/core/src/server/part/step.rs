//! Steps of the optimizer, by single gradients or by whole rounds.

use super::{LocalChunk, TablePart};
use crate::kernels;
use crate::optimizer::{OptimizerPolicy, StepInput};
use crate::server::rounds::{Piece, Round, Staged};
use crate::store::Buffer;
use crate::table::{Reduce, TableSpec};
use crate::types::Clock;
use std::collections::BTreeMap;

impl TablePart {
    /// Applies one piece at once: every gradient is a step of its own, scaled to its worker's share.
    pub(super) fn step_piece(&mut self, chunk_number: u32, piece: Piece<'_>) {
        let index = self.chunk_index(chunk_number).expect("checked when the piece was taken");
        self.chunks[index].steps += 1;
        let input = self.arrival_input(self.chunks[index].steps, 0.0, 0.0);
        piece.for_each_range(|start, values| self.step_range(&input, start, values));
    }

    fn arrival_input(&self, t: u64, parameter_norm: f64, gradient_norm: f64) -> StepInput {
        let scale = match self.policy.reduce {
            Reduce::Mean => 1.0 / self.controller.state().n().max(1) as f32,
            Reduce::Sum => 1.0,
        };
        let version = self.controller.state().v_train();
        StepInput { version, t, scale, lr_factor: 1.0, parameter_norm, gradient_norm }
    }

    /// Applies one worker's whole gradient at once, now that its norm is known.
    pub(super) fn step_staged(&mut self, staged: &Staged) {
        for chunk in &mut self.chunks {
            chunk.steps += 1;
        }
        let gradient_norm =
            staged.ranges().map(|(_, values)| kernels::squared_norm(values)).sum::<f64>().sqrt();
        let parameter_norm = self.parameter_norm();
        for (start, values) in staged.ranges() {
            let units = Units::new(&self.spec, &self.chunks);
            let t = units.chunk(units.at(start)).steps;
            let input = self.arrival_input(t, parameter_norm, gradient_norm);
            self.step_range(&input, start, values);
        }
    }

    pub(super) fn parameter_norm(&self) -> f64 {
        kernels::squared_norm(self.parameters.as_slice()).sqrt()
    }

    /// One optimizer step with a round's sum. A mean is taken over `over` gradients, or over as many as a unit got.
    pub(super) fn step_round(&mut self, round: &mut Round, clock: Clock, over: Option<u32>, lr_factor: f32) {
        for chunk in &mut self.chunks {
            chunk.steps += 1;
        }
        let units = Units::new(&self.spec, &self.chunks);
        for staged in round.take_staged().values() {
            for (start, values) in staged.ranges() {
                round.add(units.at(start), start, values);
            }
        }
        let (mut parameter_norm, mut gradient_norm) = (0.0, 0.0);
        if self.optimizer.needs_norms() {
            parameter_norm = self.parameter_norm();
            let squared = |(unit, _)| kernels::squared_norm(round.sum(units.range(unit)));
            gradient_norm = round.touched().map(squared).sum::<f64>().sqrt();
        }
        for (unit, count) in round.touched() {
            let scale = match self.policy.reduce {
                Reduce::Mean => 1.0 / over.unwrap_or(count).max(1) as f32,
                Reduce::Sum => 1.0,
            };
            let t = units.chunk(unit).steps;
            let input = StepInput { version: clock, t, scale, lr_factor, parameter_norm, gradient_norm };
            let range = units.range(unit);
            let start = range.start;
            step_slices(
                &self.optimizer,
                &input,
                &mut self.parameters,
                &mut self.slots,
                start,
                round.sum(range),
            );
        }
    }

    fn step_range(&mut self, input: &StepInput, start: usize, gradient: &[f32]) {
        step_slices(&self.optimizer, input, &mut self.parameters, &mut self.slots, start, gradient);
    }
}

/// How elements of a part map to units of contribution: rows of a sparse table, chunks of a dense one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Units<'a> {
    row_width: Option<usize>,
    chunks: &'a [LocalChunk],
}

impl<'a> Units<'a> {
    pub(super) fn new(spec: &TableSpec, chunks: &'a [LocalChunk]) -> Units<'a> {
        Units { row_width: spec.rows.then(|| spec.row_elements() as usize), chunks }
    }

    pub(super) fn elements(self) -> usize {
        self.chunks.last().map_or(0, |chunk| chunk.start + chunk.len)
    }

    pub(super) fn count(self) -> usize {
        self.row_width.map_or(self.chunks.len(), |width| self.elements() / width)
    }

    /// The unit that an element belongs to.
    pub(super) fn at(self, element: usize) -> usize {
        match self.row_width {
            Some(width) => element / width,
            None => self.chunk_at(element),
        }
    }

    /// The chunk that a unit is, or is in.
    pub(super) fn chunk(self, unit: usize) -> &'a LocalChunk {
        &self.chunks[self.row_width.map_or(unit, |width| self.chunk_at(unit * width))]
    }

    fn chunk_at(self, element: usize) -> usize {
        self.chunks.partition_point(|chunk| chunk.start <= element) - 1
    }

    /// The elements of a unit.
    pub(super) fn range(self, unit: usize) -> std::ops::Range<usize> {
        match self.row_width {
            Some(width) => unit * width..(unit + 1) * width,
            None => self.chunks[unit].start..self.chunks[unit].start + self.chunks[unit].len,
        }
    }
}

/// The round of a clock, with memory of an earlier one where there is some.
pub(super) fn open_round<'a>(
    rounds: &'a mut BTreeMap<Clock, Round>,
    spare: &mut Option<Round>,
    clock: Clock,
    units: Units<'_>,
) -> &'a mut Round {
    let make = || spare.take().unwrap_or_else(|| Round::new(units.elements(), units.count()));
    rounds.entry(clock).or_insert_with(make)
}

fn step_slices(
    optimizer: &OptimizerPolicy,
    input: &StepInput,
    parameters: &mut Buffer,
    slots: &mut [Buffer],
    start: usize,
    gradient: &[f32],
) {
    let range = start..start + gradient.len();
    // Two slots are the most any rule has; an array keeps the data path free of allocation.
    let mut views: [&mut [f32]; 2] = [&mut [], &mut []];
    let count = slots.len();
    for (view, slot) in views.iter_mut().zip(slots) {
        *view = &mut slot.as_mut_slice()[range.clone()];
    }
    optimizer.step(*input, &mut parameters.as_mut_slice()[range], gradient, &mut views[..count]);
}
