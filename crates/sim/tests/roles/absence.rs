//! Elements that have no gradient: not stepped where nobody has one, zeros where some have.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]

use super::bench::Bench;
use super::{W, job};
use paramill_core::coordinator::JobConfig;
use paramill_core::hands::Alone;
use paramill_core::policy::{Axis, Order, Policy};
use paramill_core::table::TableSpec;
use paramill_core::worker::{Gradient, Slab};
use std::ops::Range;

const ELEMENTS: usize = 50;
/// The end of a chunk, a whole one, and the beginning of another: chunks have eight elements.
const PART: Range<usize> = 5..19;

/// A job whose workers exchange slabs of one table.
struct Run {
    bench: Bench,
    slabs: Vec<Vec<Slab>>,
}

impl Run {
    fn new(policy: Policy, workers: u32, through: &[usize]) -> Run {
        let config = JobConfig { policy, ..job(workers, 2, "bsp", "sgd") };
        let mut bench = Bench::with_aggregators(config, 2, through);
        let initial = (0..ELEMENTS).map(|at| (at as f32 - 20.0) / 8.0).collect();
        bench.declare_and_start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
        bench.pass(1.0);
        let slab = |worker: usize| vec![bench.worker_mut(worker).slab(W).expect("a dense table")];
        let slabs = (0..workers as usize).map(slab).collect();
        Run { bench, slabs }
    }

    /// A step in which each worker has `gradient(worker, element)`, but for the ranges that it lacks: there is rubbish.
    fn step(
        &mut self,
        gradient: impl Fn(usize, usize) -> f32,
        lacks: impl Fn(usize) -> Vec<Range<usize>>,
    ) -> Vec<f32> {
        let mut tickets = Vec::new();
        for worker in 0..self.slabs.len() {
            let slab = &mut self.slabs[worker][0];
            let missing = lacks(worker);
            for (at, value) in slab.gradient_mut().iter_mut().enumerate() {
                let is_missing = missing.iter().any(|range| range.contains(&at));
                *value = if is_missing { 3.5 } else { gradient(worker, at) };
            }
            slab.lacks(missing).expect("ranges of the table");
            let now = self.bench.now();
            tickets
                .push(self.bench.worker_mut(worker).exchange(now, &mut self.slabs[worker]).expect("it fits"));
            self.bench.worker_mut(worker).clock();
            self.bench.run();
        }
        self.bench.pass(0.05);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            let outcome = self.bench.outcome(worker, ticket);
            assert_eq!(outcome, Some(Ok(())), "{}", self.bench.explain(worker, ticket));
            self.slabs[worker] = self.bench.worker_mut(worker).redeem_slabs(ticket);
        }
        self.bench.parameters(W, ELEMENTS)
    }
}

fn policy(sync: &str, optimizer: &str, order: Order) -> Policy {
    Policy::default()
        .with(Axis::Sync, sync)
        .with(Axis::Optimizer, optimizer)
        .with(Axis::Order, order.to_string())
        .with(Axis::Placement, "uniform")
        .with(Axis::Chunk, "32B")
}

/// Whole numbers, so that sums are the same in any order.
fn gradient(step: usize, worker: usize, at: usize) -> f32 {
    ((step * 5 + worker * 3 + at * 7) % 13) as f32 - 6.0
}

const RULES: [&str; 7] = [
    "sgd:lr=0.1,weight_decay=0.1",
    "momentum:lr=0.1,weight_decay=0.1",
    "nesterov:lr=0.1,weight_decay=0.1",
    "adagrad:lr=0.1,weight_decay=0.1",
    "rmsprop:lr=0.1,weight_decay=0.1",
    "adam:lr=0.1,weight_decay=0.1",
    "adamw:lr=0.1,weight_decay=0.1",
];

