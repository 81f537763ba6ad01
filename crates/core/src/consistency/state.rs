//! State of a (table, shard) that conditions see.

use crate::limits;
use crate::types::{Clock, Time, WorkerId};
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// How much the newest interval weighs in a worker's average: about the last seven pushes matter.
const INTERVAL_WEIGHT: f64 = 0.25;

/// Progress of all live workers, the open round, and the version.
///
/// Conditions read it through getters; only the controller changes it. A push costs the same whatever the number of
/// workers and takes no memory; closing a round looks over all of them, which is once for a push of each.
#[derive(Debug, Clone, Default)]
pub struct SyncState {
    v_train: Clock,
    /// When the version last advanced.
    opened: Option<Time>,
    /// By rank, which is dense; `None` for those that are not there, or no longer.
    workers: Vec<Option<WorkerState>>,
    /// The progress of each, side by side for a quick look over all; [`ABSENT`] for those that are not there.
    progress: Vec<i64>,
    /// Registered workers.
    n: u32,
    /// Registered workers whose progress is at least `v_train`.
    count: u32,
    /// Workers whose first round is later than the open one, with that round: they count from then on. Few, and seldom any.
    joining: Vec<(WorkerId, Clock)>,
    /// Workers that push nothing until further notice.
    idle: Vec<WorkerId>,
    /// [`SyncState::imbalance`] when the version last advanced.
    imbalance: f64,
    /// Workers that have said how many samples their gradients are the mean of, and the sum of these numbers.
    samples: (u32, u64),
    /// Gradients aggregated into the open and later rounds, ascending; a round without any has no entry.
    contributions: Vec<Contributions>,
}

/// Gradients that were aggregated into a round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Contributions {
    round: Clock,
    gradients: u32,
    /// The sum of their weights.
    weight: f32,
}

/// Progress of a rank without a worker: below any that a worker can have.
const ABSENT: i64 = i64::MIN;

/// What an image keeps of a state. The rest follows from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct StateImage {
    v_train: Clock,
    opened: Option<Time>,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    workers: Vec<Option<WorkerState>>,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    joining: Vec<(WorkerId, Clock)>,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    idle: Vec<WorkerId>,
    imbalance: f64,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_ROUNDS_AHEAD as usize + 1 }>")]
    contributions: Vec<Contributions>,
}

/// State of one live worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerState {
    progress: i64,
    first: Clock,
    pushed: Option<Clock>,
    last_push: Option<Time>,
    last_answer: Option<Time>,
    interval_s: Option<f64>,
    /// The last intervals, the newest first.
    recent_s: [Option<f64>; 3],
    significance: Option<f64>,
    samples: Option<u32>,
    /// Highest progress of its delayed pulls, so that a pull that is sent again is not another DPR.
    delayed: Option<i64>,
}

impl WorkerState {
    /// The last iteration this worker is done with; -1 when none. Rounds before its first one count as done.
    pub fn progress(&self) -> i64 {
        self.progress
    }

    /// The first round that it takes part in.
    pub fn first(&self) -> Clock {
        self.first
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

    /// Median of the seconds of its last three iterations, each from when the worker had its parameters to its push. One unusual
    /// iteration does not change it, two in a row do.
    pub fn typical_interval_s(&self) -> Option<f64> {
        Some(match self.recent_s {
            [Some(a), Some(b), Some(c)] => f64::max(a.min(b), a.max(b).min(c)),
            // The first one may have been waiting for the job to start.
            [Some(a), Some(b), None] => a.min(b),
            [first, ..] => first?,
        })
    }

    /// `|g| / |w|` of its last push, when measured.
    pub fn significance(&self) -> Option<f64> {
        self.significance
    }
}

impl SyncState {
    /// What an image keeps of it.
    pub(super) fn image(&self) -> StateImage {
        StateImage {
            v_train: self.v_train,
            opened: self.opened,
            workers: self.workers.clone(),
            joining: self.joining.clone(),
            idle: self.idle.clone(),
            imbalance: self.imbalance,
            contributions: self.contributions.clone(),
        }
    }

