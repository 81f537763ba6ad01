//! Topology files: which hosts are below which switches, for the trees of broadcasts.

use crate::input::read_text;
use anyhow::{Context, Result, ensure};
use paramill_core::broadcast::Topology;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::Path;
use std::thread;

/// Names that are looked up at the same time: each of them may take some seconds to be unknown.
const LOOKUPS: usize = 64;

/// Reads a topology file.
pub(crate) fn read(path: &Path) -> Result<Topology> {
    ensure!(path.as_os_str() != "-", "topology: expected the name of a file, which several processes read");
    let what = || format!("topology file {}", path.display());
    let text = read_text(path).with_context(|| format!("cannot read the {}", what()))?;
    Topology::parse(&text).with_context(what)
}

/// The same with the addresses that the system knows for its hosts' names: members of a job say where they are reached, which may
/// be a name or an address.
pub(crate) fn resolved(topology: Topology) -> Topology {
    with_addresses(topology, |name| {
        let addresses = (name, 0).to_socket_addrs().into_iter().flatten();
        addresses.map(|address| address.ip()).collect()
    })
}

fn with_addresses(topology: Topology, resolve: impl Fn(&str) -> Vec<IpAddr> + Sync) -> Topology {
    let names: Vec<String> = topology.hosts().map(str::to_owned).collect();
    let names: Vec<&String> = names.iter().filter(|name| name.parse::<IpAddr>().is_err()).collect();
    let resolve = &resolve;
    let resolved = names.chunks(LOOKUPS).flat_map(|names| {
        thread::scope(|scope| {
            let lookups: Vec<_> = names.iter().map(|name| scope.spawn(move || resolve(name))).collect();
            lookups.into_iter().map(|lookup| lookup.join().unwrap_or_default()).collect::<Vec<_>>()
        })
    });
    let found: Vec<(String, &String)> = names
        .iter()
        .zip(resolved)
        .flat_map(|(name, addresses)| {
            addresses.into_iter().map(|address| (address.to_string(), *name)).collect::<Vec<_>>()
        })
        .collect();
    found.into_iter().fold(topology, |topology, (address, name)| match topology.known_site(&address) {
        // What the file says itself stands, and so does the first of several names.
        Some(_) => topology,
        None => topology.with_alias(&address, name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_found_by_its_name_and_by_its_addresses() {
        let topology = Topology::default()
            .with_host("node1", "rack1", "row1")
            .with_host("node2", "rack2", "row1")
            .with_host("203.0.113.9", "rack3", "row2");
        let addresses = |name: &str| match name {
            "node1" => vec![[203, 0, 113, 1].into(), [203, 0, 113, 9].into()],
            "node2" => vec![[203, 0, 113, 1].into(), [203, 0, 113, 2].into()],
            other => panic!("{other} is an address"),
        };
        let resolved = with_addresses(topology.clone(), addresses);
        assert_eq!(resolved.site("203.0.113.1"), topology.site("node1"));
        assert_eq!(resolved.site("203.0.113.2"), topology.site("node2"));
        assert_eq!(resolved.site("203.0.113.9"), topology.site("203.0.113.9"));
        assert_eq!(with_addresses(topology.clone(), |_| Vec::new()), topology);
    }
}