/// Steps that leave a part out are, to that part, as if they had not been: neither decay nor momentum moves it, and Adam
/// does not count them.
fn leaves_out(policy: &Policy, through: &[usize]) {
    let what = format!("{policy:?} through {through:?}");
    let (mut with, mut everything, mut part) = (
        Run::new(policy.clone(), 2, through),
        Run::new(policy.clone(), 2, through),
        Run::new(policy.clone(), 2, through),
    );
    let mut taken = 0;
    let (mut last, mut of_everything, mut of_part) = Default::default();
    for step in 0..8 {
        let is_out = [0, 3, 4, 6].contains(&step);
        let before: Vec<f32> = with.bench.parameters(W, ELEMENTS);
        let number = |at: usize| if PART.contains(&at) { taken } else { step };
        let lacks = |_| if is_out { vec![5..9, 9..19] } else { Vec::new() };
        last = with.step(|worker, at| gradient(number(at), worker, at), lacks);
        if is_out {
            assert_eq!(last[PART], before[PART], "step {step} of {what}");
        }
        assert_ne!(last[..5], before[..5], "step {step} of {what}");
        of_everything = everything.step(|worker, at| gradient(step, worker, at), |_| Vec::new());
        if !is_out {
            of_part = part.step(|worker, at| gradient(taken, worker, at), |_| Vec::new());
            taken += 1;
        }
    }
    assert_eq!(last[PART], of_part[PART], "{what}");
    assert_eq!(last[..5], of_everything[..5], "{what}");
    assert_eq!(last[19..], of_everything[19..], "{what}");
    // Who pushed last has the parameters that all pushes made.
    assert_eq!(with.slabs[1][0].values(), last, "{what}");
}

#[test]
fn what_nobody_has_a_gradient_for_is_left_out_of_a_step() {
    for rule in RULES {
        for order in [Order::Arrival, Order::Ranked] {
            for sync in ["bsp", "asp"] {
                leaves_out(&policy(sync, rule, order), &[]);
            }
        }
    }
}

/// Norms are known when a push, or a round, is complete: these steps are made from what was kept until then.
#[test]
fn clipped_steps_leave_it_out_too() {
    for sync in ["bsp", "asp"] {
        leaves_out(&policy(sync, "adamw:lr=0.1,weight_decay=0.1,clip=1e9", Order::Arrival), &[]);
    }
}

#[test]
fn an_aggregator_says_what_is_absent_from_all() {
    for (sync, through) in [("bsp", &[0, 0][..]), ("bsp", &[0, 1]), ("bsp", &[0])] {
        leaves_out(&policy(sync, "adamw:lr=0.1,weight_decay=0.1", Order::Arrival), through);
    }
    let codec = policy("bsp", "momentum:lr=0.5", Order::Arrival).with(Axis::Codec, "f16");
    leaves_out(&codec, &[0, 0]);
}

#[test]
fn where_some_have_a_gradient_the_others_count_as_zeros() {
    let lacks = |worker: usize| match worker {
        0 => vec![PART],
        1 => vec![0..3, 12..40],
        _ => Vec::new(),
    };
    for (workers, through) in [(2, &[][..]), (2, &[0, 0]), (2, &[0]), (3, &[]), (3, &[0, 0, 0])] {
        for order in [Order::Arrival, Order::Ranked] {
            let policy = policy("bsp", "adam:lr=0.1,weight_decay=0.1", order);
            let (mut with, mut zeros) =
                (Run::new(policy.clone(), workers, through), Run::new(policy, workers, through));
            let is_missing = |worker: usize, at: usize| lacks(worker).iter().any(|range| range.contains(&at));
            for step in 0..4 {
                let before = with.bench.parameters(W, ELEMENTS);
                let last = with.step(|worker, at| gradient(step, worker, at), lacks);
                let expected = zeros.step(
                    |worker, at| if is_missing(worker, at) { 0.0 } else { gradient(step, worker, at) },
                    |_| Vec::new(),
                );
                let out = if workers == 2 { 12..19 } else { 0..0 };
                assert_eq!(last[out.clone()], before[out.clone()], "{workers} {through:?}");
                assert_eq!(last[..out.start], expected[..out.start], "{workers} {through:?}");
                assert_eq!(last[out.end..], expected[out.end..], "{workers} {through:?}");
            }
        }
    }
}

/// Also by codecs that send a zero as something else, or the whole chunk as a product.
#[test]
fn codecs_leave_it_out() {
    for codec in [
        "f16",
        "int8",
        "onebit",
        "terngrad",
        "qsgd:levels=4",
        "topk:0.5",
        "randk:0.5",
        "dgc:ratio=0.5,warmup=0",
        "powersgd:rank=1",
        "bitmap+lz4",
        "warmup:2+topk:0.5",
    ] {
        for through in [&[][..], &[0, 0]] {
            let policy = policy("bsp", "momentum:lr=0.1,weight_decay=0.1", Order::Arrival);
            let policy = policy.with(Axis::Codec, codec);
            let mut run = Run::new(policy, 2, through);
            let initial = run.bench.parameters(W, ELEMENTS);
            for step in 0..4 {
                let last = run.step(|worker, at| gradient(step, worker, at), |_| vec![PART]);
                assert_eq!(last[PART], initial[PART], "{codec} through {through:?}");
            }
            // One of them has a gradient now; the other's part of the mean is zero, whatever a codec makes of that.
            let lacks = |worker| if worker == 1 { vec![PART] } else { Vec::new() };
            let last = run.step(|_, at| if PART.contains(&at) { 0.0 } else { 1.0 }, lacks);
            assert_ne!(last[..5], initial[..5], "{codec} through {through:?}");
        }
    }
}

