//! Quorum between the roles, in virtual time: rounds go on without a slow worker, which counts again when it has recovered.

use crate::bench::Bench;
use crate::{W, job};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::prng::Prng;
use paramill_core::table::TableSpec;
use paramill_core::types::{TableId, Time};
use paramill_core::worker::{Gradient, PullOptions, Ticket, WorkerError};

/// One element for each worker's gradients, on two servers.
const ELEMENTS: usize = 16;

/// Seconds of an iteration.
const STEP_S: f64 = 0.1;

fn started(mut bench: Bench) -> Bench {
    bench.declare_and_start(&[(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS])]);
    bench.pass(1.0);
    bench
}

/// Workers that compute, push, and wait for what follows.
struct Race {
    bench: Bench,
    /// Until when each computes, or what it waits for.
    at: Vec<Result<Time, Ticket>>,
    prng: Prng,
    /// Iterations are up to this much longer, by chance.
    jitter: f64,
}

impl Race {
    fn new(bench: Bench, jitter: f64) -> Race {
        let (now, workers) = (bench.now(), bench.worker_count());
        Race { bench, at: vec![Ok(now); workers], prng: Prng::new(7), jitter }
    }

    /// So many seconds, in which these workers are so much slower.
    fn run(&mut self, seconds: f64, slow: &[(usize, f64)]) {
        let until = Time::from_secs_f64(self.bench.now().as_secs_f64() + seconds);
        while self.bench.now() < until {
            for worker in 0..self.at.len() {
                self.play(worker, slow);
            }
            self.bench.pass(0.001);
        }
    }

    fn play(&mut self, worker: usize, slow: &[(usize, f64)]) {
        let now = self.bench.now();
        match self.at[worker] {
            Ok(until) if until > now => {}
            Ok(_) => {
                let mut gradient = [0.0; ELEMENTS];
                gradient[worker] = 1.0;
                let role = self.bench.worker_mut(worker);
                let ticket = role.push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
                role.clock();
                self.at[worker] = Err(ticket);
            }
            Err(ticket) => {
                let Some(outcome) = self.bench.outcome(worker, ticket) else { return };
                assert_eq!(outcome, Ok(()), "worker {worker}");
                let factor = slow.iter().find(|(of, _)| *of == worker).map_or(1.0, |(_, factor)| *factor);
                let seconds = STEP_S * factor * (1.0 + self.jitter * self.prng.uniform());
                self.at[worker] = Ok(Time::from_secs_f64(now.as_secs_f64() + seconds));
            }
        }
    }

    /// Rounds that are closed, as the first worker knows.
    fn rounds(&self) -> f64 {
        self.bench.worker(0).current_clock() as f64
    }

    /// Gradients of each worker that were applied, where they are summed and a step is as long as they are.
    fn applied(&self) -> Vec<f32> {
        self.bench.parameters(W, ELEMENTS).iter().map(|value| -value).collect()
    }
}

fn summing(workers: u32, sync: &str) -> JobConfig {
    let config = job(workers, 2, sync, "sgd:lr=1");
    JobConfig { policy: config.policy.with(Axis::Reduce, "sum").with(Axis::Order, "arrival"), ..config }
}

