//! Servers and workers over both transports: real threads, real sockets.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::address::Addresses;
use paramill_core::coordinator::JobConfig;
use paramill_core::fault::FaultPlan;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_core::worker::Gradient;
use paramill_node::Hub;
use paramill_node::Injection;
use paramill_node::admin::Admin;
use paramill_node::client::{ClientError, Job, JobOptions, Table};
use paramill_node::server::{self, Server, ServerConfig};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

const ELEMENTS: usize = 100_000;

fn job_config(workers: u32, servers: u32, sync: &str) -> JobConfig {
    let policy = Policy::default()
        .with(Axis::Sync, sync)
        .with(Axis::Optimizer, "momentum:lr=0.1")
        .with(Axis::Order, "ranked");
    let policy = policy.with(Axis::Placement, "uniform");
    JobConfig { policy, ..JobConfig::new("test", workers, servers) }
}

/// Starts all servers of a job; `hub` chooses the in-memory transport.
fn start_servers(job: &JobConfig, cores: u32, hub: Option<&Hub>) -> Vec<Server> {
    let registry = Arc::new(Registry::builtin());
    let base = ServerConfig { memory: hub.cloned(), cores, ..ServerConfig::new(&job.job, "127.0.0.1:0") };
    let first =
        server::start(ServerConfig { coordinate: Some(job.clone()), ..base.clone() }, &registry).unwrap();
    let address = first.coordinator().to_owned();
    let rest = (1..job.servers).map(|_| {
        server::start(ServerConfig { coordinator: address.clone(), ..base.clone() }, &registry).unwrap()
    });
    let mut servers = Vec::from_iter(rest);
    servers.insert(0, first);
    servers
}

fn options(job: &JobConfig, servers: &[Server], hub: Option<&Hub>, rank: u32) -> JobOptions {
    let options = match hub {
        Some(hub) => JobOptions::in_memory(hub, &job.job),
        None => {
            JobOptions::at(format!("paramill://{}/{}", servers[0].coordinator(), job.job).parse().unwrap())
        }
    };
    options.rank(rank).timeout(Duration::from_secs(20))
}

fn gradient(rank: u32, step: u32) -> Vec<f32> {
    (0..ELEMENTS)
        .map(|i| ((i as u32).wrapping_mul(2654435761) >> 20) as f32 / 4096.0 + (rank + step) as f32)
        .collect()
}

