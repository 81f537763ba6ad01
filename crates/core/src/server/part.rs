//! One table's part on one shard: its parameters, its optimizer state, its open rounds, its controller.

use super::rounds::{Piece, Round, Staged};
use crate::consistency::{Admit, Advance, Apply, Controller, SyncPolicy};
use crate::kernels;
use crate::limits;
use crate::optimizer::{OptimizerPolicy, StepInput};
use crate::registry::Registry;
use crate::spec::SpecError;
use crate::status::{TableReport, WaitReport};
use crate::store::Buffer;
use crate::table::{Chunk, NonFinite, Order, Reduce, TablePolicy, TableSpec};
use crate::types::{Clock, Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};
use std::collections::BTreeMap;

/// How many waiting pulls a report names.
const REPORTED_WAITS: usize = 8;

/// One of the table's chunks on this shard.
#[derive(Debug, Clone, Copy)]
struct LocalChunk {
    /// Its number in the table.
    number: u32,
    /// First element in the table.
    table_start: u64,
    /// First element on this shard.
    start: usize,
    len: usize,
    /// Optimizer steps taken on it.
    steps: u64,
}

/// A push that is under way.
#[derive(Debug)]
struct Incoming {
    clock: Clock,
    /// Where its gradients go; decided anew when the round they went to closes in the middle of the push.
    admit: Admit,
    /// Frames before this one were taken; a resent push starts again at 0 and is skipped up to here.
    next_part: u32,
    /// A frame of this attempt was refused; the rest of the attempt is ignored.
    refused: bool,
    squared_norm: f64,
    /// Kept whole until the push is complete: for ranked addition, or when the optimizer needs its norm.
    staged: Staged,
}

/// What became of a push frame.
#[derive(Debug, PartialEq)]
pub(super) enum Taken {
    /// More frames of this push are to come, or this one was seen before.
    Partly,
    /// The push is complete: it counts, and is acknowledged. Also for one that was complete before.
    Whole,
}

/// One table's part on one shard.
#[derive(Debug)]
pub(super) struct TablePart {
    pub(super) spec: TableSpec,
    pub(super) controller: Controller,
    optimizer: OptimizerPolicy,
    policy: TablePolicy,
    chunks: Vec<LocalChunk>,
    /// Elements of a unit of contribution: a row, or everything up to the chunk's end.
    width: usize,
    parameters: Buffer,
    slots: Vec<Buffer>,
    rounds: BTreeMap<Clock, Round>,
    /// An emptied round, kept for the next one.
    spare: Option<Round>,
    incoming: BTreeMap<WorkerId, Incoming>,
    initialised_parts: u32,
    initialised: bool,
    pub(super) nonfinite: u64,
}

impl TablePart {
    /// The part of a table that `chunks` (those of this shard, with their numbers) make up.
    pub(super) fn new(
        registry: &Registry,
        spec: TableSpec,
        policy: TablePolicy,
        chunks: impl Iterator<Item = (u32, Chunk)>,
        workers: impl IntoIterator<Item = WorkerId>,
        seed: u64,
    ) -> Result<TablePart, SpecError> {
        let sync = SyncPolicy::parse(&registry.consistency, &policy.sync)?;
        let optimizer = OptimizerPolicy::parse(&registry.optimizer, &policy.optimizer)?;
        let mut elements = 0;
        let chunks: Vec<LocalChunk> = chunks
            .map(|(number, chunk)| {
                let start = elements;
                elements += chunk.len as usize;
                LocalChunk { number, table_start: chunk.start, start, len: chunk.len as usize, steps: 0 }
            })
            .collect();
        let slots = (0..optimizer.slots()).map(|_| Buffer::zeroed(elements)).collect();
        Ok(TablePart {
            width: spec.row_elements() as usize,
            spec,
            controller: Controller::new(sync, workers, seed),
            optimizer,
            policy,
            chunks,
            parameters: Buffer::zeroed(elements),
            slots,
            rounds: BTreeMap::new(),
            spare: None,
            incoming: BTreeMap::new(),
            initialised_parts: 0,
            initialised: false,
            nonfinite: 0,
        })
    }

    pub(super) fn is_initialised(&self) -> bool {
        self.initialised
    }

    /// Takes one frame of initial values. True when they are now complete.
    pub(super) fn initialise(&mut self, header: &Header, values: &[f32]) -> Result<bool, Fault> {
        if self.initialised || header.part < self.initialised_parts {
            return Ok(self.initialised);
        }
        let chunk = self.chunk(header.chunk)?;
        self.expect_length(values.len(), chunk.len)?;
        self.parameters.as_mut_slice()[chunk.start..chunk.start + chunk.len].copy_from_slice(values);
        self.initialised_parts = header.part + 1;
        self.initialised = header.flags.has(Flags::LAST);
        Ok(self.initialised)
    }

