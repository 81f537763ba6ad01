//! What becomes of gradients, frame by frame.

mod encoded;

use super::*;
use crate::limits;
use crate::policy::{Axis, Order};
use crate::types::{ServerId, ShardId, TableId};
use crate::wire::frame::{self, Form, FromWorker};
use crate::wire::{Cause, Flags, Header, Kind};
use proptest::prelude::*;

/// A table shard of three chunks of two elements (or of two rows of one), all zero.
struct Bench {
    accumulators: Accumulators,
    table: TableShard,
}

const CHUNKS: u32 = 3;
const ELEMENTS: usize = 6;

fn policy(sync: &str) -> Policy {
    Policy::default().with(Axis::Sync, sync).with(Axis::Optimizer, "sgd:lr=1")
}

fn ranked(sync: &str) -> Policy {
    policy(sync).with(Axis::Order, "ranked")
}

fn sum(sync: &str) -> Policy {
    policy(sync).with(Axis::Reduce, "sum")
}

impl Bench {
    fn new(policy: Policy, workers: u32) -> Bench {
        Bench::with_values(policy, workers, 0.0)
    }

    /// With this initial value of all elements.
    fn with_values(policy: Policy, workers: u32, value: f32) -> Bench {
        Bench::of(TableSpec::dense("w", [ELEMENTS as u64]), policy, workers, value)
    }

    fn sparse(policy: Policy, workers: u32) -> Bench {
        Bench::of(TableSpec::sparse("w", ELEMENTS as u64, 1), policy, workers, 0.0)
    }

    fn of(spec: TableSpec, policy: Policy, workers: u32, value: f32) -> Bench {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunks =
            (0..CHUNKS).map(|number| (number, Chunk { shard, start: u64::from(number) * 2, len: 2 }));
        let workers = (0..workers).map(WorkerId);
        let table = TableShard::new(&Registry::builtin(), spec, policy, chunks, workers, 1).unwrap();
        let mut bench = Bench { table, accumulators: Accumulators::default() };
        for number in 0..CHUNKS {
            bench.table.initialise(piece(number), bytemuck::cast_slice(&[value; 2])).unwrap();
        }
        bench
    }

    /// One frame of a dense push, with both elements of its chunk equal.
    fn frame(&mut self, worker: u32, clock: Clock, part: u32, value: f32) -> Result<Taken, Cause> {
        self.take(worker, &header(clock, part), bytemuck::cast_slice(&[value; 2]))
    }

    fn take(&mut self, worker: u32, header: &Header, payload: &[u8]) -> Result<Taken, Cause> {
        let taken = push_frame(&mut self.table, worker, header, payload, &mut self.accumulators);
        self.settle();
        taken.map_err(|fault| fault.cause)
    }

    /// Frames `parts` of a dense push; what became of the last.
    fn frames(
        &mut self,
        worker: u32,
        clock: Clock,
        parts: std::ops::Range<u32>,
        value: f32,
    ) -> Result<Taken, Cause> {
        parts.map(|part| self.frame(worker, clock, part, value)).last().expect("some frames")
    }

    /// A whole dense push.
    fn push(&mut self, worker: u32, clock: Clock, value: f32) -> Result<Taken, Cause> {
        self.frames(worker, clock, 0..CHUNKS, value)
    }

    /// A whole sparse push of single rows of one element.
    fn push_rows(&mut self, worker: u32, clock: Clock, rows: &[(u32, f32)]) -> Result<Taken, Cause> {
        let mut frames: Vec<(u32, Vec<u32>)> = Vec::new();
        for chunk in 0..CHUNKS {
            let here = || rows.iter().filter(|(row, _)| row / 2 == chunk);
            let numbers = here().map(|(row, _)| row % 2);
            let words: Vec<u32> = numbers.chain(here().map(|(_, value)| value.to_bits())).collect();
            if !words.is_empty() {
                frames.push((chunk, words));
            }
        }
        let mut taken = Ok(Taken::Partly);
        for (part, (chunk, words)) in (0..).zip(&frames) {
            let mut header = header(clock, part);
            header.chunk = *chunk;
            header.rows = words.len() as u32 / 2;
            header.flags = if part as usize + 1 == frames.len() { Flags::LAST } else { Flags(0) };
            header.flags = header.flags.with(Flags::ROWS);
            taken = self.take(worker, &header, bytemuck::cast_slice(words));
        }
        taken
    }

