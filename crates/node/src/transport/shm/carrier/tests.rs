#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use super::super::SharedAllocator;
use super::*;
use crate::transport::carrier::tests::{push, take};
use crate::transport::stream::HANDLE_BYTES;
use paramill_core::lease::Lease;
use paramill_core::limits;
use paramill_core::role::{Body, Turn};
use paramill_core::store::Allocate;

/// A worker's end and a data core's end, and the worker's memory.
fn shared_pair() -> (ShmCarrier, ShmCarrier, SharedAllocator) {
    let (left, right) = UnixStream::pair().unwrap();
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    let allocator = SharedAllocator::new();
    let memory = SharedMemory::connected(&left, allocator.clone()).unwrap();
    let mut worker = ShmCarrier::new(left, memory);
    let memory = SharedMemory::accepted(&right).unwrap();
    let mut core = ShmCarrier::new(right, memory);
    worker.let_in(Peer::Member);
    core.let_in(Peer::Member);
    (worker, core, allocator)
}

#[test]
fn payloads_elsewhere_are_handled_a_cacheful_at_a_time() {
    let (mut worker, mut core, allocator) = shared_pair();
    let len = 4 * limits::BLOCK_ELEMENTS;
    let frames = 3 * HANDLE_BYTES / len;
    let buffer = Lease::from(allocator.zeroed(len / 4));
    for request in 0..frames {
        let body = Body::Shared { buffer: buffer.clone(), start: 0, len };
        worker.queue(push(request as u64, body), Turn::InOrder);
    }
    assert_eq!(worker.flush(None, false).unwrap(), Flushed::Done);
    let mut turns = Vec::new();
    while turns.iter().sum::<usize>() < frames {
        core.receive(None).unwrap();
        let mut handled = 0;
        core.handle(usize::MAX, &mut |_, _| {
            handled += 1;
            true
        })
        .unwrap();
        turns.push(handled);
    }
    assert!(turns.iter().all(|handled| handled * len <= HANDLE_BYTES), "{turns:?}");
}

#[test]
fn a_few_descriptors_wait_for_what_is_about_to_come() {
    let (mut worker, mut core, allocator) = shared_pair();
    let buffer = Lease::from(allocator.zeroed(limits::BLOCK_ELEMENTS));
    let body = Body::Shared { buffer, start: 0, len: 4 * limits::BLOCK_ELEMENTS };
    let mut seen = Vec::new();
    worker.queue(push(1, body.clone()), Turn::InOrder);
    assert_eq!(worker.flush(None, true).unwrap(), Flushed::Enough);
    assert!(!worker.is_silent());
    take(&mut core, &mut seen);
    assert_eq!(seen, [], "nothing was written");
    worker.queue(push(2, body.clone()), Turn::InOrder);
    assert_eq!(worker.flush(None, false).unwrap(), Flushed::Done);
    take(&mut core, &mut seen);
    assert_eq!(seen, [(1, 0), (2, 0)]);
    // They do not wait for ever, whatever others bring.
    worker.queue(push(3, body.clone()), Turn::InOrder);
    let flushes = (0..).take_while(|_| worker.flush(None, true).unwrap() == Flushed::Enough).count();
    assert_eq!(flushes, LONGEST_HOLD as usize);
    assert!(worker.is_silent());
    take(&mut core, &mut seen);
    assert_eq!(seen.last(), Some(&(3, 0)));
    // Many do not wait.
    let many = SEND_BYTES / (HEADER_BYTES + DESCRIPTOR_BYTES);
    for request in 0..=many {
        worker.queue(push(request as u64, body.clone()), Turn::InOrder);
    }
    assert_eq!(worker.flush(None, true).unwrap(), Flushed::Enough);
    seen.clear();
    take(&mut core, &mut seen);
    assert!(!seen.is_empty());
}
