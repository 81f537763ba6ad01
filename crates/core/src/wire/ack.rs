//! The frame that acknowledges pushes and initial values: one for as many requests as are due.
//!
//! The first request is in the header; the payload has the others, eight little-endian bytes each.

use super::{Header, Kind, WireError};
use crate::role::{Body, Frame};

/// Requests that one frame acknowledges at most.
pub const MAX_REQUESTS: usize = 4096;
/// The longest payload.
pub const MAX_BYTES: usize = (MAX_REQUESTS - 1) * 8;

/// Acknowledges some requests: one at least, [`MAX_REQUESTS`] at most.
pub fn frame(requests: &[u64]) -> Frame {
    assert!((1..=MAX_REQUESTS).contains(&requests.len()), "an acknowledgement is of something");
    let mut header = Header::new(Kind::PushAck);
    header.request = requests[0];
    header.payload_bytes = (requests.len() - 1) as u32 * 8;
    let others: Vec<u8> = requests[1..].iter().flat_map(|request| request.to_le_bytes()).collect();
    Frame { header, body: if others.is_empty() { Body::Empty } else { Body::Bytes(others) } }
}

/// The requests that a frame acknowledges.
pub fn requests<'a>(header: &Header, payload: &'a [u8]) -> Result<impl Iterator<Item = u64> + 'a, WireError> {
    let (others, rest) = payload.as_chunks::<8>();
    if !rest.is_empty() {
        let why = format!("{} bytes are no list of requests", payload.len());
        return Err(WireError::Payload { what: "acknowledgement", why });
    }
    Ok(std::iter::once(header.request).chain(others.iter().map(|bytes| u64::from_le_bytes(*bytes))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_survive_the_wire(numbers in prop::collection::vec(any::<u64>(), 1..50)) {
            let Frame { header, body } = frame(&numbers);
            let payload = body.bytes().unwrap();
            prop_assert_eq!(payload.len(), header.payload_bytes as usize);
            prop_assert_eq!(requests(&header, payload).unwrap().collect::<Vec<_>>(), numbers);
        }

        #[test]
        fn any_bytes_are_a_list_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let listed = requests(&Header::new(Kind::PushAck), &bytes).map(Iterator::count).ok();
            prop_assert_eq!(listed, bytes.len().is_multiple_of(8).then_some(1 + bytes.len() / 8));
        }
    }
}
