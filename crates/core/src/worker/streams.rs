//! The streams of tables that are broadcast: from whom a worker gets them, and to whom it passes them on.
//!
//! The coordinator says who passes a shard's streams on to this worker. While that one is not connected, or brings nothing although
//! there is something, they come from the shard itself: it always knows the way.

use super::links::Links;
use super::session::Session;
use super::staging::Staging;
use super::tables::Tables;
use crate::bandwidth::Reading;
use crate::limits;
use crate::role::{Body, Frame};
use crate::stream::{ReplicaChunks, Stream, Taken};
use crate::types::{Clock, ConnectionId, NodeId, ShardId, TableId, Time, WorkerId};
use crate::wire::frame::Update;
use crate::wire::{Control, Kind, Position, Route, control};
use std::collections::{BTreeMap, BTreeSet};

/// A table's stream of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StreamId {
    pub(super) table: usize,
    pub(super) shard: ShardId,
}

/// A chunk of a version of a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Incoming<'a> {
    pub(super) from: ConnectionId,
    pub(super) id: StreamId,
    pub(super) update: Update,
    pub(super) payload: &'a [u8],
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    /// Who passes each of them on to this worker; nobody: it comes from the shard. Empty until the coordinator has said so.
    routes: BTreeMap<StreamId, Option<WorkerId>>,
    /// Workers that bring nothing although there is something.
    avoided: BTreeSet<WorkerId>,
    /// From whom they come now.
    sources: BTreeMap<StreamId, ConnectionId>,
    /// How many frames of each have come.
    taken: BTreeMap<StreamId, u64>,
    /// Those of which something is missing: when all of it is asked for.
    gaps: BTreeMap<StreamId, Time>,
    patience: Patience,
    /// Those that others follow here.
    passed_on: BTreeMap<StreamId, Stream>,
    /// Bytes of payloads that were passed on.
    bytes_relayed: u64,
}

/// What was here when it was last looked at.
#[derive(Debug, Default)]
struct Patience {
    next: Option<Time>,
    /// How many frames had come of streams that others pass on.
    taken: BTreeMap<StreamId, u64>,
    /// How often in a row nothing had come of each.
    looks: BTreeMap<StreamId, u32>,
    /// Of these, the ones that the shard was asked about.
    asked: BTreeSet<StreamId>,
    /// Workers that were not connected.
    down: BTreeSet<WorkerId>,
}

/// Sends to those that streams are passed on to, and counts the bytes.
fn relaying<'a>(session: &'a mut Session, bytes: &'a mut u64) -> impl FnMut(ConnectionId, Frame) + 'a {
    move |to, frame| {
        *bytes += u64::from(frame.header.payload_bytes);
        session.send(to, frame);
    }
}

fn chunks_of(tables: &Tables, id: StreamId) -> Option<ReplicaChunks<'_>> {
    let local = tables.get(TableId(id.table as u32))?;
    let (stream, replica) = (local.layout().index_of(id.shard)?, local.replica()?);
    Some(ReplicaChunks { id: TableId(id.table as u32), epoch: local.valid_from(), replica, stream })
}

/// How far this worker is in a stream.
fn position(tables: &Tables, id: StreamId) -> Option<Position> {
    let local = tables.get(TableId(id.table as u32))?;
    let (stream, _) = (local.layout().index_of(id.shard)?, local.replica()?);
    let version = local.stream_version(stream);
    Some(Position { table: TableId(id.table as u32), epoch: local.valid_from(), version })
}

impl Streams {
    // From whom they come.

    /// The coordinator says from whom streams are to come.
    pub(super) fn take_routes(
        &mut self,
        session: &mut Session,
        now: Time,
        tables: &Tables,
        routes: Vec<Route>,
    ) {
        let relays = routes.iter().filter_map(|route| route.relay.clone());
        session.set_relays(now, relays.map(|relay| (relay.worker, relay.addresses)).collect());
        self.sources.retain(|_, source| session.is_connected(*source));
        self.avoided.clear();
        self.patience = Patience::default();
        self.routes.clear();
        for Route { shard, tables, relay } in routes {
            let relay = relay.map(|relay| relay.worker);
            for table in tables {
                self.routes.insert(StreamId { table: table.0 as usize, shard }, relay);
            }
        }
        if self.routes.values().any(Option::is_some) {
            self.patience.next = Some(now + limits::RELAY_PATIENCE);
        }
        self.settle(session, tables);
    }

