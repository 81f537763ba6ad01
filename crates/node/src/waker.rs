//! How an event loop is woken by other threads, and what it waits for.

use rustix::event::{EventfdFlags, eventfd};
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Wakes one event loop, and tells it which of its sources have something for it.
#[derive(Debug)]
pub(crate) struct Waker {
    /// Keys of sources that rang since the loop looked.
    rung: Mutex<Vec<u64>>,
    wake: OwnedFd,
    /// The owner is about to sleep, or does.
    sleeps: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Arc<Waker>> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Arc::new(Waker { rung: Mutex::default(), wake, sleeps: AtomicBool::new(false) }))
    }

    /// Makes the owner's event loop turn once.
    pub(crate) fn wake(&self) {
        // A full counter already wakes the loop; no other error can happen to an eventfd.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Wakes the owner's event loop if it sleeps. One that does not looks at its role before it does.
    pub(crate) fn wake_sleeper(&self) {
        if self.sleeps.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// The owner says that it is about to sleep, or that it does not any more. What it looks at between this and the
    /// sleep, nobody changes without waking it.
    pub(crate) fn set_sleeping(&self, sleeps: bool) {
        self.sleeps.store(sleeps, Ordering::SeqCst);
    }

    /// Resets the wake-up, and moves the keys of all sources that rang to `keys`, which is empty.
    pub(crate) fn take(&self, keys: &mut Vec<u64>) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut counter);
        std::mem::swap(&mut *self.rung(), keys);
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn rung(&self) -> MutexGuard<'_, Vec<u64>> {
        self.rung.lock().expect("no holder of this lock panics")
    }
}

/// What a source without a descriptor rings when there is something to do for it.
#[derive(Debug, Clone)]
pub(crate) struct Doorbell {
    waker: Arc<Waker>,
    key: u64,
}

impl Doorbell {
    /// `key` is the loop's name for the source.
    pub(crate) fn new(waker: &Arc<Waker>, key: u64) -> Doorbell {
        Doorbell { waker: waker.clone(), key }
    }

    pub(crate) fn ring(&self) {
        let is_first = {
            let mut rung = self.waker.rung();
            rung.push(self.key);
            rung.len() == 1
        };
        if is_first {
            self.waker.wake();
        }
    }
}

/// Something that an event loop waits for. No method is required, but one of the two has to be there.
pub(crate) trait Watched: Debug + Send {
    /// What epoll watches; `None` for a source that rings.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A source without a descriptor MUST ring this bell whenever it may have become readable or writable, and once at the
    /// beginning.
    fn ring_with(&mut self, _bell: Doorbell) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_awake(waker: &Waker) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut watched = [PollFd::new(&waker.wake, PollFlags::IN)];
        poll(&mut watched, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    #[test]
    fn bells_wake_once_and_are_told_in_order() {
        let waker = Waker::new().expect("an eventfd");
        let bells = [7, 9].map(|key| Doorbell::new(&waker, key));
        assert!(!is_awake(&waker));
        bells.iter().chain(&bells[..1]).for_each(Doorbell::ring);
        assert!(is_awake(&waker));
        let mut keys = Vec::new();
        waker.take(&mut keys);
        assert_eq!((keys.as_slice(), is_awake(&waker)), ([7, 9, 7].as_slice(), false));
        keys.clear();
        waker.wake();
        assert!(is_awake(&waker));
        waker.take(&mut keys);
        assert_eq!((keys.len(), is_awake(&waker)), (0, false));
    }

    #[test]
    fn only_a_sleeper_is_woken() {
        let waker = Waker::new().expect("an eventfd");
        waker.wake_sleeper();
        assert!(!is_awake(&waker));
        waker.set_sleeping(true);
        waker.wake_sleeper();
        assert!(is_awake(&waker));
    }
}
