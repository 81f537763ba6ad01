//! How an aggregator adds up gradients.
//!
//! A *sum* is of one table and clock on one shard. A chunk of it leaves as soon as every live worker that comes here is
//! past it, so that the link to the shard is busy while gradients still arrive. A sum ends when all of them are
//! complete, or when the first that is complete has been held long enough; the shard is then told whose pushes are
//! complete, and who comes later goes into another sum. What was sent stays in memory until the shard has noted it, and
//! is sent again after a broken connection. Frames are numbered, so that the shard takes each once.

use super::lane::{Lane, Out};
use super::routes::Route;
use super::table::{Incoming, PartChunk};
use crate::absence::{Absent, AbsentFromSums};
use crate::codec::{Content, Decoder};
use crate::kernels::{self, Values};
use crate::limits;
use crate::policy::NonFinite;
use crate::role::{Body, Frame};
use crate::store::Buffer;
use crate::types::{Clock, NodeId, TableId, Time, WorkerId};
use crate::wire::{Cause, DType, Fault, Flags, Header, Kind, group};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Sum buffers that are kept for the next clock.
const SPARE_BUFFERS: usize = 2;

/// Gradients of some workers of one clock.
#[derive(Debug)]
struct Sum {
    table: usize,
    clock: Clock,
    attempt: u32,
    buffer: Buffer,
    /// How many gradients are in each chunk.
    weights: Vec<u32>,
    /// What is absent from all gradients in a chunk.
    absent: AbsentFromSums,
    /// What travels instead of chunks that have left, where a codec made it.
    payloads: Vec<Option<Vec<u8>>>,
    /// Chunks before this one have left, or nobody has them.
    sealed: usize,
    /// How far the slowest worker was when that was last looked at.
    slowest: usize,
    contributors: BTreeSet<WorkerId>,
    complete: BTreeMap<WorkerId, Complete>,
    /// When it ends at the latest.
    deadline: Option<Time>,
    /// When something was added last.
    added: Time,
}

/// A worker whose push is complete in a sum.
#[derive(Debug)]
struct Complete {
    /// What its request is known by, while the worker is connected.
    route: u64,
    want_params: bool,
    /// The worker sent it again meanwhile: under which number, and whether it wants parameters.
    again: Option<(u64, bool)>,
}

/// Sums, and what was sent of them.
#[derive(Debug)]
pub(super) struct Flights {
    sums: BTreeMap<u64, Sum>,
    /// Numbered frames that the shard has not noted, oldest first.
    frames: VecDeque<Flight>,
    next_sum: u64,
    last_number: u64,
    deadlines: BTreeSet<(Time, u64)>,
}

#[derive(Debug, Clone, Copy)]
struct Flight {
    number: u64,
    sum: u64,
    /// Which chunk of it; `None` for the list of workers.
    chunk: Option<usize>,
}

impl Flights {
    pub(super) fn new(first_sum: u64) -> Flights {
        Flights {
            sums: BTreeMap::new(),
            frames: VecDeque::new(),
            next_sum: first_sum,
            last_number: 0,
            deadlines: BTreeSet::new(),
        }
    }

    /// The bytes of a sum, until the shard has noted it.
    pub(super) fn bytes(&self, sum: u64) -> Option<&[u8]> {
        self.sums.get(&sum).map(|sum| sum.buffer.as_bytes())
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let payloads = |sum: &Sum| sum.payloads.iter().flatten().map(Vec::len).sum::<usize>();
        let lists = |sum: &Sum| sum.absent.memory_bytes();
        self.sums.values().map(|sum| sum.buffer.memory_bytes() + payloads(sum) + lists(sum)).sum()
    }
}

impl Sum {
    fn add(&mut self, index: usize, chunk: PartChunk, values: Content<'_>, absent: &Absent) {
        self.absent.add(index, self.weights[index] == 0, absent);
        let sum = &mut self.buffer.as_mut_slice()[chunk.start..chunk.start + chunk.len];
        // The first gradient is copied, so that nothing has to be zeroed.
        match self.weights[index] {
            0 => values.copy_to(sum),
            _ => values.add_to(sum),
        }
        self.weights[index] += 1;
    }

