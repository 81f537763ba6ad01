//! Gradients as they lie in memory: of any element type that travels, and perhaps still in two pieces.

use bytemuck::{Pod, Zeroable};
use multiversion::multiversion;
use std::fmt::Debug;
use std::ops::Range;

/// An element type that gradients travel in. Two items are required.
///
/// `to_f32` MUST be exact: every finite value, both zeros, infinities and NaN as what they are.
pub trait Element: Pod + Send + Sync + PartialEq + Debug {
    /// The value.
    fn to_f32(self) -> f32;

    /// Whether no value is NaN or infinite.
    fn all_finite(values: &[Self]) -> bool;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    fn all_finite(values: &[f32]) -> bool {
        super::all_finite(values)
    }
}

/// A 16-bit IEEE 754 number, as its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct F16(pub u16);

impl F16 {
    const MAGNITUDE: u16 = 0x7fff;
    const INFINITY: u16 = 0x7c00;
    /// How far the mantissas of the two formats are apart.
    const SHIFT: u32 = 13;
    /// The difference of the two exponents' biases, where an `f32` has its exponent.
    const REBIAS: u32 = (127 - 15) << 23;
    /// The smallest normal number, as bits of an `f32`.
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
}

impl Element for F16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.0);
        let sign = (bits & 0x8000) << 16;
        let magnitude = (bits & u32::from(F16::MAGNITUDE)) << F16::SHIFT;
        // A subnormal number becomes the mantissa of the smallest normal one, which is then taken off: no operand is subnormal,
        // since CPUs take a hundred times as long for those, and small gradients have many.
        let small = f32::from_bits(magnitude + F16::SMALLEST_NORMAL) - f32::from_bits(F16::SMALLEST_NORMAL);
        let is_normal = magnitude >= 1 << 23;
        let finite = if is_normal { magnitude + F16::REBIAS } else { small.to_bits() };
        let is_finite = bits & u32::from(F16::INFINITY) != u32::from(F16::INFINITY);
        let magnitude = if is_finite { finite } else { magnitude | f32::INFINITY.to_bits() };
        f32::from_bits(magnitude | sign)
    }

    fn all_finite(values: &[F16]) -> bool {
        largest_magnitude(bytemuck::cast_slice(values)) < F16::INFINITY
    }
}

/// A bfloat16 number, as its bits: the upper half of an `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl Bf16 {
    const INFINITY: u16 = 0x7f80;
}

impl Element for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    fn all_finite(values: &[Bf16]) -> bool {
        largest_magnitude(bytemuck::cast_slice(values)) < Bf16::INFINITY
    }
}

/// The largest bits but for the sign, which as integers are ordered like the numbers they stand for.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn largest_magnitude(values: &[u16]) -> u16 {
    let mut largest = 0;
    for value in values {
        largest = largest.max(value & F16::MAGNITUDE);
    }
    largest
}

/// The elements of a gradient, of whatever type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values<'a> {
    /// 32-bit IEEE 754.
    F32(&'a [f32]),
    /// 16-bit IEEE 754.
    F16(&'a [F16]),
    /// bfloat16.
    Bf16(&'a [Bf16]),
}

impl<'a> Values<'a> {
    /// Number of elements.
    pub fn len(self) -> usize {
        match self {
            Values::F32(values) => values.len(),
            Values::F16(values) => values.len(),
            Values::Bf16(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Some of the elements.
    pub fn slice(self, range: Range<usize>) -> Values<'a> {
        match self {
            Values::F32(values) => Values::F32(&values[range]),
            Values::F16(values) => Values::F16(&values[range]),
            Values::Bf16(values) => Values::Bf16(&values[range]),
        }
    }

    /// Whether no value is NaN or infinite.
    pub fn all_finite(self) -> bool {
        match self {
            Values::F32(values) => f32::all_finite(values),
            Values::F16(values) => F16::all_finite(values),
            Values::Bf16(values) => Bf16::all_finite(values),
        }
    }

    /// The same values as `f32`, in memory of their own.
    pub fn to_vec(self) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        super::copy(&mut values, self);
        values
    }
}

/// Input of a loop over a gradient, element by element. Two methods are required.
///
/// `at` MUST be fit to be inlined into a vectorised loop: `#[inline(always)]`, and nothing that calls.
pub trait Source: Copy {
    /// Panics unless there are `len` elements; it also tells the compiler, which then checks nothing in the loop.
    fn expect_len(self, len: usize);

    /// An element.
    fn at(self, index: usize) -> f32;
}

impl<E: Element> Source for &[E] {
    #[inline(always)]
    fn expect_len(self, len: usize) {
        assert_eq!(self.len(), len, "a gradient has its parameters' length");
    }

    #[inline(always)]
    fn at(self, index: usize) -> f32 {
        self[index].to_f32()
    }
}

/// The sum of earlier gradients and one more, computed element by element and not stored.
#[derive(Debug, Clone, Copy)]
pub struct Sum<'a, E> {
    /// The sum so far.
    pub before: &'a [f32],
    /// The last gradient.
    pub last: &'a [E],
}

impl<E: Element> Source for Sum<'_, E> {
    #[inline(always)]
    fn expect_len(self, len: usize) {
        self.before.expect_len(len);
        self.last.expect_len(len);
    }

    #[inline(always)]
    fn at(self, index: usize) -> f32 {
        self.before[index] + self.last[index].to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By its definition, in f64: (-1)^s * 1.m * 2^(e-15), or 0.m * 2^-14.
    fn f16_by_definition(bits: u16) -> f64 {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        match exponent {
            0 => sign * mantissa / 1024.0 * 2f64.powi(-14),
            31 if mantissa == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            _ => sign * (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
        }
    }

    #[test]
    fn every_f16_is_what_its_definition_says() {
        for bits in 0..=u16::MAX {
            let (value, expected) = (F16(bits).to_f32(), f16_by_definition(bits));
            assert_eq!(value.is_nan(), expected.is_nan(), "{bits:#06x}");
            if !expected.is_nan() {
                assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{bits:#06x}");
            }
            assert_eq!(F16::all_finite(&[F16(bits)]), expected.is_finite(), "{bits:#06x}");
        }
    }

    #[test]
    fn every_bf16_is_the_upper_half_of_an_f32() {
        for bits in 0..=u16::MAX {
            let value = Bf16(bits).to_f32();
            assert_eq!(value.to_bits(), u32::from(bits) << 16);
            assert_eq!(Bf16::all_finite(&[Bf16(bits)]), value.is_finite(), "{bits:#06x}");
        }
    }

    proptest! {
        #[test]
        fn one_value_that_is_not_finite_is_found_anywhere(len in 1usize..300, at in 0usize..300, odd in any::<u16>()) {
            let mut half = vec![F16(0x3c00); len];
            let mut brain = vec![Bf16(0x3f80); len];
            half[at % len] = F16(odd);
            brain[at % len] = Bf16(odd);
            prop_assert_eq!(Values::F16(&half).all_finite(), half.iter().all(|value| value.to_f32().is_finite()));
            prop_assert_eq!(Values::Bf16(&brain).all_finite(), brain.iter().all(|value| value.to_f32().is_finite()));
        }
    }
}
