//! When checkpoints are made, and how far the one under way is. The files are the shards'; the manifest, which makes a checkpoint of
//! them, is written last.

use super::config::Checkpointing;
use crate::checkpoint::{self, CheckpointPolicy, Every, Manifest, SavedFile, SavedTable};
use crate::limits;
use crate::policy::Axis;
use crate::table::TableSpec;
use crate::types::{Clock, NodeId, ServerId, ShardId, TableId, Time};
use crate::wire::{CheckpointOrder, CheckpointOutcome, Plan};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// A checkpoint that somebody asked for is ordered at a version that a job which trains reaches sooner than this.
const PATIENCE: Duration = Duration::from_secs(1);
/// So often a checkpoint that was asked for is ordered anew: at a later version, or at the present one of a job that rests.
const MAX_ATTEMPTS: u32 = 30;
/// The last checkpoint of a job that ends may take so long.
const LAST_DEADLINE: Duration = Duration::from_secs(120);
/// An order is at most so many versions ahead because earlier ones came too late.
const LONGEST_LEAD: u64 = 1 << 12;

/// The checkpoints of a job.
#[derive(Debug)]
pub(super) struct Checkpoints {
    policy: CheckpointPolicy,
    /// Tells folders of this run from those of others.
    run: u64,
    shards: BTreeSet<ShardId>,
    /// The number of the last order.
    number: u64,
    under_way: Option<UnderWay>,
    /// Complete ones, oldest first.
    complete: Vec<(Clock, String)>,
    /// The newest version of a table, as far as it is known.
    version: Clock,
    /// The newest version that is in a complete checkpoint.
    saved: Clock,
    /// How many versions ahead an order is: more after each that came too late.
    lead: u64,
    /// When the next one is due, where time decides.
    due: Option<Time>,
    /// Those who wait for the next one, and how often it was ordered for them.
    askers: BTreeSet<NodeId>,
    attempts: u32,
    /// The job ends when this time has come, or its last checkpoint is complete.
    ends: Option<Time>,
    steps: VecDeque<Step>,
}

/// A checkpoint that is being made.
#[derive(Debug)]
struct UnderWay {
    order: CheckpointOrder,
    files: BTreeMap<ShardId, SavedFile>,
    since: Time,
}

/// What the coordinator is to do.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Send an order to all shards.
    Order(CheckpointOrder),
    /// Have the manifest written.
    Complete {
        folder: String,
        clock: Clock,
        files: Vec<SavedFile>,
        keep: Vec<String>,
    },
    /// Write a line of the log.
    Note(String),
    Warn(String),
    /// Tell somebody who asked what came of it.
    Answer(NodeId, Result<String, String>),
    /// The job may end.
    End,
}

impl Checkpoints {
    /// The shards have entered the plan of a job that begins with a clock. So many orders were given before.
    pub(super) fn new(
        now: Time,
        config: &Checkpointing,
        run: u64,
        orders: u64,
        first: Clock,
        shards: impl Iterator<Item = ShardId>,
    ) -> Checkpoints {
        let mut checkpoints = Checkpoints {
            policy: config.policy,
            run,
            shards: shards.collect(),
            number: orders,
            under_way: None,
            complete: config.kept.clone(),
            version: first,
            saved: first,
            lead: 1,
            due: None,
            askers: BTreeSet::new(),
            attempts: 0,
            ends: None,
            steps: VecDeque::new(),
        };
        checkpoints.reset_due(now);
        checkpoints.schedule(now);
        checkpoints
    }

    /// The next thing to do.
    pub(super) fn poll(&mut self) -> Option<Step> {
        self.steps.pop_front()
    }

    /// Orders that were given.
    pub(super) fn orders(&self) -> u64 {
        self.number
    }

    /// The order that shards follow: one that has lost its connection is told again.
    pub(super) fn order(&self) -> Option<&CheckpointOrder> {
        self.under_way.as_ref().map(|under_way| &under_way.order)
    }

    /// A shard's tables are at this version.
    pub(super) fn note_version(&mut self, now: Time, version: Clock) {
        self.version = self.version.max(version);
        self.schedule(now);
    }

