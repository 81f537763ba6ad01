//! The coordinator as a state machine: membership, liveness, the plan, policies, barriers, status.
//!
//! It is never in the data path. It waits for the expected servers and workers, checks that all workers declare the
//! same tables, places them, and hands out one plan. After that it watches: a worker that is silent too long is
//! declared dead, and the shards go on without it. Time in which the coordinator itself stood still does not count as
//! silence.

mod aggregators;
mod commands;
mod config;
mod gate;
mod members;
mod planning;

pub use config::JobConfig;

use crate::address::Addresses;
use crate::limits;
use crate::policy::Axis;
use crate::prng::Prng;
use crate::registry::Registry;
use crate::role::{Lost, Outbox, Output, Role};
use crate::standstill::Standstill;
use crate::status::{MemberState, ShardReport, Status, WorkerReport, WorkerStatus};
use crate::table::TableSpec;
use crate::types::{AggregatorId, Clock, NodeId, ServerId, ShardId, Time, WorkerId};
use crate::wire::control::{self, frame};
use crate::wire::{Cause, Control, Fault, Header, Hello, Kind, Party, Plan, Refusal, Welcome};
use aggregators::AggregatorMember;
use commands::Commands;
use gate::Gate;
use members::{Member, Server, ShardMember};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Somebody who asked for the status, and the shards whose fresh report is still to come.
#[derive(Debug)]
struct StatusQuery {
    asker: NodeId,
    missing: BTreeSet<ShardId>,
    deadline: Time,
}

/// The coordinator of one job.
#[derive(Debug)]
pub struct Coordinator {
    config: JobConfig,
    registry: Arc<Registry>,
    servers: BTreeMap<ServerId, Server>,
    shards: BTreeMap<ShardId, ShardMember>,
    workers: BTreeMap<WorkerId, Member>,
    aggregators: BTreeMap<AggregatorId, AggregatorMember>,
    /// What the workers have declared so far, all of them the same.
    tables: Vec<TableSpec>,
    /// Switches of policies since the job began are at the end of its exceptions.
    plan: Option<Plan>,
    started: bool,
    over: bool,
    epoch: u32,
    /// Incarnations are drawn, so that none is met by counting or by a stale number. The generator is not a cryptographic
    /// one: this is no authentication.
    incarnations: Prng,
    next_incarnation: u64,
    commands: Commands,
    gate: Option<Gate>,
    queries: Vec<StatusQuery>,
    standstill: Standstill,
    outputs: Outbox,
}

impl Coordinator {
    /// A coordinator that waits for the job's members. The configuration must have passed [`JobConfig::check`].
    ///
    /// Workers' incarnations follow from `secret`. Whoever knows one can speak in that worker's name, so a driver draws the
    /// secret anew for each job; only the simulator's follows from a seed.
    pub fn new(config: JobConfig, registry: Arc<Registry>, secret: u64) -> Coordinator {
        let mut incarnations = Prng::new(secret);
        Coordinator {
            next_incarnation: draw_incarnation(&mut incarnations),
            incarnations,
            config,
            registry,
            servers: BTreeMap::new(),
            shards: BTreeMap::new(),
            workers: BTreeMap::new(),
            aggregators: BTreeMap::new(),
            tables: Vec::new(),
            plan: None,
            started: false,
            over: false,
            epoch: 0,
            commands: Commands::default(),
            gate: None,
            queries: Vec::new(),
            standstill: Standstill::default(),
            outputs: Outbox::default(),
        }
    }

    /// The job as it stands.
    pub fn status(&self, now: Time) -> Status {
        let worker = |(&worker, member): (&WorkerId, &Member)| WorkerStatus {
            worker,
            state: member.state,
            silent_seconds: now.since(member.last_heard).as_secs_f64(),
            idle_seconds: now.since(member.last_progress).as_secs_f64(),
            report: member.report.clone(),
        };
        Status {
            job: self.config.job.clone(),
            phase: self.phase(),
            size: self.config.size(&self.registry),
            epoch: self.epoch,
            workers: self.workers.iter().map(worker).collect(),
            shards: self.shards.values().filter_map(|shard| shard.last_report(now)).collect(),
            aggregators: self.aggregator_statuses(),
        }
    }

