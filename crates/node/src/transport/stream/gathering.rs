//! Many frames in one write, large payloads straight from where they live.

use crate::transport::queue::{padding, payload_of, refresh};
use paramill_core::role::{Body, Role};
use paramill_core::send_queue::SendQueue;
use paramill_core::wire::{HEADER_BYTES, padded};
use std::io::{self, IoSlice, Write};

/// A payload of up to so many bytes is copied beside its header: a slice of its own would cost more.
const STAGED_PAYLOAD: usize = 4096;
/// Frames gathered into one `writev`: two slices each, below the kernel's 1024.
const GATHER_FRAMES: usize = 256;
/// No more are gathered than these bytes need. A socket hardly takes more at once, and what it leaves is gathered again.
const GATHER_BYTES: usize = 1 << 19;

/// How far the first frame that waits is written, and memory that is kept from write to write.
#[derive(Debug, Default)]
pub(super) struct Gatherer {
    /// The rest of a frame that the pipe took only in part, and that its role stores.
    rest: Vec<u8>,
    rest_sent: usize,
    /// Bytes of the first frame that waits which are sent. Its payload does not change.
    first_sent: usize,
    staged: Vec<u8>,
    cuts: Vec<Option<usize>>,
    slices: Vec<IoSlice<'static>>,
}

impl Gatherer {
    /// Whether nothing waits to be written.
    pub(super) fn is_done(&self, queue: &SendQueue) -> bool {
        queue.is_empty() && self.rest_sent == self.rest.len()
    }

    /// Writes once: the rest of a frame, or many frames.
    pub(super) fn write(
        &mut self,
        pipe: &mut impl Write,
        queue: &mut SendQueue,
        role: Option<&dyn Role>,
    ) -> io::Result<()> {
        if self.rest_sent < self.rest.len() {
            self.rest_sent += pipe.write(&self.rest[self.rest_sent..])?;
            return Ok(());
        }
        self.stage(queue, role);
        let written = self.write_staged(pipe, queue, role)?;
        let sent = self.count_sent(self.first_sent + written, queue, role);
        queue.remove(sent);
        if self.first_sent > 0 {
            queue.hold_first();
        }
        Ok(())
    }

    /// Makes headers, and copies small payloads beside them.
    fn stage(&mut self, queue: &mut SendQueue, role: Option<&dyn Role>) {
        self.staged.clear();
        self.cuts.clear();
        let mut gathered = 0;
        for frame in queue.iter_mut().take(GATHER_FRAMES) {
            if gathered >= GATHER_BYTES {
                break;
            }
            gathered += frame.header.payload_bytes as usize;
            refresh(role, frame);
            self.staged.extend_from_slice(&frame.header.encode());
            let payload = payload_of(role, frame);
            let is_staged = payload.len() <= STAGED_PAYLOAD;
            if is_staged {
                self.staged.extend_from_slice(payload);
            }
            let cut = self.staged.len();
            self.staged.extend_from_slice(padding(payload.len()));
            // A small payload is between header and padding already; a large one goes there.
            self.cuts.push((!is_staged).then_some(cut));
        }
    }

    fn write_staged(
        &mut self,
        pipe: &mut impl Write,
        queue: &SendQueue,
        role: Option<&dyn Role>,
    ) -> io::Result<usize> {
        let mut slices = recycled(std::mem::take(&mut self.slices));
        let mut begin = 0;
        for (frame, cut) in queue.iter().zip(&self.cuts) {
            if let Some(cut) = *cut {
                slices.push(IoSlice::new(&self.staged[begin..cut]));
                slices.push(IoSlice::new(payload_of(role, frame)));
                begin = cut;
            }
        }
        slices.push(IoSlice::new(&self.staged[begin..]));
        let mut unsent = &mut slices[..];
        IoSlice::advance_slices(&mut unsent, self.first_sent);
        let written = pipe.write_vectored(unsent);
        self.slices = recycled(slices);
        written
    }

    /// How many frames need not be looked at again, when `left` bytes from the beginning of the first one are written.
    fn count_sent(&mut self, mut left: usize, queue: &SendQueue, role: Option<&dyn Role>) -> usize {
        self.first_sent = 0;
        let mut sent = 0;
        self.rest.clear();
        self.rest_sent = 0;
        for frame in queue.iter().take(self.cuts.len()) {
            let total = HEADER_BYTES + padded(frame.header.payload_bytes as usize);
            if left == 0 {
                break;
            }
            if left < total && !matches!(frame.body, Body::Stored { .. }) {
                self.first_sent = left;
                break;
            }
            sent += 1;
            if left < total {
                // The bytes of one frame are taken between two events: what is left of it is copied now.
                let payload = payload_of(role, frame);
                for piece in [&frame.header.encode()[..], payload, padding(payload.len())] {
                    let skip = left.min(piece.len());
                    self.rest.extend_from_slice(&piece[skip..]);
                    left -= skip;
                }
                break;
            }
            left -= total;
        }
        sent
    }
}

/// The memory of an empty list of slices, for slices of another lifetime.
fn recycled<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    slices.into_iter().map(|_| IoSlice::new(&[])).collect()
}
