//! Parameters and gradients in an image: their bytes as they lie in memory, since text or numbers of variable length would take
//! many times as long.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::ops::Deref;

/// An array of an image.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(in crate::server) struct Floats(
    #[serde(serialize_with = "serialize", deserialize_with = "deserialize")] Vec<f32>,
);

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl From<Vec<f32>> for Floats {
    fn from(values: Vec<f32>) -> Floats {
        Floats(values)
    }
}

impl From<&[f32]> for Floats {
    fn from(values: &[f32]) -> Floats {
        Floats(values.to_vec())
    }
}

pub(in crate::server) fn serialize<S: Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytemuck::cast_slice(values))
}

/// The memory that is taken is as long as the bytes that are there.
pub(in crate::server) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<f32>, D::Error> {
    deserializer.deserialize_bytes(Bytes)
}

struct Bytes;

impl Visitor<'_> for Bytes {
    type Value = Vec<f32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes of whole numbers of four bytes each")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<f32>, E> {
        let (words, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(E::invalid_length(bytes.len(), &self));
        }
        Ok(words.iter().map(|word| f32::from_ne_bytes(*word)).collect())
    }
}
