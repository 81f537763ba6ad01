//! The controller of one (table, shard): a pure state machine around a model.

use super::questions::Questions;
use super::state::{StateImage, signed};
use super::{Admit, Apply, Close, Decision, Exec, PullView, Question, SyncPolicy, SyncState, SyncStats};
use crate::limits;
use crate::prng::Prng;
use crate::types::{Clock, Time, WorkerId};
use crate::waits::Delay;
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Decides for one table on one shard when gradients count, when rounds close and when pulls are answered.
///
/// - *The world*: [`admit`](Controller::admit) before a gradient's bytes are added, [`push`](Controller::push) when
///   all of them are, [`pull`](Controller::pull), [`cancel`](Controller::cancel).
/// - *Worker 0*, where it evaluates the pull condition: [`set_judge`](Controller::set_judge) when it comes or goes,
///   [`verdict`](Controller::verdict), and as an output [`poll_question`](Controller::poll_question).
/// - *The operator*: [`set_policy`](Controller::set_policy), [`join`](Controller::join),
///   [`set_first_clock`](Controller::set_first_clock), [`set_idle`](Controller::set_idle),
///   [`remove_worker`](Controller::remove_worker).
/// - *Outputs*: after any of these but `admit`, and at [`next_timeout`](Controller::next_timeout), take all pulls from
///   [`poll_released`](Controller::poll_released), then call [`advance`](Controller::advance) once and step the optimizer.
///   Repeat both until `advance` returns `None`, and take the pulls that are left: those that an advance releases are answered
///   before the next one.
/// - *Getters*: everything else.
#[derive(Debug)]
pub struct Controller {
    policy: SyncPolicy,
    state: SyncState,
    rng: Prng,
    /// Since when the model says [`Close::After`] or [`Close::At`] of the open round.
    closing_since: Option<Time>,
    /// How far the fastest worker may have been when the model was set, by the former model's leave.
    ahead_when_set: Clock,
    /// Delayed pulls as they came; they are put in order when some of them are answered.
    delayed: Vec<Delayed>,
    released: VecDeque<Due>,
    questions: Questions,
    /// Pushes of workers that left: one that comes back must not have a push applied twice.
    departed: BTreeMap<WorkerId, Departed>,
    stats: SyncStats,
    /// The worker that pushed or left since the table was last settled.
    mover: Option<WorkerId>,
}

/// One advance of `V_train`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Advance {
    /// `V_train` from now on.
    pub version: Clock,
    /// The round that closed; rounds between it and `version` had no gradients and no worker left to push them.
    pub closed: Clock,
    /// Gradients aggregated into it (admitted as [`Admit::Round`]). When 0 there is nothing to step.
    pub contributions: u32,
    /// The sum of their weights, over which a mean is taken.
    pub weight: f32,
    /// Factor of the learning rate of its step.
    pub lr_factor: f32,
    /// The worker that the round was closed by: its push or its departure was the last; without one, the slowest.
    pub closed_by: Option<WorkerId>,
}

/// Outcome of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullOutcome {
    /// Answer it now.
    Answer {
        /// Rounds that the answer lacks.
        staleness: u64,
    },
    /// It is filed as a DPR and comes out of [`Controller::poll_released`].
    Wait,
}

/// A delayed pull whose time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// The worker that asked.
    pub worker: WorkerId,
    /// The token that the pull was filed with.
    pub token: u64,
    /// Rounds that the answer lacks.
    pub staleness: u64,
    /// How long it waited, and for whom; `None` if that was the worker that asked.
    pub delay: Option<Delay>,
}

/// A pull that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The worker that asked.
    pub worker: WorkerId,
    /// The token that the pull was filed with.
    pub token: u64,
    /// Since when.
    pub since: Time,
    /// Why, and what would release it.
    pub reason: Reason,
}

/// Why a pull waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    /// The condition that does not hold.
    pub condition: Arc<str>,
    /// The puller's progress.
    pub progress: i64,
    /// The version now.
    pub v_train: Clock,
    /// The worker that is furthest behind.
    pub slowest: WorkerId,
    /// Its progress.
    pub slowest_progress: i64,
    /// The version that will release the pull, if nothing does before.
    pub until: Clock,
    /// How it came to wait.
    pub judged: Judged,
}

/// How a pull came to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judged {
    /// A condition of the model did not hold.
    ByModel,
    /// Worker 0 is asked, until this time.
    Asked(Time),
    /// Worker 0's condition did not hold.
    ByWorker,
    /// A condition of the fallback did not hold, which decides in place of worker 0.
    ByFallback(Unanswered),
}

