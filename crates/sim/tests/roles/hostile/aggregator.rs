//! An aggregator whose workers, servers and coordinator say anything.

use super::words::{answer, control_frame, data_frame, hello};
use super::*;
use paramill_core::role::Lost;
use paramill_core::wire::{Hello, Party, Welcome};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Act {
    Worker(u32, u32, Frame),
    Server(u32, Frame),
    /// A server notes sums, whatever was sent of them.
    Note(u32, u64),
    Coordinator(Frame),
    Stranger(Hello),
    /// A worker's connection breaks and stands again.
    ResetWorker(u32, u32),
    ResetServer(u32),
    Pass(u64),
}

fn act() -> impl Strategy<Value = Act> {
    let (worker, server) = (|| 0u32..3, || 0u32..2);
    prop_oneof![
        30 => (worker(), server(), data_frame()).prop_map(|(worker, server, frame)| Act::Worker(worker, server, frame)),
        15 => (server(), answer()).prop_map(|(server, frame)| Act::Server(server, frame)),
        5 => (server(), 0u64..40).prop_map(|(server, number)| Act::Note(server, number)),
        1 => control_frame().prop_map(Act::Coordinator),
        2 => hello().prop_map(Act::Stranger),
        2 => (worker(), server()).prop_map(|(worker, server)| Act::ResetWorker(worker, server)),
        2 => server().prop_map(Act::ResetServer),
        3 => (0u64..10_000_000).prop_map(Act::Pass),
    ]
}

const MODELS: [&str; 5] =
    ["bsp", "asp", "drop:n=2", "pssp:s=1,alpha=significance", "quorum:q=0.5,late=weigh"];
/// A page for a sum of each table on each server, and for the copy of each table.
const PAGE: usize = 4096;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn an_aggregator_survives_whatever_anybody_says(
        acts in prop::collection::vec(act(), 1..150),
        model in 0..MODELS.len(),
        ranked: bool,
    ) {
        let order = if ranked { Order::Ranked } else { Order::Arrival };
        let mut bench = Bench::with_aggregators(config(3, MODELS[model], order), 1, &[0, 0, 0]);
        bench.declare_and_start(&[
            (TableSpec::dense("w", [ELEMENTS as u64]), vec![1.0; ELEMENTS]),
            (TableSpec::sparse("rows", 10, 2), vec![2.0; 20]),
        ]);
        bench.pass(1.0);
        let (mut now, aggregator) = (bench.now(), bench.aggregator_mut(0));
        let mut stopped = false;
        for act in acts {
            let outputs = match act {
                Act::Worker(rank, server, frame) => {
                    say(aggregator, now, ConnectionId::WorkerFor(WorkerId(rank), shard_id(server)), &frame)
                }
                Act::Server(server, frame) => say(aggregator, now, NodeId::Shard(shard_id(server)), &frame),
                Act::Note(server, number) => {
                    let mut frame = Frame { header: paramill_core::wire::Header::new(Kind::Group), body: Body::Empty };
                    frame.header.request = number;
                    say(aggregator, now, NodeId::Shard(shard_id(server)), &frame)
                }
                Act::Coordinator(frame) => say(aggregator, now, NodeId::Coordinator, &frame),
                Act::Stranger(hello) => {
                    drop(aggregator.accept(now, &hello));
                    drain(aggregator)
                }
                Act::ResetWorker(rank, server) => {
                    let (rank, shard) = (WorkerId(rank), shard_id(server));
                    aggregator.handle_disconnected(now, ConnectionId::WorkerFor(rank, shard), &Lost::Broken("x".into()));
                    let from = Party::Through { rank, shard, pushed: Some(0) };
                    drop(aggregator.accept(now, &Hello { job: "test".into(), from, incarnation: u64::from(rank.0) + 1, to: None }));
                    drain(aggregator)
                }
                Act::ResetServer(server) => {
                    let peer = NodeId::Shard(shard_id(server));
                    aggregator.handle_disconnected(now, peer.into(), &Lost::Broken("x".into()));
                    let welcome = Welcome { you: aggregator.node().expect("it has joined"), incarnation: 200, session: 0 };
                    aggregator.handle_connected(now, peer.into(), &welcome);
                    drain(aggregator)
                }
                Act::Pass(nanoseconds) => {
                    now = Time(now.0 + nanoseconds);
                    aggregator.handle_timeout(now);
                    drain(aggregator)
                }
            };
            stopped |= outputs.iter().any(|output| matches!(output, Output::Stop { .. }));
            // Each of three workers may have sixteen pushes held and one under way, on two servers; two more buffers
            // are kept, and the copies.
            let bound = 2 * (3 * 17 + 2) * PAGE + 2 * PAGE;
            prop_assert!(aggregator.memory_bytes() <= bound, "{}", aggregator.memory_bytes());
            prop_assert_eq!(aggregator.check(), Ok(()));
        }
        prop_assert!(!stopped || aggregator.next_timeout().is_none());
    }
}
