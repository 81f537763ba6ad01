//! Memory has a bound that follows from the tables, whatever happens on the network.

use super::Checker;
use super::layout::Layout;
use super::policies::held_at_most;
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::scenario::{Scenario, ScenarioError};
use paramill_core::limits;
use paramill_core::policy::Axis;
use paramill_core::server::Shard;
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, ShardId, TableId, Time};
use std::collections::BTreeMap;

const PAGE_BYTES: u64 = 4096;
/// The most state arrays that an optimizer keeps.
const MAX_SLOTS: u64 = 2;
/// Rounds that can be open, and one that is kept for the next.
const MAX_ROUNDS: u64 = limits::MAX_ROUNDS_AHEAD + 2;
/// What is kept of a worker's gradient until its round closes, per element: a row may be a range of its own.
const STAGED_BYTES_PER_ELEMENT: u64 = 4 + 32;
/// What an answer is received into, and the two arrays of a slab.
const SLAB_ARRAYS: u64 = 3;
/// Gradients that a worker may have under way, the one it adds to them, and two buffers kept for the next.
const GRADIENTS_PER_TABLE: u64 = limits::MAX_CLOCKS_UNACKNOWLEDGED as u64 + 1 + 2;

/// Sums that an aggregator may have under way for each worker of each table: those that are held, and the next one.
const SUMS_PER_WORKER: u64 = limits::MAX_HELD_PUSHES as u64 + 1;
/// Sums that it keeps for the next clock.
const SPARE_SUMS: u64 = 2;
/// Arrays of a sum of rows: the values, and the numbers of the rows in lists that have grown.
const ARRAYS_OF_ROWS: u64 = 6;

/// What a codec keeps of a table for each peer: what was not sent, velocities, what the other end has, scratch.
const ARRAYS_OF_A_CODEC: u64 = 8;

/// What belongs to an update of a row that is held back, and to a copy of the row, beside their values.
const HELD_ROW_BYTES: u64 = 144;

/// Versions that wait for receivers, each of which a codec may make longer than the table by a little, and what was broadcast.
const ARRAYS_OF_A_STREAM: u64 = 2 * limits::MAX_VERSIONS_LOGGED as u64 + 2;

/// Versions that a reader holds back, each of which a codec may make longer than the table by a little.
const ARRAYS_HELD_BACK: u64 = 2 * limits::MAX_VERSIONS_HELD as u64;

/// Compares what roles hold with what they may hold.
#[derive(Debug)]
pub struct Memory {
    shards: BTreeMap<ShardId, u64>,
    worker: u64,
    reader: u64,
    aggregator: u64,
}

impl Memory {
    /// Works out the bounds of a job.
    pub fn new(cluster: &Cluster) -> Result<Memory, ScenarioError> {
        let scenario = cluster.scenario();
        let layout = Layout::new(scenario)?;
        let workers = cluster.worker_ids().count() as u64;
        let tables = || (0..).map(TableId).zip(&layout.tables);
        let shard_bound = |shard: ShardId| {
            let held = |table| layout.chunks(table).iter().filter(move |chunk| chunk.shard == shard);
            let elements = |table| held(table).map(|chunk| u64::from(chunk.len)).sum();
            tables().map(|(table, _)| part_bytes(scenario, workers, elements(table))).sum()
        };
        let shards = cluster.shard_ids().map(|shard| (shard, shard_bound(shard))).collect();
        let of_codecs = |peers: u64| ARRAYS_OF_A_CODEC * codecs(scenario) * peers;
        let holds = held_at_most(scenario)?.is_some();
        let of_worker = 1 + GRADIENTS_PER_TABLE + SLAB_ARRAYS + of_codecs(1) + streams(scenario);
        let of_table = |spec: &TableSpec| {
            let held = if holds { held_bytes(spec) } else { 0 };
            of_worker * array_bytes(spec.elements()) + held
        };
        let worker = tables().map(|(_, spec)| of_table(spec)).sum();
        let reader = tables().map(|(_, spec)| (1 + ARRAYS_HELD_BACK) * array_bytes(spec.elements())).sum();
        let held = |shard: ShardId, table: TableId| -> u64 {
            let chunks = layout.chunks(table).iter().filter(|chunk| chunk.shard == shard);
            chunks.map(|chunk| u64::from(chunk.len)).sum()
        };
        let sums = |shard: ShardId| -> u64 {
            let count = workers * SUMS_PER_WORKER + SPARE_SUMS + of_codecs(workers + 1);
            let arrays = |spec: &TableSpec| if spec.rows { ARRAYS_OF_ROWS } else { 1 };
            tables().map(|(table, spec)| arrays(spec) * count * array_bytes(held(shard, table))).sum()
        };
        let replicas = |shard: ShardId| -> u64 {
            tables().map(|(table, _)| streams(scenario) * array_bytes(held(shard, table))).sum()
        };
        let aggregator = cluster.shard_ids().map(|shard| sums(shard) + replicas(shard)).sum();
        Ok(Memory { shards, worker, reader, aggregator })
    }
}

