//! Heavy-ball momentum.

use super::{Optimizer, Step, require_fraction, state};
use crate::registry::{Entry, Param};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "momentum",
    about: "Momentum: v = beta * v + g; w -= lr * v.",
    params: &[Param {
        name: "beta",
        default: Some("0.9"),
        about: "How much of the velocity is kept, below 1.",
    }],
    example: "momentum:lr=0.1,beta=0.9",
    build: |spec| {
        let rule: Momentum = spec.config()?;
        require_fraction(spec, "beta", rule.beta)?;
        Ok(Box::new(rule))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Momentum {
    beta: f32,
}

impl Default for Momentum {
    fn default() -> Momentum {
        Momentum { beta: 0.9 }
    }
}

impl Optimizer for Momentum {
    fn slots(&self) -> usize {
        1
    }

    fn step(&self, step: &Step, parameters: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]) {
        let [velocity] = state(slots);
        update(step, self.beta, parameters, gradient, velocity);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn update(step: &Step, beta: f32, parameters: &mut [f32], gradient: &[f32], velocity: &mut [f32]) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    for ((w, &g), v) in parameters.iter_mut().zip(gradient).zip(velocity) {
        let g = gradient_scale * g + weight_decay * *w;
        *v = beta * *v + g;
        *w -= lr * *v;
    }
}
