//! When checkpoints are made, and how far the one under way is. The files are the shards' and the workers'; the manifest, which makes a
//! checkpoint of them, is written last.

use super::config::Checkpointing;
use super::gathering::{Arrival, Gathering, Late};
use crate::checkpoint::{self, CheckpointPolicy, Every, Manifest, SavedFile, SavedTable, WorkerFile};
use crate::limits;
use crate::policy::Axis;
use crate::table::TableSpec;
use crate::types::{Clock, NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use crate::wire::{CheckpointOrder, CheckpointOutcome, FilePart, PartPlace, Plan};
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
/// Of a job without an archive.
const FOR_COMMANDS: CheckpointPolicy = CheckpointPolicy { every: Every::Asked, keep: 1 };

/// The checkpoints of a job.
#[derive(Debug)]
pub(super) struct Checkpoints {
    policy: CheckpointPolicy,
    /// Whether the job has an archive. Otherwise checkpoints are made for commands that read them.
    are_kept: bool,
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
    /// Those of them who read the checkpoint when it is complete.
    copiers: BTreeSet<NodeId>,
    /// Folders that are being read, by reader. They stay meanwhile.
    readers: BTreeMap<NodeId, String>,
    /// The job ends when this time has come, or its last checkpoint is complete.
    ends: Option<Time>,
    steps: VecDeque<Step>,
}

/// A checkpoint that is being made.
#[derive(Debug)]
struct UnderWay {
    order: CheckpointOrder,
    files: BTreeMap<ShardId, SavedFile>,
    gathering: Gathering,
    /// Workers were told of the order.
    is_told: bool,
    /// All files are here, and the manifest is written.
    is_completing: bool,
    since: Time,
    /// Once all files are written.
    manifest: Option<Box<Manifest>>,
}

/// How a checkpoint is asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    /// All workers rest at this clock, which is to be saved.
    pub(super) at: Option<Clock>,
    /// The asker reads it.
    pub(super) is_copy: bool,
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
        worker_files: Vec<WorkerFile>,
        keep: Vec<String>,
    },
    /// Tell workers that do not come to the order's clock to take part as they are.
    TakeAll(Vec<WorkerId>, CheckpointOrder),
    /// Ask a worker for a part of its file.
    Ask(WorkerId, PartPlace),
    /// Have a part of a worker's file written.
    Store {
        place: PartPlace,
        bytes: Vec<u8>,
        whole: SavedFile,
    },
    /// Write a line of the log.
    Note(String),
    Warn(String),
    /// Tell somebody who asked what came of it.
    Answer(NodeId, Result<String, String>),
    /// Tell somebody who reads it which files there are.
    Give(NodeId, Box<Manifest>),
    /// The job may end.
    End,
}

impl Checkpoints {
    /// The shards have entered the plan of a job that begins with a clock. So many orders were given before.
    pub(super) fn new(
        now: Time,
        config: Option<&Checkpointing>,
        run: u64,
        orders: u64,
        first: Clock,
        shards: impl Iterator<Item = ShardId>,
    ) -> Checkpoints {
        let mut checkpoints = Checkpoints {
            policy: config.and_then(|config| config.policy).unwrap_or(FOR_COMMANDS),
            are_kept: config.is_some_and(|config| config.policy.is_some()),
            run,
            shards: shards.collect(),
            number: orders,
            under_way: None,
            complete: config.map(|config| config.kept.clone()).unwrap_or_default(),
            version: first,
            saved: first,
            lead: 1,
            due: None,
            askers: BTreeSet::new(),
            attempts: 0,
            copiers: BTreeSet::new(),
            readers: BTreeMap::new(),
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
    pub(super) fn ask(&mut self, now: Time, asker: NodeId, asked: Asked) {
        if self.ends.is_some() {
            return self.steps.push_back(Step::Answer(asker, Err("the job ends".into())));
        }
        self.askers.insert(asker);
        self.attempts = 0;
        self.readers.remove(&asker);
        if asked.is_copy {
            self.copiers.insert(asker);
        }
        if let Some(at) = asked.at.filter(|at| *at >= self.version)
            && self.under_way.as_ref().is_none_or(|under_way| under_way.order.at != at)
        {
            self.version = at;
            self.under_way = None;
            return self.order_at(now, at, false);
        }
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
        self.copiers.remove(&asker);
        self.readers.remove(&asker);
    }

    /// Whether a command reads the checkpoint in this folder.
    pub(super) fn is_read_by(&self, asker: NodeId, folder: &str) -> bool {
        self.readers.get(&asker).is_some_and(|read| read == folder)
    }

    /// All files of the checkpoint under way are written, and this names them.
    pub(super) fn note_manifest(&mut self, manifest: Box<Manifest>) {
        if let Some(under_way) = self.under_way.as_mut().filter(|known| known.order.folder == manifest.folder)
        {
            under_way.manifest = Some(manifest);
        }
    }

    /// The job ends well: what it has come to is saved first. True if it has to wait for that.
    pub(super) fn finish(&mut self, now: Time) -> bool {
        if !self.are_kept {
            return false;
        }
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
                self.go_on(now);
            }
            CheckpointOutcome::Missed { version } => self.miss(now, version),
            CheckpointOutcome::Failed { why } => self.fail(now, &format!("{shard}: {why}")),
            // Every shard has something to save, if it be an empty file.
            CheckpointOutcome::Nothing => {}
        }
    }

