//! Taking a push frame by frame: each is checked, and put where the consistency controller says.

use super::step::Units;
use super::under_way::Incoming;
use super::{LocalChunk, TablePart};
use crate::absence::Absent;
use crate::consistency::Admit;
use crate::kernels::{self, Values};
use crate::limits;
use crate::policy::{NonFinite, Order};
use crate::server::rounds::{Accumulators, Piece};
use crate::types::{Clock, Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};

/// What became of a push frame.
#[derive(Debug, PartialEq)]
pub(in crate::server) enum Taken {
    /// More frames of this push are to come, or this one was seen before.
    Partly,
    /// The same; and the chunk of this frame has its part of the round's step.
    Stepped,
    /// The push is complete: it counts, and is acknowledged. Also for one that was complete before.
    Whole,
}

/// What is to be done with a push frame.
enum Next {
    /// It is the next one: what it brings goes there.
    Take(Admit),
    /// Nothing of it is needed.
    Pass(Taken),
}

impl TablePart {
    /// Takes one frame of a push. After [`Taken::Whole`] the caller settles the table.
    pub(in crate::server) fn push(
        &mut self,
        now: Time,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
        accumulators: &mut Accumulators,
    ) -> Result<Taken, Fault> {
        let admit = match self.next_frame(now, worker, header)? {
            Next::Take(admit) => admit,
            Next::Pass(taken) => return Ok(taken),
        };
        if header.flags.has(Flags::ABSENT) {
            return self.push_absent(now, worker, (header, payload), admit, accumulators);
        }
        if header.flags.has(Flags::ENCODED) {
            return self.push_encoded(now, worker, (header, payload), admit, accumulators);
        }
        let piece = self.check_piece(worker, header, payload);
        self.take_piece(now, worker, header, admit, piece, accumulators)
    }

    /// Takes one frame of a push that does not have all of its chunk.
    fn push_absent(
        &mut self,
        now: Time,
        worker: WorkerId,
        (header, payload): (&Header, &[u8]),
        admit: Admit,
        accumulators: &mut Accumulators,
    ) -> Result<Taken, Fault> {
        let chunk = self.check_kind(header).and_then(|()| self.chunk_in_turn(header));
        let read = chunk.and_then(|chunk| {
            let (absent, values) = self.read_absent(&worker, (header, payload), chunk.len)?;
            Ok((chunk, absent, values))
        });
        let (chunk, absent, values) = match read {
            Ok(read) => read,
            Err(fault) => return self.refuse_once(worker, header, fault),
        };
        let index = header.part as usize;
        let values = Values::F32(&values).into();
        let piece = Piece::Dense { index, start: chunk.start, values, absent: &absent };
        let piece = self.check_finite(worker, header, piece).map(|()| Some((index, piece)));
        self.take_piece(now, worker, header, admit, piece, accumulators)
    }

    /// Whether a frame is the next one of a push that is wanted. Nobody looks at what others bring.
    fn next_frame(&mut self, now: Time, worker: WorkerId, header: &Header) -> Result<Next, Fault> {
        let admit = match self.admit(worker, header.clock) {
            Ok(admit) => admit,
            Err(fault) => return self.refuse_once(worker, header, fault).map(Next::Pass),
        };
        let last = header.flags.has(Flags::LAST);
        if admit == Admit::Duplicate {
            if last {
                self.controller.push(now, worker, header.clock, admit, None);
            }
            return Ok(Next::Pass(if last { Taken::Whole } else { Taken::Partly }));
        }
        let expected = match self.under_way(worker, header.clock) {
            Some(incoming) => {
                incoming.admit = admit;
                incoming.refused &= header.part > 0;
                if incoming.refused { u32::MAX } else { incoming.next_part }
            }
            None => 0,
        };
        if header.part < expected {
            return Ok(Next::Pass(Taken::Partly));
        }
        if header.part > expected {
            let message = format!("frames of a push of table `{}` are missing", self.spec.name);
            let fault = Fault { cause: Cause::Protocol, message };
            return self.refuse_once(worker, header, fault).map(Next::Pass);
        }
        Ok(Next::Take(admit))
    }

