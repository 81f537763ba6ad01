//! The coordinator as a state machine: membership, liveness, the plan, policies, barriers, status.
//!
//! It is never in the data path. It waits for the expected servers and workers, checks that all workers declare the
//! same tables, places them, and hands out a plan. From then on the plan goes from epoch to epoch: a worker joins, leaves or dies,
//! a policy changes. A worker that is silent too long is declared dead, and the shards go on without it; one that is started anew
//! takes part again. Time in which the coordinator itself stood still does not count as silence.

mod aggregating;
mod aggregators;
mod balance;
mod barriers;
mod checkpointing;
mod checkpoints;
mod commands;
mod config;
mod copying;
mod declarations;
mod epochs;
mod gathering;
mod idlers;
mod memory;
mod phase;
mod progress;
mod querying;
mod readers;
mod reading;
mod recovery;
mod relaying;
mod replication;
mod returning;
mod routes;
mod scheduler;
mod servers;
mod status_queries;
mod stragglers;
mod switching;
mod vacancy;
mod waiting;
mod warnings;
mod workers;

pub use config::{Checkpointing, JobConfig};
pub use memory::RestoreError;

use crate::address::Addresses;
use crate::checkpoint::Response;
use crate::limits;
use crate::policy::{Axis, PolicyOverride};
use crate::prng::Prng;
use crate::registry::Registry;
use crate::role::{Level, Lost, Outbox, Output, Role};
use crate::standstill::{self, Standstill};
use crate::status::{MemberState, ShardReport, Status, WorkerReport};
use crate::table::TableSpec;
use crate::types::{AggregatorId, Clock, ConnectionId, NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use crate::wire::control::{self, frame};
use crate::wire::{
    Cause, Change, Control, Fault, FirstClock, Header, Hello, Kind, Member, Party, Plan, Refusal, Welcome,
};
use aggregators::Aggregators;
use barriers::{Arrival, Barriers};
use checkpoints::Checkpoints;
use commands::Commands;
use declarations::{Declarations, fits_a_message};
use epochs::Epochs;
use memory::Memory;
use phase::{Phase, Stage};
use progress::Stalls;
use readers::Readers;
use recovery::Recovery;
use replication::{InSync, Replication};
use routes::Routes;
use scheduler::{Release, Scheduler};
use servers::{Caller, Place, Servers};
use status_queries::StatusQueries;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use stragglers::Stragglers;
use switching::Switching;
use vacancy::Vacancy;
use workers::{Accepted, Heard, Workers};

/// The coordinator of one job.
#[derive(Debug)]
pub struct Coordinator {
    config: JobConfig,
    registry: Arc<Registry>,
    workers: Workers,
    readers: Readers,
    servers: Servers,
    /// Spare cores, copies of shards, and where shards are served.
    replication: Replication,
    aggregators: Aggregators,
    declarations: Declarations,
    /// `None` until all servers and workers that the job waits for are here.
    epochs: Option<Epochs>,
    stage: Stage,
    /// Why the job is over, if it failed.
    failure: Option<String>,
    /// Policies that train badly together, as sentences.
    warnings: Vec<String>,
    /// A worker without which the job cannot go on is missing.
    vacancy: Option<Vacancy>,
    /// Without overlap: the barrier between push and pull.
    scheduler: Option<Scheduler>,
    barriers: Barriers,
    stragglers: Stragglers,
    stalls: Stalls,
    routes: Routes,
    commands: Commands,
    queries: StatusQueries,
    /// From when the shards have entered the plan, where there is an archive.
    checkpoints: Option<Checkpoints>,
    /// Those who read a file from the archive, in the order of the requests.
    archive_readers: VecDeque<NodeId>,
    /// Tells checkpoints of this run from those of others.
    run: u64,
    standstill: Standstill,
    memory: Memory,
    recovery: Recovery,
    /// Who was told, on the connection that stands, how long to wait for a coordinator that is gone.
    patient: BTreeSet<NodeId>,
    outputs: Outbox,
}

/// Readers' incarnations are drawn apart from workers'.
const READERS_FORK: u64 = 1;
/// Names of checkpoints are no secret, and tell nothing of one.
const RUN_FORK: u64 = 2;

impl Coordinator {
    /// A coordinator that waits for the job's members. The configuration must have passed [`JobConfig::check`].
    ///
    /// Workers' incarnations follow from `secret`. Whoever knows one can speak in that worker's name, so a driver draws the
    /// secret anew for each job; only the simulator's follows from a seed.
    pub fn new(config: JobConfig, registry: Arc<Registry>, secret: u64) -> Coordinator {
        Coordinator {
            workers: Workers::new(config.workers, config.worker_timeout, secret),
            readers: Readers::new(Prng::fork(secret, READERS_FORK).next_u64()),
            servers: Servers::new(config.servers, config.own_server),
            replication: Replication::new(config.replicas > 0),
            config,
            registry,
            aggregators: Aggregators::default(),
            declarations: Declarations::default(),
            epochs: None,
            stage: Stage::Starting,
            failure: None,
            warnings: Vec::new(),
            vacancy: None,
            scheduler: None,
            barriers: Barriers::default(),
            stragglers: Stragglers::default(),
            stalls: Stalls::default(),
            routes: Routes::default(),
            commands: Commands::default(),
            queries: StatusQueries::default(),
            checkpoints: None,
            archive_readers: VecDeque::new(),
            run: Prng::fork(secret, RUN_FORK).next_u64(),
            standstill: Standstill::default(),
            memory: Memory::default(),
            recovery: Recovery::default(),
            patient: BTreeSet::new(),
            outputs: Outbox::default(),
        }
    }

    /// From now on everything that would be lost with this process is stored ([`Output::Remember`]) before others hear of it, so that it can be
    /// started anew with [`Coordinator::restore`]. Members go on without it for so long. To be called before anything else.
    pub fn remembering(mut self, grace: Duration) -> Coordinator {
        self.memory.keep(grace.min(limits::MAX_COORDINATOR_GRACE));
        self
    }

    /// A coordinator in place of one that is gone, with the last state that was stored: it waits for the members that it remembers to come
    /// back, tells them what they have missed, and goes on. The configuration must have passed [`JobConfig::check`].
    pub fn restore(
        now: Time,
        config: JobConfig,
        registry: Arc<Registry>,
        grace: Duration,
        state: &[u8],
    ) -> Result<Coordinator, RestoreError> {
        returning::restore(now, config, registry, grace, state)
    }

    /// After [`Coordinator::restore`]: whether the process that coordinated the job before served shards that nobody has a copy of. Where that
    /// process is known to be dead, the job cannot go on.
    pub fn has_lost_parameters(&self) -> bool {
        self.recovery.has_lost_parameters()
    }

    /// Another process coordinates the job from now on: this one ends, and the job does not.
    pub fn step_down(&mut self, why: String) {
        self.outputs = Outbox::default();
        self.memory = Memory::default();
        self.outputs.push_back(Output::Stop { error: Some(why) });
    }

    /// Whether the job has ended, well or not.
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// The job as it stands.
    pub fn status(&self, now: Time) -> Status {
        Status {
            job: self.config.job.clone(),
            phase: self.phase(),
            size: self.config.size(),
            epoch: self.epochs.as_ref().map_or(0, |epochs| epochs.newest().epoch),
            restarts: self.workers.restarts(),
            workers: self.workers.statuses(now),
            readers: self.readers.statuses(now),
            receivers: self.routes.statuses(|id| match id.is_reader() {
                true => self.readers.version(id),
                false => self.workers.version(id),
            }),
            shards: self.servers.reports(now),
            served: self
                .epochs
                .as_ref()
                .map(|epochs| self.replication.statuses(epochs.newest(), |id| self.servers.primary(id)))
                .unwrap_or_default(),
            moves: self.replication.moves(),
            packs: self.epochs.as_ref().map(|epochs| epochs.newest().packs()).unwrap_or_default(),
            aggregators: self.aggregators.statuses(),
            warnings: self.warnings.clone(),
            waited: self.workers.waited(),
            stalled: self.stalls.statuses(now),
        }
    }

    /// The newest plan, once there is one.
    pub fn plan(&self) -> Option<&Plan> {
        self.epochs.as_ref().map(Epochs::newest)
    }

    /// The job's phase, or what it waits for, as a sentence.
    fn phase(&self) -> String {
        let Coordinator { stage, failure, config, workers, readers, servers, epochs, vacancy, .. } = self;
        let (failure, epochs, vacancy) = (failure.as_deref(), epochs.as_ref(), vacancy.as_ref());
        Phase { stage: *stage, failure, config, workers, readers, servers, epochs, vacancy }.to_string()
    }

    fn is_planned(&self) -> bool {
        self.epochs.is_some()
    }

    fn handle_worker(&mut self, now: Time, worker: WorkerId, message: Control) {
        match message {
            Control::Declare { tables } => self.declare(now, worker, tables),
            Control::WorkerReport(report) => self.take_worker_report(now, worker, report),
            Control::Pushed { clock } => self.pushed(now, worker, clock),
            Control::Barrier { name, number } => self.arrive(now, worker, name, number),
            Control::Idle { until } if self.workers.is_running(worker) => {
                self.barriers.set_idle(worker, until);
                self.settle_barriers(now, None);
            }
            Control::Leave => {
                self.send(NodeId::Worker(worker), &Control::Left);
                self.part_with(now, worker, MemberState::Left);
            }
            Control::Reached { addresses, is_aggregated } => {
                relaying::reach(self, worker, addresses, is_aggregated)
            }
            Control::Unreachable { relay } => relaying::note_out_of_reach(self, worker, relay),
            Control::CheckpointTaken { number, outcome } => {
                checkpointing::take_of_worker(self, now, worker, number, outcome);
            }
            Control::CheckpointPart(part) => checkpointing::take_part(self, now, worker, part),
            Control::CheckpointRead(place) => checkpointing::restore(self, worker, place),
            Control::StatusQuery => querying::query_status(self, now, NodeId::Worker(worker)),
            Control::PoliciesQuery => self.tell_policies(worker),
            other => self.log(format!("ignored a `{}` message from {worker}", other.name())),
        }
    }

    /// Switches are left out: what tables share was decided with the policies that the job began with.
    fn tell_policies(&mut self, worker: WorkerId) {
        self.send(NodeId::Worker(worker), &Control::Policies(Box::new(self.config.policies())));
    }

    fn handle_shard(&mut self, now: Time, id: ShardId, message: Control) {
        match message {
            Control::Register { addresses } => self.register(now, id, addresses),
            Control::Entered { epoch, joining, lacks_values } => {
                if let Some(table) = lacks_values {
                    waiting::lack_values(self, now, table);
                }
                self.shard_entered(now, id, epoch, &joining);
            }
            Control::ShardReport(report) => self.take_shard_report(now, id, *report),
            Control::IdleNoted { number, version } => {
                self.barriers.idlers_mut().note(id, number, version);
                self.settle_barriers(now, None);
            }
            Control::CheckpointTaken { number, outcome } => {
                checkpointing::take(self, now, id, number, outcome);
            }
            Control::CheckpointPart(part) => checkpointing::pass_part(self, now, part),
            Control::Stop { error: Some(error) } => {
                self.end(now, Some(control::sentence(format!("{id}: {error}"))));
            }
            Control::PlanQuery => {
                self.servers.forget_informed(id);
                self.inform_shard(id);
            }
            Control::Copied { copy, epoch, bytes } => {
                if let Some(epochs) = &self.epochs {
                    let copy = InSync { shard: id, copy, epoch, bytes };
                    let change = self.replication.note_in_sync(epochs.newest(), copy);
                    change.into_iter().for_each(|change| self.enter(now, change));
                }
                copying::replicate(self, now);
            }
            Control::CopyLost { copy } => {
                if let Some(epochs) = &self.epochs {
                    let change = self.replication.note_lost(epochs.newest(), id, copy);
                    let process = copy.process;
                    self.log(format!("the copy of {id} at {process} does not follow; it is given up"));
                    change.into_iter().for_each(|change| self.enter(now, change));
                }
                copying::replicate(self, now);
            }
            other => self.log(format!("ignored a `{}` message from {id}", other.name())),
        }
    }

    fn handle_command(&mut self, now: Time, number: u32, message: Control) {
        let asker = NodeId::Admin(number);
        match message {
            Control::StatusQuery => querying::query_status(self, now, asker),
            Control::Set(rule) => self.set_policy(now, number, rule),
            Control::Drain { server } => copying::drain(self, now, number, server),
            Control::Rebalance => copying::rebalance(self, now, number),
            Control::CheckpointRequest => checkpointing::ask(self, now, number),
            Control::CheckpointCopyRequest { at } => checkpointing::ask_for_copy(self, now, number, at),
            Control::CheckpointRead(place) => checkpointing::read(self, number, place),
            other => self.log(format!("ignored a `{}` message from {asker}", other.name())),
        }
    }

    fn register(&mut self, now: Time, id: ShardId, addresses: Addresses) {
        if let Err(why) = addresses.check() {
            return self.log(format!("{id} gave {why}"));
        }
        // Once there is a plan, the addresses in it are where workers go.
        if !self.is_planned() {
            self.servers.register(id, addresses);
            self.workers.note_server();
        }
        self.inform_shard(id);
        self.try_plan(now);
    }

    /// A worker's tables: of the job that is to start, or of the one that it joins.
    fn declare(&mut self, now: Time, worker: WorkerId, tables: Vec<TableSpec>) {
        if !self.workers.is_live(worker) {
            return;
        }
        let Some(epochs) = &self.epochs else {
            let other = self.workers.other_declared(worker);
            let taken = self.declarations.take(worker, tables, other, &self.config, &self.registry);
            if let Err(message) = taken {
                return self.refuse(NodeId::Worker(worker), Cause::Declaration, message);
            }
            self.workers.declare(worker);
            return self.try_plan(now);
        };
        let incarnation = self.workers.incarnation(worker).unwrap_or(0);
        let is_member = |member: &Member| member.is_live() && member.incarnation == incarnation;
        if epochs.newest().member(worker).is_some_and(is_member) {
            // Its plan got lost with a connection, or is on its way.
            return self.inform_worker(worker);
        }
        if let Err(message) = self.declarations.compare(worker, &tables, "the job") {
            return self.refuse(NodeId::Worker(worker), Cause::Declaration, message);
        }
        let change = Change::Joining { worker, incarnation };
        let mut next = epochs.newest().clone();
        next.apply(next.epoch + 1, &change);
        if !fits_a_message(&next) {
            let message = "the plan with another worker would be longer than a message may be".into();
            return self.refuse(NodeId::Worker(worker), Cause::Declaration, message);
        }
        self.workers.declare(worker);
        self.vacancy = self.vacancy.take().filter(|vacancy| !vacancy.suits(worker));
        self.enter(now, change);
    }

    /// Makes the plan once all servers and workers are here, and gives it to the shards first.
    fn try_plan(&mut self, now: Time) {
        if self.is_planned() || !self.workers.are_complete() || !self.servers.are_complete() {
            return;
        }
        let (shards, members) = (self.servers.served(), self.workers.original_members());
        let plan = match self.declarations.plan(&self.config, &self.registry, shards, members) {
            Ok(plan) => plan,
            Err(why) => return self.end(now, Some(format!("the job cannot be planned: {why}"))),
        };
        let sync = plan.policy_of(TableId(0), ServerId(0)).sync(&self.registry);
        if let Ok(sync) = sync
            && !sync.overlap
        {
            let workers = plan.members.iter().map(|member| member.worker);
            self.scheduler = Some(Scheduler::new(sync, workers, plan.seed, plan.first_clock()));
        }
        self.replication.begin(&plan);
        self.epochs = Some(Epochs::new(plan));
        self.memory.touch();
        self.warn();
        self.workers.begin(now);
        self.servers.begin(now);
        let shards: Vec<ShardId> = self.servers.ids().collect();
        shards.into_iter().for_each(|id| self.inform_shard(id));
        let aggregators: Vec<AggregatorId> = self.aggregators.ids().collect();
        aggregators.into_iter().for_each(|id| aggregating::inform_aggregator(self, id));
    }

    /// Sends the newest plan to a shard, once on each connection.
    fn inform_shard(&mut self, id: ShardId) {
        if let Some(epochs) = &self.epochs
            && self.servers.inform(id)
        {
            let message = Control::Plan(Box::new(epochs.newest().clone()));
            self.send(NodeId::Shard(id), &message);
            let idle = self.barriers.idlers().message();
            idle.into_iter().for_each(|message| self.send(NodeId::Shard(id), &message));
            let order = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.order().cloned());
            order.into_iter().for_each(|order| self.send(NodeId::Shard(id), &Control::Checkpoint(order)));
        }
    }

    /// Sends the settled plan to a worker that takes part, once on each connection.
    fn inform_worker(&mut self, id: WorkerId) {
        if let Some(epochs) = &self.epochs
            && self.workers.is_running(id)
            && self.workers.inform(id)
        {
            let message = Control::Plan(Box::new(epochs.settled().for_worker(id)));
            self.send(NodeId::Worker(id), &message);
            self.routes.forget(id);
            relaying::route(self);
            checkpointing::remind(self, id);
        }
    }

    /// The one way from an epoch to the next: shards and aggregators are told, and workers when these have entered it.
    fn enter(&mut self, now: Time, change: Change) {
        let Some(epochs) = &mut self.epochs else { return };
        let scheduled = match (&change, &mut self.scheduler) {
            (Change::Joining { worker, .. }, Some(scheduler)) => scheduler.join(*worker),
            _ => 0,
        };
        // A joining worker's first clock is later than the job's: the first round is for those whom the job begins with.
        let at_least = scheduled.max(epochs.newest().first_clock() + 1);
        let message = epochs.make(now, change.clone(), at_least);
        self.memory.touch();
        self.tell_informed(&message);
        if let (Some(scheduler), Some(epochs)) = (&mut self.scheduler, &self.epochs) {
            // It judges by the model of the first table.
            let sync = epochs.newest().policy_of(TableId(0), ServerId(0)).sync(&self.registry);
            scheduler.apply_change(now, &change, sync.expect("checked before it was put into the plan"));
        }
        self.send_releases();
        self.settle_epochs(now);
    }

    /// Tells all shards and aggregators that have the plan.
    fn tell_informed(&mut self, message: &Control) {
        let shards = self.servers.informed().map(NodeId::Shard);
        let told: Vec<NodeId> = shards.chain(self.aggregators.informed().map(NodeId::Aggregator)).collect();
        told.into_iter().for_each(|to| self.send(to, message));
    }

    fn shard_entered(&mut self, now: Time, id: ShardId, epoch: u32, joining: &[FirstClock]) {
        let Some(epochs) = &mut self.epochs else { return };
        epochs.shard_entered(now, id, epoch, joining);
        if self.stage == Stage::Starting && epochs.are_ready() {
            self.stage = Stage::Running;
            self.memory.touch();
            // Another process may have the rank by now: it joins when it has declared its tables.
            let plan = epochs.settled();
            let is_original = |member: &&Member| {
                plan.is_original(member)
                    && self.workers.incarnation(member.worker) == Some(member.incarnation)
            };
            let members = plan.members.iter().filter(is_original);
            let originals: Vec<WorkerId> = members.map(|member| member.worker).collect();
            for worker in originals {
                self.workers.run(now, worker);
                self.send(NodeId::Worker(worker), &Control::Ready { last: self.workers.last_ready() });
                self.inform_worker(worker);
            }
            let readers: Vec<WorkerId> = self.readers.ids().collect();
            readers.into_iter().for_each(|reader| reading::inform_reader(self, reader));
            checkpointing::begin(self, now);
        }
        self.settle_epochs(now);
    }

    /// Goes on with what shards and aggregators have entered: first clocks that are known, and changes that workers may hear of.
    fn settle_epochs(&mut self, now: Time) {
        while let Some(epochs) = &mut self.epochs {
            // Without overlap the first clock is one that the scheduler has not passed.
            if !self.recovery.waits_for_clocks()
                && let Some(joined) = epochs.poll_joined()
            {
                self.enter(now, joined);
                continue;
            }
            let Some((epoch, change)) = epochs.poll_settled() else { break };
            match change {
                Change::Joining { .. } | Change::Left { .. } => {}
                Change::Joined { worker, clock } => {
                    self.memory.touch();
                    self.workers.run(now, worker);
                    self.inform_worker(worker);
                    if self.workers.is_running(worker) {
                        self.note(format!("{worker} takes part from clock {clock} on"));
                    }
                }
                Change::Policy(_) | Change::Served { .. } => {
                    let informed: Vec<WorkerId> =
                        self.workers.informed().chain(self.readers.informed()).collect();
                    let message = Control::Change { epoch, change };
                    informed.into_iter().for_each(|id| self.send(NodeId::Worker(id), &message));
                }
            }
        }
        relaying::route(self);
        let settled = self.epochs.as_ref().map_or(0, |epochs| epochs.settled().epoch);
        while let Some((number, sentence)) = self.commands.poll_due(settled) {
            self.send(NodeId::Admin(number), &Control::Done(sentence));
        }
    }

    /// A command changes policies. It is answered when all servers have changed them.
    fn set_policy(&mut self, now: Time, number: u32, rule: PolicyOverride) {
        let outcome = match &self.epochs {
            None => Err(format!("the job has not started ({})", self.phase())),
            Some(epochs) => {
                let plan = epochs.newest();
                let (config, registry) = (&self.config, &*self.registry);
                let has_aggregators = self.aggregators.ids().next().is_some();
                let switching = Switching { config, registry, plan, has_aggregators };
                switching.check(&rule).map(|done| (done, plan.epoch + 1))
            }
        };
        match outcome {
            Ok((sentence, epoch)) => {
                // A learning rate may follow a schedule from step to step: that is not news.
                if rule.policies.iter().any(|(axis, _)| axis != Axis::Optimizer) {
                    self.note(sentence.clone());
                }
                self.commands.promise(now, number, epoch, sentence);
                self.enter(now, Change::Policy(rule));
                self.warn();
            }
            Err(message) => self.refuse(NodeId::Admin(number), Cause::Policy, message),
        }
    }

    /// Commands that have waited long enough for everybody to follow are told who has not.
    fn answer_unsettled(&mut self, now: Time) {
        while let Some((number, epoch)) = self.commands.poll_unsettled(now) {
            let behind = self.epochs.as_ref().and_then(|epochs| epochs.behind(epoch));
            let message =
                format!("changed; {}", behind.unwrap_or_else(|| "not everybody has followed yet".into()));
            self.refuse(NodeId::Admin(number), Cause::Unsettled, message);
        }
    }

    fn take_shard_report(&mut self, now: Time, id: ShardId, report: ShardReport) {
        let tables = self.epochs.as_ref().map_or(0, |epochs| epochs.newest().tables.len());
        if report.shard != id || report.tables.len() > tables {
            return self.log(format!("ignored a report of {id} that is not about its tables"));
        }
        let version = report.tables.iter().map(|table| table.version).max();
        let bytes = report.bytes_pushed.saturating_add(report.bytes_pulled);
        self.replication.note_traffic(now, id, bytes);
        self.servers.take_report(now, id, report);
        checkpointing::note_version(self, now, version);
        self.queries.reported(id);
        querying::answer_queries(self, now);
    }

    fn take_worker_report(&mut self, now: Time, worker: WorkerId, mut report: WorkerReport) {
        report.waiting = report.waiting.map(control::sentence);
        let changes = report.links.iter_mut().flat_map(|links| &mut links.last);
        changes.for_each(|change| change.cause = control::sentence(std::mem::take(&mut change.cause)));
        self.workers.take_report(now, worker, report);
        checkpointing::note_progress(self, now);
        returning::take_clock(self, now, worker, None);
        let straggler = self.stragglers.judge(now, &self.workers, self.config.servers);
        straggler.into_iter().for_each(|line| self.log(line));
        if !self.workers.is_live(worker) || self.workers.is_running(worker) {
            return;
        }
        let incarnation = self.workers.incarnation(worker);
        if let (Some(epochs), Some(incarnation)) = (&self.epochs, incarnation)
            && let Some(reason) = epochs.why_not_joined(worker, incarnation)
        {
            self.send(NodeId::Worker(worker), &Control::Waiting { reason });
        }
    }

    /// Without overlap: the scheduler's barrier between push and pull.
    fn pushed(&mut self, now: Time, worker: WorkerId, clock: Clock) {
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.pushed(now, worker, clock);
        }
        returning::take_clock(self, now, worker, Some(clock));
        self.send_releases();
    }

    fn send_releases(&mut self) {
        while let Some(Release { worker, clock, last }) = self.scheduler.as_mut().and_then(Scheduler::poll) {
            self.send(NodeId::Worker(worker), &Control::Go { clock, last });
        }
    }

    /// A worker left or died: the shards go on without it. Before there is a plan its place is free again.
    fn part_with(&mut self, now: Time, worker: WorkerId, state: MemberState) {
        if !self.workers.is_live(worker) {
            return;
        }
        self.barriers.forget(worker);
        let Some(epochs) = &self.epochs else {
            self.workers.remove(worker);
            return self.note(format!("{worker} went away before the job started; its place is free"));
        };
        let incarnation = self.workers.incarnation(worker);
        let is_member = |member: &Member| member.is_live() && Some(member.incarnation) == incarnation;
        let is_member = epochs.newest().member(worker).is_some_and(is_member);
        self.workers.depart(worker, state);
        checkpointing::part_with(self, now, worker);
        self.memory.touch();
        if state == MemberState::Dead {
            self.log(format!("{worker} is declared dead; the job goes on without it"));
            // A worker that only stood still reads the reason when it goes on, even if the job is over by then.
            self.send_away(worker);
        }
        if is_member {
            self.enter(now, Change::Left { worker });
        } else if !self.workers.lived_before(worker) {
            self.workers.remove(worker);
        }
        self.settle_barriers(now, Some(worker));
        returning::resume_scheduler(self, now);
        if self.workers.live().next().is_none() {
            waiting::await_workers(self, now);
        } else if let Some(vacancy) = self.vacancy.as_mut().filter(|vacancy| vacancy.suits(worker)) {
            // The worker that left may be the one that had come to fill the vacancy.
            vacancy.since = now;
        }
    }

    /// A process came that has the rank of one whose connection is gone: that one is declared dead now.
    fn replace(&mut self, now: Time, worker: WorkerId) {
        self.barriers.forget(worker);
        self.log(format!("{worker} is started anew; its former process is declared dead"));
        self.enter(now, Change::Left { worker });
        self.settle_barriers(now, Some(worker));
    }

    /// A worker that was declared dead is told, and sent away.
    fn send_away(&mut self, worker: WorkerId) {
        self.refuse(NodeId::Worker(worker), Cause::NotAMember, self.workers.obituary(worker));
        self.outputs.push_back(Output::Disconnect { connection: NodeId::Worker(worker).into() });
    }

    fn refuse(&mut self, peer: impl Into<ConnectionId>, cause: Cause, message: String) {
        let frame = frame(Kind::Error, &Fault { cause, message });
        self.outputs.push_back(Output::send(peer, frame));
    }

    /// A worker comes to a barrier, or says again after a broken connection that it is there.
    fn arrive(&mut self, now: Time, worker: WorkerId, name: String, number: u64) {
        match self.barriers.arrive(worker, &name, number) {
            Arrival::Waits => self.settle_barriers(now, Some(worker)),
            Arrival::Reached => {
                let message = Control::BarrierReached { name, last: None, version: None };
                self.send(NodeId::Worker(worker), &message);
            }
            Arrival::Refused(message) => self.refuse(NodeId::Worker(worker), Cause::Protocol, message),
        }
    }

    /// Lets workers go on from the barriers at which all of them are, now that this one has come or left, and tells those who wait for
    /// pushes which workers push nothing for now.
    fn settle_barriers(&mut self, now: Time, last: Option<WorkerId>) {
        let running: Vec<WorkerId> = self.workers.running().collect();
        if self.barriers.settle(&running, last) {
            self.memory.touch();
        }
        if let Some(message) = self.barriers.idlers_mut().poll_news() {
            self.tell_informed(&message);
            let idle: Vec<(WorkerId, Clock)> = self.barriers.idlers().idle().collect();
            self.scheduler.iter_mut().for_each(|scheduler| scheduler.set_idle(now, &idle));
            self.send_releases();
        }
        while let Some(message) = self.barriers.poll_reached(self.servers.ids()) {
            self.memory.touch();
            running.iter().for_each(|id| self.send(NodeId::Worker(*id), &message));
        }
    }

    /// The job is over: at once if it failed, and when its last checkpoint is complete otherwise.
    fn end(&mut self, now: Time, error: Option<String>) {
        if error.is_some() || !checkpointing::finish(self, now) {
            self.end_now(now, error);
        }
    }

    fn end_now(&mut self, now: Time, error: Option<String>) {
        if self.stage == Stage::Over {
            return;
        }
        self.stage = Stage::Over;
        self.checkpoints = None;
        self.memory.touch();
        self.failure.clone_from(&error);
        let waited = stragglers::summary(&self.workers.waited(), self.config.servers);
        waited.into_iter().for_each(|line| self.note(line));
        self.everybody().into_iter().for_each(|to| returning::say_farewell(self, to));
        let away: BTreeSet<NodeId> =
            self.servers.away().map(NodeId::Shard).chain(self.replication.away()).collect();
        // A server that is about to reconnect would wait for this coordinator as long as its patience lasts.
        match error {
            None if !away.is_empty() || self.recovery.awaits_retired(now) => {
                self.recovery.say_farewell(away, now);
            }
            error => self.outputs.push_back(Output::Stop { error }),
        }
    }

    /// Those who have to hear that the job is over.
    fn everybody(&self) -> Vec<NodeId> {
        let spares = self.replication.connected().map(NodeId::Spare);
        let shards = self.servers.ids().map(NodeId::Shard).chain(spares);
        let aggregators = self.aggregators.ids().map(NodeId::Aggregator);
        let workers = self.workers.live().chain(self.readers.ids()).map(NodeId::Worker);
        shards.chain(aggregators).chain(workers).collect()
    }

    /// Excludes time in which this coordinator stood still from every peer's silence.
    fn exclude(&mut self, now: Time, lost: Duration) {
        let vacancy = self.vacancy.iter_mut().map(|vacancy| &mut vacancy.since);
        let aggregators = self.aggregators.last_heard_mut();
        let members = self.workers.last_heard_mut().chain(self.readers.last_heard_mut());
        let servers = self.servers.silences_mut().chain(self.replication.silences_mut());
        let members = members.chain(servers).chain(aggregators);
        let followers = self.epochs.iter_mut().flat_map(Epochs::since_mut);
        let all = members.chain(self.commands.last_heard_mut()).chain(vacancy).chain(followers);
        all.for_each(|since| standstill::exclude(since, now, lost));
    }

    /// Gives up members that were away or silent for too long.
    fn expire_members(&mut self, now: Time) {
        let is_planned = self.is_planned();
        for worker in self.workers.overdue(now, is_planned, &self.standstill) {
            self.part_with(now, worker, MemberState::Dead);
        }
        progress::judge(self, now);
        waiting::expire_vacancy(self, now);
        if self.stage == Stage::Over {
            return;
        }
        aggregating::expire_aggregators(self, now);
        reading::expire_readers(self, now);
        copying::replicate(self, now);
        if let Some(error) = self.servers.overdue(now, &self.standstill) {
            return self.end(now, Some(error));
        }
        let grace = self.config.worker_timeout;
        while is_planned && let Some(id) = self.servers.poll_silent(now, grace, &self.standstill) {
            self.log(format!("{id} is silent for {} s; the job waits for it", grace.as_secs_f64()));
        }
    }

    fn send(&mut self, to: NodeId, message: &Control) {
        self.outputs.push_back(Output::send(to, frame(Kind::Control, message)));
    }

    fn note(&mut self, line: String) {
        self.outputs.push_back(Output::Log(Level::Info, line));
    }

    /// Says which policies train badly together, once.
    fn warn(&mut self) {
        let Some(epochs) = &self.epochs else { return };
        let warnings = warnings::warnings(epochs.newest(), &self.registry);
        for sentence in &warnings {
            if !self.warnings.contains(sentence) {
                self.log(format!("warning: {sentence}"));
            }
        }
        self.warnings = warnings;
    }

    fn log(&mut self, line: String) {
        self.outputs.push_back(Output::Log(Level::Warn, line));
    }
}

