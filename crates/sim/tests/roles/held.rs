//! Updates that workers hold back and merge with later ones (policy `hold`).

use super::bench::Bench;
use super::{W, job};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::status::UpdatesReport;
use paramill_core::table::TableSpec;
use paramill_core::wire::Kind;
use paramill_core::worker::{Gradient, PullOptions, Slab, Ticket};

const ELEMENTS: usize = 16;

fn holding(sync: &str, hold: &str) -> JobConfig {
    let config = job(2, 2, sync, "sgd:lr=1");
    JobConfig { policy: config.policy.with(Axis::Hold, hold), ..config }
}

/// A dense table of ones.
fn begun(config: JobConfig, through: &[usize]) -> Bench {
    let mut bench = Bench::with_aggregators(config, 1, through);
    bench.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), vec![1.0; ELEMENTS])]);
    bench
}

fn push(bench: &mut Bench, worker: usize, gradient: f32) -> Ticket {
    let now = bench.now();
    let gradient = [gradient; ELEMENTS];
    let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
    bench.worker_mut(worker).clock();
    bench.run();
    ticket
}

/// An iteration of both workers, which push this gradient and wait for what follows. What they have then.
fn iterate(bench: &mut Bench, gradient: f32) -> [f32; 2] {
    let tickets = [0, 1].map(|worker| push(bench, worker, gradient));
    // Aggregators hold pushes for a moment.
    bench.pass(0.1);
    [0, 1].map(|worker| {
        let now = bench.now();
        let outcome = bench.worker_mut(worker).conclude(now, tickets[worker]);
        assert_eq!(outcome, Some(Ok(())), "{}", bench.explain(worker, tickets[worker]));
        bench.worker_mut(worker).redeem(tickets[worker]);
        bench.worker(worker).values(W)[0]
    })
}

/// Both workers send what they hold back.
fn flush(bench: &mut Bench) {
    for worker in 0..2 {
        let now = bench.now();
        let tickets = bench.worker_mut(worker).flush(now).expect("the job runs");
        assert!(!tickets.is_empty());
        bench.run();
        bench.pass(0.1);
        for ticket in tickets {
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
            bench.worker_mut(worker).redeem(ticket);
        }
    }
}

fn set(bench: &mut Bench, axis: Axis, text: &str) {
    bench.set(PolicyOverride::new("*", Policies::of([(axis, text)])));
}

fn updates(bench: &Bench, worker: usize) -> UpdatesReport {
    bench.worker(worker).report().updates.expect("the policy is used")
}

/// Rounds close on time, without gradients; then all of them come at once.
#[test]
fn an_update_is_held_back_until_its_bound_and_sent_whole() {
    let mut bench = begun(holding("bsp", "when:true,most=2"), &[]);
    let values = [1.0, 2.0, 4.0, 8.0].map(|gradient| iterate(&mut bench, gradient));
    assert_eq!(values, [[1.0; 2], [1.0; 2], [-6.0; 2], [-6.0; 2]]);
    assert_eq!(bench.parameters(W, ELEMENTS), [-6.0; ELEMENTS]);
    let report = updates(&bench, 0);
    assert_eq!((report.sent, report.held, report.longest), (1, 3, 2));
    let why = bench.worker(0).report().holding.expect("the last one is held back");
    assert_eq!(why, "holds an update of table `w` back, from 1 pushes so far (hold=when:true,most=2)");
    assert_eq!(bench.shard(0).report(bench.now()).unwrap().tables[0].version, 4);
}

#[test]
fn a_worker_that_holds_its_update_back_gets_no_parameters_unless_it_asks_for_them() {
    for (hold, answers) in [("when:true,most=3", 1), ("when:true,most=3,pulls=off", 4)] {
        let mut bench = begun(holding("bsp", hold), &[]);
        let (pushed, pulled) =
            (bench.tally.payload_bytes(Kind::Push), bench.tally.payload_bytes(Kind::Params));
        for _ in 0..4 {
            iterate(&mut bench, 1.0);
        }
        let pulled = bench.tally.payload_bytes(Kind::Params) - pulled;
        assert_eq!(pulled, answers * 2 * ELEMENTS * 4, "{hold}");
        // A chunk of 32 bytes that has no gradient says so in 64.
        let pushed = bench.tally.payload_bytes(Kind::Push) - pushed;
        assert_eq!(pushed, 2 * ELEMENTS * 4 + 3 * 2 * 2 * 64, "{hold}");
        assert_eq!(bench.worker(0).report().reads.pulls as usize, answers, "{hold}");
    }
}

