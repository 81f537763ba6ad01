use super::*;
use paramill_core::lease::Lease;
use paramill_core::store::{Allocate, Buffer};
use paramill_core::wire::{Flags, HEADER_BYTES};
use std::os::fd::AsFd;

const LEN: usize = 32_768;

/// A worker's end and a data core's end.
struct Pair {
    worker: (UnixStream, SharedMemory),
    core: (UnixStream, SharedMemory),
    allocator: SharedAllocator,
}

fn pair() -> Pair {
    let (left, right) = UnixStream::pair().unwrap();
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    let allocator = SharedAllocator::new();
    let worker = SharedMemory::connected(&left, allocator.clone()).unwrap();
    let core = SharedMemory::accepted(&right).unwrap();
    Pair { worker: (left, worker), core: (right, core), allocator }
}

impl Pair {
    /// The worker announces what it has; the core takes it.
    fn introduce(&mut self) {
        self.worker.1.announce(&self.worker.0).unwrap();
        let mut buffer = [0; 1024];
        loop {
            let count = match self.core.1.read(&self.core.0, &mut buffer) {
                Ok(count) => count,
                Err(SharedError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            };
            for head in buffer[..count].as_chunks::<HEADER_BYTES>().0 {
                self.core.1.take_segment(&Header::decode(head).unwrap()).unwrap();
            }
        }
        self.core.1.check_settled().unwrap();
    }
}

fn push(len: usize) -> Header {
    Header { payload_bytes: len as u32, ..Header::new(Kind::Push) }
}

fn params(len: usize, landing: u64) -> Header {
    Header { payload_bytes: len as u32, landing, ..Header::new(Kind::Params) }
}

fn shared(mut buffer: Buffer, start: usize, len: usize, value: f32) -> Body {
    buffer.as_mut_slice().fill(value);
    Body::Shared { buffer: Lease::from(buffer), start, len }
}

fn descriptor(segment: u16, offset: u64, owner: Owner) -> [u8; DESCRIPTOR_BYTES] {
    Descriptor { place: Place { segment, offset }, owner }.encode()
}

#[test]
fn a_gradient_is_read_where_the_worker_wrote_it() {
    let mut pair = pair();
    let body = shared(pair.allocator.zeroed(LEN), 4096, LEN, 1.5);
    pair.introduce();
    let payload = body.bytes().unwrap();
    let sent = pair.worker.1.put_elsewhere(&push(LEN), &body, payload).unwrap().unwrap();
    assert_eq!(sent, Descriptor { place: Place { segment: 1, offset: 4096 }, owner: Owner::Sender });
    let seen = pair.core.1.payload(&push(LEN), &sent.encode()).unwrap();
    assert_eq!(seen, payload);
    assert_ne!(seen.as_ptr(), payload.as_ptr(), "the same memory at another address");
}

#[test]
fn parameters_land_where_the_worker_asked_for_them() {
    let mut pair = pair();
    let values = pair.allocator.zeroed(2 * LEN);
    pair.introduce();
    let Place { segment, offset } = values.place().unwrap();
    let landing = Place { segment, offset: offset + LEN as u64 };
    let header = params(LEN, landing.to_bits());
    let body = Body::Bytes(bytemuck::cast_slice(&vec![2.5f32; LEN / 4]).to_vec());
    let sent = pair.core.1.put_elsewhere(&header, &body, body.bytes().unwrap()).unwrap().unwrap();
    assert_eq!(sent, Descriptor { place: landing, owner: Owner::Receiver });
    let seen = pair.worker.1.payload(&header, &sent.encode()).unwrap();
    assert_eq!(seen, body.bytes().unwrap());
    assert_eq!(seen.as_ptr(), values.as_bytes()[LEN..].as_ptr(), "no copy on the worker's side");
    assert!(values.as_slice()[..LEN / 4].iter().all(|&value| value == 0.0));
}

#[test]
fn what_cannot_be_elsewhere_goes_through_the_socket() {
    let mut pair = pair();
    let small = shared(pair.allocator.zeroed(LEN), 0, 64, 1.0);
    let own = shared(Buffer::zeroed(LEN), 0, LEN, 1.0);
    let foreign = shared(SharedAllocator::new().zeroed(LEN), 0, LEN, 1.0);
    let good = shared(pair.allocator.zeroed(LEN), 0, LEN, 1.0);
    pair.introduce();
    let rows = Header { flags: Flags::ROWS, ..push(LEN) };
    let control = Header { payload_bytes: LEN as u32, ..Header::new(Kind::Control) };
    for (header, body) in [
        (push(64), &small),
        (push(LEN), &own),
        (push(LEN), &foreign),
        (rows, &good),
        (control, &good),
        (params(LEN, 0), &good),
    ] {
        assert_eq!(pair.worker.1.put_elsewhere(&header, body, body.bytes().unwrap()).unwrap(), None);
    }
    let unasked = params(LEN, 0);
    assert_eq!(pair.core.1.put_elsewhere(&unasked, &own, own.bytes().unwrap()).unwrap(), None);
    let late = shared(SharedAllocator::new().zeroed(LEN), 0, LEN, 1.0);
    assert_eq!(pair.worker.1.put_elsewhere(&push(LEN), &late, late.bytes().unwrap()).unwrap(), None);
}

#[test]
fn new_segments_are_announced_when_there_are_some() {
    let mut pair = pair();
    pair.introduce();
    let first = shared(pair.allocator.zeroed(LEN), 0, LEN, 1.0);
    assert_eq!(pair.worker.1.put_elsewhere(&push(LEN), &first, first.bytes().unwrap()).unwrap(), None);
    pair.introduce();
    let long = shared(pair.allocator.zeroed(300 << 18), 0, LEN, 2.0);
    pair.introduce();
    for (body, segment) in [(&first, 1), (&long, 2)] {
        let sent = pair.worker.1.put_elsewhere(&push(LEN), body, body.bytes().unwrap()).unwrap().unwrap();
        assert_eq!(sent.place.segment, segment);
        assert_eq!(pair.core.1.payload(&push(LEN), &sent.encode()).unwrap(), body.bytes().unwrap());
    }
}

#[test]
fn a_core_refuses_what_a_worker_must_not_refer_to() {
    let mut pair = pair();
    let buffer = pair.allocator.zeroed(LEN);
    pair.introduce();
    let end = pair.allocator.segments_from(0)[0].bytes();
    let core = &pair.core.1;
    let refuse = |header: &Header, descriptor: &[u8; DESCRIPTOR_BYTES], words: &str| {
        let error = core.payload(header, descriptor).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refuse(&push(LEN), &descriptor(2, 0, Owner::Sender), "segment 2, which it did not share");
    refuse(&push(LEN), &descriptor(u16::MAX, 0, Owner::Sender), "segment 65535");
    refuse(&push(LEN), &descriptor(1, end, Owner::Sender), "not within what it shares");
    refuse(&push(LEN), &descriptor(1, end - LEN as u64 + 4, Owner::Sender), "not within what it shares");
    refuse(&push(LEN), &descriptor(1, (1 << 48) - 4, Owner::Sender), "not within what it shares");
    refuse(&push(LEN), &descriptor(1, 2, Owner::Sender), "not a multiple of 4");
    refuse(&push(LEN), &descriptor(1, 0, Owner::Receiver), "cannot lie in the segments of its Receiver");
    refuse(&params(LEN, 0), &descriptor(1, 0, Owner::Sender), "cannot lie in the segments of its Sender");
    refuse(&push(LEN), &[0; DESCRIPTOR_BYTES], "undefined place");
    assert!(core.payload(&push(LEN), &descriptor(1, end - LEN as u64, Owner::Sender)).is_ok());

    let bytes = vec![0; LEN];
    let body = Body::Bytes(bytes.clone());
    for (place, words) in [
        (Place { segment: 2, offset: 0 }, "segment 2, which it did not share"),
        (Place { segment: 1, offset: end }, "not within what it shares"),
        (Place { segment: 1, offset: end - LEN as u64 + 4 }, "not within what it shares"),
        (Place { segment: 1, offset: 3 }, "not a multiple of 4"),
    ] {
        let header = params(LEN, place.to_bits());
        let error = core.put_elsewhere(&header, &body, &bytes).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    drop(buffer);
}

#[test]
fn a_worker_refuses_what_a_core_must_not_refer_to() {
    let mut pair = pair();
    let (first, second) = (pair.allocator.zeroed(LEN / 4), pair.allocator.zeroed(LEN / 4));
    pair.introduce();
    drop(second);
    let worker = &pair.worker.1;
    let here = LEN as u64;
    for (header, descriptor, words) in [
        (params(LEN, 0), descriptor(1, here, Owner::Receiver), "not in use"),
        (params(LEN, 0), descriptor(1, here - 4, Owner::Receiver), "not in use"),
        (params(LEN, 0), descriptor(2, 0, Owner::Receiver), "segment 2"),
        (params(LEN - 4, 0), descriptor(1, 2, Owner::Receiver), "multiple of 4"),
        (params(LEN, 0), descriptor(1, 0, Owner::Sender), "segments of its Sender"),
        (push(LEN), descriptor(1, 0, Owner::Receiver), "segments of its Receiver"),
    ] {
        let error = worker.payload(&header, &descriptor).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(worker.payload(&params(LEN, 0), &descriptor(1, 0, Owner::Receiver)).is_ok());
    let share = Header { landing: Place { segment: 1, offset: 4096 }.to_bits(), ..Header::new(Kind::Share) };
    assert!(matches!(pair.worker.1.take_segment(&share), Err(SharedError::NotTaken)));
    drop(first);
}

/// What a core says to a frame that announces a segment, with a descriptor beside it.
fn announced(number: u16, bytes: u64, descriptor: Option<OwnedFd>) -> SharedError {
    let mut pair = pair();
    let header =
        Header { landing: Place { segment: number, offset: bytes }.to_bits(), ..Header::new(Kind::Share) };
    if let Some(descriptor) = descriptor {
        passing::send(&pair.worker.0, &header.encode(), descriptor.as_fd()).unwrap();
        pair.core.1.read(&pair.core.0, &mut [0; 64]).unwrap();
    }
    let refused = pair.core.1.take_segment(&header).unwrap_err();
    assert!(pair.core.1.waiting.is_empty(), "what came was closed");
    refused
}

#[test]
fn segments_that_lie_are_refused() {
    let memory = || {
        let segment = Segment::create(8192).unwrap();
        Some(segment.descriptor().try_clone_to_owned().unwrap())
    };
    assert!(matches!(announced(1, 8192, None), SharedError::NoDescriptor));
    assert!(matches!(announced(2, 8192, memory()), SharedError::Turn { expected: 1, found: 2 }));
    assert!(matches!(announced(1, 4096, memory()), SharedError::Size { announced: 4096, found: 8192 }));
    assert!(matches!(announced(1, limits::MAX_SHARED_BYTES + 1, memory()), SharedError::TooMuch));
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(matches!(announced(1, 8192, Some(file.into())), SharedError::NoMemory));
    let nothing = Header::new(Kind::Share);
    assert!(matches!(pair().core.1.take_segment(&nothing), Err(SharedError::Wire(_))));
}

#[test]
fn too_many_segments_are_refused() {
    let mut pair = pair();
    for number in 1..=limits::MAX_SEGMENTS as u16 + 1 {
        let segment = Segment::create(4096).unwrap();
        let landing = Place { segment: number, offset: 4096 }.to_bits();
        let header = Header { landing, ..Header::new(Kind::Share) };
        passing::send(&pair.worker.0, &header.encode(), segment.descriptor()).unwrap();
        pair.core.1.read(&pair.core.0, &mut [0; 64]).unwrap();
        let taken = pair.core.1.take_segment(&header);
        assert_eq!(taken.is_ok(), usize::from(number) <= limits::MAX_SEGMENTS, "{number}");
    }
}

#[test]
fn a_descriptor_that_nobody_announced_is_refused() {
    let mut pair = pair();
    let segment = Segment::create(8192).unwrap();
    passing::send(&pair.worker.0, &push(0).encode(), segment.descriptor()).unwrap();
    assert_eq!(pair.core.1.read(&pair.core.0, &mut [0; 64]).unwrap(), 64);
    assert!(matches!(pair.core.1.check_settled(), Err(SharedError::StrayDescriptor)));
    assert!(pair.core.1.waiting.is_empty());
}
