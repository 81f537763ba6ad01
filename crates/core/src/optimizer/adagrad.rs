//! AdaGrad: a learning rate per parameter that falls with the gradients it has seen.

use super::{Optimizer, Rule, Step, policy, require_positive, state};
use crate::kernels::Source;
use crate::registry::{Entry, Param};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "adagrad",
    about: "AdaGrad: a += g^2; w -= lr * g / (sqrt(a) + epsilon).",
    params: &[
        policy::lr("0.01"),
        Param { name: "epsilon", default: Some("1e-10"), about: "Keeps the divisor from 0." },
    ],
    example: "adagrad:lr=0.1,epsilon=1e-10",
    build: |spec| {
        let rule: AdaGrad = spec.config()?;
        require_positive(spec, "epsilon", rule.epsilon)?;
        Ok(Box::new(rule))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct AdaGrad {
    epsilon: f32,
}

impl Default for AdaGrad {
    fn default() -> AdaGrad {
        AdaGrad { epsilon: 1e-10 }
    }
}

impl Rule for AdaGrad {
    const SLOTS: usize = 1;

    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, slots: &mut [&mut [f32]]) {
        let [squares] = state(slots);
        update(step, self.epsilon, parameters, gradient, squares);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn update<G: Source>(step: &Step, epsilon: f32, parameters: &mut [f32], gradient: G, squares: &mut [f32]) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    gradient.expect_len(parameters.len());
    for (i, (w, a)) in parameters.iter_mut().zip(squares).enumerate() {
        let g = gradient_scale * gradient.at(i) + weight_decay * *w;
        *a += g * g;
        *w -= lr * g / (a.sqrt() + epsilon);
    }
}
