//! Draws of all kinds.

use paramill_core::prng::Prng;

/// Where a world's numbers come from.
#[derive(Debug)]
pub(super) struct Dice(Prng);

impl Dice {
    pub(super) fn new(prng: Prng) -> Dice {
        Dice(prng)
    }

    pub(super) fn chance(&mut self, p: f64) -> bool {
        self.0.chance(p)
    }

    /// An index below `count`.
    pub(super) fn below(&mut self, count: usize) -> usize {
        self.0.below(count as u64) as usize
    }

    /// A whole number from `low` to `high`, both included.
    pub(super) fn whole(&mut self, low: u64, high: u64) -> u64 {
        low + self.0.below(high - low + 1)
    }

    pub(super) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.0.uniform()
    }

    /// Uniform in the logarithm: small values as often as large ones.
    pub(super) fn magnitude(&mut self, low: f64, high: f64) -> f64 {
        (self.between(low.ln(), high.ln())).exp()
    }

    pub(super) fn pick<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len())]
    }
}
