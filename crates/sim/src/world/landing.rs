//! Payloads that are received where the role wants them, and those that go astray there.

use super::channel::{Channel, Flight};
use super::payload::Copies;
use paramill_core::landing::{Destination, Landing};
use paramill_core::wire::Header;

/// Frames behind the first one, whose payload has landed, land too: one system call also brings what is behind it. What was not
/// foreseen goes astray, and is read in its turn. Says which frames have landed, the first one included.
pub(super) fn land_behind(
    channel: &mut Channel,
    copies: &mut Copies,
    destination: &mut Destination,
    places: &[Landing],
    first: Header,
) -> Vec<Header> {
    let mut landed = vec![first];
    for place in &places[1..] {
        let Some(Flight { header: Some(next), payload, .. }) = channel.peek() else { break };
        let bytes = payload.bytes();
        if !place.is_for(&landed[landed.len() - 1], next) {
            stray(destination, place, bytes);
            break;
        }
        if !destination.put(place, bytes) {
            break;
        }
        landed.push(*next);
        if let Some(flight) = channel.read() {
            copies.recycle(flight.payload);
        }
    }
    landed
}

/// Bytes come to a place where they do not belong, if they are received straight to it.
pub(super) fn stray(destination: &mut Destination, place: &Landing, bytes: &[u8]) {
    if let Some(region) = destination.direct(place) {
        let some = bytes.len().min(place.bytes.len());
        region.bytes_mut(place.bytes.start..place.bytes.start + some).copy_from_slice(&bytes[..some]);
    }
}
