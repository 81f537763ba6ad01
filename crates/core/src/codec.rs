//! The codec axis: how gradients and parameters become fewer bytes.
//!
//! A codec is a chain of stages, `topk:0.01+f16+lz4`. A [`Filter`] says when the chain applies and prepares values, a
//! [`Sparsifier`] says which entries travel, a [`Quantiser`] in how many bits, a [`Container`] where they stand, and
//! [`Bytes`] squeezes what is left. Each kind stands in a chain at most once (filters as often as one likes), in this
//! order; [`Codec::parse`] refuses chains that make no sense and says why.
//!
//! A chain is encoded stretch by stretch: a chunk of a table is one, whatever its length. What has to be decided for a whole
//! layer (the threshold of its largest entries, its factors) is decided before, in a [`Plan`] that its chunks follow. What
//! the sender must remember (what it did not send, its momentum) lives in an [`Encoder`]. A [`Decoder`] remembers nothing.
//! It checks a payload whole before it changes anything, and takes no more memory than the stretch has.

mod bytes;
mod chain;
mod clip;
mod container;
mod content;
mod decoder;
mod delta;
mod dgc;
mod dvf;
mod encoder;
mod error;
mod factors;
mod feedback;
pub(crate) mod half;
mod int8;
mod layer;
mod levels;
mod lossless;
mod lz4;
mod mask;
mod matrix;
mod min_size;
mod onebit;
mod payload;
mod powersgd;
mod products;
mod qsgd;
mod randk;
mod scratch;
mod selection;
mod significance;
mod snappy;
mod terngrad;
mod threshold;
mod topk;
mod warmup;
mod written;
mod zstd;

pub use bytes::{Bytes, Packer};
pub use chain::{Codec, Kind};
pub use container::Container;
pub use content::{Content, Sparse};
pub use decoder::Decoder;
pub(crate) use delta::DeltaEncoder;
pub use encoder::{ChunkInput, Encoder, FactorFrames};
pub use error::CodecError;
pub use factors::Factors;
pub use layer::{LayerRange, Plan, TableGradient};
pub use mask::Mask;
pub use matrix::{LowRank, Matrix};
pub use payload::PREFIX_BYTES;
pub use products::{Products, Shape, Thin};
pub use selection::{Largest, Selection, Stretches};
pub use written::Written;

use crate::kernels;
use crate::prng::Prng;
use crate::registry::Axis;
use crate::spec::{Spec, SpecError};
use crate::wire::DType;
use std::fmt::Debug;

/// One stage of a chain, as the registry builds it.
#[derive(Debug)]
pub enum Stage {
    /// When the chain applies, and what is done to values first.
    Filter(Box<dyn Filter>),
    /// Which entries travel.
    Sparsifier(Box<dyn Sparsifier>),
    /// Two thin matrices travel instead of one.
    LowRank(Box<dyn LowRank>),
    /// In how many bits a value travels.
    Quantiser(Box<dyn Quantiser>),
    /// Where values stand.
    Container(Container),
    /// Bytes into fewer bytes; `None` leaves them as they are.
    Bytes(Option<Box<dyn Bytes>>),
}

impl Stage {
    /// The kind of the stage.
    pub fn kind(&self) -> Kind {
        match self {
            Stage::Filter(_) => Kind::Filter,
            Stage::Sparsifier(_) => Kind::Sparsifier,
            Stage::LowRank(_) => Kind::LowRank,
            Stage::Quantiser(_) => Kind::Quantiser,
            Stage::Container(_) => Kind::Container,
            Stage::Bytes(_) => Kind::Bytes,
        }
    }
}

/// Arguments of an encoder beside the values.
#[derive(Debug, Clone, Copy, Default)]
pub struct Context<'a> {
    /// How many times this table was sent before.
    pub step: u64,
    /// Seed of the random choices of this stretch at this step.
    pub seed: u64,
    /// Elements of the layer, or of the table's largest one where a stretch is of several.
    pub layer_elements: u64,
    /// The stretch's parameters as the sender knows them; empty when it knows none.
    pub parameters: &'a [f32],
    /// What was decided for the layers that the stretch is of; nothing when it is a layer by itself.
    pub plan: Option<&'a Plan>,
    /// A link that it travels over carries less than the codec needs ([`Sparsifier::needs_bandwidth`]).
    pub lacks_room: bool,
}

