//! `paramill bench`: every figure is there and makes sense, and what cannot work is refused before anything starts. No
//! figure is compared with a time.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use serde_json::Value;
use std::process::{Command, Output};

fn paramill(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_paramill"))
        .args(arguments)
        .output()
        .expect("the binary was built for this test")
}

fn json(arguments: &[&str]) -> Value {
    let output = paramill(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object is all there is on stdout")
}

/// Runs it, expects bad usage, returns stderr.
fn refusal(arguments: &[&str]) -> String {
    let output = paramill(arguments);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    stderr
}

fn exchange(further: &[&str]) -> Value {
    let short = ["--elements=4096", "--tensors=2", "--iterations=3", "--warmup=0", "--json"];
    let rounds: &[&str] =
        if further.iter().any(|word| word.starts_with("--rounds")) { &[] } else { &["--rounds=2"] };
    json(&[&["bench", "exchange"], &short[..], rounds, further].concat())
}

fn positive(report: &Value, pointer: &str) -> f64 {
    let figure = report.pointer(pointer).and_then(Value::as_f64);
    let figure = figure.unwrap_or_else(|| panic!("{pointer} is no number in {report:#}"));
    assert!(figure > 0.0 && figure.is_finite(), "{pointer} = {figure}");
    figure
}

/// What every transport must report.
fn check_exchange(report: &Value) {
    let goodput = positive(report, "/goodput_gb_s");
    let limit = positive(report, "/limit_gb_s");
    let workers = positive(report, "/workers");
    let bytes = workers * 2.0 * 4.0 * 4096.0;
    let of_iterations = positive(report, "/iterations_per_s") * bytes / 1e9;
    assert!((of_iterations / goodput - 1.0).abs() < 1e-6, "{of_iterations} is not {goodput}");
    assert!((positive(report, "/fraction_of_limit") - goodput / limit).abs() < 1e-9);
    for figure in [
        "/limits/loopback_tcp_gb_s/median",
        "/limits/loopback_tcp_from_memory_gb_s/median",
        "/limits/memory_copy_gb_s/median",
        "/limits/fused_update_gb_s/median",
        "/cpu_s_per_gb/servers",
        "/cpu_s_per_gb/workers",
    ] {
        positive(report, figure);
    }
    let times = ["p50", "p99", "max"].map(|name| positive(report, &format!("/iteration_ms/{name}")));
    assert!(times.is_sorted(), "{times:?}");
    let spread = |name: &str| positive(report, &format!("/goodput_spread_gb_s/{name}"));
    assert!(spread("min") <= goodput && goodput <= spread("max"));
    assert_eq!(report["iterations"], serde_json::json!([3, 3]));
    assert_eq!(report["peers"], serde_json::json!([]));
}

#[test]
fn an_exchange_over_tcp_reports_every_figure() {
    let report = exchange(&["--transport=tcp", "--workers=3", "--servers=2", "--cores=1", "--pack=0"]);
    check_exchange(&report);
    assert_eq!((&report["tensors"], &report["tables"]), (&2.into(), &2.into()));
    assert_eq!(report["transport"], "tcp");
    assert_eq!(report["limit"], "loopback TCP, 6 connections");
    let ratio = positive(&report, "/server_rss_mb") / positive(&report, "/server_ideal_mb");
    assert!((positive(&report, "/server_rss_ratio") / ratio - 1.0).abs() < 1e-6);
}

#[test]
fn buffers_may_be_copied_and_the_optimizer_may_have_state() {
    let report = exchange(&["--copy", "--optimizer=adam:lr=0.01", "--chunk=64KB", "--cores=1"]);
    assert_eq!((&report["optimizer"], &report["chunk"]), (&"adam:lr=0.01".into(), &"64KB".into()));
    check_exchange(&report);
    assert_eq!(report["copy"], true);
    // Small tensors travel together.
    assert_eq!((&report["tensors"], &report["tables"]), (&2.into(), &1.into()));
    // Parameters, a sum, and Adam's two means.
    assert_eq!(positive(&report, "/server_ideal_mb"), 4096.0 * 4.0 * 4.0 / 1e6);
}

#[test]
fn an_exchange_in_memory_has_no_server_process() {
    let report = exchange(&["--transport=memory", "--cores=2"]);
    check_exchange(&report);
    assert_eq!(report["limit"], "memory copy, all cores");
    assert_eq!((&report["server_rss_mb"], &report["server_rss_ratio"]), (&Value::Null, &Value::Null));
}

/// Codecs are named, and the bytes are those that travelled: goodput alone would not tell a codec from a faster machine.
#[test]
fn an_exchange_with_codecs_reports_the_bytes_that_travelled() {
    let uncompressed = 2.0 * 2.0 * 4.0 * 4096.0;
    let plain = exchange(&["--cores=1"]);
    assert_eq!((&plain["codec"], &plain["answer_codec"]), (&"none".into(), &"none".into()));
    for figure in ["/bytes/pushed", "/bytes/pulled"] {
        assert_eq!(positive(&plain, figure), uncompressed / 2.0, "{figure}");
    }
    for copy in [&[][..], &["--copy"]] {
        let codecs = ["--cores=1", "--codec=topk:0.01", "--answer-codec=f16"];
        let report = exchange(&[&codecs[..], copy].concat());
        check_exchange(&report);
        assert_eq!((&report["codec"], &report["answer_codec"]), (&"topk:0.01".into(), &"f16".into()));
        assert_eq!(positive(&report, "/bytes/uncompressed"), uncompressed);
        let (pushed, pulled) = (positive(&report, "/bytes/pushed"), positive(&report, "/bytes/pulled"));
        assert!(pushed < uncompressed / 2.0 / 30.0, "{pushed}");
        assert!((0.45..0.55).contains(&(pulled / (uncompressed / 2.0))), "{pulled}");
        for (bytes, ratio) in [(pushed, "/bytes/push_ratio"), (pulled, "/bytes/answer_ratio")] {
            let ratio = positive(&report, ratio) * bytes / (uncompressed / 2.0);
            assert!((ratio - 1.0).abs() < 0.01, "{report:#}");
        }
    }
    // Values are noise: what loses nothing gains next to nothing, and every worker ends with the same parameters also where
    // answers are differences.
    let report = exchange(&["--cores=1", "--codec=lz4", "--answer-codec=topk:0.1"]);
    let ratio = positive(&report, "/bytes/push_ratio");
    assert!((0.9..1.2).contains(&ratio), "{ratio}");
    assert!(positive(&report, "/bytes/answer_ratio") > 4.0, "{report:#}");
}

#[test]
fn our_own_transports_can_be_peers() {
    let report = exchange(&["--transport=memory", "--cores=1", "--against=tcp"]);
    let goodput = positive(&report, "/goodput_gb_s");
    assert_eq!(report["peers"][0]["name"], "paramill_tcp");
    let ratio = goodput / positive(&report, "/peers/0/goodput_gb_s");
    assert!((positive(&report, "/peers/0/ratio") / ratio - 1.0).abs() < 1e-6);
}

/// A computation is waited out, and its share of the time is reported, whenever gradients leave.
#[test]
fn a_computation_is_waited_out_in_every_iteration() {
    for (send, expected) in
        [(&[][..], "layerwise"), (&["--send=layerwise"], "layerwise"), (&["--send=end"], "end")]
    {
        let model = ["bench", "exchange", "--model=resnet110_cifar", "--compute=8ms", "--cores=1", "--json"];
        let short = ["--iterations=3", "--rounds=1", "--warmup=0"];
        let report = json(&[&model[..], &short[..], send].concat());
        assert_eq!(report["compute"]["send"], expected, "{report:#}");
        assert_eq!(positive(&report, "/compute/step_ms"), 8.0);
        let share = positive(&report, "/compute/share");
        assert!(share <= 1.0, "no iteration is shorter than its computation: {share}");
        assert!((share / (positive(&report, "/iterations_per_s") * 8e-3) - 1.0).abs() < 1e-9);
        // Layers leave one by one: none are packed.
        assert_eq!(report["tensors"], report["tables"]);
    }
}

/// A worker is run where the server of its number is.
#[test]
fn colocated_workers_have_the_numbers_of_servers() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("enter");
    let text = "#!/bin/sh\nnumber=$1; shift; echo $number >> \"${0%/*}/numbers\"; exec \"$@\"\n";
    std::fs::write(&script, text).unwrap();
    let run_with = format!("--run-with=sh {} {{}}", script.display());
    let hosts = ["--host=127.0.0.1", "--host=127.0.0.2"];
    let run = |colocated: &[&str]| {
        let nodes = ["--workers=2", "--servers=2", "--cores=1", "--rounds=1", "--pin=off", &run_with];
        check_exchange_of_one_round(&exchange(&[&nodes[..], &hosts, colocated].concat()));
        let numbers = folder.path().join("numbers");
        let mut numbers: Vec<String> =
            std::fs::read_to_string(&numbers).unwrap().lines().map(str::to_owned).collect();
        std::fs::remove_file(folder.path().join("numbers")).unwrap();
        numbers.sort();
        numbers
    };
    assert_eq!(run(&[]), ["0", "1", "2", "3"]);
    assert_eq!(run(&["--colocated"]), ["0", "0", "1", "1"]);
}

