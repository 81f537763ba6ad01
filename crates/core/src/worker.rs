//! A worker as a state machine: it declares tables, pushes gradients, pulls parameters, keeps its clock.
//!
//! Methods come in four families. Getters ([`Worker::values`], [`Worker::outcome`]) look. Mutators
//! ([`Worker::declare`], [`Worker::start`], [`Worker::push`], [`Worker::pull`], [`Worker::clock`]) are what the
//! application asks for; each returns a [`Ticket`] to wait on. `handle_*` and `poll_*` are the driver's ([`Role`]).
//!
//! A request stays until its server answered it, and is sent again when a broken connection is made anew; the
//! servers apply it once.

mod allocation;
mod answers;
mod barriers;
mod encoding;
mod error;
mod gradient;
mod layout;
mod local_table;
mod memory;
mod missing;
mod partial_pull;
mod reporter;
mod request;
mod requests;
mod rulings;
mod scheduler;
mod session;
mod slab;
mod submission;
mod tables;
mod ticket;

pub use error::WorkerError;
pub use gradient::{Gradient, PullOptions};
pub use layout::Share;
pub use rulings::Asked;
pub use session::{Loops, WorkerConfig};
pub use slab::{Prepared, Slab};
pub use submission::Submission;
pub use ticket::Ticket;

use crate::consistency::{Question, ServerPush};
use crate::hands::Alone;
use crate::landing::{Destination, Landing};
use crate::lease::Lease;
use crate::limits;
use crate::policy::{JobPolicies, PolicyOverride};
use crate::registry::Registry;
use crate::role::{Lost, Output, Role};
use crate::status::{Status, WorkerReport};
use crate::store::Allocate;
use crate::table::{Pack, TableSpec};
use crate::types::{Clock, ConnectionId, NodeId, ShardId, TableId, Time, WorkerId};
use crate::wire::frame::Params;
use crate::wire::{Cause, Change, Control, DType, Fault, Header, Hello, Kind, Plan, Refusal, Welcome};
use crate::wire::{ack, control};
use allocation::Allocation;
use barriers::Barriers;
use local_table::LocalTable;
use missing::Missing;
use partial_pull::PartialPulls;
use reporter::Reporter;
use request::{Answer, Payload, Request, RequestKind, TablePush};
use requests::Requests;
use rulings::Rulings;
use scheduler::Scheduler;
use session::Session;
use slab::SlabInFlight;
use std::ops::Range;
use std::sync::Arc;
use submission::{Sent, Source, SubmissionKind};
use tables::Tables;
use ticket::{Outstanding, Pending, TicketKind, Tickets};

/// Rows that one pull frame asks for at most.
const ROWS_PER_PULL: usize = limits::MAX_DATA_BYTES / 8;

/// One worker of a job.
#[derive(Debug)]
pub struct Worker {
    registry: Arc<Registry>,
    allocation: Allocation,
    session: Session,
    tables: Tables,
    /// Iterations completed.
    clock: Clock,
    partial_pulls: PartialPulls,
    scheduler: Scheduler,
    requests: Requests,
    /// The clocks of submissions that are being prepared.
    submitting: Vec<Clock>,
    tickets: Tickets,
    barriers: Barriers,
    rulings: Rulings,
    reporter: Reporter,
}

impl Worker {
    /// A worker that is about to join.
    pub fn new(now: Time, config: WorkerConfig, registry: Arc<Registry>) -> Worker {
        Worker {
            registry,
            allocation: Allocation::on_heap(),
            session: Session::new(now, config),
            tables: Tables::default(),
            clock: 0,
            partial_pulls: PartialPulls::default(),
            scheduler: Scheduler::new(),
            requests: Requests::default(),
            submitting: Vec::new(),
            tickets: Tickets::default(),
            barriers: Barriers::default(),
            rulings: Rulings::default(),
            reporter: Reporter::new(now),
        }
    }

    /// Takes large buffers from `memory` instead of the heap if there is a server with an address that begins with
    /// `host`: one that can share them.
    pub fn with_shared_memory(mut self, host: String, memory: Arc<dyn Allocate>) -> Worker {
        self.allocation.offer_shared(host, memory);
        self
    }

    /// Spreads its connections over several loops of its driver, each of which takes its own outputs
    /// ([`Worker::poll_output_of`]).
    pub fn with_loops(mut self, loops: Loops) -> Worker {
        self.session.spread(loops);
        self
    }

    // Getters.

    /// Its rank, once it is known.
    pub fn id(&self) -> Option<WorkerId> {
        self.session.id()
    }

    /// How many workers the job was set up for, once it started. More may have joined, or some died.
    pub fn workers(&self) -> Option<usize> {
        self.session.plan().map(|plan| plan.workers as usize)
    }

    /// Iterations completed.
    pub fn current_clock(&self) -> Clock {
        self.clock
    }

    /// Bytes moved so far.
    pub fn report(&self) -> &WorkerReport {
        self.reporter.report()
    }

    /// Gradients refused here for NaN or Inf.
    pub fn nonfinite(&self) -> u64 {
        self.tables.iter().map(LocalTable::nonfinite_seen).sum()
    }

    /// The table's parameters as last pulled; empty for a sparse table, and while they are lent.
    pub fn values(&self, table: TableId) -> &[f32] {
        self.tables.get(table).map_or(&[], LocalTable::values)
    }

    /// The same, to be read without holding the worker; the error says why there is nothing to read.
    pub fn shared_values(&self, table: TableId) -> Result<Lease, WorkerError> {
        self.check_started()?;
        self.tables[self.tables.index(table)?].read()
    }

    /// Bytes held for parameters and gradients under way.
    pub fn memory_bytes(&self) -> usize {
        self.tables.iter().map(LocalTable::memory_bytes).sum::<usize>() + self.tickets.memory_bytes()
    }

