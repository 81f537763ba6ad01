//! The receiving end of a stream: a table's values as they were broadcast.

use super::rows::RowsUpdate;
use super::{Chunks, Digest};
use crate::codec::{Codec, Decoder};
use crate::role::{Body, Frame};
use crate::store::{self, Buffer};
use crate::table::Layout;
use crate::types::{Clock, TableId};
use crate::wire::DType;
use crate::wire::frame::{Form, Piece, Update};
use std::ops::Range;
use std::sync::Arc;

/// A copy of a table, or of some shards' part of it, that takes updates. Its chunks are numbered as the table's, and each belongs to a
/// stream, which is that of a shard.
#[derive(Debug)]
pub(crate) struct Replica {
    values: Buffer,
    decoder: Option<Decoder>,
    /// Encoded updates are differences.
    takes_differences: bool,
    /// Elements of a row, where updates bring single rows.
    row_width: Option<usize>,
    /// Memory for rows that a codec made.
    decoded: Vec<f32>,
    chunks: Vec<Chunk>,
    /// For each stream.
    streams: Vec<State>,
}

#[derive(Debug, Clone)]
struct Chunk {
    /// Its number in the table.
    number: u32,
    range: Range<usize>,
    stream: usize,
    /// `None` before its first values. One that did not change in the last version that is whole has that one too.
    version: Option<Clock>,
    /// The digest of its values; 0 when it is not known.
    digest: u64,
}

#[derive(Debug, Clone, Default)]
struct State {
    /// Its chunks by their place in it: their places in the replica.
    chunks: Vec<usize>,
    /// The last version that is whole here.
    version: Option<Clock>,
}

/// What became of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It is here already.
    Known,
    /// Its chunk has the values that follow from it.
    Applied,
    /// Something before it is missing, or it cannot be read: the stream is to be subscribed to anew, from what is whole here.
    Missing,
    /// The values that are here are not those that were sent: all of the stream is to be sent again.
    Differs,
}

impl Replica {
    /// Zeros for a table of such chunks, each with the number of its stream, in the order of their numbers.
    pub(crate) fn new(
        elements: usize,
        codec: Option<Arc<Codec>>,
        chunks: impl IntoIterator<Item = (Range<usize>, usize)>,
    ) -> Replica {
        let numbered = (0..).zip(chunks).map(|(number, (range, stream))| (number, range, stream));
        Replica::of_chunks(elements, codec, numbered)
    }

    /// The same for some of a table's chunks, each with its number.
    fn of_chunks(
        elements: usize,
        codec: Option<Arc<Codec>>,
        chunks: impl Iterator<Item = (u32, Range<usize>, usize)>,
    ) -> Replica {
        let chunks: Vec<Chunk> = chunks
            .map(|(number, range, stream)| Chunk { number, range, stream, version: None, digest: 0 })
            .collect();
        let mut streams = Vec::new();
        for (place, chunk) in chunks.iter().enumerate() {
            if streams.len() <= chunk.stream {
                streams.resize(chunk.stream + 1, State::default());
            }
            streams[chunk.stream].chunks.push(place);
        }
        let mut replica = Replica {
            values: Buffer::zeroed(elements),
            decoder: None,
            takes_differences: false,
            row_width: None,
            decoded: Vec::new(),
            chunks,
            streams,
        };
        replica.set_codec(codec);
        replica
    }

    /// One of what a single shard holds of a table: its only stream is the first.
    pub(crate) fn of_shard(layout: &Layout, codec: Option<Arc<Codec>>) -> Replica {
        let chunks = layout.chunks().iter().map(|chunk| (chunk.number, chunk.range(), 0));
        let replica = Replica::of_chunks(layout.elements(), codec, chunks);
        if layout.is_sparse() { replica.of_rows(layout.row_width()) } else { replica }
    }

    /// The same for a table of rows of this width.
    pub(crate) fn of_rows(self, width: usize) -> Replica {
        Replica { row_width: Some(width), ..self }
    }

    /// Updates are made by another codec from now on.
    pub(crate) fn set_codec(&mut self, codec: Option<Arc<Codec>>) {
        self.takes_differences = codec.as_ref().is_some_and(|codec| codec.is_for_differences());
        self.decoder = codec.map(Decoder::new);
    }

