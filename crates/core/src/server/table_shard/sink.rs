//! The sink of a shard's intake: gradients go into the round that the consistency controller names, or into a step at once.

use super::gradient::{CellGradient, Staged};
use super::loose::Loose;
use super::rounds::Rounds;
use super::store::{Arrival, EarlyStep, Store};
use crate::consistency::{Admit, Controller};
use crate::intake::{Admission, GradientFrame, Intake, Push, PushFrame, Sink};
use crate::limits;
use crate::policy::{Order, Reduce};
use crate::server::accumulators::Accumulators;
use crate::table::Layout;
use crate::types::{Clock, WorkerId};
use crate::wire::{Cause, Fault, frame};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// State of a push under way on a shard.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::server) struct Kept {
    squared_norm: f64,
    /// Gradients that wait until the push is complete: for ranked addition, or because the optimizer needs their norm.
    staged: Staged,
}

impl Kept {
    /// Whether it is of a push of a table of this layout: what another process kept may be anything.
    pub(super) fn check(&self, layout: &Layout) -> Result<(), String> {
        self.staged.check(layout)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.staged.memory_bytes()
    }
}

/// The parts of a table that gradients change.
pub(super) struct GradientSink<'a> {
    pub(super) layout: &'a Layout,
    pub(super) controller: &'a mut Controller,
    pub(super) rounds: &'a mut Rounds,
    pub(super) loose: &'a mut Loose,
    pub(super) store: &'a mut Store,
    pub(super) accumulators: &'a mut Accumulators,
    pub(super) order: Order,
}

impl Sink for GradientSink<'_> {
    type Destination = Admit;
    type Kept = Kept;

    fn layout(&self) -> &Layout {
        self.layout
    }

    /// Decided at a push's first frame, and anew when the round that it went to has closed.
    fn admit(&mut self, frame: &PushFrame<'_>, so_far: Option<Admit>) -> Result<Admission<Admit>, Fault> {
        let (worker, clock) = (frame.worker, frame.push.clock);
        self.check_initialised()?;
        self.check_samples(frame.push.samples)?;
        let v_train = self.controller.state().v_train();
        let admit = match so_far {
            Some(Admit::Round(round)) if round >= v_train => Admit::Round(round),
            Some(admit @ (Admit::Now | Admit::Late)) => admit,
            _ => self.controller.admit(worker, clock),
        };
        match admit {
            Admit::Now | Admit::Round(_) | Admit::Late => Ok(Admission::Take(admit)),
            Admit::Duplicate => Ok(Admission::Duplicate),
            Admit::TooFarAhead => Err(self.too_far_ahead(frame)),
            Admit::UnknownWorker => Err(not_a_member(worker)),
        }
    }

    fn add(
        &mut self,
        frame: &PushFrame<'_>,
        push: &mut Push<Admit, Kept>,
        gradient: GradientFrame<'_>,
    ) -> Result<bool, Fault> {
        if self.loose.has(frame.worker, frame.push.clock, gradient.index()) {
            // An aggregator brought it before it died.
            return Ok(false);
        }
        if self.controller.policy().model.wants_significance() {
            push.kept.squared_norm += gradient.values().squared_norm();
        }
        match push.destination() {
            // A gradient that waits for others is copied: the receive buffer and the decoder are used again.
            Admit::Round(round) if self.order == Order::Ranked => {
                push.kept.staged.keep(gradient, self.weight(frame, round));
            }
            Admit::Round(round) => return Ok(self.add_to_round(frame, round, gradient)),
            Admit::Now if self.store.optimizer().needs_norms() => push.kept.staged.keep(gradient, 1.0),
            Admit::Now => {
                let arrival = self.arrival(frame);
                self.store.step_at_once(gradient, arrival, self.accumulators);
            }
            Admit::Late | Admit::Duplicate | Admit::TooFarAhead | Admit::UnknownWorker => {}
        }
        Ok(false)
    }

    fn complete(&mut self, frame: &PushFrame<'_>, push: Push<Admit, Kept>) {
        let wants_significance = self.controller.policy().model.wants_significance();
        let significance = wants_significance
            .then(|| push.kept.squared_norm.sqrt() / self.store.parameter_norm().max(f64::MIN_POSITIVE));
        let (worker, clock, admit) = (push.worker(), push.clock(), push.destination());
        self.loose.complete(worker, clock);
        let staged = push.kept.staged;
        if admit == Admit::Now && !staged.is_empty() {
            let arrival = self.arrival(frame);
            self.store.step_staged(self.layout, &staged, arrival, self.accumulators);
        }
        self.controller.push(frame.now, worker, clock, admit, significance, frame.push.samples);
        if let Admit::Round(round) = admit
            && !staged.is_empty()
        {
            self.rounds.open(round, self.layout).stage(worker, staged);
        }
    }

    fn repeat(&mut self, frame: &PushFrame<'_>) {
        self.controller.push(frame.now, frame.worker, frame.push.clock, Admit::Duplicate, None, 1);
    }

    fn takes_empty_pushes(&self) -> bool {
        true
    }
}

