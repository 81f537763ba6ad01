//! The intake by itself, with a sink that writes down what it gets.

use super::*;
use crate::absence::Absent;
use crate::codec::{Content, Context, Encoder, Factors, LayerRange, TableGradient, Written, half};
use crate::hands::Alone;
use crate::registry::Registry;
use crate::table::{Chunk, TableSpec};
use crate::types::{ServerId, ShardId, TableId};
use crate::wire::DType;
use crate::wire::frame::{Form, Piece, Subject};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const CHUNKS: u32 = 3;
const LEN: usize = 2;

/// Which frame of which push, with which values.
type Added = (u32, Clock, usize, Vec<f32>);

#[derive(Debug)]
struct Recorder {
    layout: Layout,
    added: Vec<Added>,
    absent: Vec<Absent>,
    rows: Vec<u32>,
    complete: Vec<(u32, Clock, u64)>,
    repeated: Vec<(u32, Clock)>,
    /// The clock that a worker's pushes go to next.
    done: BTreeMap<WorkerId, Clock>,
    refuses: Option<Cause>,
    is_full: bool,
    steps: bool,
    asked_with: Option<u8>,
    destination: u8,
    chunk_len: usize,
}

impl Recorder {
    fn new(layout: Layout) -> Recorder {
        Recorder {
            layout,
            added: Vec::new(),
            absent: Vec::new(),
            rows: Vec::new(),
            complete: Vec::new(),
            repeated: Vec::new(),
            done: BTreeMap::new(),
            refuses: None,
            is_full: false,
            steps: false,
            asked_with: None,
            destination: 0,
            chunk_len: LEN,
        }
    }
}

impl Sink for Recorder {
    type Destination = u8;
    type Kept = usize;

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn admit(&mut self, frame: &PushFrame<'_>, so_far: Option<u8>) -> Result<Admission<u8>, Fault> {
        self.asked_with = so_far;
        if let Some(cause) = self.refuses {
            return Err(Fault { cause, message: String::new() });
        }
        let is_done = self.done.get(&frame.worker).is_some_and(|&done| frame.push.clock <= done);
        Ok(if is_done { Admission::Duplicate } else { Admission::Take(self.destination) })
    }

    fn add(
        &mut self,
        frame: &PushFrame<'_>,
        push: &mut Push<u8, usize>,
        gradient: GradientFrame<'_>,
    ) -> Result<bool, Fault> {
        if self.is_full {
            return Err(Fault { cause: Cause::TooFarAhead, message: String::new() });
        }
        assert_eq!((push.worker(), push.clock()), (frame.worker, frame.push.clock));
        assert_eq!((push.frames(), push.destination()), (frame.push.piece.sequence, self.destination));
        push.kept += 1;
        match gradient {
            GradientFrame::Dense { start, absent, .. } => {
                assert_eq!(start, gradient.index() * self.chunk_len);
                self.absent.push(absent.clone());
            }
            GradientFrame::Rows { rows, .. } => self.rows.extend_from_slice(rows),
        }
        let values = gradient.values().to_vec();
        self.added.push((frame.worker.0, frame.push.clock, gradient.index(), values));
        Ok(self.steps)
    }

    fn complete(&mut self, frame: &PushFrame<'_>, push: Push<u8, usize>) {
        assert!(frame.push.piece.is_last);
        let of_push = self.added.iter().filter(|added| (added.0, added.1) == (push.worker().0, push.clock()));
        assert!(push.kept <= of_push.count(), "what is kept stays with its push");
        self.complete.push((push.worker().0, push.clock(), push.request()));
        self.done.insert(frame.worker, frame.push.clock);
    }

    fn repeat(&mut self, frame: &PushFrame<'_>) {
        self.repeated.push((frame.worker.0, frame.push.clock));
    }
}

struct Bench {
    intake: Intake<u8, usize>,
    sink: Recorder,
    request: u64,
}

impl Bench {
    fn new(spec: TableSpec, codec: &str, nonfinite: NonFinite) -> Bench {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunks = (0..CHUNKS)
            .map(|number| (number, Chunk { shard, start: u64::from(number) * LEN as u64, len: LEN as u32 }));
        let codec = (codec != "none").then(|| Arc::new(chain(codec)));
        Bench {
            intake: Intake::new(codec, nonfinite),
            sink: Recorder::new(Layout::new(spec, chunks)),
            request: 1,
        }
    }

    fn dense() -> Bench {
        Bench::new(TableSpec::dense("w", [6]), "none", NonFinite::Reject)
    }

    fn sparse(codec: &str) -> Bench {
        Bench::new(TableSpec::sparse("w", 6, 1), codec, NonFinite::Reject)
    }

    fn take(&mut self, worker: u32, push: frame::Push, payload: &[u8]) -> Result<Taken, Cause> {
        let frame = PushFrame { now: Time::ZERO, worker: WorkerId(worker), push: &push, payload };
        let taken = self.intake.take(&frame, &mut self.sink);
        assert_eq!(self.intake.check(), Ok(()));
        taken.map_err(|fault| fault.cause)
    }

