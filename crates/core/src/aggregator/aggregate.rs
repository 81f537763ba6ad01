//! The sum of some workers' gradients of one table and clock, on its way to one shard.

use super::sum_buffer::SumBuffer;
use crate::absence::{Absent, AbsentFromSums};
use crate::codec::Codec;
use crate::intake::GradientFrame;
use crate::limits;
use crate::table::{Layout, LocalChunk};
use crate::types::{AggregatorId, Clock, Time, WorkerId};
use crate::waits::Delay;
use crate::wire::frame::{self, Form};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// The number of an aggregate among those for one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AggregateId(pub(super) u64);

/// Identity of an aggregate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) table: usize,
    pub(super) clock: Clock,
    /// Counts how often aggregates of this table and clock were begun; all of an attempt are refused together.
    pub(super) attempt: u32,
    /// The epoch in which it was begun.
    pub(super) epoch: u32,
}

/// Gradients of some workers of one clock.
#[derive(Debug)]
pub(super) struct Aggregate {
    subject: Subject,
    buffer: SumBuffer,
    /// How many gradients are in each chunk.
    weights: Vec<u32>,
    /// Whose they are, until the chunk has left; ascending.
    workers: Vec<Vec<WorkerId>>,
    absent: AbsentFromSums,
    /// Encoded sums of chunks that have left, where the table has a codec.
    payloads: Vec<Option<Payload>>,
    /// Chunks before this one have left, or no gradient has them.
    sealed: usize,
    /// How far the slowest worker was when that was last looked at.
    slowest: usize,
    contributors: BTreeSet<WorkerId>,
    complete: BTreeMap<WorkerId, Complete>,
    last_complete: Option<(WorkerId, Time)>,
    /// Aggregators below that have sums in it.
    lowers: BTreeMap<AggregatorId, LowerPart>,
    /// Lists of aggregators below, of which workers are complete in it, by their numbers.
    lists: Vec<ListKey>,
    /// When something was added last.
    added: Time,
}

/// A list of an aggregator below.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListKey {
    pub(super) from: AggregatorId,
    /// Numbers begin again in another one.
    pub(super) session: u64,
    pub(super) number: u64,
}

/// Sums of an aggregator below.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LowerPart {
    /// The latest attempt there.
    pub(super) attempt: u32,
    /// Chunks that it is past, since its last list.
    position: usize,
}

/// The sum of a chunk as it travels, where that is not as it lies here.
#[derive(Debug, Clone)]
pub(super) struct Payload {
    pub(super) bytes: Vec<u8>,
    pub(super) form: Form,
    /// The codec, where a residual counts what it made as sent.
    pub(super) counted: Option<Arc<Codec>>,
}

/// A worker whose push is complete in an aggregate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Complete {
    /// The number that the shard knows its request by, while the worker is connected.
    pub(super) route: u64,
    pub(super) want_params: bool,
    /// When it was.
    pub(super) at: Time,
    /// It was in a list from below: the aggregator there tells the worker that its push is taken, when the list is noted.
    pub(super) is_listed: bool,
    /// The worker sent the push again after the aggregate had left.
    pub(super) again: Option<Again>,
}

/// A complete push that was sent again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Again {
    /// The worker's number for it.
    pub(super) request: u64,
    /// What the worker knew when it sent it.
    pub(super) epoch: u32,
    pub(super) want_params: bool,
}

impl Aggregate {
    /// Without gradients, for a table of so many chunks.
    pub(super) fn new(subject: Subject, buffer: SumBuffer, chunks: usize) -> Aggregate {
        Aggregate {
            subject,
            buffer,
            weights: vec![0; chunks],
            workers: vec![Vec::new(); chunks],
            absent: AbsentFromSums::default(),
            payloads: vec![None; chunks],
            sealed: 0,
            slowest: usize::MAX,
            contributors: BTreeSet::new(),
            complete: BTreeMap::new(),
            last_complete: None,
            lowers: BTreeMap::new(),
            lists: Vec::new(),
            added: Time::ZERO,
        }
    }

    pub(super) fn subject(&self) -> Subject {
        self.subject
    }

    /// Adds a worker's gradient of a chunk.
    pub(super) fn add(&mut self, now: Time, worker: WorkerId, gradient: GradientFrame<'_>) {
        let index = gradient.index();
        self.contributors.insert(worker);
        self.added = now;
        let is_first = self.weights[index] == 0;
        if let GradientFrame::Dense { absent, .. } = gradient {
            self.absent.add(index, is_first, absent);
        }
        self.buffer.add(gradient, is_first);
        self.weights[index] += 1;
        let workers = &mut self.workers[index];
        workers.insert(workers.partition_point(|known| *known < worker), worker);
    }

    /// The first of these workers whose gradient of a chunk is in it already.
    pub(super) fn known_of(&self, index: usize, workers: &[WorkerId]) -> Option<WorkerId> {
        let known = &self.workers[index];
        workers.iter().copied().find(|worker| known.binary_search(worker).is_ok())
    }

