//! Training with codecs, by processes over sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use serde_json::Value;
use std::process::Command;

fn paramill(arguments: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_paramill")).args(arguments).output().unwrap()
}

fn train(workload: &str, more: &[&str]) -> Value {
    let job = [
        "train",
        workload,
        "--examples=2000",
        "--epochs=1",
        "--workers=2",
        "--servers=2",
        "--processes",
        "--json",
    ];
    let output = paramill(&[&job[..], &["--quiet", "--order=ranked"], more].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_lossless_codec_trains_to_the_same_bits_and_a_lossy_one_pushes_less() {
    let (plain, same) = (train("mlp", &[]), train("mlp", &["--codec=lossless+zstd", "--answer-codec=auto"]));
    assert_eq!((&plain["loss"], &plain["metric"]), (&same["loss"], &same["metric"]));
    let few = train("mlp", &["--codec=topk:0.01", "--answer-codec=bf16"]);
    let bytes = |report: &Value, what: &str| report[what].as_f64().unwrap();
    assert!(bytes(&few, "bytes_pushed") * 40.0 < bytes(&plain, "bytes_pushed"), "{few}");
    assert!(bytes(&few, "bytes_pulled") * 1.8 < bytes(&plain, "bytes_pulled"), "{few}");
}

/// An optimizer that was chosen stays, and what it does to the codec is told, by processes and in one process.
#[test]
fn momentum_beside_a_codec_that_sends_late_is_warned_of_at_the_start() {
    let small =
        ["train", "mlp", "--examples=200", "--epochs=1", "--workers=1", "--servers=1", "--codec=topk:0.01"];
    for (more, told) in [
        (
            &["--optimizer=adam:lr=0.001"][..],
            "warning: all tables: `topk:0.01` sends most of a gradient late",
        ),
        (&["--optimizer=momentum:lr=0.05", "--processes"], "; take optimizer=momentum:lr=0.5,beta=0"),
        (&[], "the optimizer of mlp is adam:lr=0.001,beta1=0 here, unless --optimizer says otherwise"),
    ] {
        let output = paramill(&[&small[..], more].concat());
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && stderr.contains(told), "{more:?}: {stderr}");
        assert_eq!(stderr.matches("sends most of a gradient late").count(), 1, "{more:?}: {stderr}");
    }
}

/// Fully connected layers offer the errors and the inputs of the batch. One that is smaller than those sends its gradient.
#[test]
fn networks_send_their_fully_connected_layers_as_factors_when_asked_to() {
    for workload in ["mlp", "cnn"] {
        let run = |codec: &str| {
            let job =
                ["train", workload, "--examples=2000", "--epochs=2", "--workers=2", "--seed=3", "--json"];
            let output = paramill(
                &[&job[..], &["--quiet", "--order=ranked", "--batch=16", "--codec", codec]].concat(),
            );
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            let figure = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{report}"));
            (figure(&report["bytes_pushed"]), figure(&report["metric"]["value"]))
        };
        let ((plain, accuracy), (factors, same)) = (run("none"), run("factors"));
        assert!(factors * 2.5 < plain, "{workload}: {factors} of {plain} bytes");
        // Products are added up in another order than gradients are.
        assert!((accuracy - same).abs() < 0.02, "{workload}: {accuracy} and {same}");
    }
}

#[test]
fn rows_travel_by_codecs_too() {
    let (plain, few) = (train("lr", &[]), train("lr", &["--codec=dvf:delta=0.1+f16", "--answer-codec=f16"]));
    let bytes =
        |report: &Value| report["bytes_pushed"].as_f64().unwrap() + report["bytes_pulled"].as_f64().unwrap();
    assert!(bytes(&few) < 0.6 * bytes(&plain), "{} of {}", bytes(&few), bytes(&plain));
}

/// What would be ignored: workers hold nothing of a table of rows that answers could differ from.
#[test]
fn what_does_not_fit_the_tables_is_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("job.toml");
    std::fs::write(&config, "[[override]]\ntable = \"nomatch*\"\nsync = \"asp\"\n").unwrap();
    let config = config.to_str().unwrap();
    for (arguments, reason) in [
        (&["--answer-codec", "dvf:delta=1"][..], "table `weights`: answers by `dvf:delta=1` are differences"),
        (&["--codec", "significance:0.1", "--processes"], "give it codec=none, or another codec"),
        (&["--config", config], "table `nomatch*`: no table matches; the job has weights"),
    ] {
        let output = paramill(&[&["train", "lr", "--examples=200", "--epochs=1"], arguments].concat());
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(reason), "{stderr}");
    }
}

#[test]
fn a_chain_that_makes_no_sense_is_refused_before_anything_starts() {
    for (arguments, reason) in [
        (["--codec", "topk:0.01+dvf:delta=1e-3"], "the chain has a sparsifier already, `topk`"),
        (["--codec", "dvf:delta=1e-3,residual=false"], "would be lost for good"),
        (["--codec", "lossless+onebit"], "`onebit` loses something"),
        (["--answer-codec", "dgc"], "not for answers"),
    ] {
        let output = paramill(&[&["train", "lr"], &arguments[..]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(reason), "{stderr}");
    }
}
