//! What readers cannot do: change trees or thresholds, be sent more than others, speak in each other's names.

use super::W;
use super::bench::{Bench, COORDINATOR};
use super::processes::JOB;
use super::readers::{ELEMENTS, TABLES, add_reader, config, published, round, staged, started};
use paramill_core::address::Addresses;
use paramill_core::bandwidth::{Probe, Reading};
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::role::{Body, Output, Role};
use paramill_core::types::{Clock, ConnectionId, NodeId, ShardId, TableId, Time, WorkerId};
use paramill_core::wire::frame::Update;
use paramill_core::wire::{Control, Header, Hello, Kind, Party, Position, control};

/// A codec whose threshold follows the links of versions.
const AWARE: &str = "dvf:low=1e-9,up=1e9,need=50";
/// A train that was delayed.
const DELAYED: Reading = Reading::Probe { rate: 6_250_000, is_delayed: true, is_disturbed: false };

fn reader(number: u32) -> ConnectionId {
    NodeId::Worker(WorkerId::reader(number)).into()
}

/// A role hears something from a peer.
fn tell(role: &mut impl Role, now: Time, from: ConnectionId, message: &Control) {
    let frame = control::frame(Kind::Control, message);
    let Body::Bytes(payload) = frame.body else { panic!("a control frame carries bytes") };
    role.handle_frame(now, from, &frame.header, &payload);
}

/// What a role is about to do, which then does not happen.
fn outputs(role: &mut impl Role) -> Vec<Output> {
    std::iter::from_fn(|| role.poll_output()).collect()
}

/// The control messages among them, and to whom they go.
fn said(outputs: &[Output]) -> Vec<(ConnectionId, Control)> {
    let message = |output: &Output| match output {
        Output::Send { to, frame, .. } if frame.header.kind == Kind::Control => {
            let Body::Bytes(payload) = &frame.body else { panic!("a control frame carries bytes") };
            Some((*to, control::decode("control message", payload).expect("it was made by a role")))
        }
        _ => None,
    };
    outputs.iter().filter_map(message).collect()
}

fn relayed(bench: &Bench) -> Vec<u64> {
    (0..2).map(|worker| bench.worker(worker).report().bytes_relayed).collect()
}

/// Whether each shard's threshold is the higher one.
fn lacks_room(bench: &Bench) -> Vec<bool> {
    let report = |shard: usize| bench.shard(shard).report(bench.now()).and_then(|report| report.links);
    (0..4).map(|shard| report(shard).expect("its threshold follows links").lacks_room).collect()
}

/// A reader is no relay, whatever it says, and its word on others does not count.
#[test]
fn a_reader_changes_no_tree() {
    for tree in ["chain", "tree:degree=1,depth=2", "rotated:degree=2"] {
        let mut bench = started(config(tree, "none"));
        round(&mut bench);
        let before = relayed(&bench);
        round(&mut bench);
        let each_round: Vec<u64> =
            relayed(&bench).iter().zip(&before).map(|(now, then)| now - then).collect();
        let places: Vec<usize> = (0..3).map(|_| add_reader(&mut bench)).collect();
        let (now, addresses) = (bench.now(), Addresses::from("reader:0"));
        let coordinator = bench.coordinator_mut();
        tell(
            coordinator,
            now,
            reader(0),
            &Control::Reached { addresses: Some(addresses), is_aggregated: false },
        );
        for relay in [WorkerId(0), WorkerId(1)] {
            tell(coordinator, now, reader(0), &Control::Unreachable { relay });
        }
        bench.run();
        // Readers that leave free what they took of relays.
        for place in places {
            bench.world.crash(bench.worker_node(place), now);
        }
        bench.run();
        let before = relayed(&bench);
        round(&mut bench);
        let now: Vec<u64> = relayed(&bench).iter().zip(&before).map(|(now, then)| now - then).collect();
        assert_eq!(now, each_round, "{tree}");
        let log = bench.log();
        assert!(!log.iter().any(|line| line.contains("leaf") || line.contains("raise degree")), "{log:?}");
    }
}

