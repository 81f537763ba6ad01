//! A table as a worker holds it: where it lives, its parameters as last pulled, and memory for gradients under way.

use super::encoding::{Made, Plain, TableCodecs};
use super::layout::{Layout, elements_of};
use super::memory::{self, FetchId, FetchOptions, ParameterMemory};
use super::missing::Missing;
use super::request::{Outgoing, OutgoingForm};
use super::slab::{GradientInFlight, Prepared, Slab, SlabInFlight, ValuesInFlight};
use super::{Gradient, WorkerError};
use crate::codec::{CodecError, half};
use crate::consistency::{Ask, ClientUpdate, PartialPull, ServerPush, SyncPolicy};
use crate::kernels::{self, Values};
use crate::lease::{Lease, Pool};
use crate::limits;
use crate::policy::NonFinite;
use crate::region::Region;
use crate::store::{Allocate, Buffer, Heap, Place};
use crate::table::{Chunk, TableSpec};
use crate::types::{Clock, ShardId, TableId};
use crate::wire::DType;
use std::ops::Range;
use std::sync::Arc;

/// Free buffers that are kept, for the next pushes and the next answer.
const SPARE_BUFFERS: usize = 3;

/// One of a job's tables.
#[derive(Debug)]
pub(super) struct LocalTable {
    layout: Layout,
    /// Its memory, also for gradients under way.
    parameters: ParameterMemory,
    codecs: TableCodecs,
    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table; 0 before there is a plan.
    valid_from: u32,
    nonfinite: NonFinite,
    /// This worker's instance of the consistency model, once there is a plan.
    sync: Option<SyncPolicy>,
    /// Until they are sent.
    initial: Vec<f32>,
    /// The last clock that was pushed.
    pushed: Option<Clock>,
    /// Iterations that were completed when parameters were last asked for.
    pulled: Clock,
    /// Gradients with NaN or Inf.
    nonfinite_seen: u64,
}

/// A table's entry in a plan.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) chunks: Vec<Chunk>,
    pub(super) policies: TablePolicies,
}

/// Policies of a table from an epoch on.
#[derive(Debug)]
pub(super) struct TablePolicies {
    pub(super) nonfinite: NonFinite,
    pub(super) sync: SyncPolicy,
    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table.
    pub(super) valid_from: u32,
    /// Its codecs, if that epoch is another one than before.
    pub(super) codecs: Option<TableCodecs>,
}

/// A slab's gradient on its way.
#[derive(Debug)]
pub(super) enum SlabGradient {
    /// Elements of this type, sent from the slab's own memory.
    InPlace(DType),
    /// In other memory.
    Made(Outgoing),
}

/// A pull of a whole table, and where servers that share memory with this process may put the answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reply {
    pub(super) fetch: FetchId,
    pub(super) place: Option<Place>,
}

impl LocalTable {
    pub(super) fn new(spec: TableSpec, initial: Vec<f32>) -> LocalTable {
        // Row pushes differ in length from step to step; keeping their buffers would only hoard.
        let spare = if spec.rows { 0 } else { SPARE_BUFFERS };
        LocalTable {
            layout: Layout::new(spec),
            parameters: ParameterMemory::new(Arc::new(Heap), spare),
            codecs: TableCodecs::default(),
            valid_from: 0,
            nonfinite: NonFinite::default(),
            sync: None,
            initial,
            pushed: None,
            pulled: 0,
            nonfinite_seen: 0,
        }
    }

    /// Takes the plan's word on where the table lives and what holds for it.
    pub(super) fn plan(&mut self, planned: Planned, allocator: &Arc<dyn Allocate>) {
        self.layout.place(planned.chunks);
        self.follow(planned.policies);
        self.parameters.fill(Arc::clone(allocator), &self.layout);
    }

    /// Lets policies hold from now on. Before other codecs do, requests under way have to leave the old ones
    /// ([`LocalTable::decoded`]).
    pub(super) fn follow(&mut self, policies: TablePolicies) {
        let TablePolicies { nonfinite, sync, valid_from, codecs } = policies;
        self.nonfinite = nonfinite;
        self.sync = Some(sync);
        self.valid_from = valid_from;
        if let Some(codecs) = codecs {
            self.codecs.go_over_to(codecs, &self.layout);
        }
    }

    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table.
    pub(super) fn valid_from(&self) -> u32 {
        self.valid_from
    }

