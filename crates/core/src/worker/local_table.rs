//! A table as a worker holds it: parameters as last pulled, and memory for gradients under way.

use super::{Gradient, WorkerError};
use crate::consistency::PartialPull;
use crate::store::Buffer;
use crate::table::{Chunk, NonFinite, TableSpec};
use crate::types::{Clock, ShardId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Gradient buffers kept for the next push.
const SPARE_BUFFERS: usize = 2;

/// Rows that one shard holds, each with its place in what the application asked for.
pub(super) type ShardRows = (ShardId, Vec<(u32, u32)>);

#[derive(Debug)]
pub(super) struct LocalTable {
    pub(super) spec: TableSpec,
    /// As last pulled; a reader on another thread may hold on to it while newer values arrive.
    pub(super) values: Arc<Buffer>,
    pub(super) nonfinite: NonFinite,
    pub(super) partial: Option<PartialPull>,
    /// The last clock that was pushed.
    pub(super) pushed: Option<Clock>,
    initial: Vec<f32>,
    chunks: Vec<Chunk>,
    /// Chunk numbers of each shard, ascending.
    by_shard: BTreeMap<ShardId, Vec<u32>>,
    spare: Vec<Buffer>,
}

impl LocalTable {
    pub(super) fn new(spec: TableSpec, initial: Vec<f32>) -> LocalTable {
        LocalTable {
            spec,
            values: Arc::new(Buffer::zeroed(0)),
            nonfinite: NonFinite::default(),
            partial: None,
            pushed: None,
            initial,
            chunks: Vec::new(),
            by_shard: BTreeMap::new(),
            spare: Vec::new(),
        }
    }

    /// Takes the plan's word on where the table lives.
    pub(super) fn plan(&mut self, chunks: Vec<Chunk>, nonfinite: NonFinite, partial: Option<PartialPull>) {
        for (number, chunk) in (0..).zip(&chunks) {
            self.by_shard.entry(chunk.shard).or_default().push(number);
        }
        self.chunks = chunks;
        self.nonfinite = nonfinite;
        self.partial = partial;
        if !self.spec.rows {
            self.values = Arc::new(Buffer::zeroed(self.spec.elements() as usize));
        }
    }

    /// The initial values, ready to be sent. Only asked for once.
    pub(super) fn take_initial(&mut self) -> Buffer {
        let initial = std::mem::take(&mut self.initial);
        let mut buffer = Buffer::zeroed(initial.len());
        buffer.as_mut_slice().copy_from_slice(&initial);
        buffer
    }

    pub(super) fn shards(&self) -> Vec<ShardId> {
        self.by_shard.keys().copied().collect()
    }

    /// The chunks of a shard with their numbers.
    pub(super) fn chunks_of(&self, shard: ShardId) -> impl ExactSizeIterator<Item = (u32, Chunk)> + '_ {
        let numbers: &[u32] = self.by_shard.get(&shard).map_or(&[], Vec::as_slice);
        numbers.iter().map(|&number| (number, self.chunks[number as usize]))
    }

    /// One of the chunks of a shard, counted from its first.
    pub(super) fn chunk_of(&self, shard: ShardId, index: usize) -> Option<(u32, Chunk)> {
        let number = *self.by_shard.get(&shard)?.get(index)?;
        Some((number, self.chunks[number as usize]))
    }

    pub(super) fn row_width(&self) -> usize {
        self.spec.row_elements() as usize
    }

    /// Whether a gradient fits, and comes at its time.
    pub(super) fn check_gradient(&self, gradient: &Gradient<'_>, clock: Clock) -> Result<(), WorkerError> {
        let name = &self.spec.name;
        if self.pushed == Some(clock) {
            return Err(WorkerError::Order(format!(
                "table `{name}` was pushed at clock {clock} already; call `clock` between iterations"
            )));
        }
        let shape = |expected: String, found: String| {
            Err(WorkerError::Shape { table: name.clone(), expected, found })
        };
        match gradient {
            Gradient::Dense(_) if self.spec.rows => {
                shape("rows and their gradients, as it is sparse".into(), "a dense gradient".into())
            }
            Gradient::Rows { .. } if !self.spec.rows => {
                shape("a gradient of the whole table, as it is dense".into(), "single rows".into())
            }
            Gradient::Dense(values) if values.len() as u64 != self.spec.elements() => {
                let expected = format!("{} elements (shape {:?})", self.spec.elements(), self.spec.shape);
                shape(expected, values.len().to_string())
            }
            Gradient::Rows { rows, values } if values.len() != rows.len() * self.row_width() => {
                let expected = format!("{} elements for {} rows", rows.len() * self.row_width(), rows.len());
                shape(expected, values.len().to_string())
            }
            Gradient::Rows { rows, .. } => self.check_rows(rows),
            Gradient::Dense(_) => Ok(()),
        }
    }

    /// Cuts ascending rows by the shard that holds them; every row with its place in `rows`. Shards with none are
    /// left out.
    pub(super) fn rows_by_shard(&self, rows: &[u32]) -> Result<Vec<ShardRows>, WorkerError> {
        self.check_rows(rows)?;
        let mut by_shard: BTreeMap<ShardId, Vec<(u32, u32)>> = BTreeMap::new();
        for (place, &row) in (0..).zip(rows) {
            by_shard.entry(self.chunk_of_row(row).1.shard).or_default().push((row, place));
        }
        Ok(by_shard.into_iter().collect())
    }

    pub(super) fn all_rows_by_shard(&self) -> Vec<ShardRows> {
        let rows: Vec<u32> = (0..self.spec.shape[0] as u32).collect();
        self.rows_by_shard(&rows).expect("all rows are rows")
    }

    /// The number of the chunk that holds a row, and the chunk.
    pub(super) fn chunk_of_row(&self, row: u32) -> (u32, &Chunk) {
        let element = u64::from(row) * self.row_width() as u64;
        let number = self.chunks.partition_point(|chunk| chunk.start <= element) - 1;
        (number as u32, &self.chunks[number])
    }

    /// Memory for a gradient of `len` elements, used again when there is some.
    pub(super) fn take_buffer(&mut self, len: usize) -> Buffer {
        match self.spare.iter().position(|buffer| buffer.len() == len) {
            Some(index) => self.spare.swap_remove(index),
            None => Buffer::zeroed(len),
        }
    }

    pub(super) fn keep_buffer(&mut self, buffer: Buffer) {
        // Row pushes differ in length from step to step; keeping their buffers would only hoard.
        if !self.spec.rows && self.spare.len() < SPARE_BUFFERS {
            self.spare.push(buffer);
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.values.memory_bytes() + self.spare.iter().map(Buffer::memory_bytes).sum::<usize>()
    }

    fn check_rows(&self, rows: &[u32]) -> Result<(), WorkerError> {
        let shape = |expected: String, found: String| {
            Err(WorkerError::Shape { table: self.spec.name.clone(), expected, found })
        };
        if let Some(pair) = rows.windows(2).find(|pair| pair[0] >= pair[1]) {
            return shape("strictly ascending row numbers".into(), format!("{} before {}", pair[0], pair[1]));
        }
        match rows.last() {
            Some(&row) if u64::from(row) >= self.spec.shape[0] => {
                shape(format!("row numbers below {}", self.spec.shape[0]), row.to_string())
            }
            _ => Ok(()),
        }
    }
}
