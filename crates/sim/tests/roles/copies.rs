//! Workers that compute on a copy as long as it is within the bound (ssp, dsps and pssp with a cache).

use crate::bench::Bench;
use crate::{W, job, started};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::{ServerId, TableId};
use paramill_core::wire::{Cause, DType};
use paramill_core::worker::{Gradient, PullOptions, Share, Slab, Ticket, WorkerError};

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

/// An explicit pull is one.
#[test]
fn a_pull_waits_for_its_answer() {
    let mut bench = started(job(2, 1, "ssp:s=3", "sgd:lr=1"), 1, ELEMENTS);
    bench.freeze();
    let now = bench.now();
    let pull = bench.worker_mut(0).pull(now, W, PullOptions::default()).unwrap();
    bench.run();
    assert_eq!(bench.outcome(0, pull), None);
    bench.thaw();
    assert!(goes_on(&mut bench, 0, pull));
}

/// Workers whose tables are exchanged as slabs.
struct Exchanging {
    bench: Bench,
    /// Those that a worker has.
    slabs: Vec<Vec<Slab>>,
}

impl Exchanging {
    fn new(config: JobConfig) -> Exchanging {
        Exchanging::of(started(config, 1, ELEMENTS), &[W])
    }

    fn of(mut bench: Bench, tables: &[TableId]) -> Exchanging {
        let lend = |worker: usize| {
            let lent = tables
                .iter()
                .map(|&table| bench.worker_mut(worker).slab(table).expect("nothing is under way"));
            lent.collect::<Vec<_>>()
        };
        let slabs = (0..2).map(lend).collect();
        Exchanging { bench, slabs }
    }

    /// Exchanges what a worker has, with ones everywhere, and ends the iteration.
    fn exchange(&mut self, worker: usize) -> Ticket {
        self.exchange_with(worker, 1.0)
    }

    fn exchange_with(&mut self, worker: usize, last: f32) -> Ticket {
        let now = self.bench.now();
        for slab in &mut self.slabs[worker] {
            slab.gradient_mut().fill(1.0);
            slab.gradient_mut()[ELEMENTS - 1] = last;
        }
        let role = self.bench.worker_mut(worker);
        let ticket = role.exchange(now, &mut self.slabs[worker]).expect("they fit");
        role.clock();
        self.bench.run();
        ticket
    }

    /// Whether the application goes on, with its slabs.
    fn goes_on(&mut self, worker: usize, ticket: Ticket) -> bool {
        let now = self.bench.now();
        let concluded = self.bench.worker_mut(worker).conclude(now, ticket);
        if let Some(outcome) = &concluded {
            assert_eq!(outcome, &Ok(()));
            self.slabs[worker] = self.bench.worker_mut(worker).redeem_slabs(ticket);
        }
        self.bench.run();
        concluded.is_some()
    }

    /// How many iterations worker 0 begins without the other one, and the ticket that it waits for then.
    fn lead(&mut self) -> (usize, Ticket) {
        for begun in 0..20 {
            let ticket = self.exchange(0);
            self.bench.pass(0.1);
            if !self.goes_on(0, ticket) {
                return (begun, ticket);
            }
        }
        panic!("nothing stops it");
    }

    fn first_value(&self, worker: usize) -> f32 {
        self.slabs[worker][0].values()[0]
    }
}

#[test]
fn slabs_come_back_at_once_as_long_as_their_values_are_within_the_bound() {
    for (sync, expected) in [
        ("ssp:s=3", 3),
        ("ssp:s=3,cache=off", 3),
        ("ssp:s=0", 0),
        ("dsps:min=2,max=8", 2),
        ("pssp:s=3,c=1", 3),
        ("bsp", 0),
    ] {
        let mut run = Exchanging::new(job(2, 2, sync, "sgd:lr=1"));
        assert_eq!(run.lead().0, expected, "{sync}");
        let reads = run.bench.worker(0).report().reads;
        assert_eq!((reads.at_once, reads.max_staleness), (expected as u64, expected as u64), "{sync}");
    }
}

/// The servers cannot be heard, and only with the cache nobody has to hear them yet.
#[test]
fn answers_to_exchanges_are_not_waited_for_within_the_bound() {
    for (sync, expected, pulls) in [("ssp:s=3", 3, 2), ("ssp:s=3,cache=off", 0, 1)] {
        let mut run = Exchanging::new(job(2, 2, sync, "sgd:lr=1"));
        run.bench.freeze();
        let (begun, last) = run.lead();
        assert_eq!(begun, expected, "{sync}");
        assert_eq!(
            run.bench.worker(0).report().reads.pulls,
            pulls,
            "{sync}: one at a time, and one to wait for"
        );
        run.bench.thaw();
        for _ in 0..4 {
            let ticket = run.exchange(1);
            run.goes_on(1, ticket);
        }
        assert!(run.goes_on(0, last), "{sync}");
        let pushes = (4 + expected + 1) as f32;
        assert_eq!(
            run.bench.parameters(W, ELEMENTS)[0],
            -0.5 * pushes,
            "{sync}: every push was applied once"
        );
    }
}

