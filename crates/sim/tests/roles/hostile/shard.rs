//! A shard and workers that are members, but not honest.

use super::words::{aggregate, control_frame, data_frame};
use super::*;
use paramill_core::limits;
use paramill_core::policy::{Policies, PolicyOverride};
use paramill_core::role::Lost;
use paramill_core::server::Shard;
use paramill_core::types::AggregatorId;
use paramill_core::wire::frame::{Form, Piece, Push, Subject};
use paramill_core::wire::{Change, Flags, Header, Hello, Member, Party, Plan, ServedShard, ack};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Act {
    Say(u32, Frame),
    /// An aggregator says something; its numbered frames are in order unless `skip` says otherwise.
    Aggregate {
        frame: Frame,
        skip: bool,
    },
    LoseAggregator,
    Disconnect(u32),
    Switch(usize),
    Die(u32),
    Pass(u64),
}

const MODELS: [&str; 11] = [
    "bsp",
    "asp",
    "ssp:s=1",
    "drop:n=2",
    "psp:c=2,tau1=1s",
    "pssp:s=1,alpha=significance",
    "remote:near",
    "quorum:q=0.5",
    "quorum:q=0.75,late=weigh",
    "quorum:q=0.5,grace=10ms,late=carry",
    "when:pull=gap < 2,push=count >= 2,step=round,late=apply",
];

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        30 => (0u32..4, data_frame()).prop_map(|(worker, frame)| Act::Say(worker, frame)),
        6 => (0u32..4, prop_oneof![verdict(), control_frame()]).prop_map(|(worker, frame)| Act::Say(worker, frame)),
        1 => verdict().prop_map(|frame| Act::Aggregate { frame, skip: false }),
        20 => (aggregate(1), prop::bool::weighted(0.05)).prop_map(|(frame, skip)| Act::Aggregate { frame, skip }),
        1 => Just(Act::LoseAggregator),
        2 => (0u32..4).prop_map(Act::Disconnect),
        2 => (0..MODELS.len()).prop_map(Act::Switch),
        1 => (1u32..4).prop_map(Act::Die),
        1 => (0u64..2_000_000_000).prop_map(Act::Pass),
    ]
}

/// A word on one of the first pulls that a shard asked about, or may yet ask about.
fn verdict() -> impl Strategy<Value = Frame> {
    let holds = prop::option::of(any::<bool>());
    (0u32..3, 0u64..20, holds).prop_map(|(table, number, holds)| {
        message(&Control::Verdict { table: TableId(table), number, holds })
    })
}

