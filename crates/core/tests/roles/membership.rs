//! Members that come, go and come back at bad moments.

use super::pump::Pump;
use super::{W, job, started};
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::server::{Shard, ShardConfig};
use paramill_core::table::TableSpec;
use paramill_core::types::{ProcessId, ServerId, ShardId, WorkerId};
use paramill_core::wire::control::frame;
use paramill_core::wire::{Control, Kind, Member, Plan, ServedShard};
use paramill_core::worker::{Gradient, PullOptions, Ticket, WorkerError};
use std::sync::Arc;
use std::time::Duration;

const SHARD: usize = 1;

/// Declares one small table and starts; the ticket is due when the job has started.
fn join(pump: &mut Pump, worker: usize) -> Ticket {
    pump.workers[worker].declare(TableSpec::dense("w", [20]), vec![0.0; 20]).expect("a table");
    let ticket = pump.workers[worker].start(pump.now).expect("starts once");
    pump.run();
    ticket
}

#[test]
fn a_worker_that_goes_before_the_job_starts_leaves_its_place_to_another() {
    for leaves in [true, false] {
        let mut pump = Pump::new(job(2, 1, "bsp", "sgd:lr=1"), 1);
        join(&mut pump, 0);
        if leaves {
            pump.workers[0].leave(pump.now);
            pump.run();
        }
        pump.isolate(pump.worker_node(0));
        let second = join(&mut pump, 1);
        assert_eq!(pump.outcome(1, second), None, "the job does not start without the first");
        pump.pass(4.0);
        let third = pump.add_worker("test");
        let ticket = join(&mut pump, third);
        assert_eq!(pump.outcome(third, ticket), Some(Ok(())), "{}", pump.explain(third, ticket));
        assert_eq!(pump.outcome(1, second), Some(Ok(())));
    }
}

#[test]
fn a_server_that_goes_before_the_job_starts_can_be_replaced() {
    let mut pump = Pump::new(job(1, 2, "bsp", "sgd:lr=1"), 2);
    pump.run();
    pump.isolate(SHARD);
    pump.isolate(SHARD + 1);
    pump.cut.clear();
    let first = join(&mut pump, 0);
    assert_eq!(pump.outcome(0, first), None);
    for core in 0..2 {
        let config = ShardConfig {
            job: "test".into(),
            process: ProcessId(7),
            server: None,
            core,
            cores: 2,
            addresses: format!("shard:{core}").into(),
            coordinator: "coordinator".into(),
        };
        pump.shards[core as usize] = Shard::new(pump.now, config, Arc::new(Registry::builtin()));
    }
    pump.run();
    assert_eq!(pump.outcome(0, first), Some(Ok(())), "{:?}", pump.log);
}

#[test]
fn a_job_ends_by_name_when_a_server_stays_away() {
    let mut pump = started(job(1, 2, "asp", "sgd:lr=1"), 1, 50);
    pump.isolate(SHARD + 1);
    pump.pass(31.0);
    let error = pump.stopped.iter().flatten().next().expect("the coordinator stopped");
    assert!(error.contains("server 1 core 0 at shard:1 is away for 30 s"), "{error}");
}

