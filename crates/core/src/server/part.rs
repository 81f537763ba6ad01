//! One table's part on one shard: its parameters, its optimizer state, its open rounds, its controller.

mod push;
mod step;

pub(super) use push::Taken;

use super::rounds::Round;
use crate::consistency::{Admit, Advance, Apply, Controller, SyncPolicy};
use crate::optimizer::OptimizerPolicy;
use crate::registry::Registry;
use crate::spec::SpecError;
use crate::status::{TableReport, WaitReport};
use crate::store::Buffer;
use crate::table::{Chunk, TablePolicy, TableSpec};
use crate::types::{Clock, Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};
use push::Incoming;
use std::collections::BTreeMap;

/// How many waiting pulls a report names.
const REPORTED_WAITS: usize = 8;

/// One of the table's chunks on this shard.
#[derive(Debug, Clone, Copy)]
struct LocalChunk {
    /// Its number in the table.
    number: u32,
    /// First element in the table.
    table_start: u64,
    /// First element on this shard.
    start: usize,
    len: usize,
    /// Optimizer steps taken on it.
    steps: u64,
}

/// One table's part on one shard.
#[derive(Debug)]
pub(super) struct TablePart {
    pub(super) spec: TableSpec,
    pub(super) controller: Controller,
    optimizer: OptimizerPolicy,
    policy: TablePolicy,
    chunks: Vec<LocalChunk>,
    /// Elements of a unit of contribution: a row, or everything up to the chunk's end.
    width: usize,
    parameters: Buffer,
    slots: Vec<Buffer>,
    rounds: BTreeMap<Clock, Round>,
    /// An emptied round, kept for the next one.
    spare: Option<Round>,
    incoming: BTreeMap<WorkerId, Incoming>,
    initialised_parts: u32,
    initialised: bool,
    pub(super) nonfinite: u64,
}

impl TablePart {
    /// The part of a table that `chunks` (those of this shard, with their numbers) make up.
    pub(super) fn new(
        registry: &Registry,
        spec: TableSpec,
        policy: TablePolicy,
        chunks: impl Iterator<Item = (u32, Chunk)>,
        workers: impl IntoIterator<Item = WorkerId>,
        seed: u64,
    ) -> Result<TablePart, SpecError> {
        let sync = SyncPolicy::parse(&registry.consistency, &policy.sync)?;
        let optimizer = OptimizerPolicy::parse(&registry.optimizer, &policy.optimizer)?;
        let mut elements = 0;
        let chunks: Vec<LocalChunk> = chunks
            .map(|(number, chunk)| {
                let start = elements;
                elements += chunk.len as usize;
                LocalChunk { number, table_start: chunk.start, start, len: chunk.len as usize, steps: 0 }
            })
            .collect();
        let slots = (0..optimizer.slots()).map(|_| Buffer::zeroed(elements)).collect();
        Ok(TablePart {
            width: spec.row_elements() as usize,
            spec,
            controller: Controller::new(sync, workers, seed),
            optimizer,
            policy,
            chunks,
            parameters: Buffer::zeroed(elements),
            slots,
            rounds: BTreeMap::new(),
            spare: None,
            incoming: BTreeMap::new(),
            initialised_parts: 0,
            initialised: false,
            nonfinite: 0,
        })
    }

    pub(super) fn is_initialised(&self) -> bool {
        self.initialised
    }

    /// Takes one frame of initial values. True when they are now complete.
    pub(super) fn initialise(&mut self, header: &Header, values: &[f32]) -> Result<bool, Fault> {
        if self.initialised || header.part < self.initialised_parts {
            return Ok(self.initialised);
        }
        let chunk = self.chunk(header.chunk)?;
        self.expect_length(values.len(), chunk.len)?;
        self.parameters.as_mut_slice()[chunk.start..chunk.start + chunk.len].copy_from_slice(values);
        self.initialised_parts = header.part + 1;
        self.initialised = header.flags.has(Flags::LAST);
        Ok(self.initialised)
    }

    /// The next advance of the version, with the optimizer step that belongs to it done.
    pub(super) fn advance(&mut self, now: Time) -> Option<Advance> {
        let advance = self.controller.advance(now)?;
        if let Some(mut round) = self.rounds.remove(&advance.closed) {
            self.step_round(&mut round, advance.closed, advance.contributions, advance.lr_factor);
            round.clear();
            self.spare.get_or_insert(round);
        }
        // What is left below the new version are pieces of pushes that were never completed.
        self.rounds = self.rounds.split_off(&advance.version);
        Some(advance)
    }

    /// Switches the consistency model. Rounds that the new model would never close are applied now.
    pub(super) fn set_sync(&mut self, now: Time, sync: SyncPolicy) {
        let flush = sync.model.apply() == Apply::OnArrival;
        self.policy.sync = sync.to_string();
        self.controller.set_policy(now, sync);
        if flush {
            for (clock, mut round) in std::mem::take(&mut self.rounds) {
                let contributions = self.controller.state().n().max(1);
                self.step_round(&mut round, clock, contributions, 1.0);
            }
        }
        for incoming in self.incoming.values_mut() {
            // A push that is half here goes on under the new model from its next frame.
            if let Admit::Round(_) | Admit::Now = incoming.admit {
                incoming.admit =
                    if flush { Admit::Now } else { Admit::Round(self.controller.state().v_train()) };
            }
        }
    }

