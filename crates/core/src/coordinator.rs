//! The coordinator as a state machine: membership, liveness, the plan, policies, barriers, status.
//!
//! It is never in the data path. It waits for the expected servers and workers, checks that all workers declare the
//! same tables, places them, and hands out one plan. After that it watches: a worker that is silent too long is
//! declared dead, and the shards go on without it.

mod gate;

use crate::consistency::SyncPolicy;
use crate::limits;
use crate::optimizer::OptimizerPolicy;
use crate::registry::Registry;
use crate::role::{Lost, Output, Role};
use crate::spec::{Spec, SpecError};
use crate::status::{MemberState, ShardReport, Status, WorkerReport, WorkerStatus};
use crate::table::{PolicyOverride, TablePolicy, TableSpec, glob_matches};
use crate::types::{Clock, NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use crate::wire::control::{self, frame};
use crate::wire::{Cause, Control, Fault, Header, Hello, Kind, Party, Plan, Refusal, Welcome};
use gate::Gate;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// A job as its owner describes it.
#[derive(Debug, Clone)]
pub struct JobConfig {
    /// Its name, the last part of its URL.
    pub job: String,
    /// Workers to wait for.
    pub workers: u32,
    /// Servers to wait for.
    pub servers: u32,
    /// Placement, in text form.
    pub placement: String,
    /// Policies of every table.
    pub policy: TablePolicy,
    /// Exceptions from them.
    pub overrides: Vec<PolicyOverride>,
    /// Elements per chunk.
    pub chunk_elements: u32,
    /// Everything random follows from it.
    pub seed: u64,
    /// A worker that is silent for this long is declared dead.
    pub worker_timeout: Duration,
}

impl JobConfig {
    /// A job with the defaults of everything but its size.
    pub fn new(job: impl Into<String>, workers: u32, servers: u32) -> JobConfig {
        JobConfig {
            job: job.into(),
            workers,
            servers,
            placement: "heuristic".into(),
            policy: TablePolicy::default(),
            overrides: Vec::new(),
            chunk_elements: limits::CHUNK_ELEMENTS as u32,
            seed: 0,
            worker_timeout: limits::WORKER_TIMEOUT,
        }
    }

    /// Whether every text form can be built and every number is in range. Called before a job starts.
    pub fn check(&self, registry: &Registry) -> Result<(), SpecError> {
        let range = |what: &str, value: u64, max: u64| {
            let why = format!("{what} = {value}: expected 1 to {max}");
            if (1..=max).contains(&value) {
                Ok(())
            } else {
                Err(SpecError::Parameter { component: "job".into(), why })
            }
        };
        range("workers", self.workers.into(), limits::MAX_WORKERS.into())?;
        range("servers", self.servers.into(), limits::MAX_SERVERS.into())?;
        range("chunk elements", self.chunk_elements.into(), limits::MAX_CHUNK_ELEMENTS as u64)?;
        registry.placement.build(&Spec::parse(&self.placement)?)?;
        let syncs = self.overrides.iter().filter_map(|rule| rule.sync.as_ref()).chain([&self.policy.sync]);
        let overlap = SyncPolicy::parse(&registry.consistency, &self.policy.sync)?.overlap;
        for sync in syncs {
            // The scheduler between push and pull is the whole job's.
            if SyncPolicy::parse(&registry.consistency, sync)?.overlap != overlap {
                let why = format!("`{sync}`: `overlap` is the same for all tables of a job");
                return Err(SpecError::Parameter { component: "job".into(), why });
            }
        }
        let optimizers =
            self.overrides.iter().filter_map(|rule| rule.optimizer.as_ref()).chain([&self.policy.optimizer]);
        for optimizer in optimizers {
            OptimizerPolicy::parse(&registry.optimizer, optimizer)?;
        }
        Ok(())
    }
}

/// What the coordinator knows of a worker.
#[derive(Debug)]
struct Member {
    incarnation: u64,
    state: MemberState,
    connected: bool,
    /// It has connected anew and may have missed what was said meanwhile.
    behind: bool,
    last_heard: Time,
    last_progress: Time,
    tables: Option<Vec<TableSpec>>,
    report: WorkerReport,
}

/// What the coordinator knows of a shard.
#[derive(Debug, Default)]
struct ShardMember {
    address: Option<String>,
    connected: bool,
    ready: bool,
    report: Option<ShardReport>,
}

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
    servers: BTreeMap<u64, ServerId>,
    server_cores: BTreeMap<ServerId, u32>,
    shards: BTreeMap<ShardId, ShardMember>,
    workers: BTreeMap<WorkerId, Member>,
    plan: Option<Plan>,
    started: bool,
    over: bool,
    epoch: u32,
    next_incarnation: u64,
    next_command: u32,
    barriers: BTreeMap<String, BTreeSet<WorkerId>>,
    gate: Option<Gate>,
    /// Policies that were set while the job runs, the last one for each glob and server.
    sets: Vec<(String, Option<ServerId>, String)>,
    queries: Vec<StatusQuery>,
    outputs: VecDeque<Output>,
}

