//! A worker as a state machine: it declares tables, pushes gradients, pulls parameters, keeps its clock.
//!
//! Methods come in five families. Getters ([`Worker::values`], [`Worker::outcome`]) look. Mutators
//! ([`Worker::declare`], [`Worker::start`], [`Worker::push`], [`Worker::pull`], [`Worker::clock`]) are what the
//! application asks for; each returns a [`Ticket`] to wait on. `handle_*` and `poll_*` are the driver's ([`Role`]).
//! Conditions of the application have some that return no tickets: [`Worker::judge`], [`Worker::poll_question`], [`Worker::answer`].
//!
//! A request stays until its server answered it, and is sent again when a broken connection is made anew; the
//! servers apply it once.

mod allocation;
mod answers;
mod awaited;
mod barriers;
mod copies;
mod encoding;
mod error;
mod fetch;
mod gradient;
mod holder;
mod iteration;
mod keeping;
mod layout;
mod links;
mod local_table;
mod memory;
mod missing;
mod models;
mod partial_pull;
mod reporter;
mod request;
mod requests;
mod restoring;
mod rulings;
mod saving;
mod scheduler;
mod session;
mod slab;
mod staged_updates;
mod staging;
mod streams;
mod submission;
mod tables;
mod ticket;
mod traffic;
mod waiting;

pub use error::WorkerError;
pub use gradient::{Gradient, PullOptions};
pub use layout::Share;
pub use rulings::Asked;
pub use session::{Access, Loops, WorkerConfig};
pub use slab::{Prepared, Slab};
pub use submission::Submission;
pub use ticket::Ticket;

use crate::address::Addresses;
use crate::checkpoint::{Request as ArchiveRequest, Response, WorkerCut};
use crate::consistency::Question;
use crate::hands::Alone;
use crate::landing::{Destination, Landing};
use crate::lease::Lease;
use crate::limits;
use crate::policy::{Axis, JobPolicies};
use crate::registry::Registry;
use crate::role::{Lost, Output, Role};
use crate::status::{Status, WorkerReport};
use crate::store::Allocate;
use crate::stream::Replica;
use crate::table::{Pack, TableSpec};
use crate::types::{Clock, ConnectionId, NodeId, ShardId, TableId, Time, WorkerId};
use crate::waits::WaitCause;
use crate::wire::{
    Change, CheckpointOrder, Control, DType, Fault, FilePart, Header, Hello, Kind, Plan, Refusal, Welcome,
};
use crate::wire::{ack, control};
use barriers::{Barriers, Said};
use local_table::LocalTable;
use missing::Missing;
use request::Payload;
use restoring::{Restoring, Step};
use rulings::Rulings;
use saving::{Position, Saving};
use session::Session;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use submission::{Source, SubmissionKind};
use ticket::{Pending, TicketKind};
use traffic::Traffic;

/// One worker of a job.
#[derive(Debug)]
pub struct Worker {
    registry: Arc<Registry>,
    session: Session,
    traffic: Traffic,
    barriers: Barriers,
    idle: Said,
    rulings: Rulings,
    /// Whether its application makes the steps that the policy `local` asks for.
    steps_locally: bool,
    saving: Saving,
    /// What it takes over of a checkpoint before its start is complete.
    restoring: Option<Restoring>,
    /// The notes that it took over.
    noted: BTreeMap<String, Vec<u8>>,
}

impl Worker {
    /// A worker that is about to join.
    pub fn new(now: Time, config: WorkerConfig, registry: Arc<Registry>) -> Worker {
        Worker {
            registry,
            session: Session::new(now, config),
            traffic: Traffic::new(now),
            barriers: Barriers::default(),
            idle: Said::default(),
            rulings: Rulings::default(),
            steps_locally: false,
            saving: Saving::default(),
            restoring: None,
            noted: BTreeMap::new(),
        }
    }

    /// Takes large buffers from `memory` instead of the heap if there is a server with an address that begins with
    /// `host`: one that can share them.
    pub fn with_shared_memory(mut self, host: String, memory: Arc<dyn Allocate>) -> Worker {
        self.traffic.offer_shared(host, memory);
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
        self.traffic.current_clock()
    }

    /// Whether rounds may close without this worker, which then leaves their iterations out.
    pub fn leaves_out(&self) -> bool {
        self.traffic.tables().catch_up()
    }

    /// Bytes moved so far.
    pub fn report(&self) -> WorkerReport {
        self.traffic.report()
    }

    /// Gradients refused here for NaN or Inf.
    pub fn nonfinite(&self) -> u64 {
        self.traffic.tables().iter().map(LocalTable::nonfinite_seen).sum()
    }

    /// The version of the oldest part of a dense table's parameters.
    pub fn version(&self, table: TableId) -> Option<Clock> {
        self.traffic.tables().get(table).and_then(LocalTable::version)
    }

    /// The table's parameters as last pulled; empty for a sparse table, and while they are lent.
    pub fn values(&self, table: TableId) -> &[f32] {
        self.traffic.tables().get(table).map_or(&[], LocalTable::values)
    }

