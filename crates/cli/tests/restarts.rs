//! Worker processes that die are started anew and take part again, as often as that is allowed.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

fn paramill(arguments: &[&str]) -> Output {
    Command::new(PARAMILL).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A fault that makes every step of worker 0 take so long on any machine, and those of the others hardly any time.
fn slow_steps(folder: &Path, seconds: f64) -> String {
    let trace = folder.join("steps.csv");
    std::fs::write(&trace, format!("worker,step,seconds\n0,0,{seconds}\n1,0,0\n2,0,0\n")).unwrap();
    format!("trace={}", trace.display())
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// A training job whose words are read while it runs.
struct Training {
    child: Child,
    words: BufReader<ChildStderr>,
    url: String,
    said: String,
}

impl Training {
    fn start(arguments: &[&str]) -> Training {
        let mut child = Command::new(PARAMILL)
            .args(["train", "mlp", "--processes", "--json"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let words = BufReader::new(child.stderr.take().unwrap());
        let mut training = Training { child, words, url: String::new(), said: String::new() };
        let line = training.hear("the job is at ");
        training.url = line.split_whitespace().last().unwrap().to_owned();
        training
    }

    /// Reads on until it says this; the line.
    fn hear(&mut self, what: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.words.read_line(&mut line).unwrap() > 0, "it ended without `{what}`: {}", self.said);
            self.said += &line;
            if line.contains(what) {
                return line;
            }
        }
    }

    fn status(&self) -> Value {
        let output = paramill(&["status", &self.url, "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The process that has a rank.
    fn worker(&self, rank: u32) -> u32 {
        let entry = format!("PARAMILL_RANK={rank}");
        // The one before is waited for at the end only, and has no environment any more.
        self.child_with("environ", &[entry.as_bytes()]).expect("the worker has a process")
    }

    /// The process of a server.
    fn server(&self, index: u32) -> u32 {
        self.child_with("cmdline", &[b"--index", index.to_string().as_bytes()])
            .expect("the server has a process")
    }

    /// The child whose file in `/proc` has these strings after each other.
    fn child_with(&self, file: &str, strings: &[&[u8]]) -> Option<u32> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let lists =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
        let children: String = lists.collect();
        let has = |pid: &u32| {
            let content = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let found: Vec<&[u8]> = content.split(|byte| *byte == 0).collect();
            found.windows(strings.len()).any(|window| window == strings)
        };
        children.split_whitespace().map(|pid| pid.parse().unwrap()).find(has)
    }

    /// Its exit code, its report, and all it said.
    fn end(mut self) -> (Option<i32>, Value, String) {
        self.words.read_to_string(&mut self.said).unwrap();
        let output = self.child.wait_with_output().unwrap();
        (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_default(), self.said)
    }
}

#[test]
fn a_worker_that_is_killed_twice_takes_part_again() {
    for more in [&["--sync", "bsp"][..], &["--sync", "ssp:s=2", "--transport", "tcp", "--aggregators", "1"]] {
        let folder = tempfile::tempdir().unwrap();
        let slow = slow_steps(folder.path(), 0.02);
        let common = ["--workers", "3", "--examples", "1200", "--epochs", "6", "--restart", "2"];
        let mut training = Training::start(&[&common[..], &["--inject", &slow], more].concat());
        let deadline = Instant::now() + PATIENCE;
        while training.status()["workers"][1]["report"]["clock"].as_u64().is_none_or(|clock| clock == 0) {
            assert!(Instant::now() < deadline, "it does not train");
            std::thread::sleep(Duration::from_millis(10));
        }
        // The others wait for this one, so that the job cannot end before the test is through.
        let first = training.worker(0);
        signal(first, Signal::STOP);
        for life in 2..=3u64 {
            signal(training.worker(1), Signal::KILL);
            training.hear(&format!("and is started anew: process {life} of this rank; {} more", 3 - life));
            training.hear("worker 1 takes part from clock");
            let status = training.status();
            assert_eq!(
                (&status["workers"][1]["incarnation"], &status["restarts"]),
                (&life.into(), &(life - 1).into())
            );
            assert_eq!(status["workers"][1]["state"], "running", "{status}");
        }
        let shown = text(&paramill(&["status", &training.url]).stdout);
        assert!(shown.contains("running with 3 workers; 2 restarts so far"), "{shown}");
        assert!(shown.contains("running, 3rd life"), "{shown}");
        signal(first, Signal::CONT);
        let (code, report, said) = training.end();
        assert_eq!(code, Some(0), "{said}");
        assert_eq!((report["restarts"].as_u64(), &report["dead_workers"]), (Some(2), &Value::Array(vec![])));
        assert!(report["metric"]["value"].as_f64().unwrap() > 0.8, "{report}");
        assert!(report["loss"].as_f64().unwrap() > 0.0, "{report}");
    }
}

#[test]
fn a_job_of_one_worker_waits_for_its_restart() {
    let folder = tempfile::tempdir().unwrap();
    let slow = slow_steps(folder.path(), 0.02);
    let common = ["--workers", "1", "--servers", "1", "--examples", "800", "--epochs", "2", "--restart", "1"];
    let mut training = Training::start(&[&common[..], &["--inject", &slow]].concat());
    while training.status()["workers"][0]["report"]["clock"].as_u64().is_none_or(|clock| clock == 0) {
        std::thread::sleep(Duration::from_millis(10));
    }
    signal(training.worker(0), Signal::KILL);
    training.hear("worker 0 takes part from clock");
    let (code, report, said) = training.end();
    assert_eq!((code, report["restarts"].as_u64()), (Some(0), Some(1)), "{said}");
}

#[test]
fn a_worker_that_fails_once_too_often_ends_the_job() {
    let fails = ["--inject", "worker=2:crash@500ms"];
    let job = ["train", "mlp", "--epochs", "100000", "--processes", "--quiet", "--restart", "1"];
    let output = paramill(&[&job[..], &fails].concat());
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    let anew = "worker 2 failed (exit status: 1) and is started anew: process 2 of this rank; 0 more restarts are allowed";
    assert_eq!(said.matches(anew).count(), 1, "{said}");
    assert!(said.contains("error: worker 2 failed (exit status: 1); all others were ended"), "{said}");
}

#[test]
fn launched_workers_are_started_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (slow, mark) = (slow_steps(folder.path(), 0.02), folder.path().join("died"));
    // The first process of rank 1 is killed by its own shell once it trains.
    let script = format!(
        "plan() {{ {PARAMILL} config mlp --workers 2 --servers 1 --examples 800 --epochs 4 --inject {slow}; }}
         if [ $PARAMILL_RANK = 0 ] || ! mkdir {mark} 2>/dev/null; then plan | {PARAMILL} worker-process; exit; fi
         plan | {PARAMILL} worker-process | (read line; kill -9 $$)",
        mark = mark.display()
    );
    let launch = |restart: &str| {
        let arguments =
            ["launch", "-n", "2", "--restart", restart, "--optimizer", "adam", "--", "sh", "-c", &script];
        paramill(&arguments)
    };
    let output = launch("1");
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("worker 1 failed (signal: 9 (SIGKILL)) and is started anew"), "{said}");
    assert!(said.contains("worker 1 takes part from clock"), "{said}");
    assert!(text(&output.stdout).contains("[worker 1] {\"done\""), "{}", text(&output.stdout));
    // Without restarts the first failure ends all.
    std::fs::remove_dir(&mark).unwrap();
    let output = launch("0");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("worker 1 failed (signal: 9 (SIGKILL)); all others were ended"), "{said}");
}

/// Ranks of a launched job that fail after they have left it are not started anew, and cost the others nothing.
#[test]
fn a_worker_that_fails_after_it_has_left_is_named_and_not_started_anew() {
    let folder = tempfile::tempdir().unwrap();
    let slow = slow_steps(folder.path(), 0.02);
    for restart in ["0", "3"] {
        let script = format!(
            "{PARAMILL} config mlp --workers 3 --servers 1 --examples 600 --epochs 2 --inject {slow} |
                 {PARAMILL} worker-process || exit 9
             [ $PARAMILL_RANK != 1 ] || exit 3"
        );
        let output =
            paramill(&["launch", "-n", "3", "-s", "1", "--restart", restart, "--", "sh", "-c", &script]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("error: worker 1 failed (exit status: 3) "), "{said}");
        assert!(
            said.contains("after it had left the job") || said.contains("when the job was over"),
            "{said}"
        );
        assert!(!said.contains("is started anew: process") && !said.contains("exit status: 9"), "{said}");
        let done = text(&output.stdout).matches("{\"done\"").count();
        assert_eq!(done, 3, "{said}");
    }
}

/// A training job with a worker that stands still from its last barrier on, which the other one has passed.
fn stand_still_at_the_end(folder: &Path, more: &[&str]) -> (Training, u32) {
    let slow = slow_steps(folder, 0.05);
    let common = ["--workers", "2", "--examples", "800", "--epochs", "2", "--sync", "asp", "--inject", &slow];
    let training = Training::start(&[&common[..], more].concat());
    let worker = |rank: usize, is_so: &dyn Fn(&Value) -> bool| {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(&training.status()["workers"][rank]) {
            assert!(Instant::now() < deadline, "{}", training.status());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    // It hardly takes any time for its steps, and waits for worker 0 at the barrier.
    worker(1, &|worker| worker["report"]["waiting"].as_str().is_some_and(|wait| wait.contains("barrier")));
    let still = training.worker(1);
    signal(still, Signal::STOP);
    worker(0, &|worker| worker["state"] == "left");
    (training, still)
}

/// It is declared dead, and its process would never end by itself. The one that takes its place has no step left to make.
#[test]
fn a_worker_process_that_stands_still_is_ended_and_started_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (mut training, still) = stand_still_at_the_end(folder.path(), &["--restart", "1"]);
    training.hear(&format!("worker 1 (process {still}) is killed: the job had declared its worker dead"));
    training.hear("worker 1 takes part from clock");
    let (code, report, said) = training.end();
    assert_eq!(code, Some(0), "{said}");
    // Each process counts what it did itself: both made all their steps, and the one that came back made none.
    assert_eq!((report["restarts"].as_u64(), report["steps"].as_u64()), (Some(1), Some(48)), "{report}");
    assert!(report["loss"].as_f64().unwrap() > 0.0, "{report}");
    let (seconds, rate) = (report["seconds"].as_f64().unwrap(), report["steps_per_s"].as_f64().unwrap());
    // It took the silence after which a worker is dead, and the job as a whole is what took it.
    assert!(seconds > 10.0 && rate <= 4.8, "{report}");
}

#[test]
fn a_worker_process_that_stands_still_does_not_hold_up_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let (training, still) = stand_still_at_the_end(folder.path(), &[]);
    let (code, report, said) = training.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&format!("worker 1 (process {still}) is killed: ")), "{said}");
    assert!(said.contains("worker 1 reported no result"), "{said}");
    assert!(report["loss"].as_f64().unwrap() > 0.0, "{report}");
}

