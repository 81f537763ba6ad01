//! Data frames as types: what the 64 bytes of a [`Header`] mean in each of them.
//!
//! A header has one layout for all kinds of frames, and some of its fields mean different things in different kinds or
//! from different senders. Roles do not read it: they decode it once, by who sent it, into a type that has only the
//! fields which that frame has, and encode such a type to send one. `docs/wire.md` is the table of these types.

use super::{DType, Flags, Header, Kind};
use crate::limits;
use crate::store::Place;
use crate::types::{Clock, TableId, WorkerId};
use crate::waits::Delay;

/// A frame's place among the frames of one push, initialisation or answer on one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The chunk that it carries, numbered within its table.
    pub chunk: u32,
    /// Its number, from 0.
    pub sequence: u32,
    /// No frame follows it.
    pub is_last: bool,
}

/// How the payload of a push or an answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The elements of a chunk, in this type.
    Dense(DType),
    /// A chunk, encoded by the table's codec.
    Encoded,
    /// Single rows of a sparse table.
    Rows {
        /// How many.
        count: u32,
    },
    /// Single rows, encoded by the table's codec.
    EncodedRows {
        /// How many rows an answer has. A push is made of a whole chunk, and does not say.
        count: u32,
    },
}

impl Form {
    /// The elements of a chunk as tables hold them.
    pub const PLAIN: Form = Form::Dense(DType::F32);

    /// No values: of a dense table, those that the receiver would drop. The frame is the only one of its push or answer.
    pub const NOTHING: Form = Form::Rows { count: 0 };

    /// Whether the table is a sparse one.
    pub fn is_rows(self) -> bool {
        matches!(self, Form::Rows { .. } | Form::EncodedRows { .. })
    }

    /// Whether a codec made the payload.
    pub fn is_encoded(self) -> bool {
        matches!(self, Form::Encoded | Form::EncodedRows { .. })
    }

    fn decode(header: &Header) -> Form {
        match (header.flags.has(Flags::ROWS), header.flags.has(Flags::ENCODED)) {
            (false, false) => Form::Dense(header.dtype),
            (false, true) => Form::Encoded,
            (true, false) => Form::Rows { count: header.rows },
            (true, true) => Form::EncodedRows { count: header.rows },
        }
    }

    fn encode(self, header: &mut Header) {
        if let Form::Dense(dtype) = self {
            header.dtype = dtype;
        }
        if self.is_encoded() {
            header.flags = header.flags.with(Flags::ENCODED);
        }
        if let Form::Rows { count } | Form::EncodedRows { count } = self {
            header.flags = header.flags.with(Flags::ROWS);
            header.rows = count;
        }
    }
}

/// Identity of the request that a data frame belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject {
    /// The table's [`valid_from`](super::Plan::valid_from) epoch, as the sender knows the plan.
    pub epoch: u32,
    /// The table.
    pub table: TableId,
    /// The sender's number for the request; answers repeat it.
    pub request: u64,
}

impl Subject {
    fn decode(header: &Header) -> Subject {
        Subject { epoch: header.epoch, table: header.table, request: header.request }
    }

    fn header(self, kind: Kind, payload_bytes: usize) -> Header {
        let Subject { epoch, table, request } = self;
        // A payload that is longer than 4 GB is longer than any limit: its receiver refuses it.
        let payload_bytes = u32::try_from(payload_bytes).unwrap_or(u32::MAX);
        Header { epoch, table, request, payload_bytes, ..Header::new(kind) }
    }
}

/// Initial values of a chunk, from worker 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Init {
    /// The request.
    pub subject: Subject,
    /// Which chunk, and where it stands among the others.
    pub piece: Piece,
}

