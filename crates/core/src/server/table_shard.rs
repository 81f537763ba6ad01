//! One table on one shard: the layout of its chunks, its parameters, its open rounds, its codecs and its controller.

mod answer_encoders;
mod chunk_codec;
mod gradient;
mod halves;
mod loose;
mod norms;
mod publication;
mod restored;
mod round;
mod rounds;
mod sink;
mod skipped;
mod store;
mod touched;

use super::accumulators::Accumulators;
use super::image::{StoreImage, TableImage};
use crate::checkpoint::{TableCut, Wanted};
use crate::codec::Codec;
use crate::consistency::{
    Admit, Advance, Apply, Controller, PullOutcome, Question, Released, SyncPolicy, Waiting,
};
use crate::intake::{Intake, Push, PushFrame, Taken};
use crate::limits;
use crate::optimizer::OptimizerPolicy;
use crate::policy::{Codecs, NonFinite, Order, Policy};
use crate::registry::Registry;
use crate::spec::SpecError;
use crate::status::{TableReport, WaitReport};
use crate::table::{Chunk, Layout, TableSpec};
use crate::types::{AggregatorId, Clock, Time, WorkerId};
use crate::waits::Delay;
use crate::wire::frame::{Piece, Sum};
use crate::wire::{DType, Fault, Plan};
use answer_encoders::{AnswerEncoders, AnswerPayload, ChunkToSend};
use halves::{ChunkState, Halves};
pub(super) use loose::Loose;
pub(super) use publication::PublicationImage;
use publication::{Publication, PublishedChunk};
use rounds::Rounds;
pub(super) use rounds::RoundsImage;
use sink::GradientSink;
pub(super) use sink::Kept;
pub(super) use skipped::SkippedSteps;
use std::sync::Arc;
use store::{Closing, Over, Store};

/// How many waiting pulls a report names.
const REPORTED_WAITS: usize = limits::MAX_WAITS_REPORTED;

/// A chunk as answers need it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkView {
    /// Its number in the table.
    pub(super) number: u32,
    /// The version of its parameters.
    pub(super) version: Clock,
    /// Its first element in the table.
    pub(super) table_start: u64,
    /// Its first element in [`TableShard::stored_bytes`].
    pub(super) start: usize,
    /// Its elements.
    pub(super) len: usize,
}

/// How a chunk of an answer is sent.
pub(super) enum ChunkAnswer {
    /// As elements of this type, read from [`TableShard::stored_bytes`] when it leaves.
    Stored(DType),
    /// As a codec made it, for this receiver.
    Made(AnswerPayload),
}

/// The chunks of one table that one shard holds, and everything that is decided about them.
#[derive(Debug)]
pub(super) struct TableShard {
    layout: Layout,
    /// [`Plan::valid_from`] of the table.
    valid_from: u32,
    order: Order,
    /// Its answers overtake those of tables that were created later.
    is_prioritized: bool,
    controller: Controller,
    store: Store,
    rounds: Rounds,
    loose: Loose,
    intake: Intake<Admit, Kept>,
    /// What its codec of pushes needs links to carry.
    pushes_need: Option<f64>,
    answer_encoders: AnswerEncoders,
    halves: Halves,
    /// Where it is broadcast.
    publication: Option<Publication>,
    /// Where it is broadcast: the worker by which the last round was closed, and how long others had waited for that at most.
    closing_delay: Option<Delay>,
}

