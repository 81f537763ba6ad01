//! A table's parameters on one shard, and the optimizer that steps them.

use super::gradient::{CellGradient, Staged};
use super::norms::LayerNorms;
use super::restored::Restored;
use super::round::Round;
use super::skipped::SkippedSteps;
use super::touched::Touched;
use crate::absence::Absent;
use crate::checkpoint::{CutRange, SkippedRun, TableCut};
use crate::intake::GradientFrame;
use crate::kernels;
use crate::limits;
use crate::optimizer::{Gradient, MAX_SLOTS, OptimizerPolicy, StepInput};
use crate::policy::Reduce;
use crate::server::accumulators::Accumulators;
use crate::server::image::{ChunkImage, Floats, StoreImage};
use crate::store::{Buffer, floats};
use crate::table::{Layout, LocalChunk};
use crate::types::Clock;
use crate::wire::frame::Piece;
use crate::wire::{Cause, Fault};
use std::ops::Range;

/// Parameters, optimizer state, and how often each was stepped.
#[derive(Debug)]
pub(super) struct Store {
    optimizer: OptimizerPolicy,
    reduce: Reduce,
    parameters: Buffer,
    slots: Vec<Buffer>,
    /// Where the optimizer needs them.
    norms: Option<LayerNorms>,
    /// Optimizer steps on everything: of rounds that are closed, or of gradients that were applied whole.
    steps: u64,
    /// Steps that belong to no round: of gradients that were applied when they arrived, or when the model was switched.
    steps_outside_rounds: u64,
    /// By chunk: optimizer steps that single gradients were on it.
    arrivals: Vec<u64>,
    /// Of these, the ones that some elements were left out of, since no worker had a gradient for them.
    skipped: SkippedSteps,
    /// Chunks that have their initial values, from the first on.
    initialised_chunks: usize,
    /// Of a table of rows that is broadcast: the rows that the next version has to bring.
    touched: Option<Touched>,
}

/// The table's state at the time of a step that a single gradient is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) version: Clock,
    /// Its worker's share of a mean.
    pub(super) share: f32,
}

/// The step that closes a round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Closing {
    pub(super) round: Clock,
    pub(super) over: Over,
    pub(super) lr_factor: f32,
}

/// The weight that a mean is taken over.
#[derive(Debug, Clone, Copy)]
pub(super) enum Over {
    /// That of the gradients which a cell got.
    Cell,
    /// This one.
    Weight(f32),
    /// That of a gradient from each of so many workers.
    Workers(u32),
}

/// A cell that has all its gradients before its round closes.
#[derive(Debug, Clone, Copy)]
pub(super) struct EarlyStep {
    pub(super) round: Clock,
    /// The place of the chunk that the cell is, or is in.
    pub(super) chunk: usize,
    /// The weight that a mean is taken over.
    pub(super) over: f32,
}

impl Store {
    /// Zeros for a table of this layout. The error says how much memory there is not.
    pub(super) fn new(layout: &Layout, optimizer: OptimizerPolicy, reduce: Reduce) -> Result<Store, String> {
        let elements = layout.elements();
        let take = || {
            Buffer::try_zeroed(elements).ok_or_else(|| {
                let megabytes = (1 + optimizer.slots()) as u64 * elements as u64 * 4 / 1_000_000;
                format!("{megabytes} MB of parameters and optimizer state do not fit this server's memory")
            })
        };
        Ok(Store {
            parameters: take()?,
            slots: (0..optimizer.slots()).map(|_| take()).collect::<Result<_, _>>()?,
            norms: optimizer.needs_norms().then(|| LayerNorms::new(layout)),
            optimizer,
            reduce,
            steps: 0,
            steps_outside_rounds: 0,
            arrivals: vec![0; layout.chunks().len()],
            skipped: SkippedSteps::default(),
            initialised_chunks: 0,
            touched: None,
        })
    }

    pub(super) fn image(&self, layout: &Layout) -> StoreImage {
        let chunks = layout.chunks().iter().zip(&self.arrivals);
        let chunk = |(chunk, arrivals): (&LocalChunk, &u64)| ChunkImage {
            start: chunk.table_start,
            len: chunk.len as u64,
            arrivals: *arrivals,
        };
        StoreImage {
            chunks: chunks.map(chunk).collect(),
            initialised_chunks: self.initialised_chunks as u32,
            parameters: self.parameters.as_slice().into(),
            slots: self.slots.iter().map(|slot| slot.as_slice().into()).collect(),
            steps: self.steps,
            steps_outside_rounds: self.steps_outside_rounds,
            skipped: self.skipped.clone(),
            touched: self.touched.as_ref().map(|touched| touched.words().to_vec()),
        }
    }

