//! The chunks of a table that one shard holds, side by side.

use super::{Chunk, LayerRef, TableSpec};
use crate::wire::frame::Piece;
use crate::wire::{Cause, Fault};
use std::ops::Range;

/// One of the table's chunks on a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LocalChunk {
    /// Its number in the table.
    pub(crate) number: u32,
    /// First element in the table.
    pub(crate) table_start: u64,
    /// First element on the shard.
    pub(crate) start: usize,
    /// Number of elements.
    pub(crate) len: usize,
}

impl LocalChunk {
    /// Its elements on the shard.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// A part of a layer on a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The layer's number in the table.
    pub(crate) layer: usize,
    /// Elements on the shard.
    pub(crate) range: Range<usize>,
}

/// Layout of a table's elements on one shard: chunk after chunk, in the order of their numbers.
#[derive(Debug)]
pub(crate) struct Layout {
    spec: TableSpec,
    chunks: Vec<LocalChunk>,
    elements: usize,
}

impl Layout {
    /// The layout of a table of which a shard holds these chunks, with their numbers.
    pub(crate) fn new(spec: TableSpec, chunks: impl Iterator<Item = (u32, Chunk)>) -> Layout {
        let mut elements = 0;
        let place = |(number, chunk): (u32, Chunk)| {
            let (start, len) = (elements, chunk.len as usize);
            elements += len;
            LocalChunk { number, table_start: chunk.start, start, len }
        };
        let chunks = chunks.map(place).collect();
        Layout { spec, chunks, elements }
    }

