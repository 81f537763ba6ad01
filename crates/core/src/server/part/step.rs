//! Steps of the optimizer, by single gradients or by whole rounds.

use super::skipped::SkippedSteps;
use super::{LocalChunk, TablePart};
use crate::absence::Absent;
use crate::kernels;
use crate::optimizer::{Gradient, MAX_SLOTS, OptimizerPolicy, StepInput};
use crate::policy::Reduce;
use crate::server::rounds::{Accumulators, Extent, Piece, Round, Staged, UnitGradient};
use crate::store::Buffer;
use crate::table::TableSpec;
use crate::types::Clock;
use std::ops::Range;

impl TablePart {
    /// Applies one piece at once: every gradient is a step of its own, scaled to its worker's share.
    pub(super) fn step_piece(&mut self, chunk: usize, piece: Piece<'_>, accumulators: &mut Accumulators) {
        self.chunks[chunk].arrivals += 1;
        let input = self.arrival_input(self.steps + self.chunks[chunk].arrivals, 0.0, 0.0);
        piece.for_each_unit(|UnitGradient { unit, start, values, absent, .. }| {
            accumulators.with_whole(values, |last| {
                self.target().step(&input, (unit, start), Gradient { before: None, last }, absent);
            });
        });
    }

    fn arrival_input(&self, t: u64, parameter_norm: f64, gradient_norm: f64) -> StepInput {
        let scale = self.mean_over(self.controller.state().n());
        let version = self.controller.state().v_train();
        StepInput { version, t, scale, lr_factor: 1.0, parameter_norm, gradient_norm }
    }

    /// What a sum of gradients is multiplied by.
    fn mean_over(&self, gradients: u32) -> f32 {
        match self.policy.reduce() {
            Reduce::Mean => 1.0 / gradients.max(1) as f32,
            Reduce::Sum => 1.0,
        }
    }

    /// Applies one worker's whole gradient at once, now that its norm is known.
    pub(super) fn step_staged(&mut self, staged: &Staged) {
        self.steps += 1;
        let squares = staged.units().map(|unit| kernels::squared_norm(&unit.values));
        let gradient_norm = squares.sum::<f64>().sqrt();
        let parameter_norm = self.parameter_norm();
        for staged in staged.units() {
            let chunk = Units::new(&self.spec, &self.chunks).chunk(staged.unit);
            let input = self.arrival_input(self.steps + chunk.arrivals, parameter_norm, gradient_norm);
            let gradient = staged.values.as_slice().into();
            self.target().step(&input, (staged.unit, staged.start), gradient, &staged.absent);
        }
    }

    pub(super) fn parameter_norm(&self) -> f64 {
        kernels::squared_norm(self.parameters.as_slice()).sqrt()
    }

    /// Whether gradients of this round may be stepped before it closes: nothing but the pushes of all workers closes
    /// it, it is the next to close, and no unit's step depends on another unit.
    pub(super) fn steps_early(&self, round: Clock) -> bool {
        round == self.controller.state().v_train()
            && self.controller.policy().model.waits_for_all()
            && !self.optimizer.needs_norms()
    }