    /// What the job is doing or waiting for, as a sentence.
    fn phase(&self) -> String {
        if self.over {
            return "over: all workers left".into();
        }
        if self.started {
            let count = |state| self.workers.values().filter(|member| member.state == state).count();
            let (running, dead) = (count(MemberState::Running), count(MemberState::Dead));
            return match dead {
                0 => format!("running with {running} workers"),
                _ => format!("running with {running} workers; {dead} declared dead"),
            };
        }
        if self.plan.is_some() {
            let ready = self.shards.values().filter(|shard| shard.ready).count();
            return format!("starting: {ready} of {} data cores are ready", self.shards.len());
        }
        let (expected_workers, expected_servers) = (self.config.workers, self.config.servers);
        let declared = self.workers.values().filter(|member| member.connected && member.declared).count();
        let servers = self.complete_servers();
        format!(
            "waiting: {declared} of {expected_workers} workers and {servers} of {expected_servers} servers are here"
        )
    }

    fn handle_worker(&mut self, now: Time, worker: WorkerId, message: Control) {
        match message {
            Control::Declare { tables } => self.declare(now, worker, tables),
            Control::WorkerReport(report) => self.take_worker_report(now, worker, report),
            Control::Pushed { clock } => self.pushed(now, worker, clock),
            Control::Barrier { name, number } => self.arrive(worker, name, number),
            Control::Leave => {
                self.send(NodeId::Worker(worker), &Control::Left);
                self.part_with(now, worker, MemberState::Left);
            }
            Control::StatusQuery => self.query_status(now, NodeId::Worker(worker)),
            other => self.log(format!("ignored a `{}` message from {worker}", other.name())),
        }
    }

    fn handle_shard(&mut self, now: Time, id: ShardId, message: Control) {
        match message {
            Control::Register { addresses } => self.register(now, id, addresses),
            Control::Ready => self.take_ready(id),
            Control::ShardReport(report) => self.take_shard_report(now, id, *report),
            Control::Stop { error: Some(error) } => {
                self.end(Some(control::sentence(format!("{id}: {error}"))));
            }
            other => self.log(format!("ignored a `{}` message from {id}", other.name())),
        }
    }

    fn register(&mut self, now: Time, id: ShardId, addresses: Addresses) {
        if let Err(why) = addresses.check() {
            return self.log(format!("{id} gave {why}"));
        }
        // Once there is a plan, the addresses in it are where workers go.
        if let (None, Some(shard)) = (&self.plan, self.shards.get_mut(&id)) {
            shard.addresses = Some(addresses);
        }
        self.send_plan(NodeId::Shard(id));
        self.try_plan(now);
    }

    fn take_shard_report(&mut self, now: Time, id: ShardId, report: ShardReport) {
        let tables = self.plan.as_ref().map_or(0, |plan| plan.tables.len());
        if report.shard != id || report.tables.len() > tables {
            return self.log(format!("ignored a report of {id} that is not about its tables"));
        }
        if let Some(shard) = self.shards.get_mut(&id) {
            shard.report = Some((now, report));
        }
        for query in &mut self.queries {
            query.missing.remove(&id);
        }
        self.answer_queries(now);
    }

    fn take_worker_report(&mut self, now: Time, worker: WorkerId, mut report: WorkerReport) {
        report.waiting = report.waiting.map(control::sentence);
        if let Some(member) = self.workers.get_mut(&worker) {
            if report.clock != member.report.clock {
                member.last_progress = now;
            }
            member.report = report;
        }
    }

