//! A dense table's parameters in a worker's memory: the front, which the application reads, and the backs, which answers
//! are received into.
//!
//! Every transport receives into the back of the pull that it answers. When all shards have answered, the back becomes the
//! front: a reader never sees a mixture of two versions. Every piece of memory is in one of three states: *ours* (a
//! [`Buffer`] that nobody else knows of), *lent* (a [`Lease`]: readers have the front, or the application has a slab), or
//! *in flight* (the back of a pull that some shards have not answered). A back is divided by shards: a driver receives into a
//! [`Region`] while others use the worker. The memory of a region that is out is not used for anything else, whatever becomes
//! of the pull.
//!
//! A pull in the background (a worker's copy is a cache) becomes the front between iterations: the application reads one version
//! while it computes ([`ParameterMemory::keep_front`]). Where the application has the parameters as a slab, the slab is what the
//! front is elsewhere: such a pull is received beside it, and copied to it while an exchange has it.

use super::fetch::{Block, Fetch, FetchId, FetchKind, Held, Retired, Target, copy_region};
use super::layout::Layout;
use crate::lease::{Lease, Pool};
use crate::region::{Divided, Partition, Region};
use crate::store::{Allocate, Buffer, Place};
use crate::types::Clock;
use crate::wire::DType;
use std::sync::Arc;

/// Backs whose places are told to servers, at most. More pulls may be under way; their answers come by other ways.
const MAX_PLACES: usize = 2;

/// How a pull goes about its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FetchOptions {
    /// The iteration that the parameters are for.
    pub(super) clock: Clock,
    pub(super) kind: FetchKind,
    /// Servers that share memory with this process are told where to put the answer.
    pub(super) wants_place: bool,
}

/// A dense table's parameters. A sparse table has none.
#[derive(Debug)]
pub(super) struct ParameterMemory {
    allocator: Arc<dyn Allocate>,
    /// For fronts and backs, and for gradients under way, which are as long: a gradient that has arrived leaves its memory to the
    /// answer.
    pool: Pool,
    len: usize,
    /// How backs are divided by shards.
    partition: Arc<Partition>,
    /// What the application reads; `None` while a slab has the parameters.
    front: Option<Lease>,
    /// Pulls under way, oldest first.
    fetches: Vec<Fetch>,
    /// The slab of an exchange that may end early.
    exchanged: Option<Exchanged>,
    next_fetch: u64,
    /// Blocks that have arrived so far.
    arrivals: u64,
    /// For each shard.
    held: Vec<Held>,
    /// The application computes: pulls in the background wait.
    is_kept: bool,
}

/// A slab's parameters while an exchange has them that may end before all blocks are here.
#[derive(Debug)]
struct Exchanged {
    /// Of its pull, or a number of its own where none was asked for.
    id: FetchId,
    values: Buffer,
    dtype: DType,
}

/// A pull beside a slab.
#[derive(Debug)]
pub(super) struct BesideSlab<'a> {
    /// The iteration that the parameters are for.
    pub(super) clock: Clock,
    /// The type of the slab's elements, and how the shards' blocks lie in it.
    pub(super) dtype: DType,
    pub(super) partition: &'a Arc<Partition>,
    /// Servers that share memory with this process are told where to put the answer.
    pub(super) wants_place: bool,
}

impl ParameterMemory {
    /// No memory yet. Up to `spare` free buffers are kept.
    pub(super) fn new(allocator: Arc<dyn Allocate>, spare: usize) -> ParameterMemory {
        ParameterMemory {
            allocator,
            pool: Pool::new(spare),
            len: 0,
            partition: Arc::new(Partition::new(0, [])),
            front: None,
            fetches: Vec::new(),
            exchanged: None,
            next_fetch: 0,
            arrivals: 0,
            held: Vec::new(),
            is_kept: false,
        }
    }

    /// Takes memory for a table's parameters: zeros, until the first pull.
    pub(super) fn fill(&mut self, allocator: Arc<dyn Allocate>, layout: &Layout) {
        self.allocator = allocator;
        self.len = if layout.is_sparse() { 0 } else { layout.elements() };
        self.front = Some(self.pool.lend(self.allocator.zeroed(self.len)));
        self.partition = Arc::clone(layout.partition(DType::F32));
        self.held = vec![Held::default(); layout.shard_count()];
    }

    /// Where memory for gradients comes from.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The parameters as last pulled; none while they are lent.
    pub(super) fn values(&self) -> &[f32] {
        self.front.as_ref().map_or(&[], |front| front.as_slice())
    }

    /// The same, for readers on other threads. `None` while they are lent.
    pub(super) fn read(&self) -> Option<Lease> {
        self.front.clone()
    }

    /// Whether the application has them as a slab, or an exchange of that slab.
    pub(super) fn is_lent(&self) -> bool {
        self.front.is_none()
    }

    /// Begins a pull. The place is where servers that share memory with this process may put the answer.
    pub(super) fn begin(&mut self, options: FetchOptions) -> (FetchId, Option<Place>) {
        let FetchOptions { clock, kind, wants_place } = options;
        // Only memory that has a place is taken before something arrives.
        let is_shared = self.front.as_ref().is_some_and(|front| front.place().is_some());
        let back = (wants_place && is_shared && self.has_room_to_tell()).then(|| self.take());
        let place = back.as_ref().and_then(Buffer::place);
        let back = back.map(|back| Divided::new(back, Arc::clone(&self.partition)));
        (self.insert(clock, kind, Target::Front { back, is_told: place.is_some() }), place)
    }

