//! Faults in words, the same for the simulator and for real processes.
//!
//! A fault is `SELECTOR:EFFECT[,KEY=VALUE]`. Nothing here waits, breaks or kills: a plan answers questions, and a
//! driver carries out the answers.
//!
//! | selector | means |
//! | --- | --- |
//! | `worker=N`, `worker=*` | one worker, all workers |
//! | `server=N`, `server=*` | one server with all its cores, all servers |
//! | `coordinator` | the job's coordinator |
//! | `pull` | answers to pulls |
//! | `push` | pushes |
//! | `link` | every frame |
//!
//! | effect | means |
//! | --- | --- |
//! | `slow=4x` | everything the node does takes that much longer (nodes only) |
//! | `pause=2s@10s` | the node stands still for 2 s from second 10 on (nodes only) |
//! | `stall@5s` | the application does nothing from second 5 on, and the node goes on saying that it lives (workers only) |
//! | `crash@5s[,restart=2s]` | the node is gone from second 5 on; 2 s later it is started anew (nodes only) |
//! | `delay=4s[,p=0.01]` | after `pull`, that answer alone is late; else all that follows on the connection waits |
//! | `reset[,p=0.001]` | the connection breaks when a frame is sent on it |
//! | `trace=PATH[,scale=F]` | the times of steps are replayed from a file (workers only) |
//!
//! `trace=PATH` alone is short for `worker=*:trace=PATH`.

mod text;
mod trace;

pub use trace::StepTrace;

use crate::prng::Prng;
use crate::types::{Clock, NodeId, ServerId, Time, WorkerId};
use crate::wire::{Header, Kind};
use std::time::Duration;

/// Why a fault could not be used. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// The words do not make a rule.
    #[error("fault `{text}`: {why}")]
    Rule {
        /// The text that was given.
        text: String,
        /// The error, and what was expected.
        why: String,
    },
    /// A trace of step times cannot be read.
    #[error("line {line} of the step trace: {why}")]
    Trace {
        /// Counted from 1; 0 when the file as a whole is meant.
        line: usize,
        /// The error, and what was expected.
        why: String,
    },
}

/// Which nodes or messages a rule concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selector {
    /// One worker, or all.
    Worker(Option<WorkerId>),
    /// One server, or all.
    Server(Option<ServerId>),
    /// The coordinator.
    Coordinator,
    /// Answers to pulls.
    Pull,
    /// Pushes.
    Push,
    /// Every frame.
    Link,
}

/// Kinds of faults.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Everything takes this many times as long.
    Slow(f64),
    /// The node stands still.
    Pause {
        /// For how long.
        length: Duration,
        /// From when on.
        at: Time,
    },
    /// The application of a worker hangs; the worker goes on reporting.
    Stall {
        /// From when on.
        at: Time,
    },
    /// The node is gone.
    Crash {
        /// From when on.
        at: Time,
        /// How long after that it is started anew, if it is. A process cannot restart itself: its parent does.
        restart: Option<Duration>,
    },
    /// Messages are late.
    Delay {
        /// By how much.
        by: Duration,
        /// With which probability.
        p: f64,
    },
    /// A connection breaks when a frame is sent on it.
    Reset {
        /// With which probability.
        p: f64,
    },
    /// Step times come from a file.
    Trace {
        /// Its path, which the driver reads.
        path: String,
        /// Every time is multiplied by this.
        scale: f64,
    },
}

/// One fault.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// Whom it concerns.
    pub selector: Selector,
    /// The fault.
    pub effect: Effect,
}

/// All faults of a job.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FaultPlan {
    rules: Vec<Rule>,
    traces: Vec<(String, StepTrace)>,
}

impl FaultPlan {
    /// Reads one rule per text.
    pub fn parse<S: AsRef<str>>(texts: &[S]) -> Result<FaultPlan, FaultError> {
        let rules = texts.iter().map(|text| text.as_ref().parse()).collect::<Result<Vec<Rule>, _>>()?;
        Ok(FaultPlan { rules, traces: Vec::new() })
    }

    /// Whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Refuses rules that name a node which the job does not have: such a fault would never happen.
    pub fn check_members(&self, workers: u32, servers: u32) -> Result<(), FaultError> {
        for rule in &self.rules {
            let (what, number, count) = match rule.selector {
                Selector::Worker(Some(worker)) => ("worker", worker.0, workers),
                Selector::Server(Some(server)) => ("server", server.0, servers),
                _ => continue,
            };
            if number >= count {
                let why = format!("there is no {what} {number}; the job has {what}s 0 to {}", count - 1);
                return Err(FaultError::Rule { text: rule.to_string(), why });
            }
        }
        Ok(())
    }

