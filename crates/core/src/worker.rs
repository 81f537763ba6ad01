//! A worker as a state machine: it declares tables, pushes gradients, pulls parameters, keeps its clock.
//!
//! Methods come in four families. Getters ([`Worker::values`], [`Worker::outcome`]) look. Mutators
//! ([`Worker::declare`], [`Worker::start`], [`Worker::push`], [`Worker::pull`], [`Worker::clock`]) are what the
//! application asks for; each returns a [`Ticket`] to wait on. `handle_*` and `poll_*` are the driver's ([`Role`]).
//!
//! A request stays until its server answered it, and is sent again when a broken connection is made anew; the
//! servers apply it once.

mod error;
mod gate;
mod local_table;
mod request;

pub use error::WorkerError;

use crate::consistency::SyncPolicy;
use crate::limits;
use crate::link::Link;
use crate::registry::Registry;
use crate::role::{Body, Lost, Output, Role};
use crate::status::{Status, WorkerReport};
use crate::store::Buffer;
use crate::table::{NonFinite, TableSpec, glob_matches};
use crate::types::{Clock, NodeId, ShardId, TableId, Time, WorkerId};
use crate::wire::control::{self, frame};
use crate::wire::{Cause, Control, Fault, Flags, Header, Hello, Kind, Party, Plan, Refusal, Welcome};
use gate::PullGate;
use local_table::LocalTable;
use request::{Request, What};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Rows that one pull frame asks for at most.
const ROWS_PER_PULL: usize = limits::MAX_DATA_BYTES / 8;

/// What a worker needs to know to begin.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The job's name.
    pub job: String,
    /// Its rank, when it was given one.
    pub rank: Option<WorkerId>,
    /// Where the coordinator is.
    pub coordinator: String,
}

/// Something the application can wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// A gradient as the application gives it.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// Of the whole table.
    Dense(&'a [f32]),
    /// Of single rows of a sparse table, strictly ascending; `values` has them one after the other.
    Rows {
        /// Row numbers.
        rows: &'a [u32],
        /// Their gradients.
        values: &'a [f32],
    },
}

/// What a pull asks for.
#[derive(Debug, Clone, Copy, Default)]
pub struct PullOptions<'a> {
    /// Only these rows of a sparse table. All of a dense one otherwise.
    pub rows: Option<&'a [u32]>,
    /// Answer at once with what is there, whatever the consistency model.
    pub now: bool,
}

/// What is still to come for a ticket.
#[derive(Debug)]
struct Pending {
    what: String,
    since: Time,
    clock: Clock,
    acks: usize,
    answers: usize,
    /// The answers may be incomplete once the pull gate is open (PSP).
    partial: bool,
    error: Option<WorkerError>,
    rows: Vec<f32>,
}

/// One worker of a job.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    registry: Arc<Registry>,
    id: Option<WorkerId>,
    incarnation: u64,
    coordinator: Link,
    links: BTreeMap<ShardId, Link>,
    tables: Vec<LocalTable>,
    plan: Option<Plan>,
    start: Option<Ticket>,
    clock: Clock,
    gate: PullGate,
    overlap: bool,
    /// Without overlap: clocks whose pushes the coordinator has not been told of, and the last one it let go.
    unreported: VecDeque<Clock>,
    gone: Option<Clock>,
    unacknowledged: BTreeMap<Clock, usize>,
    requests: BTreeMap<u64, Request>,
    buffers: BTreeMap<u64, (Buffer, usize)>,
    tickets: BTreeMap<Ticket, Pending>,
    barriers: BTreeMap<String, Ticket>,
    status_tickets: Vec<Ticket>,
    status: Option<Status>,
    leaving: Option<Ticket>,
    failed: Option<WorkerError>,
    next_id: u64,
    next_report: Time,
    report: WorkerReport,
    nonfinite: u64,
    outputs: VecDeque<Output>,
}

