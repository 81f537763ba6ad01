//! Names for the memory that an aggregator sends from, as [`Body::Stored`](crate::role::Body::Stored) carries them.

use super::aggregate::AggregateId;

const IS_AGGREGATE: u64 = 1 << 63;
/// Bits of an aggregate's number. The shard's place is above them; there are at most 2^18 shards.
const NUMBER_BITS: u32 = 44;

/// Memory that frames are sent from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// The copy of a table's parameters.
    Copy { table: usize },
    /// An aggregate on its way to a shard, by the shard's place among those of the aggregator.
    Aggregate { shard: usize, id: AggregateId },
}

impl Memory {
    pub(super) fn to_bits(self) -> u64 {
        match self {
            Memory::Copy { table } => table as u64,
            Memory::Aggregate { shard, id } => {
                IS_AGGREGATE | (shard as u64) << NUMBER_BITS | id.0 & ((1 << NUMBER_BITS) - 1)
            }
        }
    }

    pub(super) fn from_bits(bits: u64) -> Memory {
        if bits & IS_AGGREGATE == 0 {
            return Memory::Copy { table: bits as usize };
        }
        let shard = ((bits & !IS_AGGREGATE) >> NUMBER_BITS) as usize;
        Memory::Aggregate { shard, id: AggregateId(bits & ((1 << NUMBER_BITS) - 1)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    #[test]
    fn memory_is_found_by_its_name() {
        let shards = (limits::MAX_SERVERS * limits::MAX_CORES) as usize;
        for memory in [
            Memory::Copy { table: 0 },
            Memory::Copy { table: limits::MAX_TABLES - 1 },
            Memory::Aggregate { shard: 0, id: AggregateId(0) },
            Memory::Aggregate { shard: 1, id: AggregateId(7) },
            Memory::Aggregate { shard: shards - 1, id: AggregateId((1 << NUMBER_BITS) - 1) },
        ] {
            assert_eq!(Memory::from_bits(memory.to_bits()), memory);
        }
    }
}
