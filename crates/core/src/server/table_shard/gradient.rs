//! Gradients by the cells that they are counted by: rows of a sparse table, chunks of a dense one.

use crate::absence::Absent;
use crate::codec::Content;
use crate::intake::GradientFrame;
use crate::kernels::Values;
use crate::server::image::floats;
use crate::table::Layout;
use serde::{Deserialize, Serialize};

/// A gradient of one cell, or a sum of some.
#[derive(Debug, Clone, Copy)]
pub(super) struct CellGradient<'a> {
    pub(super) cell: usize,
    /// The cell's first element on this shard.
    pub(super) start: usize,
    pub(super) values: Content<'a>,
    /// Elements that it does not have: zeros in `values`.
    pub(super) absent: &'a Absent,
    /// How many gradients it is the sum of.
    pub(super) gradients: u32,
    /// The weight of each of them in a mean.
    pub(super) weight: f32,
}

impl<'a> CellGradient<'a> {
    /// Calls `visit` with the gradient of every cell in a frame, each one gradient of weight 1.
    #[inline]
    pub(super) fn for_each(gradient: GradientFrame<'a>, mut visit: impl FnMut(CellGradient<'a>)) {
        let (gradients, weight) = (1, 1.0);
        match gradient {
            GradientFrame::Dense { index, start, values, absent } => {
                visit(CellGradient { cell: index, start, values, absent, gradients, weight });
            }
            GradientFrame::Rows { start, rows, width, values, .. } => {
                for (place, row) in rows.iter().enumerate() {
                    let cell = start / width + *row as usize;
                    let values = values.slice(place * width..(place + 1) * width).into();
                    let absent = Absent::NOTHING;
                    visit(CellGradient { cell, start: cell * width, values, absent, gradients, weight });
                }
            }
        }
    }
}

/// One worker's gradient, kept whole: for ranked addition, or until its norm is known.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Staged {
    frames: Vec<StagedFrame>,
    /// Of each frame.
    weights: Vec<f32>,
}

/// A [`GradientFrame`] in memory of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum StagedFrame {
    Dense {
        index: usize,
        start: usize,
        #[serde(with = "floats")]
        values: Vec<f32>,
        absent: Absent,
    },
    Rows {
        index: usize,
        start: usize,
        rows: Vec<u32>,
        width: usize,
        #[serde(with = "floats")]
        values: Vec<f32>,
    },
}

impl Staged {
    pub(super) fn keep(&mut self, gradient: GradientFrame<'_>, weight: f32) {
        self.weights.push(weight);
        self.frames.push(match gradient {
            GradientFrame::Dense { index, start, values, absent } => {
                StagedFrame::Dense { index, start, values: values.to_vec(), absent: absent.clone() }
            }
            GradientFrame::Rows { index, start, rows, width, values } => {
                StagedFrame::Rows { index, start, rows: rows.to_vec(), width, values: values.to_vec() }
            }
        });
    }

    /// Adds another gradient of the same worker.
    pub(super) fn append(&mut self, other: Staged) {
        self.frames.extend(other.frames);
        self.weights.extend(other.weights);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Calls `visit` with the gradient of every cell.
    pub(super) fn for_each<'a>(&'a self, mut visit: impl FnMut(CellGradient<'a>)) {
        for (frame, &weight) in self.frames.iter().zip(&self.weights) {
            CellGradient::for_each(frame.gradient(), |gradient| visit(CellGradient { weight, ..gradient }));
        }
    }

    /// Calls `visit` with the values of every cell, and where on this shard they begin.
    pub(super) fn for_each_piece(&self, mut visit: impl FnMut(usize, &[f32])) {
        for frame in &self.frames {
            match frame {
                StagedFrame::Dense { start, values, .. } => visit(*start, values),
                StagedFrame::Rows { start, rows, width, values, .. } => {
                    for (row, values) in rows.iter().zip(values.chunks_exact(*width)) {
                        visit(start + *row as usize * width, values);
                    }
                }
            }
        }
    }

    /// Whether it is a gradient of a table of this layout: what another process kept may be anything.
    pub(super) fn check(&self, layout: &Layout) -> Result<(), String> {
        if self.weights.len() != self.frames.len() || !self.weights.iter().all(|weight| weight.is_finite()) {
            return Err("frames of a gradient and their weights do not fit together".into());
        }
        self.frames.iter().try_for_each(|frame| frame.check(layout))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.frames.iter().map(StagedFrame::memory_bytes).sum::<usize>() + 4 * self.weights.len()
    }
}

impl StagedFrame {
    fn gradient(&self) -> GradientFrame<'_> {
        match self {
            StagedFrame::Dense { index, start, values, absent } => GradientFrame::Dense {
                index: *index,
                start: *start,
                values: Values::F32(values).into(),
                absent,
            },
            StagedFrame::Rows { index, start, rows, width, values } => {
                let values = Values::F32(values);
                GradientFrame::Rows { index: *index, start: *start, rows, width: *width, values }
            }
        }
    }

    fn check(&self, layout: &Layout) -> Result<(), String> {
        let chunk = |index: usize, start: usize| {
            let chunk = layout.chunks().get(index).filter(|chunk| chunk.start == start);
            chunk.ok_or_else(|| format!("a gradient of chunk {index} from element {start} on"))
        };
        let is_fitting = match self {
            StagedFrame::Dense { index, start, values, absent } => {
                let len = chunk(*index, *start)?.len;
                absent.check(len)?;
                !layout.is_sparse() && values.len() == len
            }
            StagedFrame::Rows { index, start, rows, width, values } => {
                let held = chunk(*index, *start)?.len / layout.row_width();
                layout.is_sparse()
                    && *width == layout.row_width()
                    && rows.is_sorted_by(|a, b| a < b)
                    && rows.last().is_none_or(|last| (*last as usize) < held)
                    && values.len() == rows.len() * width
            }
        };
        if is_fitting { Ok(()) } else { Err("a gradient that was kept is not of its chunk's shape".into()) }
    }

    fn memory_bytes(&self) -> usize {
        let own = match self {
            StagedFrame::Dense { values, absent, .. } => 4 * values.len() + absent.memory_bytes(),
            StagedFrame::Rows { rows, values, .. } => 4 * (rows.len() + values.len()),
        };
        size_of::<StagedFrame>() + own
    }
}
