//! Layers of a gradient that travel as two thin matrices: how these are cut into pieces, and what a chunk finds in them.
//!
//! The factors of a layer travel once for a push, in pieces of their own before the layer's first chunk. A chunk says then
//! only what they do not cover. Sender and receiver hold the same [`Products`], made of the same pieces.

use super::layer::LayerRange;
use crate::kernels;
use multiversion::multiversion;
use std::ops::Range;

/// Values of a piece, but for the last one of a layer.
pub(super) const PIECE_VALUES: usize = 1 << 16;
/// Bytes before the values of a piece.
pub(super) const PIECE_HEAD_BYTES: usize = 16;

/// Two thin matrices whose product stands for a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Thin {
    /// How they are to be multiplied.
    pub shape: Shape,
    /// The left one row by row (`rank` values each), then the right one row by row (`columns` values each).
    pub values: Vec<f32>,
}

/// The shape of two thin matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Columns of the left matrix, rows of the right one.
    pub rank: u32,
    /// Elements in a row of the product. The last row may be shorter.
    pub columns: u32,
}

impl Shape {
    /// Rows of the product of `elements`.
    pub(super) fn rows(self, elements: usize) -> usize {
        elements.div_ceil(self.columns as usize)
    }

    /// Values of both matrices, if they are fewer than the `elements` that they stand for.
    pub(super) fn values(self, elements: usize) -> Option<usize> {
        let (rank, columns) = (self.rank as usize, self.columns as usize);
        if rank == 0 || !(1..=elements).contains(&columns) {
            return None;
        }
        let values = (self.rows(elements) + columns).checked_mul(rank)?;
        (values < elements).then_some(values)
    }

    /// The rows that a range of elements lies in: for each its number, its elements, and their columns.
    pub(super) fn segments(self, range: Range<usize>) -> impl Iterator<Item = Segment> {
        let columns = self.columns as usize;
        (range.start / columns..range.end.div_ceil(columns)).map(move |row| {
            let elements = range.start.max(row * columns)..range.end.min((row + 1) * columns);
            let places = elements.start - row * columns..elements.end - row * columns;
            Segment { row, elements, places }
        })
    }
}

/// A part of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) row: usize,
    pub(super) elements: Range<usize>,
    /// Their columns.
    pub(super) places: Range<usize>,
}

/// What a piece is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceHead {
    /// Number of the layer in its table.
    pub(super) layer: u32,
    pub(super) shape: Shape,
    /// Number of the piece, from 0.
    pub(super) piece: u32,
}

impl PieceHead {
    pub(super) fn encode(self) -> [u8; PIECE_HEAD_BYTES] {
        let mut bytes = [0; PIECE_HEAD_BYTES];
        let fields = [self.layer, self.shape.rank, self.shape.columns, self.piece];
        for (place, field) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(fields) {
            *place = field.to_le_bytes();
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; PIECE_HEAD_BYTES]) -> PieceHead {
        let field = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let shape = Shape { rank: field(4), columns: field(8) };
        PieceHead { layer: field(0), shape, piece: field(12) }
    }
}

/// The factors of the layers of one gradient.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Products {
    /// Ascending by their elements.
    layers: Vec<Product>,
}

#[derive(Debug, Clone, PartialEq)]
struct Product {
    elements: Range<usize>,
    shape: Shape,
    /// How many values there will be.
    total: usize,
    values: Vec<f32>,
}

