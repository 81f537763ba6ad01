//! A whole job in a world: coordinator, data cores, workers with their applications, faults.

use crate::actor::Actor;
use crate::canary::{Broken, Canary, CopyBug, ShardBug};
use crate::compute::{ComputeClock, SendMode};
use crate::gradient::Gradients;
use crate::network::{HostId, Position};
use crate::operator::Operator;
use crate::player::{Player, Program};
use crate::rules::Injected;
use crate::scenario::{Hosts, SPARES_OF_A_SERVER, Scenario, ScenarioError};
use crate::spectator::Spectator;
use crate::training::{Crew, Lesson, Studies};
use crate::world::{Death, Ended, Newcomer, Observer, Violation, World};
use paramill_core::address::{Addresses, LOCAL};
use paramill_core::aggregator::{Aggregator, AggregatorConfig};
use paramill_core::coordinator::{Coordinator, JobConfig};
use paramill_core::fault::FaultPlan;
use paramill_core::limits;
use paramill_core::policy::Axis;
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_core::replica::Replica;
use paramill_core::server::{Shard, ShardConfig, ShardImage};
use paramill_core::types::{AggregatorId, NodeId, ProcessId, ServerId, ShardId, TableId, Time, WorkerId};
use paramill_core::wire::{Plan, ServedShard};
use paramill_core::worker::{Access, Worker, WorkerConfig};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const JOB: &str = "simulated";
const COORDINATOR: &str = "coordinator";
const OPERATOR: NodeId = NodeId::Admin(0);
/// Readers' times are drawn apart.
const READERS_FORK: u64 = 0x7265_6164_0000_0000;
/// How long workers that are done stay where there are readers, in virtual time: these are to have the last version.
const LINGERS: Duration = Duration::from_secs(40);

/// A job that runs in virtual time.
#[derive(Debug)]
pub struct Cluster {
    /// The nodes and the network between them.
    pub world: World<Actor>,
    builder: Rc<Builder>,
    /// Processes that were started anew or late.
    lives: u64,
    /// Workers beyond those that the job waits for.
    late: u32,
}

/// How applications and shards behave.
#[derive(Debug, Clone, Copy)]
pub struct Play {
    /// What workers push.
    pub gradients: Gradients,
    /// Whether dense tables are exchanged as slabs.
    pub slabs: bool,
    /// The probability that a gradient has a NaN.
    pub nan_p: f64,
    /// Whether memory is watched while applications read it.
    pub watches_memory: bool,
    /// Whether shards have several addresses, one of which nobody can use.
    pub several_addresses: bool,
    /// A planted bug.
    pub canary: Option<Canary>,
}

impl Default for Play {
    fn default() -> Play {
        Play {
            gradients: Gradients::Quadratic,
            slabs: false,
            nan_p: 0.0,
            watches_memory: false,
            several_addresses: false,
            canary: None,
        }
    }
}

/// When a reader is there.
#[derive(Debug, Clone, Copy)]
struct Visit {
    comes: Time,
    /// It leaves in good order.
    leaves: Option<Time>,
    /// It is killed.
    dies: Option<Time>,
}

/// Makes the processes of a job, at its start and when one is started anew.
#[derive(Debug)]
struct Builder {
    scenario: Scenario,
    config: JobConfig,
    hosts: Hosts,
    play: Play,
    faults: FaultPlan,
    registry: Arc<Registry>,
    /// What workers learn, and who computes it, where gradients are computed.
    lesson: Option<(Rc<dyn Lesson>, Crew)>,
}

impl Cluster {
    /// Sets up a scenario, its faults included. Step traces are read from their files.
    pub fn new(scenario: &Scenario) -> Result<Cluster, ScenarioError> {
        Cluster::with(scenario, Play { gradients: scenario.gradients(), ..Play::default() })
    }

    /// Sets up a scenario whose applications and shards behave so.
    pub fn with(scenario: &Scenario, play: Play) -> Result<Cluster, ScenarioError> {
        scenario.check_untrained()?;
        Cluster::set_up(scenario, play, None)
    }

    /// Sets up a scenario in which workers compute what they push. Its tables are the lesson's.
    pub fn training(scenario: &Scenario, lesson: Rc<dyn Lesson>) -> Result<Cluster, ScenarioError> {
        let refuse = |why: &str| Err(ScenarioError::Value(why.into()));
        if scenario.tags {
            return refuse(
                "tags = true: workers push numbers that count pushes, and train nothing; leave it out",
            );
        }
        if scenario.policy.is_local() {
            return refuse(
                "local steps of real training are not simulated yet; leave `local` out, or run `paramill train`",
            );
        }
        if scenario.texts_of(Axis::Codec).any(|text| text.split('+').any(|stage| stage == "factors")) {
            return refuse(
                "codec = \"factors\": learners give no factors of their gradients yet, and the codec would save nothing; choose another, or run \
                 `paramill train`",
            );
        }
        Cluster::set_up(scenario, Play::default(), Some((lesson, Crew::new())))
    }

