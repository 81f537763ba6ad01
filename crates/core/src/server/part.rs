//! One table's part on one shard: its parameters, its optimizer state, its open rounds, its controller.

mod ahead;
mod answer_codecs;
mod decoding;
mod push;
mod skipped;
mod step;
mod sum;
mod under_way;

pub(super) use push::Taken;

use super::rounds::{Accumulators, Round, Rounds};
use crate::consistency::{Admit, Advance, Apply, Controller, SyncPolicy, Waiting};
use crate::limits;
use crate::optimizer::OptimizerPolicy;
use crate::policy::{Axis, Policy};
use crate::registry::Registry;
use crate::role::{Body, Frame};
use crate::spec::SpecError;
use crate::status::{TableReport, WaitReport};
use crate::store::{Buffer, Place, floats};
use crate::table::{Chunk, TableSpec};
use crate::types::{AggregatorId, Clock, NodeId, Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};
use ahead::AnswersAhead;
use answer_codecs::AnswerCodecs;
use decoding::PushDecoders;
use skipped::SkippedSteps;
use under_way::UnderWay;

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
    /// Optimizer steps that single gradients were on it.
    arrivals: u64,
}

/// What an answer needs to know of a chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkView {
    /// Its number in the table.
    pub(super) number: u32,
    /// The version of its parameters.
    pub(super) version: Clock,
    /// Its first byte in the table.
    pub(super) table_byte: u64,
    /// Its first byte in [`TablePart::parameter_bytes`].
    pub(super) start: usize,
    /// Its bytes.
    pub(super) len: usize,
}

impl ChunkView {
    /// The frame of an answer that brings this chunk to somebody who wants the table at `landing`.
    pub(super) fn frame(&self, mut header: Header, table: usize, landing: Option<Place>) -> Frame {
        header.chunk = self.number;
        header.version = self.version;
        header.payload_bytes = self.len as u32;
        let place = landing.and_then(|place| place.after(self.table_byte));
        header.landing = place.map_or(0, Place::to_bits);
        let body = Body::Stored { buffer: table as u64, start: self.start, len: self.len };
        Frame { header, body }
    }
}

/// One table's part on one shard.
#[derive(Debug)]
pub(super) struct TablePart {
    pub(super) spec: TableSpec,
    pub(super) controller: Controller,
    optimizer: OptimizerPolicy,
    policy: Policy,
    chunks: Vec<LocalChunk>,
    /// Elements of a unit of contribution: a row, or everything up to the chunk's end.
    width: usize,
    parameters: Buffer,
    slots: Vec<Buffer>,
    rounds: Rounds,
    /// Optimizer steps on everything: of rounds that are closed, or of gradients that were applied whole.
    steps: u64,
    /// Of these, the ones that some elements were left out of, since nobody had a gradient for them.
    skipped: SkippedSteps,
    incoming: UnderWay,
    pub(super) ahead: AnswersAhead,
    decoders: PushDecoders,
    answer_codecs: AnswerCodecs,
    /// The first round whose sums can hold nothing of a worker that has left.
    sums_are_regular_from: Clock,
    /// Chunks that have their initial values, from the first on.
    initialised_chunks: usize,
    pub(super) nonfinite: u64,
}

impl TablePart {
    /// The part of a table that `chunks` (those of this shard, with their numbers) make up.
    pub(super) fn new(
        registry: &Registry,
        spec: TableSpec,
        policy: Policy,
        chunks: impl Iterator<Item = (u32, Chunk)>,
        workers: impl IntoIterator<Item = WorkerId>,
        seed: u64,
    ) -> Result<TablePart, String> {
        let text = |error: SpecError| error.to_string();
        let sync = policy.sync(registry).map_err(text)?;
        let optimizer = policy.optimizer(registry).map_err(text)?;
        let decoders = PushDecoders::new(registry, &spec, &policy)?;
        let answer_codecs = AnswerCodecs::new(registry, &spec, &policy)?;
        let mut elements = 0;
        let chunks: Vec<LocalChunk> = chunks
            .map(|(number, chunk)| {
                let start = elements;
                elements += chunk.len as usize;
                LocalChunk { number, table_start: chunk.start, start, len: chunk.len as usize, arrivals: 0 }
            })
            .collect();
        let take = || {
            Buffer::try_zeroed(elements).ok_or_else(|| {
                let megabytes = (1 + optimizer.slots()) as u64 * elements as u64 * 4 / 1_000_000;
                format!("{megabytes} MB of parameters and optimizer state do not fit this server's memory")
            })
        };
        let parameters = take()?;
        let slots = (0..optimizer.slots()).map(|_| take()).collect::<Result<_, _>>()?;
        Ok(TablePart {
            width: spec.row_elements() as usize,
            spec,
            controller: Controller::new(sync, workers, seed),
            optimizer,
            policy,
            chunks,
            parameters,
            slots,
            rounds: Rounds::default(),
            steps: 0,
            skipped: SkippedSteps::default(),
            incoming: UnderWay::default(),
            ahead: AnswersAhead::default(),
            decoders,
            answer_codecs,
            sums_are_regular_from: 0,
            initialised_chunks: 0,
            nonfinite: 0,
        })
    }