impl Coordinator {
    /// A coordinator that waits for the job's members. The configuration must have passed [`JobConfig::check`].
    pub fn new(config: JobConfig, registry: Arc<Registry>) -> Coordinator {
        Coordinator {
            config,
            registry,
            servers: BTreeMap::new(),
            server_cores: BTreeMap::new(),
            shards: BTreeMap::new(),
            workers: BTreeMap::new(),
            plan: None,
            started: false,
            over: false,
            epoch: 0,
            next_incarnation: 1,
            next_command: 0,
            barriers: BTreeMap::new(),
            gate: None,
            sets: Vec::new(),
            queries: Vec::new(),
            outputs: VecDeque::new(),
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
            epoch: self.epoch,
            workers: self.workers.iter().map(worker).collect(),
            shards: self.shards.values().filter_map(|shard| shard.report.clone()).collect(),
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
        let (expected_workers, expected_servers) = (self.config.workers, self.config.servers);
        let declared = self.workers.values().filter(|member| member.tables.is_some()).count();
        let servers = self.complete_servers();
        format!(
            "waiting: {declared} of {expected_workers} workers and {servers} of {expected_servers} servers are here"
        )
    }

    fn complete_servers(&self) -> usize {
        let registered = |server: ServerId| {
            self.shards.iter().filter(|(id, shard)| id.server == server && shard.address.is_some()).count()
        };
        self.server_cores.iter().filter(|(server, cores)| registered(**server) == **cores as usize).count()
    }

    fn accept_worker(
        &mut self,
        now: Time,
        hello: &Hello,
        wanted: Option<WorkerId>,
    ) -> Result<Welcome, Refusal> {
        let refuse = |reason: String| Err(Refusal { reason, retry: false });
        let id = match wanted {
            Some(id) if id.0 >= self.config.workers => {
                return refuse(format!(
                    "rank {} is out of range: the job has {} workers",
                    id.0, self.config.workers
                ));
            }
            Some(id) => id,
            None => match (0..self.config.workers).map(WorkerId).find(|id| !self.workers.contains_key(id)) {
                Some(id) => id,
                None => {
                    return refuse(format!(
                        "all {} workers of the job are here already",
                        self.config.workers
                    ));
                }
            },
        };
        match self.workers.get_mut(&id) {
            Some(member) if hello.incarnation == member.incarnation && member.state == MemberState::Dead => {
                refuse(format!("{id} was declared dead after a long silence; start it anew"))
            }
            Some(member) if hello.incarnation == member.incarnation => {
                member.connected = true;
                member.behind = true;
                member.last_heard = now;
                Ok(Welcome { you: NodeId::Worker(id), incarnation: member.incarnation })
            }
            // A worker that starts over before the job began takes its old place.
            Some(member) if !self.started && !member.connected => {
                member.incarnation = self.next_incarnation;
                member.connected = true;
                member.tables = None;
                member.last_heard = now;
                self.next_incarnation += 1;
                Ok(Welcome { you: NodeId::Worker(id), incarnation: member.incarnation })
            }
            Some(_) => refuse(format!("rank {} is taken by another worker", id.0)),
            None if self.started => refuse("the job has started; workers cannot join it any more".into()),
            None => {
                let incarnation = self.next_incarnation;
                self.next_incarnation += 1;
                let member = Member {
                    incarnation,
                    state: MemberState::Joining,
                    connected: true,
                    behind: false,
                    last_heard: now,
                    last_progress: now,
                    tables: None,
                    report: WorkerReport::default(),
                };
                self.workers.insert(id, member);
                Ok(Welcome { you: NodeId::Worker(id), incarnation })
            }
        }
    }

    fn accept_shard(
        &mut self,
        process: u64,
        wanted: Option<ServerId>,
        core: u32,
        cores: u32,
    ) -> Result<Welcome, Refusal> {
        let refuse = |reason: String| Err(Refusal { reason, retry: false });
        let server = match (wanted, self.servers.get(&process)) {
            (Some(server), _) => server,
            (None, Some(&server)) => server,
            (None, None) => {
                let taken: BTreeSet<ServerId> = self.shards.keys().map(|id| id.server).collect();
                match (0..self.config.servers).map(ServerId).find(|server| !taken.contains(server)) {
                    Some(server) => server,
                    None => {
                        return refuse(format!(
                            "all {} servers of the job are here already",
                            self.config.servers
                        ));
                    }
                }
            }
        };
        let id = ShardId { server, core };
        if self.started && self.servers.get(&process) != Some(&server) {
            return refuse(format!(
                "{server} ended with its parameters while the job ran; start the job anew"
            ));
        }
        if server.0 >= self.config.servers || core >= cores || cores > limits::MAX_CORES {
            return refuse(format!("{id} is out of range: the job has {} servers", self.config.servers));
        }
        if self.shards.get(&id).is_some_and(|shard| shard.connected) {
            return refuse(format!("{id} is here already"));
        }
        self.servers.insert(process, server);
        self.server_cores.insert(server, cores);
        self.shards.entry(id).or_default().connected = true;
        Ok(Welcome { you: NodeId::Shard(id), incarnation: process })
    }

    fn handle_worker(&mut self, now: Time, worker: WorkerId, message: Control) {
        match message {
            Control::Declare { tables } => self.declare(now, worker, tables),
            Control::WorkerReport(report) => self.take_worker_report(now, worker, report),
            Control::Pushed { clock } => self.pushed(now, worker, clock),
            Control::Barrier { name } => {
                self.barriers.entry(name).or_default().insert(worker);
                self.release_barriers();
            }
            Control::Leave => {
                self.send(NodeId::Worker(worker), &Control::Left);
                self.part_with(now, worker, MemberState::Left);
            }
            Control::StatusQuery => self.query_status(now, NodeId::Worker(worker)),
            other => self.log(format!("ignored a `{}` message from {worker}", other.name())),
        }
    }

    /// A worker's tables; the first worker's declaration is what the others are compared with.
    fn declare(&mut self, now: Time, worker: WorkerId, tables: Vec<TableSpec>) {
        if let Some(plan) = &self.plan {
            // Its plan got lost with a connection.
            let plan = Control::Plan(Box::new(plan.clone()));
            return if self.started {
                self.send(NodeId::Worker(worker), &plan)
            };
        }
        if let Err(message) = self.check_declaration(worker, &tables) {
            let fault = Fault { cause: Cause::Declaration, message };
            self.outputs
                .push_back(Output::Send { to: NodeId::Worker(worker), frame: frame(Kind::Error, &fault) });
            return;
        }
        if let Some(member) = self.workers.get_mut(&worker) {
            member.tables = Some(tables);
        }
        self.try_plan(now);
    }

    fn check_declaration(&self, worker: WorkerId, tables: &[TableSpec]) -> Result<(), String> {
        if tables.is_empty() || tables.len() > limits::MAX_TABLES {
            return Err(format!(
                "{worker} declared {} tables; expected 1 to {}",
                tables.len(),
                limits::MAX_TABLES
            ));
        }
        let mut names = BTreeSet::new();
        for table in tables {
            table.check()?;
            if !names.insert(&table.name) {
                return Err(format!("{worker} declared table `{}` twice", table.name));
            }
            if let Some(rule) = &table.policy {
                let with_rule = JobConfig { overrides: vec![rule.clone()], ..self.config.clone() };
                let fits = with_rule.check(&self.registry);
                fits.map_err(|error| format!("table `{}`: {error}", table.name))?;
            }
        }
        let others = self.workers.iter().filter(|(id, _)| **id != worker);
        for (other, theirs) in others.filter_map(|(id, member)| Some((id, member.tables.as_ref()?))) {
            if theirs.len() != tables.len() {
                return Err(format!("{worker} declared {} tables, {other} {}", tables.len(), theirs.len()));
            }
            if let Some((mine, theirs)) = tables.iter().zip(theirs).find(|(mine, theirs)| mine != theirs) {
                return Err(format!(
                    "{worker} declared table `{}` of shape {:?}, {other} declared `{}` of shape {:?} in its place; \
                     all workers must declare the same tables in the same order",
                    mine.name, mine.shape, theirs.name, theirs.shape
                ));
            }
        }
        Ok(())
    }

    /// Makes the plan once everybody is here, and gives it to the shards first.
    fn try_plan(&mut self, now: Time) {
        let workers_here = self.workers.len() == self.config.workers as usize
            && self.workers.values().all(|member| member.tables.is_some());
        if self.plan.is_some() || !workers_here || self.complete_servers() < self.config.servers as usize {
            return;
        }
        let tables = self.workers.values().find_map(|member| member.tables.clone()).expect("all declared");
        let placement = Spec::parse(&self.config.placement)
            .and_then(|spec| self.registry.placement.build(&spec))
            .expect("checked before the job started");
        let sizes: Vec<_> = tables.iter().map(TableSpec::size).collect();
        let address = |shard: &ShardMember| shard.address.clone().expect("registered");
        let plan = Plan {
            epoch: 1,
            parts: placement.place(&sizes, self.config.servers),
            tables,
            shards: self.shards.iter().map(|(id, shard)| (*id, address(shard))).collect(),
            chunk_elements: self.config.chunk_elements,
            workers: self.workers.iter().map(|(id, member)| (*id, member.incarnation)).collect(),
            policy: self.config.policy.clone(),
            overrides: self.config.overrides.clone(),
            seed: self.config.seed,
        };
        let sync =
            SyncPolicy::parse(&self.registry.consistency, &plan.policy_of(TableId(0), ServerId(0)).sync);
        let sync = sync.expect("checked before the job started");
        if !sync.overlap {
            self.gate = Some(Gate::new(sync, self.workers.keys().copied(), plan.seed));
        }
        self.epoch = 1;
        let message = Control::Plan(Box::new(plan.clone()));
        self.plan = Some(plan);
        for member in self.workers.values_mut() {
            member.last_progress = now;
        }
        self.tell_shards(&message);
    }

    fn handle_shard(&mut self, now: Time, id: ShardId, message: Control) {
        match message {
            Control::Register { address } => {
                self.shards.entry(id).or_default().address = Some(address);
                if let Some(plan) = &self.plan {
                    let plan = Control::Plan(Box::new(plan.clone()));
                    self.send(NodeId::Shard(id), &plan);
                }
                self.try_plan(now);
            }
            Control::Ready => {
                self.shards.entry(id).or_default().ready = true;
                // It may have missed what was said while it was away.
                self.catch_up(NodeId::Shard(id));
                if self.started {
                    let members = self.members();
                    self.send(NodeId::Shard(id), &members);
                } else if self.shards.values().all(|shard| shard.ready) {
                    self.start();
                }
            }
            Control::ShardReport(report) => {
                self.shards.entry(id).or_default().report = Some(*report);
                for query in &mut self.queries {
                    query.missing.remove(&id);
                }
                self.answer_queries(now);
            }
            Control::Stop { error } => self.end(error),
            other => self.log(format!("ignored a `{}` message from {id}", other.name())),
        }
    }

    fn start(&mut self) {
        self.started = true;
        let plan = Control::Plan(Box::new(self.plan.clone().expect("shards are ready for a plan")));
        for member in self.workers.values_mut().filter(|member| member.state == MemberState::Joining) {
            member.state = MemberState::Running;
            // What was set between plan and start is not in the plan.
            member.behind = true;
        }
        self.tell_workers(&plan);
    }

    /// Says again which policies were set.
    fn catch_up(&mut self, node: NodeId) {
        for (table, server, sync) in self.sets.clone() {
            self.send(node, &Control::SetSync { table, server, sync });
        }
    }

    fn take_worker_report(&mut self, now: Time, worker: WorkerId, report: WorkerReport) {
        if let Some(member) = self.workers.get_mut(&worker) {
            if report.clock != member.report.clock {
                member.last_progress = now;
            }
            member.report = report;
            if std::mem::take(&mut member.behind) {
                self.catch_up(NodeId::Worker(worker));
            }
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
            Control::SetSync { table, server, sync } => match self.check_set(&table, server, &sync) {
                Ok(sentence) => {
                    self.sets.retain(|(known, only, _)| (known, only) != (&table, &server));
                    self.sets.push((table.clone(), server, sync.clone()));
                    let message = Control::SetSync { table, server, sync };
                    self.tell_shards(&message);
                    self.tell_workers(&message);
                    self.log(sentence.clone());
                    self.send(asker, &Control::Done(sentence));
                }
                Err(message) => {
                    let fault = Fault { cause: Cause::Policy, message };
                    self.outputs.push_back(Output::Send { to: asker, frame: frame(Kind::Error, &fault) });
                }
            },
            Control::Shutdown => {
                self.send(asker, &Control::Done("the job ends".into()));
                self.end(Some("ended by command".into()));
            }
            other => self.log(format!("ignored a `{}` message from {asker}", other.name())),
        }
    }

    fn check_set(&self, glob: &str, server: Option<ServerId>, sync: &str) -> Result<String, String> {
        let Some(plan) = &self.plan else {
            return Err(format!("the job has not started ({})", self.phase()));
        };
        let policy =
            SyncPolicy::parse(&self.registry.consistency, sync).map_err(|error| error.to_string())?;
        if policy.overlap != self.gate.is_none() {
            return Err("`overlap` is fixed when the job starts".into());
        }
        let matched = plan.tables.iter().filter(|table| glob_matches(glob, &table.name)).count();
        if matched == 0 {
            let names: Vec<&str> = plan.tables.iter().map(|table| table.name.as_str()).take(20).collect();
            return Err(format!("no table matches `{glob}`; the job has {}", names.join(", ")));
        }
        if let Some(server) = server
            && server.0 >= self.config.servers
        {
            return Err(format!(
                "there is no {server}; the job has servers 0 to {}",
                self.config.servers - 1
            ));
        }
        let place = server.map_or("all servers".into(), |server| server.to_string());
        Ok(format!("{matched} tables now use {policy} on {place}"))
    }

    fn query_status(&mut self, now: Time, asker: NodeId) {
        let missing: BTreeSet<ShardId> = self
            .shards
            .iter()
            .filter(|(_, shard)| shard.connected && shard.ready)
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
            let status = Control::Status(Box::new(self.status(now)));
            self.send(query.asker, &status);
        }
    }

