//! What is decided for a whole layer before its chunks are encoded, each by itself.

use super::chain::Codec;
use super::products::Products;
use super::scratch::take_input;
use super::selection::{Selection, Stretches};
use super::{CodecError, Factors, Mask};
use crate::absence::Absent;
use crate::hands::Shelf;
use crate::kernels;
use crate::limits;
use crate::table::{LayerRef, TableSpec};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// A layer's elements in its table, seen as a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRange {
    /// Its elements in the table.
    pub elements: Range<usize>,
    /// Elements in a row; 0 when the layer is no matrix.
    pub columns: usize,
}

impl LayerRange {
    /// The layers of a table, in the order of their elements.
    pub fn of_table(spec: &TableSpec) -> Vec<LayerRange> {
        let of = |layer: LayerRef<'_>| LayerRange { columns: layer.columns(), elements: layer.range };
        spec.layers().map(of).collect()
    }
}

/// A gradient of a whole table that is to be encoded.
#[derive(Debug, Clone, Copy)]
pub struct TableGradient<'a> {
    /// A value for every element.
    pub values: &'a [f32],
    /// Take zeros for NaN and Inf. Without it they are an error.
    pub clips_non_finite: bool,
    /// Ranges without a gradient: ascending, disjoint, not empty. Whatever stands there counts as zero.
    pub absent: &'a [Range<usize>],
    /// The table's layers.
    pub layers: &'a [LayerRange],
    /// The table's chunks, one after the other.
    pub chunks: &'a [Range<usize>],
    /// The gradient as a product of thin matrices, when its layer offers that. The table has no other layer then.
    pub factors: Option<Factors<'a>>,
    /// How many times this table was sent before.
    pub step: u64,
    /// Seed of the random choices for the table's layers at this step.
    pub seed: u64,
}

impl<'a> TableGradient<'a> {
    /// The values of a part of one of the chunks, with zeros where there is no gradient. In the gradient's own memory, where
    /// nothing has to be replaced.
    pub fn part<'b>(&self, range: Range<usize>, absent: &Absent, scratch: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        let values = &self.values[range];
        if absent.is_empty() && !self.clips_non_finite {
            return values;
        }
        scratch.clear();
        scratch.extend_from_slice(values);
        absent.clear_in(scratch);
        if self.clips_non_finite {
            kernels::clip_non_finite(scratch);
        }
        scratch
    }
}

/// What was decided for the layers of a table, for one gradient. Chunks follow it.
#[derive(Debug, Default)]
pub struct Plan {
    /// Ascending. Empty when entries are not chosen by layer.
    pub(super) selections: Vec<Selection>,
    /// Layers that travel as factors.
    pub(super) products: Products,
}

impl Plan {
    /// Whether the entries that travel were chosen for every layer.
    pub(super) fn selects(&self) -> bool {
        !self.selections.is_empty()
    }

    /// Marks the entries that travel of the stretch that begins at `start`. The mask is empty and of the values' length.
    pub(super) fn mark(&self, start: usize, values: &[f32], mask: &mut Mask) {
        let first = self.selections.partition_point(|selection| selection.elements().end <= start);
        for selection in &self.selections[first..] {
            if selection.elements().start >= start + values.len() {
                break;
            }
            selection.mark(start, values, mask);
        }
    }
}

/// The input of a chain, read stretch by stretch: a gradient with what was not sent before. It is computed again whenever it
/// is read, because a second layer in memory costs more than an addition.
pub(super) struct TableInput<'a> {
    pub(super) codec: &'a Codec,
    pub(super) gradient: &'a TableGradient<'a>,
    pub(super) residual: &'a [f32],
    pub(super) velocity: &'a [f32],
    pub(super) memory: &'a Shelf<InputMemory>,
    pub(super) is_finite: AtomicBool,
}

/// Memory of one hand that is used again.
#[derive(Debug, Default)]
pub(super) struct InputMemory {
    gradient: Vec<f32>,
    input: Vec<f32>,
    velocity: Vec<f32>,
}

impl Stretches for TableInput<'_> {
    fn visit(&self, range: Range<usize>, each: &mut dyn FnMut(usize, &[f32])) {
        let mut memory = self.memory.take().unwrap_or_default();
        let chunks = self.gradient.chunks;
        let first = chunks.partition_point(|chunk| chunk.end <= range.start);
        for chunk in chunks[first..].iter().take_while(|chunk| chunk.start < range.end) {
            let part = range.start.max(chunk.start)..range.end.min(chunk.end);
            if self.codec.changes_values() {
                // What is clipped depends on the whole chunk.
                self.stretch(chunk.clone(), &mut memory);
                each(part.start, &memory.input[part.start - chunk.start..part.end - chunk.start]);
                continue;
            }
            // Blocks that stay in the nearest caches.
            let mut start = part.start;
            while start < part.end {
                let end = part.end.min(start + limits::BLOCK_ELEMENTS);
                self.stretch(start..end, &mut memory);
                each(start, &memory.input);
                start = end;
            }
        }
        self.memory.put(memory);
    }
}

impl TableInput<'_> {
    /// Puts the input of a stretch into memory.
    fn stretch(&self, range: Range<usize>, memory: &mut InputMemory) {
        let absent = Absent::in_chunk(self.gradient.absent, range.clone());
        let InputMemory { gradient, input, velocity } = memory;
        let values = self.gradient.part(range.clone(), &absent, gradient);
        let of = |kept: &'_ [f32]| if kept.is_empty() { 0..0 } else { range.clone() };
        input.resize(values.len(), 0.0);
        let (residual, before) = (&self.residual[of(self.residual)], &self.velocity[of(self.velocity)]);
        if !take_input(self.codec, velocity, input, values, residual, before) {
            self.is_finite.store(false, Ordering::Relaxed);
        }
        // What was not sent of absent elements waits for their next gradient.
        absent.clear_in(input);
    }

    /// Whether all that was read is finite.
    pub(super) fn is_finite(&self) -> bool {
        self.is_finite.load(Ordering::Relaxed)
    }

    /// Why some of the input is not finite.
    pub(super) fn fault(&self) -> CodecError {
        match self.gradient.clips_non_finite || kernels::all_finite(self.gradient.values) {
            true => CodecError::Overflow,
            false => CodecError::NonFinite,
        }
    }
}