    fn set(&mut self, sync: &str) {
        let sync = SyncPolicy::parse(&Registry::builtin().consistency, sync).unwrap();
        self.table.set_sync(Time::ZERO, sync, &mut self.accumulators);
        self.settle();
    }

    fn settle(&mut self) {
        while self.table.advance(Time::ZERO, &mut self.accumulators).is_some() {}
    }

    fn values(&self) -> &[f32] {
        self.table.store.parameters()
    }

    /// The first element of every chunk.
    fn chunks(&self) -> [f32; CHUNKS as usize] {
        [0, 2, 4].map(|element| self.values()[element])
    }

    fn version(&self) -> Clock {
        self.table.controller.state().v_train()
    }
}

fn push_frame(
    part: &mut TableShard,
    worker: u32,
    header: &Header,
    payload: &[u8],
    accumulators: &mut Accumulators,
) -> Result<Taken, Fault> {
    let Some(FromWorker::Push(push)) = FromWorker::decode(header) else { panic!("{header:?}") };
    part.push(&PushFrame { now: Time::ZERO, worker: WorkerId(worker), push: &push, payload }, accumulators)
}

fn piece(sequence: u32) -> Piece {
    Piece { chunk: sequence, sequence, is_last: sequence == CHUNKS - 1 }
}

fn header(clock: Clock, part: u32) -> Header {
    let mut header = Header::new(Kind::Push);
    header.clock = clock;
    header.part = part;
    header.chunk = part;
    header.flags = if part == CHUNKS - 1 { Flags::LAST } else { Flags(0) };
    header
}

#[test]
fn ranked_sums_do_not_depend_on_who_comes_first_and_arrival_sums_do() {
    // 1e8 + 1 is 1e8 in f32: the order of additions shows.
    let values = [1e8, 1.0, -1e8];
    let result = |policy: Policy, order: [u32; 3]| {
        let mut bench = Bench::new(policy.with(Axis::Reduce, "sum"), 3);
        for worker in order {
            assert_eq!(bench.push(worker, 0, values[worker as usize]), Ok(Taken::Whole));
        }
        bench.values()[0]
    };
    assert_eq!(result(policy("bsp"), [0, 1, 2]), 0.0);
    assert_eq!(result(policy("bsp"), [0, 2, 1]), -1.0);
    for order in [[0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 0, 2]] {
        assert_eq!(result(ranked("bsp"), order), 0.0, "{order:?}");
    }
}

#[test]
fn a_worker_that_dies_in_the_middle_of_a_push_counts_in_the_chunks_that_have_its_gradient() {
    let run = |policy| {
        let mut bench = Bench::new(policy, 3);
        bench.push(0, 0, 3.0).unwrap();
        bench.frames(2, 0, 0..1, 9.0).unwrap();
        bench.push(1, 0, 6.0).unwrap();
        assert_eq!(bench.version(), 0);
        bench.table.remove_worker(WorkerId(2));
        bench.settle();
        assert_eq!(bench.version(), 1);
        bench.chunks()
    };
    assert_eq!(run(policy("bsp")), [-6.0, -4.5, -4.5], "means over three, two and two");
    assert_eq!(run(ranked("bsp")), [-4.5; 3], "a ranked sum has whole gradients only");
}

