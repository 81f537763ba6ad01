//! Tables whose versions are broadcast: workers follow streams, and pull nothing.

use super::bench::Bench;
use super::{W, job};
use paramill_core::coordinator::JobConfig;
use paramill_core::limits;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::ServerId;
use paramill_core::wire::Kind;
use paramill_core::worker::{Gradient, PullOptions, Ticket};

const ELEMENTS: usize = 50;
pub(super) const TREES: [&str; 6] =
    ["star", "chain", "kary:k=2", "rotated:degree=2", "tree:degree=3", "auto"];

/// Every tree with every codec.
pub(super) fn all(codecs: &[&'static str]) -> Vec<(&'static str, &'static str)> {
    TREES.iter().flat_map(|tree| codecs.iter().map(|codec| (*tree, *codec))).collect()
}

pub(super) fn broadcast(workers: u32, servers: u32, sync: &str, tree: &str) -> JobConfig {
    let mut config = job(workers, servers, sync, "sgd:lr=1");
    config.policy = config.policy.with(Axis::Broadcast, tree);
    config
}

fn started(config: JobConfig) -> Bench {
    let mut bench = Bench::new(config, 2);
    let initial = (0..ELEMENTS).map(|i| i as f32).collect();
    bench.start(&[(TableSpec::dense("w", [ELEMENTS as u64]), initial)]);
    bench
}

/// A worker does an iteration with a gradient of this value.
fn iterate(bench: &mut Bench, worker: usize, value: f32) -> Ticket {
    let now = bench.now();
    let gradient = [value; ELEMENTS];
    let ticket = bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true).expect("it fits");
    bench.worker_mut(worker).clock();
    bench.run();
    ticket
}

/// All workers do an iteration; they are done with it.
fn round(bench: &mut Bench, workers: usize) {
    let tickets: Vec<Ticket> =
        (0..workers).map(|worker| iterate(bench, worker, (worker + 1) as f32)).collect();
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
        bench.worker_mut(worker).redeem(ticket);
    }
}

fn assert_all_hold_what_servers_published(bench: &Bench, workers: usize) {
    let published = bench.published(W, ELEMENTS);
    for worker in 0..workers {
        assert_eq!(bench.worker(worker).values(W), published, "worker {worker}");
    }
}

/// Frames that ask for parameters, or answer.
pub(super) fn pulls(bench: &Bench) -> usize {
    [Kind::Pull, Kind::Params].iter().map(|kind| bench.tally.frames(*kind)).sum()
}

#[test]
fn everybody_gets_every_version_and_nobody_pulls() {
    for tree in TREES {
        let mut bench = started(broadcast(4, 2, "bsp", tree));
        for step in 1..=3 {
            round(&mut bench, 4);
            let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - 2.5 * step as f32).collect();
            assert_eq!(bench.published(W, ELEMENTS), expected);
            assert_all_hold_what_servers_published(&bench, 4);
        }
        assert_eq!(pulls(&bench), 0);
    }
}

/// A worker whose push is acknowledged reads it, also where the version that has it is still on its way, and where the codec has left
/// some of it out.
#[test]
fn a_pull_at_once_brings_what_the_shards_have_whatever_the_replica_has() {
    for (tree, codec) in all(&["none", "topk:0.2", "f16"]) {
        for spec in [TableSpec::dense("w", [ELEMENTS as u64]), TableSpec::sparse("w", ELEMENTS as u64, 1)] {
            let mut config = broadcast(3, 2, "bsp", tree);
            config.policy = config.policy.with(Axis::AnswerCodec, codec);
            let mut bench = Bench::new(config, 1);
            let is_sparse = spec.rows;
            bench.start(&[(spec, vec![0.0; ELEMENTS])]);
            let (reader, rows): (_, Vec<u32>) = (bench.worker_node(2), (0..ELEMENTS as u32).collect());
            for worker in 0..3 {
                let (now, values) = (bench.now(), [2.0; ELEMENTS]);
                let gradient = match is_sparse {
                    true => Gradient::Rows { rows: &rows, values: &values },
                    false => Gradient::Dense(&values),
                };
                bench.worker_mut(worker).push(now, W, gradient, false).expect("it fits");
                bench.worker_mut(worker).clock();
                if worker == 2 {
                    // Versions do not come to the reader.
                    let others: Vec<_> = [0, 1]
                        .iter()
                        .flat_map(|of| [bench.worker_node(*of), bench.shard_node(*of)])
                        .collect();
                    others.iter().for_each(|other| bench.world.hold(*other, reader));
                }
                bench.run();
            }
            let now = bench.now();
            let options = PullOptions { rows: None, now: true };
            let ticket = bench.worker_mut(2).pull(now, W, options).expect("a pull");
            assert_eq!(bench.outcome(2, ticket), None);
            bench.thaw();
            assert_eq!(bench.outcome(2, ticket), Some(Ok(())), "{}", bench.explain(2, ticket));
            let rows = bench.worker_mut(2).redeem(ticket);
            let read = if is_sparse { rows } else { bench.worker(2).values(W).to_vec() };
            assert_eq!(read, [-2.0; ELEMENTS], "{tree}, {codec}");
        }
    }
}

