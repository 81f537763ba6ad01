//! Streams through aggregators: each of them is one receiver to the servers, and passes versions on to those behind it.

use super::W;
use super::bench::Bench;
use super::broadcast::{TREES, broadcast, pulls};
use super::processes::{worker, worker_through};
use super::stacked::{self, ELEMENTS, ROWS, SPARSE};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::worker::{PullOptions, Ticket};

const WORKERS: usize = 4;
const CODECS: [&str; 4] = ["none", "topk:0.3", "f16", "lossless+lz4"];

/// How workers and servers stand to each other.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    /// Nothing is between them.
    Direct,
    /// Two aggregators.
    Pairs,
    /// Two workers are behind an aggregator.
    Mixed,
    /// One aggregator of two cores.
    Cores,
    /// The aggregators of two hosts are behind that of a rack.
    Stacked,
}

const THROUGH: [Shape; 4] = [Shape::Pairs, Shape::Mixed, Shape::Cores, Shape::Stacked];

impl Shape {
    fn bench(self, config: JobConfig) -> Bench {
        match self {
            Shape::Direct => Bench::new(config, 2),
            Shape::Pairs => Bench::with_aggregators(config, 2, &[0, 0, 1, 1]),
            Shape::Mixed => Bench::with_aggregators(config, 2, &[0, 0]),
            Shape::Cores => Bench::with_aggregator_cores(config, 2, 2),
            Shape::Stacked => {
                let workers = config.workers as usize;
                let mut bench = Bench::without_workers(config, 2, 0);
                bench.add_aggregator_core(0, 1);
                (0..2).for_each(|_| bench.add_lower("aggregator:0"));
                for rank in 0..workers {
                    let through = format!("aggregator:{}", 1 + rank % 2);
                    bench.add(worker_through(bench.now(), rank, None, Some(&through)));
                }
                bench
            }
        }
    }
}

/// Whole numbers are added up exactly, in any order.
fn config(sync: &str, tree: &str, codec: &str) -> JobConfig {
    let config = broadcast(WORKERS as u32, 2, sync, tree);
    let policy = config.policy.clone().with(Axis::Order, "arrival").with(Axis::Reduce, "sum");
    JobConfig { policy: policy.with(Axis::AnswerCodec, codec), ..config }
}

fn tables() -> [(TableSpec, Vec<f32>); 2] {
    [
        (TableSpec::dense("w", [ELEMENTS as u64]), (0..ELEMENTS).map(|i| i as f32).collect()),
        (TableSpec::sparse("rows", ROWS.into(), 1), vec![1.0; ROWS as usize]),
    ]
}

fn started(shape: Shape, config: JobConfig) -> Bench {
    let mut bench = shape.bench(config);
    let tickets = bench.declare_and_start(&tables());
    bench.pass(2.0);
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
    }
    bench
}

/// A worker does an iteration.
fn iterate(bench: &mut Bench, worker: usize) -> [Ticket; 3] {
    let all: Vec<u32> = (0..ROWS).collect();
    let tickets = stacked::iterate(bench, worker, &all);
    bench.run();
    tickets
}

fn assert_done(bench: &mut Bench, worker: usize, tickets: [Ticket; 3]) -> Vec<f32> {
    for ticket in tickets {
        let why = bench.explain(worker, ticket);
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "worker {worker}: {why} {:?}", bench.log());
    }
    tickets.map(|ticket| bench.worker_mut(worker).redeem(ticket))[2].clone()
}

/// A round of these workers, after which all have what was published.
fn round(bench: &mut Bench, workers: &[usize]) {
    round_with(bench, workers, |_, _| {});
}

fn round_with(bench: &mut Bench, workers: &[usize], mut disturb: impl FnMut(&mut Bench, usize)) {
    let mut all = Vec::new();
    for &worker in workers {
        all.push((worker, iterate(bench, worker)));
        disturb(bench, worker);
    }
    bench.pass(5.0);
    let rows = bench.published(SPARSE, ROWS as usize);
    for (worker, tickets) in all {
        assert_eq!(assert_done(bench, worker, tickets), rows, "worker {worker}");
    }
    assert_all_hold_what_was_published(bench, workers);
}

