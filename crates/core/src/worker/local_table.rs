//! A table as a worker holds it: where it lives, its parameters as last pulled, and memory for gradients under way.

use super::WorkerError;
use super::answers::{Answers, Decoders};
use super::encoding::{self, Meanwhile, PushCodec, RefusedPush, TableCodecs};
use super::fetch::{FetchId, FetchKind};
use super::gradient::Gradient;
use super::holder::TableHold;
use super::keeping::Keeping;
use super::layout::{Layout, RowPlace, elements_of};
use super::memory::{self, BesideSlab, FetchOptions, ParameterMemory};
use super::models::Models;
use super::request::{Asks, Outgoing, OutgoingForm, Wish};
use super::session::Access;
use super::slab::{GradientInFlight, Slab, SlabInFlight, ValuesInFlight};
use super::staging::StagedTable;
use super::submission::{Part, Sent, Source, Surroundings};
use super::tables::{Planned, TablePolicies};
use crate::codec::Codec;
use crate::consistency::{ClientUpdate, CopyView, PartialPull, ServerPush};
use crate::landing::Destination;
use crate::lease::Lease;
use crate::policy::NonFinite;
use crate::store::{Allocate, Buffer, Heap, Place};
use crate::stream::Replica;
use crate::table::TableSpec;
use crate::types::{Clock, ShardId, TableId};
use crate::wire::DType;
use std::sync::Arc;

/// Free buffers that are kept, for the next pushes and the next answer.
const SPARE_BUFFERS: usize = 3;

/// One of a job's tables.
#[derive(Debug)]
pub(super) struct LocalTable {
    layout: Arc<Layout>,
    /// Its memory, also for gradients under way.
    parameters: ParameterMemory,
    /// The codec of pushes that holds, once there is a plan.
    codec: Option<Arc<Codec>>,
    /// Its end here. Gone while a submission has it.
    push_codec: Option<PushCodec>,
    meanwhile: Meanwhile,
    held: TableHold,
    answers: Answers,
    /// Where it is broadcast: its values as they were, from which pulls are answered.
    replica: Option<Replica>,
    /// What the codec of its versions needs links to carry, and the codec.
    versions_need: Option<(f64, String)>,
    /// A link that pushes travel over carries less than their codec needs.
    lacks_room: bool,
    /// What a reader holds back of it.
    staged: Option<StagedTable>,
    access: Access,
    /// The type of elements that values are rounded to before they are broadcast.
    staged_type: DType,
    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table; 0 before there is a plan.
    valid_from: u32,
    nonfinite: NonFinite,
    is_prioritized: bool,
    models: Models,
    /// A slab of it does not come back before its answer. With local steps the application takes what it has done since the last
    /// exchange for a part of the answer, and would lose it to an older copy.
    exchanges_wait: bool,
    /// A push failed after the application had gone on, and it has not heard of it.
    failure: Option<WorkerError>,
    /// Until they are sent.
    initial: Vec<f32>,
    /// The last clock that was pushed.
    pushed: Option<Clock>,
    /// Iterations that were completed when parameters were last asked for.
    pulled: Clock,
    /// For each shard: the newest version that it has answered with.
    seen: Vec<Clock>,
    /// Gradients with NaN or Inf.
    nonfinite_seen: u64,
}

/// A pull of a whole table, and where servers that share memory with this process may put the answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reply {
    pub(super) fetch: FetchId,
    pub(super) place: Option<Place>,
    /// The type of the elements in that memory.
    pub(super) dtype: DType,
}

impl LocalTable {
    pub(super) fn new(spec: TableSpec, initial: Vec<f32>) -> LocalTable {
        // Row pushes differ in length from step to step; keeping their buffers would only hoard.
        let spare = if spec.rows { 0 } else { SPARE_BUFFERS };
        let layout = Layout::new(spec);
        LocalTable {
            held: TableHold::new(layout.is_sparse().then(|| layout.row_width())),
            layout: Arc::new(layout),
            parameters: ParameterMemory::new(Arc::new(Heap), spare),
            codec: None,
            push_codec: Some(PushCodec::default()),
            meanwhile: Meanwhile::default(),
            answers: Answers::default(),
            replica: None,
            versions_need: None,
            lacks_room: false,
            staged: None,
            access: Access::Full,
            staged_type: DType::F32,
            valid_from: 0,
            nonfinite: NonFinite::default(),
            is_prioritized: false,
            models: Models::default(),
            exchanges_wait: false,
            failure: None,
            initial,
            pushed: None,
            pulled: 0,
            seen: Vec::new(),
            nonfinite_seen: 0,
        }
    }

    /// Takes the plan's word on where the table lives and what holds for it.
    pub(super) fn plan(
        &mut self,
        planned: Planned,
        access: Access,
        allocator: &Arc<dyn Allocate>,
        decoders: &mut Decoders,
    ) {
        self.access = access;
        Arc::get_mut(&mut self.layout).expect("nothing is submitted without a plan").place(planned.chunks);
        self.seen = vec![0; self.layout.shard_count()];
        self.follow(planned.policies, decoders);
        // A reader has the replica alone.
        if access != Access::ReadOnly {
            self.parameters.fill(Arc::clone(allocator), &self.layout);
        }
    }

    /// Lets policies hold from now on. Before other codecs do, requests under way have to leave the old ones
    /// ([`LocalTable::decoded`]).
    pub(super) fn follow(&mut self, policies: TablePolicies, decoders: &mut Decoders) {
        let TablePolicies {
            nonfinite,
            is_prioritized,
            sync,
            sync_apart,
            is_broadcast,
            hold,
            valid_from,
            codecs,
        } = policies;
        self.held.set_policy(hold);
        self.nonfinite = nonfinite;
        self.is_prioritized = is_prioritized;
        self.models = Models::new(sync, sync_apart);
        self.valid_from = valid_from;
        let Some(TableCodecs { push, answer }) = codecs else { return };
        self.codec = push.codec().cloned();
        self.staged_type = answer.rounded_type();
        let is_replicated = is_broadcast && self.access != Access::WriteOnly;
        let answer = if is_replicated { self.replicate(answer) } else { answer };
        self.answers = Answers::new(&self.layout, answer, decoders);
        match &mut self.push_codec {
            Some(codec) => codec.go_over_to(push, &self.layout),
            None => self.meanwhile.next = Some(push),
        }
    }