    fn set_up(
        scenario: &Scenario,
        play: Play,
        lesson: Option<(Rc<dyn Lesson>, Crew)>,
    ) -> Result<Cluster, ScenarioError> {
        scenario.check()?;
        let registry = Arc::new(Registry::builtin());
        let config = scenario.job_config(JOB);
        let value = |error: paramill_core::spec::SpecError| ScenarioError::Value(error.to_string());
        config.check(&registry).map_err(value)?;
        config.check_tables(&registry, &scenario.table_specs()).map_err(value)?;
        for switch in &scenario.switches {
            switch.change.policies.check(&registry).map_err(value)?;
        }
        let faults = scenario.fault_plan()?;
        let hosts = Hosts::of(scenario)?;
        let config = JobConfig { topology: hosts.topology(&scenario.network), ..config };
        let world = World::new(hosts.network(&scenario.network), scenario.seed);
        let builder = Builder { scenario: scenario.clone(), config, hosts, play, faults, registry, lesson };
        let mut cluster = Cluster { world, builder: Rc::new(builder), lives: 0, late: 0 };
        cluster.add_coordinator();
        cluster.shard_ids().for_each(|id| cluster.add_node(NodeId::Shard(id)));
        cluster.aggregator_ids().for_each(|id| cluster.add_node(NodeId::Aggregator(id)));
        cluster.worker_ids().for_each(|id| cluster.add_node(NodeId::Worker(id)));
        cluster.reader_ids().for_each(|id| cluster.add_reader(id));
        cluster.set_starter();
        cluster.inject();
        Ok(cluster)
    }

    /// A node dies at `at`, and is started anew a while later: a new process, which has to find out how things stand. The coordinator knows
    /// what it has stored, if the scenario's faults say that it crashes.
    pub fn crash_and_restart(&mut self, node: NodeId, at: Time, after: Duration) {
        self.world.crash(node, at);
        self.lives += 1;
        let (builder, life) = (self.builder.clone(), self.lives);
        if let (NodeId::Coordinator, Some(disk)) = (node, self.world.disk(node)) {
            let restart = move |now| builder.coordinator(now, disk.borrow().as_deref());
            return self.world.restart(node, at + after, restart);
        }
        self.world.restart(node, at + after, move |now| builder.actor(now, node, life));
    }

    /// A server dies at `at` with all its cores, and is started anew a while later.
    pub fn crash_server(&mut self, server: ServerId, at: Time, after: Option<Duration>) {
        self.kill_server(server, at, at, after, |_| true);
    }

    /// The same as soon as every shard has a copy that can take over, if that is so in time.
    pub fn crash_copied_server(&mut self, server: ServerId, at: Time, until: Time, after: Option<Duration>) {
        self.kill_server(server, at, until, after, |world| {
            let Some(Actor::Coordinator(coordinator)) = world.role(NodeId::Coordinator) else { return false };
            let plan = coordinator.plan().filter(|_| world.ended(NodeId::Coordinator).is_none());
            plan.is_some_and(|plan| plan.shards.iter().all(|served| is_copied(world, served)))
        });
    }

    fn kill_server(
        &mut self,
        server: ServerId,
        at: Time,
        until: Time,
        after: Option<Duration>,
        may_die: impl Fn(&World<Actor>) -> bool + 'static,
    ) {
        self.lives += 1;
        let life = self.lives;
        let cores = self.shard_ids().filter(|id| id.server == server && after.is_some()).map(NodeId::Shard);
        let restarts = cores.map(|node| -> (NodeId, Box<dyn FnOnce(Time) -> Actor>) {
            let builder = self.builder.clone();
            (node, Box::new(move |now| builder.actor(now, node, life)))
        });
        let restarts = restarts.collect();
        let after = after.unwrap_or_default();
        self.world.crash_process(server.0, at, Death { may_die: Box::new(may_die), until, after, restarts });
    }

    /// Data cores start others of their process when the coordinator says so.
    fn set_starter(&mut self) {
        for id in self.shard_ids() {
            self.world.set_process(NodeId::Shard(id), id.server.0);
        }
        let (builder, started) = (self.builder.clone(), Cell::new(0));
        self.world.set_starter(move |now, node, actor| {
            let server = match node {
                NodeId::Shard(id) => id.server.0,
                NodeId::Spare(number) => number >> SPARES_OF_A_SERVER,
                other => unreachable!("{other} starts no data cores"),
            };
            started.set(started.get() + 1);
            let id = NodeId::Spare(server << SPARES_OF_A_SERVER | started.get());
            let process = actor.as_replica().expect("a data core starts others").process();
            let address = builder.address(id);
            let config = ShardConfig {
                process,
                server: None,
                core: builder.scenario.cores + started.get(),
                addresses: address.clone().into(),
                ..builder.shard_config(ShardId { server: ServerId(server), core: 0 }, 0)
            };
            let role = builder.replica_or_broken(Replica::new(now, config, builder.registry.clone()));
            Newcomer { id, address, role }
        });
    }

    /// At `at` another process goes on in a shard's place, from the shard's image.
    pub fn replace_by_image(&mut self, id: ShardId, at: Time) {
        let builder = self.builder.clone();
        self.world.replace(NodeId::Shard(id), at, move |now, actor| builder.reborn(now, id, actor));
    }

    /// The scenario.
    pub fn scenario(&self) -> &Scenario {
        &self.builder.scenario
    }

    /// Another worker, with the next rank, is started at `at`.
    pub fn join_later(&mut self, at: Time) {
        let node = NodeId::Worker(WorkerId(self.scenario().workers + self.late));
        self.late += 1;
        self.lives += 1;
        let (builder, life) = (self.builder.clone(), self.lives);
        let (host, handling) = builder.place(node);
        let address = builder.address(node);
        let process = (at, move |now| builder.actor(now, node, life));
        self.world.add_later(node, &address, host, handling, process);
    }

    /// The workers, by rank; those that come late are the last ones.
    pub fn worker_ids(&self) -> impl Iterator<Item = WorkerId> + use<> {
        (0..self.scenario().workers + self.late).map(WorkerId)
    }

    /// The readers, in the order in which the scenario counts them. The coordinator may call them otherwise.
    pub fn reader_ids(&self) -> impl Iterator<Item = WorkerId> + use<> {
        (0..self.scenario().readers).map(WorkerId::reader)
    }

