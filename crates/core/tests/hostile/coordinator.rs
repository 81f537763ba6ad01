//! A coordinator and anybody who finds its address.

use super::*;
use crate::words::{control_frame, data_frame, hello};
use paramill_core::coordinator::Coordinator;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::role::Lost;
use paramill_core::wire::{Hello, Party};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, Clone)]
enum Act {
    Connect(Hello),
    /// One of those who are connected says something.
    Say(prop::sample::Index, Frame),
    Disconnect(prop::sample::Index),
    Pass(u64),
}

fn act() -> impl Strategy<Value = Act> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        6 => hello().prop_map(Act::Connect),
        15 => (index(), control_frame()).prop_map(|(who, frame)| Act::Say(who, frame)),
        1 => (index(), data_frame()).prop_map(|(who, frame)| Act::Say(who, frame)),
        2 => index().prop_map(Act::Disconnect),
        1 => (0u64..4_000_000_000).prop_map(Act::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_coordinator_survives_anybody(
        acts in prop::collection::vec(act(), 1..120),
        overlap: bool,
        started_before: bool,
    ) {
        let sync = if overlap { "bsp" } else { "ssp:s=2,overlap=false" };
        let config = config(2, sync, Order::Arrival);
        let (mut coordinator, mut peers) = (Coordinator::new(config.clone(), Arc::new(Registry::builtin()), 1), BTreeSet::new());
        if started_before {
            coordinator = started(config).coordinator;
            peers.extend([0, 1].map(|rank| NodeId::Worker(WorkerId(rank))));
            peers.extend([0, 1].map(|server| NodeId::Shard(shard_id(server))));
        }
        let mut now = Time::ZERO;
        let one_of = |peers: &BTreeSet<NodeId>, who: prop::sample::Index| {
            (!peers.is_empty()).then(|| *peers.iter().nth(who.index(peers.len())).unwrap())
        };
        for act in acts {
            match act {
                Act::Connect(hello) => {
                    if let Ok(welcome) = coordinator.accept(now, &hello) {
                        peers.insert(welcome.you);
                    }
                }
                Act::Say(who, frame) => {
                    if let Some(peer) = one_of(&peers, who) {
                        coordinator.handle_frame(now, peer.into(), &frame.header, role_payload(&frame.body));
                    }
                }
                Act::Disconnect(who) => {
                    if let Some(peer) = one_of(&peers, who) {
                        peers.remove(&peer);
                        coordinator.handle_disconnected(now, peer.into(), &Lost::Broken("reset".into()));
                    }
                }
                Act::Pass(nanoseconds) => now = Time(now.0 + nanoseconds),
            }
            coordinator.handle_timeout(now);
            let outputs = drain(&mut coordinator);
            // One frame makes at most one message to everybody, and a few lines.
            prop_assert!(outputs.len() <= 4 * (peers.len() + 8), "{} outputs", outputs.len());
            let status = coordinator.status(now);
            let words: usize = status.workers.iter().filter_map(|worker| worker.report.waiting.as_ref()).map(String::len).sum();
            prop_assert!(words <= status.workers.len() * limits::MAX_REASON_BYTES);
            prop_assert_eq!(coordinator.check(), Ok(()));
        }
    }
}

/// A coordinator of one server and two workers who said hello.
fn greeted() -> (Coordinator, [NodeId; 2]) {
    let mut coordinator =
        Coordinator::new(config(2, "bsp", Order::Arrival), Arc::new(Registry::builtin()), 1);
    let workers = [0, 1].map(|rank| {
        let hello =
            Hello { job: "test".into(), from: Party::Worker { rank: Some(WorkerId(rank)) }, incarnation: 0 };
        coordinator.accept(Time::ZERO, &hello).expect("its rank is free").you
    });
    (coordinator, workers)
}

fn shard_hello(process: u64, server: Option<u32>, core: u32, cores: u32) -> Hello {
    let from = Party::Shard { process: ProcessId(process), server: server.map(ServerId), core, cores };
    Hello { job: "test".into(), from, incarnation: process }
}

