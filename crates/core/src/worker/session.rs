//! A worker's session with the job: its identity, its connections, and its outputs.

use super::WorkerError;
use crate::address::{Addresses, CoreAddresses};
use crate::checkpoint;
use crate::limits;
use crate::link::Link;
use crate::role::{Frame, Level, Lost, Outbox, Output, Priority, Turn};
use crate::types::{Clock, ConnectionId, NodeId, ShardId, Time, WorkerId};
use crate::wire::control::frame;
use crate::wire::{Change, Control, Hello, Kind, Party, Plan, Refusal, ServedShard, Standing, Welcome};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The loop that has the coordinator's connection, log lines and timeouts.
const FIRST: usize = 0;

/// Configuration of a worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The job's name.
    pub job: String,
    /// Its rank, when it was given one.
    pub rank: Option<WorkerId>,
    /// The coordinator's address.
    pub coordinator: String,
    /// The addresses of the aggregator that this worker goes through to the servers, if it does.
    pub aggregator: Option<CoreAddresses>,
    /// Tells the workers of a process apart: a slab goes back to the worker that lent it.
    pub number: u64,
    /// What it does with the job's tables.
    pub access: Access,
}

/// What a member of a job does with its tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Access {
    /// A worker pushes and pulls.
    #[default]
    Full,
    /// A worker pushes only: it keeps no copy of tables that are broadcast.
    WriteOnly,
    /// A reader receives the tables as they are broadcast. It is no worker: nobody waits for it, and it comes and goes as it likes.
    ReadOnly,
}

/// How many loops of a driver a worker's connections are spread over.
///
/// The coordinator's connection, log lines and timeouts are the first loop's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loops {
    /// So many: connections to shards go round.
    Exactly(usize),
    /// As many of so many as help. The workers of a job may all be on one host, so each takes its share of the loops.
    UpTo(usize),
}

impl Loops {
    /// How many there are; some may have nothing to do.
    pub fn count(self) -> usize {
        let (Loops::Exactly(count) | Loops::UpTo(count)) = self;
        count.clamp(1, limits::MAX_LOOPS)
    }

    /// The loop of a job's connection to a shard, which is the `index`th that takes turns.
    fn of(self, index: usize, workers: u32) -> usize {
        match self {
            Loops::Exactly(_) => index % self.count(),
            Loops::UpTo(_) => index % (self.count() / workers.max(1) as usize).max(1),
        }
    }
}

/// A worker's membership in its job: identity, plan, connections, and what waits to be sent.
#[derive(Debug)]
pub(super) struct Session {
    config: WorkerConfig,
    id: Option<WorkerId>,
    incarnation: u64,
    plan: Option<Plan>,
    /// Why it does not take part in the job that it joins, as the coordinator says; `None` for one that it begins with, or is in.
    join_waits: Option<String>,
    coordinator: Link,
    shards: BTreeMap<ShardId, Link>,
    /// To workers that pass streams on to this one.
    relays: BTreeMap<WorkerId, Link>,
    /// Workers that streams may be passed on to.
    followers: BTreeMap<WorkerId, u64>,
    /// Where these reach this one, once its driver has said whether they can.
    reached: Option<Option<Addresses>>,
    spread: Loops,
    /// The loop of each shard's connection.
    lanes: BTreeMap<ShardId, usize>,
    /// Why nothing goes on any more.
    failed: Option<WorkerError>,
    /// The coordinator was told that this worker leaves, though it may not have heard it.
    leave_said: bool,
    /// The coordinator has heard it.
    is_gone: bool,
    /// For each loop.
    outputs: Vec<Outbox>,
}

