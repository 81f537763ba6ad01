//! Which node is on which host, in which rack, and the words for hosts and links in a scenario.

use super::{Scenario, ScenarioError, require};
use crate::network::{
    BackgroundConfig, BackgroundFlow, Direction, HostId, LinkId, Network, NetworkConfig, Position, Racks,
    RateChange, ThreeTier, Topology,
};
use paramill_core::broadcast::{self, Oversubscription};
use paramill_core::types::{NodeId, Time};
use std::collections::{BTreeMap, BTreeSet};

/// Where everybody is.
#[derive(Debug, Clone)]
pub struct Hosts {
    servers: u32,
    workers: u32,
    aggregators: u32,
    aggregator_cores: u32,
    readers: u32,
    colocated: bool,
    /// Nodes that share a host by the scenario's word.
    shared: BTreeMap<Member, HostId>,
    racks: Option<(ThreeTier, Racks)>,
    background: Vec<BackgroundFlow>,
    changes: Vec<(Time, LinkId, f64)>,
}

/// Somebody who has a place. All cores of a server, or of an aggregator, are in one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Member {
    Server(u32),
    Worker(u32),
    Aggregator(u32),
    Reader(u32),
    Coordinator,
}

/// One number of a kind, or every one.
#[derive(Debug, Clone, Copy)]
enum Which {
    One(u32),
    Every,
}

const MEMBERS: &str = "`server=N`, `worker=N`, `aggregator=N` or `coordinator`";
const LINKS: &str = "`server=N`, `worker=N`, `aggregator=N`, `coordinator`, `edge=N`, `aggregation=N` or `core`, with `*` for \
                     every number, and `:up` or `:down` behind it for one direction";

/// Spare cores are numbered by their server, and then one after the other.
pub const SPARES_OF_A_SERVER: u32 = 16;

impl Hosts {
    /// The places of a scenario. The error says what in it cannot be placed.
    pub fn of(scenario: &Scenario) -> Result<Hosts, ScenarioError> {
        let network = &scenario.network;
        network.check().map_err(ScenarioError::Value)?;
        let mut hosts = Hosts {
            servers: scenario.servers,
            workers: scenario.workers,
            aggregators: scenario.all_aggregators(),
            aggregator_cores: scenario.aggregator_cores,
            readers: scenario.readers,
            colocated: scenario.colocated,
            shared: BTreeMap::new(),
            racks: None,
            background: Vec::new(),
            changes: Vec::new(),
        };
        if let Topology::ThreeTier(tiers) = &network.topology {
            hosts.fill_racks(tiers, network).map_err(ScenarioError::Value)?;
        }
        for (index, background) in network.background.iter().enumerate() {
            hosts.add_background(index as u32, background, network)?;
        }
        for change in &network.changes {
            hosts.add_change(change)?;
        }
        Ok(hosts)
    }

    /// A node's host.
    pub fn host(&self, node: NodeId) -> HostId {
        self.host_of(match node {
            NodeId::Shard(id) => Member::Server(id.server.0),
            NodeId::Spare(number) => Member::Server(number >> SPARES_OF_A_SERVER),
            NodeId::Worker(id) => id.reader_number().map_or(Member::Worker(id.0), Member::Reader),
            NodeId::Aggregator(id) => Member::Aggregator(id.0 / self.aggregator_cores),
            NodeId::Coordinator | NodeId::Admin(_) => Member::Coordinator,
        })
    }

    /// Where a node is, to build trees by.
    pub fn position(&self, node: NodeId) -> Position {
        match &self.racks {
            Some((_, racks)) => racks.position(self.host(node)),
            None => Position { edge: 0, aggregation: 0 },
        }
    }

    /// The network between the hosts, with its background traffic and its changes.
    pub fn network(&self, config: &NetworkConfig) -> Network {
        let Some((tiers, racks)) = &self.racks else { return Network::star(config.clone()) };
        let mut network = Network::three_tier(config.clone(), tiers.clone(), racks.clone());
        for (at, link, gbit_per_s) in &self.changes {
            network.set_rate(*at, *link, *gbit_per_s);
        }
        self.background.iter().for_each(|flow| network.add_background(flow));
        network
    }

    /// A host's name in addresses and in the topology.
    pub(crate) fn name(host: HostId) -> String {
        format!("host{}", host.0)
    }

