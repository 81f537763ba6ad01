//! A condition that worker 0 evaluates for servers it reaches over sockets.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

mod servers;

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::table::TableSpec;
use paramill_node::client::{Asked, Job, Table};
use servers::{join, start_servers};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::Duration;

const ITERATIONS: u64 = 30;

/// Three workers with this model; the most that each of them was seen ahead of the slowest, and what the servers
/// counted: questions and fallbacks.
fn train(
    sync: &str,
    evaluate: impl Fn(&Asked) -> Result<bool, String> + Clone + Send + Sync + 'static,
) -> (Vec<f32>, u64, u64) {
    // Element `i` of the table counts the pushes of worker `i`: gradients are scaled by the number of workers.
    let policy = Policy::default().with(Axis::Sync, sync).with(Axis::Optimizer, "sgd:lr=3");
    let config = JobConfig { policy, ..JobConfig::new("conditions", 3, 2) };
    let (servers, url) = start_servers(&config, 2);
    let alone = Barrier::new(3);
    let work = |rank: u32| {
        let job = join(&url, rank);
        job.condition("near", evaluate.clone()).unwrap();
        let table = job.table(TableSpec::dense("w", [3]), vec![0.0; 3]).unwrap();
        job.start().unwrap();
        let mut gradient = [0.0; 3];
        gradient[rank as usize] = -1.0;
        let mut most = 0f32;
        for iteration in 0..ITERATIONS {
            // Worker 1 makes the first one alone, so that something is missing for it.
            if iteration == u64::from(rank == 1) {
                alone.wait();
            }
            most = most.max(iterate(&job, &table, &gradient, rank));
        }
        job.barrier("done").unwrap();
        let tables = job.status().unwrap().shards.into_iter().flat_map(|shard| shard.tables);
        let counts = tables.fold((0, 0), |(questions, fallbacks), table| {
            (questions + table.stats.questions, fallbacks + table.stats.fallbacks)
        });
        job.barrier("seen").unwrap();
        job.close().unwrap();
        (most, counts)
    };
    let ends: Vec<(f32, (u64, u64))> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3).map(|rank| scope.spawn(move || work(rank))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    servers.into_iter().for_each(|server| server.join().unwrap());
    let (questions, fallbacks) = ends[0].1;
    (ends.iter().map(|(most, _)| *most).collect(), questions, fallbacks)
}

fn iterate(job: &Job, table: &Table, gradient: &[f32], rank: u32) -> f32 {
    table.update(gradient).unwrap();
    job.clock();
    table.sync().unwrap();
    table.read(|values| values[rank as usize] - values.iter().copied().fold(f32::MAX, f32::min)).unwrap()
}

#[test]
fn nobody_is_further_ahead_than_worker_0_says() {
    let near = |asked: &Asked| Ok(asked.question.progress - asked.question.slowest() <= 2);
    let (most, questions, fallbacks) = train("remote:near,deadline=60", near);
    assert!(most.iter().all(|most| *most <= 2.0), "{most:?}");
    assert!(questions > 0 && fallbacks == 0, "{questions} questions, {fallbacks} fallbacks");
}

#[test]
fn a_condition_that_fails_leaves_it_to_the_fallback() {
    let (most, questions, fallbacks) =
        train("remote:near,deadline=60,fallback=ssp:s=1", |_| Err("no".into()));
    assert!(most.iter().all(|most| *most <= 1.0), "{most:?}");
    assert!(fallbacks > 0 && fallbacks <= questions, "{questions} questions, {fallbacks} fallbacks");
}

#[test]
fn a_condition_that_does_not_return_holds_up_nothing_but_itself() {
    let over = Arc::new((Mutex::new(false), Condvar::new()));
    let held = over.clone();
    let never = move |_: &Asked| {
        let (is_over, changed) = &*held;
        let wait =
            changed.wait_timeout_while(is_over.lock().unwrap(), Duration::from_secs(30), |over| !*over);
        drop(wait.unwrap());
        Ok(false)
    };
    let (_, questions, fallbacks) = train("remote:near,deadline=1ms,fallback=asp", never);
    assert!(questions > 0 && fallbacks > 0, "{questions} questions, {fallbacks} fallbacks");
    *over.0.lock().unwrap() = true;
    over.1.notify_all();
}
