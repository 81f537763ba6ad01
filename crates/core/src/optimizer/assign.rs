//! No descent: parameters become what was pushed.

use super::{Optimizer, Rule, Step, policy};
use crate::kernels::Source;
use crate::registry::Entry;
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "assign",
    about: "Parameters become the mean of what was pushed, or come nearer to it: w += lr * (g - w).",
    params: &[policy::lr("1")],
    example: "assign:lr=1",
    build: |spec| Ok(Box::new(spec.config::<Assign>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Assign {}

impl Rule for Assign {
    const SLOTS: usize = 0;

    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, _: &mut [&mut [f32]]) {
        update(step, parameters, gradient);
    }

    fn assigns(&self) -> bool {
        true
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn update<G: Source>(step: &Step, parameters: &mut [f32], gradient: G) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    gradient.expect_len(parameters.len());
    for (i, w) in parameters.iter_mut().enumerate() {
        let value = gradient_scale * gradient.at(i) - weight_decay * *w;
        // What is published is to be what was given, to the bit.
        *w = if lr == 1.0 && weight_decay == 0.0 {
            gradient_scale * gradient.at(i)
        } else {
            *w + lr * (value - *w)
        };
    }
}
