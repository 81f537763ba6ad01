//! What simulated workers push: gradients of a noisy quadratic, a function of a seed and nothing else.
//!
//! Anything that runs a scenario (this simulator, or real processes over sockets) uses these functions, so that two
//! runs with the same order of additions end with the same bits.

use multiversion::multiversion;
use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, TableId, WorkerId};

/// The push that a gradient is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PushId {
    /// Seed of the job's gradients.
    pub seed: u64,
    /// Who pushes.
    pub worker: WorkerId,
    /// In which iteration.
    pub clock: Clock,
    /// Which table.
    pub table: TableId,
}

/// Where an element starts.
pub fn initial(seed: u64, table: TableId, element: u64) -> f32 {
    unit(Key::new(seed, [1, table.0.into(), 0]).hash(element))
}

/// The value that training moves an element to.
pub fn target(seed: u64, table: TableId, element: u64) -> f32 {
    unit(target_key(seed, table).hash(element))
}

/// The gradient of `(value - target)^2 / 2` with this worker's noise of this iteration.
pub fn gradient(push: &PushId, element: u64, value: f32) -> f32 {
    quadratic(target_key(push.seed, push.table), noise_key(push), element, value)
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

    /// Appends what is pushed for the elements from `first` on, whose values the worker last read as `values`.
    pub fn extend(self, push: &PushId, first: u64, values: &[f32], out: &mut Vec<f32>) {
        match self {
            Gradients::Quadratic => {
                let (target, noise) = (target_key(push.seed, push.table), noise_key(push));
                extend_quadratic(target, noise, first, values, out);
            }
            Gradients::Tagged { workers } => {
                let start = out.len();
                out.resize(start + values.len(), 0.0);
                let out = &mut out[start..];
                // All other elements are those of other workers.
                let period = 2 * u64::from(workers);
                let own = 2 * u64::from(push.worker.0);
                for place in [own, own + 1] {
                    let skipped = (place + period - first % period) % period;
                    for element in (skipped..values.len() as u64).step_by(period as usize) {
                        out[element as usize] = -tag(workers, push.worker, push.clock, first + element);
                    }
                }
            }
        }
    }

    /// Appends what is pushed for whole rows of `width` elements, whose values the worker last read as `values`.
    pub fn extend_rows(self, push: &PushId, rows: &[u32], width: u64, values: &[f32], out: &mut Vec<f32>) {
        for (row, values) in rows.iter().zip(values.chunks_exact(width as usize)) {
            self.extend(push, u64::from(*row) * width, values, out);
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
    let key = Key::new(seed, [4 | u64::from(worker.0) << 8, table.0.into(), clock]);
    let mut touched = Vec::with_capacity(rows as usize / 3);
    extend_touched(key, rows, &mut touched);
    if touched.is_empty() && rows > 0 {
        touched.push(key.hash(0) % rows);
    }
    touched
}

fn target_key(seed: u64, table: TableId) -> Key {
    Key::new(seed, [2, table.0.into(), 0])
}

fn noise_key(push: &PushId) -> Key {
    Key::new(push.seed, [3 | u64::from(push.worker.0) << 8, push.table.0.into(), push.clock])
}

#[inline(always)]
fn quadratic(target: Key, noise: Key, element: u64, value: f32) -> f32 {
    (value - unit(target.hash(element))) + 0.1 * unit(noise.hash(element))
}

/// Most of the time of a simulation with real tables is spent here, so this is a loop over vectors.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn extend_quadratic(target: Key, noise: Key, first: u64, values: &[f32], out: &mut Vec<f32>) {
    let at = |(index, &value): (usize, &f32)| quadratic(target, noise, first + index as u64, value);
    out.extend(values.iter().enumerate().map(at));
}

/// Appends the rows that a draw touches. Every row is written and kept or not, which costs less than a branch.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn extend_touched(key: Key, rows: u32, touched: &mut Vec<u32>) {
    let mut hashes = [0; BLOCK];
    let mut kept = [0; BLOCK];
    for first in (0..rows).step_by(BLOCK) {
        let count = (rows - first).min(BLOCK as u32) as usize;
        for (index, hash) in hashes.iter_mut().enumerate() {
            *hash = key.hash(u64::from(first) + index as u64);
        }
        let mut len = 0;
        for (index, hash) in hashes[..count].iter().enumerate() {
            kept[len] = first + index as u32;
            len += usize::from(hash >> 30 == 0);
        }
        touched.extend_from_slice(&kept[..len]);
    }
}