    /// The codec that a table's gradients travel by; empty without one.
    pub fn codec(&self, table: TableId) -> Result<String, WorkerError> {
        self.check_started()?;
        Ok(self.tables[self.tables.index(table)?].codec())
    }

    /// The type that the parameters of a table come as; none where the answer codec makes something else of them.
    pub fn answer_type(&self, table: TableId) -> Result<Option<DType>, WorkerError> {
        Ok(self.tables[self.tables.index(table)?].answer_type())
    }

    /// Whether a ticket waits for more than acknowledgements, which do not depend on other workers.
    pub fn awaits_answers(&self, ticket: Ticket) -> bool {
        self.tickets.get(ticket).is_some_and(Pending::awaits_answers)
    }

    /// Whether a gradient of the current clock was pushed, and not refused since.
    pub fn has_pushed(&self, table: TableId) -> bool {
        self.tables.get(table).is_some_and(|local| local.has_pushed(self.clock))
    }

    // Requests of the application.

    /// Declares a table with its initial values. All workers declare the same tables in the same order.
    pub fn declare(&mut self, spec: TableSpec, initial: Vec<f32>) -> Result<TableId, WorkerError> {
        if self.tickets.start().is_some() {
            return Err(WorkerError::Order("tables are created before `start`".into()));
        }
        self.tables.declare(spec, initial)
    }

    /// Puts the tables that were declared into packs ([`Pack::divide`]), whose tensors are these tables in their order. From now
    /// on the packs are the tables, in theirs.
    pub fn pack(&mut self, packs: &[Pack]) -> Result<(), WorkerError> {
        if self.tickets.start().is_some() {
            return Err(WorkerError::Order("tables are packed before `start`".into()));
        }
        self.tables.pack(packs)
    }

