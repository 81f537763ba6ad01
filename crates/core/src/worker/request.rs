//! One request to one shard, from the moment it is made until it is answered.

use super::encoding::{Encoded, Payloads};
use super::local_table::LocalTable;
use super::{Ticket, WorkerError};
use crate::absence::Absent;
use crate::limits;
use crate::role::{Body, Frame, Landing};
use crate::store::{Buffer, Place};
use crate::table::Chunk;
use crate::types::{Clock, ShardId, TableId};
use crate::wire::{Flags, Header, Kind};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Request {
    pub(super) shard: ShardId,
    pub(super) table: usize,
    pub(super) clock: Clock,
    pub(super) ticket: Ticket,
    /// Its pull waits for the scheduler (without overlap).
    pub(super) held: bool,
    /// Chunks, or rows, of the answer that are here.
    received: usize,
    /// Where the answer may be put, as a header says it.
    landing: u64,
    what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// Initial values.
    Init { buffer: Option<Arc<Buffer>> },
    /// A gradient. The buffer is there until the server has it.
    Push {
        buffer: Option<Arc<Buffer>>,
        rows: Option<Arc<Vec<u32>>>,
        /// Where in the buffer the payloads of chunks are, when a codec made them.
        encoded: Option<Arc<Payloads>>,
        missing: Missing,
        want_params: bool,
    },
    /// Parameters. `rows` has row numbers with their place in the result.
    Pull { rows: Option<Vec<(u32, u32)>>, now: bool },
}

/// Ranges of a dense table that a gradient does not have: ascending, disjoint, not empty. Usually there are none.
#[derive(Debug, Clone, Default)]
pub(super) struct Missing(Option<Arc<[Range<usize>]>>);

impl Missing {
    /// The error says what is wrong with the ranges for a table of so many elements.
    pub(super) fn new(ranges: Vec<Range<usize>>, elements: usize) -> Result<Missing, String> {
        if ranges.len() > limits::MAX_ABSENT_RANGES {
            let most = limits::MAX_ABSENT_RANGES;
            return Err(format!("a gradient lacks {} ranges; at most {most} can be named", ranges.len()));
        }
        let is_ascending = ranges.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let is_some = ranges.iter().all(|range| range.start < range.end);
        if !is_ascending || !is_some || ranges.last().is_some_and(|last| last.end > elements) {
            return Err(format!(
                "the ranges that a gradient lacks are ascending, disjoint, not empty, and within its {elements} elements"
            ));
        }
        Ok(Missing((!ranges.is_empty()).then(|| ranges.into())))
    }

    pub(super) fn ranges(&self) -> &[Range<usize>] {
        self.0.as_deref().unwrap_or(&[])
    }

    /// Completes the frame of a chunk whose gradient is these bytes of a buffer. Where some of it is missing they are
    /// copied, behind a list that says so.
    fn frame(&self, mut header: Header, chunk: Chunk, buffer: &Arc<Buffer>, bytes: Range<usize>) -> Frame {
        let (start, len) = (chunk.start as usize, chunk.len as usize);
        let absent = match &self.0 {
            None => Absent::default(),
            Some(ranges) => Absent::in_chunk(ranges, start..start + len),
        };
        let body = match absent.is_empty() {
            true => Body::Shared { buffer: Arc::clone(buffer), start: bytes.start, len: bytes.len() },
            false => {
                header.flags = header.flags.with(Flags::ABSENT);
                Body::Bytes(absent.payload(len, &buffer.as_bytes()[bytes.clone()]))
            }
        };
        header.payload_bytes = body.bytes().map_or(bytes.len(), <[u8]>::len) as u32;
        Frame { header, body }
    }
}

/// What an acknowledgement settled.
#[derive(Debug)]
pub(super) struct Acknowledged {
    pub(super) is_push: bool,
    pub(super) buffer: Option<Arc<Buffer>>,
    /// Nothing else is to come for the request.
    pub(super) done: bool,
}

/// What frames are made from.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) id: u64,
    pub(super) epoch: u32,
    pub(super) overlap: bool,
    /// Without overlap: the last clock that the scheduler let go.
    pub(super) gone: Option<Clock>,
    pub(super) table: &'a LocalTable,
}

impl Request {
    pub(super) fn new(shard: ShardId, table: usize, clock: Clock, ticket: Ticket, what: What) -> Request {
        Request { shard, table, clock, ticket, held: false, received: 0, landing: 0, what }
    }

    /// The answer may be put there by a server that shares memory with this process.
    pub(super) fn landing_at(mut self, place: Option<Place>) -> Request {
        self.landing = place.map_or(0, Place::to_bits);
        self
    }

