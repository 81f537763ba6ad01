//! A copy of a shard: it begins with an image, or with the shard that was served here, and follows the log of the process that serves it.

use super::entry::Event;
use super::log::Log;
use crate::limits;
use crate::link::Link;
use crate::role::Role;
use crate::server::{Shard, ShardImage};
use crate::types::{ConnectionId, NodeId, ProcessId, ShardId, Time};
use crate::wire::{Flags, Header, ServedShard};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// A copy of a shard, as far as it is here.
#[derive(Debug)]
pub(super) struct CopyOf {
    pub(super) id: ShardId,
    /// The number of the coordinator's order to make it.
    pub(super) order: u64,
    /// To the process that serves it.
    pub(super) primary: Link,
    /// It is to be served here as soon as everything is here.
    pub(super) moves: bool,
    /// That process, once the image is here.
    pub(super) writer: ProcessId,
    /// What has come of the image.
    pub(super) image: Vec<u8>,
    /// The shard, once its image is here, and how many entries of the log it has.
    pub(super) shard: Option<(Box<Shard>, u64)>,
    /// The time of the last entry.
    pub(super) time: Time,
    /// The process that serves the shard was told of so many entries.
    pub(super) told: Option<u64>,
    /// This core served the shard before, and had logged these.
    former: Option<Former>,
}

/// What a core that serves a shard no more has logged and not applied. The process that took over may have some of it.
#[derive(Debug)]
pub(super) struct Former {
    /// The number of the first entry.
    pub(super) first: u64,
    pub(super) entries: VecDeque<Arc<Vec<u8>>>,
}

impl CopyOf {
    /// The coordinator has ordered it.
    pub(super) fn ordered(id: ShardId, order: u64, primary: Link, moves: bool) -> CopyOf {
        CopyOf {
            id,
            order,
            primary,
            moves,
            writer: ProcessId(0),
            image: Vec::new(),
            shard: None,
            time: Time::ZERO,
            told: None,
            former: None,
        }
    }

    /// A shard that was served here until now, which another process serves since: at that time here, and at that of the shard.
    pub(super) fn of_own(
        (now, at): (Time, Time),
        served: &ServedShard,
        order: u64,
        shard: Box<Shard>,
        former: Former,
    ) -> CopyOf {
        let mut primary = Link::new(now, NodeId::Shard(served.shard), served.addresses.clone());
        primary.set_patience(limits::MAX_COORDINATOR_GRACE);
        CopyOf {
            writer: served.process,
            shard: Some((shard, Log::first_of(served.since))),
            time: at,
            former: Some(former),
            ..CopyOf::ordered(served.shard, order, primary, false)
        }
    }

    /// A piece of the image comes. All of it, with the last one.
    pub(super) fn take_image(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<Option<ShardImage>, String> {
        self.image.extend_from_slice(payload);
        if !header.flags.has(Flags::LAST) {
            return Ok(None);
        }
        let image = ShardImage::decode(&std::mem::take(&mut self.image))?;
        (self.time, self.writer) = (Time(header.clock), ProcessId(header.landing));
        Ok(Some(image))
    }

    /// The shard is here, as it was before this entry of the log.
    pub(super) fn begin(&mut self, shard: Shard, next: u64) {
        self.shard = Some((Box::new(shard), next));
        // From now on it may be the only one, and is kept until the coordinator says something else.
        self.primary.set_patience(limits::MAX_COORDINATOR_GRACE);
        self.told = None;
    }

    /// An entry of the log comes.
    pub(super) fn take_entry(
        &mut self,
        number: u64,
        entry: &[u8],
        connections: &mut BTreeSet<ConnectionId>,
    ) -> Result<(), String> {
        let Some((_, has)) = &mut self.shard else { return Ok(()) };
        if number != *has {
            return Err(format!("entry {number} came where {has} was due"));
        }
        let (at, event) = Event::decode(entry)?;
        *has += 1;
        self.happen(at, event, connections)
    }

    /// Something happens to the copy.
    fn happen(
        &mut self,
        at: Time,
        event: Event<'_>,
        connections: &mut BTreeSet<ConnectionId>,
    ) -> Result<(), String> {
        self.time = at;
        match event {
            // The process that took over is so far by what it had as a copy.
            Event::Follows(entries) => return self.catch_up(entries, connections),
            Event::TakenOver(_) => {
                // Connections that were logged after that were never the shard's.
                connections.clear();
                self.former = None;
            }
            _ => note_connections(&event, connections),
        }
        let Some((shard, _)) = &mut self.shard else { return Ok(()) };
        event.apply(at, shard);
        discard(shard);
        Ok(())
    }

    /// Applies what this core logged itself when it served the shard, up to an entry.
    fn catch_up(&mut self, to: u64, connections: &mut BTreeSet<ConnectionId>) -> Result<(), String> {
        let Some(Former { first, entries }) = self.former.take() else {
            return Err("another process goes on from a log that is not here".into());
        };
        let count = to.checked_sub(first).filter(|count| *count <= entries.len() as u64);
        let count = count.ok_or_else(|| format!("entry {to} is none of those from {first} on"))?;
        for entry in entries.iter().take(count as usize) {
            let (at, event) = Event::decode(entry)?;
            self.happen(at, event, connections)?;
        }
        Ok(())
    }
}

/// Follows which connections a shard knows of.
pub(super) fn note_connections(event: &Event<'_>, connections: &mut BTreeSet<ConnectionId>) {
    match event {
        Event::Accepted(hello, _) => {
            connections.extend(hello.caller().map(|caller| hello.connection(caller)));
        }
        Event::Connected(connection, _) => drop(connections.insert(*connection)),
        Event::Disconnected(connection, _) => drop(connections.remove(connection)),
        Event::Frame(..)
        | Event::Timeout
        | Event::Written(..)
        | Event::Imaged
        | Event::Follows(_)
        | Event::TakenOver(_) => {}
    }
}

/// A copy says nothing to anybody.
pub(super) fn discard(shard: &mut Shard) {
    while shard.poll_output().is_some() {}
}
