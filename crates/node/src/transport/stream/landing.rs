//! Receiving payloads where they belong, without a stop in the receive buffer.
//!
//! A role may know where the payload of a frame goes, and where those of the frames behind it go: an answer's chunks
//! come one after the other. One `readv` then fills these places, with room for the headers in between. Nothing is
//! trusted: every header is decoded and compared with what was foreseen, and if it is another, the bytes that went
//! astray are put back into the order of the stream and handled as usual.

use super::{ReceiveError, Stream, StreamConnection, is_passing};
use paramill_core::landing::{Destination, Landing};
use paramill_core::limits::LANDING_FRAMES;
use paramill_core::region::Region;
use paramill_core::types::TableId;
use paramill_core::wire::{DESCRIPTOR_BYTES, Flags, HEADER_BYTES, Header, Kind, padded};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSliceMut, Read};
use std::ops::Range;

/// Padding and the header of the frame behind it.
const SLOT_BYTES: usize = 2 * HEADER_BYTES;

/// Bytes that are read into the receive buffer behind what was foreseen: they hold the next header, and what of its
/// payload comes with them is copied.
const LOOK_AHEAD: usize = 8 << 10;

/// A frame whose payload is being received where it belongs.
#[derive(Debug)]
pub(super) struct Arriving {
    header: Header,
    /// Bytes of the padded payload that are here.
    received: usize,
}

/// Payloads of up to so many bytes are left to those who handle them: asking for their place costs as much as a copy. What is
/// encoded may be short and mean much.
const SHORT_PAYLOAD: usize = 4096;

/// Frames of one answer that come one after the other.
struct Run {
    destination: Destination,
    /// Which of the places is the next frame's.
    next: usize,
    /// The last one of them.
    before: Header,
}

/// What was put to its place from the receive buffer, and is not handled yet.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// First bytes of those frames in the receive buffer, ascending.
    placed: VecDeque<usize>,
    /// Bytes of the receive buffer that have been looked through.
    looked: usize,
    /// Tables of parameters among them that were left to those who handle frames.
    passed_over: Vec<TableId>,
}

impl Ahead {
    /// Whether the frame that begins there was put to its place.
    pub(super) fn take(&mut self, start: usize) -> bool {
        let is_placed = self.placed.front() == Some(&start);
        if is_placed {
            self.placed.pop_front();
        }
        is_placed
    }

    /// So many bytes of the receive buffer are handled, and what is behind them moves there.
    pub(super) fn moved(&mut self, bytes: usize) {
        self.placed.iter_mut().for_each(|start| *start -= bytes);
        self.looked = self.looked.saturating_sub(bytes);
        if self.looked == 0 {
            self.passed_over.clear();
        }
    }
}

/// What a connection keeps for this, for its memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    places: Vec<Landing>,
    slots: Vec<[u8; SLOT_BYTES]>,
    landed: Vec<Header>,
}

impl StreamConnection {
    /// Whether the bytes to come are probably the rest of a payload.
    pub(crate) fn is_amid_payload(&self) -> bool {
        matches!(self.stream, Stream::Tcp(_)) && (self.arriving.is_some() || self.filled >= HEADER_BYTES)
    }

    /// Reads once, to where `ask` says that the payloads at hand belong; otherwise like [`StreamConnection::fill`]. Of the frames
    /// that came whole [`StreamConnection::landed`] tells.
    pub(crate) fn fill_landing(
        &mut self,
        ask: impl FnOnce(&Header, usize, &mut Vec<Landing>) -> Option<Destination>,
    ) -> Result<(), ReceiveError> {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.places.clear();
        let filled = match self.arriving() {
            None => self.fill(),
            Some(arriving) => {
                let header = &arriving.header;
                let is_encoded = header.flags.has(Flags::ENCODED);
                let asked = || ask(header, LANDING_FRAMES, &mut scratch.places);
                let mut destination = if is_encoded { None } else { asked() };
                let first = scratch.places.first().cloned();
                match destination.as_mut().zip(first).and_then(|(it, first)| it.direct(&first)) {
                    Some(region) => self.read_landing(arriving, region, &mut scratch),
                    None => {
                        self.give_up(&arriving);
                        self.fill()
                    }
                }
            }
        };
        self.scratch = scratch;
        filled
    }