    /// The data cores, by server and core.
    pub fn shard_ids(&self) -> impl Iterator<Item = ShardId> + use<> {
        let cores = self.scenario().cores;
        (0..self.scenario().servers)
            .flat_map(move |server| (0..cores).map(move |core| ShardId { server: ServerId(server), core }))
    }

    /// The cores of all aggregators.
    pub fn aggregator_ids(&self) -> impl Iterator<Item = AggregatorId> + use<> {
        let cores = self.scenario().all_aggregators() * self.scenario().aggregator_cores;
        (0..cores).map(AggregatorId)
    }

    /// A core of an aggregator.
    pub fn aggregator(&self, id: AggregatorId) -> &Aggregator {
        match self.world.role(NodeId::Aggregator(id)) {
            Some(Actor::Aggregator(aggregator)) => aggregator,
            _ => panic!("every aggregator was added"),
        }
    }

    /// A worker with its application.
    pub fn player(&self, worker: WorkerId) -> &Player {
        let actor = self.world.role(NodeId::Worker(worker)).expect("every worker was added");
        actor.as_player().expect("a worker's node holds a player")
    }

    /// A shard, where it is served; where its server has died and nobody has taken over yet, its copy.
    pub fn shard(&self, shard: ShardId) -> &Shard {
        let is_alive = |node: NodeId| self.world.ended(node) != Some(&Ended::Crashed);
        let alive = || self.world.roles().filter(|(node, _)| is_alive(*node)).map(|(_, actor)| actor);
        let is_meant = |found: &&Shard| found.id() == Some(shard);
        // A process that the shard was taken from may not have heard of it.
        let served = alive().filter_map(Actor::as_shard).filter(is_meant).max_by_key(|served| served.epoch());
        let copy = || {
            let copies = alive().filter_map(Actor::as_replica);
            let copies = copies.filter_map(|replica| replica.copy().filter(is_meant).zip(replica.position()));
            copies.max_by_key(|(_, (_, number))| *number).map(|(copy, _)| copy)
        };
        let dead = || self.world.role(NodeId::Shard(shard)).and_then(Actor::as_shard);
        served.or_else(copy).or_else(dead).expect("every shard is somewhere")
    }

    /// Which node is on which host.
    pub fn hosts(&self) -> &Hosts {
        &self.builder.hosts
    }

    /// Where a node is in the network.
    pub fn position(&self, node: NodeId) -> Position {
        self.hosts().position(node)
    }

    /// A table's parameters, put together from all shards.
    pub fn parameters(&self, table: TableId) -> Vec<f32> {
        let elements = self.scenario().table_specs()[table.0 as usize].elements();
        let mut values = vec![f32::NAN; elements as usize];
        for id in self.shard_ids() {
            self.shard(id).for_each_chunk(table, |start, chunk| {
                values[start as usize..start as usize + chunk.len()].copy_from_slice(chunk);
            });
        }
        values
    }

    /// Runs until the coordinator has ended the job and the shards have heard of it, or until `until`. Says whether the
    /// coordinator has ended the job: one that has crashed and is going to be started anew has not.
    pub fn run<O: Observer<Actor>>(&mut self, until: Time, observer: &mut O) -> Result<bool, Violation> {
        let aggregators = self.aggregator_ids().map(NodeId::Aggregator);
        let shards: Vec<NodeId> = self.shard_ids().map(NodeId::Shard).chain(aggregators).collect();
        let is_over = |world: &World<Actor>| {
            world.ended(NodeId::Coordinator).is_some() && !world.is_to_return(NodeId::Coordinator)
        };
        self.world.run(until, observer, |world| {
            let ended = |node: &NodeId| world.ended(*node).is_some();
            // Cores that have come to serve a shard have inputs to apply until they hear of the end.
            let serves_on = |(node, actor): (NodeId, &Actor)| actor.as_shard().is_some() && !ended(&node);
            is_over(world) && shards.iter().all(ended) && !world.roles().any(serves_on)
        })?;
        Ok(is_over(&self.world))
    }

    fn add_coordinator(&mut self) {
        let Builder { scenario, .. } = &*self.builder;
        let host = self.builder.hosts.host(NodeId::Coordinator);
        let actor = self.builder.coordinator(Time::ZERO, None);
        self.world.add(NodeId::Coordinator, COORDINATOR, host, Duration::ZERO, actor);
        let orders = scenario.orders();
        if !orders.is_empty() {
            let operator = Box::new(Operator::new(JOB, COORDINATOR, orders));
            self.world.add(OPERATOR, "operator", host, Duration::ZERO, Actor::Operator(operator));
        }
    }

    fn add_node(&mut self, node: NodeId) {
        let builder = &self.builder;
        let (host, handling) = builder.place(node);
        let actor = builder.actor(Time::ZERO, node, 0);
        self.world.add(node, &builder.address(node), host, handling, actor);
        if builder.play.several_addresses {
            self.world.add_address(node, &builder.other_address(node));
        }
    }

    /// A reader comes, at once or while the job runs, and goes or stays.
    fn add_reader(&mut self, id: WorkerId) {
        let node = NodeId::Worker(id);
        let (builder, visit) = (self.builder.clone(), self.builder.visit(id));
        let (host, handling) = builder.place(node);
        let address = builder.address(node);
        let process = (visit.comes, move |now| builder.reader(now, id, visit));
        self.world.add_later(node, &address, host, handling, process);
        if let Some(at) = visit.dies {
            self.world.crash(node, at);
        }
    }