    /// Begins a pull into a slab's memory, in which the shards' blocks lie so.
    pub(super) fn begin_slab(
        &mut self,
        clock: Clock,
        values: Buffer,
        partition: &Arc<Partition>,
    ) -> (FetchId, Option<Place>) {
        // All of the slab is about to be replaced.
        self.forget_beside(Fetch::is_ready);
        let place = values.place();
        let values = Divided::new(values, Arc::clone(partition));
        (self.insert(clock, FetchKind::Whole, Target::Slab(values)), place)
    }

    /// Takes a slab's parameters for an exchange, and begins a pull whose blocks go there as they come, but never while the
    /// application has it. Of blocks that came meanwhile `takes` says whether their version will do.
    pub(super) fn begin_beside(
        &mut self,
        mut values: Buffer,
        beside: BesideSlab<'_>,
        takes: impl Fn(usize, Clock) -> bool,
    ) -> (FetchId, Option<Place>) {
        let dtype = beside.dtype;
        // The newest block of a shard stays.
        let ParameterMemory { fetches, held, .. } = self;
        fetches.iter_mut().for_each(|fetch| fetch.hand_over_kept(&mut values, dtype, held, &takes));
        (0..self.fetches.len()).rev().for_each(|index| self.end_beside(index));
        let (id, place) = self.insert_beside(beside, FetchKind::Whole, values.place().is_some());
        self.exchanged = Some(Exchanged { id, values, dtype });
        (id, place)
    }

    /// Takes a slab's parameters for an exchange that may end at once. Pulls in the background that became whole while the application
    /// had them go there.
    pub(super) fn hold_slab(&mut self, values: Buffer, dtype: DType) -> FetchId {
        self.forget_beside(|fetch| fetch.kind != FetchKind::Background);
        let id = self.next_id();
        self.exchanged = Some(Exchanged { id, values, dtype });
        self.let_front_go();
        id
    }

    /// Begins a pull in the background for the slab that an exchange has, if one has it.
    pub(super) fn begin_renewal(&mut self, beside: BesideSlab<'_>) -> (FetchId, Option<Place>) {
        let is_shared = self.exchanged.as_ref().is_some_and(|slab| slab.values.place().is_some());
        self.insert_beside(beside, FetchKind::Background, is_shared)
    }

    /// The type of the elements of the slab that an exchange has which may end early.
    pub(super) fn exchanged_type(&self) -> Option<DType> {
        self.exchanged.as_ref().map(|slab| slab.dtype)
    }

    fn insert_beside(
        &mut self,
        beside: BesideSlab<'_>,
        kind: FetchKind,
        is_shared: bool,
    ) -> (FetchId, Option<Place>) {
        let BesideSlab { clock, dtype, partition, wants_place } = beside;
        let back = (wants_place && is_shared && self.has_room_to_tell()).then(|| self.take());
        let place = back.as_ref().and_then(Buffer::place);
        let back = back.map(|back| Divided::new(back, Arc::clone(partition)));
        let (partition, is_told) = (Arc::clone(partition), place.is_some());
        (self.insert(clock, kind, Target::Beside { back, partition, dtype, is_told }), place)
    }

    /// What has arrived of pulls beside a slab is not wanted any more.
    fn forget_beside(&mut self, which: impl Fn(&Fetch) -> bool) {
        for index in (0..self.fetches.len()).rev() {
            if which(&self.fetches[index]) {
                self.fetches[index].drop_kept();
                self.end_beside(index);
            }
        }
    }

    fn has_room_to_tell(&self) -> bool {
        self.fetches.iter().filter(|fetch| fetch.is_told()).count() < MAX_PLACES
    }

    fn insert(&mut self, clock: Clock, kind: FetchKind, target: Target) -> FetchId {
        let id = self.next_id();
        let shards = self.held.len();
        let (blocks, versions) = (vec![Block::Waiting; shards], vec![0; shards]);
        self.fetches.push(Fetch { id, clock, kind, target, blocks, versions });
        id
    }

    fn next_id(&mut self) -> FetchId {
        let id = FetchId(self.next_fetch);
        self.next_fetch += 1;
        id
    }

    fn take(&self) -> Buffer {
        self.pool.take(self.len, &*self.allocator)
    }

    fn index_of(&self, id: FetchId) -> Option<usize> {
        self.fetches.iter().position(|fetch| fetch.id == id)
    }

    /// Where a shard's answer to a pull is received. `None` when it is of no use any more, or somebody receives it already.
    pub(super) fn back(&mut self, id: FetchId, shard: usize) -> Option<Region> {
        let index = self.index_of(id)?;
        let ParameterMemory { pool, len, partition, allocator, fetches, .. } = self;
        let Fetch { target, blocks, .. } = &mut fetches[index];
        if blocks[shard] == Block::Waiting {
            blocks[shard] = Block::Receiving;
        }
        let back = match target {
            Target::Front { back, .. } => {
                back.get_or_insert_with(|| Divided::new(pool.take(*len, &**allocator), Arc::clone(partition)))
            }
            Target::Slab(values) => values,
            Target::Beside { back, partition, .. } => {
                back.get_or_insert_with(|| Divided::new(pool.take(*len, &**allocator), Arc::clone(partition)))
            }
            Target::Abandoned { .. } => return None,
        };
        back.lend(shard)
    }

    /// Whether a driver is receiving into the slab of a pull at this moment.
    pub(super) fn is_landing(&self, id: FetchId) -> bool {
        let target = self.index_of(id).map(|index| &self.fetches[index].target);
        matches!(target, Some(Target::Slab(values)) if values.is_lent())
    }

