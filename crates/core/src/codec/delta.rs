//! Lossless deltas of published weights: what changed between two versions, as the receiver holds them.
//!
//! Versions are compared in the receiver's own element type, in which many small updates change nothing. Changed entries
//! travel as what they become, not as differences, so that nothing depends on how numbers are added. Every version has a
//! digest; a delta names those of its parent and its child, and is refused by whoever does not hold the parent.
//!
//! ```text
//! 0   4   magic, "PMDL"
//! 4   1   element type, as in a frame's header
//! 5   3   zero
//! 8   8   elements
//! 16  16  digest of the parent
//! 32  16  digest of the child
//! 48      for every 65,536 elements: how many changed (4 bytes), where (a bitmap, or 16-bit places where that is
//!         shorter), and their new values
//! ```

use super::container::{self, Container};
use super::half::{write_bf16, write_f16};
use super::mask::Mask;
use super::payload::{Layout, write_floats};
use crate::wire::DType;
use std::fmt;

const MAGIC: [u8; 4] = *b"PMDL";
const DELTA_PREFIX_BYTES: usize = 48;
const BLOCK_ELEMENTS: usize = 1 << 16;

/// Tells versions apart: a hash of the element type and every byte.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Digest(pub u128);

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// One version of a table's weights, in the receiver's element type.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    dtype: DType,
    bytes: Vec<u8>,
}

/// Why a delta was not applied. The weights are as they were.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// The bytes are not a delta, or are damaged.
    #[error("this is no delta: it has {0}")]
    Format(String),
    /// It is for other weights altogether.
    #[error("the delta is for {theirs}, here are {ours}; fetch the whole version")]
    Shape {
        /// Element type and number in the delta.
        theirs: String,
        /// Those that are held.
        ours: String,
    },
    /// It follows another version.
    #[error(
        "the delta follows version {parent:?}, here is {held:?}; apply those between, or fetch the whole version"
    )]
    Parent {
        /// The version that it follows.
        parent: Digest,
        /// The version that is held.
        held: Digest,
    },
    /// It does not lead where it says.
    #[error(
        "the delta leads to version {found:?} and not, as it says, to {child:?}; fetch the whole version"
    )]
    Child {
        /// The version that it names.
        child: Digest,
        /// The digest of the result.
        found: Digest,
    },
}

impl Weights {
    /// A version as its receiver holds it: rounded to the receiver's type.
    pub fn new(values: &[f32], dtype: DType) -> Weights {
        let mut bytes = Vec::with_capacity(values.len() * dtype.bytes());
        match dtype {
            DType::F32 => write_floats(values, &mut bytes),
            DType::F16 => {
                bytes.resize(values.len() * 2, 0);
                write_f16(values, &mut bytes);
            }
            DType::Bf16 => {
                bytes.resize(values.len() * 2, 0);
                write_bf16(values, &mut bytes);
            }
        }
        Weights { dtype, bytes }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements as bytes, little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Tells this version from others.
    pub fn digest(&self) -> Digest {
        let mut hash = xxhash_rust::xxh3::Xxh3::with_seed(self.dtype as u64);
        hash.update(&self.bytes);
        Digest(hash.digest128())
    }

    /// The delta from this version to `child`, which has the same type and length.
    pub fn delta_to(&self, child: &Weights) -> Vec<u8> {
        assert!(self.dtype == child.dtype && self.len() == child.len(), "versions of one table are alike");
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[self.dtype as u8, 0, 0, 0]);
        out.extend_from_slice(&(self.len() as u64).to_le_bytes());
        out.extend_from_slice(&self.digest().0.to_le_bytes());
        out.extend_from_slice(&child.digest().0.to_le_bytes());
        let (width, mut changed) = (self.dtype.bytes(), Mask::default());
        for (old, new) in
            self.bytes.chunks(BLOCK_ELEMENTS * width).zip(child.bytes.chunks(BLOCK_ELEMENTS * width))
        {
            let entries = new.len() / width;
            changed.reset(entries);
            let pairs = old.chunks_exact(width).zip(new.chunks_exact(width)).enumerate();
            pairs.filter(|(_, (old, new))| old != new).for_each(|(at, _)| changed.set(at));
            let count = changed.count();
            out.extend_from_slice(&(count as u32).to_le_bytes());
            container::write_places(layout(entries, count), &changed, &mut out);
            changed.for_each(|at| out.extend_from_slice(&new[at * width..(at + 1) * width]));
        }
        out
    }

