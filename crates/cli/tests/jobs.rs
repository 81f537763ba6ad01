//! Jobs as separate processes: they train, they can be asked and changed, they fail with a name,
//! and they leave nothing behind.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");

fn paramill(arguments: &[&str]) -> Output {
    Command::new(PARAMILL).args(arguments).output().expect("the binary was built for this test")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs it, expects success, and reads the one JSON object on stdout.
fn json(arguments: &[&str]) -> Value {
    let output = paramill(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object is all there is on stdout")
}

/// Starts it in the background, with stdout to be read.
fn spawn(arguments: &[&str]) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = Command::new(PARAMILL)
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary was built for this test");
    let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
    (child, stdout)
}

fn wait(child: &mut Child, limit: Duration) -> Option<i32> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().expect("the child is ours");
    panic!("it did not end within {limit:?}");
}

/// The processes that `parent` started, in Linux's own books.
fn children_of(parent: u32) -> Vec<u32> {
    let is_child = |stat: &str| {
        let after_name = stat.rsplit_once(')')?.1;
        (after_name.split_whitespace().nth(1)?.parse() == Ok(parent)).then_some(())
    };
    std::fs::read_dir("/proc")
        .expect("this is Linux")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| is_child(&stat).is_some())
        })
        .collect()
}

/// The two servers and four workers of the default job, once they are there.
fn six_children_of(parent: u32) -> Vec<u32> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let children = children_of(parent);
        if children.len() == 6 {
            return children;
        }
        assert!(Instant::now() < deadline, "6 processes were expected, {} are there", children.len());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_alive(pid: u32) -> bool {
    Pid::from_raw(pid as i32).is_some_and(|pid| test_kill_process(pid).is_ok())
}

/// Trains in processes; the report.
fn trained(job: &[&str], sync: &str) -> Value {
    let report = json(&[&["train"], job, &["--processes", "--json", "--quiet", "--sync", sync]].concat());
    for key in [
        "workload",
        "workers",
        "servers",
        "sync",
        "steps",
        "steps_per_s",
        "loss",
        "metric",
        "bytes_pushed",
        "bytes_pulled",
        "bytes_relayed",
        "reads",
        "dprs",
        "max_staleness",
    ] {
        assert!(!report[key].is_null(), "{key} is missing under {sync}");
    }
    assert_eq!((report["workers"].as_u64(), report["sync"].as_str()), (Some(4), Some(sync)));
    report
}

/// A loss that has come down is told from one that stands still, which is that of a job with next to no learning rate. (The
/// AUC is not: it is about the order of scores alone, which the smallest of steps decides.)
#[test]
fn every_consistency_model_trains_across_processes() {
    let folder = tempfile::tempdir().unwrap();
    let [train, test] =
        paramill_train::generate::write_sparse_examples(folder.path(), 1, 2000, true).unwrap();
    let (train, test) = (train.to_str().unwrap(), test.to_str().unwrap());
    let job = ["lr", "--data", train, "--test", test, "--workers", "4", "--servers", "2"];
    let loss = |report: &Value| report["test_loss"].as_f64().unwrap();
    let still = trained(&[&job[..], &["--optimizer", "sgd:lr=1e-30"]].concat(), "bsp");
    assert!((loss(&still) - 2f64.ln()).abs() < 1e-3, "{still}");
    for sync in ["bsp", "asp", "ssp:s=3", "pssp:s=3,c=0.5", "drop:n=3", "psp:c=3", "dsps:min=1,max=4"] {
        let report = trained(&job, sync);
        assert_eq!(report["metric"]["name"], "auc");
        let auc = report["metric"]["value"].as_f64().unwrap();
        assert!(auc > 0.85, "{sync}: AUC {auc}");
        assert!(loss(&report) < 0.6, "{sync}: {}, and {} without training", loss(&report), loss(&still));
    }
}

/// Partial pulling is of blocks of dense tables.
#[test]
fn partial_pulling_trains_across_processes() {
    let job = ["mlp", "--examples", "1000", "--epochs", "3", "--servers", "4", "--placement", "uniform"];
    let loss = |report: &Value| report["test_loss"].as_f64().unwrap();
    let still = trained(&[&job[..], &["--optimizer", "sgd:lr=1e-30"]].concat(), "bsp");
    for sync in ["psp:c=3,b=0.5", "psp:c=3,b=0.9,tau2=1ms"] {
        let report = trained(&job, sync);
        let (trained, still) = (loss(&report), loss(&still));
        assert!(trained < 0.7 * still, "{sync}: {trained}, and {still} without training");
    }
}

