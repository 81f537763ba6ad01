//! What a worker knows of links, where a codec's threshold follows them: those over which it pushes, and those over which it passes
//! streams on.

use super::session::{Access, Session};
use super::tables::Tables;
use crate::bandwidth::{self, Gauge, Probe, Reading, Watch};
use crate::role::Level;
use crate::status::LinksReport;
use crate::types::{ConnectionId, NodeId, ShardId, Time, WorkerId};
use crate::wire::Control;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(super) struct Links {
    /// The links that this worker's own threshold follows.
    pushes: Option<Watch<ShardId>>,
    /// The links to those behind this worker, which the shards' thresholds follow.
    followers: Option<Watch<WorkerId>>,
    /// What the shards know of these.
    told: Option<Reading>,
    /// Trains that arrive.
    gauges: BTreeMap<ConnectionId, Gauge>,
}

/// What is not under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Idle {
    /// Servers have acknowledged all pushes.
    pub(super) pushes: bool,
    /// Everybody behind this worker has what was passed on.
    pub(super) streams: bool,
}

impl Links {
    /// Codecs have changed, or shards are connected. Streams are passed on to these followers.
    pub(super) fn follow(
        &mut self,
        session: &mut Session,
        now: Time,
        tables: &mut Tables,
        followers: impl IntoIterator<Item = WorkerId>,
    ) {
        if session.access() == Access::ReadOnly {
            // It pushes nothing, and passes nothing on.
            return;
        }
        let seed = session.id().map_or(0, |id| id.0.into());
        let need = tables.iter().filter_map(|table| table.pushes_need()).max_by(f64::total_cmp);
        if self.pushes.as_ref().map(Watch::need) != need {
            self.pushes = need.map(|need| Watch::new(need, seed));
        }
        if let Some(watch) = &mut self.pushes {
            tables.shards().into_iter().for_each(|shard| watch.add(now, shard));
            watch.retain(now, |shard| session.is_up(*shard));
        }
        let need = tables.iter().filter_map(|table| table.versions_need()).max_by(f64::total_cmp);
        if self.followers.as_ref().map(Watch::need) != need {
            self.followers = need.map(|need| Watch::new(need, !seed));
            followers.into_iter().for_each(|follower| self.add(now, follower));
            // What shards know was said of another need.
            self.tell_behind(session, tables, None);
        }
        self.tell_tables(tables);
    }

    /// Why codecs cannot follow this worker's links, if some are to.
    pub(super) fn refusal(&self, session: &Session, tables: &Tables) -> Option<String> {
        let mut tables = tables.iter().filter(|_| session.is_aggregated());
        tables.find_map(|table| {
            let codec = table.watching_codec()?;
            Some(format!("table `{}`: {}", table.name(), bandwidth::not_behind_aggregators(&codec)))
        })
    }

    /// Streams are passed on to a worker. Thresholds are for those who train: readers do not count.
    pub(super) fn add(&mut self, now: Time, follower: WorkerId) {
        if let Some(watch) = self.followers.as_mut().filter(|_| !follower.is_reader()) {
            watch.add(now, follower);
        }
    }

    /// The same, by its connection.
    pub(super) fn add_connection(&mut self, now: Time, follower: ConnectionId) {
        if let ConnectionId::Node(NodeId::Worker(follower)) = follower {
            self.add(now, follower);
        }
    }

    /// Streams are passed on to a worker no more.
    pub(super) fn leave(
        &mut self,
        session: &mut Session,
        now: Time,
        follower: ConnectionId,
        tables: &mut Tables,
    ) {
        if let (ConnectionId::Node(NodeId::Worker(follower)), Some(watch)) = (follower, &mut self.followers) {
            watch.retain(now, |known| *known != follower);
        }
        self.tell(session, tables);
    }

    /// A connection is gone.
    pub(super) fn lose(
        &mut self,
        session: &mut Session,
        now: Time,
        connection: ConnectionId,
        tables: &mut Tables,
    ) {
        self.gauges.remove(&connection);
        if let (Some(shard), Some(watch)) = (connection.shard(), &mut self.pushes) {
            watch.retain(now, |known| *known != shard);
        }
        self.leave(session, now, connection, tables);
    }

