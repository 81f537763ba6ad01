//! A coordinator and whoever finds its address: servers that disagree, members that ask for too much, commands.

use paramill_core::coordinator::{Coordinator, JobConfig};
use paramill_core::limits;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::role::{Frame, Lost, Output, Role};
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, ProcessId, ServerId, ShardId, Time, WorkerId};
use paramill_core::wire::{Control, Hello, Kind, Party, control};
use std::sync::Arc;
use std::time::Duration;

fn coordinator(workers: u32, secret: u64) -> Coordinator {
    let policy = Policy::default().with(Axis::Sync, "bsp");
    let config = JobConfig { policy, ..JobConfig::new("test", workers, 2) };
    Coordinator::new(config, Arc::new(Registry::builtin()), secret)
}

fn drain(coordinator: &mut Coordinator) -> Vec<Output> {
    std::iter::from_fn(|| coordinator.poll_output()).collect()
}

/// Hands a message to the coordinator as if `from` had sent it; what the coordinator wants done.
fn say(coordinator: &mut Coordinator, now: Time, from: NodeId, message: &Control) -> Vec<Output> {
    let Frame { header, body } = control::frame(Kind::Control, message);
    coordinator.handle_frame(
        now,
        from.into(),
        &header,
        body.bytes().expect("a message has its bytes with it"),
    );
    drain(coordinator)
}

/// Whether this is a refusal sent to a worker.
fn is_refusal(output: &Output, worker: WorkerId) -> bool {
    matches!(output, Output::Send { to, frame, .. } if *to == NodeId::Worker(worker).into() && frame.header.kind == Kind::Error)
}

/// A coordinator of one server and two workers who said hello.
fn greeted() -> (Coordinator, [NodeId; 2]) {
    let mut coordinator = coordinator(2, 1);
    let workers = [0, 1].map(|rank| {
        let hello = Hello {
            job: "test".into(),
            from: Party::Worker { rank: Some(WorkerId(rank)) },
            incarnation: 0,
            to: None,
        };
        coordinator.accept(Time::ZERO, &hello).expect("its rank is free").you
    });
    (coordinator, workers)
}

fn shard_hello(process: u64, server: Option<u32>, core: u32, cores: u32) -> Hello {
    let from = Party::Shard { process: ProcessId(process), server: server.map(ServerId), core, cores };
    Hello { job: "test".into(), from, incarnation: process, to: None }
}

#[test]
fn servers_that_disagree_about_their_cores_are_not_planned_with() {
    let (mut coordinator, workers) = greeted();
    let now = Time::ZERO;
    // Two cores are promised, one registers; another process claims the same number with one core.
    let first = coordinator.accept(now, &shard_hello(1, Some(0), 0, 2)).unwrap().you;
    coordinator.accept(now, &shard_hello(1, Some(0), 1, 2)).unwrap();
    say(&mut coordinator, now, first, &Control::Register { addresses: "a".into() });
    let refusal = coordinator.accept(now, &shard_hello(2, Some(0), 0, 1)).unwrap_err();
    assert!(refusal.retry && refusal.reason.contains("server 0 is another process already"), "{refusal}");
    let refusal = coordinator.accept(now, &shard_hello(1, Some(0), 0, 1)).unwrap_err();
    assert!(refusal.reason.contains("server 0 has 2 cores, not 1"), "{refusal}");
    for worker in workers {
        let outputs = say(
            &mut coordinator,
            now,
            worker,
            &Control::Declare { tables: vec![TableSpec::dense("w", [20])] },
        );
        assert_eq!(outputs, [], "there is nothing to plan with yet");
    }
    // Thousands of processes come and go; what is kept of them goes too.
    for process in 10..5000 {
        let you = coordinator.accept(now, &shard_hello(process, None, 0, 1)).unwrap().you;
        assert_eq!(you, NodeId::Shard(ShardId { server: ServerId(1), core: 0 }));
        coordinator.handle_disconnected(now, you.into(), &Lost::Broken("gone".into()));
    }
}

#[test]
fn thousands_of_barriers_and_queries_are_one_answer_or_a_refusal() {
    let (mut coordinator, workers) = greeted();
    let now = Time::ZERO;
    let mut refused = 0;
    for number in 1..=5000 {
        let barrier = Control::Barrier { name: format!("barrier {number}"), number };
        let outputs = say(&mut coordinator, now, workers[0], &barrier);
        refused += outputs.iter().filter(|output| is_refusal(output, WorkerId(0))).count();
    }
    assert_eq!(refused, 5000 - limits::MAX_BARRIERS);
    let long = Control::Barrier { name: "n".repeat(1 << 20), number: 9000 };
    let outputs = say(&mut coordinator, now, workers[1], &long);
    assert!(outputs.len() == 1 && is_refusal(&outputs[0], WorkerId(1)));

    let shard = coordinator.accept(now, &shard_hello(1, None, 0, 1)).unwrap().you;
    say(&mut coordinator, now, shard, &Control::Register { addresses: "a".into() });
    say(&mut coordinator, now, shard, &Control::Entered { epoch: 1, joining: vec![], lacks_values: None });
    let mut answers = 0;
    for _ in 0..5000 {
        let outputs = say(&mut coordinator, now, workers[0], &Control::StatusQuery);
        answers += outputs.len();
    }
    coordinator.handle_timeout(now + limits::STATUS_DEADLINE);
    answers += drain(&mut coordinator).len();
    assert_eq!(answers, 5000, "each is answered at once, as no shard follows a plan yet");
}

