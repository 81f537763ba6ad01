//! Reading gradients from payloads: plain or by a codec, with or without absent ranges, whole chunks or single rows.

use super::{GradientFrame, PushFrame};
use crate::absence::Absent;
use crate::codec::{Codec, Content, Decoder, LayerRange, Products};
use crate::kernels::{self, Values};
use crate::store::floats;
use crate::table::{Layout, LocalChunk};
use crate::types::{Clock, NodeId, WorkerId};
use crate::wire::frame::Form;
use crate::wire::{Cause, DType, Fault};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Reads payloads. What it returns lies in the payload, or here until the next payload is read.
#[derive(Debug, Default)]
pub(super) struct ContentReader {
    decoders: Decoders,
    /// A chunk that had to be filled in: zeros in absent ranges, or between rows.
    values: Vec<f32>,
    absent: Absent,
    /// Numbers and values of the rows that a codec left something of.
    rows: Vec<u32>,
    row_values: Vec<f32>,
    /// Factors of the push that a worker is at. They come before the chunks of their layer, and stay until the push is
    /// complete.
    factors: BTreeMap<WorkerId, PushFactors>,
}

/// Factors of one push.
#[derive(Debug)]
struct PushFactors {
    clock: Clock,
    products: Products,
}

/// Codecs that are remembered for sums which were under way when they changed.
pub(super) const MOST_FORMER: usize = 64;

/// The decoders of a table, by epoch.
#[derive(Debug, Default)]
struct Decoders {
    present: Option<Decoder>,
    /// Those that were in use before, oldest first.
    former: VecDeque<FormerDecoder>,
}

#[derive(Debug)]
struct FormerDecoder {
    /// The first epoch whose payloads it does not read.
    until: u32,
    decoder: Option<Decoder>,
}

impl Decoders {
    fn replace(&mut self, decoder: Option<Decoder>, from: u32) {
        let decoder = std::mem::replace(&mut self.present, decoder);
        if self.former.len() == MOST_FORMER {
            self.former.pop_front();
        }
        self.former.push_back(FormerDecoder { until: from, decoder });
    }

    /// The codecs that were in use before, as they are written, each with the first epoch that it does not read.
    fn former(&self) -> impl Iterator<Item = (u32, Option<String>)> {
        let text = |decoder: &Decoder| decoder.codec().to_string();
        self.former.iter().map(move |former| (former.until, former.decoder.as_ref().map(text)))
    }

    /// The one that reads payloads of an epoch.
    fn of(&mut self, epoch: u32) -> Option<&mut Decoder> {
        let former = self.former.iter().position(|former| epoch < former.until);
        match former {
            Some(at) => self.former[at].decoder.as_mut(),
            None => self.present.as_mut(),
        }
    }
}

/// The payload of a whole chunk, and what its frame says of it.
pub(super) struct ChunkPayload<'a> {
    /// The sender, for refusals.
    pub(super) from: NodeId,
    /// Which codec made it.
    pub(super) epoch: u32,
    pub(super) clock: Clock,
    /// Elements of a type, or what a codec made.
    pub(super) form: Form,
    pub(super) has_absent: bool,
    pub(super) bytes: &'a [u8],
}

impl ContentReader {
    /// A reader of what this codec makes; of plain values alone without one.
    pub(super) fn new(codec: Option<Arc<Codec>>) -> ContentReader {
        let decoders = Decoders { present: codec.map(Decoder::new), ..Decoders::default() };
        ContentReader { decoders, ..ContentReader::default() }
    }

    pub(super) fn set_codec(&mut self, codec: Option<Arc<Codec>>, from: u32) {
        self.decoders.replace(codec.map(Decoder::new), from);
        // Those whose push is not complete send it again, in plain values.
        self.factors.clear();
    }

    /// The codecs that were in use before, oldest first, as they are written, each with the first epoch that it does not read.
    pub(super) fn former_codecs(&self) -> impl Iterator<Item = (u32, Option<String>)> {
        self.decoders.former()
    }

