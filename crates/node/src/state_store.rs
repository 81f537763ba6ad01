//! Where a coordinator keeps what it has to know when it is started anew, behind one small trait.

mod etcd;
mod file;

pub use etcd::EtcdPlace;
pub(crate) use etcd::Standing;
pub(crate) use file::FileStore;

use crate::log::{Level, Log};
use crate::waker::Waker;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a store is asked whether this process may still coordinate the job: several times in a lease.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long to wait after a store has failed.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Where a coordinator's state is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatePlace {
    /// In a file of this host.
    File(PathBuf),
    /// In etcd, where another host finds it.
    Etcd(EtcdPlace),
}

impl FromStr for StatePlace {
    type Err = StateError;

    fn from_str(text: &str) -> Result<StatePlace, StateError> {
        match text.strip_prefix("etcd://") {
            Some(rest) => rest.parse().map(StatePlace::Etcd),
            None if text.is_empty() => {
                Err(StateError("`--state` needs a path, `none` or etcd://HOST:PORT/PREFIX".into()))
            }
            None => Ok(StatePlace::File(text.into())),
        }
    }
}

impl fmt::Display for StatePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StatePlace::File(path) => write!(f, "{}", path.display()),
            StatePlace::Etcd(place) => write!(f, "{place}"),
        }
    }
}

/// Why a state could not be read or stored, as a sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StateError(pub(crate) String);

/// A store of one state. Three methods are required.
///
/// A state that was stored MUST be found by every later [`StateStore::load`], also one of another process, until another one is stored or it
/// is removed.
pub trait StateStore: Send {
    /// The state that was stored last.
    fn load(&mut self) -> Result<Option<Vec<u8>>, StateError>;

    /// Stores a state in place of the one before. Returns when it is durable.
    fn store(&mut self, state: &[u8]) -> Result<(), StateError>;

    /// Forgets the state: the job is over.
    fn remove(&mut self) -> Result<(), StateError>;

    /// Whether this process may still coordinate the job. The error says why not, for good.
    fn check(&mut self) -> Result<(), StateError> {
        Ok(())
    }
}

enum Request {
    Store(Vec<u8>),
    Remove,
}

/// A thread that stores beside a loop, which disks and networks would hold up.
#[derive(Debug)]
pub(crate) struct Keeper {
    requests: Sender<Request>,
    stored: Arc<AtomicU64>,
    /// States that the role knows to be stored.
    noted: u64,
    /// It may not go on.
    failed: Arc<OnceLock<String>>,
    thread: JoinHandle<()>,
}

impl Keeper {
    pub(crate) fn start(store: Box<dyn StateStore>, waker: Arc<Waker>, log: Log) -> std::io::Result<Keeper> {
        let (requests, received) = channel();
        let (stored, failed) = (Arc::new(AtomicU64::new(0)), Arc::default());
        let work =
            Work { store, received, stored: Arc::clone(&stored), failed: Arc::clone(&failed), waker, log };
        let thread = std::thread::Builder::new().name("state".into()).spawn(move || work.run())?;
        Ok(Keeper { requests, stored, noted: 0, failed, thread })
    }

    /// Stores a state; [`Keeper::poll_stored`] tells when that is done.
    pub(crate) fn store(&mut self, state: Vec<u8>) {
        // A thread that is gone has said why.
        let _ = self.requests.send(Request::Store(state));
    }

    /// Whether a state was stored, once for each.
    pub(crate) fn poll_stored(&mut self) -> bool {
        let is_news = self.stored.load(Ordering::Acquire) > self.noted;
        self.noted += u64::from(is_news);
        is_news
    }

    /// Why this process may not coordinate the job any more, if it may not.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failed.get().map(String::as_str)
    }

    /// The job is over: its state is removed before this returns.
    pub(crate) fn remove(&self) {
        let _ = self.requests.send(Request::Remove);
        while !self.thread.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Work {
    store: Box<dyn StateStore>,
    received: Receiver<Request>,
    stored: Arc<AtomicU64>,
    failed: Arc<OnceLock<String>>,
    waker: Arc<Waker>,
    log: Log,
}

impl Work {
    fn run(mut self) {
        loop {
            let request = match self.received.recv_timeout(CHECK_EVERY) {
                Ok(request) => request,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) if self.may_go_on() => continue,
                Err(RecvTimeoutError::Timeout) => return,
            };
            match request {
                Request::Store(state) => {
                    if !self.store_at_last(&state) {
                        return;
                    }
                    self.stored.fetch_add(1, Ordering::Release);
                    self.waker.wake();
                }
                Request::Remove => {
                    if let Err(error) = self.store.remove() {
                        self.log
                            .line(Level::Warn, &format!("the state of the job that ended stays: {error}"));
                    }
                    return;
                }
            }
        }
    }

    fn may_go_on(&mut self) -> bool {
        let Err(why) = self.store.check() else { return true };
        let _ = self.failed.set(why.to_string());
        self.waker.wake();
        false
    }

    /// Stores until that is done. False if this process may not coordinate the job any more.
    fn store_at_last(&mut self, state: &[u8]) -> bool {
        let mut is_told = false;
        loop {
            let Err(error) = self.store.store(state) else {
                if is_told {
                    self.log.line(Level::Info, "the coordinator's state is stored again");
                }
                return true;
            };
            if !self.may_go_on() {
                return false;
            }
            if !std::mem::replace(&mut is_told, true) {
                let line =
                    format!("the coordinator's state cannot be stored: {error}; what depends on it waits");
                self.log.line(Level::Warn, &line);
            }
            std::thread::sleep(RETRY_AFTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_printed() {
        for text in ["/var/lib/job", "here", "etcd://one:2379/jobs/a", "etcd://one:2379,two:2379/a"] {
            assert_eq!(text.parse::<StatePlace>().unwrap().to_string(), text);
        }
        for wrong in ["", "etcd://", "etcd://host:2379", "etcd:///a"] {
            let why = wrong.parse::<StatePlace>().unwrap_err().to_string();
            assert!(why.contains("etcd://"), "{why}");
        }
    }

    /// A disk that is full at first.
    struct Full(u32, Arc<std::sync::Mutex<Option<Vec<u8>>>>);

    impl StateStore for Full {
        fn load(&mut self) -> Result<Option<Vec<u8>>, StateError> {
            Ok(self.1.lock().unwrap().clone())
        }

        fn store(&mut self, state: &[u8]) -> Result<(), StateError> {
            self.0 = self.0.saturating_sub(1);
            if self.0 > 0 {
                return Err(StateError("the disk is full".into()));
            }
            *self.1.lock().unwrap() = Some(state.to_vec());
            Ok(())
        }

        fn remove(&mut self) -> Result<(), StateError> {
            *self.1.lock().unwrap() = None;
            Ok(())
        }
    }

    #[test]
    fn what_cannot_be_stored_is_tried_again_and_what_is_over_is_removed() {
        let disk = Arc::<std::sync::Mutex<Option<Vec<u8>>>>::default();
        let (waker, log) = (Waker::new().unwrap(), Log::none());
        let mut keeper = Keeper::start(Box::new(Full(2, disk.clone())), waker, log).unwrap();
        keeper.store(vec![7]);
        while !keeper.poll_stored() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((disk.lock().unwrap().clone(), keeper.poll_stored()), (Some(vec![7]), false));
        keeper.remove();
        assert_eq!((disk.lock().unwrap().clone(), keeper.failure()), (None, None));
    }
}
