//! The gradient that one frame of a push carries, once it is decoded.

use crate::absence::Absent;
use crate::codec::Content;
use crate::kernels::Values;

/// The gradient of a chunk, or of rows of a chunk. It is still where it was found: in the receive buffer or the decoder.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GradientFrame<'a> {
    /// A whole chunk of a dense table.
    Dense {
        /// The chunk's place among those of the shard.
        index: usize,
        /// First element, counted on the shard.
        start: usize,
        /// Gradient.
        values: Content<'a>,
        /// Elements that it does not have: zeros in `values`.
        absent: &'a Absent,
    },
    /// Single rows; `values` has them one after the other.
    Rows {
        /// The chunk's place among those of the shard.
        index: usize,
        /// First element of the chunk, counted on the shard.
        start: usize,
        /// Row numbers within the chunk, strictly ascending.
        rows: &'a [u32],
        /// Elements of a row.
        width: usize,
        /// Gradient.
        values: Values<'a>,
    },
}

impl<'a> GradientFrame<'a> {
    /// The chunk's place among those of the shard.
    #[inline]
    pub(crate) fn index(&self) -> usize {
        match *self {
            GradientFrame::Dense { index, .. } | GradientFrame::Rows { index, .. } => index,
        }
    }

    #[inline]
    pub(crate) fn values(&self) -> Content<'a> {
        match *self {
            GradientFrame::Dense { values, .. } => values,
            GradientFrame::Rows { values, .. } => values.into(),
        }
    }

    /// The same place with other values.
    pub(super) fn with_values<'b>(self, values: &'b [f32]) -> GradientFrame<'b>
    where
        'a: 'b,
    {
        let values = Values::F32(values);
        match self {
            GradientFrame::Dense { index, start, absent, .. } => {
                GradientFrame::Dense { index, start, values: values.into(), absent }
            }
            GradientFrame::Rows { index, start, rows, width, .. } => {
                GradientFrame::Rows { index, start, rows, width, values }
            }
        }
    }
}
