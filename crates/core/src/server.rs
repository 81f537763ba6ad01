//! One data core of a server as a state machine: it takes pushes, steps the optimizer, answers pulls.
//!
//! A shard shares nothing with its siblings. It talks to the coordinator (plan, members, reports) and to the workers.
//! A push of (worker, table, clock) is applied once, however often it is sent: frames of a push are numbered, and
//! what was taken is remembered until the push is complete and counted.

mod accumulators;
mod aggregating;
pub(crate) mod aggregators;
mod checkpoints;
mod cuts;
mod delivery;
mod following;
mod image;
mod links;
mod members;
mod readers;
mod table_shard;
mod tables;
mod timers;

pub use image::{ChunkImage, ShardImage, StoreImage, TableImage};

use crate::address::Addresses;
use crate::checkpoint::{Request, Response, TableCut};
use crate::consistency::PullOutcome;
use crate::intake::{PushFrame, Taken};
use crate::limits;
use crate::link::Link;
use crate::registry::Registry;
use crate::role::{Body, Level, Lost, Outbox, Output, Role};
use crate::status::ShardReport;
use crate::types::{
    AggregatorId, Clock, ConnectionId, NodeId, ProcessId, ServerId, ShardId, TableId, Time, WorkerId,
};
use crate::wire::control::{self, frame};
use crate::wire::frame::{FromWorker, Init, Pull, Subject, has_fitting_type};
use crate::wire::{
    Cause, Change, Control, Fault, FilePart, FirstClock, Header, Hello, Kind, Member, Party, Plan, Refusal,
    Standing, Welcome,
};

use aggregators::Aggregators;
use checkpoints::Checkpoints;
use delivery::{Backlog, Delivery, NewChunk, PendingPull, StoredTable};
use links::Links;
use members::Members;
use readers::Readers;
use std::sync::Arc;
use std::time::Duration;
use tables::Tables;

/// Configuration of a shard.
#[derive(Debug, Clone)]
pub struct ShardConfig {
    /// The job's name.
    pub job: String,
    /// Tells servers apart until the coordinator numbers them.
    pub process: ProcessId,
    /// The server's number, when it was given one.
    pub server: Option<ServerId>,
    /// This core's number on its server.
    pub core: u32,
    /// How many data cores the server has.
    pub cores: u32,
    /// Addresses at which workers reach this core: each leads to it.
    pub addresses: Addresses,
    /// The coordinator's address.
    pub coordinator: String,
    /// Of so many versions that are broadcast one comes with the digest of its values, which receivers compare with theirs.
    pub digest_every: u64,
}

/// One data core of a server.
#[derive(Debug)]
pub struct Shard {
    config: ShardConfig,
    registry: Arc<Registry>,
    coordinator: Link,
    plan: Option<Plan>,
    members: Members,
    readers: Readers,
    tables: Tables,
    aggregators: Aggregators,
    /// Whether worker 0, which evaluates conditions, can be asked.
    has_judge: bool,
    delivery: Delivery,
    links: Links,
    checkpoints: Checkpoints,
    next_report: Time,
    stopped: bool,
    /// For the coordinator and the driver; [`Delivery`] has its own.
    outputs: Outbox,
}

impl Shard {
    /// A shard that is about to join.
    pub fn new(now: Time, config: ShardConfig, registry: Arc<Registry>) -> Shard {
        let delivery = Delivery::with_digests(config.digest_every);
        Shard {
            coordinator: Link::new(now, NodeId::Coordinator, Addresses::list(&config.coordinator)),
            config,
            registry,
            plan: None,
            members: Members::default(),
            readers: Readers::default(),
            tables: Tables::default(),
            aggregators: Aggregators::default(),
            has_judge: false,
            delivery,
            links: Links::default(),
            checkpoints: Checkpoints::default(),
            next_report: now,
            stopped: false,
            outputs: Outbox::default(),
        }
    }

    /// Everything that lasts when all connections are lost: [`Shard::from_image`] makes of it a shard that goes on as this one would after
    /// [`Role::handle_disconnected`] for each of its connections, that of worker 0 last. Outputs that were not taken are not in it.
    pub fn image(&self) -> ShardImage {
        ShardImage {
            shard: self.id(),
            plan: self.plan.clone(),
            members: self.members.clone(),
            aggregators: self.aggregators.disconnected(),
            delivery: self.delivery.image(),
            bytes_pushed: self.tables.bytes_pushed(),
            stopped: self.stopped,
            tables: self.tables.images(),
        }
    }

    /// Whether gradients are here that no step was made with yet: an image has sums of them beside the parameters.
    pub(crate) fn is_in_a_round(&self) -> bool {
        self.tables.are_in_a_round()
    }

    /// Whether sums of gradients are here that no step was made with yet.
    pub(crate) fn has_sums(&self) -> bool {
        self.tables.have_sums()
    }

