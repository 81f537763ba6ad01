//! Tables of rows through aggregators: one sum of the rows that workers touched, and the same results.

use super::{W, job};
use crate::bench::Bench;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::ServerId;
use paramill_core::worker::{Gradient, PullOptions, Ticket};

const ROWS: u32 = 60;
const WIDTH: usize = 3;
const ELEMENTS: usize = ROWS as usize * WIDTH;
const ALL: [u32; 4] = [0, 1, 2, 3];
/// Exact in a sum with whole numbers.
const TINY: f32 = 1.0 / 1024.0;

fn arrival(sync: &str, optimizer: &str) -> JobConfig {
    let config = job(4, 2, sync, optimizer);
    JobConfig { policy: config.policy.clone().with(Axis::Order, "arrival"), ..config }
}

fn started(config: JobConfig, through: &[usize]) -> Bench {
    let mut bench = Bench::with_aggregators(config, 2, through);
    bench.declare_and_start(&[(TableSpec::sparse("rows", ROWS.into(), WIDTH as u64), vec![1.0; ELEMENTS])]);
    bench.pass(1.0);
    bench
}

/// The rows that a worker touches: some of them are others' too, and some shards have none. The last worker has none at all
/// in every third clock.
fn rows_of(worker: u32, clock: u64) -> Vec<u32> {
    let is_touched = |row: &u32| (row + worker + clock as u32) % 5 < 2 && row / 15 != (worker + 1) % 4;
    let rows: Vec<u32> = (0..ROWS).filter(is_touched).collect();
    if worker == 3 && clock % 3 == 1 { vec![] } else { rows }
}

/// Whole numbers: adding them is exact in any order.
fn values_of(worker: u32, clock: u64, rows: &[u32]) -> Vec<f32> {
    let value = |row: u32, place: usize| ((row * 5 + worker * 7 + clock as u32 * 3) as usize + place) % 16;
    rows.iter().flat_map(|&row| (0..WIDTH).map(move |place| value(row, place) as f32 - 8.0)).collect()
}

fn push(bench: &mut Bench, worker: u32) -> (usize, Ticket) {
    let now = bench.now();
    let clock = bench.worker(worker as usize).current_clock();
    let rows = rows_of(worker, clock);
    let values = values_of(worker, clock, &rows);
    let pushing = bench.worker_mut(worker as usize);
    let ticket =
        pushing.push(now, W, Gradient::Rows { rows: &rows, values: &values }, false).expect("it fits");
    pushing.clock();
    (worker as usize, ticket)
}

fn pull(bench: &mut Bench, worker: u32, rows: &[u32]) -> (usize, Ticket) {
    let (now, options) = (bench.now(), PullOptions { rows: Some(rows), now: false });
    (worker as usize, bench.worker_mut(worker as usize).pull(now, W, options).expect("it has started"))
}

fn assert_done(bench: &mut Bench, (worker, ticket): (usize, Ticket)) {
    let outcome = bench.outcome(worker, ticket);
    assert_eq!(outcome, Some(Ok(())), "worker {worker}: {} {:?}", bench.explain(worker, ticket), bench.log());
}

/// Rounds in which everybody pushes and then pulls what it touches next. `disturb` is called after every push.
fn after_rounds(
    config: JobConfig,
    through: &[usize],
    rounds: u64,
    mut disturb: impl FnMut(&mut Bench, u64, u32),
) -> Bench {
    let mut bench = started(config, through);
    for clock in 0..rounds {
        let mut tickets = Vec::new();
        for worker in ALL {
            tickets.push(push(&mut bench, worker));
            tickets.push(pull(&mut bench, worker, &rows_of(worker, clock + 1)));
            bench.run();
            disturb(&mut bench, clock, worker);
        }
        bench.pass(3.0);
        tickets.into_iter().for_each(|ticket| assert_done(&mut bench, ticket));
    }
    bench
}

