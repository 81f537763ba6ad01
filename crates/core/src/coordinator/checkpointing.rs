//! A coordinator and the checkpoints of its job: it gives the orders, and has the manifest written.

use super::Coordinator;
use super::checkpoints::{self, Asked, Checkpoints, Step};
use super::phase::Stage;
use crate::checkpoint::{self, Manifest, Request, Response};
use crate::limits;
use crate::role::Output;
use crate::types::{Clock, NodeId, ShardId, Time, WorkerId};
use crate::wire::control::{self, frame};
use crate::wire::{Cause, CheckpointOutcome, Control, FilePart, Kind, PartPlace};

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
    let Some(epochs) = &own.epochs else { return };
    let (config, first) = (own.config.checkpoints.as_ref(), epochs.newest().first_clock());
    own.checkpoints = Some(Checkpoints::new(now, config, own.run, orders, first, own.servers.ids()));
    follow(own, now);
}

/// A command asks for a checkpoint.
pub(super) fn ask(own: &mut Coordinator, now: Time, number: u32) {
    if own.config.keeps_checkpoints() {
        return ask_as(own, now, number, Asked { at: None, is_copy: false });
    }
    let why = "the job has no place for checkpoints; start its servers with --checkpoint DIR, or name a file that the checkpoint \
               is copied to (`paramill checkpoint URL FILE`)";
    own.refuse(NodeId::Admin(number), Cause::Policy, why.into());
}

/// A command asks for a checkpoint that it will read, of a clock at which all workers rest if it knows one.
pub(super) fn ask_for_copy(own: &mut Coordinator, now: Time, number: u32, at: Option<Clock>) {
    let at = at.filter(|at| *at <= limits::MAX_CLOCK);
    ask_as(own, now, number, Asked { at, is_copy: true });
}

fn ask_as(own: &mut Coordinator, now: Time, number: u32, asked: Asked) {
    if let Some(checkpoints) = &mut own.checkpoints {
        checkpoints.ask(now, NodeId::Admin(number), asked);
        own.commands.wait(number);
        return follow(own, now);
    }
    let why = format!("the job has not started ({})", own.phase());
    own.refuse(NodeId::Admin(number), Cause::Policy, why);
}

/// A command reads a part of the checkpoint that was made for it: the shard that wrote the file is asked, or the worker that has it, or
/// the archive where workers' files are kept.
pub(super) fn read(own: &mut Coordinator, number: u32, place: PartPlace) {
    let asker = NodeId::Admin(number);
    let is_its_own = own.checkpoints.as_ref().is_some_and(|known| known.is_read_by(asker, &place.folder));
    let shards = own.servers.informed().filter(|id| checkpoint::file(*id) == place.file).map(NodeId::Shard);
    let workers = own.workers.running().filter(|id| checkpoint::worker_file(*id) == place.file);
    let holder = shards.chain(workers.map(NodeId::Worker)).next().filter(|_| is_its_own);
    let is_workers = checkpoint::is_worker_file(&place.file);
    let place = PartPlace { reader: number, ..place };
    match holder {
        _ if is_its_own && is_workers && own.config.keeps_checkpoints() => {
            own.commands.wait(number);
            read_archive(own, asker, place);
        }
        Some(holder) => {
            own.commands.wait(number);
            own.send(holder, &Control::CheckpointRead(place));
        }
        None => {
            let why =
                "the process that has a file of the checkpoint is not there any more; ask for another one";
            own.refuse(asker, Cause::Unsettled, why.into());
        }
    }
}

/// Has the archive read a part of a file for somebody.
fn read_archive(own: &mut Coordinator, reader: NodeId, place: PartPlace) {
    own.archive_readers.push_back(reader);
    own.outputs.push_back(Output::Archive(Box::new(Request::Read(place))));
}

/// A worker reads what it takes over of the checkpoint that the job goes on from.
pub(super) fn restore(own: &mut Coordinator, worker: WorkerId, place: PartPlace) {
    let resumed = own.epochs.as_ref().and_then(|epochs| epochs.newest().resumed.as_ref());
    let is_part = |resumed: &&checkpoint::Resumed| {
        let mut files = resumed.worker_files.iter();
        resumed.folder == place.folder && files.any(|saved| saved.file.name == place.file)
    };
    match resumed.filter(is_part) {
        Some(_) => read_archive(own, NodeId::Worker(worker), place),
        None => own.log(format!("{worker} asks for a file that is not in the job's checkpoint")),
    }
}

/// The archive has read a part of a file, or could not.
fn take_read(own: &mut Coordinator, now: Time, place: PartPlace, part: Result<Vec<u8>, String>) {
    match own.archive_readers.pop_front() {
        Some(reader @ NodeId::Worker(_)) => own.send(reader, &FilePart::message(place, part)),
        Some(_) => {
            if let Control::CheckpointPart(part) = FilePart::message(place, part) {
                pass_part(own, now, part);
            }
        }
        None => {}
    }
}

