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
mod slab;

pub use error::WorkerError;
pub use prepared::Content;
pub use slab::Slab;

use crate::address::Addresses;
use crate::codec::Factors;
use crate::consistency::SyncPolicy;
use crate::kernels;
use crate::limits;
use crate::link::Link;
use crate::policy::NonFinite;
use crate::registry::Registry;
use crate::role::{Landing, Lost, Outbox, Output, Role};
use crate::status::{Status, WorkerReport};
use crate::store::{Allocate, Buffer, Heap, Place};
use crate::table::{TableSpec, glob_matches};
use crate::types::{Clock, NodeId, ShardId, TableId, Time, WorkerId};
use crate::wire::ack;
use crate::wire::control::{self, frame};
use crate::wire::{Cause, Control, Fault, Flags, Header, Hello, Kind, Party, Plan, Refusal, Welcome};
use encoding::{Encoded, TableCodecs};
use gate::PullGate;
use local_table::LocalTable;
use request::{Missing, Request, What};
use requests::Requests;
use slab::Unique;
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
        self.plan.as_ref().map(|plan| plan.live_members().count())
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

    /// The codec that a table's gradients travel by; empty without one.
    pub fn codec(&self, table: TableId) -> Result<String, WorkerError> {
        self.check_started()?;
        let push = &self.tables[self.table_index(table)?].codecs.push;
        Ok(push.as_ref().map_or_else(String::new, |encoder| encoder.codec().to_string()))
    }

    /// Where the chunks of a table begin, ascending: each is encoded by itself.
    pub fn chunk_starts(&self, table: TableId) -> Result<Vec<u64>, WorkerError> {
        self.check_started()?;
        Ok(self.tables[self.table_index(table)?].all_chunks().map(|(_, chunk)| chunk.start).collect())
    }

    /// Lends a dense table's buffers to the application. Until [`Worker::give_back`], exchanges are the only way to use
    /// the table. An exchange waits for all blocks, so a table that is pulled partially (psp with b below 1) is not lent.
    pub fn slab(&mut self, table: TableId) -> Result<Slab, WorkerError> {
        self.check_started()?;
        let index = self.table_index(table)?;
        let local = &mut self.tables[index];
        if local.spec.rows {
            let sentence = format!("table `{}` is sparse: it is pushed and pulled by rows", local.spec.name);
            return Err(WorkerError::Order(sentence));
        }
        local.check_not_lent()?;
        if let Some(partial) = local.partial {
            let (name, b) = (&local.spec.name, partial.fraction);
            return Err(WorkerError::Order(format!(
                "table `{name}` is pulled partially (psp with b = {b}), and an exchange of slabs waits for all blocks: use \
                 `push_pull`, or psp without b and tau2"
            )));
        }
        if self.requests.values().any(|request| request.table == index) {
            let sentence =
                format!("table `{}` is being pushed or pulled: wait for that first", local.spec.name);
            return Err(WorkerError::Order(sentence));
        }
        local.lent = true;
        local.keep_base();
        let gradient = Unique::new(self.memory.zeroed(local.values.len()));
        let values = Unique::of(local.take_values(), &*self.memory);
        self.note_lent();
        let (lender, content, missing) = (self.config.number, Content::Gradient, Missing::default());
        Ok(Slab { lender, table, gradient, values, content, missing })
    }

    /// Takes lent buffers back: the table is pushed and pulled as others are. Those of another worker are refused, and
    /// stay lent there.
    pub fn give_back(&mut self, slab: Slab) -> Result<(), WorkerError> {
        self.check_lender(&slab)?;
        let local = &mut self.tables[slab.table.0 as usize];
        local.lent = false;
        local.values = slab.values.0;
        local.restore_base();
        if let Some(gradient) = Arc::into_inner(slab.gradient.0) {
            local.keep_buffer(gradient);
        }
        self.note_lent();
        Ok(())
    }

    /// A slab's table number means another table, or none, to another worker.
    fn check_lender(&self, slab: &Slab) -> Result<(), WorkerError> {
        if slab.lender == self.config.number {
            return Ok(());
        }
        let table = slab.table.0;
        Err(WorkerError::Order(format!(
            "the slab of table {table} was lent by another worker: exchange it with the job that lent it"
        )))
    }

    /// A table that is lent arrives whole, by exchanges: it is not among the blocks of a partial pull. The coordinator is
    /// told, because it refuses to switch such a table to one.
    fn note_lent(&mut self) {
        let lent = (0..).zip(&self.tables).filter(|(_, table)| table.lent);
        self.report.slabs = lent.map(|(number, _)| TableId(number)).collect();
        self.gate.set_blocks(&self.tables);
        self.next_report = Time::ZERO;
    }

    /// Sends the gradients of the current clock and asks for the parameters that follow them, for several tables in
    /// one go. On success the slabs are taken; on an error they stay where they are, and nothing was sent.
    ///
    /// Gradients are checked for NaN and Inf by the servers only: a pass over them here would cost as much as sending
    /// them.
    pub fn exchange(&mut self, now: Time, slabs: &mut Vec<Slab>) -> Result<Ticket, WorkerError> {
        self.check_started()?;
        let clock = self.clock;
        for slab in slabs.iter() {
            self.check_lender(slab)?;
            let local = &self.tables[self.table_index(slab.table)?];
            local.check_clock(clock)?;
        }
        slabs.iter_mut().for_each(Slab::clear_missing);
        let mut encoded = self.encode_slabs(clock, slabs)?.into_iter();
        let ticket = self.ticket(now, Purpose::Exchange { clock, tables: slabs.len() }, 0, 0);
        let (mut requests, mut lent) = (0, Vec::with_capacity(slabs.len()));
        for Slab { table, gradient, values, missing, .. } in slabs.drain(..) {
            let index = table.0 as usize;
            let landing = values.0.place();
            let local = &mut self.tables[index];
            local.pushed = Some(clock);
            let encoded = encoded.next().flatten();
            let (buffer, encoded, missing) = match encoded {
                Some(Encoded { buffer, payloads, missing }) => (buffer, Some(payloads), missing),
                None => (gradient.0.clone(), None, missing),
            };
            local.values = values.0;
            let shards = local.shard_count();
            requests += shards;
            lent.push(index);
            for shard in 0..shards {
                let shard = self.tables[index].shard(shard);
                let (buffer, encoded, missing) = (Some(buffer.clone()), encoded.clone(), missing.clone());
                let what = What::Push { buffer, rows: None, encoded, missing, want_params: true };
                self.request(Request::new(shard, index, clock, ticket, what).landing_at(landing));
            }
            self.tables[index].returned = Some(gradient.0);
        }
        *self.unacknowledged.entry(clock).or_default() += requests;
        let pending = self.tickets.get_mut(&ticket).expect("made above");
        pending.acks = requests;
        pending.answers = requests;
        pending.clock = clock + 1;
        pending.slabs = lent;
        Ok(ticket)
    }

    /// What travels instead of gradients, for tables that have a codec. It does look at them.
    fn encode_slabs(&mut self, clock: Clock, slabs: &[Slab]) -> Result<Vec<Option<Encoded>>, WorkerError> {
        let has_codec = |slab: &Slab| self.tables[slab.table.0 as usize].codecs.encodes_pushes();
        let is_whole = |slab: &Slab| slab.content == Content::Gradient && has_codec(slab);
        let odd = |slab: &&Slab| is_whole(slab) && !kernels::all_finite(slab.gradient());
        if let Some(slab) = slabs.iter().find(odd) {
            self.nonfinite += 1;
            let local = &self.tables[slab.table.0 as usize];
            if local.nonfinite == NonFinite::Reject {
                return Err(WorkerError::NonFinite { table: local.spec.name.clone(), clock });
            }
        }
        let memory = Arc::clone(&self.memory);
        let encode = |slab: &Slab| {
            let local = &mut self.tables[slab.table.0 as usize];
            let gradient = Gradient::Dense(slab.gradient());
            // Codecs that compare a gradient with the parameters find them in the slab.
            let nothing = std::mem::replace(&mut local.values, slab.values.0.clone());
            let encoded = match slab.content {
                Content::Gradient if !local.codecs.encodes_pushes() => Ok(None),
                Content::Gradient => local.encode(clock, gradient, &slab.missing, &*memory).map(Some),
                prepared => {
                    let content = (slab.gradient(), &slab.missing);
                    local.encode_prepared(clock, prepared, content, &*memory).map(Some)
                }
            };
            local.values = nothing;
            encoded
        };
        let mut done = Vec::with_capacity(slabs.len());
        let failed =
            slabs.iter().map(encode).find_map(|outcome| outcome.map(|encoded| done.push(encoded)).err());
        let Some(error) = failed else { return Ok(done) };
        // Nothing is sent: what is encoded waits to be pushed again.
        for (slab, encoded) in slabs.iter().zip(done) {
            let local = &mut self.tables[slab.table.0 as usize];
            let shards: Vec<ShardId> = local.shards().collect();
            let Some(encoded) = encoded else { continue };
            shards.into_iter().for_each(|shard| local.note_refused(clock, shard, encoded.clone()));
        }
        Err(error)
    }

    /// Forgets a ticket of an exchange and returns its slabs.
    ///
    /// After an error, answers may still be on their way into the buffers; then these are not used again, and the slabs
    /// have others.
    pub fn redeem_slabs(&mut self, ticket: Ticket) -> Vec<Slab> {
        let Some(pending) = self.tickets.remove(&ticket) else { return Vec::new() };
        let settled = pending.acks + pending.answers == 0;
        pending.slabs.into_iter().map(|index| self.take_slab(index, settled)).collect()
    }

    fn take_slab(&mut self, index: usize, settled: bool) -> Slab {
        let local = &mut self.tables[index];
        let values = local.take_values();
        let gradient = local.returned.take().unwrap_or_else(|| Arc::new(self.memory.zeroed(values.len())));
        let may_arrive = !settled && self.requests.values().any(|request| request.table == index);
        // What somebody still has stays where it is: the application may know its address.
        if may_arrive || Arc::strong_count(&values) > 1 {
            self.parked.push(values.clone());
        }
        if Arc::strong_count(&gradient) > 1 {
            self.parked.push(gradient.clone());
        }
        let [gradient, values] = [gradient, values].map(|buffer| Unique::of(buffer, &*self.memory));
        let (lender, table) = (self.config.number, TableId(index as u32));
        let (content, missing) = (Content::Gradient, Missing::default());
        Slab { lender, table, gradient, values, content, missing }
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
        let chunks = plan.chunks();
        for (number, (table, chunks)) in self.tables.iter_mut().zip(chunks).enumerate() {
            let server = chunks[0].shard.server;
            let policy = plan.policy_of(TableId(number as u32), server);
            match policy.sync(&self.registry) {
                Ok(sync) => {
                    self.overlap &= sync.overlap;
                    table.plan(chunks, policy.nonfinite(), sync.partial_pull(), &*self.memory);
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

    /// Without overlap: the scheduler lets pulls after this clock go.
    fn let_go(&mut self, clock: Clock) {
        self.gone = self.gone.max(Some(clock));
        // A push that is under way is not sent a second time; its pull follows the acknowledgement.
        let is_ready = |request: &Request| request.held && !request.must_be_sent();
        self.requests.numbers(is_ready).into_iter().for_each(|id| self.send_request(id));
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
    fn say_leave(&mut self) {
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

/// Copies a gradient while it is in cache for the check. Whether all of it is finite.
fn copy_finite(buffer: &mut [f32], gradient: &[f32]) -> bool {
    let blocks = buffer.chunks_mut(limits::BLOCK_ELEMENTS).zip(gradient.chunks(limits::BLOCK_ELEMENTS));
    let mut finite = true;
    for (to, from) in blocks {
        finite &= crate::kernels::all_finite(from);
        to.copy_from_slice(from);
    }
    finite
}
