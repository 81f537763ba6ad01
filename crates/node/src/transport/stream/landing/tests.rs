#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use super::*;
use crate::transport::carrier::{Carrier, Peer};
use crate::transport::stream::StreamCarrier;
use paramill_core::codec::{Codec, Context, Decoder, Encoder};
use paramill_core::landing::{AnswerDecoder, Destination, SharedDecoder};
use paramill_core::prng::Prng;
use paramill_core::region::{Divided, Partition};
use paramill_core::registry::Registry;
use paramill_core::role::{Lost, Output, Role};
use paramill_core::store::Buffer;
use paramill_core::types::{ConnectionId, NodeId, ServerId, ShardId, Time};
use paramill_core::wire::DType;
use paramill_core::wire::{Hello, Kind, Refusal, Welcome};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

/// Takes chunks of given lengths, in order, and notes what else came between them.
struct Taker {
    lengths: Vec<usize>,
    memory: Divided,
    next: usize,
    /// Without this it knows no places, from then on.
    foresees: bool,
    landed: usize,
    others: Vec<u64>,
}

impl Taker {
    fn place(&self, chunk: usize) -> Range<usize> {
        let start: usize = self.lengths[..chunk].iter().sum();
        start..start + self.lengths[chunk]
    }

    fn take(&mut self, header: &Header, payload: Option<&[u8]>) {
        if header.kind != Kind::Params {
            return self.others.push(header.request);
        }
        assert_eq!(header.chunk as usize, self.next);
        let place = self.place(self.next);
        match payload {
            Some(payload) => {
                let mut region = self.memory.lend(0).unwrap();
                region.bytes_mut(place).copy_from_slice(payload);
            }
            None => self.landed += 1,
        }
        self.next += 1;
    }
}

impl Role for Taker {
    fn node(&self) -> Option<NodeId> {
        None
    }

    fn accept(&mut self, _: Time, _: &Hello) -> Result<Welcome, Refusal> {
        unreachable!("nobody connects")
    }

    fn hello(&self, _: ConnectionId) -> Hello {
        unreachable!("it connects to nobody")
    }

    fn handle_connected(&mut self, _: Time, _: ConnectionId, _: &Welcome) {}

    fn handle_disconnected(&mut self, _: Time, _: ConnectionId, _: &Lost) {}

    fn handle_frame(&mut self, _: Time, _: ConnectionId, header: &Header, payload: &[u8]) {
        self.take(header, Some(payload));
    }

    fn handle_timeout(&mut self, _: Time) {}

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn poll_output(&mut self) -> Option<Output> {
        None
    }

    fn landing(
        &mut self,
        _: ConnectionId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        if header.kind != Kind::Params || !self.foresees {
            return None;
        }
        let first = header.chunk as usize;
        let chunks = first..self.lengths.len().min(first + frames);
        places.extend(chunks.map(|chunk| Landing {
            chunk: chunk as u32,
            bytes: self.place(chunk),
            memory: DType::F32,
            dtype: Some(DType::F32),
        }));
        self.memory.lend(0).map(Destination::new)
    }

    fn handle_landed(&mut self, _: Time, _: ConnectionId, header: &Header) {
        self.take(header, None);
    }
}

/// The two ends of a connection.
fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (sender, listener.accept().unwrap().0)
}