    fn inject(&mut self) {
        let builder = self.builder.clone();
        let shards = self.shard_ids().map(NodeId::Shard);
        let workers = self.worker_ids().map(NodeId::Worker);
        for node in shards.chain(workers).chain([NodeId::Coordinator]).collect::<Vec<_>>() {
            for (at, length) in builder.faults.pauses(node) {
                self.world.pause(node, at, length);
            }
            for (at, restart) in builder.faults.crashes(node) {
                match restart {
                    Some(after) => self.crash_and_restart(node, at, after),
                    None => self.world.crash(node, at),
                }
            }
            self.world.slow_down(node, builder.faults.slowdown(node));
        }
        let injected = Injected::new(&builder.faults, builder.scenario.seed);
        if !injected.is_empty() {
            self.world.rules().add(injected);
        }
    }
}

/// Whether the processes that serve a shard and keep its copy, as the plan says, both live, and the former has heard of the copy: a
/// coordinator that dies before it has stored that there is one does not know of it afterwards.
fn is_copied(world: &World<Actor>, served: &ServedShard) -> bool {
    let lives = |process: ProcessId, is_it: &dyn Fn(&Replica) -> bool| {
        let is_meant =
            |actor: &Actor| actor.as_replica().is_some_and(|core| core.process() == process && is_it(core));
        world.roles().any(|(node, actor)| world.ended(node).is_none() && is_meant(actor))
    };
    let knows = |plan: &Plan| {
        plan.shards.iter().any(|known| known.shard == served.shard && known.copy == served.copy)
    };
    let serves = |core: &Replica| {
        core.shard().is_some_and(|shard| shard.id() == Some(served.shard) && shard.plan().is_some_and(knows))
    };
    let keeps = |core: &Replica| core.copy().and_then(Shard::id) == Some(served.shard);
    lives(served.process, &serves) && served.copy.is_some_and(|copy| lives(copy.process, &keeps))
}

impl Builder {
    /// The host of a node, and the time that each frame occupies it.
    fn place(&self, node: NodeId) -> (HostId, Duration) {
        let busy = Duration::from_nanos((self.scenario.network.handling_us * 1e3) as u64);
        let handling = match node {
            NodeId::Shard(_) | NodeId::Aggregator(_) => busy,
            _ => Duration::ZERO,
        };
        (self.hosts.host(node), handling)
    }

    /// A process, the `life`-th of all that were started anew, or the first of its node when that is 0.
    fn actor(&self, now: Time, node: NodeId, life: u64) -> Actor {
        match node {
            NodeId::Shard(id) => self.shard(now, id, life),
            NodeId::Aggregator(id) => self.aggregator(now, id, life),
            NodeId::Worker(id) => self.worker(now, id, life),
            other => unreachable!("{other} is started once"),
        }
    }

    /// The coordinator, with what is on its disk.
    fn coordinator(&self, now: Time, disk: Option<&[u8]>) -> Actor {
        let Builder { config, registry, scenario, .. } = self;
        let fresh = || Coordinator::new(config.clone(), registry.clone(), scenario.seed);
        let grace = limits::COORDINATOR_GRACE;
        let is_durable = self.faults.crashes(NodeId::Coordinator).next().is_some();
        let coordinator = match disk {
            Some(state) => Coordinator::restore(now, config.clone(), registry.clone(), grace, state)
                .expect("a coordinator reads what it stored"),
            None if is_durable => fresh().remembering(grace),
            None => fresh(),
        };
        Actor::Coordinator(Box::new(coordinator))
    }

    /// Where a node is reached too, if it has several addresses.
    fn other_address(&self, node: NodeId) -> String {
        format!("{} by another way", self.address(node))
    }

    /// Where a node is reached, with the name of its host, as addresses of sockets have.
    fn address(&self, node: NodeId) -> String {
        let host = Hosts::name(self.hosts.host(node));
        match node {
            NodeId::Shard(id) => format!("{host}:shard {} {}", id.server.0, id.core),
            other => format!("{host}:{other}"),
        }
    }

    fn addresses(&self, node: NodeId) -> Addresses {
        match self.play.several_addresses {
            // A local one comes first, and cannot be used here.
            true => {
                [format!("{LOCAL}{node}"), self.address(node), self.other_address(node)].into_iter().collect()
            }
            false => self.address(node).into(),
        }
    }

    fn shard_config(&self, id: ShardId, life: u64) -> ShardConfig {
        ShardConfig {
            job: JOB.into(),
            process: ProcessId(life << 32 | u64::from(id.server.0)),
            server: Some(id.server),
            core: id.core,
            cores: self.scenario.cores,
            addresses: self.addresses(NodeId::Shard(id)),
            coordinator: COORDINATOR.into(),
            digest_every: 1,
        }
    }

    /// A shard from the image of the one before, as it travels from process to process.
    fn reborn(&self, now: Time, id: ShardId, before: &Actor) -> Actor {
        let bytes = match before {
            Actor::Broken(broken) => broken.image(),
            other => other.as_shard().expect("a shard's node holds a shard").image().encode(),
        };
        let image = ShardImage::decode(&bytes).expect("an image can be read");
        let config = self.shard_config(id, 0);
        let shard = Shard::from_image(now, config.clone(), self.registry.clone(), image);
        let shard = shard.expect("an image is that of a shard");
        assert!(shard.image().encode() == bytes, "the successor of {id} has another image");
        self.broken_or_not(now, shard, config)
    }

    fn shard(&self, now: Time, id: ShardId, life: u64) -> Actor {
        let config = self.shard_config(id, life);
        self.broken_or_not(now, Shard::new(now, config.clone(), self.registry.clone()), config)
    }