    /// Subscribes to every stream where it is to come from, as far as that is connected.
    pub(super) fn settle(&mut self, session: &mut Session, tables: &Tables) {
        let mut left: BTreeMap<(ConnectionId, ShardId), Vec<TableId>> = BTreeMap::new();
        let mut wanted: BTreeMap<(ConnectionId, ShardId), Vec<Position>> = BTreeMap::new();
        for (&id, relay) in &self.routes {
            let Some(position) = position(tables, id) else { continue };
            let relay = relay.filter(|relay| !self.avoided.contains(relay) && session.is_relay_up(*relay));
            let source = relay.map_or_else(|| session.connection(id.shard), ConnectionId::RelayedBy);
            if self.sources.get(&id) == Some(&source) || !session.is_connected(source) {
                continue;
            }
            if let Some(before) = self.sources.insert(id, source) {
                left.entry((before, id.shard)).or_default().push(position.table);
            }
            wanted.entry((source, id.shard)).or_default().push(position);
        }
        for ((from, shard), tables) in left {
            session.say(from, &Control::Unsubscribe { shard, tables });
        }
        for ((from, shard), positions) in wanted {
            session.say(from, &Control::Subscribe { shard, positions, is_question: false });
        }
    }

    /// A connection is gone, and with it the streams that came over it, or went.
    pub(super) fn lose(&mut self, session: &mut Session, tables: &Tables, connection: ConnectionId) {
        self.sources.retain(|_, source| *source != connection);
        self.passed_on.values_mut().for_each(|stream| stream.forget(connection));
        self.settle(session, tables);
    }

    /// Something of a stream is missing: it is asked for from what is whole here, once; and if that does not help, from the
    /// beginning.
    pub(super) fn note_gap(&mut self, session: &mut Session, now: Time, tables: &Tables, id: StreamId) {
        if self.gaps.contains_key(&id) {
            return;
        }
        self.gaps.insert(id, now + limits::RESUBSCRIBE_AFTER);
        self.ask_anew(session, tables, id);
    }

    /// Asks for a stream once more, from what is whole here.
    pub(super) fn ask_anew(&mut self, session: &mut Session, tables: &Tables, id: StreamId) {
        if let (Some(&source), Some(position)) = (self.sources.get(&id), position(tables, id)) {
            let (shard, positions) = (id.shard, vec![position]);
            session.say(source, &Control::Subscribe { shard, positions, is_question: false });
        }
    }

    /// A version of a stream is whole here, which came over this connection.
    pub(super) fn note_version(
        &mut self,
        session: &mut Session,
        tables: &Tables,
        id: StreamId,
        version: Clock,
        from: ConnectionId,
    ) {
        self.note_arrival(session, tables, id, from);
        self.say_seen(session, id, version);
    }

    /// All of a version has come over this connection.
    pub(super) fn note_arrival(
        &mut self,
        session: &mut Session,
        tables: &Tables,
        id: StreamId,
        from: ConnectionId,
    ) {
        self.gaps.remove(&id);
        let (table, shard) = (TableId(id.table as u32), session.connection(id.shard));
        let source = self.sources.get(&id).copied();
        let was_asked = self.patience.asked.remove(&id);
        if was_asked && source != Some(from) && from == shard {
            // The shard had it, and the one that should have passed it on did not.
            if let Some(relay) = self.routes.get(&id).copied().flatten() {
                self.avoid(session, relay);
                self.settle(session, tables);
            }
        } else if source != Some(shard) && (was_asked || from == shard) {
            // The shard sends it too, since it was asked.
            session.say(shard, &Control::Unsubscribe { shard: id.shard, tables: vec![table] });
        }
    }

    /// A version is here. Whoever brought it: its source may send more.
    pub(super) fn say_seen(&mut self, session: &mut Session, id: StreamId, version: Clock) {
        let table = TableId(id.table as u32);
        if let Some(&source) = self.sources.get(&id) {
            session.say(source, &Control::Seen { shard: id.shard, table, version });
        }
    }

    fn avoid(&mut self, session: &mut Session, relay: WorkerId) {
        if self.avoided.insert(relay) {
            session.tell_coordinator(&Control::Unreachable { relay });
        }
    }

    /// Codecs of some tables have changed: what comes by the former ones is not read any more.
    pub(super) fn restart(&mut self, session: &mut Session, tables: &Tables, changed: &[usize]) {
        self.sources.retain(|id, _| !changed.contains(&id.table));
        self.settle(session, tables);
        for (&id, stream) in self.passed_on.iter_mut().filter(|(id, _)| changed.contains(&id.table)) {
            if let Some(chunks) = chunks_of(tables, id) {
                stream.skip_to(chunks.replica.version(chunks.stream));
                stream.restart(&chunks, &mut relaying(session, &mut self.bytes_relayed));
            }
        }
    }

