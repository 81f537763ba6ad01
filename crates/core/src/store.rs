//! Memory for parameters, gradients and optimizer state: zeroed, page-aligned, taken once.

use bytemuck::{Pod, Zeroable};

const PAGE_ELEMENTS: usize = 1024;

/// One page of floats. Alignment to 4096 keeps rows off the slow path of `memcpy` and ready for shared segments.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C, align(4096))]
struct Page([f32; PAGE_ELEMENTS]);

/// A page-aligned array of `f32`.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    pages: Vec<Page>,
    len: usize,
}

impl Buffer {
    /// `len` zeros. The pages are touched now, so that no page fault falls into the data path.
    pub fn zeroed(len: usize) -> Buffer {
        Buffer { pages: vec![Page::zeroed(); len.div_ceil(PAGE_ELEMENTS)], len }
    }

    /// Like [`Buffer::zeroed`], for lengths that others decide; `None` when the machine does not have so much memory.
    pub fn try_zeroed(len: usize) -> Option<Buffer> {
        let count = len.div_ceil(PAGE_ELEMENTS);
        let mut pages = Vec::new();
        pages.try_reserve_exact(count).ok()?;
        pages.resize(count, Page::zeroed());
        Some(Buffer { pages, len })
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
        &bytemuck::cast_slice(&self.pages)[..self.len]
    }

    /// The elements.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.pages)[..self.len]
    }

    /// The elements as the bytes that travel.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.as_slice())
    }

    /// Bytes of memory taken.
    pub fn memory_bytes(&self) -> usize {
        self.pages.len() * size_of::<Page>()
    }
}

/// Views a payload as floats; `None` when its length or address does not allow it.
pub fn floats(payload: &[u8]) -> Option<&[f32]> {
    // Nothing is nothing at any address.
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
            assert_eq!(buffer.as_slice().as_ptr() as usize % 4096, 0);
            assert!(buffer.as_slice().iter().all(|&x| x == 0.0));
            assert_eq!(buffer.as_bytes().len(), len * 4);
            assert_eq!(Buffer::try_zeroed(len), Some(buffer));
        }
        assert_eq!(Buffer::try_zeroed(usize::MAX), None);
        assert_eq!(Buffer::try_zeroed(usize::MAX / 8), None);
    }
}