#[test]
fn a_push_with_nan_goes_on_where_it_was_refused_once_it_is_corrected() {
    for policy in [policy("bsp"), ranked("bsp"), policy("asp"), ranked("asp")] {
        let what = format!("{policy:?}");
        let mut bench = Bench::new(policy, 1);
        assert!(matches!(bench.frame(0, 0, 0, 1.0), Ok(Taken::Partly | Taken::Stepped)));
        assert_eq!(bench.frame(0, 0, 1, f32::NAN), Err(Cause::NonFinite));
        assert_eq!(bench.frame(0, 0, 2, 1.0), Ok(Taken::Ignored), "the rest of the attempt is passed over");
        assert_eq!((bench.table.nonfinite(), bench.version()), (1, 0), "{what}");
        // The first chunk was taken, and is not taken again.
        assert_eq!(bench.frame(0, 0, 0, 50.0), Ok(Taken::Ignored));
        assert!(matches!(bench.frame(0, 0, 1, 2.0), Ok(Taken::Partly | Taken::Stepped)));
        assert_eq!(bench.frame(0, 0, 2, 3.0), Ok(Taken::Whole));
        assert_eq!((bench.chunks(), bench.version()), ([-1.0, -2.0, -3.0], 1), "{what}");
        assert_eq!(bench.push(0, 0, 7.0), Ok(Taken::Whole), "sent again, acknowledged again");
        assert_eq!(bench.chunks(), [-1.0, -2.0, -3.0], "{what}");
    }
}

#[test]
fn nan_is_clipped_where_it_stands_when_told_to() {
    let mut bench = Bench::new(policy("bsp").with(Axis::NonFinite, "clip"), 1);
    bench.frame(0, 0, 0, 1.0).unwrap();
    let middle = header(0, 1);
    assert_eq!(bench.take(0, &middle, bytemuck::cast_slice(&[f32::INFINITY, 5.0])), Ok(Taken::Stepped));
    assert_eq!(bench.frame(0, 0, 2, f32::NAN), Ok(Taken::Whole));
    assert_eq!(bench.values(), [-1.0, -1.0, -5.0, -5.0, 0.0, 0.0]);
    assert_eq!(bench.table.nonfinite(), 2);
}

#[test]
fn a_switch_applies_open_rounds_at_the_weight_of_the_new_model() {
    let mut bench = Bench::new(policy("bsp"), 4);
    bench.push(0, 0, 4.0).unwrap();
    bench.push(0, 1, 8.0).unwrap();
    assert_eq!(bench.chunks(), [0.0; 3]);
    bench.set("asp");
    assert_eq!(bench.chunks(), [-3.0; 3], "each gradient of four workers' weighs a quarter");
    for worker in 1..4 {
        bench.push(worker, 0, 4.0).unwrap();
    }
    assert_eq!((bench.chunks(), bench.version()), ([-6.0; 3], 1));
    bench.set("bsp");
    for worker in 1..4 {
        bench.push(worker, 1, 3.0).unwrap();
    }
    // The round's one gradient that is applied already is not applied again.
    assert_eq!((bench.chunks(), bench.version()), ([-9.0; 3], 2));
}

#[test]
fn a_switch_in_the_middle_of_a_push_loses_neither_half() {
    for optimizer in ["sgd:lr=1", "sgd:lr=1,clip=1e30"] {
        for order in [Order::Arrival, Order::Ranked] {
            for (before, after) in
                [("bsp", "asp"), ("asp", "bsp"), ("bsp", "psp:c=2"), ("ssp:s=2", "drop:n=2")]
            {
                let what = format!("{optimizer} {order:?} {before} -> {after}");
                let policy =
                    sum(before).with(Axis::Optimizer, optimizer).with(Axis::Order, order.to_string());
                let mut bench = Bench::new(policy, 2);
                bench.frames(0, 0, 0..2, 1.0).unwrap();
                bench.set(after);
                assert_eq!(bench.frames(0, 0, 2..3, 1.0), Ok(Taken::Whole), "{what}");
                assert_eq!(bench.push(1, 0, 10.0), Ok(Taken::Whole), "{what}");
                assert_eq!((bench.chunks(), bench.version()), ([-11.0; 3], 1), "{what}");
            }
        }
    }
}

