//! Can this address be listened on, or reached, and if not, who or what is in the way?

use super::Check;
use crate::duration::Span;
use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const DEFAULT_PORT: u16 = 7070;

/// A host and a port, from `HOST:PORT`, `HOST`, `:PORT` or `paramill://HOST:PORT/JOB`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    host: String,
    port: u16,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let wrong = || format!("`{text}`: expected HOST:PORT or paramill://HOST:PORT/JOB");
        let authority = match text.strip_prefix("paramill://") {
            Some(rest) => rest.split('/').next().unwrap_or_default(),
            None => text,
        };
        let (host, port) = match authority.rsplit_once(':') {
            // The colons of a bare IPv6 address are not in front of a port.
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
                (host, port.parse().map_err(|_| wrong())?)
            }
            _ => (authority, DEFAULT_PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let host = if host.is_empty() && !authority.is_empty() { "127.0.0.1" } else { host };
        if host.is_empty() || port == 0 || host.contains(['/', ' ', '@']) {
            return Err(wrong());
        }
        Ok(Address { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// A local address is looked at as one to listen on, another as one to reach.
pub(super) fn examine(address: &Address, deadline: Duration) -> Vec<Check> {
    let resolved = match resolve(address, deadline) {
        Ok(resolved) => resolved,
        Err(why) => {
            let remedy = "check the spelling, /etc/hosts and the name server, or give a number";
            return vec![Check::fail("address", format!("{}: {why}", address.host), remedy)];
        }
    };
    if !is_local(resolved.ip()) {
        return vec![reach(resolved, deadline)];
    }
    let port = listen(resolved);
    if port.in_use { vec![port.check, reach(resolved, deadline)] } else { vec![port.check] }
}

/// The system's resolver has no deadline of its own.
fn resolve(address: &Address, deadline: Duration) -> Result<SocketAddr, String> {
    let (sender, receiver) = mpsc::channel();
    let target = (address.host.clone(), address.port);
    thread::spawn(move || sender.send(target.to_socket_addrs()));
    let answer =
        receiver.recv_timeout(deadline).map_err(|_| "the name was not resolved in time".to_owned())?;
    let mut found = answer.map_err(|error| format!("the name is not known ({error})"))?;
    found.next().ok_or_else(|| "the name has no address".to_owned())
}

/// An address of this machine is one that a socket can be bound to.
fn is_local(ip: IpAddr) -> bool {
    TcpListener::bind((ip, 0)).is_ok()
}

struct Port {
    check: Check,
    in_use: bool,
}

fn listen(address: SocketAddr) -> Port {
    match TcpListener::bind(address) {
        Ok(_) => {
            let check = Check::ok("port", format!("{address} is free: a server can listen here"));
            Port { check, in_use: false }
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Port { check: in_use(address), in_use: true }
        }
        Err(error) => {
            let remedy = match error.kind() {
                io::ErrorKind::PermissionDenied => "ports below 1024 are for root; choose a higher one",
                _ => "choose another port or address with --listen HOST:PORT",
            };
            Port {
                check: Check::fail("port", format!("{address} cannot be listened on: {error}"), remedy),
                in_use: false,
            }
        }
    }
}

fn in_use(address: SocketAddr) -> Check {
    let owners = owners(address.port());
    let is_ours = owners.iter().any(|owner| owner.command == "paramill");
    let names: Vec<String> =
        owners.iter().map(|owner| format!("{} (process {})", owner.command, owner.process)).collect();
    match (is_ours, names.is_empty()) {
        (true, _) => Check::ok("port", format!("{address} is held by {}", names.join(", "))),
        (false, false) => Check::warn(
            "port",
            format!("{address} is held by {}", names.join(", ")),
            "to serve here, end that process, or choose another port with --listen HOST:PORT",
        ),
        (false, true) => Check::warn(
            "port",
            format!("{address} is held by a process that this user cannot see"),
            format!(
                "sudo ss -ltnp 'sport = :{}' names it; or choose another port with --listen HOST:PORT",
                address.port()
            ),
        ),
    }
}

/// A process that listens.
struct Owner {
    process: u32,
    command: String,
}

/// The processes that listen on a port, as far as this user may know: the kernel's table of sockets names the
/// socket's inode, and each process links its sockets by that.
fn owners(port: u16) -> Vec<Owner> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap_or_default());
    let links: Vec<String> = tables
        .iter()
        .flat_map(|table| listening_inodes(table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let holds = |process: &u32| {
        let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        files
            .filter_map(|file| fs::read_link(file.path()).ok())
            .any(|target| links.iter().any(|link| target.as_os_str() == link.as_str()))
    };
    let owner = |process: u32| {
        let command = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        Owner { process, command: command.trim().to_owned() }
    };
    numbers.filter(holds).map(owner).collect()
}

/// Inodes of the sockets in `/proc/net/tcp` that listen on this port.
fn listening_inodes(table: &str, port: u16) -> Vec<u64> {
    const LISTEN: &str = "0A";
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let own = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        if own == port && *state == LISTEN { inode.parse().ok() } else { None }
    };
    table.lines().skip(1).filter_map(row).collect()
}

fn reach(address: SocketAddr, deadline: Duration) -> Check {
    let start = Instant::now();
    let error = match TcpStream::connect_timeout(&address, deadline) {
        Ok(_) => {
            let seconds = start.elapsed().as_secs_f64();
            let found = format!("{address} accepts connections, after {:.1} ms", seconds * 1e3);
            return Check::ok("address", found).figure(seconds, "s");
        }
        Err(error) => error,
    };
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Check::fail(
            "address",
            format!("{address} is reached, but nothing listens on port {}", address.port()),
            format!("on that machine: paramill serve --listen {address}"),
        ),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Check::fail(
            "address",
            format!("no answer from {address} within {}", Span(deadline)),
            "the machine is off, or a firewall drops the connection; open the port between the two",
        ),
        _ => Check::fail(
            "address",
            format!("{address} cannot be reached: {error}"),
            "check the address and the route: ip route get",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn addresses_in_all_their_forms() {
        for (text, host, port) in [
            ("10.0.0.7:7071", "10.0.0.7", 7071),
            ("node-3", "node-3", 7070),
            (":9000", "127.0.0.1", 9000),
            ("[::1]:80", "::1", 80),
            ("::1", "::1", 7070),
            ("paramill://node-3:7071/job", "node-3", 7071),
            ("paramill://node-3", "node-3", 7070),
        ] {
            assert_eq!(text.parse::<Address>(), Ok(Address { host: host.into(), port }), "{text}");
        }
        for text in ["", "host:port", "host:0", "host:70000", "http://host:1/x", "paramill://"] {
            assert!(text.parse::<Address>().unwrap_err().contains("expected HOST:PORT"), "{text}");
        }
    }

    #[test]
    fn the_table_of_sockets_is_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:1B9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 646 1 x\n\
             1: 0100007F:1B9E 0100007F:AAAA 01 00000000:00000000 00:00000000 00000000     0        0 647 1 x\n\
             2: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 648 1 x\n\
             broken line\n";
        assert_eq!(listening_inodes(table, 7070), [646]);
        assert_eq!(listening_inodes(table, 80), [648]);
        assert_eq!(listening_inodes("", 80), [0u64; 0]);
    }

    #[test]
    fn a_held_port_names_its_holder_and_can_be_reached() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        let checks = examine(&address, Duration::from_secs(5));
        assert_eq!(checks.len(), 2, "{checks:?}");
        assert!(checks[0].found.contains(&format!("process {}", std::process::id())), "{checks:?}");
        assert_eq!(checks[1].verdict, Verdict::Ok, "{checks:?}");
        drop(listener);
        let checks = examine(&address, Duration::from_secs(5));
        assert!(checks.len() == 1 && checks[0].found.contains("is free"), "{checks:?}");
    }

    #[test]
    fn a_name_that_nobody_knows_is_a_failure_with_a_remedy() {
        let address = Address { host: "no-such-host.invalid".into(), port: 7070 };
        let checks = examine(&address, Duration::from_secs(5));
        assert_eq!((checks.len(), checks[0].verdict), (1, Verdict::Fail));
        assert!(checks[0].remedy.is_some());
    }
}
