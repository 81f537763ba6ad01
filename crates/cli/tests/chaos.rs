//! `paramill chaos` with real processes: what it kills comes back, nothing is lost, and nothing is left behind.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use serde_json::Value;
use std::process::{Command, Output};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");

fn chaos(arguments: &str) -> Output {
    Command::new(PARAMILL).arg("chaos").args(arguments.split(' ')).arg("--json").output().unwrap()
}

fn report(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {said}", output.status);
    serde_json::from_slice(&output.stdout).unwrap()
}

fn kills(report: &Value, kind: &str) -> u64 {
    report["kills"][kind].as_u64().unwrap()
}

#[test]
fn no_push_is_lost_when_workers_and_the_coordinator_are_killed() {
    let output = chaos(
        "tags --minutes 0.2 --every 1500ms --kill workers,coordinator --aggregators 0 --replicas 0 --seed 3",
    );
    let report = report(&output);
    assert_eq!((report["lost"].as_u64(), report["twice"].as_u64()), (Some(0), Some(0)), "{report}");
    assert!(report["acknowledged"].as_u64() > Some(100), "{report}");
    assert!(kills(&report, "workers") >= 2 && kills(&report, "coordinator") >= 2, "{report}");
}

#[test]
fn no_push_is_lost_when_aggregators_are_killed() {
    let output =
        chaos("tags --minutes 0.2 --every 2s --kill aggregators --aggregators 1 --replicas 0 --seed 4");
    let report = report(&output);
    assert_eq!((report["lost"].as_u64(), report["twice"].as_u64()), (Some(0), Some(0)), "{report}");
    assert!(kills(&report, "aggregators") >= 2, "{report}");
}

#[test]
fn no_push_is_lost_when_relays_are_killed() {
    let output = chaos("tags --minutes 0.2 --every 2s --kill relays --broadcast chain --replicas 0 --seed 5");
    let report = report(&output);
    assert_eq!((report["lost"].as_u64(), report["twice"].as_u64()), (Some(0), Some(0)), "{report}");
    assert!(report["acknowledged"].as_u64() > Some(100) && kills(&report, "relays") >= 2, "{report}");
}

#[test]
fn training_with_kills_ends_near_the_same_job_without() {
    let output = chaos("lr --minutes 0.15 --every 2s --kill workers --aggregators 0 --replicas 0 --epochs 2");
    let report = report(&output);
    let [metric, undisturbed] = ["metric", "undisturbed_metric"].map(|name| report[name].as_f64().unwrap());
    assert!((metric - undisturbed).abs() < 0.02 && kills(&report, "workers") >= 2, "{report}");
    assert_eq!(report["lost"], Value::Null, "a workload that trains does not count: {report}");
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let refused = [
        ("tags --kill servers --replicas 0", "are lost"),
        ("tags --kill aggregators --aggregators 0", "has none"),
        ("tags --kill relays --broadcast star", "has none; workers pass versions on under trees"),
        ("tags --kill relays --broadcast chain --aggregators 1", "without --aggregators"),
        ("tags --minutes 0", "minutes"),
        ("tags --optimizer adam", "tags"),
    ];
    for (arguments, why) in refused {
        let output = chaos(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(why), "{arguments}: {said}");
    }
}