/// Sends chunks of these lengths in pieces of any size, with frames between them that nobody foresaw, and checks that
/// everything comes to its place. Returns how many chunks were received there.
fn travel(seed: u64, lengths: &[usize], stray: f64, blinks: bool) -> usize {
    let mut prng = Prng::fork(seed, 1);
    let total: usize = lengths.iter().sum();
    let contents: Vec<u8> = (0..total).map(|_| prng.next_u64() as u8).collect();
    let (mut bytes, mut others, mut start) = (Vec::new(), Vec::new(), 0);
    for (part, &length) in lengths.iter().enumerate() {
        if prng.chance(stray) {
            let request = prng.next_u64();
            others.push(request);
            let length = (prng.next_u64() % 300) as usize;
            let head = Header { request, payload_bytes: length as u32, ..Header::new(Kind::Error) };
            bytes.extend_from_slice(&head.encode());
            bytes.resize(bytes.len() + padded(length), 7);
        }
        let head = Header {
            chunk: part as u32,
            part: part as u32,
            request: 5,
            version: prng.next_u64(),
            payload_bytes: length as u32,
            ..Header::new(Kind::Params)
        };
        bytes.extend_from_slice(&head.encode());
        bytes.extend_from_slice(&contents[start..start + length]);
        bytes.resize(bytes.len().next_multiple_of(HEADER_BYTES), 0);
        start += length;
    }
    let (mut sender, stream) = connected();
    let mut connection = StreamCarrier::new(stream);
    connection.let_in(Peer::Member);
    let whole = Partition::new(total, [std::iter::once(0..total).collect()]);
    let mut role = Taker {
        lengths: lengths.to_vec(),
        memory: Divided::new(Buffer::zeroed(total / 4), Arc::new(whole)),
        next: 0,
        foresees: true,
        landed: 0,
        others: Vec::new(),
    };
    let from = ConnectionId::Node(NodeId::Shard(ShardId { server: ServerId(0), core: 0 }));
    let mut sent = 0;
    while role.next < lengths.len() {
        // What is sent is read at once: the pieces are those of this loop, whatever the kernel does.
        let piece = (1 + prng.next_u64() as usize % 100_000).min(bytes.len() - sent);
        sender.write_all(&bytes[sent..sent + piece]).unwrap();
        sent += piece;
        if blinks {
            role.foresees = prng.chance(0.7);
        }
        {
            let mut ask = |header: &Header, frames: usize, places: &mut Vec<Landing>| {
                role.landing(from, header, frames, places)
            };
            connection.receive(Some(&mut ask)).unwrap();
            if prng.chance(0.5) {
                connection.put_ahead(&mut ask);
            }
        }
        connection
            .handle(usize::MAX, &mut |header, payload| {
                match payload {
                    None => role.handle_landed(Time::ZERO, from, header),
                    Some(payload) => role.handle_frame(Time::ZERO, from, header, payload),
                }
                true
            })
            .unwrap();
    }
    assert_eq!(role.others, others, "seed {seed}");
    if !blinks {
        assert!(role.memory.lend(0).unwrap().bytes(0..total) == contents, "seed {seed}");
    }
    role.landed
}

#[test]
fn chunks_land_where_they_belong_in_pieces_of_any_size() {
    for seed in 0..40 {
        let mut prng = Prng::fork(seed, 2);
        let lengths: Vec<usize> =
            (0..60).map(|_| 4 * (1 + prng.next_u64() as usize % [40, 9000][seed as usize % 2])).collect();
        travel(seed, &lengths, 0.0, false);
    }
    let landed = travel(99, &[32_768; 200], 0.0, false);
    assert!(landed > 150, "only {landed} of 200 chunks were received where they belong");
}

#[test]
fn frames_that_nobody_foresaw_are_handled_all_the_same() {
    for seed in 0..40 {
        travel(seed, &[[500, 32_768][seed as usize % 2]; 100], 0.3, false);
    }
}

#[test]
fn a_role_that_changes_its_mind_loses_no_frame() {
    for seed in 0..20 {
        travel(seed, &[4096; 80], 0.2, true);
    }
}

/// Takes answers about one table of small chunks, each of which is a difference to the one before it, or whole.
struct Summer {
    decoder: Arc<AnswerDecoder>,
    memory: Divided,
    /// Elements of each chunk.
    chunk: usize,
    chunks: usize,
    /// It knows places for the time being.
    foresees: bool,
    landed: usize,
    handled: usize,
}

impl Summer {
    fn place(&self, header: &Header, chunk: u32) -> Landing {
        let start = chunk as usize * self.chunk;
        let dtype = (!header.flags.has(Flags::ENCODED)).then_some(DType::F32);
        Landing::new(chunk, start..start + self.chunk, DType::F32, dtype)
    }

    fn destination(&self) -> Destination {
        Destination::decoded(self.memory.lend(0), self.decoder.clone())
    }

