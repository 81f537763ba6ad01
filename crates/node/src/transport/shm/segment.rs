//! Memory that two processes map: made here, or taken from a peer after it was looked at.
//!
//! # Why this file has unsafe code, and what makes it right
//!
//! A mapping is a pointer and a length from `mmap`, and slices are made from it. Three things have to hold.
//!
//! - *The memory is there.* Every byte of a mapping belongs to the file for as long as it is mapped: a segment is
//!   sealed against shrinking before it is mapped, by us or (checked) by the peer, and its size is taken from the
//!   kernel after that. Without the seal a peer could cut the file short, and the next access would be a `SIGBUS`.
//!   Only plain memory files are taken: one on huge pages raises `SIGBUS` too, when its peer gives pages back and none
//!   are left.
//! - *Every bit pattern is a value.* Slices are of bytes, which are looked at as `f32` with `bytemuck`. There are no
//!   references, lengths or enums in shared memory. Whatever is counted, indexed by or decoded came through the socket.
//! - *Somebody else may write at any time.* A slice says that its memory does not change, and a peer that breaks the
//!   protocol can change it. Nothing that is read from it decides where memory is read or written: elements are added,
//!   copied and compared, and each may be an old one, a new one, or one that was written in between. A peer that plays
//!   such games spoils its own gradients, which it may send anyway. Between peers that keep the protocol a
//!   descriptor in the socket hands memory over: it is written before the descriptor is sent and read after it came.
//!   Within one process [`Region`] lends mutable slices under Rust's own rules.
//!
//! The language's memory model does not know other processes, so it promises nothing for the third. Reading through
//! atomics would, and would keep the compiler from using vector instructions in every loop over a gradient.

#![allow(unsafe_code, reason = "memory that is shared with another process is only reached through pointers")]

use super::SharedError;
use super::copying;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Places and lengths of what is handed out are multiples of this.
pub(crate) const PAGE: usize = 4096;