    /// The state that an image was made of. The error says why there can be no such state.
    pub(super) fn from_image(image: StateImage) -> Result<SyncState, String> {
        let StateImage { v_train, opened, workers, joining, idle, imbalance, contributions } = image;
        let mut state = SyncState {
            v_train,
            opened,
            joining,
            idle,
            imbalance,
            contributions,
            progress: workers
                .iter()
                .map(|known| known.as_ref().map_or(ABSENT, |known| known.progress))
                .collect(),
            workers,
            ..SyncState::default()
        };
        state.check_image()?;
        state.n = state.live().count() as u32;
        state.count = state.count_from(signed(v_train));
        let said = state.workers.iter().flatten().filter_map(|worker| worker.samples);
        state.samples = (said.clone().count() as u32, said.map(u64::from).sum());
        state.check()?;
        Ok(state)
    }

    /// Whether numbers of an image are such that nothing overflows by them, and lists name each live worker once.
    fn check_image(&self) -> Result<(), String> {
        let is_clock = |clock: Clock| clock <= limits::MAX_CLOCK;
        let is_time = |seconds: Option<f64>| seconds.is_none_or(|seconds| (0.0..=1e9).contains(&seconds));
        for (worker, known) in self.workers() {
            let clocks = [Some(known.first), known.pushed, Some(unsigned(known.progress))];
            let is_fine = clocks.into_iter().flatten().all(is_clock)
                && known.progress >= -1
                && known.recent_s.into_iter().chain([known.interval_s]).all(is_time)
                && known.significance.is_none_or(f64::is_finite)
                && known.samples.is_none_or(|samples| (1..=limits::MAX_SAMPLES).contains(&samples));
            if !is_fine {
                return Err(format!("{worker} cannot be at {known:?}"));
            }
        }
        let is_joining = |(worker, first): &(WorkerId, Clock)| {
            *first > self.v_train && self.is_done(*worker, self.v_train)
        };
        let is_idle = |worker: &WorkerId| self.worker(*worker).is_some();
        let is_weight = |known: &Contributions| is_clock(known.round) && known.weight.is_finite();
        let is_fine = is_clock(self.v_train)
            && self.joining.iter().all(is_joining)
            && is_distinct(self.joining.iter().map(|(worker, _)| *worker))
            && self.idle.iter().all(is_idle)
            && is_distinct(self.idle.iter().copied())
            && (0.0..=1.0).contains(&self.imbalance)
            && self.contributions.iter().all(is_weight);
        if is_fine { Ok(()) } else { Err("the state of its workers does not fit together".into()) }
    }

    /// The state of nobody at a version.
    pub(super) fn empty_at(version: Clock) -> SyncState {
        SyncState { v_train: version, ..SyncState::default() }
    }

    /// The table's version here: every round below it is closed. Also the number of the open round.
    pub fn v_train(&self) -> Clock {
        self.v_train
    }

    /// Live workers that the open round is for: without those whose first round is a later one, and those that wait at a barrier and
    /// have not pushed it.
    pub fn n(&self) -> u32 {
        let idle = self.idle.iter().filter(|worker| self.is_excused(**worker)).count();
        self.n - self.joining.len() as u32 - idle as u32
    }

    /// Whether the open round does without a live worker that has not pushed it: the worker waits at a barrier.
    pub fn is_excused(&self, worker: WorkerId) -> bool {
        self.idle.contains(&worker)
            && self.worker(worker).is_some_and(|known| known.progress < signed(self.v_train))
    }

    /// Whether some live worker waits at a barrier.
    pub fn has_idle(&self) -> bool {
        self.idle.iter().any(|worker| self.worker(*worker).is_some())
    }

    /// Of these, the ones that are done with the open round.
    pub fn count(&self) -> u32 {
        // The progress of a worker before its first round is that round's predecessor, which is not closed.
        self.count - self.joining.len() as u32
    }