    /// One frame of a push, with both elements of its chunk equal.
    fn frame(&mut self, worker: u32, clock: Clock, sequence: u32, value: f32) -> Result<Taken, Cause> {
        let payload = Aligned::of(&[value; LEN]);
        self.take(worker, push(self.request, clock, sequence), payload.bytes())
    }

    fn frames(&mut self, worker: u32, clock: Clock, sequences: std::ops::Range<u32>) -> Result<Taken, Cause> {
        sequences.map(|sequence| self.frame(worker, clock, sequence, 1.0)).last().expect("some frames")
    }

    fn values(&self) -> Vec<f32> {
        self.sink.added.iter().map(|(.., values)| values[0]).collect()
    }
}

/// Bytes at an address that payloads have.
struct Aligned(Vec<f32>, usize);

/// Numbers of rows, and the bits of their values.
fn words(words: &[u32]) -> Aligned {
    Aligned::from_bytes(bytemuck::cast_slice(words))
}

impl Aligned {
    fn of(values: &[f32]) -> Aligned {
        Aligned(values.to_vec(), values.len() * 4)
    }

    fn from_bytes(bytes: &[u8]) -> Aligned {
        let mut words = vec![0.0f32; bytes.len().div_ceil(4)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Aligned(words, bytes.len())
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..self.1]
    }
}

fn chain(codec: &str) -> Codec {
    Codec::parse(&Registry::builtin().codec, codec).unwrap()
}

fn push(request: u64, clock: Clock, sequence: u32) -> frame::Push {
    frame::Push {
        subject: Subject { epoch: 1, table: TableId(0), request },
        clock,
        samples: 1,
        piece: Piece { chunk: sequence, sequence, is_last: sequence + 1 == CHUNKS },
        form: Form::PLAIN,
        has_absent: false,
        want_params: false,
        reply_place: None,
    }
}

fn encoded(codec: &str, values: &[f32]) -> Aligned {
    let mut payload = Vec::new();
    let mut encoder = Encoder::without_memory(Arc::new(chain(codec)));
    encoder.encode(0, values, &Context { layer_elements: 6, ..Context::default() }, &mut payload).unwrap();
    Aligned::from_bytes(&payload)
}

#[test]
fn every_frame_is_added_once_and_the_last_completes_the_push() {
    let mut bench = Bench::dense();
    assert_eq!(bench.frame(0, 0, 0, 1.0), Ok(Taken::Partly));
    bench.sink.steps = true;
    assert_eq!(bench.frame(0, 0, 1, 2.0), Ok(Taken::Stepped));
    assert!(bench.sink.complete.is_empty());
    assert_eq!(bench.frame(0, 0, 2, 3.0), Ok(Taken::Whole));
    let expected: Vec<Added> = (0..3).map(|index| (0, 0, index, vec![index as f32 + 1.0; LEN])).collect();
    assert_eq!((bench.sink.added, bench.sink.complete), (expected, vec![(0, 0, 1)]));
    assert_eq!(bench.intake.pushes().count(), 0);
}

#[test]
fn a_push_that_is_sent_again_goes_on_with_the_first_frame_that_was_not_taken() {
    let mut bench = Bench::dense();
    bench.frames(0, 0, 0..2).unwrap();
    bench.request = 2;
    assert_eq!([0, 1].map(|sequence| bench.frame(0, 0, sequence, 50.0)), [Ok(Taken::Ignored); 2]);
    assert_eq!(bench.intake.under_way(WorkerId(0)).unwrap().request(), 2, "refusals name the latest attempt");
    assert_eq!(bench.frame(0, 0, 2, 3.0), Ok(Taken::Whole));
    assert_eq!((bench.values(), &bench.sink.complete[..]), (vec![1.0, 1.0, 3.0], &[(0, 0, 2)][..]));
}

#[test]
fn a_duplicate_is_ignored_but_for_its_last_frame_which_is_answered_again() {
    let mut bench = Bench::dense();
    bench.frames(0, 0, 0..3).unwrap();
    assert_eq!(bench.frame(0, 0, 0, 7.0), Ok(Taken::Ignored));
    assert_eq!(bench.frame(0, 0, 1, 7.0), Ok(Taken::Ignored));
    assert!(bench.sink.repeated.is_empty());
    assert_eq!(bench.frame(0, 0, 2, 7.0), Ok(Taken::Whole));
    assert_eq!((bench.sink.added.len(), bench.sink.complete.len()), (3, 1));
    assert_eq!(bench.sink.repeated, [(0, 0)]);
}

