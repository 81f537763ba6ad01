//! The job's workers: how they come, go, come back and are given up.

use super::progress::Waiter;
use crate::limits;
use crate::prng::Prng;
use crate::standstill::Standstill;
use crate::status::{MemberState, WorkerReport, WorkerStatus};
use crate::types::{Clock, NodeId, Time, WorkerId};
use crate::waits::{self, Waited};
use crate::wire::{Member, Refusal, Welcome};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Incarnations of one job at most: all of them are looked over for one that is not known.
const MOST_DRAWN: u64 = 1 << 24;

/// Every rank that was taken, with the process that has it or had it last.
#[derive(Debug)]
pub(super) struct Workers {
    /// How many the job waits for before it starts.
    expected: u32,
    /// A worker that is silent for this long is declared dead.
    timeout: Duration,
    ranks: BTreeMap<WorkerId, Rank>,
    /// How long processes waited whose ranks were taken by others.
    waited_before: Waited,
    /// The worker that declared its tables last; `None` if a server came after it.
    last_ready: Option<WorkerId>,
    /// A lower bound of all workers' deadlines. A worker that is heard from moves its own deadline, not this one: with thousands
    /// of workers the earliest is looked for when this time has come.
    earliest: Option<Time>,
    /// Incarnations are drawn, so that none is met by counting or by a stale number. The generator is not a cryptographic
    /// one: this is no authentication.
    incarnations: Incarnations,
    next_incarnation: u64,
}

/// The numbers of processes, drawn one after the other. A process that knows one of them was let in by this job, also if its coordinator has
/// forgotten that: it was started anew before it had remembered it.
#[derive(Debug)]
struct Incarnations {
    secret: u64,
    prng: Prng,
    drawn: u64,
}

impl Incarnations {
    fn new(secret: u64) -> Incarnations {
        Incarnations { secret, prng: Prng::new(secret), drawn: 0 }
    }

    /// A number that is not 0, which stands for a worker that has none yet.
    fn draw(&mut self) -> u64 {
        self.drawn += 1;
        draw_incarnation(&mut self.prng)
    }

    /// Which of the numbers this is, if it is one.
    fn position(&self, incarnation: u64) -> Option<u64> {
        let mut prng = Prng::new(self.secret);
        (0..self.drawn).find(|_| draw_incarnation(&mut prng) == incarnation)
    }
}

/// The process that has a rank, as it is remembered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RankState {
    worker: WorkerId,
    incarnation: u64,
    life: u32,
    state: MemberState,
    declared: bool,
}

/// The process that has a rank.
#[derive(Debug)]
struct Rank {
    incarnation: u64,
    /// Which process with this rank it is, from 1.
    life: u32,
    state: MemberState,
    connected: bool,
    /// When it was heard last; later by the time that the coordinator has stood still since.
    last_heard: Time,
    last_progress: Time,
    /// When it last moved bytes or its clock, or waited for others; later by the time that the coordinator has stood still since.
    idle_since: Time,
    /// Since when it waits, and has moved nothing; likewise.
    waits_since: Option<Time>,
    /// Its tables are known; they are those of the job.
    declared: bool,
    /// The plan was sent on this connection.
    informed: bool,
    /// When another process first asked for the rank of this one, which is connected.
    contested_since: Option<Time>,
    report: WorkerReport,
}

impl Rank {
    fn new(now: Time, incarnation: u64, life: u32) -> Rank {
        Rank {
            incarnation,
            life,
            state: MemberState::Joining,
            connected: true,
            last_heard: now,
            last_progress: now,
            idle_since: now,
            waits_since: None,
            declared: false,
            informed: false,
            contested_since: None,
            report: WorkerReport::default(),
        }
    }

    fn is_live(&self) -> bool {
        matches!(self.state, MemberState::Joining | MemberState::Running)
    }

    /// Whether it takes part and is connected.
    fn is_here(&self) -> bool {
        self.state == MemberState::Running && self.connected
    }
}

/// A worker that was let in.
#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) welcome: Welcome,
    /// An earlier process with its rank was a member until now.
    pub(super) replaced: Option<WorkerId>,
}

/// Standing of a worker from which a message came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    /// No such worker.
    Unknown,
    /// It was declared dead.
    Dead,
    /// It is, or was, a member; `false` when it has not been told the plan on this connection.
    Member { informed: bool },
}

