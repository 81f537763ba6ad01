//! A worker as a state machine: it declares tables, pushes gradients, pulls parameters, keeps its clock.
//!
//! Methods come in four families. Getters ([`Worker::values`], [`Worker::outcome`]) look. Mutators
//! ([`Worker::declare`], [`Worker::start`], [`Worker::push`], [`Worker::pull`], [`Worker::clock`]) are what the
//! application asks for; each returns a [`Ticket`] to wait on. `handle_*` and `poll_*` are the driver's ([`Role`](crate::role::Role)).
//!
//! A request stays until its server answered it, and is sent again when a broken connection is made anew; the
//! servers apply it once.

mod encoding;
mod error;
mod gate;
mod local_table;
mod prepared;
mod request;
mod requests;
mod session;
mod slab;

pub use error::WorkerError;
pub use prepared::Content;
pub use slab::Slab;

use crate::address::Addresses;
use crate::codec::Factors;
use crate::limits;
use crate::link::Link;
use crate::registry::Registry;
use crate::role::{Outbox, Output};
use crate::status::{Status, WorkerReport};
use crate::store::{Allocate, Buffer, Heap, Place};
use crate::table::{NonFinite, TableSpec};
use crate::types::{Clock, NodeId, ShardId, TableId, Time, WorkerId};
use crate::wire::{Control, Kind, Plan};
use encoding::Encoded;
use gate::PullGate;
use local_table::LocalTable;
use request::{Missing, Request, What};
use requests::Requests;
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
    /// Where the aggregator is that this worker goes through to the servers, if it does.
    pub aggregator: Option<Addresses>,
    /// Tells the workers of a process apart: a slab goes back to the worker that lent it.
    pub number: u64,
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
    /// Of a whole table that is a product of thin matrices, as a fully connected layer's is. Those travel where the
    /// table's codec is `factors` and they are shorter.
    Product {
        /// The gradient.
        values: &'a [f32],
        /// What it is the product of.
        factors: Factors<'a>,
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
    what: Purpose,
    since: Time,
    clock: Clock,
    acks: usize,
    answers: usize,
    /// The answers may be incomplete once the pull gate is open (PSP).
    partial: bool,
    error: Option<WorkerError>,
    rows: Vec<f32>,
    status: Option<Status>,
    /// Tables whose slabs are in the exchange.
    slabs: Vec<usize>,
}

/// What a ticket is for; made into a sentence when somebody asks.
#[derive(Debug, Clone)]
enum Purpose {
    Start,
    Push { table: usize, clock: Clock },
    Pull { table: usize, clock: Clock },
    Exchange { clock: Clock, tables: usize },
    Barrier(String),
    Status,
    Leave,
}

/// One worker of a job.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    registry: Arc<Registry>,
    memory: Arc<dyn Allocate>,
    /// Memory for the case that some server is on this host, and what addresses of this host begin with.
    shared: Option<(String, Arc<dyn Allocate>)>,
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
    requests: Requests,
    /// Memory that a server may still write to.
    parked: Vec<Arc<Buffer>>,
    tickets: BTreeMap<Ticket, Pending>,
    /// Barriers that are not reached yet, with their numbers.
    barriers: BTreeMap<String, (u64, Ticket)>,
    last_barrier: u64,
    status_tickets: Vec<Ticket>,
    leaving: Option<Ticket>,
    failed: Option<WorkerError>,
    next_id: u64,
    next_report: Time,
    report: WorkerReport,
    nonfinite: u64,
    outputs: Outbox,
}

impl Worker {
    /// A worker that is about to join.
    pub fn new(now: Time, config: WorkerConfig, registry: Arc<Registry>) -> Worker {
        Worker {
            coordinator: Link::new(now, NodeId::Coordinator, config.coordinator.clone()),
            id: config.rank,
            config,
            registry,
            memory: Arc::new(Heap),
            shared: None,
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
            requests: Requests::default(),
            parked: Vec::new(),
            tickets: BTreeMap::new(),
            barriers: BTreeMap::new(),
            last_barrier: 0,
            status_tickets: Vec::new(),
            leaving: None,
            failed: None,
            next_id: 1,
            next_report: now,
            report: WorkerReport::default(),
            nonfinite: 0,
            outputs: Outbox::default(),
        }
    }

