//! Plain stochastic gradient descent.

use super::{Optimizer, Step};
use crate::registry::Entry;
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "sgd",
    about: "Stochastic gradient descent: w -= lr * g.",
    params: &[],
    example: "sgd:lr=0.1",
    build: |spec| Ok(Box::new(spec.config::<Sgd>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sgd {}

impl Optimizer for Sgd {
    fn slots(&self) -> usize {
        0
    }

    fn step(&self, step: &Step, parameters: &mut [f32], gradient: &[f32], _: &mut [&mut [f32]]) {
        update(step, parameters, gradient);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn update(step: &Step, parameters: &mut [f32], gradient: &[f32]) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    for (w, &g) in parameters.iter_mut().zip(gradient) {
        let g = gradient_scale * g + weight_decay * *w;
        *w -= lr * g;
    }
}
