//! Gradients that the application prepared by itself: on a GPU, say, so that only what travels leaves the device.

use super::WorkerError;
use super::encoding::{Encoded, Payloads, TableCodecs};
use super::local_table::LocalTable;
use super::request::Missing;
use crate::absence::Absent;
use crate::codec::CodecError;
use crate::store::Allocate;
use crate::table::Chunk;
use crate::types::Clock;

/// What stands in the memory of a slab's gradient.
///
/// All but the first are for tables whose codec the application follows by itself, chunk by chunk. It keeps the residual;
/// the rest of the chain is the worker's. NaN and Inf are refused, whatever the table's policy on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Content {
    /// The gradient. The table's codec, if there is one, has everything to do.
    #[default]
    Gradient,
    /// The entries that are to travel, where they belong; zeros elsewhere.
    Chosen,
    /// Places of `count` entries as ascending 32-bit integers, and then their values.
    Places {
        /// How many.
        count: usize,
    },
    /// The whole gradient in the two bytes a value that the codec's quantiser makes.
    Halves,
}

impl LocalTable {
    /// What travels of a gradient that the application prepared, in `memory_of_gradient`.
    pub(super) fn encode_prepared(
        &mut self,
        clock: Clock,
        content: Content,
        (memory_of_gradient, missing): (&[f32], &Missing),
        memory: &dyn Allocate,
    ) -> Result<Encoded, WorkerError> {
        self.begin_prepared(clock);
        let encoded = self.encode_with(memory, |local, codecs| {
            local.encode_prepared_chunks(codecs, clock, content, memory_of_gradient, missing)
        });
        let encoded = encoded.map(|encoded| Encoded { missing: missing.clone(), ..encoded });
        encoded.map_err(|error| match error {
            WorkerError::Codec { table, why: CodecError::NonFinite } => {
                WorkerError::NonFinite { table, clock }
            }
            other => other,
        })
    }

    fn encode_prepared_chunks(
        &self,
        codecs: &mut TableCodecs,
        clock: Clock,
        content: Content,
        words: &[f32],
        missing: &Missing,
    ) -> Result<Payloads, CodecError> {
        let TableCodecs { push, identity, payloads, .. } = codecs;
        let Some(encoder) = push else {
            return Err(CodecError::Input("no codec to be sent by".into()));
        };
        let (places, values) = match content {
            Content::Places { count } if count > words.len() / 2 => {
                return Err(CodecError::Input(format!("{count} places, which do not fit its memory")));
            }
            Content::Places { count } => (bytemuck::cast_slice(&words[..count]), &words[count..2 * count]),
            Content::Gradient | Content::Chosen | Content::Halves => (&[][..], words),
        };
        let (mut ranges, mut taken) = (Vec::with_capacity(self.chunk_count()), 0);
        for (number, chunk) in self.all_chunks() {
            let Chunk { start, len, .. } = chunk;
            let (first, len) = (start as usize, len as usize);
            let context = self.context(*identity, clock, number, chunk);
            let before = payloads.len();
            match content {
                Content::Gradient => encoder.encode(first, &words[first..first + len], &context, payloads)?,
                Content::Chosen => {
                    let chosen = words[first..first + len].iter().copied().enumerate();
                    encoder.encode_chosen(len, chosen, &context, payloads)?;
                }
                Content::Places { .. } => {
                    let here: &[u32] = &places[taken..];
                    let count = here.partition_point(|&place| (place as usize) < first + len);
                    let chosen = here[..count].iter().zip(&values[taken..]);
                    // A place before the chunk wraps round, and is refused as one beyond its end.
                    let chosen = chosen.map(|(&place, &value)| ((place as usize).wrapping_sub(first), value));
                    encoder.encode_chosen(len, chosen, &context, payloads)?;
                    taken += count;
                }
                Content::Halves => {
                    let bytes: &[u8] = bytemuck::cast_slice(words);
                    encoder.encode_quantised(len, &bytes[2 * first..2 * (first + len)], payloads)?;
                }
            }
            if Absent::in_chunk(missing.ranges(), first..first + len).covers(len) {
                payloads.truncate(before);
            }
            ranges.push((number, before..payloads.len()));
        }
        if taken < places.len() {
            return Err(CodecError::Input("places beyond the end of the table".into()));
        }
        Ok(ranges)
    }
}
