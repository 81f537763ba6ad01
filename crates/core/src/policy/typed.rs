//! Policies as typed values.

use crate::codec::Codec;
use crate::limits;
use crate::registry::Registry;
use crate::spec::SpecError;
use std::fmt;

/// Bytes of one parameter.
const ELEMENT_BYTES: u64 = 4;

/// How gradients of a round become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduce {
    /// Divided by the number of workers.
    #[default]
    Mean,
    /// Added up.
    Sum,
}

/// In which order gradients of a round are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// As they arrive: one accumulator, whatever the number of workers.
    #[default]
    Arrival,
    /// By worker rank: bit-reproducible, at the price of a buffer per worker.
    Ranked,
}

/// Treatment of a gradient with NaN or Inf in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NonFinite {
    /// The worker gets an error that names the table; nothing is changed.
    #[default]
    Reject,
    /// NaN becomes 0, an infinity the largest finite magnitude of the same chunk.
    Clip,
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Reduce::Mean { "mean" } else { "sum" })
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Order::Arrival { "arrival" } else { "ranked" })
    }
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == NonFinite::Reject { "reject" } else { "clip" })
    }
}

/// The codecs of a table.
#[derive(Debug)]
pub struct Codecs {
    /// Of gradients, on their way to the servers.
    pub push: Codec,
    /// Of parameters, on their way to the workers.
    pub answer: Codec,
}

/// The codecs that these texts name.
pub(super) fn codecs(registry: &Registry, push: &str, answer: &str) -> Result<Codecs, SpecError> {
    let push = Codec::for_pushes(&registry.codec, push)?;
    Ok(Codecs { push, answer: Codec::for_answers(&registry.codec, answer)? })
}

/// `32KB` is 8192 parameters.
pub(super) fn elements_in(text: &str) -> Result<usize, String> {
    let most = limits::MAX_DATA_ELEMENTS as u64 * ELEMENT_BYTES;
    let expected = || {
        let most = most >> 20;
        format!("`{text}`: expected 4B to {most}MB in steps of 4 bytes, such as 4KB, 32KB or 1MB")
    };
    let (digits, factor) = [("KB", 1 << 10), ("MB", 1 << 20), ("B", 1), ("", 1)]
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .ok_or_else(expected)?;
    let bytes = digits.trim().parse::<u64>().ok().and_then(|count| count.checked_mul(factor));
    match bytes.ok_or_else(expected)? {
        bytes if (ELEMENT_BYTES..=most).contains(&bytes) && bytes % ELEMENT_BYTES == 0 => {
            Ok((bytes / ELEMENT_BYTES) as usize)
        }
        _ => Err(expected()),
    }
}