    /// The network as a job's coordinator knows it. A star has no switches that would make a difference.
    pub fn topology(&self, config: &NetworkConfig) -> broadcast::Topology {
        let Some((tiers, racks)) = &self.racks else { return broadcast::Topology::default() };
        let add = |topology: broadcast::Topology, (_, host): (Member, HostId)| {
            let Position { edge, aggregation } = racks.position(host);
            topology.with_host(
                &Hosts::name(host),
                &format!("edge{edge}"),
                &format!("aggregation{aggregation}"),
            )
        };
        let topology = self.everybody().into_iter().fold(broadcast::Topology::default(), add);
        let ratio = |below: f64, uplink: f64| if uplink > 0.0 { (below / uplink).max(1.0) } else { 1.0 };
        let host = config.gbit_per_s;
        let (edge, aggregation) = (tiers.edge_uplink(host), tiers.aggregation_uplink(host));
        topology.with_oversubscription(Oversubscription {
            edge: ratio(host * f64::from(tiers.hosts_per_edge), edge),
            aggregation: ratio(edge * f64::from(tiers.edges_per_aggregation), aggregation),
        })
    }

    /// The network in a sentence, with every rate.
    pub fn describe(&self, config: &NetworkConfig) -> String {
        let rate = |gbit_per_s: f64| match gbit_per_s {
            0.0 => "unlimited".to_owned(),
            rate => format!("{rate} Gbit/s"),
        };
        let packets = match config.mtu {
            0 => String::new(),
            mtu => format!(", packets of {mtu} bytes with headers"),
        };
        let host = rate(config.gbit_per_s);
        let Some((tiers, racks)) = &self.racks else {
            let hosts: BTreeSet<HostId> = self.everybody().into_iter().map(|(_, host)| host).collect();
            return format!("star: {} hosts of {host}{packets}", hosts.len());
        };
        let core = match tiers.core_gbit_per_s {
            0.0 => String::new(),
            limit => format!(", core of {}", rate(limit)),
        };
        format!(
            "three-tier: {} racks of {} hosts of {host}, edge uplinks of {}; {} aggregation switches for {} racks each, \
             uplinks of {}{core}{packets}",
            racks.edges(),
            tiers.hosts_per_edge,
            rate(tiers.edge_uplink(config.gbit_per_s)),
            racks.aggregations(),
            tiers.edges_per_aggregation,
            rate(tiers.aggregation_uplink(config.gbit_per_s)),
        )
    }

    /// The words for links, as [`RateChange`] has them.
    pub fn link_names(&self) -> LinkNames {
        // A host is called by the first of its nodes, the servers first.
        let everybody = self.everybody().into_iter().rev();
        let hosts = everybody.map(|(member, host)| (host, member)).collect();
        LinkNames { hosts, first_late_host: self.first_late_host() }
    }

    /// All who are there from the beginning, servers first, with their hosts.
    fn everybody(&self) -> Vec<(Member, HostId)> {
        let servers = (0..self.servers).map(Member::Server);
        let workers = (0..self.workers).map(Member::Worker);
        let aggregators = (0..self.aggregators).map(Member::Aggregator);
        let readers = (0..self.readers).map(Member::Reader);
        let members = servers.chain(workers).chain(aggregators).chain(readers).chain([Member::Coordinator]);
        members.map(|member| (member, self.host_of(member))).collect()
    }

    fn host_of(&self, member: Member) -> HostId {
        let Hosts { servers, workers, colocated, .. } = *self;
        let own = match member {
            Member::Server(number) => number,
            Member::Worker(rank) if rank >= workers => self.first_late_host() + rank,
            Member::Worker(rank) => {
                if colocated {
                    rank
                } else {
                    servers + rank
                }
            }
            // On a host of its own, as one of a rack is.
            Member::Aggregator(number) => servers + workers + 1 + number,
            Member::Reader(number) => servers + workers + 1 + self.aggregators + number,
            Member::Coordinator => servers + workers,
        };
        self.shared.get(&member).copied().unwrap_or(HostId(own))
    }

    /// Workers that come late are behind all hosts that the job began with; their ranks count from here.
    fn first_late_host(&self) -> u32 {
        self.servers + 1 + self.aggregators + self.readers
    }