    /// All workers are at this clock or a later one. Tables that nobody pushes do not get to the version of the order.
    pub(super) fn note_progress(&mut self, clock: Clock) {
        // By then every push of an iteration before the order's is acknowledged.
        let margin = limits::MAX_CLOCKS_UNACKNOWLEDGED as u64 + 1;
        if let Some(under_way) = &mut self.under_way
            && !under_way.order.takes_all
            && under_way.files.len() < self.shards.len()
            && clock >= under_way.order.at.saturating_add(margin)
        {
            under_way.order.takes_all = true;
            self.steps.push_back(Step::Order(under_way.order.clone()));
        }
    }

    /// Somebody asks for a checkpoint.
    pub(super) fn ask(&mut self, now: Time, asker: NodeId) {
        if self.ends.is_some() {
            return self.steps.push_back(Step::Answer(asker, Err("the job ends".into())));
        }
        self.askers.insert(asker);
        self.attempts = 0;
        let is_far = |under_way: &UnderWay| {
            under_way.files.is_empty() && under_way.order.at > self.version.saturating_add(self.lead)
        };
        if self.under_way.as_ref().is_some_and(is_far) {
            self.under_way = None;
        }
        self.schedule(now);
    }

    pub(super) fn forget(&mut self, asker: NodeId) {
        self.askers.remove(&asker);
    }

    /// The job ends well: what it has come to is saved first. True if it has to wait for that.
    pub(super) fn finish(&mut self, now: Time) -> bool {
        if self.ends.is_none() {
            self.ends = Some(now + LAST_DEADLINE);
            if self.under_way.as_ref().is_none_or(|under_way| under_way.files.len() < self.shards.len()) {
                self.under_way = None;
                self.schedule(now);
            }
        }
        true
    }

    /// A shard says what came of an order.
    pub(super) fn take(&mut self, now: Time, shard: ShardId, number: u64, outcome: CheckpointOutcome) {
        let Some(under_way) = self.under_way.as_mut().filter(|known| known.order.number == number) else {
            return;
        };
        match outcome {
            CheckpointOutcome::Saved { file, version } => {
                let is_own = self.shards.contains(&shard) && checkpoint::is_name(&file.name);
                if !is_own || under_way.files.insert(shard, file).is_some() {
                    return;
                }
                self.version = self.version.max(version);
                if under_way.files.len() == self.shards.len() {
                    let CheckpointOrder { folder, at, .. } = under_way.order.clone();
                    let files = under_way.files.values().cloned().collect();
                    self.steps.push_back(Step::Complete { folder, clock: at, files, keep: self.keep(at) });
                }
            }
            CheckpointOutcome::Missed { version } => {
                self.version = self.version.max(version);
                self.lead = (self.lead * 2).min(LONGEST_LEAD);
                self.under_way = None;
                self.schedule(now);
            }
            CheckpointOutcome::Failed { why } => self.fail(now, &format!("{shard}: {why}")),
        }
    }

    /// The manifest is written, or is not.
    pub(super) fn completed(&mut self, now: Time, folder: &str, outcome: Result<(), String>) {
        let Some(under_way) = self.under_way.take_if(|under_way| under_way.order.folder == folder) else {
            return;
        };
        if let Err(why) = outcome {
            self.under_way = Some(under_way);
            return self.fail(now, &why);
        }
        let at = under_way.order.at;
        self.complete.retain(|(clock, _)| *clock != at);
        self.complete.push((at, folder.to_owned()));
        let surplus = self.complete.len().saturating_sub(self.policy.keep as usize);
        self.complete.drain(..surplus);
        (self.saved, self.lead) = (at, 1);
        let sentence = format!("checkpoint {folder} is complete");
        self.steps.push_back(Step::Note(sentence.clone()));
        self.answer(&Ok(sentence));
        self.reset_due(now);
        if self.ends.is_some() {
            return self.steps.push_back(Step::End);
        }
        self.schedule(now);
    }

    /// It is time for something.
    pub(super) fn handle_timeout(&mut self, now: Time) {
        if self.ends.is_some_and(|ends| ends <= now) {
            self.steps.push_back(Step::Warn("the last checkpoint was not complete in time".into()));
            return self.steps.push_back(Step::End);
        }
        if self.patience().is_some_and(|at| at <= now) {
            self.attempts += 1;
            if self.attempts > MAX_ATTEMPTS {
                let why = "no version came that all servers could copy; ask while the job trains";
                self.under_way = None;
                self.answer(&Err(why.into()));
            } else if let Some(UnderWay { order, .. }) = self.under_way.take() {
                // A job that rests gets to no later version, but all of it may be at the present one.
                let at = if order.at > self.version { self.version } else { self.version + self.lead };
                self.order_at(now, at, false);
            }
        }
        self.schedule(now);
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let due = self.due.filter(|_| self.under_way.is_none() && self.version > self.saved);
        [due, self.patience(), self.ends].into_iter().flatten().min()
    }

