//! Worker processes that die are started anew and take part again, as often as that is allowed.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

#[path = "trained/job.rs"]
mod job;

use job::{PARAMILL, PATIENCE, Training, paramill, signal, slow_steps, text};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// The process that has a rank.
fn worker_of(training: &Training, rank: u32) -> u32 {
    let entry = format!("PARAMILL_RANK={rank}");
    // The one before is waited for at the end only, and has no environment any more.
    training.child_with("environ", &[entry.as_bytes()]).expect("the worker has a process")
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
        let first = worker_of(&training, 0);
        signal(first, Signal::STOP);
        for life in 2..=3u64 {
            signal(worker_of(&training, 1), Signal::KILL);
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
    signal(worker_of(&training, 0), Signal::KILL);
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
    let still = worker_of(&training, 1);
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