    /// A worker left or died: the shards go on without it.
    fn part_with(&mut self, now: Time, worker: WorkerId, state: MemberState) {
        let Some(member) = self.workers.get_mut(&worker) else { return };
        if matches!(member.state, MemberState::Left | MemberState::Dead) {
            return;
        }
        member.state = state;
        self.epoch += 1;
        if state == MemberState::Dead {
            self.log(format!("{worker} is declared dead; the job goes on without it"));
        }
        let members = self.members();
        self.tell_shards(&members);
        if let Some(gate) = &mut self.gate {
            gate.remove(now, worker);
        }
        self.open_gate();
        self.release_barriers();
        if self.started && self.live().next().is_none() {
            let died = self.workers.values().all(|member| member.state == MemberState::Dead);
            self.end(died.then(|| "all workers died".into()));
        }
    }

    fn end(&mut self, error: Option<String>) {
        if !self.over {
            self.over = true;
            self.tell_shards(&Control::Stop { error: error.clone() });
            self.tell_workers(&Control::Stop { error: error.clone() });
            self.outputs.push_back(Output::Stop { error });
        }
    }

    fn release_barriers(&mut self) {
        let live: BTreeSet<WorkerId> = self.live().collect();
        let reached: Vec<String> = self
            .barriers
            .iter()
            .filter(|(_, here)| live.is_subset(here))
            .map(|(name, _)| name.clone())
            .collect();
        for name in reached {
            self.barriers.remove(&name);
            self.tell_workers(&Control::BarrierReached { name });
        }
    }

