//! A buffer that several threads fill at once, each its own part of it.
//!
//! A worker's shards answer a pull at the same time, on connections that different threads of a driver read. Every shard has its
//! own chunks of the table, and all of them lie in one buffer. A [`Divided`] buffer lends each part once at a time, as a
//! [`Region`] that is written without the lock of its owner.
//!
//! # Why this file has unsafe code, and what makes it right
//!
//! Safe Rust has no way to write to one allocation from several threads, unless each has a slice that was split off for it, and
//! such slices borrow the owner. Here a region holds the memory by a reference count, and makes slices from a pointer. Four
//! things have to hold.
//!
//! - *The memory is there.* A region has a clone of the `Arc` that owns the buffer, and the buffer leaves it only when there is no
//!   other clone.
//! - *Slices of two regions have no byte in common.* A [`Partition`] is checked when it is made: its ranges lie within the
//!   buffer's length, and none overlaps another. There is one region of a part at a time, because its flag is taken with an atomic
//!   swap, and every slice is checked to lie in one range of its part.
//! - *Slices of one region have none in common either.* They borrow the region alone, or are asked for in ascending order and
//!   checked to be.
//! - *Nobody else has a reference into the buffer.* It is in a private field that nothing looks at between [`Divided::new`] and
//!   [`Divided::reclaim`]. The pointer is taken once, after the buffer has come to its place.
//!
//! What a region wrote is seen by the next region of its part (the flag is given back with release and taken with acquire), and by
//! whoever reclaims the buffer (as the clone of an `Arc` is dropped).

#![allow(unsafe_code, reason = "disjoint parts of one buffer are written by several threads")]

use crate::store::Buffer;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A division of a buffer into parts, each of which is some ranges of bytes. No byte is in two of them.
#[derive(Debug)]
pub struct Partition {
    bytes: usize,
    /// The ranges of each part, ascending. Neighbours are one range.
    parts: Vec<Vec<Range<usize>>>,
}

/// A buffer whose parts are lent for writing.
#[derive(Debug)]
pub struct Divided(Arc<Whole>);

/// A part of a buffer that its holder alone reads and writes.
#[derive(Debug)]
pub struct Region {
    whole: Arc<Whole>,
    part: usize,
}

struct Whole {
    /// Not looked at as long as it is divided.
    buffer: Buffer,
    /// Its first byte.
    base: NonNull<u8>,
    partition: Arc<Partition>,
    /// For each part whether there is a region of it.
    lent: Box<[AtomicBool]>,
}

// SAFETY: the pointer is to memory that the buffer owns, and a buffer may go to another thread.
unsafe impl Send for Whole {}
// SAFETY: through a shared reference only regions reach the memory, and the head of this file says why no two of them reach the
// same byte.
unsafe impl Sync for Whole {}

impl fmt::Debug for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the contents: others may be writing them.
        f.debug_struct("Whole").field("bytes", &self.partition.bytes).field("lent", &self.lent).finish()
    }
}

impl Partition {
    /// Parts of so many bytes, each with its ranges in any order.
    ///
    /// # Panics
    ///
    /// When two ranges have a byte in common, or one is not within the bytes.
    pub fn new(bytes: usize, parts: impl IntoIterator<Item = Vec<Range<usize>>>) -> Partition {
        let parts: Vec<Vec<Range<usize>>> = parts.into_iter().map(joined).collect();
        let mut all: Vec<&Range<usize>> = parts.iter().flatten().collect();
        all.sort_unstable_by_key(|range| range.start);
        let overlaps = all.windows(2).any(|pair| pair[0].end > pair[1].start);
        assert!(!overlaps, "no byte is in two parts");
        assert!(all.last().is_none_or(|last| last.end <= bytes), "parts lie within what they are parts of");
        Partition { bytes, parts }
    }

    /// The ranges of a part.
    pub fn ranges(&self, part: usize) -> &[Range<usize>] {
        &self.parts[part]
    }

    /// Whether all bytes of a range are in the same range of a part.
    fn has(&self, part: usize, range: &Range<usize>) -> bool {
        let ranges = &self.parts[part];
        let after = ranges.partition_point(|own| own.start <= range.start);
        range.start <= range.end && ranges[..after].last().is_some_and(|own| range.end <= own.end)
    }
}

/// Ranges in ascending order, without empty ones, neighbours as one.
fn joined(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.retain(|range| range.start < range.end);
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, before| {
        let follows = before.end == next.start;
        if follows {
            before.end = next.end;
        }
        follows
    });
    ranges
}

impl Divided {
    /// Divides a buffer.
    ///
    /// # Panics
    ///
    /// When the partition is of another length.
    pub fn new(buffer: Buffer, partition: Arc<Partition>) -> Divided {
        assert_eq!(buffer.len() * 4, partition.bytes, "a partition is of the buffer's length");
        let lent = partition.parts.iter().map(|_| AtomicBool::new(false)).collect();
        let mut whole = Arc::new(Whole { buffer, base: NonNull::dangling(), partition, lent });
        let own = Arc::get_mut(&mut whole).expect("nobody else has it yet");
        own.base = NonNull::from(own.buffer.as_mut_bytes()).cast();
        Divided(whole)
    }

    /// Lends a part; `None` while somebody has it.
    pub fn lend(&self, part: usize) -> Option<Region> {
        let is_lent = self.0.lent[part].swap(true, Ordering::Acquire);
        (!is_lent).then(|| Region { whole: Arc::clone(&self.0), part })
    }

    /// Whether some part is lent.
    pub fn is_lent(&self) -> bool {
        self.0.lent.iter().any(|lent| lent.load(Ordering::Acquire))
    }

