//! The processes of a job, as one that a driver has just started.

use paramill_core::address::CoreAddresses;
use paramill_core::aggregator::{Aggregator, AggregatorConfig};
use paramill_core::registry::Registry;
use paramill_core::replica::Replica;
use paramill_core::server::ShardConfig;
use paramill_core::types::{ProcessId, Time, WorkerId};
use paramill_core::worker::{Access, Worker, WorkerConfig};
use paramill_sim::actor::Actor;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const JOB: &str = "test";
/// Where the coordinator is reached.
pub(crate) const ADDRESS: &str = "coordinator";

/// A worker process that wants a certain rank or any, and goes through an aggregator or not. Numbers tell those of a
/// process apart.
pub(crate) fn worker(now: Time, number: usize, rank: Option<u32>, aggregator: Option<usize>) -> Worker {
    let aggregator = aggregator.map(|index| format!("aggregator:{index}"));
    worker_through(now, number, rank, aggregator.as_deref())
}

/// The same, with the addresses of the aggregator.
pub(crate) fn worker_through(
    now: Time,
    number: usize,
    rank: Option<u32>,
    aggregator: Option<&str>,
) -> Worker {
    let config = WorkerConfig {
        job: JOB.into(),
        rank: rank.map(WorkerId),
        coordinator: ADDRESS.into(),
        aggregator: aggregator.map(CoreAddresses::from),
        number: number as u64,
        access: Access::Full,
    };
    Worker::new(now, config, Arc::new(Registry::builtin()))
}

/// A process that reads what is broadcast.
pub(crate) fn reader(now: Time, number: usize) -> Worker {
    let config = WorkerConfig {
        job: JOB.into(),
        rank: None,
        coordinator: ADDRESS.into(),
        aggregator: None,
        number: number as u64,
        access: Access::ReadOnly,
    };
    Worker::new(now, config, Arc::new(Registry::builtin()))
}

pub(crate) fn shard(now: Time, process: u64, index: u32, cores: u32) -> Actor {
    let config = ShardConfig {
        job: JOB.into(),
        process: ProcessId(process),
        server: None,
        core: index % cores,
        cores,
        addresses: format!("shard:{index}").into(),
        coordinator: ADDRESS.into(),
        digest_every: 1,
    };
    Actor::Shard(Box::new(Replica::new(now, config, Arc::new(Registry::builtin()))))
}

pub(crate) fn aggregator(now: Time, process: u64, index: usize) -> Actor {
    aggregator_core(now, process, index, 0, 1, None)
}

/// One core of an aggregator, with the addresses of the one above it.
pub(crate) fn aggregator_core(
    now: Time,
    process: u64,
    index: usize,
    core: u32,
    cores: u32,
    above: Option<&str>,
) -> Actor {
    let config = AggregatorConfig {
        job: JOB.into(),
        process: ProcessId(process),
        id: None,
        core,
        cores,
        addresses: format!("aggregator:{index}").into(),
        coordinator: ADDRESS.into(),
        above: above.map(CoreAddresses::from),
        hold: Duration::from_millis(5),
    };
    Actor::Aggregator(Box::new(Aggregator::new(now, config, Arc::new(Registry::builtin()))))
}
