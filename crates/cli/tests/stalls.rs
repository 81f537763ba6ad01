//! A worker whose program hangs while the library goes on reporting: it is named, and left behind.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

#[path = "coordinated/job.rs"]
mod job;

use job::{Process, free_address, wait_for};
use paramill_core::table::TableSpec;
use paramill_node::client::{Job, JobOptions, Table};
use paramill_node::url::JobUrl;
use std::sync::mpsc::channel;

fn join(url: &JobUrl, rank: u32) -> (Job, Table) {
    let job = Job::init(JobOptions::at(url.clone()).rank(rank).log(|_, _| {})).unwrap();
    let table = job.table(TableSpec::dense("w", [100]), vec![0.0; 100]).unwrap();
    job.start().unwrap();
    (job, table)
}

fn step(job: &Job, table: &Table) {
    table.update(&vec![1.0; 100]).unwrap();
    job.clock();
    table.sync().unwrap();
}

#[test]
fn a_program_that_hangs_is_named_and_left_behind_and_the_others_go_on() {
    let address = free_address();
    let options =
        "serve --json --workers 2 --servers 1 --cores 1 --state none --sync bsp --optimizer sgd:lr=1";
    let arguments: Vec<&str> =
        options.split(' ').chain(["--progress-timeout", "6s", "--listen", &address]).collect();
    let mut server = Process::start(&arguments);
    server.first_line();
    let url: JobUrl = format!("paramill://{address}/job").parse().unwrap();
    let (go_on, hangs) = channel::<()>();
    std::thread::scope(|scope| {
        let at = &url;
        let hung = scope.spawn(move || {
            let (job, table) = join(at, 1);
            (0..5).for_each(|_| step(&job, &table));
            hangs.recv().unwrap();
            table.update(&vec![1.0; 100]).and_then(|()| table.sync()).unwrap_err().to_string()
        });
        let other = scope.spawn(|| {
            let (job, table) = join(&url, 0);
            (0..50).for_each(|_| step(&job, &table));
            assert!(table.read(|values| values.iter().all(|value| *value == -50.0)).unwrap());
            job.close().unwrap();
        });
        let stalled = wait_for(&url, |status| !status.stalled.is_empty()).stalled.remove(0);
        assert_eq!((stalled.node.as_str(), stalled.holds_up.as_str()), ("worker 1", "worker 0 (table `w`)"));
        other.join().unwrap();
        go_on.send(()).unwrap();
        let why = hung.join().unwrap();
        assert!(why.contains("made no progress while others waited for it"), "{why}");
    });
    assert_eq!(server.wait(), Some(0));
}
