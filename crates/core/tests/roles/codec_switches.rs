//! Codecs that change while a job runs: nothing is lost, nothing counts twice, and nobody waits for ever.
//!
//! Gradients are whole numbers under `sgd:lr=1` and `reduce=sum`, so that the parameters say exactly what has arrived.

use super::codecs::{patient_step, through_aggregators, with_codecs};
use super::pump::Pump;
use super::{W, started};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::role::{Frame, Output, Role};
use paramill_core::table::TableSpec;
use paramill_core::wire::control::frame;
use paramill_core::wire::{Control, Hello, Kind, Party};
use paramill_core::worker::{Gradient, Prepared, PullOptions, Ticket};

const ELEMENTS: usize = 100;

fn set(pump: &mut Pump, policies: &[(Axis, &str)]) {
    let rule = PolicyOverride::new("*", Policies::of(policies.iter().copied()));
    pump.command("test", &Control::Set(rule));
}

/// The same, of which nothing has left the coordinator yet.
fn set_quietly(pump: &mut Pump, policies: &[(Axis, &str)]) {
    let others = 1..=pump.shards.len() + pump.aggregators.len() + pump.workers.len();
    let stopped = std::mem::replace(&mut pump.stopped_nodes, others.collect());
    set(pump, policies);
    pump.stopped_nodes = stopped;
}

/// What the coordinator says to a change that it does not make.
fn refusal(pump: &mut Pump, policies: &[(Axis, &str)]) -> String {
    let hello = Hello { job: "test".into(), from: Party::Command, incarnation: 0 };
    let you = pump.coordinator.accept(pump.now, &hello).expect("commands are welcome").you;
    let rule = PolicyOverride::new("*", Policies::of(policies.iter().copied()));
    let Frame { header, body } = frame(Kind::Control, &Control::Set(rule));
    pump.coordinator.handle_frame(
        pump.now,
        you.into(),
        &header,
        body.bytes().expect("it has its bytes with it"),
    );
    let outputs: Vec<Output> = std::iter::from_fn(|| pump.coordinator.poll_output()).collect();
    let [Output::Send { to, frame }] = outputs.as_slice() else { panic!("{outputs:?}") };
    assert_eq!(*to, you.into());
    String::from_utf8_lossy(frame.body.bytes().expect("it has its bytes with it")).into_owned()
}

fn gradient(worker: usize, element: usize) -> f32 {
    ((worker + 1) * (element % 9)) as f32 - 8.0
}

fn push(pump: &mut Pump, worker: usize) -> Ticket {
    let values: Vec<f32> = (0..ELEMENTS).map(|element| gradient(worker, element)).collect();
    let now = pump.now;
    let ticket = pump.workers[worker].push(now, W, Gradient::Dense(&values), true).expect("it fits");
    pump.workers[worker].clock();
    ticket
}

fn push_all(pump: &mut Pump) -> Vec<Ticket> {
    (0..pump.workers.len()).map(|worker| push(pump, worker)).collect()
}

fn settle(pump: &mut Pump, tickets: Vec<Ticket>) {
    pump.run();
    pump.pass(3.0);
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(pump.outcome(worker, ticket), Some(Ok(())), "{}", pump.explain(worker, ticket));
    }
}

/// What the parameters are when `steps` gradients of each worker have arrived, and zeros ever since.
fn expected(workers: usize, steps: usize) -> Vec<f32> {
    let sum = |element| (0..workers).map(|worker| gradient(worker, element)).sum::<f32>();
    (0..ELEMENTS).map(|element| element as f32 - steps as f32 * sum(element)).collect()
}

/// Everybody pushes zeros, so that what was kept back arrives.
fn push_zeros(pump: &mut Pump) {
    let now = pump.now;
    let tickets = (0..pump.workers.len())
        .map(|worker| {
            let zeros = Gradient::Dense(&[0.0; ELEMENTS]);
            let ticket = pump.workers[worker].push(now, W, zeros, true).expect("it fits");
            pump.workers[worker].clock();
            ticket
        })
        .collect();
    settle(pump, tickets);
}

fn check(pump: &Pump, steps: usize, case: &str) {
    let expected = expected(pump.workers.len(), steps);
    assert_eq!(pump.parameters(W, ELEMENTS), expected, "{case}");
    for worker in &pump.workers {
        assert_eq!(worker.values(W), expected, "{case}");
    }
}

