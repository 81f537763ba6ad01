//! What is between a worker and the shards: its tables, the requests about them, and the tickets that the application waits on.
//!
//! Every acknowledgement and every answer that a ticket waits for is that of a request under way, and every block that a table
//! waits for is brought by one ([`Traffic::check`]). What is sent goes to the worker's [`Session`].

use super::WorkerError;
use super::allocation::Allocation;
use super::awaited::Awaited;
use super::copies::{self, Copies, Needed};
use super::fetch::FetchKind;
use super::gradient::PullOptions;
use super::iteration::Iteration;
use super::layout::Share;
use super::links::{Idle, Links};
use super::local_table::LocalTable;
use super::partial_pull::PartialPulls;
use super::reporter::Reporter;
use super::request::{self, Answer, Asks, Payload, Request, RequestKind, TablePush};
use super::requests::Requests;
use super::scheduler::Scheduler;
use super::session::{Access, Session};
use super::slab::{Slab, SlabInFlight};
use super::staged_updates::StagedUpdates;
use super::staging::Staging;
use super::streams::{Incoming, StreamId, Streams};
use super::submission::{Sent, Source, Submission, SubmissionKind};
use super::tables::Tables;
use super::ticket::{Expected, Outstanding, Pending, Ticket, TicketKind, Tickets};
use crate::consistency::ServerPush;
use crate::landing::{Destination, Landing};
use crate::limits;
use crate::policy::PolicyOverride;
use crate::registry::Registry;
use crate::status::WorkerReport;
use crate::store::Allocate;
use crate::types::{Clock, ConnectionId, ShardId, TableId, Time, WorkerId};
use crate::waits::{Delay, WaitCause};
use crate::wire::control;
use crate::wire::frame::{Form, Params, Update};
use crate::wire::{Cause, Control, Fault, Header, Kind, Plan, Route};
use std::sync::Arc;

/// A worker's dealings with the shards.
#[derive(Debug)]
pub(super) struct Traffic {
    allocation: Allocation,
    tables: Tables,
    iteration: Iteration,
    partial_pulls: PartialPulls,
    scheduler: Scheduler,
    requests: Requests,
    tickets: Tickets,
    streams: Streams,
    links: Links,
    awaited: Awaited,
    /// Of a reader: the versions that it has.
    staging: Option<Staging>,
    reporter: Reporter,
}

impl Traffic {
    pub(super) fn new(now: Time) -> Traffic {
        Traffic {
            allocation: Allocation::on_heap(),
            tables: Tables::default(),
            iteration: Iteration::default(),
            partial_pulls: PartialPulls::default(),
            scheduler: Scheduler::new(),
            requests: Requests::default(),
            tickets: Tickets::default(),
            streams: Streams::default(),
            links: Links::default(),
            awaited: Awaited::default(),
            staging: None,
            reporter: Reporter::new(now),
        }
    }

    /// Takes large buffers from `memory` if there is a server that can share them.
    pub(super) fn offer_shared(&mut self, host: String, memory: Arc<dyn Allocate>) {
        self.allocation.offer_shared(host, memory);
    }

    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// For tables as they are declared: once there is a plan, what changes in them changes here.
    pub(super) fn tables_mut(&mut self) -> &mut Tables {
        &mut self.tables
    }

    pub(super) fn tickets(&self) -> &Tickets {
        &self.tickets
    }

    /// For tickets that wait for the coordinator, and for what tickets have brought.
    pub(super) fn tickets_mut(&mut self) -> &mut Tickets {
        &mut self.tickets
    }

    /// Iterations completed.
    pub(super) fn current_clock(&self) -> Clock {
        self.iteration.clock()
    }

    /// Bytes held for parameters and gradients under way.
    pub(super) fn memory_bytes(&self) -> usize {
        self.tables.iter().map(LocalTable::memory_bytes).sum::<usize>()
            + self.tickets.memory_bytes()
            + self.streams.memory_bytes()
            + self.staging.as_ref().map_or(0, Staging::held_bytes)
    }

    // The plan.

