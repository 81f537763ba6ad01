//! Members that come, go and come back at bad moments.

use super::bench::{Bench, COORDINATOR};
use super::processes::shard;
use super::{W, job, started};
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, ProcessId, ServerId, ShardId, WorkerId};
use paramill_core::wire::control::frame;
use paramill_core::wire::{Control, Kind, Member, Plan, ServedShard};
use paramill_core::worker::{Gradient, PullOptions, Ticket, WorkerError};

/// The first shard, where a server has one core.
const SHARD: NodeId = NodeId::Shard(ShardId { server: ServerId(0), core: 0 });

/// Declares one small table and starts; the ticket is due when the job has started.
fn join(bench: &mut Bench, worker: usize) -> Ticket {
    bench.worker_mut(worker).declare(TableSpec::dense("w", [20]), vec![0.0; 20]).expect("a table");
    let now = bench.now();
    let ticket = bench.worker_mut(worker).start(now).expect("starts once");
    bench.run();
    ticket
}

#[test]
fn a_worker_that_goes_before_the_job_starts_leaves_its_place_to_another() {
    for leaves in [true, false] {
        let mut bench = Bench::new(job(2, 1, "bsp", "sgd:lr=1"), 1);
        join(&mut bench, 0);
        if leaves {
            let now = bench.now();
            bench.worker_mut(0).leave(now);
            bench.run();
        }
        bench.isolate(bench.worker_node(0));
        let second = join(&mut bench, 1);
        assert_eq!(bench.outcome(1, second), None, "the job does not start without the first");
        bench.pass(4.0);
        let third = bench.add_worker();
        let ticket = join(&mut bench, third);
        assert_eq!(bench.outcome(third, ticket), Some(Ok(())), "{}", bench.explain(third, ticket));
        assert_eq!(bench.outcome(1, second), Some(Ok(())));
    }
}

#[test]
fn a_server_that_goes_before_the_job_starts_can_be_replaced() {
    let mut bench = Bench::new(job(1, 2, "bsp", "sgd:lr=1"), 2);
    bench.run();
    let cores = [0, 1].map(|core| bench.shard_node(core));
    cores.into_iter().for_each(|node| bench.world.crash(node, bench.now()));
    let first = join(&mut bench, 0);
    assert_eq!(bench.outcome(0, first), None);
    for (core, node) in (0..).zip(cores) {
        bench.world.restart(node, bench.now(), move |now| shard(now, 7, core, 2));
    }
    bench.run();
    assert_eq!(bench.outcome(0, first), Some(Ok(())), "{:?}", bench.log());
}

#[test]
fn a_job_ends_by_name_when_a_server_stays_away() {
    let mut bench = started(job(1, 2, "asp", "sgd:lr=1"), 1, 50);
    bench.isolate(bench.shard_node(1));
    bench.pass(31.0);
    let error = bench.stopped().into_iter().flatten().next().expect("the coordinator stopped");
    assert!(error.contains("server 1 core 0 at shard:1 is away for 30 s"), "{error}");
}