    /// Becomes the store that an image was made of. The error says why it cannot; the store is then of no use.
    pub(super) fn restore(&mut self, layout: &Layout, image: StoreImage) -> Result<(), String> {
        let is_it = |(chunk, image): (&LocalChunk, &ChunkImage)| {
            (chunk.table_start, chunk.len as u64) == (image.start, image.len)
        };
        if image.chunks.len() != self.arrivals.len() || !layout.chunks().iter().zip(&image.chunks).all(is_it)
        {
            return Err("the image is of other chunks".into());
        }
        let is_whole = |values: &Floats| values.len() == layout.elements();
        if !is_whole(&image.parameters) || !image.slots.iter().all(is_whole) {
            return Err("the image lacks parameters, or optimizer state".into());
        }
        if image.slots.len() != self.slots.len() {
            let (found, expected) = (image.slots.len(), self.slots.len());
            return Err(format!(
                "the image has {found} arrays of optimizer state, and the optimizer {expected}"
            ));
        }
        if image.initialised_chunks as usize > self.arrivals.len() {
            return Err("more chunks have initial values than there are".into());
        }
        let counts = image.chunks.iter().map(|chunk| chunk.arrivals);
        if counts.chain([image.steps, image.steps_outside_rounds]).any(|count| count > limits::MAX_CLOCK) {
            return Err("a number of steps is out of range".into());
        }
        image.skipped.check(|chunk| (!layout.is_sparse()).then_some(layout.chunks().get(chunk)?.len))?;
        if let Some(touched) = &mut self.touched {
            let words = image.touched.unwrap_or_else(|| touched.words().to_vec());
            let restored = Touched::from_words(words, layout.cells());
            *touched = restored.ok_or("the image notes other rows than there are")?;
        }
        self.parameters.as_mut_slice().copy_from_slice(&image.parameters);
        for (slot, values) in self.slots.iter_mut().zip(&image.slots) {
            slot.as_mut_slice().copy_from_slice(values);
        }
        self.arrivals = image.chunks.iter().map(|chunk| chunk.arrivals).collect();
        self.initialised_chunks = image.initialised_chunks as usize;
        (self.steps, self.steps_outside_rounds) = (image.steps, image.steps_outside_rounds);
        self.skipped = image.skipped;
        Ok(())
    }

    /// Notes from now on which rows were stepped.
    pub(super) fn noting_rows(self, rows: usize) -> Store {
        Store { touched: Some(Touched::new(rows)), ..self }
    }

    /// The parameters, and the rows that were stepped and not taken yet, where these are noted.
    pub(super) fn parameters_and_touched(&mut self) -> (&[f32], Option<&mut Touched>) {
        (self.parameters.as_slice(), self.touched.as_mut())
    }

    /// Whether all initial values are here.
    #[inline]
    pub(super) fn is_initialised(&self) -> bool {
        self.initialised_chunks == self.arrivals.len()
    }

    /// Initial values that are not complete are to be sent from the beginning.
    pub(super) fn forget_incomplete_values(&mut self) {
        if !self.is_initialised() {
            self.initialised_chunks = 0;
        }
    }

    /// Takes one frame of initial values. What was taken before is ignored.
    pub(super) fn initialise(&mut self, layout: &Layout, piece: Piece, payload: &[u8]) -> Result<(), Fault> {
        let sequence = piece.sequence as usize;
        if self.is_initialised() || sequence < self.initialised_chunks {
            return Ok(());
        }
        if sequence > self.initialised_chunks {
            let message = format!("frames of the initial values of table `{}` are missing", layout.name());
            return Err(Fault { cause: Cause::Protocol, message });
        }
        let chunk = layout.chunk_in_turn(piece)?;
        let Some(values) = floats(payload).filter(|values| values.len() == chunk.len) else {
            let found = format!("{} bytes where a chunk has {}", payload.len(), chunk.len * 4);
            return Err(layout.shape_fault(found));
        };
        self.parameters.as_mut_slice()[chunk.range()].copy_from_slice(values);
        self.initialised_chunks += 1;
        Ok(())
    }

