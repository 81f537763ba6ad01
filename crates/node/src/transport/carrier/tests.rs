//! Every carrier keeps the MUSTs of the trait: the same script for all of them, from dialling to hanging up.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use super::*;
use crate::transport::memory::Hub;
use crate::transport::shm::{self, SharedAllocator};
use crate::transport::tcp::{self, options::SocketOptions};
use crate::waker::{Doorbell, Waker};
use paramill_core::lease::Lease;
use paramill_core::limits;
use paramill_core::role::{Body, Lost, Output, Turn};
use paramill_core::store::{Allocate, Buffer};
use paramill_core::types::{ConnectionId, NodeId, Time};
use paramill_core::wire::{Hello, Kind, Refusal, Welcome};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A push with this payload.
pub(in crate::transport) fn push(request: u64, body: Body) -> Frame {
    let payload_bytes = body.bytes().unwrap().len() as u32;
    Frame { header: Header { request, payload_bytes, ..Header::new(Kind::Push) }, body }
}

/// Reads what is there, and notes the request and the payload's beginning of every frame that is whole.
pub(in crate::transport) fn take(connection: &mut dyn Carrier, seen: &mut Vec<(u64, u8)>) {
    connection.receive(None).unwrap();
    connection
        .handle(usize::MAX, &mut |header, payload| {
            let payload = payload.unwrap();
            assert!(payload.iter().all(|byte| *byte == payload[0]), "frame {} is torn", header.request);
            seen.push((header.request, payload[0]));
            true
        })
        .unwrap();
}

/// A role of which only the memory is used.
struct Store {
    bytes: Vec<u8>,
    refreshed: Cell<u64>,
}

impl Role for Store {
    fn node(&self) -> Option<NodeId> {
        None
    }

    fn accept(&mut self, _: Time, _: &Hello) -> Result<Welcome, Refusal> {
        unreachable!("nobody connects")
    }

    fn hello(&self, _: ConnectionId) -> Hello {
        unreachable!("it connects to nobody")
    }

    fn handle_connected(&mut self, _: Time, _: ConnectionId, _: &Welcome) {}

    fn handle_disconnected(&mut self, _: Time, _: ConnectionId, _: &Lost) {}

    fn handle_frame(&mut self, _: Time, _: ConnectionId, _: &Header, _: &[u8]) {}

    fn handle_timeout(&mut self, _: Time) {}

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn poll_output(&mut self) -> Option<Output> {
        None
    }

    fn refresh(&self, header: &mut Header) {
        header.version = 1;
        self.refreshed.set(self.refreshed.get() + 1);
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        match body {
            Body::Stored { start, len, .. } => &self.bytes[*start..*start + *len],
            other => other.bytes().unwrap(),
        }
    }
}

/// One end of a connection, and what tells that something may be done with it.
struct End {
    carrier: Box<dyn Carrier>,
    waker: Arc<Waker>,
}

impl End {
    fn new(mut carrier: Box<dyn Carrier>) -> End {
        let waker = Waker::new().unwrap();
        if carrier.descriptor().is_none() {
            carrier.ring_with(Doorbell::new(&waker, 7));
        }
        End { carrier, waker }
    }

    /// Waits until it may be possible to read, or to write.
    fn wait_for(&mut self, flags: PollFlags) {
        let longest = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        let mut watched = match self.carrier.descriptor() {
            Some(descriptor) => [PollFd::from_borrowed_fd(descriptor, flags)],
            None => [PollFd::from_borrowed_fd(self.waker.descriptor(), PollFlags::IN)],
        };
        assert!(poll(&mut watched, Some(&longest)).unwrap() > 0, "nothing happened");
        let mut keys = Vec::new();
        self.waker.take(&mut keys);
        assert!(keys.iter().all(|key| *key == 7));
    }

