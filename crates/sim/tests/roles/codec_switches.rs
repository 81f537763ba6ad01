//! Codecs that change while a job runs: nothing is lost, nothing counts twice, and nobody waits for ever.
//!
//! Gradients are whole numbers under `sgd:lr=1` and `reduce=sum`, so that the parameters say exactly what has arrived.

use super::bench::{Bench, COORDINATOR};
use super::codecs::{patient_step, through_aggregators, with_codecs};
use super::{W, started};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::role::{Frame, Output, Role};
use paramill_core::table::TableSpec;
use paramill_core::types::NodeId;
use paramill_core::wire::control::frame;
use paramill_core::wire::{Control, DType, Header, Hello, Kind, Party};
use paramill_core::worker::{Gradient, Prepared, PullOptions, Slab, Ticket};

const ELEMENTS: usize = 100;

fn set(bench: &mut Bench, policies: &[(Axis, &str)]) {
    let rule = PolicyOverride::new("*", Policies::of(policies.iter().copied()));
    bench.set(rule);
}

/// What the coordinator says to a change that it does not make.
fn refusal(bench: &mut Bench, policies: &[(Axis, &str)]) -> String {
    let hello = Hello { job: "test".into(), from: Party::Command, incarnation: 0, to: None };
    let now = bench.now();
    let you = bench.coordinator_mut().accept(now, &hello).expect("commands are welcome").you;
    let rule = PolicyOverride::new("*", Policies::of(policies.iter().copied()));
    let Frame { header, body } = frame(Kind::Control, &Control::Set(rule));
    let now = bench.now();
    bench.coordinator_mut().handle_frame(
        now,
        you.into(),
        &header,
        body.bytes().expect("it has its bytes with it"),
    );
    let outputs: Vec<Output> = std::iter::from_fn(|| bench.coordinator_mut().poll_output()).collect();
    let [Output::Send { to, frame, .. }] = outputs.as_slice() else { panic!("{outputs:?}") };
    assert_eq!(*to, you.into());
    String::from_utf8_lossy(frame.body.bytes().expect("it has its bytes with it")).into_owned()
}

fn gradient(worker: usize, element: usize) -> f32 {
    ((worker + 1) * (element % 9)) as f32 - 8.0
}

fn push(bench: &mut Bench, worker: usize) -> Ticket {
    let values: Vec<f32> = (0..ELEMENTS).map(|element| gradient(worker, element)).collect();
    let now = bench.now();
    let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&values), true).expect("it fits");
    bench.worker_mut(worker).clock();
    ticket
}

fn push_all(bench: &mut Bench) -> Vec<Ticket> {
    (0..bench.worker_count()).map(|worker| push(bench, worker)).collect()
}

fn settle(bench: &mut Bench, tickets: Vec<Ticket>) {
    bench.run();
    bench.pass(3.0);
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
    }
}

/// What the parameters are when `steps` gradients of each worker have arrived, and zeros ever since.
fn expected(workers: usize, steps: usize) -> Vec<f32> {
    let sum = |element| (0..workers).map(|worker| gradient(worker, element)).sum::<f32>();
    (0..ELEMENTS).map(|element| element as f32 - steps as f32 * sum(element)).collect()
}

/// Everybody pushes zeros, so that what was kept back arrives.
fn push_zeros(bench: &mut Bench) {
    let now = bench.now();
    let tickets = (0..bench.worker_count())
        .map(|worker| {
            let zeros = Gradient::Dense(&[0.0; ELEMENTS]);
            let ticket = bench.worker_mut(worker).push(now, W, zeros, true).expect("it fits");
            bench.worker_mut(worker).clock();
            ticket
        })
        .collect();
    settle(bench, tickets);
}

fn check(bench: &Bench, steps: usize, case: &str) {
    let expected = expected(bench.worker_count(), steps);
    assert_eq!(bench.parameters(W, ELEMENTS), expected, "{case}");
    for worker in bench.workers() {
        assert_eq!(worker.values(W), expected, "{case}");
    }
}