    /// Reads what these codecs made in epochs before the present one's, too.
    pub(super) fn set_former_codecs(&mut self, codecs: impl Iterator<Item = (u32, Option<Arc<Codec>>)>) {
        let former = |(until, codec): (u32, Option<Arc<Codec>>)| FormerDecoder {
            until,
            decoder: codec.map(Decoder::new),
        };
        self.decoders.former = codecs.map(former).collect();
    }

    /// Keeps a piece of a layer's factors for the chunks that follow. A worker that sends its push again sends its factors
    /// again. Their length is bounded by that of the layer, and they are of one push of each worker at a time.
    pub(super) fn keep_factors(&mut self, layout: &Layout, frame: &PushFrame<'_>) -> Result<(), Fault> {
        let PushFrame { worker, push, payload, .. } = frame;
        let Some(decoder) = self.decoders.of(push.subject.epoch) else {
            return Err(layout.shape_fault("values that a codec made, and the table has none".into()));
        };
        let mut before = self.factors.remove(worker).filter(|factors| factors.clock == push.clock);
        let mut products = before.take().map(|factors| factors.products).unwrap_or_default();
        let codec = decoder.codec().clone();
        let taken = decoder.take_factors(payload, &LayerRange::of_table(layout.spec()), &mut products);
        self.factors.insert(*worker, PushFactors { clock: push.clock, products });
        taken.map_err(|why| {
            let (table, clock) = (layout.name(), push.clock);
            let message = format!(
                "table `{table}`: {worker} pushed factors at clock {clock} by codec `{codec}`; {why}; nothing was applied"
            );
            Fault { cause: Cause::Shape, message }
        })
    }

    /// Whether there are factors of a worker's push of this clock.
    pub(super) fn has_factors(&self, worker: WorkerId, clock: Clock) -> bool {
        self.factors.get(&worker).is_some_and(|factors| factors.clock == clock)
    }

    pub(super) fn forget_all_factors(&mut self) {
        self.factors.clear();
    }

    /// The push that a worker was at needs its factors no more.
    #[inline]
    pub(super) fn forget_factors(&mut self, worker: WorkerId) {
        if !self.factors.is_empty() {
            self.factors.remove(&worker);
        }
    }

