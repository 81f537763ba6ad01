//! Workers that join a job that runs: in the place of one that died, or beside the others.

use super::pump::Pump;
use super::{W, job, started};
use paramill_core::address::Addresses;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::role::Role;
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, WorkerId};
use paramill_core::wire::{Control, Hello, Party};
use paramill_core::worker::{Gradient, PullOptions, Ticket, Worker, WorkerConfig, WorkerError};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const SHARD: usize = 1;
const ELEMENTS: usize = 20;
const MODELS: &[&str] = &[
    "bsp",
    "asp",
    "ssp:s=2",
    "dsps:min=1,max=4",
    "drop:n=2",
    "drop:n=1,late=apply",
    "pssp:s=1,c=0.5",
    "psp:c=2,tau1=0.01",
    "psp:c=3,b=0.5",
    "when:pull=gap < 2,push=count >= n - 1",
    "bsp:overlap=false",
    "ssp:s=2,overlap=false",
];

/// Declares the table and starts.
fn join(pump: &mut Pump, worker: usize) -> Ticket {
    let spec = TableSpec::dense("w", [ELEMENTS as u64]);
    pump.workers[worker].declare(spec, vec![7.0; ELEMENTS]).expect("a table");
    let ticket = pump.workers[worker].start(pump.now).expect("starts once");
    pump.run();
    ticket
}

/// A process comes for a certain rank, or through an aggregator; its index in `workers`.
fn come(pump: &mut Pump, rank: Option<u32>, aggregator: Option<&str>) -> usize {
    let config = WorkerConfig {
        job: "test".into(),
        rank: rank.map(WorkerId),
        coordinator: "coordinator".into(),
        aggregator: aggregator.map(Addresses::from),
        number: 1000 + pump.workers.len() as u64,
    };
    pump.workers.push(Worker::new(pump.now, config, Arc::new(Registry::builtin())));
    pump.run();
    pump.workers.len() - 1
}

/// Lets these workers train until all of them have completed so many iterations. What they wait for first is given.
fn train(pump: &mut Pump, workers: &[usize], until: u64, first: &[(usize, Ticket)]) {
    let mut pending: BTreeMap<usize, Ticket> = first.iter().copied().collect();
    for _ in 0..400 {
        let mut done = true;
        for &worker in workers {
            if let Some(&ticket) = pending.get(&worker) {
                match pump.outcome(worker, ticket) {
                    Some(Ok(())) => drop(pump.workers[worker].redeem(ticket)),
                    Some(Err(error)) => panic!("worker {worker}: {error}"),
                    None => {
                        done = false;
                        continue;
                    }
                }
                pending.remove(&worker);
            }
            if pump.workers[worker].current_clock() < until {
                let now = pump.now;
                let gradient = Gradient::Dense(&[1.0; ELEMENTS]);
                let ticket = pump.workers[worker].push(now, W, gradient, true).expect("its clock is due");
                pump.workers[worker].clock();
                pump.run();
                pending.insert(worker, ticket);
                done = false;
            }
        }
        assert_eq!(pump.coordinator.check(), Ok(()));
        if done {
            return;
        }
        pump.pass(0.02);
    }
    let waits: Vec<String> = pending.iter().map(|(&worker, &ticket)| pump.explain(worker, ticket)).collect();
    panic!("they wait for ever: {waits:?}; {:?}", pump.log);
}

/// Every round makes a step of exactly 1, whoever takes part in it.
fn assert_steps(pump: &Pump, steps: usize) {
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - steps as f32).collect();
    assert_eq!(pump.parameters(W, ELEMENTS), expected);
}

#[test]
fn a_worker_that_died_is_replaced_under_every_model() {
    for &sync in MODELS {
        let mut pump = started(job(3, 2, sync, "sgd:lr=1"), 2, ELEMENTS);
        train(&mut pump, &[0, 1, 2], 3, &[]);
        pump.isolate(pump.worker_node(2));
        pump.pass(4.0);
        train(&mut pump, &[0, 1], 5, &[]);
        let fourth = pump.add_worker("test");
        let start = join(&mut pump, fourth);
        train(&mut pump, &[0, 1, fourth], 12, &[(fourth, start)]);
        assert_eq!(pump.workers[fourth].id(), Some(WorkerId(2)), "{sync}");
        assert_eq!(pump.stopped, [], "{sync}: {:?}", pump.log);
        let status = pump.coordinator.status(pump.now);
        let lives: Vec<u32> = status.workers.iter().map(|worker| worker.incarnation).collect();
        assert_eq!((lives, status.restarts), (vec![1, 1, 2], 1), "{sync}");
        if sync == "bsp" || sync == "bsp:overlap=false" {
            assert_steps(&pump, 12);
        }
    }
}

