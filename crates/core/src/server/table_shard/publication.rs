//! What a shard has broadcast of a table, and how the next version is made of the parameters.

use super::chunk_codec::{ChunkCodec, context_of};
use super::touched::Touched;
use crate::codec::{self, Codec, Context};
use crate::role::Body;
use crate::server::image::Floats;
use crate::store::Buffer;
use crate::stream::Digest;
use crate::table::Layout;
use crate::types::Clock;
use crate::wire::frame::Form;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The table's values as every receiver has them, to the bit. What a codec left out of them is the difference to the parameters,
/// which goes with the next version: there is one such difference, however many receivers there are.
#[derive(Debug)]
pub(super) struct Publication {
    values: Buffer,
    /// The version of each chunk in which it changed; `None` before it was published.
    versions: Vec<Option<Clock>>,
    /// The digest of each chunk; 0 when it is not known.
    digests: Vec<u64>,
    /// Of a table of rows: the last version that is whole. Chunks that did not change in it have it too.
    whole: Option<Clock>,
    codec: Option<ChunkCodec>,
    /// A link on which versions travel carries less than the codec needs.
    lacks_room: bool,
    /// Of a table of rows, by chunk: a codec has left something out of it.
    is_behind: Vec<bool>,
    /// Rows of the chunk at hand that were touched, and their values.
    rows: Vec<u32>,
    gathered: Vec<f32>,
    payload: Vec<u8>,
}

/// What an image keeps of a publication.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::server) struct PublicationImage {
    values: Floats,
    versions: Vec<Option<Clock>>,
    whole: Option<Clock>,
    is_behind: Vec<bool>,
}

/// A chunk as it is broadcast.
#[derive(Debug, Clone)]
pub(in crate::server) struct PublishedChunk {
    pub(in crate::server) form: Form,
    /// What was made of it; otherwise it is read from what was published.
    pub(in crate::server) payload: Option<Arc<[u8]>>,
}

impl PublishedChunk {
    /// The whole chunk, as it was published.
    const STORED: PublishedChunk = PublishedChunk { form: Form::PLAIN, payload: None };

    /// Its body, where values are in the role's own memory at this place.
    pub(in crate::server) fn body(&self, stored: Body) -> Body {
        self.payload.clone().map_or(stored, Body::Counted)
    }
}

impl Publication {
    /// Nothing is published yet.
    pub(super) fn new(layout: &Layout, answer: Codec) -> Publication {
        let chunks = layout.chunks().len();
        Publication {
            values: Buffer::zeroed(layout.elements()),
            versions: vec![None; chunks],
            digests: vec![0; chunks],
            whole: None,
            codec: codec_of(layout, answer),
            lacks_room: false,
            is_behind: vec![false; if layout.is_sparse() { chunks } else { 0 }],
            rows: Vec::new(),
            gathered: Vec::new(),
            payload: Vec::new(),
        }
    }

    pub(super) fn image(&self) -> PublicationImage {
        PublicationImage {
            values: self.values.as_slice().into(),
            versions: self.versions.clone(),
            whole: self.whole,
            is_behind: self.is_behind.clone(),
        }
    }

    /// Becomes the publication that an image was made of; its codec is the same. The error says why it cannot.
    pub(super) fn restore(&mut self, image: PublicationImage) -> Result<(), String> {
        let PublicationImage { values, versions, whole, is_behind } = image;
        let lengths = (values.len(), versions.len(), is_behind.len());
        if lengths != (self.values.len(), self.versions.len(), self.is_behind.len()) {
            return Err("what was broadcast is of other chunks".into());
        }
        self.values.as_mut_slice().copy_from_slice(&values);
        (self.versions, self.whole, self.is_behind) = (versions, whole, is_behind);
        Ok(())
    }

    /// What every link must carry, where the codec's threshold follows them.
    pub(super) fn needs_bandwidth(&self) -> Option<f64> {
        self.codec.as_ref()?.needs_bandwidth()
    }