/// The codecs that keep something, of every kind.
const KEEPING: [&str; 8] = [
    "topk:0.25",
    "threshold:4.5",
    "dvf:delta=4.5",
    "significance:0.5",
    "onebit",
    "powersgd:rank=1",
    "ef+int8",
    "dgc:ratio=0.25,warmup=0",
];

/// A residual never gets to zero under most codecs. It does not move a parameter that is frozen.
#[test]
fn what_is_frozen_does_not_move_whatever_its_codec_keeps() {
    for codec in KEEPING {
        for through in [&[][..], &[0, 0]] {
            let policy = policy("bsp", "momentum:lr=0.1,weight_decay=0.1", Order::Arrival);
            let mut run = Run::new(policy.with(Axis::Codec, codec), 2, through);
            for step in 0..3 {
                run.step(|worker, at| gradient(step, worker, at) + 0.3, |_| Vec::new());
            }
            let frozen = run.bench.parameters(W, ELEMENTS);
            for step in 3..9 {
                let last = run.step(|worker, at| gradient(step, worker, at) + 0.3, |_| vec![PART]);
                assert_eq!(last[PART], frozen[PART], "step {step} of {codec} through {through:?}");
            }
            assert_ne!(run.bench.parameters(W, ELEMENTS)[19..], frozen[19..], "{codec} through {through:?}");
        }
    }
}

/// To a chunk that is frozen, steps are as if they had not been, for its codec as for its optimizer.
#[test]
fn what_a_codec_keeps_of_a_frozen_chunk_is_as_it_was_when_it_is_used_again() {
    const WHOLE: Range<usize> = 8..16;
    // Those that look neither at the number of a step nor at other chunks of the layer.
    for codec in ["threshold:4.5", "onebit", "ef+int8", "threshold:4.5+bf16"] {
        for through in [&[][..], &[0, 0]] {
            let policy = policy("bsp", "momentum:lr=0.1,weight_decay=0.1", Order::Arrival);
            let policy = policy.with(Axis::Codec, codec);
            let (mut with, mut without) =
                (Run::new(policy.clone(), 2, through), Run::new(policy, 2, through));
            for step in 0..6 {
                let gradient = |worker: usize, at: usize| gradient(step, worker, at) + 0.3;
                with.step(gradient, |_| Vec::new());
                without.step(gradient, |_| Vec::new());
                if step == 2 {
                    (0..4).for_each(|_| _ = with.step(gradient, |_| vec![WHOLE]));
                }
            }
            let [with, without] = [with, without].map(|run| run.bench.parameters(W, ELEMENTS));
            assert_eq!(with[WHOLE], without[WHOLE], "{codec} through {through:?}");
        }
    }
}

/// A parameter that is used every other step gets all of its gradients, also those that its codec held back.
#[test]
fn what_is_owed_waits_and_is_delivered_when_there_is_a_gradient_again() {
    for through in [&[][..], &[0, 0]] {
        let plain = policy("bsp", "sgd:lr=1", Order::Arrival);
        let policy = plain.clone().with(Axis::Codec, "topk:0.25");
        let (mut run, mut plain) = (Run::new(policy, 2, through), Run::new(plain, 2, through));
        for step in 0..3 {
            let gradient = |worker: usize, at: usize| {
                gradient(step, worker, at) * if PART.contains(&at) { 1.0 } else { 2.0 }
            };
            run.step(gradient, |_| Vec::new());
            plain.step(gradient, |_| Vec::new());
            let before = run.bench.parameters(W, ELEMENTS);
            let nothing = |_, _| 0.0;
            assert_eq!(run.step(nothing, |_| vec![PART])[PART], before[PART], "{through:?}");
        }
        let expected = plain.bench.parameters(W, ELEMENTS);
        assert_ne!(run.bench.parameters(W, ELEMENTS)[PART], expected[PART]);
        (0..12).for_each(|_| _ = run.step(|_, _| 0.0, |_| Vec::new()));
        assert_eq!(run.bench.parameters(W, ELEMENTS), expected, "{through:?}");
    }
}

