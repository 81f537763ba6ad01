//! One request to one shard, from the moment it is made until it is answered.

use super::encoding::{LayerFactors, Payloads};
use super::fetch::FetchId;
use super::layout::{Layout, RowPlace, Share, elements_of};
use super::local_table::{LocalTable, Reply};
use super::missing::Missing;
use super::partial_pull::BlockId;
use super::scheduler::Scheduler;
use super::ticket::Claim;
use super::{Ticket, WorkerError};
use crate::consistency::PartialPull;
use crate::landing::Landing;
use crate::lease::Lease;
use crate::role::{Body, Frame};
use crate::store::{self, Place};
use crate::table::Chunk;
use crate::types::{Clock, ShardId, TableId};
use crate::wire::DType;
use crate::wire::frame::{Form, Init, Params, Piece, Pull, Push, Subject};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Request {
    shard: ShardId,
    table: usize,
    clock: Clock,
    ticket: Ticket,
    /// The pull of the whole table that this is a part of.
    fetch: Option<FetchId>,
    /// The type of the elements in the memory that the answer is put to.
    dtype: DType,
    /// Place in this worker's shared memory where a server may put the answer.
    reply_place: Option<Place>,
    /// When the worker may go on without its answer (PSP).
    partial: Option<PartialPull>,
    /// The worker may go on without its end once the table's copy is fresh enough (SSP's cache).
    takes_copy: bool,
    /// Its pull waits for the scheduler (without overlap).
    waits_for_scheduler: bool,
    /// Chunks, or rows, of the answer that are here.
    received: usize,
    /// The lowest version among them.
    version: Clock,
    /// The application went on before it was over: nobody holds its ticket any more.
    is_left_behind: bool,
    /// Some of them were not wanted and not written: the answer is no whole one, even if the rest is wanted since a switch of models.
    is_late: bool,
    kind: RequestKind,
}

#[derive(Debug)]
pub(super) enum RequestKind {
    /// Initial values, until the server has them.
    Init { values: Option<Lease> },
    /// A gradient, until the server has it.
    Push { gradient: Option<Outgoing>, samples: u32, want_params: bool },
    /// Parameters: of the whole table, or of these rows.
    Pull { rows: Option<Vec<RowPlace>>, now: bool },
}

/// A gradient as it is sent. Requests to several shards share it.
#[derive(Debug, Clone)]
pub(super) struct Outgoing {
    pub(super) buffer: Lease,
    pub(super) form: OutgoingForm,
    pub(super) missing: Missing,
    /// A residual counts it as sent: what a server refuses of it has to go back there.
    pub(super) is_counted: bool,
}

/// Form of a gradient in the memory that it is sent from.
#[derive(Debug, Clone)]
pub(super) enum OutgoingForm {
    /// The whole table, as elements of this type.
    Dense(DType),
    /// The values of these rows, one after the other.
    Rows(Arc<Vec<u32>>),
    /// Encoded chunks.
    Encoded(Arc<Payloads>),
    /// The same chunks as they travel without a codec: the one that made them holds no more.
    Decoded(Arc<Payloads>),
    /// The server would drop it, and hears that there is one.
    Nothing,
    /// It is held back: its chunks have no gradient.
    Held,
}

/// A table's part of what is pushed in one go.
#[derive(Debug)]
pub(super) struct TablePush {
    pub(super) table: usize,
    pub(super) gradient: Outgoing,
    pub(super) asks: Asks,
    /// The application need not wait for its end once the table's copy is fresh enough.
    pub(super) takes_copy: bool,
}

/// What a worker asks for after a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// Nothing: it goes on with the parameters that are here.
    Nothing,
    /// That it may go on with them.
    Leave,
    /// The parameters that follow.
    Parameters,
}

/// What is asked for with a push.
#[derive(Debug, Clone, Copy)]
pub(super) enum Asks {
    /// An acknowledgement.
    Nothing,
    /// That the consistency model lets the worker go on, with the parameters that it has.
    Leave,
    /// The parameters that follow, there.
    Parameters(Reply),
}