    fn fill_racks(&mut self, tiers: &ThreeTier, network: &NetworkConfig) -> Result<(), String> {
        let mut named = Vec::new();
        let mut known = BTreeSet::new();
        for (edge, rack) in (0..).zip(&network.racks) {
            for nodes in &rack.hosts {
                let members = nodes.iter().map(|node| self.member(node)).collect::<Result<Vec<_>, _>>();
                let members = members.map_err(|why| format!("network.racks: {why}"))?;
                let Some(&first) = members.first() else {
                    return Err("network.racks: a host without a node; leave it out".into());
                };
                if let Some(twice) = nodes.iter().zip(&members).find(|(_, member)| !known.insert(**member)) {
                    return Err(format!("network.racks: `{}` is placed twice", twice.0));
                }
                let host = self.host_of(first);
                self.shared.extend(members.iter().map(|member| (*member, host)));
                named.push((host, edge));
            }
        }
        // The coordinator moves no data: racks are as many as the others need.
        let others = self.everybody().into_iter().filter(|(member, _)| *member != Member::Coordinator);
        let hosts: BTreeSet<HostId> = others.map(|(_, host)| host).collect();
        let mut racks = Racks::new(tiers, hosts.len() as u32);
        named.into_iter().for_each(|(host, edge)| racks.place(host, edge));
        self.racks = Some((tiers.clone(), racks));
        Ok(())
    }

    fn add_background(
        &mut self,
        index: u32,
        background: &BackgroundConfig,
        network: &NetworkConfig,
    ) -> Result<(), ScenarioError> {
        let BackgroundConfig { gbit_per_s, flows, from_s, until_s, .. } = *background;
        let value = |why: String| ScenarioError::Value(format!("network.background: {why}"));
        let from = self.end(&background.from, own_host(index, End::From)).map_err(value)?;
        let to = self.end(&background.to, own_host(index, End::To)).map_err(value)?;
        require(from != to, || {
            format!("network.background: `{}` and `{}` are one host", background.from, background.to)
        })?;
        require((1..=10_000).contains(&flows), || {
            format!("network.background.flows = {flows}: expected 1 to 10000")
        })?;
        let until = until_s.unwrap_or(1e9);
        require(from_s >= 0.0 && from_s < until && until <= 1e9, || {
            format!(
                "network.background: from_s = {from_s} and until_s = {until}: expected 0 <= from_s < until_s <= 1e9"
            )
        })?;
        if let Some(rate) = gbit_per_s {
            require((1e-6..=1e6).contains(&rate), || {
                format!(
                    "network.background.gbit_per_s = {rate}: expected 1e-6 to 1e6; leave it out for a flow that takes \
                     what it can"
                )
            })?;
        } else {
            require(network.gbit_per_s > 0.0, || {
                "network.background: a flow that takes what it can needs links with a rate; set network.gbit_per_s or \
                 the flow's own"
                    .into()
            })?;
        }
        let flow = BackgroundFlow {
            from,
            to,
            gbit_per_s,
            starts: Time::from_secs_f64(from_s),
            until: Time::from_secs_f64(until),
        };
        self.background.extend((0..flows).map(|_| flow.clone()));
        Ok(())
    }

    /// One end of background traffic: the host of a node, or a host of its own in a rack.
    fn end(&mut self, text: &str, own: HostId) -> Result<HostId, String> {
        let Some(number) = text.strip_prefix("edge=") else {
            return self
                .member(text)
                .map(|member| self.host_of(member))
                .map_err(|why| format!("{why}, or `edge=N` for a host of its own in a rack"));
        };
        let Some((_, racks)) = &mut self.racks else { return Err(format!("`{text}`: a star has no racks")) };
        match number.parse() {
            Ok(edge) if edge < racks.edges() => {
                racks.place(own, edge);
                Ok(own)
            }
            _ => Err(format!("`{text}`: expected `edge=0` to `edge={}`", racks.edges() - 1)),
        }
    }

    fn add_change(&mut self, change: &RateChange) -> Result<(), ScenarioError> {
        let RateChange { at_s, gbit_per_s, .. } = *change;
        require((0.0..=1e9).contains(&at_s), || format!("network.changes.at_s = {at_s}: expected 0 to 1e9"))?;
        require((1e-6..=1e6).contains(&gbit_per_s), || {
            format!("network.changes.gbit_per_s = {gbit_per_s}: expected 1e-6 to 1e6")
        })?;
        let links = self.links(&change.link);
        let links = links.map_err(|why| ScenarioError::Value(format!("network.changes.link: {why}")))?;
        let at = Time::from_secs_f64(at_s);
        self.changes.extend(links.into_iter().map(|link| (at, link, gbit_per_s)));
        Ok(())
    }

