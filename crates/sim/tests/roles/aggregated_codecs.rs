//! Codecs through aggregators: what workers encode is added up and encoded again, and answers pass as they are.

use super::W;
use super::codecs::{patient_step, through_aggregators, uneven, with_codecs};
use crate::bench::Bench;

const ALL: [usize; 4] = [0, 1, 2, 3];
const THROUGH: [usize; 4] = [0, 0, 1, 1];

/// Some steps, and then so many without gradients that nothing is left in any residual.
fn after_steps(codec: &str, answers: &str) -> Bench {
    let mut bench = through_aggregators(with_codecs(4, codec, answers), &THROUGH, 100);
    for round in 0..6 {
        patient_step(&mut bench, &ALL, |worker, element| uneven(worker + round, element));
    }
    for _ in 0..20 {
        patient_step(&mut bench, &ALL, |_, _| 0.0);
    }
    bench
}

#[test]
fn sums_travel_encoded_and_what_an_aggregator_kept_comes_later() {
    let plain = after_steps("none", "none");
    for codec in ["topk:0.2", "topk:0.3+bf16", "bitmap+lz4", "dgc:ratio=0.3,momentum=0,warmup=0"] {
        let bench = after_steps(codec, "none");
        assert_eq!(bench.parameters(W, 100), plain.parameters(W, 100), "{codec}");
        assert_eq!(bench.worker(3).values(W), plain.worker(3).values(W), "{codec}");
        let bytes = |bench: &Bench| bench.aggregators().map(|it| it.report().bytes_to_servers).sum::<u64>();
        assert!(bytes(&bench) * 10 < bytes(&plain) * 9, "{codec}: {} of {}", bytes(&bench), bytes(&plain));
    }
}

#[test]
fn momentum_and_clipping_are_the_workers_alone() {
    for codec in ["clip:norm=2+bitmap", "dgc:ratio=1,momentum=0.5,warmup=0"] {
        let run = |through: &[usize]| {
            let mut bench = through_aggregators(with_codecs(2, codec, "none"), through, 100);
            for round in 0..4 {
                patient_step(&mut bench, &[0, 1], |worker, element| uneven(worker + round, element));
            }
            bench.parameters(W, 100)
        };
        let (direct, through) = (run(&[]), run(&[0, 0]));
        for (found, expected) in through.iter().zip(&direct) {
            assert!((found - expected).abs() < 1e-4, "{codec}: {found} for {expected}");
        }
    }
}

#[test]
fn quantised_answers_pass_through_as_they_are() {
    let (plain, bench) = (after_steps("none", "none"), after_steps("none", "bf16"));
    assert_eq!(bench.parameters(W, 100), plain.parameters(W, 100));
    for worker in bench.workers() {
        for (held, value) in worker.values(W).iter().zip(&bench.parameters(W, 100)) {
            assert!((held - value).abs() <= value.abs() / 256.0, "{held} for {value}");
        }
    }
    for (encoded, whole) in bench.aggregators().zip(plain.aggregators()) {
        let (encoded, whole) = (encoded.report(), whole.report());
        assert!(encoded.bytes_from_servers * 10 < whole.bytes_from_servers * 8, "two bytes and a head");
        assert!(encoded.bytes_to_workers * 10 < whole.bytes_to_workers * 8);
    }
}

#[test]
fn differences_reach_workers_through_an_aggregator_that_loses_its_connection() {
    let mut bench = through_aggregators(with_codecs(4, "topk:0.5", "topk:0.3"), &THROUGH, 60);
    for round in 0..20 {
        if round % 4 == 1 {
            let node = bench.aggregator_node(round / 4 % 2);
            bench.reset(node, bench.shard_node(round / 8));
            bench.pass(2.0);
        }
        patient_step(&mut bench, &ALL, uneven);
    }
    for _ in 0..30 {
        patient_step(&mut bench, &ALL, |_, _| 0.0);
    }
    let parameters = bench.parameters(W, 60);
    for worker in bench.workers() {
        for (held, value) in worker.values(W).iter().zip(&parameters) {
            assert!((held - value).abs() < 1e-3, "{held} for {value}");
        }
    }
}

/// A member that dies leaves its whole pushes in the sums, and nothing of them is lost in a residual.
#[test]
fn the_others_go_on_when_a_member_dies() {
    let run = |codec: &str| {
        let mut bench = through_aggregators(with_codecs(4, codec, "bf16"), &THROUGH, 100);
        for round in 0..3 {
            patient_step(&mut bench, &ALL, |worker, element| uneven(worker + round, element));
        }
        let node = bench.worker_node(1);
        bench.isolate(node);
        bench.pass(20.0);
        for round in 3..6 {
            patient_step(&mut bench, &[0, 2, 3], |worker, element| uneven(worker + round, element));
        }
        for _ in 0..20 {
            patient_step(&mut bench, &[0, 2, 3], |_, _| 0.0);
        }
        bench.parameters(W, 100)
    };
    let (plain, filtered) = (run("none"), run("topk:0.2"));
    // What the dead worker had not chosen yet is gone with it; what it sent is not.
    let differ = plain.iter().zip(&filtered).filter(|(a, b)| a != b).count();
    assert!(differ < 40, "{differ} of 100");
    assert_eq!(run("bitmap"), plain);
}