impl Asks {
    pub(super) fn reply(self) -> Option<Reply> {
        match self {
            Asks::Parameters(reply) => Some(reply),
            Asks::Nothing | Asks::Leave => None,
        }
    }
}

/// Outcome of an acknowledgement.
#[derive(Debug)]
pub(super) struct Acknowledged {
    /// Nothing else is to come for the request.
    pub(super) is_settled: bool,
}

/// Context in which frames are made.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) id: u64,
    pub(super) epoch: u32,
    pub(super) scheduler: &'a Scheduler,
    pub(super) layout: &'a Layout,
    /// No parameters are asked for, but at once: they are broadcast.
    pub(super) is_broadcast: bool,
}

/// A frame of an answer.
#[derive(Debug)]
pub(super) struct Answer<'a> {
    pub(super) params: &'a Params,
    pub(super) payload: Payload<'a>,
    pub(super) payload_bytes: u32,
    /// The parameters are not wanted any more.
    pub(super) is_late: bool,
    /// Memory for rows. Empty when the ticket was given up.
    pub(super) rows: &'a mut [f32],
}

/// The payload of a frame.
#[derive(Debug, Clone, Copy)]
pub(super) enum Payload<'a> {
    /// The driver has it.
    Bytes(&'a [u8]),
    /// It was received where it belongs.
    InPlace,
}

/// How far a frame brings an answer.
struct Step {
    /// Chunks or rows that came.
    count: usize,
    /// Chunks or rows that the answer has.
    of: usize,
}

impl Request {
    pub(super) fn new(
        shard: ShardId,
        table: usize,
        clock: Clock,
        ticket: Ticket,
        kind: RequestKind,
    ) -> Request {
        let (fetch, dtype, reply_place, waits_for_scheduler, received) = (None, DType::F32, None, false, 0);
        let (version, is_left_behind) = (0, false);
        Request {
            shard,
            table,
            clock,
            ticket,
            fetch,
            dtype,
            reply_place,
            partial: None,
            takes_copy: false,
            waits_for_scheduler,
            received,
            version,
            is_left_behind,
            is_late: false,
            kind,
        }
    }

    /// Asks for a shard's part of the whole table.
    pub(super) fn whole(shard: ShardId, table: usize, clock: Clock, ticket: Ticket, reply: Reply) -> Request {
        let kind = RequestKind::Pull { rows: None, now: false };
        Request::new(shard, table, clock, ticket, kind).with_reply(Some(reply))
    }

    /// The same, to be answered at once whatever the consistency model says, or not.
    pub(super) fn at_once(mut self, is_at_once: bool) -> Request {
        if let RequestKind::Pull { now, .. } = &mut self.kind {
            *now = is_at_once;
        }
        self
    }

    /// Asks whether the worker may begin an iteration with the parameters that it has: a pull of no rows, which the consistency model
    /// answers as any other, and nothing comes with that.
    pub(super) fn leave(shard: ShardId, table: usize, clock: Clock, ticket: Ticket) -> Request {
        let kind = RequestKind::Pull { rows: Some(Vec::new()), now: false };
        Request::new(shard, table, clock, ticket, kind)
    }

    /// The worker may go on without its answer by this rule, or not at all.
    pub(super) fn with_partial(self, partial: Option<PartialPull>) -> Request {
        Request { partial, ..self }
    }

    /// The worker may go on without its end once the table's copy is fresh enough, or not.
    pub(super) fn with_copy(self, takes_copy: bool) -> Request {
        Request { takes_copy, ..self }
    }

    /// Its answer is a part of a pull of the whole table.
    pub(super) fn with_reply(mut self, reply: Option<Reply>) -> Request {
        self.fetch = reply.map(|reply| reply.fetch);
        self.dtype = reply.map_or(DType::F32, |reply| reply.dtype);
        self.reply_place = reply.and_then(|reply| reply.place);
        self
    }

