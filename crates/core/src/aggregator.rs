//! An aggregator as a state machine: it adds up the gradients of the workers of a host or rack, and passes the streams of tables that
//! are broadcast on to them.
//!
//! To a server it is one peer that brings weighted sums and says whose pushes are complete in them, so that conditions
//! see the real workers' progress. To a worker it is where the servers are: the same frames, one connection for each
//! shard. See `docs/aggregation.md`.

mod aggregate;
mod aggregation;
mod flights;
mod held_pulls;
mod lowers;
mod members;
mod memory;
mod routes;
mod shard_proxy;
mod streams;
mod sum_buffer;
mod table;
mod uplink;

use crate::address::{Addresses, CoreAddresses, core_of};
use crate::consistency::{Apply, SyncPolicy};
use crate::limits;
use crate::link::Link;
use crate::optimizer::OptimizerPolicy;
use crate::policy::Order;
use crate::registry::Registry;
use crate::role::{Body, Level, Lost, Outbox, Output, Role};
use crate::status::AggregatorReport;
use crate::types::{AggregatorId, Clock, ConnectionId, NodeId, ProcessId, ShardId, TableId, Time, WorkerId};
use crate::wire::control::{self, frame};
use crate::wire::{
    Cause, Change, Control, Fault, FirstClock, Header, Hello, Kind, Member, Party, Plan, Refusal,
    ServedShard, Standing, Welcome,
};
use lowers::Lowers;
use members::Caller;
use memory::Memory;
use shard_proxy::{Answers, ProxyPolicy, ShardProxy};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use streams::UpdateCodec;
use table::{CodecSeeds, SumCodec, SumPolicy, Table};
use uplink::Out;

/// Configuration of an aggregator.
#[derive(Debug, Clone)]
pub struct AggregatorConfig {
    /// The job's name.
    pub job: String,
    /// Tells aggregators apart until the coordinator numbers them.
    pub process: ProcessId,
    /// Its number, when it was given one.
    pub id: Option<AggregatorId>,
    /// Which core of its process it is: it stands for the shards of which [`core_of`] says so.
    pub core: u32,
    /// How many cores its process has. They share nothing, and each has a number of its own in the job.
    pub cores: u32,
    /// Addresses at which workers reach it: each leads to it.
    pub addresses: Addresses,
    /// The coordinator's address.
    pub coordinator: String,
    /// The aggregator above it, of a rack, that it goes through to the servers.
    pub above: Option<CoreAddresses>,
    /// How long a complete push is held for those of other workers.
    pub hold: Duration,
}

/// One aggregator of a job.
#[derive(Debug)]
pub struct Aggregator {
    config: AggregatorConfig,
    registry: Arc<Registry>,
    id: Option<AggregatorId>,
    coordinator: Link,
    plan: Option<Plan>,
    /// Workers that take part in the job, with their incarnations.
    live: BTreeMap<WorkerId, u64>,
    /// One for each shard that it stands for, in the plan's order.
    proxies: Vec<ShardProxy>,
    /// Levels of aggregators that go through it, or want to.
    levels: u32,
    /// A chunk of zeros. A server that notes an aggregate before all of it was sent gets these: the memory is used again.
    blank: Vec<u8>,
    report: AggregatorReport,
    next_report: Time,
    stopped: bool,
    outputs: Outbox,
}

impl Aggregator {
    /// An aggregator that is about to join.
    pub fn new(now: Time, config: AggregatorConfig, registry: Arc<Registry>) -> Aggregator {
        Aggregator {
            coordinator: Link::new(now, NodeId::Coordinator, Addresses::list(&config.coordinator)),
            id: config.id,
            config,
            registry,
            plan: None,
            live: BTreeMap::new(),
            proxies: Vec::new(),
            levels: 0,
            blank: Vec::new(),
            report: AggregatorReport::default(),
            next_report: now,
            stopped: false,
            outputs: Outbox::default(),
        }
    }

    /// This aggregator's number, once the coordinator has given it one.
    pub fn id(&self) -> Option<AggregatorId> {
        self.id
    }

