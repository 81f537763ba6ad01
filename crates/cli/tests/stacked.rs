//! Aggregators above aggregators, as processes: those of two hosts go to the servers through one of their rack.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");

fn output(arguments: &[&str]) -> String {
    let output = Command::new(PARAMILL).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A process that says where it is in one line of JSON. It ends with the test.
struct Process {
    child: Child,
    _stdout: BufReader<ChildStdout>,
    announcement: Value,
}

impl Process {
    fn start(arguments: &[&str]) -> Process {
        let mut child = Command::new(PARAMILL)
            .args(arguments)
            .arg("--json")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        Process { child, _stdout: stdout, announcement: serde_json::from_str(&line).unwrap() }
    }

    fn serve(job: &[&str]) -> (Process, String) {
        let server = Process::start(&[&["serve", "--listen", "127.0.0.1:0"], job].concat());
        let url = server.announcement["url"].as_str().unwrap().to_owned();
        (server, url)
    }

    fn aggregate(url: &str, index: &str, more: &[&str]) -> (Process, String) {
        Process::aggregate_at("127.0.0.1:0", url, index, more)
    }

    fn aggregate_at(listen: &str, url: &str, index: &str, more: &[&str]) -> (Process, String) {
        let common = ["aggregate", "--job", url, "--listen", listen, "--index", index];
        let aggregator = Process::start(&[&common, more].concat());
        let address = aggregator.announcement["address"].as_str().unwrap().to_owned();
        (aggregator, address)
    }

    fn has_ended_well(&mut self) -> bool {
        self.child.wait().unwrap().success()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended by itself cannot be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A training worker, as `train --processes` starts it.
fn worker(url: &str, rank: usize, aggregator: Option<&str>, plan: &str) -> Child {
    let mut command = Command::new(PARAMILL);
    command.arg("worker-process").env("PARAMILL_URL", url).env("PARAMILL_RANK", rank.to_string());
    command.envs(aggregator.map(|address| ("PARAMILL_AGGREGATOR", address)));
    let (stdin, stdout) = (Stdio::piped(), Stdio::piped());
    let mut child = command.stdin(stdin).stdout(stdout).stderr(Stdio::inherit()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(plan.as_bytes()).unwrap();
    child
}

/// What a worker says of itself when it is done.
fn last_words(mut worker: Child) -> Value {
    let mut said = String::new();
    worker.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(worker.wait().unwrap().success(), "{said}");
    let mut messages = said.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.find_map(|message| message.get("done").cloned()).unwrap()
}

const JOB: [&str; 6] = ["--workers", "4", "--servers", "1", "--sync", "bsp"];

fn plan(job: &[&str], epochs: &str) -> String {
    output(&[&["config", "mlp", "--examples", "800", "--epochs", epochs], job].concat())
}

/// Trains a model. Where it goes through aggregators, the status is asked until it shows what stands where.
fn train(job: &[&str], epochs: &str, is_stacked: bool) -> Vec<Value> {
    let (plan, (mut server, url)) = (plan(job, epochs), Process::serve(job));
    let mut aggregators = Vec::new();
    let mut addresses = [None, None];
    if is_stacked {
        let (rack, above) = Process::aggregate(&url, "0", &["--cores", "2"]);
        aggregators.push(rack);
        for (address, index) in addresses.iter_mut().zip(["2", "3"]) {
            let (host, its) = Process::aggregate(&url, index, &["--through", &above]);
            aggregators.push(host);
            *address = Some(its);
        }
    }
    let start = |rank: usize| worker(&url, rank, addresses[rank / 2].as_deref(), &plan);
    let workers: Vec<Child> = (0..4).map(start).collect();
    while is_stacked && !shows_the_stack(&url) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let done = workers.into_iter().map(last_words).collect();
    for process in aggregators.iter_mut().chain([&mut server]) {
        assert!(process.has_ended_well());
    }
    done
}

/// Whether the aggregators of both hosts are below a core of the rack's. A job that is over is an error.
fn shows_the_stack(url: &str) -> bool {
    let status: Value = serde_json::from_str(&output(&["status", url, "--json"])).unwrap();
    let below = |index: usize| status["aggregators"][index]["report"]["below"].clone();
    if below(0) != serde_json::json!([2, 3]) {
        return false;
    }
    let shown = output(&["status", url]);
    let rows = shown.lines().filter(|line| line.contains("aggregator 0")).count();
    assert_eq!(rows, 2, "{shown}");
    true
}

#[test]
fn a_job_through_hosts_and_a_rack_ends_like_one_without() {
    // Gradients that are added by rank pass through alone: the same bits.
    let ranked = [&JOB[..], &["--order", "ranked"]].concat();
    let (direct, stacked) = (train(&ranked, "30", false), train(&ranked, "30", true));
    for done in &stacked {
        assert_eq!(done["digest"], direct[0]["digest"], "{done}");
    }
    // Sums of sums: the same but for the order of additions.
    let (direct, stacked) = (train(&JOB, "30", false), train(&JOB, "30", true));
    for (done, expected) in stacked.iter().zip(&direct) {
        let (loss, expected) = (done["loss"].as_f64().unwrap(), expected["loss"].as_f64().unwrap());
        assert!((loss - expected).abs() < 0.01 * expected, "{loss}, and {expected} without aggregators");
        assert_eq!(done["digest"], stacked[0]["digest"], "all workers of a round have the same");
    }
}

/// Trains a model through a rack's aggregator and those of two hosts, of which the first one is killed again and again, and started
/// anew; then the rack's.
fn train_while_they_die(job: &[&str], epochs: &str) -> Vec<Value> {
    let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (plan, (mut server, url)) = (plan(job, epochs), Process::serve(job));
    let [rack_at, host_at] = [free(), free()];
    let rack = || Process::aggregate_at(&rack_at, &url, "0", &["--transport", "tcp"]);
    let (mut first, above) = rack();
    let through = ["--transport", "tcp", "--through", &above];
    let host = || Process::aggregate_at(&host_at, &url, "1", &through);
    let (mut killed, address) = host();
    let (mut other, its) = Process::aggregate(&url, "2", &through);
    let addresses = [address, its];
    let start = |rank: usize| worker(&url, rank, Some(&addresses[rank / 2]), &plan);
    let workers: Vec<Child> = (0..4).map(start).collect();
    let clock = || {
        let status: Value = serde_json::from_str(&output(&["status", &url, "--json"])).unwrap();
        status["shards"][0]["tables"][0]["version"].as_u64().unwrap_or(0)
    };
    let wait_for = |wanted: u64| {
        while clock() < wanted {
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for(1);
    for _ in 0..3 {
        let now = clock();
        // Dropping it kills it.
        drop(killed);
        killed = host().0;
        wait_for(now + 2);
    }
    let now = clock();
    drop(first);
    first = rack().0;
    wait_for(now + 2);
    let done = workers.into_iter().map(last_words).collect();
    for process in [&mut killed, &mut other, &mut first, &mut server] {
        assert!(process.has_ended_well());
    }
    done
}

#[test]
fn aggregators_are_killed_and_started_anew_and_the_job_goes_on() {
    // Gradients that are added by rank: the same bits.
    let ranked = [&JOB[..], &["--order", "ranked"]].concat();
    let direct = train(&ranked, "400", false);
    for done in train_while_they_die(&ranked, "400") {
        assert_eq!(done["digest"], direct[0]["digest"], "{done}");
    }
    let direct = train(&JOB, "400", false);
    let expected = direct[0]["loss"].as_f64().unwrap();
    for done in train_while_they_die(&JOB, "400") {
        let loss = done["loss"].as_f64().unwrap();
        assert!(
            (loss - expected).abs() < 0.02 * expected + 1e-3,
            "{loss}, and {expected} without aggregators"
        );
    }
}

#[test]
fn an_address_that_leads_nowhere_up_is_an_error_that_says_so() {
    let job = ["--workers", "1", "--servers", "1"];
    let (plan, (_server, url)) = (plan(&job, "100000"), Process::serve(&job));
    let mut busy = worker(&url, 0, None, &plan);
    let refusal = |listen: &str, index: &str, through: &str| {
        let common = ["aggregate", "--job", &url, "--transport", "tcp", "--quiet"];
        let own = ["--listen", listen, "--index", index, "--through", through];
        Command::new(PARAMILL)
            .args(common)
            .args(own)
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let free = || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let told = |child: Child| {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let coordinator = url.strip_prefix("paramill://").unwrap().split('/').next().unwrap();
    let said = told(refusal("127.0.0.1:0", "5", coordinator));
    assert!(said.contains("give the address that `paramill aggregate` prints"), "{said}");
    let own = free();
    let said = told(refusal(&own, "6", &own));
    assert!(said.contains("aggregator 6 cannot go through itself"), "{said}");
    let [first, second] = [free(), free()];
    let circle = [refusal(&first, "7", &second), refusal(&second, "8", &first)];
    let mut said = Vec::new();
    for mut child in circle {
        // The other one may only find out that this one is gone, after a while.
        if said.is_empty() {
            std::thread::sleep(Duration::from_millis(0));
        }
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(_) => break true,
                None if !said.is_empty() => break false,
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        if !ended {
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        said.push(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    assert!(said.concat().contains("they go through each other in a circle"), "{said:?}");
    busy.kill().unwrap();
    busy.wait().unwrap();
}