impl TableShard {
    /// The part of a table that `chunks` (those of this shard, with their numbers) make up.
    pub(super) fn new(
        registry: &Registry,
        spec: TableSpec,
        policy: Policy,
        chunks: impl Iterator<Item = (u32, Chunk)>,
        workers: impl IntoIterator<Item = WorkerId>,
        seed: u64,
    ) -> Result<TableShard, String> {
        let text = |error: SpecError| error.to_string();
        let sync = policy.sync(registry).map_err(text)?;
        let optimizer = policy.optimizer(registry).map_err(text)?;
        let codecs = policy.codecs(registry).map_err(text)?;
        let is_broadcast = policy.is_broadcast();
        let (answer, published) =
            if is_broadcast { (Codec::default(), codecs.answer) } else { (codecs.answer, Codec::default()) };
        let answer_encoders = AnswerEncoders::new(&spec, answer)?;
        let push_codec = push_codec(&spec, codecs.push);
        let pushes_need = push_codec.needs_bandwidth();
        let layout = Layout::new(spec, chunks);
        let store = Store::new(&layout, optimizer, policy.reduce())?;
        let notes_rows = is_broadcast && layout.is_sparse();
        Ok(TableShard {
            controller: Controller::new(of_table(sync, &layout), workers, seed),
            store: if notes_rows { store.noting_rows(layout.cells()) } else { store },
            publication: is_broadcast.then(|| Publication::new(&layout, published)),
            layout,
            rounds: Rounds::default(),
            loose: Loose::default(),
            intake: Intake::new(Some(push_codec), policy.nonfinite()),
            pushes_need,
            order: policy.order(),
            is_prioritized: policy.is_prioritized(),
            answer_encoders,
            halves: Halves::new(),
            valid_from: Plan::FIRST_EPOCH,
            closing_delay: None,
        })
    }

    pub(super) fn image(&self) -> TableImage {
        TableImage {
            version: self.version(),
            store: self.store.image(&self.layout),
            controller: self.controller.image(),
            rounds: self.rounds.image(&self.layout),
            intake: self.intake.image(),
            loose: self.loose.clone(),
            publication: self.publication.as_ref().map(Publication::image),
        }
    }

    /// Becomes the part of a table that an image was made of; its policies are the same. The error says why it cannot, and it is of
    /// no use then.
    pub(super) fn restore(
        &mut self,
        registry: &Registry,
        image: TableImage,
        accumulators: &mut Accumulators,
    ) -> Result<(), String> {
        let TableImage { version, store, controller, rounds, intake, loose, publication } = image;
        let TableShard { layout, .. } = self;
        self.store.restore(layout, store)?;
        self.controller.restore(controller)?;
        if self.controller.state().v_train() != version {
            return Err(format!("the image is of version {version}, and its workers are at another"));
        }
        self.rounds = Rounds::from_image(layout, rounds, version, accumulators)?;
        let codec = |text: &str| {
            let codec = Codec::for_pushes(&registry.codec, text).map_err(|error| error.to_string())?;
            Ok(push_codec(layout.spec(), codec))
        };
        self.intake.restore(intake, codec, |push| check_push(push, layout, version))?;
        loose.check(layout.chunks().len())?;
        self.loose = loose;
        match (&mut self.publication, publication) {
            (Some(publication), Some(image)) => publication.restore(image),
            (None, None) => Ok(()),
            _ => Err("the image is of a table that is broadcast, or this one is".into()),
        }
    }

    /// Takes over parameters and the state of their optimizer. The error says why it cannot.
    pub(super) fn restore_store(&mut self, image: StoreImage) -> Result<(), String> {
        self.store.restore(&self.layout, image)
    }

    /// Sets the table's [`Plan::valid_from`].
    pub(super) fn valid_since(self, epoch: u32) -> TableShard {
        TableShard { valid_from: epoch, ..self }
    }

    pub(super) fn spec(&self) -> &TableSpec {
        self.layout.spec()
    }

    /// [`Plan::valid_from`] of the table.
    #[inline]
    pub(super) fn valid_from(&self) -> u32 {
        self.valid_from
    }

    /// Frames that brought NaN or Inf.
    pub(super) fn nonfinite(&self) -> u64 {
        self.intake.nonfinite()
    }