/// What a codec leaves out of a version stays on the server, once, and goes with a later one.
#[test]
fn what_a_codec_makes_of_a_version_is_what_everybody_has_and_the_server_too() {
    for (tree, codec) in all(&["topk:0.2", "dvf:delta=3", "f16", "int8", "lossless+lz4", "onebit"]) {
        let mut config = broadcast(3, 2, "bsp", tree);
        config.policy = config.policy.with(Axis::AnswerCodec, codec);
        let mut bench = started(config);
        assert_all_hold_what_servers_published(&bench, 3);
        for _ in 0..40 {
            round(&mut bench, 3);
            assert_all_hold_what_servers_published(&bench, 3);
        }
        let error = (0..ELEMENTS).map(|i| (bench.worker(0).values(W)[i] - (i as f32 - 80.0)).abs());
        let largest = error.fold(0.0f32, f32::max);
        assert!(largest < 20.0, "{codec}: {largest} of what 40 steps of 2 should be");
    }
}

#[test]
fn a_server_holds_one_copy_whatever_the_number_of_receivers() {
    let memory = |workers: u32, codec: &str| {
        let mut config = broadcast(workers, 1, "bsp", "star");
        config.policy = config.policy.with(Axis::AnswerCodec, codec).with(Axis::Chunk, "16KB");
        let mut bench = Bench::new(config, 1);
        bench.start(&[(TableSpec::dense("w", [1 << 16]), vec![0.0; 1 << 16])]);
        bench.shard(0).memory_bytes()
    };
    for codec in ["none", "topk:0.01"] {
        assert_eq!(memory(2, codec), memory(12, codec), "{codec}");
    }
}

#[test]
fn a_receiver_goes_on_where_it_was_after_its_connection_broke() {
    for (tree, codec) in all(&["none", "topk:0.3"]) {
        let mut config = broadcast(3, 2, "bsp", tree);
        config.policy = config.policy.with(Axis::AnswerCodec, codec);
        let mut bench = started(config);
        for step in 0..8 {
            if step % 2 == 1 {
                bench.reset(bench.worker_node(step % 3), bench.shard_node(step % 4));
                bench.pass(0.5);
            }
            round(&mut bench, 3);
            assert_all_hold_what_servers_published(&bench, 3);
        }
    }
}

/// The connection breaks when some chunks of a version are on their way.
#[test]
fn a_version_of_which_a_part_was_lost_is_whole_in_the_end() {
    for (codec, delivered) in [("none", 1), ("topk:0.3", 1), ("none", 2), ("topk:0.3", 3)] {
        let mut config = broadcast(2, 1, "bsp", "star");
        config.policy = config.policy.with(Axis::AnswerCodec, codec);
        let mut bench = started(config);
        round(&mut bench, 2);
        let first = iterate(&mut bench, 0, 1.0);
        let (shard, worker) = (bench.shard_node(0), bench.worker_node(0));
        bench.world.hold(shard, worker);
        let second = iterate(&mut bench, 1, 2.0);
        bench.deliver(shard, worker, delivered);
        bench.reset(shard, worker);
        bench.thaw();
        bench.pass(1.0);
        for (worker, ticket) in [first, second].into_iter().enumerate() {
            assert_eq!(
                bench.outcome(worker, ticket),
                Some(Ok(())),
                "{codec}: {}",
                bench.explain(worker, ticket)
            );
        }
        assert_all_hold_what_servers_published(&bench, 2);
    }
}

