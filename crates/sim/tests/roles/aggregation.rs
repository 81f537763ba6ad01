//! Workers that go through an aggregator: the same results with fewer bytes, whatever breaks.

use super::{W, job};
use crate::bench::Bench;
use crate::processes::worker_through;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::worker::{Gradient, Ticket, WorkerError};

const ELEMENTS: usize = 50;

fn arrival(workers: u32, servers: u32, sync: &str) -> JobConfig {
    let config = job(workers, servers, sync, "sgd:lr=1");
    JobConfig { policy: config.policy.clone().with(Axis::Order, "arrival"), ..config }
}

fn started(config: JobConfig, through: &[usize]) -> Bench {
    start(Bench::with_aggregators(config, 2, through))
}

fn start(mut bench: Bench) -> Bench {
    let initial = (0..ELEMENTS).map(|i| i as f32).collect();
    let tables = [(TableSpec::dense("w", [ELEMENTS as u64]), initial)];
    bench.declare_and_start(&tables);
    bench.pass(1.0);
    for worker in 0..bench.worker_count() {
        let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32).collect();
        assert_eq!(bench.worker(worker).values(W), expected, "{:?}", bench.log());
    }
    bench
}

/// A gradient of whole numbers: adding them is exact in any order.
fn gradient(worker: usize, clock: u64) -> Vec<f32> {
    (0..ELEMENTS).map(|i| ((worker * 7 + clock as usize * 3 + i) % 16) as f32 - 8.0).collect()
}

fn push(bench: &mut Bench, worker: usize) -> Ticket {
    let now = bench.now();
    let gradient = gradient(worker, bench.worker(worker).current_clock());
    let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
    bench.worker_mut(worker).clock();
    ticket
}

fn assert_done(bench: &mut Bench, tickets: &[(usize, Ticket)]) {
    for &(worker, ticket) in tickets {
        let outcome = bench.outcome(worker, ticket);
        assert_eq!(
            outcome,
            Some(Ok(())),
            "worker {worker}: {} {:?}",
            bench.explain(worker, ticket),
            bench.log()
        );
    }
}

/// The parameters after some rounds of everybody, with or without aggregators.
fn after_rounds(config: JobConfig, through: &[usize], rounds: u64) -> (Vec<f32>, Bench) {
    rounds_of(started(config, through), rounds)
}

fn rounds_of(mut bench: Bench, rounds: u64) -> (Vec<f32>, Bench) {
    for _ in 0..rounds {
        let tickets: Vec<_> = (0..bench.worker_count())
            .map(|worker| {
                let ticket = push(&mut bench, worker);
                bench.run();
                (worker, ticket)
            })
            .collect();
        bench.pass(0.01);
        assert_done(&mut bench, &tickets);
        let parameters = bench.parameters(W, ELEMENTS);
        for worker in bench.workers() {
            assert_eq!(worker.values(W), parameters);
        }
    }
    (bench.parameters(W, ELEMENTS), bench)
}

#[test]
fn a_synchronous_job_ends_with_the_same_bits() {
    let (direct, _) = after_rounds(arrival(4, 2, "bsp"), &[], 5);
    for through in [&[0, 0, 0, 0][..], &[0, 0, 1, 1], &[0, 1, 0], &[0]] {
        let (parameters, _) = after_rounds(arrival(4, 2, "bsp"), through, 5);
        assert_eq!(parameters, direct, "{through:?}");
    }
}

#[test]
fn one_sum_goes_up_where_four_gradients_came() {
    let (_, direct) = after_rounds(arrival(4, 2, "bsp"), &[], 10);
    let (_, bench) = after_rounds(arrival(4, 2, "bsp"), &[0, 0, 0, 0], 10);
    assert_eq!(bench.tally.pushed_bytes * 4, direct.tally.pushed_bytes);
    let report = bench.aggregator(0).report();
    assert_eq!((report.workers, report.gradients), (4, 4 * 10 * 4), "four shards");
    assert_eq!(report.groups, 10 * 4);
    // Each asks for the parameters itself.
    assert_eq!(report.bytes_from_servers, report.bytes_to_workers);
}

