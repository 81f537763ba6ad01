//! What commands of a launched job started ends with the job, however the job ends.
//!
//! Only groups of commands that still ran were ended: what a dead command had started stayed, and everything stayed when
//! `launch` itself was killed.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// A launched job of two workers. Each starts a process of its own that runs for long.
struct Job {
    launch: Child,
    /// Each worker's shell, and what it started.
    shells: Vec<u32>,
    started: Vec<u32>,
}

impl Job {
    /// Every worker runs this script, which sets the variable `started`, and says it. `last` is what it does then.
    fn launch(start: &str, last: &str) -> Job {
        let script = format!("{start}; echo $$ $started; {last}");
        let mut launch = Command::new(env!("CARGO_BIN_EXE_paramill"))
            .args(["launch", "-n", "2", "--", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(launch.stdout.take().unwrap()).lines();
        let (mut shells, mut started) = (Vec::new(), Vec::new());
        for line in lines.take(2) {
            let line = line.unwrap();
            let mut words = line.rsplit(' ').map(|word| word.parse().unwrap());
            started.push(words.next().unwrap());
            shells.push(words.next().unwrap());
        }
        Job { launch, shells, started }
    }

    /// Waits for the end of `launch` and then of all processes.
    fn ended(&mut self) -> Option<i32> {
        let status = self.launch.wait().unwrap();
        let deadline = Instant::now() + PATIENCE;
        while self.shells.iter().chain(&self.started).any(|pid| runs(*pid)) {
            if Instant::now() > deadline {
                let left: Vec<u32> =
                    self.shells.iter().chain(&self.started).copied().filter(|pid| runs(*pid)).collect();
                left.iter().for_each(|pid| kill(*pid, Signal::KILL));
                panic!("{left:?} outlive their job");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        status.code()
    }
}

/// Whether a process is there and not merely waiting to be reaped.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with('Z'))
}

fn kill(pid: u32, signal: Signal) {
    // It may have ended just now.
    let _ = kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal);
}

const SLEEP: &str = "sleep 987 & started=$!";
/// A process that does not end when it is asked to.
const STUBBORN: &str = "trap '' TERM; sleep 987 & started=$!; trap - TERM";

#[test]
fn what_a_dead_worker_started_ends_with_the_job() {
    for start in [SLEEP, STUBBORN] {
        let mut job = Job::launch(start, "wait");
        assert!(job.started.iter().all(|pid| runs(*pid)), "they were to be there");
        kill(job.shells[0], Signal::KILL);
        assert_eq!(job.ended(), Some(1));
    }
}

#[test]
fn what_a_worker_left_behind_ends_with_the_job() {
    assert_eq!(Job::launch(SLEEP, "exit 0").ended(), Some(0));
}

#[test]
fn ctrl_c_ends_what_does_not_want_to() {
    let mut job = Job::launch(STUBBORN, "wait");
    kill(job.launch.id(), Signal::INT);
    assert_eq!(job.ended(), Some(130));
}

#[test]
fn a_killed_launch_takes_its_workers_along() {
    for start in [SLEEP, STUBBORN] {
        let mut job = Job::launch(start, "wait");
        kill(job.launch.id(), Signal::KILL);
        assert_eq!(job.ended(), None, "it was killed");
    }
}

/// Ctrl-C ended the keeper before the workers, so that nobody was left to end them when `launch` was killed next.
#[test]
fn a_launch_that_is_killed_after_ctrl_c_takes_its_workers_along() {
    // The shell ignores the request to end; its child, whose end shows that the request was made, does not.
    let mut job = Job::launch("sleep 987 & started=$!; trap '' TERM", "while :; do sleep 1; done");
    kill(job.launch.id(), Signal::INT);
    let deadline = Instant::now() + PATIENCE;
    while job.started.iter().any(|pid| runs(*pid)) {
        assert!(Instant::now() < deadline, "Ctrl-C asks all processes to end");
        std::thread::sleep(Duration::from_millis(1));
    }
    kill(job.launch.id(), Signal::KILL);
    assert_eq!(job.ended(), None, "it was killed");
}
