//! A carrier over a Unix socket with shared memory beside it: descriptors go through the socket, payloads stay where they lie.

use super::SharedMemory;
use crate::transport::carrier::{Ask, Carrier, Flushed, Peer, ReceiveError, Take};
use crate::transport::queue::{is_congested, padding, payload_of, refresh, write_in_turns};
use crate::transport::stream::{Ahead, Elsewhere, Nowhere, ReceiveBuffer};
use crate::waker::Watched;
use paramill_core::role::{Frame, Role, Turn};
use paramill_core::send_queue::SendQueue;
use paramill_core::wire::{DESCRIPTOR_BYTES, Flags, HEADER_BYTES, Header};
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// Bytes received at once at most.
const RECEIVE_BYTES: usize = 16 << 10;
/// Bytes that are made at once for the socket.
const SEND_BYTES: usize = 16 << 10;
/// Turns that a few descriptors wait for more: those of a peer whose buffer is full of them. Other peers may always bring
/// more.
const LONGEST_HOLD: u32 = (RECEIVE_BYTES / (HEADER_BYTES + DESCRIPTOR_BYTES) / 8) as u32;
/// What is kept of the memory for a long payload.
const KEPT_BYTES: usize = 1 << 20;

/// A connected socket and the memory beside it.
#[derive(Debug)]
pub(crate) struct ShmCarrier {
    stream: UnixStream,
    memory: SharedMemory,
    peer: Peer,
    receive: ReceiveBuffer,
    ahead: Ahead,
    queue: SendQueue,
    /// Frames as they go through the socket, and how much of that is sent.
    described: Vec<u8>,
    sent: usize,
    /// Turns that they have waited for more to write with them.
    turns_waited: u32,
}

impl ShmCarrier {
    pub(super) fn new(stream: UnixStream, memory: SharedMemory) -> ShmCarrier {
        ShmCarrier {
            stream,
            memory,
            peer: Peer::Stranger,
            receive: ReceiveBuffer::new(RECEIVE_BYTES),
            ahead: Ahead::default(),
            queue: SendQueue::default(),
            described: Vec::new(),
            sent: 0,
            turns_waited: 0,
        }
    }

    /// Makes the bytes of some frames. What of a payload lies elsewhere by now is done with: it is put there once, however
    /// often the socket is full.
    fn describe(&mut self, role: Option<&dyn Role>) -> io::Result<()> {
        let ShmCarrier { stream, memory, queue, described, .. } = self;
        if self.sent == described.len() {
            described.clear();
            described.shrink_to(KEPT_BYTES);
            self.sent = 0;
            if self.peer != Peer::Stranger {
                memory.announce(stream)?;
            }
        } else if memory.has_news() {
            // What may refer to a segment comes after its announcement, and that comes between frames.
            return Ok(());
        }
        while described.len() < SEND_BYTES
            && let Some(mut frame) = queue.pop()
        {
            refresh(role, &mut frame);
            let payload = payload_of(role, &frame);
            match memory.put_elsewhere(&frame.header, &frame.body, payload)? {
                Some(descriptor) => {
                    frame.header.flags = frame.header.flags.with(Flags::ELSEWHERE);
                    described.extend_from_slice(&frame.header.encode());
                    described.extend_from_slice(&descriptor.encode());
                }
                None => {
                    described.extend_from_slice(&frame.header.encode());
                    described.extend_from_slice(payload);
                    described.extend_from_slice(padding(payload.len()));
                }
            }
        }
        Ok(())
    }

    /// Whether what is to be written is a few descriptors that have not waited for long.
    fn may_wait(&self) -> bool {
        self.described.len() < SEND_BYTES && self.queue.is_empty() && self.turns_waited < LONGEST_HOLD
    }
}

impl Watched for ShmCarrier {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stream.as_fd())
    }
}

impl Carrier for ShmCarrier {
    fn queue(&mut self, frame: Frame, turn: Turn) {
        self.queue.push(frame, turn);
    }

    /// Each write wakes a process, which has little to do with a few descriptors.
    fn flush(&mut self, role: Option<&dyn Role>, more: bool) -> io::Result<Flushed> {
        write_in_turns(|| {
            self.describe(role)?;
            if self.is_silent() {
                return Ok(Some(Flushed::Done));
            }
            if more && self.may_wait() {
                self.turns_waited += 1;
                return Ok(Some(Flushed::Enough));
            }
            self.sent += self.stream.write(&self.described[self.sent..])?;
            self.turns_waited = 0;
            Ok(self.is_silent().then_some(Flushed::Done))
        })
    }

    fn receive(&mut self, _ask: Option<&mut Ask<'_>>) -> Result<(), ReceiveError> {
        let ShmCarrier { stream, memory, receive, .. } = self;
        if receive.has_leftovers() {
            return Ok(());
        }
        receive.fill(|room| Ok(memory.read(stream, room)?))
    }

    fn put_ahead(&mut self, ask: &mut Ask<'_>) {
        self.ahead.put(ask, |start| self.receive.frame_at(start));
    }

    fn handle(&mut self, limit: usize, take: &mut Take<'_>) -> Result<(), ReceiveError> {
        let ShmCarrier { memory, peer, receive, ahead, .. } = self;
        let mut beside = Beside { memory, is_open: *peer != Peer::Stranger };
        receive.handle(limit, &mut beside, ahead, take)
    }

    fn hang_up(&mut self) {
        // An error means that the peer hung up first.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn let_in(&mut self, peer: Peer) {
        self.peer = peer;
        if peer == Peer::Member {
            self.receive.widen();
        }
    }

    fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.stream.take_error()
    }

    fn has_leftovers(&self) -> bool {
        self.receive.has_leftovers()
    }

    fn is_silent(&self) -> bool {
        self.queue.is_empty() && self.sent == self.described.len()
    }

    fn is_congested(&self) -> bool {
        is_congested(&self.queue, self.peer)
    }
}

/// The memory beside a connection, as its frames refer to it.
struct Beside<'a> {
    memory: &'a mut SharedMemory,
    is_open: bool,
}

impl Elsewhere for Beside<'_> {
    fn take_segment(&mut self, header: &Header) -> Result<(), ReceiveError> {
        if !self.is_open {
            return Nowhere.take_segment(header);
        }
        Ok(self.memory.take_segment(header).map_err(io::Error::from)?)
    }

    fn payload(&self, header: &Header, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Result<&[u8], ReceiveError> {
        Ok(self.memory.payload(header, descriptor).map_err(io::Error::from)?)
    }

    fn check_settled(&mut self) -> Result<(), ReceiveError> {
        Ok(self.memory.check_settled().map_err(io::Error::from)?)
    }
}

#[cfg(test)]
mod tests;
