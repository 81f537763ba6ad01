//! What a worker's peers say to it, and what it says to them again after a broken connection.

use super::encoding::{self, TableCodecs};
use super::request::{Request, What};
use super::{Ticket, Worker, WorkerError};
use crate::address::Addresses;
use crate::consistency::SyncPolicy;
use crate::limits;
use crate::link::Link;
use crate::role::{Landing, Lost, Output, Role};
use crate::status::Status;
use crate::table::glob_matches;
use crate::types::{Clock, NodeId, ShardId, TableId, Time, WorkerId};
use crate::wire::ack;
use crate::wire::control::{self, frame};
use crate::wire::{Cause, Control, Fault, Flags, Header, Hello, Kind, Party, Plan, Refusal, Welcome};
use std::sync::Arc;

impl Worker {
    fn handle_shard_frame(&mut self, now: Time, from: ShardId, header: &Header, payload: &[u8]) {
        match header.kind {
            Kind::PushAck => match ack::requests(header, payload) {
                Ok(requests) => requests.for_each(|request| self.take_acknowledgement(from, request)),
                Err(error) => self.outputs.push_back(Output::Log(error.to_string())),
            },
            Kind::Params => self.take_params(now, from, header, Some(payload)),
            Kind::Error => match control::decode::<Fault>("error", payload) {
                Ok(fault) => self.take_fault(from, header, fault),
                Err(error) => self.outputs.push_back(Output::Log(error.to_string())),
            },
            other => self.outputs.push_back(Output::Log(format!("ignored a {other:?} frame from {from}"))),
        }
    }

    /// The request that a server speaks of, if it was asked of this server.
    fn request_to(&mut self, shard: ShardId, id: u64) -> Option<&mut Request> {
        self.requests.get_mut(id).filter(|request| request.shard == shard)
    }

    fn take_acknowledgement(&mut self, from: ShardId, id: u64) {
        let Some(request) = self.request_to(from, id) else { return };
        let ticket = request.ticket;
        let Some(done) = self.note_taken(id) else { return };
        if let Some(pending) = self.tickets.get_mut(&ticket) {
            pending.acks = pending.acks.saturating_sub(1);
        }
        if done {
            self.requests.remove(id);
        } else if self.requests.get(id).is_some_and(|request| request.held) {
            // The scheduler may have let its pull go already.
            self.send_request(id);
        }
        self.report_pushed();
        self.say_leave();
    }

    /// The server has what a request brought, or will never take it: its memory is free. Says whether nothing else is
    /// to come for the request; `None` when this was known.
    fn note_taken(&mut self, id: u64) -> Option<bool> {
        let request = self.requests.get_mut(id)?;
        let (table, clock) = (request.table, request.clock);
        let acknowledged = request.acknowledge()?;
        if acknowledged.is_push
            && let Some(count) = self.unacknowledged.get_mut(&clock)
        {
            *count -= 1;
            if *count == 0 {
                self.unacknowledged.remove(&clock);
            }
        }
        // A gradient's memory is used again once every server has it. One that answers before it has everything leaves
        // frames behind that still need the memory.
        if let Some(buffer) = acknowledged.buffer.and_then(Arc::into_inner) {
            self.tables[table].keep_buffer(buffer);
        }
        Some(acknowledged.done)
    }

    /// Takes a frame of an answer. Without a payload it is in its place already.
    fn take_params(&mut self, now: Time, from: ShardId, header: &Header, payload: Option<&[u8]>) {
        let (clock, id) = (self.clock, header.request);
        let Some(request) = self.requests.get_mut(id) else { return };
        if request.shard != from || !request.wants_params() {
            return;
        }
        self.report.bytes_pulled += u64::from(header.payload_bytes);
        let ticket = request.ticket;
        let local = &mut self.tables[request.table];
        // PSP-SGD, worker line 10: a block older than the iteration at hand is dropped. Rows are never blocks.
        // An exchange waits for all of them.
        let partial = local.partial.is_some() && !local.spec.rows && !local.lent;
        let is_late = partial && header.version < clock && request.is_conditional();
        let taken = match self.tickets.get_mut(&ticket) {
            Some(pending) => request.take_params(local, header, payload, is_late, &mut pending.rows),
            None => request.take_params(local, header, payload, is_late, &mut []),
        };
        if taken.is_ok() && !header.flags.has(Flags::LAST) {
            return;
        }
        let table = request.table;
        if taken.is_ok() {
            local.note_answer(ticket);
            // Who answers a push with what follows from it has it.
            self.take_acknowledgement(from, id);
        } else {
            self.share_landing(table);
        }
        if self.requests.get_mut(id).is_some_and(Request::answered) {
            self.requests.remove(id);
        }
        let Some(pending) = self.tickets.get_mut(&ticket) else { return };
        match taken {
            Err(error) => {
                pending.error.get_or_insert(error);
            }
            Ok(()) => {
                pending.answers = pending.answers.saturating_sub(1);
                if pending.partial && pending.clock >= self.gate.clock() {
                    self.gate.arrived(now, pending.clock);
                }
            }
        }
    }