    /// The workers whose gradients are in a chunk, which leaves.
    pub(super) fn take_workers(&mut self, index: usize) -> Vec<WorkerId> {
        std::mem::take(&mut self.workers[index])
    }

    /// Adds the sum of these workers' gradients of a chunk that an aggregator below has made.
    pub(super) fn add_sum(
        &mut self,
        now: Time,
        from: AggregatorId,
        sum: &frame::Sum,
        contributors: &[WorkerId],
        gradient: GradientFrame<'_>,
    ) {
        let index = gradient.index();
        self.added = now;
        let is_first = self.weights[index] == 0;
        if let GradientFrame::Dense { absent, .. } = gradient {
            self.absent.add(index, is_first, absent);
        }
        self.buffer.add(gradient, is_first);
        self.weights[index] = self.weights[index].saturating_add(sum.gradients).min(limits::MAX_WORKERS);
        self.contributors.extend(contributors);
        self.workers[index].extend_from_slice(contributors);
        self.workers[index].sort_unstable();
        let part = self.lowers.entry(from).or_default();
        *part = LowerPart { attempt: part.attempt.max(sum.attempt), position: index + 1 };
    }

    /// How far an aggregator below is with those of its workers that are not complete.
    pub(super) fn position_of(&self, lower: AggregatorId) -> usize {
        self.lowers.get(&lower).map_or(0, |part| part.position)
    }

    pub(super) fn lowers(&self) -> &BTreeMap<AggregatorId, LowerPart> {
        &self.lowers
    }

    /// Workers of a list of an aggregator below are complete in it. What it sends of others begins anew.
    pub(super) fn add_list(&mut self, list: ListKey) {
        self.lists.push(list);
        if let Some(part) = self.lowers.get_mut(&list.from) {
            part.position = 0;
        }
    }

    /// Whether a chunk can still be added to.
    pub(super) fn is_open_at(&self, index: usize) -> bool {
        index >= self.sealed
    }

    /// Whether a worker that is at this chunk may be the one that holds chunks back.
    pub(super) fn may_wait_for(&self, index: usize) -> bool {
        index <= self.slowest
    }

    pub(super) fn note_slowest(&mut self, position: usize) {
        self.slowest = position;
    }

    /// Seals the chunks before this one: nothing more is added to them. Returns those that were not sealed before.
    pub(super) fn seal(&mut self, end: usize) -> Range<usize> {
        let range = self.sealed..end.max(self.sealed);
        self.sealed = range.end;
        range.clone().for_each(|index| self.buffer.seal(index));
        range
    }

    pub(super) fn values(&self, chunk: &LocalChunk) -> &[f32] {
        self.buffer.values(chunk)
    }

    /// The rows of a sealed chunk as they travel without a codec; `None` in a dense table.
    pub(super) fn row_payload(&self, index: usize, chunk: &LocalChunk, width: usize) -> Option<Vec<u8>> {
        self.buffer.row_payload(index, chunk, width)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.buffer.as_bytes()
    }

    /// The elements of a chunk that no gradient has.
    pub(super) fn absent(&self, index: usize) -> &Absent {
        self.absent.of(index)
    }

    /// How many gradients are in a chunk.
    pub(super) fn weight(&self, index: usize) -> u32 {
        self.weights[index]
    }

    /// Sets the encoded sum of a chunk. It is encoded once, so that it is the same when it is sent again.
    pub(super) fn set_payload(&mut self, index: usize, payload: Option<Payload>) {
        self.payloads[index] = payload;
    }

    pub(super) fn payload(&self, index: usize) -> Option<&Payload> {
        self.payloads[index].as_ref()
    }

    /// The chunks that a codec made smaller, with what it made.
    pub(super) fn payloads(&self) -> impl Iterator<Item = (usize, &Payload)> {
        let payloads = self.payloads.iter().enumerate();
        payloads.filter_map(|(index, payload)| Some((index, payload.as_ref()?)))
    }

    /// A worker's push is complete in it. One of rows may have had none of them here.
    pub(super) fn complete(&mut self, worker: WorkerId, complete: Complete) {
        self.contributors.insert(worker);
        self.complete.insert(worker, complete);
        self.last_complete = Some((worker, complete.at));
    }

    /// The worker whose push was the last to be complete.
    pub(super) fn last_complete(&self) -> Option<WorkerId> {
        self.last_complete.map(|(worker, _)| worker)
    }

    /// For how long a worker's push was held here until the last one was complete.
    pub(super) fn hold_of(&self, complete: &Complete) -> Option<Delay> {
        let (by, at) = self.last_complete?;
        Some(Delay { by, time: at.since(complete.at) }).filter(|hold| !hold.time.is_zero())
    }

    pub(super) fn completed(&self) -> &BTreeMap<WorkerId, Complete> {
        &self.complete
    }

    pub(super) fn completed_by(&mut self, worker: WorkerId) -> Option<&mut Complete> {
        self.complete.get_mut(&worker)
    }