#[test]
fn an_update_is_sent_when_it_is_significant() {
    // Parameters of norm 4 and gradients of norm 1, which agree.
    for (hold, sent) in [
        // The step makes the parameters so small that the next gradient is significant by itself.
        ("significance:0.7,most=9", vec![2, 3]),
        ("variance:2.5,most=9", vec![2]),
        ("when:norm < 1.5,most=9", vec![1, 3]),
    ] {
        let mut bench = begun(holding("bsp", hold), &[]);
        let mut found = Vec::new();
        for iteration in 0..4 {
            let before = updates_sent(&bench);
            iterate(&mut bench, 0.25);
            if updates_sent(&bench) > before {
                found.push(iteration);
            }
        }
        assert_eq!(found, sent, "{hold}");
    }
}

fn updates_sent(bench: &Bench) -> u64 {
    bench.worker(0).report().updates.map_or(0, |updates| updates.sent)
}

/// Gradients are whole numbers, so that sums have no order.
#[test]
fn nothing_is_lost_whatever_the_model_the_codec_and_the_way() {
    for sync in [
        "bsp",
        "asp",
        "ssp:s=1",
        "ssp:s=1,cache=off",
        "dsps:min=1,max=3",
        "pssp:s=1,c=0.5",
        "bsp:overlap=false",
    ] {
        for (codec, through) in
            [("none", &[][..]), ("f16", &[]), ("topk:0.5", &[]), ("none", &[0, 0]), ("int8", &[0, 1])]
        {
            let config = holding(sync, "when:held < 2,most=3");
            let config = JobConfig { policy: config.policy.with(Axis::Codec, codec), ..config };
            let mut bench = begun(config, through);
            for iteration in 0..7 {
                iterate(&mut bench, [2.0, 4.0][iteration % 2]);
            }
            flush(&mut bench);
            // What the codec kept comes with further pushes.
            set(&mut bench, Axis::Codec, "none");
            iterate(&mut bench, 0.0);
            flush(&mut bench);
            let found = bench.parameters(W, ELEMENTS);
            assert_eq!(found, [1.0 - 20.0; ELEMENTS], "{sync} {codec} {through:?}");
            assert!(updates(&bench, 1).longest <= 3);
        }
    }
}

/// The bound of the copy is the model's; a pull is left out as long as it allows.
#[test]
fn a_cache_is_not_renewed_while_the_update_is_held_back() {
    let mut bench = begun(holding("ssp:s=2", "when:true,most=9"), &[]);
    let mut reads = Vec::new();
    for _ in 0..6 {
        iterate(&mut bench, 1.0);
        reads.push(bench.worker(0).report().reads.pulls);
    }
    // Worker 0 asks before the other has pushed, so that its copy lacks a round.
    assert_eq!(reads, [0, 0, 1, 1, 2, 2]);
    assert!(bench.worker(0).report().reads.max_staleness <= 2);
}

#[test]
fn what_is_held_back_survives_a_clean_leave() {
    for sync in ["bsp", "ssp:s=3", "quorum:q=0.5"] {
        let mut bench = begun(holding(sync, "when:true,most=9"), &[]);
        for _ in 0..3 {
            iterate(&mut bench, 1.0);
        }
        let now = bench.now();
        let ticket = bench.worker_mut(0).leave(now);
        bench.run();
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())), "{sync}");
        // The other goes on, and its next push closes the round that the one before is in.
        let ticket = push(&mut bench, 1, 0.0);
        assert_eq!(bench.outcome(1, ticket), Some(Ok(())), "{sync}");
        let now = bench.now();
        bench.worker_mut(1).leave(now);
        bench.run();
        let lost: f32 = bench.parameters(W, ELEMENTS).iter().map(|value| (value - (1.0 - 4.5)).abs()).sum();
        assert!(lost < 1e-3 || sync != "bsp", "{sync}: {:?}", bench.parameters(W, ELEMENTS));
        assert!(bench.parameters(W, ELEMENTS)[0] < -1.9, "{sync}: {:?}", bench.parameters(W, ELEMENTS));
    }
}

