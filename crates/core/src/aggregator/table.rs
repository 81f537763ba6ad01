//! A table on its way through an aggregator: what its workers are pushing of it, and what becomes of that.

use super::lane::Lane;
use super::routes::Route;
use crate::absence::Absent;
use crate::codec::{self, Content, Context, Decoder, Encoder};
use crate::limits;
use crate::policy::NonFinite;
use crate::store::Buffer;
use crate::table::{Chunk, TableSpec};
use crate::types::{Clock, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A table's part on one shard, as its gradients pass through here.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) chunks: Vec<PartChunk>,
    pub(super) elements: usize,
    pub(super) policy: SumPolicy,
    /// Pushes that are half here.
    pub(super) incoming: BTreeMap<WorkerId, Incoming>,
    /// The last clock that is complete in a sum.
    pub(super) done: BTreeMap<WorkerId, Clock>,
    /// Complete pushes that the shard has not noted.
    pub(super) held: BTreeMap<WorkerId, usize>,
    pub(super) passed: BTreeMap<WorkerId, Passed>,
    /// Clocks that the shard refused, and how often.
    pub(super) attempts: BTreeMap<Clock, u32>,
    /// The sum that gradients of a clock go to.
    pub(super) open: BTreeMap<Clock, u64>,
    pub(super) spare: Vec<Buffer>,
    /// Reads what workers push, where a codec makes it.
    pub(super) decoder: Option<Decoder>,
    /// Makes sums smaller by the same codec. What it keeps is of this aggregator's sums alone.
    pub(super) encoder: Option<Encoder>,
    /// The table's elements, and how many of them are a row.
    size: (u64, usize),
    /// What the random choices of a codec follow from: the job's seed, who this is, and which table.
    pub(super) identity: (u64, u32, u32),
}

/// What becomes of a table's gradients here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SumPolicy {
    /// Whether they are added up at all.
    pub(super) adds_up: bool,
    /// How long a complete push is held for others.
    pub(super) hold: Duration,
    /// Whether it is held as long as others are at it: the time begins again with everything that is added.
    pub(super) is_patient: bool,
    pub(super) nonfinite: NonFinite,
}

/// A chunk of the part.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartChunk {
    pub(super) number: u32,
    /// First element in the table.
    pub(super) table_start: u64,
    /// First element in the part.
    pub(super) start: usize,
    pub(super) len: usize,
}

#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) clock: Clock,
    pub(super) request: u64,
    /// Frames before this one were taken.
    pub(super) next_part: usize,
    /// A frame of this attempt was refused; the rest of the attempt is ignored.
    pub(super) refused: bool,
}

/// Pushes that were passed on as they are, because gradients of the table were not added up then.
#[derive(Debug, Default)]
pub(super) struct Passed {
    /// Clocks that the shard has not acknowledged.
    pub(super) under_way: BTreeSet<Clock>,
    /// The last one that it has.
    pub(super) done: Option<Clock>,
}

impl Table {
    /// A table of which this shard holds these chunks, with their numbers.
    pub(super) fn new(spec: &TableSpec, chunks: impl Iterator<Item = (u32, Chunk)>) -> Table {
        let mut elements = 0;
        let place = |(number, chunk): (u32, Chunk)| {
            let (start, len) = (elements, chunk.len as usize);
            elements += len;
            PartChunk { number, table_start: chunk.start, start, len }
        };
        let chunks = chunks.map(place).collect();
        let size = (spec.elements(), spec.columns());
        Table { name: spec.name.clone(), chunks, elements, size, ..Table::default() }
    }

