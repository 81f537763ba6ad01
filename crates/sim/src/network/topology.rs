//! How hosts hang together, and its text form: `star`, `three-tier:hosts_per_edge=10,edge_oversubscription=4`.

use super::HostId;
use paramill_core::spec::{Spec, SpecError};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// How hosts hang together.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Topology {
    /// All hosts on one switch. Each link serves frames in the order they come.
    #[default]
    Star,
    /// Racks of hosts under edge switches, these under aggregation switches, these under a core. Links are shared fairly.
    ThreeTier(ThreeTier),
}

/// The preset `three-tier`: what is not set is what stands in [`ThreeTier::default`].
///
/// Rates are in gigabits per second, for each direction; 0 means unlimited. An uplink has either a rate or an
/// oversubscription: how many times as much the links below it can send. Without both it is not oversubscribed.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ThreeTier {
    /// Hosts of a rack, on its edge switch.
    pub hosts_per_edge: u32,
    /// Racks under an aggregation switch.
    pub edges_per_aggregation: u32,
    /// Rate from an edge switch to its aggregation switch.
    pub edge_uplink_gbit_per_s: Option<f64>,
    /// The rate of all hosts of a full rack over that of its uplink.
    pub edge_oversubscription: Option<f64>,
    /// Rate from an aggregation switch to the core.
    pub aggregation_uplink_gbit_per_s: Option<f64>,
    /// The rate of all edge uplinks of an aggregation switch over that of its own uplink.
    pub aggregation_oversubscription: Option<f64>,
    /// Rate of everything that crosses the core.
    pub core_gbit_per_s: f64,
    /// Added to the latency for each switch on a frame's way but the first, in microseconds.
    pub hop_us: f64,
    /// How hosts are dealt out to racks.
    pub fill: Fill,
}

/// How hosts are dealt out to racks, in the order of their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fill {
    /// One to each rack in turn, so that each rack has its share of the servers.
    #[default]
    Spread,
    /// A rack is filled before the next one.
    Packed,
}

/// Where a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Position {
    /// The edge switch that it hangs on.
    pub edge: u32,
    /// The aggregation switch above that.
    pub aggregation: u32,
}

/// Which rack each host is in.
#[derive(Debug, Clone, PartialEq)]
pub struct Racks {
    edges: u32,
    hosts_per_edge: u32,
    edges_per_aggregation: u32,
    fill: Fill,
    placed: BTreeMap<HostId, u32>,
}

impl Default for ThreeTier {
    fn default() -> ThreeTier {
        ThreeTier {
            hosts_per_edge: 10,
            edges_per_aggregation: 2,
            edge_uplink_gbit_per_s: None,
            edge_oversubscription: None,
            aggregation_uplink_gbit_per_s: None,
            aggregation_oversubscription: None,
            core_gbit_per_s: 0.0,
            hop_us: 5.0,
            fill: Fill::Spread,
        }
    }
}

impl ThreeTier {
    /// The rate of an edge switch's uplink, where a host's link has this rate.
    pub fn edge_uplink(&self, host_gbit_per_s: f64) -> f64 {
        let below = host_gbit_per_s * f64::from(self.hosts_per_edge);
        self.edge_uplink_gbit_per_s.unwrap_or(below / self.edge_oversubscription.unwrap_or(1.0))
    }

    /// The rate of an aggregation switch's uplink, where a host's link has this rate.
    pub fn aggregation_uplink(&self, host_gbit_per_s: f64) -> f64 {
        let below = self.edge_uplink(host_gbit_per_s) * f64::from(self.edges_per_aggregation);
        self.aggregation_uplink_gbit_per_s.unwrap_or(below / self.aggregation_oversubscription.unwrap_or(1.0))
    }

