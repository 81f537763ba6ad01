//! The in-memory transport: nodes of one process exchange frames through queues, with no socket.

mod carrier;
mod channel;

use super::carrier::{Carrier, Listener};
use crate::waker::{Doorbell, Watched};
use carrier::MemoryCarrier;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Prefix of addresses on this transport.
pub(crate) const SCHEME: &str = "mem:";

/// Connections that may wait to be taken.
const BACKLOG: usize = 1024;

/// The address book of one process's in-memory nodes. Two jobs in one process use two hubs.
#[derive(Debug, Clone, Default)]
pub struct Hub {
    nodes: Arc<Mutex<BTreeMap<String, Weak<Entrance>>>>,
}

impl Hub {
    /// An empty hub.
    pub fn new() -> Hub {
        Hub::default()
    }

    /// From now on peers find a node at this address, for as long as its listener exists. The latest one counts.
    pub(crate) fn listen(&self, address: &str) -> Box<dyn Listener> {
        let entrance = Arc::<Entrance>::default();
        self.lock().insert(address.to_owned(), Arc::downgrade(&entrance));
        Box::new(Listening(entrance))
    }

    /// Connects to the node at an address. It has yet to take the connection.
    pub(crate) fn dial(&self, address: &str) -> Result<Box<dyn Carrier>, String> {
        let entrance = self.lock().get(address).and_then(Weak::upgrade);
        let entrance = entrance.ok_or_else(|| unknown(address))?;
        let (ours, theirs) = MemoryCarrier::pair();
        match entrance.enter(theirs) {
            true => Ok(Box::new(ours)),
            false => Err(format!("too many connections wait at {address}")),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Weak<Entrance>>> {
        self.nodes.lock().expect("no holder of this lock panics")
    }
}

/// What somebody is told who looks for a node that is not there.
pub(crate) fn unknown(address: &str) -> String {
    format!("nothing is registered at {address}")
}

/// Connections that wait to be taken, and the bell of the node that takes them.
#[derive(Debug, Default)]
struct Entrance(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    carriers: VecDeque<MemoryCarrier>,
    bell: Option<Doorbell>,
}

impl Entrance {
    /// Returns false if too many wait already.
    fn enter(&self, carrier: MemoryCarrier) -> bool {
        let mut waiting = self.lock();
        if waiting.carriers.len() >= BACKLOG {
            return false;
        }
        waiting.carriers.push_back(carrier);
        let bell = waiting.bell.clone();
        drop(waiting);
        bell.iter().for_each(Doorbell::ring);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().expect("no holder of this lock panics")
    }
}

/// A node that peers find at a hub.
#[derive(Debug)]
struct Listening(Arc<Entrance>);

impl Watched for Listening {
    fn ring_with(&mut self, bell: Doorbell) {
        bell.ring();
        self.0.lock().bell = Some(bell);
    }
}

impl Listener for Listening {
    fn accept(&self) -> io::Result<Result<Box<dyn Carrier>, String>> {
        let taken = self.0.lock().carriers.pop_front();
        Ok(Ok(Box::new(taken.ok_or(io::ErrorKind::WouldBlock)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_found_as_long_as_it_listens_and_its_backlog_is_bounded() {
        let hub = Hub::new();
        assert_eq!(hub.dial("mem:a").unwrap_err(), "nothing is registered at mem:a");
        let listener = hub.listen("mem:a");
        let waiting = listener.accept().unwrap_err();
        assert_eq!(waiting.kind(), io::ErrorKind::WouldBlock);
        let mut dialled: Vec<_> = (0..BACKLOG).map(|_| hub.dial("mem:a").unwrap()).collect();
        assert!(hub.dial("mem:a").unwrap_err().contains("too many connections"));
        assert!(listener.accept().unwrap().is_ok());
        dialled.push(hub.dial("mem:a").unwrap());
        drop(listener);
        assert!(hub.dial("mem:a").unwrap_err().contains("nothing is registered"));
        // Those that nobody took are hung up on.
        assert!(dialled.iter_mut().all(|carrier| carrier.receive(None).is_err()), "{dialled:?}");
    }

    #[test]
    fn the_latest_of_two_nodes_counts() {
        let hub = Hub::new();
        let old = hub.listen("mem:a");
        let new = hub.listen("mem:a");
        hub.dial("mem:a").unwrap().hang_up();
        assert!(old.accept().is_err() && new.accept().is_ok());
        drop(old);
        assert!(hub.dial("mem:a").is_ok());
    }
}
