//! Convolution with windows of 3 by 3, no padding.

use super::gemm::{Matrix, multiply, multiply_add};
use super::{Backward, Layer, Parameter};

const SIDE: usize = 3;
const WINDOW: usize = SIDE * SIDE;

/// Every filter slides over all channels; the result has a channel for each filter and is 2 smaller in both sides.
///
/// An image is spread into a matrix with a column for each window, so that the convolution is one product. It is
/// spread anew in the backward pass: that is cheaper than keeping the matrices of a whole batch in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv3x3 {
    /// Channels of the input.
    pub channels: usize,
    /// Rows of the input; at least 3.
    pub height: usize,
    /// Columns of the input; at least 3.
    pub width: usize,
    /// Channels of the output.
    pub filters: usize,
}

impl Conv3x3 {
    /// Rows of the output.
    pub fn output_height(&self) -> usize {
        self.height + 1 - SIDE
    }

    /// Columns of the output.
    pub fn output_width(&self) -> usize {
        self.width + 1 - SIDE
    }

    fn windows(&self) -> usize {
        self.output_height() * self.output_width()
    }

    /// Values that a window covers.
    fn covered(&self) -> usize {
        self.channels * WINDOW
    }

    /// For every row of the spread matrix and every row of the output: where the run of values begins in an image, and
    /// where in the matrix. Runs are as long as the output is wide.
    fn runs(self) -> impl Iterator<Item = (usize, usize)> {
        let (output_height, output_width, windows) =
            (self.output_height(), self.output_width(), self.windows());
        (0..self.covered()).flat_map(move |row| {
            let (channel, y, x) = (row / WINDOW, row % WINDOW / SIDE, row % SIDE);
            let first = (channel * self.height + y) * self.width + x;
            (0..output_height).map(move |r| (first + r * self.width, row * windows + r * output_width))
        })
    }

    fn spread(&self, image: &[f32], matrix: &mut [f32]) {
        let run = self.output_width();
        for (from, to) in self.runs() {
            matrix[to..to + run].copy_from_slice(&image[from..from + run]);
        }
    }

    /// The reverse of [`Conv3x3::spread`]: a value of the image gets the sum of what its copies got.
    fn gather(&self, matrix: &[f32], image: &mut [f32]) {
        image.fill(0.0);
        let run = self.output_width();
        for (to, from) in self.runs() {
            for (sum, value) in image[to..to + run].iter_mut().zip(&matrix[from..from + run]) {
                *sum += value;
            }
        }
    }
}

impl Layer for Conv3x3 {
    fn input_len(&self) -> usize {
        self.channels * self.height * self.width
    }

    fn output_len(&self) -> usize {
        self.filters * self.windows()
    }

    fn parameters(&self) -> Vec<Parameter> {
        let shape = vec![self.filters as u64, self.channels as u64, SIDE as u64, SIDE as u64];
        vec![Parameter::weight(shape, self.covered()), Parameter::bias(self.filters)]
    }

    fn scratch_len(&self) -> usize {
        self.covered() * self.windows()
    }

    fn forward(&self, parameters: &[&[f32]], input: &[f32], output: &mut [f32], scratch: &mut [f32]) {
        let (weight, bias) = (Matrix::new(parameters[0], self.covered()), parameters[1]);
        let matrix = &mut scratch[..self.scratch_len()];
        let images = input.chunks_exact(self.input_len());
        for (image, output) in images.zip(output.chunks_exact_mut(self.output_len())) {
            self.spread(image, matrix);
            for (channel, &bias) in output.chunks_exact_mut(self.windows()).zip(bias) {
                channel.fill(bias);
            }
            multiply_add(weight, Matrix::new(matrix, self.windows()), output);
        }
    }

    fn backward(&self, mut pass: Backward<'_>) {
        let [weight_gradient, bias_gradient] = pass.gradients else {
            panic!("a gradient for weight and bias")
        };
        weight_gradient.fill(0.0);
        bias_gradient.fill(0.0);
        let weight = Matrix::new(pass.parameters[0], self.covered());
        let matrix = &mut pass.scratch[..self.scratch_len()];
        let images = pass.input.chunks_exact(self.input_len());
        let slopes = pass.output_gradient.chunks_exact(self.output_len());
        for (example, (image, slopes)) in images.zip(slopes).enumerate() {
            for (sum, channel) in bias_gradient.iter_mut().zip(slopes.chunks_exact(self.windows())) {
                *sum += channel.iter().sum::<f32>();
            }
            let slope = Matrix::new(slopes, self.windows());
            self.spread(image, matrix);
            let windows = Matrix::new(matrix, self.windows()).transposed();
            multiply_add(slope, windows, weight_gradient);
            if let Some(input_gradient) = &mut pass.input_gradient {
                multiply(weight.transposed(), slope, matrix);
                let start = example * self.input_len();
                self.gather(matrix, &mut input_gradient[start..start + self.input_len()]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::gradient_check;

    #[test]
    fn computes_by_hand() {
        let layer = Conv3x3 { channels: 2, height: 3, width: 4, filters: 1 };
        let input: Vec<f32> = (0..24).map(|i| i as f32).collect();
        // The centre of the first channel's window, plus twice the upper left of the second's.
        let mut weight = [0.0; 18];
        weight[4] = 1.0;
        weight[9] = 2.0;
        let mut output = [0.0; 2];
        layer.forward(&[&weight, &[100.0]], &input, &mut output, &mut vec![0.0; layer.scratch_len()]);
        assert_eq!(output, [100.0 + 5.0 + 24.0, 100.0 + 6.0 + 26.0]);
    }

    #[test]
    fn gradients_agree_with_differences() {
        let layer = Conv3x3 { channels: 2, height: 5, width: 4, filters: 3 };
        let input: Vec<f32> = (0..2 * layer.input_len()).map(|i| (i as f32 * 0.7).sin()).collect();
        gradient_check::check(&layer, &input);
    }
}
