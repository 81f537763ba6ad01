//! One connection over a byte stream: a receive buffer that frames are handled in, and frames that wait to be written.
//!
//! The stream is TCP, or a Unix socket with shared memory beside it. Both carry the same frames; over the latter a
//! payload may lie elsewhere.

mod landing;

use super::shm::{SharedError, SharedMemory};
use bytemuck::cast_slice_mut;
use paramill_core::limits;
use paramill_core::role::{Body, Frame, Role};
use paramill_core::store::Buffer;
use paramill_core::wire::{DESCRIPTOR_BYTES, Flags, HEADER_BYTES, Header, Kind, WireError, padded};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// Bytes received at once at most: many chunks per system call, and no more than stay in the nearest caches until they are
/// added and what follows from them has left. They are whole frames of a long push, so that none is left in part, which
/// would have to be moved.
const RECEIVE_BYTES: usize = 8 * (HEADER_BYTES + 4 * limits::BLOCK_ELEMENTS);
/// The same where payloads lie elsewhere.
const RECEIVE_DESCRIPTORS: usize = 16 << 10;
/// Payloads of a peer's memory that are handled at once, which stay in the caches as those do that were received.
const HANDLE_BYTES: usize = 8 * 4 * limits::BLOCK_ELEMENTS;
/// Bytes that are made at once for a socket with shared memory beside it.
const SEND_DESCRIPTORS: usize = 16 << 10;
/// Turns that a few descriptors wait for more: those of a peer whose buffer is full of them. Other peers may always bring
/// more.
const LONGEST_HOLD: u32 = (RECEIVE_DESCRIPTORS / (HEADER_BYTES + DESCRIPTOR_BYTES) / 8) as u32;
/// What is kept of the memory for a long payload.
const KEPT_REST: usize = 1 << 20;
/// Bytes received at once from a peer that has not said who it is, or from a command: memory is for members.
const GREETING_BYTES: usize = 8192;
const _: () = assert!(GREETING_BYTES >= HEADER_BYTES + limits::MAX_COMMAND_BYTES + HEADER_BYTES);
/// A payload of up to so many bytes is copied beside its header: a slice of its own would cost more.
const STAGED_PAYLOAD: usize = 4096;
/// Frames gathered into one `writev`: two slices each, below the kernel's 1024.
const GATHER_FRAMES: usize = 256;
/// No more are gathered than these bytes need. A socket hardly takes more at once, and what it leaves is gathered again.
const GATHER_BYTES: usize = 1 << 19;
/// Writes to one connection before others get their turn.
const WRITES_PER_TURN: usize = 4;
const PADDING: [u8; HEADER_BYTES] = [0; HEADER_BYTES];

/// What frames travel over.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream, SharedMemory),
}

/// A connected, or connecting, stream.
#[derive(Debug)]
pub(crate) struct StreamConnection {
    stream: Stream,
    /// Both ends know who they are.
    is_open: bool,
    /// The peer is a command: a stranger that says little.
    is_command: bool,
    receive: Buffer,
    filled: usize,
    /// A frame whose payload is received where it belongs. The receive buffer is empty then.
    arriving: Option<landing::Arriving>,
    scratch: landing::Scratch,
    /// Frames in the receive buffer that were put to where they belong.
    ahead: landing::Ahead,
    /// Bytes that are read at once into the receive buffer at most.
    look_ahead: usize,
    /// Frames are left in the buffer that were not looked at yet.
    has_leftovers: bool,
    waiting: VecDeque<Frame>,
    /// Memory that was taken for the frames that wait.
    waiting_bytes: usize,
    /// The rest of a frame that the socket took only in part; with shared memory beside it, all frames that were described.
    rest: Vec<u8>,
    rest_sent: usize,
    /// Turns that the rest has waited for more to write with it.
    turns_waited: u32,
    /// Bytes of the first frame that waits which are sent. Its payload does not change.
    first_sent: usize,
    /// Kept from write to write for their memory.
    staged: Vec<u8>,
    cuts: Vec<Option<usize>>,
    slices: Vec<IoSlice<'static>>,
}

