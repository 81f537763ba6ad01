//! Bringing parameters, acknowledgements and refusals to workers and aggregators.
//!
//! A shard says what has happened: a chunk of the next version exists, a pull is released, a push is complete. The delivery
//! decides which frames follow, who receives them, and what acknowledges a push: a frame of its own, or the answer to the
//! pull that came with it. The ways of answering are [`Strategy`]s.

mod acks;
mod direct;
mod early;
mod pulls;
mod routes;
mod sender;
mod streams;

pub(super) use pulls::{Backlog, PendingPull};
pub(super) use sender::StoredTable;

use super::table_shard::TableShard;
use crate::bandwidth::Reading;
use crate::consistency::{Question, Released};
use crate::role::{Body, Frame, Outbox, Output};
use crate::types::{AggregatorId, Clock, NodeId, TableId, Time, WorkerId};
use crate::wire::frame::Completed;
use crate::wire::{Cause, Control, Fault, Kind, Position, ack, control};
use acks::Acks;
use direct::Direct;
use early::Early;
use pulls::WaitingPulls;
use routes::Routes;
use sender::Sender;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use streams::{Sending, Streams, StreamsImage};

/// One way of bringing parameters to those who asked for them. One method is required.
///
/// Strategies are asked in order, and the first one that answers a pull is the last one that is asked.
trait Strategy: Debug {
    /// A worker that is reached directly begins a push, and wants the parameters that follow: this pull comes with the
    /// push's last frame. The strategy MUST NOT answer it before it is released, but MAY send chunks of the answer.
    fn expect(&mut self, _pull: &PendingPull) {}

    /// A chunk has its values of the next version, and the round is still open.
    fn chunk_exists(&mut self, _chunk: NewChunk, _sender: &mut Sender<'_>) {}

    /// A pull is released. The strategy MUST send everything that `to` lacks of the answer and return `true`, or send
    /// nothing and return `false`.
    fn answer(&mut self, pull: &PendingPull, to: NodeId, sender: &mut Sender<'_>) -> bool;

    /// What was sent to this receiver may be lost. The strategy MUST NOT count on it any more.
    fn forget(&mut self, _receiver: NodeId) {}

    /// A worker's push of this table was refused: no pull comes with it. The strategy MUST NOT send more of its answer.
    fn abandon(&mut self, _table: usize, _worker: WorkerId) {}

    /// Chunks of this table may get values of the next version once more, or travel otherwise. Answers MUST begin anew.
    fn restart(&mut self, _table: usize) {}

    /// What does not hold although it always should.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// A chunk that has its values of the next version.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewChunk {
    pub(super) table: usize,
    /// Its place among the table's chunks on this shard.
    pub(super) index: usize,
    /// The version.
    pub(super) version: Clock,
}

#[derive(Debug, Default)]
struct Strategies {
    early: Early,
    direct: Direct,
}

impl Strategies {
    /// All of them, in the order in which they are asked.
    fn each(&mut self) -> [&mut dyn Strategy; 2] {
        [&mut self.early, &mut self.direct]
    }

    fn check(&self) -> Result<(), String> {
        self.early.check()?;
        self.direct.check()
    }

    /// Asks them in this order. Every pull is answered here: which they are is known, so that the calls are no dynamic ones.
    #[inline]
    fn answer(&mut self, pull: &PendingPull, to: NodeId, sender: &mut Sender<'_>) -> bool {
        self.early.answer(pull, to, sender) || self.direct.answer(pull, to, sender)
    }
}

/// What a shard sends to workers and aggregators, and what they wait for.
///
/// - *What happened*: [`expect`](Delivery::expect), [`chunk_exists`](Delivery::chunk_exists),
///   [`complete`](Delivery::complete), [`answer`](Delivery::answer), [`release`](Delivery::release).
/// - *What waits*: [`admit`](Delivery::admit), [`wait`](Delivery::wait),
///   [`wait_for_values`](Delivery::wait_for_values).
/// - *Who is there*: [`reach_through`](Delivery::reach_through), [`reach_directly`](Delivery::reach_directly),
///   [`lose_worker`](Delivery::lose_worker), [`lose_aggregator`](Delivery::lose_aggregator).
/// - *What to send*: [`poll_frame`](Delivery::poll_frame), and when everything else has left,
///   [`poll_acknowledgement`](Delivery::poll_acknowledgement).
#[derive(Debug, Default)]
pub(super) struct Delivery {
    routes: Routes,
    pulls: WaitingPulls,
    strategies: Strategies,
    streams: Streams,
    frames: Outbox,
    /// Acknowledgements that leave when everything else has.
    acks: Acks,
    bytes_pulled: u64,
    refused: u64,
}

/// What an image keeps of a delivery: nothing that is on its way, or waits for somebody.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct DeliveryImage {
    routes: Routes,
    streams: StreamsImage,
    bytes_pulled: u64,
    refused: u64,
}

impl Delivery {
    pub(super) fn image(&self) -> DeliveryImage {
        let Delivery { routes, streams, bytes_pulled, refused, .. } = self;
        DeliveryImage {
            routes: routes.clone(),
            streams: streams.image(),
            bytes_pulled: *bytes_pulled,
            refused: *refused,
        }
    }