impl Workers {
    /// Incarnations follow from `secret`.
    pub(super) fn new(expected: u32, timeout: Duration, secret: u64) -> Workers {
        let mut incarnations = Incarnations::new(secret);
        Workers {
            expected,
            timeout,
            ranks: BTreeMap::new(),
            waited_before: Waited::default(),
            last_ready: None,
            earliest: None,
            next_incarnation: incarnations.draw(),
            incarnations,
        }
    }

    /// What has to be remembered of every rank.
    pub(super) fn remembered(&self) -> Vec<RankState> {
        let state = |(worker, rank): (&WorkerId, &Rank)| RankState {
            worker: *worker,
            incarnation: rank.incarnation,
            life: rank.life,
            state: rank.state,
            declared: rank.declared,
        };
        self.ranks.iter().map(state).collect()
    }

    /// Incarnations follow from it.
    pub(super) fn secret(&self) -> u64 {
        self.incarnations.secret
    }

    /// How many incarnations were drawn.
    pub(super) fn drawn(&self) -> u64 {
        self.incarnations.drawn
    }

    /// Goes on with what was remembered: those who live are away, and have a while to come back.
    pub(super) fn restore(&mut self, now: Time, ranks: &[RankState], drawn: u64, is_planned: bool) {
        // Some may have been told after that, of which nothing is remembered.
        let drawn = drawn.saturating_add(limits::MAX_WORKERS.into()).min(MOST_DRAWN);
        while self.incarnations.drawn < drawn {
            self.next_incarnation = self.incarnations.draw();
        }
        for &RankState { worker, incarnation, life, state, declared } in ranks {
            let rank = Rank { state, declared, connected: false, ..Rank::new(now, incarnation, life.max(1)) };
            self.ranks.insert(worker, Rank { last_heard: now + limits::RETURN_GRACE, ..rank });
        }
        self.find_earliest(is_planned);
    }

    /// A process says hello: a worker that comes back, or a new one for a rank that is free or whose process is gone. Before there
    /// is a plan the job's ranks are handed out; after it, a new process joins what runs.
    pub(super) fn accept(
        &mut self,
        now: Time,
        incarnation: u64,
        wanted: Option<WorkerId>,
        is_planned: bool,
    ) -> Result<Accepted, Refusal> {
        let Some(id) = wanted.or_else(|| self.free_rank(is_planned)) else {
            let reason = self.full();
            return Err(Refusal { reason, retry: !is_planned });
        };
        self.check_rank(id, is_planned)?;
        let mut replaced = None;
        match self.ranks.get_mut(&id) {
            Some(rank) if incarnation == rank.incarnation => {
                if rank.state == MemberState::Dead {
                    return refuse(obituary(id, self.timeout));
                }
            }
            // It has an incarnation, and another process has its rank by now; unless the coordinator that let it in was started anew
            // before it had remembered that.
            Some(rank) if incarnation != 0 => {
                let position = self.incarnations.position(incarnation);
                if position.is_none() || position <= self.incarnations.position(rank.incarnation) {
                    return refuse(obituary(id, self.timeout));
                }
                replaced = (is_planned && rank.is_live()).then_some(id);
                *rank = Rank::new(now, incarnation, rank.life + u32::from(is_planned));
            }
            Some(rank) if rank.state == MemberState::Left => {
                return refuse(format!(
                    "{id} has left: its work is done; start without a rank to join as another worker"
                ));
            }
            Some(rank) if rank.is_live() && rank.connected => return Err(rank.contest(now, id, is_planned)),
            Some(rank) => {
                replaced = (is_planned && rank.is_live()).then_some(id);
                let life = rank.life + u32::from(is_planned);
                self.waited_before = Waited::sum([&self.waited_before, &rank.report.waited]);
                *rank = Rank::new(now, self.next_incarnation, life);
            }
            // It has an incarnation that this coordinator did not draw.
            None if incarnation != 0 && self.incarnations.position(incarnation).is_none() => {
                return refuse("this worker belongs to a job that ended; start it anew".into());
            }
            None => {
                let incarnation = if incarnation == 0 { self.next_incarnation } else { incarnation };
                self.ranks.insert(id, Rank::new(now, incarnation, 1));
            }
        }
        let rank = self.ranks.get_mut(&id).expect("it is there, or was made above");
        rank.connected = true;
        rank.last_heard = now;
        rank.informed = false;
        rank.contested_since = None;
        let welcome = Welcome { you: NodeId::Worker(id), incarnation: rank.incarnation, session: 0 };
        self.expect(id, is_planned);
        while self.ranks.values().any(|rank| rank.incarnation == self.next_incarnation) {
            self.next_incarnation = self.incarnations.draw();
        }
        Ok(Accepted { welcome, replaced })
    }

