//! The memory in which gradients are added up: of a table's part on one shard.

use crate::codec::Content;
use crate::intake::GradientFrame;
use crate::store::Buffer;
use crate::table::{Layout, LocalChunk};

/// Sums of the chunks of a table that one shard holds. In a table of rows it is known which have a gradient: the others
/// are zero, so that a chunk is also what a codec takes.
#[derive(Debug)]
pub(super) struct SumBuffer {
    values: Buffer,
    rows: Option<TouchedRows>,
}

/// The rows that gradients have touched. What is done with them costs what was touched.
#[derive(Debug)]
struct TouchedRows {
    /// One bit for each row on the shard.
    bits: Vec<u64>,
    /// Their numbers within their chunk, for each chunk.
    by_chunk: Vec<Vec<u32>>,
}

impl TouchedRows {
    /// Notes that a gradient has this row. Whether it is the first.
    fn touch(&mut self, index: usize, row: u32, cell: usize) -> bool {
        let (word, bit) = (&mut self.bits[cell / 64], 1 << (cell % 64));
        let is_first = *word & bit == 0;
        if is_first {
            *word |= bit;
            self.by_chunk[index].push(row);
        }
        is_first
    }
}

impl SumBuffer {
    /// Memory for one sum of a table; `None` when the machine does not have as much.
    pub(super) fn try_new(layout: &Layout) -> Option<SumBuffer> {
        let rows = || TouchedRows {
            bits: vec![0; layout.cells().div_ceil(64)],
            by_chunk: vec![Vec::new(); layout.chunks().len()],
        };
        let values = Buffer::try_zeroed(layout.elements())?;
        Some(SumBuffer { values, rows: layout.is_sparse().then(rows) })
    }

    /// Adds a gradient. The first one of a chunk, or of a row, is copied: nothing has to be zeroed.
    pub(super) fn add(&mut self, gradient: GradientFrame<'_>, is_first: bool) {
        let sum = self.values.as_mut_slice();
        match gradient {
            GradientFrame::Dense { start, values, .. } => {
                let sum = &mut sum[start..start + values.len()];
                if is_first { values.copy_to(sum) } else { values.add_to(sum) }
            }
            GradientFrame::Rows { index, start, rows, width, values } => {
                let Some(touched) = &mut self.rows else { return };
                for (place, &row) in rows.iter().enumerate() {
                    let values = Content::from(values.slice(place * width..(place + 1) * width));
                    let first = start + row as usize * width;
                    let sum = &mut sum[first..first + width];
                    let is_first = touched.touch(index, row, first / width);
                    if is_first { values.copy_to(sum) } else { values.add_to(sum) }
                }
            }
        }
    }

    /// Nothing more is added to a chunk: its rows can be sent.
    pub(super) fn seal(&mut self, index: usize) {
        if let Some(rows) = &mut self.rows {
            rows.by_chunk[index].sort_unstable();
        }
    }

    pub(super) fn values(&self, chunk: &LocalChunk) -> &[f32] {
        &self.values.as_slice()[chunk.range()]
    }

    /// The rows of a chunk that was sealed as they travel: their numbers, then their values. `None` in a dense table.
    pub(super) fn row_payload(&self, index: usize, chunk: &LocalChunk, width: usize) -> Option<Vec<u8>> {
        let rows = &self.rows.as_ref()?.by_chunk[index];
        let values = self.values(chunk);
        let mut payload = Vec::with_capacity(rows.len() * (4 + 4 * width));
        payload.extend_from_slice(bytemuck::cast_slice(rows));
        for &row in rows {
            let first = row as usize * width;
            payload.extend_from_slice(bytemuck::cast_slice(&values[first..first + width]));
        }
        Some(payload)
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        self.values.as_bytes()
    }

    /// Makes it ready for another sum.
    pub(super) fn clear(&mut self, layout: &Layout) {
        let Some(TouchedRows { bits, by_chunk }) = &mut self.rows else { return };
        let width = layout.row_width();
        for (rows, chunk) in by_chunk.iter_mut().zip(layout.chunks()) {
            for row in rows.drain(..) {
                let first = chunk.start + row as usize * width;
                self.values.as_mut_slice()[first..first + width].fill(0.0);
                bits[first / width / 64] = 0;
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let rows = self.rows.as_ref().map_or(0, |rows| {
            let numbers: usize = rows.by_chunk.iter().map(|rows| 4 * rows.capacity()).sum();
            8 * rows.bits.len() + numbers
        });
        self.values.memory_bytes() + rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Values;
    use crate::table::{Chunk, TableSpec};
    use crate::types::{ServerId, ShardId};

    /// Two chunks of three rows of two elements.
    fn layout() -> Layout {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunks = (0..2u32).map(|number| (number, Chunk { shard, start: u64::from(number) * 6, len: 6 }));
        Layout::new(TableSpec::sparse("rows", 6, 2), chunks)
    }

    fn add(sum: &mut SumBuffer, index: usize, rows: &[u32], values: &[f32]) {
        let values = Values::F32(values);
        sum.add(GradientFrame::Rows { index, start: index * 6, rows, width: 2, values }, true);
    }

    fn words(payload: Option<Vec<u8>>) -> Vec<u32> {
        let payload = payload.expect("a table of rows");
        payload.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    #[test]
    fn the_rows_of_all_gradients_are_sent_once_and_in_order() {
        let (layout, mut sum) = (layout(), SumBuffer::try_new(&layout()).unwrap());
        for _ in 0..2 {
            add(&mut sum, 1, &[2], &[1.0, 2.0]);
            add(&mut sum, 1, &[0, 2], &[3.0, 4.0, 5.0, 6.0]);
            sum.seal(1);
            let chunks = layout.chunks();
            assert_eq!(sum.values(&chunks[1]), [3.0, 4.0, 0.0, 0.0, 6.0, 8.0]);
            let [three, four, six, eight] = [3f32, 4.0, 6.0, 8.0].map(f32::to_bits);
            assert_eq!(words(sum.row_payload(1, &chunks[1], 2)), [0, 2, three, four, six, eight]);
            assert_eq!(words(sum.row_payload(0, &chunks[0], 2)), [0; 0]);
            // The same again in memory that was used.
            sum.clear(&layout);
            assert!(sum.as_bytes().iter().all(|&byte| byte == 0));
        }
    }
}
