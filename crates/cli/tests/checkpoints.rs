//! Jobs whose processes are all killed at random moments go on from the newest complete checkpoint, and end with the very bits of the
//! job that was never killed. `CHECKPOINT_KILLS=50` kills so often; CI does it a few times.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::table::TableSpec;
use paramill_node::client::{self as worker, JobOptions};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
/// Workers of a job whose coordinator runs alone.
const WORKERS: u32 = 2;
/// Tells the processes of one attempt from all others.
const MARK: &str = "CHECKPOINT_ATTEMPT";
/// About a second of training, with many checkpoints in it.
const JOB: Job = Job { workers: "2", servers: "2", epochs: "6", optimizer: "adam:lr=0.001", codec: "none" };
/// The same whose workers keep most of a gradient for later ones.
const KEEPING: Job = Job { codec: "topk:0.05", ..JOB };

/// What is different in the jobs of these tests.
#[derive(Clone, Copy)]
struct Job {
    workers: &'static str,
    servers: &'static str,
    epochs: &'static str,
    optimizer: &'static str,
    codec: &'static str,
}

impl Job {
    fn arguments<'a>(&self, more: &[&'a str]) -> Vec<&'a str> {
        let Job { workers, servers, epochs, optimizer, codec } = *self;
        let cluster = ["train", "mlp", "--json", "--seed", "3", "--workers", workers, "--servers", servers];
        let rest = ["--order", "ranked", "--examples", "6000", "--epochs", epochs, "--optimizer", optimizer];
        [&cluster[..], &rest, &["--codec", codec], more].concat()
    }

    fn train(&self, more: &[&str]) -> Output {
        paramill(&self.arguments(more))
    }
}

