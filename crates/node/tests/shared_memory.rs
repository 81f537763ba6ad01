//! Workers and data cores that share memory: the same bits as over TCP, and TCP where they must not.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_node::Log;
use paramill_node::Transport;
use paramill_node::client::{Gradient, Job, JobOptions};
use paramill_node::server::{self, Server, ServerConfig};
use std::sync::Arc;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(20);
const ELEMENTS: usize = 100_000;

fn start(job: &JobConfig, cores: u32, transport: Transport) -> Server {
    let config = ServerConfig {
        coordinate: Some(job.clone()),
        cores,
        transport,
        log: Log::none(),
        ..ServerConfig::new("test", "127.0.0.1:0")
    };
    server::start(config, &Arc::new(Registry::builtin())).unwrap()
}

fn options(server: &Server, rank: u32, transport: Transport) -> JobOptions {
    let url = format!("paramill://{}/test", server.coordinator()).parse().unwrap();
    JobOptions::at(url).rank(rank).transport(transport).timeout(TIMEOUT).log(|_, _| {})
}

/// Trains a dense table with copies, another with slabs, and a sparse one; every worker's final parameters.
fn train(servers: Transport, workers: Transport) -> Vec<Vec<f32>> {
    let policy = Policy::default().with(Axis::Order, "ranked");
    let server = start(&JobConfig { policy, ..JobConfig::new("test", 2, 1) }, 2, servers);
    let gradient = |rank: u32, step: u32| -> Vec<f32> {
        (0..ELEMENTS).map(|i| (i % 101) as f32 / 7.0 + (rank * 3 + step) as f32).collect()
    };
    let run = |rank: u32| {
        let job = Job::init(options(&server, rank, workers)).unwrap();
        let dense = TableSpec::dense("dense", [ELEMENTS as u64]);
        let copied = job.table(dense.clone(), vec![1.0; ELEMENTS]).unwrap();
        let lent = job.table(TableSpec { name: "lent".into(), ..dense }, vec![2.0; ELEMENTS]).unwrap();
        let rows = job.table(TableSpec::sparse("rows", 1000, 8), vec![3.0; 8000]).unwrap();
        job.start().unwrap();
        let mut slabs = vec![lent.slab().unwrap()];
        for step in 0..4 {
            slabs[0].gradient_mut().copy_from_slice(&gradient(rank, step));
            let exchange = job.exchange(&mut slabs).unwrap();
            copied.update(&gradient(rank, step + 9)).unwrap();
            let some = Gradient::Rows { rows: &[1, 500, 999], values: &gradient(rank, step)[..24] };
            let pushed = rows.push(some).unwrap();
            job.clock();
            copied.sync().unwrap();
            pushed.wait().unwrap();
            slabs = exchange.wait().unwrap();
        }
        let mut values = copied.read(<[f32]>::to_vec).unwrap();
        values.extend_from_slice(slabs[0].values());
        values.extend(rows.rows(&[0, 1, 500, 999]).unwrap().wait().unwrap());
        job.close().unwrap();
        values
    };
    let finals = std::thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let run = &run;
            scope.spawn(move || run(rank))
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    server.join().unwrap();
    finals
}

#[test]
fn shared_memory_gives_the_same_bits_as_tcp() {
    let over_tcp = train(Transport::Tcp, Transport::Tcp);
    assert_eq!(over_tcp[0], over_tcp[1]);
    assert!(over_tcp[0].iter().all(|value| value.is_finite()));
    for (servers, workers) in [
        (Transport::Shm, Transport::Shm),
        (Transport::Auto, Transport::Auto),
        (Transport::Auto, Transport::Tcp),
        (Transport::Tcp, Transport::Auto),
    ] {
        assert!(train(servers, workers) == over_tcp, "servers {servers}, workers {workers}");
    }
}

#[test]
fn a_worker_that_must_share_and_cannot_is_told() {
    let server = start(&JobConfig::new("test", 1, 1), 1, Transport::Tcp);
    let options = options(&server, 0, Transport::Shm).timeout(Duration::from_millis(500));
    let job = Job::init(options).unwrap();
    job.table(TableSpec::dense("w", [10]), vec![0.0; 10]).unwrap();
    let error = job.start().unwrap_err().to_string();
    assert!(error.contains("`--transport shm` does not allow 127.0.0.1:"), "{error}");
}