    pub(super) fn is_initialised(&self) -> bool {
        self.initialised_chunks == self.chunks.len()
    }

    /// Takes one frame of initial values. True when they are now complete.
    pub(super) fn initialise(&mut self, header: &Header, payload: &[u8]) -> Result<bool, Fault> {
        let done = self.initialised_chunks;
        if self.is_initialised() || (header.part as usize) < done {
            return Ok(self.is_initialised());
        }
        if header.part as usize > done {
            let message = format!("frames of the initial values of table `{}` are missing", self.spec.name);
            return Err(Fault { cause: Cause::Protocol, message });
        }
        let chunk = self.chunk_in_turn(header)?;
        let values = self.chunk_values(chunk, payload)?;
        self.parameters.as_mut_slice()[chunk.start..chunk.start + chunk.len].copy_from_slice(values);
        self.initialised_chunks += 1;
        Ok(self.is_initialised())
    }

    /// The next advance of the version, with the optimizer step that belongs to it done.
    pub(super) fn advance(&mut self, now: Time, accumulators: &mut Accumulators) -> Option<Advance> {
        let advance = self.controller.advance(now)?;
        if let Some(mut round) = self.rounds.take(advance.closed) {
            // A row that few workers touched is still a mean over all of them; a chunk counts its own gradients.
            let over = self.spec.rows.then_some(advance.contributions);
            self.step_round(&mut round, advance.closed, over, advance.lr_factor, accumulators);
            self.rounds.keep(round, accumulators);
        }
        // What is left below the new version are pieces of pushes that were never completed.
        self.rounds.drop_before(advance.version, accumulators);
        Some(advance)
    }

    /// Steps with other parameters of the same optimizer from now on. Whether it can take over.
    pub(super) fn set_optimizer(&mut self, optimizer: OptimizerPolicy) -> bool {
        let can_follow = optimizer.can_follow(&self.optimizer);
        if can_follow {
            self.policy.set(Axis::Optimizer, optimizer.to_string()).unwrap();
            self.optimizer = optimizer;
        }
        can_follow
    }

    /// Switches the consistency model. Rounds that the new model would never close are applied now.
    pub(super) fn set_sync(&mut self, now: Time, sync: SyncPolicy, accumulators: &mut Accumulators) {
        let flush = sync.model.apply() == Apply::OnArrival;
        self.policy.set(Axis::Sync, sync.to_string()).unwrap();
        self.controller.set_policy(now, sync);
        if flush {
            // Each gradient weighs what it would have weighed under the new model.
            let workers = self.controller.state().n();
            while let Some((clock, mut round)) = self.rounds.take_first() {
                self.step_round(&mut round, clock, Some(workers), 1.0, accumulators);
                self.rounds.keep(round, accumulators);
            }
        }
        self.rounds.iter_mut().for_each(Round::reopen);
        // What was stepped may be stepped again in the same round: answers begin anew.
        self.ahead = AnswersAhead::default();
        for incoming in self.incoming.iter_mut() {
            // A push that is half here goes on under the new model from its next frame; what was late stays late.
            if incoming.admit != Admit::Late {
                incoming.admit = self.controller.admit(incoming.worker, incoming.clock);
            }
        }
    }

    /// A worker is gone for good. What it pushed whole stays; a push it did not finish stays only in the units that
    /// had already been added, each with its own count.
    pub(super) fn remove_worker(&mut self, worker: WorkerId) {
        let under_way = self.incoming.remove(worker).map(|push| push.clock);
        self.forget_answers(worker);
        self.rounds.iter_mut().for_each(Round::disturb);
        self.sums_are_regular_from = self.controller.state().v_train() + limits::MAX_ROUNDS_AHEAD + 1;
        self.controller.remove_worker(worker, under_way);
    }