    /// Of these, the ones that are done with iteration `clock`.
    pub fn count_of(&self, clock: Clock) -> u32 {
        let joining = self.joining.iter().filter(|(worker, _)| self.is_done(*worker, clock)).count();
        self.count_from(signed(clock)) - joining as u32
    }

    /// Whether no worker is left to push the open round, and a joining worker will push a later one.
    pub fn waits_for_joining(&self) -> bool {
        self.n() == 0 && !self.joining.is_empty()
    }

    /// Gradients that were aggregated into the open round; those of workers that left since stay in.
    pub fn contributions(&self) -> u32 {
        self.open_contributions().map_or(0, |open| open.gradients)
    }

    /// The sum of their weights.
    pub fn weight(&self) -> f32 {
        self.open_contributions().map_or(0.0, |open| open.weight)
    }

    /// The live workers that are done with the open round, slowest first.
    pub fn contributors(&self) -> impl Iterator<Item = WorkerId> {
        self.by_progress(|progress, v_train| progress >= v_train)
    }

    /// The live workers that the open round still lacks, slowest first.
    pub fn missing(&self) -> impl Iterator<Item = WorkerId> {
        self.by_progress(|progress, v_train| progress < v_train)
    }

    /// When the version last advanced; `None` before it has.
    pub fn opened(&self) -> Option<Time> {
        self.opened
    }

    /// The registered worker that is furthest behind, and its progress.
    pub fn slowest(&self) -> Option<(WorkerId, i64)> {
        self.live().min_by_key(|&(worker, progress)| (progress, worker))
    }

    /// The registered worker that is furthest ahead, and its progress.
    pub fn fastest(&self) -> Option<(WorkerId, i64)> {
        self.live().max_by_key(|&(worker, progress)| (progress, worker))
    }

    /// The share of its time that the fastest worker would wait for the slowest in lockstep, by their seconds per iteration when the
    /// version last advanced; 0 when they are not known.
    pub fn imbalance(&self) -> f64 {
        self.imbalance
    }

    /// When a live worker began the iteration that it is at, if it waits for one version after the other: when the version advanced that it
    /// waited for, when its pull was answered, or when it last pushed. Versions that are broadcast are not pulled.
    pub fn began(&self, worker: &WorkerState) -> Option<Time> {
        let waited = self.opened.filter(|_| worker.progress + 1 == signed(self.v_train));
        worker.last_push.max(worker.last_answer).max(waited)
    }

    /// State of a live worker.
    pub fn worker(&self, worker: WorkerId) -> Option<&WorkerState> {
        self.workers.get(worker.0 as usize)?.as_ref()
    }

    /// All live workers, by rank.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerId, &WorkerState)> {
        (0..).map(WorkerId).zip(&self.workers).filter_map(|(id, worker)| Some((id, worker.as_ref()?)))
    }

    /// How far this progress is ahead of the version: FluentPS's k. Negative when nothing is missing.
    pub fn gap(&self, progress: i64) -> i64 {
        progress.saturating_sub(signed(self.v_train))
    }

    /// Rounds that an answer to a worker of this progress lacks.
    pub fn staleness(&self, progress: i64) -> u64 {
        u64::try_from(self.gap(progress).saturating_add(1)).unwrap_or(0)
    }

    /// The share of a gradient of so many samples among one from each worker. A worker that has not said how many samples its gradients
    /// are of counts as having the same.
    pub fn share(&self, samples: u32) -> f32 {
        let of = |known: Option<u32>| u64::from(known.unwrap_or(samples));
        let unknown = u64::from(self.n - self.samples.0) * u64::from(samples);
        let of_joining =
            |(worker, _): &(WorkerId, Clock)| of(self.worker(*worker).and_then(|known| known.samples));
        let joining: u64 = self.joining.iter().map(of_joining).sum();
        let all = self.samples.1 + unknown - joining;
        // A worker that joins pushes before its first round is the open one: the others' samples alone may be fewer than its own.
        samples as f32 / all.max(u64::from(samples)) as f32
    }

