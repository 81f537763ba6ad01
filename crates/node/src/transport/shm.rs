//! Shared memory between processes of one host.
//!
//! A connection is a Unix socket that carries the frames of `docs/wire.md`, as TCP does. A payload that lies in a
//! segment both ends have mapped stays where it is: a descriptor goes through the socket in its stead.
//!
//! - Who connects (a worker) shares its memory. Its segments' file descriptors go through the socket before anything
//!   that refers to them. It maps nothing of others.
//! - Who was connected to (a data core) maps them. It reads gradients where the worker wrote them, and writes
//!   parameters where the worker asked for them.
//!
//! Every place that a peer names is checked against what is mapped, from the copy that came through the socket. The
//! unsafe code of this crate is in the files of this folder; `segment.rs` says why it is right.

mod allocator;
mod carrier;
mod copying;
mod naming;
mod passing;
mod segment;

pub(crate) use allocator::SharedAllocator;
pub(crate) use naming::{dial, host_prefix, listen};

use paramill_core::limits;
use paramill_core::role::Body;
use paramill_core::store::Place;
use paramill_core::wire::{DESCRIPTOR_BYTES, Descriptor, Header, Kind, Owner, WireError};
use segment::{Mapping, Segment};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Why a connection that shares memory ends. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SharedError {
    #[error(transparent)]
    System(io::Error),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the peer runs as user {theirs}, this process as user {ours}; run both as one user, or use TCP")]
    Stranger { theirs: u32, ours: u32 },
    #[error("{0} is an address of another host")]
    OtherHost(String),
    #[error("the peer sent more file descriptors than segments")]
    TooManyDescriptors,
    #[error("the peer sent a file descriptor that no frame announces")]
    StrayDescriptor,
    #[error("the peer announced a segment without its file descriptor")]
    NoDescriptor,
    #[error("the peer shares something that is no plain memory file")]
    NoMemory,
    #[error("the peer shares memory that it can take back; it must be sealed against changes of its size")]
    NotSealed,
    #[error("the peer announced a segment of {announced} bytes, and shares {found}")]
    Size { announced: u64, found: u64 },
    #[error("the peer announced segment {found} when it was the turn of {expected}")]
    Turn { expected: usize, found: u16 },
    #[error(
        "the peer shares more than {} segments or {} bytes",
        limits::MAX_SEGMENTS,
        limits::MAX_SHARED_BYTES
    )]
    TooMuch,
    #[error("this end takes no segments")]
    NotTaken,
    #[error("the peer refers to segment {0}, which it did not share")]
    UnknownSegment(u16),
    #[error("the peer refers to {len} bytes at {place:?}, which is not within what it shares")]
    OutOfBounds { place: Place, len: usize },
    #[error("the peer refers to {place:?}, which is not a multiple of {multiple}")]
    Misaligned { place: Place, multiple: usize },
    #[error("the peer refers to {len} bytes at {place:?}, which is memory that is not in use")]
    NotHandedOut { place: Place, len: usize },
    #[error("a {kind:?} frame cannot lie in the segments of its {owner:?}")]
    WrongOwner { kind: Kind, owner: Owner },
}

impl From<io::Error> for SharedError {
    fn from(error: io::Error) -> SharedError {
        SharedError::System(error)
    }
}

/// Errors of the system stay what they are: some of them pass.
impl From<SharedError> for io::Error {
    fn from(error: SharedError) -> io::Error {
        match error {
            SharedError::System(error) => error,
            other => io::Error::new(io::ErrorKind::InvalidData, other),
        }
    }
}

/// The memory beside one connection.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    side: Side,
    /// Descriptors that came, and whose frames have not been looked at yet.
    waiting: VecDeque<OwnedFd>,
}

#[derive(Debug)]
enum Side {
    /// We connected, and share ours. `told` are the segments that the peer knows.
    Sharing { allocator: SharedAllocator, told: Vec<Arc<Segment>> },
    /// The peer connected, and shares its own.
    Mapping { segments: Vec<Mapping>, bytes: u64 },
}

impl SharedMemory {
    /// For a connection that we made, once it stands. Who is at the other end is looked at first.
    pub(crate) fn connected(
        stream: &UnixStream,
        allocator: SharedAllocator,
    ) -> Result<SharedMemory, SharedError> {
        passing::check_peer(stream)?;
        let side = Side::Sharing { allocator, told: Vec::new() };
        Ok(SharedMemory { side, waiting: VecDeque::new() })
    }

    /// For a connection that a peer made. Who it is is looked at first.
    pub(crate) fn accepted(stream: &UnixStream) -> Result<SharedMemory, SharedError> {
        passing::check_peer(stream)?;
        let side = Side::Mapping { segments: Vec::new(), bytes: 0 };
        Ok(SharedMemory { side, waiting: VecDeque::new() })
    }

    /// Reads once from the socket.
    pub(crate) fn read(&mut self, stream: &UnixStream, buffer: &mut [u8]) -> Result<usize, SharedError> {
        passing::receive(stream, buffer, &mut self.waiting)
    }

    /// Whether there are segments that the peer does not know.
    pub(crate) fn has_news(&self) -> bool {
        matches!(&self.side, Side::Sharing { allocator, told } if allocator.segment_count() > told.len())
    }

