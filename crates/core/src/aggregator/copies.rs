//! Parameters as the servers sent them last: one copy for all workers that go through an aggregator.

use super::memory::Memory;
use crate::codec::{self, Codec, Decoder};
use crate::role::Body;
use crate::store::{Buffer, floats};
use crate::table::{Chunk, TableSpec};
use crate::types::{Clock, ServerId, ShardId};
use crate::wire::DType;
use crate::wire::frame::{Form, Params};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A copy of every dense table. Memory is taken with the first parameters of a table.
#[derive(Debug, Default)]
pub(super) struct Copies {
    tables: Vec<Copy>,
}

#[derive(Debug)]
struct Copy {
    elements: usize,
    chunks: Vec<Chunk>,
    /// Plain values, where the shard sent them so.
    values: Buffer,
    /// Chunks that pass through here unread, as a codec or in another type; `None` for those in `values`.
    payloads: Vec<Option<Passing>>,
    /// How each server encodes its answers, where it does.
    codecs: BTreeMap<ServerId, AnswerCodec>,
    seen: Vec<Seen>,
}

#[derive(Debug)]
struct AnswerCodec {
    text: String,
    /// Reads answers that are differences to what is here.
    differences: Option<Decoder>,
}

/// A chunk of an answer that is passed on as it came.
#[derive(Debug, Clone)]
struct Passing {
    form: Form,
    bytes: Vec<u8>,
}

/// Which answer a chunk is of.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    version: Clock,
    /// Answers of a table are numbered on each connection; none of this one is here yet.
    edition: Option<u32>,
}

/// Why parameters cannot be kept.
#[derive(Debug, PartialEq)]
pub(super) enum Unfit {
    /// They are not what the plan says that this shard holds.
    Shape,
    /// The machine has no more memory.
    Memory,
}

impl Copies {
    pub(super) fn new(specs: &[TableSpec], chunks: &[Vec<Chunk>]) -> Copies {
        let copy = |(spec, chunks): (&TableSpec, &Vec<Chunk>)| Copy {
            elements: if spec.rows { 0 } else { spec.elements() as usize },
            chunks: if spec.rows { Vec::new() } else { chunks.clone() },
            values: Buffer::zeroed(0),
            payloads: Vec::new(),
            codecs: BTreeMap::new(),
            seen: Vec::new(),
        };
        Copies { tables: specs.iter().zip(chunks).map(copy).collect() }
    }

    /// Keeps a chunk of an answer, unless it is older than what is there. Answers of a table are numbered by `edition`.
    pub(super) fn take(
        &mut self,
        from: ShardId,
        params: &Params,
        edition: u32,
        payload: &[u8],
    ) -> Result<(), Unfit> {
        let table = params.subject.table.0 as usize;
        let (copy, number) = (self.tables.get_mut(table), params.piece.chunk as usize);
        let copy = copy.ok_or(Unfit::Shape)?;
        let chunk = *copy.chunks.get(number).filter(|chunk| chunk.shard == from).ok_or(Unfit::Shape)?;
        if copy.seen.is_empty() {
            copy.seen = vec![Seen::default(); copy.chunks.len()];
            copy.payloads = vec![None; copy.chunks.len()];
        }
        let seen = copy.seen[number];
        if seen.edition.is_none_or(|known| is_at_least(edition, known)) {
            match params.form {
                Form::Encoded => copy.put_encoded(number, chunk, payload)?,
                Form::Dense(DType::F32) => copy.put(number, chunk, payload)?,
                Form::Dense(dtype) if payload.len() == dtype.bytes() * chunk.len as usize => {
                    copy.pass(number, params.form, payload);
                }
                _ => return Err(Unfit::Shape),
            }
            copy.seen[number] = Seen { version: params.version, edition: Some(edition) };
        }
        Ok(())
    }

    /// How a server encodes answers of a table from now on. What it made otherwise is not handed out any more.
    pub(super) fn set_codec(&mut self, table: usize, server: ServerId, codec: Codec) {
        let Some(copy) = self.tables.get_mut(table) else { return };
        let text = (!codec.is_none()).then(|| codec.to_string());
        if copy.codecs.get(&server).map(|known| &known.text) == text.as_ref() {
            return;
        }
        copy.codecs.remove(&server);
        if let Some(text) = text {
            let differences = codec.is_for_differences().then(|| Decoder::new(Arc::new(codec)));
            copy.codecs.insert(server, AnswerCodec { text, differences });
        }
        let chunks = copy.chunks.iter().zip(copy.payloads.iter_mut().zip(&mut copy.seen));
        for (_, (payload, seen)) in chunks.filter(|(chunk, _)| chunk.shard.server == server) {
            *payload = None;
            seen.edition = None;
        }
    }

