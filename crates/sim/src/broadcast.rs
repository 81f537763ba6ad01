//! How long a version takes from the servers to all workers: the roles of a job, on links that carry the bytes of a larger model.
//!
//! Sizes move, contents do not: every chunk of the model is a frame of its own, as in a real job, and counts with all its bytes
//! on the links, but only a part of it are there. Streams, windows and relays are those of any job. What is no part of a
//! broadcast takes no time: computing, handling frames, and the workers' pushes.

use crate::actor::Actor;
use crate::cluster::{Cluster, Play};
use crate::compute::ComputeModel;
use crate::network::{Direction, HostId, LinkId, NetworkConfig, Position, Topology};
use crate::report::LinkTraffic;
use crate::rule::FrameView;
use crate::scenario::{Hosts, Scenario, ScenarioError};
use crate::world::{Observer, Violation};
use paramill_core::broadcast::{Members, Receiver, Site};
use paramill_core::policy::Axis;
use paramill_core::registry::Registry;
use paramill_core::spec::Spec;
use paramill_core::types::{Clock, NodeId, ServerId, ShardId, Time, WorkerId};
use paramill_core::wire::frame::Update;
use paramill_core::wire::{HEADER_BYTES, Kind, padded};
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Bytes of a chunk that are there.
const STAND_IN_BYTES: u64 = HEADER_BYTES as u64;
/// The version that is measured. Connections are made and trees are settled with those before it.
const MEASURED: Clock = 2;
/// Virtual time after which nothing is expected any more, as a multiple of the longest way to broadcast.
const PATIENCE: f64 = 20.0;
/// Frames between two words about progress.
const FRAMES_PER_WORD: u64 = 1 << 14;

/// What is broadcast, to whom, over which network.
#[derive(Debug, Clone, PartialEq)]
pub struct Experiment {
    /// Receivers.
    pub workers: u32,
    /// Servers, each of which has an equal part of the model.
    pub servers: u32,
    /// Data cores of each server.
    pub cores: u32,
    /// Parameters of the model.
    pub elements: u64,
    /// Bytes of the parameters in a chunk.
    pub chunk_bytes: u64,
    /// Bytes of a chunk in a frame: fewer where a codec makes them fewer.
    pub payload_bytes: u64,
    /// Rates and delays.
    pub network: NetworkConfig,
    /// Everything random follows from it.
    pub seed: u64,
}

/// What a broadcast took.
#[derive(Debug, Clone, PartialEq)]
pub struct Broadcast {
    /// From the first byte that a server sends of the version to the last one that a worker has received.
    pub seconds: f64,
    /// What the version was on each link, most bytes first.
    pub traffic: Vec<LinkTraffic>,
    /// The network with its rates, in a sentence.
    pub network: String,
    /// Events of the simulation.
    pub events: u64,
}

/// The time that no way to broadcast can beat.
#[derive(Debug, Clone, PartialEq)]
pub struct Bound {
    /// In seconds.
    pub seconds: f64,
    /// The link that needs it.
    pub link: String,
}

/// Why there is no time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BroadcastError {
    /// The experiment cannot be set up.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// The version did not reach everybody.
    #[error("the version did not reach all workers: {0}")]
    Stalled(String),
}

impl From<Violation> for BroadcastError {
    fn from(violation: Violation) -> BroadcastError {
        BroadcastError::Stalled(violation.to_string())
    }
}