    fn landing(&self, header: &Header, frames: usize, places: &mut Vec<Landing>) -> Option<Destination> {
        let end = self.chunks.min(header.chunk as usize + frames) as u32;
        places.extend((header.chunk..end).map(|chunk| self.place(header, chunk)));
        self.foresees.then(|| self.destination())
    }
}

/// The driver puts what it can, the role gets the rest, and both stop whenever they like: every difference is added once, and
/// none before the values that it is a difference to.
#[test]
fn differences_are_added_once_and_in_their_turn() {
    let codec = Arc::new(Codec::parse(&Registry::builtin().codec, "topk:1").unwrap());
    let mut ways = [0, 0];
    for seed in 0..60 {
        let mut prng = Prng::fork(seed, 1);
        // Whole chunks of the first length are left to the role, because they are short.
        let (chunk, chunks) = ([500, 1500][seed as usize % 2], 5);
        let mut held = vec![0.0f32; chunk * chunks];
        let (mut bytes, mut frames) = (Vec::new(), 0);
        for request in 0..30 {
            for number in 0..chunks {
                let place = number * chunk..(number + 1) * chunk;
                let values: Vec<f32> = place.clone().map(|_| (prng.next_u64() % 1000) as f32).collect();
                let is_whole = request == 0 || prng.chance(0.2);
                let mut payload = Vec::new();
                if is_whole {
                    payload.extend_from_slice(bytemuck::cast_slice(&values));
                } else {
                    let difference: Vec<f32> =
                        values.iter().zip(&held[place.clone()]).map(|(new, old)| new - old).collect();
                    let mut encoder = Encoder::without_memory(codec.clone());
                    encoder.encode(0, &difference, &Context::default(), &mut payload).unwrap();
                }
                held[place].copy_from_slice(&values);
                let header = Header {
                    request,
                    chunk: number as u32,
                    part: number as u32,
                    flags: if is_whole { Flags::default() } else { Flags::ENCODED },
                    payload_bytes: payload.len() as u32,
                    ..Header::new(Kind::Params)
                };
                bytes.extend_from_slice(&header.encode());
                bytes.extend_from_slice(&payload);
                bytes.resize(bytes.len().next_multiple_of(HEADER_BYTES), 0);
                frames += 1;
            }
        }
        let (mut sender, stream) = connected();
        let mut connection = StreamCarrier::new(stream);
        connection.let_in(Peer::Member);
        let whole =
            || Arc::new(Partition::new(4 * held.len(), [std::iter::once(0..4 * held.len()).collect()]));
        let divided = || Divided::new(Buffer::zeroed(held.len()), whole());
        let decoder = SharedDecoder::new(Decoder::new(codec.clone()));
        let decoder = Arc::new(AnswerDecoder::new(decoder, divided().lend(0)));
        let mut role =
            Summer { decoder, memory: divided(), chunk, chunks, foresees: true, landed: 0, handled: 0 };
        let mut sent = 0;
        while role.landed + role.handled < frames {
            let piece = (1 + prng.next_u64() as usize % 60_000).min(bytes.len() - sent);
            sender.write_all(&bytes[sent..sent + piece]).unwrap();
            sent += piece;
            role.foresees = prng.chance(0.8);
            let mut ask = |header: &Header, frames: usize, places: &mut Vec<Landing>| {
                role.landing(header, frames, places)
            };
            connection.receive(Some(&mut ask)).unwrap();
            assert!(connection.lander.landed.is_empty(), "none of it can be received as it is");
            if prng.chance(0.8) {
                connection.put_ahead(&mut ask);
            }
            connection
                .handle(usize::MAX, &mut |header, payload| {
                    match payload {
                        None => role.landed += 1,
                        Some(payload) => {
                            role.handled += 1;
                            assert!(role.destination().put(&role.place(header, header.chunk), payload));
                        }
                    }
                    prng.chance(0.8)
                })
                .unwrap();
        }
        let found = role.memory.lend(0).unwrap();
        assert!(found.bytes(0..4 * held.len()) == bytemuck::cast_slice::<f32, u8>(&held), "seed {seed}");
        ways = [ways[0] + role.landed, ways[1] + role.handled];
    }
    assert!(ways.iter().all(|frames| *frames > 1000), "{ways:?} frames went each way");
}
