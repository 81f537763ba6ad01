//! Memory for parameters, gradients and optimizer state: zeroed, page-aligned, taken once.

use bytemuck::{Pod, Zeroable};
use std::fmt;

const PAGE_ELEMENTS: usize = 1024;

/// One page of floats. Alignment to 4096 keeps rows off the slow path of `memcpy` and ready for shared segments.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C, align(4096))]
struct Page([f32; PAGE_ELEMENTS]);

const LINE_ELEMENTS: usize = 16;

/// One cache line of floats.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; LINE_ELEMENTS]);

/// An aligned array of `f32`: on the heap, or in memory that other processes of the host see too.
///
/// It begins at a page. One that is shorter than a page begins at a cache line: a thousand small tensors that all began
/// at a page would share a few sets of the cache and push each other out.
#[derive(Debug)]
pub struct Buffer {
    backing: Backing,
    len: usize,
}

#[derive(Debug)]
enum Backing {
    Pages(Vec<Page>),
    Lines(Vec<Line>),
    Shared(Box<dyn Memory>),
}

/// Memory that a driver provides. All methods are required.
///
/// It MUST be page-aligned, zero at first, and hold at least the elements that it was asked for.
pub trait Memory: Send + Sync + fmt::Debug {
    /// The elements.
    fn as_slice(&self) -> &[f32];

    /// The elements.
    fn as_mut_slice(&mut self) -> &mut [f32];

    /// The place at which other processes of this host find it.
    fn place(&self) -> Place;
}

/// A place in memory that a process shares with others: the segment, counted from 1, and the first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Number of the segment, from 1.
    pub segment: u16,
    /// First byte in it, below 2^48.
    pub offset: u64,
}

impl Place {
    const OFFSET_BITS: u32 = 48;

    /// The place so many bytes after this one, if there can be one.
    pub fn after(self, bytes: u64) -> Option<Place> {
        let offset = self.offset.checked_add(bytes).filter(|offset| *offset < 1 << Place::OFFSET_BITS)?;
        Some(Place { offset, ..self })
    }

    /// As one number that is not 0, for a frame's header.
    pub fn to_bits(self) -> u64 {
        u64::from(self.segment) << Place::OFFSET_BITS | self.offset
    }

    /// The other way; `None` for 0 and for anything else that names no segment.
    pub fn from_bits(bits: u64) -> Option<Place> {
        let segment = (bits >> Place::OFFSET_BITS) as u16;
        (segment != 0).then_some(Place { segment, offset: bits & ((1 << Place::OFFSET_BITS) - 1) })
    }
}

/// The source of a role's large buffers. One method is required.
pub trait Allocate: Send + Sync + fmt::Debug {
    /// `len` zeros.
    fn zeroed(&self, len: usize) -> Buffer;
}

/// The process's own memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Heap;

impl Allocate for Heap {
    fn zeroed(&self, len: usize) -> Buffer {
        Buffer::zeroed(len)
    }
}

impl Buffer {
    /// `len` zeros. The pages are touched now, so that no page fault falls into the data path.
    pub fn zeroed(len: usize) -> Buffer {
        Buffer::try_zeroed(len).expect("memory for a buffer")
    }

    /// These values.
    pub fn copy_of(values: &[f32]) -> Buffer {
        let mut buffer = Buffer::zeroed(values.len());
        buffer.as_mut_slice().copy_from_slice(values);
        buffer
    }

    /// Like [`Buffer::zeroed`], for lengths that others decide; `None` when the machine does not have so much memory.
    pub fn try_zeroed(len: usize) -> Option<Buffer> {
        let backing = if len < PAGE_ELEMENTS {
            Backing::Lines(try_vec(len.div_ceil(LINE_ELEMENTS))?)
        } else {
            Backing::Pages(try_vec(len.div_ceil(PAGE_ELEMENTS))?)
        };
        Some(Buffer { backing, len })
    }

    /// The first `len` elements of memory that a driver provides.
    pub fn shared(memory: Box<dyn Memory>, len: usize) -> Buffer {
        assert!(memory.as_slice().len() >= len, "a driver gives as much memory as it was asked for");
        Buffer { backing: Backing::Shared(memory), len }
    }

