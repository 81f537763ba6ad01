//! Where hosts are: below which edge switch, and this one below which aggregation switch.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use xxhash_rust::xxh3::xxh3_64;

/// Where a node is. Nodes with the same number are at the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    /// Its host.
    pub host: u64,
    /// The edge switch that its host is connected to.
    pub edge: u64,
    /// The aggregation switch that the edge switch is connected to.
    pub aggregation: u64,
}

/// Cost of a connection, by the switches between its ends (Parameter Flow, section 3.4.1).
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Costs {
    /// Between processes of one host.
    pub same_host: f64,
    /// Between hosts of one edge switch.
    pub same_edge: f64,
    /// Between edge switches of one aggregation switch.
    pub same_aggregation: f64,
    /// Between aggregation switches.
    pub across: f64,
}

impl Default for Costs {
    fn default() -> Costs {
        Costs { same_host: 0.1, same_edge: 0.1, same_aggregation: 0.5, across: 1.0 }
    }
}

impl Costs {
    /// Cost between two sites.
    pub fn between(&self, one: Site, other: Site) -> f64 {
        if one.aggregation != other.aggregation {
            self.across
        } else if one.edge != other.edge {
            self.same_aggregation
        } else if one.host != other.host {
            self.same_edge
        } else {
            self.same_host
        }
    }
}

/// What may enter a switch from below, over what its uplink carries. 1 is a network that is never the bottleneck.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Oversubscription {
    /// Of edge switches.
    pub edge: f64,
    /// Of aggregation switches.
    pub aggregation: f64,
}

impl Default for Oversubscription {
    fn default() -> Oversubscription {
        Oversubscription { edge: 1.0, aggregation: 1.0 }
    }
}

/// The network of a job. The default one names no host.
///
/// A host that is not named is below an edge and an aggregation switch of its own: nothing is known to be near to it but
/// itself.
///
/// ```
/// let text = r#"
///     [oversubscription]
///     edge = 4.0
///
///     [[edge]]
///     name = "rack-1"
///     aggregation = "row-1"
///     hosts = ["node1", "node2"]
/// "#;
/// let topology = paramill_core::broadcast::Topology::parse(text).unwrap();
/// assert_eq!(topology.site("node1").edge, topology.site("node2").edge);
/// ```
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(try_from = "Text")]
pub struct Topology {
    sites: BTreeMap<String, Site>,
    costs: Costs,
    oversubscription: Oversubscription,
}

/// Why a description of a network is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a topology: {0}")]
pub struct TopologyError(String);

/// A topology as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    #[serde(default)]
    costs: Costs,
    #[serde(default)]
    oversubscription: Oversubscription,
    #[serde(default)]
    edge: Vec<EdgeText>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EdgeText {
    name: String,
    aggregation: String,
    hosts: Vec<String>,
}

impl Topology {
    /// Reads a TOML file.
    pub fn parse(text: &str) -> Result<Topology, TopologyError> {
        toml::from_str(text).map_err(|error| TopologyError(error.to_string().trim_end().to_owned()))
    }

    /// The same with one more host; it moves if it is known already.
    pub fn with_host(mut self, host: &str, edge: &str, aggregation: &str) -> Topology {
        let site = Site { host: number(host), edge: number(edge), aggregation: number(aggregation) };
        self.sites.insert(host.to_owned(), site);
        self
    }

    /// The same with another name for a host.
    pub fn with_alias(mut self, alias: &str, host: &str) -> Topology {
        self.sites.insert(alias.to_owned(), self.site(host));
        self
    }

    /// The names of hosts, aliases included.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.sites.keys().map(String::as_str)
    }

    /// The same with other uplinks.
    pub fn with_oversubscription(self, oversubscription: Oversubscription) -> Topology {
        Topology { oversubscription, ..self }
    }

    /// Where a host is.
    pub fn site(&self, host: &str) -> Site {
        // Numbers of names that the file does not have are apart from those that it has.
        let own = number(host) ^ u64::MAX;
        self.known_site(host).unwrap_or(Site { host: number(host), edge: own, aggregation: own })
    }

    /// Where a host is that has a name here.
    pub fn known_site(&self, host: &str) -> Option<Site> {
        self.sites.get(host).copied()
    }

    /// Costs of connections.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The bottlenecks of the network.
    pub fn oversubscription(&self) -> Oversubscription {
        self.oversubscription
    }

    /// Hosts that are named below each edge switch, and below each aggregation switch, by their numbers.
    pub fn hosts_below(&self) -> (BTreeMap<u64, usize>, BTreeMap<u64, usize>) {
        let (mut edges, mut aggregations) = (BTreeMap::new(), BTreeMap::new());
        // A host with several names is one.
        let sites: BTreeSet<Site> = self.sites.values().copied().collect();
        for site in sites {
            *edges.entry(site.edge).or_insert(0) += 1;
            *aggregations.entry(site.aggregation).or_insert(0) += 1;
        }
        (edges, aggregations)
    }
}

/// A name's number. It follows from the name alone, so that a site means the same whatever else is known.
fn number(name: &str) -> u64 {
    xxh3_64(name.as_bytes())
}

