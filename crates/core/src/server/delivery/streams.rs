//! Tables that are broadcast: each version goes to everybody who follows the table's stream.

use super::StoredTable;
use crate::bandwidth::Reading;
use crate::limits;
use crate::role::{Body, Frame, Outbox, Output};
use crate::server::table_shard::TableShard;
use crate::stream::{Chunks, Stream, StreamImage};
use crate::types::{Clock, ConnectionId, NodeId, TableId, Time};
use crate::wire::DType;
use crate::wire::Position;
use crate::wire::frame::{Form, Piece, Update};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The streams of a shard's tables.
#[derive(Debug, Default)]
pub(super) struct Streams {
    by_table: BTreeMap<TableId, State>,
    /// Of so many versions one comes with a digest; 0: none.
    digest_every: u64,
}

#[derive(Debug, Default)]
struct State {
    stream: Stream,
    /// Chunks of the version under way that were published, from the first on.
    next: usize,
}

/// What an image keeps of a table's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct StateImage {
    stream: StreamImage,
    next: u32,
}

/// What an image keeps of the streams of a shard.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct StreamsImage {
    by_table: BTreeMap<TableId, StateImage>,
}

/// What streams send by.
pub(super) struct Sending<'a> {
    pub(super) now: Time,
    pub(super) frames: &'a mut Outbox,
    pub(super) bytes: &'a mut u64,
}

impl Sending<'_> {
    fn send(&mut self, to: ConnectionId, frame: Frame) {
        *self.bytes += u64::from(frame.header.payload_bytes);
        self.frames.push_back(Output::send(to, frame));
    }
}

/// A table's chunks as they were published.
struct Published<'a> {
    id: TableId,
    table: &'a TableShard,
}

impl Published<'_> {
    fn stored(&self, index: usize) -> Body {
        let chunk = self.table.chunk(index);
        let buffer = StoredTable { table: self.id, dtype: DType::F32, is_published: true }.to_bits();
        Body::Stored { buffer, start: chunk.start * 4, len: chunk.len * 4 }
    }

    fn update(&self, index: usize, round: Clock) -> Update {
        Update {
            epoch: self.table.valid_from(),
            table: self.id,
            round,
            version: self.table.published_version(index).unwrap_or(round),
            piece: Piece {
                chunk: self.table.chunk(index).number,
                sequence: index as u32,
                is_last: index + 1 == self.table.chunk_count(),
            },
            form: Form::PLAIN,
            digest: 0,
            delay: None,
        }
    }
}

impl Chunks for Published<'_> {
    fn epoch(&self) -> u32 {
        self.table.valid_from()
    }

    fn count(&self) -> usize {
        self.table.chunk_count()
    }

    fn version(&self, index: usize) -> Option<Clock> {
        self.table.published_version(index)
    }

    fn frame(&self, index: usize, round: Clock) -> Option<Frame> {
        self.table.published_version(index)?;
        if self.table.is_published_zero(index) {
            return Some(Frame { header: self.update(index, round).header(0), body: Body::Empty });
        }
        let header = self.update(index, round).header(self.table.chunk(index).len * 4);
        Some(Frame { header, body: self.stored(index) })
    }
}

impl Streams {
    pub(super) fn with_digests(every: u64) -> Streams {
        Streams { digest_every: every, ..Streams::default() }
    }

    pub(super) fn image(&self) -> StreamsImage {
        let image = |state: &State| StateImage { stream: state.stream.image(), next: state.next as u32 };
        StreamsImage { by_table: self.by_table.iter().map(|(id, state)| (*id, image(state))).collect() }
    }

    /// Becomes the streams that an image was made of, where `chunks` says how many chunks a table has that is broadcast.
    pub(super) fn restore(
        &mut self,
        image: StreamsImage,
        chunks: impl Fn(TableId) -> Option<usize>,
    ) -> Result<(), String> {
        for (id, StateImage { stream, next }) in image.by_table {
            let next = next as usize;
            if chunks(id).is_none_or(|count| next > count) {
                return Err(format!("{next} chunks of table {} were published", id.0));
            }
            self.by_table.insert(id, State { stream: Stream::from_image(stream), next });
        }
        Ok(())
    }

    /// Whether some stream has more than its image.
    pub(super) fn exceed_image(&self) -> bool {
        self.by_table.values().any(|state| state.stream.exceeds_image())
    }

    /// Drops what images of streams do not keep.
    pub(super) fn reduce_to_image(&mut self) {
        self.by_table.values_mut().for_each(|state| state.stream = Stream::from_image(state.stream.image()));
    }

    /// A chunk has its values of the next version: it is published if all chunks before it are.
    pub(super) fn chunk_exists(
        &mut self,
        id: TableId,
        index: usize,
        version: Clock,
        table: &mut TableShard,
        sending: &mut Sending<'_>,
    ) {
        let state = self.by_table.entry(id).or_default();
        // The last one ends the version, which is the controller's to say. Rows travel when it has, since which of a chunk's rows
        // have changed is not known before.
        if state.next == index && index + 1 < table.chunk_count() && !table.is_sparse() {
            state.publish(id, version, false, table, sending);
        }
    }