    /// Chunks of the answer that are here.
    pub(super) fn received(&self) -> usize {
        self.received
    }

    /// Whether the server must get it even when nobody waits for it any more.
    pub(super) fn must_be_sent(&self) -> bool {
        match self.what {
            What::Init { .. } => true,
            What::Push { ref buffer, .. } => buffer.is_some(),
            What::Pull { .. } => false,
        }
    }

    /// Whether both bring the same push to the same server.
    pub(super) fn is_same_push(&self, other: &Request) -> bool {
        (self.shard, self.table, self.clock) == (other.shard, other.table, other.clock)
    }

    /// What it brings to the server, as long as that does not have it.
    pub(super) fn buffer(&self) -> Option<&Arc<Buffer>> {
        match &self.what {
            What::Init { buffer } | What::Push { buffer, .. } => buffer.as_ref(),
            What::Pull { .. } => None,
        }
    }

    /// What a codec made of the gradient that it brings, as long as the server does not have it.
    pub(super) fn encoded(&self) -> Option<Encoded> {
        let What::Push { buffer, encoded, missing, .. } = &self.what else { return None };
        Some(Encoded { buffer: buffer.clone()?, payloads: encoded.clone()?, missing: missing.clone() })
    }

    /// Whether a consistency condition stood before the answer.
    pub(super) fn is_conditional(&self) -> bool {
        !matches!(self.what, What::Pull { now: true, .. })
    }

    /// Whether parameters are still to come.
    pub(super) fn wants_params(&self) -> bool {
        match self.what {
            What::Init { .. } => false,
            What::Push { want_params, .. } => want_params,
            What::Pull { .. } => true,
        }
    }

    /// Hands everything that the server does not have yet to `send`.
    pub(super) fn frames(&mut self, context: &Context<'_>, send: &mut impl FnMut(Frame)) {
        self.received = 0;
        let mut header = Header::new(Kind::Push);
        header.table = TableId(self.table as u32);
        header.clock = self.clock;
        header.request = context.id;
        header.epoch = context.epoch;
        header.landing = if self.wants_params() { self.landing } else { 0 };
        let may_pull = |clock: Clock| context.overlap || clock == 0 || context.gone >= Some(clock - 1);
        match &mut self.what {
            What::Init { buffer } => {
                header.kind = Kind::Init;
                if let Some(buffer) = buffer {
                    dense_frames(header, self.shard, (buffer, &Missing::default()), context.table, send);
                }
            }
            What::Push { buffer: Some(buffer), rows, encoded, missing, want_params } => {
                if *want_params && context.overlap {
                    header.flags = Flags::WANT_PARAMS;
                }
                self.held = *want_params && !context.overlap;
                if let Some(payloads) = encoded {
                    let flags = if rows.is_some() { Flags::ROWS } else { Flags::default() };
                    header.flags = header.flags.with(flags);
                    let gradient = (&*buffer, &*missing);
                    return encoded_frames(header, self.shard, gradient, payloads, context.table, send);
                }
                match rows {
                    Some(rows) => row_frames(header, self.shard, rows, buffer.as_slice(), context.table)
                        .into_iter()
                        .for_each(send),
                    None => dense_frames(header, self.shard, (buffer, missing), context.table, send),
                }
            }
            What::Push { buffer: None, .. } => {
                self.held = !may_pull(self.clock + 1);
                header.clock = self.clock + 1;
                if !self.held {
                    send(pull_frame(header, None));
                }
            }
            What::Pull { rows, now } => {
                self.held = !*now && !may_pull(self.clock);
                if *now {
                    header.flags = Flags::NOW;
                }
                if !self.held {
                    send(pull_frame(header, rows.as_deref()));
                }
            }
        }
    }

    /// The server has it, or will not take it. `None` when it said so before.
    pub(super) fn acknowledge(&mut self) -> Option<Acknowledged> {
        match &mut self.what {
            What::Init { buffer } => Some(Acknowledged { is_push: false, buffer: buffer.take(), done: true }),
            What::Push { buffer: None, .. } | What::Pull { .. } => None,
            What::Push { buffer, want_params, .. } => {
                Some(Acknowledged { is_push: true, buffer: buffer.take(), done: !*want_params })
            }
        }
    }

    /// The last frame of the answer is here; whether the request is settled by it.
    pub(super) fn answered(&mut self) -> bool {
        match &mut self.what {
            What::Push { want_params, buffer, .. } => {
                *want_params = false;
                buffer.is_none()
            }
            What::Init { .. } => false,
            What::Pull { .. } => true,
        }
    }

