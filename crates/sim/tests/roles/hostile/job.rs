//! A whole job with one member that is not honest: the others finish their work.

use super::words::{control_frame, data_frame};
use super::*;
use crate::bench::COORDINATOR;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::worker::{Gradient, PullOptions};
use proptest::prelude::*;

/// The worker that lies; the others are honest.
const LIAR: usize = 2;

#[derive(Debug, Clone)]
enum Act {
    /// The liar says something to a server.
    ToShard(usize, Frame),
    /// The liar says something to the coordinator.
    ToCoordinator(Frame),
    /// A connection of an honest worker to a server, or to the coordinator, breaks.
    Reset(usize, Option<usize>),
    Switch(usize),
    /// An honest worker does its next iteration, if the last one is over.
    Iterate(usize),
    Pass(u32),
}

const MODELS: [&str; 7] =
    ["bsp", "asp", "ssp:s=1", "drop:n=2", "psp:c=2", "quorum:q=0.5", "quorum:q=0.6,late=weigh"];

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        10 => (0usize..2, data_frame()).prop_map(|(shard, frame)| Act::ToShard(shard, frame)),
        4 => control_frame().prop_map(Act::ToCoordinator),
        2 => (0usize..2, prop::option::of(0usize..2)).prop_map(|(worker, peer)| Act::Reset(worker, peer)),
        2 => (0..MODELS.len()).prop_map(Act::Switch),
        6 => (0usize..2).prop_map(Act::Iterate),
        1 => (0u32..2000).prop_map(Act::Pass),
    ]
}

/// An honest worker's iteration under way.
type Steps = [Option<paramill_core::worker::Ticket>; 2];

fn iterate(bench: &mut Bench, worker: usize, steps: &mut Steps) {
    if let Some(ticket) = steps[worker] {
        match bench.outcome(worker, ticket) {
            None => return,
            Some(outcome) => assert_eq!(outcome, Ok(()), "honest worker {worker}"),
        }
        bench.worker_mut(worker).redeem(ticket);
    }
    let now = bench.now();
    let role = bench.worker_mut(worker);
    let ticket = role.push(now, W, Gradient::Dense(&[0.5; ELEMENTS]), true).expect("it fits");
    let rows = Gradient::Rows { rows: &[worker as u32, 7], values: &[1.0; 4] };
    role.push(now, ROWS, rows, false).expect("it fits");
    role.clock();
    steps[worker] = Some(ticket);
    bench.run();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn honest_members_finish_whatever_one_says(
        acts in prop::collection::vec(act(), 1..80),
        model in 0..MODELS.len(),
        ranked: bool,
    ) {
        let order = if ranked { Order::Ranked } else { Order::Arrival };
        let mut bench = started(config(3, MODELS[model], order));
        let liar = bench.worker_node(LIAR);
        let mut steps: Steps = [None; 2];
        for act in acts {
            match act {
                Act::ToShard(shard, frame) => _ = bench.world.inject(liar, bench.shard_node(shard), frame),
                Act::ToCoordinator(frame) => _ = bench.world.inject(liar, COORDINATOR, frame),
                Act::Reset(worker, peer) => {
                    let peer = peer.map_or(COORDINATOR, |shard| bench.shard_node(shard));
                    bench.reset(bench.worker_node(worker), peer);
                }
                Act::Switch(model) => {
                    let sync = MODELS[model].to_owned();
                    bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)])));
                }
                Act::Iterate(worker) => iterate(&mut bench, worker, &mut steps),
                Act::Pass(milliseconds) => bench.pass(f64::from(milliseconds) / 1000.0),
            }
            bench.run();
        }
        // The liar goes. What it left behind must not hold up the others.
        bench.isolate(liar);
        bench.pass(5.0);
        // Three more iterations each; one that was ahead of the other waits until it has caught up.
        let goal = bench.worker(0).current_clock().max(bench.worker(1).current_clock()) + 3;
        for turn in 0.. {
            let behind = [0, 1].into_iter().filter(|&worker| bench.worker(worker).current_clock() < goal);
            let behind: Vec<usize> = behind.collect();
            if behind.is_empty() {
                break;
            }
            behind.into_iter().for_each(|worker| iterate(&mut bench, worker, &mut steps));
            prop_assert!(turn < 1000, "stuck: {:?} {:?}", steps.map(|step| step.map(|step| bench.explain(0, step))), bench.log());
        }
        for (worker, step) in steps.into_iter().enumerate() {
            let ticket = step.expect("it has iterated");
            prop_assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
            let now = bench.now();
            let rows = PullOptions { rows: Some(&[0, 7]), now: false };
            let pull = bench.worker_mut(worker).pull(now, ROWS, rows).expect("it has started");
            bench.run();
            prop_assert_eq!(bench.outcome(worker, pull), Some(Ok(())), "{}", bench.explain(worker, pull));
        }
        prop_assert!(bench.parameters(W, ELEMENTS).iter().all(|value| value.is_finite()));
        for worker in 0..2 {
            let now = bench.now();
            let left = bench.worker_mut(worker).leave(now);
            bench.run();
            prop_assert_eq!(bench.outcome(worker, left), Some(Ok(())));
        }
        prop_assert_eq!(bench.stopped(), &[None, None, None], "coordinator and shards end in good order");
    }
}
