//! What a hostile peer may say: frames that are nearly right, messages with absurd contents, and noise.

use paramill_core::address::Addresses;
use paramill_core::consistency::{Question, WorkerProgress};
use paramill_core::placement::Part;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::role::{Body, Frame};
use paramill_core::status::{AggregatorReport, ReadsReport, ShardReport, WorkerReport};
use paramill_core::table::{Layer, TableSpec};
use paramill_core::types::{AggregatorId, ProcessId, ServerId, ShardId, TableId, WorkerId};
use paramill_core::waits::{Charge, WaitCause, Waited};
use paramill_core::wire::{
    Cause, Change, Control, DType, Fault, FirstClock, Flags, Header, Hello, IdleWorker, Kind, Member, Party,
    Plan, Position, Relay, Route, ServedShard, control,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::time::Duration;

/// Numbers that are likely to mean something, and the ends of their range.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 0u64..8, 1 => Just(u64::MAX), 1 => Just(u64::MAX - 1), 1 => Just(1 << 32), 1 => any::<u64>()]
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0u32..6, 1 => Just(u32::MAX), 1 => any::<u32>()]
}

const KINDS: [Kind; 12] = [
    Kind::Hello,
    Kind::Welcome,
    Kind::Error,
    Kind::Control,
    Kind::Init,
    Kind::Push,
    Kind::PushAck,
    Kind::Pull,
    Kind::Params,
    Kind::Group,
    Kind::Forget,
    Kind::Update,
];

/// Bytes at an address that floats may have, as a driver's are.
fn aligned(words: Vec<u32>, tail: Vec<u8>) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    bytes.extend(tail);
    bytes
}

fn payload() -> impl Strategy<Value = Vec<u8>> {
    let value = prop_oneof![
        8 => (-4i32..4).prop_map(|value| (value as f32).to_bits()),
        1 => Just(f32::NAN.to_bits()),
        1 => Just(f32::INFINITY.to_bits()),
    ];
    prop_oneof![
        1 => Just(Vec::new()),
        // A chunk of the dense table.
        6 => vec(value.clone(), 4).prop_map(|words| aligned(words, Vec::new())),
        // Rows: their numbers, then their values.
        4 => (vec(0u32..3, 1..3), vec(value, 1..5)).prop_map(|(mut rows, values)| {
            rows.extend(values);
            aligned(rows, Vec::new())
        }),
        2 => (vec(any::<u32>(), 0..12), vec(any::<u8>(), 0..4)).prop_map(|(words, tail)| aligned(words, tail)),
    ]
}

fn header() -> impl Strategy<Value = Header> {
    let kind =
        prop_oneof![3 => prop::sample::select(&KINDS[..]), 5 => Just(Kind::Push), 2 => Just(Kind::Pull)];
    let epoch = prop_oneof![9 => Just(1u32), 1 => any::<u32>()];
    let dtype = prop_oneof![9 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::Bf16)];
    let numbers = (small(), small(), small(), small());
    let numbers = (numbers, number(), number(), number(), number());
    (kind, dtype, 0u8..64, epoch, numbers).prop_map(
        |(kind, dtype, flags, epoch, ((table, chunk, part, rows), clock, version, request, landing))| {
            Header {
                dtype,
                flags: Flags(flags),
                epoch,
                table: TableId(table),
                chunk,
                part,
                rows,
                clock,
                version,
                request,
                landing,
                ..Header::new(kind)
            }
        },
    )
}

/// One frame of a push that would be right, but for what the other strategies do around it.
fn proper_push() -> impl Strategy<Value = Frame> {
    // 0 stands for one sample.
    let samples = prop_oneof![8 => 0u64..3, 1 => 3u64..1000, 1 => number()];
    (0u64..8, 0u32..3, 0u32..2, -3i32..3, samples).prop_map(|(clock, part, server, value, version)| {
        // Each server holds ten of the twenty elements: chunks of 4, 4 and 2.
        let elements = if part == 2 { 2 } else { 4 };
        let last = if part == 2 { Flags::LAST } else { Flags(0) };
        let header = Header {
            flags: last.with(Flags::WANT_PARAMS),
            epoch: 1,
            chunk: server * 3 + part,
            part,
            clock,
            version,
            request: clock,
            ..Header::new(Kind::Push)
        };
        frame(header, aligned(vec![(value as f32).to_bits(); elements], Vec::new()))
    })
}