    /// Whether a server's answers have the elements that tables have, and nothing else.
    pub(super) fn is_plain(&self, table: usize, server: ServerId) -> bool {
        self.tables.get(table).is_some_and(|copy| !copy.codecs.contains_key(&server))
    }

    /// The body that brings a chunk to a worker, its length and its form.
    pub(super) fn body(&self, table: usize, number: u32) -> Option<(Body, usize, Form)> {
        let payloads = &self.tables.get(table)?.payloads;
        if let Some(Some(Passing { form, bytes })) = payloads.get(number as usize) {
            // A copy, so that what waits for a worker that does not read is counted.
            return Some((Body::Bytes(bytes.clone()), bytes.len(), *form));
        }
        let (start, len) = self.place(table, number)?;
        let buffer = Memory::Copy { table }.to_bits();
        Some((Body::Stored { buffer, start, len }, len, Form::PLAIN))
    }

    /// Whether this answer, or a later one, of these chunks is here whole.
    pub(super) fn has(&self, table: usize, chunks: impl Iterator<Item = u32>, edition: u32) -> bool {
        let Some(copy) = self.tables.get(table).filter(|copy| !copy.seen.is_empty()) else { return false };
        let is_here = |seen: &Seen| seen.edition.is_some_and(|known| is_at_least(known, edition));
        chunks.into_iter().all(|number| copy.seen.get(number as usize).is_some_and(is_here))
    }

    /// First byte and length of a chunk in [`Copies::bytes`].
    fn place(&self, table: usize, number: u32) -> Option<(usize, usize)> {
        let chunk = self.tables.get(table)?.chunks.get(number as usize)?;
        Some((chunk.start as usize * 4, chunk.len as usize * 4))
    }

    pub(super) fn version(&self, table: usize, number: u32) -> Clock {
        let seen = self.tables.get(table).and_then(|copy| copy.seen.get(number as usize));
        seen.map_or(0, |seen| seen.version)
    }

    pub(super) fn bytes(&self, table: usize) -> &[u8] {
        self.tables.get(table).map_or(&[], |copy| copy.values.as_bytes())
    }

    /// The connection to a shard is gone: it numbers its answers anew.
    pub(super) fn forget_editions(&mut self, shard: ShardId) {
        for copy in &mut self.tables {
            let of_shard = copy.seen.iter_mut().zip(&copy.chunks).filter(|(_, chunk)| chunk.shard == shard);
            of_shard.for_each(|(seen, _)| seen.edition = None);
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let payloads = |copy: &Copy| {
            copy.payloads.iter().flatten().map(|passing| passing.bytes.capacity()).sum::<usize>()
        };
        self.tables.iter().map(|copy| copy.values.memory_bytes() + payloads(copy)).sum()
    }
}

impl Copy {
    /// Keeps a chunk's values.
    fn put(&mut self, number: usize, chunk: Chunk, payload: &[u8]) -> Result<(), Unfit> {
        let len = chunk.len as usize;
        let values = floats(payload).filter(|values| values.len() == len).ok_or(Unfit::Shape)?;
        if self.values.is_empty() {
            self.values = Buffer::try_zeroed(self.elements).ok_or(Unfit::Memory)?;
        }
        let start = chunk.start as usize;
        self.values.as_mut_slice()[start..start + len].copy_from_slice(values);
        self.payloads[number] = None;
        Ok(())
    }

    /// Keeps what a codec made. Differences are added to the values, since a worker may have missed the one before; all
    /// else is passed on as it is.
    fn put_encoded(&mut self, number: usize, chunk: Chunk, payload: &[u8]) -> Result<(), Unfit> {
        let (start, len) = (chunk.start as usize, chunk.len as usize);
        let codec = self.codecs.get_mut(&chunk.shard.server).ok_or(Unfit::Shape)?;
        if let Some(decoder) = &mut codec.differences {
            let values = self.values.as_mut_slice().get_mut(start..start + len).ok_or(Unfit::Shape)?;
            return decoder.decode_onto(payload, values).map_err(|_| Unfit::Shape);
        }
        if payload.len() > codec::PREFIX_BYTES + 4 * len {
            return Err(Unfit::Shape);
        }
        self.pass(number, Form::Encoded, payload);
        Ok(())
    }

