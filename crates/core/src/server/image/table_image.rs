//! What an image keeps of one table.

use super::floats::Floats;
use crate::consistency::{Admit, ControllerImage};
use crate::intake::IntakeImage;
use crate::server::table_shard::{Kept, Loose, PublicationImage, RoundsImage, SkippedSteps};
use crate::types::Clock;
use serde::{Deserialize, Serialize};

/// One table on one shard: everything that lasts when all connections are gone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableImage {
    pub(in crate::server) version: Clock,
    pub(in crate::server) store: StoreImage,
    pub(in crate::server) controller: ControllerImage,
    pub(in crate::server) rounds: RoundsImage,
    pub(in crate::server) intake: IntakeImage<Admit, Kept>,
    pub(in crate::server) loose: Loose,
    pub(in crate::server) publication: Option<PublicationImage>,
}

impl TableImage {
    /// Rounds that are closed.
    pub fn version(&self) -> Clock {
        self.version
    }

    /// Its parameters and the state of their optimizer.
    pub fn store(&self) -> &StoreImage {
        &self.store
    }

    /// Takes out its parameters and the state of their optimizer.
    pub fn into_store(self) -> StoreImage {
        self.store
    }
}

/// A chunk of a table in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkImage {
    /// Its first element in the table.
    pub start: u64,
    /// Its elements.
    pub len: u64,
    /// Optimizer steps that single gradients were on it, beside [`StoreImage::steps`].
    pub arrivals: u64,
}

/// Parameters of a table on one shard, the state of their optimizer, and how often they were stepped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoreImage {
    pub(in crate::server) chunks: Vec<ChunkImage>,
    pub(in crate::server) initialised_chunks: u32,
    pub(in crate::server) parameters: Floats,
    pub(in crate::server) slots: Vec<Floats>,
    pub(in crate::server) steps: u64,
    pub(in crate::server) steps_outside_rounds: u64,
    pub(in crate::server) skipped: SkippedSteps,
    pub(in crate::server) touched: Option<Vec<u64>>,
}

impl StoreImage {
    /// Of chunks whose parameters, and whose elements of each array of the optimizer's state, lie side by side. All steps of the optimizer
    /// were on all elements.
    pub fn new(
        chunks: Vec<ChunkImage>,
        parameters: Vec<f32>,
        slots: Vec<Vec<f32>>,
        steps: u64,
    ) -> StoreImage {
        StoreImage {
            initialised_chunks: chunks.len() as u32,
            chunks,
            parameters: parameters.into(),
            slots: slots.into_iter().map(Floats::from).collect(),
            steps,
            steps_outside_rounds: 0,
            skipped: SkippedSteps::default(),
            touched: None,
        }
    }

    /// The chunks, in the order of their elements. Their parameters lie side by side in this order.
    pub fn chunks(&self) -> &[ChunkImage] {
        &self.chunks
    }

    /// Whether the table has all its initial values here.
    pub fn is_initialised(&self) -> bool {
        self.initialised_chunks as usize == self.chunks.len()
    }

    /// The parameters of all chunks.
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// The arrays of the optimizer's state, by number, each as long as the parameters.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.slots.iter().map(|slot| &**slot)
    }

    /// Optimizer steps on everything.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Elements of a chunk, by its place, that missed steps for lack of a gradient: where each run of them ends in the chunk, and how many
    /// steps it missed. Empty if none did.
    pub fn skipped(&self, chunk: usize) -> impl Iterator<Item = (usize, u64)> {
        (0..)
            .map_while(move |number| self.skipped.run(chunk, number))
            .map(|(range, count)| (range.end, count))
    }

    /// Notes what [`StoreImage::skipped`] told of an image, for a chunk that was cut from it.
    pub fn with_skipped(mut self, chunk: usize, runs: impl IntoIterator<Item = (usize, u64)>) -> StoreImage {
        self.skipped.set(chunk, runs);
        self
    }
}
