//! Names become addresses on threads of their own: the operating system may take long over one, and an event loop has
//! others to serve meanwhile.

use crate::waker::Doorbell;
use paramill_core::limits;
use paramill_core::types::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

/// Names that one loop may ask for at a time. Each has a thread, so that a name which takes long keeps no other waiting.
const MAX_ASKED: usize = 32;

/// How a name becomes addresses; at least one, or an error.
pub(crate) type Resolve = fn(&str) -> io::Result<Vec<SocketAddr>>;

/// The addresses of a name, or why there are none.
pub(crate) type Answer = Result<Vec<SocketAddr>, String>;

/// A loop's resolver. It asks for a name once at a time, and keeps an answer that came too late for the next attempt:
/// otherwise a name that always takes longer than one attempt could never be reached.
#[derive(Debug)]
pub(crate) struct Resolver {
    resolve: Resolve,
    bell: Doorbell,
    answers: Answers,
    /// Addresses, each a name with a port, whose answer is to come.
    asked: BTreeSet<String>,
    /// Answers that no attempt waited for, and when they came.
    kept: BTreeMap<String, (Time, Answer)>,
}

/// Answers that the threads brought and the loop has not taken, each with its address.
#[derive(Debug, Clone, Default)]
struct Answers(Arc<Mutex<Vec<(String, Answer)>>>);

impl Answers {
    fn lock(&self) -> MutexGuard<'_, Vec<(String, Answer)>> {
        self.0.lock().expect("no holder of this lock panics")
    }
}

impl Resolver {
    /// Rings `bell` for answers.
    pub(crate) fn new(resolve: Resolve, bell: Doorbell) -> Resolver {
        Resolver { resolve, bell, answers: Answers::default(), asked: BTreeSet::new(), kept: BTreeMap::new() }
    }

    /// The answer for an address if one is kept; it serves once. Otherwise [`Resolver::take`] brings it, now or much
    /// later: the caller has its own deadline.
    pub(crate) fn ask(&mut self, now: Time, address: &str) -> io::Result<Option<Answer>> {
        self.forget_old(now);
        if let Some((_, answer)) = self.kept.remove(address) {
            return Ok(Some(answer));
        }
        if self.asked.contains(address) {
            return Ok(None);
        }
        if self.asked.len() >= MAX_ASKED {
            return Err(io::Error::other("too many other names wait to be resolved"));
        }
        let (resolve, name) = (self.resolve, address.to_owned());
        let (bell, answers) = (self.bell.clone(), self.answers.clone());
        let body = move || {
            let answer = resolve(&name).map_err(|error| error.to_string());
            answers.lock().push((name, answer));
            bell.ring();
        };
        std::thread::Builder::new().name("paramill resolver".into()).spawn(body)?;
        self.asked.insert(address.to_owned());
        Ok(None)
    }

    /// The answers that came, each with its address, which may be asked for again.
    pub(crate) fn take(&mut self) -> Vec<(String, Answer)> {
        let answers = std::mem::take(&mut *self.answers.lock());
        for (address, _) in &answers {
            self.asked.remove(address);
        }
        answers
    }

    /// Keeps an answer that no attempt waits for.
    pub(crate) fn keep(&mut self, now: Time, address: String, answer: Answer) {
        self.kept.insert(address, (now, answer));
    }

    /// Whoever still wants to connect asks again before this time is over.
    fn forget_old(&mut self, now: Time) {
        self.kept.retain(|_, (came, _)| now < *came + limits::CONNECT_DEADLINE);
    }
}
