//! One TCP connection: a receive buffer that frames are handled in, and frames that wait to be written.

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
const PADDING: [u8; HEADER_BYTES] = [0; HEADER_BYTES];

/// A connected, or connecting, stream.
#[derive(Debug)]
pub(crate) struct TcpConnection {
    pub(crate) stream: TcpStream,
    receive: Buffer,
    filled: usize,
    waiting: VecDeque<Frame>,
    /// The rest of a frame that the socket took only in part.
    rest: Vec<u8>,
    rest_sent: usize,
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
            waiting: VecDeque::new(),
            rest: Vec::new(),
            rest_sent: 0,
        })
    }

    /// Begins to connect; the socket becomes writable when it is decided. A name with several addresses is tried at
    /// another one each time.
    pub(crate) fn connect(address: &str, attempt: usize) -> io::Result<TcpConnection> {
        let targets = resolve(address)?;
        let target = targets[attempt % targets.len()];
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        match socket.connect(&target.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
            Err(error) => return Err(error),
        }
        TcpConnection::new(socket.into())
    }

    /// Reads once and calls `handle` with every complete frame. `Ok(false)` when nothing more is to be read now.
    pub(crate) fn receive(&mut self, mut handle: impl FnMut(&Header, &[u8])) -> Result<bool, ReceiveError> {
        let bytes: &mut [u8] = cast_slice_mut(self.receive.as_mut_slice());
        let room = bytes.len() - self.filled;
        let count = match self.stream.read(&mut bytes[self.filled..]) {
            Ok(0) => {
                return Err(ReceiveError::Io(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed")));
            }
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(ReceiveError::Io(error)),
        };
        self.filled += count;
        let mut done = 0;
        let mut needed = 0;
        while let Some(head) = bytes[done..self.filled].first_chunk::<HEADER_BYTES>() {
            let header = Header::decode(head).map_err(ReceiveError::Wire)?;
            let length = header.payload_bytes as usize;
            let total = HEADER_BYTES + padded(length);
            if self.filled - done < total {
                needed = total;
                break;
            }
            handle(&header, &bytes[done + HEADER_BYTES..done + HEADER_BYTES + length]);
            done += total;
        }
        // Everything in the stream is a multiple of a cache line, so payloads stay aligned after the move.
        bytes.copy_within(done..self.filled, 0);
        self.filled -= done;
        if needed > bytes.len() {
            self.grow(needed);
        }
        Ok(count == room)
    }

    /// The peer has been let in: from now on it is worth a large buffer.
    pub(crate) fn opened(&mut self) {
        if self.receive.len() * 4 < RECEIVE_BYTES {
            self.grow(RECEIVE_BYTES);
        }
    }

    /// Queues a frame behind those that wait.
    pub(crate) fn queue(&mut self, frame: Frame) {
        self.waiting.push_back(frame);
    }

    /// Writes as much as the socket takes. True when everything is out.
    pub(crate) fn flush(&mut self, role: &impl Role) -> io::Result<bool> {
        loop {
            while self.rest_sent < self.rest.len() {
                match self.stream.write(&self.rest[self.rest_sent..]) {
                    Ok(count) => self.rest_sent += count,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            self.rest.clear();
            self.rest_sent = 0;
            if self.waiting.is_empty() {
                return Ok(true);
            }
            match self.write_gathered(role) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether so much waits that its owner should not ask for more.
    pub(crate) fn is_congested(&self) -> bool {
        self.waiting.len() > limits::MAX_WAITING_FRAMES
    }

    /// One `writev` over many frames, their payloads straight from the role's memory.
    fn write_gathered(&mut self, role: &impl Role) -> io::Result<()> {
        let count = self.waiting.len().min(GATHER_FRAMES);
        let heads: Vec<[u8; HEADER_BYTES]> = self
            .waiting
            .iter_mut()
            .take(count)
            .map(|frame| {
                if let Body::Stored { .. } = frame.body {
                    role.refresh(&mut frame.header);
                }
                frame.header.encode()
            })
            .collect();
        let mut slices = Vec::with_capacity(count * 3);
        for (frame, head) in self.waiting.iter().zip(&heads) {
            let payload = role.payload(&frame.body);
            assert_eq!(
                payload.len(),
                frame.header.payload_bytes as usize,
                "a header tells its payload's length"
            );
            slices.push(IoSlice::new(head));
            slices.push(IoSlice::new(payload));
            slices.push(IoSlice::new(&PADDING[..padded(payload.len()) - payload.len()]));
        }
        let mut written = self.stream.write_vectored(&slices)?;
        let mut sent = 0;
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
        self.waiting.drain(..sent);
        Ok(())
    }

    fn grow(&mut self, bytes: usize) {
        let mut bigger = Buffer::zeroed(bytes.div_ceil(4));
        bigger.as_mut_slice()[..self.filled.div_ceil(4)]
            .copy_from_slice(&self.receive.as_slice()[..self.filled.div_ceil(4)]);
        self.receive = bigger;
    }
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