    /// The links that a word stands for.
    fn links(&self, text: &str) -> Result<Vec<LinkId>, String> {
        let unknown = || format!("`{text}`: expected {LINKS}");
        let Some((tiers, racks)) = &self.racks else { return Err(unknown()) };
        let (what, directions) = match text.split_once(':') {
            None => (text, &[Direction::Up, Direction::Down][..]),
            Some((what, "up")) => (what, &[Direction::Up][..]),
            Some((what, "down")) => (what, &[Direction::Down][..]),
            Some(_) => return Err(unknown()),
        };
        let both =
            |make: &dyn Fn(Direction) -> LinkId| directions.iter().map(|way| make(*way)).collect::<Vec<_>>();
        let host = |member| both(&|way| LinkId::Host(self.host_of(member), way));
        let (kind, number) = what.split_once('=').unwrap_or((what, ""));
        match kind {
            "coordinator" if number.is_empty() => return Ok(host(Member::Coordinator)),
            "core" if text == "core" => {
                return match tiers.core_gbit_per_s {
                    0.0 => {
                        Err("`core`: it has no rate that could change; give the topology a `core_gbit_per_s`"
                            .into())
                    }
                    _ => Ok(vec![LinkId::Core]),
                };
            }
            _ => {}
        }
        let which = match number {
            "*" => Which::Every,
            number => Which::One(number.parse().map_err(|_| unknown())?),
        };
        let (count, links): (u32, &dyn Fn(u32) -> Vec<LinkId>) = match kind {
            "server" => (self.servers, &|number| host(Member::Server(number))),
            "worker" => (self.workers, &|number| host(Member::Worker(number))),
            "aggregator" => (self.aggregators, &|number| host(Member::Aggregator(number))),
            "edge" => (racks.edges(), &|number| both(&|way| LinkId::Edge(number, way))),
            "aggregation" => (racks.aggregations(), &|number| both(&|way| LinkId::Aggregation(number, way))),
            _ => return Err(unknown()),
        };
        match which {
            Which::Every => Ok((0..count).flat_map(links).collect()),
            Which::One(number) if number < count => Ok(links(number)),
            Which::One(_) => Err(format!("`{text}`: there {}", there_are(count, kind))),
        }
    }

    fn member(&self, text: &str) -> Result<Member, String> {
        let unknown = || format!("`{text}`: expected {MEMBERS}");
        if text == "coordinator" {
            return Ok(Member::Coordinator);
        }
        let (kind, number) = text.split_once('=').ok_or_else(unknown)?;
        let number: u32 = number.parse().map_err(|_| unknown())?;
        let (member, count) = match kind {
            "server" => (Member::Server(number), self.servers),
            "worker" => (Member::Worker(number), self.workers),
            "aggregator" => (Member::Aggregator(number), self.aggregators),
            _ => return Err(unknown()),
        };
        if number < count { Ok(member) } else { Err(format!("`{text}`: there {}", there_are(count, kind))) }
    }
}

/// The words for links.
#[derive(Debug, Clone)]
pub struct LinkNames {
    hosts: BTreeMap<HostId, Member>,
    first_late_host: u32,
}

impl LinkNames {
    /// The word for a link.
    pub fn name(&self, link: LinkId) -> String {
        let way = |direction| if direction == Direction::Up { "up" } else { "down" };
        match link {
            LinkId::Host(host, direction) => format!("{}:{}", self.host(host), way(direction)),
            LinkId::Edge(edge, direction) => format!("edge={edge}:{}", way(direction)),
            LinkId::Aggregation(number, direction) => format!("aggregation={number}:{}", way(direction)),
            LinkId::Core => "core".into(),
        }
    }

    fn host(&self, host: HostId) -> String {
        match self.hosts.get(&host) {
            Some(Member::Server(number)) => format!("server={number}"),
            Some(Member::Worker(number)) => format!("worker={number}"),
            Some(Member::Aggregator(number)) => format!("aggregator={number}"),
            Some(Member::Coordinator) => "coordinator".into(),
            Some(Member::Reader(number)) => format!("reader={number}"),
            None => match own_host_of(host) {
                Some((background, end)) => format!("background={background}:{end}"),
                None => format!("worker={}", host.0 - self.first_late_host),
            },
        }
    }
}

fn there_are(count: u32, kind: &str) -> String {
    match count {
        0 => format!("is no {kind}"),
        1 => format!("is one {kind}, number 0"),
        count => format!("are {count} of this kind, numbered from 0"),
    }
}

#[derive(Debug, Clone, Copy)]
enum End {
    From,
    To,
}

/// The host of its own that an end of background traffic has: they are numbered from the other side.
fn own_host(background: u32, end: End) -> HostId {
    HostId(u32::MAX - (2 * background + u32::from(matches!(end, End::To))))
}

/// Which background traffic has this host, and for which end, if it is one of those.
fn own_host_of(host: HostId) -> Option<(u32, &'static str)> {
    let number = u32::MAX - host.0;
    let end = if number.is_multiple_of(2) { "from" } else { "to" };
    (host.0 > u32::MAX / 2).then_some((number / 2, end))
}
