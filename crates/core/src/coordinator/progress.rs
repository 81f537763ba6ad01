//! Members that live and make no progress while others wait for them: named, and by policy left behind.
//!
//! A heartbeat says that a process lives, and not that it gets anywhere: an application may hang in its loop beside a library that goes on
//! reporting. A worker makes progress when its clock moves, or bytes of gradients or parameters do; a shard when bytes or versions do. Neither is
//! stalled as long as nobody waits for it: a step may take as long as it likes.

use super::Coordinator;
use super::barriers::Barriers;
use super::epochs::Epochs;
use super::phase::Stage;
use super::servers::Servers;
use super::workers::Workers;
use crate::limits;
use crate::status::{MemberState, ShardReport, StalledStatus, WorkerReport};
use crate::types::{NodeId, ShardId, Time, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How often it is looked for members without progress.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Members and tables that a sentence lists.
const LISTED: usize = 4;

/// The members that make no progress.
#[derive(Debug, Default)]
pub(super) struct Stalls {
    looked: Option<Time>,
    found: Vec<Stall>,
}

/// A member that makes no progress.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stall {
    node: NodeId,
    /// Since when it has made none while others waited.
    since: Time,
    /// The members that wait for it, and what for.
    holds_up: String,
}

/// A worker that waits, and has moved nothing since.
#[derive(Debug)]
pub(super) struct Waiter<'a> {
    pub(super) worker: WorkerId,
    pub(super) since: Time,
    pub(super) report: &'a WorkerReport,
}

/// A shard that is here and reports.
#[derive(Debug)]
pub(super) struct Reporting<'a> {
    pub(super) shard: ShardId,
    /// When bytes or versions moved last.
    pub(super) moved: Time,
    pub(super) report: &'a ShardReport,
}

impl Stalls {
    /// Looks for members without progress, when it is time to. A line for the log about each that was not found before.
    fn look(
        &mut self,
        now: Time,
        limit: Duration,
        workers: &Workers,
        servers: &Servers,
        barriers: &Barriers,
    ) -> Vec<String> {
        if self.looked.is_some_and(|looked| now.since(looked) < LOOK_EVERY) {
            return Vec::new();
        }
        self.looked = Some(now);
        let is_long = |since: Time| now.since(since) >= limit;
        let waiters: Vec<Waiter<'_>> = workers.waiters().filter(|waiter| is_long(waiter.since)).collect();
        let mut found = Vec::new();
        if !waiters.is_empty() {
            let shards: Vec<Reporting<'_>> = servers.reporting(now).collect();
            for (worker, since) in workers.unmoved().filter(|(_, since)| is_long(*since)) {
                found.extend(stalled_worker(worker, since, &waiters, &shards, barriers));
            }
            let shards = shards.iter().filter(|shard| is_long(shard.moved));
            found.extend(shards.filter_map(|shard| stalled_shard(shard, &waiters)));
        }
        let is_known = |node: NodeId| self.found.iter().any(|known| known.node == node);
        let news = found.iter().filter(|stall| !is_known(stall.node));
        let lines = news.map(|stall| format!("{} {}", stall.node, stall.words(now))).collect();
        self.found = found;
        lines
    }

    /// The members without progress, for the status.
    pub(super) fn statuses(&self, now: Time) -> Vec<StalledStatus> {
        let status = |stall: &Stall| StalledStatus {
            node: stall.node.to_string(),
            seconds: now.since(stall.since).as_secs_f64(),
            holds_up: stall.holds_up.clone(),
        };
        self.found.iter().take(limits::MAX_WAIT_CAUSES).map(status).collect()
    }
}

impl Stall {
    fn words(&self, now: Time) -> String {
        let seconds = now.since(self.since).as_secs();
        format!("lives and makes no progress for {seconds} s: it holds up {}", self.holds_up)
    }
}

