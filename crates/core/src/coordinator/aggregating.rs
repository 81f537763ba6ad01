//! A coordinator and its aggregators.

use super::Coordinator;
use crate::role::Output;
use crate::types::{AggregatorId, NodeId, Time};
use crate::wire::Control;

pub(super) fn handle_aggregator(own: &mut Coordinator, now: Time, id: AggregatorId, message: Control) {
    match message {
        Control::Register { addresses } => match addresses.check() {
            Ok(()) => {
                own.aggregators.register(id, &addresses);
                inform_aggregator(own, id);
            }
            Err(why) => own.log(format!("{id} gave {why}")),
        },
        Control::Entered { epoch, joining, .. } => {
            if let Some(epochs) = &mut own.epochs {
                epochs.aggregator_entered(now, id, epoch, &joining);
            }
            own.settle_epochs(now);
        }
        Control::AggregatorReport(report) => own.aggregators.take_report(id, report),
        Control::PlanQuery => {
            own.aggregators.forget_informed(id);
            inform_aggregator(own, id);
        }
        other => own.log(format!("ignored a `{}` message from {id}", other.name())),
    }
}

/// Sends the newest plan to an aggregator, once on each connection.
pub(super) fn inform_aggregator(own: &mut Coordinator, id: AggregatorId) {
    if let Some(epochs) = &own.epochs
        && own.aggregators.inform(id)
    {
        let message = Control::Plan(Box::new(epochs.newest().clone()));
        own.send(NodeId::Aggregator(id), &message);
        let idle = own.barriers.idlers().message();
        idle.into_iter().for_each(|message| own.send(NodeId::Aggregator(id), &message));
    }
}

/// An aggregator is gone: nobody waits for it until it is back.
pub(super) fn lose_aggregator(own: &mut Coordinator, now: Time, id: AggregatorId) {
    own.aggregators.lose(id, own.is_planned());
    if let Some(epochs) = &mut own.epochs {
        epochs.forget_aggregator(id);
    }
    own.settle_epochs(now);
}

/// Gives up aggregators that are silent, or do not follow the plan. The servers and the other workers need none.
pub(super) fn expire_aggregators(own: &mut Coordinator, now: Time) {
    let grace = own.config.worker_timeout;
    let seconds = grace.as_secs_f64();
    for id in own.aggregators.silent(now, grace, &own.standstill) {
        give_up(own, now, id, format!("{id} was silent for {seconds} s"));
    }
    let overdue = own.epochs.as_ref().map(|epochs| epochs.overdue(now, grace, &own.standstill));
    for (id, epoch) in overdue.into_iter().flatten() {
        give_up(own, now, id, format!("{id} has not entered epoch {epoch} for {seconds} s"));
    }
}

pub(super) fn give_up(own: &mut Coordinator, now: Time, id: AggregatorId, why: String) {
    own.log(format!("{why}; it is hung up on, and the job goes on without it until it comes back"));
    own.outputs.push_back(Output::Disconnect { connection: NodeId::Aggregator(id).into() });
    lose_aggregator(own, now, id);
}