#[test]
fn a_wait_for_slabs_says_how_old_their_values_are() {
    let mut run = Exchanging::new(job(2, 1, "ssp:s=1", "sgd:lr=1"));
    let (begun, ticket) = run.lead();
    assert_eq!(begun, 1);
    let why = run.bench.explain(0, ticket);
    let copy = "the copy of table `w` is of version 0 and may lack 1 rounds in iteration 2 (ssp:s=1)";
    assert!(why.contains(copy), "{why}");
    assert!(
        !run.bench.worker(0).has_share(ticket, Share { parts: 1, of: 2 }),
        "nothing is read before its end"
    );
}

/// Neither an answer nor a frame that is still to be sent touches memory that the application has.
#[test]
fn a_slab_is_left_alone_while_the_application_has_it_and_renewed_when_it_is_exchanged() {
    let mut run = Exchanging::new(job(2, 2, "ssp:s=3", "sgd:lr=2"));
    let addresses = |run: &Exchanging| {
        let slab = &run.slabs[0][0];
        (slab.gradient().as_ptr(), slab.values().as_ptr())
    };
    let before = (addresses(&run), run.first_value(0));
    run.bench.freeze();
    let ticket = run.exchange(0);
    assert!(run.goes_on(0, ticket));
    // The frames are not sent from here.
    run.slabs[0][0].gradient_mut().fill(99.0);
    run.bench.thaw();
    run.exchange(1);
    assert_eq!((addresses(&run), run.first_value(0)), before, "the answer is here, and not shown");
    assert_eq!(run.bench.worker(0).version(W), Some(0));
    let ticket = run.exchange(0);
    assert!(run.goes_on(0, ticket));
    assert_eq!((addresses(&run), run.first_value(0)), (before.0, before.1 - 3.0), "all three pushes");
    assert_eq!(run.bench.worker(0).version(W), Some(1));
}

#[test]
fn under_another_model_its_bound_holds_for_slabs_that_are_exchanged() {
    for sync in ["bsp", "psp:c=2,b=1,tau2=0"] {
        let mut run = Exchanging::new(job(2, 1, "ssp:s=3", "sgd:lr=1"));
        let (shard, worker) = (run.bench.shard_node(0), run.bench.worker_node(0));
        run.bench.world.hold(shard, worker);
        let ticket = run.exchange(0);
        assert!(run.goes_on(0, ticket));
        let ticket = run.exchange(0);
        assert_eq!(run.bench.outcome(0, ticket), Some(Ok(())));
        set(&mut run.bench, sync);
        assert!(!run.goes_on(0, ticket), "nothing may be missing any more");
        assert_eq!(run.bench.worker(0).report().reads.pulls, 2);
        run.bench.world.release(shard, worker);
        run.bench.run();
        assert!(!run.goes_on(0, ticket), "the answer to the first pull is too old");
        for _ in 0..2 {
            let other = run.exchange(1);
            run.goes_on(1, other);
        }
        assert!(run.goes_on(0, ticket));
        assert_eq!(run.bench.worker(0).version(W), Some(2));
        // Without a cache exchanges wait for their answers, and with one again they do not.
        let (begun, ticket) = run.lead();
        assert_eq!(begun, 0, "{sync}");
        let other = run.exchange(1);
        assert!(run.goes_on(0, ticket) && run.goes_on(1, other), "{sync}");
        set(&mut run.bench, "ssp:s=2");
        assert_eq!(run.lead().0, 2, "{sync}");
    }
}

/// A policy for a table makes a part of an exchange wait.
#[test]
fn an_exchange_waits_for_tables_without_a_cache() {
    const OTHER: TableId = TableId(1);
    let mut config = job(2, 2, "ssp:s=3", "sgd:lr=1");
    config.overrides.push(PolicyOverride::new("other", Policies::of([(Axis::Sync, "ssp:s=3,cache=off")])));
    let specs = ["w", "other"].map(|name| (TableSpec::dense(name, [ELEMENTS as u64]), vec![0.0; ELEMENTS]));
    let mut bench = Bench::new(config, 1);
    bench.start(&specs);
    let mut run = Exchanging::of(bench, &[W, OTHER]);
    run.bench.freeze();
    let ticket = run.exchange(0);
    assert!(!run.goes_on(0, ticket), "that of the other table is on its way");
    run.bench.thaw();
    assert!(run.goes_on(0, ticket));
    assert!(run.slabs[0].iter().all(|slab| slab.values() == [-0.5; ELEMENTS]));
}

/// What was under way when a table was lent, or given back, is of no use to the other way of using it, and does not pass for it.
#[test]
fn a_table_may_be_lent_and_given_back_while_answers_are_under_way() {
    let mut bench = started(job(2, 2, "ssp:s=3", "sgd:lr=1"), 1, ELEMENTS);
    bench.freeze();
    let ticket = update(&mut bench, 0);
    assert!(goes_on(&mut bench, 0, ticket));
    let mut run = Exchanging::of(bench, &[W]);
    run.bench.thaw();
    assert_eq!((run.bench.worker(0).version(W), run.first_value(0)), (Some(0), 0.0));
    assert_eq!(run.lead().0, 2, "the update was the first of three");

    let mut run = Exchanging::new(job(2, 2, "ssp:s=3", "sgd:lr=1"));
    run.bench.freeze();
    let ticket = run.exchange(0);
    assert!(run.goes_on(0, ticket));
    let slab = run.slabs[0].pop().unwrap();
    run.bench.worker_mut(0).give_back(slab).unwrap();
    run.bench.thaw();
    assert_eq!((run.bench.worker(0).version(W), run.bench.worker(0).values(W)[0]), (Some(0), 0.0));
    assert_eq!(lead(&mut run.bench), 2);
}