    /// Tells the peer of segments that it does not know. To be called at the end of a frame and before frames that
    /// may refer to them; the error may be that the socket is full.
    pub(crate) fn announce(&mut self, stream: &UnixStream) -> io::Result<()> {
        if !self.has_news() {
            return Ok(());
        }
        let Side::Sharing { allocator, told } = &mut self.side else { return Ok(()) };
        for segment in allocator.segments_from(told.len()) {
            let place = Place { segment: told.len() as u16 + 1, offset: segment.bytes() };
            let header = Header { landing: place.to_bits(), ..Header::new(Kind::Share) };
            passing::send(stream, &header.encode(), segment.descriptor())?;
            told.push(segment);
        }
        Ok(())
    }

    /// The peer announced a segment.
    pub(crate) fn take_segment(&mut self, header: &Header) -> Result<(), SharedError> {
        let Side::Mapping { segments, bytes: total } = &mut self.side else {
            return Err(SharedError::NotTaken);
        };
        let wrong = WireError::Field { field: "segment", value: header.landing };
        let Place { segment, offset: bytes } = Place::from_bits(header.landing).ok_or(wrong)?;
        let descriptor = self.waiting.pop_front().ok_or(SharedError::NoDescriptor)?;
        if usize::from(segment) != segments.len() + 1 {
            return Err(SharedError::Turn { expected: segments.len() + 1, found: segment });
        }
        if segments.len() >= limits::MAX_SEGMENTS || *total + bytes > limits::MAX_SHARED_BYTES {
            return Err(SharedError::TooMuch);
        }
        segments.push(Mapping::of_peer(descriptor, bytes)?);
        *total += bytes;
        Ok(())
    }

    /// Everything that was read has been looked at: every descriptor must have had its frame.
    pub(crate) fn check_settled(&mut self) -> Result<(), SharedError> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        self.waiting.clear();
        Err(SharedError::StrayDescriptor)
    }

    /// The payload that a peer's descriptor stands for.
    pub(crate) fn payload(
        &self,
        header: &Header,
        descriptor: &[u8; DESCRIPTOR_BYTES],
    ) -> Result<&[u8], SharedError> {
        let Descriptor { place, owner } = Descriptor::decode(descriptor)?;
        let len = header.payload_bytes as usize;
        let is_answer = header.kind == Kind::Params;
        let mapping = match (&self.side, owner, is_answer) {
            (Side::Mapping { segments, .. }, Owner::Sender, false) => peers(segments, place)?,
            (Side::Sharing { allocator, told }, Owner::Receiver, true) => {
                let segment = numbered(told, place);
                let mapping = segment.ok_or(SharedError::UnknownSegment(place.segment))?.mapping();
                if !allocator.is_handed_out(place, len) {
                    return Err(SharedError::NotHandedOut { place, len });
                }
                mapping
            }
            _ => return Err(SharedError::WrongOwner { kind: header.kind, owner }),
        };
        check_aligned(header, place)?;
        mapping.slice(place.offset, len).ok_or(SharedError::OutOfBounds { place, len })
    }

    /// The descriptor to send instead of a payload, which now lies where it says; `None` when the payload has to go
    /// through the socket. An error is the peer's: it asked for an answer where nothing is.
    pub(crate) fn put_elsewhere(
        &self,
        header: &Header,
        body: &Body,
        payload: &[u8],
    ) -> Result<Option<Descriptor>, SharedError> {
        if payload.len() <= limits::MAX_INLINE_BYTES || !header.may_be_elsewhere() {
            return Ok(None);
        }
        match &self.side {
            Side::Sharing { told, .. } => Ok(lies_in(told, header, body, payload)
                .map(|place| Descriptor { place, owner: Owner::Sender })
                .filter(|_| header.kind != Kind::Params)),
            Side::Mapping { segments, .. } => {
                let Some(place) = Place::from_bits(header.landing).filter(|_| header.kind == Kind::Params)
                else {
                    return Ok(None);
                };
                check_aligned(header, place)?;
                if !peers(segments, place)?.write(place.offset, payload) {
                    return Err(SharedError::OutOfBounds { place, len: payload.len() });
                }
                Ok(Some(Descriptor { place, owner: Owner::Receiver }))
            }
        }
    }
}

/// Segments are counted from 1.
fn numbered<T>(segments: &[T], place: Place) -> Option<&T> {
    segments.get(usize::from(place.segment).checked_sub(1)?)
}

/// A peer's segment.
fn peers(segments: &[Mapping], place: Place) -> Result<&Mapping, SharedError> {
    numbered(segments, place).ok_or(SharedError::UnknownSegment(place.segment))
}

/// Payloads are used where they lie, as elements of their type.
fn check_aligned(header: &Header, place: Place) -> Result<(), SharedError> {
    let multiple = header.dtype.bytes();
    let is_aligned = place.offset.is_multiple_of(multiple as u64);
    if is_aligned { Ok(()) } else { Err(SharedError::Misaligned { place, multiple }) }
}

/// Where the peer finds a payload that is in one of these segments. A buffer of another allocator has a place too,
/// but not the same address.
fn lies_in(told: &[Arc<Segment>], header: &Header, body: &Body, payload: &[u8]) -> Option<Place> {
    let Body::Shared { buffer, start, .. } = body else { return None };
    let Place { segment, offset } = buffer.place()?;
    let place = Place { segment, offset: offset + *start as u64 };
    let address = numbered(told, place)?.mapping().address(place.offset, payload.len())?;
    (address.cast_const() == payload.as_ptr() && check_aligned(header, place).is_ok()).then_some(place)
}

#[cfg(test)]
mod tests;
