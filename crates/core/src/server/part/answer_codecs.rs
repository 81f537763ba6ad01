//! Encoding answers of tables that have an answer codec.

use super::TablePart;
use crate::codec::{Codec, Context, Decoder, Encoder};
use crate::kernels;
use crate::policy::Policy;
use crate::registry::Registry;
use crate::store::Buffer;
use crate::table::TableSpec;
use crate::types::NodeId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A shard's end of a table's answer codec.
#[derive(Debug)]
pub(super) struct AnswerCodecs {
    answers: Option<AnswerCodec>,
}

/// How answers are encoded.
#[derive(Debug)]
struct AnswerCodec {
    encoder: Encoder,
    /// When answers are differences: what each worker or aggregator holds, which is also what was not sent to it yet.
    mirrors: Option<BTreeMap<NodeId, Mirror>>,
    decoder: Decoder,
    difference: Vec<f32>,
    payload: Vec<u8>,
}

/// What somebody holds of this part.
#[derive(Debug)]
struct Mirror {
    values: Buffer,
    /// Chunks that it has.
    has: Vec<bool>,
}

impl AnswerCodecs {
    /// What a table's policy asks for. The error names what this server does not have.
    pub(super) fn new(
        registry: &Registry,
        spec: &TableSpec,
        policy: &Policy,
    ) -> Result<AnswerCodecs, String> {
        let answer = policy.codecs(registry).map_err(|error| error.to_string())?.answer;
        if spec.rows && answer.is_for_differences() {
            // Single rows are pulled now and then: there is nothing that they could be a difference to.
            return Err(format!("`{answer}` makes differences, and rows are not answered by them"));
        }
        Ok(AnswerCodecs { answers: (!answer.is_none()).then(|| AnswerCodec::new(Arc::new(answer))) })
    }

    /// Whether answers are made when they are due, and not when they leave.
    pub(super) fn fixes_answers(&self) -> bool {
        self.answers.is_some()
    }

    /// A worker or an aggregator may not have what was sent to it.
    pub(super) fn forget(&mut self, receiver: NodeId) {
        if let Some(mirrors) = self.answers.as_mut().and_then(|answers| answers.mirrors.as_mut()) {
            mirrors.remove(&receiver);
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let mirrors = self.answers.iter().flat_map(|answers| &answers.mirrors).flat_map(BTreeMap::values);
        mirrors.map(|mirror| mirror.values.memory_bytes()).sum()
    }
}

impl AnswerCodec {
    fn new(codec: Arc<Codec>) -> AnswerCodec {
        AnswerCodec {
            mirrors: codec.is_for_differences().then(BTreeMap::new),
            decoder: Decoder::new(codec.clone()),
            encoder: Encoder::without_memory(codec),
            difference: Vec::new(),
            payload: Vec::new(),
        }
    }

    /// The payload of some values, and whether the codec made it: what is not finite travels as it is.
    fn encode(&mut self, values: &[f32], context: &Context<'_>) -> (Vec<u8>, bool) {
        self.payload.clear();
        match self.encoder.encode(0, values, context, &mut self.payload) {
            Ok(()) => (self.payload.clone(), true),
            Err(_) => (bytemuck::cast_slice(values).to_vec(), false),
        }
    }

    /// The same for a chunk, to somebody who holds something else already.
    fn encode_difference(
        &mut self,
        (index, count): (usize, usize),
        elements: usize,
        receiver: NodeId,
        (start, values): (usize, &[f32]),
        context: Context<'_>,
    ) -> (Vec<u8>, bool) {
        let Some(mirrors) = &mut self.mirrors else { return self.encode(values, &context) };
        let mirror = mirrors
            .entry(receiver)
            .or_insert_with(|| Mirror { values: Buffer::zeroed(elements), has: vec![false; count] });
        let held = &mut mirror.values.as_mut_slice()[start..start + values.len()];
        let whole = |held: &mut [f32]| {
            held.copy_from_slice(values);
            (bytemuck::cast_slice(values).to_vec(), false)
        };
        if !std::mem::replace(&mut mirror.has[index], true) {
            return whole(held);
        }
        self.difference.clear();
        self.difference.extend_from_slice(values);
        kernels::add_scaled(&mut self.difference, held, -1.0);
        self.payload.clear();
        let context = Context { parameters: held, ..context };
        let encoded = self.encoder.encode(0, &self.difference, &context, &mut self.payload);
        // What the receiver will do, to the bit.
        match encoded.and_then(|()| self.decoder.decode_add(&self.payload, held)) {
            Ok(()) => (self.payload.clone(), true),
            Err(_) => whole(held),
        }
    }
}

/// The payload of an answer.
pub(in crate::server) struct AnswerPayload {
    pub(in crate::server) bytes: Vec<u8>,
    /// Whether a codec made it: what is not finite travels as it is.
    pub(in crate::server) is_encoded: bool,
}

impl TablePart {
    /// The payload that brings a chunk, by its place on this shard, to a receiver; `None` if the table's answers are not
    /// encoded.
    pub(in crate::server) fn encode_chunk(
        &mut self,
        index: usize,
        receiver: NodeId,
    ) -> Option<AnswerPayload> {
        let step = self.version_of(index);
        let codec = self.answer_codecs.answers.as_mut()?;
        let chunk = self.layout.chunks()[index];
        let context = Context {
            step,
            // Answers leave nothing to chance.
            seed: 0,
            table_elements: self.layout.spec().elements(),
            start: chunk.table_start,
            ..Context::default()
        };
        let values = &self.store.parameters()[chunk.start..chunk.start + chunk.len];
        let (count, elements) = (self.layout.chunks().len(), self.layout.elements());
        let (bytes, is_encoded) =
            codec.encode_difference((index, count), elements, receiver, (chunk.start, values), context);
        Some(AnswerPayload { bytes, is_encoded })
    }

    /// The payload of an answer with single rows.
    pub(in crate::server) fn encode_rows(&mut self, rows: &[u32]) -> AnswerPayload {
        let bytes = self.gather_rows(rows);
        let Some(codec) = &mut self.answer_codecs.answers else {
            return AnswerPayload { bytes, is_encoded: false };
        };
        let mut values = vec![0.0f32; bytes.len() / 4];
        bytemuck::cast_slice_mut(&mut values).copy_from_slice(&bytes);
        let context = Context { table_elements: self.layout.spec().elements(), ..Context::default() };
        let (bytes, is_encoded) = codec.encode(&values, &context);
        AnswerPayload { bytes, is_encoded }
    }
}
