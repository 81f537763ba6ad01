//! A job in a world whose network takes no time: roles are called by the test, as applications do, and everything that
//! follows happens at once.

use super::processes::{ADDRESS, JOB, aggregator, aggregator_core, shard, worker, worker_through};
use super::tally::Tally;
use paramill_core::aggregator::Aggregator;
use paramill_core::coordinator::{Coordinator, JobConfig};
use paramill_core::policy::PolicyOverride;
use paramill_core::registry::Registry;
use paramill_core::replica::Replica;
use paramill_core::server::Shard;
use paramill_core::table::TableSpec;
use paramill_core::types::{AggregatorId, NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use paramill_core::wire::Control;
use paramill_core::worker::{Ticket, Worker, WorkerError};
use paramill_sim::actor::Actor;
use paramill_sim::network::{HostId, Network, NetworkConfig};
use paramill_sim::operator::Operator;
use paramill_sim::rules::{Cut, Partition};
use paramill_sim::world::{Ended, World};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const COORDINATOR: NodeId = NodeId::Coordinator;
/// Longer than any test.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// The nodes of a job. Shards, aggregators and workers are named by the order in which they were added, whatever the
/// coordinator calls them.
pub(crate) struct Bench {
    pub(crate) world: World<Actor>,
    pub(crate) tally: Tally,
    cores: u32,
    shards: usize,
    aggregators: usize,
    workers: usize,
    commands: u32,
}

impl Bench {
    pub(crate) fn new(config: JobConfig, cores: u32) -> Bench {
        Bench::with_aggregators(config, cores, &[])
    }

    /// `through` says through which aggregator each worker goes; workers that are not named go to the servers themselves.
    pub(crate) fn with_aggregators(config: JobConfig, cores: u32, through: &[usize]) -> Bench {
        let workers = config.workers as usize;
        let mut bench =
            Bench::without_workers(config, cores, through.iter().max().map_or(0, |last| last + 1));
        for rank in 0..workers {
            bench.add(worker(Time::ZERO, rank, None, through.get(rank).copied()));
        }
        bench
    }

    /// All workers go through one aggregator with so many cores: its core `n` is the aggregator `n` here.
    pub(crate) fn with_aggregator_cores(config: JobConfig, cores: u32, of_aggregator: u32) -> Bench {
        let workers = config.workers as usize;
        let mut bench = Bench::without_workers(config, cores, 0);
        (0..of_aggregator).for_each(|core| bench.add_aggregator_core(core, of_aggregator));
        let addresses: Vec<String> = (0..of_aggregator).map(|core| format!("aggregator:{core}")).collect();
        for rank in 0..workers {
            bench.add(worker_through(Time::ZERO, rank, None, Some(&addresses.join("+"))));
        }
        bench
    }

    /// One of the cores of an aggregator comes.
    pub(crate) fn add_aggregator_core(&mut self, core: u32, cores: u32) {
        self.add_aggregator(core, cores, None);
    }

    /// An aggregator comes that goes to the servers through others.
    pub(crate) fn add_lower(&mut self, above: &str) {
        self.add_aggregator(0, 1, Some(above));
    }

    fn add_aggregator(&mut self, core: u32, cores: u32, above: Option<&str>) {
        let index = self.aggregators;
        self.aggregators += 1;
        let actor = aggregator_core(Time::ZERO, 200 + index as u64, index, core, cores, above);
        self.add_node(self.aggregator_node(index), &format!("aggregator:{index}"), actor);
    }

    pub(crate) fn without_workers(config: JobConfig, cores: u32, aggregators: usize) -> Bench {
        let registry = Arc::new(Registry::builtin());
        config.check(&registry).expect("a valid job");
        let network =
            NetworkConfig { latency_us: 0.0, jitter_us: 0.0, gbit_per_s: 0.0, ..NetworkConfig::default() };
        let shards = config.servers * cores;
        let mut bench = Bench {
            world: World::new(Network::star(network), 1),
            tally: Tally::default(),
            cores,
            shards: shards as usize,
            aggregators,
            workers: 0,
            commands: 0,
        };
        let coordinator = Coordinator::new(config, registry, 1);
        bench.add_node(COORDINATOR, ADDRESS, Actor::Coordinator(Box::new(coordinator)));
        for index in 0..shards {
            let process = 100 + u64::from(index / cores);
            let node = bench.shard_node(index as usize);
            bench.add_node(node, &format!("shard:{index}"), shard(Time::ZERO, process, index, cores));
        }
        for index in 0..aggregators {
            let actor = aggregator(Time::ZERO, 200 + index as u64, index);
            let node = bench.aggregator_node(index);
            bench.add_node(node, &format!("aggregator:{index}"), actor);
        }
        bench
    }

    /// Each node has a host of its own: what goes between nodes of one host takes a moment.
    fn add_node(&mut self, node: NodeId, address: &str, actor: Actor) {
        let host = HostId(self.world.roles().count() as u32);
        self.world.add(node, address, host, Duration::ZERO, actor);
    }

    /// Another worker process comes; its place among the workers.
    pub(crate) fn add(&mut self, worker: Worker) -> usize {
        self.workers += 1;
        let node = self.worker_node(self.workers - 1);
        self.add_node(node, &node.to_string(), Actor::Bare(Box::new(worker)));
        self.workers - 1
    }

    /// Another worker process that takes any rank comes; its place among the workers.
    pub(crate) fn add_worker(&mut self) -> usize {
        let worker = worker(self.now(), self.workers, None, None);
        self.add(worker)
    }

    pub(crate) fn shard_node(&self, index: usize) -> NodeId {
        let (server, core) = (index as u32 / self.cores, index as u32 % self.cores);
        NodeId::Shard(ShardId { server: ServerId(server), core })
    }

    pub(crate) fn aggregator_node(&self, index: usize) -> NodeId {
        NodeId::Aggregator(AggregatorId(index as u32))
    }

    pub(crate) fn worker_node(&self, index: usize) -> NodeId {
        NodeId::Worker(WorkerId(index as u32))
    }

    /// The coordinator, the shards, the aggregators, the workers.
    pub(crate) fn nodes(&self) -> Vec<NodeId> {
        let shards = (0..self.shards).map(|index| self.shard_node(index));
        let aggregators = (0..self.aggregators).map(|index| self.aggregator_node(index));
        let workers = (0..self.workers).map(|index| self.worker_node(index));
        [COORDINATOR].into_iter().chain(shards).chain(aggregators).chain(workers).collect()
    }

    fn actor(&self, node: NodeId) -> &Actor {
        self.world.role(node).expect("it was added")
    }

    fn actor_mut(&mut self, node: NodeId) -> &mut Actor {
        self.world.role_mut(node).expect("it was added")
    }

    pub(crate) fn coordinator(&self) -> &Coordinator {
        let Actor::Coordinator(role) = self.actor(COORDINATOR) else { panic!("not a coordinator") };
        role
    }

    pub(crate) fn coordinator_mut(&mut self) -> &mut Coordinator {
        let Actor::Coordinator(role) = self.actor_mut(COORDINATOR) else { panic!("not a coordinator") };
        role
    }

    pub(crate) fn shard(&self, index: usize) -> &Shard {
        let Actor::Shard(role) = self.actor(self.shard_node(index)) else { panic!("not a shard") };
        role.shard().expect("it serves a shard")
    }

    pub(crate) fn replica_mut(&mut self, index: usize) -> &mut Replica {
        let Actor::Shard(role) = self.actor_mut(self.shard_node(index)) else { panic!("not a shard") };
        role
    }

    pub(crate) fn shard_mut(&mut self, index: usize) -> &mut Shard {
        self.replica_mut(index).shard_mut().expect("it serves a shard")
    }

    pub(crate) fn shards(&self) -> impl Iterator<Item = &Shard> {
        (0..self.shards).map(|index| self.shard(index))
    }

    pub(crate) fn aggregator(&self, index: usize) -> &Aggregator {
        let Actor::Aggregator(role) = self.actor(self.aggregator_node(index)) else { panic!("another role") };
        role
    }

    pub(crate) fn aggregator_mut(&mut self, index: usize) -> &mut Aggregator {
        let node = self.aggregator_node(index);
        let Actor::Aggregator(role) = self.actor_mut(node) else { panic!("not an aggregator") };
        role
    }

    pub(crate) fn aggregators(&self) -> impl Iterator<Item = &Aggregator> {
        (0..self.aggregators).map(|index| self.aggregator(index))
    }

    pub(crate) fn worker(&self, index: usize) -> &Worker {
        let Actor::Bare(role) = self.actor(self.worker_node(index)) else { panic!("not a worker") };
        role
    }

    pub(crate) fn worker_mut(&mut self, index: usize) -> &mut Worker {
        let Actor::Bare(role) = self.actor_mut(self.worker_node(index)) else { panic!("not a worker") };
        role
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = &Worker> {
        (0..self.workers).map(|index| self.worker(index))
    }

    pub(crate) fn worker_count(&self) -> usize {
        self.workers
    }

    pub(crate) fn now(&self) -> Time {
        self.world.now()
    }

    pub(crate) fn log(&self) -> Vec<&str> {
        self.world.log().collect()
    }

    /// The words of those who stopped, in the order of the nodes.
    pub(crate) fn stopped(&self) -> Vec<Option<String>> {
        let how = |node: NodeId| match self.world.ended(node) {
            Some(Ended::Stopped { error }) => Some(error.clone()),
            _ => None,
        };
        self.nodes().into_iter().filter_map(how).collect()
    }

    /// Carries out everything that can happen now.
    pub(crate) fn run(&mut self) {
        self.pass(0.0);
    }

    /// Lets `seconds` pass.
    pub(crate) fn pass(&mut self, seconds: f64) {
        let until = self.now() + Duration::from_secs_f64(seconds);
        self.world.run(until, &mut self.tally, |_| false).unwrap_or_else(|violation| panic!("{violation}"));
    }

    /// Declares the same tables on all workers and starts the job.
    pub(crate) fn start(&mut self, tables: &[(TableSpec, Vec<f32>)]) {
        let tickets = self.declare_and_start(tables);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(self.outcome(worker, ticket), Some(Ok(())), "{}", self.explain(worker, ticket));
        }
    }

    /// The same without a look at what comes of it.
    pub(crate) fn declare_and_start(&mut self, tables: &[(TableSpec, Vec<f32>)]) -> Vec<Ticket> {
        let now = self.now();
        let mut tickets = Vec::new();
        for index in 0..self.workers {
            let worker = self.worker_mut(index);
            for (spec, initial) in tables {
                worker.declare(spec.clone(), initial.clone()).expect("a valid table");
            }
            tickets.push(worker.start(now).expect("starts once"));
        }
        self.run();
        tickets
    }

    pub(crate) fn outcome(&mut self, worker: usize, ticket: Ticket) -> Option<Result<(), WorkerError>> {
        self.worker_mut(worker).outcome(ticket)
    }

    pub(crate) fn explain(&self, worker: usize, ticket: Ticket) -> String {
        self.worker(worker).explain(self.now(), ticket)
    }

    /// A table's parameters, put together from all shards.
    pub(crate) fn parameters(&self, table: TableId, elements: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; elements];
        for shard in self.shards() {
            shard.for_each_chunk(table, |start, chunk| {
                values[start as usize..start as usize + chunk.len()].copy_from_slice(chunk);
            });
        }
        values
    }

    /// The same as they were broadcast last.
    pub(crate) fn published(&self, table: TableId, elements: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; elements];
        for shard in self.shards() {
            shard.for_each_published_chunk(table, |start, _, chunk| {
                values[start as usize..start as usize + chunk.len()].copy_from_slice(chunk);
            });
        }
        values
    }

    /// Somebody changes policies, as `paramill set` does.
    pub(crate) fn set(&mut self, change: PolicyOverride) {
        let operator = Operator::new(JOB, ADDRESS, vec![(Time::ZERO, Control::Set(change))]);
        let node = NodeId::Admin(self.commands);
        self.commands += 1;
        self.add_node(node, &node.to_string(), Actor::Operator(Box::new(operator)));
        self.run();
    }

    /// Nothing that is sent is read any more, until [`Bench::thaw`].
    pub(crate) fn freeze(&mut self) {
        self.pairs().into_iter().for_each(|(from, to)| self.world.hold(from, to));
    }

    /// What was sent is read, and what follows from it happens.
    pub(crate) fn thaw(&mut self) {
        self.pairs().into_iter().for_each(|(from, to)| self.world.release(from, to));
        self.run();
    }

    fn pairs(&self) -> Vec<(NodeId, NodeId)> {
        let nodes = self.nodes();
        nodes.iter().flat_map(|&from| nodes.iter().map(move |&to| (from, to))).collect()
    }

    /// Brings up to `count` of the frames that are held from one node to another.
    pub(crate) fn deliver(&mut self, from: NodeId, to: NodeId, count: usize) {
        self.run();
        let there = self.world.unread(from, to).count();
        self.world.let_through(from, to, count.min(there));
        self.run();
    }

    /// Breaks the connections between two nodes; what is on the wire between them is lost.
    pub(crate) fn reset(&mut self, one: NodeId, other: NodeId) {
        self.world.break_connection(one, other, "reset");
    }

    /// Nobody reaches the node any more, until [`Bench::heal`].
    pub(crate) fn isolate(&mut self, node: NodeId) {
        self.world.reset_connections(node, "reset");
        let now = self.now();
        self.world.rules().add(Partition::new(vec![node], now, now + FOR_EVER));
    }

    /// Two nodes do not reach each other any more, until [`Bench::heal`].
    pub(crate) fn cut(&mut self, one: NodeId, other: NodeId) {
        self.reset(one, other);
        self.world.rules().add(Cut::new(one, other));
    }

    /// Everybody reaches everybody.
    pub(crate) fn heal(&mut self) {
        self.world.rules().clear();
    }

    /// A node stands still: it is not called, and what it is sent waits.
    pub(crate) fn stand_still(&mut self, node: NodeId, seconds: f64) {
        let now = self.now();
        self.world.pause(node, now, Duration::from_secs_f64(seconds));
        self.run();
    }
}
