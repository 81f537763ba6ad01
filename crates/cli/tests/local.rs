//! Training with local steps: fewer bytes, the same model; and what does not go together.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use serde_json::Value;
use std::process::Command;

const SMALL: [&str; 7] =
    ["train", "--examples=1600", "--batch=8", "--workers=2", "--servers=2", "--quiet", "--json"];

fn paramill(arguments: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_paramill")).args(arguments).output().unwrap()
}

fn train(more: &[&str]) -> Value {
    let output = paramill(&[&SMALL[..], &["mlp", "--epochs=2"], more].concat());
    assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(report: &Value, what: &str) -> f64 {
    report[what].as_f64().unwrap_or_else(|| panic!("{what} in {report}"))
}

/// 200 steps of each worker, with a last clock that is not whole.
#[test]
fn local_steps_train_as_well_with_far_fewer_bytes() {
    let every = train(&[]);
    for local in ["steps:h=30", "steps:h=30,fragments=4", "steps:h=30,fragments=4,late=3"] {
        let local = train(&["--local", local]);
        assert_eq!(
            (&local["optimizer"], &local["steps"]),
            (&"nesterov:lr=0.7,beta=0.9".into(), &every["steps"])
        );
        // 7 or 8 pushes of each table, and the initial values.
        assert!(number(&local, "bytes_pushed") * 20.0 < number(&every, "bytes_pushed"), "{local}");
        assert!(number(&local, "bytes_pulled") * 18.0 < number(&every, "bytes_pulled"), "{local}");
        assert!(number(&local, "test_loss") < number(&every, "test_loss") + 0.1, "{every}\n{local}");
    }
}

/// The mean of the workers' gradients, by another way.
#[test]
fn a_synchronisation_after_every_step_is_synchronous_sgd() {
    let sgd = train(&["--order=ranked", "--optimizer=sgd:lr=0.1"]);
    let local = train(&[
        "--order=ranked",
        "--local=steps:h=1,inner=(sgd:lr=0.1)",
        "--optimizer=sgd:lr=1",
        "--processes",
    ]);
    assert_eq!(local["bytes_pushed"], sgd["bytes_pushed"]);
    let difference = number(&local, "test_loss") - number(&sgd, "test_loss");
    assert!(difference.abs() < 1e-3, "{difference}");
}

#[test]
fn codecs_aggregators_and_streams_work_as_for_gradients() {
    for more in [
        &["--codec=topk:0.1+f16", "--answer-codec=bf16"][..],
        &["--aggregators=1"],
        &["--broadcast=star"],
        &["--sync=ssp:s=2"],
    ] {
        let report = train(&[&["--local=steps:h=20,fragments=2,late=2"], more].concat());
        assert!(number(&report, "test_loss") < 1.0, "{more:?}: {report}");
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_the_cause() {
    for (arguments, expected) in [
        (&["lr"][..], "of a table of rows they have single rows; leave out `local`"),
        (&["mlp", "--sync=psp:c=2,b=0.5"], "leave b and tau2 out"),
        (&["mlp", "--sync=bsp:overlap=false"], "leave out `overlap=false`"),
        (&["mlp", "--optimizer=assign:lr=1"], "would take them for parameters"),
        (&["mlp", "--local=steps:h=9,fragments=5"], "fragments = 5: expected at most 4"),
        (&["mlp", "--local=steps:h=0"], "h = 0: expected 1 to"),
        (&["mlp", "--local=stesp"], "expected none, or steps:h=50"),
    ] {
        let local = ["--local=steps:h=9"];
        let local = if arguments.iter().any(|word| word.starts_with("--local")) { &[][..] } else { &local };
        let output = paramill(&[&SMALL[..], local, arguments].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}

#[test]
fn a_scenario_with_local_steps_runs_in_virtual_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("local.toml");
    std::fs::write(&path, "iterations = 2\nlocal = 'steps:h=5'\n[[tables]]\nname = 'w'\nshape = [10]")
        .unwrap();
    let path = path.to_str().unwrap();
    assert!(paramill(&["sim", "run", path]).status.success());
    let output = paramill(&["sim", "run", path, "--sockets"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("leave out --sockets"), "{stderr}");
}