fn undisturbed(config: JobConfig, through: &[usize], rounds: u64) -> Bench {
    after_rounds(config, through, rounds, |_, _, _| {})
}

#[test]
fn a_job_ends_with_the_same_bits() {
    for (sync, reduce) in [("bsp", "mean"), ("bsp", "sum"), ("asp", "sum"), ("ssp:s=1", "mean")] {
        let mut config = arrival(sync, "sgd:lr=1");
        config.policy.set(Axis::Reduce, reduce).unwrap();
        let direct = undisturbed(config.clone(), &[], 6).parameters(W, ELEMENTS);
        for through in [&[0, 0, 0, 0][..], &[0, 0, 1, 1], &[0, 1, 0]] {
            let bench = undisturbed(config.clone(), through, 6);
            assert_eq!(bench.parameters(W, ELEMENTS), direct, "{sync}, {reduce}, {through:?}");
            assert!(bench.aggregator(0).report().groups > 0, "{sync}: they were added up");
        }
    }
}

/// A rule with state makes one step of a round, of the rows that anybody touched.
#[test]
fn a_round_is_one_step_of_the_touched_rows() {
    let direct = undisturbed(arrival("bsp", "adagrad:lr=1"), &[], 5).parameters(W, ELEMENTS);
    let bench = undisturbed(arrival("bsp", "adagrad:lr=1"), &[0, 0, 0, 0], 5);
    assert_eq!(bench.parameters(W, ELEMENTS), direct);
}

#[test]
fn one_sum_has_the_rows_that_anybody_touched() {
    let direct = undisturbed(arrival("bsp", "sgd:lr=1"), &[], 6);
    let bench = undisturbed(arrival("bsp", "sgd:lr=1"), &[0, 0, 0, 0], 6);
    // Numbers and values of the rows, each once.
    let touched =
        |clock| (0..ROWS).filter(|row| ALL.iter().any(|&it| rows_of(it, clock).contains(row))).count();
    let bytes = (4 + 4 * WIDTH) * (0..6).map(touched).sum::<usize>();
    let report = bench.aggregator(0).report();
    assert_eq!(report.bytes_to_servers, bytes as u64);
    assert_eq!((report.groups, report.gradients), (6 * 4, 6 * 4 * 4), "four shards, four workers");
    assert!(bench.tally.pushed_bytes < direct.tally.pushed_bytes);
}

#[test]
fn connections_may_break_at_any_time_and_every_row_counts_once() {
    for sync in ["bsp", "asp"] {
        let mut config = arrival(sync, "sgd:lr=1");
        config.policy.set(Axis::Reduce, "sum").unwrap();
        let direct = undisturbed(config.clone(), &[], 5).parameters(W, ELEMENTS);
        for victim in ["worker", "shard", "both"] {
            let bench = after_rounds(config.clone(), &[0, 0, 0, 0], 5, |bench, clock, worker| {
                let aggregator = bench.aggregator_node(0);
                let other = (worker as usize + clock as usize) % 4;
                if victim != "shard" && worker != 1 {
                    bench.reset(bench.worker_node(other), aggregator);
                }
                if victim != "worker" && worker != 2 {
                    bench.reset(aggregator, bench.shard_node(other));
                }
                bench.run();
            });
            assert_eq!(bench.parameters(W, ELEMENTS), direct, "{sync}, {victim}");
        }
    }
}

/// A pull that comes after a push of the same worker is answered with it, also while the push is held for others.
#[test]
fn a_worker_reads_what_it_pushed() {
    let mut config = arrival("asp", "sgd:lr=1");
    config.policy.set(Axis::Reduce, "sum").unwrap();
    let mut bench = started(config, &[0, 0, 0, 0]);
    let now = bench.now();
    let gradient = Gradient::Rows { rows: &[7], values: &[4.0; WIDTH] };
    bench.worker_mut(0).push(now, W, gradient, false).unwrap();
    bench.worker_mut(0).clock();
    let own = pull(&mut bench, 0, &[7]);
    let other = pull(&mut bench, 1, &[7]);
    bench.run();
    assert_done(&mut bench, other);
    assert_eq!(bench.worker_mut(1).redeem(other.1), [1.0; WIDTH]);
    assert_eq!(bench.outcome(0, own.1), None, "its push is held here");
    bench.pass(0.006);
    assert_done(&mut bench, own);
    assert_eq!(bench.worker_mut(0).redeem(own.1), [-3.0; WIDTH]);
}

