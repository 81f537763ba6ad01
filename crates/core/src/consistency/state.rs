//! What the conditions of a (table, shard) see.

use crate::types::{Clock, Time, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

/// How much the newest interval weighs in a worker's average: about the last seven pushes matter.
const INTERVAL_WEIGHT: f64 = 0.25;

/// Progress of all live workers, the open round, and the version.
///
/// Conditions read it through getters; only the controller changes it. A push costs `O(log workers)`.
#[derive(Debug, Clone, Default)]
pub struct SyncState {
    v_train: Clock,
    workers: BTreeMap<WorkerId, WorkerState>,
    /// The same workers by progress, so that nobody has to be searched for.
    by_progress: BTreeMap<i64, BTreeSet<WorkerId>>,
    /// Live workers whose progress is at least `v_train`.
    count: u32,
    /// Gradients aggregated into the open and later rounds; a round without any has no entry.
    contributions: BTreeMap<Clock, u32>,
}

/// What is known about one live worker.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerState {
    progress: i64,
    pushed: Option<Clock>,
    last_push: Option<Time>,
    last_answer: Option<Time>,
    interval_s: Option<f64>,
    significance: Option<f64>,
}

impl WorkerState {
    /// The last iteration this worker is done with; -1 when none. Rounds closed before it joined count as done.
    pub fn progress(&self) -> i64 {
        self.progress
    }

    /// The clock of its last push.
    pub fn pushed(&self) -> Option<Clock> {
        self.pushed
    }

    /// When its last push was complete.
    pub fn last_push(&self) -> Option<Time> {
        self.last_push
    }

    /// Moving average of the seconds it needs for an iteration: from its last answered pull (or push, when it did not
    /// pull) to the next push. Waiting for others is left out, else a fast worker that waits would look slow.
    pub fn interval_s(&self) -> Option<f64> {
        self.interval_s
    }

    /// `|g| / |w|` of its last push, when measured.
    pub fn significance(&self) -> Option<f64> {
        self.significance
    }
}

impl SyncState {
    /// The table's version here: every round below it is closed. Also the number of the open round.
    pub fn v_train(&self) -> Clock {
        self.v_train
    }

    /// Live workers.
    pub fn n(&self) -> u32 {
        self.workers.len() as u32
    }

    /// Live workers that are done with the open round.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Live workers that are done with iteration `clock`.
    pub fn count_of(&self, clock: Clock) -> u32 {
        if clock == self.v_train {
            return self.count;
        }
        let done = self.by_progress.range(signed(clock)..);
        done.map(|(_, workers)| workers.len() as u32).sum()
    }

    /// Gradients that were aggregated into the open round; those of workers that left since stay in.
    pub fn contributions(&self) -> u32 {
        self.contributions.get(&self.v_train).copied().unwrap_or(0)
    }

    /// The live workers that are done with the open round.
    pub fn contributors(&self) -> impl Iterator<Item = WorkerId> {
        self.by_progress.range(signed(self.v_train)..).flat_map(|(_, workers)| workers.iter().copied())
    }

    /// The live workers that the open round still lacks, slowest first.
    pub fn missing(&self) -> impl Iterator<Item = WorkerId> {
        self.by_progress.range(..signed(self.v_train)).flat_map(|(_, workers)| workers.iter().copied())
    }

    /// The live worker that is furthest behind, and its progress.
    pub fn slowest(&self) -> Option<(WorkerId, i64)> {
        self.by_progress.first_key_value().and_then(first_of)
    }

    /// The live worker that is furthest ahead, and its progress.
    pub fn fastest(&self) -> Option<(WorkerId, i64)> {
        self.by_progress.last_key_value().and_then(first_of)
    }

    /// What is known about a live worker.
    pub fn worker(&self, worker: WorkerId) -> Option<&WorkerState> {
        self.workers.get(&worker)
    }

