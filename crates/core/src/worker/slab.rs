//! Buffers of a table that the application and the data plane hand to each other, so that nothing is copied.
//!
//! A [`Slab`] belongs to the application or to the data plane, never to both: [`super::Worker::exchange`] takes it, and
//! [`super::Worker::redeem_slabs`] gives it back when gradient and answer are through.

use super::WorkerError;
use super::fetch::{FetchId, Retired};
use super::missing::Missing;
use crate::codec::half;
use crate::kernels::Values;
use crate::lease::Lease;
use crate::store::Buffer;
use crate::types::TableId;
use crate::wire::DType;
use std::ops::Range;

/// Contents of the memory of a slab's gradient.
///
/// All but the first are for tables whose codec the application follows by itself, chunk by chunk: on a GPU, say, so that
/// only what travels leaves the device. The application keeps the residual; the rest of the chain is the worker's. NaN and
/// Inf are refused, whatever the table's policy on them; in halves that are sent as they lie, servers find them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prepared {
    /// The gradient. The table's codec, if there is one, has everything to do.
    #[default]
    Gradient,
    /// The entries that are to travel, where they belong; zeros elsewhere.
    Chosen,
    /// Places of `count` entries as ascending 32-bit integers, and then their values.
    Places {
        /// How many.
        count: usize,
    },
    /// The whole gradient in the two bytes a value that the codec's quantiser makes.
    Halves,
}

/// A dense table's gradient and parameters in memory that frames are sent from, and that answers are received into.
///
/// Where memory is shared with the servers, neither a push nor a pull copies it.
#[derive(Debug)]
pub struct Slab {
    /// The number of the worker that lent it.
    lender: u64,
    table: TableId,
    gradient: Buffer,
    values: Buffer,
    /// The type of the elements in the memory of the parameters.
    values_type: DType,
    /// The application takes parameters as they come, also as halves.
    takes_halves: bool,
    prepared: Prepared,
    /// The codec that the application followed, where it said so.
    followed: Option<String>,
    missing: Missing,
    /// Memory that it had in exchanges which failed: the application may know its address.
    retired: Vec<Retired>,
}

/// A slab while an exchange has it.
#[derive(Debug)]
pub(super) struct SlabInFlight {
    pub(super) table: TableId,
    pub(super) gradient: GradientInFlight,
    pub(super) values: ValuesInFlight,
    /// The type of the parameters.
    pub(super) values_type: DType,
    pub(super) takes_halves: bool,
    pub(super) retired: Vec<Retired>,
}

/// A slab's gradient during an exchange.
#[derive(Debug)]
pub(super) enum GradientInFlight {
    /// Frames are sent from it.
    Sent(Lease),
    /// A codec has made frames of it.
    Kept(Buffer),
}

/// A slab's parameters during an exchange.
#[derive(Debug)]
pub(super) enum ValuesInFlight {
    /// The answer is received there.
    Awaited(FetchId),
    /// A copy that is fresh enough will do. Answers are received beside it.
    Cached(FetchId),
    /// No answer was asked for.
    Kept(Buffer),
}

impl Slab {
    pub(super) fn new(lender: u64, table: TableId, gradient: Buffer, values: Buffer) -> Slab {
        let (prepared, missing) = (Prepared::default(), Missing::default());
        let (values_type, takes_halves, followed, retired) = (DType::F32, false, None, Vec::new());
        Slab {
            lender,
            table,
            gradient,
            values,
            values_type,
            takes_halves,
            prepared,
            followed,
            missing,
            retired,
        }
    }

    /// Which table.
    pub fn table(&self) -> TableId {
        self.table
    }

    /// The gradient that the next exchange sends.
    pub fn gradient_mut(&mut self) -> &mut [f32] {
        self.gradient.as_mut_slice()
    }

    /// The same, to be read.
    pub fn gradient(&self) -> &[f32] {
        self.gradient.as_slice()
    }

    /// Says whether the application takes parameters as halves where they come so (the answer codecs `f16` and `bf16`), to
    /// widen them itself: they are then received where they stay, as [`Slab::values_type`] says. It holds until it is said
    /// otherwise.
    pub fn take_halves(&mut self, takes: bool) {
        self.takes_halves = takes;
    }

    /// The type of the parameters that the last exchange brought. Halves lie one after the other at the beginning of their
    /// memory.
    pub fn values_type(&self) -> DType {
        self.values_type
    }

