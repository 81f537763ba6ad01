//! Strangers that take all they can get: members of the job do not notice.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::role::Body;
use paramill_core::wire::control::frame;
use paramill_core::wire::{Hello, Kind, Party, padded};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
const LIMIT: Duration = Duration::from_secs(60);

/// The first frame of a command.
fn hello() -> Vec<u8> {
    let frame = frame(Kind::Hello, &Hello { job: "job".into(), from: Party::Command, incarnation: 0 });
    let Body::Bytes(payload) = frame.body else { panic!("a hello carries bytes") };
    let mut bytes = [&frame.header.encode()[..], &payload].concat();
    bytes.resize(frame.header.encode().len() + padded(payload.len()), 0);
    bytes
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
    // So few descriptors that the strangers could take all of them.
    let script =
        "ulimit -n 100; exec \"$0\" serve --job job --listen 127.0.0.1:0 --json --workers 2 --servers 1";
    let mut serve = Command::new("sh");
    let mut serve =
        serve.args(["-c", script, PARAMILL]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(serve.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let announced: Value = serde_json::from_str(&line).unwrap();
    let url = announced["url"].as_str().unwrap();
    let coordinator = url.trim_start_matches("paramill://").split('/').next().unwrap();
    let data = announced["data"][0].as_str().unwrap();
    let _held = [strangers(coordinator), strangers(data)];
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
    assert!(wait(&mut serve));
}
