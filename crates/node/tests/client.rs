//! What a client promises of updates and slabs when something goes wrong, over real sockets.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_core::types::{ServerId, TableId, WorkerId};
use paramill_node::client::{ClientError, Job, JobOptions, WorkerError};
use paramill_node::server::{self, Server, ServerConfig};
use std::sync::Arc;
use std::time::Duration;

const ELEMENTS: usize = 20_000;
const TIMEOUT: Duration = Duration::from_secs(20);

fn config(workers: u32, servers: u32, sync: &str) -> JobConfig {
    let policy = Policy::default().with(Axis::Sync, sync).with(Axis::Optimizer, "sgd:lr=1");
    let policy = policy.with(Axis::Placement, "uniform");
    JobConfig { policy, ..JobConfig::new("test", workers, servers) }
}

fn start_servers(job: &JobConfig) -> Vec<Server> {
    let registry = Arc::new(Registry::builtin());
    let base = ServerConfig::new(&job.job, "127.0.0.1:0");
    let first = ServerConfig { coordinate: Some(job.clone()), ..base.clone() };
    let mut servers = vec![server::start(first, &registry).unwrap()];
    let coordinator = servers[0].coordinator().to_owned();
    servers.extend((1..job.servers).map(|_| {
        let other = ServerConfig { coordinator: coordinator.clone(), ..base.clone() };
        server::start(other, &registry).unwrap()
    }));
    servers
}

fn join(servers: &[Server], rank: u32, timeout: Duration) -> (Job, TableId) {
    let url = format!("paramill://{}/test", servers[0].coordinator()).parse().unwrap();
    let rank = Some(WorkerId(rank));
    let job = Job::init(JobOptions { rank, timeout, log: |_| {}, ..JobOptions::at(url) }).unwrap();
    let spec = TableSpec::dense("w", [ELEMENTS as u64]);
    let table = job.create_table(spec, vec![1.0; ELEMENTS]).unwrap();
    (job, table)
}

fn stop(servers: Vec<Server>) {
    servers.iter().for_each(Server::stop);
    servers.into_iter().for_each(|server| drop(server.join()));
}

/// The worker believes that NaN is clipped, as it is on the first server; the second one refuses it.
fn refusing_nan_late(workers: u32, sync: &str) -> JobConfig {
    let rule = PolicyOverride::new("*", Policies::of([(Axis::NonFinite, "clip")])).on(ServerId(0));
    JobConfig { overrides: vec![rule], ..config(workers, 2, sync) }
}

fn with_nan() -> Vec<f32> {
    let mut gradient = vec![1.0; ELEMENTS];
    gradient[ELEMENTS - 1] = f32::NAN;
    gradient
}

fn is_refused(error: &ClientError) -> bool {
    matches!(error, ClientError::Worker(WorkerError::Refused { .. }))
}

/// The updates after one that failed were forgotten: the next `sync` returned while they were under way.
#[test]
fn sync_waits_for_the_updates_after_one_that_failed() {
    let servers = start_servers(&refusing_nan_late(2, "ssp:s=1"));
    let (waiting, table) = join(&servers, 0, Duration::from_millis(200));
    let (other, _) = join(&servers, 1, TIMEOUT);
    std::thread::scope(|scope| {
        scope.spawn(|| waiting.start_within(TIMEOUT).unwrap());
        other.start().unwrap();
    });
    waiting.update(table, &with_nan()).unwrap();
    waiting.clock();
    // One clock ahead of the other worker, it waits for that one.
    let sent = waiting.update(table, &vec![1.0; ELEMENTS]);
    waiting.clock();
    match sent {
        Ok(()) => {
            let refused = loop {
                match waiting.sync(table).unwrap_err() {
                    ClientError::Timeout { .. } => {}
                    error => break error,
                }
            };
            assert!(is_refused(&refused), "{refused}");
        }
        // The refusal was here already: this one is to be sent once more.
        Err(error) => {
            assert!(matches!(error, ClientError::EarlierUpdate(_)), "{error}");
            waiting.update(table, &vec![1.0; ELEMENTS]).unwrap();
            waiting.clock();
        }
    }
    let early = waiting.sync(table).unwrap_err();
    assert!(matches!(early, ClientError::Timeout { .. }), "{early}");
    for _ in 0..3 {
        other.update(table, &vec![1.0; ELEMENTS]).unwrap();
        other.clock();
    }
    while let Err(error) = waiting.sync(table) {
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    }
    drop((waiting, other));
    stop(servers);
}

