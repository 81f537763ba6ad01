//! The coordinator as a process of its own: it is killed while a job trains, and started again.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

#[path = "coordinated/job.rs"]
mod job;

use job::{Process, coordinate, free_address, run, status, train, wait_for};
use paramill_core::status::Status;
use std::process::Command;

#[test]
fn a_job_trains_on_while_its_coordinator_is_killed_and_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let (address, state) = (free_address(), folder.path().join("state"));
    let arguments = coordinate(&address, state.to_str().unwrap());
    let mut first = Process::start(&arguments);
    assert!(first.first_line().contains(&address));
    let url = format!("paramill://{address}/job");
    let last = run(&url, |progress| {
        let mut coordinator = first;
        // The second one takes the place of one that had taken another's.
        for _ in 0..2 {
            coordinator.kill();
            progress.go_on(20);
            coordinator = Process::start(&arguments);
            coordinator.first_line();
            let (restarts, phase) = status(&url.parse().unwrap());
            assert!(restarts == 0 && phase.starts_with("running with 2 workers"), "{phase}");
            progress.go_on(20);
        }
        coordinator
    });
    assert_eq!(last.wait(), Some(0));
    assert!(!state.exists(), "the state of a job that is over stays");
}

#[test]
fn a_server_that_coordinates_is_killed_and_goes_on_coordinating_when_its_shards_had_copies() {
    let folder = tempfile::tempdir().unwrap();
    let (address, state) = (free_address(), folder.path().join("state"));
    let options = "serve --json --workers 2 --servers 2 --replicas 1 --cores 1 --sync bsp --optimizer sgd:lr=1 --placement uniform";
    let arguments: Vec<&str> =
        options.split(' ').chain(["--listen", &address, "--state", state.to_str().unwrap()]).collect();
    let mut first = Process::start(&arguments);
    assert!(first.first_line().contains(&address));
    let url = format!("paramill://{address}/job");
    let other = Process::start(&["serve", "--join", &url, "--cores", "1"]);
    let last = train(&url, |progress| {
        let mut coordinator = first;
        // The second time its data cores have what they took over meanwhile.
        for _ in 0..2 {
            let has_copies = |status: &Status| status.served.iter().all(|shard| shard.copy.is_some());
            wait_for(&url.parse().unwrap(), has_copies);
            coordinator.kill();
            coordinator = Process::start(&arguments);
            coordinator.first_line();
            let (restarts, phase) = status(&url.parse().unwrap());
            assert!(restarts == 0 && phase.starts_with("running with 2 workers"), "{phase}");
            progress.go_on(20);
        }
        coordinator
    });
    assert_eq!((last.wait(), other.wait()), (Some(0), Some(0)));
    assert!(!state.exists(), "the state of a job that is over stays");
}

#[test]
fn a_state_of_another_job_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let (address, state) = (free_address(), folder.path().join("state"));
    let arguments = coordinate(&address, state.to_str().unwrap());
    let mut first = Process::start(&arguments);
    first.first_line();
    status(&format!("paramill://{address}/job").parse().unwrap());
    let second = |more: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_paramill")).args(&arguments).args(more).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let why = second(&[]);
    assert!(why.contains("another coordinator"), "{why}");
    first.kill();
    let why = second(&["--seed", "9"]);
    assert!(why.contains("is of a job with seed") && why.contains("--state"), "{why}");
}