/// Readers get streams from workers that relay less than others, and from the servers when there is none.
#[test]
fn relays_with_room_take_readers_and_shards_the_rest() {
    let mut bench = started(config("chain", "none"));
    let readers = [add_reader(&mut bench), add_reader(&mut bench)];
    let before = relayed(&bench);
    round(&mut bench);
    let sent: Vec<u64> = relayed(&bench).iter().zip(&before).map(|(now, then)| now - then).collect();
    assert!(sent[0] > 0 && sent[0] == sent[1], "the last worker serves one reader: {sent:?}");
    for reader in readers {
        assert_eq!(staged(&bench, reader), (Some(1), published(&bench)));
    }
    bench.pass(1.0);
    let status = bench.coordinator().status(bench.now());
    let seen: Vec<(&str, Option<Clock>, String, u32)> = status
        .receivers
        .iter()
        .map(|it| (&*it.receiver, it.version, it.takes_from.join(" and "), it.followers))
        .collect();
    let expected = [
        ("worker 0", "the servers", 1),
        ("worker 1", "worker 0", 1),
        ("reader 0", "worker 1", 0),
        ("reader 1", "the servers", 0),
    ];
    assert_eq!(seen, expected.map(|(receiver, from, count)| (receiver, Some(1), from.to_owned(), count)));
    // One whose relay is gone has what it had, and goes on with the servers.
    bench.isolate(bench.worker_node(1));
    bench.pass(20.0);
    bench.heal();
    let alone = |bench: &mut Bench| {
        let now = bench.now();
        for (table, elements) in TABLES.into_iter().zip(ELEMENTS) {
            let gradient = vec![0.25; elements];
            let role = bench.worker_mut(0);
            role.push(now, table, paramill_core::worker::Gradient::Dense(&gradient), true).expect("it fits");
        }
        bench.worker_mut(0).clock();
        bench.run();
    };
    (0..2).for_each(|_| alone(&mut bench));
    for reader in readers {
        assert_eq!(staged(&bench, reader), (Some(3), published(&bench)));
    }
}

#[test]
fn a_reader_that_leaves_is_hung_up_on_and_only_what_is_told_of_it_is_kept() {
    let mut bench = started(config("star", "none"));
    add_reader(&mut bench);
    let now = bench.now();
    assert!(bench.coordinator().status(now).phase.contains("; 1 reader"), "one");
    assert!(!bench.coordinator().status(now).phase.contains("1 readers"), "one");
    let coordinator = bench.coordinator_mut();
    tell(coordinator, now, reader(0), &Control::Leave);
    let outputs = outputs(coordinator);
    let left =
        outputs.iter().position(|output| matches!(output, Output::Send { to, .. } if *to == reader(0)));
    let closed = outputs
        .iter()
        .position(|output| matches!(output, Output::Disconnect { connection } if *connection == reader(0)));
    assert!(left.is_some() && left < closed, "{outputs:?}");
    assert_eq!(said(&outputs), [(reader(0), Control::Left)]);
    assert!(coordinator.status(now).readers.is_empty());
}

/// What a reader says of links is nothing to the thresholds of those who train.
#[test]
fn thresholds_do_not_follow_readers() {
    let mut bench = started(config("chain", AWARE));
    let place = add_reader(&mut bench);
    let now = bench.now();
    let probe = Probe { train: 1, index: 0, sent: 0, rate: 6_250_000, padding: vec![0; 100] };
    let refused = |bench: &Bench| bench.shard(0).report(now).expect("it has a number").refused;
    let before = refused(&bench);
    let messages =
        [Control::Probe(probe), Control::Measured(DELAYED), Control::Behind { lacking: Some(DELAYED) }];
    for message in &messages {
        tell(bench.shard_mut(0), now, reader(0), message);
    }
    bench.run();
    assert_eq!(refused(&bench), before + 3);
    // Nor what it says to a worker that it follows.
    for worker in 0..2 {
        (0..3).for_each(|_| tell(bench.worker_mut(worker), now, reader(0), &Control::Measured(DELAYED)));
    }
    bench.run();
    assert_eq!(lacks_room(&bench), [false; 4]);
    // A reader probes nobody, and nobody probes it.
    let sent = bench.tally.frames(Kind::Control);
    bench.world.crash(bench.worker_node(0), now);
    bench.world.crash(bench.worker_node(1), now);
    bench.pass(0.4);
    let idle = bench.tally.frames(Kind::Control) - sent;
    assert!(idle < 30, "{idle} control messages of a reader and four shards that have nothing to say");
    assert!(bench.worker(place).staged_version().is_some());
}

/// The links to those behind a worker are watched with the need that holds, and as long as they are there.
#[test]
fn links_behind_a_relay_are_known_after_a_switch_and_forgotten_with_the_follower() {
    let mut bench = started(config("chain", AWARE));
    round(&mut bench);
    let follower = ConnectionId::Node(NodeId::Worker(WorkerId(1)));
    let slow = |bench: &mut Bench| {
        let now = bench.now();
        (0..2).for_each(|_| tell(bench.worker_mut(0), now, follower, &Control::Measured(DELAYED)));
        bench.run();
    };
    slow(&mut bench);
    assert_eq!(lacks_room(&bench), [true; 4]);
    let other = AWARE.replace("need=50", "need=60");
    bench.set(PolicyOverride::new("*", Policies::of([(Axis::AnswerCodec, other.as_str())])));
    assert_eq!(lacks_room(&bench), [false; 4], "nothing is known of the new need");
    slow(&mut bench);
    assert_eq!(lacks_room(&bench), [true; 4]);
    let now = bench.now();
    for shard in 0..4 {
        let NodeId::Shard(shard) = bench.shard_node(shard) else { panic!("a shard") };
        let message = Control::Unsubscribe { shard, tables: TABLES.to_vec() };
        tell(bench.worker_mut(0), now, follower, &message);
    }
    bench.run();
    assert_eq!(lacks_room(&bench), [false; 4], "it gets nothing over that link");
}