    /// A worker's gradients are the mean of so many samples.
    pub(super) fn note_samples(&mut self, worker: WorkerId, samples: u32) {
        let Some(state) = self.worker_mut(worker) else { return };
        let before = state.samples.replace(samples);
        let (known, sum) = self.samples;
        let sum = sum + u64::from(samples) - u64::from(before.unwrap_or(0));
        self.samples = (known + u32::from(before.is_none()), sum);
    }

    /// All rounds before this one are closed, and nothing has been pushed since. Workers that are here owe it.
    pub(super) fn begin_at(&mut self, version: Clock) {
        let workers: Vec<WorkerId> = self.workers().map(|(worker, _)| worker).collect();
        workers.iter().for_each(|worker| _ = self.leave(*worker));
        self.v_train = version;
        workers.into_iter().for_each(|worker| self.join(worker, version));
    }

    /// Adds a live worker that owes rounds from `first` on, which is not closed. Earlier ones count as done.
    pub(super) fn join(&mut self, worker: WorkerId, first: Clock) {
        let progress = signed(first) - 1;
        let state = WorkerState {
            progress,
            first,
            pushed: None,
            last_push: None,
            last_answer: None,
            interval_s: None,
            recent_s: [None; 3],
            significance: None,
            samples: None,
            delayed: None,
        };
        let rank = worker.0 as usize;
        if self.workers.len() <= rank {
            self.workers.resize(rank + 1, None);
            self.progress.resize(rank + 1, ABSENT);
        }
        self.n += u32::from(self.workers[rank].is_none());
        self.workers[rank] = Some(state);
        self.set_progress(worker, progress);
        if first > self.v_train {
            self.joining.push((worker, first));
        }
    }

    /// From now on these workers, and no others, push nothing before a clock: one that has left iterations out is done with them, and
    /// one that waits at a barrier ([`Clock::MAX`]) is not waited for.
    pub(super) fn set_idle(&mut self, idle: &[(WorkerId, Clock)]) {
        self.idle.clear();
        let furthest = self.v_train.saturating_add(limits::MAX_CLOCK_SKIP);
        for &(worker, until) in idle {
            match self.worker_mut(worker) {
                Some(_) if until == Clock::MAX => self.idle.push(worker),
                Some(known) if known.progress < signed(until.min(furthest)) - 1 => {
                    known.progress = signed(until.min(furthest)) - 1;
                    let progress = known.progress;
                    self.set_progress(worker, progress);
                }
                _ => {}
            }
        }
    }

    /// A worker that has pushed nothing yet owes rounds from a later one on.
    pub(super) fn postpone(&mut self, worker: WorkerId, first: Clock) {
        if self.worker(worker).is_some_and(|known| known.pushed.is_none() && known.first < first) {
            let idle = self.idle.clone();
            self.leave(worker);
            self.join(worker, first);
            self.idle = idle;
        }
    }

    /// Removes a worker; what it contributed stays.
    pub(super) fn leave(&mut self, worker: WorkerId) -> Option<WorkerState> {
        let state = self.workers.get_mut(worker.0 as usize)?.take()?;
        self.joining.retain(|(joining, _)| *joining != worker);
        self.idle.retain(|idle| *idle != worker);
        self.n -= 1;
        if let Some(samples) = state.samples {
            self.samples = (self.samples.0 - 1, self.samples.1 - u64::from(samples));
        }
        self.set_progress(worker, ABSENT);
        Some(state)
    }

