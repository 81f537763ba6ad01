//! Who passes streams on to whom, where tables are broadcast.

use crate::address::{Addresses, LOCAL};
use crate::broadcast::{Members, Parent, Receiver, Site, Topology};
use crate::policy::Axis;
use crate::registry::Registry;
use crate::spec::Spec;
use crate::types::{ServerId, ShardId, TableId, WorkerId};
use crate::wire::{Plan, Relay, Route};
use std::collections::BTreeMap;

/// The workers as receivers of streams.
#[derive(Debug, Default)]
pub(super) struct Routes {
    receivers: BTreeMap<WorkerId, Reached>,
    /// What each worker was told last, on the connection that stands.
    told: BTreeMap<WorkerId, Vec<Route>>,
    /// Why there are no trees of the kind that was asked for, if there are none.
    trouble: Option<String>,
    /// It was said.
    is_troubled: bool,
    /// Counts what changes trees, beside the workers that there are.
    revision: u64,
    /// The routes that were made last.
    made: Option<Made>,
}

/// Routes, and what they follow from.
#[derive(Debug)]
struct Made {
    revision: u64,
    workers: Vec<WorkerId>,
    routes: BTreeMap<WorkerId, Vec<Route>>,
}

/// Where a worker is reached by others.
#[derive(Debug)]
struct Reached {
    incarnation: u64,
    addresses: Option<Addresses>,
    /// It gets streams from its aggregator: others have nothing to do with it.
    is_aggregated: bool,
    /// Somebody who tried did not get what it passes on.
    is_out_of_reach: bool,
}

impl Routes {
    /// A worker says where others reach it. One that was out of reach may be so again: only another process is tried anew.
    pub(super) fn register(
        &mut self,
        worker: WorkerId,
        incarnation: u64,
        addresses: Option<Addresses>,
        is_aggregated: bool,
    ) {
        let known = self.receivers.get(&worker).filter(|known| known.incarnation == incarnation);
        let is_same = |known: &Reached| known.addresses == addresses && known.is_aggregated == is_aggregated;
        if known.is_some_and(is_same) {
            return;
        }
        self.revision += 1;
        let is_out_of_reach = known.is_some_and(|known| known.is_out_of_reach);
        self.receivers.insert(worker, Reached { incarnation, addresses, is_aggregated, is_out_of_reach });
    }

    /// Whether it is known where this process is reached.
    pub(super) fn knows(&self, worker: WorkerId, incarnation: Option<u64>) -> bool {
        self.receivers.get(&worker).is_some_and(|known| Some(known.incarnation) == incarnation)
    }

    /// A worker does not get what another should pass on to it: that one is a leaf from now on. Whether that is new.
    pub(super) fn note_out_of_reach(&mut self, by: WorkerId, worker: WorkerId) -> bool {
        let is_its = |route: &Route| route.relay.as_ref().is_some_and(|relay| relay.worker == worker);
        let is_told = self.told.get(&by).is_some_and(|routes| routes.iter().any(is_its));
        let known = self.receivers.get_mut(&worker).filter(|_| is_told);
        let is_new = known.is_some_and(|known| !std::mem::replace(&mut known.is_out_of_reach, true));
        self.revision += u64::from(is_new);
        is_new
    }