#[test]
fn a_push_too_far_ahead_for_a_new_model_is_told_so_once_and_goes_on_later() {
    let mut bench = Bench::new(sum("asp"), 2);
    bench.frames(0, 50, 0..1, 1.0).unwrap();
    bench.set("bsp");
    assert_eq!(bench.frame(0, 50, 1, 1.0), Err(Cause::TooFarAhead));
    assert_eq!(bench.frame(0, 50, 2, 1.0), Ok(Taken::Ignored));
    assert_eq!(bench.frame(0, 50, 0, 1.0), Err(Cause::TooFarAhead), "another attempt, another word");
    bench.set("asp");
    assert_eq!(bench.push(0, 50, 1.0), Ok(Taken::Whole));
    assert_eq!(bench.chunks(), [-1.0; 3]);
}

#[test]
fn rows_are_a_mean_over_all_workers_however_few_touched_them() {
    for sync in ["bsp", "asp"] {
        let mut bench = Bench::sparse(policy(sync), 2);
        bench.push_rows(0, 0, &[(0, 2.0), (1, 4.0), (5, 8.0)]).unwrap();
        bench.push_rows(1, 0, &[(1, 4.0)]).unwrap();
        assert_eq!(bench.values(), [-1.0, -4.0, 0.0, 0.0, 0.0, -4.0], "{sync}");
        assert_eq!(bench.version(), 1);
    }
}

#[test]
fn norms_are_those_of_whole_gradients_also_where_each_is_a_step_at_once() {
    // Every chunk has norm 10 * sqrt(2), the gradient 10 * sqrt(6): clipped to a tenth.
    let clip = format!("sgd:lr=1,clip={}", 6f32.sqrt());
    let mut bench = Bench::new(policy("asp").with(Axis::Optimizer, clip), 1);
    bench.frames(0, 0, 0..2, 10.0).unwrap();
    assert_eq!(bench.chunks(), [0.0; 3], "nothing before the norm is known");
    assert!(bench.table.memory_bytes() > Bench::new(policy("asp"), 1).table.memory_bytes());
    bench.frames(0, 0, 2..3, 10.0).unwrap();
    for value in bench.chunks() {
        assert!((value + 1.0).abs() < 1e-5, "{value}");
    }
    let lars = "lars:lr=1,trust=0.5,beta=0";
    let mut bench = Bench::with_values(policy("asp").with(Axis::Optimizer, lars), 1, 4.0);
    bench.push(0, 0, 10.0).unwrap();
    // trust * |w| / |g| * g = 0.5 * 4 / 10 * 10.
    for value in bench.chunks() {
        assert!((value - 2.0).abs() < 1e-5, "{value}");
    }
}

#[test]
fn a_sum_that_comes_after_a_switch_is_clipped_by_its_own_norm_and_not_by_that_of_an_earlier_step() {
    let change_by_sum = |pushes_before: u32| {
        let mut bench = Bench::new(policy("asp").with(Axis::Optimizer, "sgd:lr=1,clip=2"), 2);
        for _ in 0..pushes_before {
            bench.push(0, 0, 1000.0).unwrap();
        }
        let before = bench.chunks()[1];
        let subject = frame::Subject { epoch: 1, table: TableId(0), request: 1 };
        let sum = frame::Sum {
            subject,
            clock: 1,
            chunk: 1,
            attempt: 1,
            gradients: 2,
            form: Form::PLAIN,
            has_absent: false,
        };
        let workers = [WorkerId(0), WorkerId(1)];
        let payload = bytemuck::cast_slice(&[10.0f32; 2]);
        let taken =
            bench.table.push_sum(AggregatorId(0), &sum, &workers, payload, &mut bench.accumulators).unwrap();
        assert_eq!(taken, None, "both gradients are new");
        bench.chunks()[1] - before
    };
    let alone = change_by_sum(0);
    assert!(alone < 0.0 && (alone - change_by_sum(1)).abs() < 1e-3, "{alone}, {}", change_by_sum(1));
}

