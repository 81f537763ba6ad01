//! Workers that come while a job runs, over real threads and sockets: in the place of one that died, or beside the others.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_core::status::{MemberState, WorkerStatus};
use paramill_core::table::TableSpec;
use paramill_node::client::{Job, JobOptions, Table};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::{Hub, Transport};
use std::sync::Arc;
use std::time::Duration;

const ELEMENTS: usize = 20_000;
const STEPS: u64 = 40;
/// How long a worker waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// One server of two cores for so many workers.
struct Cluster {
    server: Server,
    hub: Option<Hub>,
    transport: Transport,
}

impl Cluster {
    fn start(workers: u32, sync: &str, transport: Transport, hub: Option<Hub>) -> Cluster {
        let policy = Policy::default().with(Axis::Sync, sync).with(Axis::Optimizer, "sgd:lr=1");
        let config = JobConfig { policy, ..JobConfig::new("test", workers, 1) };
        let server = ServerConfig {
            coordinate: Some(config),
            memory: hub.clone(),
            cores: 2,
            transport,
            ..ServerConfig::new("test", "127.0.0.1:0")
        };
        let server = server::start(server, &Arc::new(Registry::builtin())).unwrap();
        Cluster { server, hub, transport }
    }

    fn options(&self, rank: u32) -> JobOptions {
        let options = match &self.hub {
            Some(hub) => JobOptions::in_memory(hub, "test"),
            None => JobOptions::at(format!("paramill://{}/test", self.server.coordinator()).parse().unwrap()),
        };
        options.rank(rank).timeout(PATIENCE).transport(self.transport)
    }

    /// A worker that has started. Its values do not count, unless it is worker 0 of the job's beginning.
    fn worker(&self, rank: u32) -> (Job, Table) {
        let job = Job::init(self.options(rank)).unwrap();
        let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.5; ELEMENTS]).unwrap();
        job.start().unwrap();
        (job, table)
    }
}

/// Makes the steps up to this clock.
fn train(job: &Job, table: &Table, until: u64) {
    while job.iteration() < until {
        table.update(&[1.0; ELEMENTS]).unwrap();
        job.clock();
        table.sync().unwrap();
    }
}

/// Waits until so many processes have had a rank, and the last of them takes part.
fn await_worker(job: &Job, rank: usize, incarnation: u32) {
    let is_there =
        |worker: &WorkerStatus| worker.incarnation == incarnation && worker.state == MemberState::Running;
    while !job.status().unwrap().workers.get(rank).is_some_and(is_there) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Every round makes a step of exactly 1, whoever takes part in it.
fn finish(job: Job, table: Table) {
    let expected = 0.5 - STEPS as f32;
    assert!(table.read(|values| values.iter().all(|value| *value == expected)).unwrap());
    job.close().unwrap();
}

/// Every way in which workers and servers of a machine can be connected.
fn transports() -> [(Transport, Option<Hub>); 3] {
    [(Transport::Tcp, None), (Transport::Shm, None), (Transport::Auto, Some(Hub::new()))]
}

#[test]
fn a_worker_that_is_gone_without_a_word_is_replaced() {
    for (transport, hub) in transports() {
        let cluster = Cluster::start(2, "bsp", transport, hub);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (job, table) = cluster.worker(0);
                train(&job, &table, 3);
                // It would go on alone until the new process has declared its tables.
                await_worker(&job, 1, 2);
                train(&job, &table, STEPS);
                let status = job.status().unwrap();
                assert_eq!((status.restarts, status.workers[1].incarnation), (1, 2));
                assert_eq!(status.workers[1].state, MemberState::Running);
                job.barrier("looked").unwrap();
                finish(job, table);
            });
            scope.spawn(|| {
                let (job, table) = cluster.worker(1);
                train(&job, &table, 3);
                drop(job);
                let (job, table) = cluster.worker(1);
                // Round 3 is the new process's, unless the other one has begun it.
                assert!((3..STEPS).contains(&job.iteration()), "{}", job.iteration());
                train(&job, &table, STEPS);
                // The other one looks at the status first.
                job.barrier("looked").unwrap();
                finish(job, table);
            });
        });
        cluster.server.join().unwrap();
    }
}

#[test]
fn a_fifth_worker_joins_four() {
    for (transport, hub) in transports() {
        let cluster = Cluster::start(4, "bsp", transport, hub);
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let cluster = &cluster;
                scope.spawn(move || {
                    let (job, table) = cluster.worker(rank);
                    train(&job, &table, 5);
                    // The others cannot go on without this one, and the fifth comes meanwhile.
                    if rank == 0 {
                        await_worker(&job, 4, 1);
                    }
                    train(&job, &table, STEPS);
                    finish(job, table);
                });
            }
            scope.spawn(|| {
                // A rank that the job does not wait for is told to come again until it runs.
                let (job, table) = cluster.worker(4);
                assert!((1..STEPS).contains(&job.iteration()), "{}", job.iteration());
                train(&job, &table, STEPS);
                finish(job, table);
            });
        });
        cluster.server.join().unwrap();
    }
}