    /// The plan is here: lays the tables out, takes up the clock at which the worker comes in, and asks for the initial values,
    /// which the first worker brings. False when the job does not begin by it.
    pub(super) fn begin(
        &mut self,
        session: &mut Session,
        registry: &Registry,
        now: Time,
        plan: Plan,
    ) -> bool {
        // A reader declares nothing, so that its plan may come before its application asks for it.
        let is_wanted = self.tickets.start().is_some() || session.access() == Access::ReadOnly;
        if !is_wanted || session.failure().is_some() {
            return false;
        }
        // The plan of a job that this worker is not in yet is followed by another one.
        let Some(first) = session.first_clock(&plan) else { return false };
        self.allocation.choose(session.peers(&plan));
        let (worker, access) = (session.id().map_or(0, |id| id.0), session.access());
        if access == Access::ReadOnly {
            self.tables.take_specs(&plan);
        }
        match self.tables.plan(&plan, registry, worker, access, self.allocation.allocator()) {
            Ok(overlap) => self.scheduler.restrict(overlap),
            Err(error) => {
                session.fail(error);
                return false;
            }
        }
        session.offer_to_relay(self.tables.iter().any(LocalTable::is_broadcast));
        if let Some(why) = self.links.refusal(session, &self.tables) {
            session.fail(WorkerError::Table(why));
            return false;
        }
        session.enter(now, plan, &self.tables.shards());
        if access == Access::ReadOnly {
            self.staging = Some(Staging::new(&self.tables));
            self.begin_reading();
            self.streams.settle(session, &self.tables);
            return true;
        }
        let Some(ticket) = self.tickets.start() else { return false };
        // Unless the coordinator has said who was ready last: the worker joins a job that runs.
        self.tickets.hold(ticket, WaitCause::Coordinator, now);
        self.iteration.enter(first);
        self.reporter.set_clock(self.iteration.clock());
        self.partial_pulls.turn(self.iteration.clock());
        if let Some(before) = first.checked_sub(1) {
            self.scheduler.release(before);
        }
        // Also when it joins: its predecessor may have died before its values had arrived. Shards that have them ignore these.
        let is_first = session.id() == Some(WorkerId::FIRST);
        let (mut acks, mut answers) = (0, 0);
        for index in 0..self.tables.len() {
            let local = &mut self.tables[index];
            let initial = local.take_initial();
            // Of a sparse table no rows: it answers all the same once it has its initial values.
            let is_sparse = local.layout().is_sparse();
            let reads = access == Access::Full;
            let reply = (!is_sparse && reads).then(|| local.begin_pull(first, FetchKind::Whole));
            let shards: Vec<ShardId> = local.layout().shards().collect();
            if is_first {
                acks += shards.len();
                let values = local.lend_copy(&initial, &**self.allocation.allocator());
                for &shard in &shards {
                    let kind = RequestKind::Init { values: Some(values.clone()) };
                    self.request(session, now, Request::new(shard, index, 0, ticket, kind));
                }
            }
            answers += if reads { shards.len() } else { 0 };
            for &shard in shards.iter().filter(|_| reads) {
                let kind = RequestKind::Pull { rows: is_sparse.then(Vec::new), now: false };
                self.request(session, now, Request::new(shard, index, first, ticket, kind).with_reply(reply));
            }
        }
        // The application may have given the ticket up.
        self.tickets.expect(ticket, acks, answers);
        self.streams.settle(session, &self.tables);
        true
    }

    /// Of a reader: its start waits for the plan alone.
    pub(super) fn begin_reading(&mut self) {
        if let Some(ticket) = self.tickets.start().filter(|_| self.staging.is_some()) {
            self.tickets.expect(ticket, 0, 0);
        }
    }

    /// Lets the plan's policies hold for the tables that a rule is about. Where they change what frames mean, everything
    /// that is under way is sent again: servers take none of it as it was, and begin their answers anew.
    pub(super) fn follow(
        &mut self,
        session: &mut Session,
        registry: &Registry,
        now: Time,
        rule: &PolicyOverride,
    ) {
        let Some(plan) = session.plan() else { return };
        let changed = self.tables.changed_frames(plan);
        let under_way = self.requests.numbers(|request| changed.contains(&request.table()));
        self.requests.visit(&under_way, |request| request.leave_codec(&self.tables[request.table()]));
        let worker = session.id().map_or(0, |id| id.0);
        if let Err(error) = self.tables.follow(plan, registry, worker, rule) {
            return session.fail(error);
        }
        let tables = &self.tables;
        self.partial_pulls.follow(now, |block| tables[block.table].partial_pull(block.shard));
        self.publish_partial();
        self.requests.visit(&under_way, |request| request.check_place(&self.tables[request.table()]));
        under_way.into_iter().for_each(|id| self.send_again(session, now, id));
        if let Some(staging) = &mut self.staging {
            // What is held back was made by the former codecs.
            changed.iter().for_each(|&table| staging.drop_all_held(&mut self.tables[table]));
        }
        self.streams.restart(session, &self.tables, &changed);
        self.links.follow(session, now, &mut self.tables, self.streams.followers());
        self.ask_for_copies(session, now);
        // Another model may need less.
        self.awaited.streams().into_iter().for_each(|id| self.answer_from_replica(now, id, None));
    }

    /// Without overlap: pulls after this clock may be sent.
    pub(super) fn release(&mut self, session: &mut Session, clock: Clock) {
        self.scheduler.release(clock);
        // A push that is under way is not sent a second time; its pull follows the acknowledgement.
        let is_ready = |request: &Request| request.waits_for_scheduler() && !request.must_be_sent();
        self.requests.numbers(is_ready).into_iter().for_each(|id| self.send_request(session, id));
    }

    /// After a (new) connection to a shard: sends again what it may have missed.
    pub(super) fn resume_with_shard(&mut self, session: &mut Session, now: Time, shard: ShardId) {
        let mine = self.requests.numbers(|request| request.shard() == shard);
        mine.into_iter().for_each(|id| self.send_again(session, now, id));
        self.streams.settle(session, &self.tables);
        self.links.follow(session, now, &mut self.tables, self.streams.followers());
        self.links.resume(session, shard);
    }

    /// Leaves once every server has what was pushed: one that hears of the leave first would refuse the rest.
    pub(super) fn say_leave(&mut self, session: &mut Session) {
        let is_due = self.tickets.is_leaving() && session.coordinator().is_up();
        if is_due && !self.iteration.is_submitting() && !self.requests.values().any(Request::must_be_sent) {
            session.say_leave();
        }
    }

    /// Without overlap: tells the coordinator of clocks whose pushes all servers have acknowledged.
    fn report_pushed(&mut self, session: &mut Session) {
        let submitting = self.iteration.oldest_submission();
        let oldest = self.requests.oldest_unacknowledged().into_iter().chain(submitting).min();
        while let Some(clock) = self.scheduler.next_report(oldest) {
            session.tell_coordinator(&Control::Pushed { clock });
        }
    }

