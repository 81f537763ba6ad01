//! A whole job in a world: coordinator, data cores, workers with their applications, faults.

use crate::actor::Actor;
use crate::canary::{BrokenShard, Canary};
use crate::compute::ComputeClock;
use crate::gradient::Gradients;
use crate::network::HostId;
use crate::operator::Operator;
use crate::player::{Player, Program};
use crate::rules::Injected;
use crate::scenario::{Scenario, ScenarioError};
use crate::world::{Observer, Violation, World};
use paramill_core::coordinator::{Coordinator, JobConfig};
use paramill_core::fault::FaultPlan;
use paramill_core::registry::Registry;
use paramill_core::server::{Shard, ShardConfig};
use paramill_core::types::{NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use paramill_core::worker::{Worker, WorkerConfig};
use std::sync::Arc;
use std::time::Duration;

const JOB: &str = "simulated";
const COORDINATOR: &str = "coordinator";
const OPERATOR: NodeId = NodeId::Admin(0);

/// A job that runs in virtual time.
#[derive(Debug)]
pub struct Cluster {
    /// The nodes and the network between them.
    pub world: World<Actor>,
    scenario: Scenario,
}

impl Cluster {
    /// Sets up a scenario, its faults included. Step traces are read from their files.
    pub fn new(scenario: &Scenario) -> Result<Cluster, ScenarioError> {
        Cluster::with(scenario, Gradients::Quadratic, None)
    }

    /// Sets up a scenario whose workers push these gradients, and whose shards have this bug, if any.
    pub fn with(
        scenario: &Scenario,
        gradients: Gradients,
        canary: Option<Canary>,
    ) -> Result<Cluster, ScenarioError> {
        scenario.check()?;
        let registry = Arc::new(Registry::builtin());
        let config = scenario.job_config(JOB);
        let value = |error: paramill_core::spec::SpecError| ScenarioError::Value(error.to_string());
        config.check(&registry).map_err(value)?;
        for switch in &scenario.switches {
            paramill_core::consistency::SyncPolicy::parse(&registry.consistency, &switch.sync)
                .map_err(value)?;
        }
        let faults = scenario.fault_plan()?;
        let mut cluster = Cluster {
            world: World::new(scenario.network.clone(), scenario.seed),
            scenario: scenario.clone(),
        };
        cluster.add_coordinator(config, &registry);
        cluster.shard_ids().for_each(|id| cluster.add_shard(id, canary, &registry));
        cluster.worker_ids().for_each(|id| cluster.add_worker(id, gradients, &faults, &registry));
        cluster.inject(&faults);
        Ok(cluster)
    }

    /// The scenario.
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// The workers, by rank.
    pub fn worker_ids(&self) -> impl Iterator<Item = WorkerId> + use<> {
        (0..self.scenario.workers).map(WorkerId)
    }

    /// The data cores, by server and core.
    pub fn shard_ids(&self) -> impl Iterator<Item = ShardId> + use<> {
        let cores = self.scenario.cores;
        (0..self.scenario.servers)
            .flat_map(move |server| (0..cores).map(move |core| ShardId { server: ServerId(server), core }))
    }

    /// A worker with its application.
    pub fn player(&self, worker: WorkerId) -> &Player {
        let actor = self.world.role(NodeId::Worker(worker)).expect("every worker was added");
        actor.as_player().expect("a worker's node holds a player")
    }

    /// A data core.
    pub fn shard(&self, shard: ShardId) -> &Shard {
        let actor = self.world.role(NodeId::Shard(shard)).expect("every shard was added");
        actor.as_shard().expect("a shard's node holds a shard")
    }

    /// The host of a server.
    pub fn server_host(&self, server: ServerId) -> HostId {
        HostId(server.0)
    }

    /// A table's parameters, put together from all shards.
    pub fn parameters(&self, table: TableId) -> Vec<f32> {
        let elements = self.scenario.table_specs()[table.0 as usize].elements();
        let mut values = vec![f32::NAN; elements as usize];
        for id in self.shard_ids() {
            self.shard(id).for_each_chunk(table, |start, chunk| {
                values[start as usize..start as usize + chunk.len()].copy_from_slice(chunk);
            });
        }
        values
    }

    /// Runs until the coordinator has ended the job and the shards have heard of it, or until `until`. Says whether the
    /// coordinator has ended the job.
    pub fn run<O: Observer<Actor>>(&mut self, until: Time, observer: &mut O) -> Result<bool, Violation> {
        let shards: Vec<NodeId> = self.shard_ids().map(NodeId::Shard).collect();
        self.world.run(until, observer, |world| {
            let ended = |node: &NodeId| world.ended(*node).is_some();
            ended(&NodeId::Coordinator) && shards.iter().all(ended)
        })?;
        Ok(self.world.ended(NodeId::Coordinator).is_some())
    }

    fn add_coordinator(&mut self, config: JobConfig, registry: &Arc<Registry>) {
        let host = HostId(self.scenario.servers + self.scenario.workers);
        let coordinator = Box::new(Coordinator::new(config, registry.clone()));
        let actor = Actor::Coordinator(coordinator);
        self.world.add(NodeId::Coordinator, COORDINATOR, host, Duration::ZERO, actor);
        if !self.scenario.switches.is_empty() {
            let operator = Box::new(Operator::new(JOB, COORDINATOR, self.scenario.switches.clone()));
            self.world.add(OPERATOR, "operator", host, Duration::ZERO, Actor::Operator(operator));
        }
    }

    fn add_shard(&mut self, id: ShardId, canary: Option<Canary>, registry: &Arc<Registry>) {
        let address = format!("shard {} {}", id.server.0, id.core);
        let config = ShardConfig {
            job: JOB.into(),
            process: u64::from(id.server.0),
            server: Some(id.server),
            core: id.core,
            cores: self.scenario.cores,
            addresses: address.as_str().into(),
            coordinator: COORDINATOR.into(),
        };
        let shard = Shard::new(Time::ZERO, config, registry.clone());
        let shard = match canary {
            None => Actor::Shard(Box::new(shard)),
            Some(canary) => Actor::Broken(Box::new(BrokenShard::new(shard, canary))),
        };
        let handling = Duration::from_nanos((self.scenario.network.handling_us * 1e3) as u64);
        self.world.add(NodeId::Shard(id), &address, self.server_host(id.server), handling, shard);
    }

    fn add_worker(
        &mut self,
        id: WorkerId,
        gradients: Gradients,
        faults: &FaultPlan,
        registry: &Arc<Registry>,
    ) {
        let Scenario { seed, servers, colocated, compute, .. } = &self.scenario;
        let config = WorkerConfig { job: JOB.into(), rank: Some(id), coordinator: COORDINATOR.into() };
        let program = Program {
            worker: id,
            tables: self.scenario.table_specs(),
            gradients,
            iterations: self.scenario.iterations,
            seed: *seed,
            compute: ComputeClock::new(compute.clone(), faults.clone(), *seed, id),
        };
        let host = HostId(if *colocated { id.0 } else { servers + id.0 });
        let player = Player::new(Worker::new(Time::ZERO, config, registry.clone()), program);
        let address = format!("worker {}", id.0);
        let actor = Actor::Worker(Box::new(player));
        self.world.add(NodeId::Worker(id), &address, host, Duration::ZERO, actor);
    }

    fn inject(&mut self, faults: &FaultPlan) {
        let shards = self.shard_ids().map(NodeId::Shard);
        for node in shards.chain(self.worker_ids().map(NodeId::Worker)).collect::<Vec<_>>() {
            for (at, length) in faults.pauses(node) {
                self.world.pause(node, at, length);
            }
            if let Some(at) = faults.crash_at(node) {
                self.world.crash(node, at);
            }
            self.world.slow_down(node, faults.slowdown(node));
        }
        let injected = Injected::new(faults, self.scenario.seed);
        if !injected.is_empty() {
            self.world.rules().add(injected);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::NetworkConfig;
    use crate::world::{Ended, Unobserved};

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
    fn every_model_trains_a_dense_and_a_sparse_table() {
        for sync in
            ["bsp", "asp", "ssp:s=2", "dsps:min=1,max=4", "drop:n=2", "pssp:s=1,c=0.5", "psp:c=2,b=0.5"]
        {
            let text = format!(
                "sync = '{sync}'\nworkers = 3\nservers = 2\ncores = 2\niterations = 30\nchunk_elements = 8\n\
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
}