    /// Of a reader: the version that its tables are at, over all servers; `None` before the first, and while one that was damaged is
    /// fetched anew.
    pub fn staged_version(&self) -> Option<Clock> {
        self.traffic.staged_version()
    }

    /// Of a reader: the tables of the job, once the plan is here.
    pub fn tables(&self) -> impl Iterator<Item = &TableSpec> {
        self.traffic.tables().specs()
    }

    /// Of a reader: a table's values at [`Worker::staged_version`], also when the job is over; the error says why there are none.
    pub fn staged(&self, table: TableId) -> Result<&[f32], WorkerError> {
        let replica = self.traffic.tables().find(table)?.replica();
        let replica = replica.filter(|_| self.staged_version().is_some());
        replica.map(Replica::values).ok_or(WorkerError::NoVersion)
    }

    /// Of a reader: the type of elements that a table's values were rounded to before they were broadcast.
    pub fn staged_type(&self, table: TableId) -> Result<DType, WorkerError> {
        Ok(self.traffic.tables().find(table)?.staged_type())
    }

    /// The same, to be read without holding the worker; the error says why there is nothing to read.
    pub fn shared_values(&self, table: TableId) -> Result<Lease, WorkerError> {
        self.session.check_started()?;
        self.traffic.tables().find(table)?.read()
    }

    /// Bytes held for parameters and gradients under way.
    pub fn memory_bytes(&self) -> usize {
        self.traffic.memory_bytes()
    }

    /// The codec that a table's gradients travel by; empty without one.
    pub fn codec(&self, table: TableId) -> Result<String, WorkerError> {
        self.session.check_started()?;
        Ok(self.traffic.tables().find(table)?.codec())
    }

    /// The type that a slab of a table which takes halves gets its parameters as; none where the answer codec makes something else of them.
    pub fn answer_type(&self, table: TableId) -> Result<Option<DType>, WorkerError> {
        Ok(self.traffic.tables().find(table)?.slab_type())
    }

    /// Whether a ticket waits for more than acknowledgements, which do not depend on other workers.
    pub fn awaits_answers(&self, ticket: Ticket) -> bool {
        self.traffic.tickets().get(ticket).is_some_and(Pending::awaits_answers)
    }

    /// Whether a gradient of the current clock was pushed, and not refused since.
    pub fn has_pushed(&self, table: TableId) -> bool {
        self.traffic.tables().get(table).is_some_and(|local| local.has_pushed(self.traffic.current_clock()))
    }

    /// What the application had noted under a name when the checkpoint was made that the job goes on from, in this rank or, where the job
    /// has more workers now, in one of those that there were. Known once [`Worker::start`] is done.
    pub fn noted(&self, name: &str) -> Option<&[u8]> {
        self.noted.get(name).map(Vec::as_slice)
    }

    // Requests of the application.

    /// Has bytes saved with checkpoints from now on, in place of those that were noted under this name before; none are no note. A
    /// checkpoint of a clock has what was noted when [`Worker::clock`] brought this worker there.
    pub fn note(&mut self, name: &str, bytes: &[u8]) -> Result<(), WorkerError> {
        self.saving.note(name, bytes)
    }

    /// Declares a table with its initial values. All workers declare the same tables in the same order.
    pub fn declare(&mut self, spec: TableSpec, initial: Vec<f32>) -> Result<TableId, WorkerError> {
        if self.session.access() == Access::ReadOnly {
            return Err(WorkerError::Order("a reader takes the job's tables, and creates none".into()));
        }
        if self.traffic.tickets().start().is_some() {
            return Err(WorkerError::Order("tables are created before `start`".into()));
        }
        self.traffic.tables_mut().declare(spec, initial)
    }

    /// Puts the tables that were declared into packs ([`Pack::divide`]), whose tensors are these tables in their order. From now
    /// on the packs are the tables, in theirs.
    pub fn pack(&mut self, packs: &[Pack]) -> Result<(), WorkerError> {
        if self.traffic.tickets().start().is_some() {
            return Err(WorkerError::Order("tables are packed before `start`".into()));
        }
        self.traffic.tables_mut().pack(packs)
    }

    /// Says, before [`Worker::start`], that the application follows the policy `local`. A job with that policy refuses workers
    /// that do not: they would push gradients where pseudo-gradients are expected, and `h` times as often.
    pub fn step_locally(&mut self) {
        self.steps_locally = true;
    }

