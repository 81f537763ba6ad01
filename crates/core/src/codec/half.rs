//! Two bytes a value: f16 and bf16, rounded to the nearest, ties to even.

use super::feedback::Nothing;
use super::{Bound, Context, Quantiser, Stage};
use crate::kernels::{self, Bf16, Element, F16};
use crate::registry::Entry;
use crate::wire::DType;
use multiversion::multiversion;

pub(super) const F16_ENTRY: Entry<Stage> = Entry {
    name: "f16",
    about: "IEEE half precision: 11 significant bits, magnitudes up to 65504 (larger ones are brought to it).",
    params: &[],
    example: "f16",
    build: |spec| spec.config::<Nothing>().map(|_| Box::new(Stage::Quantiser(Box::new(HalfPrecision)))),
};

pub(super) const BF16_ENTRY: Entry<Stage> = Entry {
    name: "bf16",
    about: "bfloat16: 8 significant bits, the range of f32.",
    params: &[],
    example: "bf16",
    build: |spec| spec.config::<Nothing>().map(|_| Box::new(Stage::Quantiser(Box::new(BrainFloat)))),
};

const MAGNITUDE: u32 = 0x7fff_ffff;

#[derive(Debug)]
struct HalfPrecision;

#[derive(Debug)]
struct BrainFloat;

impl Quantiser for HalfPrecision {
    fn bytes(&self, count: usize) -> usize {
        2 * count
    }

    fn quantise(&self, _context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + 2 * values.len(), 0);
        write_f16(values, &mut out[start..]);
    }

    fn quantise_finite(&self, _context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) -> bool {
        quantise_in_blocks(values, out, write_f16)
    }

    fn dequantise(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), String> {
        read_f16(bytes, values);
        Ok(())
    }

    fn element_type(&self) -> Option<DType> {
        Some(DType::F16)
    }

    fn largest(&self) -> f32 {
        65504.0
    }

    fn bound(&self, _count: usize) -> Bound {
        // Half a unit in the last place of 11 bits; half the smallest subnormal number.
        Bound { of_norm: 2f64.powi(-11), absolute: 2f64.powi(-25) }
    }
}

impl Quantiser for BrainFloat {
    fn bytes(&self, count: usize) -> usize {
        2 * count
    }

    fn quantise(&self, _context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + 2 * values.len(), 0);
        write_bf16(values, &mut out[start..]);
    }

    fn quantise_finite(&self, _context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) -> bool {
        quantise_in_blocks(values, out, write_bf16)
    }

    fn dequantise(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), String> {
        read_bf16(bytes, values);
        Ok(())
    }

    fn element_type(&self) -> Option<DType> {
        Some(DType::Bf16)
    }

    fn bound(&self, _count: usize) -> Bound {
        // Subnormal numbers have fewer significant bits.
        Bound { of_norm: 2f64.powi(-8), absolute: 2f64.powi(-133) }
    }
}

/// Writes values as elements of a type, in one pass. Whether all of them are finite; halves of others come out as anything.
pub(crate) fn write(dtype: DType, values: &[f32], out: &mut [u8]) -> bool {
    assert_eq!(out.len(), dtype.bytes() * values.len());
    match dtype {
        DType::F32 => {
            out.copy_from_slice(bytemuck::cast_slice(values));
            kernels::all_finite(values)
        }
        DType::F16 => write_f16(values, out),
        DType::Bf16 => write_bf16(values, out),
    }
}

/// Reads what [`write()`] wrote.
pub(crate) fn read(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    match dtype {
        DType::F32 => super::payload::read_floats(bytes, values),
        DType::F16 => read_f16(bytes, values),
        DType::Bf16 => read_bf16(bytes, values),
    }
}

/// Writes values as elements of a type, whatever they are: NaN and Inf stay so. For few of them: it is not a vectorised loop.
pub(crate) fn write_any(dtype: DType, values: &[f32], out: &mut [u8]) {
    if write(dtype, values, out) || dtype == DType::F32 {
        return;
    }
    // The infinity of the type, and a NaN of it.
    let (infinity, nan) = if dtype == DType::F16 { (0x7c00u16, 0x7e00) } else { (0x7f80, 0x7fc0) };
    for (bytes, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        let sign = u16::from(value.is_sign_negative()) << 15;
        if value.is_nan() {
            *bytes = (nan | sign).to_le_bytes();
        } else if value.is_infinite() {
            *bytes = (infinity | sign).to_le_bytes();
        }
    }
}

/// Whether a type has these values, to the bit; a NaN is as good as another.
pub(crate) fn fits(dtype: DType, values: &[f32]) -> bool {
    match dtype {
        DType::F32 => true,
        DType::F16 => fit_f16(values) || values.iter().all(|&value| !value.is_finite() || fit_f16(&[value])),
        DType::Bf16 => fit_bf16(values) || values.iter().all(|value| value.is_nan() || fit_bf16(&[*value])),
    }
}

/// Looks at values and converts them in one pass, a few at a time: what is appended is zeroed first, in the cache.
fn quantise_in_blocks(values: &[f32], out: &mut Vec<u8>, write: fn(&[f32], &mut [u8]) -> bool) -> bool {
    const BLOCK: usize = 1024;
    out.reserve(2 * values.len());
    values.chunks(BLOCK).all(|block| {
        let start = out.len();
        out.resize(start + 2 * block.len(), 0);
        write(block, &mut out[start..])
    })
}