    /// All of a shard's block is in the back. Publishes what is whole by it; `may_go_on` says whether a partial pull for an
    /// iteration need not wait for the rest.
    pub(super) fn arrived(
        &mut self,
        id: FetchId,
        shard: usize,
        version: Clock,
        may_go_on: impl Fn(Clock) -> bool,
    ) {
        let Some(index) = self.index_of(id) else { return };
        self.fetches[index].versions[shard] = version;
        if self.fetches[index].is_beside() && self.fetches[index].kind != FetchKind::Background {
            return self.arrived_beside(index, shard, version);
        }
        self.arrivals += 1;
        self.fetches[index].blocks[shard] = Block::Arrived { at: self.arrivals };
        let fetch = &self.fetches[index];
        let is_partial = fetch.kind == FetchKind::Partial;
        if fetch.waiting() == 0 || is_partial && may_go_on(fetch.clock) {
            self.publish(index);
        }
    }

    /// The same for a partial pull beside a slab: the block goes there, unless the application has it.
    fn arrived_beside(&mut self, index: usize, shard: usize, version: Clock) {
        let is_given_back = self.front.is_some();
        let fetch = &mut self.fetches[index];
        fetch.blocks[shard] = if is_given_back { Block::Settled } else { Block::Kept { version } };
        if let Some(Exchanged { values, dtype, .. }) = &mut self.exchanged {
            fetch.hand_over_kept(values, *dtype, &mut self.held, &|_, _| true);
        }
        self.end_beside(index);
    }

    /// Ends a pull beside a slab if nothing more is to come of it.
    fn end_beside(&mut self, index: usize) {
        let fetch = &mut self.fetches[index];
        let is_over = fetch.waiting() == 0 && !fetch.has_kept();
        if let Target::Beside { back, .. } = &mut fetch.target
            && is_over
        {
            let back = back.take().and_then(|back| back.reclaim().ok());
            back.into_iter().for_each(|back| self.pool.keep(back));
            self.fetches.remove(index);
        }
    }

    /// A shard's block will not come, or is not wanted: that part of the front stays.
    pub(super) fn settle(&mut self, id: FetchId, shard: usize) {
        let Some(index) = self.index_of(id) else { return };
        if self.fetches[index].is_waiting_for(shard) {
            self.fetches[index].blocks[shard] = Block::Settled;
        }
        if self.fetches[index].waiting() == 0 {
            self.publish(index);
        }
    }

    /// Blocks of partial pulls become the front without the missing ones where the worker may go on.
    pub(super) fn publish_partial(&mut self, may_go_on: impl Fn(Clock) -> bool) {
        for index in (0..self.fetches.len()).rev() {
            let fetch = &self.fetches[index];
            if fetch.kind == FetchKind::Partial && may_go_on(fetch.clock) {
                self.publish(index);
            }
        }
    }

    /// The application begins to compute: pulls in the background that are whole become the front, and later ones wait until
    /// [`ParameterMemory::let_front_go`].
    pub(super) fn keep_front(&mut self) {
        self.let_front_go();
        self.is_kept = true;
    }

    /// The application does not compute on the front any more.
    pub(super) fn let_front_go(&mut self) {
        self.is_kept = false;
        while let Some(index) = self.fetches.iter().position(|fetch| self.is_due(fetch)) {
            self.publish(index);
        }
    }

    /// Whether a pull in the background is whole, and the application does not have what it goes to.
    fn is_due(&self, fetch: &Fetch) -> bool {
        let is_with_application = || {
            let is_in_place = self.fetches.iter().any(|fetch| matches!(fetch.target, Target::Slab(_)));
            self.front.is_none() && self.exchanged.is_none() && !is_in_place
        };
        fetch.is_ready() && !self.is_kept && !(fetch.is_beside() && is_with_application())
    }

    /// Whether the front may be used for an iteration: each of its blocks lacks at most `bound` rounds, or answers a pull that
    /// was asked for that iteration.
    pub(super) fn is_fresh(&self, clock: Clock, bound: Option<u64>) -> bool {
        self.held.iter().all(|held| {
            let is_within = bound.is_some_and(|bound| clock.saturating_sub(held.version) <= bound);
            is_within || held.asked >= Some(clock)
        })
    }

    /// The version of the front's oldest block.
    pub(super) fn version(&self) -> Clock {
        self.held.iter().map(|held| held.version).min().unwrap_or(0)
    }

    /// Whether a pull in the background is under way.
    pub(super) fn is_fetching(&self) -> bool {
        let is_it = |fetch: &Fetch| fetch.kind == FetchKind::Background && fetch.waiting() > 0;
        self.fetches.iter().any(is_it)
    }

    /// Whether a pull for an iteration is under way.
    pub(super) fn is_fetching_for(&self, clock: Clock) -> bool {
        self.fetches.iter().any(|fetch| fetch.asked() >= Some(clock) && fetch.waiting() > 0)
    }

    /// What has arrived of a pull becomes the front; the rest of the front stays as it is. The pull ends if nothing more is
    /// to come.
    fn publish(&mut self, index: usize) {
        let fetch = &self.fetches[index];
        if fetch.is_ready() && !self.is_due(fetch) {
            return;
        }
        if fetch.is_ready() && fetch.is_beside() {
            return self.publish_beside(index);
        }
        // The application took the parameters as a slab since: they stay as they are.
        let is_lost = matches!(fetch.target, Target::Front { .. }) && self.front.is_none();
        let newer = if is_lost { vec![false; self.held.len()] } else { self.note_held(index) };
        let fetch = &mut self.fetches[index];
        let is_over = fetch.waiting() == 0;
        let Target::Front { back, is_told } = &mut fetch.target else {
            // A slab's memory waits for the application to fetch it.
            if is_over && matches!(fetch.target, Target::Abandoned { .. }) {
                self.fetches.remove(index);
            } else {
                self.end_beside(index);
            }
            return;
        };
        let is_free = is_over || !*is_told && !fetch.blocks.contains(&Block::Receiving);
        let back = match back.take() {
            Some(back) if newer.contains(&true) => self.show(back, &newer, is_free),
            other => other,
        };
        let fetch = &mut self.fetches[index];
        match &mut fetch.target {
            Target::Front { back: own, .. } if !is_over => *own = back,
            _ => {
                // One that somebody still receives into goes back to the system when that ends.
                back.and_then(|back| back.reclaim().ok()).into_iter().for_each(|back| self.pool.keep(back));
                self.fetches.remove(index);
            }
        }
    }