    /// What was told to a worker is lost with its connection.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.told.remove(&worker);
    }

    /// The routes of workers for whom they are not what they were told last.
    pub(super) fn changed(
        &mut self,
        registry: &Registry,
        topology: &Topology,
        plan: &Plan,
        workers: &[WorkerId],
    ) -> Vec<(WorkerId, Vec<Route>)> {
        let is_same = |made: &Made| made.revision == self.revision && made.workers == workers;
        if !self.made.as_ref().is_some_and(is_same) {
            let mut routes = workers.iter().map(|worker| (*worker, Vec::new())).collect();
            for (text, tables) in groups(plan) {
                self.add(registry, topology, plan, workers, (&text, &tables), &mut routes);
            }
            self.made = Some(Made { revision: self.revision, workers: workers.to_vec(), routes });
        }
        let mut routes = self.made.as_ref().map(|made| made.routes.clone()).unwrap_or_default();
        let told = &mut self.told;
        told.retain(|worker, _| routes.contains_key(worker));
        routes.retain(|worker, routes| told.get(worker) != Some(routes) && !(routes.is_empty()));
        told.extend(routes.iter().map(|(worker, routes)| (*worker, routes.clone())));
        routes.into_iter().collect()
    }

    /// A sentence about trees that cannot be made, once.
    pub(super) fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take_if(|_| !std::mem::replace(&mut self.is_troubled, true))
    }

    /// Adds the routes of tables that are broadcast in the same way.
    fn add(
        &mut self,
        registry: &Registry,
        topology: &Topology,
        plan: &Plan,
        workers: &[WorkerId],
        (text, tables): (&str, &[TableId]),
        routes: &mut BTreeMap<WorkerId, Vec<Route>>,
    ) {
        let shards: Vec<ShardId> = plan.shards.iter().map(|served| served.shard).collect();
        let sites: Vec<Site> = plan.shards.iter().map(|served| site(topology, &served.addresses)).collect();
        let is_aggregated = |worker: &WorkerId| self.receivers.get(worker).is_some_and(|it| it.is_aggregated);
        let (aggregated, workers): (Vec<WorkerId>, Vec<WorkerId>) =
            workers.iter().partition(|worker| is_aggregated(worker));
        let receivers: Vec<Receiver> =
            workers.iter().map(|worker| self.receiver(topology, *worker)).collect();
        let members = Members { roots: &sites, receivers: &receivers, topology };
        let broadcast = Spec::parse(text).and_then(|spec| registry.broadcast.build(&spec));
        let forest = broadcast
            .map_err(|error| error.to_string())
            .and_then(|broadcast| broadcast.forest(&members).map_err(|error| error.to_string()));
        if let Err(why) = &forest {
            // Members that outgrow a tree are no reason to end a job.
            let sentence =
                format!("{why}; until then every worker gets versions from the servers themselves");
            self.trouble.get_or_insert(sentence);
        }
        for (root, &shard) in shards.iter().enumerate() {
            for (receiver, worker) in workers.iter().enumerate() {
                let relay = match forest.as_ref().map(|forest| forest.parent(root, receiver)) {
                    Ok(Parent::Receiver(parent)) => self.relay(workers[parent]),
                    Ok(Parent::Root) | Err(_) => None,
                };
                let route = Route { shard, tables: tables.to_vec(), relay };
                routes.entry(*worker).or_default().push(route);
            }
            for worker in &aggregated {
                let route = Route { shard, tables: tables.to_vec(), relay: None };
                routes.entry(*worker).or_default().push(route);
            }
        }
    }

    fn receiver(&self, topology: &Topology, worker: WorkerId) -> Receiver {
        let known = self.receivers.get(&worker);
        match known.and_then(|known| known.addresses.as_ref().zip(Some(!known.is_out_of_reach))) {
            Some((addresses, can_relay)) => Receiver { site: site(topology, addresses), can_relay },
            None => Receiver { site: topology.site(&worker.to_string()), can_relay: false },
        }
    }

    fn relay(&self, worker: WorkerId) -> Option<Relay> {
        let addresses = self.receivers.get(&worker)?.addresses.clone();
        addresses.map(|addresses| Relay { worker, addresses })
    }
}

/// Where the node with these addresses is: the topology may name its host by any of them.
fn site(topology: &Topology, addresses: &Addresses) -> Site {
    let is_remote = |address: &&str| !address.starts_with(LOCAL);
    let hosts = || addresses.iter().filter(is_remote).map(host);
    let known = hosts().find_map(|host| topology.known_site(host));
    known.unwrap_or_else(|| topology.site(hosts().next().unwrap_or_default()))
}

/// The host of an address, without its port.
fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// The tables that are broadcast, by the text that says how.
fn groups(plan: &Plan) -> BTreeMap<String, Vec<TableId>> {
    let mut groups: BTreeMap<String, Vec<TableId>> = BTreeMap::new();
    for number in (0..plan.tables.len() as u32).map(TableId) {
        let policy = plan.policy_of(number, ServerId(0));
        if policy.is_broadcast() {
            groups.entry(policy.get(Axis::Broadcast).to_owned()).or_default().push(number);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_found_by_any_of_its_addresses() {
        let topology = Topology::default()
            .with_host("node1", "rack1", "row1")
            .with_host("203.0.113.2", "rack2", "row1")
            .with_host("2001:db8::3", "rack3", "row1");
        let site_of = |addresses: &[&str]| {
            site(&topology, &addresses.iter().map(|address| address.to_string()).collect::<Addresses>())
        };
        assert_eq!(site_of(&["unix:@abc", "198.51.100.1:70", "node1:7100"]), topology.site("node1"));
        assert_eq!(site_of(&["203.0.113.2:7100"]), topology.site("203.0.113.2"));
        assert_eq!(site_of(&["[2001:db8::3]:7100"]), topology.site("2001:db8::3"));
        // One that nobody named is near to itself, whatever its port.
        assert_eq!(site_of(&["unix:@x", "198.51.100.1:70"]), site_of(&["unix:@y", "198.51.100.1:71"]));
        assert_eq!(site_of(&["198.51.100.1:70"]), topology.site("198.51.100.1"));
    }
}
