//! Sockets by name. Names are in the kernel's abstract namespace: nothing is left in a file system, and a name is free
//! again when its process is gone.
//!
//! A name begins with what tells this boot of this host from all others, so that a process of another host does not
//! try it.

use super::carrier::ShmCarrier;
use super::{SharedAllocator, SharedError, SharedMemory};
use crate::exhaustion;
use crate::transport::carrier::{Carrier, Listener};
use crate::waker::Watched;
use paramill_core::address::LOCAL;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// Digits of the boot's number in a name.
const HOST_DIGITS: usize = 12;
const BACKLOG: i32 = 1024;

/// What all addresses of this host begin with; `None` when the kernel does not say which boot this is.
pub(crate) fn host_prefix() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = boot.chars().filter(char::is_ascii_hexdigit).take(HOST_DIGITS).collect();
    (digits.len() == HOST_DIGITS).then(|| format!("{LOCAL}{digits}-"))
}

/// Listens for processes of this host, and the address to tell them. `name` is nobody else's.
pub(crate) fn listen(name: &str) -> io::Result<(UnixListener, String)> {
    let prefix = host_prefix().ok_or_else(|| {
        io::Error::new(io::ErrorKind::Unsupported, "cannot share memory: the kernel tells no boot number")
    })?;
    let address = format!("{prefix}{name}");
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot listen on {address}: {}", exhaustion::explain(error)))
    };
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(named)?;
    socket.bind(&abstract_name(&address)?).map_err(named)?;
    socket.listen(BACKLOG).map_err(named)?;
    socket.set_nonblocking(true).map_err(named)?;
    Ok((socket.into(), address))
}

/// Connects to a data core of this host, which will share the memory of `allocator`.
pub(crate) fn dial(address: &str, allocator: &SharedAllocator) -> Result<Box<dyn Carrier>, SharedError> {
    if !host_prefix().is_some_and(|prefix| address.starts_with(&prefix)) {
        return Err(SharedError::OtherHost(address.to_owned()));
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&abstract_name(address)?)?;
    let stream = UnixStream::from(socket);
    let memory = SharedMemory::connected(&stream, allocator.clone())?;
    Ok(Box::new(ShmCarrier::new(stream, memory)))
}

impl Watched for UnixListener {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

impl Listener for UnixListener {
    fn accept(&self) -> io::Result<Result<Box<dyn Carrier>, String>> {
        let stream = UnixListener::accept(self)?.0;
        stream.set_nonblocking(true)?;
        Ok(match SharedMemory::accepted(&stream) {
            Ok(memory) => Ok(Box::new(ShmCarrier::new(stream, memory))),
            Err(error) => Err(error.to_string()),
        })
    }
}

/// A name in the abstract namespace begins with a zero byte.
fn abstract_name(address: &str) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0paramill-{}", address.strip_prefix(LOCAL).unwrap_or(address)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_while_somebody_listens() {
        let (listener, address) = listen("naming-test").unwrap();
        assert!(address.starts_with("unix:"), "{address}");
        let allocator = SharedAllocator::new();
        dial(&address, &allocator).unwrap();
        assert!(listener.accept().is_ok());
        assert!(listen("naming-test").unwrap_err().to_string().contains(&address));
        drop(listener);
        assert!(dial(&address, &allocator).is_err());
    }

    #[test]
    fn addresses_of_other_hosts_are_not_tried() {
        let refused = dial("unix:000000000000-x", &SharedAllocator::new()).unwrap_err();
        assert!(matches!(refused, SharedError::OtherHost(_)), "{refused}");
        assert!(refused.to_string().contains("another host"));
    }
}
