//! Who belongs to the job: how workers and servers come, go, and are given up.

use super::{Coordinator, draw_incarnation};
use crate::address::Addresses;
use crate::limits;
use crate::role::{Lost, Output};
use crate::standstill;
use crate::status::{MemberState, ShardReport, WorkerReport};
use crate::types::{NodeId, ServerId, ShardId, Time, WorkerId};
use crate::wire::control::frame;
use crate::wire::{Cause, Control, Fault, Hello, Kind, Refusal, Welcome};
use std::collections::BTreeMap;
use std::time::Duration;

/// What the coordinator knows of a worker.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) incarnation: u64,
    pub(super) state: MemberState,
    pub(super) connected: bool,
    /// When it was heard last; later by the time that the coordinator has stood still since.
    pub(super) last_heard: Time,
    pub(super) last_progress: Time,
    /// Its tables are known; they are those of the job.
    pub(super) declared: bool,
    /// The plan was sent on this connection.
    pub(super) has_plan: bool,
    /// It came back, and may have missed switches of policies.
    pub(super) is_back: bool,
    /// The barriers it waits at, with their numbers.
    pub(super) barriers: BTreeMap<String, u64>,
    /// The highest number of a barrier that it came to.
    pub(super) last_barrier: u64,
    pub(super) report: WorkerReport,
}

impl Member {
    fn new(now: Time, incarnation: u64) -> Member {
        Member {
            incarnation,
            state: MemberState::Joining,
            connected: true,
            last_heard: now,
            last_progress: now,
            declared: false,
            has_plan: false,
            is_back: false,
            barriers: BTreeMap::new(),
            last_barrier: 0,
            report: WorkerReport::default(),
        }
    }

    pub(super) fn is_live(&self) -> bool {
        matches!(self.state, MemberState::Joining | MemberState::Running)
    }
}

/// A server process.
#[derive(Debug)]
pub(super) struct Server {
    process: u64,
    cores: u32,
}

/// What the coordinator knows of a shard.
#[derive(Debug, Default)]
pub(super) struct ShardMember {
    pub(super) addresses: Option<Addresses>,
    /// Since when it is not connected, if it is not; later by the time that the coordinator has stood still since.
    pub(super) lost_since: Option<Time>,
    /// The plan was sent on this connection.
    pub(super) has_plan: bool,
    pub(super) ready: bool,
    /// Its last report, and when it came.
    pub(super) report: Option<(Time, ShardReport)>,
}

impl ShardMember {
    /// Its last report. The reasons in an old one are marked as such: the shard may think otherwise by now.
    pub(super) fn last_report(&self, now: Time) -> Option<ShardReport> {
        let (came, mut report) = self.report.clone()?;
        let age = now.since(came);
        if age >= limits::OLD_REPORT {
            let waits = report.tables.iter_mut().flat_map(|table| &mut table.waiting);
            let note = format!(" (so it said {} s ago; it has not reported since)", age.as_secs());
            waits.for_each(|waiting| waiting.reason += &note);
        }
        Some(report)
    }
}

impl Coordinator {
    pub(super) fn live(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.workers.iter().filter(|(_, member)| member.is_live()).map(|(id, _)| *id)
    }

    pub(super) fn members(&self) -> Control {
        Control::Members { epoch: self.epoch, workers: self.live().collect() }
    }

    /// Servers all of whose cores are connected and told where they are reached.
    pub(super) fn complete_servers(&self) -> usize {
        let is_here = |shard: &ShardMember| shard.addresses.is_some() && shard.lost_since.is_none();
        let here = |server: ServerId| {
            self.shards.iter().filter(|(id, shard)| id.server == server && is_here(shard)).count()
        };
        self.servers.iter().filter(|(id, server)| here(**id) == server.cores as usize).count()
    }

    pub(super) fn accept_worker(
        &mut self,
        now: Time,
        hello: &Hello,
        wanted: Option<WorkerId>,
    ) -> Result<Welcome, Refusal> {
        let expected = self.config.workers;
        let free = || (0..expected).map(WorkerId).find(|id| !self.workers.contains_key(id));
        let id = match wanted.or_else(free) {
            None => return refuse(self.full()),
            Some(id) if id.0 >= expected => {
                return refuse(format!("rank {} is out of range: the job has {expected} workers", id.0));
            }
            Some(id) => id,
        };
        let (incarnation, silence) = (self.next_incarnation, self.config.worker_timeout);
        let member = match self.workers.get_mut(&id) {
            Some(member) if member.state == MemberState::Dead => return refuse(obituary(id, silence)),
            Some(member) if hello.incarnation == member.incarnation => member,
            // A worker that starts over before the job is planned takes its old place.
            Some(member) if self.plan.is_none() && !member.connected => {
                *member = Member::new(now, incarnation);
                member
            }
            Some(_) => {
                // Before the plan it may be its own first connection, whose welcome got lost and which ends soon.
                let reason = format!("rank {} is taken by another worker", id.0);
                return Err(Refusal { reason, retry: self.plan.is_none() });
            }
            None if self.plan.is_some() => {
                return refuse("the job has started; workers cannot join it any more".into());
            }
            None => self.workers.entry(id).or_insert_with(|| Member::new(now, incarnation)),
        };
        member.connected = true;
        member.last_heard = now;
        member.has_plan = false;
        member.is_back = true;
        let welcome = Welcome { you: NodeId::Worker(id), incarnation: member.incarnation };
        while self.workers.values().any(|member| member.incarnation == self.next_incarnation) {
            self.next_incarnation = draw_incarnation(&mut self.incarnations);
        }
        Ok(welcome)
    }

