//! Readers: they receive versions of all tables as they are broadcast, and nobody waits for them.

use super::bench::{Bench, COORDINATOR};
use super::{W, job};
use paramill_core::coordinator::JobConfig;
use paramill_core::limits;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::role::Role;
use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, ConnectionId, NodeId, TableId};
use paramill_core::wire::frame::{Form, Piece, Update};
use paramill_core::worker::{Gradient, PullOptions, Ticket, WorkerError};

pub(super) const ELEMENTS: [usize; 2] = [50, 23];
pub(super) const TABLES: [TableId; 2] = [W, TableId(1)];
const TREES: [&str; 4] = ["star", "chain", "rotated:degree=2", "auto"];
const CODECS: [&str; 4] = ["none", "topk:0.3", "f16", "lossless+lz4"];

pub(super) fn config(tree: &str, codec: &str) -> JobConfig {
    let mut config = job(2, 2, "bsp", "sgd:lr=1");
    config.policy = config.policy.with(Axis::Broadcast, tree).with(Axis::AnswerCodec, codec);
    config
}

/// A job of two workers, two servers with two cores each, and two tables, that runs.
pub(super) fn started(config: JobConfig) -> Bench {
    let mut bench = Bench::new(config, 2);
    let table = |name: &str, elements: usize| {
        let initial = (0..elements).map(|i| i as f32).collect();
        (TableSpec::dense(name, [elements as u64]), initial)
    };
    bench.start(&[table("w", ELEMENTS[0]), table("b", ELEMENTS[1])]);
    bench
}

/// A reader comes; its place among the workers.
pub(super) fn add_reader(bench: &mut Bench) -> usize {
    let reader = super::processes::reader(bench.now(), bench.worker_count());
    let place = bench.add(reader);
    let now = bench.now();
    let ticket = bench.worker_mut(place).start(now).expect("it starts once");
    bench.run();
    assert_eq!(bench.outcome(place, ticket), Some(Ok(())), "{}", bench.explain(place, ticket));
    place
}

/// The two workers do an iteration.
pub(super) fn round(bench: &mut Bench) {
    let mut tickets: Vec<(usize, Ticket)> = Vec::new();
    for worker in 0..2 {
        let now = bench.now();
        for (table, elements) in TABLES.into_iter().zip(ELEMENTS) {
            let gradient: Vec<f32> = (0..elements).map(|i| ((i + worker) % 5) as f32 * 0.37).collect();
            let role = bench.worker_mut(worker);
            tickets.push((worker, role.push(now, table, Gradient::Dense(&gradient), true).expect("it fits")));
        }
        bench.worker_mut(worker).clock();
        bench.run();
    }
    for (worker, ticket) in tickets {
        assert_eq!(bench.outcome(worker, ticket), Some(Ok(())), "{}", bench.explain(worker, ticket));
        bench.worker_mut(worker).redeem(ticket);
    }
}

pub(super) fn published(bench: &Bench) -> Vec<Vec<f32>> {
    TABLES.into_iter().zip(ELEMENTS).map(|(table, elements)| bench.published(table, elements)).collect()
}

/// The version of a reader, and its values.
pub(super) fn staged(bench: &Bench, reader: usize) -> (Option<Clock>, Vec<Vec<f32>>) {
    let role = bench.worker(reader);
    let values = TABLES.into_iter().map(|table| role.staged(table).unwrap_or_default().to_vec());
    (role.staged_version(), values.collect())
}

#[test]
fn a_reader_has_every_version_whole_and_nobody_notices_it() {
    for tree in TREES {
        for codec in CODECS {
            let mut bench = started(config(tree, codec));
            (0..3).for_each(|_| round(&mut bench));
            let readers = [add_reader(&mut bench), add_reader(&mut bench)];
            let epoch = bench.coordinator().status(bench.now()).epoch;
            for version in 3..20 {
                for reader in readers {
                    assert_eq!(staged(&bench, reader), (Some(version), published(&bench)), "{tree} {codec}");
                }
                round(&mut bench);
            }
            bench.pass(1.0);
            let status = bench.coordinator().status(bench.now());
            assert_eq!((status.epoch, status.workers.len()), (epoch, 2));
            let versions: Vec<_> = status.readers.iter().map(|it| (it.reader, it.version)).collect();
            assert_eq!(versions, [(0, Some(20)), (1, Some(20))]);
            assert!(status.phase.contains("running with 2 workers; 2 readers"), "{}", status.phase);
            assert_eq!(bench.log(), Vec::<&str>::new());
        }
    }
}

