//! Adam, and the moments it shares with AdamW.

use super::schedule::power;
use super::{Inertia, Optimizer, Rule, Step, policy, require_fraction, require_positive, squarable, state};
use crate::kernels::Source;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "adam",
    about: "Adam: bias-corrected means of g and g^2; weight decay is part of g.",
    params: &[policy::lr("0.001"), BETA1, BETA2, EPSILON],
    example: "adam:lr=0.001,beta1=0.9,beta2=0.999,epsilon=1e-8",
    build: |spec| Ok(Box::new(Adam(Moments::from_spec(spec)?))),
};

pub(super) const BETA1: Param =
    Param { name: "beta1", default: Some("0.9"), about: "How much of the mean is kept, below 1." };
pub(super) const BETA2: Param =
    Param { name: "beta2", default: Some("0.999"), about: "How much of the mean square is kept, below 1." };
pub(super) const EPSILON: Param =
    Param { name: "epsilon", default: Some("1e-8"), about: "Keeps the divisor from 0." };

#[derive(Debug)]
struct Adam(Moments);

impl Rule for Adam {
    const SLOTS: usize = 2;

    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, slots: &mut [&mut [f32]]) {
        self.0.step(step, 1.0, parameters, gradient, slots);
    }

    fn inertia(&self) -> Option<Inertia> {
        self.0.inertia()
    }
}

/// The two running means, how fast they forget, and the step they lead to.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Moments {
    beta1: f32,
    beta2: f32,
    epsilon: f32,
}

impl Default for Moments {
    fn default() -> Moments {
        Moments { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }
    }
}

impl Moments {
    pub(super) fn from_spec(spec: &Spec) -> Result<Moments, SpecError> {
        let moments: Moments = spec.config()?;
        require_fraction(spec, "beta1", moments.beta1)?;
        require_fraction(spec, "beta2", moments.beta2)?;
        require_positive(spec, "epsilon", moments.epsilon)?;
        Ok(moments)
    }

    /// The mean is a mean: in the end a gradient moves parameters as far as it does without one.
    pub(super) fn inertia(&self) -> Option<Inertia> {
        (self.beta1 > 0.0).then_some(Inertia { parameter: "beta1", gain: 1.0 })
    }

    /// One step; parameters are multiplied by `shrink` before the gradient's part is subtracted.
    pub(super) fn step<G: Source>(
        &self,
        step: &Step,
        shrink: f32,
        parameters: &mut [f32],
        gradient: G,
        slots: &mut [&mut [f32]],
    ) {
        let [mean, mean_square] = state(slots);
        let bias = |beta: f32| 1.0 - power(f64::from(beta), step.t);
        let corrected = Corrected {
            shrink,
            lr: (f64::from(step.lr) / bias(self.beta1)) as f32,
            square: (1.0 / bias(self.beta2)) as f32,
        };
        update(step, self, &corrected, parameters, gradient, mean, mean_square);
    }
}

/// The means start at 0; these factors make up for it.
struct Corrected {
    shrink: f32,
    lr: f32,
    square: f32,
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn update<G: Source>(
    step: &Step,
    moments: &Moments,
    corrected: &Corrected,
    parameters: &mut [f32],
    gradient: G,
    mean: &mut [f32],
    mean_square: &mut [f32],
) {
    let Step { gradient_scale, weight_decay, .. } = *step;
    let Moments { beta1, beta2, epsilon } = *moments;
    let Corrected { shrink, lr, square } = *corrected;
    gradient.expect_len(parameters.len());
    for (i, ((w, m), v)) in parameters.iter_mut().zip(mean).zip(mean_square).enumerate() {
        let g = squarable(gradient_scale * gradient.at(i) + weight_decay * *w);
        *m = beta1 * *m + (1.0 - beta1) * g;
        *v = beta2 * *v + (1.0 - beta2) * (g * g);
        *w = shrink * *w - lr * *m / ((square * *v).sqrt() + epsilon);
    }
}