fn check_exchange_of_one_round(report: &Value) {
    assert_eq!(report["iterations"], serde_json::json!([3]));
    positive(report, "/goodput_gb_s");
}

#[test]
fn an_exchange_in_virtual_time_has_the_rate_that_its_links_allow() {
    let common = ["bench", "exchange", "--sim", "--model=resnet20_cifar", "--compute=20ms", "--workers=4"];
    let links = ["--servers=4", "--cores=1", "--colocated", "--gbit-per-s=0.2", "--iterations=4", "--json"];
    let run = |further: &[&str]| json(&[&common[..], &links, further].concat());
    let [end, layerwise, bare] =
        [&["--send=end"][..], &["--send=layerwise"], &["--send=end", "--mtu=0"]].map(run);
    let per_s = |report: &Value| positive(report, "/iterations_per_s");
    // A host sends three quarters of the model as gradients, and as much as parameters.
    let transfer_s = |report: &Value| positive(report, "/elements") * 4.0 * 1.5 * 8.0 / 0.2e9;
    let at_best = 1.0 / (0.020 + transfer_s(&end) * 1514.0 / 1448.0);
    assert!((0.85 * at_best..at_best).contains(&per_s(&end)), "{} of {at_best}", per_s(&end));
    assert!(per_s(&layerwise) > 1.1 * per_s(&end), "{layerwise:#}");
    assert!(per_s(&bare) > per_s(&end), "headers take room on links");
    assert_eq!(end["compute"]["send"], "end");
    assert!((positive(&end, "/compute/share") - 0.020 * per_s(&end)).abs() < 1e-9);
}

