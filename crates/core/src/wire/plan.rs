//! The plan: who holds what, under which policies.

use super::bounded::sequence;
use crate::address::Addresses;
use crate::limits;
use crate::placement::Part;
use crate::policy::{Policy, PolicyOverride};
use crate::table::{Chunk, TableSpec, chunks};
use crate::types::{ServerId, ShardId, TableId, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Shards in one job.
const MAX_SHARDS: usize = (limits::MAX_SERVERS * limits::MAX_CORES) as usize;

/// Who holds what. Chunks follow from it: [`crate::table::chunks`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Frames of another placement epoch are refused.
    pub epoch: u32,
    /// The tables in creation order.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub tables: Vec<TableSpec>,
    /// The parts of each table.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub parts: Vec<Vec<Part>>,
    /// Every shard and where it is reached, ordered.
    #[serde(deserialize_with = "sequence::<_, _, MAX_SHARDS>")]
    pub shards: Vec<(ShardId, Addresses)>,
    /// Every worker with its incarnation, ordered.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pub workers: Vec<(WorkerId, u64)>,
    /// The job's policy.
    pub policy: Policy,
    /// Exceptions from it.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_OVERRIDES }>")]
    pub overrides: Vec<PolicyOverride>,
    /// The job's seed.
    pub seed: u64,
}

impl Plan {
    /// Data cores of each server, by number. The plan must have passed [`Plan::check`].
    pub fn cores(&self) -> Vec<u32> {
        let mut cores = Vec::new();
        for (shard, _) in &self.shards {
            cores.resize(shard.server.0 as usize + 1, 0);
            cores[shard.server.0 as usize] += 1;
        }
        cores
    }

    /// The chunks of every table, and who holds each. The plan must have passed [`Plan::check`].
    pub fn chunks(&self) -> Vec<Vec<Chunk>> {
        chunks(&self.tables, &self.parts, &self.cores(), self.policy.chunk_elements())
    }

    /// The policy of a table on a server: the job's, then the table's own, then the job's exceptions.
    pub fn policy_of(&self, table: TableId, server: ServerId) -> Policy {
        self.tables[table.0 as usize].policy_on(server, &self.policy, &self.overrides)
    }

    /// Whether the plan's numbers fit each other and the limits, so that nobody indexes out of range, or takes memory
    /// without bound, on a peer's word. The error says what does not fit.
    pub fn check(&self) -> Result<(), String> {
        self.check_shards()?;
        self.check_workers()?;
        self.check_tables()
    }

    /// Servers and their cores are numbered from 0 without a gap, and stand in order.
    fn check_shards(&self) -> Result<(), String> {
        let mut next = [ShardId { server: ServerId(0), core: 0 }; 2];
        for (shard, addresses) in &self.shards {
            let within = shard.server.0 < limits::MAX_SERVERS && shard.core < limits::MAX_CORES;
            if !within || !next.contains(shard) {
                return Err(format!("{shard} is out of order"));
            }
            addresses.check().map_err(|why| format!("{shard} has {why}"))?;
            let ShardId { server, core } = *shard;
            next = [ShardId { server, core: core + 1 }, ShardId { server: ServerId(server.0 + 1), core: 0 }];
        }
        if self.shards.is_empty() { Err("there is no server".into()) } else { Ok(()) }
    }

    fn check_workers(&self) -> Result<(), String> {
        let ascending = self.workers.windows(2).all(|pair| pair[0].0 < pair[1].0);
        match self.workers.last() {
            Some((last, _)) if ascending && last.0 < limits::MAX_WORKERS => Ok(()),
            _ => Err("the ranks of its workers are missing, out of order or out of range".into()),
        }
    }

    fn check_tables(&self) -> Result<(), String> {
        if self.tables.is_empty() || self.tables.len() != self.parts.len() {
            return Err(format!("{} tables, and parts of {}", self.tables.len(), self.parts.len()));
        }
        let servers = self.shards.last().map_or(0, |(shard, _)| shard.server.0 + 1);
        let mut names = BTreeSet::new();
        let mut chunks = 0;
        for (spec, parts) in self.tables.iter().zip(&self.parts) {
            spec.check()?;
            if !names.insert(&spec.name) {
                return Err(format!("two tables are called `{}`", spec.name));
            }
            check_parts(spec, parts, servers)?;
            chunks += chunks_at_most(spec, parts, self.policy.chunk_elements() as u64);
        }
        if chunks > limits::MAX_CHUNKS {
            return Err(format!(
                "its tables make {chunks} chunks of {} elements; there may be {}: make chunks larger",
                self.policy.chunk_elements(),
                limits::MAX_CHUNKS
            ));
        }
        Ok(())
    }
}