    /// Joins: the ticket is due when the plan and the initial values are here.
    pub fn start(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.check_alive()?;
        if self.tickets.start().is_some() {
            return Err(WorkerError::Order("`start` is called once".into()));
        }
        if self.tables.is_empty() {
            return Err(WorkerError::Order("create a table before `start`".into()));
        }
        let ticket = self.tickets.open_start(now);
        if self.session.coordinator().is_up() {
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
        let mut submission = self.begin_push(table, gradient, Vec::new(), want_params)?;
        submission.prepare(&Alone);
        self.finish(now, &mut submission)
    }

    /// Whether a gradient of one of a pack's layers, which is finite or not, fits, and may be sent.
    pub fn check_layer(
        &mut self,
        table: TableId,
        layer: usize,
        gradient: &Gradient<'_>,
        is_finite: bool,
    ) -> Result<(), WorkerError> {
        self.check_started()?;
        let index = self.tables.index(table)?;
        self.tables[index].check_layer(layer, gradient, self.clock, is_finite)
    }

    /// Begins [`Worker::push`]: [`Submission::prepare`] comes next, which needs no worker, and then [`Worker::finish`]. A dense
    /// gradient may lack ranges of its table: ascending, disjoint, not empty, and zeros.
    pub fn begin_push<'a>(
        &mut self,
        table: TableId,
        gradient: Gradient<'a>,
        lacks: Vec<Range<usize>>,
        want_params: bool,
    ) -> Result<Submission<'a>, WorkerError> {
        self.check_started()?;
        let (index, clock) = (self.tables.index(table)?, self.clock);
        let local = &self.tables[index];
        local.check_gradient(&gradient, clock)?;
        let missing = Missing::new(lacks, local.layout().elements()).map_err(WorkerError::Table)?;
        if want_params && local.layout().is_sparse() {
            return Err(WorkerError::Order(format!(
                "table `{}` is sparse: push, then pull the rows that come next",
                local.name()
            )));
        }
        let source = (index, Source::Given(gradient, missing));
        Ok(self.begin_submission(SubmissionKind::Push { want_params }, [source]))
    }

    /// Sends what a submission has prepared. On an error nothing is sent, and it has the slabs that it was begun with.
    pub fn finish(&mut self, now: Time, submission: &mut Submission<'_>) -> Result<Ticket, WorkerError> {
        self.end_submission(submission);
        let Submission { clock, kind, parts, error } = submission;
        let clock = *clock;
        if let Err(why) = error.take().map_or_else(|| self.check_alive(), Err) {
            for part in parts {
                let local = &mut self.tables[part.table];
                local.forget_pushed(clock);
                if let Some(Sent::Made(outgoing)) = &part.sent {
                    local.keep_unsent(clock, outgoing);
                }
            }
            self.report_pushed();
            self.say_leave();
            return Err(why);
        }
        let mut pending = match kind {
            SubmissionKind::Push { .. } => {
                Pending::new(TicketKind::Push { table: parts[0].table, clock }, now)
            }
            SubmissionKind::Exchange => {
                Pending::new(TicketKind::Exchange { clock, tables: parts.len() }, now)
            }
        };
        let (mut pushes, mut in_flight) = (Vec::with_capacity(parts.len()), Vec::new());
        for part in parts {
            let (table, local) = (part.table, &mut self.tables[part.table]);
            let Some(sent) = part.sent.take() else { continue };
            match (part.source.take_slab(), sent) {
                (Some(slab), sent) => {
                    let (gradient, slab, reply) = local.begin_exchange(slab, sent, clock);
                    pushes.push(TablePush { table, gradient, reply });
                    in_flight.push(slab);
                }
                (None, Sent::Made(gradient)) => {
                    let is_partial = local.partial_pull().is_some();
                    pending = pending.with_partial(is_partial.then_some(clock + 1));
                    let wants =
                        *kind == SubmissionKind::Push { want_params: true } && local.asks_after(clock);
                    let reply = wants.then(|| local.begin_pull(clock + 1, is_partial));
                    pushes.push(TablePush { table, gradient, reply });
                }
                // Only a slab has memory that frames are sent from.
                (None, Sent::InPlace(_)) => {}
            }
        }
        Ok(self.submit(pending.with_slabs(in_flight), clock, pushes))
    }

    /// Asks for a table's parameters, or for some of its rows.
    pub fn pull(
        &mut self,
        now: Time,
        table: TableId,
        options: PullOptions<'_>,
    ) -> Result<Ticket, WorkerError> {
        self.check_started()?;
        let index = self.tables.index(table)?;
        let local = &mut self.tables[index];
        local.check_not_lent()?;
        let is_sparse = local.layout().is_sparse();
        if is_sparse != options.rows.is_some() && !options.now {
            let sentence =
                if is_sparse { "is sparse: name the rows to pull" } else { "is dense: pull it whole" };
            return Err(WorkerError::Order(format!("table `{}` {sentence}", local.name())));
        }
        let clock = local.pull_clock(self.clock);
        let kind = TicketKind::Pull { table: index, clock };
        let per_shard = match options.rows {
            Some(rows) => local.layout().rows_by_shard(rows)?,
            None if is_sparse => local.layout().all_rows_by_shard(),
            None => return Ok(self.pull_whole(now, kind, index, options.now)),
        };
        let rows: usize = per_shard.iter().map(|of_shard| of_shard.rows.len()).sum();
        let elements = rows * local.layout().row_width();
        let ticket = self.tickets.reserve();
        let mut answers = 0;
        for of_shard in per_shard {
            for rows in of_shard.rows.chunks(ROWS_PER_PULL) {
                answers += 1;
                let kind = RequestKind::Pull { rows: Some(rows.to_vec()), now: options.now };
                self.request(Request::new(of_shard.shard, index, clock, ticket, kind));
            }
        }
        self.tickets.file(ticket, Pending::new(kind, now).expecting(0, answers).with_rows(elements));
        Ok(ticket)
    }

    fn pull_whole(&mut self, now: Time, kind: TicketKind, index: usize, at_once: bool) -> Ticket {
        let local = &mut self.tables[index];
        let clock = local.pull_clock(self.clock);
        let is_partial = local.partial_pull().is_some() && !at_once;
        let reply = local.begin_pull(clock, is_partial);
        let shards: Vec<ShardId> = local.layout().shards().collect();
        let pending =
            Pending::new(kind, now).expecting(0, shards.len()).with_partial(is_partial.then_some(clock));
        let ticket = self.tickets.open(pending);
        for shard in shards {
            let kind = RequestKind::Pull { rows: None, now: at_once };
            self.request(Request::new(shard, index, clock, ticket, kind).with_reply(Some(reply)));
        }
        ticket
    }

    /// Lends a dense table's buffers to the application. Until [`Worker::give_back`], exchanges are the only way to use
    /// the table. An exchange waits for all blocks, so a table that is pulled partially (psp with b below 1) is not lent.
    pub fn slab(&mut self, table: TableId) -> Result<Slab, WorkerError> {
        self.check_started()?;
        let index = self.tables.index(table)?;
        let is_busy = self.tables[index].is_submitting()
            || self.requests.values().any(|request| request.table() == index);
        let lender = self.session.number();
        let slab = self.tables[index].lend(table, lender, is_busy, &**self.allocation.allocator())?;
        self.note_lent();
        Ok(slab)
    }

    /// Takes lent buffers back: the table is pushed and pulled as others are. Those of another worker are refused, and
    /// stay lent there.
    pub fn give_back(&mut self, slab: Slab) -> Result<(), WorkerError> {
        slab.check_lender(self.session.number())?;
        self.tables[slab.table().0 as usize].take_back(slab);
        self.note_lent();
        Ok(())
    }

    /// Sends the gradients of the current clock and asks for the parameters that follow them, for several tables in
    /// one go. On success the slabs are taken; on an error they stay where they are, and nothing was sent.
    ///
    /// Gradients are checked for NaN and Inf by the servers only: a pass over them here would cost as much as sending
    /// them.
    pub fn exchange(&mut self, now: Time, slabs: &mut Vec<Slab>) -> Result<Ticket, WorkerError> {
        let mut submission = self.begin_exchange(slabs)?;
        submission.prepare(&Alone);
        self.finish(now, &mut submission).inspect_err(|_| *slabs = submission.take_slabs())
    }

    /// Begins [`Worker::exchange`], and takes the slabs unless there is an error: [`Submission::prepare`] comes next, which
    /// needs no worker, and then [`Worker::finish`].
    pub fn begin_exchange(&mut self, slabs: &mut Vec<Slab>) -> Result<Submission<'static>, WorkerError> {
        self.check_started()?;
        for slab in slabs.iter() {
            slab.check_lender(self.session.number())?;
            self.tables[self.tables.index(slab.table())?].check_clock(self.clock)?;
        }
        let sources = slabs.drain(..).map(|slab| (slab.table().0 as usize, Source::Slab(Some(slab))));
        Ok(self.begin_submission(SubmissionKind::Exchange, sources))
    }

    /// Whether a driver is receiving into slabs of a ticket at this moment, so that what is in them is not known. After an
    /// error an application waits for a moment before it redeems such a ticket.
    pub fn is_landing(&self, ticket: Ticket) -> bool {
        let slabs = self.tickets.get(ticket).map_or(&[][..], Pending::slabs);
        slabs.iter().any(|slab| self.tables[slab.table.0 as usize].is_landing(slab))
    }

    /// The elements of a table in the order in which its parameters come to a slab: those of the first part of so many come first.
    pub fn answer_parts(&self, table: TableId, of: usize) -> Result<Vec<Vec<Range<usize>>>, WorkerError> {
        Ok(self.tables[self.tables.index(table)?].layout().answer_parts(of))
    }

    /// Whether a share of the parameters is in the slabs of an exchange that is under way. It stays there, unless
    /// [`Worker::is_repeated`] says otherwise when the exchange is over.
    pub fn has_share(&self, ticket: Ticket, share: Share) -> bool {
        let mut its = self.requests.values().filter(|request| request.ticket() == ticket);
        its.all(|request| request.has_share(self.tables[request.table()].layout(), share))
    }

    /// Whether some of an answer was here when it began anew, so that what was seen of a share may not be what came in the end.
    pub fn is_repeated(&self, ticket: Ticket) -> bool {
        self.tickets.get(ticket).is_some_and(Pending::is_repeated)
    }

    /// Forgets a ticket of an exchange and returns its slabs.
    ///
    /// After an error, answers may still be on their way into the buffers; then these are not used again, and the slabs
    /// have others. See [`Worker::is_landing`].
    pub fn redeem_slabs(&mut self, ticket: Ticket) -> Vec<Slab> {
        let slabs = self.tickets.redeem(ticket).slabs;
        slabs.into_iter().map(|slab| self.end_exchange(slab)).collect()
    }

    /// Ends the iteration.
    pub fn clock(&mut self) {
        self.scheduler.end_iteration(self.clock);
        self.clock += 1;
        self.reporter.set_clock(self.clock);
        self.partial_pulls.turn(self.clock);
        self.publish_partial();
        self.report_pushed();
    }

    /// Waits for all live workers to reach the same name.
    pub fn barrier(&mut self, now: Time, name: &str) -> Result<Ticket, WorkerError> {
        self.check_started()?;
        self.barriers.check(name, |ticket| self.tickets.contains(ticket))?;
        let ticket =
            self.tickets.open(Pending::new(TicketKind::Barrier(name.to_owned()), now).expecting(0, 1));
        let number = self.barriers.arrive(name, ticket);
        if let Some(number) = number.filter(|_| self.session.coordinator().is_up()) {
            self.session.tell_coordinator(&Control::Barrier { name: name.to_owned(), number });
        }
        Ok(ticket)
    }

    /// Asks the coordinator how the job stands.
    pub fn query_status(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.check_alive()?;
        let ticket = self.tickets.open_status(now);
        if self.session.coordinator().is_up() {
            self.session.tell_coordinator(&Control::StatusQuery);
        }
        Ok(ticket)
    }

    /// Asks the coordinator which policies the job begins with, also before `start`.
    pub fn query_policies(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.check_alive()?;
        let ticket = self.tickets.open_policies(now);
        if self.session.coordinator().is_up() {
            self.session.tell_coordinator(&Control::PoliciesQuery);
        }
        Ok(ticket)
    }

    /// The policies that [`Worker::query_policies`] asked for under this ticket, once.
    pub fn take_policies(&mut self, ticket: Ticket) -> Option<JobPolicies> {
        self.tickets.take_policies(ticket)
    }

    /// The status that [`Worker::query_status`] asked for under this ticket, once.
    pub fn take_status(&mut self, ticket: Ticket) -> Option<Status> {
        self.tickets.take_status(ticket)
    }

    /// The application evaluates conditions of this name from now on. Servers ask worker 0 only.
    pub fn judge(&mut self, condition: &str) {
        self.rulings.judge(condition);
    }

    /// Whether servers ask about pulls.
    pub fn has_questions(&self) -> bool {
        !self.rulings.is_empty()
    }

    /// The next pull that a server asks about; [`Worker::answer`] comes next. Those that are too old to be answered are left out.
    pub fn poll_question(&mut self, now: Time) -> Option<Asked> {
        self.rulings.poll(now)
    }

    /// Whether the pull may be answered; `None` when the condition failed, so that the server decides by itself.
    pub fn answer(&mut self, asked: &Asked, holds: Option<bool>) {
        self.send_verdict(asked.shard, asked.table, asked.question.number, holds);
    }

    /// Leaves the job; the others go on without this worker.
    pub fn leave(&mut self, now: Time) -> Ticket {
        let ticket = self.tickets.open_leave(now);
        self.say_leave();
        ticket
    }

    /// Whether a ticket is due, and how it ended. `None`: wait on.
    pub fn outcome(&self, ticket: Ticket) -> Option<Result<(), WorkerError>> {
        let Some(pending) = self.tickets.get(ticket) else {
            return Some(Err(WorkerError::Order("this handle was waited for already".into())));
        };
        let is_leave = matches!(pending.kind(), TicketKind::Leave);
        if is_leave && (self.session.has_left() || !pending.is_open()) {
            return Some(Ok(()));
        }
        if let Some(error) = pending.error().or(self.session.failure()) {
            return Some(Err(error.clone()));
        }
        // PSP-SGD: a push is not waited for either, as long as the gradients under way do not pile up.
        let may_go_on = pending.partial().is_some_and(|clock| self.partial_pulls.is_open(clock))
            && self.requests.clocks_unacknowledged() <= limits::MAX_CLOCKS_UNACKNOWLEDGED;
        (may_go_on || !pending.is_open()).then_some(Ok(()))
    }

    /// Forgets a ticket that is due (or no longer wanted) and returns the rows that it brought.
    pub fn redeem(&mut self, ticket: Ticket) -> Vec<f32> {
        let brought = self.tickets.redeem(ticket);
        for slab in brought.slabs {
            let slab = self.end_exchange(slab);
            self.give_back(slab).expect("this worker lent it");
        }
        brought.rows
    }

    /// A sentence about a ticket's wait: which servers, which table, since when.
    pub fn explain(&self, now: Time, ticket: Ticket) -> String {
        let Some(pending) = self.tickets.get(ticket) else { return "nothing".into() };
        let waits_for = pending.kind().sentence(|table| self.tables[table].name());
        let is_start = self.tickets.start() == Some(ticket);
        let mut sentence = self.session.explain(now.since(pending.since()), waits_for, is_start);
        let silent = self.requests.silent_servers(ticket, &self.session);
        if !silent.is_empty() {
            sentence += &format!("; {}", silent.join(", "));
        }
        sentence
    }

    // For drivers with several loops.

    /// The next output for a loop. Its connections, and with them its outputs, are its own for as long as the worker lives.
    pub fn poll_output_of(&mut self, lane: usize) -> Option<Output> {
        self.session.poll_output(lane)
    }

    /// [`Role::backlog_bytes`] of the outputs for a loop.
    pub fn backlog_bytes_of(&self, lane: usize) -> usize {
        self.session.backlog_bytes(lane)
    }

    /// The loops that outputs wait for, one bit each.
    pub fn lanes_with_outputs(&self) -> u64 {
        self.session.lanes_with_outputs()
    }

    fn check_alive(&self) -> Result<(), WorkerError> {
        self.session.failure().cloned().map_or(Ok(()), Err)
    }

    fn check_started(&self) -> Result<(), WorkerError> {
        self.check_alive()?;
        if self.session.plan().is_none() {
            return Err(WorkerError::Order("call `start` and wait for it first".into()));
        }
        Ok(())
    }

    // Requests.

    /// Begins to submit gradients of the current clock, each of the table with this index.
    fn begin_submission<'a>(
        &mut self,
        kind: SubmissionKind,
        sources: impl IntoIterator<Item = (usize, Source<'a>)>,
    ) -> Submission<'a> {
        let (clock, allocator) = (self.clock, self.allocation.allocator());
        let tables = &mut self.tables;
        let begin = |(table, source)| tables[table].begin_submission(table, source, clock, allocator);
        let parts = sources.into_iter().map(begin).collect();
        self.submitting.push(clock);
        Submission { clock, kind, parts, error: None }
    }

    /// The tables have their codecs again.
    fn end_submission(&mut self, submission: &mut Submission<'_>) {
        for part in &mut submission.parts {
            self.tables[part.table].end_submission(part);
        }
        if let Some(index) = self.submitting.iter().position(|clock| *clock == submission.clock) {
            self.submitting.swap_remove(index);
        }
    }

    /// Sends gradients of a clock to all shards of their tables, under one ticket that is due when all servers have them and
    /// all parameters that are wanted are here.
    fn submit(&mut self, pending: Pending, clock: Clock, pushes: Vec<TablePush>) -> Ticket {
        let ticket = self.tickets.reserve();
        let (mut acks, mut answers) = (0, 0);
        for TablePush { table, gradient, reply } in pushes {
            let shards: Vec<ShardId> = self.tables[table].layout().shards().collect();
            acks += shards.len();
            answers += if reply.is_some() { shards.len() } else { 0 };
            for shard in shards {
                let (gradient, want_params) = (Some(gradient.clone()), reply.is_some());
                let kind = RequestKind::Push { gradient, want_params };
                self.request(Request::new(shard, table, clock, ticket, kind).with_reply(reply));
            }
        }
        self.tickets.file(ticket, pending.expecting(acks, answers));
        ticket
    }

    /// Files a request and sends it if its server is connected.
    fn request(&mut self, request: Request) {
        let shard = request.shard();
        let id = self.requests.insert(request);
        if self.session.is_up(shard) {
            self.send_request(id);
        }
    }

    fn send_request(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(id) else { return };
        self.tickets.begin_answer(request.ticket(), request.has_begun());
        let table = &self.tables[request.table()];
        // A later epoch would say nothing more, and an aggregator may not know it yet.
        let (epoch, layout) = (table.valid_from(), table.layout());
        let context = request::Context { id, epoch, scheduler: &self.scheduler, layout };
        let to = self.session.connection(request.shard());
        let (session, reporter) = (&mut self.session, &mut self.reporter);
        request.frames(&context, &mut |frame| {
            if frame.header.kind == Kind::Push {
                reporter.note_pushed(frame.header.payload_bytes);
            }
            session.send(to, frame);
        });
    }

    /// The request that a server speaks of, if it was asked of this server.
    fn request_to(&mut self, shard: ShardId, id: u64) -> Option<&mut Request> {
        self.requests.get_mut(id).filter(|request| request.shard() == shard)
    }

    /// Forgets a request whose answer will not come.
    fn drop_request(&mut self, id: u64) -> Option<Request> {
        let request = self.requests.remove(id)?;
        if let Some(fetch) = request.fetch().filter(|_| request.wants_params()) {
            self.tables[request.table()].settle(fetch, request.shard());
        }
        Some(request)
    }

    fn end_exchange(&mut self, slab: SlabInFlight) -> Slab {
        let local = &mut self.tables[slab.table.0 as usize];
        local.end_exchange(slab, self.session.number(), &**self.allocation.allocator())
    }

    /// A table that is lent arrives whole, by exchanges: it is not among the blocks of a partial pull. The coordinator is
    /// told, because it refuses to switch such a table to one.
    fn note_lent(&mut self) {
        self.reporter.set_slabs(self.tables.lent());
        self.reporter.hurry(Time::ZERO);
        self.count_blocks();
    }

    fn count_blocks(&mut self) {
        self.partial_pulls.set_blocks(self.tables.iter().filter_map(LocalTable::partial_blocks));
    }

    /// Blocks of partial pulls become visible where the worker may go on without the others.
    fn publish_partial(&mut self) {
        let partial_pulls = &self.partial_pulls;
        self.tables.iter_mut().for_each(|table| table.publish_partial(|clock| partial_pulls.is_open(clock)));
    }

    // Frames from shards.

    fn handle_shard_frame(&mut self, now: Time, from: ShardId, header: &Header, payload: &[u8]) {
        match header.kind {
            Kind::PushAck => match ack::requests(header, payload) {
                Ok(requests) => requests.for_each(|request| self.take_acknowledgement(from, request)),
                Err(error) => self.session.log(error.to_string()),
            },
            Kind::Params => self.take_params(now, from, header, Payload::Bytes(payload)),
            Kind::Error => match control::decode::<Fault>("error", payload) {
                Ok(fault) => self.take_fault(from, header.request, fault),
                Err(error) => self.session.log(error.to_string()),
            },
            Kind::Control => match control::decode("control message", payload) {
                Ok(Control::Question { table, question }) => self.take_question(now, from, table, *question),
                Ok(other) => self.session.log(format!("ignored a `{}` message from {from}", other.name())),
                Err(error) => self.session.log(error.to_string()),
            },
            other => self.session.log(format!("ignored a {other:?} frame from {from}")),
        }
    }

    /// A server asks whether a pull may be answered.
    fn take_question(&mut self, now: Time, from: ShardId, table: TableId, question: Question) {
        let number = question.number;
        let is_filed = self.tables.get(table).is_some_and(|local| {
            let table_name = local.name().to_owned();
            self.rulings.ask(now, Asked { shard: from, table, table_name, question })
        });
        if !is_filed {
            self.send_verdict(from, table, number, None);
        }
    }

    fn send_verdict(&mut self, to: ShardId, table: TableId, number: u64, holds: Option<bool>) {
        // A server that is not connected has decided by itself.
        if self.session.is_up(to) {
            let message = control::frame(Kind::Control, &Control::Verdict { table, number, holds });
            self.session.send(self.session.connection(to), message);
        }
    }

    fn take_acknowledgement(&mut self, from: ShardId, id: u64) {
        let Some(request) = self.request_to(from, id) else { return };
        let ticket = request.ticket();
        let Some(acknowledged) = self.requests.acknowledge(id) else { return };
        if let Some(pending) = self.tickets.get_mut(ticket) {
            pending.acknowledged();
        }
        if acknowledged.is_settled {
            self.requests.remove(id);
        } else if self.requests.get(id).is_some_and(Request::waits_for_scheduler) {
            // The scheduler may have released its pull already.
            self.send_request(id);
        }
        self.report_pushed();
        self.say_leave();
    }

    fn take_params(&mut self, now: Time, from: ShardId, header: &Header, payload: Payload<'_>) {
        let params = Params::decode(header);
        let (clock, id) = (self.clock, params.subject.request);
        let Some(request) = self.requests.get_mut(id) else { return };
        // An answer under codecs that hold no more, or that this worker has yet to hear of: it is asked for again.
        let is_stale = params.subject.epoch != self.tables[request.table()].valid_from();
        if request.shard() != from || !request.wants_params() || is_stale {
            return;
        }
        if params.piece.sequence == 0 {
            self.tickets.begin_answer(request.ticket(), request.has_begun());
        }
        self.reporter.note_pulled(header.payload_bytes);
        let (ticket, table, fetch) = (request.ticket(), request.table(), request.fetch());
        let local = &mut self.tables[table];
        let push = ServerPush { clock, version: params.version };
        // The first values are needed, however old they are.
        let is_start = self.tickets.start() == Some(ticket);
        let is_late = request.is_conditional() && !is_start && !local.takes(&push);
        let rows = self.tickets.get_mut(ticket).map_or(&mut [][..], Pending::rows_mut);
        let payload_bytes = header.payload_bytes;
        let taken =
            request.take_params(local, Answer { params: &params, payload, payload_bytes, is_late, rows });
        if taken.is_ok() && !params.piece.is_last {
            return;
        }
        if taken.is_ok() {
            // A server that answers a push with the parameters that follow it has the push.
            self.take_acknowledgement(from, id);
        }
        if self.requests.get_mut(id).is_some_and(Request::end_answer) {
            self.requests.remove(id);
        }
        let is_whole = taken.is_ok() && !is_late;
        if let Some(pending) = self.tickets.get_mut(ticket) {
            match taken {
                Err(error) => pending.fail(error),
                Ok(()) => {
                    pending.answered();
                    let counts = |clock: &Clock| *clock >= self.partial_pulls.clock();
                    if let Some(clock) = pending.partial().filter(counts) {
                        self.partial_pulls.arrived(now, clock);
                    }
                }
            }
        }
        let Some(fetch) = fetch else { return };
        let (local, partial_pulls) = (&mut self.tables[table], &self.partial_pulls);
        if is_whole {
            local.arrived(fetch, from, |clock| partial_pulls.is_open(clock));
        } else {
            local.settle(fetch, from);
        }
        // The block may be the one that lets the worker go on with all tables.
        if local.partial_pull().is_some() {
            self.publish_partial();
        }
    }

    fn take_fault(&mut self, from: ShardId, id: u64, mut fault: Fault) {
        fault.message = control::sentence(fault.message);
        if fault.cause == Cause::NotAMember {
            return self.session.fail(WorkerError::NotAMember(fault.message));
        }
        if fault.cause == Cause::StaleEpoch {
            // The change that made the frame stale is on its way; what is under way is sent again then.
            return;
        }
        let Some(request) = self.request_to(from, id) else { return self.session.log(fault.message) };
        let counted = request.counted();
        let was_taken = self.requests.acknowledge(id).is_none();
        let Some(request) = self.drop_request(id) else { return };
        // The worker may have re-sent this push.
        let is_it = |other: &Request| other.is_same_push(&request) && other.must_be_sent();
        let is_sent_again = counted.is_some() && self.requests.values().any(is_it);
        let local = &mut self.tables[request.table()];
        // An encoded gradient is finite, so an aggregator's sum with it was refused. Other chunks of that sum were taken, and
        // the gradient does not go back to the residual.
        let goes_back = !is_sent_again && fault.cause != Cause::NonFinite;
        if let Some(gradient) = counted.filter(|_| goes_back) {
            local.note_refused(request.clock(), from, gradient);
        }
        if !was_taken {
            local.forget_pushed(request.clock());
        }
        let error = WorkerError::Refused { cause: fault.cause, message: fault.message };
        self.tickets.fail(request.ticket(), error);
        self.report_pushed();
        self.say_leave();
    }

    // Messages from the coordinator.

    fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(now, *plan),
            Control::Go { clock } => self.release(clock),
            Control::BarrierReached { name } => {
                if let Some(ticket) = self.barriers.reached(&name) {
                    self.tickets.answered(ticket);
                }
            }
            Control::Status(status) => self.tickets.set_status(&status),
            Control::Policies(policies) => self.tickets.set_policies(&policies),
            Control::Change { epoch, change } => self.take_change(epoch, &change),
            Control::Left => self.tickets.left(),
            Control::Waiting { reason } => self.session.set_join_waits(control::sentence(reason)),
            Control::Stop { error } => {
                let why = error.map_or_else(|| "the job is over".into(), control::sentence);
                self.session.fail(WorkerError::NotAMember(why));
            }
            other => {
                self.session.log(format!("ignored a `{}` message from the coordinator", other.name()));
            }
        }
    }

    /// The whole plan: the first one, or one that may tell of changes that were lost with a connection.
    fn take_plan(&mut self, now: Time, plan: Plan) {
        let Some(known) = self.session.plan() else { return self.begin(now, plan) };
        for (epoch, change) in known.changes_to(&plan) {
            self.apply_change(epoch, &change);
        }
    }

    fn take_change(&mut self, epoch: u32, change: &Change) {
        // Without a plan the whole of it is still to come. Epochs that are about other workers are left out.
        let Some(plan) = self.session.plan().filter(|plan| plan.epoch < epoch) else { return };
        match plan.check_change(change) {
            Ok(()) => self.apply_change(epoch, change),
            Err(why) => {
                let sentence = format!("the coordinator's change of the plan cannot be used: {why}");
                self.session.fail(WorkerError::Table(sentence));
            }
        }
    }

    /// The one way from an epoch to the next.
    fn apply_change(&mut self, epoch: u32, change: &Change) {
        self.session.apply(epoch, change);
        match change {
            // A worker that is declared dead hears it from the nodes that refuse it.
            Change::Joining { .. } | Change::Joined { .. } | Change::Left { .. } => {}
            Change::Policy(rule) => self.follow(rule),
        }
    }

    /// The plan is here: cut the tables, connect to the shards, exchange initial values.
    fn begin(&mut self, now: Time, plan: Plan) {
        let (Some(ticket), None) = (self.tickets.start(), self.session.failure()) else { return };
        // The plan of a job that this worker is not in yet is followed by another one.
        let Some(first) = self.session.first_clock(&plan) else { return };
        self.allocation.choose(self.session.peers(&plan));
        let worker = self.session.id().map_or(0, |id| id.0);
        match self.tables.plan(&plan, &self.registry, worker, self.allocation.allocator()) {
            Ok(overlap) => self.scheduler.restrict(overlap),
            Err(error) => return self.session.fail(error),
        }
        self.session.enter(now, plan, &self.tables.shards());
        self.count_blocks();
        self.clock = first;
        self.reporter.set_clock(first);
        self.partial_pulls.turn(first);
        if let Some(before) = first.checked_sub(1) {
            self.scheduler.release(before);
        }
        // Also when it joins: its predecessor may have died before its values had arrived. Shards that have them ignore these.
        let is_first = self.session.id() == Some(WorkerId::FIRST);
        let (mut acks, mut answers) = (0, 0);
        for index in 0..self.tables.len() {
            let local = &mut self.tables[index];
            let initial = local.take_initial();
            // Of a sparse table no rows: it answers all the same once it has its initial values.
            let is_sparse = local.layout().is_sparse();
            let reply = (!is_sparse).then(|| local.begin_pull(first, false));
            let shards: Vec<ShardId> = local.layout().shards().collect();
            if is_first {
                acks += shards.len();
                let values = local.lend_copy(&initial, &**self.allocation.allocator());
                for &shard in &shards {
                    let kind = RequestKind::Init { values: Some(values.clone()) };
                    self.request(Request::new(shard, index, 0, ticket, kind));
                }
            }
            answers += shards.len();
            for &shard in &shards {
                let kind = RequestKind::Pull { rows: is_sparse.then(Vec::new), now: false };
                self.request(Request::new(shard, index, first, ticket, kind).with_reply(reply));
            }
        }
        // The application may have given the ticket up.
        self.tickets.expect(ticket, acks, answers);
        self.handle_timeout(now);
    }

    /// Lets the plan's policies hold for the tables that a rule is about. Where they change what frames mean, everything
    /// that is under way is sent again: servers take none of it as it was, and begin their answers anew.
    fn follow(&mut self, rule: &PolicyOverride) {
        let Some(plan) = self.session.plan() else { return };
        let changed = self.tables.changed_frames(plan);
        let under_way = self.requests.numbers(|request| changed.contains(&request.table()));
        for &id in &under_way {
            if let Some(request) = self.requests.get_mut(id) {
                request.leave_codec(&self.tables[request.table()]);
            }
        }
        let worker = self.session.id().map_or(0, |id| id.0);
        match self.tables.follow(plan, &self.registry, worker, rule) {
            Ok(notes) => notes.into_iter().for_each(|note| self.session.log(note)),
            Err(error) => return self.session.fail(error),
        }
        self.count_blocks();
        for &id in &under_way {
            if let Some(request) = self.requests.get_mut(id) {
                request.check_place(&self.tables[request.table()]);
            }
        }
        under_way.into_iter().for_each(|id| self.send_again(id));
    }

    /// Sends a request once more if its server is connected. A pull whose ticket was given up is not
    /// asked again (blocks that PSP went on without).
    fn send_again(&mut self, id: u64) {
        let Some(request) = self.requests.get(id) else { return };
        if !request.must_be_sent() && !self.tickets.contains(request.ticket()) {
            self.drop_request(id);
        } else if self.session.is_up(request.shard()) {
            self.send_request(id);
        }
    }

    /// Without overlap: pulls after this clock may be sent.
    fn release(&mut self, clock: Clock) {
        self.scheduler.release(clock);
        // A push that is under way is not sent a second time; its pull follows the acknowledgement.
        let is_ready = |request: &Request| request.waits_for_scheduler() && !request.must_be_sent();
        self.requests.numbers(is_ready).into_iter().for_each(|id| self.send_request(id));
    }

    /// Without overlap: tells the coordinator of clocks whose pushes all servers have acknowledged.
    fn report_pushed(&mut self) {
        let submitting = self.submitting.iter().copied().min();
        let oldest = self.requests.oldest_unacknowledged().into_iter().chain(submitting).min();
        while let Some(clock) = self.scheduler.next_report(oldest) {
            self.session.tell_coordinator(&Control::Pushed { clock });
        }
    }

    fn send_declaration(&mut self) {
        let tables = self.tables.specs().cloned().collect();
        self.session.tell_coordinator(&Control::Declare { tables });
    }

    /// After a (new) connection to the coordinator: says again what it may have missed.
    fn resume_with_coordinator(&mut self, now: Time) {
        self.reporter.hurry(now);
        if self.tickets.start().is_some() && self.session.plan().is_none() {
            self.send_declaration();
        }
        for (number, name) in self.barriers.unreached() {
            self.session.tell_coordinator(&Control::Barrier { name, number });
        }
        if self.tickets.wants_policies() {
            self.session.tell_coordinator(&Control::PoliciesQuery);
        }
        if self.tickets.wants_status() {
            self.session.tell_coordinator(&Control::StatusQuery);
        }
        if let Some(clock) = self.scheduler.repeat(self.clock) {
            self.session.tell_coordinator(&Control::Pushed { clock });
        }
        self.say_leave();
    }

    /// Leaves once every server has what was pushed: one that hears of the leave first would refuse the rest.
    fn say_leave(&mut self) {
        let is_due = self.tickets.is_leaving() && self.session.coordinator().is_up();
        if is_due && self.submitting.is_empty() && !self.requests.values().any(Request::must_be_sent) {
            self.session.say_leave();
        }
    }

    /// After a (new) connection to a shard: sends again what it may have missed.
    fn resume_with_shard(&mut self, shard: ShardId) {
        let mine = self.requests.numbers(|request| request.shard() == shard);
        mine.into_iter().for_each(|id| self.send_again(id));
    }
}