impl Experiment {
    /// Broadcasts a version in this way. `on_progress` is told now and then which share of the frames has arrived.
    pub fn run(
        &self,
        broadcast: &str,
        mut on_progress: impl FnMut(f64),
    ) -> Result<Broadcast, BroadcastError> {
        let scenario = self.scenario(broadcast);
        let mut cluster = Cluster::with(&scenario, Play::default())?;
        let shards = cluster.shard_ids().count();
        let streams = self.workers as usize * shards;
        let all_frames = (MEASURED + 1) * u64::from(self.workers) * self.chunks();
        let watch = Watch::default();
        let until = Time::from_secs_f64(self.longest_s() * PATIENCE + 600.0);
        let mut wait_for = |cluster: &mut Cluster, version: Clock| {
            let is_there = || {
                let (newest, whole) = &*watch.whole.borrow();
                *newest > version || (*newest == version && whole.len() == streams)
            };
            let reached = cluster.world.run(until, &mut &watch, |_| {
                if watch.frames.get() >= watch.told.get() + FRAMES_PER_WORD {
                    watch.told.set(watch.frames.get());
                    on_progress((watch.frames.get() as f64 / all_frames as f64).min(1.0));
                }
                is_there()
            })?;
            if reached {
                return Ok(());
            }
            let log: Vec<&str> = cluster.world.log().collect();
            Err(BroadcastError::Stalled(format!("{} s passed; {}", until.as_secs_f64(), log.join("; "))))
        };
        wait_for(&mut cluster, MEASURED - 1)?;
        // Gradients take no room, so that nothing is on the links now.
        let before: BTreeMap<LinkId, (u64, Duration)> = traffic(&cluster).collect();
        wait_for(&mut cluster, MEASURED)?;
        let seconds = watch.ended.get().since(watch.begun.get()).as_secs_f64();
        let names = cluster.hosts().link_names();
        let since = |(link, (bytes, busy)): (LinkId, (u64, Duration))| {
            let (bytes_before, busy_before) = before.get(&link).copied().unwrap_or_default();
            let busy_s = (busy - busy_before).as_secs_f64();
            LinkTraffic {
                link: names.name(link),
                bytes: bytes - bytes_before,
                busy_s,
                load: busy_s / seconds,
            }
        };
        let mut traffic: Vec<LinkTraffic> = traffic(&cluster).map(since).collect();
        traffic.sort_by_key(|traffic| Reverse(traffic.bytes));
        Ok(Broadcast {
            seconds,
            traffic,
            network: cluster.hosts().describe(&self.network),
            events: cluster.world.counts().events,
        })
    }

    /// The longest time that a link needs for bytes that have to cross it on any way, at its rate: a worker's link for the
    /// whole model, a server's for its part once, and the uplinks of switches once for each part that only servers on
    /// their other side have. Headers do not count.
    pub fn bound(&self) -> Result<Bound, BroadcastError> {
        let cluster = Cluster::with(&self.scenario("star"), Play::default())?;
        let hosts = cluster.hosts();
        let place = |node| Place { host: hosts.host(node), position: hosts.position(node) };
        let server = |server| place(NodeId::Shard(ShardId { server: ServerId(server), core: 0 }));
        let servers: Vec<Place> = (0..self.servers).map(server).collect();
        let workers: Vec<Place> =
            (0..self.workers).map(|rank| place(NodeId::Worker(WorkerId(rank)))).collect();
        let mut links: BTreeSet<LinkId> = BTreeSet::new();
        for Place { host, position } in servers.iter().chain(&workers) {
            for way in [Direction::Up, Direction::Down] {
                links.insert(LinkId::Host(*host, way));
                links.insert(LinkId::Edge(position.edge, way));
                links.insert(LinkId::Aggregation(position.aggregation, way));
            }
        }
        let part = self.model_bytes() / f64::from(self.servers);
        let names = hosts.link_names();
        let times = links.into_iter().filter_map(|link| {
            let rate = self.rate(link)?;
            // A part crosses a link if it is on one side of it, and a worker on the other.
            let crosses = |server: &&Place| {
                workers.iter().any(|worker| match direction(link) {
                    Direction::Up => server.is_below(link) && !worker.is_below(link),
                    Direction::Down => !server.is_below(link) && worker.is_below(link),
                })
            };
            let bytes = servers.iter().filter(crosses).count() as f64 * part;
            Some((bytes * 8.0 / (rate * 1e9), names.name(link)))
        });
        let longest = times.max_by(|(one, _), (other, _)| one.total_cmp(other));
        Ok(longest
            .map_or(Bound { seconds: 0.0, link: "none".into() }, |(seconds, link)| Bound { seconds, link }))
    }

    /// Whether there are such trees of these workers: a job would do without, and go on as a star.
    pub fn check(&self, broadcast: &str) -> Result<(), BroadcastError> {
        let cluster = Cluster::with(&self.scenario(broadcast), Play::default())?;
        let (hosts, topology) = (cluster.hosts(), cluster.hosts().topology(&self.network));
        let site = |node| topology.site(&Hosts::name(hosts.host(node)));
        let roots: Vec<Site> = cluster.shard_ids().map(|id| site(NodeId::Shard(id))).collect();
        let receiver = |id| Receiver { site: site(NodeId::Worker(id)), can_relay: true };
        let receivers: Vec<Receiver> = cluster.worker_ids().map(receiver).collect();
        let members = Members { roots: &roots, receivers: &receivers, topology: &topology };
        let value = |error: &dyn std::fmt::Display| ScenarioError::Value(error.to_string());
        let trees = Spec::parse(broadcast).and_then(|spec| Registry::builtin().broadcast.build(&spec));
        let trees = trees.map_err(|error| value(&error))?;
        trees.forest(&members).map_err(|error| value(&error))?;
        Ok(())
    }

