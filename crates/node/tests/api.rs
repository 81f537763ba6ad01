//! The worker's library as a program uses it that names no other crate of Paramill: tables, handles, time-outs, the log.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_node::admin::Admin;
use paramill_node::client::{
    ClientError, Factors, Gradient, Handle, Job, JobOptions, Slab, Status, Table, TableSpec, Values,
    WorkerError, WorkerReport,
};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::url::JobUrl;
use paramill_node::{Axis, Hub, JobConfig, Level, Log, Policies, Policy, PolicyOverride, Registry};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SOON: Duration = Duration::from_millis(50);

fn config(workers: u32, sync: &str) -> JobConfig {
    let policy = Policy::default().with(Axis::Sync, sync).with(Axis::Optimizer, "sgd:lr=1");
    JobConfig { policy, ..JobConfig::new("test", workers, 1) }
}

fn start_server(config: ServerConfig) -> Server {
    server::start(config, &Arc::new(Registry::builtin())).unwrap()
}

fn in_memory(workers: u32) -> (Hub, Server) {
    let hub = Hub::new();
    let server = start_server(ServerConfig {
        coordinate: Some(config(workers, "bsp")),
        memory: Some(hub.clone()),
        ..ServerConfig::new("test", "")
    });
    (hub, server)
}

#[test]
fn a_table_is_a_value_and_a_handle_brings_what_it_is_for() {
    let (hub, server) = in_memory(1);
    let job = Job::init(JobOptions::in_memory(&hub, "test").rank(0)).unwrap();
    let dense: Table = job.table(TableSpec::dense("dense", [2, 3]), vec![1.0; 6]).unwrap();
    let sparse: Table = job.table(TableSpec::sparse("sparse", 4, 2), vec![2.0; 8]).unwrap();
    job.start().unwrap();
    assert_eq!((dense.spec().name.as_str(), sparse.spec().rows), ("dense", true));

    // The parts of a program hold the same table.
    let same = dense.clone();
    same.update(&[0.5; 6]).unwrap();
    let rows = Gradient::Rows { rows: &[1, 3], values: &[1.0, 1.0, 2.0, 2.0] };
    let pushed: Handle = sparse.push(rows).unwrap();
    job.clock();
    dense.sync().unwrap();
    pushed.wait().unwrap();
    pushed.wait().unwrap();
    let values: Values = dense.values().unwrap();
    assert_eq!(*values, [0.5; 6]);

    let pulled: Handle<Vec<f32>> = sparse.rows(&[0, 1]).unwrap();
    assert_eq!(pulled.wait().unwrap(), [2.0, 2.0, 1.0, 1.0]);
    let again = pulled.wait().unwrap_err();
    assert!(matches!(again, ClientError::Worker(WorkerError::Order(_))), "{again}");
    assert_eq!(sparse.pull_now().unwrap().wait().unwrap(), [2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 0.0, 0.0]);
    assert_eq!(dense.pull_now().unwrap().wait().unwrap(), [0.5; 6]);

    let factors = Factors { rank: 1, u: &[1.0, 2.0], v: &[0.0, 0.5, 1.0] };
    let gradient = Gradient::Product { values: &[0.0, 0.5, 1.0, 0.0, 1.0, 2.0], factors };
    dense.push_pull(gradient).unwrap().wait().unwrap();
    sparse.push(Gradient::Rows { rows: &[], values: &[] }).unwrap().wait().unwrap();
    job.clock();
    let after = dense.read(<[f32]>::to_vec).unwrap();
    assert_eq!(after, [0.5, 0.0, -0.5, 0.5, -0.5, -1.5]);

    let mut slabs: Vec<Slab> = vec![dense.slab().unwrap()];
    slabs[0].gradient_mut().fill(1.0);
    let exchange: Handle<Vec<Slab>> = job.exchange(&mut slabs).unwrap();
    job.clock();
    let slabs = exchange.wait().unwrap();
    assert_eq!(slabs[0].values()[0], -0.5);

    let status: Status = job.status().unwrap();
    assert_eq!(status.phase, "running with 1 workers");
    let report: WorkerReport = job.report();
    assert!(report.bytes_pushed > 0 && report.clock == job.iteration());
    assert_eq!((job.iteration(), job.url().job.as_str()), (3, "test"));
    job.close().unwrap();
    let late = dense.update(&[0.0; 6]).unwrap_err();
    assert!(matches!(late, ClientError::Ended(_)), "a table does not keep its job: {late}");
    server.join().unwrap();
}