/// Why worker 0 did not judge a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unanswered {
    /// It is not connected.
    Gone,
    /// It did not answer in time.
    Late,
    /// It does not have the condition, the condition failed, or too many questions wait there.
    Failed,
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unanswered::Gone => "worker 0, which evaluates the condition, is not connected",
            Unanswered::Late => "worker 0 did not evaluate the condition in time",
            Unanswered::Failed => {
                "worker 0 could not evaluate the condition: it failed there, or has another name"
            }
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reason { condition, progress, v_train, slowest, slowest_progress, until, judged } = self;
        match judged {
            Judged::Asked(_) => write!(f, "`{condition}` is asked of worker 0 for progress {progress}")?,
            Judged::ByWorker => write!(f, "`{condition}` of worker 0 did not hold for progress {progress}")?,
            Judged::ByModel => write!(f, "`{condition}` did not hold for progress {progress}")?,
            Judged::ByFallback(why) => {
                write!(f, "`{condition}` of the fallback did not hold for progress {progress} ({why})")?;
            }
        }
        write!(f, "; waits for version {until}, now {v_train}")?;
        write!(f, "; {slowest} is slowest at progress {slowest_progress}")
    }
}

#[derive(Debug, Clone)]
struct Delayed {
    progress: i64,
    worker: WorkerId,
    token: u64,
    since: Time,
    wait: Wait,
    /// It was told to wait, and does not only wait for a word.
    is_dpr: bool,
}

/// Why a pull waits.
#[derive(Debug, Clone)]
struct Wait {
    condition: Arc<str>,
    judged: Judged,
    /// The number of the question about it, which may be answered.
    question: u64,
}

impl Delayed {
    /// Delayed pulls are answered by progress.
    fn turn(&self) -> (i64, WorkerId, u64) {
        (self.progress, self.worker, self.token)
    }

    fn is_asked(&self) -> bool {
        matches!(self.wait.judged, Judged::Asked(_))
    }

    fn due(&self, at: Time, by: Option<WorkerId>) -> Due {
        let Delayed { progress, worker, token, since, is_dpr, .. } = *self;
        // A pull that no model delayed has waited for worker 0's verdict.
        let by = if is_dpr { by } else { Some(WorkerId::FIRST) };
        Due { worker, token, progress, since, at, by, is_dpr }
    }
}

/// What an image keeps of a controller: all but pulls that wait, and questions about them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ControllerImage {
    state: StateImage,
    rng: Prng,
    closing_since: Option<Time>,
    ahead_when_set: Clock,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    departed: Vec<(WorkerId, Departed)>,
    stats: SyncStats,
    /// The number of the last question to worker 0.
    last_question: u64,
    /// What the model has learned.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_POLICY_BYTES }>")]
    memory: Vec<u8>,
}

/// Pushes of a worker that left.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Departed {
    /// The clock of its last complete push.
    pushed: Option<Clock>,
    /// The clock of its last push of which anything was taken.
    began: Option<Clock>,
}

/// A delayed pull on its way out. Its staleness is taken when it is polled, after all steps before it are made.
#[derive(Debug, Clone, Copy)]
struct Due {
    worker: WorkerId,
    token: u64,
    progress: i64,
    since: Time,
    at: Time,
    /// The worker that it waited for.
    by: Option<WorkerId>,
    is_dpr: bool,
}

impl Controller {
    /// A controller at version 0. All its chance follows from `seed`.
    pub fn new(policy: SyncPolicy, workers: impl IntoIterator<Item = WorkerId>, seed: u64) -> Controller {
        Controller::at(0, policy, workers.into_iter().map(|worker| (worker, 0)), seed)
    }

    /// A controller at a version, with workers whose next push is of these clocks, none of them before that version.
    pub fn at(
        version: Clock,
        mut policy: SyncPolicy,
        workers: impl IntoIterator<Item = (WorkerId, Clock)>,
        seed: u64,
    ) -> Controller {
        let mut state = SyncState::empty_at(version);
        for (worker, next) in workers {
            state.join(worker, next.max(version));
        }
        policy.model.observe(&state);
        Controller {
            policy,
            state,
            rng: Prng::new(seed),
            closing_since: None,
            ahead_when_set: 0,
            delayed: Vec::new(),
            released: VecDeque::new(),
            questions: Questions::default(),
            departed: BTreeMap::new(),
            stats: SyncStats::default(),
            mover: None,
        }
    }

    /// Begins at a later version than 0, before anything was pushed: that of the checkpoint which a job goes on from.
    pub fn begin_at(&mut self, version: Clock) {
        self.state.begin_at(version);
        self.policy.model.observe(&self.state);
    }

    /// What an image keeps of it, as if all workers' connections were gone.
    pub(crate) fn image(&self) -> ControllerImage {
        ControllerImage {
            state: self.state.image(),
            rng: self.rng.clone(),
            closing_since: self.closing_since,
            ahead_when_set: self.ahead_when_set,
            departed: self.departed.iter().map(|(worker, departed)| (*worker, *departed)).collect(),
            stats: self.stats.clone(),
            last_question: self.questions.last(),
            memory: self.policy.model.memory(),
        }
    }

