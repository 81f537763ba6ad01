//! Sums of several workers' gradients, as an aggregator makes them.

use super::TablePart;
use crate::absence::Absent;
use crate::codec::Content;
use crate::consistency::Admit;
use crate::kernels::{self, Values};
use crate::limits;
use crate::policy::NonFinite;
use crate::server::rounds::{Accumulators, Piece, UnitGradient};
use crate::types::{AggregatorId, Clock, Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};

impl TablePart {
    /// Takes the sum of some workers' gradients of one chunk. Whose they are is said by itself, to
    /// [`TablePart::count_push`]. Of what is refused nothing was taken.
    pub(in crate::server) fn push_sum(
        &mut self,
        from: AggregatorId,
        header: &Header,
        payload: &[u8],
        accumulators: &mut Accumulators,
    ) -> Result<(), Fault> {
        if self.spec.rows || header.flags.has(Flags::ROWS) {
            return Err(self.shape_fault("a sum of rows".into()));
        }
        let Some(index) = self.chunk_index(header.chunk) else {
            return Err(self.shape_fault(format!("chunk {}, which this server does not hold", header.chunk)));
        };
        if !(1..=limits::MAX_WORKERS).contains(&header.rows) {
            return Err(self.shape_fault(format!("a sum of {} gradients", header.rows)));
        }
        if !self.is_initialised() {
            let message = format!("table `{}` has no initial values yet; pull it first", self.spec.name);
            return Err(Fault { cause: Cause::Protocol, message });
        }
        let admit = self.controller.admit_sum(header.clock);
        if admit == Admit::TooFarAhead {
            return Err(self.too_far_ahead(header.clock));
        }
        self.with_content(&from, (header, payload), self.chunks[index], |part, values, absent| {
            part.put_sum(header, admit, (index, absent), values, accumulators)
        })
    }

    fn put_sum(
        &mut self,
        header: &Header,
        admit: Admit,
        (index, absent): (usize, &Absent),
        values: Content<'_>,
        accumulators: &mut Accumulators,
    ) -> Result<(), Fault> {
        let mut clipped = None;
        if !values.all_finite() {
            self.nonfinite += 1;
            if self.policy.nonfinite() == NonFinite::Reject {
                return Err(self.overflow(header));
            }
            kernels::clip_non_finite(clipped.insert(values.to_vec()));
        }
        let values = clipped.as_ref().map_or(values, |clipped| Values::F32(clipped).into());
        let start = self.chunks[index].start;
        match admit {
            Admit::Round(round) => {
                let sum = UnitGradient { unit: index, start, values, absent, weight: header.rows };
                self.add_sum((header.clock, round), sum, accumulators);
            }
            Admit::Now => {
                self.step_piece(index, Piece::Dense { index, start, values, absent }, accumulators);
            }
            Admit::Late | Admit::Duplicate | Admit::TooFarAhead | Admit::UnknownWorker => {}
        }
        Ok(())
    }

    /// A worker's push of this clock is complete in the sums so far: it counts for its progress. The caller settles
    /// the table.
    pub(in crate::server) fn count_push(&mut self, now: Time, worker: WorkerId, clock: Clock) {
        let admit = match self.controller.admit(worker, clock) {
            admit @ (Admit::Duplicate | Admit::UnknownWorker) => admit,
            _ => self.controller.admit_sum(clock),
        };
        self.controller.push(now, worker, clock, admit, None);
    }

    fn too_far_ahead(&self, clock: Clock) -> Fault {
        let message = format!(
            "clock {clock} of table `{}` was pushed, which is at version {}; at most {} rounds ahead are kept: wait for \
             a pull before pushing on",
            self.spec.name,
            self.controller.state().v_train(),
            limits::MAX_ROUNDS_AHEAD
        );
        Fault { cause: Cause::TooFarAhead, message }
    }

    fn overflow(&self, header: &Header) -> Fault {
        let message = format!(
            "the sum of {} gradients for table `{}` at clock {} has NaN or Inf in chunk {}; it was not applied \
             (nonfinite=reject)",
            header.rows, self.spec.name, header.clock, header.chunk
        );
        Fault { cause: Cause::NonFinite, message }
    }
}