    /// When those who asked have waited long enough for an order to be carried out.
    fn patience(&self) -> Option<Time> {
        let under_way = self.under_way.as_ref().filter(|_| !self.askers.is_empty() && self.ends.is_none())?;
        under_way.files.is_empty().then_some(under_way.since + PATIENCE)
    }

    /// Orders the next checkpoint, if there is none under way.
    fn schedule(&mut self, now: Time) {
        if self.under_way.is_some() {
            return;
        }
        let soon = self.version.saturating_add(self.lead);
        if self.ends.is_some() {
            // Nobody trains any more.
            return self.order_at(now, self.version, true);
        }
        if !self.askers.is_empty() {
            return self.order_at(now, soon, false);
        }
        match self.policy.every {
            Every::Steps(steps) => {
                let at = soon.div_ceil(steps.max(1)).saturating_mul(steps.max(1));
                self.order_at(now, at, false);
            }
            Every::Time(_) if self.due.is_some_and(|due| due <= now) && self.version > self.saved => {
                self.order_at(now, soon, false);
            }
            Every::Time(_) | Every::Asked => {}
        }
    }

    fn order_at(&mut self, now: Time, at: Clock, takes_all: bool) {
        self.number += 1;
        let folder = checkpoint::folder(at, self.run, self.number);
        let order = CheckpointOrder { number: self.number, at, folder, takes_all, keep: self.all_complete() };
        self.steps.push_back(Step::Order(order.clone()));
        self.under_way = Some(UnderWay { order, files: BTreeMap::new(), since: now });
    }

    /// The checkpoint under way cannot be completed. Those before it stay.
    fn fail(&mut self, now: Time, why: &str) {
        let Some(UnderWay { order, .. }) = self.under_way.take() else { return };
        let stays = match self.complete.last() {
            Some((_, folder)) => format!("{folder} stays the newest"),
            None => "there is none before it".into(),
        };
        let sentence = format!("the checkpoint at step {} failed: {why}; {stays}", order.at);
        self.answer(&Err(sentence.clone()));
        self.steps.push_back(Step::Warn(sentence));
        if self.ends.is_some() {
            return self.steps.push_back(Step::End);
        }
        // The next one is not for the same step.
        self.version = self.version.max(order.at.saturating_sub(1));
        self.lead = self.lead.max(2);
        self.reset_due(now);
        self.schedule(now);
    }

    fn answer(&mut self, outcome: &Result<String, String>) {
        let askers = std::mem::take(&mut self.askers);
        self.steps.extend(askers.into_iter().map(|asker| Step::Answer(asker, outcome.clone())));
    }

    fn reset_due(&mut self, now: Time) {
        self.due = match self.policy.every {
            Every::Time(time) => Some(now + time),
            Every::Steps(_) | Every::Asked => None,
        };
    }

    /// Folders that stay when one of this clock is complete. Another one of the same clock, which a job that was resumed and
    /// made no step has, takes nobody's place but that one's.
    fn keep(&self, at: Clock) -> Vec<String> {
        let mut others: Vec<String> = self.all_complete();
        let same = self.complete.iter().filter(|(clock, _)| *clock == at).map(|(_, folder)| folder);
        same.for_each(|folder| others.retain(|other| other != folder));
        let surplus = (others.len() + 1).saturating_sub((self.policy.keep as usize).max(1));
        others.drain(..surplus.min(others.len()));
        others
    }

    fn all_complete(&self) -> Vec<String> {
        self.complete.iter().map(|(_, folder)| folder.clone()).collect()
    }
}

