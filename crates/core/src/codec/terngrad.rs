//! TernGrad: -1, 0 or 1 times the largest magnitude, at random, after clipping.

use super::levels;
use super::payload::read_float;
use super::{Bound, Context, Quantiser, Stage, clip, int8};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "terngrad",
    about: "TernGrad: -1, 0 or 1 times each chunk's largest magnitude, at random, after clipping.",
    params: &[Param {
        name: "clip",
        default: Some("2.5"),
        about: "Magnitudes are clipped at so many standard deviations of the chunk; 0 for never, which is unbiased.",
    }],
    example: "terngrad",
    build: |spec| {
        let config: TernGrad = spec.config()?;
        spec.require(config.clip >= 0.0 && config.clip.is_finite(), || {
            format!("clip = {}: expected 0 or more", config.clip)
        })?;
        Ok(Box::new(Stage::Quantiser(Box::new(config))))
    },
};

const SCALE_BYTES: usize = 4;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct TernGrad {
    clip: f32,
}

impl Default for TernGrad {
    fn default() -> TernGrad {
        TernGrad { clip: 2.5 }
    }
}

impl Quantiser for TernGrad {
    fn bytes(&self, count: usize) -> usize {
        if count == 0 { 0 } else { SCALE_BYTES + levels::bytes(1, count) }
    }

    fn quantise(&self, context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) {
        if values.is_empty() {
            return;
        }
        let largest = int8::largest_magnitude(values);
        // Values beyond the scale are rounded to it, which is what clipping does.
        let scale = match self.clip {
            0.0 => largest,
            sigmas => largest.min(sigmas * clip::deviation(values)),
        };
        out.extend_from_slice(&scale.to_le_bytes());
        let seed = context.seed as u32 ^ (context.seed >> 32) as u32;
        levels::write(values, scale, 1, seed, 0, out);
    }

    fn dequantise(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), String> {
        if values.is_empty() {
            return Ok(());
        }
        levels::read(&bytes[SCALE_BYTES..], read_float(bytes, 0), 1, values)
    }

    fn bound(&self, count: usize) -> Bound {
        // Each value is off by its scale or by what was clipped off, neither of which exceeds the norm.
        Bound { of_norm: (count as f64).sqrt().max(1.0) * 1.001, absolute: 2f64.powi(-118) }
    }

    fn is_unbiased(&self) -> bool {
        self.clip == 0.0
    }

    fn feeds_back(&self) -> bool {
        false
    }
}