    pub(super) fn set_policy(&mut self, policy: SumPolicy) {
        self.policy = policy;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(super) fn elements(&self) -> usize {
        self.elements
    }

    pub(super) fn chunk_numbers(&self) -> Vec<u32> {
        self.chunks.iter().map(|chunk| chunk.number).collect()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let spare: usize = self.spare.iter().map(Buffer::memory_bytes).sum();
        spare + self.encoder.as_ref().map_or(0, Encoder::memory_bytes)
    }

    /// How far a worker is with its push of a clock. One that went on to a later clock will not come back to it.
    pub(super) fn position(&self, worker: WorkerId, clock: Clock) -> usize {
        if self.done.get(&worker).is_some_and(|&done| done >= clock) {
            return self.chunks.len();
        }
        match self.incoming.get(&worker) {
            Some(incoming) if incoming.clock == clock => incoming.next_part,
            Some(incoming) if incoming.clock > clock => self.chunks.len(),
            _ => 0,
        }
    }

    pub(super) fn under_way(&mut self, worker: WorkerId, clock: Clock) -> Option<&mut Incoming> {
        self.incoming.get_mut(&worker).filter(|incoming| incoming.clock == clock)
    }

    pub(super) fn fault(&self, cause: Cause, what: String) -> Fault {
        Fault { cause, message: format!("table `{}`: {what}", self.name) }
    }

    /// Whether a frame is the next one of a push that fits; its values. Those that a codec made are lent by the decoder.
    pub(super) fn check<'a>(
        &self,
        worker: WorkerId,
        header: &Header,
        payload: &'a [u8],
        decoder: Option<&'a mut Decoder>,
    ) -> Result<Content<'a>, Fault> {
        let clock = header.clock;
        let newer = self.incoming.get(&worker).map(|incoming| incoming.clock).filter(|&newer| newer > clock);
        if let Some(newer) = newer {
            let what = format!("{worker} gave up its push of clock {clock} when it began clock {newer}");
            return Err(self.fault(Cause::Protocol, what));
        }
        let index = header.part as usize;
        if index > self.position(worker, clock) {
            return Err(self.fault(Cause::Protocol, "frames of a push are missing".into()));
        }
        let held = self.held.get(&worker).copied().unwrap_or(0);
        if held >= limits::MAX_HELD_PUSHES {
            let what = format!("{held} pushes of {worker} are held here; wait for them before pushing on");
            return Err(self.fault(Cause::TooFarAhead, what));
        }
        let fits = |chunk: &&PartChunk| {
            let is_last = index + 1 == self.chunks.len();
            chunk.number == header.chunk && header.flags.has(Flags::LAST) == is_last
        };
        let chunk = self.chunks.get(index).filter(fits);
        let values: Option<Content<'a>> = match (chunk, header.flags.has(Flags::ENCODED), decoder) {
            (Some(chunk), true, Some(decoder)) => match decoder.read(payload, chunk.len) {
                Ok(values) => Some(values),
                Err(why) => {
                    let what = format!("{worker} pushed chunk {} at clock {clock}; {why}", header.chunk);
                    return Err(self.fault(Cause::Shape, what));
                }
            },
            (Some(chunk), false, _) => {
                header.dtype.values(payload).filter(|values| values.len() == chunk.len).map(Content::from)
            }
            _ => None,
        };
        let Some(values) = values else {
            let (bytes, dtype) = (payload.len(), header.dtype);
            let what = format!("{bytes} bytes of {dtype:?} for chunk {} as frame {index}", header.chunk);
            return Err(self.fault(Cause::Shape, what));
        };
        if self.policy.nonfinite == NonFinite::Reject && !values.all_finite() {
            let what = format!(
                "the gradient that {worker} pushed at clock {clock} has NaN or Inf in chunk {}; it was not applied \
                 (nonfinite=reject)",
                header.chunk
            );
            return Err(self.fault(Cause::NonFinite, what));
        }
        Ok(values)
    }

    /// What is absent from a frame's gradient, and its values, with zeros there.
    pub(super) fn read_absent(
        &self,
        header: &Header,
        payload: &[u8],
        decoder: Option<&mut Decoder>,
    ) -> Result<(Absent, Vec<f32>), Fault> {
        let chunk = self.chunks.get(header.part as usize).filter(|chunk| chunk.number == header.chunk);
        let read = match chunk {
            Some(chunk) => Absent::read_push(header, payload, chunk.len, decoder),
            None => Err("it is out of turn".into()),
        };
        read.map_err(|why| {
            let what = format!("chunk {} as frame {} at clock {}", header.chunk, header.part, header.clock);
            self.fault(Cause::Shape, format!("{what}: {why}"))
        })
    }

    /// What travels instead of the sum of a chunk; `None` when that is the sum itself, or nothing. What was not sent up
    /// of absent ranges waits.
    pub(super) fn encode(
        &mut self,
        clock: Clock,
        index: usize,
        sum: &[f32],
        absent: &Absent,
    ) -> Option<Vec<u8>> {
        let PartChunk { number, table_start, start, len } = self.chunks[index];
        if absent.covers(len) {
            return None;
        }
        let (seed, sender, table) = self.identity;
        let context = Context {
            step: clock,
            seed: codec::stretch_seed(seed, sender, table, clock, number),
            table_elements: self.size.0,
            start: table_start,
            columns: self.size.1,
            ..Context::default()
        };
        let mut payload = Vec::new();
        let encoder = self.encoder.as_mut()?;
        let largest = encoder.codec().largest();
        if largest < f32::MAX && sum.iter().any(|value| value.abs() > largest) {
            // Each gradient fitted, and their sum does not.
            return None;
        }
        // The servers say what is to become of a sum that is not finite.
        encoder.holding(start, absent, |encoder| encoder.encode(start, sum, &context, &mut payload)).ok()?;
        Some(payload)
    }

    /// A sum of a chunk that was encoded was refused, and what it is made of comes again.
    pub(super) fn undo(&mut self, index: usize, sum: &[f32], payload: &[u8], absent: &Absent) {
        let start = self.chunks[index].start;
        if let Some(encoder) = &mut self.encoder {
            encoder.holding(start, absent, |encoder| encoder.undo(start, sum, payload));
        }
    }

    /// One word about a push that cannot begin, or go on, is enough: the rest of the attempt is passed over.
    pub(super) fn refuse_once(
        &mut self,
        worker: WorkerId,
        header: &Header,
        fault: Fault,
    ) -> Result<(), Fault> {
        let told = match self.under_way(worker, header.clock) {
            Some(incoming) => std::mem::replace(&mut incoming.refused, true),
            None => true,
        };
        if told && header.part > 0 { Ok(()) } else { Err(fault) }
    }
}