/// The manifest of a checkpoint of a job as its plan is.
pub(super) fn manifest(
    job: &str,
    plan: &Plan,
    folder: String,
    clock: Clock,
    files: Vec<SavedFile>,
) -> Manifest {
    let table = |(number, table): (u32, &TableSpec)| {
        let policy = plan.policy_of(TableId(number), ServerId(0));
        SavedTable {
            table: table.clone(),
            optimizer: policy.get(Axis::Optimizer).to_owned(),
            sync: policy.get(Axis::Sync).to_owned(),
        }
    };
    let switches = plan.switches.iter().map(|switch| &switch.rule);
    Manifest {
        format: checkpoint::FORMAT,
        job: job.to_owned(),
        folder,
        clock,
        workers: plan.workers,
        seed: plan.seed,
        policy: plan.policy.clone(),
        overrides: plan.overrides.iter().chain(switches).cloned().collect(),
        tables: (0..).zip(&plan.tables).map(table).collect(),
        files,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(server: u32) -> ShardId {
        ShardId { server: ServerId(server), core: 0 }
    }

    fn checkpoints(every: Every) -> Checkpoints {
        let config = Checkpointing {
            policy: CheckpointPolicy { every, keep: 2 },
            resume: None,
            kept: vec![(3, "old".into())],
        };
        Checkpoints::new(Time::ZERO, &config, 1, 0, 5, (0..2).map(shard))
    }

    fn seconds(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    /// The next order, and nothing before it.
    fn order(checkpoints: &mut Checkpoints) -> CheckpointOrder {
        match checkpoints.poll() {
            Some(Step::Order(order)) => order,
            other => panic!("{other:?}"),
        }
    }

    fn saved(checkpoints: &mut Checkpoints, server: u32, version: Clock) {
        let file = SavedFile { name: format!("{server}"), bytes: 1, digest: Default::default() };
        let number = checkpoints.order().expect("one is under way").number;
        let outcome = CheckpointOutcome::Saved { file, version };
        checkpoints.take(Time::ZERO, shard(server), number, outcome);
    }

    /// Has all shards save; the folder, clock and what is kept.
    fn complete(checkpoints: &mut Checkpoints, version: Clock) -> (Clock, Vec<String>) {
        (0..2).for_each(|server| saved(checkpoints, server, version));
        let Some(Step::Complete { folder, clock, files, keep }) = checkpoints.poll() else {
            panic!("all saved")
        };
        assert_eq!(files.len(), 2);
        checkpoints.completed(Time::ZERO, &folder, Ok(()));
        assert!(matches!(checkpoints.poll(), Some(Step::Note(_))));
        (clock, keep)
    }

    #[test]
    fn checkpoints_are_at_multiples_and_the_newest_are_kept() {
        let mut checkpoints = checkpoints(Every::Steps(10));
        assert_eq!(order(&mut checkpoints).at, 10);
        assert_eq!(complete(&mut checkpoints, 13), (10, vec!["old".into()]));
        let next = order(&mut checkpoints);
        assert_eq!((next.at, next.number), (20, 2));
        assert_eq!(next.keep, ["old".to_owned(), checkpoint::folder(10, 1, 1)]);
        // The job was fast while the files were written.
        assert_eq!(complete(&mut checkpoints, 47), (20, vec![checkpoint::folder(10, 1, 1)]));
        assert_eq!(order(&mut checkpoints).at, 50);
    }

    #[test]
    fn an_order_that_comes_too_late_is_followed_by_a_later_one() {
        let mut checkpoints = checkpoints(Every::Steps(10));
        let first = order(&mut checkpoints);
        saved(&mut checkpoints, 0, 10);
        checkpoints.take(Time::ZERO, shard(1), first.number, CheckpointOutcome::Missed { version: 19 });
        let second = order(&mut checkpoints);
        assert_eq!(second.at, 30, "20 is too near");
        // What the other shard saved of the first does not count for the second.
        saved(&mut checkpoints, 1, 30);
        checkpoints.take(
            Time::ZERO,
            shard(0),
            first.number,
            CheckpointOutcome::Failed { why: "late".into() },
        );
        assert_eq!(checkpoints.poll(), None);
        saved(&mut checkpoints, 0, 30);
        assert!(matches!(checkpoints.poll(), Some(Step::Complete { clock: 30, .. })));
    }

    #[test]
    fn two_of_one_clock_take_one_place() {
        let mut checkpoints = checkpoints(Every::Asked);
        checkpoints.complete = vec![(3, "third".into()), (5, "fifth".into())];
        checkpoints.finish(Time::ZERO);
        order(&mut checkpoints);
        assert_eq!(complete(&mut checkpoints, 5), (5, vec!["third".into()]));
        assert_eq!(checkpoints.complete.iter().map(|(clock, _)| *clock).collect::<Vec<_>>(), [3, 5]);
    }

    #[test]
    fn a_failure_is_told_and_the_old_one_stays() {
        let mut checkpoints = checkpoints(Every::Steps(10));
        let first = order(&mut checkpoints);
        let outcome = CheckpointOutcome::Failed { why: "the disk is full".into() };
        checkpoints.take(Time::ZERO, shard(1), first.number, outcome);
        let Some(Step::Warn(line)) = checkpoints.poll() else { panic!("it is told") };
        let words =
            "the checkpoint at step 10 failed: server 1 core 0: the disk is full; old stays the newest";
        assert_eq!(line, words);
        assert_eq!(order(&mut checkpoints).at, 20);
    }

    #[test]
    fn those_who_ask_are_served_soon_and_told() {
        let mut checkpoints = checkpoints(Every::Steps(1000));
        assert_eq!(order(&mut checkpoints).at, 1000);
        let asker = NodeId::Admin(7);
        checkpoints.ask(Time::ZERO, asker);
        assert_eq!(order(&mut checkpoints).at, 6);
        // The job rests at version 5.
        assert_eq!(checkpoints.next_timeout(), Some(seconds(1.0)));
        checkpoints.handle_timeout(seconds(1.0));
        assert_eq!(order(&mut checkpoints).at, 5);
        assert_eq!(complete(&mut checkpoints, 5).0, 5);
        let Some(Step::Answer(told, Ok(_))) = checkpoints.poll() else { panic!("it is told") };
        assert_eq!((told, order(&mut checkpoints).at), (asker, 1000));
        // One that is near already serves them too.
        checkpoints.note_version(Time::ZERO, 999);
        checkpoints.ask(Time::ZERO, asker);
        assert_eq!(checkpoints.poll(), None);
        for second in 0..=MAX_ATTEMPTS + 1 {
            checkpoints.handle_timeout(seconds(f64::from(second) * 2.0));
        }
        let answer = std::iter::from_fn(|| checkpoints.poll()).find(|step| matches!(step, Step::Answer(..)));
        assert!(matches!(answer, Some(Step::Answer(_, Err(_)))), "nobody waits for ever: {answer:?}");
    }

    #[test]
    fn time_decides_where_it_is_to_and_a_job_that_rests_needs_none() {
        let mut checkpoints = checkpoints(Every::Time(Duration::from_secs(30)));
        assert_eq!((checkpoints.poll(), checkpoints.next_timeout()), (None, None));
        checkpoints.note_version(seconds(1.0), 6);
        assert_eq!(checkpoints.next_timeout(), Some(seconds(30.0)));
        checkpoints.handle_timeout(seconds(30.0));
        assert_eq!(order(&mut checkpoints).at, 7);
    }

    #[test]
    fn tables_that_nobody_pushes_are_taken_as_they_are() {
        let mut checkpoints = checkpoints(Every::Steps(10));
        let first = order(&mut checkpoints);
        saved(&mut checkpoints, 0, 12);
        checkpoints.note_progress(18);
        assert_eq!(checkpoints.poll(), None);
        checkpoints.note_progress(19);
        assert_eq!(order(&mut checkpoints), CheckpointOrder { takes_all: true, ..first });
        checkpoints.note_progress(20);
        assert_eq!(checkpoints.poll(), None);
    }

    #[test]
    fn a_job_that_ends_saves_what_it_has() {
        let mut checkpoints = checkpoints(Every::Steps(10));
        order(&mut checkpoints);
        checkpoints.note_version(Time::ZERO, 7);
        assert!(checkpoints.finish(Time::ZERO));
        let last = order(&mut checkpoints);
        assert_eq!((last.at, last.takes_all), (7, true));
        // What is known of versions may be old.
        checkpoints.take(Time::ZERO, shard(0), last.number, CheckpointOutcome::Missed { version: 8 });
        assert_eq!(order(&mut checkpoints).at, 8);
        assert_eq!((complete(&mut checkpoints, 8).0, checkpoints.poll()), (8, Some(Step::End)));
        let mut slow = self::checkpoints(Every::Asked);
        slow.finish(Time::ZERO);
        order(&mut slow);
        slow.handle_timeout(slow.next_timeout().expect("it has an end"));
        assert!(matches!([slow.poll(), slow.poll()], [Some(Step::Warn(_)), Some(Step::End)]));
    }
}
