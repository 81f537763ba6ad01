//! One bit a value (1-bit SGD): its sign. Each sign stands for the mean of the stretch's values with that sign.

use super::feedback::Nothing;
use super::mask::bits_of;
use super::payload::read_float;
use super::{Bound, Context, Quantiser, Stage};
use crate::registry::Entry;
use multiversion::multiversion;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "onebit",
    about: "1-bit SGD: signs, and for each chunk the means of its positive and negative values; with error feedback.",
    params: &[],
    example: "onebit",
    build: |spec| spec.config::<Nothing>().map(|_| Box::new(Stage::Quantiser(Box::new(OneBit)))),
};

const MEANS_BYTES: usize = 8;
const LANES: usize = 8;

#[derive(Debug)]
struct OneBit;

impl Quantiser for OneBit {
    fn bytes(&self, count: usize) -> usize {
        if count == 0 { 0 } else { MEANS_BYTES + count.div_ceil(8) }
    }

    fn quantise(&self, _context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) {
        if values.is_empty() {
            return;
        }
        for mean in means(values) {
            out.extend_from_slice(&mean.to_le_bytes());
        }
        let start = out.len();
        out.resize(start + values.len().div_ceil(8), 0);
        write_signs(values, &mut out[start..]);
    }

    fn dequantise(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), String> {
        if values.is_empty() {
            return Ok(());
        }
        let [positive, negative] = [read_float(bytes, 0), read_float(bytes, 4)];
        if !(positive.is_finite() && negative.is_finite()) {
            return Err(format!("the means {positive} and {negative}, which no values have"));
        }
        let signs = &bytes[MEANS_BYTES..];
        let used = values.len() % 8;
        if used > 0 && signs.last().is_some_and(|last| last >> used != 0) {
            return Err("signs beyond its last value".into());
        }
        read_signs(signs, positive, negative, values);
        Ok(())
    }

    fn bound(&self, _count: usize) -> Bound {
        // Means are projections, which are never longer than what they project. A little more for rounding.
        Bound { of_norm: 1.0001, absolute: f64::from(f32::MIN_POSITIVE) }
    }

    fn needs_residual(&self) -> bool {
        true
    }
}

/// Mean of the values that are not negative, and of those that are.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn means(values: &[f32]) -> [f32; 2] {
    // In f64 no sum of f32 overflows; value `i` goes to running sum `i % 8`.
    let (mut positive, mut negative, mut negatives) = ([0.0f64; LANES], [0.0f64; LANES], [0u32; LANES]);
    let (blocks, rest) = values.as_chunks::<LANES>();
    let mut tail = [0.0; LANES];
    tail[..rest.len()].copy_from_slice(rest);
    for block in blocks.iter().chain([&tail]) {
        for lane in 0..LANES {
            let value = f64::from(block[lane]);
            positive[lane] += value.max(0.0);
            negative[lane] += value.min(0.0);
            negatives[lane] += u32::from(value < 0.0);
        }
    }
    let count = f64::from(negatives.iter().sum::<u32>());
    let mut sums = [0.0; 2];
    for lane in 0..LANES {
        sums[0] += positive[lane];
        sums[1] += negative[lane];
    }
    [(sums[0] / (values.len() as f64 - count).max(1.0)) as f32, (sums[1] / count.max(1.0)) as f32]
}

/// A set bit is a negative value.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn write_signs(values: &[f32], out: &mut [u8]) {
    for (bytes, block) in out.chunks_mut(8).zip(values.chunks(64)) {
        let mut flags = [0u8; 64];
        for (flag, value) in flags.iter_mut().zip(block) {
            *flag = u8::from(*value < 0.0);
        }
        let count = bytes.len();
        bytes.copy_from_slice(&bits_of(&flags).to_le_bytes()[..count]);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn read_signs(signs: &[u8], positive: f32, negative: f32, values: &mut [f32]) {
    let (blocks, rest) = values.as_chunks_mut::<8>();
    for (block, &byte) in blocks.iter_mut().zip(signs) {
        for (lane, value) in block.iter_mut().enumerate() {
            *value = if byte >> lane & 1 == 1 { negative } else { positive };
        }
    }
    for (lane, value) in rest.iter_mut().enumerate() {
        *value = if signs[blocks.len()] >> lane & 1 == 1 { negative } else { positive };
    }
}
