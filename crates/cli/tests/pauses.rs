//! Processes that stand still for longer than the silence after which a worker is declared dead, and go on: a virtual
//! machine that is migrated, a cgroup that is frozen, Ctrl-Z and `fg`. Their own absence must not be taken for others'.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
/// Two seconds more than a worker may be silent.
const PAUSE: Duration = Duration::from_secs(12);
const LIMIT: Duration = Duration::from_secs(120);

/// Arguments of a job whose first worker takes the same time for a step on any machine, and trains for about eight seconds
/// in all. The second one hardly does anything but wait for it.
fn slow_job(folder: &Path, workers: u32) -> Vec<String> {
    let trace = folder.join("steps.csv");
    std::fs::write(&trace, format!("0,0,{}\n1,0,0\n", 0.025 * f64::from(workers))).unwrap();
    let inject = format!("trace={}", trace.display());
    ["lr", "--workers", &workers.to_string(), "--servers", "1", "--epochs", "1", "--inject", &inject]
        .map(str::to_owned)
        .to_vec()
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Has these processes stand still together, and go on.
fn pause(pids: &[u32]) {
    pids.iter().for_each(|pid| signal(*pid, Signal::STOP));
    std::thread::sleep(PAUSE);
    pids.iter().for_each(|pid| signal(*pid, Signal::CONT));
}

/// Waits for its end: what it wrote to stderr, and whether it succeeded.
fn end(mut child: Child) -> (bool, String) {
    let deadline = Instant::now() + LIMIT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it did not end within {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut words = String::new();
    child.stderr.take().unwrap().read_to_string(&mut words).unwrap();
    (child.wait().unwrap().success(), words)
}

fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The processes that `parent` started.
fn children_of(parent: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{parent}/task")).unwrap();
    let of_thread = |path: std::path::PathBuf| std::fs::read_to_string(path.join("children")).ok();
    let lists: Vec<String> = threads.filter_map(|thread| of_thread(thread.ok()?.path())).collect();
    lists.iter().flat_map(|list| list.split_whitespace()).map(|pid| pid.parse().unwrap()).collect()
}

#[test]
fn a_job_of_one_process_that_stands_still_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let arguments =
        [&["train", "--json", "--timeout", "5s"].map(str::to_owned)[..], &slow_job(folder.path(), 2)];
    let mut train = start(Command::new(PARAMILL).args(arguments.concat()));
    std::thread::sleep(Duration::from_secs(2));
    assert!(train.try_wait().unwrap().is_none(), "it ended before it could be stopped");
    pause(&[train.id()]);
    let (success, words) = end(train);
    assert!(success, "{words}");
}

#[test]
fn a_job_of_many_processes_that_stands_still_as_a_whole_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["train", "--json", "--processes", "--timeout", "5s"].map(str::to_owned);
    let arguments = [&arguments[..], &slow_job(folder.path(), 2)];
    let train = start(Command::new(PARAMILL).args(arguments.concat()));
    let deadline = Instant::now() + LIMIT;
    while children_of(train.id()).len() < 3 {
        assert!(Instant::now() < deadline, "a server and two workers were expected");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_secs(2));
    let mut all = children_of(train.id());
    assert_eq!(all.len(), 3, "it ended before it could be stopped");
    all.push(train.id());
    pause(&all);
    let (success, words) = end(train);
    assert!(success, "{words}");
}

#[test]
fn a_server_that_stands_still_with_the_coordinator_buries_only_the_dead() {
    let folder = tempfile::tempdir().unwrap();
    let serve = ["serve", "--listen", "127.0.0.1:0", "--json", "--workers", "3", "--servers", "1"];
    let mut serve = start(Command::new(PARAMILL).args(serve));
    let mut line = String::new();
    BufReader::new(serve.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = serde_json::from_str::<Value>(&line).unwrap()["url"].as_str().unwrap().to_owned();
    let plan = Command::new(PARAMILL).arg("config").args(slow_job(folder.path(), 3)).output().unwrap();
    assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
    let worker = |rank: u32| {
        let mut command = Command::new(PARAMILL);
        command.arg("worker-process").env("PARAMILL_URL", &url).env("PARAMILL_RANK", rank.to_string());
        let mut child = start(command.stdin(Stdio::piped()));
        child.stdin.take().unwrap().write_all(&plan.stdout).unwrap();
        child
    };
    let mut workers: Vec<Child> = (0..3).map(worker).collect();
    let status = || -> Value {
        let status = Command::new(PARAMILL).args(["status", &url, "--json"]).output().unwrap();
        serde_json::from_slice(&status.stdout).unwrap_or_default()
    };
    let deadline = Instant::now() + LIMIT;
    while status()["workers"][0]["report"]["clock"].as_u64().is_none_or(|clock| clock < 10) {
        assert!(Instant::now() < deadline, "{}", status());
        std::thread::sleep(Duration::from_millis(50));
    }
    signal(serve.id(), Signal::STOP);
    let mut dead = workers.pop().unwrap();
    dead.kill().unwrap();
    dead.wait().unwrap();
    std::thread::sleep(PAUSE);
    signal(serve.id(), Signal::CONT);
    for worker in workers {
        let (success, words) = end(worker);
        assert!(success, "{words}");
    }
    let (success, words) = end(serve);
    assert!(success, "{words}");
    let dead: Vec<&str> = words.lines().filter(|line| line.contains("is declared dead")).collect();
    assert_eq!(dead, ["paramill: worker 2 is declared dead; the job goes on without it"], "{words}");
}