    pub(super) fn parameters(&self) -> &[f32] {
        self.parameters.as_slice()
    }

    pub(super) fn parameter_bytes(&self) -> &[u8] {
        self.parameters.as_bytes()
    }

    /// Calls `visit` with the first element, counted in the table, and the values of every chunk.
    pub(super) fn for_each_chunk(&self, layout: &Layout, mut visit: impl FnMut(u64, &[f32])) {
        for chunk in layout.chunks() {
            visit(chunk.table_start, &self.parameters.as_slice()[chunk.range()]);
        }
    }

    /// The values of rows that are all on this shard, one after the other.
    pub(super) fn gather_rows(&self, layout: &Layout, rows: &[u32]) -> Vec<u8> {
        let width = layout.row_width();
        let mut bytes = Vec::with_capacity(rows.len() * width * 4);
        for &row in rows {
            let start = layout.row_start(row).expect("checked when the pull arrived");
            bytes.extend_from_slice(bytemuck::cast_slice(&self.parameters.as_slice()[start..start + width]));
        }
        bytes
    }

    /// A copy of everything, for a checkpoint. The error says that there is no memory for it.
    pub(super) fn cut(&self, layout: &Layout, version: Clock) -> Result<TableCut, String> {
        let copy = |buffer: &Buffer| {
            let mut values = Vec::new();
            values
                .try_reserve_exact(buffer.len())
                .map_err(|_| format!("there is no memory for a copy of table `{}`", layout.name()))?;
            values.extend_from_slice(buffer.as_slice());
            Ok::<Vec<f32>, String>(values)
        };
        let mut ranges: Vec<CutRange> = Vec::new();
        for (chunk, arrivals) in layout.chunks().iter().zip(&self.arrivals) {
            let (start, len, steps) = (chunk.table_start, chunk.len as u64, self.steps + arrivals);
            match ranges.last_mut() {
                Some(last) if last.elements().end == start && last.steps == steps => last.len += len,
                _ => ranges.push(CutRange { start, len, steps }),
            }
        }
        let skipped = self.skipped.iter().map(|(cell, range, skipped)| SkippedRun {
            start: layout.table_start_of_cell(cell) + range.start as u64,
            len: range.len() as u64,
            skipped,
        });
        Ok(TableCut {
            name: layout.name().to_owned(),
            shape: layout.spec().shape.clone(),
            version,
            ranges,
            skipped: skipped.collect(),
            parameters: copy(&self.parameters)?,
            slots: self.slots.iter().map(copy).collect::<Result<_, _>>()?,
        })
    }

    /// Takes the place of initial values: pieces of a checkpoint, which cover everything that is here. The error says what does not fit.
    pub(super) fn take_pieces(&mut self, layout: &Layout, pieces: &[TableCut]) -> Result<(), String> {
        let restored = Restored::new(layout.name(), pieces, self.slots.len())?;
        let mut most = Vec::with_capacity(layout.chunks().len());
        for chunk in layout.chunks() {
            let elements = chunk.table_start..chunk.table_start + chunk.len as u64;
            let mut steps = 0;
            for stretch in restored.stretches(elements) {
                let stretch = stretch?;
                let at = chunk.start + (stretch.start - chunk.table_start) as usize;
                let (here, there) = (at..at + stretch.len, stretch.offset..stretch.offset + stretch.len);
                let piece = stretch.piece;
                self.parameters.as_mut_slice()[here.clone()]
                    .copy_from_slice(&piece.parameters[there.clone()]);
                for (slot, saved) in self.slots.iter_mut().zip(&piece.slots) {
                    slot.as_mut_slice()[here.clone()].copy_from_slice(&saved[there.clone()]);
                }
                steps = steps.max(stretch.steps);
            }
            most.push(steps);
        }
        self.steps = most.iter().copied().min().unwrap_or(0);
        self.arrivals = most.iter().map(|steps| steps - self.steps).collect();
        self.skipped = SkippedSteps::default();
        for cell in 0..layout.cells() {
            let (start, range) = (layout.table_start_of_cell(cell), layout.cell_range(cell));
            let most = most[layout.chunk_of_cell(cell)];
            let runs = restored.stretches(start..start + range.len() as u64).map(|stretch| {
                let stretch = stretch?;
                let end = (stretch.start - start) as usize + stretch.len;
                Ok((end, most - stretch.steps))
            });
            let runs = runs.collect::<Result<Vec<(usize, u64)>, String>>()?;
            if runs.iter().any(|(_, skipped)| *skipped > 0) {
                self.skipped.set(cell, runs);
            }
        }
        self.initialised_chunks = self.arrivals.len();
        Ok(())
    }