    /// Why there is no rank for another worker.
    fn full(&self) -> String {
        let expected = self.config.workers;
        let having = |state| self.workers.iter().filter(move |(_, member)| member.state == state);
        match (having(MemberState::Dead).next(), having(MemberState::Left).count()) {
            (Some((dead, _)), _) => obituary(*dead, self.config.worker_timeout),
            (None, 0) => format!("all {expected} workers of the job are here already"),
            (None, left) => {
                format!(
                    "the job has had all its {expected} workers, {left} of which have left; start another job"
                )
            }
        }
    }

    pub(super) fn accept_shard(
        &mut self,
        process: u64,
        wanted: Option<ServerId>,
        core: u32,
        cores: u32,
    ) -> Result<Welcome, Refusal> {
        let expected = self.config.servers;
        let known = self.servers.iter().find(|(_, server)| server.process == process).map(|(id, _)| *id);
        let free = || (0..expected).map(ServerId).find(|id| !self.servers.contains_key(id));
        let Some(server) = known.or(wanted).or_else(free) else {
            return refuse(format!("all {expected} servers of the job are here already"));
        };
        let id = ShardId { server, core };
        if server.0 >= expected || core >= cores || cores > limits::MAX_CORES {
            return refuse(format!(
                "{id} of {cores} is out of range: the job has {expected} servers of at most {} cores",
                limits::MAX_CORES
            ));
        }
        match self.servers.get(&server) {
            Some(found) if found.process == process && found.cores != cores => {
                return refuse(format!("{server} has {} cores, not {cores}", found.cores));
            }
            Some(found) if found.process == process => {}
            Some(_) if self.plan.is_none() => {
                // The other one may be about to be given up.
                let reason =
                    format!("{server} is another process already; give each its own number, or none");
                return Err(Refusal { reason, retry: true });
            }
            _ if self.plan.is_some() => {
                return refuse(format!(
                    "{server} ended with its parameters while the job ran; start the job anew"
                ));
            }
            _ => {}
        }
        if self.shards.get(&id).is_some_and(|shard| shard.lost_since.is_none()) {
            return Err(Refusal { reason: format!("{id} is here already"), retry: true });
        }
        self.servers.entry(server).or_insert(Server { process, cores });
        let shard = self.shards.entry(id).or_default();
        shard.lost_since = None;
        shard.has_plan = false;
        Ok(Welcome { you: NodeId::Shard(id), incarnation: process })
    }

    pub(super) fn lose_worker(&mut self, now: Time, id: WorkerId) {
        if let Some(member) = self.workers.get_mut(&id) {
            member.connected = false;
            member.last_heard = now;
        }
    }

    /// Before the plan a server that goes away leaves its place to another; after it, its parameters may be gone.
    pub(super) fn lose_shard(&mut self, now: Time, id: ShardId, why: &Lost) {
        if self.plan.is_none() {
            self.shards.remove(&id);
            if !self.shards.keys().any(|other| other.server == id.server) {
                self.servers.remove(&id.server);
            }
        } else if let Some(shard) = self.shards.get_mut(&id) {
            shard.lost_since = Some(now);
            if !self.over {
                self.log(format!("lost {id}: {why}"));
            }
        }
    }

    /// A worker left or died: the shards go on without it. Before there is a plan its place is free again.
    pub(super) fn part_with(&mut self, now: Time, worker: WorkerId, state: MemberState) {
        let Some(member) = self.workers.get_mut(&worker).filter(|member| member.is_live()) else { return };
        if self.plan.is_none() {
            self.workers.remove(&worker);
            return self.log(format!("{worker} went away before the job started; its place is free"));
        }
        member.state = state;
        member.barriers.clear();
        self.epoch += 1;
        if state == MemberState::Dead {
            self.log(format!("{worker} is declared dead; the job goes on without it"));
            // One that only stood still finds these words when it goes on, even if the job is over by then.
            self.send_away(worker);
        }
        let members = self.members();
        self.tell_shards(&members);
        self.tell_aggregators(&members);
        if let Some(gate) = &mut self.gate {
            gate.remove(now, worker);
        }
        self.open_gate();
        self.release_barriers();
        if self.live().next().is_none() {
            let died = self.workers.values().all(|member| member.state == MemberState::Dead);
            self.end(died.then(|| "all workers died".into()));
        }
    }