    fn check(&self, spec: &Spec) -> Result<(), SpecError> {
        for (name, value) in
            [("hosts_per_edge", self.hosts_per_edge), ("edges_per_aggregation", self.edges_per_aggregation)]
        {
            spec.require((1..=1 << 20).contains(&value), || {
                format!("`{name}={value}`: expected 1 to {}", 1 << 20)
            })?;
        }
        for (name, value, least, most) in [
            ("edge_uplink_gbit_per_s", self.edge_uplink_gbit_per_s.unwrap_or(0.0), 0.0, 1e6),
            ("aggregation_uplink_gbit_per_s", self.aggregation_uplink_gbit_per_s.unwrap_or(0.0), 0.0, 1e6),
            ("core_gbit_per_s", self.core_gbit_per_s, 0.0, 1e6),
            ("edge_oversubscription", self.edge_oversubscription.unwrap_or(1.0), 1e-3, 1e6),
            ("aggregation_oversubscription", self.aggregation_oversubscription.unwrap_or(1.0), 1e-3, 1e6),
            ("hop_us", self.hop_us, 0.0, 1e9),
        ] {
            spec.require((least..=most).contains(&value), || {
                format!("`{name}={value}`: expected a number from {least} to {most:e}")
            })?;
        }
        for (tier, rate, factor) in [
            ("edge", self.edge_uplink_gbit_per_s, self.edge_oversubscription),
            ("aggregation", self.aggregation_uplink_gbit_per_s, self.aggregation_oversubscription),
        ] {
            spec.require(rate.is_none() || factor.is_none(), || {
                format!(
                    "`{tier}_uplink_gbit_per_s` and `{tier}_oversubscription` both say the rate of an uplink; \
                     leave one of them out"
                )
            })?;
        }
        Ok(())
    }
}

impl Racks {
    /// Racks for so many hosts. Hosts with higher numbers are dealt out to the same racks.
    pub fn new(tiers: &ThreeTier, hosts: u32) -> Racks {
        Racks {
            edges: hosts.div_ceil(tiers.hosts_per_edge).max(1),
            hosts_per_edge: tiers.hosts_per_edge,
            edges_per_aggregation: tiers.edges_per_aggregation,
            fill: tiers.fill,
            placed: BTreeMap::new(),
        }
    }

    /// Puts a host into the rack of this edge switch. There are as many racks as the highest number asks for.
    pub fn place(&mut self, host: HostId, edge: u32) {
        self.edges = self.edges.max(edge + 1);
        self.placed.insert(host, edge);
    }

    /// Where a host is.
    pub fn position(&self, host: HostId) -> Position {
        let dealt = match self.fill {
            Fill::Spread => host.0 % self.edges,
            Fill::Packed => (host.0 / self.hosts_per_edge).min(self.edges - 1),
        };
        let edge = self.placed.get(&host).copied().unwrap_or(dealt);
        Position { edge, aggregation: edge / self.edges_per_aggregation }
    }

    /// How many edge switches there are.
    pub fn edges(&self) -> u32 {
        self.edges
    }

    /// How many aggregation switches there are.
    pub fn aggregations(&self) -> u32 {
        self.edges.div_ceil(self.edges_per_aggregation)
    }
}

impl FromStr for Topology {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Topology, SpecError> {
        let spec = Spec::parse(text)?;
        match spec.name.as_str() {
            "star" => {
                spec.require(spec.params.is_empty(), || "it has no parameters".into())?;
                Ok(Topology::Star)
            }
            "three-tier" => {
                let tiers: ThreeTier = spec.config()?;
                tiers.check(&spec)?;
                Ok(Topology::ThreeTier(tiers))
            }
            _ => Err(SpecError::Unknown {
                axis: "topology",
                name: spec.name,
                known: "star, three-tier".into(),
            }),
        }
    }
}