impl Role for Coordinator {
    fn node(&self) -> Option<NodeId> {
        Some(NodeId::Coordinator)
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        // A command that names no job means the one that is here.
        let is_any = hello.job.is_empty() && matches!(hello.from, Party::Command);
        if hello.job != self.config.job && !is_any {
            let reason = format!("this address serves job `{}`, not `{}`", self.config.job, hello.job);
            return Err(Refusal { reason, retry: false });
        }
        if self.stage == Stage::Over && !self.recovery.is_farewell() {
            return Err(Refusal { reason: format!("job `{}` is over", self.config.job), retry: false });
        }
        if !self.memory.is_ready() {
            let reason = "the job's coordinator is about to start".into();
            return Err(Refusal { reason, retry: true });
        }
        let is_planned = self.is_planned();
        self.recovery.refuse_newcomer(now, hello, is_planned)?;
        match hello.from {
            Party::Worker { rank } => {
                let Accepted { welcome, replaced } =
                    self.workers.accept(now, hello.incarnation, rank, is_planned)?;
                if let Some(worker) = replaced {
                    self.replace(now, worker);
                }
                Ok(welcome)
            }
            Party::Shard { process, server, core, cores } => {
                let caller = Caller { process, server, core, cores };
                match self.servers.accept(now, caller, self.epochs.as_ref().map(Epochs::newest))? {
                    Place::Serves(welcome) => Ok(welcome),
                    Place::Spare => {
                        self.memory.touch();
                        let welcome = self.replication.accept(process, server, core);
                        // A core that still names a shard goes away again once it hears that this is another's.
                        if server.is_none() {
                            self.recovery.note_spare(process, welcome.you);
                        }
                        Ok(welcome)
                    }
                }
            }
            Party::Command => {
                let (welcome, evicted) = self.commands.accept(now);
                let hang_up = |id| Output::Disconnect { connection: NodeId::Admin(id).into() };
                self.outputs.extend(evicted.map(hang_up));
                Ok(welcome)
            }
            Party::Aggregator { process, id } => {
                self.memory.touch();
                self.aggregators.accept(now, process, id)
            }
            Party::Reader { id } => {
                self.memory.touch();
                self.readers.accept(now, hello.incarnation, id)
            }
            Party::Through { .. } | Party::Below { .. } | Party::Copy { .. } => {
                let reason =
                    "this is the job's coordinator; give the address that `paramill aggregate` prints".into();
                Err(Refusal { reason, retry: false })
            }
        }
    }