#[test]
fn what_a_codec_kept_back_is_sent_by_the_next_one() {
    for next in ["none", "bitmap", "lossless+zstd", "topk:0.5", "threshold:0.5"] {
        let mut pump = started(with_codecs(2, "topk:0.05", "none"), 1, ELEMENTS);
        for _ in 0..3 {
            let tickets = push_all(&mut pump);
            settle(&mut pump, tickets);
        }
        assert_ne!(pump.parameters(W, ELEMENTS), expected(2, 3), "most of it is kept back");
        set(&mut pump, &[(Axis::Codec, next)]);
        assert_eq!(pump.workers[0].codec(W).unwrap(), if next == "none" { "" } else { next });
        // Codecs that leave nothing out send it all with the next push.
        let rounds = if next == "topk:0.5" { 4 } else { 1 };
        (0..rounds).for_each(|_| push_zeros(&mut pump));
        check(&pump, 3, next);
        let tickets = push_all(&mut pump);
        settle(&mut pump, tickets);
        (1..rounds).for_each(|_| push_zeros(&mut pump));
        check(&pump, 4, next);
    }
}

#[test]
fn bytes_follow_the_codec() {
    let mut pump = started(with_codecs(2, "none", "none"), 1, ELEMENTS);
    let bytes = |pump: &mut Pump| {
        let before: u64 = pump.shards.iter().map(|shard| shard.report(pump.now).unwrap().bytes_pulled).sum();
        let pushed = pump.pushed_bytes;
        let tickets = push_all(pump);
        settle(pump, tickets);
        let after: u64 = pump.shards.iter().map(|shard| shard.report(pump.now).unwrap().bytes_pulled).sum();
        (pump.pushed_bytes - pushed, after - before)
    };
    let plain = bytes(&mut pump);
    assert_eq!(plain, (800, 800), "two workers, 100 floats");
    set(&mut pump, &[(Axis::Codec, "topk:0.05")]);
    set(&mut pump, &[(Axis::AnswerCodec, "f16")]);
    let encoded = bytes(&mut pump);
    assert!(encoded.0 < 500 && encoded.1 < 800, "{encoded:?}");
    set(&mut pump, &[(Axis::Codec, "none"), (Axis::AnswerCodec, "none")]);
    bytes(&mut pump);
    assert_eq!(bytes(&mut pump), plain);
    assert!(pump.shards.iter().all(|shard| shard.report(pump.now).unwrap().refused == 0));
}

#[test]
fn a_push_of_which_some_chunks_were_taken_goes_on_in_plain_values() {
    for (codec, next) in [("topk:0.1", "none"), ("bitmap", "none"), ("none", "bitmap"), ("int8", "topk:0.1")]
    {
        for chunks in 0..8 {
            let case = format!("{codec} to {next} after {chunks} chunks");
            let mut pump = started(with_codecs(2, codec, "none"), 1, ELEMENTS);
            let mut plain = started(with_codecs(2, codec, "none"), 1, ELEMENTS);
            for pump in [&mut pump, &mut plain] {
                let tickets = push_all(pump);
                settle(pump, tickets);
            }
            let tickets = push_all(&mut pump);
            for worker in 0..2 {
                pump.deliver(pump.worker_node(worker), 1 + worker, chunks);
            }
            set_quietly(&mut pump, &[(Axis::Codec, next)]);
            // The shards hear of it before the rest of the push arrives.
            (1..=2).for_each(|shard| _ = pump.deliver(0, shard, 1));
            settle(&mut pump, tickets);
            let tickets = push_all(&mut plain);
            settle(&mut plain, tickets);
            assert_eq!(pump.parameters(W, ELEMENTS), plain.parameters(W, ELEMENTS), "{case}");
            assert_eq!(pump.workers[0].values(W), plain.parameters(W, ELEMENTS), "{case}");
        }
    }
}

#[test]
fn pulls_that_wait_when_codecs_change_are_answered_under_the_new_ones() {
    for (before, next) in [("none", "f16"), ("f16", "none"), ("topk:0.1", "none"), ("none", "topk:0.5")] {
        let mut pump = started(with_codecs(2, "none", before), 1, ELEMENTS);
        let first = push(&mut pump, 0);
        pump.run();
        assert_eq!(pump.outcome(0, first), None, "it waits for the other worker");
        set(&mut pump, &[(Axis::AnswerCodec, next)]);
        let second = push(&mut pump, 1);
        settle(&mut pump, vec![first, second]);
        check(&pump, 1, next);
        let tickets = push_all(&mut pump);
        settle(&mut pump, tickets);
        if next != "topk:0.5" {
            check(&pump, 2, next);
        }
        (0..4).for_each(|_| push_zeros(&mut pump));
        check(&pump, 2, next);
    }
}