    /// Takes one frame of a push. After [`Taken::Whole`] the caller settles the table.
    pub(super) fn push(
        &mut self,
        now: Time,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
    ) -> Result<Taken, Fault> {
        let admit = match self.incoming.get(&worker) {
            Some(incoming) if incoming.clock == header.clock => self.readmit(worker),
            _ => self.begin_push(worker, header.clock)?,
        };
        let last = header.flags.has(Flags::LAST);
        if admit == Admit::Duplicate {
            return Ok(if last { Taken::Whole } else { Taken::Partly });
        }
        let incoming = self.incoming.get_mut(&worker).expect("begun above");
        if header.part == 0 {
            incoming.refused = false;
        }
        if incoming.refused || header.part < incoming.next_part {
            return Ok(Taken::Partly);
        }
        if header.part > incoming.next_part {
            return Err(self.refuse(worker, Cause::Protocol, "frames of a push are missing".into()));
        }
        if let Err(fault) = self.take_piece(worker, admit, header, payload) {
            return Err(self.refuse(worker, fault.cause, fault.message));
        }
        let incoming = self.incoming.get_mut(&worker).expect("begun above");
        incoming.next_part += 1;
        if !last {
            return Ok(Taken::Partly);
        }
        self.complete_push(now, worker);
        Ok(Taken::Whole)
    }

    /// The next advance of the version, with the optimizer step that belongs to it done.
    pub(super) fn advance(&mut self, now: Time) -> Option<Advance> {
        let advance = self.controller.advance(now)?;
        if let Some(mut round) = self.rounds.remove(&advance.closed) {
            self.step_round(&mut round, advance.closed, advance.contributions, advance.lr_factor);
            round.clear();
            self.spare.get_or_insert(round);
        }
        // What is left below the new version are pieces of pushes that were never completed.
        self.rounds = self.rounds.split_off(&advance.version);
        Some(advance)
    }

    /// Switches the consistency model. Rounds that the new model would never close are applied now.
    pub(super) fn set_sync(&mut self, now: Time, sync: SyncPolicy) {
        let flush = sync.model.apply() == Apply::OnArrival;
        self.policy.sync = sync.to_string();
        self.controller.set_policy(now, sync);
        if flush {
            for (clock, mut round) in std::mem::take(&mut self.rounds) {
                let contributions = self.controller.state().n().max(1);
                self.step_round(&mut round, clock, contributions, 1.0);
            }
        }
        for incoming in self.incoming.values_mut() {
            // A push that is half here goes on under the new model from its next frame.
            if let Admit::Round(_) | Admit::Now = incoming.admit {
                incoming.admit =
                    if flush { Admit::Now } else { Admit::Round(self.controller.state().v_train()) };
            }
        }
    }

    /// A worker is gone for good. What it pushed whole stays; a push it did not finish stays only in the units that
    /// had already been added, each with its own count.
    pub(super) fn remove_worker(&mut self, now: Time, worker: WorkerId) {
        self.incoming.remove(&worker);
        self.controller.remove_worker(now, worker);
    }

