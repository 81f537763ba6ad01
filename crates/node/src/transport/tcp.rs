//! TCP sockets: how they are made and what is asked of them.

use super::options::SocketOptions;
use crate::exhaustion;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// A peer that is silent for this long is probed, and given up after as long again.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Prepares a socket that was connected to `peer`, or taken by a listener.
pub(crate) fn prepare(stream: &TcpStream, peer: SocketAddr, options: &SocketOptions) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 5).with_retries(5);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(2 * KEEPALIVE))?;
    options.apply(socket, peer)
}

/// Begins to connect; the socket becomes writable when it is decided. A name with several addresses is tried at
/// another one each time.
pub(crate) fn connect(address: &str, attempt: usize, options: &SocketOptions) -> io::Result<TcpStream> {
    let targets = resolve(address)?;
    let target = targets[attempt % targets.len()];
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&target.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
        Err(error) => return Err(error),
    }
    let stream = socket.into();
    prepare(&stream, target, options)?;
    Ok(stream)
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
