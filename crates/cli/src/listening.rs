//! Where servers and aggregators listen: for this machine only, unless they are told otherwise.

use paramill_node::host;

/// The port of an aggregator when none is given.
pub(crate) const AGGREGATOR_PORT: u16 = 7071;

/// The address to listen on: what was typed, or a port of the host that was typed, or of this machine alone.
pub(crate) fn address(listen: Option<&str>, host: Option<&str>, port: u16) -> String {
    listen.map_or_else(|| host::with_port(host.unwrap_or("127.0.0.1"), port), str::to_owned)
}

/// A sentence about who can connect to these addresses, each a host or `HOST:PORT`.
pub(crate) fn who_can_connect<'a>(addresses: impl IntoIterator<Item = &'a str>) -> &'static str {
    if addresses.into_iter().all(host::is_of_this_machine) {
        "only this machine can connect; --host ADDRESS (or 0.0.0.0, all addresses of this machine) lets others, \
             who need no password: there is no authentication yet"
    } else {
        "whoever reaches these addresses can read and change parameters and end the job: there is no authentication \
             yet, so use a trusted network only"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_this_machine_alone() {
        assert_eq!(address(None, None, 7070), "127.0.0.1:7070");
        assert_eq!(address(None, Some("10.0.0.1"), 7070), "10.0.0.1:7070");
        assert_eq!(address(Some("0.0.0.0:9"), Some("10.0.0.1"), 7070), "0.0.0.0:9");
        assert_eq!(address(None, Some("::1"), 7070), "[::1]:7070");
        assert_eq!(address(None, Some("[::1]"), 7070), "[::1]:7070");
    }

    #[test]
    fn an_address_of_the_network_is_not_of_this_machine() {
        for own in [
            "127.0.0.1:7070",
            "127.0.0.1",
            "[::1]:80",
            "[::1]",
            "::1",
            "[::ffff:127.0.0.1]:80",
            "localhost:1",
        ] {
            assert!(who_can_connect([own]).starts_with("only this machine"), "{own}");
        }
        for open in ["0.0.0.0:7070", "0.0.0.0", "[::]:80", "10.0.0.1:7070", "node7:7070", "node7"] {
            assert!(who_can_connect(["127.0.0.1:1", open]).starts_with("whoever"), "{open}");
        }
    }
}