    /// The rank of a worker that asks for none: in a job that runs one whose process died, or the next number.
    fn free_rank(&self, is_planned: bool) -> Option<WorkerId> {
        let limit = if is_planned { limits::MAX_WORKERS } else { self.expected };
        let dead = self.ranks.iter().find(|(_, rank)| is_planned && rank.state == MemberState::Dead);
        let next = || (0..limit).map(WorkerId).find(|id| !self.ranks.contains_key(id));
        dead.map(|(id, _)| *id).or_else(next)
    }

    fn check_rank(&self, id: WorkerId, is_planned: bool) -> Result<(), Refusal> {
        let (expected, most) = (self.expected, limits::MAX_WORKERS);
        if id.0 >= most {
            let reason = format!("rank {} is out of range: a job has at most {most} workers", id.0);
            return Err(Refusal { reason, retry: false });
        }
        if id.0 >= expected && !is_planned {
            let reason =
                format!("the job waits for its {expected} workers; rank {} can join once it runs", id.0);
            return Err(Refusal { reason, retry: true });
        }
        Ok(())
    }

    /// Why there is no rank for another worker.
    fn full(&self) -> String {
        let expected = self.expected;
        format!("all {expected} workers of the job are here already; another one can join once it runs")
    }

    /// Their connection is gone.
    pub(super) fn lose(&mut self, now: Time, id: WorkerId) {
        if let Some(rank) = self.ranks.get_mut(&id) {
            rank.connected = false;
            rank.last_heard = now;
        }
        // Away, it is given up at the same time with a plan and without.
        self.expect(id, true);
    }

    /// A worker says something.
    pub(super) fn heard(&mut self, now: Time, id: WorkerId) -> Heard {
        match self.ranks.get_mut(&id) {
            None => Heard::Unknown,
            Some(rank) if rank.state == MemberState::Dead => Heard::Dead,
            Some(rank) => {
                rank.last_heard = now;
                Heard::Member { informed: rank.informed }
            }
        }
    }

    /// The plan is sent to a worker. Whether it was not sent on this connection before.
    pub(super) fn inform(&mut self, id: WorkerId) -> bool {
        self.ranks.get_mut(&id).is_some_and(|rank| !std::mem::replace(&mut rank.informed, true))
    }

    pub(super) fn take_report(&mut self, now: Time, id: WorkerId, mut report: WorkerReport) {
        report.waited = report.waited.sound();
        report.reads.waited_s = waits::sound(report.reads.waited_s);
        if let Some(rank) = self.ranks.get_mut(&id) {
            let moved = |report: &WorkerReport| (report.clock, report.bytes_pushed, report.bytes_pulled);
            let has_moved = moved(&report) != moved(&rank.report);
            if report.clock != rank.report.clock {
                rank.last_progress = now;
            }
            if has_moved || report.waiting.is_some() {
                rank.idle_since = now;
            }
            rank.waits_since = rank.waits_since.filter(|_| !has_moved && report.waiting.is_some());
            if report.waiting.is_some() {
                rank.waits_since.get_or_insert(now);
            }
            rank.report = report;
        }
    }

    /// A worker's tables are those of the job.
    pub(super) fn declare(&mut self, id: WorkerId) {
        if let Some(rank) = self.ranks.get_mut(&id) {
            rank.declared = true;
            self.last_ready = Some(id);
        }
    }

    /// A server came while the job waited for its members.
    pub(super) fn note_server(&mut self) {
        self.last_ready = None;
    }

    /// The worker that was ready last; `None` if a server was.
    pub(super) fn last_ready(&self) -> Option<WorkerId> {
        self.last_ready
    }

    /// Another worker whose tables are known.
    pub(super) fn other_declared(&self, id: WorkerId) -> Option<WorkerId> {
        self.ranks.iter().find(|(other, rank)| **other != id && rank.declared).map(|(other, _)| *other)
    }

