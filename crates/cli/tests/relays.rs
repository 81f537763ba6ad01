//! Workers that pass versions on to each other, as processes: they end with the bits that pulls bring, and those that live go on
//! when one is killed.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::prng::Prng;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
const WORKERS: u32 = 5;

fn output(arguments: &[&str]) -> String {
    let output = Command::new(PARAMILL).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn trained(broadcast: &str, further: &[&str]) -> Value {
    let job = ["train", "mlp", "--examples", "400", "--epochs", "2", "--workers", "3", "--servers", "2"];
    let how = [
        "--processes",
        "--order",
        "ranked",
        "--transport",
        "tcp",
        "--broadcast",
        broadcast,
        "--json",
        "--quiet",
    ];
    serde_json::from_str(&output(&[&job[..], &how, further].concat())).unwrap()
}

#[test]
fn ports_that_are_none_are_refused_by_name() {
    let mut worker = Command::new(PARAMILL);
    worker.arg("worker-process").env("PARAMILL_URL", "paramill://127.0.0.1:9/job").env("PARAMILL_RANK", "0");
    let mut worker = worker
        .env("PARAMILL_PORTS", "http")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let plan = output(&["config", "mlp"]);
    worker.stdin.take().unwrap().write_all(plan.as_bytes()).unwrap();
    let ended = worker.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && said.contains("PARAMILL_PORTS `http`: expected ports"), "{said}");
}

/// The same bits wherever they come from; a codec makes others, and all workers have the same of those.
#[test]
fn a_job_whose_workers_relay_ends_with_the_bits_of_one_that_pulls() {
    let pulled = trained("none", &[]);
    assert!(pulled["digest"].is_string(), "{pulled}");
    for broadcast in ["chain", "rotated:degree=1"] {
        assert_eq!(trained(broadcast, &[])["digest"], pulled["digest"], "{broadcast}");
    }
    let encoded = trained("chain", &["--answer-codec", "topk:0.1"]);
    assert!(encoded["digest"].is_string() && encoded["digest"] != pulled["digest"], "{encoded}");
}

/// A server with a coordinator, and its words.
fn serve(job: &[&str]) -> (Child, BufReader<ChildStdout>, String) {
    let mut child = Command::new(PARAMILL)
        .args([&["serve", "--listen", "127.0.0.1:0", "--json"], job].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let url = serde_json::from_str::<Value>(&line).unwrap()["url"].as_str().unwrap().to_owned();
    (child, stdout, url)
}

/// A training worker, as `train --processes` starts it.
fn worker(url: &str, rank: u32, plan: &str) -> Child {
    let mut child = Command::new(PARAMILL)
        .arg("worker-process")
        .env("PARAMILL_URL", url)
        .env("PARAMILL_RANK", rank.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(plan.as_bytes()).unwrap();
    child
}

/// What a worker says of itself when it is done.
fn last_words(mut worker: Child) -> (Value, bool) {
    let mut said = String::new();
    worker.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    let mut messages = said.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let done = messages.find_map(|message| message.get("done").cloned());
    (done.unwrap_or_default(), worker.wait().unwrap().success())
}

/// Its moments are chance. `RELAY_KILLS=20` has it do so twenty times, which takes minutes.
#[test]
fn survivors_of_a_killed_relay_go_on_and_end_with_the_same_bits() {
    let mut prng = Prng::new(u64::from(std::process::id()));
    let rounds = std::env::var("RELAY_KILLS").map_or(1, |text| text.parse().expect("a number of rounds"));
    // Steps of 8 ms: the job lasts longer than any moment that is drawn, however fast the machine is.
    let folder = tempfile::tempdir().unwrap();
    let steps = folder.path().join("steps.csv");
    std::fs::write(&steps, "worker,step,seconds\n0,0,0.008\n").unwrap();
    let trace = format!("trace={}", steps.display());
    for round in 0..rounds {
        let broadcast = ["chain", "rotated:degree=2"][round % 2];
        let codec = ["none", "topk:0.1"][round / 2 % 2];
        let count = WORKERS.to_string();
        let job = ["--workers", &count, "--servers", "1", "--transport", "tcp", "--broadcast", broadcast];
        let job = [&job[..], &["--answer-codec", codec]].concat();
        let length = ["config", "mlp", "--examples", "2000", "--epochs", "40", "--inject", &trace];
        let plan = output(&[&length[..], &job[..]].concat());
        let (mut server, _stdout, url) = serve(&job);
        let mut workers: Vec<(u32, Child)> =
            (0..WORKERS).map(|rank| (rank, worker(&url, rank, &plan))).collect();
        // The last one of a chain passes nothing on.
        let victim = prng.below(u64::from(WORKERS - 1)) as usize;
        let moment = Duration::from_millis(prng.below(2500));
        // A job that has not begun waits for all of its workers.
        while !output(&["status", &url, "--json"]).contains("\"phase\": \"running") {
            std::thread::sleep(Duration::from_millis(50));
        }
        std::thread::sleep(moment);
        let what = format!("round {round}: {broadcast}, {codec}, worker {victim} killed after {moment:?}");
        let (_, mut killed) = workers.remove(victim);
        killed.kill().unwrap();
        let has_trained = killed.wait().unwrap().success();
        assert!(!has_trained, "{what}: the job was over before; give it more epochs");
        let ended: Vec<(u32, (Value, bool))> =
            workers.into_iter().map(|(rank, worker)| (rank, last_words(worker))).collect();
        for (rank, (done, is_well)) in &ended {
            assert!(*is_well && done["digest"].is_string(), "{what}: worker {rank} failed: {done}");
            assert_eq!(done["digest"], ended[0].1.0["digest"], "{what}: worker {rank} has other bits");
        }
        assert!(server.wait().unwrap().success(), "{what}: the server failed");
    }
}
