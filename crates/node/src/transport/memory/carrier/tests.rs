//! Peers within a process that break the rules of the handshake: they are answered, and hung up on, as over TCP.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use super::*;
use crate::log::Log;
use crate::server::{self, Server, ServerConfig};
use crate::transport::memory::{Hub, SCHEME};
use paramill_core::coordinator::JobConfig;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::wire::control::{decode, frame};
use paramill_core::wire::{HEADER_BYTES, Hello, Party, Refusal, padded};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Weak;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);

/// The first bytes of a peer.
#[derive(Clone)]
struct First {
    head: [u8; HEADER_BYTES],
    payload: Vec<u8>,
}

/// What it gets: frames, until it is hung up on.
type Answers = Vec<(Kind, Vec<u8>)>;

fn start(memory: Option<&Hub>) -> Server {
    let config = ServerConfig {
        coordinate: Some(JobConfig::new("test", 1, 1)),
        cores: 0,
        memory: memory.cloned(),
        log: Log::none(),
        ..ServerConfig::new("test", "127.0.0.1:0")
    };
    server::start(config, &Arc::new(Registry::builtin())).unwrap()
}

fn over_tcp(server: &Server, first: Option<&First>) -> Answers {
    let mut stream = TcpStream::connect(server.coordinator()).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    if let Some(First { head, payload }) = first {
        let mut bytes = head.to_vec();
        bytes.extend_from_slice(payload);
        bytes.resize(HEADER_BYTES + padded(payload.len()), 0);
        stream.write_all(&bytes).unwrap();
    }
    let (mut answers, mut head) = (Answers::new(), [0; HEADER_BYTES]);
    loop {
        match stream.read_exact(&mut head) {
            Ok(()) => {}
            Err(error) if [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset].contains(&error.kind()) => {
                return answers;
            }
            Err(error) => panic!("nobody hangs up: {error}"),
        }
        let header = Header::decode(&head).unwrap();
        let mut payload = vec![0; padded(header.payload_bytes as usize)];
        stream.read_exact(&mut payload).unwrap();
        payload.truncate(header.payload_bytes as usize);
        answers.push((header.kind, payload));
    }
}

fn over_memory(hub: &Hub, first: Option<&First>) -> Answers {
    let (mut ours, theirs) = MemoryCarrier::pair();
    let entrance = hub.lock().get(&format!("{SCHEME}coordinator")).and_then(Weak::upgrade).unwrap();
    assert!(entrance.enter(theirs));
    if let Some(First { head, payload }) = first {
        ours.outgoing.put(&mut VecDeque::from([Letter::raw(*head, payload.clone())]), false);
    }
    let (mut answers, began) = (Answers::new(), Instant::now());
    while ours.receive(None).is_ok() {
        let note = &mut |header: &Header, payload: Option<&[u8]>| {
            answers.push((header.kind, payload.unwrap().to_vec()));
            true
        };
        ours.handle(usize::MAX, note).unwrap();
        assert!(began.elapsed() < TIMEOUT, "nobody hangs up");
        std::thread::sleep(Duration::from_millis(1));
    }
    answers
}

fn first(frame: &Frame) -> First {
    First { head: frame.header.encode(), payload: frame.body.bytes().unwrap().to_vec() }
}

fn hello(job: &str) -> First {
    first(&frame(
        Kind::Hello,
        &Hello { job: job.into(), from: Party::Worker { rank: None }, incarnation: 0, to: None },
    ))
}

/// Each way's answers to the same first bytes, which are the same.
fn answers(first: Option<&First>) -> Answers {
    let hub = Hub::new();
    let (in_memory, tcp) = (start(Some(&hub)), start(None));
    let found = over_memory(&hub, first);
    assert_eq!(found, over_tcp(&tcp, first));
    in_memory.stop();
    tcp.stop();
    found
}

/// The only answer, which refuses the peer for good.
fn refusal(first: &First) -> String {
    match answers(Some(first)).as_slice() {
        [(Kind::Error, payload)] => {
            let refusal: Refusal = decode("refusal", payload).unwrap();
            assert!(!refusal.retry, "{refusal}");
            refusal.reason
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_peer_of_another_release_is_refused() {
    let mut other = hello("test");
    other.head[4] += 1;
    let reason = refusal(&other);
    assert!(reason.contains("wire version") && reason.contains("install the same release"), "{reason}");
}

#[test]
fn a_peer_of_another_job_is_refused() {
    let reason = refusal(&hello("another"));
    assert!(reason.contains("another"), "{reason}");
}

#[test]
fn a_first_frame_that_is_no_hello_or_too_long_is_refused() {
    let header = Header { payload_bytes: 4, ..Header::new(Kind::Control) };
    let reason = refusal(&First { head: header.encode(), payload: vec![0; 4] });
    assert!(reason.contains("expected a hello first"), "{reason}");
    let bytes = limits::MAX_HELLO_BYTES + 1;
    let header = Header { payload_bytes: bytes as u32, ..Header::new(Kind::Hello) };
    let reason = refusal(&First { head: header.encode(), payload: vec![0; bytes] });
    assert!(reason.contains(&bytes.to_string()), "{reason}");
    let share = Header::new(Kind::Share);
    let reason = refusal(&First { head: share.encode(), payload: Vec::new() });
    assert!(reason.contains("kind"), "{reason}");
}

#[test]
fn a_peer_that_never_says_hello_is_hung_up_on() {
    assert_eq!(answers(None), []);
}