    /// Joins: the ticket is due when the plan and the initial values are here.
    pub fn start(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.session.check_alive()?;
        if self.traffic.tickets().start().is_some() {
            return Err(WorkerError::Order("`start` is called once".into()));
        }
        let is_reader = self.session.access() == Access::ReadOnly;
        if self.traffic.tables().is_empty() && !is_reader {
            return Err(WorkerError::Order("create a table before `start`".into()));
        }
        let ticket = self.traffic.tickets_mut().open_start(now);
        self.traffic.begin_reading();
        if self.session.coordinator().is_up() && !is_reader {
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
        self.session.check_started()?;
        let (index, clock) = (self.traffic.tables().index(table)?, self.traffic.current_clock());
        self.traffic.tables_mut()[index].check_layer(layer, gradient, clock, is_finite)
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
        self.session.check_started()?;
        self.check_access(want_params)?;
        let (index, clock) = (self.traffic.tables().index(table)?, self.traffic.current_clock());
        let local = &self.traffic.tables()[index];
        local.check_gradient(&gradient, clock)?;
        let missing = Missing::new(lacks, local.layout().elements()).map_err(WorkerError::Table)?;
        if want_params && local.layout().is_sparse() {
            return Err(WorkerError::Order(format!(
                "table `{}` is sparse: push, then pull the rows that come next",
                local.name()
            )));
        }
        self.save_before_push();
        let source = (index, Source::Given(gradient, missing));
        Ok(self.traffic.begin_submission(SubmissionKind::Push { want_params }, [source]))
    }

    /// Sends what a submission has prepared. On an error nothing is sent, and it has the slabs that it was begun with.
    pub fn finish(&mut self, now: Time, submission: &mut Submission<'_>) -> Result<Ticket, WorkerError> {
        let finished = self.traffic.finish(&mut self.session, now, submission);
        self.save();
        finished
    }

    /// Asks for a table's parameters, or for some of its rows.
    pub fn pull(
        &mut self,
        now: Time,
        table: TableId,
        options: PullOptions<'_>,
    ) -> Result<Ticket, WorkerError> {
        self.session.check_started()?;
        self.check_access(true)?;
        self.traffic.pull(&mut self.session, now, table, options)
    }

    /// Lends a dense table's buffers to the application. Until [`Worker::give_back`], exchanges are the only way to use
    /// the table.
    pub fn slab(&mut self, table: TableId) -> Result<Slab, WorkerError> {
        self.session.check_started()?;
        self.check_access(true)?;
        self.traffic.lend(self.session.number(), table)
    }

    /// Takes lent buffers back: the table is pushed and pulled as others are. Those of another worker are refused, and
    /// stay lent there.
    pub fn give_back(&mut self, slab: Slab) -> Result<(), WorkerError> {
        slab.check_lender(self.session.number())?;
        self.traffic.give_back(slab);
        Ok(())
    }

    /// Sends the gradients of the current clock and asks for the parameters that follow them, for several tables in
    /// one go. On success the slabs are taken; on an error they stay where they are, and nothing was sent.
    ///
    /// Where the consistency model makes a worker's copy a cache, the ticket is due as soon as the values of the slabs are fresh enough.
    /// What is under way then is received beside them, and becomes their values when they are exchanged next.
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
        self.session.check_started()?;
        for slab in slabs.iter() {
            slab.check_lender(self.session.number())?;
            self.traffic.tables().find(slab.table())?.check_clock(self.traffic.current_clock())?;
        }
        self.save_before_push();
        let sources = slabs.drain(..).map(|slab| (slab.table().0 as usize, Source::Slab(Some(slab))));
        Ok(self.traffic.begin_submission(SubmissionKind::Exchange, sources))
    }

    /// Whether a driver is receiving into slabs of a ticket at this moment, so that what is in them is not known. After an
    /// error an application waits for a moment before it redeems such a ticket.
    pub fn is_landing(&self, ticket: Ticket) -> bool {
        self.traffic.is_landing(ticket)
    }

    /// The elements of a table in the order in which its parameters come to a slab: those of the first part of so many come first.
    pub fn answer_parts(&self, table: TableId, of: usize) -> Result<Vec<Vec<Range<usize>>>, WorkerError> {
        Ok(self.traffic.tables().find(table)?.layout().answer_parts(of))
    }

    /// Whether a share of the parameters is in the slabs of an exchange that is under way. It stays there, but for newer ones that may
    /// come after a connection was lost, where the consistency model lets there be newer ones.
    pub fn has_share(&self, ticket: Ticket, share: Share) -> bool {
        self.traffic.has_share(ticket, share)
    }

    /// Forgets a ticket of an exchange and returns its slabs.
    ///
    /// After an error, answers may still be on their way into the buffers; then these are not used again, and the slabs
    /// have others. See [`Worker::is_landing`].
    pub fn redeem_slabs(&mut self, ticket: Ticket) -> Vec<Slab> {
        self.charge(ticket);
        self.traffic.redeem_slabs(self.session.number(), ticket)
    }

    /// Gradients that are pushed from now on are the mean of so many samples, which is their weight in a mean over workers; 1 unless
    /// this was said.
    pub fn set_samples(&mut self, samples: u32) -> Result<(), WorkerError> {
        if !(1..=limits::MAX_SAMPLES).contains(&samples) {
            let most = limits::MAX_SAMPLES;
            return Err(WorkerError::Order(format!(
                "a gradient is the mean of 1 to {most} samples, and not of {samples}"
            )));
        }
        self.traffic.iteration_mut().set_samples(samples);
        Ok(())
    }

    /// Ends the iteration. Where the consistency model lets rounds close without a worker, the next one may be a later one than that after
    /// it: it is known once the parameters are here, and [`Worker::current_clock`] says it.
    pub fn clock(&mut self) {
        self.traffic.clock(&mut self.session);
        self.save();
    }

