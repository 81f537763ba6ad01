//! One run of a job, with kills or without.

use super::members::{Members, News, Setup};
use super::schedule::{Kill, Kind};
use super::tags::{self, Applied, Pushes};
use super::workspace::Workspace;
use crate::failure::{Failure, INTERRUPTED};
use crate::interrupt;
use crate::output::Output;
use crate::training::{JobEnd, Message};
use anyhow::{Context, Result, anyhow};
use paramill_core::status::Status;
use paramill_core::types::WorkerId;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// How long events are waited for before the clock is looked at.
const TICK: Duration = Duration::from_millis(50);
/// How often the journals of `tags` are read, and the status is asked for.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A job that makes no step for so long hangs: the longest pause that is meant is that of a coordinator which waits for its members.
const HANG: Duration = Duration::from_secs(60);
/// A server that was killed is seen to be gone by the job after this long at the latest.
const SERVER_PAUSE: Duration = Duration::from_secs(2);
/// The exit code where the job did not go on.
const HUNG: u8 = 4;

/// What came of a run.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) seconds: f64,
    pub(super) kills: BTreeMap<Kind, u32>,
    /// Of `tags`: how often pushes are in the parameters, and what workers know of them.
    pub(super) applied: Option<Applied>,
    pub(super) pushes: Vec<Pushes>,
    /// Of a workload that trains: what worker 0 finds in the end, and the steps of a worker.
    pub(super) end: Option<JobEnd>,
    pub(super) steps: u64,
}

/// Runs a job to its end, and kills while `length` lasts.
pub(super) fn run(
    setup: Setup<'_>,
    workspace: &Workspace,
    kills: VecDeque<Kill>,
    length: Duration,
    output: &Output,
) -> Result<Ended, Failure> {
    let members = Members::start(setup, workspace, output)?;
    let mut run = Run {
        setup,
        workspace,
        members,
        kills,
        ended: Ended {
            seconds: 0.0,
            kills: BTreeMap::new(),
            applied: None,
            pushes: Vec::new(),
            end: None,
            steps: 0,
        },
        clocks: BTreeMap::new(),
        began: None,
        looked: Instant::now(),
        progress: Progress { at: Instant::now(), steps: 0 },
        last_server: None,
        is_stopped: false,
    };
    let outcome = run.follow(length, output);
    if outcome.is_err() && !interrupt::is_asked_to_end() {
        run.members.show_last_lines();
    }
    outcome.map(|()| run.ended)
}

struct Run<'a> {
    setup: Setup<'a>,
    workspace: &'a Workspace,
    members: Members<'a>,
    /// Kills to come.
    kills: VecDeque<Kill>,
    ended: Ended,
    /// Steps of each worker that trains.
    clocks: BTreeMap<u32, u64>,
    /// When the first step was seen.
    began: Option<Instant>,
    looked: Instant,
    progress: Progress,
    /// When a server was killed last, and the plan's epoch then.
    last_server: Option<(Instant, u32)>,
    /// Whether workers of `tags` were asked to end.
    is_stopped: bool,
}

struct Progress {
    at: Instant,
    steps: u64,
}

