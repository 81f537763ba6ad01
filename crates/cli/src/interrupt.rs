//! Ctrl-C ends the command with exit code 130, and takes along the processes that the command started.

use crate::failure::{Failure, INTERRUPTED};
use crate::group;
use anyhow::Context;
use rustix::process::{Pid, WaitOptions, waitpid};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Processes that must not outlive this one.
static CHILDREN: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Whether the handler is at work; what fails from then on fails because of it.
static UNDER_WAY: AtomicBool = AtomicBool::new(false);

/// Whether a command ends by itself when it is asked to: the handler leaves it to [`is_asked_to_end`] then, once.
static ENDS_ITSELF: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicBool = AtomicBool::new(false);

/// How long a child may take to end in good order.
const GRACE: Duration = Duration::from_secs(2);

/// Without this, a shell would see a death by signal, which scripts tell apart from an answer with difficulty.
pub(crate) fn install() -> Result<(), Failure> {
    let handler = || {
        if ENDS_ITSELF.load(Ordering::SeqCst) && !ASKED.swap(true, Ordering::SeqCst) {
            return;
        }
        UNDER_WAY.store(true, Ordering::SeqCst);
        end_children();
        std::process::exit(i32::from(INTERRUPTED));
    };
    ctrlc::set_handler(handler).context("cannot listen for Ctrl-C")?;
    Ok(())
}

/// From now on the command looks whether it is to end, and does so in good order. A second Ctrl-C ends it at once.
pub(crate) fn end_in_good_order() {
    ENDS_ITSELF.store(true, Ordering::SeqCst);
}

/// Whether the command was asked to end.
pub(crate) fn is_asked_to_end() -> bool {
    ASKED.load(Ordering::SeqCst)
}

/// Leaves the last word to Ctrl-C where it was pressed: children that it ended look like failures.
pub(crate) fn yield_to_interrupt() {
    while UNDER_WAY.load(Ordering::SeqCst) {
        std::thread::park_timeout(GRACE);
    }
}

/// A child that Ctrl-C ends too with all that it started, for as long as the guard lives.
#[derive(Debug)]
pub(crate) struct ChildGuard(Pid);

impl ChildGuard {
    pub(crate) fn new(child: &std::process::Child) -> ChildGuard {
        let pid = Pid::from_child(child);
        children().push(pid);
        ChildGuard(pid)
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        children().retain(|pid| *pid != self.0);
    }
}

/// Asks all children and their descendants to end, then makes them, and reaps them: nothing is left behind.
fn end_children() {
    // Children that are started meanwhile are in the list of the next turn.
    group::end(|| children().clone(), GRACE);
    for pid in children().drain(..) {
        let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

fn children() -> std::sync::MutexGuard<'static, Vec<Pid>> {
    CHILDREN.lock().expect("no holder of this lock panics")
}