    /// How it stands.
    pub fn report(&self) -> AggregatorReport {
        let members: BTreeSet<WorkerId> = self.proxies.iter().flat_map(ShardProxy::workers).collect();
        AggregatorReport {
            workers: members.len() as u32,
            memory_bytes: self.memory_bytes() as u64,
            below: self
                .proxies
                .iter()
                .flat_map(ShardProxy::lowers)
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect(),
            ..self.report.clone()
        }
    }

    /// Bytes held for sums and parameters.
    pub fn memory_bytes(&self) -> usize {
        self.proxies.iter().map(ShardProxy::memory_bytes).sum()
    }

    /// The proxy of one shard, with what it works on.
    fn proxy(&mut self, shard: ShardId) -> Option<(&mut ShardProxy, Out<'_>)> {
        let index = self.proxies.binary_search_by_key(&shard, ShardProxy::shard).ok()?;
        let out = Out { outputs: &mut self.outputs, report: &mut self.report };
        Some((&mut self.proxies[index], out))
    }

    fn handle_worker_frame(
        &mut self,
        now: Time,
        worker: WorkerId,
        shard: ShardId,
        header: &Header,
        payload: &[u8],
    ) {
        let is_live = self.live.contains_key(&worker);
        let Some((proxy, mut out)) = self.proxy(shard) else { return };
        if !is_live {
            let message = format!("{worker} is no member of this job any more");
            let fault = Fault { cause: Cause::NotAMember, message };
            proxy.refuse(Caller::direct(worker), header.table, header.request, &fault, &mut out);
        } else if proxy.is_connected(worker) {
            proxy.handle_worker(now, worker, header, payload, &mut out);
        }
    }

    /// An aggregator wants to go through this one.
    fn accept_lower(&mut self, incarnation: u64, lower: Lower) -> Result<Welcome, Refusal> {
        let refuse = |reason: String, retry| Err(Refusal { reason, retry });
        let Lower { process, id, shard, levels } = lower;
        if id.0 >= limits::MAX_AGGREGATORS {
            return refuse("an aggregator gets its number from the coordinator first".into(), false);
        }
        if Some(id) == self.id {
            return refuse(
                format!("{id} cannot go through itself; give it the address of another one"),
                false,
            );
        }
        if self.plan.is_none() {
            return refuse("this aggregator has no plan yet".into(), true);
        }
        if levels >= limits::MAX_AGGREGATOR_LEVELS {
            let reason = format!(
                "{levels} levels of aggregators go through {id}: they go through each other in a circle; start one of them without \
                 --through"
            );
            return refuse(reason, false);
        }
        let Some((proxy, mut out)) = self.proxy(shard) else { return refuse(misplaced(shard), false) };
        let was_up = proxy.was_up();
        let accepted = proxy.accept_lower(id, process, incarnation, &mut out);
        // What was connected to a shard once is in no circle.
        if !was_up {
            self.levels = self.levels.max(levels + 1);
        }
        accepted.map(|session| Welcome { you: NodeId::Aggregator(id), incarnation, session })
    }

    fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(now, *plan),
            Control::Change { epoch, change } => self.take_change(now, epoch, &change),
            Control::IdleWorkers { workers, .. } => {
                let idle: Vec<(WorkerId, Clock)> =
                    workers.iter().map(|idle| (idle.worker, idle.until)).collect();
                let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
                self.proxies.iter_mut().for_each(|proxy| proxy.set_idle(&idle, &mut out));
            }
            Control::Patience { seconds } => self.coordinator.set_patience(control::patience(seconds)),
            Control::Stop { error } => self.stop(error.map(control::sentence)),
            other => self.log(format!("ignored a `{}` message from the coordinator", other.name())),
        }
    }

    /// The whole plan: the first one, or one that may tell of changes that were lost with a connection.
    fn take_plan(&mut self, now: Time, plan: Plan) {
        if let Err(why) = plan.check() {
            let error =
                format!("the coordinator's plan cannot be used: {why}; use the same release everywhere");
            return self.stop(Some(error));
        }
        match &self.plan {
            Some(known) => {
                for (epoch, change) in known.changes_to(&plan) {
                    self.apply_change(now, epoch, &change);
                }
            }
            None => self.begin(now, plan),
        }
        self.tell_entered();
    }

    fn take_change(&mut self, now: Time, epoch: u32, change: &Change) {
        let Some(plan) = &self.plan else { return self.tell_coordinator(&Control::PlanQuery) };
        if epoch > plan.epoch + 1 {
            // A change in between is missing.
            return self.tell_coordinator(&Control::PlanQuery);
        }
        if let Err(why) = plan.check_change(change) {
            return self.stop(Some(format!("the coordinator's change of the plan cannot be used: {why}")));
        }
        if epoch > plan.epoch {
            self.apply_change(now, epoch, change);
        }
        self.tell_entered();
    }

    /// The one way from an epoch to the next.
    fn apply_change(&mut self, now: Time, epoch: u32, change: &Change) {
        let Some(plan) = &mut self.plan else { return };
        let is_joining =
            |worker: WorkerId| plan.member(worker).is_some_and(|member| member.standing == Standing::Joining);
        // A worker that is at work has a first clock already: one that it is past would end its push under way.
        let is_void = matches!(change, Change::Joined { worker, .. } if !is_joining(*worker));
        plan.apply(epoch, change);
        match change {
            Change::Joined { .. } if is_void => {}
            Change::Joining { .. } => {}
            Change::Joined { worker, clock } => {
                let incarnation = plan.member(*worker).map(|member| (member.worker, member.incarnation));
                self.live.extend(incarnation);
                let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
                self.proxies.iter_mut().for_each(|proxy| proxy.join(*worker, *clock, &mut out));
            }
            Change::Left { worker } => {
                self.live.remove(worker);
                let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
                self.proxies.iter_mut().for_each(|proxy| proxy.remove_worker(*worker, &mut out));
            }
            Change::Policy(_) => self.set_policies(),
            Change::Served { shard, addresses, .. } => self.move_shard(now, *shard, addresses),
        }
    }

    /// A shard is served elsewhere, or may have come back: it is reached at these addresses.
    fn move_shard(&mut self, now: Time, shard: ShardId, addresses: &Addresses) {
        // An aggregator above follows by itself.
        if self.config.above.is_some() {
            return;
        }
        let me = self.id.map_or(0, |id| id.0 as usize);
        let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
        for proxy in self.proxies.iter_mut().filter(|proxy| proxy.shard() == shard) {
            proxy.follow(now, addresses.for_caller(me + shard.core as usize), &mut out);
        }
        self.handle_timeout(now);
    }

    fn tell_entered(&mut self) {
        if let Some(plan) = &self.plan {
            let joining = plan.live_members().filter(|member| member.standing == Standing::Joining);
            let first = |member: &Member| {
                let clocks = self.proxies.iter().map(|proxy| proxy.first_clock(member.worker));
                let clock = clocks.max().unwrap_or(0);
                FirstClock { worker: member.worker, incarnation: member.incarnation, clock }
            };
            let joining = joining.map(first).collect();
            let entered = Control::Entered { epoch: plan.epoch, joining, lacks_values: None };
            self.tell_coordinator(&entered);
        }
    }

    fn begin(&mut self, now: Time, plan: Plan) {
        let chunks = plan.chunks();
        let taking_part = plan.members.iter().filter(|member| member.takes_part());
        self.live = taking_part.map(|member| (member.worker, member.incarnation)).collect();
        let longest = chunks.iter().flatten().map(|chunk| chunk.len as usize).max();
        self.blank = vec![0; 4 * limits::BLOCK_ELEMENTS.max(longest.unwrap_or(0))];
        let me = self.id.map_or(0, |id| id.0 as usize);
        let AggregatorConfig { core, cores, .. } = self.config;
        let is_own = |place: usize| core_of(place, cores as usize) == core as usize;
        let own = || plan.shards.iter().enumerate().filter(|(place, _)| is_own(*place));
        let log_bytes = limits::STREAM_LOG_BYTES / (own().count() * plan.tables.len()).max(1);
        for (place, (in_plan, ServedShard { shard, addresses, .. })) in own().enumerate() {
            let (connection, addresses) = match &self.config.above {
                Some(above) => (ConnectionId::AggregatorFor(*shard), above.of_shard(in_plan)),
                None => (NodeId::Shard(*shard).into(), addresses),
            };
            let link = Link::new(now, connection, addresses.for_caller(me + shard.core as usize));
            let tables = plan.tables.iter().zip(&chunks).map(|(spec, chunks)| {
                let own = (0u32..).zip(chunks.iter().copied()).filter(|(_, chunk)| chunk.shard == *shard);
                Table::new(spec, own)
            });
            let lowers = Lowers::with_seed(self.config.process.0);
            let tables = tables.collect();
            self.proxies.push(ShardProxy::new(place, *shard, connection, link, tables, lowers, log_bytes));
        }
        self.plan = Some(plan);
        self.set_policies();
        self.handle_timeout(now);
    }

    /// Works out the policies of every table on every shard.
    fn set_policies(&mut self) {
        let Some(plan) = &self.plan else { return };
        let sender = !self.id.map_or(0, |id| id.0);
        for proxy in &mut self.proxies {
            let server = proxy.shard().server;
            for (number, spec) in plan.tables.iter().enumerate() {
                if !proxy.holds(number) {
                    continue;
                }
                let table = TableId(number as u32);
                let policy = plan.policy_of(table, server);
                let (sync, optimizer) = (policy.sync(&self.registry), policy.optimizer(&self.registry));
                let codecs = policy.codecs(&self.registry);
                // The servers refuse a policy that cannot be read here.
                let (Ok(sync), Ok(optimizer), Ok(codecs)) = (sync, optimizer, codecs) else { continue };
                let valid_from = plan.valid_from(table);
                let answers = match policy.is_broadcast() {
                    true => Answers::Broadcast(UpdateCodec::new(codecs.answer, spec.rows, valid_from)),
                    false => Answers::Passing(codecs.answer.element_type()),
                };
                let policy = ProxyPolicy {
                    sums: sum_policy(policy.order(), &sync, &optimizer, self.config.hold),
                    nonfinite: policy.nonfinite(),
                    codec: SumCodec::new(codecs.push, spec.rows),
                    answers,
                    seeds: CodecSeeds { job: plan.seed, sender, table: table.0 },
                    valid_from,
                };
                let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
                proxy.set_policy(number, policy, &mut out);
            }
        }
    }

    fn stop(&mut self, error: Option<String>) {
        if !std::mem::replace(&mut self.stopped, true) {
            self.outputs.push_back(Output::Stop { error });
        }
    }

    fn tell_coordinator(&mut self, message: &Control) {
        let frame = frame(Kind::Control, message);
        self.outputs.push_back(Output::send(NodeId::Coordinator, frame));
    }

    fn log(&mut self, line: String) {
        self.outputs.push_back(Output::Log(Level::Warn, line));
    }
}

