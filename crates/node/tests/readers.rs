//! A table is read from other threads while it is trained: what a reader sees is one version, on every transport.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_node::client::{Job, JobOptions, TableSpec};
use paramill_node::server::{self, ServerConfig};
use paramill_node::{Hub, Transport};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A few chunks on each of two servers, so that an answer comes in many frames.
const ELEMENTS: usize = 200_000;
const STEPS: u32 = 1_000;

/// How a worker and its servers talk.
#[derive(Debug, Clone, Copy)]
enum Way {
    Memory,
    Sockets(Transport),
}

/// Trains with a gradient of ones, whose every step lowers all parameters by one. Readers must find all parameters equal.
/// Returns how many different versions they saw.
fn versions_seen(way: Way) -> usize {
    let registry = Arc::new(Registry::builtin());
    let policy = Policy::default()
        .with(Axis::Sync, "bsp")
        .with(Axis::Optimizer, "sgd:lr=1")
        .with(Axis::Placement, "uniform");
    let config = JobConfig { policy, ..JobConfig::new("test", 1, 2) };
    let hub = matches!(way, Way::Memory).then(Hub::new);
    let transport = match way {
        Way::Memory => Transport::default(),
        Way::Sockets(transport) => transport,
    };
    let base = ServerConfig { memory: hub.clone(), transport, ..ServerConfig::new("test", "127.0.0.1:0") };
    let first = server::start(ServerConfig { coordinate: Some(config), ..base.clone() }, &registry).unwrap();
    let coordinator = first.coordinator().to_owned();
    let second = server::start(ServerConfig { coordinator: coordinator.clone(), ..base }, &registry).unwrap();

    let options = match (&hub, way) {
        (Some(hub), _) => JobOptions::in_memory(hub, "test"),
        (None, Way::Sockets(transport)) => {
            let url = format!("paramill://{coordinator}/test").parse().unwrap();
            JobOptions::at(url).transport(transport)
        }
        (None, Way::Memory) => panic!("it has a hub"),
    };
    let options = options.rank(0).timeout(Duration::from_secs(60));
    let job = Job::init(options).unwrap();
    let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS]).unwrap();
    job.start().unwrap();

    let is_over = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        // One reads for a moment, the other keeps what it read while newer parameters arrive.
        let glancing = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !is_over.load(Ordering::Relaxed) {
                let version = table.read(|values| version_of(way, values)).unwrap();
                seen.insert(version);
            }
            seen
        });
        let holding = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let values = table.values().unwrap();
                let version = version_of(way, &values);
                for _ in 0..3 {
                    std::thread::yield_now();
                    assert_eq!(version_of(way, &values), version, "{way:?}: what is held changed");
                }
            }
        });
        let gradient = vec![1.0; ELEMENTS];
        for step in 1..=STEPS {
            table.update(&gradient).unwrap();
            job.clock();
            table.sync().unwrap();
            let own = table.read(|values| version_of(way, values)).unwrap();
            assert_eq!(own, step, "{way:?}: the one that waited sees its step");
        }
        is_over.store(true, Ordering::Relaxed);
        holding.join().unwrap();
        glancing.join().unwrap()
    });
    job.close().unwrap();
    first.join().unwrap();
    second.join().unwrap();
    seen.len()
}

/// The step that all of these parameters are of.
fn version_of(way: Way, values: &[f32]) -> u32 {
    let odd = values.iter().position(|value| *value != values[0]);
    assert_eq!(odd, None, "{way:?}: a mixture of {} and {}", -values[0], -values[odd.unwrap_or(0)]);
    (-values[0]) as u32
}

#[test]
fn a_reader_never_sees_a_mixture_of_two_versions_over_tcp() {
    assert!(versions_seen(Way::Sockets(Transport::Tcp)) > 1);
}

#[test]
fn a_reader_never_sees_a_mixture_of_two_versions_in_shared_memory() {
    assert!(versions_seen(Way::Sockets(Transport::Shm)) > 1);
}

#[test]
fn a_reader_never_sees_a_mixture_of_two_versions_in_memory() {
    assert!(versions_seen(Way::Memory) > 1);
}
