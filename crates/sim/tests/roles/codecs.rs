//! Tables with codecs: what is pushed and answered is smaller, and training goes on as it should.

use super::bench::Bench;
use super::{W, job, started};
use paramill_core::codec::Factors;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Order, Policies, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_core::types::{ServerId, TableId};
use paramill_core::worker::{Gradient, Prepared, PullOptions, Slab};

pub(super) fn with_codecs(workers: u32, codec: &str, answers: &str) -> JobConfig {
    let config = job(workers, 2, "bsp", "sgd:lr=1");
    let policy = config
        .policy
        .clone()
        .with(Axis::Codec, codec)
        .with(Axis::AnswerCodec, answers)
        .with(Axis::Reduce, "sum");
    JobConfig { policy, ..config }
}

/// One synchronous step in which worker `w` pushes `gradient(w, element)`.
fn step(bench: &mut Bench, gradient: impl Fn(usize, usize) -> f32) {
    let elements = bench.worker(0).values(W).len();
    let tickets: Vec<_> = (0..bench.worker_count())
        .map(|worker| {
            let gradient: Vec<f32> = (0..elements).map(|element| gradient(worker, element)).collect();
            let now = bench.now();
            let ticket =
                bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
            bench.worker_mut(worker).clock();
            bench.run();
            ticket
        })
        .collect();
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
    }
}

/// The same job with workers that go through aggregators, which add up what arrives as it does.
pub(super) fn through_aggregators(config: JobConfig, through: &[usize], elements: usize) -> Bench {
    let order = if through.is_empty() { config.policy.order() } else { Order::Arrival };
    let policy = config.policy.clone().with(Axis::Order, order.to_string());
    let mut bench = Bench::with_aggregators(JobConfig { policy, ..config }, 2, through);
    let initial = (0..elements).map(|i| i as f32).collect();
    bench.declare_and_start(&[(TableSpec::dense("w", [elements as u64]), initial)]);
    bench.pass(1.0);
    bench
}

/// One synchronous step of those that are there, with time for aggregators to hold what they hold.
pub(super) fn patient_step(bench: &mut Bench, there: &[usize], gradient: impl Fn(usize, usize) -> f32) {
    let elements = bench.worker(there[0]).values(W).len();
    let push = |bench: &mut Bench, worker: usize| {
        let gradient: Vec<f32> = (0..elements).map(|element| gradient(worker, element)).collect();
        let now = bench.now();
        let ticket =
            bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
        bench.worker_mut(worker).clock();
        ticket
    };
    let tickets: Vec<_> = there.iter().map(|&worker| (worker, push(bench, worker))).collect();
    bench.run();
    bench.pass(2.0);
    for (worker, ticket) in tickets {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
    }
}

pub(super) fn uneven(worker: usize, element: usize) -> f32 {
    if (worker + element).is_multiple_of(3) { ((worker * 31 + element * 7) % 13) as f32 - 6.0 } else { 0.0 }
}

#[test]
fn a_lossless_codec_changes_no_bit() {
    for order in [Order::Ranked, Order::Arrival] {
        let run = |codec: &str, answers: &str| {
            let config = with_codecs(3, codec, answers);
            let policy = config.policy.clone().with(Axis::Order, order.to_string());
            let mut bench = started(JobConfig { policy, ..config }, 2, 100);
            for round in 0..4 {
                step(&mut bench, |worker, element| uneven(worker + round, element));
            }
            (bench.parameters(W, 100), bench.worker(1).values(W).to_vec(), bench.tally.pushed_bytes)
        };
        let (plain, encoded) = (run("none", "none"), run("bitmap", "lossless+zstd"));
        assert_eq!((&plain.0, &plain.1), (&encoded.0, &encoded.1));
        assert_eq!(plain.0, plain.1);
    }
}

#[test]
fn pushes_are_smaller_and_what_was_kept_comes_later() {
    let mut bench = started(with_codecs(2, "topk:0.2", "none"), 1, 100);
    let mut plain = started(with_codecs(2, "none", "none"), 1, 100);
    for bench in [&mut bench, &mut plain] {
        step(bench, |worker, element| (1 + worker + element % 5) as f32);
        for _ in 0..30 {
            step(bench, |_, _| 0.0);
        }
    }
    assert_eq!(bench.parameters(W, 100), plain.parameters(W, 100));
    assert!(
        bench.tally.pushed_bytes * 2 < plain.tally.pushed_bytes,
        "{} of {}",
        bench.tally.pushed_bytes,
        plain.tally.pushed_bytes
    );
}

