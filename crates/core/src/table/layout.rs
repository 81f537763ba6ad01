//! The chunks of a table that one shard holds, side by side.

use super::{Chunk, TableSpec};
use crate::wire::frame::Piece;
use crate::wire::{Cause, Fault};

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

/// Where the elements of a table are on one shard: chunk after chunk, in the order of their numbers.
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

    pub(crate) fn chunks(&self) -> &[LocalChunk] {
        &self.chunks
    }

    /// The place of a chunk among those of the shard, by its number in the table.
    pub(crate) fn index_of(&self, number: u32) -> Result<usize, Fault> {
        self.chunks
            .binary_search_by_key(&number, |chunk| chunk.number)
            .map_err(|_| self.shape_fault(format!("chunk {number}, which this server does not hold")))
    }

    /// The chunk of a frame that is one of a whole table's: they come in the order of the chunks on the shard, and the
    /// last one says so.
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

    /// A frame that does not fit the table.
    pub(crate) fn shape_fault(&self, found: String) -> Fault {
        let message =
            format!("table `{}` has shape {:?} of f32; got {found}", self.spec.name, self.spec.shape);
        Fault { cause: Cause::Shape, message }
    }
}

#[cfg(test)]
mod tests {
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