/// A push that is held is followed by its pull although the worker's connection broke between them.
#[test]
fn a_pull_that_is_held_is_asked_for_again_on_another_connection() {
    let mut config = arrival("asp", "sgd:lr=1");
    config.policy.set(Axis::Reduce, "sum").unwrap();
    let mut bench = started(config, &[0, 0, 0, 0]);
    let pushed = push(&mut bench, 0);
    let own = pull(&mut bench, 0, &[0, 1]);
    bench.run();
    let (worker, aggregator) = (bench.worker_node(0), bench.aggregator_node(0));
    bench.reset(worker, aggregator);
    bench.pass(2.0);
    assert_done(&mut bench, pushed);
    assert_done(&mut bench, own);
    let expected = bench.parameters(W, ELEMENTS);
    assert_eq!(bench.worker_mut(0).redeem(own.1), expected[..2 * WIDTH]);
}

#[test]
fn rows_that_are_added_by_rank_stay_alone() {
    let config = job(4, 2, "bsp", "sgd:lr=1");
    let direct = undisturbed(config.clone(), &[], 4).parameters(W, ELEMENTS);
    let bench = undisturbed(config, &[0, 0, 1, 1], 4);
    assert_eq!((bench.parameters(W, ELEMENTS), bench.aggregator(0).report().groups), (direct, 0));
}

#[test]
fn a_member_that_dies_is_not_waited_for() {
    let mut bench = started(arrival("bsp", "sgd:lr=1"), &[0, 0, 0, 0]);
    bench.isolate(bench.worker_node(2));
    let tickets: Vec<_> = [0, 1, 3].map(|worker| push(&mut bench, worker)).to_vec();
    bench.pass(5.0);
    tickets.into_iter().for_each(|ticket| assert_done(&mut bench, ticket));
    let mut expected = vec![1.0; ELEMENTS];
    for worker in [0, 1, 3] {
        let rows = rows_of(worker, 0);
        for (place, row) in rows.iter().enumerate() {
            for column in 0..WIDTH {
                expected[*row as usize * WIDTH + column] -=
                    values_of(worker, 0, &rows)[place * WIDTH + column] / 3.0;
            }
        }
    }
    for (found, expected) in bench.parameters(W, ELEMENTS).iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
    }
}

/// Rows are encoded as the workers' are: what a codec leaves out of a sum comes with a later one.
#[test]
fn sums_of_rows_travel_encoded() {
    let run = |codec: &str, through: &[usize]| {
        let mut config = arrival("bsp", "sgd:lr=1");
        config.policy.set(Axis::Codec, codec).unwrap();
        config.policy.set(Axis::Reduce, "sum").unwrap();
        let mut bench = undisturbed(config, through, 6);
        // All rows, and almost nothing in them, until nothing else is left in any residual.
        let rows: Vec<u32> = (0..ROWS).collect();
        for _ in 0..20 {
            let tickets = ALL.map(|worker| {
                let (now, gradient) =
                    (bench.now(), Gradient::Rows { rows: &rows, values: &[TINY; ELEMENTS] });
                let pushing = bench.worker_mut(worker as usize);
                let ticket = pushing.push(now, W, gradient, false).unwrap();
                pushing.clock();
                (worker as usize, ticket)
            });
            bench.pass(3.0);
            tickets.into_iter().for_each(|ticket| assert_done(&mut bench, ticket));
        }
        bench
    };
    let direct = run("none", &[]).parameters(W, ELEMENTS);
    for codec in ["none", "bitmap+lz4", "f16", "topk:0.3", "dvf:delta=0.01"] {
        let bench = run(codec, &[0, 0, 1, 1]);
        let report = bench.aggregator(0).report();
        assert!(report.groups > 0 && report.gradients > report.groups, "{codec}: {report:?}");
        let found = bench.parameters(W, ELEMENTS);
        if ["none", "bitmap+lz4", "f16"].contains(&codec) {
            assert_eq!(found, direct, "{codec}");
            continue;
        }
        for (found, expected) in found.iter().zip(&direct) {
            assert!((found - expected).abs() < 200.0 * TINY, "{codec}: {found} for {expected}");
        }
    }
}

