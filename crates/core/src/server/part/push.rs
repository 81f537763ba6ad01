//! Taking a push frame by frame: each is checked, and put where the consistency controller says.

use super::step::{Units, open_round};
use super::{LocalChunk, TablePart};
use crate::consistency::Admit;
use crate::kernels;
use crate::limits;
use crate::server::rounds::{Piece, Staged};
use crate::table::{NonFinite, Order};
use crate::types::{Clock, Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};

/// A push that is under way.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) clock: Clock,
    /// Where its gradients go; decided anew when the round they went to closes in the middle of the push.
    pub(super) admit: Admit,
    /// Frames before this one were taken; a resent push starts again at 0 and is skipped up to here.
    next_part: u32,
    /// A frame of this attempt was refused; the rest of the attempt is ignored.
    refused: bool,
    squared_norm: f64,
    /// Kept whole until the push is complete: for ranked addition, or when the optimizer needs its norm.
    pub(super) staged: Staged,
}

/// What became of a push frame.
#[derive(Debug, PartialEq)]
pub(in crate::server) enum Taken {
    /// More frames of this push are to come, or this one was seen before.
    Partly,
    /// The push is complete: it counts, and is acknowledged. Also for one that was complete before.
    Whole,
}

impl TablePart {
    /// Takes one frame of a push. After [`Taken::Whole`] the caller settles the table.
    pub(in crate::server) fn push(
        &mut self,
        now: Time,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
    ) -> Result<Taken, Fault> {
        let admit = match self.incoming.get(&worker) {
            Some(incoming) if incoming.clock == header.clock => self.readmit(worker),
            _ => self.begin_push(worker, header.clock)?,
        };
        let last = header.flags.has(Flags::LAST);
        if admit == Admit::Duplicate {
            return Ok(if last { Taken::Whole } else { Taken::Partly });
        }
        let incoming = self.incoming.get_mut(&worker).expect("begun above");
        if header.part == 0 {
            incoming.refused = false;
        }
        if incoming.refused || header.part < incoming.next_part {
            return Ok(Taken::Partly);
        }
        if header.part > incoming.next_part {
            return Err(self.refuse(worker, Cause::Protocol, "frames of a push are missing".into()));
        }
        if let Err(fault) = self.take_piece(worker, admit, header, payload) {
            return Err(self.refuse(worker, fault.cause, fault.message));
        }
        let incoming = self.incoming.get_mut(&worker).expect("begun above");
        incoming.next_part += 1;
        if !last {
            return Ok(Taken::Partly);
        }
        self.complete_push(now, worker);
        Ok(Taken::Whole)
    }

    fn begin_push(&mut self, worker: WorkerId, clock: Clock) -> Result<Admit, Fault> {
        let table = &self.spec.name;
        let admit = self.controller.admit(worker, clock);
        match admit {
            Admit::Duplicate => return Ok(admit),
            Admit::TooFarAhead => {
                let version = self.controller.state().v_train();
                let message = format!(
                    "{worker} pushed clock {clock} of table `{table}`, which is at version {version}; at most {} \
                     rounds ahead are kept: wait for a pull before pushing on",
                    limits::MAX_ROUNDS_AHEAD
                );
                return Err(Fault { cause: Cause::TooFarAhead, message });
            }
            Admit::UnknownWorker => {
                let message = format!("{worker} is no member of this job any more (declared dead, or left)");
                return Err(Fault { cause: Cause::NotAMember, message });
            }
            Admit::Now | Admit::Round(_) | Admit::Late => {}
        }
        let incoming = Incoming {
            clock,
            admit,
            next_part: 0,
            refused: false,
            squared_norm: 0.0,
            staged: Staged::default(),
        };
        self.incoming.insert(worker, incoming);
        Ok(admit)
    }

    /// Where the next piece of a push under way goes. A round that closed meanwhile took its earlier pieces with it.
    fn readmit(&mut self, worker: WorkerId) -> Admit {
        let incoming = self.incoming.get_mut(&worker).expect("the push is under way");
        if let Admit::Round(clock) = incoming.admit
            && clock < self.controller.state().v_train()
        {
            incoming.admit = self.controller.admit(worker, incoming.clock);
        }
        incoming.admit
    }

    fn refuse(&mut self, worker: WorkerId, cause: Cause, message: String) -> Fault {
        if let Some(incoming) = self.incoming.get_mut(&worker) {
            incoming.refused = true;
        }
        Fault { cause, message }
    }

