//! Who passes streams on to whom, where tables are broadcast.

use crate::address::{Addresses, LOCAL};
use crate::broadcast::{Members, Parent, Receiver, Site, Topology};
use crate::policy::Axis;
use crate::registry::Registry;
use crate::spec::Spec;
use crate::status::ReceiverStatus;
use crate::types::{Clock, ServerId, ShardId, TableId, WorkerId};
use crate::wire::{Plan, Relay, Route};
use std::collections::{BTreeMap, BTreeSet};

/// From whom workers and readers get streams. Trees are those of the workers; readers come and go without changing them.
#[derive(Debug, Default)]
pub(super) struct Routes {
    /// Workers that said where they are reached.
    receivers: BTreeMap<WorkerId, Reached>,
    /// What each receiver was told last, on the connection that stands.
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
    /// Of workers and readers.
    routes: BTreeMap<WorkerId, Vec<Route>>,
    room: Room,
}

/// Where readers find a place.
#[derive(Debug, Default)]
struct Room {
    /// What a receiver follows: a shard's streams of these tables.
    streams: Vec<(ShardId, Vec<TableId>)>,
    /// Of the workers that others reach: how many followers each has, over all of these, readers among them.
    followers: BTreeMap<WorkerId, usize>,
    /// As many as the busiest worker has in the trees: a reader does not make a worker busier than that.
    most: usize,
}

impl Room {
    /// The worker with the fewest followers, if it has room for one more.
    fn take(&mut self) -> Option<WorkerId> {
        let (worker, count) = self.followers.iter_mut().min_by_key(|(_, count)| **count)?;
        (*count < self.most).then(|| {
            *count += 1;
            *worker
        })
    }

    fn give_back(&mut self, worker: WorkerId) {
        if let Some(count) = self.followers.get_mut(&worker) {
            *count -= 1;
        }
    }
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

    /// A reader is gone, and leaves its place to others.
    pub(super) fn detach(&mut self, reader: WorkerId) {
        self.told.remove(&reader);
        let Some(Made { routes, room, .. }) = &mut self.made else { return };
        let relays = routes.remove(&reader).into_iter().flatten().filter_map(|route| route.relay);
        relays.for_each(|relay| room.give_back(relay.worker));
    }

    /// The routes of those for whom they are not what they were told last. Trees are made anew only when workers have changed.
    pub(super) fn changed(
        &mut self,
        registry: &Registry,
        topology: &Topology,
        plan: &Plan,
        workers: &[WorkerId],
        readers: &[WorkerId],
    ) -> Vec<(WorkerId, Vec<Route>)> {
        let is_same = |made: &Made| made.revision == self.revision && made.workers == workers;
        if !self.made.as_ref().is_some_and(is_same) {
            let mut routes = workers.iter().map(|worker| (*worker, Vec::new())).collect();
            for (text, tables) in groups(plan) {
                self.add(registry, topology, plan, workers, (&text, &tables), &mut routes);
            }
            let room = self.room(plan, workers, &routes);
            self.made = Some(Made { revision: self.revision, workers: workers.to_vec(), routes, room });
        }
        readers.iter().for_each(|reader| self.attach(*reader));
        let (Some(made), told) = (&self.made, &mut self.told) else { return Vec::new() };
        told.retain(|receiver, _| made.routes.contains_key(receiver));
        let is_news = |(receiver, routes): &(&WorkerId, &Vec<Route>)| {
            told.get(receiver) != Some(*routes) && !routes.is_empty()
        };
        let news = made.routes.iter().filter(is_news);
        let changed: Vec<_> = news.map(|(receiver, routes)| (*receiver, routes.clone())).collect();
        told.extend(changed.iter().cloned());
        changed
    }

    /// What the trees leave to readers.
    fn room(&self, plan: &Plan, workers: &[WorkerId], routes: &BTreeMap<WorkerId, Vec<Route>>) -> Room {
        let shards = || plan.shards.iter().map(|served| served.shard);
        let groups = groups(plan);
        let streams = groups.values().flat_map(|tables| shards().map(|shard| (shard, tables.clone())));
        let can_relay = |worker: &&WorkerId| {
            let known = self.receivers.get(worker).filter(|known| !known.is_out_of_reach);
            known.is_some_and(|known| known.addresses.is_some())
        };
        let mut followers: BTreeMap<WorkerId, usize> =
            workers.iter().filter(can_relay).map(|worker| (*worker, 0)).collect();
        for relay in routes.values().flatten().filter_map(|route| route.relay.as_ref()) {
            followers.entry(relay.worker).and_modify(|count| *count += 1);
        }
        let most = followers.values().copied().max().unwrap_or(0);
        Room { streams: streams.collect(), followers, most }
    }

    /// A reader gets streams from the workers that have room, and from the shards where none has. It stays there until trees
    /// are made anew.
    fn attach(&mut self, reader: WorkerId) {
        let Some(made) = self.made.as_mut().filter(|made| !made.routes.contains_key(&reader)) else { return };
        let (room, receivers) = (&mut made.room, &self.receivers);
        let streams = room.streams.clone().into_iter();
        let routes = streams.map(|(shard, tables)| {
            let relay = room.take().and_then(|worker| relay(receivers, worker));
            Route { shard, tables, relay }
        });
        made.routes.insert(reader, routes.collect());
    }

    /// Everybody who was told from whom streams come, with the version that it says to have.
    pub(super) fn statuses(&self, version_of: impl Fn(WorkerId) -> Option<Clock>) -> Vec<ReceiverStatus> {
        let mut followers: BTreeMap<WorkerId, u32> = BTreeMap::new();
        let mut statuses = Vec::with_capacity(self.told.len());
        for (receiver, routes) in &self.told {
            let relays = routes.iter().map(|route| route.relay.as_ref().map(|relay| relay.worker));
            let sources: BTreeSet<Option<WorkerId>> = relays.collect();
            sources.iter().flatten().for_each(|relay| *followers.entry(*relay).or_default() += 1);
            let name = |source: &Option<WorkerId>| {
                source.map_or_else(|| "the servers".to_owned(), |relay| relay.to_string())
            };
            let takes_from = sources.iter().map(name).collect();
            let version = version_of(*receiver);
            let status = ReceiverStatus { receiver: receiver.to_string(), version, takes_from, followers: 0 };
            statuses.push((receiver, status));
        }
        let count = |(receiver, status): (&WorkerId, ReceiverStatus)| ReceiverStatus {
            followers: followers.get(receiver).copied().unwrap_or(0),
            ..status
        };
        statuses.into_iter().map(count).collect()
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
                    Ok(Parent::Receiver(parent)) => relay(&self.receivers, workers[parent]),
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
}

fn relay(receivers: &BTreeMap<WorkerId, Reached>, worker: WorkerId) -> Option<Relay> {
    let addresses = receivers.get(&worker)?.addresses.clone();
    addresses.map(|addresses| Relay { worker, addresses })
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