    /// Refuses faults of a worker's computation: a program of its own does not know of them, so they would have no effect.
    pub fn check_for_programs(&self) -> Result<(), FaultError> {
        let is_of_computation = |rule: &&Rule| match rule.effect {
            Effect::Trace { .. } | Effect::Stall { .. } => true,
            Effect::Slow(_) => matches!(rule.selector, Selector::Worker(_)),
            _ => false,
        };
        match self.rules.iter().find(is_of_computation) {
            None => Ok(()),
            Some(rule) => Err(FaultError::Rule {
                text: rule.to_string(),
                why: "the computation of a program of its own cannot be slowed; `worker=N:delay=20ms` makes a worker's \
                      frames late, and `paramill train` carries out this fault"
                    .into(),
            }),
        }
    }

    /// The rules, in the order given.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The files that the driver has to read and hand to [`FaultPlan::load_trace`].
    pub fn trace_paths(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().filter_map(|rule| match &rule.effect {
            Effect::Trace { path, .. } => Some(path.as_str()),
            _ => None,
        })
    }

    /// Takes the text of a trace file.
    pub fn load_trace(&mut self, path: &str, text: &str) -> Result<(), FaultError> {
        let trace = StepTrace::parse(text)?;
        self.traces.retain(|(known, _)| known != path);
        self.traces.push((path.to_owned(), trace));
        Ok(())
    }

    /// How many times longer everything takes on `node`; 1 without a fault.
    pub fn slowdown(&self, node: NodeId) -> f64 {
        let factor = |rule: &Rule| match rule.effect {
            Effect::Slow(factor) if rule.selector.names(node) => Some(factor),
            _ => None,
        };
        self.rules.iter().filter_map(factor).product()
    }

    /// How many times longer a worker's computation takes; 1 without a fault.
    pub fn compute_factor(&self, worker: WorkerId) -> f64 {
        self.slowdown(NodeId::Worker(worker))
    }

    /// How long `worker`'s step number `step` takes, where a trace says so. [`FaultPlan::compute_factor`] is not
    /// part of it.
    pub fn step_time(&self, worker: WorkerId, step: Clock) -> Option<Duration> {
        self.rules.iter().rev().find_map(|rule| match &rule.effect {
            Effect::Trace { path, scale } if rule.selector.names(NodeId::Worker(worker)) => {
                let (_, trace) = self.traces.iter().find(|(known, _)| known == path)?;
                Duration::try_from_secs_f64(trace.seconds(worker, step) * scale).ok()
            }
            _ => None,
        })
    }

    /// When and for how long `node` stands still.
    pub fn pauses(&self, node: NodeId) -> impl Iterator<Item = (Time, Duration)> {
        self.rules.iter().filter_map(move |rule| match rule.effect {
            Effect::Pause { length, at } if rule.selector.names(node) => Some((at, length)),
            _ => None,
        })
    }

    /// When a worker's application hangs, if it ever does.
    pub fn stall_at(&self, worker: WorkerId) -> Option<Time> {
        let stall = |rule: &Rule| match rule.effect {
            Effect::Stall { at } if rule.selector.names(NodeId::Worker(worker)) => Some(at),
            _ => None,
        };
        self.rules.iter().filter_map(stall).min()
    }

    /// When `node` is gone, and how long after that it is started anew, if it is.
    pub fn crashes(&self, node: NodeId) -> impl Iterator<Item = (Time, Option<Duration>)> + '_ {
        self.rules.iter().filter_map(move |rule| match rule.effect {
            Effect::Crash { at, restart } if rule.selector.names(node) => Some((at, restart)),
            _ => None,
        })
    }

    /// When `node` is gone for the first time, if ever.
    pub fn crash_at(&self, node: NodeId) -> Option<Time> {
        self.crashes(node).map(|(at, _)| at).min()
    }
}

/// The fate of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It goes its way.
    Pass,
    /// It is late.
    Delay(Delay),
    /// Its connection breaks; the frame is lost with everything under way.
    Reset,
}

/// By how much a frame is late. A driver MUST apply both parts one after the other: the frame takes its turn on the slow
/// connection, and is held back from there. Then the frames of an answer stay in order, whichever of them is slowed with
/// its connection, because they are all held back by the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Delay {
    /// The connection is slow: what follows on it waits behind the frame.
    pub connection: Duration,
    /// The frame is held back with the other frames of its answer; what else is on the connection overtakes them.
    pub answer: Duration,
}

