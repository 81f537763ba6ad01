//! One data core of a server as a state machine: it takes pushes, steps the optimizer, answers pulls.
//!
//! A shard shares nothing with its siblings. It talks to the coordinator (plan, members, reports) and to the workers.
//! A push of (worker, table, clock) is applied once, however often it is sent: frames of a push are numbered, and
//! what was taken is remembered until the push is complete and counted.

mod acks;
mod group;
mod part;
mod pulls;
mod rounds;

use crate::address::Addresses;
use crate::consistency::{PullOutcome, Released, SyncPolicy};
use crate::limits;
use crate::link::Link;
use crate::optimizer::OptimizerPolicy;
use crate::prng::Prng;
use crate::registry::Registry;
use crate::role::{Body, Frame, Lost, Outbox, Output, Role};
use crate::status::ShardReport;
use crate::store::Place;
use crate::table::{self, glob_matches};
use crate::types::{Clock, NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use crate::wire::ack;
use crate::wire::control::{self, frame};
use crate::wire::{Cause, Control, DType, Fault, Flags, Header, Hello, Kind, Party, Plan, Refusal, Welcome};
use acks::Acks;
use group::Groups;
use part::{TablePart, Taken};
use pulls::{Backlog, PendingPull, Pulls};
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

/// What became of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Answered,
    Waits,
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
            nonfinite: self.tables.iter().map(|table| table.nonfinite).sum(),
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
        let name = &self.tables[table].spec.name;
        if self.tables[table].elements() == 0 {
            return fault(Cause::Shape, format!("nothing of table `{name}` is on this server"));
        }
        if header.dtype != DType::F32 && header.kind != Kind::Push {
            let message = format!(
                "table `{name}` holds f32, and only gradients may be shorter; {worker} sent {:?}",
                header.dtype
            );
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
        match self.tables[table].push(now, worker, header, payload, &mut self.accumulators)? {
            Taken::Partly => return Ok(()),
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
        let asked = self.ask(now, PendingPull { worker, table, request, clock, landing, rows: None });
        // To a worker an answer is an acknowledgement too.
        if asked != Ok(Asked::Answered) || !self.groups.is_direct(worker) {
            self.acknowledge(worker, header);
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
        let pull = PendingPull { worker, table, request, clock, landing, rows };
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

    /// Puts a pull to the table's controller, which answers it now or later.
    fn ask(&mut self, now: Time, pull: PendingPull) -> Result<Asked, Fault> {
        if let Err(Backlog { pulls, rows }) = self.pulls.admits(&pull) {
            let (worker, name) = (pull.worker, &self.tables[pull.table].spec.name);
            let message = format!(
                "{worker} has {pulls} pulls of {rows} rows of table `{name}` waiting here; wait for them first"
            );
            return Err(Fault { cause: Cause::TooFarAhead, message });
        }
        let part = &mut self.tables[pull.table];
        if !part.is_initialised() {
            // Pulls that come before the initial values wait for them; they are not delayed by a condition.
            self.pulls.keep_early(pull);
            return Ok(Asked::Waits);
        }
        match part.controller.pull(now, pull.worker, pull.clock, self.pulls.next_token()) {
            PullOutcome::Answer { .. } => {
                self.answer(&pull);
                Ok(Asked::Answered)
            }
            PullOutcome::Wait => {
                self.pulls.file(pull);
                Ok(Asked::Waits)
            }
        }
    }

    /// A worker's connection is gone: it asks again for what it still wants.
    fn cancel_pulls(&mut self, worker: WorkerId) {
        self.pulls.forget(worker);
        self.acks.forget(worker);
        for table in &mut self.tables {
            table.controller.cancel(worker);
            table.forget_answers(worker);
        }
    }

    /// The initial values are here: pulls that came before them are asked again.
    fn answer_first_pulls(&mut self, now: Time, table: usize) {
        for pull in self.pulls.take_early(table) {
            let (worker, request) = (pull.worker, pull.request);
            if let Err(fault) = self.ask(now, pull) {
                self.refuse(worker, TableId(table as u32), request, &fault);
            }
        }
    }

    /// Advances the table as far as its pushes allow, and answers what that releases.
    fn settle(&mut self, now: Time, table: usize) {
        loop {
            while let Some(Released { token, .. }) = self.tables[table].controller.poll_released() {
                if let Some(pull) = self.pulls.take(token) {
                    self.answer(&pull);
                }
            }
            if self.tables[table].advance(now, &mut self.accumulators).is_none() {
                break;
            }
        }
        let at = self.tables[table].controller.next_timeout();
        if at != self.timer_of[table] {
            let before = std::mem::replace(&mut self.timer_of[table], at);
            before.map(|before| self.timers.remove(&(before, table)));
            at.map(|at| self.timers.insert((at, table)));
        }
    }

    /// The chunk of this push's frame has its values of the next version: those who wait for it get it now.
    fn answer_ahead(&mut self, table: usize, pushed: &Header) {
        let Shard { tables, outputs, groups, bytes_pulled, .. } = self;
        let part = &mut tables[table];
        let mut ahead = std::mem::take(&mut part.ahead);
        let mut header = Header::new(Kind::Params);
        header.table = pushed.table;
        header.clock = pushed.clock.saturating_add(1);
        header.epoch = pushed.epoch;
        header.part = pushed.part;
        ahead.send_next(pushed.clock, pushed.part as usize, |answer| {
            // An aggregator gets one answer for many.
            let is_direct = groups.is_direct(answer.worker);
            if is_direct {
                header.request = answer.request;
                let place = (table, pushed.part as usize);
                let frame = part.answer_frame(place, answer.worker, header, answer.landing);
                *bytes_pulled += u64::from(frame.header.payload_bytes);
                outputs.push_back(Output::Send { to: NodeId::Worker(answer.worker), frame });
            }
            is_direct
        });
        part.ahead = ahead;
    }

    /// Sends a table's parameters, or the rows that were asked for; without the chunks that were sent ahead.
    fn answer(&mut self, pull: &PendingPull) {
        let edition = if pull.rows.is_none() { self.edition(pull) } else { None };
        let sent = self.tables[pull.table].ahead.take(pull.worker, pull.request);
        let part = &mut self.tables[pull.table];
        let mut header = Header::new(Kind::Params);
        header.table = TableId(pull.table as u32);
        header.clock = pull.clock;
        header.version = part.controller.state().v_train();
        header.request = pull.request;
        header.epoch = self.plan.as_ref().map_or(0, |plan| plan.epoch);
        let to = self.groups.address(pull.worker);
        let mut send = |mut frame: Frame, last: bool| {
            let flags = frame.header.flags;
            frame.header.flags = if last { flags.with(Flags::LAST) } else { flags };
            self.bytes_pulled += u64::from(frame.header.payload_bytes);
            self.outputs.push_back(Output::Send { to, frame });
        };
        match &pull.rows {
            None if edition.is_some_and(|edition| edition.is_same) => {
                header.flags = Flags::SAME;
                header.rows = edition.map_or(0, |edition| edition.number);
                send(Frame { header, body: Body::Empty }, true);
            }
            None => {
                header.rows = edition.map_or(0, |edition| edition.number);
                let count = part.chunks().len();
                let is_direct = matches!(to, NodeId::Worker(_));
                for index in sent..count {
                    header.part = index as u32;
                    // An aggregator fans answers out, and needs them as they are.
                    let frame = match is_direct {
                        true => part.answer_frame((pull.table, index), pull.worker, header, pull.landing),
                        false => part.chunk(index).frame(header, pull.table, pull.landing),
                    };
                    send(frame, index + 1 == count);
                }
            }
            Some(rows) => {
                header.flags = Flags::ROWS;
                let rows_per_part = (limits::CHUNK_ELEMENTS / part.row_width()).max(1);
                let count = rows.len().div_ceil(rows_per_part).max(1);
                for index in 0..count {
                    let begin = index * rows_per_part;
                    let some = &rows[begin..rows.len().min(begin + rows_per_part)];
                    header.part = index as u32;
                    header.rows = some.len() as u32;
                    let (bytes, encoded) = part.answer_rows(some);
                    header.flags = if encoded { Flags::ROWS.with(Flags::ENCODED) } else { Flags::ROWS };
                    header.payload_bytes = bytes.len() as u32;
                    send(Frame { header, body: Body::Bytes(bytes) }, index + 1 == count);
                }
            }
        }
    }

    fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(*plan),
            Control::Members { workers, .. } => self.take_members(now, &workers),
            Control::SetSync { table, server, sync } => self.set_sync(now, &table, server, &sync),
            Control::SetOptimizer { table, server, optimizer } => {
                self.set_optimizer(&table, server, &optimizer);
            }
            Control::ReportRequest => self.send_report(now),
            Control::Stop { error } => self.stop(error.map(control::sentence)),
            other => {
                let line = format!("ignored a `{}` message from the coordinator", other.name());
                self.outputs.push_back(Output::Log(line));
            }
        }
    }

    fn take_plan(&mut self, plan: Plan) {
        let Some(id) = self.id else { return };
        if self.plan.is_some() {
            // Sent again after a broken connection; the first one stands.
            return self.tell_coordinator(&Control::Ready);
        }
        if let Err(why) = plan.check() {
            let error =
                format!("the coordinator's plan cannot be used: {why}; use the same release everywhere");
            return self.fail(error);
        }
        let chunks = table::chunks(&plan.tables, &plan.parts, &plan.cores(), plan.chunk_elements as usize);
        let workers = || plan.workers.iter().map(|(worker, _)| *worker);
        self.members.clear();
        for &(worker, incarnation) in &plan.workers {
            self.members.resize(worker.0 as usize, None);
            self.members.push(Some(incarnation));
        }
        self.tables.clear();
        self.timer_of = vec![None; plan.tables.len()];
        for (number, (spec, chunks)) in plan.tables.iter().zip(&chunks).enumerate() {
            let own =
                (0u32..).zip(chunks).filter(|(_, chunk)| chunk.shard == id).map(|(n, chunk)| (n, *chunk));
            let policy = plan.policy_of(TableId(number as u32), id.server);
            let label = u64::from(id.server.0) << 40 | u64::from(id.core) << 32 | number as u64;
            let seed = Prng::fork(plan.seed, label).next_u64();
            match TablePart::new(&self.registry, spec.clone(), policy, own, workers(), seed) {
                Ok(part) => self.tables.push(part),
                Err(error) => {
                    let error = format!("table `{}`: {error}", spec.name);
                    return self.fail(error);
                }
            }
        }
        self.plan = Some(plan);
        self.tell_coordinator(&Control::Ready);
    }

    fn take_members(&mut self, now: Time, alive: &[WorkerId]) {
        let alive: BTreeSet<WorkerId> = alive.iter().copied().collect();
        let members = (0..).map(WorkerId).zip(&self.members).filter(|(_, member)| member.is_some());
        let gone: Vec<WorkerId> =
            members.map(|(worker, _)| worker).filter(|worker| !alive.contains(worker)).collect();
        for worker in &gone {
            self.members[worker.0 as usize] = None;
            self.groups.leave(*worker);
            self.pulls.forget(*worker);
            for table in &mut self.tables {
                table.remove_worker(now, *worker);
            }
        }
        if !gone.is_empty() {
            (0..self.tables.len()).for_each(|table| self.settle(now, table));
        }
        let is_waiting = |part: &&TablePart| part.elements() > 0 && !part.is_initialised();
        if gone.contains(&WorkerId::FIRST)
            && let Some(part) = self.tables.iter().find(is_waiting)
        {
            let table = &part.spec.name;
            let error = Some(format!(
                "worker 0 was gone before the initial values of table `{table}` were here; start the job anew"
            ));
            self.tell_coordinator(&Control::Stop { error });
        }
    }

    fn set_sync(&mut self, now: Time, glob: &str, server: Option<ServerId>, sync: &str) {
        if server.is_some_and(|server| Some(server) != self.id.map(|id| id.server)) {
            return;
        }
        self.groups.forget_sent();
        for table in 0..self.tables.len() {
            if !glob_matches(glob, &self.tables[table].spec.name) {
                continue;
            }
            match SyncPolicy::parse(&self.registry.consistency, sync) {
                // It may be told again after a broken connection; that is no switch.
                Ok(policy) if policy.to_string() == self.tables[table].controller.policy().to_string() => {}
                Ok(policy) => {
                    self.tables[table].set_sync(now, policy, &mut self.accumulators);
                    self.settle(now, table);
                }
                Err(error) => {
                    return self.outputs.push_back(Output::Log(control::sentence(error.to_string())));
                }
            }
        }
        self.send_report(now);
    }

    fn set_optimizer(&mut self, glob: &str, server: Option<ServerId>, text: &str) {
        if server.is_some_and(|server| Some(server) != self.id.map(|id| id.server)) {
            return;
        }
        for part in self.tables.iter_mut().filter(|part| glob_matches(glob, &part.spec.name)) {
            let outcome = OptimizerPolicy::parse(&self.registry.optimizer, text);
            if !outcome.is_ok_and(|optimizer| part.set_optimizer(optimizer)) {
                let line =
                    format!("ignored an optimizer that table `{}` cannot take over to", part.spec.name);
                self.outputs.push_back(Output::Log(line));
            }
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
            _ => refuse(format!("{worker} was declared dead or has left; start it anew"), false),
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