/// How far a flush came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// Everything is out.
    Done,
    /// The socket takes no more for now.
    Blocked,
    /// It was others' turn.
    Enough,
}

impl StreamConnection {
    pub(crate) fn new(stream: Stream) -> StreamConnection {
        StreamConnection {
            stream,
            is_open: false,
            is_command: false,
            receive: Buffer::zeroed(GREETING_BYTES / 4),
            filled: 0,
            arriving: None,
            scratch: landing::Scratch::default(),
            ahead: landing::Ahead::default(),
            look_ahead: RECEIVE_BYTES,
            has_leftovers: false,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            rest: Vec::new(),
            rest_sent: 0,
            turns_waited: 0,
            first_sent: 0,
            staged: Vec::new(),
            cuts: Vec::new(),
            slices: Vec::new(),
        }
    }

    /// Calls `handle` with every complete frame that was received until it says that this is enough for now, and with whether its
    /// payload was put to where it belongs. A payload of more than `limit` bytes is an error before memory is taken for it.
    pub(crate) fn handle(
        &mut self,
        limit: usize,
        mut handle: impl FnMut(&Header, &[u8], bool) -> bool,
    ) -> Result<(), ReceiveError> {
        let bytes: &mut [u8] = cast_slice_mut(self.receive.as_mut_slice());
        let (mut done, mut needed) = (0, 0);
        let mut wants_more = true;
        let mut room_in_cache = HANDLE_BYTES;
        self.has_leftovers = false;
        while let Some(head) = bytes[done..self.filled].first_chunk::<HEADER_BYTES>() {
            if !wants_more {
                self.has_leftovers = true;
                break;
            }
            let mut header = Header::decode(head).map_err(ReceiveError::Wire)?;
            let length = header.payload_bytes as usize;
            if length > limit {
                let kind = header.kind;
                return Err(ReceiveError::Wire(WireError::TooLong { kind, bytes: length, limit }));
            }
            let is_elsewhere = header.flags.has(Flags::ELSEWHERE);
            let total = HEADER_BYTES + if is_elsewhere { DESCRIPTOR_BYTES } else { padded(length) };
            let Some(body) = bytes[..self.filled].get(done + HEADER_BYTES..done + total) else {
                needed = total;
                break;
            };
            let is_placed = self.ahead.take(done);
            done += total;
            if header.kind == Kind::Share {
                self.stream.take_segment(self.is_open, &header)?;
            } else if is_elsewhere {
                let payload = self.stream.payload(&header, body)?;
                header.flags = header.flags.without(Flags::ELSEWHERE);
                wants_more = handle(&header, payload, false);
                if header.kind != Kind::Params {
                    // An answer is where it belongs, and is not read.
                    room_in_cache = room_in_cache.saturating_sub(length);
                    wants_more &= room_in_cache > 0;
                }
            } else {
                wants_more = handle(&header, &body[..length], is_placed);
            }
        }
        if done == self.filled
            && let Stream::Unix(_, memory) = &mut self.stream
        {
            memory.check_settled().map_err(ReceiveError::Shared)?;
        }
        // Everything in the stream is a multiple of a cache line, so payloads stay aligned after the move.
        bytes.copy_within(done..self.filled, 0);
        self.filled -= done;
        self.ahead.moved(done);
        let (len, usual) = (bytes.len(), self.usual_receive_bytes());
        if needed > len {
            self.resize(needed);
        } else if len > usual && needed.max(self.filled) <= usual {
            // One long message is no reason to keep its memory.
            self.resize(usual);
        }
        Ok(())
    }