/// A gradient of a chunk, or of rows of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Push {
    /// The request.
    pub subject: Subject,
    /// The iteration.
    pub clock: Clock,
    /// How many samples the gradient is the mean of: its weight in a mean over workers.
    pub samples: u32,
    /// Which chunk, and where it stands among the others.
    pub piece: Piece,
    /// How the gradient is written.
    pub form: Form,
    /// The payload begins with the ranges of the chunk that have no gradient ([`crate::absence`]).
    pub has_absent: bool,
    /// The parameters that follow are wanted, as if a pull came after the push.
    pub want_params: bool,
    /// Place in the worker's shared memory for the table's first parameter.
    pub reply_place: Option<Place>,
}

/// A request for a table's parameters on one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pull {
    /// The request.
    pub subject: Subject,
    /// Iterations completed.
    pub clock: Clock,
    /// Only the rows of which the payload has the numbers; how many.
    pub rows: Option<u32>,
    /// Answer at once with what is there, whatever the consistency model.
    pub now: bool,
    /// Place in the worker's shared memory for the table's first parameter.
    pub reply_place: Option<Place>,
}

/// Parameters of a chunk, or of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// The request that they answer.
    pub subject: Subject,
    /// In the last frame of an answer that was delayed: how long, and for which worker.
    pub delay: Option<Delay>,
    /// Version of the parameters.
    pub version: Clock,
    /// Which chunk, and where it stands among the others.
    pub piece: Piece,
    /// How the parameters are written.
    pub form: Form,
    /// Place in the receiver's shared memory for this chunk.
    pub reply_place: Option<Place>,
}

/// A chunk of a version that is broadcast: its values, or what a codec made of them or of the difference to its last ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    /// The table's [`valid_from`](super::Plan::valid_from) epoch.
    pub epoch: u32,
    /// The table.
    pub table: TableId,
    /// The version that the frame is a part of.
    pub round: Clock,
    /// The version of the chunk that follows from it: a newer one where values were read when they left.
    pub version: Clock,
    /// Which chunk, and where it stands among the others of its shard.
    pub piece: Piece,
    /// How it is written.
    pub form: Form,
    /// In the last frame of a version: the digest of all its values on this shard; 0 where there is none.
    pub digest: u64,
    /// In the last frame of a version: the worker by which its round was closed, and how long others had waited for that at most.
    pub delay: Option<Delay>,
}

/// A sum of several workers' gradients of a chunk, from an aggregator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// The sum; `request` is its number among what the aggregator sends in its own name.
    pub subject: Subject,
    /// The iteration of all gradients in it.
    pub clock: Clock,
    /// The chunk, numbered within its table.
    pub chunk: u32,
    /// Counts how often sums of this table and clock were begun; one that was refused is begun again.
    pub attempt: u32,
    /// How many gradients are in it.
    pub gradients: u32,
    /// How it is written. Of rows it does not say how many: that follows from the payload's length.
    pub form: Form,
    /// The payload begins with the ranges that no gradient in it has.
    pub has_absent: bool,
}

/// From an aggregator: the pushes of the workers in the payload ([`super::group`]) are complete in the sums before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    /// The list; `request` is its number among what the aggregator sends in its own name.
    pub subject: Subject,
    /// The iteration of all pushes.
    pub clock: Clock,
    /// The attempt of the sums that it ends.
    pub attempt: u32,
    /// The worker whose push was the last to be complete.
    pub last: Option<WorkerId>,
}

/// Frames from a worker to a shard, or to the aggregator that stands for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromWorker {
    /// Initial values.
    Init(Init),
    /// A gradient.
    Push(Push),
    /// A request for parameters.
    Pull(Pull),
}

/// Frames from an aggregator to a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromAggregator {
    /// A worker's frame, passed on in its name.
    Relayed(WorkerId, FromWorker),
    /// The workers in the payload ([`super::group`]) are those whose gradients are in the sums that follow, until another such frame.
    Contributors {
        /// Its number among what the aggregator sends in its own name.
        number: u64,
    },
    /// A sum of gradients.
    Sum(Sum),
    /// The list of workers whose pushes are complete in the sums.
    Completed(Completed),
    /// This worker's connection to the aggregator broke: its pulls are forgotten.
    Forget(WorkerId),
}

impl Init {
    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        let mut header = self.subject.header(Kind::Init, payload_bytes);
        self.piece.encode(&mut header);
        header
    }
}