    /// Takes large buffers from `memory` instead of the heap if there is a server with an address that begins with
    /// `host`: one that can share them.
    pub fn with_shared_memory(mut self, host: String, memory: Arc<dyn Allocate>) -> Worker {
        self.shared = Some((host, memory));
        self
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

    /// The same, to be read without holding the worker; the error says why there is nothing to read.
    pub fn shared_values(&self, table: TableId) -> Result<Arc<Buffer>, WorkerError> {
        self.check_started()?;
        let local = &self.tables[self.table_index(table)?];
        if local.spec.rows {
            let sentence = format!("table `{}` is sparse: pull the rows to read", local.spec.name);
            return Err(WorkerError::Order(sentence));
        }
        local.check_not_lent()?;
        Ok(local.values.clone())
    }

    /// Bytes held for parameters and gradients under way.
    pub fn memory_bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(LocalTable::memory_bytes).sum();
        let parked: usize = self.parked.iter().map(|buffer| buffer.memory_bytes()).sum();
        // Requests to several shards share one buffer.
        let under_way: BTreeMap<*const Buffer, usize> = self
            .requests
            .values()
            .filter_map(Request::buffer)
            .map(|buffer| (Arc::as_ptr(buffer), buffer.memory_bytes()))
            .collect();
        tables + parked + under_way.values().sum::<usize>()
    }

