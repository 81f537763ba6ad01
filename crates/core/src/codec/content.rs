//! A decoded payload of a stretch, checked, and still where the decoder found it.

use super::Mask;
use crate::kernels::{self, Values};

/// Values of some entries of a stretch; all others are zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sparse<'a> {
    mask: &'a Mask,
    values: &'a [f32],
}

impl<'a> Sparse<'a> {
    /// The values of the entries that are set in the mask, one after the other.
    pub(super) fn new(mask: &'a Mask, values: &'a [f32]) -> Sparse<'a> {
        Sparse { mask, values }
    }
}

/// The values of a stretch, of every entry or of some.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Content<'a> {
    /// Of every entry.
    Whole(Values<'a>),
    /// Of some.
    Sparse(Sparse<'a>),
}

impl<'a> From<Values<'a>> for Content<'a> {
    fn from(values: Values<'a>) -> Content<'a> {
        Content::Whole(values)
    }
}

impl Content<'_> {
    /// Entries of the stretch.
    #[inline]
    pub fn len(self) -> usize {
        match self {
            Content::Whole(values) => values.len(),
            Content::Sparse(Sparse { mask, .. }) => mask.len(),
        }
    }

    /// Whether the stretch has no entries.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// `sum += content`. Entries that are not there are not touched.
    #[inline]
    pub fn add_to(self, sum: &mut [f32]) {
        match self {
            Content::Whole(values) => kernels::add_values(sum, values),
            Content::Sparse(Sparse { mask, values }) => mask.add(values, sum),
        }
    }

    /// `sum += factor * content`.
    pub fn add_scaled_to(self, sum: &mut [f32], factor: f32) {
        match self {
            Content::Whole(Values::F32(values)) => kernels::add_scaled(sum, values, factor),
            _ => kernels::add_scaled(sum, &self.to_vec(), factor),
        }
    }

    /// `values = content`.
    #[inline]
    pub fn copy_to(self, target: &mut [f32]) {
        match self {
            Content::Whole(values) => kernels::copy(target, values),
            Content::Sparse(Sparse { mask, values }) => {
                kernels::fill(target, 0.0);
                mask.put(values, target);
            }
        }
    }

    /// The same, but for entries that are not there: these are not touched.
    #[inline]
    pub fn put_to(self, target: &mut [f32]) {
        match self {
            Content::Whole(values) => kernels::copy(target, values),
            Content::Sparse(Sparse { mask, values }) => mask.put(values, target),
        }
    }

    /// A value for every entry, in memory of their own.
    pub fn to_vec(self) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        self.copy_to(&mut values);
        values
    }

    /// Whether no value is NaN or infinite.
    #[inline]
    pub fn all_finite(self) -> bool {
        match self {
            Content::Whole(values) => values.all_finite(),
            Content::Sparse(Sparse { values, .. }) => kernels::all_finite(values),
        }
    }

    /// The sum of the values' squares.
    pub fn squared_norm(self) -> f64 {
        match self {
            Content::Whole(Values::F32(values)) | Content::Sparse(Sparse { values, .. }) => {
                kernels::squared_norm(values)
            }
            Content::Whole(shorter) => kernels::squared_norm(&shorter.to_vec()),
        }
    }
}