    /// Puts one frame of an answer where it belongs: the table's values, or the ticket's rows. `result` is empty when
    /// nobody waits for the rows any more, `is_late` says that the values are not wanted.
    ///
    /// Frames come in order, and the last one completes the answer: half an answer must not pass for a whole one.
    pub(super) fn take_params(
        &mut self,
        table: &mut LocalTable,
        header: &Header,
        payload: Option<&[u8]>,
        is_late: bool,
        result: &mut [f32],
    ) -> Result<(), WorkerError> {
        // A server that cannot go on with an answer begins anew.
        if header.part == 0 {
            self.received = 0;
        }
        let encoded = payload.filter(|_| header.flags.has(Flags::ENCODED));
        let decoded = match (encoded, &self.what) {
            (Some(payload), What::Pull { rows: Some(_), .. }) => {
                table.decode_rows(header.rows as usize, payload)
            }
            _ => None,
        };
        let plain = payload.filter(|_| encoded.is_none()).map(crate::store::floats);
        let plain = plain.or(decoded.as_deref().map(Some));
        let taken = match (plain, &self.what) {
            (Some(Some(values)), What::Pull { rows: Some(rows), .. }) => {
                self.put_rows(rows, table.row_width(), values, result)
            }
            (Some(Some(values)), _) => self.put_chunk(table, header.chunk, values, is_late),
            (None, _) => match encoded {
                Some(payload) => self.put_encoded(table, header.chunk, payload, is_late),
                None => self.chunk_landed(table, header),
            },
            (Some(None), _) => None,
        };
        if let Some((here, expected)) = taken {
            self.received += here;
            if header.flags.has(Flags::LAST) == (self.received == expected) {
                return Ok(());
            }
        }
        Err(WorkerError::Shape {
            table: table.spec.name.clone(),
            expected: format!("parameters that fit shape {:?}", table.spec.shape),
            found: format!("{} bytes for chunk {} from {}", header.payload_bytes, header.chunk, self.shard),
        })
    }

    /// Where the chunks go that come from one of an answer on.
    pub(super) fn places(
        &self,
        table: &LocalTable,
        first: usize,
        count: usize,
    ) -> impl Iterator<Item = Landing> {
        (first..first.saturating_add(count)).map_while(|index| table.chunk_of(self.shard, index)).map(
            |(chunk, range)| {
                let start = range.start as usize * 4;
                Landing { chunk, bytes: start..start + range.len as usize * 4 }
            },
        )
    }

    /// The next chunk is in its place. How many came (one), and how many the answer has.
    fn chunk_landed(&self, table: &LocalTable, header: &Header) -> Option<(usize, usize)> {
        let (next, chunk) = table.chunk_of(self.shard, self.received)?;
        let fits = next == header.chunk && chunk.len * 4 == header.payload_bytes;
        fits.then(|| (1, table.chunks_of(self.shard).len()))
    }

    /// Puts an encoded chunk to its place, if it is its turn. How many came (one), and how many the answer has.
    fn put_encoded(
        &self,
        table: &mut LocalTable,
        number: u32,
        payload: &[u8],
        is_late: bool,
    ) -> Option<(usize, usize)> {
        let (_, chunk) = table.chunk_of(self.shard, self.received).filter(|(next, _)| *next == number)?;
        if table.spec.rows {
            return None;
        }
        let start = chunk.start as usize;
        if !is_late {
            table.decode_chunk(start..start + chunk.len as usize, payload)?;
        }
        Some((1, table.chunks_of(self.shard).len()))
    }

    /// Puts whole rows to their places. How many came, and how many the answer has; `None` when they do not fit.
    fn put_rows(
        &self,
        rows: &[(u32, u32)],
        width: usize,
        values: &[f32],
        result: &mut [f32],
    ) -> Option<(usize, usize)> {
        let here = values.len() / width;
        let places =
            rows.get(self.received..self.received + here).filter(|_| values.len() == here * width)?;
        for ((_, place), row) in places.iter().zip(values.chunks_exact(width)) {
            let start = *place as usize * width;
            // A ticket that was given up has no memory for its rows any more.
            if let Some(target) = result.get_mut(start..start + width) {
                target.copy_from_slice(row);
            }
        }
        Some((here, rows.len()))
    }