    fn broken_or_not(&self, now: Time, shard: Shard, config: ShardConfig) -> Actor {
        match self.play.canary.filter(|canary| canary.is_of_shards()) {
            None => self.replica_or_broken(Replica::serving(now, shard, config, self.registry.clone())),
            Some(canary) => Actor::Broken(Box::new(Broken::new(shard, ShardBug::new(canary)))),
        }
    }

    fn replica_or_broken(&self, replica: Replica) -> Actor {
        match self.play.canary.filter(|canary| canary.is_of_copies()) {
            None => Actor::Shard(Box::new(replica)),
            Some(canary) => Actor::BrokenReplica(Box::new(Broken::new(replica, CopyBug::new(canary)))),
        }
    }

    /// The first reader is there from the beginning, and stays; the others come while the job runs. Of four that follow each other the
    /// second leaves again, and the fourth is killed.
    fn visit(&self, id: WorkerId) -> Visit {
        let Scenario { seed, iterations, compute, .. } = &self.scenario;
        let number = id.reader_number().unwrap_or(0);
        let mut dice = Prng::fork(*seed, READERS_FORK + u64::from(number));
        let lasts = *iterations as f64 * compute.step_ms * 1e-3;
        let comes = if number == 0 { 0.0 } else { lasts * dice.uniform() };
        let ends = Time::from_secs_f64(comes + lasts * dice.uniform());
        Visit {
            comes: Time::from_secs_f64(comes),
            leaves: (number % 4 == 1).then_some(ends),
            dies: (number % 4 == 3).then_some(ends),
        }
    }

    fn reader(&self, now: Time, id: WorkerId, visit: Visit) -> Actor {
        let config = WorkerConfig {
            job: JOB.into(),
            rank: None,
            coordinator: COORDINATOR.into(),
            aggregator: None,
            number: u64::from(id.0),
            access: Access::ReadOnly,
        };
        let worker = Worker::new(now, config, self.registry.clone());
        Actor::Reader(Box::new(Spectator::new(now, worker, visit.leaves)))
    }

    fn aggregator(&self, now: Time, id: AggregatorId, life: u64) -> Actor {
        let scenario = &self.scenario;
        let addresses = |id| -> Addresses { self.address(NodeId::Aggregator(id)).into() };
        let above = scenario.rack_of(AggregatorId(id.0 / scenario.aggregator_cores));
        let config = AggregatorConfig {
            job: JOB.into(),
            process: ProcessId(life << 32 | u64::from(id.0)),
            // A number belongs to one process: the next one has another, which no first one has.
            id: Some(AggregatorId(
                id.0 + life as u32 * scenario.all_aggregators() * scenario.aggregator_cores,
            )),
            core: id.0 % self.scenario.aggregator_cores,
            cores: self.scenario.aggregator_cores,
            addresses: self.address(NodeId::Aggregator(id)).into(),
            coordinator: COORDINATOR.into(),
            above: above.map(|id| scenario.cores_of(id).map(addresses).collect()),
            hold: Duration::from_secs_f64(self.scenario.hold_ms * 1e-3),
        };
        Actor::Aggregator(Box::new(Aggregator::new(now, config, self.registry.clone())))
    }

