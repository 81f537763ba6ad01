//! One TCP connection: a receive buffer that frames are handled in, and frames that wait to be written.

use super::options::SocketOptions;
use bytemuck::cast_slice_mut;
use paramill_core::limits;
use paramill_core::role::{Body, Frame, Role};
use paramill_core::store::Buffer;
use paramill_core::wire::{HEADER_BYTES, Header, WireError, padded};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Bytes received at once at most: many chunks per system call.
const RECEIVE_BYTES: usize = 1 << 20;
/// The same for a peer that has not said who it is: memory is for members.
const GREETING_BYTES: usize = 8192;
/// A peer that is silent for this long is probed, and given up after as long again.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Frames gathered into one `writev`: two slices each, three with padding, below the kernel's 1024.
const GATHER_FRAMES: usize = 256;
/// Writes to one connection before others get their turn.
const WRITES_PER_TURN: usize = 4;
const PADDING: [u8; HEADER_BYTES] = [0; HEADER_BYTES];

/// A connected, or connecting, stream.
#[derive(Debug)]
pub(crate) struct TcpConnection {
    pub(crate) stream: TcpStream,
    receive: Buffer,
    filled: usize,
    /// Frames are left in the buffer that were not looked at yet.
    has_leftovers: bool,
    waiting: VecDeque<Frame>,
    /// Memory that was taken for the frames that wait.
    waiting_bytes: usize,
    /// The rest of a frame that the socket took only in part.
    rest: Vec<u8>,
    rest_sent: usize,
    /// Kept from write to write for their memory.
    heads: Vec<[u8; HEADER_BYTES]>,
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

impl TcpConnection {
    pub(crate) fn new(stream: TcpStream) -> io::Result<TcpConnection> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 5).with_retries(5);
        socket.set_tcp_keepalive(&keepalive)?;
        socket.set_tcp_user_timeout(Some(2 * KEEPALIVE))?;
        Ok(TcpConnection {
            stream,
            receive: Buffer::zeroed(GREETING_BYTES / 4),
            filled: 0,
            has_leftovers: false,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            rest: Vec::new(),
            rest_sent: 0,
            heads: Vec::new(),
            slices: Vec::new(),
        })
    }

    /// Begins to connect; the socket becomes writable when it is decided. A name with several addresses is tried at
    /// another one each time.
    pub(crate) fn connect(
        address: &str,
        attempt: usize,
        options: &SocketOptions,
    ) -> io::Result<TcpConnection> {
        let targets = resolve(address)?;
        let target = targets[attempt % targets.len()];
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        match socket.connect(&target.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
            Err(error) => return Err(error),
        }
        options.apply((&socket).into(), target)?;
        TcpConnection::new(socket.into())
    }

    /// Calls `handle` with every complete frame that was received until it says that this is enough for now. A payload
    /// of more than `limit` bytes is an error before memory is taken for it. `Ok(false)` when it was enough.
    pub(crate) fn handle(
        &mut self,
        limit: usize,
        mut handle: impl FnMut(&Header, &[u8]) -> bool,
    ) -> Result<bool, ReceiveError> {
        let bytes: &mut [u8] = cast_slice_mut(self.receive.as_mut_slice());
        let (mut done, mut needed) = (0, 0);
        let mut wants_more = true;
        self.has_leftovers = false;
        while let Some(head) = bytes[done..self.filled].first_chunk::<HEADER_BYTES>() {
            if !wants_more {
                self.has_leftovers = true;
                break;
            }
            let header = Header::decode(head).map_err(ReceiveError::Wire)?;
            let length = header.payload_bytes as usize;
            if length > limit {
                let kind = header.kind;
                return Err(ReceiveError::Wire(WireError::TooLong { kind, bytes: length, limit }));
            }
            let total = HEADER_BYTES + padded(length);
            if self.filled - done < total {
                needed = total;
                break;
            }
            wants_more = handle(&header, &bytes[done + HEADER_BYTES..done + HEADER_BYTES + length]);
            done += total;
        }
        // Everything in the stream is a multiple of a cache line, so payloads stay aligned after the move.
        bytes.copy_within(done..self.filled, 0);
        self.filled -= done;
        let len = bytes.len();
        if needed > len {
            self.resize(needed);
        } else if len > RECEIVE_BYTES && needed.max(self.filled) <= RECEIVE_BYTES {
            // One long message is no reason to keep its memory.
            self.resize(RECEIVE_BYTES);
        }
        Ok(wants_more)
    }

    /// Reads once. True when as much came as there was room for.
    pub(crate) fn fill(&mut self) -> Result<bool, ReceiveError> {
        let bytes: &mut [u8] = cast_slice_mut(self.receive.as_mut_slice());
        let room = bytes.len() - self.filled;
        match self.stream.read(&mut bytes[self.filled..]) {
            Ok(0) => Err(ReceiveError::Io(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed"))),
            Ok(count) => {
                self.filled += count;
                Ok(count == room)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(ReceiveError::Io(error)),
        }
    }

    /// Whether there may be something to handle without anything being received.
    pub(crate) fn has_leftovers(&self) -> bool {
        self.has_leftovers
    }

    /// The peer has been let in: from now on it is worth a large buffer.
    pub(crate) fn opened(&mut self) {
        if self.receive.len() * 4 < RECEIVE_BYTES {
            self.resize(RECEIVE_BYTES);
        }
    }

    /// Queues a frame behind those that wait.
    pub(crate) fn queue(&mut self, frame: Frame) {
        self.waiting_bytes += frame.memory_bytes();
        self.waiting.push_back(frame);
    }

    /// Writes as much as the socket takes, up to [`WRITES_PER_TURN`]. `role` finds payloads that it stores itself.
    pub(crate) fn flush(&mut self, role: Option<&impl Role>) -> io::Result<Flushed> {
        for _ in 0..WRITES_PER_TURN {
            let written = if self.rest_sent < self.rest.len() {
                self.stream.write(&self.rest[self.rest_sent..]).map(|count| self.rest_sent += count)
            } else if self.waiting.is_empty() {
                return Ok(Flushed::Done);
            } else {
                self.write_gathered(role)
            };
            match written {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Flushed::Blocked),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(if self.is_silent() { Flushed::Done } else { Flushed::Enough })
    }

    /// Whether nothing waits to be written.
    pub(crate) fn is_silent(&self) -> bool {
        self.waiting.is_empty() && self.rest_sent == self.rest.len()
    }

    /// Whether so much waits that its owner should not ask for more.
    pub(crate) fn is_congested(&self) -> bool {
        self.waiting.len() > limits::MAX_WAITING_FRAMES || self.waiting_bytes > limits::MAX_BACKLOG_BYTES
    }

    /// One `writev` over many frames, their payloads straight from where they live.
    fn write_gathered(&mut self, role: Option<&impl Role>) -> io::Result<()> {
        self.heads.clear();
        self.heads.extend(self.waiting.iter_mut().take(GATHER_FRAMES).map(|frame| {
            if let (Body::Stored { .. }, Some(role)) = (&frame.body, role) {
                role.refresh(&mut frame.header);
            }
            frame.header.encode()
        }));
        let mut slices = recycled(std::mem::take(&mut self.slices));
        for (frame, head) in self.waiting.iter().zip(&self.heads) {
            let payload = match role {
                Some(role) => role.payload(&frame.body),
                None => frame.body.bytes().expect("a role that is shared stores nothing itself"),
            };
            assert_eq!(
                payload.len(),
                frame.header.payload_bytes as usize,
                "a header tells its payload's length"
            );
            slices.push(IoSlice::new(head));
            slices.push(IoSlice::new(payload));
            slices.push(IoSlice::new(&PADDING[..padded(payload.len()) - payload.len()]));
        }
        let written = self.stream.write_vectored(&slices);
        let mut sent = 0;
        if let Ok(mut written) = written {
            self.rest.clear();
            self.rest_sent = 0;
            for frame_slices in slices.chunks_exact(3) {
                let total: usize = frame_slices.iter().map(|slice| slice.len()).sum();
                sent += 1;
                if written < total {
                    // The bytes of one frame are taken between two events: what is left of it is copied now.
                    for slice in frame_slices {
                        let skip = written.min(slice.len());
                        self.rest.extend_from_slice(&slice[skip..]);
                        written -= skip;
                    }
                    break;
                }
                written -= total;
                if written == 0 {
                    break;
                }
            }
        }
        self.slices = recycled(slices);
        self.waiting_bytes -= self.waiting.drain(..sent).map(|frame| frame.memory_bytes()).sum::<usize>();
        written.map(|_| ())
    }

    /// Another buffer, with what is in this one.
    fn resize(&mut self, bytes: usize) {
        let words = self.filled.div_ceil(4);
        let mut other = Buffer::zeroed(bytes.div_ceil(4));
        other.as_mut_slice()[..words].copy_from_slice(&self.receive.as_slice()[..words]);
        self.receive = other;
    }
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
}

impl std::fmt::Display for ReceiveError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ReceiveError::Io(error) => write!(f, "{error}"),
            ReceiveError::Wire(error) => write!(f, "{error}"),
        }
    }
}

/// Binds a listener; a port in use is named.
pub(crate) fn listen(address: &str) -> io::Result<TcpListener> {
    let target = resolve(address)?[0];
    let named = |error: io::Error| match error.kind() {
        ErrorKind::AddrInUse => {
            let sentence =
                format!("{address} is in use by another program; choose another port or end that program");
            io::Error::new(ErrorKind::AddrInUse, sentence)
        }
        kind => io::Error::new(kind, format!("cannot listen on {address}: {error}")),
    };
    let socket =
        Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::TCP)).map_err(named)?;
    socket.set_reuse_address(true).map_err(named)?;
    socket.bind(&target.into()).map_err(named)?;
    socket.listen(1024).map_err(named)?;
    socket.set_nonblocking(true).map_err(named)?;
    Ok(socket.into())
}

/// The addresses of a name; at least one.
pub(crate) fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("cannot resolve `{address}`: {error}"));
    let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(named)?.collect();
    if addresses.is_empty() {
        return Err(named(io::Error::new(ErrorKind::NotFound, "no address")));
    }
    Ok(addresses)
}
