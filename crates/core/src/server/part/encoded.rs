//! Pushes and answers of tables that have codecs.

use super::{LocalChunk, TablePart, Taken};
use crate::absence::Absent;
use crate::codec::{Codec, Content, Context, Decoder, Encoder};
use crate::consistency::Admit;
use crate::kernels::{self, Values};
use crate::registry::Registry;
use crate::role::{Body, Frame};
use crate::server::rounds::{Accumulators, Piece};
use crate::spec::SpecError;
use crate::store::{Buffer, Place};
use crate::table::{TablePolicy, TableSpec};
use crate::types::{NodeId, Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

/// A shard's ends of a table's codecs.
#[derive(Debug, Default)]
pub(super) struct PartCodecs {
    push: Option<Decoder>,
    answers: Option<Answers>,
    /// What a push frame brought of a table of rows, decoded.
    values: Vec<f32>,
    /// The same as single rows: their numbers, then their values.
    words: Vec<u32>,
}

/// How answers are encoded.
#[derive(Debug)]
struct Answers {
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

impl PartCodecs {
    /// What a table's policy asks for. The error names what this server does not have.
    pub(super) fn new(
        registry: &Registry,
        spec: &TableSpec,
        policy: &TablePolicy,
    ) -> Result<PartCodecs, String> {
        let fault = |error: SpecError| error.to_string();
        let push = Codec::parse(&registry.codec, &policy.codec).map_err(fault)?;
        let push = (!push.is_none()).then(|| if spec.rows { push.of_rows() } else { push });
        let answer = Codec::for_answers(&registry.codec, &policy.answer_codec).map_err(fault)?;
        if spec.rows && answer.is_for_differences() {
            // Single rows are pulled now and then: there is nothing that they could be a difference to.
            return Err(format!("`{answer}` makes differences, and rows are not answered by them"));
        }
        Ok(PartCodecs {
            push: push.map(|codec| Decoder::new(Arc::new(codec))),
            answers: (!answer.is_none()).then(|| Answers::new(Arc::new(answer))),
            ..PartCodecs::default()
        })
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

impl Answers {
    fn new(codec: Arc<Codec>) -> Answers {
        Answers {
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

impl TablePart {
    /// Takes one frame of a push that a codec made. What it has is added from where the decoder found it; only rows are
    /// filled in first, since each of them counts by itself.
    pub(super) fn push_encoded(
        &mut self,
        now: Time,
        worker: WorkerId,
        (header, payload): (&Header, &[u8]),
        admit: Admit,
        accumulators: &mut Accumulators,
    ) -> Result<Taken, Fault> {
        let mut codecs = std::mem::take(&mut self.codecs);
        let result = if self.spec.rows {
            let mut plain = Header { flags: header.flags.without(Flags::ENCODED), ..*header };
            let decoded = self.decode_rows(&mut codecs, worker, header, payload);
            let piece = decoded.and_then(|rows| {
                plain.rows = rows;
                self.check_piece(worker, &plain, bytemuck::cast_slice(&codecs.words))
            });
            self.take_piece(now, worker, &plain, admit, piece, accumulators)
        } else {
            let piece = self.check_kind(header).and_then(|()| self.chunk_in_turn(header)).and_then(|chunk| {
                let values = self.read(codecs.push.as_mut(), &worker, (header, payload), chunk.len)?;
                let index = header.part as usize;
                let absent = Absent::NOTHING;
                Ok(Some((index, Piece::Dense { index, start: chunk.start, values, absent })))
            });
            self.take_piece(now, worker, header, admit, piece, accumulators)
        };
        self.codecs = codecs;
        result
    }

    /// Calls `take` with what a frame has for a chunk of so many elements, decoded if a codec made it.
    pub(super) fn with_content<R>(
        &mut self,
        from: &dyn Display,
        (header, payload): (&Header, &[u8]),
        chunk: LocalChunk,
        take: impl FnOnce(&mut TablePart, Content<'_>, &Absent) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        if header.flags.has(Flags::ABSENT) {
            let (absent, values) = self.read_absent(from, (header, payload), chunk.len)?;
            return take(self, Values::F32(&values).into(), &absent);
        }
        if !header.flags.has(Flags::ENCODED) {
            let values = self.chunk_values(chunk, payload)?;
            return take(self, Values::F32(values).into(), Absent::NOTHING);
        }
        let mut decoder = self.codecs.push.take();
        let content = self.read(decoder.as_mut(), from, (header, payload), chunk.len);
        let result = content.and_then(|content| take(self, content, Absent::NOTHING));
        self.codecs.push = decoder;
        result
    }

    /// What is absent from a push or a sum that says so, and its values, with zeros there. The error names who sent it.
    pub(super) fn read_absent(
        &mut self,
        from: &dyn Display,
        (header, payload): (&Header, &[u8]),
        elements: usize,
    ) -> Result<(Absent, Vec<f32>), Fault> {
        Absent::read_push(header, payload, elements, self.codecs.push.as_mut()).map_err(|why| {
            let (chunk, clock) = (header.chunk, header.clock);
            self.shape_fault(format!("{why}, in what {from} pushed for chunk {chunk} at clock {clock}"))
        })
    }

    /// What a payload has for so many elements. The error names who sent it.
    fn read<'a>(
        &self,
        decoder: Option<&'a mut Decoder>,
        from: &dyn Display,
        (header, payload): (&Header, &'a [u8]),
        elements: usize,
    ) -> Result<Content<'a>, Fault> {
        let Some(decoder) = decoder else {
            return Err(self.shape_fault("values that a codec made, and the table has none".into()));
        };
        let codec = decoder.codec().clone();
        decoder.read(payload, elements).map_err(|why| {
            let message = format!(
                "table `{}`: {from} pushed chunk {} at clock {} by codec `{codec}`; {why}; nothing was applied",
                self.spec.name, header.chunk, header.clock
            );
            Fault { cause: Cause::Shape, message }
        })
    }

    /// Decodes a frame of rows into `codecs.words`. How many rows there are.
    fn decode_rows(
        &self,
        codecs: &mut PartCodecs,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
    ) -> Result<u32, Fault> {
        let Some(index) = self.chunk_index(header.chunk) else {
            return Err(self.shape_fault(format!("chunk {}, which this server does not hold", header.chunk)));
        };
        let elements = self.chunks[index].len;
        let content = self.read(codecs.push.as_mut(), &worker, (header, payload), elements)?;
        codecs.values.resize(elements, 0.0);
        content.copy_to(&mut codecs.values);
        self.gather_nonzero_rows(codecs);
        Ok((codecs.words.len() / (1 + self.width)) as u32)
    }

    /// The rows of a decoded chunk that something is in.
    fn gather_nonzero_rows(&self, codecs: &mut PartCodecs) {
        let PartCodecs { values, words, .. } = codecs;
        let rows = || values.chunks_exact(self.width).zip(0u32..);
        words.clear();
        words.extend(
            rows().filter(|(row, _)| row.iter().any(|&value| value != 0.0)).map(|(_, number)| number),
        );
        if words.is_empty() {
            // Random rounding may leave nothing; a push of nothing is one of a row of zeros.
            words.push(0);
        }
        for at in 0..words.len() {
            let start = words[at] as usize * self.width;
            words.extend(values[start..start + self.width].iter().map(|value| value.to_bits()));
        }
    }

    /// The frame of an answer that brings a chunk, by its place on this shard, to a worker that wants the table at
    /// `landing`, or to an aggregator.
    pub(in crate::server) fn answer_frame(
        &mut self,
        (table, index): (usize, usize),
        receiver: NodeId,
        header: Header,
        landing: Option<Place>,
    ) -> Frame {
        let view = self.chunk(index);
        let Some(answers) = &mut self.codecs.answers else { return view.frame(header, table, landing) };
        let chunk = self.chunks[index];
        let context = Context {
            step: view.version,
            // Answers leave nothing to chance.
            seed: 0,
            table_elements: self.spec.elements(),
            start: chunk.table_start,
            ..Context::default()
        };
        let values = &self.parameters.as_slice()[chunk.start..chunk.start + chunk.len];
        let (count, elements) = (self.chunks.len(), self.parameters.len());
        let (payload, encoded) =
            answers.encode_difference((index, count), elements, receiver, (chunk.start, values), context);
        let mut frame = view.frame(header, table, None);
        frame.header.flags = if encoded { header.flags.with(Flags::ENCODED) } else { header.flags };
        frame.header.payload_bytes = payload.len() as u32;
        frame.body = Body::Bytes(payload);
        frame
    }

    /// The payload of an answer with single rows, and whether a codec made it.
    pub(in crate::server) fn answer_rows(&mut self, rows: &[u32]) -> (Vec<u8>, bool) {
        let bytes = self.gather_rows(rows);
        let Some(answers) = &mut self.codecs.answers else { return (bytes, false) };
        let mut values = vec![0.0f32; bytes.len() / 4];
        bytemuck::cast_slice_mut(&mut values).copy_from_slice(&bytes);
        let context = Context { table_elements: self.spec.elements(), ..Context::default() };
        answers.encode(&values, &context)
    }
}
