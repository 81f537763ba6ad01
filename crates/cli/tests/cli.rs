//! The binary as people and scripts meet it: what it prints where, and its exit codes.

use paramill_core::status::JobSize;
use paramill_node::data_cores::data_cores;
use serde_json::Value;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output, Stdio};

fn paramill(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_paramill"))
        .args(arguments)
        .output()
        .expect("the binary was built for this test")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("output is UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("output is UTF-8")
}

/// Runs it, expects success and nothing on stderr, returns stdout.
fn answer(arguments: &[&str]) -> String {
    let output = paramill(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    assert_eq!(stderr(&output), "", "{arguments:?}");
    stdout(&output)
}

/// Runs it, expects bad usage and nothing on stdout, returns stderr.
fn refusal(arguments: &[&str]) -> String {
    let output = paramill(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
    assert_eq!(stdout(&output), "", "{arguments:?}");
    stderr(&output)
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&answer(arguments)).expect("one JSON object is all there is on stdout")
}

#[test]
fn help_teaches_every_command_by_example() {
    let top = answer(&["--help"]);
    let commands = [
        "train",
        "config",
        "reproduce",
        "serve",
        "launch",
        "status",
        "set",
        "components",
        "doctor",
        "sim",
        "bench",
        "chaos",
    ];
    for command in commands {
        assert!(top.contains(&format!("\n  {command} ")), "{command} is missing in:\n{top}");
    }
    for command in commands.iter().filter(|command| !["sim", "bench"].contains(command)) {
        let help = answer(&[command, "--help"]);
        assert!(help.contains(&format!("Examples:\n  paramill {command}")), "{help}");
    }
    for command in ["swarm", "run"] {
        let help = answer(&["sim", command, "--help"]);
        assert!(help.contains(&format!("Examples:\n  paramill sim {command}")), "{help}");
    }
    for command in ["exchange", "kernels"] {
        let help = answer(&["bench", command, "--help"]);
        assert!(help.contains(&format!("Examples:\n  paramill bench {command}")), "{help}");
    }
}

#[test]
fn help_lists_the_options_of_a_job() {
    let help = answer(&["train", "--help"]);
    for option in [
        "--data",
        "--test",
        "--workers",
        "--servers",
        "--cores",
        "--sync",
        "--placement",
        "--optimizer",
        "--epochs",
        "--batch",
        "--seed",
        "--processes",
        "--config",
        "--inject",
        "--reduce",
        "--order",
        "--nonfinite",
        "--timeout",
        "--json",
        "--plot",
    ] {
        assert!(help.contains(option), "{option} is missing in:\n{help}");
    }
}

#[test]
fn no_command_and_an_unknown_one_are_bad_usage() {
    assert!(refusal(&[]).contains("Usage: paramill"));
    let refused = refusal(&["trian"]);
    assert!(refused.contains("similar subcommands exist") && refused.contains("'train'"), "{refused}");
    assert!(refusal(&["config", "--workerz", "3"]).contains("a similar argument exists: '--workers'"));
    assert!(
        refusal(&["reproduce"]).contains("<NAME|--list>") || refusal(&["reproduce"]).contains("required")
    );
}

#[test]
fn options_without_effect_are_refused() {
    let refused: [(&[&str], &str); 12] = [
        (&["train", "--rate", "1Gbit"], "--rate 1Gbit: in one process nothing is sent; give --processes too"),
        (
            &["train", "--rate", "1Gbit", "--transport", "tcp"],
            "--rate 1Gbit: in one process nothing is sent; give --processes too",
        ),
        (
            &["train", "--processes", "--rate", "1Gbit", "--transport", "shm"],
            "--rate 1Gbit with --transport shm: memory that is shared moves no bytes; use --transport tcp",
        ),
        (
            &["launch", "-n", "1", "--rate", "1Gbit", "--transport", "auto", "--", "true"],
            "--rate 1Gbit with --transport auto: memory that is shared moves no bytes; use --transport tcp",
        ),
        (
            &["serve", "--rate", "1Gbit", "--transport", "shm"],
            "--rate 1Gbit with --transport shm: memory that is shared moves no bytes; use --transport tcp",
        ),
        (
            &["aggregate", "--job", "localhost:1", "--rate", "1Gbit", "--transport", "shm"],
            "--rate 1Gbit with --transport shm: memory that is shared moves no bytes; use --transport tcp",
        ),
        (&["train", "--processes", "--rate", "0"], "`0`: expected 1kbit to 10000Gbit, such as 800Mbit"),
        (&["train", "--topology", env!("CARGO_MANIFEST_PATH")], "topology file"),
        (&["train", "--topology", "-", "--broadcast", "tree"], "expected the name of a file"),
        (&["subscribe", "localhost:1/j", "--out", "m", "--once", "--every", "3s"], "cannot be used with"),
        (
            &["bench", "broadcast", "--latency-us", "3"],
            "--latency-us is about a simulated network: add --sim",
        ),
        (&["bench", "broadcast", "--seed", "3"], "--seed is about a simulated network"),
    ];
    for (words, expected) in refused {
        let told = refusal(words);
        assert!(told.contains(expected), "{words:?}: {told}");
    }
    let path = std::env::temp_dir().join(format!("paramill-topology-{}.toml", std::process::id()));
    std::fs::write(&path, "[[edge]]\nname = 'r'\naggregation = 'a'\nhosts = ['a']\n").expect("it is written");
    let told = refusal(&["train", "--topology", path.to_str().expect("text")]);
    std::fs::remove_file(&path).expect("it is there");
    assert!(told.contains("nothing is broadcast: add --broadcast tree"), "{told}");
}

/// Reading the words as text panicked, with exit code 101.
#[test]
fn a_word_that_is_not_text_is_no_panic() {
    let strange = OsStr::from_bytes(b"\xff.toml");
    for (words, expected) in [
        (&["train", "--config"][..], "cannot read the config file"),
        (&["launch", "-n", "2"], "unexpected argument"),
    ] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_paramill")).args(words).arg(strange).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{words:?}: {}", stderr(&output));
    }
}

