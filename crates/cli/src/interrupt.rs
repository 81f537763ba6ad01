//! Ctrl-C ends the command with exit code 130, and takes along the processes that the command started.

use crate::failure::{Failure, INTERRUPTED};
use anyhow::Context;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Processes that must not outlive this one.
static CHILDREN: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// How long a child may take to end in good order.
const GRACE: Duration = Duration::from_secs(2);

/// Without this, a shell would see a death by signal, which scripts tell apart from an answer with difficulty.
pub(crate) fn install() -> Result<(), Failure> {
    let handler = || {
        end_children();
        std::process::exit(i32::from(INTERRUPTED));
    };
    ctrlc::set_handler(handler).context("cannot listen for Ctrl-C")?;
    Ok(())
}

/// A child that Ctrl-C ends too, for as long as the guard lives.
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

/// Asks all children to end, then makes them, and reaps them: nothing is left behind.
fn end_children() {
    let mut left = std::mem::take(&mut *children());
    // Errors mean that a child is gone already, which is what is wanted.
    left.iter().for_each(|pid| drop(kill_process(*pid, Signal::TERM)));
    let deadline = Instant::now() + GRACE;
    while !left.is_empty() && Instant::now() < deadline {
        left.retain(|pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None)));
        std::thread::sleep(Duration::from_millis(10));
    }
    for pid in left {
        drop(kill_process(pid, Signal::KILL));
        drop(waitpid(Some(pid), WaitOptions::empty()));
    }
}

fn children() -> std::sync::MutexGuard<'static, Vec<Pid>> {
    CHILDREN.lock().expect("no holder of this lock panics")
}