    /// Becomes the controller that an image was made of; its policy is the same. The error says why it cannot.
    pub(crate) fn restore(&mut self, image: ControllerImage) -> Result<(), String> {
        let ControllerImage { state, rng, closing_since, ahead_when_set, departed, stats, .. } = image;
        let clocks = departed.iter().flat_map(|(_, departed)| [departed.pushed, departed.began]).flatten();
        if clocks.chain([ahead_when_set, image.last_question]).any(|clock| clock > limits::MAX_CLOCK) {
            return Err("a clock is out of range".into());
        }
        self.state = SyncState::from_image(state)?;
        self.policy.model.observe(&self.state);
        self.policy.model.recall(&image.memory)?;
        self.rng = rng;
        self.closing_since = closing_since;
        self.ahead_when_set = ahead_when_set;
        self.departed = departed.into_iter().collect();
        self.stats = stats;
        self.questions = Questions::after(image.last_question);
        Ok(())
    }

    /// The policy in force.
    pub fn policy(&self) -> &SyncPolicy {
        &self.policy
    }

    /// The state that conditions see.
    pub fn state(&self) -> &SyncState {
        &self.state
    }

    /// Counters so far.
    pub fn stats(&self) -> &SyncStats {
        &self.stats
    }

    /// The destination of a gradient, asked before its bytes are added. The answer holds until `V_train` advances.
    pub fn admit(&self, worker: WorkerId, clock: Clock) -> Admit {
        let Some(known) = self.state.worker(worker) else { return Admit::UnknownWorker };
        if clock < known.first() || known.pushed().is_some_and(|pushed| clock <= pushed) {
            return Admit::Duplicate;
        }
        self.admit_at(clock, known.progress())
    }

    /// The destination of a sum of several workers' gradients of one clock. Each gradient is counted by itself, with
    /// [`Controller::push`].
    pub fn admit_sum(&self, clock: Clock) -> Admit {
        self.admit_at(clock, self.state.fastest().map_or(-1, |(_, progress)| progress))
    }

    /// Counts a gradient whose bytes are where [`Controller::admit`] said, or were dropped. A caller that takes a gradient in
    /// pieces asks `admit` again with the last one: its round may have closed meanwhile. A gradient that is counted for a
    /// closed round all the same counts in the open one. It is the mean of so many samples.
    pub fn push(
        &mut self,
        now: Time,
        worker: WorkerId,
        clock: Clock,
        admit: Admit,
        significance: Option<f64>,
        samples: u32,
    ) {
        let admit = match self.state.worker(worker) {
            None => Admit::UnknownWorker,
            Some(known) if clock < known.first() => Admit::Duplicate,
            Some(known) if known.pushed().is_some_and(|pushed| clock <= pushed) => Admit::Duplicate,
            Some(_) => admit,
        };
        if matches!(admit, Admit::Late | Admit::Now | Admit::Round(_)) {
            self.mover = Some(worker);
            self.questions.note_change();
        }
        match admit {
            Admit::TooFarAhead | Admit::UnknownWorker => self.stats.refused += 1,
            Admit::Duplicate => self.stats.duplicates += 1,
            Admit::Late => {
                self.stats.dropped += 1;
                self.state.pushed(now, worker, clock, significance);
            }
            Admit::Now => {
                self.stats.pushes += 1;
                self.state.pushed(now, worker, clock, significance);
            }
            Admit::Round(round) => {
                self.stats.pushes += 1;
                self.state.pushed(now, worker, clock, significance);
                let round = round.max(self.state.v_train());
                self.state.contributed(round, self.weight(clock, round, samples));
            }
        }
    }

    /// The weight of a gradient of so many samples in the mean of the round that it goes to.
    pub fn weight(&self, clock: Clock, round: Clock, samples: u32) -> f32 {
        samples as f32 * self.policy.model.late_weight(round.saturating_sub(clock))
    }

    /// Notes how many samples a worker's gradients are the mean of, and returns the share of one of them, where it is a step of its own.
    pub fn share(&mut self, worker: WorkerId, samples: u32) -> f32 {
        self.state.note_samples(worker, samples);
        self.state.share(samples)
    }

    /// Closes the open round if its time has come, and sees to pulls that worker 0 judges. The caller steps the optimizer, takes
    /// the pulls that this has released from [`Controller::poll_released`], and calls again, until `None`; then it takes those
    /// that are left.
    pub fn advance(&mut self, now: Time) -> Option<Advance> {
        self.end_late_questions(now);
        if !self.round_is_over(now) {
            self.ask_again(now);
            self.mover = None;
            return None;
        }
        let closed_by = self.waited_for();
        self.questions.note_change();
        let closed = self.state.v_train();
        let (contributions, weight) = (self.state.contributions(), self.state.weight());
        // Workers that pushed this round and left since are contributors too.
        let left = self.departed.values().filter(|departed| departed.pushed >= Some(closed)).count() as u32;
        let lr_factor = self.policy.model.lr_factor(contributions, self.state.n() + left);
        self.state.close_round(now);
        self.closing_since = None;
        self.stats.advances += 1;
        self.state.measure();
        self.policy.model.observe(&self.state);
        self.release(now, closed_by);
        Some(Advance { version: self.state.v_train(), closed, contributions, weight, lr_factor, closed_by })
    }

