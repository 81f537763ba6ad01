//! The processes of a job that are killed and started anew.

use super::schedule::Kind;
use super::tags;
use super::workspace::Workspace;
use crate::output::Output;
use crate::plan::JobPlan;
use crate::supervisor::{Event, Supervisor};
use anyhow::{Context, Result, bail};
use paramill_core::status::Status;
use paramill_node::admin::Admin;
use paramill_node::{env_vars, stderr};
use std::collections::VecDeque;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// The job's name.
const JOB: &str = "chaos";
/// How long workers that die may be away where the job cannot go on without them.
const RESTART_GRACE: &str = "--restart-grace=60s";
/// How long a process may take until it listens.
const START_DEADLINE: Duration = Duration::from_secs(20);
/// How long the coordinator may take for an answer.
const STATUS_DEADLINE: Duration = Duration::from_secs(2);
/// Lines of the processes' stderr that are shown when something failed.
const LAST_LINES: usize = 60;

/// What is run, as processes of this machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setup<'a> {
    pub(super) plan: &'a JobPlan,
    pub(super) replicas: u32,
    /// Whether workers count pushes in place of training.
    pub(super) is_tags: bool,
}

/// All processes of a job.
pub(super) struct Members<'a> {
    setup: Setup<'a>,
    input: String,
    workspace: &'a Workspace,
    processes: Supervisor,
    members: Vec<Member>,
    coordinator: String,
    aggregators: Vec<String>,
    last_lines: VecDeque<String>,
    output: &'a Output,
}

struct Member {
    kind: Kind,
    number: u32,
    /// The process that has this place now.
    child: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Runs,
    /// It was killed, and its end was not seen yet.
    Killed {
        until: Instant,
    },
    Away {
        until: Instant,
    },
    /// It ended in good order.
    Ended,
}

/// What a member did that matters to the run.
pub(super) enum News {
    /// A worker wrote a line to stdout.
    Said { line: String },
    /// It ended although nobody had killed it, and not in good order.
    Failed { who: String, status: ExitStatus },
}