    /// A gradient as it is sent to a shard when the codec that made it holds no more.
    pub(super) fn decoded(&self, gradient: &Outgoing, shard: ShardId) -> Outgoing {
        self.codecs.decoded(&self.layout, gradient, |of| of == shard)
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
        self.codecs.push_codec()
    }

    /// Gradients with NaN or Inf that were found here.
    pub(super) fn nonfinite_seen(&self) -> u64 {
        self.nonfinite_seen
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.parameters.memory_bytes() + self.codecs.memory_bytes()
    }

    // Questions to the consistency model.

    /// When the worker may go on with a part of the table, if it may.
    pub(super) fn partial_pull(&self) -> Option<PartialPull> {
        self.sync.as_ref().and_then(SyncPolicy::partial_pull)
    }

    /// Its blocks and when they are enough, if it is pulled partially. Rows are no blocks, and what is lent arrives by
    /// exchanges, which wait for all of it.
    pub(super) fn partial_blocks(&self) -> Option<(usize, PartialPull)> {
        let partial = self.partial_pull().filter(|_| !self.layout.is_sparse() && !self.is_lent())?;
        Some((self.layout.shard_count(), partial))
    }

    /// Whether parameters are asked for after a gradient of this clock.
    pub(super) fn asks_after(&self, clock: Clock) -> bool {
        let update = ClientUpdate { clock, pulled: self.pulled };
        let ask = self.sync.as_ref().map(|sync| sync.model.after_client_update(&update));
        ask != Some(Ask::Push)
    }