#[test]
fn a_frame_before_its_turn_refuses_the_attempt_once() {
    let mut bench = Bench::dense();
    bench.frame(0, 0, 0, 1.0).unwrap();
    assert_eq!(bench.frame(0, 0, 2, 1.0), Err(Cause::Protocol));
    assert_eq!(bench.frame(0, 0, 1, 1.0), Ok(Taken::Ignored), "its turn, and its attempt was refused");
    assert_eq!(bench.frame(0, 0, 2, 1.0), Ok(Taken::Ignored));
    // Another attempt, and another word.
    assert_eq!(bench.frame(0, 0, 0, 1.0), Ok(Taken::Ignored), "taken before");
    assert_eq!(bench.frame(0, 0, 2, 1.0), Err(Cause::Protocol));
    assert_eq!(bench.frame(0, 0, 0, 1.0), Ok(Taken::Ignored));
    assert_eq!(bench.frames(0, 0, 1..3), Ok(Taken::Whole));
    assert_eq!(bench.sink.added.len(), 3);
    // A push that begins in its middle was refused with its first frame.
    assert_eq!(bench.frame(0, 1, 1, 1.0), Ok(Taken::Ignored));
    assert_eq!(bench.intake.pushes().count(), 0);
}

#[test]
fn what_the_sink_refuses_is_told_once_in_each_attempt() {
    let mut bench = Bench::dense();
    bench.sink.refuses = Some(Cause::TooFarAhead);
    let outcomes = [0, 1, 2, 0].map(|sequence| bench.frame(0, 0, sequence, 1.0));
    assert_eq!(
        outcomes,
        [Err(Cause::TooFarAhead), Ok(Taken::Ignored), Ok(Taken::Ignored), Err(Cause::TooFarAhead)]
    );
    bench.sink.refuses = None;
    bench.frame(0, 0, 0, 1.0).unwrap();
    bench.sink.refuses = Some(Cause::TooFarAhead);
    let outcomes = [1, 2].map(|sequence| bench.frame(0, 0, sequence, 1.0));
    assert_eq!(outcomes, [Err(Cause::TooFarAhead), Ok(Taken::Ignored)], "in the middle of a push");
    bench.sink.refuses = None;
    assert_eq!(bench.frame(0, 0, 1, 1.0), Ok(Taken::Ignored), "the attempt stays refused");
    assert_eq!(bench.frames(0, 0, 0..3), Ok(Taken::Whole));
    assert_eq!(bench.sink.added.len(), 3);
}

#[test]
fn what_the_sink_has_no_room_for_is_not_taken() {
    let mut bench = Bench::dense();
    bench.frame(0, 0, 0, 1.0).unwrap();
    bench.sink.is_full = true;
    assert_eq!(bench.frame(0, 1, 0, 1.0), Err(Cause::TooFarAhead));
    assert_eq!(bench.intake.under_way(WorkerId(0)).map(Push::clock), Some(0), "nothing else was begun");
    assert_eq!(bench.frame(0, 0, 1, 1.0), Err(Cause::TooFarAhead));
    bench.sink.is_full = false;
    assert_eq!(bench.frames(0, 0, 0..3), Ok(Taken::Whole));
    assert_eq!(bench.sink.added.len(), 3);
}

#[test]
fn a_frame_that_does_not_fit_changes_nothing() {
    let mut bench = Bench::dense();
    let good = || push(1, 0, 1);
    let values = Aligned::of(&[1.0; LEN]);
    for (what, spoiled) in [
        ("another chunk", frame::Push { piece: Piece { chunk: 2, ..good().piece }, ..good() }),
        ("no such chunk", frame::Push { piece: Piece { chunk: u32::MAX, ..good().piece }, ..good() }),
        ("the last", frame::Push { piece: Piece { is_last: true, ..good().piece }, ..good() }),
        ("rows", frame::Push { form: Form::Rows { count: 1 }, ..good() }),
        ("a codec's", frame::Push { form: Form::Encoded, ..good() }),
        ("absent ranges", frame::Push { has_absent: true, ..good() }),
    ] {
        _ = bench.frame(0, 0, 0, 1.0);
        assert_eq!(bench.take(0, spoiled, values.bytes()), Err(Cause::Shape), "{what}");
    }
    for elements in [0, 1, 3] {
        _ = bench.frame(0, 0, 0, 1.0);
        let payload = Aligned::of(&vec![1.0; elements]);
        assert_eq!(bench.take(0, good(), payload.bytes()), Err(Cause::Shape), "{elements} elements");
    }
    assert_eq!(bench.sink.added.len(), 1);
    assert_eq!(bench.frames(0, 0, 0..3), Ok(Taken::Whole));
}

#[test]
fn nan_is_refused_and_the_push_goes_on_once_it_is_corrected() {
    let mut bench = Bench::dense();
    bench.frame(0, 0, 0, 1.0).unwrap();
    assert_eq!(bench.frame(0, 0, 1, f32::NAN), Err(Cause::NonFinite));
    assert_eq!(bench.frame(0, 0, 2, f32::NAN), Ok(Taken::Ignored));
    assert_eq!((bench.intake.nonfinite(), bench.sink.added.len()), (1, 1));
    assert_eq!(bench.frames(0, 0, 0..3), Ok(Taken::Whole));
    assert_eq!((bench.intake.nonfinite(), bench.sink.added.len()), (1, 3));
}