    /// Of a reader: the ticket is due when all tables are at this version, or a later one.
    pub fn await_version(&mut self, now: Time, version: Clock) -> Result<Ticket, WorkerError> {
        self.session.check_alive()?;
        if self.session.access() != Access::ReadOnly {
            return Err(WorkerError::Order("only a reader waits for versions".into()));
        }
        Ok(self.traffic.await_version(now, version))
    }

    /// Readers push nothing, and those who only write get nothing.
    fn check_access(&self, wants_params: bool) -> Result<(), WorkerError> {
        match self.session.access() {
            Access::ReadOnly => Err(WorkerError::Order("a reader only receives what is broadcast".into())),
            Access::WriteOnly if wants_params => {
                Err(WorkerError::Order("this worker only writes; read the values with a reader".into()))
            }
            _ => Ok(()),
        }
    }

    /// Waits for all live workers to reach the same name.
    pub fn barrier(&mut self, now: Time, name: &str) -> Result<Ticket, WorkerError> {
        self.session.check_started()?;
        if self.session.access() == Access::ReadOnly {
            return Err(WorkerError::Order("nobody waits for a reader at a barrier".into()));
        }
        self.barriers.check(name, |ticket| self.traffic.tickets().contains(ticket))?;
        let ticket = self
            .traffic
            .tickets_mut()
            .open(Pending::new(TicketKind::Barrier(name.to_owned()), now).expecting(0, 1));
        self.barriers.arrive(name, ticket);
        self.say_barriers();
        Ok(ticket)
    }

    /// Tells the coordinator of barriers that this worker has come to. What its application believes to be done is with the servers
    /// by then: others read there what came before the barrier.
    fn say_barriers(&mut self) {
        if !self.barriers.has_untold() || !self.session.coordinator().is_up() || self.traffic.has_unsaved() {
            return;
        }
        for (number, name) in self.barriers.take_untold() {
            self.session.tell_coordinator(&Control::Barrier { name, number });
        }
    }

    /// Tells the coordinator if rounds need not wait for this worker: others would wait with them for ever.
    fn say_idle(&mut self) {
        let until = self.traffic.idle_until();
        let is_reader = self.session.access() == Access::ReadOnly;
        // The coordinator has to know of a barrier first.
        let is_early = until == Clock::MAX && self.barriers.has_untold();
        if !is_reader && !is_early && self.idle.is_news(until) {
            self.session.tell_coordinator(&Control::Idle { until });
        }
    }

    /// Asks the coordinator how the job stands.
    pub fn query_status(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.session.check_alive()?;
        let ticket = self.traffic.tickets_mut().open_status(now);
        if self.session.coordinator().is_up() {
            self.session.tell_coordinator(&Control::StatusQuery);
        }
        Ok(ticket)
    }

    /// Asks the coordinator which policies the job begins with, also before `start`.
    pub fn query_policies(&mut self, now: Time) -> Result<Ticket, WorkerError> {
        self.session.check_alive()?;
        let ticket = self.traffic.tickets_mut().open_policies(now);
        if self.session.coordinator().is_up() {
            self.session.tell_coordinator(&Control::PoliciesQuery);
        }
        Ok(ticket)
    }

    /// The policies that [`Worker::query_policies`] asked for under this ticket, once.
    pub fn take_policies(&mut self, ticket: Ticket) -> Option<JobPolicies> {
        self.traffic.tickets_mut().take_policies(ticket)
    }

    /// The status that [`Worker::query_status`] asked for under this ticket, once.
    pub fn take_status(&mut self, ticket: Ticket) -> Option<Status> {
        self.traffic.tickets_mut().take_status(ticket)
    }

    /// The application evaluates conditions of this name from now on. Servers ask worker 0 only.
    pub fn judge(&mut self, condition: &str) {
        self.rulings.judge(condition);
    }

    /// Whether servers ask about pulls.
    pub fn has_questions(&self) -> bool {
        !self.rulings.is_empty()
    }

    /// The next pull that a server asks about; [`Worker::answer`] comes next. Of those that are too old to be answered the servers only
    /// hear that they may ask again.
    pub fn poll_question(&mut self, now: Time) -> Option<Asked> {
        while let Some((asked, is_waited_for)) = self.rulings.poll(now) {
            if is_waited_for {
                return Some(asked);
            }
            self.answer(&asked, None);
        }
        None
    }

    /// Whether the pull may be answered; `None` when the condition failed, so that the server decides by itself.
    pub fn answer(&mut self, asked: &Asked, holds: Option<bool>) {
        self.send_verdict(asked.shard, asked.table, asked.question.number, holds);
    }

    /// Sends what is held back by the policy `hold`, in an iteration of its own, in which a worker that holds nothing back pushes nothing.
    /// All workers do so after the same iteration, as they would push. No tickets where the policy is not used.
    pub fn flush(&mut self, now: Time) -> Result<Vec<Ticket>, WorkerError> {
        self.session.check_started()?;
        let tables = self.traffic.tables().holding(true);
        if tables.is_empty() {
            return Ok(Vec::new());
        }
        let tickets = self.send_held(now, tables)?;
        self.clock();
        Ok(tickets)
    }

