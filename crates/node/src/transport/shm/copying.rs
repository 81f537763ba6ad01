//! Copies into memory that another process reads.
//!
//! A plain copy reads every cache line of its target before it overwrites it, and leaves in this core's cache what
//! another core wants. Streaming stores do neither.

#![allow(unsafe_code, reason = "streaming stores are only reached through pointers")]

/// Shorter copies stay in the cache: the other process is about to read them.
const STREAM_FROM: usize = 8192;

/// Copies `source` to `target`. What was copied is seen by who is told of it after this returns.
///
/// # Safety
///
/// `target` MUST point to as many bytes as `source` has, which may be written and are not those of `source`.
pub(super) unsafe fn copy(target: *mut u8, source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if source.len() >= STREAM_FROM && is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise, and this processor has AVX.
        return unsafe { streaming::copy(target, source) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
}

#[cfg(target_arch = "x86_64")]
mod streaming {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    /// Bytes in a cache line: two stores, which together leave the core as one write.
    const LINE: usize = 64;

    /// # Safety
    ///
    /// As for `super::copy`, on a processor with AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy(target: *mut u8, source: &[u8]) {
        let head = target.align_offset(LINE).min(source.len());
        let (first, rest) = source.split_at(head);
        let (lines, last) = rest.as_chunks::<LINE>();
        // SAFETY: head, lines and tail are the parts of `source`, and of `target`, which has as many bytes. After the
        // head the target is aligned to a line, which streaming stores need; loads need no alignment.
        unsafe {
            std::ptr::copy_nonoverlapping(first.as_ptr(), target, head);
            let mut at = target.add(head);
            for line in lines {
                let from = line.as_ptr().cast::<__m256i>();
                let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
                _mm256_stream_si256(at.cast(), low);
                _mm256_stream_si256(at.cast::<__m256i>().add(1), high);
                at = at.add(LINE);
            }
            std::ptr::copy_nonoverlapping(last.as_ptr(), at, last.len());
        }
        // Streaming stores are not ordered with others; after the fence they are.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_whatever_the_alignment() {
        let source: Vec<u8> = (0..40_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in [0, 1, 63, 64, 8191, 8192, 8193, 32_768, 39_000] {
            for (from, to) in [(0, 0), (4, 0), (0, 4), (60, 4), (1, 63), (64, 128)] {
                let mut target = vec![0xee; len + 256];
                // SAFETY: `target` has room for `len` bytes after `to`, and is another vector.
                unsafe { copy(target.as_mut_ptr().add(to), &source[from..from + len]) };
                assert_eq!(target[to..to + len], source[from..from + len]);
                assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0xee));
            }
        }
    }
}