#[test]
fn an_answer_under_way_when_codecs_change_is_asked_for_again() {
    for (before, next) in [("none", "lossless"), ("topk:0.3", "topk:0.5"), ("lossless", "none")] {
        for chunks in 0..7 {
            let mut pump = started(with_codecs(1, "none", before), 1, ELEMENTS);
            let ticket = push(&mut pump, 0);
            let worker = pump.worker_node(0);
            pump.deliver(worker, 1, 100);
            pump.deliver(1, worker, chunks);
            pump.hold(1, worker);
            set(&mut pump, &[(Axis::AnswerCodec, next)]);
            assert_eq!(pump.outcome(0, ticket), None, "the rest of the answer is held back");
            pump.release();
            settle(&mut pump, vec![ticket]);
            (0..4).for_each(|_| push_zeros(&mut pump));
            check(&pump, 1, &format!("{before} to {next} after {chunks} chunks"));
        }
    }
}

#[test]
fn codecs_may_change_twice_before_a_worker_hears_of_it() {
    for last in ["none", "topk:0.05", "bitmap"] {
        let mut pump = started(with_codecs(2, "topk:0.05", "none"), 1, ELEMENTS);
        let tickets = push_all(&mut pump);
        settle(&mut pump, tickets);
        let tickets = push_all(&mut pump);
        let worker = pump.worker_node(1);
        pump.hold(0, worker);
        set(&mut pump, &[(Axis::Codec, "int8"), (Axis::AnswerCodec, "f16")]);
        set(&mut pump, &[(Axis::Codec, last), (Axis::AnswerCodec, "none")]);
        pump.release();
        settle(&mut pump, tickets);
        (0..20).for_each(|_| push_zeros(&mut pump));
        check(&pump, 2, last);
    }
}

#[test]
fn a_worker_that_comes_back_learns_of_all_changes_at_once() {
    let mut pump = started(with_codecs(2, "topk:0.05", "topk:0.05"), 1, ELEMENTS);
    let tickets = push_all(&mut pump);
    settle(&mut pump, tickets);
    let worker = pump.worker_node(1);
    let first = push(&mut pump, 0);
    let second = push(&mut pump, 1);
    pump.deliver(worker, 1, 2);
    for node in 0..=2 {
        pump.reset(worker, node);
        pump.cut.extend([(worker, node), (node, worker)]);
    }
    set(&mut pump, &[(Axis::Codec, "bitmap")]);
    set(&mut pump, &[(Axis::Codec, "none"), (Axis::AnswerCodec, "none")]);
    pump.pass(0.5);
    pump.cut.clear();
    settle(&mut pump, vec![first, second]);
    push_zeros(&mut pump);
    check(&pump, 2, "after the connection was made again");
}

#[test]
fn sums_of_aggregators_follow_the_codec_and_lose_nothing() {
    for (codec, next) in
        [("topk:0.05", "none"), ("topk:0.05", "bitmap"), ("none", "topk:0.1"), ("bitmap", "none")]
    {
        for answers in ["none", "topk:0.2"] {
            let case = format!("{codec} to {next}, answers by {answers}");
            let mut pump = through_aggregators(with_codecs(3, codec, answers), &[0, 0], ELEMENTS);
            for _ in 0..2 {
                patient_step(&mut pump, &[0, 1, 2], gradient);
            }
            // One worker's push is in a sum that is held, another's under way, the third's not begun.
            let tickets = vec![push(&mut pump, 0), push(&mut pump, 1), push(&mut pump, 2)];
            let aggregator = pump.aggregator_node(0);
            pump.deliver(pump.worker_node(0), aggregator, 100);
            pump.deliver(pump.worker_node(1), aggregator, 5);
            set_quietly(&mut pump, &[(Axis::Codec, next), (Axis::AnswerCodec, "none")]);
            // The shards hear of it first in one case, the aggregator in the other.
            let order = if answers == "none" { [1, 2, 3, 4, aggregator] } else { [aggregator, 1, 2, 3, 4] };
            for node in order {
                pump.deliver(0, node, 1);
                pump.deliver(aggregator, 1, 3);
            }
            settle(&mut pump, tickets);
            (0..30).for_each(|_| push_zeros(&mut pump));
            check(&pump, 3, &case);
        }
    }
}

#[test]
fn an_aggregator_that_does_not_know_of_a_change_yet_takes_nothing_under_it() {
    let mut pump = through_aggregators(with_codecs(2, "topk:0.1", "none"), &[0, 0], ELEMENTS);
    patient_step(&mut pump, &[0, 1], gradient);
    let aggregator = pump.aggregator_node(0);
    // It is not waited for while the coordinator cannot reach it.
    pump.reset(aggregator, 0);
    pump.cut.extend([(aggregator, 0), (0, aggregator)]);
    set(&mut pump, &[(Axis::Codec, "bitmap"), (Axis::AnswerCodec, "f16")]);
    let tickets = push_all(&mut pump);
    pump.run();
    pump.pass(1.0);
    pump.cut.clear();
    settle(&mut pump, tickets);
    (0..20).for_each(|_| push_zeros(&mut pump));
    check(&pump, 2, "after it heard of the change");
}