    /// Ends the iteration.
    pub(super) fn clock(&mut self, session: &mut Session) {
        self.scheduler.end_iteration(self.iteration.clock());
        self.iteration.end();
        self.reporter.set_clock(self.iteration.clock());
        self.partial_pulls.turn(self.iteration.clock());
        self.publish_partial();
        self.report_pushed(session);
        self.catch_up(false);
    }

    /// Leaves out iterations whose rounds have closed, where every table's model says so or they were missed at a barrier, unless a
    /// gradient of the current one was pushed. When an answer comes, an iteration may be computed on a copy: it keeps its number.
    fn catch_up(&mut self, is_answer: bool) {
        let is_computing = is_answer && self.tables.have_copies();
        let is_begun = is_computing || self.tables.have_pushed(self.iteration.clock());
        if is_begun || !self.iteration.catch_up(self.tables.catch_up()) {
            return;
        }
        let clock = self.iteration.clock();
        self.reporter.set_clock(clock);
        self.partial_pulls.turn(clock);
        // Pulls of this clock lack nothing of those rounds.
        self.scheduler.release(clock - 1);
    }

    /// The iteration before which this worker pushes nothing, as far as servers may wait for it; 0 if nothing can be said.
    pub(super) fn idle_until(&self) -> Clock {
        let (owed, is_at_barrier) = (self.requests.oldest_unacknowledged(), self.tickets.is_at_barrier());
        self.iteration.idle_until(owed, is_at_barrier, |version| self.tables.may_lack(version))
    }

    /// For what the application says of its gradients.
    pub(super) fn iteration_mut(&mut self) -> &mut Iteration {
        &mut self.iteration
    }

    /// The clock that the coordinator may have missed the report of.
    pub(super) fn unheard_report(&self) -> Option<Clock> {
        self.scheduler.repeat()
    }

    /// Time has passed for partial pulls, which do not wait for all blocks for ever.
    pub(super) fn handle_timeout(&mut self, session: &mut Session, now: Time) {
        self.partial_pulls.handle_timeout(now);
        self.publish_partial();
        self.watch_streams(session, now);
        self.probe_links(session, now);
    }

