//! How many connections of strangers a process has: of peers that have not said who they are, and of commands. They share
//! the process's file descriptors with its members, who must always find one.

use paramill_core::limits;
use rustix::process::{Resource, getrlimit};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The strangers of all loops that share this.
#[derive(Debug)]
pub(crate) struct Strangers {
    count: AtomicUsize,
    most: usize,
}

impl Strangers {
    /// Room for a share of the file descriptors that this process may have.
    pub(crate) fn new() -> Arc<Strangers> {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(descriptors).unwrap_or(usize::MAX) / limits::STRANGERS_SHARE;
        Arc::new(Strangers { count: AtomicUsize::new(0), most: most.max(1) })
    }

    /// Whether another one would be too many.
    pub(crate) fn is_full(&self) -> bool {
        self.count.load(Ordering::Relaxed) >= self.most
    }
}

/// Counts one stranger, for as long as it exists.
#[derive(Debug)]
pub(super) struct Stranger(Arc<Strangers>);

impl Stranger {
    pub(super) fn new(all: &Arc<Strangers>) -> Stranger {
        all.count.fetch_add(1, Ordering::Relaxed);
        Stranger(all.clone())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}