    /// The status that [`Worker::query_status`] asked for under this ticket, once.
    pub fn take_status(&mut self, ticket: Ticket) -> Option<Status> {
        self.tickets.get_mut(&ticket)?.status.take()
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
        let ticket = self.ticket(now, Purpose::Start, 0, 1);
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
            Gradient::Dense(values) | Gradient::Rows { values, .. } | Gradient::Product { values, .. } => {
                values
            }
        };
        let (buffer, encoded, missing) = match local.codecs.encodes_pushes() {
            true => {
                if !crate::kernels::all_finite(values) {
                    self.nonfinite += 1;
                    if local.nonfinite == NonFinite::Reject {
                        return Err(WorkerError::NonFinite { table: local.spec.name.clone(), clock });
                    }
                }
                let missing = Missing::default();
                let encoded = local.encode(clock, gradient, &missing, &*self.memory)?;
                let Encoded { buffer, payloads, missing } = encoded;
                (buffer, Some(payloads), missing)
            }
            false => {
                let mut buffer = local.take_buffer(values.len(), &*self.memory);
                if !copy_finite(buffer.as_mut_slice(), values) {
                    self.nonfinite += 1;
                    if local.nonfinite == NonFinite::Reject {
                        local.keep_buffer(buffer);
                        return Err(WorkerError::NonFinite { table: local.spec.name.clone(), clock });
                    }
                }
                (Arc::new(buffer), None, Missing::default())
            }
        };
        local.pushed = Some(clock);
        let rows = match gradient {
            Gradient::Dense(_) | Gradient::Product { .. } => None,
            Gradient::Rows { rows, .. } => Some(Arc::new(rows.to_vec())),
        };
        let partial = local.partial.is_some();
        let shards = local.shard_count();
        let what = Purpose::Push { table: index, clock };
        let ticket = self.ticket(now, what, shards, if want_params { shards } else { 0 });
        let landing = if want_params { self.landing_for(index, ticket) } else { None };
        let pending = self.tickets.get_mut(&ticket).expect("made above");
        pending.partial = partial;
        pending.clock = clock + 1;
        *self.unacknowledged.entry(clock).or_default() += shards;
        for shard in 0..shards {
            let shard = self.tables[index].shard(shard);
            let (rows, encoded, missing) = (rows.clone(), encoded.clone(), missing.clone());
            let what = What::Push { buffer: Some(buffer.clone()), rows, encoded, missing, want_params };
            self.request(Request::new(shard, index, clock, ticket, what).landing_at(landing));
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
        let local = &mut self.tables[index];
        local.check_not_lent()?;
        if local.spec.rows != options.rows.is_some() && !options.now {
            let sentence =
                if local.spec.rows { "is sparse: name the rows to pull" } else { "is dense: pull it whole" };
            return Err(WorkerError::Order(format!("table `{}` {sentence}", local.spec.name)));
        }
        let clock = if local.pushed == Some(self.clock) { self.clock + 1 } else { self.clock };
        let per_shard = match options.rows {
            Some(rows) => local.rows_by_shard(rows)?,
            None if local.spec.rows => local.all_rows_by_shard(),
            None => local.shards().map(|shard| (shard, Vec::new())).collect(),
        };
        let elements: usize = per_shard.iter().map(|(_, rows)| rows.len()).sum::<usize>() * local.row_width();
        let partial = local.partial.is_some() && !options.now && options.rows.is_none();
        let requests: Vec<_> = match local.spec.rows {
            true => per_shard
                .iter()
                .flat_map(|(shard, rows)| {
                    rows.chunks(ROWS_PER_PULL).map(|rows| (*shard, Some(rows.to_vec())))
                })
                .collect(),
            false => per_shard.iter().map(|(shard, _)| (*shard, None)).collect(),
        };
        let ticket = self.ticket(now, Purpose::Pull { table: index, clock }, 0, requests.len());
        let landing = if options.rows.is_none() { self.landing_for(index, ticket) } else { None };
        let pending = self.tickets.get_mut(&ticket).expect("made above");
        pending.rows = vec![0.0; elements];
        pending.clock = clock;
        pending.partial = partial;
        for (shard, rows) in requests {
            let what = What::Pull { rows, now: options.now };
            self.request(Request::new(shard, index, clock, ticket, what).landing_at(landing));
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
        let order = |why: String| Err(WorkerError::Order(why));
        if name.len() > limits::MAX_NAME_BYTES {
            return order(format!("a barrier's name has at most {} bytes", limits::MAX_NAME_BYTES));
        }
        if self.barriers.get(name).is_some_and(|(_, ticket)| self.tickets.contains_key(ticket)) {
            return order(format!("barrier `{name}` is waited for already"));
        }
        if self.barriers.len() >= limits::MAX_BARRIERS && !self.barriers.contains_key(name) {
            return order(format!("at most {} barriers can be waited for at a time", limits::MAX_BARRIERS));
        }
        let ticket = self.ticket(now, Purpose::Barrier(name.to_owned()), 0, 1);
        match self.barriers.get_mut(name) {
            // A wait for it was given up; to the others this worker has been there since.
            Some(waiting) => waiting.1 = ticket,
            None => {
                self.last_barrier += 1;
                self.barriers.insert(name.to_owned(), (self.last_barrier, ticket));
                if self.coordinator.is_up() {
                    let message = Control::Barrier { name: name.to_owned(), number: self.last_barrier };
                    self.tell_coordinator(&message);
                }
            }
        }
        Ok(ticket)
    }

    /// Asks the coordinator how the job stands.
    pub fn query_status(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.check_alive()?;
        let ticket = self.ticket(now, Purpose::Status, 0, 1);
        self.status_tickets.push(ticket);
        if self.coordinator.is_up() {
            self.tell_coordinator(&Control::StatusQuery);
        }
        Ok(ticket)
    }

    /// Leaves the job; the others go on without this worker.
    pub fn leave(&mut self, now: Time) -> Ticket {
        let ticket = self.ticket(now, Purpose::Leave, 0, 1);
        self.leaving = Some(ticket);
        self.say_leave();
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
        let rows = self.tickets.get_mut(&ticket).map(|pending| std::mem::take(&mut pending.rows));
        if let Some(&Purpose::Push { table, .. } | &Purpose::Pull { table, .. }) =
            self.tickets.get(&ticket).map(|pending| &pending.what)
            && self.tables[table].landing_owner() == Some(ticket)
        {
            // It is given up, and what still comes of it is taken chunk by chunk.
            self.share_landing(table);
        }
        for slab in self.redeem_slabs(ticket) {
            self.give_back(slab).expect("this worker lent it");
        }
        rows.unwrap_or_default()
    }

    /// What a ticket waits for: which servers, which table, since when.
    pub fn explain(&self, now: Time, ticket: Ticket) -> String {
        let Some(pending) = self.tickets.get(&ticket) else { return "nothing".into() };
        let seconds = now.since(pending.since).as_secs_f64();
        let mut sentence = format!("{} (for {seconds:.1} s)", self.sentence(&pending.what));
        if !self.coordinator.is_up() {
            sentence += &format!("; the coordinator at {} is not connected", self.coordinator.addresses());
        }
        let silent: Vec<String> = self
            .requests
            .values()
            .filter(|request| request.ticket == ticket)
            .map(|request| {
                let link = &self.links[&request.shard];
                match link.why() {
                    None => format!("{} has not answered", request.shard),
                    Some(why) => format!("{link} is not connected ({why})"),
                }
            })
            .take(4)
            .collect();
        if !silent.is_empty() {
            sentence += &format!("; {}", silent.join(", "));
        }
        sentence
    }

    fn sentence(&self, purpose: &Purpose) -> String {
        let name = |table: usize| &self.tables[table].spec.name;
        match purpose {
            Purpose::Start => "the job to start".into(),
            Purpose::Push { table, clock } => {
                format!("the push of table `{}` at clock {clock}", name(*table))
            }
            Purpose::Pull { table, clock } => {
                format!("the pull of table `{}` after clock {clock}", name(*table))
            }
            Purpose::Exchange { clock, tables } => {
                format!("the exchange of {tables} tables at clock {clock}")
            }
            Purpose::Barrier(name) => format!("barrier `{name}`"),
            Purpose::Status => "the job's status".into(),
            Purpose::Leave => "the coordinator to note that this worker leaves".into(),
        }
    }

    fn ticket(&mut self, now: Time, what: Purpose, acks: usize, answers: usize) -> Ticket {
        let ticket = Ticket(self.next_id());
        let pending = Pending {
            what,
            since: now,
            clock: 0,
            acks,
            answers,
            partial: false,
            error: None,
            rows: Vec::new(),
            status: None,
            slabs: Vec::new(),
        };
        self.tickets.insert(ticket, pending);
        ticket
    }

    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Where the answer to a pull of a whole table may be put by servers that share memory with this process.
    fn landing_for(&mut self, index: usize, ticket: Ticket) -> Option<Place> {
        self.share_landing(index);
        let is_only = !self.requests.values().any(|request| request.table == index && request.wants_params());
        self.tables[index].landing(&*self.memory, ticket, is_only)
    }

    /// Another pull comes beside the one that has a table's landing to itself, or not all of its answer may come.
    fn share_landing(&mut self, index: usize) {
        let local = &mut self.tables[index];
        let Some(owner) = local.landing_owner() else { return };
        let requests = &self.requests;
        let is_owners = |request: &&Request| request.table == index && request.ticket == owner;
        local.disown_landing(|shard| {
            let mut own = requests.values().filter(is_owners).filter(|request| request.wants_params());
            own.find(|request| request.shard == shard).map_or(usize::MAX, Request::received)
        });
    }

    /// Files a request and sends it if its server is connected.
    fn request(&mut self, request: Request) {
        let shard = request.shard;
        let id = self.requests.insert(request);
        if self.links[&shard].is_up() {
            self.send_request(id);
        }
    }

    fn send_request(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let epoch = self.plan.as_ref().map_or(0, |plan| plan.epoch);
        let context = request::Context {
            id,
            epoch,
            overlap: self.overlap,
            gone: self.gone,
            table: &self.tables[request.table],
        };
        let to = NodeId::Shard(request.shard);
        let (outputs, report) = (&mut self.outputs, &mut self.report);
        request.frames(&context, &mut |frame| {
            if frame.header.kind == Kind::Push {
                report.bytes_pushed += u64::from(frame.header.payload_bytes);
            }
            outputs.push_back(Output::Send { to, frame });
        });
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

/// Copies a gradient while it is in cache for the check. Whether all of it is finite.
fn copy_finite(buffer: &mut [f32], gradient: &[f32]) -> bool {
    let blocks = buffer.chunks_mut(limits::CHUNK_ELEMENTS).zip(gradient.chunks(limits::CHUNK_ELEMENTS));
    let mut finite = true;
    for (to, from) in blocks {
        finite &= crate::kernels::all_finite(from);
        to.copy_from_slice(from);
    }
    finite
}