    /// Whether links have less than that.
    pub(super) fn set_lacks_room(&mut self, lacks_room: bool) {
        self.lacks_room = lacks_room;
    }

    /// Makes the next versions by another codec.
    pub(super) fn set_codec(&mut self, layout: &Layout, answer: Codec) {
        self.codec = codec_of(layout, answer);
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
        self.digests[index] = 0;
        let context = Context { lacks_room: self.lacks_room, ..context_of(layout, version) };
        let codec = self.codec.as_mut().filter(|codec| !(codec.makes_differences() && is_first));
        // The first values of a table of rows are whole chunks, which its codec does not make.
        let codec = codec.filter(|_| !layout.is_sparse());
        if let Some(payload) = codec.and_then(|codec| codec.encode_onto(held, parameters, &context)) {
            return PublishedChunk { form: Form::Encoded, payload: Some(payload.into()) };
        }
        match &mut self.codec {
            Some(codec) => codec.round(parameters, held),
            None => held.copy_from_slice(parameters),
        }
        PublishedChunk::STORED
    }

    /// Publishes what changed in a chunk of a table of rows since its rows were last touched. `None` when nothing of it travels
    /// with this version.
    pub(super) fn publish_rows(
        &mut self,
        layout: &Layout,
        index: usize,
        version: Clock,
        parameters: &[f32],
        touched: &mut Touched,
    ) -> Option<PublishedChunk> {
        let Publication { values, codec, is_behind, rows: touched_rows, gathered, payload, .. } = self;
        let (range, width) = (layout.chunks()[index].range(), layout.row_width());
        touched_rows.clear();
        touched.take(range.start / width..range.end / width, touched_rows);
        let (touched, held) = (touched_rows, &mut values.as_mut_slice()[range]);
        let row = |number: u32| number as usize * width..(number as usize + 1) * width;
        let context = Context { lacks_room: self.lacks_room, ..context_of(layout, version) };
        let published = match codec {
            Some(codec) if codec.makes_differences() => {
                // What was left out goes when the codec lets it, also if nobody touches the row again.
                if touched.is_empty() && !is_behind[index] {
                    return None;
                }
                let differs = |number: &u32| !is_same(&held[row(*number)], &parameters[row(*number)]);
                touched.clear();
                touched.extend((0..(held.len() / width) as u32).filter(differs));
                let values_bytes = 4 * (touched.len() * (width + 1)).min(held.len());
                let encoded = codec.encode_onto(held, parameters, &context);
                let published = match encoded.filter(|payload| payload.len() <= values_bytes) {
                    Some(payload) if codec::is_nothing(payload) => None,
                    Some(payload) => {
                        let form = Form::EncodedRows { count: 0 };
                        Some(PublishedChunk { form, payload: Some(payload.into()) })
                    }
                    // It cannot be encoded, or is shorter as it is.
                    None => publish_values(held, parameters, touched, width, payload),
                };
                is_behind[index] = !is_same(held, parameters);
                published?
            }
            Some(codec) => {
                if touched.is_empty() {
                    return None;
                }
                gathered.clear();
                touched.iter().for_each(|&number| gathered.extend_from_slice(&parameters[row(number)]));
                write_numbers(touched, payload);
                let count = touched.len() as u32;
                let form = match codec.encode_values(gathered, &context) {
                    Some(encoded) => {
                        payload.extend_from_slice(encoded);
                        Form::EncodedRows { count }
                    }
                    // What is not finite travels as it is.
                    None => {
                        payload.extend_from_slice(bytemuck::cast_slice(gathered));
                        Form::Rows { count }
                    }
                };
                for (&number, values) in touched.iter().zip(gathered.chunks_exact(width)) {
                    held[row(number)].copy_from_slice(values);
                }
                // Numbers of rows may cost more than a codec saves, and a codec may lengthen what it encodes.
                match payload.len() < size_of_val(held) {
                    true => PublishedChunk { form, payload: Some(payload.as_slice().into()) },
                    false => PublishedChunk::STORED,
                }
            }
            None => {
                touched.retain(|&number| !is_same(&held[row(number)], &parameters[row(number)]));
                publish_values(held, parameters, touched, width, payload)?
            }
        };
        self.versions[index] = Some(version);
        self.digests[index] = 0;
        Some(published)
    }