    /// Becomes the delivery that an image was made of, where `chunks` says how many chunks a table has that is broadcast.
    pub(super) fn restore(
        &mut self,
        image: DeliveryImage,
        chunks: impl Fn(TableId) -> Option<usize>,
    ) -> Result<(), String> {
        let DeliveryImage { routes, streams, bytes_pulled, refused } = image;
        self.streams.restore(streams, chunks)?;
        self.routes = routes;
        (self.bytes_pulled, self.refused) = (bytes_pulled, refused);
        Ok(())
    }

    /// Whether it has more than its image, of what decides what is sent.
    pub(super) fn exceeds_image(&self) -> bool {
        self.streams.exceed_image()
    }

    /// Drops what its image does not keep.
    pub(super) fn reduce_to_image(&mut self) {
        self.streams.reduce_to_image();
    }

    /// One in which one of so many versions that are broadcast comes with a digest.
    pub(super) fn with_digests(every: u64) -> Delivery {
        Delivery { streams: Streams::with_digests(every), ..Delivery::default() }
    }

    /// A worker begins a push of a dense table, and wants the parameters that follow it.
    pub(super) fn expect(&mut self, pull: &PendingPull) {
        if self.routes.is_direct(pull.worker) {
            self.strategies.each().into_iter().for_each(|strategy| strategy.expect(pull));
        }
    }

    /// A chunk has its values of the next version before the round closes.
    pub(super) fn chunk_exists(&mut self, now: Time, chunk: NewChunk, table: &mut TableShard) {
        if table.is_broadcast() {
            let NewChunk { table: number, index, version } = chunk;
            let (streams, mut sending) = self.sending(now);
            return streams.chunk_exists(TableId(number as u32), index, version, table, &mut sending);
        }
        let mut sender = Sender {
            table,
            id: TableId(chunk.table as u32),
            frames: &mut self.frames,
            bytes: &mut self.bytes_pulled,
        };
        self.strategies.each().into_iter().for_each(|strategy| strategy.chunk_exists(chunk, &mut sender));
    }

    /// A table has a version, its first or its next. Where it is broadcast, that goes to everybody who follows it.
    pub(super) fn version_exists(&mut self, now: Time, id: TableId, table: &mut TableShard) {
        if table.is_broadcast() {
            let (version, (streams, mut sending)) = (table.version(), self.sending(now));
            streams.version_exists(id, version, table, &mut sending);
        }
    }

    /// Somebody follows a table's stream from now on; if it only asks whether it has missed something, then if it has.
    pub(super) fn subscribe(
        &mut self,
        now: Time,
        receiver: NodeId,
        position: Position,
        is_question: bool,
        table: &TableShard,
    ) {
        let (streams, mut sending) = self.sending(now);
        streams.subscribe(receiver, position, is_question, table, &mut sending);
    }

    /// Somebody follows a table's stream no more.
    pub(super) fn unsubscribe(&mut self, receiver: NodeId, table: TableId) {
        self.streams.unsubscribe(receiver, table);
    }

