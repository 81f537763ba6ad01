//! A coordinator and anybody who finds its address.

use super::words::{control_frame, data_frame, hello};
use super::*;
use crate::bench::COORDINATOR;
use paramill_core::coordinator::Coordinator;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::role::Lost;
use paramill_core::wire::Hello;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

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