    fn send_held(&mut self, now: Time, tables: Vec<usize>) -> Result<Vec<Ticket>, WorkerError> {
        let clock = self.traffic.current_clock();
        if tables.iter().any(|table| self.traffic.tables()[*table].has_pushed(clock)) {
            self.clock();
        }
        let mut tickets = Vec::with_capacity(tables.len());
        for table in tables {
            let kind = SubmissionKind::Push { want_params: false };
            self.save_before_push();
            let mut submission = self.traffic.begin_submission(kind, [(table, Source::Held)]);
            submission.prepare(&Alone);
            tickets.push(self.finish(now, &mut submission)?);
        }
        Ok(tickets)
    }

    /// Leaves the job; the others go on without this worker. What is held back goes to the servers before.
    pub fn leave(&mut self, now: Time) -> Ticket {
        if self.session.check_started().is_ok() {
            let tables = self.traffic.tables().holding(false);
            match self.send_held(now, tables) {
                // Leaving waits for what has to be sent, whoever waits for the tickets.
                Ok(tickets) => tickets.into_iter().for_each(|ticket| drop(self.redeem(ticket))),
                Err(error) => self.session.log(format!("updates that were held back are lost: {error}")),
            }
        }
        let ticket = self.traffic.tickets_mut().open_leave(now);
        self.traffic.say_leave(&mut self.session);
        ticket
    }

    /// Whether a ticket is due, and how it ended. `None`: wait on.
    pub fn outcome(&self, ticket: Ticket) -> Option<Result<(), WorkerError>> {
        let outcome = self.traffic.outcome(&self.session, ticket);
        outcome.filter(|outcome| outcome.is_err() || !self.is_restored_by(ticket))
    }

    /// Whether a ticket is that of a start which is not complete yet for what is taken over of a checkpoint.
    fn is_restored_by(&self, ticket: Ticket) -> bool {
        self.restoring.is_some() && self.traffic.tickets().start() == Some(ticket)
    }

    /// [`Worker::outcome`] for an application that goes on if it is due. What it reads does not change until its next push, and what
    /// is under way for a cache goes on without it: should that fail, this says so
    /// once of the next ticket of the table, which may then be waited for again, or of that of `leave`.
    pub fn conclude(&mut self, now: Time, ticket: Ticket) -> Option<Result<(), WorkerError>> {
        if self.is_restored_by(ticket) && self.session.failure().is_none() {
            return None;
        }
        self.traffic.conclude(&self.session, now, ticket)
    }

    /// A thread of the application begins to wait for a ticket; [`Worker::end_wait`] comes when it waits no more, before the ticket is
    /// redeemed. The time in between is in the worker's report, with those who were waited for.
    pub fn begin_wait(&mut self, now: Time, ticket: Ticket) {
        let is_open = self.outcome(ticket).is_none();
        let tickets = self.traffic.tickets_mut();
        tickets.begin_wait(now, ticket);
        tickets.get_mut(ticket).filter(|_| is_open).into_iter().for_each(|pending| pending.begin_wait(now));
    }

    /// Ends what [`Worker::begin_wait`] began, whether the ticket is due or not.
    pub fn end_wait(&mut self, now: Time, ticket: Ticket) {
        let tickets = self.traffic.tickets_mut();
        tickets.end_wait(now);
        tickets.get_mut(ticket).into_iter().for_each(|pending| pending.stop_wait(now));
        self.charge(ticket);
        let pending = self.traffic.tickets().get(ticket);
        if pending.is_some_and(|pending| matches!(pending.kind(), TicketKind::Barrier(_))) {
            // At a barrier the application may look at how the job stands.
            self.traffic.hurry_report(Time::ZERO);
        }
    }

    /// Charges what was waited for a ticket, if it is due. A share of what it brings may have been waited for before it was.
    fn charge(&mut self, ticket: Ticket) {
        if let Some(Ok(())) = self.outcome(ticket) {
            self.traffic.tickets_mut().charge(ticket, self.session.id());
        }
    }

    /// Forgets a ticket that is due (or no longer wanted) and returns the rows that it brought.
    pub fn redeem(&mut self, ticket: Ticket) -> Vec<f32> {
        self.charge(ticket);
        self.traffic.redeem(self.session.number(), ticket)
    }

