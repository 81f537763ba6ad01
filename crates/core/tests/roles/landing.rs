//! Answers that servers of the same host put where the worker wants them.

use super::pump::Pump;
use super::{W, job};
use paramill_core::role::Role;
use paramill_core::store::{Allocate, Buffer, Memory, Place};
use paramill_core::table::TableSpec;
use paramill_core::types::NodeId;
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
fn sharing() -> Pump {
    let mut pump = Pump::new(job(1, 2, "bsp", "sgd:lr=1"), 1);
    let worker = pump.workers.remove(0);
    pump.workers.push(worker.with_shared_memory("shard".into(), Arc::new(Segment)));
    pump.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS])]);
    pump
}

fn push(pump: &mut Pump) -> paramill_core::worker::Ticket {
    let now = pump.now;
    let ticket = pump.workers[0].push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).expect("it fits");
    pump.workers[0].clock();
    ticket
}

#[test]
fn an_answer_becomes_the_values_and_who_reads_the_former_ones_keeps_them() {
    let mut pump = sharing();
    let mut held = Vec::new();
    for step in 1..5 {
        let ticket = push(&mut pump);
        pump.run();
        assert_eq!(pump.outcome(0, ticket), Some(Ok(())));
        pump.workers[0].redeem(ticket);
        assert_eq!(pump.workers[0].values(W), [-(step as f32); ELEMENTS]);
        held.push((step, pump.workers[0].shared_values(W).expect("it is dense")));
    }
    for (step, values) in held {
        assert_eq!(values.as_slice(), [-(step as f32); ELEMENTS], "as it was read at step {step}");
    }
}

#[test]
fn answers_that_overtake_each_other_leave_the_newest_of_every_server() {
    let mut pump = sharing();
    let worker = pump.worker_node(0);
    let first = push(&mut pump);
    // Both servers have the first push; the answer of one of them is here.
    pump.deliver(worker, 1, usize::MAX);
    pump.deliver(worker, 2, usize::MAX);
    pump.deliver(1, worker, usize::MAX);
    let second = push(&mut pump);
    pump.deliver(worker, 1, usize::MAX);
    pump.deliver(1, worker, usize::MAX);
    pump.run();
    for ticket in [first, second] {
        assert_eq!(pump.outcome(0, ticket), Some(Ok(())));
    }
    assert_eq!(pump.workers[0].values(W), [-2.0; ELEMENTS]);
    assert_eq!(pump.parameters(W, ELEMENTS), [-2.0; ELEMENTS]);
}

#[test]
fn an_answer_that_nobody_waits_for_any_more_still_arrives() {
    let mut pump = sharing();
    let worker = pump.worker_node(0);
    let given_up = push(&mut pump);
    pump.deliver(worker, 1, usize::MAX);
    pump.deliver(worker, 2, usize::MAX);
    pump.deliver(1, worker, 1);
    pump.workers[0].redeem(given_up);
    pump.run();
    assert_eq!(pump.workers[0].values(W), [-1.0; ELEMENTS]);
    let now = pump.now;
    let pull = pump.workers[0].pull(now, W, PullOptions::default()).expect("it is dense");
    pump.run();
    assert_eq!(pump.outcome(0, pull), Some(Ok(())));
    assert_eq!(pump.workers[0].values(W), [-1.0; ELEMENTS]);
}

#[test]
fn an_answer_that_one_server_refuses_leaves_its_part_as_it_was() {
    let mut pump = sharing();
    // Values of three versions have been here: the landing holds an older one than the values.
    for _ in 0..3 {
        let ticket = push(&mut pump);
        pump.run();
        pump.workers[0].redeem(ticket);
    }
    let before = pump.workers[0].values(W).to_vec();
    assert_eq!(before, [-3.0; ELEMENTS]);
    let ticket = push(&mut pump);
    let worker = pump.worker_node(0);
    let shard = pump.shards[1].id().expect("it has joined");
    // One server says no to the frames that are on their way to it.
    let request = pump.deliver(worker, 2, 0);
    let mut refusal = control::frame(Kind::Error, &Fault { cause: Cause::Shape, message: "no".into() });
    refusal.header.request = request.expect("a push is on its way");
    let payload = refusal.body.bytes().expect("it has its bytes with it").to_vec();
    pump.hold(worker, 2);
    pump.workers[0].handle_frame(pump.now, NodeId::Shard(shard).into(), &refusal.header, &payload);
    pump.run();
    assert!(matches!(pump.outcome(0, ticket), Some(Err(WorkerError::Refused { .. }))));
    let refused = {
        let mut of_shard = vec![false; ELEMENTS];
        pump.shards[1].for_each_chunk(W, |start, chunk| {
            of_shard[start as usize..start as usize + chunk.len()].fill(true);
        });
        of_shard
    };
    let expected: Vec<f32> = refused.iter().map(|refused| if *refused { -3.0 } else { -4.0 }).collect();
    assert_eq!(pump.workers[0].values(W), expected);
    // The table may be lent before anybody asks what became of the push.
    let slab = pump.workers[0].slab(W).expect("nothing of it is under way");
    pump.workers[0].redeem(ticket);
    assert_eq!(slab.values(), expected);
}
