//! Aggregators above aggregators: hosts' sums are added up by a rack's, and the results are the same.

use super::{W, job};
use crate::bench::Bench;
use crate::processes::worker_through;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::Axis;
use paramill_core::table::TableSpec;
use paramill_core::types::TableId;
use paramill_core::worker::{Gradient, PullOptions, Ticket};

const ELEMENTS: usize = 50;
const ROWS: u32 = 40;
const SPARSE: TableId = TableId(1);

fn arrival(sync: &str) -> JobConfig {
    let config = job(5, 2, sync, "sgd:lr=1");
    let policy = config.policy.clone().with(Axis::Order, "arrival").with(Axis::Reduce, "sum");
    JobConfig { policy, ..config }
}

/// The rack's aggregator is the first one, and those of two hosts are below it. Two workers go through each host's, and the
/// last one to the rack's or to the servers itself.
fn stacked(config: JobConfig, last: Option<&str>) -> Bench {
    let mut bench = Bench::without_workers(config, 2, 0);
    bench.add_aggregator_core(0, 1);
    bench.add_lower("aggregator:0");
    bench.add_lower("aggregator:0");
    for (rank, through) in
        [Some("aggregator:1"), Some("aggregator:1"), Some("aggregator:2"), Some("aggregator:2"), last]
            .into_iter()
            .enumerate()
    {
        bench.add(worker_through(bench.now(), rank, None, through));
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
    let pushed = pushing.push(now, W, Gradient::Dense(&dense), true).expect("it fits");
    let rows =
        pushing.push(now, SPARSE, Gradient::Rows { rows: &rows, values: &values }, false).expect("it fits");
    pushing.clock();
    let options = PullOptions { rows: Some(&[0, 7, 39]), now: false };
    let pulled = pushing.pull(now, SPARSE, options).expect("it has started");
    [pushed, rows, pulled].map(|ticket| (worker, ticket)).to_vec()
}

/// Rounds of everybody. `disturb` is called after each push.
fn rounds(bench: &mut Bench, rounds: u64, mut disturb: impl FnMut(&mut Bench, u64, usize)) {
    for round in 0..rounds {
        let mut tickets = Vec::new();
        for worker in 0..5 {
            tickets.extend(push(bench, worker));
            bench.run();
            disturb(bench, round, worker);
        }
        bench.pass(5.0);
        for (worker, ticket) in tickets {
            let outcome = bench.outcome(worker, ticket);
            let why = bench.explain(worker, ticket);
            assert_eq!(outcome, Some(Ok(())), "round {round}, worker {worker}: {why} {:?}", bench.log());
        }
        let parameters = bench.parameters(W, ELEMENTS);
        // Under bsp everybody has the parameters of the round; otherwise those of the moment in which it asked.
        if bench.shard(0).report(bench.now()).is_some_and(|report| report.tables[0].sync == "bsp") {
            assert!(bench.workers().all(|worker| worker.values(W) == parameters));
        }
    }
}

fn parameters(bench: &Bench) -> (Vec<f32>, Vec<f32>) {
    (bench.parameters(W, ELEMENTS), bench.parameters(SPARSE, ROWS as usize))
}

fn direct(sync: &str, count: u64) -> (Vec<f32>, Vec<f32>) {
    let mut bench = start(Bench::new(arrival(sync), 2));
    rounds(&mut bench, count, |_, _, _| {});
    parameters(&bench)
}

#[test]
fn sums_of_sums_end_with_the_same_bits() {
    for sync in ["bsp", "asp", "ssp:s=1"] {
        for last in [None, Some("aggregator:0")] {
            let mut bench = stacked(arrival(sync), last);
            rounds(&mut bench, 5, |_, _, _| {});
            assert_eq!(parameters(&bench), direct(sync, 5), "{sync}, {last:?}");
        }
    }
}

#[test]
fn one_sum_leaves_the_rack() {
    let mut bench = stacked(arrival("bsp"), Some("aggregator:0"));
    let before = bench.aggregator(0).report();
    rounds(&mut bench, 5, |_, _, _| {});
    let [rack, host, other] = [0, 1, 2].map(|index| bench.aggregator(index).report());
    // Four shards, two tables.
    assert_eq!(rack.groups - before.groups, 5 * 4 * 2);
    assert_eq!(rack.gradients - before.gradients, 5 * 5 * 4 * 2);
    assert_eq!([host.gradients, other.gradients], [2 * 5 * 4 * 2; 2]);
}

#[test]
fn connections_may_break_at_every_level_and_every_gradient_counts_once() {
    for sync in ["bsp", "asp"] {
        let expected = direct(sync, 6);
        for victim in 0..4 {
            let mut bench = stacked(arrival(sync), Some("aggregator:0"));
            rounds(&mut bench, 6, |bench, round, worker| {
                let [rack, host] = [0, 1].map(|index| bench.aggregator_node(index));
                if victim == 0 || victim == 3 {
                    bench.reset(bench.worker_node((worker + round as usize) % 2), host);
                }
                if victim == 1 || victim == 3 {
                    bench.reset(host, rack);
                }
                if victim == 2 || (victim == 3 && worker % 2 == 0) {
                    bench.reset(rack, bench.shard_node((worker + round as usize) % 4));
                }
                bench.run();
            });
            assert_eq!(parameters(&bench), expected, "{sync}, victim {victim}");
        }
    }
}