impl Role for Aggregator {
    fn node(&self) -> Option<NodeId> {
        self.id.map(NodeId::Aggregator)
    }

    fn accept(&mut self, _now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        let refuse = |reason: String, retry| Err(Refusal { reason, retry });
        if hello.job != self.config.job {
            let reason = format!("this aggregator serves job `{}`, not `{}`", self.config.job, hello.job);
            return refuse(reason, false);
        }
        if let Party::Below { process, id, shard, levels } = hello.from {
            return self.accept_lower(hello.incarnation, Lower { process, id, shard, levels });
        }
        let Party::Through { rank, shard, pushed } = hello.from else {
            let reason = "an aggregator takes workers and aggregators that were told to go through it; use the job's URL";
            return refuse(reason.into(), false);
        };
        if self.plan.is_none() {
            return refuse("this aggregator has no plan yet".into(), true);
        }
        if self.live.get(&rank) != Some(&hello.incarnation) {
            let known = self.plan.as_ref().and_then(|plan| plan.member(rank));
            if known.is_some_and(|known| known.incarnation == hello.incarnation && !known.is_live()) {
                let reason = format!("{rank} was declared dead or has left; the job goes on without it");
                return refuse(reason, false);
            }
            // The servers have let it in, which may be known here later.
            return refuse(format!("this aggregator does not know yet that {rank} takes part"), true);
        }
        let Some((proxy, mut out)) = self.proxy(shard) else {
            return refuse(misplaced(shard), false);
        };
        proxy.accept(rank, pushed, &mut out)?;
        Ok(Welcome { you: NodeId::Worker(rank), incarnation: hello.incarnation, session: 0 })
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        let AggregatorConfig { job, process, .. } = &self.config;
        let process = *process;
        let from = match (connection, self.id) {
            (ConnectionId::AggregatorFor(shard), Some(id)) => {
                Party::Below { process, id, shard, levels: self.levels }
            }
            (_, id) => Party::Aggregator { process, id },
        };
        Hello { job: job.clone(), from, incarnation: process.0, to: connection.shard() }
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        // It connects to shards and to the coordinator.
        if let Some(shard) = connection.shard() {
            if let Some((proxy, mut out)) = self.proxy(shard) {
                proxy.connected(welcome.session, &mut out);
            }
            return;
        }
        self.coordinator.connected();
        if let NodeId::Aggregator(id) = welcome.you {
            self.id = Some(id);
        }
        self.next_report = now;
        self.tell_coordinator(&Control::Register { addresses: self.config.addresses.clone() });
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        match connection {
            ConnectionId::WorkerFor(worker, shard) => {
                if let Some((proxy, mut out)) = self.proxy(shard) {
                    proxy.lose_worker(worker, &mut out);
                }
            }
            ConnectionId::LowerFor(id, shard) => {
                if let Some((proxy, mut out)) = self.proxy(shard) {
                    proxy.lose_lower(id, &mut out);
                }
            }
            _ if why.is_final() => self.stop(Some(format!("{connection} {why}"))),
            ConnectionId::Node(NodeId::Shard(shard)) | ConnectionId::AggregatorFor(shard) => {
                if let Some((proxy, mut out)) = self.proxy(shard) {
                    proxy.disconnected(now, why, &mut out);
                }
            }
            // The coordinator's is the only other one.
            _ => self.coordinator.disconnected(now, why),
        }
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        match (connection, header.kind) {
            (ConnectionId::WorkerFor(worker, shard), _) => {
                self.handle_worker_frame(now, worker, shard, header, payload);
            }
            (ConnectionId::LowerFor(id, shard), _) => {
                let index = self.proxies.binary_search_by_key(&shard, ShardProxy::shard);
                let Ok(index) = index else { return };
                let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
                self.proxies[index].handle_lower(now, id, header, payload, &self.live, &mut out);
            }
            (ConnectionId::Node(NodeId::Shard(shard)) | ConnectionId::AggregatorFor(shard), _) => {
                let Some((proxy, mut out)) = self.proxy(shard) else { return };
                proxy.handle_shard(now, header, payload, &mut out);
            }
            (ConnectionId::Node(NodeId::Coordinator), Kind::Control) => {
                match control::decode("control message", payload) {
                    Ok(message) => self.handle_control(now, message),
                    Err(error) => self.log(error.to_string()),
                }
            }
            (from, kind) => self.log(format!("ignored a {kind:?} frame from {from}")),
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.stopped {
            return;
        }
        self.outputs.extend(self.coordinator.poll(now));
        let mut overdue = self.coordinator.overdue(now);
        let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
        for proxy in &mut self.proxies {
            let sentence = proxy.handle_timeout(now, &mut out);
            overdue = overdue.or(sentence);
        }
        if let Some(sentence) = overdue {
            return self.stop(Some(sentence));
        }
        if self.coordinator.is_up() && self.next_report <= now {
            self.next_report = now + limits::HEARTBEAT_EVERY;
            let report = self.report();
            self.tell_coordinator(&Control::AggregatorReport(report));
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.stopped {
            return None;
        }
        let proxies = self.proxies.iter().filter_map(ShardProxy::next_timeout).min();
        let report = self.coordinator.is_up().then_some(self.next_report);
        [self.coordinator.next_timeout(), proxies, report].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn backlog_bytes(&self) -> usize {
        self.outputs.bytes()
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        let &Body::Stored { buffer, start, len } = body else {
            return body.bytes().expect("all else has its bytes with it");
        };
        let Memory { shard, id } = Memory::from_bits(buffer);
        let bytes = self.proxies.get(shard).and_then(|proxy| proxy.aggregate_bytes(id));
        bytes.and_then(|bytes| bytes.get(start..start + len)).unwrap_or_else(|| &self.blank[..len])
    }

    fn check(&self) -> Result<(), String> {
        for proxy in &self.proxies {
            proxy.check().map_err(|why| format!("on the way to {}: {why}", proxy.shard()))?;
            if let Some(worker) = proxy.workers().find(|worker| !self.live.contains_key(worker)) {
                return Err(format!("{worker} is no member, and {} is kept for it", proxy.shard()));
            }
        }
        Ok(())
    }
}

/// The hello of an aggregator below ([`Party::Below`]).
struct Lower {
    process: ProcessId,
    id: AggregatorId,
    shard: ShardId,
    levels: u32,
}

/// Why a peer that asks for a shard is refused.
fn misplaced(shard: ShardId) -> String {
    format!(
        "this core of the aggregator does not stand for {shard}; give the addresses of all its cores, with `+` between them"
    )
}

/// Treatment of a table's gradients under its policies.
fn sum_policy(order: Order, sync: &SyncPolicy, optimizer: &OptimizerPolicy, hold: Duration) -> SumPolicy {
    let on_arrival = sync.model.apply() == Apply::OnArrival;
    // By rank, with its norm, or for the norm of one worker's push, a gradient has to stay alone.
    let stays_alone = order == Order::Ranked && !on_arrival
        || sync.model.wants_significance()
        || on_arrival && optimizer.needs_norms();
    let is_patient = sync.model.waits_for_all();
    let least = if is_patient { limits::ROUND_HOLD } else { Duration::ZERO };
    SumPolicy { adds_up: !stays_alone, hold: least.max(hold), is_patient }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Part;
    use crate::policy::Policy;
    use crate::table::TableSpec;
    use crate::types::ServerId;
    use crate::wire::Member;

    const SHARD: ShardId = ShardId { server: ServerId(0), core: 0 };

    fn aggregator() -> Aggregator {
        let config = AggregatorConfig {
            job: "job".into(),
            process: ProcessId(1),
            id: Some(AggregatorId(0)),
            core: 0,
            cores: 1,
            addresses: "here:1".into(),
            coordinator: "there:1".into(),
            above: None,
            hold: Duration::ZERO,
        };
        let mut aggregator = Aggregator::new(Time::ZERO, config, Arc::new(Registry::builtin()));
        aggregator.take_plan(
            Time::ZERO,
            Plan {
                epoch: 1,
                tables: vec![TableSpec::dense("w", [4])],
                parts: vec![vec![Part { server: SHARD.server, start: 0, len: 4 }]],
                whole: vec![],
                shards: vec![ServedShard::original(SHARD, ProcessId(1), "shard:1".into())],
                workers: 1,
                members: vec![Member::original(WorkerId(0), 10)],
                policy: Policy::default(),
                overrides: vec![],
                switches: vec![],
                seed: 0,
                resumed: None,
            },
        );
        let welcome = Welcome { you: NodeId::Aggregator(AggregatorId(0)), incarnation: 1, session: 0 };
        aggregator.handle_connected(Time::ZERO, NodeId::Shard(SHARD).into(), &welcome);
        aggregator
    }

    /// What becomes of the hello of worker 1: whether it may try again, where it is refused.
    fn greet(aggregator: &mut Aggregator, incarnation: u64) -> Result<(), bool> {
        let from = Party::Through { rank: WorkerId(1), shard: SHARD, pushed: None };
        let hello = Hello { job: "job".into(), from, incarnation, to: None };
        aggregator.accept(Time::ZERO, &hello).map(|_| ()).map_err(|refusal| refusal.retry)
    }

    /// The servers are waited for when a worker joins, aggregators are not. One that let the worker in before it knew of the
    /// first clock would begin to count its pushes anew when it hears of it, and would take one twice.
    #[test]
    fn a_worker_that_joins_is_let_in_when_its_first_clock_is_known() {
        let mut aggregator = aggregator();
        assert_eq!(greet(&mut aggregator, 20), Err(true));
        aggregator.take_change(Time::ZERO, 2, &Change::Joining { worker: WorkerId(1), incarnation: 20 });
        assert_eq!(greet(&mut aggregator, 20), Err(true));
        aggregator.take_change(Time::ZERO, 3, &Change::Joined { worker: WorkerId(1), clock: 5 });
        assert_eq!((greet(&mut aggregator, 19), greet(&mut aggregator, 20)), (Err(true), Ok(())));
        aggregator.take_change(Time::ZERO, 4, &Change::Left { worker: WorkerId(1) });
        assert_eq!((greet(&mut aggregator, 20), greet(&mut aggregator, 21)), (Err(false), Err(true)));
        assert_eq!(aggregator.check(), Ok(()));
    }

    #[test]
    fn aggregators_that_go_through_each_other_are_told() {
        let mut aggregator = aggregator();
        let mut greet = |id: u32, levels| {
            let (process, id) = (ProcessId(7), AggregatorId(id));
            let from = Party::Below { process, id, shard: SHARD, levels };
            let hello = Hello { job: "job".into(), from, incarnation: 7, to: None };
            aggregator
                .accept(Time::ZERO, &hello)
                .map(|_| ())
                .map_err(|refusal| (refusal.reason, refusal.retry))
        };
        let (reason, retry) = greet(0, 0).unwrap_err();
        assert!(reason.contains("aggregator 0 cannot go through itself") && !retry, "{reason}");
        let (reason, retry) = greet(1, limits::MAX_AGGREGATOR_LEVELS).unwrap_err();
        assert!(reason.contains("in a circle") && !retry, "{reason}");
        assert_eq!(greet(limits::MAX_AGGREGATORS, 0).map_err(|(_, retry)| retry), Err(false));
        assert_eq!(greet(1, limits::MAX_AGGREGATOR_LEVELS - 1), Ok(()));
        assert_eq!(aggregator.report().below, [AggregatorId(1)]);
    }

    #[test]
    fn gradients_are_added_up_where_a_server_needs_nothing_but_their_sum() {
        let registry = Registry::builtin();
        let policy = |order, sync: &str, optimizer: &str, hold| {
            let sync = SyncPolicy::parse(&registry.consistency, sync).unwrap();
            let optimizer = OptimizerPolicy::parse(&registry.optimizer, optimizer).unwrap();
            sum_policy(order, &sync, &optimizer, hold)
        };
        let adds_up = |order, sync, optimizer| policy(order, sync, optimizer, limits::HOLD).adds_up;
        for (order, sync, optimizer, expected) in [
            (Order::Arrival, "bsp", "sgd", true),
            // A ranked sum is the server's to make, unless every gradient is a step of its own.
            (Order::Ranked, "bsp", "sgd", false),
            (Order::Ranked, "asp", "sgd", true),
            // The norm of one push is needed where each is a step.
            (Order::Arrival, "bsp", "lars:lr=1", true),
            (Order::Arrival, "asp", "lars:lr=1", false),
            (Order::Arrival, "when:pull=significance < 0.01", "sgd", false),
        ] {
            let found = adds_up(order, sync, optimizer);
            assert_eq!(found, expected, "{order:?}, {sync}, {optimizer}");
        }
        let held = |sync, hold| {
            let SumPolicy { hold, is_patient, .. } = policy(Order::Arrival, sync, "sgd", hold);
            (hold, is_patient)
        };
        assert_eq!(held("bsp", limits::HOLD), (limits::ROUND_HOLD, true), "nobody gains by hearing earlier");
        assert_eq!(held("bsp", limits::MAX_HOLD), (limits::MAX_HOLD, true));
        assert_eq!(held("asp", limits::HOLD), (limits::HOLD, false));
    }
}