#[test]
fn a_job_ends_with_the_reason_of_a_server_that_cannot_serve_it() {
    let mut bench = Bench::new(job(1, 1, "bsp", "sgd:lr=1"), 1);
    bench.run();
    let plan = Plan {
        epoch: 1,
        tables: vec![TableSpec::dense("w", [20])],
        parts: vec![vec![]],
        whole: vec![],
        shards: vec![ServedShard::original(
            ShardId { server: ServerId(0), core: 0 },
            ProcessId(100),
            "shard:0".into(),
        )],
        workers: 1,
        members: vec![Member::original(WorkerId(0), 1)],
        policy: Policy::default().with(Axis::Chunk, "32B"),
        overrides: vec![],
        switches: vec![],
        seed: 0,
        resumed: None,
    };
    bench.world.inject(COORDINATOR, SHARD, frame(Kind::Control, &Control::Plan(Box::new(plan))));
    bench.run();
    let reason = "the coordinator's plan cannot be used: the parts of table `w` have 0 elements, it has 20";
    assert_eq!(bench.stopped().len(), 2);
    for error in bench.stopped().iter().flatten() {
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn who_waits_for_the_initial_values_of_a_dead_worker_is_told() {
    let mut bench = Bench::new(job(2, 1, "asp", "sgd:lr=1"), 1);
    // Worker 0 is whoever comes first; it reaches the coordinator only.
    let node = bench.worker_node(0);
    bench.cut(node, SHARD);
    join(&mut bench, 0);
    let second = join(&mut bench, 1);
    assert_eq!(bench.outcome(1, second), None);
    bench.isolate(node);
    bench.pass(5.0);
    match bench.outcome(1, second) {
        Some(Err(WorkerError::NotAMember(why))) => {
            assert!(
                why.contains("worker 0 was gone before the initial values of table `w` were here"),
                "{why}"
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn nobody_pushes_rows_before_the_initial_values_are_there() {
    let mut bench = Bench::new(job(2, 1, "asp", "sgd:lr=1"), 1);
    let node = bench.worker_node(0);
    bench.cut(node, SHARD);
    let mut tickets = Vec::new();
    for worker in 0..2 {
        bench.worker_mut(worker).declare(TableSpec::sparse("rows", 10, 1), vec![5.0; 10]).unwrap();
        let now = bench.now();
        tickets.push(bench.worker_mut(worker).start(now).unwrap());
    }
    bench.run();
    assert_eq!(bench.outcome(1, tickets[1]), None);
    bench.heal();
    bench.pass(1.0);
    assert_eq!((bench.outcome(0, tickets[0]), bench.outcome(1, tickets[1])), (Some(Ok(())), Some(Ok(()))));
    let now = bench.now();
    bench.worker_mut(1).push(now, W, Gradient::Rows { rows: &[3], values: &[2.0] }, false).unwrap();
    bench.run();
    assert_eq!(bench.parameters(W, 10)[2..4], [5.0, 4.0]);
}

#[test]
fn who_leaves_with_a_push_under_way_leaves_it_behind() {
    let mut bench = started(job(2, 1, "asp", "sgd:lr=1"), 1, 20);
    bench.reset(bench.worker_node(0), SHARD);
    let now = bench.now();
    bench.worker_mut(0).push(now, W, Gradient::Dense(&[2.0; 20]), false).unwrap();
    let now = bench.now();
    let left = bench.worker_mut(0).leave(now);
    bench.run();
    assert_eq!(bench.outcome(0, left), None, "the server does not have the push yet");
    bench.pass(1.0);
    assert_eq!(bench.outcome(0, left), Some(Ok(())));
    assert_eq!(bench.parameters(W, 20)[1], 0.0);
}

#[test]
fn a_barrier_that_is_reached_while_a_connection_is_down_is_reached_for_all() {
    let mut bench = started(job(2, 1, "asp", "sgd:lr=1"), 1, 4);
    for round in 0..3 {
        let now = bench.now();
        let first = bench.worker_mut(0).barrier(now, "again").unwrap();
        bench.run();
        let now = bench.now();
        let twice = bench.worker_mut(0).barrier(now, "again").unwrap_err();
        assert!(twice.to_string().contains("barrier `again` is waited for already"), "{twice}");
        bench.reset(bench.worker_node(0), COORDINATOR);
        let now = bench.now();
        let second = bench.worker_mut(1).barrier(now, "again").unwrap();
        bench.run();
        assert_eq!(bench.outcome(1, second), Some(Ok(())), "round {round}");
        assert_eq!(bench.outcome(0, first), None, "the news was lost");
        bench.pass(1.0);
        assert_eq!(bench.outcome(0, first), Some(Ok(())), "round {round}");
    }
    // One that was given up is still waited at.
    let now = bench.now();
    let given_up = bench.worker_mut(0).barrier(now, "late").unwrap();
    bench.run();
    bench.worker_mut(0).redeem(given_up);
    let now = bench.now();
    let again = bench.worker_mut(0).barrier(now, "late").unwrap();
    let now = bench.now();
    let second = bench.worker_mut(1).barrier(now, "late").unwrap();
    bench.run();
    assert_eq!((bench.outcome(0, again), bench.outcome(1, second)), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn a_barrier_does_not_wait_for_who_left_or_died() {
    for dies in [true, false] {
        let mut bench = started(job(3, 1, "asp", "sgd:lr=1"), 1, 4);
        let now = bench.now();
        let tickets: Vec<Ticket> =
            (0..2).map(|worker| bench.worker_mut(worker).barrier(now, "end").unwrap()).collect();
        bench.run();
        assert_eq!(bench.outcome(0, tickets[0]), None);
        if dies {
            bench.isolate(bench.worker_node(2));
        } else {
            let now = bench.now();
            bench.worker_mut(2).leave(now);
        }
        bench.pass(5.0);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "dies: {dies}");
        }
    }
}

#[test]
fn a_switch_reaches_who_was_away() {
    let mut bench = started(job(1, 2, "bsp", "sgd:lr=1"), 1, 50);
    bench.isolate(SHARD);
    bench.reset(bench.worker_node(0), COORDINATOR);
    let set = |table: &str, sync: &str| PolicyOverride::new(table, Policies::of([(Axis::Sync, sync)]));
    bench.set(set("w", "ssp:s=3"));
    bench.set(set("*", "asp"));
    bench.set(set("w", "psp:c=1,b=0.5"));
    bench.heal();
    bench.pass(2.0);
    for shard in bench.shards() {
        assert_eq!(shard.report(bench.now()).unwrap().tables[0].sync, "psp:c=1,b=0.5");
    }
    // The worker knows too: it goes on with half of the blocks.
    bench.isolate(SHARD);
    let now = bench.now();
    let pull = bench.worker_mut(0).pull(now, W, PullOptions::default()).unwrap();
    bench.run();
    assert_eq!(bench.outcome(0, pull), Some(Ok(())));
}

#[test]
fn another_learning_rate_reaches_who_was_away_and_keeps_the_velocity() {
    let mut bench = started(job(1, 2, "bsp", "momentum:lr=1,beta=0.5"), 1, 50);
    let step = |bench: &mut Bench| {
        let now = bench.now();
        let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; 50]), true).unwrap();
        bench.worker_mut(0).clock();
        bench.run();
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
    };
    step(&mut bench);
    bench.isolate(SHARD);
    let set = |optimizer: &str| PolicyOverride::new("w", Policies::of([(Axis::Optimizer, optimizer)]));
    bench.set(set("momentum:lr=0.25,beta=0.5"));
    bench.set(set("momentum:lr=0.5,beta=0.5"));
    // Another rule would read the velocity as something else.
    bench.set(set("adagrad:lr=1"));
    bench.heal();
    bench.pass(2.0);
    step(&mut bench);
    let moved: Vec<f32> = (0..50).map(|i| i as f32 - 1.0 - 0.5 * 1.5).collect();
    assert_eq!(bench.parameters(W, 50), moved);
}

#[test]
fn a_switch_without_overlap_is_one_of_the_scheduler_too() {
    let mut bench = started(job(2, 1, "bsp:overlap=false", "sgd:lr=1"), 1, 20);
    let now = bench.now();
    let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; 20]), true).unwrap();
    bench.worker_mut(0).clock();
    bench.run();
    assert_eq!(bench.outcome(0, ticket), None);
    let sync = "asp:overlap=false";
    bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)])));
    assert_eq!(bench.outcome(0, ticket), Some(Ok(())), "{}", bench.explain(0, ticket));
}

