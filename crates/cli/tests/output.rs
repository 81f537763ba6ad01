//! Output that cannot be written: nobody reads stderr any more, or its disk is full. Commands and jobs go on without it.
//!
//! `eprintln!` panics there. A command then ended with 101, and a server lost its coordinator by the next line of its log,
//! which anybody outside can cause with a connection that says nonsense.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output, Stdio};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");

/// Every kind of stderr that refuses what is written to it, with its name.
fn refusing() -> [(&'static str, Stdio); 2] {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let full = File::options().write(true).open("/dev/full").unwrap();
    [("a pipe that nobody reads", writer.into()), ("a full disk", full.into())]
}

/// Runs it to its end with this stderr.
fn run(arguments: &[&str], stderr: Stdio) -> Output {
    Command::new(PARAMILL).args(arguments).stderr(stderr).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn training_goes_on_when_stderr_does_not() {
    let small = ["train", "mlp", "--examples", "400", "--epochs", "2"];
    for extra in [&[][..], &["--processes"], &["--processes", "--aggregators", "1"]] {
        for (name, stderr) in refusing() {
            let output = run(&[&small, extra].concat(), stderr);
            assert_eq!(output.status.code(), Some(0), "{extra:?} with {name}");
            assert!(text(&output.stdout).contains("accuracy"), "{extra:?} with {name}");
        }
    }
}

#[test]
fn a_launched_job_goes_on_when_stderr_does_not() {
    for (name, stderr) in refusing() {
        let command = ["launch", "-n", "2", "--", "sh", "-c", "echo unheard >&2; echo heard"];
        let output = run(&command, stderr);
        assert_eq!(output.status.code(), Some(0), "{name}");
        assert_eq!(text(&output.stdout).matches("heard").count(), 2, "{name}");
    }
}

/// A pipe that is full, and a reader that does not read: a write to it would wait for ever. Both ends have to be kept.
fn stuck() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'.'; 1024]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

#[test]
fn a_server_goes_on_when_its_log_does_not() {
    let (_reader, writer) = stuck();
    let stuck = ("a pipe whose reader sleeps", Stdio::from(writer));
    for (name, stderr) in refusing().into_iter().chain([stuck]) {
        let mut serve = Command::new(PARAMILL)
            .args(["serve", "--listen", "127.0.0.1:0", "--workers", "1", "--servers", "1", "--json"])
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(serve.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let announced: Value = serde_json::from_str(&line).unwrap();
        let url = announced["url"].as_str().unwrap();
        let address = url.strip_prefix("paramill://").unwrap().split_once('/').unwrap().0;
        // A stranger is refused, which is logged. It is hung up on when that is done.
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(&[b'?'; 256]).unwrap();
        // The stranger sees an end or a reset, whichever is first.
        let _ = stranger.read_to_end(&mut Vec::new());
        let status = Command::new(PARAMILL).args(["status", url]).output().unwrap();
        serve.kill().unwrap();
        serve.wait().unwrap();
        assert!(status.status.success(), "with {name} the coordinator is gone: {}", text(&status.stderr));
    }
}

#[test]
fn exit_codes_are_the_same_when_errors_cannot_be_told() {
    for (arguments, code) in [
        (&["train", "lr", "--data", "no-such-file"][..], 1),
        (&["config", "--sync", "sps"], 2),
        (&["trian"], 2),
    ] {
        for (name, stderr) in refusing() {
            assert_eq!(run(arguments, stderr).status.code(), Some(code), "{arguments:?} with {name}");
        }
    }
}

#[test]
fn training_goes_on_when_its_terminal_is_closed() {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let terminal = ptsname(&controller, Vec::new()).unwrap().into_string().unwrap();
    let terminal = File::options().write(true).open(terminal).unwrap();
    let train = Command::new(PARAMILL)
        .args(["train", "mlp", "--examples", "4000", "--epochs", "4"])
        .stdout(Stdio::piped())
        .stderr(terminal)
        .spawn()
        .unwrap();
    // The first bytes are those of a progress bar; the terminal goes away while it is drawn.
    let mut controller = File::from(controller);
    controller.read_exact(&mut [0; 16]).unwrap();
    drop(controller);
    let output = train.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("accuracy"));
}