#[test]
fn late_gradients_are_dropped_whole_or_from_the_frame_on_that_came_too_late() {
    for sync in ["drop:n=2", "psp:c=2"] {
        let mut bench = Bench::new(sum(sync), 3);
        bench.frames(2, 0, 0..1, 100.0).unwrap();
        bench.push(0, 0, 1.0).unwrap();
        bench.push(1, 0, 1.0).unwrap();
        assert_eq!(bench.version(), 1, "{sync}");
        let closed = bench.chunks();
        assert_eq!(bench.frames(2, 0, 1..3, 100.0), Ok(Taken::Whole), "{sync}: late, and acknowledged");
        assert_eq!((bench.chunks(), bench.table.controller.stats().dropped), (closed, 1), "{sync}");
        assert_eq!(closed[1], closed[2], "{sync}");
        assert_eq!(bench.table.rounds.len(), 0, "{sync}");
        bench.push(2, 1, 1.0).unwrap();
        bench.push(0, 1, 1.0).unwrap();
        assert_eq!(bench.version(), 2, "{sync}");
    }
    let mut bench = Bench::new(sum("drop:n=2").with(Axis::Order, "ranked"), 3);
    bench.frames(2, 0, 0..1, 100.0).unwrap();
    bench.push(0, 0, 1.0).unwrap();
    bench.push(1, 0, 1.0).unwrap();
    bench.frames(2, 0, 1..3, 100.0).unwrap();
    assert_eq!(bench.chunks(), [-2.0; 3]);
}

#[test]
fn rounds_ahead_are_kept_up_to_their_limit_and_applied_in_turn() {
    let mut bench = Bench::new(sum("bsp"), 2);
    for clock in 0..=limits::MAX_ROUNDS_AHEAD {
        assert_eq!(bench.push(0, clock, 1.0), Ok(Taken::Whole), "clock {clock}");
    }
    let (memory, clock) = (bench.table.memory_bytes(), limits::MAX_ROUNDS_AHEAD + 1);
    assert_eq!(bench.frame(0, clock, 0, 1.0), Err(Cause::TooFarAhead));
    assert_eq!(bench.frame(0, clock, 1, 1.0), Ok(Taken::Ignored), "one refusal is enough");
    assert_eq!(bench.table.memory_bytes(), memory);
    for before in 0..clock {
        assert_eq!(bench.push(1, before, 1.0), Ok(Taken::Whole));
        assert_eq!(bench.chunks(), [-2.0 * (before + 1) as f32; 3]);
    }
    assert_eq!(bench.push(0, clock, 1.0), Ok(Taken::Whole));
    assert!(bench.table.memory_bytes() <= memory);
}

#[test]
fn a_chunk_is_taken_once_in_a_push_and_in_its_turn() {
    let mut bench = Bench::new(sum("bsp"), 2);
    for spoil in [
        |header: &mut Header| header.chunk = 0,
        |header: &mut Header| header.chunk = 2,
        |header: &mut Header| header.chunk = u32::MAX,
        |header: &mut Header| header.flags = Flags::LAST,
        |header: &mut Header| header.flags = Flags::ROWS,
    ] {
        bench.frame(0, 0, 0, 1.0).unwrap();
        let mut second = header(0, 1);
        spoil(&mut second);
        assert_eq!(bench.take(0, &second, bytemuck::cast_slice(&[1.0f32; 2])), Err(Cause::Shape));
    }
    let short = header(0, 1);
    bench.frame(0, 0, 0, 1.0).unwrap();
    assert_eq!(bench.take(0, &short, bytemuck::cast_slice(&[1.0f32; 1])), Err(Cause::Shape));
    bench.frame(0, 0, 0, 1.0).unwrap();
    assert_eq!(bench.frame(0, 0, 2, 1.0), Err(Cause::Protocol), "the middle is missing");
    assert_eq!(bench.push(0, 0, 1.0), Ok(Taken::Whole));
    assert_eq!(bench.push(1, 0, 1.0), Ok(Taken::Whole));
    assert_eq!(bench.chunks(), [-2.0; 3]);

    let mut bench = Bench::sparse(sum("asp"), 1);
    let mut rows = header(0, 0);
    (rows.rows, rows.flags) = (1, Flags::ROWS);
    let payload = [0, 1f32.to_bits()];
    assert_eq!(bench.take(0, &rows, bytemuck::cast_slice(&payload)), Ok(Taken::Partly));
    rows.part = 1;
    assert_eq!(bench.take(0, &rows, bytemuck::cast_slice(&payload)), Err(Cause::Shape), "chunk 0 again");
    assert_eq!(bench.values()[0], -1.0);
    rows.part = 0;
    rows.flags = Flags(0);
    rows.clock = 1;
    assert_eq!(bench.take(0, &rows, bytemuck::cast_slice(&payload)), Err(Cause::Shape), "not rows");
}

