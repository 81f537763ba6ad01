//! A number that tells whether two nodes hold the same values.

/// The digest of some values, taken one chunk after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(u64);

/// Odd, so that multiplying loses nothing.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sums that do not wait for each other.
const LANES: usize = 8;

impl Digest {
    pub(crate) fn new() -> Digest {
        Digest(1)
    }

    /// The digest of a chunk by itself, by its bits: zeros of both signs are different values. Never 0.
    pub(crate) fn of_chunk(values: &[f32]) -> u64 {
        let mut lanes = [1u64; LANES];
        let mut pieces = values.chunks_exact(LANES);
        for piece in &mut pieces {
            for (lane, value) in lanes.iter_mut().zip(piece) {
                *lane = (*lane ^ u64::from(value.to_bits())).wrapping_mul(MULTIPLIER);
            }
        }
        for (lane, value) in lanes.iter_mut().zip(pieces.remainder()) {
            *lane = (*lane ^ u64::from(value.to_bits())).wrapping_mul(MULTIPLIER);
        }
        let fold = |digest: u64, lane: u64| (digest.rotate_left(23) ^ lane).wrapping_mul(MULTIPLIER);
        lanes.into_iter().fold(values.len() as u64, fold).max(1)
    }

    /// Takes the digest of the next chunk.
    pub(crate) fn take(&mut self, of_chunk: u64) {
        self.0 = (self.0.rotate_left(23) ^ of_chunk).wrapping_mul(MULTIPLIER);
    }

    /// Never 0, which stands for no digest.
    pub(crate) fn finish(self) -> u64 {
        (self.0 ^ self.0 >> 32).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(chunks: &[&[f32]]) -> u64 {
        let mut digest = Digest::new();
        chunks.iter().for_each(|chunk| digest.take(Digest::of_chunk(chunk)));
        digest.finish()
    }

    #[test]
    fn one_bit_anywhere_makes_another_digest() {
        let values: Vec<f32> = (0..37).map(|n| n as f32 * 0.5 - 3.0).collect();
        let same = digest(&[&values]);
        assert_eq!(same, digest(&[&values.clone()]));
        for place in 0..values.len() {
            for bit in [0, 12, 31] {
                let mut other = values.clone();
                other[place] = f32::from_bits(other[place].to_bits() ^ 1 << bit);
                assert_ne!(digest(&[&other]), same, "bit {bit} of element {place}");
            }
        }
    }

    #[test]
    fn the_order_of_values_and_of_chunks_counts() {
        assert_ne!(digest(&[&[1.0, 2.0]]), digest(&[&[2.0, 1.0]]));
        assert_ne!(digest(&[&[1.0], &[2.0]]), digest(&[&[2.0], &[1.0]]));
        assert_ne!(digest(&[&[0.0]]), digest(&[&[-0.0]]));
        assert_ne!(digest(&[]), 0);
    }
}
