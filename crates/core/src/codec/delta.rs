//! Lossless deltas: what changed between two versions, as the receiver holds them.
//!
//! Versions are compared in the receiver's own element type, in which many small updates change nothing. Changed entries travel as
//! what they become, not as differences, so that nothing depends on how numbers are added. Where they stand is said by the
//! shortest of a bitmap, numbers, and the gaps between them.

use super::container;
use super::half;
use super::mask::Mask;
use super::payload::{Layout, Prefix, write_floats};
use super::{Bound, Codec, Context, Quantiser, Stage};
use crate::registry::{Entry, Param};
use crate::wire::DType;
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "delta",
    about: "For answers and broadcasts: rounds to an element type, and sends the entries that have changed in it.",
    params: &[Param {
        name: "dtype",
        default: None,
        about: "The receiver's element type: `bf16`, `f16` or `f32`.",
    }],
    example: "delta:dtype=bf16",
    build: |spec| Ok(Box::new(Stage::Quantiser(Box::new(spec.config::<Delta>()?)))),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Delta {
    dtype: Receiver,
}

/// The element types that a receiver may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Receiver {
    F32,
    F16,
    Bf16,
}

impl Delta {
    fn dtype(&self) -> DType {
        match self.dtype {
            Receiver::F32 => DType::F32,
            Receiver::F16 => DType::F16,
            Receiver::Bf16 => DType::Bf16,
        }
    }
}

impl Quantiser for Delta {
    fn bytes(&self, count: usize) -> usize {
        self.dtype().bytes() * count
    }

    fn quantise(&self, _context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + self.bytes(values.len()), 0);
        half::write(self.dtype(), values, &mut out[start..]);
    }

    fn dequantise(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), String> {
        half::read(self.dtype(), bytes, values);
        Ok(())
    }

    fn largest(&self) -> f32 {
        if self.dtype() == DType::F16 { 65504.0 } else { f32::MAX }
    }

    fn bound(&self, _count: usize) -> Bound {
        match self.dtype() {
            DType::F32 => Bound::EXACT,
            DType::F16 => Bound { of_norm: 2f64.powi(-11), absolute: 2f64.powi(-25) },
            DType::Bf16 => Bound { of_norm: 2f64.powi(-8), absolute: 2f64.powi(-133) },
        }
    }

    fn replaces(&self) -> Option<DType> {
        Some(self.dtype())
    }
}

/// Memory for making deltas.
#[derive(Debug, Default)]
pub(crate) struct DeltaEncoder {
    rounded: Vec<f32>,
    halves: Vec<u8>,
    changed: Mask,
    values: Vec<f32>,
    gaps: Vec<u8>,
}

/// A byte of a gap after which the same gap goes on.
const GOES_ON: u8 = u8::MAX;

impl DeltaEncoder {
    /// Rounds values to an element type. False when some are not finite; what is in `target` is then of no use.
    pub(crate) fn round(&mut self, dtype: DType, values: &[f32], target: &mut [f32]) -> bool {
        self.halves.resize(dtype.bytes() * values.len(), 0);
        let is_finite = half::write(dtype, values, &mut self.halves);
        half::read(dtype, &self.halves, target);
        is_finite
    }

    /// Appends what brings a receiver from what it holds to these values, rounded, and makes `held` the same. False when values
    /// are not finite; then nothing has changed.
    pub(crate) fn encode_onto(
        &mut self,
        codec: &Codec,
        held: &mut [f32],
        values: &[f32],
        out: &mut Vec<u8>,
    ) -> bool {
        let dtype = codec.rounded_type();
        let mut rounded = std::mem::take(&mut self.rounded);
        rounded.resize(values.len(), 0.0);
        let is_finite = self.round(dtype, values, &mut rounded);
        if is_finite {
            self.write(codec, dtype, held, &rounded, out);
            held.copy_from_slice(&rounded);
        }
        self.rounded = rounded;
        is_finite
    }

    fn write(&mut self, codec: &Codec, dtype: DType, held: &[f32], rounded: &[f32], out: &mut Vec<u8>) {
        let DeltaEncoder { changed, values, gaps, halves, .. } = self;
        let entries = rounded.len();
        changed.reset(entries);
        gaps.clear();
        values.clear();
        let mut next = 0;
        for (at, (old, new)) in held.iter().zip(rounded).enumerate() {
            if old.to_bits() != new.to_bits() {
                changed.set(at);
                values.push(*new);
                let gap = at - next;
                gaps.extend(std::iter::repeat_n(GOES_ON, gap / usize::from(GOES_ON)));
                gaps.push((gap % usize::from(GOES_ON)) as u8);
                next = at + 1;
            }
        }
        let (count, width) = (values.len(), dtype.bytes());
        let numbers = if entries <= 1 << 16 { (2, Layout::Index16) } else { (4, Layout::Index32) };
        let candidates = [
            (gaps.len(), Layout::Gaps),
            (Mask::bytes(entries), Layout::Bitmap),
            (numbers.0 * count, numbers.1),
            ((entries - count) * width, Layout::Dense),
        ];
        let layout = candidates.into_iter().min_by_key(|(bytes, _)| *bytes).map_or(Layout::Dense, |it| it.1);
        let sent: &[f32] = if layout == Layout::Dense { rounded } else { values };
        let prefix = Prefix { layout, packed: false, tag: codec.tag(), count: sent.len() as u32 };
        out.extend_from_slice(&prefix.encode());
        match layout {
            Layout::Gaps => out.extend_from_slice(gaps),
            other => container::write_places(other, changed, out),
        }
        if dtype == DType::F32 {
            return write_floats(sent, out);
        }
        halves.resize(width * sent.len(), 0);
        half::write(dtype, sent, halves);
        out.extend_from_slice(halves);
    }
}

