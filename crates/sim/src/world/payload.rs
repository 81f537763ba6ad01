//! The bytes of frames that are under way.

use paramill_core::role::{Body, Role};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Buffers that are kept for copies to come.
const SPARE_BUFFERS: usize = 1024;
/// Copies of what roles store that are remembered.
const REMEMBERED: usize = 1024;

/// Gradients of at most so many bytes are copied, as a socket does. Longer ones stay where they are, as in memory that
/// both ends share, and cost no time.
const COPIED_BYTES: usize = 1024;

/// The bytes of a frame that its sender's link has taken.
#[derive(Debug)]
pub(super) enum Payload {
    /// The frame has them itself, as in memory that both ends share.
    Body(Body),
    /// What the role stores, as it was when the link took it. Frames with the same bytes share a copy.
    Copy(Arc<Vec<u8>>),
}

impl Payload {
    pub(super) fn empty() -> Payload {
        Payload::Body(Body::Empty)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Payload::Body(body) => body.bytes().expect("what a role stores is copied"),
            Payload::Copy(bytes) => bytes,
        }
    }
}

/// Takes copies of what roles store, and keeps their memory.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// The last copy of what a node stores at a place, by node, buffer and first byte. The next receiver shares it if the
    /// bytes are still the same.
    recent: BTreeMap<(usize, u64, usize), Arc<Vec<u8>>>,
    spare: Vec<Vec<u8>>,
}

impl Copies {
    /// The bytes of a frame of this node as they are now.
    pub(super) fn take(&mut self, node: usize, role: &impl Role, body: Body) -> Payload {
        match &body {
            Body::Stored { buffer, start, .. } => {
                let bytes = role.payload(&body);
                let place = (node, *buffer, *start);
                if let Some(known) = self.recent.get(&place).filter(|known| known.as_slice() == bytes) {
                    return Payload::Copy(known.clone());
                }
                let copy = self.copy(bytes);
                self.remember(place, &copy);
                Payload::Copy(copy)
            }
            Body::Shared { len, .. } if *len <= COPIED_BYTES => Payload::Copy(self.copy(role.payload(&body))),
            Body::Shared { .. } | Body::Empty | Body::Bytes(_) | Body::Counted(_) | Body::Logged(_) => {
                Payload::Body(body)
            }
        }
    }

    fn copy(&mut self, bytes: &[u8]) -> Arc<Vec<u8>> {
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.extend_from_slice(bytes);
        Arc::new(copy)
    }

    fn remember(&mut self, place: (usize, u64, usize), copy: &Arc<Vec<u8>>) {
        if self.recent.len() == REMEMBERED && !self.recent.contains_key(&place) {
            self.recent.pop_first();
        }
        if let Some(before) = self.recent.insert(place, copy.clone()) {
            self.recycle(Payload::Copy(before));
        }
    }

    /// A frame was read.
    pub(super) fn recycle(&mut self, payload: Payload) {
        if let Payload::Copy(bytes) = payload
            && self.spare.len() < SPARE_BUFFERS
            && let Some(mut bytes) = Arc::into_inner(bytes)
        {
            bytes.clear();
            self.spare.push(bytes);
        }
    }
}
