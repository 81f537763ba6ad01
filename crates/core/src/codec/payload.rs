//! The first bytes of a payload. `docs/codecs.md` has them byte by byte.

use super::CodecError;

/// Bytes before a payload's body.
pub const PREFIX_BYTES: usize = 8;

/// How a body is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Layout {
    /// Every value as f32, whatever the quantiser.
    Raw = 0,
    /// Every value, quantised.
    Dense = 1,
    /// A bit for every entry, then the values of those that are set.
    Bitmap = 2,
    /// 16-bit places, ascending, then the values that stand there.
    Index16 = 3,
    /// The same with 32-bit places, for stretches longer than 65,536.
    Index32 = 4,
    /// What the factors of this push do not cover; the rest is their product.
    LowRank = 5,
    /// A piece of a layer's factors. It is no chunk's.
    Factors = 6,
    /// The gaps before the places, as bytes, then the values that stand there.
    Gaps = 7,
}

/// A payload's prefix, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prefix {
    pub(super) layout: Layout,
    /// The body went through the chain's byte compressor.
    pub(super) packed: bool,
    /// Which codec made it ([`tag`]).
    pub(super) tag: u16,
    /// Values in the body.
    pub(super) count: u32,
}

impl Prefix {
    pub(super) fn encode(self) -> [u8; PREFIX_BYTES] {
        let (tag, count) = (self.tag.to_le_bytes(), self.count.to_le_bytes());
        [self.layout as u8, u8::from(self.packed), tag[0], tag[1], count[0], count[1], count[2], count[3]]
    }

    /// The prefix and the body.
    pub(super) fn decode(payload: &[u8]) -> Result<(Prefix, &[u8]), CodecError> {
        let refuse = |why: String| Err(CodecError::Payload(why));
        let Some((head, body)) = payload.split_first_chunk::<PREFIX_BYTES>() else {
            return refuse(format!("{} bytes, which is less than its prefix", payload.len()));
        };
        let layout = match head[0] {
            0 => Layout::Raw,
            1 => Layout::Dense,
            2 => Layout::Bitmap,
            3 => Layout::Index16,
            4 => Layout::Index32,
            5 => Layout::LowRank,
            6 => Layout::Factors,
            7 => Layout::Gaps,
            other => return refuse(format!("the undefined layout {other}")),
        };
        if head[1] > 1 {
            return refuse(format!("undefined flags {}", head[1]));
        }
        let tag = u16::from_le_bytes([head[2], head[3]]);
        let count = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        Ok((Prefix { layout, packed: head[1] == 1, tag, count }, body))
    }
}

/// Names a codec in two bytes: two different chains rarely have the same (FNV-1a, folded).
pub(super) fn tag(text: &str) -> u16 {
    let mut hash = 0x811c_9dc5u32;
    for byte in text.bytes() {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    (hash ^ (hash >> 16)) as u16
}

/// Appends values as they are.
pub(super) fn write_floats(values: &[f32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        return out.extend_from_slice(bytemuck::cast_slice(values));
    }
    for value in values {
        out.extend_from_slice(&value.to_le_bytes());
    }
}

/// Reads what [`write_floats`] wrote, at any address.
pub(super) fn read_floats(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

/// Reads one value.
pub(super) fn read_float(bytes: &[u8], at: usize) -> f32 {
    let mut value = [0.0];
    read_floats(&bytes[at..at + 4], &mut value);
    value[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends of a connection make it from the chain's text, perhaps in different versions.
    #[test]
    fn the_tag_of_a_chain_is_the_same_forever() {
        assert_eq!((tag("f16"), tag("topk:0.01+f16")), (0x11f8, 0x65bd));
    }

    #[test]
    fn a_prefix_is_read_as_it_was_written_and_one_that_cannot_be_is_refused() {
        use Layout::{Bitmap, Dense, Factors, Index16, Index32, LowRank, Raw};
        let layouts = [Raw, Dense, Bitmap, Index16, Index32, LowRank, Factors];
        for (number, layout) in layouts.into_iter().enumerate() {
            for packed in [false, true] {
                let prefix = Prefix { layout, packed, tag: 0x1234, count: 0x0506_0708 };
                let bytes = prefix.encode();
                assert_eq!(bytes, [number as u8, u8::from(packed), 0x34, 0x12, 8, 7, 6, 5]);
                let payload = [&bytes[..], &[9]].concat();
                assert_eq!(Prefix::decode(&payload), Ok((prefix, &[9][..])));
            }
        }
        assert!(Prefix::decode(&[0; 7]).is_err() && Prefix::decode(&[8, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(Prefix::decode(&[0, 2, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