    pub(super) fn contributors(&self) -> &BTreeSet<WorkerId> {
        &self.contributors
    }

    /// When something was added last.
    pub(super) fn last_added(&self) -> Time {
        self.added
    }

    /// The memory, for another aggregate, the workers that are complete, and the lists that named them.
    pub(super) fn into_parts(self) -> (SumBuffer, BTreeMap<WorkerId, Complete>, Vec<ListKey>) {
        (self.buffer, self.complete, self.lists)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let payloads: usize = self.payloads.iter().flatten().map(|payload| payload.bytes.len()).sum();
        self.buffer.memory_bytes() + payloads + self.absent.memory_bytes()
    }

    /// Whether its counts fit each other and the table.
    pub(super) fn check(&self, layout: &Layout) -> Result<(), String> {
        let what = self.subject;
        if self.buffer.len() != layout.elements() || self.weights.len() != layout.chunks().len() {
            return Err(format!("{what:?} has not the table's size"));
        }
        let most = self.contributors.len() as u32;
        let beyond = self.weights.iter().find(|&&weight| weight > most);
        if let Some(weight) = beyond {
            return Err(format!("{what:?} has {weight} gradients in a chunk, of {most} workers"));
        }
        match self.complete.keys().find(|worker| !self.contributors.contains(worker)) {
            Some(worker) => Err(format!("{what:?}: {worker} is complete without a gradient")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Values;
    use crate::table::{Chunk, TableSpec};
    use crate::types::{ServerId, ShardId};

    fn layout() -> Layout {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunks = (0..2u32).map(|number| (number, Chunk { shard, start: u64::from(number) * 2, len: 2 }));
        Layout::new(TableSpec::dense("w", [4]), chunks)
    }

    fn aggregate() -> Aggregate {
        let mut buffer = SumBuffer::try_new(&layout()).unwrap();
        // Memory of an earlier sum.
        let values = Values::F32(&[99.0; 4]).into();
        buffer.add(GradientFrame::Dense { index: 0, start: 0, values, absent: Absent::NOTHING }, true);
        Aggregate::new(Subject { table: 0, clock: 0, attempt: 0, epoch: 1 }, buffer, 2)
    }

    fn add(aggregate: &mut Aggregate, worker: u32, index: usize, values: [f32; 2], absent: &Absent) {
        let (start, values) = (index * 2, Values::F32(&values).into());
        let gradient = GradientFrame::Dense { index, start, values, absent };
        aggregate.add(Time(u64::from(worker)), WorkerId(worker), gradient);
    }

    #[test]
    fn gradients_are_added_up_and_counted_by_chunk() {
        let (layout, mut aggregate) = (layout(), aggregate());
        let first = Absent::in_chunk(std::slice::from_ref(&(0..1)), 0..2);
        add(&mut aggregate, 0, 0, [0.0, 2.0], &first);
        add(&mut aggregate, 1, 0, [0.0, 3.0], &first);
        add(&mut aggregate, 1, 1, [4.0, 5.0], Absent::NOTHING);
        let chunks = layout.chunks();
        assert_eq!(aggregate.values(&chunks[0]), [0.0, 5.0]);
        assert_eq!(aggregate.values(&chunks[1]), [4.0, 5.0]);
        assert_eq!([aggregate.weight(0), aggregate.weight(1)], [2, 1]);
        assert_eq!((aggregate.absent(0), aggregate.absent(1)), (&first, Absent::NOTHING));
        assert_eq!((aggregate.last_added(), aggregate.check(&layout)), (Time(1), Ok(())));
        let contributors: Vec<WorkerId> = aggregate.contributors().iter().copied().collect();
        assert_eq!(contributors, [WorkerId(0), WorkerId(1)]);
    }

    #[test]
    fn chunks_are_sealed_once_and_in_order() {
        let mut aggregate = aggregate();
        assert!(aggregate.is_open_at(0) && aggregate.may_wait_for(1));
        assert_eq!(aggregate.seal(1), 0..1);
        assert!(!aggregate.is_open_at(0) && aggregate.is_open_at(1));
        assert_eq!(aggregate.seal(0), 1..1, "what has left does not come back");
        assert_eq!(aggregate.seal(2), 1..2);
        aggregate.note_slowest(0);
        assert!(aggregate.may_wait_for(0) && !aggregate.may_wait_for(1));
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let (layout, mut aggregate) = (layout(), aggregate());
        aggregate.complete.insert(
            WorkerId(0),
            Complete { route: 1, want_params: false, at: Time::ZERO, is_listed: false, again: None },
        );
        assert!(aggregate.check(&layout).is_err(), "complete without a gradient");
        add(&mut aggregate, 0, 0, [1.0; 2], Absent::NOTHING);
        assert_eq!(aggregate.check(&layout), Ok(()));
        add(&mut aggregate, 0, 0, [1.0; 2], Absent::NOTHING);
        assert!(aggregate.check(&layout).is_err(), "one worker twice");
    }
}
