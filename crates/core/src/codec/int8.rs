//! One byte a value: a multiple of the stretch's scale, rounded to the nearest.

use super::feedback::Nothing;
use super::payload::read_float;
use super::{Bound, Context, Quantiser, Stage};
use crate::registry::Entry;
use multiversion::multiversion;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "int8",
    about: "Whole numbers from -127 to 127, times a scale for each chunk.",
    params: &[],
    example: "int8",
    build: |spec| spec.config::<Nothing>().map(|_| Box::new(Stage::Quantiser(Box::new(Int8)))),
};

const STEPS: f32 = 127.0;
const SCALE_BYTES: usize = 4;

#[derive(Debug)]
struct Int8;

impl Quantiser for Int8 {
    fn bytes(&self, count: usize) -> usize {
        if count == 0 { 0 } else { SCALE_BYTES + count }
    }

    fn quantise(&self, _context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) {
        if values.is_empty() {
            return;
        }
        // Divided before it is multiplied: neither the scale nor its inverse may overflow.
        let largest = largest_magnitude(values);
        let scale = largest / STEPS;
        out.extend_from_slice(&scale.to_le_bytes());
        let start = out.len();
        out.resize(start + values.len(), 0);
        write(values, if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 }, &mut out[start..]);
    }

    fn dequantise(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), String> {
        if values.is_empty() {
            return Ok(());
        }
        let scale = read_float(bytes, 0);
        if !(0.0..=2.0 * (f32::MAX / STEPS)).contains(&scale) {
            return Err(format!("the scale {scale}, which no values have"));
        }
        let codes = &bytes[SCALE_BYTES..];
        if codes.contains(&(i8::MIN as u8)) {
            return Err("the code -128, which no value has".into());
        }
        read(codes, scale, values);
        Ok(())
    }

    fn bound(&self, count: usize) -> Bound {
        // Half a step of every value, where the largest magnitude is at most the norm. A little more for rounding.
        Bound { of_norm: (count as f64).sqrt() * 0.501 / f64::from(STEPS), absolute: 2f64.powi(-118) }
    }
}

/// The largest magnitude; values are finite.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn largest_magnitude(values: &[f32]) -> f32 {
    let mut largest = 0;
    for value in values {
        largest = largest.max(value.to_bits() & 0x7fff_ffff);
    }
    f32::from_bits(largest)
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn write(values: &[f32], inverse: f32, out: &mut [u8]) {
    for (code, &value) in out.iter_mut().zip(values) {
        let steps = (value * inverse).clamp(-STEPS, STEPS);
        *code = (steps + 0.5f32.copysign(steps)) as i32 as i8 as u8;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn read(codes: &[u8], scale: f32, values: &mut [f32]) {
    for (value, &code) in values.iter_mut().zip(codes) {
        // The scale of the largest values there are is rounded, perhaps upwards.
        *value = (f32::from(code as i8) * scale).clamp(-f32::MAX, f32::MAX);
    }
}
