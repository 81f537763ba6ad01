//! The tables of a shard, and what they share.

use super::accumulators::Accumulators;
use super::cuts::{CutOutcome, Cuts};
use super::delivery::Delivery;
use super::image::TableImage;
use super::table_shard::TableShard;
use super::timers::Timers;
use crate::checkpoint::{TableCut, Wanted};
use crate::consistency::SyncPolicy;
use crate::intake::{PushFrame, Taken};
use crate::prng::Prng;
use crate::registry::Registry;
use crate::status::TableReport;
use crate::types::{AggregatorId, Clock, ShardId, TableId, Time, WorkerId};
use crate::wire::frame::{Subject, Sum};
use crate::wire::{Cause, Fault, IdleWorker, Member, Plan, Standing};

/// The tables of a shard by number, the memory that sums of all of them are made in, and the time-outs of their controllers.
#[derive(Debug, Default)]
pub(super) struct Tables {
    tables: Vec<TableShard>,
    accumulators: Accumulators,
    timers: Timers,
    /// Whether worker 0, which evaluates conditions, can be asked.
    has_judge: bool,
    bytes_pushed: u64,
    /// A checkpoint for which tables are to be copied.
    cuts: Option<Cuts>,
}

impl Tables {
    /// The tables that a plan puts onto a shard.
    pub(super) fn of_plan(registry: &Registry, plan: &Plan, shard: ShardId) -> Result<Tables, String> {
        let originals = || plan.live_members().filter(|member| plan.is_original(member));
        let first = plan.first_clock();
        let mut tables = Tables::default();
        for (number, (spec, chunks)) in (0u32..).zip(plan.tables.iter().zip(&plan.chunks())) {
            let own =
                (0u32..).zip(chunks).filter(|(_, chunk)| chunk.shard == shard).map(|(n, chunk)| (n, *chunk));
            let policy = plan.policy_of(TableId(number), shard.server);
            let seed = seed_of_table(plan.seed, shard, number);
            let workers = originals().map(|member| member.worker);
            let mut table = TableShard::new(registry, spec.clone(), policy, own, workers, seed)
                .map_err(|error| format!("table `{}`: {error}", spec.name))?;
            if first > 0 {
                table.begin_at(first);
            }
            tables.tables.push(table.valid_since(plan.valid_from(TableId(number))));
        }
        for &Member { worker, standing, .. } in &plan.members {
            match standing {
                Standing::Left => {}
                Standing::From(clock) if clock == first => {}
                Standing::From(clock) => {
                    tables.join(worker, false);
                    tables.set_first_clock(worker, clock);
                }
                Standing::Joining => tables.join(worker, false),
            }
        }
        Ok(tables)
    }

    pub(super) fn images(&self) -> Vec<TableImage> {
        self.iter().map(TableShard::image).collect()
    }

    /// Become the tables that images were made of; the plan is the same. The error says why they cannot, and they are of no use
    /// then.
    pub(super) fn restore(&mut self, registry: &Registry, images: Vec<TableImage>) -> Result<(), String> {
        if images.len() != self.len() {
            return Err(format!("the image has {} tables, and its plan {}", images.len(), self.len()));
        }
        for (number, (table, image)) in self.tables.iter_mut().zip(images).enumerate() {
            let restored = table.restore(registry, image, &mut self.accumulators);
            restored.map_err(|why| format!("table `{}`: {why}", table.spec().name))?;
            self.timers.set(number, table.next_timeout());
        }
        Ok(())
    }

    /// Sets how many bytes of gradients were received.
    pub(super) fn set_bytes_pushed(&mut self, bytes: u64) {
        self.bytes_pushed = bytes;
    }

    /// The index of a frame's table, if this shard holds chunks of it and the frame's epoch is one from the table's
    /// [`Plan::valid_from`] to `newest`.
    #[inline]
    pub(super) fn place(&self, subject: &Subject, newest: u32) -> Result<usize, Fault> {
        let place = subject.table.0 as usize;
        match self.tables.get(place) {
            Some(table) if table.elements() > 0 && (table.valid_from()..=newest).contains(&subject.epoch) => {
                Ok(place)
            }
            table => Err(self.misplaced(table, subject, newest)),
        }
    }