    /// Without overlap: the scheduler's barrier between push and pull.
    fn pushed(&mut self, now: Time, worker: WorkerId, clock: Clock) {
        if let Some(gate) = &mut self.gate {
            gate.pushed(now, worker, clock);
        }
        self.open_gate();
    }

    fn open_gate(&mut self) {
        while let Some((worker, clock)) = self.gate.as_mut().and_then(Gate::poll) {
            self.send(NodeId::Worker(worker), &Control::Go { clock });
        }
    }

    fn handle_command(&mut self, now: Time, asker: NodeId, message: Control) {
        match message {
            Control::StatusQuery => self.query_status(now, asker),
            Control::Set(rule) => {
                // A learning rate may follow a schedule from step to step: that is not news.
                let is_news = rule.policies.iter().any(|(axis, _)| axis != Axis::Optimizer);
                let outcome = self.set(now, rule);
                if let (true, Ok(sentence)) = (is_news, &outcome) {
                    self.log(sentence.clone());
                }
                self.answer_change(asker, outcome);
            }
            other => self.log(format!("ignored a `{}` message from {asker}", other.name())),
        }
    }

    fn answer_change(&mut self, asker: NodeId, outcome: Result<String, String>) {
        match outcome {
            Ok(sentence) => self.send(asker, &Control::Done(sentence)),
            Err(message) => {
                let fault = Fault { cause: Cause::Policy, message };
                self.outputs.push_back(Output::Send { to: asker, frame: frame(Kind::Error, &fault) });
            }
        }
    }

    fn query_status(&mut self, now: Time, asker: NodeId) {
        if self.queries.iter().any(|query| query.asker == asker) {
            // One answer is on its way to it.
            return;
        }
        let missing: BTreeSet<ShardId> = self
            .shards
            .iter()
            .filter(|(_, shard)| shard.lost_since.is_none() && shard.ready)
            .map(|(id, _)| *id)
            .collect();
        for shard in &missing {
            self.send(NodeId::Shard(*shard), &Control::ReportRequest);
        }
        self.queries.push(StatusQuery { asker, missing, deadline: now + limits::STATUS_DEADLINE });
        self.answer_queries(now);
    }

    fn answer_queries(&mut self, now: Time) {
        let (ripe, waiting) = std::mem::take(&mut self.queries)
            .into_iter()
            .partition(|query: &StatusQuery| query.missing.is_empty() || query.deadline <= now);
        self.queries = waiting;
        for query in ripe {
            self.send_status(now, query.asker);
        }
    }

    fn send_status(&mut self, now: Time, to: NodeId) {
        let mut status = self.status(now);
        let mut message = frame(Kind::Control, &Control::Status(Box::new(status.clone())));
        if !control::fits(&message) {
            status.shards.iter_mut().for_each(|shard| shard.tables.clear());
            status.workers.iter_mut().for_each(|worker| worker.report.slabs.clear());
            status.phase += " (there are too many tables to report)";
            message = frame(Kind::Control, &Control::Status(Box::new(status)));
        }
        self.outputs.push_back(Output::Send { to, frame: message });
    }

    fn end(&mut self, error: Option<String>) {
        if !self.over {
            self.over = true;
            let message = Control::Stop { error: error.clone() };
            self.tell_shards(&message);
            self.tell_aggregators(&message);
            self.tell_workers(&message);
            self.outputs.push_back(Output::Stop { error });
        }
    }

    fn tell_shards(&mut self, message: &Control) {
        let shards: Vec<NodeId> = self.shards.keys().map(|id| NodeId::Shard(*id)).collect();
        shards.into_iter().for_each(|to| self.send(to, message));
    }

    fn tell_workers(&mut self, message: &Control) {
        let workers: Vec<NodeId> = self.live().map(NodeId::Worker).collect();
        workers.into_iter().for_each(|to| self.send(to, message));
    }

    fn send(&mut self, to: NodeId, message: &Control) {
        self.outputs.push_back(Output::Send { to, frame: frame(Kind::Control, message) });
    }