/// Parts cover their table without gap or overlap, by whole rows, on servers that exist.
fn check_parts(spec: &TableSpec, parts: &[Part], servers: u32) -> Result<(), String> {
    let mut next = 0u64;
    for part in parts {
        let fits = part.start == next
            && part.len > 0
            && part.len.is_multiple_of(spec.row_elements())
            && part.server.0 < servers;
        if !fits {
            return Err(format!("table `{}` has a part that does not fit: {part:?}", spec.name));
        }
        next = next.saturating_add(part.len);
    }
    if next == spec.elements() {
        return Ok(());
    }
    Err(format!("the parts of table `{}` have {next} elements, it has {}", spec.name, spec.elements()))
}

fn chunks_at_most(spec: &TableSpec, parts: &[Part], size: u64) -> u64 {
    let rows_per_chunk = (size / spec.row_elements()).max(1);
    spec.elements() / (rows_per_chunk * spec.row_elements()) + parts.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Axis;

    fn part(server: u32, start: u64, len: u64) -> Part {
        Part { server: ServerId(server), start, len }
    }

    fn shard(server: u32, core: u32) -> (ShardId, Addresses) {
        (ShardId { server: ServerId(server), core }, "host:1".into())
    }

    fn plan() -> Plan {
        Plan {
            epoch: 1,
            tables: vec![TableSpec::dense("w", [10]), TableSpec::sparse("rows", 4, 3)],
            parts: vec![vec![part(0, 0, 6), part(1, 6, 4)], vec![part(1, 0, 12)]],
            shards: vec![shard(0, 0), shard(0, 1), shard(1, 0)],
            workers: vec![(WorkerId(0), 1), (WorkerId(1), 2)],
            policy: Policy::default().with(Axis::Chunk, "16B"),
            overrides: vec![],
            seed: 0,
        }
    }

    #[test]
    fn a_plan_that_fits_is_taken() {
        assert_eq!(plan().check(), Ok(()));
        assert_eq!(plan().cores(), [2, 1]);
    }

    #[test]
    fn a_plan_that_does_not_fit_itself_or_the_limits_is_refused() {
        type Spoil = fn(&mut Plan);
        let cases: [(&str, Spoil); 21] = [
            ("there is no server", |plan| plan.shards.clear()),
            ("server 4294967295 core 0 is out of order", |plan| plan.shards.push(shard(u32::MAX, 0))),
            ("out of order", |plan| plan.shards.push(shard(1, 0))),
            ("out of order", |plan| plan.shards.push(shard(3, 0))),
            ("out of order", |plan| plan.shards.swap(0, 1)),
            ("out of order", |plan| {
                plan.shards.extend((1..=limits::MAX_CORES).map(|core| shard(1, core)));
            }),
            ("server 0 core 1 has 9 addresses", |plan| {
                plan.shards[1].1 = (0..9).map(|n| format!("host:{n}")).collect();
            }),
            ("ranks", |plan| plan.workers.clear()),
            ("ranks", |plan| plan.workers.swap(0, 1)),
            ("ranks", |plan| plan.workers.push((WorkerId(u32::MAX), 0))),
            ("2 tables, and parts of 1", |plan| plan.parts.truncate(1)),
            ("expected 1 to", |plan| plan.tables[0].shape = vec![u64::MAX, u64::MAX]),
            ("two tables are called `w`", |plan| plan.tables[1].name = "w".into()),
            ("does not fit", |plan| plan.parts[0][0].len = 7),
            ("does not fit", |plan| plan.parts[0][1].server = ServerId(2)),
            ("does not fit", |plan| plan.parts[0].insert(1, part(0, 6, 0))),
            ("does not fit", |plan| plan.parts[0].swap(0, 1)),
            ("have 18446744073709551615 elements, it has 10", |plan| plan.parts[0][1].len = u64::MAX),
            ("have 0 elements, it has 12", |plan| plan.parts[1].clear()),
            // A row over two servers.
            ("does not fit", |plan| plan.parts[1] = vec![part(0, 0, 7), part(1, 7, 5)]),
            ("make chunks larger", |plan| {
                plan.tables[0].shape = vec![limits::MAX_TABLE_ELEMENTS];
                plan.parts[0] = vec![part(0, 0, limits::MAX_TABLE_ELEMENTS)];
            }),
        ];
        for (expected, spoil) in cases {
            let mut plan = plan();
            spoil(&mut plan);
            let why = plan.check().unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn the_bound_on_chunks_is_one() {
        let plan = plan();
        for size in [1, 3, 4, 5, 100] {
            let cut = chunks(&plan.tables, &plan.parts, &plan.cores(), size);
            for ((spec, parts), chunks) in plan.tables.iter().zip(&plan.parts).zip(cut) {
                assert!(chunks.len() as u64 <= chunks_at_most(spec, parts, size as u64), "{size}");
            }
        }
    }
}
