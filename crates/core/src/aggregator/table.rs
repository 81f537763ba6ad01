//! A table on its way through an aggregator to one shard: how far its workers' pushes are, and what becomes of them.

use super::aggregate::{AggregateId, Payload};
use super::routes::Route;
use super::sum_buffer::SumBuffer;
use crate::absence::Absent;
use crate::codec::{self, Codec, Context, Decoder, Encoder};
use crate::intake::{Intake, Push};
use crate::kernels;
use crate::limits;
use crate::table::{Chunk, Layout, TableSpec};
use crate::types::{Clock, WorkerId};
use crate::wire::frame::{self, Form};
use crate::wire::{Cause, DType, Fault};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Sum buffers that are kept for the next clock.
const SPARE_BUFFERS: usize = 2;

/// The intake of an aggregator's pushes: all of them go into aggregates, and nothing is kept with them.
pub(super) type PushIntake = Intake<(), ()>;

/// A table's part on one shard, as its gradients pass through here.
#[derive(Debug)]
pub(super) struct Table {
    layout: Layout,
    policy: SumPolicy,
    /// The last clock that is complete in an aggregate, or that a worker owes nothing of.
    done: BTreeMap<WorkerId, Clock>,
    /// Complete pushes that the shard has not noted.
    unnoted: BTreeMap<WorkerId, usize>,
    passed: BTreeMap<WorkerId, Passed>,
    /// The last clock of which something of a worker that is gone was here. It may be in a sum, and cannot be taken out again.
    departed: BTreeMap<WorkerId, Clock>,
    /// Workers that push nothing before this clock.
    idle: Vec<(WorkerId, Clock)>,
    /// Clocks that the shard refused, and how often.
    attempts: BTreeMap<Clock, u32>,
    /// The aggregate that gradients of a clock go to.
    open: BTreeMap<Clock, AggregateId>,
    spare: Vec<SumBuffer>,
    codec: Option<Arc<Codec>>,
    /// Whether it makes payloads of sums.
    encodes: bool,
    /// Makes sums smaller. What it keeps is of this aggregator's sums alone. There is one without a codec too, as long as
    /// something is left that another codec had not sent.
    encoder: Option<Encoder>,
    seeds: CodecSeeds,
    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table.
    valid_from: u32,
}

/// Treatment of a table's gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SumPolicy {
    /// Whether they are added up at all.
    pub(super) adds_up: bool,
    /// How long a complete push is held for others.
    pub(super) hold: Duration,
    /// Whether it is held as long as others are at it: the time begins again with everything that is added.
    pub(super) is_patient: bool,
}

/// The codec of a table's sums.
#[derive(Debug, Clone)]
pub(super) struct SumCodec {
    pub(super) codec: Arc<Codec>,
    /// Whether it makes payloads, and not just elements of another type.
    encodes: bool,
}

impl SumCodec {
    /// The codec of sums of what workers push to a table by this one.
    pub(super) fn new(push: Codec, is_sparse: bool) -> SumCodec {
        let codec = push.of_sums();
        // Rows in another type than that of tables are payloads too.
        let encodes = codec.element_type().is_none_or(|dtype| is_sparse && dtype != DType::F32);
        SumCodec { codec: Arc::new(if is_sparse { codec.of_rows() } else { codec }), encodes }
    }
}

/// Seeds of a codec's random choices.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CodecSeeds {
    /// The job's seed.
    pub(super) job: u64,
    /// This aggregator's number, complemented so that it never collides with a worker's rank.
    pub(super) sender: u32,
    pub(super) table: u32,
}

/// Pushes that were passed on as they are, because gradients of the table were not added up then.
#[derive(Debug, Default)]
struct Passed {
    /// Clocks that the shard has not acknowledged.
    under_way: BTreeSet<Clock>,
    /// The last one that it has.
    done: Option<Clock>,
}

/// The way of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Into an aggregate.
    Up,
    /// To the shard as it is. `is_new` for the first frame of a push that was not under way.
    Past { is_new: bool },
}