#[test]
fn further_workers_join_under_every_model_two_at_once() {
    for &sync in MODELS {
        let mut pump = started(job(2, 2, sync, "sgd:lr=1"), 1, ELEMENTS);
        train(&mut pump, &[0, 1], 2, &[]);
        let (third, fourth) = (pump.add_worker("test"), pump.add_worker("test"));
        let starts = [(third, join(&mut pump, third)), (fourth, join(&mut pump, fourth))];
        train(&mut pump, &[0, 1, third, fourth], 9, &starts);
        let mut ranks = [third, fourth].map(|worker| pump.workers[worker].id());
        ranks.sort_unstable();
        assert_eq!(ranks, [Some(WorkerId(2)), Some(WorkerId(3))], "{sync}");
        if sync == "bsp" {
            assert_steps(&pump, 9);
        }
    }
}

#[test]
fn a_worker_joins_at_the_exact_clock() {
    let mut pump = started(job(2, 2, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut pump, &[0, 1], 4, &[]);
    let third = pump.add_worker("test");
    let start = join(&mut pump, third);
    // Round 4 is open: the first that the worker owes is round 5, and it reads what follows from round 4.
    assert_eq!(pump.outcome(third, start), None);
    train(&mut pump, &[0, 1], 5, &[]);
    assert_eq!(pump.outcome(third, start), Some(Ok(())));
    assert_eq!(pump.workers[third].current_clock(), 5);
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - 5.0).collect();
    assert_eq!(pump.workers[third].values(W), expected);
    // Nobody goes on without it.
    let now = pump.now;
    let ticket = pump.workers[0].push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).unwrap();
    pump.workers[0].clock();
    train(&mut pump, &[1], 5, &[]);
    let other = pump.workers[1].push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).unwrap();
    pump.workers[1].clock();
    pump.pass(1.0);
    assert_eq!((pump.outcome(0, ticket), pump.outcome(1, other)), (None, None));
    train(&mut pump, &[third], 6, &[]);
    assert_eq!((pump.outcome(0, ticket), pump.outcome(1, other)), (Some(Ok(())), Some(Ok(()))));
    assert_steps(&pump, 6);
}

