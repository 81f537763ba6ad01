//! How a coordinator answers those who ask how the job stands.

use super::Coordinator;
use crate::role::Output;
use crate::types::{NodeId, ShardId, Time};
use crate::wire::control::{self, frame};
use crate::wire::{Control, Kind};
use std::collections::BTreeSet;

pub(super) fn query_status(own: &mut Coordinator, now: Time, asker: NodeId) {
    if own.queries.has(asker) {
        // One answer is on its way to it.
        return;
    }
    let reports = |id: &ShardId| {
        let is_ready = own.epochs.as_ref().is_some_and(|epochs| epochs.has_entered(*id));
        is_ready && own.servers.is_connected(*id)
    };
    let missing: BTreeSet<ShardId> = own.servers.ids().filter(reports).collect();
    for shard in &missing {
        own.send(NodeId::Shard(*shard), &Control::ReportRequest);
    }
    own.queries.ask(now, asker, missing);
    answer_queries(own, now);
}

pub(super) fn answer_queries(own: &mut Coordinator, now: Time) {
    while let Some(asker) = own.queries.poll(now) {
        send_status(own, now, asker);
    }
}

pub(super) fn send_status(own: &mut Coordinator, now: Time, to: NodeId) {
    let mut status = own.status(now);
    let mut message = frame(Kind::Control, &Control::Status(Box::new(status.clone())));
    if !control::fits(&message) {
        status.shorten();
        message = frame(Kind::Control, &Control::Status(Box::new(status)));
    }
    own.outputs.push_back(Output::send(to, message));
}
