//! An aggregator as a state machine: it adds up the gradients of the workers of a host or rack, and fans parameters out
//! to them.
//!
//! To a server it is one peer that brings weighted sums and says whose pushes are complete in them, so that conditions
//! see the real workers' progress. To a worker it is where the servers are: the same frames, one connection for each
//! shard. See `docs/aggregation.md`.

mod copies;
mod lane;
mod routes;
mod sums;
mod table;

use crate::address::Addresses;
use crate::codec::{Decoder, Encoder};
use crate::consistency::Apply;
use crate::limits;
use crate::link::Link;
use crate::policy::{Axis, Order, Policies, PolicyOverride};
use crate::registry::Registry;
use crate::role::{Body, Lost, Outbox, Output, Role};
use crate::status::AggregatorReport;
use crate::types::{AggregatorId, NodeId, ShardId, TableId, Time, WorkerId};
use crate::wire::control::{self, frame};
use crate::wire::{Cause, Change, Control, Fault, Flags, Header, Hello, Kind, Party, Plan, Refusal, Welcome};
use copies::Copies;
use lane::{Lane, Out};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use table::{SumPolicy, Table};

/// Numbers of buffers from here on are sums; below are tables.
const FIRST_SUM: u64 = 1 << 63;
/// Sums are numbered by the lane that they belong to, and within it.
const SUMS_PER_LANE: u32 = 40;

/// What an aggregator needs to know to begin.
#[derive(Debug, Clone)]
pub struct AggregatorConfig {
    /// The job's name.
    pub job: String,
    /// Tells aggregators apart until the coordinator numbers them.
    pub process: u64,
    /// Its number, when it was given one.
    pub id: Option<AggregatorId>,
    /// Where workers reach it: each of these leads to it.
    pub addresses: Addresses,
    /// Where the coordinator is.
    pub coordinator: String,
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
    /// Live workers of the job, with their incarnations.
    live: BTreeMap<WorkerId, u64>,
    /// One for each shard, in the plan's order.
    lanes: Vec<Lane>,
    copies: Copies,
    /// What a frame is made of whose sum a server noted before it was sent.
    zeros: Vec<u8>,
    report: AggregatorReport,
    next_report: Time,
    stopped: bool,
    outputs: Outbox,
}

impl Aggregator {
    /// An aggregator that is about to join.
    pub fn new(now: Time, config: AggregatorConfig, registry: Arc<Registry>) -> Aggregator {
        Aggregator {
            coordinator: Link::new(now, NodeId::Coordinator, config.coordinator.clone()),
            id: config.id,
            config,
            registry,
            plan: None,
            live: BTreeMap::new(),
            lanes: Vec::new(),
            copies: Copies::default(),
            zeros: Vec::new(),
            report: AggregatorReport::default(),
            next_report: now,
            stopped: false,
            outputs: Outbox::default(),
        }
    }

    /// Who this is, once the coordinator said so.
    pub fn id(&self) -> Option<AggregatorId> {
        self.id
    }

    /// How it stands.
    pub fn report(&self) -> AggregatorReport {
        let members: BTreeSet<WorkerId> =
            self.lanes.iter().flat_map(|lane| lane.members.keys().copied()).collect();
        AggregatorReport {
            workers: members.len() as u32,
            memory_bytes: self.memory_bytes() as u64,
            ..self.report.clone()
        }
    }

    /// Bytes held for sums and parameters.
    pub fn memory_bytes(&self) -> usize {
        self.copies.memory_bytes() + self.lanes.iter().map(Lane::memory_bytes).sum::<usize>()
    }

    /// What goes on with one shard, and where it says what it wants done.
    fn lane(&mut self, shard: ShardId) -> Option<(&mut Lane, &mut Copies, Out<'_>)> {
        let index = self.lanes.binary_search_by_key(&shard, |lane| lane.shard).ok()?;
        let out = Out { outputs: &mut self.outputs, report: &mut self.report };
        Some((&mut self.lanes[index], &mut self.copies, out))
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
        let Some((lane, _, mut out)) = self.lane(shard) else { return };
        if !is_live {
            let message = format!("{worker} is no member of this job any more");
            let fault = Fault { cause: Cause::NotAMember, message };
            lane.refuse(worker, header.table, header.request, &fault, &mut out);
        } else if lane.is_connected(worker) {
            lane.handle_worker(now, worker, header, payload, &mut out);
        }
    }

    fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(now, *plan),
            Control::Members { workers, .. } => self.take_members(&workers),
            Control::SetSync { table, server, sync } => {
                let mut policies = Policies::default();
                if policies.set(Axis::Sync, sync).is_ok() {
                    self.set_sync(PolicyOverride::new(table, policies).on(server));
                }
            }
            // Gradients are added up the same way, whatever steps are made with them.
            Control::SetOptimizer { .. } => {}
            Control::Stop { error } => self.stop(error.map(control::sentence)),
            other => self.log(format!("ignored a `{}` message from the coordinator", other.name())),
        }
    }

    fn take_plan(&mut self, now: Time, plan: Plan) {
        if self.plan.is_some() {
            return;
        }
        if let Err(why) = plan.check() {
            let error =
                format!("the coordinator's plan cannot be used: {why}; use the same release everywhere");
            return self.stop(Some(error));
        }
        let chunks = plan.chunks();
        self.live = plan.live_members().map(|member| (member.worker, member.incarnation)).collect();
        let longest = chunks.iter().flatten().map(|chunk| chunk.len).max();
        self.zeros = vec![0; 4 * limits::BLOCK_ELEMENTS.max(longest.unwrap_or(0) as usize)];
        let me = self.id.map_or(0, |id| id.0 as usize);
        for (index, (shard, addresses)) in (0u64..).zip(&plan.shards) {
            let addresses = addresses.for_caller(me + shard.core as usize);
            let link = Link::new(now, NodeId::Shard(*shard), addresses);
            let tables = plan.tables.iter().zip(&chunks).map(|(spec, chunks)| {
                let own = (0u32..).zip(chunks.iter().copied()).filter(|(_, chunk)| chunk.shard == *shard);
                Table::new(spec, own)
            });
            let first_sum = FIRST_SUM | index << SUMS_PER_LANE;
            self.lanes.push(Lane::new(*shard, link, plan.epoch, tables.collect(), first_sum));
        }
        self.copies = Copies::new(&plan.tables, &chunks);
        self.plan = Some(plan);
        self.set_policies();
        self.handle_timeout(now);
    }

    /// Works out for every table on every shard whether its gradients are added up, and how long they are held.
    fn set_policies(&mut self) {
        let Some(plan) = &self.plan else { return };
        for lane in &mut self.lanes {
            for (number, table) in lane.tables.iter_mut().enumerate() {
                if table.is_empty() {
                    continue;
                }
                let policy = plan.policy_of(TableId(number as u32), lane.shard.server);
                let sync = policy.sync(&self.registry);
                let optimizer = policy.optimizer(&self.registry);
                // What cannot be read here is refused by the servers.
                let (Ok(sync), Ok(optimizer)) = (sync, optimizer) else { continue };
                if let Ok(codecs) = policy.codecs(&self.registry)
                    && table.decoder.is_none()
                {
                    let is_encoded = !codecs.push.is_none() && !plan.tables[number].rows;
                    let codec = Arc::new(codecs.push.of_sums());
                    table.encoder = is_encoded.then(|| Encoder::new(codec.clone(), table.elements()));
                    table.decoder = Some(Decoder::new(codec));
                    // No worker has such a rank.
                    table.identity = (plan.seed, !self.id.map_or(0, |id| id.0), number as u32);
                }
                if let Ok(codecs) = policy.codecs(&self.registry) {
                    self.copies.set_codec(number, codecs.answer);
                }
                let on_arrival = sync.model.apply() == Apply::OnArrival;
                // By rank, with its norm, or for the norm of one worker's push, a gradient has to stay alone.
                let alone = policy.order() == Order::Ranked && !on_arrival
                    || sync.model.wants_significance()
                    || on_arrival && optimizer.needs_norms();
                let is_patient = sync.model.waits_for_all();
                let hold = if is_patient { limits::ROUND_HOLD } else { Duration::ZERO };
                table.set_policy(SumPolicy {
                    adds_up: !plan.tables[number].rows && !alone,
                    hold: hold.max(self.config.hold),
                    is_patient,
                    nonfinite: policy.nonfinite(),
                });
            }
        }
    }

    fn set_sync(&mut self, rule: PolicyOverride) {
        let Some(plan) = &mut self.plan else { return };
        let epoch = plan.epoch + 1;
        plan.apply(epoch, &Change::Policy(rule));
        self.set_policies();
    }

    fn take_members(&mut self, alive: &[WorkerId]) {
        let alive: BTreeSet<WorkerId> = alive.iter().copied().collect();
        let is_gone = |worker: &WorkerId| !alive.contains(worker);
        let gone: Vec<WorkerId> = self.live.keys().copied().filter(is_gone).collect();
        let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
        for worker in gone {
            self.live.remove(&worker);
            self.lanes.iter_mut().for_each(|lane| lane.remove_member(worker, &mut out));
        }
    }

    fn stop(&mut self, error: Option<String>) {
        if !std::mem::replace(&mut self.stopped, true) {
            self.outputs.push_back(Output::Stop { error });
        }
    }

    fn tell_coordinator(&mut self, message: &Control) {
        let frame = frame(Kind::Control, message);
        self.outputs.push_back(Output::Send { to: NodeId::Coordinator, frame });
    }

    fn log(&mut self, line: String) {
        self.outputs.push_back(Output::Log(line));
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
        let Party::Through { rank, shard, again } = hello.from else {
            let reason = "an aggregator takes workers that were told to go through it; use the job's URL";
            return refuse(reason.into(), false);
        };
        if self.plan.is_none() {
            return refuse("this aggregator has no plan yet".into(), true);
        }
        if self.live.get(&rank) != Some(&hello.incarnation) {
            return refuse(
                format!("{rank} was declared dead or has left; the job goes on without it"),
                false,
            );
        }
        let Some((lane, ..)) = self.lane(shard) else {
            return refuse(format!("the job has no {shard}"), false);
        };
        match lane.accept(rank, again) {
            Ok(()) => Ok(Welcome { you: NodeId::Through(rank, shard), incarnation: hello.incarnation }),
            Err((reason, retry)) => refuse(reason, retry),
        }
    }

    fn hello(&self, _peer: NodeId) -> Hello {
        let AggregatorConfig { job, process, .. } = &self.config;
        let from = Party::Aggregator { process: *process, id: self.id };
        Hello { job: job.clone(), from, incarnation: *process }
    }

    fn handle_connected(&mut self, now: Time, peer: NodeId, welcome: &Welcome) {
        match peer {
            NodeId::Coordinator => {
                self.coordinator.connected();
                if let NodeId::Aggregator(id) = welcome.you {
                    self.id = Some(id);
                }
                self.next_report = now;
                self.tell_coordinator(&Control::Register { addresses: self.config.addresses.clone() });
            }
            NodeId::Shard(shard) => {
                if let Some((lane, _, mut out)) = self.lane(shard) {
                    lane.connected(&mut out);
                }
            }
            NodeId::Worker(_) | NodeId::Admin(_) | NodeId::Aggregator(_) | NodeId::Through(..) => {}
        }
    }

    fn handle_disconnected(&mut self, now: Time, peer: NodeId, why: &Lost) {
        match peer {
            NodeId::Coordinator | NodeId::Shard(_) if why.is_final() => {
                self.stop(Some(format!("{peer} {why}")));
            }
            NodeId::Coordinator => self.coordinator.disconnected(now, why),
            NodeId::Shard(shard) => {
                if let Some((lane, copies, mut out)) = self.lane(shard) {
                    lane.link.disconnected(now, why);
                    lane.disconnected(copies, &mut out);
                }
            }
            NodeId::Through(worker, shard) => {
                if let Some((lane, _, mut out)) = self.lane(shard) {
                    lane.lose_member(worker, &mut out);
                }
            }
            NodeId::Worker(_) | NodeId::Admin(_) | NodeId::Aggregator(_) => {}
        }
    }

    fn handle_frame(&mut self, now: Time, from: NodeId, header: &Header, payload: &[u8]) {
        match (from, header.kind) {
            (NodeId::Through(worker, shard), _) => {
                self.handle_worker_frame(now, worker, shard, header, payload);
            }
            (NodeId::Shard(shard), _) => {
                let Some((lane, copies, mut out)) = self.lane(shard) else { return };
                if let Err(error) = lane.handle_shard(header, payload, copies, &mut out) {
                    self.stop(Some(error));
                }
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
        let mut overdue = self.coordinator.overdue(now);
        for lane in &mut self.lanes {
            self.outputs.extend(lane.link.poll(now));
            overdue = overdue.or_else(|| lane.link.overdue(now));
            lane.handle_timeout(now, &mut Out { outputs: &mut self.outputs, report: &mut self.report });
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
        let lane =
            |lane: &Lane| lane.link.next_timeout().into_iter().chain(lane.flights.next_timeout()).min();
        let lanes = self.lanes.iter().filter_map(lane).min();
        let report = self.coordinator.is_up().then_some(self.next_report);
        [self.coordinator.next_timeout(), lanes, report].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn backlog_bytes(&self) -> usize {
        self.outputs.bytes()
    }

    fn refresh(&self, header: &mut Header) {
        // Chunks are read from the copy when they leave. What a codec made is as old as it was.
        let is_fixed = header.flags.has(Flags::ROWS) || header.flags.has(Flags::ENCODED);
        if header.kind == Kind::Params && !is_fixed {
            header.version = self.copies.version(header.table.0 as usize, header.chunk);
        }
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        let &Body::Stored { buffer, start, len } = body else {
            return body.bytes().expect("all else has its bytes with it");
        };
        let bytes = match buffer & FIRST_SUM {
            0 => Some(self.copies.bytes(buffer as usize)),
            _ => {
                let lane = (buffer & !FIRST_SUM) >> SUMS_PER_LANE;
                self.lanes.get(lane as usize).and_then(|lane| lane.flights.bytes(buffer))
            }
        };
        // A server that notes a sum before it can have all of it gets nothing in its place.
        bytes.and_then(|bytes| bytes.get(start..start + len)).unwrap_or_else(|| &self.zeros[..len])
    }
}