/// How far what is received may be from what was sent, for any values.
///
/// The L2 norm of the difference MUST NOT exceed `of_norm` times the values' norm plus `absolute` times the square root
/// of their number.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Bound {
    /// Fraction of the values' L2 norm.
    pub of_norm: f64,
    /// Of every element.
    pub absolute: f64,
}

impl Bound {
    /// No error: the receiver gets exactly the values that were sent.
    pub const EXACT: Bound = Bound { of_norm: 0.0, absolute: 0.0 };
}

/// Decides when a chain applies, or prepares values. No method is required.
pub trait Filter: Send + Sync + Debug {
    /// Whether the rest of the chain applies now. Where it does not, values travel as they are.
    fn applies(&self, _context: &Context<'_>) -> bool {
        true
    }

    /// Whether [`Filter::prepare`] changes anything.
    fn changes_values(&self) -> bool {
        false
    }

    /// Changes a gradient before anything else does. MUST leave finite values finite.
    fn prepare(&self, _values: &mut [f32]) {}

    /// Whether what a chain fails to send is to be added to the next values.
    fn wants_residual(&self) -> bool {
        false
    }

    /// Whether a chain with it must not lose anything.
    fn wants_lossless(&self) -> bool {
        false
    }
}

/// Decides which entries travel. Two methods are required.
///
/// `select` MUST depend on nothing but its arguments, and MUST select nothing that is zero unless its choice is random.
pub trait Sparsifier: Send + Sync + Debug {
    /// Marks the entries of `values` that travel. The mask is empty and of the values' length.
    fn select(&self, context: &Context<'_>, values: &[f32], mask: &mut Mask);

    /// How far the entries that travel are from all, among `count`.
    fn bound(&self, count: usize) -> Bound;

    /// How many of a layer's `count` entries travel at this step, where they are the largest ones: these are chosen for the
    /// whole layer before its chunks are encoded, and [`Sparsifier::select`] chooses only where there is no layer.
    fn largest(&self, _step: u64, _count: usize) -> Option<Largest> {
        None
    }

    /// Whether what does not travel is added to the next values.
    fn keeps_residual(&self) -> bool {
        true
    }

    /// The factor of entries that travel. Other than 1 only without residual.
    fn scale(&self, _count: usize) -> f32 {
        1.0
    }

    /// Whether the mean over its random choices is what was put in.
    fn is_unbiased(&self) -> bool {
        false
    }

    /// Whether it compares values with the sender's parameters ([`Context::parameters`]): it chooses nothing without.
    fn needs_parameters(&self) -> bool {
        false
    }

    /// The bytes per second that every link must carry for [`Context::lacks_room`] to be false, where that matters.
    fn needs_bandwidth(&self) -> Option<f64> {
        None
    }

    /// How much of a velocity is kept from step to step, when the sparsifier has momentum (DGC).
    fn momentum(&self) -> Option<f32> {
        None
    }
}

/// Decides in how many bits a value travels. Four methods are required.
///
/// `dequantise` MUST check every code and scale, and MUST give finite values or an error. What `quantise` wrote of
/// finite values MUST come back without error.
pub trait Quantiser: Send + Sync + Debug {
    /// Bytes of `count` values, exactly.
    fn bytes(&self, count: usize) -> usize;

