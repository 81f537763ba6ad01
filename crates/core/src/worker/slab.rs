//! Buffers of a table that the application and the data plane hand to each other, so that nothing is copied.
//!
//! A [`Slab`] belongs to the application or to the data plane, never to both: [`super::Worker::exchange`] takes it, and
//! [`super::Worker::redeem_slabs`] gives it back when gradient and answer are through.

use super::WorkerError;
use super::prepared::Content;
use super::request::Missing;
use crate::store::{Allocate, Buffer};
use crate::types::TableId;
use std::ops::Range;
use std::sync::Arc;

/// A dense table's gradient and parameters in memory that frames are sent from, and that answers are received into.
///
/// Where memory is shared with the servers, neither a push nor a pull copies it.
#[derive(Debug)]
pub struct Slab {
    /// The number of the worker that lent it.
    pub(super) lender: u64,
    pub(super) table: TableId,
    pub(super) gradient: Unique,
    pub(super) values: Unique,
    pub(super) content: Content,
    pub(super) missing: Missing,
}

/// A buffer that is counted, so that frames can be made from it, and that nobody else has.
#[derive(Debug)]
pub(super) struct Unique(pub(super) Arc<Buffer>);

impl Unique {
    pub(super) fn new(buffer: Buffer) -> Unique {
        Unique(Arc::new(buffer))
    }

    /// The buffer itself, or one like it where somebody still has it.
    pub(super) fn of(buffer: Arc<Buffer>, memory: &dyn Allocate) -> Unique {
        match Arc::strong_count(&buffer) {
            1 => Unique(buffer),
            _ => {
                let mut copy = memory.zeroed(buffer.len());
                copy.as_mut_slice().copy_from_slice(buffer.as_slice());
                Unique::new(copy)
            }
        }
    }

    fn as_mut_slice(&mut self) -> &mut [f32] {
        Arc::get_mut(&mut self.0).expect("nobody else has it").as_mut_slice()
    }
}

impl Slab {
    /// Which table.
    pub fn table(&self) -> TableId {
        self.table
    }

    /// The gradient that the next exchange sends.
    pub fn gradient_mut(&mut self) -> &mut [f32] {
        self.gradient.as_mut_slice()
    }

    /// Says what stands in the gradient's memory. It holds for the next exchange alone.
    pub fn contains(&mut self, content: Content) {
        self.content = content;
    }

    /// Says of which elements there is no gradient, in ascending ranges that have nothing in common: what no worker has a
    /// gradient of is not stepped. Where others have one, it is zero here, whatever stands in the gradient's memory. It holds
    /// for the next exchange alone.
    pub fn lacks(&mut self, ranges: Vec<Range<usize>>) -> Result<(), WorkerError> {
        self.missing = Missing::new(ranges, self.gradient().len()).map_err(WorkerError::Order)?;
        Ok(())
    }

    /// What an application left standing where there is no gradient is none: a codec would keep it.
    pub(super) fn clear_missing(&mut self) {
        if self.content == Content::Gradient {
            let missing = self.missing.clone();
            missing.ranges().iter().for_each(|range| self.gradient_mut()[range.clone()].fill(0.0));
        }
    }

    /// The same, to be read.
    pub fn gradient(&self) -> &[f32] {
        self.gradient.0.as_slice()
    }

    /// The parameters as the last exchange brought them.
    pub fn values(&self) -> &[f32] {
        self.values.0.as_slice()
    }

    /// The same, to be changed: the next exchange overwrites them.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.values.as_mut_slice()
    }
}
