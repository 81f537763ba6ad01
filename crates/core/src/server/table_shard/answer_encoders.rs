//! Encoding answers of tables that have an answer codec.

use super::chunk_codec::{ChunkCodec, context_of};
use crate::codec::{Codec, Context};
use crate::store::Buffer;
use crate::table::{Layout, TableSpec};
use crate::types::{Clock, WorkerId};
use crate::wire::DType;
use std::collections::BTreeMap;

/// A shard's end of a table's answer codec, if it has one.
#[derive(Debug)]
pub(super) struct AnswerEncoders {
    codec: Option<AnswerCodec>,
    /// The type of the elements that answers travel as, where a codec does not encode them.
    elements: DType,
}

/// The payload of an answer.
pub(in crate::server) struct AnswerPayload {
    pub(in crate::server) bytes: Vec<u8>,
    /// Whether a codec made it: what is not finite travels as it is.
    pub(in crate::server) is_encoded: bool,
}

impl AnswerPayload {
    fn plain(values: &[f32]) -> AnswerPayload {
        AnswerPayload { bytes: bytemuck::cast_slice(values).to_vec(), is_encoded: false }
    }

    fn encoded(bytes: &[u8]) -> AnswerPayload {
        AnswerPayload { bytes: bytes.to_vec(), is_encoded: true }
    }
}

/// A chunk that is to be sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkToSend<'a> {
    /// Its place among the chunks of the shard.
    pub(super) index: usize,
    pub(super) version: Clock,
    pub(super) values: &'a [f32],
}

/// How answers are encoded.
#[derive(Debug)]
struct AnswerCodec {
    codec: ChunkCodec,
    /// When answers are differences: what each worker holds, which is also what was not sent to it yet.
    mirrors: Option<BTreeMap<WorkerId, Mirror>>,
}

/// A receiver's copy of the table's chunks on this shard, for answers that are differences.
#[derive(Debug)]
struct Mirror {
    values: Buffer,
    /// Chunks that it has.
    has: Vec<bool>,
}

impl AnswerEncoders {
    /// For a table whose answers are made by this codec. The error says why they cannot be.
    pub(super) fn new(spec: &TableSpec, answer: Codec) -> Result<AnswerEncoders, String> {
        if spec.rows && answer.is_for_differences() {
            // Single rows are pulled now and then: there is nothing that they could be a difference to.
            return Err(format!("`{answer}` makes differences, and rows are not answered by them"));
        }
        let elements = answer.element_type().filter(|&dtype| !spec.rows || dtype == DType::F32);
        Ok(AnswerEncoders {
            codec: elements.is_none().then(|| AnswerCodec::new(answer)),
            elements: elements.unwrap_or_default(),
        })
    }

    /// The type of the elements that answers travel as, where a codec does not encode them.
    #[inline]
    pub(super) fn elements(&self) -> DType {
        self.elements
    }

    /// Whether answers are made when they are due, and not when they leave.
    #[inline]
    pub(super) fn fixes_answers(&self) -> bool {
        self.codec.is_some()
    }

    /// A worker may not have what was sent to it.
    pub(super) fn forget(&mut self, receiver: WorkerId) {
        if let Some(mirrors) = self.codec.as_mut().and_then(|codec| codec.mirrors.as_mut()) {
            mirrors.remove(&receiver);
        }
    }

    /// The payload that brings a chunk to a receiver; `None` if answers are not encoded.
    pub(super) fn encode_chunk(
        &mut self,
        layout: &Layout,
        chunk: ChunkToSend<'_>,
        receiver: WorkerId,
    ) -> Option<AnswerPayload> {
        Some(self.codec.as_mut()?.encode_chunk(layout, chunk, receiver))
    }

    /// The payload that brings single rows.
    pub(super) fn encode_rows(&mut self, layout: &Layout, bytes: Vec<u8>) -> AnswerPayload {
        let Some(codec) = &mut self.codec else { return AnswerPayload { bytes, is_encoded: false } };
        let mut values = vec![0.0f32; bytes.len() / 4];
        bytemuck::cast_slice_mut(&mut values).copy_from_slice(&bytes);
        let context = Context { layer_elements: layout.spec().largest_layer(), ..Context::default() };
        codec.encode(&values, &context)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let mirrors = self.codec.iter().flat_map(|codec| &codec.mirrors).flat_map(BTreeMap::values);
        mirrors.map(|mirror| mirror.values.memory_bytes()).sum()
    }
}

impl AnswerCodec {
    fn new(codec: Codec) -> AnswerCodec {
        let codec = ChunkCodec::new(codec);
        AnswerCodec { mirrors: codec.makes_differences().then(BTreeMap::new), codec }
    }

    fn encode(&mut self, values: &[f32], context: &Context<'_>) -> AnswerPayload {
        let encoded = self.codec.encode(values, context).map(AnswerPayload::encoded);
        encoded.unwrap_or_else(|| AnswerPayload::plain(values))
    }

    fn encode_chunk(
        &mut self,
        layout: &Layout,
        ChunkToSend { index, version, values }: ChunkToSend<'_>,
        receiver: WorkerId,
    ) -> AnswerPayload {
        let (chunk, context) = (layout.chunks()[index], context_of(layout, version));
        let Some(mirrors) = &mut self.mirrors else { return self.encode(values, &context) };
        let mirror = mirrors.entry(receiver).or_insert_with(|| Mirror {
            values: Buffer::zeroed(layout.elements()),
            has: vec![false; layout.chunks().len()],
        });
        let held = &mut mirror.values.as_mut_slice()[chunk.range()];
        if !std::mem::replace(&mut mirror.has[index], true) {
            held.copy_from_slice(values);
            return AnswerPayload::plain(values);
        }
        let encoded = self.codec.encode_onto(held, values, &context).map(AnswerPayload::encoded);
        encoded.unwrap_or_else(|| AnswerPayload::plain(values))
    }
}
