//! A shard's part in checkpoints: the order that it follows, and the plan that waits for what is read from one.

use crate::wire::{CheckpointOrder, CheckpointOutcome, Plan};

/// The newest order, and how far it is carried out.
#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    order: Option<CheckpointOrder>,
    /// What came of it; said again when the order is repeated after a broken connection.
    outcome: Option<CheckpointOutcome>,
    restoring: Option<Restoring>,
}

/// A plan that this shard enters when the archive has brought what its tables held.
#[derive(Debug)]
struct Restoring {
    plan: Plan,
    /// A change of the plan came meanwhile.
    is_stale: bool,
}

/// What an order means for the copies that may be under way.
#[derive(Debug, PartialEq)]
pub(super) enum Ordered {
    /// They are to be made.
    Begin,
    /// Those that are not made are to be made now.
    TakeAll,
    /// It was heard before.
    Known,
}

impl Checkpoints {
    /// Takes an order. One that is older than the newest counts for nothing.
    pub(super) fn take_order(&mut self, order: CheckpointOrder) -> Ordered {
        match &mut self.order {
            Some(known) if order.number < known.number => Ordered::Known,
            Some(known) if order.number == known.number => {
                let is_more = order.takes_all && !known.takes_all;
                known.takes_all |= order.takes_all;
                if is_more { Ordered::TakeAll } else { Ordered::Known }
            }
            _ => {
                self.order = Some(order);
                self.outcome = None;
                Ordered::Begin
            }
        }
    }

    pub(super) fn order(&self) -> Option<&CheckpointOrder> {
        self.order.as_ref()
    }

    /// The order is carried out, or cannot be.
    pub(super) fn settle(&mut self, outcome: CheckpointOutcome) {
        self.outcome = Some(outcome);
    }

    /// The number of the newest order with what came of it.
    pub(super) fn outcome(&self) -> Option<(u64, &CheckpointOutcome)> {
        Some((self.order.as_ref()?.number, self.outcome.as_ref()?))
    }

    /// Keeps a plan, and a newer one in its place, until what its tables held is here. False for a newer one.
    pub(super) fn keep_plan(&mut self, plan: Plan) -> bool {
        self.restoring.replace(Restoring { plan, is_stale: false }).is_none()
    }

    pub(super) fn is_restoring(&self) -> bool {
        self.restoring.is_some()
    }

    /// The plan that is kept is not the newest any more.
    pub(super) fn note_change(&mut self) {
        if let Some(restoring) = &mut self.restoring {
            restoring.is_stale = true;
        }
    }

    /// The plan that was kept, and whether a change of it has come since.
    pub(super) fn take_plan(&mut self) -> Option<(Plan, bool)> {
        self.restoring.take().map(|Restoring { plan, is_stale }| (plan, is_stale))
    }
}