/// Positions that name a table again and again would have all of it sent as often.
#[test]
fn a_table_is_asked_for_once() {
    let mut bench = started(config("chain", "none"));
    add_reader(&mut bench);
    let (now, NodeId::Shard(shard)) = (bench.now(), bench.shard_node(0)) else { panic!("a shard") };
    let position = |table| Position { table, epoch: 1, version: None };
    for tables in [vec![W, W], vec![TableId(1), W], vec![W, TableId(1), TableId(1)]] {
        let positions = tables.into_iter().map(position).collect();
        let message = Control::Subscribe { shard, positions, is_question: false };
        tell(bench.shard_mut(0), now, reader(0), &message);
        let from_shard = outputs(bench.shard_mut(0));
        tell(bench.worker_mut(1), now, reader(0), &message);
        let from_worker = outputs(bench.worker_mut(1));
        for outputs in [from_shard, from_worker] {
            let kinds: Vec<Kind> = outputs
                .iter()
                .filter_map(|output| match output {
                    Output::Send { to, frame, .. } if *to == reader(0) => Some(frame.header.kind),
                    _ => None,
                })
                .collect();
            assert_eq!(kinds, [Kind::Error]);
        }
    }
}

/// A process that has a reader's number, and not its incarnation, does not take its place.
#[test]
fn a_reader_is_not_driven_out_by_another_process() {
    let mut bench = started(config("chain", "none"));
    let place = add_reader(&mut bench);
    let now = bench.now();
    let hello = |from| Hello { job: JOB.into(), from, incarnation: 77, to: None };
    let posing = hello(Party::Reader { id: Some(WorkerId::reader(0)) });
    for shard in 0..4 {
        let refusal = bench.shard_mut(shard).accept(now, &posing).expect_err("it is another one");
        assert!(refusal.retry && refusal.reason.contains("another process is reader 0"), "{refusal:?}");
    }
    // The last worker of the chain serves it.
    assert!(bench.worker_mut(1).accept(now, &posing).is_err());
    // Nor is a reader a worker, or the other way round.
    for from in [Party::Reader { id: Some(WorkerId(0)) }, Party::Worker { rank: Some(WorkerId::reader(0)) }] {
        assert!(bench.worker_mut(1).accept(now, &hello(from)).is_err(), "{from:?}");
    }
    round(&mut bench);
    assert_eq!(staged(&bench, place), (Some(1), published(&bench)));
}

/// A stream that has left out versions, beside one that stands at its senders' limit below these: the sender is told to go on,
/// also if both had a version in common before.
#[test]
fn streams_that_have_nothing_in_common_go_on() {
    let mut bench = started(config("star", "none"));
    let place = add_reader(&mut bench);
    let node = bench.worker_node(place);
    (0..4).for_each(|shard| bench.world.hold(bench.shard_node(shard), node));
    bench.world.hold(COORDINATOR, node);
    round(&mut bench);
    let frames: Vec<(NodeId, Header)> = (0..4)
        .map(|shard| bench.shard_node(shard))
        .flat_map(|shard| bench.world.unread(shard, node).map(move |header| (shard, *header)))
        .filter(|(_, header)| header.kind == Kind::Update)
        .collect();
    let give = |bench: &mut Bench, of: &dyn Fn(NodeId) -> bool, version: Clock| {
        for (shard, header) in frames.iter().filter(|(shard, _)| of(*shard)) {
            let payload = vec![0; header.payload_bytes as usize];
            let update = Update { round: version, version, digest: 0, ..Update::decode(header) };
            let (now, from) = (bench.now(), ConnectionId::Node(*shard));
            bench.worker_mut(place).handle_frame(now, from, &update.header(payload.len()), &payload);
        }
    };
    let first = bench.shard_node(0);
    give(&mut bench, &|shard| shard == first, 1);
    give(&mut bench, &|shard| shard == first, 10);
    give(&mut bench, &|shard| shard != first, 1);
    assert_eq!(bench.worker(place).staged_version(), Some(1));
    outputs(bench.worker_mut(place));
    (2..10).for_each(|version| give(&mut bench, &|shard| shard != first, version));
    let seen: Vec<(ShardId, Clock)> = said(&outputs(bench.worker_mut(place)))
        .into_iter()
        .filter_map(|(_, message)| match message {
            Control::Seen { shard, version, .. } => Some((shard, version)),
            _ => None,
        })
        .collect();
    for shard in (1..4).map(|shard| bench.shard_node(shard)) {
        let NodeId::Shard(shard) = shard else { panic!("a shard") };
        assert!(seen.contains(&(shard, 9)), "{shard} waits for ever: {seen:?}");
    }
}