    /// Whether somebody follows some table's stream here.
    pub(super) fn is_followed_by(&self, receiver: NodeId) -> bool {
        self.streams.is_followed_by(receiver)
    }

    /// Whether everybody who follows a stream has all of it.
    pub(super) fn is_settled(&self) -> bool {
        self.streams.is_settled()
    }

    /// A receiver has a version of a table: what its link carries, if that is known from it.
    pub(super) fn note_seen(
        &mut self,
        now: Time,
        receiver: NodeId,
        id: TableId,
        version: Clock,
        table: &TableShard,
    ) -> Option<Reading> {
        let (streams, mut sending) = self.sending(now);
        streams.note_seen(receiver, id, version, table, &mut sending)
    }

    fn sending(&mut self, now: Time) -> (&mut Streams, Sending<'_>) {
        let Delivery { streams, frames, bytes_pulled: bytes, .. } = self;
        (streams, Sending { now, frames, bytes })
    }

    /// Says something to a worker.
    pub(super) fn say(&mut self, worker: WorkerId, message: &Control) {
        let to = NodeId::Worker(worker);
        self.frames.push_back(Output::send(to, control::frame(Kind::Control, message)));
    }

    /// A push or an initialisation is complete, and nothing but an acknowledgement is wanted.
    pub(super) fn complete(&mut self, worker: WorkerId, request: u64) {
        match self.routes.address(worker) {
            NodeId::Worker(worker) => self.acks.add(worker, request),
            to => self.frames.push_back(Output::send(to, ack::frame(&[request]))),
        }
    }

    /// Everything that an aggregator sent in its own name up to this list is taken: it may forget it.
    pub(super) fn complete_sums(&mut self, id: AggregatorId, list: &Completed) {
        let note = Completed { attempt: 0, last: None, ..*list };
        let frame = Frame { header: note.header(0), body: Body::Empty };
        self.frames.push_back(Output::send(NodeId::Aggregator(id), frame));
    }

    /// Answers a pull: with a table's parameters, or with the rows that were asked for.
    pub(super) fn answer(&mut self, pull: &PendingPull, table: &mut TableShard) {
        let to = self.routes.address(pull.worker);
        let mut sender = Sender {
            table,
            id: TableId(pull.table as u32),
            frames: &mut self.frames,
            bytes: &mut self.bytes_pulled,
        };
        let is_answered = self.strategies.answer(pull, to, &mut sender);
        assert!(is_answered, "a released pull is answered");
        // To a worker, the answer is the acknowledgement. An aggregator passes both on.
        if pull.owes_ack && !self.routes.is_direct(pull.worker) {
            self.complete(pull.worker, pull.request);
        }
    }

    /// Asks worker 0 about a pull of a table.
    pub(super) fn ask(&mut self, table: TableId, question: Question) {
        let to = self.routes.address(WorkerId::FIRST);
        let frame = control::frame(Kind::Control, &Control::Question { table, question: Box::new(question) });
        self.frames.push_back(Output::send(to, frame));
    }

    /// A pull that waited is released.
    pub(super) fn release(&mut self, released: &Released, table: &mut TableShard) {
        let Some(mut pull) = self.pulls.take(released.token) else { return };
        pull.delay = released.delay;
        if !self.would_be_dropped(&pull, table) {
            return self.answer(&pull, table);
        }
        let (id, to) = (TableId(pull.table as u32), self.routes.address(pull.worker));
        let mut sender = Sender { table, id, frames: &mut self.frames, bytes: &mut self.bytes_pulled };
        sender.send_nothing(to, &(&pull).into());
    }

    /// Whether the worker has asked for the parameters of a later iteration since, so that it would drop these as too old
    /// (PSP-SGD, Algorithm 1, worker, line 10).
    fn would_be_dropped(&self, pull: &PendingPull, table: &TableShard) -> bool {
        table.sync().partial_pull().is_some()
            && self.routes.is_direct(pull.worker)
            && self.pulls.has_later(pull, table.version())
    }

    /// Whether a worker may wait with one more pull, and what it has waiting.
    #[inline]
    pub(super) fn admit(&self, pull: &PendingPull) -> Result<(), Backlog> {
        self.pulls.admit(pull)
    }