    fn take_fault(&mut self, from: ShardId, header: &Header, mut fault: Fault) {
        fault.message = control::sentence(fault.message);
        if matches!(fault.cause, Cause::NotAMember | Cause::JobOver) {
            return self.fail(WorkerError::NotAMember(fault.message));
        }
        if self.request_to(from, header.request).is_none() {
            return self.outputs.push_back(Output::Log(fault.message));
        }
        let encoded = self.requests.get(header.request).and_then(Request::encoded);
        let was_taken = self.note_taken(header.request).is_none();
        if let Some(table) = self.requests.get(header.request).map(|request| request.table) {
            // Nothing more comes of this answer. Once its request is gone, nobody knows how much of it came.
            self.share_landing(table);
        }
        let Some(request) = self.requests.remove(header.request) else { return };
        // It may be on its way once more already.
        let is_it = |other: &Request| other.is_same_push(&request) && other.must_be_sent();
        let is_sent_again = encoded.is_some() && self.requests.values().any(is_it);
        let local = &mut self.tables[request.table];
        // What a codec made is finite: a sum was refused that it is in, of which other chunks were taken.
        let goes_back = !is_sent_again && fault.cause != Cause::NonFinite;
        if let Some(encoded) = encoded.filter(|_| goes_back) {
            local.note_refused(request.clock, from, encoded);
        }
        if !was_taken && local.pushed == Some(request.clock) {
            // It can be pushed again, corrected or later; servers that have it take it once.
            local.pushed = None;
        }
        let error = WorkerError::Refused { cause: fault.cause, message: fault.message };
        if let Some(pending) = self.tickets.get_mut(&request.ticket) {
            pending.error.get_or_insert(error);
        }
        self.report_pushed();
        self.say_leave();
    }

    fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(now, *plan),
            Control::Go { clock } => self.let_go(clock),
            Control::BarrierReached { name } => {
                let reached = self.barriers.remove(&name);
                self.settle_answer(reached.map(|(_, ticket)| ticket));
            }
            Control::Status(status) => {
                for ticket in std::mem::take(&mut self.status_tickets) {
                    if let Some(pending) = self.tickets.get_mut(&ticket) {
                        pending.status = Some(Status::clone(&status));
                    }
                    self.settle_answer(Some(ticket));
                }
            }
            // How many blocks to wait for is a matter of all servers together.
            Control::SetSync { table, server: None, sync } => self.set_sync(&table, &sync),
            Control::SetSync { .. } | Control::SetOptimizer { .. } => {}
            Control::Left => {
                let ticket = self.leaving.take();
                self.settle_answer(ticket);
            }
            Control::Members { .. } => {}
            Control::Stop { error } => {
                let why = error.map_or_else(|| "the job is over".into(), control::sentence);
                self.fail(WorkerError::NotAMember(why));
            }
            other => {
                let line = format!("ignored a `{}` message from the coordinator", other.name());
                self.outputs.push_back(Output::Log(line));
            }
        }
    }

    fn settle_answer(&mut self, ticket: Option<Ticket>) {
        if let Some(pending) = ticket.and_then(|ticket| self.tickets.get_mut(&ticket)) {
            pending.answers = pending.answers.saturating_sub(1);
        }
    }

    /// The plan is here: cut the tables, connect to the shards, exchange initial values.
    fn take_plan(&mut self, now: Time, plan: Plan) {
        let (Some(ticket), None, None) = (self.start, &self.plan, &self.failed) else { return };
        let same = plan.tables.iter().eq(self.tables.iter().map(|table| &table.spec));
        let checked = if same { plan.check() } else { Err("it is about other tables".into()) };
        if let Err(why) = checked {
            let sentence = format!("the coordinator's plan does not fit this worker: {why}");
            return self.fail(WorkerError::Table(sentence));
        }
        if let Some((host, memory)) = &self.shared
            && self.peers(&plan).any(|of| of.iter().any(|address| address.starts_with(host)))
        {
            self.memory = Arc::clone(memory);
        }
        let chunks =
            crate::table::chunks(&plan.tables, &plan.parts, &plan.cores(), plan.chunk_elements as usize);
        for (number, (table, chunks)) in self.tables.iter_mut().zip(chunks).enumerate() {
            let server = chunks[0].shard.server;
            let policy = plan.policy_of(TableId(number as u32), server);
            match SyncPolicy::parse(&self.registry.consistency, &policy.sync) {
                Ok(sync) => {
                    self.overlap &= sync.overlap;
                    table.plan(chunks, policy.nonfinite, sync.partial_pull(), &*self.memory);
                    let identity = encoding::identity(plan.seed, self.id, number);
                    match TableCodecs::new(&self.registry, &table.spec, &policy, identity) {
                        Ok(codecs) => table.codecs = codecs,
                        Err(why) => return self.fail(WorkerError::Table(format!("this worker: {why}"))),
                    }
                }
                Err(error) => return self.fail(WorkerError::Table(error.to_string())),
            }
        }
        let rank = self.id.map_or(0, |id| id.0 as usize);
        for (shard, addresses) in &plan.shards {
            let peer = NodeId::Shard(*shard);
            let link = match &self.config.aggregator {
                Some(aggregator) => Link::through_aggregator(now, peer, aggregator.for_caller(rank)),
                None => Link::new(now, peer, addresses.for_caller(rank + shard.core as usize)),
            };
            self.links.insert(*shard, link);
        }
        self.plan = Some(plan);
        self.gate.set_blocks(&self.tables);
        let is_first = self.id == Some(WorkerId::FIRST);
        let (mut acks, mut answers) = (0, 0);
        for index in 0..self.tables.len() {
            let initial = self.tables[index].take_initial(&*self.memory);
            let shards: Vec<ShardId> = self.tables[index].shards().collect();
            if is_first {
                acks += shards.len();
                let initial = Arc::new(initial);
                for &shard in &shards {
                    self.request(Request::new(
                        shard,
                        index,
                        0,
                        ticket,
                        What::Init { buffer: Some(initial.clone()) },
                    ));
                }
            }
            answers += shards.len();
            for &shard in &shards {
                // Of a sparse table no rows: it answers all the same once it has its initial values.
                let rows = self.tables[index].spec.rows.then(Vec::new);
                let what = What::Pull { rows, now: false };
                self.request(Request::new(shard, index, 0, ticket, what));
            }
        }
        // Nobody may wait for it any more.
        if let Some(pending) = self.tickets.get_mut(&ticket) {
            pending.acks = acks;
            pending.answers = answers;
        }
        self.handle_timeout(now);
    }

    /// Where those are that this worker connects to, beside the coordinator.
    fn peers<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = &'a Addresses> {
        let shards = plan.shards.iter().map(|(_, addresses)| addresses);
        let own = shards.filter(|_| self.config.aggregator.is_none());
        self.config.aggregator.iter().chain(own)
    }

    /// Without overlap: the scheduler lets pulls after this clock go.
    fn let_go(&mut self, clock: Clock) {
        self.gone = self.gone.max(Some(clock));
        // A push that is under way is not sent a second time; its pull follows the acknowledgement.
        let is_ready = |request: &Request| request.held && !request.must_be_sent();
        self.requests.numbers(is_ready).into_iter().for_each(|id| self.send_request(id));
    }

    /// Without overlap: tells the coordinator of clocks whose pushes all servers have acknowledged.
    pub(super) fn report_pushed(&mut self) {
        while let Some(&clock) = self.unreported.front()
            && self.unacknowledged.keys().next().is_none_or(|&oldest| oldest > clock)
        {
            self.unreported.pop_front();
            self.tell_coordinator(&Control::Pushed { clock });
        }
    }

    fn set_sync(&mut self, glob: &str, sync: &str) {
        let Ok(policy) = SyncPolicy::parse(&self.registry.consistency, sync) else { return };
        (0..self.tables.len()).for_each(|index| self.share_landing(index));
        let matched = self.tables.iter_mut().filter(|table| glob_matches(glob, &table.spec.name));
        for table in matched {
            table.partial = policy.partial_pull();
            if table.lent && table.partial.is_some() {
                // It was lent after the coordinator had agreed to the switch.
                let name = &table.spec.name;
                let line = format!(
                    "table `{name}` now uses {policy}; as long as it is lent as a slab, its exchanges wait for all blocks"
                );
                self.outputs.push_back(Output::Log(line));
            }
        }
        self.gate.set_blocks(&self.tables);
    }

    pub(super) fn send_declaration(&mut self) {
        let tables = self.tables.iter().map(|table| table.spec.clone()).collect();
        self.tell_coordinator(&Control::Declare { tables });
    }

    pub(super) fn tell_coordinator(&mut self, message: &Control) {
        self.outputs
            .push_back(Output::Send { to: NodeId::Coordinator, frame: frame(Kind::Control, message) });
    }

    fn fail(&mut self, error: WorkerError) {
        self.failed.get_or_insert(error);
    }

    /// After a (new) connection to the coordinator: says again what it may have missed.
    fn resume_with_coordinator(&mut self, now: Time) {
        self.next_report = now;
        if self.start.is_some() && self.plan.is_none() {
            self.send_declaration();
        }
        let mut barriers: Vec<_> = self.barriers.iter().map(|(name, (number, _))| (*number, name)).collect();
        barriers.sort_unstable();
        let messages: Vec<Control> = barriers
            .into_iter()
            .map(|(number, name)| Control::Barrier { name: name.clone(), number })
            .collect();
        messages.iter().for_each(|message| self.tell_coordinator(message));
        if !self.status_tickets.is_empty() {
            self.tell_coordinator(&Control::StatusQuery);
        }
        if let Some(clock) = self.clock.checked_sub(1)
            && !self.overlap
            && self.gone < Some(clock)
            && self.unreported.is_empty()
        {
            self.tell_coordinator(&Control::Pushed { clock });
        }
        self.say_leave();
    }

    /// Leaves once every server has what was pushed: one that hears of the leave first would refuse the rest.
    pub(super) fn say_leave(&mut self) {
        let is_due = self.leaving.is_some() && self.coordinator.is_up();
        if is_due && !self.requests.values().any(Request::must_be_sent) {
            self.tell_coordinator(&Control::Leave);
        }
    }
}

