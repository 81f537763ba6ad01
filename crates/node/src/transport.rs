//! How frames get from one node to another: TCP between hosts, shared memory between processes of one host, queues
//! within one process.

pub(crate) mod memory;
pub(crate) mod options;
pub(crate) mod resolver;
pub(crate) mod shm;
pub(crate) mod stream;
pub(crate) mod tcp;

use options::SocketOptions;
use serde::{Deserialize, Serialize};
use shm::{SharedError, SharedMemory};
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::str::FromStr;
use stream::Stream;

/// How workers and data cores exchange gradients and parameters. Control messages always go over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory where both are on one host and may share it, TCP elsewhere.
    #[default]
    Auto,
    /// TCP only.
    Tcp,
    /// Shared memory only.
    Shm,
}

impl Transport {
    /// Their names, as users write them.
    pub const NAMES: [&str; 3] = ["auto", "tcp", "shm"];

    /// Whether addresses of this host, or of the network, may be used.
    pub(crate) fn allows(self, is_local: bool) -> bool {
        match self {
            Transport::Auto => true,
            Transport::Tcp => !is_local,
            Transport::Shm => is_local,
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Transport::NAMES[*self as usize])
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Transport, String> {
        match text {
            "auto" => Ok(Transport::Auto),
            "tcp" => Ok(Transport::Tcp),
            "shm" => Ok(Transport::Shm),
            other => Err(format!("unknown transport `{other}`; there are {}", Transport::NAMES.join(", "))),
        }
    }
}

/// Where peers come in.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Takes a connection. The inner error is about who connected, not about the listener.
    pub(crate) fn accept(&self, options: &SocketOptions) -> io::Result<Result<Stream, SharedError>> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, peer) = listener.accept()?;
                tcp::prepare(&stream, peer, options)?;
                Ok(Ok(Stream::Tcp(stream)))
            }
            Listener::Unix(listener) => {
                let stream = listener.accept()?.0;
                stream.set_nonblocking(true)?;
                Ok(SharedMemory::accepted(&stream).map(|memory| Stream::Unix(stream, memory)))
            }
        }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name, transport) in
            Transport::NAMES.into_iter().zip([Transport::Auto, Transport::Tcp, Transport::Shm])
        {
            assert_eq!((name.parse(), transport.to_string().as_str()), (Ok(transport), name));
        }
        let error = "udp".parse::<Transport>().unwrap_err();
        assert!(error.contains("`udp`") && error.contains("auto, tcp, shm"), "{error}");
    }
}