#[test]
fn a_reproduction_lists_claims_and_refuses_a_seed_without_effect() {
    let report = json(&["reproduce", "mps-placement", "--json", "--quiet"]);
    let claims = report["claims"].as_array().expect("claims are a list");
    let count = |holds: Value| claims.iter().filter(|claim| claim["holds"] == holds).count();
    assert_eq!([count(true.into()), count(false.into()), count(Value::Null)], [5, 3, 4], "{claims:#?}");
    let text = answer(&["reproduce", "mps-placement", "--quiet"]);
    assert!(text.contains("12 claims: 5 hold, 3 do not, 4 cannot be judged here"), "{text}");
    assert!(text.contains("They come from a closed formula"), "{text}");
    let refused = refusal(&["reproduce", "mps-placement", "--seed", "2"]);
    assert!(
        refused.contains("nothing is random in mps-placement; leave --seed and --seeds out"),
        "{refused}"
    );
    assert!(refusal(&["reproduce", "pf-snappy", "--seeds", "2"]).contains("draws its data from one seed"));
}

#[test]
fn the_default_job_is_a_file() {
    // The one default that depends on the machine.
    let size = JobSize { workers: 4, servers: 2 };
    let cores = data_cores("localhost", &size);
    let expected = format!(
        "\
seed = 1
inject = []

[workload]
name = \"mlp\"
epochs = 5
batch = 32
hidden = 128
factors = 16

[cluster]
workers = 4
servers = 2
replicas = 0
cores = {cores}
aggregators = 0
processes = false
transport = \"auto\"
timeout = \"1m\"

[policy]
sync = \"bsp\"
placement = \"heuristic\"
optimizer = \"adam:lr=0.001\"
codec = \"none\"
answer_codec = \"none\"
broadcast = \"none\"
reduce = \"mean\"
order = \"arrival\"
nonfinite = \"reject\"
chunk = \"32KB\"
local = \"none\"
priority = \"front\"
hold = \"none\"
"
    );
    assert_eq!(answer(&["config"]), expected);
}

#[test]
fn a_printed_job_can_be_given_back_and_options_win_over_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("job.toml");
    let printed =
        answer(&["config", "lr", "--sync", "pssp:s=3,c=0.5", "--processes", "--inject", "worker=2:slow=4x"]);
    std::fs::write(&path, &printed).expect("the file can be written");
    let path = path.to_str().expect("the path is UTF-8");
    assert_eq!(answer(&["config", "--config", path]), printed);

    let job = json(&["config", "--config", path, "--workers", "9", "--processes=false", "--json"]);
    assert_eq!(job["cluster"]["workers"], 9);
    assert_eq!(job["cluster"]["processes"], false);
    assert_eq!(job["policy"]["sync"], "pssp:s=3,c=0.5");
    assert_eq!(job["inject"][0], "worker=2:slow=4x");
}

