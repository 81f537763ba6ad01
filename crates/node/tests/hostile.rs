//! Peers that break the protocol over real sockets: they are refused or held back, and others do not notice.

use paramill_core::coordinator::JobConfig;
use paramill_core::limits;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::role::{Body, Frame};
use paramill_core::status::WorkerReport;
use paramill_core::table::TableSpec;
use paramill_core::types::{ServerId, WorkerId};
use paramill_core::waits::{Charge, WaitCause, Waited};
use paramill_core::wire::control::{decode, frame};
use paramill_core::wire::{
    Control, Fault, Flags, HEADER_BYTES, Header, Hello, Kind, Party, Plan, Refusal, Welcome, padded,
};
use paramill_node::Log;
use paramill_node::admin::Admin;
use paramill_node::client::{Job, JobOptions, Table};
use paramill_node::server::{self, Server, ServerConfig};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ELEMENTS: usize = 4 << 20;
const TIMEOUT: Duration = Duration::from_secs(20);

fn start_server(workers: u32) -> Server {
    let policy = Policy::default().with(Axis::Sync, "asp");
    let job = JobConfig { policy, ..JobConfig::new("test", workers, 1) };
    let config =
        ServerConfig { coordinate: Some(job), log: Log::none(), ..ServerConfig::new("test", "127.0.0.1:0") };
    server::start(config, &Arc::new(Registry::builtin())).expect("a free port")
}

/// A peer that speaks the protocol, as far as it likes.
struct Raw(TcpStream);

impl Raw {
    fn connect(address: &str) -> Raw {
        let stream = TcpStream::connect(address).expect("somebody listens");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout is fine");
        stream.set_write_timeout(Some(TIMEOUT)).expect("a timeout is fine");
        Raw(stream)
    }

    fn send(&mut self, frame: &Frame) {
        let Body::Bytes(payload) = &frame.body else { panic!("control frames carry bytes") };
        let mut payload = payload.clone();
        payload.resize(padded(payload.len()), 0);
        self.0.write_all(&frame.header.encode()).expect("the peer listens");
        self.0.write_all(&payload).expect("the peer listens");
    }

    fn receive(&mut self) -> (Kind, Vec<u8>) {
        let mut head = [0; HEADER_BYTES];
        self.0.read_exact(&mut head).expect("an answer");
        let header = Header::decode(&head).expect("a frame");
        let mut payload = vec![0; padded(header.payload_bytes as usize)];
        self.0.read_exact(&mut payload).expect("its payload");
        payload.truncate(header.payload_bytes as usize);
        (header.kind, payload)
    }

    fn receive_control(&mut self) -> Control {
        decode("control", &self.receive().1).expect("a message")
    }

    fn greet(&mut self, incarnation: u64) -> Welcome {
        let from = Party::Worker { rank: Some(WorkerId(1)) };
        self.send(&frame(Kind::Hello, &Hello { job: "test".into(), from, incarnation, to: None }));
        let (kind, payload) = self.receive();
        assert_eq!(kind, Kind::Welcome);
        decode("welcome", &payload).expect("a welcome")
    }

    /// Says hello as a command does.
    fn greet_as_command(&mut self) -> (Kind, Vec<u8>) {
        let hello = Hello { job: "test".into(), from: Party::Command, incarnation: 0, to: None };
        self.send(&frame(Kind::Hello, &hello));
        self.receive()
    }

    /// Whether the peer hung up within the time.
    fn is_hung_up(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 64]), Ok(0)) || self.0.write_all(&[0; 64]).is_err()
    }
}

fn memory_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("this is Linux");
    let pages = statm.split_whitespace().nth(1).expect("resident pages");
    pages.parse::<usize>().expect("a number") * 4096
}

#[test]
fn a_first_frame_that_is_no_hello_is_refused_before_its_payload_comes() {
    let server = start_server(1);
    for (kind, payload_bytes, reason) in [
        (Kind::Control, 16 << 20, "Control frame announces 16777216 bytes; the limit is 4096"),
        (Kind::Push, 4 << 20, "Push frame announces 4194304 bytes; the limit is 4096"),
        (Kind::Pull, 0, "expected a hello first, got a Pull frame"),
    ] {
        for address in [server.coordinator(), server.data_addresses()[0].iter().next().unwrap()] {
            let mut peer = Raw::connect(address);
            let header = Header { payload_bytes, ..Header::new(kind) };
            peer.0.write_all(&header.encode()).unwrap();
            let (kind, payload) = peer.receive();
            let refusal: Refusal = decode("refusal", &payload).unwrap();
            assert!(kind == Kind::Error && refusal.reason.contains(reason), "{refusal}");
            assert!(peer.is_hung_up());
        }
    }
    server.stop();
    server.join().unwrap();
}

