//! Buffers of a table that the application and the data plane hand to each other, so that nothing is copied.
//!
//! A [`Slab`] belongs to the application or to the data plane, never to both: [`Worker::exchange`] takes it, and
//! [`Worker::redeem_slabs`] gives it back when gradient and answer are through.

use super::encoding::Encoded;
use super::prepared::Content;
use super::request::{Missing, Request, What};
use super::{Gradient, Purpose, Ticket, Worker, WorkerError};
use crate::kernels;
use crate::store::{Allocate, Buffer};
use crate::table::NonFinite;
use crate::types::{Clock, ShardId, TableId, Time};
use std::ops::Range;
use std::sync::Arc;

/// A dense table's gradient and parameters in memory that frames are sent from, and that answers are received into.
///
/// Where memory is shared with the servers, neither a push nor a pull copies it.
#[derive(Debug)]
pub struct Slab {
    /// The number of the worker that lent it.
    lender: u64,
    table: TableId,
    gradient: Unique,
    values: Unique,
    content: Content,
    missing: Missing,
}

/// A buffer that is counted, so that frames can be made from it, and that nobody else has.
#[derive(Debug)]
struct Unique(Arc<Buffer>);

impl Unique {
    fn new(buffer: Buffer) -> Unique {
        Unique(Arc::new(buffer))
    }

    /// The buffer itself, or one like it where somebody still has it.
    fn of(buffer: Arc<Buffer>, memory: &dyn Allocate) -> Unique {
        match Arc::strong_count(&buffer) {
            1 => Unique(buffer),
            _ => {
                let mut copy = memory.zeroed(buffer.len());
                copy.as_mut_slice().copy_from_slice(buffer.as_slice());
                Unique::new(copy)
            }
        }
    }

    fn as_mut_slice(&mut self) -> &mut [f32] {
        Arc::get_mut(&mut self.0).expect("nobody else has it").as_mut_slice()
    }
}

impl Slab {
    /// Which table.
    pub fn table(&self) -> TableId {
        self.table
    }

    /// The gradient that the next exchange sends.
    pub fn gradient_mut(&mut self) -> &mut [f32] {
        self.gradient.as_mut_slice()
    }

    /// Says what stands in the gradient's memory. It holds for the next exchange alone.
    pub fn contains(&mut self, content: Content) {
        self.content = content;
    }

    /// Says of which elements there is no gradient, in ascending ranges that have nothing in common: what no worker has a
    /// gradient of is not stepped. Where others have one, it is zero here, whatever stands in the gradient's memory. It holds
    /// for the next exchange alone.
    pub fn lacks(&mut self, ranges: Vec<Range<usize>>) -> Result<(), WorkerError> {
        self.missing = Missing::new(ranges, self.gradient().len()).map_err(WorkerError::Order)?;
        Ok(())
    }

    /// What an application left standing where there is no gradient is none: a codec would keep it.
    fn clear_missing(&mut self) {
        if self.content == Content::Gradient {
            let missing = self.missing.clone();
            missing.ranges().iter().for_each(|range| self.gradient_mut()[range.clone()].fill(0.0));
        }
    }

    /// The same, to be read.
    pub fn gradient(&self) -> &[f32] {
        self.gradient.0.as_slice()
    }

    /// The parameters as the last exchange brought them.
    pub fn values(&self) -> &[f32] {
        self.values.0.as_slice()
    }

    /// The same, to be changed: the next exchange overwrites them.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.values.as_mut_slice()
    }
}