    /// The same for a sum of gradients, which may be of an epoch before `valid_from`.
    pub(super) fn place_sum(&self, subject: &Subject, newest: u32) -> Result<usize, Fault> {
        let place = subject.table.0 as usize;
        match self.tables.get(place) {
            Some(table) if table.elements() > 0 && subject.epoch <= newest => Ok(place),
            table => Err(self.misplaced(table, subject, newest)),
        }
    }

    #[cold]
    fn misplaced(&self, table: Option<&TableShard>, subject: &Subject, newest: u32) -> Fault {
        let shape = |message| Fault { cause: Cause::Shape, message };
        let Some(table) = table else {
            let (number, count) = (subject.table.0, self.tables.len());
            return shape(format!("table {number} does not exist; the job has {count}"));
        };
        let name = &table.spec().name;
        if table.elements() == 0 {
            return shape(format!("nothing of table `{name}` is on this server"));
        }
        let (epoch, valid_from) = (subject.epoch, table.valid_from());
        let message = format!(
            "the frame is of epoch {epoch}; frames of table `{name}` are valid from epoch {valid_from} on, and the job is \
             in {newest}"
        );
        Fault { cause: Cause::StaleEpoch, message }
    }

    /// A worker joins: no round after the open one of each table closes without it from now on, nor that one if nothing of it is
    /// here. What aggregators hold of it is unknown: `may_be_held` says that there are some.
    pub(super) fn join(&mut self, worker: WorkerId, may_be_held: bool) {
        self.tables.iter_mut().for_each(|table| table.join(worker, may_be_held));
    }

    /// The first clock that a worker which joined could push to all tables here.
    pub(super) fn first_clock(&self, worker: WorkerId) -> Clock {
        let tables = self.tables.iter().filter(|table| table.elements() > 0);
        tables.filter_map(|table| table.first_clock(worker)).max().unwrap_or(0)
    }

    /// A worker that joined owes nothing before this clock. The tables are to be settled then.
    pub(super) fn set_first_clock(&mut self, worker: WorkerId, clock: Clock) {
        self.tables.iter_mut().for_each(|table| table.set_first_clock(worker, clock));
    }