    /// A worker is gone for good. What it pushed whole stays; a push it did not finish stays only in the units that
    /// had already been added, each with its own count.
    pub(super) fn remove_worker(&mut self, now: Time, worker: WorkerId) {
        self.incoming.remove(&worker);
        self.controller.remove_worker(now, worker);
    }

    /// The chunks in order: number, first byte and length in [`TablePart::parameter_bytes`].
    pub(super) fn chunk_bytes(&self) -> impl ExactSizeIterator<Item = (u32, usize, usize)> + '_ {
        self.chunks.iter().map(|chunk| (chunk.number, chunk.start * 4, chunk.len * 4))
    }

    pub(super) fn parameter_bytes(&self) -> &[u8] {
        self.parameters.as_bytes()
    }

    /// Calls `visit` with the first element and the values of every chunk.
    pub(super) fn for_each_chunk(&self, mut visit: impl FnMut(u64, &[f32])) {
        for chunk in &self.chunks {
            visit(chunk.table_start, &self.parameters.as_slice()[chunk.start..chunk.start + chunk.len]);
        }
    }

    pub(super) fn elements(&self) -> usize {
        self.parameters.len()
    }

    /// Reads the row numbers of a pull; all of them must be on this shard.
    pub(super) fn check_rows(&self, payload: &[u8]) -> Result<Vec<u32>, Fault> {
        if !self.spec.rows || !payload.len().is_multiple_of(4) {
            return Err(self.shape_fault(format!("a pull of single rows in {} bytes", payload.len())));
        }
        let rows: Vec<u32> = payload
            .chunks_exact(4)
            .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect();
        match rows.iter().find(|&&row| self.row_start(row).is_none()) {
            Some(row) => Err(self.shape_fault(format!("row {row}, which this server does not hold"))),
            None => Ok(rows),
        }
    }

    /// The values of rows that [`TablePart::check_rows`] let pass, one after the other.
    pub(super) fn gather_rows(&self, rows: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(rows.len() * self.width * 4);
        for &row in rows {
            let start = self.row_start(row).expect("checked when the pull arrived");
            bytes.extend_from_slice(bytemuck::cast_slice(
                &self.parameters.as_slice()[start..start + self.width],
            ));
        }
        bytes
    }

    fn row_start(&self, row: u32) -> Option<usize> {
        let element = u64::from(row) * self.width as u64;
        let after = self.chunks.partition_point(|chunk| chunk.table_start <= element);
        let chunk = self.chunks[..after].last()?;
        let offset = usize::try_from(element - chunk.table_start).ok()?;
        (offset < chunk.len).then_some(chunk.start + offset)
    }

    pub(super) fn row_width(&self) -> usize {
        self.width
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let rounds: usize = self.rounds.values().chain(&self.spare).map(Round::memory_bytes).sum();
        let staged: usize = self.incoming.values().map(|incoming| incoming.staged.memory_bytes()).sum();
        let slots: usize = self.slots.iter().map(Buffer::memory_bytes).sum();
        self.parameters.memory_bytes() + slots + rounds + staged
    }

    pub(super) fn report(&self, now: Time) -> TableReport {
        let mut waiting: Vec<WaitReport> = self
            .controller
            .waiting()
            .map(|waiting| WaitReport {
                worker: waiting.worker,
                seconds: now.since(waiting.since).as_secs_f64(),
                reason: waiting.reason.to_string(),
            })
            .collect();
        waiting.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        waiting.truncate(REPORTED_WAITS);
        TableReport {
            name: self.spec.name.clone(),
            elements: self.parameters.len() as u64,
            sync: self.controller.policy().to_string(),
            version: self.controller.state().v_train(),
            workers: self.controller.state().n(),
            stats: self.controller.stats().clone(),
            waiting,
        }
    }

    fn chunk_index(&self, number: u32) -> Option<usize> {
        self.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok()
    }

    fn chunk(&self, number: u32) -> Result<LocalChunk, Fault> {
        match self.chunk_index(number) {
            Some(index) => Ok(self.chunks[index]),
            None => Err(self.shape_fault(format!("chunk {number}, which this server does not hold"))),
        }
    }

    fn expect_length(&self, found: usize, expected: usize) -> Result<(), Fault> {
        if found == expected {
            return Ok(());
        }
        Err(self.shape_fault(format!("{found} elements where a chunk has {expected}")))
    }

    fn shape_fault(&self, found: String) -> Fault {
        let message =
            format!("table `{}` has shape {:?} of f32; got {found}", self.spec.name, self.spec.shape);
        Fault { cause: Cause::Shape, message }
    }
}