#[test]
fn a_job_that_cannot_work_is_bad_usage() {
    for (arguments, expected) in [
        (
            vec!["--sync", "sssp:s=3"],
            "error: unknown consistency model `sssp`; known: bsp, asp, ssp, dsps, drop, pssp, psp",
        ),
        (
            vec!["--placement", "nearest"],
            "error: unknown placement `nearest`; known: uniform, round_robin, greedy, heuristic",
        ),
        (vec!["--optimizer", "adm:lr=1"], "error: unknown optimizer `adm`; known: sgd, momentum"),
        (vec!["--sync", "ssp:t=3"], "unknown field `t`"),
        (vec!["--workers", "0"], "error: workers = 0: expected 1 to 16384"),
        (vec!["--workers", "many"], "invalid value 'many' for '--workers <N>'"),
        (vec!["--order", "any"], "[possible values: arrival, ranked]"),
        (vec!["--chunk", "3MB"], "expected 4B to 2MB in steps of 4 bytes, such as 4KB, 32KB or 1MB"),
        (vec!["--answer-codec", "zip"], "error: unknown codec `zip`; known: "),
        (vec!["--broadcast", "ring"], "error: unknown broadcast `ring`; known: none, star, chain"),
        (
            vec!["--hold", "gaia:0.1"],
            "error: unknown criterion of held updates `gaia`; known: none, significance",
        ),
        (vec!["--hold", "when:n > 3"], "`n` is not known here: a worker judges an update by significance"),
        (vec!["--timeout", "5 parsecs"], "such as `500ms`"),
        (vec!["gpt"], "unknown workload `gpt`"),
        (vec!["--inject", "worker=2:sleepy"], "error: fault `worker=2:sleepy`: "),
        (
            vec!["--sync", "when:1/0"],
            "when: `1/0` is given without a name, expected one of `pull`, `push`, `step`, `late`",
        ),
        (vec!["--config", "no-such-file.toml"], "error: cannot read the config file no-such-file.toml"),
        (vec!["--config", "/dev/zero"], "the config file /dev/zero: it is longer than 16 MiB"),
    ] {
        let message = refusal(&[&["config"], arguments.as_slice()].concat());
        assert!(message.contains(expected), "{arguments:?}:\n{message}");
    }
}

#[test]
fn every_policy_is_an_option_and_a_key_of_the_file() {
    let help = stdout(&paramill(&["train", "--help"]));
    let printed = stdout(&paramill(&["config"]));
    for (name, default) in [
        ("sync", "bsp"),
        ("placement", "heuristic"),
        ("codec", "none"),
        ("answer_codec", "none"),
        ("broadcast", "none"),
        ("reduce", "mean"),
        ("order", "arrival"),
        ("nonfinite", "reject"),
        ("chunk", "32KB"),
        ("local", "none"),
        ("priority", "front"),
        ("hold", "none"),
    ] {
        let option = format!("--{} <", name.replace('_', "-"));
        assert!(help.contains(&option) && help.contains(&format!("[default: {default}]")), "{name}:\n{help}");
        assert!(printed.contains(&format!("\n{name} = \"{default}\"\n")), "{name}:\n{printed}");
    }
}

#[test]
fn what_is_to_be_set_is_said_as_axis_and_text() {
    for (arguments, expected) in [
        (vec!["--sync", "asp"], "say it without dashes: paramill set URL sync=TEXT"),
        (vec!["--answer-codec=f16"], "say it without dashes: paramill set URL answer_codec=TEXT"),
        (vec![], "<AXIS=TEXT>"),
        (vec!["asp"], "cannot read `asp`: expected AXIS=TEXT, such as sync=ssp:s=5"),
        (vec!["snyc=asp"], "unknown policy `snyc`; known: sync, placement, optimizer, codec"),
        (vec!["sync=asp", "sync=bsp"], "`sync` is given twice"),
    ] {
        let message = refusal(&[&["set", "127.0.0.1:1"], arguments.as_slice()].concat());
        assert!(message.contains(expected), "{arguments:?}:\n{message}");
    }
}

#[test]
fn a_wrong_key_in_a_file_is_shown_in_its_place() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("job.toml");
    std::fs::write(&path, "[cluster]\nworkers = 4\nserverz = 2\n").expect("the file can be written");
    let message = refusal(&["config", "--config", path.to_str().expect("the path is UTF-8")]);
    for expected in ["job.toml", "line 3", "serverz = 2", "unknown field `serverz`", "`servers`"] {
        assert!(message.contains(expected), "{expected} is missing in:\n{message}");
    }
}

#[test]
fn a_scenario_that_cannot_go_on_ends_and_says_who_waits() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("stuck.toml");
    let scenario = "workers = 2\nfaults = ['link:reset']\n[[tables]]\nname = 'w'\nshape = [10]\n";
    std::fs::write(&path, scenario).expect("the file can be written");
    let output = paramill(&["sim", "run", path.to_str().expect("the path is UTF-8"), "--json"]);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(4), "{message}");
    assert!(message.starts_with("error: no worker made progress for "), "{message}");
    assert!(message.contains("worker 1 waits for the job to start"), "{message}");
    let report: Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
    assert!(message.contains(report["stalled"].as_str().expect("a sentence")), "{report}");
    assert!(
        refusal(&["sim", "run", "/dev/zero"]).contains("the scenario /dev/zero: it is longer than 16 MiB")
    );
}

