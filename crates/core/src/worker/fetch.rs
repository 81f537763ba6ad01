//! A pull of a dense table: where its answer is received, and what has arrived of it.

use crate::lease::Lease;
use crate::region::{Divided, Partition, Region};
use crate::store::Buffer;
use crate::types::Clock;
use crate::wire::DType;
use std::sync::Arc;

/// Numbers the pulls of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FetchId(pub(super) u64);

/// When a pull becomes the front, and who says that it may be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FetchKind {
    /// With its last block.
    Whole,
    /// The same, whatever the consistency model says.
    AtOnce,
    /// Without the missing blocks, once the worker may go on without them (PSP).
    Partial,
    /// When all blocks are here and the application does not compute. It goes on meanwhile.
    Background,
}

/// A shard's block of the front.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Held {
    /// When it arrived.
    pub(super) at: u64,
    pub(super) version: Clock,
    /// The iteration that it was asked for; `None` when no consistency condition stood before the answer.
    pub(super) asked: Option<Clock>,
}

/// A pull of the whole table.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) id: FetchId,
    pub(super) clock: Clock,
    pub(super) kind: FetchKind,
    pub(super) target: Target,
    /// For each shard.
    pub(super) blocks: Vec<Block>,
    /// For each shard, once its block is here.
    pub(super) versions: Vec<Clock>,
}

/// What becomes of a pull's back.
#[derive(Debug)]
pub(super) enum Target {
    /// It becomes the front. It is taken when something arrives, or earlier where servers are told its place.
    Front {
        back: Option<Divided>,
        /// Servers know its place, and write there.
        is_told: bool,
    },
    /// It is a slab's memory, and goes back to the application.
    Slab(Divided),
    /// Blocks go from it to the slab when they are whole, or when all are (a pull in the background): the application may have the
    /// slab back before that.
    Beside {
        back: Option<Divided>,
        partition: Arc<Partition>,
        dtype: DType,
        /// Servers know its place, and write there.
        is_told: bool,
    },
    /// The application has other memory since. Servers may still write to this one.
    Abandoned { _reserved: Option<Retired> },
}

/// Memory that is kept and not used: the application may know its address, and others may still write there.
#[derive(Debug, Clone)]
pub(super) enum Retired {
    Lent {
        _lease: Lease,
    },
    /// A driver was receiving into it when it was given up.
    Divided {
        _whole: Arc<Divided>,
    },
}

impl From<Lease> for Retired {
    fn from(lease: Lease) -> Retired {
        Retired::Lent { _lease: lease }
    }
}

/// One shard's answer to a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    Waiting,
    /// Some of it is in the back.
    Receiving,
    /// It is in the back, whole.
    Arrived {
        at: u64,
    },
    /// It is in the back, whole, since a moment when the application had its slab: the next exchange may take it.
    Kept {
        version: Clock,
    },
    /// It is in the front, or will never be.
    Settled,
}

impl Fetch {
    pub(super) fn is_waiting_for(&self, shard: usize) -> bool {
        matches!(self.blocks[shard], Block::Waiting | Block::Receiving)
    }

    /// The iteration that it was asked for, where a consistency condition stands before the answer.
    pub(super) fn asked(&self) -> Option<Clock> {
        (self.kind != FetchKind::AtOnce).then_some(self.clock)
    }

    /// Whether all of a pull in the background is here.
    pub(super) fn is_ready(&self) -> bool {
        self.kind == FetchKind::Background && self.waiting() == 0
    }

    pub(super) fn waiting(&self) -> usize {
        (0..self.blocks.len()).filter(|&shard| self.is_waiting_for(shard)).count()
    }

    /// Whether servers know where its back is.
    pub(super) fn is_told(&self) -> bool {
        matches!(self.target, Target::Front { is_told: true, .. } | Target::Beside { is_told: true, .. })
    }

    /// Whether its blocks go to a slab.
    pub(super) fn is_beside(&self) -> bool {
        matches!(self.target, Target::Beside { .. })
    }

    /// Whether blocks that have arrived beside a slab are to go there.
    pub(super) fn has_kept(&self) -> bool {
        self.blocks.iter().any(|block| self.keeps(block))
    }

    fn keeps(&self, block: &Block) -> bool {
        self.is_beside() && matches!(block, Block::Kept { .. } | Block::Arrived { .. })
    }

    pub(super) fn drop_kept(&mut self) {
        for shard in 0..self.blocks.len() {
            if self.keeps(&self.blocks[shard]) {
                self.blocks[shard] = Block::Settled;
            }
        }
    }

    /// Copies the blocks that were kept to a slab with elements of this type, if they are not older than what is there and their
    /// versions are taken.
    pub(super) fn hand_over_kept(
        &mut self,
        slab: &mut Buffer,
        of: DType,
        held: &mut [Held],
        takes: &impl Fn(usize, Clock) -> bool,
    ) {
        let Target::Beside { back: Some(back), dtype, .. } = &self.target else { return self.drop_kept() };
        for (shard, block) in self.blocks.iter().enumerate() {
            if let Block::Kept { version } = *block
                && *dtype == of
                && version >= held[shard].version
                && takes(shard, version)
            {
                held[shard].version = version;
                copy_region(&back.lend(shard).expect("nobody receives a block that is whole"), slab);
            }
        }
        self.drop_kept();
    }
}

/// Copies a shard's block.
pub(super) fn copy_region(block: &Region, to: &mut Buffer) {
    for range in block.ranges() {
        to.as_mut_bytes()[range.clone()].copy_from_slice(block.bytes(range.clone()));
    }
}
