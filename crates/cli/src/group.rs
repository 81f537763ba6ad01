//! Process groups: a child of this process and all that it started, as long as that did not leave the group (`setsid`).
//!
//! A group's number is that of its first process. It is not given to anybody else as long as the group has members or its first
//! process was not waited for. Children are therefore waited for after their group was ended, not when they end.

use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How often it is looked whether a group has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Ends these groups: each is asked once, and what is left after `grace` is made to. Groups that come up meanwhile are ended too.
pub(crate) fn end(groups: impl Fn() -> Vec<Pid>, grace: Duration) {
    let began = Instant::now();
    let mut asked = HashSet::new();
    loop {
        let living = living();
        let is_living = |group: &Pid| living.as_ref().is_none_or(|living| living.contains(group));
        let left: Vec<Pid> = groups().into_iter().filter(is_living).collect();
        let waited = began.elapsed();
        // The kernel cannot end a process that waits for a broken disk; it is left.
        if left.is_empty() || waited > 2 * grace {
            return;
        }
        for group in left {
            // An error means that the group has just ended.
            if waited > grace {
                let _ = kill_process_group(group, Signal::KILL);
            } else if asked.insert(group) {
                let _ = kill_process_group(group, Signal::TERM);
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The groups of this session that have processes which run; nothing where the kernel does not tell. Groups of children are in
/// the session of their parent: another one with the same number is somebody else's.
fn living() -> Option<HashSet<Pid>> {
    let own = std::fs::read_link("/proc/self").ok()?;
    // Numbers in the `/proc` of another namespace mean other processes.
    if own.to_str()?.parse() != Ok(std::process::id()) {
        return None;
    }
    let session = Stat::read("self")?.session;
    let is_ours = |stat: &Stat| stat.runs && stat.session == session;
    let processes =
        std::fs::read_dir("/proc").ok()?.filter_map(|entry| Stat::read(entry.ok()?.file_name().to_str()?));
    Some(processes.filter(is_ours).filter_map(|stat| Pid::from_raw(stat.group)).collect())
}

/// What the kernel tells of a process.
struct Stat {
    /// Whether it has not ended, to be waited for only.
    runs: bool,
    group: i32,
    session: i32,
}

impl Stat {
    /// `None` for a process that is gone, and for what is no process.
    fn read(name: &str) -> Option<Stat> {
        let text = std::fs::read_to_string(format!("/proc/{name}/stat")).ok()?;
        // The program's name, in parentheses, may contain anything.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse().ok();
        Some(Stat { runs: !matches!(*fields.first()?, "Z" | "X"), group: number(2)?, session: number(3)? })
    }
}