#[test]
fn rows_are_sent_again_as_rows() {
    for (codec, next) in [("topk:0.1", "none"), ("none", "topk:0.5"), ("bitmap", "f16")] {
        for frames in 0..4 {
            let config = with_codecs(1, codec, "none");
            let mut pump = Pump::new(config, 1);
            pump.start(&[(TableSpec::sparse("rows", 20, 4), vec![0.0; 80])]);
            let rows: Vec<u32> = (0..20).step_by(2).collect();
            let values: Vec<f32> = (0..40).map(|value| value as f32).collect();
            for step in 0..8 {
                let now = pump.now;
                let gradient =
                    Gradient::Rows { rows: &rows, values: if step == 0 { &values } else { &[0.0; 40] } };
                let ticket = pump.workers[0].push(now, W, gradient, false).unwrap();
                pump.workers[0].clock();
                if step == 0 {
                    let worker = pump.worker_node(0);
                    (1..=2).for_each(|shard| _ = pump.deliver(worker, shard, frames));
                    set(&mut pump, &[(Axis::Codec, next)]);
                }
                settle(&mut pump, vec![ticket]);
            }
            let ticket =
                pump.workers[0].pull(pump.now, W, PullOptions { rows: Some(&rows), now: false }).unwrap();
            settle(&mut pump, vec![ticket]);
            let arrived: Vec<f32> = pump.workers[0].redeem(ticket).iter().map(|value| -value).collect();
            assert_eq!(arrived, values, "{codec} to {next} after {frames} frames");
        }
    }
}

#[test]
fn what_was_prepared_by_another_codec_is_sent_as_it_is() {
    let mut pump = started(with_codecs(1, "topk:0.1", "none"), 1, ELEMENTS);
    let mut slab = pump.workers[0].slab(W).unwrap();
    for (codec, prepared) in
        [("topk:0.2", Prepared::Places { count: 2 }), ("none", Prepared::Chosen), ("bf16", Prepared::Halves)]
    {
        let followed = pump.workers[0].codec(W).unwrap();
        set(&mut pump, &[(Axis::Codec, codec)]);
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
        let ticket = pump.workers[0].exchange(pump.now, &mut slabs).unwrap();
        pump.workers[0].clock();
        pump.run();
        assert_eq!(pump.outcome(0, ticket), Some(Ok(())));
        slab = pump.workers[0].redeem_slabs(ticket).remove(0);
    }
    let mut expected: Vec<f32> = (0..ELEMENTS).map(|element| element as f32 - 1.0).collect();
    expected[3] -= 7.0;
    expected[70] -= 7.0;
    assert_eq!(pump.parameters(W, ELEMENTS), expected);
    assert_eq!(slab.values(), expected);
}

#[test]
fn what_is_not_finite_is_clipped_or_refused_as_the_job_says_now() {
    let mut pump = started(with_codecs(1, "none", "none"), 1, ELEMENTS);
    let mut bad = [1.0; ELEMENTS];
    bad[4] = f32::NAN;
    let now = pump.now;
    assert!(pump.workers[0].push(now, W, Gradient::Dense(&bad), true).is_err());
    set(&mut pump, &[(Axis::NonFinite, "clip")]);
    let ticket = pump.workers[0].push(now, W, Gradient::Dense(&bad), true).expect("it is clipped");
    pump.workers[0].clock();
    settle(&mut pump, vec![ticket]);
    assert_eq!((pump.parameters(W, ELEMENTS)[4], pump.parameters(W, ELEMENTS)[5]), (4.0, 4.0));
    set(&mut pump, &[(Axis::NonFinite, "reject")]);
    assert!(pump.workers[0].push(now, W, Gradient::Dense(&bad), true).is_err());
}

#[test]
fn codecs_that_the_job_cannot_have_are_refused_before_anything_changes() {
    let config = with_codecs(1, "none", "none");
    let policy = config.policy.clone().with(Axis::Reduce, "mean").with(Axis::Sync, "psp:c=1,b=0.5");
    let mut pump = Pump::new(JobConfig { policy, ..config }, 1);
    pump.start(&[
        (TableSpec::dense("w", [40]), vec![0.0; 40]),
        (TableSpec::sparse("rows", 10, 4), vec![0.0; 40]),
    ]);
    for (axis, text, why) in [
        (Axis::AnswerCodec, "topk:0.1", "drops late answers"),
        (Axis::Codec, "significance:0.1", "compares a gradient with the parameters"),
        (Axis::Codec, "toppk:0.1", "unknown codec `toppk`"),
    ] {
        let answer = refusal(&mut pump, &[(axis, text)]);
        assert!(answer.contains(why), "{text}: {answer}");
        assert_eq!(pump.workers[0].codec(W), Ok(String::new()));
    }
}
