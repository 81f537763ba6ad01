//! Arguments of a push and of a pull.

use crate::codec::Factors;

/// A gradient as the application gives it.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// Of the whole table.
    Dense(&'a [f32]),
    /// Of single rows of a sparse table, strictly ascending; `values` has them one after the other.
    Rows {
        /// Row numbers.
        rows: &'a [u32],
        /// Their gradients.
        values: &'a [f32],
    },
    /// Of a whole table that is a product of thin matrices, as a fully connected layer's is. Those travel where the
    /// table's codec is `factors` and they are shorter.
    Product {
        /// The gradient.
        values: &'a [f32],
        /// Its factors.
        factors: Factors<'a>,
    },
}

impl<'a> Gradient<'a> {
    /// The elements that are given, one after the other.
    pub(super) fn values(&self) -> &'a [f32] {
        match self {
            Gradient::Dense(values) | Gradient::Rows { values, .. } | Gradient::Product { values, .. } => {
                values
            }
        }
    }
}

impl<'a> From<&'a [f32]> for Gradient<'a> {
    fn from(values: &'a [f32]) -> Gradient<'a> {
        Gradient::Dense(values)
    }
}

impl<'a> From<&'a Vec<f32>> for Gradient<'a> {
    fn from(values: &'a Vec<f32>) -> Gradient<'a> {
        Gradient::Dense(values)
    }
}

impl<'a, const N: usize> From<&'a [f32; N]> for Gradient<'a> {
    fn from(values: &'a [f32; N]) -> Gradient<'a> {
        Gradient::Dense(values)
    }
}

/// Options of a pull.
#[derive(Debug, Clone, Copy, Default)]
pub struct PullOptions<'a> {
    /// Only these rows of a sparse table. All of a dense one otherwise.
    pub rows: Option<&'a [u32]>,
    /// Answer at once with what is there, whatever the consistency model.
    pub now: bool,
}
