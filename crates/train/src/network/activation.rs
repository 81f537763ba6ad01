//! The rectifier between layers, and the loss after the last.

use super::{Backward, Layer};

/// `max(0, input)`, value by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relu {
    /// Values in an example.
    pub len: usize,
}

impl Layer for Relu {
    fn input_len(&self) -> usize {
        self.len
    }

    fn output_len(&self) -> usize {
        self.len
    }

    fn forward(&self, _parameters: &[&[f32]], input: &[f32], output: &mut [f32], _scratch: &mut [f32]) {
        for (output, input) in output.iter_mut().zip(input) {
            *output = input.max(0.0);
        }
    }

    fn backward(&self, pass: Backward<'_>) {
        let Some(input_gradient) = pass.input_gradient else { return };
        for ((gradient, &output), &slope) in
            input_gradient.iter_mut().zip(pass.output).zip(pass.output_gradient)
        {
            *gradient = if output > 0.0 { slope } else { 0.0 };
        }
    }
}

/// Mean cross entropy of the classes' scores against the labels, and its slope along every score.
///
/// # Panics
/// When a label is not below `classes`, or the slices do not hold one score and one slope for each class of each
/// example.
pub fn softmax_cross_entropy(scores: &[f32], labels: &[u8], classes: usize, slopes: &mut [f32]) -> f32 {
    assert_eq!(scores.len(), labels.len() * classes, "a score for each class of each example");
    assert_eq!(slopes.len(), scores.len(), "a slope for each score");
    let share = 1.0 / labels.len() as f32;
    let mut loss = 0.0;
    let examples = scores.chunks_exact(classes).zip(slopes.chunks_exact_mut(classes));
    for ((scores, slopes), &label) in examples.zip(labels) {
        // The largest score is subtracted first, so that no exponential overflows.
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for (slope, score) in slopes.iter_mut().zip(scores) {
            *slope = (score - largest).exp();
            sum += *slope;
        }
        for slope in slopes.iter_mut() {
            *slope *= share / sum;
        }
        slopes[usize::from(label)] -= share;
        loss += sum.ln() + largest - scores[usize::from(label)];
    }
    loss * share
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::gradient_check;

    #[test]
    fn rectifier_gradients_agree_with_differences() {
        // No value near 0: there is no derivative.
        let input: Vec<f32> = (0..12).map(|i| (i * 5 % 12) as f32 - 5.5).collect();
        gradient_check::check(&Relu { len: 6 }, &input);
    }

    #[test]
    fn cross_entropy_slopes_agree_with_differences() {
        let labels = [2, 0];
        let mut scores = [0.3, -1.0, 0.7, 2.0, 0.1, 0.0];
        let mut slopes = [f32::NAN; 6];
        softmax_cross_entropy(&scores, &labels, 3, &mut slopes);
        for i in 0..scores.len() {
            let mut at = |score: f32| {
                let kept = std::mem::replace(&mut scores[i], score);
                let loss = softmax_cross_entropy(&scores, &labels, 3, &mut [0.0; 6]);
                scores[i] = kept;
                (loss, kept)
            };
            let (_, kept) = at(0.0);
            let difference = (at(kept + 1e-2).0 - at(kept - 1e-2).0) / 2e-2;
            assert!((slopes[i] - difference).abs() < 1e-4, "{i}: {} {difference}", slopes[i]);
        }
    }

    #[test]
    fn cross_entropy_survives_extreme_scores() {
        let mut slopes = [0.0; 2];
        assert_eq!(softmax_cross_entropy(&[1e30, -1e30], &[0], 2, &mut slopes), 0.0);
        let loss = softmax_cross_entropy(&[1000.0, 0.0], &[1], 2, &mut slopes);
        assert_eq!((loss, slopes), (1000.0, [1.0, -1.0]));
    }
}