    /// A worker that completed `clock` iterations asks for parameters; `token` names the pull when it is released.
    ///
    /// A worker that is not live takes no part in the job's consistency: its pull is answered, and not counted.
    pub fn pull(&mut self, now: Time, worker: WorkerId, clock: Clock, token: u64) -> PullOutcome {
        let progress = signed(clock) - 1;
        let Some(known) = self.state.worker(worker) else {
            return PullOutcome::Answer { staleness: self.state.staleness(progress) };
        };
        let view = PullView { worker, progress, significance: known.significance() };
        self.stats.pulls += 1;
        match self.judge(now, &view) {
            Ok(()) => PullOutcome::Answer { staleness: self.answered(now, worker, progress) },
            Err(wait) => {
                let is_dpr = !matches!(wait.judged, Judged::Asked(_));
                let delayed = Delayed { progress, worker, token, since: now, wait, is_dpr };
                if is_dpr && self.state.delayed(worker, progress) {
                    self.stats.dprs += 1;
                    self.delayed.push(delayed);
                } else if self.delayed.iter().all(|known| known.turn() != delayed.turn()) {
                    self.delayed.push(delayed);
                }
                PullOutcome::Wait
            }
        }
    }

    /// The next delayed pull whose time has come.
    pub fn poll_released(&mut self) -> Option<Released> {
        let due = self.released.pop_front()?;
        let staleness = self.answered(due.at, due.worker, due.progress);
        if due.is_dpr {
            self.stats.released += 1;
            self.stats.waited_ns = self.stats.waited_ns.saturating_add(due.at.0.saturating_sub(due.since.0));
        }
        let by = due.by.filter(|by| *by != due.worker);
        let delay = by.map(|by| Delay { by, time: due.at.since(due.since) });
        Some(Released { worker: due.worker, token: due.token, staleness, delay })
    }

    /// The worker's connection is gone: its pulls are forgotten. What it sends again is not another DPR.
    pub fn cancel(&mut self, worker: WorkerId) {
        self.delayed.retain(|delayed| delayed.worker != worker);
        self.released.retain(|due| due.worker != worker);
    }

    /// The same for all workers: they ask again.
    pub fn cancel_all(&mut self) {
        self.delayed.clear();
        self.released.clear();
    }

    /// Another model, from now on. Pulls that wait are judged again, `tau1` of the open round begins again, and what
    /// is aggregated in open rounds stays there and is stepped when they close.
    pub fn set_policy(&mut self, now: Time, policy: SyncPolicy) {
        // Under partial pulling, and where workers go on without an answer, one may have pushed more than this shard has heard of yet.
        let goes_on = self.policy.partial_pull().is_some() || self.policy.model.apply() == Apply::OnArrival;
        let unheard = if goes_on { limits::MAX_CLOCKS_UNACKNOWLEDGED as Clock } else { 0 };
        let heard = self.state.fastest().map_or(0, |(_, progress)| progress.max(0) as Clock);
        self.ahead_when_set = heard + unheard;
        self.policy = policy;
        self.state.measure();
        self.policy.model.observe(&self.state);
        self.closing_since = None;
        self.judge_again(now, |_| true);
    }

    /// Worker 0, which evaluates conditions, is there or gone. Questions that it has not answered are answered by the fallback.
    pub fn set_judge(&mut self, now: Time, is_here: bool) {
        self.questions.set_judge(is_here);
        if self.policy.model.remote().is_some() && !is_here {
            let is_its = |judged| matches!(judged, Judged::Asked(_) | Judged::ByWorker);
            self.judge_again(now, |delayed| is_its(delayed.wait.judged));
        }
    }

    /// The next question for worker 0.
    pub fn poll_question(&mut self) -> Option<Question> {
        while let Some(number) = self.questions.poll() {
            // The pull may have been answered, or forgotten, since.
            let is_it = |delayed: &&Delayed| delayed.is_asked() && delayed.wait.question == number;
            let (Some(pull), Some(remote)) = (self.delayed.iter().find(is_it), self.policy.model.remote())
            else {
                continue;
            };
            self.stats.questions += 1;
            let view = self.view(pull.worker, pull.progress);
            return Some(Question::new(number, &remote.name, remote.deadline, &self.state, &view));
        }
        None
    }

    /// Worker 0's answer to a question: whether the pull is answered now, unless the condition failed. One that comes when the fallback has decided, or
    /// to nothing that was asked, changes nothing.
    pub fn verdict(&mut self, now: Time, number: u64, holds: Option<bool>) {
        self.questions.note_answer(number);
        let is_it = |delayed: &Delayed| delayed.is_asked() && delayed.wait.question == number;
        let Some(at) = self.delayed.iter().position(is_it) else { return };
        let mut pull = self.delayed.swap_remove(at);
        match holds {
            Some(true) => self.released.push_back(pull.due(now, self.waited_for())),
            Some(false) => {
                pull.wait.judged = Judged::ByWorker;
                self.delay(pull);
            }
            None => self.fall_back(now, pull, Unanswered::Failed),
        }
    }