#[test]
fn a_command_finds_its_place_though_others_hold_all_of_them() {
    let (mut coordinator, _) = greeted();
    let mut now = Time::ZERO;
    let hello = Hello { job: "test".into(), from: Party::Command, incarnation: 0, to: None };
    let connect = |coordinator: &mut Coordinator, now| coordinator.accept(now, &hello).map(|it| it.you);
    let others: Vec<NodeId> =
        (0..limits::MAX_COMMANDS).map(|_| connect(&mut coordinator, now).unwrap()).collect();
    for round in 0..3 {
        // They ask often enough not to be hung up on, the first of them as the last one.
        now = now + (limits::COMMAND_IDLE - Duration::from_secs(1));
        for other in others.iter().rev() {
            now = now + Duration::from_millis(1);
            say(&mut coordinator, now, *other, &Control::StatusQuery);
        }
        coordinator.handle_timeout(now);
        drain(&mut coordinator);
        let you = connect(&mut coordinator, now).unwrap_or_else(|refusal| panic!("round {round}: {refusal}"));
        // The place is that of the command that has been silent longest.
        let evicted = drain(&mut coordinator);
        let longest_silent = *others.last().unwrap();
        if round == 0 {
            assert_eq!(evicted, [Output::Disconnect { connection: longest_silent.into() }]);
            coordinator.handle_disconnected(now, longest_silent.into(), &Lost::Broken("closed".into()));
        }
        let answer = say(&mut coordinator, now, you, &Control::StatusQuery);
        assert!(matches!(answer[..], [Output::Send { to, .. }] if to == you.into()), "{answer:?}");
        coordinator.handle_disconnected(now, you.into(), &Lost::Broken("done".into()));
    }
}

#[test]
fn incarnations_are_drawn_from_the_drivers_secret() {
    let drawn = |secret: u64| -> Vec<u64> {
        let mut coordinator = coordinator(16, secret);
        let join = |rank: u32| {
            let from = Party::Worker { rank: Some(WorkerId(rank)) };
            let hello = Hello { job: "test".into(), from, incarnation: 0, to: None };
            coordinator.accept(Time::ZERO, &hello).unwrap().incarnation
        };
        (0..16).map(join).collect()
    };
    assert_eq!(drawn(1), drawn(1), "a seed of the simulator means the same run");
    let mut all = [drawn(1), drawn(2)].concat();
    all.sort_unstable();
    // 32 numbers out of 2^64: none is 0, and none is near another one.
    let gaps = all.iter().scan(0, |last, number| Some(number - std::mem::replace(last, *number)));
    assert!(gaps.min() > Some(1 << 32), "{all:x?}");
}

/// Policies that train badly together are told when the job is planned, and when a change makes them so; status has them as
/// long as they hold.
#[test]
fn policies_that_train_badly_together_are_told_with_the_remedy() {
    let now = Time::ZERO;
    let policy = Policy::default().with(Axis::Optimizer, "adam:lr=0.001");
    let codec = PolicyOverride::new("fc*", Policies::of([(Axis::Codec, "topk:0.01")]));
    let config = JobConfig { policy, overrides: vec![codec], ..JobConfig::new("test", 1, 1) };
    let mut coordinator = Coordinator::new(config, Arc::new(Registry::builtin()), 1);
    let warnings = |outputs: &[Output]| {
        let lines = outputs.iter().filter_map(|output| match output {
            Output::Log(_, line) => line.strip_prefix("warning: ").map(str::to_owned),
            _ => None,
        });
        lines.collect::<Vec<String>>()
    };
    let shard = coordinator.accept(now, &shard_hello(1, Some(0), 0, 1)).unwrap().you;
    say(&mut coordinator, now, shard, &Control::Register { addresses: "a".into() });
    let hello = Hello { job: "test".into(), from: Party::Worker { rank: None }, incarnation: 0, to: None };
    let worker = coordinator.accept(now, &hello).unwrap().you;
    assert_eq!(coordinator.status(now).warnings, Vec::<String>::new());
    let tables = ["conv", "fc1", "fc2"].map(|name| TableSpec::dense(name, [20])).to_vec();
    let told = warnings(&say(&mut coordinator, now, worker, &Control::Declare { tables }));
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with("fc1, fc2: `topk:0.01` sends most of a gradient late"), "{told:?}");
    assert!(told[0].ends_with("; take optimizer=adam:lr=0.001,beta1=0"), "{told:?}");
    assert_eq!(coordinator.status(now).warnings, told);
    say(&mut coordinator, now, shard, &Control::Entered { epoch: 1, joining: vec![], lacks_values: None });

    let command = Hello { job: "test".into(), from: Party::Command, incarnation: 0, to: None };
    let command = coordinator.accept(now, &command).unwrap().you;
    let mut set = |axis, text: &str| {
        let rule = PolicyOverride::new("*", Policies::of([(axis, text)]));
        warnings(&say(&mut coordinator, now, command, &Control::Set(rule)))
    };
    let all = set(Axis::Codec, "topk:0.01");
    assert!(all.len() == 1 && all[0].starts_with("all tables: `topk:0.01`"), "{all:?}");
    assert_eq!(set(Axis::Sync, "asp"), Vec::<String>::new(), "nothing is told twice");
    // The remedy is one that a running job can take.
    assert_eq!(set(Axis::Optimizer, "adam:lr=0.001,beta1=0"), Vec::<String>::new());
    assert_eq!(coordinator.status(now).warnings, Vec::<String>::new());
}