    /// Workers that are here with their tables.
    pub(super) fn declared_count(&self) -> usize {
        self.ranks.values().filter(|rank| rank.connected && rank.declared).count()
    }

    /// Whether all that the job waits for are here with their tables.
    pub(super) fn are_complete(&self) -> bool {
        self.ranks.len() == self.expected as usize
            && self.ranks.values().all(|rank| rank.connected && rank.declared)
    }

    /// The members that a job begins with.
    pub(super) fn original_members(&self) -> Vec<Member> {
        self.ranks.iter().map(|(id, rank)| Member::original(*id, rank.incarnation)).collect()
    }

    /// The job is planned: from now on a worker without progress is idle.
    pub(super) fn begin(&mut self, now: Time) {
        self.ranks.values_mut().for_each(|rank| rank.last_progress = now);
        self.find_earliest(true);
    }

    /// A worker takes part from now on.
    pub(super) fn run(&mut self, now: Time, id: WorkerId) {
        if let Some(rank) = self.ranks.get_mut(&id).filter(|rank| rank.state == MemberState::Joining) {
            rank.state = MemberState::Running;
            (rank.last_progress, rank.idle_since) = (now, now);
        }
    }

    /// A live worker left or died. Whether it was one.
    pub(super) fn depart(&mut self, id: WorkerId, state: MemberState) -> bool {
        let rank = self.ranks.get_mut(&id).filter(|rank| rank.is_live());
        rank.map(|rank| rank.state = state).is_some()
    }

    /// The rank is free again: its worker went away before it took part. The number of processes that had it before is lost, which
    /// is none unless one of them took part.
    pub(super) fn remove(&mut self, id: WorkerId) {
        self.ranks.remove(&id);
    }

    /// Whether some earlier process had this rank.
    pub(super) fn lived_before(&self, id: WorkerId) -> bool {
        self.ranks.get(&id).is_some_and(|rank| rank.life > 1)
    }

    pub(super) fn incarnation(&self, id: WorkerId) -> Option<u64> {
        self.ranks.get(&id).map(|rank| rank.incarnation)
    }

    pub(super) fn is_running(&self, id: WorkerId) -> bool {
        self.ranks.get(&id).is_some_and(|rank| rank.state == MemberState::Running)
    }

    pub(super) fn is_live(&self, id: WorkerId) -> bool {
        self.ranks.get(&id).is_some_and(Rank::is_live)
    }

    /// Workers that take part or are about to.
    pub(super) fn live(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.ranks.iter().filter(|(_, rank)| rank.is_live()).map(|(id, _)| *id)
    }