    /// Bytes of the model as they are broadcast.
    fn model_bytes(&self) -> f64 {
        self.elements as f64 * 4.0 * self.payload_bytes as f64 / self.chunk_bytes as f64
    }

    /// The rate of a link in gigabits per second, if it has one.
    fn rate(&self, link: LinkId) -> Option<f64> {
        let host = self.network.gbit_per_s;
        let rate = match (&self.network.topology, link) {
            (_, LinkId::Host(..)) => host,
            (Topology::ThreeTier(tiers), LinkId::Edge(..)) => tiers.edge_uplink(host),
            (Topology::ThreeTier(tiers), LinkId::Aggregation(..)) => tiers.aggregation_uplink(host),
            (Topology::ThreeTier(tiers), LinkId::Core) => tiers.core_gbit_per_s,
            (Topology::Star, _) => 0.0,
        };
        (rate > 0.0).then_some(rate)
    }

    /// A time that no sensible way to broadcast exceeds: everything for everybody over the slowest link.
    fn longest_s(&self) -> f64 {
        let rate = self.network.least_share_gbit_per_s();
        let bits = self.model_bytes() * 8.0 * f64::from(self.workers);
        if rate > 0.0 { bits / (rate * 1e9) } else { 0.0 }
    }

    /// Chunks of the model.
    fn chunks(&self) -> u64 {
        (self.elements * 4).div_ceil(self.chunk_bytes)
    }

    fn scenario(&self, broadcast: &str) -> Scenario {
        let payload = padded(self.payload_bytes as usize) as f64;
        let frame = HEADER_BYTES as f64 + payload;
        let small_frame = HEADER_BYTES as f64 + STAND_IN_BYTES as f64;
        let elements = (self.elements as f64 * STAND_IN_BYTES as f64 / self.chunk_bytes as f64).round();
        let network = NetworkConfig {
            wire_scale: payload / STAND_IN_BYTES as f64,
            push_scale: 0.0,
            handling_us: 0.0,
            // As many frames as of real size fit.
            window_bytes: (self.network.window_bytes as f64 / frame * small_frame) as u64,
            ..self.network.clone()
        };
        let scenario = Scenario::new(self.workers, self.servers, (elements as u64).max(1))
            .with(Axis::Broadcast, broadcast)
            .with(Axis::Placement, "uniform")
            .with(Axis::Order, "arrival")
            .with(Axis::Chunk, format!("{STAND_IN_BYTES}B"));
        Scenario {
            seed: self.seed,
            cores: self.cores,
            iterations: MEASURED + 1,
            compute: ComputeModel { step_ms: 0.0, jitter: 0.0, ..ComputeModel::default() },
            network,
            ..scenario
        }
    }
}

/// Where a node is.
#[derive(Debug, Clone, Copy)]
struct Place {
    host: HostId,
    position: Position,
}

impl Place {
    /// Whether what it sends to others has to go up this link.
    fn is_below(&self, link: LinkId) -> bool {
        match link {
            LinkId::Host(host, _) => self.host == host,
            LinkId::Edge(edge, _) => self.position.edge == edge,
            LinkId::Aggregation(aggregation, _) => self.position.aggregation == aggregation,
            LinkId::Core => true,
        }
    }
}

fn direction(link: LinkId) -> Direction {
    match link {
        LinkId::Host(_, way) | LinkId::Edge(_, way) | LinkId::Aggregation(_, way) => way,
        LinkId::Core => Direction::Up,
    }
}

fn traffic(cluster: &Cluster) -> impl Iterator<Item = (LinkId, (u64, Duration))> {
    let traffic = cluster.world.network().traffic().into_iter();
    traffic.map(|traffic| (traffic.link, (traffic.bytes, traffic.busy)))
}

/// Sees frames of versions leave servers and reach workers.
#[derive(Debug, Default)]
struct Watch {
    /// The newest version that a server has sent something of, and since when.
    newest: Cell<Option<Clock>>,
    begun: Cell<Time>,
    /// A version, and the streams that have brought it whole, by worker and last chunk: one that was asked for anew may do so twice.
    whole: RefCell<(Clock, BTreeSet<(NodeId, u32)>)>,
    /// When the last one did.
    ended: Cell<Time>,
    frames: Cell<u64>,
    told: Cell<u64>,
}

impl Observer<Actor> for &Watch {
    fn on_sent(&mut self, frame: &FrameView<'_>, _sender: &Actor) -> Result<(), String> {
        if frame.header.kind == Kind::Update && matches!(frame.from, NodeId::Shard(_)) {
            let round = Update::decode(frame.header).round;
            if self.newest.get() < Some(round) {
                self.newest.set(Some(round));
                self.begun.set(frame.now);
            }
        }
        Ok(())
    }