#[test]
fn a_scenario_shows_its_network_and_the_busiest_links() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/scenarios/three-tier.toml");
    let text = answer(&["sim", "run", path]);
    for expected in ["three-tier: 4 racks of 4 hosts of 1 Gbit/s", "busiest links", "edge=3:up"] {
        assert!(text.contains(expected), "{expected} is missing in:\n{text}");
    }
    let report = json(&["sim", "run", path, "--json"]);
    let links = report["traffic"].as_array().expect("links are a list");
    let bytes = |name: &str| {
        let link = links.iter().find(|link| link["link"] == name).expect("the link was used");
        link["bytes"].as_u64().expect("bytes are a number")
    };
    assert!(bytes("edge=3:up") > bytes("worker=3:up"), "{links:?}");
}

#[test]
fn components_are_listed_with_parameters_and_examples() {
    let text = answer(&["components"]);
    for expected in
        ["Consistency model (--sync)", "Placement (--placement)", "Optimizer (--optimizer)", "ssp:s=3"]
    {
        assert!(text.contains(expected), "{expected} is missing in:\n{text}");
    }
    let all = json(&["components", "--json"]);
    let mut count = 0;
    for axis in all["axes"].as_array().expect("axes are a list") {
        let option = format!("--{}", axis["option"].as_str().expect("an option is text"));
        for component in axis["components"].as_array().expect("components are a list") {
            assert!(component["about"].as_str().is_some_and(|about| about.ends_with('.')), "{component}");
            let example = component["example"].as_str().expect("an example is text");
            // Every example can be typed as it stands; a codec may be for one direction only.
            let is_for_answers =
                option == "--codec" && !paramill(&["config", &option, example]).status.success();
            answer(&["config", if is_for_answers { "--answer-codec" } else { &option }, example]);
            count += 1;
        }
    }
    assert!(count >= 20, "{count} components");
}

#[test]
fn one_component_is_shown_in_full() {
    let text = answer(&["components", "ssp"]);
    for expected in
        ["ssp (consistency model)", "example: --sync 'ssp:s=3'", "(must be given)", "exec", "lazy"]
    {
        assert!(text.contains(expected), "{expected} is missing in:\n{text}");
    }
    // A rule's own default stands in the place of the common one.
    let text = answer(&["components", "adamw"]);
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("weight_decay")).collect();
    assert!(matches!(lines[..], [line] if line.contains(" 0.01 ")), "{text}");
    let one = json(&["components", "adam", "--json"]);
    assert_eq!(one["axes"][0]["components"].as_array().map(Vec::len), Some(1));
    assert!(refusal(&["components", "nonsense"]).contains("unknown component `nonsense`; known: bsp, asp"));
}

#[test]
fn the_doctor_examines_the_machine_and_names_what_is_in_the_way() {
    let report = paramill(&["doctor", "no-such-host.invalid:7070", "--deadline", "2s", "--json", "--quiet"]);
    assert_eq!(report.status.code(), Some(1));
    assert_eq!(stderr(&report), "error: in the way: address\n");
    let report: Value = serde_json::from_str(&stdout(&report)).expect("one JSON object");
    assert_eq!(report["ok"], false);
    let checks = report["checks"].as_array().expect("checks are a list");
    let verdict =
        |name: &str| checks.iter().find(|check| check["name"] == name).map(|check| check["verdict"].clone());
    assert_eq!(verdict("address"), Some("fail".into()));
    for name in
        ["cores", "memory", "kernel", "open files", "shared memory", "huge pages", "clock", "loopback TCP"]
    {
        assert!(verdict(name).is_some(), "{name} was not checked");
    }
    assert!(refusal(&["doctor", "host:port"]).contains("expected HOST:PORT"));
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_paramill"))
        .arg("components")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the process ends");
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[test]
fn ctrl_c_ends_it_with_130() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_paramill"))
        .arg("doctor")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    // The first line of progress says that it is at work, which takes seconds.
    let mut line = String::new();
    let progress = child.stderr.take().expect("stderr is piped");
    BufReader::new(progress).read_line(&mut line).expect("stderr is text");
    assert!(line.contains("looking at the machine"), "{line}");
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::INT).expect("the process is ours");
    assert_eq!(child.wait().expect("the process ends").code(), Some(130));
}