/// The destination of sums of a clock.
pub(super) fn admit_sum(controller: &Controller, layout: &Layout, clock: Clock) -> Result<Admit, Fault> {
    let admit = controller.admit_sum(clock);
    if admit != Admit::TooFarAhead {
        return Ok(admit);
    }
    let message = format!(
        "clock {clock} of table `{}` was pushed, which is at version {}; at most {} rounds ahead are kept: wait for a pull before \
         pushing on",
        layout.name(),
        controller.state().v_train(),
        limits::MAX_ROUNDS_AHEAD
    );
    Err(Fault { cause: Cause::TooFarAhead, message })
}

#[cold]
fn not_a_member(worker: WorkerId) -> Fault {
    let message = format!("{worker} is no member of this job any more (declared dead, or left)");
    Fault { cause: Cause::NotAMember, message }
}

impl GradientSink<'_> {
    fn arrival(&mut self, frame: &PushFrame<'_>) -> Arrival {
        let share = self.controller.share(frame.worker, frame.push.samples);
        Arrival { version: self.controller.state().v_train(), share }
    }

    /// A weight of no samples would be none, and one that a mean by sums does not take would be left out silently.
    #[inline]
    fn check_samples(&self, samples: u32) -> Result<(), Fault> {
        if samples == 1 { Ok(()) } else { self.check_many_samples(samples) }
    }

    #[cold]
    fn check_many_samples(&self, samples: u32) -> Result<(), Fault> {
        if !(1..=limits::MAX_SAMPLES).contains(&samples) {
            return Err(self.layout.shape_fault(format!("a gradient of {samples} samples")));
        }
        if self.store.reduce() == Reduce::Mean {
            return Ok(());
        }
        let message = format!(
            "a gradient of {samples} samples was pushed for table `{}`, whose gradients are summed (reduce=sum): samples are weights \
             of a mean; use reduce=mean, or scale the gradient yourself",
            self.layout.name()
        );
        Err(Fault { cause: Cause::Policy, message })
    }

    #[cold]
    fn too_far_ahead(&self, frame: &PushFrame<'_>) -> Fault {
        let message = format!(
            "{} pushed clock {} of table `{}`, which is at version {}; at most {} rounds ahead are kept: wait for a pull \
             before pushing on",
            frame.worker,
            frame.push.clock,
            self.layout.name(),
            self.controller.state().v_train(),
            limits::MAX_ROUNDS_AHEAD
        );
        Fault { cause: Cause::TooFarAhead, message }
    }

    /// Initial values would overwrite what is pushed before them.
    #[inline]
    fn check_initialised(&self) -> Result<(), Fault> {
        if self.store.is_initialised() { Ok(()) } else { Err(self.not_initialised()) }
    }

    #[cold]
    fn not_initialised(&self) -> Fault {
        let message = format!("table `{}` has no initial values yet; pull it first", self.layout.name());
        Fault { cause: Cause::Protocol, message }
    }

    /// Whether gradients of this round may be stepped before it closes: nothing but the pushes of all workers closes
    /// it, all of them push it, it is the next to close, and no cell's step depends on another cell.
    fn steps_early(&self, round: Clock) -> bool {
        round == self.controller.state().v_train()
            && self.controller.policy().model.waits_for_all()
            && !self.controller.state().has_idle()
            && !self.store.optimizer().needs_norms()
    }

    /// The weight of a push's gradient in the mean of the round that it goes to.
    fn weight(&self, frame: &PushFrame<'_>, round: Clock) -> f32 {
        self.controller.weight(frame.push.clock, round, frame.push.samples)
    }

    /// Adds a frame's gradient to its round. Cells that have all their gradients with it are stepped right away if they
    /// may be. They get the bits that closing would give them. Whether any was stepped.
    fn add_to_round(&mut self, frame: &PushFrame<'_>, round: Clock, gradient: GradientFrame<'_>) -> bool {
        let (clock, is_last, weight) =
            (frame.push.clock, frame.push.piece.is_last, self.weight(frame, round));
        let steps_early = self.steps_early(round);
        let state = self.controller.state();
        let n = state.n();
        // The worker that pushes is not counted for this round yet; if all others are, it is the last.
        let is_last_worker = state.count() + 1 == n;
        // The mean of a row is over the pushes that count when the round closes. They are known before only when this
        // one is sure to count, or when it makes no difference.
        let rows_over = state.weight() + weight;
        let is_only = state.contributions() == 0;
        let row_is_sure = is_last_worker && (is_last || is_only || self.store.reduce() == Reduce::Sum);
        let (is_sparse, chunk) = (self.layout.is_sparse(), gradient.index());
        let sums = self.rounds.open(round, self.layout);
        if clock != round {
            // A worker may come to a round twice: late, or by leave of a model that was switched from.
            sums.mark_inexact();
        }
        let mut is_stepped = false;
        CellGradient::for_each(gradient, |gradient| {
            let (cell, gradient) = (gradient.cell, CellGradient { weight, ..gradient });
            let is_complete =
                if is_sparse { row_is_sure } else { is_last_worker || sums.is_completed_by(cell, 1, n) };
            if !(steps_early && is_complete) {
                return sums.add(gradient, self.accumulators);
            }
            let over = if is_sparse { rows_over } else { sums.weight(cell) + weight };
            is_stepped = true;
            self.store.step_early(sums, gradient, EarlyStep { round, chunk, over }, self.accumulators);
        });
        is_stepped
    }

    /// The destination of a sum of these workers' gradients.
    pub(super) fn admit_sum(&self, sum: &frame::Sum, contributors: &[WorkerId]) -> Result<Admit, Fault> {
        if sum.gradients == 0 || sum.gradients as usize != contributors.len() {
            let (gradients, workers) = (sum.gradients, contributors.len());
            return Err(self
                .layout
                .shape_fault(format!("a sum of {gradients} gradients of {workers} workers")));
        }
        self.check_initialised()?;
        if let Some(worker) = contributors.iter().find(|worker| self.loose.is_full(**worker, sum.clock)) {
            let message = format!(
                "sums of table `{}` have gradients of too many pushes of {worker} that are not complete",
                self.layout.name()
            );
            return Err(Fault { cause: Cause::TooFarAhead, message });
        }
        admit_sum(self.controller, self.layout, sum.clock)
    }

    /// Whether a worker's gradient of a sum's chunk is here. What a predecessor of the worker has left is not looked at: the worker
    /// begins at a later clock.
    pub(super) fn has_gradient(
        &self,
        intake: &Intake<Admit, Kept>,
        worker: WorkerId,
        sum: &frame::Sum,
        index: usize,
    ) -> bool {
        let clock = sum.clock;
        let Some(known) = self.controller.state().worker(worker).filter(|known| clock >= known.first())
        else {
            return false;
        };
        let is_past = |push: &Push<Admit, Kept>| match push.clock().cmp(&clock) {
            Ordering::Less => false,
            Ordering::Equal if self.layout.is_sparse() => push.last_chunk() >= Some(sum.chunk),
            Ordering::Equal => push.frames() as usize > index,
            Ordering::Greater => true,
        };
        known.pushed().is_some_and(|pushed| clock <= pushed)
            || self.loose.has(worker, clock, index)
            || intake.under_way(worker).is_some_and(is_past)
    }

    /// A worker's gradient of a chunk came in a sum.
    pub(super) fn note_loose(&mut self, worker: WorkerId, clock: Clock, index: usize) {
        if self.controller.state().worker(worker).is_some_and(|known| clock >= known.first()) {
            self.loose.add(worker, clock, index);
        }
    }

    /// Adds the sum of some workers' gradients of one chunk.
    pub(super) fn add_sum(&mut self, sum: &frame::Sum, admit: Admit, gradient: GradientFrame<'_>) {
        match admit {
            Admit::Round(round) => self.add_sum_to_round(sum, round, gradient),
            Admit::Now => {
                let state = self.controller.state();
                let arrival = Arrival { version: state.v_train(), share: state.share(1) };
                self.store.step_at_once(gradient, arrival, self.accumulators);
            }
            Admit::Late | Admit::Duplicate | Admit::TooFarAhead | Admit::UnknownWorker => {}
        }
    }

    /// Which workers' gradients are in a sum is not known yet: only their number tells whether they are the last. The mean of
    /// a row is over workers that may not have touched it, so that rows wait for the round to close.
    fn add_sum_to_round(&mut self, sum: &frame::Sum, round: Clock, gradient: GradientFrame<'_>) {
        let (gradients, weight) = (sum.gradients, self.controller.weight(sum.clock, round, 1));
        let steps_early = self.steps_early(round) && !self.layout.is_sparse();
        let n = self.controller.state().n();
        let sums = self.rounds.open_for_sum(round, self.layout);
        if sum.clock != round {
            sums.mark_inexact();
        }
        CellGradient::for_each(gradient, |gradient| {
            let (cell, gradient) = (gradient.cell, CellGradient { gradients, weight, ..gradient });
            if !(steps_early && sums.is_completed_by(cell, gradients, n)) {
                return sums.add(gradient, self.accumulators);
            }
            let over = sums.weight(cell) + gradients as f32 * weight;
            self.store.step_early(sums, gradient, EarlyStep { round, chunk: cell, over }, self.accumulators);
        });
    }
}
