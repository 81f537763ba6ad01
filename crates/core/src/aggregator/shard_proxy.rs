//! One shard, as the workers of an aggregator see it.
//!
//! Requests that are not added up are passed on one by one in the worker's name, under numbers of the aggregator.
//! Nothing of them is kept: when the connection to the shard breaks, the workers' connections are closed too, and they
//! send again what was not answered.

use super::aggregate::AggregateId;
use super::aggregation::{AggregateSink, Aggregation};
use super::lowers::Lowers;
use super::members::{Caller, Members};
use super::streams::{Streams, UpdateCodec};
use super::table::{CodecSeeds, PushIntake, SumCodec, SumPolicy, Table, Way};
use super::uplink::{Out, Peers, Uplink};
use crate::address::Addresses;
use crate::intake::{PushFrame, Taken};
use crate::limits;
use crate::link::Link;
use crate::policy::NonFinite;
use crate::role::{Body, Lost, Output};
use crate::server::aggregators::Turn;
use crate::types::{AggregatorId, Clock, ConnectionId, ProcessId, ShardId, TableId, Time, WorkerId};
use crate::waits::Delay;
use crate::wire::ack;
use crate::wire::control;
use crate::wire::frame::{
    Completed, Form, FromAggregator, FromWorker, Params, Subject, Sum, has_fitting_type,
};
use crate::wire::group::{self, Entry};
use crate::wire::{Cause, Control, DType, Fault, Header, Kind, Refusal};
use std::collections::BTreeMap;

/// One shard, as the workers of an aggregator see it through it.
#[derive(Debug)]
pub(super) struct ShardProxy {
    uplink: Uplink,
    /// The session that the shard or the aggregator above has named.
    session: Option<u64>,
    members: Members,
    /// Workers that left the job while they were connected through an aggregator below.
    left_through: BTreeMap<WorkerId, AggregatorId>,
    aggregation: Aggregation,
    /// Of the same tables.
    intakes: Vec<PushIntake>,
    streams: Streams,
    /// The type of the elements that answers of each table travel as, where a codec does not encode them.
    answer_types: Vec<Option<DType>>,
}

/// How the parameters of a table come down.
#[derive(Debug)]
pub(super) enum Answers {
    /// Each worker's answers pass through. The type of their elements, where a codec does not encode them.
    Passing(Option<DType>),
    /// Versions are broadcast.
    Broadcast(UpdateCodec),
}

/// The policies of one table, as far as they concern an aggregator.
#[derive(Debug)]
pub(super) struct ProxyPolicy {
    pub(super) sums: SumPolicy,
    pub(super) nonfinite: NonFinite,
    /// How gradients are encoded.
    pub(super) codec: SumCodec,
    /// How parameters come down.
    pub(super) answers: Answers,
    pub(super) seeds: CodecSeeds,
    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table.
    pub(super) valid_from: u32,
}

impl ShardProxy {
    /// For a shard, at this place among those of the aggregator.
    pub(super) fn new(
        place: usize,
        shard: ShardId,
        connection: ConnectionId,
        link: Link,
        tables: Vec<Table>,
        lowers: Lowers,
        log_bytes: usize,
    ) -> ShardProxy {
        let intakes = tables.iter().map(|_| PushIntake::new(None, NonFinite::default())).collect();
        let answer_types = tables.iter().map(|_| None).collect();
        ShardProxy {
            uplink: Uplink::new(shard, connection, link, tables.len()),
            session: None,
            members: Members::default(),
            left_through: BTreeMap::new(),
            aggregation: Aggregation::new(place, tables, lowers),
            intakes,
            streams: Streams::new(shard, log_bytes),
            answer_types,
        }
    }

    pub(super) fn shard(&self) -> ShardId {
        self.uplink.shard()
    }

    /// Workers that came here.
    pub(super) fn workers(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.members.iter()
    }

