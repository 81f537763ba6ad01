//! How an aggregator adds up gradients for one shard.
//!
//! An *aggregate* is of one table and clock. A chunk of it leaves as soon as every live worker that comes here is past it,
//! so that the link to the shard is busy while gradients still arrive. An aggregate ends when all of them are complete, or
//! when the first that is complete has been held long enough; the shard is then told whose pushes are complete, and later
//! gradients go into another aggregate. What was sent stays in memory until the shard has noted it, and is sent again
//! after a broken connection. Frames are numbered, so that the shard takes each once.

use super::aggregate::{self, Again, Aggregate, AggregateId, Complete, ListKey};
use super::flights::{Cargo, Flight, Flights};
use super::held_pulls::HeldPulls;
use super::lowers::Lowers;
use super::members::Caller;
use super::memory::Memory;
use super::table::{PushIntake, Table};
use super::uplink::{CompletePush, Peers};
use crate::codec;
use crate::intake::{Admission, GradientFrame, Push, PushFrame, Sink};
use crate::limits;
use crate::role::{Body, Frame};
use crate::table::Layout;
use crate::types::{AggregatorId, Clock, ConnectionId, TableId, Time, WorkerId};
use crate::wire::frame::{Completed, Form, FromAggregator, Pull, Subject, Sum};
use crate::wire::group::{self, Entry};
use crate::wire::{Cause, Fault};
use std::collections::{BTreeMap, BTreeSet};

/// The tables of a job on their way to one shard, and the aggregates of their gradients.
#[derive(Debug)]
pub(super) struct Aggregation {
    /// The shard's place among those of the aggregator.
    shard: usize,
    tables: Vec<Table>,
    flights: Flights,
    pub(super) held_pulls: HeldPulls,
    pub(super) lowers: Lowers,
}

impl Aggregation {
    /// For the shard at this place among those of the aggregator.
    pub(super) fn new(shard: usize, tables: Vec<Table>, lowers: Lowers) -> Aggregation {
        Aggregation { shard, tables, flights: Flights::default(), held_pulls: HeldPulls::default(), lowers }
    }

    pub(super) fn table(&self, number: usize) -> Option<&Table> {
        self.tables.get(number)
    }

    pub(super) fn table_mut(&mut self, number: usize) -> Option<&mut Table> {
        self.tables.get_mut(number)
    }

    pub(super) fn tables(&self) -> impl Iterator<Item = &Table> {
        self.tables.iter()
    }

    pub(super) fn tables_mut(&mut self) -> impl Iterator<Item = &mut Table> {
        self.tables.iter_mut()
    }

    /// Whether a push of rows waits here that its worker's pull has to follow.
    pub(super) fn holds(&self, worker: WorkerId, pull: &Pull) -> bool {
        let table = self.tables.get(pull.subject.table.0 as usize);
        table.is_some_and(|table| table.layout().is_sparse() && is_held(table, &self.flights, worker))
    }

    /// The bytes of an aggregate, until the shard has noted it.
    pub(super) fn bytes(&self, id: AggregateId) -> Option<&[u8]> {
        self.flights.get(id).map(Aggregate::bytes)
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.flights.next_timeout()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.flights.memory_bytes() + self.tables.iter().map(Table::memory_bytes).sum::<usize>()
    }

    /// The aggregate that a chunk of a clock goes to. One of which that chunk has left ends.
    fn aggregate_for(
        &mut self,
        number: usize,
        clock: Clock,
        index: usize,
        peers: &mut Peers<'_, '_>,
    ) -> Result<AggregateId, Fault> {
        if let Some(open) = self.tables[number].open(clock) {
            if self.flights.get(open).is_some_and(|aggregate| aggregate.is_open_at(index)) {
                return Ok(open);
            }
            self.end(open, peers);
        }
        self.open_for(number, clock)
    }

    /// The aggregate that is open for a clock, or another one.
    fn open_for(&mut self, number: usize, clock: Clock) -> Result<AggregateId, Fault> {
        let table = &mut self.tables[number];
        if let Some(open) = table.open(clock) {
            return Ok(open);
        }
        let Some(buffer) = table.take_buffer() else {
            let what = "the aggregator has no memory for another sum of gradients".into();
            return Err(table.fault(Cause::TooFarAhead, what));
        };
        let (attempt, epoch) = (table.attempt(clock), table.valid_from());
        let subject = aggregate::Subject { table: number, clock, attempt, epoch };
        let id = self.flights.open(Aggregate::new(subject, buffer, table.layout().chunks().len()));
        table.set_open(clock, id);
        Ok(id)
    }

