//! AdaGrad: a learning rate per parameter that falls with the gradients it has seen.

use super::{Optimizer, Step, require_positive, state};
use crate::registry::{Entry, Param};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "adagrad",
    about: "AdaGrad: a += g^2; w -= lr * g / (sqrt(a) + epsilon).",
    params: &[Param { name: "epsilon", default: Some("1e-8"), about: "Keeps the divisor from 0." }],
    example: "adagrad:lr=0.1,epsilon=1e-8",
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
        AdaGrad { epsilon: 1e-8 }
    }
}

impl Optimizer for AdaGrad {
    fn slots(&self) -> usize {
        1
    }

    fn step(&self, step: &Step, parameters: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]) {
        let [squares] = state(slots);
        update(step, self.epsilon, parameters, gradient, squares);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn update(step: &Step, epsilon: f32, parameters: &mut [f32], gradient: &[f32], squares: &mut [f32]) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    for ((w, &g), a) in parameters.iter_mut().zip(gradient).zip(squares) {
        let g = gradient_scale * g + weight_decay * *w;
        *a += g * g;
        *w -= lr * g / (a.sqrt() + epsilon);
    }
}
