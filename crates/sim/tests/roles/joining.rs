//! Workers that join a job that runs: in the place of one that died, or beside the others.

use super::bench::{Bench, COORDINATOR};
use super::processes::worker;
use super::{W, job, started};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::role::{Lost, Role};
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, WorkerId};
use paramill_core::wire::{Hello, Party};
use paramill_core::worker::{Gradient, PullOptions, Ticket, WorkerError};
use std::collections::BTreeMap;
use std::time::Duration;

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
fn join(bench: &mut Bench, worker: usize) -> Ticket {
    let spec = TableSpec::dense("w", [ELEMENTS as u64]);
    bench.worker_mut(worker).declare(spec, vec![7.0; ELEMENTS]).expect("a table");
    let now = bench.now();
    let ticket = bench.worker_mut(worker).start(now).expect("starts once");
    bench.run();
    ticket
}

/// A process comes for a certain rank, or through an aggregator; its place among the workers.
fn come(bench: &mut Bench, rank: Option<u32>, aggregator: Option<usize>) -> usize {
    let index = bench.add(worker(bench.now(), bench.worker_count(), rank, aggregator));
    bench.run();
    index
}

/// Lets these workers train until all of them have completed so many iterations. What they wait for first is given.
fn train(bench: &mut Bench, workers: &[usize], until: u64, first: &[(usize, Ticket)]) {
    let mut pending: BTreeMap<usize, Ticket> = first.iter().copied().collect();
    for _ in 0..400 {
        let mut done = true;
        for &worker in workers {
            if let Some(&ticket) = pending.get(&worker) {
                match bench.outcome(worker, ticket) {
                    Some(Ok(())) => drop(bench.worker_mut(worker).redeem(ticket)),
                    Some(Err(error)) => panic!("worker {worker}: {error}"),
                    None => {
                        done = false;
                        continue;
                    }
                }
                pending.remove(&worker);
            }
            if bench.worker(worker).current_clock() < until {
                let now = bench.now();
                let gradient = Gradient::Dense(&[1.0; ELEMENTS]);
                let ticket = bench.worker_mut(worker).push(now, W, gradient, true).expect("its clock is due");
                bench.worker_mut(worker).clock();
                bench.run();
                pending.insert(worker, ticket);
                done = false;
            }
        }
        assert_eq!(bench.coordinator().check(), Ok(()));
        if done {
            return;
        }
        bench.pass(0.02);
    }
    let waits: Vec<String> = pending.iter().map(|(&worker, &ticket)| bench.explain(worker, ticket)).collect();
    panic!("they wait for ever: {waits:?}; {:?}", bench.log());
}

/// Every round makes a step of exactly 1, whoever takes part in it.
fn assert_steps(bench: &Bench, steps: usize) {
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - steps as f32).collect();
    assert_eq!(bench.parameters(W, ELEMENTS), expected);
}

#[test]
fn a_worker_that_died_is_replaced_under_every_model() {
    for &sync in MODELS {
        let mut bench = started(job(3, 2, sync, "sgd:lr=1"), 2, ELEMENTS);
        train(&mut bench, &[0, 1, 2], 3, &[]);
        bench.isolate(bench.worker_node(2));
        bench.pass(4.0);
        train(&mut bench, &[0, 1], 5, &[]);
        let fourth = bench.add_worker();
        let start = join(&mut bench, fourth);
        train(&mut bench, &[0, 1, fourth], 12, &[(fourth, start)]);
        assert_eq!(bench.worker(fourth).id(), Some(WorkerId(2)), "{sync}");
        assert_eq!(bench.stopped(), [], "{sync}: {:?}", bench.log());
        let status = bench.coordinator().status(bench.now());
        let lives: Vec<u32> = status.workers.iter().map(|worker| worker.incarnation).collect();
        assert_eq!((lives, status.restarts), (vec![1, 1, 2], 1), "{sync}");
        if sync == "bsp" || sync == "bsp:overlap=false" {
            assert_steps(&bench, 12);
        }
    }
}