/// A push of rows that are all elsewhere has no sum on a shard, which could be refused there: the list of workers is.
#[test]
fn a_push_too_far_ahead_is_refused_where_it_has_no_rows_too() {
    let mut bench = started(arrival("bsp", "sgd:lr=1"), &[0, 0, 0]);
    let try_clock = |bench: &mut Bench, workers: &[usize]| {
        let now = bench.now();
        let push = |worker: &usize| {
            let nothing = Gradient::Rows { rows: &[], values: &[] };
            bench.worker_mut(*worker).push(now, W, nothing, false).expect("it fits")
        };
        let tickets: Vec<Ticket> = workers.iter().map(push).collect();
        bench.run();
        let outcomes = workers.iter().zip(tickets).map(|(&worker, ticket)| bench.outcome(worker, ticket));
        outcomes.collect::<Vec<_>>()
    };
    let ahead = [0, 1, 2];
    for _ in 0..5 {
        assert_eq!(try_clock(&mut bench, &ahead), [Some(Ok(())), Some(Ok(())), Some(Ok(()))]);
        ahead.into_iter().for_each(|worker| bench.worker_mut(worker).clock());
    }
    for outcome in try_clock(&mut bench, &ahead) {
        let error = outcome.expect("it is refused").unwrap_err();
        assert!(error.to_string().contains("at most 4 rounds ahead are kept"), "{error}");
    }
    assert_eq!(try_clock(&mut bench, &[3]), [Some(Ok(()))]);
    assert_eq!(try_clock(&mut bench, &ahead), [Some(Ok(())), Some(Ok(())), Some(Ok(()))]);
    for shard in bench.shards() {
        let stats = shard.report(bench.now()).expect("it has a plan").tables[0].stats.clone();
        assert_eq!((stats.pushes, stats.duplicates, stats.refused), (3 * 6 + 1, 0, 0));
    }
}

/// Whoever pulls only rows of servers that are ahead of another one gets too far ahead of that one, and is told so, through
/// aggregators and without them.
#[test]
fn rows_of_faster_servers_do_not_wait_for_slower_ones() {
    for through in [&[0, 0, 0, 0][..], &[]] {
        let mut config = arrival("drop:n=1", "sgd:lr=1");
        let all = PolicyOverride::new("*", Policies::of([(Axis::Sync, "drop:n=4")]));
        config.overrides.push(all.on(Some(ServerId(1))));
        let mut bench = started(config, through);
        for clock in 0..6 {
            let now = bench.now();
            let pushing = bench.worker_mut(0);
            let gradient = Gradient::Rows { rows: &[0], values: &[1.0; WIDTH] };
            let pushed = pushing.push(now, W, gradient, false).expect("it fits");
            pushing.clock();
            bench.pass(1.0);
            let outcome = bench.outcome(0, pushed).expect("it is over");
            if clock == 5 {
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains("at most 4 rounds ahead are kept"), "{error}");
                break;
            }
            assert_eq!(outcome, Ok(()), "clock {clock}");
            let pulled = pull(&mut bench, 0, &[0]);
            bench.pass(1.0);
            assert_done(&mut bench, pulled);
        }
    }
}