#[test]
fn what_a_codec_kept_back_is_sent_by_the_next_one() {
    for next in ["none", "bitmap", "lossless+zstd", "topk:0.5", "threshold:0.5"] {
        let mut bench = started(with_codecs(2, "topk:0.05", "none"), 1, ELEMENTS);
        for _ in 0..3 {
            let tickets = push_all(&mut bench);
            settle(&mut bench, tickets);
        }
        assert_ne!(bench.parameters(W, ELEMENTS), expected(2, 3), "most of it is kept back");
        set(&mut bench, &[(Axis::Codec, next)]);
        assert_eq!(bench.worker(0).codec(W).unwrap(), if next == "none" { "" } else { next });
        // Codecs that leave nothing out send it all with the next push.
        let rounds = if next == "topk:0.5" { 4 } else { 1 };
        (0..rounds).for_each(|_| push_zeros(&mut bench));
        check(&bench, 3, next);
        let tickets = push_all(&mut bench);
        settle(&mut bench, tickets);
        (1..rounds).for_each(|_| push_zeros(&mut bench));
        check(&bench, 4, next);
    }
}

/// A worker comes back to the coordinator, and before its first word is read, the change after the one that it missed is settled. The
/// later change alone would hide from the worker that it lacks the former, and servers refuse what it sends for ever.
#[test]
fn a_worker_that_missed_a_switch_hears_of_it_before_the_next_one() {
    let mut bench = started(with_codecs(2, "none", "none"), 1, ELEMENTS);
    let worker = bench.worker_node(1);
    bench.cut(worker, NodeId::Coordinator);
    set(&mut bench, &[(Axis::AnswerCodec, "bitmap+zstd")]);
    bench.heal();
    bench.world.hold(worker, NodeId::Coordinator);
    bench.pass(3.0);
    assert!(bench.world.unread(worker, NodeId::Coordinator).count() > 0, "it is back");
    set(&mut bench, &[(Axis::NonFinite, "clip")]);
    bench.world.release(worker, NodeId::Coordinator);
    let tickets = push_all(&mut bench);
    settle(&mut bench, tickets);
    check(&bench, 1, "both switches");
}

#[test]
fn bytes_follow_the_codec() {
    let mut bench = started(with_codecs(2, "none", "none"), 1, ELEMENTS);
    let bytes = |bench: &mut Bench| {
        let before: u64 = bench.shards().map(|shard| shard.report(bench.now()).unwrap().bytes_pulled).sum();
        let pushed = bench.tally.pushed_bytes;
        let tickets = push_all(bench);
        settle(bench, tickets);
        let after: u64 = bench.shards().map(|shard| shard.report(bench.now()).unwrap().bytes_pulled).sum();
        (bench.tally.pushed_bytes - pushed, after - before)
    };
    let plain = bytes(&mut bench);
    assert_eq!(plain, (800, 800), "two workers, 100 floats");
    set(&mut bench, &[(Axis::Codec, "topk:0.05")]);
    set(&mut bench, &[(Axis::AnswerCodec, "f16")]);
    let encoded = bytes(&mut bench);
    assert!(encoded.0 < 500 && encoded.1 < 800, "{encoded:?}");
    set(&mut bench, &[(Axis::Codec, "none"), (Axis::AnswerCodec, "none")]);
    bytes(&mut bench);
    assert_eq!(bytes(&mut bench), plain);
    assert!(bench.shards().all(|shard| shard.report(bench.now()).unwrap().refused == 0));
}

#[test]
fn a_push_of_which_some_chunks_were_taken_goes_on_in_plain_values() {
    for (codec, next) in [("topk:0.1", "none"), ("bitmap", "none"), ("none", "bitmap"), ("int8", "topk:0.1")]
    {
        for chunks in 0..8 {
            let case = format!("{codec} to {next} after {chunks} chunks");
            let mut bench = started(with_codecs(2, codec, "none"), 1, ELEMENTS);
            let mut plain = started(with_codecs(2, codec, "none"), 1, ELEMENTS);
            for bench in [&mut bench, &mut plain] {
                let tickets = push_all(bench);
                settle(bench, tickets);
            }
            bench.freeze();
            let tickets = push_all(&mut bench);
            for worker in 0..2 {
                bench.deliver(bench.worker_node(worker), bench.shard_node(worker), chunks);
            }
            set(&mut bench, &[(Axis::Codec, next)]);
            // The shards hear of it before the rest of the push arrives.
            (0..2).for_each(|shard| bench.deliver(COORDINATOR, bench.shard_node(shard), 1));
            bench.thaw();
            settle(&mut bench, tickets);
            let tickets = push_all(&mut plain);
            settle(&mut plain, tickets);
            assert_eq!(bench.parameters(W, ELEMENTS), plain.parameters(W, ELEMENTS), "{case}");
            assert_eq!(bench.worker(0).values(W), plain.parameters(W, ELEMENTS), "{case}");
        }
    }
}

