//! Who was waited for: the time in which applications wait is charged to the worker or server that came last, to the second.

use super::broadcast::broadcast;
use super::{W, job};
use crate::bench::Bench;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::Axis;
use paramill_core::table::TableSpec;
use paramill_core::types::{ServerId, WorkerId};
use paramill_core::waits::WaitCause;
use paramill_core::worker::{Gradient, Ticket};

const ELEMENTS: usize = 50;

fn table() -> (TableSpec, Vec<f32>) {
    (TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS])
}

fn started(config: JobConfig, through: &[usize]) -> Bench {
    let mut bench = Bench::with_aggregators(config, 1, through);
    bench.declare_and_start(&[table()]);
    bench.pass(1.0);
    bench
}

fn begin_wait(bench: &mut Bench, worker: usize, ticket: Ticket) -> Ticket {
    let now = bench.now();
    bench.worker_mut(worker).begin_wait(now, ticket);
    bench.run();
    ticket
}

/// A worker does an iteration, and waits for the parameters that follow.
fn iterate(bench: &mut Bench, worker: usize) -> Ticket {
    let (now, gradient) = (bench.now(), [1.0; ELEMENTS]);
    let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
    bench.worker_mut(worker).clock();
    begin_wait(bench, worker, ticket)
}

/// The worker has what it waited for.
fn end_wait(bench: &mut Bench, worker: usize, ticket: Ticket) {
    let now = bench.now();
    assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
    bench.worker_mut(worker).end_wait(now, ticket);
    bench.worker_mut(worker).redeem(ticket);
}

/// What a worker is said to have waited for, in seconds; everything that it waited is charged.
fn charges(bench: &Bench, worker: usize) -> Vec<(WaitCause, f64)> {
    let waited = bench.worker(worker).report().waited;
    assert!((waited.charged() - waited.seconds).abs() < 1e-6, "{waited:?}");
    waited.causes.iter().map(|charge| (charge.cause, charge.seconds)).collect()
}

fn push(rank: u32) -> WaitCause {
    WaitCause::Push(WorkerId(rank))
}

fn server(number: u32) -> WaitCause {
    WaitCause::Server(ServerId(number))
}

#[test]
fn a_round_is_waited_for_until_its_last_push_on_all_servers_at_once() {
    for sync in ["bsp", "ssp:s=0", "bsp:overlap=false"] {
        let mut bench = started(job(3, 2, sync, "sgd:lr=1"), &[]);
        let first = iterate(&mut bench, 0);
        bench.pass(2.0);
        let second = iterate(&mut bench, 1);
        bench.pass(3.0);
        let third = iterate(&mut bench, 2);
        for (worker, ticket) in [(0, first), (1, second), (2, third)] {
            end_wait(&mut bench, worker, ticket);
        }
        assert_eq!(charges(&bench, 0), [(push(2), 5.0)], "{sync}");
        assert_eq!(charges(&bench, 1), [(push(2), 3.0)], "{sync}");
        assert_eq!(charges(&bench, 2), [], "{sync}");
        // The coordinator hears of it with the next reports.
        bench.pass(1.0);
        let waited = bench.coordinator().status(bench.now()).waited;
        assert_eq!((waited.seconds, waited.of(push(2))), (8.0, 8.0), "{sync}");
    }
}

#[test]
fn an_application_that_comes_late_waits_for_the_rest_only() {
    let mut bench = started(job(2, 1, "bsp", "sgd:lr=1"), &[]);
    let (now, gradient) = (bench.now(), [1.0; ELEMENTS]);
    let first = bench.worker_mut(0).push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
    bench.worker_mut(0).clock();
    bench.pass(3.0);
    begin_wait(&mut bench, 0, first);
    bench.pass(1.0);
    let second = iterate(&mut bench, 1);
    end_wait(&mut bench, 0, first);
    end_wait(&mut bench, 1, second);
    assert_eq!((charges(&bench, 0), charges(&bench, 1)), (vec![(push(1), 1.0)], vec![]));
}

#[test]
fn a_slow_server_is_charged_from_when_the_others_have_answered() {
    let mut bench = started(job(2, 2, "bsp", "sgd:lr=1"), &[]);
    let (slow, waits) = (bench.shard_node(1), bench.worker_node(0));
    bench.world.hold(slow, waits);
    let first = iterate(&mut bench, 0);
    bench.pass(3.0);
    let second = iterate(&mut bench, 1);
    end_wait(&mut bench, 1, second);
    bench.pass(0.25);
    bench.world.release(slow, waits);
    bench.run();
    end_wait(&mut bench, 0, first);
    assert_eq!(charges(&bench, 0), [(push(1), 3.0), (server(1), 0.25)]);
    assert_eq!(charges(&bench, 1), []);
}

