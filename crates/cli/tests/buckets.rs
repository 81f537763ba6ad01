//! Checkpoints in a real store that speaks S3, which may be away. `cargo xtask test --services` runs this.

#![cfg(feature = "object-store")]
#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::table::TableSpec;
use paramill_node::client::{Job, JobOptions};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
/// Set by `cargo xtask test --services` to the program to start.
const PROGRAM: &str = "PARAMILL_TEST_S3";
const BUCKET: &str = "bucket";
/// The store does not compare signatures, but refuses requests without one.
const KEY: &str = "Authorization: AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, \
                   Signature=0\r\n";
/// Longer than anything here takes on a machine that has much else to do.
const PATIENCE: Duration = Duration::from_secs(120);
/// Workers that keep something, so that their files are in the store too.
const JOB: &str = "train mlp --json --seed 3 --workers 2 --servers 2 --order ranked --examples 6000 --epochs 6 \
                   --optimizer adam:lr=0.001 --codec topk:0.05";

/// A store, and a way to it that can be interrupted.
struct Store {
    process: Child,
    address: String,
    way: String,
    is_away: Arc<AtomicBool>,
}

impl Store {
    fn start(program: &str) -> Store {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let port = address.rsplit(':').next().unwrap();
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", port]).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().unwrap();
        let is_away = Arc::new(AtomicBool::new(false));
        let way = interruptible_way(address.clone(), Arc::clone(&is_away));
        let store = Store { process, address, way, is_away };
        let deadline = Instant::now() + PATIENCE;
        while store.request("PUT", "", &[]).is_err() {
            assert!(Instant::now() < deadline, "the store does not start");
            std::thread::sleep(Duration::from_millis(100));
        }
        store
    }