#[test]
fn every_wait_takes_the_jobs_time_out_or_one_of_its_own() {
    let (hub, server) = in_memory(2);
    let join = |rank, timeout| {
        let job = Job::init(JobOptions::in_memory(&hub, "test").rank(rank).timeout(timeout)).unwrap();
        let table = job.table(TableSpec::dense("w", [4]), vec![0.0; 4]).unwrap();
        (job, table)
    };
    let (short, w) = join(0, SOON);
    assert_eq!(short.timeout(), SOON);
    let is_timeout = |result: Result<(), ClientError>| match result {
        Err(ClientError::Timeout { seconds, .. }) => assert!(seconds >= SOON.as_secs_f64(), "{seconds}"),
        other => panic!("{other:?}"),
    };
    let long = Duration::from_secs(20);
    is_timeout(short.start());
    let (other, others) = join(1, long);
    std::thread::scope(|scope| {
        scope.spawn(|| other.start().unwrap());
        short.start_within(long).unwrap();
    });
    w.update(&[1.0; 4]).unwrap();
    let arrived = short.arrive("here").unwrap();
    is_timeout(w.sync());
    is_timeout(arrived.wait());
    assert!(!arrived.is_due() && !arrived.is_due_within(SOON));
    is_timeout(w.sync_within(SOON));
    others.update(&[1.0; 4]).unwrap();
    others.sync().unwrap();
    other.barrier("here").unwrap();
    w.sync_within(long).unwrap();
    arrived.wait_within(long).unwrap();
    assert!(arrived.is_due());
    assert_eq!(short.status_within(long).unwrap().workers.len(), 2);
    assert_eq!(w.read(<[f32]>::to_vec).unwrap(), [-1.0; 4]);
    is_timeout(short.barrier_within("there", SOON));
    short.close_within(long).unwrap();
    other.close().unwrap();
    server.join().unwrap();
}

#[test]
fn lines_of_the_log_have_levels() {
    let lines: Arc<Mutex<Vec<(Level, String)>>> = Arc::default();
    let take = |lines: &Arc<Mutex<Vec<(Level, String)>>>| {
        let lines = lines.clone();
        move |level: Level, line: &str| lines.lock().unwrap().push((level, line.to_owned()))
    };
    let quick = JobConfig { worker_timeout: Duration::from_millis(300), ..config(2, "asp") };
    let server = start_server(ServerConfig {
        coordinate: Some(quick),
        log: Log::new(take(&lines)),
        ..ServerConfig::new("test", "127.0.0.1:0")
    });
    let url = JobUrl { address: server.coordinator().to_owned(), job: "test".into() };
    let join = |rank| {
        let job = Job::init(JobOptions::at(url.clone()).rank(rank).log(take(&lines))).unwrap();
        job.table(TableSpec::dense("w", [4]), vec![0.0; 4]).unwrap();
        job
    };
    let (first, second) = (join(0), join(1));
    std::thread::scope(|scope| {
        scope.spawn(|| second.start().unwrap());
        first.start().unwrap();
    });
    let change = PolicyOverride::new("*", Policies::of([(Axis::Sync, "ssp:s=2")]));
    Admin::connect(&url, Duration::from_secs(10)).unwrap().set(change).unwrap();
    second.abandon();
    first.close().unwrap();
    server.join().unwrap();
    let lines = lines.lock().unwrap();
    let level = |part: &str| lines.iter().find(|(_, line)| line.contains(part)).map(|(level, _)| *level);
    assert_eq!(level("sync=ssp:s=2"), Some(Level::Info), "{lines:?}");
    assert_eq!(level("worker 1 is declared dead"), Some(Level::Warn), "{lines:?}");
}
