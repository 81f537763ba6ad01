//! The roles together in a world whose network takes no time: start, train, fail, go on.

mod absence;
mod aggregated_codecs;
mod aggregated_rows;
mod aggregated_streams;
mod aggregation;
mod ahead;
mod barriers;
mod bench;
mod broadcast;
mod broadcast_rows;
mod checkpoints;
mod codec_switches;
mod codecs;
mod conditions;
mod copies;
mod held;
mod hostile;
mod images;
mod joining;
mod landing;
mod layers;
mod lemmas;
mod local;
mod membership;
mod policies;
mod processes;
mod psp;
mod quorum;
mod reader_rights;
mod readers;
mod recovery;
mod restarted_aggregators;
mod slabs;
mod stacked;
mod table_iii;
mod tally;
mod waits;

use bench::Bench;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::TableId;
use paramill_core::worker::{Gradient, PullOptions, WorkerError};

const W: TableId = TableId(0);

fn job(workers: u32, servers: u32, sync: &str, optimizer: &str) -> JobConfig {
    let policy = Policy::default()
        .with(Axis::Sync, sync)
        .with(Axis::Optimizer, optimizer)
        .with(Axis::Order, "ranked")
        .with(Axis::Placement, "uniform")
        .with(Axis::Chunk, "32B");
    JobConfig { policy, ..JobConfig::new("test", workers, servers) }
}

fn started(config: JobConfig, cores: u32, elements: usize) -> Bench {
    let mut bench = Bench::new(config, cores);
    let initial = (0..elements).map(|i| i as f32).collect();
    bench.start(&[(TableSpec::dense("w", [elements as u64]), initial)]);
    bench
}

#[test]
fn initial_values_reach_every_worker() {
    let bench = started(job(3, 2, "bsp", "sgd:lr=1"), 2, 50);
    for worker in bench.workers() {
        let expected: Vec<f32> = (0..50).map(|i| i as f32).collect();
        assert_eq!(worker.values(W), expected);
    }
}

#[test]
fn bsp_averages_gradients_and_everybody_reads_the_same() {
    let mut bench = started(job(4, 2, "bsp", "sgd:lr=1"), 2, 50);
    for step in 0..3 {
        let tickets: Vec<_> = (0..4)
            .map(|worker| {
                let gradient = vec![(worker + 1) as f32; 50];
                let now = bench.now();
                let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).unwrap();
                bench.worker_mut(worker).clock();
                bench.run();
                ticket
            })
            .collect();
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
            let expected: Vec<f32> = (0..50).map(|i| i as f32 - 2.5 * (step + 1) as f32).collect();
            assert_eq!(bench.worker(worker).values(W), expected, "worker {worker} step {step}");
        }
    }
}

#[test]
fn a_push_that_is_sent_again_after_a_reset_is_applied_once() {
    for is_delivered in [false, true] {
        let mut bench = started(job(1, 2, "bsp", "sgd:lr=1"), 1, 50);
        let (worker, shards) = (bench.worker_node(0), [0, 1].map(|shard| bench.shard_node(shard)));
        shards.into_iter().for_each(|shard| bench.world.hold(shard, worker));
        let now = bench.now();
        let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; 50]), true).unwrap();
        if is_delivered {
            // The answers, which are the acknowledgements too, are lost.
            bench.run();
            assert!(shards.iter().all(|&shard| bench.world.unread(shard, worker).count() > 0));
        }
        shards.into_iter().for_each(|shard| bench.reset(worker, shard));
        bench.thaw();
        bench.pass(1.0);
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
        let expected: Vec<f32> = (0..50).map(|i| i as f32 - 1.0).collect();
        assert_eq!(bench.parameters(W, 50), expected);
        assert_eq!(bench.worker(0).values(W), expected);
    }
}

