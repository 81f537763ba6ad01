//! Buffers in segments: what a worker takes its gradients and parameters from when a server of its host may share them.

#![allow(unsafe_code, reason = "a region is its owner's alone because this file hands no byte out twice")]

use super::segment::{PAGE, Region, Segment};
use paramill_core::limits;
use paramill_core::store::{Allocate, Buffer, Memory, Place};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// Length of the first segment. Others are longer and longer, so that a few are enough. Nothing but address space is
/// taken before it is used.
const FIRST_SEGMENT_BYTES: u64 = 256 << 20;
const LONGEST_STEP: u64 = 16 << 30;

/// Hands out page-aligned buffers in segments that other processes can map.
///
/// When there is no more of such memory, buffers are on the heap. They work as well: what is in them goes through the
/// socket.
#[derive(Debug, Clone)]
pub(crate) struct SharedAllocator {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    segments: Vec<Arena>,
    bytes: u64,
    next_bytes: u64,
    max_segments: usize,
    max_bytes: u64,
}

/// A segment, and what of it is free.
#[derive(Debug)]
struct Arena {
    segment: Arc<Segment>,
    /// Length of each free range, by its first byte. Neighbours are always joined.
    free: BTreeMap<u64, u64>,
    /// Nothing from here on was ever handed out: it is zero.
    fresh_from: u64,
}

/// A buffer's memory, given back when it is dropped.
#[derive(Debug)]
struct Block {
    region: Region,
    segment: u16,
    state: Arc<Mutex<State>>,
}

impl SharedAllocator {
    pub(crate) fn new() -> SharedAllocator {
        SharedAllocator::with_limits(FIRST_SEGMENT_BYTES, limits::MAX_SEGMENTS, limits::MAX_SHARED_BYTES)
    }

    fn with_limits(next_bytes: u64, max_segments: usize, max_bytes: u64) -> SharedAllocator {
        let state = State { segments: Vec::new(), bytes: 0, next_bytes, max_segments, max_bytes };
        SharedAllocator { state: Arc::new(Mutex::new(state)) }
    }

    /// The segments from the one with this index on, for a peer that knows those before it.
    pub(crate) fn segments_from(&self, index: usize) -> Vec<Arc<Segment>> {
        let state = lock(&self.state);
        state.segments.iter().skip(index).map(|arena| arena.segment.clone()).collect()
    }

    /// How many segments there are.
    pub(crate) fn segment_count(&self) -> usize {
        lock(&self.state).segments.len()
    }

    /// Whether `len` bytes at `place` all belong to buffers that somebody has now.
    pub(crate) fn is_handed_out(&self, place: Place, len: usize) -> bool {
        let state = lock(&self.state);
        let Some(arena) =
            usize::from(place.segment).checked_sub(1).and_then(|index| state.segments.get(index))
        else {
            return false;
        };
        let Some(end) = place.offset.checked_add(len as u64) else { return false };
        let last_free_before_end = arena.free.range(..end).next_back();
        end <= arena.segment.bytes()
            && last_free_before_end.is_none_or(|(start, free)| start + free <= place.offset)
    }

    /// A buffer, or why there is none in shared memory.
    fn try_zeroed(&self, len: usize) -> io::Result<Buffer> {
        let bytes = len
            .checked_mul(4)
            .and_then(|bytes| bytes.max(1).checked_next_multiple_of(PAGE))
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let (mut block, is_fresh) = {
            let mut state = lock(&self.state);
            let (index, offset, is_fresh) = state.take(bytes as u64)?;
            let segment = state.segments[index].segment.clone();
            // SAFETY: `take` removed these bytes from what is free, and only dropping the block puts them back.
            let region = unsafe { Region::new(segment, offset, bytes) };
            (Block { region, segment: index as u16 + 1, state: self.state.clone() }, is_fresh)
        };
        block.region.touch()?;
        if !is_fresh {
            block.region.as_mut_slice().fill(0);
        }
        Ok(Buffer::shared(Box::new(block), len))
    }
}

impl Allocate for SharedAllocator {
    fn zeroed(&self, len: usize) -> Buffer {
        self.try_zeroed(len).unwrap_or_else(|_| Buffer::zeroed(len))
    }
}

impl Memory for Block {
    fn as_slice(&self) -> &[f32] {
        bytemuck::cast_slice(self.region.as_slice())
    }

    fn as_mut_slice(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.region.as_mut_slice())
    }

    fn place(&self) -> Place {
        Place { segment: self.segment, offset: self.region.offset() }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let (offset, bytes) = (self.region.offset(), self.region.bytes() as u64);
        lock(&self.state).segments[usize::from(self.segment) - 1].give_back(offset, bytes);
    }
}