impl Table {
    /// A table of which the shard holds these chunks, with their numbers.
    pub(super) fn new(spec: &TableSpec, chunks: impl Iterator<Item = (u32, Chunk)>) -> Table {
        Table {
            layout: Layout::new(spec.clone(), chunks),
            policy: SumPolicy::default(),
            done: BTreeMap::new(),
            unnoted: BTreeMap::new(),
            passed: BTreeMap::new(),
            departed: BTreeMap::new(),
            idle: Vec::new(),
            attempts: BTreeMap::new(),
            open: BTreeMap::new(),
            spare: Vec::new(),
            codec: None,
            encodes: false,
            encoder: None,
            seeds: CodecSeeds::default(),
            valid_from: 0,
        }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether the shard holds nothing of the table.
    pub(super) fn is_empty(&self) -> bool {
        self.layout.chunks().is_empty()
    }

    pub(super) fn policy(&self) -> SumPolicy {
        self.policy
    }

    pub(super) fn set_policy(&mut self, policy: SumPolicy) {
        self.policy = policy;
    }

    /// How gradients are encoded from this epoch on. What was not sent under another codec is sent under this one.
    pub(super) fn set_codec(&mut self, codec: SumCodec, seeds: CodecSeeds, valid_from: u32) {
        self.valid_from = valid_from;
        self.seeds = seeds;
        self.encodes = codec.encodes;
        self.codec = Some(codec.codec);
        let before = self.encoder.take().filter(Encoder::has_unsent);
        if before.is_some() || self.encodes {
            let encoder = self.keeper();
            before.into_iter().for_each(|before| encoder.take_over(before));
        }
    }

    /// An encoder, even where sums travel as they are: something has to be kept until the next one.
    fn keeper(&mut self) -> &mut Encoder {
        let codec = self.codec.as_ref().expect("there is a plan before there are sums");
        self.encoder.get_or_insert_with(|| Encoder::new(codec.clone(), self.layout.elements()))
    }

    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table. Frames carry it and no later epoch, which a shard may not
    /// have entered yet.
    pub(super) fn valid_from(&self) -> u32 {
        self.valid_from
    }

    /// Refuses frames of an epoch with earlier codecs.
    pub(super) fn check_epoch(&self, epoch: u32) -> Result<(), Fault> {
        if epoch >= self.valid_from {
            return Ok(());
        }
        let what =
            format!("the frame is of epoch {epoch}; frames are valid from epoch {} on", self.valid_from);
        Err(self.fault(Cause::StaleEpoch, what))
    }

    pub(super) fn fault(&self, cause: Cause, what: String) -> Fault {
        Fault { cause, message: format!("table `{}`: {what}", self.layout.name()) }
    }

    /// The way that a push goes. One that is to stay alone is not added up. One that is sent again goes the way it went before, and the pushes of a worker never
    /// overtake each other.
    pub(super) fn way(
        &self,
        worker: WorkerId,
        push: &frame::Push,
        is_alone: bool,
        intake: &PushIntake,
    ) -> Result<Way, Fault> {
        // The shard refuses what does not fit the table.
        if self.is_empty() || push.form.is_rows() != self.layout.is_sparse() {
            return Ok(Way::Past { is_new: false });
        }
        let (clock, is_done) = (push.clock, self.is_done(worker, push.clock));
        let passed = self.passed.get(&worker);
        let was_passed = passed.is_some_and(|passed| {
            passed.under_way.contains(&clock) || passed.done.is_some_and(|done| clock <= done && !is_done)
        });
        if was_passed || is_alone && push.piece.sequence > 0 {
            return Ok(Way::Past { is_new: false });
        }
        let passing = passed.map_or(0, |passed| passed.under_way.len());
        if is_alone {
            return self.pass(worker, passing);
        }
        let is_under_way = intake.under_way(worker).is_some_and(|push| push.clock() == clock)
            || intake.has_factors(worker, clock);
        // The middle of a push that did not begin is ignored by the intake.
        if is_done || push.piece.sequence > 0 || is_under_way {
            return Ok(Way::Up);
        }
        if passing == 0 && (self.unnoted(worker) > 0 || self.policy.adds_up) {
            return Ok(Way::Up);
        }
        self.pass(worker, passing)
    }

    /// A push is passed on, unless as many of its worker are under way as may be.
    fn pass(&self, worker: WorkerId, passing: usize) -> Result<Way, Fault> {
        if passing >= limits::MAX_HELD_PUSHES {
            let what = format!("{passing} pushes of {worker} are under way; wait for them before pushing on");
            return Err(self.fault(Cause::TooFarAhead, what));
        }
        Ok(Way::Past { is_new: true })
    }

    /// Whether a push was passed on, or is.
    pub(super) fn is_passed(&self, worker: WorkerId, clock: Clock) -> bool {
        let is_it = |passed: &Passed| {
            passed.under_way.contains(&clock) || passed.done.is_some_and(|done| clock <= done)
        };
        self.passed.get(&worker).is_some_and(is_it)
    }

    /// A push begins to be passed on.
    pub(super) fn begin_passing(&mut self, worker: WorkerId, clock: Clock) {
        self.passed.entry(worker).or_default().under_way.insert(clock);
    }

    /// The shard acknowledged a push that was passed on, or refused it.
    pub(super) fn end_passing(&mut self, route: &Route, is_taken: bool) {
        if let Some(passed) = self.passed.get_mut(&route.worker) {
            passed.under_way.remove(&route.clock);
            if is_taken {
                passed.done = passed.done.max(Some(route.clock));
            }
        }
    }

    /// Whether a push is complete in an aggregate.
    pub(super) fn is_done(&self, worker: WorkerId, clock: Clock) -> bool {
        self.done.get(&worker).is_some_and(|&done| clock <= done)
    }

    /// Complete pushes of a worker that the shard has not noted.
    pub(super) fn unnoted(&self, worker: WorkerId) -> usize {
        self.unnoted.get(&worker).copied().unwrap_or(0)
    }

    /// The same of all workers.
    pub(super) fn all_unnoted(&self) -> impl Iterator<Item = (WorkerId, usize)> + '_ {
        self.unnoted.iter().map(|(&worker, &unnoted)| (worker, unnoted))
    }