impl Delay {
    /// A delay of a connection.
    pub fn of_connection(by: Duration) -> Delay {
        Delay { connection: by, ..Delay::default() }
    }

    /// A delay of an answer.
    pub fn of_answer(by: Duration) -> Delay {
        Delay { answer: by, ..Delay::default() }
    }

    /// Whether nothing is late.
    pub fn is_zero(self) -> bool {
        self.connection.is_zero() && self.answer.is_zero()
    }
}

impl std::ops::AddAssign for Delay {
    fn add_assign(&mut self, other: Delay) {
        self.connection += other.connection;
        self.answer += other.answer;
    }
}

/// Decides the fate of frames. Drivers ask once for every frame that is sent.
///
/// The delay of a pull's answer or of a push is drawn once for all its frames: it follows from the seed, the
/// connection, the table and the request number alone, so that two drivers delay the same messages.
#[derive(Debug, Clone)]
pub struct FrameFaults {
    rules: Vec<Rule>,
    seed: u64,
    frames: u64,
}

impl FrameFaults {
    /// The part of `plan` that concerns frames.
    pub fn new(plan: &FaultPlan, seed: u64) -> FrameFaults {
        let concerns_frames =
            |rule: &&Rule| matches!(rule.effect, Effect::Delay { .. } | Effect::Reset { .. });
        FrameFaults { rules: plan.rules.iter().filter(concerns_frames).cloned().collect(), seed, frames: 0 }
    }

    /// Whether every frame passes.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// What becomes of this frame; a worker that sends to its aggregator does not know which node that is. A reset outweighs
    /// delays; delays of the connection and of the answer add up apart.
    pub fn fate(&mut self, from: NodeId, to: impl Into<Option<NodeId>>, header: &Header) -> Fate {
        if self.rules.is_empty() {
            return Fate::Pass;
        }
        self.frames += 1;
        let to = to.into();
        let mut delay = Delay::default();
        for (index, rule) in self.rules.iter().enumerate() {
            if !rule.selector.names_frame(from, to, header) {
                continue;
            }
            let ends = [index as u64, number(from), to.map_or(UNKNOWN, number)];
            let whole_message = [ends[0], ends[1], ends[2], u64::from(header.table.0), header.request];
            let this_frame = [ends[0], ends[1], ends[2], u64::MAX, self.frames];
            match rule.effect {
                Effect::Delay { by, p } => {
                    let messages = matches!(rule.selector, Selector::Pull | Selector::Push);
                    if draw(self.seed, if messages { whole_message } else { this_frame }) < p {
                        delay += match rule.selector {
                            Selector::Pull => Delay::of_answer(by),
                            _ => Delay::of_connection(by),
                        };
                    }
                }
                Effect::Reset { p } if draw(self.seed, this_frame) < p => return Fate::Reset,
                _ => {}
            }
        }
        if delay.is_zero() { Fate::Pass } else { Fate::Delay(delay) }
    }
}

impl Selector {
    /// Whether this node is meant.
    fn names(self, node: NodeId) -> bool {
        match (self, node) {
            (Selector::Worker(only), NodeId::Worker(worker)) => only.is_none_or(|only| only == worker),
            (Selector::Server(only), NodeId::Shard(shard)) => only.is_none_or(|only| only == shard.server),
            (Selector::Coordinator, NodeId::Coordinator) => true,
            _ => false,
        }
    }

    /// Whether a frame is meant: by its kind, or because the node sends or receives it.
    fn names_frame(self, from: NodeId, to: Option<NodeId>, header: &Header) -> bool {
        match self {
            Selector::Pull => header.kind == Kind::Params,
            Selector::Push => header.kind == Kind::Push,
            Selector::Link => true,
            Selector::Worker(_) | Selector::Server(_) | Selector::Coordinator => {
                self.names(from) || to.is_some_and(|to| self.names(to))
            }
        }
    }
}

/// In place of the number of a node that is not known.
const UNKNOWN: u64 = 5 << 56;

fn number(node: NodeId) -> u64 {
    match node {
        NodeId::Coordinator => 0,
        NodeId::Shard(shard) => 1 << 56 | u64::from(shard.server.0) << 24 | u64::from(shard.core),
        NodeId::Worker(worker) => 2 << 56 | u64::from(worker.0),
        NodeId::Admin(admin) => 3 << 56 | u64::from(admin),
        NodeId::Aggregator(aggregator) => 4 << 56 | u64::from(aggregator.0),
        NodeId::Spare(number) => 6 << 56 | u64::from(number),
    }
}