    /// The chunks in order.
    pub(super) fn chunks(&self) -> impl ExactSizeIterator<Item = ChunkView> + '_ {
        let v_train = self.controller.state().v_train();
        let open = self.rounds.get(v_train);
        let views = 0..self.chunks.len();
        views.map(move |index| self.view(index, v_train + u64::from(self.is_ahead(open, index))))
    }

    /// One of the chunks.
    pub(super) fn chunk(&self, index: usize) -> ChunkView {
        self.view(index, self.version_of(index))
    }

    fn view(&self, index: usize, version: Clock) -> ChunkView {
        let chunk = &self.chunks[index];
        ChunkView {
            number: chunk.number,
            version,
            table_byte: chunk.table_start * 4,
            start: chunk.start * 4,
            len: chunk.len * 4,
        }
    }

    /// The version of a chunk, by its place on this shard: it may have its part of the open round's step already.
    pub(super) fn version_of(&self, index: usize) -> Clock {
        let v_train = self.controller.state().v_train();
        v_train + u64::from(self.is_ahead(self.rounds.get(v_train), index))
    }

    fn is_ahead(&self, open: Option<&Round>, index: usize) -> bool {
        !self.spec.rows && open.is_some_and(|round| round.is_stepped(index))
    }

    /// What was sent to a worker is lost, or of no use to it.
    pub(super) fn forget_answers(&mut self, worker: WorkerId) {
        self.ahead.forget(worker);
        self.answer_codecs.forget(NodeId::Worker(worker));
    }

    /// The same for an aggregator.
    pub(super) fn forget_answers_to(&mut self, aggregator: AggregatorId) {
        self.answer_codecs.forget(NodeId::Aggregator(aggregator));
    }

    /// Whether answers are made when they are due, and not when they leave.
    pub(super) fn fixes_answers(&self) -> bool {
        self.answer_codecs.fixes_answers()
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
        // An answer is then never longer than what there is.
        if !rows.windows(2).all(|pair| pair[0] < pair[1]) {
            return Err(self.shape_fault("a pull of rows out of order".into()));
        }
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
        let slots: usize = self.slots.iter().map(Buffer::memory_bytes).sum();
        let slots = slots + self.answer_codecs.memory_bytes() + self.skipped.memory_bytes();
        let gradients = self.rounds.memory_bytes() + self.incoming.memory_bytes();
        self.parameters.memory_bytes() + slots + gradients
    }

    pub(super) fn report(&self, now: Time) -> TableReport {
        let mut longest: Vec<Waiting> = self.controller.waiting().collect();
        longest.sort_by_key(|waiting| waiting.since);
        let report = |waiting: &Waiting| WaitReport {
            worker: waiting.worker,
            seconds: now.since(waiting.since).as_secs_f64(),
            reason: waiting.reason.to_string(),
        };
        TableReport {
            name: self.spec.name.clone(),
            elements: self.parameters.len() as u64,
            sync: self.controller.policy().to_string(),
            version: self.controller.state().v_train(),
            workers: self.controller.state().n(),
            stats: self.controller.stats().clone(),
            waiting: longest.iter().take(REPORTED_WAITS).map(report).collect(),
        }
    }

    fn chunk_index(&self, number: u32) -> Option<usize> {
        self.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok()
    }

    /// The chunk of a frame that is one of a whole table's: they come in the order of its chunks on this shard, and
    /// the last one says so.
    fn chunk_in_turn(&self, header: &Header) -> Result<LocalChunk, Fault> {
        let (index, count) = (header.part as usize, self.chunks.len());
        let is_last = index + 1 == count;
        match self.chunks.get(index) {
            Some(chunk) if chunk.number == header.chunk && header.flags.has(Flags::LAST) == is_last => {
                Ok(*chunk)
            }
            _ => {
                let found =
                    format!("chunk {} as frame {index} of {count} that this server holds", header.chunk);
                Err(self.shape_fault(found))
            }
        }
    }

    /// A payload as the values of a whole chunk.
    fn chunk_values<'a>(&self, chunk: LocalChunk, payload: &'a [u8]) -> Result<&'a [f32], Fault> {
        match floats(payload) {
            Some(values) if values.len() == chunk.len => Ok(values),
            _ => {
                Err(self.shape_fault(format!("{} bytes where a chunk has {}", payload.len(), chunk.len * 4)))
            }
        }
    }

    fn shape_fault(&self, found: String) -> Fault {
        let message =
            format!("table `{}` has shape {:?} of f32; got {found}", self.spec.name, self.spec.shape);
        Fault { cause: Cause::Shape, message }
    }
}

#[cfg(test)]
mod tests;