    /// A push is complete in an aggregate.
    pub(super) fn complete(&mut self, worker: WorkerId, clock: Clock) {
        self.done.insert(worker, clock);
        *self.unnoted.entry(worker).or_default() += 1;
    }

    /// The shard has noted a complete push.
    pub(super) fn note(&mut self, worker: WorkerId) {
        if let Some(unnoted) = self.unnoted.get_mut(&worker) {
            *unnoted = unnoted.saturating_sub(1);
        }
    }

    /// A worker joins, and owes nothing before this clock.
    pub(super) fn join(&mut self, worker: WorkerId, clock: Clock) {
        if let Some(before) = clock.checked_sub(1) {
            // An aggregator below may have heard of it earlier.
            let done = self.done.entry(worker).or_insert(before);
            *done = before.max(*done);
        }
    }

    /// How far a push is: the chunks of its table on the shard that it is past. One of rows skips chunks.
    pub(super) fn progress(&self, push: &Push<(), ()>) -> usize {
        if !self.layout.is_sparse() {
            return push.frames() as usize;
        }
        let last = push.last_chunk().and_then(|chunk| self.layout.index_of(chunk).ok());
        last.map_or(0, |index| index + 1)
    }

    /// How far a worker is with its push of a clock. One that went on to a later clock will not come back to it.
    pub(super) fn position(&self, worker: WorkerId, clock: Clock, intake: &PushIntake) -> usize {
        let all = self.layout.chunks().len();
        if self.is_done(worker, clock) || self.is_passed(worker, clock) {
            return all;
        }
        match intake.under_way(worker) {
            Some(push) if push.clock() == clock => self.progress(push),
            Some(push) if push.clock() > clock => all,
            _ if self.idle.iter().any(|&(idle, until)| idle == worker && until > clock) => all,
            _ => 0,
        }
    }

