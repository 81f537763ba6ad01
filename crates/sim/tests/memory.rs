//! What roles say they hold is what was taken from the system for them: an array that is counted twice, or not at all, shows.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(unsafe_code, reason = "a global allocator that counts is an unsafe trait")]

use paramill_core::policy::Axis;
use paramill_core::server::Shard;
use paramill_core::types::{NodeId, Time};
use paramill_sim::actor::Actor;
use paramill_sim::cluster::Cluster;
use paramill_sim::scenario::Scenario;
use paramill_sim::world::{Observer, Unobserved, Violation};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

struct Counting;

thread_local! {
    /// Bytes that this thread has; the test harness has threads of its own.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// The simulator keeps copies of frames, which are bytes: those of at most this length do not count.
const FRAME_BYTES: usize = 1 << 16;

fn counted_bytes(layout: Layout) -> usize {
    let is_frame = layout.align() == 1 && layout.size() <= FRAME_BYTES;
    if is_frame { 0 } else { layout.size() }
}

// SAFETY: everything is passed on to the system's allocator as it came; counting takes no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.with(|held| held.set(held.get().wrapping_add(counted_bytes(layout))));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.with(|held| held.set(held.get().wrapping_sub(counted_bytes(layout))));
        // SAFETY: `memory` is the system's, since `alloc` took it there.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One array of the table.
const ARRAY_BYTES: usize = 2 << 20;
const WORKERS: usize = 2;
const ELEMENTS: u64 = ARRAY_BYTES as u64 / 4;
/// What else takes memory, plans and queues above all: less than half an array, which is the least that a role has of anything.
const REST_BYTES: usize = ARRAY_BYTES * 2 / 5;

/// Compares after every event of a job that trains.
struct Ledger {
    /// Bytes that were held before the job.
    before: usize,
    /// What each role says.
    said: BTreeMap<NodeId, usize>,
    /// Workers that have done an iteration.
    training: BTreeSet<NodeId>,
}

impl Observer<Actor> for Ledger {
    fn on_settled(&mut self, _now: Time, node: NodeId, actor: &Actor) -> Result<(), String> {
        let bytes = match actor {
            Actor::Worker(player) => {
                if player.clock() > 0 {
                    self.training.insert(node);
                }
                player.worker().memory_bytes()
            }
            Actor::Aggregator(aggregator) => aggregator.memory_bytes(),
            actor => actor.as_shard().map_or(0, Shard::memory_bytes),
        };
        self.said.insert(node, bytes);
        let held = HELD.with(Cell::get) - self.before;
        let said: usize = self.said.values().sum();
        if said > held {
            return Err(format!("{held} bytes are held, and roles say {said}: {:?}", self.said));
        }
        // Initial values are on their way before.
        if self.training.len() == WORKERS && held - said > REST_BYTES {
            return Err(format!("{held} bytes are held, and roles say {said}: {:?}", self.said));
        }
        Ok(())
    }
}

fn run(scenario: &Scenario) -> Result<bool, Violation> {
    let mut ledger =
        Ledger { before: HELD.with(Cell::get), said: BTreeMap::new(), training: BTreeSet::new() };
    Cluster::new(scenario).unwrap().run(Time::from_secs_f64(60.0), &mut ledger)
}

#[test]
fn roles_say_how_much_memory_they_hold() {
    let mut job = Scenario { iterations: 4, ..Scenario::new(WORKERS as u32, 1, ELEMENTS) };
    job.network.window_bytes = 1 << 16;
    // Players compute gradients in an array that is never given back.
    Cluster::new(&job).unwrap().run(Time::from_secs_f64(60.0), &mut Unobserved).unwrap();
    let of =
        |axes: &[(Axis, &str)]| axes.iter().fold(job.clone(), |job, (axis, text)| job.with(*axis, *text));
    let through_aggregator = |job: Scenario| Scenario { aggregators: 1, ..job };
    for scenario in [
        of(&[]),
        of(&[(Axis::Optimizer, "adam:lr=0.001")]),
        of(&[(Axis::Order, "ranked")]),
        of(&[(Axis::Sync, "ssp:s=2")]),
        of(&[(Axis::Codec, "ef+topk:0.01")]),
        of(&[(Axis::Codec, "dgc:0.01")]),
        of(&[(Axis::Codec, "f16")]),
        of(&[(Axis::AnswerCodec, "topk:0.01")]),
        through_aggregator(of(&[])),
        through_aggregator(of(&[(Axis::Codec, "topk:0.01"), (Axis::AnswerCodec, "topk:0.01")])),
    ] {
        let (policy, aggregators) = (&scenario.policy, scenario.aggregators);
        assert_eq!(run(&scenario), Ok(true), "{policy:?}, {aggregators} aggregators");
    }
}
