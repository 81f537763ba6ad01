//! Aggregators that are killed at any time and started anew: nothing is lost, nothing counts twice, and the job goes on.

use super::{W, job};
use crate::bench::Bench;
use crate::processes::{aggregator_core, worker_through};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::Axis;
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, TableId, WorkerId};
use paramill_core::worker::{Gradient, Ticket};

const ELEMENTS: usize = 96;
const ROWS: u32 = 40;
const SPARSE: TableId = TableId(1);
const WORKERS: usize = 4;

fn config(sync: &str, order: &str) -> JobConfig {
    let config = job(WORKERS as u32, 1, sync, "sgd:lr=1");
    let policy = config.policy.clone().with(Axis::Order, order).with(Axis::Reduce, "sum");
    JobConfig { policy, ..config }
}

/// All workers behind one aggregator, or two behind each of two hosts' under a rack's, which is the first one.
fn bench(config: JobConfig, is_stacked: bool) -> Bench {
    let mut bench = Bench::without_workers(config, 1, 0);
    bench.add_aggregator_core(0, 1);
    if is_stacked {
        bench.add_lower("aggregator:0");
        bench.add_lower("aggregator:0");
    }
    for rank in 0..WORKERS {
        let through =
            if is_stacked { format!("aggregator:{}", 1 + rank / 2) } else { "aggregator:0".to_owned() };
        bench.add(worker_through(bench.now(), rank, None, Some(&through)));
    }
    start(bench)
}

fn start(mut bench: Bench) -> Bench {
    let tables = [
        (TableSpec::dense("w", [ELEMENTS as u64]), vec![1.0; ELEMENTS]),
        (TableSpec::sparse("rows", ROWS.into(), 1), vec![1.0; ROWS as usize]),
    ];
    bench.declare_and_start(&tables);
    bench.pass(2.0);
    bench
}

fn restart(bench: &mut Bench, index: usize, process: u64) {
    let above = (index > 0).then_some("aggregator:0");
    let node = bench.aggregator_node(index);
    bench.world.crash(node, bench.now());
    bench.world.restart(node, bench.now(), move |now| aggregator_core(now, process, index, 0, 1, above));
}

/// Whole numbers: adding them is exact in any order.
fn value(worker: usize, clock: u64, place: usize) -> f32 {
    ((worker * 7 + clock as usize * 3 + place) % 16) as f32 - 8.0
}

fn push(bench: &mut Bench, worker: usize) -> Vec<(usize, Ticket)> {
    let (now, clock) = (bench.now(), bench.worker(worker).current_clock());
    let dense: Vec<f32> = (0..ELEMENTS).map(|place| value(worker, clock, place)).collect();
    let rows: Vec<u32> = (0..ROWS).filter(|row| (row + worker as u32).is_multiple_of(3)).collect();
    let values: Vec<f32> = rows.iter().map(|&row| value(worker, clock, row as usize)).collect();
    let pushing = bench.worker_mut(worker);
    let dense = pushing.push(now, W, Gradient::Dense(&dense), true).expect("it fits");
    let rows = pushing.push(now, SPARSE, Gradient::Rows { rows: &rows, values: &values }, false);
    let rows = rows.expect("it fits");
    pushing.clock();
    vec![(worker, dense), (worker, rows)]
}

fn finish(bench: &mut Bench, tickets: Vec<(usize, Ticket)>, what: &str) {
    bench.pass(8.0);
    for (worker, ticket) in tickets {
        let outcome = bench.outcome(worker, ticket);
        let why = bench.explain(worker, ticket);
        assert_eq!(outcome, Some(Ok(())), "{what}, worker {worker}: {why} {:?}", bench.log());
    }
}

fn round(bench: &mut Bench, what: &str) {
    let tickets = (0..WORKERS).flat_map(|worker| push(bench, worker)).collect();
    bench.run();
    finish(bench, tickets, what);
}

/// The parameters after these rounds, whatever has happened.
fn assert_parameters(bench: &Bench, rounds: u64, what: &str) {
    let sum = |place: usize, touches: &dyn Fn(usize) -> bool| -> f32 {
        let pushes = (0..WORKERS).filter(|worker| touches(*worker));
        pushes.flat_map(|worker| (0..rounds).map(move |clock| value(worker, clock, place))).sum()
    };
    let expected: Vec<f32> = (0..ELEMENTS).map(|place| 1.0 - sum(place, &|_| true)).collect();
    assert_eq!(bench.parameters(W, ELEMENTS), expected, "{what} {:?}", bench.log());
    let expected: Vec<f32> =
        (0..ROWS as usize).map(|row| 1.0 - sum(row, &|worker| (row + worker).is_multiple_of(3))).collect();
    assert_eq!(bench.parameters(SPARSE, ROWS as usize), expected, "{what}");
}