impl Run<'_> {
    fn follow(&mut self, length: Duration, output: &Output) -> Result<(), Failure> {
        let mut told = Instant::now();
        while !self.members.all_ended(None) {
            if interrupt::is_asked_to_end() {
                let what = "interrupted; all processes of the job are ended".into();
                return Err(Failure::Found { code: INTERRUPTED, what });
            }
            match self.members.tend(TICK)? {
                Some(News::Said { line }) => self.hear(&line),
                Some(News::Failed { who, status }) => {
                    return Err(anyhow!("{who} failed ({status}) although nobody had killed it").into());
                }
                None => {}
            }
            let looks = self.looked.elapsed() >= LOOK_EVERY;
            if looks {
                self.looked = Instant::now();
                self.look();
            }
            if self.progress.at.elapsed() > HANG {
                return Err(self.hung());
            }
            let Some(began) = self.began else { continue };
            let is_over = began.elapsed() >= length || self.is_last_step();
            match is_over {
                false => self.kill_next(began.elapsed(), looks),
                true => self.kills.clear(),
            }
            if is_over && self.setup.is_tags && !self.is_stopped && self.members.all_run(None) {
                std::fs::write(tags::stop(self.workspace.folder()), "")
                    .context("cannot tell workers to end")?;
                self.is_stopped = true;
            }
            if told.elapsed() > Duration::from_secs(10) {
                told = Instant::now();
                let kills: u32 = self.ended.kills.values().sum();
                output.note(format!(
                    "{:.0} s: {kills} kills, {} steps of all workers",
                    began.elapsed().as_secs_f64(),
                    self.progress.steps
                ));
            }
        }
        self.ended.seconds = self.began.map_or(0.0, |began| began.elapsed().as_secs_f64());
        self.ended.pushes = self.members.pushes();
        Ok(())
    }

    fn hear(&mut self, line: &str) {
        if self.setup.is_tags {
            self.ended.applied = serde_json::from_str(line).ok().or(self.ended.applied.take());
            return;
        }
        match serde_json::from_str(line) {
            Ok(Message::Step(step)) => {
                self.ended.steps = step.total;
                let clock = self.clocks.entry(step.rank).or_default();
                *clock = step.clock.max(*clock);
            }
            Ok(Message::Done(result)) => self.ended.end = result.end.or(self.ended.end.take()),
            Err(_) => {}
        }
    }

    /// Sees how far the workers are.
    fn look(&mut self) {
        let steps = match self.setup.is_tags {
            true => self.members.pushes().iter().map(|pushes| pushes.acknowledged).sum(),
            false => self.clocks.values().sum(),
        };
        if steps > self.progress.steps {
            self.progress = Progress { at: Instant::now(), steps };
            // All workers take part from now on: a kill before would only delay the start.
            let has_all = self.members.status().is_some_and(|status| status.phase.starts_with("running"));
            if self.began.is_none() && has_all {
                self.began = Some(Instant::now());
            }
        }
    }

    /// Whether a worker that trains has made its last step, so that nobody is to be killed any more.
    fn is_last_step(&self) -> bool {
        !self.setup.is_tags
            && self.ended.steps > 0
            && self.clocks.values().any(|clock| *clock >= self.ended.steps)
    }

    /// Carries out kills that are due. One that cannot be yet holds up those of its own kind only.
    fn kill_next(&mut self, elapsed: Duration, looks: bool) {
        let mut held = Vec::new();
        while self.kills.front().is_some_and(|kill| kill.at <= elapsed)
            && let Some(kill) = self.kills.pop_front()
        {
            let is_ahead = held.iter().any(|before: &Kill| before.kind == kill.kind);
            let is_killed = match kill.kind {
                _ if is_ahead => false,
                // Whether they may be killed is asked of the job.
                Kind::Servers | Kind::Relays if !looks => false,
                Kind::Servers => self.kill_server(&kill),
                Kind::Relays => self.kill_relay(&kill),
                kind => self.members.kill(kind, kill.number, kill.away),
            };
            match is_killed {
                true => *self.ended.kills.entry(kill.kind).or_default() += 1,
                false => held.push(kill),
            }
        }
        held.into_iter().rev().for_each(|kill| self.kills.push_front(kill));
    }

    fn kill_server(&mut self, kill: &Kill) -> bool {
        let Some(epoch) = self.replicated_epoch() else { return false };
        let is_killed = self.members.kill(Kind::Servers, kill.number, kill.away);
        if is_killed {
            self.last_server = Some((Instant::now(), epoch));
        }
        is_killed
    }

    /// Kills one of the workers that pass versions on to others now.
    fn kill_relay(&mut self, kill: &Kill) -> bool {
        let Some(status) = self.members.status() else { return false };
        let is_relay = |worker: &WorkerId| {
            let name = worker.to_string();
            status.receivers.iter().any(|receiver| receiver.receiver == name && receiver.followers > 0)
        };
        let runs = |worker: &WorkerId| self.members.runs(Kind::Workers, worker.0);
        let relays: Vec<WorkerId> = (0..self.setup.plan.cluster.workers)
            .map(WorkerId)
            .filter(|worker| is_relay(worker) && runs(worker))
            .collect();
        let Some(chosen) = (kill.number as usize).checked_rem(relays.len()) else { return false };
        self.members.kill(Kind::Workers, relays[chosen].0, kill.away)
    }

    /// The plan's epoch, where a server may be killed: all of them run, and every shard has its copy. The status may be one of before
    /// the last kill: another epoch tells that the job has seen that one.
    fn replicated_epoch(&self) -> Option<u32> {
        let is_soon = self.last_server.is_some_and(|(at, _)| at.elapsed() < SERVER_PAUSE);
        if is_soon || !self.members.all_run(Some(Kind::Servers)) {
            return None;
        }
        let status = self.members.status()?;
        let is_seen = self.last_server.is_none_or(|(_, epoch)| status.epoch > epoch);
        (is_seen && is_replicated(&status)).then_some(status.epoch)
    }

    fn hung(&self) -> Failure {
        let phase =
            self.members.status().map_or("its coordinator does not answer".into(), |status| status.phase);
        let what = format!(
            "error: no step for {} s: {phase}; these have not ended: {}",
            HANG.as_secs(),
            self.members.unfinished()
        );
        Failure::Found { code: HUNG, what }
    }
}

fn is_replicated(status: &Status) -> bool {
    !status.served.is_empty()
        && status.served.iter().all(|served| served.copy.is_some() && served.server.is_some())
}
