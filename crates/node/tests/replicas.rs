//! Servers that come and go while a job runs, over real threads and sockets: copies take over, shards move, and nothing that was
//! pushed is lost.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_core::status::{ServedStatus, Status};
use paramill_core::table::TableSpec;
use paramill_core::types::ServerId;
use paramill_node::Transport;
use paramill_node::admin::Admin;
use paramill_node::client::{Job, JobOptions, Table};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::url::JobUrl;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ELEMENTS: usize = 20_000;
/// How long is waited for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// The first server of a job of one worker.
fn first(servers: u32, replicas: u32, cores: u32, transport: Transport) -> Server {
    // Cut evenly and in small chunks, shards are of one size, so that the balance of servers is one of the numbers of their shards.
    let policy = Policy::default().with(Axis::Sync, "bsp").with(Axis::Optimizer, "sgd:lr=1");
    let policy = policy.with(Axis::Placement, "uniform").with(Axis::Chunk, "1KB");
    let job = JobConfig { policy, replicas, ..JobConfig::new("test", 1, servers) };
    let config = ServerConfig {
        coordinate: Some(job),
        server: Some(ServerId(0)),
        cores,
        transport,
        ..ServerConfig::new("test", "127.0.0.1:0")
    };
    server::start(config, &Arc::new(Registry::builtin())).unwrap()
}

/// A further server, whenever it comes.
fn further(first: &Server, cores: u32, transport: Transport) -> Server {
    let config = ServerConfig { cores, transport, ..ServerConfig::new("test", first.coordinator()) };
    server::start(config, &Arc::new(Registry::builtin())).unwrap()
}

/// A worker that counts its steps in the parameters.
struct Counting {
    job: Job,
    table: Table,
    url: JobUrl,
    steps: u32,
}

impl Counting {
    fn start(first: &Server, transport: Transport) -> Counting {
        let url: JobUrl = format!("paramill://{}/test", first.coordinator()).parse().unwrap();
        let options = JobOptions::at(url.clone()).rank(0).timeout(PATIENCE).transport(transport);
        let job = Job::init(options).unwrap();
        let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.5; ELEMENTS]).unwrap();
        job.start().unwrap();
        Counting { job, table, url, steps: 0 }
    }

    fn step(&mut self) {
        self.table.update(&[1.0; ELEMENTS]).unwrap();
        self.job.clock();
        self.table.sync().unwrap();
        self.steps += 1;
        let expected = 0.5 - self.steps as f32;
        assert!(self.table.read(|values| values.iter().all(|value| *value == expected)).unwrap());
    }

    /// Steps until the job stands like this.
    fn step_until(&mut self, what: &str, is_so: impl Fn(&Status) -> bool) -> Status {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.step();
            let status = self.job.status().unwrap();
            if is_so(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "{what}: {:?}", status.served);
        }
    }

    fn drain(&self, server: u32) -> Result<String, String> {
        let mut admin = Admin::connect(&self.url, PATIENCE).unwrap();
        admin.drain(ServerId(server)).map_err(|error| error.to_string())
    }

    fn rebalance(&self) -> Result<String, String> {
        let mut admin = Admin::connect(&self.url, PATIENCE).unwrap();
        admin.rebalance().map_err(|error| error.to_string())
    }

    fn finish(mut self) {
        (0..10).for_each(|_| self.step());
        self.job.close().unwrap();
    }
}

/// How many shards a server serves.
fn serves(status: &Status, server: u32) -> usize {
    status.served.iter().filter(|served| served.server == Some(ServerId(server))).count()
}

fn all_are_copied(status: &Status) -> bool {
    let is_copied = |served: &ServedStatus| served.copy.is_some() && served.copy != served.server;
    !status.served.is_empty() && status.served.iter().all(is_copied)
}

#[test]
fn copies_serve_the_shards_of_a_server_that_is_gone() {
    for transport in [Transport::Tcp, Transport::Shm] {
        let first = first(3, 1, 2, transport);
        let (second, third) = (further(&first, 2, transport), further(&first, 2, transport));
        let mut worker = Counting::start(&first, transport);
        let status = worker.step_until("all shards have copies", all_are_copied);
        assert_eq!([0, 1, 2].map(|server| serves(&status, server)), [2, 2, 2]);
        second.stop();
        second.join().unwrap();
        // Which of them had the second place depends on who came first.
        let is_over = |status: &Status| all_are_copied(status) && (0..3).any(|id| serves(status, id) == 0);
        worker.step_until("the other two serve and copy all shards", is_over);
        // Another one takes its share of the load.
        let fourth = further(&first, 2, transport);
        let is_even = |status: &Status| {
            all_are_copied(status) && (0..4).filter(|id| serves(status, *id) == 2).count() == 3
        };
        worker.step_until("three servers serve two shards each", is_even);
        worker.finish();
        for server in [first, third, fourth] {
            server.join().unwrap();
        }
    }
}

