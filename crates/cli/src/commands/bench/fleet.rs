//! The processes of a measurement, as the one that started them sees them.

use super::task::{Answer, Instruction, Task};
use crate::supervisor::{Event, Supervisor};
use anyhow::{Context, Result, bail};
use paramill_node::stderr;
use serde::Serialize;
use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long processes may take to end once they have nothing to do.
const END_DEADLINE: Duration = Duration::from_secs(20);

/// Processes that measure something together. Dropping it ends them.
pub(super) struct Fleet {
    processes: Supervisor,
}

impl Fleet {
    pub(super) fn new() -> Fleet {
        Fleet { processes: Supervisor::new() }
    }

    /// Starts this program again with a task.
    pub(super) fn start(&mut self, name: impl Into<String>, task: &Task) -> Result<usize> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut command = Command::new(program);
        command.arg("bench-process");
        self.start_program(name, command, task)
    }

    /// Starts another program that is given its task in the same way.
    pub(super) fn start_program(
        &mut self,
        name: impl Into<String>,
        command: Command,
        task: &impl Serialize,
    ) -> Result<usize> {
        let member = self.processes.converse(name, command)?;
        self.processes.tell(member, &format!("{}\n", serde_json::to_string(task)?));
        Ok(member)
    }

    /// Gives the same order to several.
    pub(super) fn order(&mut self, members: impl Iterator<Item = usize>, order: Instruction) -> Result<()> {
        let line = format!("{}\n", serde_json::to_string(&order)?);
        members.for_each(|member| self.processes.tell(member, &line));
        Ok(())
    }

    /// Waits for so many answers of each member, of the kind that `pick` takes; the error names who has not given
    /// `what`.
    pub(super) fn answers<T>(
        &mut self,
        expected: &[(usize, usize)],
        what: &str,
        patience: Duration,
        mut pick: impl FnMut(Answer) -> Option<T>,
    ) -> Result<Vec<T>> {
        let deadline = Instant::now() + patience;
        let mut missing: BTreeMap<usize, usize> = expected.iter().copied().collect();
        let mut picked = Vec::new();
        while missing.values().any(|count| *count > 0) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.processes.next(left) {
                Some(Event::Out { child, line }) => match serde_json::from_str(&line).map(&mut pick) {
                    Ok(Some(answer)) => {
                        picked.push(answer);
                        missing.entry(child).and_modify(|count| *count = count.saturating_sub(1));
                    }
                    Ok(None) => bail!("{} said `{line}` instead of {what}", self.processes.name(child)),
                    Err(_) => stderr::line(format_args!("{}: {line}", self.processes.name(child))),
                },
                Some(Event::Error { child, line }) => {
                    stderr::line(format_args!("{}: {line}", self.processes.name(child)))
                }
                Some(Event::Exited { child, status })
                    if status.success() && missing.get(&child).is_none_or(|count| *count == 0) => {}
                Some(Event::Exited { child, status }) => {
                    bail!("{} ended ({status}); {what} was waited for", self.processes.name(child))
                }
                None => {
                    let missing = missing.iter().filter(|(_, count)| **count > 0);
                    let names: Vec<&str> = missing.map(|(child, _)| self.processes.name(*child)).collect();
                    bail!("no {what} from {} within {:.0} s", names.join(", "), patience.as_secs_f64());
                }
            }
        }
        Ok(picked)
    }

    /// The process's number in the operating system.
    pub(super) fn pid(&self, member: usize) -> u32 {
        self.processes.pid(member)
    }

    /// Waits until all have ended in good order.
    pub(super) fn await_end(&mut self) -> Result<()> {
        let deadline = Instant::now() + END_DEADLINE;
        loop {
            let running = self.processes.running();
            if running.is_empty() {
                return Ok(());
            }
            match self.processes.next(deadline.saturating_duration_since(Instant::now())) {
                Some(Event::Exited { child, status }) if !status.success() => {
                    bail!("{} failed ({status})", self.processes.name(child))
                }
                Some(Event::Error { child, line }) => {
                    stderr::line(format_args!("{}: {line}", self.processes.name(child)))
                }
                Some(_) => {}
                None => bail!("{} did not end within {} s", running.join(", "), END_DEADLINE.as_secs()),
            }
        }
    }
}