/// A sum is held for a straggler behind the same aggregator, or waits for one elsewhere.
#[test]
fn behind_an_aggregator_the_last_worker_is_named_wherever_others_wait_for_it() {
    for (through, last) in [(&[0, 0][..], 0), (&[0, 0], 2), (&[0, 0, 0], 1)] {
        let mut config = job(3, 1, "bsp", "sgd:lr=1");
        config.policy = config.policy.with(Axis::Order, "arrival");
        let mut bench = started(config, through);
        let early: Vec<usize> = (0..3).rev().filter(|worker| *worker != last).collect();
        let mut tickets = Vec::new();
        for &worker in &early {
            tickets.push((worker, iterate(&mut bench, worker)));
            bench.pass(0.25);
        }
        tickets.push((last, iterate(&mut bench, last)));
        for (worker, ticket) in tickets {
            end_wait(&mut bench, worker, ticket);
        }
        let cause = push(last as u32);
        assert_eq!(charges(&bench, early[0]), [(cause, 0.5)], "{through:?}");
        assert_eq!(charges(&bench, early[1]), [(cause, 0.25)], "{through:?}");
        assert_eq!(charges(&bench, last), [], "{through:?}");
    }
}

#[test]
fn versions_that_are_broadcast_name_the_worker_that_closed_their_round() {
    for tree in ["star", "chain"] {
        let mut bench = started(broadcast(3, 2, "bsp", tree), &[]);
        for round in 1..=2 {
            let first = iterate(&mut bench, 0);
            let second = iterate(&mut bench, 2);
            bench.pass(3.0);
            let third = iterate(&mut bench, 1);
            for (worker, ticket) in [(0, first), (2, second), (1, third)] {
                end_wait(&mut bench, worker, ticket);
            }
            for worker in [0, 2] {
                assert_eq!(charges(&bench, worker), [(push(1), 3.0 * f64::from(round))], "{tree}");
            }
            assert_eq!(charges(&bench, 1), [], "{tree}");
        }
    }
}

#[test]
fn a_worker_that_dies_was_waited_for_until_then() {
    let mut config = job(2, 1, "bsp", "sgd:lr=1");
    config.worker_timeout = std::time::Duration::from_secs(5);
    let mut bench = started(config, &[]);
    let ticket = iterate(&mut bench, 0);
    let gone = bench.worker_node(1);
    bench.isolate(gone);
    while bench.outcome(0, ticket).is_none() {
        bench.pass(0.5);
        assert!(bench.now().as_secs_f64() < 60.0, "{}", bench.explain(0, ticket));
    }
    end_wait(&mut bench, 0, ticket);
    let charged = charges(&bench, 0);
    assert_eq!((charged.len(), charged[0].0), (1, push(1)), "{charged:?}");
}

#[test]
fn a_barrier_and_the_start_are_waited_for_until_the_last_worker_comes() {
    let mut bench = Bench::new(job(2, 1, "bsp", "sgd:lr=1"), 1);
    let mut tickets = Vec::new();
    for worker in 0..2 {
        bench.pass(2.0);
        let (now, (spec, initial)) = (bench.now(), table());
        bench.worker_mut(worker).declare(spec, initial).expect("a valid table");
        let ticket = bench.worker_mut(worker).start(now).expect("starts once");
        tickets.push(begin_wait(&mut bench, worker, ticket));
    }
    for (worker, ticket) in tickets.into_iter().enumerate() {
        end_wait(&mut bench, worker, ticket);
    }
    let start = WaitCause::Start(WorkerId(1));
    assert_eq!((charges(&bench, 0), charges(&bench, 1)), (vec![(start, 2.0)], vec![]));
    // The other one comes last now.
    let mut tickets = Vec::new();
    for worker in [1, 0] {
        bench.pass(3.0);
        let now = bench.now();
        let ticket = bench.worker_mut(worker).barrier(now, "epoch").expect("it started");
        tickets.push((worker, begin_wait(&mut bench, worker, ticket)));
    }
    for (worker, ticket) in tickets {
        end_wait(&mut bench, worker, ticket);
    }
    let barrier = WaitCause::Barrier(WorkerId(0));
    assert_eq!((charges(&bench, 0), charges(&bench, 1)), (vec![(start, 2.0)], vec![(barrier, 3.0)]));
    // A report is due at once, so that whoever asks at a barrier hears of it.
    bench.run();
    let waited = bench.coordinator().status(bench.now()).waited;
    assert_eq!((waited.of(start), waited.of(barrier)), (2.0, 3.0));
}

#[test]
fn the_log_names_a_straggler_once() {
    let mut bench = started(job(3, 1, "bsp", "sgd:lr=1"), &[]);
    for _ in 0..200 {
        let early: Vec<(usize, Ticket)> = [0, 2].map(|worker| (worker, iterate(&mut bench, worker))).into();
        bench.pass(1.0);
        let late = iterate(&mut bench, 1);
        for (worker, ticket) in early.into_iter().chain([(1, late)]) {
            end_wait(&mut bench, worker, ticket);
        }
    }
    let named: Vec<&str> = bench.log().into_iter().filter(|line| line.contains("of their time")).collect();
    assert_eq!(named.len(), 1, "{named:?}");
    assert!(named[0].contains("worker 1 cost the others"), "{named:?}");
}
