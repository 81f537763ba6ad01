//! What frames travel over: a star of hosts by default, or three tiers of switches with links that flows share.
//!
//! Hosts that are the same host exchange frames without touching a link. The star (`star.rs`) serves each link in the order
//! of arrival and knows at once when a frame is received. The tiers (`tiers.rs`) share links fairly, so that it is known only when the frame
//! comes to its last link: a world asks for `Network::step` until then.

mod background;
mod fair_link;
mod star;
mod tiers;
mod topology;

pub use background::BackgroundFlow;
pub use topology::{Fill, Position, Racks, ThreeTier, Topology};

use paramill_core::limits;
use paramill_core::prng::Prng;
use paramill_core::types::Time;
use paramill_core::wire::{HEADER_BYTES, Header, Kind, padded};
use serde::{Deserialize, Serialize};
use star::Star;
use std::ops::RangeInclusive;
use std::time::Duration;
use tiers::{Shipment, Tiers};

/// Headers of a packet of TCP over IPv4 over Ethernet, as interfaces and shapers count them: TCP with its timestamps, IP, Ethernet
/// without preamble, checksum and gap.
pub const PACKET_HEADER_BYTES: u64 = IP_HEADER_BYTES + ETHERNET_HEADER_BYTES;
const IP_HEADER_BYTES: u64 = 20 + 32;
const ETHERNET_HEADER_BYTES: u64 = 14;
/// What every host must be able to receive (RFC 791), and what a packet's length field can say.
const MTUS: RangeInclusive<u64> = 576..=65_535;

/// Rates and delays.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkConfig {
    /// Time from one host to another, in microseconds; in a three-tier network from one host to another in its rack.
    pub latency_us: f64,
    /// Added to it: exponential with this mean, in microseconds.
    pub jitter_us: f64,
    /// Rate of each host's link, in each direction, in gigabits per second; 0 means unlimited.
    pub gbit_per_s: f64,
    /// Payload bytes count this many times on links, so that a small table stands for a large model.
    pub wire_scale: f64,
    /// Bytes of gradients count this many times in addition; with 0 they take no room on links at all.
    pub push_scale: f64,
    /// The largest IP packet, whose headers take room on links ([`PACKET_HEADER_BYTES`]); with 0 only frames do.
    pub mtu: u64,
    /// Time that a data core takes for a frame, in microseconds.
    pub handling_us: f64,
    /// Bytes that a connection holds in each direction; what does not fit waits at its sender.
    pub window_bytes: u64,
    /// Frames that may wait for a peer before its owner stops reading from it.
    pub waiting_frames: u64,
    /// How hosts hang together.
    pub topology: Topology,
    /// Who is in which rack, where that is not left to the topology. The first one is that of edge switch 0.
    pub racks: Vec<RackConfig>,
    /// Traffic of others.
    pub background: Vec<BackgroundConfig>,
    /// Rates that change.
    pub changes: Vec<RateChange>,
}

/// A rack of a three-tier network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RackConfig {
    /// Its hosts, each with the nodes on it: `worker=3`, `server=0`, `aggregator=1`, `coordinator`.
    pub hosts: Vec<Vec<String>>,
}

/// Traffic of others between two places.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackgroundConfig {
    /// The host of a node (`worker=3`), or a host of its own in a rack (`edge=0`).
    pub from: String,
    /// The same for the receiver.
    pub to: String,
    /// What each flow sends at most, in gigabits per second; as much as it can without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gbit_per_s: Option<f64>,
    /// How many such flows there are.
    #[serde(default = "one")]
    pub flows: u32,
    /// When they begin, in seconds of virtual time.
    #[serde(default)]
    pub from_s: f64,
    /// When they end; they do not without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_s: Option<f64>,
}

/// A change of rates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateChange {
    /// When, in seconds of virtual time.
    pub at_s: f64,
    /// Which link: that of a node's host (`worker=3`), the uplink of a switch (`edge=0`, `aggregation=1`) or the `core`. `*`
    /// stands for every number, and `:up` or `:down` behind it for one direction.
    pub link: String,
    /// Its rate from then on, in gigabits per second.
    pub gbit_per_s: f64,
}