/// Eight workers, of which the last is 5 times slower for a while, against seven: as many rounds, but for one in ten. When it has
/// recovered it counts in nine rounds of ten.
fn a_slow_worker_costs_little_and_counts_again(all: Bench, without: Bench, jitter: f64) {
    let (mut all, mut without) = (Race::new(started(all), jitter), Race::new(started(without), jitter));
    let (before, after) = (2.0, 10.0);
    all.run(before, &[]);
    without.run(before, &[]);
    let (rounds, applied) = (all.rounds(), all.applied());
    assert!((0..8).all(|worker| f64::from(applied[worker]) >= 0.9 * rounds), "{applied:?} of {rounds}");
    let began = [all.rounds(), without.rounds()];
    all.run(after, &[(7, 5.0)]);
    without.run(after, &[]);
    let ratio = (all.rounds() - began[0]) / (without.rounds() - began[1]);
    assert!((0.9..=1.02).contains(&ratio), "{ratio} of the rounds that are closed without it");
    // A few rounds pass until it is known for fast.
    all.run(1.0, &[]);
    let (rounds, applied) = (all.rounds(), all.applied());
    all.run(5.0, &[]);
    let rounds = all.rounds() - rounds;
    for (worker, (after, before)) in all.applied().iter().zip(applied).enumerate().take(8) {
        let share = f64::from(after - before) / rounds;
        assert!((0.9..=1.1).contains(&share), "worker {worker} counts in {share} of {rounds} rounds");
    }
}

#[test]
fn a_slow_worker_is_not_waited_for_until_it_has_recovered() {
    for late in ["drop", "carry"] {
        for jitter in [0.0, 0.05] {
            let sync = format!("quorum:q=0.75,late={late}");
            a_slow_worker_costs_little_and_counts_again(
                Bench::new(summing(8, &sync), 2),
                Bench::new(summing(7, &sync), 2),
                jitter,
            );
        }
    }
}

#[test]
fn nor_is_it_behind_aggregators() {
    let config = |workers| summing(workers, "quorum:q=0.75");
    a_slow_worker_costs_little_and_counts_again(
        Bench::with_aggregators(config(8), 2, &[0, 0, 0, 0, 1, 1, 1, 1]),
        Bench::with_aggregators(config(7), 2, &[0, 0, 0, 0, 1, 1, 1]),
        0.0,
    );
}

#[test]
fn nor_where_versions_are_broadcast() {
    let config = |workers| {
        let config = summing(workers, "quorum:q=0.75");
        JobConfig { policy: config.policy.with(Axis::Broadcast, "star"), ..config }
    };
    a_slow_worker_costs_little_and_counts_again(Bench::new(config(8), 2), Bench::new(config(7), 2), 0.0);
}

#[test]
fn a_worker_that_is_slow_from_the_first_step_is_waited_for_once() {
    let mut race = Race::new(started(Bench::new(summing(8, "quorum:q=0.75"), 2)), 0.0);
    race.run(10.0, &[(7, 5.0)]);
    assert!(race.rounds() >= 80.0, "{} rounds of 100", race.rounds());
}

