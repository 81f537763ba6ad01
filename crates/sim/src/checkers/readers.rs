//! What a reader shows is one version over all tables and servers, with the bits that the servers published.

use super::Checker;
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::spectator::Spectator;
use crate::world::Ended;
use paramill_core::server::Shard;
use paramill_core::types::{Clock, NodeId, TableId, Time};
use paramill_core::worker::WorkerError;
use std::collections::BTreeMap;
use std::time::Duration;

/// Versions of a chunk that are remembered: a reader may be far behind.
const VERSIONS: usize = 256;
/// How long a reader that is there may take to have the newest version, when nothing goes wrong and nobody pushes.
const CATCHES_UP: Duration = Duration::from_secs(25);

/// Compares what readers show with what shards have published.
#[derive(Debug)]
pub struct Readers {
    tables: Vec<TableId>,
    /// By table and first element of the chunk.
    published: BTreeMap<(TableId, u64), Chunk>,
    /// By node.
    shown: BTreeMap<NodeId, Shown>,
    /// When a version was last published.
    last_published: Time,
}

/// The digests of a chunk's values, by version.
#[derive(Debug, Default)]
struct Chunk {
    elements: usize,
    versions: BTreeMap<Clock, u64>,
}

/// What a reader showed last.
#[derive(Debug, Clone, Copy)]
struct Shown {
    version: Clock,
    digest: u64,
    /// Since when it has followed the job.
    since: Time,
}

impl Readers {
    /// For this job.
    pub fn new(cluster: &Cluster) -> Readers {
        let tables = (0..cluster.scenario().tables.len() as u32).map(TableId).collect();
        Readers { tables, published: BTreeMap::new(), shown: BTreeMap::new(), last_published: Time::ZERO }
    }

    /// Remembers what a shard has published.
    fn note(&mut self, now: Time, node: NodeId, shard: &Shard) -> Result<(), String> {
        let mut wrong = None;
        for &table in &self.tables {
            shard.for_each_published_chunk(table, |start, version, values| {
                let chunk = self.published.entry((table, start)).or_default();
                if chunk.versions.last_key_value().is_some_and(|(newest, _)| *newest >= version) {
                    return;
                }
                chunk.elements = values.len();
                if chunk.versions.insert(version, digest_of(values)).is_some() {
                    wrong =
                        Some(format!("{node} has published version {version} of table {} twice", table.0));
                }
                self.last_published = now;
                if chunk.versions.len() > VERSIONS {
                    chunk.versions.pop_first();
                }
            });
        }
        wrong.map_or(Ok(()), Err)
    }

    /// Compares what a reader shows.
    fn compare(&mut self, now: Time, node: NodeId, spectator: &Spectator) -> Result<(), String> {
        let Some(version) = spectator.worker().staged_version() else {
            // The first is not here yet, or what was damaged is fetched anew.
            return Ok(());
        };
        let mut digest = 0u64;
        let mut values_of = Vec::with_capacity(self.tables.len());
        for &table in &self.tables {
            let values = spectator.worker().staged(table).map_err(|error| format!("{node}: {error}"))?;
            digest = digest.rotate_left(1) ^ digest_of(values);
            values_of.push(values);
        }
        let before = self.shown.get(&node).copied();
        match before {
            Some(shown) if shown.version > version => {
                return Err(format!("{node} went from version {} back to {version}", shown.version));
            }
            Some(shown) if shown.version == version && shown.digest != digest => {
                return Err(format!("{node} shows other bits of version {version} than before"));
            }
            Some(shown) if shown.version == version => return Ok(()),
            _ => {}
        }
        let since = before.map_or(now, |shown| shown.since);
        self.shown.insert(node, Shown { version, digest, since });
        for ((table, start), chunk) in &self.published {
            let values = &values_of[table.0 as usize][*start as usize..][..chunk.elements];
            // Several versions may be published in one go, of which only the last is known here.
            let known = chunk.versions.get(&version);
            if known.is_some_and(|known| *known != digest_of(values)) {
                return Err(format!(
                    "{node} shows other bits than were published as version {version}: elements {start} to {} of table {}",
                    start + values.len() as u64,
                    table.0
                ));
            }
        }
        Ok(())
    }
}