#[test]
fn a_worker_that_dies_is_declared_dead_and_the_others_go_on() {
    let mut bench = started(job(3, 1, "bsp", "sgd:lr=1"), 1, 20);
    let tickets: Vec<_> = (0..2)
        .map(|worker| {
            let now = bench.now();
            bench.worker_mut(worker).push(now, W, Gradient::Dense(&[1.0; 20]), true).unwrap()
        })
        .collect();
    bench.run();
    assert_eq!(bench.outcome(0, tickets[0]), None);
    bench.isolate(bench.worker_node(2));
    bench.pass(5.0);
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{:?}", bench.log());
    }
    assert_eq!(bench.parameters(W, 20)[0], -1.0);
    assert!(bench.log().iter().any(|line| line.contains("worker 2 is declared dead")), "{:?}", bench.log());
}

#[test]
fn an_unreachable_server_is_named_after_a_deadline() {
    let mut bench = started(job(1, 2, "bsp", "sgd:lr=1"), 1, 50);
    bench.isolate(bench.shard_node(1));
    let now = bench.now();
    let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; 50]), true).unwrap();
    bench.pass(10.0);
    assert_eq!(bench.outcome(0, ticket), None);
    let sentence = bench.explain(0, ticket);
    assert!(sentence.contains("server 1 core 0 at shard:1 is not connected"), "{sentence}");
    bench.pass(25.0);
    match bench.outcome(0, ticket) {
        Some(Err(WorkerError::Unreachable(sentence))) => {
            assert!(sentence.contains("server 1 core 0 at shard:1 is unreachable"), "{sentence}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn shape_order_and_nan_are_errors_that_change_nothing() {
    let mut bench = started(job(1, 1, "bsp", "sgd:lr=1"), 1, 20);
    let now = bench.now();
    let worker = bench.worker_mut(0);
    let short = worker.push(now, W, Gradient::Dense(&[1.0; 19]), true).unwrap_err();
    assert_eq!(short.to_string(), "table `w`: expected 20 elements (shape [20]), got 19");
    let mut gradient = [1.0; 20];
    gradient[7] = f32::NAN;
    let nan = worker.push(now, W, Gradient::Dense(&gradient), true).unwrap_err();
    assert!(nan.to_string().contains("table `w` at clock 0 has NaN or Inf"), "{nan}");
    let rows = worker.push(now, W, Gradient::Rows { rows: &[1], values: &[1.0] }, true).unwrap_err();
    assert!(rows.to_string().contains("it is dense"), "{rows}");
    worker.push(now, W, Gradient::Dense(&[0.0; 20]), true).unwrap();
    let twice = worker.push(now, W, Gradient::Dense(&[0.0; 20]), true).unwrap_err();
    assert!(twice.to_string().contains("pushed at clock 0 already"), "{twice}");
    bench.run();
    assert_eq!(bench.parameters(W, 20), (0..20).map(|i| i as f32).collect::<Vec<_>>());
}

#[test]
fn the_server_clips_nan_when_told_to() {
    let mut config = job(1, 1, "asp", "sgd:lr=1");
    config.policy.set(Axis::NonFinite, "clip").unwrap();
    let mut bench = started(config, 1, 3);
    let now = bench.now();
    bench.worker_mut(0).push(now, W, Gradient::Dense(&[f32::NAN, 2.0, f32::NEG_INFINITY]), true).unwrap();
    bench.run();
    assert_eq!(bench.parameters(W, 3), [0.0, -1.0, 4.0]);
}

#[test]
fn sparse_rows_are_pushed_and_pulled_alone() {
    for sync in ["bsp", "asp"] {
        let mut bench = Bench::new(job(2, 2, sync, "sgd:lr=1"), 2);
        bench.start(&[(TableSpec::sparse("rows", 100, 3), vec![1.0; 300])]);
        let now = bench.now();
        bench
            .worker_mut(0)
            .push(now, W, Gradient::Rows { rows: &[0, 57, 99], values: &[2.0; 9] }, false)
            .unwrap();
        bench.worker_mut(1).push(now, W, Gradient::Rows { rows: &[57], values: &[2.0; 3] }, false).unwrap();
        bench.worker_mut(0).clock();
        bench.worker_mut(1).clock();
        bench.run();
        let ticket =
            bench.worker_mut(1).pull(now, W, PullOptions { rows: Some(&[1, 57, 99]), now: false }).unwrap();
        bench.run();
        assert_eq!(bench.outcome(1, ticket), Some(Ok(())), "{sync}");
        let rows = bench.worker_mut(1).redeem(ticket);
        assert_eq!(rows, [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0], "{sync}");
    }
}

#[test]
fn workers_that_declare_other_tables_are_told_which() {
    let mut bench = Bench::new(job(2, 1, "bsp", "sgd:lr=1"), 1);
    let now = bench.now();
    bench.worker_mut(0).declare(TableSpec::dense("w", [4]), vec![0.0; 4]).unwrap();
    bench.worker_mut(1).declare(TableSpec::dense("w", [5]), vec![0.0; 5]).unwrap();
    let first = bench.worker_mut(0).start(now).unwrap();
    let second = bench.worker_mut(1).start(now).unwrap();
    bench.run();
    let errors: Vec<String> = [(0, first), (1, second)]
        .into_iter()
        .filter_map(|(worker, ticket)| bench.outcome(worker, ticket)?.err())
        .map(|error| error.to_string())
        .collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].contains("all workers must declare the same tables"), "{}", errors[0]);
}