impl Push {
    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        let mut header = self.subject.header(Kind::Push, payload_bytes);
        header.clock = self.clock;
        header.version = u64::from(self.samples);
        header.landing = place_bits(self.reply_place);
        self.piece.encode(&mut header);
        self.form.encode(&mut header);
        set(&mut header, Flags::ABSENT, self.has_absent);
        set(&mut header, Flags::WANT_PARAMS, self.want_params);
        header
    }
}

impl Pull {
    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        let mut header = self.subject.header(Kind::Pull, payload_bytes);
        header.clock = self.clock;
        header.rows = self.rows.unwrap_or(0);
        header.landing = place_bits(self.reply_place);
        set(&mut header, Flags::ROWS, self.rows.is_some());
        set(&mut header, Flags::NOW, self.now);
        header
    }
}

impl Params {
    /// Decodes the header of a frame to a worker.
    pub fn decode(header: &Header) -> Params {
        Params {
            subject: Subject::decode(header),
            delay: Delay::from_bits(header.clock),
            version: header.version,
            piece: Piece::decode(header),
            form: Form::decode(header),
            reply_place: Place::from_bits(header.landing),
        }
    }

    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        let mut header = self.subject.header(Kind::Params, payload_bytes);
        header.clock = Delay::to_bits(self.delay);
        header.version = self.version;
        header.landing = place_bits(self.reply_place);
        self.piece.encode(&mut header);
        self.form.encode(&mut header);
        header
    }
}

impl Update {
    /// Decodes the header of a frame of kind [`Kind::Update`].
    pub fn decode(header: &Header) -> Update {
        Update {
            epoch: header.epoch,
            table: header.table,
            round: header.clock,
            version: header.version,
            piece: Piece::decode(header),
            form: Form::decode(header),
            digest: header.request,
            delay: Delay::from_bits(header.landing),
        }
    }

    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        let subject = Subject { epoch: self.epoch, table: self.table, request: self.digest };
        let mut header = subject.header(Kind::Update, payload_bytes);
        header.clock = self.round;
        header.version = self.version;
        header.landing = Delay::to_bits(self.delay);
        self.piece.encode(&mut header);
        self.form.encode(&mut header);
        header
    }
}

impl Sum {
    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        let mut header = self.subject.header(Kind::Push, payload_bytes);
        header.clock = self.clock;
        header.chunk = self.chunk;
        header.part = self.attempt;
        self.form.encode(&mut header);
        header.rows = self.gradients;
        set(&mut header, Flags::ABSENT, self.has_absent);
        header
    }
}

impl Completed {
    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        let mut header = self.subject.header(Kind::Group, payload_bytes);
        header.clock = self.clock;
        header.part = self.attempt;
        header.rows = self.last.map_or(0, |worker| worker.0.saturating_add(1));
        header
    }
}

impl FromWorker {
    /// Decodes the header of a frame from a worker; `None` if workers send no such frames to servers.
    pub fn decode(header: &Header) -> Option<FromWorker> {
        let subject = Subject::decode(header);
        let clock = header.clock;
        let reply_place = Place::from_bits(header.landing);
        Some(match header.kind {
            Kind::Init => FromWorker::Init(Init { subject, piece: Piece::decode(header) }),
            Kind::Push => FromWorker::Push(Push {
                subject,
                clock,
                samples: u32::try_from(header.version.max(1)).unwrap_or(u32::MAX),
                piece: Piece::decode(header),
                form: Form::decode(header),
                has_absent: header.flags.has(Flags::ABSENT),
                want_params: header.flags.has(Flags::WANT_PARAMS),
                reply_place,
            }),
            Kind::Pull => FromWorker::Pull(Pull {
                subject,
                clock,
                rows: header.flags.has(Flags::ROWS).then_some(header.rows),
                now: header.flags.has(Flags::NOW),
                reply_place,
            }),
            _ => return None,
        })
    }

