//! Workers that compute on a copy as long as it is within the bound (ssp, dsps and pssp with a cache).

use crate::bench::Bench;
use crate::{W, job, started};
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::ServerId;
use paramill_core::wire::Cause;
use paramill_core::worker::{Gradient, PullOptions, Ticket, WorkerError};

const ELEMENTS: usize = 16;

/// Pushes ones everywhere, asks for what follows, and ends the iteration.
fn update(bench: &mut Bench, worker: usize) -> Ticket {
    let now = bench.now();
    let ones = [1.0; ELEMENTS];
    let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&ones), true).expect("it fits");
    bench.worker_mut(worker).clock();
    bench.run();
    ticket
}

/// Whether the application goes on.
fn goes_on(bench: &mut Bench, worker: usize, ticket: Ticket) -> bool {
    let now = bench.now();
    let concluded = bench.worker_mut(worker).conclude(now, ticket);
    bench.run();
    match concluded {
        None => false,
        Some(outcome) => {
            outcome.expect("nothing fails");
            bench.worker_mut(worker).redeem(ticket);
            true
        }
    }
}

fn set(bench: &mut Bench, sync: &str) {
    bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)])));
}

/// How many iterations worker 0 begins without the other one.
fn lead(bench: &mut Bench) -> usize {
    (0..20)
        .take_while(|_| {
            let ticket = update(bench, 0);
            // Aggregators hold pushes for a moment.
            bench.pass(0.1);
            goes_on(bench, 0, ticket)
        })
        .count()
}

#[test]
fn a_worker_goes_on_as_long_as_its_copy_is_within_the_bound() {
    for (sync, expected) in [
        ("ssp:s=3", 3),
        ("ssp:s=3,cache=off", 3),
        ("ssp:s=0", 0),
        ("dsps:min=2,max=8", 2),
        ("pssp:s=3,c=1", 3),
        ("bsp", 0),
    ] {
        let mut bench = started(job(2, 2, sync, "sgd:lr=1"), 2, ELEMENTS);
        assert_eq!(lead(&mut bench), expected, "{sync}");
        let reads = bench.worker(0).report().reads;
        assert_eq!((reads.at_once, reads.max_staleness), (expected as u64, expected as u64), "{sync}");
    }
}

/// The servers cannot be heard, and nobody has to hear them yet.
#[test]
fn answers_are_not_waited_for_within_the_bound() {
    for (sync, expected) in [("ssp:s=3", 3), ("ssp:s=3,cache=off", 0)] {
        let mut bench = started(job(2, 2, sync, "sgd:lr=1"), 1, ELEMENTS);
        bench.freeze();
        let mut last = None;
        let begun = (0..9)
            .take_while(|_| {
                let ticket = update(&mut bench, 0);
                last = Some(ticket);
                goes_on(&mut bench, 0, ticket)
            })
            .count();
        assert_eq!(begun, expected, "{sync}");
        bench.thaw();
        for _ in 0..4 {
            update(&mut bench, 1);
        }
        assert!(goes_on(&mut bench, 0, last.unwrap()), "{sync}");
        // Half a step for each push, of which the worker that waits makes one.
        let pushes = 4 + expected + 1;
        assert_eq!(bench.parameters(W, ELEMENTS)[0], -0.5 * pushes as f32, "{sync}");
    }
}

#[test]
fn one_pull_is_under_way_and_another_is_asked_for_when_the_worker_has_to_wait() {
    let mut bench = started(job(2, 1, "ssp:s=3", "sgd:lr=1"), 1, ELEMENTS);
    let asked = |bench: &Bench| bench.worker(0).report().reads.pulls;
    assert_eq!(asked(&bench), 0);
    bench.freeze();
    for (iteration, expected) in [(1, 1), (2, 1), (3, 1), (4, 2)] {
        let ticket = update(&mut bench, 0);
        assert_eq!(asked(&bench), expected, "iteration {iteration}");
        assert_eq!(goes_on(&mut bench, 0, ticket), iteration < 4, "iteration {iteration}");
    }
    bench.thaw();
    // The first pull was answered, with what is not new enough; the second is a delayed one.
    assert_eq!(bench.shard(0).report(bench.now()).unwrap().tables[0].stats.dprs, 1);
}

#[test]
fn a_wait_says_how_old_the_copy_is_and_what_is_allowed() {
    let mut bench = started(job(2, 1, "ssp:s=1", "sgd:lr=1"), 1, ELEMENTS);
    let ticket = update(&mut bench, 0);
    assert!(goes_on(&mut bench, 0, ticket));
    let ticket = update(&mut bench, 0);
    assert!(!goes_on(&mut bench, 0, ticket));
    let why = bench.explain(0, ticket);
    let copy = "the copy of table `w` is of version 0 and may lack 1 rounds in iteration 2 (ssp:s=1)";
    assert!(why.contains(copy), "{why}");
    assert!(why.contains("server 0 core 0 has not answered"), "{why}");
    bench.pass(0.75);
    update(&mut bench, 1);
    update(&mut bench, 1);
    assert!(goes_on(&mut bench, 0, ticket));
    let reads = bench.worker(0).report().reads;
    assert_eq!((reads.at_once, reads.after_wait, reads.waited_s), (1, 1, 0.75));
}