fn parameters(shard: &Shard) -> Vec<f32> {
    let mut values = Vec::new();
    for table in [W, ROWS] {
        shard.for_each_chunk(table, |_, chunk| values.extend_from_slice(chunk));
    }
    values
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_is_refused_changes_nothing_and_memory_has_a_bound(
        acts in prop::collection::vec(act(), 1..150),
        model in 0..MODELS.len(),
        ranked: bool,
    ) {
        let order = if ranked { Order::Ranked } else { Order::Arrival };
        let mut bench = started(config(4, MODELS[model], order));
        let (mut now, shard) = (bench.now(), bench.shard_mut(0));
        let at_rest = shard.memory_bytes();
        let mut epoch = Plan::FIRST_EPOCH;
        let aggregator = NodeId::Aggregator(AggregatorId(0));
        let from = Party::Aggregator { process: ProcessId(5), id: Some(AggregatorId(0)) };
        let hello = Hello { job: "test".into(), from, incarnation: 5, to: None };
        prop_assert!(shard.accept(now, &hello).is_ok());
        let mut next = 1;
        for act in acts {
            let is_ahead = matches!(&act, Act::Aggregate { frame, .. } if frame.header.epoch > epoch);
            let outputs = match act {
                Act::Aggregate { mut frame, skip } => {
                    let is_numbered = !(1..=u64::from(limits::MAX_WORKERS)).contains(&frame.header.landing)
                        && matches!(frame.header.kind, Kind::Push | Kind::Group);
                    if is_numbered && !skip && !is_ahead {
                        frame.header.request = next;
                        next += 1;
                    }
                    say(shard, now, aggregator, &frame)
                }
                Act::LoseAggregator => {
                    shard.handle_disconnected(now, aggregator.into(), &Lost::Broken("x".into()));
                    drain(shard)
                }
                Act::Say(rank, frame) => {
                    let (worker, before) = (WorkerId(rank), parameters(shard));
                    let was = shard.memory_bytes();
                    let outputs = say(shard, now, NodeId::Worker(worker), &frame);
                    if outputs.iter().any(|output| is_refusal(output, worker)) {
                        // A push_pull is two requests: its push may count though its pull is refused.
                        let took = outputs.iter().any(|output| {
                            matches!(output, Output::Send { frame, .. } if frame.header.kind == Kind::PushAck)
                        });
                        prop_assert!(took || parameters(shard) == before, "{:?}", frame.header);
                        prop_assert!(took || shard.memory_bytes() == was, "{:?}", frame.header);
                    }
                    outputs
                }
                Act::Disconnect(rank) => {
                    shard.handle_disconnected(now, NodeId::Worker(WorkerId(rank)).into(), &Lost::Broken("x".into()));
                    drain(shard)
                }
                Act::Switch(model) => {
                    let sync = MODELS[model].to_owned();
                    let rule = PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)]));
                    epoch += 1;
                    let switch = Control::Change { epoch, change: Change::Policy(rule) };
                    say(shard, now, NodeId::Coordinator, &message(&switch))
                }
                Act::Die(rank) => {
                    epoch += 1;
                    let left = Control::Change { epoch, change: Change::Left { worker: WorkerId(rank) } };
                    say(shard, now, NodeId::Coordinator, &message(&left))
                }
                Act::Pass(nanoseconds) => {
                    now = Time(now.0 + nanoseconds);
                    shard.handle_timeout(now);
                    drain(shard)
                }
            };
            prop_assert_eq!(shard.check(), Ok(()));
            // Nothing that others say makes a server stop, or call somebody. It hangs up on an aggregator that is ahead of it.
            let stays = |output: &Output| match output {
                Output::Send { .. } | Output::Log(..) => true,
                Output::Disconnect { connection } => is_ahead && *connection == aggregator.into(),
                _ => false,
            };
            prop_assert!(outputs.iter().all(stays), "{outputs:?}");
            // Four gradients under way, and the rounds that may be open, each no larger than the tables.
            let rounds = limits::MAX_ROUNDS_AHEAD as usize + 2;
            prop_assert!(shard.memory_bytes() <= at_rest * (1 + rounds + 4 * rounds), "{}", shard.memory_bytes());
            prop_assert!(parameters(shard).iter().all(|value| value.is_finite()));
        }
    }

    #[test]
    fn a_shard_survives_a_coordinator_that_says_anything(
        frames in prop::collection::vec(control_frame(), 1..40),
        has_plan: bool,
    ) {
        let mut bench = if has_plan { started(config(3, "bsp", Order::Arrival)) } else { Bench::new(config(3, "bsp", Order::Arrival), 1) };
        bench.run();
        let (now, shard) = (bench.now(), bench.shard_mut(0));
        for frame in frames {
            say(shard, now, NodeId::Coordinator, &frame);
            shard.handle_timeout(now);
            drain(shard);
            prop_assert_eq!(shard.check(), Ok(()));
        }
    }
}

fn pull(clock: u64, request: u64) -> Frame {
    let header = Header { epoch: 1, clock, request, ..Header::new(Kind::Pull) };
    Frame { header, body: Body::Empty }
}

#[test]
fn a_worker_has_so_many_pulls_waiting_and_no_more() {
    let mut bench = started(config(2, "bsp", Order::Arrival));
    let (now, shard) = (bench.now(), bench.shard_mut(0));
    let worker = WorkerId(1);
    for request in 0..limits::MAX_PENDING_PULLS as u64 {
        assert_eq!(say(shard, now, NodeId::Worker(worker), &pull(1, request)), [], "it waits");
    }
    for clock in [1, 2] {
        let outputs = say(shard, now, NodeId::Worker(worker), &pull(clock, 999));
        assert!(outputs.len() == 1 && is_refusal(&outputs[0], worker), "{outputs:?}");
    }
    // Of another table, of another worker, and after a new connection it can ask.
    let mut other_table = pull(1, 7);
    other_table.header.table = ROWS;
    assert_eq!(say(shard, now, NodeId::Worker(worker), &other_table), []);
    assert_eq!(say(shard, now, NodeId::Worker(WorkerId(0)), &pull(1, 7)), []);
    shard.handle_disconnected(now, NodeId::Worker(worker).into(), &Lost::Broken("reset".into()));
    assert_eq!(say(shard, now, NodeId::Worker(worker), &pull(1, 7)), []);
}