    /// Takes updates that this codec makes from now on. The codec of the answers that the replica gives.
    fn replicate(&mut self, updates: Codec) -> Codec {
        self.versions_need = updates.needs_bandwidth().map(|need| (need, updates.to_string()));
        let is_sparse = self.layout.is_sparse();
        let of_rows = |codec: Codec| if is_sparse { codec.of_rows() } else { codec };
        let codec = (!updates.is_none()).then(|| Arc::new(of_rows(updates)));
        match &mut self.replica {
            Some(replica) => replica.set_codec(codec),
            None => {
                let layout = &self.layout;
                let stream = |shard| layout.index_of(shard).expect("chunks are on the table's shards");
                let chunks = layout.chunks().map(|(_, chunk)| (elements_of(&chunk), stream(chunk.shard)));
                if self.access == Access::ReadOnly {
                    let streams = layout.chunks().map(|(_, chunk)| stream(chunk.shard));
                    self.staged = Some(StagedTable::new(streams));
                }
                let replica = Replica::new(layout.elements(), codec, chunks);
                let width = layout.row_width();
                self.replica = Some(if is_sparse { replica.of_rows(width) } else { replica });
            }
        }
        Codec::default()
    }

    /// Its values as they were broadcast, where they are.
    pub(super) fn replica(&self) -> Option<&Replica> {
        self.replica.as_ref()
    }

    pub(super) fn replica_mut(&mut self) -> Option<&mut Replica> {
        self.replica.as_mut()
    }

    /// What every link must carry for its pushes to be as their codec makes them with room, where that matters.
    pub(super) fn pushes_need(&self) -> Option<f64> {
        self.codec.as_ref()?.needs_bandwidth()
    }

    /// The same for versions that are broadcast.
    pub(super) fn versions_need(&self) -> Option<f64> {
        self.versions_need.as_ref().map(|(need, _)| *need)
    }

    /// A codec, of pushes or of versions, for which it matters what links carry.
    pub(super) fn watching_codec(&self) -> Option<String> {
        let of_pushes = self.codec.as_ref().filter(|codec| codec.needs_bandwidth().is_some());
        let of_versions = self.versions_need.as_ref().map(|(_, codec)| codec.clone());
        of_pushes.map(|codec| codec.to_string()).or(of_versions)
    }

    /// Whether links over which it is pushed have less than that.
    pub(super) fn set_lacks_room(&mut self, lacks_room: bool) {
        self.lacks_room = lacks_room;
    }

    /// What a reader holds back of it.
    pub(super) fn staged(&self) -> Option<&StagedTable> {
        self.staged.as_ref()
    }

    /// The same, with the replica that it is held back from.
    pub(super) fn staged_mut(&mut self) -> Option<(&mut StagedTable, &mut Replica)> {
        self.staged.as_mut().zip(self.replica.as_mut())
    }

    /// The type of elements that values are rounded to before they are broadcast.
    pub(super) fn staged_type(&self) -> DType {
        self.staged_type
    }

    /// The last version of a stream that came whole.
    pub(super) fn stream_version(&self, stream: usize) -> Option<Clock> {
        match &self.staged {
            Some(staged) => staged.position(stream),
            None => self.replica.as_ref()?.version(stream),
        }
    }

    /// Whether its versions are broadcast, and pulls are answered here.
    pub(super) fn is_broadcast(&self) -> bool {
        self.replica.is_some()
    }

    /// The version of a shard's part that the replica has.
    pub(super) fn replica_version(&self, shard: ShardId) -> Option<Clock> {
        self.replica.as_ref()?.version(self.layout.index_of(shard)?)
    }

    /// Whether the replica has of a shard what an iteration needs.
    pub(super) fn replica_has(&self, shard: ShardId, clock: Clock) -> bool {
        self.replica_version(shard).is_some_and(|version| version >= self.models.version_needed(clock))
    }

    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table.
    pub(super) fn valid_from(&self) -> u32 {
        self.valid_from
    }