    /// A sentence about a ticket's wait: which servers, which table, since when.
    pub fn explain(&self, now: Time, ticket: Ticket) -> String {
        self.traffic.explain(&self.session, now, ticket)
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

    // Frames from shards.

    fn handle_shard_frame(&mut self, now: Time, from: ShardId, header: &Header, payload: &[u8]) {
        match header.kind {
            Kind::PushAck => match ack::requests(header, payload) {
                Ok(requests) => requests.for_each(|request| {
                    self.traffic.take_acknowledgement(&mut self.session, now, from, request)
                }),
                Err(error) => self.session.log(error.to_string()),
            },
            Kind::Params => {
                self.traffic.take_params(&mut self.session, now, from, header, Payload::Bytes(payload))
            }
            Kind::Error => match control::decode::<Fault>("error", payload) {
                Ok(fault) => self.traffic.take_fault(&mut self.session, now, from, header.request, fault),
                Err(error) => self.session.log(error.to_string()),
            },
            Kind::Control => match control::decode("control message", payload) {
                Ok(Control::Question { table, question }) => self.take_question(now, from, table, *question),
                Ok(other) => {
                    let connection = self.session.connection(from);
                    self.traffic.handle_reading(&mut self.session, now, connection, other);
                }
                Err(error) => self.session.log(error.to_string()),
            },
            other => self.session.log(format!("ignored a {other:?} frame from {from}")),
        }
    }

    /// A server asks whether a pull may be answered.
    fn take_question(&mut self, now: Time, from: ShardId, table: TableId, question: Question) {
        let number = question.number;
        if self.rulings.is_unheard_of(&question.condition) {
            let name = &question.condition;
            self.session.log(format!(
                "servers ask for the condition `{name}`, which this worker does not have, so its fallback decides; give it by \
                 `Job::condition`, or set another model"
            ));
        }
        let is_filed = self.traffic.tables().get(table).is_some_and(|local| {
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

    // Messages from the coordinator.

    fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(now, *plan),
            Control::Go { clock, last } => {
                if let Some(last) = last {
                    self.traffic.tickets_mut().hold_clock(clock, WaitCause::Push(last), now);
                }
                self.traffic.release(&mut self.session, clock);
            }
            Control::Ready { last } => {
                if let Some(ticket) = self.traffic.tickets().start() {
                    let cause = last.map_or(WaitCause::Servers, WaitCause::Start);
                    self.traffic.tickets_mut().hold(ticket, cause, now);
                }
            }
            Control::BarrierReached { name, last, version } => {
                version.into_iter().for_each(|version| self.traffic.iteration_mut().miss(version));
                if let Some(ticket) = self.barriers.reached(&name) {
                    let cause = last.map_or(WaitCause::Coordinator, WaitCause::Barrier);
                    self.traffic.tickets_mut().hold(ticket, cause, now);
                    self.traffic.tickets_mut().answered(ticket);
                }
            }
            Control::Checkpoint(order) => self.take_order(order),
            Control::CheckpointRead(place) => self.session.ask_archive(ArchiveRequest::Read(place)),
            Control::CheckpointPart(part) => self.take_part(part),
            Control::Status(status) => self.traffic.tickets_mut().set_status(&status),
            Control::Policies(policies) => self.traffic.tickets_mut().set_policies(&policies),
            Control::Change { epoch, change } => self.take_change(now, epoch, &change),
            Control::Routes(routes) => self.traffic.take_routes(&mut self.session, now, routes),
            Control::Patience { seconds } => self.session.set_patience(control::patience(seconds)),
            Control::Left => {
                self.session.set_gone();
                self.traffic.tickets_mut().left();
            }
            Control::Waiting { reason } => self.session.set_join_waits(control::sentence(reason)),
            Control::Stop { error } => {
                let why = error.map(|why| WorkerError::NotAMember(control::sentence(why)));
                self.session.fail(why.unwrap_or(WorkerError::Over));
            }
            other => {
                self.session.log(format!("ignored a `{}` message from the coordinator", other.name()));
            }
        }
    }

    /// The whole plan: the first one, or one that may tell of changes that were lost with a connection.
    fn take_plan(&mut self, now: Time, plan: Plan) {
        let Some(known) = self.session.plan() else {
            let takes_part = self.session.access() != Access::ReadOnly;
            if takes_part && plan.policy.is_local() && !self.steps_locally {
                let local = plan.policy.get(Axis::Local);
                self.session.fail(WorkerError::Order(format!(
                    "the job has local={local}, and this program synchronises at every step: make a pm.torch.LocalSteps (in Rust, \
                     follow Job::local_steps), or start the job without `local`"
                )));
                return;
            }
            if self.steps_locally {
                self.traffic.tables_mut().wait_for_exchanges();
            }
            if self.traffic.begin(&mut self.session, &self.registry, now, plan) {
                self.begin_restoring();
                self.handle_timeout(now);
            }
            return;
        };
        for (epoch, change) in known.changes_to(&plan) {
            self.apply_change(now, epoch, &change);
        }
    }

    fn take_change(&mut self, now: Time, epoch: u32, change: &Change) {
        // Without a plan the whole of it is still to come. Epochs that are about other workers are left out.
        let Some(plan) = self.session.plan().filter(|plan| plan.epoch < epoch) else { return };
        match plan.check_change(change) {
            Ok(()) => self.apply_change(now, epoch, change),
            Err(why) => {
                let sentence = format!("the coordinator's change of the plan cannot be used: {why}");
                self.session.fail(WorkerError::Table(sentence));
            }
        }
    }

    /// The one way from an epoch to the next.
    fn apply_change(&mut self, now: Time, epoch: u32, change: &Change) {
        self.session.apply(epoch, change);
        match change {
            // A worker that is declared dead hears it from the nodes that refuse it.
            Change::Joining { .. } | Change::Joined { .. } | Change::Left { .. } => {}
            Change::Policy(rule) => self.traffic.follow(&mut self.session, &self.registry, now, rule),
            Change::Served { shard, addresses, .. } => {
                if self.session.move_shard(now, *shard, addresses) {
                    let connection = self.session.connection(*shard);
                    self.traffic.lose_streams(&mut self.session, now, connection);
                    self.handle_timeout(now);
                }
            }
        }
    }

    // Checkpoints.

    /// The coordinator orders a checkpoint.
    fn take_order(&mut self, order: CheckpointOrder) {
        if self.session.plan().is_none() || self.session.access() == Access::ReadOnly {
            return;
        }
        let (clock, tables) = (self.traffic.current_clock(), self.traffic.tables_mut());
        let (has_begun, keeps_back) = (tables.have_pushed(clock), tables.keep_back());
        let position = Position { clock, has_begun, keeps_back };
        let answer = self.saving.follow(order, position);
        answer.iter().for_each(|message| self.session.tell_coordinator(message));
        self.save();
    }

    /// Copies what this worker keeps, if it has come to the clock of an order and nothing of an earlier one is under way.
    fn save(&mut self) {
        let clock = self.traffic.current_clock();
        let is_possible = self.saving.is_due(clock) && !self.traffic.tables().are_submitting();
        let Some(id) = self.id().filter(|_| is_possible) else { return };
        let kept = self.traffic.tables_mut().kept_back(clock);
        match kept {
            Ok(arrays) => {
                let request = self.saving.take(self.session.job(), id, arrays);
                request.into_iter().for_each(|request| self.session.ask_archive(request));
            }
            Err(why) => {
                let answer = self.saving.fail(why);
                answer.iter().for_each(|message| self.session.tell_coordinator(message));
            }
        }
    }

    /// The same before a gradient is pushed, after which it is too late.
    fn save_before_push(&mut self) {
        self.save();
        let clock = self.traffic.current_clock();
        if self.saving.is_due(clock) {
            let answer = self.saving.miss(clock);
            answer.iter().for_each(|message| self.session.tell_coordinator(message));
        }
    }

    /// The plan is of a job that goes on from a checkpoint.
    fn begin_restoring(&mut self) {
        let (Some(id), Some(plan)) = (self.session.id(), self.session.plan()) else { return };
        let takes_part = self.session.access() != Access::ReadOnly;
        let resumed = plan.resumed.as_ref().filter(|_| takes_part);
        self.restoring = resumed.and_then(|resumed| Restoring::new(resumed, id, plan.workers));
        self.ask_for_part();
    }

    /// Asks for the next part of what it takes over.
    fn ask_for_part(&mut self) {
        if let Some(place) = self.restoring.as_ref().and_then(Restoring::place) {
            self.session.tell_coordinator(&Control::CheckpointRead(place));
        }
    }

    fn take_part(&mut self, part: FilePart) {
        let Some(restoring) = &mut self.restoring else { return };
        match restoring.take(part) {
            Ok(Step::Ask(_)) => self.ask_for_part(),
            Ok(Step::Unpack(request)) => self.session.ask_archive(request),
            Ok(Step::Ignore) => {}
            Err(why) => self.fail_to_restore(&why),
        }
    }

    /// The driver has read what a worker kept.
    fn take_unpacked(&mut self, unpacked: Result<Box<WorkerCut>, String>) {
        let Some(restoring) = &mut self.restoring else { return };
        let Some(wanted) = restoring.unpacked() else { return };
        let WorkerCut { arrays, notes, .. } = match unpacked {
            Ok(cut) => *cut,
            Err(why) => return self.fail_to_restore(&why),
        };
        if wanted.takes_notes {
            self.noted = notes;
        }
        for array in arrays.into_iter().filter(|_| wanted.takes_arrays) {
            if let Err(why) = self.traffic.tables_mut().keep_again(array, wanted.is_own) {
                return self.fail_to_restore(&format!("{}: {why}", wanted.file.name));
            }
        }
        self.restoring.take_if(|restoring| restoring.is_over());
        self.ask_for_part();
    }

    fn fail_to_restore(&mut self, why: &str) {
        let Some(restoring) = self.restoring.take() else { return };
        let folder = restoring.folder();
        let sentence = control::sentence(format!("cannot go on from checkpoint {folder}: {why}"));
        self.session.fail(WorkerError::NotAMember(sentence));
    }

    fn send_declaration(&mut self) {
        let tables = self.traffic.tables().specs().cloned().collect();
        self.session.tell_coordinator(&Control::Declare { tables });
    }

    /// After a (new) connection to the coordinator: says again what it may have missed.
    fn resume_with_coordinator(&mut self, now: Time) {
        self.traffic.hurry_report(now);
        self.session.tell_where_reached();
        let declares = self.session.access() != Access::ReadOnly;
        if declares && self.traffic.tickets().start().is_some() && self.session.plan().is_none() {
            self.send_declaration();
        }
        self.ask_for_part();
        self.barriers.tell_again();
        self.idle.say_again();
        self.say_barriers();
        if self.traffic.tickets().wants_policies() {
            self.session.tell_coordinator(&Control::PoliciesQuery);
        }
        if self.traffic.tickets().wants_status() {
            self.session.tell_coordinator(&Control::StatusQuery);
        }
        if let Some(clock) = self.traffic.unheard_report() {
            self.session.tell_coordinator(&Control::Pushed { clock });
        }
        self.traffic.say_leave(&mut self.session);
    }
}

impl Role for Worker {
    fn node(&self) -> Option<NodeId> {
        self.session.id().map(NodeId::Worker)
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        let welcome = self.session.accept(hello)?;
        // A connection that this one takes the place of may have followed streams.
        self.traffic.lose_streams(&mut self.session, now, welcome.you.into());
        Ok(welcome)
    }

    fn handle_listening(&mut self, _now: Time, addresses: Option<Addresses>) {
        self.session.set_reached(addresses);
    }

    fn handle_archived(&mut self, _now: Time, response: Response) {
        match response {
            Response::Written { folder, file } => {
                let answer = self.saving.note_packed(&folder, file, self.traffic.current_clock());
                answer.iter().for_each(|message| self.session.tell_coordinator(message));
            }
            Response::Read(place, part) => self.session.tell_coordinator(&FilePart::message(place, part)),
            Response::Unpacked(unpacked) => self.take_unpacked(unpacked),
            Response::Appended(..) | Response::Completed { .. } | Response::Restored(_) => {}
        }
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        self.session.hello(connection, self.traffic.current_clock())
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        if let Some(shard) = connection.shard() {
            self.session.shard_connected(shard);
            self.traffic.resume_with_shard(&mut self.session, now, shard);
        } else if let ConnectionId::RelayedBy(relay) = connection {
            self.session.relay_connected(relay);
            self.traffic.settle_streams(&mut self.session);
        } else {
            self.session.coordinator_connected(welcome);
            self.resume_with_coordinator(now);
        }
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        let is_of_streams =
            matches!(connection, ConnectionId::RelayedBy(_) | ConnectionId::Node(NodeId::Worker(_)));
        if why.is_final() && !is_of_streams {
            return self.session.fail(WorkerError::NotAMember(format!("{connection} {why}")));
        }
        self.session.disconnected(now, connection, why);
        self.traffic.lose_streams(&mut self.session, now, connection);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        match (connection, header.kind) {
            (
                ConnectionId::Node(NodeId::Shard(_))
                | ConnectionId::AggregatorFor(_)
                | ConnectionId::RelayedBy(_),
                Kind::Update,
            ) => {
                return self.traffic.take_update(&mut self.session, now, connection, header, payload);
            }
            (ConnectionId::Node(NodeId::Worker(_)), Kind::Control) => {
                return match control::decode("control message", payload) {
                    Ok(message) => self.traffic.handle_follower(&mut self.session, now, connection, message),
                    Err(error) => self.session.log(error.to_string()),
                };
            }
            (ConnectionId::RelayedBy(_), Kind::Control) => {
                return match control::decode("control message", payload) {
                    Ok(message) => self.traffic.handle_reading(&mut self.session, now, connection, message),
                    Err(error) => self.session.log(error.to_string()),
                };
            }
            (ConnectionId::Node(NodeId::Worker(_)) | ConnectionId::RelayedBy(_), kind) => {
                return self.session.log(format!("ignored a {kind:?} frame from {connection}"));
            }
            _ => {}
        }
        match (connection.shard(), header.kind) {
            (Some(shard), _) => {
                self.handle_shard_frame(now, shard, header, payload);
                self.say_barriers();
            }
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
        self.traffic.landing(connection.shard()?, header, frames, places)
    }

    fn handle_landed(&mut self, now: Time, connection: ConnectionId, header: &Header) {
        if let Some(shard) = connection.shard() {
            self.traffic.take_params(&mut self.session, now, shard, header, Payload::InPlace);
            self.say_barriers();
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.session.failure().is_some() {
            return;
        }
        self.traffic.handle_timeout(&mut self.session, now);
        self.session.handle_timeout(now);
        if self.session.coordinator().is_up() && self.traffic.report_due() <= now {
            let awaited = self.traffic.oldest_awaited(&self.session);
            let awaited = awaited.map(|ticket| (ticket, self.explain(now, ticket)));
            let report = self.traffic.take_report(now, awaited);
            self.session.tell_coordinator(&Control::WorkerReport(report));
            self.say_idle();
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.session.failure().is_some() {
            return None;
        }
        let report = self.session.coordinator().is_up().then_some(self.traffic.report_due());
        [self.session.next_timeout(), report, self.traffic.next_timeout()].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.session.poll_any_output()
    }

    fn backlog_bytes(&self) -> usize {
        self.session.total_backlog_bytes()
    }

    fn check(&self) -> Result<(), String> {
        self.session.check()?;
        self.traffic.check(self.session.plan().is_some())
    }
}