    /// A worker joins, or comes back in a new incarnation. Returns the first clock that it can push: no round from that one on
    /// closes without it. What an earlier incarnation pushed, or began to push, is not pushed again.
    ///
    /// It takes part in the open round if nothing of that is here, else in the next one; `has_begun` tells of what is here and
    /// not counted yet. So it never waits for a round that nobody has begun: those who are done will not push it, and another
    /// worker that joins may be done too.
    pub fn join(&mut self, worker: WorkerId, has_begun: bool) -> Clock {
        if let Some(known) = self.state.worker(worker) {
            return known.first();
        }
        let began = self.departed.get(&worker).and_then(|departed| departed.began);
        // What was pushed by those who have left is among the contributions.
        let has_begun = has_begun || self.state.count() > 0 || self.state.contributions() > 0;
        self.questions.note_change();
        let open = self.state.v_train() + u64::from(has_begun);
        let first = began.map_or(0, |clock| clock.saturating_add(1)).max(open);
        self.state.join(worker, first);
        first
    }

    /// A worker that joined pushes nothing before this clock, and nothing before it is waited for.
    pub fn set_first_clock(&mut self, worker: WorkerId, clock: Clock) {
        self.questions.note_change();
        self.state.postpone(worker, clock);
    }

    /// From now on these workers, and no others, push nothing before a clock, and no earlier round waits for them. One that has left
    /// iterations out counts as done with them, and one that waits at a barrier ([`Clock::MAX`]) does not count.
    pub fn set_idle(&mut self, idle: &[(WorkerId, Clock)]) {
        self.questions.note_change();
        self.state.set_idle(idle);
    }

    /// A worker left or died. Its gradients stay, no round waits for it any more, and its pulls are forgotten. `under_way` is the
    /// clock of a push of which only a part is here.
    pub fn remove_worker(&mut self, worker: WorkerId, under_way: Option<Clock>) {
        self.cancel(worker);
        self.questions.note_change();
        let Some(left) = self.state.leave(worker) else { return };
        self.mover = Some(worker);
        let before = self.departed.get(&worker);
        let pushed = left.pushed().max(before.and_then(|before| before.pushed));
        let began = pushed.max(under_way).max(before.and_then(|before| before.began));
        if began.is_some() {
            self.departed.insert(worker, Departed { pushed, began });
        }
    }

    /// When [`Controller::advance`] should be called though nothing happened.
    pub fn next_timeout(&self) -> Option<Time> {
        let closing = self.closing_since.and_then(|since| match self.closes() {
            Close::After(tau) => Some(since + tau),
            Close::At(time) => Some(time),
            Close::Now | Close::No => None,
        });
        // Other models ask nobody.
        let asked = self.policy.model.remote().and_then(|_| {
            let until = |delayed: &Delayed| match delayed.wait.judged {
                Judged::Asked(until) => Some(until),
                _ => None,
            };
            self.delayed.iter().filter_map(until).min()
        });
        closing.into_iter().chain(asked).min()
    }

    /// How many pulls wait, or are released and not polled.
    pub(crate) fn waiting_count(&self) -> usize {
        self.delayed.len() + self.released.len()
    }