/// Uniform in [-1, 1) with 24 bits, exact in `f32`.
#[inline(always)]
fn unit(hash: u32) -> f32 {
    (hash >> 8) as i32 as f32 / (1 << 23) as f32 - 1.0
}

/// Rows that are looked at together.
const BLOCK: usize = 128;

/// What all elements of one draw have in common.
#[derive(Debug, Clone, Copy)]
struct Key(u32, u32);

impl Key {
    fn new(seed: u64, parts: [u64; 3]) -> Key {
        let key = mix(seed, parts);
        Key(key as u32, (key >> 32) as u32)
    }

    /// Words of 32 bits, since processors multiply many of them at once.
    #[inline(always)]
    fn hash(self, element: u64) -> u32 {
        let mut x = element as u32 ^ self.0 ^ ((element >> 32) as u32).wrapping_mul(0x9E37_79B1);
        x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D).wrapping_add(self.1);
        x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
        x ^ (x >> 16)
    }
}

fn mix(seed: u64, parts: [u64; 3]) -> u64 {
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

    fn push(seed: u64, worker: u32, clock: Clock, table: u32) -> PushId {
        PushId { seed, worker: WorkerId(worker), clock, table: TableId(table) }
    }

    #[test]
    fn a_seed_means_the_same_gradients_forever() {
        let g = gradient(&push(7, 3, 11, 2), 13, 0.5);
        assert_eq!(g, 1.027755);
        for other in [push(8, 3, 11, 2), push(7, 2, 11, 2), push(7, 3, 12, 2), push(7, 3, 11, 1)] {
            assert_ne!(g, gradient(&other, 13, 0.5), "{other:?}");
        }
    }

    #[test]
    fn whole_runs_of_elements_are_what_single_elements_are() {
        let push = push(3, 1, 4, 1);
        for first in [0, 5, 1 << 33] {
            let values: Vec<f32> = (0..100).map(|element| element as f32 / 8.0).collect();
            let mut out = vec![7.0];
            Gradients::Quadratic.extend(&push, first, &values, &mut out);
            let single = (first..).zip(&values).map(|(element, &value)| gradient(&push, element, value));
            assert_eq!(out[1..], single.collect::<Vec<_>>());
            out.clear();
            Gradients::Tagged { workers: 3 }.extend(&push, first, &values, &mut out);
            let single = (first..).take(100).map(|element| -tag(3, push.worker, push.clock, element));
            assert_eq!(out, single.collect::<Vec<_>>());
        }
    }

    #[test]
    fn noise_has_no_bias_to_speak_of_and_the_right_spread() {
        let (n, push) = (20_000, push(1, 0, 0, 0));
        let noise = |e| f64::from(gradient(&push, e, target(1, TableId(0), e)));
        let sum: f64 = (0..n).map(noise).sum();
        assert!((sum / n as f64).abs() < 2e-3, "{sum}");
        // A third of the square of 0.1; and neighbours have nothing to do with each other.
        let square: f64 = (0..n).map(|e| noise(e).powi(2)).sum::<f64>() / n as f64;
        assert!((square * 300.0 - 1.0).abs() < 0.03, "{square}");
        let pairs: f64 = (0..n).map(|e| noise(e) * noise(e + 1)).sum::<f64>() / n as f64;
        assert!((pairs * 300.0).abs() < 0.03, "{pairs}");
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