    /// Takes what the next frame of a push brings, unless that was found wrong.
    pub(super) fn take_piece(
        &mut self,
        now: Time,
        worker: WorkerId,
        header: &Header,
        admit: Admit,
        piece: Result<Option<(usize, Piece<'_>)>, Fault>,
        accumulators: &mut Accumulators,
    ) -> Result<Taken, Fault> {
        let piece = match piece {
            Ok(piece) => piece,
            Err(fault) => return self.refuse_once(worker, header, fault),
        };
        // Only a frame that is taken begins a push, and gives up one that was under way.
        let incoming = match self.incoming.get(worker).is_some_and(|push| push.clock == header.clock) {
            true => self.incoming.get_mut(worker).expect("it is under way"),
            false => self.incoming.begin(Incoming::new(worker, header.clock, admit)),
        };
        incoming.next_part += 1;
        incoming.last_chunk = Some(header.chunk);
        if header.part == 0 && header.flags.has(Flags::WANT_PARAMS) && !self.spec.rows {
            self.ahead.begin(worker, header);
        }
        let last = header.flags.has(Flags::LAST);
        let is_stepped =
            piece.is_some_and(|(chunk, piece)| self.put_checked(worker, chunk, piece, last, accumulators));
        if !last {
            return Ok(if is_stepped { Taken::Stepped } else { Taken::Partly });
        }
        self.complete_push(now, worker);
        Ok(Taken::Whole)
    }

    /// The push of this clock, if it is the one that this worker is at.
    fn under_way(&mut self, worker: WorkerId, clock: Clock) -> Option<&mut Incoming> {
        self.incoming.get_mut(worker).filter(|incoming| incoming.clock == clock)
    }

    /// Where a push's next piece goes: decided at its first, and anew when the round that it went to has closed.
    fn admit(&self, worker: WorkerId, clock: Clock) -> Result<Admit, Fault> {
        let v_train = self.controller.state().v_train();
        let under_way = self.incoming.get(worker).map(|incoming| (incoming.clock, incoming.admit));
        let admit = match under_way {
            Some((same, Admit::Round(round))) if same == clock && round >= v_train => Admit::Round(round),
            Some((same, admit @ (Admit::Now | Admit::Late))) if same == clock => admit,
            _ => self.controller.admit(worker, clock),
        };
        let fault = |cause, message| Err(Fault { cause, message });
        let table = &self.spec.name;
        if !self.is_initialised() {
            // What is pushed now would be written over.
            return fault(
                Cause::Protocol,
                format!("table `{table}` has no initial values yet; pull it first"),
            );
        }
        match (admit, under_way) {
            (Admit::Duplicate, _) => Ok(admit),
            (Admit::TooFarAhead, _) => {
                let message = format!(
                    "{worker} pushed clock {clock} of table `{table}`, which is at version {v_train}; at most {} \
                     rounds ahead are kept: wait for a pull before pushing on",
                    limits::MAX_ROUNDS_AHEAD
                );
                fault(Cause::TooFarAhead, message)
            }
            (Admit::UnknownWorker, _) => {
                let message = format!("{worker} is no member of this job any more (declared dead, or left)");
                fault(Cause::NotAMember, message)
            }
            // Its pieces that were taken cannot be told from new ones any more; they must not be added twice.
            (_, Some((newer, _))) if newer > clock => {
                let message = format!(
                    "{worker} gave up its push of clock {clock} of table `{table}` when it began clock {newer}"
                );
                fault(Cause::Protocol, message)
            }
            (Admit::Now | Admit::Round(_) | Admit::Late, _) => Ok(admit),
        }
    }

    /// One word about a push that cannot begin, or go on, is enough: the rest of the attempt is passed over.
    pub(super) fn refuse_once(
        &mut self,
        worker: WorkerId,
        header: &Header,
        fault: Fault,
    ) -> Result<Taken, Fault> {
        // The worker waits for no answer to it any more; one that is sent ahead would be lost on it.
        self.forget_answers(worker);
        let told = match self.under_way(worker, header.clock) {
            Some(incoming) => std::mem::replace(&mut incoming.refused, true),
            None => true,
        };
        if told && header.part > 0 { Ok(Taken::Partly) } else { Err(fault) }
    }

    /// Rows are pushed of tables that have some, and chunks of the others.
    pub(super) fn check_kind(&self, header: &Header) -> Result<(), Fault> {
        if self.spec.rows == header.flags.has(Flags::ROWS) {
            return Ok(());
        }
        let expected = if self.spec.rows { "single rows" } else { "whole chunks" };
        Err(self.shape_fault(format!("a push that is not one of {expected}")))
    }

    /// What a frame brings, and for which chunk: nothing when a sparse push touches nothing here.
    pub(super) fn check_piece<'a>(
        &mut self,
        worker: WorkerId,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<Option<(usize, Piece<'a>)>, Fault> {
        self.check_kind(header)?;
        let (chunk, piece) = if !self.spec.rows {
            let chunk = self.chunk_in_turn(header)?;
            let values = match header.dtype.values(payload) {
                Some(values) if values.len() == chunk.len => values,
                _ => {
                    let found = format!(
                        "{} bytes of {:?} where a chunk has {} elements",
                        payload.len(),
                        header.dtype,
                        chunk.len
                    );
                    return Err(self.shape_fault(found));
                }
            };
            let index = header.part as usize;
            let absent = Absent::NOTHING;
            (index, Piece::Dense { index, start: chunk.start, values: values.into(), absent })
        } else if payload.is_empty() && header.part == 0 && header.flags.has(Flags::LAST) {
            // It still counts for the worker's progress.
            return Ok(None);
        } else {
            let index = self.next_chunk(worker, header)?;
            (index, self.rows_piece(self.chunks[index], header, payload)?)
        };
        self.check_finite(worker, header, piece)?;
        Ok(Some((chunk, piece)))
    }

    fn check_finite(&mut self, worker: WorkerId, header: &Header, piece: Piece<'_>) -> Result<(), Fault> {
        if self.policy.nonfinite() != NonFinite::Reject || piece.values().all_finite() {
            return Ok(());
        }
        self.nonfinite += 1;
        let message = format!(
            "the gradient that {worker} pushed for table `{}` at clock {} has NaN or Inf in chunk {}; it was not \
             applied (nonfinite=reject)",
            self.spec.name, header.clock, header.chunk
        );
        Err(Fault { cause: Cause::NonFinite, message })
    }

    /// Puts a piece where it belongs, without NaN and Inf where they are to be clipped. Whether that made a step of a
    /// round.
    fn put_checked(
        &mut self,
        worker: WorkerId,
        chunk: usize,
        piece: Piece<'_>,
        last: bool,
        accumulators: &mut Accumulators,
    ) -> bool {
        if self.policy.nonfinite() == NonFinite::Reject || piece.values().all_finite() {
            return self.put_piece(worker, chunk, piece, last, accumulators);
        }
        self.nonfinite += 1;
        let mut clipped = piece.values().to_vec();
        kernels::clip_non_finite(&mut clipped);
        self.put_piece(worker, chunk, piece.with_values(Values::F32(&clipped)), last, accumulators)
    }

    fn put_piece(
        &mut self,
        worker: WorkerId,
        chunk: usize,
        piece: Piece<'_>,
        last: bool,
        accumulators: &mut Accumulators,
    ) -> bool {
        let incoming = self.incoming.get_mut(worker).expect("a piece belongs to a push under way");
        if self.controller.policy().model.wants_significance() {
            incoming.squared_norm += piece.values().squared_norm();
        }
        match incoming.admit {
            // What waits for others has memory of its own: the receive buffer and the decoder are used again.
            Admit::Round(_) if self.policy.order() == Order::Ranked => incoming.staged.keep(piece),
            Admit::Round(round) => {
                let clock = incoming.clock;
                return self.add_piece((clock, round), chunk, piece, last, accumulators);
            }
            Admit::Now if self.optimizer.needs_norms() => incoming.staged.keep(piece),
            Admit::Now => self.step_piece(chunk, piece, accumulators),
            Admit::Late | Admit::Duplicate | Admit::TooFarAhead | Admit::UnknownWorker => {}
        }
        false
    }

    fn complete_push(&mut self, now: Time, worker: WorkerId) {
        let incoming = self.incoming.remove(worker).expect("a push completes once");
        let significance = self
            .controller
            .policy()
            .model
            .wants_significance()
            .then(|| incoming.squared_norm.sqrt() / self.parameter_norm().max(f64::MIN_POSITIVE));
        if incoming.admit == Admit::Now && !incoming.staged.is_empty() {
            self.step_staged(&incoming.staged);
        }
        self.controller.push(now, worker, incoming.clock, incoming.admit, significance);
        if let Admit::Round(clock) = incoming.admit
            && !incoming.staged.is_empty()
        {
            let units = Units::new(&self.spec, &self.chunks);
            let round = self.rounds.open(clock, units.extent());
            round.stage(worker, incoming.staged);
        }
    }

    /// The chunk of a sparse push's frame, which must come after those of the frames before: its place here.
    fn next_chunk(&mut self, worker: WorkerId, header: &Header) -> Result<usize, Fault> {
        let before = self.under_way(worker, header.clock).and_then(|incoming| incoming.last_chunk);
        if before.is_some_and(|before| before >= header.chunk) {
            return Err(self.shape_fault(format!("chunk {} again, or out of order", header.chunk)));
        }
        match self.chunk_index(header.chunk) {
            Some(index) => Ok(index),
            None => Err(self.shape_fault(format!("chunk {}, which this server does not hold", header.chunk))),
        }
    }

    fn rows_piece<'a>(
        &self,
        chunk: LocalChunk,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<Piece<'a>, Fault> {
        let rows = header.rows as usize;
        let row_bytes = 4 + self.width * header.dtype.bytes();
        if rows == 0 || rows.checked_mul(row_bytes) != Some(payload.len()) {
            let found = format!("{rows} rows of {:?} in {} bytes", header.dtype, payload.len());
            return Err(self.shape_fault(found));
        }
        let (numbers, bytes) = payload.split_at(rows * 4);
        let numbers: &[u32] = bytemuck::try_cast_slice(numbers)
            .map_err(|_| self.shape_fault("unaligned row numbers".into()))?;
        let ascending = numbers.windows(2).all(|pair| pair[0] < pair[1]);
        let in_range = numbers.last().is_none_or(|&row| (row as usize) < chunk.len / self.width);
        if !ascending || !in_range {
            return Err(self.shape_fault("row numbers out of order or out of range".into()));
        }
        let values = header.dtype.values(bytes).expect("shorter words follow four-byte words");
        Ok(Piece::Rows { start: chunk.start, rows: numbers, width: self.width, values })
    }
}