    /// Puts a chunk to its place, if it is its turn. How many came (one), and how many the answer has.
    fn put_chunk(
        &self,
        table: &mut LocalTable,
        number: u32,
        values: &[f32],
        is_late: bool,
    ) -> Option<(usize, usize)> {
        let (next, chunk) = table.chunk_of(self.shard, self.received)?;
        if next != number || chunk.len as usize != values.len() || table.spec.rows {
            return None;
        }
        let range = chunk.start as usize..chunk.start as usize + values.len();
        table.set_base(range.clone(), values);
        let target = table.target(self.ticket);
        // An empty table is lent, and nobody waits for this answer any more.
        let is_there = |there: &[f32]| there.as_ptr() == values.as_ptr();
        let is_in_place = target.as_slice().get(range.clone()).is_none_or(is_there);
        if !is_late && !is_in_place {
            Arc::make_mut(target).as_mut_slice()[range].copy_from_slice(values);
        }
        Some((1, table.chunks_of(self.shard).len()))
    }
}

fn dense_frames(
    mut header: Header,
    shard: ShardId,
    (buffer, missing): (&Arc<Buffer>, &Missing),
    table: &LocalTable,
    send: &mut impl FnMut(Frame),
) {
    let chunks = table.chunks_of(shard);
    let count = chunks.len();
    let flags = header.flags;
    for (part, (number, chunk)) in (0..).zip(chunks) {
        let (start, len) = (chunk.start as usize * 4, chunk.len as usize * 4);
        header.chunk = number;
        header.part = part;
        header.flags = if part as usize + 1 == count { flags.with(Flags::LAST) } else { flags };
        send(missing.frame(header, chunk, buffer, start..start + len));
    }
}

/// One frame for every chunk that has a payload; one empty frame when none of the shard's has, since the push counts for
/// the worker's progress all the same.
fn encoded_frames(
    mut header: Header,
    shard: ShardId,
    (buffer, missing): (&Arc<Buffer>, &Missing),
    payloads: &[(u32, Range<usize>)],
    table: &LocalTable,
    send: &mut impl FnMut(Frame),
) {
    let flags = header.flags;
    let payload_of = |number: u32| payloads.binary_search_by_key(&number, |(of, _)| *of).ok();
    let mine = || table.chunks_of(shard).filter_map(|(number, _)| payload_of(number));
    let count = mine().count();
    for (part, (number, range)) in (0..).zip(mine().map(|place| &payloads[place])) {
        header.chunk = *number;
        header.part = part;
        header.flags = flags.with(Flags::ENCODED);
        if part as usize + 1 == count {
            header.flags = header.flags.with(Flags::LAST);
        }
        send(missing.frame(header, table.chunk_at(*number), buffer, range.clone()));
    }
    if count == 0 {
        header.flags = flags.with(Flags::LAST);
        send(Frame { header, body: Body::Empty });
    }
}

/// One frame for every chunk that has some of the rows; one empty frame when the shard has none of them, since the
/// push counts for the worker's progress there too.
fn row_frames(
    mut header: Header,
    shard: ShardId,
    rows: &[u32],
    values: &[f32],
    table: &LocalTable,
) -> Vec<Frame> {
    let width = table.row_width();
    header.flags = header.flags.with(Flags::ROWS);
    let mut frames: Vec<Frame> = Vec::new();
    for (number, chunk) in table.chunks_of(shard) {
        let first_row = (chunk.start / width as u64) as u32;
        let end_row = first_row + chunk.len / width as u32;
        let begin = rows.partition_point(|&row| row < first_row);
        let end = rows.partition_point(|&row| row < end_row);
        if begin == end {
            continue;
        }
        let mut bytes = Vec::with_capacity((end - begin) * (width + 1) * 4);
        for &row in &rows[begin..end] {
            bytes.extend_from_slice(&(row - first_row).to_le_bytes());
        }
        bytes.extend_from_slice(bytemuck::cast_slice(&values[begin * width..end * width]));
        header.chunk = number;
        header.part = frames.len() as u32;
        header.rows = (end - begin) as u32;
        header.payload_bytes = bytes.len() as u32;
        frames.push(Frame { header, body: Body::Bytes(bytes) });
    }
    if frames.is_empty() {
        frames.push(Frame { header, body: Body::Empty });
    }
    let last = frames.last_mut().expect("one at least");
    last.header.flags = last.header.flags.with(Flags::LAST);
    frames
}

fn pull_frame(mut header: Header, rows: Option<&[(u32, u32)]>) -> Frame {
    header.kind = Kind::Pull;
    let Some(rows) = rows else { return Frame { header, body: Body::Empty } };
    header.flags = header.flags.with(Flags::ROWS);
    header.rows = rows.len() as u32;
    header.payload_bytes = rows.len() as u32 * 4;
    let bytes = rows.iter().flat_map(|(row, _)| row.to_le_bytes()).collect();
    Frame { header, body: Body::Bytes(bytes) }
}