#[test]
fn a_worker_blocks_when_its_clock_is_too_far_ahead_of_its_version() {
    let mut bench = started(broadcast(2, 1, "ssp:s=2", "star"));
    let ahead: Vec<Ticket> = (0..3).map(|_| iterate(&mut bench, 0, 1.0)).collect();
    let done: Vec<bool> = ahead.iter().map(|&ticket| bench.outcome(0, ticket).is_some()).collect();
    assert_eq!(done, [true, true, false], "after its third iteration it needs version 1");
    let slow = iterate(&mut bench, 1, 1.0);
    assert_eq!((bench.outcome(1, slow), bench.outcome(0, ahead[2])), (Some(Ok(())), Some(Ok(()))));
    // Version 1 has what the fast worker pushed early, too.
    assert_eq!(bench.published(W, ELEMENTS)[0], -2.0);
    for worker in 0..2 {
        let now = bench.now();
        let ticket = bench.worker_mut(worker).pull(now, W, PullOptions::default()).expect("it is dense");
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
    }
    assert_all_hold_what_servers_published(&bench, 2);
}

#[test]
fn a_worker_that_is_far_behind_under_asp_is_sent_nothing_more_until_it_has_caught_up() {
    for codec in ["none", "topk:0.3"] {
        let mut config = broadcast(2, 1, "asp", "star");
        config.policy = config.policy.with(Axis::AnswerCodec, codec);
        let mut bench = started(config);
        let (shards, slow) = ([0, 1].map(|shard| bench.shard_node(shard)), bench.worker_node(1));
        shards.into_iter().for_each(|shard| bench.world.hold(shard, slow));
        for _ in 0..30 {
            iterate(&mut bench, 0, 1.0);
            iterate(&mut bench, 1, 1.0);
        }
        let updates = |&shard| bench.world.unread(shard, slow).filter(|header| header.kind == Kind::Update);
        let frames: usize = shards.iter().map(|shard| updates(shard).count()).sum();
        // Seven chunks are a version.
        assert_eq!(frames, 7 * limits::MAX_VERSIONS_UNSEEN as usize, "{codec}");
        bench.thaw();
        bench.pass(1.0);
        let last = iterate(&mut bench, 1, 0.0);
        assert_eq!(bench.outcome(1, last), Some(Ok(())));
        assert_eq!(bench.worker(1).values(W), bench.published(W, ELEMENTS), "{codec}");
    }
}

#[test]
fn a_worker_that_joins_gets_a_snapshot_and_then_the_stream() {
    for (tree, codec) in all(&["none", "topk:0.3"]) {
        let mut config = broadcast(2, 2, "bsp", tree);
        config.policy = config.policy.with(Axis::AnswerCodec, codec);
        let mut bench = started(config);
        (0..5).for_each(|_| round(&mut bench, 2));
        let late = bench.add_worker();
        bench.run();
        let spec = TableSpec::dense("w", [ELEMENTS as u64]);
        bench.worker_mut(late).declare(spec, vec![7.0; ELEMENTS]).expect("a table");
        let now = bench.now();
        let start = bench.worker_mut(late).start(now).expect("starts once");
        bench.run();
        if bench.outcome(late, start).is_none() {
            // It takes part from the round after the open one on.
            let tickets = [0, 1].map(|worker| iterate(&mut bench, worker, 1.0));
            for (worker, ticket) in tickets.into_iter().enumerate() {
                assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
            }
        }
        assert_eq!(bench.outcome(late, start), Some(Ok(())), "{}", bench.explain(late, start));
        for _ in 0..5 {
            round(&mut bench, 3);
            assert_all_hold_what_servers_published(&bench, 3);
        }
    }
}

#[test]
fn streams_go_on_by_other_codecs_when_these_are_switched() {
    for tree in TREES {
        let mut bench = started(broadcast(3, 2, "bsp", tree));
        for codec in ["topk:0.3", "none", "f16", "dvf:delta=1", "none"] {
            round(&mut bench, 3);
            let policies = Policies::of([(Axis::AnswerCodec, codec)]);
            bench.set(PolicyOverride::new("*", policies));
            for _ in 0..3 {
                round(&mut bench, 3);
                assert_all_hold_what_servers_published(&bench, 3);
            }
        }
    }
}