    fn hello(&self, _connection: ConnectionId) -> Hello {
        // A coordinator never connects; it is connected to.
        Hello { job: self.config.job.clone(), from: Party::Command, incarnation: 0, to: None }
    }

    fn handle_connected(&mut self, _now: Time, _connection: ConnectionId, _welcome: &Welcome) {}

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        // It has one connection to each node.
        let ConnectionId::Node(peer) = connection else { return };
        let is_news = self.is_planned() && self.stage != Stage::Over;
        self.patient.remove(&peer);
        match peer {
            NodeId::Worker(id) if id.is_reader() => reading::lose_reader(self, id),
            NodeId::Worker(id) => self.workers.lose(now, id),
            NodeId::Shard(id) => {
                self.servers.lose(now, id, self.is_planned());
                if is_news {
                    self.log(format!("lost {id}: {why}"));
                }
            }
            NodeId::Aggregator(id) => {
                // What was given up is no news.
                if is_news && self.aggregators.is_connected(id) {
                    self.log(format!("lost {id}: {why}"));
                }
                aggregating::lose_aggregator(self, now, id);
            }
            NodeId::Admin(id) => self.commands.lose(id),
            NodeId::Spare(number) => self.replication.lose(now, number),
            NodeId::Coordinator => {}
        }
        self.checkpoints.iter_mut().for_each(|checkpoints| checkpoints.forget(peer));
        self.queries.forget(peer);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        let ConnectionId::Node(from) = connection else { return };
        match from {
            NodeId::Worker(id) if id.is_reader() => match self.readers.heard(now, id) {
                None => return,
                Some(false) => reading::inform_reader(self, id),
                Some(true) => {}
            },
            NodeId::Worker(id) => match self.workers.heard(now, id) {
                Heard::Unknown => return,
                Heard::Dead => return self.send_away(id),
                // After a broken connection it may have missed changes.
                Heard::Member { informed: false } => self.inform_worker(id),
                Heard::Member { informed: true } => {}
            },
            NodeId::Shard(id) if self.servers.heard(now, id) => self.note(format!("{id} is heard again")),
            NodeId::Aggregator(id) if !self.aggregators.heard(now, id) => return,
            NodeId::Admin(number) => self.commands.heard(now, number),
            NodeId::Spare(number) if !self.replication.is_known(number) => return,
            NodeId::Shard(_) | NodeId::Aggregator(_) | NodeId::Spare(_) | NodeId::Coordinator => {}
        }
        returning::ask_for_patience(self, from);
        if self.recovery.is_farewell() {
            return returning::say_farewell(self, from);
        }
        if header.kind != Kind::Control {
            return self.log(format!("ignored a {:?} frame from {from}", header.kind));
        }
        match (from, control::decode("control message", payload)) {
            (NodeId::Worker(id), Ok(message)) if id.is_reader() => {
                reading::handle_reader(self, now, id, message)
            }
            (NodeId::Worker(id), Ok(message)) => self.handle_worker(now, id, message),
            (NodeId::Shard(id), Ok(message)) => self.handle_shard(now, id, message),
            (NodeId::Admin(number), Ok(message)) => self.handle_command(now, number, message),
            (NodeId::Aggregator(id), Ok(message)) => aggregating::handle_aggregator(self, now, id, message),
            (NodeId::Spare(number), Ok(message)) => copying::handle_spare(self, now, number, message),
            (NodeId::Coordinator, Ok(_)) => {}
            (from, Err(error)) => {
                self.log(format!("{from}: {error}"));
                self.refuse(from, Cause::Protocol, error.to_string());
            }
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if let Some(lost) = self.standstill.noticed(now) {
            self.exclude(now, lost);
        }
        if let Some(lost) = self.standstill.poll_untold(now) {
            let seconds = lost.as_secs_f64();
            self.log(format!(
                "the coordinator stood still for {seconds:.1} s; worker timeouts do not count that time"
            ));
        }
        if self.recovery.poll_farewell(now) {
            self.outputs.push_back(Output::Stop { error: self.failure.clone() });
        }
        self.expire_members(now);
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.handle_timeout(now);
        }
        self.send_releases();
        querying::answer_queries(self, now);
        self.answer_unsettled(now);
        checkpointing::handle_timeout(self, now);
        while let Some(id) = self.commands.poll_idle(now, &self.standstill) {
            self.outputs.push_back(Output::Disconnect { connection: NodeId::Admin(id).into() });
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        let is_over = self.stage == Stage::Over;
        let workers = self.workers.next_deadline(&self.standstill);
        let servers = self.servers.next_deadline(&self.standstill).filter(|_| !is_over);
        let queries = self.queries.next_timeout();
        let scheduler = self.scheduler.as_ref().and_then(Scheduler::next_timeout);
        let standstill = (!is_over).then(|| self.standstill.next_timeout());
        let idle = self.commands.next_timeout(&self.standstill);
        let vacancy = waiting::vacancy_deadline(self);
        let grace = self.config.worker_timeout;
        let silent = self.aggregators.next_deadline(grace, &self.standstill).filter(|_| !is_over);
        let behind = self.epochs.as_ref().and_then(|epochs| epochs.next_deadline(grace, &self.standstill));
        let behind = behind.filter(|_| !is_over);
        let readers = self.readers.next_deadline(grace, &self.standstill).filter(|_| !is_over);
        let recovery = self.recovery.next_timeout();
        let copies =
            self.epochs.as_ref().filter(|_| !is_over).and_then(|epochs| {
                self.replication.next_timeout(epochs.newest(), |id| self.servers.primary(id))
            });
        let checkpoints = self.checkpoints.as_ref().and_then(Checkpoints::next_timeout).filter(|_| !is_over);
        let members = [workers, readers, servers, silent, behind, copies];
        let others = [recovery, queries, scheduler, standstill, idle, vacancy, checkpoints];
        members.into_iter().chain(others).flatten().min()
    }

    fn handle_remembered(&mut self, _now: Time) {
        self.memory.stored();
    }

    fn handle_archived(&mut self, now: Time, response: Response) {
        checkpointing::take_response(self, now, response);
    }

    fn poll_output(&mut self) -> Option<Output> {
        let (mut memory, mut outputs) = (std::mem::take(&mut self.memory), std::mem::take(&mut self.outputs));
        let output = memory.poll(&mut outputs, || returning::state(self));
        (self.memory, self.outputs) = (memory, outputs);
        output
    }

    fn backlog_bytes(&self) -> usize {
        self.memory.bytes(self.outputs.bytes())
    }

    fn check(&self) -> Result<(), String> {
        self.outputs.check()?;
        self.memory.check()?;
        self.workers.check()?;
        self.epochs.as_ref().map_or(Ok(()), Epochs::check)
    }
}
