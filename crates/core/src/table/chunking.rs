//! How tables are cut into chunks, and which data core of its server holds each.

use super::TableSpec;
use crate::placement::Part;
use crate::policy::Policy;
use crate::types::{ServerId, ShardId, TableId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Chunks of one table that a core gets at least before another core gets some, where balance allows: every core that
/// holds some of a table costs an exchange of its own.
const WORTH_A_CORE: u64 = 8;

/// One chunk of a table: the unit of work, on one shard for life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The shard that holds it.
    pub shard: ShardId,
    /// First element in its table.
    pub start: u64,
    /// Number of elements.
    pub len: u32,
}

/// Cuts the parts of every table into chunks of at most the length that the policy says (whole rows) and gives each to a core of
/// its server. Every node derives the same chunks from the same parts.
///
/// The cores of a server end up with the same number of elements, but for one chunk. A part goes to the least loaded
/// cores in runs of neighbouring chunks: a small one stays on one core, a large one has a run on every core, so that
/// all of them work on it at once. The tables of `whole`, ascending and of one part each, stay on one core each; they are dealt
/// first, the largest before the others, so that what can be cut evens out what cannot.
pub fn chunks(
    tables: &[TableSpec],
    parts: &[Vec<Part>],
    whole: &[TableId],
    cores: &[u32],
    policy: &Policy,
) -> Vec<Vec<Chunk>> {
    let mut total = vec![0u64; cores.len()];
    for part in parts.iter().flatten() {
        total[part.server.0 as usize] += part.len;
    }
    let mut servers: Vec<Cores> = (0..)
        .zip(cores)
        .zip(total)
        .map(|((id, &cores), total)| Cores::new(ServerId(id), cores, total))
        .collect();
    let mut chunks = vec![Vec::new(); tables.len()];
    let mut deal = |number: usize, is_whole: bool| {
        let step = length(&tables[number], policy);
        for part in &parts[number] {
            let cores = &mut servers[part.server.0 as usize];
            if is_whole {
                cores.take_whole(part, step, &mut chunks[number]);
            } else {
                cores.take(part, step, &mut chunks[number]);
            }
        }
    };
    let mut largest_first: Vec<usize> = whole.iter().map(|table| table.0 as usize).collect();
    largest_first.sort_by_key(|&number| Reverse(tables[number].elements()));
    largest_first.into_iter().for_each(|number| deal(number, true));
    let is_cut = |number: &usize| whole.binary_search(&TableId(*number as u32)).is_err();
    (0..tables.len()).filter(is_cut).for_each(|number| deal(number, false));
    chunks
}

/// At least as many chunks as a table is cut into.
pub fn chunks_at_most(table: &TableSpec, parts: &[Part], policy: &Policy) -> u64 {
    table.elements() / length(table, policy) + parts.len() as u64
}

/// Elements in a chunk of a table: whole rows, and at least one.
fn length(table: &TableSpec, policy: &Policy) -> u64 {
    let row = table.row_elements().max(1);
    (policy.chunk_elements() as u64 / row).max(1) * row
}