/// What one shard has sent waits for the others; the values that are there stay those of one version.
#[test]
fn a_version_is_not_shown_before_all_shards_have_sent_it() {
    for codec in CODECS {
        let mut bench = started(config("star", codec));
        let reader = add_reader(&mut bench);
        round(&mut bench);
        let before = staged(&bench, reader);
        assert_eq!(before, (Some(1), published(&bench)));
        let (late, node) = (bench.shard_node(2), bench.worker_node(reader));
        bench.world.hold(late, node);
        for version in 2..=4 {
            round(&mut bench);
            assert_eq!(staged(&bench, reader), before, "{codec}: version {version}");
        }
        let now = bench.now();
        let wait = bench.worker_mut(reader).await_version(now, 4).expect("it reads");
        assert_eq!(bench.outcome(reader, wait), None);
        bench.world.release(late, node);
        bench.run();
        assert_eq!(bench.outcome(reader, wait), Some(Ok(())));
        assert_eq!(staged(&bench, reader), (Some(4), published(&bench)), "{codec}");
        assert_eq!(bench.worker(reader).memory_bytes(), memory_of_replicas(&bench, reader));
    }
}

/// The memory of a reader that holds nothing back.
fn memory_of_replicas(bench: &Bench, reader: usize) -> usize {
    let mut other = started(config("star", "none"));
    let idle = add_reader(&mut other);
    assert_eq!(
        bench.worker(reader).staged_version().is_some(),
        other.worker(idle).staged_version().is_some()
    );
    other.worker(idle).memory_bytes()
}

/// A reader that takes nothing for long is sent no more, and then gets what it missed.
#[test]
fn a_reader_that_is_far_behind_catches_up() {
    for codec in CODECS {
        let mut bench = started(config("star", codec));
        let reader = add_reader(&mut bench);
        let (late, node) = (bench.shard_node(1), bench.worker_node(reader));
        bench.world.hold(late, node);
        let rounds = 5 * limits::MAX_VERSIONS_UNSEEN;
        (0..rounds).for_each(|_| round(&mut bench));
        assert_eq!(bench.worker(reader).staged_version(), Some(0));
        bench.world.release(late, node);
        bench.run();
        round(&mut bench);
        assert_eq!(staged(&bench, reader), (Some(rounds + 1), published(&bench)), "{codec}");
    }
}

#[test]
fn readers_come_and_go_and_the_job_goes_on() {
    for tree in TREES {
        let mut bench = started(config(tree, "topk:0.3"));
        let first = add_reader(&mut bench);
        let second = add_reader(&mut bench);
        round(&mut bench);
        let now = bench.now();
        bench.world.crash(bench.worker_node(first), now);
        bench.run();
        let left = bench.worker_mut(second).leave(now);
        bench.run();
        assert_eq!(bench.outcome(second, left), Some(Ok(())));
        round(&mut bench);
        let third = add_reader(&mut bench);
        round(&mut bench);
        assert_eq!(staged(&bench, third), (Some(3), published(&bench)));
        // Its connections break, those to the shards and that to the coordinator.
        for node in [bench.shard_node(0), bench.shard_node(3), COORDINATOR] {
            bench.reset(bench.worker_node(third), node);
            round(&mut bench);
        }
        bench.pass(1.0);
        assert_eq!(staged(&bench, third), (Some(6), published(&bench)));
        let status = bench.coordinator().status(bench.now());
        let readers: Vec<u32> = status.readers.iter().map(|reader| reader.reader).collect();
        assert_eq!((readers, status.restarts), (vec![2], 0), "it keeps its number");
    }
}