    fn live(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.workers
            .iter()
            .filter(|(_, member)| matches!(member.state, MemberState::Joining | MemberState::Running))
            .map(|(id, _)| *id)
    }

    fn members(&self) -> Control {
        Control::Members { epoch: self.epoch, workers: self.live().collect() }
    }

    fn deadline(&self, member: &Member) -> Option<Time> {
        let alive = matches!(member.state, MemberState::Joining | MemberState::Running);
        let grace = if member.connected { self.config.worker_timeout } else { limits::RECONNECT_GRACE };
        (self.started && alive).then(|| member.last_heard + grace)
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
        if hello.job != self.config.job {
            let reason = format!("this address serves job `{}`, not `{}`", self.config.job, hello.job);
            return Err(Refusal { reason, retry: false });
        }
        match hello.from {
            Party::Worker { rank } => self.accept_worker(now, hello, rank),
            Party::Shard { process, server, core, cores } => self.accept_shard(process, server, core, cores),
            Party::Command => {
                self.next_command += 1;
                Ok(Welcome { you: NodeId::Admin(self.next_command), incarnation: 0 })
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
            NodeId::Worker(id) => {
                if let Some(member) = self.workers.get_mut(&id) {
                    member.connected = false;
                    member.last_heard = now;
                }
            }
            NodeId::Shard(id) => {
                if let Some(shard) = self.shards.get_mut(&id) {
                    shard.connected = false;
                }
                if self.started && !self.over {
                    self.log(format!("lost {id}: {why}"));
                }
            }
            NodeId::Admin(_) => self.queries.retain(|query| query.asker != peer),
            NodeId::Coordinator => {}
        }
    }

    fn handle_frame(&mut self, now: Time, from: NodeId, header: &Header, payload: &[u8]) {
        if let NodeId::Worker(id) = from
            && let Some(member) = self.workers.get_mut(&id)
        {
            member.last_heard = now;
        }
        if header.kind != Kind::Control {
            return self.log(format!("ignored a {:?} frame from {from}", header.kind));
        }
        match (from, control::decode("control message", payload)) {
            (NodeId::Worker(id), Ok(message)) => self.handle_worker(now, id, message),
            (NodeId::Shard(id), Ok(message)) => self.handle_shard(now, id, message),
            (NodeId::Admin(_), Ok(message)) => self.handle_command(now, from, message),
            (NodeId::Coordinator, Ok(_)) => {}
            (from, Err(error)) => self.log(format!("{from}: {error}")),
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        let dead: Vec<WorkerId> = self
            .workers
            .iter()
            .filter(|(_, member)| self.deadline(member).is_some_and(|deadline| deadline <= now))
            .map(|(id, _)| *id)
            .collect();
        for worker in dead {
            self.part_with(now, worker, MemberState::Dead);
        }
        if let Some(gate) = &mut self.gate {
            gate.handle_timeout(now);
        }
        self.open_gate();
        self.answer_queries(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        let deaths = self.workers.values().filter_map(|member| self.deadline(member)).min();
        let queries = self.queries.iter().map(|query| query.deadline).min();
        [deaths, queries, self.gate.as_ref().and_then(Gate::next_timeout)].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }
}
