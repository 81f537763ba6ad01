//! What holds for every model, whatever workers do and operators set: checked on random histories against a plain
//! reckoning of who pushed what.

use paramill_core::consistency::{Admit, Advance, Controller, PullOutcome, SyncPolicy, axis};
use paramill_core::limits;
use paramill_core::types::{Clock, Time, WorkerId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const POLICIES: &[&str] = &[
    "bsp",
    "asp",
    "ssp:s=0",
    "ssp:s=2",
    "ssp:s=2,exec=soft",
    "ssp:s=2,exec=lazy",
    "ssp:s=2,cache=off",
    "dsps:min=1,max=4",
    "dsps:min=0,max=3,exec=soft",
    "drop:n=2",
    "drop:n=1,late=apply",
    "pssp:s=1,c=0.5",
    "pssp:s=1,c=0.8,exec=soft",
    "pssp:s=2,alpha=0.8",
    "pssp:s=1,alpha=significance",
    "psp:c=2,tau1=0.01",
    "psp:c=3",
    "psp:c=1,tau1=1ms,exec=soft",
    "quorum:q=0.5",
    "quorum:q=0.3,grace=3ms,late=weigh",
    "quorum:q=0.5,late=carry,exec=soft",
    "when:pull=gap < 1,push=count >= 2,step=round",
    "when:pull=false,push=count >= n / 2,step=round,late=apply,exec=soft",
    "when:pull=gap < 2 || rand() > 0.3,push=count >= n - 1",
    "when:pull=false,push=false,exec=soft",
    "when:pull=false,push=true",
    "remote:near,deadline=5ms,fallback=ssp:s=1",
    "remote:near,deadline=5ms,exec=soft,fallback=(when:pull=gap < 2,push=count >= n - 1)",
];

#[derive(Debug, Clone)]
enum Event {
    /// The next iteration, some left out.
    Push {
        worker: u32,
        skip: u64,
        significance: f64,
    },
    PushAgain {
        worker: u32,
    },
    /// For what it has pushed, or for more.
    Pull {
        worker: u32,
        more: u64,
    },
    Disconnect {
        worker: u32,
    },
    Leave {
        worker: u32,
    },
    /// From the first clock that it can push, or from a later one.
    Join {
        worker: u32,
        later: u64,
    },
    Set {
        policy: usize,
    },
    Pass {
        ms: u64,
    },
    /// Worker 0 comes or goes.
    Judge {
        is_here: bool,
    },
    /// Worker 0's word on a question, which may be one that nobody asked.
    Verdict {
        question: usize,
        holds: Option<bool>,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let worker = 0..5u32;
    prop_oneof![
        8 => (worker.clone(), prop_oneof![9 => Just(0), 1 => 0..9u64], 0.0..2.0)
            .prop_map(|(worker, skip, significance)| Event::Push { worker, skip, significance }),
        1 => worker.clone().prop_map(|worker| Event::PushAgain { worker }),
        8 => (worker.clone(), prop_oneof![9 => Just(0), 1 => 0..3u64])
            .prop_map(|(worker, more)| Event::Pull { worker, more }),
        1 => worker.clone().prop_map(|worker| Event::Disconnect { worker }),
        1 => worker.clone().prop_map(|worker| Event::Leave { worker }),
        1 => (worker, 0..3u64).prop_map(|(worker, later)| Event::Join { worker, later }),
        1 => (0..POLICIES.len()).prop_map(|policy| Event::Set { policy }),
        2 => (0..20u64).prop_map(|ms| Event::Pass { ms }),
        1 => prop::bool::weighted(0.7).prop_map(|is_here| Event::Judge { is_here }),
        6 => (0..3usize, prop::option::weighted(0.8, any::<bool>()))
            .prop_map(|(question, holds)| Event::Verdict { question, holds }),
    ]
}

/// A controller, and beside it what must be true of it.
struct World {
    controller: Controller,
    now: Time,
    progress: BTreeMap<WorkerId, i64>,
    /// The first clocks of those that joined.
    first: BTreeMap<WorkerId, Clock>,
    pushed: BTreeMap<WorkerId, Clock>,
    aggregated: u64,
    stepped: u64,
    /// Pulls that wait, by token: whose, and at which progress.
    waiting: BTreeMap<u64, (WorkerId, i64)>,
    answers: u64,
    next_token: u64,
    /// Numbers of the questions that were asked, and not answered.
    questions: Vec<u64>,
}

impl World {
    fn new(policy: &str) -> World {
        let workers = (0..4).map(WorkerId);
        World {
            controller: Controller::new(parse(policy), workers.clone(), 42),
            now: Time::ZERO,
            progress: workers.map(|worker| (worker, -1)).collect(),
            first: BTreeMap::new(),
            pushed: BTreeMap::new(),
            aggregated: 0,
            stepped: 0,
            waiting: BTreeMap::new(),
            answers: 0,
            next_token: 0,
            questions: Vec::new(),
        }
    }

    fn run(&mut self, event: &Event) {
        match *event {
            Event::Push { worker, skip, significance } => {
                let worker = WorkerId(worker);
                let next = self.progress.get(&worker).map_or(0, |progress| (progress + 1) as Clock);
                self.push(worker, next + skip, Some(significance));
            }
            Event::PushAgain { worker } => {
                let worker = WorkerId(worker);
                if let Some(&clock) = self.pushed.get(&worker) {
                    let admit = self.push(worker, clock, None);
                    assert!(matches!(admit, Admit::Duplicate | Admit::UnknownWorker));
                }
            }
            Event::Pull { worker, more } => self.pull(WorkerId(worker), more),
            Event::Disconnect { worker } => {
                self.controller.cancel(WorkerId(worker));
                self.waiting.retain(|_, (waits, _)| *waits != WorkerId(worker));
            }
            Event::Leave { worker } => {
                self.controller.remove_worker(WorkerId(worker), None);
                self.waiting.retain(|_, (waits, _)| *waits != WorkerId(worker));
                self.progress.remove(&WorkerId(worker));
            }
            Event::Join { worker, later } => {
                let worker = WorkerId(worker);
                let is_new = !self.progress.contains_key(&worker);
                let open = self.controller.state().v_train();
                // Late gradients may be part of the open round too.
                let is_past = |(worker, &progress): (&WorkerId, &i64)| {
                    progress >= open as i64 && self.first.get(worker).is_none_or(|&first| first <= open)
                };
                let has_begun =
                    self.controller.state().contributions() > 0 || self.progress.iter().any(is_past);
                let mut first = self.controller.join(worker, false);
                if is_new {
                    let next = self.pushed.get(&worker).map_or(0, |&clock| clock + 1);
                    assert_eq!(
                        first,
                        next.max(open + u64::from(has_begun)),
                        "the first clock is the earliest that can be pushed"
                    );
                    // Another shard may be further.
                    first += later;
                    self.controller.set_first_clock(worker, first);
                    self.progress.insert(worker, first as i64 - 1);
                    self.first.insert(worker, first);
                }
            }
            Event::Set { policy } => self.controller.set_policy(self.now, parse(POLICIES[policy])),
            Event::Pass { ms } => self.pass(self.now + Duration::from_millis(ms)),
            Event::Judge { is_here } => self.controller.set_judge(self.now, is_here),
            Event::Verdict { question, holds } => {
                let is_asked = question < self.questions.len();
                let number = if is_asked { self.questions.remove(question) } else { 1 << 40 };
                self.controller.verdict(self.now, number, holds);
            }
        }
        self.settle();
        self.check();
    }

    fn push(&mut self, worker: WorkerId, clock: Clock, significance: Option<f64>) -> Admit {
        let admit = self.controller.admit(worker, clock);
        let v_train = self.controller.state().v_train();
        match admit {
            Admit::Round(round) => {
                assert!((v_train..=v_train + limits::MAX_ROUNDS_AHEAD).contains(&round), "memory is bounded");
                self.aggregated += 1;
            }
            Admit::Late => assert!(clock < v_train),
            Admit::UnknownWorker => assert!(!self.progress.contains_key(&worker)),
            Admit::Duplicate => {
                let is_early = self.first.get(&worker).is_some_and(|&first| clock < first);
                assert!(is_early || clock <= self.pushed[&worker]);
            }
            Admit::Now | Admit::TooFarAhead => {}
        }
        self.controller.push(self.now, worker, clock, admit, significance, 1);
        if matches!(admit, Admit::Now | Admit::Round(_) | Admit::Late) {
            let progress = self.progress.get_mut(&worker).expect("admitted workers are live");
            *progress = (*progress).max(clock as i64);
            self.pushed.insert(worker, clock);
        }
        admit
    }

    fn pull(&mut self, worker: WorkerId, more: u64) {
        let Some(&progress) = self.progress.get(&worker) else { return };
        let progress = progress + more as i64;
        self.next_token += 1;
        match self.controller.pull(self.now, worker, (progress + 1) as Clock, self.next_token) {
            PullOutcome::Answer { staleness } => self.answered(progress, staleness),
            PullOutcome::Wait => {
                self.waiting.insert(self.next_token, (worker, progress));
            }
        }
    }

    fn pass(&mut self, until: Time) {
        while let Some(timeout) = self.controller.next_timeout().filter(|&timeout| timeout <= until) {
            self.now = self.now.max(timeout);
            let done = |controller: &Controller| (controller.state().v_train(), controller.stats().fallbacks);
            let before = done(&self.controller);
            self.settle();
            assert!(done(&self.controller) != before, "a timeout leads to something");
        }
        self.now = until;
    }

    fn settle(&mut self) {
        let mut version = self.controller.state().v_train();
        while let Some(Advance { version: next, closed, contributions, lr_factor, .. }) =
            self.controller.advance(self.now)
        {
            assert!(closed == version && next > version && lr_factor >= 0.0);
            version = next;
            self.stepped += u64::from(contributions);
        }
        while let Some(released) = self.controller.poll_released() {
            let (worker, progress) =
                self.waiting.remove(&released.token).expect("waits, and is answered once");
            assert_eq!(worker, released.worker);
            self.answered(progress, released.staleness);
        }
        while let Some(question) = self.controller.poll_question() {
            let is_its = |waiting: &&(WorkerId, i64)| **waiting == (question.worker, question.progress);
            assert!(
                self.waiting.values().any(|waiting| is_its(&waiting)),
                "{question:?} is about a pull that waits"
            );
            assert!(question.gap() >= 0, "{question:?}");
            self.questions.push(question.number);
        }
    }

    fn answered(&mut self, progress: i64, staleness: u64) {
        let (state, model) = (self.controller.state(), &self.controller.policy().model);
        assert_eq!(staleness, (progress + 1 - state.v_train() as i64).max(0) as u64);
        if let Some(bound) = model.staleness_bound(state) {
            assert!(staleness <= bound, "an answer lacks {staleness} rounds, the bound is {bound}");
        }
        self.answers += 1;
    }

    fn check(&self) {
        let state = self.controller.state();
        let v_train = state.v_train() as i64;
        let takes_part =
            |worker: &WorkerId| self.first.get(worker).is_none_or(|&first| first as i64 <= v_train);
        let taking_part = self.progress.iter().filter(|(worker, _)| takes_part(worker));
        let count =
            |clock: i64| taking_part.clone().filter(|&(_, &progress)| progress >= clock).count() as u32;
        assert_eq!(state.n() as usize, taking_part.clone().count());
        assert_eq!(state.count(), count(v_train));
        assert_eq!(state.count_of(state.v_train() + 1), count(v_train + 1));
        assert_eq!(state.contributors().count() + state.missing().count(), taking_part.clone().count());
        assert!(state.missing().all(|worker| self.progress[&worker] < v_train));
        assert_eq!(state.slowest().map(|(_, progress)| progress), self.progress.values().min().copied());
        assert_eq!(state.fastest().map(|(_, progress)| progress), self.progress.values().max().copied());

        let listed: BTreeSet<u64> = self.controller.waiting().map(|waiting| waiting.token).collect();
        assert_eq!(listed, self.waiting.keys().copied().collect());
        for waiting in self.controller.waiting() {
            assert!(waiting.reason.until > state.v_train(), "{}", waiting.reason);
        }
        assert!(self.stepped <= self.aggregated);
        let stats = self.controller.stats();
        assert_eq!(stats.answers(), self.answers);
        assert!(stats.dprs <= stats.pulls && stats.released <= stats.pulls);
    }

    /// Everybody pushes everything that anybody pushed or asked for.
    fn finish(&mut self) {
        let asked = self.waiting.values().map(|&(_, progress)| progress);
        let pushed = self.pushed.values().map(|&clock| clock as i64);
        let last = asked.chain(pushed).chain(self.progress.values().copied()).max().unwrap_or(-1);
        for clock in 0..=last {
            for worker in self.progress.keys().copied().collect::<Vec<_>>() {
                if self.progress[&worker] < clock {
                    let admit = self.push(worker, clock as Clock, None);
                    assert!(matches!(admit, Admit::Now | Admit::Round(_) | Admit::Late), "{admit:?}");
                    self.settle();
                    self.check();
                }
            }
        }
    }
}

fn parse(policy: &str) -> SyncPolicy {
    SyncPolicy::parse(&axis(), policy).expect("a policy of this file")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_history_keeps_the_rules(
        policy in 0..POLICIES.len(),
        events in proptest::collection::vec(event(), 1..150),
    ) {
        let mut world = World::new(POLICIES[policy]);
        for event in &events {
            world.run(event);
        }
        world.finish();
        if !world.progress.is_empty() {
            // What `late=apply` takes last may still be in the open round.
            let open = u64::from(world.controller.state().contributions());
            assert_eq!(world.stepped + open, world.aggregated, "every gradient of a round is stepped once");
        }
        assert!(world.waiting.is_empty(), "nobody waits when everybody has pushed everything");
    }

    #[test]
    fn a_history_has_one_outcome(
        policy in 0..POLICIES.len(),
        events in proptest::collection::vec(event(), 1..80),
    ) {
        let outcome = || {
            let mut world = World::new(POLICIES[policy]);
            events.iter().for_each(|event| world.run(event));
            (world.controller.stats().clone(), world.controller.state().v_train())
        };
        prop_assert_eq!(outcome(), outcome());
    }

    /// With c = N and b = 100% PSP-SGD is exactly synchronous SGD.
    #[test]
    fn psp_of_all_is_bsp(turns in proptest::collection::vec((0..4u32, 0..40u8), 1..200), tau1 in 0..3u32) {
        let (bsp, psp) = (history("bsp", &turns), history(&format!("psp:c=4,b=1,tau1={tau1}"), &turns));
        prop_assert_eq!(bsp, psp);
    }

    /// A quorum of everybody is synchronous SGD.
    #[test]
    fn a_quorum_of_all_is_bsp(turns in proptest::collection::vec((0..4u32, 0..40u8), 1..200)) {
        prop_assert_eq!(history("bsp", &turns), history("quorum:q=1", &turns));
    }

    /// Every row of FluentPS's Table III is an expression: the same gradients go to the same rounds, which close at the same time,
    /// and the same pulls wait, by the same chance.
    #[test]
    fn every_row_of_table_iii_is_an_expression(
        turns in proptest::collection::vec((0..4u32, 0..40u8), 1..200),
        row in 0..TABLE_III.len(),
    ) {
        let (model, expression) = TABLE_III[row];
        prop_assert_eq!(history(model, &turns), history(expression, &turns), "{} and {}", model, expression);
    }
}

/// FluentPS, Table III: models, and the same as expressions.
const TABLE_III: &[(&str, &str)] = &[
    ("bsp", "when:pull=progress < v_train,step=round"),
    ("asp", "when:pull=true"),
    ("ssp:s=2,cache=off", "when:pull=progress < v_train + 2"),
    ("dsps:min=1,max=8,cache=off", "when:pull=gap < 1 + floor(7 * imbalance + 0.5)"),
    ("drop:n=3", "when:pull=progress < v_train,push=count >= 3,step=round"),
    ("drop:n=2,late=apply", "when:pull=progress < v_train,push=count >= 2,step=round,late=apply"),
    ("pssp:s=1,c=0.5,cache=off", "when:pull=gap < 1 || rand() >= 0.5"),
    ("pssp:s=1,alpha=0.8,cache=off", "when:pull=gap < 1 || rand() >= 0.8 / (1 + exp(1 - gap))"),
    (
        "pssp:s=1,alpha=significance,cache=off",
        "when:pull=gap < 1 || rand() >= significance / (1 + exp(1 - gap))",
    ),
];

/// What workers that push, then pull and wait for the answer see: advances and answers in order. Who moves next is
/// given; now and then a worker leaves.
fn history(policy: &str, turns: &[(u32, u8)]) -> Vec<String> {
    let mut controller = Controller::new(parse(policy), (0..4).map(WorkerId), 7);
    let (mut clocks, mut blocked, mut log) = ([0u64; 4], [false; 4], Vec::new());
    for (turn, &(rank, fate)) in turns.iter().enumerate() {
        let (worker, at) = (WorkerId(rank), rank as usize);
        let now = Time(turn as u64 * 1_000_000_000);
        if controller.state().worker(worker).is_none() || (blocked[at] && fate != 0) {
            continue;
        }
        if fate == 0 {
            controller.remove_worker(worker, None);
        } else {
            let admit = controller.admit(worker, clocks[at]);
            log.push(format!("{worker} pushes {}: {admit:?}", clocks[at]));
            controller.push(now, worker, clocks[at], admit, Some(f64::from(fate) / 40.0), 1);
            clocks[at] += 1;
        }
        while let Some(advance) = controller.advance(now) {
            log.push(format!("{advance:?}"));
        }
        if fate != 0 {
            blocked[at] = controller.pull(now, worker, clocks[at], 0) == PullOutcome::Wait;
            log.push(format!("{worker} waits: {}", blocked[at]));
        }
        while let Some(released) = controller.poll_released() {
            blocked[released.worker.0 as usize] = false;
            log.push(format!("{released:?}"));
        }
    }
    log
}
