//! Conditions of the application: a thread of their own evaluates them for the servers.

use super::shared::{Shared, lock};
use crate::clock;
use crate::log::{Level, Log};
use paramill_core::worker::Asked;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long the thread sleeps at most before it looks whether the job is over.
const SLICE: Duration = Duration::from_millis(100);

type Evaluate = dyn Fn(&Asked) -> Result<bool, String> + Send + Sync;

/// Conditions by name, and the thread that evaluates them.
#[derive(Default)]
pub(super) struct Conditions {
    by_name: Mutex<BTreeMap<String, Arc<Evaluate>>>,
    /// Signalled when servers ask.
    pub(super) asked: Condvar,
}

impl fmt::Debug for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.lock().keys()).finish()
    }
}

impl Conditions {
    /// Evaluates conditions of this name by `evaluate` from now on. The first one starts the thread.
    pub(super) fn set(
        &self,
        shared: &Arc<Shared>,
        log: &Log,
        name: &str,
        evaluate: Arc<Evaluate>,
    ) -> io::Result<()> {
        let mut by_name = self.lock();
        if by_name.is_empty() {
            let (shared, log) = (shared.clone(), log.clone());
            // Nobody waits for its end: a condition may take as long as it wants.
            std::thread::Builder::new()
                .name("paramill conditions".into())
                .spawn(move || evaluate_all(&shared, &log))?;
        }
        by_name.insert(name.to_owned(), evaluate);
        Ok(())
    }

    /// Forgets all of them: what they refer to is not to live as long as the job is referred to.
    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    fn get(&self, name: &str) -> Option<Arc<Evaluate>> {
        self.lock().get(name).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Evaluate>>> {
        lock(&self.by_name)
    }
}

/// Evaluates conditions until the job is over.
fn evaluate_all(shared: &Shared, log: &Log) {
    // One that fails again and again says so once.
    let mut failing = BTreeSet::new();
    while let Some(asked) = next_question(shared) {
        let name = &asked.question.condition;
        let known = shared.conditions.get(name);
        // One that panics fails, and leaves the thread to the others.
        let evaluate = |evaluate: Arc<Evaluate>| {
            let verdict = catch_unwind(AssertUnwindSafe(|| evaluate(&asked)));
            verdict.unwrap_or_else(|_| Err("it panicked".into()))
        };
        let verdict = known.map_or_else(|| Err("it is not known".into()), evaluate);
        match &verdict {
            Ok(_) => {
                failing.remove(name);
            }
            Err(why) if failing.insert(name.clone()) => {
                log.line(Level::Warn, &format!("condition `{name}` failed, its fallback decides: {why}"));
            }
            Err(_) => {}
        }
        let answer = |worker: &mut paramill_core::worker::Worker| {
            worker.answer(&asked, verdict.ok());
            Ok(())
        };
        // A job that has ended needs no answer.
        let _ = shared.act(answer);
    }
}

/// Waits for the next pull that a server asks about. `None` when the job is over.
fn next_question(shared: &Shared) -> Option<Asked> {
    let mut state = shared.lock();
    loop {
        if state.ended.is_some() || shared.is_stopped() {
            return None;
        }
        if let Some(asked) = state.worker.poll_question(clock::now()) {
            return Some(asked);
        }
        let wait = shared.conditions.asked.wait_timeout(state, SLICE);
        state = wait.unwrap_or_else(PoisonError::into_inner).0;
    }
}