/// The same from which something is absent: a list of ranges, most of them right, stands before the gradient.
fn absent_push() -> impl Strategy<Value = Frame> {
    let range = (0u32..4, prop_oneof![8 => 1u32..4, 1 => Just(0), 1 => Just(u32::MAX)]);
    (proper_push(), vec(range, 0..3), prop::bool::weighted(0.9)).prop_map(|(push, ranges, is_honest)| {
        let mut words = vec![ranges.len() as u32 + u32::from(!is_honest)];
        words.extend(ranges.into_iter().flat_map(|(start, len)| [start, len]));
        words.resize(words.len().next_multiple_of(16), 0);
        let Body::Bytes(gradient) = push.body else { unreachable!() };
        let whole = words[..3] == [1, 0, gradient.len() as u32 / 4];
        let gradient = if whole && is_honest { Vec::new() } else { gradient };
        let header = Header { flags: push.header.flags.with(Flags::ABSENT), ..push.header };
        frame(header, aligned(words, gradient))
    })
}

/// A push without a gradient, as a worker sends it where its gradient would be dropped: here for any clock.
fn empty_push() -> impl Strategy<Value = Frame> {
    (proper_push(), prop::bool::weighted(0.1)).prop_map(|(push, is_later)| {
        let part = if is_later { push.header.part } else { 0 };
        let flags = Flags::ROWS.with(Flags::LAST).with(push.header.flags);
        frame(Header { flags, part, rows: 0, ..push.header }, Vec::new())
    })
}

/// Data frames: nearly right, or noise that passed the header's checks.
pub(crate) fn data_frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        2 => absent_push(),
        1 => empty_push(),
        3 => (header(), payload()).prop_map(|(header, payload)| frame(header, payload)),
        2 => proper_push(),
    ]
}

fn frame(mut header: Header, payload: Vec<u8>) -> Frame {
    let is_bare = matches!(header.kind, Kind::PushAck | Kind::Forget);
    let payload = if is_bare { Vec::new() } else { payload };
    header.payload_bytes = payload.len() as u32;
    Frame { header, body: Body::Bytes(payload) }
}

/// Control frames: noise, messages with some bytes changed, and messages with absurd contents.
pub(crate) fn control_frame() -> impl Strategy<Value = Frame> {
    let noise = vec(any::<u8>(), 0..64).prop_map(|bytes| frame(Header::new(Kind::Control), bytes));
    let damage = vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    let damaged = (control(), damage).prop_map(|(message, damage)| {
        let Body::Bytes(mut bytes) = control::frame(Kind::Control, &message).body else { unreachable!() };
        for (place, value) in damage {
            let at = place.index(bytes.len());
            bytes[at] = value;
        }
        frame(Header::new(Kind::Control), bytes)
    });
    let whole = control().prop_map(|message| control::frame(Kind::Control, &message));
    prop_oneof![1 => noise, 2 => damaged, 5 => whole]
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => prop::sample::select(&["w", "rows", "end", "*", "", "x"][..]).prop_map(String::from),
        1 => Just("n".repeat(300)),
        1 => Just("\u{1F980}".repeat(10_000)),
    ]
}

fn sync() -> impl Strategy<Value = String> {
    const MODELS: [&str; 11] = [
        "quorum:q=0.5,late=weigh",
        "ssp:s=1,cache=off",
        "bsp",
        "asp",
        "ssp:s=1",
        "psp:c=2,b=0.5",
        "drop:n=2",
        "bsp:overlap=false",
        "nonsense:",
        "",
        "pssp:s=1,c=0.5",
    ];
    prop_oneof![8 => prop::sample::select(&MODELS[..]).prop_map(String::from), 1 => Just("(".repeat(100_000))]
}

/// One policy, if its text can be written down at all.
fn policies(axis: Axis, text: Option<String>) -> Policies {
    let mut policies = Policies::default();
    _ = text.map(|text| policies.set(axis, text));
    policies
}

fn table() -> impl Strategy<Value = TableSpec> {
    let side = prop_oneof![6 => 1u64..9, 1 => Just(0), 1 => Just(u64::MAX), 1 => Just(1 << 33)];
    let policy = prop::option::weighted(0.2, sync()).prop_map(|sync| policies(Axis::Sync, sync));
    let start = prop_oneof![6 => 0u64..9, 1 => Just(u64::MAX)];
    let layer = (name(), start, vec(side.clone(), 0..4)).prop_map(|(name, start, shape)| Layer {
        name,
        start,
        shape,
    });
    let layers = prop_oneof![4 => Just(vec![]), 1 => vec(layer, 1..4)];
    (name(), vec(side, 0..4), any::<bool>(), policy, layers).prop_map(
        |(name, shape, rows, policy, layers)| TableSpec {
            rows,
            policy,
            layers,
            ..TableSpec::dense(name, shape)
        },
    )
}