    /// A version exists: what was not published of it is published.
    pub(super) fn version_exists(
        &mut self,
        id: TableId,
        version: Clock,
        table: &mut TableShard,
        sending: &mut Sending<'_>,
    ) {
        let has_digest = self.digest_every > 0 && version.is_multiple_of(self.digest_every);
        let state = self.by_table.entry(id).or_default();
        if table.is_sparse() && table.chunk_count() > 0 && table.published_version(0).is_some() {
            state.publish_rows(id, version, has_digest, table, sending);
        } else {
            while state.next < table.chunk_count() {
                state.publish(id, version, has_digest, table, sending);
            }
            state.next = 0;
        }
        let count = self.by_table.len();
        if let Some(state) = self.by_table.get_mut(&id) {
            state.stream.trim(limits::STREAM_LOG_BYTES / count);
        }
    }

    /// Somebody follows a table's stream from now on; if it only asks whether it has missed something, then if it has.
    pub(super) fn subscribe(
        &mut self,
        to: NodeId,
        position: Position,
        is_question: bool,
        table: &TableShard,
        sending: &mut Sending<'_>,
    ) {
        let id = position.table;
        let stream = &mut self.by_table.entry(id).or_default().stream;
        if is_question && !stream.is_beyond(&position) {
            return;
        }
        stream.subscribe(to.into(), position, &Published { id, table }, &mut |to, frame| {
            sending.send(to, frame)
        });
    }

    /// Somebody follows a table's stream no more.
    pub(super) fn unsubscribe(&mut self, receiver: NodeId, id: TableId) {
        if let Some(state) = self.by_table.get_mut(&id) {
            state.stream.forget(receiver.into());
        }
    }

    /// Whether somebody follows some table's stream.
    pub(super) fn is_followed_by(&self, receiver: NodeId) -> bool {
        self.by_table.values().any(|state| state.stream.is_followed_by(receiver.into()))
    }

    /// Whether everybody who follows one has all of it.
    pub(super) fn is_settled(&self) -> bool {
        self.by_table.values().all(|state| state.stream.is_settled())
    }

    /// A receiver has a version of a table: what its link carries, if that is known from it.
    pub(super) fn note_seen(
        &mut self,
        to: NodeId,
        id: TableId,
        version: Clock,
        table: &TableShard,
        sending: &mut Sending<'_>,
    ) -> Option<Reading> {
        let state = self.by_table.get_mut(&id)?;
        state.stream.note_seen(sending.now, to.into(), version, &Published { id, table }, &mut |to, frame| {
            sending.send(to, frame)
        })
    }

    /// The codecs of a table have changed.
    pub(super) fn restart(&mut self, id: TableId, table: &TableShard, sending: &mut Sending<'_>) {
        if let Some(state) = self.by_table.get_mut(&id) {
            state.stream.restart(&Published { id, table }, &mut |to, frame| sending.send(to, frame));
        }
    }

    /// A receiver is gone.
    pub(super) fn forget(&mut self, receiver: NodeId) {
        self.by_table.values_mut().for_each(|state| state.stream.forget(receiver.into()));
    }

    /// Bytes of frames that may be sent again.
    pub(super) fn log_bytes(&self) -> usize {
        self.by_table.values().map(|state| state.stream.log_bytes()).sum()
    }
}

impl State {
    /// Publishes the next chunk.
    fn publish(
        &mut self,
        id: TableId,
        version: Clock,
        has_digest: bool,
        table: &mut TableShard,
        sending: &mut Sending<'_>,
    ) {
        let index = self.next;
        self.next += 1;
        let chunk = table.publish_chunk(index, version);
        let is_compared = has_digest && index + 1 == table.chunk_count();
        let digest = if is_compared { table.published_digest() } else { 0 };
        let published = Published { id, table };
        let delay = table.closing_delay().filter(|_| index + 1 == table.chunk_count());
        let update = Update { form: chunk.form, digest, delay, ..published.update(index, version) };
        let body = chunk.body(published.stored(index));
        let bytes = chunk.payload.as_ref().map_or(table.chunk(index).len * 4, |payload| payload.len());
        self.stream.publish(sending.now, update, &body, bytes, &mut |to, frame| sending.send(to, frame));
    }

    /// Publishes a version of a table of rows: the chunks in which something changed, and a list of them, which ends it.
    fn publish_rows(
        &mut self,
        id: TableId,
        version: Clock,
        has_digest: bool,
        table: &mut TableShard,
        sending: &mut Sending<'_>,
    ) {
        let mut changed = Vec::new();
        for index in 0..table.chunk_count() {
            let Some(chunk) = table.publish_rows(index, version) else { continue };
            changed.extend_from_slice(&(index as u32).to_le_bytes());
            let published = Published { id, table };
            let mut update = Update { form: chunk.form, ..published.update(index, version) };
            update.piece.is_last = false;
            let body = chunk.body(published.stored(index));
            let bytes = chunk.payload.as_ref().map_or(table.chunk(index).len * 4, |payload| payload.len());
            self.stream.publish(sending.now, update, &body, bytes, &mut |to, frame| sending.send(to, frame));
        }
        table.end_version(version);
        let digest = if has_digest { table.published_digest() } else { 0 };
        let first = Published { id, table }.update(0, version);
        let piece = Piece { sequence: table.chunk_count() as u32, is_last: true, ..first.piece };
        let delay = table.closing_delay();
        let end = Update { version, piece, form: Form::Rows { count: 0 }, digest, delay, ..first };
        let (bytes, body) = (changed.len(), Body::Counted(changed.into()));
        self.stream.publish(sending.now, end, &body, bytes, &mut |to, frame| sending.send(to, frame));
    }
}