#[test]
fn nan_is_clipped_when_told_to() {
    let mut bench = Bench::new(TableSpec::dense("w", [6]), "none", NonFinite::Clip);
    let payload = Aligned::of(&[f32::NEG_INFINITY, 5.0]);
    assert_eq!(bench.take(0, push(1, 0, 0), payload.bytes()), Ok(Taken::Partly));
    assert_eq!(bench.frame(0, 0, 1, f32::NAN), Ok(Taken::Partly));
    assert_eq!((&bench.sink.added[0].3[..], &bench.sink.added[1].3[..]), (&[-5.0, 5.0][..], &[0.0; 2][..]));
    bench.intake.set_nonfinite(NonFinite::Reject);
    assert_eq!(bench.frame(0, 0, 2, f32::NAN), Err(Cause::NonFinite));
    assert_eq!(bench.intake.nonfinite(), 3);
}

#[test]
fn a_push_that_was_given_up_for_a_later_one_does_not_come_back() {
    let mut bench = Bench::dense();
    bench.frames(0, 0, 0..2).unwrap();
    bench.frames(0, 1, 0..1).unwrap();
    assert_eq!(bench.frame(0, 0, 0, 1.0), Err(Cause::Protocol));
    assert_eq!(bench.frame(0, 0, 2, 1.0), Ok(Taken::Ignored));
    assert_eq!(bench.frames(0, 1, 1..3), Ok(Taken::Whole));
    assert_eq!(bench.sink.complete, [(0, 1, 1)]);
}

#[test]
fn the_destination_of_a_push_is_asked_for_with_every_frame() {
    let mut bench = Bench::dense();
    bench.sink.destination = 1;
    bench.frame(0, 0, 0, 1.0).unwrap();
    assert_eq!(bench.sink.asked_with, None);
    bench.sink.destination = 2;
    bench.frame(0, 0, 1, 1.0).unwrap();
    assert_eq!(bench.sink.asked_with, Some(1));
    bench.intake.pushes_mut().for_each(|push| push.set_destination(9));
    bench.frame(0, 0, 2, 1.0).unwrap();
    assert_eq!(bench.sink.asked_with, Some(9));
}

#[test]
fn what_a_worker_is_at_is_forgotten_by_its_clock() {
    let mut bench = Bench::dense();
    bench.frame(0, 3, 0, 1.0).unwrap();
    bench.frame(1, 3, 0, 1.0).unwrap();
    bench.frame(2, 3, 0, 1.0).unwrap();
    bench.intake.forget(WorkerId(0), 2);
    assert!(bench.intake.under_way(WorkerId(0)).is_some());
    bench.intake.forget(WorkerId(0), 3);
    assert_eq!(bench.intake.remove_worker(WorkerId(1)), Some(3));
    let left: Vec<WorkerId> = bench.intake.pushes().map(Push::worker).collect();
    assert_eq!((left, bench.intake.check()), (vec![WorkerId(2)], Ok(())));
    assert_eq!(bench.frames(0, 3, 0..3), Ok(Taken::Whole), "from its beginning");
}

#[test]
fn absent_ranges_are_zeros_whatever_a_codec_makes_of_them() {
    for codec in ["none", "int8"] {
        let mut bench = Bench::new(TableSpec::dense("w", [6]), codec, NonFinite::Reject);
        let (absent, values) = (Absent::in_chunk(std::slice::from_ref(&(0..1)), 0..LEN), [8.0, 8.0]);
        let form = if codec == "none" { Form::PLAIN } else { Form::Encoded };
        let gradient = if codec == "none" { Aligned::of(&values) } else { encoded(codec, &values) };
        let payload = Aligned::from_bytes(&absent.payload(LEN, gradient.bytes()));
        let first = frame::Push { form, has_absent: true, ..push(1, 0, 0) };
        assert_eq!(bench.take(0, first, payload.bytes()), Ok(Taken::Partly), "{codec}");
        assert_eq!(
            (&bench.sink.added[0].3[..], &bench.sink.absent[0]),
            (&[0.0, 8.0][..], &absent),
            "{codec}"
        );
        // A chunk of which everything is absent has no values.
        let all = Absent::in_chunk(std::slice::from_ref(&(0..LEN)), 0..LEN);
        let second = frame::Push { form, has_absent: true, ..push(1, 0, 1) };
        let payload = Aligned::from_bytes(&all.payload(LEN, &[]));
        assert_eq!(bench.take(0, second, payload.bytes()), Ok(Taken::Partly), "{codec}");
        assert_eq!((&bench.sink.added[1].3[..], &bench.sink.absent[1]), (&[0.0; 2][..], &all), "{codec}");
        assert_eq!(bench.frame(0, 0, 2, 1.0), Ok(Taken::Whole));
        assert!(bench.sink.absent[2].is_empty());
    }
}