#[test]
fn a_push_that_was_given_up_for_a_later_one_does_not_come_back() {
    for policy in [sum("bsp"), sum("asp")] {
        let what = policy.get(Axis::Sync).to_owned();
        let mut bench = Bench::new(policy, 1);
        bench.frames(0, 0, 0..2, 1.0).unwrap();
        bench.frames(0, 1, 0..1, 10.0).unwrap();
        assert_eq!(bench.frame(0, 0, 0, 1.0), Err(Cause::Protocol), "{what}");
        assert_eq!(bench.frames(0, 1, 1..3, 10.0), Ok(Taken::Whole), "{what}");
        assert_eq!(bench.chunks(), [-11.0, -11.0, -10.0], "{what}");
    }
}

#[test]
fn initial_values_come_in_turn_and_before_gradients() {
    let shard = ShardId { server: ServerId(0), core: 0 };
    let chunks = (0..CHUNKS).map(|number| (number, Chunk { shard, start: u64::from(number) * 2, len: 2 }));
    let spec = TableSpec::dense("w", [ELEMENTS as u64]);
    let table = TableShard::new(&Registry::builtin(), spec, policy("asp"), chunks, [WorkerId(0)], 1).unwrap();
    let mut bench = Bench { table, accumulators: Accumulators::default() };
    assert_eq!(bench.push(0, 0, 1.0), Ok(Taken::Ignored));
    assert_eq!(bench.frame(0, 0, 0, 1.0), Err(Cause::Protocol));
    let payload = [7.0f32; 2];
    let mut init = |piece: Piece| {
        bench.table.initialise(piece, bytemuck::cast_slice(&payload)).map_err(|fault| fault.cause)
    };
    let with = |sequence, is_last| Piece { is_last, ..piece(sequence) };
    assert_eq!(init(piece(1)), Err(Cause::Protocol));
    assert_eq!(init(piece(u32::MAX)), Err(Cause::Protocol));
    assert_eq!(init(with(0, true)), Err(Cause::Shape));
    assert_eq!([init(piece(0)), init(piece(0)), init(piece(1))], [Ok(false); 3]);
    assert_eq!(init(with(2, false)), Err(Cause::Shape));
    assert_eq!([init(piece(2)), init(piece(2)), init(piece(u32::MAX))], [Ok(true); 3]);
    assert_eq!(bench.values(), [7.0; ELEMENTS]);
}

#[derive(Debug, Clone)]
enum Act {
    /// A worker goes on with its push, or begins the next.
    Frames(u32, u32),
    /// Its connection broke: it sends what is not acknowledged once more.
    Again(u32),
    Switch(usize),
}

/// Models that neither close rounds early nor scale steps: under them every gradient counts in full.
const MODELS: [&str; 6] = ["bsp", "asp", "ssp:s=1", "pssp:s=1,c=0.5", "when:pull=true", "drop:n=9"];

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (0u32..3, 1u32..7).prop_map(|(worker, frames)| Act::Frames(worker, frames)),
        1 => (0u32..3).prop_map(Act::Again),
        2 => (0..MODELS.len()).prop_map(Act::Switch),
    ]
}

/// Workers that push one clock after the other.
#[derive(Default)]
struct Workers {
    clocks: [Clock; 3],
    /// The next frame of the push under way.
    parts: [u32; 3],
    acknowledged: f32,
}

