//! LARS: a learning rate per layer, in proportion to the layer's weights, for large batches.

use super::{Inertia, Optimizer, Rule, Step, require_fraction, require_positive, state};
use crate::kernels::Source;
use crate::registry::{Entry, Param};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "lars",
    about: "LARS: momentum with the learning rate of each layer scaled by trust * |w| / (|g| + weight_decay * |w|).",
    params: &[
        Param { name: "beta", default: Some("0.9"), about: "How much of the velocity is kept, below 1." },
        Param {
            name: "trust",
            default: Some("0.001"),
            about: "Length of a step relative to the weights, at learning rate 1.",
        },
    ],
    example: "lars:lr=1,weight_decay=0.0001,beta=0.9,trust=0.001",
    build: |spec| {
        let rule: Lars = spec.config()?;
        require_fraction(spec, "beta", rule.beta)?;
        require_positive(spec, "trust", rule.trust)?;
        Ok(Box::new(rule))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Lars {
    beta: f32,
    trust: f32,
}

impl Default for Lars {
    fn default() -> Lars {
        Lars { beta: 0.9, trust: 0.001 }
    }
}

impl Lars {
    /// What the learning rate is multiplied by. Weights of norm 0 (a fresh bias) say nothing about a good length of
    /// step, and a gradient of norm 0 needs none: both get the plain learning rate.
    fn trust_ratio(&self, step: &Step) -> f32 {
        let Step { parameter_norm, gradient_norm, weight_decay, .. } = *step;
        if parameter_norm > 0.0 && gradient_norm > 0.0 {
            self.trust * parameter_norm / (gradient_norm + weight_decay * parameter_norm)
        } else {
            1.0
        }
    }
}

impl Rule for Lars {
    const SLOTS: usize = 1;
    const NEEDS_NORMS: bool = true;

    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, slots: &mut [&mut [f32]]) {
        let [velocity] = state(slots);
        let local = Step { lr: step.lr * self.trust_ratio(step), ..*step };
        update(&local, self.beta, parameters, gradient, velocity);
    }

    fn inertia(&self) -> Option<Inertia> {
        Inertia::of_velocity(self.beta)
    }
}

/// The learning rate is inside the velocity: it differs from step to step, and an old step keeps its own.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn update<G: Source>(step: &Step, beta: f32, parameters: &mut [f32], gradient: G, velocity: &mut [f32]) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    gradient.expect_len(parameters.len());
    for (i, (w, v)) in parameters.iter_mut().zip(velocity).enumerate() {
        let g = gradient_scale * gradient.at(i) + weight_decay * *w;
        *v = beta * *v + lr * g;
        *w -= *v;
    }
}