/// Two servers of two cores: the first core of the aggregator stands for two shards, the others for one each.
#[test]
fn the_cores_of_an_aggregator_share_the_shards_and_nothing_else() {
    let (direct, _) = after_rounds(arrival(4, 2, "bsp"), &[], 5);
    let bench = start(Bench::with_aggregator_cores(arrival(4, 2, "bsp"), 2, 3));
    let (parameters, mut bench) = rounds_of(bench, 5);
    assert_eq!(parameters, direct);
    let groups = [0, 1, 2].map(|core| bench.aggregator(core).report().groups);
    assert_eq!(groups, [2 * 5, 5, 5]);
    // Each has its own connections: what breaks at one of them is nothing to the others.
    bench.reset(bench.worker_node(1), bench.aggregator_node(0));
    bench.reset(bench.aggregator_node(2), bench.shard_node(2));
    bench.pass(2.0);
    let (parameters, bench) = rounds_of(bench, 5);
    let (direct, _) = after_rounds(arrival(4, 2, "bsp"), &[], 10);
    assert_eq!(parameters, direct);
    assert_eq!(bench.coordinator().status(bench.now()).aggregators.len(), 3);
}

/// A worker that was given the address of one core only is told so.
#[test]
fn a_core_refuses_shards_that_it_does_not_stand_for() {
    let config = arrival(1, 1, "bsp");
    let mut bench = Bench::without_workers(config, 2, 0);
    bench.add_aggregator_core(0, 2);
    bench.add(worker_through(bench.now(), 0, None, Some("aggregator:0")));
    let tickets = bench.declare_and_start(&[(TableSpec::dense("w", [50]), vec![0.0; 50])]);
    bench.pass(1.0);
    let outcome = bench.outcome(0, tickets[0]).expect("it is over").unwrap_err().to_string();
    assert!(outcome.contains("give the addresses of all its cores"), "{outcome}");
}

#[test]
fn every_model_goes_on_and_sees_the_real_workers() {
    for sync in ["asp", "ssp:s=1", "drop:n=3", "pssp:s=1,c=0.5", "pssp:s=1,alpha=significance", "dsps"] {
        let (_, bench) = after_asynchronous_rounds(sync);
        for shard in bench.shards() {
            let report = shard.report(bench.now()).unwrap();
            assert_eq!(report.tables[0].stats.pushes + report.tables[0].stats.dropped, 4 * 5, "{sync}");
            assert_eq!(report.tables[0].version, 5, "{sync}");
        }
    }
}

fn after_asynchronous_rounds(sync: &str) -> (Vec<f32>, Bench) {
    let mut bench = started(arrival(4, 2, sync), &[0, 0, 1, 1]);
    for _ in 0..5 {
        let tickets: Vec<_> = (0..4).map(|worker| (worker, push(&mut bench, worker))).collect();
        bench.pass(0.1);
        assert_done(&mut bench, &tickets);
    }
    (bench.parameters(W, ELEMENTS), bench)
}

#[test]
fn a_fast_worker_is_held_up_for_no_longer_than_was_said() {
    let mut bench = started(arrival(2, 1, "asp"), &[0, 0]);
    let ticket = push(&mut bench, 0);
    bench.run();
    assert_eq!(bench.outcome(0, ticket), None);
    bench.pass(0.004);
    assert_eq!(bench.outcome(0, ticket), None);
    bench.pass(0.002);
    assert_done(&mut bench, &[(0, ticket)]);
    assert_eq!(bench.shard(0).report(bench.now()).unwrap().tables[0].stats.pushes, 1);
}

#[test]
fn a_gradient_that_is_added_by_rank_stays_alone() {
    let config = job(3, 1, "bsp", "sgd:lr=1");
    let (direct, _) = after_rounds(config.clone(), &[], 3);
    let (parameters, bench) = after_rounds(config, &[0, 0, 0], 3);
    assert_eq!(parameters, direct);
    assert_eq!(bench.aggregator(0).report().groups, 0);
}