    /// The shard that an image was made of, in a process of this configuration, which is about to connect to the coordinator. Times in the
    /// image are on the clock of the process that made it, and so is `now`. The error says why there can be no such shard.
    pub fn from_image(
        now: Time,
        config: ShardConfig,
        registry: Arc<Registry>,
        image: ShardImage,
    ) -> Result<Shard, String> {
        let mut shard = Shard::new(now, config, registry);
        if let Some(id) = image.shard {
            if shard.config.core != id.core || shard.config.server.is_some_and(|server| server != id.server) {
                return Err(format!("the image is of {id}, which this process does not serve"));
            }
            shard.config.server = Some(id.server);
        }
        image.check()?;
        shard.stopped = image.stopped;
        let (Some(id), Some(plan)) = (image.shard, image.plan) else { return Ok(shard) };
        shard.tables = Tables::of_plan(&shard.registry, &plan, id)?;
        shard.tables.restore(&shard.registry, image.tables)?;
        shard.tables.set_bytes_pushed(image.bytes_pushed);
        let tables = &shard.tables;
        let broadcast = |table| tables.find(table).filter(|table| table.is_broadcast());
        shard.delivery.restore(image.delivery, |table| Some(broadcast(table)?.chunk_count()))?;
        (shard.members, shard.aggregators) = (image.members, image.aggregators);
        shard.plan = Some(plan);
        shard.links.follow(id, &mut shard.tables);
        Ok(shard)
    }

    /// Whether it would send other frames than a shard that is made of its image.
    pub(crate) fn exceeds_image(&self) -> bool {
        self.delivery.exceeds_image()
    }

    /// Drops what an image does not keep, so that this shard and one that is made of its image stay the same.
    pub(crate) fn reduce_to_image(&mut self) {
        self.delivery.reduce_to_image();
    }

    /// Takes over parameters of a table and the state of their optimizer, as far as they are here. The error says why that cannot be; the
    /// shard is of no use then.
    pub fn restore_store(&mut self, table: TableId, image: StoreImage) -> Result<(), String> {
        let place = table.0 as usize;
        if place >= self.tables.len() {
            return Err(format!("table {place} does not exist"));
        }
        self.tables.get_mut(place).restore_store(image)
    }

    /// This shard's number, once the coordinator has given it one.
    pub fn id(&self) -> Option<ShardId> {
        self.config.server.map(|server| ShardId { server, core: self.config.core })
    }

    /// How this shard stands.
    pub fn report(&self, now: Time) -> Option<ShardReport> {
        Some(ShardReport {
            shard: self.id()?,
            tables: self.tables.reports(now),
            bytes_pushed: self.tables.bytes_pushed(),
            bytes_pulled: self.delivery.bytes_pulled(),
            nonfinite: self.tables.nonfinite(),
            refused: self.delivery.refused(),
            memory_bytes: self.memory_bytes() as u64,
            links: self.links.report(now),
        })
    }

    /// Bytes held for parameters, accumulators and optimizer state.
    pub fn memory_bytes(&self) -> usize {
        self.tables.memory_bytes() + self.delivery.log_bytes()
    }

    /// The job's plan, as of the epoch that this shard has entered.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// The epoch of the job's plan that this shard has entered; 0 before the first.
    pub fn epoch(&self) -> u32 {
        self.plan.as_ref().map_or(0, |plan| plan.epoch)
    }

    /// Calls `visit` with the first element and the values of every chunk of a table that this shard holds.
    pub fn for_each_chunk(&self, table: TableId, visit: impl FnMut(u64, &[f32])) {
        if let Some(table) = self.tables.find(table) {
            table.for_each_chunk(visit);
        }
    }

    /// The same with the version and the values that were broadcast last, which every receiver has; nothing where none were.
    pub fn for_each_published_chunk(&self, table: TableId, visit: impl FnMut(u64, Clock, &[f32])) {
        if let Some(table) = self.tables.find(table) {
            table.for_each_published_chunk(visit);
        }
    }

    fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(now, *plan),
            Control::Change { epoch, change } => self.take_change(now, epoch, &change),
            Control::ReportRequest => self.send_report(now),
            Control::Patience { seconds } => self.coordinator.set_patience(control::patience(seconds)),
            Control::IdleWorkers { number, workers } => {
                let version = self.tables.set_idle(now, &workers, &mut self.delivery);
                self.tell_coordinator(&Control::IdleNoted { number, version });
            }
            Control::Checkpoint(order) if self.plan.is_some() => {
                let message = self.checkpoints.follow(order, &mut self.tables);
                message.iter().for_each(|message| self.tell_coordinator(message));
            }
            Control::CheckpointRead(place) => {
                self.outputs.push_back(Output::Archive(Box::new(Request::Read(place))));
            }
            Control::Stop { error } => self.stop(error.map(control::sentence)),
            other => self.log(format!("ignored a `{}` message from the coordinator", other.name())),
        }
    }

    /// The whole plan: the first one, or one that may tell of changes that were lost with a connection.
    fn take_plan(&mut self, now: Time, plan: Plan) {
        if let Err(why) = plan.check() {
            let error =
                format!("the coordinator's plan cannot be used: {why}; use the same release everywhere");
            return self.fail(error);
        }
        match &self.plan {
            Some(known) => {
                for (epoch, change) in known.changes_to(&plan) {
                    self.apply_change(now, epoch, &change);
                }
            }
            None if plan.resumed.is_some() => return self.read_checkpoint(plan),
            None => {
                if let Err(error) = self.begin(now, plan) {
                    return self.fail(error);
                }
            }
        }
        self.tell_entered();
    }

    /// Has the driver read what the tables of the first plan held, and enters that when they hold it again.
    fn read_checkpoint(&mut self, plan: Plan) {
        let Some(id) = self.id() else { return };
        let Some(resumed) = plan.resumed.clone() else { return };
        if self.checkpoints.is_restoring() {
            self.checkpoints.keep_plan(plan);
            return;
        }
        match Tables::of_plan(&self.registry, &plan, id) {
            Ok(tables) => {
                let request = Request::Restore { resumed, wanted: tables.wanted() };
                self.tables = tables;
                self.checkpoints.keep_plan(plan);
                self.outputs.push_back(Output::Archive(Box::new(request)));
            }
            Err(error) => self.fail(error),
        }
    }

    /// What the tables held is here.
    fn take_restored(&mut self, now: Time, pieces: Result<Vec<Vec<TableCut>>, String>) {
        let Some((plan, is_stale)) = self.checkpoints.take_plan() else { return };
        let folder = plan.resumed.as_ref().map_or("", |resumed| &resumed.folder).to_owned();
        let restored = pieces.and_then(|pieces| self.begin_with(now, plan, &pieces));
        if let Err(why) = restored {
            return self.fail(format!("cannot go on from checkpoint {folder}: {why}"));
        }
        self.tell_entered();
        if is_stale {
            self.tell_coordinator(&Control::PlanQuery);
        }
    }

    /// Sets up the tables and the members of the first plan that this shard gets.
    fn begin(&mut self, now: Time, plan: Plan) -> Result<(), String> {
        let Some(id) = self.id() else { return Ok(()) };
        self.tables = Tables::of_plan(&self.registry, &plan, id)?;
        self.enter_first(now, plan, id);
        Ok(())
    }

    /// The same where the tables hold what they held at a checkpoint. The plan may be newer than the one that they were set up by.
    fn begin_with(&mut self, now: Time, plan: Plan, pieces: &[Vec<TableCut>]) -> Result<(), String> {
        let Some(id) = self.id() else { return Ok(()) };
        self.tables = Tables::of_plan(&self.registry, &plan, id)?;
        self.tables.take_pieces(pieces)?;
        self.enter_first(now, plan, id);
        for table in 0..self.tables.len() {
            if self.tables.get(table).elements() > 0 {
                self.delivery.version_exists(now, TableId(table as u32), self.tables.get_mut(table));
            }
        }
        Ok(())
    }

    fn enter_first(&mut self, now: Time, plan: Plan, id: ShardId) {
        let first = plan.first_clock();
        for &Member { worker, incarnation, standing, .. } in &plan.members {
            match standing {
                Standing::From(clock) if clock == first => self.members.insert(worker, incarnation),
                // It joined before this shard was there.
                Standing::From(_) | Standing::Joining => self.members.join(worker, incarnation),
                Standing::Left => {}
            }
        }
        self.plan = Some(plan);
        self.links.follow(id, &mut self.tables);
        self.tables.settle_all(now, &mut self.delivery);
    }

    fn take_change(&mut self, now: Time, epoch: u32, change: &Change) {
        if self.checkpoints.is_restoring() {
            return self.checkpoints.note_change();
        }
        let Some(plan) = &self.plan else { return self.tell_coordinator(&Control::PlanQuery) };
        if epoch > plan.epoch + 1 {
            // A change in between is missing.
            return self.tell_coordinator(&Control::PlanQuery);
        }
        if let Err(why) = plan.check_change(change) {
            return self.fail(format!("the coordinator's change of the plan cannot be used: {why}"));
        }
        if epoch > plan.epoch {
            self.apply_change(now, epoch, change);
        }
        self.tell_entered();
    }

    /// The one way from an epoch to the next.
    fn apply_change(&mut self, now: Time, epoch: u32, change: &Change) {
        let (Some(id), Some(plan)) = (self.id(), &mut self.plan) else { return };
        plan.apply(epoch, change);
        match change {
            Change::Joining { worker, incarnation } => {
                self.members.join(*worker, *incarnation);
                self.tables.join(*worker, !self.aggregators.is_empty());
                self.note_judge(*worker, false);
                // A connection of its predecessor is not its own.
                self.outputs.push_back(Output::Disconnect { connection: NodeId::Worker(*worker).into() });
            }
            Change::Joined { worker, clock } => self.tables.set_first_clock(*worker, *clock),
            Change::Left { worker } => self.remove_worker(*worker),
            Change::Served { .. } => {}
            Change::Policy(rule) => {
                for table in 0..self.tables.len() {
                    if self.tables.get(table).spec().is_meant_by(rule, id.server) {
                        self.set_policy(now, table);
                    }
                }
                self.links.follow(id, &mut self.tables);
                self.send_report(now);
            }
        }
        self.tell_judge(now);
        // A round may have waited for the worker that joined or left.
        self.tables.settle_all(now, &mut self.delivery);
    }

    fn tell_entered(&mut self) {
        let Some(plan) = &self.plan else { return };
        let joining = plan.live_members().filter(|member| member.standing == Standing::Joining);
        let first = |&Member { worker, incarnation, .. }: &Member| {
            let clock = self.tables.first_clock(worker);
            FirstClock { worker, incarnation, clock }
        };
        let has_first = plan.member(WorkerId::FIRST).is_some_and(Member::is_live);
        let lacks_values = if has_first { None } else { self.tables.without_values() };
        let (epoch, joining) = (plan.epoch, joining.map(first).collect());
        self.tell_coordinator(&Control::Entered { epoch, joining, lacks_values });
    }

    fn remove_worker(&mut self, worker: WorkerId) {
        self.members.remove(worker);
        self.note_judge(worker, false);
        self.delivery.remove_worker(worker);
        self.tables.iter_mut().for_each(|table| table.remove_worker(worker));
        if worker == WorkerId::FIRST {
            // Its successor sends them all: they are not to be a mixture.
            self.tables.iter_mut().for_each(|table| table.forget_incomplete_values());
        }
    }

    /// Lets the policies of a table that the plan names hold from now on.
    fn set_policy(&mut self, now: Time, table: usize) {
        let (Some(plan), Some(id)) = (&self.plan, self.id()) else { return };
        let number = TableId(table as u32);
        let policy = plan.policy_of(number, id.server);
        let (valid_from, table_shard) = (plan.valid_from(number), self.tables.get_mut(table));
        table_shard.set_nonfinite(policy.nonfinite());
        table_shard.set_prioritized(policy.is_prioritized());
        if table_shard.valid_from() != valid_from {
            let codecs = policy.codecs(&self.registry).map_err(|error| error.to_string());
            if let Err(why) = codecs.and_then(|codecs| table_shard.set_codecs(codecs, valid_from)) {
                // The coordinator has checked them: this server is of another release.
                let error =
                    format!("table `{}`: {why}; use the same release everywhere", table_shard.spec().name);
                return self.fail(error);
            }
            let message =
                format!("the codecs of table `{}` have changed; ask again", table_shard.spec().name);
            let fault = Fault { cause: Cause::StaleEpoch, message };
            self.delivery.renew(now, table, self.tables.get(table), &fault);
        }
        match policy.sync(&self.registry) {
            Ok(sync) if sync.to_string() == self.tables.get(table).sync().to_string() => {}
            Ok(sync) => {
                self.tables.set_sync(now, table, sync);
                // Chunks may be stepped once more in the same round.
                self.delivery.restart(table);
            }
            Err(error) => self.log(control::sentence(error.to_string())),
        }
        let optimizer = policy.optimizer(&self.registry);
        let table_shard = self.tables.get_mut(table);
        if !optimizer.is_ok_and(|optimizer| table_shard.set_optimizer(optimizer)) {
            let line =
                format!("ignored an optimizer that table `{}` cannot take over to", table_shard.spec().name);
            self.log(line);
        }
    }

    fn handle_worker_frame(&mut self, now: Time, worker: WorkerId, frame: &FromWorker, payload: &[u8]) {
        let result = self.check_frame(worker, frame.subject()).and_then(|table| match frame {
            FromWorker::Init(init) => self.handle_init(now, table, worker, init, payload),
            FromWorker::Push(push) => self.handle_push(table, &PushFrame { now, worker, push, payload }),
            FromWorker::Pull(pull) => self.handle_pull(now, table, worker, pull, payload),
        });
        if let Err(fault) = result
            && (fault.cause != Cause::StaleEpoch || frame.is_last())
        {
            let Subject { table, request, .. } = *frame.subject();
            self.delivery.refuse(worker, table, request, &fault);
        }
    }

    /// The index of the table of a worker's frame, if the frame may be taken.
    #[inline]
    fn check_frame(&self, worker: WorkerId, subject: &Subject) -> Result<usize, Fault> {
        if self.plan.is_none() {
            let message = "this server has no plan yet".into();
            return Err(Fault { cause: Cause::StaleEpoch, message });
        }
        if !self.members.has(worker) {
            return Err(not_a_member(worker));
        }
        self.check_subject(subject)
    }

    /// The index of a frame's table, if this shard holds chunks of it and the frame is not stale ([`Plan::valid_from`]).
    #[inline]
    fn check_subject(&self, subject: &Subject) -> Result<usize, Fault> {
        let newest = self.plan.as_ref().map_or(0, |plan| plan.epoch);
        self.tables.place(subject, newest)
    }

    /// The same for sums and what is said of them: those of earlier epochs are taken too, because other chunks of the same
    /// gradients were.
    fn check_sum(&self, subject: &Subject) -> Result<usize, Fault> {
        let newest = self.plan.as_ref().map_or(0, |plan| plan.epoch);
        self.tables.place_sum(subject, newest)
    }

    fn handle_init(
        &mut self,
        now: Time,
        table: usize,
        worker: WorkerId,
        init: &Init,
        payload: &[u8],
    ) -> Result<(), Fault> {
        if worker != WorkerId::FIRST {
            let message = format!("initial values come from {}, not from {worker}", WorkerId::FIRST);
            return Err(Fault { cause: Cause::Protocol, message });
        }
        let values = self.tables.get_mut(table);
        let was_initialised = values.is_initialised();
        if values.initialise(init.piece, payload)? && init.piece.is_last {
            self.delivery.complete(worker, init.subject.request);
            if !was_initialised {
                self.delivery.version_exists(now, TableId(table as u32), self.tables.get_mut(table));
                // Pulls that came before are asked now.
                let pulls = self.delivery.take_waiting_for_values(table);
                pulls.into_iter().for_each(|pull| self.ask(now, pull));
            }
        }
        Ok(())
    }

    fn handle_push(&mut self, table: usize, frame: &PushFrame<'_>) -> Result<(), Fault> {
        let PushFrame { now, worker, push, payload } = *frame;
        self.links.note_push(now, worker, push, payload.len(), &mut self.delivery);
        if self.tables.get(table).waits_for_all() {
            self.members.note_progress(worker, push.clock, payload.len() as u64);
        }
        let taken = match self.tables.push(table, frame) {
            Ok(taken) => taken,
            Err(fault) => {
                self.abandon_answer(table, worker);
                return Err(fault);
            }
        };
        // An answer to a push of one frame is complete with the round: nothing of it can be sent before.
        let is_begun = push.piece.sequence == 0 && !push.piece.is_last;
        if is_begun && push.want_params && !push.form.is_rows() {
            self.delivery.expect(&PendingPull::after_push(worker, push));
        }
        match taken {
            Taken::Ignored | Taken::Partly => {}
            Taken::Stepped => {
                let (index, version) = (push.piece.sequence as usize, push.clock.saturating_add(1));
                self.delivery.chunk_exists(
                    now,
                    NewChunk { table, index, version },
                    self.tables.get_mut(table),
                );
            }
            Taken::Whole => {
                self.tables.settle(now, table, &mut self.delivery);
                if push.want_params {
                    self.ask(now, PendingPull::after_push(worker, push));
                } else {
                    self.delivery.complete(worker, push.subject.request);
                }
            }
        }
        Ok(())
    }

    fn handle_pull(
        &mut self,
        now: Time,
        table: usize,
        worker: WorkerId,
        pull: &Pull,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let values = self.tables.get_mut(table);
        let rows = pull.rows.map(|_| values.check_rows(payload)).transpose()?;
        let pending = PendingPull::new(worker, pull, rows);
        if pull.now && values.is_initialised() {
            self.delivery.answer(&pending, values);
        } else {
            self.ask(now, pending);
        }
        Ok(())
    }

    /// Puts a pull to its table's controller: it is answered, waits, or is refused when too many wait.
    fn ask(&mut self, now: Time, pull: PendingPull) {
        let table = self.tables.get_mut(pull.table());
        if let Err(Backlog { pulls, rows }) = self.delivery.admit(&pull) {
            let (worker, name) = (pull.worker(), &table.spec().name);
            let message = format!(
                "{worker} has {pulls} pulls of {rows} rows of table `{name}` waiting here; wait for them first"
            );
            return self.delivery.refuse_pull(&pull, &Fault { cause: Cause::TooFarAhead, message });
        }
        if !table.is_initialised() {
            // Pulls that come before the initial values are not delayed by a condition.
            return self.delivery.wait_for_values(pull);
        }
        match table.pull(now, pull.worker(), pull.clock(), self.delivery.next_token()) {
            PullOutcome::Answer { .. } => {
                self.delivery.answer(&pull, table);
                self.tables.note_answer(pull.table());
            }
            PullOutcome::Wait => {
                let number = pull.table();
                let asks = table.sync().model.remote().is_some();
                self.delivery.wait(pull, table);
                if asks {
                    // Worker 0 may have to be asked.
                    self.tables.settle(now, number, &mut self.delivery);
                }
            }
        }
    }

    /// Worker 0 says whether a pull is answered. Others have no say.
    fn handle_verdict(
        &mut self,
        now: Time,
        worker: WorkerId,
        table: TableId,
        number: u64,
        holds: Option<bool>,
    ) -> Result<(), Fault> {
        let protocol = |message| Fault { cause: Cause::Protocol, message };
        if worker != WorkerId::FIRST || !self.members.has(worker) {
            return Err(protocol(format!(
                "conditions are evaluated by {}, not by {worker}",
                WorkerId::FIRST
            )));
        }
        let place = table.0 as usize;
        if place >= self.tables.len() {
            return Err(protocol(format!("a verdict on table {place}, which does not exist")));
        }
        self.tables.get_mut(place).take_verdict(now, number, holds);
        self.tables.settle(now, place, &mut self.delivery);
        Ok(())
    }

    /// A control message of a worker, on its connection.
    fn handle_worker_control(&mut self, now: Time, worker: WorkerId, payload: &[u8]) {
        let handled = decode_control(payload).and_then(|message| match message {
            Control::Subscribe { .. } | Control::Unsubscribe { .. } | Control::Seen { .. } => {
                following::handle_follower(self, now, NodeId::Worker(worker), message)
            }
            // The job's thresholds are for those who train.
            Control::Probe(_) | Control::Measured(_) | Control::Behind { .. } if worker.is_reader() => {
                let message = "a server does not take a reader's word on links".into();
                Err(Fault { cause: Cause::Protocol, message })
            }
            Control::Probe(probe) => {
                self.links.note_probe(now, worker, &probe, &mut self.delivery);
                Ok(())
            }
            Control::Measured(reading) => {
                self.links.note(now, worker, reading, &mut self.tables);
                Ok(())
            }
            Control::Behind { lacking } => {
                self.links.note_behind(now, worker, lacking, &mut self.tables);
                Ok(())
            }
            Control::Verdict { table, number, holds } => {
                self.handle_verdict(now, worker, table, number, holds)
            }
            other => {
                let message = format!("a server does not take a `{}` message from a worker", other.name());
                Err(Fault { cause: Cause::Protocol, message })
            }
        });
        if let Err(fault) = handled {
            self.delivery.refuse(worker, TableId(0), 0, &fault);
        }
        following::tell_news(self);
    }

    /// Worker 0, which evaluates conditions, can be asked, or cannot. [`Shard::tell_judge`] is to follow.
    fn note_judge(&mut self, worker: WorkerId, is_here: bool) {
        if worker == WorkerId::FIRST {
            self.has_judge = is_here;
        }
    }

    /// Tells the tables whether worker 0 can be asked. Pulls are released by it: what the same event says of other workers is to be
    /// noted before.
    fn tell_judge(&mut self, now: Time) {
        self.tables.set_judge(now, self.has_judge, &mut self.delivery);
    }

    /// A worker's push was refused: what was sent of the answer to it is of no use.
    fn abandon_answer(&mut self, table: usize, worker: WorkerId) {
        self.delivery.abandon(table, worker);
        self.tables.get_mut(table).forget_answers(worker);
    }

    /// A worker's connection is gone: it asks again for what it still wants.
    fn lose_worker(&mut self, now: Time, worker: WorkerId) {
        self.links.lose(now, worker, &mut self.tables);
        following::tell_news(self);
        self.delivery.lose_worker(worker);
        self.tables.lose_worker(worker);
        self.note_judge(worker, false);
    }

    /// A worker is reached through an aggregator.
    fn reach_through(&mut self, worker: WorkerId, id: AggregatorId) {
        self.delivery.reach_through(worker, id);
        self.note_judge(worker, true);
    }

    /// The connection to an aggregator is gone, and the pulls of its workers with it.
    fn lose_aggregator(&mut self, now: Time, id: AggregatorId) {
        self.aggregators.lose(id);
        self.delivery.lose_aggregator(id).into_iter().for_each(|worker| self.lose_worker(now, worker));
    }

    /// Whether a peer that says hello is welcome; nothing changes by it.
    pub fn check_hello(&self, hello: &Hello) -> Result<Welcome, Refusal> {
        let refuse = |reason: String, retry| Err(Refusal { reason, retry });
        if hello.job != self.config.job {
            return refuse(
                format!("this server serves job `{}`, not `{}`", self.config.job, hello.job),
                false,
            );
        }
        let you = match hello.from {
            Party::Worker { rank: Some(worker) } => NodeId::Worker(worker),
            Party::Aggregator { id: Some(id), .. } if id.0 < limits::MAX_AGGREGATORS => {
                NodeId::Aggregator(id)
            }
            Party::Aggregator { .. } => {
                return refuse("an aggregator gets its number from the coordinator first".into(), false);
            }
            Party::Reader { id: Some(id) } => NodeId::Worker(id),
            Party::Through { .. } | Party::Below { .. } => {
                let reason =
                    "this is a server, and no aggregator; give the address that `paramill aggregate` prints";
                return refuse(reason.into(), false);
            }
            _ => {
                return refuse("a server's data address takes workers only; use the job's URL".into(), false);
            }
        };
        if self.plan.is_none() {
            return refuse("this server has no plan yet".into(), true);
        }
        // The caller's plan is older or newer than this core's use.
        if let (Some(to), Some(id)) = (hello.to, self.id())
            && to != id
        {
            return refuse(format!("{id} is served here, and not {to}"), true);
        }
        let mut session = 0;
        match (you, hello.from) {
            (NodeId::Aggregator(id), Party::Aggregator { process, .. }) => {
                session = self.aggregators.check_hello(id, process, hello.incarnation)?;
            }
            (NodeId::Worker(_), Party::Reader { id: Some(id) }) => {
                self.readers.check(id, hello.incarnation)?
            }
            (NodeId::Worker(worker), _) if !self.members.is_member(worker, hello.incarnation) => {
                let reason = format!("{worker} was declared dead or has left; the job goes on without it");
                return refuse(reason, false);
            }
            _ => {}
        }
        Ok(Welcome { you, incarnation: hello.incarnation, session })
    }

    /// A peer that was welcome is connected. A change of the plan may have come between: one that is not welcome any more is refused by
    /// its frames.
    pub(crate) fn admit(&mut self, now: Time, hello: &Hello, welcome: &Welcome) {
        match (welcome.you, hello.from) {
            (NodeId::Aggregator(id), Party::Aggregator { process, .. }) => {
                self.aggregators.admit(id, process, welcome.session);
            }
            (NodeId::Worker(id), _) if id.is_reader() => {
                self.readers.admit(id, hello.incarnation);
                // A connection that this one takes the place of may have followed streams.
                self.delivery.lose_follower(welcome.you);
            }
            (NodeId::Worker(worker), _) if self.members.connect(worker, hello.incarnation) => {
                self.delivery.reach_directly(worker);
                self.note_judge(worker, true);
                self.tell_judge(now);
            }
            _ => {}
        }
    }

    /// The coordinator may be away for so long.
    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.coordinator.set_patience(patience);
    }

    /// Another process takes over from the one that served the shard before, by this plan.
    pub(crate) fn take_over(&mut self, now: Time, plan: Plan) {
        // What was copied for a checkpoint was the former process' to write. The coordinator says the order again.
        self.checkpoints = Checkpoints::default();
        self.take_plan(now, plan);
    }

    fn lose_reader(&mut self, now: Time, id: WorkerId) {
        self.readers.lose(id);
        self.delivery.lose_follower(NodeId::Worker(id));
        self.links.lose(now, id, &mut self.tables);
    }

    /// Something is wrong here: the coordinator is told, so that the job ends with the reason.
    pub(crate) fn fail(&mut self, error: String) {
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
        self.outputs.push_back(Output::send_newest(NodeId::Coordinator, message));
    }

    fn tell_coordinator(&mut self, message: &Control) {
        let frame = frame(Kind::Control, message);
        self.outputs.push_back(Output::send(NodeId::Coordinator, frame));
    }

    fn log(&mut self, line: String) {
        self.outputs.push_back(Output::Log(Level::Warn, line));
    }
}

