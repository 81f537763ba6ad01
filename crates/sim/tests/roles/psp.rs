//! PSP-SGD between the roles, in virtual time: partial pushing and partial pulling (Algorithm 1).

use crate::bench::Bench;
use crate::{W, job, started};
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::types::NodeId;
use paramill_core::worker::{Gradient, Ticket};

const ELEMENTS: usize = 32;

/// Pushes the same gradient everywhere and ends the iteration.
fn iterate(bench: &mut Bench, worker: usize) -> Ticket {
    let now = bench.now();
    let ticket =
        bench.worker_mut(worker).push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).expect("it fits");
    bench.worker_mut(worker).clock();
    bench.run();
    ticket
}

#[test]
fn a_worker_goes_on_tau2_after_enough_blocks_and_not_before() {
    let mut bench = started(job(1, 2, "psp:c=1,b=0.5,tau2=1", "sgd:lr=1"), 1, ELEMENTS);
    bench.isolate(bench.shard_node(1));
    let ticket = iterate(&mut bench, 0);
    assert_eq!(bench.outcome(0, ticket), None, "half of the blocks are here, tau2 runs");
    bench.pass(0.999_999);
    assert_eq!(bench.outcome(0, ticket), None, "just before the boundary");
    bench.pass(0.000_001);
    assert_eq!(bench.outcome(0, ticket), Some(Ok(())), "at the boundary");
    let values = bench.worker(0).values(W);
    assert_eq!(
        (values[0], values[ELEMENTS - 1]),
        (-1.0, (ELEMENTS - 1) as f32),
        "a missing block keeps its value"
    );
}

#[test]
fn blocks_of_an_iteration_that_is_over_are_dropped_and_no_push_is_lost() {
    let mut bench = started(job(1, 2, "psp:c=1,b=0.5", "sgd:lr=1"), 1, ELEMENTS);
    bench.isolate(bench.shard_node(1));
    for _ in 0..3 {
        let ticket = iterate(&mut bench, 0);
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
    }
    assert_eq!(bench.worker(0).values(W)[ELEMENTS - 1], (ELEMENTS - 1) as f32);
    bench.heal();
    bench.pass(2.0);
    let expected = (ELEMENTS - 1) as f32 - 3.0;
    assert_eq!(bench.parameters(W, ELEMENTS)[ELEMENTS - 1], expected, "every push was applied once");
    assert_eq!(bench.worker(0).values(W)[ELEMENTS - 1], expected, "only the newest block was taken");
}

/// Frames of a late answer are not written. Where another model wants late answers, the rest of this one does not make it whole.
#[test]
fn half_an_answer_that_was_late_is_none_after_a_switch() {
    const ALL: usize = usize::MAX;
    for delivered in 0..6 {
        let mut config = job(1, 2, "psp:c=1,b=0.5", "sgd:lr=1");
        config.policy = config.policy.with(Axis::Chunk, "16B").with(Axis::AnswerCodec, "bitmap+snappy");
        let mut bench = started(config, 1, ELEMENTS);
        let (worker, first, second) = (bench.worker_node(0), bench.shard_node(0), bench.shard_node(1));
        bench.freeze();
        iterate(&mut bench, 0);
        bench.deliver(worker, second, ALL);
        bench.deliver(worker, first, ALL);
        bench.deliver(first, worker, ALL);
        iterate(&mut bench, 0);
        bench.deliver(second, worker, delivered);
        bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, "asp")])));
        for node in [first, second, worker].repeat(3) {
            bench.deliver(NodeId::Coordinator, node, ALL);
            bench.deliver(node, NodeId::Coordinator, ALL);
        }
        let report = bench.shard(1).report(bench.now()).expect("it has the plan");
        assert_eq!(report.tables[0].sync, "asp", "the switch is made");
        bench.deliver(second, worker, ALL);
        let steps: Vec<f32> =
            (ELEMENTS / 2..ELEMENTS).map(|i| i as f32 - bench.worker(0).values(W)[i]).collect();
        assert!(
            steps.iter().all(|step| *step == steps[0]),
            "{delivered} frames before the switch: {steps:?}"
        );
    }
}

/// With b = 1 there is no partial pulling: an answer is taken also where the application did not wait for it. Answers that
/// are differences need that.
#[test]
fn with_all_blocks_no_answer_is_dropped() {
    let run = |sync: &str, answer_codec: &str| {
        let mut config = job(2, 2, sync, "sgd:lr=1");
        config.policy.set(Axis::AnswerCodec, answer_codec).unwrap();
        let mut bench = started(config, 2, ELEMENTS);
        iterate(&mut bench, 0);
        iterate(&mut bench, 0);
        iterate(&mut bench, 1);
        assert_ne!(bench.worker(0).values(W)[0], 0.0, "{sync}, {answer_codec}");
        assert_eq!(bench.worker(0).values(W), bench.parameters(W, ELEMENTS), "{sync}, {answer_codec}");
        iterate(&mut bench, 1);
        assert_eq!(bench.worker(0).values(W), bench.parameters(W, ELEMENTS), "{sync}, {answer_codec}");
    };
    for answer_codec in ["none", "threshold:0.1"] {
        run("psp:c=2", answer_codec);
        run("bsp", answer_codec);
    }
}

#[test]
fn gradients_under_way_do_not_pile_up() {
    let mut bench = started(job(1, 2, "psp:c=1,b=0.5", "sgd:lr=1"), 1, ELEMENTS);
    bench.isolate(bench.shard_node(1));
    let due = (0..20)
        .take_while(|_| {
            let ticket = iterate(&mut bench, 0);
            bench.outcome(0, ticket) == Some(Ok(()))
        })
        .count();
    assert_eq!(due, paramill_core::limits::MAX_CLOCKS_UNACKNOWLEDGED);
}

#[test]
fn a_round_closes_with_c_gradients_and_a_late_one_is_dropped() {
    let mut bench = started(job(3, 1, "psp:c=2", "sgd:lr=3"), 1, ELEMENTS);
    let tickets = [iterate(&mut bench, 0), iterate(&mut bench, 1)];
    assert_eq!((bench.outcome(0, tickets[0]), bench.outcome(1, tickets[1])), (Some(Ok(())), Some(Ok(()))));
    // Linear scaling: two of three workers make two thirds of the learning rate.
    assert_eq!(bench.parameters(W, ELEMENTS)[0], -2.0);
    let late = iterate(&mut bench, 2);
    assert_eq!(bench.outcome(2, late), Some(Ok(())), "its pull is answered at once");
    assert_eq!(bench.parameters(W, ELEMENTS)[0], -2.0, "its gradient is dropped");
    assert_eq!(bench.shard(0).report(bench.now()).unwrap().tables[0].stats.dropped, 1);
}

#[test]
fn c_of_all_workers_and_all_blocks_is_bsp_bit_for_bit() {
    let run = |sync: &str| {
        let mut bench = started(job(3, 2, sync, "momentum:lr=0.1"), 2, ELEMENTS);
        for step in 0..5 {
            for worker in [2, 0, 1] {
                let gradient: Vec<f32> =
                    (0..ELEMENTS).map(|i| ((i * 7 + worker * 13 + step * 5) as f32 / 11.0).sin()).collect();
                let now = bench.now();
                bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).unwrap();
                bench.worker_mut(worker).clock();
                bench.run();
            }
        }
        bench.parameters(W, ELEMENTS).iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(run("psp:c=3,b=1"), run("bsp"));
    assert_eq!(run("psp:c=3,b=100%,tau1=1,tau2=1"), run("bsp"));
}
