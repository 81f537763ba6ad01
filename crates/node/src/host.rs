//! Hosts in addresses: which are this machine's own, and how one of IPv6 is written before a port.

use paramill_core::address::LOCAL;
use std::io;
use std::net::IpAddr;

/// `host:port`. An address of IPv6 is put in brackets, unless it is in brackets already.
pub fn with_port(host: &str, port: u16) -> String {
    // Names have no colons. What stands after a `%` is the scope of an address.
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// The same host with the port that is so many later; any free port stays that.
pub(crate) fn with_later_port(address: &str, later: u32) -> io::Result<String> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    match parts {
        Some((_, 0)) => Ok(address.to_owned()),
        _ if later == 0 => Ok(address.to_owned()),
        Some((host, port)) => match u16::try_from(u32::from(port) + later) {
            Ok(port) => Ok(with_port(host, port)),
            Err(_) => {
                let why = format!("`{address}`: {later} ports follow it, and there is none after 65535");
                Err(io::Error::new(io::ErrorKind::InvalidInput, why))
            }
        },
        None => {
            let why = format!("`{address}`: expected HOST:PORT");
            Err(io::Error::new(io::ErrorKind::InvalidInput, why))
        }
    }
}

/// Whether only this machine can connect to an address: a host, `host:port`, or one of shared memory. Names other than
/// `localhost` are taken for those of other machines.
pub fn is_of_this_machine(address: &str) -> bool {
    let host = match address.rsplit_once(':') {
        _ if ip(address).is_some() => address,
        Some((host, port)) if port.parse::<u16>().is_ok() => host,
        _ => address,
    };
    match ip(host) {
        Some(ip) => ip.to_canonical().is_loopback(),
        None => host == "localhost" || address.starts_with(LOCAL),
    }
}

/// Whether a host stands for all addresses of a machine, which nobody can connect to.
pub(crate) fn is_any(host: &str) -> bool {
    ip(host).is_some_and(|ip| ip.is_unspecified())
}

/// An address as numbers, in brackets or not.
fn ip(host: &str) -> Option<IpAddr> {
    let inner = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    inner.unwrap_or(host).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ports_of_further_cores_follow() {
        let later = |address: &str, later| with_later_port(address, later).map_err(|error| error.to_string());
        assert_eq!(later("10.0.0.1:7071", 0).as_deref(), Ok("10.0.0.1:7071"));
        assert_eq!(later("10.0.0.1:7071", 3).as_deref(), Ok("10.0.0.1:7074"));
        assert_eq!(later("[::1]:7071", 1).as_deref(), Ok("[::1]:7072"));
        assert_eq!(later("host:0", 2).as_deref(), Ok("host:0"));
        assert!(later("host:65535", 1).unwrap_err().contains("none after 65535"));
        assert!(later("host", 1).unwrap_err().contains("expected HOST:PORT"));
    }

    #[test]
    fn loopback_is_known_in_every_form() {
        for own in [
            "127.0.0.1:7070",
            "127.9.9.9:1",
            "127.0.0.1",
            "[::1]:7070",
            "[::1]",
            "::1",
            "[::ffff:127.0.0.1]:7070",
            "localhost:7070",
            "localhost",
            "unix:name",
        ] {
            assert!(is_of_this_machine(own), "{own}");
        }
        for other in
            ["0.0.0.0:7070", "[::]:7070", "::", "10.0.0.1:7070", "host:7070", "host", "[2001:db8::1]:80"]
        {
            assert!(!is_of_this_machine(other), "{other}");
        }
    }

    #[test]
    fn an_address_of_version_6_is_put_in_brackets_once() {
        for (host, expected) in [
            ("::1", "[::1]:80"),
            ("[::1]", "[::1]:80"),
            ("fe80::1%eth0", "[fe80::1%eth0]:80"),
            ("10.0.0.1", "10.0.0.1:80"),
            ("node7", "node7:80"),
        ] {
            assert_eq!(with_port(host, 80), expected);
        }
    }
}