#[test]
fn what_belongs_to_shared_memory_is_refused_over_tcp() {
    let server = start_server(2);
    let elsewhere = Header { flags: Flags::ELSEWHERE, payload_bytes: 64, ..Header::new(Kind::Push) };
    for header in [Header { landing: 1 << 48 | 4096, ..Header::new(Kind::Share) }, elsewhere] {
        let mut peer = Raw::connect(server.coordinator());
        peer.greet(0);
        peer.0.write_all(&[header.encode(), [0; HEADER_BYTES]].concat()).unwrap();
        assert!(peer.is_hung_up(), "{header:?}");
    }
    server.stop();
    server.join().unwrap();
}

#[test]
fn an_incarnation_is_not_guessed_from_another_jobs() {
    let drawn = [(); 2].map(|()| {
        let server = start_server(2);
        let incarnation = Raw::connect(server.coordinator()).greet(0).incarnation;
        server.stop();
        server.join().unwrap();
        incarnation
    });
    assert!(drawn[0].abs_diff(drawn[1]) > 1 << 16 && drawn.iter().all(|drawn| *drawn > 1 << 16), "{drawn:?}");
}

#[test]
fn noise_ends_a_connection_and_nothing_else() {
    let server = start_server(2);
    let mut peer = Raw::connect(server.coordinator());
    peer.greet(0);
    peer.0.write_all(&[0xff; 4096]).unwrap();
    assert!(peer.is_hung_up());
    // Its place is free for somebody who says the same again, since the job has not been planned.
    let began = Instant::now();
    loop {
        let mut again = Raw::connect(server.coordinator());
        let from = Party::Worker { rank: Some(WorkerId(1)) };
        again.send(&frame(Kind::Hello, &Hello { job: "test".into(), from, incarnation: 0, to: None }));
        if again.receive().0 == Kind::Welcome {
            break;
        }
        assert!(began.elapsed() < TIMEOUT, "rank 1 stays taken");
        std::thread::sleep(Duration::from_millis(50));
    }
    server.stop();
    server.join().unwrap();
}

#[test]
fn a_command_that_announces_more_than_any_command_needs_is_told_so() {
    let server = start_server(1);
    for payload_bytes in [16 << 20, limits::MAX_COMMAND_BYTES as u32 + 1] {
        let mut peer = Raw::connect(server.coordinator());
        assert_eq!(peer.greet_as_command().0, Kind::Welcome);
        peer.0.write_all(&Header { payload_bytes, ..Header::new(Kind::Control) }.encode()).unwrap();
        let (kind, payload) = peer.receive();
        let fault: Fault = decode("fault", &payload).unwrap();
        let reason = format!("a Control frame announces {payload_bytes} bytes; the limit is 4416");
        assert!(kind == Kind::Error && fault.message.contains(&reason), "{fault}");
        assert!(peer.is_hung_up());
    }
    // The longest that a command may have to say is taken, and answered in its own words.
    let mut peer = Raw::connect(server.coordinator());
    assert_eq!(peer.greet_as_command().0, Kind::Welcome);
    let (table, sync) = ("t".repeat(limits::MAX_NAME_BYTES), "s".repeat(limits::MAX_POLICY_BYTES));
    let change = PolicyOverride::new(table, Policies::of([(Axis::AnswerCodec, sync)])).on(ServerId(u32::MAX));
    peer.send(&frame(Kind::Control, &Control::Set(change)));
    let fault: Fault = decode("fault", &peer.receive().1).unwrap();
    assert!(fault.message.contains("the job has not started"), "{fault}");
    server.stop();
    server.join().unwrap();
}

