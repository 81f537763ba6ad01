//! Answers that begin before their round closes.

use super::pump::Pump;
use super::{W, job, started};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::wire::Control;
use paramill_core::worker::{Gradient, Ticket};

const SHARD: usize = 1;
const ELEMENTS: usize = 32;

/// Two workers and a table of four chunks. The first worker has pushed; of the other's push two chunks are here.
fn half_pushed() -> (Pump, [Ticket; 2]) {
    let mut config: JobConfig = job(2, 1, "bsp", "sgd:lr=1");
    config.policy = config.policy.with(Axis::Order, "arrival");
    let mut pump = started(config, 1, ELEMENTS);
    let mut push = |worker: usize, gradient: f32| {
        let now = pump.now;
        let gradient = [gradient; ELEMENTS];
        let ticket = pump.workers[worker].push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
        pump.workers[worker].clock();
        ticket
    };
    let tickets = [push(0, 2.0), push(1, 4.0)];
    let [first, second] = [0, 1].map(|worker| pump.worker_node(worker));
    pump.deliver(first, SHARD, usize::MAX);
    pump.deliver(second, SHARD, 2);
    for worker in [first, second] {
        pump.deliver(SHARD, worker, usize::MAX);
    }
    (pump, tickets)
}

fn after(steps: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|element| element as f32 - if element < steps { 3.0 } else { 0.0 }).collect()
}

fn assert_both_have(pump: &mut Pump, tickets: [Ticket; 2], expected: &[f32]) {
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(pump.outcome(worker, ticket), Some(Ok(())), "{}", pump.explain(worker, ticket));
        assert_eq!(pump.workers[worker].values(W), expected, "worker {worker}");
    }
    assert_eq!(pump.parameters(W, ELEMENTS), expected);
}

#[test]
fn a_chunk_comes_as_soon_as_everybody_pushed_it_and_the_answer_is_whole_when_the_round_closes() {
    let whole = ELEMENTS as u64 * 4;
    let (mut pump, tickets) = half_pushed();
    for (worker, ticket) in tickets.into_iter().enumerate() {
        let report = pump.workers[worker].report();
        assert_eq!(report.bytes_pulled, whole + whole / 2, "the initial values, and half of the answer");
        assert_eq!(pump.workers[worker].values(W), after(0), "half a step is not shown");
        assert_eq!(pump.outcome(worker, ticket), None);
    }
    let pulled = pump.workers[0].report().bytes_pulled;
    pump.run();
    assert_both_have(&mut pump, tickets, &after(ELEMENTS));
    let rest = pump.workers[0].report().bytes_pulled - pulled;
    assert_eq!(rest, ELEMENTS as u64 / 2 * 4, "what was sent is not sent again");
}

#[test]
fn an_answer_that_a_broken_connection_cut_short_comes_whole_again() {
    for worker in 0..2 {
        let (mut pump, tickets) = half_pushed();
        pump.reset(pump.worker_node(worker), SHARD);
        pump.run();
        pump.pass(1.0);
        assert_both_have(&mut pump, tickets, &after(ELEMENTS));
    }
}

#[test]
fn an_answer_begins_anew_when_the_model_is_switched_in_the_middle_of_it() {
    for sync in ["ssp:s=2", "asp", "psp:c=1"] {
        let (mut pump, tickets) = half_pushed();
        // The rest of the push waits for the switch.
        let second = pump.worker_node(1);
        pump.hold(second, SHARD);
        let switch = Control::Set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)])));
        pump.command("test", &switch);
        pump.release();
        pump.run();
        let expected = pump.parameters(W, ELEMENTS);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(
                pump.outcome(worker, ticket),
                Some(Ok(())),
                "{sync}: {}",
                pump.explain(worker, ticket)
            );
        }
        assert_eq!(pump.workers[1].values(W), expected, "{sync}: who comes last has everything");
    }
}

#[test]
fn a_worker_that_dies_in_the_middle_does_not_take_back_what_was_answered() {
    let (mut pump, tickets) = half_pushed();
    pump.isolate(pump.worker_node(1));
    pump.run();
    pump.pass(10.0);
    assert_eq!(pump.outcome(0, tickets[0]), Some(Ok(())));
    // Chunks that had both gradients are a mean of two, the others are the first worker's.
    let expected: Vec<f32> =
        (0..ELEMENTS).map(|element| element as f32 - if element < 16 { 3.0 } else { 2.0 }).collect();
    assert_eq!(pump.workers[0].values(W), expected);
    assert_eq!(pump.parameters(W, ELEMENTS), expected);
}

#[test]
fn an_answer_that_is_ahead_is_the_acknowledgement_too() {
    let (mut pump, tickets) = half_pushed();
    pump.run();
    assert_both_have(&mut pump, tickets, &after(ELEMENTS));
    assert_eq!(pump.ack_frames, 1, "of the initial values: nothing stands between the chunks of an answer");
}

#[test]
fn who_is_kept_waiting_hears_that_its_push_arrived_and_may_leave() {
    let (mut pump, _) = half_pushed();
    let (second, before) = (pump.worker_node(1), pump.ack_frames);
    pump.hold(second, SHARD);
    let now = pump.now;
    let leave = pump.workers[0].leave(now);
    pump.pass(1.0);
    assert_eq!(pump.ack_frames, before + 1);
    assert_eq!(pump.outcome(0, leave), Some(Ok(())), "{}", pump.explain(0, leave));
}