    /// Hands over the headers of frames that came to where they belong.
    pub(crate) fn landed(&mut self) -> impl Iterator<Item = Header> + '_ {
        self.scratch.landed.drain(..)
    }

    /// Puts payloads that are in the receive buffer, whole, to where `ask` says that they belong: whoever handles the frames has
    /// nothing long to do then. Frames that come one after the other are asked for together.
    pub(crate) fn put_ahead(
        &mut self,
        mut ask: impl FnMut(&Header, usize, &mut Vec<Landing>) -> Option<Destination>,
    ) {
        let StreamConnection { receive, filled, scratch: Scratch { places, .. }, ahead, .. } = self;
        let Ahead { placed, looked, passed_over } = ahead;
        let bytes: &[u8] = bytemuck::cast_slice(receive.as_slice());
        let mut run = None::<Run>;
        while let Some(head) = bytes[*looked..*filled].first_chunk::<HEADER_BYTES>() {
            // What does not decode is an error for those who handle frames.
            let Ok(header) = Header::decode(head) else { break };
            let (length, begin) = (header.payload_bytes as usize, *looked + HEADER_BYTES);
            let is_elsewhere = header.flags.has(Flags::ELSEWHERE);
            let end = begin + if is_elsewhere { DESCRIPTOR_BYTES } else { padded(length) };
            if end > *filled {
                break;
            }
            let is_long = length > SHORT_PAYLOAD || header.flags.has(Flags::ENCODED);
            let is_worth_it = is_long && !is_elsewhere && !header.flags.has(Flags::ROWS);
            if header.kind == Kind::Params && is_worth_it {
                let is_next =
                    |run: &Run| places.get(run.next).is_some_and(|place| place.is_for(&run.before, &header));
                if !run.as_ref().is_some_and(is_next) {
                    // The part that it has must be free before it is asked for again.
                    drop(run.take());
                    places.clear();
                    let destination = ask(&header, LANDING_FRAMES, places);
                    run = destination.map(|destination| Run { destination, next: 0, before: header });
                }
                // A difference is not added before one that came earlier.
                let may_put =
                    |run: &Run| !run.destination.is_ordered() || !passed_over.contains(&header.table);
                if let Some(run) = run.as_mut().filter(|run| may_put(run))
                    && run.destination.put(&places[run.next], &bytes[begin..begin + length])
                {
                    placed.push_back(*looked);
                    (run.next, run.before) = (run.next + 1, header);
                } else {
                    passed_over.push(header.table);
                }
            } else if header.kind == Kind::Params && !passed_over.contains(&header.table) {
                passed_over.push(header.table);
            }
            *looked = end;
        }
    }

    /// The frame that the bytes to come belong to, if its header is here and its payload is not.
    fn arriving(&mut self) -> Option<Arriving> {
        if let Some(arriving) = self.arriving.take() {
            return Some(arriving);
        }
        let bytes: &[u8] = bytemuck::cast_slice(self.receive.as_slice());
        let head = bytes[..self.filled].first_chunk::<HEADER_BYTES>()?;
        // What does not decode is an error for those who handle frames.
        let header = Header::decode(head).ok()?;
        let received = self.filled - HEADER_BYTES;
        (received < header.payload_bytes as usize).then_some(Arriving { header, received })
    }

    /// The role does not want this payload any more, or never did: what follows of it comes into the receive buffer.
    fn give_up(&mut self, arriving: &Arriving) {
        if self.filled == 0 {
            // Its beginning went to where it belonged, and whoever wanted it is gone; so nobody misses it.
            self.reserve(HEADER_BYTES + padded(arriving.header.payload_bytes as usize));
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.receive.as_mut_slice());
            bytes[..HEADER_BYTES].copy_from_slice(&arriving.header.encode());
            self.filled = HEADER_BYTES + arriving.received;
        }
    }

    fn read_landing(
        &mut self,
        arriving: Arriving,
        region: &mut Region,
        scratch: &mut Scratch,
    ) -> Result<(), ReceiveError> {
        let Scratch { places, slots, landed } = scratch;
        let Arriving { mut header, mut received } = arriving;
        if self.filled > 0 {
            let bytes: &[u8] = bytemuck::cast_slice(self.receive.as_slice());
            let start = places[0].bytes.start;
            let place = region.bytes_mut(start..start + received);
            place.copy_from_slice(&bytes[HEADER_BYTES..HEADER_BYTES + received]);
            self.filled = 0;
        }
        self.look_ahead = LOOK_AHEAD;
        slots.resize(places.len(), [0; SLOT_BYTES]);
        let read = {
            let tail: &mut [u8] = bytemuck::cast_slice_mut(self.receive.as_mut_slice());
            let tail = &mut tail[..LOOK_AHEAD];
            let mut slices = gather(region, places, slots, received, tail);
            let Stream::Tcp(stream) = &mut self.stream else { return Ok(()) };
            stream.read_vectored(&mut slices)
        };
        let count = match read {
            Ok(0) => {
                return Err(ReceiveError::Io(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed")));
            }
            Ok(count) => count,
            Err(error) if is_passing(&error) => {
                self.arriving = Some(Arriving { header, received });
                return Ok(());
            }
            Err(error) => return Err(ReceiveError::Io(error)),
        };
        let mut left = count;
        for (index, slot) in slots.iter().enumerate() {
            let total = padded(header.payload_bytes as usize);
            let taken = left.min(total - received);
            received += taken;
            left -= taken;
            if received < total {
                self.arriving = Some(Arriving { header, received });
                return Ok(());
            }
            landed.push(header);
            let Some(next) = places.get(index + 1) else { break };
            let padding = total - header.payload_bytes as usize;
            let head = &slot[padding..padding + HEADER_BYTES];
            let here = left.min(HEADER_BYTES);
            left -= here;
            let foreseen = match head.first_chunk().filter(|_| here == HEADER_BYTES).map(Header::decode) {
                Some(Ok(found)) if next.is_for(&header, &found) => Some(found),
                _ => None,
            };
            match foreseen {
                Some(found) => (header, received) = (found, 0),
                None => {
                    self.put_back(&head[..here], &places[index + 1..], region, &slots[index + 1..], left);
                    return Ok(());
                }
            }
        }
        // What is behind the last place that was foreseen came into the receive buffer.
        self.filled = left;
        Ok(())
    }

    /// Bytes that were read to places where they do not belong become the beginning of the receive buffer.
    fn put_back(
        &mut self,
        head: &[u8],
        places: &[Landing],
        region: &Region,
        slots: &[[u8; SLOT_BYTES]],
        left: usize,
    ) {
        let mut stray = head.to_vec();
        let mut missing = left;
        let mut take = |bytes: &[u8]| {
            let some = missing.min(bytes.len());
            stray.extend_from_slice(&bytes[..some]);
            missing -= some;
        };
        for (index, (place, slot)) in places.iter().zip(slots).enumerate() {
            let padding = padding(&place.bytes);
            take(region.bytes(place.bytes.clone()));
            take(&slot[..if index + 1 < places.len() { padding + HEADER_BYTES } else { padding }]);
        }
        take(bytemuck::cast_slice(self.receive.as_slice()));
        self.reserve(stray.len());
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.receive.as_mut_slice());
        bytes[..stray.len()].copy_from_slice(&stray);
        self.filled = stray.len();
    }
}