#[test]
fn plain_frames_are_taken_under_every_codec_and_encoded_ones_under_their_own() {
    let mut bench = Bench::new(TableSpec::dense("w", [6]), "f16", NonFinite::Reject);
    let by = |codec| (frame::Push { form: Form::Encoded, ..push(1, 0, 0) }, encoded(codec, &[0.5, 2.0]));
    let (header, payload) = by("int8");
    assert_eq!(bench.take(0, header, payload.bytes()), Err(Cause::Shape));
    bench.intake.set_codec(Some(Arc::new(chain("int8"))), 1);
    assert_eq!(bench.take(0, header, payload.bytes()), Ok(Taken::Partly));
    assert_eq!(bench.frame(0, 0, 1, 3.0), Ok(Taken::Partly));
    bench.intake.set_codec(None, 1);
    assert_eq!(bench.frame(0, 0, 2, 3.0), Ok(Taken::Whole));
    assert_eq!(bench.sink.added.len(), 3);
}

fn halves(dtype: DType, values: &[f32]) -> Aligned {
    let mut bytes = vec![0; 2 * values.len()];
    assert!(half::write(dtype, values, &mut bytes));
    Aligned::from_bytes(&bytes)
}

#[test]
fn elements_of_any_type_are_added_from_where_they_lie() {
    for dtype in [DType::F16, DType::Bf16] {
        // Whatever the codec is: they are plain values.
        for codec in ["none", "f16", "topk:0.1"] {
            let mut bench = Bench::new(TableSpec::dense("w", [6]), codec, NonFinite::Reject);
            let first = frame::Push { form: Form::Dense(dtype), ..push(1, 0, 0) };
            let payload = halves(dtype, &[0.5, -2.0]);
            assert_eq!(bench.take(0, first, payload.bytes()), Ok(Taken::Partly), "{dtype:?}");
            let (absent, values) =
                (Absent::in_chunk(std::slice::from_ref(&(0..1)), 0..LEN), halves(dtype, &[8.0, 4.0]));
            let payload = Aligned::from_bytes(&absent.payload(LEN, values.bytes()));
            let second = frame::Push { form: Form::Dense(dtype), has_absent: true, ..push(1, 0, 1) };
            assert_eq!(bench.take(0, second, payload.bytes()), Ok(Taken::Partly), "{dtype:?}");
            assert_eq!(bench.frame(0, 0, 2, 3.0), Ok(Taken::Whole));
            let added: Vec<&[f32]> = bench.sink.added.iter().map(|(.., values)| &values[..]).collect();
            assert_eq!(added, [&[0.5, -2.0][..], &[0.0, 4.0], &[3.0, 3.0]], "{dtype:?}");
        }
    }
}

#[test]
fn elements_are_screened_whatever_their_type() {
    // The infinity and a NaN of each type.
    for (dtype, bits) in [(DType::F16, [0x7c00u16, 0x7e01]), (DType::Bf16, [0x7f80, 0x7fc1])] {
        let header = frame::Push { form: Form::Dense(dtype), ..push(1, 0, 0) };
        let payload = |bits: u16| {
            let mut bytes = halves(dtype, &[2.0, 2.0]).bytes().to_vec();
            bytes[2..].copy_from_slice(&bits.to_le_bytes());
            Aligned::from_bytes(&bytes)
        };
        for (bits, clipped) in bits.into_iter().zip([2.0, 0.0]) {
            let mut bench = Bench::new(TableSpec::dense("w", [6]), "none", NonFinite::Reject);
            assert_eq!(bench.take(0, header, payload(bits).bytes()), Err(Cause::NonFinite), "{dtype:?}");
            bench.intake.set_nonfinite(NonFinite::Clip);
            assert_eq!(bench.take(0, header, payload(bits).bytes()), Ok(Taken::Partly), "{dtype:?}");
            assert_eq!(bench.sink.added[0].3, [2.0, clipped], "{dtype:?}");
        }
        // Four bytes would be a chunk of them, and eight one of f32.
        let mut bench = Bench::new(TableSpec::dense("w", [6]), "none", NonFinite::Reject);
        for bytes in [0, 2, 3, 8] {
            assert_eq!(bench.take(0, header, &Aligned::of(&[0.0; 4]).bytes()[..bytes]), Err(Cause::Shape));
        }
    }
}

/// A gradient of a table of 3 x 20 elements, as two factors: each of the chunks' payloads, and those that come before.
struct Product {
    bytes: Vec<u8>,
    factors: Vec<std::ops::Range<usize>>,
    chunks: Vec<std::ops::Range<usize>>,
    values: Vec<f32>,
}

impl Product {
    const ELEMENTS: usize = 60;