    /// The request that the frame belongs to.
    pub fn subject(&self) -> &Subject {
        match self {
            FromWorker::Init(init) => &init.subject,
            FromWorker::Push(push) => &push.subject,
            FromWorker::Pull(pull) => &pull.subject,
        }
    }

    /// Whether it is the last frame of its request.
    pub fn is_last(&self) -> bool {
        match self {
            FromWorker::Init(init) => init.piece.is_last,
            FromWorker::Push(push) => push.piece.is_last,
            FromWorker::Pull(_) => true,
        }
    }

    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        match self {
            FromWorker::Init(init) => init.header(payload_bytes),
            FromWorker::Push(push) => push.header(payload_bytes),
            FromWorker::Pull(pull) => pull.header(payload_bytes),
        }
    }
}

impl FromAggregator {
    /// Decodes the header of a frame from an aggregator; `None` if aggregators send no such frames to shards.
    pub fn decode(header: &Header) -> Option<FromAggregator> {
        let subject = Subject::decode(header);
        let (clock, attempt) = (header.clock, header.part);
        match (spoken_for(header), header.kind) {
            (Some(worker), Kind::Forget) => Some(FromAggregator::Forget(worker)),
            (Some(worker), _) => {
                // A worker behind an aggregator shares no memory with the shard.
                let frame = FromWorker::decode(&Header { landing: 0, ..*header })?;
                Some(FromAggregator::Relayed(worker, frame))
            }
            (None, Kind::Push) => Some(FromAggregator::Sum(Sum {
                subject,
                clock,
                chunk: header.chunk,
                attempt,
                gradients: header.rows,
                form: Form::decode(&Header { rows: 0, ..*header }),
                has_absent: header.flags.has(Flags::ABSENT),
            })),
            (None, Kind::Contributors) => Some(FromAggregator::Contributors { number: header.request }),
            (None, Kind::Group) => {
                let last = header.rows.checked_sub(1).map(WorkerId).filter(|worker| !worker.is_reader());
                Some(FromAggregator::Completed(Completed { subject, clock, attempt, last }))
            }
            (None, _) => None,
        }
    }

    /// The header of a frame with so long a payload.
    pub fn header(&self, payload_bytes: usize) -> Header {
        match self {
            FromAggregator::Relayed(worker, frame) => {
                Header { landing: speaker_bits(*worker), ..frame.header(payload_bytes) }
            }
            FromAggregator::Contributors { number } => {
                let payload_bytes = payload_bytes as u32;
                Header { request: *number, payload_bytes, ..Header::new(Kind::Contributors) }
            }
            FromAggregator::Sum(sum) => sum.header(payload_bytes),
            FromAggregator::Completed(completed) => completed.header(payload_bytes),
            FromAggregator::Forget(worker) => {
                Header { landing: speaker_bits(*worker), ..Header::new(Kind::Forget) }
            }
        }
    }
}

impl Piece {
    fn decode(header: &Header) -> Piece {
        let is_last = header.flags.has(Flags::LAST);
        Piece { chunk: header.chunk, sequence: header.part, is_last }
    }

    fn encode(self, header: &mut Header) {
        header.chunk = self.chunk;
        header.part = self.sequence;
        set(header, Flags::LAST, self.is_last);
    }
}

/// Whether a data frame may have elements of its type: other types than that of tables are for whole chunks of gradients
/// and parameters, which no codec made.
pub fn has_fitting_type(header: &Header) -> bool {
    let is_whole = !header.flags.has(Flags::ROWS) && !header.flags.has(Flags::ENCODED);
    header.dtype == DType::F32 || (is_whole && matches!(header.kind, Kind::Push | Kind::Params))
}

fn set(header: &mut Header, flag: Flags, is_set: bool) {
    if is_set {
        header.flags = header.flags.with(flag);
    }
}

fn place_bits(place: Option<Place>) -> u64 {
    place.map_or(0, Place::to_bits)
}

