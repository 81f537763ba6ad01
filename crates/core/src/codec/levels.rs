//! Values as one of a few levels of a scale, rounded at random so that the mean is right: what QSGD and TernGrad share.
//!
//! A code is a sign bit above the level. Codes of 2, 4 or 8 bits stand in a byte, the first lowest.

use crate::prng::uniform_at;
use multiversion::multiversion;

/// The most levels that a code has room for.
pub(super) const MAX_LEVELS: u8 = 127;

/// Codes that are made before they are packed.
const BLOCK: usize = 64;

/// Bits of a code with so many levels beside zero: a width that divides a byte.
pub(super) fn bits(levels: u8) -> usize {
    match levels {
        0..=1 => 2,
        2..=7 => 4,
        _ => 8,
    }
}

/// Bytes of `count` codes.
pub(super) fn bytes(levels: u8, count: usize) -> usize {
    (count * bits(levels)).div_ceil(8)
}

/// Appends the codes of `values`, whose magnitudes are `scale` at most. `first` is the place of the first one among the
/// draws of `seed`.
pub(super) fn write(values: &[f32], scale: f32, levels: u8, seed: u32, first: usize, out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + bytes(levels, values.len()), 0);
    let packed = &mut out[start..];
    // A scale without inverse is that of values too small to be told from zero.
    let factor = if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
    match bits(levels) {
        2 => write_packed::<4>(values, factor, levels, seed, first as u32, packed),
        4 => write_packed::<2>(values, factor, levels, seed, first as u32, packed),
        _ => write_packed::<1>(values, factor, levels, seed, first as u32, packed),
    }
}

/// Fills `values` from as many codes. The error completes "the payload has ...".
pub(super) fn read(packed: &[u8], scale: f32, levels: u8, values: &mut [f32]) -> Result<(), String> {
    if !(0.0..=f32::MAX).contains(&scale) {
        return Err(format!("the scale {scale}, which no values have"));
    }
    let step = scale / f32::from(levels);
    let largest = match bits(levels) {
        2 => read_packed::<4>(packed, step, values),
        4 => read_packed::<2>(packed, step, values),
        _ => read_packed::<1>(packed, step, values),
    };
    if largest > levels {
        return Err(format!("level {largest} of {levels}"));
    }
    Ok(())
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn write_packed<const PER_BYTE: usize>(
    values: &[f32],
    factor: f32,
    levels: u8,
    seed: u32,
    first: u32,
    out: &mut [u8],
) {
    let (width, levels) = (8 / PER_BYTE, f32::from(levels));
    for (at, (block, packed)) in values.chunks(BLOCK).zip(out.chunks_mut(BLOCK / PER_BYTE)).enumerate() {
        let mut codes = [0u8; BLOCK];
        let place = first.wrapping_add((at * BLOCK) as u32);
        for (lane, (code, &value)) in codes.iter_mut().zip(block).enumerate() {
            let exact = ((value * factor).abs() * levels).min(levels);
            let draw = uniform_at(seed, place.wrapping_add(lane as u32));
            // Rounded up as often as the fraction says: the whole part of the sum.
            let level = ((exact + draw) as i32 as u8).min(levels as u8);
            *code = level | ((value.to_bits() >> 31) as u8) << (width - 1);
        }
        for (byte, codes) in packed.iter_mut().zip(codes.as_chunks::<PER_BYTE>().0) {
            let mut bits = 0;
            for (lane, code) in codes.iter().enumerate() {
                bits |= code << (lane * width);
            }
            *byte = bits;
        }
    }
}

/// Returns the highest level that it met.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn read_packed<const PER_BYTE: usize>(packed: &[u8], step: f32, values: &mut [f32]) -> u8 {
    let width = 8 / PER_BYTE;
    let level_mask = ((1u16 << (width - 1)) - 1) as u8;
    let mut largest = 0;
    for (values, packed) in values.chunks_mut(BLOCK).zip(packed.chunks(BLOCK / PER_BYTE)) {
        let mut codes = [0u8; BLOCK];
        for (codes, byte) in codes.as_chunks_mut::<PER_BYTE>().0.iter_mut().zip(packed) {
            for (lane, code) in codes.iter_mut().enumerate() {
                *code = byte >> (lane * width);
            }
        }
        for code in &codes[..values.len()] {
            largest = largest.max(code & level_mask);
        }
        for (value, code) in values.iter_mut().zip(&codes) {
            // The step of the largest values there are is rounded, perhaps upwards.
            let magnitude = (f32::from(code & level_mask) * step).min(f32::MAX);
            let sign = u32::from(code >> (width - 1) & 1) << 31;
            *value = f32::from_bits(magnitude.to_bits() | sign);
        }
    }
    largest
}