/// A worker has sent a part of its file: of one that is gathered here, or for a command.
pub(super) fn take_part(own: &mut Coordinator, now: Time, worker: WorkerId, part: FilePart) {
    if !own.config.keeps_checkpoints() {
        return pass_part(own, now, part);
    }
    own.checkpoints.iter_mut().for_each(|known| known.take_part(now, worker, part.clone()));
    follow(own, now);
}

/// A worker says what came of an order.
pub(super) fn take_of_worker(
    own: &mut Coordinator,
    now: Time,
    worker: WorkerId,
    number: u64,
    outcome: CheckpointOutcome,
) {
    own.checkpoints.iter_mut().for_each(|known| known.take_of_worker(now, worker, number, outcome.clone()));
    follow(own, now);
}

/// A worker has a new connection: it may not have heard what it is asked for.
pub(super) fn remind(own: &mut Coordinator, worker: WorkerId) {
    let Some(checkpoints) = &own.checkpoints else { return };
    let order = checkpoints.order_for(worker).cloned().map(Control::Checkpoint);
    let read = checkpoints.asked_of(worker).map(Control::CheckpointRead);
    order.into_iter().chain(read).for_each(|message| own.send(NodeId::Worker(worker), &message));
}

/// A worker is gone.
pub(super) fn part_with(own: &mut Coordinator, now: Time, worker: WorkerId) {
    own.checkpoints.iter_mut().for_each(|checkpoints| checkpoints.part_with(now, worker));
    follow(own, now);
}

/// A shard has read a part of a file for a command.
pub(super) fn pass_part(own: &mut Coordinator, now: Time, part: FilePart) {
    let number = part.place.reader;
    let asker = NodeId::Admin(number);
    let FilePart { place, refusal, .. } = &part;
    if !own.checkpoints.as_ref().is_some_and(|known| known.is_read_by(asker, &place.folder)) {
        return;
    }
    own.commands.answered(now, number);
    match refusal.clone() {
        Some(why) => own.refuse(asker, Cause::Unsettled, control::sentence(why)),
        None => own.send(asker, &Control::CheckpointPart(part)),
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
    match (response, &mut own.checkpoints) {
        (Response::Completed { folder, outcome }, Some(known)) => known.completed(now, &folder, outcome),
        (Response::Appended(place, outcome), Some(known)) => known.note_stored(now, &place, outcome),
        (Response::Read(place, part), _) => take_read(own, now, place, part),
        _ => {}
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
                let shards: Vec<NodeId> = own.servers.informed().map(NodeId::Shard).collect();
                let running: Vec<WorkerId> = own.workers.running().collect();
                let told = own.checkpoints.iter_mut().flat_map(|known| known.expect_workers(&running));
                let told: Vec<NodeId> = shards.into_iter().chain(told.map(NodeId::Worker)).collect();
                let message = Control::Checkpoint(order);
                told.into_iter().for_each(|id| own.send(id, &message));
            }
            Step::TakeAll(workers, order) => {
                let message = Control::Checkpoint(order);
                workers.into_iter().for_each(|id| own.send(NodeId::Worker(id), &message));
            }
            Step::Ask(worker, place) => own.send(NodeId::Worker(worker), &Control::CheckpointRead(place)),
            Step::Store { place, bytes, whole } => {
                let request = Request::Append { place, bytes, whole };
                own.outputs.push_back(Output::Archive(Box::new(request)));
            }
            Step::Complete { folder, clock, files, worker_files, keep } => {
                if let Some(epochs) = &own.epochs {
                    let manifest =
                        checkpoints::manifest(&own.config.job, epochs.newest(), folder.clone(), clock, files);
                    let manifest = Box::new(Manifest { worker_files, ..manifest });
                    own.checkpoints.iter_mut().for_each(|known| known.note_manifest(manifest.clone()));
                    if own.config.keeps_checkpoints() {
                        let request = Request::Complete { manifest, keep };
                        own.outputs.push_back(Output::Archive(Box::new(request)));
                    } else {
                        // What a command reads has no place for a manifest.
                        own.checkpoints.iter_mut().for_each(|known| known.completed(now, &folder, Ok(())));
                    }
                }
            }
            Step::Give(asker, manifest) => {
                if let NodeId::Admin(number) = asker {
                    own.commands.answered(now, number);
                }
                let message = Control::CheckpointCopy(manifest);
                match control::fits(&frame(Kind::Control, &message)) {
                    true => own.send(asker, &message),
                    false => {
                        let why = "the checkpoint has too many tables to be copied; use --checkpoint DIR";
                        own.refuse(asker, Cause::Policy, why.into());
                    }
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
            Step::End => own.end_now(now, None),
        }
    }
}
