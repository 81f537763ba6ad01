//! Heavy-ball momentum.

use super::{Inertia, Optimizer, Rule, Step, policy, require_fraction, state};
use crate::kernels::Source;
use crate::registry::{Entry, Param};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "momentum",
    about: "Momentum: v = beta * v + g; w -= lr * v.",
    params: &[
        policy::lr("0.001"),
        Param { name: "beta", default: Some("0.9"), about: "How much of the velocity is kept, below 1." },
    ],
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

impl Rule for Momentum {
    const SLOTS: usize = 1;

    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, slots: &mut [&mut [f32]]) {
        let [velocity] = state(slots);
        update(step, self.beta, parameters, gradient, velocity);
    }

    fn inertia(&self) -> Option<Inertia> {
        Inertia::of_velocity(self.beta)
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn update<G: Source>(step: &Step, beta: f32, parameters: &mut [f32], gradient: G, velocity: &mut [f32]) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    gradient.expect_len(parameters.len());
    for (i, (w, v)) in parameters.iter_mut().zip(velocity).enumerate() {
        let g = gradient_scale * gradient.at(i) + weight_decay * *w;
        *v = beta * *v + g;
        *w -= lr * *v;
    }
}