fn paramill(arguments: &[&str]) -> Output {
    Command::new(PARAMILL).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The digest of the parameters that a job ended with.
fn digest(output: &Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["digest"].as_str().unwrap().to_owned()
}

/// Ends all processes of an attempt as kill -9 does.
fn kill_all(attempt: &str) {
    let mark = format!("{MARK}={attempt}");
    let is_one = |pid: u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    loop {
        let entries =
            fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        let pids: Vec<u32> =
            entries.filter_map(|name| name.parse().ok()).filter(|pid| is_one(*pid)).collect();
        if pids.is_empty() {
            return;
        }
        for pid in pids {
            // It may have ended meanwhile.
            let _ = kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for a process, up to some time; whether it has ended.
fn ends_within(child: &mut Child, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// The folders of an archive that have a manifest.
fn complete(archive: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(archive) else { return Vec::new() };
    let entries =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.join("manifest.json").exists());
    let mut names: Vec<String> =
        entries.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

#[test]
fn whenever_everything_is_killed_the_job_ends_with_the_bits_of_one_that_never_was() {
    kill_again_and_again(JOB);
}

#[test]
fn the_same_where_workers_keep_residuals() {
    kill_again_and_again(KEEPING);
}

/// Kills all processes of a job at random moments until it was killed as often as it is to be.
fn kill_again_and_again(job: Job) {
    let kills: u64 = std::env::var("CHECKPOINT_KILLS").map_or(4, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("checkpoints");
    let whole = digest(&job.train(&["--processes"]));
    let saving = [
        "--processes",
        "--resume",
        "--every",
        "10",
        "--keep",
        "2",
        "--checkpoint",
        archive.to_str().unwrap(),
    ];
    let (mut killed, mut dice, mut resumed) = (0, 0x9e37_79b9_7f4a_7c15_u64, 0);
    while killed < kills {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let delay = Duration::from_millis(250 + (dice >> 33) % 1500);
        let attempt = format!("{}-{}-{dice:x}", std::process::id(), job.codec);
        let mut child = Command::new(PARAMILL)
            .args(job.arguments(&saving))
            .env(MARK, &attempt)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let has_ended = ends_within(&mut child, delay);
        if !has_ended {
            kill_all(&attempt);
            killed += 1;
        }
        let output = child.wait_with_output().unwrap();
        resumed += u32::from(text(&output.stderr).contains("the job goes on from checkpoint"));
        assert!(complete(&archive).len() <= 3, "old ones go: {:?}", complete(&archive));
        if has_ended {
            assert_eq!(digest(&output), whole, "{}", text(&output.stderr));
            fs::remove_dir_all(&archive).unwrap();
        }
    }
    let last = job.train(&saving);
    assert_eq!(digest(&last), whole, "{}", text(&last.stderr));
    assert!(resumed > 0 || kills < 4, "some attempt was killed after a checkpoint");
}

#[test]
fn a_job_goes_on_with_other_servers_and_workers_and_says_what_it_cannot_use() {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("checkpoints");
    let path = archive.to_str().unwrap();
    let short = Job { epochs: "2", ..JOB };
    let whole = digest(&short.train(&["--checkpoint", path, "--every", "50"]));
    let names = complete(&archive);
    assert!(!names.is_empty() && names.len() <= 3, "{names:?}");
    // The job's end is saved too: with nothing left to do it has the same parameters, in one process or in many.
    let others = [
        (Job { servers: "3", ..short }, "--cores=2"),
        (Job { servers: "1", workers: "3", epochs: "1", ..JOB }, "--processes"),
    ];
    for (job, more) in others {
        let again = job.train(&["--resume", "--checkpoint", path, more]);
        assert_eq!(digest(&again), whole, "{}", text(&again.stderr));
    }
    let refused = |job: Job, more: &[&str]| {
        let output = job.train(more);
        assert!(!output.status.success());
        text(&output.stderr)
    };
    let why = refused(short, &["--checkpoint", path]);
    assert!(why.contains("give --resume to go on from it, or another folder"), "{why}");
    let why = refused(Job { optimizer: "sgd:lr=0.1", ..short }, &["--checkpoint", path, "--resume"]);
    assert!(why.contains("has the state of `adam:lr=0.001`"), "{why}");
    let why = refused(short, &["--resume"]);
    assert!(why.contains("--checkpoint"), "{why}");
    // A file of the newest is damaged: the one before is named, and used.
    let newest = complete(&archive).pop().unwrap();
    let file = archive.join(&newest).join("server-0-core-0.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let output = short.train(&["--checkpoint", path, "--resume"]);
    digest(&output);
    let said = text(&output.stderr);
    assert!(said.contains("is damaged: it has other contents than it was written with; step-"), "{said}");
}

#[test]
fn a_full_disk_costs_checkpoints_and_the_old_one_stays() {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("checkpoints");
    let path = archive.to_str().unwrap();
    let whole = digest(&JOB.train(&[]));
    digest(&Job { epochs: "1", ..JOB }.train(&["--checkpoint", path]));
    let before = complete(&archive);
    assert_eq!(before.len(), 1);
    // No file may be larger than 8 blocks: nothing can be written.
    let arguments = JOB.arguments(&["--checkpoint", path, "--every", "50", "--resume"]).join(" ");
    let script = format!("trap '' XFSZ; ulimit -f 8; exec {PARAMILL} {arguments}");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(digest(&output), whole);
    let said = text(&output.stderr);
    assert!(
        said.contains("cannot write") && said.contains(&format!("{} stays the newest", before[0])),
        "{said}"
    );
    assert_eq!(complete(&archive), before);
    assert_eq!(digest(&JOB.train(&["--checkpoint", path, "--resume"])), whole);
}

#[test]
fn a_copy_has_what_workers_keep() {
    let folder = tempfile::tempdir().unwrap();
    let (file, archive) = (folder.path().join("copy.safetensors"), folder.path().join("checkpoints"));
    let (path, whole) = (file.to_str().unwrap(), digest(&KEEPING.train(&[])));
    // From the workers' own memory, and from the coordinator's archive.
    for (name, keeping) in [("kept", vec![]), ("copied", vec!["--checkpoint", archive.to_str().unwrap()])] {
        while_a_job_trains(KEEPING, name, &keeping, |url| paramill(&["checkpoint", url, path]));
        for more in ["--processes", "--cores=2"] {
            let resumed = KEEPING.train(&["--resume", path, more]);
            assert_eq!(digest(&resumed), whole, "{name}: {}", text(&resumed.stderr));
            assert!(text(&resumed.stderr).contains("the job goes on from checkpoint step-"));
        }
        // Two workers' residuals are added to those of the one that is left, and new workers have none.
        for workers in ["1", "3"] {
            let other = Job { workers, epochs: "3", ..KEEPING }.train(&["--resume", path]);
            assert!(other.status.success(), "{}", text(&other.stderr));
        }
    }
    // What workers keep is part of what is checked.
    let newest = complete(&archive).pop().unwrap();
    let damaged = archive.join(&newest).join("worker-1.safetensors");
    let mut bytes = fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let said = text(&KEEPING.train(&["--resume", "--checkpoint", archive.to_str().unwrap()]).stderr);
    assert!(said.contains("worker-1.safetensors is damaged: it has other contents"), "{said}");
}

/// Has a job with slow steps do what `ask` asks of the job at its URL, until that succeeds, and then kills everything.
fn while_it_trains(name: &str, more: &[&str], ask: impl FnMut(&str) -> Output) -> (String, Output) {
    while_a_job_trains(JOB, name, more, ask)
}

fn while_a_job_trains(
    job: Job,
    name: &str,
    more: &[&str],
    mut ask: impl FnMut(&str) -> Output,
) -> (String, Output) {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("steps.csv");
    fs::write(&trace, "worker,step,seconds\n0,0,0.02\n1,0,0.02\n").unwrap();
    let (fault, attempt) = (format!("trace={}", trace.display()), format!("{}-{name}", std::process::id()));
    let mut child = Command::new(PARAMILL)
        .args(job.arguments(&[&["--processes", "--inject", &fault], more].concat()))
        .env(MARK, &attempt)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let url = {
        use std::io::{BufRead, BufReader};
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let line = lines.map(|line| line.unwrap()).find(|line| line.contains("the job is at ")).unwrap();
        line.split_whitespace().last().unwrap().to_owned()
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut asked = ask(&url);
    // The job may not have started yet.
    while !asked.status.success() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(100));
        asked = ask(&url);
    }
    kill_all(&attempt);
    child.wait().unwrap();
    assert!(asked.status.success(), "{}", text(&asked.stderr));
    (url, asked)
}

#[test]
fn a_command_has_a_running_job_make_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("checkpoints");
    let keeping = ["--checkpoint", archive.to_str().unwrap()];
    let (url, saved) = while_it_trains("command", &keeping, |url| paramill(&["checkpoint", url]));
    let names = complete(&archive);
    assert!(text(&saved.stdout).contains(&names[0]), "{names:?}: {}", text(&saved.stdout));
    let output = paramill(&["checkpoint", &url]);
    assert!(!output.status.success() && text(&output.stderr).contains("no coordinator at"));
}

#[test]
fn a_command_copies_a_checkpoint_to_a_file_that_another_number_of_servers_goes_on_from() {
    let folder = tempfile::tempdir().unwrap();
    let (file, cramped) = (folder.path().join("copy.safetensors"), folder.path().join("cramped"));
    let path = file.to_str().unwrap();
    let whole = digest(&JOB.train(&[]));
    fs::write(&cramped, "what was there").unwrap();
    // Servers keep no checkpoints here.
    let (_, copied) = while_it_trains("copy", &[], |url| {
        let copied = paramill(&["checkpoint", url, path]);
        if copied.status.success() {
            // A file may have 8 blocks: the disk is full.
            let script =
                format!("trap '' XFSZ; ulimit -f 8; exec {PARAMILL} checkpoint {url} {}", cramped.display());
            let refused = Command::new("sh").args(["-c", &script]).output().unwrap();
            let why = text(&refused.stderr);
            assert!(!refused.status.success() && why.contains("cannot write"), "{why}");
            let why = text(&paramill(&["checkpoint", url]).stderr);
            assert!(why.contains("start its servers with --checkpoint DIR, or name a file"), "{why}");
        }
        copied
    });
    assert!(text(&copied.stdout).contains("is copied to"), "{}", text(&copied.stdout));
    assert_eq!(fs::read_to_string(&cramped).unwrap(), "what was there");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
    for (servers, more) in [("3", "--processes"), ("1", "--cores=2")] {
        let resumed = Job { servers, ..JOB }.train(&["--resume", path, more]);
        assert_eq!(digest(&resumed), whole, "{}", text(&resumed.stderr));
        assert!(
            text(&resumed.stderr).contains("the job goes on from checkpoint step-"),
            "{}",
            text(&resumed.stderr)
        );
    }
    // It begins an archive of its own.
    let archive = folder.path().join("checkpoints");
    let keeping = ["--checkpoint", archive.to_str().unwrap(), "--resume", path];
    assert_eq!(digest(&JOB.train(&keeping)), whole);
    let why = text(&JOB.train(&keeping).stderr);
    assert!(why.contains("give --resume to go on from it, or another folder"), "{why}");
    // What is not whole is refused.
    let bytes = fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for at in [0, header / 2, header, bytes.len() / 2, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fs::write(&file, damaged).unwrap();
        let why = text(&JOB.train(&["--resume", path]).stderr);
        assert!(why.contains(&format!("cannot go on from {path}: it")), "{at}: {why}");
    }
    fs::write(&file, &bytes[..bytes.len() - 4]).unwrap();
    let why = text(&JOB.train(&["--resume", path]).stderr);
    assert!(why.contains("it is no file of a checkpoint"), "{why}");
}

/// A coordinator that runs alone, and servers that join it.
struct Cluster {
    coordinator: Child,
    servers: Vec<Child>,
    url: String,
}

impl Cluster {
    /// A coordinator with these options, at an address that was free a moment ago unless one is given.
    fn coordinator(address: &str, options: &[&str]) -> Child {
        let job = ["coordinate", "--workers", "2", "--sync", "bsp", "--optimizer", "momentum:lr=1,beta=0.5"];
        let mut command = Command::new(PARAMILL);
        command.args(job).args(["--listen", address]).args(options).stdout(Stdio::null());
        command.spawn().unwrap()
    }

    fn start(address: &str, servers: usize, options: &[&str], of_servers: &[&str]) -> Cluster {
        let number = servers.to_string();
        let coordinator = Cluster::coordinator(address, &[&["--servers", &number], options].concat());
        let url = format!("paramill://{address}/job");
        let join = || {
            let mut command = Command::new(PARAMILL);
            command.args(["serve", "--cores", "1", "--join", &url]).args(of_servers).stdout(Stdio::null());
            command.spawn().unwrap()
        };
        let servers = (0..servers).map(|_| join()).collect();
        Cluster { coordinator, servers, url }
    }

    fn kill(&mut self) {
        for child in self.servers.iter_mut().chain([&mut self.coordinator]) {
            let _ = child.kill();
            child.wait().unwrap();
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.kill();
    }
}

#[test]
fn a_coordinator_alone_orders_checkpoints_also_after_it_was_killed_and_a_job_goes_on_from_them() {
    let folder = tempfile::tempdir().unwrap();
    let [archive, state, other_state] =
        ["checkpoints", "state", "other"].map(|name| folder.path().join(name));
    let keeping = format!("--checkpoint={}", archive.display());
    let (first_state, second_state) =
        (format!("--state={}", state.display()), format!("--state={}", other_state.display()));
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let options = [keeping.as_str(), "--every=20", &first_state];
    let mut cluster = Cluster::start(&address, 2, &options, &[&keeping]);
    let ends = AtomicBool::new(false);
    let deadline = Instant::now() + Duration::from_secs(60);
    let await_one_after = |clock: u64| {
        while newest_clock(&archive) <= clock {
            assert!(Instant::now() < deadline, "{:?}", complete(&archive));
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    std::thread::scope(|scope| {
        let url = cluster.url.clone();
        let ends = &ends;
        let training = scope.spawn(move || train(&url, u64::MAX, ends));
        await_one_after(0);
        cluster.coordinator.kill().unwrap();
        cluster.coordinator.wait().unwrap();
        let before = newest_clock(&archive);
        // The same command once more: the checkpoints that are there are its own.
        cluster.coordinator = Cluster::coordinator(&address, &[&["--servers", "2"], &options[..]].concat());
        await_one_after(before + 40);
        ends.store(true, Ordering::Relaxed);
        training.join().unwrap();
    });
    cluster.kill();
    let clock = newest_clock(&archive);
    // One server takes what two had.
    let options = [keeping.as_str(), "--resume", &second_state];
    let mut cluster = Cluster::start(&address, 1, &options, &[&keeping]);
    let ended = train(&cluster.url, clock + 10, &AtomicBool::new(false));
    cluster.coordinator.wait().unwrap();
    // Values and velocities of a job that was never stopped.
    let (mut value, mut velocity) = (0f32, 0f32);
    for _ in 0..clock + 10 {
        velocity = 0.5 * velocity + 1.0;
        value -= velocity;
    }
    assert_eq!(ended, vec![(clock, vec![value; 64]); 2]);
    assert_eq!(newest_clock(&archive), clock + 10, "the job's end is saved");
}

/// Runs workers up to an iteration, or until they hear that they are to end; their first iteration and last values.
fn train(url: &str, until: u64, ends: &AtomicBool) -> Vec<(u64, Vec<f32>)> {
    let work = |rank| {
        let options = JobOptions::at(url.parse().unwrap()).rank(rank);
        let job = worker::Job::init(options.timeout(Duration::from_secs(60)).log(|_, _| {})).unwrap();
        let table = job.table(TableSpec::dense("w", [64]), vec![0.0; 64]).unwrap();
        job.start().unwrap();
        let first = job.iteration();
        while job.iteration() < until && !ends.load(Ordering::Relaxed) {
            table.update(&[1.0; 64]).unwrap();
            job.clock();
            table.sync().unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        let values = table.values().unwrap().to_vec();
        if ends.load(Ordering::Relaxed) {
            job.abandon()
        } else {
            job.close().unwrap()
        }
        (first, values)
    };
    std::thread::scope(|scope| {
        let work = &work;
        let workers: Vec<_> = (0..WORKERS).map(|rank| scope.spawn(move || work(rank))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    })
}

/// The clock of the newest complete checkpoint.
fn newest_clock(archive: &Path) -> u64 {
    let names = complete(archive);
    names.last().map_or(0, |name| name.split('-').nth(1).unwrap().parse().unwrap())
}
