//! Examples drawn from a logistic model that is known.

use crate::data::SparseExamples;
use crate::metrics;
use paramill_core::prng::Prng;

/// Features there are, and features an example has.
const FEATURES: u64 = 400;
const PER_EXAMPLE: usize = 12;

/// Made examples and the model they were drawn from.
#[derive(Debug, Clone)]
pub struct MadeExamples {
    /// To train on.
    pub train: SparseExamples,
    /// Held out: a quarter as many.
    pub test: SparseExamples,
    /// The true weight of each feature; the true bias comes last.
    pub weights: Vec<f32>,
}

impl MadeExamples {
    /// The AUC of the true model on the held-out examples: what no trained model can be expected to pass.
    pub fn best_auc(&self) -> f64 {
        let scores: Vec<f32> =
            (0..self.test.len()).map(|example| score(&self.weights, self.test.example(example))).collect();
        metrics::auc(&scores, self.test.labels())
    }
}

/// Draws `examples` to train on. A label is positive with the probability that the true model gives.
pub fn sparse_examples(seed: u64, examples: usize) -> MadeExamples {
    let mut prng = Prng::fork(seed, 0x5ba5e);
    let mut weights: Vec<f32> = (0..FEATURES).map(|_| prng.normal() as f32).collect();
    weights.push(-0.5);
    let mut draw = |count: usize| {
        let mut drawn = SparseExamples::default();
        for _ in 0..count {
            let mut features: Vec<u32> = (0..PER_EXAMPLE).map(|_| popular(&mut prng)).collect();
            features.sort_unstable();
            features.dedup();
            let values: Vec<f32> = features.iter().map(|_| 0.5 + prng.uniform() as f32).collect();
            let positive = prng.chance(f64::from(metrics::sigmoid(score(&weights, (&features, &values)))));
            drawn.push(positive, features.into_iter().zip(values));
        }
        drawn
    };
    let (train, mut test) = (draw(examples), draw(examples / 4));
    // Even the smallest test set has both labels, so that an AUC exists.
    test.push(true, []);
    test.push(false, []);
    MadeExamples { train, test, weights }
}

/// A feature; low numbers are drawn more often, as words are in texts.
fn popular(prng: &mut Prng) -> u32 {
    let skewed = prng.uniform() * prng.uniform();
    (skewed * FEATURES as f64) as u32
}

fn score(weights: &[f32], (features, values): (&[u32], &[f32])) -> f32 {
    let bias = weights[weights.len() - 1];
    bias + features.iter().zip(values).map(|(&feature, value)| weights[feature as usize] * value).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_examples_and_the_answer_is_worth_finding() {
        let made = sparse_examples(1, 2000);
        assert_eq!(made.train, sparse_examples(1, 2000).train);
        assert_ne!(made.train, sparse_examples(2, 2000).train);
        assert_eq!((made.train.len(), made.test.len()), (2000, 502));
        assert!((0.9..0.98).contains(&made.best_auc()), "{}", made.best_auc());
    }
}