    pub(super) fn shard(&self) -> ShardId {
        self.shard
    }

    pub(super) fn table(&self) -> usize {
        self.table
    }

    pub(super) fn clock(&self) -> Clock {
        self.clock
    }

    pub(super) fn ticket(&self) -> Ticket {
        self.ticket
    }

    pub(super) fn fetch(&self) -> Option<FetchId> {
        self.fetch
    }

    /// The rows that it asks for; none where it is not about rows.
    pub(super) fn rows(&self) -> &[RowPlace] {
        match &self.kind {
            RequestKind::Pull { rows: Some(rows), .. } => rows,
            RequestKind::Pull { rows: None, .. } | RequestKind::Init { .. } | RequestKind::Push { .. } => &[],
        }
    }

    /// The version of what is here of the answer.
    pub(super) fn version(&self) -> Clock {
        self.version
    }

    /// The application goes on, and does not hear of the end any more unless it is a bad one.
    pub(super) fn leave_behind(&mut self) {
        self.is_left_behind = true;
    }

    pub(super) fn is_left_behind(&self) -> bool {
        self.is_left_behind
    }

    /// Whether the worker may go on without its answer.
    pub(super) fn is_partial(&self) -> bool {
        self.partial.is_some()
    }

    /// Whether the worker may go on without its end once the table's copy is fresh enough.
    pub(super) fn takes_copy(&self) -> bool {
        self.takes_copy
    }

    /// How its ticket waits for it.
    pub(super) fn claim(&self) -> Claim {
        match (self.takes_copy, self.is_partial()) {
            (true, _) => Claim::Copied,
            (false, true) => Claim::Loose,
            (false, false) => Claim::Firm,
        }
    }

    /// The block that it is to bring, and when the worker may go on without it, if it may.
    pub(super) fn partial_block(&self) -> Option<(BlockId, PartialPull)> {
        let partial = self.partial.filter(|_| self.wants_params())?;
        Some((self.block(), partial))
    }

    /// The block that it is about.
    pub(super) fn block(&self) -> BlockId {
        BlockId { table: self.table, shard: self.shard }
    }

    /// The iteration that its answer is for.
    pub(super) fn iteration(&self) -> Clock {
        match self.kind {
            RequestKind::Push { .. } => self.clock + 1,
            RequestKind::Init { .. } | RequestKind::Pull { .. } => self.clock,
        }
    }

    pub(super) fn waits_for_scheduler(&self) -> bool {
        self.waits_for_scheduler
    }

    /// Whether the server must get it even when its ticket was given up.
    pub(super) fn must_be_sent(&self) -> bool {
        match &self.kind {
            RequestKind::Init { .. } => true,
            RequestKind::Push { gradient, .. } => gradient.is_some(),
            RequestKind::Pull { .. } => false,
        }
    }

    /// Whether it is a push that the server may not have.
    pub(super) fn is_unacknowledged_push(&self) -> bool {
        matches!(self.kind, RequestKind::Push { gradient: Some(_), .. })
    }

    /// Whether the server has still to say that it has what the request brings.
    pub(super) fn wants_ack(&self) -> bool {
        matches!(
            self.kind,
            RequestKind::Init { values: Some(_) } | RequestKind::Push { gradient: Some(_), .. }
        )
    }

    /// Whether both bring the same push to the same server.
    pub(super) fn is_same_push(&self, other: &Request) -> bool {
        (self.shard, self.table, self.clock) == (other.shard, other.table, other.clock)
    }

    /// The gradient that it brings, if a residual counts it as sent, as long as the server does not have it.
    pub(super) fn counted(&self) -> Option<Outgoing> {
        match &self.kind {
            RequestKind::Push { gradient: Some(gradient), .. } if gradient.is_counted => {
                Some(gradient.clone())
            }
            _ => None,
        }
    }

