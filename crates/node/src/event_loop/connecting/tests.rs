//! Names that take long to resolve: the loop goes on meanwhile, and gives up in time.

use crate::clock;
use crate::event_loop::{EventLoop, Injection, Owned, Setup, Strangers};
use crate::transport::Transport;
use crate::transport::memory::Mailbox;
use crate::transport::options::SocketOptions;
use crate::transport::resolver::Resolve;
use crate::transport::shm::SharedAllocator;
use paramill_core::role::{Lost, Output, Role};
use paramill_core::types::{NodeId, Time};
use paramill_core::wire::{Header, Hello, Party, Refusal, Welcome};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Asks for one connection to a host with a name, and ends with what becomes of it.
struct Caller {
    outputs: VecDeque<Output>,
    next: Time,
    timeouts: u32,
    on_timeout: fn(u32),
}

impl Role for Caller {
    fn node(&self) -> Option<NodeId> {
        None
    }

    fn accept(&mut self, _now: Time, _hello: &Hello) -> Result<Welcome, Refusal> {
        Err(Refusal { reason: "nobody is expected".into(), retry: false })
    }

    fn hello(&self, _peer: NodeId) -> Hello {
        Hello { job: "test".into(), from: Party::Command, incarnation: 0 }
    }

    fn handle_connected(&mut self, _now: Time, _peer: NodeId, _welcome: &Welcome) {}

    fn handle_disconnected(&mut self, _now: Time, _peer: NodeId, why: &Lost) {
        self.outputs.push_back(Output::Stop { error: Some(why.to_string()) });
    }

    fn handle_frame(&mut self, _now: Time, _from: NodeId, _header: &Header, _payload: &[u8]) {}

    fn handle_timeout(&mut self, now: Time) {
        self.next = now + Duration::from_millis(1);
        self.timeouts += 1;
        (self.on_timeout)(self.timeouts);
    }

    fn next_timeout(&self) -> Option<Time> {
        Some(self.next)
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }
}

/// What becomes of a connection to `address` whose name this function resolves.
fn outcome(address: &str, resolve: Resolve, on_timeout: fn(u32)) -> String {
    let connect = Output::Connect { peer: NodeId::Coordinator, address: address.into() };
    let role = Caller { outputs: [connect].into(), next: clock::now(), timeouts: 0, on_timeout };
    let setup = Setup {
        listeners: Vec::new(),
        resolve,
        sockets: SocketOptions::new(None).unwrap(),
        transport: Transport::Tcp,
        memory: SharedAllocator::new(),
        hub: None,
        mailbox: Mailbox::new().unwrap(),
        stop: Arc::new(AtomicBool::new(false)),
        strangers: Strangers::new(),
        injection: Injection::default(),
        log: |_| {},
    };
    EventLoop::new(Owned(role), setup).unwrap().run().unwrap_err()
}

/// Blocks until somebody lets go, or for as long as nobody should wait.
fn blocked_until(released: &AtomicBool) -> io::Result<Vec<SocketAddr>> {
    let began = Instant::now();
    while !released.load(Ordering::Relaxed) {
        if began.elapsed() > Duration::from_secs(20) {
            return Err(io::Error::other("nobody let go"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // Nobody listens at this port of this host.
    Ok(vec![SocketAddr::from(([127, 0, 0, 1], 1))])
}

#[test]
fn a_loop_goes_on_while_a_name_is_resolved() {
    static RELEASED: AtomicBool = AtomicBool::new(false);
    let error = outcome(
        "a.host:7070",
        |_| blocked_until(&RELEASED),
        |timeouts| {
            RELEASED.store(timeouts >= 10, Ordering::Relaxed);
        },
    );
    assert!(error.contains("refused"), "the address was not tried: {error}");
}

#[test]
fn a_name_that_takes_too_long_is_given_up_with_a_sentence() {
    static NEVER: AtomicBool = AtomicBool::new(false);
    let error = outcome("a.host:7070", |_| blocked_until(&NEVER), |_| {});
    assert!(error.contains("the name in `a.host:7070` was not resolved within 5 s"), "{error}");
}

#[test]
fn numbers_need_no_resolver_and_errors_are_passed_on() {
    let error = outcome("127.0.0.1:1", |_| panic!("numbers are no name"), |_| {});
    assert!(error.contains("refused"), "{error}");
    let error = outcome("a.host:1", |_| Err(io::Error::other("no such host")), |_| {});
    assert_eq!(error, "no such host");
}
