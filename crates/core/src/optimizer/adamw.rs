//! AdamW: Adam with weight decay beside the gradient instead of in it.

use super::adam::{Moments, PARAMS};
use super::{Optimizer, Step};
use crate::registry::Entry;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "adamw",
    about: "Adam with decoupled weight decay: w *= 1 - lr * weight_decay, whatever the gradient.",
    params: PARAMS,
    example: "adamw:lr=0.001,weight_decay=0.01,beta1=0.9,beta2=0.999,epsilon=1e-8",
    build: |spec| Ok(Box::new(AdamW(Moments::from_spec(spec)?))),
};

#[derive(Debug)]
struct AdamW(Moments);

impl Optimizer for AdamW {
    fn slots(&self) -> usize {
        2
    }

    fn step(&self, step: &Step, parameters: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]) {
        let shrink = 1.0 - step.lr * step.weight_decay;
        let without_decay = Step { weight_decay: 0.0, ..*step };
        self.0.step(&without_decay, shrink, parameters, gradient, slots);
    }
}
