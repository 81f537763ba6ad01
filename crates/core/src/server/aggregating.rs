//! A shard and its aggregators: sums, and frames that they pass on.

use super::aggregators::Turn;
use super::delivery::PendingPull;
use super::{Shard, decode_control, following, not_a_member};
use crate::role::Output;
use crate::types::{AggregatorId, Clock, NodeId, TableId, Time, WorkerId};
use crate::wire::frame::{Completed, FromAggregator, Subject, Sum};
use crate::wire::group::{self, Entry};
use crate::wire::{Control, Header};

/// A control message of an aggregator: its own, about the streams that it passes on, or what worker 0 says through it.
pub(super) fn handle_aggregator_control(own: &mut Shard, now: Time, id: AggregatorId, payload: &[u8]) {
    let from = NodeId::Aggregator(id);
    let handled = decode_control(payload).and_then(|message| match message {
        Control::Subscribe { .. } | Control::Unsubscribe { .. } | Control::Seen { .. } => {
            following::handle_follower(own, now, from, message)
        }
        Control::Verdict { table, number, holds } if own.delivery.is_through(WorkerId::FIRST, id) => {
            own.handle_verdict(now, WorkerId::FIRST, table, number, holds)
        }
        // Worker 0 has come to be reached otherwise.
        _ => Ok(()),
    });
    if let Err(fault) = handled {
        own.delivery.refuse_to(from, TableId(0), 0, &fault);
    }
}

pub(super) fn handle_aggregator_frame(
    own: &mut Shard,
    now: Time,
    id: AggregatorId,
    header: &Header,
    payload: &[u8],
) {
    if own.plan.as_ref().is_some_and(|plan| header.epoch > plan.epoch) {
        // The aggregator knows of a change that has yet to be heard of here. It comes back, and sends everything again. A
        // refusal would have workers begin anew a push of which other chunks were taken before the change.
        own.outputs.push_back(Output::Disconnect { connection: NodeId::Aggregator(id).into() });
        return own.lose_aggregator(now, id);
    }
    match FromAggregator::decode(header) {
        Some(FromAggregator::Relayed(worker, frame)) => {
            if !own.members.has(worker) {
                let Subject { table, request, .. } = *frame.subject();
                let fault = not_a_member(worker);
                return own.delivery.refuse_to(NodeId::Aggregator(id), table, request, &fault);
            }
            own.reach_through(worker, id);
            own.tell_judge(now);
            own.handle_worker_frame(now, worker, &frame, payload);
        }
        Some(FromAggregator::Contributors { number }) => {
            if take_turn(own, id, number) == Turn::Next {
                let workers = group::decode_ranks(payload).unwrap_or_else(|error| {
                    own.log(format!("{id}: {error}"));
                    Vec::new()
                });
                own.aggregators.set_contributors(id, workers);
            }
        }
        Some(FromAggregator::Sum(sum)) => handle_sum(own, now, id, &sum, payload),
        Some(FromAggregator::Completed(list)) => handle_completed(own, now, id, &list, payload),
        Some(FromAggregator::Forget(worker)) => {
            own.lose_worker(now, worker);
            own.tell_judge(now);
        }
        None => own.log(format!("ignored a {:?} frame from {id}", header.kind)),
    }
}

/// Whether a frame that an aggregator numbered is the next one. One that was taken is sent again after a broken
/// connection.
pub(super) fn take_turn(own: &mut Shard, id: AggregatorId, number: u64) -> Turn {
    let turn = own.aggregators.take_turn(id, number);
    if let Turn::TooEarly { next } = turn {
        own.log(format!("{id} sent frame {number} of its sums before frame {next}"));
    }
    turn
}