    /// A push may be made again from its beginning.
    pub(super) fn forget_push(&mut self, worker: WorkerId, clock: Clock, intake: &mut PushIntake) {
        intake.forget(worker, clock);
        if self.done.get(&worker) == Some(&clock) {
            match clock.checked_sub(1) {
                Some(before) => self.done.insert(worker, before),
                None => self.done.remove(&worker),
            };
        }
    }

    /// These workers, and no others, push nothing before a clock.
    pub(super) fn set_idle(&mut self, idle: &[(WorkerId, Clock)]) {
        self.idle.clear();
        self.idle.extend_from_slice(idle);
    }

    /// A worker is gone. `under_way` is the clock of a push of which only a part is here.
    pub(super) fn remove_worker(&mut self, worker: WorkerId, under_way: Option<Clock>) {
        let passed = self.passed.remove(&worker).and_then(|passed| passed.under_way.last().copied());
        let last = self.done.remove(&worker).max(passed).max(under_way);
        let departed = self.departed.get(&worker).copied().max(last);
        self.departed.extend(departed.map(|clock| (worker, clock)));
        self.unnoted.remove(&worker);
    }

    /// The first clock of which nothing of an earlier process of a worker was here.
    pub(super) fn first_clock(&self, worker: WorkerId) -> Clock {
        self.departed.get(&worker).map_or(0, |clock| clock.saturating_add(1))
    }

    /// What was here is given up, and comes again.
    pub(super) fn begin_anew(&mut self) {
        self.done.clear();
        self.unnoted.clear();
        self.passed.clear();
        self.attempts.clear();
        self.open.clear();
    }

    /// The aggregate that gradients of a clock go to.
    pub(super) fn open(&self, clock: Clock) -> Option<AggregateId> {
        self.open.get(&clock).copied()
    }

    pub(super) fn set_open(&mut self, clock: Clock, id: AggregateId) {
        self.open.insert(clock, id);
    }

    /// Gradients of a clock go to another aggregate from now on.
    pub(super) fn close(&mut self, clock: Clock) {
        self.open.remove(&clock);
    }

    /// Clocks of which there are open aggregates.
    pub(super) fn open_clocks(&self) -> Vec<Clock> {
        self.open.keys().copied().collect()
    }

    /// Which attempt at aggregates of a clock this is.
    pub(super) fn attempt(&self, clock: Clock) -> u32 {
        self.attempts.get(&clock).copied().unwrap_or(0)
    }

    /// The shard refused all aggregates of an attempt.
    pub(super) fn end_attempt(&mut self, clock: Clock) {
        *self.attempts.entry(clock).or_default() += 1;
        if self.attempts.len() > limits::MAX_REFUSED_SUMS {
            self.attempts.pop_first();
        }
    }

    /// Memory for another aggregate; what is in it is of no meaning.
    pub(super) fn take_buffer(&mut self) -> Option<SumBuffer> {
        self.spare.pop().or_else(|| SumBuffer::try_new(&self.layout))
    }

    pub(super) fn keep_buffer(&mut self, mut buffer: SumBuffer) {
        if self.spare.len() < SPARE_BUFFERS {
            buffer.clear(&self.layout);
            self.spare.push(buffer);
        }
    }

    /// The payload that travels instead of the sum of a chunk; `None` when that is the sum itself, or nothing. What was not
    /// sent of absent ranges waits.
    pub(super) fn encode(
        &mut self,
        clock: Clock,
        index: usize,
        sum: &[f32],
        absent: &Absent,
    ) -> Option<Payload> {
        let chunk = self.layout.chunks()[index];
        if absent.covers(chunk.len) {
            return None;
        }
        let Some(encoder) = self.encoder.as_mut() else { return self.halves(sum) };
        let CodecSeeds { job, sender, table } = self.seeds;
        let context = Context {
            step: clock,
            seed: codec::stretch_seed(job, sender, table, clock, chunk.number),
            layer_elements: self.layout.spec().largest_layer(),
            ..Context::default()
        };
        let largest = encoder.codec().largest();
        if largest < f32::MAX && sum.iter().any(|value| value.abs() > largest) {
            // Each gradient fitted, and their sum does not.
            return None;
        }
        let (mut bytes, start) = (Vec::new(), chunk.start);
        let counted = encoder.counts_what_is_sent().then(|| encoder.codec().clone());
        // The servers decide what becomes of a sum that is not finite.
        encoder.holding(start, absent, |encoder| encoder.encode(start, sum, &context, &mut bytes)).ok()?;
        let form = if self.layout.is_sparse() { Form::EncodedRows { count: 0 } } else { Form::Encoded };
        Some(Payload { bytes, form, counted })
    }

