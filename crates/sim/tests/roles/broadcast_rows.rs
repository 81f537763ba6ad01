//! Tables of rows whose versions are broadcast: only what changed travels, and pulls of rows are answered at home.

use super::bench::Bench;
use super::broadcast::{TREES, all, broadcast, pulls};
use super::{W, job};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::wire::Kind;
use paramill_core::worker::{Gradient, PullOptions, Ticket};

const ROWS: u32 = 25;
const WIDTH: usize = 2;
const ELEMENTS: usize = ROWS as usize * WIDTH;
/// Rows of a chunk.
const CHUNK_ROWS: u32 = 4;

fn spec() -> TableSpec {
    TableSpec::sparse("w", ROWS.into(), WIDTH as u64)
}

fn initial() -> Vec<f32> {
    (0..ELEMENTS).map(|i| i as f32).collect()
}

fn started(config: JobConfig) -> Bench {
    let mut bench = Bench::new(config, 2);
    bench.start(&[(spec(), initial())]);
    bench
}

/// The rows that a worker touches in a step: others in each, and some that all touch.
fn touched(worker: usize, step: usize) -> Vec<u32> {
    let mut rows: Vec<u32> =
        [3, 11 * worker + 5 * step, 7 * step + 1, 17 + worker].map(|row| row as u32 % ROWS).into();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// A worker pushes a gradient of this value for some rows, ends its iteration, and asks for rows.
fn iterate(bench: &mut Bench, worker: usize, rows: &[u32], value: f32) -> Ticket {
    let now = bench.now();
    let values = vec![value; rows.len() * WIDTH];
    let gradient = Gradient::Rows { rows, values: &values };
    bench.worker_mut(worker).push(now, W, gradient, false).expect("it fits");
    bench.worker_mut(worker).clock();
    let ticket = pull(bench, worker);
    bench.run();
    ticket
}

/// A worker asks for all rows.
fn pull(bench: &mut Bench, worker: usize) -> Ticket {
    let rows: Vec<u32> = (0..ROWS).collect();
    let (now, options) = (bench.now(), PullOptions { rows: Some(&rows), now: false });
    bench.worker_mut(worker).pull(now, W, options).expect("they are rows of it")
}

/// The rows that a pull has brought.
fn brought(bench: &mut Bench, worker: usize, ticket: Ticket) -> Vec<f32> {
    assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
    bench.worker_mut(worker).redeem(ticket)
}

/// All of these workers do an iteration, and then have what servers published.
fn round(bench: &mut Bench, workers: &[usize], step: usize) {
    let tickets: Vec<(usize, Ticket)> = workers
        .iter()
        .map(|&worker| (worker, iterate(bench, worker, &touched(worker, step), (worker + 1) as f32)))
        .collect();
    for (worker, ticket) in tickets {
        let rows = brought(bench, worker, ticket);
        assert_eq!(rows, bench.published(W, ELEMENTS), "worker {worker} in step {step}");
    }
}

fn with_codec(config: JobConfig, codec: &str) -> JobConfig {
    let policy = config.policy.clone().with(Axis::AnswerCodec, codec);
    JobConfig { policy, ..config }
}

#[test]
fn everybody_gets_every_version_and_nobody_pulls() {
    for tree in TREES {
        let mut bench = started(broadcast(4, 2, "bsp", tree));
        let mut expected = initial();
        for step in 0..6 {
            round(&mut bench, &[0, 1, 2, 3], step);
            for worker in 0..4 {
                for row in touched(worker, step) {
                    let row = row as usize * WIDTH;
                    expected[row..row + WIDTH]
                        .iter_mut()
                        .for_each(|value| *value -= 0.25 * (worker + 1) as f32);
                }
            }
            assert_eq!(bench.published(W, ELEMENTS), expected);
        }
        assert_eq!(pulls(&bench), 0);
    }
}

#[test]
fn what_a_codec_makes_of_a_version_is_what_everybody_has_and_the_server_too() {
    for (tree, codec) in all(&["topk:0.3", "dvf:delta=3", "f16", "int8", "lossless+lz4", "onebit"]) {
        let mut bench = started(with_codec(broadcast(3, 2, "bsp", tree), codec));
        (0..30).for_each(|step| round(&mut bench, &[0, 1, 2], step));
        let (parameters, published) = (bench.parameters(W, ELEMENTS), bench.published(W, ELEMENTS));
        let error = parameters.iter().zip(&published).map(|(one, other)| (one - other).abs());
        let largest = error.fold(0.0f32, f32::max);
        assert!(largest < 4.0, "{codec}: {largest} of what 30 steps should be");
    }
}

/// Two rows of one chunk are touched: they travel, each with its number, and with them the list of one chunk.
#[test]
fn only_rows_that_changed_travel() {
    let mut bench = started(broadcast(1, 1, "bsp", "star"));
    let before = (bench.tally.frames(Kind::Update), bench.tally.payload_bytes(Kind::Update));
    let ticket = iterate(&mut bench, 0, &[CHUNK_ROWS + 1], 1.0);
    brought(&mut bench, 0, ticket);
    let frames = bench.tally.frames(Kind::Update) - before.0;
    let bytes = bench.tally.payload_bytes(Kind::Update) - before.1;
    // Each of two shards ends the version, one with a list of one chunk.
    assert_eq!((frames, bytes), (3, 4 * (1 + WIDTH) + 4));
    // All rows of a chunk are shorter as what they are.
    let before = bench.tally.payload_bytes(Kind::Update);
    let rows: Vec<u32> = (CHUNK_ROWS..2 * CHUNK_ROWS).collect();
    let ticket = iterate(&mut bench, 0, &rows, 1.0);
    brought(&mut bench, 0, ticket);
    assert_eq!(bench.tally.payload_bytes(Kind::Update) - before, 4 * WIDTH * CHUNK_ROWS as usize + 4);
}

#[test]
fn a_version_in_which_nothing_changed_is_one_too() {
    for codec in ["none", "dvf:delta=1e-3", "f16"] {
        let mut bench = started(with_codec(broadcast(2, 2, "bsp", "chain"), codec));
        for step in 0..4 {
            // A gradient of zeros, which a step leaves everything as it is by.
            let tickets = [0, 1].map(|worker| iterate(&mut bench, worker, &touched(worker, step), 0.0));
            for (worker, ticket) in tickets.into_iter().enumerate() {
                assert_eq!(brought(&mut bench, worker, ticket), initial(), "{codec}");
            }
        }
    }
}

/// The threshold sinks: what was below it is above it some steps later, although nobody pushes that row any more.
#[test]
fn what_was_left_out_of_a_row_goes_later_although_nobody_touches_it_again() {
    let mut bench = started(with_codec(broadcast(1, 1, "bsp", "star"), "dvf:delta=4"));
    let ticket = iterate(&mut bench, 0, &[0], 1.0);
    assert_eq!(brought(&mut bench, 0, ticket), initial(), "one is below 4/sqrt(2)");
    for step in 2..=20 {
        let ticket = iterate(&mut bench, 0, &[ROWS - 1], 0.0);
        let rows = brought(&mut bench, 0, ticket);
        let is_above = 1.0 > 4.0 / f32::sqrt((step + 1) as f32);
        assert_eq!(rows[0] == -1.0, is_above, "version {step}");
    }
    assert_eq!(bench.published(W, ELEMENTS), bench.parameters(W, ELEMENTS));
}

#[test]
fn a_receiver_goes_on_where_it_was_after_its_connection_broke() {
    for (tree, codec) in all(&["none", "topk:0.3", "f16"]) {
        let mut bench = started(with_codec(broadcast(3, 2, "bsp", tree), codec));
        for step in 0..8 {
            if step % 2 == 1 {
                bench.reset(bench.worker_node(step % 3), bench.shard_node(step % 4));
                bench.pass(0.5);
            }
            round(&mut bench, &[0, 1, 2], step);
        }
    }
}

/// The connection breaks when some frames of a version are on their way.
#[test]
fn a_version_of_which_a_part_was_lost_is_whole_in_the_end() {
    for codec in ["none", "topk:0.3", "f16"] {
        for delivered in 0..4 {
            let mut bench = started(with_codec(broadcast(2, 1, "bsp", "star"), codec));
            round(&mut bench, &[0, 1], 0);
            let first = iterate(&mut bench, 0, &[0, 5, 9, 13, 17], 1.0);
            let (shard, worker) = (bench.shard_node(0), bench.worker_node(0));
            bench.world.hold(shard, worker);
            let second = iterate(&mut bench, 1, &[0, 6, 9, 21], 2.0);
            bench.deliver(shard, worker, delivered);
            bench.reset(shard, worker);
            bench.thaw();
            bench.pass(1.0);
            for (worker, ticket) in [first, second].into_iter().enumerate() {
                let rows = brought(&mut bench, worker, ticket);
                assert_eq!(rows, bench.published(W, ELEMENTS), "{codec} after {delivered} frames");
            }
        }
    }
}

#[test]
fn a_worker_blocks_when_its_clock_is_too_far_ahead_of_its_version() {
    let mut bench = started(broadcast(2, 1, "ssp:s=2", "star"));
    let ahead: Vec<Ticket> = (0..3).map(|_| iterate(&mut bench, 0, &[0], 1.0)).collect();
    let done: Vec<bool> = ahead.iter().map(|&ticket| bench.outcome(0, ticket).is_some()).collect();
    assert_eq!(done, [true, true, false], "after its third iteration it needs version 1");
    let slow = iterate(&mut bench, 1, &[0], 1.0);
    assert_eq!((bench.outcome(1, slow), bench.outcome(0, ahead[2])), (Some(Ok(())), Some(Ok(()))));
    for worker in 0..2 {
        let ticket = pull(&mut bench, worker);
        assert_eq!(brought(&mut bench, worker, ticket), bench.published(W, ELEMENTS));
    }
}

#[test]
fn a_worker_that_joins_gets_a_snapshot_and_then_the_stream() {
    for (tree, codec) in all(&["none", "topk:0.3", "f16"]) {
        let mut bench = started(with_codec(broadcast(2, 2, "bsp", tree), codec));
        (0..5).for_each(|step| round(&mut bench, &[0, 1], step));
        let late = bench.add_worker();
        bench.run();
        bench.worker_mut(late).declare(spec(), vec![7.0; ELEMENTS]).expect("a table");
        let now = bench.now();
        let start = bench.worker_mut(late).start(now).expect("starts once");
        bench.run();
        if bench.outcome(late, start).is_none() {
            // It takes part from the round after the open one on.
            round(&mut bench, &[0, 1], 5);
        }
        assert_eq!(bench.outcome(late, start), Some(Ok(())), "{}", bench.explain(late, start));
        (6..12).for_each(|step| round(&mut bench, &[0, 1, 2], step));
    }
}

/// Of a table of a million features few have a weight.
#[test]
fn chunks_of_zeros_are_no_bytes_of_a_snapshot() {
    let mut bench = Bench::new(broadcast(1, 1, "bsp", "star"), 2);
    bench.start(&[(spec(), vec![0.0; ELEMENTS])]);
    let ticket = iterate(&mut bench, 0, &[2, 3], 1.0);
    brought(&mut bench, 0, ticket);
    let before = bench.tally.payload_bytes(Kind::Update);
    let late = bench.add_worker();
    bench.run();
    bench.worker_mut(late).declare(spec(), vec![0.0; ELEMENTS]).expect("a table");
    let now = bench.now();
    let start = bench.worker_mut(late).start(now).expect("starts once");
    bench.run();
    assert_eq!(bench.outcome(late, start), Some(Ok(())), "{}", bench.explain(late, start));
    assert_eq!(bench.tally.payload_bytes(Kind::Update) - before, 4 * WIDTH * CHUNK_ROWS as usize);
    round(&mut bench, &[0, 1], 3);
}

#[test]
fn streams_go_on_by_other_codecs_when_these_are_switched() {
    for tree in TREES {
        let mut bench = started(broadcast(3, 2, "bsp", tree));
        for (number, codec) in ["topk:0.3", "none", "f16", "dvf:delta=1", "int8", "topk:0.3", "f16", "none"]
            .into_iter()
            .enumerate()
        {
            round(&mut bench, &[0, 1, 2], number);
            bench.set(PolicyOverride::new("*", Policies::of([(Axis::AnswerCodec, codec)])));
            (1..4).for_each(|step| round(&mut bench, &[0, 1, 2], number + step));
        }
        assert_eq!(
            bench.published(W, ELEMENTS),
            bench.parameters(W, ELEMENTS),
            "nothing is left out for good"
        );
    }
}

#[test]
fn those_behind_a_relay_that_dies_get_what_they_missed_from_elsewhere() {
    for codec in ["none", "topk:0.3", "f16"] {
        for dying in 0..3 {
            let mut bench = started(with_codec(broadcast(4, 2, "bsp", "chain"), codec));
            round(&mut bench, &[0, 1, 2, 3], 0);
            let (relay, next) = (bench.worker_node(dying), bench.worker_node(dying + 1));
            // It has a version that it did not pass on.
            bench.world.hold(relay, next);
            let tickets: Vec<Ticket> =
                (0..4).map(|worker| iterate(&mut bench, worker, &touched(worker, 1), 1.0)).collect();
            assert_eq!(bench.outcome(dying + 1, tickets[dying + 1]), None);
            bench.isolate(relay);
            bench.pass(1.0);
            let others: Vec<usize> = (0..4).filter(|worker| *worker != dying).collect();
            for &worker in &others {
                let rows = brought(&mut bench, worker, tickets[worker]);
                assert_eq!(rows, bench.published(W, ELEMENTS), "{codec}");
            }
            bench.pass(5.0);
            (2..5).for_each(|step| round(&mut bench, &others, step));
        }
    }
}

/// Each gradient is a step of its own there, and a version is what was made of them by then.
#[test]
fn under_asp_replicas_are_what_was_published() {
    for codec in ["none", "topk:0.3", "f16"] {
        let mut bench = started(with_codec(broadcast(2, 2, "asp", "chain"), codec));
        for step in 0..10 {
            for worker in [0, 1, 0] {
                let ticket = iterate(&mut bench, worker, &touched(worker, step), 1.0);
                brought(&mut bench, worker, ticket);
            }
        }
        for step in 0..10 {
            let ticket = iterate(&mut bench, 1, &touched(1, step), 1.0);
            brought(&mut bench, 1, ticket);
        }
        for worker in 0..2 {
            let ticket = pull(&mut bench, worker);
            assert_eq!(brought(&mut bench, worker, ticket), bench.published(W, ELEMENTS), "{codec}");
        }
    }
}

/// Both kinds in one job, each by its own codec.
#[test]
fn a_job_has_tables_of_rows_beside_dense_ones() {
    let config = broadcast(3, 2, "bsp", "rotated:degree=2");
    let mut bench = Bench::new(with_codec(config, "topk:0.3"), 2);
    let dense = TableSpec::dense("b", [13]);
    bench.start(&[(spec(), initial()), (dense, vec![1.0; 13])]);
    let other = paramill_core::types::TableId(1);
    for step in 0..5 {
        let now = bench.now();
        let pushed: Vec<Ticket> = (0..3)
            .map(|worker| {
                bench.worker_mut(worker).push(now, other, Gradient::Dense(&[1.0; 13]), true).expect("it fits")
            })
            .collect();
        round(&mut bench, &[0, 1, 2], step);
        for (worker, ticket) in pushed.into_iter().enumerate() {
            assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
            assert_eq!(bench.worker(worker).values(other), bench.published(other, 13));
        }
    }
}

#[test]
fn a_job_that_pulls_rows_as_ever_is_not_broadcast() {
    let mut bench = Bench::new(job(2, 1, "bsp", "sgd:lr=1"), 2);
    bench.start(&[(spec(), initial())]);
    let tickets = [0, 1].map(|worker| iterate(&mut bench, worker, &touched(worker, 0), 1.0));
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(brought(&mut bench, worker, ticket), bench.parameters(W, ELEMENTS));
    }
    assert_eq!(bench.tally.frames(Kind::Update), 0);
}
