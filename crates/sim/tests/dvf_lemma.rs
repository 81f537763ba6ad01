//! Lemma 1 of Parameter Flow on the running system: after every synchronous step, the parameters that a worker trains on
//! are at most `(n + 1) * delta_t * sqrt(d)` away from those without any filter.
//!
//! Workers filter their updates, and servers filter what they answer. An update is the learning rate times a gradient,
//! so that gradients are filtered at `delta` divided by the learning rate.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use paramill_core::prng::Prng;
use paramill_core::types::{Clock, NodeId, TableId, Time, WorkerId};
use paramill_core::wire::Kind;
use paramill_sim::actor::Actor;
use paramill_sim::cluster::Cluster;
use paramill_sim::gradient::{PushId, gradient, initial};
use paramill_sim::rule::FrameView;
use paramill_sim::scenario::Scenario;
use paramill_sim::world::Observer;
use std::collections::BTreeMap;

const TABLE: TableId = TableId(0);

/// Knows the parameters that there would be if every update arrived whole.
struct Lemma {
    seed: u64,
    workers: u32,
    lr: f64,
    delta: f64,
    /// True parameters by version, and how many workers' updates of the last round are in.
    versions: BTreeMap<Clock, (Vec<f64>, u32)>,
    last_push: BTreeMap<WorkerId, Clock>,
    /// Distances as a part of the bound.
    largest: f64,
    checked: u64,
}

impl Observer<Actor> for Lemma {
    /// A worker's values when it sends its first frame of an iteration are those that it computed with.
    fn on_sent(&mut self, frame: &FrameView<'_>, sender: &Actor) -> Result<(), String> {
        let (NodeId::Worker(worker), Kind::Push) = (frame.from, frame.header.kind) else { return Ok(()) };
        let clock = frame.header.clock;
        if self.last_push.insert(worker, clock) == Some(clock) {
            return Ok(());
        }
        let held = sender.as_player().expect("a worker plays").worker().values(TABLE);
        let (before, count) = self.versions.get(&clock).cloned().expect("synchronous workers are in step");
        assert_eq!(count, self.workers, "a round is complete before the next begins");
        if clock > 0 {
            let distance =
                before.iter().zip(held).map(|(a, b)| (a - f64::from(*b)).powi(2)).sum::<f64>().sqrt();
            // delta_t = delta / sqrt(t) of the round that made these parameters; t counts from 1.
            let delta = self.delta / (clock as f64).sqrt();
            let bound = f64::from(self.workers + 1) * delta * (held.len() as f64).sqrt();
            if distance > bound * (1.0 + 1e-5) {
                return Err(format!("{worker} at clock {clock} is {distance} away; Lemma 1 says {bound}"));
            }
            self.largest = self.largest.max(distance / bound);
            self.checked += 1;
        }
        let (next, count) = self.versions.entry(clock + 1).or_insert((before, 0));
        let push = PushId { seed: self.seed, worker, clock, table: TABLE };
        for (element, (value, held)) in next.iter_mut().zip(held).enumerate() {
            let g = gradient(&push, element as u64, *held);
            *value -= self.lr * f64::from(g);
        }
        *count += 1;
        Ok(())
    }
}

#[test]
fn filtered_parameters_stay_near_the_true_ones() {
    let (mut largest, mut checked) = (0.0f64, 0);
    for seed in 0..24u64 {
        let mut prng = Prng::new(seed);
        let workers = 1 + prng.below(6) as u32;
        let (lr, delta) = (0.8 / f64::from(workers), 10f64.powf(-3.0 + 2.0 * prng.uniform()));
        let elements = 5 + prng.below(3000);
        let text = format!(
            "workers = {workers}\nservers = {}\ncores = {}\niterations = 40\nseed = {seed}\nreduce = 'sum'\n\
             optimizer = 'sgd:lr={lr}'\ncodec = 'dvf:delta={}'\nanswer_codec = 'dvf:delta={delta}'\n\
             chunk = '{}B'\nplacement = 'uniform'\n[[tables]]\nname = 'w'\nshape = [{elements}]\n",
            1 + prng.below(3),
            1 + prng.below(2),
            delta / lr,
            4 * (1 + prng.below(700)),
        );
        let scenario = Scenario::parse(&text).unwrap();
        let mut cluster = Cluster::new(&scenario).unwrap();
        let start: Vec<f64> = (0..elements).map(|element| initial(seed, TABLE, element).into()).collect();
        let mut lemma = Lemma {
            seed,
            workers,
            lr: f64::from(lr as f32),
            delta,
            versions: BTreeMap::from([(0, (start, workers))]),
            last_push: BTreeMap::new(),
            largest: 0.0,
            checked: 0,
        };
        let ended = cluster.run(Time::from_secs_f64(1e4), &mut lemma);
        assert!(matches!(ended, Ok(true)), "seed {seed}: {ended:?}\n{text}");
        largest = largest.max(lemma.largest);
        checked += lemma.checked;
    }
    // The bound is of use: something comes near enough to it to tell a filter that keeps too much.
    assert!(checked > 2000 && largest > 0.1, "{checked} checked, at most {largest} of the bound");
}
