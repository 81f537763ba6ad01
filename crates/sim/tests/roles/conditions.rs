//! Pulls that worker 0 judges for the servers.

use super::bench::Bench;
use super::{W, job, started};
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::role::Frame;
use paramill_core::table::TableSpec;
use paramill_core::types::WorkerId;
use paramill_core::wire::{Control, Kind, control};
use paramill_core::worker::{Asked, Gradient, Ticket};

/// Worker `worker` does an iteration, and asks for the parameters that follow.
fn iterate(bench: &mut Bench, worker: usize) -> Ticket {
    let now = bench.now();
    let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&[1.0; 50]), true).expect("it fits");
    bench.worker_mut(worker).clock();
    // An aggregator holds gradients for a moment.
    bench.pass(0.01);
    ticket
}

/// What servers ask worker 0.
fn questions(bench: &mut Bench) -> Vec<Asked> {
    let now = bench.now();
    std::iter::from_fn(|| bench.worker_mut(0).poll_question(now)).collect()
}

fn answer(bench: &mut Bench, asked: &[Asked], holds: Option<bool>) {
    asked.iter().for_each(|asked| bench.worker_mut(0).answer(asked, holds));
    bench.run();
}

/// Why pulls wait, as the shards report it.
fn reasons(bench: &Bench) -> Vec<String> {
    let reports = bench.shards().filter_map(|shard| shard.report(bench.now()));
    let waits = reports.flat_map(|report| report.tables).flat_map(|table| table.waiting);
    waits.map(|wait| wait.reason).collect()
}

fn fallbacks(bench: &Bench) -> u64 {
    let reports = bench.shards().filter_map(|shard| shard.report(bench.now()));
    reports.flat_map(|report| report.tables).map(|table| table.stats.fallbacks).sum()
}

/// Three workers and two servers; worker 0 judges, itself or through an aggregator.
fn judged(sync: &str, is_aggregated: bool) -> Bench {
    let config = job(3, 2, sync, "sgd:lr=1");
    let mut bench = match is_aggregated {
        false => Bench::new(config, 1),
        true => Bench::with_aggregators(config, 1, &[0, 0, 0]),
    };
    bench.worker_mut(0).judge("near");
    bench.start(&[(TableSpec::dense("w", [50]), vec![0.0; 50])]);
    bench
}

#[test]
fn a_pull_waits_for_a_verdict_and_is_judged_again_when_a_worker_has_pushed() {
    for is_aggregated in [false, true] {
        let mut bench = judged("remote:near,deadline=10s", is_aggregated);
        let ticket = iterate(&mut bench, 1);
        let asked = questions(&mut bench);
        assert_eq!(asked.len(), 2, "both servers ask");
        for Asked { table_name, question, .. } in &asked {
            assert_eq!((table_name.as_str(), question.worker, question.progress), ("w", WorkerId(1), 0));
            let progress: Vec<i64> = question.workers.iter().map(|known| known.progress).collect();
            assert_eq!((progress, question.v_train, question.count), (vec![-1, 0, -1], 0, 1));
        }
        assert_eq!(bench.outcome(1, ticket), None);
        assert!(reasons(&bench)[0].starts_with("`near` is asked of worker 0 for progress 0"));

        answer(&mut bench, &asked, Some(false));
        assert_eq!(bench.outcome(1, ticket), None);
        assert!(reasons(&bench)[0].starts_with("`near` of worker 0 did not hold for progress 0"));
        assert_eq!(questions(&mut bench), [], "nothing has changed");

        iterate(&mut bench, 2);
        let asked: Vec<Asked> =
            questions(&mut bench).into_iter().filter(|asked| asked.question.worker == WorkerId(1)).collect();
        assert_eq!(asked.len(), 2);
        assert!(asked.iter().all(|asked| asked.question.count == 2));
        answer(&mut bench, &asked, Some(true));
        assert_eq!(bench.outcome(1, ticket), Some(Ok(())));
        assert_eq!(fallbacks(&bench), 0);
    }
}

#[test]
fn the_fallback_decides_when_no_verdict_comes_in_time() {
    let mut bench = judged("remote:near,deadline=200ms,fallback=ssp:s=1", false);
    let first = iterate(&mut bench, 1);
    let late = questions(&mut bench);
    bench.pass(0.1);
    assert_eq!(bench.outcome(1, first), None);
    bench.pass(0.1);
    assert_eq!(bench.outcome(1, first), Some(Ok(())), "one round ahead is allowed by the fallback");
    let second = iterate(&mut bench, 1);
    bench.pass(0.3);
    assert_eq!(bench.outcome(1, second), None);
    let sentence = &reasons(&bench)[0];
    assert!(
        sentence.contains("of the fallback did not hold for progress 1 (worker 0 did not eval"),
        "{sentence}"
    );
    answer(&mut bench, &late, Some(true));
    assert_eq!(bench.outcome(1, second), None, "it was about another pull");
    assert_eq!((fallbacks(&bench), questions(&mut bench)), (4, vec![]), "two pulls on two servers");
}

