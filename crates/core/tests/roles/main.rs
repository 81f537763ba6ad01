//! The roles together, without a driver: start, train, fail, go on.

mod absence;
mod aggregated_codecs;
mod aggregation;
mod ahead;
mod codec_switches;
mod codecs;
mod joining;
mod landing;
mod membership;
mod policies;
mod psp;
mod pump;
mod slabs;

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::TableId;
use paramill_core::worker::{Gradient, PullOptions, WorkerError};
use pump::Pump;

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

fn started(config: JobConfig, cores: u32, elements: usize) -> Pump {
    let mut pump = Pump::new(config, cores);
    let initial = (0..elements).map(|i| i as f32).collect();
    pump.start(&[(TableSpec::dense("w", [elements as u64]), initial)]);
    pump
}

#[test]
fn initial_values_reach_every_worker() {
    let pump = started(job(3, 2, "bsp", "sgd:lr=1"), 2, 50);
    for worker in &pump.workers {
        let expected: Vec<f32> = (0..50).map(|i| i as f32).collect();
        assert_eq!(worker.values(W), expected);
    }
}

#[test]
fn bsp_averages_gradients_and_everybody_reads_the_same() {
    let mut pump = started(job(4, 2, "bsp", "sgd:lr=1"), 2, 50);
    for step in 0..3 {
        let tickets: Vec<_> = (0..4)
            .map(|worker| {
                let gradient = vec![(worker + 1) as f32; 50];
                let now = pump.now;
                let ticket = pump.workers[worker].push(now, W, Gradient::Dense(&gradient), true).unwrap();
                pump.workers[worker].clock();
                pump.run();
                ticket
            })
            .collect();
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(pump.outcome(worker, ticket), Some(Ok(())));
            let expected: Vec<f32> = (0..50).map(|i| i as f32 - 2.5 * (step + 1) as f32).collect();
            assert_eq!(pump.workers[worker].values(W), expected, "worker {worker} step {step}");
        }
    }
}

#[test]
fn a_push_that_is_sent_again_after_a_reset_is_applied_once() {
    let mut pump = started(job(1, 2, "bsp", "sgd:lr=1"), 1, 50);
    let ticket = pump.workers[0].push(pump.now, W, Gradient::Dense(&[1.0; 50]), true).unwrap();
    // Delivered, but the acknowledgement is lost on both connections.
    pump.reset(pump.worker_node(0), 1);
    pump.run();
    pump.pass(1.0);
    assert_eq!(pump.outcome(0, ticket), Some(Ok(())));
    let expected: Vec<f32> = (0..50).map(|i| i as f32 - 1.0).collect();
    assert_eq!(pump.parameters(W, 50), expected);
    assert_eq!(pump.workers[0].values(W), expected);
}

#[test]
fn a_worker_that_dies_is_declared_dead_and_the_others_go_on() {
    let mut pump = started(job(3, 1, "bsp", "sgd:lr=1"), 1, 20);
    let tickets: Vec<_> = (0..2)
        .map(|worker| {
            let now = pump.now;
            pump.workers[worker].push(now, W, Gradient::Dense(&[1.0; 20]), true).unwrap()
        })
        .collect();
    pump.run();
    assert_eq!(pump.outcome(0, tickets[0]), None);
    pump.isolate(pump.worker_node(2));
    pump.pass(5.0);
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(pump.outcome(worker, ticket), Some(Ok(())), "{:?}", pump.log);
    }
    assert_eq!(pump.parameters(W, 20)[0], -1.0);
    assert!(pump.log.iter().any(|line| line.contains("worker 2 is declared dead")), "{:?}", pump.log);
}