    /// Sends the chunks that every live worker is past, and ends the aggregate when that is all of them. After the last chunk of an
    /// aggregator below comes the list of its workers, which belongs to the same aggregate.
    pub(super) fn seal(
        &mut self,
        number: usize,
        clock: Clock,
        intake: &PushIntake,
        peers: &mut Peers<'_, '_>,
    ) {
        let table = &self.tables[number];
        let Some(id) = table.open(clock) else { return };
        let all = table.layout().chunks().len();
        let aggregate = self.flights.get(id);
        let position = |worker| match peers.members.caller(worker).through {
            Some(_) if table.is_done(worker, clock) || table.is_passed(worker, clock) => all,
            Some(lower) => aggregate.map_or(0, |aggregate| aggregate.position_of(lower)),
            None => table.position(worker, clock, intake),
        };
        let positions = peers.members.iter().map(position);
        let sealed = positions.min().unwrap_or(all);
        let is_listed = |worker| {
            let is_direct = peers.members.caller(worker).through.is_none();
            is_direct || table.is_done(worker, clock) || table.is_passed(worker, clock)
        };
        let is_whole = sealed == all && peers.members.iter().all(is_listed);
        if let Some(aggregate) = self.flights.get_mut(id) {
            aggregate.note_slowest(sealed);
        }
        self.send_chunks(id, sealed, peers);
        if is_whole {
            self.end(id, peers);
        }
    }

    fn send_chunks(&mut self, id: AggregateId, end: usize, peers: &mut Peers<'_, '_>) {
        let Some(aggregate) = self.flights.get_mut(id) else { return };
        for index in aggregate.seal(end) {
            let Some(aggregate) = self.flights.get_mut(id).filter(|aggregate| aggregate.weight(index) > 0)
            else {
                continue;
            };
            let subject = aggregate.subject();
            let table = &mut self.tables[subject.table];
            let chunk = table.layout().chunks()[index];
            let payload =
                table.encode(subject.clock, index, aggregate.values(&chunk), aggregate.absent(index));
            // Each row counts by itself: what has none of them does not travel.
            let is_nothing = table.layout().is_sparse()
                && payload.as_ref().is_some_and(|payload| codec::is_nothing(&payload.bytes));
            aggregate.set_payload(index, payload);
            if !is_nothing {
                let workers = aggregate.take_workers(index);
                if let Some(flight) = self.flights.announce(id, workers) {
                    self.send_if_up(flight, peers);
                }
                self.launch(id, Cargo::Chunk(index), peers);
            }
        }
    }

    /// Ends an aggregate: its remaining chunks leave, and the list of workers whose pushes are complete. The shard counts a worker's pushes
    /// in the order of their clocks: what is here of earlier ones leaves before.
    fn end(&mut self, id: AggregateId, peers: &mut Peers<'_, '_>) {
        self.flights.clear_deadline(id);
        let Some(subject) = self.flights.get(id).map(Aggregate::subject) else { return };
        for clock in self.tables[subject.table].open_clocks() {
            let earlier = self.tables[subject.table].open(clock).filter(|_| clock < subject.clock);
            if let Some(earlier) = earlier.filter(|earlier| self.share_workers(*earlier, id)) {
                self.end(earlier, peers);
            }
        }
        let Some(aggregate) = self.flights.get(id) else { return };
        let subject = aggregate.subject();
        let table = &mut self.tables[subject.table];
        table.close(subject.clock);
        let completed = aggregate.completed().len() as u64;
        // Gradients of workers that died before their push was complete.
        let is_left_over = completed == 0
            && aggregate.lowers().is_empty()
            && !aggregate.contributors().iter().any(|worker| peers.members.contains(*worker));
        for complete in aggregate.completed().values() {
            peers.uplink.routes.hold(complete.route, aggregate.hold_of(complete));
        }
        peers.out.report.groups += u64::from(completed > 0);
        peers.out.report.gradients += completed;
        let count = if is_left_over { 0 } else { table.layout().chunks().len() };
        self.send_chunks(id, count, peers);
        self.launch(id, Cargo::Completed, peers);
        let Aggregation { tables, flights, held_pulls, .. } = self;
        let table = &mut tables[subject.table];
        table.settle();
        held_pulls.release(subject.table, |worker| is_held(table, flights, worker), peers);
    }

