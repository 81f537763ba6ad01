//! The receive buffer of one connection, in which frames are handled.

use super::ahead::{Ahead, Received};
use crate::transport::carrier::{ReceiveError, Take};
use bytemuck::{cast_slice, cast_slice_mut};
use paramill_core::limits;
use paramill_core::store::Buffer;
use paramill_core::wire::{DESCRIPTOR_BYTES, Flags, HEADER_BYTES, Header, Kind, WireError, padded};
use std::io::{self, ErrorKind};

/// Bytes received at once at most: many chunks per system call, and no more than stay in the nearest caches until they are
/// added and what follows from them has left. They are whole frames of a long push, so that none is left in part, which
/// would have to be moved.
pub(super) const RECEIVE_BYTES: usize = 8 * (HEADER_BYTES + 4 * limits::BLOCK_ELEMENTS);
/// Bytes received at once from a peer that has not said who it is, or from a command: memory is for members.
const GREETING_BYTES: usize = 8192;
const _: () = assert!(GREETING_BYTES >= HEADER_BYTES + limits::MAX_COMMAND_BYTES + HEADER_BYTES);
/// Payloads of a peer's memory that are handled at once, which stay in the caches as those do that were received.
pub(crate) const HANDLE_BYTES: usize = 8 * 4 * limits::BLOCK_ELEMENTS;

/// Payloads that did not come through the buffer. Three methods are required.
pub(crate) trait Elsewhere {
    /// The peer announces memory.
    fn take_segment(&mut self, header: &Header) -> Result<(), ReceiveError>;

    /// The payload that a descriptor stands for.
    fn payload(&self, header: &Header, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Result<&[u8], ReceiveError>;

    /// Everything that was received has been looked at.
    fn check_settled(&mut self) -> Result<(), ReceiveError>;
}

/// For carriers that bring every payload themselves.
#[derive(Debug)]
pub(crate) struct Nowhere;

impl Elsewhere for Nowhere {
    fn take_segment(&mut self, header: &Header) -> Result<(), ReceiveError> {
        Err(out_of_place(header))
    }

    fn payload(&self, header: &Header, _: &[u8; DESCRIPTOR_BYTES]) -> Result<&[u8], ReceiveError> {
        Err(out_of_place(header))
    }

    fn check_settled(&mut self) -> Result<(), ReceiveError> {
        Ok(())
    }
}

/// A frame that is defined, but not for this connection: there is no memory that it could refer to.
pub(crate) fn out_of_place(header: &Header) -> ReceiveError {
    let (field, value) = match header.kind {
        Kind::Share => ("kind", Kind::Share as u8),
        _ => ("flags", header.flags.0),
    };
    WireError::Field { field, value: u64::from(value) }.into()
}

/// A peer must not announce more than it may send.
pub(crate) fn check_length(header: &Header, limit: usize) -> Result<(), WireError> {
    let (kind, bytes) = (header.kind, header.payload_bytes as usize);
    if bytes > limit { Err(WireError::TooLong { kind, bytes, limit }) } else { Ok(()) }
}

#[derive(Debug)]
pub(crate) struct ReceiveBuffer {
    memory: Buffer,
    filled: usize,
    /// Its length, but for longer frames.
    usual_bytes: usize,
    /// The same for a member.
    member_bytes: usize,
    /// Bytes that are read at once at most.
    look_ahead: usize,
    /// Frames are left in the buffer that were not looked at yet.
    has_leftovers: bool,
}

impl ReceiveBuffer {
    /// A small one for a stranger; `member_bytes` long once that is a member.
    pub(crate) fn new(member_bytes: usize) -> ReceiveBuffer {
        ReceiveBuffer {
            memory: Buffer::zeroed(GREETING_BYTES / 4),
            filled: 0,
            usual_bytes: GREETING_BYTES,
            member_bytes,
            look_ahead: RECEIVE_BYTES,
            has_leftovers: false,
        }
    }

    /// The peer is a member: from now on it is worth a large buffer.
    pub(crate) fn widen(&mut self) {
        self.usual_bytes = self.member_bytes;
        self.reserve(self.usual_bytes);
    }

    /// Whether there may be something to handle without anything being received.
    pub(crate) fn has_leftovers(&self) -> bool {
        self.has_leftovers
    }