/// What arrives while the application computes is shown when it pushes.
#[test]
fn the_application_reads_one_version_while_it_computes() {
    let mut bench = started(job(2, 2, "ssp:s=3", "sgd:lr=2"), 1, ELEMENTS);
    bench.freeze();
    let ticket = update(&mut bench, 0);
    assert!(goes_on(&mut bench, 0, ticket));
    let before = bench.worker(0).values(W).to_vec();
    bench.thaw();
    update(&mut bench, 1);
    assert_eq!(bench.worker(0).values(W), before, "the answer is here, and not shown");
    let ticket = update(&mut bench, 0);
    assert_eq!(bench.worker(0).values(W)[0], before[0] - 3.0, "all three pushes");
    assert!(goes_on(&mut bench, 0, ticket));
}

#[test]
fn under_another_model_its_bound_holds_from_the_next_iteration() {
    let mut bench = started(job(2, 1, "ssp:s=3", "sgd:lr=1"), 1, ELEMENTS);
    let (shard, worker) = (bench.shard_node(0), bench.worker_node(0));
    bench.world.hold(shard, worker);
    let ticket = update(&mut bench, 0);
    assert!(goes_on(&mut bench, 0, ticket));
    // The worker is about to go on when the model changes. Under the former one it asked for nothing.
    let ticket = update(&mut bench, 0);
    assert_eq!((bench.outcome(0, ticket), bench.worker(0).report().reads.pulls), (Some(Ok(())), 1));
    set(&mut bench, "bsp");
    assert!(!goes_on(&mut bench, 0, ticket), "nothing may be missing any more");
    assert_eq!(bench.worker(0).report().reads.pulls, 2);
    bench.world.release(shard, worker);
    bench.run();
    assert!(!goes_on(&mut bench, 0, ticket), "the answer to the first pull is too old");
    (0..2).for_each(|_| {
        update(&mut bench, 1);
    });
    assert!(goes_on(&mut bench, 0, ticket));
    assert_eq!((bench.worker(0).version(W), bench.worker(0).report().reads.max_staleness), (Some(2), 1));
    // And back.
    set(&mut bench, "ssp:s=2");
    assert_eq!(lead(&mut bench), 2);
}

#[test]
fn models_of_single_servers_hold_for_their_parts() {
    let mut config = job(2, 2, "ssp:s=3", "sgd:lr=1");
    let rule = PolicyOverride::new("*", Policies::of([(Axis::Sync, "ssp:s=1")])).on(ServerId(1));
    config.overrides.push(rule);
    let mut bench = started(config, 1, ELEMENTS);
    assert_eq!(lead(&mut bench), 1, "the lower bound holds for the whole copy");
    let mut bench = started(job(2, 2, "ssp:s=3", "sgd:lr=1"), 1, ELEMENTS);
    bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, "bsp")])).on(ServerId(1)));
    assert_eq!(lead(&mut bench), 0, "one of them allows no cache");
}

#[test]
fn a_push_that_is_refused_after_the_application_went_on_is_told_by_the_next_wait_or_when_it_leaves() {
    let nan = |bench: &mut Bench| {
        let now = bench.now();
        let mut gradient = [1.0; ELEMENTS];
        gradient[ELEMENTS - 1] = f32::NAN;
        let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&gradient), true).unwrap();
        bench.worker_mut(0).clock();
        assert!(goes_on(bench, 0, ticket), "it hears of nothing yet");
    };
    // The worker believes that NaN is clipped, as it is on the first server; the second one refuses it.
    let config = || {
        let mut config = job(1, 2, "ssp:s=3", "sgd:lr=1");
        let clip = Policies::of([(Axis::NonFinite, "clip")]);
        config.overrides.push(PolicyOverride::new("*", clip).on(ServerId(0)));
        config
    };
    let is_refused = |outcome: Option<Result<(), WorkerError>>| match outcome {
        Some(Err(WorkerError::Refused { cause: Cause::NonFinite, message })) => {
            assert!(message.starts_with("an earlier update of table `w`, at clock 0, failed: "), "{message}");
            true
        }
        _ => false,
    };
    let mut bench = started(config(), 1, ELEMENTS);
    bench.freeze();
    nan(&mut bench);
    bench.thaw();
    let ticket = update(&mut bench, 0);
    let now = bench.now();
    assert!(is_refused(bench.worker_mut(0).conclude(now, ticket)));
    assert!(goes_on(&mut bench, 0, ticket), "it is told once");
    let leave = bench.worker_mut(0).leave(now);
    bench.run();
    assert_eq!(bench.outcome(0, leave), Some(Ok(())));

    let mut bench = started(config(), 1, ELEMENTS);
    bench.freeze();
    nan(&mut bench);
    bench.thaw();
    let now = bench.now();
    let leave = bench.worker_mut(0).leave(now);
    bench.run();
    assert!(is_refused(bench.outcome(0, leave)));
}

