//! Counts of what goes over the wires of a bench.

use paramill_core::types::NodeId;
use paramill_core::wire::Kind;
use paramill_sim::actor::Actor;
use paramill_sim::rule::FrameView;
use paramill_sim::world::Observer;

/// What was sent so far.
#[derive(Default)]
pub(crate) struct Tally {
    /// Payload bytes of gradients that shards were sent.
    pub(crate) pushed_bytes: u64,
    /// Frames of each kind.
    sent: [usize; 16],
    /// The bytes of their payloads.
    bytes: [usize; 16],
}

impl Tally {
    /// Frames of a kind that were sent.
    pub(crate) fn frames(&self, kind: Kind) -> usize {
        self.sent[kind as usize]
    }

    /// Bytes of the payloads of a kind that were sent.
    pub(crate) fn payload_bytes(&self, kind: Kind) -> usize {
        self.bytes[kind as usize]
    }
}

impl Observer<Actor> for Tally {
    fn on_sent(&mut self, frame: &FrameView<'_>, _role: &Actor) -> Result<(), String> {
        self.sent[frame.header.kind as usize] += 1;
        self.bytes[frame.header.kind as usize] += frame.header.payload_bytes as usize;
        Ok(())
    }

    fn on_delivered(&mut self, frame: &FrameView<'_>, _role: &Actor) -> Result<(), String> {
        if matches!(frame.to, NodeId::Shard(_)) && frame.header.kind == Kind::Push {
            self.pushed_bytes += u64::from(frame.header.payload_bytes);
        }
        Ok(())
    }
}
