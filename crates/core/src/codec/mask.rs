//! Which entries of a stretch travel: a bit for each, and the loops that make and follow such bits.

use multiversion::multiversion;

const MAGNITUDE: u32 = 0x7fff_ffff;
const WORD_BITS: usize = 64;

/// A bit for every entry of a stretch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mask {
    words: Vec<u64>,
    len: usize,
}

impl Mask {
    /// Makes it `len` bits, none of them set.
    pub fn reset(&mut self, len: usize) {
        self.words.clear();
        self.words.resize(len.div_ceil(WORD_BITS), 0);
        self.len = len;
    }

    /// Number of bits.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bits at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bits that are set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Sets a bit.
    pub fn set(&mut self, at: usize) {
        assert!(at < self.len);
        self.words[at / WORD_BITS] |= 1 << (at % WORD_BITS);
    }

    /// Takes a bit back.
    pub fn unset(&mut self, at: usize) {
        assert!(at < self.len);
        self.words[at / WORD_BITS] &= !(1 << (at % WORD_BITS));
    }

    /// Whether a bit is set.
    pub fn has(&self, at: usize) -> bool {
        self.words[at / WORD_BITS] >> (at % WORD_BITS) & 1 == 1
    }

    /// Sets exactly the bits of the values whose magnitude is above `threshold`.
    pub fn select_above(&mut self, values: &[f32], threshold: f32) {
        self.reset(values.len());
        // As integers, magnitudes are ordered like the numbers they stand for.
        above(values, threshold.to_bits() & MAGNITUDE, &mut self.words);
    }

    /// Sets the bits of the values whose magnitude is above `threshold` too. The first of them belongs to the bit `first`.
    pub(super) fn mark_above(&mut self, first: usize, values: &[f32], threshold: f32) {
        assert!(first + values.len() <= self.len);
        if !values.is_empty() {
            let words = &mut self.words[first / WORD_BITS..];
            above_from(values, threshold.to_bits() & MAGNITUDE, first % WORD_BITS, words);
        }
    }

    /// Sets exactly the bits of the values whose magnitude is above `factor` times that of their reference.
    pub fn select_above_reference(&mut self, values: &[f32], references: &[f32], factor: f32) {
        self.reset(values.len());
        above_reference(values, references, factor, &mut self.words);
    }

    /// Sets exactly the bits of values that are not zero. A negative zero is not: it must come back as it is.
    pub fn select_nonzero(&mut self, values: &[f32]) {
        self.reset(values.len());
        nonzero(values, &mut self.words);
    }

