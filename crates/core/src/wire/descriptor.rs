//! The descriptor that replaces, in the stream, a payload that lies in shared memory.

use super::{HEADER_BYTES, WireError};
use crate::store::Place;

/// The owner of a place's segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Owner {
    /// The sender of the descriptor: a gradient where its worker wrote it.
    Sender = 1,
    /// The receiver: parameters where the worker asked for them.
    Receiver = 2,
}

/// The place of a frame's payload. It follows a header with [`super::Flags::ELSEWHERE`] in the payload's stead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// First byte of the payload.
    pub place: Place,
    /// The owner of its segment.
    pub owner: Owner,
}

/// Length of a descriptor: headers and payloads in the stream stay aligned to a cache line.
pub const DESCRIPTOR_BYTES: usize = HEADER_BYTES;

impl Descriptor {
    /// The descriptor's 64 bytes.
    pub fn encode(&self) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[0..8].copy_from_slice(&self.place.to_bits().to_le_bytes());
        bytes[8] = self.owner as u8;
        bytes
    }

    /// Reads a descriptor. Every byte is checked; whether the place exists is checked by the owner of the memory.
    pub fn decode(bytes: &[u8; DESCRIPTOR_BYTES]) -> Result<Descriptor, WireError> {
        let (bits, rest) = bytes.split_first_chunk::<8>().expect("64 are more than 8");
        let bits = u64::from_le_bytes(*bits);
        let wrong = |field, value| WireError::Field { field, value };
        let place = Place::from_bits(bits).ok_or(wrong("place", bits))?;
        let owner = match rest[0] {
            1 => Owner::Sender,
            2 => Owner::Receiver,
            other => return Err(wrong("owner of a place", u64::from(other))),
        };
        if let Some(byte) = rest[1..].iter().find(|byte| **byte != 0) {
            return Err(wrong("byte at the end of a descriptor", u64::from(*byte)));
        }
        Ok(Descriptor { place, owner })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn encode_then_decode_is_identity(segment in 1u16.., offset in 0u64..1 << 48, is_mine in any::<bool>()) {
            let owner = if is_mine { Owner::Sender } else { Owner::Receiver };
            let descriptor = Descriptor { place: Place { segment, offset }, owner };
            prop_assert_eq!(Descriptor::decode(&descriptor.encode()), Ok(descriptor));
        }

        #[test]
        fn any_bytes_decode_or_fail_cleanly(head in any::<[u8; 12]>()) {
            let mut bytes = [0; DESCRIPTOR_BYTES];
            bytes[..12].copy_from_slice(&head);
            if let Ok(descriptor) = Descriptor::decode(&bytes) {
                prop_assert_eq!(descriptor.encode(), bytes);
            }
        }
    }

    #[test]
    fn each_wrong_field_is_named() {
        let good = Descriptor { place: Place { segment: 1, offset: 64 }, owner: Owner::Sender }.encode();
        for (at, value, word) in [(6, 0, "place"), (8, 0, "owner"), (8, 3, "owner"), (63, 1, "end")] {
            let mut bytes = good;
            bytes[at] = value;
            let error = Descriptor::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(word), "byte {at}: {error}");
        }
    }
}
