//! Process groups: a child of this process and all that it started, as long as that did not leave the group (`setsid`).
//!
//! A group's number is that of its first process. It is not given to anybody else as long as the group has members or its first
//! process was not waited for. Children are therefore waited for after their group was ended, not when they end.

use rustix::process::{Pid, Signal, getsid, kill_process_group};
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
    let session = getsid(None).ok()?;
    let group = |stat: String| {
        // The name, in parentheses, may contain anything.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let runs = !matches!(fields.next()?, "Z" | "X");
        let mut numbers = fields.skip(1).map_while(|field| Pid::from_raw(field.parse().ok()?));
        let (group, found) = (numbers.next()?, numbers.next()?);
        (runs && found == session).then_some(group)
    };
    let processes = std::fs::read_dir("/proc").ok()?.filter_map(Result::ok);
    let processes = processes.filter(|entry| entry.file_name().as_encoded_bytes()[0].is_ascii_digit());
    Some(
        processes
            .filter_map(|entry| group(std::fs::read_to_string(entry.path().join("stat")).ok()?))
            .collect(),
    )
}