/// The nearest f16 of a finite value; magnitudes beyond the largest become it.
#[inline(always)]
fn to_f16(value: f32) -> u16 {
    const LARGEST: i32 = 65504f32.to_bits() as i32;
    /// 2^-14, below which an f16 is subnormal.
    const SUBNORMAL_BELOW: i32 = (127 - 14) << 23;
    // Signed numbers: every CPU level compares them, and magnitudes have no sign.
    let bits = value.to_bits() as i32;
    let magnitude = (bits & 0x7fff_ffff).min(LARGEST);
    // A carry out of the mantissa is what the exponent needs.
    let normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - ((127 - 15) << 23)) >> 13;
    // One half has units of 2^-24, those of subnormal f16s: the addition rounds.
    let subnormal = (f32::from_bits(magnitude as u32) + 0.5).to_bits() as i32 - 0.5f32.to_bits() as i32;
    let half = if magnitude < SUBNORMAL_BELOW { subnormal } else { normal };
    (half | (bits >> 16 & 0x8000)) as u16
}

/// The nearest bf16 of a finite value; what rounds to infinity becomes the largest.
#[inline(always)]
fn to_bf16(value: f32) -> u16 {
    const LARGEST: u32 = 0x7f7f;
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let rounded = (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16;
    (rounded.min(LARGEST) | (bits >> 16 & 0x8000)) as u16
}

/// Whether all values are finite; others come out as anything.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn write_f16(values: &[f32], out: &mut [u8]) -> bool {
    let mut largest = 0;
    for (bytes, &value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        largest = largest.max(value.to_bits() & MAGNITUDE);
        *bytes = to_f16(value).to_le_bytes();
    }
    f32::from_bits(largest).is_finite()
}

/// The same for bf16.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn write_bf16(values: &[f32], out: &mut [u8]) -> bool {
    let mut largest = 0;
    for (bytes, &value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        largest = largest.max(value.to_bits() & MAGNITUDE);
        *bytes = to_bf16(value).to_le_bytes();
    }
    f32::from_bits(largest).is_finite()
}

/// Whether all of these are finite values of f16.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn fit_f16(values: &[f32]) -> bool {
    let differing = values
        .iter()
        .fold(0, |differing, &value| differing | F16(to_f16(value)).to_f32().to_bits() ^ value.to_bits());
    differing == 0
}

/// Whether all of these are values of bf16: they have no further bits.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn fit_bf16(values: &[f32]) -> bool {
    values.iter().fold(0, |bits, value| bits | value.to_bits()) & 0xffff == 0
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn read_f16(bytes: &[u8], values: &mut [f32]) {
    for (value, &bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *value = F16(u16::from_le_bytes(bytes)).to_f32();
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn read_bf16(bytes: &[u8], values: &mut [f32]) {
    for (value, &bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *value = Bf16(u16::from_le_bytes(bytes)).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_finite_f16_and_bf16_comes_back() {
        for bits in 0..=u16::MAX {
            let half = F16(bits).to_f32();
            if half.is_finite() {
                assert_eq!(to_f16(half), bits, "{half}");
            }
            let brain = Bf16(bits).to_f32();
            if brain.is_finite() {
                assert_eq!(to_bf16(brain), bits, "{brain}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_where_it_may() {
        let values = [1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -2.0];
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let mut words = [0.0f32; 5];
            let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..5 * dtype.bytes()];
            write_any(dtype, &values, bytes);
            let read = dtype.values(bytes).unwrap().to_vec();
            assert_eq!((&read[..3], read[4]), (&values[..3], -2.0), "{dtype:?}");
            assert!(read[3].is_nan(), "{dtype:?}");
        }
    }

    #[test]
    fn values_fit_a_type_that_has_them() {
        let halves = [1.0, -2.5, 0.0, -0.0, 65504.0, 6e-8f32.min(2f32.powi(-24))];
        let others = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for values in [&halves[..], &others, &[&halves[..], &others].concat(), &[]] {
            assert!(fits(DType::F16, values) && fits(DType::F32, values), "{values:?}");
        }
        assert!(fits(
            DType::Bf16,
            &[1.5, f32::NAN, f32::from_bits(0x7f80_0001), f32::NEG_INFINITY, 2f32.powi(-130)]
        ));
        for beyond in [65520.0, 1e6, -70000.0, 1.0 + 2f32.powi(-11), 2f32.powi(-25)] {
            assert!(!fits(DType::F16, &[1.0, beyond]) && !fits(DType::F16, &[beyond, f32::NAN]), "{beyond}");
        }
        for beyond in [1.0 + 2f32.powi(-8), f32::MAX] {
            assert!(
                !fits(DType::Bf16, &[1.0, beyond]) && !fits(DType::Bf16, &[beyond, f32::NAN]),
                "{beyond}"
            );
        }
    }

    #[test]
    fn what_is_too_large_becomes_the_largest() {
        assert_eq!(F16(to_f16(1e30)).to_f32(), 65504.0);
        assert_eq!(F16(to_f16(-70000.0)).to_f32(), -65504.0);
        assert!(Bf16(to_bf16(f32::MAX)).to_f32().is_finite());
    }

    proptest! {
        /// No other f16 is nearer, and of two that are equally near it is the even one.
        #[test]
        fn the_nearest_is_taken(value in prop_oneof![-65504.0f32..65504.0, -1e-4f32..1e-4, -1e-7f32..1e-7]) {
            let chosen = to_f16(value);
            let distance = |bits: u16| (f64::from(F16(bits).to_f32()) - f64::from(value)).abs();
            for other in [chosen.wrapping_sub(1), chosen.wrapping_add(1)] {
                if F16(other).to_f32().is_finite() && (other ^ chosen) >> 15 == 0 {
                    prop_assert!(distance(chosen) <= distance(other));
                    prop_assert!(distance(chosen) < distance(other) || chosen & 1 == 0);
                }
            }
        }
    }
}