impl Role for Worker {
    fn node(&self) -> Option<NodeId> {
        self.id.map(NodeId::Worker)
    }

    fn accept(&mut self, _now: Time, _hello: &Hello) -> Result<Welcome, Refusal> {
        Err(Refusal { reason: "a worker takes no connections".into(), retry: false })
    }

    fn hello(&self, peer: NodeId) -> Hello {
        let through = match (peer, self.id, &self.config.aggregator) {
            (NodeId::Shard(shard), Some(rank), Some(_)) => {
                let again = self.links.get(&shard).is_some_and(Link::was_up);
                Some(Party::Through { rank, shard, again })
            }
            _ => None,
        };
        Hello {
            job: self.config.job.clone(),
            from: through.unwrap_or(Party::Worker { rank: self.id }),
            incarnation: self.incarnation,
        }
    }

    fn handle_connected(&mut self, now: Time, peer: NodeId, welcome: &Welcome) {
        match peer {
            NodeId::Coordinator => {
                self.coordinator.connected();
                if let NodeId::Worker(id) = welcome.you {
                    self.id = Some(id);
                    self.incarnation = welcome.incarnation;
                }
                self.resume_with_coordinator(now);
            }
            NodeId::Shard(shard) => {
                if let Some(link) = self.links.get_mut(&shard) {
                    link.connected();
                }
                let tickets = &self.tickets;
                let is_mine = |request: &Request| request.shard == shard;
                // What nobody waits for and no server misses is not asked for again (blocks that PSP went on without).
                let is_wanted =
                    |request: &Request| request.must_be_sent() || tickets.contains_key(&request.ticket);
                let unwanted = self.requests.numbers(|request| is_mine(request) && !is_wanted(request));
                unwanted.into_iter().for_each(|id| drop(self.requests.remove(id)));
                let mine = self.requests.numbers(is_mine);
                mine.into_iter().for_each(|id| self.send_request(id));
            }
            NodeId::Worker(_) | NodeId::Admin(_) | NodeId::Aggregator(_) | NodeId::Through(..) => {}
        }
    }