    fn on_delivered(&mut self, frame: &FrameView<'_>, _receiver: &Actor) -> Result<(), String> {
        if frame.header.kind != Kind::Update {
            return Ok(());
        }
        self.frames.set(self.frames.get() + 1);
        let update = Update::decode(frame.header);
        let (version, streams) = &mut *self.whole.borrow_mut();
        if update.piece.is_last && update.round >= *version {
            if update.round > *version {
                (*version, *streams) = (update.round, BTreeSet::new());
            }
            if streams.insert((frame.to, update.piece.chunk)) {
                self.ended.set(frame.now);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 Gbit/s, 4 MB of parameters: 32 ms on a link.
    fn experiment(workers: u32, servers: u32, topology: &str) -> Experiment {
        let topology = topology.parse().unwrap();
        Experiment {
            workers,
            servers,
            cores: 1,
            elements: 1_000_000,
            chunk_bytes: 8192,
            payload_bytes: 8192,
            network: NetworkConfig { gbit_per_s: 1.0, jitter_us: 0.0, topology, ..NetworkConfig::default() },
            seed: 1,
        }
    }

    fn seconds(experiment: &Experiment, broadcast: &str) -> f64 {
        experiment.run(broadcast, |_| ()).unwrap().seconds
    }

    #[test]
    fn a_star_takes_what_the_servers_links_need_for_all_workers() {
        let experiment = experiment(8, 2, "three-tier");
        let star = experiment.run("star", |_| ()).unwrap();
        assert!((0.128..0.135).contains(&star.seconds), "{}", star.seconds);
        // 489 chunks with a header each.
        let expected = 8 * (4_000_000 + 489 * 64) / 2;
        let most = star.traffic[0].bytes;
        assert!(most.abs_diff(expected) < expected / 100, "{most}, expected {expected}");
        assert!(star.traffic[0].link.starts_with("server=") && star.traffic[0].link.ends_with(":up"));
    }

    /// Everybody sends and receives about the model once; a star sends it four times.
    #[test]
    fn rotated_trees_come_near_the_bound() {
        let experiment = experiment(8, 2, "three-tier");
        let bound = experiment.bound().unwrap();
        assert!((bound.seconds - 0.032).abs() < 1e-9 && bound.link.ends_with(":down"), "{bound:?}");
        let rotated = seconds(&experiment, "rotated:degree=2");
        assert!((bound.seconds..1.3 * bound.seconds).contains(&rotated), "{rotated}");
    }

    #[test]
    fn fewer_bytes_take_less_time() {
        let whole = experiment(4, 2, "three-tier");
        let filtered = Experiment { payload_bytes: 2048, ..whole.clone() };
        let [whole, filtered] = [whole, filtered].map(|experiment| seconds(&experiment, "star"));
        assert!((3.5..4.1).contains(&(whole / filtered)), "{whole} and {filtered}");
    }

    /// Half of the model is on each side of the uplinks, and has to cross them once.
    #[test]
    fn an_uplink_may_be_what_bounds() {
        let text = "three-tier:hosts_per_edge=5,edge_uplink_gbit_per_s=0.1,edges_per_aggregation=2";
        let bound = experiment(8, 2, text).bound().unwrap();
        assert!((bound.seconds - 0.16).abs() < 1e-9 && bound.link.starts_with("edge="), "{bound:?}");
    }

    /// Trees are made by the network's switches: a stream enters a rack for few of its workers.
    #[test]
    fn trees_spare_uplinks() {
        let experiment = experiment(16, 2, "three-tier:hosts_per_edge=6");
        let uplinks = |broadcast: &str| -> u64 {
            let traffic = experiment.run(broadcast, |_| ()).unwrap().traffic;
            traffic
                .iter()
                .filter(|traffic| traffic.link.starts_with("edge="))
                .map(|traffic| traffic.bytes)
                .sum()
        };
        let star = uplinks("star");
        for trees in ["rotated:degree=2", "tree:degree=4,depth=4"] {
            assert!(uplinks(trees) * 2 < star, "{trees}: {} and {star}", uplinks(trees));
        }
    }

    #[test]
    fn what_cannot_be_set_up_is_an_error() {
        let experiment = experiment(8, 2, "three-tier");
        let error = experiment.run("ring", |_| ()).unwrap_err().to_string();
        assert!(error.contains("unknown broadcast `ring`"), "{error}");
        let error = experiment.check("tree:degree=2,depth=2").unwrap_err().to_string();
        assert!(error.contains("has room for 6 of these 8 receivers"), "{error}");
        assert!(experiment.check("tree:degree=2,depth=3").is_ok());
    }
}
