//! Receiving payloads where they belong, without a stop in the receive buffer.
//!
//! A role may know where the payload of a frame goes, and where those of the frames behind it go: an answer's chunks
//! come one after the other. One `readv` then fills these places, with room for the headers in between. Nothing is
//! trusted: every header is decoded and compared with what was foreseen, and if it is another, the bytes that went
//! astray are put back into the order of the stream and handled as usual.

use super::receiving::{ReceiveBuffer, received};
use crate::transport::carrier::{Ask, ReceiveError, Take};
use paramill_core::landing::Landing;
use paramill_core::limits::LANDING_FRAMES;
use paramill_core::region::Region;
use paramill_core::wire::{Flags, HEADER_BYTES, Header, padded};
use std::io::{IoSliceMut, Read};
use std::ops::Range;

/// Padding and the header of the frame behind it.
const SLOT_BYTES: usize = 2 * HEADER_BYTES;

/// Bytes that are read into the receive buffer behind what was foreseen: they hold the next header, and what of its
/// payload comes with them is copied.
const LOOK_AHEAD: usize = 8 << 10;

/// A frame whose payload is being received where it belongs.
#[derive(Debug)]
struct Arriving {
    header: Header,
    /// Bytes of the padded payload that are here.
    received: usize,
}

/// What one connection receives to where it belongs.
#[derive(Debug, Default)]
pub(super) struct Lander {
    /// The receive buffer is empty while there is one.
    arriving: Option<Arriving>,
    /// Headers of frames that came to where they belong.
    landed: Vec<Header>,
    /// Kept from read to read for their memory.
    places: Vec<Landing>,
    slots: Vec<[u8; SLOT_BYTES]>,
}

impl Lander {
    /// Reads once, to where `ask` says that the payloads at hand belong, or else into the receive buffer.
    pub(super) fn fill(
        &mut self,
        pipe: &mut impl Read,
        buffer: &mut ReceiveBuffer,
        ask: &mut Ask<'_>,
    ) -> Result<(), ReceiveError> {
        let Some(arriving) = self.arriving(buffer) else { return buffer.fill(|room| pipe.read(room)) };
        self.places.clear();
        // What is encoded is of no use as it is.
        let is_encoded = arriving.header.flags.has(Flags::ENCODED);
        let mut destination = match is_encoded {
            true => None,
            false => ask(&arriving.header, LANDING_FRAMES, &mut self.places),
        };
        let first = self.places.first().cloned();
        match destination.as_mut().zip(first).and_then(|(it, first)| it.direct(&first)) {
            Some(region) => self.read_landing(pipe, buffer, arriving, region),
            None => {
                give_up(buffer, &arriving);
                buffer.fill(|room| pipe.read(room))
            }
        }
    }

    /// Hands over the frames that came to where they belong.
    pub(super) fn hand_over(&mut self, take: &mut Take<'_>) {
        for header in self.landed.drain(..) {
            take(&header, None);
        }
    }

    /// The frame that the bytes to come belong to, if its header is here and its payload is not.
    fn arriving(&mut self, buffer: &ReceiveBuffer) -> Option<Arriving> {
        if let Some(arriving) = self.arriving.take() {
            return Some(arriving);
        }
        let (head, payload) = buffer.received().split_first_chunk::<HEADER_BYTES>()?;
        // What does not decode is an error for those who handle frames.
        let header = Header::decode(head).ok()?;
        let received = payload.len();
        (received < header.payload_bytes as usize).then_some(Arriving { header, received })
    }

    fn read_landing(
        &mut self,
        pipe: &mut impl Read,
        buffer: &mut ReceiveBuffer,
        arriving: Arriving,
        region: &mut Region,
    ) -> Result<(), ReceiveError> {
        let Lander { places, slots, landed, .. } = self;
        let Arriving { mut header, received: mut here } = arriving;
        if let Some(payload) = buffer.received().get(HEADER_BYTES..) {
            let start = places[0].bytes.start;
            region.bytes_mut(start..start + here).copy_from_slice(payload);
            buffer.set_filled(0);
        }
        buffer.look_ahead(LOOK_AHEAD);
        slots.resize(places.len(), [0; SLOT_BYTES]);
        let read = {
            let tail = &mut buffer.bytes_mut()[..LOOK_AHEAD];
            pipe.read_vectored(&mut gather(region, places, slots, here, tail))
        };
        let Some(mut left) = received(read)? else {
            self.arriving = Some(Arriving { header, received: here });
            return Ok(());
        };
        for (index, slot) in slots.iter().enumerate() {
            let total = padded(header.payload_bytes as usize);
            let taken = left.min(total - here);
            here += taken;
            left -= taken;
            if here < total {
                self.arriving = Some(Arriving { header, received: here });
                return Ok(());
            }
            landed.push(header);
            let Some(next) = places.get(index + 1) else { break };
            let padding = total - header.payload_bytes as usize;
            let head = &slot[padding..padding + HEADER_BYTES];
            let head_bytes = left.min(HEADER_BYTES);
            left -= head_bytes;
            let foreseen = match head.first_chunk().filter(|_| head_bytes == HEADER_BYTES).map(Header::decode)
            {
                Some(Ok(found)) if next.is_for(&header, &found) => Some(found),
                _ => None,
            };
            match foreseen {
                Some(found) => (header, here) = (found, 0),
                None => {
                    let (places, slots) = (&places[index + 1..], &slots[index + 1..]);
                    put_back(buffer, &head[..head_bytes], places, region, slots, left);
                    return Ok(());
                }
            }
        }
        // What is behind the last place that was foreseen came into the receive buffer.
        buffer.set_filled(left);
        Ok(())
    }
}

/// The role does not want this payload any more, or never did: what follows of it comes into the receive buffer.
fn give_up(buffer: &mut ReceiveBuffer, arriving: &Arriving) {
    if buffer.received().is_empty() {
        // Its beginning went to where it belonged, and whoever wanted it is gone; so nobody misses it.
        buffer.reserve(HEADER_BYTES + padded(arriving.header.payload_bytes as usize));
        buffer.bytes_mut()[..HEADER_BYTES].copy_from_slice(&arriving.header.encode());
        buffer.set_filled(HEADER_BYTES + arriving.received);
    }
}

/// Bytes that were read to places where they do not belong become the beginning of the receive buffer.
fn put_back(
    buffer: &mut ReceiveBuffer,
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
    take(buffer.bytes_mut());
    buffer.reserve(stray.len());
    buffer.bytes_mut()[..stray.len()].copy_from_slice(&stray);
    buffer.set_filled(stray.len());
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
