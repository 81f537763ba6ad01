//! Updates of streams as a reader takes them: one may be the last that a version of all tables lacks.

use super::reporter::Reporter;
use super::session::Session;
use super::staging::Staging;
use super::streams::{StreamId, Streams};
use super::tables::Tables;
use super::ticket::Tickets;
use crate::stream::Taken;
use crate::types::{Clock, ConnectionId, Time};
use crate::wire::frame::Update;

/// The parts of a reader's traffic that an update concerns.
pub(super) struct StagedUpdates<'a> {
    pub(super) session: &'a mut Session,
    pub(super) now: Time,
    pub(super) staging: &'a mut Staging,
    pub(super) tables: &'a mut Tables,
    pub(super) streams: &'a mut Streams,
    pub(super) reporter: &'a mut Reporter,
    pub(super) tickets: &'a mut Tickets,
}

impl StagedUpdates<'_> {
    /// A chunk of a version, which may be the last one that the version lacks.
    pub(super) fn take(&mut self, from: ConnectionId, id: StreamId, update: &Update, payload: &[u8]) {
        let local = &mut self.tables[id.table];
        let Some(stream) = local.layout().index_of(id.shard) else { return };
        match self.staging.take(local, stream, update, payload) {
            Taken::Known => {}
            Taken::Missing => return self.streams.note_gap(self.session, self.now, self.tables, id),
            Taken::Differs => return self.repair(id, update.round),
            Taken::Applied => self.streams.count(id),
        }
        if update.piece.is_last {
            self.streams.note_arrival(self.session, self.tables, id, from);
        }
        let Some(version) = self.staging.next_cut() else {
            if update.piece.is_last {
                for (id, version) in self.staging.stuck(self.tables) {
                    self.streams.say_seen(self.session, id, version);
                }
            }
            return;
        };
        let differing = self.staging.cut(self.tables, version);
        if differing.is_empty() {
            for (index, local) in self.tables.iter().enumerate() {
                for shard in local.layout().shards() {
                    self.streams.say_seen(self.session, StreamId { table: index, shard }, version);
                }
            }
            self.reporter.set_clock(version.saturating_add(1));
            self.reporter.hurry(self.now);
            self.tickets.reach_version(version);
        }
        for (table, stream) in differing {
            let table = table.0 as usize;
            let shard = self.tables[table].layout().shards().nth(stream);
            shard.into_iter().for_each(|shard| self.repair(StreamId { table, shard }, version));
        }
    }

    /// Fetches a stream anew whose values are not those that were broadcast. Gives up when that does not help.
    fn repair(&mut self, id: StreamId, version: Clock) {
        if self.staging.repair(self.session, &mut self.tables[id.table], id, version) {
            self.streams.ask_anew(self.session, self.tables, id);
        }
    }
}