#[test]
fn servers_that_disagree_about_their_cores_are_not_planned_with() {
    let (mut coordinator, workers) = greeted();
    let now = Time::ZERO;
    // Two cores are promised, one registers; another process claims the same number with one core.
    let first = coordinator.accept(now, &shard_hello(1, Some(0), 0, 2)).unwrap().you;
    coordinator.accept(now, &shard_hello(1, Some(0), 1, 2)).unwrap();
    say(&mut coordinator, now, first, &message(&Control::Register { addresses: "a".into() }));
    let refusal = coordinator.accept(now, &shard_hello(2, Some(0), 0, 1)).unwrap_err();
    assert!(refusal.retry && refusal.reason.contains("server 0 is another process already"), "{refusal}");
    let refusal = coordinator.accept(now, &shard_hello(1, Some(0), 0, 1)).unwrap_err();
    assert!(refusal.reason.contains("server 0 has 2 cores, not 1"), "{refusal}");
    for worker in workers {
        let outputs = say(
            &mut coordinator,
            now,
            worker,
            &message(&Control::Declare { tables: words::honest_tables() }),
        );
        assert_eq!(outputs, [], "there is nothing to plan with yet");
    }
    // Thousands of processes come and go; what is kept of them goes too.
    for process in 10..5000 {
        let you = coordinator.accept(now, &shard_hello(process, None, 0, 1)).unwrap().you;
        assert_eq!(you, NodeId::Shard(shard_id(1)));
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
        let outputs = say(&mut coordinator, now, workers[0], &message(&barrier));
        refused += outputs.iter().filter(|output| is_refusal(output, WorkerId(0))).count();
    }
    assert_eq!(refused, 5000 - limits::MAX_BARRIERS);
    let long = Control::Barrier { name: "n".repeat(1 << 20), number: 9000 };
    let outputs = say(&mut coordinator, now, workers[1], &message(&long));
    assert!(outputs.len() == 1 && is_refusal(&outputs[0], WorkerId(1)));

    let shard = coordinator.accept(now, &shard_hello(1, None, 0, 1)).unwrap().you;
    say(&mut coordinator, now, shard, &message(&Control::Register { addresses: "a".into() }));
    say(
        &mut coordinator,
        now,
        shard,
        &message(&Control::Entered { epoch: 1, joining: vec![], lacks_values: None }),
    );
    let mut answers = 0;
    for _ in 0..5000 {
        let outputs = say(&mut coordinator, now, workers[0], &message(&Control::StatusQuery));
        answers += outputs.len();
    }
    coordinator.handle_timeout(now + limits::STATUS_DEADLINE);
    answers += drain(&mut coordinator).len();
    assert_eq!(answers, 5000, "each is answered at once, as no shard follows a plan yet");
}

#[test]
fn a_query_waits_for_its_first_answer() {
    let mut pump = started(config(1, "bsp", Order::Arrival));
    let (now, coordinator) = (pump.now, &mut pump.coordinator);
    let worker = NodeId::Worker(WorkerId(0));
    let asked = say(coordinator, now, worker, &message(&Control::StatusQuery));
    assert_eq!(asked.len(), 2, "two shards are asked for their reports");
    for _ in 0..1000 {
        assert_eq!(say(coordinator, now, worker, &message(&Control::StatusQuery)), []);
    }
    coordinator.handle_timeout(now + limits::STATUS_DEADLINE);
    assert_eq!(drain(coordinator).len(), 1);
}

#[test]
fn a_command_finds_its_place_though_others_hold_all_of_them() {
    let (mut coordinator, _) = greeted();
    let mut now = Time::ZERO;
    let hello = Hello { job: "test".into(), from: Party::Command, incarnation: 0 };
    let connect = |coordinator: &mut Coordinator, now| coordinator.accept(now, &hello).map(|it| it.you);
    let others: Vec<NodeId> =
        (0..limits::MAX_COMMANDS).map(|_| connect(&mut coordinator, now).unwrap()).collect();
    for round in 0..3 {
        // They ask often enough not to be hung up on, the first of them as the last one.
        now = now + (limits::COMMAND_IDLE - Duration::from_secs(1));
        for other in others.iter().rev() {
            now = now + Duration::from_millis(1);
            say(&mut coordinator, now, *other, &message(&Control::StatusQuery));
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
        let answer = say(&mut coordinator, now, you, &message(&Control::StatusQuery));
        assert!(matches!(answer[..], [Output::Send { to, .. }] if to == you.into()), "{answer:?}");
        coordinator.handle_disconnected(now, you.into(), &Lost::Broken("done".into()));
    }
}

#[test]
fn incarnations_are_drawn_from_the_drivers_secret() {
    let drawn = |secret: u64| -> Vec<u64> {
        let config = config(16, "bsp", Order::Arrival);
        let mut coordinator = Coordinator::new(config, Arc::new(Registry::builtin()), secret);
        let join = |rank: u32| {
            let from = Party::Worker { rank: Some(WorkerId(rank)) };
            let hello = Hello { job: "test".into(), from, incarnation: 0 };
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

#[test]
fn a_plan_is_sent_once_on_a_connection() {
    let mut pump = started(config(1, "bsp", Order::Arrival));
    let back = pump.workers[0].hello(NodeId::Coordinator.into());
    let (now, coordinator) = (pump.now, &mut pump.coordinator);
    let worker = NodeId::Worker(WorkerId(0));
    let again = message(&Control::Declare { tables: words::honest_tables() });
    assert_eq!(say(coordinator, now, worker, &again), []);
    let register = message(&Control::Register { addresses: "elsewhere".into() });
    assert_eq!(say(coordinator, now, NodeId::Shard(shard_id(0)), &register), []);
    coordinator.handle_disconnected(now, worker.into(), &Lost::Broken("reset".into()));
    coordinator.accept(now, &back).unwrap();
    assert_eq!(say(coordinator, now, worker, &again).len(), 1);
    assert_eq!(say(coordinator, now, worker, &again), []);
}

#[test]
fn who_was_declared_dead_is_told_and_sent_away() {
    let mut pump = started(config(2, "bsp", Order::Arrival));
    pump.cut.insert((pump.worker_node(1), 0));
    pump.reset(pump.worker_node(1), 0);
    pump.pass(4.0);
    let (now, coordinator) = (pump.now, &mut pump.coordinator);
    let worker = WorkerId(1);
    let outputs = say(coordinator, now, NodeId::Worker(worker), &message(&Control::StatusQuery));
    assert!(outputs.len() == 2 && is_refusal(&outputs[0], worker), "{outputs:?}");
    assert_eq!(outputs[1], Output::Disconnect { connection: NodeId::Worker(worker).into() });
}