    /// All chunks of a sum have left: the residual is looked at once for all of them.
    pub(super) fn settle(&mut self) {
        let Some(encoder) = self.encoder.as_mut() else { return };
        encoder.settle();
        if !self.encodes && !encoder.counts_what_is_sent() {
            self.encoder = None;
        }
    }

    /// The sum of a chunk in the shorter elements that pushes have. `None` where it travels as it is.
    fn halves(&self, sum: &[f32]) -> Option<Payload> {
        let codec = self.codec.as_ref()?;
        let dtype = codec.element_type().filter(|&dtype| dtype != DType::F32)?;
        let mut bytes = vec![0; dtype.bytes() * sum.len()];
        // The servers decide what becomes of a sum that is not finite.
        let is_finite = codec::half::write(dtype, sum, &mut bytes);
        // Each gradient fitted, and their sum may not.
        let fits = sum.iter().all(|value| value.abs() <= codec.largest());
        (is_finite && fits).then_some(Payload { bytes, form: Form::Dense(dtype), counted: None })
    }

    /// An encoded sum of a chunk was refused, and the gradients in it come again: what is kept is what was kept before them.
    pub(super) fn undo(&mut self, index: usize, sum: &[f32], payload: &Payload, absent: &Absent) {
        let Some(codec) = &payload.counted else { return };
        let chunk = self.layout.chunks()[index];
        let mut values = vec![0.0; chunk.len];
        Decoder::new(codec.clone())
            .decode(&payload.bytes, &mut values)
            .expect("what an encoder made is read by its decoder");
        kernels::add_scaled(&mut values, sum, -1.0);
        absent.clear_in(&mut values);
        self.keeper().put_back_values(chunk.start, &values);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let spare: usize = self.spare.iter().map(SumBuffer::memory_bytes).sum();
        spare + self.encoder.as_ref().map_or(0, Encoder::memory_bytes)
    }