/// The worker that an aggregator speaks for. Its rank stands where workers name a place in shared memory, as a number
/// that is never one: places have a segment number in the upper bits.
fn spoken_for(header: &Header) -> Option<WorkerId> {
    let rank = header.landing.checked_sub(1)?;
    u32::try_from(rank).ok().filter(|&rank| rank < limits::MAX_WORKERS).map(WorkerId)
}

fn speaker_bits(worker: WorkerId) -> u64 {
    u64::from(worker.0) + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn subject() -> impl Strategy<Value = Subject> {
        (any::<u32>(), any::<u32>(), any::<u64>()).prop_map(|(epoch, table, request)| Subject {
            epoch,
            table: TableId(table),
            request,
        })
    }

    fn piece() -> impl Strategy<Value = Piece> {
        (any::<u32>(), any::<u32>(), any::<bool>()).prop_map(|(chunk, sequence, is_last)| Piece {
            chunk,
            sequence,
            is_last,
        })
    }

    fn form() -> impl Strategy<Value = Form> {
        prop_oneof![
            Just(Form::PLAIN),
            Just(Form::Dense(DType::F16)),
            Just(Form::Dense(DType::Bf16)),
            Just(Form::Encoded),
            any::<u32>().prop_map(|count| Form::Rows { count }),
            any::<u32>().prop_map(|count| Form::EncodedRows { count }),
        ]
    }

    fn place() -> impl Strategy<Value = Option<Place>> {
        prop::option::of(
            (1..=u16::MAX, 0..1u64 << 48).prop_map(|(segment, offset)| Place { segment, offset }),
        )
    }

    fn push() -> impl Strategy<Value = Push> {
        (subject(), (any::<u64>(), 1..=u32::MAX), piece(), form(), any::<(bool, bool)>(), place()).prop_map(
            |(subject, (clock, samples), piece, form, (absent, want_params), reply_place)| {
                let has_absent = absent && !form.is_rows();
                Push { subject, clock, samples, piece, form, has_absent, want_params, reply_place }
            },
        )
    }

    fn pull() -> impl Strategy<Value = Pull> {
        (subject(), any::<u64>(), prop::option::of(any::<u32>()), any::<bool>(), place()).prop_map(
            |(subject, clock, rows, now, reply_place)| Pull { subject, clock, rows, now, reply_place },
        )
    }

    fn delay() -> impl Strategy<Value = Option<Delay>> {
        let delay = |(rank, micros)| Delay { by: WorkerId(rank), time: Duration::from_micros(micros) };
        prop::option::of((0..limits::MAX_WORKERS, 0..1u64 << 48).prop_map(delay))
    }

    fn params() -> impl Strategy<Value = Params> {
        (subject(), any::<u64>(), delay(), piece(), form(), place()).prop_map(
            |(subject, version, delay, piece, form, reply_place)| Params {
                subject,
                delay,
                version,
                piece,
                form,
                reply_place,
            },
        )
    }

    fn update() -> impl Strategy<Value = Update> {
        (any::<[u32; 2]>(), any::<[u64; 3]>(), piece(), form(), delay()).prop_map(
            |([epoch, table], [round, version, digest], piece, form, delay)| Update {
                epoch,
                table: TableId(table),
                round,
                version,
                piece,
                form,
                digest,
                delay,
            },
        )
    }

    fn from_worker() -> impl Strategy<Value = FromWorker> {
        prop_oneof![
            (subject(), piece()).prop_map(|(subject, piece)| FromWorker::Init(Init { subject, piece })),
            push().prop_map(FromWorker::Push),
            pull().prop_map(FromWorker::Pull),
        ]
    }

    /// Without a place in shared memory, which only a worker's own connection can name.
    fn relayed(frame: FromWorker) -> FromWorker {
        match frame {
            FromWorker::Init(init) => FromWorker::Init(init),
            FromWorker::Push(push) => FromWorker::Push(Push { reply_place: None, ..push }),
            FromWorker::Pull(pull) => FromWorker::Pull(Pull { reply_place: None, ..pull }),
        }
    }

    fn from_aggregator() -> impl Strategy<Value = FromAggregator> {
        let worker = || (0..limits::MAX_WORKERS).prop_map(WorkerId);
        let sum = (subject(), any::<u64>(), any::<[u32; 3]>(), form(), any::<bool>()).prop_map(
            |(subject, clock, [chunk, attempt, gradients], form, has_absent)| {
                let form = match form {
                    Form::Rows { .. } => Form::Rows { count: 0 },
                    Form::EncodedRows { .. } => Form::EncodedRows { count: 0 },
                    dense => dense,
                };
                let has_absent = has_absent && !form.is_rows();
                FromAggregator::Sum(Sum { subject, clock, chunk, attempt, gradients, form, has_absent })
            },
        );
        let completed = (subject(), any::<u64>(), any::<u32>(), prop::option::of(worker())).prop_map(
            |(subject, clock, attempt, last)| {
                FromAggregator::Completed(Completed { subject, clock, attempt, last })
            },
        );
        prop_oneof![
            (worker(), from_worker())
                .prop_map(|(worker, frame)| FromAggregator::Relayed(worker, relayed(frame))),
            any::<u64>().prop_map(|number| FromAggregator::Contributors { number }),
            sum,
            completed,
            worker().prop_map(FromAggregator::Forget),
        ]
    }

    /// As it arrives: encoded to 64 bytes, and decoded from them.
    fn sent(header: Header) -> Header {
        Header::decode(&header.encode()).unwrap()
    }

    proptest! {
        #[test]
        fn workers_frames_survive_the_wire(frame in from_worker(), bytes in 0usize..1000) {
            let header = sent(frame.header(bytes));
            prop_assert_eq!(header.payload_bytes as usize, bytes);
            prop_assert_eq!(FromWorker::decode(&header), Some(frame));
        }

        #[test]
        fn versions_survive_the_wire(update in update(), bytes in 0usize..1000) {
            let header = sent(update.header(bytes));
            prop_assert_eq!(header.payload_bytes as usize, bytes);
            prop_assert_eq!(Update::decode(&header), update);
        }

        #[test]
        fn aggregators_frames_survive_the_wire(frame in from_aggregator()) {
            prop_assert_eq!(FromAggregator::decode(&sent(frame.header(0))), Some(frame));
        }

        #[test]
        fn answers_survive_the_wire(params in params()) {
            prop_assert_eq!(Params::decode(&sent(params.header(0))), params);
        }
    }

    #[test]
    fn other_kinds_are_no_data_frames() {
        for kind in [Kind::Hello, Kind::Control, Kind::Error, Kind::PushAck, Kind::Params, Kind::Share] {
            assert_eq!(FromWorker::decode(&Header::new(kind)), None, "{kind:?}");
            assert_eq!(FromAggregator::decode(&Header::new(kind)), None, "{kind:?}");
        }
    }

    #[test]
    fn only_whole_chunks_of_gradients_and_parameters_have_another_type() {
        let of = |kind, flags| Header { dtype: DType::F16, flags, ..Header::new(kind) };
        let plain = Flags::default();
        assert!(has_fitting_type(&of(Kind::Push, plain)) && has_fitting_type(&of(Kind::Params, plain)));
        for header in [
            of(Kind::Init, plain),
            of(Kind::Pull, plain),
            of(Kind::Push, Flags::ROWS),
            of(Kind::Params, Flags::ENCODED),
        ] {
            assert!(!has_fitting_type(&header), "{header:?}");
            assert!(has_fitting_type(&Header { dtype: DType::F32, ..header }));
        }
    }

    #[test]
    fn no_rank_beyond_the_limit_is_spoken_for() {
        let beyond =
            Header { landing: speaker_bits(WorkerId(limits::MAX_WORKERS)), ..Header::new(Kind::Forget) };
        assert_eq!(FromAggregator::decode(&beyond), None);
        // Nor is a place in shared memory a rank.
        let place = Place { segment: 1, offset: 0 };
        assert_eq!(spoken_for(&Header { landing: place.to_bits(), ..Header::new(Kind::Pull) }), None);
    }
}
