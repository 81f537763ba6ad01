//! A fully connected layer.

use super::gemm::{Matrix, multiply, multiply_add};
use super::{Backward, Layer, Parameter};

/// `output = weight input + bias`, with a weight of `outputs` rows and `inputs` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dense {
    /// Values in an example.
    pub inputs: usize,
    /// Values in the result.
    pub outputs: usize,
}

impl Layer for Dense {
    fn input_len(&self) -> usize {
        self.inputs
    }

    fn output_len(&self) -> usize {
        self.outputs
    }

    fn parameters(&self) -> Vec<Parameter> {
        let shape = vec![self.outputs as u64, self.inputs as u64];
        vec![Parameter::weight(shape, self.inputs), Parameter::bias(self.outputs)]
    }

    fn is_product(&self, parameter: usize) -> bool {
        parameter == 0
    }

    fn forward(&self, parameters: &[&[f32]], input: &[f32], output: &mut [f32], _scratch: &mut [f32]) {
        let (weight, bias) = (parameters[0], parameters[1]);
        for example in output.chunks_exact_mut(self.outputs) {
            example.copy_from_slice(bias);
        }
        let weight = Matrix::new(weight, self.inputs);
        multiply_add(Matrix::new(input, self.inputs), weight.transposed(), output);
    }

    fn backward(&self, pass: Backward<'_>) {
        let slope = Matrix::new(pass.output_gradient, self.outputs);
        let [weight_gradient, bias_gradient] = pass.gradients else {
            panic!("a gradient for weight and bias")
        };
        let input = Matrix::new(pass.input, self.inputs);
        multiply(slope.transposed(), input, weight_gradient);
        bias_gradient.fill(0.0);
        for example in pass.output_gradient.chunks_exact(self.outputs) {
            for (sum, slope) in bias_gradient.iter_mut().zip(example) {
                *sum += slope;
            }
        }
        if let Some(input_gradient) = pass.input_gradient {
            multiply(slope, Matrix::new(pass.parameters[0], self.inputs), input_gradient);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::gradient_check;

    #[test]
    fn computes_by_hand() {
        let layer = Dense { inputs: 2, outputs: 3 };
        let weight = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut output = [0.0; 6];
        layer.forward(&[&weight, &[0.5, 0.0, -0.5]], &[1.0, 1.0, 0.0, -1.0], &mut output, &mut []);
        assert_eq!(output, [3.5, 7.0, 10.5, -1.5, -4.0, -6.5]);
    }

    #[test]
    fn gradients_agree_with_differences() {
        let input: Vec<f32> = (0..15).map(|i| (i as f32 * 0.7).sin()).collect();
        gradient_check::check(&Dense { inputs: 5, outputs: 4 }, &input);
    }
}