#[test]
fn pulls_that_wait_when_codecs_change_are_answered_under_the_new_ones() {
    for (before, next) in [("none", "f16"), ("f16", "none"), ("topk:0.1", "none"), ("none", "topk:0.5")] {
        let mut bench = started(with_codecs(2, "none", before), 1, ELEMENTS);
        let first = push(&mut bench, 0);
        bench.run();
        assert_eq!(bench.outcome(0, first), None, "it waits for the other worker");
        set(&mut bench, &[(Axis::AnswerCodec, next)]);
        let second = push(&mut bench, 1);
        settle(&mut bench, vec![first, second]);
        check(&bench, 1, next);
        let tickets = push_all(&mut bench);
        settle(&mut bench, tickets);
        if next != "topk:0.5" {
            check(&bench, 2, next);
        }
        (0..4).for_each(|_| push_zeros(&mut bench));
        check(&bench, 2, next);
    }
}

/// An aggregator asks in a worker's name for what follows from a push that was sent twice. The codecs have changed by then,
/// and the worker has yet to hear of it: it will ask again.
#[test]
fn what_an_aggregator_asks_for_is_not_mixed_with_what_its_worker_asks_for_after_a_change() {
    for is_noted in [false, true] {
        for frames in 0..12 {
            let mut bench = through_aggregators(with_codecs(2, "none", "none"), &[0], ELEMENTS);
            let worker = bench.worker_node(0);
            let (aggregator, shard) = (bench.aggregator_node(0), bench.shard_node(0));
            bench.world.hold(COORDINATOR, worker);
            if is_noted {
                // The aggregator knows that the shard has the push; the worker does not hear it.
                bench.world.hold(aggregator, worker);
            } else {
                bench.world.hold(shard, aggregator);
            }
            let first = push(&mut bench, 0);
            bench.run();
            if is_noted {
                set(&mut bench, &[(Axis::AnswerCodec, "lossless")]);
                bench.world.hold(shard, aggregator);
            }
            bench.reset(worker, aggregator);
            bench.world.release(aggregator, worker);
            bench.pass(1.0);
            if !is_noted {
                set(&mut bench, &[(Axis::AnswerCodec, "lossless")]);
            }
            let second = push(&mut bench, 1);
            bench.run();
            // One by one, since the shard may say more when it is asked.
            (0..frames).for_each(|_| bench.deliver(shard, aggregator, 1));
            bench.world.release(COORDINATOR, worker);
            bench.run();
            bench.world.release(shard, aggregator);
            settle(&mut bench, vec![first, second]);
            check(&bench, 1, &format!("noted: {is_noted}, after {frames} frames"));
        }
    }
}

#[test]
fn an_answer_under_way_when_codecs_change_is_asked_for_again() {
    for (before, next) in [("none", "lossless"), ("topk:0.3", "topk:0.5"), ("lossless", "none")] {
        for chunks in 0..7 {
            let mut bench = started(with_codecs(1, "none", before), 1, ELEMENTS);
            let (worker, shard) = (bench.worker_node(0), bench.shard_node(0));
            bench.world.hold(shard, worker);
            let ticket = push(&mut bench, 0);
            bench.deliver(shard, worker, chunks);
            set(&mut bench, &[(Axis::AnswerCodec, next)]);
            assert_eq!(bench.outcome(0, ticket), None, "the rest of the answer is held back");
            bench.world.release(shard, worker);
            settle(&mut bench, vec![ticket]);
            (0..4).for_each(|_| push_zeros(&mut bench));
            check(&bench, 1, &format!("{before} to {next} after {chunks} chunks"));
        }
    }
}