    /// The token of the pull that waits next.
    #[inline]
    pub(super) fn next_token(&self) -> u64 {
        self.pulls.next_token()
    }

    /// A pull waits, under [`Delivery::next_token`], until its table's controller releases it.
    #[inline]
    pub(super) fn wait(&mut self, mut pull: PendingPull, table: &TableShard) {
        // The answer comes with the others' pushes: it is the acknowledgement, because one of its own would stand between
        // chunks that are sent early and received in place.
        let is_acknowledged_by_answer = self.routes.is_direct(pull.worker) && table.waits_for_all();
        if pull.owes_ack && !is_acknowledged_by_answer {
            pull.owes_ack = false;
            self.complete(pull.worker, pull.request);
        }
        self.pulls.file(pull);
    }

    /// A pull waits for its table's initial values.
    pub(super) fn wait_for_values(&mut self, pull: PendingPull) {
        self.pulls.keep_for_values(pull);
    }

    /// Takes out the pulls that wait for a table's initial values, by worker.
    pub(super) fn take_waiting_for_values(&mut self, table: usize) -> Vec<PendingPull> {
        self.pulls.take_waiting_for_values(table)
    }

    /// Refuses a pull. The push that it came with is complete all the same.
    pub(super) fn refuse_pull(&mut self, pull: &PendingPull, fault: &Fault) {
        if pull.owes_ack {
            // Ahead of the refusal, which would otherwise be taken for one of the push.
            let to = self.routes.address(pull.worker);
            self.frames.push_back(Output::send(to, ack::frame(&[pull.request])));
        }
        self.refuse(pull.worker, TableId(pull.table as u32), pull.request, fault);
    }

    /// Refuses a worker's request.
    pub(super) fn refuse(&mut self, worker: WorkerId, table: TableId, request: u64, fault: &Fault) {
        self.refuse_to(self.routes.address(worker), table, request, fault);
    }

    /// The same to a certain receiver.
    pub(super) fn refuse_to(&mut self, to: NodeId, table: TableId, request: u64, fault: &Fault) {
        // A stale frame is sent again, and is no error for the application.
        self.refused += u64::from(fault.cause != Cause::StaleEpoch);
        let mut frame = control::frame(Kind::Error, fault);
        frame.header.table = table;
        frame.header.request = request;
        self.frames.push_back(Output::send(to, frame));
    }

    /// Counts a request that is refused later, with others.
    pub(super) fn count_refused(&mut self) {
        self.refused += 1;
    }

    /// Acknowledges the pushes of all pulls that wait: somebody keeps their workers waiting for long.
    pub(super) fn acknowledge_waiting(&mut self) {
        self.pulls.take_owed_acks(|worker, request| self.acks.add(worker, request));
    }

    /// The codecs of a table have changed ([`Plan::valid_from`](crate::wire::Plan::valid_from)). Pulls that wait are refused, and
    /// asked again; what was sent of their answers is of no use.
    pub(super) fn renew(&mut self, now: Time, table: usize, shard: &TableShard, fault: &Fault) {
        self.restart(table);
        let (streams, mut sending) = self.sending(now);
        streams.restart(TableId(table as u32), shard, &mut sending);
        for pull in self.pulls.take_all(table) {
            self.refuse_pull(&pull, fault);
        }
    }

    /// Chunks of a table may get values of the next version once more.
    pub(super) fn restart(&mut self, table: usize) {
        self.strategies.each().into_iter().for_each(|strategy| strategy.restart(table));
    }

    /// A worker is reached through an aggregator.
    pub(super) fn reach_through(&mut self, worker: WorkerId, id: AggregatorId) {
        if self.routes.set(worker, Some(id)) {
            self.forget(NodeId::Worker(worker));
        }
    }

    /// Whether a worker is reached through this aggregator.
    pub(super) fn is_through(&self, worker: WorkerId, id: AggregatorId) -> bool {
        self.routes.address(worker) == NodeId::Aggregator(id)
    }

    /// A worker is reached on its own connection.
    pub(super) fn reach_directly(&mut self, worker: WorkerId) {
        self.routes.set(worker, None);
    }