#[test]
fn further_workers_join_under_every_model_two_at_once() {
    for &sync in MODELS {
        let mut bench = started(job(2, 2, sync, "sgd:lr=1"), 1, ELEMENTS);
        train(&mut bench, &[0, 1], 2, &[]);
        let (third, fourth) = (bench.add_worker(), bench.add_worker());
        let starts = [(third, join(&mut bench, third)), (fourth, join(&mut bench, fourth))];
        train(&mut bench, &[0, 1, third, fourth], 9, &starts);
        let mut ranks = [third, fourth].map(|worker| bench.worker(worker).id());
        ranks.sort_unstable();
        assert_eq!(ranks, [Some(WorkerId(2)), Some(WorkerId(3))], "{sync}");
        if sync == "bsp" {
            assert_steps(&bench, 9);
        }
    }
}

#[test]
fn a_worker_joins_at_the_exact_clock() {
    let mut bench = started(job(2, 2, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut bench, &[0, 1], 4, &[]);
    let now = bench.now();
    let pushed = bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).unwrap();
    bench.worker_mut(0).clock();
    bench.run();
    let third = bench.add_worker();
    let start = join(&mut bench, third);
    // Round 4 has begun: the first that the worker owes is round 5, and it reads what follows from round 4.
    assert_eq!(bench.outcome(third, start), None);
    train(&mut bench, &[0, 1], 5, &[(0, pushed)]);
    assert_eq!(bench.outcome(third, start), Some(Ok(())));
    assert_eq!(bench.worker(third).current_clock(), 5);
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - 5.0).collect();
    assert_eq!(bench.worker(third).values(W), expected);
    // Nobody goes on without it.
    let now = bench.now();
    let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).unwrap();
    bench.worker_mut(0).clock();
    train(&mut bench, &[1], 5, &[]);
    let other = bench.worker_mut(1).push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).unwrap();
    bench.worker_mut(1).clock();
    bench.pass(1.0);
    assert_eq!((bench.outcome(0, ticket), bench.outcome(1, other)), (None, None));
    train(&mut bench, &[third], 6, &[]);
    assert_eq!((bench.outcome(0, ticket), bench.outcome(1, other)), (Some(Ok(())), Some(Ok(()))));
    assert_steps(&bench, 6);
}