/// A driver keeps the frames of an answer by reference while their connection has no room, and takes their bytes later.
#[test]
fn an_answer_that_waits_to_be_sent_when_codecs_change_has_the_version_of_its_bytes() {
    let mut config = with_codecs(1, "none", "none");
    config.policy = config.policy.with(Axis::Sync, "asp");
    let mut bench = started(config, 1, ELEMENTS);
    let (now, worker) = (bench.now(), bench.worker_node(0));
    let pull = Header { epoch: 1, request: 77, ..Header::new(Kind::Pull) };
    let shard = bench.shard_mut(0);
    shard.handle_frame(now, worker.into(), &pull, &[]);
    let waiting: Vec<Output> = std::iter::from_fn(|| shard.poll_output()).collect();
    set(&mut bench, &[(Axis::AnswerCodec, "f16")]);
    let ticket = push(&mut bench, 0);
    settle(&mut bench, vec![ticket]);
    let shard = bench.shard(0);
    let mut seen = 0;
    for output in waiting {
        let Output::Send { mut frame, .. } = output else { panic!("{output:?}") };
        let before = frame.header.version;
        shard.refresh(&mut frame.header);
        assert_eq!(frame.header.version, before + 1, "{:?}", frame.header);
        let values: Vec<u8> =
            expected(1, 1).iter().skip(seen).flat_map(|value| value.to_le_bytes()).collect();
        let bytes = shard.payload(&frame.body);
        assert_eq!(bytes, &values[..bytes.len()]);
        seen += bytes.len() / 4;
    }
    assert_eq!(seen, ELEMENTS / 2);
}

#[test]
fn codecs_may_change_twice_before_a_worker_hears_of_it() {
    for last in ["none", "topk:0.05", "bitmap"] {
        let mut bench = started(with_codecs(2, "topk:0.05", "none"), 1, ELEMENTS);
        let tickets = push_all(&mut bench);
        settle(&mut bench, tickets);
        let tickets = push_all(&mut bench);
        let worker = bench.worker_node(1);
        bench.world.hold(COORDINATOR, worker);
        set(&mut bench, &[(Axis::Codec, "int8"), (Axis::AnswerCodec, "f16")]);
        set(&mut bench, &[(Axis::Codec, last), (Axis::AnswerCodec, "none")]);
        bench.world.release(COORDINATOR, worker);
        settle(&mut bench, tickets);
        (0..20).for_each(|_| push_zeros(&mut bench));
        check(&bench, 2, last);
    }
}

#[test]
fn a_worker_that_comes_back_learns_of_all_changes_at_once() {
    let mut bench = started(with_codecs(2, "topk:0.05", "topk:0.05"), 1, ELEMENTS);
    let tickets = push_all(&mut bench);
    settle(&mut bench, tickets);
    let worker = bench.worker_node(1);
    bench.freeze();
    let first = push(&mut bench, 0);
    let second = push(&mut bench, 1);
    bench.deliver(worker, bench.shard_node(0), 2);
    bench.isolate(worker);
    bench.thaw();
    set(&mut bench, &[(Axis::Codec, "bitmap")]);
    set(&mut bench, &[(Axis::Codec, "none"), (Axis::AnswerCodec, "none")]);
    bench.pass(0.5);
    bench.heal();
    settle(&mut bench, vec![first, second]);
    push_zeros(&mut bench);
    check(&bench, 2, "after the connection was made again");
}

#[test]
fn sums_of_aggregators_follow_the_codec_and_lose_nothing() {
    for (codec, next) in
        [("topk:0.05", "none"), ("topk:0.05", "bitmap"), ("none", "topk:0.1"), ("bitmap", "none")]
    {
        for answers in ["none", "topk:0.2"] {
            let case = format!("{codec} to {next}, answers by {answers}");
            let mut bench = through_aggregators(with_codecs(3, codec, answers), &[0, 0], ELEMENTS);
            for _ in 0..2 {
                patient_step(&mut bench, &[0, 1, 2], gradient);
            }
            // One worker's push is in a sum that is held, another's under way, the third's not begun.
            bench.freeze();
            let tickets = vec![push(&mut bench, 0), push(&mut bench, 1), push(&mut bench, 2)];
            let aggregator = bench.aggregator_node(0);
            bench.deliver(bench.worker_node(0), aggregator, 100);
            bench.deliver(bench.worker_node(1), aggregator, 5);
            set(&mut bench, &[(Axis::Codec, next), (Axis::AnswerCodec, "none")]);
            // The shards hear of it first in one case, the aggregator in the other.
            let shards = [0, 1, 2, 3].map(|shard| bench.shard_node(shard));
            let mut order = shards.to_vec();
            order.insert(if answers == "none" { 4 } else { 0 }, aggregator);
            for node in order {
                bench.deliver(COORDINATOR, node, 1);
                bench.deliver(aggregator, shards[0], 3);
            }
            bench.thaw();
            settle(&mut bench, tickets);
            (0..30).for_each(|_| push_zeros(&mut bench));
            check(&bench, 3, &case);
        }
    }
}