    /// Whether gradients of one worker are in both of two aggregates.
    fn share_workers(&self, one: AggregateId, other: AggregateId) -> bool {
        let (Some(one), Some(other)) = (self.flights.get(one), self.flights.get(other)) else { return false };
        !one.contributors().is_disjoint(other.contributors())
    }

    /// The codecs of a table are about to change: what was added up under the old ones leaves.
    pub(super) fn end_all(&mut self, number: usize, peers: &mut Peers<'_, '_>) {
        for clock in self.tables[number].open_clocks() {
            if let Some(open) = self.tables[number].open(clock) {
                self.end(open, peers);
            }
        }
    }

    /// Ends the aggregates that were held long enough.
    pub(super) fn handle_timeout(&mut self, now: Time, peers: &mut Peers<'_, '_>) {
        while let Some(id) = self.flights.take_due(now) {
            let Some(aggregate) = self.flights.get(id) else { continue };
            let policy = self.tables[aggregate.subject().table].policy();
            let later = aggregate.last_added() + policy.hold;
            if policy.is_patient && later > now {
                self.flights.set_deadline(id, later);
            } else {
                self.end(id, peers);
            }
        }
    }

    fn launch(&mut self, id: AggregateId, cargo: Cargo, peers: &mut Peers<'_, '_>) {
        let flight = self.flights.launch(id, cargo);
        self.send_if_up(flight, peers);
    }

    fn send_if_up(&self, flight: Flight, peers: &mut Peers<'_, '_>) {
        if peers.uplink.link.is_up() {
            self.send(flight, peers);
        }
    }

    /// Sends everything that the shard has not noted.
    pub(super) fn send_all(&self, peers: &mut Peers<'_, '_>) {
        self.flights.frames().for_each(|flight| self.send(flight, peers));
    }

    fn send(&self, flight: Flight, peers: &mut Peers<'_, '_>) {
        let Some(aggregate) = self.flights.get(flight.aggregate) else { return };
        let frame = match flight.cargo {
            Cargo::Contributors => {
                let ranks = group::encode_ranks(self.flights.contributors(flight.number));
                let header = FromAggregator::Contributors { number: flight.number }.header(ranks.len());
                Frame { header, body: Body::Bytes(ranks) }
            }
            Cargo::Chunk(index) => self.chunk_frame(flight, aggregate, index),
            Cargo::Completed => completed_frame(flight, aggregate, peers),
        };
        if let Cargo::Chunk(_) = flight.cargo {
            peers.out.report.bytes_to_servers += u64::from(frame.header.payload_bytes);
        }
        peers.out.send(peers.uplink.connection(), frame.header, frame.body);
    }

    fn chunk_frame(&self, flight: Flight, aggregate: &Aggregate, index: usize) -> Frame {
        let aggregate::Subject { table, clock, attempt, .. } = aggregate.subject();
        let chunk = self.tables[table].layout().chunks()[index];
        let (payload, absent) = (aggregate.payload(index), aggregate.absent(index));
        let (start, len) = (chunk.start * 4, chunk.len * 4);
        let made = payload.map(|payload| payload.bytes.as_slice());
        let layout = self.tables[table].layout();
        let plain = if layout.is_sparse() { Form::Rows { count: 0 } } else { Form::PLAIN };
        let rows = || aggregate.row_payload(index, &chunk, layout.row_width());
        let (body, bytes) = if !absent.is_empty() {
            let plain = bytemuck::cast_slice(aggregate.values(&chunk));
            let payload = absent.payload(chunk.len, made.unwrap_or(plain));
            let bytes = payload.len();
            (Body::Bytes(payload), bytes)
        } else if let Some(made) = made {
            (Body::Bytes(made.to_vec()), made.len())
        } else if let Some(rows) = rows() {
            let bytes = rows.len();
            (Body::Bytes(rows), bytes)
        } else {
            let buffer = Memory { shard: self.shard, id: flight.aggregate }.to_bits();
            (Body::Stored { buffer, start, len }, len)
        };
        let sum = Sum {
            subject: wire_subject(flight, aggregate),
            clock,
            chunk: chunk.number,
            attempt,
            gradients: aggregate.weight(index),
            form: payload.map_or(plain, |payload| payload.form),
            has_absent: !absent.is_empty(),
        };
        Frame { header: sum.header(bytes), body }
    }

