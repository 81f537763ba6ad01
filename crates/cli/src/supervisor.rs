//! Processes that belong together: their output in one stream of events, and one end for all.

pub(crate) mod keeper;
pub(crate) mod servers;
mod watch;
pub(crate) mod workers;

use crate::group;
use crate::interrupt::ChildGuard;
use anyhow::{Context, Result};
use keeper::Keeper;
use paramill_node::exhaustion;
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, waitid};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a process may take to end in good order.
const GRACE: Duration = Duration::from_secs(3);
/// How long output of a process that has ended is waited for.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// Longest line of output that is kept whole; a process without line ends must not fill the memory.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// What a process did.
#[derive(Debug)]
pub(crate) enum Event {
    /// It wrote a line to stdout.
    Out { child: usize, line: String },
    /// It wrote a line to stderr.
    Error { child: usize, line: String },
    /// It ended.
    Exited { child: usize, status: ExitStatus },
}

/// A group of processes. Dropping it ends them all.
#[derive(Debug)]
pub(crate) struct Supervisor {
    members: Vec<Member>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    keeper: Option<Keeper>,
}

#[derive(Debug)]
struct Member {
    name: String,
    /// The first of its process group. It is waited for when the group has ended, so that the group's number stays its own.
    child: Child,
    running: bool,
    /// `None` once it was waited for.
    guard: Option<ChildGuard>,
    /// Open while the process is to hear more.
    stdin: Option<ChildStdin>,
}

impl Supervisor {
    pub(crate) fn new() -> Supervisor {
        let (sender, events) = mpsc::channel();
        Supervisor { members: Vec::new(), sender, events, keeper: None }
    }

    /// For programs that do not end by themselves with this process: they do even when this process is killed.
    pub(crate) fn with_keeper() -> Result<Supervisor> {
        let mut processes = Supervisor::new();
        processes.keeper = Some(Keeper::start()?);
        Ok(processes)
    }

    /// Starts a process under a name, with `input` on its stdin. Returns its number in events.
    pub(crate) fn spawn(&mut self, name: impl Into<String>, command: Command, input: &str) -> Result<usize> {
        let number = self.converse(name, command)?;
        self.tell(number, input);
        self.members[number].stdin = None;
        Ok(number)
    }

    /// Like [`Supervisor::spawn`], for a process that [`Supervisor::tell`] talks to while it runs.
    pub(crate) fn converse(&mut self, name: impl Into<String>, mut command: Command) -> Result<usize> {
        let name = name.into();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C at the terminal goes to this process alone, which ends its children with all they started.
            .process_group(0)
            .spawn()
            .map_err(exhaustion::explain)
            .with_context(|| format!("cannot start {name} ({})", command.get_program().display()))?;
        let guard = Some(ChildGuard::new(&child));
        let (number, pid) = (self.members.len(), Pid::from_child(&child));
        if let Some(keeper) = &mut self.keeper {
            keeper.add(pid);
        }
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        self.members.push(Member { name, child, running: true, guard, stdin });
        let out = self.forward(stdout, move |line| Event::Out { child: number, line })?;
        let error = self.forward(stderr, move |line| Event::Error { child: number, line })?;
        let sender = self.sender.clone();
        start_thread(move || {
            let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            let status = retry_on_intr(|| waitid(WaitId::Pid(pid), ended));
            // What it wrote is seen before its end is, but a descendant that holds its pipes is not waited for.
            let deadline = Instant::now() + LAST_WORDS;
            while !(out.is_finished() && error.is_finished()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            if let Ok(Some(status)) = status {
                drop(sender.send(Event::Exited { child: number, status: exit_status(&status) }));
            }
        })?;
        Ok(number)
    }

    /// Writes to the stdin of a process. One that ends without reading it is judged by its exit status.
    pub(crate) fn tell(&mut self, child: usize, text: &str) {
        if let Some(stdin) = &mut self.members[child].stdin {
            let _ = stdin.write_all(text.as_bytes());
        }
    }

    /// The process's number in the operating system.
    pub(crate) fn pid(&self, child: usize) -> u32 {
        self.members[child].child.id()
    }

    /// The next event; `None` when the time is over.
    pub(crate) fn next(&mut self, timeout: Duration) -> Option<Event> {
        match self.events.recv_timeout(timeout) {
            Ok(event) => {
                if let Event::Exited { child, .. } = event {
                    self.members[child].running = false;
                }
                Some(event)
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
        }
    }

    pub(crate) fn name(&self, child: usize) -> &str {
        &self.members[child].name
    }

    /// Whether any of these processes runs.
    pub(crate) fn any_running(&self, mut children: impl Iterator<Item = usize>) -> bool {
        children.any(|child| self.members[child].running)
    }

    /// How a process ended, if it has. Its last words may still be on their way.
    pub(crate) fn exit_status(&self, child: usize) -> Option<ExitStatus> {
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let pid = Pid::from_child(&self.members[child].child);
        let status = retry_on_intr(|| waitid(WaitId::Pid(pid), ended)).ok()??;
        Some(exit_status(&status))
    }

    /// Makes a process and what it started end at once. Its end is an event as any other.
    pub(crate) fn kill(&self, child: usize) {
        // An error means that it has just ended.
        let _ = kill_process_group(Pid::from_child(&self.members[child].child), Signal::KILL);
    }

    /// The names of those that run.
    pub(crate) fn running(&self) -> Vec<String> {
        self.members.iter().filter(|member| member.running).map(|member| member.name.clone()).collect()
    }

    /// Asks all processes and what they started to end, and makes them after a while. What a process left behind when it ended
    /// ends here too.
    pub(crate) fn end_all(&mut self) {
        let kept = self.members.iter().filter(|member| member.guard.is_some());
        let groups: Vec<Pid> = kept.map(|member| Pid::from_child(&member.child)).collect();
        group::end(|| groups.clone(), GRACE);
        for member in &mut self.members {
            member.running = false;
            // An error means that it was waited for already.
            if !matches!(member.child.try_wait(), Ok(None)) {
                member.guard = None;
            }
        }
    }

    fn forward(
        &self,
        stream: impl Read + Send + 'static,
        event: impl Fn(String) -> Event + Send + 'static,
    ) -> Result<JoinHandle<()>> {
        let sender = self.sender.clone();
        start_thread(move || {
            let mut reader = BufReader::new(stream);
            let mut line = Vec::new();
            while matches!((&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line), Ok(1..)) {
                let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
                if sender.send(event(text)).is_err() {
                    return;
                }
                line.clear();
            }
        })
    }
}

/// The same in the standard library's type.
fn exit_status(status: &WaitIdStatus) -> ExitStatus {
    ExitStatus::from_raw(match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code << 8,
        (None, signal) => signal.unwrap_or(0) | i32::from(status.dumped()) << 7,
    })
}

/// Unlike `std::thread::spawn`, which panics, this is an error where no more threads can be started.
fn start_thread(body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().spawn(body).map_err(exhaustion::explain);
    thread.context("cannot start a thread that watches a process")
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.end_all();
    }
}