    /// The place at which other processes of this host find it, if it is shared.
    pub fn place(&self) -> Option<Place> {
        match &self.backing {
            Backing::Pages(_) | Backing::Lines(_) => None,
            Backing::Shared(memory) => Some(memory.place()),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements.
    pub fn as_slice(&self) -> &[f32] {
        match &self.backing {
            Backing::Pages(pages) => &bytemuck::cast_slice(pages)[..self.len],
            Backing::Lines(lines) => &bytemuck::cast_slice(lines)[..self.len],
            Backing::Shared(memory) => &memory.as_slice()[..self.len],
        }
    }

    /// The elements.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        match &mut self.backing {
            Backing::Pages(pages) => &mut bytemuck::cast_slice_mut(pages)[..self.len],
            Backing::Lines(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.len],
            Backing::Shared(memory) => &mut memory.as_mut_slice()[..self.len],
        }
    }

    /// The elements as the bytes that travel.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.as_slice())
    }

    /// The elements as the bytes that travel.
    pub fn as_mut_bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.as_mut_slice())
    }

    /// Bytes of memory taken.
    pub fn memory_bytes(&self) -> usize {
        match &self.backing {
            Backing::Pages(pages) => pages.len() * size_of::<Page>(),
            Backing::Lines(lines) => lines.len() * size_of::<Line>(),
            Backing::Shared(_) => self.len.div_ceil(PAGE_ELEMENTS) * size_of::<Page>(),
        }
    }
}

/// Zeros, touched now; `None` when there is no memory for them.
fn try_vec<T: Zeroable + Clone>(count: usize) -> Option<Vec<T>> {
    let mut items = Vec::new();
    items.try_reserve_exact(count).ok()?;
    items.resize(count, T::zeroed());
    Some(items)
}

/// A copy is on the heap, not in shared memory: its place would have to be announced.
impl Clone for Buffer {
    fn clone(&self) -> Buffer {
        let mut copy = Buffer::zeroed(self.len);
        copy.as_mut_slice().copy_from_slice(self.as_slice());
        copy
    }
}

impl PartialEq for Buffer {
    fn eq(&self, other: &Buffer) -> bool {
        self.as_slice() == other.as_slice()
    }
}

/// Views a payload as floats; `None` when its length or address does not allow it.
pub fn floats(payload: &[u8]) -> Option<&[f32]> {
    // An empty slice has no alignment to violate.
    if payload.is_empty() { Some(&[]) } else { bytemuck::try_cast_slice(payload).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_zero_and_of_its_length() {
        for len in [0, 1, 1023, 1024, 1025] {
            let buffer = Buffer::zeroed(len);
            assert_eq!(buffer.as_slice().len(), len);
            let alignment = if len < 1024 { 64 } else { 4096 };
            assert_eq!(buffer.as_slice().as_ptr() as usize % alignment, 0);
            assert!(buffer.as_slice().iter().all(|&x| x == 0.0));
            assert_eq!(buffer.as_bytes().len(), len * 4);
            assert_eq!(Buffer::try_zeroed(len), Some(buffer));
        }
        assert_eq!(Buffer::try_zeroed(usize::MAX), None);
        assert_eq!(Buffer::try_zeroed(usize::MAX / 8), None);
    }

    #[test]
    fn a_place_is_a_number_and_back() {
        for place in [Place { segment: 1, offset: 0 }, Place { segment: u16::MAX, offset: (1 << 48) - 4096 }]
        {
            assert_eq!(Place::from_bits(place.to_bits()), Some(place));
        }
        let place = Place { segment: 3, offset: 4096 };
        assert_eq!(place.after(64), Some(Place { segment: 3, offset: 4160 }));
        assert_eq!(place.after(1 << 48), None);
        assert_eq!(place.after(u64::MAX), None);
        assert_eq!(Place::from_bits(0), None);
        assert_eq!(Place::from_bits(4096), None);
    }
}