    /// Whether there is something to take now.
    fn is_readable(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_ready = |descriptor| {
            poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], Some(&now)).unwrap() > 0
        };
        self.carrier.has_leftovers() || self.carrier.descriptor().is_some_and(is_ready)
    }

    /// Takes up to `most` of the frames that are here: their numbers, versions, and what their payloads consist of.
    fn take(&mut self, most: usize, seen: &mut Vec<(u64, u64, usize, u8)>) -> Result<(), ReceiveError> {
        self.carrier.receive(None)?;
        let mut left = most;
        self.carrier.handle(usize::MAX, &mut |header, payload| {
            let payload = payload.expect("nobody said where payloads belong");
            let first = payload.first().copied().unwrap_or_default();
            assert!(payload.iter().all(|byte| *byte == first), "frame {} is torn", header.request);
            seen.push((header.request, header.version, payload.len(), first));
            left -= 1;
            left > 0
        })
    }

    /// Takes frames until there are so many.
    fn take_until(&mut self, count: usize, seen: &mut Vec<(u64, u64, usize, u8)>) {
        while seen.len() < count {
            if !self.carrier.has_leftovers() {
                self.wait_for(PollFlags::IN);
            }
            self.take(usize::MAX, seen).unwrap();
        }
    }

    /// Takes everything until the peer has hung up.
    fn take_to_the_end(&mut self, seen: &mut Vec<(u64, u64, usize, u8)>) -> ReceiveError {
        loop {
            if !self.carrier.has_leftovers() {
                self.wait_for(PollFlags::IN);
            }
            if let Err(error) = self.take(usize::MAX, seen) {
                return error;
            }
        }
    }
}

/// A transport under test.
struct Way {
    name: &'static str,
    listener: Box<dyn Listener>,
    dial: Box<dyn Fn() -> Box<dyn Carrier>>,
    memory: SharedAllocator,
}

impl Way {
    fn all() -> [Way; 3] {
        let (sockets, memory) = (SocketOptions::new(None).unwrap(), SharedAllocator::new());
        let bound = tcp::listen("127.0.0.1:0").unwrap();
        let target = bound.local_addr().unwrap();
        let tcp = Way {
            name: "tcp",
            listener: tcp::listener(bound, &sockets),
            dial: Box::new(move || tcp::dial(target, &sockets).unwrap()),
            memory: memory.clone(),
        };
        let name = format!("conformance-{}-{:?}", std::process::id(), std::thread::current().id());
        let (bound, address) = shm::listen(&name).unwrap();
        let shared = memory.clone();
        let shm = Way {
            name: "shm",
            listener: Box::new(bound),
            dial: Box::new(move || shm::dial(&address, &shared).unwrap()),
            memory: memory.clone(),
        };
        let hub = Hub::new();
        let in_memory = Way {
            name: "memory",
            listener: hub.listen("mem:test"),
            dial: Box::new(move || hub.dial("mem:test").unwrap()),
            memory,
        };
        [tcp, shm, in_memory]
    }

