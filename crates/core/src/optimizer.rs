//! The optimizer axis: how an aggregated gradient changes parameters.
//!
//! A rule ([`Rule`], and by that an [`Optimizer`]) is one file below. What every rule shares (learning rate and its [`Schedule`], weight
//! decay, clipping) is taken from the text form by [`OptimizerPolicy`], which is what a server holds per table.

mod adagrad;
mod adam;
mod adamw;
mod assign;
mod lars;
mod momentum;
mod nesterov;
mod policy;
mod rmsprop;
mod schedule;
mod sgd;

pub use policy::{OptimizerPolicy, StepInput};
pub use schedule::Schedule;

use crate::kernels::{self, Source, Sum, Values};
use crate::registry::Axis;
use crate::spec::{Spec, SpecError};
use std::fmt;
use std::ops::Range;

/// Scalars of one step, beside the arrays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Learning rate of this step, after schedule and scaling.
    pub lr: f32,
    /// Number of this step on these parameters, from 1.
    pub t: u64,
    /// Every gradient element is multiplied by this first: 1/workers for a mean, and the clipping factor.
    pub gradient_scale: f32,
    /// Weight decay; whether it is added to the gradient or decoupled is the rule's own matter.
    pub weight_decay: f32,
    /// L2 norm of the layer's parameters; only filled when [`Optimizer::needs_norms`].
    pub parameter_norm: f32,
    /// L2 norm of the layer's scaled gradient; only filled when [`Optimizer::needs_norms`].
    pub gradient_norm: f32,
}

/// An update rule as a server holds it. Two methods are required.
///
/// A rule holds hyper-parameters only; its state lives beside the parameters, in `slots` arrays of the same
/// length, zero at first. `step` MUST be element-wise given [`Step`], so that a table may be cut anywhere and
/// stepped in pieces with bit-identical results; it MUST NOT allocate.
///
/// A rule that is written as a loop implements [`Rule`] instead, and has all of this.
pub trait Optimizer: Send + Sync + fmt::Debug {
    /// How many state arrays the rule keeps (momentum: 1, Adam: 2), at most [`MAX_SLOTS`].
    fn slots(&self) -> usize;

    /// Changes `parameters` by one gradient. All slices have the same length; `slots` has [`Optimizer::slots`] items.
    fn step(&self, step: &Step, parameters: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]);

    /// The same with a gradient that is of another type, or not added up yet. MUST give the bits that `step` gives
    /// with the sum.
    fn step_with(
        &self,
        step: &Step,
        parameters: &mut [f32],
        gradient: Gradient<'_>,
        slots: &mut [&mut [f32]],
    ) {
        step_in_blocks(self, step, parameters, gradient, slots);
    }

    /// Whether [`Step`]'s norms must be filled (LARS).
    fn needs_norms(&self) -> bool {
        false
    }

    /// Whether elements that no gradient of a step has are stepped with zeros, instead of being left out.
    fn steps_absent(&self) -> bool {
        false
    }

    /// Momentum, if the rule has any.
    fn inertia(&self) -> Option<Inertia> {
        None
    }

    /// Whether what is pushed are values that parameters become, and no gradients that they follow down.
    fn assigns(&self) -> bool {
        false
    }
}

/// Momentum of a rule: it goes on moving parameters by a gradient in later steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Inertia {
    /// The parameter of the rule that says how much; with 0 there is none.
    pub parameter: &'static str,
    /// How many times as far as by its first step parameters move by a gradient in the end.
    pub gain: f64,
}

impl Inertia {
    /// Of a velocity that is kept by this part in every step, and to which gradients are added.
    fn of_velocity(beta: f32) -> Option<Inertia> {
        // In decimal, as users write it: 0.9 has the gain 10.
        let beta: f64 = beta.to_string().parse().expect("a number that was printed");
        (beta > 0.0).then(|| Inertia { parameter: "beta", gain: 1.0 / (1.0 - beta) })
    }
}

/// The most state arrays that a rule keeps. An array of that many views needs no allocation.
pub const MAX_SLOTS: usize = 4;

/// A rule that is one loop over the elements, written once for gradients of every kind: then adding the last gradient
/// and stepping are one pass over memory. Two items are required.
pub trait Rule: Send + Sync + fmt::Debug {
    /// How many state arrays the rule keeps, at most [`MAX_SLOTS`].
    const SLOTS: usize;
    /// Whether [`Step`]'s norms must be filled.
    const NEEDS_NORMS: bool = false;

    /// [`Optimizer::step`], whose MUSTs hold here too.
    fn update<G: Source>(&self, step: &Step, parameters: &mut [f32], gradient: G, slots: &mut [&mut [f32]]);

    /// [`Optimizer::steps_absent`].
    fn steps_absent(&self) -> bool {
        false
    }

    /// [`Optimizer::inertia`].
    fn inertia(&self) -> Option<Inertia> {
        None
    }

    /// [`Optimizer::assigns`].
    fn assigns(&self) -> bool {
        false
    }
}