#[test]
fn answers_that_are_differences_follow_the_parameters_within_their_threshold() {
    let mut bench = started(with_codecs(2, "none", "dvf:delta=0.5"), 2, 100);
    for round in 1..40 {
        step(&mut bench, |worker, element| uneven(worker, element) * 0.03);
        let parameters = bench.parameters(W, 100);
        // The version is one more than the round, and the threshold that of the version.
        let threshold = 0.5 / ((round + 1) as f32).sqrt();
        for worker in bench.workers() {
            for (held, true_value) in worker.values(W).iter().zip(&parameters) {
                assert!(
                    (held - true_value).abs() <= threshold + 1e-4,
                    "{held} for {true_value} in round {round}"
                );
            }
        }
    }
}

/// What a worker holds is not known any more once its connection broke: it gets everything.
#[test]
fn a_broken_connection_does_not_mix_up_differences() {
    let mut bench = started(with_codecs(2, "topk:0.5", "topk:0.3"), 1, 60);
    for round in 0..20 {
        if round % 4 == 1 {
            let node = bench.worker_node(round / 4 % 2);
            bench.reset(node, bench.shard_node(0));
            bench.run();
            bench.pass(1.0);
        }
        step(&mut bench, uneven);
    }
    for _ in 0..20 {
        step(&mut bench, |_, _| 0.0);
    }
    let parameters = bench.parameters(W, 60);
    for worker in bench.workers() {
        for (held, value) in worker.values(W).iter().zip(&parameters) {
            assert!((held - value).abs() < 1e-3, "{held} for {value}");
        }
    }
}

/// Differences of whole numbers that are sent whole lose nothing: a worker holds the parameters to the bit if, and only if, it
/// has added each of them once.
#[test]
fn differences_count_once_wherever_their_answer_breaks_off() {
    for (delivered, switched) in (0..7).flat_map(|delivered| [(delivered, None), (delivered, Some("topk:1"))])
    {
        let mut bench = started(with_codecs(2, "none", "topk:1"), 1, 60);
        (0..3).for_each(|_| step(&mut bench, uneven));
        let (worker, shard) = (bench.worker_node(1), bench.shard_node(0));
        bench.world.hold(shard, worker);
        let tickets = [0, 1].map(|worker| {
            let gradient: Vec<f32> = (0..60).map(|element| uneven(worker + 1, element)).collect();
            let now = bench.now();
            let pushed = bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true);
            bench.worker_mut(worker).clock();
            bench.run();
            pushed.expect("it fits")
        });
        bench.deliver(shard, worker, delivered);
        match switched {
            Some(codec) => {
                // There and back again: frames of the time before mean nothing any more.
                bench.set(PolicyOverride::new("w", Policies::of([(Axis::AnswerCodec, "int8")])));
                bench.set(PolicyOverride::new("w", Policies::of([(Axis::AnswerCodec, codec)])));
            }
            None => bench.reset(worker, shard),
        }
        bench.thaw();
        bench.pass(1.0);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
        }
        (0..2).for_each(|_| step(&mut bench, uneven));
        let parameters = bench.parameters(W, 60);
        for worker in bench.workers() {
            assert_eq!(worker.values(W), parameters, "{delivered} frames, then {switched:?}");
        }
    }
}

