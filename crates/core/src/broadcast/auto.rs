//! The forest whose busiest link has the least to carry.

use super::{Broadcast, Forest, ForestError, Members, Parent, Site, rotated, star, tree};
use crate::registry::Entry;
use serde::Deserialize;
use std::collections::BTreeMap;

pub(super) const ENTRY: Entry<dyn Broadcast> = Entry {
    name: "auto",
    about: "The one of star, rotated:degree=2 and, where uplinks are oversubscribed, tree:degree=5 whose busiest link carries least.",
    params: &[],
    example: "auto",
    build: |spec| Ok(Box::new(spec.config::<Auto>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Auto {}

impl Broadcast for Auto {
    fn forest(&self, members: &Members<'_>) -> Result<Forest, ForestError> {
        // Of equals the one with fewer hops: few receivers get a star.
        let mut best = star::star(members);
        let mut least = busiest(&best, members);
        let mut consider = |forest: Forest| {
            let load = busiest(&forest, members);
            // Sums of the same parts in another order may differ in the last digits.
            if load < least * (1.0 - 1e-9) {
                (best, least) = (forest, load);
            }
        };
        consider(rotated::by_default(members));
        let uplinks = members.topology.oversubscription();
        if uplinks.edge > 1.0 || uplinks.aggregation > 1.0 {
            // Too few relays for a tree within the bounds: the others need none.
            tree::flattest(members).into_iter().for_each(&mut consider);
        }
        Ok(best)
    }
}

/// How long the busiest link takes, in the time in which a host's link carries all parameters once. Each root has an equal part of
/// them.
pub(super) fn busiest(forest: &Forest, members: &Members<'_>) -> f64 {
    /// A link's two directions.
    #[derive(Debug, Clone, Copy, Default)]
    struct Load {
        out: usize,
        into: usize,
    }
    let mut hosts: BTreeMap<u64, Load> = BTreeMap::new();
    let mut edges: BTreeMap<u64, Load> = BTreeMap::new();
    let mut aggregations: BTreeMap<u64, Load> = BTreeMap::new();
    let mut carry = |from: Site, to: Site| {
        for (links, from, to) in [
            (&mut hosts, from.host, to.host),
            (&mut edges, from.edge, to.edge),
            (&mut aggregations, from.aggregation, to.aggregation),
        ] {
            if from != to {
                links.entry(from).or_default().out += 1;
                links.entry(to).or_default().into += 1;
            }
        }
    };
    for (root, &site) in members.roots.iter().enumerate() {
        for (receiver, to) in members.receivers.iter().enumerate() {
            let from = match forest.parent(root, receiver) {
                Parent::Root => site,
                Parent::Receiver(parent) => members.receivers[parent].site,
            };
            carry(from, to.site);
        }
    }
    let (below_edges, below_aggregations) = members.topology.hosts_below();
    let uplinks = members.topology.oversubscription();
    let longest = |links: &BTreeMap<u64, Load>, hosts: &BTreeMap<u64, usize>, oversubscription: f64| {
        let time = |(link, load): (&u64, &Load)| {
            // An uplink of switches that the topology does not name is that of a host.
            let capacity = hosts.get(link).map_or(1.0, |&hosts| hosts as f64 / oversubscription);
            load.out.max(load.into) as f64 / capacity
        };
        links.iter().map(time).fold(0.0, f64::max)
    };
    let parts = members.roots.len() as f64;
    let of_hosts = longest(&hosts, &BTreeMap::new(), 1.0);
    let of_edges = longest(&edges, &below_edges, uplinks.edge);
    // What leaves the hosts below an aggregation switch passed the uplinks of its edge switches.
    let of_aggregations = longest(&aggregations, &below_aggregations, uplinks.edge * uplinks.aggregation);
    of_hosts.max(of_edges).max(of_aggregations) / parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broadcast::{Oversubscription, Receiver, Topology};

    /// `workers` workers and `servers` servers, each on a host of its own, in four racks of two rows.
    fn chosen(workers: usize, servers: usize, edge: f64) -> (Forest, [f64; 3]) {
        let name = |number: usize| format!("node{number}");
        let add = |topology: Topology, number: usize| {
            let rack = number % 4;
            topology.with_host(&name(number), &format!("rack{rack}"), &format!("row{}", rack / 2))
        };
        let topology = (0..workers + servers).fold(Topology::default(), add);
        let topology = topology.with_oversubscription(Oversubscription { edge, aggregation: 1.0 });
        let roots: Vec<Site> =
            (workers..workers + servers).map(|number| topology.site(&name(number))).collect();
        let receivers: Vec<Receiver> = (0..workers)
            .map(|number| Receiver { site: topology.site(&name(number)), can_relay: true })
            .collect();
        let members = Members { roots: &roots, receivers: &receivers, topology: &topology };
        let forest = Auto {}.forest(&members).unwrap();
        forest.check(&members).unwrap();
        let candidates =
            [star::star(&members), rotated::by_default(&members), tree::flattest(&members).unwrap()];
        (forest, candidates.map(|candidate| busiest(&candidate, &members)))
    }

    #[test]
    fn few_receivers_get_a_star() {
        for (workers, servers) in [(1, 1), (2, 1), (4, 4), (3, 10)] {
            let (forest, _) = chosen(workers, servers, 1.0);
            assert_eq!(forest.depth(), 1, "{workers} workers, {servers} servers");
        }
    }

    /// A server's link carries 40 tenths under a star, and 10 in rotated trees, where a worker's carries as much.
    #[test]
    fn the_papers_cluster_gets_rotated_trees() {
        let (forest, [star, rotated, tree]) = chosen(40, 10, 1.0);
        assert!(!forest.is_shared());
        assert_eq!((star, rotated), (4.0, 1.0));
        assert!(tree > 1.9, "an inner worker of a shared tree sends everything several times: {tree}");
    }

    #[test]
    fn uplinks_that_are_oversubscribed_count() {
        let (forest, [star, rotated, tree]) = chosen(40, 10, 20.0);
        // An uplink of a rack's 12 or 13 hosts carries less than one host's link.
        assert!(rotated < star && rotated > 1.0, "{star} {rotated} {tree}");
        let least = star.min(rotated).min(tree);
        assert_eq!(if forest.is_shared() { tree } else { rotated }, least, "{star} {rotated} {tree}");
    }
}