    fn new(scale: f32) -> Product {
        let (u, v): (Vec<f32>, Vec<f32>) = (vec![scale, 2.0, -1.0], (0..20).map(|at| at as f32).collect());
        let values: Vec<f32> = (0..Product::ELEMENTS).map(|at| u[at / 20] * v[at % 20]).collect();
        let layers = LayerRange::of_table(&TableSpec::dense("w", [3, 20]));
        let chunks: Vec<_> = (0..CHUNKS as usize).map(|chunk| 20 * chunk..20 * (chunk + 1)).collect();
        let gradient = TableGradient {
            values: &values,
            clips_non_finite: false,
            absent: &[],
            layers: &layers,
            chunks: &chunks,
            factors: Some(Factors { rank: 1, u: &u, v: &v }),
            step: 0,
            seed: 0,
        };
        let (mut encoder, mut bytes) = (Encoder::new(Arc::new(chain("factors")), 60), Written::default());
        let (factors, chunks) =
            encoder.encode_table(&gradient, |_| Context::default(), &Alone, &mut bytes).unwrap();
        let factors = factors.into_iter().flat_map(|layer| layer.payloads).collect();
        Product { bytes: bytes.to_vec(), factors, chunks, values }
    }

    fn bench() -> Bench {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunks =
            (0..CHUNKS).map(|number| (number, Chunk { shard, start: u64::from(number) * 20, len: 20 }));
        let mut sink = Recorder::new(Layout::new(TableSpec::dense("w", [3, 20]), chunks));
        sink.chunk_len = 20;
        Bench { intake: Intake::new(Some(Arc::new(chain("factors"))), NonFinite::Reject), sink, request: 1 }
    }

    fn send_factors(&self, bench: &mut Bench, worker: u32, clock: Clock) -> Result<Taken, Cause> {
        let mut taken = Ok(Taken::Ignored);
        for range in &self.factors {
            let push = frame::Push { form: Form::Encoded, ..push(bench.request, clock, 0) };
            taken = bench.take(worker, push, Aligned::from_bytes(&self.bytes[range.clone()]).bytes());
        }
        taken
    }

    fn send(&self, bench: &mut Bench, worker: u32, clock: Clock, chunk: u32) -> Result<Taken, Cause> {
        let push = frame::Push { form: Form::Encoded, ..push(bench.request, clock, chunk) };
        let payload = &self.bytes[self.chunks[chunk as usize].clone()];
        bench.take(worker, push, Aligned::from_bytes(payload).bytes())
    }
}

#[test]
fn factors_come_before_their_chunks_and_stay_until_the_push_is_complete() {
    let (product, mut bench) = (Product::new(1.0), Product::bench());
    assert!(!product.factors.is_empty());
    assert_eq!(product.send(&mut bench, 0, 0, 0), Err(Cause::Shape), "a chunk of a product without factors");
    assert_eq!(product.send_factors(&mut bench, 0, 0), Ok(Taken::Ignored));
    assert!(bench.sink.added.is_empty() && bench.intake.has_factors(WorkerId(0), 0));
    assert_eq!(product.send(&mut bench, 0, 0, 0), Ok(Taken::Partly));
    assert_eq!(product.send(&mut bench, 1, 0, 0), Err(Cause::Shape), "the factors of another worker");
    // The connection breaks, and the push is sent again from its beginning.
    bench.request += 1;
    assert_eq!(product.send_factors(&mut bench, 0, 0), Ok(Taken::Ignored));
    assert_eq!(product.send(&mut bench, 0, 0, 0), Ok(Taken::Ignored));
    assert_eq!(product.send(&mut bench, 0, 0, 1), Ok(Taken::Partly));
    assert_eq!(product.send(&mut bench, 0, 0, 2), Ok(Taken::Whole));
    let added: Vec<f32> = bench.sink.added.iter().flat_map(|(.., values)| values.clone()).collect();
    assert_eq!(added, product.values);
    assert!(!bench.intake.has_factors(WorkerId(0), 0), "they are of no use any more");
    // The worker did not hear of it.
    assert_eq!(product.send_factors(&mut bench, 0, 0), Ok(Taken::Ignored));
    assert_eq!(product.send(&mut bench, 0, 0, 2), Ok(Taken::Whole));
    assert!(!bench.intake.has_factors(WorkerId(0), 0));
}

#[test]
fn factors_are_of_one_push_and_of_one_codec() {
    let (product, mut bench) = (Product::new(1.0), Product::bench());
    product.send_factors(&mut bench, 0, 0).unwrap();
    assert_eq!(product.send(&mut bench, 0, 1, 0), Err(Cause::Shape), "of another clock");
    product.send_factors(&mut bench, 0, 1).unwrap();
    assert!(!bench.intake.has_factors(WorkerId(0), 0) && bench.intake.has_factors(WorkerId(0), 1));
    bench.intake.forget(WorkerId(0), 1);
    assert!(!bench.intake.has_factors(WorkerId(0), 1), "forgotten with its push");
    product.send_factors(&mut bench, 0, 1).unwrap();
    bench.intake.remove_worker(WorkerId(0));
    assert!(!bench.intake.has_factors(WorkerId(0), 1), "gone with its worker");
    product.send_factors(&mut bench, 0, 1).unwrap();
    bench.intake.set_codec(Some(Arc::new(chain("int8"))), 1);
    assert!(!bench.intake.has_factors(WorkerId(0), 1), "another codec does not make such");
    assert_eq!(product.send_factors(&mut bench, 0, 1), Err(Cause::Shape));
    // Of a chunk that has absent ranges too.
    let mut bench = Product::bench();
    product.send_factors(&mut bench, 0, 0).unwrap();
    let absent = Absent::in_chunk(std::slice::from_ref(&(0..5)), 0..20);
    let payload = absent.payload(20, &product.bytes[product.chunks[0].clone()]);
    let push = frame::Push { form: Form::Encoded, has_absent: true, ..push(1, 0, 0) };
    assert_eq!(bench.take(0, push, Aligned::from_bytes(&payload).bytes()), Ok(Taken::Partly));
    assert_eq!(bench.sink.added[0].3, [&[0.0; 5], &product.values[5..20]].concat());
}

