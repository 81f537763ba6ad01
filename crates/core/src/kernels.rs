//! Vectorised loops over slices, the only code that touches every element.
//!
//! Each is a plain `for` loop that `multiversion` compiles for several CPU levels and picks from at run time. A
//! product is never contracted into a sum (`mul_add` is not used), and a reduction has a fixed order, so a kernel
//! gives the same bits on every level; tests compare each with a scalar twin. Two slices of different length are
//! a bug of the caller and panic.
//!
//! A loop that reads a gradient is generic over [`Source`]: one text for every element type, and for a sum that is not
//! stored. Its scalar twin is the same loop over the stored sum of the converted values.
//!
//! An optimizer's step kernel lives in its own file under [`crate::optimizer`], so that adding a rule touches
//! nothing here.

mod accumulate;
mod finite;
mod norm;
mod values;

pub use accumulate::{add, add_scaled, add_values, copy, fill, scale};
pub use finite::{all_finite, clip_non_finite};
pub use norm::{squared_norm, squared_norm_of_sum};
pub use values::{Bf16, Element, F16, Source, Sum, Values};

#[cfg(test)]
pub(crate) mod samples {
    //! What the kernels' tests draw from.

    use proptest::prelude::*;

    /// Every kind of number: normal and subnormal, both zeros, infinities and NaN.
    pub(crate) fn any_value() -> impl Strategy<Value = f32> {
        prop_oneof![20 => any::<f32>(), 1 => prop::num::f32::ANY]
    }

    /// A slice of them.
    pub(crate) fn any_values() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(any_value(), 0..300)
    }

    /// Two slices of one length.
    pub(crate) fn any_pair() -> impl Strategy<Value = (Vec<f32>, Vec<f32>)> {
        prop::collection::vec((any_value(), any_value()), 0..300).prop_map(|pairs| pairs.into_iter().unzip())
    }

    /// Any bits of a 16-bit number.
    pub(crate) fn any_halves() -> impl Strategy<Value = Vec<u16>> {
        prop::collection::vec(any::<u16>(), 0..300)
    }

    /// Bits, so that equality also tells the zeros and NaN apart. Which NaN it is may differ between CPU levels:
    /// operands of an addition may be swapped, and a NaN's payload comes from the first.
    pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }).collect()
    }
}