    /// Keeps a chunk as it came.
    fn pass(&mut self, number: usize, form: Form, payload: &[u8]) {
        let kept = self.payloads[number].get_or_insert_with(|| Passing { form, bytes: Vec::new() });
        kept.form = form;
        kept.bytes.clear();
        kept.bytes.extend_from_slice(payload);
    }
}

/// Whether one number is not before another. They start again at 1 after the last.
fn is_at_least(number: u32, other: u32) -> bool {
    number.wrapping_sub(other) <= u32::MAX / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::TableId;
    use crate::wire::{Header, Kind};

    const SHARD: ShardId = ShardId { server: ServerId(0), core: 0 };

    fn copies() -> Copies {
        let chunks = [0, 2].map(|start| Chunk { shard: SHARD, start, len: 2 }).to_vec();
        Copies::new(&[TableSpec::dense("w", [4])], &[chunks])
    }

    fn params(table: u32, chunk: u32, version: Clock) -> Params {
        let header = Header { table: TableId(table), chunk, version, ..Header::new(Kind::Params) };
        Params::decode(&header)
    }

    fn take(copies: &mut Copies, chunk: u32, edition: u32, value: f32) -> Result<(), Unfit> {
        let params = params(0, chunk, edition.into());
        copies.take(SHARD, &params, edition, bytemuck::cast_slice(&[value; 2]))
    }

    #[test]
    fn an_answer_that_is_late_does_not_replace_a_newer_one() {
        let mut copies = copies();
        for (chunk, edition) in [(0, 1), (0, 3), (1, 2), (0, 2)] {
            take(&mut copies, chunk, edition, edition as f32).unwrap();
        }
        assert_eq!(copies.bytes(0), bytemuck::cast_slice::<f32, u8>(&[3.0, 3.0, 2.0, 2.0]));
        assert_eq!([copies.version(0, 0), copies.version(0, 1)], [3, 2]);
        assert!(copies.has(0, 0..2, 2) && !copies.has(0, 0..2, 3) && copies.has(0, 0..1, 3));
    }

    #[test]
    fn numbers_start_again_after_the_last() {
        let mut copies = copies();
        take(&mut copies, 0, u32::MAX, 1.0).unwrap();
        take(&mut copies, 0, 1, 2.0).unwrap();
        assert!(copies.has(0, 0..1, 1) && copies.has(0, 0..1, u32::MAX));
        copies.forget_editions(SHARD);
        assert!(!copies.has(0, 0..1, 1));
    }

    #[test]
    fn what_another_codec_made_is_not_handed_out() {
        let codec =
            |text: &str| Codec::for_answers(&crate::registry::Registry::builtin().codec, text).unwrap();
        let mut copies = copies();
        copies.set_codec(0, SHARD.server, codec("f16"));
        let encoded = Params { form: Form::Encoded, ..params(0, 0, 1) };
        copies.take(SHARD, &encoded, 1, &[0; 12]).unwrap();
        copies.set_codec(0, SHARD.server, codec("f16"));
        assert!(copies.has(0, 0..1, 1) && copies.body(0, 0).is_some_and(|(.., form)| form == Form::Encoded));
        copies.set_codec(0, SHARD.server, codec("none"));
        assert!(!copies.has(0, 0..1, 1) && copies.body(0, 0).is_some_and(|(.., form)| form == Form::PLAIN));
        assert_eq!(copies.take(SHARD, &encoded, 2, &[0; 12]), Err(Unfit::Shape));
    }

    #[test]
    fn what_does_not_fit_the_plan_is_not_taken() {
        let mut copies = copies();
        assert_eq!(copies.take(SHARD, &params(1, 0, 0), 0, &[0; 8]), Err(Unfit::Shape));
        assert_eq!(take(&mut copies, 2, 1, 0.0), Err(Unfit::Shape));
        let first = params(0, 0, 0);
        assert_eq!(copies.take(SHARD, &first, 0, &[0; 4]), Err(Unfit::Shape));
        let other = ShardId { server: ServerId(1), core: 0 };
        assert_eq!(copies.take(other, &first, 0, &[0; 8]), Err(Unfit::Shape));
        assert_eq!(copies.memory_bytes(), 0);
    }
}
