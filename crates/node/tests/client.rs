//! What a client promises of updates and slabs when something goes wrong, over real sockets.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::status::Status;
use paramill_core::table::TableSpec;
use paramill_core::types::{ServerId, WorkerId};
use paramill_core::waits::WaitCause;
use paramill_node::client::{ClientError, Handle, Job, JobOptions, Slab, Table, WorkerError};
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

fn join(servers: &[Server], rank: u32, timeout: Duration) -> (Job, Table) {
    let url = format!("paramill://{}/test", servers[0].coordinator()).parse().unwrap();
    let options = JobOptions::at(url).rank(rank).timeout(timeout).log(|_, _| {});
    let job = Job::init(options).unwrap();
    let spec = TableSpec::dense("w", [ELEMENTS as u64]);
    let table = job.table(spec, vec![1.0; ELEMENTS]).unwrap();
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
    let (other, others) = join(&servers, 1, TIMEOUT);
    std::thread::scope(|scope| {
        scope.spawn(|| waiting.start_within(TIMEOUT).unwrap());
        other.start().unwrap();
    });
    table.update(&with_nan()).unwrap();
    waiting.clock();
    // One clock ahead of the other worker, it waits for that one.
    let sent = table.update(&vec![1.0; ELEMENTS]);
    waiting.clock();
    match sent {
        Ok(()) => {
            let refused = loop {
                match table.sync().unwrap_err() {
                    ClientError::Timeout { .. } => {}
                    error => break error,
                }
            };
            assert!(is_refused(&refused), "{refused}");
        }
        // The refusal was here already: this one is to be sent once more.
        Err(error) => {
            assert!(matches!(error, ClientError::EarlierUpdate(_)), "{error}");
            table.update(&vec![1.0; ELEMENTS]).unwrap();
            waiting.clock();
        }
    }
    let early = table.sync().unwrap_err();
    assert!(matches!(early, ClientError::Timeout { .. }), "{early}");
    for _ in 0..3 {
        others.update(&vec![1.0; ELEMENTS]).unwrap();
        other.clock();
    }
    while let Err(error) = table.sync() {
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
    table.update(&with_nan()).unwrap();
    // Answers come in order: behind this one, the refusal is here.
    table.pull_now().unwrap().wait().unwrap();
    let gradient = vec![0.5; ELEMENTS];
    let error = table.update(&gradient).unwrap_err();
    assert!(error.to_string().contains("this update was not sent, because an earlier one"), "{error}");
    assert!(matches!(&error, ClientError::EarlierUpdate(earlier) if is_refused(earlier)), "{error:?}");
    // Nothing is wrong with this one.
    table.update(&gradient).unwrap();
    job.clock();
    table.sync().unwrap();
    assert_eq!(table.read(|values| values[ELEMENTS - 1]).unwrap(), 0.5);
    job.close().unwrap();
    stop(servers);
}

#[test]
fn a_slab_that_is_dropped_is_not_lent_any_more() {
    let servers = start_servers(&config(1, 1, "bsp"));
    let (job, table) = join(&servers, 0, TIMEOUT);
    job.start().unwrap();
    let mut slab = table.slab().unwrap();
    slab.gradient_mut().fill(1.0);
    drop(slab);
    table.push_pull(&vec![0.25; ELEMENTS]).unwrap().wait().unwrap();
    job.clock();
    assert_eq!(table.read(<[f32]>::to_vec).unwrap(), vec![0.75; ELEMENTS]);

    // An exchange that nobody waits for gives its slabs back too, and so does one that was waited for.
    let mut slabs = vec![table.slab().unwrap()];
    slabs[0].gradient_mut().fill(0.25);
    let exchange = job.exchange(&mut slabs).unwrap();
    job.clock();
    drop(exchange.wait().unwrap());
    assert_eq!(table.read(<[f32]>::to_vec).unwrap(), vec![0.5; ELEMENTS]);
    job.close().unwrap();
    stop(servers);
}

/// A slab of a job with more tables, or larger ones, ended the worker's thread.
#[test]
fn a_slab_of_another_job_is_refused_and_both_jobs_go_on() {
    let (one, two) = (start_servers(&config(1, 1, "bsp")), start_servers(&config(1, 1, "bsp")));
    let (first, table) = join(&one, 0, TIMEOUT);
    let (second, seconds) = join(&two, 0, TIMEOUT);
    first.start().unwrap();
    second.start().unwrap();
    let mut slabs = vec![table.slab().unwrap()];
    let error = second.exchange(&mut slabs).unwrap_err();
    assert!(error.to_string().contains("was lent by another worker"), "{error}");
    assert_eq!(slabs.len(), 1, "it stays");
    slabs[0].gradient_mut().fill(0.5);
    let exchange = first.exchange(&mut slabs).unwrap();
    first.clock();
    let slab = exchange.wait().unwrap().pop().unwrap();
    assert_eq!(slab.values(), vec![0.5; ELEMENTS]);
    drop(slab);
    assert_eq!(table.read(|values| values[0]).unwrap(), 0.5, "it is back where it came from");
    seconds.push_pull(&vec![0.25; ELEMENTS]).unwrap().wait().unwrap();
    first.close().unwrap();
    second.close().unwrap();
    stop(one);
    stop(two);
}

/// Every element counts the pushes of one worker: what an iteration is computed on shows how old it is.
#[test]
fn workers_compute_within_the_bound_with_a_cache_and_without_and_a_barrier_comes_after_their_pushes() {
    const WORKERS: usize = 3;
    const ITERATIONS: usize = 60;
    const BOUND: usize = 2;
    let check = |values: &[f32], iteration: usize, sync: &str| {
        let oldest = values.iter().fold(f32::INFINITY, |oldest, value| oldest.min(*value)) - 1.0;
        assert!(oldest as usize + BOUND >= iteration, "{sync}: {oldest} in iteration {iteration}");
    };
    for (sync, is_cached, lent) in [
        ("ssp:s=2", true, false),
        ("ssp:s=2,cache=off", false, false),
        ("ssp:s=2", true, true),
        ("ssp:s=2,cache=off", false, true),
    ] {
        let mut job = config(WORKERS as u32, 2, sync);
        job.policy.set(Axis::Reduce, "sum").unwrap();
        let servers = start_servers(&job);
        let work = |rank: usize| {
            let (job, table) = join(&servers, rank as u32, TIMEOUT);
            job.start().unwrap();
            let gradient: Vec<f32> =
                (0..ELEMENTS).map(|element| if element % WORKERS == rank { -1.0 } else { 0.0 }).collect();
            let mut slabs: Vec<Slab> = lent.then(|| table.slab().unwrap()).into_iter().collect();
            let mut exchange = None;
            for iteration in 0..ITERATIONS {
                if let Some(exchange) = exchange.take() {
                    slabs = Handle::wait(&exchange).unwrap();
                }
                table.sync().unwrap();
                match slabs.first() {
                    Some(slab) => check(slab.values(), iteration, sync),
                    None => check(&table.values().unwrap(), iteration, sync),
                }
                // Transient stragglers, each in its turn.
                if iteration % 9 == 3 * rank {
                    std::thread::sleep(Duration::from_millis(5));
                }
                if let Some(slab) = slabs.first_mut() {
                    slab.gradient_mut().copy_from_slice(&gradient);
                    exchange = Some(job.exchange(&mut slabs).unwrap());
                } else {
                    table.update(&gradient).unwrap();
                }
                job.clock();
            }
            // The last one is not computed on, and what it brings is given back.
            drop(exchange);
            let reads = job.report().reads;
            assert_eq!(reads.at_once + reads.after_wait, ITERATIONS as u64 - 1, "{sync}: {reads:?}");
            assert!(reads.max_staleness <= BOUND as u64, "{sync}: {reads:?}");
            job.barrier("end").unwrap();
            let all = table.pull_now().unwrap().wait().unwrap();
            assert!(all.iter().all(|value| *value == 1.0 + ITERATIONS as f32), "{sync}: a push is missing");
            job.close().unwrap();
            reads.at_once
        };
        let at_once: u64 = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..WORKERS)
                .map(|rank| {
                    scope.spawn({
                        let work = &work;
                        move || work(rank)
                    })
                })
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        assert!(!is_cached || at_once > 0, "nobody used a copy");
        stop(servers);
    }
}

