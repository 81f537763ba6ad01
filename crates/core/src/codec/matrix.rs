//! A layer as a product of two thin matrices: the trait of the codecs that find them.

use super::layer::LayerRange;
use super::products::{Segment, Shape, Thin};
use super::selection::Stretches;
use super::{Bound, Factors};
use crate::hands::{self, Alone, Hands};
use crate::kernels;
use std::fmt::Debug;
use std::ops::Range;

/// Parts of a product, whoever makes them: the order of additions follows from the matrix alone.
const PARTS: usize = 16;
/// Elements of a part, at least.
const PART_ELEMENTS: usize = 1 << 15;

/// Finds two thin matrices whose product stands for a layer. Two methods are required.
pub trait LowRank: Send + Sync + Debug {
    /// The two matrices, or `None` where there are none that are shorter than the layer. `memory` is empty at first, and
    /// comes back at the next step.
    fn factor(&self, matrix: &Matrix<'_>, memory: &mut Vec<f32>) -> Option<Thin>;

    /// How far the product may be from the values.
    fn bound(&self) -> Bound;

    /// Whether it keeps what the product lacks, and remembers something from step to step.
    fn keeps_residual(&self) -> bool {
        true
    }

    /// Whether it takes only factors that the application offers with a gradient.
    fn needs_offer(&self) -> bool {
        false
    }
}

/// A layer that is to be factored.
pub struct Matrix<'a> {
    /// Its elements in the table.
    pub layer: &'a LayerRange,
    /// What is to be sent.
    pub values: &'a dyn Stretches,
    /// The factors that the layer offers.
    pub factors: Option<Factors<'a>>,
    /// Seed of the random choices of this layer at this step.
    pub seed: u64,
    /// Those who multiply it. The product MUST NOT depend on how many they are.
    pub hands: &'a dyn Hands,
}

impl Debug for Matrix<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matrix").field("layer", self.layer).finish_non_exhaustive()
    }
}

impl Matrix<'_> {
    /// `left = values * right^T`.
    pub(super) fn times_right(&self, shape: Shape, right: &[f32], left: &mut [f32]) {
        let (rank, columns) = (shape.rank as usize, shape.columns as usize);
        kernels::fill(left, 0.0);
        let (each, hands) = self.parts(shape);
        let parts = (0..).step_by(each).zip(left.chunks_mut(each * rank)).collect();
        let matrix = self.reader();
        hands::share_out(hands, parts, |(first, left): (usize, &mut [f32])| {
            let rows = first..first + left.len() / rank;
            matrix.for_each_segment(shape, rows, |Segment { row, places, .. }, values| {
                let left = &mut left[(row - first) * rank..(row - first + 1) * rank];
                for (product, right) in left.iter_mut().zip(right.chunks_exact(columns)) {
                    *product += dot(values, &right[places.clone()]);
                }
            });
        });
    }

    /// `right = left^T * values`.
    pub(super) fn left_times(&self, shape: Shape, left: &[f32], right: &mut [f32]) {
        let (rank, columns) = (shape.rank as usize, shape.columns as usize);
        let (each, hands) = self.parts(shape);
        let rows = shape.rows(self.layer.elements.len());
        let parts = (0..rows).step_by(each).map(|first| first..rows.min(first + each)).collect();
        let (matrix, len) = (self.reader(), right.len());
        let sums = hands::share_out(hands, parts, |rows| {
            let mut right = vec![0.0; len];
            matrix.for_each_segment(shape, rows, |Segment { row, places, .. }, values| {
                let left = &left[row * rank..(row + 1) * rank];
                for (factor, right) in left.iter().zip(right.chunks_exact_mut(columns)) {
                    kernels::add_scaled(&mut right[places.clone()], values, *factor);
                }
            });
            right
        });
        kernels::fill(right, 0.0);
        sums.iter().for_each(|sum| kernels::add(right, sum));
    }

    /// Rows of a part, and those who work on the parts.
    fn parts(&self, shape: Shape) -> (usize, &dyn Hands) {
        let (elements, columns) = (self.layer.elements.len(), shape.columns as usize);
        let each = shape.rows(elements).div_ceil(PARTS).max(PART_ELEMENTS.div_ceil(columns));
        (each, if hands::busy(self.hands, elements) > 1 { self.hands } else { &Alone })
    }

    fn reader(&self) -> Reader<'_> {
        Reader { layer: self.layer, values: self.values }
    }
}

/// What all hands read.
#[derive(Clone, Copy)]
struct Reader<'a> {
    layer: &'a LayerRange,
    values: &'a dyn Stretches,
}

impl Reader<'_> {
    /// Calls `each` with the values of every part of some rows.
    fn for_each_segment(&self, shape: Shape, rows: Range<usize>, mut each: impl FnMut(Segment, &[f32])) {
        let (Range { start: first, end }, columns) = (self.layer.elements.clone(), shape.columns as usize);
        let range = first + rows.start * columns..end.min(first + rows.end * columns);
        self.values.visit(range, &mut |start, values| {
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
