//! Answers that servers of the same host put where the worker wants them.

use super::bench::Bench;
use super::processes::worker;
use super::{W, job};
use paramill_core::store::{Allocate, Buffer, Memory, Place};
use paramill_core::table::TableSpec;
use paramill_core::wire::{Cause, Fault, Kind, control};
use paramill_core::worker::{Gradient, PullOptions, WorkerError};
use std::sync::Arc;

const ELEMENTS: usize = 40;

/// Memory that has a place, as if others saw it.
#[derive(Debug)]
struct Seen(Buffer);

impl Memory for Seen {
    fn as_slice(&self) -> &[f32] {
        self.0.as_slice()
    }

    fn as_mut_slice(&mut self) -> &mut [f32] {
        self.0.as_mut_slice()
    }

    fn place(&self) -> Place {
        Place { segment: 1, offset: 4096 }
    }
}

#[derive(Debug)]
struct Segment;

impl Allocate for Segment {
    fn zeroed(&self, len: usize) -> Buffer {
        Buffer::shared(Box::new(Seen(Buffer::zeroed(len))), len)
    }
}

/// One worker that shares memory with two shards.
fn sharing() -> Bench {
    let mut bench = Bench::without_workers(job(1, 2, "bsp", "sgd:lr=1"), 1, 0);
    let worker = worker(bench.now(), 0, None, None);
    bench.add(worker.with_shared_memory("shard".into(), Arc::new(Segment)));
    bench.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS])]);
    bench
}

fn push(bench: &mut Bench) -> paramill_core::worker::Ticket {
    let now = bench.now();
    let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).expect("it fits");
    bench.worker_mut(0).clock();
    ticket
}

#[test]
fn an_answer_becomes_the_values_and_who_reads_the_former_ones_keeps_them() {
    let mut bench = sharing();
    let mut held = Vec::new();
    for step in 1..5 {
        let ticket = push(&mut bench);
        bench.run();
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
        bench.worker_mut(0).redeem(ticket);
        assert_eq!(bench.worker(0).values(W), [-(step as f32); ELEMENTS]);
        held.push((step, bench.worker_mut(0).shared_values(W).expect("it is dense")));
    }
    for (step, values) in held {
        assert_eq!(values.as_slice(), [-(step as f32); ELEMENTS], "as it was read at step {step}");
    }
}

#[test]
fn answers_that_overtake_each_other_leave_the_newest_of_every_server() {
    let mut bench = sharing();
    // Both servers have the first push; the answer of one of them is here.
    bench.world.hold(bench.shard_node(1), bench.worker_node(0));
    let first = push(&mut bench);
    bench.run();
    assert_eq!(bench.outcome(0, first), None);
    let second = push(&mut bench);
    bench.run();
    assert_eq!(bench.outcome(0, second), None);
    bench.thaw();
    for ticket in [first, second] {
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
    }
    assert_eq!(bench.worker(0).values(W), [-2.0; ELEMENTS]);
    assert_eq!(bench.parameters(W, ELEMENTS), [-2.0; ELEMENTS]);
}

#[test]
fn an_answer_that_nobody_waits_for_any_more_still_arrives() {
    let mut bench = sharing();
    let worker = bench.worker_node(0);
    let shards = [0, 1].map(|shard| bench.shard_node(shard));
    shards.into_iter().for_each(|shard| bench.world.hold(shard, worker));
    let given_up = push(&mut bench);
    bench.deliver(shards[0], worker, 1);
    bench.worker_mut(0).redeem(given_up);
    bench.thaw();
    assert_eq!(bench.worker(0).values(W), [-1.0; ELEMENTS]);
    let now = bench.now();
    let pull = bench.worker_mut(0).pull(now, W, PullOptions::default()).expect("it is dense");
    bench.run();
    assert_eq!(bench.outcome(0, pull), Some(Ok(())));
    assert_eq!(bench.worker(0).values(W), [-1.0; ELEMENTS]);
}

#[test]
fn an_answer_that_one_server_refuses_leaves_its_part_as_it_was() {
    let mut bench = sharing();
    // Values of three versions have been here: the landing holds an older one than the values.
    for _ in 0..3 {
        let ticket = push(&mut bench);
        bench.run();
        bench.worker_mut(0).redeem(ticket);
    }
    let before = bench.worker(0).values(W).to_vec();
    assert_eq!(before, [-3.0; ELEMENTS]);
    // One server says no to the frames that are on their way to it.
    let (worker, shard) = (bench.worker_node(0), bench.shard_node(1));
    bench.world.hold(worker, shard);
    let ticket = push(&mut bench);
    bench.run();
    let request = bench.world.unread(worker, shard).next().expect("a push is on its way").request;
    let mut refusal = control::frame(Kind::Error, &Fault { cause: Cause::Shape, message: "no".into() });
    refusal.header.request = request;
    assert!(bench.world.inject(shard, worker, refusal));
    bench.run();
    assert!(matches!(bench.outcome(0, ticket), Some(Err(WorkerError::Refused { .. }))));
    let refused = {
        let mut of_shard = vec![false; ELEMENTS];
        bench.shard(1).for_each_chunk(W, |start, chunk| {
            of_shard[start as usize..start as usize + chunk.len()].fill(true);
        });
        of_shard
    };
    let expected: Vec<f32> = refused.iter().map(|refused| if *refused { -3.0 } else { -4.0 }).collect();
    assert_eq!(bench.worker(0).values(W), expected);
    // The table may be lent before anybody asks what became of the push.
    let slab = bench.worker_mut(0).slab(W).expect("nothing of it is under way");
    bench.worker_mut(0).redeem(ticket);
    assert_eq!(slab.values(), expected);
}
