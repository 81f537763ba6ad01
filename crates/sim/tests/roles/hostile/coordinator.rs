//! A coordinator and anybody who finds its address.

use super::words::{control_frame, data_frame, hello};
use super::*;
use crate::bench::COORDINATOR;
use paramill_core::coordinator::Coordinator;
use paramill_core::limits;
use paramill_core::policy::{Policies, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::role::Lost;
use paramill_core::wire::{Cause, Fault, Hello, Party};
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
        let mut peers = BTreeSet::new();
        let mut fresh = Coordinator::new(config.clone(), Arc::new(Registry::builtin()), 1);
        let mut bench = started(config);
        let coordinator = if started_before { bench.coordinator_mut() } else { &mut fresh };
        if started_before {
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
            let outputs = drain(coordinator);
            // One frame makes at most one message to everybody, and a few lines.
            prop_assert!(outputs.len() <= 4 * (peers.len() + 8), "{} outputs", outputs.len());
            let status = coordinator.status(now);
            let words: usize = status.workers.iter().filter_map(|worker| worker.report.waiting.as_ref()).map(String::len).sum();
            prop_assert!(words <= status.workers.len() * limits::MAX_REASON_BYTES);
            // Numbers for people and for JSON, which has no NaN.
            let reports = status.workers.iter().map(|worker| &worker.report.waited).chain([&status.waited]);
            for waited in reports {
                let seconds = waited.causes.iter().map(|charge| charge.seconds);
                let is_sound = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
                prop_assert!(seconds.chain([waited.seconds, waited.others]).all(is_sound), "{waited:?}");
                prop_assert!(waited.causes.len() <= limits::MAX_WAIT_CAUSES);
            }
            prop_assert!(status.workers.iter().all(|worker| worker.report.reads.waited_s.is_finite()));
            prop_assert_eq!(coordinator.check(), Ok(()));
        }
    }
}

