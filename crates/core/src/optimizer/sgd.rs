//! Plain stochastic gradient descent.

use super::{Optimizer, Rule, Step, policy};
use crate::kernels::Source;
use crate::registry::{Entry, Param};
use multiversion::multiversion;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Optimizer> = Entry {
    name: "sgd",
    about: "Stochastic gradient descent: w -= lr * g.",
    params: &[
        policy::lr("0.001"),
        Param {
            name: "absent",
            default: Some("skip"),
            about: "What becomes of parameters that no gradient of a step has: `skip` leaves them as they are, `zeros` \
                    steps them as if it were zero there.",
        },
    ],
    example: "sgd:lr=0.1",
    build: |spec| Ok(Box::new(spec.config::<Sgd>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sgd {
    #[serde(default)]
    absent: Absence,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Absence {
    #[default]
    Skip,
    Zeros,
}

impl Rule for Sgd {
    const SLOTS: usize = 0;

    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, _: &mut [&mut [f32]]) {
        update(step, parameters, gradient);
    }

    fn steps_absent(&self) -> bool {
        self.absent == Absence::Zeros
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn update<G: Source>(step: &Step, parameters: &mut [f32], gradient: G) {
    let Step { lr, gradient_scale, weight_decay, .. } = *step;
    gradient.expect_len(parameters.len());
    for (i, w) in parameters.iter_mut().enumerate() {
        let g = gradient_scale * gradient.at(i) + weight_decay * *w;
        *w -= lr * g;
    }
}