#[test]
fn an_update_says_whether_it_was_sent() {
    let servers = start_servers(&refusing_nan_late(1, "bsp"));
    let (job, table) = join(&servers, 0, TIMEOUT);
    job.start().unwrap();
    job.update(table, &with_nan()).unwrap();
    // Answers come in order: behind this one, the refusal is here.
    job.pull_now(table).unwrap().wait(TIMEOUT).unwrap();
    let gradient = vec![0.5; ELEMENTS];
    let error = job.update(table, &gradient).unwrap_err();
    assert!(error.to_string().contains("this update was not sent, because an earlier one"), "{error}");
    assert!(matches!(&error, ClientError::EarlierUpdate(earlier) if is_refused(earlier)), "{error:?}");
    // Nothing is wrong with this one.
    job.update(table, &gradient).unwrap();
    job.clock();
    job.sync(table).unwrap();
    assert_eq!(job.read(table, |values| values[ELEMENTS - 1]).unwrap(), 0.5);
    job.finish().unwrap();
    stop(servers);
}

#[test]
fn a_slab_that_is_dropped_is_not_lent_any_more() {
    let servers = start_servers(&config(1, 1, "bsp"));
    let (job, table) = join(&servers, 0, TIMEOUT);
    job.start().unwrap();
    let mut slab = job.slab(table).unwrap();
    slab.gradient_mut().fill(1.0);
    drop(slab);
    job.push_pull(table, &vec![0.25; ELEMENTS]).unwrap().wait(TIMEOUT).unwrap();
    job.clock();
    assert_eq!(job.read(table, <[f32]>::to_vec).unwrap(), vec![0.75; ELEMENTS]);

    // An exchange that nobody waits for gives its slabs back too, and so does one that was waited for.
    let mut slabs = vec![job.slab(table).unwrap()];
    slabs[0].gradient_mut().fill(0.25);
    let mut exchange = job.exchange(&mut slabs).unwrap();
    job.clock();
    drop(exchange.wait(TIMEOUT).unwrap());
    assert_eq!(job.read(table, <[f32]>::to_vec).unwrap(), vec![0.5; ELEMENTS]);
    job.finish().unwrap();
    stop(servers);
}

/// A slab of a job with more tables, or larger ones, ended the worker's thread.
#[test]
fn a_slab_of_another_job_is_refused_and_both_jobs_go_on() {
    let (one, two) = (start_servers(&config(1, 1, "bsp")), start_servers(&config(1, 1, "bsp")));
    let (first, table) = join(&one, 0, TIMEOUT);
    let (second, _) = join(&two, 0, TIMEOUT);
    first.start().unwrap();
    second.start().unwrap();
    let mut slabs = vec![first.slab(table).unwrap()];
    let error = second.exchange(&mut slabs).unwrap_err();
    assert!(error.to_string().contains("was lent by another worker"), "{error}");
    assert_eq!(slabs.len(), 1, "it stays");
    slabs[0].gradient_mut().fill(0.5);
    let mut exchange = first.exchange(&mut slabs).unwrap();
    first.clock();
    let slab = exchange.wait(TIMEOUT).unwrap().pop().unwrap();
    assert_eq!(slab.values(), vec![0.5; ELEMENTS]);
    second.give_back(slab);
    assert_eq!(first.read(table, |values| values[0]).unwrap(), 0.5, "it is back where it came from");
    second.push_pull(table, &vec![0.25; ELEMENTS]).unwrap().wait(TIMEOUT).unwrap();
    first.finish().unwrap();
    second.finish().unwrap();
    stop(one);
    stop(two);
}