    /// Follows a delta to the version that it leads to.
    pub fn apply(&mut self, delta: &[u8]) -> Result<Digest, DeltaError> {
        let format = |why: &str| DeltaError::Format(why.to_owned());
        let (header, mut body) =
            delta.split_first_chunk::<DELTA_PREFIX_BYTES>().ok_or_else(|| format("less than a header"))?;
        if header[0..4] != MAGIC || header[5..8] != [0; 3] {
            return Err(format("another magic"));
        }
        let elements = u64::from_le_bytes(field(header, 8));
        if header[4] != self.dtype as u8 || elements != self.len() as u64 {
            return Err(DeltaError::Shape {
                theirs: format!("{elements} elements of type {}", header[4]),
                ours: format!("{} elements of type {}", self.len(), self.dtype as u8),
            });
        }
        let (parent, child) =
            (Digest(u128::from_le_bytes(field(header, 16))), Digest(u128::from_le_bytes(field(header, 32))));
        let held = self.digest();
        if parent != held {
            return Err(DeltaError::Parent { parent, held });
        }
        let (width, mut changed) = (self.dtype.bytes(), Mask::default());
        let mut next = Weights { dtype: self.dtype, bytes: self.bytes.clone() };
        for block in next.bytes.chunks_mut(BLOCK_ELEMENTS * width) {
            let entries = block.len() / width;
            let mut take = |bytes: usize| {
                let (head, rest) =
                    body.split_at_checked(bytes).ok_or_else(|| format("less than it announces"))?;
                body = rest;
                Ok(head)
            };
            let count = u32::from_le_bytes(field(take(4)?, 0)) as usize;
            if count > entries {
                return Err(format("more changes than elements"));
            }
            let layout = layout(entries, count);
            let places = take(Container::place_bytes(layout, entries, count))?;
            container::read_places(layout, places, entries, count, &mut changed)
                .map_err(DeltaError::Format)?;
            let mut values = take(count * width)?.chunks_exact(width);
            changed.for_each(|at| {
                if let Some(value) = values.next() {
                    block[at * width..(at + 1) * width].copy_from_slice(value);
                }
            });
        }
        if !body.is_empty() {
            return Err(format("more than it announces"));
        }
        let found = next.digest();
        if found != child {
            return Err(DeltaError::Child { child, found });
        }
        *self = next;
        Ok(child)
    }
}

/// The shorter way to say where `count` of `entries` stand.
fn layout(entries: usize, count: usize) -> Layout {
    if 2 * count < Mask::bytes(entries) { Layout::Index16 } else { Layout::Bitmap }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;
    use proptest::prelude::*;

    fn version(prng: &mut Prng, before: &[f32], changes: f64, size: f64) -> Vec<f32> {
        let change =
            |&value: &f32| if prng.chance(changes) { value + (prng.normal() * size) as f32 } else { value };
        before.iter().map(change).collect()
    }

    proptest! {
        #[test]
        fn every_version_is_reached_from_the_one_before(
            seed: u64,
            len in prop_oneof![0usize..200, Just(65536usize), 65537usize..140000],
            changes in prop_oneof![Just(0.0), 0.0f64..0.1, 0.5f64..1.0],
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
        ) {
            let mut prng = Prng::new(seed);
            let mut values: Vec<f32> = (0..len).map(|_| prng.normal() as f32).collect();
            let mut held = Weights::new(&values, dtype);
            for _ in 0..3 {
                values = version(&mut prng, &values, changes, 1e-2);
                let published = Weights::new(&values, dtype);
                let digest = held.apply(&held.clone().delta_to(&published)).unwrap();
                prop_assert_eq!(&held, &published);
                prop_assert_eq!(digest, published.digest());
            }
        }
    }

    #[test]
    fn small_updates_change_little_of_what_a_bf16_receiver_holds() {
        let mut prng = Prng::new(1);
        let values: Vec<f32> = (0..100_000).map(|_| prng.normal() as f32).collect();
        let next = version(&mut prng, &values, 1.0, 1e-5);
        let bytes = |dtype| Weights::new(&values, dtype).delta_to(&Weights::new(&next, dtype)).len();
        // In f32 nearly every entry changes.
        assert!(bytes(DType::F32) > 350_000, "{}", bytes(DType::F32));
        assert!(bytes(DType::Bf16) < 20_000, "{}", bytes(DType::Bf16));
    }

    #[test]
    fn a_delta_of_another_parent_is_refused_and_nothing_changes() {
        let versions: Vec<Weights> =
            (0..3).map(|version| Weights::new(&[1.0, version as f32, 3.0], DType::F32)).collect();
        let delta = versions[1].delta_to(&versions[2]);
        let mut held = versions[0].clone();
        let error = held.apply(&delta).unwrap_err();
        assert_eq!(error, DeltaError::Parent { parent: versions[1].digest(), held: versions[0].digest() });
        assert_eq!(held, versions[0]);
        let mut other = Weights::new(&[1.0, 1.0, 3.0], DType::F16);
        assert!(other.apply(&delta).unwrap_err().to_string().contains("fetch the whole version"));
    }

    #[test]
    fn a_damaged_delta_is_refused_and_nothing_changes() {
        let mut prng = Prng::new(9);
        let values: Vec<f32> = (0..500).map(|_| prng.normal() as f32).collect();
        let parent = Weights::new(&values, DType::F32);
        let child = Weights::new(&version(&mut prng, &values, 0.3, 1.0), DType::F32);
        let good = parent.delta_to(&child);
        for _ in 0..20_000 {
            let mut delta = good.clone();
            let at = prng.below(delta.len() as u64) as usize;
            match prng.below(3) {
                0 => delta.truncate(at),
                1 => delta.push(0),
                _ => delta[at] ^= 1 << prng.below(8),
            }
            let mut held = parent.clone();
            held.apply(&delta).unwrap_err();
            assert_eq!(held, parent);
        }
    }

    #[test]
    fn weights_have_as_many_elements_as_values_whatever_their_type() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let weights = Weights::new(&[1.0; 6], dtype);
            assert_eq!((weights.len(), weights.is_empty(), weights.dtype()), (6, false, dtype));
            assert_eq!(weights.bytes().len(), 6 * dtype.bytes());
        }
        assert!(Weights::new(&[], DType::F16).is_empty());
    }
}