    /// Adds a piece to its round. Units that have all their gradients with it are stepped right away if they may be:
    /// their last gradient is then in cache, and is not stored. They get the bits that closing would give them. Whether
    /// any was stepped.
    pub(super) fn add_piece(
        &mut self,
        (clock, round): (Clock, Clock),
        chunk: usize,
        piece: Piece<'_>,
        last: bool,
        accumulators: &mut Accumulators,
    ) -> bool {
        let steps_early = self.steps_early(round);
        let state = self.controller.state();
        let n = state.n();
        // Who pushes is not done with this round; if everybody else is, nobody comes after.
        let is_last_worker = state.count() + 1 == n;
        // The mean of a row is over the pushes that count when the round closes. They are known before only when this
        // one is sure to count, or when it makes no difference.
        let over = state.contributions() + 1;
        let row_is_sure = is_last_worker && (last || over == 1 || self.policy.reduce() == Reduce::Sum);
        let units = Units::new(&self.spec, &self.chunks);
        let is_sparse = self.spec.rows;
        let t = self.steps + 1 + self.chunks[chunk].arrivals;
        let mut input = StepInput {
            version: round,
            t,
            scale: 1.0,
            lr_factor: 1.0,
            parameter_norm: 0.0,
            gradient_norm: 0.0,
        };
        let reduce = self.policy.reduce();
        let sums = self.rounds.open(round, units.extent());
        if clock != round {
            // Only a model that was switched from lets one worker come to a round twice.
            sums.disturb();
        }
        let mut target = Target {
            optimizer: &self.optimizer,
            parameters: &mut self.parameters,
            slots: &mut self.slots,
            skipped: &mut self.skipped,
        };
        let mut is_stepped = false;
        piece.for_each_unit(|gradient| {
            let UnitGradient { unit, start, .. } = gradient;
            let is_complete = match is_sparse {
                true => row_is_sure,
                false => is_last_worker || sums.is_completed_by(unit, 1, n),
            };
            if !(steps_early && is_complete) {
                return sums.add(gradient, accumulators);
            }
            let gradients = if is_sparse { over } else { sums.contributions(unit) + 1 };
            if reduce == Reduce::Mean {
                input.scale = 1.0 / gradients as f32;
            }
            is_stepped = true;
            sums.finish(gradient, accumulators, |gradient, absent| {
                target.step(&input, (unit, start), gradient, absent);
            });
        });
        is_stepped
    }

    /// Adds the sum of some gradients of one chunk in the same way. Who they are from is not known yet: only their
    /// number tells whether they are the last.
    pub(super) fn add_sum(
        &mut self,
        (clock, round): (Clock, Clock),
        sum: UnitGradient<'_>,
        accumulators: &mut Accumulators,
    ) {
        let UnitGradient { unit: index, start, weight, .. } = sum;
        let steps_early = self.steps_early(round);
        let n = self.controller.state().n();
        let LocalChunk { arrivals, .. } = self.chunks[index];
        let (t, reduce) = (self.steps + 1 + arrivals, self.policy.reduce());
        let units = Units::new(&self.spec, &self.chunks);
        let sums = self.rounds.open(round, units.extent());
        // A sum may hold a piece of a worker that has left meanwhile, and was counted out.
        if clock != round || round < self.sums_are_regular_from {
            sums.disturb();
        }
        if !(steps_early && sums.is_completed_by(index, weight, n)) {
            return sums.add(sum, accumulators);
        }
        let gradients = sums.contributions(index) + weight;
        let scale = if reduce == Reduce::Mean { 1.0 / gradients as f32 } else { 1.0 };
        let input =
            StepInput { version: round, t, scale, lr_factor: 1.0, parameter_norm: 0.0, gradient_norm: 0.0 };
        let mut target = Target {
            optimizer: &self.optimizer,
            parameters: &mut self.parameters,
            slots: &mut self.slots,
            skipped: &mut self.skipped,
        };
        sums.finish(sum, accumulators, |gradient, absent| {
            target.step(&input, (index, start), gradient, absent);
        });
    }

