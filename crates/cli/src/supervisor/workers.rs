//! The worker processes of a job, which are started anew when they die, as often as that is allowed.
//!
//! A process may also stand still (a frozen container, a stopped process): the job declares its worker dead and goes on, and this
//! process, which only hears of processes that end, learns it from the job.

use super::Supervisor;
use super::servers::Servers;
use super::watch::Watch;
use anyhow::{Result, anyhow, bail};
use paramill_core::status::{MemberState, WorkerStatus};
use paramill_node::stderr;
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// The process that has the job's coordinator: the first that is started.
pub(crate) const COORDINATOR: usize = 0;
/// How long a process may take to end, or to come back, once the job has declared its worker dead: it may be about to say why.
const DEAD_GRACE: Duration = Duration::from_secs(5);
/// How long a process may take to end when the job is over.
const END_DEADLINE: Duration = Duration::from_secs(10);
/// How long the job may take to say how a worker stands whose process has failed.
const STANDING_DEADLINE: Duration = Duration::from_secs(5);
/// A worker that said nothing for so many seconds stands still: had its connection broken, the job would have given it up before.
const SILENCE: f64 = 5.0;

/// What is started for every rank of a job.
pub(crate) struct Program<'a> {
    /// The command of a rank.
    pub(crate) command: Box<dyn Fn(u32) -> Result<Command> + 'a>,
    /// What each process reads from stdin.
    pub(crate) input: &'a str,
    /// Whether it may do more once it is no member of the job any more, for as long as it likes.
    pub(crate) lingers: bool,
}

/// The worker processes, by rank.
pub(crate) struct Workers<'a> {
    program: Program<'a>,
    watch: Watch,
    servers: Servers,
    /// Every process that was ever started, by its number in events.
    lives: BTreeMap<usize, Life>,
    restarts_left: u32,
    /// How the job saw its workers when it last answered.
    seen: BTreeMap<u32, WorkerStatus>,
    /// Ranks that said themselves that their work is done.
    done: BTreeSet<u32>,
    over_since: Option<Instant>,
    /// Failures of processes that were not needed any more.
    late: Vec<String>,
    /// Whether a worker that was done died before it had left, so that the job may wait for it.
    is_missed: bool,
}

/// One process of a rank.
struct Life {
    rank: u32,
    /// Which process of its rank it is, from 1.
    number: u32,
    /// The number that the job gave to the process of this rank before it; what is said of that one is not about this one.
    before: u32,
    /// Whether its worker was silent when it was last seen alive. A program whose connection broke may be about to save its work, or to
    /// start its worker itself; one that stands still does nothing.
    stands_still: bool,
    /// Since when its worker has been seen to be dead.
    dead_since: Option<Instant>,
    /// When and why it was made to end.
    killed: Option<(Instant, &'static str)>,
    /// Whether it was told that it is waited for.
    is_named: bool,
}

/// What a failed process leaves to be done.
enum Standing {
    /// Its part of the job. The job gave this number to the process.
    Open { incarnation: u32 },
    /// Nothing: it had left.
    Left,
    /// Nothing: the job has ended well.
    Over,
}

impl<'a> Workers<'a> {
    /// Starts one process for each of so many ranks of the job at `url`. They may be started anew `restarts` times in all.
    pub(crate) fn start(
        processes: &mut Supervisor,
        url: &str,
        ranks: u32,
        restarts: u32,
        servers: Servers,
        program: Program<'a>,
    ) -> Result<Workers<'a>> {
        let mut workers = Workers {
            program,
            servers,
            watch: Watch::start(url)?,
            lives: BTreeMap::new(),
            restarts_left: restarts,
            seen: BTreeMap::new(),
            done: BTreeSet::new(),
            over_since: None,
            late: Vec::new(),
            is_missed: false,
        };
        (0..ranks).try_for_each(|rank| workers.spawn(processes, rank, 1, 0))?;
        Ok(workers)
    }

