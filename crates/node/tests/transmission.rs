//! Gradients that leave layer by layer: the same bits in whatever order frames leave, over every transport and at any rate.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::Axis;
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_core::types::ServerId;
use paramill_node::client::{Handle, Job, JobOptions, Table};
use paramill_node::rate::Rate;
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::url::JobUrl;
use paramill_node::{Hub, Log, Transport};
use std::sync::Arc;

const WORKERS: u32 = 3;
const STEPS: u32 = 6;
/// Elements of each table, front to back: the first ones wait behind the last one, which fills every socket.
const TABLES: [u64; 5] = [300, 5000, 40, 90_000, 700_000];

/// How a job's frames travel.
#[derive(Clone)]
struct Way {
    hub: Option<Hub>,
    transport: Transport,
    rate: Option<Rate>,
}

fn job(priority: &str) -> JobConfig {
    let mut job = JobConfig::new("layers", WORKERS, 2);
    job.policy.set(Axis::Order, "ranked").unwrap();
    job.policy.set(Axis::Placement, "uniform").unwrap();
    job.policy.set(Axis::Priority, priority).unwrap();
    job
}

fn start(job: &JobConfig, way: &Way) -> Vec<Server> {
    let registry = Arc::new(Registry::builtin());
    let mut servers: Vec<Server> = Vec::new();
    for number in 0..2 {
        let coordinator = servers.first().map_or("127.0.0.1:0", |first| first.coordinator()).to_owned();
        let config = ServerConfig {
            coordinate: (number == 0).then(|| job.clone()),
            server: Some(ServerId(number)),
            memory: way.hub.clone(),
            transport: way.transport,
            rate: way.rate,
            log: Log::default(),
            ..ServerConfig::new("layers", coordinator)
        };
        servers.push(server::start(config, &registry).unwrap());
    }
    servers
}

fn join(servers: &[Server], way: &Way, rank: u32) -> Job {
    let options = match &way.hub {
        Some(hub) => JobOptions::in_memory(hub, "layers"),
        None => JobOptions::at(JobUrl { address: servers[0].coordinator().to_owned(), job: "layers".into() }),
    };
    let options = options.rank(rank).transport(way.transport);
    Job::init(way.rate.map_or(options.clone(), |rate| options.rate(rate))).unwrap()
}

/// Trains layer by layer and returns what worker 0 has in the end.
fn train(priority: &str, way: &Way) -> Vec<Vec<f32>> {
    let job = job(priority);
    let servers = start(&job, way);
    let results: Vec<Vec<Vec<f32>>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|rank| {
                scope.spawn({
                    let servers = &servers;
                    move || work(&join(servers, way, rank), rank)
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    for server in servers {
        server.join().unwrap();
    }
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "workers differ");
    results.into_iter().next().unwrap()
}

fn work(job: &Job, rank: u32) -> Vec<Vec<f32>> {
    let table = |(number, elements): (usize, &u64)| {
        let spec = TableSpec::dense(format!("layer{number}"), [*elements]).alone();
        job.table(spec, vec![0.5; *elements as usize]).unwrap()
    };
    let tables: Vec<Table> = TABLES.iter().enumerate().map(table).collect();
    job.start().unwrap();
    let mut handles: Vec<Option<Handle>> = TABLES.iter().map(|_| None).collect();
    for step in 0..STEPS {
        // Forward: a layer waits for its own parameters.
        let mut gradients: Vec<Vec<f32>> = Vec::new();
        for (table, handle) in tables.iter().zip(&mut handles) {
            if let Some(handle) = handle.take() {
                handle.wait().unwrap();
            }
            let gradient =
                |(at, value): (usize, f32)| value * 0.1 + ((at as u32 * 7 + rank * 3 + step) % 11) as f32;
            gradients.push(
                table.read(|values| values.iter().copied().enumerate().map(gradient).collect()).unwrap(),
            );
        }
        // Backward: the last layer is ready first.
        for (number, gradient) in gradients.iter().enumerate().rev() {
            handles[number] = Some(tables[number].push_pull(gradient.as_slice()).unwrap());
        }
        job.clock();
    }
    handles.iter().flatten().for_each(|handle| handle.wait().unwrap());
    let values = tables.iter().map(|table| table.read(<[f32]>::to_vec).unwrap()).collect();
    job.close().unwrap();
    values
}

#[test]
fn frames_that_overtake_change_no_bit_over_any_transport_and_at_any_rate() {
    let tcp = Way { hub: None, transport: Transport::Tcp, rate: None };
    let expected = train("none", &tcp);
    let slow = Way { rate: Some("400Mbit".parse().unwrap()), ..tcp.clone() };
    let shared = Way { transport: Transport::Auto, ..tcp.clone() };
    let memory = Way { hub: Some(Hub::default()), ..shared.clone() };
    for (way, what) in
        [(&tcp, "tcp"), (&slow, "tcp at a rate"), (&shared, "shared memory"), (&memory, "memory")]
    {
        assert!(train("front", way) == expected, "over {what}");
    }
}

#[test]
fn a_rate_where_nothing_is_sent_is_refused() {
    let rate = "1Mbit".parse().unwrap();
    let url: JobUrl = "paramill://127.0.0.1:1/layers".parse().unwrap();
    let error = Job::init(JobOptions::at(url).transport(Transport::Shm).rate(rate)).unwrap_err().to_string();
    assert!(error.contains("rate 1Mbit") && error.contains("use TCP"), "{error}");
    let error =
        Job::init(JobOptions::in_memory(&Hub::default(), "layers").rate(rate)).unwrap_err().to_string();
    assert!(error.contains("rate 1Mbit"), "{error}");
}