    /// When [`Traffic::handle_timeout`] wants to be called.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let streams = [self.streams.next_timeout(), self.links.next_timeout()];
        self.partial_pulls.next_timeout().into_iter().chain(streams.into_iter().flatten()).min()
    }

    // Requests.

    /// Begins to submit gradients of the current clock, each of the table with this index.
    pub(super) fn begin_submission<'a>(
        &mut self,
        kind: SubmissionKind,
        sources: impl IntoIterator<Item = (usize, Source<'a>)>,
    ) -> Submission<'a> {
        let (clock, allocator) = (self.iteration.clock(), self.allocation.allocator());
        let tables = &mut self.tables;
        let begin = |(table, source)| tables[table].begin_submission(table, source, clock, allocator);
        let parts = sources.into_iter().map(begin).collect();
        self.iteration.begin_submission();
        Submission { clock, kind, parts, error: None }
    }

    /// The tables have their codecs again.
    fn end_submission(&mut self, submission: &mut Submission<'_>) {
        for part in &mut submission.parts {
            self.tables[part.table].end_submission(part);
        }
        self.iteration.end_submission(submission.clock);
    }

    /// Sends what a submission has prepared. On an error nothing is sent, and it has the slabs that it was begun with.
    pub(super) fn finish(
        &mut self,
        session: &mut Session,
        now: Time,
        submission: &mut Submission<'_>,
    ) -> Result<Ticket, WorkerError> {
        self.end_submission(submission);
        let Submission { clock, kind, parts, error } = submission;
        let clock = *clock;
        if let Err(why) = error.take().map_or_else(|| session.check_alive(), Err) {
            parts.iter().for_each(|part| self.tables[part.table].keep_unsent(clock, part));
            self.report_pushed(session);
            self.say_leave(session);
            return Err(why);
        }
        let mut pending = kind.pending(now, clock, parts);
        let (mut pushes, mut in_flight) = (Vec::with_capacity(parts.len()), Vec::new());
        for part in parts {
            let (table, local) = (part.table, &mut self.tables[part.table]);
            let Some(sent) = part.sent.take() else { continue };
            match (part.source.take_slab(), sent) {
                (Some(slab), sent) => {
                    let wish = local.wish_after(clock, part.is_held);
                    let (gradient, slab, asks) = local.begin_exchange(slab, sent, clock, wish);
                    let takes_copy = slab.takes_copy();
                    pushes.push(TablePush { table, gradient, asks, takes_copy });
                    in_flight.push(slab);
                }
                (None, Sent::Made(gradient)) => {
                    let fetch_kind = local.fetch_kind();
                    let wants = *kind == SubmissionKind::Push { want_params: true };
                    if wants {
                        pending = pending.read_by(clock + 1);
                    }
                    let takes_copy = wants && fetch_kind == FetchKind::Background;
                    let asks = match wants {
                        true => local.begin_asking(clock, part.is_held, fetch_kind),
                        false => Asks::Nothing,
                    };
                    pushes.push(TablePush { table, gradient, asks, takes_copy });
                }
                // Only a slab has memory that frames are sent from.
                (None, Sent::InPlace(_)) => {}
            }
        }
        let replicated = |push: &TablePush| self.tables[push.table].is_broadcast().then_some(push.table);
        let replicated: Vec<usize> = pushes.iter().filter_map(replicated).collect();
        let ticket = self.submit(session, now, pending.with_slabs(in_flight), clock, pushes);
        replicated.into_iter().for_each(|table| self.answer_at_once(now, table));
        Ok(ticket)
    }

    /// Sends gradients of a clock to all shards of their tables, under one ticket that is due when all servers have them and
    /// all parameters that are wanted are here, or when the worker may go on without the rest.
    fn submit(
        &mut self,
        session: &mut Session,
        now: Time,
        pending: Pending,
        clock: Clock,
        pushes: Vec<TablePush>,
    ) -> Ticket {
        let ticket = self.tickets.reserve();
        let mut expected = Expected::default();
        let takes_copies = pushes.iter().any(|push| push.takes_copy);
        for TablePush { table, gradient, asks, takes_copy } in pushes {
            let shards: Vec<ShardId> = self.tables[table].layout().shards().collect();
            let reply = asks.reply();
            self.reporter.note_pull(reply.is_some());
            for shard in shards {
                // An aggregator adds gradients up, and wants all of them.
                let is_dropped = self.tables[table].is_dropped(shard, clock) && !session.is_aggregated();
                let gradient = Some(if is_dropped { gradient.left_out() } else { gradient.clone() });
                let kind = RequestKind::Push {
                    gradient,
                    samples: self.iteration.samples(),
                    want_params: reply.is_some(),
                };
                let request = Request::new(shard, table, clock, ticket, kind).with_reply(reply);
                let request =
                    request.with_partial(self.tables[table].partial_pull(shard)).with_copy(takes_copy);
                expected.add(&request);
                self.request(session, now, request);
                if matches!(asks, Asks::Leave) {
                    let request = Request::leave(shard, table, clock + 1, ticket);
                    let request = request.with_partial(self.tables[table].partial_pull(shard));
                    expected.add(&request);
                    self.request(session, now, request);
                }
            }
        }
        let is_partial = expected.loose != Outstanding::default();
        let pending = pending.with_partial(is_partial.then_some(clock + 1)).with_copy(takes_copies);
        self.tickets.file(ticket, pending.expecting_each(expected));
        ticket
    }

    /// Asks for a table's parameters, or for some of its rows.
    pub(super) fn pull(
        &mut self,
        session: &mut Session,
        now: Time,
        table: TableId,
        options: PullOptions<'_>,
    ) -> Result<Ticket, WorkerError> {
        let index = self.tables.index(table)?;
        let local = &mut self.tables[index];
        local.check_not_lent()?;
        let is_sparse = local.layout().is_sparse();
        local.layout().check_pull(&options)?;
        let clock = local.pull_clock(self.iteration.clock());
        let kind = TicketKind::Pull { table: index, clock };
        self.reporter.note_pull(true);
        let per_shard = match options.rows {
            Some(rows) => local.layout().rows_by_shard(rows)?,
            None if is_sparse => local.layout().all_rows_by_shard(),
            None => return Ok(self.pull_whole(session, now, kind, index, options.now)),
        };
        let rows: usize = per_shard.iter().map(|of_shard| of_shard.rows.len()).sum();
        let mut values = vec![0.0; rows * local.layout().row_width()];
        let ticket = self.tickets.reserve();
        let mut answers = 0;
        for mut of_shard in per_shard {
            if !options.now {
                self.tables[index].answer_rows(clock, &mut of_shard.rows, &mut values);
            }
            for rows in of_shard.pulls() {
                answers += 1;
                let kind = RequestKind::Pull { rows: Some(rows), now: options.now };
                self.request(session, now, Request::new(of_shard.shard, index, clock, ticket, kind));
            }
        }
        let pending = Pending::new(kind, now).expecting(0, answers).with_rows(values);
        self.tickets.file(ticket, if options.now { pending } else { pending.read_by(clock) });
        self.answer_at_once(now, index);
        Ok(ticket)
    }

    fn pull_whole(
        &mut self,
        session: &mut Session,
        now: Time,
        kind: TicketKind,
        index: usize,
        at_once: bool,
    ) -> Ticket {
        let local = &mut self.tables[index];
        let clock = local.pull_clock(self.iteration.clock());
        let fetch_kind = local.pull_kind(at_once);
        let is_partial = fetch_kind == FetchKind::Partial;
        let reply = local.begin_pull(clock, fetch_kind);
        let shards: Vec<ShardId> = local.layout().shards().collect();
        let (ticket, mut expected) = (self.tickets.reserve(), Expected::default());
        for shard in shards {
            let rule = self.tables[index].partial_pull(shard).filter(|_| is_partial);
            let request =
                Request::whole(shard, index, clock, ticket, reply).at_once(at_once).with_partial(rule);
            expected.add(&request);
            self.request(session, now, request);
        }
        let pending = Pending::new(kind, now).with_partial(is_partial.then_some(clock));
        let pending = if at_once { pending } else { pending.read_by(clock) };
        self.tickets.file(ticket, pending.expecting_each(expected));
        self.answer_at_once(now, index);
        ticket
    }

    /// Files a request and sends it if its server is connected.
    fn request(&mut self, session: &mut Session, now: Time, request: Request) {
        let (shard, table) = (request.shard(), request.table());
        if let Some((block, rule)) = request.partial_block() {
            self.partial_pulls.expect(now, request.iteration(), block, rule);
        }
        let is_awaited =
            request.wants_params() && request.is_conditional() && self.tables[table].is_broadcast();
        let id = self.requests.insert(request);
        if is_awaited {
            self.awaited.add(StreamId { table, shard }, id);
        }
        if session.is_up(shard) {
            self.send_request(session, id);
        }
    }

    fn send_request(&mut self, session: &mut Session, id: u64) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let table = &self.tables[request.table()];
        // A later epoch would say nothing more, and an aggregator may not know it yet.
        let (epoch, layout) = (table.valid_from(), table.layout());
        let (is_broadcast, is_prioritized) = (table.is_broadcast(), table.is_prioritized());
        let context = request::Context { id, epoch, scheduler: &self.scheduler, layout, is_broadcast };
        let to = session.connection(request.shard());
        let reporter = &mut self.reporter;
        request.frames(&context, &mut |frame| {
            if frame.header.kind == Kind::Push {
                reporter.note_pushed(frame.header.payload_bytes);
            }
            session.send_request(to, frame, is_prioritized);
        });
    }

    /// Sends a request once more if its server is connected. A pull whose ticket was given up is not
    /// asked again (blocks that PSP went on without), but for one that renews a cache.
    fn send_again(&mut self, session: &mut Session, now: Time, id: u64) {
        let Some(request) = self.requests.get(id) else { return };
        let is_wanted = request.is_left_behind() || self.tickets.contains(request.ticket());
        if !request.must_be_sent() && !is_wanted {
            self.drop_request(now, id);
        } else if session.is_up(request.shard()) {
            self.send_request(session, id);
        }
    }

    /// The request that a server speaks of, if it was asked of this server.
    fn request_to(&mut self, shard: ShardId, id: u64) -> Option<&mut Request> {
        self.requests.get_mut(id).filter(|request| request.shard() == shard)
    }

    /// Forgets a request whose answer will not come.
    fn drop_request(&mut self, now: Time, id: u64) -> Option<Request> {
        let request = self.requests.remove(id)?;
        if let Some(fetch) = request.fetch().filter(|_| request.wants_params()) {
            self.tables[request.table()].settle(fetch, request.shard());
        }
        if let Some((block, _)) = request.partial_block() {
            self.partial_pulls.forget(now, request.iteration(), block);
        }
        Some(request)
    }

    // Frames from shards.

    /// See [`Role::landing`](crate::role::Role::landing).
    pub(super) fn landing(
        &mut self,
        shard: ShardId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        self.requests.landing(&mut self.tables, shard, header, frames, places)
    }

    pub(super) fn take_acknowledgement(&mut self, session: &mut Session, now: Time, from: ShardId, id: u64) {
        let Some(request) = self.request_to(from, id) else { return };
        let (ticket, claim) = (request.ticket(), request.claim());
        let Some(acknowledged) = self.requests.acknowledge(id) else { return };
        self.tickets.acknowledged(ticket, from, now, claim);
        if acknowledged.is_settled {
            self.requests.remove(id);
        } else if self.requests.get(id).is_some_and(Request::waits_for_scheduler) {
            // The scheduler may have released its pull already.
            self.send_request(session, id);
        }
        self.report_pushed(session);
        self.say_leave(session);
    }

    pub(super) fn take_params(
        &mut self,
        session: &mut Session,
        now: Time,
        from: ShardId,
        header: &Header,
        payload: Payload<'_>,
    ) {
        let params = Params::decode(header);
        let id = params.subject.request;
        let Some(request) = self.requests.get_mut(id) else { return };
        // An answer under codecs that hold no more, or that this worker has yet to hear of: it is asked for again.
        let is_stale = params.subject.epoch != self.tables[request.table()].valid_from();
        if request.shard() != from || !request.wants_params() || is_stale {
            return;
        }
        self.reporter.note_pulled(header.payload_bytes);
        let (ticket, table) = (request.ticket(), request.table());
        let local = &mut self.tables[table];
        if params.form == Form::NOTHING && request.fetch().is_some() {
            return self.take_nothing(session, now, from, &params);
        }
        let push = ServerPush { clock: local.iteration(self.iteration.clock()), version: params.version };
        // The first values are needed, however old they are.
        let is_start = self.tickets.start() == Some(ticket);
        let is_conditional = request.is_conditional();
        let is_late = is_conditional && !is_start && !local.takes(from, &push, request.is_partial());
        let rows = self.tickets.get_mut(ticket).map_or(&mut [][..], Pending::rows_mut);
        let payload_bytes = header.payload_bytes;
        let taken =
            request.take_params(local, Answer { params: &params, payload, payload_bytes, is_late, rows });
        if taken.is_ok() && !params.piece.is_last {
            return;
        }
        if taken.is_ok() {
            // A server that answers a push with the parameters that follow it has the push.
            self.take_acknowledgement(session, now, from, id);
        }
        self.tickets.arrived(ticket, from, now, params.delay);
        let is_here = taken.is_ok() && is_conditional;
        if is_here && let Some(request) = self.requests.get(id) {
            let rows = self.tickets.get(ticket).map_or(&[][..], Pending::rows);
            self.tables[table].keeping().note_rows(request.iteration(), request.rows(), rows);
        }
        self.end_answer(now, id, params.version, taken);
        if is_here {
            self.iteration.note_version(params.version);
            self.catch_up(true);
        }
    }

    /// A server leaves out the answer to a pull that a later one has overtaken. Where another model holds by now, under which it
    /// counts, it is asked for again.
    fn take_nothing(&mut self, session: &mut Session, now: Time, from: ShardId, params: &Params) {
        let id = params.subject.request;
        if let Some(request) = self.requests.get_mut(id) {
            self.tables[request.table()].note_version(from, params.version);
        }
        self.take_acknowledgement(session, now, from, id);
        match self.requests.get_mut(id).filter(|request| request.is_partial()) {
            Some(request) => {
                request.leave_out();
                self.end_answer(now, id, params.version, Ok(()));
            }
            None => self.send_request(session, id),
        }
    }

    /// The answer to a request is over, well or badly.
    fn end_answer(&mut self, now: Time, id: u64, version: Clock, taken: Result<(), WorkerError>) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let is_whole = taken.is_ok() && !request.is_late();
        let (shard, ticket, table, fetch) =
            (request.shard(), request.ticket(), request.table(), request.fetch());
        let (is_partial, iteration, block) = (request.is_partial(), request.iteration(), request.block());
        let (version, clock, claim) = (version.min(request.version()), request.clock(), request.claim());
        if let Some(error) = taken.as_ref().err().filter(|_| request.is_left_behind()) {
            self.copies().tell_late(table, clock, error.clone());
        }
        let Some(request) = self.requests.get_mut(id) else { return };
        if request.end_answer() {
            self.requests.remove(id);
        }
        if taken.is_ok() {
            self.tables[table].note_version(shard, version);
        }
        if is_partial && taken.is_ok() {
            self.partial_pulls.arrived(now, iteration, block, version);
        }
        match (self.tickets.get_mut(ticket), taken) {
            (Some(pending), Err(error)) => pending.fail(error),
            (Some(pending), Ok(())) => pending.answered(claim),
            (None, _) => {}
        }
        let Some(fetch) = fetch else { return };
        let (local, partial_pulls) = (&mut self.tables[table], &self.partial_pulls);
        if is_whole {
            local.arrived(fetch, shard, version, |clock| partial_pulls.is_open(clock));
        } else {
            local.settle(fetch, shard);
        }
        // The block may be the one that lets the worker go on with all tables.
        if is_partial {
            self.publish_partial();
        }
    }

    pub(super) fn take_fault(
        &mut self,
        session: &mut Session,
        now: Time,
        from: ShardId,
        id: u64,
        mut fault: Fault,
    ) {
        fault.message = control::sentence(fault.message);
        if fault.cause == Cause::NotAMember {
            return session.fail(WorkerError::NotAMember(fault.message));
        }
        if fault.cause == Cause::StaleEpoch {
            // The change that made the frame stale is on its way; what is under way is sent again then.
            return;
        }
        let Some(request) = self.request_to(from, id) else { return session.log(fault.message) };
        let counted = request.counted();
        let was_taken = self.requests.acknowledge(id).is_none();
        let Some(request) = self.drop_request(now, id) else { return };
        let is_sent_again = counted.is_some() && self.requests.send_again(&request);
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
        if !self.tickets.contains(request.ticket()) {
            // The application went on without the acknowledgement.
            session.log(fault.message.clone());
        }
        let error = WorkerError::Refused { cause: fault.cause, message: fault.message };
        match request.is_left_behind() {
            true => self.copies().tell_late(request.table(), request.clock(), error),
            false => self.tickets.fail(request.ticket(), error),
        }
        self.report_pushed(session);
        self.say_leave(session);
    }

    // Streams.

    /// The coordinator says from whom streams are to come.
    pub(super) fn take_routes(&mut self, session: &mut Session, now: Time, routes: Vec<Route>) {
        self.streams.take_routes(session, now, &self.tables, routes);
    }

    /// Somebody who passes streams on is connected.
    pub(super) fn settle_streams(&mut self, session: &mut Session) {
        self.streams.settle(session, &self.tables);
    }

    /// A connection is gone, and with it the streams that came over it, or went.
    pub(super) fn lose_streams(&mut self, session: &mut Session, now: Time, connection: ConnectionId) {
        self.streams.lose(session, &self.tables, connection);
        self.links.lose(session, now, connection, &mut self.tables);
    }

    /// Looks after links that codecs follow.
    fn probe_links(&mut self, session: &mut Session, now: Time) {
        let pushes = !self.iteration.is_submitting() && self.requests.oldest_unacknowledged().is_none();
        self.links.send_probes(session, now, Idle { pushes, streams: self.streams.is_settled() });
    }

    /// What a peer says of the link between it and this worker.
    pub(super) fn handle_reading(
        &mut self,
        session: &mut Session,
        now: Time,
        from: ConnectionId,
        message: Control,
    ) {
        self.links.handle(session, now, from, message, &mut self.tables);
    }

    /// What a worker says to which streams are passed on, or are to be.
    pub(super) fn handle_follower(
        &mut self,
        session: &mut Session,
        now: Time,
        from: ConnectionId,
        message: Control,
    ) {
        let Traffic { streams, tables, links, .. } = self;
        if let Some(other) = streams.handle_follower(session, tables, links, now, from, message) {
            self.handle_reading(session, now, from, other);
        }
    }

    /// A chunk of a version of a shard's stream, from the shard or from somebody who passes it on.
    pub(super) fn take_update(
        &mut self,
        session: &mut Session,
        now: Time,
        from: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) {
        let update = Update::decode(header);
        let Some(local) = self.tables.get(update.table).filter(|local| local.valid_from() == update.epoch)
        else {
            return;
        };
        let shard = local.layout().shard_of_chunk(update.piece.chunk).filter(|_| local.is_broadcast());
        let Some(shard) = shard else { return };
        let id = StreamId { table: update.table.0 as usize, shard };
        self.reporter.note_pulled(header.payload_bytes);
        self.links.note_other(payload.len());
        if let Some(staging) = &mut self.staging {
            let Traffic { tables, streams, reporter, tickets, .. } = self;
            let mut staged = StagedUpdates { session, now, staging, tables, streams, reporter, tickets };
            return staged.take(from, id, &update, payload);
        }
        if self.streams.take(session, now, &mut self.tables, Incoming { from, id, update, payload }) {
            self.answer_from_replica(now, id, update.delay);
        }
    }

    /// Of a reader: the version that all tables are at.
    pub(super) fn staged_version(&self) -> Option<Clock> {
        self.staging.as_ref()?.version()
    }

    /// Of a reader: waits for a version.
    pub(super) fn await_version(&mut self, now: Time, version: Clock) -> Ticket {
        let ticket = self.tickets.open_version(now, version);
        self.staged_version().into_iter().for_each(|reached| self.tickets.reach_version(reached));
        ticket
    }

    /// Answers requests for a table that its replica can answer as it is.
    fn answer_at_once(&mut self, now: Time, table: usize) {
        if !self.tables[table].is_broadcast() {
            return;
        }
        let shards: Vec<ShardId> = self.tables[table].layout().shards().collect();
        shards.into_iter().for_each(|shard| self.answer_from_replica(now, StreamId { table, shard }, None));
    }

    /// Answers requests that wait for a stream, as far as what is here of it allows. The version that came last tells for whom it
    /// was held back.
    fn answer_from_replica(&mut self, now: Time, stream: StreamId, delay: Option<Delay>) {
        let answered = self.awaited.take_answered(stream, &self.requests, &self.tables[stream.table]);
        for &id in &answered {
            let Some(request) = self.requests.get_mut(id) else { continue };
            let local = &mut self.tables[stream.table];
            let rows = self.tickets.get_mut(request.ticket()).map_or(&mut [][..], Pending::rows_mut);
            request.take_replica(local, rows);
            local.keeping().note_rows(request.iteration(), request.rows(), rows);
            let version = request.iteration();
            self.tickets.arrived(request.ticket(), stream.shard, now, delay);
            self.end_answer(now, id, version, Ok(()));
        }
        if answered.is_empty() {
            return;
        }
        if let Some(version) = self.tables[stream.table].replica_version(stream.shard) {
            self.iteration.note_version(version);
            self.catch_up(true);
        }
    }

    /// Looks after streams that bring nothing.
    fn watch_streams(&mut self, session: &mut Session, now: Time) {
        self.streams.close_gaps(session, now, &mut self.tables, self.staging.as_mut());
        self.streams.handle_timeout(session, now, &self.tables);
    }

    // Partial pulls.

    /// Blocks of partial pulls become visible where the worker may go on without the others.
    pub(super) fn publish_partial(&mut self) {
        let partial_pulls = &self.partial_pulls;
        self.tables.iter_mut().for_each(|table| table.publish_partial(|clock| partial_pulls.is_open(clock)));
    }

    // Tickets.

    /// Whether a ticket is due, and how it ended. `None`: wait on.
    pub(super) fn outcome(&self, session: &Session, ticket: Ticket) -> Option<Result<(), WorkerError>> {
        let Some(pending) = self.tickets.get(ticket) else {
            return Some(Err(WorkerError::Order("this handle was waited for already".into())));
        };
        let is_leave = matches!(pending.kind(), TicketKind::Leave);
        if is_leave && (session.has_left() || !pending.is_open()) {
            let unheard = self.tables.iter().find_map(LocalTable::failure);
            return Some(unheard.cloned().map_or(Ok(()), Err));
        }
        if let Some(error) = pending.error().or(session.failure()) {
            return Some(Err(error.clone()));
        }
        // PSP-SGD: a push is not waited for either, as long as the gradients under way do not pile up.
        let has_room = self.requests.clocks_unacknowledged() <= limits::MAX_CLOCKS_UNACKNOWLEDGED;
        if let Some(error) = copies::unheard(&self.tables, pending) {
            return Some(Err(error.clone()));
        }
        let is_partly_here = pending.partial().is_some_and(|clock| self.partial_pulls.is_open(clock));
        if let Some(are_fresh) = copies::are_fresh(&self.tables, pending) {
            // Other tables of an exchange may be without a cache.
            let lacks_others = pending.is_firmly_open() || pending.is_loosely_open() && !is_partly_here;
            return (has_room && are_fresh && !lacks_others).then_some(Ok(()));
        }
        let may_go_on = is_partly_here && !pending.is_firmly_open() && has_room;
        (may_go_on || pending.is_over() || !pending.is_open()).then_some(Ok(()))
    }

    /// [`Traffic::outcome`] for an application that goes on if it is due: what it reads does not change until its next push, and
    /// what is under way goes on without it.
    pub(super) fn conclude(
        &mut self,
        session: &Session,
        now: Time,
        ticket: Ticket,
    ) -> Option<Result<(), WorkerError>> {
        let outcome = self.outcome(session, ticket);
        match outcome {
            None => self.tickets.get_mut(ticket).into_iter().for_each(|pending| pending.begin_wait(now)),
            Some(Ok(())) => self.copies().go_on(now, ticket),
            Some(Err(_)) => self.copies().hear(ticket),
        }
        outcome
    }

    /// Another model may allow less than the one under which nothing was asked for: asks for it.
    fn ask_for_copies(&mut self, session: &mut Session, now: Time) {
        let needed = self.copies().needed();
        for Needed { ticket, clock, table: index } in needed {
            let local = &mut self.tables[index];
            let reply = local.renew(clock);
            let shards: Vec<ShardId> = local.layout().shards().collect();
            self.reporter.note_pull(true);
            for shard in shards {
                self.tickets.get_mut(ticket).into_iter().for_each(Pending::expect_copy);
                let request = Request::whole(shard, index, clock, ticket, reply).with_copy(true);
                self.request(session, now, request);
            }
        }
    }

    fn copies(&mut self) -> Copies<'_> {
        let Traffic { tables, requests, tickets, reporter, .. } = self;
        Copies { tables, requests, tickets, reporter }
    }

    /// Whether servers lack pushes that the application does not wait for any more.
    pub(super) fn has_unsaved(&self) -> bool {
        self.requests.has_unsaved()
    }

    /// The ticket that something is to come for, and that is not due without it.
    pub(super) fn oldest_awaited(&self, session: &Session) -> Option<Ticket> {
        self.tickets.open_ones().find(|ticket| self.outcome(session, *ticket).is_none())
    }

    /// A sentence about a ticket's wait: which servers, which table, since when.
    pub(super) fn explain(&self, session: &Session, now: Time, ticket: Ticket) -> String {
        let Some(pending) = self.tickets.get(ticket) else { return "nothing".into() };
        let waits_for = pending.kind().sentence(|table| self.tables[table].name());
        let is_start = self.tickets.start() == Some(ticket);
        let mut sentence = session.explain(now.since(pending.since()), waits_for, is_start);
        if let Some(why) = copies::explain(&self.tables, pending) {
            sentence += &format!("; {why}");
        }
        sentence + &self.requests.silent_servers(ticket, session)
    }

    /// Whether a driver is receiving into slabs of a ticket at this moment.
    pub(super) fn is_landing(&self, ticket: Ticket) -> bool {
        let slabs = self.tickets.get(ticket).map_or(&[][..], Pending::slabs);
        slabs.iter().any(|slab| self.tables[slab.table.0 as usize].is_landing(slab))
    }

    /// Whether a share of the parameters is in the slabs of an exchange. Of one that may end early nothing is known before it does.
    pub(super) fn has_share(&self, ticket: Ticket, share: Share) -> bool {
        if self.tickets.get(ticket).is_some_and(Pending::may_end_early) {
            return false;
        }
        self.requests.have_share(ticket, share, &self.tables)
    }

    /// Forgets a ticket and returns the rows that it brought. Slabs are taken back.
    pub(super) fn redeem(&mut self, lender: u64, ticket: Ticket) -> Vec<f32> {
        let brought = self.tickets.redeem(ticket);
        for slab in brought.slabs {
            let slab = self.end_exchange(lender, slab);
            self.give_back(slab);
        }
        brought.rows
    }

    /// Forgets a ticket of an exchange and returns its slabs.
    pub(super) fn redeem_slabs(&mut self, lender: u64, ticket: Ticket) -> Vec<Slab> {
        self.copies().give_up(ticket);
        let slabs = self.tickets.redeem(ticket).slabs;
        slabs.into_iter().map(|slab| self.end_exchange(lender, slab)).collect()
    }

    // Slabs.

    /// Lends a dense table's buffers to the application.
    pub(super) fn lend(&mut self, lender: u64, table: TableId) -> Result<Slab, WorkerError> {
        let index = self.tables.index(table)?;
        let is_busy =
            self.tables[index].is_submitting() || self.requests.are_waited_for(index, &self.tickets);
        self.tables[index].lend(table, lender, is_busy, &**self.allocation.allocator())
    }

    /// Takes a slab's buffers back.
    pub(super) fn give_back(&mut self, slab: Slab) {
        self.tables[slab.table().0 as usize].take_back(slab);
    }

    fn end_exchange(&mut self, lender: u64, slab: SlabInFlight) -> Slab {
        let local = &mut self.tables[slab.table.0 as usize];
        local.end_exchange(slab, lender, &**self.allocation.allocator())
    }

    // Reports.

    pub(super) fn report(&self) -> WorkerReport {
        self.completed(self.reporter.report().clone())
    }

    /// When the next report is due.
    pub(super) fn report_due(&self) -> Time {
        self.reporter.due()
    }

    /// The next report is due by this time.
    pub(super) fn hurry_report(&mut self, due: Time) {
        self.reporter.hurry(due);
    }

    /// The report that is due, with the ticket that is waited for and the sentence about that.
    pub(super) fn take_report(&mut self, now: Time, awaited: Option<(Ticket, String)>) -> WorkerReport {
        let (awaited, waiting) = awaited.unzip();
        let report = self.reporter.take(now, waiting, self.links.report(now));
        self.tickets.count_wait(now);
        let unanswered = awaited.map(|ticket| self.requests.unanswered(ticket)).unwrap_or_default();
        WorkerReport { unanswered, ..self.completed(report) }
    }

    /// Adds what is known of streams and of waiting.
    fn completed(&self, report: WorkerReport) -> WorkerReport {
        let version = self.staging.as_ref().map_or_else(|| self.tables.broadcast_version(), Staging::version);
        let (bytes_relayed, waited) = (self.streams.bytes_relayed(), self.tickets.waited());
        let (updates, holding) = (self.tables.updates(), self.tables.explain_hold());
        WorkerReport { bytes_relayed, version, waited, updates, holding, ..report }
    }

    /// Counts against what they count.
    pub(super) fn check(&self, is_planned: bool) -> Result<(), String> {
        self.requests.check()?;
        self.staging.as_ref().map_or(Ok(()), |staging| staging.check(&self.tables))?;
        for (index, table) in self.tables.iter().enumerate() {
            table.check(self.requests.blocks_of(index))?;
        }
        self.tickets.check(is_planned, |ticket| self.requests.expected_by(ticket))
    }
}