/// Frames of each worker that its aggregator gets before it is killed, frames of that one which get to the next, and from there to the
/// shard; and what of the shard's answers comes back.
fn killed_after(sync: &str, order: &str, is_stacked: bool, victims: &[usize], frames: [usize; 4]) {
    let what = format!("{sync} {order}, stacked {is_stacked}, {victims:?} after {frames:?}");
    let mut bench = bench(config(sync, order), is_stacked);
    round(&mut bench, &what);
    bench.freeze();
    let tickets = (0..WORKERS).flat_map(|worker| push(&mut bench, worker)).collect();
    let (shard, rack) = (bench.shard_node(0), bench.aggregator_node(0));
    let above: Vec<NodeId> = (0..WORKERS)
        .map(|worker| bench.aggregator_node(if is_stacked { 1 + worker / 2 } else { 0 }))
        .collect();
    let [from_workers, from_hosts, from_rack, answers] = frames;
    for (worker, &aggregator) in above.iter().enumerate() {
        // One is ahead of the others.
        let count = if worker == 1 { usize::MAX } else { from_workers };
        bench.deliver(bench.worker_node(worker), aggregator, count);
    }
    if is_stacked {
        for host in [1, 2] {
            bench.deliver(bench.aggregator_node(host), rack, from_hosts);
        }
    }
    bench.deliver(rack, shard, from_rack);
    bench.deliver(shard, rack, answers);
    for (process, &victim) in (900..).zip(victims) {
        restart(&mut bench, victim, process);
    }
    bench.thaw();
    finish(&mut bench, tickets, &what);
    assert_parameters(&bench, 2, &what);
    for _ in 0..2 {
        round(&mut bench, &what);
    }
    assert_parameters(&bench, 4, &what);
    let stats = &bench.shard(0).report(bench.now()).expect("it has a number").tables[0].stats;
    assert_eq!(stats.pushes, 4 * WORKERS as u64, "{what}");
}

const SOME: [usize; 4] = [0, 3, 7, usize::MAX];

#[test]
fn an_aggregator_is_killed_at_any_time_and_everything_counts_once() {
    for sync in ["bsp", "asp", "ssp:s=1"] {
        for from_workers in SOME {
            for from_rack in SOME {
                for answers in [0, usize::MAX] {
                    killed_after(sync, "arrival", false, &[0], [from_workers, 0, from_rack, answers]);
                }
            }
        }
    }
}

#[test]
fn gradients_that_stay_alone_are_not_lost_either() {
    for from_workers in SOME {
        killed_after("bsp", "ranked", false, &[0], [from_workers, 0, 5, usize::MAX]);
    }
}

#[test]
fn hosts_and_racks_are_killed_at_any_time() {
    for victims in [&[0][..], &[1], &[2, 1], &[0, 1]] {
        for from_workers in [0, 7, usize::MAX] {
            for from_hosts in [0, 4, usize::MAX] {
                for from_rack in [0, 4, usize::MAX] {
                    let frames = [from_workers, from_hosts, from_rack, usize::MAX];
                    killed_after("bsp", "arrival", true, victims, frames);
                }
                let frames = [from_workers, from_hosts, 4, 0];
                killed_after("asp", "arrival", true, victims, frames);
            }
        }
    }
}

/// The sums that a dead aggregator has sent are read by the shard when its workers have begun to send their pushes again.
#[test]
fn what_a_dead_aggregator_sent_may_be_read_last() {
    let mut bench = bench(config("bsp", "arrival"), true);
    round(&mut bench, "before");
    let (shard, rack) = (bench.shard_node(0), bench.aggregator_node(0));
    bench.world.hold(rack, shard);
    let tickets = (0..WORKERS).flat_map(|worker| push(&mut bench, worker)).collect();
    bench.run();
    // A host's dies, and that of the rack has sums of it on their way.
    bench.deliver(rack, shard, 3);
    restart(&mut bench, 1, 901);
    bench.pass(0.5);
    bench.world.release(rack, shard);
    finish(&mut bench, tickets, "read last");
    assert_parameters(&bench, 2, "read last");
    round(&mut bench, "after");
    assert_parameters(&bench, 3, "after");
    assert!(bench.worker(0).id() == Some(WorkerId(0)));
}

#[test]
fn one_that_is_killed_again_and_again_is_no_matter() {
    let mut bench = bench(config("bsp", "arrival"), true);
    let mut process = 900;
    for clock in 0..6u64 {
        let mut tickets = Vec::new();
        for worker in 0..WORKERS {
            tickets.extend(push(&mut bench, worker));
            bench.run();
            process += 1;
            restart(&mut bench, (worker + clock as usize) % 3, process);
            bench.pass(0.3);
        }
        finish(&mut bench, tickets, &format!("clock {clock}"));
        assert_parameters(&bench, clock + 1, "again and again");
    }
}