    /// Reads once.
    pub(crate) fn fill(&mut self) -> Result<(), ReceiveError> {
        let bytes: &mut [u8] = cast_slice_mut(self.receive.as_mut_slice());
        let room = &mut bytes[self.filled..];
        let end = room.len().min(self.look_ahead);
        let room = &mut room[..end];
        let read = match &mut self.stream {
            Stream::Tcp(stream) => stream.read(room),
            Stream::Unix(stream, memory) => match memory.read(stream, room) {
                Ok(count) => Ok(count),
                Err(SharedError::System(error)) => Err(error),
                Err(error) => return Err(ReceiveError::Shared(error)),
            },
        };
        match read {
            Ok(0) => Err(ReceiveError::Io(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed"))),
            Ok(count) => {
                self.filled += count;
                if count == end {
                    // Many small frames, it seems: few reads for them.
                    self.look_ahead = (self.look_ahead * 4).min(RECEIVE_BYTES);
                }
                Ok(())
            }
            Err(error) if is_passing(&error) => Ok(()),
            Err(error) => Err(ReceiveError::Io(error)),
        }
    }

    /// Whether there may be something to handle without anything being received.
    pub(crate) fn has_leftovers(&self) -> bool {
        self.has_leftovers
    }

    /// The peer has been let in: from now on it is worth a large buffer.
    pub(crate) fn opened(&mut self) {
        self.is_open = true;
        let usual = self.usual_receive_bytes();
        if self.receive.len() * 4 < usual {
            self.resize(usual);
        }
    }

    /// A command has been let in. What it says is short.
    pub(crate) fn opened_for_command(&mut self) {
        self.is_open = true;
        self.is_command = true;
    }

    fn usual_receive_bytes(&self) -> usize {
        match (self.is_open && !self.is_command, &self.stream) {
            (false, _) => GREETING_BYTES,
            (true, Stream::Tcp(_)) => RECEIVE_BYTES,
            (true, Stream::Unix(..)) => RECEIVE_DESCRIPTORS,
        }
    }

    /// Queues a frame behind those that wait.
    pub(crate) fn queue(&mut self, frame: Frame) {
        self.waiting_bytes += frame.memory_bytes();
        self.waiting.push_back(frame);
    }

    /// Writes as much as the socket takes, up to [`WRITES_PER_TURN`]. `role` finds payloads that it stores itself. When
    /// `more` is about to come, a few descriptors wait for it: each write wakes a process that has little to do then.
    pub(crate) fn flush(&mut self, role: Option<&impl Role>, more: bool) -> io::Result<Flushed> {
        for _ in 0..WRITES_PER_TURN {
            let written = match self.describe(role) {
                Err(error) => Err(error),
                Ok(()) if self.is_silent() => return Ok(Flushed::Done),
                Ok(()) if more && self.may_wait() => {
                    self.turns_waited += 1;
                    return Ok(Flushed::Enough);
                }
                Ok(()) if self.rest_sent < self.rest.len() => {
                    self.stream.write(&self.rest[self.rest_sent..]).map(|count| self.rest_sent += count)
                }
                Ok(()) => self.write_gathered(role),
            };
            match written {
                Ok(()) => self.turns_waited = 0,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Flushed::Blocked),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(if self.is_silent() { Flushed::Done } else { Flushed::Enough })
    }

    /// Whether what is to be written is a few descriptors that have not waited for long.
    fn may_wait(&self) -> bool {
        matches!(self.stream, Stream::Unix(..))
            && self.rest.len() < SEND_DESCRIPTORS
            && self.waiting.is_empty()
            && self.turns_waited < LONGEST_HOLD
    }

    /// Whether nothing waits to be written.
    pub(crate) fn is_silent(&self) -> bool {
        self.waiting.is_empty() && self.rest_sent == self.rest.len()
    }

    /// Whether so much waits that its owner should not ask for more.
    pub(crate) fn is_congested(&self) -> bool {
        match self.is_command {
            // It asks one thing at a time: what it has not taken is not added to.
            true => !self.waiting.is_empty(),
            false => {
                self.waiting.len() > limits::MAX_WAITING_FRAMES
                    || self.waiting_bytes > limits::MAX_BACKLOG_BYTES
            }
        }
    }

    /// One `writev` over many frames, large payloads straight from where they live.
    fn write_gathered(&mut self, role: Option<&impl Role>) -> io::Result<()> {
        self.staged.clear();
        self.cuts.clear();
        let mut gathered = 0;
        for frame in self.waiting.iter_mut().take(GATHER_FRAMES) {
            if gathered >= GATHER_BYTES {
                break;
            }
            gathered += frame.header.payload_bytes as usize;
            if let (Body::Stored { .. }, Some(role)) = (&frame.body, role) {
                role.refresh(&mut frame.header);
            }
            self.staged.extend_from_slice(&frame.header.encode());
            let payload = payload_of(role, frame);
            let is_staged = payload.len() <= STAGED_PAYLOAD;
            if is_staged {
                self.staged.extend_from_slice(payload);
            }
            let cut = self.staged.len();
            self.staged.extend_from_slice(&PADDING[..padded(payload.len()) - payload.len()]);
            // A small payload is between header and padding already; a large one goes there.
            self.cuts.push((!is_staged).then_some(cut));
        }
        let mut slices = recycled(std::mem::take(&mut self.slices));
        let mut begin = 0;
        for (frame, cut) in self.waiting.iter().zip(&self.cuts) {
            if let Some(cut) = *cut {
                slices.push(IoSlice::new(&self.staged[begin..cut]));
                slices.push(IoSlice::new(payload_of(role, frame)));
                begin = cut;
            }
        }
        slices.push(IoSlice::new(&self.staged[begin..]));
        let mut unsent = &mut slices[..];
        IoSlice::advance_slices(&mut unsent, self.first_sent);
        let written = self.stream.write_vectored(unsent);
        self.slices = recycled(slices);
        let mut left = self.first_sent + written?;
        self.first_sent = 0;
        let mut sent = 0;
        self.rest.clear();
        self.rest_sent = 0;
        for frame in self.waiting.iter().take(self.cuts.len()) {
            let total = HEADER_BYTES + padded(frame.header.payload_bytes as usize);
            if left == 0 {
                break;
            }
            if left < total && !matches!(frame.body, Body::Stored { .. }) {
                self.first_sent = left;
                break;
            }
            sent += 1;
            if left < total {
                // The bytes of one frame are taken between two events: what is left of it is copied now.
                let payload = payload_of(role, frame);
                let padding = &PADDING[..padded(payload.len()) - payload.len()];
                for piece in [&frame.header.encode()[..], payload, padding] {
                    let skip = left.min(piece.len());
                    self.rest.extend_from_slice(&piece[skip..]);
                    left -= skip;
                }
                break;
            }
            left -= total;
        }
        self.waiting_bytes -= self.waiting.drain(..sent).map(|frame| frame.memory_bytes()).sum::<usize>();
        Ok(())
    }

    /// Makes the bytes of some frames for a socket with shared memory beside it. What of a payload lies elsewhere by now
    /// is done with: it is put there once, however often the socket is full.
    fn describe(&mut self, role: Option<&impl Role>) -> io::Result<()> {
        let Stream::Unix(stream, memory) = &mut self.stream else { return Ok(()) };
        if self.rest_sent == self.rest.len() {
            self.rest.clear();
            self.rest.shrink_to(KEPT_REST);
            self.rest_sent = 0;
            if self.is_open {
                memory.announce(stream)?;
            }
        } else if memory.has_news() {
            // What may refer to a segment comes after its announcement, and that comes between frames.
            return Ok(());
        }
        while self.rest.len() < SEND_DESCRIPTORS
            && let Some(mut frame) = self.waiting.pop_front()
        {
            self.waiting_bytes -= frame.memory_bytes();
            if let (Body::Stored { .. }, Some(role)) = (&frame.body, role) {
                role.refresh(&mut frame.header);
            }
            let payload = payload_of(role, &frame);
            let descriptor = memory
                .put_elsewhere(&frame.header, &frame.body, payload)
                .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
            match descriptor {
                Some(descriptor) => {
                    frame.header.flags = frame.header.flags.with(Flags::ELSEWHERE);
                    self.rest.extend_from_slice(&frame.header.encode());
                    self.rest.extend_from_slice(&descriptor.encode());
                }
                None => {
                    self.rest.extend_from_slice(&frame.header.encode());
                    self.rest.extend_from_slice(payload);
                    self.rest.extend_from_slice(&PADDING[..padded(payload.len()) - payload.len()]);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream, _) => stream.as_fd(),
        }
    }

    /// Why the attempt to connect failed, if it did.
    pub(crate) fn take_error(&self) -> io::Result<Option<io::Error>> {
        match &self.stream {
            Stream::Tcp(stream) => stream.take_error(),
            Stream::Unix(stream, _) => stream.take_error(),
        }
    }

    /// Tells the peer that nothing more comes.
    pub(crate) fn hang_up(&self) {
        // An error means that the peer hung up first.
        let _ = match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream, _) => stream.shutdown(Shutdown::Write),
        };
    }

    /// Makes room for so many bytes in the receive buffer.
    fn reserve(&mut self, bytes: usize) {
        if self.receive.len() * 4 < bytes {
            self.resize(bytes);
        }
    }

    /// Another buffer, with what is in this one.
    fn resize(&mut self, bytes: usize) {
        let words = self.filled.div_ceil(4);
        let mut other = Buffer::zeroed(bytes.div_ceil(4));
        other.as_mut_slice()[..words].copy_from_slice(&self.receive.as_slice()[..words]);
        self.receive = other;
    }
}

impl Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream, _) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write_vectored(slices),
            Stream::Unix(stream, _) => stream.write_vectored(slices),
        }
    }

    /// The peer shares a segment.
    fn take_segment(&mut self, is_open: bool, header: &Header) -> Result<(), ReceiveError> {
        match self {
            Stream::Unix(_, memory) if is_open => memory.take_segment(header).map_err(ReceiveError::Shared),
            _ => Err(out_of_place("kind", header.kind as u8)),
        }
    }

    /// The payload that a descriptor stands for.
    fn payload(&self, header: &Header, descriptor: &[u8]) -> Result<&[u8], ReceiveError> {
        match (self, descriptor.first_chunk()) {
            (Stream::Unix(_, memory), Some(descriptor)) => {
                memory.payload(header, descriptor).map_err(ReceiveError::Shared)
            }
            _ => Err(out_of_place("flags", header.flags.0)),
        }
    }
}

