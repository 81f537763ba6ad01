//! The tables of a shard, and what they share.

use super::accumulators::Accumulators;
use super::delivery::Delivery;
use super::table_shard::TableShard;
use super::timers::Timers;
use crate::consistency::SyncPolicy;
use crate::intake::{PushFrame, Taken};
use crate::types::{AggregatorId, TableId, Time};
use crate::wire::frame::Sum;
use crate::wire::{Cause, Fault};

/// The tables of a shard by number, the memory that sums of all of them are made in, and the time-outs of their controllers.
#[derive(Debug, Default)]
pub(super) struct Tables {
    tables: Vec<TableShard>,
    accumulators: Accumulators,
    timers: Timers,
    bytes_pushed: u64,
}

impl Tables {
    pub(super) fn new(tables: Vec<TableShard>) -> Tables {
        Tables { tables, ..Tables::default() }
    }

    /// The place of a table that something of is on this shard.
    #[inline]
    pub(super) fn place(&self, id: TableId) -> Result<usize, Fault> {
        let fault = |message| Err(Fault { cause: Cause::Shape, message });
        let place = id.0 as usize;
        match self.tables.get(place) {
            None => fault(format!("table {place} does not exist; the job has {}", self.tables.len())),
            Some(table) if table.elements() == 0 => {
                fault(format!("nothing of table `{}` is on this server", table.spec().name))
            }
            Some(_) => Ok(place),
        }
    }

    #[inline]
    pub(super) fn get(&self, table: usize) -> &TableShard {
        &self.tables[table]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, table: usize) -> &mut TableShard {
        &mut self.tables[table]
    }

    pub(super) fn find(&self, id: TableId) -> Option<&TableShard> {
        self.tables.get(id.0 as usize)
    }

    pub(super) fn len(&self) -> usize {
        self.tables.len()
    }

    /// A table whose initial values are not all here.
    pub(super) fn without_values(&self) -> Option<TableId> {
        let lacks = |table: &TableShard| table.elements() > 0 && !table.is_initialised();
        (0..).map(TableId).zip(self.iter()).find(|(_, table)| lacks(table)).map(|(id, _)| id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &TableShard> {
        self.tables.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut TableShard> {
        self.tables.iter_mut()
    }

    /// Takes one frame of a push. After [`Taken::Whole`] the table is to be settled.
    pub(super) fn push(&mut self, table: usize, frame: &PushFrame<'_>) -> Result<Taken, Fault> {
        self.bytes_pushed += frame.payload.len() as u64;
        self.tables[table].push(frame, &mut self.accumulators)
    }

    /// Takes the sum of some workers' gradients of one chunk.
    pub(super) fn push_sum(
        &mut self,
        table: usize,
        from: AggregatorId,
        sum: &Sum,
        payload: &[u8],
    ) -> Result<(), Fault> {
        self.tables[table].push_sum(from, sum, payload, &mut self.accumulators)
    }

    /// Counts what came with a sum, whether it is taken or not.
    pub(super) fn count_bytes(&mut self, payload: &[u8]) {
        self.bytes_pushed += payload.len() as u64;
    }

    /// Switches a table's consistency model. The table is to be settled then.
    pub(super) fn set_sync(&mut self, now: Time, table: usize, sync: SyncPolicy) {
        self.tables[table].set_sync(now, sync, &mut self.accumulators);
    }

    /// Advances a table as far as its pushes allow, and answers the pulls that this releases.
    pub(super) fn settle(&mut self, now: Time, table: usize, delivery: &mut Delivery) {
        let settled = &mut self.tables[table];
        loop {
            while let Some(token) = settled.poll_released() {
                delivery.release(token, settled);
            }
            if settled.advance(now, &mut self.accumulators).is_none() {
                break;
            }
        }
        self.timers.set(table, settled.next_timeout());
    }

    /// Settles the tables whose time has come.
    pub(super) fn settle_due(&mut self, now: Time, delivery: &mut Delivery) {
        while let Some(table) = self.timers.take_due(now) {
            self.settle(now, table, delivery);
        }
    }

    /// When [`Tables::settle_due`] wants to be called.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Bytes of gradients that were received.
    pub(super) fn bytes_pushed(&self) -> u64 {
        self.bytes_pushed
    }

    /// Bytes held for parameters, accumulators and optimizer state.
    pub(super) fn memory_bytes(&self) -> usize {
        self.tables.iter().map(TableShard::memory_bytes).sum::<usize>() + self.accumulators.memory_bytes()
    }

    /// What does not hold although it always should.
    pub(super) fn check(&self) -> Result<(), String> {
        self.timers.check()?;
        for (number, table) in self.tables.iter().enumerate() {
            table.check().map_err(|why| format!("table `{}`: {why}", table.spec().name))?;
            let (timer, timeout) = (self.timers.of(number), table.next_timeout());
            if timer != timeout {
                return Err(format!(
                    "table `{}` wants to be settled at {timeout:?}, and its timer is set to {timer:?}",
                    table.spec().name
                ));
            }
        }
        let used: usize = self.tables.iter().map(TableShard::accumulators).sum();
        if used != self.accumulators.taken() {
            let taken = self.accumulators.taken();
            return Err(format!("{taken} accumulators are in use, and {used} hold sums"));
        }
        Ok(())
    }
}
