//! A table as a worker holds it: parameters as last pulled, and memory for gradients under way.

use super::encoding::TableCodecs;
use super::{Gradient, Ticket, WorkerError};
use crate::codec::Factors;
use crate::consistency::PartialPull;
use crate::policy::NonFinite;
use crate::store::{Allocate, Buffer, Place};
use crate::table::{Chunk, TableSpec};
use crate::types::{Clock, ShardId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Gradient buffers kept for the next push.
const SPARE_BUFFERS: usize = 2;

/// Rows that one shard holds, each with its place in what the application asked for.
pub(super) type ShardRows = (ShardId, Vec<(u32, u32)>);

/// Where servers that share memory with this process put answers, before they become the values: those may be in use.
#[derive(Debug)]
struct LandingPlace {
    buffer: Arc<Buffer>,
    /// The only pull under way, and how many servers' answers to it are not whole.
    owner: Option<(Ticket, usize)>,
}

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
    by_shard: Vec<(ShardId, Vec<u32>)>,
    spare: Vec<Buffer>,
    /// The application has the values, or an exchange has.
    pub(super) lent: bool,
    /// The gradient of an exchange.
    pub(super) returned: Option<Arc<Buffer>>,
    /// Stands where values are lent.
    nothing: Arc<Buffer>,
    landing: Option<LandingPlace>,
    pub(super) codecs: TableCodecs,
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
            by_shard: Vec::new(),
            spare: Vec::new(),
            lent: false,
            returned: None,
            nothing: Arc::new(Buffer::zeroed(0)),
            landing: None,
            codecs: TableCodecs::default(),
        }
    }

    /// Takes the plan's word on where the table lives.
    pub(super) fn plan(
        &mut self,
        chunks: Vec<Chunk>,
        nonfinite: NonFinite,
        partial: Option<PartialPull>,
        memory: &dyn Allocate,
    ) {
        let mut by_shard: BTreeMap<ShardId, Vec<u32>> = BTreeMap::new();
        for (number, chunk) in (0..).zip(&chunks) {
            by_shard.entry(chunk.shard).or_default().push(number);
        }
        self.by_shard = by_shard.into_iter().collect();
        self.chunks = chunks;
        self.nonfinite = nonfinite;
        self.partial = partial;
        if !self.spec.rows {
            self.values = Arc::new(memory.zeroed(self.spec.elements() as usize));
        }
    }

    /// The initial values, ready to be sent. Only asked for once.
    pub(super) fn take_initial(&mut self, memory: &dyn Allocate) -> Buffer {
        let initial = std::mem::take(&mut self.initial);
        let mut buffer = memory.zeroed(initial.len());
        buffer.as_mut_slice().copy_from_slice(&initial);
        buffer
    }

    /// The shards that hold some of it, ascending.
    pub(super) fn shards(&self) -> impl ExactSizeIterator<Item = ShardId> + '_ {
        self.by_shard.iter().map(|(shard, _)| *shard)
    }

    pub(super) fn shard_count(&self) -> usize {
        self.by_shard.len()
    }

    /// One of [`LocalTable::shards`].
    pub(super) fn shard(&self, index: usize) -> ShardId {
        self.by_shard[index].0
    }

    fn numbers(&self, shard: ShardId) -> &[u32] {
        match self.by_shard.binary_search_by_key(&shard, |(of, _)| *of) {
            Ok(index) => &self.by_shard[index].1,
            Err(_) => &[],
        }
    }

    /// Takes the values out, for somebody who lends them.
    pub(super) fn take_values(&mut self) -> Arc<Buffer> {
        std::mem::replace(&mut self.values, self.nothing.clone())
    }

    /// Where the answer to a pull may be put by servers that share memory with this process. The pull may be the only one
    /// under way; then the place becomes the values when it is whole, and nothing is copied.
    pub(super) fn landing(&mut self, memory: &dyn Allocate, ticket: Ticket, is_only: bool) -> Option<Place> {
        if self.codecs.answer.is_some() {
            return None;
        }
        self.values.place()?;
        let len = self.values.len();
        let fresh = || LandingPlace { buffer: Arc::new(memory.zeroed(len)), owner: None };
        let landing = self.landing.get_or_insert_with(fresh);
        if Arc::get_mut(&mut landing.buffer).is_none() {
            // These were the values, and somebody still reads them.
            *landing = fresh();
        }
        if is_only && self.partial.is_none() {
            landing.owner = Some((ticket, self.by_shard.len()));
        }
        landing.buffer.place()
    }

    /// The pull whose answer will become the values whole.
    pub(super) fn landing_owner(&self) -> Option<Ticket> {
        self.landing.as_ref()?.owner.map(|(ticket, _)| ticket)
    }

    /// Where chunks of the answer to a pull are put.
    pub(super) fn target(&mut self, ticket: Ticket) -> &mut Arc<Buffer> {
        match &mut self.landing {
            Some(LandingPlace { buffer, owner: Some((owner, _)) }) if *owner == ticket => buffer,
            _ => &mut self.values,
        }
    }

    /// One server's answer to a pull is whole.
    pub(super) fn note_answer(&mut self, ticket: Ticket) {
        let Some(LandingPlace { buffer, owner }) = &mut self.landing else { return };
        let Some((_, left)) = owner.as_mut().filter(|(owner, _)| *owner == ticket) else { return };
        *left -= 1;
        if *left == 0 {
            *owner = None;
            std::mem::swap(buffer, &mut self.values);
        }
    }

    /// The landing belongs to no pull alone any more: what each shard has put there becomes values, and what follows does
    /// so chunk by chunk.
    pub(super) fn disown_landing(&mut self, received: impl Fn(ShardId) -> usize) {
        let Some(LandingPlace { buffer, owner }) = &mut self.landing else { return };
        *owner = None;
        if self.lent {
            return;
        }
        let values = Arc::make_mut(&mut self.values).as_mut_slice();
        for (shard, numbers) in &self.by_shard {
            for &number in numbers.iter().take(received(*shard)) {
                let Chunk { start, len, .. } = self.chunks[number as usize];
                let range = start as usize..start as usize + len as usize;
                values[range.clone()].copy_from_slice(&buffer.as_slice()[range]);
            }
        }
    }

    pub(super) fn check_not_lent(&self) -> Result<(), WorkerError> {
        if !self.lent {
            return Ok(());
        }
        let name = &self.spec.name;
        Err(WorkerError::Order(format!(
            "table `{name}` is lent as a slab: exchange it, or give it back first"
        )))
    }

    /// A table is pushed once per iteration.
    pub(super) fn check_clock(&self, clock: Clock) -> Result<(), WorkerError> {
        if self.pushed != Some(clock) {
            return Ok(());
        }
        let name = &self.spec.name;
        Err(WorkerError::Order(format!(
            "table `{name}` was pushed at clock {clock} already; call `clock` between iterations"
        )))
    }

    /// The chunks of a shard with their numbers.
    pub(super) fn chunks_of(&self, shard: ShardId) -> impl ExactSizeIterator<Item = (u32, Chunk)> + '_ {
        self.numbers(shard).iter().map(|&number| (number, self.chunks[number as usize]))
    }

    /// All chunks with their numbers.
    pub(super) fn all_chunks(&self) -> impl ExactSizeIterator<Item = (u32, Chunk)> + '_ {
        (0..self.chunks.len()).map(|number| (number as u32, self.chunks[number]))
    }

    pub(super) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// One of the chunks of a shard, counted from its first.
    pub(super) fn chunk_of(&self, shard: ShardId, index: usize) -> Option<(u32, Chunk)> {
        let number = *self.numbers(shard).get(index)?;
        Some((number, self.chunks[number as usize]))
    }

    /// The chunk of this number.
    pub(super) fn chunk_at(&self, number: u32) -> Chunk {
        self.chunks[number as usize]
    }

    pub(super) fn row_width(&self) -> usize {
        self.spec.row_elements() as usize
    }

    /// Whether a gradient fits, and comes at its time.
    pub(super) fn check_gradient(&self, gradient: &Gradient<'_>, clock: Clock) -> Result<(), WorkerError> {
        self.check_not_lent()?;
        self.check_clock(clock)?;
        let name = &self.spec.name;
        let shape = |expected: String, found: String| {
            Err(WorkerError::Shape { table: name.clone(), expected, found })
        };
        match gradient {
            Gradient::Dense(_) | Gradient::Product { .. } if self.spec.rows => {
                shape("rows and their gradients, as it is sparse".into(), "a dense gradient".into())
            }
            Gradient::Rows { .. } if !self.spec.rows => {
                shape("a gradient of the whole table, as it is dense".into(), "single rows".into())
            }
            Gradient::Dense(values) | Gradient::Product { values, .. }
                if values.len() as u64 != self.spec.elements() =>
            {
                let expected = format!("{} elements (shape {:?})", self.spec.elements(), self.spec.shape);
                shape(expected, values.len().to_string())
            }
            Gradient::Rows { rows, values } if values.len() != rows.len() * self.row_width() => {
                let expected = format!("{} elements for {} rows", rows.len() * self.row_width(), rows.len());
                shape(expected, values.len().to_string())
            }
            Gradient::Rows { rows, .. } => self.check_rows(rows),
            Gradient::Product { factors: Factors { rank, u, v }, .. } => {
                let (rank, columns) = (*rank as usize, self.spec.columns());
                let rows = (self.spec.elements() as usize).checked_div(columns).unwrap_or(0);
                if rank > 0
                    && (Some(u.len()), Some(v.len())) == (rows.checked_mul(rank), columns.checked_mul(rank))
                {
                    return Ok(());
                }
                let expected = format!("factors of {rows} x {rank} and {rank} x {columns} elements");
                shape(expected, format!("{} and {}", u.len(), v.len()))
            }
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
    pub(super) fn take_buffer(&mut self, len: usize, memory: &dyn Allocate) -> Buffer {
        match self.spare.iter().position(|buffer| buffer.len() == len) {
            Some(index) => self.spare.swap_remove(index),
            None => memory.zeroed(len),
        }
    }

    pub(super) fn keep_buffer(&mut self, buffer: Buffer) {
        // Row pushes differ in length from step to step; keeping their buffers would only hoard.
        if !self.spec.rows && self.spare.len() < SPARE_BUFFERS {
            self.spare.push(buffer);
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let landing = self.landing.as_ref().map_or(0, |landing| landing.buffer.memory_bytes());
        landing
            + self.codecs.memory_bytes()
            + self.values.memory_bytes()
            + self.spare.iter().map(Buffer::memory_bytes).sum::<usize>()
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
