//! A server that pins its data cores: each thread is where it was told to be before it takes memory.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_node::client::{Job, JobOptions};
use paramill_node::pinning::Pin;
use paramill_node::server::{self, ServerConfig};
use std::sync::Arc;

fn config(cores: u32, pin: Pin) -> ServerConfig {
    let coordinate = Some(JobConfig::new("test", 1, 1));
    ServerConfig { coordinate, cores, pin, ..ServerConfig::new("test", "127.0.0.1:0") }
}

/// The CPUs that threads of this process with this name may use, as the kernel writes them.
fn allowed(thread: &str) -> Vec<String> {
    let field = |status: &str, name: &str| {
        status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
    };
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok())
        .filter(|status| field(status, "Name").unwrap() == thread)
        .map(|status| field(&status, "Cpus_allowed_list").unwrap())
        .collect()
}

#[test]
fn data_cores_are_where_they_were_told_to_be_and_nobody_else_is() {
    let own = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let mine = own.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let last = mine.rsplit([',', '-']).next().unwrap();
    let pin: Pin = format!("{last},{last}").parse().unwrap();
    let server = server::start(config(2, pin), &Arc::new(Registry::builtin())).unwrap();
    assert_eq!(server.cpus(), [last.parse::<usize>().unwrap(); 2]);
    // A job that has started has threads that run.
    let url = format!("paramill://{}/test", server.coordinator()).parse().unwrap();
    let job = Job::init(JobOptions::at(url)).unwrap();
    let _ = job.table(TableSpec::dense("w", [20_000]), vec![0.0; 20_000]).unwrap();
    job.start().unwrap();
    for core in ["data core 0", "data core 1"] {
        assert_eq!(allowed(core), [last], "{core}");
    }
    assert_eq!(allowed("coordinator"), [mine]);
    assert!(server.pinning().contains("pinned to CPUs"), "{}", server.pinning());
    job.close().unwrap();
    server.join().unwrap();
}

#[test]
fn cpus_that_cannot_be_had_are_an_error_at_the_start() {
    let start = |cores, pin: &str| {
        server::start(config(cores, pin.parse().unwrap()), &Arc::new(Registry::builtin()))
            .expect_err("it cannot be")
            .to_string()
    };
    assert!(start(2, "0").contains("1 CPUs to pin 2 data cores to"));
    assert!(start(1, "1023").contains("this process may not use CPU 1023"));
}