impl Session {
    pub(super) fn new(now: Time, config: WorkerConfig) -> Session {
        Session {
            coordinator: Link::new(now, NodeId::Coordinator, Addresses::list(&config.coordinator)),
            id: config.rank,
            config,
            incarnation: 0,
            plan: None,
            join_waits: None,
            shards: BTreeMap::new(),
            relays: BTreeMap::new(),
            followers: BTreeMap::new(),
            reached: None,
            spread: Loops::Exactly(1),
            lanes: BTreeMap::new(),
            failed: None,
            leave_said: false,
            is_gone: false,
            outputs: vec![Outbox::default()],
        }
    }

    /// Spreads its connections over several loops. To be called before there is anything to send.
    pub(super) fn spread(&mut self, loops: Loops) {
        self.spread = loops;
        self.outputs.resize_with(loops.count(), Outbox::default);
    }

    pub(super) fn id(&self) -> Option<WorkerId> {
        self.id
    }

    pub(super) fn access(&self) -> Access {
        self.config.access
    }

    /// Tells the workers of a process apart.
    pub(super) fn number(&self) -> u64 {
        self.config.number
    }

    pub(super) fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// The first clock of this process in a plan, if it takes part.
    pub(super) fn first_clock(&self, plan: &Plan) -> Option<Clock> {
        if self.config.access == Access::ReadOnly {
            return Some(0);
        }
        let own = plan.member(self.id?).filter(|own| own.incarnation == self.incarnation)?;
        match own.standing {
            Standing::From(clock) => Some(clock),
            Standing::Joining | Standing::Left => None,
        }
    }

    /// The coordinator says why this worker, which joins, does not take part yet.
    pub(super) fn set_join_waits(&mut self, reason: String) {
        self.join_waits = self.plan.is_none().then_some(reason);
    }

    /// Why this worker does not take part in the job that it joins.
    pub(super) fn join_waits(&self) -> Option<&str> {
        self.join_waits.as_deref()
    }

    /// Whether this worker joins a job that runs.
    pub(super) fn joins(&self) -> bool {
        let joined = |plan: &Plan| self.first_clock(plan).is_some_and(|clock| clock > plan.first_clock());
        self.join_waits.is_some() || self.plan.as_ref().is_some_and(joined)
    }

    /// Enters the next epoch.
    pub(super) fn apply(&mut self, epoch: u32, change: &Change) {
        if let Some(plan) = &mut self.plan {
            plan.apply(epoch, change);
        }
    }

    pub(super) fn failure(&self) -> Option<&WorkerError> {
        self.failed.as_ref()
    }

    /// The error is why the worker failed.
    pub(super) fn check_alive(&self) -> Result<(), WorkerError> {
        self.failure().cloned().map_or(Ok(()), Err)
    }

    /// The same, or that there is no plan yet.
    pub(super) fn check_started(&self) -> Result<(), WorkerError> {
        self.check_alive()?;
        if self.plan().is_none() {
            return Err(WorkerError::Order("call `start` and wait for it first".into()));
        }
        Ok(())
    }

    /// The first failure counts.
    pub(super) fn fail(&mut self, error: WorkerError) {
        self.failed.get_or_insert(error);
    }

    pub(super) fn say_leave(&mut self) {
        self.leave_said = true;
        self.tell_coordinator(&Control::Leave);
    }

    /// The coordinator has heard that this worker leaves: there is nobody to connect to any more.
    pub(super) fn set_gone(&mut self) {
        self.is_gone = true;
    }

    /// Whether this worker has left: the job goes on without it, or is over, whether its last words arrived or not.
    pub(super) fn has_left(&self) -> bool {
        self.leave_said && self.failed.is_some()
    }

