//! The server processes of a job that keeps copies: those that die are started anew, and take their share again.

use super::Supervisor;
use super::workers::COORDINATOR;
use anyhow::{Context, Result};
use paramill_node::stderr;
use std::collections::BTreeMap;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// A server that was started anew and dies sooner would only die again.
const LIFE: Duration = Duration::from_secs(1);

/// The servers that may die: all but the first, which coordinates the job.
#[derive(Debug, Default)]
pub(crate) struct Servers {
    /// By their numbers in events: when they were started in the place of another, if they were.
    children: BTreeMap<usize, Option<Instant>>,
    /// What they are started with.
    arguments: Vec<String>,
}

impl Servers {
    /// Of a job at `url` that began with so many servers, the first processes that were started. Without copies none may die.
    pub(crate) fn new(url: &str, servers: u32, replicas: u32, joining: &[String]) -> Servers {
        if replicas == 0 {
            return Servers::default();
        }
        let fixed = ["serve", "--json", "--end-with-parent", "--join", url].map(str::to_owned);
        Servers {
            children: (COORDINATOR + 1..servers as usize).map(|child| (child, None)).collect(),
            arguments: fixed.into_iter().chain(joining.iter().cloned()).collect(),
        }
    }

    /// A process that is no worker failed. Starts it anew if it is one of these; whether it is.
    pub(super) fn revive(
        &mut self,
        processes: &mut Supervisor,
        child: usize,
        status: ExitStatus,
    ) -> Result<bool> {
        let Some(started) = self.children.remove(&child) else { return Ok(false) };
        if started.is_some_and(|at| at.elapsed() < LIFE) {
            return Ok(false);
        }
        let name = processes.name(child).to_owned();
        let mut command =
            Command::new(std::env::current_exe().context("cannot find this program's own file")?);
        command.args(&self.arguments);
        // Without a number: the one before may not have been given up yet.
        self.children.insert(processes.spawn(name.clone(), command, "")?, Some(Instant::now()));
        stderr::line(format_args!(
            "{name} failed ({status}) and is started anew; copies take over its shards"
        ));
        Ok(true)
    }
}