    pub(super) fn optimizer(&self) -> &OptimizerPolicy {
        &self.optimizer
    }

    /// Steps with other parameters of the same optimizer from now on. Whether it can take over.
    pub(super) fn set_optimizer(&mut self, optimizer: OptimizerPolicy) -> bool {
        let can_follow = optimizer.can_follow(&self.optimizer);
        if can_follow {
            self.optimizer = optimizer;
        }
        can_follow
    }

    pub(super) fn reduce(&self) -> Reduce {
        self.reduce
    }

    /// How many steps belong to no round: these change parameters without a new version.
    pub(super) fn steps_outside_rounds(&self) -> u64 {
        self.steps_outside_rounds
    }

    /// Of all the table's parameters on this shard.
    pub(super) fn parameter_norm(&self) -> f64 {
        kernels::squared_norm(self.parameters.as_slice()).sqrt()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let slots: usize = self.slots.iter().map(Buffer::memory_bytes).sum();
        let norms = self.norms.as_ref().map_or(0, LayerNorms::memory_bytes);
        let touched = self.touched.as_ref().map_or(0, Touched::memory_bytes);
        self.parameters.memory_bytes() + slots + self.skipped.memory_bytes() + norms + touched
    }

    /// Applies one frame's gradient at once: every gradient is a step of its own, scaled to its worker's share.
    pub(super) fn step_at_once(
        &mut self,
        gradient: GradientFrame<'_>,
        arrival: Arrival,
        accumulators: &mut Accumulators,
    ) {
        let chunk = gradient.index();
        self.arrivals[chunk] += 1;
        self.steps_outside_rounds += 1;
        if let Some(norms) = &mut self.norms {
            // A sum that was made under another model and came after the switch: the rest of its layer is in other frames, and may not come. Its
            // norm is that of what is here.
            norms.begin(self.parameters.as_slice());
            CellGradient::for_each(gradient, |CellGradient { start, values, .. }| {
                let mut whole = vec![0.0; values.len()];
                values.copy_to(&mut whole);
                norms.add(start, &whole);
            });
        }
        let input = self.arrival_input(self.steps + self.arrivals[chunk], arrival);
        CellGradient::for_each(gradient, |CellGradient { cell, start, values, absent, .. }| {
            accumulators.with_whole(values, |last| {
                self.step(&input, cell, start, Gradient { before: None, last }, absent);
            });
        });
    }

    /// Applies one worker's whole gradient at once, now that the norms of its layers are known.
    pub(super) fn step_staged(
        &mut self,
        layout: &Layout,
        staged: &Staged,
        arrival: Arrival,
        accumulators: &mut Accumulators,
    ) {
        self.steps += 1;
        self.steps_outside_rounds += 1;
        if let Some(norms) = &mut self.norms {
            norms.begin(self.parameters.as_slice());
            staged.for_each_piece(|start, values| norms.add(start, values));
        }
        staged.for_each(|CellGradient { cell, start, values, absent, .. }| {
            let arrivals = self.arrivals[layout.chunk_of_cell(cell)];
            let input = self.arrival_input(self.steps + arrivals, arrival);
            accumulators.with_whole(values, |last| {
                self.step(&input, cell, start, Gradient { before: None, last }, absent);
            });
        });
    }

    fn arrival_input(&self, t: u64, Arrival { version, share }: Arrival) -> StepInput {
        let scale = match self.reduce {
            Reduce::Mean => share,
            Reduce::Sum => 1.0,
        };
        StepInput { version, t, scale, lr_factor: 1.0, parameter_norm: 0.0, gradient_norm: 0.0 }
    }

    /// The factor of a sum of gradients.
    fn mean_over(&self, weight: f32) -> f32 {
        match self.reduce {
            Reduce::Mean if weight > 0.0 => 1.0 / weight,
            Reduce::Mean => 1.0,
            Reduce::Sum => 1.0,
        }
    }