/// Reads the gaps before `count` places of `entries` into a mask; what follows them in the body. The error completes "the payload
/// has ...".
pub(super) fn read_gaps<'a>(
    body: &'a [u8],
    entries: usize,
    count: usize,
    mask: &mut Mask,
) -> Result<&'a [u8], String> {
    mask.reset(entries);
    let (mut bytes, mut next) = (body.iter(), 0usize);
    for _ in 0..count {
        let mut place = next;
        loop {
            let byte = *bytes.next().ok_or("fewer places than values")?;
            place += usize::from(byte);
            if byte != GOES_ON {
                break;
            }
            if place >= entries {
                return Err("places beyond its end".into());
            }
        }
        if place >= entries {
            return Err("places beyond its end".into());
        }
        mask.set(place);
        next = place + 1;
    }
    Ok(bytes.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Decoder;
    use crate::prng::Prng;
    use crate::registry::Registry;
    use proptest::prelude::*;
    use std::sync::Arc;

    const TYPES: [&str; 3] = ["bf16", "f16", "f32"];

    fn codec(dtype: &str) -> Arc<Codec> {
        let text = format!("delta:dtype={dtype}");
        Arc::new(Codec::for_answers(&Registry::builtin().codec, &text).expect("a codec"))
    }

    /// Brings both ends from some values to others; the bytes of the payload.
    fn send(codec: &Arc<Codec>, held: &mut [f32], values: &[f32]) -> Vec<u8> {
        let mut received = held.to_vec();
        let mut payload = Vec::new();
        assert!(DeltaEncoder::default().encode_onto(codec, held, values, &mut payload));
        Decoder::new(codec.clone()).decode_onto(&payload, &mut received).expect("a payload");
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
        assert_eq!(bits(&received), bits(held));
        payload
    }

    #[test]
    fn an_entry_that_is_unchanged_in_the_receivers_type_does_not_travel() {
        let codec = codec("bf16");
        let mut held = vec![0.0; 100];
        send(&codec, &mut held, &[1.0; 100]);
        let mut next = [1.001; 100];
        assert_eq!(send(&codec, &mut held, &next).len(), crate::codec::PREFIX_BYTES);
        next[7] = 2.0;
        assert_eq!(send(&codec, &mut held, &next).len(), crate::codec::PREFIX_BYTES + 1 + 2);
        assert_eq!((held[6], held[7]), (1.0, 2.0));
        // Zeros of both signs are different values.
        assert_eq!(send(&codec, &mut held, &[0.0; 100]).len(), crate::codec::PREFIX_BYTES + 200);
        assert_eq!(send(&codec, &mut held, &[-0.0; 100]).len(), crate::codec::PREFIX_BYTES + 200);
    }

    #[test]
    fn what_travels_byte_by_byte() {
        let codec = codec("bf16");
        let mut held = vec![0.0; 1000];
        let mut next = held.clone();
        (next[3], next[300], next[301]) = (1.0, -2.0, 0.5);
        let tag = codec.tag().to_le_bytes();
        let payload = send(&codec, &mut held, &next);
        let expected = [7, 0, tag[0], tag[1], 3, 0, 0, 0, 3, 255, 41, 0, 0x80, 0x3f, 0x00, 0xc0, 0x00, 0x3f];
        assert_eq!(payload, expected);
    }

    #[test]
    fn a_hundredth_of_halves_costs_little_more_than_three_bytes_each() {
        let codec = codec("bf16");
        let mut prng = Prng::new(3);
        for entries in [8192, 1 << 16, 1 << 18] {
            let mut held = vec![0.0; entries];
            let values: Vec<f32> = (0..entries).map(|_| prng.normal() as f32).collect();
            send(&codec, &mut held, &values);
            let mut next = held.clone();
            let mut changed = 0;
            for value in &mut next {
                if prng.chance(0.01) {
                    *value = 1.5 * *value + 0.25;
                    changed += 1;
                }
            }
            let bytes = send(&codec, &mut held, &next).len();
            assert!(bytes as f64 <= 3.2 * f64::from(changed) + 8.0, "{bytes} for {changed} of {entries}");
        }
    }

    #[test]
    fn values_that_are_not_finite_are_refused() {
        for dtype in TYPES {
            let (codec, mut held, mut payload) = (codec(dtype), vec![1.0; 4], Vec::new());
            let values = [1.0, f32::NAN, 3.0, 4.0];
            assert!(!DeltaEncoder::default().encode_onto(&codec, &mut held, &values, &mut payload));
            assert_eq!((held, payload), (vec![1.0; 4], vec![]));
        }
    }

    proptest! {
        #[test]
        fn both_ends_have_the_rounded_values(seed in 0u64..1 << 32, share in 0.0f64..1.0, len in 0usize..3000) {
            let mut prng = Prng::new(seed);
            for dtype in TYPES {
                let codec = codec(dtype);
                let mut held = vec![0.0; len];
                for _ in 0..3 {
                    let next: Vec<f32> = held
                        .iter()
                        .map(|&value| if prng.chance(share) { prng.normal() as f32 } else { value })
                        .collect();
                    send(&codec, &mut held, &next);
                    let mut rounded = vec![0.0; len];
                    prop_assert!(DeltaEncoder::default().round(codec.rounded_type(), &next, &mut rounded));
                    prop_assert_eq!(&rounded, &held);
                }
            }
        }
    }
}