fn one() -> u32 {
    1
}

impl Default for NetworkConfig {
    fn default() -> NetworkConfig {
        NetworkConfig {
            latency_us: 50.0,
            jitter_us: 5.0,
            gbit_per_s: 10.0,
            wire_scale: 1.0,
            push_scale: 1.0,
            mtu: 0,
            handling_us: 1.0,
            window_bytes: 4 << 20,
            waiting_frames: limits::MAX_WAITING_FRAMES as u64,
            topology: Topology::Star,
            racks: Vec::new(),
            background: Vec::new(),
            changes: Vec::new(),
        }
    }
}

impl NetworkConfig {
    /// Whether the numbers can be used; the error says why not.
    pub fn check(&self) -> Result<(), String> {
        for (name, value, limit) in [
            ("latency_us", self.latency_us, 1e9),
            ("jitter_us", self.jitter_us, 1e9),
            ("gbit_per_s", self.gbit_per_s, 1e6),
            ("wire_scale", self.wire_scale, 1e9),
            ("push_scale", self.push_scale, 1e9),
            ("handling_us", self.handling_us, 1e9),
        ] {
            if !(0.0..=limit).contains(&value) {
                return Err(format!("network.{name} = {value}: expected a number from 0 to {limit:e}"));
            }
        }
        if self.mtu != 0 && !MTUS.contains(&self.mtu) {
            return Err(format!(
                "network.mtu = {}: expected {} to {}, or 0 for links on which packets have no headers",
                self.mtu,
                MTUS.start(),
                MTUS.end()
            ));
        }
        if self.waiting_frames == 0 {
            return Err("network.waiting_frames = 0: expected at least 1".into());
        }
        let shared = [
            ("racks", self.racks.len()),
            ("background", self.background.len()),
            ("changes", self.changes.len()),
        ];
        match shared.iter().find(|(_, entries)| *entries > 0) {
            Some((name, _)) if self.topology == Topology::Star => Err(format!(
                "network.{name}: a star has no racks and no shared links; set network.topology = \"three-tier\", \
                 with a hosts_per_edge that takes all hosts where there is one switch only"
            )),
            _ => Ok(()),
        }
    }

    /// The least rate that any link has at any time, shared with all background traffic, in gigabits per second; 0 when
    /// no link has a limit.
    pub fn least_share_gbit_per_s(&self) -> f64 {
        let uplinks = match &self.topology {
            Topology::Star => [0.0; 3],
            Topology::ThreeTier(tiers) => [
                tiers.edge_uplink(self.gbit_per_s),
                tiers.aggregation_uplink(self.gbit_per_s),
                tiers.core_gbit_per_s,
            ],
        };
        let changes = self.changes.iter().map(|change| change.gbit_per_s);
        let rates = uplinks.into_iter().chain([self.gbit_per_s]).chain(changes).filter(|rate| *rate > 0.0);
        let others: u32 = self.background.iter().map(|background| background.flows).sum();
        rates.min_by(f64::total_cmp).unwrap_or(0.0) / f64::from(1 + others)
    }

    /// The latency between the hosts that are farthest from each other, in microseconds, without jitter.
    pub fn longest_latency_us(&self) -> f64 {
        match &self.topology {
            Topology::Star => self.latency_us,
            Topology::ThreeTier(tiers) => self.latency_us + 4.0 * tiers.hop_us,
        }
    }

    fn latency(&self) -> Duration {
        Duration::from_nanos((self.latency_us * 1e3) as u64)
    }

    /// What a byte of a stream takes on a link with its share of a packet's headers. Frames follow each other in a stream, so that
    /// packets are full; acknowledgements, which carry nothing, are left out.
    fn packet_factor(&self) -> f64 {
        match self.mtu {
            0 => 1.0,
            mtu => 1.0 + PACKET_HEADER_BYTES as f64 / (mtu - IP_HEADER_BYTES) as f64,
        }
    }
}

/// A host's number: nodes on the same host share its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostId(pub u32);

/// Away from a host towards the core, or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// What a host sends goes up.
    Up,
    /// What it receives comes down.
    Down,
}

