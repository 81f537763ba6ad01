//! NaN and infinities in gradients.

use multiversion::multiversion;

/// Everything but the sign. As integers, magnitudes are ordered like the numbers they stand for.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// The smallest magnitude that is not a finite number.
const INFINITY: u32 = 0x7f80_0000;

/// Whether no value is NaN or infinite.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn all_finite(values: &[f32]) -> bool {
    let mut largest = 0;
    for value in values {
        largest = largest.max(value.to_bits() & MAGNITUDE);
    }
    largest < INFINITY
}

/// Replaces NaN by 0 and an infinity by the largest finite magnitude of the slice with the infinity's sign (0 when
/// nothing in it is finite). Returns how many values were replaced.
pub fn clip_non_finite(values: &mut [f32]) -> usize {
    // Nearly every gradient is clean, and the vectorised test is all it costs.
    if all_finite(values) {
        return 0;
    }
    let largest =
        values.iter().filter(|value| value.is_finite()).fold(0.0f32, |max, value| max.max(value.abs()));
    let mut replaced = 0;
    for value in values.iter_mut().filter(|value| !value.is_finite()) {
        *value = if value.is_nan() { 0.0 } else { largest.copysign(*value) };
        replaced += 1;
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::samples::{any_values, bits};
    use proptest::prelude::*;

    fn mostly_finite() -> impl Strategy<Value = Vec<f32>> {
        let odd = prop_oneof![Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(f32::NAN)];
        prop::collection::vec(prop_oneof![300 => any::<f32>(), 1 => odd], 0..300)
    }

    proptest! {
        #[test]
        fn all_finite_is_its_twin(values in prop_oneof![any_values(), mostly_finite()]) {
            prop_assert_eq!(all_finite(&values), values.iter().all(|value| value.is_finite()));
        }

        #[test]
        fn clipping_leaves_finite_values_alone_and_nothing_else(values in prop_oneof![any_values(), mostly_finite()]) {
            let mut clipped = values.clone();
            let replaced = clip_non_finite(&mut clipped);
            prop_assert!(all_finite(&clipped));
            prop_assert_eq!(replaced, values.iter().filter(|value| !value.is_finite()).count());
            for (old, new) in values.iter().zip(&clipped).filter(|(old, _)| old.is_finite()) {
                prop_assert_eq!(old.to_bits(), new.to_bits());
            }
        }
    }

    #[test]
    fn an_infinity_becomes_the_largest_finite_magnitude() {
        let mut values = [1.0, f32::NAN, f32::NEG_INFINITY, -7.5, f32::INFINITY];
        assert_eq!(clip_non_finite(&mut values), 3);
        assert_eq!(values, [1.0, 0.0, -7.5, -7.5, 7.5]);
    }

    #[test]
    fn nothing_finite_becomes_zero() {
        let mut values = [f32::NAN, f32::INFINITY];
        assert_eq!(clip_non_finite(&mut values), 2);
        assert_eq!(bits(&values), bits(&[0.0, 0.0]));
        assert!(all_finite(&[]));
    }
}