#[test]
fn a_condition_that_is_not_known_or_fails_leaves_it_to_the_fallback() {
    let mut bench = judged("remote:far,deadline=10s,fallback=ssp:s=1", false);
    let first = iterate(&mut bench, 1);
    assert_eq!(bench.outcome(1, first), Some(Ok(())));
    let second = iterate(&mut bench, 1);
    assert_eq!(bench.outcome(1, second), None);
    assert!(
        reasons(&bench)[0]
            .contains("(worker 0 could not evaluate the condition: it failed there, or has another name)")
    );
    // The same when it is known, and fails.
    let near = Policies::of([(Axis::Sync, "remote:near,deadline=10s,fallback=ssp:s=1")]);
    bench.set(PolicyOverride::new("*", near));
    let asked = questions(&mut bench);
    assert_eq!(asked.len(), 2);
    answer(&mut bench, &asked, None);
    assert_eq!(bench.outcome(1, second), None);
    assert!(
        reasons(&bench)[0]
            .contains("(worker 0 could not evaluate the condition: it failed there, or has another name)")
    );
}

#[test]
fn the_fallback_decides_when_worker_0_is_gone() {
    for is_aggregated in [false, true] {
        let mut bench = judged("remote:near,deadline=100s,fallback=ssp:s=1", is_aggregated);
        let first = iterate(&mut bench, 1);
        let asked = questions(&mut bench);
        answer(&mut bench, &asked, Some(false));
        bench.isolate(bench.worker_node(0));
        bench.pass(5.0);
        assert_eq!(bench.outcome(1, first), Some(Ok(())), "{:?}", bench.log());
        let second = iterate(&mut bench, 1);
        bench.pass(1.0);
        assert_eq!(bench.outcome(1, second), None);
        let sentence = &reasons(&bench)[0];
        assert!(
            sentence.contains("(worker 0, which evaluates the condition, is not connected)"),
            "{sentence}"
        );
        iterate(&mut bench, 2);
        iterate(&mut bench, 2);
        bench.pass(1.0);
        assert_eq!(bench.outcome(1, second), Some(Ok(())));
    }
}

#[test]
fn a_pull_that_an_aggregators_loss_releases_is_answered_on_its_next_connection() {
    let mut bench = judged("remote:near,deadline=100s,fallback=asp", true);
    let ticket = iterate(&mut bench, 1);
    let asked = questions(&mut bench);
    answer(&mut bench, &asked, Some(false));
    assert_eq!(bench.outcome(1, ticket), None);
    // Worker 0 and its word are gone with the connection, and the fallback would answer on it.
    for shard in 0..2 {
        bench.reset(bench.aggregator_node(0), bench.shard_node(shard));
    }
    bench.pass(2.0);
    let asked = questions(&mut bench);
    answer(&mut bench, &asked, Some(true));
    bench.pass(2.0);
    assert_eq!(bench.outcome(1, ticket), Some(Ok(())), "{}", bench.explain(1, ticket));
}

#[test]
fn nobody_but_worker_0_has_a_say() {
    let mut bench = judged("remote:near,deadline=10s", false);
    let ticket = iterate(&mut bench, 1);
    let asked = questions(&mut bench);
    let verdict = |number| -> Frame {
        control::frame(Kind::Control, &Control::Verdict { table: W, number, holds: Some(true) })
    };
    for (shard, asked) in asked.iter().enumerate() {
        let (from, to) = (bench.worker_node(1), bench.shard_node(shard));
        bench.world.inject(from, to, verdict(asked.question.number));
    }
    bench.run();
    assert_eq!(bench.outcome(1, ticket), None);
    let refused: u64 =
        bench.shards().filter_map(|shard| shard.report(bench.now())).map(|report| report.refused).sum();
    assert_eq!(refused, 2);
    assert!(
        bench.log().iter().any(|line| line.contains("conditions are evaluated by worker 0, not by worker 1"))
    );
    answer(&mut bench, &asked, Some(true));
    assert_eq!(bench.outcome(1, ticket), Some(Ok(())));
}

#[test]
fn a_job_of_one_worker_asks_nobody() {
    let mut bench = started(job(1, 1, "remote:near", "sgd:lr=1"), 1, 50);
    for _ in 0..3 {
        let ticket = iterate(&mut bench, 0);
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
    }
    assert_eq!((questions(&mut bench), fallbacks(&bench)), (vec![], 0));
}
