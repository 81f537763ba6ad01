//! Coordinators that keep their state in a real etcd: another takes over. `cargo xtask test --services` runs this.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

#[path = "coordinated/job.rs"]
mod job;

use job::{Process, ask, coordinate, free_address, run, status, train, wait_for};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set by `cargo xtask test --services` to the program to start.
const PROGRAM: &str = "PARAMILL_TEST_ETCD";

struct Etcd(Child);

impl Etcd {
    fn start(program: &str, folder: &Path, client: &str, peer: &str) -> Etcd {
        let (client_url, peer_url) = (format!("http://{client}"), format!("http://{peer}"));
        let mut command = Command::new(program);
        command.arg("--data-dir").arg(folder);
        command.args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url]);
        command.args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url]);
        command.args(["--initial-cluster", &format!("default={peer_url}")]);
        let etcd = Etcd(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(30);
        // It takes connections before it can answer, and a server whose etcd does not answer ends at once.
        while !is_healthy(client) {
            assert!(Instant::now() < deadline, "etcd does not start");
            std::thread::sleep(Duration::from_millis(50));
        }
        etcd
    }
}

fn is_healthy(client: &str) -> bool {
    let Ok(mut stream) = TcpStream::connect(client) else { return false };
    let mut answer = String::new();
    let asked = stream.write_all(b"GET /health HTTP/1.0\r\n\r\n");
    asked.and_then(|()| stream.read_to_string(&mut answer)).is_ok() && answer.contains("true")
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn another_coordinator_takes_over_and_etcd_may_restart() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (client, peer) = (free_address(), free_address());
    let etcd = Etcd::start(&program, folder.path(), &client, &peer);
    let state = format!("etcd://{client}/jobs/test");
    let addresses = [free_address(), free_address()];
    let mut first = Process::start(&coordinate(&addresses[0], &state));
    assert!(first.first_line().contains(&addresses[0]));
    status(&format!("paramill://{}/job", addresses[0]).parse().unwrap());
    let _second = Process::start(&coordinate(&addresses[1], &state));
    let url = format!("paramill://{},{}/job", addresses[0], addresses[1]);
    let _etcd = run(&url, |progress| {
        first.kill();
        let since = Instant::now();
        let other = format!("paramill://{}/job", addresses[1]).parse().unwrap();
        let (restarts, phase) = status(&other);
        assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
        assert!(restarts == 0 && phase.starts_with("running with 2 workers"), "{phase}");
        progress.go_on(20);
        drop(etcd);
        progress.go_on(200);
        // It has to be there for the job's end, which is stored.
        let etcd = Etcd::start(&program, folder.path(), &client, &peer);
        progress.go_on(500);
        assert_eq!(status(&other).0, 0);
        etcd
    });
}

/// Three servers, each of which may coordinate the job: their addresses and processes.
fn servers(state: &str) -> Vec<(String, Process)> {
    let options = "serve --json --workers 2 --servers 3 --replicas 1 --cores 1 --sync bsp --optimizer sgd:lr=1 \
                   --placement uniform";
    let server = |_| {
        let address = free_address();
        let arguments: Vec<&str> =
            options.split(' ').chain(["--listen", &address, "--state", state]).collect();
        let process = Process::start(&arguments);
        (address, process)
    };
    (0..3).map(server).collect()
}

/// The job that any of these coordinates.
fn url(servers: &[(String, Process)]) -> String {
    let addresses: Vec<&str> = servers.iter().map(|(address, _)| address.as_str()).collect();
    format!("paramill://{}/job", addresses.join(","))
}

/// The one that coordinates the job, once all shards have copies: servers that only wait to take over take no connections.
fn leader(servers: &[(String, Process)]) -> usize {
    wait_for(&url(servers).parse().unwrap(), |status| status.served.iter().all(|shard| shard.copy.is_some()));
    let leads = |address: &str| ask(&format!("paramill://{address}/job").parse().unwrap()).is_ok();
    servers.iter().position(|(address, _)| leads(address)).unwrap()
}

/// Every server may coordinate the job. The one that does is killed, with the shards that it serves; then the one that took over.
#[test]
#[expect(
    clippy::disallowed_macros,
    reason = "the times are figures of the manual, and printed where the test is run for them"
)]
fn any_server_takes_over_from_one_that_coordinates_and_serves() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (client, peer) = (free_address(), free_address());
    let etcd = Etcd::start(&program, folder.path(), &client, &peer);
    let mut servers = servers(&format!("etcd://{client}/jobs/servers"));
    let url = url(&servers);
    let job = url.parse().unwrap();
    let _etcd = train(&url, |progress| {
        for left in [2, 1] {
            let (address, process) = servers.remove(leader(&servers));
            process.kill();
            let since = Instant::now();
            let (restarts, phase) = status(&job);
            let taken = since.elapsed();
            assert!(taken < Duration::from_secs(10), "{taken:?}");
            assert!(restarts == 0 && phase.starts_with("running with 2 workers"), "{phase}");
            progress.go_on(20);
            eprintln!(
                "{address} was killed: another server coordinates the job after {:.1} s, and all train on after {:.1} s",
                taken.as_secs_f64(),
                since.elapsed().as_secs_f64()
            );
            assert_eq!(servers.len(), left);
        }
        drop(etcd);
        progress.go_on(200);
        // It has to be there for the job's end, which is stored.
        let etcd = Etcd::start(&program, folder.path(), &client, &peer);
        progress.go_on(500);
        assert_eq!(status(&job).0, 0);
        etcd
    });
    for (_, server) in servers {
        assert_eq!(server.wait(), Some(0));
    }
}

/// A server that coordinates stands still for longer than its lease: another takes over, and it goes on as a server like any other.
#[test]
fn a_server_that_only_stood_still_leaves_the_job_to_another_and_goes_on_serving() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (client, peer) = (free_address(), free_address());
    let _etcd = Etcd::start(&program, folder.path(), &client, &peer);
    let servers = servers(&format!("etcd://{client}/jobs/paused"));
    let url = url(&servers);
    train(&url, |progress| {
        let first = leader(&servers);
        servers[first].1.pause(Duration::from_secs(8));
        progress.go_on(20);
        assert_ne!(leader(&servers), first);
        let (restarts, phase) = status(&url.parse().unwrap());
        assert!(restarts == 0 && phase.starts_with("running with 2 workers"), "{phase}");
    });
    for (_, server) in servers {
        assert_eq!(server.wait(), Some(0));
    }
}
