//! A coordinator and its readers: they come and go, and nobody waits for them.

use super::phase::Stage;
use super::{Coordinator, querying, readers, relaying};
use crate::role::Output;
use crate::types::{NodeId, Time, WorkerId};
use crate::wire::{Cause, Control};

/// What a reader says: it declares nothing, and no round or barrier knows of it.
pub(super) fn handle_reader(own: &mut Coordinator, now: Time, reader: WorkerId, message: Control) {
    match message {
        Control::WorkerReport(report) => own.readers.take_report(reader, report),
        Control::Leave => {
            own.send(NodeId::Worker(reader), &Control::Left);
            own.outputs.push_back(Output::Disconnect { connection: NodeId::Worker(reader).into() });
            lose_reader(own, reader);
        }
        // Only workers pass streams on, and only those who train with them say who does not. A reader that a worker does not
        // serve goes to the shards by itself.
        Control::Unreachable { .. } => {}
        Control::StatusQuery => querying::query_status(own, now, NodeId::Worker(reader)),
        other => own.log(format!("ignored a `{}` message from {reader}", other.name())),
    }
}

/// Sends the settled plan to a reader, once on each connection, or says why there is nothing to read.
pub(super) fn inform_reader(own: &mut Coordinator, id: WorkerId) {
    let Some(epochs) = own.epochs.as_ref().filter(|_| own.stage == Stage::Running) else { return };
    let plan = epochs.settled();
    if let Some(why) = readers::refusal(plan) {
        return own.refuse(NodeId::Worker(id), Cause::Policy, why);
    }
    if own.readers.inform(id) {
        let message = Control::Plan(Box::new(plan.for_worker(id)));
        own.send(NodeId::Worker(id), &message);
        own.routes.forget(id);
        relaying::route(own);
    }
}

/// A reader is gone. Nobody's streams depend on it.
pub(super) fn lose_reader(own: &mut Coordinator, id: WorkerId) {
    if own.readers.remove(id) {
        own.routes.detach(id);
    }
}

/// Hangs up on readers that are silent. They may come back.
pub(super) fn expire_readers(own: &mut Coordinator, now: Time) {
    for id in own.readers.silent(now, own.config.worker_timeout, &own.standstill) {
        own.outputs.push_back(Output::Disconnect { connection: NodeId::Worker(id).into() });
        lose_reader(own, id);
    }
}