#[test]
fn commands_are_few_and_do_not_stay_without_a_word() {
    let server = start_server(1);
    let url = format!("paramill://{}/test", server.coordinator()).parse().unwrap();
    let mut admin = Admin::connect(&url, TIMEOUT).unwrap();
    let mut commands: Vec<Raw> = Vec::new();
    for number in 1..limits::MAX_COMMANDS + 20 {
        let mut command = Raw::connect(server.coordinator());
        assert_eq!(command.greet_as_command().0, Kind::Welcome, "command {number}");
        commands.push(command);
    }
    // Those that have been silent longest made room for the others.
    assert!(commands[..19].iter_mut().all(Raw::is_hung_up));
    // A member comes in all the same.
    let mut worker = Raw::connect(server.coordinator());
    let from = Party::Worker { rank: Some(WorkerId(0)) };
    worker.send(&frame(Kind::Hello, &Hello { job: "test".into(), from, incarnation: 0, to: None }));
    assert_eq!(worker.receive().0, Kind::Welcome);
    // Those that say nothing are hung up on; one that is kept by a program asks over another connection then.
    assert!(commands.iter_mut().all(Raw::is_hung_up));
    assert!(admin.status().unwrap().phase.starts_with("waiting"));
    server.stop();
    server.join().unwrap();
}

#[test]
fn a_command_that_never_takes_its_answers_is_not_answered_any_more() {
    let server = start_server(1);
    let query = frame(Kind::Control, &Control::StatusQuery);
    let Body::Bytes(mut payload) = query.body.clone() else { panic!("control frames carry bytes") };
    payload.resize(padded(payload.len()), 0);
    let many = [&query.header.encode()[..], &payload].concat().repeat(1000);
    let mut greedy: Vec<Raw> = (0..4).map(|_| Raw::connect(server.coordinator())).collect();
    for command in &mut greedy {
        assert_eq!(command.greet_as_command().0, Kind::Welcome);
        command.0.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut asked = 0;
        // Until both sockets between are full of questions.
        while command.0.write_all(&many).is_ok() {
            asked += 1;
            assert!(asked < 10_000, "its questions are read for ever");
        }
    }
    // It is hung up on in the end, whether or not it takes what waits for it.
    for mut command in greedy {
        let began = Instant::now();
        while command.0.write_all(&many).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock) {
            assert!(began.elapsed() < 2 * TIMEOUT, "it stays");
        }
        assert!(command.0.write_all(&many).is_err());
    }
    server.stop();
    server.join().unwrap();
}

#[test]
fn a_worker_that_is_declared_dead_is_told_though_it_says_nothing() {
    let job = JobConfig { worker_timeout: Duration::from_secs(1), ..JobConfig::new("test", 1, 1) };
    let config =
        ServerConfig { coordinate: Some(job), log: Log::none(), ..ServerConfig::new("test", "127.0.0.1:0") };
    let server = server::start(config, &Arc::new(Registry::builtin())).expect("a free port");
    let mut worker = Raw::connect(server.coordinator());
    let from = Party::Worker { rank: Some(WorkerId(0)) };
    worker.send(&frame(Kind::Hello, &Hello { job: "test".into(), from, incarnation: 0, to: None }));
    assert_eq!(worker.receive().0, Kind::Welcome);
    worker.send(&frame(Kind::Control, &Control::Declare { tables: vec![TableSpec::dense("w", [8])] }));
    assert!(matches!(worker.receive_control(), Control::Ready { .. }));
    assert!(matches!(worker.receive_control(), Control::Plan(_)));
    let (kind, payload) = worker.receive();
    let fault: Fault = decode("fault", &payload).unwrap();
    assert!(
        kind == Kind::Error && fault.message.contains("worker 0 was declared dead: it was silent for 1 s"),
        "{fault}"
    );
    assert!(worker.is_hung_up());
    assert_eq!(server.join(), Err("all workers died".into()));
}

/// A job of two workers that has started: an honest one, and rank 1, which speaks the protocol as far as it likes.
struct Beside {
    job: Job,
    table: Table,
    /// Rank 1's connection to the coordinator.
    control: Raw,
    /// Its connection to the data core.
    data: Raw,
}