    /// The gradient of a push's next frame; `None` for a sparse push that touches nothing here. `last_chunk` is the chunk
    /// of the frame before it.
    #[inline]
    pub(super) fn read<'a>(
        &'a mut self,
        layout: &Layout,
        frame: &PushFrame<'a>,
        last_chunk: Option<u32>,
    ) -> Result<Option<GradientFrame<'a>>, Fault> {
        let PushFrame { worker, push, payload, .. } = frame;
        check_form(layout, push.form, push.has_absent)?;
        let of_chunk = ChunkPayload {
            from: NodeId::Worker(*worker),
            epoch: push.subject.epoch,
            clock: push.clock,
            form: push.form,
            has_absent: push.has_absent,
            bytes: payload,
        };
        match push.form {
            Form::Dense(_) | Form::Encoded => {
                let chunk = layout.chunk_in_turn(push.piece)?;
                let (values, absent) = self.read_chunk(layout, chunk, &of_chunk)?;
                let index = push.piece.sequence as usize;
                Ok(Some(GradientFrame::Dense { index, start: chunk.start, values, absent }))
            }
            // It still counts for the worker's progress.
            Form::Rows { .. } if payload.is_empty() && push.piece.sequence == 0 && push.piece.is_last => {
                Ok(None)
            }
            Form::Rows { count } => {
                let index = chunk_after(layout, last_chunk, push.piece.chunk)?;
                plain_rows(layout, index, count, payload).map(Some)
            }
            Form::EncodedRows { .. } => {
                let index = chunk_after(layout, last_chunk, push.piece.chunk)?;
                self.encoded_rows(layout, index, &of_chunk).map(Some)
            }
        }
    }

    /// The sum that an aggregator sent of a chunk. How many rows it has follows from its length.
    pub(super) fn read_sum<'a>(
        &'a mut self,
        layout: &Layout,
        chunk: u32,
        payload: &ChunkPayload<'a>,
    ) -> Result<GradientFrame<'a>, Fault> {
        check_form(layout, payload.form, payload.has_absent)?;
        let index = layout.index_of(chunk)?;
        match payload.form {
            Form::Dense(_) | Form::Encoded => {
                let chunk = layout.chunks()[index];
                let (values, absent) = self.read_chunk(layout, chunk, payload)?;
                Ok(GradientFrame::Dense { index, start: chunk.start, values, absent })
            }
            Form::Rows { .. } => {
                let count = payload.bytes.len() / (4 + 4 * layout.row_width());
                plain_rows(layout, index, count as u32, payload.bytes)
            }
            Form::EncodedRows { .. } => self.encoded_rows(layout, index, payload),
        }
    }

    /// The values that a payload has for a whole chunk, and the ranges that are absent from them.
    #[inline]
    pub(super) fn read_chunk<'a>(
        &'a mut self,
        layout: &Layout,
        chunk: LocalChunk,
        payload: &ChunkPayload<'a>,
    ) -> Result<(Content<'a>, &'a Absent), Fault> {
        if let (Form::Dense(dtype), false) = (payload.form, payload.has_absent) {
            return Ok((elements(layout, chunk, dtype, payload.bytes)?.into(), Absent::NOTHING));
        }
        self.read_made_chunk(layout, chunk, payload)
    }

    /// The same for a payload that is not just the values.
    fn read_made_chunk<'a>(
        &'a mut self,
        layout: &Layout,
        chunk: LocalChunk,
        payload: &ChunkPayload<'a>,
    ) -> Result<(Content<'a>, &'a Absent), Fault> {
        if payload.has_absent {
            self.read_absent(layout, chunk, payload)?;
            return Ok((Values::F32(&self.values).into(), &self.absent));
        }
        let values =
            decode(self.decoders.of(payload.epoch), &self.factors, layout, chunk, payload, payload.bytes)?;
        Ok((values, Absent::NOTHING))
    }

    /// Reads a payload that begins with absent ranges. A codec may make another number of a zero, so the zeros of absent
    /// elements are set here.
    fn read_absent(
        &mut self,
        layout: &Layout,
        chunk: LocalChunk,
        payload: &ChunkPayload<'_>,
    ) -> Result<(), Fault> {
        let refuse = |why: String| {
            let (from, clock, number) = (payload.from, payload.clock, chunk.number);
            layout.shape_fault(format!("{why}, in what {from} pushed for chunk {number} at clock {clock}"))
        };
        let (absent, rest) =
            Absent::read(payload.bytes, chunk.len).map_err(|error| refuse(error.to_string()))?;
        self.absent = absent;
        self.values.clear();
        self.values.resize(chunk.len, 0.0);
        if self.absent.covers(chunk.len) {
            return match rest.len() {
                0 => Ok(()),
                bytes => Err(refuse(format!("{bytes} bytes for a chunk of which everything is absent"))),
            };
        }
        match payload.form {
            Form::Dense(dtype) => kernels::copy(&mut self.values, elements(layout, chunk, dtype, rest)?),
            _ => decode(self.decoders.of(payload.epoch), &self.factors, layout, chunk, payload, rest)?
                .copy_to(&mut self.values),
        }
        self.absent.clear_in(&mut self.values);
        Ok(())
    }

    /// The rows of a chunk that a codec left something of. Each row counts by itself, so that the others are left out.
    fn encoded_rows<'a>(
        &'a mut self,
        layout: &Layout,
        index: usize,
        payload: &ChunkPayload<'a>,
    ) -> Result<GradientFrame<'a>, Fault> {
        let (chunk, width) = (layout.chunks()[index], layout.row_width());
        let content =
            decode(self.decoders.of(payload.epoch), &self.factors, layout, chunk, payload, payload.bytes)?;
        self.values.resize(chunk.len, 0.0);
        content.copy_to(&mut self.values);
        self.rows.clear();
        self.row_values.clear();
        for (row, number) in self.values.chunks_exact(width).zip(0u32..) {
            if row.iter().any(|&value| value != 0.0) {
                self.rows.push(number);
                self.row_values.extend_from_slice(row);
            }
        }
        if self.rows.is_empty() {
            // Random rounding may leave nothing; a push of nothing is one of a row of zeros.
            self.rows.push(0);
            self.row_values.resize(width, 0.0);
        }
        let values = Values::F32(&self.row_values);
        Ok(GradientFrame::Rows { index, start: chunk.start, rows: &self.rows, width, values })
    }
}