#[test]
fn a_reader_follows_when_a_codec_is_switched() {
    let mut bench = started(config("star", "topk:0.3"));
    let reader = add_reader(&mut bench);
    round(&mut bench);
    let (late, node) = (bench.shard_node(1), bench.worker_node(reader));
    bench.world.hold(late, node);
    round(&mut bench);
    bench.set(PolicyOverride::new("w", Policies::of([(Axis::AnswerCodec, "onebit")])));
    bench.world.release(late, node);
    bench.run();
    for version in 3..6 {
        round(&mut bench);
        assert_eq!(staged(&bench, reader), (Some(version), published(&bench)));
    }
}

/// What a reader is told that this job refuses.
fn refusal(mut bench: Bench) -> String {
    let reader = super::processes::reader(bench.now(), bench.worker_count());
    let reader = bench.add(reader);
    let now = bench.now();
    let ticket = bench.worker_mut(reader).start(now).expect("it starts once");
    bench.run();
    let Some(Err(WorkerError::Refused { message, .. })) = bench.outcome(reader, ticket) else { panic!() };
    message
}

#[test]
fn a_job_that_broadcasts_nothing_cannot_be_read() {
    let message = refusal(started(config("none", "none")));
    assert!(message.contains("table `w` is not broadcast"), "{message}");
    assert!(message.contains("--broadcast star"), "{message}");
}

#[test]
fn tables_of_rows_cannot_be_read_yet() {
    let mut bench = Bench::new(config("star", "none"), 2);
    bench.start(&[(TableSpec { rows: true, ..TableSpec::dense("e", [20, 4]) }, vec![0.0; 80])]);
    let message = refusal(bench);
    assert!(message.contains("table `e` is one of rows"), "{message}");
}

#[test]
fn a_reader_that_comes_before_the_job_starts_waits_for_it() {
    let mut bench = Bench::new(config("star", "none"), 2);
    let early = super::processes::reader(bench.now(), 9);
    let reader = bench.add(early);
    let now = bench.now();
    let ticket = bench.worker_mut(reader).start(now).expect("it starts once");
    bench.pass(2.0);
    assert_eq!(bench.outcome(reader, ticket), None);
    for worker in 0..2 {
        for (name, elements) in [("w", ELEMENTS[0]), ("b", ELEMENTS[1])] {
            let spec = TableSpec::dense(name, [elements as u64]);
            bench.worker_mut(worker).declare(spec, vec![1.5; elements]).expect("a table");
        }
        let now = bench.now();
        bench.worker_mut(worker).start(now).expect("it starts once");
    }
    bench.pass(1.0);
    assert_eq!(bench.outcome(reader, ticket), Some(Ok(())));
    assert_eq!(staged(&bench, reader), (Some(0), published(&bench)));
}

/// The plan comes with the connection, whatever the application does meanwhile.
#[test]
fn a_reader_that_is_asked_late_has_the_plan_already() {
    let mut bench = started(config("star", "none"));
    let reader = super::processes::reader(bench.now(), bench.worker_count());
    let reader = bench.add(reader);
    bench.pass(1.0);
    let now = bench.now();
    let ticket = bench.worker_mut(reader).start(now).expect("it starts once");
    assert_eq!(bench.outcome(reader, ticket), Some(Ok(())));
    round(&mut bench);
    assert_eq!(staged(&bench, reader), (Some(1), published(&bench)));
}

