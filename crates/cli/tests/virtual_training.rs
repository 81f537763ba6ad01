//! Workloads that are trained in virtual time, beside the same jobs in real time.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use serde_json::Value;
use std::process::{Command, Output};

fn paramill(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_paramill")).args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = paramill(&[arguments, &["--json", "-q"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a scenario of these lines.
fn simulated(scenario: &str, extra: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("scenario.toml");
    std::fs::write(&file, scenario).unwrap();
    json(&[&["sim", "train", file.to_str().unwrap()], extra].concat())
}

#[test]
fn training_in_virtual_time_ends_with_the_bits_of_training_in_real_time() {
    for (workload, examples) in [("lr", "600"), ("mf", "2000"), ("mlp", "900"), ("cnn", "300")] {
        for send in ["end", "layerwise"] {
            let scenario = format!(
                "workers = 3\nservers = 2\ncores = 2\nseed = 4\n[workload]\nname = '{workload}'\nepochs = 2\nexamples = {examples}\n\
                 [compute]\nstep_ms = 3\nsend = '{send}'\n"
            );
            let virtual_time = simulated(&scenario, &[]);
            let real_time = json(&[
                "train",
                workload,
                "--workers",
                "3",
                "--servers",
                "2",
                "--cores",
                "2",
                "--seed",
                "4",
                "--epochs",
                "2",
                "--examples",
                examples,
                "--order",
                "ranked",
            ]);
            let end = virtual_time["course"].as_array().unwrap().last().unwrap();
            assert_eq!(end["metric"], real_time["metric"]["value"], "{workload}, {send}");
            assert_eq!(end["loss"], real_time["test_loss"], "{workload}, {send}");
            assert_eq!(virtual_time["iterations"], real_time["steps"], "{workload}, {send}");
            assert_eq!(virtual_time["made_data"], true);
        }
    }
}

#[test]
fn time_is_the_scenarios_and_options_win_over_it() {
    let scenario = "workers = 4\n[workload]\nname = 'mlp'\nexamples = 400\nepochs = 3\n[compute]\nstep_ms = 100\njitter = 0\n";
    let fast = simulated(scenario, &["--every", "200ms"]);
    let slow = simulated(&format!("{scenario}[network]\ngbit_per_s = 0.01\n"), &[]);
    assert!(slow["seconds"].as_f64().unwrap() > 2.0 * fast["seconds"].as_f64().unwrap());
    assert_eq!(slow["tables"], fast["tables"]);
    let asynchronous = simulated(scenario, &["--sync", "asp", "--workers", "2", "--epochs", "1"]);
    assert_eq!(asynchronous["workers"].as_array().unwrap().len(), 2);
    assert_ne!(asynchronous["tables"], fast["tables"]);
}

#[test]
fn an_optimizer_that_is_typed_is_used_also_when_it_is_the_default_of_jobs() {
    let job = "[workload]\nname = 'mlp'\nexamples = 400\nepochs = 1\n";
    let default = paramill_core::policy::Axis::Optimizer.info().default;
    let typed = simulated(&format!("optimizer = '{default}'\n{job}"), &[]);
    assert_eq!(typed["tables"], simulated(job, &["--optimizer", default])["tables"]);
    assert_ne!(typed["tables"], simulated(job, &[])["tables"]);
}

#[test]
fn a_scenario_without_a_workload_and_a_workload_without_training_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("scenario.toml");
    let refused = |scenario: &str, command: &str, extra: &[&str]| {
        std::fs::write(&file, scenario).unwrap();
        let output = paramill(&[&["sim", command, file.to_str().unwrap()], extra].concat());
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let none = refused("[[tables]]\nname = 'w'\nshape = [3]\n", "train", &[]);
    assert!(none.contains("it has no [workload]"), "{none}");
    let mlp = "[workload]\nname = 'mlp'\n";
    for extra in [&[][..], &["--sockets"]] {
        let run = refused(mlp, "run", extra);
        assert!(run.contains("run the scenario with `paramill sim train`"), "{run}");
    }
    let never = refused(mlp, "train", &["--every", "0s"]);
    assert!(never.contains("every = 0: expected a time"), "{never}");
    let nobody = refused(mlp, "train", &["--workers", "0"]);
    assert!(nobody.contains("workers = 0: expected 1 to"), "{nobody}");
    let unknown = refused("[workload]\nname = 'alexnet'\n", "train", &[]);
    assert!(unknown.contains("lr, mf, mlp, cnn"), "{unknown}");
}
