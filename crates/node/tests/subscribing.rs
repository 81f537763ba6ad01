//! Readers over real threads and sockets: what they have is what the servers published, whole.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_node::client::{ClientError, Clock, DType, Job, JobOptions, Reader, TableSpec};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::url::JobUrl;
use std::sync::Arc;

const ELEMENTS: usize = 30_000;

/// Two servers with two cores each, for one worker.
fn servers(policy: Policy) -> Vec<Server> {
    let registry = Arc::new(Registry::builtin());
    let policy = policy.with(Axis::Placement, "uniform");
    let coordinate = Some(JobConfig { policy, ..JobConfig::new("test", 1, 2) });
    let base = ServerConfig { cores: 2, digest_every: 1, ..ServerConfig::new("test", "127.0.0.1:0") };
    let first = server::start(ServerConfig { coordinate, ..base.clone() }, &registry).unwrap();
    let coordinator = first.coordinator().to_owned();
    vec![first, server::start(ServerConfig { coordinator, ..base }, &registry).unwrap()]
}

fn options(servers: &[Server]) -> JobOptions {
    JobOptions::at(JobUrl { address: servers[0].coordinator().to_owned(), job: "test".into() })
}

/// The version of a reader, and its two tensors.
fn read(reader: &Reader) -> (Clock, Vec<(String, DType, Vec<f32>)>) {
    let copy = |version, tensors: &[paramill_node::client::Tensor<'_>]| {
        let tensors = tensors.iter().map(|it| (it.name.to_owned(), it.dtype, it.values.to_vec()));
        (version, tensors.collect())
    };
    reader.read(copy).unwrap()
}

#[test]
fn readers_have_what_a_writer_published_to_the_bit_and_come_and_go() {
    let policy = Policy::default()
        .with(Axis::Broadcast, "star")
        .with(Axis::Optimizer, "assign:lr=1")
        .with(Axis::AnswerCodec, "delta:dtype=bf16");
    let servers = servers(policy);
    let job = Job::init(options(&servers).write_only()).unwrap();
    let mut values: Vec<f32> = (0..ELEMENTS).map(|i| (i % 100) as f32).collect();
    let w = job.table(TableSpec::dense("w", [300, 100]), values.clone()).unwrap();
    let b = job.table(TableSpec::dense("b", [3]), vec![0.5; 3]).unwrap();
    job.start().unwrap();
    assert!(w.pull().is_err(), "it only writes");
    let stays = Reader::open(options(&servers)).unwrap();
    for version in 1..=5 {
        let goes = Reader::open(options(&servers)).unwrap();
        values[version as usize * 777] += 2.0;
        let handles = [w.push(&values).unwrap(), b.push(&[version as f32, -0.0, 0.25]).unwrap()];
        job.clock();
        handles.into_iter().for_each(|handle| handle.wait().unwrap());
        for reader in [&stays, &goes] {
            assert_eq!(reader.wait(version).unwrap(), version);
            let (has, tensors) = read(reader);
            assert_eq!((has, tensors.len()), (version, 2));
            assert_eq!(tensors[0], ("w".to_owned(), DType::Bf16, values.clone()));
            assert_eq!(tensors[1].2[1].to_bits(), (-0.0f32).to_bits());
        }
        goes.close().unwrap();
    }
    assert_eq!(job.status().unwrap().workers.len(), 1, "readers are none");
    job.close().unwrap();
    // What is there stays there when the job is over.
    assert!(matches!(stays.wait(6), Err(ClientError::Worker(_))));
    assert_eq!(read(&stays).0, 5);
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn a_job_that_broadcasts_nothing_says_how_it_could_be_read() {
    let servers = servers(Policy::default());
    let job = Job::init(options(&servers)).unwrap();
    job.table(TableSpec::dense("w", [10]), vec![0.0; 10]).unwrap();
    job.start().unwrap();
    let error = Reader::open(options(&servers)).unwrap_err().to_string();
    assert!(error.contains("table `w` is not broadcast") && error.contains("--broadcast star"), "{error}");
    job.close().unwrap();
    servers.into_iter().for_each(|server| server.join().unwrap());
}