    /// Addresses that this worker connects to under a plan, beside the coordinator's.
    pub(super) fn peers<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = &'a Addresses> {
        let shards = plan.shards.iter().map(|served| &served.addresses);
        let own = shards.filter(|_| self.config.aggregator.is_none());
        self.config.aggregator.iter().flat_map(CoreAddresses::iter).chain(own)
    }

    /// Takes a plan: there is a link from now on to each of its shards that has parameters, which are those in `holders`.
    pub(super) fn enter(&mut self, now: Time, plan: Plan, holders: &BTreeSet<ShardId>) {
        let rank = self.id.map_or(0, |id| id.0 as usize);
        for (place, ServedShard { shard, addresses, .. }) in plan.shards.iter().enumerate() {
            if !holders.contains(shard) {
                continue;
            }
            let addresses = match &self.config.aggregator {
                Some(aggregator) => aggregator.of_shard(place).for_caller(rank),
                None => addresses.for_caller(rank + shard.core as usize),
            };
            self.lanes.insert(*shard, self.spread.of(self.lanes.len(), plan.workers));
            self.shards.insert(*shard, Link::new(now, self.connection(*shard), addresses));
        }
        self.plan = Some(plan);
        self.join_waits = None;
    }

    /// A shard is served by another process. Whether that is news, and its connection is to be made anew.
    pub(super) fn move_shard(&mut self, now: Time, shard: ShardId, addresses: &Addresses) -> bool {
        // An aggregator follows by itself.
        if self.is_aggregated() {
            return false;
        }
        let rank = self.id.map_or(0, |id| id.0 as usize);
        let addresses = addresses.for_caller(rank + shard.core as usize);
        let Some(link) = self.shards.get_mut(&shard).filter(|link| *link.addresses() != addresses) else {
            return false;
        };
        let (connection, lane) = (link.connection(), self.lanes.get(&shard).copied().unwrap_or(FIRST));
        link.move_to(now, addresses);
        self.outputs[lane].push_back(Output::Disconnect { connection });
        true
    }

    /// The coordinator may be away for so long.
    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.coordinator.set_patience(patience);
    }

    pub(super) fn coordinator(&self) -> &Link {
        &self.coordinator
    }

    pub(super) fn link(&self, shard: ShardId) -> Option<&Link> {
        self.shards.get(&shard)
    }

    /// Keeps links to these workers, which pass streams on to this one, and to no others.
    pub(super) fn set_relays(&mut self, now: Time, wanted: BTreeMap<WorkerId, Addresses>) {
        let is_kept = |worker: &WorkerId, link: &Link| wanted.get(worker) == Some(link.addresses());
        let (kept, left): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.relays).into_iter().partition(|(worker, link)| is_kept(worker, link));
        for link in left.into_values() {
            self.outputs[FIRST].push_back(Output::Disconnect { connection: link.connection() });
        }
        self.relays = kept;
        for (worker, addresses) in wanted {
            let link = || Link::new(now, ConnectionId::RelayedBy(worker), addresses);
            self.relays.entry(worker).or_insert_with(link);
        }
    }

    pub(super) fn is_relay_up(&self, worker: WorkerId) -> bool {
        self.relays.get(&worker).is_some_and(Link::is_up)
    }

    pub(super) fn relay_connected(&mut self, worker: WorkerId) {
        self.relays.get_mut(&worker).into_iter().for_each(Link::connected);
    }

    /// Whether frames can be sent on a connection to a shard, to somebody who passes its streams on, or to whom they are passed on.
    pub(super) fn is_connected(&self, connection: ConnectionId) -> bool {
        match connection {
            ConnectionId::Node(NodeId::Worker(follower)) => self.followers.contains_key(&follower),
            ConnectionId::RelayedBy(worker) => self.is_relay_up(worker),
            other => other.shard().is_some_and(|shard| self.is_up(shard)),
        }
    }

    /// Whether this worker passes streams on to others, where tables are broadcast: it listens for them, or says that it does not.
    pub(super) fn offer_to_relay(&mut self, is_broadcast: bool) {
        match self.config.access {
            // Its aggregator is near to all that are behind it, and passes streams on.
            Access::Full if is_broadcast && self.is_aggregated() => self.set_reached(None),
            Access::Full if is_broadcast => self.listen(),
            Access::WriteOnly => self.set_reached(None),
            // What a reader holds back could not be passed on as it is, and nobody asks where it is reached.
            Access::Full | Access::ReadOnly => {}
        }
    }

    /// Asks the driver to take connections of other workers.
    fn listen(&mut self) {
        self.outputs[FIRST].push_back(Output::Listen);
    }

    /// The driver says where other workers reach this one, if they do.
    pub(super) fn set_reached(&mut self, addresses: Option<Addresses>) {
        self.reached = Some(addresses);
        self.tell_where_reached();
    }

    /// Where streams are passed on, the coordinator has to know who can.
    pub(super) fn tell_where_reached(&mut self) {
        if let Some(addresses) = self.reached.clone() {
            let is_aggregated = self.is_aggregated();
            self.tell_coordinator(&Control::Reached { addresses, is_aggregated });
        }
    }

    /// Whether this worker goes to the servers through an aggregator.
    pub(super) fn is_aggregated(&self) -> bool {
        self.config.aggregator.is_some()
    }

    /// Another worker wants streams passed on to it.
    pub(super) fn accept(&mut self, hello: &Hello) -> Result<Welcome, Refusal> {
        let refuse = |reason: String, retry| Err(Refusal { reason, retry });
        let rank = match hello.from {
            Party::Worker { rank: Some(rank) } if !rank.is_reader() => rank,
            Party::Reader { id: Some(id) } if id.is_reader() => id,
            Party::Through { .. } | Party::Below { .. } => {
                let reason =
                    "this is a worker, and no aggregator; give the address that `paramill aggregate` prints";
                return refuse(reason.into(), false);
            }
            _ => {
                return refuse(
                    "a worker takes connections from workers of its job only; use the job's URL".into(),
                    false,
                );
            }
        };
        if hello.job != self.config.job {
            let (own, other) = (&self.config.job, &hello.job);
            return refuse(format!("this worker is one of job `{own}`, not of `{other}`"), false);
        }
        if self.plan.is_none() || Some(rank) == self.id {
            return refuse("this worker has nothing to pass on yet".into(), true);
        }
        // Of workers the last process counts. The coordinator does not tell which reader is which.
        let known = self.followers.get(&rank).filter(|_| rank.is_reader());
        if known.is_some_and(|incarnation| *incarnation != hello.incarnation) {
            return refuse(format!("another process is {rank} here"), true);
        }
        if self.followers.len() >= limits::MAX_CHILDREN && !self.followers.contains_key(&rank) {
            return refuse(format!("this worker passes streams on to {} others", self.followers.len()), true);
        }
        self.followers.insert(rank, hello.incarnation);
        Ok(Welcome { you: NodeId::Worker(rank), incarnation: hello.incarnation, session: 0 })
    }

    /// Says something, if the connection stands.
    pub(super) fn say(&mut self, to: ConnectionId, message: &Control) {
        if self.is_connected(to) {
            self.send(to, frame(Kind::Control, message));
        }
    }

    pub(super) fn is_up(&self, shard: ShardId) -> bool {
        self.link(shard).is_some_and(Link::is_up)
    }

    /// The connection that leads to a shard: to the shard itself, or to the aggregator.
    pub(super) fn connection(&self, shard: ShardId) -> ConnectionId {
        match &self.config.aggregator {
            Some(_) => ConnectionId::AggregatorFor(shard),
            None => ConnectionId::Node(NodeId::Shard(shard)),
        }
    }

    /// What is said first on a connection, at this iteration.
    pub(super) fn hello(&self, connection: ConnectionId, clock: Clock) -> Hello {
        let from = match (connection, self.id) {
            (ConnectionId::AggregatorFor(shard), Some(rank)) => {
                let was_up = self.link(shard).is_some_and(Link::was_up);
                Party::Through { rank, shard, pushed: was_up.then_some(clock) }
            }
            (_, id) if self.config.access == Access::ReadOnly => Party::Reader { id },
            (_, rank) => Party::Worker { rank },
        };
        Hello { job: self.config.job.clone(), from, incarnation: self.incarnation, to: connection.shard() }
    }

    pub(super) fn coordinator_connected(&mut self, welcome: &Welcome) {
        self.coordinator.connected();
        if let NodeId::Worker(id) = welcome.you {
            self.id = Some(id);
            self.incarnation = welcome.incarnation;
        }
    }

    pub(super) fn shard_connected(&mut self, shard: ShardId) {
        self.shards.get_mut(&shard).into_iter().for_each(Link::connected);
    }

    pub(super) fn disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        let link = match (connection, connection.shard()) {
            (_, Some(shard)) => self.shards.get_mut(&shard),
            (ConnectionId::RelayedBy(worker), _) => self.relays.get_mut(&worker),
            (ConnectionId::Node(NodeId::Worker(worker)), _) => {
                self.followers.remove(&worker);
                None
            }
            _ => Some(&mut self.coordinator),
        };
        link.into_iter().for_each(|link| link.disconnected(now, why));
    }

    /// Connects where it is time to. Fails when a peer has been out of reach for too long.
    pub(super) fn handle_timeout(&mut self, now: Time) {
        if self.is_gone {
            return;
        }
        let Session { coordinator, shards, relays, lanes, outputs, .. } = self;
        outputs[FIRST].extend(coordinator.poll(now));
        relays.values_mut().for_each(|link| outputs[FIRST].extend(link.poll(now)));
        let mut overdue = coordinator.overdue(now);
        for (shard, link) in shards {
            outputs[lanes.get(shard).copied().unwrap_or(FIRST)].extend(link.poll(now));
            overdue = overdue.or_else(|| link.overdue(now));
        }
        if let Some(sentence) = overdue {
            self.fail(WorkerError::Unreachable(sentence));
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        if self.is_gone {
            return None;
        }
        let links = self.shards.values().chain(self.relays.values()).filter_map(Link::next_timeout).min();
        self.coordinator.next_timeout().into_iter().chain(links).min()
    }

    pub(super) fn send(&mut self, to: ConnectionId, frame: Frame) {
        let lane = self.lane_of(to);
        self.outputs[lane].push_back(Output::send(to, frame));
    }

    /// Sends a frame of a request. It may overtake others on its way to a shard; an aggregator adds up in the order of arrival.
    pub(super) fn send_request(&mut self, to: ConnectionId, frame: Frame, is_prioritized: bool) {
        let is_direct = matches!(to, ConnectionId::Node(_));
        let is_ranked = is_prioritized && is_direct;
        let turn = if is_ranked { Turn::Ranked(Priority::of(&frame.header)) } else { Turn::InOrder };
        let lane = self.lane_of(to);
        self.outputs[lane].push_back(Output::Send { to, frame, turn });
    }

    /// The loop of a connection.
    fn lane_of(&self, connection: ConnectionId) -> usize {
        if self.outputs.len() == 1 {
            return FIRST;
        }
        connection.shard().and_then(|shard| self.lanes.get(&shard).copied()).unwrap_or(FIRST)
    }

    pub(super) fn tell_coordinator(&mut self, message: &Control) {
        self.send(NodeId::Coordinator.into(), frame(Kind::Control, message));
    }

    /// The job's name.
    pub(super) fn job(&self) -> &str {
        &self.config.job
    }

    /// Asks the driver's archive for something.
    pub(super) fn ask_archive(&mut self, request: checkpoint::Request) {
        self.outputs[FIRST].push_back(Output::Archive(Box::new(request)));
    }

    /// A sentence about a wait of such a length, of the start of the job or of something else, as far as connections tell.
    pub(super) fn explain(&self, waited: Duration, mut waits_for: String, is_start: bool) -> String {
        if is_start && self.joins() {
            waits_for = "the running job to let it join".into();
        }
        let mut sentence = format!("{waits_for} (for {:.1} s)", waited.as_secs_f64());
        if let Some(reason) = self.join_waits().filter(|_| is_start) {
            sentence += &format!("; {reason}");
        }
        let coordinator = self.coordinator();
        if !coordinator.is_up() {
            let why = coordinator.why().unwrap_or("not tried yet");
            sentence += &format!("; the coordinator at {} is not connected ({why})", coordinator.addresses());
        }
        sentence
    }

    pub(super) fn log(&mut self, line: String) {
        self.note(Level::Warn, line);
    }

    pub(super) fn note(&mut self, level: Level, line: String) {
        self.outputs[FIRST].push_back(Output::Log(level, line));
    }

    /// The next output for a loop.
    pub(super) fn poll_output(&mut self, lane: usize) -> Option<Output> {
        self.outputs[lane].pop_front()
    }

    /// The next output for any loop.
    pub(super) fn poll_any_output(&mut self) -> Option<Output> {
        self.outputs.iter_mut().find_map(Outbox::pop_front)
    }

    /// Bytes that wait for a loop.
    pub(super) fn backlog_bytes(&self, lane: usize) -> usize {
        self.outputs[lane].bytes()
    }

    /// Bytes that wait for all loops.
    pub(super) fn total_backlog_bytes(&self) -> usize {
        self.outputs.iter().map(Outbox::bytes).sum()
    }

    /// The loops that something waits for, one bit each.
    pub(super) fn lanes_with_outputs(&self) -> u64 {
        let bits = self.outputs.iter().zip(0..).map(|(outbox, lane)| u64::from(!outbox.is_empty()) << lane);
        bits.fold(0, |all, bit| all | bit)
    }

    /// The bytes that wait against what waits.
    pub(super) fn check(&self) -> Result<(), String> {
        self.outputs.iter().try_for_each(Outbox::check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Part;
    use crate::policy::Policy;
    use crate::table::TableSpec;
    use crate::types::{ProcessId, ServerId};
    use crate::wire::{Member, ServedShard};

    fn shard(core: u32) -> ShardId {
        ShardId { server: ServerId(0), core }
    }

    /// Worker 3 in a plan of one server with three cores, of which two have parameters.
    fn session(aggregator: Option<CoreAddresses>) -> Session {
        let served =
            |core: u32| ServedShard::original(shard(core), ProcessId(1), format!("shard:{core}").into());
        let config = WorkerConfig {
            job: "test".into(),
            rank: Some(WorkerId(3)),
            coordinator: "coordinator".into(),
            aggregator,
            number: 0,
            access: Access::Full,
        };
        let mut session = Session::new(Time::ZERO, config);
        let plan = Plan {
            epoch: 1,
            tables: vec![TableSpec::dense("w", [4])],
            parts: vec![vec![Part { server: ServerId(0), start: 0, len: 4 }]],
            whole: vec![],
            shards: vec![served(0), served(1), served(2)],
            workers: 4,
            members: vec![Member::original(WorkerId(3), 1)],
            policy: Policy::default(),
            overrides: vec![],
            switches: vec![],
            seed: 0,
            resumed: None,
        };
        session.enter(Time::ZERO, plan, &[shard(0), shard(1)].into());
        session
    }

    /// The connections that it asks for, beside the coordinator's, with their addresses and who it says it is.
    fn attempts(session: &mut Session, now: Time) -> Vec<(ConnectionId, String, Party)> {
        session.handle_timeout(now);
        let outputs: Vec<Output> = std::iter::from_fn(|| session.poll_any_output()).collect();
        let attempt = |output| match output {
            Output::Connect { connection, address } => {
                connection.shard().map(|_| (connection, address, session.hello(connection, 7).from))
            }
            other => panic!("nothing else is wanted yet: {other:?}"),
        };
        outputs.into_iter().filter_map(attempt).collect()
    }

    #[test]
    fn a_worker_goes_to_every_shard_with_parameters_itself() {
        let rank = Some(WorkerId(3));
        let expected = [0, 1].map(|core| {
            let connection = ConnectionId::Node(NodeId::Shard(shard(core)));
            (connection, format!("shard:{core}"), Party::Worker { rank })
        });
        assert_eq!(attempts(&mut session(None), Time::ZERO), expected);
    }

    #[test]
    fn a_worker_has_one_connection_to_its_aggregator_for_each_shard() {
        let mut session = session(Some("aggregator".into()));
        let rank = WorkerId(3);
        let expected = |again: [bool; 2]| {
            [0, 1].map(|core| {
                let shard = shard(core as u32);
                let party = Party::Through { rank, shard, pushed: again[core].then_some(7) };
                (ConnectionId::AggregatorFor(shard), "aggregator".to_owned(), party)
            })
        };
        assert_eq!(attempts(&mut session, Time::ZERO), expected([false; 2]));
        // One of them stands and breaks: the other one knows nothing of it.
        session.shard_connected(shard(0));
        assert!(session.is_up(shard(0)) && !session.is_up(shard(1)));
        let lost = Lost::Broken("reset".into());
        for core in [0, 1] {
            session.disconnected(Time::ZERO, session.connection(shard(core)), &lost);
        }
        let later = Time::ZERO + limits::RECONNECT_MIN;
        assert_eq!(attempts(&mut session, later), expected([true, false]));
    }

    #[test]
    fn each_shard_is_reached_through_the_core_that_stands_for_it() {
        let addresses = |text: &str| -> Vec<String> {
            let mut session = session(Some(text.into()));
            attempts(&mut session, Time::ZERO).into_iter().map(|(_, address, _)| address).collect()
        };
        assert_eq!(addresses("core:0+core:1+core:2"), ["core:0", "core:1"]);
        assert_eq!(addresses("core:0"), ["core:0", "core:0"]);
    }

    #[test]
    fn connections_go_round_the_loops_and_the_first_has_the_rest() {
        let mut several = Session::new(Time::ZERO, session(None).config);
        several.spread(Loops::Exactly(3));
        let plan = session(None).plan.expect("it has one");
        several.enter(Time::ZERO, plan, &[shard(0), shard(1), shard(2)].into());
        several.handle_timeout(Time::ZERO);
        several.log("a line".into());
        assert_eq!(several.lanes_with_outputs(), 0b111);
        let names = |outputs: Vec<Output>| -> Vec<String> {
            let name = |output: &Output| match output {
                Output::Connect { connection, .. } => connection.to_string(),
                other => format!("{other:?}"),
            };
            outputs.iter().map(name).collect()
        };
        let mut of = |lane| names(std::iter::from_fn(|| several.poll_output(lane)).collect());
        let shard = |core| ConnectionId::Node(NodeId::Shard(shard(core))).to_string();
        let first =
            [ConnectionId::from(NodeId::Coordinator).to_string(), shard(0), "Log(Warn, \"a line\")".into()];
        assert_eq!((of(0), of(1), of(2)), (first.to_vec(), vec![shard(1)], vec![shard(2)]));
        assert_eq!((several.lanes_with_outputs(), several.total_backlog_bytes()), (0, 0));
    }

    #[test]
    fn workers_that_may_be_on_one_host_share_its_loops() {
        let loops = |spread: Loops, workers| -> Vec<usize> {
            (0..5).map(|index| spread.of(index, workers)).collect()
        };
        assert_eq!(loops(Loops::UpTo(4), 1), [0, 1, 2, 3, 0]);
        assert_eq!(loops(Loops::UpTo(4), 2), [0, 1, 0, 1, 0]);
        assert_eq!(loops(Loops::UpTo(4), 9), [0; 5]);
        assert_eq!(loops(Loops::UpTo(0), 0), [0; 5]);
        assert_eq!(loops(Loops::Exactly(2), 9), [0, 1, 0, 1, 0]);
    }
}