/// The same gradients in the same order give the same bits, with nobody late.
#[test]
fn with_nobody_late_it_is_bsp_bit_for_bit() {
    let trained = |sync: &str, order: &str, codec: &str| {
        let config = job(4, 2, sync, "adam:lr=0.01");
        let policy = config.policy.with(Axis::Order, order).with(Axis::Codec, codec);
        let mut bench = started(Bench::new(JobConfig { policy, ..config }, 2));
        let mut prng = Prng::new(3);
        for clock in 0..20 {
            let tickets: Vec<Ticket> = (0..4)
                .map(|turn| (turn + clock) % 4)
                .map(|worker| {
                    let gradient = [(); ELEMENTS].map(|()| prng.uniform() as f32 - 0.5);
                    let now = bench.now();
                    let role = bench.worker_mut(worker);
                    let ticket = role.push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
                    role.clock();
                    bench.pass(0.001);
                    ticket
                })
                .collect();
            for (turn, ticket) in tickets.into_iter().enumerate() {
                assert_eq!(bench.outcome((turn + clock) % 4, ticket), Some(Ok(())), "{sync}");
            }
        }
        bench.parameters(W, ELEMENTS).iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    for (order, codec) in [("ranked", "none"), ("arrival", "none"), ("arrival", "topk:0.5")] {
        for sync in ["quorum:q=1", "quorum:q=0.5,grace=10s,late=weigh", "quorum:q=0.5,grace=10s,late=carry"] {
            assert_eq!(trained("bsp", order, codec), trained(sync, order, codec), "{sync}, {order}, {codec}");
        }
    }
}

/// A push of a constant gradient, of so many samples.
fn push(bench: &mut Bench, worker: usize, value: f32, samples: u32) -> Ticket {
    let now = bench.now();
    let role = bench.worker_mut(worker);
    role.set_samples(samples).expect("it is a number of samples");
    let ticket = role.push(now, W, Gradient::Dense(&[value; ELEMENTS]), true).expect("it fits");
    role.clock();
    bench.pass(0.001);
    ticket
}

#[test]
fn late_gradients_are_dropped_or_weighed_or_carried_and_a_mean_stays_a_mean() {
    for (late, expected) in [
        ("drop", -(2.0 + 4.0)),
        // The third worker's gradient of 9 is two rounds late: a weight of 1/3 beside two of 1.
        ("weigh", -(2.0 + 4.0 + (6.0 + 6.0 + 9.0 / 3.0) / (2.0 + 1.0 / 3.0))),
        ("carry", -(2.0 + 4.0 + (6.0 + 6.0 + 9.0) / 3.0)),
    ] {
        for order in ["ranked", "arrival"] {
            let config = job(3, 2, &format!("quorum:q=0.5,grace=0,late={late}"), "sgd:lr=1");
            let policy = config.policy.with(Axis::Order, order);
            let mut bench = started(Bench::new(JobConfig { policy, ..config }, 2));
            for value in [2.0, 4.0] {
                push(&mut bench, 0, value, 1);
                push(&mut bench, 1, value, 1);
            }
            let ticket = push(&mut bench, 2, 9.0, 1);
            assert_eq!(bench.outcome(2, ticket), Some(Ok(())), "who is late does not wait");
            assert_eq!(bench.worker(2).current_clock(), 2, "it goes on with the round that is open");
            push(&mut bench, 0, 6.0, 1);
            push(&mut bench, 1, 6.0, 1);
            let expected = if late == "drop" { expected - 6.0 } else { expected };
            let trained = bench.parameters(W, ELEMENTS);
            let is_expected = trained.iter().all(|value| (value - expected).abs() < 1e-5);
            assert!(is_expected, "late={late}, {order}: {trained:?} is not {expected}");
        }
    }
}

#[test]
fn a_mean_is_over_samples() {
    for sync in ["bsp", "quorum", "drop:n=3", "psp:c=3"] {
        for order in ["ranked", "arrival"] {
            let config = job(3, 2, sync, "sgd:lr=1");
            let policy = config.policy.with(Axis::Order, order);
            let mut bench = started(Bench::new(JobConfig { policy, ..config }, 2));
            for (worker, samples) in [5, 1, 2].into_iter().enumerate() {
                push(&mut bench, worker, 1.0 + worker as f32, samples);
            }
            let expected = -(5.0 + 2.0 + 2.0 * 3.0) / 8.0;
            assert_eq!(bench.parameters(W, ELEMENTS), [expected; ELEMENTS], "{sync}, {order}");
        }
    }
    // Where each gradient is a step, it has the share of its samples among what workers pushed last.
    let mut bench = started(Bench::new(job(2, 2, "asp", "sgd:lr=1"), 2));
    push(&mut bench, 0, 4.0, 6);
    assert_eq!(bench.parameters(W, ELEMENTS), [-2.0; ELEMENTS], "the other worker is taken for equal");
    push(&mut bench, 1, 8.0, 2);
    assert_eq!(bench.parameters(W, ELEMENTS), [-4.0; ELEMENTS], "2 of 8 samples");
}

#[test]
fn weights_that_cannot_be_kept_are_refused() {
    let refused = |bench: &mut Bench, expected: &str| {
        let ticket = push(bench, 0, 1.0, 3);
        bench.pass(1.0);
        match bench.outcome(0, ticket) {
            Some(Err(WorkerError::Refused { message, .. })) => {
                assert!(message.contains(expected), "{message}")
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(bench.parameters(W, ELEMENTS), [0.0; ELEMENTS]);
    };
    refused(&mut started(Bench::new(summing(2, "bsp"), 2)), "samples are weights of a mean");
    let config = job(2, 2, "bsp", "sgd:lr=1");
    let config = JobConfig { policy: config.policy.with(Axis::Order, "arrival"), ..config };
    let aggregated = Bench::with_aggregators(config, 2, &[0, 0]);
    refused(&mut started(aggregated), "an aggregator's sums weigh all gradients alike");
    let mut bench = started(Bench::new(job(2, 2, "bsp", "sgd:lr=1"), 2));
    for samples in [0, u32::MAX] {
        let error = bench.worker_mut(0).set_samples(samples).unwrap_err().to_string();
        assert!(error.contains("a gradient is the mean of 1 to 16777216 samples"), "{error}");
    }
}

/// A worker that left rounds out is where the others are when the model that let it do so is switched from.
#[test]
fn a_job_goes_on_when_another_model_takes_over() {
    for next in ["bsp", "asp", "ssp:s=1", "drop:n=2", "psp:c=2"] {
        let mut race = Race::new(started(Bench::new(summing(3, "quorum:q=0.6"), 2)), 0.0);
        race.run(3.0, &[(2, 5.0)]);
        race.bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, next)])));
        race.run(1.0, &[]);
        let rounds = race.rounds();
        race.run(2.0, &[]);
        assert!(race.rounds() >= rounds + 15.0, "{next}: {rounds} rounds, then {}", race.rounds());
    }
}