impl<R: Rule> Optimizer for R {
    fn slots(&self) -> usize {
        R::SLOTS
    }

    fn step(&self, step: &Step, parameters: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]) {
        self.update(step, parameters, gradient, slots);
    }

    fn step_with(
        &self,
        step: &Step,
        parameters: &mut [f32],
        gradient: Gradient<'_>,
        slots: &mut [&mut [f32]],
    ) {
        let Gradient { before, last } = gradient;
        match (before, last) {
            (None, Values::F32(last)) => self.update(step, parameters, last, slots),
            (None, Values::F16(last)) => self.update(step, parameters, last, slots),
            (None, Values::Bf16(last)) => self.update(step, parameters, last, slots),
            (Some(before), Values::F32(last)) => self.update(step, parameters, Sum { before, last }, slots),
            (Some(before), Values::F16(last)) => self.update(step, parameters, Sum { before, last }, slots),
            (Some(before), Values::Bf16(last)) => self.update(step, parameters, Sum { before, last }, slots),
        }
    }

    fn needs_norms(&self) -> bool {
        R::NEEDS_NORMS
    }

    fn steps_absent(&self) -> bool {
        Rule::steps_absent(self)
    }

    fn inertia(&self) -> Option<Inertia> {
        Rule::inertia(self)
    }

    fn assigns(&self) -> bool {
        Rule::assigns(self)
    }
}

/// Gradient of a step: the last gradient of a round, and the sum of those before it, if there were any.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gradient<'a> {
    /// The sum of the gradients before the last.
    pub before: Option<&'a [f32]>,
    /// The last gradient.
    pub last: Values<'a>,
}

impl<'a> Gradient<'a> {
    /// The same of some of the elements.
    pub fn slice(self, range: Range<usize>) -> Gradient<'a> {
        let before = self.before.map(|before| &before[range.clone()]);
        Gradient { before, last: self.last.slice(range) }
    }
}

impl<'a> From<&'a [f32]> for Gradient<'a> {
    fn from(whole: &'a [f32]) -> Gradient<'a> {
        Gradient { before: None, last: Values::F32(whole) }
    }
}

/// Adds a few elements at a time where they stay in cache, for rules that know stored sums only.
fn step_in_blocks(
    rule: &(impl Optimizer + ?Sized),
    step: &Step,
    parameters: &mut [f32],
    gradient: Gradient<'_>,
    slots: &mut [&mut [f32]],
) {
    const BLOCK: usize = 512;
    let mut block = [0.0; BLOCK];
    let count = slots.len();
    for start in (0..parameters.len()).step_by(BLOCK) {
        let range = start..parameters.len().min(start + BLOCK);
        let sum = &mut block[..range.len()];
        match gradient.before {
            None => kernels::copy(sum, gradient.last.slice(range.clone())),
            Some(before) => {
                sum.copy_from_slice(&before[range.clone()]);
                kernels::add_values(sum, gradient.last.slice(range.clone()));
            }
        }
        let mut views: [&mut [f32]; MAX_SLOTS] = Default::default();
        for (view, slot) in views.iter_mut().zip(slots.iter_mut()) {
            *view = &mut slot[range.clone()];
        }
        rule.step(step, &mut parameters[range], sum, &mut views[..count]);
    }
}

/// The choices of this axis.
pub fn axis() -> Axis<dyn Optimizer> {
    Axis::new(
        "optimizer",
        policy::COMMON,
        vec![
            sgd::ENTRY,
            momentum::ENTRY,
            nesterov::ENTRY,
            adagrad::ENTRY,
            rmsprop::ENTRY,
            adam::ENTRY,
            adamw::ENTRY,
            lars::ENTRY,
            assign::ENTRY,
        ],
    )
}

/// The state arrays of a rule that keeps `N`.
fn state<'a, 'b, const N: usize>(slots: &'a mut [&'b mut [f32]]) -> &'a mut [&'b mut [f32]; N] {
    slots.try_into().expect("a step is given as many slots as the rule keeps")
}

fn require_fraction(spec: &Spec, name: &str, value: f32) -> Result<(), SpecError> {
    spec.require((0.0..1.0).contains(&value), || format!("{name} = {value}: expected 0 <= {name} < 1"))
}

/// The largest magnitude that an entry of a gradient has in a rule that squares it. The square of one above 1.8e19 is no
/// f32: an infinite mean of squares would make every later step of the parameter 0, without a word.
const LARGEST_SQUARED: f32 = 1e18;

/// An entry of a gradient, or the closest one that can be squared.
#[inline(always)]
fn squarable(gradient: f32) -> f32 {
    gradient.clamp(-LARGEST_SQUARED, LARGEST_SQUARED)
}

fn require_positive(spec: &Spec, name: &str, value: f32) -> Result<(), SpecError> {
    spec.require(value > 0.0 && value.is_finite(), || {
        let finite = if value.is_infinite() { ", and finite" } else { "" };
        format!("{name} = {value}: expected {name} > 0{finite}")
    })
}