    /// A live worker pushed `clock`.
    pub(super) fn pushed(&mut self, now: Time, worker: WorkerId, clock: Clock, significance: Option<f64>) {
        let began = self.worker(worker).and_then(|state| self.began(state));
        let Some(state) = self.worker_mut(worker) else { return };
        if let Some(began) = began {
            let [last, before, _] = state.recent_s;
            state.recent_s = [Some(now.since(began).as_secs_f64()), last, before];
        }
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
            self.set_progress(worker, after);
        }
    }

    /// A gradient of this weight was aggregated into the open round or a later one.
    pub(super) fn contributed(&mut self, round: Clock, weight: f32) {
        let at = self.contributions.partition_point(|known| known.round < round);
        match self.contributions.get_mut(at) {
            Some(known) if known.round == round => {
                known.gradients += 1;
                known.weight += weight;
            }
            _ => self.contributions.insert(at, Contributions { round, gradients: 1, weight }),
        }
    }

    /// A pull of this progress was answered. A worker that has pushed since did not wait for it, but computed on what it had.
    pub(super) fn answered(&mut self, now: Time, worker: WorkerId, progress: i64) {
        if let Some(state) = self.worker_mut(worker).filter(|state| progress >= state.progress) {
            state.last_answer = Some(now);
        }
    }

    /// A pull of this progress is delayed. True when the worker had none of this progress or a higher one before.
    pub(super) fn delayed(&mut self, worker: WorkerId, progress: i64) -> bool {
        let Some(state) = self.worker_mut(worker) else { return false };
        let is_new = state.delayed.is_none_or(|last| progress > last);
        if is_new {
            state.delayed = Some(progress);
        }
        is_new
    }

    /// Closes the open round. Rounds after it that every live worker has passed and nobody contributed to are passed
    /// over in the same move: they could only be closed one by one, with nothing to step.
    pub(super) fn close_round(&mut self, now: Time) {
        self.opened = Some(now);
        if self.contributions() > 0 {
            self.contributions.remove(0);
        }
        let filled = self.contributions.first().map(|known| known.round);
        let mut slowest = i64::MAX;
        for &progress in &self.progress {
            slowest = slowest.min(if progress == ABSENT { i64::MAX } else { progress });
        }
        let passed = if self.n > 0 { unsigned(slowest.saturating_add(1)) } else { filled.unwrap_or(0) };
        self.v_train = passed.min(filled.unwrap_or(Clock::MAX)).max(self.v_train + 1);
        self.count = self.count_from(signed(self.v_train));
        let v_train = self.v_train;
        self.joining.retain(|(_, first)| *first > v_train);
    }

    /// Takes [`SyncState::imbalance`] of the workers as they are now.
    pub(super) fn measure(&mut self) {
        self.imbalance = imbalance(self.workers.iter().flatten().filter_map(WorkerState::interval_s));
    }

    /// Compares the counts with the workers that are counted.
    pub(super) fn check(&self) -> Result<(), String> {
        let progress = |worker: &Option<WorkerState>| worker.as_ref().map_or(ABSENT, |state| state.progress);
        if !self.workers.iter().map(progress).eq(self.progress.iter().copied()) {
            return Err(format!("progress is kept as {:?} for {:?}", self.progress, self.workers));
        }
        let (n, count) = (self.live().count() as u32, self.count_from(signed(self.v_train)));
        if (n, count) != (self.n, self.count) {
            return Err(format!(
                "{count} of {n} workers are done with round {}, and {} of {} are counted",
                self.v_train, self.count, self.n
            ));
        }
        let said = self.workers.iter().flatten().filter_map(|worker| worker.samples);
        let samples = (said.clone().count() as u32, said.map(u64::from).sum());
        if samples != self.samples {
            return Err(format!("workers have {samples:?} samples, and {:?} are counted", self.samples));
        }
        let rounds = &self.contributions;
        let are_open = rounds.first().is_none_or(|known| known.round >= self.v_train);
        let is_empty = |known: &Contributions| known.gradients == 0 || known.weight <= 0.0;
        if !are_open || rounds.iter().any(is_empty) || !rounds.is_sorted_by(|a, b| a.round < b.round) {
            return Err(format!("contributions to rounds from {} on are {rounds:?}", self.v_train));
        }
        Ok(())
    }

    fn open_contributions(&self) -> Option<&Contributions> {
        self.contributions.first().filter(|known| known.round == self.v_train)
    }

    fn worker_mut(&mut self, worker: WorkerId) -> Option<&mut WorkerState> {
        self.workers.get_mut(worker.0 as usize)?.as_mut()
    }

    fn is_done(&self, worker: WorkerId, clock: Clock) -> bool {
        self.worker(worker).is_some_and(|known| known.progress >= signed(clock))
    }

    /// Registered workers that are done with iteration `progress`.
    fn count_from(&self, progress: i64) -> u32 {
        let mut count = 0;
        for &of_one in &self.progress {
            count += u32::from(of_one >= progress);
        }
        count
    }

    fn set_progress(&mut self, worker: WorkerId, progress: i64) {
        let open = signed(self.v_train);
        let before = std::mem::replace(&mut self.progress[worker.0 as usize], progress);
        self.count += u32::from(progress >= open);
        self.count -= u32::from(before >= open);
    }

    fn live(&self) -> impl Iterator<Item = (WorkerId, i64)> {
        let all = (0..).map(WorkerId).zip(self.progress.iter().copied());
        all.filter(|&(_, progress)| progress != ABSENT)
    }

    fn by_progress(&self, wanted: fn(i64, i64) -> bool) -> impl Iterator<Item = WorkerId> {
        let open = signed(self.v_train);
        let is_joining = |worker: WorkerId| self.joining.iter().any(|(joining, _)| *joining == worker);
        let wanted = |&(worker, progress): &(WorkerId, i64)| {
            wanted(progress, open) && !is_joining(worker) && !self.is_excused(worker)
        };
        let mut those: Vec<_> = self.live().filter(wanted).collect();
        those.sort_unstable_by_key(|&(worker, progress)| (progress, worker));
        those.into_iter().map(|(worker, _)| worker)
    }
}

