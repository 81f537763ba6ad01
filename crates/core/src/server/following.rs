//! A shard and those who follow its streams.

use super::{Shard, not_a_member};
use crate::role::{Level, Output};
use crate::types::{NodeId, ShardId, TableId, Time};
use crate::wire::{Cause, Control, Fault, Position};

/// What a worker or an aggregator says of the streams that it follows, or is to follow.
pub(super) fn handle_follower(
    own: &mut Shard,
    now: Time,
    from: NodeId,
    message: Control,
) -> Result<(), Fault> {
    match message {
        Control::Subscribe { shard, positions, is_question } => {
            handle_subscribe(own, now, from, shard, &positions, is_question)?;
        }
        Control::Unsubscribe { tables, .. } => {
            tables.into_iter().for_each(|table| own.delivery.unsubscribe(from, table));
            if let NodeId::Worker(worker) = from
                && !own.delivery.is_followed_by(from)
            {
                own.links.leave(now, worker, &mut own.tables);
            }
        }
        Control::Seen { table, version, .. } => {
            let place = broadcast_table(own, from, table)?;
            let reading = own.delivery.note_seen(now, from, table, version, own.tables.get(place));
            if let (Some(reading), NodeId::Worker(worker)) = (reading, from) {
                own.links.note(now, worker, reading, &mut own.tables);
            }
        }
        _ => {}
    }
    Ok(())
}

/// Another threshold of a codec holds.
pub(super) fn tell_news(own: &mut Shard) {
    if let Some(line) = own.links.take_news() {
        own.outputs.push_back(Output::Log(Level::Info, line));
    }
}

/// Somebody follows the streams of some tables from now on.
pub(super) fn handle_subscribe(
    own: &mut Shard,
    now: Time,
    from: NodeId,
    shard: ShardId,
    positions: &[Position],
    is_question: bool,
) -> Result<(), Fault> {
    if let NodeId::Worker(worker) = from
        && !own.members.has(worker)
        && !own.readers.has(worker)
    {
        return Err(not_a_member(worker));
    }
    if own.id() != Some(shard) {
        let message = format!("{from} asks for streams of {shard} here");
        return Err(Fault { cause: Cause::Protocol, message });
    }
    if positions.len() > own.tables.len() {
        let (asked, tables) = (positions.len(), own.tables.len());
        let message = format!("{from} asks for {asked} streams, and there are {tables} tables");
        return Err(Fault { cause: Cause::Protocol, message });
    }
    Position::check_order(positions, from)?;
    for position in positions {
        let table = broadcast_table(own, from, position.table)?;
        own.delivery.subscribe(now, from, *position, is_question, own.tables.get(table));
    }
    // The job's thresholds are for those who train.
    match from {
        NodeId::Worker(worker) if !is_question && !worker.is_reader() => own.links.add(now, worker),
        _ => {}
    }
    Ok(())
}

/// The index of a table whose stream somebody speaks of.
pub(super) fn broadcast_table(own: &Shard, from: NodeId, table: TableId) -> Result<usize, Fault> {
    let found = own.tables.find(table).filter(|table| table.is_broadcast() && table.elements() > 0);
    found.map(|_| table.0 as usize).ok_or_else(|| {
        let message = format!("{from} asks for a stream of table {}, and there is none here", table.0);
        Fault { cause: Cause::Protocol, message }
    })
}