    /// A gradient as it is sent to a shard when the codec that made it holds no more.
    pub(super) fn decoded(&self, gradient: &Outgoing, shard: ShardId) -> Outgoing {
        encoding::decoded(self.codec.as_ref(), &self.layout, gradient, |of| of == shard)
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn name(&self) -> &str {
        self.layout.name()
    }

    /// The initial values. Only asked for once.
    pub(super) fn take_initial(&mut self) -> Vec<f32> {
        std::mem::take(&mut self.initial)
    }

    /// Values in memory that frames are sent from.
    pub(super) fn lend_copy(&self, values: &[f32], allocator: &dyn Allocate) -> Lease {
        let pool = self.parameters.pool();
        let mut buffer = pool.take(values.len(), allocator);
        buffer.as_mut_slice().copy_from_slice(values);
        pool.lend(buffer)
    }

    /// The parameters as last pulled; none while they are lent.
    pub(super) fn values(&self) -> &[f32] {
        self.parameters.values()
    }

    /// The same, for readers on other threads. The error says why there is nothing to read.
    pub(super) fn read(&self) -> Result<Lease, WorkerError> {
        if self.layout.is_sparse() {
            let name = self.name();
            return Err(WorkerError::Order(format!("table `{name}` is sparse: pull the rows to read")));
        }
        self.check_not_lent()?;
        Ok(self.parameters.read().expect("it is not lent"))
    }

    /// Whether the application has its memory as a slab, or an exchange has.
    pub(super) fn is_lent(&self) -> bool {
        self.parameters.is_lent()
    }

    pub(super) fn codec(&self) -> String {
        encoding::text_of(self.codec.as_ref())
    }

    pub(super) fn is_prioritized(&self) -> bool {
        self.is_prioritized
    }

    /// Gradients with NaN or Inf that were found here.
    pub(super) fn nonfinite_seen(&self) -> u64 {
        self.nonfinite_seen
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let codec = self.push_codec.as_ref().map_or(0, PushCodec::memory_bytes);
        let replica = self.replica.as_ref().map_or(0, Replica::memory_bytes);
        self.parameters.memory_bytes()
            + codec
            + self.answers.memory_bytes()
            + replica
            + self.held.memory_bytes()
    }

    // Questions to the consistency model.

    /// When the worker may go on without some of the blocks of a shard, if it may.
    pub(super) fn partial_pull(&self, shard: ShardId) -> Option<PartialPull> {
        self.models.partial_pull(shard.server)
    }

    /// Exchanges of it wait for their answers from now on, whatever the consistency model.
    pub(super) fn wait_for_exchanges(&mut self) {
        self.exchanges_wait = true;
    }

    /// The most rounds that its copy may lack where it is a cache. Rows are asked for one by one, and what is broadcast is a replica
    /// already.
    pub(super) fn cache_bound(&self) -> Option<u64> {
        if self.layout.is_sparse() || self.is_broadcast() || self.is_lent() && self.exchanges_wait {
            return None;
        }
        self.models.cache_bound()
    }

    /// How a pull after a push of it becomes visible.
    pub(super) fn fetch_kind(&self) -> FetchKind {
        if self.cache_bound().is_some() { FetchKind::Background } else { self.pull_kind(false) }
    }

    /// How a pull that the application waits for becomes visible.
    pub(super) fn pull_kind(&self, at_once: bool) -> FetchKind {
        match self.models.is_partial() {
            _ if at_once => FetchKind::AtOnce,
            true => FetchKind::Partial,
            false => FetchKind::Whole,
        }
    }

    /// The version of its oldest block; a table of rows has none.
    pub(super) fn version(&self) -> Option<Clock> {
        (!self.layout.is_sparse()).then(|| self.parameters.version())
    }

    /// Whether an iteration may be computed on the copy that is here.
    pub(super) fn is_fresh(&self, clock: Clock) -> bool {
        self.parameters.is_fresh(clock, self.cache_bound())
    }

    /// Whether a pull for an iteration is under way.
    pub(super) fn is_fetching_for(&self, clock: Clock) -> bool {
        self.parameters.is_fetching_for(clock)
    }

    /// Rounds that the copy lacks for an iteration; a table of rows has no copy.
    pub(super) fn staleness(&self, clock: Clock) -> Option<u64> {
        self.version().map(|version| clock.saturating_sub(version))
    }

    /// A sentence about the copy that is here, for those who wait for another one.
    pub(super) fn explain_copy(&self, clock: Clock) -> String {
        let (name, version) = (self.name(), self.parameters.version());
        let bound = match self.cache_bound() {
            Some(bound) => format!("may lack {bound} rounds"),
            None => "may not be used".into(),
        };
        let sync = self.models.text();
        format!(
            "the copy of table `{name}` is of version {version} and {bound} in iteration {clock} ({sync})"
        )
    }

    /// The application computes on what is here from now on, until it pushes.
    pub(super) fn keep_front(&mut self) {
        self.parameters.keep_front();
    }

    /// Remembers what the application has to hear.
    pub(super) fn set_failure(&mut self, error: WorkerError) {
        self.failure.get_or_insert(error);
    }

    /// A failure that the application has not heard of, once.
    pub(super) fn take_failure(&mut self) -> Option<WorkerError> {
        self.failure.take()
    }

    pub(super) fn failure(&self) -> Option<&WorkerError> {
        self.failure.as_ref()
    }

    /// What is asked for after a gradient of this clock, which is held back or not.
    pub(super) fn wish_after(&self, clock: Clock, is_held: bool) -> Wish {
        let lacks = (clock + 1).saturating_sub(self.parameters.version());
        let is_asked = self.parameters.is_fetching();
        let copy = self.cache_bound().map(|bound| CopyView { lacks, bound, is_asked });
        let asks = self.models.asks_after(&ClientUpdate { clock, pulled: self.pulled, copy });
        let holds_pull = is_held && self.held.holds_pulls();
        match copy {
            _ if !asks => Wish::Nothing,
            // Where the application would wait for another copy, it is asked for.
            Some(copy) if holds_pull && copy.lacks <= copy.bound => Wish::Nothing,
            None if holds_pull && !self.is_broadcast() => Wish::Leave,
            _ => Wish::Parameters,
        }
    }

    /// Begins to ask for what is wanted after a gradient of this clock.
    pub(super) fn begin_asking(&mut self, clock: Clock, is_held: bool, kind: FetchKind) -> Asks {
        match self.wish_after(clock, is_held) {
            Wish::Nothing => Asks::Nothing,
            Wish::Leave => Asks::Leave,
            Wish::Parameters => Asks::Parameters(self.begin_pull(clock + 1, kind)),
        }
    }

    /// Whether iterations are left out whose rounds are closed.
    pub(super) fn catches_up(&self) -> bool {
        self.models.catches_up()
    }

    /// Whether rounds before this one may be open on some shard, as far as is known.
    pub(super) fn may_lack(&self, version: Clock) -> bool {
        self.seen.iter().any(|seen| *seen < version)
    }

    /// The iteration that an answer has to be good for, after so many that the application has completed: that of the last pull,
    /// which may have been made before the application turned its clock.
    pub(super) fn iteration(&self, completed: Clock) -> Clock {
        completed.max(self.pulled)
    }

    /// A shard has answered, and no chunk of the answer is of an earlier version: some may be stepped before their round closes.
    pub(super) fn note_version(&mut self, shard: ShardId, version: Clock) {
        if let Some(index) = self.layout.index_of(shard) {
            self.seen[index] = self.seen[index].max(version);
        }
    }

    /// Whether a shard is known to drop a gradient of this clock: it is past that by now.
    pub(super) fn is_dropped(&self, shard: ShardId, clock: Clock) -> bool {
        let seen = self.layout.index_of(shard).map_or(0, |index| self.seen[index]);
        self.models.drops(shard.server, clock, seen)
    }

    /// Whether an answer of a shard that a condition stood before is taken. Rows are always, and so is what the worker cannot go on
    /// without: it may have been asked for under another model than the one that holds now, and is not asked for twice.
    pub(super) fn takes(&self, shard: ShardId, push: &ServerPush, is_partial: bool) -> bool {
        self.layout.is_sparse() || !is_partial || self.models.takes(shard.server, push)
    }

    // Pushes.

    pub(super) fn check_not_lent(&self) -> Result<(), WorkerError> {
        if !self.is_lent() {
            return Ok(());
        }
        let name = self.name();
        Err(WorkerError::Order(format!(
            "table `{name}` is lent as a slab: exchange it, or give it back first"
        )))
    }

    /// A table is pushed once per iteration, and one gradient at a time.
    pub(super) fn check_clock(&self, clock: Clock) -> Result<(), WorkerError> {
        let name = self.name();
        if self.pushed != Some(clock) {
            if self.is_submitting() {
                let sentence =
                    format!("table `{name}` is being pushed by another thread: wait for that first");
                return Err(WorkerError::Order(sentence));
            }
            return Ok(());
        }
        Err(WorkerError::Order(format!(
            "table `{name}` was pushed at clock {clock} already; call `clock` between iterations"
        )))
    }

    /// Whether a gradient fits, and comes at its time.
    pub(super) fn check_gradient(&self, gradient: &Gradient<'_>, clock: Clock) -> Result<(), WorkerError> {
        self.check_not_lent()?;
        self.check_clock(clock)?;
        self.layout.check_gradient(gradient)
    }

    /// The clock that a pull comes after: that of a push, if there was one in this iteration.
    pub(super) fn pull_clock(&self, clock: Clock) -> Clock {
        if self.pushed == Some(clock) { clock + 1 } else { clock }
    }

    /// Whether a gradient of this clock was pushed, and not refused since.
    pub(super) fn has_pushed(&self, clock: Clock) -> bool {
        self.pushed == Some(clock)
    }

    /// Whether a layer's gradient fits, and may be sent.
    pub(super) fn check_layer(
        &mut self,
        layer: usize,
        gradient: &Gradient<'_>,
        clock: Clock,
        is_finite: bool,
    ) -> Result<(), WorkerError> {
        self.layout.check_layer(layer, gradient)?;
        if is_finite || self.nonfinite == NonFinite::Clip {
            return Ok(());
        }
        self.nonfinite_seen += 1;
        Err(WorkerError::NonFinite { table: self.layout.layer_name(layer).to_owned(), clock })
    }

    /// A push of this clock was refused: it can be pushed again, corrected or later. Servers that have it take it once.
    pub(super) fn forget_pushed(&mut self, clock: Clock) {
        self.pushed.take_if(|pushed| *pushed == clock);
    }

    /// Begins to submit a gradient of this clock. Until [`LocalTable::end_submission`] its codec is with it.
    pub(super) fn begin_submission<'a>(
        &mut self,
        table: usize,
        source: Source<'a>,
        clock: Clock,
        allocator: &Arc<dyn Allocate>,
    ) -> Part<'a> {
        // A table has one slab, and one that is being submitted does not pass the check of its clock.
        let codec = self.push_codec.take().expect("one gradient of a table is submitted at a time");
        self.pushed = Some(clock);
        self.parameters.let_front_go();
        let compares = codec.needs_parameters() || self.held.needs_parameters();
        let holding = self.held.begin();
        let surroundings = Surroundings {
            layout: self.layout.clone(),
            nonfinite: self.nonfinite,
            pool: self.parameters.pool().clone(),
            allocator: allocator.clone(),
            parameters: compares.then(|| self.parameters.read()).flatten(),
            lacks_room: self.lacks_room,
            may_end_early: self.models.is_partial() || self.cache_bound().is_some(),
        };
        Part::new(table, source, codec, holding, surroundings)
    }

    /// Whether a gradient is being submitted.
    pub(super) fn is_submitting(&self) -> bool {
        self.push_codec.is_none()
    }

    /// Takes back the codec that a submission had. What it made by a codec that holds no more leaves it.
    pub(super) fn end_submission(&mut self, part: &mut Part<'_>) {
        self.held.end(part.holding.take());
        let Some(mut codec) = part.codec.take() else { return };
        self.nonfinite_seen += u64::from(part.is_nonfinite);
        let Meanwhile { next, refused } = std::mem::take(&mut self.meanwhile);
        for RefusedPush { clock, by, gradient } in refused {
            codec.note_refused(&self.layout, clock, by, gradient);
        }
        if let Some(next) = next {
            if let Some(Sent::Made(outgoing)) = &mut part.sent {
                *outgoing = codec.decoded(&self.layout, outgoing, |_| true);
            }
            codec.go_over_to(next, &self.layout);
        }
        self.push_codec = Some(codec);
    }

    /// A submission failed: it can be pushed again. A part of it that was prepared waits for that where a residual counts it as sent.
    pub(super) fn keep_unsent(&mut self, clock: Clock, part: &Part<'_>) {
        self.forget_pushed(clock);
        if let Some(Sent::Made(outgoing)) = &part.sent {
            let shards: Vec<ShardId> = self.layout.shards().collect();
            shards.into_iter().for_each(|shard| self.note_refused(clock, shard, outgoing.clone()));
        }
    }

    /// A server refused what it was sent of a push.
    pub(super) fn note_refused(&mut self, clock: Clock, by: ShardId, gradient: Outgoing) {
        match &mut self.push_codec {
            Some(codec) => codec.note_refused(&self.layout, clock, by, gradient),
            None => self.meanwhile.refused.push(RefusedPush { clock, by, gradient }),
        }
    }

    /// What is kept that servers do not have.
    pub(super) fn keeping(&mut self) -> Keeping<'_> {
        Keeping::new(&self.layout, self.push_codec.as_mut(), &mut self.held)
    }

    /// Which updates are held back, and what is.
    pub(super) fn held(&self) -> &TableHold {
        &self.held
    }

    /// Puts rows that need not be asked for in an iteration to their places in `to`; the others are left.
    pub(super) fn answer_rows(&self, clock: Clock, wanted: &mut Vec<RowPlace>, to: &mut [f32]) {
        if !self.is_broadcast() {
            self.held.answer_rows(clock, wanted, to);
        }
    }

    // Pulls.

    /// The type of the elements that answers come as, where a codec does not encode them; what servers send.
    pub(super) fn answer_type(&self) -> Option<DType> {
        self.answers.elements()
    }

    /// The type that a slab which takes halves gets its parameters as; none where an answer codec encodes them. A codec that compares
    /// gradients with the parameters reads these as they are.
    pub(super) fn slab_type(&self) -> Option<DType> {
        let needs_values = self.codec.as_ref().is_some_and(|codec| codec.needs_parameters());
        let found = self.answers.elements();
        if needs_values { found.map(|_| DType::F32) } else { found }
    }

    /// Begins a pull of the whole table.
    pub(super) fn begin_pull(&mut self, clock: Clock, kind: FetchKind) -> Reply {
        self.pulled = clock;
        // An encoded answer is decoded into its place.
        let wants_place = self.answer_type() == Some(DType::F32) && !self.is_broadcast();
        let (fetch, place) = self.parameters.begin(FetchOptions { clock, kind, wants_place });
        Reply { fetch, place, dtype: DType::F32 }
    }

    /// Begins a pull in the background for an iteration: what follows is computed on what it brings, once it is here.
    pub(super) fn renew(&mut self, clock: Clock) -> Reply {
        let Some(dtype) = self.parameters.exchanged_type() else {
            return self.begin_pull(clock, FetchKind::Background);
        };
        self.pulled = clock;
        let partition = Arc::clone(self.layout.partition(dtype));
        let wants_place = self.answers.elements() == Some(dtype);
        let beside = BesideSlab { clock, dtype, partition: &partition, wants_place };
        let (fetch, place) = self.parameters.begin_renewal(beside);
        Reply { fetch, place, dtype }
    }

    /// Where a shard's answer to a pull belongs, which a codec made or not; `fetch` is `None` when nobody wants it any more.
    /// `None` when it is of no use at all.
    pub(super) fn destination(
        &mut self,
        fetch: Option<FetchId>,
        shard: ShardId,
        is_encoded: bool,
    ) -> Option<Destination> {
        let index = self.layout.index_of(shard)?;
        let region = fetch.and_then(|fetch| self.parameters.back(fetch, index));
        let decoder = self.answers.decoder(index).filter(|_| is_encoded || self.answers.has_base());
        match decoder {
            Some(decoder) => Some(Destination::decoded(region, decoder.clone())),
            None => region.map(Destination::new),
        }
    }

    /// Whether a driver is receiving into a slab at this moment.
    pub(super) fn is_landing(&self, slab: &SlabInFlight) -> bool {
        matches!(slab.values, ValuesInFlight::Awaited(fetch) if self.parameters.is_landing(fetch))
    }

    /// The values of so many rows from what a codec made. `None` when they do not fit.
    pub(super) fn decode_rows(&self, shard: ShardId, rows: usize, payload: &[u8]) -> Option<Vec<f32>> {
        self.answers.decode_rows(&self.layout, self.layout.index_of(shard)?, rows, payload)
    }

    /// All of a shard's answer of this version is here. `may_go_on` says whether a partial pull for an iteration need not wait for
    /// the rest.
    pub(super) fn arrived(
        &mut self,
        fetch: FetchId,
        shard: ShardId,
        version: Clock,
        may_go_on: impl Fn(Clock) -> bool,
    ) {
        if let Some(index) = self.layout.index_of(shard) {
            self.parameters.arrived(fetch, index, version, may_go_on);
        }
    }

    /// A shard's answer will not come, or is not wanted.
    pub(super) fn settle(&mut self, fetch: FetchId, shard: ShardId) {
        if let Some(index) = self.layout.index_of(shard) {
            self.parameters.settle(fetch, index);
        }
    }

    /// Shows blocks of partial pulls to the application where the worker may go on without the others.
    pub(super) fn publish_partial(&mut self, may_go_on: impl Fn(Clock) -> bool) {
        self.parameters.publish_partial(may_go_on);
    }

    // Slabs.

    /// Lends its memory to the application, unless requests are under way.
    pub(super) fn lend(
        &mut self,
        table: TableId,
        lender: u64,
        is_busy: bool,
        allocator: &dyn Allocate,
    ) -> Result<Slab, WorkerError> {
        if self.layout.is_sparse() {
            let name = self.name();
            let sentence = format!("table `{name}` is sparse: it is pushed and pulled by rows");
            return Err(WorkerError::Order(sentence));
        }
        self.check_not_lent()?;
        if is_busy {
            let name = self.name();
            let sentence = format!("table `{name}` is being pushed or pulled: wait for that first");
            return Err(WorkerError::Order(sentence));
        }
        let values = self.parameters.lend_slab().expect("it is not lent");
        Ok(Slab::new(lender, table, allocator.zeroed(values.len()), values))
    }

    /// Takes a slab's memory back.
    pub(super) fn take_back(&mut self, mut slab: Slab) {
        slab.convert_values(DType::F32);
        let (gradient, mut values, _retired) = slab.into_parts();
        // The application may have changed them, and differences may have come meanwhile.
        self.answers.copy_base(&mut values);
        self.parameters.return_slab(values);
        self.parameters.pool().keep(gradient);
    }

    /// Takes a slab for an exchange: what is sent, and where the answer is received, if one is asked for.
    pub(super) fn begin_exchange(
        &mut self,
        mut slab: Slab,
        sent: Sent,
        clock: Clock,
        wish: Wish,
    ) -> (Outgoing, SlabInFlight, Asks) {
        let (table, missing, takes_halves) = (slab.table(), slab.missing().clone(), slab.takes_halves());
        let values_type = self.slab_type().filter(|_| takes_halves).unwrap_or(DType::F32);
        slab.convert_values(values_type);
        let (gradient, values, retired) = slab.into_parts();
        let (outgoing, gradient) = match sent {
            Sent::Made(made) => (made, GradientInFlight::Kept(gradient)),
            Sent::InPlace(dtype) => {
                let buffer = self.parameters.pool().lend(gradient);
                let (form, is_counted) = (OutgoingForm::Dense(dtype), false);
                let outgoing = Outgoing { buffer: buffer.clone(), form, missing, is_counted };
                (outgoing, GradientInFlight::Sent(buffer))
            }
        };
        // Memory that frames are sent from is not given back early: the model may have changed since they were prepared.
        let is_copied = matches!(gradient, GradientInFlight::Kept(_));
        if is_copied && self.cache_bound().is_some() {
            let values = ValuesInFlight::Cached(self.parameters.hold_slab(values, values_type));
            let asks = match wish {
                Wish::Parameters => Asks::Parameters(self.renew(clock + 1)),
                Wish::Nothing | Wish::Leave => Asks::Nothing,
            };
            let slab = SlabInFlight { table, gradient, values, values_type, takes_halves, retired };
            return (outgoing, slab, asks);
        }
        if let Wish::Nothing | Wish::Leave = wish {
            let values = ValuesInFlight::Kept(values);
            let slab = SlabInFlight { table, gradient, values, values_type, takes_halves, retired };
            return (outgoing, slab, if wish == Wish::Leave { Asks::Leave } else { Asks::Nothing });
        }
        self.pulled = clock + 1;
        // Servers put what answers consist of there, and nothing else.
        let wants_place = self.answers.elements() == Some(values_type) && !self.is_broadcast();
        let (fetch, place) = self.begin_slab(clock + 1, values, values_type, wants_place);
        let place = place.filter(|_| wants_place);
        let values = ValuesInFlight::Awaited(fetch);
        let slab = SlabInFlight { table, gradient, values, values_type, takes_halves, retired };
        (outgoing, slab, Asks::Parameters(Reply { fetch, place, dtype: values_type }))
    }

    /// Begins a pull for this iteration into a slab's memory, or beside it where the exchange may end before all of it is here.
    fn begin_slab(
        &mut self,
        clock: Clock,
        values: Buffer,
        dtype: DType,
        wants_place: bool,
    ) -> (FetchId, Option<Place>) {
        let partition = Arc::clone(self.layout.partition(dtype));
        if !self.models.is_partial() {
            return self.parameters.begin_slab(clock, values, &partition);
        }
        let LocalTable { parameters, layout, models, .. } = self;
        let shards: Vec<ShardId> = layout.shards().collect();
        let takes =
            |index: usize, version: Clock| models.takes(shards[index].server, &ServerPush { clock, version });
        let beside = BesideSlab { clock, dtype, partition: &partition, wants_place };
        parameters.begin_beside(values, beside, takes)
    }

    /// Ends an exchange: its slab. What frames are still sent from, or servers may still write to, stays with the slab, since
    /// the application may know its address; the slab has other memory then.
    pub(super) fn end_exchange(
        &mut self,
        in_flight: SlabInFlight,
        lender: u64,
        allocator: &dyn Allocate,
    ) -> Slab {
        let SlabInFlight { table, gradient, values, values_type, takes_halves, mut retired } = in_flight;
        let gradient = match gradient {
            GradientInFlight::Kept(gradient) => gradient,
            GradientInFlight::Sent(lease) => lease.reclaim().unwrap_or_else(|lease| {
                let gradient = memory::copied(&lease, allocator.zeroed(lease.len()));
                retired.push(lease.into());
                gradient
            }),
        };
        let values = match values {
            ValuesInFlight::Kept(values) => values,
            ValuesInFlight::Awaited(fetch) | ValuesInFlight::Cached(fetch) => {
                let (values, reserved) = self.parameters.take_slab(fetch).expect("an exchange ends once");
                retired.extend(reserved);
                values
            }
        };
        let slab = Slab::new(lender, table, gradient, values).with_retired(retired);
        slab.with_values_type(values_type, takes_halves)
    }

    /// Its memory against what is known of it. `waiting` is the number of requests that parameters are awaited from.
    pub(super) fn check(&self, waiting: usize) -> Result<(), String> {
        self.parameters.check().map_err(|why| format!("table `{}`: {why}", self.name()))?;
        let blocks = self.parameters.waiting();
        if blocks != waiting {
            let name = self.name();
            return Err(format!(
                "table `{name}`: {blocks} blocks are awaited, and {waiting} requests bring some"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Ticket;
    use super::super::request::{Request, RequestKind};
    use super::super::slab::Prepared;
    use super::super::submission::{Submission, SubmissionKind};
    use super::*;
    use crate::consistency::{Ask, Consistency, Decision, PullView, SyncPolicy, SyncState};
    use crate::hands::Alone;
    use crate::policy::Policy;
    use crate::prng::Prng;
    use crate::registry::{Entry, Registry};
    use crate::spec::Spec;
    use crate::table::Chunk;
    use crate::types::ServerId;
    use std::collections::BTreeMap;

    /// Asks for parameters when they are older than two iterations, and takes even versions only.
    #[derive(Debug)]
    struct Frugal;

    impl Consistency for Frugal {
        fn pull(&self, _: &SyncState, _: &PullView, _: &mut Prng) -> Decision {
            Decision::Answer
        }

        fn after_client_update(&self, update: &ClientUpdate) -> Ask {
            if update.clock >= update.pulled + 2 { Ask::PushAndPull } else { Ask::Push }
        }

        fn after_server_push(&self, push: &ServerPush) -> bool {
            push.version.is_multiple_of(2)
        }
    }

    fn frugal(_: &Spec) -> Result<Box<dyn Consistency>, crate::spec::SpecError> {
        Ok(Box::new(Frugal))
    }

    fn table() -> LocalTable {
        let mut registry = Registry::builtin();
        let (name, about, example) = ("frugal", "Asks rarely.", "frugal");
        registry.consistency.register(Entry { name, about, params: &[], example, build: frugal });
        let spec = TableSpec::dense("w", [4]);
        let mut table = LocalTable::new(spec.clone(), vec![0.0; 4]);
        let shard = ShardId { server: ServerId(0), core: 0 };
        let planned = Planned {
            chunks: vec![Chunk { shard, start: 0, len: 4 }],
            policies: TablePolicies {
                nonfinite: NonFinite::Reject,
                is_prioritized: false,
                sync: SyncPolicy::parse(&registry.consistency, "frugal").unwrap(),
                sync_apart: BTreeMap::new(),
                is_broadcast: false,
                hold: None,
                valid_from: 1,
                codecs: TableCodecs::new(&registry, &spec, &Policy::default(), Default::default()).ok(),
            },
        };
        let heap: Arc<dyn Allocate> = Arc::new(Heap);
        table.plan(planned, Access::Full, &heap, &mut Decoders::default());
        table
    }

    #[test]
    fn a_model_says_when_parameters_are_asked_for_and_which_are_taken() {
        let mut table = table();
        assert_eq!(
            [0, 1, 2].map(|clock| table.wish_after(clock, false) == Wish::Parameters),
            [false, false, true]
        );
        table.begin_pull(3, FetchKind::Whole);
        assert_eq!(
            [3, 4, 5].map(|clock| table.wish_after(clock, false) == Wish::Parameters),
            [false, false, true]
        );
        let shard = ShardId { server: ServerId(0), core: 0 };
        let takes = |version| table.takes(shard, &ServerPush { clock: 3, version }, true);
        assert_eq!([takes(2), takes(3)], [true, false]);
        let whole = ServerPush { clock: 3, version: 3 };
        assert!(table.takes(shard, &whole, false), "the worker cannot go on without it");
    }

    #[test]
    fn an_exchange_without_an_answer_keeps_the_slab_as_it_is() {
        let mut table = table();
        let mut slab = table.lend(TableId(0), 0, false, &Heap).unwrap();
        slab.values_mut().fill(5.0);
        slab.gradient_mut().fill(1.0);
        let wish = table.wish_after(0, false);
        let (outgoing, in_flight, asks) = table.begin_exchange(slab, Sent::InPlace(DType::F32), 0, wish);
        assert!(matches!(asks, Asks::Nothing), "this model does not ask after the first iteration");
        assert_eq!(outgoing.buffer.as_slice(), [1.0; 4]);
        // A frame is still to be sent.
        let slab = table.end_exchange(in_flight, 0, &Heap);
        assert_eq!((slab.gradient(), slab.values()), (&[1.0; 4][..], &[5.0; 4][..]));
        table.take_back(slab);
        assert_eq!((table.values(), outgoing.buffer.as_slice()), (&[5.0; 4][..], &[1.0; 4][..]));
    }

    /// The way of one gradient, as a worker has it travel.
    fn submit(table: &mut LocalTable, source: Source<'_>, clock: Clock) -> Result<Sent, WorkerError> {
        let heap: Arc<dyn Allocate> = Arc::new(Heap);
        table.check_clock(clock)?;
        let part = table.begin_submission(0, source, clock, &heap);
        let kind = SubmissionKind::Push { want_params: false };
        let mut submission = Submission { clock, kind, parts: vec![part], error: None };
        submission.prepare(&Alone);
        table.end_submission(&mut submission.parts[0]);
        // The next one may be of the same clock.
        table.forget_pushed(clock);
        match submission.error {
            Some(error) => Err(error),
            None => Ok(submission.parts[0].sent.take().expect("it is prepared")),
        }
    }

    fn given(values: &[f32]) -> Source<'_> {
        Source::Given(Gradient::Dense(values), Default::default())
    }

    fn use_codec(table: &mut LocalTable, codec: &str) {
        use_policy(table, Policy::default().with(crate::policy::Axis::Codec, codec));
    }

    fn use_policy(table: &mut LocalTable, policy: Policy) {
        let policies = TablePolicies {
            nonfinite: NonFinite::Reject,
            is_prioritized: false,
            sync: SyncPolicy::parse(&Registry::builtin().consistency, "bsp").unwrap(),
            sync_apart: BTreeMap::new(),
            is_broadcast: false,
            hold: policy.hold(&Registry::builtin()).unwrap(),
            valid_from: table.valid_from() + 1,
            codecs: TableCodecs::new(
                &Registry::builtin(),
                &TableSpec::dense("w", [4]),
                &policy,
                Default::default(),
            )
            .ok(),
        };
        table.follow(policies, &mut Decoders::default());
    }

    #[test]
    fn a_gradient_that_is_refused_gives_its_memory_back() {
        let mut table = table();
        let before = table.memory_bytes();
        let error = submit(&mut table, given(&[f32::NAN; 4]), 7).unwrap_err();
        assert_eq!(error, WorkerError::NonFinite { table: "w".into(), clock: 7 });
        let kept = table.memory_bytes() - before;
        let sent = submit(&mut table, given(&[1.0; 4]), 7).unwrap();
        assert_eq!((table.memory_bytes() - before, table.nonfinite_seen()), (kept, 1));
        drop(sent);
        assert_eq!(table.memory_bytes() - before, kept, "it is kept for the next push");
    }

    /// Another pass over it would cost as much as sending it.
    #[test]
    fn nan_in_a_slab_is_left_to_servers_where_no_codec_looks_at_it() {
        let mut table = table();
        let slab = |prepared: Prepared| {
            let buffer = |value: f32| {
                let mut buffer = Heap.zeroed(4);
                buffer.as_mut_slice().fill(value);
                buffer
            };
            let mut slab = Slab::new(0, TableId(0), buffer(f32::NAN), buffer(0.0));
            slab.contains(prepared);
            Source::Slab(Some(slab))
        };
        let sent = submit(&mut table, slab(Prepared::Gradient), 3).unwrap();
        assert!(matches!(sent, Sent::InPlace(DType::F32)), "{sent:?}");
        use_codec(&mut table, "f16");
        let refused = WorkerError::NonFinite { table: "w".into(), clock: 3 };
        assert_eq!(submit(&mut table, slab(Prepared::Gradient), 3).unwrap_err(), refused);
        assert_eq!(submit(&mut table, slab(Prepared::Chosen), 3).unwrap_err(), refused);
        let sent = submit(&mut table, slab(Prepared::Halves), 3).unwrap();
        assert!(matches!(sent, Sent::InPlace(DType::F16)), "{sent:?}");
        use_codec(&mut table, "topk:0.5");
        assert_eq!(submit(&mut table, slab(Prepared::Gradient), 3).unwrap_err(), refused);
    }

    #[test]
    fn one_gradient_of_a_table_is_submitted_at_a_time() {
        let (mut table, heap): (_, Arc<dyn Allocate>) = (table(), Arc::new(Heap));
        let values = [1.0; 4];
        let mut part = table.begin_submission(0, given(&values), 0, &heap);
        assert!(table.is_submitting());
        let error = table.check_clock(0).unwrap_err();
        assert!(error.to_string().contains("pushed at clock 0 already"), "{error}");
        let error = table.check_clock(1).unwrap_err();
        assert!(error.to_string().contains("table `w` is being pushed by another thread"), "{error}");
        table.end_submission(&mut part);
        assert!(!table.is_submitting() && submit(&mut table, given(&values), 1).is_ok());
    }

    /// The codec is away when another one takes its place, and when a server refuses an earlier push.
    #[test]
    fn what_happens_while_a_gradient_is_encoded_is_made_up_for() {
        let (mut table, heap): (_, Arc<dyn Allocate>) = (table(), Arc::new(Heap));
        use_codec(&mut table, "topk:0.5");
        let Sent::Made(first) = submit(&mut table, given(&[4.0, 1.0, 3.0, 0.0]), 0).unwrap() else {
            panic!("topk encodes");
        };
        let part = table.begin_submission(0, given(&[0.0, 0.0, 8.0, 9.0]), 1, &heap);
        let kind = SubmissionKind::Push { want_params: false };
        let mut submission = Submission { clock: 1, kind, parts: vec![part], error: None };
        submission.prepare(&Alone);
        // Of the first, 4 and 3 were sent, and 1 is left.
        table.note_refused(0, ShardId { server: ServerId(0), core: 0 }, first);
        use_codec(&mut table, "none");
        assert_eq!(table.codec(), "");
        table.end_submission(&mut submission.parts[0]);
        assert_eq!(submission.error, None);
        let Some(Sent::Made(second)) = submission.parts[0].sent.take() else { panic!("it was encoded") };
        assert!(matches!(second.form, OutgoingForm::Decoded(_)), "{second:?}");
        assert_eq!(second.buffer.as_slice()[..4], [0.0, 0.0, 8.0, 9.0]);
        // The refused one and the rest go with the next.
        let Sent::Made(third) = submit(&mut table, given(&[0.0; 4]), 2).unwrap() else {
            panic!("something is left to send");
        };
        let shard = ShardId { server: ServerId(0), core: 0 };
        let third = table.decoded(&third, shard);
        assert_eq!(third.buffer.as_slice()[..4], [4.0, 1.0, 3.0, 0.0]);
    }

    /// A server would put halves where this worker counts on longer elements, and the reverse.
    #[test]
    fn a_place_is_named_as_long_as_answers_consist_of_its_elements() {
        let mut table = table();
        let fetch = table.begin_pull(0, FetchKind::Whole).fetch;
        let request = |dtype| {
            let place = Some(Place { segment: 1, offset: 0 });
            let shard = ShardId { server: ServerId(0), core: 0 };
            let kind = RequestKind::Pull { rows: None, now: false };
            Request::new(shard, 0, 0, Ticket(0), kind).with_reply(Some(Reply { fetch, place, dtype }))
        };
        for (answers, elements) in [
            ("none", Some(DType::F32)),
            ("f16", Some(DType::F16)),
            ("bf16", Some(DType::Bf16)),
            ("int8", None),
        ] {
            use_policy(&mut table, Policy::default().with(crate::policy::Axis::AnswerCodec, answers));
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let mut request = request(dtype);
                request.check_place(&table);
                assert_eq!(request.reply_place().is_some(), elements == Some(dtype), "{answers} {dtype:?}");
            }
        }
    }

    #[test]
    fn a_table_that_is_lent_says_so_until_it_is_given_back() {
        let mut table = table();
        assert_eq!(table.check_not_lent(), Ok(()));
        let slab = table.lend(TableId(0), 0, false, &Heap).unwrap();
        let why = table.check_not_lent().unwrap_err().to_string();
        assert!(why.contains("table `w` is lent as a slab: exchange it, or give it back first"), "{why}");
        table.take_back(slab);
        assert_eq!(table.check_not_lent(), Ok(()));
    }
}