#[test]
fn policies_follow_globs_and_tables() {
    let mut config = job(1, 1, "bsp", "sgd:lr=1");
    config.overrides = vec![PolicyOverride::new("a*", Policies::of([(Axis::Sync, "asp")]))];
    let mut bench = Bench::new(config, 1);
    let own = Policies::of([(Axis::Optimizer, "sgd:lr=2")]);
    let special = TableSpec { policy: own, ..TableSpec::dense("b", [1]) };
    bench.start(&[(TableSpec::dense("a", [1]), vec![0.0]), (special, vec![0.0])]);
    let now = bench.now();
    bench.worker_mut(0).push(now, TableId(0), Gradient::Dense(&[1.0]), true).unwrap();
    let now = bench.now();
    bench.worker_mut(0).push(now, TableId(1), Gradient::Dense(&[1.0]), true).unwrap();
    bench.run();
    assert_eq!((bench.parameters(TableId(0), 1), bench.parameters(TableId(1), 1)), (vec![-1.0], vec![-2.0]));
    let report = bench.shard(0).report(bench.now()).unwrap();
    assert_eq!((report.tables[0].sync.as_str(), report.tables[1].sync.as_str()), ("asp", "bsp"));
}

#[test]
fn without_overlap_pulls_wait_for_the_scheduler() {
    let mut bench = started(job(2, 2, "bsp:overlap=false", "sgd:lr=1"), 1, 50);
    for step in 1..=3 {
        let tickets: Vec<_> = (0..2)
            .map(|worker| {
                let now = bench.now();
                let ticket =
                    bench.worker_mut(worker).push(now, W, Gradient::Dense(&[1.0; 50]), true).unwrap();
                bench.worker_mut(worker).clock();
                bench.run();
                ticket
            })
            .collect();
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
            assert_eq!(bench.worker(worker).values(W)[0], -(step as f32));
        }
    }
}

#[test]
fn a_barrier_and_leaving_end_the_job() {
    let mut bench = started(job(2, 1, "asp", "sgd:lr=1"), 1, 4);
    let now = bench.now();
    let first = bench.worker_mut(0).barrier(now, "end").unwrap();
    bench.run();
    assert_eq!(bench.outcome(0, first), None);
    let second = bench.worker_mut(1).barrier(now, "end").unwrap();
    bench.run();
    assert_eq!((bench.outcome(0, first), bench.outcome(1, second)), (Some(Ok(())), Some(Ok(()))));
    let status = bench.worker_mut(0).query_status(now).unwrap();
    bench.run();
    assert_eq!(bench.outcome(0, status), Some(Ok(())));
    assert_eq!(bench.worker_mut(0).take_status(status).unwrap().shards.len(), 1);
    for worker in 0..2 {
        let ticket = bench.worker_mut(worker).leave(now);
        bench.run();
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
    }
    assert_eq!(bench.stopped(), [None, None], "coordinator and shard stop without an error");
}