impl Worker {
    /// Lends a dense table's buffers to the application. Until [`Worker::give_back`], exchanges are the only way to use
    /// the table. An exchange waits for all blocks, so a table that is pulled partially (psp with b below 1) is not lent.
    pub fn slab(&mut self, table: TableId) -> Result<Slab, WorkerError> {
        self.check_started()?;
        let index = self.table_index(table)?;
        let local = &mut self.tables[index];
        if local.spec.rows {
            let sentence = format!("table `{}` is sparse: it is pushed and pulled by rows", local.spec.name);
            return Err(WorkerError::Order(sentence));
        }
        local.check_not_lent()?;
        if let Some(partial) = local.partial {
            let (name, b) = (&local.spec.name, partial.fraction);
            return Err(WorkerError::Order(format!(
                "table `{name}` is pulled partially (psp with b = {b}), and an exchange of slabs waits for all blocks: use \
                 `push_pull`, or psp without b and tau2"
            )));
        }
        if self.requests.values().any(|request| request.table == index) {
            let sentence =
                format!("table `{}` is being pushed or pulled: wait for that first", local.spec.name);
            return Err(WorkerError::Order(sentence));
        }
        local.lent = true;
        local.keep_base();
        let gradient = Unique::new(self.memory.zeroed(local.values.len()));
        let values = Unique::of(local.take_values(), &*self.memory);
        self.note_lent();
        let (lender, content, missing) = (self.config.number, Content::Gradient, Missing::default());
        Ok(Slab { lender, table, gradient, values, content, missing })
    }

    /// Takes lent buffers back: the table is pushed and pulled as others are. Those of another worker are refused, and
    /// stay lent there.
    pub fn give_back(&mut self, slab: Slab) -> Result<(), WorkerError> {
        self.check_lender(&slab)?;
        let local = &mut self.tables[slab.table.0 as usize];
        local.lent = false;
        local.values = slab.values.0;
        local.restore_base();
        if let Some(gradient) = Arc::into_inner(slab.gradient.0) {
            local.keep_buffer(gradient);
        }
        self.note_lent();
        Ok(())
    }

    /// A slab's table number means another table, or none, to another worker.
    fn check_lender(&self, slab: &Slab) -> Result<(), WorkerError> {
        if slab.lender == self.config.number {
            return Ok(());
        }
        let table = slab.table.0;
        Err(WorkerError::Order(format!(
            "the slab of table {table} was lent by another worker: exchange it with the job that lent it"
        )))
    }

    /// A table that is lent arrives whole, by exchanges: it is not among the blocks of a partial pull. The coordinator is
    /// told, because it refuses to switch such a table to one.
    fn note_lent(&mut self) {
        let lent = (0..).zip(&self.tables).filter(|(_, table)| table.lent);
        self.report.slabs = lent.map(|(number, _)| TableId(number)).collect();
        self.gate.set_blocks(&self.tables);
        self.next_report = Time::ZERO;
    }

    /// Sends the gradients of the current clock and asks for the parameters that follow them, for several tables in
    /// one go. On success the slabs are taken; on an error they stay where they are, and nothing was sent.
    ///
    /// Gradients are checked for NaN and Inf by the servers only: a pass over them here would cost as much as sending
    /// them.
    pub fn exchange(&mut self, now: Time, slabs: &mut Vec<Slab>) -> Result<Ticket, WorkerError> {
        self.check_started()?;
        let clock = self.clock;
        for slab in slabs.iter() {
            self.check_lender(slab)?;
            let local = &self.tables[self.table_index(slab.table)?];
            local.check_clock(clock)?;
        }
        slabs.iter_mut().for_each(Slab::clear_missing);
        let mut encoded = self.encode_slabs(clock, slabs)?.into_iter();
        let ticket = self.ticket(now, Purpose::Exchange { clock, tables: slabs.len() }, 0, 0);
        let (mut requests, mut lent) = (0, Vec::with_capacity(slabs.len()));
        for Slab { table, gradient, values, missing, .. } in slabs.drain(..) {
            let index = table.0 as usize;
            let landing = values.0.place();
            let local = &mut self.tables[index];
            local.pushed = Some(clock);
            let encoded = encoded.next().flatten();
            let (buffer, encoded, missing) = match encoded {
                Some(Encoded { buffer, payloads, missing }) => (buffer, Some(payloads), missing),
                None => (gradient.0.clone(), None, missing),
            };
            local.values = values.0;
            let shards = local.shard_count();
            requests += shards;
            lent.push(index);
            for shard in 0..shards {
                let shard = self.tables[index].shard(shard);
                let (buffer, encoded, missing) = (Some(buffer.clone()), encoded.clone(), missing.clone());
                let what = What::Push { buffer, rows: None, encoded, missing, want_params: true };
                self.request(Request::new(shard, index, clock, ticket, what).landing_at(landing));
            }
            self.tables[index].returned = Some(gradient.0);
        }
        *self.unacknowledged.entry(clock).or_default() += requests;
        let pending = self.tickets.get_mut(&ticket).expect("made above");
        pending.acks = requests;
        pending.answers = requests;
        pending.clock = clock + 1;
        pending.slabs = lent;
        Ok(ticket)
    }

