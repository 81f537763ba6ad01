//! Thresholds that follow the network: a link's rate is halved and restored, and `dvf:low=...,up=...` goes with it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use paramill_core::codec;
use paramill_core::types::{Clock, NodeId, ShardId, Time, WorkerId};
use paramill_core::wire::Kind;
use paramill_sim::actor::Actor;
use paramill_sim::cluster::Cluster;
use paramill_sim::rule::FrameView;
use paramill_sim::scenario::Scenario;
use paramill_sim::world::Observer;
use std::collections::BTreeMap;

/// When the link gets slower, and when it is as before.
const SLOWER_AT: f64 = 10.0;
const RESTORED_AT: f64 = 20.0;
const WORKER: WorkerId = WorkerId(2);

/// Whether each update of somebody was made by the higher threshold: of these gradients it lets nothing through.
#[derive(Debug, Default)]
struct Updates {
    /// By worker, clock and shard: when it began, and whether something of it travels.
    pushes: BTreeMap<(WorkerId, Clock, ShardId), (f64, bool)>,
    versions: BTreeMap<(ShardId, Clock), (f64, bool)>,
    probes: u64,
}

impl Observer<Actor> for Updates {
    fn on_sent(&mut self, frame: &FrameView<'_>, _sender: &Actor) -> Result<(), String> {
        let now = frame.now.as_secs_f64();
        let is_something = !codec::is_nothing(frame.payload);
        let entry = match (frame.from, frame.header.kind) {
            (NodeId::Worker(worker), Kind::Push) => {
                self.pushes.entry((worker, frame.header.clock, frame.shard.unwrap()))
            }
            (NodeId::Shard(shard), Kind::Update) => {
                let entry = self.versions.entry((shard, frame.header.clock)).or_insert((now, false));
                entry.1 |= is_something;
                return Ok(());
            }
            (_, Kind::Control) if frame.payload.len() > 900 && frame.payload.ends_with(&[0; 500]) => {
                self.probes += 1;
                return Ok(());
            }
            _ => return Ok(()),
        };
        entry.or_insert((now, false)).1 |= is_something;
        Ok(())
    }
}

/// Four workers with links of 80 Mbit/s and two servers with 1 Gbit/s. The codecs need 50.
fn run(elements: u64, policies: &str) -> Updates {
    let text = format!(
        "workers = 4\nservers = 2\niterations = 100\nplacement = 'uniform'\noptimizer = 'sgd:lr=0.01'\n{policies}\n\
         [[tables]]\nname = 'w'\nshape = [{elements}]\n\
         [compute]\nstep_ms = 500\njitter = 0\n\
         [network]\ngbit_per_s = 0.08\ntopology = 'three-tier:hosts_per_edge=10'\n\
         [[network.changes]]\nat_s = 0\nlink = 'server=*'\ngbit_per_s = 1\n\
         [[network.changes]]\nat_s = {SLOWER_AT}\nlink = 'worker=2'\ngbit_per_s = 0.04\n\
         [[network.changes]]\nat_s = {RESTORED_AT}\nlink = 'worker=2'\ngbit_per_s = 0.08\n",
    );
    let mut cluster = Cluster::new(&Scenario::parse(&text).unwrap()).unwrap();
    let mut updates = Updates::default();
    let ended = cluster.run(Time::from_secs_f64(RESTORED_AT + 9.0), &mut updates);
    assert!(ended.is_ok(), "{ended:?}");
    for shard in cluster.shard_ids() {
        eprintln!(
            "{policies} {elements} {:#?}",
            cluster.shard(shard).report(Time::from_secs_f64(29.0)).map(|r| r.links)
        );
    }
    updates
}

/// How many updates after each change were made as before it.
fn delays<K: std::fmt::Debug>(updates: impl Iterator<Item = (K, (f64, bool))> + Clone) -> [usize; 2] {
    let before: Vec<_> = updates.clone().filter(|(_, (at, _))| (3.0..SLOWER_AT).contains(at)).collect();
    assert!(before.len() > 5 && before.iter().all(|(_, (_, is_something))| *is_something), "{before:?}");
    [(SLOWER_AT, RESTORED_AT, false), (RESTORED_AT, f64::MAX, true)].map(|(from, until, wanted)| {
        let after: Vec<bool> = updates
            .clone()
            .filter(|(_, (at, _))| (from..until).contains(at))
            .map(|(_, (_, is_something))| is_something)
            .collect();
        let followed = after.iter().position(|is_something| *is_something == wanted);
        let followed = followed.unwrap_or_else(|| panic!("never after {from} s: {after:?}"));
        assert!(after[followed..].iter().all(|is_something| *is_something == wanted), "{after:?}");
        followed
    })
}

impl Updates {
    fn pushes_of(
        &self,
        worker: WorkerId,
    ) -> impl Iterator<Item = ((WorkerId, Clock, ShardId), (f64, bool))> + Clone {
        let shard = self.pushes.keys().next().unwrap().2;
        let its = self.pushes.iter().filter(move |((by, _, to), _)| *by == worker && *to == shard);
        its.map(|(key, update)| (*key, *update))
    }

    fn versions(&self) -> impl Iterator<Item = ((ShardId, Clock), (f64, bool))> + Clone {
        let shard = self.versions.keys().next().unwrap().0;
        let its = self.versions.iter().filter(move |((by, _), _)| *by == shard);
        its.map(|(key, update)| (*key, *update))
    }
}

#[test]
fn a_workers_threshold_follows_its_link_within_five_updates() {
    // Pushes of 1 MB tell by themselves, until nothing travels; then, and for pushes of 400 bytes, trains of probes do.
    for elements in [250_000, 100] {
        let updates = run(elements, "codec = 'dvf:low=1e-9,up=1e9,need=50'");
        let delays = delays(updates.pushes_of(WORKER));
        assert!(delays.iter().all(|delay| *delay <= 5), "{elements} elements: {delays:?}");
        assert!(updates.probes > 0);
        let others = updates.pushes_of(WorkerId(1)).filter(|(_, (_, is_something))| !is_something).count();
        assert_eq!(others, 0, "its own links are as ever");
    }
}

#[test]
fn servers_thresholds_follow_all_links_of_the_broadcast_within_five_updates() {
    for broadcast in ["star", "chain", "rotated:degree=2"] {
        for elements in [250_000, 100] {
            let policies = format!("answer_codec = 'dvf:low=1e-9,up=1e9,need=50'\nbroadcast = '{broadcast}'");
            let updates = run(elements, &policies);
            let delays = delays(updates.versions());
            assert!(delays.iter().all(|delay| *delay <= 5), "{broadcast}, {elements} elements: {delays:?}");
        }
    }
}
