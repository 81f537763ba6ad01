//! Coordinators that keep their state in a real etcd: another takes over. `cargo xtask test --services` runs this.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

#[path = "coordinated/job.rs"]
mod job;

use job::{Process, coordinate, free_address, run, status};
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
        while TcpStream::connect(client).is_err() {
            assert!(Instant::now() < deadline, "etcd does not start");
            std::thread::sleep(Duration::from_millis(50));
        }
        etcd
    }
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