fn assert_all_hold_what_was_published(bench: &Bench, workers: &[usize]) {
    let published = bench.published(W, ELEMENTS);
    for &worker in workers {
        assert_eq!(bench.worker(worker).values(W), published, "worker {worker}");
    }
}

const ALL: [usize; WORKERS] = [0, 1, 2, 3];

fn parameters(bench: &Bench) -> (Vec<f32>, Vec<f32>) {
    (bench.parameters(W, ELEMENTS), bench.parameters(SPARSE, ROWS as usize))
}

#[test]
fn everybody_gets_every_version_and_nobody_pulls() {
    for codec in CODECS {
        let mut direct = started(Shape::Direct, config("bsp", "star", codec));
        (0..5).for_each(|_| round(&mut direct, &ALL));
        for shape in THROUGH {
            let mut bench = started(shape, config("bsp", "star", codec));
            (0..5).for_each(|_| round(&mut bench, &ALL));
            assert_eq!(parameters(&bench), parameters(&direct), "{shape:?}, {codec}");
            assert_eq!(pulls(&bench), 0, "{shape:?}, {codec}");
        }
    }
}

/// Those who go to the servers themselves are in trees, and those behind aggregators are not.
#[test]
fn workers_behind_aggregators_are_in_no_tree() {
    for tree in TREES {
        let mut bench = started(Shape::Mixed, config("bsp", tree, "topk:0.3"));
        (0..3).for_each(|_| round(&mut bench, &ALL));
        for worker in [0, 1] {
            assert_eq!(bench.worker(worker).report().bytes_relayed, 0, "{tree}");
        }
        // An aggregator that dies is nothing to the trees.
        let aggregator = bench.aggregator_node(0);
        bench.isolate(aggregator);
        bench.pass(60.0);
        (0..3).for_each(|_| round(&mut bench, &[2, 3]));
    }
}

/// Bytes of parameters that servers have sent.
fn bytes_sent(bench: &Bench) -> u64 {
    bench.shards().filter_map(|shard| shard.report(bench.now())).map(|report| report.bytes_pulled).sum()
}

#[test]
fn servers_send_what_one_receiver_gets_whatever_the_number_behind_it() {
    for codec in ["none", "topk:0.3"] {
        let after_rounds = |shape: Shape| {
            let mut bench = started(shape, config("bsp", "star", codec));
            (0..5).for_each(|_| round(&mut bench, &ALL));
            bench
        };
        let one = bytes_sent(&after_rounds(Shape::Direct)) / WORKERS as u64;
        for (shape, receivers) in
            [(Shape::Pairs, 2), (Shape::Mixed, 3), (Shape::Cores, 1), (Shape::Stacked, 1)]
        {
            let bench = after_rounds(shape);
            assert_eq!(bytes_sent(&bench), receivers * one, "{shape:?}, {codec}");
        }
        // What came once went to everybody.
        let reports: Vec<_> = after_rounds(Shape::Pairs).aggregators().map(|it| it.report()).collect();
        for report in reports {
            let down = (report.bytes_from_servers, report.bytes_to_workers);
            assert_eq!(down, (one, 2 * one), "{codec}");
            // The values of every table, and of some codecs the last versions.
            assert!(report.memory_bytes >= 4 * (ELEMENTS as u64 + u64::from(ROWS)), "{report:?}");
        }
    }
}