/// What a worker holds back of a table: a sum, and of a table of rows an update and a copy of each.
fn held_bytes(spec: &TableSpec) -> u64 {
    match spec.rows {
        true => 2 * spec.elements() * 4 + spec.shape[0] * HELD_ROW_BYTES,
        false => array_bytes(spec.elements()),
    }
}

/// A page-aligned array of `f32`.
fn array_bytes(elements: u64) -> u64 {
    (elements * 4).next_multiple_of(PAGE_BYTES)
}

/// One table's part on one shard: parameters, optimizer state, open rounds, gradients that wait for theirs.
fn part_bytes(scenario: &Scenario, workers: u64, elements: u64) -> u64 {
    let of_codecs = ARRAYS_OF_A_CODEC * codecs(scenario) * workers;
    let arrays = 1 + MAX_SLOTS + MAX_ROUNDS + of_codecs + streams(scenario);
    let contributions = MAX_ROUNDS * elements * 8;
    let staged = workers * MAX_ROUNDS * elements * STAGED_BYTES_PER_ELEMENT;
    arrays * array_bytes(elements) + contributions + staged
}

/// How many directions have a codec.
fn codecs(scenario: &Scenario) -> u64 {
    let axes = [Axis::Codec, Axis::AnswerCodec];
    axes.iter().filter(|axis| has_codec(scenario, **axis)).count() as u64
}

/// Whether a direction has one, for some table and at some time.
fn has_codec(scenario: &Scenario, axis: Axis) -> bool {
    let switches = scenario.switches.iter().map(|switch| &switch.change);
    let mut exceptions = scenario.overrides.iter().chain(switches);
    let is_codec = |text: &str| text != "none";
    is_codec(scenario.policy.get(axis))
        || exceptions.any(|rule| rule.policies.get(axis).is_some_and(is_codec))
}

/// Arrays of a table that is broadcast: without a codec only the one that receivers have, unless single rows travel.
fn streams(scenario: &Scenario) -> u64 {
    let has_rows = scenario.tables.iter().any(|table| table.rows);
    match (scenario.policy.is_broadcast(), has_codec(scenario, Axis::AnswerCodec) || has_rows) {
        (false, _) => 0,
        (true, false) => 2,
        (true, true) => ARRAYS_OF_A_STREAM,
    }
}

impl Checker for Memory {
    fn on_settled(&mut self, _now: Time, node: NodeId, actor: &Actor) -> Result<(), String> {
        let (held, bound) = match (node, actor) {
            (NodeId::Shard(id), actor) => (actor.as_shard().map_or(0, Shard::memory_bytes), self.shards[&id]),
            (_, Actor::Worker(player)) => (player.worker().memory_bytes(), self.worker),
            (_, Actor::Reader(spectator)) => (spectator.worker().memory_bytes(), self.reader),
            (_, Actor::Aggregator(aggregator)) => (aggregator.memory_bytes(), self.aggregator),
            _ => return Ok(()),
        };
        if held as u64 <= bound {
            return Ok(());
        }
        Err(format!("{node} holds {held} bytes; its tables allow {bound}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::Checkers;

    #[test]
    fn a_role_above_its_bound_is_named() {
        let mut cluster = Cluster::new(&Scenario::new(2, 1, 5000)).unwrap();
        let mut checkers = Checkers::default();
        let bounds = Memory::new(&cluster).unwrap();
        // Parameters alone take five pages of a worker.
        checkers.add(Memory { worker: 4 * PAGE_BYTES, ..bounds });
        let violation = cluster.run(Time::from_secs_f64(10.0), &mut checkers).unwrap_err();
        assert!(
            violation.what.contains("holds") && violation.what.contains("its tables allow 16384"),
            "{violation}"
        );
    }
}