    /// Checks one frame's payload and puts it where it belongs.
    fn take_piece(
        &mut self,
        worker: WorkerId,
        admit: Admit,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let chunk = if payload.is_empty() && header.flags.has(Flags::ROWS) {
            // A sparse push that touches nothing here still counts for the worker's progress.
            return Ok(());
        } else {
            self.chunk(header.chunk)?
        };
        let Some(words) = crate::store::floats(payload) else {
            return Err(self.shape_fault(format!("a payload of {} bytes", payload.len())));
        };
        let piece = if header.flags.has(Flags::ROWS) {
            self.rows_piece(chunk, header.rows as usize, payload)?
        } else {
            self.expect_length(words.len(), chunk.len)?;
            Piece::Dense { start: chunk.start, values: words }
        };
        if kernels::all_finite(piece.values()) {
            return self.put_piece(worker, admit, chunk, piece);
        }
        self.nonfinite += 1;
        match self.policy.nonfinite {
            NonFinite::Reject => {
                let message = format!(
                    "the gradient that {worker} pushed for table `{}` at clock {} has NaN or Inf in chunk {}; \
                     it was not applied (nonfinite=reject)",
                    self.spec.name, header.clock, chunk.number
                );
                Err(Fault { cause: Cause::NonFinite, message })
            }
            NonFinite::Clip => {
                let mut clipped = piece.values().to_vec();
                kernels::clip_non_finite(&mut clipped);
                let piece = match piece {
                    Piece::Dense { start, .. } => Piece::Dense { start, values: &clipped },
                    Piece::Rows { start, rows, width, .. } => {
                        Piece::Rows { start, rows, width, values: &clipped }
                    }
                };
                self.put_piece(worker, admit, chunk, piece)
            }
        }
    }

    fn put_piece(
        &mut self,
        worker: WorkerId,
        admit: Admit,
        chunk: LocalChunk,
        piece: Piece<'_>,
    ) -> Result<(), Fault> {
        let incoming = self.incoming.get_mut(&worker).expect("a piece belongs to a push under way");
        if self.controller.policy().model.wants_significance() {
            incoming.squared_norm += kernels::squared_norm(piece.values());
        }
        match admit {
            Admit::Round(_) if self.policy.order == Order::Ranked => incoming.staged.keep(piece),
            Admit::Round(clock) => {
                let units = Units::new(&self.spec, &self.chunks);
                let round = open_round(&mut self.rounds, &mut self.spare, clock, units);
                piece.for_each_range(|start, values| round.add(units.at(start), start, values));
            }
            Admit::Now if self.optimizer.needs_norms() => incoming.staged.keep(piece),
            Admit::Now => self.step_piece(chunk.number, piece),
            Admit::Late | Admit::Duplicate | Admit::TooFarAhead | Admit::UnknownWorker => {}
        }
        Ok(())
    }

    fn complete_push(&mut self, now: Time, worker: WorkerId) {
        self.readmit(worker);
        let incoming = self.incoming.remove(&worker).expect("a push completes once");
        let parameter_norm = || kernels::squared_norm(self.parameters.as_slice()).sqrt();
        let significance = self
            .controller
            .policy()
            .model
            .wants_significance()
            .then(|| incoming.squared_norm.sqrt() / parameter_norm().max(f64::MIN_POSITIVE));
        if incoming.admit == Admit::Now && !incoming.staged.is_empty() {
            let squared: f64 =
                incoming.staged.ranges().map(|(_, values)| kernels::squared_norm(values)).sum();
            let parameter_norm = parameter_norm();
            for chunk in &mut self.chunks {
                chunk.steps += 1;
            }
            let steps = self.chunks.first().map_or(1, |chunk| chunk.steps);
            let input = self.arrival_input(steps, parameter_norm, squared.sqrt());
            for (start, values) in incoming.staged.ranges() {
                self.step_range(&input, start, values);
            }
        }
        self.controller.push(now, worker, incoming.clock, incoming.admit, significance);
        if let Admit::Round(clock) = incoming.admit
            && !incoming.staged.is_empty()
        {
            let units = Units::new(&self.spec, &self.chunks);
            open_round(&mut self.rounds, &mut self.spare, clock, units).stage(worker, incoming.staged);
        }
    }

    fn rows_piece<'a>(&self, chunk: LocalChunk, rows: usize, payload: &'a [u8]) -> Result<Piece<'a>, Fault> {
        let expected = rows.checked_mul((1 + self.width) * 4);
        if !self.spec.rows || expected != Some(payload.len()) {
            return Err(self.shape_fault(format!("{rows} rows in {} bytes", payload.len())));
        }
        let (numbers, values) = payload.split_at(rows * 4);
        let numbers: &[u32] = bytemuck::try_cast_slice(numbers)
            .map_err(|_| self.shape_fault("unaligned row numbers".into()))?;
        let ascending = numbers.windows(2).all(|pair| pair[0] < pair[1]);
        let in_range = numbers.last().is_none_or(|&row| (row as usize) < chunk.len / self.width);
        if !ascending || !in_range {
            return Err(self.shape_fault("row numbers out of order or out of range".into()));
        }
        let values = crate::store::floats(values).expect("four-byte words follow four-byte words");
        Ok(Piece::Rows { start: chunk.start, rows: numbers, width: self.width, values })
    }
}
