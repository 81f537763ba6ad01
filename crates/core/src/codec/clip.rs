//! Clipping, before anything else sees the values. What is clipped off is gone: it is not part of a residual.

use super::{Filter, Stage, require_positive};
use crate::kernels;
use crate::registry::{Entry, Param};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "clip",
    about: "Clips values, or scales a stretch (a chunk of a table) whose norm is too large.",
    params: &[
        Param { name: "value", default: Some("none"), about: "Largest magnitude of a value." },
        Param {
            name: "sigma",
            default: Some("none"),
            about: "The same in standard deviations of the stretch.",
        },
        Param { name: "norm", default: Some("none"), about: "Largest L2 norm of a stretch." },
    ],
    example: "clip:norm=1+topk:0.01",
    build: |spec| {
        let mut spec = spec.with_positional("value")?;
        let mut limit = |name: &str| -> Result<Option<f32>, crate::spec::SpecError> {
            let text = spec.take(name).filter(|text| text != "none");
            let Some(text) = text else { return Ok(None) };
            let value = text
                .parse()
                .map_err(|_| spec.parameter_error(format!("`{name}={text}`: expected a number")))?;
            require_positive(&spec, name, value)?;
            Ok(Some(value))
        };
        let clip = Clip { value: limit("value")?, sigma: limit("sigma")?, norm: limit("norm")? };
        spec.config::<Rest>()?;
        Ok(Box::new(Stage::Filter(Box::new(clip))))
    },
};

#[derive(Debug)]
struct Clip {
    value: Option<f32>,
    sigma: Option<f32>,
    norm: Option<f32>,
}

/// Lists the parameters in the error about an unknown one.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "taken before; what is left is refused with these names")]
struct Rest {
    value: Option<f32>,
    sigma: Option<f32>,
    norm: Option<f32>,
}

impl Filter for Clip {
    fn changes_values(&self) -> bool {
        true
    }

    fn prepare(&self, values: &mut [f32]) {
        if let Some(limit) = self.value {
            clamp(values, limit);
        }
        if let Some(sigma) = self.sigma {
            clamp(values, sigma * deviation(values));
        }
        if let Some(limit) = self.norm {
            let norm = kernels::squared_norm(values).sqrt();
            if norm > f64::from(limit) {
                kernels::scale(values, (f64::from(limit) / norm) as f32);
            }
        }
    }
}

/// Root mean square, as TernGrad takes it: gradients have a mean near zero.
pub(super) fn deviation(values: &[f32]) -> f32 {
    (kernels::squared_norm(values) / values.len().max(1) as f64).sqrt().min(f64::from(f32::MAX)) as f32
}

/// Brings every magnitude to `limit` at most.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn clamp(values: &mut [f32], limit: f32) {
    for value in values {
        *value = value.max(-limit).min(limit);
    }
}