/// The second worker pushes when the first one waits on all servers, and so is waited for in every round.
#[test]
fn the_status_names_the_worker_that_others_wait_for() {
    const ROUNDS: u64 = 3;
    let servers = start_servers(&config(2, 2, "bsp"));
    let (first, table) = join(&servers, 0, TIMEOUT);
    let (second, others) = join(&servers, 1, TIMEOUT);
    let gradient = vec![1.0; ELEMENTS];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            first.start().unwrap();
            for _ in 0..ROUNDS {
                table.update(&gradient).unwrap();
                first.clock();
                table.sync().unwrap();
            }
            first.barrier("trained").unwrap();
        });
        second.start().unwrap();
        for _ in 0..ROUNDS {
            let is_waited_for = |status: &Status| {
                let mut tables = status.shards.iter().flat_map(|shard| &shard.tables);
                tables.all(|table| table.waiting.iter().any(|wait| wait.worker == WorkerId(0)))
            };
            while !is_waited_for(&second.status().unwrap()) {}
            others.update(&gradient).unwrap();
            second.clock();
            others.sync().unwrap();
        }
        second.barrier("trained").unwrap();
    });
    let of_first = first.report().waited;
    assert!(of_first.of(WaitCause::Push(WorkerId(1))) > 0.0, "{of_first:?}");
    let of_second = second.report().waited;
    assert_eq!(of_second.of(WaitCause::Push(WorkerId(0))), 0.0, "{of_second:?}");
    for waited in [of_first, of_second] {
        assert!(waited.charged() <= waited.seconds * (1.0 + 1e-9), "{waited:?}");
    }
    // The coordinator adds up what workers report, with every sign of life.
    let waited = loop {
        let waited = first.status().unwrap().waited;
        if waited.of(WaitCause::Push(WorkerId(1))) > 0.0 {
            break waited;
        }
    };
    assert_eq!(waited.of(WaitCause::Push(WorkerId(0))), 0.0, "{waited:?}");
    drop((first, second));
    stop(servers);
}

/// Workers that count their own steps: who has fewer of them waits at the barrier, and nobody's round waits for it meanwhile.
#[test]
fn a_worker_with_more_steps_than_others_makes_them_while_these_wait_at_a_barrier() {
    const STEPS: [usize; 3] = [9, 4, 6];
    for sync in ["bsp", "ssp:s=1", "drop:n=3", "psp:c=3", "quorum:q=0.75"] {
        let mut job = config(STEPS.len() as u32, 2, sync);
        job.policy.set(Axis::Reduce, "mean").unwrap();
        let servers = start_servers(&job);
        let work = |rank: usize| {
            let (job, table) = join(&servers, rank as u32, TIMEOUT);
            job.start().unwrap();
            for phase in ["first", "second"] {
                for _ in 0..STEPS[rank] {
                    table.update(&vec![1.0; ELEMENTS]).unwrap();
                    job.clock();
                    table.sync().unwrap_or_else(|error| panic!("{sync}, worker {rank}, {phase}: {error}"));
                }
                job.barrier(phase).unwrap();
            }
            job.close().unwrap();
        };
        std::thread::scope(|scope| {
            for rank in 0..STEPS.len() {
                let work = &work;
                scope.spawn(move || work(rank));
            }
        });
        stop(servers);
    }
}