    /// All of a version of a table of rows is published: other chunks did not change in it.
    pub(super) fn end_version(&mut self, version: Clock) {
        self.whole = Some(version);
    }

    /// Calls `visit` with every row of a table of rows, counted on the shard, that was not published as it is.
    pub(super) fn for_each_row_behind(
        &self,
        layout: &Layout,
        parameters: &[f32],
        mut visit: impl FnMut(usize),
    ) {
        let width = layout.row_width();
        let rows = self.values.as_slice().chunks_exact(width).zip(parameters.chunks_exact(width));
        for (row, _) in rows.enumerate().filter(|(_, (held, row))| !is_same(held, row)) {
            visit(row);
        }
    }

    /// The version of a chunk that was published last.
    pub(super) fn version_of(&self, index: usize) -> Option<Clock> {
        self.versions[index].max(self.whole)
    }

    /// Whether a chunk of a table of rows has zeros only, which need not travel.
    pub(super) fn is_zero(&self, layout: &Layout, index: usize) -> bool {
        let values = &self.values.as_slice()[layout.chunks()[index].range()];
        layout.is_sparse() && values.iter().all(|value| value.to_bits() == 0)
    }

    pub(super) fn values(&self) -> &[f32] {
        self.values.as_slice()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.values.as_bytes()
    }

    /// The digest of everything that was published: of chunks that have not changed it is known.
    pub(super) fn digest(&mut self, layout: &Layout) -> u64 {
        let mut digest = Digest::new();
        for (chunk, known) in layout.chunks().iter().zip(&mut self.digests) {
            if *known == 0 {
                *known = Digest::of_chunk(&self.values.as_slice()[chunk.range()]);
            }
            digest.take(*known);
        }
        digest.finish()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.values.memory_bytes()
            + (self.rows.capacity() + self.gathered.capacity()) * 4
            + self.payload.capacity()
    }
}

/// The codec that versions are made by; `None` where they travel as values.
fn codec_of(layout: &Layout, answer: Codec) -> Option<ChunkCodec> {
    (!answer.is_none()).then(|| ChunkCodec::new(if layout.is_sparse() { answer.of_rows() } else { answer }))
}

/// Publishes rows of a chunk as they are, or all of the chunk where that is shorter than rows with their numbers.
fn publish_values(
    held: &mut [f32],
    parameters: &[f32],
    rows: &[u32],
    width: usize,
    payload: &mut Vec<u8>,
) -> Option<PublishedChunk> {
    if rows.is_empty() {
        return None;
    }
    if rows.len() * (width + 1) >= held.len() {
        held.copy_from_slice(parameters);
        return Some(PublishedChunk::STORED);
    }
    write_numbers(rows, payload);
    for &row in rows {
        let row = row as usize * width..(row as usize + 1) * width;
        payload.extend_from_slice(bytemuck::cast_slice(&parameters[row.clone()]));
        held[row.clone()].copy_from_slice(&parameters[row]);
    }
    let form = Form::Rows { count: rows.len() as u32 };
    Some(PublishedChunk { form, payload: Some(payload.as_slice().into()) })
}

/// Whether values have the same bits.
fn is_same(some: &[f32], others: &[f32]) -> bool {
    bytemuck::cast_slice::<f32, u8>(some) == bytemuck::cast_slice::<f32, u8>(others)
}

/// Begins a payload of rows: their numbers in the chunk.
fn write_numbers(rows: &[u32], payload: &mut Vec<u8>) {
    payload.clear();
    rows.iter().for_each(|row| payload.extend_from_slice(&row.to_le_bytes()));
}
