//! A coordinator and the checkpoints of its job: it gives the orders, and has the manifest written.

use super::Coordinator;
use super::checkpoints::{self, Checkpoints, Step};
use super::phase::Stage;
use crate::checkpoint::{Request, Response};
use crate::role::Output;
use crate::types::{Clock, NodeId, ShardId, Time};
use crate::wire::{Cause, CheckpointOutcome, Control};

/// The shards have entered the first plan.
pub(super) fn begin(own: &mut Coordinator, now: Time) {
    if let Some(resumed) = own.epochs.as_ref().and_then(|epochs| epochs.newest().resumed.as_ref()) {
        let line = format!("the job goes on from checkpoint {}, at clock {}", resumed.folder, resumed.clock);
        own.note(line);
    }
    go_on(own, now, 0);
}

/// So many orders were given before, by a coordinator that is gone.
pub(super) fn go_on(own: &mut Coordinator, now: Time, orders: u64) {
    let (Some(config), Some(epochs)) = (&own.config.checkpoints, &own.epochs) else { return };
    let first = epochs.newest().first_clock();
    own.checkpoints = Some(Checkpoints::new(now, config, own.run, orders, first, own.servers.ids()));
    follow(own, now);
}

/// A command asks for a checkpoint.
pub(super) fn ask(own: &mut Coordinator, now: Time, number: u32) {
    match &mut own.checkpoints {
        Some(checkpoints) => {
            checkpoints.ask(now, NodeId::Admin(number));
            own.commands.wait(number);
            follow(own, now);
        }
        None => {
            let message = match own.config.checkpoints {
                Some(_) => format!("the job has not started ({})", own.phase()),
                None => {
                    "the job has no place for checkpoints; start its servers with --checkpoint DIR".into()
                }
            };
            own.refuse(NodeId::Admin(number), Cause::Policy, message);
        }
    }
}

/// A shard says what came of an order.
pub(super) fn take(
    own: &mut Coordinator,
    now: Time,
    shard: ShardId,
    number: u64,
    outcome: CheckpointOutcome,
) {
    own.checkpoints.iter_mut().for_each(|checkpoints| checkpoints.take(now, shard, number, outcome.clone()));
    follow(own, now);
}

/// A shard reports the newest version of its tables.
pub(super) fn note_version(own: &mut Coordinator, now: Time, version: Option<Clock>) {
    if let (Some(checkpoints), Some(version)) = (&mut own.checkpoints, version) {
        checkpoints.note_version(now, version);
    }
    follow(own, now);
}

/// A worker reports how far it is.
pub(super) fn note_progress(own: &mut Coordinator, now: Time) {
    if let (Some(checkpoints), Some(clock)) = (&mut own.checkpoints, own.workers.slowest_clock()) {
        checkpoints.note_progress(clock);
    }
    follow(own, now);
}

/// The archive has answered.
pub(super) fn take_response(own: &mut Coordinator, now: Time, response: Response) {
    if let (Response::Completed { folder, outcome }, Some(checkpoints)) = (response, &mut own.checkpoints) {
        checkpoints.completed(now, &folder, outcome);
    }
    follow(own, now);
}

pub(super) fn handle_timeout(own: &mut Coordinator, now: Time) {
    own.checkpoints.iter_mut().for_each(|checkpoints| checkpoints.handle_timeout(now));
    follow(own, now);
}

/// The job ends well. True if it waits for its last checkpoint first.
pub(super) fn finish(own: &mut Coordinator, now: Time) -> bool {
    let waits = own.stage == Stage::Running
        && own.checkpoints.as_mut().is_some_and(|checkpoints| checkpoints.finish(now));
    if waits {
        follow(own, now);
    }
    waits
}

/// Does what the checkpoint under way needs next.
fn follow(own: &mut Coordinator, now: Time) {
    while let Some(step) = own.checkpoints.as_mut().and_then(Checkpoints::poll) {
        match step {
            Step::Order(order) => {
                // Shards ignore a number that they have heard of, whichever coordinator gives the order.
                own.memory.touch();
                let shards: Vec<ShardId> = own.servers.informed().collect();
                let message = Control::Checkpoint(order);
                shards.into_iter().for_each(|id| own.send(NodeId::Shard(id), &message));
            }
            Step::Complete { folder, clock, files, keep } => {
                if let Some(epochs) = &own.epochs {
                    let manifest =
                        checkpoints::manifest(&own.config.job, epochs.newest(), folder, clock, files);
                    let request = Request::Complete { manifest: Box::new(manifest), keep };
                    own.outputs.push_back(Output::Archive(Box::new(request)));
                }
            }
            Step::Note(line) => own.note(line),
            Step::Warn(line) => own.log(line),
            Step::Answer(asker, outcome) => {
                if let NodeId::Admin(number) = asker {
                    own.commands.answered(now, number);
                }
                match outcome {
                    Ok(sentence) => own.send(asker, &Control::Done(sentence)),
                    Err(why) => own.refuse(asker, Cause::Unsettled, why),
                }
            }
            Step::End => own.end_now(None),
        }
    }
}