    /// Reads once.
    pub(crate) fn fill(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> Result<(), ReceiveError> {
        let bytes: &mut [u8] = cast_slice_mut(self.memory.as_mut_slice());
        let room = &mut bytes[self.filled..];
        let end = room.len().min(self.look_ahead);
        if let Some(count) = received(read(&mut room[..end]))? {
            self.filled += count;
            if count == end {
                // Many small frames, it seems: few reads for them.
                self.look_ahead = (self.look_ahead * 4).min(RECEIVE_BYTES);
            }
        }
        Ok(())
    }

    /// Calls `take` with every complete frame that was received until it says that this is enough for now. The payloads of
    /// those in `ahead` are where they belong.
    pub(crate) fn handle(
        &mut self,
        limit: usize,
        elsewhere: &mut impl Elsewhere,
        ahead: &mut Ahead,
        take: &mut Take<'_>,
    ) -> Result<(), ReceiveError> {
        let bytes: &mut [u8] = cast_slice_mut(self.memory.as_mut_slice());
        let (mut done, mut needed) = (0, 0);
        let mut wants_more = true;
        let mut room_in_cache = HANDLE_BYTES;
        self.has_leftovers = false;
        while let Some(head) = bytes[done..self.filled].first_chunk::<HEADER_BYTES>() {
            if !wants_more {
                self.has_leftovers = true;
                break;
            }
            let mut header = Header::decode(head)?;
            check_length(&header, limit)?;
            let length = header.payload_bytes as usize;
            let is_elsewhere = header.flags.has(Flags::ELSEWHERE);
            let total = HEADER_BYTES + if is_elsewhere { DESCRIPTOR_BYTES } else { padded(length) };
            let Some(body) = bytes[..self.filled].get(done + HEADER_BYTES..done + total) else {
                needed = total;
                break;
            };
            let is_placed = ahead.take(done);
            done += total;
            if header.kind == Kind::Share {
                elsewhere.take_segment(&header)?;
            } else if is_elsewhere && let Some(descriptor) = body.first_chunk() {
                let payload = elsewhere.payload(&header, descriptor)?;
                header.flags = header.flags.without(Flags::ELSEWHERE);
                wants_more = take(&header, Some(payload));
                if header.kind != Kind::Params {
                    // An answer is where it belongs, and is not read.
                    room_in_cache = room_in_cache.saturating_sub(length);
                    wants_more &= room_in_cache > 0;
                }
            } else {
                wants_more = take(&header, (!is_placed).then_some(&body[..length]));
            }
        }
        if done == self.filled {
            elsewhere.check_settled()?;
        }
        // Everything in the stream is a multiple of a cache line, so payloads stay aligned after the move.
        bytes.copy_within(done..self.filled, 0);
        self.filled -= done;
        ahead.moved(done);
        let len = bytes.len();
        if needed > len {
            self.resize(needed);
        } else if len > self.usual_bytes && needed.max(self.filled) <= self.usual_bytes {
            // One long message is no reason to keep its memory.
            self.resize(self.usual_bytes);
        }
        Ok(())
    }

    /// The frame that begins there, if it is here as a whole. What does not decode is an error for those who handle frames.
    pub(crate) fn frame_at(&self, start: usize) -> Option<Received<'_>> {
        let (head, rest) = self.received().get(start..)?.split_first_chunk::<HEADER_BYTES>()?;
        let header = Header::decode(head).ok()?;
        let length = header.payload_bytes as usize;
        let is_elsewhere = header.flags.has(Flags::ELSEWHERE);
        let body = rest.get(..if is_elsewhere { DESCRIPTOR_BYTES } else { padded(length) })?;
        let payload = (!is_elsewhere).then(|| &body[..length]);
        Some(Received { header, payload, next: start + HEADER_BYTES + body.len() })
    }

    /// What was received and not handled.
    pub(super) fn received(&self) -> &[u8] {
        &cast_slice(self.memory.as_slice())[..self.filled]
    }

    /// Memory for what is received, and what was already.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        cast_slice_mut(self.memory.as_mut_slice())
    }

    /// The first `filled` bytes of its memory are what was received and not handled.
    pub(super) fn set_filled(&mut self, filled: usize) {
        self.filled = filled;
    }

    /// Few bytes are read at once, until that is not enough.
    pub(super) fn look_ahead(&mut self, bytes: usize) {
        self.look_ahead = bytes;
    }

    /// Makes room for so many bytes.
    pub(super) fn reserve(&mut self, bytes: usize) {
        if self.memory.len() * 4 < bytes {
            self.resize(bytes);
        }
    }

    /// Another buffer, with what is in this one.
    fn resize(&mut self, bytes: usize) {
        let words = self.filled.div_ceil(4);
        let mut other = Buffer::zeroed(bytes.div_ceil(4));
        other.as_mut_slice()[..words].copy_from_slice(&self.memory.as_slice()[..words]);
        self.memory = other;
    }
}

/// How many bytes a read brought; `None` when reading again later may bring some.
pub(super) fn received(read: io::Result<usize>) -> Result<Option<usize>, ReceiveError> {
    match read {
        Ok(0) => Err(ReceiveError::end()),
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