    /// The same for a pull in the background beside a slab, all of which is here. One that is of no use to the slab any more is
    /// forgotten: the slab was given back, or has elements of another type.
    fn publish_beside(&mut self, index: usize) {
        let fetch = &self.fetches[index];
        let fits =
            |slab: &Exchanged| matches!(fetch.target, Target::Beside { dtype, .. } if dtype == slab.dtype);
        if self.exchanged.as_ref().is_some_and(fits) {
            let newer = self.note_held(index);
            if let Target::Beside { back: Some(back), .. } = &self.fetches[index].target
                && let Some(Exchanged { values, .. }) = &mut self.exchanged
            {
                for shard in (0..newer.len()).filter(|&shard| newer[shard]) {
                    copy_region(&back.lend(shard).expect("nobody receives a block that is whole"), values);
                }
            }
        }
        self.fetches[index].drop_kept();
        self.end_beside(index);
    }

    /// Notes the blocks that have arrived. For each shard, whether the application is to have this one from now on: a pull that was
    /// answered later may have been sent earlier, and an answer that was sent earlier may come later.
    fn note_held(&mut self, index: usize) -> Vec<bool> {
        let fetch = &mut self.fetches[index];
        let asked = fetch.asked();
        let blocks = fetch.blocks.iter_mut().zip(&fetch.versions).zip(&mut self.held);
        let note = |((block, &version), held): ((&mut Block, &Clock), &mut Held)| {
            let Block::Arrived { at } = *block else { return false };
            *block = Block::Settled;
            let is_newer = (version, at) > (held.version, held.at);
            if is_newer {
                (held.version, held.at) = (version, at);
            }
            // What stays is at least as new as the other one, and may be used where that may.
            held.asked = held.asked.max(asked);
            is_newer
        };
        blocks.map(note).collect()
    }

    /// Makes a front with these shards' blocks of the back, and the other blocks of the old front. Returns the back where it
    /// did not become the front itself; `is_free` says that it may, unless somebody receives into it.
    fn show(&mut self, mut back: Divided, newer: &[bool], is_free: bool) -> Option<Divided> {
        let bytes = |wanted: bool| -> usize {
            let shards = (0..newer.len()).filter(|&shard| newer[shard] == wanted);
            shards.flat_map(|shard| self.partition.ranges(shard)).map(|range| range.len()).sum()
        };
        let is_larger = bytes(true) >= bytes(false);
        let Some(front) = self.front.take() else { return Some(back) };
        if is_free && is_larger {
            match back.reclaim() {
                Ok(mut next) => {
                    copy_blocks(&self.partition, newer, false, &front, &mut next);
                    self.front = Some(self.pool.lend(next));
                    return None;
                }
                Err(busy) => back = busy,
            }
        }
        // The back is still needed, or has the smaller part.
        let mut next = match front.reclaim() {
            Ok(front) => front,
            Err(front) => {
                let mut next = self.take();
                copy_blocks(&self.partition, newer, false, &front, &mut next);
                next
            }
        };
        for shard in (0..newer.len()).filter(|&shard| newer[shard]) {
            let block = back.lend(shard).expect("nobody receives a block that is whole");
            copy_region(&block, &mut next);
        }
        self.front = Some(self.pool.lend(next));
        Some(back)
    }

    /// Takes the parameters for a slab; readers keep the front that they have. `None` when they are lent already.
    pub(super) fn lend_slab(&mut self) -> Option<Buffer> {
        let front = self.front.take()?;
        Some(front.reclaim().unwrap_or_else(|front| copied(&front, self.take())))
    }

    /// What a slab brings back becomes the front.
    pub(super) fn return_slab(&mut self, values: Buffer) {
        self.forget_beside(|_| true);
        self.held.iter_mut().for_each(|held| held.at = self.arrivals);
        self.front = Some(self.pool.lend(values));
    }

    /// Ends the pull of an exchange: the slab's memory. Where servers may still write to it, that is reserved until they have
    /// answered, and comes second; the slab has other memory with the same contents. While a driver receives a block
    /// ([`ParameterMemory::is_landing`]) that block's contents are not known, and are zeros.
    pub(super) fn take_slab(&mut self, id: FetchId) -> Option<(Buffer, Option<Retired>)> {
        if let Some(Exchanged { values, .. }) = self.exchanged.take_if(|exchanged| exchanged.id == id) {
            return Some((values, None));
        }
        let index = self.index_of(id)?;
        let is_over = self.fetches[index].waiting() == 0;
        let target =
            std::mem::replace(&mut self.fetches[index].target, Target::Abandoned { _reserved: None });
        let Target::Slab(values) = target else { return None };
        let (other, reserved): (Buffer, Retired) = match values.reclaim() {
            Ok(values) if is_over => {
                self.fetches.remove(index);
                return Some((values, None));
            }
            Ok(values) => (copied(&values, self.take()), self.pool.lend(values).into()),
            Err(busy) => {
                let mut other = self.allocator.zeroed(self.len);
                let blocks = (0..self.held.len()).filter_map(|shard| busy.lend(shard));
                blocks.for_each(|block| copy_region(&block, &mut other));
                (other, Retired::Divided { _whole: Arc::new(busy) })
            }
        };
        if is_over {
            self.fetches.remove(index);
        } else {
            self.fetches[index].target = Target::Abandoned { _reserved: Some(reserved.clone()) };
        }
        Some((other, Some(reserved)))
    }