/// Trains `steps` steps and returns every worker's final parameters.
fn train(job: &JobConfig, cores: u32, hub: Option<&Hub>, steps: u32) -> Vec<Vec<f32>> {
    let servers = start_servers(job, cores, hub);
    let finals = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..job.workers)
            .map(|rank| {
                let options = options(job, &servers, hub, rank);
                scope.spawn(move || {
                    let job = Job::init(options).unwrap();
                    let table =
                        job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![1.0; ELEMENTS]).unwrap();
                    job.start().unwrap();
                    for step in 0..steps {
                        table.update(&gradient(rank, step)).unwrap();
                        job.clock();
                        table.sync().unwrap();
                    }
                    let values = table.read(<[f32]>::to_vec).unwrap();
                    job.close().unwrap();
                    values
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    for server in servers {
        server.join().unwrap();
    }
    finals
}

#[test]
fn both_transports_and_any_number_of_cores_give_the_same_bits() {
    let job = job_config(3, 2, "bsp");
    let hub = Hub::new();
    let over_memory = train(&job, 1, Some(&hub), 5);
    let over_tcp = train(&job, 2, None, 5);
    let first = &over_memory[0];
    assert!(first.iter().all(|value| value.is_finite() && *value != 1.0));
    for (rank, values) in over_memory.iter().chain(&over_tcp).enumerate() {
        assert!(values == first, "replica {rank} differs");
    }
}

/// Versions that are broadcast, through workers or not, are what pulls are answered with.
#[test]
fn broadcasts_bring_the_bits_that_pulls_bring() {
    let job = job_config(4, 2, "bsp");
    let pulled = train(&job, 2, None, 5);
    for tree in ["star", "chain", "kary:k=2"] {
        let mut job = job.clone();
        job.policy = job.policy.with(Axis::Broadcast, tree);
        let hub = Hub::new();
        for (rank, values) in train(&job, 2, None, 5).iter().chain(&train(&job, 2, Some(&hub), 5)).enumerate()
        {
            assert!(*values == pulled[0], "{tree}: replica {rank} differs");
        }
    }
}

/// Trains a table of rows, of which each worker touches some, and returns all rows as every worker has them in the end.
fn train_rows(job: &JobConfig, hub: Option<&Hub>, steps: u32) -> Vec<Vec<f32>> {
    const ROWS: u32 = 6_000;
    const WIDTH: usize = 5;
    let servers = start_servers(job, 2, hub);
    let worker = |rank: u32| {
        let job = Job::init(options(job, &servers, hub, rank)).unwrap();
        let spec = TableSpec::sparse("rows", ROWS.into(), WIDTH as u64);
        let table = job.table(spec, vec![1.0; ROWS as usize * WIDTH]).unwrap();
        job.start().unwrap();
        for step in 0..steps {
            let rows: Vec<u32> = (rank + step..ROWS).step_by(37 + step as usize).collect();
            let values: Vec<f32> = gradient(rank, step)[..rows.len() * WIDTH].to_vec();
            table.push(Gradient::Rows { rows: &rows, values: &values }).unwrap().wait().unwrap();
            job.clock();
            assert_eq!(table.rows(&rows).unwrap().wait().unwrap().len(), values.len());
        }
        let all: Vec<u32> = (0..ROWS).collect();
        let values = table.rows(&all).unwrap().wait().unwrap();
        job.close().unwrap();
        values
    };
    let finals = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..job.workers).map(|rank| scope.spawn(move || worker(rank))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    servers.into_iter().for_each(|server| server.join().unwrap());
    finals
}

#[test]
fn broadcasts_of_rows_bring_the_bits_that_pulls_bring() {
    let job = job_config(4, 2, "bsp");
    let pulled = train_rows(&job, None, 6);
    assert!(pulled[0].iter().any(|value| *value != 1.0));
    for (tree, codec) in
        [("star", "none"), ("chain", "none"), ("kary:k=2", "lossless+lz4"), ("chain", "topk:1")]
    {
        let mut job = job.clone();
        job.policy = job.policy.with(Axis::Broadcast, tree).with(Axis::AnswerCodec, codec);
        for hub in [None, Some(Hub::new())] {
            for (rank, values) in train_rows(&job, hub.as_ref(), 6).iter().enumerate() {
                let is_same = |(one, other): (&f32, &f32)| match codec {
                    // A difference is rounded, and its sum with what it is added to.
                    "topk:1" => (one - other).abs() <= 1e-4,
                    _ => one.to_bits() == other.to_bits(),
                };
                let same = values.iter().zip(&pulled[0]).all(is_same);
                assert!(same, "{tree} {codec}: replica {rank} differs");
            }
        }
    }
}

/// Trains like [`train`], with buffers that are lent instead of copied. `lacks` says what a worker has no gradient for.
fn train_with_slabs(
    job: &JobConfig,
    cores: u32,
    hub: Option<&Hub>,
    steps: u32,
    lacks: fn(u32) -> Vec<Range<usize>>,
) -> Vec<Vec<f32>> {
    let servers = start_servers(job, cores, hub);
    let worker = |rank: u32| {
        let job = Job::init(options(job, &servers, hub, rank)).unwrap();
        let spec = TableSpec::dense("w", [ELEMENTS as u64]);
        let table = job.table(spec, vec![1.0; ELEMENTS]).unwrap();
        job.start().unwrap();
        let mut slabs = vec![table.slab().unwrap()];
        assert_eq!(slabs[0].values(), vec![1.0; ELEMENTS]);
        let lent = table.read(|_| ()).unwrap_err().to_string();
        assert!(lent.contains("is lent as a slab"), "{lent}");
        for step in 0..steps {
            slabs[0].gradient_mut().copy_from_slice(&gradient(rank, step));
            slabs[0].lacks(lacks(rank)).unwrap();
            let exchange = job.exchange(&mut slabs).unwrap();
            assert!(slabs.is_empty());
            job.clock();
            slabs = exchange.wait().unwrap();
        }
        let slab = slabs.pop().unwrap();
        let values = slab.values().to_vec();
        drop(slab);
        assert!(table.read(|read| read == values).unwrap());
        job.close().unwrap();
        values
    };
    let finals = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..job.workers)
            .map(|rank| {
                let worker = &worker;
                scope.spawn(move || worker(rank))
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    for server in servers {
        server.join().unwrap();
    }
    finals
}

#[test]
fn lent_buffers_give_the_same_bits_as_copied_ones() {
    let job = job_config(2, 2, "bsp");
    let copied = train(&job, 1, None, 4);
    assert_eq!(train_with_slabs(&job, 2, None, 4, |_| Vec::new()), copied);
    assert_eq!(train_with_slabs(&job, 1, Some(&Hub::new()), 4, |_| Vec::new()), copied);
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
fn what_nobody_has_a_gradient_for_stays_over_every_transport() {
    let job = job_config(2, 2, "bsp");
    let lacks = |rank: u32| match rank {
        0 => vec![5_000..60_000],
        _ => vec![20_000..40_000, 40_000..80_000, 99_999..100_000],
    };
    let whole = train(&job, 1, None, 4);
    let over_sockets = train_with_slabs(&job, 2, None, 4, lacks);
    let over_memory = train_with_slabs(&job, 1, Some(&Hub::new()), 4, lacks);
    let first = &over_sockets[0];
    assert!(over_sockets.iter().chain(&over_memory).all(|values| values == first));
    assert!(first[20_000..60_000].iter().all(|&value| value == 1.0));
    assert!(first[60_000..].iter().all(|&value| value != 1.0), "one of them has a gradient");
    assert_eq!(first[..5_000], whole[0][..5_000], "both have one");
    assert_eq!(first[80_000..99_999], whole[0][80_000..99_999]);
}

#[test]
fn a_slab_that_a_server_refuses_comes_back() {
    let job = job_config(1, 1, "bsp");
    let servers = start_servers(&job, 1, None);
    let client = Job::init(options(&job, &servers, None, 0)).unwrap();
    let table = client.table(TableSpec::dense("w", [20_000]), vec![1.0; 20_000]).unwrap();
    client.start().unwrap();
    let mut slabs = vec![table.slab().unwrap()];
    slabs[0].gradient_mut()[0] = f32::NAN;
    let exchange = client.exchange(&mut slabs).unwrap();
    let error = exchange.wait().unwrap_err().to_string();
    assert!(error.contains("has NaN or Inf in chunk 0"), "{error}");
    slabs = exchange.give_up();
    assert_eq!(slabs[0].values(), vec![1.0; 20_000]);
    // The same clock may be tried again, corrected.
    slabs[0].gradient_mut().fill(1.0);
    let exchange = client.exchange(&mut slabs).unwrap();
    slabs = exchange.wait().unwrap();
    assert_eq!(slabs[0].values(), vec![0.9; 20_000]);
    drop(client);
    servers.iter().for_each(Server::stop);
    servers.into_iter().for_each(|server| drop(server.join()));
}

#[test]
fn status_and_set_work_while_a_job_runs() {
    let job = job_config(1, 2, "bsp");
    let servers = start_servers(&job, 1, None);
    let client = Job::init(options(&job, &servers, None, 0)).unwrap();
    let table = client.table(TableSpec::dense("w", [1000]), vec![0.0; 1000]).unwrap();
    client.start().unwrap();
    table.update(&vec![1.0; 1000]).unwrap();
    client.clock();
    table.sync().unwrap();

    let url = format!("paramill://{}/test", servers[0].coordinator()).parse().unwrap();
    let mut admin = Admin::connect(&url, Duration::from_secs(5)).unwrap();
    let sync = |table: &str, sync: &str| PolicyOverride::new(table, Policies::of([(Axis::Sync, sync)]));
    let status = admin.status().unwrap();
    assert_eq!(status.phase, "running with 1 workers");
    assert_eq!(status.shards.len(), 2);
    assert!(status.shards.iter().all(|shard| shard.tables[0].version == 1 && shard.tables[0].sync == "bsp"));
    let sentence = admin.set(sync("w", "ssp:s=3")).unwrap();
    assert_eq!(sentence, "1 table now has sync=ssp:s=3 on all servers");
    for (table, model, expected) in
        [("w", "sps:s=3", "unknown consistency model `sps`"), ("x", "bsp", "no table matches `x`")]
    {
        let error = admin.set(sync(table, model)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(admin.status().unwrap().shards.iter().all(|shard| shard.tables[0].sync == "ssp:s=3"));
    client.close().unwrap();
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn a_wait_that_times_out_says_who_is_missing() {
    let job = job_config(2, 1, "bsp");
    let servers = start_servers(&job, 1, None);
    let start = |rank| {
        let options = options(&job, &servers, None, rank);
        let job = Job::init(options).unwrap();
        let table = job.table(TableSpec::dense("w", [10]), vec![0.0; 10]).unwrap();
        (job, table)
    };
    let ((first, table), (second, _)) = (start(0), start(1));
    std::thread::scope(|scope| {
        scope.spawn(|| second.start().unwrap());
        first.start().unwrap();
    });
    let handle = table.push_pull(&[1.0; 10]).unwrap();
    let error = handle.wait_within(Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }));
    let sentence = error.to_string();
    for part in ["table `w` at clock 0", "server 0 core 0", "progress < v_train", "worker 1"] {
        assert!(sentence.contains(part), "{part} is missing: {sentence}");
    }
    servers.iter().for_each(Server::stop);
}

#[test]
fn a_worker_that_vanishes_is_left_behind() {
    let job = job_config(2, 1, "bsp");
    let servers = start_servers(&job, 1, None);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let options = options(&job, &servers, None, rank);
            scope.spawn(move || {
                let job = Job::init(options).unwrap();
                let table = job.table(TableSpec::dense("w", [10]), vec![0.0; 10]).unwrap();
                job.start().unwrap();
                if rank == 1 {
                    // Dropped without leaving: to the others it died.
                    return;
                }
                table.update(&[1.0; 10]).unwrap();
                job.clock();
                table.sync().unwrap();
                assert_eq!(table.read(|values| values[0]).unwrap(), -0.1);
                let status = job.status().unwrap();
                assert_eq!(status.phase, "running with 1 workers; 1 declared dead");
                job.close().unwrap();
            });
        }
    });
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn wrong_peers_are_refused_with_a_reason() {
    let job = job_config(1, 1, "bsp");
    let servers = start_servers(&job, 1, None);
    let address = servers[0].coordinator();
    let wrong_job =
        Admin::connect(&format!("paramill://{address}/other").parse().unwrap(), Duration::from_secs(5));
    assert!(wrong_job.unwrap_err().to_string().contains("serves job `test`, not `other`"));

    let wrong_rank = Job::init(options(&job, &servers, None, 16_384)).unwrap();
    wrong_rank.table(TableSpec::dense("w", [1]), vec![0.0]).unwrap();
    let error = wrong_rank.start().unwrap_err().to_string();
    assert!(error.contains("rank 16384 is out of range"), "{error}");
    // It may join later, and is told for what it waits until then.
    let too_early = Job::init(options(&job, &servers, None, 7)).unwrap();
    too_early.table(TableSpec::dense("w", [1]), vec![0.0]).unwrap();
    let error = too_early.start_within(Duration::from_millis(300)).unwrap_err().to_string();
    assert!(error.contains("rank 7 can join once it runs"), "{error}");

    // Another wire version, and a stranger: both are told why and hung up on, and the job does not mind.
    use std::io::{Read, Write};
    for (first, reason) in
        [(*b"PMIL\xc8", "wire version 200"), (*b"GET /", "does not speak Paramill's protocol")]
    {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.write_all(&first).unwrap();
        stream.write_all(&[0; 123]).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.contains(reason), "{answer}");
    }

    let taken = ServerConfig { coordinate: Some(job.clone()), ..ServerConfig::new("test", address) };
    let error = server::start(taken, &Arc::new(Registry::builtin())).unwrap_err().to_string();
    assert!(error.contains("is in use by another program"), "{error}");
    servers.iter().for_each(Server::stop);
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn a_coordinator_of_another_release_is_named_at_once() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("paramill://{}/test", listener.local_addr().unwrap()).parse().unwrap();
    let other_release = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 64]).unwrap();
        let mut answer = paramill_core::wire::Header::new(paramill_core::wire::Kind::Error).encode();
        answer[4] = 200;
        stream.write_all(&answer).unwrap();
    });
    let job = Job::init(JobOptions::at(url)).unwrap();
    job.table(TableSpec::dense("w", [1]), vec![0.0]).unwrap();
    let error = job.start().unwrap_err().to_string();
    let ours = paramill_core::wire::WIRE_VERSION;
    assert!(
        error.contains(&format!("the peer speaks wire version 200, this release speaks {ours}")),
        "{error}"
    );
    other_release.join().unwrap();
}