/// The text form, without what is as by default.
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Topology::ThreeTier(tiers) = self else { return f.write_str("star") };
        let default = ThreeTier::default();
        let number = |name, value: f64, default: f64| (value != default).then(|| format!("{name}={value}"));
        let set = |name, value: Option<f64>| value.map(|value| format!("{name}={value}"));
        let whole = |name, value: u32, default: u32| (value != default).then(|| format!("{name}={value}"));
        let fill = (tiers.fill == Fill::Packed).then(|| "fill=packed".to_owned());
        let params = [
            whole("hosts_per_edge", tiers.hosts_per_edge, default.hosts_per_edge),
            whole("edges_per_aggregation", tiers.edges_per_aggregation, default.edges_per_aggregation),
            set("edge_uplink_gbit_per_s", tiers.edge_uplink_gbit_per_s),
            set("edge_oversubscription", tiers.edge_oversubscription),
            set("aggregation_uplink_gbit_per_s", tiers.aggregation_uplink_gbit_per_s),
            set("aggregation_oversubscription", tiers.aggregation_oversubscription),
            number("core_gbit_per_s", tiers.core_gbit_per_s, default.core_gbit_per_s),
            number("hop_us", tiers.hop_us, default.hop_us),
            fill,
        ];
        let params: Vec<String> = params.into_iter().flatten().collect();
        let separator = if params.is_empty() { "" } else { ":" };
        write!(f, "three-tier{separator}{}", params.join(","))
    }
}

impl Serialize for Topology {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Topology {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Topology, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error| serde::de::Error::custom(format!("network.topology: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiers(text: &str) -> ThreeTier {
        match text.parse().unwrap() {
            Topology::ThreeTier(tiers) => tiers,
            Topology::Star => panic!("{text} is a star"),
        }
    }

    #[test]
    fn reads_and_prints_the_same_text() {
        for text in [
            "star",
            "three-tier",
            "three-tier:hosts_per_edge=4,edges_per_aggregation=3,edge_oversubscription=2.5,fill=packed",
            "three-tier:edge_uplink_gbit_per_s=10,aggregation_uplink_gbit_per_s=40,core_gbit_per_s=100,hop_us=1",
        ] {
            assert_eq!(text.parse::<Topology>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn uplinks_carry_what_is_below_them_unless_they_are_oversubscribed() {
        let plain = tiers("three-tier:hosts_per_edge=5,edges_per_aggregation=3");
        assert_eq!((plain.edge_uplink(1.0), plain.aggregation_uplink(1.0)), (5.0, 15.0));
        let narrow =
            tiers("three-tier:hosts_per_edge=8,edge_oversubscription=4,aggregation_oversubscription=2");
        assert_eq!((narrow.edge_uplink(1.0), narrow.aggregation_uplink(1.0)), (2.0, 2.0));
        let given = tiers("three-tier:edge_uplink_gbit_per_s=3");
        assert_eq!((given.edge_uplink(1.0), given.aggregation_uplink(1.0)), (3.0, 6.0));
    }

    #[test]
    fn hosts_are_dealt_out_to_racks() {
        let text = "three-tier:hosts_per_edge=4,edges_per_aggregation=2";
        let mut spread = Racks::new(&tiers(text), 10);
        assert_eq!((spread.edges(), spread.aggregations()), (3, 2));
        let edges = |racks: &Racks| (0..10).map(|host| racks.position(HostId(host)).edge).collect::<Vec<_>>();
        assert_eq!(edges(&spread), [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]);
        let packed = Racks::new(&tiers(&format!("{text},fill=packed")), 10);
        assert_eq!(edges(&packed), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]);
        spread.place(HostId(0), 4);
        assert_eq!(spread.position(HostId(0)), Position { edge: 4, aggregation: 2 });
        assert_eq!((spread.edges(), spread.aggregations()), (5, 3));
    }

    #[test]
    fn wrong_text_is_answered_with_what_was_expected() {
        for (text, expected) in [
            ("ring", "unknown topology `ring`; known: star, three-tier"),
            ("star:hosts=3", "star: it has no parameters"),
            ("three-tier:hosts=3", "unknown field `hosts`, expected one of `hosts_per_edge`"),
            ("three-tier:hosts_per_edge=0", "`hosts_per_edge=0`: expected 1 to"),
            ("three-tier:edge_oversubscription=0", "`edge_oversubscription=0`: expected a number from 0.001"),
            ("three-tier:core_gbit_per_s=nan", "`core_gbit_per_s=NaN`: expected a number"),
            ("three-tier:edge_uplink_gbit_per_s=1,edge_oversubscription=2", "leave one of them out"),
            ("three-tier:fill=random", "unknown variant `random`"),
        ] {
            let error = text.parse::<Topology>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