/// The share of its time that the fastest of some workers, of whom these are the seconds per iteration, would wait in lockstep.
pub(super) fn imbalance(intervals_s: impl Iterator<Item = f64>) -> f64 {
    let (mut fastest, mut slowest) = (f64::INFINITY, 0.0f64);
    for interval_s in intervals_s {
        fastest = fastest.min(interval_s);
        slowest = slowest.max(interval_s);
    }
    if slowest > 0.0 { 1.0 - fastest / slowest } else { 0.0 }
}

/// A clock as a progress. The controller refuses clocks that do not fit.
pub(super) fn signed(clock: Clock) -> i64 {
    i64::try_from(clock).unwrap_or(i64::MAX)
}

fn is_distinct(workers: impl Iterator<Item = WorkerId>) -> bool {
    let mut seen = BTreeSet::new();
    workers.into_iter().all(|worker| seen.insert(worker))
}

fn unsigned(progress: i64) -> Clock {
    Clock::try_from(progress).unwrap_or(0)
}

#[cfg(test)]
impl SyncState {
    /// Version `v_train` with a worker at each progress, by rank; for tests of conditions.
    pub(crate) fn at(v_train: Clock, progress: &[i64]) -> SyncState {
        let mut state = SyncState { v_train, ..SyncState::default() };
        for (rank, &progress) in progress.iter().enumerate() {
            let worker = WorkerId(rank as u32);
            state.join(worker, 0);
            state.worker_mut(worker).expect("just joined").progress = progress;
            state.set_progress(worker, progress);
        }
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(rank: u32) -> WorkerId {
        WorkerId(rank)
    }

    #[test]
    fn counts_follow_progress() {
        let state = SyncState::at(2, &[1, 4, 2]);
        assert_eq!((state.n(), state.count()), (3, 2));
        assert_eq!([0, 1, 2, 3, 4, 5].map(|clock| state.count_of(clock)), [3, 3, 2, 1, 1, 0]);
        assert_eq!(state.slowest(), Some((worker(0), 1)));
        assert_eq!(state.fastest(), Some((worker(1), 4)));
        assert_eq!(state.contributors().collect::<Vec<_>>(), [worker(2), worker(1)]);
        assert_eq!(state.missing().collect::<Vec<_>>(), [worker(0)]);
    }

    #[test]
    fn a_round_is_not_for_workers_that_will_not_push_it() {
        let mut state = SyncState::at(2, &[1, 4, 2, 1]);
        state.set_idle(&[(worker(0), Clock::MAX), (worker(1), Clock::MAX), (worker(3), 2)]);
        assert_eq!((state.n(), state.count()), (3, 2), "worker 1 has pushed it, and worker 3 will");
        assert_eq!(state.missing().collect::<Vec<_>>(), [worker(3)]);
        state.set_idle(&[(worker(3), 3)]);
        assert_eq!((state.n(), state.count(), state.has_idle()), (4, 3, false), "worker 3 has left it out");
        assert_eq!(state.worker(worker(3)).unwrap().pushed(), None);
        state.set_idle(&[(worker(0), Clock::MAX)]);
        state.leave(worker(0));
        assert_eq!((state.n(), state.has_idle()), (3, false), "what was said of a worker leaves with it");
        state.check().unwrap();
    }

    #[test]
    fn closing_passes_over_rounds_that_are_empty_and_done() {
        let mut state = SyncState::at(2, &[5, 7]);
        state.close_round(Time::ZERO);
        assert_eq!((state.v_train(), state.count()), (6, 1));

        let mut state = SyncState::at(2, &[5, 7]);
        state.contributed(4, 1.0);
        state.close_round(Time::ZERO);
        assert_eq!((state.v_train(), state.count(), state.contributions()), (4, 2, 1));
    }

    #[test]
    fn a_worker_counts_from_its_first_round_on() {
        let mut state = SyncState::at(3, &[3, 2]);
        state.join(worker(2), 5);
        assert_eq!((state.n(), state.count()), (2, 1));
        assert_eq!([3, 4, 5].map(|clock| state.count_of(clock)), [1, 0, 0]);
        assert_eq!(state.contributors().collect::<Vec<_>>(), [worker(0)]);
        assert_eq!(state.worker(worker(2)).map(|known| (known.first(), known.progress())), Some((5, 4)));
        state.pushed(Time::ZERO, worker(1), 3, None);
        state.close_round(Time::ZERO);
        assert_eq!((state.v_train(), state.n(), state.count()), (4, 2, 0));
        // It may push before its first round is the open one.
        state.pushed(Time::ZERO, worker(2), 5, None);
        (0..2).for_each(|rank| state.pushed(Time::ZERO, worker(rank), 4, None));
        state.close_round(Time::ZERO);
        assert_eq!((state.v_train(), state.n(), state.count()), (5, 3, 1));
        assert_eq!(state.contributors().collect::<Vec<_>>(), [worker(2)]);
    }

    #[test]
    fn a_first_round_can_be_put_off_until_something_is_pushed() {
        let mut state = SyncState::at(3, &[2]);
        state.join(worker(1), 4);
        state.postpone(worker(1), 6);
        state.postpone(worker(1), 5);
        assert_eq!(state.worker(worker(1)).map(WorkerState::first), Some(6));
        state.pushed(Time::ZERO, worker(1), 6, None);
        state.postpone(worker(1), 9);
        assert_eq!(state.worker(worker(1)).map(WorkerState::first), Some(6));
        state.leave(worker(1));
        assert_eq!((state.n(), state.count()), (1, 0));
    }

    #[test]
    fn an_interval_runs_from_the_answer_to_the_push() {
        let mut state = SyncState::at(0, &[-1]);
        let at = Time::from_secs_f64;
        state.pushed(at(1.0), worker(0), 0, None);
        assert_eq!(state.worker(worker(0)).unwrap().interval_s(), None);
        // Nine seconds of waiting, two of work.
        state.answered(at(10.0), worker(0), 0);
        state.pushed(at(12.0), worker(0), 1, None);
        assert_eq!(state.worker(worker(0)).unwrap().interval_s(), Some(2.0));
        // Without a pull, from push to push; the average moves by a quarter.
        state.pushed(at(18.0), worker(0), 2, None);
        assert_eq!(state.worker(worker(0)).unwrap().interval_s(), Some(3.0));
        // A pull after an earlier iteration is answered while the worker computes.
        state.answered(at(21.0), worker(0), 1);
        state.pushed(at(25.0), worker(0), 3, None);
        assert_eq!(state.worker(worker(0)).unwrap().interval_s(), Some(4.0));
    }

    #[test]
    fn a_typical_interval_is_the_median_of_the_last_three() {
        let mut state = SyncState::at(0, &[-1]);
        let mut now = Time::ZERO;
        let typical = [1.0, 1.0, 5.0, 1.0, 5.0, 5.0, 1.0, 1.0].map(|seconds| {
            state.answered(now, worker(0), 0);
            now = now + std::time::Duration::from_secs_f64(seconds);
            state.pushed(now, worker(0), 0, None);
            state.worker(worker(0)).unwrap().typical_interval_s()
        });
        assert_eq!(typical, [1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 1.0].map(Some));
    }

    #[test]
    fn a_gradient_has_the_share_of_its_samples() {
        let mut state = SyncState::at(2, &[1, 1, 1, 1]);
        assert_eq!([1, 8].map(|samples| state.share(samples)), [0.25; 2], "the others are taken for equal");
        state.note_samples(worker(0), 8);
        state.note_samples(worker(1), 20);
        state.note_samples(worker(1), 4);
        assert_eq!((state.share(8), state.share(4)), (8.0 / 28.0, 4.0 / 20.0));
        state.leave(worker(0));
        state.join(worker(0), 9);
        assert_eq!(state.share(2), 2.0 / 8.0, "one that joins later has no share yet");
        // It was given a hundred shares.
        state.note_samples(worker(0), 1000);
        assert_eq!(
            state.share(1000),
            1000.0 / 2004.0,
            "the two others that said nothing are taken for equal"
        );
        [2, 3].into_iter().for_each(|rank| state.note_samples(worker(rank), 3));
        assert_eq!(state.share(1000), 1.0, "and never more than one gradient");
        assert_eq!(state.check(), Ok(()));
    }

    #[test]
    fn weights_are_those_of_the_open_round() {
        let mut state = SyncState::at(2, &[1, 4, 2]);
        assert_eq!((state.contributions(), state.weight()), (0, 0.0));
        [(3, 0.5), (2, 2.0), (2, 0.25)]
            .into_iter()
            .for_each(|(round, weight)| state.contributed(round, weight));
        assert_eq!((state.contributions(), state.weight()), (2, 2.25));
        state.close_round(Time::ZERO);
        assert_eq!((state.contributions(), state.weight()), (1, 0.5));
    }

    #[test]
    fn a_pull_that_is_sent_again_is_delayed_once() {
        let mut state = SyncState::at(0, &[-1]);
        let delayed =
            [(0, 3), (0, 3), (0, 2), (0, 4), (7, 1)].map(|(rank, at)| state.delayed(worker(rank), at));
        assert_eq!(delayed, [true, false, false, true, false]);
    }

    #[test]
    fn a_round_for_nobody_waits_for_those_who_join_later() {
        let mut state = SyncState::default();
        assert!(!state.waits_for_joining(), "nobody is to come");
        state.join(worker(0), 4);
        assert_eq!((state.waits_for_joining(), state.n(), state.count()), (true, 0, 0));
        state.join(worker(1), 0);
        assert!(!state.waits_for_joining());
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let state = || {
            let mut state = SyncState::at(2, &[1, 4, 2]);
            [2, 4, 4].into_iter().for_each(|round| state.contributed(round, 1.0));
            state
        };
        assert_eq!(state().check(), Ok(()));
        type Break = fn(&mut SyncState);
        let breaks: [(&str, Break); 7] = [
            ("samples of nobody", |state| state.samples.1 = 1),
            ("progress that is kept twice", |state| state.progress[0] = 0),
            ("a worker too many", |state| state.n += 1),
            ("one that is not done", |state| state.count += 1),
            ("gradients of a closed round", |state| state.contributions[0].round = 1),
            ("a round without gradients", |state| state.contributions[1].gradients = 0),
            ("a round twice", |state| state.contributions[1].round = 2),
        ];
        for (what, break_it) in breaks {
            let mut state = state();
            break_it(&mut state);
            assert!(state.check().is_err(), "{what}");
        }
    }
}