    /// Blocks that are still to come, of all pulls.
    pub(super) fn waiting(&self) -> usize {
        self.fetches.iter().map(Fetch::waiting).sum()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let backs = self.fetches.iter().map(|fetch| match &fetch.target {
            Target::Front { back: Some(back), .. }
            | Target::Beside { back: Some(back), .. }
            | Target::Slab(back) => back.memory_bytes(),
            Target::Front { back: None, .. } | Target::Beside { back: None, .. } => 0,
            Target::Abandoned { .. } => 0,
        });
        let exchanged = self.exchanged.as_ref().map_or(0, |exchanged| exchanged.values.memory_bytes());
        self.pool.memory_bytes() + backs.sum::<usize>() + exchanged
    }

    /// Leases against what is lent: the front, and memory that is reserved. Readers may have more.
    pub(super) fn check(&self) -> Result<(), String> {
        let reserved = self.fetches.iter().filter(|fetch| {
            matches!(fetch.target, Target::Abandoned { _reserved: Some(Retired::Lent { .. }) })
        });
        let own = usize::from(self.front.is_some()) + reserved.count();
        if self.pool.lent() < own {
            return Err(format!("{} buffers are lent, and {own} leases are here", self.pool.lent()));
        }
        let in_place = self.fetches.iter().filter(|fetch| matches!(fetch.target, Target::Slab(_))).count();
        let slabs = in_place + usize::from(self.exchanged.is_some());
        if slabs > 1 || slabs == 1 && self.front.is_some() {
            return Err(format!("{slabs} slabs are exchanged, and a front is {}", self.front.is_some()));
        }
        let may_wait = |fetch: &Fetch| {
            let is_ready = fetch.is_ready();
            matches!(fetch.target, Target::Slab(_))
                || if is_ready { !self.is_due(fetch) } else { fetch.has_kept() }
        };
        let is_done = |fetch: &&Fetch| fetch.waiting() == 0 && !may_wait(fetch);
        match self.fetches.iter().find(is_done) {
            Some(fetch) => Err(format!("pull {:?} is whole and is not the front", fetch.id)),
            None => Ok(()),
        }
    }
}

/// Copies the blocks of the shards that are chosen.
fn copy_blocks(partition: &Partition, chosen: &[bool], wanted: bool, from: &Buffer, to: &mut Buffer) {
    for shard in (0..chosen.len()).filter(|&shard| chosen[shard] == wanted) {
        for range in partition.ranges(shard) {
            to.as_mut_bytes()[range.clone()].copy_from_slice(&from.as_bytes()[range.clone()]);
        }
    }
}