/// Others read what was pushed before a barrier.
#[test]
fn a_worker_is_at_a_barrier_when_servers_have_what_its_application_left_behind() {
    let mut bench = started(job(2, 1, "ssp:s=3", "sgd:lr=1"), 1, ELEMENTS);
    let (one, shard) = (bench.worker_node(0), bench.shard_node(0));
    bench.cut(one, shard);
    let ticket = update(&mut bench, 0);
    assert!(goes_on(&mut bench, 0, ticket));
    let now = bench.now();
    let tickets = [0, 1].map(|worker| bench.worker_mut(worker).barrier(now, "end").unwrap());
    bench.run();
    assert_eq!(bench.outcome(1, tickets[1]), None);
    bench.heal();
    bench.pass(3.0);
    assert_eq!([0, 1].map(|worker| bench.outcome(worker, tickets[worker])), [Some(Ok(())), Some(Ok(()))]);
    assert_eq!(bench.parameters(W, ELEMENTS)[0], -0.5);
}

#[test]
fn what_is_under_way_survives_a_connection_and_gradients_do_not_pile_up() {
    let mut bench = started(job(1, 2, "ssp:s=100", "sgd:lr=1"), 1, ELEMENTS);
    bench.isolate(bench.shard_node(1));
    assert_eq!(lead(&mut bench), paramill_core::limits::MAX_CLOCKS_UNACKNOWLEDGED);
    bench.heal();
    bench.pass(3.0);
    let ticket = update(&mut bench, 0);
    assert!(goes_on(&mut bench, 0, ticket));
    let pushed = bench.worker(0).current_clock() as f32;
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - pushed).collect();
    assert_eq!(bench.parameters(W, ELEMENTS), expected, "every push was applied once");
    let ticket = update(&mut bench, 0);
    assert!(goes_on(&mut bench, 0, ticket));
    assert!(bench.worker(0).version(W) >= Some(pushed as u64), "the pull was asked for again");
}

#[test]
fn aggregators_bring_copies_too() {
    let tables = [(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS])];
    let mut bench = Bench::with_aggregators(job(3, 2, "ssp:s=2", "sgd:lr=3"), 1, &[0, 0]);
    bench.start(&tables);
    for iteration in 0..9 {
        for worker in [0, 1, 2] {
            let ticket = update(&mut bench, worker);
            bench.pass(0.2);
            assert!(goes_on(&mut bench, worker, ticket), "worker {worker}, iteration {iteration}");
        }
    }
    assert_eq!(bench.parameters(W, ELEMENTS), [-27.0; ELEMENTS]);
    assert_eq!(lead(&mut bench), 2);
}

#[test]
fn a_worker_that_joins_computes_on_what_it_asked_for() {
    let mut bench = started(job(2, 1, "ssp:s=1", "sgd:lr=1"), 1, ELEMENTS);
    for _ in 0..5 {
        let tickets = [0, 1].map(|worker| update(&mut bench, worker));
        assert!((0..2).all(|worker| goes_on(&mut bench, worker, tickets[worker])));
    }
    let late = bench.add_worker();
    let now = bench.now();
    let spec = TableSpec::dense("w", [ELEMENTS as u64]);
    bench.worker_mut(late).declare(spec, vec![0.0; ELEMENTS]).unwrap();
    let start = bench.worker_mut(late).start(now).unwrap();
    bench.pass(1.0);
    assert_eq!(bench.outcome(late, start), Some(Ok(())));
    assert!(bench.worker(late).version(W) >= Some(5));
    let first = bench.worker(late).current_clock();
    while bench.worker(0).current_clock() < first {
        (0..2).for_each(|worker| {
            update(&mut bench, worker);
        });
    }
    let ticket = update(&mut bench, late);
    assert!(goes_on(&mut bench, late, ticket));
}

/// An explicit pull is one, and slabs and rows are waited for in every iteration.
#[test]
fn pulls_slabs_and_rows_wait_for_their_answers() {
    let mut bench = started(job(2, 1, "ssp:s=3", "sgd:lr=1"), 1, ELEMENTS);
    bench.freeze();
    let now = bench.now();
    let pull = bench.worker_mut(0).pull(now, W, PullOptions::default()).unwrap();
    bench.run();
    assert_eq!(bench.outcome(0, pull), None);
    bench.thaw();
    assert!(goes_on(&mut bench, 0, pull));
    let mut slabs = vec![bench.worker_mut(0).slab(W).unwrap()];
    bench.freeze();
    let exchange = bench.worker_mut(0).exchange(now, &mut slabs).unwrap();
    bench.run();
    assert_eq!(bench.outcome(0, exchange), None);
    bench.thaw();
    assert_eq!(bench.outcome(0, exchange), Some(Ok(())));
}