    /// The order came too late for somebody who is at this version.
    fn miss(&mut self, now: Time, version: Clock) {
        self.version = self.version.max(version);
        self.lead = (self.lead * 2).min(LONGEST_LEAD);
        self.under_way = None;
        self.schedule(now);
    }

    /// These workers take part in the checkpoint that is ordered. Those that are to be told; none for an order that is given again.
    pub(super) fn expect_workers(&mut self, running: &[WorkerId]) -> Vec<WorkerId> {
        match self.under_way.as_mut().filter(|under_way| !under_way.is_told) {
            Some(under_way) => {
                under_way.is_told = true;
                under_way.gathering.expect(running.iter().copied());
                running.to_vec()
            }
            None => Vec::new(),
        }
    }

    /// A worker says what came of an order.
    pub(super) fn take_of_worker(
        &mut self,
        now: Time,
        worker: WorkerId,
        number: u64,
        outcome: CheckpointOutcome,
    ) {
        let Some(under_way) = self.under_way.as_mut().filter(|known| known.order.number == number) else {
            return;
        };
        match outcome {
            CheckpointOutcome::Saved { file, .. } => match under_way.gathering.offer(now, worker, file) {
                Ok(()) => self.go_on(now),
                Err(why) => self.fail(now, &format!("{worker}: {why}")),
            },
            CheckpointOutcome::Nothing => {
                under_way.gathering.leave_out(now, worker);
                self.go_on(now);
            }
            CheckpointOutcome::Missed { version } => self.miss(now, version.min(limits::MAX_CLOCK)),
            CheckpointOutcome::Failed { why } => self.fail(now, &format!("{worker}: {why}")),
        }
    }

    /// A worker is gone. If what it kept is not here, it will not be in the checkpoint under way, which another one follows: that of the
    /// workers that are left.
    pub(super) fn part_with(&mut self, now: Time, worker: WorkerId) {
        let needs = |under_way: &mut UnderWay| !under_way.is_completing && under_way.gathering.needs(worker);
        if self.under_way.take_if(needs).is_some() {
            self.schedule(now);
        }
    }

    /// A worker has sent a part of its file.
    pub(super) fn take_part(&mut self, now: Time, worker: WorkerId, part: FilePart) {
        let FilePart { place, bytes, refusal } = part;
        let Some(under_way) = &mut self.under_way else { return };
        let arrival = under_way.gathering.take(now, worker, &place, bytes.len());
        match (refusal, arrival) {
            (_, Arrival::Unasked) => {}
            (Some(why), _) | (None, Arrival::Damaged(why)) => self.fail(now, &format!("{worker}: {why}")),
            (None, Arrival::Store(whole)) => self.steps.push_back(Step::Store { place, bytes, whole }),
        }
    }

    /// A part of a worker's file is written, or is not.
    pub(super) fn note_stored(&mut self, now: Time, place: &PartPlace, outcome: Result<u64, String>) {
        let Some(under_way) = self.under_way.as_mut().filter(|known| known.order.folder == place.folder)
        else {
            return;
        };
        match outcome {
            Ok(bytes) => {
                under_way.gathering.stored(now, place, bytes);
                let asked = under_way.gathering.asked();
                self.steps.extend(asked.map(|(worker, place)| Step::Ask(worker, place)));
                self.go_on(now);
            }
            Err(why) => self.fail(now, &why),
        }
    }