    /// Takes one frame of a push. After [`Taken::Whole`] the caller settles the table.
    pub(super) fn push(
        &mut self,
        frame: &PushFrame<'_>,
        accumulators: &mut Accumulators,
    ) -> Result<Taken, Fault> {
        let (intake, mut sink) = self.intake(accumulators);
        intake.take(frame, &mut sink)
    }

    /// Takes the sum of these workers' gradients of one chunk. Which of their pushes are complete is said to
    /// [`TableShard::count_push`]. Of what is refused nothing was taken. Nor is it where one of the gradients is here already: the
    /// worker of which that is so.
    pub(super) fn push_sum(
        &mut self,
        from: AggregatorId,
        sum: &Sum,
        contributors: &[WorkerId],
        payload: &[u8],
        accumulators: &mut Accumulators,
    ) -> Result<Option<WorkerId>, Fault> {
        let (intake, mut sink) = self.intake(accumulators);
        let admit = sink.admit_sum(sum, contributors)?;
        let index = sink.layout.index_of(sum.chunk)?;
        let known = |worker: &&WorkerId| sink.has_gradient(intake, **worker, sum, index);
        if let Some(known) = contributors.iter().find(known) {
            return Ok(Some(*known));
        }
        let gradient = intake.read_sum(sink.layout, from, sum, payload)?;
        sink.add_sum(sum, admit, gradient);
        contributors.iter().for_each(|worker| sink.note_loose(*worker, sum.clock, index));
        Ok(None)
    }