    fn values(&self, chunk: PartChunk) -> &[f32] {
        &self.buffer.as_slice()[chunk.start..chunk.start + chunk.len]
    }
}

impl Lane {
    /// Takes one frame of a push.
    pub(super) fn push(
        &mut self,
        now: Time,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
        out: &mut Out<'_>,
    ) -> Result<(), Fault> {
        let (number, clock, index) = (header.table.0 as usize, header.clock, header.part as usize);
        let is_last = header.flags.has(Flags::LAST);
        let table = &mut self.tables[number];
        if table.done.get(&worker).is_some_and(|&done| clock <= done) {
            return if is_last { self.push_again(worker, header, out) } else { Ok(()) };
        }
        if let Some(incoming) = table.under_way(worker, clock) {
            incoming.refused &= index > 0;
            incoming.request = header.request;
            if incoming.refused || index < incoming.next_part {
                return Ok(());
            }
        }
        let mut decoder = table.decoder.take();
        let checked = match header.flags.has(Flags::ABSENT) {
            true => self.push_absent(now, worker, (header, payload), decoder.as_mut(), out),
            false => {
                let values = self.check(worker, header, payload, decoder.as_mut());
                values.map(|values| self.push_checked(now, worker, header, (values, Absent::NOTHING), out))
            }
        };
        let result = match checked {
            Ok(result) => result,
            Err(fault) => self.tables[number].refuse_once(worker, header, fault),
        };
        self.tables[number].decoder = decoder;
        result
    }

    /// Takes one frame of a push that does not have all of its chunk. The outer error is about the frame itself.
    fn push_absent(
        &mut self,
        now: Time,
        worker: WorkerId,
        (header, payload): (&Header, &[u8]),
        decoder: Option<&mut Decoder>,
        out: &mut Out<'_>,
    ) -> Result<Result<(), Fault>, Fault> {
        let (absent, values) = self.tables[header.table.0 as usize].read_absent(header, payload, decoder)?;
        let flags = header.flags.without(Flags::ABSENT.with(Flags::ENCODED));
        let plain = Header { flags, dtype: DType::F32, ..*header };
        let values = self.check(worker, &plain, bytemuck::cast_slice(&values), None)?;
        Ok(self.push_checked(now, worker, &plain, (values, &absent), out))
    }

