//! One data core of a server as a state machine: it takes pushes, steps the optimizer, answers pulls.
//!
//! A shard shares nothing with its siblings. It talks to the coordinator (plan, members, reports) and to the workers.
//! A push of (worker, table, clock) is applied once, however often it is sent: frames of a push are numbered, and
//! what was taken is remembered until the push is complete and counted.

mod acks;
mod answers;
mod group;
mod instructions;
mod part;
mod pulls;
mod rounds;

use crate::address::Addresses;
use crate::intake::{PushFrame, Taken};
use crate::limits;
use crate::link::Link;
use crate::registry::Registry;
use crate::role::{Body, Lost, Outbox, Output, Role};
use crate::status::ShardReport;
use crate::store::Place;
use crate::types::{Clock, NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use crate::wire::ack;
use crate::wire::control::{self, frame};
use crate::wire::frame::FromWorker;
use crate::wire::{Cause, Control, DType, Fault, Flags, Header, Hello, Kind, Party, Plan, Refusal, Welcome};
use acks::Acks;
use answers::Asked;
use group::Groups;
use part::TablePart;
use pulls::{PendingPull, Pulls};
use rounds::Accumulators;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What a shard needs to know to begin.
#[derive(Debug, Clone)]
pub struct ShardConfig {
    /// The job's name.
    pub job: String,
    /// Tells servers apart until the coordinator numbers them.
    pub process: u64,
    /// The server's number, when it was given one.
    pub server: Option<ServerId>,
    /// This core's number on its server.
    pub core: u32,
    /// How many data cores the server has.
    pub cores: u32,
    /// Where workers reach this core: each of these leads to it.
    pub addresses: Addresses,
    /// Where the coordinator is.
    pub coordinator: String,
}

/// How far a worker is with pushes that rounds wait for.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    clock: Clock,
    /// Of this clock.
    bytes: u64,
}

impl Progress {
    /// What a table may have at most is far below this.
    const BYTES_OF_A_CLOCK: u64 = 1 << 40;
}

/// One data core of a server.
#[derive(Debug)]
pub struct Shard {
    config: ShardConfig,
    registry: Arc<Registry>,
    id: Option<ShardId>,
    coordinator: Link,
    plan: Option<Plan>,
    tables: Vec<TablePart>,
    /// Incarnations by rank, which is dense; `None` for those that are no members, or no longer.
    members: Vec<Option<u64>>,
    accumulators: Accumulators,
    pulls: Pulls,
    /// Acknowledgements that leave when everything else has.
    acks: Acks,
    groups: Groups,
    /// How far workers are with pushes that rounds wait for, by rank.
    progress: Vec<Progress>,
    /// Tables whose controller has a timeout, by time.
    timers: BTreeSet<(Time, usize)>,
    /// The timeout of each table, as it stands in `timers`.
    timer_of: Vec<Option<Time>>,
    next_report: Time,
    stopped: bool,
    outputs: Outbox,
    bytes_pushed: u64,
    bytes_pulled: u64,
    refused: u64,
}

impl Shard {
    /// A shard that is about to join.
    pub fn new(now: Time, config: ShardConfig, registry: Arc<Registry>) -> Shard {
        Shard {
            coordinator: Link::new(now, NodeId::Coordinator, config.coordinator.clone()),
            id: config.server.map(|server| ShardId { server, core: config.core }),
            config,
            registry,
            plan: None,
            tables: Vec::new(),
            members: Vec::new(),
            accumulators: Accumulators::default(),
            pulls: Pulls::default(),
            acks: Acks::default(),
            groups: Groups::default(),
            progress: Vec::new(),
            timers: BTreeSet::new(),
            timer_of: Vec::new(),
            next_report: now,
            stopped: false,
            outputs: Outbox::default(),
            bytes_pushed: 0,
            bytes_pulled: 0,
            refused: 0,
        }
    }

    /// Who this is, once the coordinator said so.
    pub fn id(&self) -> Option<ShardId> {
        self.id
    }

    /// How this shard stands.
    pub fn report(&self, now: Time) -> Option<ShardReport> {
        Some(ShardReport {
            shard: self.id?,
            tables: self
                .tables
                .iter()
                .filter(|table| table.elements() > 0)
                .map(|table| table.report(now))
                .collect(),
            bytes_pushed: self.bytes_pushed,
            bytes_pulled: self.bytes_pulled,
            nonfinite: self.tables.iter().map(|table| table.nonfinite()).sum(),
            refused: self.refused,
            memory_bytes: self.memory_bytes() as u64,
        })
    }