    /// The shard has noted all frames up to this one: the workers of their aggregates are told so.
    pub(super) fn note(&mut self, number: u64, peers: &mut Peers<'_, '_>) {
        while let Some(aggregate) = self.flights.take_noted(number) {
            let aggregate::Subject { table, clock, .. } = aggregate.subject();
            let (buffer, completed, lists) = aggregate.into_parts();
            self.tables[table].keep_buffer(buffer);
            let mut listed: BTreeMap<AggregatorId, Vec<u64>> = BTreeMap::new();
            for (worker, complete) in completed {
                self.tables[table].note(worker);
                if let Some(route) = peers.uplink.routes.acknowledge(complete.route) {
                    match route.through.filter(|_| complete.is_listed) {
                        Some(lower) => listed.entry(lower).or_default().push(route.request),
                        None => peers.acknowledge(route.caller(), route.request),
                    }
                }
                // A worker that is not connected asks again when it is: an answer that begins now would reach it in part.
                let again = complete.again.filter(|_| peers.members.is_connected(worker));
                if let Some(Again { request, epoch: known, want_params }) = again {
                    let epoch = self.tables[table].valid_from();
                    // One that knows of an earlier epoch asks again in this one.
                    let want_params = want_params && known == epoch;
                    let reply_place = None;
                    peers.settle_again(CompletePush {
                        caller: peers.members.caller(worker),
                        table,
                        epoch,
                        clock,
                        request,
                        want_params,
                        reply_place,
                    });
                }
            }
            for ListKey { from, session, number: list } in lists {
                if session != self.lowers.session(from) {
                    continue;
                }
                self.lowers.settle(from, list);
                self.send_notes(from, peers);
                // The note waits for an earlier list. What the shard says next of these workers is of pushes that it has.
                if self.lowers.is_waiting(from, list)
                    && let Some(requests) = listed.remove(&from)
                {
                    let connection = ConnectionId::LowerFor(from, peers.uplink.shard());
                    peers.acknowledge_on(connection, &requests);
                }
            }
        }
    }

    /// Tells an aggregator below up to which list the shard has everything.
    fn send_notes(&mut self, to: AggregatorId, peers: &mut Peers<'_, '_>) {
        if let Some(last) = self.lowers.take_settled(to)
            && self.lowers.is_connected(to)
        {
            let connection = ConnectionId::LowerFor(to, peers.uplink.shard());
            peers.out.send(connection, last.header(0), Body::Empty);
        }
    }

    /// Everything that the shard has not noted is given up: it does not know of it, or has it in part from elsewhere. Workers and
    /// aggregators below come back, and send it again. What codecs had left out of it is not kept, lest it counts twice.
    pub(super) fn begin_anew(&mut self) {
        for aggregate in self.flights.begin_anew() {
            let table = &mut self.tables[aggregate.subject().table];
            for (index, payload) in aggregate.payloads() {
                let chunk = table.layout().chunks()[index];
                table.undo(index, aggregate.values(&chunk), payload, aggregate.absent(index));
            }
            table.keep_buffer(aggregate.into_parts().0);
        }
        self.tables.iter_mut().for_each(Table::begin_anew);
        self.held_pulls.clear();
        self.lowers.begin_anew();
    }

    /// A worker's push is about to be passed on: what is here of it, in sums from below, goes first. The shard then takes the rest.
    pub(super) fn end_with(
        &mut self,
        number: usize,
        worker: WorkerId,
        clock: Clock,
        peers: &mut Peers<'_, '_>,
    ) {
        let open = self.tables[number].open(clock);
        let has_it = |aggregate: &Aggregate| aggregate.contributors().contains(&worker);
        if let Some(id) = open.filter(|id| self.flights.get(*id).is_some_and(has_it)) {
            self.end(id, peers);
        }
    }

    /// Adds a sum from below. The error is that of the sum. False where a gradient in it is here already, and nothing was added.
    pub(super) fn take_sum(
        &mut self,
        now: Time,
        from: AggregatorId,
        sum: &Sum,
        payload: &[u8],
        intake: &mut PushIntake,
        peers: &mut Peers<'_, '_>,
    ) -> Result<bool, Fault> {
        let number = sum.subject.table.0 as usize;
        let contributors = self.lowers.taken.contributors(from);
        if sum.gradients == 0 || sum.gradients as usize != contributors.len() {
            let what = format!("a sum of {} gradients of {} workers", sum.gradients, contributors.len());
            return Err(self.tables[number].layout().shape_fault(what));
        }
        let index = self.tables[number].layout().index_of(sum.chunk)?;
        let id = self.aggregate_for(number, sum.clock, index, peers)?;
        let gradient = intake.read_sum(self.tables[number].layout(), from, sum, payload)?;
        if let Some(aggregate) = self.flights.get_mut(id) {
            if aggregate.known_of(index, &contributors).is_some() {
                return Ok(false);
            }
            aggregate.add_sum(now, from, sum, &contributors, gradient);
        }
        self.seal(number, sum.clock, intake, peers);
        Ok(true)
    }