fn digest_of(values: &[f32]) -> u64 {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

impl Checker for Readers {
    fn on_settled(&mut self, now: Time, node: NodeId, actor: &Actor) -> Result<(), String> {
        match actor {
            Actor::Reader(spectator) => match spectator.error() {
                Some(WorkerError::Damaged(why)) => Err(format!("{node}: {why}")),
                Some(WorkerError::Order(why)) => Err(format!("{node}: {why}")),
                _ => self.compare(now, node, spectator),
            },
            actor => actor.as_shard().map_or(Ok(()), |shard| self.note(now, node, shard)),
        }
    }

    fn at_end(&mut self, cluster: &Cluster) -> Result<(), String> {
        let newest = |chunk: &Chunk| chunk.versions.last_key_value().map(|(version, _)| *version);
        let (first, last) =
            (self.published.values().map(newest).min(), self.published.values().map(newest).max());
        let Some(version) = first.flatten().filter(|_| first == last) else { return Ok(()) };
        let now = cluster.world.now();
        for id in cluster.reader_ids() {
            let node = NodeId::Worker(id);
            let Some(Actor::Reader(spectator)) = cluster.world.role(node) else { continue };
            let Some(shown) = self.shown.get(&node) else { continue };
            let has_gone = match cluster.world.ended(node) {
                None => !spectator.is_reading(),
                Some(Ended::Stopped { error }) => error.as_deref() != Some("the job is over"),
                Some(_) => true,
            };
            let had_time = self.last_published.max(shown.since) + CATCHES_UP <= now;
            if !has_gone && had_time && shown.version < version {
                return Err(format!(
                    "{node} has version {}, and version {version} was published {:.1} s before the end",
                    shown.version,
                    now.since(self.last_published).as_secs_f64()
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::Checkers;
    use crate::scenario::Scenario;
    use paramill_core::policy::Axis;

    fn run(answer_codec: &str, faults: &[&str]) -> (Cluster, Result<(), String>) {
        let scenario = Scenario {
            readers: 4,
            iterations: 30,
            faults: faults.iter().map(|fault| fault.to_string()).collect(),
            ..Scenario::new(3, 2, 300)
        };
        let scenario = scenario
            .with(Axis::Broadcast, "rotated:degree=2")
            .with(Axis::AnswerCodec, answer_codec)
            .with(Axis::Chunk, "64B");
        let mut cluster = Cluster::new(&scenario).unwrap();
        let mut checkers = Checkers::default();
        checkers.add(Readers::new(&cluster));
        let ran = cluster.run(Time::from_secs_f64(200.0), &mut checkers);
        let ran = ran.map_err(|violation| violation.to_string()).and_then(|_| checkers.at_end(&cluster));
        (cluster, ran)
    }

    /// Values are those of the moment when they leave. On a slow link no two chunks of a version have the same number then, and the sender must
    /// go on all the same.
    #[test]
    fn a_reader_on_a_slow_link_has_the_last_version_though_it_found_no_other_whole() {
        for (seed, step_ms) in (0..10).flat_map(|seed| [4, 6, 8, 12].map(|step_ms| (seed, step_ms))) {
            let text = format!(
                "seed = {seed}\nworkers = 1\nservers = 1\nreaders = 1\niterations = 60\nsync = 'asp'\nbroadcast = 'star'\nchunk = '96B'\ncolocated = true\n\
                 [[tables]]\nname = 'w'\nshape = [103]\n[compute]\nstep_ms = {step_ms}\n\
                 [network]\nlatency_us = 1500\njitter_us = 1000\nwindow_bytes = 337\n"
            );
            let mut cluster = Cluster::new(&Scenario::parse(&text).unwrap()).unwrap();
            let mut checkers = Checkers::default();
            checkers.add(Readers::new(&cluster));
            let ran = cluster.run(Time::from_secs_f64(200.0), &mut checkers);
            assert_eq!(ran.map_err(|violation| violation.to_string()), Ok(true), "seed {seed}, {step_ms} ms");
            assert_eq!(checkers.at_end(&cluster), Ok(()), "seed {seed}, {step_ms} ms");
        }
    }

    #[test]
    fn readers_that_come_and_go_have_what_was_published() {
        for codec in ["none", "topk:0.2", "delta:dtype=bf16"] {
            for faults in [&[][..], &["link:reset,p=0.01"]] {
                let (cluster, ran) = run(codec, faults);
                assert_eq!(ran, Ok(()), "{codec}");
                let Some(Actor::Reader(stays)) =
                    cluster.world.role(NodeId::Worker(cluster.reader_ids().next().unwrap()))
                else {
                    panic!("a reader's node holds a reader")
                };
                assert_eq!(stays.worker().staged_version(), Some(30), "{codec}");
                assert!(cluster.worker_ids().all(|id| cluster.player(id).is_finished()));
            }
        }
    }

    #[test]
    fn other_bits_are_named() {
        let (cluster, ran) = run("none", &[]);
        ran.unwrap();
        let mut checker = Readers::new(&cluster);
        for id in cluster.shard_ids() {
            checker.note(Time::ZERO, NodeId::Shard(id), cluster.shard(id)).unwrap();
        }
        let last = checker.published.values_mut().last().unwrap();
        last.versions.values_mut().for_each(|digest| *digest ^= 1);
        let node = NodeId::Worker(cluster.reader_ids().next().unwrap());
        let error = checker.on_settled(Time::ZERO, node, cluster.world.role(node).unwrap()).unwrap_err();
        assert!(error.contains("shows other bits than were published as version 30"), "{error}");
    }
}
