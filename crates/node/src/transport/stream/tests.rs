#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use super::*;
use crate::transport::carrier::tests::{push, take};
use bytemuck::cast_slice_mut;
use paramill_core::lease::Lease;
use paramill_core::role::Body;
use paramill_core::store::Buffer;
use std::net::{TcpListener, TcpStream};

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
        sender.queue(push(request, body), Turn::InOrder);
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
