//! Which examples a worker trains on, and in which order.

use crate::data::DataError;
use paramill_core::prng::Prng;
use std::ops::Range;

/// What a generator's draws are for. Every purpose has its own stream, so that one more draw for one of them leaves
/// the others as they were.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {
    HoldOut = 1,
    Order = 2,
    Initial = 3,
}

impl Stream {
    /// The stream for this purpose; `part` tells apart those who draw for the same purpose.
    pub(crate) fn prng(self, seed: u64, part: u64) -> Prng {
        Prng::fork(Prng::fork(seed, self as u64).next_u64(), part)
    }
}

/// Deals batches from a worker's share of the examples: every `workers`-th one, in a new order in every epoch.
///
/// All shares have the same length and what does not fill a batch is left for another epoch, so that all workers take
/// the same number of steps: with a synchronous model a worker with one step more would wait for ever.
#[derive(Debug)]
pub(crate) struct Sampler {
    seed: u64,
    rank: u32,
    workers: u32,
    batch: usize,
    share: usize,
    epoch: Option<u64>,
    order: Vec<u32>,
}

impl Sampler {
    /// Whether `examples` can be dealt to `workers`.
    pub(crate) fn check(examples: usize, workers: u32) -> Result<(), DataError> {
        if examples < workers as usize {
            let why = format!(
                "{examples} training examples cannot be dealt to {workers} workers: use fewer workers or more data"
            );
            return Err(DataError::Config { why });
        }
        if u32::try_from(examples).is_err() {
            let why = format!("{examples} training examples: expected fewer than {}; limit them", u32::MAX);
            return Err(DataError::Config { why });
        }
        Ok(())
    }

    /// A sampler for one rank of a job with [checked](Sampler::check) numbers.
    pub(crate) fn new(examples: usize, batch: usize, seed: u64, rank: u32, workers: u32) -> Sampler {
        let share = examples / workers as usize;
        Sampler { seed, rank, workers, batch: batch.min(share), share, epoch: None, order: Vec::new() }
    }

    pub(crate) fn steps_per_epoch(&self) -> u64 {
        (self.share / self.batch) as u64
    }

    /// Examples in each batch.
    pub(crate) fn batch_len(&self) -> usize {
        self.batch
    }

    /// The examples of a step. A step's batch does not depend on the steps asked for before.
    pub(crate) fn batch(&mut self, step: u64) -> &[u32] {
        let epoch = step / self.steps_per_epoch();
        if self.epoch != Some(epoch) {
            self.order.clear();
            self.order.extend((self.rank..).step_by(self.workers as usize).take(self.share));
            let part = epoch * u64::from(self.workers) + u64::from(self.rank);
            Stream::Order.prng(self.seed, part).shuffle(&mut self.order);
            self.epoch = Some(epoch);
        }
        let start = (step % self.steps_per_epoch()) as usize * self.batch;
        &self.order[start..start + self.batch]
    }
}

/// Splits `examples` numbers by the seed: (training, held out), a fifth held out, each ascending.
pub(crate) fn hold_out(examples: usize, seed: u64) -> (Vec<usize>, Vec<usize>) {
    let mut order: Vec<usize> = (0..examples).collect();
    Stream::HoldOut.prng(seed, 0).shuffle(&mut order);
    let mut train = order.split_off(examples / 5);
    train.sort_unstable();
    order.sort_unstable();
    (train, order)
}

/// Cuts `0..len` into ranges of at most `size`.
pub(crate) fn pieces(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(size).map(move |start| start..len.min(start + size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn workers_share_all_examples_and_take_equally_many_steps() {
        let mut seen = BTreeSet::new();
        for rank in 0..3 {
            let mut sampler = Sampler::new(31, 5, 7, rank, 3);
            assert_eq!(sampler.steps_per_epoch(), 2);
            for step in 0..2 {
                for &example in sampler.batch(step) {
                    assert!(example < 31 && seen.insert(example), "{example} is dealt twice in an epoch");
                }
            }
        }
        assert_eq!(seen.len(), 30);
    }

    #[test]
    fn epochs_differ_and_any_step_can_be_asked_for_again() {
        let mut sampler = Sampler::new(100, 10, 7, 0, 1);
        let first = sampler.batch(3).to_vec();
        let second = sampler.batch(13).to_vec();
        assert_ne!(first, second);
        assert_eq!(sampler.batch(3), first);
        assert_eq!(Sampler::new(100, 10, 7, 0, 1).batch(13), second);
        assert_ne!(Sampler::new(100, 10, 8, 0, 1).batch(3), first);
    }

    #[test]
    fn a_batch_is_never_larger_than_a_share() {
        let mut sampler = Sampler::new(7, 100, 1, 1, 2);
        assert_eq!((sampler.steps_per_epoch(), sampler.batch_len()), (1, 3));
        assert_eq!(sampler.batch(9).len(), 3);
        assert!(Sampler::check(3, 4).unwrap_err().to_string().contains("fewer workers"));
    }

    #[test]
    fn a_fifth_is_held_out_by_the_seed() {
        let (train, test) = hold_out(1000, 3);
        assert_eq!((train.len(), test.len()), (800, 200));
        let all: BTreeSet<usize> = train.iter().chain(&test).copied().collect();
        assert_eq!(all.len(), 1000);
        assert_eq!(hold_out(1000, 3), (train, test.clone()));
        assert_ne!(hold_out(1000, 4).1, test);
    }
}