/// What two workers' gradients come to when one of them runs ahead until servers refuse it, again and again: the
/// parameters in the end, when everything that was kept has come too.
fn after_refusals(codec: &str, through: &[usize]) -> Vec<f32> {
    // Servers keep rounds 0 to 4 while worker 1 has pushed nothing.
    const REFUSED: u64 = 5;
    let mut bench = through_aggregators(with_codecs(2, codec, "none"), through, 100);
    let gradient = |worker: usize, clock: u64| -> Vec<f32> {
        (0..100)
            .map(|element| if clock < 12 { uneven(worker + clock as usize, element) } else { 0.0 })
            .collect()
    };
    let push = |bench: &mut Bench, worker: usize| {
        let (now, values) = (bench.now(), gradient(worker, bench.worker(worker).current_clock()));
        let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&values), false).expect("it fits");
        // Longer than an aggregator holds a push for others.
        bench.pass(if through.is_empty() { 0.0 } else { 3.0 });
        let outcome = bench.outcome(worker, ticket).expect("it is taken or refused");
        bench.worker_mut(worker).redeem(ticket);
        outcome
    };
    for _ in 0..REFUSED {
        assert_eq!(push(&mut bench, 0), Ok(()));
        bench.worker_mut(0).clock();
    }
    for _ in 0..3 {
        let error = push(&mut bench, 0).expect_err("it is too far ahead");
        assert!(error.to_string().contains("at most 4 rounds ahead"), "{error}");
    }
    for _ in 0..2 {
        assert_eq!(push(&mut bench, 1), Ok(()));
        bench.worker_mut(1).clock();
    }
    for _ in 0..40 {
        for worker in 0..2 {
            assert_eq!(push(&mut bench, worker), Ok(()));
            bench.worker_mut(worker).clock();
        }
    }
    while bench.worker(1).current_clock() < bench.worker(0).current_clock() {
        assert_eq!(push(&mut bench, 1), Ok(()));
        bench.worker_mut(1).clock();
    }
    bench.parameters(W, 100)
}

/// A push that is refused and pushed again is counted once, by the servers and by the residual.
#[test]
fn what_is_refused_and_pushed_again_counts_once() {
    for through in [&[][..], &[0, 0], &[0]] {
        let plain = after_refusals("none", through);
        for codec in ["topk:0.2", "topk:0.3+bf16"] {
            assert_eq!(after_refusals(codec, through), plain, "{codec} {through:?}");
        }
    }
}

/// Connections that break in the middle of pushes have them sent again as they were.
#[test]
fn what_is_sent_again_after_a_broken_connection_counts_once() {
    let run = |codec: &str| {
        let mut bench = started(with_codecs(2, codec, "none"), 1, 100);
        for round in 0..12 {
            bench.freeze();
            let tickets: Vec<_> = (0..2)
                .map(|worker| {
                    let gradient: Vec<f32> = (0..100).map(|at| uneven(worker + round, at)).collect();
                    let now = bench.now();
                    let ticket =
                        bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).unwrap();
                    bench.worker_mut(worker).clock();
                    ticket
                })
                .collect();
            // Some frames are taken, and the others are lost with the connection.
            let node = bench.worker_node(round % 2);
            let shard = bench.shard_node(0);
            bench.deliver(node, shard, round % 5);
            bench.reset(node, shard);
            bench.thaw();
            bench.pass(1.0);
            for (worker, ticket) in tickets.into_iter().enumerate() {
                assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
            }
        }
        for _ in 0..30 {
            step(&mut bench, |_, _| 0.0);
        }
        bench.parameters(W, 100)
    };
    let plain = run("none");
    for codec in ["topk:0.2", "topk:0.3+bf16"] {
        assert_eq!(run(codec), plain, "{codec}");
    }
}

/// A fully connected layer's gradient, by its factors: the same parameters for a fraction of the bytes.
#[test]
fn factors_travel_instead_of_their_product() {
    let (rows, columns, rank) = (40usize, 30usize, 2usize);
    let run = |codec: &str, offers: bool| {
        let mut config = with_codecs(2, codec, "none");
        config.policy = config.policy.with(Axis::Chunk, "2400B");
        let mut bench = Bench::new(config, 1);
        let spec = TableSpec::dense("w", [rows as u64, columns as u64]);
        bench.start(&[(spec, vec![0.0; rows * columns])]);
        for round in 0..3 {
            for worker in 0..2 {
                let u: Vec<f32> = (0..rows * rank).map(|at| uneven(worker + round, at)).collect();
                let v: Vec<f32> = (0..rank * columns).map(|at| uneven(worker, at + round)).collect();
                let cell = |at: usize| -> f32 {
                    (0..rank).map(|k| u[at / columns * rank + k] * v[k * columns + at % columns]).sum()
                };
                let values: Vec<f32> = (0..rows * columns).map(cell).collect();
                let factors = Factors { rank: rank as u32, u: &u, v: &v };
                let gradient = match offers {
                    true => Gradient::Product { values: &values, factors },
                    false => Gradient::Dense(&values),
                };
                let now = bench.now();
                let ticket = bench.worker_mut(worker).push(now, W, gradient, false).unwrap();
                bench.worker_mut(worker).clock();
                bench.run();
                assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
            }
        }
        (bench.parameters(W, rows * columns), bench.tally.pushed_bytes)
    };
    let plain = run("none", false);
    for (codec, offers, shrinks) in
        [("factors", true, true), ("factors", false, false), ("none", true, false)]
    {
        let (parameters, bytes) = run(codec, offers);
        assert_eq!(parameters, plain.0, "{codec} {offers}");
        assert_eq!(bytes * 4 < plain.1, shrinks, "{codec} {offers}: {bytes} of {}", plain.1);
    }
}