impl Workers {
    /// Gradients are small whole numbers, so that sums are exact in whatever order.
    fn send(&mut self, bench: &mut Bench, worker: u32) {
        let at = worker as usize;
        let value = (u64::from(worker) * 100 + self.clocks[at] % 7 + 1) as f32;
        match bench.frame(worker, self.clocks[at], self.parts[at], value) {
            Ok(Taken::Whole) => {
                self.acknowledged += value;
                self.clocks[at] += 1;
                self.parts[at] = 0;
            }
            Ok(Taken::Ignored | Taken::Partly | Taken::Stepped) => {
                self.parts[at] = (self.parts[at] + 1) % CHUNKS
            }
            Err(cause) => {
                assert_eq!(cause, Cause::TooFarAhead);
                self.parts[at] = 0;
            }
        }
    }

    /// Sends the frames of the push under way again; with other contents, to see that they are passed over.
    fn send_again(&mut self, bench: &mut Bench, worker: u32) {
        let at = worker as usize;
        for part in 0..self.parts[at] {
            let taken = bench.frame(worker, self.clocks[at], part, 1e9);
            assert!(matches!(taken, Ok(Taken::Ignored) | Err(Cause::TooFarAhead)), "{taken:?}");
        }
    }
}

proptest! {
    #[test]
    fn every_acknowledged_gradient_is_applied_exactly_once_whatever_is_switched(
        acts in prop::collection::vec(act(), 1..120),
        is_ranked: bool,
        needs_norms: bool,
        first in 0..MODELS.len(),
    ) {
        let optimizer = if needs_norms { "sgd:lr=1,clip=1e30" } else { "sgd:lr=1" };
        let order = if is_ranked { Order::Ranked } else { Order::Arrival };
        let mut bench = Bench::new(sum(MODELS[first]).with(Axis::Optimizer, optimizer).with(Axis::Order, order.to_string()), 3);
        let empty = bench.table.memory_bytes();
        let mut workers = Workers::default();
        for act in acts {
            match act {
                Act::Frames(worker, frames) => (0..frames).for_each(|_| workers.send(&mut bench, worker)),
                Act::Again(worker) => workers.send_again(&mut bench, worker),
                Act::Switch(model) => bench.set(MODELS[model]),
            }
        }
        // Everybody comes to the same clock with nothing under way, and nothing waits in rounds.
        bench.set("asp");
        let goal = *workers.clocks.iter().max().unwrap() + 2;
        for worker in 0..3 {
            while workers.clocks[worker as usize] < goal {
                workers.send(&mut bench, worker);
            }
        }
        prop_assert_eq!(bench.chunks(), [-workers.acknowledged; 3]);
        prop_assert_eq!(bench.version(), goal);
        prop_assert!(bench.table.rounds.len() == 0 && bench.table.intake.pushes().count() == 0);
        prop_assert!(bench.table.memory_bytes() <= 3 * empty, "{} after {empty}", bench.table.memory_bytes());
    }
}

/// The payload of a frame whose list of absent ranges says this, with two ones behind it.
fn with_list(words: &[u32]) -> Vec<u8> {
    let mut words = words.to_vec();
    words.resize(words.len().next_multiple_of(16), 0);
    words.extend([1f32.to_bits(); 2]);
    bytemuck::cast_slice(&words).to_vec()
}

#[test]
fn a_list_of_absent_ranges_that_cannot_be_is_refused_and_changes_nothing() {
    for policy in [policy("bsp"), ranked("bsp"), policy("asp")] {
        let mut bench = Bench::new(policy, 1);
        let absent = |part| {
            let header = header(0, part);
            Header { flags: header.flags.with(Flags::ABSENT), ..header }
        };
        for (what, list) in [
            ("none", vec![0]),
            ("an empty one", vec![1, 0, 0]),
            ("beyond the end", vec![1, 1, 2]),
            ("twice the same", vec![2, 0, 1, 0, 1]),
            ("two that touch", vec![2, 0, 1, 1, 1]),
            ("more than are there", vec![40, 0, 1]),
            ("everything, and a gradient", vec![1, 0, 2]),
        ] {
            assert_eq!(bench.take(0, &absent(0), &with_list(&list)), Err(Cause::Shape), "{what}");
        }
        let cut = with_list(&[1, 0, 1]);
        assert_eq!(bench.take(0, &absent(0), &cut[..cut.len() - 4]), Err(Cause::Shape));
        assert_eq!((bench.values(), bench.version()), (&[0.0; ELEMENTS][..], 0));
        // The push goes on with a frame that is right.
        assert_ne!(bench.take(0, &absent(0), &with_list(&[1, 0, 1])), Err(Cause::Shape));
        bench.frame(0, 0, 1, 1.0).unwrap();
        assert_eq!(bench.frame(0, 0, 2, 1.0), Ok(Taken::Whole));
        assert_eq!((bench.values(), bench.version()), (&[0.0, -1.0, -1.0, -1.0, -1.0, -1.0][..], 1));
    }
}

