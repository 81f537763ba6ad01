//! Sums of gradients.

use super::{Source, Values};
use multiversion::multiversion;

/// `accumulator += gradient`, of whatever type it is.
pub fn add_values(accumulator: &mut [f32], gradient: Values<'_>) {
    match gradient {
        Values::F32(gradient) => add(accumulator, gradient),
        Values::F16(gradient) => add_source(accumulator, gradient),
        Values::Bf16(gradient) => add_source(accumulator, gradient),
    }
}

/// `values = gradient`, of whatever type it is.
pub fn copy(values: &mut [f32], gradient: Values<'_>) {
    match gradient {
        Values::F32(gradient) => values.copy_from_slice(gradient),
        Values::F16(gradient) => copy_source(values, gradient),
        Values::Bf16(gradient) => copy_source(values, gradient),
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_source<G: Source>(accumulator: &mut [f32], gradient: G) {
    gradient.expect_len(accumulator.len());
    for (i, sum) in accumulator.iter_mut().enumerate() {
        *sum += gradient.at(i);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn copy_source<G: Source>(values: &mut [f32], gradient: G) {
    gradient.expect_len(values.len());
    for (i, value) in values.iter_mut().enumerate() {
        *value = gradient.at(i);
    }
}

/// `accumulator += gradient`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn add(accumulator: &mut [f32], gradient: &[f32]) {
    assert_eq!(accumulator.len(), gradient.len());
    for (sum, &g) in accumulator.iter_mut().zip(gradient) {
        *sum += g;
    }
}

/// `accumulator += factor * gradient`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn add_scaled(accumulator: &mut [f32], gradient: &[f32], factor: f32) {
    assert_eq!(accumulator.len(), gradient.len());
    for (sum, &g) in accumulator.iter_mut().zip(gradient) {
        *sum += factor * g;
    }
}

/// `values *= factor`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn scale(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

/// `values = value`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn fill(values: &mut [f32], value: f32) {
    for old in values {
        *old = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::samples::{any_halves, any_pair, any_value, any_values, bits};
    use crate::kernels::{Bf16, Element, F16};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn add_is_its_twin((accumulator, gradient) in any_pair()) {
            let mut vectorised = accumulator.clone();
            add(&mut vectorised, &gradient);
            let twin: Vec<f32> = (0..gradient.len()).map(|i| accumulator[i] + gradient[i]).collect();
            prop_assert_eq!(bits(&vectorised), bits(&twin));
        }

        #[test]
        fn halves_are_converted_and_then_copied_or_added(raw in any_halves(), start in any_value()) {
            let (half, brain): (Vec<F16>, Vec<Bf16>) = raw.iter().map(|&bits| (F16(bits), Bf16(bits))).unzip();
            let half_twin: Vec<f32> = half.iter().map(|value| value.to_f32()).collect();
            let brain_twin: Vec<f32> = brain.iter().map(|value| value.to_f32()).collect();
            for (values, twin) in [(Values::F16(&half), half_twin), (Values::Bf16(&brain), brain_twin)] {
                prop_assert_eq!(bits(&values.to_vec()), bits(&twin));
                let (mut sum, mut sum_twin) = (vec![start; raw.len()], vec![start; raw.len()]);
                add_values(&mut sum, values);
                add(&mut sum_twin, &twin);
                prop_assert_eq!(bits(&sum), bits(&sum_twin));
            }
        }

        #[test]
        fn add_scaled_is_its_twin((accumulator, gradient) in any_pair(), factor in any_value()) {
            let mut vectorised = accumulator.clone();
            add_scaled(&mut vectorised, &gradient, factor);
            let twin: Vec<f32> = (0..gradient.len()).map(|i| accumulator[i] + factor * gradient[i]).collect();
            prop_assert_eq!(bits(&vectorised), bits(&twin));
        }

        #[test]
        fn scale_is_its_twin(values in any_values(), factor in any_value()) {
            let mut vectorised = values.clone();
            scale(&mut vectorised, factor);
            let twin: Vec<f32> = (0..values.len()).map(|i| values[i] * factor).collect();
            prop_assert_eq!(bits(&vectorised), bits(&twin));
        }

        #[test]
        fn fill_is_its_twin(mut values in any_values(), value in any_value()) {
            fill(&mut values, value);
            prop_assert_eq!(bits(&values), bits(&vec![value; values.len()]));
        }
    }

    #[test]
    fn a_product_is_rounded_before_it_is_added() {
        // With a fused multiply-add the result would be 2^-46 instead of 0.
        let near_one = 1.0 + f32::EPSILON;
        let mut accumulator = [-(near_one * near_one)];
        add_scaled(&mut accumulator, &[near_one], near_one);
        assert_eq!(accumulator, [0.0]);
    }

    #[test]
    #[should_panic]
    fn different_lengths_are_a_bug() {
        add(&mut [0.0; 3], &[0.0; 2]);
    }
}
