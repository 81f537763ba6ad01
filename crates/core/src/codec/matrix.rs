//! A layer as a product of two thin matrices: the trait of the codecs that find them.

use super::layer::LayerRange;
use super::products::{Segment, Shape, Thin};
use super::selection::Stretches;
use super::{Bound, Factors};
use crate::kernels;
use std::fmt::Debug;

/// Finds two thin matrices whose product stands for a layer. Two methods are required.
pub trait LowRank: Send + Sync + Debug {
    /// The two matrices, or `None` where there are none that are shorter than the layer. `memory` is empty at first, and
    /// comes back at the next step.
    fn factor(&self, matrix: &mut Matrix<'_>, memory: &mut Vec<f32>) -> Option<Thin>;

    /// How far the product may be from the values.
    fn bound(&self) -> Bound;

    /// Whether it keeps what the product lacks, and remembers something from step to step.
    fn keeps_residual(&self) -> bool {
        true
    }
}

/// A layer that is to be factored.
pub struct Matrix<'a> {
    /// Its elements in the table.
    pub layer: &'a LayerRange,
    /// What is to be sent.
    pub values: &'a mut dyn Stretches,
    /// The factors that the layer offers.
    pub factors: Option<Factors<'a>>,
    /// Seed of the random choices of this layer at this step.
    pub seed: u64,
}

impl Debug for Matrix<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matrix").field("layer", self.layer).finish_non_exhaustive()
    }
}

impl Matrix<'_> {
    /// `left = values * right^T`.
    pub(super) fn times_right(&mut self, shape: Shape, right: &[f32], left: &mut [f32]) {
        let (rank, columns) = (shape.rank as usize, shape.columns as usize);
        kernels::fill(left, 0.0);
        self.for_each_segment(shape, |Segment { row, places, .. }, values| {
            let left = &mut left[row * rank..(row + 1) * rank];
            for (product, right) in left.iter_mut().zip(right.chunks_exact(columns)) {
                *product += dot(values, &right[places.clone()]);
            }
        });
    }

    /// `right = left^T * values`.
    pub(super) fn left_times(&mut self, shape: Shape, left: &[f32], right: &mut [f32]) {
        let (rank, columns) = (shape.rank as usize, shape.columns as usize);
        kernels::fill(right, 0.0);
        self.for_each_segment(shape, |Segment { row, places, .. }, values| {
            let left = &left[row * rank..(row + 1) * rank];
            for (factor, right) in left.iter().zip(right.chunks_exact_mut(columns)) {
                kernels::add_scaled(&mut right[places.clone()], values, *factor);
            }
        });
    }

    /// Calls `each` with the values of every part of a row.
    fn for_each_segment(&mut self, shape: Shape, mut each: impl FnMut(Segment, &[f32])) {
        let first = self.layer.elements.start;
        self.values.visit(self.layer.elements.clone(), &mut |start, values| {
            let start = start - first;
            for segment in shape.segments(start..start + values.len()) {
                let here = segment.elements.start - start..segment.elements.end - start;
                each(segment, &values[here]);
            }
        });
    }
}

/// In f64 and in order: these are short, and a norm made of them must not overflow.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut sums = [0.0f64; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    sums.iter().sum::<f64>() as f32
}