impl Worker {
    /// A worker that is about to join.
    pub fn new(now: Time, config: WorkerConfig, registry: Arc<Registry>) -> Worker {
        Worker {
            coordinator: Link::new(now, NodeId::Coordinator, config.coordinator.clone()),
            id: config.rank,
            config,
            registry,
            incarnation: 0,
            links: BTreeMap::new(),
            tables: Vec::new(),
            plan: None,
            start: None,
            clock: 0,
            gate: PullGate::default(),
            overlap: true,
            unreported: VecDeque::new(),
            gone: None,
            unacknowledged: BTreeMap::new(),
            requests: BTreeMap::new(),
            buffers: BTreeMap::new(),
            tickets: BTreeMap::new(),
            barriers: BTreeMap::new(),
            status_tickets: Vec::new(),
            status: None,
            leaving: None,
            failed: None,
            next_id: 1,
            next_report: now,
            report: WorkerReport::default(),
            nonfinite: 0,
            outputs: VecDeque::new(),
        }
    }

    /// Its rank, once it is known.
    pub fn id(&self) -> Option<WorkerId> {
        self.id
    }

    /// How many workers the job has, once it started.
    pub fn workers(&self) -> Option<usize> {
        self.plan.as_ref().map(|plan| plan.workers.len())
    }

    /// Iterations completed.
    pub fn current_clock(&self) -> Clock {
        self.clock
    }

    /// Bytes moved so far.
    pub fn report(&self) -> &WorkerReport {
        &self.report
    }

    /// Gradients refused here for NaN or Inf.
    pub fn nonfinite(&self) -> u64 {
        self.nonfinite
    }

    /// The table's parameters as last pulled; empty for a sparse table.
    pub fn values(&self, table: TableId) -> &[f32] {
        self.tables.get(table.0 as usize).map_or(&[], |table| table.values.as_slice())
    }