#[test]
fn a_worker_blocks_when_its_clock_is_too_far_ahead_of_its_version() {
    for shape in THROUGH {
        let mut bench = started(shape, config("ssp:s=1", "star", "none"));
        let mut behind = Vec::new();
        for worker in 1..WORKERS {
            behind.push((worker, iterate(&mut bench, worker)));
            behind.push((worker, iterate(&mut bench, worker)));
        }
        bench.pass(2.0);
        let is_done = |bench: &mut Bench, (worker, tickets): (usize, [Ticket; 3])| {
            tickets.iter().all(|&ticket| bench.outcome(worker, ticket).is_some())
        };
        let done: Vec<bool> = behind.iter().map(|it| is_done(&mut bench, *it)).collect();
        assert_eq!(done, [true, false].repeat(WORKERS - 1), "{shape:?}: after two they need version 1");
        let last = iterate(&mut bench, 0);
        bench.pass(2.0);
        behind.push((0, last));
        for (worker, tickets) in behind {
            assert_done(&mut bench, worker, tickets);
        }
    }
}

#[test]
fn under_asp_replicas_are_what_was_published() {
    for shape in THROUGH {
        let mut bench = started(shape, config("asp", "chain", "topk:0.3"));
        for _ in 0..10 {
            let tickets = ALL.map(|worker| (worker, iterate(&mut bench, worker)));
            bench.pass(1.0);
            for (worker, tickets) in tickets {
                assert_done(&mut bench, worker, tickets);
            }
        }
        let now = bench.now();
        for worker in ALL {
            let ticket =
                bench.worker_mut(worker).pull(now, W, PullOptions::default()).expect("it has started");
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
        }
        assert_all_hold_what_was_published(&bench, &ALL);
    }
}

#[test]
fn streams_go_on_where_they_were_after_connections_broke() {
    for codec in CODECS {
        let mut direct = started(Shape::Direct, config("bsp", "star", codec));
        (0..8).for_each(|_| round(&mut direct, &ALL));
        for shape in THROUGH {
            for victim in 0..3 {
                let mut bench = started(shape, config("bsp", "star", codec));
                for step in 0..8 {
                    round_with(&mut bench, &ALL, |bench, worker| {
                        let first = bench.aggregator_node(0);
                        match (victim, shape) {
                            (0, _) => bench.reset(first, bench.shard_node((step + worker) % 4)),
                            (1, Shape::Stacked) => bench.reset(bench.aggregator_node(1 + worker % 2), first),
                            (1, _) => bench.reset(bench.worker_node(worker), first),
                            // In the middle of what follows from the push.
                            _ if worker == 3 => {
                                bench.reset(bench.worker_node(step % 4), bench.aggregator_node(step % 2));
                                bench.reset(first, bench.shard_node(step % 4));
                            }
                            _ => {}
                        }
                        bench.run();
                    });
                }
                assert_eq!(parameters(&bench), parameters(&direct), "{shape:?}, {codec}, victim {victim}");
            }
        }
    }
}

/// Frames of a version that are on their way to the aggregator, or from it, are lost with the connection.
#[test]
fn a_version_of_which_a_part_was_lost_is_whole_in_the_end() {
    for (shape, codec) in THROUGH.iter().flat_map(|shape| CODECS.map(|codec| (*shape, codec))) {
        for (delivered, is_above) in (0..6).flat_map(|count| [(count, true), (count, false)]) {
            let mut bench = started(shape, config("bsp", "star", codec));
            round(&mut bench, &ALL);
            let (aggregator, below) = match (shape, is_above) {
                (Shape::Stacked, false) => (bench.aggregator_node(0), bench.aggregator_node(1)),
                _ => (bench.aggregator_node(0), bench.worker_node(0)),
            };
            let (from, to) = if is_above { (bench.shard_node(0), aggregator) } else { (aggregator, below) };
            let mut tickets: Vec<_> = (0..3).map(|worker| (worker, iterate(&mut bench, worker))).collect();
            bench.world.hold(from, to);
            tickets.push((3, iterate(&mut bench, 3)));
            bench.deliver(from, to, delivered);
            bench.reset(from, to);
            bench.thaw();
            bench.pass(5.0);
            for (worker, tickets) in tickets {
                assert_done(&mut bench, worker, tickets);
            }
            assert_all_hold_what_was_published(&bench, &ALL);
            round(&mut bench, &ALL);
        }
    }
}