fn beside_an_honest_worker(server: &Server, elements: usize) -> Beside {
    let url = format!("paramill://{}/test", server.coordinator()).parse().expect("it is a URL");
    let options = JobOptions::at(url).rank(0).timeout(TIMEOUT).log(|_, _| {});
    let spec = TableSpec::dense("w", [elements as u64]);
    let job = Job::init(options).expect("it begins to join");
    let table = job.table(spec.clone(), vec![0.0; elements]).expect("it is the first");

    let mut control = Raw::connect(server.coordinator());
    let incarnation = control.greet(0).incarnation;
    control.send(&frame(Kind::Control, &Control::Declare { tables: vec![spec] }));
    let plan: Plan = std::thread::scope(|scope| {
        scope.spawn(|| job.start().expect("the job starts"));
        loop {
            match control.receive_control() {
                Control::Plan(plan) => break *plan,
                Control::Ready { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    });
    let mut data = Raw::connect(plan.shards[0].addresses.iter().next().expect("a shard has an address"));
    data.greet(incarnation);
    Beside { job, table, control, data }
}

/// Weights without measure are refused, a push of nothing changes nothing, and times that are no numbers reach nobody.
#[test]
fn absurd_weights_and_times_change_nothing() {
    let server = start_server(2);
    let Beside { job, table, mut control, mut data } = beside_an_honest_worker(&server, 8);
    let push = Header { flags: Flags::LAST, epoch: 1, ..Header::new(Kind::Push) };
    let gradient = Body::Bytes([1f32; 8].iter().flat_map(|value| value.to_le_bytes()).collect());
    for version in [u64::MAX, u64::from(limits::MAX_SAMPLES) + 1] {
        let header = Header { version, payload_bytes: 32, ..push };
        data.send(&Frame { header, body: gradient.clone() });
        let (kind, payload) = data.receive();
        let fault: Fault = decode("fault", &payload).unwrap();
        assert!(kind == Kind::Error && fault.message.contains("samples"), "{fault}");
    }
    let nothing = Header { flags: Flags::LAST.with(Flags::ROWS), ..push };
    data.send(&Frame { header: nothing, body: Body::Bytes(Vec::new()) });
    assert_eq!(data.receive().0, Kind::PushAck);
    let charge = Charge { cause: WaitCause::Push(WorkerId(0)), seconds: f64::NAN };
    let waited = Waited { seconds: f64::INFINITY, causes: vec![charge; 8], others: -1.0 };
    control.send(&frame(
        Kind::Control,
        &Control::WorkerReport(WorkerReport { clock: 7, waited, ..Default::default() }),
    ));
    for _ in 0..3 {
        table.update(&[1.0; 8]).unwrap();
        job.clock();
        table.sync().unwrap();
    }
    // Three steps of the honest worker alone, each with its half of a mean.
    let values = table.read(<[f32]>::to_vec).unwrap();
    assert!(values.iter().all(|value| (value + 0.15).abs() < 1e-6), "{values:?}");
    // Asked on the connection that the report came on, so that it is in the answer.
    control.send(&frame(Kind::Control, &Control::StatusQuery));
    let status = loop {
        if let Control::Status(status) = control.receive_control() {
            break status;
        }
    };
    let liar = &status.workers[1].report;
    assert_eq!((liar.clock, liar.waited.seconds, liar.waited.others), (7, 0.0, 0.0), "{liar:?}");
    assert_eq!(liar.waited.causes, [Charge { cause: WaitCause::Push(WorkerId(0)), seconds: 0.0 }]);
    assert!(status.waited.seconds.is_finite());
    drop((data, control));
    job.close().unwrap();
    server.stop();
    server.join().unwrap();
}

#[test]
fn who_asks_for_more_than_it_takes_is_held_back_and_others_go_on() {
    let server = start_server(2);
    let Beside { job, table, control, data: mut greedy } = beside_an_honest_worker(&server, ELEMENTS);
    let before = memory_bytes();
    // Each of these asks for 16 MB in 512 frames. None of it is ever read.
    let pull = Header { flags: Flags::NOW, epoch: 1, ..Header::new(Kind::Pull) }.encode();
    let many = pull.repeat(16_000);
    greedy.0.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut asked = 0;
    while asked < 20 && greedy.0.write_all(&many).is_ok() {
        asked += 1;
    }
    for _ in 0..5 {
        table.update(&vec![1.0; ELEMENTS]).unwrap();
        job.clock();
        table.sync().unwrap();
    }
    let taken = memory_bytes().saturating_sub(before);
    // 65536 frames that wait take 10 MB, and what was asked for in one go as much again; the rest are buffers.
    assert!(taken < 200 << 20, "{} MB after {asked} bursts of pulls", taken >> 20);
    assert_eq!(table.read(|values| values[0]).unwrap(), -0.25);
    drop((greedy, control));
    job.close().unwrap();
    server.stop();
    server.join().unwrap();
}