    /// Whether how far pushes are fits together.
    pub(super) fn check(&self, intake: &PushIntake) -> Result<(), String> {
        intake.check()?;
        let is_done = |push: &&Push<(), ()>| self.is_done(push.worker(), push.clock());
        match intake.pushes().find(is_done) {
            Some(push) => Err(format!("{} is at clock {}, which is complete", push.worker(), push.clock())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::NonFinite;
    use crate::types::{ServerId, ShardId, TableId};
    use crate::wire::frame::{Piece, Subject};

    const WORKER: WorkerId = WorkerId(0);

    fn table(adds_up: bool) -> (Table, PushIntake) {
        let chunk = Chunk { shard: ShardId { server: ServerId(0), core: 0 }, start: 0, len: 4 };
        let mut table = Table::new(&TableSpec::dense("w", [4]), [(0, chunk)].into_iter());
        table.set_policy(SumPolicy { adds_up, ..SumPolicy::default() });
        (table, Intake::new(None, NonFinite::Reject))
    }

    fn first_frame(clock: Clock) -> frame::Push {
        frame::Push {
            subject: Subject { epoch: 1, table: TableId(0), request: 1 },
            clock,
            samples: 1,
            piece: Piece { chunk: 0, sequence: 0, is_last: true },
            form: Form::PLAIN,
            has_absent: false,
            want_params: false,
            reply_place: None,
        }
    }

    fn route(clock: Clock) -> Route {
        Route {
            worker: WORKER,
            through: None,
            table: 0,
            clock,
            request: 1,
            epoch: 1,
            aggregate: None,
            is_push: true,
            awaits_ack: true,
            awaits_params: false,
            bytes: 0,
            reply_place: None,
            hold: None,
        }
    }

    #[test]
    fn a_question_for_the_way_of_a_push_changes_nothing() {
        for adds_up in [true, false] {
            let (table, intake) = table(adds_up);
            let way = if adds_up { Way::Up } else { Way::Past { is_new: true } };
            for clock in [0, 1, 0] {
                assert_eq!(table.way(WORKER, &first_frame(clock), false, &intake), Ok(way));
            }
        }
    }

    #[test]
    fn a_push_goes_the_way_it_went_before_and_none_overtakes_another() {
        let (mut table, intake) = table(false);
        table.begin_passing(WORKER, 0);
        table.set_policy(SumPolicy { adds_up: true, ..SumPolicy::default() });
        let way = |table: &Table, clock| table.way(WORKER, &first_frame(clock), false, &intake);
        assert_eq!(way(&table, 0), Ok(Way::Past { is_new: false }), "sent again");
        assert_eq!(way(&table, 1), Ok(Way::Past { is_new: true }), "the one before is still on its way");
        table.end_passing(&route(0), true);
        assert_eq!(way(&table, 0), Ok(Way::Past { is_new: false }), "the shard knows that it has it");
        assert_eq!(way(&table, 1), Ok(Way::Up));
        table.complete(WORKER, 1);
        table.set_policy(SumPolicy { adds_up: false, ..SumPolicy::default() });
        assert_eq!(way(&table, 2), Ok(Way::Up), "behind a push that the shard has not noted");
        table.note(WORKER);
        assert_eq!(way(&table, 2), Ok(Way::Past { is_new: true }));
        assert_eq!(way(&table, 1), Ok(Way::Up), "complete in an aggregate");
        // A push that the shard refused may go another way.
        table.begin_passing(WORKER, 2);
        table.end_passing(&route(2), false);
        table.set_policy(SumPolicy { adds_up: true, ..SumPolicy::default() });
        assert_eq!(way(&table, 2), Ok(Way::Up));
    }

    #[test]
    fn a_worker_that_joins_is_waited_for_from_its_first_clock_on() {
        let (mut table, intake) = table(true);
        assert_eq!(table.position(WORKER, 4, &intake), 0);
        table.join(WORKER, 5);
        assert_eq!([4, 5].map(|clock| table.position(WORKER, clock, &intake)), [1, 0]);
        table.remove_worker(WORKER, None);
        assert_eq!(table.first_clock(WORKER), 5);
        table.join(WORKER, 0);
        assert_eq!(table.position(WORKER, 0, &intake), 0);
    }

    #[test]
    fn a_worker_that_comes_back_begins_after_everything_that_was_here_of_it() {
        for (done, passing, under_way, first) in
            [(0, None, None, 1), (2, Some(3), None, 4), (2, None, Some(3), 4), (6, Some(5), Some(4), 7)]
        {
            let (mut table, _) = table(true);
            assert_eq!(table.first_clock(WORKER), 0);
            table.complete(WORKER, done);
            passing.into_iter().for_each(|clock| table.begin_passing(WORKER, clock));
            table.remove_worker(WORKER, under_way);
            assert_eq!(table.first_clock(WORKER), first);
            table.remove_worker(WORKER, None);
            assert_eq!(table.first_clock(WORKER), first, "also after one that left nothing");
        }
    }

    #[test]
    fn frames_from_before_the_codec_are_stale() {
        let (mut table, _) = table(true);
        assert_eq!(table.check_epoch(1), Ok(()));
        let codec = SumCodec::new(Codec::parse(&codec::axis(), "none").unwrap(), false);
        table.set_codec(codec, CodecSeeds::default(), 3);
        let causes = [2, 3, 4].map(|epoch| table.check_epoch(epoch).map_err(|fault| fault.cause));
        assert_eq!(causes, [Err(Cause::StaleEpoch), Ok(()), Ok(())]);
    }
}
