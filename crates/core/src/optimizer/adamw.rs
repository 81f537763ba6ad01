//! AdamW: Adam with weight decay beside the gradient instead of in it.

use super::adam::{BETA1, BETA2, EPSILON, Moments};
use super::{Inertia, Optimizer, Rule, Step, policy};
use crate::kernels::Source;
use crate::registry::Entry;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "adamw",
    about: "Adam with decoupled weight decay: w *= 1 - lr * weight_decay, whatever the gradient.",
    params: &[policy::lr("0.001"), policy::weight_decay("0.01"), BETA1, BETA2, EPSILON],
    example: "adamw:lr=0.001,weight_decay=0.01,beta1=0.9,beta2=0.999,epsilon=1e-8",
    build: |spec| Ok(Box::new(AdamW(Moments::from_spec(spec)?))),
};

#[derive(Debug)]
struct AdamW(Moments);

impl Rule for AdamW {
    const SLOTS: usize = 2;

    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, slots: &mut [&mut [f32]]) {
        let shrink = 1.0 - step.lr * step.weight_decay;
        let without_decay = Step { weight_decay: 0.0, ..*step };
        self.0.step(&without_decay, shrink, parameters, gradient, slots);
    }

    fn inertia(&self) -> Option<Inertia> {
        self.0.inertia()
    }
}