    /// Whether an update is a difference to the version before it, and no values.
    pub(crate) fn takes_as_difference(&self, update: &Update) -> bool {
        update.form == Form::Encoded && self.takes_differences
    }

    /// All values, in the table's order.
    pub(crate) fn values(&self) -> &[f32] {
        self.values.as_slice()
    }

    /// The last version of a stream that is whole here.
    pub(crate) fn version(&self, stream: usize) -> Option<Clock> {
        self.streams.get(stream)?.version
    }

    /// How many chunks a stream has.
    pub(crate) fn chunk_count(&self, stream: usize) -> usize {
        self.streams[stream].chunks.len()
    }

    /// A chunk of a stream by its place there: its number, its version and its values.
    pub(crate) fn chunk(&self, stream: usize, place: usize) -> (u32, Option<Clock>, &[f32]) {
        let State { chunks, version } = &self.streams[stream];
        let chunk = &self.chunks[chunks[place]];
        (chunk.number, chunk.version.max(*version), &self.values.as_slice()[chunk.range.clone()])
    }

    /// Whether a chunk of a table of rows has zeros only, which need not travel.
    pub(crate) fn is_zero(&self, stream: usize, place: usize) -> bool {
        let values = self.chunk(stream, place).2;
        self.row_width.is_some() && values.iter().all(|value| value.to_bits() == 0)
    }

    /// The values of a row of this width.
    pub(crate) fn row(&self, row: u32, width: usize) -> &[f32] {
        &self.values.as_slice()[row as usize * width..][..width]
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.values.memory_bytes() + self.decoded.capacity() * 4
    }

