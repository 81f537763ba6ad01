//! Starts that fail for lack of files or threads: they are told when they fail, with what to do about it.
//!
//! Workers in one process waited for the one that could not join until their time-out, and then told of that. Every test
//! gives a time-out of an hour, so that a failure which is only told then never ends the test.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use std::process::{Command, Output};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
const FILES: &str = "a process may have 64 files open here; `ulimit -n` raises that";

/// Runs it in a shell that has set this limit.
fn limited(limit: &str, arguments: &str) -> Output {
    let script = format!("ulimit {limit} && exec {PARAMILL} {arguments}");
    // Stacks so large that there is memory left for all else when there is none for a further one.
    Command::new("sh").args(["-c", &script]).env("RUST_MIN_STACK", "67108864").output().unwrap()
}

/// Expects it to fail, and to say all of these words.
fn fails_with(limit: &str, arguments: &str, words: &[&str]) {
    let output = limited(limit, arguments);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{arguments}: {told}");
    for word in words {
        assert!(told.contains(word), "{arguments}: `{word}` is missing in:\n{told}");
    }
}

#[test]
fn too_few_files_for_workers_that_are_threads() {
    let words = ["error: worker ", " cannot start: Too many open files", FILES];
    fails_with("-n 64", "train lr --epochs 1 --workers 64 --timeout 1h --quiet", &words);
}

#[test]
fn too_few_files_for_workers_that_are_processes() {
    let words = ["error: cannot start worker ", "Too many open files", FILES];
    fails_with("-n 64", "train lr --epochs 1 --workers 64 --timeout 1h --processes --quiet", &words);
    fails_with("-n 64", "launch -n 64 -- sleep 3600", &words);
}

#[test]
fn too_few_files_for_data_cores() {
    let words = ["Too many open files", FILES];
    fails_with("-n 64", "serve --listen 127.0.0.1:0 --workers 1 --servers 1 --cores 64", &words);
    fails_with("-n 64", "train lr --workers 1 --cores 64 --timeout 1h --quiet", &words);
    let words = ["server 0: error: ", FILES, "error: server 0 failed (exit status: 1)"];
    fails_with("-n 64", "train lr --workers 1 --cores 64 --timeout 1h --processes --quiet", &words);
    fails_with("-n 64", "launch -n 1 --cores 64 -- sleep 3600", &["server 0 failed", FILES]);
}

#[test]
fn too_little_memory_for_the_stacks_of_threads() {
    // The limit on threads itself does not hold for root, as whom tests may run.
    let words = ["cannot start", "Resource temporarily unavailable", "look at `ulimit -u`, `ulimit -v`"];
    fails_with("-v 2000000", "train lr --epochs 1 --workers 64 --timeout 1h --quiet", &words);
    fails_with("-v 2000000", "launch -n 64 -- sleep 3600", &words);
}

/// A device has no end: it was read until there was no memory left.
#[test]
fn a_step_trace_without_an_end_is_refused() {
    let words = ["step trace /dev/zero", "it is longer than 16 MiB"];
    fails_with("-v 4000000", "train lr --epochs 1 --inject trace=/dev/zero --quiet", &words);
    let folder = tempfile::tempdir().unwrap();
    let scenario = folder.path().join("scenario.toml");
    std::fs::write(&scenario, "faults = [\"trace=/dev/zero\"]\n[[tables]]\nname = \"w\"\nshape = [4]\n")
        .unwrap();
    let told = limited("-v 4000000", &format!("sim run {}", scenario.display())).stderr;
    let told = String::from_utf8_lossy(&told);
    assert!(words.iter().all(|word| told.replace('`', "").contains(word)), "{told}");
}
