//! Norms, in a fixed order of additions.

use multiversion::multiversion;

/// Running sums of a reduction. An array of them fills the vector registers of every CPU level while the order of
/// additions stays written down.
const LANES: usize = 16;

/// The sum of squares, in f64: no f32 overflows it, and cutting a table costs no accuracy that matters.
///
/// Element `i` goes to running sum `i % 16`; the sums are added in ascending order at the end.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn squared_norm(values: &[f32]) -> f64 {
    let mut sums = [0.0f64; LANES];
    let (blocks, rest) = values.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            let value = f64::from(block[lane]);
            sums[lane] += value * value;
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        let value = f64::from(value);
        *sum += value * value;
    }
    let mut total = 0.0;
    for sum in sums {
        total += sum;
    }
    total
}

/// [`squared_norm`] of the sums of elements, without storing them; the same bits.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn squared_norm_of_sum(left: &[f32], right: &[f32]) -> f64 {
    assert_eq!(left.len(), right.len());
    let mut sums = [0.0f64; LANES];
    let ((lefts, left), (rights, right)) = (left.as_chunks::<LANES>(), right.as_chunks::<LANES>());
    for (left, right) in lefts.iter().zip(rights) {
        for lane in 0..LANES {
            let value = f64::from(left[lane] + right[lane]);
            sums[lane] += value * value;
        }
    }
    for ((sum, &left), &right) in sums.iter_mut().zip(left).zip(right) {
        let value = f64::from(left + right);
        *sum += value * value;
    }
    let mut total = 0.0;
    for sum in sums {
        total += sum;
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn twin(values: &[f32]) -> f64 {
        let mut sums = [0.0f64; 16];
        for (i, &value) in values.iter().enumerate() {
            sums[i % 16] += f64::from(value) * f64::from(value);
        }
        sums.iter().fold(0.0, |total, sum| total + sum)
    }

    proptest! {
        #[test]
        fn squared_norm_is_its_twin(values in prop::collection::vec(-1e30f32..1e30, 0..300)) {
            prop_assert_eq!(squared_norm(&values).to_bits(), twin(&values).to_bits());
        }
    }

    proptest! {
        #[test]
        fn squared_norm_of_sum_is_that_of_the_stored_sum(
            pairs in prop::collection::vec((-1e30f32..1e30, -1e30f32..1e30), 0..300)
        ) {
            let (left, right): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let stored: Vec<f32> = left.iter().zip(&right).map(|(left, right)| left + right).collect();
            prop_assert_eq!(squared_norm_of_sum(&left, &right).to_bits(), twin(&stored).to_bits());
        }
    }

    #[test]
    fn known_answers() {
        assert_eq!(squared_norm(&[]), 0.0);
        assert_eq!(squared_norm(&[3.0, 4.0]), 25.0);
        assert_eq!(squared_norm(&[0.5; 1000]), 250.0);
        assert!(squared_norm(&[f32::MAX; 100]).is_finite());
        assert_eq!(squared_norm_of_sum(&[f32::MAX; 17], &[f32::MAX; 17]), f64::INFINITY);
    }
}