    /// One optimizer step with what a round has not stepped yet. A mean is taken over `over` gradients, or over as many
    /// as a unit got.
    pub(super) fn step_round(
        &mut self,
        round: &mut Round,
        clock: Clock,
        over: Option<u32>,
        lr_factor: f32,
        accumulators: &mut Accumulators,
    ) {
        self.steps += 1;
        round.add_staged(accumulators);
        let (mut parameter_norm, mut gradient_norm) = (0.0, 0.0);
        if self.optimizer.needs_norms() {
            let units = Units::new(&self.spec, &self.chunks);
            parameter_norm = self.parameter_norm();
            let squared = |(unit, _)| kernels::squared_norm(round.sum(unit, units.range(unit)));
            gradient_norm = round.summed().map(squared).sum::<f64>().sqrt();
        }
        for (unit, count) in round.summed() {
            let units = Units::new(&self.spec, &self.chunks);
            let (range, t) = (units.range(unit), self.steps + units.chunk(unit).arrivals);
            let scale = self.mean_over(over.unwrap_or(count));
            let input = StepInput { version: clock, t, scale, lr_factor, parameter_norm, gradient_norm };
            let place = (unit, range.start);
            self.target().step(&input, place, round.sum(unit, range).into(), round.absent(unit));
        }
    }

    fn target(&mut self) -> Target<'_> {
        Target {
            optimizer: &self.optimizer,
            parameters: &mut self.parameters,
            slots: &mut self.slots,
            skipped: &mut self.skipped,
        }
    }
}

/// What a step changes, and how.
struct Target<'a> {
    optimizer: &'a OptimizerPolicy,
    parameters: &'a mut Buffer,
    slots: &'a mut [Buffer],
    skipped: &'a mut SkippedSteps,
}

impl Target<'_> {
    /// Steps a unit, which begins at `start`, but for absent elements, unless the rule takes zeros for them. A step that
    /// leaves elements out is not counted for them: their next step continues from their last one.
    fn step(
        &mut self,
        input: &StepInput,
        (unit, start): (usize, usize),
        gradient: Gradient<'_>,
        absent: &Absent,
    ) {
        let absent = if self.optimizer.steps_absent() { Absent::NOTHING } else { absent };
        let after = |skipped: u64| StepInput { t: input.t.saturating_sub(skipped).max(1), ..*input };
        if !absent.is_empty() {
            let present = self.skipped.present(unit, gradient.last.len(), absent);
            for (range, skipped) in present {
                self.step_from(&after(skipped), start + range.start, gradient.slice(range));
            }
        } else if self.skipped.has(unit) {
            // Run by run, because every later step of the job comes here: a list of the runs would be memory.
            let mut number = 0;
            while let Some((range, skipped)) = self.skipped.run(unit, number) {
                self.step_from(&after(skipped), start + range.start, gradient.slice(range));
                number += 1;
            }
        } else {
            self.step_from(input, start, gradient);
        }
    }

    /// Steps the elements from `start` on.
    fn step_from(&mut self, input: &StepInput, start: usize, gradient: Gradient<'_>) {
        let range = start..start + gradient.last.len();
        let mut views: [&mut [f32]; MAX_SLOTS] = Default::default();
        let count = self.slots.len();
        for (view, slot) in views.iter_mut().zip(self.slots.iter_mut()) {
            *view = &mut slot.as_mut_slice()[range.clone()];
        }
        let parameters = &mut self.parameters.as_mut_slice()[range];
        self.optimizer.step_with(*input, parameters, gradient, &mut views[..count]);
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

    pub(super) fn extent(self) -> Extent {
        let elements = self.chunks.last().map_or(0, |chunk| chunk.start + chunk.len);
        let units = self.row_width.map_or(self.chunks.len(), |width| elements / width);
        Extent { elements, units, is_sparse: self.row_width.is_some() }
    }

    /// The chunk that a unit is, or is in.
    pub(super) fn chunk(self, unit: usize) -> &'a LocalChunk {
        &self.chunks[self.row_width.map_or(unit, |width| self.chunk_at(unit * width))]
    }

    fn chunk_at(self, element: usize) -> usize {
        self.chunks.partition_point(|chunk| chunk.start <= element) - 1
    }

    /// The elements of a unit.
    pub(super) fn range(self, unit: usize) -> Range<usize> {
        match self.row_width {
            Some(width) => unit * width..(unit + 1) * width,
            None => self.chunks[unit].start..self.chunks[unit].start + self.chunks[unit].len,
        }
    }
}
