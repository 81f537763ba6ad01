//! The worker processes of a job, which are started anew when they die, as often as that is allowed.

use super::Supervisor;
use anyhow::{Result, anyhow};
use paramill_node::stderr;
use std::collections::BTreeMap;
use std::process::{Command, ExitStatus};

/// The worker processes, by rank.
pub(crate) struct Workers<'a> {
    /// The command of a rank.
    command: Box<dyn Fn(u32) -> Result<Command> + 'a>,
    /// What each of them reads from stdin.
    input: &'a str,
    /// The rank of each process that was ever started, by its number in events.
    ranks: BTreeMap<usize, u32>,
    /// How many processes each rank has had.
    lives: BTreeMap<u32, u32>,
    restarts_left: u32,
}

impl<'a> Workers<'a> {
    /// Starts one process for each of so many ranks. They may be started anew `restarts` times in all.
    pub(crate) fn start(
        processes: &mut Supervisor,
        count: u32,
        restarts: u32,
        input: &'a str,
        command: impl Fn(u32) -> Result<Command> + 'a,
    ) -> Result<Workers<'a>> {
        let mut workers = Workers {
            command: Box::new(command),
            input,
            ranks: BTreeMap::new(),
            lives: BTreeMap::new(),
            restarts_left: restarts,
        };
        (0..count).try_for_each(|rank| workers.spawn(processes, rank))?;
        Ok(workers)
    }

    fn spawn(&mut self, processes: &mut Supervisor, rank: u32) -> Result<()> {
        let child = processes.spawn(format!("worker {rank}"), (self.command)(rank)?, self.input)?;
        self.ranks.insert(child, rank);
        *self.lives.entry(rank).or_default() += 1;
        Ok(())
    }

    /// Whether a process is one of them.
    pub(crate) fn has(&self, child: usize) -> bool {
        self.ranks.contains_key(&child)
    }

    pub(crate) fn any_running(&self, processes: &Supervisor) -> bool {
        processes.any_running(self.ranks.keys().copied())
    }

    /// A process failed. One of a worker is started anew if that is still allowed; the error says which one failed for good.
    pub(crate) fn failed(
        &mut self,
        processes: &mut Supervisor,
        child: usize,
        status: ExitStatus,
    ) -> Result<()> {
        let name = processes.name(child).to_owned();
        let rank = self.ranks.get(&child).copied();
        let Some(rank) = rank.filter(|_| self.restarts_left > 0) else {
            processes.end_all();
            return Err(anyhow!("{name} failed ({status}); all others were ended"));
        };
        self.restarts_left -= 1;
        self.spawn(processes, rank)?;
        stderr::line(format_args!(
            "{name} failed ({status}) and is started anew: process {} of this rank; {} more restarts are allowed",
            self.lives[&rank], self.restarts_left
        ));
        Ok(())
    }
}