/// In a chain each shard sends a version once, and so does each worker but the last.
#[test]
fn workers_pass_on_what_they_get() {
    let mut bench = started(broadcast(5, 1, "bsp", "chain"));
    let before = bench.tally.frames(Kind::Update);
    round(&mut bench, 5);
    assert_eq!(bench.tally.frames(Kind::Update) - before, 7 * 5);
    let unread = |bench: &Bench, from, to| bench.world.unread(from, to).count();
    // The first worker of the chain does not read, and nobody behind it gets anything.
    let (shards, first) = ([0, 1].map(|shard| bench.shard_node(shard)), bench.worker_node(0));
    shards.into_iter().for_each(|shard| bench.world.hold(shard, first));
    let tickets: Vec<Ticket> = (0..5).map(|worker| iterate(&mut bench, worker, 1.0)).collect();
    assert!(tickets.iter().enumerate().all(|(worker, ticket)| bench.outcome(worker, *ticket).is_none()));
    assert!(shards.iter().all(|&shard| unread(&bench, shard, first) > 0));
    bench.thaw();
    bench.run();
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
    }
    assert_all_hold_what_servers_published(&bench, 5);
}

#[test]
fn those_behind_a_relay_that_dies_get_what_they_missed_from_elsewhere() {
    for codec in ["none", "topk:0.3"] {
        for dying in 0..3 {
            let mut config = broadcast(4, 2, "bsp", "chain");
            config.policy = config.policy.with(Axis::AnswerCodec, codec);
            let mut bench = started(config);
            round(&mut bench, 4);
            let (relay, next) = (bench.worker_node(dying), bench.worker_node(dying + 1));
            // It has a version that it did not pass on.
            bench.world.hold(relay, next);
            let tickets: Vec<Ticket> = (0..4).map(|worker| iterate(&mut bench, worker, 1.0)).collect();
            assert_eq!(bench.outcome(dying + 1, tickets[dying + 1]), None);
            bench.isolate(relay);
            bench.pass(1.0);
            for worker in (0..4).filter(|worker| *worker != dying) {
                let ticket = tickets[worker];
                assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
            }
            bench.pass(5.0);
            let others: Vec<usize> = (0..4).filter(|worker| *worker != dying).collect();
            for _ in 0..3 {
                let tickets: Vec<(usize, Ticket)> =
                    others.iter().map(|&worker| (worker, iterate(&mut bench, worker, 1.0))).collect();
                for (worker, ticket) in tickets {
                    assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{:?}", bench.log());
                    assert_eq!(bench.worker(worker).values(W), bench.published(W, ELEMENTS), "{codec}");
                }
            }
        }
    }
}

/// It is connected, and says that it lives.
#[test]
fn a_relay_that_passes_nothing_on_is_gone_around() {
    let mut bench = started(broadcast(4, 2, "bsp", "chain"));
    round(&mut bench, 4);
    let (relay, next) = (bench.worker_node(1), bench.worker_node(2));
    bench.world.hold(relay, next);
    let tickets: Vec<Ticket> = (0..4).map(|worker| iterate(&mut bench, worker, 1.0)).collect();
    assert_eq!((bench.outcome(2, tickets[2]), bench.outcome(3, tickets[3])), (None, None));
    bench.pass(6.0);
    for (worker, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
    }
    let is_told = |line: &&str| line.contains("worker 2 does not get what worker 1 should pass on");
    assert!(bench.log().iter().any(is_told), "{:?}", bench.log());
    for _ in 0..3 {
        round(&mut bench, 4);
        assert_all_hold_what_servers_published(&bench, 4);
    }
}

/// Nobody waits for anything there: it would train on what it has for ever.
#[test]
fn a_relay_that_passes_nothing_on_is_gone_around_under_asp_too() {
    let mut bench = started(broadcast(3, 1, "asp", "chain"));
    let (relay, next) = (bench.worker_node(0), bench.worker_node(1));
    bench.world.hold(relay, next);
    for _ in 0..3 {
        round(&mut bench, 3);
        bench.pass(3.0);
    }
    round(&mut bench, 3);
    bench.pass(1.0);
    for worker in 0..3 {
        let now = bench.now();
        let ticket = bench.worker_mut(worker).pull(now, W, PullOptions::default()).expect("it is dense");
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
    }
    assert_all_hold_what_servers_published(&bench, 3);
}

#[test]
fn who_waits_goes_on_when_another_model_lets_it() {
    let mut bench = started(broadcast(2, 1, "bsp", "star"));
    let ticket = iterate(&mut bench, 0, 1.0);
    assert_eq!(bench.outcome(0, ticket), None);
    bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, "ssp:s=3")])));
    bench.run();
    assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
}