/// The tables that the honest members declare.
pub(crate) fn honest_tables() -> Vec<TableSpec> {
    vec![TableSpec::dense("w", [20]), TableSpec::sparse("rows", 10, 2)]
}

/// A plan that is right but for a few of its fields.
fn plan() -> impl Strategy<Value = Plan> {
    let part = |server, start, len| Part { server: ServerId(server), start, len };
    let shard = |server, core| {
        ServedShard::original(
            ShardId { server: ServerId(server), core },
            ProcessId(u64::from(server) + 100),
            format!("shard:{server}").into(),
        )
    };
    let honest = Plan {
        epoch: 1,
        tables: honest_tables(),
        parts: vec![vec![part(0, 0, 10), part(1, 10, 10)], vec![part(0, 0, 10), part(1, 10, 10)]],
        whole: vec![],
        shards: vec![shard(0, 0), shard(1, 0)],
        workers: 3,
        members: (0..3).map(|rank| Member::original(WorkerId(rank), u64::from(rank) + 1)).collect(),
        policy: Policy::default().with(Axis::Chunk, "16B"),
        overrides: vec![],
        switches: vec![],
        seed: 0,
        resumed: None,
    };
    let spoil = (0u32..13, number(), small(), table(), sync());
    vec(spoil, 0..3).prop_map(move |spoils| {
        let mut plan = honest.clone();
        for (which, number, small, table, sync) in spoils {
            match which {
                0 => plan.tables.push(table),
                1 => plan.tables[0] = table,
                2 => plan.parts.push(vec![part(small, number, number)]),
                3 => plan.parts.iter_mut().flatten().for_each(|part| part.len = number),
                4 => plan.parts.iter_mut().flatten().for_each(|part| part.server = ServerId(small)),
                5 => plan.shards.push(shard(small, small)),
                6 => plan.shards.clear(),
                7 => _ = plan.policy.set(Axis::Chunk, format!("{}B", u64::from(small) * 4)),
                8 => plan.members.push(Member::original(WorkerId(small), number)),
                9 => _ = plan.policy.set(Axis::Sync, sync),
                10 => _ = plan.policy.set(Axis::Optimizer, sync),
                11 => plan.shards.iter_mut().for_each(|served| served.process = ProcessId(number)),
                _ => plan.parts.clear(),
            }
        }
        plan
    })
}

fn rule() -> impl Strategy<Value = PolicyOverride> {
    let axis = prop::sample::select(Axis::all().collect::<Vec<_>>());
    (name(), prop::option::of(small()), axis, sync()).prop_map(|(table, server, axis, text)| {
        PolicyOverride::new(table, policies(axis, Some(text))).on(server.map(ServerId))
    })
}

fn change() -> impl Strategy<Value = Change> {
    let worker = || small().prop_map(WorkerId);
    prop_oneof![
        (worker(), number()).prop_map(|(worker, incarnation)| Change::Joining { worker, incarnation }),
        (worker(), number()).prop_map(|(worker, clock)| Change::Joined { worker, clock }),
        worker().prop_map(|worker| Change::Left { worker }),
        rule().prop_map(Change::Policy),
    ]
}

fn first_clock() -> impl Strategy<Value = FirstClock> {
    (small(), number(), number()).prop_map(|(worker, incarnation, clock)| FirstClock {
        worker: WorkerId(worker),
        incarnation,
        clock,
    })
}

/// Waiting time as no worker can have it: numbers that are none, causes that are many, the same, or of nobody.
fn waited() -> impl Strategy<Value = Waited> {
    const SECONDS: [f64; 6] = [f64::NAN, f64::INFINITY, -1.0, f64::MAX, 0.0, 1e3];
    let seconds = || prop::sample::select(&SECONDS[..]);
    let cause = (small(), 0u32..4).prop_map(|(number, kind)| match kind {
        0 => WaitCause::Push(WorkerId(number)),
        1 => WaitCause::Server(ServerId(number)),
        2 => WaitCause::Barrier(WorkerId(number)),
        _ => WaitCause::Coordinator,
    });
    let charge = (cause, seconds()).prop_map(|(cause, seconds)| Charge { cause, seconds });
    (seconds(), vec(charge, 0..80), seconds()).prop_map(|(seconds, causes, others)| Waited {
        seconds,
        causes,
        others,
    })
}