    /// The chunks in order: number, first byte and length in [`TablePart::parameter_bytes`].
    pub(super) fn chunk_bytes(&self) -> impl ExactSizeIterator<Item = (u32, usize, usize)> + '_ {
        self.chunks.iter().map(|chunk| (chunk.number, chunk.start * 4, chunk.len * 4))
    }

    pub(super) fn parameter_bytes(&self) -> &[u8] {
        self.parameters.as_bytes()
    }

    /// Calls `visit` with the first element and the values of every chunk.
    pub(super) fn for_each_chunk(&self, mut visit: impl FnMut(u64, &[f32])) {
        for chunk in &self.chunks {
            visit(chunk.table_start, &self.parameters.as_slice()[chunk.start..chunk.start + chunk.len]);
        }
    }

    pub(super) fn elements(&self) -> usize {
        self.parameters.len()
    }

    /// Reads the row numbers of a pull; all of them must be on this shard.
    pub(super) fn check_rows(&self, payload: &[u8]) -> Result<Vec<u32>, Fault> {
        if !self.spec.rows || !payload.len().is_multiple_of(4) {
            return Err(self.shape_fault(format!("a pull of single rows in {} bytes", payload.len())));
        }
        let rows: Vec<u32> = payload
            .chunks_exact(4)
            .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect();
        match rows.iter().find(|&&row| self.row_start(row).is_none()) {
            Some(row) => Err(self.shape_fault(format!("row {row}, which this server does not hold"))),
            None => Ok(rows),
        }
    }

    /// The values of rows that [`TablePart::check_rows`] let pass, one after the other.
    pub(super) fn gather_rows(&self, rows: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(rows.len() * self.width * 4);
        for &row in rows {
            let start = self.row_start(row).expect("checked when the pull arrived");
            bytes.extend_from_slice(bytemuck::cast_slice(
                &self.parameters.as_slice()[start..start + self.width],
            ));
        }
        bytes
    }

    fn row_start(&self, row: u32) -> Option<usize> {
        let element = u64::from(row) * self.width as u64;
        let after = self.chunks.partition_point(|chunk| chunk.table_start <= element);
        let chunk = self.chunks[..after].last()?;
        let offset = usize::try_from(element - chunk.table_start).ok()?;
        (offset < chunk.len).then_some(chunk.start + offset)
    }

    pub(super) fn row_width(&self) -> usize {
        self.width
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let rounds: usize = self.rounds.values().chain(&self.spare).map(Round::memory_bytes).sum();
        let staged: usize = self.incoming.values().map(|incoming| incoming.staged.memory_bytes()).sum();
        let slots: usize = self.slots.iter().map(Buffer::memory_bytes).sum();
        self.parameters.memory_bytes() + slots + rounds + staged
    }

    pub(super) fn report(&self, now: Time) -> TableReport {
        let mut waiting: Vec<WaitReport> = self
            .controller
            .waiting()
            .map(|waiting| WaitReport {
                worker: waiting.worker,
                seconds: now.since(waiting.since).as_secs_f64(),
                reason: waiting.reason.to_string(),
            })
            .collect();
        waiting.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        waiting.truncate(REPORTED_WAITS);
        TableReport {
            name: self.spec.name.clone(),
            elements: self.parameters.len() as u64,
            sync: self.controller.policy().to_string(),
            version: self.controller.state().v_train(),
            workers: self.controller.state().n(),
            stats: self.controller.stats().clone(),
            waiting,
        }
    }

    fn begin_push(&mut self, worker: WorkerId, clock: Clock) -> Result<Admit, Fault> {
        let table = &self.spec.name;
        let admit = self.controller.admit(worker, clock);
        match admit {
            Admit::Duplicate => return Ok(admit),
            Admit::TooFarAhead => {
                let version = self.controller.state().v_train();
                let message = format!(
                    "{worker} pushed clock {clock} of table `{table}`, which is at version {version}; at most {} \
                     rounds ahead are kept: wait for a pull before pushing on",
                    limits::MAX_ROUNDS_AHEAD
                );
                return Err(Fault { cause: Cause::TooFarAhead, message });
            }
            Admit::UnknownWorker => {
                let message = format!("{worker} is no member of this job any more (declared dead, or left)");
                return Err(Fault { cause: Cause::NotAMember, message });
            }
            Admit::Now | Admit::Round(_) | Admit::Late => {}
        }
        let incoming = Incoming {
            clock,
            admit,
            next_part: 0,
            refused: false,
            squared_norm: 0.0,
            staged: Staged::default(),
        };
        self.incoming.insert(worker, incoming);
        Ok(admit)
    }

    /// Where the next piece of a push under way goes. A round that closed meanwhile took its earlier pieces with it.
    fn readmit(&mut self, worker: WorkerId) -> Admit {
        let incoming = self.incoming.get_mut(&worker).expect("the push is under way");
        if let Admit::Round(clock) = incoming.admit
            && clock < self.controller.state().v_train()
        {
            incoming.admit = self.controller.admit(worker, incoming.clock);
        }
        incoming.admit
    }

    fn refuse(&mut self, worker: WorkerId, cause: Cause, message: String) -> Fault {
        if let Some(incoming) = self.incoming.get_mut(&worker) {
            incoming.refused = true;
        }
        Fault { cause, message }
    }

    /// Checks one frame's payload and puts it where it belongs.
    fn take_piece(
        &mut self,
        worker: WorkerId,
        admit: Admit,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let chunk = if payload.is_empty() && header.flags.has(Flags::ROWS) {
            // A sparse push that touches nothing here still counts for the worker's progress.
            return Ok(());
        } else {
            self.chunk(header.chunk)?
        };
        let Some(words) = crate::store::floats(payload) else {
            return Err(self.shape_fault(format!("a payload of {} bytes", payload.len())));
        };
        let piece = if header.flags.has(Flags::ROWS) {
            self.rows_piece(chunk, header.rows as usize, payload)?
        } else {
            self.expect_length(words.len(), chunk.len)?;
            Piece::Dense { start: chunk.start, values: words }
        };
        if kernels::all_finite(piece.values()) {
            return self.put_piece(worker, admit, chunk, piece);
        }
        self.nonfinite += 1;
        match self.policy.nonfinite {
            NonFinite::Reject => {
                let message = format!(
                    "the gradient that {worker} pushed for table `{}` at clock {} has NaN or Inf in chunk {}; \
                     it was not applied (nonfinite=reject)",
                    self.spec.name, header.clock, chunk.number
                );
                Err(Fault { cause: Cause::NonFinite, message })
            }
            NonFinite::Clip => {
                let mut clipped = piece.values().to_vec();
                kernels::clip_non_finite(&mut clipped);
                let piece = match piece {
                    Piece::Dense { start, .. } => Piece::Dense { start, values: &clipped },
                    Piece::Rows { start, rows, width, .. } => {
                        Piece::Rows { start, rows, width, values: &clipped }
                    }
                };
                self.put_piece(worker, admit, chunk, piece)
            }
        }
    }

    fn put_piece(
        &mut self,
        worker: WorkerId,
        admit: Admit,
        chunk: LocalChunk,
        piece: Piece<'_>,
    ) -> Result<(), Fault> {
        let incoming = self.incoming.get_mut(&worker).expect("a piece belongs to a push under way");
        if self.controller.policy().model.wants_significance() {
            incoming.squared_norm += kernels::squared_norm(piece.values());
        }
        match admit {
            Admit::Round(_) if self.policy.order == Order::Ranked => incoming.staged.keep(piece),
            Admit::Round(clock) => {
                let units = Units::new(&self.spec, &self.chunks);
                let round = open_round(&mut self.rounds, &mut self.spare, clock, units);
                piece.for_each_range(|start, values| round.add(units.at(start), start, values));
            }
            Admit::Now if self.optimizer.needs_norms() => incoming.staged.keep(piece),
            Admit::Now => self.step_piece(chunk.number, piece),
            Admit::Late | Admit::Duplicate | Admit::TooFarAhead | Admit::UnknownWorker => {}
        }
        Ok(())
    }

    /// Applies one piece at once: every gradient is a step of its own, scaled to its worker's share.
    fn step_piece(&mut self, chunk_number: u32, piece: Piece<'_>) {
        let index = self.chunk_index(chunk_number).expect("checked when the piece was taken");
        self.chunks[index].steps += 1;
        let input = self.arrival_input(self.chunks[index].steps, 0.0, 0.0);
        piece.for_each_range(|start, values| self.step_range(&input, start, values));
    }

    fn complete_push(&mut self, now: Time, worker: WorkerId) {
        self.readmit(worker);
        let incoming = self.incoming.remove(&worker).expect("a push completes once");
        let parameter_norm = || kernels::squared_norm(self.parameters.as_slice()).sqrt();
        let significance = self
            .controller
            .policy()
            .model
            .wants_significance()
            .then(|| incoming.squared_norm.sqrt() / parameter_norm().max(f64::MIN_POSITIVE));
        if incoming.admit == Admit::Now && !incoming.staged.is_empty() {
            let squared: f64 =
                incoming.staged.ranges().map(|(_, values)| kernels::squared_norm(values)).sum();
            let parameter_norm = parameter_norm();
            for chunk in &mut self.chunks {
                chunk.steps += 1;
            }
            let steps = self.chunks.first().map_or(1, |chunk| chunk.steps);
            let input = self.arrival_input(steps, parameter_norm, squared.sqrt());
            for (start, values) in incoming.staged.ranges() {
                self.step_range(&input, start, values);
            }
        }
        self.controller.push(now, worker, incoming.clock, incoming.admit, significance);
        if let Admit::Round(clock) = incoming.admit
            && !incoming.staged.is_empty()
        {
            let units = Units::new(&self.spec, &self.chunks);
            open_round(&mut self.rounds, &mut self.spare, clock, units).stage(worker, incoming.staged);
        }
    }

    fn arrival_input(&self, t: u64, parameter_norm: f64, gradient_norm: f64) -> StepInput {
        let scale = match self.policy.reduce {
            Reduce::Mean => 1.0 / self.controller.state().n().max(1) as f32,
            Reduce::Sum => 1.0,
        };
        let version = self.controller.state().v_train();
        StepInput { version, t, scale, lr_factor: 1.0, parameter_norm, gradient_norm }
    }

    /// One optimizer step with a round's sum.
    fn step_round(&mut self, round: &mut Round, clock: Clock, contributions: u32, lr_factor: f32) {
        for chunk in &mut self.chunks {
            chunk.steps += 1;
        }
        let steps = self.chunks.first().map_or(1, |chunk| chunk.steps);
        let units = Units::new(&self.spec, &self.chunks);
        for staged in round.take_staged().values() {
            for (start, values) in staged.ranges() {
                round.add(units.at(start), start, values);
            }
        }
        let (mut parameter_norm, mut gradient_norm) = (0.0, 0.0);
        if self.optimizer.needs_norms() {
            parameter_norm = kernels::squared_norm(self.parameters.as_slice()).sqrt();
            let squared = |(unit, _)| kernels::squared_norm(round.sum(units.range(unit)));
            gradient_norm = round.touched().map(squared).sum::<f64>().sqrt();
        }
        for (unit, count) in round.touched() {
            // A row that few workers touched is still a mean over all of them; a chunk counts its own gradients.
            let divisor = if self.spec.rows { contributions } else { count };
            let scale = match self.policy.reduce {
                Reduce::Mean => 1.0 / divisor.max(1) as f32,
                Reduce::Sum => 1.0,
            };
            let input =
                StepInput { version: clock, t: steps, scale, lr_factor, parameter_norm, gradient_norm };
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

    fn chunk_index(&self, number: u32) -> Option<usize> {
        self.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok()
    }

    fn chunk(&self, number: u32) -> Result<LocalChunk, Fault> {
        match self.chunk_index(number) {
            Some(index) => Ok(self.chunks[index]),
            None => Err(self.shape_fault(format!("chunk {number}, which this server does not hold"))),
        }
    }

    fn rows_piece<'a>(&self, chunk: LocalChunk, rows: usize, payload: &'a [u8]) -> Result<Piece<'a>, Fault> {
        let expected = rows.checked_mul((1 + self.width) * 4);
        if !self.spec.rows || expected != Some(payload.len()) {
            return Err(self.shape_fault(format!("{rows} rows in {} bytes", payload.len())));
        }
        let (numbers, values) = payload.split_at(rows * 4);
        let numbers: &[u32] = bytemuck::try_cast_slice(numbers)
            .map_err(|_| self.shape_fault("unaligned row numbers".into()))?;
        let ascending = numbers.windows(2).all(|pair| pair[0] < pair[1]);
        let in_range = numbers.last().is_none_or(|&row| (row as usize) < chunk.len / self.width);
        if !ascending || !in_range {
            return Err(self.shape_fault("row numbers out of order or out of range".into()));
        }
        let values = crate::store::floats(values).expect("four-byte words follow four-byte words");
        Ok(Piece::Rows { start: chunk.start, rows: numbers, width: self.width, values })
    }

    fn expect_length(&self, found: usize, expected: usize) -> Result<(), Fault> {
        if found == expected {
            return Ok(());
        }
        Err(self.shape_fault(format!("{found} elements where a chunk has {expected}")))
    }

    fn shape_fault(&self, found: String) -> Fault {
        let message =
            format!("table `{}` has shape {:?} of f32; got {found}", self.spec.name, self.spec.shape);
        Fault { cause: Cause::Shape, message }
    }
}

