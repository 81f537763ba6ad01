//! A coordinator and the workers that pass streams on.

use super::Coordinator;
use super::phase::Stage;
use crate::address::Addresses;
use crate::types::{NodeId, WorkerId};
use crate::wire::Control;

pub(super) fn note_out_of_reach(own: &mut Coordinator, by: WorkerId, relay: WorkerId) {
    if own.routes.note_out_of_reach(by, relay) {
        own.log(format!("{by} does not get what {relay} should pass on; {relay} is a leaf from now on"));
        route(own);
    }
}

/// A worker says where others reach it.
pub(super) fn reach(
    own: &mut Coordinator,
    worker: WorkerId,
    addresses: Option<Addresses>,
    is_aggregated: bool,
) {
    let Some(incarnation) = own.workers.incarnation(worker) else { return };
    let addresses = match addresses.as_ref().map_or(Ok(()), Addresses::check) {
        Ok(()) => addresses,
        Err(why) => {
            own.log(format!("{worker} gave {why}; nothing is passed on by it"));
            None
        }
    };
    own.routes.register(worker, incarnation, addresses, is_aggregated);
    route(own);
}

/// Tells workers and readers from whom they get streams, where that has changed.
pub(super) fn route(own: &mut Coordinator) {
    let Some(epochs) = own.epochs.as_ref().filter(|_| own.stage == Stage::Running) else { return };
    let workers: Vec<WorkerId> = own.workers.running().collect();
    // Trees that are made without some of them would only be made anew.
    if !workers.iter().all(|id| own.routes.knows(*id, own.workers.incarnation(*id))) {
        return;
    }
    let readers: Vec<WorkerId> = own.readers.informed().collect();
    let (topology, plan) = (&own.config.topology, epochs.settled());
    let changed = own.routes.changed(&own.registry, topology, plan, &workers, &readers);
    for (worker, routes) in changed {
        own.send(NodeId::Worker(worker), &Control::Routes(routes));
    }
    if let Some(sentence) = own.routes.take_trouble() {
        own.log(sentence);
    }
}
