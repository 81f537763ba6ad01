//! Servers that listen on several interfaces: workers spread their connections over all of them.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::limits::MAX_ADDRESSES;
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_node::Transport;
use paramill_node::client::{Job, JobOptions};
use paramill_node::server::{self, ServerConfig};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Barrier};
use std::time::Duration;

const WORKERS: u32 = 2;
const ELEMENTS: usize = 50_000;

fn config(hosts: &[&str]) -> ServerConfig {
    ServerConfig {
        coordinate: Some(JobConfig::new("test", WORKERS, 1)),
        hosts: hosts.iter().map(|&host| host.to_owned()).collect(),
        cores: 2,
        transport: Transport::Tcp,
        ..ServerConfig::new("test", "127.0.0.1:0")
    }
}

/// Standing connections of this machine to `address`, as the kernel lists them on the listening side.
fn connections(address: &str) -> usize {
    let address: SocketAddrV4 = address.parse().unwrap();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let is_standing = |line: &&str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next().unwrap(), fields.next(), fields.next());
        let (ip, port) = local.split_once(':').unwrap();
        let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).unwrap().to_le_bytes());
        let port = u16::from_str_radix(port, 16).unwrap();
        SocketAddrV4::new(ip, port) == address && state == Some("01")
    };
    table.lines().skip(1).filter(is_standing).count()
}

#[test]
fn connections_are_spread_over_all_interfaces() {
    let server = server::start(config(&["127.0.0.1", "127.0.0.2"]), &Arc::new(Registry::builtin())).unwrap();
    let url = format!("paramill://{}/test", server.coordinator());
    let all_are_connected = Barrier::new(WORKERS as usize + 1);
    let is_counted = Barrier::new(WORKERS as usize + 1);
    std::thread::scope(|scope| {
        for rank in 0..WORKERS {
            let options = JobOptions::at(url.parse().unwrap()).rank(rank).timeout(Duration::from_secs(20));
            let (all_are_connected, is_counted) = (&all_are_connected, &is_counted);
            scope.spawn(move || {
                let job = Job::init(options).unwrap();
                let spec = TableSpec::dense("w", [ELEMENTS as u64]);
                let table = job.table(spec, vec![0.0; ELEMENTS]).unwrap();
                job.start().unwrap();
                table.update(&vec![1.0; ELEMENTS]).unwrap();
                job.clock();
                table.sync().unwrap();
                all_are_connected.wait();
                is_counted.wait();
                job.close().unwrap();
            });
        }
        all_are_connected.wait();
        let counts: Vec<Vec<usize>> =
            server.data_addresses().iter().map(|core| core.iter().map(connections).collect()).collect();
        is_counted.wait();
        // Two workers, two cores, two interfaces: everybody has a way of its own to every core.
        assert_eq!(counts, [[1, 1], [1, 1]], "{:?}", server.data_addresses());
    });
    server.join().unwrap();
}

#[test]
fn an_address_that_is_not_this_machines_is_named() {
    let error = server::start(config(&["127.0.0.1", "192.0.2.1"]), &Arc::new(Registry::builtin()));
    let error = error.expect_err("nobody has this address").to_string();
    assert!(error.contains("cannot listen on 192.0.2.1:0"), "{error}");
}

#[test]
fn more_addresses_than_a_plan_may_carry_are_refused() {
    let error = server::start(config(&["127.0.0.1"; MAX_ADDRESSES + 1]), &Arc::new(Registry::builtin()));
    let error = error.expect_err("too many").to_string();
    assert!(error.contains("9 addresses: expected 1 to 8"), "{error}");
}