impl Role for Worker {
    fn node(&self) -> Option<NodeId> {
        self.session.id().map(NodeId::Worker)
    }

    fn accept(&mut self, _now: Time, _hello: &Hello) -> Result<Welcome, Refusal> {
        Err(Refusal { reason: "a worker takes no connections".into(), retry: false })
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        self.session.hello(connection)
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        if let Some(shard) = connection.shard() {
            self.session.shard_connected(shard);
            self.resume_with_shard(shard);
        } else {
            self.session.coordinator_connected(welcome);
            self.resume_with_coordinator(now);
        }
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        if why.is_final() {
            return self.session.fail(WorkerError::NotAMember(format!("{connection} {why}")));
        }
        self.session.disconnected(now, connection, why);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        match (connection.shard(), header.kind) {
            (Some(shard), _) => self.handle_shard_frame(now, shard, header, payload),
            (None, Kind::Control) => match control::decode("control message", payload) {
                Ok(message) => self.handle_control(now, message),
                Err(error) => {
                    self.session.fail(WorkerError::NotAMember(format!("the coordinator: {error}")));
                }
            },
            (None, Kind::Error) => match control::decode::<Fault>("error", payload) {
                Ok(Fault { cause, message }) => {
                    self.session.fail(WorkerError::Refused { cause, message: control::sentence(message) });
                }
                Err(error) => self.session.log(error.to_string()),
            },
            (None, kind) => self.session.log(format!("ignored a {kind:?} frame from {connection}")),
        }
    }