    fn spawn(&mut self, processes: &mut Supervisor, rank: u32, number: u32, before: u32) -> Result<()> {
        let command = (self.program.command)(rank)?;
        let child = processes.spawn(format!("worker {rank}"), command, self.program.input)?;
        let life = Life {
            rank,
            number,
            before,
            stands_still: false,
            dead_since: None,
            killed: None,
            is_named: false,
        };
        self.lives.insert(child, life);
        Ok(())
    }

    /// Whether a process is one of them.
    pub(crate) fn has(&self, child: usize) -> bool {
        self.lives.contains_key(&child)
    }

    pub(crate) fn any_running(&self, processes: &Supervisor) -> bool {
        processes.any_running(self.lives.keys().copied())
    }

    /// A rank says that its work is done: whatever becomes of its process, it is not started anew.
    pub(crate) fn finish(&mut self, rank: u32) {
        self.done.insert(rank);
    }

    /// Failures of processes that were not needed any more.
    pub(crate) fn late_failures(&self) -> &[String] {
        &self.late
    }

    /// How many processes were started anew.
    pub(crate) fn restarts(&self) -> u32 {
        self.lives.values().map(|life| u32::from(life.number > 1)).sum()
    }

    /// Whether the job may wait for a worker that nobody starts anew.
    pub(crate) fn is_missed(&self) -> bool {
        self.is_missed
    }

    /// A process failed. One of a worker whose part of the job is not done is started anew if that is still allowed; the error says
    /// which one failed for good.
    pub(crate) fn failed(
        &mut self,
        processes: &mut Supervisor,
        child: usize,
        status: ExitStatus,
    ) -> Result<()> {
        let name = processes.name(child).to_owned();
        let Some(life) = self.lives.get(&child) else {
            if self.servers.revive(processes, child, status)? {
                return Ok(());
            }
            processes.end_all();
            return Err(anyhow!("{name} failed ({status}); all others were ended"));
        };
        let (rank, number) = (life.rank, life.number);
        let why = life.killed.map_or(String::new(), |(_, why)| format!(", ended because {why}"));
        let what = format!("{name} failed ({status}{why})");
        let incarnation = match self.standing(processes, rank) {
            Standing::Open { incarnation } if !self.done.contains(&rank) => incarnation,
            standing => {
                let when = match standing {
                    Standing::Left => "after it had left the job",
                    Standing::Over => "when the job was over",
                    Standing::Open { .. } => "after its work was done",
                };
                self.is_missed |= matches!(standing, Standing::Open { .. });
                stderr::line(format_args!("{what} {when}; it is not started anew"));
                self.late.push(format!("{what} {when}"));
                return Ok(());
            }
        };
        if self.restarts_left == 0 {
            processes.end_all();
            return Err(anyhow!("{what}; all others were ended"));
        }
        self.restarts_left -= 1;
        self.spawn(processes, rank, number + 1, incarnation)?;
        stderr::line(format_args!(
            "{what} and is started anew: process {} of this rank; {} more restarts are allowed",
            number + 1,
            self.restarts_left
        ));
        Ok(())
    }