/// A worker that computes, or hangs, while others wait for its push or for it to come to a barrier.
fn stalled_worker(
    worker: WorkerId,
    since: Time,
    waiters: &[Waiter<'_>],
    shards: &[Reporting<'_>],
    barriers: &Barriers,
) -> Option<Stall> {
    let mut held = BTreeMap::<WorkerId, Time>::new();
    let mut wanted = BTreeSet::new();
    for table in shards.iter().flat_map(|shard| &shard.report.tables) {
        if !table.missing.contains(&worker) {
            continue;
        }
        // Those who have pushed the round wait for those who have not.
        for waiter in waiters.iter().filter(|waiter| !table.missing.contains(&waiter.worker)) {
            held.insert(waiter.worker, waiter.since);
            wanted.insert(format!("table `{}`", table.name));
        }
    }
    for waiter in waiters {
        for name in barriers.missed(waiter.worker, worker) {
            held.insert(waiter.worker, waiter.since);
            wanted.insert(format!("barrier `{name}`"));
        }
    }
    let since = since.max(held.values().copied().min()?);
    let holds_up = format!("{} ({})", listed(held.keys()), listed(&wanted));
    Some(Stall { node: NodeId::Worker(worker), since, holds_up })
}

/// A shard at which requests wait that it does not know of, and which waits for nobody itself.
fn stalled_shard(shard: &Reporting<'_>, waiters: &[Waiter<'_>]) -> Option<Stall> {
    let Reporting { shard: id, moved, report } = shard;
    let waits_here = |waiter: &&Waiter<'_>| waiter.report.unanswered.contains(id);
    let is_explained = |worker: WorkerId| {
        let tables = report.tables.iter();
        tables.map(|table| &table.waiting).any(|pulls| {
            // A shard lists the longest waits only.
            pulls.len() >= limits::MAX_WAITS_REPORTED || pulls.iter().any(|pull| pull.worker == worker)
        })
    };
    // A round may lack a worker that has not pushed; then the shard is not to blame.
    let lacks_others = report
        .tables
        .iter()
        .flat_map(|table| &table.missing)
        .any(|missing| !waiters.iter().filter(waits_here).any(|waiter| waiter.worker == *missing));
    if lacks_others || report.tables.is_empty() {
        return None;
    }
    let held = waiters.iter().filter(waits_here).filter(|waiter| !is_explained(waiter.worker));
    let held: BTreeMap<WorkerId, Time> = held.map(|waiter| (waiter.worker, waiter.since)).collect();
    let since = (*moved).max(held.values().copied().min()?);
    let holds_up = format!("{} (requests without an answer)", listed(held.keys()));
    Some(Stall { node: NodeId::Shard(*id), since, holds_up })
}

/// The first few, with commas between them.
fn listed<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let all: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    let more = all.len().saturating_sub(LISTED);
    let first = all.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

/// Names members without progress, and leaves behind those that were without for as long as the policy allows: a worker is declared dead, a shard is
/// served by its copy if there is one.
pub(super) fn judge(own: &mut Coordinator, now: Time) {
    if own.stage != Stage::Running {
        return;
    }
    let timeout = own.config.progress_timeout;
    // A member is named before it is left behind.
    let limit = timeout.map_or(limits::STALL_NAMED, |timeout| (timeout / 2).min(limits::STALL_NAMED));
    let lines = own.stalls.look(now, limit, &own.workers, &own.servers, &own.barriers);
    lines.into_iter().for_each(|line| own.log(line));
    let Some(timeout) = timeout else { return };
    let is_over = |stall: &Stall| own.standstill.deadline(stall.since, timeout) <= now;
    let (over, rest): (Vec<Stall>, Vec<Stall>) =
        std::mem::take(&mut own.stalls.found).into_iter().partition(is_over);
    own.stalls.found = rest;
    for stall in over {
        match stall.node {
            NodeId::Worker(worker) => {
                own.log(format!("{worker} {}; it is left behind", stall.words(now)));
                own.part_with(now, worker, MemberState::Dead);
            }
            NodeId::Shard(shard) => {
                let plan = own.epochs.as_ref().map(Epochs::newest);
                // Without a copy there is nobody else to wait for.
                let has_copy = plan.is_some_and(|plan| own.replication.shun(plan, shard));
                if has_copy && own.servers.leave_behind(now, shard) {
                    own.log(format!("{shard} {}; it is left behind for its copy", stall.words(now)));
                }
                own.stalls.found.push(stall);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{TableReport, WaitReport};
    use crate::types::ServerId;

    const SHARD: ShardId = ShardId { server: ServerId(0), core: 0 };

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000_000_000)
    }

    fn waiting(unanswered: &[ShardId]) -> WorkerReport {
        let waiting = Some("parameters".into());
        WorkerReport { waiting, unanswered: unanswered.to_vec(), ..WorkerReport::default() }
    }

    fn shard(missing: &[u32], delayed: &[u32]) -> ShardReport {
        let wait = |rank: &u32| WaitReport { worker: WorkerId(*rank), seconds: 9.0, reason: String::new() };
        let table = TableReport {
            name: "w".into(),
            elements: 1,
            sync: "bsp".into(),
            version: 3,
            workers: 3,
            stats: Default::default(),
            waiting: delayed.iter().map(wait).collect(),
            missing: missing.iter().map(|rank| WorkerId(*rank)).collect(),
        };
        ShardReport {
            shard: SHARD,
            tables: vec![table],
            bytes_pushed: 0,
            bytes_pulled: 0,
            nonfinite: 0,
            refused: 0,
            memory_bytes: 0,
            links: None,
        }
    }

    fn judged(report: &ShardReport, waits: &WorkerReport) -> [Option<String>; 2] {
        let shards = [Reporting { shard: SHARD, moved: at(2), report }];
        let waiters: Vec<Waiter<'_>> = [(0, at(5)), (1, at(6))]
            .map(|(rank, since)| Waiter { worker: WorkerId(rank), since, report: waits })
            .into();
        let worker = stalled_worker(WorkerId(2), at(3), &waiters, &shards, &Barriers::default());
        let shard = stalled_shard(&shards[0], &waiters);
        assert!([&worker, &shard].into_iter().flatten().all(|stall| stall.since == at(5)));
        [worker, shard].map(|stall| stall.map(|stall| stall.holds_up))
    }

    #[test]
    fn a_round_that_lacks_a_worker_is_held_up_by_that_worker_and_not_by_the_shard() {
        let expected = [Some("worker 0, worker 1 (table `w`)".into()), None];
        assert_eq!(judged(&shard(&[2], &[0, 1]), &waiting(&[SHARD])), expected);
        assert_eq!(
            judged(&shard(&[2], &[]), &waiting(&[SHARD])),
            expected,
            "an aggregator holds their pulls"
        );
    }

    #[test]
    fn a_worker_is_not_to_blame_for_what_does_not_wait_for_it() {
        assert_eq!(judged(&shard(&[], &[0, 1]), &waiting(&[SHARD])), [None, None]);
        assert_eq!(judged(&shard(&[0, 1, 2], &[]), &waiting(&[])), [None, None], "nobody has pushed");
    }

    #[test]
    fn a_shard_is_to_blame_for_requests_that_it_does_not_know_of() {
        let of_shard = [None, Some("worker 0, worker 1 (requests without an answer)".into())];
        assert_eq!(judged(&shard(&[], &[]), &waiting(&[SHARD])), of_shard);
        assert_eq!(judged(&shard(&[0, 1], &[]), &waiting(&[SHARD])), of_shard, "their pushes are not there");
    }

    #[test]
    fn sentences_list_a_few() {
        assert_eq!(listed([1, 2, 3, 4]), "1, 2, 3, 4");
        assert_eq!(listed([1, 2, 3, 4, 5, 6]), "1, 2, 3, 4 and 2 more");
    }
}