#[test]
fn what_cannot_be_exchanged_is_refused() {
    for (arguments, why) in [
        (&["--model=resnet5000"][..], "unknown model `resnet5000`; known: alexnet"),
        (&["--elements=10", "--tensors=11"], "--tensors 11: expected 1 to 10"),
        (&["--elements=0"], "--elements 0: expected at least 1"),
        (&["--model=vgg19", "--elements=10"], "cannot be used with"),
        (&["--workers=0"], "--workers 0: expected 1 to"),
        (&["--servers=0"], "--servers 0: expected 1 to"),
        (&["--cores=0"], "--cores 0: expected 1 to"),
        (&["--rounds=0"], "--rounds 0: expected 1 to"),
        (&["--iterations=0"], "--iterations 0: expected at least 1"),
        (&["--warmup=-1"], "--warmup -1: expected 0 to"),
        (&["--seconds=nan"], "--seconds NaN: expected 0 to"),
        (&["--timeout=0s"], "expected a time to wait"),
        (&["--optimizer=sdg"], "unknown optimizer `sdg`; known: sgd"),
        (&["--codec=topkk"], "unknown codec `topkk`; known: "),
        (&["--codec=topk:0.01+dvf:delta=1"], "the chain has a sparsifier already"),
        (&["--answer-codec=dgc:0.01"], "dgc"),
        (&["--sync=asp"], "--sync asp: an exchange is synchronous"),
        (
            &["--local=steps:h=4"],
            "--local steps:h=4: an exchange pushes and pulls everything in every iteration",
        ),
        (&["--transport=pigeon"], "possible values: tcp, shm, memory, auto"),
        (&["--congestion=none"], "--congestion none: this system has"),
        (&["--pin=first"], "expected `auto`, `off`, or numbers"),
        (&["--against=horovod"], "invalid value 'horovod'"),
        (&["--colocated"], "--colocated says where --run-with takes workers"),
        (&["--sim"], "--compute <TIME>"),
        (&["--mtu=1500"], "--sim"),
        (&["--sim", "--compute=1ms", "--rounds=2"], "cannot be used with"),
        (&["--sim", "--compute=1ms", "--mtu=40"], "network.mtu = 40: expected 576 to 65535"),
        (&["--sim", "--compute=1ms", "--gbit-per-s=0"], "--gbit-per-s 0: expected a number above 0"),
        (&["--sim", "--compute=1ms", "--buffer-ms=-1"], "--buffer-ms -1: expected 0 to"),
        (&["--compute=5ms", "--elements=10"], "cannot be used with"),
        (&["--compute=5ms", "--pack=10"], "cannot be used with"),
        (&["--compute=5ms", "--copy"], "cannot be used with"),
        (&["--compute=5ms", "--against=tcp"], "cannot be used with"),
        (&["--compute=0s"], "--compute 0s: expected a time to wait out"),
        (&["--compute=soon"], "such as `500ms`"),
        (&["--send=end"], "--compute <TIME>"),
        (&["--send=end", "--elements=10"], "--send is about a computation that is waited out: add --model"),
        (&["--send=later", "--compute=5ms"], "possible values: layerwise, end"),
        (
            &["--colocated", "--host=127.0.0.1", "--run-with=nice"],
            "put {} where the number of the process belongs",
        ),
        (&["--host=127.0.0.1", "--transport=memory"], "threads of one process have no addresses"),
    ] {
        let stderr = refusal(&[&["bench", "exchange"], arguments].concat());
        assert!(stderr.contains(why), "{arguments:?}: {stderr}");
    }
}