    /// The order under way, if this worker takes part in it.
    pub(super) fn order_for(&self, worker: WorkerId) -> Option<&CheckpointOrder> {
        let under_way = self.under_way.as_ref().filter(|known| known.gathering.awaits(worker))?;
        Some(&under_way.order)
    }

    /// The part of its file that a worker is asked for.
    pub(super) fn asked_of(&self, worker: WorkerId) -> Option<PartPlace> {
        let (asked, place) = self.under_way.as_ref()?.gathering.asked()?;
        (asked == worker).then_some(place)
    }

    /// Does what the checkpoint under way needs next: files of workers are read, and when all are there it is completed.
    fn go_on(&mut self, now: Time) {
        let Some(under_way) = self.under_way.as_mut().filter(|known| !known.is_completing) else { return };
        let asked = under_way.gathering.next_read();
        self.steps.extend(asked.map(|(worker, place)| Step::Ask(worker, place)));
        if under_way.files.len() < self.shards.len() {
            return;
        }
        under_way.gathering.servers_are_done(now);
        if let Some(worker_files) = under_way.gathering.files() {
            under_way.is_completing = true;
            let CheckpointOrder { folder, at: clock, .. } = under_way.order.clone();
            let files = under_way.files.values().cloned().collect();
            let keep = self.keep(clock);
            self.steps.push_back(Step::Complete { folder, clock, files, worker_files, keep });
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
        if self.are_kept {
            self.complete.retain(|(clock, _)| *clock != at);
            self.complete.push((at, folder.to_owned()));
            let surplus = self.complete.len().saturating_sub(self.policy.keep as usize);
            self.complete.drain(..surplus);
        }
        (self.saved, self.lead) = (at, 1);
        let sentence = format!("checkpoint {folder} is complete");
        if self.are_kept {
            self.steps.push_back(Step::Note(sentence.clone()));
        }
        if let Some(manifest) = under_way.manifest {
            for asker in std::mem::take(&mut self.copiers) {
                self.askers.remove(&asker);
                self.readers.insert(asker, folder.to_owned());
                self.steps.push_back(Step::Give(asker, manifest.clone()));
            }
        }
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
        let late = self.under_way.as_mut().and_then(|under_way| under_way.gathering.handle_timeout(now));
        match (late, &mut self.under_way) {
            (Some(Late::TakeAll(workers)), Some(under_way)) => {
                let order = CheckpointOrder { takes_all: true, ..under_way.order.clone() };
                self.steps.push_back(Step::TakeAll(workers, order));
            }
            (Some(Late::LeftOut(workers)), Some(_)) => {
                let names: Vec<String> = workers.iter().map(WorkerId::to_string).collect();
                let line =
                    format!("what {} kept is not in the checkpoint: it did not come", names.join(", "));
                self.steps.push_back(Step::Warn(line));
                self.go_on(now);
            }
            _ => {}
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
        let late = self.under_way.as_ref().and_then(|under_way| under_way.gathering.next_timeout());
        [due, self.patience(), self.ends, late].into_iter().flatten().min()
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
        let order = CheckpointOrder {
            number: self.number,
            at,
            folder,
            takes_all,
            is_kept: self.are_kept,
            keep: self.all_complete(),
        };
        self.steps.push_back(Step::Order(order.clone()));
        self.under_way = Some(UnderWay {
            gathering: Gathering::new(&order.folder, order.is_kept),
            order,
            files: BTreeMap::new(),
            is_told: false,
            is_completing: false,
            since: now,
            manifest: None,
        });
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
        self.copiers.clear();
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
        let surplus: Vec<String> = others.drain(..surplus.min(others.len())).collect();
        others.extend(surplus.into_iter().filter(|folder| self.is_read(folder)));
        others.extend(self.surplus_read());
        others
    }

    /// Folders of checkpoints that are complete, or are read though newer ones have taken their place.
    fn all_complete(&self) -> Vec<String> {
        let complete = self.complete.iter().map(|(_, folder)| folder.clone());
        complete.chain(self.surplus_read()).take(limits::MAX_CHECKPOINTS).collect()
    }

    fn is_read(&self, folder: &String) -> bool {
        self.readers.values().any(|read| read == folder)
    }

    /// Folders that are read, and would not be kept otherwise.
    fn surplus_read(&self) -> Vec<String> {
        let is_complete = |folder: &&String| self.complete.iter().any(|(_, complete)| complete == *folder);
        let read: BTreeSet<&String> = self.readers.values().filter(|folder| !is_complete(folder)).collect();
        read.into_iter().cloned().collect()
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
        worker_files: Vec::new(),
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
            policy: Some(CheckpointPolicy { every, keep: 2 }),
            resume: None,
            kept: vec![(3, "old".into())],
        };
        Checkpoints::new(Time::ZERO, Some(&config), 1, 0, 5, (0..2).map(shard))
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
        let Some(Step::Complete { folder, clock, files, keep, .. }) = checkpoints.poll() else {
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
        checkpoints.ask(Time::ZERO, asker, Asked { at: None, is_copy: false });
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
        checkpoints.ask(Time::ZERO, asker, Asked { at: None, is_copy: false });
        assert_eq!(checkpoints.poll(), None);
        for second in 0..=MAX_ATTEMPTS + 1 {
            checkpoints.handle_timeout(seconds(f64::from(second) * 2.0));
        }
        let answer = std::iter::from_fn(|| checkpoints.poll()).find(|step| matches!(step, Step::Answer(..)));
        assert!(matches!(answer, Some(Step::Answer(_, Err(_)))), "nobody waits for ever: {answer:?}");
    }

    #[test]
    fn a_command_that_reads_a_checkpoint_finds_it_until_it_goes() {
        let (reader, idle) = (NodeId::Admin(7), Asked { at: Some(8), is_copy: true });
        let mut passing = Checkpoints::new(Time::ZERO, None, 1, 0, 5, (0..2).map(shard));
        assert!(!passing.finish(Time::ZERO) && passing.poll().is_none(), "nothing is kept");
        passing.ask(Time::ZERO, reader, idle);
        // Where all workers rest is known: no other version is tried first.
        let asked = order(&mut passing);
        assert_eq!((asked.at, asked.is_kept), (8, false));
        let mut kept = checkpoints(Every::Steps(10));
        order(&mut kept);
        kept.ask(Time::ZERO, reader, idle);
        assert!(order(&mut kept).is_kept);
        for checkpoints in [&mut passing, &mut kept] {
            (0..2).for_each(|server| saved(checkpoints, server, 8));
            let Some(Step::Complete { folder, clock: 8, files, .. }) = checkpoints.poll() else {
                panic!("all saved")
            };
            let manifest =
                Manifest { folder: folder.clone(), files, ..crate::checkpoint::tests::manifest(&[]) };
            checkpoints.note_manifest(Box::new(manifest));
            assert!(!checkpoints.is_read_by(reader, &folder));
            checkpoints.completed(Time::ZERO, &folder, Ok(()));
            let given = std::iter::from_fn(|| checkpoints.poll()).find(|step| matches!(step, Step::Give(..)));
            assert!(
                matches!(given, Some(Step::Give(NodeId::Admin(7), manifest)) if manifest.files.len() == 2)
            );
            assert!(
                checkpoints.is_read_by(reader, &folder) && !checkpoints.is_read_by(NodeId::Admin(8), &folder)
            );
        }
        // Newer ones take its place, and it stays for its reader.
        let read = checkpoint::folder(8, 1, 2);
        for clock in [10, 20] {
            kept.note_version(Time::ZERO, clock - 1);
            let keep = complete_next(&mut kept, clock);
            assert!(keep.contains(&read), "{clock}: {keep:?}");
        }
        kept.forget(reader);
        assert!(!complete_next(&mut kept, 30).contains(&read));
    }

    /// Completes the order under way, or the one that is given next; what is kept beside it.
    fn complete_next(checkpoints: &mut Checkpoints, clock: Clock) -> Vec<String> {
        while checkpoints.poll().is_some() {}
        assert_eq!(checkpoints.order().map(|order| order.at), Some(clock));
        complete(checkpoints, clock).1
    }

    #[test]
    fn what_workers_keep_is_read_before_the_manifest_is_written() {
        let mut checkpoints = checkpoints(Every::Steps(10));
        let first = order(&mut checkpoints);
        let [one, other] = [WorkerId(0), WorkerId(1)];
        assert_eq!(checkpoints.expect_workers(&[one, other]), [one, other]);
        assert_eq!(
            checkpoints.expect_workers(&[one, other]),
            [],
            "an order that is given again is the shards'"
        );
        assert_eq!(checkpoints.order_for(one), Some(&first));
        let file = SavedFile { name: checkpoint::worker_file(one), bytes: 3, digest: Default::default() };
        let has = CheckpointOutcome::Saved { file: file.clone(), version: 10 };
        checkpoints.take_of_worker(Time::ZERO, one, first.number, has.clone());
        let Some(Step::Ask(asked, place)) = checkpoints.poll() else { panic!("it is read") };
        assert_eq!((asked, checkpoints.asked_of(one).as_ref()), (one, Some(&place)));
        (0..2).for_each(|server| saved(&mut checkpoints, server, 10));
        let part = FilePart { place: place.clone(), bytes: vec![1, 2, 3], refusal: None };
        checkpoints.take_part(Time::ZERO, one, part.clone());
        assert!(matches!(checkpoints.poll(), Some(Step::Store { whole, .. }) if whole == file));
        checkpoints.note_stored(Time::ZERO, &place, Ok(3));
        assert_eq!(checkpoints.poll(), None, "the other worker has yet to say something");
        checkpoints.take_of_worker(Time::ZERO, other, first.number, CheckpointOutcome::Nothing);
        let Some(Step::Complete { worker_files, .. }) = checkpoints.poll() else { panic!("all is here") };
        assert_eq!(worker_files, [WorkerFile { worker: one, file }]);
        // It may leave now.
        checkpoints.part_with(Time::ZERO, one);
        checkpoints.completed(Time::ZERO, &first.folder, Ok(()));
        assert!(matches!(checkpoints.poll(), Some(Step::Note(_))));
        // One that goes too soon takes what it kept along: the next checkpoint is of those who are left.
        let second = order(&mut checkpoints);
        checkpoints.expect_workers(&[one, other]);
        (0..2).for_each(|server| saved(&mut checkpoints, server, 20));
        checkpoints.part_with(Time::ZERO, other);
        let third = order(&mut checkpoints);
        assert_eq!((second.at, third.at), (20, 30));
        checkpoints.expect_workers(&[one]);
        let missed = CheckpointOutcome::Missed { version: 31 };
        checkpoints.take_of_worker(Time::ZERO, one, third.number, missed);
        let fourth = order(&mut checkpoints);
        assert_eq!(fourth.at, 40);
        // What cannot be written is told.
        checkpoints.expect_workers(&[one]);
        checkpoints.take_of_worker(Time::ZERO, one, fourth.number, has);
        let Some(Step::Ask(_, place)) = checkpoints.poll() else { panic!("it is read") };
        checkpoints.take_part(Time::ZERO, one, FilePart { place: place.clone(), ..part });
        checkpoints.poll();
        checkpoints.note_stored(Time::ZERO, &place, Err("the disk is full".into()));
        let Some(Step::Warn(line)) = checkpoints.poll() else { panic!("it is told") };
        assert!(line.contains("step 40 failed: the disk is full; step-0000000010"), "{line}");
    }

    #[test]
    fn a_worker_that_does_not_answer_is_left_out_in_the_end() {
        let mut checkpoints = checkpoints(Every::Steps(10));
        let first = order(&mut checkpoints);
        checkpoints.expect_workers(&[WorkerId(0)]);
        (0..2).for_each(|server| saved(&mut checkpoints, server, 10));
        checkpoints.handle_timeout(seconds(3.0));
        let told = CheckpointOrder { takes_all: true, ..first };
        assert_eq!(checkpoints.poll(), Some(Step::TakeAll(vec![WorkerId(0)], told)));
        checkpoints.handle_timeout(checkpoints.next_timeout().expect("it is waited for"));
        assert!(matches!(checkpoints.poll(), Some(Step::Warn(line)) if line.contains("what worker 0 kept")));
        assert!(
            matches!(checkpoints.poll(), Some(Step::Complete { worker_files, .. }) if worker_files.is_empty())
        );
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