    /// Asks the job, which may be about to end.
    fn standing(&mut self, processes: &Supervisor, rank: u32) -> Standing {
        let deadline = Instant::now() + STANDING_DEADLINE;
        loop {
            match processes.exit_status(COORDINATOR) {
                Some(status) if status.success() => return Standing::Over,
                Some(_) => break,
                None => {}
            }
            if let Some(workers) = self.watch.ask() {
                self.see(workers);
                break;
            }
            if Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        match self.seen.get(&rank) {
            Some(worker) if worker.state == MemberState::Left => Standing::Left,
            // The rank of a process that never took part is given to the next one with the same number.
            Some(worker) if worker.state == MemberState::Joining && worker.incarnation == 1 => {
                Standing::Open { incarnation: 0 }
            }
            Some(worker) => Standing::Open { incarnation: worker.incarnation },
            None => Standing::Open { incarnation: 0 },
        }
    }

    fn see(&mut self, workers: Vec<WorkerStatus>) {
        self.seen = workers.into_iter().map(|worker| (worker.worker.0, worker)).collect();
    }

    /// Ends processes that stand still: those whose workers the job has declared dead, and those that are left when it is over. To be
    /// called again and again; [`Workers::failed`] decides what becomes of their ranks.
    pub(crate) fn tend(&mut self, processes: &Supervisor) -> Result<()> {
        if let Some(workers) = self.watch.news() {
            self.see(workers);
        }
        if self.over_since.is_none() && !processes.any_running(std::iter::once(COORDINATOR)) {
            self.over_since = Some(Instant::now());
        }
        let is_late = self.over_since.is_some_and(|since| since.elapsed() > END_DEADLINE);
        for (&child, life) in &mut self.lives {
            if !processes.any_running(std::iter::once(child)) {
                continue;
            }
            let (name, pid) = (processes.name(child), processes.pid(child));
            if let Some((at, why)) = life.killed {
                if at.elapsed() > END_DEADLINE {
                    bail!("{name} (process {pid}) does not end although it was killed because {why}");
                }
                continue;
            }
            let worker = self.seen.get(&life.rank).filter(|worker| worker.incarnation > life.before);
            if let Some(worker) = worker.filter(|worker| worker.state != MemberState::Dead) {
                life.stands_still = worker.state != MemberState::Left && worker.silent_seconds > SILENCE;
            }
            let is_useless = !self.program.lingers || life.stands_still;
            let is_dead = worker.is_some_and(|worker| worker.state == MemberState::Dead) && is_useless;
            if is_dead != life.dead_since.is_some() {
                life.dead_since = is_dead.then(Instant::now);
            }
            let why = if life.dead_since.is_some_and(|since| since.elapsed() > DEAD_GRACE) {
                "the job had declared its worker dead"
            } else if is_late && is_useless {
                "the job was over"
            } else {
                if is_late && !std::mem::replace(&mut life.is_named, true) {
                    stderr::line(format_args!(
                        "the job is over; {name} (process {pid}) still runs and is waited for"
                    ));
                }
                continue;
            };
            stderr::line(format_args!("{name} (process {pid}) is killed: {why}, and it did not end"));
            processes.kill(child);
            life.killed = Some((Instant::now(), why));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Event;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// One worker that fails, beside a process that stands for the coordinator.
    fn fail(coordinator: &str, is_done: bool) -> (Result<()>, Vec<String>, usize) {
        let mut processes = Supervisor::new();
        processes.spawn("server 0", shell(coordinator), "").expect("there is a shell");
        // Nobody listens there.
        let (url, command) = ("paramill://127.0.0.1:1/train", |_| Ok(shell("exit 3")));
        let program = Program { command: Box::new(command), input: "", lingers: false };
        let mut workers =
            Workers::start(&mut processes, url, 1, 1, Servers::default(), program).expect("there is a shell");
        if is_done {
            workers.finish(0);
        }
        let status = loop {
            match processes.next(PATIENCE).expect("it ends") {
                Event::Exited { child, status } if workers.has(child) => break status,
                _ => {}
            }
        };
        let outcome = workers.failed(&mut processes, 1, status);
        (outcome, workers.late_failures().to_vec(), workers.lives.len())
    }

    #[test]
    fn a_worker_that_dies_when_the_job_is_over_is_not_started_anew() {
        let (outcome, late, lives) = fail("exit 0", false);
        assert!(outcome.is_ok(), "{outcome:?}");
        assert_eq!(late, ["worker 0 failed (exit status: 3) when the job was over"]);
        assert_eq!(lives, 1);
    }

    #[test]
    fn a_worker_that_dies_after_its_work_is_not_started_anew() {
        let (outcome, late, lives) = fail("exec sleep 987", true);
        assert!(outcome.is_ok(), "{outcome:?}");
        assert_eq!(late, ["worker 0 failed (exit status: 3) after its work was done"]);
        assert_eq!(lives, 1);
    }

    #[test]
    fn a_worker_that_dies_before_is_started_anew() {
        let (outcome, late, lives) = fail("exec sleep 987", false);
        assert!(outcome.is_ok() && late.is_empty(), "{outcome:?} {late:?}");
        assert_eq!(lives, 2);
    }
}
