#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use super::*;
use crate::transport::carrier::{Carrier, Peer};
use crate::transport::stream::StreamCarrier;
use paramill_core::prng::Prng;
use paramill_core::region::{Divided, Partition, Region};
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
    ) -> Option<Region> {
        if header.kind != Kind::Params || !self.foresees {
            return None;
        }
        let first = header.chunk as usize;
        let chunks = first..self.lengths.len().min(first + frames);
        places.extend(chunks.map(|chunk| Landing {
            chunk: chunk as u32,
            bytes: self.place(chunk),
            memory: DType::F32,
            dtype: DType::F32,
        }));
        self.memory.lend(0)
    }

    fn handle_landed(&mut self, _: Time, _: ConnectionId, header: &Header) {
        self.take(header, None);
    }
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
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, _) = listener.accept().unwrap();
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