#[test]
fn an_unreachable_server_is_named_after_a_deadline() {
    let mut pump = started(job(1, 2, "bsp", "sgd:lr=1"), 1, 50);
    pump.isolate(2);
    let ticket = pump.workers[0].push(pump.now, W, Gradient::Dense(&[1.0; 50]), true).unwrap();
    pump.pass(10.0);
    assert_eq!(pump.outcome(0, ticket), None);
    let sentence = pump.explain(0, ticket);
    assert!(sentence.contains("server 1 core 0 at shard:1 is not connected"), "{sentence}");
    pump.pass(25.0);
    match pump.outcome(0, ticket) {
        Some(Err(WorkerError::Unreachable(sentence))) => {
            assert!(sentence.contains("server 1 core 0 at shard:1 is unreachable"), "{sentence}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn shape_order_and_nan_are_errors_that_change_nothing() {
    let mut pump = started(job(1, 1, "bsp", "sgd:lr=1"), 1, 20);
    let now = pump.now;
    let worker = &mut pump.workers[0];
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
    pump.run();
    assert_eq!(pump.parameters(W, 20), (0..20).map(|i| i as f32).collect::<Vec<_>>());
}

#[test]
fn the_server_clips_nan_when_told_to() {
    let mut config = job(1, 1, "asp", "sgd:lr=1");
    config.policy.set(Axis::NonFinite, "clip").unwrap();
    let mut pump = started(config, 1, 3);
    pump.workers[0].push(pump.now, W, Gradient::Dense(&[f32::NAN, 2.0, f32::NEG_INFINITY]), true).unwrap();
    pump.run();
    assert_eq!(pump.parameters(W, 3), [0.0, -1.0, 4.0]);
}

#[test]
fn sparse_rows_are_pushed_and_pulled_alone() {
    for sync in ["bsp", "asp"] {
        let mut pump = Pump::new(job(2, 2, sync, "sgd:lr=1"), 2);
        pump.start(&[(TableSpec::sparse("rows", 100, 3), vec![1.0; 300])]);
        let now = pump.now;
        pump.workers[0]
            .push(now, W, Gradient::Rows { rows: &[0, 57, 99], values: &[2.0; 9] }, false)
            .unwrap();
        pump.workers[1].push(now, W, Gradient::Rows { rows: &[57], values: &[2.0; 3] }, false).unwrap();
        pump.workers[0].clock();
        pump.workers[1].clock();
        pump.run();
        let ticket =
            pump.workers[1].pull(now, W, PullOptions { rows: Some(&[1, 57, 99]), now: false }).unwrap();
        pump.run();
        assert_eq!(pump.outcome(1, ticket), Some(Ok(())), "{sync}");
        let rows = pump.workers[1].redeem(ticket);
        assert_eq!(rows, [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0], "{sync}");
    }
}

#[test]
fn workers_that_declare_other_tables_are_told_which() {
    let mut pump = Pump::new(job(2, 1, "bsp", "sgd:lr=1"), 1);
    let now = pump.now;
    pump.workers[0].declare(TableSpec::dense("w", [4]), vec![0.0; 4]).unwrap();
    pump.workers[1].declare(TableSpec::dense("w", [5]), vec![0.0; 5]).unwrap();
    let first = pump.workers[0].start(now).unwrap();
    let second = pump.workers[1].start(now).unwrap();
    pump.run();
    let errors: Vec<String> = [(0, first), (1, second)]
        .into_iter()
        .filter_map(|(worker, ticket)| pump.outcome(worker, ticket)?.err())
        .map(|error| error.to_string())
        .collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].contains("all workers must declare the same tables"), "{}", errors[0]);
}

#[test]
fn policies_follow_globs_and_tables() {
    let mut config = job(1, 1, "bsp", "sgd:lr=1");
    config.overrides = vec![PolicyOverride::new("a*", Policies::of([(Axis::Sync, "asp")]))];
    let mut pump = Pump::new(config, 1);
    let own = Policies::of([(Axis::Optimizer, "sgd:lr=2")]);
    let special = TableSpec { policy: own, ..TableSpec::dense("b", [1]) };
    pump.start(&[(TableSpec::dense("a", [1]), vec![0.0]), (special, vec![0.0])]);
    pump.workers[0].push(pump.now, TableId(0), Gradient::Dense(&[1.0]), true).unwrap();
    pump.workers[0].push(pump.now, TableId(1), Gradient::Dense(&[1.0]), true).unwrap();
    pump.run();
    assert_eq!((pump.parameters(TableId(0), 1), pump.parameters(TableId(1), 1)), (vec![-1.0], vec![-2.0]));
    let report = pump.shards[0].report(pump.now).unwrap();
    assert_eq!((report.tables[0].sync.as_str(), report.tables[1].sync.as_str()), ("asp", "bsp"));
}

#[test]
fn without_overlap_pulls_wait_for_the_scheduler() {
    let mut pump = started(job(2, 2, "bsp:overlap=false", "sgd:lr=1"), 1, 50);
    for step in 1..=3 {
        let tickets: Vec<_> = (0..2)
            .map(|worker| {
                let now = pump.now;
                let ticket = pump.workers[worker].push(now, W, Gradient::Dense(&[1.0; 50]), true).unwrap();
                pump.workers[worker].clock();
                pump.run();
                ticket
            })
            .collect();
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(pump.outcome(worker, ticket), Some(Ok(())), "{}", pump.explain(worker, ticket));
            assert_eq!(pump.workers[worker].values(W)[0], -(step as f32));
        }
    }
}

#[test]
fn a_barrier_and_leaving_end_the_job() {
    let mut pump = started(job(2, 1, "asp", "sgd:lr=1"), 1, 4);
    let now = pump.now;
    let first = pump.workers[0].barrier(now, "end").unwrap();
    pump.run();
    assert_eq!(pump.outcome(0, first), None);
    let second = pump.workers[1].barrier(now, "end").unwrap();
    pump.run();
    assert_eq!((pump.outcome(0, first), pump.outcome(1, second)), (Some(Ok(())), Some(Ok(()))));
    let status = pump.workers[0].query_status(now).unwrap();
    pump.run();
    assert_eq!(pump.outcome(0, status), Some(Ok(())));
    assert_eq!(pump.workers[0].take_status(status).unwrap().shards.len(), 1);
    for worker in 0..2 {
        let ticket = pump.workers[worker].leave(now);
        pump.run();
        assert_eq!(pump.outcome(worker, ticket), Some(Ok(())));
    }
    assert_eq!(pump.stopped, [None, None], "coordinator and shard stop without an error");
}