/// What a threshold holds back waits for as long as there is no gradient, and is sent with the next one.
#[test]
fn thresholds_are_passed_together_with_what_was_held() {
    for codec in ["threshold:4.5", "dvf:delta=4.5"] {
        let policy = policy("bsp", "sgd:lr=1", Order::Arrival);
        let mut run = Run::new(policy.with(Axis::Codec, codec), 1, &[]);
        let initial = run.bench.parameters(W, ELEMENTS);
        run.step(|_, _| 4.0, |_| Vec::new());
        // DVF's threshold falls below 4 meanwhile, and to 1.7 in the end.
        (0..5).for_each(|_| _ = run.step(|_, _| 0.0, |_| vec![PART]));
        assert_eq!(run.bench.parameters(W, ELEMENTS)[PART], initial[PART], "{codec}");
        let last = run.step(|_, _| 1.0, |_| Vec::new());
        let moved: Vec<f32> = initial[PART].iter().map(|value| value - 5.0).collect();
        assert_eq!(last[PART], moved, "{codec}");
    }
}

/// Means of gradients are not parameters: where nobody has a gradient the mean is zero, and not that of an earlier step.
#[test]
fn a_rule_can_have_zeros_for_what_is_absent() {
    for through in [&[][..], &[0, 0]] {
        let policy = policy("bsp", "sgd:lr=1,weight_decay=1,absent=zeros", Order::Arrival);
        let mut run = Run::new(policy.with(Axis::Codec, "topk:0.25"), 2, through);
        // The largest 13 of the layer are all but one of the part's 14.
        let large = |_, at: usize| if PART.contains(&at) { 100.0 + at as f32 } else { 1.0 };
        let means = run.step(large, |_| Vec::new());
        assert!(means[8..16].iter().any(|mean| *mean != 0.0), "{means:?}");
        for _ in 0..3 {
            assert_eq!(run.step(|_, _| 1.0, |_| vec![PART])[PART], [0.0; 14]);
        }
        let held = run.step(|_, _| 0.0, |_| Vec::new());
        // The one that the workers kept goes now.
        match through {
            [] => {
                assert_eq!(held[PART.start], -100.0 - PART.start as f32);
                assert_eq!(held[PART.start + 1..PART.end], [0.0; 13]);
            }
            // An aggregator sent the largest two of the chunk with the first step, and sends the next two now.
            _ => assert_eq!(held[8..16], [0.0, 0.0, 0.0, 0.0, -112.0, -113.0, 0.0, 0.0]),
        }
    }
}

#[test]
fn a_push_that_is_sent_again_lacks_the_same() {
    let policy = policy("bsp", "momentum:lr=0.1,weight_decay=0.1", Order::Arrival);
    let mut run = Run::new(policy, 1, &[]);
    let initial = run.bench.parameters(W, ELEMENTS);
    run.slabs[0][0].gradient_mut().fill(1.0);
    run.slabs[0][0].lacks(vec![PART]).unwrap();
    let now = run.bench.now();
    let ticket = run.bench.worker_mut(0).exchange(now, &mut run.slabs[0]).unwrap();
    let node = run.bench.worker_node(0);
    for shard in 0..4 {
        run.bench.reset(node, run.bench.shard_node(shard));
    }
    run.bench.run();
    run.bench.pass(1.0);
    assert_eq!(run.bench.outcome(0, ticket), Some(Ok(())));
    let last = run.bench.parameters(W, ELEMENTS);
    assert_eq!(last[PART], initial[PART]);
    assert_ne!(last[..5], initial[..5]);
}

#[test]
fn ranges_that_cannot_be_are_refused_and_hold_for_one_exchange() {
    let mut run = Run::new(policy("bsp", "sgd:lr=1,weight_decay=0.5", Order::Arrival), 1, &[]);
    let slab = &mut run.slabs[0][0];
    for ranges in [vec![3..3], vec![40..51], vec![4..8, 6..9], vec![9..10, 0..4]] {
        let error = slab.lacks(ranges).expect_err("they cannot be");
        assert!(
            error.to_string().contains("ascending, disjoint, not empty, and within its 50 elements"),
            "{error}"
        );
    }
    let many = slab.lacks(vec![0..1; 65_537]).expect_err("too many");
    assert!(many.to_string().contains("at most 65536"), "{many}");
    slab.lacks(vec![0..50]).unwrap();
    let initial = run.bench.parameters(W, ELEMENTS);
    let now = run.bench.now();
    for expected_to_move in [false, true] {
        run.slabs[0][0].gradient_mut().fill(0.0);
        let ticket = run.bench.worker_mut(0).exchange(now, &mut run.slabs[0]).unwrap();
        run.bench.worker_mut(0).clock();
        run.bench.run();
        run.slabs[0] = run.bench.worker_mut(0).redeem_slabs(ticket);
        assert_eq!(run.bench.parameters(W, ELEMENTS) != initial, expected_to_move);
    }
}

