//! What this machine can do at most: bytes through loopback TCP, and through memory.

mod memory;
mod tcp;

pub(super) use memory::{copy, update};
pub(super) use tcp::{Sink, Source, flow, flow_from_memory};