#[test]
fn without_the_policy_what_was_held_back_goes_with_the_next_push() {
    let mut bench = begun(holding("bsp", "when:true,most=9"), &[]);
    for _ in 0..3 {
        iterate(&mut bench, 1.0);
    }
    set(&mut bench, Axis::Hold, "none");
    assert_eq!(iterate(&mut bench, 1.0), [-3.0; 2]);
    assert_eq!(iterate(&mut bench, 1.0), [-4.0; 2]);
    assert_eq!(bench.worker(0).report().holding, None);
}

#[test]
fn slabs_are_held_back_too() {
    for codec in ["none", "f16", "topk:1"] {
        let config = holding("bsp", "when:true,most=2");
        let mut bench = begun(JobConfig { policy: config.policy.with(Axis::Codec, codec), ..config }, &[]);
        let mut slabs: Vec<Slab> =
            (0..2).map(|worker| bench.worker_mut(worker).slab(W).expect("it is free")).collect();
        let mut found = Vec::new();
        for gradient in [1.0, 2.0, 4.0, 8.0] {
            let tickets: Vec<Ticket> = slabs
                .drain(..)
                .enumerate()
                .map(|(worker, mut slab)| {
                    slab.gradient_mut().fill(gradient);
                    let now = bench.now();
                    let ticket = bench.worker_mut(worker).exchange(now, &mut vec![slab]).expect("it fits");
                    bench.worker_mut(worker).clock();
                    bench.run();
                    ticket
                })
                .collect();
            for (worker, ticket) in tickets.into_iter().enumerate() {
                assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{codec}");
                slabs.extend(bench.worker_mut(worker).redeem_slabs(ticket));
            }
            found.push(slabs[1].values()[ELEMENTS - 1]);
        }
        assert_eq!(found, [1.0, 1.0, -6.0, -6.0], "{codec}");
    }
}

/// Elements that no gradient of an update has are not stepped: momentum does not move them.
#[test]
fn an_update_lacks_what_all_its_gradients_lack() {
    let mut config = holding("bsp", "when:true,most=1");
    config.workers = 1;
    config.policy = config.policy.with(Axis::Optimizer, "momentum:lr=1,beta=0.5");
    let mut bench = begun(config, &[]);
    let gradient: Vec<f32> = (0..ELEMENTS).map(|at| if at < 8 { 1.0 } else { 0.0 }).collect();
    for lacks in [8..16, 10..16, 8..16, 12..16] {
        let worker = bench.worker_mut(0);
        let mut submission =
            worker.begin_push(W, Gradient::Dense(&gradient), vec![lacks], false).expect("it fits");
        submission.prepare(&paramill_core::hands::Alone);
        let now = bench.now();
        bench.worker_mut(0).finish(now, &mut submission).expect("it is sent");
        bench.worker_mut(0).clock();
        bench.run();
    }
    let found = bench.parameters(W, ELEMENTS);
    // Two steps of 2, of which the first goes on by half.
    assert_eq!((found[0], found[9], found[15]), (1.0 - 2.0 - 3.0, 1.0, 1.0));
}

#[test]
fn rows_are_held_back_one_by_one_and_pulled_when_they_were_sent() {
    let config = holding("bsp", "significance:0.5,most=3");
    let mut bench = Bench::new(config, 1);
    bench.start(&[(TableSpec::sparse("rows", 8, 2), vec![1.0; 16])]);
    let rows = [1, 6];
    // Row 1 is changed by half at once, row 6 after three iterations.
    let gradient = [1.0, 0.0, 0.25, 0.0];
    let (mut found, mut asked) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let before = bench.tally.payload_bytes(Kind::Pull);
        let tickets = [0, 1].map(|worker| {
            let now = bench.now();
            let ticket =
                bench.worker_mut(worker).pull(now, W, PullOptions { rows: Some(&rows), now: false }).unwrap();
            bench.run();
            ticket
        });
        asked.push((bench.tally.payload_bytes(Kind::Pull) - before) / 8);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
            let values = bench.worker_mut(worker).redeem(ticket);
            found.push((values[0], values[2]));
            let now = bench.now();
            let gradient = Gradient::Rows { rows: &rows, values: &gradient };
            let ticket = bench.worker_mut(worker).push(now, W, gradient, false).unwrap();
            bench.worker_mut(worker).clock();
            bench.run();
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
        }
    }
    let row_1 = [1.0, 0.0, -1.0, -2.0];
    assert_eq!(found.iter().step_by(2).map(|(one, _)| *one).collect::<Vec<_>>(), row_1);
    let row_6 = [1.0, 1.0, 1.0, 0.25];
    assert_eq!(found.iter().step_by(2).map(|(_, six)| *six).collect::<Vec<_>>(), row_6);
    assert_eq!(asked, [2, 1, 1, 2], "row 6 is asked for again when an update of it was sent");
    let now = bench.now();
    let all = bench.worker_mut(0).pull(now, W, PullOptions { rows: None, now: true }).unwrap();
    bench.run();
    assert_eq!(bench.worker_mut(0).redeem(all)[2], -2.0, "whoever asks at once gets what is there");
}

