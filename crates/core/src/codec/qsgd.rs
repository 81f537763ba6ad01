//! QSGD: levels of the norm of a bucket, rounded at random.

use super::levels::{self, MAX_LEVELS};
use super::payload::read_float;
use super::{Bound, Context, Quantiser, Stage, int8};
use crate::kernels;
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "qsgd",
    about: "QSGD: so many levels of each bucket's norm, rounded at random; the mean is right.",
    params: &[
        Param { name: "levels", default: Some("4"), about: "Levels beside zero, 1 to 127." },
        Param { name: "bucket", default: Some("512"), about: "Values that share a norm, 8 to 65536." },
        Param {
            name: "norm",
            default: Some("max"),
            about: "`l2` as in the paper, or `max`, with less variance.",
        },
    ],
    example: "qsgd:levels=4",
    build: |spec| {
        let spec = spec.with_positional("levels")?;
        let config: Qsgd = spec.config()?;
        spec.require((1..=MAX_LEVELS).contains(&config.levels), || {
            format!("levels = {}: expected 1 to {MAX_LEVELS}", config.levels)
        })?;
        let whole = config.bucket.is_multiple_of(8) && (8..=65_536).contains(&config.bucket);
        spec.require(whole, || format!("bucket = {}: expected a multiple of 8 up to 65536", config.bucket))?;
        Ok(Box::new(Stage::Quantiser(Box::new(config))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Qsgd {
    levels: u8,
    bucket: u32,
    norm: Norm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Norm {
    L2,
    Max,
}

impl Default for Qsgd {
    fn default() -> Qsgd {
        Qsgd { levels: 4, bucket: 512, norm: Norm::Max }
    }
}

impl Qsgd {
    fn bucket(&self) -> usize {
        self.bucket as usize
    }

    fn scale(&self, values: &[f32]) -> f32 {
        match self.norm {
            // An L2 norm may be more than an f32 holds where no value is.
            Norm::L2 => kernels::squared_norm(values).sqrt().min(f64::from(f32::MAX)) as f32,
            Norm::Max => int8::largest_magnitude(values),
        }
    }
}

impl Quantiser for Qsgd {
    fn bytes(&self, count: usize) -> usize {
        // Every bucket but the last is a multiple of 8 codes, so no byte is shared.
        count.div_ceil(self.bucket()) * 4 + levels::bytes(self.levels, count)
    }

    fn quantise(&self, context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) {
        let seed = context.seed as u32 ^ (context.seed >> 32) as u32;
        let scales: Vec<f32> = values.chunks(self.bucket()).map(|bucket| self.scale(bucket)).collect();
        for scale in &scales {
            out.extend_from_slice(&scale.to_le_bytes());
        }
        for (at, (bucket, scale)) in values.chunks(self.bucket()).zip(&scales).enumerate() {
            levels::write(bucket, *scale, self.levels, seed, at * self.bucket(), out);
        }
    }

    fn dequantise(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), String> {
        let (scales, codes) = bytes.split_at(values.len().div_ceil(self.bucket()) * 4);
        let codes = codes.chunks(levels::bytes(self.levels, self.bucket()));
        for (at, (bucket, codes)) in values.chunks_mut(self.bucket()).zip(codes).enumerate() {
            levels::read(codes, read_float(scales, at * 4), self.levels, bucket)?;
        }
        Ok(())
    }

    fn bound(&self, count: usize) -> Bound {
        // Less than a step of every value, and a scale is at most the norm of its bucket.
        let bucket = self.bucket().min(count) as f64;
        Bound { of_norm: bucket.sqrt() * 1.001 / f64::from(self.levels), absolute: 2f64.powi(-118) }
    }

    fn is_unbiased(&self) -> bool {
        true
    }

    fn feeds_back(&self) -> bool {
        false
    }
}