    /// Has the store do something with a path in the bucket; the body of what it answers.
    fn request(&self, method: &str, path: &str, body: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(&self.address)?;
        let (host, length) = (&self.address, body.len());
        let head = format!(
            "{method} /{BUCKET}{path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: {length}\r\n{KEY}\r\n"
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let head =
            answer.windows(4).position(|window| window == b"\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
        assert!(text(&answer[..head]).contains(" 200 "), "{}", text(&answer));
        Ok(answer.split_off(head + 4))
    }

    /// The names of all objects below a prefix.
    fn objects(&self, prefix: &str) -> Vec<String> {
        let answer = text(&self.request("GET", &format!("?list-type=2&prefix={prefix}/"), &[]).unwrap());
        answer.split("<Key>").skip(1).map(|rest| rest.split('<').next().unwrap().to_owned()).collect()
    }

    /// The folders below a prefix that have a manifest.
    fn complete(&self, prefix: &str) -> Vec<String> {
        let manifests = self.objects(prefix).into_iter().filter(|name| name.ends_with("/manifest.json"));
        manifests.map(|name| name.split('/').nth_back(1).unwrap().to_owned()).collect()
    }

    /// A command that finds the store.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PARAMILL);
        command
            .args(arguments)
            .env("AWS_ENDPOINT", format!("http://{}", self.way))
            .env("AWS_ALLOW_HTTP", "true");
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
        command.env("AWS_REGION", "us-east-1");
        command
    }

    /// A job that makes checkpoints below a prefix.
    fn job(&self, prefix: &str, more: &[&str]) -> Command {
        let place = format!("--checkpoint=s3://{BUCKET}/{prefix}");
        let arguments: Vec<&str> =
            JOB.split(' ').chain([place.as_str()]).chain(more.iter().copied()).collect();
        self.command(&arguments)
    }

    fn train(&self, prefix: &str, more: &[&str]) -> Output {
        self.job(prefix, more).output().unwrap()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An address whose connections go on to another one, until it is away: then they end.
fn interruptible_way(to: String, is_away: Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let (Ok(near), false) = (near, is_away.load(Ordering::Relaxed)) else { continue };
            let Ok(far) = TcpStream::connect(&to) else { continue };
            for (from, to) in [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))] {
                let (from, to, is_away) = (from.unwrap(), to.unwrap(), Arc::clone(&is_away));
                std::thread::spawn(move || pass_on(from, to, &is_away));
            }
        }
    });
    address
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, is_away: &AtomicBool) {
    let mut block = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut block)
        && !is_away.load(Ordering::Relaxed)
        && to.write_all(&block[..length]).is_ok()
    {}
    for stream in [from, to] {
        // The other side may have ended it.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
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

/// Waits until there is a complete checkpoint below a prefix.
fn await_checkpoint(store: &Store, prefix: &str) {
    let deadline = Instant::now() + PATIENCE;
    while store.complete(prefix).is_empty() {
        assert!(Instant::now() < deadline, "no checkpoint comes");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_job_that_is_killed_goes_on_from_the_store_and_what_is_damaged_is_passed_over() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    let store = Store::start(&program);
    let whole = digest(&Command::new(PARAMILL).args(JOB.split(' ')).output().unwrap());
    let saving = ["--every", "50", "--keep", "2", "--resume"];
    let mut child =
        store.job("killed/job", &saving).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    await_checkpoint(&store, "killed/job");
    child.kill().unwrap();
    child.wait().unwrap();
    let resumed = store.train("killed/job", &[&saving[..], &["--processes"]].concat());
    assert_eq!(digest(&resumed), whole, "{}", text(&resumed.stderr));
    assert!(
        text(&resumed.stderr).contains("the job goes on from checkpoint step-"),
        "{}",
        text(&resumed.stderr)
    );
    let complete = store.complete("killed/job");
    assert_eq!(complete.len(), 2, "the newest stay: {complete:?}");
    let refused = store.train("killed/job", &[]);
    let why = text(&refused.stderr);
    assert!(
        !refused.status.success() && why.contains("s3://bucket/killed/job has checkpoint step-"),
        "{why}"
    );
    // A file of the newest is damaged: the one before is named, and used.
    let [older, newest] = &complete[..] else { panic!("two stay") };
    let file = format!("/killed/job/{newest}/server-0-core-0.safetensors");
    let mut bytes = store.request("GET", &file, &[]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    store.request("PUT", &file, &bytes).unwrap();
    let again = store.train("killed/job", &["--resume"]);
    assert_eq!(digest(&again), whole, "{}", text(&again.stderr));
    let said = text(&again.stderr);
    let damaged = "is damaged: it has other contents than it was written with";
    assert!(said.contains(&format!("{damaged}; {older} is whole")), "{said}");
    // The job's end is saved too: with nothing left to do it has the same parameters, also on other shards.
    let ended = store.train("killed/job", &["--resume", "--cores", "2"]);
    assert_eq!(digest(&ended), whole, "{}", text(&ended.stderr));
}

#[test]
fn a_store_that_is_away_costs_checkpoints_and_the_old_one_stays() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    let store = Store::start(&program);
    let whole = digest(&Command::new(PARAMILL).args(JOB.split(' ')).output().unwrap());
    let mut command = store.job("away", &["--every", "50"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    await_checkpoint(&store, "away");
    store.is_away.store(true, Ordering::Relaxed);
    let output = child.wait_with_output().unwrap();
    assert_eq!(digest(&output), whole);
    let said = text(&output.stderr);
    assert!(
        said.contains("cannot write s3://bucket/away/step-") && said.contains("stays the newest"),
        "{said}"
    );
    let left = store.complete("away");
    assert!(!left.is_empty());
    // Whether there is something to go on from cannot be known.
    let refused = store.train("away", &["--resume"]);
    let why = text(&refused.stderr);
    assert!(
        !refused.status.success() && why.contains("cannot use s3://bucket/away for checkpoints"),
        "{why}"
    );
    store.is_away.store(false, Ordering::Relaxed);
    assert_eq!(store.complete("away"), left);
    let resumed = store.train("away", &["--resume"]);
    assert_eq!(digest(&resumed), whole, "{}", text(&resumed.stderr));
}

/// Elements of a table that no single request takes.
const ELEMENTS: usize = 6 << 20;

#[test]
fn a_large_file_is_sent_in_parts_and_read_again() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    let store = Store::start(&program);
    for first in [0, 2] {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let place = format!("s3://{BUCKET}/large");
        let serve = "serve --workers 1 --servers 1 --cores 1 --sync bsp --optimizer sgd:lr=1 --resume";
        let options = ["--listen", &address, "--checkpoint", &place];
        let arguments: Vec<&str> = serve.split(' ').chain(options).collect();
        let mut server = store.command(&arguments).stdout(Stdio::null()).spawn().unwrap();
        let url = format!("paramill://{address}/job");
        let options = JobOptions::at(url.parse().unwrap()).rank(0).timeout(PATIENCE).log(|_, _| {});
        let job = Job::init(options).unwrap();
        let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS]).unwrap();
        job.start().unwrap();
        assert_eq!(job.iteration(), first);
        let gradient: Vec<f32> = (0..ELEMENTS).map(|at| (at % 1009) as f32).collect();
        for _ in 0..2 {
            table.update(&gradient).unwrap();
            job.clock();
            table.sync().unwrap();
        }
        let steps = (first + 2) as f32;
        let is_right =
            |values: &[f32]| values.iter().zip(&gradient).all(|(value, one)| *value == -one * steps);
        assert!(table.read(is_right).unwrap());
        job.close().unwrap();
        assert!(server.wait().unwrap().success());
    }
    assert_eq!(store.complete("large").len(), 2);
}