/// Pushes once on every worker and waits for what follows from it.
fn step(bench: &mut Bench) {
    let workers = 0..bench.worker_count();
    let push = |worker: usize| {
        let now = bench.now();
        let ticket = bench
            .worker_mut(worker)
            .push(now, W, Gradient::Dense(&[1.0; 20]), true)
            .expect("the worker is in");
        bench.worker_mut(worker).clock();
        (worker, ticket)
    };
    let tickets: Vec<_> = workers.map(push).collect();
    bench.run();
    for (worker, ticket) in tickets {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
    }
}

/// The whole job stands still. The coordinator is the first to be called after it.
fn stand_still_together(bench: &mut Bench, seconds: f64) {
    bench.nodes().into_iter().for_each(|node| bench.stand_still(node, seconds));
    bench.pass(seconds);
}

#[test]
fn a_job_that_stood_still_as_a_whole_goes_on() {
    let mut bench = started(job(2, 1, "bsp", "sgd:lr=1"), 1, 20);
    for seconds in [12.0, 3600.0] {
        bench.pass(1.0);
        // Nobody is called meanwhile. The coordinator is the first to be called after it, before any heartbeat is read.
        stand_still_together(&mut bench, seconds);
        bench.pass(1.0);
        assert_eq!(
            bench.coordinator().status(bench.now()).phase,
            "running with 2 workers",
            "{:?}",
            bench.log()
        );
        step(&mut bench);
    }
    assert!(bench.log().iter().any(|line| line.contains("stood still for 11.5 s")), "{:?}", bench.log());
}

#[test]
fn a_coordinator_that_stood_still_judges_nobody_by_it_and_still_finds_the_dead() {
    let mut bench = started(job(2, 1, "bsp", "sgd:lr=1"), 1, 20);
    bench.stand_still(COORDINATOR, 60.0);
    bench.stand_still(bench.worker_node(1), 1000.0);
    bench.pass(60.0);
    bench.pass(9.0);
    assert_eq!(bench.coordinator().status(bench.now()).phase, "running with 2 workers", "{:?}", bench.log());
    bench.pass(2.0);
    assert_eq!(bench.coordinator().status(bench.now()).phase, "running with 1 workers; 1 declared dead");
}