#[test]
fn an_aggregator_that_does_not_know_of_a_change_yet_takes_nothing_under_it() {
    let mut bench = through_aggregators(with_codecs(2, "topk:0.1", "none"), &[0, 0], ELEMENTS);
    patient_step(&mut bench, &[0, 1], gradient);
    let aggregator = bench.aggregator_node(0);
    // It is not waited for while the coordinator cannot reach it.
    bench.cut(aggregator, COORDINATOR);
    set(&mut bench, &[(Axis::Codec, "bitmap"), (Axis::AnswerCodec, "f16")]);
    let tickets = push_all(&mut bench);
    bench.run();
    bench.pass(1.0);
    bench.heal();
    settle(&mut bench, tickets);
    (0..20).for_each(|_| push_zeros(&mut bench));
    check(&bench, 2, "after it heard of the change");
}

#[test]
fn rows_are_sent_again_as_rows() {
    for (codec, next) in [("topk:0.1", "none"), ("none", "topk:0.5"), ("bitmap", "f16")] {
        for frames in 0..4 {
            let config = with_codecs(1, codec, "none");
            let mut bench = Bench::new(config, 1);
            bench.start(&[(TableSpec::sparse("rows", 20, 4), vec![0.0; 80])]);
            let rows: Vec<u32> = (0..20).step_by(2).collect();
            let values: Vec<f32> = (0..40).map(|value| value as f32).collect();
            for step in 0..8 {
                bench.freeze();
                let now = bench.now();
                let gradient =
                    Gradient::Rows { rows: &rows, values: if step == 0 { &values } else { &[0.0; 40] } };
                let ticket = bench.worker_mut(0).push(now, W, gradient, false).unwrap();
                bench.worker_mut(0).clock();
                if step == 0 {
                    let shards = [0, 1].map(|shard| bench.shard_node(shard));
                    shards.into_iter().for_each(|shard| bench.deliver(bench.worker_node(0), shard, frames));
                    set(&mut bench, &[(Axis::Codec, next)]);
                    shards.into_iter().for_each(|shard| bench.deliver(COORDINATOR, shard, 1));
                }
                bench.thaw();
                settle(&mut bench, vec![ticket]);
            }
            let now = bench.now();
            let ticket =
                bench.worker_mut(0).pull(now, W, PullOptions { rows: Some(&rows), now: false }).unwrap();
            settle(&mut bench, vec![ticket]);
            let arrived: Vec<f32> = bench.worker_mut(0).redeem(ticket).iter().map(|value| -value).collect();
            assert_eq!(arrived, values, "{codec} to {next} after {frames} frames");
        }
    }
}

#[test]
fn what_was_prepared_by_another_codec_is_sent_as_it_is() {
    let mut bench = started(with_codecs(1, "topk:0.1", "none"), 1, ELEMENTS);
    let mut slab = bench.worker_mut(0).slab(W).unwrap();
    for (codec, prepared) in
        [("topk:0.2", Prepared::Places { count: 2 }), ("none", Prepared::Chosen), ("bf16", Prepared::Halves)]
    {
        let followed = bench.worker(0).codec(W).unwrap();
        set(&mut bench, &[(Axis::Codec, codec)]);
        let words = slab.gradient_mut();
        words.fill(0.0);
        match prepared {
            Prepared::Places { .. } => {
                words[..2].copy_from_slice(&[f32::from_bits(3), f32::from_bits(70)]);
                words[2..4].copy_from_slice(&[5.0, 7.0]);
            }
            Prepared::Halves => {
                // Two halves of 1 in every word.
                words[..ELEMENTS / 2].fill(f32::from_bits(0x3c00_3c00));
            }
            Prepared::Chosen | Prepared::Gradient => words[3] = 2.0,
        }
        slab.contains_by(prepared, if prepared == Prepared::Halves { "f16".into() } else { followed });
        let mut slabs = vec![slab];
        let now = bench.now();
        let ticket = bench.worker_mut(0).exchange(now, &mut slabs).unwrap();
        bench.worker_mut(0).clock();
        bench.run();
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
        slab = bench.worker_mut(0).redeem_slabs(ticket).remove(0);
    }
    let mut expected: Vec<f32> = (0..ELEMENTS).map(|element| element as f32 - 1.0).collect();
    expected[3] -= 7.0;
    expected[70] -= 7.0;
    assert_eq!(bench.parameters(W, ELEMENTS), expected);
    assert_eq!(slab.values(), expected);
}

