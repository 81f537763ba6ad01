//! The bytes of frames that are under way.

use paramill_core::role::{Body, Role};
use std::sync::Arc;

/// Buffers that are kept for copies to come.
const SPARE_BUFFERS: usize = 1024;
/// Copies of what a role stores that are remembered until its next event.
const REMEMBERED: usize = 8;

/// Gradients of at most so many bytes are copied, as a socket does. Longer ones stay where they are, as in memory that
/// both ends share, and cost no time.
const COPIED_BYTES: usize = 1024;

/// The bytes of a frame that its sender's link has taken.
#[derive(Debug)]
pub(super) enum Payload {
    /// The frame has them itself, as in memory that both ends share.
    Body(Body),
    /// What the role stores, as it was when the link took it. Frames that were taken at one time share a copy.
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
    recent: Vec<(Body, Arc<Vec<u8>>)>,
    spare: Vec<Vec<u8>>,
}

impl Copies {
    /// The bytes of a frame as they are now.
    pub(super) fn take(&mut self, role: &impl Role, body: Body) -> Payload {
        let is_taken = match &body {
            Body::Stored { .. } => true,
            Body::Shared { len, .. } => *len <= COPIED_BYTES,
            Body::Empty | Body::Bytes(_) => false,
        };
        if !is_taken {
            return Payload::Body(body);
        }
        let is_stored = matches!(body, Body::Stored { .. });
        let mut recent = self.recent.iter().filter(|_| is_stored);
        if let Some((_, bytes)) = recent.find(|(known, _)| *known == body) {
            return Payload::Copy(bytes.clone());
        }
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.extend_from_slice(role.payload(&body));
        let bytes = Arc::new(bytes);
        if !is_stored {
            return Payload::Copy(bytes);
        }
        if self.recent.len() == REMEMBERED {
            self.recent.swap_remove(0);
        }
        self.recent.push((body, bytes.clone()));
        Payload::Copy(bytes)
    }

    /// A role is about to change what it stores.
    pub(super) fn forget(&mut self) {
        self.recent.clear();
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
