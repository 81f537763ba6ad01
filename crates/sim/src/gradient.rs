//! What simulated workers push: gradients of a noisy quadratic, a function of a seed and nothing else.
//!
//! Anything that runs a scenario (this simulator, or real processes over sockets) uses these functions, so that two
//! runs with the same order of additions end with the same bits.

use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, TableId, WorkerId};

/// Where an element starts.
pub fn initial(seed: u64, table: TableId, element: u64) -> f32 {
    unit(mix(seed, [1, table.0.into(), element, 0]))
}

/// The value that training moves an element to.
pub fn target(seed: u64, table: TableId, element: u64) -> f32 {
    unit(mix(seed, [2, table.0.into(), element, 0]))
}

/// The gradient of `(value - target)^2 / 2` with this worker's noise of this iteration.
pub fn gradient(seed: u64, worker: WorkerId, clock: Clock, table: TableId, element: u64, value: f32) -> f32 {
    let noise = unit(mix(seed, [3 | u64::from(worker.0) << 8, table.0.into(), element, clock]));
    (value - target(seed, table, element)) + 0.1 * noise
}

/// Which gradients workers push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gradients {
    /// [`gradient`], starting from [`initial`].
    Quadratic,
    /// The negative of [`tag`], starting from 0: under `sgd:lr=1` and a sum over workers, parameters count pushes.
    Tagged {
        /// Workers of the job.
        workers: u32,
    },
}

impl Gradients {
    /// Where an element starts.
    pub fn initial(self, seed: u64, table: TableId, element: u64) -> f32 {
        match self {
            Gradients::Quadratic => initial(seed, table, element),
            Gradients::Tagged { .. } => 0.0,
        }
    }

    /// What a worker pushes for an element whose value it last read as `value`.
    pub fn at(
        self,
        seed: u64,
        worker: WorkerId,
        clock: Clock,
        table: TableId,
        element: u64,
        value: f32,
    ) -> f32 {
        match self {
            Gradients::Quadratic => gradient(seed, worker, clock, table, element, value),
            Gradients::Tagged { workers } => -tag(workers, worker, clock, element),
        }
    }
}

/// What one push adds to an element, so that a sum of tags tells who was counted how often.
///
/// Elements are dealt out to the workers in turn, two each: one counts the worker's pushes, the other adds up their
/// clocks (from 1), which tells a push that was lost from another that was counted twice.
pub fn tag(workers: u32, worker: WorkerId, clock: Clock, element: u64) -> f32 {
    let place = element % (2 * u64::from(workers));
    if place == 2 * u64::from(worker.0) {
        1.0
    } else if place == 2 * u64::from(worker.0) + 1 {
        (clock + 1) as f32
    } else {
        0.0
    }
}

/// The rows of a sparse table that a worker touches in an iteration, ascending: about a quarter, at least one.
pub fn touched_rows(seed: u64, worker: WorkerId, clock: Clock, table: TableId, spec: &TableSpec) -> Vec<u32> {
    let rows = spec.shape.first().copied().unwrap_or(0).min(u32::MAX.into()) as u32;
    let draw = |row: u32| mix(seed, [4 | u64::from(worker.0) << 8, table.0.into(), row.into(), clock]);
    let mut touched: Vec<u32> = (0..rows).filter(|&row| draw(row) >> 62 == 0).collect();
    if touched.is_empty() && rows > 0 {
        touched.push((draw(0) % u64::from(rows)) as u32);
    }
    touched
}

/// Uniform in [-1, 1) with 24 bits, exact in `f32`.
fn unit(hash: u64) -> f32 {
    (hash >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn mix(seed: u64, parts: [u64; 4]) -> u64 {
    parts.iter().fold(seed ^ 0x5851_F42D_4C95_7F2D, |hash, &part| {
        let mut z = hash ^ part.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_means_the_same_gradients_forever() {
        let g = gradient(7, WorkerId(3), 11, TableId(2), 13, 0.5);
        assert_eq!(g, gradient(7, WorkerId(3), 11, TableId(2), 13, 0.5));
        assert_ne!(g, gradient(8, WorkerId(3), 11, TableId(2), 13, 0.5));
        assert_ne!(g, gradient(7, WorkerId(2), 11, TableId(2), 13, 0.5));
        assert_ne!(g, gradient(7, WorkerId(3), 12, TableId(2), 13, 0.5));
    }

    #[test]
    fn noise_has_no_bias_to_speak_of() {
        let n = 20_000;
        let sum: f32 =
            (0..n).map(|e| gradient(1, WorkerId(0), 0, TableId(0), e, target(1, TableId(0), e))).sum();
        assert!((sum / n as f32).abs() < 2e-3, "{sum}");
    }

    #[test]
    fn some_rows_are_touched_and_they_ascend() {
        let spec = TableSpec::sparse("rows", 400, 4);
        let rows = touched_rows(1, WorkerId(0), 5, TableId(0), &spec);
        assert!((60..140).contains(&rows.len()), "{}", rows.len());
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]) && rows.iter().all(|&row| row < 400));
        assert_eq!(touched_rows(1, WorkerId(0), 5, TableId(0), &TableSpec::sparse("one", 1, 4)), [0]);
    }
}