#[test]
fn a_peer_that_is_not_installed_is_named_with_what_to_install() {
    let missing = refusal(&["bench", "exchange", "--against=gloo", "--python=no-such-python"]);
    assert!(missing.contains("no-such-python -m pip install torch numpy"), "{missing}");
    // `false` is an interpreter that has no module.
    let arguments = ["bench", "exchange", "--against=mxnet", "--python=true", "--mxnet-python=false"];
    let missing = refusal(&arguments);
    assert!(missing.contains("false -m pip install 'mxnet==1.9.1' 'numpy<1.24'"), "{missing}");
}

#[test]
fn every_codec_is_measured_and_one_alone_is_the_whole_report() {
    let small = ["--elements=20000", "--rounds=1", "--json"];
    let report = json(&[&["bench", "codec"], &small[..]].concat());
    let all = json(&["components", "codec", "--json"]);
    let codecs = report["codecs"].as_array().unwrap();
    assert_eq!(codecs.len(), all["axes"][0]["components"].as_array().unwrap().len());
    for measured in codecs {
        for figure in ["/ratio", "/encode_gb_s", "/decode_gb_s"] {
            positive(measured, figure);
        }
        assert!(measured["relative_error"].is_f64() && measured["cosine"].is_f64(), "{measured}");
    }
    let bitmap = json(&[&["bench", "codec", "--codec=bitmap"], &small[..]].concat());
    assert_eq!((&bitmap["codec"], &bitmap["relative_error"]), (&"bitmap".into(), &0.0.into()));
    assert!(positive(&bitmap, "/ratio") > 4.0, "{bitmap}");
    let stderr = refusal(&["bench", "codec", "--codec=topk:0.01+dvf:delta=1"]);
    assert!(stderr.contains("the chain has a sparsifier already, `topk`"), "{stderr}");
}

#[test]
fn kernels_are_measured_for_every_optimizer_and_element() {
    let arguments = [
        "bench",
        "kernels",
        "--seconds=0",
        "--rounds=1",
        "--memory-elements=65536",
        "--cache-elements=1024",
        "--json",
    ];
    let report = json(&arguments);
    let kernels = report["kernels"].as_array().unwrap();
    let all = json(&["components", "--json"]);
    let optimizers = all["axes"].as_array().unwrap().iter().find(|axis| axis["axis"] == "optimizer").unwrap();
    for optimizer in optimizers["components"].as_array().unwrap() {
        let name = format!("add + {}", optimizer["name"].as_str().unwrap());
        for gradient in ["f32", "f16", "bf16"] {
            for from in ["cache", "memory"] {
                let found = kernels.iter().find(|kernel| {
                    kernel["kernel"] == name.as_str()
                        && kernel["gradient"] == gradient
                        && kernel["from"] == from
                });
                let found = found.unwrap_or_else(|| panic!("{name}, {gradient}, {from} is missing"));
                assert!(positive(found, "/traffic_gb_s") > positive(found, "/gradient_gb_s"));
                assert_eq!(found["fraction_of_limit"].is_f64(), from == "memory");
            }
        }
    }
    positive(&report, "/limits/0/traffic_gb_s");
    let stderr = refusal(&["bench", "kernels", "--optimizer=sgd,sdg"]);
    assert!(stderr.contains("unknown optimizer `sdg`; known: sgd"), "{stderr}");
}