    fn log(&mut self, line: String) {
        self.outputs.push_back(Output::Log(line));
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
        if self.over {
            return Err(Refusal { reason: format!("job `{}` is over", self.config.job), retry: false });
        }
        match hello.from {
            Party::Worker { rank } => self.accept_worker(now, hello, rank),
            Party::Shard { process, server, core, cores } => self.accept_shard(process, server, core, cores),
            Party::Command => {
                let (welcome, evicted) = self.commands.accept(now);
                let peer = evicted.map(NodeId::Admin);
                self.outputs.extend(peer.map(|peer| Output::Disconnect { peer }));
                Ok(welcome)
            }
            Party::Aggregator { process, id } => self.accept_aggregator(process, id),
            Party::Through { .. } => {
                let reason = "this is no aggregator; give --aggregator the address of one".into();
                Err(Refusal { reason, retry: false })
            }
        }
    }

    fn hello(&self, _peer: NodeId) -> Hello {
        // A coordinator never connects; it is connected to.
        Hello { job: self.config.job.clone(), from: Party::Command, incarnation: 0 }
    }

    fn handle_connected(&mut self, _now: Time, _peer: NodeId, _welcome: &Welcome) {}

    fn handle_disconnected(&mut self, now: Time, peer: NodeId, why: &Lost) {
        match peer {
            NodeId::Worker(id) => self.lose_worker(now, id),
            NodeId::Shard(id) => self.lose_shard(now, id, why),
            NodeId::Aggregator(id) => self.lose_aggregator(id, why),
            NodeId::Admin(id) => self.commands.lose(id),
            NodeId::Coordinator | NodeId::Through(..) => {}
        }
        self.queries.retain(|query| query.asker != peer);
    }

    fn handle_frame(&mut self, now: Time, from: NodeId, header: &Header, payload: &[u8]) {
        if let NodeId::Worker(id) = from {
            let Some(member) = self.workers.get_mut(&id) else { return };
            if member.state == MemberState::Dead {
                return self.send_away(id);
            }
            member.last_heard = now;
            if std::mem::take(&mut member.is_back) {
                self.repeat_switches(from);
            }
        }
        if header.kind != Kind::Control {
            return self.log(format!("ignored a {:?} frame from {from}", header.kind));
        }
        match (from, control::decode("control message", payload)) {
            (NodeId::Worker(id), Ok(message)) => self.handle_worker(now, id, message),
            (NodeId::Shard(id), Ok(message)) => self.handle_shard(now, id, message),
            (NodeId::Admin(id), Ok(message)) => {
                self.commands.heard(now, id);
                self.handle_command(now, from, message);
            }
            (NodeId::Aggregator(id), Ok(message)) => self.handle_aggregator(id, message),
            (NodeId::Coordinator | NodeId::Through(..), Ok(_)) => {}
            (from, Err(error)) => self.log(format!("{from}: {error}")),
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
        self.expire_members(now);
        if let Some(gate) = &mut self.gate {
            gate.handle_timeout(now);
        }
        self.open_gate();
        self.answer_queries(now);
        while let Some(id) = self.commands.poll_idle(now, &self.standstill) {
            self.outputs.push_back(Output::Disconnect { peer: NodeId::Admin(id) });
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        let deaths = self.next_deadline();
        let queries = self.queries.iter().map(|query| query.deadline).min();
        let gate = self.gate.as_ref().and_then(Gate::next_timeout);
        let standstill = (!self.over).then(|| self.standstill.next_timeout());
        let idle = self.commands.next_timeout(&self.standstill);
        [deaths, queries, gate, standstill, idle].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn backlog_bytes(&self) -> usize {
        self.outputs.bytes()
    }
}

/// A number that is not 0, which stands for a worker that has none yet.
fn draw_incarnation(prng: &mut Prng) -> u64 {
    prng.next_u64().max(1)
}