/// A worker runs ahead until servers refuse its pushes, among them one with what it held back, and pushes them again: the application
/// has its own gradient only. What everything comes to.
fn after_refusals(codec: &str, through: &[usize]) -> Vec<f32> {
    // Servers keep rounds 0 to 4 while worker 1 has pushed nothing, and worker 0 sends at clocks 2, 5 and so on.
    const REFUSED: u64 = 5;
    let config = holding("bsp", "when:true,most=2");
    let mut bench = begun(JobConfig { policy: config.policy.with(Axis::Codec, codec), ..config }, through);
    let push = |bench: &mut Bench, worker: usize, gradient: f32| {
        let (now, values) = (bench.now(), [gradient; ELEMENTS]);
        let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&values), false).expect("it fits");
        bench.pass(if through.is_empty() { 0.0 } else { 3.0 });
        let outcome = bench.outcome(worker, ticket).expect("it is taken or refused");
        bench.worker_mut(worker).redeem(ticket);
        outcome
    };
    for _ in 0..REFUSED {
        assert_eq!(push(&mut bench, 0, 1.0), Ok(()));
        bench.worker_mut(0).clock();
    }
    for _ in 0..3 {
        let error = push(&mut bench, 0, 1.0).expect_err("it is too far ahead");
        assert!(error.to_string().contains("at most 4 rounds ahead"), "{error}");
    }
    for _ in 0..REFUSED {
        assert_eq!(push(&mut bench, 1, 1.0), Ok(()));
        bench.worker_mut(1).clock();
    }
    // Of worker 0, the push that was refused.
    for _ in 0..3 {
        for worker in 0..2 {
            assert_eq!(push(&mut bench, worker, 1.0), Ok(()));
            bench.worker_mut(worker).clock();
        }
    }
    flush(&mut bench);
    bench.parameters(W, ELEMENTS)
}

#[test]
fn an_update_that_is_refused_is_neither_lost_nor_merged_twice() {
    for through in [&[][..], &[0, 0]] {
        for codec in ["none", "bf16", "topk:1"] {
            assert_eq!(after_refusals(codec, through), [1.0 - 8.0; ELEMENTS], "{codec} {through:?}");
        }
    }
}

/// What is not finite is not merged: it could not be taken out any more.
#[test]
fn a_gradient_that_is_not_finite_leaves_what_is_held_back_as_it_is() {
    let mut bench = begun(holding("bsp", "when:true,most=2"), &[]);
    iterate(&mut bench, 1.0);
    let now = bench.now();
    let mut gradient = [1.0; ELEMENTS];
    for wrong in [f32::NAN, f32::INFINITY] {
        gradient[3] = wrong;
        let error = bench.worker_mut(0).push(now, W, Gradient::Dense(&gradient), true).unwrap_err();
        assert!(error.to_string().contains("NaN or Inf"), "{error}");
    }
    assert_eq!([iterate(&mut bench, 1.0), iterate(&mut bench, 1.0)], [[1.0; 2], [-2.0; 2]]);
}

#[test]
fn a_gradient_that_is_clipped_is_held_back_clipped() {
    let config = holding("bsp", "when:true,most=1");
    let mut bench = begun(JobConfig { policy: config.policy.with(Axis::NonFinite, "clip"), ..config }, &[]);
    iterate(&mut bench, f32::NAN);
    assert_eq!(iterate(&mut bench, 1.0), [0.0; 2]);
    assert_eq!(bench.worker(0).nonfinite(), 1);
}