#[test]
fn a_query_waits_for_its_first_answer() {
    let mut bench = started(config(1, "bsp", Order::Arrival));
    let (now, coordinator) = (bench.now(), bench.coordinator_mut());
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
fn a_plan_is_sent_once_on_a_connection() {
    let mut bench = started(config(1, "bsp", Order::Arrival));
    let back = bench.worker(0).hello(NodeId::Coordinator.into());
    let (now, coordinator) = (bench.now(), bench.coordinator_mut());
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
    let mut bench = started(config(2, "bsp", Order::Arrival));
    bench.cut(bench.worker_node(1), COORDINATOR);
    bench.pass(4.0);
    let (now, coordinator) = (bench.now(), bench.coordinator_mut());
    let worker = WorkerId(1);
    let outputs = say(coordinator, now, NodeId::Worker(worker), &message(&Control::StatusQuery));
    assert!(outputs.len() == 2 && is_refusal(&outputs[0], worker), "{outputs:?}");
    assert_eq!(outputs[1], Output::Disconnect { connection: NodeId::Worker(worker).into() });
}

/// Lets time pass in steps that are no standstill; what the coordinator wants done meanwhile.
fn pass(coordinator: &mut Coordinator, now: &mut Time, seconds: f64) -> Vec<Output> {
    let until = *now + Duration::from_secs_f64(seconds);
    let mut outputs = Vec::new();
    while *now < until {
        *now = *now + limits::HEARTBEAT_EVERY;
        coordinator.handle_timeout(*now);
        outputs.extend(drain(coordinator));
    }
    outputs
}

/// A command connects.
fn command(coordinator: &mut Coordinator, now: Time) -> NodeId {
    let hello = Hello { job: "test".into(), from: Party::Command, incarnation: 0, to: None };
    coordinator.accept(now, &hello).expect("commands are let in").you
}

/// What a peer is told in error frames.
fn faults(outputs: &[Output], peer: NodeId) -> Vec<Fault> {
    let fault = |output: &Output| match output {
        Output::Send { to, frame, .. } if *to == peer.into() && frame.header.kind == Kind::Error => {
            Some(control::decode("error", role_payload(&frame.body)).expect("a fault"))
        }
        _ => None,
    };
    outputs.iter().filter_map(fault).collect()
}

/// What a peer is told in control frames.
fn told(outputs: &[Output], peer: NodeId) -> Vec<Control> {
    let message = |output: &Output| match output {
        Output::Send { to, frame, .. } if *to == peer.into() && frame.header.kind == Kind::Control => {
            Some(control::decode("control message", role_payload(&frame.body)).expect("a message"))
        }
        _ => None,
    };
    outputs.iter().filter_map(message).collect()
}

fn rule(table: &str) -> PolicyOverride {
    PolicyOverride::new(table, Policies::of([(Axis::Sync, "ssp:s=1")]))
}

#[test]
fn a_change_that_is_not_entered_everywhere_is_answered_with_who_is_behind() {
    let mut bench = started(config(1, "bsp", Order::Arrival));
    let (mut now, coordinator) = (bench.now(), bench.coordinator_mut());
    let asker = command(coordinator, now);
    let set = message(&Control::Set(rule("w")));
    assert_eq!(told(&say(coordinator, now, asker, &set), asker), []);
    let entered = Control::Entered { epoch: 2, joining: vec![], lacks_values: None };
    let outputs = say(coordinator, now, NodeId::Shard(shard_id(0)), &message(&entered));
    assert_eq!(told(&outputs, asker), [], "the other server has not");
    let outputs = pass(coordinator, &mut now, 6.0);
    let is_hung_up = |output: &Output| matches!(output, Output::Disconnect { .. });
    assert!(!outputs.iter().any(is_hung_up), "{outputs:?}");
    let [fault] = &faults(&outputs, asker)[..] else { panic!("one answer: {outputs:?}") };
    assert_eq!(fault.cause, Cause::Unsettled);
    assert_eq!(fault.message, "changed; server 1 core 0 has not entered epoch 2 yet");
    // It holds all the same, and there is no second answer.
    let outputs = say(coordinator, now, NodeId::Shard(shard_id(1)), &message(&entered));
    assert_eq!((told(&outputs, asker), told(&outputs, NodeId::Worker(WorkerId(0))).len()), (vec![], 1));
}

#[test]
fn one_table_is_spoken_of_in_the_singular() {
    let mut bench = started(config(1, "bsp", Order::Arrival));
    let (now, coordinator) = (bench.now(), bench.coordinator_mut());
    let asker = command(coordinator, now);
    for (glob, epoch, sentence) in [
        ("w", 2, "1 table now has sync=ssp:s=1 on all servers"),
        ("*", 3, "2 tables now have sync=ssp:s=1 on all servers"),
    ] {
        say(coordinator, now, asker, &message(&Control::Set(rule(glob))));
        let entered = message(&Control::Entered { epoch, joining: vec![], lacks_values: None });
        say(coordinator, now, NodeId::Shard(shard_id(0)), &entered);
        let outputs = say(coordinator, now, NodeId::Shard(shard_id(1)), &entered);
        assert_eq!(told(&outputs, asker), [Control::Done(sentence.into())]);
    }
}

#[test]
fn a_worker_of_an_earlier_job_is_refused_for_good() {
    let config = config(2, "bsp", Order::Arrival);
    let mut coordinator = Coordinator::new(config, Arc::new(Registry::builtin()), 1);
    let mut now = Time::ZERO;
    let hello = |rank: Option<u32>, incarnation| Hello {
        job: "test".into(),
        from: Party::Worker { rank: rank.map(WorkerId) },
        incarnation,
        to: None,
    };
    for rank in [Some(0), Some(1), None] {
        let refusal = coordinator.accept(now, &hello(rank, 12345)).unwrap_err();
        assert!(!refusal.retry, "{refusal}");
        assert_eq!(refusal.reason, "this worker belongs to a job that ended; start it anew");
    }
    // One of this job that was away for long before the job started is let in again.
    let welcome = coordinator.accept(now, &hello(Some(1), 0)).unwrap();
    coordinator.handle_disconnected(now, welcome.you.into(), &Lost::Broken("reset".into()));
    pass(&mut coordinator, &mut now, 5.0);
    let again = coordinator.accept(now, &hello(Some(1), welcome.incarnation)).unwrap();
    assert_eq!(again.you, NodeId::Worker(WorkerId(1)));
}

#[test]
fn a_rule_can_be_replaced_when_there_are_as_many_as_there_may_be() {
    // All of them are for `w`, and none replaces another.
    let stars = |count: usize| "*".repeat(count + 1);
    let glob = |number: usize| format!("{}w{}", stars(number / 64), stars(number % 64));
    let overrides = (1..limits::MAX_OVERRIDES).map(|number| rule(&glob(number))).collect();
    let mut bench = started(JobConfig { overrides, ..config(1, "bsp", Order::Arrival) });
    let (now, coordinator) = (bench.now(), bench.coordinator_mut());
    let asker = command(coordinator, now);
    for (glob, refused) in [("w", 0), ("*", 1), ("w", 0)] {
        let outputs = say(coordinator, now, asker, &message(&Control::Set(rule(glob))));
        let faults = faults(&outputs, asker);
        assert_eq!(faults.len(), refused, "{faults:?}");
        assert!(faults.iter().all(|fault| fault.message.contains("4096 exceptions")), "{faults:?}");
    }
}

#[test]
fn what_cannot_be_read_is_answered_with_an_error() {
    let mut bench = started(config(1, "bsp", Order::Arrival));
    let (now, coordinator) = (bench.now(), bench.coordinator_mut());
    let mut frame = message(&Control::StatusQuery);
    frame.body = Body::Bytes(vec![99]);
    let asker = command(coordinator, now);
    let outputs = say(coordinator, now, asker, &frame);
    let [fault] = &faults(&outputs, asker)[..] else { panic!("one answer: {outputs:?}") };
    assert_eq!(fault.cause, Cause::Protocol);
    assert!(fault.message.contains("control message"), "{fault}");
}

#[test]
fn a_job_that_failed_says_why_it_is_over() {
    let mut bench = started(config(1, "bsp", Order::Arrival));
    let (now, coordinator) = (bench.now(), bench.coordinator_mut());
    let stop = Control::Stop { error: Some("the disk is full".into()) };
    say(coordinator, now, NodeId::Shard(shard_id(1)), &message(&stop));
    assert_eq!(coordinator.status(now).phase, "over: server 1 core 0: the disk is full");
}