    /// The values of a stream may be anything: all of it is to be sent again.
    pub(crate) fn forget(&mut self, stream: usize) {
        self.streams[stream].version = None;
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.stream == stream) {
            (chunk.version, chunk.digest) = (None, 0);
        }
    }

    /// Takes an update of a stream.
    pub(crate) fn take(&mut self, stream: usize, update: &Update, payload: &[u8]) -> Taken {
        let piece = update.piece;
        if piece.is_last && update.form == (Form::Rows { count: 0 }) {
            return self.end_version(stream, update, payload);
        }
        let Some(State { chunks, version }) = self.streams.get(stream) else { return Taken::Missing };
        let chunk = chunks.get(piece.sequence as usize).map(|&place| &mut self.chunks[place]);
        let Some(chunk) = chunk.filter(|chunk| chunk.number == piece.chunk) else { return Taken::Missing };
        let version = chunk.version.max(*version);
        let held = &mut self.values.as_mut_slice()[chunk.range.clone()];
        let follows = version.and_then(|version| version.checked_add(1)) == Some(update.version);
        let taken = if version >= Some(update.version) {
            Taken::Known
        } else {
            let is_read = match (update.form, self.row_width, &mut self.decoder) {
                (Form::Dense(DType::F32), Some(_), _) if payload.is_empty() => {
                    held.fill(0.0);
                    true
                }
                (Form::Dense(DType::F32), ..) => store::floats(payload)
                    .filter(|values| values.len() == held.len())
                    .map(|values| held.copy_from_slice(values))
                    .is_some(),
                (Form::Encoded, None, Some(decoder)) if self.takes_differences => {
                    follows && decoder.decode_onto(payload, held).is_ok()
                }
                (Form::Encoded, None, Some(decoder)) => decoder.decode(payload, held).is_ok(),
                (Form::EncodedRows { count: 0 }, Some(_), Some(decoder)) if self.takes_differences => {
                    follows && decoder.decode_onto(payload, held).is_ok()
                }
                // Rows that are not in it are those of the version before.
                (Form::EncodedRows { count }, Some(width), Some(decoder)) if !self.takes_differences => {
                    let rows = RowsUpdate::read(payload, count, width, held.len()).filter(|_| follows);
                    rows.is_some_and(|rows| rows.decode(decoder, &mut self.decoded, held))
                }
                (Form::Rows { count }, Some(width), _) => {
                    let rows = RowsUpdate::read(payload, count, width, held.len()).filter(|_| follows);
                    rows.is_some_and(|rows| rows.copy(held))
                }
                _ => false,
            };
            if is_read { Taken::Applied } else { Taken::Missing }
        };
        if taken == Taken::Applied {
            (chunk.version, chunk.digest) = (Some(update.version), 0);
        }
        if taken == Taken::Missing || !piece.is_last {
            return taken;
        }
        match self.complete(stream, update.round, update.digest) {
            Ok(()) => taken,
            Err(failed) => failed,
        }
    }

    /// All frames of a version of a table of rows have come; the payload lists the chunks that changed, by their place in the stream.
    fn end_version(&mut self, stream: usize, update: &Update, payload: &[u8]) -> Taken {
        let Some(State { chunks, version }) = self.streams.get(stream).filter(|_| self.row_width.is_some())
        else {
            return Taken::Missing;
        };
        if *version >= Some(update.round) {
            return Taken::Known;
        }
        let follows = version.and_then(|version| version.checked_add(1)) == Some(update.round);
        let has_changed = |place: &[u8; 4]| {
            let place = chunks.get(u32::from_le_bytes(*place) as usize);
            place.is_some_and(|place| self.chunks[*place].version >= Some(update.round))
        };
        let (changed, rest) = payload.as_chunks::<4>();
        if !follows || !rest.is_empty() || !changed.iter().all(has_changed) {
            return Taken::Missing;
        }
        // A chunk may be newer: its values were read when they left.
        let is_newer = |place: &usize| self.chunks[*place].version > Some(update.round);
        let is_compared = update.digest != 0 && !chunks.iter().any(is_newer);
        if is_compared && self.digest(stream) != update.digest {
            return Taken::Differs;
        }
        self.streams[stream].version = Some(update.round);
        Taken::Applied
    }

    /// All frames of a version have come.
    fn complete(&mut self, stream: usize, version: Clock, digest: u64) -> Result<(), Taken> {
        let versions = || (0..self.chunk_count(stream)).map(|place| self.chunk(stream, place).1);
        if versions().any(|has| has < Some(version)) {
            return Err(Taken::Missing);
        }
        // A chunk may be newer: its values were read when they left.
        let is_compared = digest != 0 && versions().all(|has| has == Some(version));
        if is_compared && self.digest(stream) != digest {
            return Err(Taken::Differs);
        }
        let state = &mut self.streams[stream];
        state.version = state.version.max(Some(version));
        Ok(())
    }

    /// The digest of a stream's values: of chunks that have not changed it is known.
    pub(crate) fn digest(&mut self, stream: usize) -> u64 {
        let mut digest = Digest::new();
        for &place in &self.streams[stream].chunks {
            let chunk = &mut self.chunks[place];
            if chunk.digest == 0 {
                chunk.digest = Digest::of_chunk(&self.values.as_slice()[chunk.range.clone()]);
            }
            digest.take(chunk.digest);
        }
        digest.finish()
    }
}

/// The chunks of a replica that are one stream's, for those to whom that stream is passed on.
pub(crate) struct ReplicaChunks<'a> {
    /// The table.
    pub(crate) id: TableId,
    /// The [`valid_from`](crate::wire::Plan::valid_from) epoch of its codecs.
    pub(crate) epoch: u32,
    pub(crate) replica: &'a Replica,
    /// The stream, by its number in the replica.
    pub(crate) stream: usize,
}

impl Chunks for ReplicaChunks<'_> {
    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn count(&self) -> usize {
        self.replica.chunk_count(self.stream)
    }

    fn version(&self, index: usize) -> Option<Clock> {
        self.replica.chunk(self.stream, index).1
    }

    fn frame(&self, index: usize, round: Clock) -> Option<Frame> {
        let (chunk, version, values) = self.replica.chunk(self.stream, index);
        let is_last = index + 1 == self.count();
        let update = Update {
            epoch: self.epoch,
            table: self.id,
            round,
            version: version?,
            piece: Piece { chunk, sequence: index as u32, is_last },
            form: Form::PLAIN,
            digest: 0,
            delay: None,
        };
        if self.replica.is_zero(self.stream, index) {
            return Some(Frame { header: update.header(0), body: Body::Empty });
        }
        let bytes: &[u8] = bytemuck::cast_slice(values);
        Some(Frame { header: update.header(bytes.len()), body: Body::Counted(bytes.into()) })
    }
}
