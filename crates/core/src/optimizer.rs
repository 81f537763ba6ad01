//! The optimizer axis: how an aggregated gradient changes parameters.

use crate::registry::Axis;
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
    Axis::new("optimizer", &[], Vec::new())
}