#[test]
fn a_job_ends_with_the_reason_of_a_server_that_cannot_serve_it() {
    let mut pump = Pump::new(job(1, 1, "bsp", "sgd:lr=1"), 1);
    pump.run();
    let plan = Plan {
        epoch: 1,
        tables: vec![TableSpec::dense("w", [20])],
        parts: vec![vec![]],
        shards: vec![ServedShard {
            shard: ShardId { server: ServerId(0), core: 0 },
            process: ProcessId(100),
            addresses: "shard:0".into(),
        }],
        workers: 1,
        members: vec![Member::original(WorkerId(0), 1)],
        policy: Policy::default().with(Axis::Chunk, "32B"),
        overrides: vec![],
        switches: vec![],
        seed: 0,
    };
    pump.inject(0, SHARD, frame(Kind::Control, &Control::Plan(Box::new(plan))));
    pump.run();
    let reason = "the coordinator's plan cannot be used: the parts of table `w` have 0 elements, it has 20";
    assert_eq!(pump.stopped.len(), 2);
    for error in pump.stopped.iter().flatten() {
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn who_waits_for_the_initial_values_of_a_dead_worker_is_told() {
    let mut pump = Pump::new(job(2, 1, "asp", "sgd:lr=1"), 1);
    // Worker 0 is whoever comes first; it reaches the coordinator only.
    let node = pump.worker_node(0);
    pump.cut.insert((node, SHARD));
    join(&mut pump, 0);
    let second = join(&mut pump, 1);
    assert_eq!(pump.outcome(1, second), None);
    pump.isolate(node);
    pump.pass(5.0);
    match pump.outcome(1, second) {
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
    let mut pump = Pump::new(job(2, 1, "asp", "sgd:lr=1"), 1);
    let node = pump.worker_node(0);
    pump.cut.insert((node, SHARD));
    let mut tickets = Vec::new();
    for worker in 0..2 {
        pump.workers[worker].declare(TableSpec::sparse("rows", 10, 1), vec![5.0; 10]).unwrap();
        tickets.push(pump.workers[worker].start(pump.now).unwrap());
    }
    pump.run();
    assert_eq!(pump.outcome(1, tickets[1]), None);
    pump.cut.clear();
    pump.pass(1.0);
    assert_eq!((pump.outcome(0, tickets[0]), pump.outcome(1, tickets[1])), (Some(Ok(())), Some(Ok(()))));
    pump.workers[1].push(pump.now, W, Gradient::Rows { rows: &[3], values: &[2.0] }, false).unwrap();
    pump.run();
    assert_eq!(pump.parameters(W, 10)[2..4], [5.0, 4.0]);
}

#[test]
fn who_leaves_with_a_push_under_way_leaves_it_behind() {
    let mut pump = started(job(2, 1, "asp", "sgd:lr=1"), 1, 20);
    pump.reset(pump.worker_node(0), SHARD);
    pump.workers[0].push(pump.now, W, Gradient::Dense(&[2.0; 20]), false).unwrap();
    let left = pump.workers[0].leave(pump.now);
    pump.run();
    assert_eq!(pump.outcome(0, left), None, "the server does not have the push yet");
    pump.pass(1.0);
    assert_eq!(pump.outcome(0, left), Some(Ok(())));
    assert_eq!(pump.parameters(W, 20)[1], 0.0);
}

#[test]
fn a_barrier_that_is_reached_while_a_connection_is_down_is_reached_for_all() {
    let mut pump = started(job(2, 1, "asp", "sgd:lr=1"), 1, 4);
    for round in 0..3 {
        let first = pump.workers[0].barrier(pump.now, "again").unwrap();
        pump.run();
        let twice = pump.workers[0].barrier(pump.now, "again").unwrap_err();
        assert!(twice.to_string().contains("barrier `again` is waited for already"), "{twice}");
        pump.reset(pump.worker_node(0), 0);
        let second = pump.workers[1].barrier(pump.now, "again").unwrap();
        pump.run();
        assert_eq!(pump.outcome(1, second), Some(Ok(())), "round {round}");
        assert_eq!(pump.outcome(0, first), None, "the news was lost");
        pump.pass(1.0);
        assert_eq!(pump.outcome(0, first), Some(Ok(())), "round {round}");
    }
    // One that was given up is still waited at.
    let given_up = pump.workers[0].barrier(pump.now, "late").unwrap();
    pump.run();
    pump.workers[0].redeem(given_up);
    let again = pump.workers[0].barrier(pump.now, "late").unwrap();
    let second = pump.workers[1].barrier(pump.now, "late").unwrap();
    pump.run();
    assert_eq!((pump.outcome(0, again), pump.outcome(1, second)), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn a_barrier_does_not_wait_for_who_left_or_died() {
    for dies in [true, false] {
        let mut pump = started(job(3, 1, "asp", "sgd:lr=1"), 1, 4);
        let tickets: Vec<Ticket> =
            (0..2).map(|worker| pump.workers[worker].barrier(pump.now, "end").unwrap()).collect();
        pump.run();
        assert_eq!(pump.outcome(0, tickets[0]), None);
        if dies {
            pump.isolate(pump.worker_node(2));
        } else {
            pump.workers[2].leave(pump.now);
        }
        pump.pass(5.0);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(pump.outcome(worker, ticket), Some(Ok(())), "dies: {dies}");
        }
    }
}

#[test]
fn a_switch_reaches_who_was_away() {
    let mut pump = started(job(1, 2, "bsp", "sgd:lr=1"), 1, 50);
    pump.isolate(SHARD);
    pump.reset(pump.worker_node(0), 0);
    let set = |table: &str, sync: &str| {
        Control::Set(PolicyOverride::new(table, Policies::of([(Axis::Sync, sync)])))
    };
    pump.command("test", &set("w", "ssp:s=3"));
    pump.command("test", &set("*", "asp"));
    pump.command("test", &set("w", "psp:c=1,b=0.5"));
    pump.cut.clear();
    pump.pass(2.0);
    for shard in &pump.shards {
        assert_eq!(shard.report(pump.now).unwrap().tables[0].sync, "psp:c=1,b=0.5");
    }
    // The worker knows too: it goes on with half of the blocks.
    pump.isolate(SHARD);
    let pull = pump.workers[0].pull(pump.now, W, PullOptions::default()).unwrap();
    pump.run();
    assert_eq!(pump.outcome(0, pull), Some(Ok(())));
}

#[test]
fn another_learning_rate_reaches_who_was_away_and_keeps_the_velocity() {
    let mut pump = started(job(1, 2, "bsp", "momentum:lr=1,beta=0.5"), 1, 50);
    let step = |pump: &mut Pump| {
        let ticket = pump.workers[0].push(pump.now, W, Gradient::Dense(&[1.0; 50]), true).unwrap();
        pump.workers[0].clock();
        pump.run();
        assert_eq!(pump.outcome(0, ticket), Some(Ok(())));
    };
    step(&mut pump);
    pump.isolate(SHARD);
    let set = |optimizer: &str| {
        Control::Set(PolicyOverride::new("w", Policies::of([(Axis::Optimizer, optimizer)])))
    };
    pump.command("test", &set("momentum:lr=0.25,beta=0.5"));
    pump.command("test", &set("momentum:lr=0.5,beta=0.5"));
    // Another rule would read the velocity as something else.
    pump.command("test", &set("adagrad:lr=1"));
    pump.cut.clear();
    pump.pass(2.0);
    step(&mut pump);
    let moved: Vec<f32> = (0..50).map(|i| i as f32 - 1.0 - 0.5 * 1.5).collect();
    assert_eq!(pump.parameters(W, 50), moved);
}

#[test]
fn a_switch_without_overlap_is_one_of_the_scheduler_too() {
    let mut pump = started(job(2, 1, "bsp:overlap=false", "sgd:lr=1"), 1, 20);
    let ticket = pump.workers[0].push(pump.now, W, Gradient::Dense(&[1.0; 20]), true).unwrap();
    pump.workers[0].clock();
    pump.run();
    assert_eq!(pump.outcome(0, ticket), None);
    let sync = "asp:overlap=false";
    pump.command("test", &Control::Set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)]))));
    assert_eq!(pump.outcome(0, ticket), Some(Ok(())), "{}", pump.explain(0, ticket));
}

