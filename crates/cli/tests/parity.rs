//! One scenario file, two drivers: the simulator and loopback TCP end with the same parameters, bit for bit, where the
//! order of additions is fixed.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use serde_json::Value;
use std::process::Command;

fn tables(scenario: &str, extra: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("scenario.toml");
    std::fs::write(&file, scenario).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_paramill"))
        .args(["sim", "run", file.to_str().unwrap(), "--json"])
        .args(extra)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["tables"].clone()
}

const WORLD: &str = r#"
    seed = 11
    workers = 3
    servers = 2
    cores = 2
    iterations = 12
    chunk = "1KB"
    placement = "uniform"

    [[tables]]
    name = "dense"
    shape = [50, 40]

    [[tables]]
    name = "rows"
    shape = [300, 7]
    rows = true

    [compute]
    step_ms = 1
"#;

#[test]
fn the_simulator_and_sockets_agree_bit_for_bit() {
    for sync in ["bsp", "bsp:overlap=false", "psp:c=3,b=1"] {
        for optimizer in ["momentum:lr=0.05", "adam:lr=0.01,clip=1", "lars:lr=0.1"] {
            let scenario = format!("sync = \"{sync}\"\noptimizer = \"{optimizer}\"\n{WORLD}");
            let simulated = tables(&scenario, &[]);
            assert_eq!(simulated.as_array().map(Vec::len), Some(2));
            assert_eq!(simulated, tables(&scenario, &["--sockets"]), "{sync}, {optimizer}");
        }
    }
}

/// Whole numbers have the same sum in any order: this is the way of gradients that jobs go by default, where nothing is
/// staged, the last addition and the step are one pass, and answers leave early. Codecs that lose nothing change no bit.
#[test]
fn the_simulator_and_sockets_agree_in_arrival_order_and_with_codecs() {
    let counted =
        format!("tags = true\norder = \"arrival\"\noptimizer = \"sgd:lr=1\"\nreduce = \"sum\"\n{WORLD}");
    let expected = tables(&counted, &[]);
    assert_eq!(expected, tables(&counted, &["--sockets"]));
    for codecs in [
        "codec = \"bitmap+lz4\"",
        "codec = \"lossless+zstd\"\nanswer_codec = \"lossless+snappy\"",
        "aggregators = 2\ncodec = \"bitmap+snappy\"",
        "aggregators = 2\nbroadcast = \"star\"",
    ] {
        let scenario = format!("{codecs}\n{counted}");
        assert_eq!(expected, tables(&scenario, &[]), "{codecs}, simulated");
        assert_eq!(expected, tables(&scenario, &["--sockets"]), "{codecs}, over sockets");
    }
    // Every push counts, whatever the model: only the order of steps differs.
    for sync in ["asp", "ssp:s=2"] {
        let scenario = format!("sync = \"{sync}\"\n{counted}");
        assert_eq!(expected, tables(&scenario, &[]), "{sync}, simulated");
        assert_eq!(expected, tables(&scenario, &["--sockets"]), "{sync}, over sockets");
    }
}

/// What a codec of pushes loses is the same for both drivers where the order is fixed. (A codec of answers that loses something
/// cannot be compared: over sockets the final parameters are read through it, the simulator looks at the servers.)
#[test]
fn the_simulator_and_sockets_agree_with_codecs_that_lose_something() {
    for codecs in ["codec = \"topk:0.1+f16\"", "codec = \"ef+int8\"", "codec = \"qsgd:4\""] {
        let scenario = format!("{codecs}\noptimizer = \"momentum:lr=0.05\"\n{WORLD}");
        assert_eq!(tables(&scenario, &[]), tables(&scenario, &["--sockets"]), "{codecs}");
    }
}

#[test]
fn faults_change_when_things_happen_and_not_what_comes_of_them() {
    let calm = format!("optimizer = \"momentum:lr=0.05\"\n{WORLD}");
    let faults = r#"faults = ["link:reset,p=0.01", "worker=1:slow=3x", "server=1:pause=200ms@300ms"]"#;
    let troubled = format!("{faults}\n{calm}");
    let expected = tables(&calm, &[]);
    assert_eq!(expected, tables(&troubled, &[]), "simulated");
    assert_eq!(expected, tables(&troubled, &["--sockets"]), "over sockets");
}

/// Delays of answers, of pushes and of connections, on tables of many frames. Over sockets, a frame used to overtake those
/// that were held before it, and the coordinator's last words were lost when they were held.
#[test]
fn delays_of_all_kinds_leave_every_message_whole() {
    let calm = format!(
        "optimizer = \"momentum:lr=0.05\"\n{}",
        WORLD.replace("= 256", "= 16").replace("= 12", "= 40")
    );
    let faults = r#"faults = ["pull:delay=5ms,p=0.3", "link:delay=300us,p=0.3", "push:delay=2ms,p=0.1"]"#;
    let delayed = format!("{faults}\n{calm}");
    let expected = tables(&calm, &[]);
    assert_eq!(expected, tables(&delayed, &[]), "simulated");
    assert_eq!(expected, tables(&delayed, &["--sockets"]), "over sockets");
    let through = format!("aggregators = 2\n{delayed}");
    assert_eq!(expected, tables(&through, &[]), "simulated, through aggregators");
    assert_eq!(expected, tables(&through, &["--sockets"]), "over sockets, through aggregators");
}

#[test]
fn gradients_that_stay_alone_on_their_way_through_aggregators_change_no_bit() {
    let direct = format!("optimizer = \"momentum:lr=0.05\"\n{WORLD}");
    let expected = tables(&direct, &[]);
    let through = format!("aggregators = 2\n{direct}");
    assert_eq!(expected, tables(&through, &["--sockets"]), "over sockets");
    let troubled = format!("faults = [\"link:reset,p=0.01\"]\n{through}");
    assert_eq!(expected, tables(&troubled, &[]), "simulated");
}
