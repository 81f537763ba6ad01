//! The frames of one table's answers.

use super::pulls::PendingPull;
use crate::limits;
use crate::role::{Body, Frame, Outbox, Output, Priority, Turn};
use crate::server::table_shard::{ChunkAnswer, TableShard};
use crate::store::Place;
use crate::types::{Clock, NodeId, TableId, WorkerId};
use crate::waits::Delay;
use crate::wire::DType;
use crate::wire::frame::{Form, Params, Piece, Subject};

/// Fields of a pull that its answer follows from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reply {
    pub(super) worker: WorkerId,
    pub(super) request: u64,
    pub(super) clock: Clock,
    /// How long it waited, and for whom.
    pub(super) delay: Option<Delay>,
    /// Place in the worker's shared memory for the table's first element.
    pub(super) place: Option<Place>,
}

impl From<&PendingPull> for Reply {
    fn from(pull: &PendingPull) -> Reply {
        let PendingPull { worker, request, clock, delay, reply_place, .. } = *pull;
        Reply { worker, request, clock, delay, place: reply_place }
    }
}

/// Parameters that frames refer to with [`Body::Stored`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) struct StoredTable {
    pub(in crate::server) table: TableId,
    /// The type of the elements that are sent.
    pub(in crate::server) dtype: DType,
    /// As they were broadcast.
    pub(in crate::server) is_published: bool,
}

/// Beside the type.
const PUBLISHED: u64 = 0x80;

impl StoredTable {
    pub(super) fn to_bits(self) -> u64 {
        let published = if self.is_published { PUBLISHED } else { 0 };
        u64::from(self.table.0) << 8 | published | self.dtype as u64
    }

    pub(in crate::server) fn from_bits(bits: u64) -> StoredTable {
        let types = [DType::F32, DType::F16, DType::Bf16];
        let dtype = types.into_iter().find(|&dtype| dtype as u64 == bits & 0x7f).unwrap_or_default();
        StoredTable { table: TableId((bits >> 8) as u32), dtype, is_published: bits & PUBLISHED != 0 }
    }
}

/// Makes the frames of one table's answers.
pub(super) struct Sender<'a> {
    pub(super) table: &'a mut TableShard,
    pub(super) id: TableId,
    pub(super) frames: &'a mut Outbox,
    /// Counts what is sent.
    pub(super) bytes: &'a mut u64,
}

impl Sender<'_> {
    /// Sends a chunk, by its place on this shard. Its values are read from the store when they leave, unless a codec
    /// encodes them for this worker.
    pub(super) fn send_chunk(&mut self, index: usize, to: NodeId, reply: &Reply) {
        let chunk = self.table.chunk(index);
        let answer = self.table.answer_chunk(index, reply.worker);
        let is_last = index + 1 == self.table.chunk_count();
        let piece = Piece { chunk: chunk.number, sequence: index as u32, is_last };
        let mut params = self.params(reply, piece);
        params.version = chunk.version;
        let (body, bytes) = match answer {
            ChunkAnswer::Stored(dtype) => {
                params.form = Form::Dense(dtype);
                // A worker's memory is for the elements that answers have; what is not finite may come as others.
                let place = reply.place.filter(|_| dtype == self.table.answer_type());
                let first = chunk.table_start * dtype.bytes() as u64;
                params.reply_place = place.and_then(|place| place.after(first));
                let (start, len) = (chunk.start * dtype.bytes(), chunk.len * dtype.bytes());
                (
                    Body::Stored {
                        buffer: StoredTable { table: self.id, dtype, is_published: false }.to_bits(),
                        start,
                        len,
                    },
                    len,
                )
            }
            ChunkAnswer::Made(payload) => {
                params.form = if payload.is_encoded { Form::Encoded } else { Form::PLAIN };
                let bytes = payload.bytes.len();
                (Body::Bytes(payload.bytes), bytes)
            }
        };
        self.send(to, Frame { header: params.header(bytes), body });
    }

    /// Sends the chunks from this place on.
    pub(super) fn send_chunks_from(&mut self, first: usize, to: NodeId, reply: &Reply) {
        (first..self.table.chunk_count()).for_each(|index| self.send_chunk(index, to, reply));
    }

    /// Says that a pull is over, without parameters.
    pub(super) fn send_nothing(&mut self, to: NodeId, reply: &Reply) {
        let piece = Piece { chunk: 0, sequence: 0, is_last: true };
        let params = Params { form: Form::NOTHING, ..self.params(reply, piece) };
        self.send(to, Frame { header: params.header(0), body: Body::Empty });
    }

    /// Sends single rows, which are gathered now.
    pub(super) fn send_rows(&mut self, rows: &[u32], to: NodeId, reply: &Reply) {
        let rows_per_frame = (limits::BLOCK_ELEMENTS / self.table.row_width()).max(1);
        let frames = rows.len().div_ceil(rows_per_frame).max(1);
        for sequence in 0..frames {
            let begin = sequence * rows_per_frame;
            let some = &rows[begin..rows.len().min(begin + rows_per_frame)];
            let payload = self.table.encode_rows(some);
            let piece = Piece { chunk: 0, sequence: sequence as u32, is_last: sequence + 1 == frames };
            let mut params = self.params(reply, piece);
            let count = some.len() as u32;
            params.form = if payload.is_encoded { Form::EncodedRows { count } } else { Form::Rows { count } };
            let header = params.header(payload.bytes.len());
            self.send(to, Frame { header, body: Body::Bytes(payload.bytes) });
        }
    }

    fn params(&self, reply: &Reply, piece: Piece) -> Params {
        // Not the shard's newest epoch, which the receiver may not have entered.
        let epoch = self.table.valid_from();
        Params {
            subject: Subject { epoch, table: self.id, request: reply.request },
            delay: reply.delay.filter(|_| piece.is_last),
            version: self.table.version(),
            piece,
            form: Form::PLAIN,
            reply_place: None,
        }
    }

    fn send(&mut self, to: NodeId, frame: Frame) {
        *self.bytes += u64::from(frame.header.payload_bytes);
        // An aggregator passes answers on in the order in which they come.
        let is_prioritized = self.table.is_prioritized() && matches!(to, NodeId::Worker(_));
        let turn = if is_prioritized { Turn::Ranked(Priority::of(&frame.header)) } else { Turn::InOrder };
        self.frames.push_back(Output::Send { to: to.into(), frame, turn });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_frames_refer_to_is_one_number() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for table in [0, 7, u32::MAX] {
                for is_published in [false, true] {
                    let stored = StoredTable { table: TableId(table), dtype, is_published };
                    assert_eq!(StoredTable::from_bits(stored.to_bits()), stored);
                }
            }
        }
    }
}