    /// What travels instead of gradients, for tables that have a codec. It does look at them.
    fn encode_slabs(&mut self, clock: Clock, slabs: &[Slab]) -> Result<Vec<Option<Encoded>>, WorkerError> {
        let has_codec = |slab: &Slab| self.tables[slab.table.0 as usize].codecs.encodes_pushes();
        let is_whole = |slab: &Slab| slab.content == Content::Gradient && has_codec(slab);
        let odd = |slab: &&Slab| is_whole(slab) && !kernels::all_finite(slab.gradient());
        if let Some(slab) = slabs.iter().find(odd) {
            self.nonfinite += 1;
            let local = &self.tables[slab.table.0 as usize];
            if local.nonfinite == NonFinite::Reject {
                return Err(WorkerError::NonFinite { table: local.spec.name.clone(), clock });
            }
        }
        let memory = Arc::clone(&self.memory);
        let encode = |slab: &Slab| {
            let local = &mut self.tables[slab.table.0 as usize];
            let gradient = Gradient::Dense(slab.gradient());
            // Codecs that compare a gradient with the parameters find them in the slab.
            let nothing = std::mem::replace(&mut local.values, slab.values.0.clone());
            let encoded = match slab.content {
                Content::Gradient if !local.codecs.encodes_pushes() => Ok(None),
                Content::Gradient => local.encode(clock, gradient, &slab.missing, &*memory).map(Some),
                prepared => {
                    let content = (slab.gradient(), &slab.missing);
                    local.encode_prepared(clock, prepared, content, &*memory).map(Some)
                }
            };
            local.values = nothing;
            encoded
        };
        let mut done = Vec::with_capacity(slabs.len());
        let failed =
            slabs.iter().map(encode).find_map(|outcome| outcome.map(|encoded| done.push(encoded)).err());
        let Some(error) = failed else { return Ok(done) };
        // Nothing is sent: what is encoded waits to be pushed again.
        for (slab, encoded) in slabs.iter().zip(done) {
            let local = &mut self.tables[slab.table.0 as usize];
            let shards: Vec<ShardId> = local.shards().collect();
            let Some(encoded) = encoded else { continue };
            shards.into_iter().for_each(|shard| local.note_refused(clock, shard, encoded.clone()));
        }
        Err(error)
    }

    /// Forgets a ticket of an exchange and returns its slabs.
    ///
    /// After an error, answers may still be on their way into the buffers; then these are not used again, and the slabs
    /// have others.
    pub fn redeem_slabs(&mut self, ticket: Ticket) -> Vec<Slab> {
        let Some(pending) = self.tickets.remove(&ticket) else { return Vec::new() };
        let settled = pending.acks + pending.answers == 0;
        pending.slabs.into_iter().map(|index| self.take_slab(index, settled)).collect()
    }

    fn take_slab(&mut self, index: usize, settled: bool) -> Slab {
        let local = &mut self.tables[index];
        let values = local.take_values();
        let gradient = local.returned.take().unwrap_or_else(|| Arc::new(self.memory.zeroed(values.len())));
        let may_arrive = !settled && self.requests.values().any(|request| request.table == index);
        // What somebody still has stays where it is: the application may know its address.
        if may_arrive || Arc::strong_count(&values) > 1 {
            self.parked.push(values.clone());
        }
        if Arc::strong_count(&gradient) > 1 {
            self.parked.push(gradient.clone());
        }
        let [gradient, values] = [gradient, values].map(|buffer| Unique::of(buffer, &*self.memory));
        let (lender, table) = (self.config.number, TableId(index as u32));
        let (content, missing) = (Content::Gradient, Missing::default());
        Slab { lender, table, gradient, values, content, missing }
    }
}
