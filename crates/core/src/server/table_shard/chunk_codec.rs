//! A codec's end on a shard, for what leaves it: answers, and versions that are broadcast.

use crate::codec::{Codec, Context, Decoder, DeltaEncoder, Encoder};
use crate::kernels;
use crate::table::Layout;
use crate::types::Clock;
use std::sync::Arc;

/// Encodes chunks, and knows what receivers make of them.
#[derive(Debug)]
pub(super) struct ChunkCodec {
    encoder: Encoder,
    /// Where what has changed travels as it is now.
    delta: Option<(Arc<Codec>, DeltaEncoder)>,
    decoder: Decoder,
    makes_differences: bool,
    difference: Vec<f32>,
    payload: Vec<u8>,
}

impl ChunkCodec {
    pub(super) fn new(codec: Codec) -> ChunkCodec {
        let makes_differences = codec.is_for_differences();
        let codec = Arc::new(codec);
        ChunkCodec {
            encoder: Encoder::without_memory(codec.clone()),
            delta: codec.replaces().map(|_| (codec.clone(), DeltaEncoder::default())),
            decoder: Decoder::new(codec),
            makes_differences,
            difference: Vec::new(),
            payload: Vec::new(),
        }
    }

    /// Whether it encodes what differs from what a receiver holds.
    pub(super) fn makes_differences(&self) -> bool {
        self.makes_differences
    }

    /// What every link must carry, where its threshold follows them.
    pub(super) fn needs_bandwidth(&self) -> Option<f64> {
        self.encoder.codec().needs_bandwidth()
    }

    /// Encodes values by themselves; `None` when they cannot be, and travel as they are.
    pub(super) fn encode(&mut self, values: &[f32], context: &Context<'_>) -> Option<&[u8]> {
        self.payload.clear();
        self.encoder.encode(0, values, context, &mut self.payload).ok()?;
        Some(&self.payload)
    }

    /// The same, and makes them what a receiver reads. `None` when they cannot be encoded, and stay what they were.
    pub(super) fn encode_values(&mut self, values: &mut [f32], context: &Context<'_>) -> Option<&[u8]> {
        self.encode(values, context)?;
        self.decoder.decode(&self.payload, values).ok()?;
        Some(&self.payload)
    }

    /// Encodes what brings a receiver from what it holds to these values, or near to them; what it holds is then what it has made
    /// of it, to the bit. `None` when they cannot be encoded: they travel as they are, and become what it holds.
    pub(super) fn encode_onto(
        &mut self,
        held: &mut [f32],
        values: &[f32],
        context: &Context<'_>,
    ) -> Option<&[u8]> {
        let is_encoded = if let Some((codec, delta)) = &mut self.delta {
            self.payload.clear();
            delta.encode_onto(codec, held, values, &mut self.payload)
        } else if self.makes_differences {
            self.encode_difference(held, values, context)
        } else {
            self.encode(values, context).is_some() && self.decoder.decode(&self.payload, held).is_ok()
        };
        if !is_encoded {
            held.copy_from_slice(values);
            return None;
        }
        Some(&self.payload)
    }

    /// The values that a receiver gets when they travel as they are.
    pub(super) fn round(&mut self, values: &[f32], target: &mut [f32]) {
        target.copy_from_slice(values);
        if let Some((codec, delta)) = &mut self.delta {
            let mut rounded = std::mem::take(&mut self.difference);
            rounded.resize(values.len(), 0.0);
            if delta.round(codec.rounded_type(), values, &mut rounded) {
                target.copy_from_slice(&rounded);
            }
            self.difference = rounded;
        }
    }

    fn encode_difference(&mut self, held: &mut [f32], values: &[f32], context: &Context<'_>) -> bool {
        self.difference.clear();
        self.difference.extend_from_slice(values);
        kernels::add_scaled(&mut self.difference, held, -1.0);
        self.payload.clear();
        let context = Context { parameters: held, ..*context };
        self.encoder.encode(0, &self.difference, &context, &mut self.payload).is_ok()
            && self.decoder.decode_add(&self.payload, held).is_ok()
    }
}

/// The context of a chunk of a version: what leaves a server leaves nothing to chance.
pub(super) fn context_of(layout: &Layout, version: Clock) -> Context<'static> {
    Context { step: version, seed: 0, layer_elements: layout.spec().largest_layer(), ..Context::default() }
}