#[test]
fn a_reader_has_no_say() {
    let mut bench = started(config("star", "none"));
    let reader = add_reader(&mut bench);
    let (now, gradient) = (bench.now(), [1.0; ELEMENTS[0]]);
    let role = bench.worker_mut(reader);
    let refused = [
        role.push(now, W, Gradient::Dense(&gradient), false).err(),
        role.pull(now, W, PullOptions::default()).err(),
        role.barrier(now, "end").err(),
        role.declare(TableSpec::dense("x", [1]), vec![0.0]).err(),
    ];
    assert!(refused.iter().all(|error| matches!(error, Some(WorkerError::Order(_)))), "{refused:?}");
    assert!(bench.worker_mut(0).await_version(now, 0).is_err(), "a worker pulls");
    // A frame in its name is refused by the server.
    let before = bench.parameters(W, ELEMENTS[0]);
    let mut frame = paramill_core::wire::frame::Push {
        subject: paramill_core::wire::frame::Subject { epoch: 1, table: W, request: 1 },
        clock: 0,
        samples: 1,
        piece: Piece { chunk: 0, sequence: 0, is_last: true },
        form: Form::PLAIN,
        has_absent: false,
        want_params: false,
        reply_place: None,
    }
    .header(32);
    frame.payload_bytes = 32;
    let shard = bench.shard_node(0);
    let name = NodeId::Worker(paramill_core::types::WorkerId::reader(0)).into();
    bench.shard_mut(0).handle_frame(now, name, &frame, &[0; 32]);
    bench.run();
    assert_eq!(bench.parameters(W, ELEMENTS[0]), before, "{shard}");
    assert!(bench.shard(0).report(now).is_some_and(|report| report.refused == 1));
}

/// A chunk whose bits were changed on the way: the digest tells, and the stream is fetched anew.
#[test]
fn a_flipped_bit_is_found_and_repaired() {
    let mut bench = started(config("star", "none"));
    let reader = add_reader(&mut bench);
    let (shard, node) = (bench.shard_node(0), bench.worker_node(reader));
    bench.world.hold(shard, node);
    round(&mut bench);
    // The first frame of the version is lost, and one with another bit comes in its place.
    let header = *bench.world.unread(shard, node).next().expect("a frame is held");
    let update = Update::decode(&header);
    let mut values = bench.published(update.table, ELEMENTS[0])[..8].to_vec();
    values[3] = f32::from_bits(values[3].to_bits() ^ 1 << 9);
    let payload: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (now, from) = (bench.now(), ConnectionId::Node(shard));
    bench.worker_mut(reader).handle_frame(now, from, &header, &payload);
    bench.world.release(shard, node);
    bench.run();
    assert!(
        bench.log().iter().any(|line| line.contains("is not what server 0 core 0 broadcast as version 1"))
    );
    assert_eq!(staged(&bench, reader), (Some(1), published(&bench)));
    round(&mut bench);
    assert_eq!(staged(&bench, reader), (Some(2), published(&bench)));
}

/// When what is fetched anew is damaged each time, the reader says so and ends.
#[test]
fn damage_without_end_is_an_error() {
    let mut bench = started(config("star", "none"));
    let reader = add_reader(&mut bench);
    let (shard, node) = (bench.shard_node(0), bench.worker_node(reader));
    let now = bench.now();
    let wait = bench.worker_mut(reader).await_version(now, 100).expect("it reads");
    bench.world.hold(shard, node);
    round(&mut bench);
    let updates: Vec<Update> = bench.world.unread(shard, node).map(Update::decode).collect();
    for repairs in 0..=limits::MAX_REPAIRS {
        assert!(repairs == limits::MAX_REPAIRS || bench.outcome(reader, wait).is_none(), "{repairs} repairs");
        for update in &updates {
            // The digest that comes with it is that of other values.
            let wrong =
                if update.digest != 0 && update.table == W { update.digest ^ 2 } else { update.digest };
            let elements = ELEMENTS[update.table.0 as usize];
            let start = 8 * update.piece.chunk as usize;
            let values = &bench.published(update.table, elements)[start..elements.min(start + 8)];
            let payload: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let header = Update { digest: wrong, ..*update }.header(payload.len());
            let now = bench.now();
            bench.worker_mut(reader).handle_frame(now, ConnectionId::Node(shard), &header, &payload);
        }
        assert_eq!(bench.worker(reader).staged_version(), None);
    }
    let Some(Err(WorkerError::Damaged(why))) = bench.outcome(reader, wait) else { panic!("it goes on") };
    assert!(why.contains("table `w` is not what server 0 core 0 broadcast as version 1"), "{why}");
    assert!(bench.worker(reader).staged(W).is_err(), "what is damaged is not shown");
}