    /// Steps a cell with the last of its gradients, which is then in cache, and is not stored.
    pub(super) fn step_early(
        &mut self,
        sums: &mut Round,
        last: CellGradient<'_>,
        early: EarlyStep,
        accumulators: &mut Accumulators,
    ) {
        let input = StepInput {
            version: early.round,
            t: self.steps + 1 + self.arrivals[early.chunk],
            scale: self.mean_over(early.over),
            lr_factor: 1.0,
            parameter_norm: 0.0,
            gradient_norm: 0.0,
        };
        let CellGradient { cell, start, .. } = last;
        sums.finish(last, accumulators, |gradient, absent| self.step(&input, cell, start, gradient, absent));
    }

    /// One optimizer step with what a round has not stepped yet.
    pub(super) fn step_round(
        &mut self,
        layout: &Layout,
        round: &mut Round,
        closing: Closing,
        accumulators: &mut Accumulators,
    ) {
        self.steps += 1;
        round.add_staged(accumulators);
        if let Some(norms) = &mut self.norms {
            norms.begin(self.parameters.as_slice());
            for (cell, _) in round.summed() {
                let range = layout.cell_range(cell);
                norms.add(range.start, round.sum(cell, range));
            }
        }
        for (cell, weight) in round.summed() {
            let range = layout.cell_range(cell);
            let over = match closing.over {
                Over::Cell => weight,
                Over::Weight(weight) => weight,
                Over::Workers(workers) => workers.max(1) as f32 * round.mean_weight(cell),
            };
            let input = StepInput {
                version: closing.round,
                t: self.steps + self.arrivals[layout.chunk_of_cell(cell)],
                scale: self.mean_over(over),
                lr_factor: closing.lr_factor,
                parameter_norm: 0.0,
                gradient_norm: 0.0,
            };
            let start = range.start;
            self.step(&input, cell, start, round.sum(cell, range).into(), round.absent(cell));
        }
    }

    /// The same with a round that is never closed.
    pub(super) fn step_outside_rounds(
        &mut self,
        layout: &Layout,
        round: &mut Round,
        closing: Closing,
        accumulators: &mut Accumulators,
    ) {
        self.steps_outside_rounds += 1;
        self.step_round(layout, round, closing, accumulators);
    }

    /// Steps a cell, which begins at `start`, but for absent elements, unless the rule takes zeros for them. A step that
    /// leaves elements out is not counted for them: their next step continues from their last one.
    fn step(
        &mut self,
        input: &StepInput,
        cell: usize,
        start: usize,
        gradient: Gradient<'_>,
        absent: &Absent,
    ) {
        if let Some(touched) = &mut self.touched {
            touched.mark(cell);
        }
        let absent = if self.optimizer.steps_absent() { Absent::NOTHING } else { absent };
        let after = |skipped: u64| StepInput { t: input.t.saturating_sub(skipped).max(1), ..*input };
        if !absent.is_empty() {
            let present = self.skipped.present(cell, gradient.last.len(), absent);
            for (range, skipped) in present {
                self.step_from(&after(skipped), start + range.start, gradient.slice(range));
            }
        } else if self.skipped.has(cell) {
            // Run by run, because every later step of the job comes here: a list of the runs would be memory.
            let mut number = 0;
            while let Some((range, skipped)) = self.skipped.run(cell, number) {
                self.step_from(&after(skipped), start + range.start, gradient.slice(range));
                number += 1;
            }
        } else {
            self.step_from(input, start, gradient);
        }
    }

    /// Steps the elements from `start` on, each layer with its norms where the optimizer needs them.
    fn step_from(&mut self, input: &StepInput, start: usize, gradient: Gradient<'_>) {
        let Store { optimizer, parameters, slots, norms, .. } = self;
        let mut step = |input: StepInput, start: usize, gradient: Gradient<'_>| {
            let range: Range<usize> = start..start + gradient.last.len();
            let mut views: [&mut [f32]; MAX_SLOTS] = Default::default();
            let count = slots.len();
            for (view, slot) in views.iter_mut().zip(slots.iter_mut()) {
                *view = &mut slot.as_mut_slice()[range.clone()];
            }
            optimizer.step_with(input, &mut parameters.as_mut_slice()[range], gradient, &mut views[..count]);
        };
        match norms {
            None => step(*input, start, gradient),
            Some(norms) => norms.for_each_layer(input, start, gradient, step),
        }
    }
}