/// Pushes once on every worker and waits for what follows from it.
fn step(pump: &mut Pump) {
    let workers = 0..pump.workers.len();
    let push = |worker: usize| {
        let ticket = pump.workers[worker]
            .push(pump.now, W, Gradient::Dense(&[1.0; 20]), true)
            .expect("the worker is in");
        pump.workers[worker].clock();
        (worker, ticket)
    };
    let tickets: Vec<_> = workers.map(push).collect();
    pump.run();
    for (worker, ticket) in tickets {
        assert_eq!(pump.outcome(worker, ticket), Some(Ok(())), "{}", pump.explain(worker, ticket));
    }
}

#[test]
fn a_job_that_stood_still_as_a_whole_goes_on() {
    let mut pump = started(job(2, 1, "bsp", "sgd:lr=1"), 1, 20);
    for seconds in [12, 3600] {
        pump.pass(1.0);
        // Nobody is called meanwhile. The coordinator is the first to be called after it, before any heartbeat is read.
        pump.now = pump.now + Duration::from_secs(seconds);
        pump.run();
        pump.pass(1.0);
        assert_eq!(pump.coordinator.status(pump.now).phase, "running with 2 workers", "{:?}", pump.log);
        step(&mut pump);
    }
    assert!(pump.log.iter().any(|line| line.contains("stood still for 11.5 s")), "{:?}", pump.log);
}

#[test]
fn a_coordinator_that_stood_still_judges_nobody_by_it_and_still_finds_the_dead() {
    let mut pump = started(job(2, 1, "bsp", "sgd:lr=1"), 1, 20);
    pump.stopped_nodes.extend([0, pump.worker_node(1)]);
    pump.pass(60.0);
    pump.stopped_nodes.remove(&0);
    pump.pass(9.0);
    assert_eq!(pump.coordinator.status(pump.now).phase, "running with 2 workers", "{:?}", pump.log);
    pump.pass(2.0);
    assert_eq!(pump.coordinator.status(pump.now).phase, "running with 1 workers; 1 declared dead");
}