/// The places of payloads, from byte `received` of the first on, with the slots between them and the tail behind.
fn gather<'a>(
    region: &'a mut Region,
    places: &'a [Landing],
    slots: &'a mut [[u8; SLOT_BYTES]],
    received: usize,
    tail: &'a mut [u8],
) -> Vec<IoSliceMut<'a>> {
    let mut slices = Vec::with_capacity(2 * places.len() + 1);
    let first = places.first().map_or(0, |place| place.bytes.len());
    let (here, skip) = (received.min(first), received.saturating_sub(first));
    let left = move |(index, place): (usize, &Landing)| {
        let skipped = if index == 0 { here } else { 0 };
        place.bytes.start + skipped..place.bytes.end
    };
    let payloads = region.stretches_mut(places.iter().enumerate().map(left));
    for (index, ((place, payload), slot)) in places.iter().zip(payloads).zip(slots).enumerate() {
        slices.push(IoSliceMut::new(payload));
        let padding = padding(&place.bytes);
        let end = if index + 1 < places.len() { padding + HEADER_BYTES } else { padding };
        let begin = if index == 0 { skip } else { 0 };
        slices.push(IoSliceMut::new(&mut slot[begin..end]));
    }
    slices.push(IoSliceMut::new(tail));
    slices
}

fn padding(bytes: &Range<usize>) -> usize {
    padded(bytes.len()) - bytes.len()
}

#[cfg(test)]
mod tests;