    /// The codecs of its table are about to change: the gradient that it brings is sent without one.
    pub(super) fn leave_codec(&mut self, table: &LocalTable) {
        if let RequestKind::Push { gradient: Some(gradient), .. } = &mut self.kind {
            *gradient = table.decoded(gradient, self.shard);
        }
    }

    /// The codecs of its table have changed: a place for other elements than those that answers consist of now is not named
    /// any more.
    pub(super) fn check_place(&mut self, table: &LocalTable) {
        self.reply_place = self.reply_place.filter(|_| table.answer_type() == Some(self.dtype));
    }

    /// Whether a consistency condition stood before the answer.
    pub(super) fn is_conditional(&self) -> bool {
        !matches!(self.kind, RequestKind::Pull { now: true, .. })
    }

    /// Whether parameters are still to come.
    pub(super) fn wants_params(&self) -> bool {
        match self.kind {
            RequestKind::Init { .. } => false,
            RequestKind::Push { want_params, .. } => want_params,
            RequestKind::Pull { .. } => true,
        }
    }

    /// Whether a share of the answer is here, which is one of the whole table.
    pub(super) fn has_share(&self, layout: &Layout, share: Share) -> bool {
        !self.wants_params() || self.received >= layout.chunks_of_share(self.shard, share)
    }

    /// Hands everything that the server does not have yet to `send`.
    pub(super) fn frames(&mut self, context: &Context<'_>, send: &mut impl FnMut(Frame)) {
        let Context { id, epoch, scheduler, layout, is_broadcast } = *context;
        if is_broadcast && !self.must_be_sent() && self.is_conditional() {
            return;
        }
        self.received = 0;
        self.waits_for_scheduler = match &self.kind {
            RequestKind::Init { .. } | RequestKind::Pull { now: true, .. } => false,
            RequestKind::Push { gradient: Some(_), want_params, .. } => *want_params && !scheduler.overlaps(),
            RequestKind::Push { gradient: None, .. } => !scheduler.may_pull(self.clock + 1),
            RequestKind::Pull { now: false, .. } => !scheduler.may_pull(self.clock),
        };
        let subject = Subject { epoch, table: TableId(self.table as u32), request: id };
        let reply_place = self.reply_place.filter(|_| self.wants_params());
        let pull = Pull { subject, clock: self.clock, rows: None, now: false, reply_place };
        match &self.kind {
            RequestKind::Init { values } => {
                values.iter().for_each(|values| init_frames(subject, self.shard, values, layout, send));
            }
            RequestKind::Push { gradient: Some(gradient), samples, want_params } => {
                let (clock, samples) = (self.clock, *samples);
                let want_params = *want_params && scheduler.overlaps() && !is_broadcast;
                let piece = Piece { chunk: 0, sequence: 0, is_last: false };
                let (form, has_absent) = (Form::PLAIN, false);
                let push =
                    Push { subject, clock, samples, piece, form, has_absent, want_params, reply_place };
                gradient.frames(push, self.shard, layout, send);
            }
            RequestKind::Push { gradient: None, .. } if !self.waits_for_scheduler => {
                send(pull_frame(Pull { clock: self.clock + 1, ..pull }, None));
            }
            RequestKind::Pull { rows, now } if !self.waits_for_scheduler => {
                send(pull_frame(Pull { now: *now, ..pull }, rows.as_deref()));
            }
            RequestKind::Push { .. } | RequestKind::Pull { .. } => {}
        }
    }

    /// The server has it, or will not take it: its memory goes home. `None` when it said so before.
    pub(super) fn acknowledge(&mut self) -> Option<Acknowledged> {
        match &mut self.kind {
            RequestKind::Init { values } => values.take().map(|_| Acknowledged { is_settled: true }),
            RequestKind::Push { gradient, want_params, .. } => {
                gradient.take().map(|_| Acknowledged { is_settled: !*want_params })
            }
            RequestKind::Pull { .. } => None,
        }
    }