/// A connection that breaks between factors and their chunks: both are sent again, and counted once. Also through an aggregator,
/// and also where a table is cut.
#[test]
fn factors_are_sent_again_after_a_broken_connection() {
    let (rows, columns) = (40usize, 30usize);
    let run = |codec: &str, shards: u32, through: &[usize]| {
        let mut config = with_codecs(2, codec, "none");
        config.policy = config.policy.with(Axis::Chunk, "1000B");
        if !through.is_empty() {
            config.policy = config.policy.with(Axis::Order, Order::Arrival.to_string());
        }
        let mut bench = match through {
            [] => Bench::new(config, shards),
            _ => Bench::with_aggregators(config, shards, through),
        };
        let spec = TableSpec::dense("w", [rows as u64, columns as u64]);
        bench.declare_and_start(&[(spec, vec![0.0; rows * columns])]);
        bench.pass(1.0);
        for round in 0..12 {
            let mut tickets = Vec::new();
            if through.is_empty() {
                bench.freeze();
            }
            for worker in 0..2 {
                let u: Vec<f32> = (0..rows).map(|at| uneven(worker + round, at)).collect();
                let v: Vec<f32> = (0..columns).map(|at| uneven(worker, at + round)).collect();
                let values: Vec<f32> =
                    (0..rows * columns).map(|at| u[at / columns] * v[at % columns]).collect();
                let factors = Factors { rank: 1, u: &u, v: &v };
                let (now, gradient) = (bench.now(), Gradient::Product { values: &values, factors });
                tickets.push(bench.worker_mut(worker).push(now, W, gradient, true).unwrap());
                bench.worker_mut(worker).clock();
            }
            if through.is_empty() {
                // Some frames are taken, and the others are lost with the connection.
                let (node, shard) = (bench.worker_node(round % 2), bench.shard_node(0));
                bench.deliver(node, shard, round % 5);
                bench.reset(node, shard);
                bench.thaw();
            } else {
                bench.run();
            }
            bench.pass(2.0);
            for (worker, ticket) in tickets.into_iter().enumerate() {
                assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
            }
        }
        (bench.parameters(W, rows * columns), bench.tally.pushed_bytes)
    };
    for (shards, through) in [(1, &[][..]), (2, &[]), (1, &[0, 0]), (1, &[0])] {
        let (plain, encoded) = (run("none", shards, through), run("factors", shards, through));
        assert_eq!(plain.0, encoded.0, "{shards} shards, {through:?}");
        assert!(encoded.1 * 2 < plain.1 || !through.is_empty(), "{} of {}", encoded.1, plain.1);
    }
}

#[test]
fn factors_that_do_not_fit_their_table_are_refused() {
    let mut bench = started(with_codecs(1, "factors", "none"), 1, 100);
    let (values, now) = ([1.0; 100], bench.now());
    let factors = Factors { rank: 1, u: &values[..10], v: &values[..10] };
    let error =
        bench.worker_mut(0).push(now, W, Gradient::Product { values: &values, factors }, false).unwrap_err();
    assert!(error.to_string().contains("factors of 0 x 1 and 1 x 0 elements"), "{error}");
}