/// The seconds in each log line about a standstill of the coordinator.
fn standstills(pump: &Pump) -> Vec<f64> {
    let said = pump.log.iter().filter_map(|line| line.strip_prefix("the coordinator stood still for "));
    let seconds = said.filter_map(|rest| rest.strip_suffix(" s; worker timeouts do not count that time"));
    seconds.map(|seconds| seconds.parse().expect("a number of seconds")).collect()
}

#[test]
fn a_coordinator_that_stands_still_again_and_again_still_finds_the_dead() {
    let mut pump = started(job(2, 1, "bsp", "sgd:lr=1"), 1, 20);
    pump.stopped_nodes.insert(pump.worker_node(1));
    // Ten seconds of silence count by the time in which the coordinator ran. Each round has three of them: the half second
    // after which it wanted to be called, and two and a half.
    for round in 0..4 {
        let phase = pump.coordinator.status(pump.now).phase;
        assert_eq!(phase, "running with 2 workers", "round {round}: {:?}", pump.log);
        pump.now = pump.now + Duration::from_millis(2500);
        pump.run();
        pump.pass(2.5);
    }
    assert_eq!(pump.coordinator.status(pump.now).phase, "running with 1 workers; 1 declared dead");
    // Each standstill is told of, but not each in a line of its own.
    pump.pass(20.0);
    let told = standstills(&pump);
    assert!(told.len() < 4 && (8.0..=10.0).contains(&told.iter().sum::<f64>()), "{told:?}");
}

#[test]
fn a_server_that_is_away_while_the_coordinator_stands_still_again_and_again_is_given_up() {
    let mut pump = started(job(1, 2, "asp", "sgd:lr=1"), 1, 20);
    pump.isolate(SHARD + 1);
    for _ in 0..13 {
        pump.pass(2.5);
        pump.now = pump.now + Duration::from_millis(2500);
        pump.run();
    }
    let ended = |error: &Option<String>| error.as_ref().is_some_and(|why| why.contains("is away for 30 s"));
    assert!(pump.stopped.iter().any(ended), "{:?}", pump.stopped);
}

#[test]
fn a_server_that_was_away_when_the_coordinator_stood_still_may_come_back() {
    let mut pump = started(job(1, 2, "asp", "sgd:lr=1"), 1, 20);
    pump.isolate(SHARD + 1);
    pump.pass(1.0);
    pump.now = pump.now + Duration::from_secs(60);
    pump.run();
    pump.cut.clear();
    pump.pass(2.0);
    assert_eq!(pump.stopped, [], "{:?}", pump.log);
    step(&mut pump);
}

#[test]
fn a_process_that_was_replaced_is_told_so() {
    let mut pump = started(job(2, 1, "asp", "sgd:lr=1"), 1, 20);
    pump.isolate(pump.worker_node(1));
    pump.pass(4.0);
    // Another process takes the rank of the dead one.
    let third = pump.add_worker("test");
    let ticket = join(&mut pump, third);
    assert_eq!(pump.outcome(third, ticket), Some(Ok(())), "{}", pump.explain(third, ticket));
    assert_eq!(pump.workers[third].id(), Some(WorkerId(1)));
    // The dead one comes back.
    pump.cut.clear();
    pump.pass(2.0);
    let why = pump.workers[1].pull(pump.now, W, PullOptions::default()).unwrap_err().to_string();
    assert!(why.contains("worker 1 was declared dead") && why.contains("start it anew"), "{why}");
}

#[test]
fn what_a_server_said_long_ago_is_quoted_with_its_age() {
    let mut pump = started(job(2, 1, "bsp", "sgd:lr=1"), 1, 20);
    pump.workers[0].push(pump.now, W, Gradient::Dense(&[1.0; 20]), true).unwrap();
    pump.pass(1.0);
    let reason = |pump: &Pump| {
        let status = pump.coordinator.status(pump.now);
        status.shards[0].tables[0].waiting[0].reason.clone()
    };
    let news = reason(&pump);
    assert!(!news.contains("ago"), "{news}");
    pump.stopped_nodes.insert(SHARD);
    pump.pass(8.0);
    assert_eq!(reason(&pump), format!("{news} (so it said 8 s ago; it has not reported since)"));
}
