//! What a shard has broadcast of a table, and how the next version is made of the parameters.

use super::chunk_codec::{ChunkCodec, context_of};
use crate::codec::Codec;
use crate::role::Body;
use crate::store::Buffer;
use crate::stream::Digest;
use crate::table::Layout;
use crate::types::Clock;
use crate::wire::frame::Form;
use std::sync::Arc;

/// The table's values as every receiver has them, to the bit. What a codec left out of them is the difference to the parameters,
/// which goes with the next version: there is one such difference, however many receivers there are.
#[derive(Debug)]
pub(super) struct Publication {
    values: Buffer,
    /// The version of each chunk; `None` before it was published.
    versions: Vec<Option<Clock>>,
    codec: Option<ChunkCodec>,
}

/// A chunk as it is broadcast.
#[derive(Debug, Clone)]
pub(in crate::server) struct PublishedChunk {
    pub(in crate::server) form: Form,
    /// What a codec made of it; otherwise it is read from what was published.
    pub(in crate::server) payload: Option<Arc<[u8]>>,
}

impl PublishedChunk {
    /// Its body, where values are in the role's own memory at this place.
    pub(in crate::server) fn body(&self, stored: Body) -> Body {
        self.payload.clone().map_or(stored, Body::Counted)
    }
}

impl Publication {
    /// Nothing is published yet.
    pub(super) fn new(layout: &Layout, answer: Codec) -> Publication {
        Publication {
            values: Buffer::zeroed(layout.elements()),
            versions: vec![None; layout.chunks().len()],
            codec: codec_of(answer),
        }
    }

    /// Makes the next versions by another codec.
    pub(super) fn set_codec(&mut self, answer: Codec) {
        self.codec = codec_of(answer);
    }

    /// Publishes a chunk, by its place on the shard, as a part of a version.
    pub(super) fn publish(
        &mut self,
        layout: &Layout,
        index: usize,
        version: Clock,
        parameters: &[f32],
    ) -> PublishedChunk {
        let held = &mut self.values.as_mut_slice()[layout.chunks()[index].range()];
        let is_first = self.versions[index].replace(version).is_none();
        let context = context_of(layout, version);
        let codec = self.codec.as_mut().filter(|codec| !(codec.makes_differences() && is_first));
        if let Some(payload) = codec.and_then(|codec| codec.encode_onto(held, parameters, &context)) {
            return PublishedChunk { form: Form::Encoded, payload: Some(payload.into()) };
        }
        match &mut self.codec {
            Some(codec) => codec.round(parameters, held),
            None => held.copy_from_slice(parameters),
        }
        PublishedChunk { form: Form::PLAIN, payload: None }
    }

    /// The version of a chunk that was published last.
    pub(super) fn version_of(&self, index: usize) -> Option<Clock> {
        self.versions[index]
    }

    pub(super) fn values(&self) -> &[f32] {
        self.values.as_slice()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.values.as_bytes()
    }

    /// The digest of everything that was published.
    pub(super) fn digest(&self, layout: &Layout) -> u64 {
        let mut digest = Digest::new();
        layout.chunks().iter().for_each(|chunk| digest.take(&self.values.as_slice()[chunk.range()]));
        digest.finish()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.values.memory_bytes()
    }
}

/// The codec that versions are made by; `None` where they travel as values.
fn codec_of(answer: Codec) -> Option<ChunkCodec> {
    (!answer.is_none()).then(|| ChunkCodec::new(answer))
}