    /// The answer is over; whether the request is settled by it.
    pub(super) fn end_answer(&mut self) -> bool {
        match &mut self.kind {
            RequestKind::Push { want_params, gradient, .. } => {
                *want_params = false;
                gradient.is_none()
            }
            RequestKind::Init { .. } => false,
            RequestKind::Pull { .. } => true,
        }
    }

    /// Puts one frame of an answer where it belongs: the back of its pull, or the ticket's rows.
    ///
    /// Frames come in order, and the last one completes the answer: half an answer must not pass for a whole one.
    pub(super) fn take_params(
        &mut self,
        table: &mut LocalTable,
        mut answer: Answer<'_>,
    ) -> Result<(), WorkerError> {
        // A server that cannot go on with an answer begins anew.
        if answer.params.piece.sequence == 0 {
            (self.received, self.is_late) = (0, false);
            self.version = answer.params.version;
        }
        self.is_late |= answer.is_late;
        // Chunks are as new as they were when they were sent.
        self.version = self.version.min(answer.params.version);
        let step = match (&self.kind, answer.payload) {
            (RequestKind::Pull { rows: Some(rows), .. }, Payload::Bytes(bytes)) => {
                self.put_rows(table, rows, &mut answer, bytes)
            }
            (RequestKind::Pull { rows: Some(_), .. }, Payload::InPlace) => None,
            (_, payload) => self.put_chunk(table, &answer, payload),
        };
        if let Some(Step { count, of }) = step {
            self.received += count;
            if answer.params.piece.is_last == (self.received == of) {
                return Ok(());
            }
        }
        let (bytes, chunk) = (answer.payload_bytes, answer.params.piece.chunk);
        let layout = table.layout();
        let expected = format!("parameters that fit shape {:?}", layout.spec().shape);
        Err(layout.misfit(expected, format!("{bytes} bytes for chunk {chunk} from {}", self.shard)))
    }

    /// The answer is over without parameters.
    pub(super) fn leave_out(&mut self) {
        self.is_late = true;
    }

    /// Whether the answer that arrives, or a part of it, came too late to be wanted.
    pub(super) fn is_late(&self) -> bool {
        self.is_late
    }

    /// Whether a table's replica has the parameters that are wanted. It does not know what its shard has by now: that is asked for.
    pub(super) fn is_answered_by(&self, table: &LocalTable) -> bool {
        let clock = match self.kind {
            RequestKind::Init { .. } | RequestKind::Pull { now: true, .. } => return false,
            RequestKind::Push { .. } => self.clock + 1,
            RequestKind::Pull { now: false, .. } => self.clock,
        };
        self.wants_params() && table.replica_has(self.shard, clock)
    }

    /// Puts a replica's values of the shard where the answer belongs; `rows` is the memory for single ones, and empty when the ticket
    /// was given up.
    pub(super) fn take_replica(&mut self, table: &mut LocalTable, rows: &mut [f32]) {
        if let RequestKind::Pull { rows: Some(places), .. } = &self.kind {
            self.received = places.len();
            let (Some(replica), width) = (table.replica(), table.layout().row_width()) else { return };
            for RowPlace { row, place } in places {
                let start = *place as usize * width;
                if let Some(target) = rows.get_mut(start..start + width) {
                    target.copy_from_slice(replica.row(*row, width));
                }
            }
            return;
        }
        let destination = table.destination(self.fetch, self.shard, false);
        let (layout, replica) = (table.layout(), table.replica());
        self.received = layout.chunks_of(self.shard).len();
        let (Some(mut destination), Some(replica)) = (destination, replica) else { return };
        let Some(stream) = layout.index_of(self.shard) else { return };
        self.version = replica.version(stream).unwrap_or(0);
        for (place, (number, chunk)) in layout.chunks_of(self.shard).enumerate() {
            let landing = Landing::new(number, elements_of(&chunk), self.dtype, Some(DType::F32));
            let (_, _, values) = replica.chunk(stream, place);
            destination.put(&landing, bytemuck::cast_slice(values));
        }
    }