/// Refuses rows of a dense table, chunks of a sparse one, and rows with absent ranges.
#[inline]
fn check_form(layout: &Layout, form: Form, has_absent: bool) -> Result<(), Fault> {
    if form.is_rows() != layout.is_sparse() {
        let expected = if layout.is_sparse() { "single rows" } else { "whole chunks" };
        return Err(layout.shape_fault(format!("a push that is not one of {expected}")));
    }
    if form.is_rows() && has_absent {
        return Err(layout.shape_fault("absent ranges in a push of rows".into()));
    }
    Ok(())
}

/// The values of a chunk as they lie in the payload.
#[inline]
fn elements<'a>(
    layout: &Layout,
    chunk: LocalChunk,
    dtype: DType,
    bytes: &'a [u8],
) -> Result<Values<'a>, Fault> {
    match dtype.values(bytes) {
        Some(values) if values.len() == chunk.len => Ok(values),
        _ => {
            let found =
                format!("{} bytes of {dtype:?} where a chunk has {} elements", bytes.len(), chunk.len);
            Err(layout.shape_fault(found))
        }
    }
}

/// The values of a chunk that a codec made: they are finite, or they are refused.
fn decode<'a>(
    decoder: Option<&'a mut Decoder>,
    factors: &BTreeMap<WorkerId, PushFactors>,
    layout: &Layout,
    chunk: LocalChunk,
    payload: &ChunkPayload<'_>,
    bytes: &'a [u8],
) -> Result<Content<'a>, Fault> {
    let Some(decoder) = decoder else {
        return Err(layout.shape_fault("values that a codec made, and the table has none".into()));
    };
    let codec = decoder.codec().clone();
    let products = match payload.from {
        NodeId::Worker(worker) => factors.get(&worker).filter(|factors| factors.clock == payload.clock),
        _ => None,
    };
    let products = products.map_or(Products::NONE, |factors| &factors.products);
    let first = chunk.table_start as usize;
    decoder.read_chunk(bytes, first..first + chunk.len, products).map_err(|why| {
        let message = format!(
            "table `{}`: {} pushed chunk {} at clock {} by codec `{codec}`; {why}; nothing was applied",
            layout.name(),
            payload.from,
            chunk.number,
            payload.clock
        );
        Fault { cause: Cause::Shape, message }
    })
}

/// The place of a sparse push's chunk, which comes after the chunks of the frames before.
fn chunk_after(layout: &Layout, last_chunk: Option<u32>, number: u32) -> Result<usize, Fault> {
    if last_chunk.is_some_and(|last| last >= number) {
        return Err(layout.shape_fault(format!("chunk {number} again, or out of order")));
    }
    layout.index_of(number)
}

/// Rows as they are: their numbers, then their values.
fn plain_rows<'a>(
    layout: &Layout,
    index: usize,
    count: u32,
    payload: &'a [u8],
) -> Result<GradientFrame<'a>, Fault> {
    let (chunk, width, count) = (layout.chunks()[index], layout.row_width(), count as usize);
    if count == 0 || count.checked_mul(4 + width * 4) != Some(payload.len()) {
        return Err(layout.shape_fault(format!("{count} rows in {} bytes", payload.len())));
    }
    let (numbers, bytes) = payload.split_at(count * 4);
    let words = bytemuck::try_cast_slice(numbers).ok().zip(floats(bytes));
    let Some((rows, values)): Option<(&[u32], &[f32])> = words else {
        return Err(layout.shape_fault("unaligned rows".into()));
    };
    let is_ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
    let is_in_range = rows.last().is_none_or(|&row| (row as usize) < chunk.len / width);
    if !is_ascending || !is_in_range {
        return Err(layout.shape_fault("row numbers out of order or out of range".into()));
    }
    Ok(GradientFrame::Rows { index, start: chunk.start, rows, width, values: Values::F32(values) })
}
