//! Aggregators above aggregators: hosts' sums are added up by a rack's, and the results are the same.

use super::{W, job};
use crate::bench::Bench;
use crate::processes::worker_through;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, TableId};
use paramill_core::worker::{Gradient, PullOptions, Ticket};

pub(crate) const ELEMENTS: usize = 50;
pub(crate) const ROWS: u32 = 40;
pub(crate) const SPARSE: TableId = TableId(1);

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

/// A worker does an iteration, and then pulls these rows.
pub(crate) fn iterate(bench: &mut Bench, worker: usize, pulled: &[u32]) -> [Ticket; 3] {
    let (now, clock) = (bench.now(), bench.worker(worker).current_clock());
    let dense: Vec<f32> = (0..ELEMENTS).map(|place| value(worker, clock, place)).collect();
    let rows: Vec<u32> = (0..ROWS).filter(|row| (row + worker as u32).is_multiple_of(3)).collect();
    let values: Vec<f32> = rows.iter().map(|&row| value(worker, clock, row as usize)).collect();
    let pushing = bench.worker_mut(worker);
    let pushed = pushing.push(now, W, Gradient::Dense(&dense), true).expect("it fits");
    let rows = Gradient::Rows { rows: &rows, values: &values };
    let rows = pushing.push(now, SPARSE, rows, false).expect("it fits");
    pushing.clock();
    let options = PullOptions { rows: Some(pulled), now: false };
    let pulled = pushing.pull(now, SPARSE, options).expect("it has started");
    [pushed, rows, pulled]
}

fn push(bench: &mut Bench, worker: usize) -> Vec<(usize, Ticket)> {
    iterate(bench, worker, &[0, 7, 39]).map(|ticket| (worker, ticket)).to_vec()
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

fn set(bench: &mut Bench, axis: Axis, text: &str) {
    bench.set(PolicyOverride::new("*", Policies::of([(axis, text)])));
}

/// Pushes that stay alone are passed on one by one. An aggregator above that has heard of another model adds them up, and the
/// one below waits for their acknowledgements all the same.
#[test]
fn levels_may_hear_of_a_model_one_after_the_other() {
    let alone = "pssp:s=1,alpha=significance";
    for (before, next) in [(alone, "asp"), ("asp", alone)] {
        for late in [&[1, 2][..], &[0]] {
            let mut bench = stacked(arrival(before), None);
            let late: Vec<NodeId> = late.iter().map(|&index| bench.aggregator_node(index)).collect();
            late.iter().for_each(|&node| bench.world.hold(NodeId::Coordinator, node));
            set(&mut bench, Axis::Sync, next);
            rounds(&mut bench, 2, |_, _, _| {});
            late.iter().for_each(|&node| bench.world.release(NodeId::Coordinator, node));
            rounds(&mut bench, 2, |_, _, _| {});
            assert_eq!(parameters(&bench), direct("asp", 4), "{before}, then {next}");
        }
    }
}

/// A shard that has heard of other codecs takes a sum, and says that the answer is to be asked for again. The aggregator below
/// has to hear of the first before the second, although its earlier list is still held above: it would have the push made
/// anew.
#[test]
fn an_answer_that_is_refused_does_not_take_its_push_back() {
    let mut bench = Bench::without_workers(JobConfig { workers: 2, servers: 1, ..arrival("asp") }, 1, 0);
    bench.add_aggregator_core(0, 1);
    for host in 1..3 {
        bench.add_lower("aggregator:0");
        bench.add(worker_through(bench.now(), host - 1, None, Some(&format!("aggregator:{host}"))));
    }
    let table = |name: &str| (TableSpec::dense(name, [4]), vec![0.0; 4]);
    bench.declare_and_start(&[table("held"), table("whole")]);
    bench.pass(2.0);
    let (held, whole) = (W, TableId(1));
    let aggregators = [0, 1, 2].map(|index| bench.aggregator_node(index));
    aggregators.iter().for_each(|&node| bench.world.hold(NodeId::Coordinator, node));
    set(&mut bench, Axis::AnswerCodec, "lossless");
    let push = |bench: &mut Bench, worker: usize, table: TableId| {
        let now = bench.now();
        let ticket = bench.worker_mut(worker).push(now, table, Gradient::Dense(&[1.0; 4]), true);
        bench.run();
        (worker, ticket.expect("it fits"))
    };
    // Of the first table the rack's aggregator waits for worker 1, of the second it does not.
    let mut tickets = vec![push(&mut bench, 0, held), push(&mut bench, 0, whole), push(&mut bench, 1, whole)];
    aggregators.iter().for_each(|&node| bench.world.release(NodeId::Coordinator, node));
    tickets.push(push(&mut bench, 1, held));
    bench.pass(2.0);
    for (worker, ticket) in tickets {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{:?}", bench.log());
    }
    assert_eq!([held, whole].map(|table| bench.parameters(table, 4)), [[-2.0; 4]; 2]);
}

#[test]
fn aggregators_that_go_through_each_other_end_and_say_so() {
    let mut bench = Bench::without_workers(job(1, 1, "bsp", "sgd:lr=1"), 1, 0);
    bench.add_lower("aggregator:1");
    bench.add_lower("aggregator:0");
    bench.add(worker_through(bench.now(), 0, None, None));
    bench.declare_and_start(&[(TableSpec::dense("w", [4]), vec![0.0; 4])]);
    bench.pass(20.0);
    let stopped: Vec<String> = bench.stopped().into_iter().flatten().collect();
    assert!(stopped.iter().any(|why| why.contains("go through each other in a circle")), "{stopped:?}");
}

/// Hosts and the rack have entered an epoch that a shard has not. A sum of a push of which other chunks were taken before
/// must not be refused for that: the push would begin anew.
#[test]
fn a_shard_that_hears_late_of_other_codecs_takes_every_chunk_once() {
    for frames in 0..12 {
        let mut bench = stacked(arrival("asp"), None);
        let (rack, host) = (bench.aggregator_node(0), bench.aggregator_node(1));
        (0..4).for_each(|index| bench.world.hold(NodeId::Coordinator, bench.shard_node(index)));
        bench.world.hold(host, rack);
        let mut tickets = push(&mut bench, 0);
        tickets.extend(push(&mut bench, 1));
        bench.deliver(host, rack, frames);
        set(&mut bench, Axis::Codec, "lossless");
        bench.world.release(host, rack);
        bench.pass(0.1);
        (0..4).for_each(|index| bench.world.release(NodeId::Coordinator, bench.shard_node(index)));
        (2..5).for_each(|worker| tickets.extend(push(&mut bench, worker)));
        bench.pass(5.0);
        for (worker, ticket) in tickets {
            assert_eq!(
                bench.outcome(worker, ticket),
                Some(Ok(())),
                "after {frames} frames: {:?}",
                bench.log()
            );
        }
        assert_eq!(parameters(&bench), direct("asp", 1), "after {frames} frames");
    }
}
