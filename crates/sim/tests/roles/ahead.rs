//! Answers that begin before their round closes.

use super::bench::Bench;
use super::{W, job, started};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::types::{NodeId, ServerId, ShardId};
use paramill_core::wire::Kind;
use paramill_core::worker::{Gradient, Ticket};

const SHARD: NodeId = NodeId::Shard(ShardId { server: ServerId(0), core: 0 });
const ELEMENTS: usize = 32;

/// Two workers and a table of four chunks. The first worker has pushed; of the other's push two chunks are here.
fn half_pushed() -> (Bench, [Ticket; 2]) {
    let mut config: JobConfig = job(2, 1, "bsp", "sgd:lr=1");
    config.policy = config.policy.with(Axis::Order, "arrival");
    let mut bench = started(config, 1, ELEMENTS);
    let second = bench.worker_node(1);
    bench.world.hold(second, SHARD);
    let mut push = |worker: usize, gradient: f32| {
        let now = bench.now();
        let gradient = [gradient; ELEMENTS];
        let ticket =
            bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
        bench.worker_mut(worker).clock();
        ticket
    };
    let tickets = [push(0, 2.0), push(1, 4.0)];
    bench.deliver(second, SHARD, 2);
    (bench, tickets)
}

/// The rest of the push arrives.
fn complete(bench: &mut Bench) {
    bench.world.release(bench.worker_node(1), SHARD);
    bench.run();
}

fn after(steps: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|element| element as f32 - if element < steps { 3.0 } else { 0.0 }).collect()
}

fn assert_both_have(bench: &mut Bench, tickets: [Ticket; 2], expected: &[f32]) {
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
        assert_eq!(bench.worker(worker).values(W), expected, "worker {worker}");
    }
    assert_eq!(bench.parameters(W, ELEMENTS), expected);
}

#[test]
fn a_chunk_comes_as_soon_as_everybody_pushed_it_and_the_answer_is_whole_when_the_round_closes() {
    let whole = ELEMENTS as u64 * 4;
    let (mut bench, tickets) = half_pushed();
    for (worker, ticket) in tickets.into_iter().enumerate() {
        let report = bench.worker(worker).report();
        assert_eq!(report.bytes_pulled, whole + whole / 2, "the initial values, and half of the answer");
        assert_eq!(bench.worker(worker).values(W), after(0), "half a step is not shown");
        assert_eq!(bench.outcome(worker, ticket), None);
    }
    let pulled = bench.worker(0).report().bytes_pulled;
    complete(&mut bench);
    assert_both_have(&mut bench, tickets, &after(ELEMENTS));
    let rest = bench.worker(0).report().bytes_pulled - pulled;
    assert_eq!(rest, ELEMENTS as u64 / 2 * 4, "what was sent is not sent again");
}

#[test]
fn an_answer_that_a_broken_connection_cut_short_comes_whole_again() {
    for worker in 0..2 {
        let (mut bench, tickets) = half_pushed();
        bench.reset(bench.worker_node(worker), SHARD);
        complete(&mut bench);
        bench.pass(1.0);
        assert_both_have(&mut bench, tickets, &after(ELEMENTS));
    }
}

#[test]
fn an_answer_begins_anew_when_the_model_is_switched_in_the_middle_of_it() {
    for sync in ["ssp:s=2", "asp", "psp:c=1"] {
        let (mut bench, tickets) = half_pushed();
        // The rest of the push waits for the switch.
        bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)])));
        complete(&mut bench);
        let expected = bench.parameters(W, ELEMENTS);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(
                bench.outcome(worker, ticket),
                Some(Ok(())),
                "{sync}: {}",
                bench.explain(worker, ticket)
            );
        }
        assert_eq!(bench.worker(1).values(W), expected, "{sync}: who comes last has everything");
    }
}

#[test]
fn a_worker_that_dies_in_the_middle_does_not_take_back_what_was_answered() {
    let (mut bench, tickets) = half_pushed();
    bench.isolate(bench.worker_node(1));
    bench.run();
    bench.pass(10.0);
    assert_eq!(bench.outcome(0, tickets[0]), Some(Ok(())));
    // Chunks that had both gradients are a mean of two, the others are the first worker's.
    let expected: Vec<f32> =
        (0..ELEMENTS).map(|element| element as f32 - if element < 16 { 3.0 } else { 2.0 }).collect();
    assert_eq!(bench.worker(0).values(W), expected);
    assert_eq!(bench.parameters(W, ELEMENTS), expected);
}

#[test]
fn an_answer_that_is_ahead_is_the_acknowledgement_too() {
    let (mut bench, tickets) = half_pushed();
    complete(&mut bench);
    assert_both_have(&mut bench, tickets, &after(ELEMENTS));
    assert_eq!(
        bench.tally.frames(Kind::PushAck),
        1,
        "of the initial values: nothing stands between the chunks of an answer"
    );
}

#[test]
fn who_is_kept_waiting_hears_that_its_push_arrived_and_may_leave() {
    let (mut bench, _) = half_pushed();
    let before = bench.tally.frames(Kind::PushAck);
    let now = bench.now();
    let leave = bench.worker_mut(0).leave(now);
    bench.pass(1.0);
    assert_eq!(bench.tally.frames(Kind::PushAck), before + 1);
    assert_eq!(bench.outcome(0, leave), Some(Ok(())), "{}", bench.explain(0, leave));
}