    /// Place in this worker's shared memory where a server may put the answer.
    #[cfg(test)]
    pub(super) fn reply_place(&self) -> Option<Place> {
        self.reply_place
    }

    /// Places of so many chunks of an answer, from the one at hand on. The pull that they are for; `None` where that is not of a
    /// whole table, or not wanted.
    pub(super) fn foresee(
        &self,
        params: &Params,
        layout: &Layout,
        count: usize,
        places: &mut Vec<Landing>,
    ) -> Option<FetchId> {
        let dtype = element_type(params.form)?;
        let fetch = self.fetch.filter(|_| self.wants_params())?;
        let first = params.piece.sequence as usize;
        let chunks =
            (first..first.saturating_add(count)).map_while(|index| layout.chunk_of(self.shard, index));
        places.extend(
            chunks.map(|(number, chunk)| Landing::new(number, elements_of(&chunk), self.dtype, dtype)),
        );
        places.first().filter(|place| place.chunk == params.piece.chunk).map(|_| fetch)
    }

    /// Puts the next chunk to its place; `None` when it is another, or does not fit.
    fn put_chunk(&self, table: &mut LocalTable, answer: &Answer<'_>, payload: Payload<'_>) -> Option<Step> {
        let layout = table.layout();
        if layout.is_sparse() {
            return None;
        }
        let (next, chunk) = layout.chunk_of(self.shard, self.received)?;
        let step = Step { count: 1, of: layout.chunks_of(self.shard).len() };
        if next != answer.params.piece.chunk {
            return None;
        }
        let form = answer.params.form;
        let place = Landing::new(next, elements_of(&chunk), self.dtype, element_type(form)?);
        let fits = match payload {
            Payload::InPlace => place.may_have(answer.payload_bytes as usize),
            Payload::Bytes(bytes) => {
                // An answer that is not wanted any more is not written.
                let fetch = self.fetch.filter(|_| !self.is_late);
                match table.destination(fetch, self.shard, form.is_encoded()) {
                    Some(mut destination) => destination.put(&place, bytes),
                    None => place.dtype.is_some() && place.may_have(bytes.len()),
                }
            }
        };
        fits.then_some(step)
    }

    /// Puts whole rows to their places; `None` when they do not fit.
    fn put_rows(
        &self,
        table: &mut LocalTable,
        rows: &[RowPlace],
        answer: &mut Answer<'_>,
        payload: &[u8],
    ) -> Option<Step> {
        let decoded = match answer.params.form {
            Form::EncodedRows { count } => Some(table.decode_rows(self.shard, count as usize, payload)?),
            Form::Encoded | Form::Dense(DType::F16 | DType::Bf16) => return None,
            Form::Dense(DType::F32) | Form::Rows { .. } => None,
        };
        let values = match &decoded {
            Some(decoded) => decoded.as_slice(),
            None => store::floats(payload)?,
        };
        let width = table.layout().row_width();
        let count = values.len() / width;
        let places = rows.get(self.received..self.received + count)?;
        if values.len() != count * width {
            return None;
        }
        for (RowPlace { place, .. }, row) in places.iter().zip(values.chunks_exact(width)) {
            let start = *place as usize * width;
            // A ticket that was given up has no memory for its rows any more.
            if let Some(target) = answer.rows.get_mut(start..start + width) {
                target.copy_from_slice(row);
            }
        }
        Some(Step { count, of: rows.len() })
    }
}

impl Outgoing {
    /// The same for a server that would drop it. What no server takes does not go back to a residual.
    pub(super) fn left_out(&self) -> Outgoing {
        let (form, missing) = (OutgoingForm::Nothing, Missing::default());
        Outgoing { buffer: self.buffer.clone(), form, missing, is_counted: false }
    }

