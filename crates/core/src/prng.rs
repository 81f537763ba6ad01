//! A seeded generator of our own, so that a seed means the same run on every machine and in every release.

use serde::{Deserialize, Serialize};

/// xoshiro256++ seeded through splitmix64.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prng {
    state: [u64; 4],
}

impl Prng {
    /// A generator whose whole sequence follows from `seed`.
    pub fn new(seed: u64) -> Prng {
        let mut mix = seed;
        let mut next = || {
            mix = mix.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = mix;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        };
        Prng { state: [next(), next(), next(), next()] }
    }

    /// An independent generator for a part of the world: the same seed and label give the same stream, whatever
    /// other parts draw.
    pub fn fork(seed: u64, label: u64) -> Prng {
        Prng::new(seed ^ label.wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(32))
    }

    /// 64 uniform bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `[0, bound)`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// True with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.uniform() < p
    }

    /// Standard normal (Box-Muller, one value a call so that the stream stays simple to reason about).
    pub fn normal(&mut self) -> f64 {
        let u = 1.0 - self.uniform();
        let v = self.uniform();
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// Exponential with mean `mean`.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.uniform()).ln()
    }

    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// A number in `[0, 1)` that follows from a seed and a place alone, so that a vectorised loop can draw one for every
/// element. For rounding, not for worlds: 24 bits of it are random.
#[inline(always)]
pub fn uniform_at(seed: u32, place: u32) -> f32 {
    let mut bits = place.wrapping_mul(0x9E37_79B9) ^ seed;
    bits = (bits ^ (bits >> 16)).wrapping_mul(0x7FEB_352D);
    bits = (bits ^ (bits >> 15)).wrapping_mul(0x846C_A68B);
    bits ^= bits >> 16;
    // Through a signed integer, which every CPU level converts at once.
    (bits >> 8) as i32 as f32 * (1.0 / (1 << 24) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_means_the_same_stream_forever() {
        let mut prng = Prng::new(42);
        let first: Vec<u64> = (0..3).map(|_| prng.next_u64()).collect();
        assert_eq!(first, [15021278609987233951, 5881210131331364753, 18149643915985481100]);
    }

    /// Worlds of the simulator, and what codecs round to, are named by their seeds.
    #[test]
    fn what_is_drawn_from_a_stream_is_the_same_forever_too() {
        let mut prng = Prng::fork(42, 7);
        assert_eq!(prng.uniform(), 0.441_002_268_765_534_5);
        assert_eq!([0, 1, 1000].map(|bound| prng.below(bound)), [0, 0, 757]);
        assert_eq!([1.0, 0.0].map(|p| prng.chance(p)), [true, false]);
        let of_logarithms = [prng.normal(), prng.exponential(3.0)];
        assert!((of_logarithms[0] - (-1.53142982)).abs() < 1e-6, "{of_logarithms:?}");
        assert!((of_logarithms[1] - 0.99127998).abs() < 1e-6, "{of_logarithms:?}");
        let mut items = [0, 1, 2, 3, 4, 5];
        prng.shuffle(&mut items);
        assert_eq!(items, [5, 0, 4, 2, 1, 3]);
        let places = [(0, 1), (1, 0), (42, 1 << 20)].map(|(seed, place)| uniform_at(seed, place));
        assert_eq!(places, [0.007_765_114_3, 0.408_349_04, 0.479_699_08]);
    }

    /// As many in each part of the range, also for neighbours.
    #[test]
    fn numbers_of_places_are_uniform() {
        for seed in [0, 1, 0xFFFF_0000] {
            let mut counts = [0; 16];
            (0..16_000).for_each(|place| counts[(uniform_at(seed, place) * 16.0) as usize] += 1);
            assert!(counts.iter().all(|count| (850..1150).contains(count)), "{seed}: {counts:?}");
        }
    }

    #[test]
    fn uniform_and_normal_have_their_moments() {
        let mut prng = Prng::new(7);
        let n = 100_000;
        let mean = (0..n).map(|_| prng.uniform()).sum::<f64>() / f64::from(n);
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..n {
            let x = prng.normal();
            sum += x;
            squares += x * x;
        }
        assert!((sum / f64::from(n)).abs() < 0.02);
        assert!((squares / f64::from(n) - 1.0).abs() < 0.03);
        let mean = (0..n).map(|_| prng.exponential(3.0)).sum::<f64>() / f64::from(n);
        assert!((mean - 3.0).abs() < 0.05, "{mean}");
    }
}