    /// The buffer, if no part is lent.
    pub fn reclaim(self) -> Result<Buffer, Divided> {
        Arc::try_unwrap(self.0).map(|whole| whole.buffer).map_err(Divided)
    }

    /// Its division.
    pub fn partition(&self) -> &Partition {
        &self.0.partition
    }

    /// Bytes of memory taken.
    pub fn memory_bytes(&self) -> usize {
        // The length of the buffer is not in the memory that others write.
        self.0.buffer.memory_bytes()
    }
}

impl Region {
    /// The ranges of bytes that it has, ascending.
    pub fn ranges(&self) -> &[Range<usize>] {
        self.whole.partition.ranges(self.part)
    }

    /// Bytes of it.
    ///
    /// # Panics
    ///
    /// When they are not in one of its ranges.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        let start = self.start(&range);
        // SAFETY: `start` has checked that the bytes are this region's; they are initialised, since a buffer is zero at first. The
        // region is borrowed, so that nobody gets a mutable slice of it.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    /// Bytes of it, to be written.
    ///
    /// # Panics
    ///
    /// When they are not in one of its ranges.
    pub fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let start = self.start(&range);
        // SAFETY: as above, and the region is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }

    /// Several stretches of it at once, to be written.
    ///
    /// # Panics
    ///
    /// When they do not ascend, overlap, or are not in its ranges.
    pub fn stretches_mut<'a>(
        &'a mut self,
        ranges: impl Iterator<Item = Range<usize>> + 'a,
    ) -> impl Iterator<Item = &'a mut [u8]> + 'a {
        let mut end = 0;
        ranges.map(move |range| {
            assert!(end <= range.start, "stretches ascend, and have nothing in common");
            let start = self.start(&range);
            end = range.end;
            // SAFETY: as above. The region stays borrowed for as long as any of the slices lives, and each begins behind the end of
            // the one before it.
            unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
        })
    }

    /// Whether a payload lies at this place of it already: a peer that shares the memory has put it there.
    pub fn holds(&self, range: Range<usize>, payload: &[u8]) -> bool {
        self.whole.partition.has(self.part, &range)
            && payload.len() == range.len()
            && std::ptr::eq(self.start(&range), payload.as_ptr())
    }

    /// The address of some bytes.
    fn start(&self, range: &Range<usize>) -> *mut u8 {
        let Whole { base, partition, .. } = &*self.whole;
        assert!(partition.has(self.part, range), "bytes {range:?} belong to others");
        // SAFETY: the partition is of the buffer's length, so the range lies within the buffer.
        unsafe { base.as_ptr().add(range.start) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.whole.lent[self.part].store(false, Ordering::Release);
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a part may have one range")]
mod tests {
    use super::*;

    /// Sixteen elements: part 0 has the ends, part 1 the middle, part 2 nothing.
    fn partition() -> Arc<Partition> {
        Arc::new(Partition::new(64, [vec![48..64, 0..8, 8..16], vec![16..48], vec![]]))
    }

    fn divided() -> Divided {
        Divided::new(Buffer::zeroed(16), partition())
    }

    #[test]
    fn a_part_is_lent_once_and_keeps_the_memory() {
        let divided = divided();
        let mut region = divided.lend(0).expect("it is free");
        assert!(divided.lend(0).is_none() && divided.lend(1).is_some() && divided.is_lent());
        let divided = divided.reclaim().expect_err("a region is out");
        region.bytes_mut(0..16).fill(7);
        drop(divided);
        assert_eq!(region.bytes(4..12), [7; 8], "whatever became of the rest");
    }

    #[test]
    fn what_is_written_is_in_the_buffer_that_comes_back() {
        let divided = divided();
        let mut region = divided.lend(0).expect("it is free");
        assert_eq!(region.ranges(), [0..16, 48..64], "neighbours are one");
        let stretches: Vec<&mut [u8]> = region.stretches_mut([0..4, 4..16, 56..64].into_iter()).collect();
        stretches.into_iter().zip(1..).for_each(|(stretch, value)| stretch.fill(value));
        assert!(region.holds(48..64, region.bytes(48..64)));
        assert!(!region.holds(16..48, region.bytes(0..16)) && !region.holds(0..16, region.bytes(0..8)));
        drop(region);
        let buffer = divided.reclaim().expect("nothing is lent");
        let mut expected = [0; 64];
        expected[..4].fill(1);
        expected[4..16].fill(2);
        expected[56..].fill(3);
        assert_eq!(buffer.as_bytes(), expected);
    }

    #[test]
    fn nobody_gets_the_bytes_of_another_part() {
        for range in [0..17, 15..17, 16..17, 40..52, 60..65, 64..65, 0..usize::MAX, 17..17] {
            let denied =
                std::panic::catch_unwind(|| divided().lend(0).map(|region| region.bytes(range).len()));
            assert!(denied.is_err());
        }
        let nothing = divided().lend(2).expect("it is free");
        assert!(!nothing.holds(0..0, &[]) && nothing.ranges().is_empty());
    }

    #[test]
    #[should_panic(expected = "stretches ascend")]
    fn stretches_do_not_overlap() {
        let mut region = divided().lend(0).expect("it is free");
        assert_eq!(region.stretches_mut([0..8, 4..12].into_iter()).count(), 0);
    }

    #[test]
    fn parts_that_overlap_are_no_partition() {
        for parts in [vec![vec![0..8], vec![7..9]], vec![vec![0..8, 4..12]], vec![vec![60..65]]] {
            assert!(std::panic::catch_unwind(|| Partition::new(64, parts)).is_err());
        }
    }
}