    /// Hands the frames of a shard's part to `send`. `push` is what they have in common.
    fn frames(&self, push: Push, shard: ShardId, layout: &Layout, send: &mut impl FnMut(Frame)) {
        match &self.form {
            OutgoingForm::Dense(dtype) => self.dense_frames(push, shard, *dtype, layout, send),
            OutgoingForm::Rows(rows) => self.row_frames(push, shard, rows, layout, send),
            OutgoingForm::Encoded(payloads) => {
                let form =
                    |_| if layout.is_sparse() { Form::EncodedRows { count: 0 } } else { Form::Encoded };
                self.chunk_frames(push, shard, payloads, layout, form, send);
            }
            OutgoingForm::Decoded(payloads) => {
                let row_bytes = 4 + 4 * layout.row_width();
                let form = |bytes: usize| {
                    let count = (bytes / row_bytes) as u32;
                    if layout.is_sparse() { Form::Rows { count } } else { Form::PLAIN }
                };
                self.chunk_frames(push, shard, payloads, layout, form, send);
            }
            OutgoingForm::Held => self.held_frames(push, shard, layout, send),
            OutgoingForm::Nothing => {
                let piece = Piece { is_last: true, ..push.piece };
                send(push_frame(Push { piece, form: Form::NOTHING, ..push }, Body::Empty));
            }
        }
    }

    /// A frame for every chunk, which lacks all of it.
    fn held_frames(&self, push: Push, shard: ShardId, layout: &Layout, send: &mut impl FnMut(Frame)) {
        let chunks = layout.chunks_of(shard);
        let count = chunks.len();
        for (sequence, (number, chunk)) in (0..).zip(chunks) {
            let (body, has_absent) = self.missing.body(&chunk, &self.buffer, 0..0);
            let piece = Piece { chunk: number, sequence, is_last: sequence as usize + 1 == count };
            send(push_frame(Push { piece, form: Form::PLAIN, has_absent, ..push }, body));
        }
    }

    fn dense_frames(
        &self,
        push: Push,
        shard: ShardId,
        dtype: DType,
        layout: &Layout,
        send: &mut impl FnMut(Frame),
    ) {
        let chunks = layout.chunks_of(shard);
        let (count, width, form) = (chunks.len(), dtype.bytes(), Form::Dense(dtype));
        for (sequence, (number, chunk)) in (0..).zip(chunks) {
            let place = elements_of(&chunk);
            let bytes = place.start * width..place.end * width;
            let (body, has_absent) = self.missing.body(&chunk, &self.buffer, bytes);
            let piece = Piece { chunk: number, sequence, is_last: sequence as usize + 1 == count };
            send(push_frame(Push { piece, form, has_absent, ..push }, body));
        }
    }

    /// One frame for every chunk that has a payload; one empty frame when none of the shard's has, since the push counts for
    /// the worker's progress all the same.
    fn chunk_frames(
        &self,
        push: Push,
        shard: ShardId,
        payloads: &Payloads,
        layout: &Layout,
        form: impl Fn(usize) -> Form,
        send: &mut impl FnMut(Frame),
    ) {
        let empty = if layout.is_sparse() { Form::Rows { count: 0 } } else { Form::PLAIN };
        let Payloads { chunks, factors } = payloads;
        let payload_of = |number: u32| chunks.binary_search_by_key(&number, |(of, _)| *of).ok();
        let mine = || layout.chunks_of(shard).filter_map(|(number, _)| payload_of(number));
        let count = mine().count();
        let mut factors = factors.iter().peekable();
        for (sequence, (number, range)) in (0..).zip(mine().map(|place| &chunks[place])) {
            while let Some(layer) = factors.next_if(|layer| layer.chunks.start <= *number) {
                if layer.chunks.end > *number {
                    let piece = Piece { chunk: *number, sequence, is_last: false };
                    self.factor_frames(Push { piece, want_params: false, ..push }, layer, send);
                }
            }
            let chunk = layout.chunk_at(*number);
            let (body, has_absent) = self.missing.body(&chunk, &self.buffer, range.clone());
            let piece = Piece { chunk: *number, sequence, is_last: sequence as usize + 1 == count };
            send(push_frame(Push { piece, form: form(range.len()), has_absent, ..push }, body));
        }
        if count == 0 {
            let piece = Piece { is_last: true, ..push.piece };
            send(push_frame(Push { piece, form: empty, ..push }, Body::Empty));
        }
    }