    /// Calls `visit` with every set bit, ascending.
    #[inline(always)]
    pub fn for_each(&self, mut visit: impl FnMut(usize)) {
        for (at, &word) in self.words.iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                visit(at * WORD_BITS + rest.trailing_zeros() as usize);
                rest &= rest - 1;
            }
        }
    }

    /// Puts the values whose bits are set one after the other.
    pub(super) fn gather(&self, values: &[f32], gathered: &mut Vec<f32>) {
        assert_eq!(values.len(), self.len);
        gathered.clear();
        gathered.resize(self.count(), 0.0);
        gather(&self.words, values, gathered);
    }

    /// The same, and leaves zeros in their place.
    pub(super) fn take(&self, values: &mut [f32], taken: &mut Vec<f32>) {
        assert_eq!(values.len(), self.len);
        taken.clear();
        taken.resize(self.count(), 0.0);
        take(&self.words, values, taken);
    }

    /// The other way: puts each value where its bit is.
    pub(super) fn put(&self, values: &[f32], target: &mut [f32]) {
        assert_eq!(target.len(), self.len);
        scatter::<false>(&self.words, values, target);
    }

    /// The same, adding.
    pub(super) fn add(&self, values: &[f32], sum: &mut [f32]) {
        assert_eq!(sum.len(), self.len);
        scatter::<true>(&self.words, values, sum);
    }

    /// Zeroes the values whose bits are set.
    pub(super) fn clear(&self, values: &mut [f32]) {
        assert_eq!(values.len(), self.len);
        clear(&self.words, values);
    }

    /// Bytes that [`Mask::write`] appends for `len` bits.
    pub(super) fn bytes(len: usize) -> usize {
        len.div_ceil(8)
    }

    /// Appends the bits, eight to a byte, the first entry lowest.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let end = out.len() + Mask::bytes(self.len);
        for word in &self.words {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.truncate(end);
    }

    /// Reads what [`Mask::write`] wrote. False when the bits beyond the last entry are not zero.
    pub(super) fn read(&mut self, bytes: &[u8], len: usize) -> bool {
        assert_eq!(bytes.len(), Mask::bytes(len));
        self.reset(len);
        for (word, bytes) in self.words.iter_mut().zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(whole);
        }
        match len % WORD_BITS {
            0 => true,
            used => self.words.last().is_none_or(|word| word >> used == 0),
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn above(values: &[f32], limit: u32, words: &mut [u64]) {
    let limit = limit as i32;
    // Signed comparisons: every CPU level has them, and magnitudes have no sign.
    mark(values, words, |bits| (bits & MAGNITUDE) as i32 > limit);
}

/// The same for values of which the first one belongs to the bit `shift` of the first word. Other bits stay.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn above_from(values: &[f32], limit: u32, shift: usize, words: &mut [u64]) {
    let limit = limit as i32;
    let mut words = words.iter_mut();
    let mut word = words.next();
    let mut place = |bits: u64| {
        word.iter_mut().for_each(|word| **word |= bits << shift);
        word = words.next();
        // The bits that did not fit. There is no further word where none of them is set.
        if let Some(word) = word.as_mut().filter(|_| shift > 0) {
            **word |= bits >> (WORD_BITS - shift);
        }
    };
    let (blocks, rest) = values.as_chunks::<WORD_BITS>();
    for block in blocks {
        place(bits_of(&block.map(|value| u8::from((value.to_bits() & MAGNITUDE) as i32 > limit))));
    }
    if !rest.is_empty() {
        let mut flags = [0u8; WORD_BITS];
        for (flag, value) in flags.iter_mut().zip(rest) {
            *flag = u8::from((value.to_bits() & MAGNITUDE) as i32 > limit);
        }
        place(bits_of(&flags));
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn nonzero(values: &[f32], words: &mut [u64]) {
    mark(values, words, |bits| bits != 0);
}

/// Sets the bits of those values whose own bits fulfil a condition. Inlined, so that it is compiled for its caller's CPU.
#[inline(always)]
fn mark(values: &[f32], words: &mut [u64], is_set: impl Fn(u32) -> bool) {
    let (blocks, rest) = values.as_chunks::<WORD_BITS>();
    let mut words = words.iter_mut();
    for (word, block) in words.by_ref().take(blocks.len()).zip(blocks) {
        *word = bits_of(&block.map(|value| u8::from(is_set(value.to_bits()))));
    }
    if let Some(word) = words.next().filter(|_| !rest.is_empty()) {
        let mut flags = [0u8; WORD_BITS];
        for (flag, value) in flags.iter_mut().zip(rest) {
            *flag = u8::from(is_set(value.to_bits()));
        }
        *word = bits_of(&flags);
    }
}

/// The bits of bytes that are 0 or 1. A product moves eight of them next to each other, which vector units cannot: with
/// shifts alone a comparison is four times as slow.
#[inline(always)]
pub(super) fn bits_of(flags: &[u8; WORD_BITS]) -> u64 {
    let mut bits = 0;
    for (at, eight) in flags.as_chunks::<8>().0.iter().enumerate() {
        bits |= (u64::from_le_bytes(*eight).wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * at);
    }
    bits
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn above_reference(values: &[f32], references: &[f32], factor: f32, words: &mut [u64]) {
    assert_eq!(values.len(), references.len());
    let blocks = values.chunks(WORD_BITS).zip(references.chunks(WORD_BITS));
    for (word, (block, references)) in words.iter_mut().zip(blocks) {
        let mut flags = [0u8; WORD_BITS];
        for (flag, (value, reference)) in flags.iter_mut().zip(block.iter().zip(references)) {
            *flag = u8::from(value.abs() > factor * reference.abs());
        }
        *word = bits_of(&flags);
    }
}

fn gather(words: &[u64], values: &[f32], gathered: &mut [f32]) {
    let mut free = gathered;
    for (&word, block) in words.iter().zip(values.chunks(WORD_BITS)) {
        let (here, after) = free.split_at_mut(word.count_ones() as usize);
        free = after;
        let mut rest = word;
        for place in here {
            *place = block[rest.trailing_zeros() as usize];
            rest &= rest - 1;
        }
    }
}

fn take(words: &[u64], values: &mut [f32], taken: &mut [f32]) {
    let mut free = taken;
    for (&word, block) in words.iter().zip(values.chunks_mut(WORD_BITS)) {
        let (here, after) = free.split_at_mut(word.count_ones() as usize);
        free = after;
        let mut rest = word;
        for place in here {
            *place = std::mem::take(&mut block[rest.trailing_zeros() as usize]);
            rest &= rest - 1;
        }
    }
}

fn scatter<const ADD: bool>(words: &[u64], values: &[f32], target: &mut [f32]) {
    let mut left = values;
    for (&word, block) in words.iter().zip(target.chunks_mut(WORD_BITS)) {
        let (here, after) = left.split_at(word.count_ones() as usize);
        left = after;
        let mut rest = word;
        for &value in here {
            let place = &mut block[rest.trailing_zeros() as usize];
            *place = if ADD { *place + value } else { value };
            rest &= rest - 1;
        }
    }
}

fn clear(words: &[u64], values: &mut [f32]) {
    for (&word, block) in words.iter().zip(values.chunks_mut(WORD_BITS)) {
        let mut rest = word;
        while rest != 0 {
            block[rest.trailing_zeros() as usize] = 0.0;
            rest &= rest - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(prop_oneof![Just(0.0f32), Just(-0.0f32), -2.0f32..2.0], 0..300)
    }

    proptest! {
        #[test]
        fn selections_are_their_scalar_twins(values in values(), threshold in 0.0f32..1.0) {
            let mut mask = Mask::default();
            mask.select_above(&values, threshold);
            let twin: Vec<bool> = values.iter().map(|value| value.abs() > threshold).collect();
            prop_assert_eq!((0..values.len()).map(|at| mask.has(at)).collect::<Vec<_>>(), twin);
            mask.select_nonzero(&values);
            let twin: Vec<bool> = values.iter().map(|value| value.to_bits() != 0).collect();
            prop_assert_eq!((0..values.len()).map(|at| mask.has(at)).collect::<Vec<_>>(), twin);
            let (first, len) = (values.len() / 3, values.len() - values.len() / 3);
            mask.reset(values.len() + 1);
            mask.set(values.len());
            mask.mark_above(first, &values[..len], threshold);
            let twin: Vec<bool> = (0..=values.len())
                .map(|at| at == values.len() || at >= first && values[at - first].abs() > threshold)
                .collect();
            prop_assert_eq!((0..=values.len()).map(|at| mask.has(at)).collect::<Vec<_>>(), twin);
            let references: Vec<f32> = values.iter().rev().copied().collect();
            mask.select_above_reference(&values, &references, threshold);
            let twin: Vec<bool> =
                values.iter().zip(&references).map(|(value, other)| value.abs() > threshold * other.abs()).collect();
            prop_assert_eq!((0..values.len()).map(|at| mask.has(at)).collect::<Vec<_>>(), twin);
        }

        #[test]
        fn what_is_gathered_is_put_back(values in values(), threshold in 0.0f32..1.0) {
            let (mut mask, mut gathered) = (Mask::default(), Vec::new());
            mask.select_above(&values, threshold);
            mask.gather(&values, &mut gathered);
            let chosen: Vec<f32> = values.iter().copied().filter(|value| value.abs() > threshold).collect();
            prop_assert_eq!(&gathered, &chosen);
            let mut places = Vec::new();
            mask.for_each(|at| places.push(at));
            prop_assert_eq!(places.len(), mask.count());
            let mut back = vec![0.0; values.len()];
            mask.put(&gathered, &mut back);
            mask.add(&gathered, &mut back);
            let mut rest = values.clone();
            mask.clear(&mut rest);
            let (mut left, mut taken) = (values.clone(), Vec::new());
            mask.take(&mut left, &mut taken);
            prop_assert_eq!((&taken, &left), (&gathered, &rest));
            for at in 0..values.len() {
                prop_assert_eq!(back[at], if mask.has(at) { 2.0 * values[at] } else { 0.0 });
                prop_assert_eq!(rest[at], if mask.has(at) { 0.0 } else { values[at] });
            }
        }

        #[test]
        fn bits_come_back_and_stray_ones_are_seen(values in values()) {
            let mut mask = Mask::default();
            mask.select_nonzero(&values);
            let mut bytes = Vec::new();
            mask.write(&mut bytes);
            prop_assert_eq!(bytes.len(), Mask::bytes(values.len()));
            let mut read = Mask::default();
            prop_assert!(read.read(&bytes, values.len()));
            prop_assert_eq!(&read, &mask);
            if values.len() % 8 != 0 {
                *bytes.last_mut().unwrap() |= 0x80;
                prop_assert!(!read.read(&bytes, values.len()));
            }
        }
    }
}