/// One direction of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkId {
    /// Between a host and its switch.
    Host(HostId, Direction),
    /// Between an edge switch and its aggregation switch.
    Edge(u32, Direction),
    /// Between an aggregation switch and the core.
    Aggregation(u32, Direction),
    /// Everything that crosses the core, where that has a rate.
    Core,
}

/// What went over one direction of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Traffic {
    /// The link.
    pub link: LinkId,
    /// Bytes, scaled.
    pub bytes: u64,
    /// Time that they took.
    pub busy: Duration,
}

/// What went over a host's link.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct LinkUse {
    /// Bytes sent, scaled.
    pub bytes_out: u64,
    /// Bytes received, scaled.
    pub bytes_in: u64,
    /// Time that sending took.
    pub busy_out: Duration,
    /// Time that receiving took.
    pub busy_in: Duration,
}

/// The links.
#[derive(Debug)]
pub struct Network {
    config: NetworkConfig,
    fabric: Fabric,
}

#[derive(Debug)]
enum Fabric {
    Star(Star),
    Tiers(Box<Tiers>),
}

/// When a frame is on its way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Passage {
    /// When its first byte reaches the receiver's link; where links are shared, when it is received.
    pub(crate) head: Time,
    /// When its last byte does, if nothing else is in the way.
    pub(crate) tail: Time,
}

/// A frame that is sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parcel {
    /// Where it is sent from.
    pub(crate) from: HostId,
    /// Where it is sent to.
    pub(crate) to: HostId,
    /// Frames with the same number take the same way in order; frames of other numbers share links with them.
    pub(crate) flow: usize,
    /// What it counts on links ([`Network::wire_bytes`]).
    pub(crate) bytes: f64,
}

impl Network {
    /// A star without hosts; they come with the first frame they send or receive.
    pub fn star(config: NetworkConfig) -> Network {
        Network { config, fabric: Fabric::Star(Star::default()) }
    }

    /// A three-tier network. Its rates and delays are those of `config` and `tiers`; background traffic and changes of
    /// rates are added to it.
    pub fn three_tier(config: NetworkConfig, tiers: ThreeTier, racks: Racks) -> Network {
        let tiers = Tiers::new(tiers, racks, config.gbit_per_s, config.latency());
        Network { config, fabric: Fabric::Tiers(Box::new(tiers)) }
    }

    /// The rates and delays.
    pub fn config(&self) -> &NetworkConfig {
        &self.config
    }

    /// What went over a host's link so far.
    pub fn usage(&self, host: HostId) -> LinkUse {
        match &self.fabric {
            Fabric::Star(star) => star.usage(host),
            Fabric::Tiers(tiers) => tiers.usage(host),
        }
    }

    /// What went over every link so far, hosts first.
    pub fn traffic(&self) -> Vec<Traffic> {
        match &self.fabric {
            Fabric::Star(star) => star.traffic().collect(),
            Fabric::Tiers(tiers) => tiers.traffic().collect(),
        }
    }

    /// Where a host is. All hosts of a star are in one place.
    pub fn position(&self, host: HostId) -> Position {
        match &self.fabric {
            Fabric::Star(_) => Position { edge: 0, aggregation: 0 },
            Fabric::Tiers(tiers) => tiers.position(host),
        }
    }

    /// A link has another rate from `at` on. The links of a star keep theirs. A frame that a link has begun to send is not
    /// affected by what is said later.
    pub fn set_rate(&mut self, at: Time, link: LinkId, gbit_per_s: f64) {
        if let Fabric::Tiers(tiers) = &mut self.fabric {
            tiers.set_rate(at, link, gbit_per_s);
        }
    }

    /// Others send something, too. Over a star they do not.
    pub fn add_background(&mut self, flow: &BackgroundFlow) {
        if let Fabric::Tiers(tiers) = &mut self.fabric {
            tiers.add_background(flow);
        }
    }

    /// Time for a message without a size, such as the opening of a connection. Who sends it brings the dice.
    pub(crate) fn latency(&self, from: HostId, to: HostId, dice: &mut Prng) -> Duration {
        if from == to {
            return Duration::from_micros(1);
        }
        let jitter = self.jitter_us(dice);
        match &self.fabric {
            Fabric::Star(_) => Duration::from_nanos(((self.config.latency_us + jitter) * 1e3) as u64),
            Fabric::Tiers(tiers) => tiers.latency(from, to) + Duration::from_nanos((jitter * 1e3) as u64),
        }
    }

