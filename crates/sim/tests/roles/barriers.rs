//! Workers that wait at a barrier push nothing, so no round waits for them: else who has more to do would wait for them, and they for it.

use crate::bench::{Bench, COORDINATOR};
use crate::{W, job};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::Axis;
use paramill_core::table::TableSpec;
use paramill_core::worker::{Gradient, PullOptions, Ticket};

const ELEMENTS: usize = 16;

fn started(mut bench: Bench) -> Bench {
    bench.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS])]);
    bench
}

/// A gradient counts as 1, or where it has to be a share of a mean, as that.
fn summing(workers: u32, sync: &str) -> JobConfig {
    let config = job(workers, 2, sync, &format!("sgd:lr={}", if is_mean(sync) { workers } else { 1 }));
    let reduce = if is_mean(sync) { "mean" } else { "sum" };
    JobConfig { policy: config.policy.with(Axis::Reduce, reduce).with(Axis::Order, "arrival"), ..config }
}

/// Under psp the learning rate grows with the gradients in a round.
fn is_mean(sync: &str) -> bool {
    sync.starts_with("psp")
}

/// A worker's gradient is 1 in its own element.
fn push(bench: &mut Bench, worker: usize) -> Ticket {
    let mut gradient = [0.0; ELEMENTS];
    gradient[worker] = 1.0;
    let now = bench.now();
    let role = bench.worker_mut(worker);
    let ticket = role.push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
    role.clock();
    bench.pass(0.01);
    ticket
}

/// The application comes to a barrier, and waits there.
fn wait_at_barrier(bench: &mut Bench, worker: usize, name: &str) -> Ticket {
    let now = bench.now();
    let role = bench.worker_mut(worker);
    let ticket = role.barrier(now, name).expect("it may wait");
    role.begin_wait(now, ticket);
    bench.pass(0.01);
    ticket
}

/// Lets time pass until a ticket is due.
fn wait(bench: &mut Bench, worker: usize, ticket: Ticket) {
    for _ in 0..100 {
        if let Some(outcome) = bench.outcome(worker, ticket) {
            assert_eq!(outcome, Ok(()), "worker {worker}");
            return;
        }
        bench.pass(0.1);
    }
    panic!("worker {worker} waits for {}", bench.explain(worker, ticket));
}

fn versions(bench: &Bench) -> Vec<u64> {
    let reports = bench.shards().filter_map(|shard| shard.report(bench.now()));
    reports.flat_map(|report| report.tables).map(|table| table.version).collect()
}

fn applied(bench: &Bench, worker: usize) -> f32 {
    -bench.parameters(W, ELEMENTS)[worker]
}

/// Worker 0 has more steps of its own to make than the others before it comes to the barrier. After it, everybody is waited for
/// again.
fn workers_with_fewer_steps_are_not_waited_for(mut bench: Bench, sync: &str) {
    let others = 1..bench.worker_count();
    for _ in 0..2 {
        let tickets: Vec<Ticket> = (0..bench.worker_count()).map(|worker| push(&mut bench, worker)).collect();
        tickets.into_iter().enumerate().for_each(|(worker, ticket)| wait(&mut bench, worker, ticket));
    }
    let at_barrier: Vec<Ticket> =
        others.clone().map(|worker| wait_at_barrier(&mut bench, worker, "end")).collect();
    for _ in 0..6 {
        let ticket = push(&mut bench, 0);
        wait(&mut bench, 0, ticket);
    }
    // Who pushes alone makes the whole of a mean.
    let alone = if is_mean(sync) { 3.0 } else { 1.0 };
    assert_eq!(applied(&bench, 0), 2.0 + 6.0 * alone, "{sync}: all steps count");
    for (worker, ticket) in others.clone().zip(&at_barrier) {
        assert_eq!(bench.outcome(worker, *ticket), None, "{sync}: worker 0 is not there yet");
    }
    let own = wait_at_barrier(&mut bench, 0, "end");
    wait(&mut bench, 0, own);
    for (worker, ticket) in others.clone().zip(at_barrier) {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{sync}");
    }
    // Worker 0 is the first to go on. Nothing but a model that does so anyway closes its round without the others.
    let before = versions(&bench);
    let first = push(&mut bench, 0);
    if sync.starts_with("bsp") || sync.starts_with("quorum:q=1") {
        assert_eq!((versions(&bench), bench.outcome(0, first)), (before, None), "{sync}");
    }
    // The others' first gradients were computed with parameters of before the rounds that they missed. Then they are in step.
    let mut steps = 0;
    loop {
        let tickets: Vec<Ticket> = others.clone().map(|worker| push(&mut bench, worker)).collect();
        bench.pass(0.1);
        if bench.outcome(0, first).is_some() {
            wait(&mut bench, 0, first);
            break;
        }
        others.clone().zip(tickets).for_each(|(worker, ticket)| wait(&mut bench, worker, ticket));
        steps += 1;
        assert!(steps <= 3, "{sync}: worker 0 waits for {}", bench.explain(0, first));
    }
    let all: Vec<f32> = others.map(|worker| applied(&bench, worker)).collect();
    assert!(all.iter().all(|applied| *applied >= 3.0), "{sync}: {all:?}");
}