fn worker_report() -> impl Strategy<Value = Control> {
    let text = prop_oneof![Just(None), Just(Some("w".repeat(50_000)))];
    (number(), text, waited()).prop_map(|(clock, waiting, waited)| {
        let reads = ReadsReport { waited_s: waited.seconds, at_once: u64::MAX, ..Default::default() };
        Control::WorkerReport(WorkerReport { clock, waiting, waited, reads, ..Default::default() })
    })
}

/// Every message, mostly with contents that its receiver has to look at twice.
pub(crate) fn control() -> impl Strategy<Value = Control> {
    let shard_report = |server| ShardReport {
        shard: ShardId { server: ServerId(server), core: 0 },
        tables: vec![],
        bytes_pushed: u64::MAX,
        bytes_pulled: u64::MAX,
        nonfinite: u64::MAX,
        refused: u64::MAX,
        memory_bytes: u64::MAX,
        links: None,
    };
    let last = || prop::option::of(small().prop_map(WorkerId));
    prop_oneof![
        vec(name(), 0..3).prop_map(|names| Control::Register { addresses: names.into_iter().collect() }),
        vec(table(), 0..4).prop_map(|tables| Control::Declare { tables }),
        Just(Control::Declare { tables: honest_tables() }),
        plan().prop_map(|plan| Control::Plan(Box::new(plan))),
        (0u32..6, change()).prop_map(|(epoch, change)| Control::Change { epoch, change }),
        (0u32..6, vec(first_clock(), 0..3), prop::option::of(0u32..3)).prop_map(|(epoch, joining, lacks)| {
            Control::Entered { epoch, joining, lacks_values: lacks.map(TableId) }
        }),
        Just(Control::PlanQuery),
        worker_report(),
        Just(Control::ReportRequest),
        small().prop_map(move |server| Control::ShardReport(Box::new(shard_report(server)))),
        number().prop_map(|clock| Control::Pushed { clock }),
        (number(), last()).prop_map(|(clock, last)| Control::Go { clock, last }),
        (name(), number()).prop_map(|(name, number)| Control::Barrier { name, number }),
        (name(), last(), prop::option::of(number()))
            .prop_map(|(name, last, version)| Control::BarrierReached { name, last, version }),
        number().prop_map(|until| Control::Idle { until }),
        (number(), vec((small(), number()), 0..3)).prop_map(|(number, idle)| {
            let idle = idle.into_iter();
            let workers = idle.map(|(worker, until)| IdleWorker { worker: WorkerId(worker), until });
            Control::IdleWorkers { number, workers: workers.collect() }
        }),
        (number(), number()).prop_map(|(number, version)| Control::IdleNoted { number, version }),
        last().prop_map(|last| Control::Ready { last }),
        Just(Control::Leave),
        Just(Control::Left),
        Just(Control::StatusQuery),
        rule().prop_map(Control::Set),
        name().prop_map(Control::Done),
        prop::option::of(name()).prop_map(|error| Control::Stop { error }),
        (small(), question()).prop_map(|(table, question)| Control::Question {
            table: TableId(table),
            question: Box::new(question)
        }),
        (small(), number(), prop::option::of(any::<bool>()))
            .prop_map(|(table, number, holds)| Control::Verdict { table: TableId(table), number, holds }),
        streams(),
        number().prop_map(|groups| {
            Control::AggregatorReport(AggregatorReport { groups, ..AggregatorReport::default() })
        }),
    ]
}

/// What is said about streams.
fn streams() -> impl Strategy<Value = Control> {
    let shard = || (small(), small()).prop_map(|(server, core)| ShardId { server: ServerId(server), core });
    let version = || prop::option::of(number());
    let position = (small(), small(), version()).prop_map(|(table, epoch, version)| Position {
        table: TableId(table),
        epoch,
        version,
    });
    let addresses = || prop::option::of(name().prop_map(Addresses::from));
    let relay = (small(), name())
        .prop_map(|(worker, address)| Relay { worker: WorkerId(worker), addresses: address.into() });
    let tables = || vec(small().prop_map(TableId), 0..3);
    let route = (shard(), tables(), prop::option::of(relay)).prop_map(|(shard, tables, relay)| Route {
        shard,
        tables,
        relay,
    });
    prop_oneof![
        (shard(), vec(position, 0..3), any::<bool>()).prop_map(|(shard, positions, is_question)| {
            Control::Subscribe { shard, positions, is_question }
        }),
        (shard(), tables()).prop_map(|(shard, tables)| Control::Unsubscribe { shard, tables }),
        (shard(), small(), number()).prop_map(|(shard, table, version)| Control::Seen {
            shard,
            table: TableId(table),
            version
        }),
        (addresses(), any::<bool>())
            .prop_map(|(addresses, is_aggregated)| Control::Reached { addresses, is_aggregated }),
        vec(route, 0..4).prop_map(Control::Routes),
        small().prop_map(|relay| Control::Unreachable { relay: WorkerId(relay) }),
    ]
}

