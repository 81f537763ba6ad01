//! What a reader holds of the streams: a version of all tables, and frames of versions that are not whole yet.
//!
//! A reader's replicas are of one version, over all tables and shards. Frames of later versions are held back until every chunk has
//! one of the same number; then they are applied together. Only chunks without any values take frames as they come.

use super::WorkerError;
use super::local_table::LocalTable;
use super::session::Session;
use super::streams::StreamId;
use super::tables::Tables;
use crate::limits;
use crate::stream::Taken;
use crate::types::{Clock, TableId};
use crate::wire::frame::Update;
use std::collections::{BTreeMap, VecDeque};

/// A reader's versions.
#[derive(Debug, Default)]
pub(super) struct Staging {
    /// Chunks of all tables.
    chunks: usize,
    /// How many chunks have a version, in their replicas or among the frames that are held back.
    having: BTreeMap<Clock, usize>,
    /// The version that all replicas are at; `None` before the first, and while one is fetched anew.
    version: Option<Clock>,
    /// Bytes of frames that are held back.
    held_bytes: usize,
    /// A chunk has left out versions, so that some streams may have come to versions that will never be whole.
    has_jumped: bool,
    /// Frames that are held back.
    held: usize,
}

/// A table's chunks.
#[derive(Debug, Default)]
pub(super) struct StagedTable {
    chunks: Vec<Chunk>,
    /// The numbers of each stream's chunks.
    streams: Vec<Vec<u32>>,
    /// Of each stream: the times in a row that its values were not those that were broadcast.
    repairs: Vec<u32>,
}

#[derive(Debug, Default)]
struct Chunk {
    /// The version in the replica.
    has: Option<Clock>,
    /// Later ones, ascending.
    held: VecDeque<Held>,
}

/// A frame that is held back.
#[derive(Debug)]
struct Held {
    update: Update,
    payload: Box<[u8]>,
}

impl Chunk {
    fn newest(&self) -> Option<Clock> {
        self.held.back().map(|held| held.update.version).or(self.has)
    }
}

impl StagedTable {
    /// For chunks of these streams, in the order of their numbers.
    pub(super) fn new(streams_of_chunks: impl IntoIterator<Item = usize>) -> StagedTable {
        let mut table = StagedTable::default();
        for (number, stream) in (0..).zip(streams_of_chunks) {
            if table.streams.len() <= stream {
                table.streams.resize(stream + 1, Vec::new());
                table.repairs.resize(stream + 1, 0);
            }
            table.streams[stream].push(number);
            table.chunks.push(Chunk::default());
        }
        table
    }

    fn of_stream(&self, stream: usize) -> impl Iterator<Item = &Chunk> {
        self.streams[stream].iter().map(|&number| &self.chunks[number as usize])
    }

    /// The version up to which a stream has come, held back or not.
    pub(super) fn position(&self, stream: usize) -> Option<Clock> {
        // A reader that is connected again and again does not get more and more ahead of the other streams.
        let is_far = |chunk: &Chunk| chunk.held.len() as u64 > 2 * limits::MAX_VERSIONS_UNSEEN;
        let position = |chunk: &Chunk| if is_far(chunk) { chunk.has } else { chunk.newest() };
        self.of_stream(stream).map(position).min().flatten()
    }
}

impl Staging {
    /// For tables that are laid out.
    pub(super) fn new(tables: &Tables) -> Staging {
        let chunks = tables.iter().filter_map(LocalTable::staged).map(|table| table.chunks.len()).sum();
        Staging { chunks, ..Staging::default() }
    }