#[test]
fn a_worker_that_joins_gets_a_snapshot_from_its_aggregator_and_then_the_stream() {
    for codec in CODECS {
        let mut bench = started(Shape::Pairs, config("bsp", "star", codec));
        (0..4).for_each(|_| round(&mut bench, &ALL));
        let sent = bytes_sent(&bench);
        let late = bench.add(worker(bench.now(), WORKERS, None, Some(1)));
        bench.run();
        for (spec, initial) in tables() {
            bench.worker_mut(late).declare(spec, initial).expect("a table");
        }
        let now = bench.now();
        let start = bench.worker_mut(late).start(now).expect("starts once");
        bench.pass(1.0);
        assert_eq!(bytes_sent(&bench), sent, "{codec}: the servers need not send it again");
        if bench.outcome(late, start).is_none() {
            // It takes part from the round after the open one on.
            round(&mut bench, &ALL);
        }
        assert_eq!(bench.outcome(late, start), Some(Ok(())), "{}", bench.explain(late, start));
        (0..4).for_each(|_| round(&mut bench, &[0, 1, 2, 3, 4]));
    }
}

#[test]
fn streams_go_on_by_other_codecs_when_these_are_switched() {
    for shape in THROUGH {
        let mut bench = started(shape, config("bsp", "chain", "none"));
        for codec in ["topk:0.3", "none", "f16", "dvf:delta=1", "int8", "topk:0.3", "f16", "none"] {
            round(&mut bench, &ALL);
            bench.set(PolicyOverride::new("*", Policies::of([(Axis::AnswerCodec, codec)])));
            (0..2).for_each(|_| round(&mut bench, &ALL));
        }
        assert_eq!(bench.published(W, ELEMENTS), bench.parameters(W, ELEMENTS), "{shape:?}");
    }
}

/// Nothing comes for those who are gone.
#[test]
fn an_aggregator_follows_nothing_when_nobody_does() {
    let mut bench = started(Shape::Mixed, config("bsp", "star", "none"));
    round(&mut bench, &ALL);
    let now = bench.now();
    let left = [0, 1].map(|worker| bench.worker_mut(worker).leave(now));
    bench.pass(1.0);
    assert!([0, 1].iter().zip(left).all(|(worker, ticket)| bench.outcome(*worker, ticket).is_some()));
    for worker in [0, 1] {
        bench.isolate(bench.worker_node(worker));
    }
    bench.pass(1.0);
    let before = (bench.aggregator(0).report().bytes_from_servers, bytes_sent(&bench));
    (0..3).for_each(|_| round(&mut bench, &[2, 3]));
    assert_eq!(bench.aggregator(0).report().bytes_from_servers, before.0);
    assert!(bytes_sent(&bench) > before.1);
}

#[test]
fn those_behind_an_aggregator_go_on_when_one_of_them_dies() {
    for shape in THROUGH {
        let mut bench = started(shape, config("bsp", "star", "topk:0.3"));
        (0..2).for_each(|_| round(&mut bench, &ALL));
        let node = bench.worker_node(1);
        bench.isolate(node);
        bench.pass(60.0);
        (0..3).for_each(|_| round(&mut bench, &[0, 2, 3]));
    }
}

/// What a codec does by the rates of links is for those who have links to the servers.
#[test]
fn thresholds_that_follow_links_are_refused() {
    for axis in [Axis::Codec, Axis::AnswerCodec] {
        let plain = config("bsp", "star", "none");
        let policy = plain.policy.clone().with(axis, "dvf:low=0.1,up=0.2,need=10");
        let mut bench = Shape::Pairs.bench(JobConfig { policy, ..plain });
        let tickets = bench.declare_and_start(&tables());
        bench.pass(2.0);
        let outcome = bench.outcome(0, tickets[0]).expect("it is refused").unwrap_err();
        assert!(outcome.to_string().contains("behind an aggregator"), "{outcome}");
    }
}
