//! A worker and servers, or a coordinator, that are not what they should be.

use super::words::{answer, control_frame, data_frame};
use super::*;
use paramill_core::role::Lost;
use paramill_core::wire::{Flags, Header, Member, Plan, ServedShard};
use paramill_core::worker::{Gradient, PullOptions, WorkerError};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Debug, Clone)]
enum Act {
    Server(u32, Frame),
    Coordinator(Frame),
    /// The connection to a server breaks and stands again.
    Reset(u32),
    Push,
    Pull,
    PullRows,
}

const MODELS: [&str; 6] =
    ["psp:c=2,b=0.5", "bsp:overlap=false", "quorum:q=0.5", "ssp:s=2", "drop:n=1", "pssp:s=1,c=0.5"];

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        20 => (0u32..2, answer()).prop_map(|(server, frame)| Act::Server(server, frame)),
        3 => control_frame().prop_map(Act::Coordinator),
        1 => data_frame().prop_map(Act::Coordinator),
        1 => (0u32..2).prop_map(Act::Reset),
        3 => Just(Act::Push),
        2 => Just(Act::Pull),
        2 => Just(Act::PullRows),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_worker_survives_servers_and_coordinators_that_say_anything(
        acts in prop::collection::vec(act(), 1..100),
        model in 0..MODELS.len(),
        started_before: bool,
    ) {
        let sync = MODELS[model];
        let mut bench = if started_before {
            started(config(2, sync, Order::Arrival))
        } else {
            Bench::new(config(2, sync, Order::Arrival), 1)
        };
        bench.run();
        let (now, worker) = (bench.now(), bench.worker_mut(0));
        let at_rest = worker.memory_bytes();
        let mut pushes = 0;
        for act in acts {
            match act {
                Act::Server(server, frame) => drop(say(worker, now, NodeId::Shard(shard_id(server)), &frame)),
                Act::Coordinator(frame) => drop(say(worker, now, NodeId::Coordinator, &frame)),
                Act::Reset(server) => {
                    let peer = NodeId::Shard(shard_id(server));
                    worker.handle_disconnected(now, peer.into(), &Lost::Broken("reset".into()));
                    let welcome = paramill_core::wire::Welcome { you: NodeId::Worker(WorkerId(0)), incarnation: 1, session: 0 };
                    worker.handle_connected(now, peer.into(), &welcome);
                }
                // What the application asks for may be refused; it must not be surprised either.
                Act::Push => {
                    pushes += u32::from(worker.push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).is_ok());
                    worker.clock();
                }
                Act::Pull => drop(worker.pull(now, W, PullOptions::default())),
                Act::PullRows => {
                    drop(worker.pull(now, ROWS, PullOptions { rows: Some(&[1, 7]), now: false }));
                }
            }
            worker.handle_timeout(now);
            drain(worker);
            prop_assert_eq!(worker.check(), Ok(()));
            // A gradient under way takes a page; peers make it no more than there are pushes.
            prop_assert!(worker.memory_bytes() <= at_rest + (pushes as usize + 4) * 4096);
        }
    }
}

fn from_server(kind: Kind, request: u64) -> Header {
    Header { epoch: 1, request, ..Header::new(kind) }
}

/// The requests of the push frames among these outputs, with the server they go to.
fn pushes(outputs: &[Output]) -> Vec<(ConnectionId, Header)> {
    let push = |output: &Output| match output {
        Output::Send { to, frame, .. } if frame.header.kind == Kind::Push => Some((*to, frame.header)),
        _ => None,
    };
    outputs.iter().filter_map(push).collect()
}

#[test]
fn frames_outlive_the_request_that_a_server_settles_too_early() {
    for refuses in [false, true] {
        let mut bench = started(config(2, "bsp", Order::Arrival));
        let (now, worker) = (bench.now(), bench.worker_mut(0));
        let ticket = worker.push(now, W, Gradient::Dense(&[3.0; ELEMENTS]), false).unwrap();
        // A driver whose socket is full keeps the frames, and asks for their bytes later.
        let kept: Vec<Output> = std::iter::from_fn(|| worker.poll_output()).collect();
        let at_work = worker.memory_bytes();
        for (to, header) in pushes(&kept) {
            let mut answer = match refuses {
                true => {
                    let fault = paramill_core::wire::Fault {
                        cause: paramill_core::wire::Cause::TooFarAhead,
                        message: "not now".into(),
                    };
                    control::frame(Kind::Error, &fault)
                }
                false => Frame { header: from_server(Kind::PushAck, 0), body: Body::Empty },
            };
            answer.header.request = header.request;
            say(worker, now, to, &answer);
        }
        assert_eq!(worker.outcome(ticket).unwrap().is_ok(), !refuses);
        for output in &kept {
            let Output::Send { frame, .. } = output else { continue };
            let bytes = worker.payload(&frame.body);
            assert!(bytes.chunks_exact(4).all(|value| value == 3f32.to_le_bytes()), "{:?}", frame.header);
        }
        drop(kept);
        assert!(worker.memory_bytes() <= at_work, "{} after {at_work}", worker.memory_bytes());
        // A refused clock can be pushed again, one that was taken cannot.
        let again = worker.push(now, W, Gradient::Dense(&[3.0; ELEMENTS]), false);
        assert_eq!(again.is_ok(), refuses);
    }
}