/// The second buffer with the contents of the first.
pub(super) fn copied(from: &Buffer, mut to: Buffer) -> Buffer {
    to.as_mut_slice().copy_from_slice(from.as_slice());
    to
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Heap;
    use crate::table::{Chunk, TableSpec};
    use crate::types::{ServerId, ShardId};

    const ELEMENTS: usize = 8;

    /// Two shards with half of a table each.
    fn memory() -> ParameterMemory {
        let mut layout = Layout::new(TableSpec::dense("w", [ELEMENTS as u64]));
        let chunk = |server| Chunk {
            shard: ShardId { server: ServerId(server), core: 0 },
            start: u64::from(server) * 4,
            len: 4,
        };
        layout.place(vec![chunk(0), chunk(1)]);
        let mut memory = ParameterMemory::new(Arc::new(Heap), 1);
        memory.fill(Arc::new(Heap), &layout);
        memory
    }

    fn begin(memory: &mut ParameterMemory, clock: Clock, is_partial: bool) -> FetchId {
        let kind = if is_partial { FetchKind::Partial } else { FetchKind::Whole };
        memory.begin(FetchOptions { clock, kind, wants_place: true }).0
    }

    /// A shard's block arrives, full of this value.
    fn receive(memory: &mut ParameterMemory, fetch: FetchId, shard: usize, value: f32) {
        let mut block = memory.back(fetch, shard).expect("it is wanted");
        fill(&mut block, shard, value);
    }

    fn fill(block: &mut Region, shard: usize, value: f32) {
        bytemuck::cast_slice_mut(block.bytes_mut(shard * 16..shard * 16 + 16)).fill(value);
    }

    fn arrive(memory: &mut ParameterMemory, fetch: FetchId, shard: usize, value: f32) {
        receive(memory, fetch, shard, value);
        memory.arrived(fetch, shard, 1, |_| false);
        assert_eq!(memory.check(), Ok(()));
    }

    #[test]
    fn the_front_changes_when_all_blocks_are_here_and_readers_keep_the_old_one() {
        let mut memory = memory();
        let held: Vec<Lease> = (1..4)
            .map(|version| {
                let fetch = begin(&mut memory, version, false);
                let before = memory.values().to_vec();
                arrive(&mut memory, fetch, 1, version as f32);
                assert_eq!(memory.values(), before, "half of version {version} is not shown");
                arrive(&mut memory, fetch, 0, version as f32);
                assert_eq!(memory.values(), [version as f32; ELEMENTS]);
                memory.read().expect("it is not lent")
            })
            .collect();
        let with_readers = memory.memory_bytes();
        for (version, held) in (1..).zip(held) {
            assert_eq!(held.as_slice(), [version as f32; ELEMENTS]);
        }
        assert!(memory.memory_bytes() < with_readers, "what was held is given back");
    }

    #[test]
    fn without_readers_two_buffers_take_turns() {
        let mut memory = memory();
        let step = |memory: &mut ParameterMemory, version: Clock| {
            let fetch = begin(memory, version, false);
            (0..2).for_each(|shard| arrive(memory, fetch, shard, version as f32));
            (memory.values().as_ptr(), memory.memory_bytes())
        };
        let steps: Vec<_> = (0..4).map(|version| step(&mut memory, version)).collect();
        assert_ne!(steps[0].0, steps[1].0);
        assert_eq!((steps[0], steps[1]), (steps[2], steps[3]));
    }

    #[test]
    fn of_two_pulls_the_newest_block_of_every_shard_stays() {
        let mut memory = memory();
        let (slow, fast) = (begin(&mut memory, 1, false), begin(&mut memory, 1, false));
        arrive(&mut memory, slow, 0, 1.0);
        arrive(&mut memory, fast, 0, 2.0);
        arrive(&mut memory, fast, 1, 1.0);
        assert_eq!(memory.values(), [2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]);
        arrive(&mut memory, slow, 1, 3.0);
        assert_eq!(memory.values(), [2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]);
    }

    fn arrive_at(memory: &mut ParameterMemory, fetch: FetchId, shard: usize, version: Clock) {
        receive(memory, fetch, shard, version as f32);
        memory.arrived(fetch, shard, version, |_| false);
        assert_eq!(memory.check(), Ok(()));
    }

    #[test]
    fn a_pull_in_the_background_becomes_the_front_between_iterations() {
        let mut memory = memory();
        let background = FetchOptions { clock: 2, kind: FetchKind::Background, wants_place: true };
        let (fetch, _) = memory.begin(background);
        memory.keep_front();
        (0..2).for_each(|shard| arrive_at(&mut memory, fetch, shard, 2));
        assert_eq!((memory.values(), memory.is_fetching()), (&[0.0; ELEMENTS][..], false));
        assert!(!memory.is_fresh(3, Some(2)), "the front is still that of version 0");
        memory.let_front_go();
        assert_eq!((memory.values(), memory.check()), (&[2.0; ELEMENTS][..], Ok(())));
        assert!(memory.is_fresh(2, None) && memory.is_fresh(3, Some(1)) && !memory.is_fresh(3, Some(0)));
        // While nobody computes, the next one is shown at once.
        let (fetch, _) = memory.begin(FetchOptions { clock: 3, ..background });
        assert!(memory.is_fetching() && memory.is_fetching_for(3) && !memory.is_fetching_for(4));
        (0..2).for_each(|shard| arrive_at(&mut memory, fetch, shard, 3));
        assert_eq!(memory.values(), [3.0; ELEMENTS]);
    }

    #[test]
    fn the_front_is_as_old_as_its_oldest_block_and_never_goes_back() {
        let mut memory = memory();
        let options = |clock, kind| FetchOptions { clock, kind, wants_place: true };
        let (early, _) = memory.begin(options(2, FetchKind::Background));
        let (late, _) = memory.begin(options(5, FetchKind::Background));
        (0..2).for_each(|shard| arrive_at(&mut memory, late, shard, 4 + shard as Clock));
        assert_eq!((memory.version(), memory.is_fresh(5, None)), (4, true));
        assert!(memory.is_fresh(6, Some(2)) && !memory.is_fresh(6, Some(1)));
        // The answer to the first was sent earlier, and comes later.
        (0..2).for_each(|shard| arrive_at(&mut memory, early, shard, 2));
        assert_eq!(memory.values(), [4.0, 4.0, 4.0, 4.0, 5.0, 5.0, 5.0, 5.0]);
        assert_eq!((memory.version(), memory.is_fresh(5, None)), (4, true));
        // No condition stood before what is pulled at once.
        let (now, _) = memory.begin(options(9, FetchKind::AtOnce));
        (0..2).for_each(|shard| arrive_at(&mut memory, now, shard, 6));
        assert!(memory.is_fresh(6, Some(0)) && memory.is_fresh(5, None) && !memory.is_fresh(9, None));
    }

    /// A block of the pull that is waited for came before an older block, whose pull was whole first.
    #[test]
    fn the_answer_that_is_waited_for_counts_whatever_came_between_its_blocks() {
        for is_slab in [false, true] {
            let mut memory = memory();
            let values = is_slab.then(|| memory.lend_slab().expect("it is not lent"));
            let slab = values.map(|values| memory.hold_slab(values, DType::F32));
            let [early, late] = [2, 5].map(|clock| begin_background(&mut memory, clock));
            arrive_at(&mut memory, late, 0, 4);
            (0..2).for_each(|shard| arrive_at(&mut memory, early, shard, 3));
            assert!(!memory.is_fresh(5, None));
            arrive_at(&mut memory, late, 1, 4);
            assert!(memory.is_fresh(5, None) && memory.version() == 4, "{is_slab}");
            let values = match slab {
                Some(slab) => memory.take_slab(slab).expect("it is there").0.as_slice().to_vec(),
                None => memory.values().to_vec(),
            };
            assert_eq!(values, [4.0; ELEMENTS]);
        }
    }

    /// A pull in the background, of the slab where one is exchanged.
    fn begin_background(memory: &mut ParameterMemory, clock: Clock) -> FetchId {
        let partition = &Arc::clone(&memory.partition);
        match memory.exchanged_type() {
            Some(dtype) => memory.begin_renewal(BesideSlab { clock, dtype, partition, wants_place: true }).0,
            None => memory.begin(FetchOptions { clock, kind: FetchKind::Background, wants_place: true }).0,
        }
    }

    #[test]
    fn a_pull_in_the_background_goes_to_a_slab_when_an_exchange_has_it() {
        let mut memory = memory();
        let values = memory.lend_slab().expect("it is not lent");
        let first = memory.hold_slab(values, DType::F32);
        let fetch = begin_background(&mut memory, 1);
        memory.keep_front();
        let (values, reserved) = memory.take_slab(first).expect("it is there");
        assert!(reserved.is_none());
        (0..2).for_each(|shard| arrive_at(&mut memory, fetch, shard, 1));
        memory.let_front_go();
        assert_eq!(
            (values.as_slice(), memory.version()),
            (&[0.0; ELEMENTS][..], 0),
            "the application has it"
        );
        let second = memory.hold_slab(values, DType::F32);
        assert_eq!((memory.version(), memory.is_fetching(), memory.check()), (1, false, Ok(())));
        let fetch = begin_background(&mut memory, 2);
        arrive_at(&mut memory, fetch, 0, 2);
        let (values, _) = memory.take_slab(second).expect("it is there");
        assert_eq!(values.as_slice(), [1.0; ELEMENTS], "half of an answer is not shown");
        // The slab is given back, and the rest is of no use.
        memory.return_slab(values);
        arrive_at(&mut memory, fetch, 1, 2);
        assert_eq!((memory.values(), memory.version(), memory.waiting()), (&[1.0; ELEMENTS][..], 1, 0));
        // What was begun for the front is of no use to a slab.
        let fetch = begin_background(&mut memory, 3);
        let values = memory.lend_slab().expect("it is not lent");
        (0..2).for_each(|shard| arrive_at(&mut memory, fetch, shard, 3));
        assert_eq!((values.as_slice(), memory.version()), (&[1.0; ELEMENTS][..], 1));
    }

    /// Of two pulls in the background, the blocks of the second come first but for the last one.
    #[test]
    fn a_pull_that_is_whole_last_answers_for_its_iteration_whatever_came_meanwhile() {
        for versions in [[2, 2], [3, 2], [2, 3]] {
            let mut memory = memory();
            let options = |clock| FetchOptions { clock, kind: FetchKind::Background, wants_place: true };
            let ((early, _), (late, _)) = (memory.begin(options(4)), memory.begin(options(6)));
            arrive_at(&mut memory, late, 0, versions[0]);
            (0..2).for_each(|shard| arrive_at(&mut memory, early, shard, versions[1]));
            assert!(memory.is_fresh(4, None) && !memory.is_fresh(6, None));
            arrive_at(&mut memory, late, 1, 3);
            assert!(memory.is_fresh(6, None), "{versions:?}");
            assert_eq!(memory.values()[0], versions[0].max(versions[1]) as f32, "{versions:?}");
        }
    }

    #[test]
    fn a_block_that_will_not_come_stays_as_it_was() {
        let mut memory = memory();
        let fetch = begin(&mut memory, 1, false);
        arrive(&mut memory, fetch, 0, 1.0);
        memory.settle(fetch, 1);
        assert_eq!(memory.values(), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!((memory.waiting(), memory.check()), (0, Ok(())));
    }

    #[test]
    fn a_partial_pull_shows_whole_blocks_once_the_worker_may_go_on() {
        for is_read in [false, true] {
            let mut memory = memory();
            let fetch = begin(&mut memory, 1, true);
            arrive(&mut memory, fetch, 0, 1.0);
            receive(&mut memory, fetch, 1, 7.0);
            let reader = is_read.then(|| memory.read());
            memory.publish_partial(|_| false);
            assert_eq!(memory.values(), [0.0; ELEMENTS]);
            memory.publish_partial(|clock| clock == 1);
            let half = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0];
            assert_eq!(memory.values(), half, "a block that is being received is not shown");
            // The rest of it comes into the same memory.
            memory.arrived(fetch, 1, 1, |_| true);
            assert_eq!(memory.values(), [1.0, 1.0, 1.0, 1.0, 7.0, 7.0, 7.0, 7.0]);
            assert_eq!((memory.waiting(), memory.check()), (0, Ok(())));
            let old = reader.flatten().map_or(vec![0.0; ELEMENTS], |reader| reader.as_slice().to_vec());
            assert_eq!(old, [0.0; ELEMENTS]);
        }
    }

    #[test]
    fn a_slab_that_is_taken_early_leaves_its_memory_to_those_who_write_there() {
        let mut memory = memory();
        let values = memory.lend_slab().expect("it is not lent");
        assert!(memory.is_lent() && memory.lend_slab().is_none() && memory.read().is_none());
        let address = values.as_slice().as_ptr();
        let (fetch, _) = memory.begin_slab(1, values, &memory.partition.clone());
        arrive(&mut memory, fetch, 0, 1.0);
        let (values, reserved) = memory.take_slab(fetch).expect("it is there");
        let Some(Retired::Lent { _lease: reserved }) = reserved else { panic!("a shard has not answered") };
        assert_eq!((reserved.as_slice().as_ptr(), values.as_slice()), (address, reserved.as_slice()));
        assert!(memory.back(fetch, 1).is_none(), "nobody wants the rest");
        memory.settle(fetch, 1);
        assert_eq!((memory.waiting(), memory.check()), (0, Ok(())));

        // Once all have answered the slab has the same memory.
        let address = values.as_slice().as_ptr();
        let (fetch, _) = memory.begin_slab(2, values, &memory.partition.clone());
        (0..2).for_each(|shard| arrive(&mut memory, fetch, shard, 2.0));
        let (values, reserved) = memory.take_slab(fetch).expect("it is there");
        assert!(reserved.is_none() && values.as_slice().as_ptr() == address);
        memory.return_slab(values);
        assert_eq!((memory.values(), memory.check()), (&[2.0; ELEMENTS][..], Ok(())));
    }

    #[test]
    fn blocks_of_a_partial_pull_are_shown_where_they_arrived_if_nobody_writes_there() {
        for is_receiving in [false, true] {
            let mut memory = memory();
            let fetch = begin(&mut memory, 1, true);
            arrive(&mut memory, fetch, 0, 1.0);
            let address = memory.back(fetch, 0).expect("it is wanted").bytes(0..16).as_ptr().cast();
            if is_receiving {
                receive(&mut memory, fetch, 1, 7.0);
            }
            memory.publish_partial(|_| true);
            assert_eq!(memory.values().as_ptr() == address, !is_receiving);
            assert_eq!(memory.values(), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        }
    }

    /// Both shards of a pull are received at once, by drivers that do not have the worker.
    #[test]
    fn blocks_are_received_without_their_owner() {
        let mut memory = memory();
        let fetch = begin(&mut memory, 1, false);
        let blocks = [0, 1].map(|shard| memory.back(fetch, shard).expect("it is wanted"));
        for (shard, mut block) in blocks.into_iter().enumerate() {
            fill(&mut block, shard, 1.0 + shard as f32);
            assert_eq!(memory.values(), [0.0; ELEMENTS], "the front is read meanwhile");
        }
        (0..2).for_each(|shard| memory.arrived(fetch, shard, 1, |_| false));
        assert_eq!(memory.values(), [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
    }

    #[test]
    fn a_block_that_is_received_when_its_pull_is_given_up_spoils_nothing() {
        let mut memory = memory();
        let fetch = begin(&mut memory, 1, false);
        arrive(&mut memory, fetch, 0, 1.0);
        let mut late = memory.back(fetch, 1).expect("it is wanted");
        assert!(memory.back(fetch, 1).is_none(), "one at a time");
        // Its request is dropped, and the other block is shown.
        memory.settle(fetch, 1);
        let front = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!((memory.values(), memory.waiting(), memory.check()), (&front[..], 0, Ok(())));
        let next = begin(&mut memory, 2, false);
        let others: Vec<Region> = (0..2).filter_map(|shard| memory.back(next, shard)).collect();
        fill(&mut late, 1, 7.0);
        assert!(others.iter().all(|block| {
            block
                .ranges()
                .iter()
                .all(|range| !bytemuck::cast_slice::<u8, f32>(block.bytes(range.clone())).contains(&7.0))
        }));
        assert_eq!(memory.values(), front);
    }

    #[test]
    fn a_slab_that_is_taken_while_a_block_is_received_has_memory_of_its_own() {
        for is_settled in [false, true] {
            let mut memory = memory();
            let mut values = memory.lend_slab().expect("it is not lent");
            values.as_mut_slice().fill(3.0);
            let (fetch, _) = memory.begin_slab(1, values, &memory.partition.clone());
            arrive(&mut memory, fetch, 0, 1.0);
            assert!(!memory.is_landing(fetch));
            let mut late = memory.back(fetch, 1).expect("it is wanted");
            assert!(memory.is_landing(fetch));
            if is_settled {
                memory.settle(fetch, 1);
            }
            let (values, reserved) = memory.take_slab(fetch).expect("it is there");
            assert!(
                matches!(reserved, Some(Retired::Divided { .. })),
                "the application may know its address"
            );
            fill(&mut late, 1, 7.0);
            assert_eq!(values.as_slice(), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
            if !is_settled {
                memory.settle(fetch, 1);
            }
            memory.return_slab(values);
            assert_eq!((memory.waiting(), memory.check()), (0, Ok(())));
        }
    }

    /// An exchange for an iteration, beside the slab; versions from this iteration on are taken.
    fn begin_beside(memory: &mut ParameterMemory, clock: Clock, values: Buffer) -> FetchId {
        let partition = &Arc::clone(&memory.partition);
        let beside = BesideSlab { clock, dtype: DType::F32, partition, wants_place: true };
        memory.begin_beside(values, beside, |_, version| version >= clock).0
    }

    fn arrive_as(memory: &mut ParameterMemory, fetch: FetchId, shard: usize, version: Clock) {
        receive(memory, fetch, shard, version as f32);
        memory.arrived(fetch, shard, version, |_| false);
    }

    #[test]
    fn blocks_beside_a_slab_go_there_when_they_are_whole_and_an_exchange_has_it() {
        let mut memory = memory();
        let values = memory.lend_slab().expect("it is not lent");
        let first = begin_beside(&mut memory, 1, values);
        arrive_as(&mut memory, first, 0, 1);
        let mut late = memory.back(first, 1).expect("it is wanted");
        assert!(!memory.is_landing(first), "nothing is received into the slab itself");
        let (values, reserved) = memory.take_slab(first).expect("it is there");
        assert!(reserved.is_none());
        assert_eq!(values.as_slice(), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        fill(&mut late, 1, 1.0);
        drop(late);
        memory.arrived(first, 1, 1, |_| false);
        assert_eq!(values.as_slice()[4], 0.0, "the application has it");
        // It is too old for the next exchange.
        let second = begin_beside(&mut memory, 2, values);
        assert_eq!((memory.waiting(), memory.check()), (2, Ok(())));
        let (values, _) = memory.take_slab(second).expect("it is there");
        assert_eq!(values.as_slice()[4], 0.0);
        // One of a server that is ahead is not.
        arrive_as(&mut memory, second, 1, 3);
        let third = begin_beside(&mut memory, 3, values);
        arrive_as(&mut memory, third, 0, 3);
        let (values, _) = memory.take_slab(third).expect("it is there");
        assert_eq!(values.as_slice(), [3.0; ELEMENTS]);
        // What comes when the slab was given back is of no use.
        memory.return_slab(values);
        arrive_as(&mut memory, second, 0, 9);
        arrive_as(&mut memory, third, 1, 9);
        assert_eq!((memory.values(), memory.waiting(), memory.check()), (&[3.0; ELEMENTS][..], 0, Ok(())));
    }
}