const MODELS: [&str; 12] = [
    "bsp",
    "bsp:overlap=false",
    "asp",
    "ssp:s=1",
    "ssp:s=2,cache=off",
    "dsps:min=1,max=2",
    "pssp:s=1,c=1",
    "drop:n=3",
    "psp:c=3",
    "quorum:q=0.75",
    "quorum:q=1",
    "when:pull=gap < 0,push=count >= 3,step=round",
];

#[test]
fn a_round_does_not_wait_for_workers_at_a_barrier() {
    for sync in MODELS {
        workers_with_fewer_steps_are_not_waited_for(started(Bench::new(summing(3, sync), 2)), sync);
    }
}

#[test]
fn nor_do_aggregators() {
    for sync in ["bsp", "ssp:s=1", "quorum:q=0.75"] {
        let bench = Bench::with_aggregators(summing(3, sync), 2, &[0, 0, 1]);
        workers_with_fewer_steps_are_not_waited_for(started(bench), sync);
    }
}

#[test]
fn nor_do_rounds_of_tables_that_are_broadcast() {
    for sync in ["bsp", "quorum:q=0.75"] {
        let config = summing(3, sync);
        let config = JobConfig { policy: config.policy.with(Axis::Broadcast, "star"), ..config };
        workers_with_fewer_steps_are_not_waited_for(started(Bench::new(config, 2)), sync);
    }
}

/// A handle of a barrier that nobody waits for says nothing of pushes.
#[test]
fn a_worker_that_goes_on_after_it_came_to_a_barrier_is_waited_for() {
    let mut bench = started(Bench::new(summing(2, "bsp"), 2));
    let now = bench.now();
    let barrier = bench.worker_mut(1).barrier(now, "later").unwrap();
    let ticket = push(&mut bench, 0);
    bench.pass(3.0);
    assert_eq!(bench.outcome(0, ticket), None);
    let other = push(&mut bench, 1);
    wait(&mut bench, 0, ticket);
    wait(&mut bench, 1, other);
    // It waits there now, and then pushes all the same: another thread did.
    bench.worker_mut(1).begin_wait(now, barrier);
    let other = push(&mut bench, 1);
    bench.pass(3.0);
    assert!(versions(&bench).iter().all(|version| *version == 1), "{:?}", versions(&bench));
    assert_eq!(bench.outcome(1, other), None);
    let ticket = push(&mut bench, 0);
    wait(&mut bench, 0, ticket);
    wait(&mut bench, 1, other);
    assert_eq!([0, 1].map(|worker| applied(&bench, worker)), [2.0, 2.0]);
}

/// What the coordinator and the shards know of workers at a barrier goes with these, and comes back with a connection.
#[test]
fn a_worker_that_dies_at_a_barrier_and_a_lost_connection_change_nothing() {
    let mut bench = started(Bench::new(summing(3, "bsp"), 2));
    let at_barrier: Vec<Ticket> = (1..3).map(|worker| wait_at_barrier(&mut bench, worker, "end")).collect();
    let first = push(&mut bench, 0);
    wait(&mut bench, 0, first);
    let dead = bench.worker_node(2);
    bench.world.crash(dead, bench.now());
    let shard = bench.shard_node(0);
    bench.world.break_connection(COORDINATOR, shard, "reset");
    bench.pass(20.0);
    let next = push(&mut bench, 0);
    wait(&mut bench, 0, next);
    let own = wait_at_barrier(&mut bench, 0, "end");
    wait(&mut bench, 0, own);
    assert_eq!(bench.outcome(1, at_barrier[0]), Some(Ok(())));
    // One that reads what the others made meanwhile loses no gradient.
    let now = bench.now();
    let pulled = bench.worker_mut(1).pull(now, W, PullOptions::default()).expect("it may");
    wait(&mut bench, 1, pulled);
    assert_eq!(bench.worker(1).current_clock(), 2);
    let tickets = [0, 1].map(|worker| push(&mut bench, worker));
    tickets.into_iter().enumerate().for_each(|(worker, ticket)| wait(&mut bench, worker, ticket));
    assert_eq!([0, 1].map(|worker| applied(&bench, worker)), [3.0, 1.0]);
}