    /// Bytes held for parameters, accumulators and optimizer state.
    pub fn memory_bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(TablePart::memory_bytes).sum();
        tables + self.accumulators.memory_bytes()
    }

    /// Calls `visit` with the first element and the values of every chunk of a table that this shard holds.
    pub fn for_each_chunk(&self, table: TableId, visit: impl FnMut(u64, &[f32])) {
        if let Some(part) = self.tables.get(table.0 as usize) {
            part.for_each_chunk(visit);
        }
    }

    fn handle_worker_frame(&mut self, now: Time, worker: WorkerId, header: &Header, payload: &[u8]) {
        let result = self.check_data_frame(worker, header).and_then(|table| match header.kind {
            Kind::Init => self.handle_init(now, table, worker, header, payload),
            Kind::Push => self.handle_push(now, table, worker, header, payload),
            Kind::Pull => self.handle_pull(now, table, worker, header, payload),
            other => {
                let message = format!("a server does not take {other:?} frames from a worker");
                Err(Fault { cause: Cause::Protocol, message })
            }
        });
        if let Err(fault) = result {
            self.refuse(worker, header.table, header.request, &fault);
        }
    }

    fn refuse(&mut self, worker: WorkerId, table: TableId, request: u64, fault: &Fault) {
        self.refuse_to(self.groups.address(worker), table, request, fault);
    }

    fn refuse_to(&mut self, to: NodeId, table: TableId, request: u64, fault: &Fault) {
        self.refused += 1;
        let mut frame = frame(Kind::Error, fault);
        frame.header.table = table;
        frame.header.request = request;
        self.outputs.push_back(Output::Send { to, frame });
    }

    /// Which life of a worker is a member of the job, if one is.
    fn incarnation(&self, worker: WorkerId) -> Option<u64> {
        *self.members.get(worker.0 as usize)?
    }

    /// What every data frame must fulfil: known sender, current plan, known table, our element type.
    fn check_data_frame(&self, worker: WorkerId, header: &Header) -> Result<usize, Fault> {
        let fault = |cause, message| Err(Fault { cause, message });
        let Some(plan) = &self.plan else {
            return fault(Cause::StaleEpoch, "this server has no plan yet".into());
        };
        if self.incarnation(worker).is_none() {
            return fault(Cause::NotAMember, format!("{worker} is no member of this job any more"));
        }
        if header.epoch != plan.epoch {
            let message =
                format!("the frame is of placement epoch {}, the job is in {}", header.epoch, plan.epoch);
            return fault(Cause::StaleEpoch, message);
        }
        let table = header.table.0 as usize;
        if table >= self.tables.len() {
            let message = format!("table {table} does not exist; the job has {}", self.tables.len());
            return fault(Cause::Shape, message);
        }
        let name = &self.tables[table].spec().name;
        if self.tables[table].elements() == 0 {
            return fault(Cause::Shape, format!("nothing of table `{name}` is on this server"));
        }
        if header.dtype != DType::F32 {
            let message = format!("table `{name}` holds f32; {worker} sent {:?}", header.dtype);
            return fault(Cause::Shape, message);
        }
        Ok(table)
    }

    fn handle_init(
        &mut self,
        now: Time,
        table: usize,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Fault> {
        if worker != WorkerId::FIRST {
            let message = format!("initial values come from {}, not from {worker}", WorkerId::FIRST);
            return Err(Fault { cause: Cause::Protocol, message });
        }
        let was_initialised = self.tables[table].is_initialised();
        if self.tables[table].initialise(header, payload)? && header.flags.has(Flags::LAST) {
            self.acknowledge(worker, header);
            if !was_initialised {
                self.answer_first_pulls(now, table);
            }
        }
        Ok(())
    }

    fn handle_push(
        &mut self,
        now: Time,
        table: usize,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Fault> {
        self.bytes_pushed += payload.len() as u64;
        self.note_progress(table, worker, header);
        let Some(FromWorker::Push(push)) = FromWorker::decode(header) else { return Ok(()) };
        let frame = PushFrame { now, worker, push, payload };
        match self.tables[table].push(&frame, &mut self.accumulators)? {
            Taken::Ignored | Taken::Partly => return Ok(()),
            Taken::Stepped => {
                self.answer_ahead(table, header);
                return Ok(());
            }
            Taken::Whole => self.settle(now, table),
        }
        if !header.flags.has(Flags::WANT_PARAMS) {
            self.acknowledge(worker, header);
            return Ok(());
        }
        let clock = header.clock.saturating_add(1);
        let (request, landing) = (header.request, Place::from_bits(header.landing));
        // To a worker an answer is an acknowledgement too. Where answers are sent ahead, one of its own would stand between
        // chunks that are received in place.
        let is_direct = self.groups.is_direct(worker);
        let can_wait = is_direct && self.tables[table].controller.policy().model.waits_for_all();
        let pull = PendingPull { worker, table, request, clock, landing, rows: None, owes_ack: can_wait };
        let asked = self.ask(now, pull);
        match &asked {
            Ok(Asked::Answered) if is_direct => {}
            Ok(Asked::Waits) if can_wait => {}
            Ok(_) => self.acknowledge(worker, header),
            Err(_) => {
                // Ahead of the refusal of the pull, which would otherwise be taken for one of the push.
                let to = self.groups.address(worker);
                self.outputs.push_back(Output::Send { to, frame: ack::frame(&[header.request]) });
            }
        }
        asked.map(drop)
    }

    fn note_progress(&mut self, table: usize, worker: WorkerId, header: &Header) {
        if !self.tables[table].controller.policy().model.waits_for_all() {
            return;
        }
        let rank = worker.0 as usize;
        if self.progress.len() <= rank {
            self.progress.resize(rank + 1, Progress::default());
        }
        let progress = &mut self.progress[rank];
        if progress.clock < header.clock {
            *progress = Progress { clock: header.clock, bytes: 0 };
        }
        progress.bytes += u64::from(header.payload_bytes);
    }

    fn handle_pull(
        &mut self,
        now: Time,
        table: usize,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let rows = match header.flags.has(Flags::ROWS) {
            true => Some(self.tables[table].check_rows(payload)?),
            false => None,
        };
        let (request, clock, landing) = (header.request, header.clock, Place::from_bits(header.landing));
        let pull = PendingPull { worker, table, request, clock, landing, rows, owes_ack: false };
        if header.flags.has(Flags::NOW) && self.tables[table].is_initialised() {
            self.answer(&pull);
            return Ok(());
        }
        self.ask(now, pull).map(drop)
    }

    fn acknowledge(&mut self, worker: WorkerId, header: &Header) {
        match self.groups.address(worker) {
            NodeId::Worker(worker) => self.acks.add(worker, header.request),
            to => self.outputs.push_back(Output::Send { to, frame: ack::frame(&[header.request]) }),
        }
    }

    /// Something is wrong here: the coordinator is told, so that the job ends with the reason.
    fn fail(&mut self, error: String) {
        if self.coordinator.is_up() {
            self.tell_coordinator(&Control::Stop { error: Some(error.clone()) });
        }
        self.stop(Some(error));
    }

    fn stop(&mut self, error: Option<String>) {
        if !std::mem::replace(&mut self.stopped, true) {
            self.outputs.push_back(Output::Stop { error });
        }
    }

    fn send_report(&mut self, now: Time) {
        self.next_report = now + limits::HEARTBEAT_EVERY;
        let Some(mut report) = self.report(now) else { return };
        let mut message = frame(Kind::Control, &Control::ShardReport(Box::new(report.clone())));
        if !control::fits(&message) {
            report.tables.clear();
            message = frame(Kind::Control, &Control::ShardReport(Box::new(report)));
        }
        self.outputs.push_back(Output::Send { to: NodeId::Coordinator, frame: message });
    }

    fn tell_coordinator(&mut self, message: &Control) {
        let frame = frame(Kind::Control, message);
        self.outputs.push_back(Output::Send { to: NodeId::Coordinator, frame });
    }
}

impl Role for Shard {
    fn node(&self) -> Option<NodeId> {
        self.id.map(NodeId::Shard)
    }

    fn accept(&mut self, _now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        let refuse = |reason: String, retry| Err(Refusal { reason, retry });
        if hello.job != self.config.job {
            return refuse(
                format!("this server serves job `{}`, not `{}`", self.config.job, hello.job),
                false,
            );
        }
        let worker = match hello.from {
            Party::Worker { rank: Some(worker) } => worker,
            Party::Aggregator { process, id } => return self.accept_aggregator(hello, process, id),
            _ => {
                return refuse("a server's data address takes workers only; use the job's URL".into(), false);
            }
        };
        if self.plan.is_none() {
            return refuse("this server has no plan yet".into(), true);
        }
        match self.incarnation(worker) {
            Some(incarnation) if incarnation == hello.incarnation => {
                self.groups.leave(worker);
                Ok(Welcome { you: NodeId::Worker(worker), incarnation })
            }
            _ => refuse(format!("{worker} was declared dead or has left; the job goes on without it"), false),
        }
    }

    fn hello(&self, _peer: NodeId) -> Hello {
        let ShardConfig { job, process, core, cores, .. } = &self.config;
        let server = self.id.map(|id| id.server);
        let from = Party::Shard { process: *process, server, core: *core, cores: *cores };
        Hello { job: job.clone(), from, incarnation: *process }
    }

    fn handle_connected(&mut self, _now: Time, peer: NodeId, welcome: &Welcome) {
        if peer != NodeId::Coordinator {
            return;
        }
        self.coordinator.connected();
        if let NodeId::Shard(id) = welcome.you {
            self.id = Some(id);
        }
        self.tell_coordinator(&Control::Register { addresses: self.config.addresses.clone() });
    }

    fn handle_disconnected(&mut self, now: Time, peer: NodeId, why: &Lost) {
        match peer {
            NodeId::Coordinator if why.is_final() => self.fail(why.to_string()),
            NodeId::Coordinator => self.coordinator.disconnected(now, why),
            NodeId::Worker(worker) => self.cancel_pulls(worker),
            NodeId::Aggregator(id) => self.lose_aggregator(id),
            NodeId::Shard(_) | NodeId::Admin(_) | NodeId::Through(..) => {}
        }
    }

    fn handle_frame(&mut self, now: Time, from: NodeId, header: &Header, payload: &[u8]) {
        match (from, header.kind) {
            (NodeId::Worker(worker), _) => self.handle_worker_frame(now, worker, header, payload),
            (NodeId::Aggregator(id), _) => self.handle_aggregator_frame(now, id, header, payload),
            (NodeId::Coordinator, Kind::Control) => match control::decode("control message", payload) {
                Ok(message) => self.handle_control(now, message),
                Err(error) => self.outputs.push_back(Output::Log(error.to_string())),
            },
            (from, kind) => {
                self.outputs.push_back(Output::Log(format!("ignored a {kind:?} frame from {from}")))
            }
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.stopped {
            return;
        }
        self.outputs.extend(self.coordinator.poll(now));
        if let Some(sentence) = self.coordinator.overdue(now) {
            self.fail(sentence);
        }
        while let Some(&(at, table)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            self.timer_of[table] = None;
            self.settle(now, table);
        }
        if self.coordinator.is_up() && self.next_report <= now {
            self.send_report(now);
            // Somebody keeps the others waiting.
            self.pulls.take_owed_acks(|worker, request| self.acks.add(worker, request));
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.stopped {
            return None;
        }
        let report = self.coordinator.is_up().then_some(self.next_report);
        let timer = self.timers.first().map(|(at, _)| *at);
        [self.coordinator.next_timeout(), report, timer].into_iter().flatten().min()
    }

    fn progress(&self, peer: NodeId) -> Option<u64> {
        let NodeId::Worker(worker) = peer else { return None };
        let Progress { clock, bytes } = *self.progress.get(worker.0 as usize)?;
        Some(clock.saturating_mul(Progress::BYTES_OF_A_CLOCK).saturating_add(bytes))
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front().or_else(|| self.acks.pop())
    }

    fn backlog_bytes(&self) -> usize {
        self.outputs.bytes() + self.acks.bytes()
    }

    fn refresh(&self, header: &mut Header) {
        // Rows were gathered, and a codec did its work, when the answer was made; chunks are read from the store when they
        // leave.
        let is_chunk = header.kind == Kind::Params && !header.flags.has(Flags::ROWS);
        if is_chunk && !self.tables[header.table.0 as usize].fixes_answers() {
            header.version = self.tables[header.table.0 as usize].version_of(header.part as usize);
        }
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        match body {
            Body::Stored { buffer, start, len } => {
                &self.tables[*buffer as usize].parameter_bytes()[*start..*start + *len]
            }
            elsewhere => elsewhere.bytes().expect("all else has its bytes with it"),
        }
    }
}