    pub(crate) fn spec(&self) -> &TableSpec {
        &self.spec
    }

    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }

    /// Whether single rows are pushed and pulled.
    #[inline]
    pub(crate) fn is_sparse(&self) -> bool {
        self.spec.rows
    }

    /// Elements of a row of a sparse table; 1 for a dense one.
    pub(crate) fn row_width(&self) -> usize {
        self.spec.row_elements() as usize
    }

    /// Elements on the shard.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    #[inline]
    pub(crate) fn chunks(&self) -> &[LocalChunk] {
        &self.chunks
    }

    /// The place of a chunk among those of the shard, by its number in the table.
    pub(crate) fn index_of(&self, number: u32) -> Result<usize, Fault> {
        self.chunks
            .binary_search_by_key(&number, |chunk| chunk.number)
            .map_err(|_| self.shape_fault(format!("chunk {number}, which this server does not hold")))
    }

    /// How many cells there are: rows of a sparse table, chunks of a dense one.
    pub(crate) fn cells(&self) -> usize {
        if self.is_sparse() { self.elements / self.row_width() } else { self.chunks.len() }
    }

    /// The elements of a cell.
    pub(crate) fn cell_range(&self, cell: usize) -> Range<usize> {
        if self.is_sparse() {
            let width = self.row_width();
            return cell * width..(cell + 1) * width;
        }
        self.chunks[cell].range()
    }

    /// The place of the chunk that a cell is, or is in.
    pub(crate) fn chunk_of_cell(&self, cell: usize) -> usize {
        if !self.is_sparse() {
            return cell;
        }
        let element = cell * self.row_width();
        self.chunks.partition_point(|chunk| chunk.start <= element) - 1
    }

    /// The first element of a cell, counted in the table.
    pub(crate) fn table_start_of_cell(&self, cell: usize) -> u64 {
        let chunk = &self.chunks[self.chunk_of_cell(cell)];
        chunk.table_start + (self.cell_range(cell).start - chunk.start) as u64
    }

    /// The first element of a row, counted on the shard; `None` if another shard holds it.
    pub(crate) fn row_start(&self, row: u32) -> Option<usize> {
        let element = u64::from(row) * self.row_width() as u64;
        let after = self.chunks.partition_point(|chunk| chunk.table_start <= element);
        let chunk = self.chunks[..after].last()?;
        let offset = usize::try_from(element - chunk.table_start).ok()?;
        (offset < chunk.len).then_some(chunk.start + offset)
    }

    /// The chunk of a frame that is one of a whole table's: they come in the order of the chunks on the shard, and the
    /// last one says so.
    #[inline]
    pub(crate) fn chunk_in_turn(&self, piece: Piece) -> Result<LocalChunk, Fault> {
        let (index, count) = (piece.sequence as usize, self.chunks.len());
        match self.chunks.get(index) {
            Some(chunk) if chunk.number == piece.chunk && piece.is_last == (index + 1 == count) => Ok(*chunk),
            _ => {
                let found =
                    format!("chunk {} as frame {index} of {count} that this server holds", piece.chunk);
                Err(self.shape_fault(found))
            }
        }
    }

    /// The parts of the table's layers that are on the shard, in the order of their elements. A layer that is whole on
    /// the shard is one of them.
    pub(crate) fn segments(&self) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut chunks = self.chunks.iter().peekable();
        for (layer, LayerRef { range, .. }) in self.spec.layers().enumerate() {
            let first = segments.len();
            while let Some(chunk) = chunks.peek() {
                let chunk_start = chunk.table_start as usize;
                let start = range.start.max(chunk_start);
                let end = range.end.min(chunk_start + chunk.len);
                if start < end {
                    let place = chunk.start + start - chunk_start;
                    match segments[first..].last_mut() {
                        Some(last) if last.range.end == place => last.range.end = place + end - start,
                        _ => segments.push(Segment { layer, range: place..place + end - start }),
                    }
                }
                if range.end < chunk_start + chunk.len {
                    // The next layer has a part of this chunk too.
                    break;
                }
                chunks.next();
            }
        }
        segments
    }

    /// A frame that does not fit the table.
    pub(crate) fn shape_fault(&self, found: String) -> Fault {
        let message =
            format!("table `{}` has shape {:?} of f32; got {found}", self.spec.name, self.spec.shape);
        Fault { cause: Cause::Shape, message }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Layer;
    use super::*;
    use crate::types::{ServerId, ShardId};

    fn layout() -> Layout {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunk = |start, len| Chunk { shard, start, len };
        Layout::new(
            TableSpec::dense("w", [20]),
            [(1, chunk(8, 4)), (3, chunk(16, 4)), (4, chunk(20, 2))].into_iter(),
        )
    }

    #[test]
    fn chunks_lie_side_by_side() {
        let layout = layout();
        let places: Vec<(u64, usize)> =
            layout.chunks().iter().map(|chunk| (chunk.table_start, chunk.start)).collect();
        assert_eq!(places, [(8, 0), (16, 4), (20, 8)]);
        assert_eq!(layout.elements(), 10);
        assert_eq!([1, 3, 4].map(|number| layout.index_of(number).unwrap()), [0, 1, 2]);
        assert_eq!(layout.index_of(2).unwrap_err().cause, Cause::Shape);
    }

    #[test]
    fn rows_are_cells_of_a_sparse_table_and_chunks_of_a_dense_one() {
        let dense = layout();
        assert_eq!((dense.cells(), dense.cell_range(2), dense.chunk_of_cell(2)), (3, 8..10, 2));
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunks = [(1, Chunk { shard, start: 8, len: 4 }), (3, Chunk { shard, start: 24, len: 8 })];
        let sparse = Layout::new(TableSpec::sparse("rows", 20, 4), chunks.into_iter());
        assert_eq!((sparse.cells(), sparse.cell_range(2)), (3, 8..12));
        assert_eq!([0, 1, 2].map(|cell| sparse.chunk_of_cell(cell)), [0, 1, 1]);
        let starts = [1, 2, 3, 5, 6, 7, 8].map(|row| sparse.row_start(row));
        assert_eq!(starts, [None, Some(0), None, None, Some(4), Some(8), None]);
    }

    #[test]
    fn segments_are_the_layers_as_far_as_they_are_here() {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let layer = |name: &str, start, len| Layer { name: name.into(), start, shape: vec![len] };
        let layers = vec![layer("a", 0, 5), layer("b", 8, 3), layer("c", 11, 9)];
        let spec = TableSpec { layers, ..TableSpec::dense("pack", [24]) };
        let chunk = |number: u32| (number, Chunk { shard, start: u64::from(number) * 4, len: 4 });
        let segments = |spec: &TableSpec, numbers: &[u32]| {
            let layout = Layout::new(spec.clone(), numbers.iter().map(|number| chunk(*number)));
            layout.segments().into_iter().map(|Segment { layer, range }| (layer, range)).collect::<Vec<_>>()
        };
        assert_eq!(segments(&spec, &[0, 1, 2, 3, 4, 5]), [(0, 0..5), (1, 8..11), (2, 11..20)]);
        // Without the second chunk, in which the first layer ends, and without the fourth.
        assert_eq!(segments(&spec, &[0, 2, 4]), [(0, 0..4), (1, 4..7), (2, 7..12)]);
        assert_eq!(segments(&spec, &[5]), []);
        let plain = TableSpec::dense("w", [24]);
        assert_eq!(segments(&plain, &[0, 1, 2, 3, 4, 5]), [(0, 0..24)]);
        assert_eq!(segments(&plain, &[1, 4]), [(0, 0..8)]);
    }

    #[test]
    fn frames_of_a_whole_table_come_in_the_order_of_its_chunks() {
        let layout = layout();
        for (sequence, chunk, is_last) in [(0, 1, false), (1, 3, false), (2, 4, true)] {
            let piece = Piece { chunk, sequence, is_last };
            assert_eq!(layout.chunk_in_turn(piece).unwrap().number, chunk);
            assert!(layout.chunk_in_turn(Piece { is_last: !is_last, ..piece }).is_err());
            assert!(layout.chunk_in_turn(Piece { sequence: sequence + 1, ..piece }).is_err());
        }
        assert!(layout.chunk_in_turn(Piece { chunk: 5, sequence: 3, is_last: true }).is_err());
    }
}