#[test]
fn half_precision_answers_are_rounded_parameters() {
    let mut bench = started(with_codecs(2, "f16", "f16"), 2, 100);
    step(&mut bench, |worker, element| uneven(worker, element) / 7.0);
    let parameters = bench.parameters(W, 100);
    for (held, value) in bench.worker(0).values(W).iter().zip(&parameters) {
        assert!((held - value).abs() <= value.abs() / 2048.0, "{held} for {value}");
    }
    assert_ne!(bench.worker(0).values(W), parameters);
    // The first parameters, and those after the step.
    assert_eq!(bench.worker(0).report().bytes_pulled, 2 * 100 * 2);
}

/// Directly and through aggregators, added as they come or by rank.
#[test]
fn halves_add_up_to_the_sum_within_their_rounding() {
    let gradient = |worker: usize, element: usize| ((worker * 37 + element * 11) % 101) as f32 / 7.0 - 6.5;
    for (codec, rounding) in [("f16", 1.0 / 2048.0), ("bf16", 1.0 / 256.0)] {
        for (order, through) in [("ranked", &[][..]), ("arrival", &[][..]), ("arrival", &[0, 0, 1][..])] {
            let config = with_codecs(3, codec, "none");
            let policy = config.policy.clone().with(Axis::Order, order);
            let mut bench = through_aggregators(JobConfig { policy, ..config }, through, 100);
            patient_step(&mut bench, &[0, 1, 2], gradient);
            for (element, found) in bench.parameters(W, 100).into_iter().enumerate() {
                let gradients = [0, 1, 2].map(|worker| f64::from(gradient(worker, element)));
                let sum: f64 = gradients.iter().sum();
                let magnitudes: f64 = gradients.iter().map(|gradient| gradient.abs()).sum();
                // Aggregators round their sums once more, and parameters are rounded to f32.
                let bound = 2.0 * rounding * magnitudes + 1e-4;
                let error = (f64::from(found) - (element as f64 - sum)).abs();
                assert!(error <= bound, "{codec}, {order}, {through:?}: {error} at {element}");
            }
            if through.is_empty() {
                assert_eq!(bench.tally.pushed_bytes, 3 * 100 * 2, "two bytes an element, and nothing else");
            }
        }
    }
}

#[test]
fn nan_in_halves_that_the_application_made_is_found_by_servers() {
    let mut bench = started(with_codecs(1, "f16", "none"), 1, 100);
    let mut slab = bench.worker_mut(0).slab(W).unwrap();
    let before = bench.parameters(W, 100);
    let mut exchange = |mut slab: Slab, half: u32| {
        slab.gradient_mut()[..50].fill(f32::from_bits(half << 16 | half));
        slab.contains_by(Prepared::Halves, "f16".into());
        let now = bench.now();
        let ticket = bench.worker_mut(0).exchange(now, &mut vec![slab]).expect("nobody looks at it here");
        bench.run();
        let outcome = bench.outcome(0, ticket);
        (bench.worker_mut(0).redeem_slabs(ticket).remove(0), outcome)
    };
    let outcome;
    (slab, outcome) = exchange(slab, 0x7e00);
    let refusal = outcome.expect("it is over").unwrap_err().to_string();
    assert!(refusal.contains("has NaN or Inf in chunk"), "{refusal}");
    // The same clock again, with gradients of 1.
    let (slab, outcome) = exchange(slab, 0x3c00);
    assert_eq!(outcome, Some(Ok(())));
    let expected: Vec<f32> = before.iter().map(|value| value - 1.0).collect();
    assert_eq!((bench.parameters(W, 100), slab.values()), (expected.clone(), &expected[..]));
}