    /// These workers, and no others, are idle: no round waits for them, as far as they are. Returns the newest version of a table.
    pub(super) fn set_idle(&mut self, now: Time, idle: &[IdleWorker], delivery: &mut Delivery) -> Clock {
        let idle: Vec<(WorkerId, Clock)> = idle.iter().map(|idle| (idle.worker, idle.until)).collect();
        self.tables.iter_mut().for_each(|table| table.set_idle(&idle));
        self.settle_all(now, delivery);
        self.iter().map(TableShard::version).max().unwrap_or(0)
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

    /// Takes the sum of these workers' gradients of one chunk; see [`TableShard::push_sum`].
    pub(super) fn push_sum(
        &mut self,
        table: usize,
        from: AggregatorId,
        sum: &Sum,
        contributors: &[WorkerId],
        payload: &[u8],
    ) -> Result<Option<WorkerId>, Fault> {
        self.tables[table].push_sum(from, sum, contributors, payload, &mut self.accumulators)
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
        let release = |settled: &mut TableShard, delivery: &mut Delivery| {
            while let Some(released) = settled.poll_released() {
                delivery.release(&released, settled);
            }
        };
        release(settled, delivery);
        while settled.advance(now, &mut self.accumulators).is_some() {
            // Before anything of the next round is in the parameters.
            if let Some(cuts) = &mut self.cuts {
                cuts.version_exists(table, settled);
            }
            delivery.version_exists(now, TableId(table as u32), settled);
            release(settled, delivery);
        }
        // The last word on a pull may have come too late.
        release(settled, delivery);
        while let Some(question) = settled.poll_question() {
            delivery.ask(TableId(table as u32), question);
        }
        self.timers.set(table, settled.next_timeout());
    }

    /// Copies every table when its version is this one, or those that are left now. Copies of an earlier checkpoint are given up.
    pub(super) fn begin_cuts(&mut self, at: Clock, takes_all: bool) {
        self.cuts = Some(Cuts::new(at, takes_all, &self.tables));
    }

    /// No table gets as far as the checkpoint any more that is not there yet.
    pub(super) fn take_all_cuts(&mut self) {
        if let Some(cuts) = &mut self.cuts {
            cuts.take_all(&self.tables);
        }
    }

    /// Whether [`Tables::poll_cuts`] has something.
    #[inline]
    pub(super) fn has_cuts(&self) -> bool {
        self.cuts.as_ref().is_some_and(Cuts::is_over)
    }

    /// What came of the copies.
    pub(super) fn poll_cuts(&mut self) -> Option<CutOutcome> {
        self.cuts.take_if(|cuts| cuts.is_over()).map(Cuts::into_outcome)
    }

    /// What the tables need of a checkpoint, for those of which something is here.
    pub(super) fn wanted(&self) -> Vec<Wanted> {
        self.iter().filter(|table| table.elements() > 0).map(TableShard::wanted).collect()
    }

    /// Takes what [`Tables::wanted`] asked for.
    pub(super) fn take_pieces(&mut self, pieces: &[Vec<TableCut>]) -> Result<(), String> {
        let tables = self.tables.iter_mut().filter(|table| table.elements() > 0);
        for (number, table) in tables.enumerate() {
            table.take_pieces(pieces.get(number).map_or(&[], Vec::as_slice))?;
        }
        Ok(())
    }

    /// The newest version of a table.
    pub(super) fn newest_version(&self) -> Clock {
        let held = self.iter().filter(|table| table.elements() > 0);
        held.map(TableShard::version).max().unwrap_or(0)
    }

    /// A pull was answered: the worker that asked begins an iteration, and the open round may wait for it longer.
    pub(super) fn note_answer(&mut self, table: usize) {
        self.timers.set(table, self.tables[table].next_timeout());
    }

    /// A worker's connection is gone: its pulls are forgotten, and with them what they wait for.
    pub(super) fn lose_worker(&mut self, worker: WorkerId) {
        for (number, table) in self.tables.iter_mut().enumerate() {
            table.lose_worker(worker);
            self.timers.set(number, table.next_timeout());
        }
    }

    /// Worker 0, which evaluates conditions, is there or gone.
    pub(super) fn set_judge(&mut self, now: Time, is_here: bool, delivery: &mut Delivery) {
        if std::mem::replace(&mut self.has_judge, is_here) != is_here {
            self.tables.iter_mut().for_each(|table| table.set_judge(now, is_here));
            self.settle_all(now, delivery);
        }
    }

    /// Settles all tables.
    pub(super) fn settle_all(&mut self, now: Time, delivery: &mut Delivery) {
        (0..self.tables.len()).for_each(|table| self.settle(now, table, delivery));
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

    /// How the tables stand of which this shard has a part.
    pub(super) fn reports(&self, now: Time) -> Vec<TableReport> {
        self.iter().filter(|table| table.elements() > 0).map(|table| table.report(now)).collect()
    }

    /// Gradients with NaN or Inf.
    pub(super) fn nonfinite(&self) -> u64 {
        self.iter().map(|table| table.nonfinite()).sum()
    }

    /// Whether gradients are here that no step was made with yet.
    pub(super) fn are_in_a_round(&self) -> bool {
        self.tables.iter().any(TableShard::is_in_a_round)
    }

    /// Whether sums of gradients are here that no step was made with yet.
    pub(super) fn have_sums(&self) -> bool {
        self.tables.iter().any(|table| table.accumulators() > 0)
    }

    /// Bytes of gradients that were received.
    pub(super) fn bytes_pushed(&self) -> u64 {
        self.bytes_pushed
    }

    /// Bytes held for parameters, accumulators and optimizer state.
    pub(super) fn memory_bytes(&self) -> usize {
        self.tables.iter().map(TableShard::memory_bytes).sum::<usize>() + self.accumulators.memory_bytes()
    }

    /// Checks the invariants; the error names the one that does not hold.
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

/// The dice of a table's consistency model on one shard follow from the job's seed, and from nothing that happens.
fn seed_of_table(seed: u64, shard: ShardId, table: u32) -> u64 {
    let label = u64::from(shard.server.0) << 40 | u64::from(shard.core) << 32 | u64::from(table);
    Prng::fork(seed, label).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::ServerId;
    use std::collections::BTreeSet;

    #[test]
    fn every_table_has_dice_of_its_own_on_every_shard_and_the_same_in_every_run() {
        let seed = |server, core, table| seed_of_table(42, ShardId { server: ServerId(server), core }, table);
        assert_eq!((seed(0, 0, 0), seed(3, 2, 5)), (15021278609987233951, 1890440090343424793));
        let all: BTreeSet<u64> = (0..64).map(|at| seed(at / 16, at / 4 % 4, at % 4)).collect();
        assert_eq!(all.len(), 64);
    }
}