    /// A dialling end and a taking end that have been let in.
    fn connect(&self) -> (End, End) {
        let mut near = End::new((self.dial)());
        near.wait_for(PollFlags::OUT);
        assert!(near.carrier.take_error().unwrap().is_none(), "{}", self.name);
        let began = Instant::now();
        let far = loop {
            match self.listener.accept() {
                Ok(taken) => break taken.unwrap(),
                Err(error) => assert!(
                    error.kind() == io::ErrorKind::WouldBlock && began.elapsed() < TIMEOUT,
                    "{}: {error}",
                    self.name
                ),
            }
        };
        assert_eq!(self.listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let mut ends = (near, End::new(far));
        ends.0.carrier.let_in(Peer::Member);
        ends.1.carrier.let_in(Peer::Member);
        ends
    }
}

fn frame(request: u64, body: Body) -> Frame {
    let len = match &body {
        Body::Stored { len, .. } => *len,
        other => other.bytes().unwrap().len(),
    };
    Frame { header: Header { request, payload_bytes: len as u32, ..Header::new(Kind::Push) }, body }
}

fn lent(mut buffer: Buffer, value: u8, len: usize) -> Body {
    bytemuck::cast_slice_mut::<f32, u8>(buffer.as_mut_slice()).fill(value);
    Body::Shared { buffer: Lease::from(buffer), start: 0, len }
}

#[test]
fn frames_of_every_kind_arrive_whole_and_in_order_in_both_directions() {
    for way in Way::all() {
        let (mut near, mut far) = way.connect();
        let mut role = Store { bytes: vec![0; 200_000], refreshed: Cell::new(0) };
        for (from, to) in [(true, false), (false, true)] {
            let (mut expected, mut stored) = (Vec::new(), 0);
            let sender = if from { &mut near } else { &mut far };
            for request in 0..300 {
                let len = request as usize * 977 % 150_000;
                let value = request as u8;
                let (body, version) = match request % 5 {
                    0 => (Body::Empty, 0),
                    1 => (Body::Bytes(vec![value; len]), 0),
                    2 => (lent(way.memory.zeroed(len.div_ceil(4).max(1)), value, len), 0),
                    3 => (lent(Buffer::zeroed(len.div_ceil(4).max(1)), value, len), 0),
                    _ => {
                        stored += 1;
                        (Body::Stored { buffer: 0, start: 0, len }, 1)
                    }
                };
                let (len, value) = match request % 5 {
                    0 => (0, 0),
                    4 => (len, 99),
                    _ => (len, value),
                };
                expected.push((request, version, len, if len == 0 { 0 } else { value }));
                sender.carrier.queue(frame(request, body), Turn::InOrder);
            }
            assert!(!sender.carrier.is_silent());
            // What a role stores is read when it is sent, not when it is queued.
            role.bytes.fill(99);
            role.refreshed.set(0);
            let mut seen = Vec::new();
            let began = Instant::now();
            while seen.len() < expected.len() {
                let (sender, receiver) = if from { (&mut near, &mut far) } else { (&mut far, &mut near) };
                sender.carrier.flush(Some(&role), false).unwrap();
                // Now and then a few at a time.
                receiver.take(if seen.len() % 3 == 0 { 2 } else { usize::MAX }, &mut seen).unwrap();
                assert!(began.elapsed() < TIMEOUT, "{}: {} frames arrived", way.name, seen.len());
            }
            assert!(seen == expected, "{}, to the {}", way.name, if to { "dialler" } else { "listener" });
            assert!(role.refreshed.get() >= stored, "{}", way.name);
            role.bytes.fill(0);
        }
        assert!(near.carrier.is_silent() && far.carrier.is_silent());
    }
}

#[test]
fn frames_that_were_enough_for_now_are_handled_later() {
    for way in Way::all() {
        let (mut near, mut far) = way.connect();
        (0..10)
            .for_each(|request| near.carrier.queue(frame(request, Body::Bytes(vec![1; 100])), Turn::InOrder));
        assert_eq!(near.carrier.flush(None, false).unwrap(), Flushed::Done);
        let mut seen = Vec::new();
        far.wait_for(PollFlags::IN);
        while seen.len() < 10 {
            let before = seen.len();
            far.take(3, &mut seen).unwrap();
            assert!(seen.len() <= before + 3, "{}", way.name);
            assert_eq!(far.carrier.has_leftovers(), seen.len() < 10, "{}", way.name);
        }
    }
}

#[test]
fn a_peer_that_takes_nothing_is_waited_for_and_makes_a_carrier_congested() {
    for way in Way::all() {
        let (mut near, mut far) = way.connect();
        let (megabyte, mut queued) = (1 << 20, 0);
        while !near.carrier.is_congested() {
            near.carrier.queue(frame(queued, Body::Bytes(vec![5; megabyte])), Turn::InOrder);
            queued += 1;
            while near.carrier.flush(None, false).unwrap() == Flushed::Enough {}
            // A megabyte is in the carrier or on its way; sockets have buffers, too.
            assert!(queued as usize <= limits::MAX_BACKLOG_BYTES / megabyte + 64, "{}", way.name);
        }
        assert_eq!(near.carrier.flush(None, false).unwrap(), Flushed::Blocked, "{}", way.name);
        // A socket's buffer may be shorter than one of them.
        assert!(!near.carrier.is_silent() && queued as usize >= limits::MAX_BACKLOG_BYTES / megabyte);
        let mut seen = Vec::new();
        far.wait_for(PollFlags::IN);
        let mut flushed = Flushed::Blocked;
        while flushed != Flushed::Done {
            while far.is_readable() {
                far.take(usize::MAX, &mut seen).unwrap();
            }
            if flushed == Flushed::Blocked {
                near.wait_for(PollFlags::OUT);
            }
            flushed = near.carrier.flush(None, false).unwrap();
        }
        assert!(near.carrier.is_silent() && !near.carrier.is_congested(), "{}", way.name);
        far.take_until(queued as usize, &mut seen);
        assert!(seen.iter().map(|(request, ..)| *request).eq(0..queued), "{}", way.name);
    }
}

#[test]
fn a_command_is_congested_by_what_it_has_not_taken() {
    for way in Way::all() {
        let (mut near, _far) = way.connect();
        near.carrier.let_in(Peer::Command);
        assert!(!near.carrier.is_congested(), "{}", way.name);
        near.carrier.queue(frame(0, Body::Empty), Turn::InOrder);
        assert!(near.carrier.is_congested(), "{}", way.name);
        assert_eq!(near.carrier.flush(None, false).unwrap(), Flushed::Done);
        assert!(!near.carrier.is_congested(), "{}", way.name);
    }
}

#[test]
fn a_payload_beyond_the_limit_is_an_error() {
    for way in Way::all() {
        let (mut near, mut far) = way.connect();
        near.carrier.queue(frame(0, Body::Bytes(vec![1; 100])), Turn::InOrder);
        near.carrier.queue(frame(1, Body::Bytes(vec![1; 101])), Turn::InOrder);
        near.carrier.flush(None, false).unwrap();
        far.wait_for(PollFlags::IN);
        far.carrier.receive(None).unwrap();
        let mut taken = 0;
        let handled = far.carrier.handle(100, &mut |header, _| {
            assert_eq!(header.request, 0);
            taken += 1;
            true
        });
        let error = handled.unwrap_err();
        let is_known = matches!(error, ReceiveError::Wire(WireError::TooLong { bytes: 101, limit: 100, .. }));
        assert!(is_known && taken == 1, "{}: {error}", way.name);
    }
}

#[test]
fn last_words_arrive_before_the_end() {
    for way in Way::all() {
        for is_dropped in [false, true] {
            let (mut near, mut far) = way.connect();
            (0..20).for_each(|request| {
                near.carrier.queue(frame(request, Body::Bytes(vec![3; 1000])), Turn::InOrder)
            });
            assert_eq!(near.carrier.flush(None, false).unwrap(), Flushed::Done);
            let kept = if is_dropped {
                drop(near);
                None
            } else {
                near.carrier.hang_up();
                Some(near)
            };
            let mut seen = Vec::new();
            let error = far.take_to_the_end(&mut seen);
            assert_eq!((seen.len(), error.to_string().as_str()), (20, "the peer closed"), "{}", way.name);
            // Who hung up still hears the other end.
            if let Some(mut near) = kept {
                far.carrier.queue(frame(0, Body::Bytes(vec![4; 1000])), Turn::InOrder);
                assert_eq!(far.carrier.flush(None, false).unwrap(), Flushed::Done, "{}", way.name);
                drop(far);
                seen.clear();
                near.take_to_the_end(&mut seen);
                assert_eq!(seen, [(0, 0, 1000, 4)], "{}", way.name);
                near.carrier.queue(frame(1, Body::Empty), Turn::InOrder);
                assert!(near.carrier.flush(None, false).is_err(), "{}", way.name);
            }
        }
    }
}

#[test]
fn sending_to_a_peer_that_is_gone_fails() {
    for way in Way::all() {
        let (mut near, far) = way.connect();
        drop(far);
        let began = Instant::now();
        while near
            .carrier
            .flush(None, false)
            .inspect(|_| near.carrier.queue(frame(0, Body::Bytes(vec![0; 1000])), Turn::InOrder))
            .is_ok()
        {
            assert!(began.elapsed() < TIMEOUT, "{}", way.name);
            std::thread::yield_now();
        }
    }
}