#[test]
fn connections_may_break_at_any_time_and_every_gradient_counts_once() {
    for victim in ["worker", "shard", "both"] {
        let mut bench = started(arrival(3, 2, "bsp"), &[0, 0, 0]);
        let (direct, _) = after_rounds(arrival(3, 2, "bsp"), &[], 4);
        for step in 0..4 {
            let mut tickets = Vec::new();
            for worker in 0..3 {
                tickets.push((worker, push(&mut bench, worker)));
                bench.run();
                // What was answered is on its way and is lost.
                if step > 0 && worker != 1 {
                    let aggregator = bench.aggregator_node(0);
                    if victim != "shard" {
                        bench.reset(bench.worker_node((worker + step) % 3), aggregator);
                    }
                    if victim != "worker" {
                        bench.reset(aggregator, bench.shard_node(step % 4));
                    }
                    bench.run();
                }
            }
            bench.pass(2.0);
            assert_done(&mut bench, &tickets);
        }
        assert_eq!(bench.parameters(W, ELEMENTS), direct, "{victim}");
    }
}

/// A worker's push is in a sum that its shard has not noted. It sends it again on another connection, which breaks too
/// before the note comes: the aggregator may not ask in its name then, as the answer would reach its third connection in
/// part.
#[test]
fn no_answer_is_begun_for_a_worker_that_is_away() {
    for frames in 0..30 {
        let mut bench = started(arrival(2, 1, "asp"), &[0]);
        let (worker, aggregator, shard) =
            (bench.worker_node(0), bench.aggregator_node(0), bench.shard_node(0));
        bench.world.hold(shard, aggregator);
        let ticket = push(&mut bench, 0);
        bench.run();
        bench.reset(worker, aggregator);
        bench.pass(1.0);
        assert_eq!(bench.outcome(0, ticket), None);
        bench.cut(worker, aggregator);
        // The parameters are others now: an answer has all of them.
        let other = push(&mut bench, 1);
        bench.run();
        // One by one, since the shard may say more when it is asked.
        (0..frames).for_each(|_| bench.deliver(shard, aggregator, 1));
        bench.heal();
        bench.pass(1.0);
        bench.thaw();
        bench.pass(1.0);
        assert_done(&mut bench, &[(0, ticket), (1, other)]);
        let values = bench.worker(0).values(W);
        bench.shard(0).for_each_chunk(W, |start, chunk| {
            assert_eq!(&values[start as usize..][..chunk.len()], chunk, "after {frames} frames");
        });
    }
}

#[test]
fn a_member_that_dies_is_not_waited_for() {
    let mut config = arrival(4, 1, "bsp");
    config.policy.set(Axis::Reduce, "sum").unwrap();
    let mut bench = started(config, &[0, 0, 1, 1]);
    bench.isolate(bench.worker_node(1));
    let tickets: Vec<_> = [0, 2, 3].map(|worker| (worker, push(&mut bench, worker))).to_vec();
    bench.run();
    assert_eq!(bench.outcome(0, tickets[0].1), None);
    bench.pass(5.0);
    assert_done(&mut bench, &tickets);
    let sum = |i: usize| [0, 2, 3].map(|worker| gradient(worker, 0)[i]).iter().sum::<f32>();
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - sum(i)).collect();
    assert_eq!(bench.parameters(W, ELEMENTS), expected);
    assert_eq!(bench.aggregator(0).report().workers, 1);
    // The next round does not wait for the time that a push is held.
    let tickets: Vec<_> = [0, 2, 3].map(|worker| (worker, push(&mut bench, worker))).to_vec();
    bench.run();
    assert_done(&mut bench, &tickets);
}

