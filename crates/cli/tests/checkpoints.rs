//! Jobs whose processes are all killed at random moments go on from the newest complete checkpoint, and end with the very bits of the
//! job that was never killed. `CHECKPOINT_KILLS=50` kills so often; CI does it a few times.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
/// Tells the processes of one attempt from all others.
const MARK: &str = "CHECKPOINT_ATTEMPT";
/// About a second of training, with many checkpoints in it.
const JOB: Job = Job { workers: "2", servers: "2", epochs: "6", optimizer: "adam:lr=0.001" };

/// What is different in the jobs of these tests.
#[derive(Clone, Copy)]
struct Job {
    workers: &'static str,
    servers: &'static str,
    epochs: &'static str,
    optimizer: &'static str,
}

impl Job {
    fn arguments<'a>(&self, more: &[&'a str]) -> Vec<&'a str> {
        let Job { workers, servers, epochs, optimizer } = *self;
        let cluster = ["train", "mlp", "--json", "--seed", "3", "--workers", workers, "--servers", servers];
        let rest = ["--order", "ranked", "--examples", "6000", "--epochs", epochs, "--optimizer", optimizer];
        [&cluster[..], &rest, more].concat()
    }

    fn train(&self, more: &[&str]) -> Output {
        paramill(&self.arguments(more))
    }
}

fn paramill(arguments: &[&str]) -> Output {
    Command::new(PARAMILL).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The digest of the parameters that a job ended with.
fn digest(output: &Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["digest"].as_str().unwrap().to_owned()
}

/// Ends all processes of an attempt as kill -9 does.
fn kill_all(attempt: &str) {
    let mark = format!("{MARK}={attempt}");
    let is_one = |pid: u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    loop {
        let entries =
            fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        let pids: Vec<u32> =
            entries.filter_map(|name| name.parse().ok()).filter(|pid| is_one(*pid)).collect();
        if pids.is_empty() {
            return;
        }
        for pid in pids {
            // It may have ended meanwhile.
            let _ = kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for a process, up to some time; whether it has ended.
fn ends_within(child: &mut Child, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// The folders of an archive that have a manifest.
fn complete(archive: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(archive) else { return Vec::new() };
    let entries =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.join("manifest.json").exists());
    let mut names: Vec<String> =
        entries.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

#[test]
fn whenever_everything_is_killed_the_job_ends_with_the_bits_of_one_that_never_was() {
    let kills: u64 = std::env::var("CHECKPOINT_KILLS").map_or(4, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("checkpoints");
    let whole = digest(&JOB.train(&["--processes"]));
    let saving = [
        "--processes",
        "--resume",
        "--every",
        "10",
        "--keep",
        "2",
        "--checkpoint",
        archive.to_str().unwrap(),
    ];
    let (mut killed, mut dice, mut resumed) = (0, 0x9e37_79b9_7f4a_7c15_u64, 0);
    while killed < kills {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let delay = Duration::from_millis(250 + (dice >> 33) % 1500);
        let attempt = format!("{}-{dice:x}", std::process::id());
        let mut child = Command::new(PARAMILL)
            .args(JOB.arguments(&saving))
            .env(MARK, &attempt)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let has_ended = ends_within(&mut child, delay);
        if !has_ended {
            kill_all(&attempt);
            killed += 1;
        }
        let output = child.wait_with_output().unwrap();
        resumed += u32::from(text(&output.stderr).contains("the job goes on from checkpoint"));
        assert!(complete(&archive).len() <= 3, "old ones go: {:?}", complete(&archive));
        if has_ended {
            assert_eq!(digest(&output), whole, "{}", text(&output.stderr));
            fs::remove_dir_all(&archive).unwrap();
        }
    }
    let last = JOB.train(&saving);
    assert_eq!(digest(&last), whole, "{}", text(&last.stderr));
    assert!(resumed > 0 || kills < 4, "some attempt was killed after a checkpoint");
}

#[test]
fn a_job_goes_on_with_other_servers_and_workers_and_says_what_it_cannot_use() {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("checkpoints");
    let path = archive.to_str().unwrap();
    let short = Job { epochs: "2", ..JOB };
    let whole = digest(&short.train(&["--checkpoint", path, "--every", "50"]));
    let names = complete(&archive);
    assert!(!names.is_empty() && names.len() <= 3, "{names:?}");
    // The job's end is saved too: with nothing left to do it has the same parameters, in one process or in many.
    let others = [
        (Job { servers: "3", ..short }, "--cores=2"),
        (Job { servers: "1", workers: "3", epochs: "1", ..JOB }, "--processes"),
    ];
    for (job, more) in others {
        let again = job.train(&["--resume", "--checkpoint", path, more]);
        assert_eq!(digest(&again), whole, "{}", text(&again.stderr));
    }
    let refused = |job: Job, more: &[&str]| {
        let output = job.train(more);
        assert!(!output.status.success());
        text(&output.stderr)
    };
    let why = refused(short, &["--checkpoint", path]);
    assert!(why.contains("give --resume to go on from it, or another folder"), "{why}");
    let why = refused(Job { optimizer: "sgd:lr=0.1", ..short }, &["--checkpoint", path, "--resume"]);
    assert!(why.contains("has the state of `adam:lr=0.001`"), "{why}");
    let why = refused(short, &["--resume"]);
    assert!(why.contains("--checkpoint"), "{why}");
    // A file of the newest is damaged: the one before is named, and used.
    let newest = complete(&archive).pop().unwrap();
    let file = archive.join(&newest).join("server-0-core-0.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let output = short.train(&["--checkpoint", path, "--resume"]);
    digest(&output);
    let said = text(&output.stderr);
    assert!(said.contains("is damaged: it has other contents than it was written with; step-"), "{said}");
}

#[test]
fn a_command_has_a_running_job_make_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("checkpoints");
    let trace = folder.path().join("steps.csv");
    fs::write(&trace, "worker,step,seconds\n0,0,0.02\n1,0,0.02\n").unwrap();
    let (fault, attempt) = (format!("trace={}", trace.display()), format!("{}-command", std::process::id()));
    let mut child = Command::new(PARAMILL)
        .args(JOB.arguments(&["--processes", "--inject", &fault, "--checkpoint", archive.to_str().unwrap()]))
        .env(MARK, &attempt)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let url = {
        use std::io::{BufRead, BufReader};
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let line = lines.map(|line| line.unwrap()).find(|line| line.contains("the job is at ")).unwrap();
        line.split_whitespace().last().unwrap().to_owned()
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut saved = paramill(&["checkpoint", &url]);
    // The job may not have started yet.
    while !saved.status.success() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(100));
        saved = paramill(&["checkpoint", &url]);
    }
    kill_all(&attempt);
    child.wait().unwrap();
    assert!(saved.status.success(), "{}", text(&saved.stderr));
    let names = complete(&archive);
    assert!(text(&saved.stdout).contains(&names[0]), "{names:?}: {}", text(&saved.stdout));
    let output = paramill(&["checkpoint", &url]);
    assert!(!output.status.success() && text(&output.stderr).contains("no coordinator at"));
}