    fn handle_disconnected(&mut self, now: Time, peer: NodeId, why: &Lost) {
        if why.is_final() {
            return self.fail(WorkerError::NotAMember(format!("{peer} {why}")));
        }
        match peer {
            NodeId::Coordinator => self.coordinator.disconnected(now, why),
            NodeId::Shard(shard) => {
                if let Some(link) = self.links.get_mut(&shard) {
                    link.disconnected(now, why);
                }
            }
            NodeId::Worker(_) | NodeId::Admin(_) | NodeId::Aggregator(_) | NodeId::Through(..) => {}
        }
    }

    fn handle_frame(&mut self, now: Time, from: NodeId, header: &Header, payload: &[u8]) {
        match (from, header.kind) {
            (NodeId::Shard(shard), _) => self.handle_shard_frame(now, shard, header, payload),
            (NodeId::Coordinator, Kind::Control) => match control::decode("control message", payload) {
                Ok(message) => self.handle_control(now, message),
                Err(error) => self.fail(WorkerError::NotAMember(format!("the coordinator: {error}"))),
            },
            (NodeId::Coordinator, Kind::Error) => match control::decode::<Fault>("error", payload) {
                Ok(Fault { cause, message }) => {
                    self.fail(WorkerError::Refused { cause, message: control::sentence(message) });
                }
                Err(error) => self.outputs.push_back(Output::Log(error.to_string())),
            },
            (from, kind) => {
                self.outputs.push_back(Output::Log(format!("ignored a {kind:?} frame from {from}")))
            }
        }
    }

    fn landing(
        &mut self,
        from: NodeId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<&mut [u8]> {
        let NodeId::Shard(shard) = from else { return None };
        let request = self.requests.get(header.request).filter(|request| request.shard == shard)?;
        let local = &mut self.tables[request.table];
        // What an application may read is changed by whole frames only.
        let is_plain = header.kind == Kind::Params && !header.flags.has(Flags::ENCODED);
        if !is_plain || !local.lent || local.has_base() || !request.wants_params() {
            return None;
        }
        places.extend(request.places(local, header.part as usize, frames));
        places.first().filter(|place| {
            place.chunk == header.chunk && place.bytes.len() == header.payload_bytes as usize
        })?;
        Some(Arc::get_mut(&mut local.values)?.as_mut_bytes())
    }

    fn handle_landed(&mut self, now: Time, from: NodeId, header: &Header) {
        if let NodeId::Shard(shard) = from {
            self.take_params(now, shard, header, None);
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.failed.is_some() {
            return;
        }
        self.gate.handle_timeout(now);
        self.outputs.extend(self.coordinator.poll(now));
        let mut overdue = self.coordinator.overdue(now);
        for link in self.links.values_mut() {
            self.outputs.extend(link.poll(now));
            overdue = overdue.or_else(|| link.overdue(now));
        }
        if let Some(sentence) = overdue {
            self.fail(WorkerError::Unreachable(sentence));
        }
        if self.coordinator.is_up() && self.next_report <= now {
            self.next_report = now + limits::HEARTBEAT_EVERY;
            let oldest = self.tickets.iter().find(|(_, pending)| pending.acks + pending.answers > 0);
            self.report.waiting = oldest.map(|(ticket, _)| self.explain(now, *ticket));
            let report = self.report.clone();
            self.tell_coordinator(&Control::WorkerReport(report));
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.failed.is_some() {
            return None;
        }
        let links = self.links.values().filter_map(Link::next_timeout).min();
        let report = self.coordinator.is_up().then_some(self.next_report);
        [self.coordinator.next_timeout(), links, report, self.gate.next_timeout()].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn backlog_bytes(&self) -> usize {
        self.outputs.bytes()
    }
}
