//! Norms of a table's layers, for optimizers whose steps depend on them.

use crate::kernels;
use crate::optimizer::{Gradient, StepInput};
use crate::table::{Layout, Segment};
use std::ops::Range;

/// The layers of a table on one shard, and the norms of the step that is being made.
///
/// A layer has the same norms packed and unpacked. A table with an optimizer that needs them is whole on its shard; of one
/// that is not, norms would be of the part here.
#[derive(Debug, Default)]
pub(super) struct LayerNorms {
    segments: Vec<Segment>,
    /// By layer.
    squares: Vec<Squares>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Squares {
    parameters: f64,
    gradient: f64,
}

impl LayerNorms {
    pub(super) fn new(layout: &Layout) -> LayerNorms {
        let segments = layout.segments();
        // Of a table that is elsewhere nothing is kept.
        let layers = if segments.is_empty() { 0 } else { layout.spec().layers().count() };
        LayerNorms { segments, squares: vec![Squares::default(); layers] }
    }

    /// Begins a step: takes the norms of all parameters, and forgets those of the last gradient.
    pub(super) fn begin(&mut self, parameters: &[f32]) {
        self.squares.fill(Squares::default());
        for Segment { layer, range } in &self.segments {
            self.squares[*layer].parameters += kernels::squared_norm(&parameters[range.clone()]);
        }
    }

    /// Adds a piece of the step's gradient, whose first element is at `start`.
    pub(super) fn add(&mut self, start: usize, gradient: &[f32]) {
        let end = start + gradient.len();
        for Segment { layer, range } in in_range(&self.segments, start..end) {
            let range = range.start.max(start) - start..range.end.min(end) - start;
            self.squares[*layer].gradient += kernels::squared_norm(&gradient[range]);
        }
    }

    /// Calls `step` for each layer's elements in a piece of the gradient, which begins at `start`. Padding between layers
    /// is not stepped.
    pub(super) fn for_each_layer(
        &self,
        input: &StepInput,
        start: usize,
        gradient: Gradient<'_>,
        mut step: impl FnMut(StepInput, usize, Gradient<'_>),
    ) {
        let end = start + gradient.last.len();
        for Segment { layer, range } in in_range(&self.segments, start..end) {
            let squares = self.squares[*layer];
            let input = StepInput {
                parameter_norm: squares.parameters.sqrt(),
                gradient_norm: squares.gradient.sqrt(),
                ..*input
            };
            let range = range.start.max(start)..range.end.min(end);
            step(input, range.start, gradient.slice(range.start - start..range.end - start));
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.segments.len() * size_of::<Segment>() + self.squares.len() * size_of::<Squares>()
    }
}

/// The segments with elements in a range.
fn in_range(segments: &[Segment], range: Range<usize>) -> impl Iterator<Item = &Segment> {
    let first = segments.partition_point(|segment| segment.range.end <= range.start);
    segments[first..].iter().take_while(move |segment| segment.range.start < range.end)
}