#[test]
fn a_pull_from_the_far_future_is_one_like_others_and_rows_ascend() {
    let mut bench = started(config(2, "asp", Order::Arrival));
    let (now, shard) = (bench.now(), bench.shard_mut(0));
    let worker = WorkerId(1);
    // A table that is only pulled has no clock of its own to compare with.
    for clock in [u64::MAX, limits::MAX_CLOCK_SKIP + 2] {
        let outputs = say(shard, now, NodeId::Worker(worker), &pull(clock, 1));
        assert!(
            outputs.len() == 3 && !outputs.iter().any(|output| is_refusal(output, worker)),
            "{outputs:?}"
        );
    }
    for (rows, is_fine) in
        [(vec![0u32, 1, 4], true), (vec![1, 0], false), (vec![2, 2], false), (vec![5], false)]
    {
        let mut frame = pull(0, 1);
        frame.header.table = ROWS;
        frame.header.flags = Flags::ROWS;
        let bytes: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        (frame.header.rows, frame.header.payload_bytes) = (rows.len() as u32, bytes.len() as u32);
        frame.body = Body::Bytes(bytes);
        let outputs = say(shard, now, NodeId::Worker(worker), &frame);
        assert_eq!(!is_refusal(&outputs[0], worker), is_fine, "{rows:?}");
    }
}

/// One frame of a dense push of the three chunks on the first shard (4, 4 and 2 elements), with all elements equal.
fn push(clock: u64, request: u64, sequence: u32, value: f32) -> Frame {
    let subject = Subject { epoch: 1, table: W, request };
    let piece = Piece { chunk: sequence, sequence, is_last: sequence == 2 };
    let push = Push {
        subject,
        clock,
        samples: 1,
        piece,
        form: Form::PLAIN,
        has_absent: false,
        want_params: true,
        reply_place: None,
    };
    let elements = if piece.is_last { 2 } else { 4 };
    let bytes: Vec<u8> = [value; 4][..elements].iter().flat_map(|value| value.to_le_bytes()).collect();
    Frame { header: push.header(bytes.len()), body: Body::Bytes(bytes) }
}

/// The workers and chunks of the parameters that are sent, and the requests that are acknowledged.
fn sent(outputs: &[Output]) -> (Vec<(u32, u32)>, Vec<u64>) {
    let (mut params, mut acknowledged) = (Vec::new(), Vec::new());
    for output in outputs {
        match output {
            Output::Send { to: ConnectionId::Node(NodeId::Worker(to)), frame, .. }
                if frame.header.kind == Kind::Params =>
            {
                params.push((to.0, frame.header.part));
            }
            Output::Send { frame, .. } if frame.header.kind == Kind::PushAck => {
                let payload = role_payload(&frame.body);
                acknowledged.extend(ack::requests(&frame.header, payload).expect("a list"));
            }
            _ => {}
        }
    }
    (params, acknowledged)
}

#[test]
fn an_answer_to_a_push_that_is_refused_is_not_begun_early() {
    let mut bench = started(config(3, "bsp", Order::Arrival));
    let (now, shard) = (bench.now(), bench.shard_mut(0));
    let worker = |rank| NodeId::Worker(WorkerId(rank));
    assert_eq!(say(shard, now, worker(0), &push(0, 10, 0, 1.0)), []);
    assert_eq!(say(shard, now, worker(1), &push(0, 11, 0, 1.0)), []);
    let refused = say(shard, now, worker(0), &push(0, 10, 1, f32::NAN));
    assert!(refused.len() == 1 && is_refusal(&refused[0], WorkerId(0)), "{refused:?}");
    // The chunk has its three gradients with this one.
    let outputs = say(shard, now, worker(2), &push(0, 12, 0, 1.0));
    assert_eq!(sent(&outputs), (vec![(1, 0), (2, 0)], vec![]));
}

