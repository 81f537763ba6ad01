//! The receiving end of a stream: a table's values as they were broadcast.

use super::Digest;
use crate::codec::{Codec, Decoder};
use crate::store::{self, Buffer};
use crate::types::Clock;
use crate::wire::DType;
use crate::wire::frame::{Form, Update};
use std::ops::Range;
use std::sync::Arc;

/// A copy of a table that takes updates. Its chunks are numbered as the table's, and each belongs to a stream, which is that
/// of a shard.
#[derive(Debug)]
pub(crate) struct Replica {
    values: Buffer,
    decoder: Option<Decoder>,
    /// Encoded updates are differences.
    takes_differences: bool,
    chunks: Vec<Chunk>,
    /// For each stream.
    streams: Vec<State>,
}

#[derive(Debug, Clone)]
struct Chunk {
    range: Range<usize>,
    stream: usize,
    /// `None` before its first values.
    version: Option<Clock>,
}

#[derive(Debug, Clone, Default)]
struct State {
    /// Its chunks by their place in it.
    chunks: Vec<u32>,
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
        let chunks: Vec<Chunk> =
            chunks.into_iter().map(|(range, stream)| Chunk { range, stream, version: None }).collect();
        let mut streams = Vec::new();
        for (number, chunk) in (0..).zip(&chunks) {
            if streams.len() <= chunk.stream {
                streams.resize(chunk.stream + 1, State::default());
            }
            streams[chunk.stream].chunks.push(number);
        }
        let mut replica = Replica {
            values: Buffer::zeroed(elements),
            decoder: None,
            takes_differences: false,
            chunks,
            streams,
        };
        replica.set_codec(codec);
        replica
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
        let number = self.streams[stream].chunks[place];
        let chunk = &self.chunks[number as usize];
        (number, chunk.version, &self.values.as_slice()[chunk.range.clone()])
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.values.memory_bytes()
    }

    /// The values of a stream may be anything: all of it is to be sent again.
    pub(crate) fn forget(&mut self, stream: usize) {
        self.streams[stream].version = None;
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.stream == stream) {
            chunk.version = None;
        }
    }

    /// Takes an update of a stream.
    pub(crate) fn take(&mut self, stream: usize, update: &Update, payload: &[u8]) -> Taken {
        let piece = update.piece;
        let Some(chunk) = self.chunks.get_mut(piece.chunk as usize).filter(|chunk| chunk.stream == stream)
        else {
            return Taken::Missing;
        };
        if self.streams[stream].chunks.get(piece.sequence as usize) != Some(&piece.chunk) {
            return Taken::Missing;
        }
        let is_difference = update.form == Form::Encoded && self.takes_differences;
        let held = &mut self.values.as_mut_slice()[chunk.range.clone()];
        let taken = if chunk.version >= Some(update.version) {
            Taken::Known
        } else if is_difference {
            let follows = chunk.version.and_then(|version| version.checked_add(1)) == Some(update.version);
            let decoder = self.decoder.as_mut().filter(|_| follows);
            match decoder.map(|decoder| decoder.decode_onto(payload, held)) {
                Some(Ok(())) => Taken::Applied,
                Some(Err(_)) | None => Taken::Missing,
            }
        } else {
            let is_read = match (update.form, &mut self.decoder) {
                (Form::Encoded, Some(decoder)) => decoder.decode(payload, held).is_ok(),
                (Form::Dense(DType::F32), _) => store::floats(payload)
                    .filter(|values| values.len() == held.len())
                    .map(|values| held.copy_from_slice(values))
                    .is_some(),
                _ => false,
            };
            if is_read { Taken::Applied } else { Taken::Missing }
        };
        if taken == Taken::Applied {
            chunk.version = Some(update.version);
        }
        if taken == Taken::Missing || !piece.is_last {
            return taken;
        }
        match self.complete(stream, update.round, update.digest) {
            Ok(()) => taken,
            Err(failed) => failed,
        }
    }

    /// All frames of a version have come.
    fn complete(&mut self, stream: usize, version: Clock, digest: u64) -> Result<(), Taken> {
        let versions =
            || self.streams[stream].chunks.iter().map(|&number| self.chunks[number as usize].version);
        if versions().any(|has| has < Some(version)) {
            return Err(Taken::Missing);
        }
        // A chunk may be newer: its values were read when they left.
        if digest != 0 && versions().all(|has| has == Some(version)) && self.digest(stream) != digest {
            return Err(Taken::Differs);
        }
        let state = &mut self.streams[stream];
        state.version = state.version.max(Some(version));
        Ok(())
    }

    /// The digest of a stream's values.
    pub(crate) fn digest(&self, stream: usize) -> u64 {
        let mut digest = Digest::new();
        for place in 0..self.chunk_count(stream) {
            digest.take(self.chunk(stream, place).2);
        }
        digest.finish()
    }
}
