//! RMSProp: AdaGrad that forgets.

use super::{Optimizer, Rule, Step, policy, require_fraction, require_positive, state};
use crate::kernels::Source;
use crate::registry::{Entry, Param};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "rmsprop",
    about: "RMSProp: a = decay * a + (1 - decay) * g^2; w -= lr * g / (sqrt(a) + epsilon).",
    params: &[
        policy::lr("0.01"),
        Param {
            name: "decay",
            default: Some("0.99"),
            about: "How much of the mean square is kept, below 1.",
        },
        Param { name: "epsilon", default: Some("1e-8"), about: "Keeps the divisor from 0." },
    ],
    example: "rmsprop:lr=0.01,decay=0.99,epsilon=1e-8",
    build: |spec| {
        let rule: RmsProp = spec.config()?;
        require_fraction(spec, "decay", rule.decay)?;
        require_positive(spec, "epsilon", rule.epsilon)?;
        Ok(Box::new(rule))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RmsProp {
    decay: f32,
    epsilon: f32,
}

impl Default for RmsProp {
    fn default() -> RmsProp {
        RmsProp { decay: 0.99, epsilon: 1e-8 }
    }
}

impl Rule for RmsProp {
    const SLOTS: usize = 1;

    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, slots: &mut [&mut [f32]]) {
        let [mean_square] = state(slots);
        update(step, self, parameters, gradient, mean_square);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn update<G: Source>(
    step: &Step,
    rule: &RmsProp,
    parameters: &mut [f32],
    gradient: G,
    mean_square: &mut [f32],
) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    let RmsProp { decay, epsilon } = *rule;
    gradient.expect_len(parameters.len());
    for (i, (w, a)) in parameters.iter_mut().zip(mean_square).enumerate() {
        let g = gradient_scale * gradient.at(i) + weight_decay * *w;
        *a = decay * *a + (1.0 - decay) * (g * g);
        *w -= lr * g / (a.sqrt() + epsilon);
    }
}