    /// Appends [`Quantiser::bytes`] of `values`, which are finite.
    fn quantise(&self, context: &Context<'_>, values: &[f32], out: &mut Vec<u8>);

    /// The same for any values, in one pass over memory. False when some are not finite; what was appended is then of no
    /// use.
    fn quantise_finite(&self, context: &Context<'_>, values: &[f32], out: &mut Vec<u8>) -> bool {
        let finite = kernels::all_finite(values);
        if finite {
            self.quantise(context, values, out);
        }
        finite
    }

    /// Fills `values` from as many bytes as they take. The error completes "the payload has ...".
    fn dequantise(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), String>;

    /// The element type whose values the bytes are, where they are just that.
    fn element_type(&self) -> Option<DType> {
        None
    }

    /// Values beyond this are cut down to it.
    fn largest(&self) -> f32 {
        f32::MAX
    }

    /// How far `count` values are from those that were put in.
    fn bound(&self, count: usize) -> Bound;

    /// Whether the mean over its random choices is what was put in.
    fn is_unbiased(&self) -> bool {
        false
    }

    /// Whether what it rounds off belongs into a residual, where there is one. Errors of random choices do not: they
    /// may be larger than the values, and a residual of them would grow.
    fn feeds_back(&self) -> bool {
        true
    }

    /// The element type of values that travel as what they become, where they have changed in it: they take the place of what the
    /// receiver holds, and are not added.
    fn replaces(&self) -> Option<DType> {
        None
    }

    /// Whether it is only of use with a residual, which it then has.
    fn needs_residual(&self) -> bool {
        false
    }
}

/// The choices of this axis.
pub fn axis() -> Axis<Stage> {
    Axis::new(
        "codec",
        &[],
        vec![
            half::F16_ENTRY,
            half::BF16_ENTRY,
            int8::ENTRY,
            onebit::ENTRY,
            qsgd::ENTRY,
            terngrad::ENTRY,
            threshold::ENTRY,
            topk::ENTRY,
            randk::ENTRY,
            dvf::ENTRY,
            dgc::ENTRY,
            significance::ENTRY,
            powersgd::ENTRY,
            factors::ENTRY,
            container::DENSE_ENTRY,
            container::INDEX_ENTRY,
            container::BITMAP_ENTRY,
            container::HYBRID_ENTRY,
            container::AUTO_ENTRY,
            snappy::ENTRY,
            lz4::ENTRY,
            zstd::ENTRY,
            bytes::NONE_ENTRY,
            feedback::ENTRY,
            clip::ENTRY,
            min_size::ENTRY,
            warmup::ENTRY,
            lossless::ENTRY,
            delta::ENTRY,
        ],
    )
}

/// The seed of a stretch's random choices: it follows from the job's seed, the sender, the table, the step and the stretch.
pub fn stretch_seed(job: u64, sender: u32, table: u32, step: u64, chunk: u32) -> u64 {
    let who = u64::from(sender) << 32 | u64::from(table);
    Prng::fork(Prng::fork(job, who).next_u64() ^ step, u64::from(chunk)).next_u64()
}

/// Appends values as elements of a type, little-endian, rounded to the nearest. NaN and infinities stay so, and what is beyond the
/// largest number of the type becomes that one.
pub fn write_elements(dtype: DType, values: &[f32], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + dtype.bytes() * values.len(), 0);
    half::write_any(dtype, values, &mut out[start..]);
}

/// Whether a type has these values, to the bit but for NaN: nothing is lost by [`write_elements`].
pub fn fits(dtype: DType, values: &[f32]) -> bool {
    half::fits(dtype, values)
}

/// Whether a payload says that nothing of its stretch travels.
pub fn is_nothing(payload: &[u8]) -> bool {
    payload::Prefix::decode(payload).is_ok_and(|(prefix, _)| prefix.count == 0)
}

/// Whether a payload is a piece of a layer's factors, and so no chunk's.
pub fn is_factors(payload: &[u8]) -> bool {
    payload::Prefix::decode(payload).is_ok_and(|(prefix, _)| prefix.layout == payload::Layout::Factors)
}

/// The part of entries that travels: `0 < ratio <= 1`.
fn require_ratio(spec: &Spec, ratio: f64) -> Result<(), SpecError> {
    spec.require(ratio > 0.0 && ratio <= 1.0, || format!("ratio = {ratio}: expected 0 < ratio <= 1"))
}

fn require_positive(spec: &Spec, name: &str, value: f32) -> Result<(), SpecError> {
    spec.require(value > 0.0 && value.is_finite(), || {
        let finite = if value.is_infinite() { ", and finite" } else { "" };
        format!("{name} = {value}: expected {name} > 0{finite}")
    })
}

/// How many of `count` entries a ratio is: one at least, if there are any.
fn share(ratio: f64, count: usize) -> usize {
    ((ratio * count as f64).ceil() as usize).clamp(count.min(1), count)
}
