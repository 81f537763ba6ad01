//! Lemma 1 and Lemma 2 of Parameter Flow (section 4): how far replicas may be from the true parameters, when a filter is on pushes
//! and on broadcasts. An update is what a worker pushes: servers add it up, with a learning rate of one.

use super::W;
use super::bench::Bench;
use super::broadcast::broadcast;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::Axis;
use paramill_core::table::TableSpec;
use paramill_core::worker::{Gradient, PullOptions, Ticket};
use proptest::prelude::*;

/// Of a row.
const WIDTH: usize = 3;

/// Workers that push what was drawn.
#[derive(Debug, Clone)]
struct Flow {
    workers: usize,
    rows: usize,
    /// The table is one of rows.
    is_sparse: bool,
    /// The threshold of the first step.
    delta: f32,
    tree: &'static str,
    /// By clock and worker: elements in thresholds. Of a table of rows those that are zero in a whole row are not pushed.
    updates: Vec<Vec<Vec<f32>>>,
}

/// Sums of updates are some hundred at most, in thresholds: what 32 bits round off of them.
const ROUNDING: f64 = 1e-4;

fn flow() -> impl Strategy<Value = Flow> {
    let trees = prop::sample::select(vec!["star", "chain", "rotated:degree=2"]);
    let shape = (1..5usize, 1..6usize, any::<bool>(), -3.0..1.0f32, trees, 1..20usize);
    shape.prop_flat_map(|(workers, rows, is_sparse, exponent, tree, clocks)| {
        let element = prop_oneof![Just(0.0f32), -0.5..0.5f32, -4.0..4.0f32];
        let row = prop_oneof![
            1 => Just(vec![0.0; WIDTH]),
            2 => prop::collection::vec(element, WIDTH),
        ];
        let table = prop::collection::vec(row, rows).prop_map(|rows| rows.concat());
        let updates = prop::collection::vec(prop::collection::vec(table, workers), clocks);
        updates.prop_map(move |updates| {
            let delta = 10f32.powf(exponent);
            Flow { workers, rows, is_sparse, delta, tree, updates }
        })
    })
}

impl Flow {
    fn elements(&self) -> usize {
        self.rows * WIDTH
    }

    fn started(&self, sync: &str) -> Bench {
        let config = broadcast(self.workers as u32, 1, sync, self.tree);
        let filter = format!("dvf:delta={}", self.delta);
        let policy =
            config.policy.with(Axis::Codec, filter.as_str()).with(Axis::AnswerCodec, filter.as_str());
        let policy = policy.with(Axis::Reduce, "sum").with(Axis::Chunk, "1KB");
        let mut bench =
            Bench::new(JobConfig { policy, ..broadcast(self.workers as u32, 1, sync, self.tree) }, 1);
        let spec = match self.is_sparse {
            true => TableSpec::sparse("w", self.rows as u64, WIDTH as u64),
            false => TableSpec::dense("w", [self.elements() as u64]),
        };
        bench.start(&[(spec, vec![0.0; self.elements()])]);
        bench
    }

    fn update(&self, clock: usize, worker: usize) -> Vec<f32> {
        self.updates[clock][worker].iter().map(|value| value * self.delta).collect()
    }

    /// A worker pushes its update of a clock. The ticket is due when it may go on.
    fn iterate(&self, bench: &mut Bench, worker: usize, clock: usize) -> Ticket {
        let (now, update) = (bench.now(), self.update(clock, worker));
        let all: Vec<u32> = (0..self.rows as u32).collect();
        let ticket = if self.is_sparse {
            let is_pushed = |row: &&[f32]| row.iter().any(|value| *value != 0.0);
            let pushed = || update.chunks(WIDTH).zip(0..).filter(|(row, _)| is_pushed(row));
            let rows: Vec<u32> = pushed().map(|(_, number)| number).collect();
            let values: Vec<f32> = pushed().flat_map(|(row, _)| row.to_vec()).collect();
            let gradient = Gradient::Rows { rows: &rows, values: &values };
            bench.worker_mut(worker).push(now, W, gradient, false).expect("it fits");
            bench.worker_mut(worker).clock();
            let options = PullOptions { rows: Some(&all), now: false };
            bench.worker_mut(worker).pull(now, W, options).expect("they are rows of it")
        } else {
            let ticket =
                bench.worker_mut(worker).push(now, W, Gradient::Dense(&update), true).expect("it fits");
            bench.worker_mut(worker).clock();
            ticket
        };
        bench.run();
        ticket
    }

    /// What a worker's replica has.
    fn replica(&self, bench: &mut Bench, worker: usize) -> Vec<f32> {
        let all: Vec<u32> = (0..self.rows as u32).collect();
        let (now, rows) = (bench.now(), self.is_sparse.then_some(&all[..]));
        let ticket = bench.worker_mut(worker).pull(now, W, PullOptions { rows, now: false }).expect("a pull");
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
        let rows = bench.worker_mut(worker).redeem(ticket);
        if self.is_sparse { rows } else { bench.worker(worker).values(W).to_vec() }
    }