#[test]
fn a_server_that_comes_gets_shards_and_one_that_is_drained_loses_them() {
    let transport = Transport::Tcp;
    let first = first(1, 0, 4, transport);
    let mut worker = Counting::start(&first, transport);
    worker.step();
    let why = worker.drain(0).unwrap_err();
    assert!(why.contains("server 0 is the only one; start another"), "{why}");
    let why = worker.drain(7).unwrap_err();
    assert!(why.contains("there is no server 7"), "{why}");
    let why = worker.rebalance().unwrap_err();
    assert!(why.contains("there is only one server; start another"), "{why}");
    let second = further(&first, 1, transport);
    worker.step_until("it gets half of the shards", |status| serves(status, 1) == 2);
    assert!(!second.is_over());
    // Two of four equal shards, and what happened to them meanwhile.
    let moves = worker.job.status().unwrap().moves;
    assert_eq!((moves.shards, moves.planned, moves.under_way), (2, 0, 0));
    assert!(moves.bytes >= ELEMENTS as u64 * 4 / 2, "{moves:?}");
    let said = worker.rebalance().unwrap();
    assert_eq!(said, "no shard moves: the load of 2 servers is as even as it can be");
    let said = worker.drain(1).unwrap();
    assert_eq!(said, "server 1 is drained: 2 shards move away from it");
    worker.step_until("the first has all shards again", |status| serves(status, 0) == 4);
    second.join().unwrap();
    worker.finish();
    first.join().unwrap();
}

#[test]
fn a_server_that_keeps_copies_can_be_drained_though_nobody_else_could_keep_them() {
    let transport = Transport::Tcp;
    let first = first(2, 1, 1, transport);
    let second = further(&first, 1, transport);
    let mut worker = Counting::start(&first, transport);
    worker.step_until("all shards have copies", all_are_copied);
    worker.drain(1).unwrap();
    worker.step_until("the first has all shards", |status| serves(status, 0) == 2);
    second.join().unwrap();
    let third = further(&first, 1, transport);
    worker.step_until("the third keeps copies", all_are_copied);
    worker.finish();
    first.join().unwrap();
    third.join().unwrap();
}

/// Placements may be uneven by the user's choice, and are left so until somebody asks.
#[test]
fn shards_are_spread_when_somebody_asks_for_it() {
    let transport = Transport::Tcp;
    let (policy, tables) = (Policy::default().with(Axis::Sync, "bsp").with(Axis::Optimizer, "sgd:lr=1"), 6);
    let policy = policy.with(Axis::Placement, "ranges");
    let job = JobConfig { policy, ..JobConfig::new("test", 1, 2) };
    let config = ServerConfig {
        coordinate: Some(job),
        server: Some(ServerId(0)),
        cores: 4,
        transport,
        ..ServerConfig::new("test", "127.0.0.1:0")
    };
    let first = server::start(config, &Arc::new(Registry::builtin())).unwrap();
    let second = further(&first, 4, transport);
    let url: JobUrl = format!("paramill://{}/test", first.coordinator()).parse().unwrap();
    let options = JobOptions::at(url.clone()).rank(0).timeout(PATIENCE).transport(transport);
    let job = Job::init(options).unwrap();
    // The second half of the tables is the smaller one.
    let size = |number| if number < tables / 2 { 40_000 } else { 100 };
    let tables: Vec<Table> = (0..tables)
        .map(|number| {
            let spec = TableSpec::dense(format!("t{number}"), [size(number) as u64]).alone();
            job.table(spec, vec![0.0; size(number)]).unwrap()
        })
        .collect();
    job.start().unwrap();
    let mut steps = 0;
    let mut step = || {
        for table in &tables {
            let length = table.read(<[f32]>::len).unwrap();
            table.update(&vec![1.0; length]).unwrap();
        }
        job.clock();
        steps += 1;
        for table in &tables {
            table.sync().unwrap();
            let expected = -(steps as f32);
            assert!(table.read(|values| values.iter().all(|value| *value == expected)).unwrap());
        }
        job.status().unwrap()
    };
    let status = step();
    assert_eq!([serves(&status, 0), serves(&status, 1), status.moves.shards as usize], [4, 4, 0]);
    let said = Admin::connect(&url, PATIENCE).unwrap().rebalance().unwrap();
    assert!(said.starts_with("2 shards move, one after the other, of "), "{said}");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = step();
        if status.moves.shards == 2 && status.moves.planned == 0 {
            assert_eq!([serves(&status, 0), serves(&status, 1)], [2, 6]);
            break;
        }
        assert!(Instant::now() < deadline, "{:?}", status.served);
    }
    (0..5).for_each(|_| drop(step()));
    drop(tables);
    job.close().unwrap();
    first.join().unwrap();
    second.join().unwrap();
}