/// The seconds in each log line about a standstill of the coordinator.
fn standstills(bench: &Bench) -> Vec<f64> {
    let log = bench.log();
    let said = log.iter().filter_map(|line| line.split_once("the coordinator stood still for "));
    let said = said.map(|(_, rest)| rest);
    let seconds = said.filter_map(|rest| rest.strip_suffix(" s; worker timeouts do not count that time"));
    seconds.map(|seconds| seconds.parse().expect("a number of seconds")).collect()
}

#[test]
fn a_coordinator_that_stands_still_again_and_again_still_finds_the_dead() {
    let mut bench = started(job(2, 1, "bsp", "sgd:lr=1"), 1, 20);
    bench.stand_still(bench.worker_node(1), 1000.0);
    // Ten seconds of silence count by the time in which the coordinator ran. Each round has three of them: the half second
    // after which it wanted to be called, and two and a half.
    for round in 0..4 {
        let phase = bench.coordinator().status(bench.now()).phase;
        assert_eq!(phase, "running with 2 workers", "round {round}: {:?}", bench.log());
        stand_still_together(&mut bench, 2.5);
        bench.pass(2.5);
    }
    assert_eq!(bench.coordinator().status(bench.now()).phase, "running with 1 workers; 1 declared dead");
    // Each standstill is told of, but not each in a line of its own.
    bench.pass(20.0);
    let told = standstills(&bench);
    assert!(told.len() < 4 && (8.0..=10.0).contains(&told.iter().sum::<f64>()), "{told:?}");
}

#[test]
fn a_server_that_is_away_while_the_coordinator_stands_still_again_and_again_is_given_up() {
    let mut bench = started(job(1, 2, "asp", "sgd:lr=1"), 1, 20);
    bench.isolate(bench.shard_node(1));
    for _ in 0..13 {
        bench.pass(2.5);
        stand_still_together(&mut bench, 2.5);
    }
    let ended = |error: &Option<String>| error.as_ref().is_some_and(|why| why.contains("is away for 30 s"));
    assert!(bench.stopped().iter().any(ended), "{:?}", bench.stopped());
}

#[test]
fn a_server_that_was_away_when_the_coordinator_stood_still_may_come_back() {
    let mut bench = started(job(1, 2, "asp", "sgd:lr=1"), 1, 20);
    bench.isolate(bench.shard_node(1));
    bench.pass(1.0);
    stand_still_together(&mut bench, 60.0);
    bench.heal();
    bench.pass(2.0);
    assert_eq!(bench.stopped(), [], "{:?}", bench.log());
    step(&mut bench);
}

#[test]
fn a_process_that_was_replaced_is_told_so() {
    let mut bench = started(job(2, 1, "asp", "sgd:lr=1"), 1, 20);
    bench.isolate(bench.worker_node(1));
    bench.pass(4.0);
    // Another process takes the rank of the dead one.
    let third = bench.add_worker();
    let ticket = join(&mut bench, third);
    assert_eq!(bench.outcome(third, ticket), Some(Ok(())), "{}", bench.explain(third, ticket));
    assert_eq!(bench.worker(third).id(), Some(WorkerId(1)));
    // The dead one comes back.
    bench.heal();
    bench.pass(2.0);
    let now = bench.now();
    let why = bench.worker_mut(1).pull(now, W, PullOptions::default()).unwrap_err().to_string();
    assert!(why.contains("worker 1 was declared dead") && why.contains("start it anew"), "{why}");
}

#[test]
fn what_a_server_said_long_ago_is_quoted_with_its_age() {
    let mut bench = started(job(2, 1, "bsp", "sgd:lr=1"), 1, 20);
    let now = bench.now();
    bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; 20]), true).unwrap();
    bench.pass(1.0);
    let reason = |bench: &Bench| {
        let status = bench.coordinator().status(bench.now());
        status.shards[0].tables[0].waiting[0].reason.clone()
    };
    let news = reason(&bench);
    assert!(!news.contains("ago"), "{news}");
    bench.stand_still(SHARD, 1000.0);
    bench.pass(8.0);
    assert_eq!(reason(&bench), format!("{news} (so it said 8 s ago; it has not reported since)"));
}