    fn intake<'a>(
        &'a mut self,
        accumulators: &'a mut Accumulators,
    ) -> (&'a mut Intake<Admit, Kept>, GradientSink<'a>) {
        let sink = GradientSink {
            layout: &self.layout,
            controller: &mut self.controller,
            rounds: &mut self.rounds,
            loose: &mut self.loose,
            store: &mut self.store,
            accumulators,
            order: self.order,
        };
        (&mut self.intake, sink)
    }

    /// Whether pushes of this clock can be counted. Those of rows may have no sum here that would have been refused.
    pub(super) fn check_clock(&self, clock: Clock) -> Result<(), Fault> {
        sink::admit_sum(&self.controller, &self.layout, clock).map(|_| ())
    }

    /// A worker's push of this clock is complete in the sums so far: it counts for its progress. The caller settles
    /// the table.
    pub(super) fn count_push(&mut self, now: Time, worker: WorkerId, clock: Clock) {
        let admit = match self.controller.admit(worker, clock) {
            admit @ (Admit::Duplicate | Admit::UnknownWorker) => admit,
            _ => self.controller.admit_sum(clock),
        };
        self.controller.push(now, worker, clock, admit, None, 1);
        self.loose.complete(worker, clock);
        // Where the worker had begun to send it again.
        self.intake.forget(worker, clock);
    }

    /// Begins at the version of a checkpoint, before anything was pushed.
    pub(super) fn begin_at(&mut self, version: Clock) {
        self.controller.begin_at(version);
    }

    /// A copy of its parameters and of its optimizer's state.
    pub(super) fn cut(&self) -> Result<TableCut, String> {
        self.store.cut(&self.layout, self.version())
    }

    /// Whether something of the open round may be in the parameters already: they are not those of a version then.
    pub(super) fn is_between_versions(&self) -> bool {
        self.steps_by_rounds() && self.rounds.get(self.version()).is_some()
    }

    /// Whether gradients are applied round by round, and not when they arrive.
    pub(super) fn steps_by_rounds(&self) -> bool {
        self.controller.policy().model.apply() != Apply::OnArrival
    }

    /// What it needs of a checkpoint.
    pub(super) fn wanted(&self) -> Wanted {
        let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
        for chunk in self.layout.chunks() {
            let (start, end) = (chunk.table_start, chunk.table_start + chunk.len as u64);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        Wanted { name: self.layout.name().to_owned(), slots: self.store.optimizer().slots(), ranges }
    }

    /// Takes the place of initial values. The error says what does not fit.
    pub(super) fn take_pieces(&mut self, pieces: &[TableCut]) -> Result<(), String> {
        self.store.take_pieces(&self.layout, pieces)
    }

    /// Whether all initial values are here.
    pub(super) fn is_initialised(&self) -> bool {
        self.store.is_initialised()
    }

    /// Initial values that are not complete are to be sent from the beginning.
    pub(super) fn forget_incomplete_values(&mut self) {
        self.store.forget_incomplete_values();
    }

    /// Takes one frame of initial values. True when they are now complete.
    pub(super) fn initialise(&mut self, piece: Piece, payload: &[u8]) -> Result<bool, Fault> {
        self.store.initialise(&self.layout, piece, payload)?;
        Ok(self.is_initialised())
    }

    /// A worker asks for parameters; `token` names the pull when it is released.
    pub(super) fn pull(&mut self, now: Time, worker: WorkerId, clock: Clock, token: u64) -> PullOutcome {
        self.controller.pull(now, worker, clock, token)
    }

    /// Worker 0, which evaluates conditions, is there or gone. The table is to be settled then.
    pub(super) fn set_judge(&mut self, now: Time, is_here: bool) {
        self.controller.set_judge(now, is_here);
    }

    /// The next question for worker 0.
    pub(super) fn poll_question(&mut self) -> Option<Question> {
        self.controller.poll_question()
    }

    /// Worker 0's answer to a question. The table is to be settled then.
    pub(super) fn take_verdict(&mut self, now: Time, number: u64, holds: Option<bool>) {
        self.controller.verdict(now, number, holds);
    }

    /// The next pull that is released.
    pub(super) fn poll_released(&mut self) -> Option<Released> {
        self.controller.poll_released()
    }

    /// When the table wants to be settled though nothing happened.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.controller.next_timeout()
    }

    /// A worker's connection is gone: its pulls are forgotten, and what was sent to it may be lost.
    pub(super) fn lose_worker(&mut self, worker: WorkerId) {
        self.controller.cancel(worker);
        self.forget_answers(worker);
    }

    /// A worker joins: no round after the open one closes without it, nor that one if nothing of it is here.
    pub(super) fn join(&mut self, worker: WorkerId, may_be_held: bool) {
        let open = self.version();
        let is_of_it = |push: &Push<Admit, Kept>| {
            push.clock() >= open || matches!(push.destination(), Admit::Round(round) if round >= open)
        };
        let is_here = self.rounds.get(open).is_some() || self.intake.pushes().any(is_of_it);
        // An aggregator may hold a sum with the gradient of an earlier process of this rank, which cannot be taken out again.
        let has_begun = is_here || may_be_held;
        self.controller.join(worker, has_begun);
    }

    /// The first clock that a worker which joined can push.
    pub(super) fn first_clock(&self, worker: WorkerId) -> Option<Clock> {
        Some(self.controller.state().worker(worker)?.first())
    }

    /// A worker that joined owes nothing before this clock.
    pub(super) fn set_first_clock(&mut self, worker: WorkerId, clock: Clock) {
        self.controller.set_first_clock(worker, clock);
    }

    /// These workers, and no others, push nothing before a clock.
    pub(super) fn set_idle(&mut self, idle: &[(WorkerId, Clock)]) {
        self.controller.set_idle(idle);
    }

    /// The consistency policy in force.
    pub(super) fn sync(&self) -> &SyncPolicy {
        self.controller.policy()
    }

    /// How many pulls wait.
    pub(super) fn waiting_count(&self) -> usize {
        self.controller.waiting_count()
    }

    /// Whether gradients of a round that is open, or of a push under way, are here.
    pub(super) fn is_in_a_round(&self) -> bool {
        self.rounds.accumulators() > 0 || self.intake.pushes().next().is_some()
    }

    /// How many accumulators hold sums of its rounds.
    pub(super) fn accumulators(&self) -> usize {
        self.rounds.accumulators()
    }

    /// The next advance of the version, with the optimizer step that belongs to it done.
    pub(super) fn advance(&mut self, now: Time, accumulators: &mut Accumulators) -> Option<Advance> {
        let advance = self.controller.advance(now)?;
        if self.is_broadcast() {
            let waited = |by| Some(Delay { by, time: self.controller.longest_since_push(now, by)? });
            self.closing_delay = advance.closed_by.and_then(waited);
        }
        if let Some(mut round) = self.rounds.take(advance.closed) {
            // A row that few workers touched is still a mean over all of them; a chunk counts its own gradients.
            let over = if self.layout.is_sparse() { Over::Weight(advance.weight) } else { Over::Cell };
            let closing = Closing { round: advance.closed, over, lr_factor: advance.lr_factor };
            self.store.step_round(&self.layout, &mut round, closing, accumulators);
            self.rounds.keep(round, accumulators);
        }
        // Rounds below the new version that are still open hold pieces of pushes that were never completed.
        self.rounds.drop_before(advance.version, accumulators);
        Some(advance)
    }

    /// Where it is broadcast: for whom the last round was held open, and how long others had waited for that at most.
    pub(super) fn closing_delay(&self) -> Option<Delay> {
        self.closing_delay
    }

    /// Steps with other parameters of the same optimizer from now on. Whether it can take over.
    pub(super) fn set_optimizer(&mut self, optimizer: OptimizerPolicy) -> bool {
        self.store.set_optimizer(optimizer)
    }

    /// Reads pushes, and makes answers, by other codecs from this epoch on. The next answer to each receiver is whole, and
    /// pulls that wait are forgotten.
    pub(super) fn set_codecs(&mut self, codecs: Codecs, valid_from: u32) -> Result<(), String> {
        match &mut self.publication {
            Some(publication) => {
                publication.set_codec(&self.layout, codecs.answer);
                // What the codec before has left out of rows is for this one to bring.
                if let (parameters, Some(touched)) = self.store.parameters_and_touched() {
                    publication.for_each_row_behind(&self.layout, parameters, |row| touched.mark(row));
                }
            }
            None => self.answer_encoders = AnswerEncoders::new(self.layout.spec(), codecs.answer)?,
        }
        self.halves.clear();
        self.pushes_need = codecs.push.needs_bandwidth();
        self.intake.set_codec(Some(push_codec(self.layout.spec(), codecs.push)), valid_from);
        self.controller.cancel_all();
        self.valid_from = valid_from;
        Ok(())
    }

    /// Treats NaN and Inf otherwise from now on.
    pub(super) fn set_nonfinite(&mut self, rule: NonFinite) {
        self.intake.set_nonfinite(rule);
    }

    pub(super) fn is_prioritized(&self) -> bool {
        self.is_prioritized
    }

    pub(super) fn set_prioritized(&mut self, is_prioritized: bool) {
        self.is_prioritized = is_prioritized;
    }

    /// Switches the consistency model. Rounds that the new model would never close are applied now.
    pub(super) fn set_sync(&mut self, now: Time, sync: SyncPolicy, accumulators: &mut Accumulators) {
        let sync = of_table(sync, &self.layout);
        let flush = sync.model.apply() == Apply::OnArrival;
        self.controller.set_policy(now, sync);
        if flush {
            // Each gradient weighs what it would have weighed under the new model.
            let workers = self.controller.state().n();
            while let Some((clock, mut round)) = self.rounds.take_first() {
                let closing = Closing { round: clock, over: Over::Workers(workers), lr_factor: 1.0 };
                self.store.step_outside_rounds(&self.layout, &mut round, closing, accumulators);
                self.rounds.keep(round, accumulators);
            }
        }
        self.rounds.reopen();
        for push in self.intake.pushes_mut() {
            // A push that is half here goes on under the new model from its next frame; what was late stays late.
            if push.destination() != Admit::Late {
                push.set_destination(self.controller.admit(push.worker(), push.clock()));
            }
        }
    }

    /// A worker is gone for good. What it pushed whole stays; a push it did not finish stays only in the cells that
    /// had already been added, each with its own count.
    pub(super) fn remove_worker(&mut self, worker: WorkerId) {
        let under_way = self.intake.remove_worker(worker).max(self.loose.remove_worker(worker));
        self.forget_answers(worker);
        self.rounds.mark_inexact(self.version() + limits::MAX_ROUNDS_AHEAD);
        self.controller.remove_worker(worker, under_way);
    }

    /// One of the chunks, by its place on this shard.
    pub(super) fn chunk(&self, index: usize) -> ChunkView {
        let chunk = &self.layout.chunks()[index];
        ChunkView {
            number: chunk.number,
            version: self.version_of(index),
            table_start: chunk.table_start,
            start: chunk.start,
            len: chunk.len,
        }
    }

    /// The version of a chunk, by its place on this shard: it may have its part of the open round's step already.
    pub(super) fn version_of(&self, index: usize) -> Clock {
        let version = self.version();
        let open = self.rounds.get(version).filter(|_| !self.layout.is_sparse());
        version + u64::from(open.is_some_and(|round| round.is_stepped(index)))
    }

    /// Whether its versions are broadcast.
    #[inline]
    pub(super) fn is_broadcast(&self) -> bool {
        self.publication.is_some()
    }

    /// Publishes a chunk, by its place on this shard, as a part of a version. The table is broadcast.
    pub(super) fn publish_chunk(&mut self, index: usize, version: Clock) -> PublishedChunk {
        let TableShard { publication, layout, store, .. } = self;
        let publication = publication.as_mut().expect("it is broadcast");
        let parameters = &store.parameters()[layout.chunks()[index].range()];
        publication.publish(layout, index, version, parameters)
    }

    /// What every link must carry for its pushes to be as its codec makes them with room, where that matters.
    pub(super) fn pushes_need(&self) -> Option<f64> {
        self.pushes_need
    }

    /// The same for versions that are broadcast.
    pub(super) fn versions_need(&self) -> Option<f64> {
        self.publication.as_ref()?.needs_bandwidth()
    }

    /// Whether links have less than that.
    pub(super) fn set_lacks_room(&mut self, lacks_room: bool) {
        if let Some(publication) = &mut self.publication {
            publication.set_lacks_room(lacks_room);
        }
    }

    /// Publishes what changed in a chunk of a table of rows, by its place on this shard, as a part of a version; `None` when nothing
    /// of it travels. The table is broadcast.
    pub(super) fn publish_rows(&mut self, index: usize, version: Clock) -> Option<PublishedChunk> {
        let TableShard { publication, layout, store, .. } = self;
        let publication = publication.as_mut().expect("it is broadcast");
        let (parameters, touched) = store.parameters_and_touched();
        let touched = touched.expect("its rows are noted");
        publication.publish_rows(layout, index, version, &parameters[layout.chunks()[index].range()], touched)
    }

    /// All of a version of a table of rows is published.
    pub(super) fn end_version(&mut self, version: Clock) {
        if let Some(publication) = &mut self.publication {
            publication.end_version(version);
        }
    }

    /// Whether a chunk was published as nothing but zeros, which need not travel.
    pub(super) fn is_published_zero(&self, index: usize) -> bool {
        self.publication.as_ref().is_some_and(|publication| publication.is_zero(&self.layout, index))
    }

    /// Whether single rows are pushed and pulled.
    pub(super) fn is_sparse(&self) -> bool {
        self.layout.is_sparse()
    }

    /// The version of a chunk that was published last.
    pub(super) fn published_version(&self, index: usize) -> Option<Clock> {
        self.publication.as_ref()?.version_of(index)
    }

    /// The digest of everything that was published.
    pub(super) fn published_digest(&mut self) -> u64 {
        self.publication.as_mut().map_or(0, |publication| publication.digest(&self.layout))
    }

    /// Everything as it was published.
    pub(super) fn published_bytes(&self) -> &[u8] {
        self.publication.as_ref().map_or(&[], Publication::bytes)
    }

    /// How a chunk gets to a worker.
    #[inline]
    pub(super) fn answer_chunk(&mut self, index: usize, receiver: WorkerId) -> ChunkAnswer {
        if self.answer_encoders.fixes_answers()
            && let Some(payload) = self.encode_with_codec(index, receiver)
        {
            return ChunkAnswer::Made(payload);
        }
        match self.answer_encoders.elements() {
            DType::F32 => ChunkAnswer::Stored(DType::F32),
            dtype => ChunkAnswer::Stored(self.make_halves(index, dtype)),
        }
    }

    /// The type of the elements that answers have, where a codec does not encode them.
    pub(super) fn answer_type(&self) -> DType {
        self.answer_encoders.elements()
    }

    /// Makes the halves of a chunk, unless they are here. Its type, which is another one when they cannot be made.
    fn make_halves(&mut self, index: usize, dtype: DType) -> DType {
        let steps_outside_rounds = self.store.steps_outside_rounds();
        let state = ChunkState { version: self.version_of(index), steps_outside_rounds };
        let TableShard { halves, layout, store, .. } = self;
        let parameters = &store.parameters()[layout.chunks()[index].range()];
        if halves.make(layout, index, dtype, state, parameters) { dtype } else { DType::F32 }
    }

    /// The version of a chunk as it leaves in elements of this type.
    pub(super) fn version_sent(&self, index: usize, dtype: DType) -> Clock {
        let made = self.halves.version_of(index).filter(|_| dtype != DType::F32);
        made.unwrap_or_else(|| self.version_of(index))
    }

    /// All parameters as elements of this type, as far as they were made.
    pub(super) fn stored_bytes(&self, dtype: DType) -> &[u8] {
        match dtype {
            DType::F32 => self.store.parameter_bytes(),
            DType::F16 | DType::Bf16 => self.halves.bytes(),
        }
    }

    fn encode_with_codec(&mut self, index: usize, receiver: WorkerId) -> Option<AnswerPayload> {
        let version = self.version_of(index);
        let values = &self.store.parameters()[self.layout.chunks()[index].range()];
        self.answer_encoders.encode_chunk(&self.layout, ChunkToSend { index, version, values }, receiver)
    }

    /// The payload of an answer with rows that [`TableShard::check_rows`] let pass.
    pub(super) fn encode_rows(&mut self, rows: &[u32]) -> AnswerPayload {
        let bytes = self.store.gather_rows(&self.layout, rows);
        self.answer_encoders.encode_rows(&self.layout, bytes)
    }

    /// A worker may not have what was sent to it.
    pub(super) fn forget_answers(&mut self, receiver: WorkerId) {
        self.answer_encoders.forget(receiver);
    }

    /// Rounds that are closed.
    pub(super) fn version(&self) -> Clock {
        self.controller.state().v_train()
    }

    /// Whether a round closes only when all workers have pushed.
    pub(super) fn waits_for_all(&self) -> bool {
        self.controller.policy().model.waits_for_all()
    }

    /// How many chunks are here.
    pub(super) fn chunk_count(&self) -> usize {
        self.layout.chunks().len()
    }

    /// Checks the invariants; the error names the one that does not hold.
    pub(super) fn check(&self) -> Result<(), String> {
        self.controller.check()?;
        self.rounds.check()?;
        self.intake.check()
    }

    /// Calls `visit` with the first element and the values of every chunk.
    pub(super) fn for_each_chunk(&self, visit: impl FnMut(u64, &[f32])) {
        self.store.for_each_chunk(&self.layout, visit);
    }

    /// The same with the version and the values that were broadcast last, where some were.
    pub(super) fn for_each_published_chunk(&self, mut visit: impl FnMut(u64, Clock, &[f32])) {
        let Some(publication) = &self.publication else { return };
        for (index, chunk) in self.layout.chunks().iter().enumerate() {
            if let Some(version) = publication.version_of(index) {
                visit(chunk.table_start, version, &publication.values()[chunk.range()]);
            }
        }
    }

    pub(super) fn elements(&self) -> usize {
        self.layout.elements()
    }

    /// Reads the row numbers of a pull; all of them must be on this shard. No rows may be pulled of a dense table, too.
    pub(super) fn check_rows(&self, payload: &[u8]) -> Result<Vec<u32>, Fault> {
        let may_be_dense = payload.is_empty();
        if !(self.layout.is_sparse() || may_be_dense) || !payload.len().is_multiple_of(4) {
            return Err(self.layout.shape_fault(format!("a pull of single rows in {} bytes", payload.len())));
        }
        let rows: Vec<u32> = payload
            .chunks_exact(4)
            .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect();
        // An answer is then never longer than what there is.
        if !rows.windows(2).all(|pair| pair[0] < pair[1]) {
            return Err(self.layout.shape_fault("a pull of rows out of order".into()));
        }
        match rows.iter().find(|&&row| self.layout.row_start(row).is_none()) {
            Some(row) => Err(self.layout.shape_fault(format!("row {row}, which this server does not hold"))),
            None => Ok(rows),
        }
    }

    pub(super) fn row_width(&self) -> usize {
        self.layout.row_width()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let under_way: usize =
            self.intake.pushes().map(|push: &Push<_, Kept>| push.kept.memory_bytes()).sum();
        self.store.memory_bytes()
            + self.answer_encoders.memory_bytes()
            + self.halves.memory_bytes()
            + self.publication.as_ref().map_or(0, Publication::memory_bytes)
            + self.rounds.memory_bytes()
            + self.loose.memory_bytes()
            + under_way
    }

    /// The workers that the open round lacks, if it is open for long: a round that closes soon is not looked at.
    fn missing(&self, now: Time) -> Vec<WorkerId> {
        let state = self.controller.state();
        if state.opened().is_some_and(|opened| now.since(opened) < limits::LONG_ROUND) {
            return Vec::new();
        }
        state.missing().take(limits::MAX_MISSING_REPORTED).collect()
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
            name: self.layout.name().to_owned(),
            elements: self.layout.elements() as u64,
            sync: self.controller.policy().to_string(),
            version: self.controller.state().v_train(),
            workers: self.controller.state().n(),
            stats: self.controller.stats().clone(),
            waiting: longest.iter().take(REPORTED_WAITS).map(report).collect(),
            missing: self.missing(now),
        }
    }
}

/// Whether a push of an image can be under way in a table of this layout: what another process kept may be anything.
fn check_push(push: &Push<Admit, Kept>, layout: &Layout, version: Clock) -> Result<(), String> {
    let (worker, clock, last) = (push.worker(), push.clock(), version + limits::MAX_ROUNDS_AHEAD);
    let is_ahead = matches!(push.destination(), Admit::Round(round) if round > last);
    if is_ahead || clock > limits::MAX_CLOCK || push.frames() as usize > layout.chunks().len() {
        return Err(format!("{worker} cannot have a push of clock {clock} under way at version {version}"));
    }
    push.kept.check(layout)
}

/// A consistency policy as it holds for a table: workers have no copies of tables of rows.
fn of_table(sync: SyncPolicy, layout: &Layout) -> SyncPolicy {
    if layout.is_sparse() { sync.without_copies() } else { sync }
}

/// The codec that decodes the pushes of a table. Without compression there are encoded frames too: they carry the residual of the
/// codec before.
fn push_codec(spec: &TableSpec, codec: Codec) -> Arc<Codec> {
    Arc::new(if spec.rows { codec.of_rows() } else { codec })
}

#[cfg(test)]
mod tests;
