//! Names that take long to resolve: the loop goes on meanwhile, and gives up in time.

use crate::checkpoint::Place;
use crate::clock;
use crate::event_loop::{EventLoop, Injection, Owned, Setup, Strangers};
use crate::log::Log;
use crate::transport::resolver::Resolve;
use crate::transport::shm::SharedAllocator;
use crate::transport::tcp::options::SocketOptions;
use crate::transport::{Dialler, Transport};
use crate::waker::Waker;
use paramill_core::role::{Lost, Output, Role};
use paramill_core::types::{ConnectionId, NodeId, Time};
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
    again: Option<Again>,
    /// At which of its timeouts it heard that its first attempt was given up.
    given_up_at: Option<u32>,
}

/// A second attempt at the same address, and when the answer for the first one comes: both in timeouts of the caller, which
/// are a millisecond apart, after the first attempt was given up.
struct Again {
    address: &'static str,
    ask_after: u32,
    answer_after: u32,
    answer: &'static AtomicBool,
}

impl Role for Caller {
    fn node(&self) -> Option<NodeId> {
        None
    }

    fn accept(&mut self, _now: Time, _hello: &Hello) -> Result<Welcome, Refusal> {
        Err(Refusal { reason: "nobody is expected".into(), retry: false })
    }

    fn hello(&self, _connection: ConnectionId) -> Hello {
        Hello { job: "test".into(), from: Party::Command, incarnation: 0, to: None }
    }

    fn handle_connected(&mut self, _now: Time, _connection: ConnectionId, _welcome: &Welcome) {}

    fn handle_disconnected(&mut self, _now: Time, _connection: ConnectionId, why: &Lost) {
        match (&self.again, self.given_up_at) {
            (Some(_), None) => self.given_up_at = Some(self.timeouts),
            _ => self.outputs.push_back(Output::Stop { error: Some(why.to_string()) }),
        }
    }

    fn handle_frame(&mut self, _now: Time, _connection: ConnectionId, _header: &Header, _payload: &[u8]) {}

    fn handle_timeout(&mut self, now: Time) {
        self.next = now + Duration::from_millis(1);
        self.timeouts += 1;
        (self.on_timeout)(self.timeouts);
        if let (Some(again), Some(given_up_at)) = (&self.again, self.given_up_at) {
            if self.timeouts == given_up_at + again.ask_after {
                self.outputs.push_back(connect(again.address));
            }
            again.answer.store(self.timeouts >= given_up_at + again.answer_after, Ordering::Relaxed);
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        Some(self.next)
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }
}

fn connect(address: &str) -> Output {
    Output::Connect { connection: NodeId::Coordinator.into(), address: address.into() }
}

/// What becomes of a connection to `address` whose name this function resolves.
fn outcome(address: &str, resolve: Resolve, on_timeout: fn(u32)) -> String {
    outcome_of(address, resolve, on_timeout, None)
}

fn outcome_of(address: &str, resolve: Resolve, on_timeout: fn(u32), again: Option<Again>) -> String {
    let outputs = [connect(address)].into();
    let role = Caller { outputs, next: clock::now(), timeouts: 0, on_timeout, again, given_up_at: None };
    let setup = Setup {
        listeners: Vec::new(),
        open: None,
        start_core: None,
        resolve,
        dialler: Dialler {
            transport: Transport::Tcp,
            sockets: SocketOptions::new(None).unwrap(),
            memory: SharedAllocator::new(),
            hub: None,
            elected: None,
        },
        waker: Waker::new().unwrap(),
        stop: Arc::new(AtomicBool::new(false)),
        strangers: Strangers::new(),
        injection: Injection::default(),
        checkpoints: Place::default(),
        log: Log::none(),
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

/// Resolves a name once, as late as it is let, and never again.
fn resolved_once(asked: &AtomicBool, answer: &AtomicBool) -> io::Result<Vec<SocketAddr>> {
    if asked.swap(true, Ordering::Relaxed) {
        Err(io::Error::other("the name was asked for again"))
    } else {
        blocked_until(answer)
    }
}

#[test]
fn an_answer_that_comes_late_serves_the_next_attempt_for_the_same_name() {
    static ASKED: AtomicBool = AtomicBool::new(false);
    static ANSWER: AtomicBool = AtomicBool::new(false);
    let again = Again { address: "a.host:7070", ask_after: 1, answer_after: 50, answer: &ANSWER };
    let error = outcome_of("a.host:7070", |_| resolved_once(&ASKED, &ANSWER), |_| {}, Some(again));
    assert!(error.contains("refused"), "the address was not tried: {error}");
}

#[test]
fn an_answer_that_comes_between_two_attempts_serves_the_second() {
    static ASKED: AtomicBool = AtomicBool::new(false);
    static ANSWER: AtomicBool = AtomicBool::new(false);
    let again = Again { address: "a.host:7070", ask_after: 200, answer_after: 1, answer: &ANSWER };
    let error = outcome_of("a.host:7070", |_| resolved_once(&ASKED, &ANSWER), |_| {}, Some(again));
    assert!(error.contains("refused"), "the address was not tried: {error}");
}

#[test]
fn a_name_that_is_never_resolved_does_not_keep_another_waiting() {
    static NEVER: AtomicBool = AtomicBool::new(false);
    let resolve: Resolve = |name| match name {
        "slow.host:1" => blocked_until(&NEVER),
        _ => Ok(vec![SocketAddr::from(([127, 0, 0, 1], 1))]),
    };
    let again = Again { address: "fast.host:1", ask_after: 1, answer_after: u32::MAX / 2, answer: &NEVER };
    let error = outcome_of("slow.host:1", resolve, |_| {}, Some(again));
    assert!(error.contains("refused"), "the address was not tried: {error}");
}