    /// The parameters as elements of their type.
    pub fn value_bytes(&self) -> &[u8] {
        &self.values.as_bytes()[..self.values.len() * self.values_type.bytes()]
    }

    /// The parameters as the last exchange brought them; of no meaning if they are halves ([`Slab::values_type`]).
    pub fn values(&self) -> &[f32] {
        self.values.as_slice()
    }

    /// The same, to be changed: the next exchange overwrites them.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.values.as_mut_slice()
    }

    /// Says what stands in the gradient's memory. It holds for the next exchange alone.
    pub fn contains(&mut self, prepared: Prepared) {
        self.prepared = prepared;
        self.followed = None;
    }

    /// The same for what was prepared by this codec, which may have changed since: then it is sent as it is.
    pub fn contains_by(&mut self, prepared: Prepared, codec: String) {
        self.prepared = prepared;
        self.followed = Some(codec);
    }

    /// Says of which elements there is no gradient, in ascending ranges that have nothing in common: what no worker has a
    /// gradient of is not stepped. Where others have one, it is zero here, whatever stands in the gradient's memory. It holds
    /// for the next exchange alone.
    pub fn lacks(&mut self, ranges: Vec<Range<usize>>) -> Result<(), WorkerError> {
        self.missing = Missing::new(ranges, self.gradient().len()).map_err(WorkerError::Order)?;
        Ok(())
    }

    pub(super) fn prepared(&self) -> Prepared {
        self.prepared
    }

    pub(super) fn followed(&self) -> Option<&str> {
        self.followed.as_deref()
    }

    pub(super) fn missing(&self) -> &Missing {
        &self.missing
    }

    /// Sets elements without a gradient to zero. A codec would add to its residual what the application left there.
    pub(super) fn clear_missing(&mut self) {
        if self.prepared == Prepared::Gradient {
            for range in self.missing.ranges() {
                self.gradient.as_mut_slice()[range.clone()].fill(0.0);
            }
        }
    }

    /// A slab's table number means another table, or none, to another worker.
    pub(super) fn check_lender(&self, worker: u64) -> Result<(), WorkerError> {
        if self.lender == worker {
            return Ok(());
        }
        let table = self.table.0;
        Err(WorkerError::Order(format!(
            "the slab of table {table} was lent by another worker: exchange it with the job that lent it"
        )))
    }

    /// Its gradient, its parameters, and memory that it had before.
    pub(super) fn into_parts(self) -> (Buffer, Buffer, Vec<Retired>) {
        (self.gradient, self.values, self.retired)
    }

    pub(super) fn takes_halves(&self) -> bool {
        self.takes_halves
    }

    /// Makes the parameters elements of another type, so that some of them can be replaced by such.
    pub fn convert_values(&mut self, to: DType) {
        if to == self.values_type {
            return;
        }
        let values = self.values_type.values(self.value_bytes()).map_or_else(Vec::new, Values::to_vec);
        let bytes = &mut self.values.as_mut_bytes()[..to.bytes() * values.len()];
        half::write_any(to, &values, bytes);
        self.values_type = to;
    }

    /// The same slab with parameters of a type, for an application that takes halves or does not.
    pub(super) fn with_values_type(self, values_type: DType, takes_halves: bool) -> Slab {
        Slab { values_type, takes_halves, ..self }
    }

    /// Memory of an exchange that failed stays as long as the slab does.
    pub(super) fn with_retired(mut self, retired: Vec<Retired>) -> Slab {
        self.retired = retired;
        self
    }
}

impl SlabInFlight {
    /// Bytes of memory that is not lent.
    pub(super) fn memory_bytes(&self) -> usize {
        let gradient = match &self.gradient {
            GradientInFlight::Kept(buffer) => buffer.memory_bytes(),
            GradientInFlight::Sent(_) => 0,
        };
        let values = match &self.values {
            ValuesInFlight::Kept(buffer) => buffer.memory_bytes(),
            ValuesInFlight::Awaited(_) | ValuesInFlight::Cached(_) => 0,
        };
        gradient + values
    }

    /// Whether it need not wait for an answer once its values are fresh enough.
    pub(super) fn takes_copy(&self) -> bool {
        matches!(self.values, ValuesInFlight::Cached(_))
    }
}