    /// The version that all replicas are at.
    pub(super) fn version(&self) -> Option<Clock> {
        self.version
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    fn count(&mut self, version: Clock) {
        *self.having.entry(version).or_default() += 1;
    }

    fn uncount(&mut self, version: Clock) {
        if let Some(count) = self.having.get_mut(&version) {
            *count = count.saturating_sub(1);
        }
    }

    /// Takes a frame of a table's stream: applies it where there is nothing yet, and holds it back otherwise.
    pub(super) fn take(
        &mut self,
        local: &mut LocalTable,
        stream: usize,
        update: &Update,
        payload: &[u8],
    ) -> Taken {
        let Some((table, replica)) = local.staged_mut() else { return Taken::Missing };
        let numbers = &table.streams[stream];
        let Some(number) =
            numbers.get(update.piece.sequence as usize).filter(|number| **number == update.piece.chunk)
        else {
            return Taken::Missing;
        };
        let chunk = &mut table.chunks[*number as usize];
        let Some(newest) = chunk.newest() else {
            let taken = replica.take(stream, update, payload);
            // Also where the version that it ends lacks other chunks, or differs.
            chunk.has = replica.chunk(stream, update.piece.sequence as usize).1;
            if let Some(has) = chunk.has {
                self.count(has);
                self.has_jumped = true;
            }
            return taken;
        };
        if newest >= update.version {
            return Taken::Known;
        }
        let follows = newest.checked_add(1) == Some(update.version);
        // No sender sends so many that are not seen.
        let is_full = chunk.held.len() >= limits::MAX_VERSIONS_HELD;
        if is_full || !follows && replica.takes_as_difference(update) {
            return Taken::Missing;
        }
        self.has_jumped |= !follows;
        self.held_bytes += payload.len();
        self.held += 1;
        chunk.held.push_back(Held { update: *update, payload: payload.into() });
        self.count(update.version);
        Taken::Applied
    }

    /// A version that all chunks have, and that is newer than the one that the replicas are at.
    pub(super) fn next_cut(&self) -> Option<Clock> {
        let is_whole = |(_, count): &(&Clock, &usize)| **count == self.chunks;
        let newest = self.having.iter().rev().find(is_whole).map(|(version, _)| *version);
        newest.filter(|newest| self.version < Some(*newest))
    }

    /// Brings all replicas to a version that all chunks have. The streams whose values are not those that were broadcast.
    pub(super) fn cut(&mut self, tables: &mut Tables, version: Clock) -> Vec<(TableId, usize)> {
        let mut differing = Vec::new();
        for (id, local) in (0..).map(TableId).zip(tables.iter_mut()) {
            let Some((table, replica)) = local.staged_mut() else { continue };
            for (stream, numbers) in table.streams.iter().enumerate() {
                let mut is_sound = true;
                for &number in numbers {
                    let chunk = &mut table.chunks[number as usize];
                    let due = chunk.held.partition_point(|held| held.update.version <= version);
                    for _ in 0..due {
                        let Some(held) = chunk.held.pop_front() else { break };
                        self.held_bytes -= held.payload.len();
                        self.held -= 1;
                        // Values make what comes before them needless.
                        let next = chunk.held.front().map(|next| &next.update);
                        let is_needless = next.is_some_and(|next| {
                            next.version <= version && !replica.takes_as_difference(next)
                        });
                        if !is_needless {
                            is_sound &= replica.take(stream, &held.update, &held.payload) == Taken::Applied;
                        }
                    }
                    chunk.has = Some(version);
                }
                if !is_sound {
                    differing.push((id, stream));
                }
            }
        }
        self.having = self.having.split_off(&version);
        if let Some(count) = self.having.get_mut(&version) {
            *count = self.chunks;
        }
        // Frames that are held back may have left out versions.
        self.has_jumped &= self.held > 0;
        self.version = differing.is_empty().then_some(version);
        if differing.is_empty() {
            tables.iter_mut().filter_map(LocalTable::staged_mut).for_each(|(table, _)| table.repairs.fill(0));
        }
        differing
    }

    /// The values of a stream are not those that were broadcast as this version: all of it is to come anew. Whether that is still
    /// worth a try; the worker fails if it is not.
    pub(super) fn repair(
        &mut self,
        session: &mut Session,
        local: &mut LocalTable,
        id: StreamId,
        version: Clock,
    ) -> bool {
        let Some(stream) = local.layout().index_of(id.shard) else { return false };
        let (name, shard) = (local.name().to_owned(), id.shard);
        let sentence = format!("table `{name}` is not what {shard} broadcast as version {version}");
        if !self.forget(local, stream) {
            let tries = limits::MAX_REPAIRS;
            session.fail(WorkerError::Damaged(format!(
                "{sentence}, and neither was what came when it was fetched anew, {tries} times in a row; look for what damages \
                 data between the two"
            )));
            return false;
        }
        session.log(format!("{sentence}; it is fetched anew"));
        true
    }

    /// Forgets a stream. False when that has been tried too often.
    fn forget(&mut self, local: &mut LocalTable, stream: usize) -> bool {
        self.version = None;
        self.drop_held(local, stream);
        let Some((table, replica)) = local.staged_mut() else { return false };
        replica.forget(stream);
        for number in &table.streams[stream] {
            if let Some(has) = table.chunks[*number as usize].has.take() {
                self.uncount(has);
            }
        }
        table.repairs[stream] += 1;
        table.repairs[stream] <= limits::MAX_REPAIRS
    }

    /// Forgets what is held back of a stream.
    pub(super) fn drop_held(&mut self, local: &mut LocalTable, stream: usize) {
        let Some((table, _)) = local.staged_mut() else { return };
        for number in &table.streams[stream] {
            for held in std::mem::take(&mut table.chunks[*number as usize].held) {
                self.held_bytes -= held.payload.len();
                self.held -= 1;
                self.uncount(held.update.version);
            }
        }
    }

    /// Forgets what is held back of a table.
    pub(super) fn drop_all_held(&mut self, local: &mut LocalTable) {
        (0..local.layout().shard_count()).for_each(|stream| self.drop_held(local, stream));
    }

    /// Streams whose newest versions will never be whole, since others have left these out: the senders need not wait until this
    /// reader has them.
    pub(super) fn stuck(&self, tables: &Tables) -> Vec<(StreamId, Clock)> {
        if !self.has_jumped {
            return Vec::new();
        }
        let Some(next) = self.next_possible(tables) else { return Vec::new() };
        let mut stuck = Vec::new();
        for (index, local) in tables.iter().enumerate() {
            let Some(table) = local.staged() else { continue };
            for (stream, shard) in local.layout().shards().enumerate() {
                let newest = table.of_stream(stream).map(Chunk::newest).min().flatten();
                if let Some(newest) = newest.filter(|newest| *newest < next) {
                    stuck.push((StreamId { table: index, shard }, newest));
                }
            }
        }
        stuck
    }

    /// The first version after the one that the replicas are at which may still become whole: every chunk has it, or has not come to it.
    fn next_possible(&self, tables: &Tables) -> Option<Clock> {
        let chunks = tables.iter().filter_map(LocalTable::staged).flat_map(|table| &table.chunks);
        let mut newest: Vec<Option<Clock>> = chunks.map(Chunk::newest).collect();
        newest.sort_unstable();
        let beyond_all = newest.last().copied().flatten()?.checked_add(1);
        let later = self.having.iter().filter(|(version, _)| self.version < Some(**version));
        let is_possible = |(version, count): &(&Clock, &usize)| {
            let before = newest.partition_point(|newest| *newest < Some(**version));
            before + **count >= self.chunks
        };
        later.into_iter().find(is_possible).map(|(version, _)| *version).or(beyond_all)
    }

    /// Counts against what they count.
    pub(super) fn check(&self, tables: &Tables) -> Result<(), String> {
        let mut having: BTreeMap<Clock, usize> = BTreeMap::new();
        let (mut bytes, mut frames) = (0, 0);
        for chunk in tables.iter().filter_map(LocalTable::staged).flat_map(|table| &table.chunks) {
            let held = chunk.held.iter().map(|held| held.update.version);
            for version in chunk.has.into_iter().chain(held) {
                *having.entry(version).or_default() += 1;
            }
            bytes += chunk.held.iter().map(|held| held.payload.len()).sum::<usize>();
            frames += chunk.held.len();
            if self.version.is_some_and(|version| chunk.has != Some(version)) {
                return Err(format!("a chunk has {:?}, and the reader {:?}", chunk.has, self.version));
            }
        }
        let counted = self.having.iter().filter(|(_, count)| **count > 0);
        if !counted.eq(having.iter()) || (bytes, frames) != (self.held_bytes, self.held) {
            return Err(format!("{:?} and {} bytes are held back, not {having:?}", self.having, bytes));
        }
        Ok(())
    }
}