    /// Asks for all of those streams whose gaps were not closed. A reader has held back some of them.
    pub(super) fn close_gaps(
        &mut self,
        session: &mut Session,
        now: Time,
        tables: &mut Tables,
        mut staging: Option<&mut Staging>,
    ) {
        for id in self.take_overdue_gaps(now) {
            let local = &mut tables[id.table];
            let stream = local.layout().index_of(id.shard);
            match (stream, &mut staging, local.replica_mut()) {
                // Its replicas are those of a whole version, which what follows is asked from.
                (Some(stream), Some(staging), _) => staging.drop_held(local, stream),
                (Some(stream), None, Some(replica)) => replica.forget(stream),
                _ => {}
            }
            self.ask_anew(session, tables, id);
        }
    }

    fn take_overdue_gaps(&mut self, now: Time) -> Vec<StreamId> {
        let due: Vec<StreamId> =
            self.gaps.iter().filter(|(_, due)| **due <= now).map(|(id, _)| *id).collect();
        for id in &due {
            self.gaps.insert(*id, now + limits::RESUBSCRIBE_AFTER);
        }
        due
    }

    /// Asks shards about streams that others should pass on, and of which nothing has come for a while: there may be nothing.
    pub(super) fn handle_timeout(&mut self, session: &mut Session, now: Time, tables: &Tables) {
        if self.patience.next.is_none_or(|next| next > now) {
            return;
        }
        let relays: BTreeSet<WorkerId> = self.routes.values().flatten().copied().collect();
        let down: BTreeSet<WorkerId> =
            relays.into_iter().filter(|relay| !session.is_relay_up(*relay)).collect();
        let still_down: Vec<WorkerId> = down.intersection(&self.patience.down).copied().collect();
        still_down.into_iter().for_each(|relay| self.avoid(session, relay));
        let is_relayed = |source: &ConnectionId| matches!(source, ConnectionId::RelayedBy(_));
        let relayed = || self.sources.iter().filter(|(_, source)| is_relayed(source));
        let taken: BTreeMap<StreamId, u64> =
            relayed().map(|(id, _)| (*id, self.taken.get(id).copied().unwrap_or(0))).collect();
        let before = &self.patience;
        let is_same = |id: &StreamId| before.taken.get(id) == taken.get(id);
        let busy: BTreeSet<ConnectionId> =
            relayed().filter(|(id, _)| !is_same(id)).map(|(_, source)| *source).collect();
        let mut questions: BTreeMap<ShardId, Vec<Position>> = BTreeMap::new();
        let (mut asked, mut looks) = (BTreeSet::new(), BTreeMap::new());
        for (&id, source) in relayed().filter(|(id, _)| is_same(id)) {
            let count = before.looks.get(&id).map_or(1, |count: &u32| count.saturating_add(1));
            looks.insert(id, count);
            // A version may take long to come, and behind those of other streams of a slow link: only if nothing comes from its
            // relay something may be wrong, or if all others come and it does not.
            let stands_still = !busy.contains(source) || count >= limits::LOOKS_AT_BUSY_RELAYS;
            if let Some(position) = position(tables, id).filter(|_| stands_still) {
                questions.entry(id.shard).or_default().push(position);
                asked.insert(id);
            }
        }
        for (shard, positions) in questions {
            let question = Control::Subscribe { shard, positions, is_question: true };
            session.say(session.connection(shard), &question);
        }
        // An answer may take longer than the time between two looks.
        let still_asked = before.asked.iter().filter(|id| taken.contains_key(id));
        asked.extend(still_asked);
        let next = Some(now + limits::RELAY_PATIENCE);
        self.patience = Patience { next, taken, looks, asked, down };
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.gaps.values().copied().chain(self.patience.next).min()
    }

    // To whom they are passed on.

    /// Takes a chunk of a version of a stream, and passes it on. Whether a version is whole by it.
    pub(super) fn take(
        &mut self,
        session: &mut Session,
        now: Time,
        tables: &mut Tables,
        incoming: Incoming<'_>,
    ) -> bool {
        let Incoming { from, id, update, payload } = incoming;
        let local = &mut tables[id.table];
        let Some(stream) = local.layout().index_of(id.shard) else { return false };
        let Some(replica) = local.replica_mut() else { return false };
        let before = replica.version(stream);
        let taken = replica.take(stream, &update, payload);
        let version = replica.version(stream);
        match taken {
            Taken::Applied => {
                self.count(id);
                self.pass_on(session, now, id, update, payload);
            }
            // The end of a version matters, whatever brought its chunks.
            Taken::Known if version > before => self.pass_on(session, now, id, update, payload),
            Taken::Known => self.note_known(id, &update),
            Taken::Missing => self.note_gap(session, now, tables, id),
            Taken::Differs => {
                // Each of those behind this worker compares for itself.
                self.pass_on(session, now, id, update, payload);
                replica.forget(stream);
                let (name, shard, round) = (local.name(), id.shard, update.round);
                session.log(format!(
                    "table `{name}` is not what {shard} broadcast as version {round}; it is fetched anew"
                ));
                self.ask_anew(session, tables, id);
            }
        }
        let Some(version) = version.filter(|_| version > before) else { return false };
        self.note_version(session, tables, id, version, from);
        true
    }