/// A round that is applied in two parts, since the model was switched in between, counts for each what is in it.
#[test]
fn a_switch_does_not_mix_up_what_is_absent() {
    let policy = sum("bsp").with(Axis::Optimizer, "sgd:lr=1,weight_decay=1");
    let mut bench = Bench::with_values(policy, 2, 8.0);
    let push = |bench: &mut Bench, worker, clock, is_absent: bool| {
        for part in 0..CHUNKS {
            let header = header(clock, part);
            let flags = if is_absent { header.flags.with(Flags::ABSENT) } else { header.flags };
            let list = with_list(&[1, 0, 1]);
            let payload = if is_absent { &list[..] } else { bytemuck::cast_slice(&[0.0f32; 2]) };
            bench.take(worker, &Header { flags, ..header }, payload).unwrap();
        }
    };
    push(&mut bench, 0, 0, true);
    bench.set("asp");
    assert_eq!(bench.values()[0], 8.0, "its only gradient so far does not have it");
    assert_ne!(bench.values()[1], 8.0);
    push(&mut bench, 1, 0, false);
    assert_eq!(bench.values()[0], 0.0, "decayed by the one gradient that has it");
}

/// `paramill status` shows it.
#[test]
fn the_report_names_the_table_and_those_who_wait_longest_first() {
    let seconds = |seconds: u32| Time::from_secs_f64(f64::from(seconds));
    let mut bench = Bench::new(policy("bsp"), 3);
    bench.push(0, 0, 1.0).unwrap();
    for (worker, since) in [(1, 5), (0, 2)] {
        let token = u64::from(worker);
        bench.table.controller.pull(seconds(since), WorkerId(worker), 1, token);
    }
    let report = bench.table.report(seconds(10));
    assert_eq!((report.name.as_str(), report.sync.as_str()), ("w", "bsp"));
    assert_eq!((report.elements, report.version, report.workers), (ELEMENTS as u64, 0, 3));
    let waits: Vec<(u32, f64)> = report.waiting.iter().map(|wait| (wait.worker.0, wait.seconds)).collect();
    assert_eq!(waits, [(0, 8.0), (1, 5.0)]);
    assert!(report.waiting[0].reason.contains("worker 1"), "{}", report.waiting[0].reason);
}

/// Numbers of rows may take more than a codec saves: a payload is never longer than the chunk's values, for which there is room in a frame.
#[test]
fn rows_that_are_longer_than_their_chunk_travel_as_the_chunk() {
    let policy = policy("bsp").with(Axis::Broadcast, "star").with(Axis::AnswerCodec, "f16");
    let mut bench = Bench::sparse(policy, 1);
    for index in 0..CHUNKS as usize {
        assert!(bench.table.publish_chunk(index, 0).payload.is_none());
    }
    bench.push_rows(0, 0, &[(0, 1.0), (1, 0.3)]).unwrap();
    let chunk = bench.table.publish_rows(0, 1).unwrap();
    assert_eq!((chunk.form, chunk.payload), (Form::PLAIN, None));
    // What is published is what the codec makes of them all the same.
    let mut halves = Vec::new();
    crate::codec::write_elements(crate::wire::DType::F16, &bench.values()[..2], &mut halves);
    let rounded = crate::wire::DType::F16.values(&halves).unwrap().to_vec();
    assert_eq!(bytemuck::cast_slice::<u8, f32>(bench.table.published_bytes())[..2], rounded);
    assert!(bench.table.publish_rows(1, 1).is_none());
}