    /// A worker's connection is gone: it asks again for what it still wants.
    pub(super) fn lose_worker(&mut self, worker: WorkerId) {
        self.acks.forget(worker);
        self.pulls.forget(worker);
        self.forget(NodeId::Worker(worker));
    }

    /// The connection is gone on which somebody followed streams.
    pub(super) fn lose_follower(&mut self, receiver: NodeId) {
        self.streams.forget(receiver);
    }

    /// A worker has left the job. It still hears of pushes that are complete.
    pub(super) fn remove_worker(&mut self, worker: WorkerId) {
        self.routes.set(worker, None);
        self.pulls.forget(worker);
        self.forget(NodeId::Worker(worker));
    }

    /// A worker's push of this table was refused: no pull comes with it.
    pub(super) fn abandon(&mut self, table: usize, worker: WorkerId) {
        self.strategies.each().into_iter().for_each(|strategy| strategy.abandon(table, worker));
    }

    /// What was sent to this receiver may be lost.
    fn forget(&mut self, receiver: NodeId) {
        self.streams.forget(receiver);
        self.strategies.each().into_iter().for_each(|strategy| strategy.forget(receiver));
    }

    /// An aggregator's connection is gone. Returns the workers that are reached through it.
    pub(super) fn lose_aggregator(&mut self, id: AggregatorId) -> Vec<WorkerId> {
        self.forget(NodeId::Aggregator(id));
        self.routes.through(id).collect()
    }

    /// Whether there is a frame that is not only an acknowledgement.
    #[inline]
    pub(super) fn has_frames(&self) -> bool {
        !self.frames.is_empty()
    }

    /// The next frame that is not only an acknowledgement.
    pub(super) fn poll_frame(&mut self) -> Option<Output> {
        self.frames.pop_front()
    }

    /// The next frame of acknowledgements.
    pub(super) fn poll_acknowledgement(&mut self) -> Option<Output> {
        self.acks.pop()
    }

    /// Bytes of memory that wait to be sent.
    pub(super) fn backlog_bytes(&self) -> usize {
        self.frames.bytes() + self.acks.bytes()
    }

    /// Bytes of frames that are kept for receivers which have missed them.
    pub(super) fn log_bytes(&self) -> usize {
        self.streams.log_bytes()
    }

    /// Bytes of parameters that were sent.
    pub(super) fn bytes_pulled(&self) -> u64 {
        self.bytes_pulled
    }

    /// Requests that were refused.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// Pulls that wait to be released.
    pub(super) fn waiting_count(&self) -> usize {
        self.pulls.waiting_count()
    }

    /// What does not hold although it always should: counters against what they count.
    pub(super) fn check(&self) -> Result<(), String> {
        self.pulls.check()?;
        self.acks.check()?;
        self.frames.check()?;
        self.strategies.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_to_be_sent_is_counted_until_it_is_taken() {
        let mut delivery = Delivery::default();
        assert_eq!((delivery.backlog_bytes(), delivery.has_frames()), (0, false));
        delivery.complete(WorkerId(0), 7);
        assert_eq!((delivery.backlog_bytes(), delivery.has_frames()), (8, false), "an acknowledgement");
        let fault = Fault { cause: Cause::Shape, message: "why".into() };
        delivery.refuse(WorkerId(1), TableId(0), 3, &fault);
        assert!(delivery.has_frames() && delivery.backlog_bytes() > 8 + size_of::<Output>());
        assert_eq!(delivery.refused(), 1);
        assert!(delivery.poll_frame().is_some() && delivery.poll_frame().is_none());
        assert_eq!(delivery.backlog_bytes(), 8);
        assert!(delivery.poll_acknowledgement().is_some() && delivery.poll_acknowledgement().is_none());
        assert_eq!((delivery.backlog_bytes(), delivery.check()), (0, Ok(())));
    }

    #[test]
    fn a_frame_that_comes_too_early_for_a_plan_is_no_refusal() {
        let mut delivery = Delivery::default();
        let fault = Fault { cause: Cause::StaleEpoch, message: "an older plan".into() };
        delivery.refuse(WorkerId(1), TableId(0), 3, &fault);
        assert_eq!((delivery.refused(), delivery.has_frames()), (0, true));
    }
}
