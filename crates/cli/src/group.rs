//! Process groups: a child of this process and all that it started, as long as that did not leave the group (`setsid`).
//!
//! A group's number is that of its first process. It is not given to anybody else as long as the group has members or its first
//! process was not waited for. Children are therefore waited for after their group was ended, not when they end.

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, waitpid};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How often it is looked whether a group has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Ends these groups: each is asked once, and what is left after `grace` is made to. Groups that come up meanwhile are ended too.
/// Where the kernel does not list processes, the first process of a group that has ended is waited for here.
pub(crate) fn end(groups: impl Fn() -> Vec<Pid>, grace: Duration) {
    end_listed(groups, grace, living);
}

/// The same with the groups that live as `living` lists them; `None` where nothing lists them.
fn end_listed(groups: impl Fn() -> Vec<Pid>, grace: Duration, living: impl Fn() -> Option<HashSet<Pid>>) {
    let began = Instant::now();
    let (mut asked, mut killed, mut ended) = (HashSet::new(), HashSet::new(), HashSet::new());
    loop {
        let living = living();
        let is_left = |group: &Pid| match &living {
            Some(living) => living.contains(group),
            None => !ended.contains(group) && has_members(*group, asked.contains(group)),
        };
        let (left, rest): (Vec<Pid>, Vec<Pid>) = groups().into_iter().partition(is_left);
        // Their numbers may be given to other groups from now on.
        ended.extend(rest);
        let waited = began.elapsed();
        // The kernel cannot end a process that waits for a broken disk; it is left.
        if left.is_empty() || waited > 2 * grace {
            return;
        }
        for group in left {
            // An error means that the group has just ended.
            if waited > grace && killed.insert(group) {
                let _ = kill_process_group(group, Signal::KILL);
            } else if asked.insert(group) {
                let _ = kill_process_group(group, Signal::TERM);
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Whether signals reach somebody in this group. They also reach a process that has ended and was not waited for, so that the
/// first process of the group has to be waited for; this process can where it is its parent, and init does otherwise. Until the
/// group was asked to end, the first process keeps the group's number.
fn has_members(group: Pid, was_asked: bool) -> bool {
    if was_asked {
        let _ = waitpid(Some(group), WaitOptions::NOHANG);
    }
    test_kill_process_group(group) != Err(Errno::SRCH)
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

/// Where the number of threads is in the kernel's line, counted from the state.
const THREADS: usize = 17;

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
        // The state is the first thread's alone: while other threads have not ended, the process has not.
        let runs = !matches!(*fields.first()?, "Z" | "X") || number(THREADS)? > 1;
        Some(Stat { runs, group: number(2)?, session: number(3)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::sync::mpsc;

    /// A shell in a group of its own, once it has run the script up to an `echo`, with the number that it said.
    #[allow(clippy::zombie_processes, reason = "what is tested waits for it")]
    fn start(script: &str) -> (Pid, String) {
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("there is a shell");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut line).expect("it says so");
        (Pid::from_child(&child), line.trim().to_owned())
    }

    /// Ends groups as where nothing lists them, within a minute.
    fn end_unlisted(groups: &[Pid], grace: Duration) {
        let (groups, (sender, done)) = (groups.to_vec(), mpsc::channel());
        std::thread::spawn(move || {
            end_listed(|| groups.clone(), grace, || None);
            sender.send(())
        });
        done.recv_timeout(Duration::from_secs(60)).expect("it ends when the groups have ended");
    }

    fn is_gone(group: Pid) -> bool {
        test_kill_process_group(group) == Err(Errno::SRCH)
    }

    /// Without `/proc` all groups were taken to live until the time was over, whatever became of them.
    #[test]
    fn groups_that_nothing_lists_end_with_their_processes() {
        let (ended, _) = start("echo");
        let (asked, _) = start("echo; exec sleep 987");
        end_unlisted(&[ended, asked], Duration::from_secs(3600));
        assert!(is_gone(ended) && is_gone(asked));
    }

    /// A process whose threads end one after the other looked ended with the first of them, and was left behind.
    #[test]
    fn a_process_whose_first_thread_has_ended_still_runs() {
        let program = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(987,)).start(); \
                       print(flush=True); ctypes.CDLL(None).pthread_exit(None)";
        let (group, _) = start(&format!("exec python3 -c '{program}'"));
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", group.as_raw_nonzero()));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !stat().expect("nobody waits for it").contains(") Z ") {
            assert!(Instant::now() < deadline, "its first thread has not ended");
            std::thread::sleep(LOOK_EVERY);
        }
        assert!(living().expect("there is `/proc`").contains(&group));
        end(|| vec![group], Duration::from_secs(30));
        waitpid(Some(group), WaitOptions::NOHANG).expect("it is a child").expect("it has ended");
    }

    #[test]
    fn a_group_that_nothing_lists_is_made_to_end() {
        let (stubborn, _) = start("trap '' TERM; echo; exec sleep 987");
        // The first process ends by itself, and leaves one that does not.
        let (_, left) = start("trap '' TERM; sleep 987 >&2 & echo $!");
        let group = Pid::from_raw(Stat::read(&left).expect("it runs").group).expect("a group's number");
        end_unlisted(&[stubborn, group], Duration::from_millis(100));
        assert!(is_gone(stubborn));
        assert!(Stat::read(&left).is_none_or(|stat| !stat.runs), "{left} runs");
    }
}