#[test]
fn a_simulated_broadcast_has_its_network_and_its_bound_beside_it() {
    let small = ["bench", "broadcast", "--sim", "--workers=8", "--servers=2", "--elements=400000", "--json"];
    let with = |further: &[&str]| json(&[&small[..], further].concat());
    let plain = with(&["--oversubscription=4"]);
    let (seconds, star) = (positive(&plain, "/seconds"), positive(&plain, "/star_seconds"));
    assert!((positive(&plain, "/speedup") - star / seconds).abs() < 1e-9);
    let bound = positive(&plain, "/bound_seconds");
    assert!(bound <= seconds && seconds < star, "{bound}, {seconds}, {star}");
    // Both are of the same links, and everything crosses some of them.
    assert!(positive(&plain, "/max_link_bytes") >= 1.6e6);
    assert_eq!(plain["links"][0]["bytes"], plain["max_link_bytes"]);
    for (field, expected) in [
        ("broadcast", Value::from("rotated:degree=2")),
        ("workers", 8.into()),
        ("servers", 2.into()),
        ("simulated", true.into()),
        ("filter", Value::Null),
        ("contents", "sizes moved, contents did not; pushes and computation took no time".into()),
    ] {
        assert_eq!(plain[field], expected, "{field}");
    }
    let network = plain["network"].as_str().unwrap();
    assert!(network.contains("1 racks of 10 hosts of 1 Gbit/s, edge uplinks of 2.5 Gbit/s"), "{network}");
    // The star that is compared with leaves out nothing; the same filter on it is beside.
    let filtered = with(&["--oversubscription=4", "--drop=0.8"]);
    assert_eq!(
        (&filtered["filter"], &filtered["star_seconds"]),
        (&"topk:0.2".into(), &plain["star_seconds"])
    );
    let share = positive(&filtered, "/payload_bytes") / positive(&filtered, "/chunk_bytes");
    assert!((0.2..0.25).contains(&share), "{share}");
    assert!(positive(&filtered, "/seconds") < seconds / 3.0);
    assert!(positive(&filtered, "/filtered_star_seconds") < star / 3.0);
    // One way is as fast as itself.
    let star = with(&["--broadcast=star"]);
    assert_eq!(positive(&star, "/speedup"), 1.0);
}

#[test]
fn processes_broadcast_what_the_simulator_is_asked_about() {
    let small = ["bench", "broadcast", "--workers=3", "--servers=1", "--elements=100000", "--rounds=1"];
    let report = json(&[&small[..], &["--versions=2", "--broadcast=chain", "--json", "--quiet"]].concat());
    assert!(
        (positive(&report, "/speedup") - positive(&report, "/star_seconds") / positive(&report, "/seconds"))
            .abs()
            < 1e-9
    );
    assert_eq!((&report["simulated"], &report["bound_seconds"]), (&false.into(), &Value::Null));
    // They share this host's loopback.
    assert_eq!((&report["max_link_bytes"], &report["network"]), (&Value::Null, &Value::Null));
    let known =
        [&["--versions=2", "--drop=0.5", "--gbit-per-s=1", "--json", "--quiet"], &small[2..]].concat();
    let known = json(&[&["bench", "broadcast"], &known[..]].concat());
    for figure in [
        "/bound_seconds",
        "/filtered_speedup",
        "/processes/simulated_seconds",
        "/processes/ratio_to_simulated",
    ] {
        positive(&known, figure);
    }
}

#[test]
fn broadcasts_that_cannot_work_are_refused() {
    for (arguments, expected) in [
        (&["--broadcast=ring"][..], "unknown broadcast `ring`"),
        (&["--broadcast=none"], "--broadcast none: nothing is broadcast"),
        (&["--broadcast=tree:degree=2,depth=2"], "has room for 6 of these 8 receivers"),
        (&["--sim", "--drop=1"], "--drop 1: expected 0 to 1, without 1"),
        (&["--sim", "--elements=0"], "--elements 0: expected 1 to"),
        (&["--sim", "--topology=ring"], "unknown topology `ring`; known: star, three-tier"),
        (&["--sim", "--topology=star", "--oversubscription=2"], "give --topology three-tier"),
        (&["--sim", "--gbit-per-s=0"], "--gbit-per-s 0: expected a number above 0"),
        (&["--sim", "--rounds=3"], "cannot be used with"),
        (&["--rounds=0"], "--rounds 0: expected 1 to 1000"),
        (&["--run-with=ip", "--host=127.0.0.1", "--servers=1"], "takes all processes to the same place"),
    ] {
        let error = refusal(&[&["bench", "broadcast"], arguments].concat());
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}