    /// Whether an answer that a condition stood before is taken. Rows, and what is lent, are taken always: they are waited
    /// for.
    pub(super) fn takes(&self, push: &ServerPush) -> bool {
        let Some(sync) = self.sync.as_ref().filter(|_| !self.layout.is_sparse() && !self.is_lent()) else {
            return true;
        };
        sync.model.after_server_push(push)
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

    /// A table is pushed once per iteration.
    pub(super) fn check_clock(&self, clock: Clock) -> Result<(), WorkerError> {
        if self.pushed != Some(clock) {
            return Ok(());
        }
        let name = self.name();
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

    pub(super) fn note_pushed(&mut self, clock: Clock) {
        self.pushed = Some(clock);
    }

    /// A push of this clock was refused: it can be pushed again, corrected or later. Servers that have it take it once.
    pub(super) fn forget_pushed(&mut self, clock: Clock) {
        self.pushed.take_if(|pushed| *pushed == clock);
    }

    /// A gradient that the application gave, as it is sent: a copy, or what the codec makes of it.
    pub(super) fn prepare(
        &mut self,
        clock: Clock,
        gradient: Gradient<'_>,
        allocator: &dyn Allocate,
    ) -> Result<Outgoing, WorkerError> {
        let values = gradient.values();
        let missing = Missing::default();
        let Some(dtype) = self.codecs.elements() else {
            self.check_finite(kernels::all_finite(values), clock)?;
            let LocalTable { layout, parameters, codecs, nonfinite, .. } = self;
            let pool = parameters.pool();
            let (prepared, parameters) = (Prepared::Gradient, parameters.values());
            let (missing, followed) = (&missing, None);
            let plain = Plain { clock, gradient, prepared, followed, missing, parameters };
            return encode(codecs, layout, *nonfinite, &plain, pool, allocator);
        };
        let buffer = self.make_elements(dtype, values, clock, allocator)?;
        let form = match gradient {
            Gradient::Dense(_) | Gradient::Product { .. } => OutgoingForm::Dense(dtype),
            Gradient::Rows { rows, .. } => OutgoingForm::Rows(Arc::new(rows.to_vec())),
        };
        Ok(Outgoing { buffer: self.parameters.pool().lend(buffer), form, missing, is_counted: false })
    }

    /// A gradient as elements of a type, in memory that frames are sent from.
    fn make_elements(
        &mut self,
        dtype: DType,
        values: &[f32],
        clock: Clock,
        allocator: &dyn Allocate,
    ) -> Result<Buffer, WorkerError> {
        let len = dtype.bytes() * values.len();
        let mut buffer = self.parameters.pool().take(len.div_ceil(4), allocator);
        let bytes = &mut buffer.as_mut_bytes()[..len];
        let is_finite = write_elements(dtype, values, bytes);
        if let Err(error) = self.check_finite(is_finite, clock) {
            self.parameters.pool().keep(buffer);
            return Err(error);
        }
        if !is_finite && dtype != DType::F32 {
            // Servers would not find in halves what is not finite here.
            write_clipped(dtype, values, bytes, &self.layout);
        }
        Ok(buffer)
    }

    /// Counts a gradient with NaN or Inf, and refuses it under `reject`.
    fn check_finite(&mut self, is_finite: bool, clock: Clock) -> Result<(), WorkerError> {
        if is_finite {
            return Ok(());
        }
        self.nonfinite_seen += 1;
        if self.nonfinite == NonFinite::Reject {
            return Err(WorkerError::NonFinite { table: self.name().to_owned(), clock });
        }
        Ok(())
    }

    /// A server refused what it was sent of a push.
    pub(super) fn note_refused(&mut self, clock: Clock, by: ShardId, gradient: Outgoing) {
        self.codecs.note_refused(&self.layout, clock, by, gradient);
    }

    // Pulls.

    /// Begins a pull of the whole table.
    pub(super) fn begin_pull(&mut self, clock: Clock, is_partial: bool) -> Reply {
        self.pulled = clock;
        // An encoded answer is decoded into its place.
        let wants_place = !self.codecs.encodes_answers();
        let (fetch, place) = self.parameters.begin(FetchOptions { clock, is_partial, wants_place });
        Reply { fetch, place }
    }

    /// Memory that a driver receives a shard's answer into. `None` where the answer has to be decoded first.
    pub(super) fn back(&mut self, fetch: FetchId, shard: ShardId) -> Option<Region> {
        if self.codecs.has_base() {
            return None;
        }
        let index = self.layout.index_of(shard)?;
        self.parameters.back(fetch, index)
    }

    /// Whether a driver is receiving into a slab at this moment.
    pub(super) fn is_landing(&self, slab: &SlabInFlight) -> bool {
        matches!(slab.values, ValuesInFlight::Awaited(fetch) if self.parameters.is_landing(fetch))
    }

    /// Puts a chunk of an answer to its place in the back of a pull; `None` when that is not wanted any more.
    pub(super) fn put_chunk(
        &mut self,
        place: Range<usize>,
        values: Values<'_>,
        target: Option<(FetchId, usize)>,
    ) {
        self.codecs.set_base(place.clone(), values);
        if let Some(mut back) = target.and_then(|(fetch, shard)| self.parameters.back(fetch, shard)) {
            let bytes = back.bytes_mut(place.start * 4..place.end * 4);
            kernels::copy(bytemuck::cast_slice_mut(bytes), values);
        }
    }

    /// The same for a chunk that a codec made. `None` when it does not fit.
    pub(super) fn decode_chunk(
        &mut self,
        place: Range<usize>,
        payload: &[u8],
        target: Option<(FetchId, usize)>,
    ) -> Option<()> {
        let mut back = target.and_then(|(fetch, shard)| self.parameters.back(fetch, shard));
        let bytes = back.as_mut().map(|back| back.bytes_mut(place.start * 4..place.end * 4));
        let target = bytes.map(bytemuck::cast_slice_mut);
        self.codecs.decode_chunk(place, payload, target)
    }

    /// The values of so many rows from what a codec made. `None` when they do not fit.
    pub(super) fn decode_rows(&mut self, rows: usize, payload: &[u8]) -> Option<Vec<f32>> {
        self.codecs.decode_rows(&self.layout, rows, payload)
    }

    /// All of a shard's answer is here. `may_go_on` says whether a partial pull for an iteration need not wait for the rest.
    pub(super) fn arrived(&mut self, fetch: FetchId, shard: ShardId, may_go_on: impl Fn(Clock) -> bool) {
        if let Some(index) = self.layout.index_of(shard) {
            self.parameters.arrived(fetch, index, may_go_on);
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
        if let Some(partial) = self.partial_pull() {
            let (name, b) = (self.name(), partial.fraction);
            return Err(WorkerError::Order(format!(
                "table `{name}` is pulled partially (psp with b = {b}), and an exchange of slabs waits for all blocks: use \
                 `push_pull`, or psp without b and tau2"
            )));
        }
        if is_busy {
            let name = self.name();
            let sentence = format!("table `{name}` is being pushed or pulled: wait for that first");
            return Err(WorkerError::Order(sentence));
        }
        let values = self.parameters.lend_slab().expect("it is not lent");
        Ok(Slab::new(lender, table, allocator.zeroed(values.len()), values))
    }

    /// Takes a slab's memory back.
    pub(super) fn take_back(&mut self, slab: Slab) {
        let (gradient, mut values, _retired) = slab.into_parts();
        // The application may have changed them, and differences may have come meanwhile.
        if let Some(base) = self.codecs.base() {
            values.as_mut_slice().copy_from_slice(base);
        }
        self.parameters.return_slab(values);
        self.parameters.pool().keep(gradient);
    }

    /// NaN and Inf in a slab's gradient are found here only where a codec looks at it: another pass over it would cost as much
    /// as sending it, and servers find them too.
    pub(super) fn check_slab(&mut self, slab: &Slab, clock: Clock) -> Result<(), WorkerError> {
        if slab.prepared() == Prepared::Gradient && self.codecs.elements().is_none() {
            return self.check_finite(kernels::all_finite(slab.gradient()), clock);
        }
        Ok(())
    }

    /// A slab's gradient as it is sent.
    pub(super) fn encode_slab(
        &mut self,
        slab: &Slab,
        clock: Clock,
        allocator: &dyn Allocate,
    ) -> Result<SlabGradient, WorkerError> {
        let prepared = slab.prepared();
        match self.codecs.elements().filter(|_| prepared == Prepared::Gradient) {
            None => {}
            Some(DType::F32) => return Ok(SlabGradient::InPlace(DType::F32)),
            Some(dtype) => {
                let buffer = self.make_elements(dtype, slab.gradient(), clock, allocator)?;
                let (buffer, form) = (self.parameters.pool().lend(buffer), OutgoingForm::Dense(dtype));
                let (missing, is_counted) = (slab.missing().clone(), false);
                return Ok(SlabGradient::Made(Outgoing { buffer, form, missing, is_counted }));
            }
        }
        let LocalTable { layout, parameters, codecs, nonfinite, .. } = self;
        let pool = parameters.pool();
        let gradient = Gradient::Dense(slab.gradient());
        // Codecs that compare a gradient with the parameters find them in the slab.
        let (missing, parameters, followed) = (slab.missing(), slab.values(), slab.followed());
        let plain = Plain { clock, gradient, prepared, followed, missing, parameters };
        if let Some(dtype) = codecs.prepared_halves(&plain) {
            return Ok(SlabGradient::InPlace(dtype));
        }
        encode(codecs, layout, *nonfinite, &plain, pool, allocator).map(SlabGradient::Made)
    }

    /// Takes a slab for an exchange: what is sent, and where the answer is received, if one is asked for.
    pub(super) fn begin_exchange(
        &mut self,
        slab: Slab,
        made: SlabGradient,
        clock: Clock,
    ) -> (Outgoing, SlabInFlight, Option<Reply>) {
        let (table, missing) = (slab.table(), slab.missing().clone());
        let (gradient, values, retired) = slab.into_parts();
        let (outgoing, gradient) = match made {
            SlabGradient::Made(made) => (made, GradientInFlight::Kept(gradient)),
            SlabGradient::InPlace(dtype) => {
                let buffer = self.parameters.pool().lend(gradient);
                let (form, is_counted) = (OutgoingForm::Dense(dtype), false);
                let outgoing = Outgoing { buffer: buffer.clone(), form, missing, is_counted };
                (outgoing, GradientInFlight::Sent(buffer))
            }
        };
        if !self.asks_after(clock) {
            let values = ValuesInFlight::Kept(values);
            return (outgoing, SlabInFlight { table, gradient, values, retired }, None);
        }
        self.pulled = clock + 1;
        let (fetch, place) = self.parameters.begin_slab(clock + 1, values);
        let values = ValuesInFlight::Awaited(fetch);
        (outgoing, SlabInFlight { table, gradient, values, retired }, Some(Reply { fetch, place }))
    }

    /// Ends an exchange: its slab. What frames are still sent from, or servers may still write to, stays with the slab, since
    /// the application may know its address; the slab has other memory then.
    pub(super) fn end_exchange(
        &mut self,
        in_flight: SlabInFlight,
        lender: u64,
        allocator: &dyn Allocate,
    ) -> Slab {
        let SlabInFlight { table, gradient, values, mut retired } = in_flight;
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
            ValuesInFlight::Awaited(fetch) => {
                let (values, reserved) = self.parameters.take_slab(fetch).expect("an exchange ends once");
                retired.extend(reserved);
                values
            }
        };
        Slab::new(lender, table, gradient, values).with_retired(retired)
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

/// Encodes a gradient, in memory that frames are sent from.
fn encode(
    codecs: &mut TableCodecs,
    layout: &Layout,
    nonfinite: NonFinite,
    plain: &Plain<'_>,
    pool: &Pool,
    allocator: &dyn Allocate,
) -> Result<Outgoing, WorkerError> {
    let &Plain { clock, prepared, missing, .. } = plain;
    if prepared == Prepared::Gradient
        && let Some(encoded) = codecs.take_refused(clock)
    {
        return Ok(encoded);
    }
    codecs.put_refused_back(layout);
    let table = || layout.name().to_owned();
    let fault = |why: CodecError| match why {
        CodecError::NonFinite if prepared != Prepared::Gradient => {
            WorkerError::NonFinite { table: table(), clock }
        }
        why => WorkerError::Codec { table: table(), why },
    };
    if codecs.sends_plainly(plain) {
        let mut buffer = pool.take(layout.elements(), allocator);
        codecs.expand(plain, buffer.as_mut_slice()).map_err(fault)?;
        let (form, missing) = (OutgoingForm::Dense(DType::F32), missing.clone());
        return Ok(Outgoing { buffer: pool.lend(buffer), form, missing, is_counted: false });
    }
    let Made { payloads, is_counted } = codecs.encode(layout, nonfinite, plain).map_err(fault)?;
    let mut buffer = pool.take(codecs.payload_elements(layout), allocator);
    let bytes = codecs.payloads();
    buffer.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
    Ok(Outgoing {
        buffer: pool.lend(buffer),
        form: OutgoingForm::Encoded(Arc::new(payloads)),
        missing: missing.clone(),
        is_counted,
    })
}

/// Writes a gradient as elements of a type while it is in cache for the check. Whether all of it is finite.
fn write_elements(dtype: DType, gradient: &[f32], to: &mut [u8]) -> bool {
    let blocks = to.chunks_mut(limits::BLOCK_ELEMENTS * dtype.bytes());
    let mut finite = true;
    for (to, from) in blocks.zip(gradient.chunks(limits::BLOCK_ELEMENTS)) {
        finite &= half::write(dtype, from, to);
    }
    finite
}

/// The same for a gradient that is clipped, chunk by chunk, as servers do.
fn write_clipped(dtype: DType, gradient: &[f32], to: &mut [u8], layout: &Layout) {
    let width = dtype.bytes();
    for (_, chunk) in layout.chunks() {
        let place = elements_of(&chunk);
        let mut values = gradient[place.clone()].to_vec();
        kernels::clip_non_finite(&mut values);
        half::write(dtype, &values, &mut to[place.start * width..place.end * width]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::{Consistency, Decision, PullView, SyncState};
    use crate::policy::Policy;
    use crate::prng::Prng;
    use crate::registry::{Entry, Registry};
    use crate::spec::Spec;
    use crate::types::ServerId;

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
                sync: SyncPolicy::parse(&registry.consistency, "frugal").unwrap(),
                valid_from: 1,
                codecs: TableCodecs::new(&registry, &spec, &Policy::default(), Default::default()).ok(),
            },
        };
        let heap: Arc<dyn Allocate> = Arc::new(Heap);
        table.plan(planned, &heap);
        table
    }

    #[test]
    fn a_model_says_when_parameters_are_asked_for_and_which_are_taken() {
        let mut table = table();
        assert_eq!([0, 1, 2].map(|clock| table.asks_after(clock)), [false, false, true]);
        table.begin_pull(3, false);
        assert_eq!([3, 4, 5].map(|clock| table.asks_after(clock)), [false, false, true]);
        let takes = |version| table.takes(&ServerPush { clock: 3, version });
        assert_eq!([takes(2), takes(3)], [true, false]);
    }

    #[test]
    fn an_exchange_without_an_answer_keeps_the_slab_as_it_is() {
        let mut table = table();
        let mut slab = table.lend(TableId(0), 0, false, &Heap).unwrap();
        slab.values_mut().fill(5.0);
        slab.gradient_mut().fill(1.0);
        let (outgoing, in_flight, reply) = table.begin_exchange(slab, SlabGradient::InPlace(DType::F32), 0);
        assert!(reply.is_none(), "this model does not ask after the first iteration");
        assert_eq!(outgoing.buffer.as_slice(), [1.0; 4]);
        // A frame is still to be sent.
        let slab = table.end_exchange(in_flight, 0, &Heap);
        assert_eq!((slab.gradient(), slab.values()), (&[1.0; 4][..], &[5.0; 4][..]));
        table.take_back(slab);
        assert_eq!((table.values(), outgoing.buffer.as_slice()), (&[5.0; 4][..], &[1.0; 4][..]));
    }

    #[test]
    fn a_gradient_that_is_refused_gives_its_memory_back() {
        let mut table = table();
        let before = table.memory_bytes();
        let error = table.prepare(7, Gradient::Dense(&[f32::NAN; 4]), &Heap).unwrap_err();
        assert_eq!(error, WorkerError::NonFinite { table: "w".into(), clock: 7 });
        let kept = table.memory_bytes() - before;
        let outgoing = table.prepare(7, Gradient::Dense(&[1.0; 4]), &Heap).unwrap();
        assert_eq!((table.memory_bytes() - before, table.nonfinite_seen()), (kept, 1));
        drop(outgoing);
        assert_eq!(table.memory_bytes() - before, kept, "it is kept for the next push");
    }

    /// Another pass over it would cost as much as sending it.
    #[test]
    fn nan_in_a_slab_is_left_to_servers_where_no_codec_looks_at_it() {
        let mut table = table();
        let mut slab = table.lend(TableId(0), 0, false, &Heap).unwrap();
        slab.gradient_mut().fill(f32::NAN);
        assert_eq!(table.check_slab(&slab, 3), Ok(()));
        let sent = table.encode_slab(&slab, 3, &Heap).unwrap();
        assert!(matches!(sent, SlabGradient::InPlace(DType::F32)), "{sent:?}");
        let (registry, spec) = (Registry::builtin(), TableSpec::dense("w", [4]));
        let policy = Policy::default().with(crate::policy::Axis::Codec, "f16");
        table.codecs = TableCodecs::new(&registry, &spec, &policy, Default::default()).unwrap();
        let refused = WorkerError::NonFinite { table: "w".into(), clock: 3 };
        assert_eq!(table.encode_slab(&slab, 3, &Heap).unwrap_err(), refused);
        slab.contains(Prepared::Halves);
        let sent = table.encode_slab(&slab, 3, &Heap).unwrap();
        assert!(matches!(sent, SlabGradient::InPlace(DType::F16)), "{sent:?}");
        slab.contains(Prepared::Chosen);
        assert_eq!(table.check_slab(&slab, 3), Ok(()), "it is looked at when it is encoded");
        assert_eq!(table.encode_slab(&slab, 3, &Heap).unwrap_err(), refused);
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