/// Of two tables the first closes a round without worker 3, which then leaves that iteration out. The second one lacks the push of a
/// worker that stands still between the two, and would wait for worker 3 for ever.
#[test]
fn a_worker_that_leaves_an_iteration_out_is_not_waited_for_by_tables_where_its_round_is_open() {
    let config = || summing(4, "quorum:q=0.75,grace=0");
    let broadcast = JobConfig { policy: config().policy.with(Axis::Broadcast, "star"), ..config() };
    let benches = [
        ("direct", Bench::new(config(), 1)),
        ("aggregated", Bench::with_aggregators(config(), 1, &[0, 0, 1, 1])),
        ("broadcast", Bench::new(broadcast, 1)),
    ];
    for (name, mut bench) in benches {
        let table = |name: &str| (TableSpec::dense(name, [ELEMENTS as u64]), vec![0.0; ELEMENTS]);
        bench.declare_and_start(&[table("v"), table("w")]);
        bench.pass(1.0);
        let [v, w] = [TableId(0), TableId(1)];
        let push = |bench: &mut Bench, worker: usize, table: TableId| {
            let now = bench.now();
            let gradient = [1.0; ELEMENTS];
            bench.worker_mut(worker).push(now, table, Gradient::Dense(&gradient), true).expect("it fits")
        };
        push(&mut bench, 0, v);
        let waiting = [1, 2].map(|worker| {
            push(&mut bench, worker, v);
            let ticket = push(&mut bench, worker, w);
            bench.worker_mut(worker).clock();
            ticket
        });
        bench.pass(0.1);
        let now = bench.now();
        let first = bench.worker_mut(3).pull(now, v, PullOptions::default()).expect("it may");
        bench.pass(0.1);
        assert_eq!((bench.outcome(3, first), bench.worker(3).current_clock()), (Some(Ok(())), 1), "{name}");
        let now = bench.now();
        let second = bench.worker_mut(3).pull(now, w, PullOptions::default()).expect("it may");
        bench.pass(2.0);
        assert_eq!(bench.outcome(3, second), Some(Ok(())), "{name}: {}", bench.explain(3, second));
        for (worker, ticket) in [1, 2].into_iter().zip(waiting) {
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{name}");
        }
        assert_eq!(bench.parameters(w, ELEMENTS), [-2.0; ELEMENTS], "{name}: of those who pushed it");
    }
}