#[test]
fn worker_0_that_comes_back_does_not_reset_the_parameters() {
    let mut pump = started(job(2, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut pump, &[0, 1], 3, &[]);
    pump.isolate(pump.worker_node(0));
    pump.pass(4.0);
    let third = pump.add_worker("test");
    let start = join(&mut pump, third);
    train(&mut pump, &[1, third], 7, &[(third, start)]);
    assert_eq!(pump.workers[third].id(), Some(WorkerId(0)));
    assert_steps(&pump, 7);
}

#[test]
fn a_worker_that_dies_while_it_joins_holds_up_nobody() {
    let mut pump = started(job(2, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut pump, &[0, 1], 2, &[]);
    // The shard does not hear of anything: the worker cannot finish joining.
    pump.hold(0, SHARD);
    let third = pump.add_worker("test");
    let start = join(&mut pump, third);
    assert_eq!(pump.outcome(third, start), None);
    pump.isolate(pump.worker_node(third));
    pump.pass(4.0);
    pump.release();
    train(&mut pump, &[0, 1], 5, &[]);
    assert_steps(&pump, 5);
}

#[test]
fn a_broken_connection_during_a_join_and_a_switch_beside_it_change_nothing() {
    let mut pump = started(job(2, 2, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut pump, &[0, 1], 2, &[]);
    pump.cut.insert((0, SHARD));
    pump.reset(0, SHARD);
    let third = pump.add_worker("test");
    let start = join(&mut pump, third);
    let rule = PolicyOverride::new("*", Policies::of([(Axis::Sync, "ssp:s=1")]));
    pump.command("test", &Control::Set(rule));
    assert_eq!(pump.outcome(third, start), None);
    pump.cut.clear();
    pump.pass(2.0);
    train(&mut pump, &[0, 1, third], 8, &[(third, start)]);
    for shard in &pump.shards {
        let report = shard.report(pump.now).expect("it has joined");
        assert!(report.tables.iter().all(|table| table.sync == "ssp:s=1" && table.workers == 3));
    }
}

#[test]
fn a_process_takes_the_rank_of_one_whose_connection_is_gone_at_once() {
    let mut pump = started(job(2, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut pump, &[0, 1], 2, &[]);
    let from = Party::Worker { rank: Some(WorkerId(1)) };
    let hello = Hello { job: "test".into(), from, incarnation: 0 };
    // While the first one is connected it may be the one that is meant.
    let refusal = pump.coordinator.accept(pump.now, &hello).unwrap_err();
    assert!(refusal.retry && refusal.reason.contains("rank 1 is taken"), "{refusal}");
    pump.pass(2.0);
    let refusal = pump.coordinator.accept(pump.now, &hello).unwrap_err();
    assert!(!refusal.retry, "it was heard since: {refusal}");
    pump.isolate(pump.worker_node(1));
    pump.run();
    let welcome = pump.coordinator.accept(pump.now, &hello).expect("nobody has the rank");
    assert_eq!(welcome.you, NodeId::Worker(WorkerId(1)));
    let status = pump.coordinator.status(pump.now);
    assert_eq!((status.restarts, status.workers[1].incarnation), (1, 2));
    // The other one goes on as long as the new one has not started.
    train(&mut pump, &[0], 5, &[]);
}

#[test]
fn rows_and_aggregators_take_part() {
    let mut pump = Pump::with_aggregators(job(2, 1, "bsp", "sgd:lr=1"), 1, &[0, 0]);
    let initial = (0..ELEMENTS).map(|i| i as f32).collect();
    pump.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
    train(&mut pump, &[0, 1], 3, &[]);
    // Another one comes to the server itself.
    let third = pump.add_worker("test");
    let start = join(&mut pump, third);
    train(&mut pump, &[0, 1, third], 8, &[(third, start)]);
    assert_steps(&pump, 8);
}

#[test]
fn a_worker_leaves_though_the_answer_is_lost() {
    let mut pump = started(job(1, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut pump, &[0], 2, &[]);
    // The coordinator hears it, and is gone with the job before its answer arrives.
    pump.hold(0, pump.worker_node(0));
    let ticket = pump.workers[0].leave(pump.now);
    pump.run();
    assert_eq!(pump.outcome(0, ticket), None);
    pump.cut.insert((0, pump.worker_node(0)));
    pump.reset(0, pump.worker_node(0));
    pump.pass(40.0);
    assert_eq!(pump.outcome(0, ticket), Some(Ok(())));
}

#[test]
fn nobody_joins_a_job_that_is_over() {
    let mut pump = started(job(1, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    pump.workers[0].leave(pump.now);
    pump.run();
    let second = pump.add_worker("test");
    let ticket = join(&mut pump, second);
    match pump.outcome(second, ticket) {
        Some(Err(WorkerError::NotAMember(why))) => assert!(why.contains("job `test` is over"), "{why}"),
        other => panic!("{other:?}"),
    }
}

/// Two workers of a job that has begun; of the initial values of worker 0 one chunk arrived before it was gone.
fn without_values(restart_grace: Duration) -> (Pump, Ticket) {
    let mut pump = Pump::new(JobConfig { restart_grace, ..job(2, 1, "bsp", "sgd:lr=1") }, 1);
    let node = pump.worker_node(0);
    pump.run();
    join(&mut pump, 0);
    pump.hold(node, SHARD);
    let second = join(&mut pump, 1);
    assert!(pump.deliver(node, SHARD, 1).is_some(), "the first chunk");
    pump.release();
    pump.isolate(node);
    pump.run();
    assert_eq!(pump.outcome(1, second), None);
    (pump, second)
}

#[test]
fn a_new_worker_0_sends_the_initial_values_of_one_that_died_before() {
    // It comes at once, or after the other one was declared dead, if the job waits for so long.
    for (grace, late) in [(0, 0.5), (30, 20.0)] {
        let (mut pump, second) = without_values(Duration::from_secs(grace));
        pump.pass(late);
        assert_eq!(pump.stopped, []);
        let phase = pump.coordinator.status(pump.now).phase;
        assert_eq!(phase.contains("waiting for worker 0 to be started anew"), grace > 0, "{phase}");
        let third = come(&mut pump, Some(0), None);
        pump.workers[third]
            .declare(TableSpec::dense("w", [ELEMENTS as u64]), (0..ELEMENTS).map(|i| i as f32).collect())
            .unwrap();
        let start = pump.workers[third].start(pump.now).unwrap();
        pump.run();
        train(&mut pump, &[1, third], 4, &[(1, second), (third, start)]);
        // All of them are the new one's, whose predecessor had others.
        assert_steps(&pump, 4);
    }
}

#[test]
fn a_job_without_initial_values_ends_when_nobody_comes_to_send_them() {
    let why = "worker 0 was gone before the initial values of table `w` were here";
    let ended = |pump: &Pump| pump.stopped.iter().flatten().any(|error| error.contains(why));
    let (mut pump, _) = without_values(Duration::from_secs(10));
    pump.pass(11.0);
    assert!(!ended(&pump), "3 s of grace for the connection come first");
    pump.pass(4.0);
    assert!(ended(&pump), "{:?}", pump.stopped);
    // The new one goes away too, before it takes part.
    let (mut pump, _) = without_values(Duration::ZERO);
    let third = come(&mut pump, Some(0), None);
    pump.pass(8.0);
    assert!(!ended(&pump), "somebody is here who may send them: {:?}", pump.stopped);
    pump.isolate(pump.worker_node(third));
    pump.pass(4.0);
    assert!(ended(&pump), "{:?}", pump.stopped);
}

#[test]
fn a_job_whose_last_worker_died_waits_for_another_if_it_is_told_to() {
    let grace = Duration::from_secs(30);
    let mut pump = started(JobConfig { restart_grace: grace, ..job(1, 2, "bsp", "sgd:lr=1") }, 1, ELEMENTS);
    train(&mut pump, &[0], 2, &[]);
    pump.isolate(pump.worker_node(0));
    pump.pass(20.0);
    assert_eq!(pump.stopped, []);
    let second = pump.add_worker("test");
    let start = join(&mut pump, second);
    train(&mut pump, &[second], 6, &[(second, start)]);
    assert_eq!(pump.workers[second].id(), Some(WorkerId(0)));
    // Round 2 was nobody's.
    assert_steps(&pump, 5);
    pump.isolate(pump.worker_node(second));
    pump.pass(32.0);
    assert_eq!(pump.stopped, []);
    pump.pass(2.0);
    assert!(pump.stopped.contains(&Some("all workers died".into())), "{:?}", pump.stopped);
}

#[test]
fn a_worker_that_joins_pushes_and_pulls_rows() {
    for sync in ["bsp", "asp", "ssp:s=1", "drop:n=1"] {
        let mut pump = Pump::new(job(1, 2, sync, "sgd:lr=1"), 1);
        let spec = TableSpec::sparse("rows", 10, 2);
        pump.start(&[(spec.clone(), vec![5.0; 20])]);
        let push = |pump: &mut Pump, worker: usize| {
            let gradient = Gradient::Rows { rows: &[1, 8], values: &[1.0; 4] };
            let ticket = pump.workers[worker].push(pump.now, W, gradient, false).unwrap();
            pump.workers[worker].clock();
            pump.run();
            assert_eq!(pump.outcome(worker, ticket), Some(Ok(())), "{sync}");
        };
        (0..3).for_each(|_| push(&mut pump, 0));
        let second = pump.add_worker("test");
        pump.workers[second].declare(spec, vec![7.0; 20]).unwrap();
        let start = pump.workers[second].start(pump.now).unwrap();
        pump.run();
        while pump.workers[0].current_clock() < 8 {
            push(&mut pump, 0);
            if pump.outcome(second, start) == Some(Ok(())) && pump.workers[second].current_clock() < 8 {
                push(&mut pump, second);
            }
        }
        let behind = 8 - pump.workers[second].current_clock();
        (0..behind).for_each(|_| push(&mut pump, second));
        let rows = PullOptions { rows: Some(&[0, 1]), now: false };
        let ticket = pump.workers[second].pull(pump.now, W, rows).unwrap();
        pump.run();
        assert_eq!(pump.outcome(second, ticket), Some(Ok(())), "{sync}");
        let rows = pump.workers[second].redeem(ticket);
        assert_eq!(rows[..2], [5.0; 2], "{sync}");
        if sync == "bsp" {
            // The mean of equal gradients: a step of 1 in each of eight rounds.
            assert_eq!(rows[2..], [-3.0; 2]);
        }
    }
}

#[test]
fn workers_join_through_an_aggregator() {
    let mut pump = Pump::with_aggregators(job(2, 2, "bsp", "sgd:lr=1"), 1, &[0, 0]);
    let initial = (0..ELEMENTS).map(|i| i as f32).collect();
    pump.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
    train(&mut pump, &[0, 1], 3, &[]);
    let third = come(&mut pump, None, Some("aggregator:0"));
    let start = join(&mut pump, third);
    train(&mut pump, &[0, 1, third], 6, &[(third, start)]);
    assert_eq!(pump.workers[third].id(), Some(WorkerId(2)));
    // One that is behind the same aggregator dies, and is started anew there.
    pump.isolate(pump.worker_node(0));
    pump.run();
    let fourth = come(&mut pump, Some(0), Some("aggregator:0"));
    let start = join(&mut pump, fourth);
    train(&mut pump, &[1, third, fourth], 12, &[(fourth, start)]);
    assert_eq!(pump.workers[fourth].id(), Some(WorkerId(0)));
    assert_steps(&pump, 12);
}