/// A slow worker keeps everybody waiting; that is no fault of those who pass streams on.
#[test]
fn relays_are_not_gone_around_when_there_is_nothing_to_pass_on() {
    let mut bench = started(broadcast(4, 2, "bsp", "chain"));
    let tickets: Vec<Ticket> = (0..3).map(|worker| iterate(&mut bench, worker, 1.0)).collect();
    bench.pass(30.0);
    assert!(!bench.log().iter().any(|line| line.contains("should pass on")), "{:?}", bench.log());
    let last = iterate(&mut bench, 3, 1.0);
    for (worker, ticket) in tickets.into_iter().chain([last]).enumerate() {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())));
    }
}

#[test]
fn a_table_that_is_broadcast_has_one_model_on_all_servers() {
    let registry = paramill_core::registry::Registry::builtin();
    let mut config = broadcast(2, 2, "bsp", "star");
    let policies = Policies::of([(Axis::Sync, "asp")]);
    config.overrides.push(PolicyOverride { server: Some(ServerId(1)), ..PolicyOverride::new("*", policies) });
    let why = config.check_tables(&registry, &[TableSpec::dense("w", [10])]).unwrap_err().to_string();
    assert!(why.contains("a worker goes on by one model; leave out `server`"), "{why}");
}

#[test]
fn what_cannot_be_broadcast_is_refused_before_the_job_starts() {
    let rows = [TableSpec::sparse("rows", 10, 2)];
    let dense = [TableSpec::dense("w", [10])];
    // In chunks of 32 bytes, as these jobs have them.
    let many = [TableSpec::sparse("rows", 5 << 20, 2)];
    for (sync, tables, expected) in [
        (
            "bsp",
            &many,
            "it has 1310720 chunks, and of a table of rows that is broadcast at most 1048576 are listed",
        ),
        ("pssp:s=3,c=0.5", &rows, "needs to know more; use bsp, ssp, asp or drop"),
        ("pssp:s=3,c=0.5", &dense, "needs to know more; use bsp, ssp, asp or drop"),
        ("psp:c=2,b=0.5", &dense, "needs to know more"),
        ("bsp:overlap=false", &dense, "there are no pulls where versions are broadcast"),
    ] {
        let registry = paramill_core::registry::Registry::builtin();
        let config = broadcast(2, 2, sync, "star");
        let why = config.check_tables(&registry, tables).unwrap_err().to_string();
        assert!(why.contains(expected), "{sync}: {why}");
    }
}

/// Nobody waits longer than for its connections: those behind it go to the shards, and back to it.
#[test]
fn a_relay_that_is_started_anew_passes_streams_on_at_once() {
    for codec in ["none", "topk:0.3"] {
        let mut config = broadcast(4, 2, "bsp", "chain");
        config.policy = config.policy.with(Axis::AnswerCodec, codec);
        let mut bench = started(config);
        let mut ranks = vec![0, 1, 2, 3];
        for attempt in 0..4 {
            let all = ranks.clone();
            for _ in 0..2 {
                let tickets: Vec<(usize, Ticket)> =
                    all.iter().map(|&worker| (worker, iterate(&mut bench, worker, 1.0))).collect();
                for (worker, ticket) in tickets {
                    assert_eq!(
                        bench.outcome(worker, ticket),
                        Some(Ok(())),
                        "{}",
                        bench.explain(worker, ticket)
                    );
                    assert_eq!(bench.worker(worker).values(W), bench.published(W, ELEMENTS));
                }
            }
            // The second one of the chain dies in the middle of an iteration.
            let others: Vec<usize> = ranks.iter().copied().filter(|worker| *worker != ranks[1]).collect();
            let tickets: Vec<(usize, Ticket)> =
                others.iter().map(|&worker| (worker, iterate(&mut bench, worker, 1.0))).collect();
            bench.isolate(bench.worker_node(ranks[1]));
            bench.pass(0.3);
            let process = super::processes::worker(bench.now(), 10 + attempt, Some(1), None);
            ranks[1] = bench.add(process);
            bench.pass(0.1);
            let spec = TableSpec::dense("w", [ELEMENTS as u64]);
            bench.worker_mut(ranks[1]).declare(spec, vec![7.0; ELEMENTS]).expect("a table");
            let now = bench.now();
            let start = bench.worker_mut(ranks[1]).start(now).expect("starts once");
            bench.pass(0.5);
            for (worker, ticket) in tickets {
                assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
            }
            assert_eq!(bench.outcome(ranks[1], start), Some(Ok(())), "{}", bench.explain(ranks[1], start));
        }
        let is_told = |line: &&str| line.contains("should pass on");
        assert!(!bench.log().iter().any(is_told), "{:?}", bench.log());
    }
}