    fn jitter_us(&self, dice: &mut Prng) -> f64 {
        match self.config.jitter_us {
            0.0 => 0.0,
            mean => dice.exponential(mean),
        }
    }

    /// Whether a frame shares links with others, so that its passage is not known when it is sent.
    pub(crate) fn shares_links(&self, parcel: &Parcel) -> bool {
        parcel.from != parcel.to && parcel.bytes > 0.0 && matches!(self.fabric, Fabric::Tiers(_))
    }

    /// What a frame with so long a payload counts on links.
    pub(crate) fn wire_bytes(&self, header: Option<&Header>, payload_bytes: usize) -> f64 {
        let NetworkConfig { wire_scale, push_scale, .. } = self.config;
        let bytes = HEADER_BYTES as f64 + padded(payload_bytes) as f64 * wire_scale;
        let is_push = header.is_some_and(|header| header.kind == Kind::Push);
        let bytes = if is_push { bytes * push_scale } else { bytes };
        bytes * self.config.packet_factor()
    }

    /// Sends a frame over a star, or within a host, at `now`.
    pub(crate) fn send(&mut self, now: Time, parcel: Parcel, dice: &mut Prng) -> Passage {
        let Parcel { from, to, bytes, .. } = parcel;
        let latency = self.latency(from, to, dice);
        let size = self.size(bytes);
        match &mut self.fabric {
            Fabric::Star(star) if from != to => star.send(now, from, latency, size),
            _ => Passage { head: now + latency, tail: now + latency },
        }
    }

    /// Sends a frame over shared links. It is called `frame` when [`Network::step`] says that it is through, unless that
    /// is known at once.
    pub(crate) fn send_shared(
        &mut self,
        now: Time,
        parcel: Parcel,
        frame: u32,
        dice: &mut Prng,
    ) -> Option<(u32, Passage)> {
        let Parcel { from, to, flow, bytes } = parcel;
        let jitter = Duration::from_nanos((self.jitter_us(dice) * 1e3) as u64);
        let bytes = bytes as u64;
        match &mut self.fabric {
            Fabric::Tiers(tiers) => {
                tiers.send(now, Shipment { flow: flow as u32, from, to, bytes, jitter, frame })
            }
            Fabric::Star(_) => unreachable!("the links of a star are not shared"),
        }
    }

    /// When something happens on shared links next.
    pub(crate) fn next_time(&self) -> Option<Time> {
        match &self.fabric {
            Fabric::Star(_) => None,
            Fabric::Tiers(tiers) => tiers.next_time(),
        }
    }

    /// Whether nothing is under way on shared links but background traffic.
    pub(crate) fn is_idle(&self) -> bool {
        match &self.fabric {
            Fabric::Star(_) => true,
            Fabric::Tiers(tiers) => tiers.is_idle(),
        }
    }

    /// What happens next on shared links. Says which frame is through, and when, if one will be.
    pub(crate) fn step(&mut self) -> Option<(u32, Passage)> {
        match &mut self.fabric {
            Fabric::Star(_) => None,
            Fabric::Tiers(tiers) => tiers.step(),
        }
    }

    /// Receives a frame that comes to `to` at `now`; says when its last byte is through.
    pub(crate) fn receive(&mut self, now: Time, from: HostId, to: HostId, tail: Time, bytes: f64) -> Time {
        let size = self.size(bytes);
        match &mut self.fabric {
            Fabric::Star(star) if from != to => star.receive(now, to, tail, size),
            _ => now,
        }
    }

    /// A frame's bytes on a host's link, and the time that they take.
    fn size(&self, bytes: f64) -> (u64, Duration) {
        let seconds =
            if self.config.gbit_per_s == 0.0 { 0.0 } else { bytes * 8.0 / (self.config.gbit_per_s * 1e9) };
        (bytes as u64, Duration::from_nanos((seconds * 1e9) as u64))
    }
}

#[cfg(test)]
mod tests;