#[test]
fn sparse_rows_travel_over_sockets() {
    let job = job_config(1, 2, "asp");
    let servers = start_servers(&job, 2, None);
    let client = Job::init(options(&job, &servers, None, 0)).unwrap();
    let table = client.table(TableSpec::sparse("rows", 10_000, 17), vec![1.0; 170_000]).unwrap();
    client.start().unwrap();
    let rows = [0, 4_999, 5_000, 9_999];
    let gradient = Gradient::Rows { rows: &rows, values: &[10.0; 4 * 17] };
    table.push(gradient).unwrap().wait().unwrap();
    client.clock();
    let pulled = table.rows(&[1, 5_000]).unwrap().wait().unwrap();
    assert_eq!(pulled, [[1.0; 17], [0.0; 17]].concat());
    let all = table.pull_now().unwrap().wait().unwrap();
    assert_eq!(all.iter().filter(|value| **value == 0.0).count(), 4 * 17);
    client.close().unwrap();
    servers.into_iter().for_each(|server| server.join().unwrap());
}

/// Two workers that have started; the second does nothing by itself.
fn pair(job: &JobConfig, servers: &[Server]) -> [(Job, Table); 2] {
    let jobs = [0, 1].map(|rank| {
        let job = Job::init(options(job, servers, None, rank)).unwrap();
        let table = job.table(TableSpec::dense("w", [10]), vec![0.0; 10]).unwrap();
        (job, table)
    });
    std::thread::scope(|scope| {
        for (job, _) in &jobs {
            scope.spawn(|| job.start().unwrap());
        }
    });
    jobs
}