/// How elements of a part map to units of contribution: rows of a sparse table, chunks of a dense one.
#[derive(Debug, Clone, Copy)]
struct Units<'a> {
    row_width: Option<usize>,
    chunks: &'a [LocalChunk],
}

impl<'a> Units<'a> {
    fn new(spec: &TableSpec, chunks: &'a [LocalChunk]) -> Units<'a> {
        Units { row_width: spec.rows.then(|| spec.row_elements() as usize), chunks }
    }

    fn elements(self) -> usize {
        self.chunks.last().map_or(0, |chunk| chunk.start + chunk.len)
    }

    fn count(self) -> usize {
        self.row_width.map_or(self.chunks.len(), |width| self.elements() / width)
    }

    /// The unit that an element belongs to.
    fn at(self, element: usize) -> usize {
        match self.row_width {
            Some(width) => element / width,
            None => self.chunks.partition_point(|chunk| chunk.start <= element) - 1,
        }
    }

    /// The elements of a unit.
    fn range(self, unit: usize) -> std::ops::Range<usize> {
        match self.row_width {
            Some(width) => unit * width..(unit + 1) * width,
            None => self.chunks[unit].start..self.chunks[unit].start + self.chunks[unit].len,
        }
    }
}

/// The round of a clock, with memory of an earlier one where there is some.
fn open_round<'a>(
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