    /// Bytes held for parameters and gradients under way.
    pub fn memory_bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(LocalTable::memory_bytes).sum();
        tables + self.buffers.values().map(|(buffer, _)| buffer.memory_bytes()).sum::<usize>()
    }

    /// The status that [`Worker::query_status`] asked for.
    pub fn take_status(&mut self) -> Option<Status> {
        self.status.take()
    }

    /// Declares a table with its initial values. All workers declare the same tables in the same order.
    pub fn declare(&mut self, spec: TableSpec, initial: Vec<f32>) -> Result<TableId, WorkerError> {
        if self.start.is_some() {
            return Err(WorkerError::Order("tables are created before `start`".into()));
        }
        spec.check().map_err(WorkerError::Table)?;
        if self.tables.iter().any(|table| table.spec.name == spec.name) {
            return Err(WorkerError::Table(format!("table `{}` is created twice", spec.name)));
        }
        if initial.len() as u64 != spec.elements() {
            return Err(WorkerError::Shape {
                table: spec.name.clone(),
                expected: format!("{} initial values for shape {:?}", spec.elements(), spec.shape),
                found: initial.len().to_string(),
            });
        }
        self.tables.push(LocalTable::new(spec, initial));
        Ok(TableId(self.tables.len() as u32 - 1))
    }

    /// Joins: the ticket is due when the plan and the initial values are here.
    pub fn start(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.check_alive()?;
        if self.start.is_some() {
            return Err(WorkerError::Order("`start` is called once".into()));
        }
        if self.tables.is_empty() {
            return Err(WorkerError::Order("create a table before `start`".into()));
        }
        // One answer is outstanding until the plan is here and says what else is.
        let ticket = self.ticket(now, "the job to start", 0, 1);
        self.start = Some(ticket);
        if self.coordinator.is_up() {
            self.send_declaration();
        }
        Ok(ticket)
    }

    /// Pushes a gradient for the current clock; with `want_params` also asks for the parameters that follow it.
    pub fn push(
        &mut self,
        now: Time,
        table: TableId,
        gradient: Gradient<'_>,
        want_params: bool,
    ) -> Result<Ticket, WorkerError> {
        self.check_started()?;
        let index = self.table_index(table)?;
        let clock = self.clock;
        let local = &mut self.tables[index];
        local.check_gradient(&gradient, clock)?;
        if want_params && local.spec.rows {
            return Err(WorkerError::Order(format!(
                "table `{}` is sparse: push, then pull the rows that come next",
                local.spec.name
            )));
        }
        let values = match gradient {
            Gradient::Dense(values) | Gradient::Rows { values, .. } => values,
        };
        if !crate::kernels::all_finite(values) {
            self.nonfinite += 1;
            if local.nonfinite == NonFinite::Reject {
                return Err(WorkerError::NonFinite { table: local.spec.name.clone(), clock });
            }
        }
        local.pushed = Some(clock);
        let mut buffer = local.take_buffer(values.len());
        buffer.as_mut_slice().copy_from_slice(values);
        let rows = match gradient {
            Gradient::Dense(_) => None,
            Gradient::Rows { rows, .. } => Some(Arc::new(rows.to_vec())),
        };
        let partial = local.partial.is_some();
        let shards = local.shards();
        let id = self.next_id();
        self.buffers.insert(id, (buffer, shards.len()));
        let what = format!("the push of table `{}` at clock {clock}", local_name(&self.tables, index));
        let ticket = self.ticket(now, what, shards.len(), if want_params { shards.len() } else { 0 });
        let pending = self.tickets.get_mut(&ticket).expect("made above");
        pending.partial = partial;
        pending.clock = clock + 1;
        *self.unacknowledged.entry(clock).or_default() += shards.len();
        for shard in shards {
            let what = What::Push { buffer: id, rows: rows.clone(), want_params, acknowledged: false };
            self.request(Request::new(shard, index, clock, ticket, what));
        }
        Ok(ticket)
    }

    /// Asks for a table's parameters, or for some of its rows.
    pub fn pull(
        &mut self,
        now: Time,
        table: TableId,
        options: PullOptions<'_>,
    ) -> Result<Ticket, WorkerError> {
        self.check_started()?;
        let index = self.table_index(table)?;
        let local = &self.tables[index];
        if local.spec.rows != options.rows.is_some() && !options.now {
            let sentence =
                if local.spec.rows { "is sparse: name the rows to pull" } else { "is dense: pull it whole" };
            return Err(WorkerError::Order(format!("table `{}` {sentence}", local.spec.name)));
        }
        let clock = if local.pushed == Some(self.clock) { self.clock + 1 } else { self.clock };
        let per_shard = match options.rows {
            Some(rows) => local.rows_by_shard(rows)?,
            None if local.spec.rows => local.all_rows_by_shard(),
            None => local.shards().into_iter().map(|shard| (shard, Vec::new())).collect(),
        };
        let elements: usize = per_shard.iter().map(|(_, rows)| rows.len()).sum::<usize>() * local.row_width();
        let partial = local.partial.is_some() && !options.now && options.rows.is_none();
        let (what, sparse) =
            (format!("the pull of table `{}` after clock {clock}", local.spec.name), local.spec.rows);
        let requests: Vec<_> = match sparse {
            true => per_shard
                .iter()
                .flat_map(|(shard, rows)| {
                    rows.chunks(ROWS_PER_PULL).map(|rows| (*shard, Some(rows.to_vec())))
                })
                .collect(),
            false => per_shard.iter().map(|(shard, _)| (*shard, None)).collect(),
        };
        let ticket = self.ticket(now, what, 0, requests.len());
        let pending = self.tickets.get_mut(&ticket).expect("made above");
        pending.rows = vec![0.0; elements];
        pending.clock = clock;
        pending.partial = partial;
        for (shard, rows) in requests {
            let what = What::Pull { rows, now: options.now, rows_received: 0 };
            self.request(Request::new(shard, index, clock, ticket, what));
        }
        Ok(ticket)
    }

    /// Ends the iteration.
    pub fn clock(&mut self) {
        if !self.overlap {
            self.unreported.push_back(self.clock);
        }
        self.clock += 1;
        self.report.clock = self.clock;
        self.gate.turn(self.clock);
        self.report_pushed();
    }

    /// Waits for all live workers to reach the same name.
    pub fn barrier(&mut self, now: Time, name: &str) -> Result<Ticket, WorkerError> {
        self.check_started()?;
        let ticket = self.ticket(now, format!("barrier `{name}`"), 0, 1);
        self.barriers.insert(name.to_owned(), ticket);
        self.tell_coordinator(&Control::Barrier { name: name.to_owned() });
        Ok(ticket)
    }

    /// Asks the coordinator how the job stands.
    pub fn query_status(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.check_alive()?;
        let ticket = self.ticket(now, "the job's status", 0, 1);
        self.status_tickets.push(ticket);
        self.tell_coordinator(&Control::StatusQuery);
        Ok(ticket)
    }

    /// Leaves the job; the others go on without this worker.
    pub fn leave(&mut self, now: Time) -> Ticket {
        let ticket = self.ticket(now, "the coordinator to note that this worker leaves", 0, 1);
        self.leaving = Some(ticket);
        self.tell_coordinator(&Control::Leave);
        ticket
    }

    /// Whether a ticket is due, and how it ended. `None`: wait on.
    pub fn outcome(&self, ticket: Ticket) -> Option<Result<(), WorkerError>> {
        let Some(pending) = self.tickets.get(&ticket) else {
            return Some(Err(WorkerError::Order("this handle was waited for already".into())));
        };
        if let Some(error) = pending.error.as_ref().or(self.failed.as_ref()) {
            return Some(Err(error.clone()));
        }
        // PSP-SGD: a push is not waited for either, as long as the gradients under way do not pile up.
        let may_go_on = pending.partial
            && self.gate.is_open(pending.clock)
            && self.unacknowledged.len() <= limits::MAX_CLOCKS_UNACKNOWLEDGED;
        (may_go_on || pending.acks + pending.answers == 0).then_some(Ok(()))
    }

    /// Forgets a ticket that is due (or no longer wanted) and returns the rows that it brought.
    pub fn redeem(&mut self, ticket: Ticket) -> Vec<f32> {
        self.tickets.remove(&ticket).map(|pending| pending.rows).unwrap_or_default()
    }

    /// What a ticket waits for: which servers, which table, since when.
    pub fn explain(&self, now: Time, ticket: Ticket) -> String {
        let Some(pending) = self.tickets.get(&ticket) else { return "nothing".into() };
        let seconds = now.since(pending.since).as_secs_f64();
        let mut sentence = format!("{} (for {seconds:.1} s)", pending.what);
        if !self.coordinator.is_up() {
            sentence += &format!("; the coordinator at {} is not connected", self.coordinator.address());
        }
        let silent: Vec<String> = self
            .requests
            .values()
            .filter(|request| request.ticket == ticket)
            .map(|request| match self.links[&request.shard].is_up() {
                true => format!("{} has not answered", request.shard),
                false => {
                    format!("{} at {} is not connected", request.shard, self.links[&request.shard].address())
                }
            })
            .take(4)
            .collect();
        if !silent.is_empty() {
            sentence += &format!("; {}", silent.join(", "));
        }
        sentence
    }

    fn ticket(&mut self, now: Time, what: impl Into<String>, acks: usize, answers: usize) -> Ticket {
        let ticket = Ticket(self.next_id());
        let pending = Pending {
            what: what.into(),
            since: now,
            clock: 0,
            acks,
            answers,
            partial: false,
            error: None,
            rows: Vec::new(),
        };
        self.tickets.insert(ticket, pending);
        ticket
    }

    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Files a request and sends it if its server is connected.
    fn request(&mut self, request: Request) {
        let id = self.next_id();
        let shard = request.shard;
        self.requests.insert(id, request);
        if self.links[&shard].is_up() {
            self.send_request(id);
        }
    }

    fn send_request(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let epoch = self.plan.as_ref().map_or(0, |plan| plan.epoch);
        let context = request::Context {
            id,
            epoch,
            overlap: self.overlap,
            gone: self.gone,
            table: &self.tables[request.table],
            buffers: &self.buffers,
        };
        let to = NodeId::Shard(request.shard);
        for frame in request.frames(&context) {
            if frame.header.kind == Kind::Push {
                self.report.bytes_pushed += u64::from(frame.header.payload_bytes);
            }
            self.outputs.push_back(Output::Send { to, frame });
        }
    }

    fn handle_shard_frame(&mut self, now: Time, header: &Header, payload: &[u8]) {
        match header.kind {
            Kind::PushAck => self.take_acknowledgement(header),
            Kind::Params => self.take_params(now, header, payload),
            Kind::Error => match control::decode::<Fault>("error", payload) {
                Ok(fault) => self.take_fault(header, fault),
                Err(error) => self.outputs.push_back(Output::Log(error.to_string())),
            },
            other => self.outputs.push_back(Output::Log(format!("ignored a {other:?} frame from a server"))),
        }
    }

    fn take_acknowledgement(&mut self, header: &Header) {
        let Some(request) = self.requests.get_mut(&header.request) else { return };
        let (ticket, clock) = (request.ticket, request.clock);
        let Some(acknowledged) = request.acknowledge() else { return };
        if let Some(pending) = self.tickets.get_mut(&ticket) {
            pending.acks = pending.acks.saturating_sub(1);
        }
        if acknowledged.is_push
            && let Some(count) = self.unacknowledged.get_mut(&clock)
        {
            *count -= 1;
            if *count == 0 {
                self.unacknowledged.remove(&clock);
            }
        }
        let table = request.table;
        if acknowledged.done {
            self.requests.remove(&header.request);
        }
        self.release_buffer(table, acknowledged.buffer);
        self.report_pushed();
    }

    /// A gradient's memory is used again once every server has it.
    fn release_buffer(&mut self, table: usize, id: u64) {
        let Some((_, users)) = self.buffers.get_mut(&id) else { return };
        *users -= 1;
        if *users == 0
            && let Some((buffer, _)) = self.buffers.remove(&id)
        {
            self.tables[table].keep_buffer(buffer);
        }
    }

    fn take_params(&mut self, now: Time, header: &Header, payload: &[u8]) {
        let Some(request) = self.requests.get_mut(&header.request) else { return };
        self.report.bytes_pulled += payload.len() as u64;
        let ticket = request.ticket;
        let local = &mut self.tables[request.table];
        // PSP-SGD, worker line 10: a block older than the iteration at hand is dropped.
        let is_late = local.partial.is_some() && header.version < self.clock && request.is_conditional();
        let taken = match self.tickets.get_mut(&ticket) {
            _ if is_late => Ok(()),
            Some(pending) => request.take_params(local, header, payload, &mut pending.rows),
            None => request.take_params(local, header, payload, &mut []),
        };
        if let Err(error) = taken {
            if let Some(pending) = self.tickets.get_mut(&ticket) {
                pending.error.get_or_insert(error);
            }
            return;
        }
        if !header.flags.has(Flags::LAST) {
            return;
        }
        if request.answered() {
            self.requests.remove(&header.request);
        }
        if let Some(pending) = self.tickets.get_mut(&ticket) {
            pending.answers = pending.answers.saturating_sub(1);
            if pending.partial && pending.clock >= self.gate.clock() {
                self.gate.arrived(now, pending.clock);
            }
        }
    }

    fn take_fault(&mut self, header: &Header, fault: Fault) {
        if matches!(fault.cause, Cause::NotAMember | Cause::JobOver) {
            return self.fail(WorkerError::NotAMember(fault.message));
        }
        let Some(request) = self.requests.get(&header.request) else {
            return self.outputs.push_back(Output::Log(fault.message));
        };
        let error = WorkerError::Refused { cause: fault.cause, message: fault.message };
        if let Some(pending) = self.tickets.get_mut(&request.ticket) {
            pending.error.get_or_insert(error);
        }
        // The server will not have it: what was kept for it is let go, as if it had been acknowledged.
        self.take_acknowledgement(header);
        self.requests.remove(&header.request);
    }

    fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(now, *plan),
            Control::Go { clock } => self.let_go(clock),
            Control::BarrierReached { name } => {
                let ticket = self.barriers.remove(&name);
                self.settle_answer(ticket);
            }
            Control::Status(status) => {
                self.status = Some(*status);
                let tickets = std::mem::take(&mut self.status_tickets);
                tickets.into_iter().for_each(|ticket| self.settle_answer(Some(ticket)));
            }
            // How many blocks to wait for is a matter of all servers together.
            Control::SetSync { table, server: None, sync } => self.set_sync(&table, &sync),
            Control::SetSync { .. } => {}
            Control::Left => {
                let ticket = self.leaving.take();
                self.settle_answer(ticket);
            }
            Control::Members { .. } => {}
            Control::Stop { error } => {
                let why = error.unwrap_or_else(|| "the job is over".into());
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
        let (Some(ticket), None) = (self.start, &self.plan) else { return };
        let same = plan.tables.iter().eq(self.tables.iter().map(|table| &table.spec));
        let checked = if same { plan.check() } else { Err("it is about other tables".into()) };
        if let Err(why) = checked {
            let sentence = format!("the coordinator's plan does not fit this worker: {why}");
            return self.fail(WorkerError::Table(sentence));
        }
        let chunks =
            crate::table::chunks(&plan.tables, &plan.parts, &plan.cores(), plan.chunk_elements as usize);
        for (number, (table, chunks)) in self.tables.iter_mut().zip(chunks).enumerate() {
            let server = chunks[0].shard.server;
            let policy = plan.policy_of(TableId(number as u32), server);
            match SyncPolicy::parse(&self.registry.consistency, &policy.sync) {
                Ok(sync) => {
                    self.overlap &= sync.overlap;
                    table.plan(chunks, policy.nonfinite, sync.model.partial_pull());
                }
                Err(error) => return self.fail(WorkerError::Table(error.to_string())),
            }
        }
        for (shard, address) in &plan.shards {
            self.links.insert(*shard, Link::new(now, NodeId::Shard(*shard), address.clone()));
        }
        self.plan = Some(plan);
        self.gate.set_blocks(&self.tables);
        let is_first = self.id == Some(WorkerId(0));
        let (mut acks, mut answers) = (0, 0);
        for index in 0..self.tables.len() {
            let initial = self.tables[index].take_initial();
            let shards = self.tables[index].shards();
            if is_first {
                let id = self.next_id();
                acks += shards.len();
                self.buffers.insert(id, (initial, shards.len()));
                for &shard in &shards {
                    self.request(Request::new(shard, index, 0, ticket, What::Init { buffer: id }));
                }
            }
            if !self.tables[index].spec.rows {
                answers += shards.len();
                for &shard in &shards {
                    let what = What::Pull { rows: None, now: false, rows_received: 0 };
                    self.request(Request::new(shard, index, 0, ticket, what));
                }
            }
        }
        let pending = self.tickets.get_mut(&ticket).expect("start is waited for");
        pending.acks = acks;
        pending.answers = answers;
        self.handle_timeout(now);
    }

    /// Without overlap: the scheduler lets pulls after this clock go.
    fn let_go(&mut self, clock: Clock) {
        self.gone = self.gone.max(Some(clock));
        let held: Vec<u64> =
            self.requests.iter().filter(|(_, request)| request.held).map(|(id, _)| *id).collect();
        held.into_iter().for_each(|id| self.send_request(id));
    }

    /// Without overlap: tells the coordinator of clocks whose pushes all servers have acknowledged.
    fn report_pushed(&mut self) {
        while let Some(&clock) = self.unreported.front()
            && self.unacknowledged.keys().next().is_none_or(|&oldest| oldest > clock)
        {
            self.unreported.pop_front();
            self.tell_coordinator(&Control::Pushed { clock });
        }
    }

    fn set_sync(&mut self, glob: &str, sync: &str) {
        let Ok(policy) = SyncPolicy::parse(&self.registry.consistency, sync) else { return };
        let matched = self.tables.iter_mut().filter(|table| glob_matches(glob, &table.spec.name));
        matched.for_each(|table| table.partial = policy.model.partial_pull());
        self.gate.set_blocks(&self.tables);
    }

    fn send_declaration(&mut self) {
        let tables = self.tables.iter().map(|table| table.spec.clone()).collect();
        self.tell_coordinator(&Control::Declare { tables });
    }

    fn tell_coordinator(&mut self, message: &Control) {
        self.outputs
            .push_back(Output::Send { to: NodeId::Coordinator, frame: frame(Kind::Control, message) });
    }

    fn fail(&mut self, error: WorkerError) {
        self.failed.get_or_insert(error);
    }

    fn check_alive(&self) -> Result<(), WorkerError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn check_started(&self) -> Result<(), WorkerError> {
        self.check_alive()?;
        if self.plan.is_none() {
            return Err(WorkerError::Order("call `start` and wait for it first".into()));
        }
        Ok(())
    }

    fn table_index(&self, table: TableId) -> Result<usize, WorkerError> {
        let index = table.0 as usize;
        if index < self.tables.len() {
            return Ok(index);
        }
        Err(WorkerError::Table(format!("table {index} does not exist; there are {}", self.tables.len())))
    }
}