/// Rows of a logistic regression, and the layers of a network.
#[test]
fn held_updates_save_bytes_and_are_reported_across_processes() {
    // Far above chance, which is 0.5 and 0.1.
    for (job, trains) in [(&["lr", "--epochs=2"][..], 0.8), (&["mlp", "--examples=1000", "--epochs=3"], 0.4)]
    {
        let trained = |hold: &str| trained(&[job, &["--hold", hold]].concat(), "bsp");
        let (all, held) = (trained("none"), trained("when:held < 2,most=3"));
        let bytes = |report: &Value| {
            report["bytes_pushed"].as_u64().expect("a number")
                + report["bytes_pulled"].as_u64().expect("a number")
        };
        assert!(2 * bytes(&held) < bytes(&all), "{job:?}: {} of {}", bytes(&held), bytes(&all));
        assert_eq!(all["updates"], Value::Null);
        // A row that is not touched again is sent when it is as old as it may be.
        let longest = held["updates"]["longest"].as_u64().expect("a number");
        assert!((2..=3).contains(&longest), "{held:#}");
        assert!(held["metric"]["value"].as_f64().expect("a number") > trains, "{held:#}");
    }
}

#[test]
fn threads_and_processes_compute_the_same_bits() {
    let common =
        ["train", "mlp", "--examples", "400", "--epochs", "1", "--order", "ranked", "--json", "--quiet"];
    let run = |extra: &[&str]| json(&[&common[..], extra].concat());
    let threads = run(&[]);
    for transport in ["tcp", "shm"] {
        let processes = run(&["--processes", "--cores", "2", "--transport", transport]);
        for key in ["loss", "test_loss", "metric", "bytes_pushed", "steps"] {
            assert_eq!(threads[key], processes[key], "{key} over {transport}");
        }
    }
    let psp = run(&["--sync", "psp:c=4,b=1"]);
    assert_eq!(
        (&psp["loss"], &psp["test_loss"]),
        (&threads["loss"], &threads["test_loss"]),
        "psp with c = N is bsp"
    );
    for extra in [
        &["--aggregators", "2"][..],
        &["--aggregators", "1", "--processes"],
        &["--aggregators", "2", "--processes", "--broadcast", "star"],
    ] {
        let through = run(extra);
        for key in ["loss", "test_loss", "steps"] {
            assert_eq!(threads[key], through[key], "{key} with {extra:?}");
        }
    }
}

#[test]
fn every_kind_of_model_trains_through_aggregators() {
    for sync in ["bsp", "ssp:s=2", "drop:n=3"] {
        let report = json(&[
            "train",
            "mlp",
            "--examples",
            "400",
            "--epochs",
            "2",
            "--processes",
            "--aggregators",
            "2",
            "--json",
            "--quiet",
            "--sync",
            sync,
        ]);
        let loss = report["loss"].as_f64().unwrap();
        assert!(loss.is_finite() && loss < 2.3, "{sync}: loss {loss}");
    }
}

