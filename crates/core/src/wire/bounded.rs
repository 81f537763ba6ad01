//! Sequences from a peer, cut off at their limit before memory is taken for what is beyond it.

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Memory taken on the word of a length alone.
const TRUSTED_BYTES: usize = 64 << 10;

/// Reads at most `MAX` items. An item of a few bytes on the wire may take hundreds in memory, so that the length of
/// the message alone would not bound what it makes its receiver take.
pub(crate) fn sequence<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_seq(Bounded::<T, MAX>(PhantomData))
}

struct Bounded<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Bounded<T, MAX> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MAX} items")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let announced = items.size_hint().unwrap_or(0);
        if announced > MAX {
            return Err(A::Error::invalid_length(announced, &self));
        }
        let mut taken = Vec::with_capacity(announced.min(TRUSTED_BYTES / size_of::<T>().max(1)));
        while let Some(item) = items.next_element()? {
            if taken.len() == MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            taken.push(item);
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Three {
        #[serde(deserialize_with = "sequence::<_, _, 3>")]
        items: Vec<u64>,
    }

    #[test]
    fn as_many_as_allowed_and_not_one_more() {
        let read = |items: Vec<u64>| {
            let bytes = postcard::to_allocvec(&Three { items }).unwrap();
            postcard::from_bytes::<Three>(&bytes).map(|three| three.items.len())
        };
        assert_eq!([read(vec![]), read(vec![7; 3])], [Ok(0), Ok(3)]);
        assert!(read(vec![7; 4]).is_err());
        // A length that nothing follows.
        assert!(postcard::from_bytes::<Three>(&[3]).is_err());
        assert!(postcard::from_bytes::<Three>(&[255, 255, 255, 255, 255, 255, 255, 255, 255, 1]).is_err());
    }
}