#[test]
fn rows_are_pushed_and_pulled_through_codecs() {
    let run = |codec: &str, answers: &str| {
        let mut bench = Bench::new(with_codecs(2, codec, answers), 1);
        bench.start(&[(TableSpec::sparse("rows", 40, 4), vec![1.0; 160])]);
        for round in 0..5u32 {
            for worker in 0..2 {
                let rows: Vec<u32> = (0..40).filter(|row| (row + round + worker) % 4 == 0).collect();
                let values: Vec<f32> =
                    rows.iter().flat_map(|&row| [0.5 * row as f32 + 1.0, 0.0, -2.0, 1e-3]).collect();
                let (now, gradient) = (bench.now(), Gradient::Rows { rows: &rows, values: &values });
                let pushing = bench.worker_mut(worker as usize);
                let ticket = pushing.push(now, W, gradient, false).unwrap();
                pushing.clock();
                bench.run();
                assert_eq!(bench.outcome(worker as usize, ticket), Some(Ok(())));
            }
        }
        let rows = [0, 5, 39];
        let options = PullOptions { rows: Some(&rows), now: true };
        let now = bench.now();
        let ticket = bench.worker_mut(0).pull(now, W, options).unwrap();
        bench.run();
        assert_eq!(bench.worker_mut(0).outcome(ticket), Some(Ok(())));
        (bench.parameters(W, 160), bench.worker_mut(0).redeem(ticket))
    };
    let plain = run("none", "none");
    assert_eq!(run("bitmap+lz4", "lossless+zstd"), plain);
    let (filtered, answer) = run("dvf:delta=0.01", "bf16");
    for (place, (found, expected)) in filtered.iter().zip(&plain.0).enumerate() {
        // Small entries stay behind, the others are exact.
        let allowed = if place % 4 == 3 { 0.02 } else { 0.0 };
        assert!((found - expected).abs() <= allowed, "{found} for {expected}");
    }
    for (found, expected) in answer.iter().zip(&plain.1) {
        assert!((found - expected).abs() <= expected.abs() / 200.0 + 0.02, "{found} for {expected}");
    }
}

#[test]
fn jobs_whose_codecs_cannot_work_are_refused_with_the_reason() {
    let registry = Registry::builtin();
    let refusal = |config: JobConfig| config.check(&registry).unwrap_err().to_string();
    for (codec, answers, reason) in [
        ("topq:1", "none", "unknown codec `topq`"),
        ("topk:0.1+dvf:delta=1", "none", "has a sparsifier already"),
        ("none", "dgc", "not for answers"),
        ("none", "qsgd", "random errors would add up"),
        ("none", "clip:1+topk:0.1", "it would clip parameters"),
    ] {
        let error = refusal(with_codecs(2, codec, answers));
        assert!(error.contains(reason), "{error}");
    }
    let psp = with_codecs(2, "none", "topk:0.1");
    let policy = psp.policy.clone().with(Axis::Sync, "psp:c=1,b=0.5");
    assert!(refusal(JobConfig { policy, ..psp }).contains("drops late answers"));
    let rule = PolicyOverride::new("*", Policies::of([(Axis::Codec, "f16")])).on(ServerId(0));
    let config = JobConfig { overrides: vec![rule], ..with_codecs(2, "none", "none") };
    assert!(refusal(config).contains("the same on all servers"));
}

/// Two tables are exchanged; with `fails` the second is wrong at first, and the exchange is made once more.
fn after_exchanges(fails: bool) -> (Vec<f32>, Vec<f32>) {
    let mut config = job(1, 1, "bsp", "sgd:lr=1");
    config.policy = config.policy.with(Axis::Codec, "topk:0.2");
    let mut bench = Bench::new(config, 1);
    let table = |name: &str| (TableSpec::dense(name, [40]), vec![0.0; 40]);
    bench.start(&[table("w"), table("v")]);
    let v = TableId(1);
    let mut slabs: Vec<Slab> =
        [W, v].map(|table| bench.worker_mut(0).slab(table).expect("a dense table")).into();
    for step in 0..4 {
        for slab in &mut slabs {
            let values = (0..40).map(|at| ((at * 7 + step) % 11) as f32);
            slab.gradient_mut().iter_mut().zip(values).for_each(|(to, from)| *to = from);
        }
        let now = bench.now();
        if fails {
            slabs[1].contains(Prepared::Places { count: 1000 });
            let error = bench.worker_mut(0).exchange(now, &mut slabs).expect_err("they do not fit");
            assert!(error.to_string().contains("1000 places"), "{error}");
            slabs[1].contains(Prepared::Gradient);
        }
        let ticket = bench.worker_mut(0).exchange(now, &mut slabs).expect("they fit");
        bench.worker_mut(0).clock();
        bench.run();
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
        slabs = bench.worker_mut(0).redeem_slabs(ticket);
    }
    (bench.parameters(W, 40), bench.parameters(v, 40))
}

#[test]
fn an_exchange_that_fails_before_anything_is_sent_takes_nothing_from_the_residual() {
    assert_eq!(after_exchanges(true), after_exchanges(false));
}