    fn check<'a>(
        &self,
        worker: WorkerId,
        header: &Header,
        payload: &'a [u8],
        decoder: Option<&'a mut Decoder>,
    ) -> Result<Content<'a>, Fault> {
        let table = &self.tables[header.table.0 as usize];
        match header.epoch == self.epoch {
            true => table.check(worker, header, payload, decoder),
            false => Err(table.fault(Cause::StaleEpoch, format!("placement epoch {}", header.epoch))),
        }
    }

    /// Takes what the next frame of a push brings.
    fn push_checked(
        &mut self,
        now: Time,
        worker: WorkerId,
        header: &Header,
        gradient: (Content<'_>, &Absent),
        out: &mut Out<'_>,
    ) -> Result<(), Fault> {
        let (number, clock, index) = (header.table.0 as usize, header.clock, header.part as usize);
        let is_last = header.flags.has(Flags::LAST);
        let sum = match self.sum_for(number, clock, index, out) {
            Ok(sum) => sum,
            Err(fault) => return self.tables[number].refuse_once(worker, header, fault),
        };
        // Only who is furthest behind holds chunks back.
        let holds_back = self.flights.sums.get(&sum).is_some_and(|sum| index <= sum.slowest);
        self.add(now, sum, worker, index, gradient);
        let table = &mut self.tables[number];
        if table.under_way(worker, clock).is_none() {
            let incoming = Incoming { clock, request: header.request, next_part: 0, refused: false };
            table.incoming.insert(worker, incoming);
        }
        if let Some(incoming) = table.incoming.get_mut(&worker) {
            incoming.next_part = index + 1;
        }
        if is_last {
            self.complete(now, sum, worker, header);
        }
        if is_last || holds_back {
            self.seal(number, clock, out);
        }
        Ok(())
    }

    fn add(
        &mut self,
        now: Time,
        sum: u64,
        worker: WorkerId,
        index: usize,
        (values, absent): (Content<'_>, &Absent),
    ) {
        let Some(sum) = self.flights.sums.get_mut(&sum) else { return };
        let table = &self.tables[sum.table];
        sum.contributors.insert(worker);
        sum.added = now;
        if table.policy.nonfinite == NonFinite::Reject || values.all_finite() {
            return sum.add(index, table.chunks[index], values, absent);
        }
        let mut clipped = values.to_vec();
        kernels::clip_non_finite(&mut clipped);
        sum.add(index, table.chunks[index], Values::F32(&clipped).into(), absent);
    }

    /// The sum that a chunk of a clock goes to. One of which that chunk has left ends.
    fn sum_for(
        &mut self,
        number: usize,
        clock: Clock,
        index: usize,
        out: &mut Out<'_>,
    ) -> Result<u64, Fault> {
        if let Some(&open) = self.tables[number].open.get(&clock) {
            if self.flights.sums.get(&open).is_some_and(|sum| index >= sum.sealed) {
                return Ok(open);
            }
            self.end_sum(open, out);
        }
        let table = &mut self.tables[number];
        let Some(buffer) = table.spare.pop().or_else(|| Buffer::try_zeroed(table.elements)) else {
            let what = "the aggregator has no memory for another sum of gradients".into();
            return Err(table.fault(Cause::TooFarAhead, what));
        };
        let sum = self.flights.next_sum;
        self.flights.next_sum += 1;
        table.open.insert(clock, sum);
        self.flights.sums.insert(
            sum,
            Sum {
                table: number,
                clock,
                attempt: table.attempts.get(&clock).copied().unwrap_or(0),
                buffer,
                weights: vec![0; table.chunks.len()],
                absent: AbsentFromSums::default(),
                payloads: vec![None; table.chunks.len()],
                sealed: 0,
                slowest: usize::MAX,
                contributors: BTreeSet::new(),
                complete: BTreeMap::new(),
                deadline: None,
                added: Time::ZERO,
            },
        );
        Ok(sum)
    }

    /// The last frame of a worker's push was added.
    fn complete(&mut self, now: Time, id: u64, worker: WorkerId, header: &Header) {
        let Some(sum) = self.flights.sums.get_mut(&id) else { return };
        let table = &mut self.tables[sum.table];
        table.incoming.remove(&worker);
        table.done.insert(worker, sum.clock);
        *table.held.entry(worker).or_default() += 1;
        let want_params = header.flags.has(Flags::WANT_PARAMS);
        let route = self.routes.open(pushed(worker, header, want_params, id));
        sum.complete.insert(worker, Complete { route, want_params, again: None });
        if sum.deadline.is_none() {
            let deadline = now + table.policy.hold;
            sum.deadline = Some(deadline);
            self.flights.deadlines.insert((deadline, id));
        }
    }

    /// A push that is complete here was sent again, since the worker was not told so.
    fn push_again(&mut self, worker: WorkerId, header: &Header, out: &mut Out<'_>) -> Result<(), Fault> {
        let (number, clock) = (header.table.0 as usize, header.clock);
        let want_params = header.flags.has(Flags::WANT_PARAMS);
        let is_it =
            |sum: &Sum| sum.table == number && sum.clock == clock && sum.complete.contains_key(&worker);
        let found = self.flights.sums.iter_mut().rev().find(|(_, sum)| is_it(sum));
        let Some((&id, sum)) = found else {
            // The shard has it.
            return self.settle_again(worker, number, clock, header.request, want_params, out);
        };
        let is_open = self.tables[number].open.get(&clock) == Some(&id);
        let Some(complete) = sum.complete.get_mut(&worker) else { return Ok(()) };
        if !is_open {
            complete.again = Some((header.request, want_params));
        } else if self.routes.get(complete.route).is_none() {
            complete.route = self.routes.open(pushed(worker, header, want_params, id));
        }
        Ok(())
    }

    /// Tells a worker that the shard has its push, and asks for the parameters that it wants.
    fn settle_again(
        &mut self,
        worker: WorkerId,
        table: usize,
        clock: Clock,
        request: u64,
        want_params: bool,
        out: &mut Out<'_>,
    ) -> Result<(), Fault> {
        let mut header = Header::new(Kind::Pull);
        header.table = TableId(table as u32);
        header.clock = clock;
        header.request = request;
        header.epoch = self.epoch;
        // Where the parameters are to lie is said with the push; without it they come as bytes.
        self.acknowledge(&pushed(worker, &header, false, 0), out);
        if !want_params {
            return Ok(());
        }
        header.clock = clock.saturating_add(1);
        self.pass_on(worker, &header, &[], out)
    }

    /// Sends the chunks that every live worker is past, and ends the sum when that is all of them.
    fn seal(&mut self, number: usize, clock: Clock, out: &mut Out<'_>) {
        let table = &self.tables[number];
        let Some(&id) = table.open.get(&clock) else { return };
        let positions = self.members.keys().map(|&worker| table.position(worker, clock));
        let sealed = positions.min().unwrap_or(table.chunks.len());
        let is_all = sealed == table.chunks.len();
        if let Some(sum) = self.flights.sums.get_mut(&id) {
            sum.slowest = sealed;
        }
        self.send_chunks(id, sealed, out);
        if is_all {
            self.end_sum(id, out);
        }
    }

    fn send_chunks(&mut self, id: u64, sealed: usize, out: &mut Out<'_>) {
        let Some(sum) = self.flights.sums.get_mut(&id) else { return };
        let range = sum.sealed..sealed.max(sum.sealed);
        sum.sealed = range.end;
        for index in range {
            if let Some(sum) = self.flights.sums.get_mut(&id).filter(|sum| sum.weights[index] > 0) {
                // Once: what is sent again after a broken connection is the same.
                let table = &mut self.tables[sum.table];
                let values = sum.values(table.chunks[index]);
                sum.payloads[index] = table.encode(sum.clock, index, values, sum.absent.of(index));
                self.launch(id, Some(index), out);
            }
        }
    }

    /// Nothing more is added: the rest leaves, and the shard is told whose pushes are complete.
    fn end_sum(&mut self, id: u64, out: &mut Out<'_>) {
        let Some(sum) = self.flights.sums.get_mut(&id) else { return };
        if let Some(deadline) = sum.deadline.take() {
            self.flights.deadlines.remove(&(deadline, id));
        }
        self.tables[sum.table].open.remove(&sum.clock);
        let is_wanted = |worker: &WorkerId| self.members.contains_key(worker);
        // Pieces of workers that died before their push was complete.
        let is_left_over = sum.complete.is_empty() && !sum.contributors.iter().any(is_wanted);
        out.report.groups += u64::from(!sum.complete.is_empty());
        out.report.gradients += sum.complete.len() as u64;
        let count = if is_left_over { 0 } else { sum.weights.len() };
        self.send_chunks(id, count, out);
        self.launch(id, None, out);
    }

    /// Ends the sums that were held long enough.
    pub(super) fn handle_timeout(&mut self, now: Time, out: &mut Out<'_>) {
        while let Some(&(at, id)) = self.flights.deadlines.first()
            && at <= now
        {
            self.flights.deadlines.pop_first();
            let Some(sum) = self.flights.sums.get_mut(&id) else { continue };
            let policy = self.tables[sum.table].policy;
            let later = sum.added + policy.hold;
            if policy.is_patient && later > now {
                sum.deadline = Some(later);
                self.flights.deadlines.insert((later, id));
            } else {
                self.end_sum(id, out);
            }
        }
    }

    fn launch(&mut self, sum: u64, chunk: Option<usize>, out: &mut Out<'_>) {
        self.flights.last_number += 1;
        let flight = Flight { number: self.flights.last_number, sum, chunk };
        self.flights.frames.push_back(flight);
        if self.link.is_up() {
            self.send_flight(flight, out);
        }
    }

    /// Sends everything that the shard has not noted.
    pub(super) fn send_flights(&mut self, out: &mut Out<'_>) {
        for index in 0..self.flights.frames.len() {
            self.send_flight(self.flights.frames[index], out);
        }
    }

    fn send_flight(&self, flight: Flight, out: &mut Out<'_>) {
        let Some(sum) = self.flights.sums.get(&flight.sum) else { return };
        let mut header = Header::new(Kind::Push);
        header.table = TableId(sum.table as u32);
        header.clock = sum.clock;
        header.epoch = self.epoch;
        header.request = flight.number;
        header.part = sum.attempt;
        let frame = match flight.chunk {
            Some(index) => {
                let PartChunk { number, start, len, .. } = self.tables[sum.table].chunks[index];
                header.chunk = number;
                header.rows = sum.weights[index];
                let payload = sum.payloads[index].as_deref();
                header.flags = payload.map_or(Flags::default(), |_| Flags::ENCODED);
                let absent = sum.absent.of(index);
                let (body, bytes) = if !absent.is_empty() {
                    header.flags = header.flags.with(Flags::ABSENT);
                    let plain = bytemuck::cast_slice(sum.values(self.tables[sum.table].chunks[index]));
                    let payload = absent.payload(len, payload.unwrap_or(plain));
                    let bytes = payload.len();
                    (Body::Bytes(payload), bytes)
                } else if let Some(payload) = payload {
                    (Body::Bytes(payload.to_vec()), payload.len())
                } else {
                    (Body::Stored { buffer: flight.sum, start: start * 4, len: len * 4 }, len * 4)
                };
                header.payload_bytes = bytes as u32;
                out.report.bytes_to_servers += bytes as u64;
                Frame { header, body }
            }
            None => {
                // A worker whose connection broke asks for its parameters itself.
                let is_there = |route: u64| self.routes.get(route).is_some();
                let entries = sum.complete.iter().map(|(&worker, complete)| group::Entry {
                    worker,
                    want_params: complete.want_params && is_there(complete.route),
                    request: complete.route,
                });
                let bytes = group::encode(entries);
                header.kind = Kind::Group;
                header.payload_bytes = bytes.len() as u32;
                Frame { header, body: Body::Bytes(bytes) }
            }
        };
        out.send(NodeId::Shard(self.shard), frame.header, frame.body);
    }

    /// The shard has noted all frames up to this one.
    pub(super) fn noted(&mut self, number: u64, out: &mut Out<'_>) {
        while let Some(flight) = self.flights.frames.front().copied()
            && flight.number <= number
        {
            self.flights.frames.pop_front();
            if flight.chunk.is_none() {
                self.settle_sum(flight.sum, out);
            }
        }
    }

    /// Tells the workers of a sum that the shard has it.
    fn settle_sum(&mut self, id: u64, out: &mut Out<'_>) {
        let Some(Sum { table, clock, buffer, complete, .. }) = self.flights.sums.remove(&id) else { return };
        let known = &mut self.tables[table];
        if known.spare.len() < SPARE_BUFFERS {
            known.spare.push(buffer);
        }
        for worker in complete.keys() {
            if let Some(held) = known.held.get_mut(worker) {
                *held = held.saturating_sub(1);
            }
        }
        for (worker, complete) in complete {
            if let Some(route) = self.routes.acknowledge(complete.route) {
                self.acknowledge(&route, out);
            }
            if let Some((request, want_params)) = complete.again
                && let Err(fault) = self.settle_again(worker, table, clock, request, want_params, out)
            {
                self.refuse(worker, TableId(table as u32), request, &fault, out);
            }
        }
    }

    /// The shard refused a sum, of which one worker was told. All sums of this table and clock are refused with it, and
    /// everybody who is in one begins anew.
    pub(super) fn take_back(&mut self, id: u64, worker: WorkerId, fault: &Fault, out: &mut Out<'_>) {
        if matches!(fault.cause, Cause::NonFinite | Cause::NotAMember) {
            return;
        }
        let Some(sum) = self.flights.sums.get(&id) else { return };
        let (number, clock, attempt) = (sum.table, sum.clock, sum.attempt);
        self.forget_push(number, clock, worker);
        if attempt != self.tables[number].attempts.get(&clock).copied().unwrap_or(0) {
            return;
        }
        let table = &mut self.tables[number];
        table.attempts.insert(clock, attempt + 1);
        if table.attempts.len() > limits::MAX_REFUSED_SUMS {
            table.attempts.pop_first();
        }
        let is_it = |sum: &&Sum| (sum.table, sum.clock, sum.attempt) == (number, clock, attempt);
        let sums = self.flights.sums.values().filter(is_it);
        let workers: BTreeSet<WorkerId> = sums.flat_map(|sum| sum.contributors.iter().copied()).collect();
        for worker in workers {
            self.tell_taken_back(number, clock, worker, fault, out);
        }
        if let Some(&open) = self.tables[number].open.get(&clock) {
            self.end_sum(open, out);
        }
        let table = &mut self.tables[number];
        for sum in self.flights.sums.values().filter(is_it) {
            for (index, payload) in sum.payloads.iter().enumerate() {
                if let Some(payload) = payload {
                    table.undo(index, sum.values(table.chunks[index]), payload, sum.absent.of(index));
                }
            }
        }
    }

    fn tell_taken_back(
        &mut self,
        number: usize,
        clock: Clock,
        worker: WorkerId,
        fault: &Fault,
        out: &mut Out<'_>,
    ) {
        let complete = self.flights.sums.values().filter(|sum| (sum.table, sum.clock) == (number, clock));
        let routes: Vec<u64> =
            complete.filter_map(|sum| sum.complete.get(&worker)).map(|complete| complete.route).collect();
        let half = self.tables[number].under_way(worker, clock).map(|incoming| incoming.request);
        let requests: Vec<u64> = routes
            .into_iter()
            .filter_map(|route| self.routes.close(route))
            .map(|route| route.request)
            .collect();
        for request in requests.into_iter().chain(half) {
            self.refuse(worker, TableId(number as u32), request, fault, out);
        }
        self.forget_push(number, clock, worker);
    }

    /// A push may be made again from its beginning.
    fn forget_push(&mut self, number: usize, clock: Clock, worker: WorkerId) {
        let table = &mut self.tables[number];
        if table.under_way(worker, clock).is_some() {
            table.incoming.remove(&worker);
        }
        if table.done.get(&worker) == Some(&clock) {
            match clock.checked_sub(1) {
                Some(before) => table.done.insert(worker, before),
                None => table.done.remove(&worker),
            };
        }
    }

    /// A worker is gone: what it has pushed stays, and nobody waits for the rest.
    pub(super) fn remove_pusher(&mut self, number: usize, worker: WorkerId, out: &mut Out<'_>) {
        let table = &mut self.tables[number];
        table.incoming.remove(&worker);
        table.passed.remove(&worker);
        table.done.remove(&worker);
        table.held.remove(&worker);
        let clocks: Vec<Clock> = table.open.keys().copied().collect();
        clocks.into_iter().for_each(|clock| self.seal(number, clock, out));
    }
}

/// A push that is complete in a sum, as a request.
fn pushed(worker: WorkerId, header: &Header, want_params: bool, sum: u64) -> Route {
    Route {
        worker,
        table: header.table.0 as usize,
        clock: header.clock,
        request: header.request,
        sum: Some(sum),
        is_push: false,
        awaits_ack: true,
        awaits_params: want_params,
        bytes: 0,
        landing: header.landing,
    }
}