/// What was trained is told, and who stood still is named.
#[test]
fn a_server_that_stands_still_at_the_end_does_not_cost_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let (training, still) = stand_still_at_the_end(folder.path(), &["--servers", "2"]);
    signal(training.server(1), Signal::STOP);
    signal(still, Signal::CONT);
    let (code, report, said) = training.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("the training is done, but server 1 did not end within 20 s"), "{said}");
    assert!(report["metric"]["value"].as_f64().is_some(), "{said}");
}

/// The same for programs of others, which may take their time once they have left, but not when they stand still.
#[test]
fn a_launched_program_that_stands_still_is_ended() {
    let folder = tempfile::tempdir().unwrap();
    let (slow, mark) = (slow_steps(folder.path(), 0.02), folder.path().join("still"));
    // The shell of rank 1 stops what it started once it trains, and waits for it.
    let script = format!(
        "plan() {{ {PARAMILL} config mlp --workers 2 --servers 1 --examples 800 --epochs 4 --inject {slow}; }}
         if [ $PARAMILL_RANK = 0 ] || ! mkdir {mark} 2>/dev/null; then plan | {PARAMILL} worker-process; exit; fi
         plan | {PARAMILL} worker-process | (read line; kill -STOP 0)",
        mark = mark.display()
    );
    let output = paramill(&["launch", "-n", "2", "--restart", "1", "--", "sh", "-c", &script]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("is killed: the job had declared its worker dead"), "{said}");
    assert!(said.contains("is started anew: process 2"), "{said}");
}

/// A program may go on after its worker is gone from the job: it saves what it has, or starts its worker itself.
#[test]
fn a_launched_program_that_goes_on_without_its_worker_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let slow = slow_steps(folder.path(), 0.02);
    // The worker of rank 1 fails at its end, since nobody listens to what it has to say then, and is declared dead 3 s later. What
    // started it takes longer than the job.
    let script = format!(
        "plan() {{ {PARAMILL} config mlp --workers 2 --servers 1 --examples 800 --epochs 2 --inject {slow}; }}
         if [ $PARAMILL_RANK = 0 ]; then plan | {PARAMILL} worker-process; exit; fi
         plan | {PARAMILL} worker-process | read line
         sleep 20; echo it is saved"
    );
    let output = paramill(&["launch", "-n", "2", "-s", "1", "--", "sh", "-c", &script]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("worker 1 is declared dead"), "{said}");
    assert!(said.contains("the job is over; worker 1 (process "), "{said}");
    assert!(text(&output.stdout).contains("[worker 1] it is saved"), "{said}");
}