/// Nothing but a list goes over the wire for a chunk of which everything is absent.
#[test]
fn chunks_without_a_gradient_are_not_sent() {
    for codec in ["none", "f16"] {
        let policy = policy("bsp", "sgd:lr=1", Order::Arrival).with(Axis::Codec, codec);
        let mut run = Run::new(policy, 1, &[]);
        run.step(|_, _| 1.0, |_| vec![0..50]);
        // Each of two servers has half of the elements.
        let chunks = 2 * (ELEMENTS as u64 / 2).div_ceil(8);
        assert_eq!(run.bench.tally.pushed_bytes, 64 * chunks, "{codec}");
    }
}

/// What dense gradients without some ranges make of the parameters.
fn push_without(policy: &Policy, through: &[usize]) -> Vec<f32> {
    let config = JobConfig { policy: policy.clone(), ..job(2, 2, "bsp", "sgd") };
    let mut bench = Bench::with_aggregators(config, 2, through);
    let initial = (0..ELEMENTS).map(|at| (at as f32 - 20.0) / 8.0).collect();
    bench.declare_and_start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
    bench.pass(1.0);
    for step in 0..6 {
        let mut tickets = Vec::new();
        for worker in 0..2 {
            let missing = ranges_of(step, worker);
            let value = |at: usize| {
                if missing.iter().any(|range| range.contains(&at)) { 0.0 } else { gradient(step, worker, at) }
            };
            let values: Vec<f32> = (0..ELEMENTS).map(value).collect();
            let now = bench.now();
            let pushing = bench.worker_mut(worker);
            let mut submission =
                pushing.begin_push(W, Gradient::Dense(&values), missing.clone(), true).expect("it fits");
            submission.prepare(&Alone);
            tickets.push(pushing.finish(now, &mut submission).expect("it is finite"));
            pushing.clock();
            bench.run();
        }
        bench.pass(0.05);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            let outcome = bench.outcome(worker, ticket);
            assert_eq!(outcome, Some(Ok(())), "{}", bench.explain(worker, ticket));
            let here = bench.worker_mut(worker).values(W).to_vec();
            assert_eq!(here, bench.parameters(W, ELEMENTS));
        }
    }
    bench.parameters(W, ELEMENTS)
}

/// What a worker lacks in a step: now the one, now the other, now both.
fn ranges_of(step: usize, worker: usize) -> Vec<Range<usize>> {
    if step % 3 == worker { Vec::new() } else { vec![5..9, 9..19, 40..50] }
}

#[test]
fn a_dense_gradient_lacks_what_a_slab_can_lack() {
    for codec in ["none", "f16", "topk:0.5"] {
        for through in [&[][..], &[0, 1]] {
            let policy =
                policy("bsp", "adam:lr=0.1,weight_decay=0.1", Order::Ranked).with(Axis::Codec, codec);
            let mut slabs = Run::new(policy.clone(), 2, through);
            let mut expected = Vec::new();
            for step in 0..6 {
                expected =
                    slabs.step(|worker, at| gradient(step, worker, at), |worker| ranges_of(step, worker));
            }
            assert_eq!(push_without(&policy, through), expected, "{codec} through {through:?}");
        }
    }
}

#[test]
fn ranges_that_a_table_does_not_have_are_refused() {
    let mut run = Run::new(policy("bsp", "sgd:lr=0.1", Order::Arrival), 1, &[]);
    let slab = run.slabs[0].remove(0);
    let worker = run.bench.worker_mut(0);
    worker.give_back(slab).expect("its own");
    let zeros = [0.0; ELEMENTS];
    let why = worker.begin_push(W, Gradient::Dense(&zeros), vec![40..51], false).expect_err("beyond the end");
    assert!(why.to_string().contains("within its 50 elements"), "{why}");
    assert!(!worker.has_pushed(W));
    worker.begin_push(W, Gradient::Dense(&zeros), vec![40..50], false).expect("it fits");
    assert!(worker.has_pushed(W));
}
