//! Peers that say anything at any time. No role panics (overflow is checked in tests), what is refused changes
//! nothing, memory stays within bounds, and a job with honest members goes on.

mod aggregator;
mod coordinator;
mod job;
mod shard;
mod words;
mod worker;

use crate::bench::Bench;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Order, Policy};
use paramill_core::role::{Body, Frame, Output, Role};
use paramill_core::table::TableSpec;
use paramill_core::types::{ConnectionId, NodeId, ProcessId, ServerId, ShardId, TableId, Time, WorkerId};
use paramill_core::wire::{Control, Kind, control};

/// The dense table.
const W: TableId = TableId(0);
/// The sparse one.
const ROWS: TableId = TableId(1);
const ELEMENTS: usize = 20;

fn config(workers: u32, sync: &str, order: Order) -> JobConfig {
    let policy = Policy::default()
        .with(Axis::Sync, sync)
        .with(Axis::Optimizer, "momentum:lr=0.1")
        .with(Axis::Order, order.to_string());
    let policy = policy.with(Axis::Placement, "uniform").with(Axis::Chunk, "16B");
    JobConfig { policy, ..JobConfig::new("test", workers, 2) }
}

/// A job of two servers that has started: `w` of 20 elements, `rows` of 10 rows of 2, in chunks of 4.
fn started(config: JobConfig) -> Bench {
    let mut bench = Bench::new(config, 1);
    bench.start(&[
        (TableSpec::dense("w", [ELEMENTS as u64]), vec![1.0; ELEMENTS]),
        (TableSpec::sparse("rows", 10, 2), vec![2.0; 20]),
    ]);
    bench
}

fn shard_id(server: u32) -> ShardId {
    ShardId { server: ServerId(server), core: 0 }
}

/// Hands a frame to a role as if it had come on `connection`; what the role wants done.
fn say(role: &mut impl Role, now: Time, connection: impl Into<ConnectionId>, frame: &Frame) -> Vec<Output> {
    let payload = role_payload(&frame.body);
    role.handle_frame(now, connection.into(), &frame.header, payload);
    drain(role)
}

fn role_payload(body: &Body) -> &[u8] {
    body.bytes().expect("hostile frames have their bytes with them")
}

fn drain(role: &mut impl Role) -> Vec<Output> {
    let outputs: Vec<Output> = std::iter::from_fn(|| role.poll_output()).collect();
    for output in &outputs {
        if let Output::Send { frame, .. } = output {
            let length = role.payload(&frame.body).len();
            assert_eq!(length, frame.header.payload_bytes as usize, "{:?}", frame.header);
            assert!(length <= frame.header.kind.max_payload_bytes(), "{:?}", frame.header);
        }
        if let Output::Log(_, line) = output {
            assert!(line.len() < 4096, "a log line of {} bytes", line.len());
        }
    }
    outputs
}

/// Whether this is a refusal sent to a worker.
fn is_refusal(output: &Output, worker: WorkerId) -> bool {
    matches!(output, Output::Send { to, frame, .. } if *to == NodeId::Worker(worker).into() && frame.header.kind == Kind::Error)
}

fn message(message: &Control) -> Frame {
    control::frame(Kind::Control, message)
}
