//! The source of a worker's large buffers.

use crate::address::Addresses;
use crate::store::{Allocate, Heap};
use std::sync::Arc;

/// The process's own memory, or memory that is shared with servers of the same host.
#[derive(Debug)]
pub(super) struct Allocation {
    allocator: Arc<dyn Allocate>,
    shared: Option<SharedMemory>,
}

/// Memory for the case that some server is on this host.
#[derive(Debug)]
struct SharedMemory {
    /// Prefix of this host's addresses.
    host: String,
    allocator: Arc<dyn Allocate>,
}

impl Allocation {
    pub(super) fn on_heap() -> Allocation {
        Allocation { allocator: Arc::new(Heap), shared: None }
    }

    pub(super) fn offer_shared(&mut self, host: String, allocator: Arc<dyn Allocate>) {
        self.shared = Some(SharedMemory { host, allocator });
    }

    /// Shares memory if some peer is on this host.
    pub(super) fn choose<'a>(&mut self, mut peers: impl Iterator<Item = &'a Addresses>) {
        if let Some(SharedMemory { host, allocator }) = &self.shared
            && peers.any(|of| of.iter().any(|address| address.starts_with(host)))
        {
            self.allocator = Arc::clone(allocator);
        }
    }

    pub(super) fn allocator(&self) -> &Arc<dyn Allocate> {
        &self.allocator
    }
}