impl TryFrom<Text> for Topology {
    type Error = TopologyError;

    fn try_from(text: Text) -> Result<Topology, TopologyError> {
        let Text { costs, oversubscription, edge: edges } = text;
        let fault = |why: String| Err(TopologyError(why));
        let Costs { same_host, same_edge, same_aggregation, across } = costs;
        let ascending = [0.0, same_host, same_edge, same_aggregation, across, 1e6];
        // NaN is not in order with anything.
        if !ascending.is_sorted_by(|one, other| one <= other) {
            return fault(format!(
                "costs {same_host}, {same_edge}, {same_aggregation} and {across} of same_host, same_edge, same_aggregation \
                 and across: expected 0 to 1000000, and none below the one before"
            ));
        }
        for (name, ratio) in [("edge", oversubscription.edge), ("aggregation", oversubscription.aggregation)]
        {
            if !(1.0..=1e6).contains(&ratio) {
                return fault(format!("oversubscription of {name} = {ratio}: expected 1 to 1000000"));
            }
        }
        let mut topology = Topology { sites: BTreeMap::new(), costs, oversubscription };
        let mut names = BTreeMap::new();
        for EdgeText { name, aggregation, hosts } in edges {
            if names.insert(name.clone(), ()).is_some() {
                return fault(format!("edge `{name}` is described twice"));
            }
            for host in hosts {
                if topology.sites.contains_key(&host) {
                    return fault(format!("host `{host}` is named twice"));
                }
                topology = topology.with_host(&host, &name, &aggregation);
            }
        }
        Ok(topology)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        [costs]
        across = 2.0
        [oversubscription]
        edge = 4
        [[edge]]
        name = "rack1"
        aggregation = "row1"
        hosts = ["a", "b"]
        [[edge]]
        name = "rack2"
        aggregation = "row1"
        hosts = ["c"]
        [[edge]]
        name = "rack3"
        aggregation = "row2"
        hosts = ["d"]
    "#;

    #[test]
    fn costs_follow_from_the_switches_between_two_hosts() {
        let topology = Topology::parse(FILE).unwrap();
        let cost =
            |one: &str, other: &str| topology.costs().between(topology.site(one), topology.site(other));
        assert_eq!([cost("a", "a"), cost("a", "b"), cost("a", "c"), cost("a", "d")], [0.1, 0.1, 0.5, 2.0]);
        assert_eq!((cost("c", "d"), cost("d", "c")), (2.0, 2.0));
        let (edges, aggregations) = topology.hosts_below();
        assert_eq!(edges.into_values().collect::<Vec<_>>().iter().sum::<usize>(), 4);
        assert_eq!(aggregations[&topology.site("c").aggregation], 3);
        assert_eq!(topology.oversubscription(), Oversubscription { edge: 4.0, aggregation: 1.0 });
    }

    #[test]
    fn a_host_may_have_several_names() {
        let topology =
            Topology::parse(FILE).unwrap().with_alias("203.0.113.1", "a").with_alias("10.0.0.9", "x");
        assert_eq!(topology.site("203.0.113.1"), topology.site("a"));
        assert_eq!(topology.site("10.0.0.9"), topology.site("x"));
        let (edges, _) = topology.hosts_below();
        assert_eq!(edges[&topology.site("a").edge], 2);
        assert_eq!(topology.hosts().count(), 6);
    }

    /// Also one with the name of a switch.
    #[test]
    fn a_host_that_is_not_named_is_near_to_itself_only() {
        let topology = Topology::parse(FILE).unwrap();
        let cost =
            |one: &str, other: &str| topology.costs().between(topology.site(one), topology.site(other));
        for host in ["x", "rack1", "row1"] {
            assert_eq!([cost(host, "a"), cost(host, "y"), cost(host, host)], [2.0, 2.0, 0.1], "{host}");
        }
        assert_eq!(Topology::parse(""), Ok(Topology::default()));
    }

    #[test]
    fn nonsense_is_refused_with_what_was_expected() {
        for (text, expected) in [
            ("[[edge]]\nname='e'\naggregation='g'\nhosts=['a','a']", "host `a` is named twice"),
            ("[[edge]]\nname='e'\nhosts=[]", "missing field `aggregation`"),
            (
                "[[edge]]\nname='e'\naggregation='g'\nhosts=[]\n[[edge]]\nname='e'\naggregation='g'\nhosts=[]",
                "edge `e` is described twice",
            ),
            ("[costs]\nsame_edge=0.6", "none below the one before"),
            ("[costs]\nacross=nan", "expected 0 to 1000000"),
            ("[costs]\nsame_host=-1", "expected 0 to 1000000"),
            ("[oversubscription]\nedge=0.5", "oversubscription of edge = 0.5: expected 1 to 1000000"),
            ("[oversubscription]\naggregation=nan", "oversubscription of aggregation = NaN"),
            ("[rack]", "unknown field `rack`"),
            ("hosts", "not a topology"),
        ] {
            let error = Topology::parse(text).unwrap_err().to_string();
            assert!(error.starts_with("not a topology: ") && error.contains(expected), "{text}: {error}");
        }
    }
}