/// The cores of one server while they are given chunks.
///
/// The largest load comes to differ from the smallest by one chunk at most. A run is only given to a core that stays
/// within an equal share with it. A chunk that no core has such room for goes to the least loaded one: whoever is the
/// most loaded in the end got its last chunk that way, when all others had at least as much as it had before.
struct Cores {
    server: ServerId,
    /// Elements of all parts on this server.
    total: u64,
    count: u32,
    /// Load and number; the least loaded comes first.
    loads: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Cores {
    fn new(server: ServerId, count: u32, total: u64) -> Cores {
        Cores { server, total, count, loads: (0..count).map(|core| Reverse((0, core))).collect() }
    }

    /// Gives all chunks of a part, of `step` elements each but the last, to cores.
    fn take(&mut self, part: &Part, step: u64, chunks: &mut Vec<Chunk>) {
        let sharers = part.len.div_ceil(step).div_ceil(WORTH_A_CORE).clamp(1, u64::from(self.count));
        let longest_run = part.len.div_ceil(step).div_ceil(sharers) * step;
        let (mut start, end) = (part.start, part.start + part.len);
        while start < end {
            let Reverse((load, core)) = self.loads.pop().expect("a server has a core");
            let shard = ShardId { server: self.server, core };
            let run_end = end.min(start + longest_run);
            let mut given = 0;
            while start < run_end {
                let len = step.min(end - start);
                if given > 0 && !self.is_within_share(load + given + len) {
                    break;
                }
                chunks.push(Chunk { shard, start, len: len as u32 });
                start += len;
                given += len;
            }
            self.loads.push(Reverse((load + given, core)));
        }
    }

    /// Gives all chunks of a part to the least loaded core.
    fn take_whole(&mut self, part: &Part, step: u64, chunks: &mut Vec<Chunk>) {
        let Reverse((load, core)) = self.loads.pop().expect("a server has a core");
        let (shard, end) = (ShardId { server: self.server, core }, part.start + part.len);
        let mut start = part.start;
        while start < end {
            let len = step.min(end - start);
            chunks.push(Chunk { shard, start, len: len as u32 });
            start += len;
        }
        self.loads.push(Reverse((load + part.len, core)));
    }

    fn is_within_share(&self, load: u64) -> bool {
        u128::from(load) * u128::from(self.count) <= u128::from(self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Axis;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    const CHUNK: usize = 1024;

    fn part(server: u32, start: u64, len: u64) -> Part {
        Part { server: ServerId(server), start, len }
    }

    /// The policy of chunks of so many elements.
    fn of(size: usize) -> Policy {
        Policy::default().with(Axis::Chunk, format!("{}B", 4 * size))
    }

    /// Whole tables on one server.
    fn on_one_server(tables: &[TableSpec], cores: u32, size: usize) -> Vec<Vec<Chunk>> {
        let parts: Vec<Vec<Part>> = tables.iter().map(|table| vec![part(0, 0, table.elements())]).collect();
        chunks(tables, &parts, &[], &[cores], &of(size))
    }

    fn loads(chunks: &[Vec<Chunk>], cores: &[u32]) -> Vec<Vec<u64>> {
        let mut loads: Vec<Vec<u64>> = cores.iter().map(|&cores| vec![0; cores as usize]).collect();
        for Chunk { shard, len, .. } in chunks.iter().flatten() {
            loads[shard.server.0 as usize][shard.core as usize] += u64::from(*len);
        }
        loads
    }

    fn cores_of(chunks: &[Chunk]) -> BTreeSet<u32> {
        chunks.iter().map(|chunk| chunk.shard.core).collect()
    }

    /// Tables, their parts over so many servers, cores of the servers, elements per chunk.
    fn job() -> impl Strategy<Value = (Vec<TableSpec>, Vec<Vec<Part>>, Vec<u32>, usize)> {
        let table = (any::<bool>(), 1u64..40_000, 1u64..64).prop_map(|(rows, count, width)| {
            if rows {
                TableSpec::sparse("t", count / width + 1, width)
            } else {
                TableSpec::dense("t", [count])
            }
        });
        let cores = proptest::collection::vec(1u32..10, 1..4);
        let tables = proptest::collection::vec((table, any::<u64>()), 1..40);
        (tables, cores, 64usize..2000).prop_map(|(tables, cores, size)| {
            let servers = cores.len() as u64;
            // In two parts wherever the number says, or in one.
            let cut = |table: &TableSpec, number: u64| {
                let (elements, row) = (table.elements(), table.row_elements());
                let (first, second) = ((number % servers) as u32, (number / 7 % servers) as u32);
                match number / 3 % (elements / row) * row {
                    0 => vec![part(first, 0, elements)],
                    at => vec![part(first, 0, at), part(second, at, elements - at)],
                }
            };
            let parts = tables.iter().map(|(table, number)| cut(table, *number)).collect();
            (tables.into_iter().map(|(table, _)| table).collect(), parts, cores, size)
        })
    }

    proptest! {
        #[test]
        fn every_element_is_in_one_chunk_and_cores_are_balanced((tables, parts, cores, size) in job()) {
            let policy = of(size);
            let cut = chunks(&tables, &parts, &[], &cores, &policy);
            for ((table, parts), chunks) in tables.iter().zip(&parts).zip(&cut) {
                prop_assert!(chunks.len() as u64 <= chunks_at_most(table, parts, &policy));
            }
            let mut longest = BTreeMap::new();
            for ((table, parts), chunks) in tables.iter().zip(&parts).zip(&cut) {
                let mut next = 0;
                for chunk in chunks {
                    prop_assert_eq!(chunk.start, next);
                    prop_assert!(chunk.len as usize <= size.max(table.row_elements() as usize));
                    prop_assert!(u64::from(chunk.len).is_multiple_of(table.row_elements()));
                    next += u64::from(chunk.len);
                    // Of the part that begins there, and no longer than it.
                    let holds = |part: &&Part| part.start <= chunk.start && next <= part.start + part.len;
                    let server = parts.iter().find(holds).map(|part| part.server);
                    prop_assert_eq!(server, Some(chunk.shard.server));
                    let longest = longest.entry(chunk.shard.server.0).or_insert(0);
                    *longest = u64::from(chunk.len).max(*longest);
                }
                prop_assert_eq!(next, table.elements());
            }
            for (server, loads) in (0..).zip(loads(&cut, &cores)) {
                let (min, max) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
                prop_assert!(max - min <= longest.get(&server).copied().unwrap_or(0), "{:?}", loads);
            }
            prop_assert_eq!(&cut, &chunks(&tables, &parts, &[], &cores, &policy));
            // Every second table of one part is needed whole.
            let is_whole = |table: &TableId| table.0.is_multiple_of(2) && parts[table.0 as usize].len() == 1;
            let whole: Vec<TableId> = (0..tables.len() as u32).map(TableId).filter(is_whole).collect();
            let uncut = chunks(&tables, &parts, &whole, &cores, &policy);
            for (number, (cut, uncut)) in (0..).zip(cut.iter().zip(&uncut)) {
                let place = |chunk: &Chunk| (chunk.start, chunk.len, chunk.shard.server);
                prop_assert!(cut.iter().map(place).eq(uncut.iter().map(place)));
                prop_assert!(!whole.contains(&TableId(number)) || cores_of(uncut).len() == 1);
            }
        }
    }

    #[test]
    fn many_small_tables_are_spread_and_each_stays_whole() {
        let tables: Vec<TableSpec> =
            (0..1000).map(|n| TableSpec::dense(format!("t{n}"), [4 * CHUNK as u64])).collect();
        let cut = on_one_server(&tables, 8, CHUNK);
        assert_eq!(loads(&cut, &[8]), [[500 * CHUNK as u64; 8]]);
        assert!(cut.iter().all(|chunks| cores_of(chunks).len() == 1));
    }

    #[test]
    fn tables_that_are_needed_whole_are_spread_and_the_others_even_out() {
        let sizes = [100, 40, 30, 10, 260].map(|chunks| chunks * CHUNK as u64);
        let tables = sizes.map(|size| TableSpec::dense("t", [size]));
        let parts = sizes.map(|size| vec![part(0, 0, size)]);
        let whole = [0, 1, 2, 3].map(TableId);
        let cut = chunks(&tables, &parts, &whole, &[4], &of(CHUNK));
        let cores: Vec<BTreeSet<u32>> = cut.iter().map(|chunks| cores_of(chunks)).collect();
        assert_eq!(cores[..4], [[0].into(), [1].into(), [2].into(), [3].into()]);
        assert_eq!(loads(&cut, &[4]), [[110 * CHUNK as u64; 4]]);
    }

    #[test]
    fn a_large_table_has_one_run_on_every_core() {
        let cut = on_one_server(&[TableSpec::dense("w", [800 * CHUNK as u64])], 8, CHUNK);
        assert_eq!(loads(&cut, &[8]), [[100 * CHUNK as u64; 8]]);
        let runs = cut[0].chunk_by(|one, next| one.shard == next.shard);
        assert_eq!(runs.map(<[Chunk]>::len).collect::<Vec<_>>(), [100; 8]);
    }

    #[test]
    fn balance_comes_first_when_there_is_little_to_share() {
        let cut = on_one_server(&[TableSpec::dense("w", [4 * CHUNK as u64])], 8, CHUNK);
        assert_eq!(cores_of(&cut[0]).len(), 4);
    }

    /// At every moment of a push of the whole model all cores have something to do.
    #[test]
    fn cores_are_balanced_from_the_first_table_on() {
        let sizes = [9408, 64, 4096, 36_864, 16_384, 512_000, 131_072, 2_359_296, 1_048_576, 2_048_000, 1000];
        let tables: Vec<TableSpec> =
            (0..).zip(sizes).map(|(n, size): (u32, u64)| TableSpec::dense(format!("t{n}"), [size])).collect();
        let cut = on_one_server(&tables, 4, 8192);
        for count in 1..cut.len() {
            let loads = &loads(&cut[..count], &[4])[0];
            let (min, max) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
            assert!(max - min <= WORTH_A_CORE * 8192, "after {count} tables: {loads:?}");
        }
        // One run on each of four cores, or on one, and one more where the last core is full.
        let exchanges: usize = cut.iter().map(|chunks| cores_of(chunks).len()).sum();
        assert!(exchanges <= 6 * 4 + 5, "{exchanges}");
    }
}