    /// Aggregators below that came here.
    pub(super) fn lowers(&self) -> impl Iterator<Item = AggregatorId> + '_ {
        self.aggregation.lowers.iter()
    }

    /// Whether the shard holds something of a table.
    pub(super) fn holds(&self, table: usize) -> bool {
        self.aggregation.table(table).is_some_and(|table| !table.is_empty())
    }

    pub(super) fn set_policy(&mut self, number: usize, policy: ProxyPolicy, out: &mut Out<'_>) {
        let ProxyPolicy { sums, nonfinite, codec, answers, seeds, valid_from } = policy;
        let ShardProxy { uplink, members, aggregation, intakes, streams, answer_types, .. } = self;
        let Some(known) = aggregation.table(number).map(Table::valid_from) else { return };
        let intake = &mut intakes[number];
        intake.set_nonfinite(nonfinite);
        if known != valid_from {
            aggregation.end_all(number, &mut Peers { members, uplink, out });
            intake.set_codec(Some(codec.codec.clone()), valid_from);
            match answers {
                Answers::Passing(dtype) => answer_types[number] = dtype,
                Answers::Broadcast(codec) => streams.set_codec(TableId(number as u32), codec, uplink, out),
            }
        }
        let Some(table) = aggregation.table_mut(number) else { return };
        table.set_policy(sums);
        if known != valid_from {
            table.set_codec(codec, seeds, valid_from);
        }
    }

    /// A worker says hello.
    pub(super) fn accept(
        &mut self,
        worker: WorkerId,
        pushed: Option<Clock>,
        out: &mut Out<'_>,
    ) -> Result<(), Refusal> {
        let shard = self.shard();
        if !self.uplink.link.is_up() {
            let reason = format!("{shard} is not connected to this aggregator");
            return Err(Refusal { reason, retry: true });
        }
        let caller = Caller::direct(worker);
        // A connection that this one takes the place of may have followed streams.
        self.streams.forget(self.uplink.connection_of(caller), &self.uplink, out);
        let is_known = self.members.contains(worker);
        self.members.connect(caller);
        if !is_known {
            self.members.stay_alone(worker, pushed);
        }
        Ok(())
    }

    /// An aggregator below says hello.
    pub(super) fn accept_lower(
        &mut self,
        id: AggregatorId,
        process: ProcessId,
        incarnation: u64,
        out: &mut Out<'_>,
    ) -> Result<u64, Refusal> {
        if !self.uplink.link.is_up() {
            let reason = format!("{} is not connected to this aggregator", self.shard());
            return Err(Refusal { reason, retry: true });
        }
        let session = self.aggregation.lowers.accept(id, process, incarnation)?;
        self.streams.forget(ConnectionId::LowerFor(id, self.shard()), &self.uplink, out);
        Ok(session)
    }

    /// The connection to an aggregator below is gone, and its workers' with it. It sends again what was not noted.
    pub(super) fn lose_lower(&mut self, id: AggregatorId, out: &mut Out<'_>) {
        self.aggregation.lowers.disconnect(id);
        self.streams.forget(ConnectionId::LowerFor(id, self.shard()), &self.uplink, out);
        self.members.through(id).into_iter().for_each(|worker| self.lose_worker(worker, out));
    }

    /// Whether it was connected before.
    pub(super) fn was_up(&self) -> bool {
        self.uplink.link.was_up()
    }

    pub(super) fn is_connected(&self, worker: WorkerId) -> bool {
        self.members.is_connected(worker)
    }

    /// A worker's connection is gone. It will ask again for what it still wants.
    pub(super) fn lose_worker(&mut self, worker: WorkerId, out: &mut Out<'_>) {
        let connection = self.uplink.connection_of(Caller::direct(worker));
        self.streams.forget(connection, &self.uplink, out);
        if self.members.disconnect(worker) {
            self.uplink.routes.close_all_of(worker);
            self.aggregation.held_pulls.forget(worker);
            let header = FromAggregator::Forget(worker).header(0);
            out.send(self.uplink.connection(), header, Body::Empty);
        }
    }

    /// A worker joins the job, and owes nothing before this clock.
    pub(super) fn join(&mut self, worker: WorkerId, clock: Clock, out: &mut Out<'_>) {
        self.aggregation.tables_mut().for_each(|table| table.join(worker, clock));
        // An aggregator below that heard of the join first has passed requests of the new process on already. They were given up
        // with those of the old one, from which they could not be told apart.
        if let Some(id) = self.left_through.remove(&worker) {
            self.drop_lower(id, out);
        }
    }

    /// Closes the connection to an aggregator below. It comes back, and sends everything again.
    fn drop_lower(&mut self, id: AggregatorId, out: &mut Out<'_>) {
        out.outputs.push_back(Output::Disconnect { connection: ConnectionId::LowerFor(id, self.shard()) });
        self.lose_lower(id, out);
    }

    /// These workers, and no others, push nothing before a clock: nothing is held for them.
    pub(super) fn set_idle(&mut self, idle: &[(WorkerId, Clock)], out: &mut Out<'_>) {
        let ShardProxy { uplink, members, aggregation, intakes, .. } = self;
        aggregation.set_idle(idle, intakes, &mut Peers { members, uplink, out });
    }

    /// The first clock of which nothing of an earlier process of a worker was here.
    pub(super) fn first_clock(&self, worker: WorkerId) -> Clock {
        self.aggregation.tables().map(|table| table.first_clock(worker)).max().unwrap_or(0)
    }

    /// A worker is gone for good: nothing waits for it any more.
    pub(super) fn remove_worker(&mut self, worker: WorkerId, out: &mut Out<'_>) {
        if let Some(id) = self.members.caller(worker).through.filter(|_| self.is_connected(worker)) {
            self.left_through.insert(worker, id);
        }
        self.lose_worker(worker, out);
        self.members.remove(worker);
        let ShardProxy { uplink, members, aggregation, intakes, .. } = self;
        aggregation.remove_worker(worker, intakes, &mut Peers { members, uplink, out });
    }

    /// The shard, or the aggregator above, can be reached (again). In another session everything begins anew: all connections to this
    /// aggregator were closed with the last one to the shard, and who comes back is not known.
    pub(super) fn connected(&mut self, session: u64, out: &mut Out<'_>) {
        self.uplink.link.connected();
        if self.session.replace(session).is_some_and(|before| before != session) {
            self.members = Members::default();
            self.left_through.clear();
            self.intakes.iter_mut().for_each(PushIntake::forget_all);
            self.aggregation.begin_anew();
        }
        let ShardProxy { uplink, members, aggregation, .. } = self;
        aggregation.send_all(&mut Peers { members, uplink, out });
    }

    /// The connection to the shard is gone. What was passed on may be lost with it: the workers send it again.
    pub(super) fn disconnected(&mut self, now: Time, why: &Lost, out: &mut Out<'_>) {
        self.uplink.link.disconnected(now, why);
        self.streams.disconnected();
        self.uplink.routes.clear();
        self.aggregation.held_pulls.clear();
        for worker in self.members.disconnect_all() {
            let connection = self.uplink.connection_of(Caller::direct(worker));
            self.streams.forget(connection, &self.uplink, out);
            out.outputs.push_back(Output::Disconnect { connection });
        }
        for id in self.aggregation.lowers.disconnect_all() {
            let connection = ConnectionId::LowerFor(id, self.shard());
            self.streams.forget(connection, &self.uplink, out);
            out.outputs.push_back(Output::Disconnect { connection });
        }
    }

    /// The shard is reached at these addresses from now on. Where they are others, the connection is made anew.
    pub(super) fn follow(&mut self, now: Time, addresses: Addresses, out: &mut Out<'_>) {
        if *self.uplink.link.addresses() == addresses {
            return;
        }
        let connection = self.uplink.connection();
        if self.uplink.link.is_up() {
            out.outputs.push_back(Output::Disconnect { connection });
            self.disconnected(now, &Lost::Broken("the shard is served by another process".into()), out);
        }
        self.uplink.link.move_to(now, addresses);
    }

    /// Keeps the connection, and ends aggregates that were held long enough. The sentence of a link that is overdue.
    pub(super) fn handle_timeout(&mut self, now: Time, out: &mut Out<'_>) -> Option<String> {
        out.outputs.extend(self.uplink.link.poll(now));
        let overdue = self.uplink.link.overdue(now);
        let ShardProxy { uplink, members, aggregation, streams, .. } = self;
        streams.handle_timeout(now, uplink, out);
        aggregation.handle_timeout(now, &mut Peers { members, uplink, out });
        overdue
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let deadlines = [self.aggregation.next_timeout(), self.streams.next_timeout()];
        self.uplink.link.next_timeout().into_iter().chain(deadlines.into_iter().flatten()).min()
    }

    pub(super) fn handle_worker(
        &mut self,
        now: Time,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
        out: &mut Out<'_>,
    ) {
        let known = self.aggregation.table(header.table.0 as usize).map(Table::valid_from);
        if known.is_some_and(|known| header.epoch > known) {
            // The worker knows of a change that has yet to be heard of here. It comes back, and sends everything again.
            let connection = self.uplink.connection_of(Caller::direct(worker));
            out.outputs.push_back(Output::Disconnect { connection });
            return self.lose_worker(worker, out);
        }
        if header.kind == Kind::Control {
            let (caller, may_pass) = (Caller::direct(worker), worker == WorkerId::FIRST);
            let connection = self.uplink.connection_of(caller);
            if let Err(fault) = self.handle_control(now, connection, may_pass, header, payload, out) {
                self.refuse(caller, TableId(0), 0, &fault, out);
            }
            return;
        }
        self.handle_caller(now, Caller::direct(worker), FromWorker::decode(header), header, payload, out);
    }

    /// Handles a message of a worker, or of an aggregator below: what is about streams is for this aggregator. All else goes on to the
    /// shard, where it may: what worker 0 says of pulls that the shard asked it about.
    fn handle_control(
        &mut self,
        now: Time,
        from: ConnectionId,
        may_pass: bool,
        header: &Header,
        payload: &[u8],
        out: &mut Out<'_>,
    ) -> Result<(), Fault> {
        let ShardProxy { uplink, aggregation, streams, .. } = self;
        let protocol = |message| Fault { cause: Cause::Protocol, message };
        match control::decode("control message", payload).map_err(|error| protocol(error.to_string()))? {
            message @ (Control::Subscribe { .. } | Control::Unsubscribe { .. } | Control::Seen { .. }) => {
                let layout_of = |id: TableId| aggregation.table(id.0 as usize).map(Table::layout);
                streams.handle_follower(now, from, message, layout_of, uplink, out)
            }
            _ if may_pass => {
                out.send(uplink.connection(), *header, Body::Bytes(payload.to_vec()));
                Ok(())
            }
            other => {
                let message =
                    format!("an aggregator does not take a `{}` message from a worker", other.name());
                Err(protocol(message))
            }
        }
    }

    /// Handles a frame of an aggregator below. Workers that do not take part are refused.
    pub(super) fn handle_lower(
        &mut self,
        now: Time,
        id: AggregatorId,
        header: &Header,
        payload: &[u8],
        live: &BTreeMap<WorkerId, u64>,
        out: &mut Out<'_>,
    ) {
        if !self.aggregation.lowers.is_connected(id) {
            return;
        }
        let known = self.aggregation.table(header.table.0 as usize).map(Table::valid_from);
        if known.is_some_and(|known| header.epoch > known) {
            // It knows of a change that has yet to be heard of here.
            return self.drop_lower(id, out);
        }
        if header.kind == Kind::Control {
            let connection = ConnectionId::LowerFor(id, self.shard());
            if let Err(fault) = self.handle_control(now, connection, true, header, payload, out) {
                out.log(format!("{id}: {}", fault.message));
            }
            return;
        }
        match FromAggregator::decode(header) {
            Some(FromAggregator::Relayed(worker, frame)) => {
                let caller = Caller { worker, through: Some(id) };
                if live.contains_key(&worker) {
                    self.members.connect(caller);
                    return self.handle_caller(now, caller, Some(frame), header, payload, out);
                }
                let message = format!("{worker} is no member of this job any more");
                let fault = Fault { cause: Cause::NotAMember, message };
                self.refuse(caller, header.table, header.request, &fault, out);
            }
            Some(FromAggregator::Contributors { number }) => {
                let taken = &mut self.aggregation.lowers.taken;
                match (taken.take_turn(id, number), group::decode_ranks(payload)) {
                    (Turn::Next, Ok(workers)) => taken.set_contributors(id, workers),
                    (Turn::Next, Err(error)) => out.log(format!("{id}: {error}")),
                    _ => {}
                }
            }
            Some(FromAggregator::Sum(sum)) => self.handle_sum(now, id, &sum, payload, out),
            Some(FromAggregator::Completed(list)) => self.handle_list(now, id, &list, payload, live, out),
            // A worker that was started anew may have come another way before this is heard.
            Some(FromAggregator::Forget(worker)) if self.members.caller(worker).through == Some(id) => {
                self.lose_worker(worker, out);
            }
            Some(FromAggregator::Forget(_)) => {}
            None => out.log(format!("ignored a {:?} frame from {id}", header.kind)),
        }
    }

    fn handle_sum(&mut self, now: Time, id: AggregatorId, sum: &Sum, payload: &[u8], out: &mut Out<'_>) {
        let number = sum.subject.table.0 as usize;
        let ShardProxy { uplink, members, aggregation, intakes, .. } = self;
        match aggregation.lowers.taken.take_turn(id, sum.subject.request) {
            Turn::Next if aggregation.table(number).is_some() => {}
            Turn::TooEarly { next } => {
                return out.log(format!("{id} sent a sum before frame {next} of its sums"));
            }
            _ => return,
        }
        out.report.bytes_from_workers += payload.len() as u64;
        if aggregation.lowers.taken.is_refused(id, sum) {
            return;
        }
        let peers = &mut Peers { members, uplink, out };
        match aggregation.take_sum(now, id, sum, payload, &mut intakes[number], peers) {
            Ok(true) => aggregation.lowers.taken.note_taken(id, sum),
            Ok(false) => {
                aggregation.lowers.end_session(id);
                self.drop_lower(id, out);
            }
            Err(fault) => {
                let of = (sum.subject.table, sum.clock);
                aggregation.lowers.taken.note_refused(id, of, sum.attempt, fault);
            }
        }
    }

    fn handle_list(
        &mut self,
        now: Time,
        id: AggregatorId,
        list: &Completed,
        payload: &[u8],
        live: &BTreeMap<WorkerId, u64>,
        out: &mut Out<'_>,
    ) {
        let number = list.subject.table.0 as usize;
        let ShardProxy { uplink, members, aggregation, intakes, .. } = self;
        let entries = match (group::decode(payload), aggregation.table(number)) {
            (Ok(entries), Some(_)) => entries,
            _ => return out.log(format!("{id} sent a list that cannot be read")),
        };
        let turn = aggregation.lowers.taken.take_turn(id, list.subject.request);
        if let Turn::TooEarly { next } = turn {
            return out.log(format!("{id} sent a list before frame {next} of its sums"));
        }
        for Entry { worker, want_params, .. } in
            entries.iter().filter(|entry| live.contains_key(&entry.worker))
        {
            // One that is not connected there has left its push, and nothing else. One that waits for parameters is: what is sent to
            // it may be lost with its connection, which the shard has to hear of.
            if *want_params || !members.contains(*worker) {
                members.connect(Caller { worker: *worker, through: Some(id) });
            }
        }
        let peers = &mut Peers { members, uplink, out };
        if turn == Turn::Next {
            aggregation.take_list(now, id, list, &entries, &intakes[number], peers);
        } else {
            aggregation.repeat_list(id, list, &entries, peers);
        }
    }

    /// Handles what a worker sent, itself or through an aggregator below.
    fn handle_caller(
        &mut self,
        now: Time,
        caller: Caller,
        frame: Option<FromWorker>,
        header: &Header,
        payload: &[u8],
        out: &mut Out<'_>,
    ) {
        let worker = caller.worker;
        let result = match frame {
            Some(_) if !has_fitting_type(header) => {
                let message =
                    format!("{worker} sent {:?} in a {:?} frame, which has f32", header.dtype, header.kind);
                Err(Fault { cause: Cause::Shape, message })
            }
            Some(FromWorker::Push(push)) => {
                out.report.bytes_from_workers += payload.len() as u64;
                self.handle_push(&PushFrame { now, worker, push: &push, payload }, out)
            }
            Some(FromWorker::Pull(pull)) if !pull.now && self.aggregation.holds(worker, &pull) => {
                self.aggregation.held_pulls.hold(caller, pull, payload)
            }
            Some(frame) => self.relay(caller, frame, payload, out),
            None => {
                let message = format!("an aggregator does not take {:?} frames from a worker", header.kind);
                Err(Fault { cause: Cause::Protocol, message })
            }
        };
        if let Err(fault) = result {
            self.refuse(caller, header.table, header.request, &fault, out);
        }
    }

    pub(super) fn refuse(
        &mut self,
        caller: Caller,
        table: TableId,
        request: u64,
        fault: &Fault,
        out: &mut Out<'_>,
    ) {
        let ShardProxy { uplink, members, .. } = self;
        Peers { members, uplink, out }.refuse(caller, table, request, fault);
    }

    fn handle_push(&mut self, frame: &PushFrame<'_>, out: &mut Out<'_>) -> Result<(), Fault> {
        let (number, clock) = (frame.push.subject.table.0 as usize, frame.push.clock);
        let ShardProxy { uplink, members, aggregation, intakes, .. } = self;
        let way = match aggregation.table(number) {
            Some(table) => {
                let is_alone = members.is_alone(frame.worker, clock);
                table.way(frame.worker, frame.push, is_alone, &intakes[number])?
            }
            None => Way::Past { is_new: false },
        };
        if let Way::Past { is_new } = way {
            if is_new {
                aggregation.end_with(number, frame.worker, clock, &mut Peers { members, uplink, out });
            }
            if let Some(table) = aggregation.table_mut(number).filter(|_| is_new) {
                table.begin_passing(frame.worker, clock);
            }
            let caller = self.members.caller(frame.worker);
            return self.relay(caller, FromWorker::Push(*frame.push), frame.payload, out);
        }
        let intake = &mut intakes[number];
        let peers = Peers { members, uplink, out };
        let mut sink = AggregateSink { table: number, aggregation, peers, may_seal: false };
        let taken = intake.take(frame, &mut sink)?;
        if sink.may_seal && taken != Taken::Ignored {
            sink.aggregation.seal(number, clock, intake, &mut sink.peers);
        }
        Ok(())
    }

    /// Puts a worker's request to the shard in its name.
    fn relay(
        &mut self,
        caller: Caller,
        frame: FromWorker,
        payload: &[u8],
        out: &mut Out<'_>,
    ) -> Result<(), Fault> {
        let table = self.aggregation.table(frame.subject().table.0 as usize);
        // The longest request names every element, as a row with its number.
        let longest = limits::MAX_DATA_BYTES + table.map_or(0, |table| table.layout().elements() * 8);
        self.uplink.relay(caller, frame, payload, longest, out)
    }

    /// Handles a frame from the shard.
    pub(super) fn handle_shard(&mut self, now: Time, header: &Header, payload: &[u8], out: &mut Out<'_>) {
        match header.kind {
            Kind::Update => self.streams.take_update(now, header, payload, &self.uplink, out),
            Kind::Group => {
                let ShardProxy { uplink, members, aggregation, .. } = self;
                aggregation.note(header.request, &mut Peers { members, uplink, out });
            }
            Kind::PushAck => match ack::requests(header, payload) {
                Ok(requests) => requests.for_each(|request| self.take_ack(request, out)),
                Err(error) => out.log(error.to_string()),
            },
            Kind::Params => self.take_params(header, payload, out),
            // Worker 0 evaluates conditions.
            Kind::Control if self.is_connected(WorkerId::FIRST) => {
                let to = self.uplink.connection_of(self.members.caller(WorkerId::FIRST));
                out.send(to, *header, Body::Bytes(payload.to_vec()));
            }
            // It is not connected. The shard may have heard of it by a sum that it left here, and need not wait for it.
            Kind::Control => match control::decode("control message", payload) {
                Ok(Control::Question { table, question }) => {
                    let verdict = Control::Verdict { table, number: question.number, holds: None };
                    let frame = control::frame(Kind::Control, &verdict);
                    out.send(self.uplink.connection(), frame.header, frame.body);
                }
                Ok(other) => out.log(format!("ignored a `{}` message from {}", other.name(), self.shard())),
                Err(error) => out.log(error.to_string()),
            },
            Kind::Error => match control::decode::<Fault>("error", payload) {
                Ok(fault) => self.take_fault(header.request, fault, out),
                Err(error) => out.log(error.to_string()),
            },
            other => out.log(format!("ignored a {other:?} frame from {}", self.shard())),
        }
    }

    /// The shard has a request that was passed on.
    fn take_ack(&mut self, number: u64, out: &mut Out<'_>) {
        let Some(route) = self.uplink.routes.acknowledge(number) else { return };
        if let Some(table) = self.aggregation.table_mut(route.table).filter(|_| route.is_push) {
            table.end_passing(&route, true);
        }
        let ShardProxy { uplink, members, .. } = self;
        Peers { members, uplink, out }.acknowledge(route.caller(), route.request);
    }

    /// The shard refuses a request: the worker that made it is told why.
    fn take_fault(&mut self, number: u64, mut fault: Fault, out: &mut Out<'_>) {
        fault.message = control::sentence(fault.message);
        let Some(route) = self.uplink.routes.close(number) else { return };
        let ShardProxy { uplink, members, aggregation, intakes, .. } = self;
        let mut peers = Peers { members, uplink, out };
        peers.refuse(route.caller(), TableId(route.table as u32), route.request, &fault);
        if let Some(id) = route.aggregate {
            // After the acknowledgement it is about the answer alone: the shard has the push.
            if route.awaits_ack {
                aggregation.take_back(id, route.worker, &fault, intakes, &mut peers);
            }
        } else if let Some(table) = aggregation.table_mut(route.table).filter(|_| route.is_push) {
            // A push that is stale comes again, and goes the way that it went.
            if fault.cause != Cause::StaleEpoch {
                table.end_passing(&route, false);
            }
        }
    }

    /// Passes one frame of an answer to the worker that it is for.
    fn take_params(&mut self, header: &Header, payload: &[u8], out: &mut Out<'_>) {
        let params = Params::decode(header);
        let (number, place) = (params.subject.request, params.subject.table.0 as usize);
        let Some(table) = self.aggregation.table(place).filter(|table| !table.is_empty()) else {
            return out.log(format!("{} sent parameters that it does not hold", self.shard()));
        };
        out.report.bytes_from_servers += payload.len() as u64;
        let routes = &mut self.uplink.routes;
        let Some(route) = routes.get(number).copied().filter(|route| route.awaits_params) else { return };
        let is_stale = [table.valid_from(), route.epoch].iter().any(|epoch| *epoch != params.subject.epoch);
        if params.piece.is_last || is_stale {
            routes.answered(number);
        }
        if is_stale {
            // It was made by codecs that hold no more, or the worker asked again in this epoch, by another route: two answers to one
            // request would mix.
            return;
        }
        let reply_place = match params.form {
            // A worker's memory is for the elements that answers have.
            Form::Dense(dtype) if self.answer_types[place] == Some(dtype) => {
                let chunk = table.layout().chunks().get(params.piece.sequence as usize);
                let first = chunk.map_or(0, |chunk| chunk.table_start) * dtype.bytes() as u64;
                route.reply_place.and_then(|place| place.after(first))
            }
            _ => None,
        };
        let subject = Subject { request: route.request, ..params.subject };
        let delay = match params.piece.is_last {
            true => Delay::after(route.hold, params.delay),
            false => None,
        };
        let header = Params { subject, reply_place, delay, ..params }.header(payload.len());
        out.report.bytes_to_workers += payload.len() as u64;
        let body = if payload.is_empty() { Body::Empty } else { Body::Bytes(payload.to_vec()) };
        out.send(self.uplink.connection_of(route.caller()), header, body);
    }

    /// The bytes of an aggregate, until the shard has noted it.
    pub(super) fn aggregate_bytes(&self, id: AggregateId) -> Option<&[u8]> {
        self.aggregation.bytes(id)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.aggregation.memory_bytes() + self.streams.memory_bytes()
    }

    /// Whether counts fit what they count.
    pub(super) fn check(&self) -> Result<(), String> {
        self.uplink.routes.check()?;
        self.aggregation.check(&self.intakes)
    }
}