    /// The distance of what all replicas have from the parameters that generic BSP has after so many clocks, in thresholds.
    fn distance(&self, bench: &mut Bench, clocks: usize) -> f64 {
        let published = bench.published(W, self.elements());
        for worker in 0..self.workers {
            assert_eq!(self.replica(bench, worker), published, "worker {worker} at version {clocks}");
        }
        let truth = |element: usize| -> f64 {
            let updates = self.updates[..clocks].iter().flatten();
            -updates.map(|update| f64::from(update[element])).sum::<f64>()
        };
        let difference = |(element, value): (usize, &f32)| f64::from(value / self.delta) - truth(element);
        published.iter().enumerate().map(difference).map(|of| of * of).sum::<f64>().sqrt()
    }

    /// `(n + 1) delta_t sqrt(d)`, in thresholds of the first step.
    fn bound(&self, clocks: usize) -> f64 {
        (self.workers + 1) as f64 * (self.elements() as f64 / clocks as f64).sqrt()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Lemma 1 (eq. 23): under PF-BSP `|A_t| <= (n + 1) delta_t sqrt(d)`.
    #[test]
    fn under_pf_bsp_replicas_are_near_the_true_parameters(flow in flow()) {
        let mut bench = flow.started("bsp");
        for clock in 0..flow.updates.len() {
            let tickets: Vec<Ticket> =
                (0..flow.workers).map(|worker| flow.iterate(&mut bench, worker, clock)).collect();
            for (worker, ticket) in tickets.into_iter().enumerate() {
                prop_assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
                bench.worker_mut(worker).redeem(ticket);
            }
            let (distance, bound) = (flow.distance(&mut bench, clock + 1), flow.bound(clock + 1));
            prop_assert!(distance <= bound + ROUNDING, "version {}: {distance} above {bound}", clock + 1);
        }
    }

    /// Lemma 2 (eq. 25): under PF-SSP `|A_t| < (n + 1) delta_t sqrt(d) + n s eta_t L`, where `eta_t L` bounds an update: versions have what
    /// fast workers pushed early.
    #[test]
    fn under_pf_ssp_replicas_are_near_the_true_parameters(
        flow in flow(),
        s in 1..4usize,
        turns in prop::collection::vec(0..5usize, 0..200),
    ) {
        let mut bench = flow.started(&format!("ssp:s={s}"));
        let norm = |update: &Vec<f32>| update.iter().map(|value| f64::from(value * value)).sum::<f64>().sqrt();
        let largest = flow.updates.iter().flatten().map(norm).fold(0.0, f64::max);
        let (mut clocks, mut versions) = (vec![0; flow.workers], 0);
        let mut blocked: Vec<Option<Ticket>> = vec![None; flow.workers];
        // In the end the others catch up.
        let last = (0..flow.updates.len()).flat_map(|_| 0..flow.workers);
        for worker in turns.into_iter().map(|turn| turn % flow.workers).chain(last) {
            let is_blocked = blocked[worker].is_some_and(|ticket| bench.outcome(worker, ticket).is_none());
            if is_blocked || clocks[worker] == flow.updates.len() {
                continue;
            }
            if let Some(ticket) = blocked[worker].take() {
                prop_assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
                bench.worker_mut(worker).redeem(ticket);
            }
            blocked[worker] = Some(flow.iterate(&mut bench, worker, clocks[worker]));
            clocks[worker] += 1;
            let slowest = *clocks.iter().min().expect("a worker");
            prop_assert!(clocks.iter().all(|clock| clock - slowest <= s + 1), "{clocks:?}");
            if slowest > versions {
                versions = slowest;
                let bound = flow.bound(versions) + (flow.workers * s) as f64 * largest;
                let distance = flow.distance(&mut bench, versions);
                prop_assert!(distance <= bound + ROUNDING, "version {versions}: {distance} above {bound}");
            }
        }
        prop_assert_eq!(versions, flow.updates.len());
    }
}

/// Nothing of the first updates travels, although each worker has almost a threshold in every element.
#[test]
fn no_smaller_factor_would_do() {
    for is_sparse in [false, true] {
        let (workers, rows) = (4, 3);
        let updates = vec![vec![vec![0.99; rows * WIDTH]; workers]];
        let flow = Flow { workers, rows, is_sparse, delta: 0.5, tree: "star", updates };
        let mut bench = flow.started("bsp");
        (0..workers).for_each(|worker| _ = flow.iterate(&mut bench, worker, 0));
        let (distance, bound) = (flow.distance(&mut bench, 1), flow.bound(1));
        assert!(distance > bound * 0.99 * 4.0 / 5.0 - ROUNDING, "{distance} of {bound}");
    }
}