/// A sum of some workers' gradients of one chunk.
pub(super) fn handle_sum(own: &mut Shard, now: Time, id: AggregatorId, sum: &Sum, payload: &[u8]) {
    if take_turn(own, id, sum.subject.request) != Turn::Next {
        return;
    }
    own.tables.count_bytes(payload);
    if own.aggregators.is_refused(id, sum) {
        return;
    }
    let table = own.check_sum(&sum.subject);
    let contributors = own.aggregators.contributors(id);
    let taken = table.and_then(|table| own.tables.push_sum(table, id, sum, &contributors, payload));
    match taken {
        Ok(None) => own.aggregators.note_taken(id, sum),
        Ok(Some(worker)) => end_session(own, now, id, worker, sum.clock),
        Err(fault) => {
            own.delivery.count_refused();
            own.aggregators.note_refused(id, (sum.subject.table, sum.clock), sum.attempt, fault);
        }
    }
}

/// A gradient of this worker is in a sum of an aggregator, and is here already: the aggregator begins anew, and its workers send what
/// was not acknowledged themselves.
pub(super) fn end_session(own: &mut Shard, now: Time, id: AggregatorId, worker: WorkerId, clock: Clock) {
    own.log(format!(
        "{id} begins anew: clock {clock} of {worker} is in a sum of it, and came another way before"
    ));
    own.aggregators.end_session(id);
    own.outputs.push_back(Output::Disconnect { connection: NodeId::Aggregator(id).into() });
    own.lose_aggregator(now, id);
    own.tell_judge(now);
}

/// Some workers' pushes are complete in the sums before: they count, and the pulls that come with them are asked.
pub(super) fn handle_completed(
    own: &mut Shard,
    now: Time,
    id: AggregatorId,
    list: &Completed,
    payload: &[u8],
) {
    let turn = take_turn(own, id, list.subject.request);
    if matches!(turn, Turn::TooEarly { .. }) {
        return;
    }
    let entries = group::decode(payload).unwrap_or_else(|error| {
        own.log(format!("{id}: {error}"));
        Vec::new()
    });
    let table = own.check_sum(&list.subject);
    if let (Ok(table), Turn::Next, false) = (&table, turn, entries.is_empty())
        && let Err(fault) = own.tables.get(*table).check_clock(list.clock)
    {
        own.aggregators.note_refused(id, (list.subject.table, list.clock), list.attempt, fault);
    }
    let refused = own.aggregators.refusal(id, list);
    let fault = table.as_ref().err().or(refused.as_ref().map(|refused| refused.fault()));
    let counts = turn == Turn::Next && refused.as_ref().is_none_or(|refused| refused.counts());
    // The worker that was last there is counted last, so that those who wait for it know.
    let is_last = |entry: &&Entry| Some(entry.worker) == list.last;
    let last = entries.iter().filter(is_last);
    for &Entry { worker, request, .. } in entries.iter().filter(|entry| !is_last(entry)).chain(last) {
        let is_member = own.members.has(worker);
        if !is_member {
            let to = NodeId::Aggregator(id);
            own.delivery.refuse_to(to, list.subject.table, request, &not_a_member(worker));
        } else if let Some(fault) = fault {
            own.delivery.refuse_to(NodeId::Aggregator(id), list.subject.table, request, fault);
        }
        if let (Ok(table), true) = (&table, counts && is_member) {
            own.reach_through(worker, id);
            own.tables.get_mut(*table).count_push(now, worker, list.clock);
        }
    }
    own.delivery.complete_sums(id, list);
    let Ok(table) = table else { return };
    own.tables.settle(now, table, &mut own.delivery);
    if refused.is_some() {
        return;
    }
    // The aggregator reads answers by the codecs that it knew; its workers ask again when they know the others.
    let stale = own.check_subject(&list.subject).err();
    for &Entry { worker, request, .. } in entries.iter().filter(|entry| entry.want_params) {
        if let Some(fault) = &stale {
            own.delivery.refuse_to(NodeId::Aggregator(id), list.subject.table, request, fault);
        } else if own.members.has(worker) {
            own.reach_through(worker, id);
            own.tell_judge(now);
            own.ask(now, PendingPull::after_sum(worker, list, request));
        }
    }
}