/// Uniform in `[0, 1)`, a function of its arguments.
fn draw(seed: u64, parts: [u64; 5]) -> f64 {
    let mixed = parts.iter().fold(seed, |hash, &part| {
        (hash ^ part).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).wrapping_add(0x632B_E59B_D9B4_E019)
    });
    Prng::new(mixed).uniform()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ShardId, TableId};

    fn shard(server: u32, core: u32) -> NodeId {
        NodeId::Shard(ShardId { server: ServerId(server), core })
    }

    fn worker(rank: u32) -> NodeId {
        NodeId::Worker(WorkerId(rank))
    }

    fn plan(texts: &[&str]) -> FaultPlan {
        FaultPlan::parse(texts).unwrap()
    }

    fn frame(kind: Kind, request: u64, part: u32) -> Header {
        Header { request, part, table: TableId(1), ..Header::new(kind) }
    }

    #[test]
    fn a_plan_answers_for_each_node() {
        let plan = plan(&[
            "worker=2:slow=4x",
            "worker=*:slow=2x",
            "server=1:pause=2s@10s",
            "server=*:pause=1s@3s",
            "worker=1:crash@5s,restart=2s",
            "worker=*:crash@9s",
        ]);
        assert_eq!(plan.compute_factor(WorkerId(2)), 8.0);
        assert_eq!(plan.compute_factor(WorkerId(0)), 2.0);
        assert_eq!(plan.slowdown(shard(2, 0)), 1.0);
        let second = Duration::from_secs(1);
        let pauses: Vec<_> = plan.pauses(shard(1, 3)).collect();
        assert_eq!(pauses, [(Time::ZERO + 10 * second, 2 * second), (Time::ZERO + 3 * second, second)]);
        assert_eq!(plan.pauses(worker(1)).count(), 0);
        assert_eq!(plan.crash_at(worker(1)), Some(Time::ZERO + 5 * second));
        assert_eq!(plan.crash_at(worker(0)), Some(Time::ZERO + 9 * second));
        assert_eq!(plan.crash_at(NodeId::Coordinator), None);
        let crashes = |node| plan.crashes(node).collect::<Vec<_>>();
        let at = |seconds| Time::ZERO + seconds * second;
        assert_eq!(crashes(worker(1)), [(at(5), Some(2 * second)), (at(9), None)]);
        assert_eq!(crashes(worker(0)), [(at(9), None)]);
    }

    #[test]
    fn programs_of_their_own_are_not_slowed() {
        for text in ["worker=2:slow=4x", "worker=*:slow=2x", "trace=steps.csv", "worker=1:trace=steps.csv"] {
            let error = plan(&["link:delay=1ms", text]).check_for_programs().unwrap_err().to_string();
            assert!(error.contains("cannot be slowed") && error.contains("worker=N:delay=20ms"), "{error}");
        }
        let possible =
            plan(&["server=0:slow=4x", "worker=2:pause=2s@1s", "worker=1:crash@5s", "pull:delay=1s"]);
        assert_eq!(possible.check_for_programs(), Ok(()));
    }

    #[test]
    fn a_late_answer_is_late_as_a_whole_and_as_rare_as_asked() {
        let plan = plan(&["pull:delay=4s,p=0.01"]);
        let mut faults = FrameFaults::new(&plan, 7);
        let mut late = 0;
        for request in 0..20_000 {
            let first = faults.fate(shard(0, 0), worker(3), &frame(Kind::Params, request, 0));
            for part in 1..3 {
                let next = faults.fate(shard(0, 0), worker(3), &frame(Kind::Params, request, part));
                assert_eq!(next, first, "request {request} part {part}");
            }
            late += u32::from(first == Fate::Delay(Delay::of_answer(Duration::from_secs(4))));
            assert_eq!(faults.fate(worker(3), shard(0, 0), &frame(Kind::Pull, request, 0)), Fate::Pass);
        }
        assert!((150..250).contains(&late), "{late} of 20000 at p = 0.01");
    }

    #[test]
    fn delays_of_an_answer_and_of_its_connection_are_kept_apart() {
        let answer = frame(Kind::Params, 1, 0);
        let fate = |texts: &[&str]| FrameFaults::new(&plan(texts), 1).fate(shard(0, 0), worker(3), &answer);
        let second = Duration::from_secs(1);
        let delay = |connection, answer| {
            Fate::Delay(Delay { connection: connection * second, answer: answer * second })
        };
        assert_eq!(fate(&["pull:delay=1s", "pull:delay=2s"]), delay(0, 3));
        assert_eq!(fate(&["pull:delay=1s", "link:delay=2s", "worker=3:delay=3s"]), delay(5, 1));
        assert_eq!(fate(&["pull:delay=0s", "link:delay=0s"]), Fate::Pass);
        assert_eq!(fate(&["pull:delay=1s", "worker=3:reset"]), Fate::Reset);
        assert_eq!(fate(&["push:delay=1s", "worker=2:reset"]), Fate::Pass);
    }

    #[test]
    fn the_frames_of_an_answer_are_held_back_alike_however_slow_their_connection_is() {
        let mut faults = FrameFaults::new(&plan(&["pull:delay=20ms,p=0.5", "link:delay=1ms,p=0.5"]), 7);
        let (mut slowed, mut held_back) = (0, 0);
        for request in 0..100 {
            let mut delay =
                |part| match faults.fate(shard(0, 0), worker(3), &frame(Kind::Params, request, part)) {
                    Fate::Delay(delay) => delay,
                    _ => Delay::default(),
                };
            let delays = [0, 1, 2, 3].map(&mut delay);
            assert!(delays.iter().all(|delay| delay.answer == delays[0].answer), "{request}: {delays:?}");
            slowed += delays.iter().filter(|delay| !delay.connection.is_zero()).count();
            held_back += usize::from(!delays[0].answer.is_zero());
        }
        assert!((150..250).contains(&slowed) && (30..70).contains(&held_back), "{slowed} {held_back}");
    }

    #[test]
    fn the_fate_of_a_message_does_not_depend_on_what_was_sent_before() {
        let plan = plan(&["push:delay=1s,p=0.5"]);
        let fates = |skip: u64| {
            let mut faults = FrameFaults::new(&plan, 1);
            for request in 0..skip {
                faults.fate(worker(9), shard(0, 0), &frame(Kind::Push, request, 0));
            }
            let fate = |request| faults.fate(worker(0), shard(0, 1), &frame(Kind::Push, request, 0));
            (0..64).map(fate).collect::<Vec<_>>()
        };
        assert_eq!(fates(0), fates(17));
    }

    #[test]
    fn resets_are_drawn_for_each_frame_and_only_where_asked() {
        let plan = plan(&["worker=1:reset,p=0.1"]);
        let mut faults = FrameFaults::new(&plan, 3);
        let header = frame(Kind::Push, 5, 0);
        let resets =
            (0..1000).filter(|_| faults.fate(worker(1), shard(0, 0), &header) == Fate::Reset).count();
        assert!((60..150).contains(&resets), "{resets} of 1000 at p = 0.1");
        assert!((0..1000).all(|_| faults.fate(worker(2), shard(0, 0), &header) == Fate::Pass));
    }

    #[test]
    fn frames_to_an_unknown_node_are_troubled_by_their_sender_and_their_kind() {
        let header = frame(Kind::Push, 5, 0);
        let fate = |text: &str| FrameFaults::new(&plan(&[text]), 1).fate(worker(1), None, &header);
        for text in ["worker=1:reset", "push:reset", "link:reset"] {
            assert_eq!(fate(text), Fate::Reset, "{text}");
        }
        for text in ["server=*:reset", "worker=2:reset", "pull:delay=1s"] {
            assert_eq!(fate(text), Fate::Pass, "{text}");
        }
    }

    #[test]
    fn step_times_come_from_the_last_trace_that_names_the_worker() {
        let mut plan = plan(&["trace=all.csv", "worker=1:trace=one.csv,scale=10"]);
        assert_eq!(plan.trace_paths().collect::<Vec<_>>(), ["all.csv", "one.csv"]);
        assert_eq!(plan.step_time(WorkerId(1), 0), None);
        plan.load_trace("all.csv", "worker,step,seconds\n0,0,1\n0,1,2\n1,0,3\n").unwrap();
        plan.load_trace("one.csv", "0,0,0.5\n").unwrap();
        let seconds = |rank, step| plan.step_time(WorkerId(rank), step).unwrap().as_secs_f64();
        assert_eq!([seconds(0, 0), seconds(0, 1), seconds(0, 2), seconds(2, 3)], [1.0, 2.0, 1.0, 2.0]);
        assert_eq!(seconds(1, 7), 5.0);
    }
}