    /// A worker that was declared dead is told, and sent away.
    pub(super) fn send_away(&mut self, worker: WorkerId) {
        let to = NodeId::Worker(worker);
        let fault = Fault { cause: Cause::NotAMember, message: obituary(worker, self.config.worker_timeout) };
        self.outputs.push_back(Output::Send { to, frame: frame(Kind::Error, &fault) });
        self.outputs.push_back(Output::Disconnect { peer: to });
    }

    /// A worker comes to a barrier, or says again after a broken connection that it is there.
    pub(super) fn arrive(&mut self, worker: WorkerId, name: String, number: u64) {
        let Some(member) = self.workers.get_mut(&worker) else { return };
        let is_new = number > member.last_barrier;
        if name.len() > limits::MAX_NAME_BYTES || (is_new && member.barriers.len() >= limits::MAX_BARRIERS) {
            let message = format!(
                "{worker} waits at more than {} barriers, or at one with a name of more than {} bytes",
                limits::MAX_BARRIERS,
                limits::MAX_NAME_BYTES
            );
            let fault = Fault { cause: Cause::Protocol, message };
            let frame = frame(Kind::Error, &fault);
            return self.outputs.push_back(Output::Send { to: NodeId::Worker(worker), frame });
        }
        if is_new {
            member.last_barrier = number;
            member.barriers.insert(name, number);
            self.release_barriers();
        } else if member.barriers.get(&name) != Some(&number) {
            // It was reached, and the news was lost with a connection.
            self.send(NodeId::Worker(worker), &Control::BarrierReached { name });
        }
    }

    fn release_barriers(&mut self) {
        // A barrier that is reached is one that every live worker waits at, the first one too.
        let Some(first) = self.live().next() else { return };
        let live = || self.workers.values().filter(|member| member.is_live());
        let is_reached = |name: &&String| live().all(|member| member.barriers.contains_key(*name));
        let reached: Vec<String> = self.workers[&first].barriers.keys().filter(is_reached).cloned().collect();
        for name in reached {
            for member in self.workers.values_mut() {
                member.barriers.remove(&name);
            }
            self.tell_workers(&Control::BarrierReached { name });
        }
    }

    /// Time in which this coordinator stood still is nobody's silence.
    pub(super) fn exclude(&mut self, now: Time, lost: Duration) {
        let workers = self.workers.values_mut().map(|member| &mut member.last_heard);
        let shards = self.shards.values_mut().filter_map(|shard| shard.lost_since.as_mut());
        let commands = self.commands.last_heard_mut();
        workers.chain(shards).chain(commands).for_each(|since| standstill::exclude(since, now, lost));
    }

    /// When a worker is given up, unless it is heard before.
    fn deadline(&self, member: &Member) -> Option<Time> {
        let grace = match (member.connected, &self.plan) {
            (false, _) => limits::RECONNECT_GRACE,
            (true, Some(_)) => self.config.worker_timeout,
            // Who waits for the others to come may be silent.
            (true, None) => return None,
        };
        member.is_live().then(|| self.standstill.deadline(member.last_heard, grace))
    }

    /// When a shard that is away is given up, and the job with it.
    fn shard_deadline(&self, shard: &ShardMember) -> Option<Time> {
        let since = shard.lost_since.filter(|_| !self.over)?;
        Some(self.standstill.deadline(since, limits::CONNECT_DEADLINE))
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        let workers = self.workers.values().filter_map(|member| self.deadline(member));
        workers.chain(self.shards.values().filter_map(|shard| self.shard_deadline(shard))).min()
    }

    /// Gives up who was away or silent for too long.
    pub(super) fn expire_members(&mut self, now: Time) {
        let is_over = |deadline: Option<Time>| deadline.is_some_and(|deadline| deadline <= now);
        let late = |(id, member): (&WorkerId, &Member)| is_over(self.deadline(member)).then_some(*id);
        let workers: Vec<WorkerId> = self.workers.iter().filter_map(late).collect();
        for worker in workers {
            self.part_with(now, worker, MemberState::Dead);
        }
        let lost = self.shards.iter().find(|(_, shard)| is_over(self.shard_deadline(shard)));
        if let Some((id, shard)) = lost {
            let address = shard.addresses.as_ref().map_or("an unknown address".into(), Addresses::to_string);
            let seconds = limits::CONNECT_DEADLINE.as_secs();
            let error = format!(
                "{id} at {address} is away for {seconds} s, and its parameters with it; start the job anew"
            );
            self.end(Some(error));
        }
    }
}

/// What became of a worker, and what can be done about it.
fn obituary(worker: WorkerId, silence: Duration) -> String {
    format!(
        "{worker} was declared dead: it was silent for {} s, or its connection broke and it did not come back within {} s. \
         The job goes on without it, and takes no replacement yet: to have all workers again, end the job and start it anew",
        silence.as_secs_f64(),
        limits::RECONNECT_GRACE.as_secs()
    )
}

fn refuse(reason: String) -> Result<Welcome, Refusal> {
    Err(Refusal { reason, retry: false })
}