#[test]
fn factors_that_are_out_of_order_are_refused() {
    let (product, mut bench) = (Product::new(1.0), Product::bench());
    let payload = product.bytes[product.factors[0].clone()].to_vec();
    // The number of the piece is the last field before the values.
    for (at, value) in [(20, 1), (8, 1), (12, 0), (12, 9), (16, 0), (16, 61)] {
        let mut bad = payload.clone();
        bad[at] = value;
        let push = frame::Push { form: Form::Encoded, ..push(1, 0, 0) };
        assert_eq!(
            bench.take(0, push, Aligned::from_bytes(&bad).bytes()),
            Err(Cause::Shape),
            "{at}: {value}"
        );
    }
    assert_eq!(product.send_factors(&mut bench, 0, 0), Ok(Taken::Ignored), "the next attempt");
    assert_eq!(product.send(&mut bench, 0, 0, 0), Ok(Taken::Partly));
}

fn rows(sequence: u32, chunk: u32, form: Form, is_last: bool) -> frame::Push {
    frame::Push { piece: Piece { chunk, sequence, is_last }, form, ..push(1, 0, 0) }
}

#[test]
fn rows_come_in_the_order_of_their_chunks() {
    let mut bench = Bench::sparse("none");
    let one = Aligned::of(&[f32::from_bits(1), 4.0]);
    let form = Form::Rows { count: 1 };
    assert_eq!(bench.take(0, rows(0, 1, form, false), one.bytes()), Ok(Taken::Partly));
    assert_eq!(bench.take(0, rows(1, 1, form, true), one.bytes()), Err(Cause::Shape), "the same chunk");
    assert_eq!(bench.take(0, rows(0, 1, form, false), one.bytes()), Ok(Taken::Ignored));
    assert_eq!(bench.take(0, rows(1, 2, form, true), one.bytes()), Ok(Taken::Whole));
    assert_eq!(bench.sink.rows, [1, 1]);
    assert_eq!(bench.sink.added, [(0, 0, 1, vec![4.0]), (0, 0, 2, vec![4.0])]);
}

#[test]
fn rows_that_cannot_be_are_refused() {
    let mut bench = Bench::sparse("none");
    for (what, count, payload) in [
        ("none", 0, words(&[])),
        ("more than there are", 2, words(&[0, 0])),
        ("out of order", 2, words(&[1, 0, 0, 0])),
        ("twice", 2, words(&[1, 1, 0, 0])),
        ("beyond the chunk", 1, words(&[2, 0])),
        ("very many", u32::MAX, words(&[0, 0])),
    ] {
        let push = rows(0, 0, Form::Rows { count }, false);
        assert_eq!(bench.take(0, push, payload.bytes()), Err(Cause::Shape), "{what}");
    }
    let absent = frame::Push { has_absent: true, ..rows(0, 0, Form::Rows { count: 1 }, false) };
    assert_eq!(bench.take(0, absent, words(&[0, 0]).bytes()), Err(Cause::Shape));
    assert!(bench.sink.added.is_empty());
}

#[test]
fn a_sparse_push_of_nothing_counts() {
    let mut bench = Bench::sparse("none");
    assert_eq!(bench.take(0, rows(0, 0, Form::Rows { count: 0 }, true), &[]), Ok(Taken::Whole));
    assert!(bench.sink.added.is_empty());
    assert_eq!(bench.sink.done.get(&WorkerId(0)), Some(&0));
}

#[test]
fn rows_that_a_codec_left_nothing_of_are_not_pushed() {
    let mut bench = Bench::sparse("int8");
    let form = Form::EncodedRows { count: 0 };
    let payload = encoded("int8", &[0.0, 4.0]);
    assert_eq!(bench.take(0, rows(0, 0, form, false), payload.bytes()), Ok(Taken::Partly));
    let payload = encoded("int8", &[0.0, 0.0]);
    assert_eq!(bench.take(0, rows(1, 2, form, true), payload.bytes()), Ok(Taken::Whole));
    assert_eq!(bench.sink.rows, [1, 0], "a push of nothing is one of a row of zeros");
    assert_eq!(bench.sink.added, [(0, 0, 0, vec![4.0]), (0, 0, 2, vec![0.0])]);
}