    /// All live workers, by rank.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerId, &WorkerState)> {
        self.workers.iter().map(|(&id, worker)| (id, worker))
    }

    /// How far this progress is ahead of the version: FluentPS's k. Negative when nothing is missing.
    pub fn gap(&self, progress: i64) -> i64 {
        progress.saturating_sub(signed(self.v_train))
    }

    /// Rounds that an answer to a worker of this progress lacks.
    pub fn staleness(&self, progress: i64) -> u64 {
        u64::try_from(self.gap(progress).saturating_add(1)).unwrap_or(0)
    }

    /// Adds a live worker. Rounds that are closed are nothing it could still push, so they count as done.
    pub(super) fn join(&mut self, worker: WorkerId, pushed: Option<Clock>) {
        let progress = pushed.map_or(-1, signed).max(signed(self.v_train) - 1);
        let state = WorkerState {
            progress,
            pushed,
            last_push: None,
            last_answer: None,
            interval_s: None,
            significance: None,
        };
        self.workers.insert(worker, state);
        self.insert_progress(worker, progress);
    }

    /// Removes a worker; what it contributed stays.
    pub(super) fn leave(&mut self, worker: WorkerId) -> Option<WorkerState> {
        let state = self.workers.remove(&worker)?;
        self.remove_progress(worker, state.progress);
        Some(state)
    }

    /// A live worker pushed `clock`.
    pub(super) fn pushed(&mut self, now: Time, worker: WorkerId, clock: Clock, significance: Option<f64>) {
        let Some(state) = self.workers.get_mut(&worker) else { return };
        if let Some(began) = state.last_push.max(state.last_answer) {
            let interval_s = now.since(began).as_secs_f64();
            state.interval_s = Some(match state.interval_s {
                Some(average) => average + INTERVAL_WEIGHT * (interval_s - average),
                None => interval_s,
            });
        }
        state.last_push = Some(now);
        state.pushed = Some(clock);
        state.significance = significance.filter(|value| value.is_finite());
        let (before, after) = (state.progress, state.progress.max(signed(clock)));
        state.progress = after;
        if after != before {
            self.remove_progress(worker, before);
            self.insert_progress(worker, after);
        }
    }

    /// A gradient was aggregated into the open round or a later one.
    pub(super) fn contributed(&mut self, round: Clock) {
        *self.contributions.entry(round).or_insert(0) += 1;
    }

    /// A pull was answered.
    pub(super) fn answered(&mut self, now: Time, worker: WorkerId) {
        if let Some(state) = self.workers.get_mut(&worker) {
            state.last_answer = Some(now);
        }
    }

    /// Closes the open round. Rounds after it that every live worker has passed and nobody contributed to are passed
    /// over in the same move: they could only be closed one by one, with nothing to step.
    pub(super) fn close_round(&mut self) {
        self.contributions.remove(&self.v_train);
        let closed = signed(self.v_train);
        let passed = self.slowest().map_or(0, |(_, progress)| unsigned(progress + 1));
        let filled = self.contributions.first_key_value().map_or(Clock::MAX, |(&round, _)| round);
        self.v_train = passed.min(filled).max(self.v_train + 1);
        let fell_behind = self.by_progress.range(closed..signed(self.v_train));
        self.count -= fell_behind.map(|(_, workers)| workers.len() as u32).sum::<u32>();
    }

    fn insert_progress(&mut self, worker: WorkerId, progress: i64) {
        self.by_progress.entry(progress).or_default().insert(worker);
        self.count += u32::from(progress >= signed(self.v_train));
    }

    fn remove_progress(&mut self, worker: WorkerId, progress: i64) {
        let at = self.by_progress.get_mut(&progress).expect("a live worker is filed under its progress");
        at.remove(&worker);
        if at.is_empty() {
            self.by_progress.remove(&progress);
        }
        self.count -= u32::from(progress >= signed(self.v_train));
    }
}

/// A clock as a progress. The controller refuses clocks that do not fit.
pub(super) fn signed(clock: Clock) -> i64 {
    i64::try_from(clock).unwrap_or(i64::MAX)
}

fn unsigned(progress: i64) -> Clock {
    Clock::try_from(progress).unwrap_or(0)
}

fn first_of((&progress, workers): (&i64, &BTreeSet<WorkerId>)) -> Option<(WorkerId, i64)> {
    workers.first().map(|&worker| (worker, progress))
}