    fn worker(&self, now: Time, id: WorkerId, life: u64) -> Actor {
        let Builder { scenario, play, .. } = self;
        let addresses = |id| -> Addresses { self.address(NodeId::Aggregator(id)).into() };
        let aggregator = scenario.aggregator_of(id);
        let config = WorkerConfig {
            job: JOB.into(),
            rank: Some(id),
            coordinator: COORDINATOR.into(),
            aggregator: aggregator.map(|id| scenario.cores_of(id).map(addresses).collect()),
            number: life << 32 | u64::from(id.0),
            access: Access::Full,
        };
        let program = Program {
            worker: id,
            life,
            tables: scenario.table_specs(),
            gradients: play.gradients,
            studies: self
                .lesson
                .as_ref()
                .map(|(lesson, crew)| Studies::new(lesson.clone(), crew.clone(), id)),
            iterations: scenario.iterations,
            lingers: if scenario.readers > 0 { LINGERS } else { Duration::ZERO },
            seed: scenario.seed,
            compute: ComputeClock::new(scenario.compute.clone(), self.faults.clone(), scenario.seed, id),
            // Whoever checks the job has read it.
            local: scenario.policy.local(&self.registry).ok().flatten(),
            layers: (scenario.compute.send == SendMode::Layerwise).then(|| scenario.layer_times()),
            judge: scenario.judge.clone(),
            slabs: play.slabs,
            nan_p: play.nan_p,
            watches_memory: play.watches_memory,
            canary: play.canary,
        };
        let broken = play.canary.filter(|canary| !canary.is_of_shards());
        let registry = broken.map(|canary| Arc::new(canary.workers_registry()));
        let registry = registry.unwrap_or_else(|| self.registry.clone());
        let player = Player::new(now, Worker::new(now, config, registry), program);
        Actor::Worker(Box::new(player))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::NetworkConfig;
    use crate::rule::FrameView;
    use crate::world::{Ended, Unobserved};
    use paramill_core::wire::Kind;
    use std::collections::BTreeSet;

    fn finished(scenario: &Scenario) -> Cluster {
        let mut cluster = Cluster::new(scenario).unwrap();
        let over = cluster.run(Time::from_secs_f64(1e3), &mut Unobserved).unwrap();
        let doing: Vec<String> =
            cluster.worker_ids().map(|id| cluster.player(id).doing(cluster.world.now())).collect();
        assert!(over, "{doing:?}\n{}", cluster.world.log().collect::<Vec<_>>().join("\n"));
        for id in cluster.worker_ids() {
            assert!(
                cluster.player(id).is_finished(),
                "{id}: {}",
                cluster.player(id).doing(cluster.world.now())
            );
        }
        cluster
    }

    #[test]
    fn a_worker_that_dies_while_the_job_starts_comes_back() {
        for crash_ms in (1..80).step_by(4) {
            let network = NetworkConfig { latency_us: 5e3, ..NetworkConfig::default() };
            let faults = vec![format!("worker=1:crash@{crash_ms}ms,restart=1ms"), "server=0:slow=50x".into()];
            finished(&Scenario { iterations: 8, faults, network, ..Scenario::new(3, 2, 100) });
        }
    }

    /// The coordinator dies around the end of the job, also when all shards have ended and it has yet to hear that they did.
    #[test]
    fn a_job_is_not_over_while_its_coordinator_is_to_be_started_anew() {
        let network = NetworkConfig { latency_us: 5e3, ..NetworkConfig::default() };
        let base = Scenario { iterations: 3, network, ..Scenario::new(2, 1, 100) };
        let end_ms = finished(&base).world.now().as_secs_f64() * 1e3;
        for step in -20..20 {
            let crash_ms = end_ms + f64::from(step);
            let faults = vec![format!("coordinator:crash@{crash_ms}ms,restart=50ms")];
            let cluster = finished(&Scenario { faults, ..base.clone() });
            let ended = cluster.world.ended(NodeId::Coordinator);
            assert_eq!(ended, Some(&Ended::Stopped { error: None }), "{step} ms from the end");
        }
    }

    #[test]
    fn workers_that_are_started_late_or_anew_take_part_under_every_model() {
        let models =
            ["bsp", "asp", "ssp:s=2", "drop:n=2", "psp:c=2,b=0.5", "quorum:q=0.5", "bsp:overlap=false"];
        for sync in models {
            for aggregators in [0, 2] {
                let faults = vec!["worker=1:crash@100ms,restart=20ms".into()];
                let base = Scenario { iterations: 40, aggregators, faults, ..Scenario::new(3, 2, 100) };
                let mut cluster = Cluster::new(&base.with(Axis::Sync, sync)).unwrap();
                cluster.join_later(Time::from_secs_f64(0.05));
                cluster.join_later(Time::from_secs_f64(0.11));
                let over = cluster.run(Time::from_secs_f64(1e3), &mut Unobserved).unwrap();
                let log = || cluster.world.log().collect::<Vec<_>>().join("\n");
                assert!(over, "{sync}: {}", log());
                for id in cluster.worker_ids() {
                    let player = cluster.player(id);
                    let doing = player.doing(cluster.world.now());
                    assert!(player.is_finished(), "{sync}: {id} {doing}\n{}", log());
                    let began_later = player.first_clock().is_some_and(|clock| clock > 0);
                    assert_eq!(began_later, ![0, 2].contains(&id.0), "{sync}: {id}\n{}", log());
                }
                let counts = cluster.world.counts();
                assert_eq!((counts.restarts, counts.late), (1, 2), "{sync}");
            }
        }
    }

    #[test]
    fn every_model_trains_a_dense_and_a_sparse_table() {
        for sync in [
            "bsp",
            "asp",
            "ssp:s=2",
            "dsps:min=1,max=4",
            "drop:n=2",
            "pssp:s=1,c=0.5",
            "psp:c=2,b=0.5",
            "quorum:q=0.5",
            "quorum:q=0.5,late=weigh",
            "quorum:q=0.5,overlap=false",
            "when:pull=gap < 0,push=count >= 2,step=round",
        ] {
            let text = format!(
                "sync = '{sync}'\nworkers = 3\nservers = 2\ncores = 2\niterations = 30\nchunk = '32B'\n\
                 [[tables]]\nname = 'w'\nshape = [100]\n[[tables]]\nname = 'rows'\nshape = [40, 3]\nrows = true\n"
            );
            let cluster = finished(&Scenario::parse(&text).unwrap());
            for (table, elements) in [(TableId(0), 100), (TableId(1), 120)] {
                let distance = |values: &mut dyn Iterator<Item = f32>| {
                    let target = |element| crate::gradient::target(0, table, element);
                    (0..).zip(values).map(|(e, value)| (value - target(e)).abs()).sum::<f32>()
                };
                let before = distance(&mut (0..elements).map(|e| crate::gradient::initial(0, table, e)));
                let after = distance(&mut cluster.parameters(table).into_iter());
                assert!(after < before * 0.7, "{sync}: {before} before, {after} after");
            }
        }
    }

    /// Which nodes exchange gradients and parameters, and for which shards.
    #[derive(Default)]
    struct Pairs(BTreeSet<(NodeId, NodeId, Option<ShardId>)>);

    impl Pairs {
        fn note(&mut self, frame: &FrameView<'_>) -> Result<(), String> {
            if matches!(frame.header.kind, Kind::Push | Kind::Params) {
                self.0.insert((frame.from, frame.to, frame.shard));
            }
            Ok(())
        }
    }

    impl Observer<Actor> for Pairs {
        fn on_sent(&mut self, frame: &FrameView<'_>, _sender: &Actor) -> Result<(), String> {
            self.note(frame)
        }

        fn on_delivered(&mut self, frame: &FrameView<'_>, _receiver: &Actor) -> Result<(), String> {
            self.note(frame)
        }
    }

    #[test]
    fn a_worker_and_its_aggregator_have_a_connection_for_each_shard() {
        let base = Scenario::new(1, 2, 100).with(Axis::Placement, "uniform");
        let scenario = Scenario { aggregators: 1, iterations: 2, ..base };
        let mut cluster = Cluster::new(&scenario).unwrap();
        let mut pairs = Pairs::default();
        assert!(cluster.run(Time::from_secs_f64(100.0), &mut pairs).unwrap());
        let (worker, aggregator) = (NodeId::Worker(WorkerId(0)), NodeId::Aggregator(AggregatorId(0)));
        let expected = cluster.shard_ids().flat_map(|id| {
            let (shard, about) = (NodeId::Shard(id), Some(id));
            let hops = [(worker, aggregator), (aggregator, shard), (shard, aggregator), (aggregator, worker)];
            hops.map(|(from, to)| (from, to, about))
        });
        assert_eq!(pairs.0, expected.collect());
    }

    /// The rule that holds an answer back ends between two frames of the answer. Frames that were sent afterwards used to
    /// overtake the first ones, and the worker failed: "expected parameters that fit shape".
    #[test]
    fn healing_in_the_middle_of_an_answer_leaves_its_frames_in_order() {
        // Slow links, so that an aggregator passes the frames of an answer on one by one.
        let network = NetworkConfig { gbit_per_s: 0.001, jitter_us: 0.0, ..Default::default() };
        let faults = vec!["pull:delay=30ms".into()];
        let scenario = Scenario {
            faults,
            network,
            aggregators: 1,
            iterations: 2,
            ..Scenario::new(2, 1, 100).with(Axis::Chunk, "32B")
        };
        for heal_ms in 0..150 {
            let mut cluster = Cluster::new(&scenario).unwrap();
            cluster.run(Time::from_secs_f64(f64::from(heal_ms) * 1e-3), &mut Unobserved).unwrap();
            cluster.world.rules().clear();
            cluster.run(Time::from_secs_f64(100.0), &mut Unobserved).unwrap();
            for id in cluster.worker_ids() {
                let player = cluster.player(id);
                assert!(
                    player.is_finished(),
                    "healed at {heal_ms} ms: {id} {}",
                    player.doing(cluster.world.now())
                );
            }
        }
    }

    #[test]
    fn a_job_whose_first_worker_dies_with_the_initial_values_ends_and_says_why() {
        let network = NetworkConfig { latency_us: 1e4, jitter_us: 0.0, ..Default::default() };
        let faults = vec!["worker=0:crash@75ms".into()];
        let scenario = Scenario { network, faults, ..Scenario::new(3, 2, 20) };
        let mut cluster = Cluster::new(&scenario).unwrap();
        assert!(cluster.run(Time::from_secs_f64(10.0), &mut Unobserved).unwrap());
        let Some(Ended::Stopped { error: Some(error) }) = cluster.world.ended(NodeId::Coordinator) else {
            panic!("{:?}", cluster.world.ended(NodeId::Coordinator));
        };
        assert!(error.contains("worker 0 was gone before the initial values of table `w`"), "{error}");
    }

    /// Tags are whole numbers: their sums are exact in any order.
    fn tagged(aggregators: u32, sync: &str) -> Cluster {
        tagged_with(aggregators, sync, "")
    }

    fn tagged_with(aggregators: u32, sync: &str, more: &str) -> Cluster {
        let text = format!(
            "{more}sync = '{sync}'\nworkers = 6\nservers = 2\ncores = 2\niterations = 20\nchunk = '32B'\norder = 'arrival'\n\
             reduce = 'sum'\noptimizer = 'sgd:lr=1'\naggregators = {aggregators}\n\
             [[tables]]\nname = 'w'\nshape = [100]\n[[tables]]\nname = 'rows'\nshape = [40, 3]\nrows = true\n"
        );
        let scenario = Scenario::parse(&text).unwrap();
        let mut cluster =
            Cluster::with(&scenario, Play { gradients: Gradients::Tagged { workers: 6 }, ..Play::default() })
                .unwrap();
        assert!(cluster.run(Time::from_secs_f64(1e3), &mut Unobserved).unwrap());
        cluster
    }

    #[test]
    fn a_job_ends_with_the_same_bits_with_and_without_aggregators() {
        for sync in ["bsp", "ssp:s=2", "asp"] {
            let direct = tagged(0, sync);
            for aggregators in [1, 2, 3] {
                let cluster = tagged(aggregators, sync);
                for table in [TableId(0), TableId(1)] {
                    let (with, without) = (cluster.parameters(table), direct.parameters(table));
                    assert_eq!(with, without, "{sync} with {aggregators} aggregators");
                }
                for id in cluster.shard_ids() {
                    let report = cluster.shard(id).report(cluster.world.now()).unwrap();
                    assert!(report.tables.iter().all(|table| table.stats.pushes == 6 * 20), "{report:?}");
                }
            }
        }
    }

    #[test]
    fn the_cores_of_an_aggregator_share_the_shards() {
        let direct = tagged(0, "bsp");
        for cores in [2, 3, 5] {
            let more = format!("faults = ['link:reset,p=0.001']\naggregator_cores = {cores}\n");
            let cluster = tagged_with(2, "bsp", &more);
            for table in [TableId(0), TableId(1)] {
                assert_eq!(cluster.parameters(table), direct.parameters(table), "{cores} cores");
            }
            for id in cluster.aggregator_ids() {
                let report = cluster.aggregator(id).report();
                // Four shards: a fifth core has nothing to do.
                let is_idle = id.0 % cores == 4;
                assert_eq!((report.groups == 0, report.bytes_to_workers == 0), (is_idle, is_idle), "{id}");
            }
        }
    }

    #[test]
    fn sums_of_hosts_are_added_up_by_racks() {
        for sync in ["bsp", "asp"] {
            let direct = tagged(0, sync);
            for (aggregators, more) in
                [(2, "rack_aggregators = 1\n"), (3, "rack_aggregators = 2\naggregator_cores = 2\n")]
            {
                let more = format!("faults = ['link:reset,p=0.001']\n{more}");
                let cluster = tagged_with(aggregators, sync, &more);
                for table in [TableId(0), TableId(1)] {
                    assert_eq!(cluster.parameters(table), direct.parameters(table), "{sync}, {more}");
                }
                for id in cluster.shard_ids() {
                    let report = cluster.shard(id).report(cluster.world.now()).unwrap();
                    assert!(report.tables.iter().all(|table| table.stats.pushes == 6 * 20), "{report:?}");
                }
            }
        }
    }

    #[test]
    fn codecs_that_lose_nothing_change_no_bit_through_aggregators_whatever_breaks() {
        let direct = tagged(0, "bsp");
        let faults = "faults = ['link:reset,p=0.002', 'worker=1:slow=3x']\n";
        for codecs in
            ["codec = 'bitmap+lz4'\n", "codec = 'lossless+zstd'\nanswer_codec = 'lossless+snappy'\n"]
        {
            for more in ["", faults] {
                let cluster = tagged_with(2, "bsp", &format!("{codecs}{more}"));
                for table in [TableId(0), TableId(1)] {
                    assert_eq!(cluster.parameters(table), direct.parameters(table), "{codecs}{more}");
                }
            }
        }
    }

    /// Parameters come within reach of where they would be, and fewer bytes do it; though connections break and a worker
    /// dies.
    #[test]
    fn filtered_sums_go_up_and_differences_come_down() {
        let run = |more: &str| {
            let text = format!(
                "workers = 6\norder = 'arrival'\naggregators = 2\niterations = 30\n{more}\
                 [[tables]]\nname = 'w'\nshape = [20000]\n"
            );
            let mut cluster = Cluster::new(&Scenario::parse(&text).unwrap()).unwrap();
            assert!(cluster.run(Time::from_secs_f64(1e3), &mut Unobserved).unwrap());
            let survivors = cluster.worker_ids().filter(|id| id.0 != 2);
            assert!(survivors.into_iter().all(|id| cluster.player(id).is_finished()));
            let reports = cluster.aggregator_ids().map(|id| cluster.aggregator(id).report());
            reports.fold((0, 0), |(up, down), r| (up + r.bytes_to_servers, down + r.bytes_from_servers))
        };
        // Once for everybody, or for each of them.
        for broadcast in ["star", "none"] {
            let plain = run(&format!("broadcast = '{broadcast}'\n"));
            let codecs =
                format!("broadcast = '{broadcast}'\ncodec = 'topk:0.05'\nanswer_codec = 'topk:0.05'\n");
            let (up, down) = run(&codecs);
            assert!(up * 8 < plain.0 && down * 6 < plain.1, "{up} and {down} of {plain:?}");
            run(&format!("{codecs}faults = ['link:reset,p=0.002', 'worker=2:crash@40ms']\n"));
        }
    }

    #[test]
    fn under_bsp_servers_see_one_gradient_and_one_receiver_per_aggregator() {
        let pushed = |cluster: &Cluster| {
            let now = cluster.world.now();
            let reports = cluster.shard_ids().map(|id| cluster.shard(id).report(now).unwrap());
            reports.fold((0, 0), |(pushed, pulled), r| (pushed + r.bytes_pushed, pulled + r.bytes_pulled))
        };
        let text =
            "workers = 6\norder = 'arrival'\naggregators = 2\n[[tables]]\nname = 'w'\nshape = [1000]\n";
        let scenario = Scenario::parse(text).unwrap().with(Axis::Broadcast, "star");
        let direct = finished(&Scenario { aggregators: 0, ..scenario.clone() });
        let cluster = finished(&scenario);
        assert_eq!(pushed(&cluster).0 * 3, pushed(&direct).0);
        assert_eq!(pushed(&cluster).1 * 3, pushed(&direct).1);
        let reports = cluster.aggregator_ids().map(|id| cluster.aggregator(id).report());
        assert!(reports.into_iter().all(|report| report.groups * 3 == report.gradients));
    }

    /// Tables that are broadcast come to everybody through whatever is between, and all end with the same bits.
    #[test]
    fn versions_come_through_aggregators_of_hosts_and_racks_whatever_breaks() {
        for (sync, tree) in [("bsp", "star"), ("ssp:s=2", "chain"), ("asp", "rotated:degree=2")] {
            let direct = tagged(0, sync);
            for codec in ["none", "lossless+lz4", "topk:0.3"] {
                for shape in ["", "aggregator_cores = 2\n", "rack_aggregators = 1\n"] {
                    let faults = "faults = ['link:reset,p=0.002', 'worker=1:slow=3x']\n";
                    let more = format!("broadcast = '{tree}'\nanswer_codec = '{codec}'\n{shape}{faults}");
                    let cluster = tagged_with(2, sync, &more);
                    for table in [TableId(0), TableId(1)] {
                        assert_eq!(cluster.parameters(table), direct.parameters(table), "{sync}, {more}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_link_that_takes_long_for_a_round_does_not_cut_it_in_two() {
        // Parameters come down once: answers to each would leave the workers behind each other.
        let text = "workers = 4\norder = 'arrival'\naggregators = 1\niterations = 3\nbroadcast = 'star'\n\
                    [[tables]]\nname = 'w'\nshape = [100000]\n[network]\ngbit_per_s = 0.001\n";
        // Four times 400 kB at 1 Mbit/s take 13 s.
        let cluster = finished(&Scenario::parse(text).unwrap());
        let report = cluster.aggregator(AggregatorId(0)).report();
        assert_eq!((report.groups, report.gradients), (3, 4 * 3), "{report:?}");
    }
}
