//! A stretch as a product of two thin matrices: what PowerSGD finds and what layers offer travel alike.

use super::{Bound, Context};
use crate::kernels;
use std::fmt::Debug;
use std::ops::Range;

/// Finds two thin matrices whose product stands for a stretch. Two methods are required.
pub trait LowRank: Send + Sync + Debug {
    /// The two matrices, or `None` where there are none that are shorter than the values. `memory` is as long as the
    /// values if it is asked for, zero at first, and comes back at the next step.
    fn factor(&self, context: &Context<'_>, values: &[f32], memory: &mut [f32]) -> Option<Thin>;

    /// How far the product may be from the values.
    fn bound(&self) -> Bound;

    /// Whether it keeps what the product lacks, and remembers something from step to step.
    fn keeps_residual(&self) -> bool {
        true
    }
}

/// How a stretch lies in a matrix of `columns` columns: it begins `offset` elements after the start of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Columns of the left matrix, rows of the right one.
    pub rank: u32,
    /// Elements in a row.
    pub columns: u32,
    /// Elements of the first row that belong to the stretch before.
    pub offset: u32,
}

/// Two thin matrices.
#[derive(Debug, Clone, PartialEq)]
pub struct Thin {
    /// How they are to be multiplied.
    pub shape: Shape,
    /// The left one row by row (`rank` values each), then the right one row by row (`columns` values each).
    pub values: Vec<f32>,
}

/// Bytes of a [`Shape`] in a payload.
pub(super) const SHAPE_BYTES: usize = 12;
const MAX_RANK: u32 = 1 << 16;

impl Shape {
    /// Rows that `entries` elements lie in.
    pub(super) fn rows(self, entries: usize) -> usize {
        (self.offset as usize + entries).div_ceil(self.columns as usize)
    }

    /// Values of the two matrices.
    pub(super) fn values(self, entries: usize) -> usize {
        (self.rows(entries) + self.columns as usize) * self.rank as usize
    }

    pub(super) fn encode(self) -> [u8; SHAPE_BYTES] {
        let mut bytes = [0; SHAPE_BYTES];
        for (place, field) in
            bytes.as_chunks_mut::<4>().0.iter_mut().zip([self.rank, self.columns, self.offset])
        {
            *place = field.to_le_bytes();
        }
        bytes
    }

    /// Reads a shape whose matrices have fewer values than the `entries` that they stand for.
    pub(super) fn decode(bytes: &[u8; SHAPE_BYTES], entries: usize) -> Result<Shape, String> {
        let field = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let shape = Shape { rank: field(0), columns: field(4), offset: field(8) };
        let sane = (1..=MAX_RANK).contains(&shape.rank)
            && shape.columns as usize <= entries
            && shape.offset < shape.columns
            && shape.values(entries) < entries;
        if sane { Ok(shape) } else { Err(format!("matrices of {shape:?} for {entries} entries")) }
    }

    /// The stretch cut into what lies in each row: its elements, and their columns.
    fn segments(self, entries: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (columns, offset) = (self.columns as usize, self.offset as usize);
        (0..self.rows(entries)).map(move |row| {
            let begin = (row * columns).max(offset) - offset;
            let end = ((row + 1) * columns - offset).min(entries);
            let first = if row == 0 { offset } else { 0 };
            (begin..end, first..first + (end - begin))
        })
    }

    /// The product of two thin matrices of this shape.
    pub(super) fn product(self, values: &[f32], product: &mut [f32]) {
        let (rank, columns) = (self.rank as usize, self.columns as usize);
        let (left, right) = values.split_at(self.rows(product.len()) * rank);
        kernels::fill(product, 0.0);
        for ((elements, places), left) in self.segments(product.len()).zip(left.chunks_exact(rank)) {
            for (factor, right) in left.iter().zip(right.chunks_exact(columns)) {
                kernels::add_scaled(&mut product[elements.clone()], &right[places.clone()], *factor);
            }
        }
    }

    /// `left = values * right^T`, row by row.
    pub(super) fn times_right(self, values: &[f32], right: &[f32], left: &mut [f32]) {
        let (rank, columns) = (self.rank as usize, self.columns as usize);
        for ((elements, places), left) in self.segments(values.len()).zip(left.chunks_exact_mut(rank)) {
            for (product, right) in left.iter_mut().zip(right.chunks_exact(columns)) {
                *product = dot(&values[elements.clone()], &right[places.clone()]);
            }
        }
    }

    /// `right = left^T * values`, row by row.
    pub(super) fn left_times(self, values: &[f32], left: &[f32], right: &mut [f32]) {
        let (rank, columns) = (self.rank as usize, self.columns as usize);
        kernels::fill(right, 0.0);
        for ((elements, places), left) in self.segments(values.len()).zip(left.chunks_exact(rank)) {
            for (factor, right) in left.iter().zip(right.chunks_exact_mut(columns)) {
                kernels::add_scaled(&mut right[places.clone()], &values[elements.clone()], *factor);
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_is_what_it_is_by_definition_wherever_rows_are_cut() {
        for (columns, offset, entries) in [(7, 0, 35), (7, 3, 30), (5, 4, 1), (10, 9, 42)] {
            let shape = Shape { rank: 2, columns, offset };
            let values: Vec<f32> = (0..shape.values(entries)).map(|i| (i as f32 * 0.7).sin()).collect();
            let mut product = vec![9.0; entries];
            shape.product(&values, &mut product);
            let (left, right) = values.split_at(shape.rows(entries) * 2);
            for (at, found) in product.iter().enumerate() {
                let cell = at + offset as usize;
                let (row, column) = (cell / columns as usize, cell % columns as usize);
                let expected: f32 =
                    (0..2).map(|k| left[row * 2 + k] * right[k * columns as usize + column]).sum();
                assert!((found - expected).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn shapes_that_would_take_more_than_they_stand_for_are_refused() {
        let good = Shape { rank: 1, columns: 10, offset: 3 };
        assert_eq!(Shape::decode(&good.encode(), 100), Ok(good));
        for bad in [
            Shape { rank: 0, ..good },
            Shape { rank: u32::MAX, ..good },
            Shape { columns: 0, ..good },
            Shape { columns: u32::MAX, ..good },
            Shape { offset: 10, ..good },
            Shape { rank: 5, ..good },
        ] {
            assert!(Shape::decode(&bad.encode(), 100).is_err(), "{bad:?}");
        }
    }
}
