//! Strangers that take all they can get: members of the job do not notice.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::role::{Body, Frame};
use paramill_core::wire::control::{decode, frame};
use paramill_core::wire::{Control, HEADER_BYTES, Header, Hello, Kind, Party, padded};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
const LIMIT: Duration = Duration::from_secs(60);

fn encode(frame: Frame) -> Vec<u8> {
    let Body::Bytes(payload) = frame.body else { panic!("control frames carry bytes") };
    let mut bytes = [&frame.header.encode()[..], &payload].concat();
    bytes.resize(HEADER_BYTES + padded(payload.len()), 0);
    bytes
}

/// The first frame of a command.
fn hello() -> Vec<u8> {
    encode(frame(Kind::Hello, &Hello { job: "job".into(), from: Party::Command, incarnation: 0, to: None }))
}

fn receive(stream: &mut TcpStream) -> (Kind, Vec<u8>) {
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    let header = Header::decode(&bytes).unwrap();
    let mut payload = vec![0; padded(header.payload_bytes as usize)];
    stream.read_exact(&mut payload).unwrap();
    payload.truncate(header.payload_bytes as usize);
    (header.kind, payload)
}

/// A command that was let in.
fn command(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(&hello()).unwrap();
    assert_eq!(receive(&mut stream).0, Kind::Welcome);
    stream
}

/// A server that may have a hundred file descriptors, and where it is. It ends with the test.
struct Serve {
    process: Child,
    url: String,
    coordinator: String,
    data: String,
}

impl Serve {
    /// So few descriptors that the strangers could take all of them.
    fn start() -> Serve {
        let script = "ulimit -n 100; exec \"$0\" serve --job job --listen 127.0.0.1:0 --json --workers 2 \
                      --servers 1 --cores 1";
        let mut process = Command::new("sh");
        let process = process.args(["-c", script, PARAMILL]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = process.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let announced: Value = serde_json::from_str(&line).unwrap();
        let url = announced["url"].as_str().unwrap().to_owned();
        let coordinator = url.trim_start_matches("paramill://").split('/').next().unwrap().to_owned();
        let data = announced["data"][0].as_str().unwrap().to_owned();
        Serve { process, url, coordinator, data }
    }

    /// Until its data core is connected to its coordinator, which takes descriptors too.
    fn wait_for_its_data_core(&self) {
        let began = Instant::now();
        loop {
            let status = Command::new(PARAMILL).args(["status", &self.url]).output().unwrap();
            if String::from_utf8_lossy(&status.stdout).contains("1 of 1 servers are here") {
                return;
            }
            assert!(began.elapsed() < LIMIT, "{}", String::from_utf8_lossy(&status.stderr));
        }
    }

    /// The file descriptors that it has.
    fn descriptors(&self) -> Vec<u64> {
        let folder = std::fs::read_dir(format!("/proc/{}/fd", self.process.id())).unwrap();
        let number = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string();
        folder.map(|entry| number(entry).unwrap().parse().unwrap()).collect()
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Whether the other end hung up, if that can be seen yet.
fn is_hung_up(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match stream.read(&mut [0; 1024]) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Connections, half of which say that they are commands and the others nothing.
fn strangers(address: &str) -> Vec<TcpStream> {
    let hello = hello();
    let connect = |number: usize| {
        let mut stream = TcpStream::connect(address).ok()?;
        if number.is_multiple_of(2) {
            // One that was refused is hung up on.
            drop(stream.write_all(&hello));
        }
        Some(stream)
    };
    (0..200).filter_map(connect).collect()
}

fn wait(child: &mut Child) -> bool {
    let deadline = Instant::now() + LIMIT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait().unwrap().success()
}

#[test]
fn strangers_leave_file_descriptors_to_the_members() {
    let folder = tempfile::tempdir().unwrap();
    let [train, test] = paramill_train::generate::write_sparse_examples(folder.path(), 1, 200, true).unwrap();
    let (train, test) = (train.to_str().unwrap(), test.to_str().unwrap());
    let mut serve = Serve::start();
    let url = serve.url.as_str();
    let _held = [strangers(&serve.coordinator), strangers(&serve.data)];
    let arguments = ["config", "lr", "--data", train, "--test", test, "--workers", "2", "--servers", "1"];
    let plan = Command::new(PARAMILL)
        .args(arguments)
        .args(["--transport", "tcp", "--timeout", "30s"])
        .output()
        .unwrap();
    assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
    let worker = |rank: u32| {
        let mut command = Command::new(PARAMILL);
        command.arg("worker-process").env("PARAMILL_URL", url).env("PARAMILL_RANK", rank.to_string());
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&plan.stdout).unwrap();
        child
    };
    let workers: Vec<Child> = (0..2).map(worker).collect();
    for mut worker in workers {
        let success = wait(&mut worker);
        let mut words = String::new();
        worker.stderr.take().unwrap().read_to_string(&mut words).unwrap();
        assert!(success, "{words}");
    }
    assert!(wait(&mut serve.process));
}

#[test]
fn strangers_that_come_all_at_once_hold_no_more_than_half_of_the_descriptors() {
    let serve = Serve::start();
    serve.wait_for_its_data_core();
    let before = serve.descriptors().len();
    let crowd: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(&serve.coordinator).unwrap()).collect();
    let (began, mut most) = (Instant::now(), 0);
    while crowd.iter().filter(|stream| is_hung_up(stream)).count() < 150 {
        most = most.max(serve.descriptors().len());
        assert!(began.elapsed() < LIMIT, "the strangers stay");
    }
    // One more is a newcomer that was taken and is about to be closed.
    assert!(most <= before + 50 + 1, "{most} descriptors, and {before} before the strangers came");
}

#[test]
fn a_command_is_answered_though_a_crowd_comes_in() {
    let serve = Serve::start();
    let mut asker = command(&serve.coordinator);
    let _crowd: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&serve.coordinator).unwrap()).collect();
    // Connections are taken in order: when this one is answered the crowd is in.
    command(&serve.coordinator);
    asker.write_all(&encode(frame(Kind::Control, &Control::StatusQuery))).unwrap();
    let (_, payload) = receive(&mut asker);
    assert!(matches!(decode::<Control>("control message", &payload).unwrap(), Control::Status(_)));
}

#[test]
fn a_server_without_a_free_descriptor_still_takes_a_connection() {
    let serve = Serve::start();
    // A member that came later would rightly keep the descriptor that the server has in reserve.
    serve.wait_for_its_data_core();
    let used = serve.descriptors();
    // No number below this one is free: whatever needs a descriptor fails from now on.
    let limit = (0..).find(|number| !used.contains(number));
    let pid = Pid::from_raw(serve.process.id().cast_signed());
    prlimit(pid, Resource::Nofile, Rlimit { current: limit, maximum: Some(100) }).unwrap();
    for _ in 0..3 {
        let status = Command::new(PARAMILL).args(["status", &serve.url]).output().unwrap();
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    }
}