    /// Checks the invariants; the error names the one that does not hold.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.state.check()?;
        let gone = self.delayed.iter().find(|delayed| self.state.worker(delayed.worker).is_none());
        if let Some(delayed) = gone {
            return Err(format!("a pull of {}, which has left, waits", delayed.worker));
        }
        let asks = self.questions.has_judge() && self.policy.model.remote().is_some();
        if let Some(delayed) = self.delayed.iter().find(|delayed| delayed.is_asked() && !asks) {
            return Err(format!("worker 0 is asked about a pull of {}, and does not judge", delayed.worker));
        }
        Ok(())
    }

    /// The pulls that wait, in the order in which they will be answered.
    pub fn waiting(&self) -> impl Iterator<Item = Waiting> {
        let mut delayed: Vec<&Delayed> = self.delayed.iter().collect();
        delayed.sort_unstable_by_key(|delayed| delayed.turn());
        // A delayed pull is of a live worker, so there is a slowest one.
        let slowest = if delayed.is_empty() { None } else { self.state.slowest() };
        delayed.into_iter().filter_map(move |delayed| {
            let (slowest, slowest_progress) = slowest?;
            let Delayed { progress, worker, token, since, .. } = *delayed;
            let reason = Reason {
                condition: Arc::clone(&delayed.wait.condition),
                progress,
                v_train: self.state.v_train(),
                slowest,
                slowest_progress,
                until: self.releasing_version(progress),
                judged: delayed.wait.judged,
            };
            Some(Waiting { worker, token, since, reason })
        })
    }

    /// The destination of a gradient from a worker with this progress.
    fn admit_at(&self, clock: Clock, progress: i64) -> Admit {
        let v_train = self.state.v_train();
        match self.policy.model.admit(clock, v_train) {
            Admit::Round(round) if round > v_train => self.admit_ahead(round),
            Admit::Now | Admit::Round(_) if clock > skip_limit(v_train, progress) => Admit::TooFarAhead,
            admit => admit,
        }
    }

    /// A round beyond the open one needs an accumulator of its own, so their number is bounded. Workers that a former
    /// model let run further ahead are not refused for it: their gradients go to the last round there may be.
    fn admit_ahead(&self, round: Clock) -> Admit {
        let v_train = self.state.v_train();
        if round > v_train.max(self.ahead_when_set).saturating_add(limits::MAX_ROUNDS_AHEAD) {
            return Admit::TooFarAhead;
        }
        Admit::Round(round.min(v_train + limits::MAX_ROUNDS_AHEAD))
    }

    /// The model's word on the open round, unless it is clear without.
    fn closes(&self) -> Close {
        let (n, count) = (self.state.n(), self.state.count());
        // A round without live workers closes if joining workers push later ones.
        // A round without pushes does not close; this also ends the advances of a careless push condition.
        // A round with pushes of workers that left closes without them: acknowledged gradients are not lost.
        if self.state.waits_for_joining() {
            Close::Now
        } else if count == 0 && self.state.contributions() == 0 {
            Close::No
        } else if count == n {
            Close::Now
        } else {
            self.policy.model.closes(&self.state)
        }
    }

    fn round_is_over(&mut self, now: Time) -> bool {
        match self.closes() {
            Close::Now => true,
            Close::No => {
                self.closing_since = None;
                false
            }
            Close::After(tau) => now >= *self.closing_since.get_or_insert(now) + tau,
            Close::At(time) => {
                self.closing_since.get_or_insert(now);
                now >= time
            }
        }
    }

    /// Whether a pull is answered now: always if fresher parameters cannot exist, else by the model's word, or, later, by that of
    /// worker 0.
    fn judge(&mut self, now: Time, view: &PullView) -> Result<(), Wait> {
        if view.progress < signed(self.state.v_train()) {
            return Ok(());
        }
        match self.policy.model.remote() {
            None => self.ask_model(view, Judged::ByModel),
            Some(_) if self.questions.are_many() => self.ask_fallback(view, Unanswered::Late),
            Some(remote) if self.questions.has_judge() => {
                let (condition, judged) = (Arc::clone(&remote.name), Judged::Asked(now + remote.deadline));
                Err(Wait { condition, judged, question: self.questions.ask() })
            }
            Some(_) => self.ask_fallback(view, Unanswered::Gone),
        }
    }

    fn ask_model(&mut self, view: &PullView, judged: Judged) -> Result<(), Wait> {
        match self.policy.model.pull(&self.state, view, &mut self.rng) {
            Decision::Answer => Ok(()),
            Decision::Wait(condition) => Err(Wait { condition, judged, question: self.questions.last() }),
        }
    }

    fn ask_fallback(&mut self, view: &PullView, why: Unanswered) -> Result<(), Wait> {
        self.stats.fallbacks += 1;
        self.ask_model(view, Judged::ByFallback(why))
    }

    fn view(&self, worker: WorkerId, progress: i64) -> PullView {
        let significance = self.state.worker(worker).and_then(|known| known.significance());
        PullView { worker, progress, significance }
    }

    /// Files a pull that waits.
    fn delay(&mut self, mut pull: Delayed) {
        if !pull.is_asked() && !pull.is_dpr {
            pull.is_dpr = true;
            self.stats.dprs += u64::from(self.state.delayed(pull.worker, pull.progress));
        }
        self.delayed.push(pull);
    }

    /// The fallback decides about a pull, in place of worker 0.
    fn fall_back(&mut self, now: Time, mut pull: Delayed, why: Unanswered) {
        let (view, question) = (self.view(pull.worker, pull.progress), pull.wait.question);
        match self.ask_fallback(&view, why) {
            Ok(()) => self.released.push_back(pull.due(now, self.waited_for())),
            Err(wait) => {
                pull.wait = Wait { question, ..wait };
                self.delay(pull);
            }
        }
    }

    /// Judges some of the pulls that wait anew, in their order.
    fn judge_again(&mut self, now: Time, is_meant: impl Fn(&Delayed) -> bool) {
        let mut meant: Vec<Delayed> = self.delayed.extract_if(.., |delayed| is_meant(delayed)).collect();
        meant.sort_unstable_by_key(Delayed::turn);
        for mut pull in meant {
            match self.judge(now, &self.view(pull.worker, pull.progress)) {
                Ok(()) => self.released.push_back(pull.due(now, self.waited_for())),
                Err(wait) => {
                    pull.wait = wait;
                    self.delay(pull);
                }
            }
        }
    }

    /// The fallback decides where worker 0 has not answered in time.
    fn end_late_questions(&mut self, now: Time) {
        if self.policy.model.remote().is_none() {
            return;
        }
        let is_late =
            |delayed: &mut Delayed| matches!(delayed.wait.judged, Judged::Asked(until) if until <= now);
        let mut late: Vec<Delayed> = self.delayed.extract_if(.., is_late).collect();
        late.sort_unstable_by_key(Delayed::turn);
        late.into_iter().for_each(|pull| self.fall_back(now, pull, Unanswered::Late));
    }

    /// Asks worker 0 about pulls that were told to wait before the state became what it is.
    fn ask_again(&mut self, now: Time) {
        if self.policy.model.remote().is_some() && self.questions.has_judge() {
            let changed = self.questions.last_change();
            self.judge_again(now, |delayed| !delayed.is_asked() && delayed.wait.question <= changed);
        }
    }

    /// The worker that pulls which are released now have waited for. Where time, another model or worker 0's word releases them,
    /// it is the one that is furthest behind.
    fn waited_for(&self) -> Option<WorkerId> {
        self.mover.or_else(|| self.state.slowest().map(|(worker, _)| worker))
    }

    /// The longest time since the last push of a live worker other than `except`.
    pub(crate) fn longest_since_push(&self, now: Time, except: WorkerId) -> Option<Duration> {
        let others = self.state.workers().filter(|(worker, _)| *worker != except);
        others.filter_map(|(_, known)| known.last_push()).min().map(|earliest| now.since(earliest))
    }

    /// Lets go the delayed pulls that this version answers: those of low progress.
    fn release(&mut self, now: Time, by: Option<WorkerId>) {
        let answered = |state: &SyncState, policy: &SyncPolicy, delayed: &Delayed| match policy.exec {
            Exec::Lazy => delayed.progress < signed(state.v_train()),
            Exec::Cached => state.staleness(delayed.progress) <= policy.cache_bound().unwrap_or(0),
            // It may be answered at once: nobody has said that it waits.
            Exec::Soft if delayed.is_asked() => delayed.progress < signed(state.v_train()),
            // Worker 0 said so, and is asked again.
            Exec::Soft if delayed.wait.judged == Judged::ByWorker => {
                delayed.progress < signed(state.v_train())
            }
            Exec::Soft => {
                let bound = policy.model.soft_bound(state);
                bound.is_none_or(|bound| state.staleness(delayed.progress) <= bound)
            }
        };
        let Controller { state, policy, delayed, released, .. } = self;
        if !delayed.iter().any(|delayed| answered(state, policy, delayed)) {
            return;
        }
        delayed.sort_unstable_by_key(Delayed::turn);
        let due = delayed.extract_if(.., |delayed| answered(state, policy, delayed));
        released.extend(due.map(|delayed| delayed.due(now, by)));
    }

    fn releasing_version(&self, progress: i64) -> Clock {
        let complete = Clock::try_from(progress.saturating_add(1)).unwrap_or(0);
        match self.policy.exec {
            Exec::Lazy => complete,
            Exec::Cached => complete.saturating_sub(self.policy.cache_bound().unwrap_or(0)),
            Exec::Soft => {
                let bound = self.policy.model.staleness_bound(&self.state).unwrap_or(u64::MAX);
                complete.saturating_sub(bound).max(self.state.v_train() + 1)
            }
        }
    }

    fn answered(&mut self, now: Time, worker: WorkerId, progress: i64) -> u64 {
        let staleness = self.state.staleness(progress);
        self.stats.answer(staleness);
        self.state.answered(now, worker, progress);
        staleness
    }
}

