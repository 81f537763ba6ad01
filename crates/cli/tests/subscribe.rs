//! `paramill subscribe`: what it writes, and what it says when there is nothing to read.

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_node::client::{Job, JobOptions, TableSpec};
use paramill_node::server::{self, ServerConfig};
use paramill_node::url::JobUrl;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

fn subscribe(url: &str, out: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paramill"));
    command.args(["subscribe", url, "--out"]).arg(out).args(more);
    command.output().expect("the binary was built for this test")
}

/// The JSON header of a file of tensors, and the bytes behind it.
fn read(file: &Path) -> (Value, Vec<u8>) {
    let bytes = std::fs::read(file).expect("it was written");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header = serde_json::from_slice(&bytes[8..8 + length]).expect("the header is JSON");
    (header, bytes[8 + length..].to_vec())
}

#[test]
fn the_version_that_is_printed_is_the_one_in_the_file() {
    let policy = Policy::default()
        .with(Axis::Broadcast, "star")
        .with(Axis::Optimizer, "assign:lr=1")
        .with(Axis::AnswerCodec, "delta:dtype=bf16");
    let registry = Arc::new(Registry::builtin());
    let coordinate = Some(JobConfig { policy, ..JobConfig::new("test", 1, 1) });
    let config = ServerConfig { coordinate, ..ServerConfig::new("test", "127.0.0.1:0") };
    let server = server::start(config, &registry).expect("a server");
    let url = JobUrl { address: server.coordinator().to_owned(), job: "test".into() };
    let job = Job::init(JobOptions::at(url.clone()).write_only()).expect("a worker");
    // What is beside a NaN is not rounded: its table has all bits.
    let odd = vec![f32::NAN, 0.1, f32::INFINITY];
    let w = job.table(TableSpec::dense("w", [2, 2]), vec![0.5; 4]).expect("a table");
    let odd = job.table(TableSpec::dense("odd", [3]).alone(), odd).expect("a table");
    job.start().expect("it starts");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.safetensors");
    for version in 0..3u64 {
        let output = subscribe(&url.to_string(), &file, &["--once", "--json"]);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let printed: Value = serde_json::from_slice(&output.stdout).expect("one line");
        let (header, values) = read(&file);
        assert_eq!(printed["version"], version);
        assert_eq!(header["__metadata__"]["version"], version.to_string());
        assert_eq!(header["__metadata__"]["job"], url.to_string());
        let digest = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&values));
        assert_eq!(header["__metadata__"]["digest"], digest);
        assert_eq!(printed["bytes"], std::fs::metadata(&file).expect("a file").len());
        assert_eq!((&header["w"]["dtype"], &header["w"]["shape"]), (&"BF16".into(), &[2, 2].into()));
        let w_bits = if version == 0 { 0x3f00u16 } else { 0x4000 + 0x40 * (version as u16 - 1) };
        assert_eq!(values[..8], w_bits.to_le_bytes().repeat(4));
        if version == 0 {
            assert_eq!(header["odd"]["dtype"], "F32");
            let floats: Vec<u32> =
                values[8..].chunks(4).map(|it| u32::from_le_bytes(it.try_into().expect("four"))).collect();
            assert!(f32::from_bits(floats[0]).is_nan());
            assert_eq!(floats[1..], [0.1f32.to_bits(), f32::INFINITY.to_bits()]);
        }
        assert_eq!(
            std::fs::read_dir(folder.path()).expect("a folder").count(),
            1,
            "nothing is left beside it"
        );
        // 2.0, and then 3.0.
        let handles = [w.push(&[version as f32 + 2.0; 4]), odd.push(&[1.0; 3])];
        job.clock();
        handles.into_iter().for_each(|handle| handle.and_then(|handle| handle.wait()).expect("it is taken"));
    }
    job.close().expect("it leaves");
    server.join().expect("the job is over");
}

#[test]
fn an_address_where_nobody_is_has_its_error_named() {
    let folder = tempfile::tempdir().expect("a folder");
    // A port that is taken, so that nobody else listens there, and on which nobody listens.
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("it is bound").port();
    let url = format!("paramill://127.0.0.1:{port}/job");
    let output = subscribe(&url, &folder.path().join("x"), &["--timeout", "1s"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("127.0.0.1:{port} is not connected")), "{said}");
    assert!(said.contains("refused"), "{said}");
}
