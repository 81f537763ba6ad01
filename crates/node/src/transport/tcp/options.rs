//! Options of TCP sockets that depend on how the peer is reached.

use crate::rate::{Bucket, Rate};
use crate::transport::Transport;
use paramill_core::limits;
use socket2::{Domain, SockRef, Socket, Type};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Between processes of one host nothing is ever lost on the way, and an algorithm that paces what it sends (bbr) only
/// holds it back: loopback carries half as much.
const CONGESTION_WITHIN_THE_HOST: &str = "reno";

/// Each way, and the system takes twice as much for its own records. Left to itself it lets tens of megabytes wait in
/// every connection of a host, which leave the caches before they are read, and lets who sends first run ahead of the
/// others.
const BUFFER_WITHIN_THE_HOST: usize = 256 << 10;

/// Bytes that wait in a socket beyond the host without being sent. What waits in a socket cannot be overtaken, and the system
/// would let megabytes wait.
pub const UNSENT_BEYOND_THE_HOST: u32 = 256 << 10;

/// How sockets are set up.
#[derive(Debug, Clone, Default)]
pub(crate) struct SocketOptions {
    congestion: Option<String>,
    /// What all sockets of the node send through.
    bucket: Option<Arc<Bucket>>,
    /// How long the peer's host may leave what was sent unacknowledged, if that is shorter than usual.
    patience: Option<Duration>,
}

impl SocketOptions {
    /// With a congestion control algorithm by name, which is tried now. Otherwise what is best within a host, and the
    /// system's default beyond it.
    pub(crate) fn new(congestion: Option<&str>) -> io::Result<SocketOptions> {
        if let Some(name) = congestion {
            let trial = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            trial.set_tcp_congestion(name.as_bytes()).map_err(|error| {
                let sentence = format!(
                    "cannot use congestion control `{name}`: {error}; this system allows: {}",
                    allowed()
                );
                io::Error::new(error.kind(), sentence)
            })?;
        }
        Ok(SocketOptions { congestion: congestion.map(str::to_owned), bucket: None, patience: None })
    }

    /// At most at this rate over all sockets together. Refused where data does not go over sockets.
    pub(crate) fn at_rate(
        self,
        rate: Option<Rate>,
        transport: Transport,
        is_in_memory: bool,
    ) -> io::Result<SocketOptions> {
        if let Some(rate) = rate.filter(|_| is_in_memory || !transport.allows(false)) {
            let why =
                format!("rate {rate}: memory that is shared moves no bytes that could be held back; use TCP");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(SocketOptions { bucket: rate.map(|rate| Arc::new(Bucket::new(rate))), ..self })
    }

    /// The same for connections of control: a node that is held back still says that it lives.
    pub(crate) fn for_control(&self) -> SocketOptions {
        SocketOptions { bucket: None, ..self.clone() }
    }

    /// The same for a member's connection to the coordinator. Another host may take over soon after the coordinator's is gone, and gives up the
    /// members that do not come to it.
    pub(crate) fn for_coordinator(&self) -> SocketOptions {
        SocketOptions { patience: Some(limits::ATTEMPT_DEADLINE), ..self.for_control() }
    }

    /// How long the peer's host may leave what was sent unacknowledged.
    pub(super) fn patience(&self, usual: Duration) -> Duration {
        self.patience.unwrap_or(usual)
    }

    pub(super) fn bucket(&self) -> Option<&Arc<Bucket>> {
        self.bucket.as_ref()
    }

    /// Sets up a socket that was accepted from `peer`, or that has begun to connect to it.
    pub(crate) fn apply(&self, socket: SockRef<'_>, peer: SocketAddr) -> io::Result<()> {
        let local = socket.local_addr().ok().and_then(|address| address.as_socket());
        let is_within_the_host = is_within_the_host(local, peer);
        if is_within_the_host {
            socket.set_send_buffer_size(BUFFER_WITHIN_THE_HOST)?;
            socket.set_recv_buffer_size(BUFFER_WITHIN_THE_HOST)?;
        } else {
            socket.set_tcp_notsent_lowat(UNSENT_BEYOND_THE_HOST)?;
        }
        match &self.congestion {
            Some(name) => socket.set_tcp_congestion(name.as_bytes())?,
            None if is_within_the_host => {
                // A system without it has its reasons; its default carries everything, too.
                let _ = socket.set_tcp_congestion(CONGESTION_WITHIN_THE_HOST.as_bytes());
            }
            None => {}
        }
        Ok(())
    }
}

/// Loopback, or the same address on both ends.
fn is_within_the_host(local: Option<SocketAddr>, peer: SocketAddr) -> bool {
    let peer = peer.ip().to_canonical();
    peer.is_loopback() || local.is_some_and(|local| local.ip().to_canonical() == peer)
}

/// What a user may choose from.
fn allowed() -> String {
    let file = if rustix::process::geteuid().is_root() { "available" } else { "allowed" };
    let path = format!("/proc/sys/net/ipv4/tcp_{file}_congestion_control");
    std::fs::read_to_string(path).map_or_else(|_| "unknown".into(), |names| names.trim().replace(' ', ", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn congestion(stream: &TcpStream) -> String {
        let name = SockRef::from(stream).tcp_congestion().expect("Linux tells");
        String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned()
    }

    #[test]
    fn a_name_is_taken_and_loopback_is_not_paced_without_one() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it is bound");
        // Every Linux has reno, and lets everybody use it.
        for chosen in [None, Some("reno")] {
            let options = SocketOptions::new(chosen).expect("it exists");
            let connecting = TcpStream::connect(address).expect("somebody listens");
            options.apply((&connecting).into(), address).expect("a socket like any other");
            let (accepted, peer) = listener.accept().expect("somebody connects");
            options.apply((&accepted).into(), peer).expect("a socket like any other");
            assert_eq!([congestion(&connecting), congestion(&accepted)], ["reno", "reno"], "{chosen:?}");
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known_ones() {
        let error = SocketOptions::new(Some("no-such-thing")).expect_err("unknown").to_string();
        assert!(error.contains("`no-such-thing`") && error.contains("reno"), "{error}");
    }

    #[test]
    fn a_rate_is_refused_where_no_bytes_move() {
        let rate = Some("800Mbit".parse().expect("a rate"));
        for (transport, is_in_memory, is_taken) in [
            (Transport::Auto, false, true),
            (Transport::Tcp, false, true),
            (Transport::Shm, false, false),
            (Transport::Auto, true, false),
        ] {
            let options = SocketOptions::default().at_rate(rate, transport, is_in_memory);
            assert_eq!(options.is_ok(), is_taken, "{transport}");
            if let Ok(options) = options {
                assert!(options.bucket().is_some() && options.for_control().bucket().is_none());
            }
        }
        assert!(SocketOptions::default().at_rate(None, Transport::Shm, true).is_ok());
    }

    #[test]
    fn the_same_address_on_both_ends_is_the_same_host() {
        let address = |text: &str| -> SocketAddr { text.parse().expect("an address") };
        assert!(is_within_the_host(None, address("127.0.0.9:1")));
        assert!(is_within_the_host(None, address("[::1]:1")));
        assert!(is_within_the_host(Some(address("10.0.0.1:7")), address("10.0.0.1:1")));
        assert!(is_within_the_host(Some(address("[::ffff:10.0.0.1]:7")), address("10.0.0.1:1")));
        assert!(!is_within_the_host(Some(address("10.0.0.1:7")), address("10.0.0.2:1")));
        assert!(!is_within_the_host(None, address("10.0.0.2:1")));
    }
}