#[test]
fn a_dead_aggregator_is_named_by_its_workers_and_the_others_go_on() {
    let mut bench = started(arrival(2, 1, "asp"), &[0]);
    bench.isolate(bench.aggregator_node(0));
    let lost = push(&mut bench, 0);
    let other = push(&mut bench, 1);
    bench.pass(1.0);
    assert_done(&mut bench, &[(1, other)]);
    bench.pass(40.0);
    match bench.outcome(0, lost) {
        Some(Err(WorkerError::Unreachable(sentence))) => {
            assert!(
                sentence.contains("server 0 core 0 through the aggregator at aggregator:0"),
                "{sentence}"
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_push_too_far_ahead_is_refused_for_those_who_made_it_and_can_be_made_again() {
    let mut bench = started(arrival(3, 1, "bsp"), &[0, 0]);
    let try_clock = |bench: &mut Bench, workers: &[usize]| {
        let now = bench.now();
        let push = |worker: &usize| {
            let gradient = gradient(*worker, bench.worker(*worker).current_clock());
            bench.worker_mut(*worker).push(now, W, Gradient::Dense(&gradient), false).unwrap()
        };
        let tickets: Vec<Ticket> = workers.iter().map(push).collect();
        bench.run();
        let outcomes = workers.iter().zip(tickets).map(|(&worker, ticket)| bench.outcome(worker, ticket));
        outcomes.collect::<Vec<_>>()
    };
    for _ in 0..5 {
        assert_eq!(try_clock(&mut bench, &[0, 1]), [Some(Ok(())), Some(Ok(()))]);
        [0, 1].into_iter().for_each(|worker| bench.worker_mut(worker).clock());
    }
    let outcomes = try_clock(&mut bench, &[0, 1]);
    for outcome in outcomes {
        let error = outcome.expect("it is refused").unwrap_err();
        assert!(error.to_string().contains("at most 4 rounds ahead are kept"), "{error}");
    }
    assert_eq!(try_clock(&mut bench, &[2]), [Some(Ok(()))]);
    assert_eq!(try_clock(&mut bench, &[0, 1]), [Some(Ok(())), Some(Ok(()))]);
    let stats = |bench: &Bench| bench.shard(0).report(bench.now()).unwrap().tables[0].stats.clone();
    assert_eq!((stats(&bench).pushes, stats(&bench).duplicates), (2 * 6 + 1, 0));
}

#[test]
fn models_are_switched_in_the_middle_of_everything() {
    let mut bench = started(arrival(4, 2, "bsp"), &[0, 0, 1, 1]);
    for sync in ["asp", "pssp:s=1,alpha=significance", "ssp:s=2", "bsp", "drop:n=2", "bsp"] {
        let first = push(&mut bench, 0);
        bench.run();
        bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)])));
        let mut tickets: Vec<_> = (1..4).map(|worker| (worker, push(&mut bench, worker))).collect();
        tickets.push((0, first));
        bench.pass(2.0);
        assert_done(&mut bench, &tickets);
    }
    let total: u64 = bench.shards().map(|s| s.report(bench.now()).unwrap().tables[0].stats.pushes).sum();
    let dropped: u64 = bench.shards().map(|s| s.report(bench.now()).unwrap().tables[0].stats.dropped).sum();
    assert_eq!(total + dropped, 4 * 4 * 6);
}

#[test]
fn workers_have_what_the_servers_have_after_a_switch() {
    let (_, mut bench) = after_rounds(arrival(2, 1, "bsp"), &[0, 0], 5);
    for sync in ["ssp:s=1", "bsp"] {
        bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)])));
        let tickets = [0, 1].map(|worker| (worker, push(&mut bench, worker)));
        bench.pass(0.1);
        assert_done(&mut bench, &tickets);
    }
    let expected = bench.parameters(W, ELEMENTS);
    for worker in bench.workers() {
        assert_eq!(worker.values(W), expected);
    }
}

#[test]
fn the_status_tells_of_aggregators_and_a_job_ends_with_them() {
    let (_, mut bench) = after_rounds(arrival(2, 1, "bsp"), &[0, 0], 2);
    bench.pass(1.0);
    let status = bench.coordinator().status(bench.now());
    assert_eq!(status.aggregators.len(), 1);
    let aggregator = &status.aggregators[0];
    assert_eq!((aggregator.address.as_str(), aggregator.connected), ("aggregator:0", true));
    assert_eq!(aggregator.report.gradients, 2 * 2 * 2);
    for worker in 0..2 {
        let now = bench.now();
        let ticket = bench.worker_mut(worker).leave(now);
        bench.pass(0.1);
        assert_done(&mut bench, &[(worker, ticket)]);
    }
    assert_eq!(bench.stopped(), [None, None, None, None], "coordinator, two shards and the aggregator");
}
