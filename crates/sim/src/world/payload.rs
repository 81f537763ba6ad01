//! The bytes of frames that are under way.

use paramill_core::role::{Body, Role};
use std::sync::Arc;

/// Buffers that are kept for copies to come.
const SPARE_BUFFERS: usize = 1024;
/// Copies of what a role stores that are remembered until its next event.
const REMEMBERED: usize = 8;

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
        if !matches!(body, Body::Stored { .. }) {
            return Payload::Body(body);
        }
        if let Some((_, bytes)) = self.recent.iter().find(|(known, _)| *known == body) {
            return Payload::Copy(bytes.clone());
        }
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.extend_from_slice(role.payload(&body));
        let bytes = Arc::new(bytes);
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
