#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use super::*;
use bytemuck::cast_slice_mut;
use paramill_core::lease::Lease;
use paramill_core::role::Body;
use paramill_core::store::Buffer;
use paramill_core::wire::{Header, Kind};
use std::net::{TcpListener, TcpStream};

fn push(request: u64, body: Body) -> Frame {
    let payload_bytes = body.bytes().unwrap().len() as u32;
    Frame { header: Header { request, payload_bytes, ..Header::new(Kind::Push) }, body }
}

/// Reads what is there, and notes the request and the payload's beginning of every frame that is whole.
fn take(connection: &mut dyn Carrier, seen: &mut Vec<(u64, u8)>) {
    connection.receive(None).unwrap();
    connection
        .handle(usize::MAX, &mut |header, payload| {
            let payload = payload.unwrap();
            assert!(payload.iter().all(|byte| *byte == payload[0]), "frame {} is torn", header.request);
            seen.push((header.request, payload[0]));
            true
        })
        .unwrap();
}

#[test]
fn frames_that_a_socket_takes_in_part_arrive_whole() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sending = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiving, _) = listener.accept().unwrap();
    sending.set_nonblocking(true).unwrap();
    receiving.set_nonblocking(true).unwrap();
    let mut sender = StreamCarrier::new(sending);
    let mut receiver = StreamCarrier::new(receiving);
    receiver.let_in(Peer::Member);
    let frames = 400;
    let mut expected = Vec::new();
    for request in 0..frames {
        let (value, len) = (request as u8, 1 + request as usize * 977 % 150_000);
        let body = match request % 3 {
            0 => Body::Bytes(vec![value; len]),
            _ => {
                let mut buffer = Buffer::zeroed(len.div_ceil(4));
                cast_slice_mut(buffer.as_mut_slice()).fill(value);
                Body::Shared { buffer: Lease::from(buffer), start: 0, len }
            }
        };
        sender.queue(push(request, body));
        expected.push((request, value));
    }
    let (mut seen, mut blocked) = (Vec::new(), 0);
    while seen.len() < expected.len() {
        blocked += usize::from(sender.flush(None, false).unwrap() == Flushed::Blocked);
        take(&mut receiver, &mut seen);
    }
    assert_eq!(seen, expected);
    assert!(blocked > 10, "the socket was full {blocked} times only");
    assert!(sender.is_silent());
}
