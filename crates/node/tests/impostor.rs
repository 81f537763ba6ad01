//! A worker that shares memory and lies about it, or vanishes: it is cut off, others go on, and nothing is left behind.
//!
//! There is one test here, since it looks at what the whole process holds.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::address::LOCAL;
use paramill_core::coordinator::JobConfig;
use paramill_core::limits;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_core::role::{Body, Frame};
use paramill_core::store::Place;
use paramill_core::table::TableSpec;
use paramill_core::types::WorkerId;
use paramill_core::wire::control::{decode, frame};
use paramill_core::wire::{
    Control, Descriptor, Flags, HEADER_BYTES, Header, Hello, Kind, Owner, Party, Plan, Welcome, padded,
};
use paramill_node::Log;
use paramill_node::Transport;
use paramill_node::client::{Job, JobOptions, Table};
use paramill_node::server::{self, Server, ServerConfig};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);
const ELEMENTS: usize = 100_000;
const CHUNK_BYTES: usize = limits::BLOCK_ELEMENTS * 4;

/// A worker of a job that speaks for itself on its connections to the data core.
struct Impostor {
    address: String,
    incarnation: u64,
    _control: std::net::TcpStream,
}

/// A job with an honest worker and one that is not.
fn job_with_impostor() -> (Server, Job, Table, Impostor) {
    let policy = Policy::default().with(Axis::Sync, "asp");
    let coordinate = Some(JobConfig { policy, ..JobConfig::new("test", 2, 1) });
    let config = ServerConfig { coordinate, log: Log::none(), ..ServerConfig::new("test", "127.0.0.1:0") };
    let server = server::start(config, &Arc::new(Registry::builtin())).unwrap();
    let url = format!("paramill://{}/test", server.coordinator()).parse().unwrap();
    let options = JobOptions::at(url).rank(0).transport(Transport::Shm).timeout(TIMEOUT).log(|_, _| {});
    let job = Job::init(options).unwrap();
    let spec = TableSpec::dense("w", [ELEMENTS as u64]);
    let table = job.table(spec.clone(), vec![0.0; ELEMENTS]).unwrap();
    let mut control = std::net::TcpStream::connect(server.coordinator()).unwrap();
    control.set_read_timeout(Some(TIMEOUT)).unwrap();
    let incarnation = greet(&mut control, 0).incarnation;
    send(&mut control, &frame(Kind::Control, &Control::Declare { tables: vec![spec] }));
    let plan: Plan = std::thread::scope(|scope| {
        scope.spawn(|| job.start().unwrap());
        loop {
            match decode("control", &receive(&mut control).1).unwrap() {
                Control::Plan(plan) => break *plan,
                Control::Ready { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    });
    let address =
        plan.shards[0].addresses.iter().find_map(|address| address.strip_prefix(LOCAL)).unwrap().to_owned();
    (server, job, table, Impostor { address, incarnation, _control: control })
}

impl Impostor {
    fn connect(&self) -> UnixStream {
        let address = SocketAddr::from_abstract_name(format!("paramill-{}", self.address)).unwrap();
        let mut stream = UnixStream::connect_addr(&address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        greet(&mut stream, self.incarnation);
        stream
    }
}

fn send(stream: &mut impl Write, frame: &Frame) {
    let mut bytes = frame.header.encode().to_vec();
    if let Body::Bytes(payload) = &frame.body {
        bytes.extend_from_slice(payload);
        bytes.resize(HEADER_BYTES + padded(payload.len()), 0);
    }
    stream.write_all(&bytes).unwrap();
}

fn receive(stream: &mut impl Read) -> (Header, Vec<u8>) {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).unwrap();
    let header = Header::decode(&head).unwrap();
    let mut payload = vec![0; padded(header.payload_bytes as usize)];
    stream.read_exact(&mut payload).unwrap();
    payload.truncate(header.payload_bytes as usize);
    (header, payload)
}

fn greet(stream: &mut (impl Read + Write), incarnation: u64) -> Welcome {
    let from = Party::Worker { rank: Some(WorkerId(1)) };
    send(stream, &frame(Kind::Hello, &Hello { job: "test".into(), from, incarnation, to: None }));
    decode("welcome", &receive(stream).1).unwrap()
}

/// A file in memory, with these seals.
fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let file = rustix::fs::memfd_create("impostor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

fn sealed(bytes: u64) -> OwnedFd {
    memory(bytes, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
}

fn send_with(stream: &UnixStream, bytes: &[u8], descriptors: &[OwnedFd]) {
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn share(number: u16, bytes: u64) -> [u8; HEADER_BYTES] {
    let landing = Place { segment: number, offset: bytes }.to_bits();
    Header { landing, ..Header::new(Kind::Share) }.encode()
}

fn push(part: u32, clock: u64) -> Header {
    let (payload_bytes, flags) = (CHUNK_BYTES as u32, Flags::ELSEWHERE);
    Header { epoch: 1, part, chunk: part, clock, request: 7, payload_bytes, flags, ..Header::new(Kind::Push) }
}

/// A push whose payload is at this place of the sender's.
fn push_at(part: u32, clock: u64, segment: u16, offset: u64) -> Vec<u8> {
    let descriptor = Descriptor { place: Place { segment, offset }, owner: Owner::Sender };
    [push(part, clock).encode(), descriptor.encode()].concat()
}

/// A pull of everything, to be answered at this place.
fn pull_to(segment: u16, offset: u64) -> [u8; HEADER_BYTES] {
    let landing = Place { segment, offset }.to_bits();
    Header { epoch: 1, flags: Flags::NOW, landing, ..Header::new(Kind::Pull) }.encode()
}

fn is_hung_up(stream: &mut UnixStream) -> bool {
    let mut rest = Vec::new();
    // What was on its way is read; a deadline that passes is an error.
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn step(job: &Job, table: &Table) {
    table.update(&vec![1.0; ELEMENTS]).unwrap();
    job.clock();
    table.sync().unwrap();
}

/// What this process has of peers' memory, and of files. Its own memory has the worker's name.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    (maps.lines().filter(|line| line.contains("memfd:impostor")).count(), files.count())
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn liars_are_cut_off_and_leave_nothing_behind() {
    let (server, job, table, impostor) = job_with_impostor();
    step(&job, &table);
    let megabyte = 1 << 20;
    let good = |stream: &UnixStream| send_with(stream, &share(1, megabyte), &[sealed(megabyte)]);

    // One that tells the truth: its gradient is taken, and its answer lands.
    let mut honest = impostor.connect();
    let mine = sealed(megabyte);
    rustix::io::pwrite(&mine, bytemuck::cast_slice(&[4.0f32; 8192]), 4096).unwrap();
    send_with(&honest, &share(1, megabyte), &[mine.try_clone().unwrap()]);
    for part in 0..ELEMENTS.div_ceil(limits::BLOCK_ELEMENTS) as u32 {
        let mut header = push(part, 0);
        let left = ELEMENTS - part as usize * limits::BLOCK_ELEMENTS;
        if left <= limits::BLOCK_ELEMENTS {
            header.payload_bytes = left as u32 * 4;
            header.flags = header.flags.with(Flags::LAST);
        }
        let descriptor = Descriptor { place: Place { segment: 1, offset: 4096 }, owner: Owner::Sender };
        honest.write_all(&[header.encode(), descriptor.encode()].concat()).unwrap();
    }
    assert_eq!(receive(&mut honest).0.kind, Kind::PushAck);
    honest.write_all(&pull_to(1, 65536)).unwrap();
    let mut head = [0; HEADER_BYTES];
    honest.read_exact(&mut head).unwrap();
    let answer = Header::decode(&head).unwrap();
    honest.read_exact(&mut head).unwrap();
    let place = Descriptor::decode(&head).unwrap().place;
    assert!(answer.kind == Kind::Params && answer.flags.has(Flags::ELSEWHERE));
    assert_eq!(place, Place { segment: 1, offset: 65536 });
    let mut landed = [0u8; 4];
    rustix::io::pread(&mine, &mut landed, 65536).unwrap();
    let value = f32::from_le_bytes(landed);
    drop((honest, mine));
    assert!(table.pull_now().unwrap().wait().is_ok());
    assert_eq!(table.read(|values| values[0]).unwrap(), value);

    wait_until("the honest one's memory is given back", || held().0 == 0);
    let (_, files) = held();
    type Lie<'a> = (&'a str, &'a dyn Fn(&mut UnixStream));
    let lies: [Lie<'_>; 16] = [
        ("no descriptor", &|stream| stream.write_all(&share(1, megabyte)).unwrap()),
        ("no seals", &|stream| {
            send_with(stream, &share(1, megabyte), &[memory(megabyte, SealFlags::GROW)]);
        }),
        ("shorter than announced", &|stream| send_with(stream, &share(1, 2 * megabyte), &[sealed(megabyte)])),
        ("no memory", &|stream| {
            let file = std::fs::File::open("/proc/self/exe").unwrap();
            send_with(stream, &share(1, megabyte), &[file.into()]);
        }),
        ("another turn", &|stream| send_with(stream, &share(2, megabyte), &[sealed(megabyte)])),
        ("too long", &|stream| {
            let bytes = limits::MAX_SHARED_BYTES + 4096;
            send_with(stream, &share(1, bytes), &[sealed(bytes)]);
        }),
        ("many descriptors at once", &|stream| {
            let many: Vec<OwnedFd> = (0..60).map(|_| sealed(4096)).collect();
            send_with(stream, &share(1, 4096), &many);
        }),
        ("a descriptor too many", &|stream| {
            send_with(stream, &share(1, megabyte), &[sealed(megabyte), sealed(megabyte)]);
        }),
        ("a descriptor beside a pull", &|stream| send_with(stream, &pull_to(1, 0), &[sealed(megabyte)])),
        ("a segment that was not shared", &|stream| {
            stream.write_all(&push_at(0, 1, 1, 0)).unwrap();
        }),
        ("past the end", &|stream| {
            good(stream);
            stream.write_all(&push_at(0, 1, 1, megabyte - CHUNK_BYTES as u64 + 4)).unwrap();
        }),
        ("far past the end", &|stream| {
            good(stream);
            stream.write_all(&push_at(0, 1, 1, (1 << 48) - 4)).unwrap();
        }),
        ("not aligned", &|stream| {
            good(stream);
            stream.write_all(&push_at(0, 1, 1, 2)).unwrap();
        }),
        ("the core's own segments", &|stream| {
            good(stream);
            let descriptor = Descriptor { place: Place { segment: 1, offset: 0 }, owner: Owner::Receiver };
            stream.write_all(&[push(0, 1).encode(), descriptor.encode()].concat()).unwrap();
        }),
        ("a landing that was not shared", &|stream| stream.write_all(&pull_to(3, 0)).unwrap()),
        ("a landing past the end", &|stream| {
            good(stream);
            stream.write_all(&pull_to(1, megabyte - 4096)).unwrap();
        }),
    ];
    for (name, lie) in lies {
        let mut stream = impostor.connect();
        lie(&mut stream);
        assert!(is_hung_up(&mut stream), "{name}");
        step(&job, &table);
    }
    // Half a push, and gone; fifty times.
    for clock in 1..=50 {
        let mut stream = impostor.connect();
        good(&stream);
        stream.write_all(&push_at(0, clock, 1, 0)).unwrap();
        stream.write_all(&push_at(1, clock, 1, 4096)).unwrap();
    }
    step(&job, &table);
    wait_until("nothing is left", || held() == (0, files));
    job.close().unwrap();
    server.stop();
}