impl State {
    /// Takes `bytes` from a segment that has them, or from a new one: its index, the first byte, and whether all is zero.
    fn take(&mut self, bytes: u64) -> io::Result<(usize, u64, bool)> {
        for (index, arena) in self.segments.iter_mut().enumerate() {
            if let Some((offset, is_fresh)) = arena.take(bytes) {
                return Ok((index, offset, is_fresh));
            }
        }
        let length = self.next_bytes.max(bytes);
        if self.segments.len() >= self.max_segments || self.bytes.saturating_add(length) > self.max_bytes {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let segment = Arc::new(Segment::create(length)?);
        self.bytes += length;
        self.next_bytes = (2 * self.next_bytes).min(LONGEST_STEP.max(self.next_bytes));
        let mut arena = Arena { segment, free: BTreeMap::from([(0, length)]), fresh_from: 0 };
        let (offset, is_fresh) = arena.take(bytes).expect("a new segment has room for what it was made for");
        self.segments.push(arena);
        Ok((self.segments.len() - 1, offset, is_fresh))
    }
}

impl Arena {
    /// The first free range that is long enough.
    fn take(&mut self, bytes: u64) -> Option<(u64, bool)> {
        let (&offset, &length) = self.free.iter().find(|(_, length)| **length >= bytes)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        let is_fresh = offset >= self.fresh_from;
        self.fresh_from = self.fresh_from.max(offset + bytes);
        Some((offset, is_fresh))
    }

    fn give_back(&mut self, mut offset: u64, mut bytes: u64) {
        if let Some((&before, &length)) = self.free.range(..offset).next_back()
            && before + length == offset
        {
            self.free.remove(&before);
            offset = before;
            bytes += length;
        }
        if let Some(length) = self.free.remove(&(offset + bytes)) {
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no holder of this lock panics")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEGABYTE: usize = 1 << 20;

    fn small() -> SharedAllocator {
        SharedAllocator::with_limits(MEGABYTE as u64, 3, 16 * MEGABYTE as u64)
    }

    #[test]
    fn buffers_are_aligned_zero_apart_and_have_a_place() {
        let allocator = small();
        let mut buffers: Vec<Buffer> = (0..20).map(|i| allocator.zeroed(1000 * i)).collect();
        for (number, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.as_slice().as_ptr() as usize % PAGE, 0);
            assert!(buffer.as_slice().iter().all(|&value| value == 0.0));
            buffer.as_mut_slice().fill(number as f32);
        }
        for (number, buffer) in buffers.iter().enumerate() {
            assert!(buffer.as_slice().iter().all(|&value| value == number as f32));
            let place = buffer.place().unwrap();
            let segments = allocator.segments_from(usize::from(place.segment) - 1);
            let bytes = segments[0].mapping().slice(place.offset, buffer.len() * 4).unwrap();
            assert_eq!(bytes, buffer.as_bytes());
        }
    }

    #[test]
    fn what_is_given_back_is_joined_zeroed_and_used_again() {
        let allocator = small();
        let quarter = MEGABYTE / 16;
        let mut buffers: Vec<Buffer> = (0..4).map(|_| allocator.zeroed(quarter)).collect();
        buffers.iter_mut().for_each(|buffer| buffer.as_mut_slice().fill(1.0));
        let order = [1, 3, 0, 2];
        let mut buffers: Vec<Option<Buffer>> = buffers.into_iter().map(Some).collect();
        order.into_iter().for_each(|index| buffers[index] = None);
        let whole = allocator.zeroed(MEGABYTE / 4);
        assert_eq!(whole.place(), Some(Place { segment: 1, offset: 0 }));
        assert!(whole.as_slice().iter().all(|&value| value == 0.0));
        assert_eq!(allocator.segment_count(), 1);
    }

    #[test]
    fn growth_has_a_limit_and_then_there_is_the_heap() {
        let allocator = small();
        // Segments of 1, 2 and 4 MB.
        let held: Vec<Buffer> = (0..8).map(|_| allocator.zeroed(MEGABYTE / 4)).collect();
        let shared = held.iter().filter(|buffer| buffer.place().is_some()).count();
        assert_eq!((shared, allocator.segment_count()), (7, 3));
        let long = small();
        let first = long.zeroed(3 * MEGABYTE);
        assert!(first.place().is_some());
        assert!(long.zeroed(3 * MEGABYTE).place().is_none(), "12 and 12 are more than 16");
    }

    #[test]
    fn only_what_somebody_has_counts_as_handed_out() {
        let allocator = small();
        let (first, second, third) = (allocator.zeroed(1024), allocator.zeroed(1024), allocator.zeroed(1024));
        let at = |offset| Place { segment: 1, offset };
        assert!(allocator.is_handed_out(at(0), 3 * 4096));
        drop(second);
        assert!(allocator.is_handed_out(at(0), 4096));
        assert!(allocator.is_handed_out(at(8192), 4096));
        assert!(!allocator.is_handed_out(at(0), 4097));
        assert!(!allocator.is_handed_out(at(4096), 4));
        assert!(!allocator.is_handed_out(at(8188), 8));
        assert!(!allocator.is_handed_out(at(8192), 4097));
        assert!(!allocator.is_handed_out(at(u64::MAX), 4));
        assert!(!allocator.is_handed_out(Place { segment: 2, offset: 0 }, 4));
        assert!(!allocator.is_handed_out(Place { segment: 0, offset: 0 }, 4));
        drop((first, third));
        assert!(!allocator.is_handed_out(at(0), 4));
    }

    #[test]
    fn a_buffer_outlives_its_allocator() {
        let mut buffer = small().zeroed(5000);
        buffer.as_mut_slice().fill(2.0);
        assert!(buffer.as_slice().iter().all(|&value| value == 2.0));
    }
}