fn decode_control(payload: &[u8]) -> Result<Control, Fault> {
    control::decode("control message", payload)
        .map_err(|error| Fault { cause: Cause::Protocol, message: error.to_string() })
}

#[cold]
fn not_a_member(worker: WorkerId) -> Fault {
    Fault { cause: Cause::NotAMember, message: format!("{worker} is no member of this job any more") }
}

impl Role for Shard {
    fn node(&self) -> Option<NodeId> {
        self.id().map(NodeId::Shard)
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        let welcome = self.check_hello(hello)?;
        self.admit(now, hello, &welcome);
        Ok(welcome)
    }

    fn hello(&self, _connection: ConnectionId) -> Hello {
        let ShardConfig { job, process, server, core, cores, .. } = &self.config;
        let from = Party::Shard { process: *process, server: *server, core: *core, cores: *cores };
        Hello { job: job.clone(), from, incarnation: process.0, to: None }
    }

    fn handle_connected(&mut self, _now: Time, _connection: ConnectionId, welcome: &Welcome) {
        // A shard connects to the coordinator only.
        self.coordinator.connected();
        if let NodeId::Shard(id) = welcome.you {
            self.config.server = Some(id.server);
        }
        self.tell_coordinator(&Control::Register { addresses: self.config.addresses.clone() });
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        match connection {
            ConnectionId::Node(NodeId::Worker(worker)) if worker.is_reader() => self.lose_reader(now, worker),
            ConnectionId::Node(NodeId::Worker(worker)) => self.lose_worker(now, worker),
            ConnectionId::Node(NodeId::Aggregator(id)) => self.lose_aggregator(now, id),
            // The coordinator's is the only other one.
            _ if why.is_final() => self.fail(why.to_string()),
            _ => self.coordinator.disconnected(now, why),
        }
        self.tell_judge(now);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        // It has one connection to each node.
        let ConnectionId::Node(from) = connection else { return };
        if !has_fitting_type(header) && matches!(from, NodeId::Worker(_) | NodeId::Aggregator(_)) {
            let message =
                format!("{from} sent {:?} in a {:?} frame, which has f32", header.dtype, header.kind);
            let fault = Fault { cause: Cause::Shape, message };
            return self.delivery.refuse_to(from, header.table, header.request, &fault);
        }
        match (from, header.kind) {
            // Frames of a replaced process count neither for it nor for its successor.
            (NodeId::Worker(worker), _) if self.members.awaits_connection(worker) => {}
            (NodeId::Worker(worker), Kind::Control) => self.handle_worker_control(now, worker, payload),
            (NodeId::Worker(worker), kind) => match FromWorker::decode(header) {
                Some(frame) => self.handle_worker_frame(now, worker, &frame, payload),
                None => {
                    let message = format!("a server does not take {kind:?} frames from a worker");
                    let fault = Fault { cause: Cause::Protocol, message };
                    self.delivery.refuse(worker, header.table, header.request, &fault);
                }
            },
            (NodeId::Aggregator(id), Kind::Control) => {
                aggregating::handle_aggregator_control(self, now, id, payload)
            }
            (NodeId::Aggregator(id), _) => {
                aggregating::handle_aggregator_frame(self, now, id, header, payload)
            }
            (NodeId::Coordinator, Kind::Control) => match control::decode("control message", payload) {
                Ok(message) => self.handle_control(now, message),
                Err(error) => self.log(error.to_string()),
            },
            (from, kind) => self.log(format!("ignored a {kind:?} frame from {from}")),
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.stopped {
            return;
        }
        self.outputs.extend(self.coordinator.poll(now));
        self.coordinator.overdue(now).into_iter().for_each(|sentence| self.fail(sentence));
        self.tables.settle_due(now, &mut self.delivery);
        self.links.handle_timeout(now, &mut self.delivery);
        if self.coordinator.is_up() && self.next_report <= now {
            self.send_report(now);
            // Pulls that still wait do so because some worker is late.
            self.delivery.acknowledge_waiting();
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.stopped {
            return None;
        }
        let report = self.coordinator.is_up().then_some(self.next_report);
        let tables = [self.tables.next_timeout(), self.links.next_timeout()];
        [self.coordinator.next_timeout(), report].into_iter().chain(tables).flatten().min()
    }

    fn progress(&self, connection: ConnectionId) -> Option<u64> {
        let ConnectionId::Node(NodeId::Worker(worker)) = connection else { return None };
        self.members.progress(worker)
    }

    fn handle_archived(&mut self, now: Time, response: Response) {
        match response {
            Response::Written { folder, file } => {
                let message = self.checkpoints.note_written(&folder, file, &self.tables);
                message.iter().for_each(|message| self.tell_coordinator(message));
            }
            Response::Restored(pieces) => self.take_restored(now, pieces),
            Response::Read(place, part) => self.tell_coordinator(&FilePart::message(place, part)),
            // Manifests are the coordinator's, and what workers keep is theirs.
            Response::Completed { .. } | Response::Unpacked(_) | Response::Appended(..) => {}
        }
    }

    fn poll_output(&mut self) -> Option<Output> {
        if self.tables.has_cuts()
            && let Some(id) = self.id()
        {
            let output = self.checkpoints.end_cuts(&self.config.job, id, &mut self.tables);
            self.outputs.extend(output);
        }
        // An output is moved once, and not from one option to the next.
        if self.delivery.has_frames() {
            return self.delivery.poll_frame();
        }
        if !self.outputs.is_empty() {
            return self.outputs.pop_front();
        }
        self.delivery.poll_acknowledgement()
    }

    fn backlog_bytes(&self) -> usize {
        self.outputs.bytes() + self.delivery.backlog_bytes()
    }

    fn refresh(&self, header: &mut Header) {
        // Chunks are read from the store when they leave, also after a switch to a codec that makes the next answers.
        let table = self.tables.get(header.table.0 as usize);
        match header.kind {
            Kind::Params => header.version = table.version_sent(header.part as usize, header.dtype),
            Kind::Update => {
                header.version = table.published_version(header.part as usize).unwrap_or(header.version)
            }
            _ => {}
        }
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        match body {
            Body::Stored { buffer, start, len } => {
                let StoredTable { table, dtype, is_published } = StoredTable::from_bits(*buffer);
                let table = self.tables.get(table.0 as usize);
                let bytes = if is_published { table.published_bytes() } else { table.stored_bytes(dtype) };
                &bytes[*start..*start + *len]
            }
            elsewhere => elsewhere.bytes().expect("all else has its bytes with it"),
        }
    }

    fn check(&self) -> Result<(), String> {
        self.outputs.check()?;
        self.delivery.check()?;
        self.tables.check()?;
        let waiting: usize = self.tables.iter().map(|table| table.waiting_count()).sum();
        if self.delivery.waiting_count() != waiting {
            let kept = self.delivery.waiting_count();
            return Err(format!("{waiting} pulls wait for their tables' controllers, and {kept} are kept"));
        }
        Ok(())
    }
}