#[test]
fn a_server_speaks_for_itself_only() {
    let mut bench = started(config(2, "asp", Order::Arrival));
    let (now, worker) = (bench.now(), bench.worker_mut(0));
    let ticket = worker.push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), false).unwrap();
    let outputs = drain(worker);
    let other = |one: ConnectionId| NodeId::Shard(shard_id(u32::from(one.shard() == Some(shard_id(0)))));
    for (to, header) in pushes(&outputs) {
        let ack = Frame { header: from_server(Kind::PushAck, header.request), body: Body::Empty };
        say(worker, now, other(to), &ack);
        assert_eq!(worker.outcome(ticket), None, "acknowledged by who was not asked");
    }
    for (to, header) in pushes(&outputs) {
        let ack = Frame { header: from_server(Kind::PushAck, header.request), body: Body::Empty };
        say(worker, now, to, &ack);
    }
    assert_eq!(worker.outcome(ticket), Some(Ok(())));
}

/// Under `quorum` a worker goes on with the version that it is answered with. It added 1 to whatever a server said.
#[test]
fn a_version_at_the_end_of_time_is_no_overflow() {
    let mut bench = started(config(2, "quorum:q=0.5", Order::Arrival));
    let (now, worker) = (bench.now(), bench.worker_mut(0));
    for _ in 0..3 {
        let ticket = worker.push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).expect("it fits");
        let outputs = drain(worker);
        let requests: BTreeMap<ConnectionId, Header> = pushes(&outputs).into_iter().collect();
        for (to, push) in requests {
            let first = 3 * u32::from(to.shard() == Some(shard_id(1)));
            for (part, elements) in [(0, 4), (1, 4), (2, 2)] {
                let flags = if part == 2 { Flags::LAST } else { Flags(0) };
                let (version, payload_bytes) = (u64::MAX, 4 * elements);
                let header = Header {
                    chunk: first + part,
                    part,
                    flags,
                    version,
                    payload_bytes,
                    ..from_server(Kind::Params, push.request)
                };
                say(worker, now, to, &Frame { header, body: Body::Bytes(vec![0; payload_bytes as usize]) });
            }
        }
        assert_eq!(worker.outcome(ticket), Some(Ok(())));
        worker.redeem(ticket);
        worker.clock();
        assert_eq!(worker.check(), Ok(()));
    }
    assert!(worker.current_clock() > 2, "it left iterations out");
}

#[test]
fn half_an_answer_is_an_error() {
    let mut bench = started(config(1, "asp", Order::Arrival));
    let (now, worker) = (bench.now(), bench.worker_mut(0));
    let ticket = worker.pull(now, ROWS, PullOptions { rows: Some(&[0, 1]), now: false }).unwrap();
    let outputs = drain(worker);
    let Some(Output::Send { to, frame, .. }) = outputs.first() else { panic!("a pull is sent") };
    let bytes: Vec<u8> = [1f32, 2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut header = from_server(Kind::Params, frame.header.request);
    header.flags = Flags::LAST.with(Flags::ROWS);
    header.payload_bytes = bytes.len() as u32;
    say(worker, now, *to, &Frame { header, body: Body::Bytes(bytes) });
    assert!(matches!(worker.outcome(ticket), Some(Err(WorkerError::Shape { .. }))));
}

#[test]
fn a_plan_after_a_failed_start_is_not_taken() {
    let mut bench = Bench::new(config(1, "asp", Order::Arrival), 1);
    bench.run();
    let (now, worker) = (bench.now(), bench.worker_mut(0));
    worker.declare(TableSpec::dense("w", [4]), vec![0.0; 4]).unwrap();
    let ticket = worker.start(now).unwrap();
    say(worker, now, NodeId::Coordinator, &message(&Control::Stop { error: Some("no".into()) }));
    assert!(worker.outcome(ticket).unwrap().is_err());
    worker.redeem(ticket);
    let part = paramill_core::placement::Part { server: ServerId(0), start: 0, len: 4 };
    let plan = Plan {
        epoch: 1,
        tables: vec![TableSpec::dense("w", [4])],
        parts: vec![vec![part]],
        whole: vec![],
        shards: vec![ServedShard::original(shard_id(0), ProcessId(100), "shard:0".into())],
        workers: 1,
        members: vec![Member::original(WorkerId(0), 1)],
        policy: Policy::default().with(Axis::Chunk, "16B"),
        overrides: vec![],
        switches: vec![],
        seed: 0,
        resumed: None,
    };
    let outputs = say(worker, now, NodeId::Coordinator, &message(&Control::Plan(Box::new(plan))));
    assert_eq!(outputs, []);
}