    /// A list from below that is here for the first time: its workers are complete, or refused.
    pub(super) fn take_list(
        &mut self,
        now: Time,
        from: AggregatorId,
        list: &Completed,
        entries: &[Entry],
        intake: &PushIntake,
        peers: &mut Peers<'_, '_>,
    ) {
        let (number, clock, epoch) = (
            list.subject.table.0 as usize,
            list.clock,
            self.tables[list.subject.table.0 as usize].valid_from(),
        );
        let refused = self.lowers.taken.refusal(from, list);
        let opened = if entries.is_empty() { None } else { Some(self.open_for(number, clock)) };
        let no_memory = opened.as_ref().and_then(|opened| opened.as_ref().err().cloned());
        let fault = refused.as_ref().map(|refused| refused.fault().clone()).or(no_memory.clone());
        for entry in entries {
            if let Some(fault) = &fault {
                let caller = Caller { worker: entry.worker, through: Some(from) };
                peers.refuse(caller, list.subject.table, entry.request, fault);
            }
        }
        let counts = no_memory.is_none() && refused.as_ref().is_none_or(|refused| refused.counts());
        let id = opened.and_then(Result::ok).filter(|_| counts);
        self.lowers.add(from, *list, id.is_none());
        let Some(id) = id else { return self.send_notes(from, peers) };
        let session = self.lowers.session(from);
        let Aggregation { tables, flights, .. } = self;
        let table = &mut tables[number];
        let Some(aggregate) = flights.get_mut(id) else { return };
        aggregate.add_list(ListKey { from, session, number: list.subject.request });
        // The last one of them comes last here too.
        let is_last = |entry: &&Entry| Some(entry.worker) == list.last;
        let last = entries.iter().filter(is_last);
        for &Entry { worker, want_params, request } in
            entries.iter().filter(|entry| !is_last(entry)).chain(last)
        {
            let is_refused = fault.is_some();
            table.complete(worker, clock);
            let push = CompletePush {
                caller: Caller { worker, through: Some(from) },
                table: number,
                epoch,
                clock,
                request,
                want_params: want_params && list.subject.epoch == epoch && !is_refused,
                reply_place: None,
            };
            // One that was refused is told nothing more.
            let route = if is_refused { 0 } else { peers.uplink.open(push, id) };
            aggregate.complete(
                worker,
                Complete { route, want_params: push.want_params, at: now, is_listed: true, again: None },
            );
        }
        if !flights.has_deadline(id) {
            flights.set_deadline(id, now + table.policy().hold);
        }
        self.seal(number, clock, intake, peers);
    }

    /// A list from below that was taken before. Its workers' wishes were lost with a connection.
    pub(super) fn repeat_list(
        &mut self,
        from: AggregatorId,
        list: &Completed,
        entries: &[Entry],
        peers: &mut Peers<'_, '_>,
    ) {
        let number = list.subject.table.0 as usize;
        let epoch = self.tables[number].valid_from();
        for &Entry { worker, want_params, request } in entries {
            self.repeat_push(
                CompletePush {
                    caller: Caller { worker, through: Some(from) },
                    table: number,
                    epoch,
                    clock: list.clock,
                    request,
                    want_params: want_params && list.subject.epoch == epoch,
                    reply_place: None,
                },
                list.subject.epoch,
                peers,
            );
        }
        if !self.lowers.is_waiting(from, list.subject.request) {
            let connection = ConnectionId::LowerFor(from, peers.uplink.shard());
            peers.out.send(connection, list.header(0), Body::Empty);
        }
    }

