//! Frames: a fixed 64-byte header and a payload, as `docs/wire.md` lays them down byte by byte.
//!
//! On the wire a payload is padded with zeros to a multiple of 64 bytes, so that every header and every payload
//! stays aligned to a cache line in a receive buffer that is.

pub mod ack;
pub(crate) mod bounded;
pub mod control;
mod descriptor;
pub mod frame;
pub mod group;
mod handshake;
mod header;
mod plan;

pub use control::{
    Cause, CheckpointOrder, CheckpointOutcome, Control, Fault, FilePart, FirstClock, IdleWorker, PartPlace,
    Position, Relay, Route,
};
pub use descriptor::{DESCRIPTOR_BYTES, Descriptor, Owner};
pub use handshake::{Hello, Party, Refusal, Welcome};
pub use header::{DType, Flags, Header, Kind, WireError};
pub use plan::{Change, Member, Plan, ServedShard, Standing, Switch};

/// Bytes of a header, and the alignment of everything in a stream.
pub const HEADER_BYTES: usize = 64;
/// The protocol spoken by this release. Peers with another version are refused at connect.
pub const WIRE_VERSION: u8 = 13;

/// A payload's length on the wire.
pub fn padded(payload_bytes: usize) -> usize {
    payload_bytes.next_multiple_of(HEADER_BYTES)
}