#[test]
fn a_push_is_acknowledged_by_its_answer_or_by_the_heartbeat_and_never_by_both() {
    let mut bench = started(config(2, "bsp", Order::Arrival));
    let (now, shard) = (bench.now(), bench.shard_mut(0));
    let worker = |rank| NodeId::Worker(WorkerId(rank));
    for sequence in 0..3 {
        assert_eq!(say(shard, now, worker(0), &push(0, 10, sequence, 1.0)), []);
    }
    let later = Time(now.0 + limits::HEARTBEAT_EVERY.as_nanos() as u64);
    for expected in [vec![10], vec![]] {
        shard.handle_timeout(later);
        assert_eq!(sent(&drain(shard)), (vec![], expected));
    }
    for sequence in 0..2 {
        let outputs = say(shard, later, worker(1), &push(0, 11, sequence, 1.0));
        assert_eq!(sent(&outputs), (vec![(0, sequence), (1, sequence)], vec![]));
    }
    let outputs = say(shard, later, worker(1), &push(0, 11, 2, 1.0));
    assert_eq!(sent(&outputs), (vec![(0, 2), (1, 2)], vec![]), "the answers are acknowledgements");
}

#[test]
fn where_nobody_waits_for_all_a_push_is_acknowledged_while_its_pull_waits() {
    let mut bench = started(config(2, "ssp:s=0", Order::Arrival));
    let (now, shard) = (bench.now(), bench.shard_mut(0));
    let from = NodeId::Worker(WorkerId(0));
    for sequence in 0..2 {
        assert_eq!(say(shard, now, from, &push(0, 10, sequence, 1.0)), []);
    }
    assert_eq!(sent(&say(shard, now, from, &push(0, 10, 2, 1.0))), (vec![], vec![10]));
}

#[test]
fn a_push_counts_although_the_pull_that_comes_with_it_is_refused() {
    let mut bench = started(config(2, "bsp", Order::Arrival));
    let (now, shard) = (bench.now(), bench.shard_mut(0));
    let from = NodeId::Worker(WorkerId(1));
    for request in 0..limits::MAX_PENDING_PULLS as u64 {
        assert_eq!(say(shard, now, from, &pull(1, request)), [], "it waits");
    }
    for sequence in 0..2 {
        assert_eq!(say(shard, now, from, &push(0, 999, sequence, 1.0)), []);
    }
    let outputs = say(shard, now, from, &push(0, 999, 2, 1.0));
    assert_eq!(sent(&outputs[..1]), (vec![], vec![999]), "ahead of the refusal");
    assert!(outputs.len() == 2 && is_refusal(&outputs[1], WorkerId(1)), "{outputs:?}");
}

#[test]
fn a_shard_serves_no_plan_that_gives_it_to_another_process() {
    let refusal = |process| {
        let mut bench = Bench::new(config(1, "bsp", Order::Arrival), 1);
        bench.run();
        let server = ServerId(0);
        let part = paramill_core::placement::Part { server, start: 0, len: 4 };
        let shard = ServedShard::original(shard_id(0), process, "shard:0".into());
        let plan = Plan {
            epoch: 1,
            tables: vec![TableSpec::dense("w", [4])],
            parts: vec![vec![part]],
            whole: vec![],
            shards: vec![shard],
            workers: 1,
            members: vec![Member::original(WorkerId(0), 1)],
            policy: config(1, "bsp", Order::Arrival).policy,
            overrides: vec![],
            switches: vec![],
            seed: 0,
            resumed: None,
        };
        let plan = message(&Control::Plan(Box::new(plan)));
        let now = bench.now();
        let outputs = say(bench.replica_mut(0), now, NodeId::Coordinator, &plan);
        outputs.into_iter().find_map(|output| match output {
            Output::Stop { error } => error,
            _ => None,
        })
    };
    assert_eq!(refusal(ProcessId(100)), None);
    let error = refusal(ProcessId(7)).expect("another process serves it");
    assert!(error.contains("the plan gives server 0 core 0 to process 7, and this is process 64"), "{error}");
}