    /// Workers that take part.
    pub(super) fn running(&self) -> impl Iterator<Item = WorkerId> + '_ {
        let running = |(_, rank): &(&WorkerId, &Rank)| rank.state == MemberState::Running;
        self.ranks.iter().filter(running).map(|(id, _)| *id)
    }

    /// Workers that take part and have been sent the plan on this connection. A change would hide from any other that it lacks those
    /// before it.
    pub(super) fn informed(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.running().filter(|id| self.ranks[id].informed)
    }

    /// The clock that all who run have come to.
    pub(super) fn slowest_clock(&self) -> Option<Clock> {
        let running = self.ranks.values().filter(|rank| rank.state == MemberState::Running);
        running.map(|rank| rank.report.clock).min()
    }

    /// How many are in this state.
    pub(super) fn count(&self, state: MemberState) -> usize {
        self.ranks.values().filter(|rank| rank.state == state).count()
    }

    pub(super) fn have_all_died(&self) -> bool {
        self.ranks.values().all(|rank| rank.state == MemberState::Dead)
    }

    /// Processes that took the rank of an earlier one.
    pub(super) fn restarts(&self) -> u32 {
        self.ranks.values().map(|rank| rank.life - 1).sum()
    }

    /// The version that a worker says to have of everything that is broadcast.
    pub(super) fn version(&self, worker: WorkerId) -> Option<Clock> {
        self.ranks.get(&worker)?.report.version
    }

    /// How long all of them waited, and for whom.
    pub(super) fn waited(&self) -> Waited {
        Waited::sum(self.ranks.values().map(|rank| &rank.report.waited).chain([&self.waited_before]))
    }

    pub(super) fn statuses(&self, now: Time) -> Vec<WorkerStatus> {
        let status = |(&worker, rank): (&WorkerId, &Rank)| WorkerStatus {
            worker,
            incarnation: rank.life,
            state: rank.state,
            silent_seconds: now.since(rank.last_heard).as_secs_f64(),
            idle_seconds: now.since(rank.last_progress).as_secs_f64(),
            report: rank.report.clone(),
        };
        self.ranks.iter().map(status).collect()
    }

    pub(super) fn last_heard_mut(&mut self) -> impl Iterator<Item = &mut Time> {
        self.ranks.values_mut().flat_map(|rank| {
            [&mut rank.last_heard, &mut rank.idle_since].into_iter().chain(&mut rank.waits_since)
        })
    }

    /// Workers that wait for others and have moved nothing since.
    pub(super) fn waiters(&self) -> impl Iterator<Item = Waiter<'_>> {
        let ranks = self.ranks.iter().filter(|(_, rank)| rank.is_here());
        ranks.filter_map(|(id, rank)| {
            Some(Waiter { worker: *id, since: rank.waits_since?, report: &rank.report })
        })
    }

    /// Workers that wait for nobody, each with the time since when it has moved nothing.
    pub(super) fn unmoved(&self) -> impl Iterator<Item = (WorkerId, Time)> + '_ {
        let ranks = self.ranks.iter().filter(|(_, rank)| rank.is_here() && rank.waits_since.is_none());
        ranks.map(|(id, rank)| (*id, rank.idle_since))
    }

    /// When a worker is given up, unless it is heard before.
    fn deadline(&self, rank: &Rank, is_planned: bool) -> Option<Time> {
        let grace = match (rank.connected, is_planned) {
            (false, _) => limits::RECONNECT_GRACE,
            (true, true) => self.timeout,
            // A worker that waits for the others to come may be silent.
            (true, false) => return None,
        };
        rank.is_live().then(|| rank.last_heard + grace)
    }

    /// A worker's deadline may be the first of all from now on.
    fn expect(&mut self, id: WorkerId, is_planned: bool) {
        let deadline = self.ranks.get(&id).and_then(|rank| self.deadline(rank, is_planned));
        self.earliest = [self.earliest, deadline].into_iter().flatten().min();
    }

    fn find_earliest(&mut self, is_planned: bool) {
        self.earliest = self.ranks.values().filter_map(|rank| self.deadline(rank, is_planned)).min();
    }

    /// When [`Workers::overdue`] is to be asked at the latest.
    pub(super) fn next_deadline(&self, standstill: &Standstill) -> Option<Time> {
        self.earliest.map(|at| standstill.deadline(at, Duration::ZERO))
    }

    /// The workers that were away or silent for too long.
    pub(super) fn overdue(&mut self, now: Time, is_planned: bool, standstill: &Standstill) -> Vec<WorkerId> {
        self.find_earliest(is_planned);
        let is_over = |rank: &Rank| {
            let deadline = self.deadline(rank, is_planned);
            deadline.is_some_and(|at| standstill.deadline(at, Duration::ZERO) <= now)
        };
        self.ranks.iter().filter(|(_, rank)| is_over(rank)).map(|(id, _)| *id).collect()
    }

    /// The sentence for a worker that was declared dead.
    pub(super) fn obituary(&self, id: WorkerId) -> String {
        obituary(id, self.timeout)
    }

    /// The members' counts against what is counted.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut incarnations: Vec<u64> = self.ranks.values().map(|rank| rank.incarnation).collect();
        incarnations.sort_unstable();
        if incarnations.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err("two workers have one incarnation".into());
        }
        match self.ranks.iter().find(|(_, rank)| rank.state == MemberState::Running && !rank.declared) {
            Some((id, _)) => Err(format!("{id} runs and has declared no tables")),
            None => Ok(()),
        }
    }
}

impl Rank {
    /// Another process asks for the rank of a connected worker. That worker may be gone, and its connection about to break: it is
    /// alive for certain only if it is heard after the rank was asked for.
    fn contest(&mut self, now: Time, id: WorkerId, is_planned: bool) -> Refusal {
        let since = *self.contested_since.get_or_insert(now);
        let is_there = self.last_heard > since + limits::HEARTBEAT_EVERY;
        let reason = format!("rank {} is taken by another worker", id.0);
        Refusal { reason, retry: !(is_planned && is_there) }
    }
}