impl Lane {
    /// Files a worker's push by the way that it goes: true when it is added up here, false when it is passed on. One that is
    /// sent again goes the way it went before, and the pushes of a worker never overtake each other.
    pub(super) fn file_push(&mut self, worker: WorkerId, header: &Header) -> Result<bool, Fault> {
        let Some(table) = self.tables.get_mut(header.table.0 as usize) else { return Ok(false) };
        if table.is_empty() || header.flags.has(Flags::ROWS) {
            return Ok(false);
        }
        let clock = header.clock;
        let is_done = table.done.get(&worker).is_some_and(|&done| clock <= done);
        let was_passed = |passed: &Passed| {
            passed.under_way.contains(&clock) || passed.done.is_some_and(|done| clock <= done && !is_done)
        };
        if table.passed.get(&worker).is_some_and(was_passed) {
            return Ok(false);
        }
        // What is in the middle of a push that did not begin is passed over here.
        if is_done || header.part > 0 || table.under_way(worker, clock).is_some() {
            return Ok(true);
        }
        let passing = table.passed.get(&worker).map_or(0, |passed| passed.under_way.len());
        let holding = table.held.get(&worker).copied().unwrap_or(0);
        if passing == 0 && (holding > 0 || table.policy.adds_up) {
            return Ok(true);
        }
        if passing >= limits::MAX_HELD_PUSHES {
            let what = format!("{passing} pushes of {worker} are under way; wait for them before pushing on");
            return Err(table.fault(Cause::TooFarAhead, what));
        }
        table.passed.entry(worker).or_default().under_way.insert(clock);
        Ok(false)
    }

    /// The shard acknowledged a push that was passed on, or refused it.
    pub(super) fn note_passed(&mut self, route: &Route, is_taken: bool) {
        let table = self.tables.get_mut(route.table).filter(|_| route.is_push);
        if let Some(passed) = table.and_then(|table| table.passed.get_mut(&route.worker)) {
            passed.under_way.remove(&route.clock);
            if is_taken {
                passed.done = passed.done.max(Some(route.clock));
            }
        }
    }
}
