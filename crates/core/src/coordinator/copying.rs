//! A coordinator and the copies of shards: who keeps them, and when one takes over.

use super::Coordinator;
use super::phase::Stage;
use super::replication::Order;
use crate::role::Output;
use crate::types::{NodeId, ServerId, Time};
use crate::wire::{Cause, Control, ServedShard};

/// What a spare core says.
pub(super) fn handle_spare(own: &mut Coordinator, now: Time, number: u32, message: Control) {
    match message {
        Control::Register { addresses } => match addresses.check() {
            Ok(()) => {
                own.replication.register(number, addresses);
                replicate(own, now);
            }
            Err(why) => own.log(format!("spare core {number} gave {why}")),
        },
        Control::Kept { shard, order } => {
            if let Some(epochs) = &own.epochs {
                own.replication.note_kept(number, shard, order, epochs.newest());
            }
        }
        other => own.log(format!("ignored a `{}` message from spare core {number}", other.name())),
    }
}

/// Has copies made, shards moved, and those of processes that are gone served by their copies.
pub(super) fn replicate(own: &mut Coordinator, now: Time) {
    if own.stage != Stage::Running {
        return;
    }
    while let Some(epochs) = &own.epochs {
        let plan = epochs.newest();
        let Some(order) = own.replication.poll(now, plan, |id| own.servers.primary(id)) else { break };
        match order {
            Order::Keep { spare, served: ServedShard { shard, addresses: from, .. }, order, moves } => {
                own.send(NodeId::Spare(spare), &Control::Keep { shard, from, order, moves });
            }
            Order::Start(node) => own.send(node, &Control::StartCore),
            Order::Change(change) => own.enter(now, change),
            Order::Promote { spare, shard, change, why } => {
                let former = plan.served(shard).map(|served| served.process);
                // One that is gone does not come back.
                let former = former.filter(|_| own.servers.is_connected(shard));
                own.note(format!("{shard} is served by another process from now on: {why}"));
                own.enter(now, change);
                if let Some(process) = former {
                    own.recovery.note_retired(process, now);
                    // It may have come back just now, without the plan yet. It has to hear that it keeps the shard's copy.
                    own.inform_shard(shard);
                }
                // It may hang, and come back: its place is another's.
                own.outputs.push_back(Output::Disconnect { connection: NodeId::Shard(shard).into() });
                own.servers.lose(now, shard, true);
                promote(own, spare);
            }
            Order::PromoteAgain(spare) => promote(own, spare),
        }
    }
    while let Some(epochs) = &own.epochs
        && let Some(server) = own.replication.poll_drained(epochs.newest())
    {
        own.memory.touch();
        own.note(format!("{server} is drained, and leaves"));
    }
    while let Some(number) = own.replication.poll_leaving() {
        own.send(NodeId::Spare(number), &Control::Stop { error: None });
    }
}

/// A spare core serves the shard of its copy from the newest plan on.
fn promote(own: &mut Coordinator, spare: u32) {
    if let Some(epochs) = &own.epochs {
        let message = Control::Promote(Box::new(epochs.newest().clone()));
        own.send(NodeId::Spare(spare), &message);
    }
}

/// A server is to be left without shards, so that it can end.
pub(super) fn drain(own: &mut Coordinator, now: Time, number: u32, server: ServerId) {
    let Some(epochs) = own.epochs.as_ref().filter(|_| own.stage == Stage::Running) else {
        return own.refuse(NodeId::Admin(number), Cause::Policy, "the job does not run yet".into());
    };
    match own.replication.drain(server, epochs.newest()) {
        Ok(sentence) => {
            own.memory.touch();
            own.send(NodeId::Admin(number), &Control::Done(sentence));
        }
        Err(why) => return own.refuse(NodeId::Admin(number), Cause::Policy, why),
    }
    replicate(own, now);
}

/// Shards are to be spread over the servers anew.
pub(super) fn rebalance(own: &mut Coordinator, now: Time, number: u32) {
    let Some(epochs) = own.epochs.as_ref().filter(|_| own.stage == Stage::Running) else {
        return own.refuse(NodeId::Admin(number), Cause::Policy, "the job does not run yet".into());
    };
    match own.replication.rebalance(epochs.newest(), |id| own.servers.primary(id)) {
        Ok(sentence) => own.send(NodeId::Admin(number), &Control::Done(sentence)),
        Err(why) => return own.refuse(NodeId::Admin(number), Cause::Policy, why),
    }
    replicate(own, now);
}