#[test]
fn worker_0_that_comes_back_does_not_reset_the_parameters() {
    let mut bench = started(job(2, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut bench, &[0, 1], 3, &[]);
    bench.isolate(bench.worker_node(0));
    bench.pass(4.0);
    let third = bench.add_worker();
    let start = join(&mut bench, third);
    train(&mut bench, &[1, third], 7, &[(third, start)]);
    assert_eq!(bench.worker(third).id(), Some(WorkerId(0)));
    assert_steps(&bench, 7);
}

#[test]
fn a_worker_that_dies_while_it_joins_holds_up_nobody() {
    let mut bench = started(job(2, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut bench, &[0, 1], 2, &[]);
    // The shard does not hear of anything: the worker cannot finish joining.
    let shard = bench.shard_node(0);
    bench.world.hold(COORDINATOR, shard);
    let third = bench.add_worker();
    let start = join(&mut bench, third);
    assert_eq!(bench.outcome(third, start), None);
    bench.isolate(bench.worker_node(third));
    bench.pass(4.0);
    bench.world.release(COORDINATOR, shard);
    train(&mut bench, &[0, 1], 5, &[]);
    assert_steps(&bench, 5);
}

#[test]
fn a_broken_connection_during_a_join_and_a_switch_beside_it_change_nothing() {
    let mut bench = started(job(2, 2, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut bench, &[0, 1], 2, &[]);
    bench.cut(COORDINATOR, bench.shard_node(0));
    let third = bench.add_worker();
    let start = join(&mut bench, third);
    let rule = PolicyOverride::new("*", Policies::of([(Axis::Sync, "ssp:s=1")]));
    bench.set(rule);
    assert_eq!(bench.outcome(third, start), None);
    bench.heal();
    bench.pass(2.0);
    train(&mut bench, &[0, 1, third], 8, &[(third, start)]);
    for shard in bench.shards() {
        let report = shard.report(bench.now()).expect("it has joined");
        assert!(report.tables.iter().all(|table| table.sync == "ssp:s=1" && table.workers == 3));
    }
}

#[test]
fn a_process_takes_the_rank_of_one_whose_connection_is_gone_at_once() {
    let mut bench = started(job(2, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut bench, &[0, 1], 2, &[]);
    let from = Party::Worker { rank: Some(WorkerId(1)) };
    let hello = Hello { job: "test".into(), from, incarnation: 0, to: None };
    // While the first one is connected it may be the one that is meant.
    let now = bench.now();
    let refusal = bench.coordinator_mut().accept(now, &hello).unwrap_err();
    assert!(refusal.retry && refusal.reason.contains("rank 1 is taken"), "{refusal}");
    bench.pass(2.0);
    let now = bench.now();
    let refusal = bench.coordinator_mut().accept(now, &hello).unwrap_err();
    assert!(!refusal.retry, "it was heard since: {refusal}");
    bench.isolate(bench.worker_node(1));
    bench.run();
    let now = bench.now();
    let welcome = bench.coordinator_mut().accept(now, &hello).expect("nobody has the rank");
    assert_eq!(welcome.you, NodeId::Worker(WorkerId(1)));
    let status = bench.coordinator().status(bench.now());
    assert_eq!((status.restarts, status.workers[1].incarnation), (1, 2));
    // The other one goes on as long as the new one has not started.
    train(&mut bench, &[0], 5, &[]);
}

#[test]
fn rows_and_aggregators_take_part() {
    let mut bench = Bench::with_aggregators(job(2, 1, "bsp", "sgd:lr=1"), 1, &[0, 0]);
    let initial = (0..ELEMENTS).map(|i| i as f32).collect();
    bench.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
    train(&mut bench, &[0, 1], 3, &[]);
    // Another one comes to the server itself.
    let third = bench.add_worker();
    let start = join(&mut bench, third);
    train(&mut bench, &[0, 1, third], 8, &[(third, start)]);
    assert_steps(&bench, 8);
}

#[test]
fn a_worker_leaves_though_the_answer_is_lost() {
    let mut bench = started(job(1, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut bench, &[0], 2, &[]);
    // The coordinator hears it, and is gone with the job before its answer arrives.
    let node = bench.worker_node(0);
    bench.world.hold(COORDINATOR, node);
    let now = bench.now();
    let ticket = bench.worker_mut(0).leave(now);
    bench.run();
    assert_eq!(bench.outcome(0, ticket), None);
    bench.cut(COORDINATOR, node);
    bench.pass(40.0);
    assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
}

#[test]
fn nobody_joins_a_job_that_is_over() {
    let mut bench = started(job(1, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    let now = bench.now();
    bench.worker_mut(0).leave(now);
    bench.run();
    assert_eq!(bench.stopped(), [None, None], "coordinator and shard");
    // A driver listens until the last words are out.
    let mut second = worker(now, 1, None, None);
    second.declare(TableSpec::dense("w", [ELEMENTS as u64]), vec![7.0; ELEMENTS]).unwrap();
    let ticket = second.start(now).unwrap();
    second.handle_timeout(now);
    let refusal = bench.coordinator_mut().accept(now, &second.hello(COORDINATOR.into())).unwrap_err();
    second.handle_disconnected(now, COORDINATOR.into(), &Lost::Refused(refusal));
    match second.outcome(ticket) {
        Some(Err(WorkerError::NotAMember(why))) => assert!(why.contains("job `test` is over"), "{why}"),
        other => panic!("{other:?}"),
    }
}

/// Two workers of a job that has begun; of the initial values of worker 0 one chunk arrived before it was gone.
fn without_values(restart_grace: Duration) -> (Bench, Ticket) {
    let mut bench = Bench::new(JobConfig { restart_grace, ..job(2, 1, "bsp", "sgd:lr=1") }, 1);
    let node = bench.worker_node(0);
    bench.run();
    join(&mut bench, 0);
    let shard = bench.shard_node(0);
    bench.world.hold(node, shard);
    let second = join(&mut bench, 1);
    bench.deliver(node, shard, 1);
    assert!(
        bench.world.unread(node, shard).next().is_some(),
        "that was the first chunk, and there are others"
    );
    bench.world.release(node, shard);
    bench.isolate(node);
    bench.run();
    assert_eq!(bench.outcome(1, second), None);
    (bench, second)
}

#[test]
fn a_new_worker_0_sends_the_initial_values_of_one_that_died_before() {
    // It comes at once, or after the other one was declared dead, if the job waits for so long.
    for (grace, late) in [(0, 0.5), (30, 20.0)] {
        let (mut bench, second) = without_values(Duration::from_secs(grace));
        bench.pass(late);
        assert_eq!(bench.stopped(), []);
        let phase = bench.coordinator().status(bench.now()).phase;
        assert_eq!(phase.contains("waiting for worker 0 to be started anew"), grace > 0, "{phase}");
        let third = come(&mut bench, Some(0), None);
        bench
            .worker_mut(third)
            .declare(TableSpec::dense("w", [ELEMENTS as u64]), (0..ELEMENTS).map(|i| i as f32).collect())
            .unwrap();
        let now = bench.now();
        let start = bench.worker_mut(third).start(now).unwrap();
        bench.run();
        train(&mut bench, &[1, third], 4, &[(1, second), (third, start)]);
        // All of them are the new one's, whose predecessor had others.
        assert_steps(&bench, 4);
    }
}

#[test]
fn a_job_without_initial_values_ends_when_nobody_comes_to_send_them() {
    let why = "worker 0 was gone before the initial values of table `w` were here";
    let ended = |bench: &Bench| bench.stopped().iter().flatten().any(|error| error.contains(why));
    let (mut bench, _) = without_values(Duration::from_secs(10));
    bench.pass(11.0);
    assert!(!ended(&bench), "3 s of grace for the connection come first");
    bench.pass(4.0);
    assert!(ended(&bench), "{:?}", bench.stopped());
    // The new one goes away too, before it takes part.
    let (mut bench, _) = without_values(Duration::ZERO);
    let third = come(&mut bench, Some(0), None);
    bench.pass(8.0);
    assert!(!ended(&bench), "somebody is here who may send them: {:?}", bench.stopped());
    bench.isolate(bench.worker_node(third));
    bench.pass(4.0);
    assert!(ended(&bench), "{:?}", bench.stopped());
}

#[test]
fn a_job_whose_last_worker_died_waits_for_another_if_it_is_told_to() {
    let grace = Duration::from_secs(30);
    let mut bench = started(JobConfig { restart_grace: grace, ..job(1, 2, "bsp", "sgd:lr=1") }, 1, ELEMENTS);
    train(&mut bench, &[0], 2, &[]);
    bench.isolate(bench.worker_node(0));
    bench.pass(20.0);
    assert_eq!(bench.stopped(), []);
    let second = bench.add_worker();
    let start = join(&mut bench, second);
    train(&mut bench, &[second], 6, &[(second, start)]);
    assert_eq!(bench.worker(second).id(), Some(WorkerId(0)));
    // Nothing was here of round 2: it is the new one's.
    assert_steps(&bench, 6);
    bench.isolate(bench.worker_node(second));
    bench.pass(32.0);
    assert_eq!(bench.stopped(), []);
    bench.pass(2.0);
    assert!(bench.stopped().contains(&Some("all workers died".into())), "{:?}", bench.stopped());
}

#[test]
fn a_worker_that_joins_pushes_and_pulls_rows() {
    for sync in ["bsp", "asp", "ssp:s=1", "drop:n=1"] {
        let mut bench = Bench::new(job(1, 2, sync, "sgd:lr=1"), 1);
        let spec = TableSpec::sparse("rows", 10, 2);
        bench.start(&[(spec.clone(), vec![5.0; 20])]);
        let push = |bench: &mut Bench, worker: usize| {
            let gradient = Gradient::Rows { rows: &[1, 8], values: &[1.0; 4] };
            let now = bench.now();
            let ticket = bench.worker_mut(worker).push(now, W, gradient, false).unwrap();
            bench.worker_mut(worker).clock();
            bench.run();
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{sync}");
        };
        (0..3).for_each(|_| push(&mut bench, 0));
        let second = bench.add_worker();
        bench.worker_mut(second).declare(spec, vec![7.0; 20]).unwrap();
        let now = bench.now();
        let start = bench.worker_mut(second).start(now).unwrap();
        bench.run();
        while bench.worker(0).current_clock() < 8 {
            push(&mut bench, 0);
            if bench.outcome(second, start) == Some(Ok(())) && bench.worker(second).current_clock() < 8 {
                push(&mut bench, second);
            }
        }
        let behind = 8 - bench.worker(second).current_clock();
        (0..behind).for_each(|_| push(&mut bench, second));
        let rows = PullOptions { rows: Some(&[0, 1]), now: false };
        let now = bench.now();
        let ticket = bench.worker_mut(second).pull(now, W, rows).unwrap();
        bench.run();
        assert_eq!(bench.outcome(second, ticket), Some(Ok(())), "{sync}");
        let rows = bench.worker_mut(second).redeem(ticket);
        assert_eq!(rows[..2], [5.0; 2], "{sync}");
        if sync == "bsp" {
            // The mean of equal gradients: a step of 1 in each of eight rounds.
            assert_eq!(rows[2..], [-3.0; 2]);
        }
    }
}

#[test]
fn workers_join_through_an_aggregator() {
    let mut bench = Bench::with_aggregators(job(2, 2, "bsp", "sgd:lr=1"), 1, &[0, 0]);
    let initial = (0..ELEMENTS).map(|i| i as f32).collect();
    bench.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
    train(&mut bench, &[0, 1], 3, &[]);
    let third = come(&mut bench, None, Some(0));
    let start = join(&mut bench, third);
    train(&mut bench, &[0, 1, third], 6, &[(third, start)]);
    assert_eq!(bench.worker(third).id(), Some(WorkerId(2)));
    // One that is behind the same aggregator dies, and is started anew there.
    bench.isolate(bench.worker_node(0));
    bench.run();
    let fourth = come(&mut bench, Some(0), Some(0));
    let start = join(&mut bench, fourth);
    train(&mut bench, &[1, third, fourth], 12, &[(fourth, start)]);
    assert_eq!(bench.worker(fourth).id(), Some(WorkerId(0)));
    assert_steps(&bench, 12);
}

/// The rack's aggregator is cut off from the coordinator while a worker below it is started anew. When it hears of that, it gives up
/// what it has passed on of the worker, and the host's aggregator has to ask again for the new process.
#[test]
fn an_aggregator_above_may_hear_late_of_a_worker_that_was_started_anew() {
    for sync in ["bsp", "when:pull=progress < v_train"] {
        let mut bench = Bench::without_workers(job(2, 1, sync, "sgd:lr=1"), 1, 1);
        bench.add_lower("aggregator:0");
        for number in 0..2 {
            bench.add(worker(bench.now(), number, None, Some(1)));
        }
        let initial = (0..ELEMENTS).map(|i| i as f32).collect();
        bench.declare_and_start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
        bench.pass(2.0);
        train(&mut bench, &[0, 1], 2, &[]);
        bench.isolate(bench.worker_node(1));
        bench.cut(NodeId::Coordinator, bench.aggregator_node(0));
        let anew = come(&mut bench, Some(1), Some(1));
        let start = join(&mut bench, anew);
        bench.pass(0.5);
        assert_eq!(bench.outcome(anew, start), None, "{sync}: its first pull waits for worker 0");
        bench.heal();
        bench.isolate(bench.worker_node(1));
        bench.pass(3.0);
        train(&mut bench, &[0, anew], 6, &[(anew, start)]);
        assert_steps(&bench, 6);
    }
}

/// An aggregator holds pushes of several clocks of a worker that dies, of which the servers know nothing. They stay in its sums,
/// and the process that takes the worker's place does not push these clocks again.
#[test]
fn what_an_aggregator_holds_of_a_dead_worker_is_not_pushed_again() {
    for is_stacked in [false, true] {
        let config = job(2, 2, "bsp", "sgd:lr=1");
        let policy = config.policy.clone().with(Axis::Order, "arrival").with(Axis::Reduce, "sum");
        let mut bench = Bench::without_workers(JobConfig { policy, ..config }, 1, 1);
        if is_stacked {
            bench.add_lower("aggregator:0");
        }
        let through = usize::from(is_stacked);
        for number in 0..2 {
            bench.add(worker(bench.now(), number, None, Some(through)));
        }
        let initial = (0..ELEMENTS).map(|i| i as f32).collect();
        bench.declare_and_start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
        bench.pass(2.0);
        for _ in 0..3 {
            let now = bench.now();
            let ahead = bench.worker_mut(1);
            ahead.push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), false).expect("it may be ahead");
            ahead.clock();
            bench.run();
        }
        bench.isolate(bench.worker_node(1));
        let anew = come(&mut bench, Some(1), Some(through));
        let start = join(&mut bench, anew);
        train(&mut bench, &[0, anew], 5, &[(anew, start)]);
        let gradients = 2.0 * 5.0;
        let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - gradients).collect();
        assert_eq!(bench.parameters(W, ELEMENTS), expected, "stacked: {is_stacked}");
        let checks: Vec<_> = bench.aggregators().map(Role::check).collect();
        assert!(checks.iter().all(Result::is_ok), "{checks:?}");
    }
}

/// Two workers make all their steps and die; both are started anew, one after the other, and have nothing left to do. Neither is
/// to wait for a push that the other one will never make.
#[test]
fn workers_that_come_back_after_the_last_step_wait_for_nobody() {
    for &sync in MODELS {
        let config = JobConfig { restart_grace: Duration::from_secs(60), ..job(2, 2, sync, "sgd:lr=1") };
        let mut bench = started(config, 1, ELEMENTS);
        train(&mut bench, &[0, 1], 5, &[]);
        (0..2).for_each(|index| bench.isolate(bench.worker_node(index)));
        bench.pass(4.0);
        let before = bench.parameters(W, ELEMENTS);
        let anew = [(); 2].map(|()| {
            let index = bench.add_worker();
            (index, join(&mut bench, index))
        });
        train(&mut bench, &anew.map(|(index, _)| index), 5, &anew);
        for (index, _) in anew {
            assert!(bench.worker(index).current_clock() >= 5, "{sync}: what was pushed is not pushed again");
            assert_eq!(bench.worker(index).values(W), before, "{sync}");
        }
        let now = bench.now();
        let barriers = anew.map(|(index, _)| (index, bench.worker_mut(index).barrier(now, "end").unwrap()));
        bench.run();
        assert_eq!(
            barriers.map(|(index, ticket)| bench.outcome(index, ticket)),
            [Some(Ok(())), Some(Ok(()))]
        );
    }
}

/// The same beside a worker that has made its steps, and will push nothing more.
#[test]
fn a_worker_that_comes_back_does_not_wait_for_one_that_is_done() {
    for &sync in MODELS {
        let mut bench = started(job(2, 2, sync, "sgd:lr=1"), 1, ELEMENTS);
        train(&mut bench, &[0, 1], 3, &[]);
        bench.isolate(bench.worker_node(1));
        bench.pass(4.0);
        train(&mut bench, &[0], 5, &[]);
        let anew = bench.add_worker();
        let start = join(&mut bench, anew);
        let now = bench.now();
        let first = bench.worker_mut(0).barrier(now, "end").unwrap();
        train(&mut bench, &[anew], 5, &[(anew, start)]);
        let second = bench.worker_mut(anew).barrier(now, "end").unwrap();
        bench.run();
        assert_eq!(
            (bench.outcome(0, first), bench.outcome(anew, second)),
            (Some(Ok(())), Some(Ok(()))),
            "{sync}"
        );
    }
}

/// Nothing of the open round is here: the worker takes part in it, and nobody goes on without it.
#[test]
fn a_worker_joins_in_the_open_round_if_nothing_of_it_is_here() {
    let mut bench = started(job(2, 2, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut bench, &[0, 1], 4, &[]);
    let third = bench.add_worker();
    let start = join(&mut bench, third);
    assert_eq!(bench.outcome(third, start), Some(Ok(())));
    assert_eq!(bench.worker(third).current_clock(), 4);
    assert_eq!(bench.worker(third).values(W), bench.parameters(W, ELEMENTS));
    let now = bench.now();
    let tickets = [0, 1].map(|index| {
        let ticket = bench.worker_mut(index).push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).unwrap();
        bench.worker_mut(index).clock();
        ticket
    });
    bench.pass(1.0);
    assert_eq!([0, 1].map(|index| bench.outcome(index, tickets[index])), [None, None]);
    let gradient = Gradient::Dense(&[4.0; ELEMENTS]);
    let now = bench.now();
    let ticket = bench.worker_mut(third).push(now, W, gradient, true).unwrap();
    bench.worker_mut(third).clock();
    bench.run();
    assert_eq!(bench.outcome(third, ticket), Some(Ok(())));
    // The mean of 1, 1 and 4.
    assert_steps(&bench, 6);
}

#[test]
fn a_silent_aggregator_is_named_and_not_waited_for() {
    for is_stopped in [true, false] {
        let mut bench = Bench::without_workers(job(2, 1, "bsp", "sgd:lr=1"), 1, 1);
        bench.add_worker();
        bench.add_worker();
        let initial = (0..ELEMENTS).map(|i| i as f32).collect();
        bench.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
        train(&mut bench, &[0, 1], 2, &[]);
        let aggregator = bench.aggregator_node(0);
        if is_stopped {
            bench.stand_still(aggregator, 40.0);
        } else {
            // It reports, and does not follow.
            bench.world.hold(COORDINATOR, aggregator);
        }
        let third = bench.add_worker();
        let start = join(&mut bench, third);
        bench.pass(2.0);
        assert_eq!(bench.outcome(third, start), None);
        let why = bench.explain(third, start);
        assert!(why.contains("the running job to let it join"), "{why}");
        // It is asked for the first clock, too.
        assert!(why.contains("aggregator 0 has not entered epoch 2 yet"), "{why}");
        bench.pass(10.0);
        let is_named = bench.log().iter().any(|line| line.contains("aggregator 0") && line.contains("10 s"));
        assert!(is_named, "{:?}", bench.log());
        train(&mut bench, &[0, 1, third], 8, &[(third, start)]);
        assert_steps(&bench, 8);
        // It comes back, and follows.
        bench.world.release(COORDINATOR, aggregator);
        bench.pass(40.0);
        assert!(bench.coordinator().status(bench.now()).aggregators[0].connected);
        let fourth = come(&mut bench, None, Some(0));
        let start = join(&mut bench, fourth);
        train(&mut bench, &[0, 1, third, fourth], 12, &[(fourth, start)]);
        assert_steps(&bench, 12);
    }
}

#[test]
fn a_silent_server_is_named_and_waited_for() {
    let mut bench = started(job(2, 2, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    train(&mut bench, &[0, 1], 2, &[]);
    bench.stand_still(bench.shard_node(1), 20.0);
    let third = bench.add_worker();
    let start = join(&mut bench, third);
    bench.pass(12.0);
    assert_eq!(bench.outcome(third, start), None);
    let why = bench.explain(third, start);
    assert!(why.contains("server 1 core 0 has not entered epoch 2 yet"), "{why}");
    let phase = bench.coordinator().status(bench.now()).phase;
    assert!(phase.contains("server 1 core 0 has not entered epoch 2 yet"), "{phase}");
    let told = |bench: &Bench, what: &str| bench.log().iter().filter(|line| line.contains(what)).count();
    assert_eq!(
        told(&bench, "server 1 core 0 is silent for 10 s; the job waits for it"),
        1,
        "{:?}",
        bench.log()
    );
    bench.pass(10.0);
    assert_eq!(told(&bench, "server 1 core 0 is heard again"), 1, "{:?}", bench.log());
    train(&mut bench, &[0, 1, third], 6, &[(third, start)]);
    assert_steps(&bench, 6);
}

/// The work of one that died is not done, though others have left with theirs.
#[test]
fn a_worker_that_died_last_is_waited_for_if_workers_are_started_anew() {
    for grace in [Duration::ZERO, Duration::from_secs(60)] {
        let config = JobConfig { restart_grace: grace, ..job(2, 1, "bsp", "sgd:lr=1") };
        let mut bench = started(config, 1, ELEMENTS);
        train(&mut bench, &[0, 1], 2, &[]);
        let now = bench.now();
        bench.worker_mut(0).leave(now);
        bench.run();
        bench.isolate(bench.worker_node(1));
        bench.pass(4.0);
        if grace.is_zero() {
            assert_eq!(bench.stopped(), [None, None], "coordinator and shard; {:?}", bench.log());
            let phase = bench.coordinator().status(bench.now()).phase;
            assert_eq!(phase, "over: all workers left or died");
            continue;
        }
        assert_eq!(bench.stopped(), []);
        let second = come(&mut bench, Some(1), None);
        let start = join(&mut bench, second);
        train(&mut bench, &[second], 4, &[(second, start)]);
        assert_steps(&bench, 4);
    }
}