#[test]
fn a_wait_that_timed_out_can_be_taken_up_again() {
    let config = job_config(2, 1, "bsp");
    let servers = start_servers(&config, 1, None);
    let [(first, table), (second, other)] = pair(&config, &servers);
    let handle = table.push_pull(&[1.0; 10]).unwrap();
    first.clock();
    for _ in 0..2 {
        assert!(matches!(handle.wait_within(Duration::from_millis(50)), Err(ClientError::Timeout { .. })));
    }
    assert!(matches!(first.barrier_within("b", Duration::from_millis(50)), Err(ClientError::Timeout { .. })));
    other.update(&[1.0; 10]).unwrap();
    second.clock();
    other.sync().unwrap();
    handle.wait().unwrap();
    assert_eq!(table.read(|values| values[0]).unwrap(), -0.1);
    std::thread::scope(|scope| {
        scope.spawn(|| second.barrier("b").unwrap());
        first.barrier("b").unwrap();
    });
    assert_eq!(first.workers(), Some(2));
}

#[test]
fn reading_does_not_hold_the_worker_up() {
    let config = job_config(2, 1, "asp");
    let servers = start_servers(&config, 1, None);
    let [(_first, table), _second] = pair(&config, &servers);
    // A push from inside a read: the values that are read stay as they were.
    table
        .read(|before| {
            table.push_pull(&[1.0; 10]).unwrap().wait().unwrap();
            assert_eq!(before, [0.0; 10]);
        })
        .unwrap();
    assert_ne!(table.read(|after| after[0]).unwrap(), 0.0);
}

