//! Elements for which there is no gradient.
//!
//! A parameter that took no part in a worker's computation has no gradient there, which is not the same as a gradient of
//! zeros: with a zero, weights still decay and momentum still moves them. Parameters are packed into tables, so absent
//! gradients are kept as ranges of a table. A server does not step elements that are absent from every gradient of a step.
//! If only some gradients lack an element, those count as zero there.

use crate::limits;
use crate::wire::{WireError, padded};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of one chunk that have no gradient, counted from the chunk's first element. They are ascending, not empty, and
/// do not touch each other, so that there is one way to write them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Absent {
    ranges: Vec<Range<u32>>,
}

impl Absent {
    /// Nothing is absent.
    pub const NOTHING: &'static Absent = &Absent { ranges: Vec::new() };

    /// The part of `ranges`, ascending and disjoint ranges of a table, that lies in one of the table's chunks.
    pub fn in_chunk(ranges: &[Range<usize>], chunk: Range<usize>) -> Absent {
        let mut absent = Absent::default();
        let first = ranges.partition_point(|range| range.end <= chunk.start);
        for range in ranges[first..].iter().take_while(|range| range.start < chunk.end) {
            let start = range.start.max(chunk.start) - chunk.start;
            let end = range.end.min(chunk.end) - chunk.start;
            absent.append(start as u32..end as u32);
        }
        absent
    }

    fn append(&mut self, range: Range<u32>) {
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.ranges.push(range),
        }
    }

    /// Whether every element has a gradient.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether a chunk of so many elements has no gradient at all.
    pub fn covers(&self, elements: usize) -> bool {
        self.ranges.first().is_some_and(|range| range.start == 0 && range.end as usize == elements)
    }

    /// Whether it is one of a chunk of so many elements: what another process kept may be anything.
    pub(crate) fn check(&self, elements: usize) -> Result<(), String> {
        let mut free_from = 0;
        for range in &self.ranges {
            if range.start < free_from || range.is_empty() || range.end as usize > elements {
                return Err(format!("elements {range:?} of {elements} are absent, or out of order"));
            }
            // Ranges that touch are one.
            free_from = range.end.saturating_add(1);
        }
        Ok(())
    }

    /// The ranges in order.
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.ranges
    }

    /// The elements that are absent from both, in at most [`limits::MAX_ABSENT_RANGES`] ranges: two lists of that length may
    /// have nearly twice as many ranges in common, and a frame holds one list. Ranges beyond the limit count as present,
    /// with zeros, which every receiver can take.
    pub fn intersection(&self, other: &Absent) -> Absent {
        let mut both = Absent::default();
        let (mut left, mut right) = (self.ranges.iter().peekable(), other.ranges.iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            let common = a.start.max(b.start)..a.end.min(b.end);
            let a_ends_first = a.end < b.end;
            if !common.is_empty() {
                if both.ranges.len() == limits::MAX_ABSENT_RANGES {
                    break;
                }
                both.append(common);
            }
            if a_ends_first {
                left.next()
            } else {
                right.next()
            };
        }
        both
    }

    /// Makes absent elements of a chunk zero.
    pub fn clear_in(&self, chunk: &mut [f32]) {
        for range in &self.ranges {
            chunk[range.start as usize..range.end as usize].fill(0.0);
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.ranges.capacity() * size_of::<Range<u32>>()
    }

    /// Appends the list with which a payload begins, padded so that the gradient behind it keeps a payload's alignment.
    pub fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&(self.ranges.len() as u32).to_le_bytes());
        for range in &self.ranges {
            out.extend_from_slice(&range.start.to_le_bytes());
            out.extend_from_slice(&(range.end - range.start).to_le_bytes());
        }
        out.resize(start + padded(out.len() - start), 0);
    }

    /// The payload of a push of a chunk of so many elements that lacks these ranges: the list, and then `gradient`, the
    /// payload of a push that lacks none. If the whole chunk is absent, the list is all.
    pub fn payload(&self, elements: usize, gradient: &[u8]) -> Vec<u8> {
        let gradient = if self.covers(elements) { &[] } else { gradient };
        let mut payload = Vec::with_capacity(padded(4 + 8 * self.ranges.len()) + gradient.len());
        self.write(&mut payload);
        payload.extend_from_slice(gradient);
        payload
    }

    /// Reads the list that a payload for a chunk of so many elements begins with. Returns it with the bytes behind it.
    pub fn read(payload: &[u8], elements: usize) -> Result<(Absent, &[u8]), WireError> {
        let refuse = |why: String| Err(WireError::Payload { what: "absent ranges", why });
        let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let Some((count, words)) =
            payload.split_first_chunk::<4>().map(|(count, words)| (word(count), words))
        else {
            return refuse(format!("{} bytes", payload.len()));
        };
        if !(1..=limits::MAX_ABSENT_RANGES).contains(&(count as usize)) {
            return refuse(format!("{count} of them"));
        }
        let bytes = 4 + 8 * count as usize;
        let Some((padding, rest)) = payload.get(bytes..).and_then(|rest| {
            let padding = padded(bytes) - bytes;
            rest.split_at_checked(padding)
        }) else {
            return refuse(format!("{count} of them in {} bytes", payload.len()));
        };
        let mut absent = Absent { ranges: Vec::with_capacity(count as usize) };
        let mut first_free = 0;
        for pair in words[..bytes - 4].as_chunks::<4>().0.as_chunks::<2>().0 {
            let (start, length) = (word(&pair[0]), word(&pair[1]));
            let end = start.checked_add(length).filter(|&end| end as usize <= elements);
            let Some(end) = end.filter(|_| start >= first_free && length > 0) else {
                return refuse(format!("{length} elements from {start} on, of {elements} or out of order"));
            };
            // Ranges that touch are written as one.
            first_free = end.saturating_add(1);
            absent.ranges.push(start..end);
        }
        if padding.iter().all(|&byte| byte == 0) {
            Ok((absent, rest))
        } else {
            refuse("padding that is not zero".into())
        }
    }
}