fn question() -> impl Strategy<Value = Question> {
    let progress = || prop_oneof![-1i64..5, any::<i64>()];
    let workers = vec((small(), progress()), 0..4);
    (number(), name(), number(), small(), progress(), number(), workers).prop_map(
        |(number, condition, deadline_ns, worker, progress, v_train, workers)| Question {
            number,
            condition,
            deadline: Duration::from_nanos(deadline_ns),
            worker: WorkerId(worker),
            progress,
            significance: Some(f64::NAN),
            v_train,
            n: worker,
            count: worker,
            workers: workers
                .into_iter()
                .map(|(rank, progress)| WorkerProgress { worker: WorkerId(rank), progress, interval_s: None })
                .collect(),
        },
    )
}

pub(crate) fn hello() -> impl Strategy<Value = Hello> {
    let rank = || prop::option::of(small());
    let from = prop_oneof![
        3 => rank().prop_map(|rank| Party::Worker { rank: rank.map(WorkerId) }),
        3 => (number(), rank(), small(), small()).prop_map(|(process, server, core, cores)| Party::Shard {
            process: ProcessId(process),
            server: server.map(ServerId),
            core,
            cores
        }),
        1 => Just(Party::Command),
        2 => (number(), rank()).prop_map(|(process, id)| Party::Aggregator { process: ProcessId(process), id: id.map(AggregatorId) }),
        1 => (small(), small(), small(), rank()).prop_map(|(rank, server, core, pushed)| Party::Through {
            rank: WorkerId(rank),
            shard: ShardId { server: ServerId(server), core },
            pushed: pushed.map(u64::from)
        }),
    ];
    let job = prop_oneof![9 => Just("test".to_owned()), 1 => name()];
    (job, from, number()).prop_map(|(job, from, incarnation)| Hello { job, from, incarnation, to: None })
}

/// An answer of a server: an error with any cause but those that end a worker, or anything else.
pub(crate) fn answer() -> impl Strategy<Value = Frame> {
    const CAUSES: [Cause; 5] =
        [Cause::Shape, Cause::NonFinite, Cause::StaleEpoch, Cause::TooFarAhead, Cause::Protocol];
    let error =
        (prop::sample::select(&CAUSES[..]), name(), number()).prop_map(|(cause, message, request)| {
            let mut frame = control::frame(Kind::Error, &Fault { cause, message });
            frame.header.request = request;
            frame
        });
    let kind = prop_oneof![Just(Kind::PushAck), Just(Kind::Params)];
    let nearly = (kind, header(), payload(), 0u64..60)
        .prop_map(|(kind, header, payload, request)| frame(Header { kind, request, ..header }, payload));
    prop_oneof![1 => error, 4 => nearly, 1 => data_frame()]
}

/// What an aggregator may say to a shard whose next numbered frame is `next`: sums, lists of workers, and anything
/// else in a worker's name or in nobody's.
pub(crate) fn aggregate(next: u64) -> impl Strategy<Value = Frame> {
    let push = prop_oneof![3 => proper_push(), 1 => absent_push()];
    let sum = (push, 0u32..4, 0u32..2).prop_map(move |(mut frame, weight, attempt)| {
        let header = Header { rows: weight, part: attempt, request: next, ..frame.header };
        let flags = if header.flags.has(Flags::ABSENT) { Flags::ABSENT } else { Flags(0) };
        frame.header = Header { flags, ..header };
        frame
    });
    let entry = (0u32..5, 0u32..2, number());
    let list = (vec(entry, 0..4), 0u64..8, 0u32..2).prop_map(move |(mut entries, clock, attempt)| {
        entries.sort_by_key(|entry| entry.0);
        let words = |(worker, wants, request): (u32, u32, u64)| {
            [worker, wants, request as u32, (request >> 32) as u32]
        };
        let words: Vec<u32> = entries.into_iter().flat_map(words).collect();
        let header = Header { epoch: 1, clock, part: attempt, request: next, ..Header::new(Kind::Group) };
        frame(header, aligned(words, Vec::new()))
    });
    let named = (data_frame(), 0u32..5).prop_map(|(mut frame, worker)| {
        // An aggregator names the worker that it speaks for by its rank and one.
        frame.header.landing = u64::from(worker) + 1;
        frame
    });
    prop_oneof![4 => sum, 3 => list, 3 => named, 2 => data_frame()]
}