/// What `statfs` says of files that live in memory.
const TMPFS_MAGIC: u64 = 0x0102_1994;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A file in memory, mapped for reading and writing.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is memory like any other; who may write what is said by `Region` and by the protocol, not by the
// thread that it happens on.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access gives out shared slices and copies that the protocol orders.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all of a peer's segment, which announced `bytes`, after a look at what it is. The descriptor is closed:
    /// the mapping keeps the memory.
    pub(crate) fn of_peer(descriptor: OwnedFd, bytes: u64) -> Result<Mapping, SharedError> {
        let refused = |error: rustix::io::Errno| SharedError::System(error.into());
        let kind = rustix::fs::fstatfs(&descriptor).map_err(refused)?.f_type as u64;
        if kind != TMPFS_MAGIC {
            return Err(SharedError::NoMemory);
        }
        let seals = rustix::fs::fcntl_get_seals(&descriptor).map_err(|_| SharedError::NoMemory)?;
        if !seals.contains(SEALS) {
            return Err(SharedError::NotSealed);
        }
        // The size is asked for after the seals: from now on it cannot change.
        let found = rustix::fs::fstat(&descriptor).map_err(refused)?.st_size as u64;
        if found != bytes {
            return Err(SharedError::Size { announced: bytes, found });
        }
        Ok(Mapping::new(descriptor.as_fd(), bytes)?)
    }

    /// The file behind `descriptor` MUST be sealed against shrinking and have `bytes` bytes.
    fn new(descriptor: BorrowedFd<'_>, bytes: u64) -> io::Result<Mapping> {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address where nothing is.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, descriptor, 0)?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: this range was mapped above. A kernel that has no huge pages for it refuses; small ones do too.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        Ok(Mapping { base, bytes })
    }

    /// Bytes of it, if there are so many.
    pub(crate) fn slice(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = self.address(offset, len)?;
        // SAFETY: `address` says that these bytes are mapped, and they stay so while `self` is borrowed. They were
        // zero when the file was made, so they are initialised. The head of this file says who may write to them.
        Some(unsafe { std::slice::from_raw_parts(start, len) })
    }

    /// Copies `bytes` into it, past the caches where that is quicker. False when they do not fit.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> bool {
        let Some(start) = self.address(offset, bytes.len()) else { return false };
        // SAFETY: `address` says that so many bytes are mapped, for writing. `bytes` is memory of this process: slices
        // of a mapping never come here, since a peer's payload is not sent on from where it lies.
        unsafe { copying::copy(start, bytes) };
        true
    }

    /// Where `len` bytes from `offset` begin, if there are so many.
    pub(crate) fn address(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(len)?;
        // SAFETY: the offset lies in what was mapped.
        (end <= self.bytes).then(|| unsafe { self.base.as_ptr().add(start) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this range was mapped by `new`; slices of it borrow `self`, and regions hold on to it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a whole mapping can be given back");
    }
}

/// A segment that this process made.
#[derive(Debug)]
pub(crate) struct Segment {
    mapping: Mapping,
    descriptor: OwnedFd,
}

impl Segment {
    /// `bytes` of zeros that take no memory until they are touched.
    pub(crate) fn create(bytes: u64) -> io::Result<Segment> {
        let descriptor =
            rustix::fs::memfd_create("paramill", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&descriptor, bytes)?;
        rustix::fs::fcntl_add_seals(&descriptor, SEALS)?;
        let mapping = Mapping::new(descriptor.as_fd(), bytes)?;
        Ok(Segment { mapping, descriptor })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.mapping.bytes as u64
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// A part of a segment that one owner in this process has to itself.
#[derive(Debug)]
pub(crate) struct Region {
    segment: Arc<Segment>,
    offset: u64,
    bytes: usize,
}

impl Region {
    /// # Safety
    ///
    /// No other region may have any of these bytes, for as long as this one lives.
    ///
    /// # Panics
    ///
    /// When the segment is not so long, or the region does not begin with a page.
    pub(crate) unsafe fn new(segment: Arc<Segment>, offset: u64, bytes: usize) -> Region {
        assert!(offset.is_multiple_of(PAGE as u64), "regions begin with a page");
        assert!(segment.mapping.address(offset, bytes).is_some(), "regions lie in their segment");
        Region { segment, offset, bytes }
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes memory for all of it now, so that neither a page fault nor the lack of memory falls into the data path.
    pub(crate) fn touch(&self) -> io::Result<()> {
        // SAFETY: the region is mapped. Nothing is written: pages that are there stay as they are.
        let touched =
            unsafe { rustix::mm::madvise(self.start().cast(), self.bytes, Advice::LinuxPopulateWrite) };
        match touched {
            // A kernel before 5.14 does not know the request; the pages come when they are used.
            Err(rustix::io::Errno::INVAL) => Ok(()),
            other => Ok(other?),
        }
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: `new` says that the bytes are mapped and this region's alone, and the segment lives as long as it.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes) }
    }

    fn start(&self) -> *mut u8 {
        self.segment.mapping.address(self.offset, self.bytes).expect("regions lie in their segment")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn duplicate(segment: &Segment) -> OwnedFd {
        segment.descriptor().try_clone_to_owned().unwrap()
    }

    #[test]
    fn what_one_mapping_is_told_the_other_sees() {
        let mine = Segment::create(1 << 20).unwrap();
        let theirs = Mapping::of_peer(duplicate(&mine), 1 << 20).unwrap();
        assert!(mine.mapping().write(4096, &[7; 64]));
        assert_eq!(theirs.slice(4096, 64).unwrap(), [7; 64]);
        assert_eq!(theirs.slice(0, 64).unwrap(), [0; 64]);
        assert!(theirs.write((1 << 20) - 64, &[9; 64]));
        assert_eq!(mine.mapping().slice((1 << 20) - 64, 64).unwrap(), [9; 64]);
    }

    #[test]
    fn what_lies_outside_is_not_lent() {
        let segment = Segment::create(8192).unwrap();
        let mapping = segment.mapping();
        for (offset, len) in
            [(8192, 1), (8191, 2), (0, 8193), (u64::MAX, 1), (u64::MAX - 3, 8), (1, usize::MAX)]
        {
            assert!(mapping.slice(offset, len).is_none(), "{offset}, {len}");
        }
        assert!(!mapping.write(8190, &[0; 4]));
        assert!(mapping.slice(8192, 0).is_some_and(<[u8]>::is_empty));
    }

    #[test]
    fn only_sealed_memory_of_the_announced_size_is_mapped() {
        let plain = |seals: SealFlags| {
            let file =
                rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&file, 8192).unwrap();
            rustix::fs::fcntl_add_seals(&file, seals).unwrap();
            file
        };
        let unsealed = Mapping::of_peer(plain(SealFlags::GROW), 8192).unwrap_err();
        assert!(matches!(unsealed, SharedError::NotSealed), "{unsealed}");
        let read_only = Mapping::of_peer(plain(SEALS | SealFlags::WRITE), 8192).unwrap_err();
        assert!(matches!(read_only, SharedError::System(_)), "{read_only}");
        let small = Mapping::of_peer(plain(SEALS), 1 << 30).unwrap_err();
        assert!(matches!(small, SharedError::Size { announced: 0x4000_0000, found: 8192 }), "{small}");
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let file = Mapping::of_peer(file.into(), 8192).unwrap_err();
        assert!(matches!(file, SharedError::NoMemory), "{file}");
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = Mapping::of_peer(socket.into(), 8192).unwrap_err();
        assert!(matches!(socket, SharedError::NoMemory), "{socket}");
    }

    #[test]
    fn nobody_can_cut_a_segment_short() {
        let segment = Segment::create(8192).unwrap();
        assert!(rustix::fs::ftruncate(segment.descriptor(), 0).is_err());
        assert!(rustix::fs::ftruncate(segment.descriptor(), 1 << 20).is_err());
        assert!(rustix::fs::fcntl_add_seals(segment.descriptor(), SealFlags::WRITE).is_err());
        // A hole that is punched reads as zeros again.
        assert!(segment.mapping().write(0, &[1; 64]));
        let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(segment.descriptor(), mode, 0, 8192).unwrap();
        assert_eq!(segment.mapping().slice(0, 64).unwrap(), [0; 64]);
    }

    #[test]
    fn a_mapping_outlives_the_descriptor() {
        let segment = Segment::create(8192).unwrap();
        let mapping = Mapping::of_peer(duplicate(&segment), 8192).unwrap();
        assert!(segment.mapping().write(0, &[5; 8]));
        drop(segment);
        assert_eq!(mapping.slice(0, 8).unwrap(), [5; 8]);
    }

    #[test]
    fn a_region_is_its_owners() {
        let segment = Arc::new(Segment::create(16384).unwrap());
        // SAFETY: the two do not overlap.
        let (mut left, right) =
            unsafe { (Region::new(segment.clone(), 0, 4096), Region::new(segment.clone(), 4096, 8192)) };
        left.touch().unwrap();
        left.as_mut_slice().fill(3);
        assert!(right.as_slice().iter().all(|&byte| byte == 0));
        drop(segment);
        assert!(left.as_slice().iter().all(|&byte| byte == 3));
    }
}