#[test]
fn an_aggregator_without_a_job_says_what_it_misses() {
    let output = paramill(&["aggregate", "--job", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--hold", "1h"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("hold = 1h: expected at most 10s"), "{}", text(&output.stderr));
    let output = paramill(&["aggregate", "--listen", "127.0.0.1:0"]);
    assert!(text(&output.stderr).contains("--job <URL>"), "{}", text(&output.stderr));
}

#[test]
fn a_running_job_can_be_asked_and_changed() {
    let job = ["--workers", "2", "--servers", "1", "--transport", "shm"];
    let (mut serve, mut stdout) =
        spawn(&[&["serve", "--listen", "127.0.0.1:0", "--json"], &job[..]].concat());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let url = serde_json::from_str::<Value>(&line).unwrap()["url"].as_str().unwrap().to_owned();
    // The address is said before the data cores have registered with it.
    let began = Instant::now();
    while json(&["status", &url, "--json"])["phase"] != "waiting: 0 of 2 workers and 1 of 1 servers are here"
    {
        assert!(began.elapsed() < Duration::from_secs(20), "{}", json(&["status", &url, "--json"]));
    }
    let early = paramill(&["set", &url, "sync=asp"]);
    assert_eq!(early.status.code(), Some(1));
    assert!(text(&early.stderr).contains("has not started"), "{}", text(&early.stderr));

    let plan = json_plan(&[&["mlp", "--examples", "400", "--epochs", "2000"], &job[..]].concat());
    let mut workers: Vec<Child> = (0..2).map(|rank| worker(&url, rank, &plan)).collect();
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let status = json(&["status", &url, "--json"]);
        if status["phase"] == "running with 2 workers" && status["workers"][0]["report"]["clock"] != 0 {
            break;
        }
        assert!(Instant::now() < deadline, "{status}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let set = paramill(&["set", &url, "sync=ssp:s=3", "--table", "*", "--server", "0"]);
    assert!(set.status.success(), "{}", text(&set.stderr));
    assert_eq!(text(&set.stdout), "4 tables now have sync=ssp:s=3 on server 0\n");
    let other = paramill(&["set", &url, "optimizer=lars:lr=1"]);
    assert!(text(&other.stderr).contains("but not the rule"), "{}", text(&other.stderr));
    let fixed = paramill(&["set", &url, "chunk=4KB"]);
    assert_eq!(fixed.status.code(), Some(1));
    let why = text(&fixed.stderr);
    assert!(why.contains("`chunk` cannot be changed while a job runs: tables were cut into chunks"), "{why}");
    let shown = text(&paramill(&["status", &url]).stdout);
    assert!(shown.contains("running with 2 workers") && shown.contains("ssp:s=3"), "{shown}");
    let wrong = paramill(&["set", &url, "sync=sps"]);
    assert!(
        text(&wrong.stderr).contains("unknown consistency model `sps`; known: bsp"),
        "{}",
        text(&wrong.stderr)
    );

    // A worker that is killed in the middle of its work, its memory shared, is declared dead, and the other goes on.
    workers[1].kill().unwrap();
    workers[1].wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while json(&["status", &url, "--json"])["phase"] != "running with 1 workers; 1 declared dead" {
        assert!(Instant::now() < deadline, "worker 1 was not declared dead");
        std::thread::sleep(Duration::from_millis(100));
    }
    let clock = || json(&["status", &url, "--json"])["workers"][0]["report"]["clock"].as_u64();
    let before = clock();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(clock() > before, "worker 0 does not go on");
    workers[0].kill().unwrap();
    workers[0].wait().unwrap();
    assert_eq!(wait(&mut serve, Duration::from_secs(20)), Some(1), "a job whose workers all died has failed");
}

/// Bytes pushed and pulled per step, over some steps from now on.
fn bytes_per_step(url: &str) -> [f64; 2] {
    let look = || {
        let shard = &json(&["status", url, "--json"])["shards"][0];
        let count = |field: &Value| field.as_f64().unwrap_or(0.0);
        [&shard["tables"][0]["version"], &shard["bytes_pushed"], &shard["bytes_pulled"]].map(count)
    };
    let (before, deadline) = (look(), Instant::now() + Duration::from_secs(60));
    loop {
        let after = look();
        if after[0] >= before[0] + 20.0 {
            let steps = after[0] - before[0];
            return [(after[1] - before[1]) / steps, (after[2] - before[2]) / steps];
        }
        assert!(Instant::now() < deadline, "the job stands still at step {}", after[0]);
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn codecs_of_a_running_job_change_what_travels() {
    for transport in ["tcp", "shm"] {
        let job = ["--workers", "2", "--servers", "1", "--transport", transport];
        let (mut serve, mut stdout) =
            spawn(&[&["serve", "--listen", "127.0.0.1:0", "--json"], &job[..]].concat());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let url = serde_json::from_str::<Value>(&line).unwrap()["url"].as_str().unwrap().to_owned();
        let plan = json_plan(&[&["mlp", "--examples", "400", "--epochs", "100000"], &job[..]].concat());
        let mut workers: Vec<Child> = (0..2).map(|rank| worker(&url, rank, &plan)).collect();
        let plain = bytes_per_step(&url);
        let set = |policies: &[&str]| {
            let output = paramill(&[&["set", &url], policies].concat());
            assert!(output.status.success(), "{}", text(&output.stderr));
            // Steps that were under way are not of interest.
            bytes_per_step(&url);
            bytes_per_step(&url)
        };
        let encoded = set(&["codec=topk:0.01", "answer_codec=f16"]);
        assert!(encoded[0] < plain[0] / 10.0, "{transport}: {plain:?} became {encoded:?}");
        assert!(encoded[1] < plain[1] * 0.6, "{transport}: {plain:?} became {encoded:?}");
        let differences = set(&["answer_codec=topk:0.01"]);
        assert!(differences[1] < plain[1] / 10.0, "{transport}: {plain:?} became {differences:?}");
        let again = set(&["codec=none", "answer_codec=none"]);
        assert!(again.iter().zip(plain).all(|(now, then)| *now > then * 0.8), "{transport}: {again:?}");
        for worker in &mut workers {
            assert!(worker.try_wait().unwrap().is_none(), "a worker has ended");
            worker.kill().unwrap();
            worker.wait().unwrap();
        }
        assert_eq!(wait(&mut serve, Duration::from_secs(20)), Some(1), "all of its workers died");
    }
}

/// A plan in TOML.
fn json_plan(arguments: &[&str]) -> String {
    let output = paramill(&[&["config"], arguments].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// A training worker, as `train --processes` starts it.
fn worker(url: &str, rank: u32, plan: &str) -> Child {
    use std::io::Write;
    let mut child = Command::new(PARAMILL)
        .arg("worker-process")
        .env("PARAMILL_URL", url)
        .env("PARAMILL_RANK", rank.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(plan.as_bytes()).unwrap();
    child
}

#[test]
fn launch_gives_identities_and_ends_all_with_the_first_failure() {
    let output = paramill(&[
        "launch",
        "-n",
        "2",
        "-s",
        "2",
        "--",
        "sh",
        "-c",
        "echo I am $PARAMILL_RANK of $PARAMILL_WORKERS at $PARAMILL_URL",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert!(lines[0].starts_with("[worker 0] I am 0 of 2 at paramill://127.0.0.1:"), "{lines:?}");
    assert!(lines[1].starts_with("[worker 1] I am 1 of 2 at paramill://127.0.0.1:"), "{lines:?}");

    let began = Instant::now();
    let failed = paramill(&[
        "launch",
        "-n",
        "3",
        "--",
        "sh",
        "-c",
        "if [ $PARAMILL_RANK = 1 ]; then exit 3; fi; sleep 60",
    ]);
    assert_eq!(failed.status.code(), Some(1));
    let sentence = text(&failed.stderr);
    assert!(sentence.contains("worker 1 failed (exit status: 3); all others were ended"), "{sentence}");
    assert!(began.elapsed() < Duration::from_secs(30), "the others were not ended");

    let missing = paramill(&["launch", "-n", "1", "--", "/no/such/program"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        text(&missing.stderr).contains("cannot start worker 0 (/no/such/program)"),
        "{}",
        text(&missing.stderr)
    );
}

#[test]
fn launch_shares_the_cpus_out_unless_the_user_does() {
    let threads = |workers: &str, given: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paramill"));
        command.args(["launch", "-n", workers, "--", "sh", "-c", "echo threads: ${OMP_NUM_THREADS:-all}"]);
        command.env_remove("OMP_NUM_THREADS");
        command.envs(given.map(|threads| ("OMP_NUM_THREADS", threads)));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
            .lines()
            .map(|line| line.split_once(": ").unwrap().1.to_owned())
            .collect::<Vec<_>>()
    };
    let cpus = std::thread::available_parallelism().unwrap().get();
    let half = (cpus / 2).max(1).to_string();
    assert_eq!(threads("2", None), [half.as_str(), half.as_str()]);
    assert_eq!(threads("2", Some("7")), ["7", "7"]);
    assert_eq!(threads("1", None), ["all"]);
}

#[test]
fn workers_under_launch_train() {
    let script =
        format!("{PARAMILL} config lr --workers 2 --servers 2 --examples 800 | {PARAMILL} worker-process");
    let output = paramill(&[
        "launch",
        "-n",
        "2",
        "-s",
        "2",
        "--optimizer",
        "adagrad:lr=0.1",
        "--",
        "sh",
        "-c",
        &script,
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("[worker 0] {\"done\""), "{}", text(&output.stdout));
}

/// Programs that are launched get their faults through the environment, and the report names who was waited for.
#[test]
fn a_launched_job_reports_whom_its_faults_made_others_wait_for() {
    let script =
        format!("{PARAMILL} config lr --workers 2 --servers 1 --examples 400 | {PARAMILL} worker-process");
    let launch = |extra: &[&str]| {
        let common = ["launch", "-n", "2", "--json", "--optimizer", "adagrad:lr=0.1"];
        json(&[&common[..], extra, &["--", "sh", "-c", &script]].concat())
    };
    let report = launch(&["--inject", "worker=1:delay=20ms", "--inject", "server=0:slow=1.1x"]);
    assert_eq!((&report["workers"], &report["restarts"]), (&2.into(), &0.into()), "{report}");
    let charges = report["waited"]["causes"].as_array().unwrap();
    let pushes_of_1 = charges.iter().find(|charge| charge["cause"] == serde_json::json!({ "push": 1 }));
    let seconds = pushes_of_1.expect("worker 0 waited for them")["seconds"].as_f64().unwrap();
    assert!(seconds > 0.02, "each of worker 1's pushes is later than that: {report}");

    // A job that nobody joined is over when its programs are, and nobody waited in it.
    let report = json(&["launch", "-n", "1", "--json", "--", "true"]);
    assert_eq!(report["waited"]["seconds"], 0.0, "{report}");
}

#[test]
fn launch_refuses_faults_of_a_computation_that_it_cannot_slow() {
    for (fault, sentence) in [
        (
            "worker=1:slow=4x",
            "fault `worker=1:slow=4x`: the computation of a program of its own cannot be slowed",
        ),
        ("trace=steps.csv", "cannot be slowed; `worker=N:delay=20ms` makes a worker's frames late"),
        ("worker=2:pause=1s@1s", "there is no worker 2"),
    ] {
        let refused = paramill(&["launch", "-n", "2", "--inject", fault, "--", "true"]);
        assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
        assert!(text(&refused.stderr).contains(sentence), "{}", text(&refused.stderr));
    }
}

#[test]
fn ctrl_c_stops_everything_with_130() {
    let arguments = ["train", "mlp", "--epochs", "100000", "--processes", "--quiet"];
    let (mut train, _stdout) = spawn(&arguments);
    let children = six_children_of(train.id());
    std::thread::sleep(Duration::from_millis(500));
    kill_process(Pid::from_child(&train), Signal::INT).unwrap();
    assert_eq!(wait(&mut train, Duration::from_secs(10)), Some(130));
    let left: Vec<u32> = children.into_iter().filter(|pid| is_alive(*pid)).collect();
    assert_eq!(left, [] as [u32; 0], "processes were left behind");
}

#[test]
fn children_end_when_their_parent_is_killed() {
    let (mut train, _stdout) = spawn(&["train", "mlp", "--epochs", "100000", "--processes", "--quiet"]);
    let children = six_children_of(train.id());
    std::thread::sleep(Duration::from_secs(1));
    train.kill().unwrap();
    train.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while children.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < deadline, "processes outlive their parent");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn faults_are_carried_out() {
    let train = |extra: &[&str]| {
        let common = [
            "train",
            "mlp",
            "--examples",
            "800",
            "--epochs",
            "2",
            "--workers",
            "2",
            "--processes",
            "--json",
            "--quiet",
        ];
        json(&[&common[..], extra].concat())
    };
    let plain = train(&["--sync", "asp"]);
    // A trace makes the length of steps known: 50 steps of worker 1 take 20 ms each, those of worker 0 none.
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("steps.csv");
    std::fs::write(&trace, "worker,step,seconds\n0,0,0\n1,0,0.02\n").unwrap();
    let fault = format!("trace={}", trace.display());
    let slowed = train(&["--sync", "asp", "--inject", &fault]);
    let least = 0.02 * slowed["steps"].as_f64().unwrap() / 2.0;
    assert!(slowed["seconds"].as_f64().unwrap() >= least, "{slowed}");
    assert!(slowed["max_staleness"].as_u64() >= plain["max_staleness"].as_u64().map(|_| 5), "{slowed}");
    // Connections that break are made anew, and nothing is lost or doubled.
    let ranked = ["--order", "ranked"];
    let whole = train(&ranked);
    let broken = train(&[&ranked[..], &["--inject", "link:reset,p=0.002"]].concat());
    assert_eq!(whole["test_loss"], broken["test_loss"], "resets changed the result");
    // A server that stands still for a while delays the job and no more.
    let paused = train(&[&ranked[..], &["--inject", "server=0:pause=1s@0.5s"]].concat());
    assert_eq!(whole["test_loss"], paused["test_loss"]);
}

/// Late answers on slow connections used to be torn, and last words that were held back used to be lost: the others then
/// waited 30 s for a coordinator that was gone, and failed.
#[test]
fn delayed_messages_arrive_whole_and_to_the_last_word() {
    let train = |workload: &str, extra: &[&str]| {
        let common =
            ["train", workload, "--examples", "1000", "--epochs", "1", "--workers", "2", "--order", "ranked"];
        let processes = ["--processes", "--transport", "tcp", "--json", "--quiet"];
        json(&[&common[..], &processes[..], extra].concat())["test_loss"].clone()
    };
    let delays = ["--inject", "pull:delay=20ms,p=0.3", "--inject", "link:delay=1ms,p=0.3"];
    assert_eq!(train("mlp", &[]), train("mlp", &delays));
    assert_eq!(train("lr", &[]), train("lr", &["--inject", "link:delay=50ms"]));
}

#[test]
fn a_worker_that_crashes_is_named() {
    let output = paramill(&[
        "train",
        "mlp",
        "--epochs",
        "100000",
        "--processes",
        "--quiet",
        "--inject",
        "worker=2:crash@1s",
    ]);
    assert_eq!(output.status.code(), Some(1));
    let sentence = text(&output.stderr);
    assert!(sentence.contains("worker 2 crashed, as injected"), "{sentence}");
    assert!(
        sentence.contains("error: worker 2 failed (exit status: 1); all others were ended"),
        "{sentence}"
    );
}

#[test]
fn a_worker_that_fails_ends_a_scenario_over_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("crash.toml");
    // The others would go on without it for hours.
    let scenario = "workers = 3\nservers = 1\niterations = 1000000\nfaults = ['worker=1:crash@300ms']\n\
                    [[tables]]\nname = 'w'\nshape = [10]\n";
    std::fs::write(&file, scenario).unwrap();
    let mut child = Command::new(PARAMILL)
        .args(["sim", "run", file.to_str().unwrap(), "--sockets"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(wait(&mut child, Duration::from_secs(60)), Some(1));
    let sentence = text(&child.wait_with_output().unwrap().stderr);
    assert!(sentence.contains("error: worker 1: "), "{sentence}");
    assert!(sentence.contains("worker 1 crashed, as injected"), "{sentence}");
}

#[test]
fn bad_input_is_named_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("bad.svm"), "1 1:1\n0 2:x\n").unwrap();
    let cases: [(&[&str], &str); 4] = [
        (&["train", "lr", "--data", &path("missing.svm")], "missing.svm"),
        (&["train", "lr", "--data", &path("bad.svm")], "bad.svm, line 2: expected a finite number"),
        (
            &["train", "lr", "--data", &path("bad.svm"), "--processes"],
            "bad.svm, line 2: expected a finite number",
        ),
        (&["train", "cnn", "--data", folder.path().to_str().unwrap()], "train-images-idx3-ubyte"),
    ];
    for (arguments, expected) in cases {
        let output = paramill(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(text(&output.stderr).contains(expected), "{arguments:?}: {}", text(&output.stderr));
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let output = paramill(&["serve", "--listen", &taken]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains(&format!("{taken} is in use by another program")),
        "{}",
        text(&output.stderr)
    );
    let nobody = paramill(&["status", "127.0.0.1:1"]);
    assert_eq!(nobody.status.code(), Some(1));
    assert!(text(&nobody.stderr).contains("no coordinator at 127.0.0.1:1"), "{}", text(&nobody.stderr));
}

#[test]
fn a_plot_is_drawn_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("loss.svg");
    let output = paramill(&["train", "lr", "--examples", "400", "--quiet", "--plot", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(Path::new(&file).metadata().unwrap().len() > 1000);
    let shown = text(&output.stdout);
    for word in ["loss", "auc", "steps/s", "pushed", "staleness", "DPRs"] {
        assert!(shown.contains(word), "{word} is missing in:\n{shown}");
    }
}

/// A worker that is slowed down is the one whose pushes others wait for.
#[test]
fn the_report_names_the_straggler_and_what_it_costs() {
    let train = ["train", "lr", "--workers=3", "--servers=2", "--epochs=1", "--processes", "--inject"];
    let report = json(&[&train[..], &["worker=1:slow=50x", "--json", "--quiet"]].concat());
    let waited = &report["waited"];
    let causes = waited["causes"].as_array().unwrap();
    let pushes = causes.iter().find(|charge| charge["cause"]["push"].is_u64()).unwrap();
    assert_eq!(pushes["cause"]["push"], 1, "{waited}");
    let charged: f64 = causes.iter().map(|charge| charge["seconds"].as_f64().unwrap()).sum();
    let seconds = waited["seconds"].as_f64().unwrap();
    assert!(charged + waited["others"].as_f64().unwrap() <= seconds * 1.000_001, "{waited}");
}
