//! Maxima of 2 by 2 windows.

use super::{Backward, Layer};

/// Halves both sides; a last odd row or column is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxPool2 {
    /// Channels, pooled each on its own.
    pub channels: usize,
    /// Rows of the input.
    pub height: usize,
    /// Columns of the input.
    pub width: usize,
}

impl MaxPool2 {
    /// Rows of the output.
    pub fn output_height(&self) -> usize {
        self.height / 2
    }

    /// Columns of the output.
    pub fn output_width(&self) -> usize {
        self.width / 2
    }

    /// Pairs of rows of all channels of all examples, as the place of the pair's first value.
    fn row_pairs(self, planes: usize) -> impl Iterator<Item = usize> {
        (0..planes).flat_map(move |plane| {
            (0..self.output_height()).map(move |row| (plane * self.height + 2 * row) * self.width)
        })
    }
}

impl Layer for MaxPool2 {
    fn input_len(&self) -> usize {
        self.channels * self.height * self.width
    }

    fn output_len(&self) -> usize {
        self.channels * self.output_height() * self.output_width()
    }

    fn forward(&self, _parameters: &[&[f32]], input: &[f32], output: &mut [f32], _scratch: &mut [f32]) {
        let planes = input.len() / (self.height * self.width);
        for (start, output) in self.row_pairs(planes).zip(output.chunks_exact_mut(self.output_width())) {
            let (upper, lower) = input[start..start + 2 * self.width].split_at(self.width);
            for ((output, upper), lower) in output.iter_mut().zip(upper.chunks(2)).zip(lower.chunks(2)) {
                *output = upper[0].max(upper[1]).max(lower[0].max(lower[1]));
            }
        }
    }

    /// The slope goes to the value that won; among equal ones to the first.
    fn backward(&self, pass: Backward<'_>) {
        let Some(input_gradient) = pass.input_gradient else { return };
        input_gradient.fill(0.0);
        let planes = pass.input.len() / (self.height * self.width);
        let outputs = pass.output.chunks_exact(self.output_width());
        let slopes = pass.output_gradient.chunks_exact(self.output_width());
        for ((start, outputs), slopes) in self.row_pairs(planes).zip(outputs).zip(slopes) {
            for (column, (&output, &slope)) in outputs.iter().zip(slopes).enumerate() {
                let corner = start + 2 * column;
                let window = [corner, corner + 1, corner + self.width, corner + self.width + 1];
                if let Some(&winner) = window.iter().find(|&&place| pass.input[place] == output) {
                    input_gradient[winner] = slope;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::gradient_check;

    #[test]
    fn computes_by_hand_and_leaves_out_odd_ends() {
        let layer = MaxPool2 { channels: 1, height: 3, width: 5 };
        let input = [1.0, 5.0, 2.0, 3.0, 99.0, 4.0, 0.0, -1.0, 7.0, 99.0, 99.0, 99.0, 99.0, 99.0, 99.0];
        let mut output = [0.0; 2];
        layer.forward(&[], &input, &mut output, &mut []);
        assert_eq!(output, [5.0, 7.0]);
    }

    #[test]
    fn gradients_agree_with_differences() {
        let layer = MaxPool2 { channels: 2, height: 5, width: 4 };
        // All values differ by more than the check moves them: at a tie there is no derivative.
        let input: Vec<f32> = (0..2 * layer.input_len()).map(|i| (i * 37 % 83) as f32 * 0.1).collect();
        gradient_check::check(&layer, &input);
    }
}
