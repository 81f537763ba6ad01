//! Where servers and aggregators listen when nobody says so, and what they say about it.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");

fn paramill(arguments: &[&str]) -> Output {
    Command::new(PARAMILL).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A server that runs until the test is over, and the first lines that it printed.
struct Serve {
    child: Child,
    /// Open as long as the server runs: one that cannot say where it is has nobody to serve.
    _stdout: BufReader<ChildStdout>,
    lines: Vec<String>,
}

impl Serve {
    fn start(arguments: &[&str], lines: usize) -> Serve {
        let mut child = Command::new(PARAMILL)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let lines = stdout.by_ref().lines().take(lines).map(Result::unwrap).collect();
        Serve { child, _stdout: stdout, lines }
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The port is taken, by this test or by whoever had it before: the refusal names the address that was meant.
#[test]
fn servers_and_aggregators_listen_on_this_machine_unless_they_are_told_otherwise() {
    let job = "127.0.0.1:1";
    for (arguments, address) in [
        (&["serve"][..], "127.0.0.1:7070"),
        (&["serve", "--host", "127.0.0.9"], "127.0.0.9:7070"),
        (&["aggregate", "--job", job, "--transport", "tcp"], "127.0.0.1:7071"),
        (&["aggregate", "--job", job, "--transport", "tcp", "--host", "127.0.0.9"], "127.0.0.9:7071"),
    ] {
        let _taken = TcpListener::bind(address);
        let output = paramill(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let told = text(&output.stderr);
        assert!(
            told.contains(&format!("error: {address} is in use by another program")),
            "{arguments:?}: {told}"
        );
    }
}

#[test]
fn a_server_says_who_can_connect() {
    let serve = Serve::start(&["serve", "--listen", "127.0.0.1:0", "--workers", "1", "--servers", "1"], 5);
    let who = &serve.lines[4];
    assert!(who.contains("only this machine can connect; --host ADDRESS (or 0.0.0.0"), "{:?}", serve.lines);
    assert!(who.contains("no authentication yet"), "{:?}", serve.lines);
}
