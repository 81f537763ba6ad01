//! A loop that panics: whoever waits for it is told, and no process stays that only looks as if it served. What panics
//! here is where log lines go, as it does when a program's own logger fails.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_core::role::Body;
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, WorkerId};
use paramill_core::wire::control::frame;
use paramill_core::wire::{HEADER_BYTES, Header, Kind, Welcome, padded};
use paramill_node::Transport;
use paramill_node::client::{Job, JobOptions, Table};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::{Level, Log};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Far longer than anything here takes, and shorter than the 30 s after which a peer that is away is given up.
const TIMEOUT: Duration = Duration::from_secs(20);

fn panicking_log(_: Level, line: &str) {
    if line.contains("refused a connection") || line.contains("ignored a") {
        panic!("nobody takes `{line}`");
    }
}

fn options(address: &str) -> JobOptions {
    let url = format!("paramill://{address}/test").parse().unwrap();
    JobOptions::at(url).rank(0).timeout(TIMEOUT).log(|_, _| {})
}

fn started() -> (Server, Job, Table) {
    let policy = Policy::default().with(Axis::Sync, "asp");
    let coordinate = Some(JobConfig { policy, ..JobConfig::new("test", 1, 1) });
    let config = ServerConfig {
        coordinate,
        cores: 2,
        transport: Transport::Tcp,
        log: Log::new(panicking_log),
        ..ServerConfig::new("test", "127.0.0.1:0")
    };
    let server = server::start(config, &Arc::new(Registry::builtin())).unwrap();
    let job = Job::init(options(server.coordinator())).unwrap();
    let table = job.table(TableSpec::dense("w", [100]), vec![0.0; 100]).unwrap();
    job.start().unwrap();
    (server, job, table)
}

/// Bytes that no peer sends: they are refused, with a line in the log.
fn send_noise(address: &str) {
    TcpStream::connect(address).unwrap().write_all(&[0xff; 4096]).unwrap();
}

#[test]
fn a_server_whose_coordinator_panics_ends_with_that_sentence_and_so_does_the_job() {
    let (server, job, table) = started();
    send_noise(server.coordinator());
    let error = server.join().unwrap_err();
    assert!(error.contains("the event loop of `coordinator` panicked: nobody takes `refused"), "{error}");
    let error = loop {
        let updated = table.update(&[1.0; 100]).and_then(|()| table.sync());
        job.clock();
        if let Err(error) = updated {
            break error.to_string();
        }
    };
    assert!(error.contains("the event loop of `coordinator` panicked"), "{error}");
}

#[test]
fn a_server_whose_data_core_panics_ends_with_that_sentence_and_so_does_the_job() {
    let (server, job, table) = started();
    send_noise(server.data_addresses()[1].iter().next().unwrap());
    let error = server.join().unwrap_err();
    assert!(error.contains("the event loop of `data core 1` panicked: nobody takes `refused"), "{error}");
    let error = loop {
        let updated = table.update(&[1.0; 100]).and_then(|()| table.sync());
        job.clock();
        if let Err(error) = updated {
            break error.to_string();
        }
    };
    assert!(error.contains("server 0 core 1: the event loop of `data core 1` panicked"), "{error}");
}

/// Takes a worker in, and sends it a frame that it has a line for in its log.
fn take_in_and_confuse(listener: &TcpListener) -> TcpStream {
    let mut stream = listener.accept().unwrap().0;
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).unwrap();
    let hello = Header::decode(&head).unwrap();
    assert_eq!(hello.kind, Kind::Hello);
    stream.read_exact(&mut vec![0; padded(hello.payload_bytes as usize)]).unwrap();
    let welcome =
        frame(Kind::Welcome, &Welcome { you: NodeId::Worker(WorkerId(0)), incarnation: 1, session: 0 });
    let Body::Bytes(mut payload) = welcome.body else { panic!("a welcome carries bytes") };
    payload.resize(padded(payload.len()), 0);
    let bytes = [&welcome.header.encode()[..], &payload, &Header::new(Kind::Pull).encode()].concat();
    stream.write_all(&bytes).unwrap();
    stream
}

#[test]
fn waits_of_a_worker_whose_loop_panics_end_with_that_sentence() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let job = Job::init(options(&address).log(panicking_log)).unwrap();
    job.table(TableSpec::dense("w", [100]), vec![0.0; 100]).unwrap();
    let error = std::thread::scope(|scope| {
        let start = scope.spawn(|| job.start().unwrap_err().to_string());
        let _stream = take_in_and_confuse(&listener);
        start.join().unwrap()
    });
    assert!(
        error.contains("the event loop of `paramill worker` panicked: nobody takes `ignored a Pull"),
        "{error}"
    );
    // What is asked afterwards is answered with the same.
    let error = job.status().unwrap_err().to_string();
    assert!(error.contains("the event loop of `paramill worker` panicked"), "{error}");
}