impl Products {
    /// No factors at all.
    pub const NONE: &'static Products = &Products { layers: Vec::new() };

    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.layers.clear();
    }

    /// Forgets those of a layer.
    pub(super) fn remove(&mut self, elements: &Range<usize>) {
        self.layers.retain(|product| product.elements != *elements);
    }

    /// Checks that a piece of so many values is the next one of its layer. The first piece begins the layer anew. The error
    /// completes "the payload has ...".
    pub(super) fn check(&self, head: PieceHead, count: usize, layers: &[LayerRange]) -> Result<(), String> {
        let PieceHead { layer, shape, piece } = head;
        let Some(LayerRange { elements, .. }) = layers.get(layer as usize) else {
            return Err(format!("factors of layer {layer} of {}", layers.len()));
        };
        let Some(total) = shape.values(elements.len()) else {
            return Err(format!("factors of {shape:?} for {} elements", elements.len()));
        };
        let before = match self.layers.iter().find(|known| known.elements == *elements) {
            _ if piece == 0 => 0,
            Some(known) if known.shape == shape => known.values.len(),
            _ => return Err(format!("piece {piece} of factors without those before")),
        };
        if (piece as usize).checked_mul(PIECE_VALUES) != Some(before) {
            return Err(format!("piece {piece} of factors after {before} values"));
        }
        match PIECE_VALUES.min(total - before) {
            0 => Err(format!("piece {piece} of factors that are complete")),
            expected if expected == count => Ok(()),
            expected => Err(format!("{count} values of factors where a piece has {expected}")),
        }
    }

    /// Takes a piece that was checked.
    pub(super) fn take(&mut self, head: PieceHead, values: &[f32], layers: &[LayerRange]) {
        let elements = &layers[head.layer as usize].elements;
        let at = self.layers.partition_point(|known| known.elements.start < elements.start);
        if head.piece == 0 {
            if self.layers.get(at).is_some_and(|known| known.elements == *elements) {
                self.layers.remove(at);
            }
            let total = head.shape.values(elements.len()).expect("it was checked");
            let product =
                Product { elements: elements.clone(), shape: head.shape, total, values: Vec::new() };
            self.layers.insert(at, product);
        }
        // Memory grows with what came, whatever the first piece says of the others.
        self.layers[at].values.extend_from_slice(values);
    }

    /// The layers whose factors are here, as far as they lie in a range: for each the range that it covers.
    fn covering(&self, range: Range<usize>) -> impl Iterator<Item = (&Product, Range<usize>)> {
        let complete = self.layers.iter().filter(|product| product.values.len() == product.total);
        complete.filter_map(move |product| {
            let common = product.elements.start.max(range.start)..product.elements.end.min(range.end);
            (!common.is_empty()).then_some((product, common))
        })
    }

    /// Elements of a range that some factors are for.
    pub(super) fn covered(&self, range: Range<usize>) -> usize {
        self.covering(range).map(|(_, common)| common.len()).sum()
    }

    /// The values of a range that no factors are for, one after the other.
    pub(super) fn gather_rest(&self, start: usize, values: &[f32], rest: &mut Vec<f32>) {
        rest.clear();
        let mut next = 0;
        for (_, common) in self.covering(start..start + values.len()) {
            rest.extend_from_slice(&values[next..common.start - start]);
            next = common.end - start;
        }
        rest.extend_from_slice(&values[next..]);
    }

    /// Fills the elements from `start` on: with products, and with `rest` where there are none.
    pub(super) fn fill(&self, start: usize, mut rest: &[f32], values: &mut [f32]) {
        let mut next = 0;
        let mut put = |values: &mut [f32]| {
            let (here, after) = rest.split_at(values.len());
            values.copy_from_slice(here);
            rest = after;
        };
        for (product, common) in self.covering(start..start + values.len()) {
            put(&mut values[next..common.start - start]);
            next = common.end - start;
            product.fill(common.clone(), &mut values[common.start - start..next]);
        }
        put(&mut values[next..]);
    }
}

impl Product {
    /// Fills a range of the layer's elements, counted in the table.
    fn fill(&self, range: Range<usize>, values: &mut [f32]) {
        let (rank, columns, first) =
            (self.shape.rank as usize, self.shape.columns as usize, self.elements.start);
        let (left, right) = self.values.split_at(self.shape.rows(self.elements.len()) * rank);
        let mut values = values;
        for Segment { row, places, .. } in self.shape.segments(range.start - first..range.end - first) {
            let (here, after) = values.split_at_mut(places.len());
            combine(here, &left[row * rank..(row + 1) * rank], right, columns, places.start);
            values = after;
        }
    }
}

/// Columns that are summed at once: they stay in the nearest cache, whatever the rank.
const BLOCK: usize = 1024;

