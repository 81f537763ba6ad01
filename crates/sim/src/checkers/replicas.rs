//! Everybody who reads a version reads the same bits.

use super::Checker;
use super::layout::Layout;
use super::policies::Policies;
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::rule::FrameView;
use crate::scenario::ScenarioError;
use paramill_core::types::{Clock, NodeId, TableId};
use paramill_core::wire::{Flags, Kind};
use std::collections::BTreeMap;

/// In the number of a form: a codec made it.
const ENCODED: u8 = 0x80;
/// Single rows.
const ROWS: u8 = 0x40;
/// Nothing: a chunk of zeros.
const EMPTY: u8 = 0x20;
/// Versions of a chunk that are remembered.
const VERSIONS: usize = 8;

/// Compares the parameters that are sent under models whose rounds make one step.
#[derive(Debug)]
pub struct Replicas {
    layout: Layout,
    policies: Policies,
    /// By table, chunk and type of elements: a switch to halves gives the same version other bits.
    seen: BTreeMap<(TableId, u32, u8), BTreeMap<Clock, u64>>,
    /// Whether an aggregator may hand on other bits: old ones while a switch gives a version a new meaning.
    may_differ: bool,
}

impl Replicas {
    /// For this job.
    pub fn new(cluster: &Cluster) -> Result<Replicas, ScenarioError> {
        Ok(Replicas {
            layout: Layout::new(cluster.scenario())?,
            policies: Policies::new(cluster.scenario(), cluster.shard_ids())?,
            seen: BTreeMap::new(),
            may_differ: !cluster.scenario().switches.is_empty(),
        })
    }
}

impl Checker for Replicas {
    fn on_sent(&mut self, frame: &FrameView<'_>, sender: &Actor) -> Result<(), String> {
        for (shard, table) in self.policies.follow(frame.from, sender)? {
            // A switch may step what was aggregated under the old model without a new version.
            let chunks = (0..).zip(self.layout.chunks(table));
            for (number, _) in chunks.filter(|(_, chunk)| chunk.shard == shard) {
                self.seen.retain(|(of, chunk, _), _| (*of, *chunk) != (table, number));
            }
        }
        let header = frame.header;
        if header.kind == Kind::Update {
            // Whoever passes it on; what a codec made of it too, since it is made once.
            let (is_encoded, is_rows) = (header.flags.has(Flags::ENCODED), header.flags.has(Flags::ROWS));
            if is_rows && !is_encoded && header.rows == 0 {
                // The end of a version of a table of rows, which is no chunk's.
                return Ok(());
            }
            let bit = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
            let empty = bit(frame.payload.is_empty(), EMPTY);
            let form = bit(is_encoded, ENCODED) | bit(is_rows, ROWS) | empty | header.dtype as u8;
            return self.compare(frame, form);
        }
        let shard = match (frame.from, frame.to, frame.shard) {
            (NodeId::Shard(shard), ..) => shard,
            (NodeId::Aggregator(_), NodeId::Worker(_), Some(shard)) if !self.may_differ => shard,
            _ => return Ok(()),
        };
        // What a codec makes of a version may be different for everybody.
        let is_other = [Flags::ROWS, Flags::ENCODED].iter().any(|flag| header.flags.has(*flag));
        let whole_chunk = header.kind == Kind::Params && !is_other;
        let on_round = || self.policies.model(shard, header.table).is_some_and(|model| model.on_round);
        if !whole_chunk || !on_round() {
            return Ok(());
        }
        self.compare(frame, header.dtype as u8)
    }
}

impl Replicas {
    /// Compares a frame with the first one that brought this version of its chunk in this form.
    fn compare(&mut self, frame: &FrameView<'_>, form: u8) -> Result<(), String> {
        let header = frame.header;
        let digest = xxhash_rust::xxh3::xxh3_64(frame.payload);
        let versions = self.seen.entry((header.table, header.chunk, form)).or_default();
        let first = *versions.entry(header.version).or_insert(digest);
        if versions.len() > VERSIONS {
            versions.pop_first();
        }
        if first == digest {
            return Ok(());
        }
        Err(format!(
            "{} sends {} version {} of chunk {} of table `{}` with other bits than {} sent before",
            frame.from,
            frame.to,
            header.version,
            header.chunk,
            self.layout.table(header.table).name,
            self.layout.chunks(header.table)[header.chunk as usize].shard
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::canary::Canary;
    use crate::checkers::Checkers;
    use crate::cluster::Play;
    use crate::scenario::Scenario;
    use paramill_core::types::Time;

    #[test]
    fn a_worker_that_is_sent_other_bits_is_named() {
        let scenario = Scenario::new(3, 1, 50);
        let mut cluster =
            Cluster::with(&scenario, Play { canary: Some(Canary::Partial), ..Play::default() }).unwrap();
        let mut checkers = Checkers::default();
        checkers.add(Replicas::new(&cluster).unwrap());
        let violation = cluster.run(Time::from_secs_f64(10.0), &mut checkers).unwrap_err();
        assert!(
            violation.what.contains("of table `w` with other bits than server 0 core 0 sent before"),
            "{violation}"
        );
    }
}