#[test]
fn delays_over_sockets_hold_a_connection_and_lose_nothing() {
    let mut config = job_config(2, 1, "bsp");
    config.policy.set(Axis::Optimizer, "sgd:lr=1").unwrap();
    let servers = start_servers(&config, 1, None);
    let faults = FaultPlan::parse(&["worker=1:delay=100ms"]).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let options =
                options(&config, &servers, None, rank).inject(Injection { plan: faults.clone(), seed: 0 });
            scope.spawn(move || {
                let job = Job::init(options).unwrap();
                let table = job.table(TableSpec::dense("w", [5000]), vec![0.0; 5000]).unwrap();
                job.start().unwrap();
                for step in 1..=3 {
                    table.update(&[1.0; 5000]).unwrap();
                    job.clock();
                    table.sync().unwrap();
                    assert_eq!(table.read(|values| values[4999]).unwrap(), -(step as f32));
                }
                job.close().unwrap();
            });
        }
    });
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn a_server_that_listens_everywhere_announces_an_address_that_can_be_reached() {
    for hosts in [Vec::new(), vec!["0.0.0.0".to_owned()]] {
        let coordinate = Some(job_config(1, 1, "bsp"));
        let config = ServerConfig { coordinate, hosts, ..ServerConfig::new("test", "0.0.0.0:0") };
        let server = server::start(config, &Arc::new(Registry::builtin())).unwrap();
        for address in server.data_addresses().iter().flat_map(Addresses::iter).chain([server.coordinator()])
        {
            assert!(!address.starts_with("0.0.0.0:") && !address.ends_with(":0"), "{address}");
        }
    }
}

/// Data cores on other addresses do not change where the job is to be found.
#[test]
fn a_job_is_announced_where_it_listens() {
    let coordinate = Some(job_config(1, 1, "bsp"));
    let hosts = vec!["127.0.0.2".to_owned()];
    let config = ServerConfig { coordinate, hosts, ..ServerConfig::new("test", "127.0.0.1:0") };
    let server = server::start(config, &Arc::new(Registry::builtin())).unwrap();
    assert!(server.coordinator().starts_with("127.0.0.1:"), "{}", server.coordinator());
    let data: Vec<&str> = server.data_addresses().iter().flat_map(Addresses::iter).collect();
    assert!(data.iter().any(|address| address.starts_with("127.0.0.2:")), "{data:?}");
}
