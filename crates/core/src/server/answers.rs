//! Pulls: put to the controller of their table, answered now, later, or ahead of the round's end.

use super::Shard;
use super::pulls::{Backlog, PendingPull};
use crate::consistency::{PullOutcome, Released};
use crate::limits;
use crate::role::{Body, Frame, Output};
use crate::types::{NodeId, TableId, Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header, Kind};

/// What became of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    Answered,
    Waits,
}

impl Shard {
    /// Puts a pull to the table's controller, which answers it now or later.
    pub(super) fn ask(&mut self, now: Time, pull: PendingPull) -> Result<Asked, Fault> {
        if let Err(Backlog { pulls, rows }) = self.pulls.admits(&pull) {
            let (worker, name) = (pull.worker, &self.tables[pull.table].spec.name);
            let message = format!(
                "{worker} has {pulls} pulls of {rows} rows of table `{name}` waiting here; wait for them first"
            );
            return Err(Fault { cause: Cause::TooFarAhead, message });
        }
        let part = &mut self.tables[pull.table];
        if !part.is_initialised() {
            // Pulls that come before the initial values wait for them; they are not delayed by a condition.
            self.pulls.keep_early(pull);
            return Ok(Asked::Waits);
        }
        match part.controller.pull(now, pull.worker, pull.clock, self.pulls.next_token()) {
            PullOutcome::Answer { .. } => {
                self.answer(&pull);
                Ok(Asked::Answered)
            }
            PullOutcome::Wait => {
                self.pulls.file(pull);
                Ok(Asked::Waits)
            }
        }
    }

    /// A worker's connection is gone: it asks again for what it still wants.
    pub(super) fn cancel_pulls(&mut self, worker: WorkerId) {
        self.pulls.forget(worker);
        self.acks.forget(worker);
        for table in &mut self.tables {
            table.controller.cancel(worker);
            table.forget_answers(worker);
        }
    }

    /// The initial values are here: pulls that came before them are asked again.
    pub(super) fn answer_first_pulls(&mut self, now: Time, table: usize) {
        for pull in self.pulls.take_early(table) {
            let (worker, request) = (pull.worker, pull.request);
            if let Err(fault) = self.ask(now, pull) {
                self.refuse(worker, TableId(table as u32), request, &fault);
            }
        }
    }

    /// Advances the table as far as its pushes allow, and answers what that releases.
    pub(super) fn settle(&mut self, now: Time, table: usize) {
        loop {
            while let Some(Released { token, .. }) = self.tables[table].controller.poll_released() {
                if let Some(pull) = self.pulls.take(token) {
                    self.answer(&pull);
                }
            }
            if self.tables[table].advance(now, &mut self.accumulators).is_none() {
                break;
            }
        }
        let at = self.tables[table].controller.next_timeout();
        if at != self.timer_of[table] {
            let before = std::mem::replace(&mut self.timer_of[table], at);
            before.map(|before| self.timers.remove(&(before, table)));
            at.map(|at| self.timers.insert((at, table)));
        }
    }

    /// The chunk of this push's frame has its values of the next version: those who wait for it get it now.
    pub(super) fn answer_ahead(&mut self, table: usize, pushed: &Header) {
        let Shard { tables, outputs, groups, bytes_pulled, .. } = self;
        let part = &mut tables[table];
        let mut ahead = std::mem::take(&mut part.ahead);
        let mut header = Header::new(Kind::Params);
        header.table = pushed.table;
        header.clock = pushed.clock.saturating_add(1);
        header.epoch = pushed.epoch;
        header.part = pushed.part;
        ahead.send_next(pushed.clock, pushed.part as usize, |answer| {
            // An aggregator gets one answer for many.
            let is_direct = groups.is_direct(answer.worker);
            if is_direct {
                header.request = answer.request;
                let place = (table, pushed.part as usize);
                let to = NodeId::Worker(answer.worker);
                let frame = part.answer_frame(place, to, header, answer.landing);
                *bytes_pulled += u64::from(frame.header.payload_bytes);
                outputs.push_back(Output::Send { to, frame });
            }
            is_direct
        });
        part.ahead = ahead;
    }

    /// Sends a table's parameters, or the rows that were asked for; without the chunks that were sent ahead.
    pub(super) fn answer(&mut self, pull: &PendingPull) {
        let edition = if pull.rows.is_none() { self.edition(pull) } else { None };
        let sent = self.tables[pull.table].ahead.take(pull.worker, pull.request);
        let part = &mut self.tables[pull.table];
        let mut header = Header::new(Kind::Params);
        header.table = TableId(pull.table as u32);
        header.clock = pull.clock;
        header.version = part.controller.state().v_train();
        header.request = pull.request;
        header.epoch = self.plan.as_ref().map_or(0, |plan| plan.epoch);
        let to = self.groups.address(pull.worker);
        let mut send = |mut frame: Frame, last: bool| {
            let flags = frame.header.flags;
            frame.header.flags = if last { flags.with(Flags::LAST) } else { flags };
            self.bytes_pulled += u64::from(frame.header.payload_bytes);
            self.outputs.push_back(Output::Send { to, frame });
        };
        match &pull.rows {
            None if edition.is_some_and(|edition| edition.is_same) => {
                header.flags = Flags::SAME;
                header.rows = edition.map_or(0, |edition| edition.number);
                send(Frame { header, body: Body::Empty }, true);
            }
            None => {
                header.rows = edition.map_or(0, |edition| edition.number);
                let count = part.chunks().len();
                for index in sent..count {
                    header.part = index as u32;
                    let frame = part.answer_frame((pull.table, index), to, header, pull.landing);
                    send(frame, index + 1 == count);
                }
            }
            Some(rows) => {
                header.flags = Flags::ROWS;
                let rows_per_part = (limits::BLOCK_ELEMENTS / part.row_width()).max(1);
                let count = rows.len().div_ceil(rows_per_part).max(1);
                for index in 0..count {
                    let begin = index * rows_per_part;
                    let some = &rows[begin..rows.len().min(begin + rows_per_part)];
                    header.part = index as u32;
                    header.rows = some.len() as u32;
                    let (bytes, encoded) = part.answer_rows(some);
                    header.flags = if encoded { Flags::ROWS.with(Flags::ENCODED) } else { Flags::ROWS };
                    header.payload_bytes = bytes.len() as u32;
                    send(Frame { header, body: Body::Bytes(bytes) }, index + 1 == count);
                }
            }
        }
    }
}