    /// A push that is complete was sent again: an open aggregate answers it under the new number; one that has left does so
    /// when the shard has noted it; and the shard has those that are not here any more.
    fn repeat_push(&mut self, push: CompletePush, known: u32, peers: &mut Peers<'_, '_>) {
        let CompletePush { caller: Caller { worker, .. }, table, clock, request, want_params, .. } = push;
        let is_it = |aggregate: &Aggregate| {
            let subject = aggregate.subject();
            (subject.table, subject.clock) == (table, clock) && aggregate.completed().contains_key(&worker)
        };
        let found = self.flights.iter().rev().find(|(_, aggregate)| is_it(aggregate)).map(|(id, _)| id);
        let Some(id) = found else { return peers.settle_again(push) };
        let is_open = self.tables[table].open(clock) == Some(id);
        let complete = self.flights.get_mut(id).and_then(|aggregate| aggregate.completed_by(worker));
        let Some(complete) = complete else { return };
        if !is_open {
            complete.again = Some(Again { request, epoch: known, want_params });
        } else if peers.uplink.routes.get(complete.route).is_none() {
            complete.route = peers.uplink.open(push, id);
        }
    }

    /// The shard refused an aggregate, of which one worker was told. All aggregates of the attempt are refused with it, and
    /// every worker with a gradient in one begins its push anew.
    pub(super) fn take_back(
        &mut self,
        id: AggregateId,
        worker: WorkerId,
        fault: &Fault,
        intakes: &mut [PushIntake],
        peers: &mut Peers<'_, '_>,
    ) {
        if matches!(fault.cause, Cause::NonFinite | Cause::NotAMember) {
            return;
        }
        let Some(refused) = self.flights.get(id).map(Aggregate::subject) else { return };
        let (table, clock) = (refused.table, refused.clock);
        let intake = &mut intakes[table];
        self.tables[table].forget_push(worker, clock, intake);
        if refused.attempt != self.tables[table].attempt(clock) {
            return;
        }
        self.tables[table].end_attempt(clock);
        let is_refused = |aggregate: &Aggregate| {
            let subject = aggregate.subject();
            (subject.table, subject.clock, subject.attempt) == (table, clock, refused.attempt)
        };
        let of_attempt = self.flights.iter().filter(|(_, aggregate)| is_refused(aggregate));
        let workers: BTreeSet<WorkerId> =
            of_attempt.flat_map(|(_, aggregate)| aggregate.contributors().iter().copied()).collect();
        // What aggregators below have sent of this clock, and still send, is refused with it.
        for (_, aggregate) in self.flights.iter().filter(|(_, aggregate)| is_refused(aggregate)) {
            for (&lower, part) in aggregate.lowers() {
                let key = (TableId(table as u32), clock);
                self.lowers.taken.note_refused(lower, key, part.attempt, fault.clone());
            }
        }
        for worker in workers {
            self.tell_taken_back(worker, refused, fault, intake, peers);
        }
        if let Some(open) = self.tables[table].open(clock) {
            self.end(open, peers);
        }
        let Aggregation { tables, flights, .. } = self;
        let table = &mut tables[table];
        for (_, aggregate) in flights.iter().filter(|(_, aggregate)| is_refused(aggregate)) {
            for (index, payload) in aggregate.payloads() {
                let chunk = table.layout().chunks()[index];
                table.undo(index, aggregate.values(&chunk), payload, aggregate.absent(index));
            }
        }
    }

    fn tell_taken_back(
        &mut self,
        worker: WorkerId,
        refused: aggregate::Subject,
        fault: &Fault,
        intake: &mut PushIntake,
        peers: &mut Peers<'_, '_>,
    ) {
        let (number, clock) = (refused.table, refused.clock);
        let of_clock = self.flights.iter().map(|(_, aggregate)| aggregate).filter(|aggregate| {
            let subject = aggregate.subject();
            (subject.table, subject.clock) == (number, clock)
        });
        let routes = of_clock.filter_map(|aggregate| aggregate.completed().get(&worker));
        let closed = routes.filter_map(|complete| peers.uplink.routes.close(complete.route));
        let mut requests: Vec<(Caller, u64)> = closed.map(|route| (route.caller(), route.request)).collect();
        let half = intake.under_way(worker).filter(|push| push.clock() == clock);
        requests.extend(half.map(|push| (peers.members.caller(worker), push.request())));
        for (caller, request) in requests {
            peers.refuse(caller, TableId(number as u32), request, fault);
        }
        self.tables[number].forget_push(worker, clock, intake);
    }