#[test]
fn sums_are_read_by_the_same_rules() {
    let mut bench = Bench::dense();
    let sum = |chunk| frame::Sum {
        subject: Subject { epoch: 1, table: TableId(0), request: 1 },
        clock: 0,
        chunk,
        attempt: 0,
        gradients: 2,
        form: Form::PLAIN,
        has_absent: false,
    };
    let mut read = |chunk, values: &[f32]| {
        let payload = Aligned::of(values);
        let read = bench.intake.read_sum(&bench.sink.layout, AggregatorId(0), &sum(chunk), payload.bytes());
        let read = read.map_err(|fault| fault.cause)?;
        let GradientFrame::Dense { index, start, values, .. } = read else { panic!("{read:?}") };
        Ok((index, start, values.to_vec()))
    };
    assert_eq!(read(2, &[1.0, 2.0]), Ok((2, 4, vec![1.0, 2.0])));
    assert_eq!(read(3, &[1.0, 2.0]), Err(Cause::Shape));
    assert_eq!(read(2, &[1.0]), Err(Cause::Shape));
    assert_eq!(read(2, &[1.0, f32::NAN]), Err(Cause::NonFinite));
    bench.intake.set_nonfinite(NonFinite::Clip);
    let payload = Aligned::of(&[1.0, f32::INFINITY]);
    let read = bench.intake.read_sum(&bench.sink.layout, AggregatorId(0), &sum(0), payload.bytes()).unwrap();
    assert_eq!(read.values().to_vec(), [1.0, 1.0]);
}

#[test]
fn a_sum_of_rows_says_by_its_length_how_many_it_has() {
    let mut bench = Bench::sparse("int8");
    let mut read = |form, has_absent, payload: &Aligned| {
        let subject = Subject { epoch: 1, table: TableId(0), request: 1 };
        let sum = frame::Sum { subject, clock: 0, chunk: 1, attempt: 0, gradients: 2, form, has_absent };
        let read = bench.intake.read_sum(&bench.sink.layout, AggregatorId(0), &sum, payload.bytes());
        let read = read.map_err(|fault| fault.cause)?;
        let GradientFrame::Rows { index, rows, values, .. } = read else { panic!("{read:?}") };
        Ok((index, rows.to_vec(), Content::from(values).to_vec()))
    };
    let (rows, [one, nan]) = (Form::Rows { count: 0 }, [1.0, f32::NAN].map(f32::to_bits));
    assert_eq!(read(rows, false, &words(&[0, 1, one, one])), Ok((1, vec![0, 1], vec![1.0, 1.0])));
    assert_eq!(read(rows, false, &words(&[1, one])), Ok((1, vec![1], vec![1.0])));
    assert_eq!(read(rows, false, &words(&[1, 0, one, one])), Err(Cause::Shape), "out of order");
    assert_eq!(read(rows, false, &words(&[0, 1, one])), Err(Cause::Shape), "half a row");
    assert_eq!(read(rows, false, &words(&[])), Err(Cause::Shape), "no rows");
    assert_eq!(read(rows, true, &words(&[1, one])), Err(Cause::Shape), "absent ranges");
    assert_eq!(read(rows, false, &words(&[1, nan])), Err(Cause::NonFinite));
    assert_eq!(read(Form::PLAIN, false, &words(&[one, one])), Err(Cause::Shape), "a whole chunk");
    let encoded = encoded("int8", &[0.0, 4.0]);
    assert_eq!(read(Form::EncodedRows { count: 0 }, false, &encoded), Ok((1, vec![1], vec![4.0])));
}

proptest! {
    /// Workers send frames in any order, with breaks and repetitions. Every push that completes was added frame by frame,
    /// once and in order, and no attempt is refused twice.
    #[test]
    fn every_complete_push_was_added_once(
        acts in prop::collection::vec((0u32..3, 0u64..3, 0u32..CHUNKS, prop::bool::weighted(0.1)), 1..200),
    ) {
        let mut bench = Bench::dense();
        let mut refused = BTreeSet::new();
        for (worker, clock, sequence, is_nan) in acts {
            if sequence == 0 {
                refused.remove(&(worker, clock));
            }
            let value = if is_nan { f32::NAN } else { 1.0 };
            if bench.frame(worker, clock, sequence, value).is_err() {
                prop_assert!(refused.insert((worker, clock)) || sequence == 0);
            }
        }
        for &(worker, clock, _) in &bench.sink.complete {
            let frames = bench.sink.added.iter().filter(|(of, at, ..)| (*of, *at) == (worker, clock));
            let indices: Vec<usize> = frames.map(|(_, _, index, _)| *index).collect();
            // A push that was given up in its middle may have left frames before.
            prop_assert!(indices.ends_with(&[0, 1, 2]) || indices == [0, 1, 2], "{indices:?}");
        }
    }
}
