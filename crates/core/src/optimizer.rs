//! The optimizer axis: how an aggregated gradient changes parameters.
//!
//! A rule ([`Optimizer`]) is one file below. What every rule shares (learning rate and its [`Schedule`], weight
//! decay, clipping) is taken from the text form by [`OptimizerPolicy`], which is what a server holds per table.

mod adagrad;
mod adam;
mod adamw;
mod lars;
mod momentum;
mod nesterov;
mod policy;
mod rmsprop;
mod schedule;
mod sgd;

pub use policy::{OptimizerPolicy, StepInput};
pub use schedule::Schedule;

use crate::registry::Axis;
use crate::spec::{Spec, SpecError};
use std::fmt;

/// What one step needs to know beside the arrays.
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
    /// L2 norm of the shard's parameters; only filled when [`Optimizer::needs_norms`].
    pub parameter_norm: f32,
    /// L2 norm of the shard's scaled gradient; only filled when [`Optimizer::needs_norms`].
    pub gradient_norm: f32,
}

/// An update rule. Two methods are required.
///
/// A rule holds hyper-parameters only; its state lives beside the parameters, in `slots` arrays of the same
/// length, zero at first. `step` MUST be element-wise given [`Step`], so that a table may be cut anywhere and
/// stepped in pieces with bit-identical results; it MUST NOT allocate.
pub trait Optimizer: Send + Sync + fmt::Debug {
    /// How many state arrays the rule keeps (momentum: 1, Adam: 2).
    fn slots(&self) -> usize;

    /// Changes `parameters` by one gradient. All slices have the same length; `slots` has [`Optimizer::slots`] items.
    fn step(&self, step: &Step, parameters: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]);

    /// Whether [`Step`]'s norms must be filled (LARS).
    fn needs_norms(&self) -> bool {
        false
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

fn require_positive(spec: &Spec, name: &str, value: f32) -> Result<(), SpecError> {
    spec.require(value > 0.0 && value.is_finite(), || format!("{name} = {value}: expected {name} > 0"))
}
