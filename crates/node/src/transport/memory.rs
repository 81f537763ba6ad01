//! The in-memory transport: nodes of one process exchange frames through mailboxes, with no socket.

use super::resolver::Answer;
use paramill_core::wire::{Header, Hello, Refusal, Welcome};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Prefix of addresses on this transport.
pub(crate) const SCHEME: &str = "mem:";

/// What one node puts into another's mailbox. `reply_to` and `channel` name the sender's end.
#[derive(Debug)]
pub(crate) enum Letter {
    /// A new connection.
    Connect { channel: u64, hello: Hello, reply_to: Arc<Mailbox> },
    /// It was taken: the other end's channel, and who we are.
    Accepted { channel: u64, peer_channel: u64, welcome: Welcome },
    /// It was refused.
    Refused { channel: u64, refusal: Refusal },
    /// A frame on a connection.
    Frame { channel: u64, header: Header, payload: Vec<u8> },
    /// The other end is gone.
    Closed { channel: u64 },
    /// From the loop's own resolver: the addresses of a name, or why it has none.
    Resolved { address: String, answer: Answer },
}

/// A node's letters, and a descriptor that wakes its event loop.
#[derive(Debug)]
pub(crate) struct Mailbox {
    letters: Mutex<VecDeque<Letter>>,
    wake: OwnedFd,
    /// The owner is about to sleep, or does.
    sleeps: AtomicBool,
}

impl Mailbox {
    pub(crate) fn new() -> std::io::Result<Arc<Mailbox>> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Arc::new(Mailbox { letters: Mutex::default(), wake, sleeps: AtomicBool::new(false) }))
    }

    pub(crate) fn put(&self, letter: Letter) {
        let was_empty = {
            let mut letters = self.letters.lock().expect("no holder of this lock panics");
            letters.push_back(letter);
            letters.len() == 1
        };
        if was_empty {
            self.wake();
        }
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

    /// Takes all letters and resets the wake-up.
    pub(crate) fn take(&self) -> VecDeque<Letter> {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut counter);
        std::mem::take(&mut *self.letters.lock().expect("no holder of this lock panics"))
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// The address book of one process's in-memory nodes. Two jobs in one process use two hubs.
#[derive(Debug, Clone, Default)]
pub struct Hub {
    nodes: Arc<Mutex<BTreeMap<String, Arc<Mailbox>>>>,
}

impl Hub {
    /// An empty hub.
    pub fn new() -> Hub {
        Hub::default()
    }

    pub(crate) fn register(&self, address: &str, mailbox: Arc<Mailbox>) {
        self.nodes.lock().expect("no holder of this lock panics").insert(address.to_owned(), mailbox);
    }

    pub(crate) fn find(&self, address: &str) -> Option<Arc<Mailbox>> {
        self.nodes.lock().expect("no holder of this lock panics").get(address).cloned()
    }
}