/// An application that widens halves itself gets them where they were received, as long as answers consist of them.
#[test]
fn a_slab_has_parameters_as_they_came_if_it_takes_halves() {
    let mut bench = started(with_codecs(1, "none", "bf16"), 1, ELEMENTS);
    let mut slab = bench.worker_mut(0).slab(W).unwrap();
    slab.take_halves(true);
    let exchange = |bench: &mut Bench, mut slab: Slab| {
        slab.gradient_mut().fill(0.25);
        let now = bench.now();
        let ticket = bench.worker_mut(0).exchange(now, &mut vec![slab]).unwrap();
        bench.worker_mut(0).clock();
        bench.run();
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
        bench.worker_mut(0).redeem_slabs(ticket).remove(0)
    };
    for (answers, dtype, rounding) in [
        ("bf16", DType::Bf16, 1.0 / 256.0),
        ("f16", DType::F16, 1.0 / 2048.0),
        ("none", DType::F32, 0.0),
        ("f16", DType::F16, 1.0 / 2048.0),
    ] {
        set(&mut bench, &[(Axis::AnswerCodec, answers)]);
        let pulled = bench.worker(0).report().bytes_pulled;
        slab = exchange(&mut bench, slab);
        assert_eq!(slab.values_type(), dtype);
        assert_eq!(slab.value_bytes().len(), dtype.bytes() * ELEMENTS);
        let pulled = bench.worker(0).report().bytes_pulled - pulled;
        assert_eq!(pulled, (dtype.bytes() * ELEMENTS) as u64, "{answers}");
        let values = dtype.values(slab.value_bytes()).unwrap().to_vec();
        for (held, value) in values.iter().zip(bench.parameters(W, ELEMENTS)) {
            assert!((held - value).abs() <= value.abs() * rounding, "{answers}: {held} for {value}");
        }
    }
    // A loan that ends leaves values that everybody can read.
    let held = DType::F16.values(slab.value_bytes()).unwrap().to_vec();
    bench.worker_mut(0).give_back(slab).unwrap();
    assert_eq!(bench.worker(0).values(W), held);
}

#[test]
fn what_is_not_finite_is_clipped_or_refused_as_the_job_says_now() {
    let mut bench = started(with_codecs(1, "none", "none"), 1, ELEMENTS);
    let mut bad = [1.0; ELEMENTS];
    bad[4] = f32::NAN;
    let now = bench.now();
    assert!(bench.worker_mut(0).push(now, W, Gradient::Dense(&bad), true).is_err());
    set(&mut bench, &[(Axis::NonFinite, "clip")]);
    let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&bad), true).expect("it is clipped");
    bench.worker_mut(0).clock();
    settle(&mut bench, vec![ticket]);
    assert_eq!((bench.parameters(W, ELEMENTS)[4], bench.parameters(W, ELEMENTS)[5]), (4.0, 4.0));
    set(&mut bench, &[(Axis::NonFinite, "reject")]);
    assert!(bench.worker_mut(0).push(now, W, Gradient::Dense(&bad), true).is_err());
}

#[test]
fn codecs_that_the_job_cannot_have_are_refused_before_anything_changes() {
    let config = with_codecs(1, "none", "none");
    let policy = config.policy.clone().with(Axis::Reduce, "mean").with(Axis::Sync, "psp:c=1,b=0.5");
    let mut bench = Bench::new(JobConfig { policy, ..config }, 1);
    bench.start(&[
        (TableSpec::dense("w", [40]), vec![0.0; 40]),
        (TableSpec::sparse("rows", 10, 4), vec![0.0; 40]),
    ]);
    for (axis, text, why) in [
        (Axis::AnswerCodec, "topk:0.1", "drops late answers"),
        (Axis::Codec, "significance:0.1", "compares a gradient with the parameters"),
        (Axis::Codec, "toppk:0.1", "unknown codec `toppk`"),
    ] {
        let answer = refusal(&mut bench, &[(axis, text)]);
        assert!(answer.contains(why), "{text}: {answer}");
        assert_eq!(bench.worker(0).codec(W), Ok(String::new()));
    }
}