    /// What a peer says of the link between it and this worker.
    pub(super) fn handle(
        &mut self,
        session: &mut Session,
        now: Time,
        from: ConnectionId,
        message: Control,
        tables: &mut Tables,
    ) {
        match message {
            Control::Probe(_) | Control::Measured(_) if from.is_reader() => {}
            Control::Probe(probe) => self.note_probe(session, now, from, &probe),
            Control::Measured(reading) => self.note(session, now, from, reading, tables),
            other => session.log(format!("ignored a `{}` message from {from}", other.name())),
        }
    }

    /// A frame of a train has arrived.
    fn note_probe(&mut self, session: &mut Session, now: Time, from: ConnectionId, probe: &Probe) {
        let others = self.gauges.iter_mut().filter(|(other, _)| **other != from);
        others.for_each(|(_, gauge)| gauge.note_other(probe.padding.len()));
        if let Some(reading) = self.gauges.entry(from).or_default().note_probe(now, probe) {
            session.say(from, &Control::Measured(reading));
        }
    }

    /// Bytes of a version arrive, maybe among trains.
    #[inline]
    pub(super) fn note_other(&mut self, bytes: usize) {
        self.gauges.values_mut().for_each(|gauge| gauge.note_other(bytes));
    }

    /// Something was read of the link to a shard, or to a worker that streams are passed on to.
    pub(super) fn note(
        &mut self,
        session: &mut Session,
        now: Time,
        to: ConnectionId,
        reading: Reading,
        tables: &mut Tables,
    ) {
        match (to.shard(), to) {
            (Some(shard), _) => {
                self.pushes.iter_mut().for_each(|watch| watch.note(now, shard, reading));
            }
            (None, ConnectionId::Node(NodeId::Worker(follower))) => {
                self.followers.iter_mut().for_each(|watch| watch.note(now, follower, reading));
            }
            _ => {}
        }
        self.tell(session, tables);
    }

    /// Sends probes that are due.
    pub(super) fn send_probes(&mut self, session: &mut Session, now: Time, idle: Idle) {
        while let Some((shard, probe)) = self.pushes.as_mut().and_then(|watch| watch.poll(now, idle.pushes)) {
            session.say(session.connection(shard), &Control::Probe(probe));
        }
        while let Some((follower, probe)) =
            self.followers.as_mut().and_then(|watch| watch.poll(now, idle.streams))
        {
            session.say(NodeId::Worker(follower).into(), &Control::Probe(probe));
        }
    }

    /// What has changed is told: to the log, the tables, and the shards whose streams are passed on.
    fn tell(&mut self, session: &mut Session, tables: &mut Tables) {
        if let Some(change) = self.pushes.as_mut().and_then(Watch::take_news) {
            session.note(Level::Info, change.to_string());
        }
        self.tell_tables(tables);
        let lacking = self.followers.as_ref().and_then(Watch::slowest);
        self.tell_behind(session, tables, lacking);
    }

    fn tell_behind(&mut self, session: &mut Session, tables: &Tables, lacking: Option<Reading>) {
        if lacking.is_some() != self.told.is_some() {
            for shard in tables.shards() {
                session.say(session.connection(shard), &Control::Behind { lacking });
            }
            self.told = lacking;
        }
    }

    fn tell_tables(&self, tables: &mut Tables) {
        let lacks_room = self.pushes.as_ref().is_some_and(Watch::lacks_room);
        tables.iter_mut().for_each(|table| table.set_lacks_room(lacks_room));
    }

    /// A shard is connected (again): it does not know what is behind this worker.
    pub(super) fn resume(&mut self, session: &mut Session, shard: ShardId) {
        if self.told.is_some() {
            session.say(session.connection(shard), &Control::Behind { lacking: self.told });
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let pushes = self.pushes.as_ref().and_then(Watch::next_timeout);
        pushes.into_iter().chain(self.followers.as_ref().and_then(Watch::next_timeout)).min()
    }

    pub(super) fn report(&self, now: Time) -> Option<LinksReport> {
        self.pushes.as_ref().map(|watch| watch.report(now))
    }
}