/// A number that is not 0.
fn draw_incarnation(prng: &mut Prng) -> u64 {
    prng.next_u64().max(1)
}

/// Reasons why a worker was declared dead, and what its user can do.
fn obituary(worker: WorkerId, silence: Duration) -> String {
    format!(
        "{worker} was declared dead: it was silent for {} s, its connection broke and it did not come back within {} s, it made \
         no progress while others waited for it, or another process took its place. The job goes on without this process; start it anew, and it takes part again",
        silence.as_secs_f64(),
        limits::RECONNECT_GRACE.as_secs()
    )
}

fn refuse<T>(reason: String) -> Result<T, Refusal> {
    Err(Refusal { reason, retry: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);
    const START: Time = Time(0);

    fn workers(expected: u32) -> Workers {
        Workers::new(expected, TIMEOUT, 42)
    }

    /// A process without a rank says hello; the rank and the incarnation that it gets.
    fn join(workers: &mut Workers, now: Time, is_planned: bool) -> (WorkerId, u64) {
        let Welcome { you, incarnation, .. } = workers.accept(now, 0, None, is_planned).unwrap().welcome;
        let NodeId::Worker(id) = you else { panic!("{you:?}") };
        (id, incarnation)
    }

    /// A job that runs, with these workers in it.
    fn running(count: u32) -> Workers {
        let mut workers = workers(count);
        for _ in 0..count {
            let (id, _) = join(&mut workers, START, false);
            workers.declare(id);
        }
        workers.begin(START);
        (0..count).for_each(|rank| workers.run(START, WorkerId(rank)));
        workers
    }

    fn seconds(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    fn refusal(workers: &mut Workers, now: Time, incarnation: u64, wanted: u32, is_planned: bool) -> Refusal {
        workers.accept(now, incarnation, Some(WorkerId(wanted)), is_planned).expect_err("it is refused")
    }

    #[test]
    fn a_job_is_complete_when_as_many_as_it_waits_for_have_declared_their_tables() {
        let mut workers = workers(2);
        let (first, _) = join(&mut workers, START, false);
        workers.declare(first);
        assert_eq!((first, workers.declared_count(), workers.are_complete()), (WorkerId(0), 1, false));
        assert_eq!((workers.other_declared(WorkerId(1)), workers.other_declared(first)), (Some(first), None));
        let (second, _) = join(&mut workers, START, false);
        assert_eq!((second, workers.are_complete()), (WorkerId(1), false));
        workers.declare(second);
        assert!(workers.are_complete());
        let full = workers.accept(START, 0, None, false).unwrap_err();
        assert!(full.retry && full.reason.contains("all 2 workers of the job are here"), "{full:?}");
        workers.lose(START, first);
        assert_eq!((workers.declared_count(), workers.are_complete()), (1, false));
    }

    #[test]
    fn ranks_that_a_job_does_not_have_are_refused_for_good_or_until_it_runs() {
        let mut workers = workers(2);
        let later = refusal(&mut workers, START, 0, 2, false);
        assert!(later.retry && later.reason.contains("rank 2 can join once it runs"), "{later:?}");
        for is_planned in [false, true] {
            let never = refusal(&mut workers, START, 0, limits::MAX_WORKERS, is_planned);
            assert!(!never.retry && never.reason.contains("out of range"), "{never:?}");
        }
        assert!(workers.accept(START, 0, Some(WorkerId(1)), false).is_ok());
        assert!(workers.accept(START, 0, Some(WorkerId(limits::MAX_WORKERS - 1)), true).is_ok());
    }

    #[test]
    fn a_worker_comes_back_under_its_incarnation_and_is_told_the_plan_again() {
        let mut workers = running(2);
        let (id, incarnation) = (WorkerId(1), workers.incarnation(WorkerId(1)).unwrap());
        assert_ne!(Some(incarnation), workers.incarnation(WorkerId(0)));
        assert!(workers.inform(id) && !workers.inform(id));
        assert_eq!(workers.heard(START, id), Heard::Member { informed: true });
        workers.lose(START, id);
        let back = workers.accept(START, incarnation, Some(id), true).unwrap();
        assert_eq!((back.welcome.incarnation, back.replaced), (incarnation, None));
        assert_eq!(workers.heard(START, id), Heard::Member { informed: false });
        assert!(workers.inform(id));
        assert_eq!((workers.heard(START, WorkerId(5)), workers.inform(WorkerId(5))), (Heard::Unknown, false));
        assert_eq!((workers.restarts(), workers.lived_before(id)), (0, false));
    }

    #[test]
    fn a_process_that_was_replaced_or_declared_dead_is_refused_for_good() {
        let mut workers = running(2);
        let (id, old) = (WorkerId(1), workers.incarnation(WorkerId(1)).unwrap());
        workers.lose(START, id);
        let next = workers.accept(START, 0, Some(id), true).unwrap();
        assert_eq!(next.replaced, Some(id), "the process before it was a member until now");
        assert_ne!(next.welcome.incarnation, old);
        assert_eq!((workers.restarts(), workers.lived_before(id), workers.is_running(id)), (1, true, false));
        let why = refusal(&mut workers, START, old, 1, true);
        assert!(!why.retry && why.reason.contains("worker 1 was declared dead"), "{why:?}");

        assert!(workers.depart(id, MemberState::Dead) && !workers.depart(id, MemberState::Dead));
        assert_eq!(workers.heard(START, id), Heard::Dead);
        let why = refusal(&mut workers, START, next.welcome.incarnation, 1, true);
        assert!(!why.retry && why.reason == workers.obituary(id), "{why:?}");
        // Another process takes part in its place, and nobody has to make room for it.
        assert_eq!(join(&mut workers, START, true).0, id);
        assert_eq!((workers.restarts(), workers.is_live(id), workers.have_all_died()), (2, true, false));
    }

    #[test]
    fn the_rank_of_a_worker_whose_work_is_done_is_not_taken_again() {
        let mut workers = running(2);
        workers.depart(WorkerId(0), MemberState::Left);
        let why = refusal(&mut workers, START, 0, 0, true);
        assert!(!why.retry && why.reason.contains("has left: its work is done"), "{why:?}");
        assert_eq!(join(&mut workers, START, true).0, WorkerId(2));
        let (running, live): (Vec<_>, Vec<_>) = (workers.running().collect(), workers.live().collect());
        assert_eq!((running, live), (vec![WorkerId(1)], vec![WorkerId(1), WorkerId(2)]));
        assert_eq!((workers.count(MemberState::Left), workers.count(MemberState::Joining)), (1, 1));
        workers.remove(WorkerId(2));
        assert_eq!((workers.incarnation(WorkerId(2)), workers.count(MemberState::Joining)), (None, 0));
    }

    #[test]
    fn a_rank_is_contested_until_the_one_that_has_it_is_heard() {
        let mut workers = running(1);
        assert!(
            refusal(&mut workers, seconds(1.0), 0, 0, true).retry,
            "its connection may be about to break"
        );
        workers.heard(seconds(1.0) + limits::HEARTBEAT_EVERY, WorkerId(0));
        assert!(refusal(&mut workers, seconds(2.0), 0, 0, true).retry, "it may have said that before");
        workers.heard(seconds(1.6), WorkerId(0));
        let taken = refusal(&mut workers, seconds(2.0), 0, 0, true);
        assert!(!taken.retry && taken.reason.contains("rank 0 is taken by another worker"), "{taken:?}");
        assert!(refusal(&mut workers, seconds(2.0), 0, 0, false).retry);
        // One that comes back has to be heard anew.
        let incarnation = workers.incarnation(WorkerId(0)).unwrap();
        workers.accept(seconds(3.0), incarnation, Some(WorkerId(0)), true).unwrap();
        assert!(refusal(&mut workers, seconds(3.0), 0, 0, true).retry);
    }

    #[test]
    fn silent_workers_are_given_up_after_the_timeout_and_those_away_after_the_grace() {
        let (mut workers, standstill) = (running(3), Standstill::default());
        assert_eq!(workers.next_deadline(&standstill), Some(START + TIMEOUT));
        workers.lose(seconds(1.0), WorkerId(2));
        let away = seconds(1.0) + limits::RECONNECT_GRACE;
        assert_eq!(workers.next_deadline(&standstill), Some(away));
        assert_eq!(workers.overdue(Time(away.0 - 1), true, &standstill), []);
        assert_eq!(workers.overdue(away, true, &standstill), [WorkerId(2)]);
        workers.depart(WorkerId(2), MemberState::Dead);
        workers.heard(seconds(5.0), WorkerId(1));
        assert_eq!(workers.overdue(seconds(10.0), true, &standstill), [WorkerId(0)]);
        workers.depart(WorkerId(0), MemberState::Dead);
        assert_eq!(workers.overdue(seconds(14.9), true, &standstill), []);
        assert_eq!(workers.next_deadline(&standstill), Some(seconds(15.0)));
        assert_eq!(workers.overdue(seconds(15.0), true, &standstill), [WorkerId(1)]);
        assert!(!workers.have_all_died());
        workers.depart(WorkerId(1), MemberState::Dead);
        assert!(workers.have_all_died());
    }

    #[test]
    fn a_worker_may_be_silent_while_it_waits_for_the_others_to_come() {
        let (mut workers, standstill) = (workers(2), Standstill::default());
        join(&mut workers, START, false);
        assert_eq!(workers.next_deadline(&standstill), None);
        assert_eq!(workers.overdue(seconds(1000.0), false, &standstill), []);
        workers.lose(seconds(1000.0), WorkerId(0));
        let away = seconds(1000.0) + limits::RECONNECT_GRACE;
        assert_eq!(workers.overdue(away, false, &standstill), [WorkerId(0)]);
    }

    #[test]
    fn the_status_says_how_long_a_worker_is_silent_and_does_not_move() {
        let mut workers = running(1);
        let id = WorkerId(0);
        let report = |clock| WorkerReport { clock, ..WorkerReport::default() };
        workers.take_report(seconds(2.0), id, report(1));
        workers.take_report(seconds(3.0), id, report(1));
        workers.heard(seconds(4.0), id);
        let status = &workers.statuses(seconds(6.0))[0];
        assert_eq!((status.worker, status.incarnation, status.state), (id, 1, MemberState::Running));
        assert_eq!((status.silent_seconds, status.idle_seconds, status.report.clock), (2.0, 4.0, 1));
    }

    #[test]
    fn a_coordinator_that_was_started_anew_knows_its_workers_and_those_that_it_had_forgotten() {
        let mut before = running(2);
        let remembered = (before.remembered(), before.drawn());
        // Two are let in after that, of which nothing is remembered: one for a rank of its own, one in another's place.
        let (third, of_third) = join(&mut before, START, true);
        before.lose(START, WorkerId(1));
        let fourth = before.accept(START, 0, Some(WorkerId(1)), true).unwrap().welcome.incarnation;

        let (mut after, standstill) = (workers(2), Standstill::default());
        after.restore(START, &remembered.0, remembered.1, true);
        assert_eq!((after.running().count(), after.declared_count()), (2, 0), "they are away");
        let away = START + limits::RETURN_GRACE + limits::RECONNECT_GRACE;
        assert_eq!(after.overdue(Time(away.0 - 1), true, &standstill), []);
        assert_eq!(after.overdue(away, true, &standstill), [WorkerId(0), WorkerId(1)]);
        let first = before.incarnation(WorkerId(0)).unwrap();
        let back = after.accept(START, first, Some(WorkerId(0)), true).unwrap();
        assert_eq!((back.welcome.incarnation, back.replaced), (first, None));
        let back = after.accept(START, of_third, Some(third), true).unwrap();
        assert_eq!((back.welcome.incarnation, after.is_running(third)), (of_third, false));
        let old = after.incarnation(WorkerId(1)).unwrap();
        let back = after.accept(START, fourth, Some(WorkerId(1)), true).unwrap();
        assert_eq!((back.welcome.incarnation, back.replaced), (fourth, Some(WorkerId(1))));
        assert!(!refusal(&mut after, START, old, 1, true).retry, "it was replaced");
        assert!(!refusal(&mut after, START, 12345, 7, true).retry, "nobody was given this number");
        // Nobody gets a number that was given before.
        let (_, newest) = join(&mut after, START, true);
        assert!(![first, of_third, fourth, old].contains(&newest));
        assert_eq!(after.check(), Ok(()));
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut workers = running(2);
        assert_eq!(workers.check(), Ok(()));
        workers.ranks.get_mut(&WorkerId(0)).unwrap().declared = false;
        assert!(workers.check().is_err(), "it runs without tables");
        let mut workers = running(2);
        workers.ranks.get_mut(&WorkerId(0)).unwrap().incarnation = workers.incarnation(WorkerId(1)).unwrap();
        assert!(workers.check().is_err(), "two have one incarnation");
    }
}