    /// These workers, and no others, push nothing before a clock.
    pub(super) fn set_idle(
        &mut self,
        idle: &[(WorkerId, Clock)],
        intakes: &mut [PushIntake],
        peers: &mut Peers<'_, '_>,
    ) {
        for (number, intake) in intakes.iter_mut().enumerate() {
            self.tables[number].set_idle(idle);
            for clock in self.tables[number].open_clocks() {
                self.seal(number, clock, intake, peers);
            }
        }
    }

    /// A worker is gone: what it has pushed stays, and nothing waits for the rest.
    pub(super) fn remove_worker(
        &mut self,
        worker: WorkerId,
        intakes: &mut [PushIntake],
        peers: &mut Peers<'_, '_>,
    ) {
        for (number, intake) in intakes.iter_mut().enumerate() {
            let under_way = intake.remove_worker(worker);
            let has_it = |aggregate: &&Aggregate| {
                aggregate.subject().table == number && aggregate.contributors().contains(&worker)
            };
            let in_sums = self.flights.iter().map(|(_, aggregate)| aggregate).filter(has_it);
            let in_sums = in_sums.map(|aggregate| aggregate.subject().clock).max();
            self.tables[number].remove_worker(worker, under_way.max(in_sums));
            for clock in self.tables[number].open_clocks() {
                self.seal(number, clock, intake, peers);
            }
        }
    }

    /// Whether counts fit what they count.
    pub(super) fn check(&self, intakes: &[PushIntake]) -> Result<(), String> {
        self.flights.check()?;
        for (number, (table, intake)) in self.tables.iter().zip(intakes).enumerate() {
            let name = table.layout().name();
            table.check(intake).map_err(|why| format!("table `{name}`: {why}"))?;
            for clock in table.open_clocks() {
                let open = table.open(clock).and_then(|id| self.flights.get(id)).map(Aggregate::subject);
                if open.is_none_or(|open| (open.table, open.clock) != (number, clock)) {
                    return Err(format!("table `{name}`: {open:?} is open for clock {clock}"));
                }
            }
        }
        let ended = self.flights.frames().filter(|flight| flight.cargo == Cargo::Completed);
        let ended: BTreeSet<AggregateId> = ended.map(|flight| flight.aggregate).collect();
        for (id, aggregate) in self.flights.iter() {
            let subject = aggregate.subject();
            let table = &self.tables[subject.table];
            aggregate.check(table.layout())?;
            // An aggregate that is not open waits for the shard to note its last frame.
            let (is_open, has_ended) = (table.open(subject.clock) == Some(id), ended.contains(&id));
            if is_open == has_ended {
                return Err(format!("{subject:?} is open: {is_open}, and has ended: {has_ended}"));
            }
        }
        self.check_unnoted()
    }

    /// No worker has more pushes unnoted than are complete in aggregates.
    fn check_unnoted(&self) -> Result<(), String> {
        for (number, table) in self.tables.iter().enumerate() {
            for (worker, unnoted) in table.all_unnoted() {
                let of_table =
                    self.flights.iter().filter(|(_, aggregate)| aggregate.subject().table == number);
                let complete =
                    of_table.filter(|(_, aggregate)| aggregate.completed().contains_key(&worker)).count();
                if unnoted > complete {
                    return Err(format!("{unnoted} pushes of {worker} are unnoted, {complete} are complete"));
                }
            }
        }
        Ok(())
    }
}

/// Whether a worker's push to a table is complete in an aggregate that has not ended.
fn is_held(table: &Table, flights: &Flights, worker: WorkerId) -> bool {
    let mut open = table.open_clocks().into_iter().filter_map(|clock| flights.get(table.open(clock)?));
    open.any(|aggregate| aggregate.completed().contains_key(&worker))
}

fn wire_subject(flight: Flight, aggregate: &Aggregate) -> Subject {
    let aggregate::Subject { table, epoch, .. } = aggregate.subject();
    Subject { epoch, table: TableId(table as u32), request: flight.number }
}

fn completed_frame(flight: Flight, aggregate: &Aggregate, peers: &Peers<'_, '_>) -> Frame {
    // A worker whose connection broke asks for its parameters itself.
    let is_there = |route: u64| peers.uplink.routes.get(route).is_some();
    let entries = aggregate.completed().iter().map(|(&worker, complete)| group::Entry {
        worker,
        want_params: complete.want_params && is_there(complete.route),
        request: complete.route,
    });
    let bytes = group::encode(entries);
    let aggregate::Subject { clock, attempt, .. } = aggregate.subject();
    let (subject, last) = (wire_subject(flight, aggregate), aggregate.last_complete());
    let completed = Completed { subject, clock, attempt, last };
    Frame { header: completed.header(bytes.len()), body: Body::Bytes(bytes) }
}