/// A value that is defined, but not for this connection.
fn out_of_place(field: &'static str, value: u8) -> ReceiveError {
    ReceiveError::Wire(WireError::Field { field, value: u64::from(value) })
}

/// Whether reading again later may do.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// The bytes of a frame, from where they live.
fn payload_of<'a>(role: Option<&'a impl Role>, frame: &'a Frame) -> &'a [u8] {
    let payload = match role {
        Some(role) => role.payload(&frame.body),
        None => frame.body.bytes().expect("a role that is shared stores nothing itself"),
    };
    assert_eq!(payload.len(), frame.header.payload_bytes as usize, "a header tells its payload's length");
    payload
}

/// The memory of an empty list of slices, for slices of another lifetime.
fn recycled<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    slices.into_iter().map(|_| IoSlice::new(&[])).collect()
}

/// Why nothing more can be received.
#[derive(Debug)]
pub(crate) enum ReceiveError {
    Io(io::Error),
    Wire(WireError),
    Shared(SharedError),
}

impl std::fmt::Display for ReceiveError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ReceiveError::Io(error) => write!(f, "{error}"),
            ReceiveError::Wire(error) => write!(f, "{error}"),
            ReceiveError::Shared(error) => write!(f, "{error}"),
        }
    }
}

#[cfg(test)]
mod tests;