    /// A message of a worker to which streams are passed on, or are to be. Returned if it is not about streams.
    pub(super) fn handle_follower(
        &mut self,
        session: &mut Session,
        tables: &mut Tables,
        links: &mut Links,
        now: Time,
        from: ConnectionId,
        message: Control,
    ) -> Option<Control> {
        match message {
            Control::Subscribe { shard, positions, .. } => {
                self.subscribe(session, tables, from, shard, &positions);
                links.add_connection(now, from);
            }
            Control::Unsubscribe { shard, tables: left } => {
                if !self.unsubscribe(from, shard, &left) {
                    links.leave(session, now, from, tables);
                }
            }
            Control::Seen { shard, table, version } => {
                let id = StreamId { table: table.0 as usize, shard };
                if let Some(reading) = self.note_seen(session, tables, from, id, version, now) {
                    links.note(session, now, from, reading, tables);
                }
            }
            other => return Some(other),
        }
        None
    }

    /// A worker wants streams passed on to it.
    fn subscribe(
        &mut self,
        session: &mut Session,
        tables: &Tables,
        to: ConnectionId,
        shard: ShardId,
        positions: &[Position],
    ) {
        let ConnectionId::Node(NodeId::Worker(worker)) = to else { return };
        if let Err(fault) = Position::check_order(positions, worker) {
            return session.send(to, control::frame(Kind::Error, &fault));
        }
        for position in positions {
            let id = StreamId { table: position.table.0 as usize, shard };
            let Some(chunks) = chunks_of(tables, id) else { continue };
            let stream = self.passed_on.entry(id).or_default();
            if !stream.is_followed() {
                stream.skip_to(chunks.replica.version(chunks.stream));
            }
            stream.subscribe(to, *position, &chunks, &mut relaying(session, &mut self.bytes_relayed));
        }
    }

    /// Everybody who follows some stream here.
    pub(super) fn followers(&self) -> BTreeSet<WorkerId> {
        let worker = |connection: ConnectionId| match connection {
            ConnectionId::Node(NodeId::Worker(worker)) => Some(worker),
            _ => None,
        };
        self.passed_on.values().flat_map(Stream::followers).filter_map(worker).collect()
    }

    /// Somebody follows these streams no more. Whether it still follows some.
    fn unsubscribe(&mut self, from: ConnectionId, shard: ShardId, tables: &[TableId]) -> bool {
        for table in tables {
            if let Some(stream) = self.passed_on.get_mut(&StreamId { table: table.0 as usize, shard }) {
                stream.forget(from);
            }
        }
        self.passed_on.values().any(|stream| stream.is_followed_by(from))
    }

    /// A worker that streams are passed on to has a version: what its link carries, if that is known from it.
    fn note_seen(
        &mut self,
        session: &mut Session,
        tables: &Tables,
        from: ConnectionId,
        id: StreamId,
        version: Clock,
        now: Time,
    ) -> Option<Reading> {
        let (stream, chunks) = (self.passed_on.get_mut(&id)?, chunks_of(tables, id)?);
        stream.note_seen(now, from, version, &chunks, &mut relaying(session, &mut self.bytes_relayed))
    }

    /// Whether everybody whom streams are passed on to has all of them.
    pub(super) fn is_settled(&self) -> bool {
        self.passed_on.values().all(Stream::is_settled)
    }

    /// A frame has come that brings a stream on.
    pub(super) fn count(&mut self, id: StreamId) {
        *self.taken.entry(id).or_default() += 1;
    }

    /// A frame has come that is not passed on, since its chunk is newer here.
    pub(super) fn note_known(&mut self, id: StreamId, update: &Update) {
        if let Some(stream) = self.passed_on.get_mut(&id) {
            stream.note_known(update);
        }
    }

    /// Passes a frame on as it is, if somebody follows its stream here.
    pub(super) fn pass_on(
        &mut self,
        session: &mut Session,
        now: Time,
        id: StreamId,
        update: Update,
        payload: &[u8],
    ) {
        let count = self.passed_on.len();
        let Some(stream) = self.passed_on.get_mut(&id).filter(|stream| stream.is_followed()) else { return };
        let body = Body::Counted(payload.into());
        stream.publish(now, update, &body, payload.len(), &mut relaying(session, &mut self.bytes_relayed));
        stream.trim(limits::STREAM_LOG_BYTES / count);
    }

    /// Bytes of payloads that were passed on.
    pub(super) fn bytes_relayed(&self) -> u64 {
        self.bytes_relayed
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.passed_on.values().map(Stream::log_bytes).sum()
    }
}
