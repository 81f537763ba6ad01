//! Names for the memory that an aggregator sends from, as [`Body::Stored`](crate::role::Body::Stored) carries them.

use super::aggregate::AggregateId;

/// Bits of an aggregate's number. The shard's place is above them; there are at most 2^18 shards.
const NUMBER_BITS: u32 = 44;

/// The memory of an aggregate on its way to a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    /// The shard's place among those of the aggregator.
    pub(super) shard: usize,
    pub(super) id: AggregateId,
}

impl Memory {
    pub(super) fn to_bits(self) -> u64 {
        let Memory { shard, id } = self;
        (shard as u64) << NUMBER_BITS | id.0 & ((1 << NUMBER_BITS) - 1)
    }

    pub(super) fn from_bits(bits: u64) -> Memory {
        Memory { shard: (bits >> NUMBER_BITS) as usize, id: AggregateId(bits & ((1 << NUMBER_BITS) - 1)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    #[test]
    fn memory_is_found_by_its_name() {
        let shards = (limits::MAX_SERVERS * limits::MAX_CORES) as usize;
        for (shard, id) in [(0, 0), (1, 7), (shards - 1, (1 << NUMBER_BITS) - 1)] {
            let memory = Memory { shard, id: AggregateId(id) };
            assert_eq!(Memory::from_bits(memory.to_bits()), memory);
        }
    }
}
