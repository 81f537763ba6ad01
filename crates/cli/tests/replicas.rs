//! Servers that die, come and go while a job trains: with copies it ends with the very result of the job that nothing happened to.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

#[path = "trained/job.rs"]
mod job;

use job::{PARAMILL, PATIENCE, Training, paramill, signal, slow_steps, text};
use rustix::process::Signal;
use serde_json::Value;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A job that adds by rank: whoever serves its parameters, the result has the same bits.
const JOB: &[&str] = &["--workers", "2", "--examples", "900", "--order", "ranked", "--replicas", "1"];

/// What the parameters of a job are known by.
fn losses(report: &Value) -> [f64; 2] {
    ["loss", "test_loss"].map(|name| report[name].as_f64().unwrap())
}

/// What comes of a job that nothing happens to.
fn undisturbed(arguments: &[&str]) -> [f64; 2] {
    let (code, report, said) = Training::start(arguments).end();
    assert_eq!(code, Some(0), "{said}");
    losses(&report)
}

/// Waits until the job's shards are served and copied like this; where.
fn await_served(training: &Training, is_so: impl Fn(&[Value]) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = training.status();
        let served = status["served"].as_array().unwrap();
        if !served.is_empty() && is_so(served) {
            return;
        }
        assert!(Instant::now() < deadline, "{served:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn are_copied(served: &[Value]) -> bool {
    served.iter().all(|shard| shard["copy"].is_u64() && shard["copy"] != shard["server"])
}

/// Whether a server serves a shard or keeps a copy.
fn has_part(served: &[Value], server: u64) -> bool {
    served.iter().any(|shard| shard["server"] == server || shard["copy"] == server)
}

/// A server that joins a job, and is ended with the test.
struct Joined(Child);

impl Joined {
    fn start(url: &str) -> Joined {
        let mut command = Command::new(PARAMILL);
        command.args(["serve", "--join", url, "--cores", "1"]).stdout(Stdio::null()).stderr(Stdio::null());
        Joined(command.spawn().unwrap())
    }

    /// Its exit code.
    fn wait(mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_job_ends_with_the_same_result_though_servers_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let slow = slow_steps(folder.path(), 0.02);
    let common = [JOB, &["--servers", "3", "--epochs", "12"]].concat();
    let expected = undisturbed(&common);
    let mut training = Training::start(&[&common[..], &["--inject", &slow]].concat());
    for server in [1, 2] {
        await_served(&training, are_copied);
        signal(training.server(server), Signal::KILL);
        let anew = "failed (signal: 9 (SIGKILL)) and is started anew; copies take over its shards";
        training.hear(&format!("server {server} {anew}"));
        training.hear("is served by another process from now on");
    }
    let (code, report, said) = training.end();
    assert_eq!((code, losses(&report)), (Some(0), expected), "{said}");
}

/// A host that is gone without a word, as far as anybody can tell. It comes back, and is one server among others then.
#[test]
fn a_job_goes_on_beside_a_server_that_is_silent() {
    let folder = tempfile::tempdir().unwrap();
    let slow = slow_steps(folder.path(), 0.02);
    let common = [JOB, &["--servers", "2", "--epochs", "8"]].concat();
    let expected = undisturbed(&common);
    let mut training = Training::start(&[&common[..], &["--inject", &slow]].concat());
    await_served(&training, are_copied);
    let silent = training.server(1);
    signal(silent, Signal::STOP);
    training.hear("is served by another process from now on");
    signal(silent, Signal::CONT);
    let (code, report, said) = training.end();
    assert_eq!((code, losses(&report)), (Some(0), expected), "{said}");
}

#[test]
fn a_server_that_joins_gets_shards_and_one_that_is_drained_ends() {
    let folder = tempfile::tempdir().unwrap();
    let slow = slow_steps(folder.path(), 0.2);
    let common = [JOB, &["--servers", "2", "--cores", "2", "--epochs", "12"]].concat();
    let expected = undisturbed(&common);
    let training = Training::start(&[&common[..], &["--inject", &slow]].concat());
    await_served(&training, are_copied);
    let joined = Joined::start(&training.url);
    await_served(&training, |served| are_copied(served) && served.iter().any(|shard| shard["server"] == 2));
    let drained = paramill(&["drain", &training.url, "--server", "2"]);
    assert!(drained.status.success(), "{}", text(&drained.stderr));
    assert_eq!(joined.wait(), Some(0));
    await_served(&training, |served| are_copied(served) && !has_part(served, 2));
    let (code, report, said) = training.end();
    assert_eq!((code, losses(&report)), (Some(0), expected), "{said}");
}
