//! A role that panics again when it is asked for more: the others are told all the same.

use crate::checkpoint::Place;
use crate::event_loop::{EventLoop, Injection, Owned, Setup, Strangers};
use crate::log::{Level, Log};
use crate::transport::shm::SharedAllocator;
use crate::transport::tcp::{self, options::SocketOptions};
use crate::transport::{Dialler, Transport};
use crate::waker::Waker;
use paramill_core::role::{Body, Frame, Lost, Output, Role};
use paramill_core::types::{ConnectionId, NodeId, Time, WorkerId};
use paramill_core::wire::control::{decode, frame};
use paramill_core::wire::{Control, HEADER_BYTES, Header, Hello, Kind, Party, Refusal, Welcome, padded};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Lets two workers in. Then it stores a payload for the second one that it cannot find, and panics.
struct Fragile {
    accepted: u32,
    outputs: VecDeque<Output>,
}

impl Role for Fragile {
    fn node(&self) -> Option<NodeId> {
        Some(NodeId::Coordinator)
    }

    fn accept(&mut self, _now: Time, _hello: &Hello) -> Result<Welcome, Refusal> {
        let you = NodeId::Worker(WorkerId(self.accepted));
        self.accepted += 1;
        if self.accepted == 2 {
            let header = Header { payload_bytes: 64, ..frame(Kind::Control, &Control::Leave).header };
            let frame = Frame { header, body: Body::Stored { buffer: 0, start: 0, len: 64 } };
            self.outputs.extend([Output::send(you, frame), Output::Log(Level::Info, "the last line".into())]);
        }
        Ok(Welcome { you, incarnation: 0, session: 0 })
    }

    fn hello(&self, _connection: ConnectionId) -> Hello {
        Hello { job: "test".into(), from: Party::Command, incarnation: 0, to: None }
    }

    fn handle_connected(&mut self, _now: Time, _connection: ConnectionId, _welcome: &Welcome) {}

    fn handle_disconnected(&mut self, _now: Time, connection: ConnectionId, _why: &Lost) {
        panic!("{connection} is lost on a role that panicked");
    }

    fn handle_frame(&mut self, _now: Time, _connection: ConnectionId, _header: &Header, _payload: &[u8]) {}

    fn handle_timeout(&mut self, _now: Time) {}

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        body.bytes().expect("the stored payload is lost")
    }
}

fn receive(stream: &mut TcpStream) -> (Kind, Vec<u8>) {
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes).expect("a header");
    let header = Header::decode(&bytes).expect("a valid header");
    let mut payload = vec![0; padded(header.payload_bytes as usize)];
    stream.read_exact(&mut payload).expect("a payload");
    payload.truncate(header.payload_bytes as usize);
    (header.kind, payload)
}

fn join(address: &str, rank: u32) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the loop listens");
    let from = Party::Worker { rank: Some(WorkerId(rank)) };
    let hello = frame(Kind::Hello, &Hello { job: "test".into(), from, incarnation: 0, to: None });
    let mut bytes = hello.header.encode().to_vec();
    bytes.extend_from_slice(hello.body.bytes().expect("a hello carries bytes"));
    bytes.resize(HEADER_BYTES + padded(hello.header.payload_bytes as usize), 0);
    stream.write_all(&bytes).expect("the loop reads");
    stream
}

#[test]
fn everybody_is_told_of_a_panic_though_one_of_them_cannot_be() {
    let listener = tcp::listen("127.0.0.1:0").expect("loopback is always there");
    let address = listener.local_addr().expect("it is bound").to_string();
    let sockets = SocketOptions::new(None).expect("sockets as they are");
    let setup = Setup {
        listeners: vec![tcp::listener(listener, &sockets)],
        open: None,
        start_core: None,
        resolve: tcp::resolve,
        dialler: Dialler {
            transport: Transport::Tcp,
            sockets,
            memory: SharedAllocator::new(),
            hub: None,
            elected: None,
        },
        waker: Waker::new().expect("an eventfd"),
        stop: Arc::new(AtomicBool::new(false)),
        strangers: Strangers::new(),
        injection: Injection::default(),
        checkpoints: Place::default(),
        log: Log::new(|_, line| panic!("nobody takes `{line}`")),
    };
    let role = Owned(Fragile { accepted: 0, outputs: VecDeque::new() });
    let running = std::thread::spawn(|| EventLoop::new(role, setup).expect("an event loop").run());
    let mut first = join(&address, 0);
    assert_eq!(receive(&mut first).0, Kind::Welcome);
    let _second = join(&address, 1);
    let (kind, payload) = receive(&mut first);
    let told = decode::<Control>("control message", &payload).expect("a control message");
    assert!(
        kind == Kind::Control
            && matches!(&told, Control::Stop { error: Some(why) } if why.contains("the last line")),
        "{told:?}"
    );
    let error = running.join().expect("the panic is caught").expect_err("the loop panicked");
    assert!(error.contains("nobody takes `the last line`"), "{error}");
}
