//! Decoding pushes of tables that have a codec.

use super::{LocalChunk, TablePart, Taken};
use crate::absence::Absent;
use crate::codec::{Content, Decoder};
use crate::consistency::Admit;
use crate::kernels::Values;
use crate::policy::Policy;
use crate::registry::Registry;
use crate::server::rounds::{Accumulators, Piece};
use crate::table::TableSpec;
use crate::types::{Time, WorkerId};
use crate::wire::{Cause, Fault, Flags, Header};
use std::fmt::Display;
use std::sync::Arc;

/// A shard's end of a table's push codec.
#[derive(Debug, Default)]
pub(super) struct PushDecoders {
    decoder: Option<Decoder>,
    /// What a push frame brought of a table of rows, decoded.
    values: Vec<f32>,
    /// The same as single rows: their numbers, then their values.
    words: Vec<u32>,
}

impl PushDecoders {
    /// What a table's policy asks for. The error names what this server does not have.
    pub(super) fn new(
        registry: &Registry,
        spec: &TableSpec,
        policy: &Policy,
    ) -> Result<PushDecoders, String> {
        let codec = policy.codecs(registry).map_err(|error| error.to_string())?.push;
        let codec = (!codec.is_none()).then(|| if spec.rows { codec.of_rows() } else { codec });
        let decoder = codec.map(|codec| Decoder::new(Arc::new(codec)));
        Ok(PushDecoders { decoder, ..PushDecoders::default() })
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
        let mut decoders = std::mem::take(&mut self.decoders);
        let result = if self.spec.rows {
            let mut plain = Header { flags: header.flags.without(Flags::ENCODED), ..*header };
            let decoded = self.decode_rows(&mut decoders, worker, header, payload);
            let piece = decoded.and_then(|rows| {
                plain.rows = rows;
                self.check_piece(worker, &plain, bytemuck::cast_slice(&decoders.words))
            });
            self.take_piece(now, worker, &plain, admit, piece, accumulators)
        } else {
            let piece = self.check_kind(header).and_then(|()| self.chunk_in_turn(header)).and_then(|chunk| {
                let values = self.read(decoders.decoder.as_mut(), &worker, (header, payload), chunk.len)?;
                let index = header.part as usize;
                let absent = Absent::NOTHING;
                Ok(Some((index, Piece::Dense { index, start: chunk.start, values, absent })))
            });
            self.take_piece(now, worker, header, admit, piece, accumulators)
        };
        self.decoders = decoders;
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
        let mut decoder = self.decoders.decoder.take();
        let content = self.read(decoder.as_mut(), from, (header, payload), chunk.len);
        let result = content.and_then(|content| take(self, content, Absent::NOTHING));
        self.decoders.decoder = decoder;
        result
    }

    /// What is absent from a push or a sum that says so, and its values, with zeros there. The error names who sent it.
    pub(super) fn read_absent(
        &mut self,
        from: &dyn Display,
        (header, payload): (&Header, &[u8]),
        elements: usize,
    ) -> Result<(Absent, Vec<f32>), Fault> {
        Absent::read_push(header, payload, elements, self.decoders.decoder.as_mut()).map_err(|why| {
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

    /// Decodes a frame of rows into `decoders.words`. How many rows there are.
    fn decode_rows(
        &self,
        decoders: &mut PushDecoders,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
    ) -> Result<u32, Fault> {
        let Some(index) = self.chunk_index(header.chunk) else {
            return Err(self.shape_fault(format!("chunk {}, which this server does not hold", header.chunk)));
        };
        let elements = self.chunks[index].len;
        let content = self.read(decoders.decoder.as_mut(), &worker, (header, payload), elements)?;
        decoders.values.resize(elements, 0.0);
        content.copy_to(&mut decoders.values);
        self.gather_nonzero_rows(decoders);
        Ok((decoders.words.len() / (1 + self.width)) as u32)
    }

    /// The rows of a decoded chunk that something is in.
    fn gather_nonzero_rows(&self, decoders: &mut PushDecoders) {
        let PushDecoders { values, words, .. } = decoders;
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
}
