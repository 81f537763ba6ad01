//! TCP: between hosts, and within one where memory is not shared.

mod metered;
pub(crate) mod options;

use super::carrier::{Carrier, Listener};
use super::stream::{Pipe, StreamCarrier};
use crate::exhaustion;
use crate::waker::Watched;
use metered::Metered;
use options::SocketOptions;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// A peer that is silent for this long is probed, and given up after as long again.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Begins to connect; the carrier becomes writable when it is decided.
pub(crate) fn dial(target: SocketAddr, options: &SocketOptions) -> io::Result<Box<dyn Carrier>> {
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&target.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
        Err(error) => return Err(error),
    }
    let stream = socket.into();
    prepare(&stream, target, options)?;
    Ok(carrier(stream, options))
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
        kind => io::Error::new(kind, format!("cannot listen on {address}: {}", exhaustion::explain(error))),
    };
    let socket =
        Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::TCP)).map_err(named)?;
    socket.set_reuse_address(true).map_err(named)?;
    socket.bind(&target.into()).map_err(named)?;
    socket.listen(1024).map_err(named)?;
    socket.set_nonblocking(true).map_err(named)?;
    Ok(socket.into())
}

/// The addresses of a name; at least one. This may take as long as the operating system likes: no event loop calls it.
pub(crate) fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("cannot resolve `{address}`: {error}"));
    let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(named)?.collect();
    if addresses.is_empty() {
        return Err(named(io::Error::new(ErrorKind::NotFound, "no address")));
    }
    Ok(addresses)
}

/// Takes connections from a bound socket, each set up like this.
pub(crate) fn listener(socket: TcpListener, options: &SocketOptions) -> Box<dyn Listener> {
    Box::new(Listening { socket, options: options.clone() })
}

#[derive(Debug)]
struct Listening {
    socket: TcpListener,
    options: SocketOptions,
}

impl Watched for Listening {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
}

impl Listener for Listening {
    fn accept(&self) -> io::Result<Result<Box<dyn Carrier>, String>> {
        let (stream, peer) = self.socket.accept()?;
        prepare(&stream, peer, &self.options)?;
        Ok(Ok(carrier(stream, &self.options)))
    }
}

fn carrier(stream: TcpStream, options: &SocketOptions) -> Box<dyn Carrier> {
    match options.bucket() {
        Some(bucket) => Box::new(StreamCarrier::new(Metered::new(stream, bucket.clone()))),
        None => Box::new(StreamCarrier::new(stream)),
    }
}

impl Pipe for TcpStream {
    fn take_error(&self) -> io::Result<Option<io::Error>> {
        TcpStream::take_error(self)
    }

    fn hang_up(&self) {
        // An error means that the peer hung up first.
        let _ = self.shutdown(Shutdown::Write);
    }
}

/// Prepares a socket that was connected to `peer`, or taken by a listener.
fn prepare(stream: &TcpStream, peer: SocketAddr, options: &SocketOptions) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 5).with_retries(5);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(options.patience(2 * KEEPALIVE)))?;
    options.apply(socket, peer)
}