/// `sum = factors * right`, for columns of `right` from `first` on. Each sum is made in the order of the factors.
pub(super) fn combine(sum: &mut [f32], factors: &[f32], right: &[f32], columns: usize, first: usize) {
    kernels::fill(sum, 0.0);
    let (fours, rest) = factors.as_chunks::<4>();
    for (at, sum) in sum.chunks_mut(BLOCK).enumerate() {
        let (begin, len) = (first + at * BLOCK, sum.len());
        let row = |k: usize| &right[k * columns + begin..][..len];
        for (k, factors) in (0..).step_by(4).zip(fours) {
            add_four(sum, *factors, [row(k), row(k + 1), row(k + 2), row(k + 3)]);
        }
        for (k, factor) in (4 * fours.len()..).zip(rest) {
            kernels::add_scaled(sum, row(k), *factor);
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_four(sum: &mut [f32], factors: [f32; 4], rows: [&[f32]; 4]) {
    let [a, b, c, d] = rows.map(|row| &row[..sum.len()]);
    for (at, sum) in sum.iter_mut().enumerate() {
        *sum = *sum + factors[0] * a[at] + factors[1] * b[at] + factors[2] * c[at] + factors[3] * d[at];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers() -> Vec<LayerRange> {
        vec![
            LayerRange { elements: 0..5, columns: 0 },
            LayerRange { elements: 7..107, columns: 10 },
            LayerRange { elements: 107..110, columns: 0 },
        ]
    }

    fn taken(rank: u32, columns: u32) -> (Products, Vec<f32>) {
        let (mut products, shape) = (Products::default(), Shape { rank, columns });
        let values: Vec<f32> = (0..shape.values(100).unwrap()).map(|at| (at as f32 * 0.7).sin()).collect();
        let head = PieceHead { layer: 1, shape, piece: 0 };
        assert_eq!(products.check(head, values.len(), &layers()), Ok(()));
        products.take(head, &values, &layers());
        (products, values)
    }

    #[test]
    fn a_chunk_is_what_the_product_is_by_definition_wherever_it_is_cut() {
        for (rank, columns) in [(1, 10), (4, 10), (4, 7), (3, 13)] {
            let (products, factors) = taken(rank, columns);
            let (rank, columns) = (rank as usize, columns as usize);
            let (left, right) = factors.split_at(100usize.div_ceil(columns) * rank);
            for chunk in [0..110, 0..8, 7..107, 30..31, 43..77, 90..110, 107..110] {
                let plain: Vec<f32> = (0..110).map(|at| -1.0 - at as f32).collect();
                let mut rest = Vec::new();
                products.gather_rest(chunk.start, &plain[chunk.clone()], &mut rest);
                assert_eq!(rest.len(), chunk.len() - products.covered(chunk.clone()));
                let mut found = vec![0.0; chunk.len()];
                products.fill(chunk.start, &rest, &mut found);
                for (at, found) in chunk.clone().zip(found) {
                    let expected = match (7..107).contains(&at) {
                        true => {
                            let (row, column) = ((at - 7) / columns, (at - 7) % columns);
                            (0..rank).map(|k| left[row * rank + k] * right[k * columns + column]).sum()
                        }
                        false => plain[at],
                    };
                    assert!((found - expected).abs() < 1e-5, "{at} of {chunk:?}: {found} for {expected}");
                }
            }
        }
    }

    #[test]
    fn factors_that_would_take_more_than_they_stand_for_are_refused() {
        let good = PieceHead { layer: 1, shape: Shape { rank: 2, columns: 10 }, piece: 0 };
        assert_eq!(PieceHead::decode(&good.encode()), good);
        let products = Products::default();
        assert_eq!(products.check(good, 40, &layers()), Ok(()));
        let of = |rank, columns| PieceHead { shape: Shape { rank, columns }, ..good };
        for (bad, count) in [
            (of(0, 10), 0),
            (of(5, 10), 100),
            (of(u32::MAX, 10), 40),
            (of(1, 0), 40),
            (of(1, 101), 40),
            (of(1, u32::MAX), 40),
            (PieceHead { layer: 3, ..good }, 40),
            (PieceHead { layer: 0, ..good }, 40),
            (PieceHead { piece: 1, ..good }, 40),
            (good, 39),
            (good, 41),
        ] {
            assert!(products.check(bad, count, &layers()).is_err(), "{bad:?} {count}");
        }
    }

    #[test]
    fn pieces_come_in_order_and_the_first_one_begins_anew() {
        let layers = [LayerRange { elements: 0..1_000_000, columns: 1000 }];
        let head = |piece| PieceHead { layer: 0, shape: Shape { rank: 40, columns: 1000 }, piece };
        let (mut products, values) = (Products::default(), vec![1.0; PIECE_VALUES]);
        assert!(products.check(head(1), PIECE_VALUES, &layers).is_err(), "not begun");
        products.take(head(0), &values, &layers);
        assert_eq!(products.covered(0..10), 0, "not complete");
        assert!(products.check(head(2), PIECE_VALUES, &layers).is_err(), "left out");
        let other = PieceHead { shape: Shape { rank: 39, columns: 1000 }, ..head(1) };
        assert!(products.check(other, PIECE_VALUES, &layers).is_err(), "of other factors");
        assert_eq!(products.check(head(0), PIECE_VALUES, &layers), Ok(()), "sent again");
        products.take(head(0), &values, &layers);
        assert!(products.check(head(1), PIECE_VALUES, &layers).is_err(), "too long for the last one");
        let rest = 80_000 - PIECE_VALUES;
        assert_eq!(products.check(head(1), rest, &layers), Ok(()));
        products.take(head(1), &values[..rest], &layers);
        assert_eq!(products.covered(5..15), 10);
        assert!(products.check(head(2), 1, &layers).is_err(), "complete");
    }
}