#[test]
fn a_gradient_of_a_slab_that_is_refused_after_it_came_back_is_told_by_the_next_exchange_or_when_the_worker_leaves()
 {
    let told = |outcome: &Option<Result<(), WorkerError>>| match outcome {
        Some(Err(WorkerError::Refused { cause: Cause::NonFinite, message })) => {
            message.starts_with("an earlier update of table `w`, at clock 0, failed: ")
        }
        _ => false,
    };
    for leaves in [false, true] {
        let mut run = Exchanging::new(job(2, 2, "ssp:s=3", "sgd:lr=1"));
        run.bench.freeze();
        let ticket = run.exchange_with(0, f32::NAN);
        assert!(run.goes_on(0, ticket), "it hears of nothing yet");
        run.bench.thaw();
        let now = run.bench.now();
        if leaves {
            let leave = run.bench.worker_mut(0).leave(now);
            run.bench.run();
            assert!(told(&run.bench.outcome(0, leave)));
            continue;
        }
        run.bench.freeze();
        let ticket = run.exchange_with(0, f32::NAN);
        assert!(told(&run.bench.worker_mut(0).conclude(now, ticket)));
        // The application takes its slabs, and hears of this one later, too.
        run.slabs[0] = run.bench.worker_mut(0).redeem_slabs(ticket);
        run.bench.thaw();
        let ticket = run.exchange(0);
        let outcome = run.bench.worker_mut(0).conclude(now, ticket);
        assert!(
            matches!(&outcome, Some(Err(error)) if error.to_string().contains("at clock 1, failed")),
            "{outcome:?}"
        );
        assert!(run.goes_on(0, ticket), "each is told once");
    }
}

#[test]
fn gradients_of_slabs_survive_a_connection_do_not_pile_up_and_are_there_before_a_barrier() {
    let mut run = Exchanging::new(job(2, 2, "ssp:s=100", "sgd:lr=1"));
    run.bench.isolate(run.bench.shard_node(1));
    let (begun, ticket) = run.lead();
    assert_eq!(begun, paramill_core::limits::MAX_CLOCKS_UNACKNOWLEDGED);
    let now = run.bench.now();
    let barriers = [0, 1].map(|worker| run.bench.worker_mut(worker).barrier(now, "end").unwrap());
    run.bench.run();
    assert_eq!(run.bench.outcome(1, barriers[1]), None);
    run.bench.heal();
    run.bench.pass(3.0);
    assert_eq!(
        [0, 1].map(|worker| run.bench.outcome(worker, barriers[worker])),
        [Some(Ok(())), Some(Ok(()))]
    );
    assert!(run.goes_on(0, ticket));
    let pushed = 0.5 * (begun + 1) as f32;
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - pushed).collect();
    assert_eq!(run.bench.parameters(W, ELEMENTS), expected, "every push was applied once");
}

/// Halves, differences and what a codec makes are received beside a slab as elsewhere.
#[test]
fn answers_by_codecs_renew_slabs_too() {
    for answers in ["none", "f16", "int8", "topk:1"] {
        let mut config = job(2, 2, "ssp:s=2", "sgd:lr=1");
        config.policy = config.policy.with(Axis::AnswerCodec, answers);
        let mut run = Exchanging::new(config);
        run.slabs[0][0].take_halves(true);
        for iteration in 0..9 {
            for worker in [0, 1] {
                let ticket = run.exchange(worker);
                assert!(run.goes_on(worker, ticket), "{answers}, worker {worker}, iteration {iteration}");
            }
        }
        // The last answer was asked for before the other worker's last push.
        let ticket = run.exchange(0);
        assert!(run.goes_on(0, ticket));
        run.slabs[0][0].convert_values(DType::F32);
        let (found, expected) = (run.slabs[0][0].values().to_vec(), run.bench.parameters(W, ELEMENTS));
        let is_close = |(one, other): (&f32, &f32)| (one - other).abs() <= 0.6;
        assert!(found.iter().zip(&expected).all(is_close), "{answers}: {found:?} and {expected:?}");
    }
}

/// What an application has done by itself since is a part of the answer that it waits for, and not of an older copy.
#[test]
fn with_local_steps_exchanges_wait_for_their_answers() {
    let mut bench = Bench::new(job(2, 1, "ssp:s=3", "sgd:lr=1"), 1);
    (0..2).for_each(|worker| bench.worker_mut(worker).step_locally());
    bench.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS])]);
    let mut run = Exchanging::of(bench, &[W]);
    run.bench.freeze();
    assert_eq!(run.lead().0, 0);
}