/// The sink of an aggregator's intake, for one table.
#[derive(Debug)]
pub(super) struct AggregateSink<'a, 'b> {
    pub(super) table: usize,
    pub(super) aggregation: &'a mut Aggregation,
    pub(super) peers: Peers<'a, 'b>,
    /// The frame was one that others may have waited for.
    pub(super) may_seal: bool,
}

impl AggregateSink<'_, '_> {
    fn complete_push(&self, frame: &PushFrame<'_>) -> CompletePush {
        CompletePush {
            caller: self.peers.members.caller(frame.worker),
            table: self.table,
            epoch: self.aggregation.tables[self.table].valid_from(),
            clock: frame.push.clock,
            request: frame.push.subject.request,
            want_params: frame.push.want_params,
            reply_place: frame.push.reply_place,
        }
    }
}

impl Sink for AggregateSink<'_, '_> {
    type Destination = ();
    type Kept = ();

    fn layout(&self) -> &Layout {
        self.aggregation.tables[self.table].layout()
    }

    fn admit(&mut self, frame: &PushFrame<'_>, so_far: Option<()>) -> Result<Admission<()>, Fault> {
        let table = &self.aggregation.tables[self.table];
        let (worker, clock) = (frame.worker, frame.push.clock);
        if table.is_done(worker, clock) {
            return Ok(Admission::Duplicate);
        }
        table.check_epoch(frame.push.subject.epoch)?;
        if frame.push.samples != 1 {
            let samples = frame.push.samples;
            let what = format!(
                "{worker} pushed a gradient of {samples} samples, and an aggregator's sums weigh all gradients alike; push without \
                 samples, or connect the workers to the servers"
            );
            return Err(table.fault(Cause::Policy, what));
        }
        let unnoted = table.unnoted(worker);
        if so_far.is_none() && unnoted >= limits::MAX_HELD_PUSHES {
            let what = format!("{unnoted} pushes of {worker} are held here; wait for them before pushing on");
            return Err(table.fault(Cause::TooFarAhead, what));
        }
        Ok(Admission::Take(()))
    }

    fn add(
        &mut self,
        frame: &PushFrame<'_>,
        push: &mut Push<(), ()>,
        gradient: GradientFrame<'_>,
    ) -> Result<bool, Fault> {
        let index = gradient.index();
        let id = self.aggregation.aggregate_for(self.table, push.clock(), index, &mut self.peers)?;
        let position = self.aggregation.tables[self.table].progress(push);
        if let Some(aggregate) = self.aggregation.flights.get_mut(id) {
            self.may_seal = aggregate.may_wait_for(position);
            aggregate.add(frame.now, frame.worker, gradient);
        }
        Ok(false)
    }

    fn complete(&mut self, frame: &PushFrame<'_>, push: Push<(), ()>) {
        let complete_push = self.complete_push(frame);
        // A push of rows has none of them here, where this is its first frame and its last.
        let id = match self.aggregation.open_for(self.table, push.clock()) {
            Ok(id) => id,
            // Nothing of it is here: it may be made again.
            Err(fault) => {
                let CompletePush { caller, request, .. } = complete_push;
                return self.peers.refuse(caller, TableId(self.table as u32), request, &fault);
            }
        };
        let Aggregation { tables, flights, .. } = &mut *self.aggregation;
        let table = &mut tables[self.table];
        table.complete(push.worker(), push.clock());
        if !flights.has_deadline(id) {
            flights.set_deadline(id, frame.now + table.policy().hold);
        }
        if let Some(aggregate) = flights.get_mut(id) {
            let route = self.peers.uplink.open(complete_push, id);
            let want_params = complete_push.want_params;
            let complete = Complete { route, want_params, at: frame.now, is_listed: false, again: None };
            aggregate.complete(push.worker(), complete);
        }
        self.may_seal = true;
    }

    /// The worker was not told that its push is complete. A worker that knows of an earlier epoch is not answered in this one: it
    /// would drop the beginning, and asks again.
    fn repeat(&mut self, frame: &PushFrame<'_>) {
        let mut push = self.complete_push(frame);
        let epoch = frame.push.subject.epoch;
        push.want_params &= epoch == push.epoch;
        self.aggregation.repeat_push(push, epoch, &mut self.peers);
    }
}