impl<'a> Members<'a> {
    /// Starts everything, servers before those who need them.
    pub(super) fn start(
        setup: Setup<'a>,
        workspace: &'a Workspace,
        output: &'a Output,
    ) -> Result<Members<'a>> {
        let cluster = &setup.plan.cluster;
        let mut ports = workspace.ports();
        let coordinator = ports.next()?;
        let aggregators = (0..cluster.aggregators).map(|_| ports.next()).collect::<Result<_>>()?;
        let mut members = Members {
            setup,
            input: setup.plan.to_toml(),
            workspace,
            processes: Supervisor::with_keeper()?,
            members: Vec::new(),
            coordinator,
            aggregators,
            last_lines: VecDeque::new(),
            output,
        };
        // Relays are workers.
        let counts = [
            (Kind::Coordinator, 1),
            (Kind::Servers, cluster.servers),
            (Kind::Aggregators, cluster.aggregators),
            (Kind::Workers, cluster.workers),
        ];
        for (kind, count) in counts {
            for number in 0..count {
                let child = members.spawn(kind, number)?;
                members.members.push(Member { kind, number, child, state: State::Runs });
                if kind != Kind::Workers {
                    members.await_announcement(child)?;
                }
            }
        }
        Ok(members)
    }

    fn url(&self) -> String {
        format!("paramill://{}/{JOB}", self.coordinator)
    }

    fn spawn(&mut self, kind: Kind, number: u32) -> Result<usize> {
        let (command, input) = self.command(kind, number)?;
        self.processes.spawn(name(kind, number), command, &input)
    }

    fn command(&self, kind: Kind, number: u32) -> Result<(Command, String)> {
        let JobPlan { cluster, seed, .. } = self.setup.plan;
        let mut command =
            Command::new(std::env::current_exe().context("cannot find this program's own file")?);
        let (url, index, seed) = (self.url(), number.to_string(), seed.to_string());
        let transport = cluster.transport.to_string();
        let mut input = String::new();
        match kind {
            Kind::Coordinator => {
                let state = self.workspace.folder().join("coordinator");
                command.args(["coordinate", "--json", "--config", "-", RESTART_GRACE, "--job", JOB]);
                command.args(["--listen", &self.coordinator]).arg("--state").arg(state);
                if self.setup.replicas > 0 {
                    command.args(["--replicas", &self.setup.replicas.to_string()]);
                }
                input.clone_from(&self.input);
            }
            Kind::Servers => {
                command.args(["serve", "--json", "--end-with-parent", "--join", &url]);
                command.args(["--cores", &cluster.cores.to_string(), "--seed", &seed]);
                command.args(["--transport", &transport, "--index", &index]);
            }
            Kind::Aggregators => {
                command.args(["aggregate", "--json", "--end-with-parent", "--job", &url, "--index", &index]);
                command.args(["--listen", &self.aggregators[number as usize], "--seed", &seed]);
                command.args(["--transport", &transport]);
            }
            Kind::Workers | Kind::Relays => {
                if self.setup.is_tags {
                    command.arg("chaos-process").arg(self.workspace.folder());
                } else {
                    command.arg("worker-process");
                    input.clone_from(&self.input);
                }
                command.env(env_vars::URL, &url).env(env_vars::RANK, &index).env_remove(env_vars::AGGREGATOR);
                command.env(env_vars::TRANSPORT, &transport);
                if let Some(aggregator) = cluster.aggregator_of(number) {
                    command.env(env_vars::AGGREGATOR, &self.aggregators[aggregator]);
                }
            }
        }
        Ok((command, input))
    }

    /// Waits until a process says where it listens.
    fn await_announcement(&mut self, awaited: usize) -> Result<()> {
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            match self.processes.next(deadline.saturating_duration_since(Instant::now())) {
                Some(Event::Out { child, .. }) if child == awaited => return Ok(()),
                Some(Event::Exited { child, status }) => {
                    self.show_last_lines();
                    bail!("{} failed ({status}) at the start", self.processes.name(child));
                }
                Some(Event::Error { child, line }) => self.keep(child, &line),
                Some(Event::Out { .. }) => {}
                None => bail!("{} did not listen within {START_DEADLINE:?}", self.processes.name(awaited)),
            }
        }
    }

    /// Takes what happened within this time, and starts those anew whose time it is.
    pub(super) fn tend(&mut self, timeout: Duration) -> Result<Option<News>> {
        for index in 0..self.members.len() {
            let Member { kind, number, state, .. } = self.members[index];
            if let State::Away { until } = state
                && Instant::now() >= until
            {
                self.members[index].child = self.spawn(kind, number)?;
                self.members[index].state = State::Runs;
            }
        }
        let (child, status) = match self.processes.next(timeout) {
            None => return Ok(None),
            Some(Event::Error { child, line }) => {
                self.keep(child, &line);
                return Ok(None);
            }
            Some(Event::Out { child, line }) => {
                let is_worker = |member: &Member| member.child == child && member.kind == Kind::Workers;
                return Ok(self.members.iter().any(is_worker).then_some(News::Said { line }));
            }
            Some(Event::Exited { child, status }) => (child, status),
        };
        let Some(member) = self.members.iter_mut().find(|member| member.child == child) else {
            return Ok(None);
        };
        match member.state {
            State::Killed { until } => member.state = State::Away { until },
            _ if status.success() => member.state = State::Ended,
            _ => {
                let who = name(member.kind, member.number);
                return Ok(Some(News::Failed { who, status }));
            }
        }
        Ok(None)
    }

    /// Kills a process of this kind: this one, or another where it does not run. Whether there was one that runs.
    pub(super) fn kill(&mut self, kind: Kind, number: u32, away: Duration) -> bool {
        let runs = |member: &&mut Member| member.kind == kind && member.state == State::Runs;
        let mut running: Vec<&mut Member> = self.members.iter_mut().filter(runs).collect();
        let chosen = running.iter().position(|member| member.number == number).unwrap_or(0);
        if running.is_empty() {
            return false;
        }
        let member = running.swap_remove(chosen);
        member.state = State::Killed { until: Instant::now() + away };
        let (child, who) = (member.child, name(kind, member.number));
        self.processes.kill(child);
        self.keep(child, "is killed by this command");
        self.output.note(format!("killed {who} (process {})", self.processes.pid(child)));
        true
    }

    /// Whether this process runs.
    pub(super) fn runs(&self, kind: Kind, number: u32) -> bool {
        let is_it = |member: &&Member| (member.kind, member.number) == (kind, number);
        self.members.iter().find(is_it).is_some_and(|member| member.state == State::Runs)
    }

    /// Whether all processes of a kind run.
    pub(super) fn all_run(&self, kind: Option<Kind>) -> bool {
        let mut members = self.members.iter().filter(|member| kind.is_none_or(|kind| kind == member.kind));
        members.all(|member| member.state == State::Runs)
    }

    /// Whether all processes of a kind have ended in good order.
    pub(super) fn all_ended(&self, kind: Option<Kind>) -> bool {
        let mut members = self.members.iter().filter(|member| kind.is_none_or(|kind| kind == member.kind));
        members.all(|member| member.state == State::Ended)
    }

    /// How the job stands, where its coordinator says so.
    pub(super) fn status(&self) -> Option<Status> {
        let url = self.url().parse().ok()?;
        Admin::connect(&url, STATUS_DEADLINE).ok()?.status().ok()
    }

    /// Names of the processes that have not ended.
    pub(super) fn unfinished(&self) -> String {
        let left = self.members.iter().filter(|member| member.state != State::Ended);
        left.map(|member| name(member.kind, member.number)).collect::<Vec<_>>().join(", ")
    }

    /// Pushes that workers have made by their journals.
    pub(super) fn pushes(&self) -> Vec<tags::Pushes> {
        let ranks = 0..self.setup.plan.cluster.workers;
        ranks.map(|rank| tags::Pushes::read(self.workspace.folder(), rank)).collect()
    }

    /// Shows what the processes said last, for somebody who looks for the cause of a failure.
    pub(super) fn show_last_lines(&self) {
        self.last_lines.iter().for_each(stderr::line);
    }

    fn keep(&mut self, child: usize, line: &str) {
        let line =
            format!("  {} (process {}): {line}", self.processes.name(child), self.processes.pid(child));
        // A node that tries again and again says the same.
        if self.last_lines.back() == Some(&line) {
            return;
        }
        if self.last_lines.len() == LAST_LINES {
            self.last_lines.pop_front();
        }
        self.last_lines.push_back(line);
    }
}

fn name(kind: Kind, number: u32) -> String {
    match kind {
        Kind::Servers => format!("server {number}"),
        Kind::Workers | Kind::Relays => format!("worker {number}"),
        Kind::Aggregators => format!("aggregator {number}"),
        Kind::Coordinator => "the coordinator".to_owned(),
    }
}
