//! No chunk takes memory on its way through a shard once a job has run for a few rounds: that would cost time on every
//! chunk, and page faults when it comes from the system. What acknowledges many pushes at once is made for the occasion.

#![allow(unsafe_code, reason = "a global allocator that counts is an unsafe trait")]

#[allow(dead_code, reason = "the example that it is shared with looks at more")]
#[path = "../examples/shard_cost/load.rs"]
mod load;

use load::{Load, Work};
use paramill_core::policy::{Axis, Policy};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// What this thread took; the test harness has threads of its own.
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator as it came; counting takes no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.with(|taken| taken.set(taken.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` is the system's, since `alloc` took it there.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        TAKEN.with(|taken| taken.set(taken.get() + 1));
        // SAFETY: `memory` is the system's, since `alloc` took it there.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of 20 rounds after some that fill pools and queues, but for lists of acknowledgements.
fn allocations(work: &Work) -> u64 {
    allocations_of(work, Load::new(work.clone()))
}

fn allocations_of(work: &Work, mut load: Load) -> u64 {
    let expected = load.frames_per_round();
    (0..5).for_each(|_| _ = load.round());
    let before = TAKEN.with(Cell::get);
    let mut lists = 0;
    for _ in 0..20 {
        let tally = load.round();
        assert_eq!((tally.frames, tally.answers), (expected, expected), "{work:?}");
        assert_eq!(tally.completed, u64::from(work.workers * work.tables), "{work:?}");
        lists += tally.lists;
    }
    TAKEN.with(Cell::get) - before - lists
}

#[test]
fn steady_rounds_take_no_memory_for_chunks() {
    for optimizer in ["sgd", "adam:lr=0.001"] {
        for (workers, tables, elements) in [(1, 1, 20_000), (2, 3, 20_000), (5, 50, 100), (40, 10, 100)] {
            for codec in ["none", "f16", "topk:0.1", "int8"] {
                let policy = Policy::default().with(Axis::Optimizer, optimizer).with(Axis::Codec, codec);
                let work = Work { workers, tables, elements, policy };
                assert_eq!(allocations(&work), 0, "{work:?}");
            }
        }
    }
}

/// One step that a chunk had no gradient for is counted for ever, and costs the chunks nothing.
#[test]
fn rounds_after_an_absence_take_no_memory_either() {
    for (workers, tables, elements) in [(1, 1, 20_000), (2, 3, 20_000)] {
        let policy = Policy::default().with(Axis::Optimizer, "adam:lr=0.001");
        let work = Work { workers, tables, elements, policy };
        let mut load = Load::new(work.clone());
        load.round();
        load.lack(1);
        load.round();
        assert_eq!(allocations_of(&work, load), 0, "{work:?}");
    }
}

#[test]
fn the_allocator_counts() {
    let before = TAKEN.with(Cell::get);
    drop(std::hint::black_box(vec![0u8; 100]));
    assert_eq!(TAKEN.with(Cell::get) - before, 1);
}