/// The highest clock that a push may carry when it needs no memory of its own: workers may leave iterations out, but a
/// clock out of the blue must not send the version through billions of empty rounds.
fn skip_limit(v_train: Clock, progress: i64) -> Clock {
    v_train.max(Clock::try_from(progress).unwrap_or(0)).saturating_add(limits::MAX_CLOCK_SKIP)
}

// Decisions in sequence are told by the scripts in `tests/consistency`; here is what a script cannot say.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::axis;

    fn controller(policy: &str, workers: u32) -> Controller {
        Controller::new(SyncPolicy::parse(&axis(), policy).unwrap(), (0..workers).map(WorkerId), 1)
    }

    fn push(controller: &mut Controller, rank: u32, clock: Clock) {
        let admit = controller.admit(WorkerId(rank), clock);
        controller.push(Time::ZERO, WorkerId(rank), clock, admit, None, 1);
    }

    #[test]
    fn two_copies_admitted_before_either_is_counted_count_once() {
        let mut controller = controller("bsp", 2);
        let admits = [controller.admit(WorkerId(0), 0), controller.admit(WorkerId(0), 0)];
        assert_eq!(admits, [Admit::Round(0); 2]);
        for admit in admits {
            controller.push(Time::ZERO, WorkerId(0), 0, admit, None, 1);
        }
        assert_eq!(controller.state().contributions(), 1);
        assert_eq!((controller.stats().pushes, controller.stats().duplicates), (1, 1));
    }

    #[test]
    fn a_gradient_counted_for_a_closed_round_counts_in_the_open_one() {
        let mut controller = controller("drop:n=1", 2);
        let admit = controller.admit(WorkerId(0), 0);
        push(&mut controller, 1, 0);
        assert!(controller.advance(Time::ZERO).is_some());
        assert_eq!(controller.admit(WorkerId(0), 0), Admit::Late);
        controller.push(Time::ZERO, WorkerId(0), 0, admit, None, 1);
        assert_eq!((controller.state().v_train(), controller.state().contributions()), (1, 1));
    }

    /// Its pushes were on their way when the model was switched.
    #[test]
    fn a_worker_that_ran_ahead_unheard_is_not_refused_for_it_after_a_switch() {
        let bsp = || SyncPolicy::parse(&axis(), "bsp").unwrap();
        for (before, last) in [("bsp", 4), ("asp", 12), ("ssp:s=3", 12), ("psp:c=2,b=0.5", 12)] {
            let mut controller = controller(before, 2);
            controller.set_policy(Time::ZERO, bsp());
            let is_taken =
                |clock: &Clock| controller.admit(WorkerId(0), *clock) == Admit::Round((*clock).min(4));
            assert_eq!((0..20).take_while(is_taken).last(), Some(last), "{before}");
        }
    }

    #[test]
    fn staleness_is_that_of_the_version_when_the_answer_leaves() {
        let mut controller = controller("pssp:s=0,c=1,exec=soft", 2);
        for clock in 0..3 {
            push(&mut controller, 0, clock);
        }
        assert_eq!(controller.pull(Time::ZERO, WorkerId(0), 3, 7), PullOutcome::Wait);
        for clock in 0..2 {
            push(&mut controller, 1, clock);
            assert!(controller.advance(Time::ZERO).is_some());
        }
        let delay = Some(Delay { by: WorkerId(1), time: Duration::ZERO });
        let released = Released { worker: WorkerId(0), token: 7, staleness: 1, delay };
        assert_eq!((controller.poll_released(), controller.poll_released()), (Some(released), None));
    }

    #[test]
    fn several_pulls_of_one_clock_are_one_delayed_pull_and_all_are_answered() {
        let mut controller = controller("bsp", 2);
        push(&mut controller, 0, 0);
        for token in [3, 1, 1] {
            assert_eq!(controller.pull(Time(5), WorkerId(0), 1, token), PullOutcome::Wait);
        }
        assert_eq!((controller.stats().dprs, controller.waiting().count()), (1, 2));
        push(&mut controller, 1, 0);
        assert!(controller.advance(Time(9)).is_some());
        let mut tokens = Vec::new();
        while let Some(released) = controller.poll_released() {
            tokens.push(released.token);
        }
        assert_eq!(tokens, [1, 3]);
        assert_eq!(controller.stats().waited_ns, 8);
    }

    #[test]
    fn a_delayed_pull_names_the_worker_that_was_the_last_to_push_or_to_leave() {
        let mut controller = controller("bsp", 3);
        let delays = |controller: &mut Controller, at| {
            while controller.advance(at).is_some() {}
            let released = std::iter::from_fn(|| controller.poll_released());
            released.map(|released| (released.worker.0, released.delay)).collect::<Vec<_>>()
        };
        let second = |count: u64| Time(count * 1_000_000_000);
        let by = |rank, seconds| Some(Delay { by: WorkerId(rank), time: Duration::from_secs(seconds) });
        push(&mut controller, 0, 0);
        controller.pull(second(1), WorkerId(0), 1, 0);
        push(&mut controller, 2, 0);
        controller.pull(second(3), WorkerId(2), 1, 1);
        assert_eq!(delays(&mut controller, second(4)), []);
        push(&mut controller, 1, 0);
        assert_eq!(delays(&mut controller, second(7)), [(0, by(1, 6)), (2, by(1, 4))]);
        // The next round waits for a worker that dies.
        for rank in [1, 0] {
            push(&mut controller, rank, 1);
        }
        controller.pull(second(8), WorkerId(0), 2, 2);
        assert_eq!(delays(&mut controller, second(8)), []);
        controller.remove_worker(WorkerId(2), None);
        assert_eq!(delays(&mut controller, second(20)), [(0, by(2, 12))]);
        // A switch of the model names the slowest.
        push(&mut controller, 0, 2);
        controller.pull(second(21), WorkerId(0), 3, 3);
        assert_eq!(delays(&mut controller, second(21)), []);
        controller.set_policy(second(22), SyncPolicy::parse(&axis(), "asp").unwrap());
        assert_eq!(delays(&mut controller, second(22)), [(0, by(1, 1))]);
    }

    #[test]
    fn who_disconnects_between_release_and_answer_is_not_answered() {
        let mut controller = controller("bsp", 2);
        push(&mut controller, 0, 0);
        controller.pull(Time::ZERO, WorkerId(0), 1, 0);
        push(&mut controller, 1, 0);
        assert!(controller.advance(Time::ZERO).is_some());
        controller.cancel(WorkerId(0));
        assert_eq!(controller.poll_released(), None);
    }
}