/// Absent ranges of sums of gradients, by chunk: a sum lacks the elements that every gradient in it lacks.
#[derive(Debug, Default)]
pub(crate) struct AbsentFromSums {
    /// Only chunks with absent elements.
    chunks: BTreeMap<usize, Absent>,
}

impl AbsentFromSums {
    /// Every chunk with absent elements.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = (usize, &Absent)> {
        self.chunks.iter().map(|(chunk, absent)| (*chunk, absent))
    }

    /// A gradient is added to a chunk's sum; with `is_first` it begins the sum.
    pub(crate) fn add(&mut self, chunk: usize, is_first: bool, absent: &Absent) {
        if absent.is_empty() {
            // In the ordinary case no chunk has absent elements.
            if !self.chunks.is_empty() {
                self.chunks.remove(&chunk);
            }
        } else if is_first {
            self.chunks.insert(chunk, absent.clone());
        } else if let Some(before) = self.chunks.remove(&chunk) {
            let both = before.intersection(absent);
            if !both.is_empty() {
                self.chunks.insert(chunk, both);
            }
        }
    }

    pub(crate) fn of(&self, chunk: usize) -> &Absent {
        self.chunks.get(&chunk).unwrap_or(Absent::NOTHING)
    }

    /// A chunk's sum is used up.
    pub(crate) fn take(&mut self, chunk: usize) -> Absent {
        self.chunks.remove(&chunk).unwrap_or_default()
    }

    pub(crate) fn clear(&mut self) {
        self.chunks.clear();
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.chunks.values().map(Absent::memory_bytes).sum()
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ELEMENTS: usize = 40;

    fn absent(flags: &[bool]) -> Absent {
        let mut absent = Absent::default();
        for (at, _) in (0u32..).zip(flags).filter(|(_, is_absent)| **is_absent) {
            absent.append(at..at + 1);
        }
        absent
    }

    fn flags(absent: &Absent) -> Vec<bool> {
        let is_absent = |at: u32| absent.ranges().iter().any(|range| range.contains(&at));
        (0..ELEMENTS as u32).map(is_absent).collect()
    }

    fn any_flags() -> impl Strategy<Value = Vec<bool>> {
        proptest::collection::vec(any::<bool>(), ELEMENTS)
    }

    proptest! {
        #[test]
        fn lists_are_read_as_they_were_written(flags in any_flags(), rest in any::<Vec<u8>>()) {
            let absent = absent(&flags);
            let mut payload = Vec::new();
            absent.write(&mut payload);
            prop_assert_eq!(payload.len() % 64, 0);
            payload.extend_from_slice(&rest);
            if absent.is_empty() { prop_assert!(Absent::read(&payload, ELEMENTS).is_err()) } else { prop_assert_eq!(Absent::read(&payload, ELEMENTS), Ok((absent, rest.as_slice()))) }
        }

        #[test]
        fn an_intersection_has_what_both_have(left in any_flags(), right in any_flags()) {
            let both: Vec<bool> = left.iter().zip(&right).map(|(&a, &b)| a && b).collect();
            prop_assert_eq!(absent(&left).intersection(&absent(&right)), absent(&both));
        }

        #[test]
        fn chunks_have_their_share_of_a_tables_ranges(of_table in any_flags(), cut in 0..ELEMENTS) {
            let table: Vec<Range<usize>> =
                absent(&of_table).ranges().iter().map(|range| range.start as usize..range.end as usize).collect();
            let halves = [0..cut, cut..ELEMENTS].map(|chunk| {
                let len = chunk.len();
                flags(&Absent::in_chunk(&table, chunk))[..len].to_vec()
            });
            prop_assert_eq!(halves.concat(), of_table);
        }
    }

    /// Two lists may have nearly as many ranges in common as both have together, and one list travels.
    #[test]
    fn an_intersection_is_no_longer_than_a_list_may_be() {
        let most = limits::MAX_ABSENT_RANGES as u32;
        // Every range of one begins in a range of the other, and ends in the next.
        let list = |offset: u32| Absent {
            ranges: (0..most).map(|at| offset + 6 * at..offset + 6 * at + 5).collect(),
        };
        let (one, other) = (list(0), list(3));
        let (both, elements) = (one.intersection(&other), 6 * most as usize + 8);
        let mut payload = Vec::new();
        both.write(&mut payload);
        assert_eq!(Absent::read(&payload, elements), Ok((both.clone(), &[][..])));
        let has = |absent: &Absent, part: &Range<u32>| {
            absent.ranges().iter().any(|range| range.start <= part.start && part.end <= range.end)
        };
        for range in [&both.ranges()[0], &both.ranges()[1], &both.ranges()[100]] {
            assert!(has(&one, range) && has(&other, range), "{range:?}");
        }
    }

    #[test]
    fn a_sum_lacks_what_every_gradient_in_it_lacks() {
        let list = |range: Range<usize>| Absent::in_chunk(&[range], 0..8);
        let mut sums = AbsentFromSums::default();
        sums.add(3, true, &list(0..4));
        sums.add(3, false, &list(2..6));
        sums.add(5, true, &list(1..2));
        sums.add(5, false, &list(6..8));
        sums.add(6, true, &list(1..2));
        sums.add(6, false, Absent::NOTHING);
        sums.add(6, false, &list(1..2));
        assert_eq!((sums.of(3), sums.of(5), sums.of(6)), (&list(2..4), Absent::NOTHING, Absent::NOTHING));
        assert_eq!(sums.memory_bytes(), list(2..4).memory_bytes());
        assert_eq!((sums.take(3), sums.take(3)), (list(2..4), Absent::default()), "its sum is used up");
        sums.add(1, true, &list(1..2));
        sums.clear();
        assert_eq!((sums.of(1), sums.memory_bytes()), (Absent::NOTHING, 0));
    }

    #[test]
    fn a_list_takes_eight_bytes_for_each_range() {
        let absent = Absent::in_chunk(&[0..1, 2..3, 4..5], 0..8);
        assert_eq!(absent.memory_bytes(), absent.ranges.capacity() * 8);
        assert!(absent.memory_bytes() >= 24);
    }

    #[test]
    fn ranges_of_a_table_that_touch_are_one_in_a_chunk() {
        assert_eq!(Absent::in_chunk(&[0..3, 3..8], 2..6).ranges(), [0..4]);
        assert!(Absent::in_chunk(&[0..3, 3..8], 2..6).covers(4));
    }

    #[test]
    fn lists_that_cannot_be_are_refused() {
        let list = |words: &[u32]| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.resize(padded(bytes.len()), 0);
            bytes
        };
        assert!(Absent::read(&list(&[2, 0, 4, 5, 1]), 8).is_ok());
        for (what, bytes) in [
            ("none", list(&[0])),
            ("an empty one", list(&[1, 3, 0])),
            ("overlapping", list(&[2, 0, 4, 3, 2])),
            ("touching", list(&[2, 0, 4, 4, 2])),
            ("descending", list(&[2, 5, 1, 0, 4])),
            ("beyond the end", list(&[1, 6, 3])),
            ("beyond all ends", list(&[1, u32::MAX, 2])),
            ("more than there are", list(&[9, 0, 1])),
            ("very many", list(&[u32::MAX, 0, 1])),
            ("cut short", list(&[1, 0, 1])[..40].to_vec()),
            ("padding", [list(&[1, 0, 1])[..60].to_vec(), vec![1; 4]].concat()),
            ("nothing at all", Vec::new()),
        ] {
            assert!(Absent::read(&bytes, 8).is_err(), "{what}");
        }
    }
}