    /// The factors of a layer, numbered as the chunk that they go before: a push has as many numbers as chunks.
    fn factor_frames(&self, push: Push, layer: &LayerFactors, send: &mut impl FnMut(Frame)) {
        for range in &layer.payloads {
            let body = Body::Shared { buffer: self.buffer.clone(), start: range.start, len: range.len() };
            send(push_frame(Push { form: Form::Encoded, ..push }, body));
        }
    }

    /// One frame for every chunk that has some of the rows; one empty frame when the shard has none of them, since the
    /// push counts for the worker's progress there too.
    fn row_frames(
        &self,
        push: Push,
        shard: ShardId,
        rows: &[u32],
        layout: &Layout,
        send: &mut impl FnMut(Frame),
    ) {
        let width = layout.row_width();
        let here = |(number, chunk): (u32, Chunk)| {
            let first = (chunk.start / width as u64) as u32;
            let begin = rows.partition_point(|&row| row < first);
            let end = rows.partition_point(|&row| row < first + chunk.len / width as u32);
            (begin < end).then_some((number, first, begin..end))
        };
        let mut chunks = layout.chunks_of(shard).filter_map(here).peekable();
        if chunks.peek().is_none() {
            let piece = Piece { is_last: true, ..push.piece };
            return send(push_frame(Push { piece, form: Form::Rows { count: 0 }, ..push }, Body::Empty));
        }
        let values = self.buffer.as_slice();
        let mut sequence = 0;
        while let Some((number, first, range)) = chunks.next() {
            let mut bytes = Vec::with_capacity(range.len() * (width + 1) * 4);
            for &row in &rows[range.clone()] {
                bytes.extend_from_slice(&(row - first).to_le_bytes());
            }
            bytes.extend_from_slice(bytemuck::cast_slice(&values[range.start * width..range.end * width]));
            let piece = Piece { chunk: number, sequence, is_last: chunks.peek().is_none() };
            let form = Form::Rows { count: range.len() as u32 };
            send(push_frame(Push { piece, form, ..push }, Body::Bytes(bytes)));
            sequence += 1;
        }
    }
}

/// The type of the elements that a chunk of an answer comes as, `None` if a codec made it. No chunk comes as rows.
fn element_type(form: Form) -> Option<Option<DType>> {
    match form {
        Form::Dense(dtype) => Some(Some(dtype)),
        Form::Encoded => Some(None),
        Form::Rows { .. } | Form::EncodedRows { .. } => None,
    }
}

fn init_frames(
    subject: Subject,
    shard: ShardId,
    values: &Lease,
    layout: &Layout,
    send: &mut impl FnMut(Frame),
) {
    let chunks = layout.chunks_of(shard);
    let count = chunks.len();
    for (sequence, (number, chunk)) in (0..).zip(chunks) {
        let place = elements_of(&chunk);
        let body = Body::Shared { buffer: values.clone(), start: place.start * 4, len: place.len() * 4 };
        let piece = Piece { chunk: number, sequence, is_last: sequence as usize + 1 == count };
        send(Frame { header: Init { subject, piece }.header(place.len() * 4), body });
    }
}

fn push_frame(push: Push, body: Body) -> Frame {
    let len = body.bytes().map_or(0, <[u8]>::len);
    Frame { header: push.header(len), body }
}

fn pull_frame(pull: Pull, rows: Option<&[RowPlace]>) -> Frame {
    let Some(rows) = rows else { return Frame { header: pull.header(0), body: Body::Empty } };
    let bytes: Vec<u8> = rows.iter().flat_map(|RowPlace { row, .. }| row.to_le_bytes()).collect();
    let pull = Pull { rows: Some(rows.len() as u32), ..pull };
    Frame { header: pull.header(bytes.len()), body: Body::Bytes(bytes) }
}