    fn landing(
        &mut self,
        connection: ConnectionId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        let shard = connection.shard()?;
        let params = Some(header).filter(|header| header.kind == Kind::Params).map(Params::decode)?;
        let request = self.requests.get(params.subject.request).filter(|request| request.shard() == shard)?;
        let local = &mut self.tables[request.table()];
        let is_current = params.subject.epoch == local.valid_from();
        let fetch = request.foresee(&params, local.layout(), frames, places).filter(|_| is_current)?;
        places.first().filter(|place| place.may_have(header.payload_bytes as usize))?;
        local.destination(Some(fetch), shard, params.form.is_encoded())
    }

    fn handle_landed(&mut self, now: Time, connection: ConnectionId, header: &Header) {
        if let Some(shard) = connection.shard() {
            self.take_params(now, shard, header, Payload::InPlace);
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.session.failure().is_some() {
            return;
        }
        self.partial_pulls.handle_timeout(now);
        self.publish_partial();
        self.session.handle_timeout(now);
        if self.session.coordinator().is_up() && self.reporter.due() <= now {
            let waiting = self.tickets.oldest_open().map(|ticket| self.explain(now, ticket));
            let report = self.reporter.take(now, waiting);
            self.session.tell_coordinator(&Control::WorkerReport(report));
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.session.failure().is_some() {
            return None;
        }
        let report = self.session.coordinator().is_up().then_some(self.reporter.due());
        [self.session.next_timeout(), report, self.partial_pulls.next_timeout()].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.session.poll_any_output()
    }

    fn backlog_bytes(&self) -> usize {
        self.session.total_backlog_bytes()
    }

    fn check(&self) -> Result<(), String> {
        self.session.check()?;
        self.requests.check()?;
        for (index, table) in self.tables.iter().enumerate() {
            let brings_block = |request: &&Request| {
                request.table() == index && request.fetch().is_some() && request.wants_params()
            };
            table.check(self.requests.values().filter(brings_block).count())?;
        }
        self.tickets.check(self.session.plan().is_some(), |ticket| {
            let its = || self.requests.values().filter(|request| request.ticket() == ticket);
            let acks = its().filter(|request| request.wants_ack()).count();
            Outstanding { acks, answers: its().filter(|request| request.wants_params()).count() }
        })
    }
}
