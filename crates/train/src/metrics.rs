//! Figures that judge predictions.

/// Area under the ROC curve, exact: the probability that a positive example scores higher than a negative one, a tie
/// counting half. 0.5 when a class is missing.
///
/// # Panics
/// When the slices differ in length.
pub fn auc(scores: &[f32], positive: &[bool]) -> f64 {
    assert_eq!(scores.len(), positive.len(), "one label for each score");
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_unstable_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    // Negatives are counted as they are passed; twice the count of won pairs keeps ties whole numbers.
    let (mut negatives, mut positives, mut twice_won) = (0u64, 0u64, 0u128);
    for tied in order.chunk_by(|&a, &b| scores[a] == scores[b]) {
        let positives_here = tied.iter().filter(|&&example| positive[example]).count() as u64;
        let negatives_here = tied.len() as u64 - positives_here;
        twice_won += u128::from(positives_here) * u128::from(2 * negatives + negatives_here);
        negatives += negatives_here;
        positives += positives_here;
    }
    let pairs = u128::from(negatives) * u128::from(positives);
    if pairs == 0 { 0.5 } else { twice_won as f64 / (2 * pairs) as f64 }
}

/// Share of examples whose score is positive exactly when their label is.
///
/// # Panics
/// When the slices differ in length.
pub fn binary_accuracy(scores: &[f32], positive: &[bool]) -> f64 {
    assert_eq!(scores.len(), positive.len(), "one label for each score");
    let right = scores.iter().zip(positive).filter(|&(&score, &positive)| (score > 0.0) == positive).count();
    right as f64 / scores.len().max(1) as f64
}

/// Logistic loss of a score: `ln(1 + exp(-margin))`, for any margin without overflow.
pub fn logistic_loss(score: f32, positive: bool) -> f32 {
    let margin = if positive { score } else { -score };
    (-margin.abs()).exp().ln_1p() + (-margin).max(0.0)
}

/// `1 / (1 + exp(-score))`.
pub fn sigmoid(score: f32) -> f32 {
    1.0 / (1.0 + (-score).exp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramill_core::prng::Prng;

    #[test]
    fn auc_counts_pairs_and_half_of_ties() {
        assert_eq!(auc(&[0.1, 0.2, 0.8, 0.9], &[false, false, true, true]), 1.0);
        assert_eq!(auc(&[0.9, 0.8, 0.2, 0.1], &[false, false, true, true]), 0.0);
        assert_eq!(auc(&[0.5; 4], &[false, true, false, true]), 0.5);
        assert_eq!(auc(&[0.1, 0.4, 0.4, 0.8], &[false, false, true, true]), 3.5 / 4.0);
        assert_eq!(auc(&[-0.0, 0.0], &[false, true]), 0.5);
        assert_eq!(auc(&[0.3], &[true]), 0.5);
    }

    #[test]
    fn auc_agrees_with_counting_every_pair() {
        let mut prng = Prng::new(5);
        for _ in 0..20 {
            let scores: Vec<f32> = (0..60).map(|_| prng.below(20) as f32).collect();
            let labels: Vec<bool> = (0..60).map(|_| prng.chance(0.4)).collect();
            let (mut won, mut pairs) = (0.0, 0.0);
            for (p, _) in labels.iter().enumerate().filter(|(_, l)| **l) {
                for (n, _) in labels.iter().enumerate().filter(|(_, l)| !**l) {
                    pairs += 1.0;
                    won += f64::from(u8::from(scores[p] > scores[n]));
                    won += 0.5 * f64::from(u8::from(scores[p] == scores[n]));
                }
            }
            assert!((auc(&scores, &labels) - won / pairs).abs() < 1e-12);
        }
    }

    #[test]
    fn logistic_loss_is_stable_at_the_ends() {
        assert!((logistic_loss(0.0, true) - 2f32.ln()).abs() < 1e-6);
        assert_eq!(logistic_loss(200.0, true), 0.0);
        assert_eq!(logistic_loss(200.0, false), 200.0);
        assert_eq!(logistic_loss(-200.0, true), 200.0);
    }

    #[test]
    fn accuracy_counts_signs() {
        assert_eq!(binary_accuracy(&[1.0, -1.0, 2.0, -2.0], &[true, false, false, true]), 0.5);
    }
}
