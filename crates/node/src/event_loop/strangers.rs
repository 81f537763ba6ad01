//! How many connections of strangers a process has: of peers that have not said who they are, and of commands. They share
//! the process's file descriptors with its members, who must always find one.

use paramill_core::limits;
use rustix::process::{Resource, getrlimit};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The strangers of all loops that share this.
#[derive(Debug)]
pub(crate) struct Strangers {
    count: AtomicUsize,
    loops: AtomicUsize,
    /// From so many on each newcomer takes the place of a connection that had the time to say hello and did not.
    crowd: usize,
    /// So many are too many, whether or not they had the time.
    most: usize,
    accepting: Mutex<()>,
}

impl Strangers {
    /// Room for a share of the file descriptors that this process may have.
    pub(crate) fn new() -> Arc<Strangers> {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        Arc::new(Strangers {
            count: AtomicUsize::new(0),
            loops: AtomicUsize::new(0),
            crowd: (descriptors / limits::CROWD_SHARE).max(1),
            most: (descriptors / limits::STRANGERS_SHARE).max(1),
            accepting: Mutex::new(()),
        })
    }

    /// Another loop takes connections.
    pub(super) fn add_loop(&self) {
        self.loops.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether there are so many that a newcomer should take the place of another.
    pub(super) fn are_a_crowd(&self) -> bool {
        self.count.load(Ordering::Relaxed) >= self.crowd
    }

    /// Whether a loop that has `own` of them may have another one. A loop with few of its own always may: those of the other
    /// loops must not keep out its members.
    pub(super) fn have_room(&self, own: usize) -> bool {
        let own_share = self.crowd / self.loops.load(Ordering::Relaxed).max(1);
        self.count.load(Ordering::Relaxed) < self.most || own < own_share.max(1)
    }

    /// While this is held no other loop takes a connection, and with it a descriptor that was given up for this one.
    pub(super) fn accept_alone(&self) -> MutexGuard<'_, ()> {
        self.accepting.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_without_strangers_has_room_whatever_the_others_took() {
        let (crowd, most) = (8, 16);
        let all = Arc::new(Strangers { crowd, most, ..Arc::into_inner(Strangers::new()).unwrap() });
        (0..2).for_each(|_| all.add_loop());
        let mut held: Vec<Stranger> = (0..most - 1).map(|_| Stranger::new(&all)).collect();
        assert!(all.are_a_crowd() && all.have_room(most - 1));
        held.push(Stranger::new(&all));
        assert!(!all.have_room(most));
        // The other loop has half of what makes a crowd to itself.
        for own in 0..crowd / 2 {
            assert!(all.have_room(own), "{own}");
            held.push(Stranger::new(&all));
        }
        assert!(!all.have_room(crowd / 2));
        held.truncate(crowd - 1);
        assert!(!all.are_a_crowd());
    }
}