fn local_name(tables: &[LocalTable], index: usize) -> &str {
    &tables[index].spec.name
}

impl Role for Worker {
    fn node(&self) -> Option<NodeId> {
        self.id.map(NodeId::Worker)
    }

    fn accept(&mut self, _now: Time, _hello: &Hello) -> Result<Welcome, Refusal> {
        Err(Refusal { reason: "a worker takes no connections".into(), retry: false })
    }

    fn hello(&self, _peer: NodeId) -> Hello {
        Hello {
            job: self.config.job.clone(),
            from: Party::Worker { rank: self.id },
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
                // What nobody waits for and no server misses is not asked for again (blocks that PSP went on without).
                self.requests.retain(|_, request| {
                    request.shard != shard || request.must_be_sent() || tickets.contains_key(&request.ticket)
                });
                let mine: Vec<u64> = self
                    .requests
                    .iter()
                    .filter(|(_, request)| request.shard == shard)
                    .map(|(id, _)| *id)
                    .collect();
                mine.into_iter().for_each(|id| self.send_request(id));
            }
            NodeId::Worker(_) | NodeId::Admin(_) => {}
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
            NodeId::Worker(_) | NodeId::Admin(_) => {}
        }
    }

    fn handle_frame(&mut self, now: Time, from: NodeId, header: &Header, payload: &[u8]) {
        match (from, header.kind) {
            (NodeId::Shard(_), _) => self.handle_shard_frame(now, header, payload),
            (NodeId::Coordinator, Kind::Control) => match control::decode("control message", payload) {
                Ok(message) => self.handle_control(now, message),
                Err(error) => self.fail(WorkerError::NotAMember(format!("the coordinator: {error}"))),
            },
            (NodeId::Coordinator, Kind::Error) => match control::decode::<Fault>("error", payload) {
                Ok(fault) => self.fail(WorkerError::Refused { cause: fault.cause, message: fault.message }),
                Err(error) => self.outputs.push_back(Output::Log(error.to_string())),
            },
            (from, kind) => {
                self.outputs.push_back(Output::Log(format!("ignored a {kind:?} frame from {from}")))
            }
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

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        match body {
            Body::Empty => &[],
            Body::Bytes(bytes) => bytes,
            Body::Stored { buffer, start, len } => {
                let (buffer, _) = &self.buffers[buffer];
                &buffer.as_bytes()[*start..*start + *len]
            }
        }
    }
}

impl Worker {
    /// After a (new) connection to the coordinator: says again what it may have missed.
    fn resume_with_coordinator(&mut self, now: Time) {
        self.next_report = now;
        if self.start.is_some() && self.plan.is_none() {
            self.send_declaration();
        }
        let names: Vec<String> = self.barriers.keys().cloned().collect();
        for name in names {
            self.tell_coordinator(&Control::Barrier { name });
        }
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
        if self.leaving.is_some() {
            self.tell_coordinator(&Control::Leave);
        }
    }
}
